//! A store of twobox to copy from: all tables, and the index, in one ordered map of bytes. The
//! README says what lies where.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;
use twobox::codec::{self, Damaged};
use twobox::store::{Inconsistent, RowByRow, answer};
use twobox::{
    Applied, Batch, EventId, FORMAT_VERSION, IndexEntry, Key, Load, Millis, OrderingKey, Query,
    Reader, Rows, Store, StoreError, Stored, Table, Tables, Transaction, Write,
};

/// Everything that is kept, as bytes.
pub type Map = BTreeMap<Vec<u8>, Vec<u8>>;

// What the first byte of a key says; those of tables have their numbers.
const META: u8 = 0;
const DUE: u8 = 100;
const PLACES: u8 = 101;
const DEAD: u8 = 102;
const OWN: u8 = 255;

/// What can go wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BytesError {
    /// A row cannot be read.
    #[error("at {key}: {damaged}")]
    Row {
        /// Its key.
        key: String,
        /// What is wrong with it.
        damaged: Damaged,
    },
    /// An index entry cannot be read.
    #[error("the index entry {0} is damaged; restore the store from a copy")]
    Entry(String),
    /// Rows and index entries contradict each other.
    #[error(transparent)]
    Inconsistent(#[from] Inconsistent),
    /// It is no store, or one of another version.
    #[error("these bytes are no store of format {FORMAT_VERSION}")]
    Format,
}

impl StoreError for BytesError {}

/// A store in a map of bytes.
#[derive(Debug)]
pub struct BytesStore {
    committed: Mutex<Arc<Map>>,
    writer: Mutex<()>,
}

impl BytesStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        let format = FORMAT_VERSION.to_be_bytes().to_vec();
        Self::of(Map::from([(format_key(), format)]))
    }

    /// The store that has left these bytes.
    ///
    /// # Errors
    ///
    /// [`BytesError::Format`] if no store has, or one of another version.
    pub fn open(map: Map) -> Result<Self, BytesError> {
        let format = map.get(&format_key()).ok_or(BytesError::Format)?;
        if *format == FORMAT_VERSION.to_be_bytes() {
            Ok(Self::of(map))
        } else {
            Err(BytesError::Format)
        }
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

impl Default for BytesStore {
    fn default() -> Self {
        Self::new()
    }
}

/// A panic while it was held left nothing half done behind: a commit is one assignment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reader for BytesStore {
    type Error = BytesError;
    type View<'a> = View;

    fn view(&self) -> Result<View, BytesError> {
        Ok(View(lock(&self.committed).clone()))
    }
}

impl Store for BytesStore {
    type Tx<'a> = Tx<'a>;

    fn begin(&self) -> Result<Tx<'_>, BytesError> {
        let writer = lock(&self.writer);
        Ok(Tx { view: self.view()?, committed: &self.committed, _writer: writer })
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
    /// Writes a row of the user's own.
    pub fn put_own(&mut self, key: &str, value: &str) {
        let map = Arc::make_mut(&mut self.view.0);
        map.insert(bytes(OWN, &[key.as_bytes()]), value.into());
    }

    /// Reads a row of the user's own.
    #[must_use]
    pub fn own(&self, key: &str) -> Option<&[u8]> {
        self.view.0.get(&bytes(OWN, &[key.as_bytes()])).map(Vec::as_slice)
    }
}

impl Load for View {
    type Error = BytesError;

    fn load(&mut self, query: &Query) -> Result<Rows, BytesError> {
        answer(self, query)
    }
}

impl Load for Tx<'_> {
    type Error = BytesError;

    fn load(&mut self, query: &Query) -> Result<Rows, BytesError> {
        answer(&self.view, query)
    }
}

impl Tables for Tx<'_> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, BytesError> {
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
        let map = Arc::make_mut(&mut self.view.0);
        for key in removed {
            map.remove(&key);
        }
        map.extend(put);
        Ok(Applied::Written)
    }
}

impl Transaction for Tx<'_> {
    fn commit(self) -> Result<(), BytesError> {
        *lock(self.committed) = self.view.0;
        Ok(())
    }
}

impl RowByRow for View {
    type Error = BytesError;

