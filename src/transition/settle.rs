//! Settle deliveries: what became of the publishes of a run, told by the holder of its lease (P3,
//! P4, P6).

use alloc::vec::Vec;
use core::time::Duration;

use super::lane::{LeaseRef, Stale, StaleLease};
use crate::boundary::{Batch, Decision, LaneView, Query, Rows, Transition, seek};
use crate::checked::Checked;
use crate::ids::{EventId, Reason};
use crate::policy::{DeliveryPolicy, WhenDead};
use crate::table::{DeliveryState, LaneRow, OutboxRow, Record};
use crate::time::Millis;

/// What became of a run: the events that were confirmed, in order, and what ended it before its
/// end, if something did. What is named by neither was not published, and is released.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RunResult {
    /// The lease that the claim gave.
    pub lease: LeaseRef,
    /// The events that the broker has, from the first of the run on.
    pub confirmed: Vec<EventId>,
    /// The event that was not confirmed, and why.
    pub ended: Option<(EventId, Ending)>,
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
    /// The broker cannot be reached: this counts against no event (F15).
    Unavailable(Reason),
}

impl RunResult {
    /// Nothing was published: the lease is given back, as a relay does when it stops (F12).
    #[must_use]
    pub const fn released(lease: LeaseRef) -> Self {
        Self { lease, confirmed: Vec::new(), ended: None }
    }
}

/// Settles runs, each under its own lease.
///
/// | the lease is | the event is            | what is written                                             | outcome |
/// |--------------|-------------------------|-------------------------------------------------------------|---------|
/// | current      | confirmed               | the event is confirmed; the lane is free for the next one   | counted in [`Settled::confirmed`] |
/// | current      | failed, failures left   | failures grow, it is due after a backoff                    | counted in [`Settled::retried`] |
/// | current      | failed once too often, or rejected | it is dead; the lane is blocked or goes on       | in [`Settled::dead`] |
/// | current      | deferred                | its reason, it is due after the first backoff; nothing is counted | counted in [`Settled::released`] |
/// | current      | unavailable             | its reason; nothing is counted                              | counted in [`Settled::released`] |
/// | current      | not named               | nothing; the lane is free                                   | (none) |
/// | not current  | anything                | nothing                                                     | in [`Settled::stale`], with the reason |
///
/// A stale run does not hold up the others of the same settle.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Settle<'a> {
    policy: &'a Checked<DeliveryPolicy>,
    results: Vec<RunResult>,
}

impl<'a> Settle<'a> {
    /// Settles these runs; of two results for one lane the later one is stale, unless the first
    /// was.
    #[must_use]
    pub fn new(
        policy: &'a Checked<DeliveryPolicy>,
        results: impl IntoIterator<Item = RunResult>,
    ) -> Self {
        let mut results: Vec<RunResult> = results.into_iter().collect();
        results.sort_by(|a, b| a.lease.lane.cmp(&b.lease.lane));
        Self { policy, results }
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
    /// The events that are dead now.
    pub dead: Vec<EventId>,
    /// The leases that were not current: their runs changed nothing, and others deliver those
    /// events.
    pub stale: Vec<StaleLease>,
}

impl Transition for Settle<'_> {
    type Outcome = Settled;
    type Refusal = core::convert::Infallible;

    fn may_be_lost(&self) -> bool {
        true
    }

