//! What a relay holds: lanes under a lease, and how far each has come.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::time::Duration;

use super::machine::Ticket;
use crate::ids::{EventId, LaneKey};
use crate::lane::LeaseRef;
use crate::time::{Millis, Moment};
use crate::transition::claim::Leased;
use crate::transition::settle::{Ending, Settlement};

/// A lane under a lease: the first events are confirmed, the next one may be on its way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Held {
    leased: Leased,
    confirmed: usize,
    /// The publish that is under way.
    publishing: Option<Call>,
    term: Term,
}

/// What is to be settled, and when its lease ends.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Ended {
    pub(super) settlement: Settlement,
    pub(super) term: Term,
}

/// When a lease ends, by both clocks: the relay goes by its own uptime, others by the time of day
/// that the store has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Term {
    asked: Duration,
    ends: Duration,
    renews: Duration,
    stamped: Stamped,
}

/// The end of a lease as the store has it, and when half of it is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Stamped {
    ends: Millis,
    renews: Millis,
}

impl Term {
    /// Of a lease for which the store was asked at this uptime, and that it has until `ends`.
    pub(super) fn new(asked: Duration, lease: Duration, ends: Millis) -> Self {
        // What ends at the end of time does not end.
        let renews = if ends == Millis::MAX { ends } else { ends.before(lease / 2) };
        Self {
            asked,
            ends: asked.saturating_add(lease),
            renews: asked.saturating_add(lease / 2),
            stamped: Stamped { ends, renews },
        }
    }

    /// For how long it has been held, if that is so long that it has run out.
    pub(super) fn outlived(&self, uptime: Duration) -> Option<Duration> {
        self.has_passed(uptime).then(|| uptime.saturating_sub(self.asked))
    }

    /// Whether so much time has passed that it has run out.
    pub(super) fn has_passed(&self, uptime: Duration) -> bool {
        uptime >= self.ends
    }

    /// Whether it has run out by either clock: then another may have taken the lane.
    pub(super) fn is_over(&self, now: Moment) -> bool {
        self.has_passed(now.uptime) || over(self.stamped.ends, now.wall)
    }

    /// Whether half of it is over by either clock: so a clock that was set ahead lets nobody take
    /// the lane (F37).
    fn is_half_over(&self, now: Moment) -> bool {
        now.uptime >= self.renews || over(self.stamped.renews, now.wall)
    }
}

fn over(at: Millis, wall: Millis) -> bool {
    wall >= at && at < Millis::MAX
}

/// A call of the publisher: its slot, and by which uptime it must have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Call {
    pub(super) slot: usize,
    pub(super) deadline: Duration,
}

/// All lanes that a relay holds. What is asked for often is counted, so that no answer costs a walk
/// over the window.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Lanes {
    /// Boxed, since a map has room for several at once.
    held: BTreeMap<LaneKey, Box<Held>>,
    /// Lanes of which nothing is being published, and something waits.
    ready: BTreeSet<LaneKey>,
    /// How many leases are to be renewed at each uptime, and at each time of day.
    renewals: Times<Duration>,
    stamped_renewals: Times<Millis>,
    /// How many publishes must have ended at each uptime, and how many are under way.
    deadlines: Times<Duration>,
    publishing: usize,
    events: usize,
    bytes: usize,
    alone: usize,
}

impl Lanes {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// How many events are held, and how many bytes of bodies.
    pub(super) fn size(&self) -> (usize, usize) {
        (self.events, self.bytes)
    }

    /// How many publishes are under way under these leases.
    pub(super) fn publishing(&self) -> usize {
        self.publishing
    }

    /// How many lanes wait to be published, but for those that `skip` says.
    pub(super) fn ready(&self, skip: &BTreeSet<LaneKey>) -> usize {
        self.ready.len() - skip.intersection(&self.ready).count()
    }

    /// When the next publish is overdue.
    pub(super) fn overdue_at(&self) -> Option<Duration> {
        self.deadlines.first()
    }