    fn row(&self, key: &Key) -> Result<Option<Cow<'_, Stored>>, BytesError> {
        let key_bytes = row_key(key);
        self.0.get(&key_bytes).map(|value| read(key.table(), &key_bytes, value)).transpose()
    }

    fn rows_after(
        &self,
        table: Table,
        after: Option<&Key>,
    ) -> impl Iterator<Item = Result<Cow<'_, Stored>, BytesError>> {
        let (from, after) = start(vec![table.number()], after.map(row_key));
        self.with_prefix(vec![table.number()], from)
            .filter(move |(key, _)| after.as_ref() != Some(key))
            .map(move |(key, value)| read(table, key, value))
    }

    fn due_from(
        &self,
        floor: Millis,
    ) -> impl Iterator<Item = Result<(Millis, OrderingKey), BytesError>> {
        let from = bytes(DUE, &[&floor.get().to_be_bytes()]);
        self.with_prefix(vec![DUE], from).map(|(key, _)| {
            let (due, lane) = key[1..].split_first_chunk().ok_or_else(|| damaged(key))?;
            Ok((Millis::new(u64::from_be_bytes(*due)), name(key, lane)?))
        })
    }

    fn places_from(
        &self,
        lane: &OrderingKey,
        sequence: u64,
    ) -> impl Iterator<Item = Result<(u64, EventId), BytesError>> {
        let prefix = bytes(PLACES, &[lane.as_str().as_bytes(), &[0]]);
        let from = [prefix.as_slice(), &sequence.to_be_bytes()].concat();
        let before = prefix.len();
        self.with_prefix(prefix, from).map(move |(key, id)| {
            let sequence = key[before..].try_into().map_err(|_| damaged(key))?;
            Ok((u64::from_be_bytes(sequence), name(key, id)?))
        })
    }

    fn dead_after(
        &self,
        after: Option<&EventId>,
    ) -> impl Iterator<Item = Result<EventId, BytesError>> {
        let after = after.map(|id| bytes(DEAD, &[id.as_str().as_bytes()]));
        let (from, after) = start(vec![DEAD], after);
        self.with_prefix(vec![DEAD], from)
            .filter(move |(key, _)| after.as_ref() != Some(key))
            .map(|(key, _)| name(key, &key[1..]))
    }

    fn inconsistent(&self, found: Inconsistent) -> BytesError {
        found.into()
    }
}

impl View {
    /// What has this prefix, from this key on.
    fn with_prefix(
        &self,
        prefix: Vec<u8>,
        from: Vec<u8>,
    ) -> impl Iterator<Item = (&Vec<u8>, &Vec<u8>)> {
        self.0.range(from..).take_while(move |(key, _)| key.starts_with(&prefix))
    }
}

/// Where to begin, and which key to leave out.
fn start(prefix: Vec<u8>, after: Option<Vec<u8>>) -> (Vec<u8>, Option<Vec<u8>>) {
    (after.clone().unwrap_or(prefix), after)
}

fn bytes(first: u8, parts: &[&[u8]]) -> Vec<u8> {
    [&[first][..], &parts.concat()].concat()
}

fn format_key() -> Vec<u8> {
    bytes(META, &[b"format"])
}

fn row_key(key: &Key) -> Vec<u8> {
    let mut bytes = vec![key.table().number()];
    codec::encode_key(key, &mut bytes);
    bytes
}

fn entry_bytes(entry: &IndexEntry) -> (Vec<u8>, Vec<u8>) {
    match entry {
        IndexEntry::Due(due, lane) => {
            (bytes(DUE, &[&due.get().to_be_bytes(), lane.as_str().as_bytes()]), Vec::new())
        }
        IndexEntry::Place(lane, sequence, id) => {
            let place = [lane.as_str().as_bytes(), &[0], &sequence.to_be_bytes()];
            (bytes(PLACES, &place), id.as_str().into())
        }
        IndexEntry::Dead(id) => (bytes(DEAD, &[id.as_str().as_bytes()]), Vec::new()),
    }
}

fn read<'a>(table: Table, key: &[u8], value: &[u8]) -> Result<Cow<'a, Stored>, BytesError> {
    let stored = codec::decode(table, &key[1..], value);
    stored.map(Cow::Owned).map_err(|damaged| BytesError::Row { key: shown(key), damaged })
}

/// A name in an index entry.
fn name<T: for<'a> TryFrom<&'a str>>(key: &[u8], text: &[u8]) -> Result<T, BytesError> {
    let text = std::str::from_utf8(text).map_err(|_| damaged(key))?;
    T::try_from(text).map_err(|_| damaged(key))
}

fn damaged(key: &[u8]) -> BytesError {
    BytesError::Entry(shown(key))
}

fn shown(key: &[u8]) -> String {
    key.escape_ascii().to_string()
}

/// The README, whose example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
