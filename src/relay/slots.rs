//! Slots for calls of the publisher: as many calls may be under way at once.

use alloc::collections::{BTreeMap, BTreeSet};

/// Which slots are taken, and by how many events.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Slots {
    most: usize,
    taken: BTreeMap<usize, usize>,
    /// Those below `used` that are free again.
    free: BTreeSet<usize>,
    used: usize,
}

impl Slots {
    pub(super) const fn new(most: usize) -> Self {
        Self { most, taken: BTreeMap::new(), free: BTreeSet::new(), used: 0 }
    }

    /// How many are free.
    pub(super) fn free(&self) -> usize {
        self.most - self.taken.len()
    }

    /// The one that the next call takes.
    pub(super) fn next(&self) -> Option<usize> {
        let again = self.free.first().copied();
        again.or_else(|| (self.used < self.most).then_some(self.used))
    }

    /// A call of so many events takes a slot.
    pub(super) fn take(&mut self, slot: usize, events: usize) {
        debug_assert!(events > 0 && self.next() == Some(slot), "a call takes the next slot");
        self.free.remove(&slot);
        self.used = self.used.max(slot + 1);
        self.taken.insert(slot, events);
    }

    /// One event of a call has ended. With the last one the slot is free.
    pub(super) fn ended(&mut self, slot: usize) {
        let left = self.taken.get_mut(&slot).map(|events| {
            *events -= 1;
            *events
        });
        debug_assert!(left.is_some(), "what ends has a slot");
        if left == Some(0) {
            self.taken.remove(&slot);
            self.free.insert(slot);
        }
    }
}
