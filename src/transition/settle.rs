//! Settle deliveries: what became of leased events, told by the holder of their lease (P3, P4, P6).

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use super::claim::{Leased, LeasedEvent};
use crate::boundary::{Batch, Decision, LaneRows, Query, Rows, Transition};
use crate::checked::Checked;
use crate::ids::{EventId, LaneKey, Reason};
use crate::lane::{LaneEdit, LeaseRef, Stale, StaleLease};
use crate::policy::{DeliveryPolicy, WhenDead};
use crate::table::{DeliveryState, Key, LaneRow, OutboxRow, Record};
use crate::time::Millis;

/// What became of the events under a lease, made by [`Leased::settle`]: so many of the first were
/// confirmed, one may have ended otherwise, and the others were not published.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Settlement {
    lease: LeaseRef,
    /// How many events are confirmed, and the last one's sequence, or that of the one confirmed
    /// before the lease.
    count: usize,
    confirmed: u64,
    /// Unsettled starts of the first event that was not confirmed.
    starts: u32,
    ended: Option<Box<(LeasedEvent, Ending)>>,
    /// What comes next in the lane, as far as the claim saw: its sequence and due time.
    next: (u64, Option<Millis>),
}

/// Why an event was not confirmed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ending {
    /// The publish failed, or nobody knows whether it did: count it and try again after a backoff.
    Failed(Reason),
    /// The broker will never take it: it is dead at once (F14).
    Rejected(Reason),
    /// The consumer asks to have it again later: it is due after the first backoff, and nothing is
    /// counted (F9).
    Deferred(Reason),
    /// The broker cannot be reached: this counts against no event (F15), which comes again behind
    /// others that are due (F27).
    Unavailable(Reason),
}

impl Settlement {
    pub(super) fn of(leased: &Leased, confirmed: usize, ending: Option<Ending>) -> Self {
        let (done, rest) = leased.events.split_at(confirmed.min(leased.events.len()));
        let (ended, rest) = match (ending, rest) {
            (Some(ending), [first, rest @ ..]) => (Some(Box::new((first.clone(), ending))), rest),
            (_, rest) => (None, rest),
        };
        let last = leased.events.last().map_or(leased.confirmed, LeasedEvent::sequence);
        debug_assert_eq!(
            done.len() + usize::from(ended.is_some()) + rest.len(),
            leased.events.len(),
            "each event under the lease is settled or released"
        );
        Self {
            lease: leased.lease.clone(),
            count: done.len(),
            confirmed: done.last().map_or(leased.confirmed, LeasedEvent::sequence),
            starts: if done.is_empty() { leased.starts } else { 1 },
            ended,
            next: rest.first().map_or((last + 1, None), |next| (next.sequence(), Some(next.due))),
        }
    }

    /// The lease under which this was done.
    #[must_use]
    pub const fn lease(&self) -> &LeaseRef {
        &self.lease
    }

    /// How many events are confirmed.
    #[must_use]
    pub const fn confirmed(&self) -> usize {
        self.count
    }

    /// The event that ended otherwise, and how.
    #[must_use]
    pub fn ended(&self) -> Option<(&EventId, &Ending)> {
        self.ended.as_deref().map(|(event, ending)| (&event.message.event.id, ending))
    }

    /// What becomes of the lane, and of the event that was not confirmed.
    fn edit(&self, policy: &DeliveryPolicy, now: Millis) -> (LaneEdit, Option<OutboxRow>) {
        let (next, due) = (self.next.0, self.next.1.unwrap_or(now));
        let confirmed = self.confirmed;
        let Some((event, ending)) = self.ended.as_deref() else {
            // Nothing was answered for the first one, and nothing is counted.
            let starts = if self.count == 0 { self.starts.saturating_sub(1) } else { 0 };
            return (LaneEdit::Free { head: next, confirmed, starts, due, blocked_by: None }, None);
        };
        let row = self.ended_row(policy, now, event, ending);
        let dead = matches!(row.state, DeliveryState::Dead(_));
        let (head, due) = if dead { (event.sequence() + 1, due) } else { (row.sequence, row.due) };
        let blocks = dead && policy.when_dead == WhenDead::Block;
        let blocked_by = blocks.then(|| event.message.event.id.clone());
        debug_assert!(dead || row.sequence == event.sequence(), "only a redrive moves an event");
        (LaneEdit::Free { head, confirmed, starts: 0, due, blocked_by }, Some(row))
    }

    /// Whether the lease is current, and the store still has what it covers.
    fn stands(&self, lane: Option<&LaneRow>, rows: &Rows, edit: &LaneEdit) -> Result<(), Stale> {
        let lane = lane.ok_or(Stale::NoLane)?;
        lane.admits(&self.lease, edit)?;
        let Some((event, _)) = self.ended.as_deref() else { return Ok(()) };
        // Under a current lease nobody else writes this row, so the guard holds, unless the store
        // has lost it: then it would never hold.
        let found = rows.outbox(&event.message.event.id).map(|(_, revision)| revision);
        if found == event.revision() { Ok(()) } else { Err(Stale::Lost) }
    }

