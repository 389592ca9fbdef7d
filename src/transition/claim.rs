//! Claim the next deliveries: lease the first pending events of lanes that are due (P3, P4, P6).

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;

use super::settle::{Ending, Settlement};
use crate::boundary::{
    Batch, Decision, Delivery, Destinations, Due, Lane, Query, Rows, Transition,
};
use crate::checked::Checked;
use crate::ids::{Destination, EventId, Invalid, LaneKey, Owner, Reason};
use crate::lane::LeaseRef;
use crate::message::{LanePlace, Message};
use crate::policy::{DeliveryPolicy, WhenDead};
use crate::table::{DeliveryState, LaneRow, Lease, OutboxRow, Record, Revision};
use crate::time::Millis;

/// Leases events that are due to an owner, lane by lane, those first that have been due longest.
///
/// | the lane is                                          | what is written                            | outcome |
/// |------------------------------------------------------|--------------------------------------------|---------|
/// | due, its first event has starts left                 | the lane: lease, token and starts grow     | [`Leased`]: the events that are due, at most `run` |
/// | the same, after a lease that nobody settled          | the same; the lease lasts twice as long for each of them (F30) | its first event only, to find out which one it is |
/// | the same, after two of them, or with one start left  | the same                                   | the same, and no other in this claim: [`Leased::alone`] |
/// | due, its first event has no start left, and the last one was not answered (F4) | the event is dead; the lane is blocked or goes on | the event is in [`Claimed::dead`] |
/// | due, its first event is due later or there is none    | the lane, which is due when its first event is | not in the outcome |
/// | not due, blocked, empty, or leased until later       | nothing                                    | not in the outcome |
/// | due, and the answer has no envelope of its first event | nothing                                  | not in the outcome |
///
/// What is confirmed, waits behind another event, or is due later is not looked at, so it costs
/// nothing (one later lane is read to say when to come again).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Claim<'a> {
    policy: &'a Checked<DeliveryPolicy>,
    owner: Owner,
    lease: Duration,
    limit: usize,
    run: usize,
    bytes: usize,
    floor: Millis,
    destinations: Destinations,
}

impl<'a> Claim<'a> {
    /// The largest number of events of one claim.
    pub const MAX: usize = 4096;

    /// Claims at most `limit` events (1 to [`Claim::MAX`]) for `owner`, who has until `lease` from
    /// now to settle them. At most 16 of them come from one lane; see [`Claim::run`].
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the limit is out of range, or the lease is shorter than a millisecond or
    /// longer than the policy's longest backoff.
    pub fn new(
        policy: &'a Checked<DeliveryPolicy>,
        owner: Owner,
        lease: Duration,
        limit: usize,
    ) -> Result<Self, Invalid> {
        if limit == 0 || limit > Self::MAX {
            return Err(Invalid::OutOfRange {
                field: "limit",
                min: 1,
                max: Self::MAX as u64,
                value: limit as u64,
            });
        }
        if lease < Duration::from_millis(1) {
            let reason = alloc::format!("it is {lease:?}, it must last for 1 ms at least").into();
            return Err(Invalid::Unsafe { field: "lease", reason });
        }
        policy.check_lease(lease)?;
        let (run, bytes) = (limit.min(16), usize::MAX);
        let (floor, destinations) = (Millis::new(0), Destinations::ALL);
        Ok(Self { policy, owner, lease, limit, run, bytes, floor, destinations })
    }

    /// With at most `run` events of one lane, 1 or more: they are published one after the other,
    /// under one lease.
    #[must_use]
    pub fn run(mut self, run: usize) -> Self {
        self.run = run.clamp(1, self.limit);
        self
    }

    /// Takes no more events once their bodies have come to so many bytes; one event is claimed in
    /// any case.
    #[must_use]
    pub const fn bytes(mut self, bytes: usize) -> Self {
        // A store answers nothing to a question that has enough at once.
        self.bytes = if bytes == 0 { 1 } else { bytes };
        self
    }

    /// Looks only at lanes that are due at or after this time. Claim without it from time to time:
    /// what was committed late, or by another clock, lies before.
    #[must_use]
    pub const fn floor(mut self, floor: Millis) -> Self {
        self.floor = floor;
        self
    }

    /// Leaves out the lanes of these destinations, at no cost, however many wait there.
    #[must_use]
    pub fn except(mut self, destinations: impl IntoIterator<Item = Destination>) -> Self {
        self.destinations = Destinations::except(destinations);
        self
    }

    /// Looks only at lanes of this destination; of this and [`Claim::except`], the last one counts.
    #[must_use]
    pub fn only(mut self, destination: Destination) -> Self {
        self.destinations = Destinations::Only(destination);
        self
    }
}

/// An event to be published, and how it stood when it was claimed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LeasedEvent {
    /// What is to be published.
    pub message: Message,
    pub(super) due: Millis,
    /// Its row in the outbox, which few events have.
    pub(super) outbox: Option<Box<(OutboxRow, Revision)>>,
}

