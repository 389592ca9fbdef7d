//! The reference store of twobox: all tables in memory, without std.
//!
//! It shows what every store must do, in the fewest lines, and it is the model that others are
//! checked against: its [`State`] can be cloned, compared and hashed. A crash loses what was not
//! committed, and nothing else; that is what [`MemoryStore::crash`] does. When the program ends,
//! everything is gone.
//!
//! One transaction writes at a time, and any number of views may be open meanwhile. Beginning a
//! transaction while another one is open waits by spinning; on the same thread that is a deadlock,
//! as with any lock.
//!
//! ```
//! use twobox::{Fingerprint, Millis, Register, Registered, Request, Store};
//! use twobox_memory::MemoryStore;
//!
//! let store = MemoryStore::new();
//! let request = Request::new("customer-7", "req-001", Fingerprint::of([("item", "notebook")]))?;
//! assert_eq!(store.run(Register::new(&request), Millis::new(1_000))?, Registered::New);
//! assert_eq!(store.run(Register::new(&request), Millis::new(2_000))?, Registered::Open);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![no_std]

extern crate alloc;

use alloc::vec::Vec;
use core::convert::Infallible;
use core::ops::Bound;

use rpds::{RedBlackTreeMapSync, RedBlackTreeSetSync};
use spin::{Mutex, MutexGuard};
use twobox::{
    Applied, Batch, CallState, Delivery, Due, EventId, EventRow, EventState, Finished, InboxState,
    IndexEntry, Key, Lane, Load, Millis, OrderingKey, Query, Reader, Record, Rows, Stats, Store,
    Stored, Table, Tables, Transaction, Write,
};

/// A purge looks at no more than so many rows for each that it may remove.
const LOOKS: usize = 16;

/// A store in memory.
#[derive(Debug, Default)]
pub struct MemoryStore {
    committed: Mutex<State>,
    writer: Mutex<()>,
}

/// All tables at one moment. Cloning it costs next to nothing: states share what they have in
/// common.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct State {
    tables: [RedBlackTreeMapSync<Key, Stored>; Table::ALL.len()],
    /// The key is never `None`, which stands before all of them.
    due: RedBlackTreeSetSync<(Millis, Option<OrderingKey>)>,
    places: RedBlackTreeMapSync<(OrderingKey, u64), EventId>,
    dead: RedBlackTreeSetSync<EventId>,
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A store in this state.
    #[must_use]
    pub fn from_state(state: State) -> Self {
        Self { committed: Mutex::new(state), writer: Mutex::new(()) }
    }

    /// What is committed.
    #[must_use]
    pub fn state(&self) -> State {
        self.committed.lock().clone()
    }

    /// The store as a program finds it that starts again: what is committed, and nothing else.
    #[must_use]
    pub fn crash(self) -> Self {
        Self::from_state(self.state())
    }
}

impl Reader for MemoryStore {
    type Error = Infallible;
    type View<'a> = State;

    fn view(&self) -> Result<State, Infallible> {
        Ok(self.state())
    }
}

impl Store for MemoryStore {
    type Tx<'a> = MemoryTransaction<'a>;

    fn begin(&self) -> Result<MemoryTransaction<'_>, Infallible> {
        let writer = self.writer.lock();
        Ok(MemoryTransaction { state: self.state(), committed: &self.committed, _writer: writer })
    }
}

/// A transaction: a state of its own, which takes the place of the committed one.
#[derive(Debug)]
pub struct MemoryTransaction<'a> {
    state: State,
    committed: &'a Mutex<State>,
    _writer: MutexGuard<'a, ()>,
}

impl Load for MemoryTransaction<'_> {
    type Error = Infallible;

    fn load(&mut self, query: &Query) -> Result<Rows, Infallible> {
        self.state.load(query)
    }
}

impl Tables for MemoryTransaction<'_> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, Infallible> {
        Ok(self.state.apply(batch))
    }
}

impl Transaction for MemoryTransaction<'_> {
    fn commit(self) -> Result<(), Infallible> {
        *self.committed.lock() = self.state;
        Ok(())
    }
}

impl Load for State {
    type Error = Infallible;

