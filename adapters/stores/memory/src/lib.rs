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

use alloc::borrow::Cow;
use core::convert::Infallible;
use core::ops::Bound;

use rpds::{RedBlackTreeMapSync, RedBlackTreeSetSync};
use spin::{Mutex, MutexGuard};
use twobox::store::{Inconsistent, RowByRow, answer};
use twobox::{
    Applied, Batch, Destination, EventId, IndexEntry, Key, LaneKey, Load, Millis, OrderingKey,
    Query, Reader, Rows, Store, Stored, Table, Tables, Transaction, Write,
};

/// A store in memory.
#[derive(Debug, Default)]
pub struct MemoryStore {
    committed: Mutex<State>,
    writer: Mutex<()>,
}

/// A lane among those of its destination: when it is due, and its ordering key; `None` comes before
/// all keys, and `Err` behind all lanes.
type DueAt = Result<(Millis, Option<OrderingKey>), Behind>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Behind;

/// All tables at one moment. Cloning it costs next to nothing: states share what they have in
/// common.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct State {
    tables: [RedBlackTreeMapSync<Key, Stored>; Table::ALL.len()],
    /// The lanes of each destination by time. The key is never `None`, which stands before all of
    /// them.
    due: RedBlackTreeSetSync<(Destination, DueAt)>,
    places: RedBlackTreeMapSync<(LaneKey, u64), EventId>,
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
        answer(self, query)
    }
}

impl RowByRow for State {
    type Error = Infallible;

    fn row(&self, key: &Key) -> Result<Option<Cow<'_, Stored>>, Infallible> {
        Ok(self.get(key).map(Cow::Borrowed))
    }

    fn rows_after(
        &self,
        table: Table,
        after: Option<&Key>,
    ) -> impl Iterator<Item = Result<Cow<'_, Stored>, Infallible>> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let rows = self.tables[table as usize].range::<Key, _>((after, Bound::Unbounded));
        rows.map(|(_, row)| Ok(Cow::Borrowed(row)))
    }

    fn destination_after(
        &self,
        after: Option<&Destination>,
    ) -> Result<Option<Destination>, Infallible> {
        let after = after.map_or(Bound::Unbounded, |at| Bound::Excluded((at.clone(), Err(Behind))));
        let next = self.due.range((after, Bound::Unbounded)).next();
        Ok(next.map(|(destination, _)| destination.clone()))
    }

    fn due_from(
        &self,
        destination: &Destination,
        floor: Millis,
    ) -> impl Iterator<Item = Result<(Millis, OrderingKey), Infallible>> {
        let from = (destination.clone(), Ok((floor, None)));
        let entries = self.due.range(from..(destination.clone(), Err(Behind)));
        entries.filter_map(|(_, at)| match at {
            Ok((due, Some(key))) => Some(Ok((*due, key.clone()))),
            Ok((_, None)) | Err(Behind) => None,
        })
    }

    fn places_from(
        &self,
        lane: &LaneKey,
        sequence: u64,
    ) -> impl Iterator<Item = Result<(u64, EventId), Infallible>> {
        let places = self.places.range((lane.clone(), sequence)..=(lane.clone(), u64::MAX));
        places.map(|((_, sequence), id)| Ok((*sequence, id.clone())))
    }

    fn dead_after(
        &self,
        after: Option<&EventId>,
    ) -> impl Iterator<Item = Result<EventId, Infallible>> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let dead = self.dead.range::<EventId, _>((after, Bound::Unbounded));
        dead.map(|id| Ok(id.clone()))
    }

    /// Nothing is damaged in memory, so a batch has taken away what others need: it is not one of
    /// a transition.
    fn inconsistent(&self, found: Inconsistent) -> Infallible {
        unreachable!("{found}")
    }
}

impl State {
    fn get(&self, key: &Key) -> Option<&Stored> {
        self.tables[key.table() as usize].get(key)
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
            IndexEntry::Due(destination, due, lane) => {
                self.due.insert_mut((destination, Ok((due, Some(lane)))));
            }
            IndexEntry::Place(lane, sequence, id) => self.places.insert_mut((lane, sequence), id),
            IndexEntry::Dead(id) => self.dead.insert_mut(id),
        }
    }

    fn remove_entry(&mut self, entry: IndexEntry) {
        match entry {
            IndexEntry::Due(destination, due, lane) => {
                self.due.remove_mut(&(destination, Ok((due, Some(lane)))))
            }
            IndexEntry::Place(lane, sequence, _) => self.places.remove_mut(&(lane, sequence)),
            IndexEntry::Dead(id) => self.dead.remove_mut(&id),
        };
    }
}

/// The README, whose example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
