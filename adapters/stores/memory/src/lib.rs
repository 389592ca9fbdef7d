//! The reference store of twobox: all tables in memory, without std.
//!
//! It says what every store must do, in the fewest words, and it is the model that others are
//! checked against: its [`State`] can be cloned, compared and hashed. A crash loses what was not
//! committed, and nothing else; that is what [`MemoryStore::crash`] does. When the program ends,
//! everything is gone.
//!
//! One transaction writes at a time, and any number of views may be open meanwhile. To begin a
//! transaction while another one is open waits by spinning; on the same thread that is for ever, as
//! with any lock.
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
    Applied, Batch, Change, EventId, IndexEntry, Key, Load, Millis, OrderingKey, Query, Reader,
    Record, Revision, Rows, Store, Stored, Table, Tables, Transaction,
};

/// A store in memory.
#[derive(Debug, Default)]
pub struct MemoryStore {
    committed: Mutex<State>,
    writer: Mutex<()>,
}

/// All tables at one moment. To clone it costs next to nothing: states share what they have in
/// common.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct State {
    tables: [RedBlackTreeMapSync<Key, Stored>; Table::ALL.len()],
    due: RedBlackTreeSetSync<(Millis, OrderingKey)>,
    pending: RedBlackTreeMapSync<(OrderingKey, u64), EventId>,
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
        let mut rows = Rows::default();
        match query {
            Query::Rows(keys) => {
                keys.as_slice()
                    .iter()
                    .filter_map(|key| self.get(key))
                    .for_each(|stored| rows.push(stored.clone()));
            }
            Query::Due { now, lanes, run, events } => {
                for (given, (due, lane)) in self.due.iter().take(*lanes).enumerate() {
                    if rows.as_slice().len() - given >= *events {
                        break;
                    }
                    self.push_lane(lane, if due <= now { *run } else { 0 }, &mut rows);
                    if due > now {
                        break;
                    }
                }
            }
            Query::Lanes(lanes) => {
                lanes.iter().for_each(|(lane, run)| self.push_lane(lane, *run, &mut rows));
            }
            Query::Deliveries { events, run } => {
                let found = events.iter().filter_map(|id| self.get(&Key::Outbox(id.clone())));
                found.for_each(|stored| rows.push(stored.clone()));
                let mut lanes: Vec<OrderingKey> =
                    rows.as_slice().iter().filter_map(lane_of).collect();
                lanes.sort_unstable();
                lanes.dedup();
                lanes.iter().for_each(|lane| self.push_lane(lane, *run, &mut rows));
            }
            Query::Pending { after, limit } => {
                let start = after.as_ref().map_or(Bound::Unbounded, |(lane, sequence, _)| {
                    Bound::Included((lane.clone(), *sequence))
                });
                // Only the first can stand at the place itself, and then its id decides.
                let is_after = |place: &(OrderingKey, u64), id: &EventId| {
                    after.as_ref().is_none_or(|(lane, sequence, after)| {
                        (&place.0, place.1, id) > (lane, *sequence, after)
                    })
                };
                let pending = self
                    .pending
                    .range((start, Bound::Unbounded))
                    .filter(|(place, id)| is_after(place, id));
                let mut last: Option<&OrderingKey> = None;
                for ((lane, _), id) in pending.take(*limit) {
                    if last != Some(lane) {
                        self.push_lane(lane, 0, &mut rows);
                        last = Some(lane);
                    }
                    self.get(&Key::Outbox(id.clone()))
                        .into_iter()
                        .for_each(|stored| rows.push(stored.clone()));
                }
            }
            Query::Dead { after, limit } => {
                let after = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
                let dead = self.dead.range::<EventId, _>((after, Bound::Unbounded)).take(*limit);
                dead.filter_map(|id| self.get(&Key::Outbox(id.clone())))
                    .for_each(|stored| rows.push(stored.clone()));
            }
            Query::Walk { table, after, limit } => {
                let after = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
                let walked = self.tables[*table as usize]
                    .range::<Key, _>((after, Bound::Unbounded))
                    .take(*limit);
                walked.for_each(|(_, stored)| rows.push(stored.clone()));
            }
        }
        Ok(rows)
    }
}

fn lane_of(stored: &Stored) -> Option<OrderingKey> {
    if let Record::Outbox(_, row) = &stored.record { Some(row.lane.clone()) } else { None }
}

impl State {
    fn get(&self, key: &Key) -> Option<&Stored> {
        self.tables[key.table() as usize].get(key)
    }

    /// Answers with a lane and its first pending events.
    fn push_lane(&self, lane: &OrderingKey, run: usize, rows: &mut Rows) {
        let Some(stored) = self.get(&Key::Lane(lane.clone())) else { return };
        rows.push(stored.clone());
        let pending = self.pending.range((lane.clone(), 0)..=(lane.clone(), u64::MAX)).take(run);
        pending
            .filter_map(|(_, id)| self.get(&Key::Outbox(id.clone())))
            .for_each(|stored| rows.push(stored.clone()));
    }

    fn apply(&mut self, batch: &Batch) -> Applied {
        for change in batch.changes() {
            let key = change.key();
            let found: Option<Revision> = self.get(&key).map(|stored| stored.revision);
            if !change.expect().holds(found) {
                return Applied::Conflict(key);
            }
        }
        for change in batch.changes() {
            let key = change.key();
            if let Some(entry) = self.get(&key).and_then(|stored| stored.record.index_entry()) {
                self.remove_entry(entry);
            }
            let table = &mut self.tables[key.table() as usize];
            match change {
                Change::Put { expect, record } => {
                    table.insert_mut(
                        key,
                        Stored { record: record.clone(), revision: expect.written() },
                    );
                    if let Some(entry) = record.index_entry() {
                        self.insert_entry(entry);
                    }
                }
                Change::Delete { .. } => {
                    table.remove_mut(&key);
                }
            }
        }
        Applied::Written
    }

    fn insert_entry(&mut self, entry: IndexEntry) {
        match entry {
            IndexEntry::Due(due, lane) => self.due.insert_mut((due, lane)),
            IndexEntry::Pending(lane, sequence, id) => {
                self.pending.insert_mut((lane, sequence), id);
            }
            IndexEntry::Dead(id) => self.dead.insert_mut(id),
        }
    }

    fn remove_entry(&mut self, entry: IndexEntry) {
        match entry {
            IndexEntry::Due(due, lane) => self.due.remove_mut(&(due, lane)),
            IndexEntry::Pending(lane, sequence, _) => self.pending.remove_mut(&(lane, sequence)),
            IndexEntry::Dead(id) => self.dead.remove_mut(&id),
        };
    }
}
