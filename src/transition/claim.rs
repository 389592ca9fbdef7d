//! Claim the next deliveries: lease the first pending events of lanes that are due (P3, P4, P6).

use alloc::vec::Vec;
use core::time::Duration;

use super::lane::{LeaseRef, Place};
use crate::boundary::{Batch, Decision, LaneView, Query, Rows, Transition};
use crate::checked::Checked;
use crate::ids::{EventId, Invalid, Owner, Reason};
use crate::policy::{DeliveryPolicy, WhenDead};
use crate::table::{DeliveryState, Lease, OutboxRow, Record, Revision};
use crate::time::Millis;

/// Leases events that are due to an owner, lane by lane, those first that have been due longest.
///
/// | the lane is                                          | what is written                            | outcome |
/// |------------------------------------------------------|--------------------------------------------|---------|
/// | due, its first event has starts left                 | the lane: lease, token and starts grow     | a [`Run`] of the events that are due, at most `run` |
/// | the same, after a lease that nobody settled          | the same                                   | a run of its first event only, to find out which one it is |
/// | the same, after two of them, or with one start left  | the same                                   | such a run, and no other in this claim: [`Run::alone`] |
/// | due, its first event has no start left (F4)          | the event is dead; the lane is blocked or goes on | the event is in [`Claimed::dead`] |
/// | due, its first event is due later or there is none    | the lane, which is due when its first event is | not in the outcome |
/// | not due, blocked, empty, or leased until later       | nothing                                    | not in the outcome |
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
        Ok(Self { policy, owner, lease, limit, run: limit.min(16) })
    }

    /// With at most `run` events of one lane, 1 or more: they are published one after the other,
    /// under one lease.
    #[must_use]
    pub fn run(mut self, run: usize) -> Self {
        self.run = run.clamp(1, self.limit);
        self
    }
}

/// One event to be published.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Delivery {
    /// Which event. Its envelope and payload are a row of their own, to be read with
    /// [`Query::rows`].
    pub event: EventId,
    /// Where it stands in its lane.
    pub place: Place,
    /// Which start of a publish this is, from 1.
    pub attempt: u32,
}

/// Events of one lane, to be published one after the other; if one fails, those behind it are not
/// published.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// What to settle them with.
    pub lease: LeaseRef,
    /// When another may take the lane.
    pub until: Millis,
    /// Publish nothing else at the same time, and claim nothing: what was started with it before
    /// was never settled, so one of them may bring the process down, and only alone it does not
    /// take others along to their last start (F4).
    pub alone: bool,
    /// The events, one at least.
    pub deliveries: Vec<Delivery>,
}

/// What a claim got.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[must_use]
pub struct Claimed {
    /// What is to be published, by lane.
    pub runs: Vec<Run>,
    /// Events that were given up, since they had no start left.
    pub dead: Vec<EventId>,
    /// When there will be more to claim, as far as it is known now: at once if the limit was
    /// reached, or a lane gave nothing.
    pub next_due: Option<Millis>,
}

impl Transition for Claim<'_> {
    type Outcome = Claimed;
    type Refusal = core::convert::Infallible;

    fn may_be_lost(&self) -> bool {
        true
    }

    fn query(&self, now: Millis) -> Query {
        Query::Due { now, lanes: self.limit, run: self.seen(), events: self.limit.max(self.seen()) }
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Claimed>, Self::Refusal> {
        let lanes = rows.lanes().count();
        let mut batch = Batch::with_capacity(lanes);
        let mut claimed =
            Claimed { runs: Vec::with_capacity(lanes), dead: Vec::new(), next_due: None };
        let mut left = self.limit;
        let mut later = None;
        let (mut idle, mut alone) = (false, false);
        for lane in rows.lanes() {
            if left == 0 || lane.row.due.is_none_or(|due| due > now) {
                later = lane.row.due;
                break;
            }
            // What is to be tried alone has a claim of its own.
            alone = self.is_alone(lane);
            if alone && !claimed.runs.is_empty() {
                break;
            }
            let events = self.claim_lane(now, left, lane, &mut batch, &mut claimed);
            left -= events;
            idle |= events == 0;
            if alone && events > 0 {
                break;
            }
        }
        // A lane that gave nothing took the place of another one in the answer, and may be due
        // again itself.
        let more = left == 0 || idle || alone || (later.is_none() && self.is_cut(rows));
        claimed.next_due = if more { Some(now) } else { later };
        Ok(Decision::new(batch, claimed))
    }
}