impl LeasedEvent {
    /// Its row in the outbox, or what it would be.
    pub(super) fn row(&self) -> OutboxRow {
        let untouched = || OutboxRow::new(&self.message.event, self.sequence(), self.due);
        self.outbox.as_ref().map_or_else(untouched, |stored| stored.0.clone())
    }

    pub(super) fn revision(&self) -> Option<Revision> {
        self.outbox.as_ref().map(|stored| stored.1)
    }

    pub(super) const fn sequence(&self) -> u64 {
        self.message.place.sequence
    }
}

/// Events of one lane under a lease, to be published one after the other; if one fails, those
/// behind it are not published.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Leased {
    /// What proves that they are ours.
    pub lease: LeaseRef,
    /// When another may take the lane.
    pub until: Millis,
    /// Publish nothing else at the same time, and claim nothing: what was started with it before
    /// was never settled, so one of them may bring the process down, and only alone it does not
    /// take others along to their last start (F4).
    pub alone: bool,
    /// The events, one at least.
    pub events: Vec<LeasedEvent>,
    /// How often the first one was started without having been settled, with this start.
    pub(super) starts: u32,
    /// The event of the lane that was confirmed last.
    pub(super) confirmed: u64,
}

impl Leased {
    /// What became of them: the first `confirmed` ones are confirmed, and `ending` befell the one
    /// behind these. What comes after it was not published, and is released.
    #[must_use]
    pub fn settle(&self, confirmed: usize, ending: Option<Ending>) -> Settlement {
        Settlement::of(self, confirmed, ending)
    }

    /// None of them was published: the lease is given back, as a relay does when it stops (F12).
    #[must_use]
    pub fn release(&self) -> Settlement {
        self.settle(0, None)
    }
}

/// What a claim got.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
#[must_use]
pub struct Claimed {
    /// What is to be published, by lane.
    pub leased: Vec<Leased>,
    /// Events that were given up, since they had no start left, each with its lane.
    pub dead: Vec<(EventId, LaneKey)>,
    /// When there will be more to claim, as far as it is known now: at once if the limit was
    /// reached, or a lane gave nothing.
    pub next_due: Option<Millis>,
}

impl Transition for Claim<'_> {
    type Outcome = Claimed;
    type Refusal = core::convert::Infallible;

    fn query(&self, now: Millis) -> Query {
        let Self { limit, run, bytes, floor, .. } = *self;
        let destinations = self.destinations.clone();
        Query::Due(Due { now, floor, destinations, lanes: limit, run, events: limit, bytes })
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Claimed>, Self::Refusal> {
        let mut batch = Batch::with_capacity(rows.lanes.len());
        let leased = Vec::with_capacity(rows.lanes.len());
        let mut claimed = Claimed { leased, dead: Vec::new(), next_due: None };
        let mut left = self.limit;
        let mut later = None;
        let mut more = self.is_cut(now, rows);
        for lane in &rows.lanes {
            if left == 0 || lane.row.due.is_none_or(|due| due > now) {
                later = lane.row.due;
                break;
            }
            // A store that answers without envelopes breaks its contract: a lease would cover
            // nothing that can be published.
            if lane.pending.first().is_some_and(|head| head.event.is_none()) {
                continue;
            }
            // What is to be tried alone has a claim of its own.
            let alone = self.is_alone(lane);
            if alone && !claimed.leased.is_empty() {
                more = true;
                break;
            }
            let mut row = lane.row.clone();
            let got = self.claim_lane(now, left, lane, &mut row, &mut batch, &mut claimed);
            debug_assert!(got <= left, "no more is claimed than was asked for");
            debug_assert_eq!(got > 0, row.lease.is_some(), "a lane is leased for its events alone");
            batch.update(lane.revision, Record::Lane(lane.key.clone(), row));
            left -= got;
            // A lane that gave nothing took the place of another one in the answer, and may be due
            // again itself.
            more |= got == 0 || alone;
            if alone && got > 0 {
                break;
            }
        }
        claimed.next_due = if more || left == 0 { Some(now) } else { later };
        Ok(Decision::new(batch, claimed).may_be_lost())
    }
}

