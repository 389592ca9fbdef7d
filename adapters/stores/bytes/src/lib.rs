//! A store of twobox to copy from: all tables, and the index, in one ordered map of bytes. The
//! README says what lies where.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;
use twobox::codec;
use twobox::store::{Inconsistent, RowByRow, answer};
use twobox::{
    Applied, Batch, Destination, EventId, FORMAT_VERSION, IndexEntry, Invalid, Key, LaneKey, Load,
    Millis, OrderingKey, Query, Reader, Rows, Store, StoreError, Stored, Table, Tables,
    Transaction, Write,
};

/// Everything that is kept, as bytes.
pub type Map = BTreeMap<Vec<u8>, Vec<u8>>;

// What the first byte of a key says; those of tables have their numbers.
const FORMAT: &[u8] = b"\0format";
const DUE: u8 = 100;
const PLACES: u8 = 101;
const DEAD: u8 = 102;

/// What can go wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BytesError {
    /// What has this key cannot be read.
    #[error("at {0}: {1}")]
    Damaged(String, String),
    /// Rows and index entries contradict each other.
    #[error(transparent)]
    Inconsistent(#[from] Inconsistent),
    /// It is no store, or one of another version.
    #[error("these bytes are no store of format {FORMAT_VERSION}")]
    Format,
}

impl StoreError for BytesError {}

type Found<T> = Result<T, BytesError>;
type Place = Found<(u64, EventId)>;
type Row<'a> = Found<Cow<'a, Stored>>;

/// A store in a map of bytes.
#[derive(Debug)]
pub struct BytesStore {
    committed: Mutex<Arc<Map>>,
    writer: Mutex<()>,
}

impl BytesStore {
    /// The store that has left these bytes.
    ///
    /// # Errors
    ///
    /// [`BytesError::Format`] if no store has, or one of another version.
    pub fn open(map: Map) -> Found<Self> {
        let known = map.get(FORMAT).is_some_and(|it| *it == FORMAT_VERSION.to_be_bytes());
        known.then(|| Self::of(map)).ok_or(BytesError::Format)
    }

    /// What is committed.
    #[must_use]
    pub fn bytes(&self) -> Map {
        Map::clone(&lock(&self.committed))
    }

    fn of(map: Map) -> Self {
        Self { committed: Mutex::new(Arc::new(map)), writer: Mutex::new(()) }
    }
}

/// An empty store.
impl Default for BytesStore {
    fn default() -> Self {
        Self::of(Map::from([(FORMAT.to_vec(), FORMAT_VERSION.to_be_bytes().to_vec())]))
    }
}

/// A panic while it was held left nothing half done behind: a commit is one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reader for BytesStore {
    type Error = BytesError;
    type View<'a> = View;

    fn view(&self) -> Found<View> {
        Ok(View(lock(&self.committed).clone()))
    }
}

impl Store for BytesStore {
    type Tx<'a> = Tx<'a>;

    fn begin(&self) -> Found<Tx<'_>> {
        // In this order: what it begins with is what the last writer has left.
        Ok(Tx { _writer: lock(&self.writer), view: self.view()?, committed: &self.committed })
    }
}

/// One state of the tables.
#[derive(Debug)]
pub struct View(Arc<Map>);

/// A transaction: a state of its own, which takes the place of the committed one.
#[derive(Debug)]
pub struct Tx<'a> {
    view: View,
    committed: &'a Mutex<Arc<Map>>,
    _writer: MutexGuard<'a, ()>,
}

impl Tx<'_> {
    /// The map, in which keys that begin with 255 are the user's own.
    pub fn map(&mut self) -> &mut Map {
        Arc::make_mut(&mut self.view.0)
    }
}

impl Load for View {
    type Error = BytesError;

    fn load(&mut self, query: &Query) -> Found<Rows> {
        answer(self, query)
    }
}

impl Load for Tx<'_> {
    type Error = BytesError;

    fn load(&mut self, query: &Query) -> Found<Rows> {
        answer(&self.view, query)
    }
}

impl Tables for Tx<'_> {
    fn apply(&mut self, batch: &Batch) -> Found<Applied> {
        // First all guards, and what there is to remove and to put; then all of it is done.
        let (mut removed, mut put) = (Vec::new(), Vec::new());
        for change in batch.changes() {
            let key = change.key();
            let found = self.view.row(&key)?;
            let Some(write) = change.on(found.as_deref()) else {
                return Ok(Applied::Conflict(Some(key)));
            };
            let old = found.as_deref().and_then(|stored| stored.record.index_entry());
            removed.extend(old.map(|entry| entry_bytes(&entry).0));
            match write {
                Write::Put(record, revision) => {
                    let mut value = Vec::new();
                    codec::encode_value(&record, revision, &mut value);
                    put.push((row_key(&key), value));
                    put.extend(record.index_entry().as_ref().map(entry_bytes));
                }
                Write::Remove => removed.push(row_key(&key)),
            }
        }
        let map = self.map();
        removed.iter().for_each(|key| drop(map.remove(key)));
        map.extend(put);
        Ok(Applied::Written)
    }
}

impl Transaction for Tx<'_> {
    fn commit(self) -> Found<()> {
        *lock(self.committed) = self.view.0;
        Ok(())
    }
}

