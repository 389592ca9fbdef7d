//! How many events a relay takes at a time: as many as it publishes soon, so that relays of one
//! store share the work (F35), and a fast one commits seldom.

use core::time::Duration;

/// Half of what a relay takes should be published within this time.
const SOON: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Pace {
    events: usize,
    /// At the last claim: the uptime, and how many publishes had been answered.
    at: Duration,
    answered: u64,
}

impl Pace {
    /// Begins with `least`, which keeps all slots busy.
    pub(super) const fn new(least: usize, now: Duration) -> Self {
        Self { events: least, at: now, answered: 0 }
    }

    /// How many events to hold.
    pub(super) const fn events(&self) -> usize {
        self.events
    }

    /// There is a claim: `answered` publishes have been answered so far.
    pub(super) fn claims(&mut self, least: usize, window: usize, now: Duration, answered: u64) {
        let done = usize::try_from(answered.saturating_sub(self.answered)).unwrap_or(usize::MAX);
        let span = now.saturating_sub(self.at);
        // Otherwise there was not enough to do to learn anything.
        if done.saturating_mul(2) < self.events {
            return;
        }
        (self.at, self.answered) = (now, answered);
        if span <= SOON {
            self.events = self.events.saturating_mul(2);
        } else if span > SOON * 2 {
            self.events /= 2;
        }
        self.events = self.events.clamp(least, window);
    }
}
