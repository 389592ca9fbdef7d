//! What an operator wants to see at a glance: how much is waiting, for how long, and what was given
//! up (P3).

use alloc::collections::BTreeMap;
use core::time::Duration;

use crate::ids::EventType;
use crate::table::{LaneRow, OutboxRow};
use crate::time::Millis;

/// How many events stand how, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[non_exhaustive]
pub struct Counts {
    /// Events to be delivered; leased ones among them.
    pub pending: u64,
    /// Pending events that wait for nothing but a relay: due, not leased, in no blocked lane, and
    /// behind none that is not due.
    pub due: u64,
    /// Pending events that are being delivered.
    pub leased: u64,
    /// Events that were given up and wait for an operator.
    pub dead: u64,
}

/// How the events stand, in all and by type.
///
/// It is counted from what is pending or dead, so it costs as much as there is of that, whatever is
/// confirmed. See [`Load::stats`](crate::Load::stats).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Over all types.
    pub all: Counts,
    /// For each type of which something is pending or dead.
    pub by_type: BTreeMap<EventType, Counts>,
    /// How long the event has been due that has been due longest; `None` if nothing is due.
    pub oldest_due: Option<Duration>,
}

impl Stats {
    /// Counts the pending events of a lane, all of them in the order of their sequence; for stores
    /// that answer [`Query::Stats`](crate::Query::Stats) row by row.
    pub fn add_lane<'a>(
        &mut self,
        now: Millis,
        lane: &LaneRow,
        pending: impl IntoIterator<Item = &'a OutboxRow>,
    ) {
        let mut all_due = lane.blocked_by.is_none();
        for row in pending {
            all_due &= row.due <= now;
            let due = all_due && lane.lease.is_none();
            self.count(&row.event_type, |counts| {
                counts.pending += 1;
                counts.due += u64::from(due);
                counts.leased += u64::from(lane.leases(row.sequence));
            });
            if due {
                self.oldest_due = self.oldest_due.max(Some(now.since(row.due)));
            }
        }
    }

    /// Counts a dead event.
    pub fn add_dead(&mut self, row: &OutboxRow) {
        self.count(&row.event_type, |counts| counts.dead += 1);
    }

    fn count(&mut self, event_type: &EventType, count: impl Fn(&mut Counts)) {
        count(&mut self.all);
        count(self.by_type.entry(event_type.clone()).or_default());
    }
}