    fn query(&self, _now: Millis) -> Query {
        Query::Lanes(by_lane(self.results.iter().map(|result| {
            let named = result.confirmed.len() + usize::from(result.ended.is_some());
            (&result.lease, named + 1)
        })))
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Settled>, Self::Refusal> {
        let (mut batch, mut freed) =
            (Batch::with_capacity(rows.as_slice().len()), Batch::with_capacity(self.results.len()));
        let mut settled = Settled::default();
        let mut lanes = rows.lanes().peekable();
        let mut done: Option<&LeaseRef> = None;
        for result in &self.results {
            let checked = match seek(&mut lanes, &result.lease.lane) {
                None => Err(Stale::NoLane),
                Some(_) if done.is_some_and(|lease| lease.lane == result.lease.lane) => {
                    Err(Stale::Ended)
                }
                Some(lane) => check(lane, result).map(|()| lane),
            };
            match checked {
                Ok(lane) => {
                    let row = self.settle_run(now, lane, result, &mut batch, &mut settled);
                    freed.update(lane.revision, Record::Lane(lane.key.clone(), row));
                    done = Some(&result.lease);
                }
                Err(why) => settled.stale.push(StaleLease { lease: result.lease.clone(), why }),
            }
        }
        batch.append(freed);
        Ok(Decision::new(batch, settled))
    }
}

/// The question for the lanes of some leases, each with its first pending events.
fn by_lane<'a>(
    leases: impl Iterator<Item = (&'a LeaseRef, usize)>,
) -> Vec<(crate::ids::OrderingKey, usize)> {
    let mut lanes: Vec<_> = leases.map(|(lease, events)| (lease.lane.clone(), events)).collect();
    lanes.sort_unstable_by(|a, b| {
        (&a.0, core::cmp::Reverse(a.1)).cmp(&(&b.0, core::cmp::Reverse(b.1)))
    });
    lanes.dedup_by(|a, b| a.0 == b.0);
    lanes
}

/// Whether the result was made under the current lease, for the events that it covers in their
/// order.
fn check(lane: LaneView<'_>, result: &RunResult) -> Result<(), Stale> {
    let lease = lane.row.current(&result.lease)?;
    let named = result.confirmed.iter().chain(result.ended.iter().map(|(event, _)| event));
    let mut pending = lane.pending().take_while(|(_, row, _)| row.sequence <= lease.through);
    for event in named {
        if pending.next().is_none_or(|(id, _, _)| id != event) {
            return Err(Stale::NotCovered { event: event.clone() });
        }
    }
    Ok(())
}

impl Settle<'_> {
    /// Settles a run and gives the row of its lane.
    fn settle_run(
        &self,
        now: Millis,
        lane: LaneView<'_>,
        result: &RunResult,
        batch: &mut Batch,
        settled: &mut Settled,
    ) -> LaneRow {
        let mut row = lane.row.clone();
        let mut pending = lane.pending();
        // The starts of the first event so far are counted in the lane, with the one that is
        // settled now.
        let mut starts = row.starts;
        for _ in &result.confirmed {
            let Some((id, event, revision)) = pending.next() else { break };
            row.confirmed = event.sequence;
            let event = OutboxRow {
                starts: event.starts.saturating_add(starts),
                state: DeliveryState::Confirmed(now),
                ..event.clone()
            };
            batch.update(revision, Record::Outbox(id.clone(), event));
            settled.confirmed += 1;
            (starts, row.starts) = (1, 0);
        }
        let ended =
            result.ended.as_ref().and_then(|(_, ending)| pending.next().map(|head| (head, ending)));
        let head_due = match ended {
            None => {
                if result.confirmed.is_empty() {
                    row.starts = row.starts.saturating_sub(1);
                }
                pending.next().map(|(_, next, _)| next.due)
            }
            Some(((id, event, revision), ending)) => {
                let mut event = event.clone();
                let failures = event.failures.saturating_add(1);
                let head_due = match ending {
                    Ending::Deferred(reason) | Ending::Unavailable(reason) => {
                        event.starts = event.starts.saturating_add(starts.saturating_sub(1));
                        event.reason = Some(reason.clone());
                        if let Ending::Deferred(_) = ending {
                            event.due = now + self.policy.backoff(id, 1);
                        }
                        settled.released += 1;
                        Some(event.due)
                    }
                    Ending::Failed(reason) if failures < self.policy.max_failures => {
                        event.starts = event.starts.saturating_add(starts);
                        event.failures = failures;
                        event.due = now + self.policy.backoff(id, failures);
                        event.reason = Some(reason.clone());
                        settled.retried += 1;
                        Some(event.due)
                    }
                    Ending::Failed(reason) | Ending::Rejected(reason) => {
                        event.starts = event.starts.saturating_add(starts);
                        event.failures = failures;
                        event.state = DeliveryState::Dead(now);
                        event.reason = Some(reason.clone());
                        settled.dead.push(id.clone());
                        if self.policy.when_dead == WhenDead::Block {
                            row.blocked_by = Some(id.clone());
                        }
                        pending.next().map(|(_, next, _)| next.due)
                    }
                };
                row.starts = 0;
                batch.update(revision, Record::Outbox(id.clone(), event));
                head_due
            }
        };
        row.free(now, head_due);
        row
    }
}

/// Makes leases last longer, before they run out (F3).
///
/// | the lease is | what is written         | outcome |
/// |--------------|-------------------------|---------|
/// | current      | it lasts until `lease` from now, never shorter than before | in [`Renewed::leases`] |
/// | not current  | nothing                 | in [`Renewed::stale`]: stop publishing that run |
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
}

/// What was renewed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[must_use]
pub struct Renewed {
    /// The leases that last longer now, each with its new end.
    pub leases: Vec<(LeaseRef, Millis)>,
    /// The leases that were not current.
    pub stale: Vec<StaleLease>,
}

impl Transition for Renew {
    type Outcome = Renewed;
    type Refusal = core::convert::Infallible;

    fn may_be_lost(&self) -> bool {
        true
    }

    fn query(&self, _now: Millis) -> Query {
        Query::Lanes(by_lane(self.leases.iter().map(|lease| (lease, 0))))
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Renewed>, Self::Refusal> {
        let mut batch = Batch::with_capacity(self.leases.len());
        let mut renewed = Renewed::default();
        let mut lanes = rows.lanes().peekable();
        for lease in &self.leases {
            let lane = seek(&mut lanes, &lease.lane).ok_or(Stale::NoLane);
            match lane.and_then(|lane| Ok((lane, lane.row.current(lease)?))) {
                Err(why) => renewed.stale.push(StaleLease { lease: lease.clone(), why }),
                Ok((lane, current)) => {
                    let until = current.until.max(now + self.lease);
                    let mut row = lane.row.clone();
                    row.due = Some(until);
                    row.lease = Some(crate::table::Lease { until, ..current.clone() });
                    batch.update(lane.revision, Record::Lane(lease.lane.clone(), row));
                    renewed.leases.push((lease.clone(), until));
                }
            }
        }
        Ok(Decision::new(batch, renewed))
    }
}