    /// The lanes whose publishes are overdue.
    pub(super) fn overdue(&self, now: Duration) -> Vec<LaneKey> {
        if self.overdue_at().is_none_or(|at| at > now) {
            return Vec::new();
        }
        let overdue = |held: &Held| held.publishing.is_some_and(|call| call.deadline <= now);
        let lanes = self.held.iter().filter(|(_, held)| overdue(held));
        lanes.map(|(lane, _)| lane.clone()).collect()
    }

    /// Whether one of them is to be published with nothing beside it (F4).
    pub(super) fn alone(&self) -> bool {
        self.alone > 0
    }

    /// When the next lease is to be renewed, if the clock is not set.
    pub(super) fn renew_at(&self) -> Option<Duration> {
        self.renewals.first()
    }

    /// The leases that are to be renewed by now.
    pub(super) fn to_renew(&self, now: Moment) -> Vec<LeaseRef> {
        let stamped = self.stamped_renewals.first();
        if self.renew_at().is_none_or(|at| at > now.uptime)
            && stamped.is_none_or(|at| !over(at, now.wall))
        {
            return Vec::new();
        }
        let due = self.held.values().filter(|held| held.term.is_half_over(now));
        due.map(|held| held.leased.lease.clone()).collect()
    }

    /// Whether what is counted goes with what is held; each lane that is held is ready or publishes,
    /// until it is ended.
    fn adds_up(&self) -> bool {
        let (held, ready) = (self.held.len(), self.ready.len());
        let none = (self.events, self.bytes, self.publishing(), self.alone) == (0, 0, 0, 0);
        self.renewals.count() == held
            && self.stamped_renewals.count() == held
            && ready + self.publishing() <= held
            && self.alone <= held
            && (held > 0 || none)
    }

    /// Holds a lane. If it was held already, its old lease is lost: whether something was being
    /// published under it, and what.
    pub(super) fn hold(&mut self, leased: Leased, term: Term) -> Option<Publishing> {
        let lane = leased.lease.lane.clone();
        let lost = self.lose(&lane);
        self.events += leased.events.len();
        self.bytes += bytes(&leased);
        self.alone += usize::from(leased.alone);
        self.ready.insert(lane.clone());
        self.renewals.add(term.renews);
        self.stamped_renewals.add(term.stamped.renews);
        let held = Held { leased, confirmed: 0, publishing: None, term };
        self.held.insert(lane, Box::new(held));
        debug_assert!(self.adds_up());
        lost
    }

    /// A lease lasts for longer.
    pub(super) fn renewed(&mut self, lease: &LeaseRef, term: Term) {
        let Some(held) = self.held.get_mut(&lease.lane) else { return };
        if held.leased.lease.token == lease.token {
            self.renewals.remove(held.term.renews);
            self.renewals.add(term.renews);
            self.stamped_renewals.remove(held.term.stamped.renews);
            self.stamped_renewals.add(term.stamped.renews);
            held.term = term;
            debug_assert!(self.adds_up());
        }
    }

    /// Whether this lease is held.
    pub(super) fn holds(&self, lease: &LeaseRef) -> bool {
        self.held.get(&lease.lane).is_some_and(|held| held.leased.lease.token == lease.token)
    }

    /// Whether this is being published under a lease that is held.
    pub(super) fn publishes(&self, ticket: &Ticket) -> bool {
        self.held.get(&ticket.lease.lane).is_some_and(|held| held.publishes(ticket))
    }

    /// Takes what is to be published next, at most so many: under a lease that has run out another
    /// may publish, so that is renewed first (F3). `skip` says for which lanes to wait.
    pub(super) fn take(
        &mut self,
        now: Moment,
        most: usize,
        skip: &BTreeSet<LaneKey>,
        call: Call,
    ) -> Vec<Ticket> {
        let alone = self.alone();
        let mut tickets = Vec::new();
        for lane in &self.ready {
            if tickets.len() == most {
                break;
            }
            let Some(held) = self.held.get_mut(lane) else { continue };
            if held.leased.alone != alone || held.term.is_over(now) || skip.contains(lane) {
                continue;
            }
            if let Some(next) = held.leased.events.get(held.confirmed) {
                held.publishing = Some(call);
                let message = next.message.clone();
                tickets.push(Ticket { lease: held.leased.lease.clone(), message });
            }
        }
        for ticket in &tickets {
            let was_ready = self.ready.remove(&ticket.lease.lane);
            debug_assert!(was_ready, "one publish of a lane at a time");
            self.deadlines.add(call.deadline);
        }
        self.publishing += tickets.len();
        debug_assert!(tickets.len() <= most && self.adds_up());
        tickets
    }

