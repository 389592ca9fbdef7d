//! What an operator wants to know at a glance: how much waits, for how long, and what was given up
//! (P3).

use alloc::collections::BTreeMap;
use core::time::Duration;

use crate::boundary::{Query, Rows};
use crate::ids::{EventId, EventType, OrderingKey};
use crate::store::Load;
use crate::store::asynchronous::AsyncLoad;
use crate::table::{Key, LaneRow, OutboxRow, Record};
use crate::time::Millis;

const PAGE: usize = 512;

/// How the outbox stands at one moment.
///
/// It is counted from the rows that are pending or dead, so it costs as much as there are of them,
/// whatever is confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Counts {
    /// Events to be delivered; leased ones among them.
    pub pending: u64,
    /// Pending events that nothing but a relay keeps waiting: due, not leased, not behind one that
    /// is not due or in a blocked lane.
    pub due: u64,
    /// Pending events that are being delivered.
    pub leased: u64,
    /// Events that were given up and wait for an operator.
    pub dead: u64,
}

/// How the outbox stands, in all and by type.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stats {
    /// Over all types.
    pub all: Counts,
    /// For each type of which something is pending or dead.
    pub by_type: BTreeMap<EventType, Counts>,
    /// How long the event has been due that has been due longest; `None` if nothing is due.
    pub oldest_due: Option<Duration>,
}

/// Where a walk through the pending events stands.
struct Walk {
    stats: Stats,
    now: Millis,
    lane: Option<(OrderingKey, LaneRow)>,
    /// Whether the events of the lane so far are all due.
    all_due: bool,
}

type Place = (OrderingKey, u64, EventId);

impl Stats {
    /// Counts.
    ///
    /// # Errors
    ///
    /// The store's own.
    ///
    /// ```
    /// use twobox::{Millis, Reader, Stats};
    /// use twobox_memory::MemoryStore;
    ///
    /// let store = MemoryStore::new();
    /// let stats = Stats::of(&mut store.view()?, Millis::new(1_000))?;
    /// assert_eq!((stats.all.pending, stats.oldest_due), (0, None));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn of<L: Load>(tables: &mut L, now: Millis) -> Result<Self, L::Error> {
        let mut walk = Walk::new(now);
        let mut query = Some(Walk::pending_after(None));
        while let Some(next) = query {
            query = walk.add_pending(&tables.load(&next)?);
        }
        let mut query = Some(Walk::dead_after(None));
        while let Some(next) = query {
            query = walk.add_dead(&tables.load(&next)?);
        }
        Ok(walk.stats)
    }

    /// Counts in an async store.
    ///
    /// # Errors
    ///
    /// The store's own.
    pub async fn of_async<L: AsyncLoad>(tables: &mut L, now: Millis) -> Result<Self, L::Error> {
        let mut walk = Walk::new(now);
        let mut query = Some(Walk::pending_after(None));
        while let Some(next) = query {
            query = walk.add_pending(&tables.load(&next).await?);
        }
        let mut query = Some(Walk::dead_after(None));
        while let Some(next) = query {
            query = walk.add_dead(&tables.load(&next).await?);
        }
        Ok(walk.stats)
    }
}

impl Walk {
    fn new(now: Millis) -> Self {
        Self { stats: Stats::default(), now, lane: None, all_due: true }
    }

    fn pending_after(after: Option<Place>) -> Query {
        Query::Pending { after, limit: PAGE }
    }

    fn dead_after(after: Option<EventId>) -> Query {
        Query::Dead { after, limit: PAGE }
    }

    fn count(&mut self, event_type: &EventType, count: impl Fn(&mut Counts)) {
        count(&mut self.stats.all);
        count(self.stats.by_type.entry(event_type.clone()).or_default());
    }

    /// Counts a page, and gives the question for the next one.
    fn add_pending(&mut self, page: &Rows) -> Option<Query> {
        let mut last = None;
        let mut events = 0;
        for view in page.lanes() {
            // A lane may go on from the page before.
            if self.lane.as_ref().is_none_or(|(key, _)| key != view.key) {
                self.lane = Some((view.key.clone(), view.row.clone()));
                self.all_due = true;
            }
            for (id, row, _) in view.pending() {
                self.add(view.row, row);
                last = Some((view.key.clone(), row.sequence, id.clone()));
                events += 1;
            }
        }
        (events == PAGE).then(|| Self::pending_after(last))
    }

    fn add(&mut self, lane: &LaneRow, row: &OutboxRow) {
        let leased = lane.leases(row.sequence);
        self.all_due &= row.due <= self.now && lane.blocked_by.is_none();
        let due = self.all_due && lane.lease.is_none();
        self.count(&row.event_type, |counts| {
            counts.pending += 1;
            counts.due += u64::from(due);
            counts.leased += u64::from(leased);
        });
        if due {
            let age = self.now.since(row.due);
            self.stats.oldest_due =
                Some(self.stats.oldest_due.map_or(age, |oldest| oldest.max(age)));
        }
    }

    fn add_dead(&mut self, page: &Rows) -> Option<Query> {
        for stored in page.as_slice() {
            if let Record::Outbox(_, row) = &stored.record {
                self.count(&row.event_type, |counts| counts.dead += 1);
            }
        }
        let last = page.as_slice().last().filter(|_| page.as_slice().len() == PAGE);
        last.and_then(|stored| {
            if let Key::Outbox(id) = stored.record.key() {
                Some(Self::dead_after(Some(id)))
            } else {
                None
            }
        })
    }
}