impl RowByRow for View {
    type Error = BytesError;

    fn row(&self, key: &Key) -> Found<Option<Cow<'_, Stored>>> {
        let bytes = row_key(key);
        self.0.get(&bytes).map(|value| read(key.table(), &bytes, value)).transpose()
    }

    fn rows_after(&self, table: Table, after: Option<&Key>) -> impl Iterator<Item = Row<'_>> {
        let from = behind(after.map(row_key));
        self.range(vec![table.number()], from).map(move |(key, value)| read(table, key, value))
    }

    fn destination_after(&self, after: Option<&Destination>) -> Found<Option<Destination>> {
        // Behind all that have the NUL after this destination.
        let from = after.map_or(vec![DUE], |at| bytes(DUE, &[at.as_str().as_bytes(), &[1]]));
        let next = self.range(vec![DUE], from).next();
        next.map(|(key, _)| match key[1..].split(|byte| *byte == 0).next() {
            Some([]) | None => Ok(Destination::default()),
            Some(destination) => name(key, destination),
        })
        .transpose()
    }

    fn due_from(
        &self,
        destination: &Destination,
        floor: Millis,
    ) -> impl Iterator<Item = Found<(Millis, OrderingKey)>> {
        let prefix = due(destination, &[]);
        let (at, from) = (prefix.len(), due(destination, &[&floor.get().to_be_bytes()]));
        self.range(prefix, from).map(move |(key, _)| {
            let (due, lane) =
                key[at..].split_first_chunk().ok_or_else(|| damaged(key, "it is short"))?;
            Ok((Millis::new(u64::from_be_bytes(*due)), name(key, lane)?))
        })
    }

    fn places_from(&self, lane: &LaneKey, from: u64) -> impl Iterator<Item = Place> {
        let from = place(lane, from);
        let lane = from[..from.len() - 8].to_vec();
        self.range(lane, from).map(|(key, id)| {
            let (_, sequence) =
                key.split_last_chunk().ok_or_else(|| damaged(key, "it is short"))?;
            Ok((u64::from_be_bytes(*sequence), name(key, id)?))
        })
    }

    fn dead_after(&self, after: Option<&EventId>) -> impl Iterator<Item = Found<EventId>> {
        let from = behind(after.map(|id| bytes(DEAD, &[id.as_str().as_bytes()])));
        self.range(vec![DEAD], from).map(|(key, _)| name(key, &key[1..]))
    }

    fn inconsistent(&self, found: Inconsistent) -> BytesError {
        found.into()
    }
}

impl View {
    /// What has this prefix, from this key on.
    fn range(&self, prefix: Vec<u8>, from: Vec<u8>) -> impl Iterator<Item = (&Vec<u8>, &Vec<u8>)> {
        let from = from.max(prefix.clone());
        self.0.range(from..).take_while(move |(key, _)| key.starts_with(&prefix))
    }
}

/// The first key that can come after this one.
fn behind(key: Option<Vec<u8>>) -> Vec<u8> {
    key.map_or(Vec::new(), |key| [key.as_slice(), &[0]].concat())
}

fn bytes(first: u8, parts: &[&[u8]]) -> Vec<u8> {
    [&[first][..], &parts.concat()].concat()
}

fn row_key(key: &Key) -> Vec<u8> {
    let mut bytes = vec![key.table().number()];
    codec::encode_key(key, &mut bytes);
    bytes
}

fn due(destination: &Destination, rest: &[&[u8]]) -> Vec<u8> {
    bytes(DUE, &[destination.as_str().as_bytes(), &[0], &rest.concat()])
}

fn place(lane: &LaneKey, sequence: u64) -> Vec<u8> {
    let mut key = Vec::new();
    codec::encode_lane(lane, &mut key);
    bytes(PLACES, &[&key, &[0], &sequence.to_be_bytes()])
}

fn entry_bytes(entry: &IndexEntry) -> (Vec<u8>, Vec<u8>) {
    match entry {
        IndexEntry::Due(destination, at, lane) => {
            let rest: &[&[u8]] = &[&at.get().to_be_bytes(), lane.as_str().as_bytes()];
            (due(destination, rest), Vec::new())
        }
        IndexEntry::Place(lane, sequence, id) => (place(lane, *sequence), id.as_str().into()),
        IndexEntry::Dead(id) => (bytes(DEAD, &[id.as_str().as_bytes()]), Vec::new()),
    }
}

fn read<'a>(table: Table, key: &[u8], value: &[u8]) -> Row<'a> {
    let stored = codec::decode(table, &key[1..], value).map(Cow::Owned);
    stored.map_err(|error| damaged(key, error))
}

/// A name in an index entry.
fn name<T: for<'a> TryFrom<&'a str, Error = Invalid>>(key: &[u8], text: &[u8]) -> Found<T> {
    let text = std::str::from_utf8(text).map_err(|error| damaged(key, error))?;
    T::try_from(text).map_err(|error| damaged(key, error))
}

fn damaged(key: &[u8], what: impl ToString) -> BytesError {
    BytesError::Damaged(key.escape_ascii().to_string(), what.to_string())
}

/// The README, whose example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