    /// What was being published of a lane is confirmed: its slot, and whether something waits
    /// behind it.
    pub(super) fn confirm(&mut self, lane: &LaneKey) -> Option<(usize, bool)> {
        let held = self.held.get_mut(lane)?;
        let call = held.publishing.take()?;
        debug_assert!(held.confirmed < held.leased.events.len(), "something was being published");
        self.deadlines.remove(call.deadline);
        self.publishing -= 1;
        held.confirmed += 1;
        let waits = held.confirmed < held.leased.events.len();
        if waits {
            self.ready.insert(lane.clone());
        }
        Some((call.slot, waits))
    }

    /// Ends a lease: what is confirmed, what befell the next event, and the rest is released. With
    /// it what was being published.
    pub(super) fn end(
        &mut self,
        lane: &LaneKey,
        ending: Option<Ending>,
    ) -> Option<(Ended, Option<Publishing>)> {
        let held = self.remove(lane)?;
        let settlement = held.leased.settle(held.confirmed, ending);
        Some((Ended { settlement, term: held.term }, held.under_way()))
    }

    /// The lanes of which nothing is being published: what is confirmed to its end was ended.
    pub(super) fn resting(&self) -> Vec<LaneKey> {
        debug_assert_eq!(self.ready.len() + self.publishing(), self.held.len());
        self.ready.iter().cloned().collect()
    }

    /// All lanes.
    pub(super) fn all(&self) -> Vec<LaneKey> {
        self.held.keys().cloned().collect()
    }

    /// Others hold this lane now. What was confirmed is theirs to find out.
    pub(super) fn lose(&mut self, lane: &LaneKey) -> Option<Publishing> {
        let held = self.remove(lane)?;
        held.under_way()
    }

    fn remove(&mut self, lane: &LaneKey) -> Option<Box<Held>> {
        let held = self.held.remove(lane)?;
        self.ready.remove(lane);
        self.renewals.remove(held.term.renews);
        self.stamped_renewals.remove(held.term.stamped.renews);
        self.events -= held.leased.events.len();
        self.bytes -= bytes(&held.leased);
        self.alone -= usize::from(held.leased.alone);
        if let Some(call) = held.publishing {
            self.deadlines.remove(call.deadline);
            self.publishing -= 1;
        }
        debug_assert!(self.adds_up());
        Some(held)
    }
}

impl Held {
    fn publishes(&self, ticket: &Ticket) -> bool {
        self.under_way().is_some_and(|it| it.is(ticket))
    }

    fn under_way(&self) -> Option<Publishing> {
        let call = self.publishing?;
        let event = self.leased.events.get(self.confirmed)?.message.event.id.clone();
        Some(Publishing { lease: self.leased.lease.clone(), event, call })
    }
}

/// A publish that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Publishing {
    pub(super) lease: LeaseRef,
    pub(super) event: EventId,
    pub(super) call: Call,
}

impl Publishing {
    pub(super) fn is(&self, ticket: &Ticket) -> bool {
        self.lease == ticket.lease && self.event == ticket.message.event.id
    }
}

/// How often each time was added.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Times<T>(BTreeMap<T, usize>);

impl<T: Copy + Ord> Times<T> {
    fn first(&self) -> Option<T> {
        self.0.first_key_value().map(|(at, _)| *at)
    }

    fn count(&self) -> usize {
        self.0.values().sum()
    }

    fn add(&mut self, at: T) {
        *self.0.entry(at).or_default() += 1;
    }

    fn remove(&mut self, at: T) {
        match self.0.get_mut(&at) {
            Some(count) if *count > 1 => *count -= 1,
            Some(_) | None => drop(self.0.remove(&at)),
        }
    }
}

fn bytes(leased: &Leased) -> usize {
    leased.events.iter().map(|next| next.message.event.body.bytes().len()).sum()
}
