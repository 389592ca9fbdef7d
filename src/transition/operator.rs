//! What an operator does about events: cancel what is not delivered yet, redrive or discard what is
//! dead (P3, P4).
//!
//! All three take events by id, and answer for each of them; what cannot be done to one does not
//! hold up the others.

use alloc::vec::Vec;
use core::time::Duration;

use thiserror::Error;

use crate::boundary::{Batch, Decision, Delivery, Lane, Query, Rows, Transition, seek};
use crate::ids::{EventId, Invalid, Reason};
use crate::retention::RedriveWindow;
use crate::table::{DeliveryState, EventState, LaneRow, OutboxRow, Record};
use crate::time::Millis;

/// What was done, event by event.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
#[must_use]
pub struct Operated {
    /// The events that were changed.
    pub done: Vec<EventId>,
    /// The events that were not, each with the reason.
    pub refused: Vec<(EventId, NotDone)>,
}

/// Why an event was not changed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Error)]
#[non_exhaustive]
pub enum NotDone {
    /// There is no such event, or it was purged.
    #[error("there is no such event in the outbox")]
    NoEvent,
    /// It is being delivered.
    #[error("it is being delivered just now; try again when the lease of its lane has ended")]
    Leased,
    /// It is in a state in which this cannot be done.
    #[error("it is {}, and this can be done only to events that are {wanted}", state.name())]
    State {
        /// Its delivery state.
        state: EventState,
        /// The state that it would have to be in.
        wanted: &'static str,
    },
    /// Consumers may have forgotten that they have applied it (F10).
    #[error(
        "it was committed {} s ago and consumers remember events for {} s: one that has applied it may do so again; \
         make sure that none has, and force it", age.as_secs(), window.as_secs()
    )]
    PastWindow {
        /// How long ago it was committed.
        age: Duration,
        /// How long consumers remember.
        window: Duration,
    },
}

/// Events by id: sorted, each once, 1 to 256.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Targets(Vec<EventId>);

impl Targets {
    const MAX: usize = 256;

    fn new(events: impl IntoIterator<Item = EventId>) -> Result<Self, Invalid> {
        let mut events: Vec<EventId> = events.into_iter().collect();
        events.sort_unstable();
        events.dedup();
        if events.is_empty() || events.len() > Self::MAX {
            let (max, value) = (Self::MAX as u64, events.len() as u64);
            return Err(Invalid::OutOfRange { field: "the number of events", min: 1, max, value });
        }
        Ok(Self(events))
    }

    fn query(&self) -> Query {
        // Each target may be the first of its lane, so one more shows what comes after all of them.
        Query::Deliveries { events: self.0.clone(), run: self.0.len() + 1 }
    }

    /// Changes the targets one by one, in the order of their lanes and sequences, then the lanes
    /// that they stand in.
    ///
    /// A lane's row is written whenever one of its events is, so that whoever claims the lane at
    /// the same time meets the guard.
    fn change(&self, now: Millis, rows: &Rows, change: impl Change) -> Decision<Operated> {
        let (mut batch, mut lanes) = (Batch::new(), Batch::new());
        let mut operated = Operated::default();
        let mut found = rows.deliveries.iter().map(|delivery| &delivery.id).peekable();
        let missing = self.0.iter().filter(|id| found.next_if_eq(id).is_none());
        operated.refused.extend(missing.map(|id| (id.clone(), NotDone::NoEvent)));
        let mut targets: Vec<&Delivery> = rows.deliveries.iter().collect();
        targets.sort_unstable_by_key(|next| (&next.row.lane, next.row.sequence, &next.id));
        let mut views = rows.lanes.iter().peekable();
        // The events of a lane that were changed, and of them those that are pending now.
        let (mut changed, mut pending) = (Vec::new(), Vec::new());
        for targets in targets.chunk_by(|a, b| a.row.lane == b.row.lane) {
            // A lane is there for as long as one of its events is.
            let Some(view) = seek(&mut views, &targets[0].row.lane) else { continue };
            let mut lane = view.row.clone();
            changed.clear();
            pending.clear();
            for target in targets {
                let mut row = target.row.clone();
                match change(&target.id, view.state(&row), &mut row, &mut lane) {
                    Err(why) => operated.refused.push((target.id.clone(), why)),
                    Ok(()) => {
                        if row.state == DeliveryState::Pending {
                            pending.push((row.sequence, row.due, &target.id));
                        }
                        changed.push(&target.id);
                        batch.put(target.revision, Record::Outbox(target.id.clone(), row));
                    }
                }
            }
            if changed.is_empty() {
                continue;
            }
            if lane.lease.is_none() {
                put_first(now, view, &mut lane, &mut changed, &pending);
            }
            operated.done.extend(changed.iter().copied().cloned());
            lanes.update(view.revision, Record::Lane(view.key.clone(), lane));
        }
        batch.append(lanes);
        operated.done.sort_unstable();
        operated.refused.sort_by(|(a, _), (b, _)| a.cmp(b));
        Decision::new(batch, operated)
    }
}