    /// Settles it under a lease that is current.
    fn apply(
        &self,
        (edit, row): (LaneEdit, Option<OutboxRow>),
        now: Millis,
        changes: &mut Changes,
    ) {
        changes.settled.confirmed += self.count;
        if let (Some((event, ending)), Some(row)) = (self.ended.as_deref(), row) {
            let id = &event.message.event.id;
            match ending {
                _ if matches!(row.state, DeliveryState::Dead(_)) => {
                    changes.settled.dead.push((id.clone(), self.lease.lane.clone()));
                }
                Ending::Failed(_) | Ending::Rejected(_) => changes.settled.retried += 1,
                Ending::Deferred(_) | Ending::Unavailable(_) => changes.settled.released += 1,
            }
            changes.rows.put(event.revision(), Record::Outbox(id.clone(), row));
        }
        let LeaseRef { lane, token } = self.lease.clone();
        changes.lanes.edit(lane, token, edit, now);
    }

    /// The row of the event that was not confirmed.
    fn ended_row(
        &self,
        policy: &DeliveryPolicy,
        now: Millis,
        event: &LeasedEvent,
        ending: &Ending,
    ) -> OutboxRow {
        let id = &event.message.event.id;
        let mut row = event.row();
        let (starts, failures) =
            (row.starts.saturating_add(self.starts), row.failures.saturating_add(1));
        let (Ending::Failed(reason)
        | Ending::Rejected(reason)
        | Ending::Deferred(reason)
        | Ending::Unavailable(reason)) = ending;
        row.reason = Some(reason.clone());
        match ending {
            Ending::Deferred(_) => {
                row.starts = starts.saturating_sub(1);
                row.due = now + policy.backoff(id, 1);
            }
            // It comes behind what waits already, so that the next try is another one's (F27).
            Ending::Unavailable(_) => {
                row.starts = starts.saturating_sub(1);
                row.due = row.due.max(now);
            }
            Ending::Failed(_) if failures < policy.max_failures && starts < policy.max_starts => {
                (row.starts, row.failures) = (starts, failures);
                row.due = now + policy.backoff(id, failures);
            }
            Ending::Failed(_) | Ending::Rejected(_) => {
                (row.starts, row.failures) = (starts, failures);
                row.state = DeliveryState::Dead(now);
            }
        }
        row
    }
}

/// What a settlement changes, by table.
struct Changes {
    rows: Batch,
    lanes: Batch,
    settled: Settled,
}

impl Changes {
    /// With room for so many lanes.
    fn of(lanes: usize) -> Self {
        let lanes = Batch::with_capacity(lanes);
        Self { rows: Batch::new(), lanes, settled: Settled::default() }
    }

    fn decision(mut self) -> Decision<Settled> {
        self.rows.append(self.lanes);
        Decision::new(self.rows, self.settled).may_be_lost()
    }
}

/// Settles deliveries, each lane under its own lease.
///
/// | the lease is | the event is            | what is written                                             | outcome |
/// |--------------|-------------------------|-------------------------------------------------------------|---------|
/// | current      | confirmed               | the lane moves past it                                      | counted in [`Settled::confirmed`] |
/// | current      | failed, failures left   | failures grow, it is due after a backoff                    | counted in [`Settled::retried`] |
/// | current      | failed once too often, failed with no start left, or rejected | it is dead; the lane is blocked or moves past it | in [`Settled::dead`] |
/// | current      | deferred                | its reason, it is due after the first backoff; nothing is counted | counted in [`Settled::released`] |
/// | current      | unavailable             | its reason, it is due now, behind what waits already (F27); nothing is counted | counted in [`Settled::released`] |
/// | current      | not named               | nothing; the lane is free                                   | (none) |
/// | not current  | anything                | nothing                                                     | in [`Settled::stale`], with the reason |
/// | current, but the store has lost what it covers | anything | nothing                                  | in [`Settled::stale`], [`Stale::Lost`] |
///
/// A stale lease does not hold up the others of the same settle.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Settle<'a> {
    policy: &'a Checked<DeliveryPolicy>,
    settlements: Vec<Settlement>,
}

impl<'a> Settle<'a> {
    /// Settles these; of two for one lane the later one is stale, unless the first was.
    #[must_use]
    pub fn new(
        policy: &'a Checked<DeliveryPolicy>,
        settlements: impl IntoIterator<Item = Settlement>,
    ) -> Self {
        let mut settlements: Vec<Settlement> = settlements.into_iter().collect();
        settlements.sort_by(|a, b| a.lease.lane.cmp(&b.lease.lane));
        Self { policy, settlements }
    }
}

/// What was settled.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[must_use]
pub struct Settled {
    /// How many events are confirmed.
    pub confirmed: usize,
    /// How many failed and will be tried again.
    pub retried: usize,
    /// How many were deferred, or could not be published since the broker was not there.
    pub released: usize,
    /// The events that are dead now, each with its lane.
    pub dead: Vec<(EventId, LaneKey)>,
    /// The leases that were not current: nothing changed under them, and others deliver those
    /// events.
    pub stale: Vec<StaleLease>,
}

