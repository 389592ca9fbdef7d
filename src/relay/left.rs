//! Publishes that are under way and whose lane is not ours any more: the lease is lost, or they are
//! overdue. Each takes up a slot until its driver says that it has ended.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;
use core::time::Duration;

use super::held::Publishing;
use crate::ids::LaneKey;
use crate::lane::LeaseRef;

/// All of them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Left {
    publishes: Vec<Publishing>,
    hung: Vec<Publishing>,
    /// Lanes of which nothing else is published before the end of one of `publishes` (P4).
    held_back: BTreeSet<LaneKey>,
}

impl Left {
    pub(super) fn len(&self) -> usize {
        self.publishes.len() + self.hung.len()
    }

    /// How many are overdue.
    pub(super) fn hung(&self) -> usize {
        self.hung.len()
    }

    /// How many slots these take up.
    pub(super) fn hung_slots(&self) -> usize {
        self.hung.iter().map(|it| it.call.slot).collect::<BTreeSet<_>>().len()
    }

    /// The lanes that have to wait.
    pub(super) const fn held_back(&self) -> &BTreeSet<LaneKey> {
        &self.held_back
    }

    /// When the next one is overdue.
    pub(super) fn next(&self) -> Option<Duration> {
        self.publishes.iter().map(|it| it.call.deadline).min()
    }

    pub(super) fn add(&mut self, publishing: Publishing) {
        self.held_back.insert(publishing.lease.lane.clone());
        self.publishes.push(publishing);
    }

    /// One of them has ended: its slot.
    pub(super) fn ended(&mut self, which: impl Fn(&Publishing) -> bool) -> Option<usize> {
        let all = [&mut self.publishes, &mut self.hung];
        let at = |all: &Vec<Publishing>| all.iter().position(&which);
        let ended = all.into_iter().find_map(|all| at(all).map(|at| all.remove(at)))?;
        self.hold_back();
        Some(ended.call.slot)
    }

    /// Time has passed: gives what is overdue since. No lane waits for it any more.
    pub(super) fn pass(&mut self, now: Duration) -> Vec<LeaseRef> {
        let before = self.hung.len();
        self.hung.extend(self.publishes.extract_if(.., |it| it.call.deadline <= now));
        if self.hung.len() > before {
            self.hold_back();
        }
        self.hung[before..].iter().map(|it| it.lease.clone()).collect()
    }

    fn hold_back(&mut self) {
        self.held_back = self.publishes.iter().map(|it| it.lease.lane.clone()).collect();
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