/// What is done to an event that stands so: its row in the outbox and that of its lane.
trait Change: Fn(&EventId, EventState, &mut OutboxRow, &mut LaneRow) -> Result<(), NotDone> {}
impl<F> Change for F where
    F: Fn(&EventId, EventState, &mut OutboxRow, &mut LaneRow) -> Result<(), NotDone>
{
}

/// The first pending event of a lane may be another one now: one that was there and was not
/// changed, or one that is pending since it was.
fn put_first(
    now: Millis,
    view: &Lane,
    lane: &mut LaneRow,
    changed: &mut [&EventId],
    pending: &[(u64, Millis, &EventId)],
) {
    changed.sort_unstable();
    let kept = view.pending.iter().find(|next| changed.binary_search(&&next.id).is_err());
    let kept = kept.map(|next| (next.row.sequence, next.row.due, &next.id));
    let first = pending.iter().copied().chain(kept).min();
    if first.map(|(_, _, id)| id) != view.pending.first().map(|next| &next.id) {
        lane.starts = 0;
    }
    let (head, due) = first.map_or((lane.next, now), |(sequence, due, _)| (sequence, due));
    lane.free(now, head, due);
}

/// Cancels events that are not delivered yet; their lane goes on without them.
///
/// | the event is                 | what is written              | outcome |
/// |------------------------------|------------------------------|---------|
/// | pending, not leased          | it is cancelled; its lane    | in [`Operated::done`] |
/// | pending, covered by a lease  | nothing                      | [`NotDone::Leased`]: it may be published already |
/// | anything else                | nothing                      | [`NotDone::State`] |
/// | not there                    | nothing                      | [`NotDone::NoEvent`] |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Cancel {
    targets: Targets,
    reason: Reason,
}

impl Cancel {
    /// Cancels 1 to 256 events, for a reason that stays on record.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if there are none or too many.
    pub fn new(events: impl IntoIterator<Item = EventId>, reason: Reason) -> Result<Self, Invalid> {
        Ok(Self { targets: Targets::new(events)?, reason })
    }
}

impl Transition for Cancel {
    type Outcome = Operated;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        self.targets.query()
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Operated>, Self::Refusal> {
        Ok(self.targets.change(now, rows, |_, state, row, _| match state {
            EventState::Leased => Err(NotDone::Leased),
            EventState::Pending => {
                row.state = DeliveryState::Cancelled(now);
                row.reason = Some(self.reason.clone());
                Ok(())
            }
            EventState::Confirmed
            | EventState::Dead(_)
            | EventState::Discarded(_)
            | EventState::Cancelled(_) => Err(NotDone::State { state, wanted: "pending" }),
        }))
    }
}

/// Gives dead events new starts and failures, and makes them due at once.
///
/// | the event is                               | what is written                                  | outcome |
/// |--------------------------------------------|--------------------------------------------------|---------|
/// | dead, and its lane waits for it            | it is pending at its old place; the lane goes on | in [`Operated::done`] |
/// | dead, and its lane has gone on             | it is pending at the end of the lane             | in [`Operated::done`] |
/// | dead, committed longer ago than the window | nothing, unless forced (F10)                     | [`NotDone::PastWindow`] |
/// | anything else                              | nothing                                          | [`NotDone::State`] |
/// | not there                                  | nothing                                          | [`NotDone::NoEvent`] |
///
/// A dead event may have been published: it keeps its id, so that consumers who remember it skip it
/// (P5).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Redrive {
    targets: Targets,
    window: RedriveWindow,
    force: bool,
}

