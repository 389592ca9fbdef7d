//! What a relay holds: lanes under a lease, and how far each has come.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use super::machine::Ticket;
use crate::ids::OrderingKey;
use crate::time::Millis;
use crate::transition::claim::Leased;
use crate::transition::lane::LeaseRef;
use crate::transition::settle::{Ending, Settlement};

/// A lane under a lease: the first events are confirmed, the next one may be on its way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Held {
    leased: Leased,
    confirmed: usize,
    publishing: bool,
    until: Millis,
    renew_at: Millis,
}

/// All lanes that a relay holds. What is asked for often is counted, so that no answer costs a walk
/// over the window.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Lanes {
    /// Boxed, since a node of the map has room for eleven, also if there is one.
    held: BTreeMap<OrderingKey, Box<Held>>,
    /// Lanes of which nothing is being published, and something waits.
    ready: BTreeSet<OrderingKey>,
    /// How many leases are to be renewed at a time: those of a claim are together.
    renewals: BTreeMap<Millis, usize>,
    events: usize,
    bytes: usize,
    publishing: usize,
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

    /// Whether one of them is to be published with nothing beside it (F4).
    pub(super) fn alone(&self) -> bool {
        self.alone > 0
    }

    /// When the next lease is to be renewed.
    pub(super) fn renew_at(&self) -> Option<Millis> {
        self.renewals.first_key_value().map(|(at, _)| *at)
    }

    /// The leases that are to be renewed by now.
    pub(super) fn to_renew(&self, now: Millis) -> Vec<LeaseRef> {
        if self.renew_at().is_none_or(|at| at > now) {
            return Vec::new();
        }
        let due = self.held.values().filter(|held| held.renew_at <= now);
        due.map(|held| held.leased.lease.clone()).collect()
    }

    /// Holds a lane. If it was held already, its old lease is lost: whether something was being
    /// published under it, and what.
    pub(super) fn hold(&mut self, leased: Leased, renew_at: Millis) -> Option<Lost> {
        let lane = leased.lease.lane.clone();
        self.events += leased.events.len();
        self.bytes += bytes(&leased);
        self.alone += usize::from(leased.alone);
        count(&mut self.renewals, renew_at);
        let until = leased.until;
        let held = Held { leased, confirmed: 0, publishing: false, until, renew_at };
        let lost = self.held.insert(lane.clone(), Box::new(held));
        let lost = lost.and_then(|held| self.lost(*held));
        self.ready.insert(lane);
        lost
    }

    /// A lease lasts until this time.
    pub(super) fn renewed(&mut self, lease: &LeaseRef, until: Millis, renew_at: Millis) {
        let Some(held) = self.held.get_mut(&lease.lane) else { return };
        if held.leased.lease.token == lease.token {
            discount(&mut self.renewals, held.renew_at);
            count(&mut self.renewals, renew_at);
            (held.until, held.renew_at) = (until, renew_at);
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
        now: Millis,
        most: usize,
        skip: impl Fn(&OrderingKey) -> bool,
    ) -> Vec<Ticket> {
        let alone = self.alone();
        let mut tickets = Vec::with_capacity(most.min(self.ready.len()));
        for lane in &self.ready {
            if tickets.len() == most {
                break;
            }
            let Some(held) = self.held.get_mut(lane) else { continue };
            if held.leased.alone != alone || now >= held.until || skip(lane) {
                continue;
            }
            if let Some(next) = held.leased.events.get(held.confirmed) {
                held.publishing = true;
                let message = next.message.clone();
                tickets.push(Ticket { lease: held.leased.lease.clone(), message });
            }
        }
        for ticket in &tickets {
            self.ready.remove(&ticket.lease.lane);
        }
        self.publishing += tickets.len();
        tickets
    }

    /// What was being published of a lane is confirmed; says whether something waits behind it.
    pub(super) fn confirm(&mut self, lane: &OrderingKey) -> bool {
        let Some(held) = self.held.get_mut(lane).filter(|held| held.publishing) else {
            return false;
        };
        self.publishing -= 1;
        held.publishing = false;
        held.confirmed += 1;
        let waits = held.confirmed < held.leased.events.len();
        if waits {
            self.ready.insert(lane.clone());
        }
        waits
    }

    /// Ends a lease: what is confirmed, what befell the next event, and the rest is released.
    pub(super) fn end(&mut self, lane: &OrderingKey, ending: Option<Ending>) -> Option<Settlement> {
        self.remove(lane).map(|held| held.leased.settle(held.confirmed, ending))
    }

    /// The lanes of which nothing is being published.
    pub(super) fn resting(&self) -> Vec<OrderingKey> {
        let resting = self.held.iter().filter(|(_, held)| !held.publishing);
        resting.map(|(lane, _)| lane.clone()).collect()
    }

    /// All lanes.
    pub(super) fn all(&self) -> Vec<OrderingKey> {
        self.held.keys().cloned().collect()
    }

    /// Others hold this lane now. What was confirmed is theirs to find out.
    pub(super) fn lose(&mut self, lane: &OrderingKey) -> Option<Lost> {
        let held = self.held.remove(lane)?;
        self.lost(*held)
    }

    fn lost(&mut self, held: Held) -> Option<Lost> {
        self.forget(&held);
        let publishing = held.leased.events.get(held.confirmed).filter(|_| held.publishing);
        let event = publishing.map(|next| next.message.event.id.clone())?;
        Some(Lost { lane: held.leased.lease.lane, token: held.leased.lease.token, event })
    }

    fn remove(&mut self, lane: &OrderingKey) -> Option<Box<Held>> {
        let held = self.held.remove(lane)?;
        self.forget(&held);
        Some(held)
    }

    /// What is counted of a lane that is held no more.
    fn forget(&mut self, held: &Held) {
        if !held.publishing && held.confirmed < held.leased.events.len() {
            self.ready.remove(&held.leased.lease.lane);
        }
        discount(&mut self.renewals, held.renew_at);
        self.events -= held.leased.events.len();
        self.bytes -= bytes(&held.leased);
        self.alone -= usize::from(held.leased.alone);
        self.publishing -= usize::from(held.publishing);
    }
}

impl Held {
    fn publishes(&self, ticket: &Ticket) -> bool {
        let next = self.leased.events.get(self.confirmed).filter(|_| self.publishing);
        self.leased.lease.token == ticket.lease.token
            && next.is_some_and(|next| next.message.event.id == ticket.message.event.id)
    }
}

/// What was being published when its lease was lost.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Lost {
    pub(super) lane: OrderingKey,
    pub(super) token: u64,
    pub(super) event: crate::ids::EventId,
}

fn count(renewals: &mut BTreeMap<Millis, usize>, at: Millis) {
    *renewals.entry(at).or_default() += 1;
}

fn discount(renewals: &mut BTreeMap<Millis, usize>, at: Millis) {
    match renewals.get_mut(&at) {
        Some(count) if *count > 1 => *count -= 1,
        Some(_) | None => drop(renewals.remove(&at)),
    }
}

fn bytes(leased: &Leased) -> usize {
    leased.events.iter().map(|next| next.message.event.body.bytes().len()).sum()
}