impl Transition for Settle<'_> {
    type Outcome = Settled;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        let ended = self.settlements.iter().filter_map(Settlement::ended);
        let rows = ended.map(|(id, _)| Key::Outbox(id.clone()));
        let lanes = self.settlements.iter().map(|next| Key::Lane(next.lease.lane.clone()));
        Query::rows(rows.chain(lanes))
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Settled>, Self::Refusal> {
        let mut changes = Changes::of(self.settlements.len());
        let mut lanes = LaneRows::of(rows);
        let mut done: Option<&LeaseRef> = None;
        for settlement in &self.settlements {
            let lease = &settlement.lease;
            let again = done.is_some_and(|done| done.lane == lease.lane);
            let edit = settlement.edit(self.policy, now);
            match settlement.stands(lanes.seek(&lease.lane), rows, &edit.0) {
                Ok(()) if !again => {
                    settlement.apply(edit, now, &mut changes);
                    done = Some(lease);
                }
                Ok(()) => changes.settled.stale.push(lease.stale(Stale::Ended)),
                Err(why) => changes.settled.stale.push(lease.stale(why)),
            }
        }
        Ok(changes.decision())
    }

    /// That all leases are current.
    fn assume(&self, now: Millis) -> Option<Decision<Settled>> {
        let twice =
            self.settlements.windows(2).any(|pair| pair[0].lease.lane == pair[1].lease.lane);
        let mut changes = Changes::of(self.settlements.len());
        for settlement in &self.settlements {
            settlement.apply(settlement.edit(self.policy, now), now, &mut changes);
        }
        (!twice).then(|| changes.decision())
    }
}

/// The question for the lanes of some leases.
fn lanes_of<'a>(leases: impl Iterator<Item = &'a LeaseRef>) -> Query {
    Query::rows(leases.map(|lease| Key::Lane(lease.lane.clone())))
}

/// The row of a lane, if this lease of it is current.
fn current<'a>(lanes: &mut LaneRows<'a>, lease: &LeaseRef) -> Result<&'a LaneRow, Stale> {
    let row = lanes.seek(&lease.lane).ok_or(Stale::NoLane)?;
    row.current(lease).map(|_| row)
}

impl LeaseRef {
    fn stale(&self, why: Stale) -> StaleLease {
        StaleLease { lease: self.clone(), why }
    }
}

/// Makes leases last longer, before they run out (F3).
///
/// | the lease is | what is written         | outcome |
/// |--------------|-------------------------|---------|
/// | current      | it lasts until `lease` from now, never shorter than before | in [`Renewed::leases`] |
/// | not current  | nothing                 | in [`Renewed::stale`]: stop publishing under it |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Renew {
    leases: Vec<LeaseRef>,
    lease: Duration,
}

impl Renew {
    /// Renews these leases until `lease` from now.
    #[must_use]
    pub fn new(leases: impl IntoIterator<Item = LeaseRef>, lease: Duration) -> Self {
        let mut leases: Vec<LeaseRef> = leases.into_iter().collect();
        leases.sort_unstable();
        leases.dedup();
        Self { leases, lease }
    }

    fn renew(&self, until: Millis, now: Millis, lease: &LeaseRef, batch: &mut Batch) {
        let LeaseRef { lane, token } = lease.clone();
        batch.edit(lane, token, LaneEdit::Renew { until }, now);
    }
}

/// What was renewed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[must_use]
pub struct Renewed {
    /// The leases that last longer now, each with the time until which it lasts at least.
    pub leases: Vec<(LeaseRef, Millis)>,
    /// The leases that were not current.
    pub stale: Vec<StaleLease>,
}

impl Transition for Renew {
    type Outcome = Renewed;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        lanes_of(self.leases.iter())
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Renewed>, Self::Refusal> {
        let mut batch = Batch::with_capacity(self.leases.len());
        let leases = Vec::with_capacity(self.leases.len());
        let mut renewed = Renewed { leases, stale: Vec::new() };
        let mut lanes = LaneRows::of(rows);
        for lease in &self.leases {
            match current(&mut lanes, lease) {
                Err(why) => renewed.stale.push(lease.stale(why)),
                Ok(row) => {
                    let until = row.lease.as_ref().map_or(now, |lease| lease.until);
                    let until = until.max(now + self.lease);
                    self.renew(until, now, lease, &mut batch);
                    renewed.leases.push((lease.clone(), until));
                }
            }
        }
        Ok(Decision::new(batch, renewed).may_be_lost())
    }

    /// That all leases are current.
    fn assume(&self, now: Millis) -> Option<Decision<Renewed>> {
        let until = now + self.lease;
        let mut batch = Batch::with_capacity(self.leases.len());
        self.leases.iter().for_each(|lease| self.renew(until, now, lease, &mut batch));
        let leases = self.leases.iter().map(|lease| (lease.clone(), until)).collect();
        let twice = self.leases.windows(2).any(|pair| pair[0].lane == pair[1].lane);
        let renewed = Renewed { leases, stale: Vec::new() };
        (!twice).then(|| Decision::new(batch, renewed).may_be_lost())
    }
}
