//! Slots for calls of the publisher: as many calls may be under way at once.

use alloc::vec::Vec;

/// Which slots are taken, and by how many events.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Slots {
    most: usize,
    /// How many events each slot has under way that was ever taken.
    events: Vec<usize>,
    /// Those of them that are free again.
    free: Vec<usize>,
}

impl Slots {
    pub(super) const fn new(most: usize) -> Self {
        Self { most, events: Vec::new(), free: Vec::new() }
    }

    /// How many are free.
    pub(super) fn free(&self) -> usize {
        self.most - self.events.len() + self.free.len()
    }

    /// The one that the next call takes.
    pub(super) fn next(&self) -> Option<usize> {
        let again = self.free.last().copied();
        again.or_else(|| (self.events.len() < self.most).then_some(self.events.len()))
    }

    /// A call of so many events takes the next slot.
    pub(super) fn take(&mut self, events: usize) {
        debug_assert!(events > 0 && self.free() > 0, "a call takes a slot that is free");
        match self.free.pop() {
            Some(slot) => self.events[slot] = events,
            None => self.events.push(events),
        }
    }

    /// One event of a call has ended. With the last one the slot is free.
    pub(super) fn ended(&mut self, slot: usize) {
        let events = self.events.get_mut(slot).filter(|events| **events > 0);
        debug_assert!(events.is_some(), "what ends has a slot");
        let Some(events) = events else { return };
        *events -= 1;
        if *events == 0 {
            self.free.push(slot);
        }
    }
}