    fn load(&mut self, query: &Query) -> Result<Rows, Infallible> {
        Ok(match query {
            Query::Rows(keys) => {
                let rows = keys.as_slice().iter().filter_map(|key| self.get(key));
                Rows::of(rows.cloned().collect())
            }
            Query::Due(due) => Rows { lanes: self.due(due), ..Rows::default() },
            Query::Deliveries { events, run } => self.deliveries(events, *run),
            Query::Dead { after, limit } => {
                let after = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
                let dead = self.dead.range::<EventId, _>((after, Bound::Unbounded)).take(*limit);
                let deliveries = dead.map(|id| self.delivery(id, false)).collect();
                Rows { deliveries, ..Rows::default() }
            }
            Query::Finished(finished) => self.finished(finished),
            Query::Stats { now } => Rows { stats: self.counted(*now), ..Rows::default() },
            Query::Walk { table, after, limit } => {
                let rows = self.after(*table, after.as_ref()).take(*limit);
                Rows::of(rows.cloned().collect())
            }
        })
    }
}

impl State {
    fn get(&self, key: &Key) -> Option<&Stored> {
        self.tables[key.table() as usize].get(key)
    }

    /// The rows of a table after a key.
    fn after(&self, table: Table, after: Option<&Key>) -> impl Iterator<Item = &Stored> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.tables[table as usize].range::<Key, _>((after, Bound::Unbounded)).map(|(_, row)| row)
    }

    /// How an event stands, which must be there.
    fn delivery(&self, id: &EventId, envelope: bool) -> Delivery {
        let Some(Record::Event(event)) = self.get(&Key::Event(id.clone())).map(|row| &row.record)
        else {
            unreachable!("the index leads to event {id}, which is not there");
        };
        self.delivery_of(event.clone(), envelope)
    }

    fn delivery_of(&self, event: EventRow, envelope: bool) -> Delivery {
        let key = Key::Outbox(event.event.id.clone());
        let outbox = self.get(&key).and_then(|stored| match &stored.record {
            Record::Outbox(_, row) => Some((row.clone(), stored.revision)),
            Record::Request(..)
            | Record::Order(..)
            | Record::Event(_)
            | Record::Lane(..)
            | Record::Inbox(..)
            | Record::Effect(..)
            | Record::Position(..)
            | Record::Call(..) => None,
        });
        Delivery::new(event, outbox, envelope)
    }

    /// A lane without events, which must be there.
    fn lane(&self, key: &OrderingKey) -> Lane {
        let stored = self.get(&Key::Lane(key.clone()));
        let Some(Stored { record: Record::Lane(key, row), revision }) = stored else {
            unreachable!("an event or the index leads to lane {key}, which is not there");
        };
        let (key, row, revision) = (key.clone(), row.clone(), *revision);
        Lane { key, row, revision, pending: Vec::new() }
    }

    /// The pending events of a lane, in the order of their sequence.
    fn pending(&self, lane: &Lane, envelope: bool) -> impl Iterator<Item = Delivery> {
        let from = (lane.key.clone(), lane.row.head);
        let places = self.places.range(from..=(lane.key.clone(), u64::MAX));
        let at = places.map(move |((_, sequence), id)| (*sequence, self.delivery(id, envelope)));
        let row = lane.row.clone();
        at.filter(move |(sequence, delivery)| {
            let state = EventState::of(&row, &delivery.row);
            let pending = matches!(state, EventState::Pending | EventState::Leased);
            pending && delivery.row.sequence == *sequence
        })
        .map(|(_, delivery)| delivery)
    }

    fn due(&self, Due { now, floor, lanes, run, events, bytes }: &Due) -> Vec<Lane> {
        let mut found = Vec::with_capacity(self.due.size().min(*lanes));
        let (mut events, mut bytes) = (*events, *bytes);
        let start = (*floor, None);
        let lane_of = |(due, key): &(Millis, Option<OrderingKey>)| (*due, key.clone());
        for (due, key) in self.due.range(start..).map(lane_of).take(*lanes) {
            let Some(key) = key.filter(|_| events > 0 && bytes > 0 && due < Millis::MAX) else {
                break;
            };
            let mut lane = self.lane(&key);
            if due > *now {
                found.push(lane);
                break;
            }
            let most = usize::try_from(lane.row.pending_at_most()).unwrap_or(usize::MAX);
            let mut pending = Vec::with_capacity(most.min(*run));
            for delivery in self.pending(&lane, true).take(*run) {
                let size = delivery.event.as_ref().map_or(0, |event| event.body.bytes().len());
                pending.push(delivery);
                bytes = bytes.saturating_sub(size);
                if bytes == 0 {
                    break;
                }
            }
            events = events.saturating_sub(pending.len());
            lane.pending = pending;
            found.push(lane);
        }
        found
    }

    fn deliveries(&self, events: &[EventId], run: usize) -> Rows {
        let there = events.iter().filter(|id| self.get(&Key::Event((*id).clone())).is_some());
        let deliveries: Vec<Delivery> = there.map(|id| self.delivery(id, false)).collect();
        let mut keys: Vec<_> = deliveries.iter().map(|next| next.row.lane.clone()).collect();
        keys.sort_unstable();
        keys.dedup();
        let lane = |key| {
            let lane = self.lane(key);
            Lane { pending: self.pending(&lane, false).take(run).collect(), ..lane }
        };
        Rows { deliveries, lanes: keys.iter().map(lane).collect(), ..Rows::default() }
    }

    fn finished(&self, Finished { table, until, after, limit }: &Finished) -> Rows {
        let mut found = Rows::default();
        let mut last: Option<&Stored> = None;
        for (looked, stored) in self.after(*table, after.as_ref()).enumerate() {
            let full = found.rows.len() + found.deliveries.len() == *limit;
            if full || looked == limit.saturating_mul(LOOKS) {
                found.next = last.map(|stored| stored.record.key());
                break;
            }
            last = Some(stored);
            let since = match &stored.record {
                Record::Request(_, row) => row.placed.as_ref().map(|placed| placed.at),
                Record::Order(_, row) => Some(row.committed_at),
                Record::Lane(key, row) => {
                    let places = (key.clone(), 0)..=(key.clone(), u64::MAX);
                    let empty = self.places.range(places).next().is_none();
                    (empty && row.index_due().is_none()).then_some(row.changed_at)
                }
                Record::Inbox(_, _, row) => (row.state == InboxState::Applied).then_some(row.at),
                Record::Position(_, _, row) => Some(row.at),
                Record::Call(_, _, row) => (row.state == CallState::Done).then_some(row.at),
                Record::Event(row) => {
                    // None is confirmed before it is committed.
                    let outbox = Key::Outbox(row.event.id.clone());
                    if row.event.time > *until && self.get(&outbox).is_none() {
                        continue;
                    }
                    let delivery = self.delivery_of(row.clone(), false);
                    let lane = self.lane(&delivery.row.lane);
                    let since = EventState::of(&lane.row, &delivery.row);
                    let since = since.finished_since(row.event.time);
                    if since.is_some_and(|since| since <= *until) {
                        found.deliveries.push(delivery);
                    }
                    None
                }
                Record::Outbox(..) | Record::Effect(..) => None,
            };
            if since.is_some_and(|since| since <= *until) {
                found.rows.push(stored.clone());
            }
        }
        found
    }

    fn counted(&self, now: Millis) -> Stats {
        let mut stats = Stats::default();
        for key in self.due.iter().filter_map(|(_, key)| key.as_ref()) {
            let lane = self.lane(key);
            let pending: Vec<Delivery> = self.pending(&lane, false).collect();
            stats.add_lane(now, &lane.row, pending.iter().map(|delivery| &delivery.row));
        }
        self.dead.iter().for_each(|id| stats.add_dead(&self.delivery(id, false).row));
        stats
    }

    fn apply(&mut self, batch: &Batch) -> Applied {
        for change in batch.changes() {
            let key = change.key();
            if change.on(self.get(&key)).is_none() {
                return Applied::Conflict(Some(key));
            }
        }
        for change in batch.changes() {
            let key = change.key();
            let found = self.get(&key);
            // Each key is named once, so what its guard finds is what it found above.
            let Some(write) = change.on(found) else { unreachable!("{key} has changed") };
            if let Some(entry) = found.and_then(|stored| stored.record.index_entry()) {
                self.remove_entry(entry);
            }
            let table = &mut self.tables[key.table() as usize];
            match write {
                Write::Put(record, revision) => {
                    let stored = Stored { record: record.into_owned(), revision };
                    let entry = stored.record.index_entry();
                    table.insert_mut(key, stored);
                    entry.into_iter().for_each(|entry| self.insert_entry(entry));
                }
                Write::Remove => {
                    table.remove_mut(&key);
                }
            }
        }
        Applied::Written
    }

    fn insert_entry(&mut self, entry: IndexEntry) {
        match entry {
            IndexEntry::Due(due, lane) => self.due.insert_mut((due, Some(lane))),
            IndexEntry::Place(lane, sequence, id) => self.places.insert_mut((lane, sequence), id),
            IndexEntry::Dead(id) => self.dead.insert_mut(id),
        }
    }

    fn remove_entry(&mut self, entry: IndexEntry) {
        match entry {
            IndexEntry::Due(due, lane) => self.due.remove_mut(&(due, Some(lane))),
            IndexEntry::Place(lane, sequence, _) => self.places.remove_mut(&(lane, sequence)),
            IndexEntry::Dead(id) => self.dead.remove_mut(&id),
        };
    }
}

/// The README, whose example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