impl Claim<'_> {
    /// Whether the answer may have left out lanes that are due, since it has enough.
    fn is_cut(&self, now: Millis, rows: &Rows) -> bool {
        // A lane that is due later comes only behind all that are due.
        if rows.lanes.last().is_some_and(|last| last.row.due.is_none_or(|due| due > now)) {
            return false;
        }
        let mut events = rows.lanes.iter().flat_map(|lane| &lane.pending);
        let bytes = |delivery: &Delivery| {
            delivery.event.as_ref().map_or(0, |event| event.body.bytes().len())
        };
        let (count, bytes) = events
            .by_ref()
            .fold((0, 0_usize), |(n, sum), next| (n + 1, sum.saturating_add(bytes(next))));
        count >= self.limit || bytes >= self.bytes || rows.lanes.len() >= self.limit
    }

    /// Whether the first event of a lane was started so often without an answer that it is to be
    /// tried alone.
    fn is_alone(&self, lane: &Lane) -> bool {
        let starts = lane.row.starts;
        let settled = lane.pending.first().map_or(0, |head| head.row.starts);
        starts >= 2 || (starts == 1 && settled.saturating_add(2) >= self.policy.max_starts)
    }

    /// Claims the first events of a lane and says how many.
    fn claim_lane(
        &self,
        now: Millis,
        left: usize,
        lane: &Lane,
        row: &mut LaneRow,
        batch: &mut Batch,
        claimed: &mut Claimed,
    ) -> usize {
        let Some(head) = lane.pending.first() else {
            row.free(now, row.next, now);
            return 0;
        };
        // What was answered last is tried once more, whatever the limit has become since (F44).
        let starts = head.row.starts.saturating_add(row.starts);
        if row.starts > 0 && starts >= self.policy.max_starts {
            batch.put(head.revision, self.buried(now, head, row.starts));
            claimed.dead.push((head.id.clone(), lane.key.clone()));
            row.starts = 0;
            if self.policy.when_dead == WhenDead::Block {
                row.blocked_by = Some(head.id.clone());
            }
            let due = lane.pending.get(1).map_or(now, |second| second.row.due);
            row.free(now, head.row.sequence + 1, due);
            return 0;
        }
        if head.row.due > now {
            row.free(now, head.row.sequence, head.row.due);
            return 0;
        }
        let leased = self.leased(now, left, lane, row);
        let got = leased.events.len();
        claimed.leased.push(leased);
        got
    }

    /// Leases the first events of a lane that are due.
    fn leased(&self, now: Millis, left: usize, lane: &Lane, row: &mut LaneRow) -> Leased {
        let longest = if row.starts == 0 { self.run } else { 1 };
        let lease = self.lease_after(lane, row.starts);
        // A claim may be lost after its commit, and whoever holds its lease may not know: the token
        // must not come again with the next claim (P6).
        row.token = (row.token + 1).max(now.get());
        row.starts = row.starts.saturating_add(1);
        let mut after = row.confirmed;
        let mut events = Vec::with_capacity(longest.min(left).min(lane.pending.len()));
        let due =
            lane.pending.iter().take(longest.min(left)).take_while(|next| next.row.due <= now);
        for next in due {
            let unsettled = if events.is_empty() { row.starts } else { 1 };
            let attempt = next.row.starts.saturating_add(unsettled);
            let place = LanePlace { begun: row.begun, sequence: next.row.sequence, after };
            // As far as there are envelopes.
            let Some(event) = next.event.clone() else { break };
            let message = Message { event, place, attempt };
            let outbox = next.revision.map(|revision| Box::new((next.row.clone(), revision)));
            events.push(LeasedEvent { message, due: next.row.due, outbox });
            after = next.row.sequence;
        }
        debug_assert!(!events.is_empty(), "a lease covers an event");
        debug_assert!(row.token > lane.row.token, "a token never comes again");
        let until = now + lease;
        row.head = events.first().map_or(row.head, LeasedEvent::sequence);
        row.lease = Some(Lease { owner: self.owner.clone(), until, through: after });
        row.due = Some(until);
        Leased {
            lease: LeaseRef { lane: lane.key.clone(), token: row.token },
            until,
            alone: self.is_alone(lane),
            events,
            starts: row.starts,
            confirmed: row.confirmed,
        }
    }

    /// How long a lease lasts after so many starts in a row that nobody answered: it may have been
    /// too short for whoever published under it, so it doubles with each of them, and the last
    /// start has as long as any lease may last. What is answered within that is never given up for
    /// want of an answer, however short the lease is (F30).
    fn lease_after(&self, lane: &Lane, unsettled: u32) -> Duration {
        let longest = self.policy.backoff_cap;
        let settled = lane.pending.first().map_or(0, |head| head.row.starts);
        let starts = settled.saturating_add(unsettled).saturating_add(1);
        if unsettled > 0 && starts >= self.policy.max_starts {
            return longest;
        }
        let doubled = 1_u32.checked_shl(unsettled).unwrap_or(u32::MAX);
        self.lease.saturating_mul(doubled).min(longest)
    }

    /// The row of an event that has no start left.
    fn buried(&self, now: Millis, head: &Delivery, unsettled: u32) -> Record {
        let starts = head.row.starts.saturating_add(unsettled);
        let reason = Reason::new(format_args!(
            "started {starts} times, the last {unsettled} without an answer: it may bring the \
             relay down"
        ));
        let state = DeliveryState::Dead(now);
        let row = OutboxRow { starts, state, reason: Some(reason), ..head.row.clone() };
        Record::Outbox(head.id.clone(), row)
    }
}