impl Redrive {
    /// Redrives 1 to 256 events, if they were committed within `window`: the
    /// [`redrive_window`](crate::Checked::redrive_window) of the consumer that forgets first.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if there are no events or too many.
    pub fn new(
        events: impl IntoIterator<Item = EventId>,
        window: RedriveWindow,
    ) -> Result<Self, Invalid> {
        Ok(Self { targets: Targets::new(events)?, window, force: false })
    }

    /// Also redrives what consumers may have forgotten. A consumer that has applied such an event
    /// applies it again.
    #[must_use]
    pub fn force(mut self) -> Self {
        self.force = true;
        self
    }
}

impl Transition for Redrive {
    type Outcome = Operated;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        self.targets.query()
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Operated>, Self::Refusal> {
        Ok(self.targets.change(now, rows, |id, state, row, lane| {
            let DeliveryState::Dead(_) = row.state else {
                return Err(NotDone::State { state, wanted: "dead" });
            };
            let age = now.since(row.committed_at);
            let window = self.window.get();
            if age >= window && !self.force {
                return Err(NotDone::PastWindow { age, window });
            }
            if lane.blocked_by.as_ref() == Some(id) {
                lane.blocked_by = None;
            } else {
                row.sequence = lane.append(now, now);
                row.moved = true;
            }
            (row.state, row.due, row.starts, row.failures) = (DeliveryState::Pending, now, 0, 0);
            Ok(())
        }))
    }
}

/// Gives up dead events for good, for a reason that stays on record.
///
/// | the event is    | what is written                                         | outcome |
/// |-----------------|---------------------------------------------------------|---------|
/// | dead            | it is discarded; if its lane waits for it, it goes on   | in [`Operated::done`] |
/// | anything else   | nothing                                                 | [`NotDone::State`] |
/// | not there       | nothing                                                 | [`NotDone::NoEvent`] |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Discard {
    targets: Targets,
    reason: Reason,
}

impl Discard {
    /// Discards 1 to 256 events.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if there are no events or too many.
    pub fn new(events: impl IntoIterator<Item = EventId>, reason: Reason) -> Result<Self, Invalid> {
        Ok(Self { targets: Targets::new(events)?, reason })
    }
}

impl Transition for Discard {
    type Outcome = Operated;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        self.targets.query()
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Operated>, Self::Refusal> {
        Ok(self.targets.change(now, rows, |id, state, row, lane| {
            let DeliveryState::Dead(_) = row.state else {
                return Err(NotDone::State { state, wanted: "dead" });
            };
            if lane.blocked_by.as_ref() == Some(id) {
                lane.blocked_by = None;
            }
            row.state = DeliveryState::Discarded(now);
            row.reason = Some(match &row.reason {
                None => self.reason.clone(),
                Some(dead) => {
                    Reason::new(format_args!("{}; it was dead because: {dead}", self.reason))
                }
            });
            Ok(())
        }))
    }
}

/// Lets lanes go on without the dead events that they wait for, as if the rule had been
/// [`WhenDead::Continue`](crate::WhenDead::Continue) when these died. The events stay dead.
///
/// | the event is                    | what is written    | outcome |
/// |---------------------------------|--------------------|---------|
/// | dead, and its lane waits for it | the lane goes on   | in [`Operated::done`] |
/// | anything else                   | nothing            | [`NotDone::State`] |
/// | not there                       | nothing            | [`NotDone::NoEvent`] |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PassOver {
    targets: Targets,
}

impl PassOver {
    /// Passes over 1 to 256 events.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if there are no events or too many.
    pub fn new(events: impl IntoIterator<Item = EventId>) -> Result<Self, Invalid> {
        Ok(Self { targets: Targets::new(events)? })
    }
}

impl Transition for PassOver {
    type Outcome = Operated;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        self.targets.query()
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Operated>, Self::Refusal> {
        Ok(self.targets.change(now, rows, |id, state, _, lane| {
            if lane.blocked_by.as_ref() != Some(id) {
                return Err(NotDone::State { state, wanted: "what their lane waits for" });
            }
            lane.blocked_by = None;
            Ok(())
        }))
    }
}