impl Claim<'_> {
    /// How many events of a lane are looked at: the second one too if only one is wanted, since it
    /// comes next if the first is given up.
    fn seen(&self) -> usize {
        self.run.max(2)
    }

    /// Whether the answer may have left out lanes that are due, since it has enough events. That it
    /// has enough lanes is no other case: one event of each comes to the limit.
    fn is_cut(&self, rows: &Rows) -> bool {
        rows.as_slice().len() - rows.lanes().count() >= self.limit.max(self.seen())
    }

    /// Whether the first event of a lane was started so often without an answer that it is to be
    /// tried alone.
    fn is_alone(&self, lane: LaneView<'_>) -> bool {
        let starts = lane.row.starts;
        let settled = lane.pending().next().map_or(0, |(_, head, _)| head.starts);
        starts >= 2 || (starts == 1 && settled.saturating_add(2) >= self.policy.max_starts)
    }

    /// Claims the first events of a lane and says how many.
    fn claim_lane(
        &self,
        now: Millis,
        left: usize,
        lane: LaneView<'_>,
        batch: &mut Batch,
        claimed: &mut Claimed,
    ) -> usize {
        let mut row = lane.row.clone();
        let mut pending = lane.pending();
        let events = match pending.next() {
            Some((id, head, revision))
                if head.starts.saturating_add(row.starts) >= self.policy.max_starts =>
            {
                self.bury(now, (id, head, revision), lane, batch);
                claimed.dead.push(id.clone());
                row.starts = 0;
                if self.policy.when_dead == WhenDead::Block {
                    row.blocked_by = Some(id.clone());
                }
                row.free(now, pending.next().map(|(_, next, _)| next.due));
                0
            }
            Some((_, head, _)) if head.due > now => {
                row.free(now, Some(head.due));
                0
            }
            Some(_) => {
                let longest = if row.starts == 0 { self.run } else { 1 };
                row.token = row.token.wrapping_add(1);
                row.starts = row.starts.saturating_add(1);
                let until = now + self.lease;
                let mut after = row.confirmed;
                let mut deliveries = Vec::new();
                for (id, event, _) in lane
                    .pending()
                    .take(longest.min(left))
                    .take_while(|(_, event, _)| event.due <= now)
                {
                    let attempt = event.starts.saturating_add(if deliveries.is_empty() {
                        row.starts
                    } else {
                        1
                    });
                    let place = Place { begun: row.begun, sequence: event.sequence, after };
                    deliveries.push(Delivery { event: id.clone(), place, attempt });
                    after = event.sequence;
                }
                row.lease = Some(Lease { owner: self.owner.clone(), until, through: after });
                row.due = Some(until);
                let events = deliveries.len();
                let lease = LeaseRef { lane: lane.key.clone(), token: row.token };
                claimed.runs.push(Run { lease, until, alone: self.is_alone(lane), deliveries });
                events
            }
            None => {
                row.free(now, None);
                0
            }
        };
        batch.update(lane.revision, Record::Lane(lane.key.clone(), row));
        events
    }

    fn bury(
        &self,
        now: Millis,
        head: (&EventId, &OutboxRow, Revision),
        lane: LaneView<'_>,
        batch: &mut Batch,
    ) {
        let (id, row, revision) = head;
        let starts = row.starts.saturating_add(lane.row.starts);
        let reason = Reason::new(format_args!(
            "started {starts} times, the last {} without an answer: it may bring the relay down",
            lane.row.starts
        ));
        let row = OutboxRow {
            starts,
            state: DeliveryState::Dead(now),
            reason: Some(reason),
            ..row.clone()
        };
        batch.update(revision, Record::Outbox(id.clone(), row));
    }
}
