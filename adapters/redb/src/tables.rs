//! The tables in a redb transaction: how rows and the index are kept, how queries are answered and batches applied.
//!
//! | redb table      | key                  | value                                             |
//! |-----------------|----------------------|---------------------------------------------------|
//! | `twobox_meta`   | `format`             | the format version, with a checksum               |
//! | `twobox_NAME`, one for each [`Table`] | the row's key | the row as bytes, with a checksum |
//! | `twobox_index`  | the row's index entry | nothing                                           |
//!
//! A checksum is the CRC-32 of table, key and value, and is checked at each read: redb does not verify its pages then.
//! An index entry is checked against the row that it leads to.

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::borrow::Borrow;
use core::cell::OnceCell;
use core::ops::{Bound, Range};

use redb::{MultimapTableHandle, ReadableTableMetadata as _};
use redb::{ReadOnlyTable, ReadTransaction, ReadableTable, TableDefinition, TableError, TableHandle, Value, WriteTransaction};
use twobox::codec::{self, IndexPart};
use twobox::{
    Applied, Batch, Change, Decision, FORMAT_VERSION, IndexEntry, Key, Millis, OrderingKey, Query, Record, Revision, Rows,
    RunError, Step, Stepped, Stored, Table, Transition,
};

use crate::error::{RedbError, shielded};

type Bytes = &'static [u8];

const PREFIX: &str = "twobox_";
const META: TableDefinition<'_, Bytes, Bytes> = TableDefinition::new("twobox_meta");
const INDEX: TableDefinition<'_, Bytes, ()> = TableDefinition::new("twobox_index");
const FORMAT: &[u8] = b"format";

/// In the order of [`Table::ALL`].
const ROWS: [TableDefinition<'_, Bytes, Bytes>; Table::ALL.len()] = [
    TableDefinition::new("twobox_requests"),
    TableDefinition::new("twobox_orders"),
    TableDefinition::new("twobox_events"),
    TableDefinition::new("twobox_outbox"),
    TableDefinition::new("twobox_lanes"),
    TableDefinition::new("twobox_inbox"),
    TableDefinition::new("twobox_effects"),
    TableDefinition::new("twobox_positions"),
    TableDefinition::new("twobox_calls"),
];

/// A transaction whose tables can be read.
pub(crate) trait Source {
    type Table<'a, V: Value + 'static>: ReadableTable<Bytes, V>
    where
        Self: 'a;

    fn table<V: Value + 'static>(&self, definition: TableDefinition<'_, Bytes, V>) -> Result<Self::Table<'_, V>, TableError>;
}

impl Source for WriteTransaction {
    type Table<'a, V: Value + 'static> = redb::Table<'a, Bytes, V>;

    fn table<V: Value + 'static>(
        &self,
        definition: TableDefinition<'_, Bytes, V>,
    ) -> Result<redb::Table<'_, Bytes, V>, TableError> {
        self.open_table(definition)
    }
}

impl Source for ReadTransaction {
    type Table<'a, V: Value + 'static> = ReadOnlyTable<Bytes, V>;

    fn table<V: Value + 'static>(
        &self,
        definition: TableDefinition<'_, Bytes, V>,
    ) -> Result<ReadOnlyTable<Bytes, V>, TableError> {
        self.open_table(definition)
    }
}

/// Appends the checksum to a value.
fn seal(table: &str, key: &[u8], value: &mut Vec<u8>) {
    let sum = checksum(table, key, value);
    value.extend_from_slice(&sum.to_be_bytes());
}

/// The value without its checksum, if that is right.
fn unseal<'a>(table: &str, key: &[u8], sealed: &'a [u8]) -> Result<&'a [u8], RedbError> {
    match sealed.split_last_chunk() {
        Some((value, sum)) if checksum(table, key, value).to_be_bytes() == *sum => Ok(value),
        Some(_) | None => Err(RedbError::Checksum { table: table.to_string(), key: String::from_utf8_lossy(key).into_owned() }),
    }
}

fn checksum(table: &str, key: &[u8], value: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(table.as_bytes());
    // The lengths keep apart what stands side by side.
    hasher.update(&[0]);
    hasher.update(&(key.len() as u64).to_be_bytes());
    hasher.update(key);
    hasher.update(value);
    hasher.finalize()
}

/// Reads the format version: an error unless it is ours, `None` if there is none.
fn format_in<T: ReadableTable<Bytes, Bytes>>(meta: &T) -> Result<Option<()>, RedbError> {
    let Some(sealed) = meta.get(FORMAT)? else { return Ok(None) };
    let value = unseal(META.name(), FORMAT, sealed.value())?;
    let found = value.try_into().map(u32::from_be_bytes);
    match found {
        Ok(FORMAT_VERSION) => Ok(Some(())),
        Ok(found) => Err(RedbError::UnknownFormat { found, known: FORMAT_VERSION }),
        Err(_) => Err(RedbError::Damaged { what: "the format version is no number".to_string() }),
    }
}

/// Checks that this is a store of the format that we know.
pub(crate) fn check_format(tx: &ReadTransaction) -> Result<(), RedbError> {
    match tx.table(META) {
        Ok(meta) => format_in(&meta)?.ok_or(RedbError::NotTwobox),
        Err(TableError::TableDoesNotExist(_)) => Err(RedbError::NotTwobox),
        Err(error) => Err(error.into()),
    }
}

/// Checks that this is a store, and that all of its tables are there.
pub(crate) fn check(tx: &ReadTransaction) -> Result<(), RedbError> {
    check_format(tx)?;
    for definition in ROWS {
        tx.table(definition)?;
    }
    tx.table(INDEX)?;
    Ok(())
}

/// Makes a store of the database, in this transaction, unless it is one.
pub(crate) fn prepare(tx: &WriteTransaction) -> Result<(), RedbError> {
    let mut meta = tx.table(META)?;
    if format_in(&meta)?.is_some() {
        return Ok(());
    }
    let tables = tx.list_tables()?.map(|table| table.name().to_string());
    let multimaps = tx.list_multimap_tables()?.map(|table| table.name().to_string());
    let mut names = tables.filter(|name| name != META.name()).chain(multimaps);
    if let Some(table) = names.find(|name| name.starts_with(PREFIX)) {
        return Err(RedbError::NameTaken { table, what: "the database has no format version of twobox".to_string() });
    }
    if !meta.is_empty()? {
        let what = "it has rows, but no format version of twobox".to_string();
        return Err(RedbError::NameTaken { table: META.name().to_string(), what });
    }
    let mut version = FORMAT_VERSION.to_be_bytes().to_vec();
    seal(META.name(), FORMAT, &mut version);
    meta.insert(FORMAT, version.as_slice())?;
    for definition in ROWS {
        tx.table(definition)?;
    }
    tx.table(INDEX)?;
    Ok(())
}

/// The tables in a transaction, each opened when it is first needed.
pub(crate) struct Opened<'s, S: Source> {
    source: &'s S,
    rows: [OnceCell<S::Table<'s, Bytes>>; Table::ALL.len()],
    index: OnceCell<S::Table<'s, ()>>,
}

impl<'s, S: Source> Opened<'s, S> {
    pub(crate) fn new(source: &'s S) -> Self {
        Self { source, rows: Default::default(), index: OnceCell::new() }
    }

    fn rows(&self, table: Table) -> Result<&S::Table<'s, Bytes>, RedbError> {
        let at = table as usize;
        opened(&self.rows[at], || self.source.table(ROWS[at]))
    }

    /// The row of this key, for which it uses the buffer.
    fn get(&self, key: &Key, buffer: &mut Vec<u8>) -> Result<Option<Stored>, RedbError> {
        buffer.clear();
        codec::encode_key(key, buffer);
        self.get_bytes(key.table(), buffer)
    }

    fn get_bytes(&self, table: Table, key: &[u8]) -> Result<Option<Stored>, RedbError> {
        match self.rows(table)?.get(key)? {
            Some(sealed) => read(table, key, sealed.value()).map(Some),
            None => Ok(None),
        }
    }

    /// The entries of a part of the index, in their order, after this one.
    fn entries(
        &self,
        part: IndexPart<'_>,
        after: Option<&IndexEntry>,
    ) -> Result<impl Iterator<Item = Result<IndexEntry, RedbError>>, RedbError> {
        let mut prefix = Vec::new();
        codec::encode_index_part(part, &mut prefix);
        let mut last = Vec::new();
        let start = match after {
            Some(entry) => {
                codec::encode_index_entry(entry, &mut last);
                Bound::Excluded(last.as_slice())
            }
            None => Bound::Included(prefix.as_slice()),
        };
        let range = opened(&self.index, || self.source.table(INDEX))?.range((start.map(Place), Bound::Unbounded))?;
        Ok(range.map_while(move |found| match found {
            Ok((bytes, _)) => {
                let bytes = bytes.value();
                bytes.starts_with(&prefix).then(|| codec::decode_index_entry(bytes).map_err(RedbError::from))
            }
            Err(error) => Some(Err(error.into())),
        }))
    }

    /// The row that an index entry leads to. That there is none, or that it belongs elsewhere, is damage.
    fn row_of(&self, entry: &IndexEntry) -> Result<Stored, RedbError> {
        let stored = self.get(&key_of(entry), &mut Vec::new())?.ok_or_else(|| index_error(entry, "there is no such row"))?;
        if stored.record.index_entry().as_ref() == Some(entry) {
            Ok(stored)
        } else {
            Err(index_error(entry, "that row has another place in it"))
        }
    }

    /// Answers with a lane, if it exists, and its first pending events.
    fn push_lane(&self, lane: &OrderingKey, run: usize, rows: &mut Rows) -> Result<(), RedbError> {
        let Some(stored) = self.get(&Key::Lane(lane.clone()), &mut Vec::new())? else { return Ok(()) };
        rows.push(stored);
        self.push_pending(lane, run, rows)
    }

    fn push_pending(&self, lane: &OrderingKey, run: usize, rows: &mut Rows) -> Result<(), RedbError> {
        for entry in self.entries(IndexPart::Pending(lane), None)?.take(run) {
            rows.push(self.row_of(&entry?)?);
        }
        Ok(())
    }
}

fn opened<T>(cell: &OnceCell<T>, open: impl FnOnce() -> Result<T, TableError>) -> Result<&T, RedbError> {
    match cell.get() {
        Some(there) => Ok(there),
        None => {
            let opened = open()?;
            Ok(cell.get_or_init(|| opened))
        }
    }
}

/// The row with these bytes as its key and its value.
fn read(table: Table, key: &[u8], sealed: &[u8]) -> Result<Stored, RedbError> {
    Ok(codec::decode(table, key, unseal(table.name(), key, sealed)?)?)
}

/// Answers a query.
pub(crate) fn load<S: Source>(tables: &Opened<'_, S>, query: &Query) -> Result<Rows, RedbError> {
    shielded(|| answer(tables, query))
}

fn answer<S: Source>(tables: &Opened<'_, S>, query: &Query) -> Result<Rows, RedbError> {
    let mut rows = Rows::default();
    let mut buffer = Vec::new();
    match query {
        Query::Rows(keys) => {
            for key in keys.as_slice() {
                if let Some(stored) = tables.get(key, &mut buffer)? {
                    rows.push(stored);
                }
            }
        }
        Query::Due { now, lanes, run, events } => {
            for (given, entry) in tables.entries(IndexPart::Due, None)?.take(*lanes).enumerate() {
                if rows.as_slice().len() - given >= *events {
                    break;
                }
                let entry = entry?;
                let IndexEntry::Due(due, lane) = &entry else { continue };
                rows.push(tables.row_of(&entry)?);
                if due > now {
                    break;
                }
                tables.push_pending(lane, *run, &mut rows)?;
            }
        }
        Query::Lanes(lanes) => {
            for (lane, run) in lanes {
                tables.push_lane(lane, *run, &mut rows)?;
            }
        }
        Query::Deliveries { events, run } => {
            let mut lanes = Vec::new();
            for id in events {
                let Some(stored) = tables.get(&Key::Outbox(id.clone()), &mut buffer)? else { continue };
                if let Record::Outbox(_, row) = &stored.record {
                    lanes.push(row.lane.clone());
                }
                rows.push(stored);
            }
            lanes.sort_unstable();
            lanes.dedup();
            for lane in &lanes {
                tables.push_lane(lane, *run, &mut rows)?;
            }
        }
        Query::Pending { after, limit } => {
            let after = after.clone().map(|(lane, sequence, id)| IndexEntry::Pending(lane, sequence, id));
            let mut last = None;
            for entry in tables.entries(IndexPart::AllPending, after.as_ref())?.take(*limit) {
                let entry = entry?;
                let IndexEntry::Pending(lane, ..) = &entry else { continue };
                if last.as_ref() != Some(lane) {
                    tables.push_lane(lane, 0, &mut rows)?;
                    last = Some(lane.clone());
                }
                rows.push(tables.row_of(&entry)?);
            }
        }
        Query::Dead { after, limit } => {
            let after = after.clone().map(IndexEntry::Dead);
            for entry in tables.entries(IndexPart::Dead, after.as_ref())?.take(*limit) {
                rows.push(tables.row_of(&entry?)?);
            }
        }
        Query::Walk { table, after, limit } => {
            let start = match after {
                Some(key) => {
                    codec::encode_key(key, &mut buffer);
                    Bound::Excluded(Place(&buffer))
                }
                None => Bound::Unbounded,
            };
            for found in tables.rows(*table)?.range((start, Bound::Unbounded))?.take(*limit) {
                let (key, sealed) = found?;
                rows.push(read(*table, key.value(), sealed.value())?);
            }
        }
    }
    Ok(rows)
}

/// A key as a bound of a range. It is no reference, so it says by itself which kind of range it makes, to each of redb's interfaces.
struct Place<'a>(&'a [u8]);

impl<'a> Borrow<&'a [u8]> for Place<'a> {
    fn borrow(&self) -> &&'a [u8] {
        &self.0
    }
}

/// The row that an index entry belongs to.
fn key_of(entry: &IndexEntry) -> Key {
    match entry {
        IndexEntry::Due(_, lane) => Key::Lane(lane.clone()),
        IndexEntry::Pending(_, _, id) | IndexEntry::Dead(id) => Key::Outbox(id.clone()),
    }
}

fn index_error(entry: &IndexEntry, what: &'static str) -> RedbError {
    RedbError::Index { entry: key_of(entry).to_string(), what }
}

/// Writes a batch, if all of its guards hold. After an error nothing or a part of it may be written.
pub(crate) fn apply(tables: &mut Opened<'_, WriteTransaction>, batch: &Batch) -> Result<Applied, RedbError> {
    shielded(|| write_all(tables, &Known::default(), batch))
}

/// Runs a transition, as [`twobox::Tables::step`] says. The flag is raised before anything is written, and lowered when all of it is.
pub(crate) fn step<T: Transition>(
    tables: &mut Opened<'_, WriteTransaction>,
    broken: &mut bool,
    transition: &T,
    now: Millis,
) -> Stepped<T, RedbError> {
    let query = transition.query(now);
    let rows = load(tables, &query).map_err(RunError::Store)?;
    let Decision { batch, outcome } = transition.decide(now, &rows).map_err(RunError::Refused)?;
    if batch.is_empty() {
        return Ok(Step { outcome, wrote: false });
    }
    *broken = true;
    let applied = shielded(|| write_all(tables, &Known::new(&query, &rows), &batch)).map_err(RunError::Store)?;
    *broken = false;
    match applied {
        Applied::Written => Ok(Step { outcome, wrote: true }),
        Applied::Conflict(key) => Err(RunError::Conflict(key)),
    }
}

/// Rows that were loaded since anything was written in the transaction, so that they need not be read again.
#[derive(Default)]
struct Known<'a> {
    /// Keys that were asked for, in order.
    asked: &'a [Key],
    /// What was found, in the order of keys.
    found: Vec<(Key, &'a Stored)>,
}

impl<'a> Known<'a> {
    fn new(query: &'a Query, rows: &'a Rows) -> Self {
        let asked = if let Query::Rows(keys) = query { keys.as_slice() } else { &[] };
        let mut found: Vec<_> = rows.as_slice().iter().map(|stored| (stored.record.key(), stored)).collect();
        found.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        Self { asked, found }
    }

    /// The row of this key, or that there is none; nothing if that is not known.
    fn get(&self, key: &Key) -> Option<Option<&Stored>> {
        match self.found.binary_search_by(|(found, _)| found.cmp(key)) {
            Ok(at) => Some(Some(self.found[at].1)),
            Err(_) => self.asked.binary_search(key).is_ok().then_some(None),
        }
    }
}

fn write_all(tables: &mut Opened<'_, WriteTransaction>, known: &Known<'_>, batch: &Batch) -> Result<Applied, RedbError> {
    let mut keys = Vec::new();
    let mut checked = Vec::with_capacity(batch.changes().len());
    for change in batch.changes() {
        let (key, start) = (change.key(), keys.len());
        codec::encode_key(&key, &mut keys);
        let read;
        let found = match known.get(&key) {
            Some(found) => found,
            None => {
                read = tables.get_bytes(key.table(), &keys[start..])?;
                read.as_ref()
            }
        };
        if !change.expect().holds(found.map(|stored| stored.revision)) {
            return Ok(Applied::Conflict(key));
        }
        let old = found.and_then(|stored| stored.record.index_entry());
        let new = match change {
            Change::Put { record, .. } => record.index_entry(),
            Change::Delete { .. } => None,
        };
        let moved = (old != new).then_some((old, new));
        checked.push(Checked { change, table: key.table(), key: start..keys.len(), moved });
    }
    write(tables, &keys, &checked)?;
    Ok(Applied::Written)
}

/// A change whose guard holds.
struct Checked<'a> {
    change: &'a Change,
    table: Table,
    /// Where its key is in the buffer of keys.
    key: Range<usize>,
    /// The index entries of the row before and after, if they differ.
    moved: Option<(Option<IndexEntry>, Option<IndexEntry>)>,
}

/// Writes the index, then the rows.
fn write(tables: &mut Opened<'_, WriteTransaction>, keys: &[u8], changes: &[Checked<'_>]) -> Result<(), RedbError> {
    let mut buffer = Vec::new();
    let mut moved = changes.iter().filter_map(|checked| checked.moved.as_ref()).peekable();
    if moved.peek().is_some() {
        let mut index = taken(&mut tables.index, || tables.source.table(INDEX))?;
        for (old, new) in moved {
            if let Some(old) = old {
                buffer.clear();
                codec::encode_index_entry(old, &mut buffer);
                if index.remove(buffer.as_slice())?.is_none() {
                    return Err(index_error(old, "its entry is missing"));
                }
            }
            if let Some(new) = new {
                buffer.clear();
                codec::encode_index_entry(new, &mut buffer);
                index.insert(buffer.as_slice(), ())?;
            }
        }
        tables.index = index.into();
    }
    // A batch is sorted by table first.
    for changes in changes.chunk_by(|a, b| a.table == b.table) {
        let table = changes[0].table;
        let at = table as usize;
        let mut rows = taken(&mut tables.rows[at], || tables.source.table(ROWS[at]))?;
        for Checked { change, key, .. } in changes {
            let key = &keys[key.clone()];
            match change {
                Change::Put { expect, record } => {
                    encode_row(table, key, record, expect.written(), &mut buffer);
                    rows.insert(key, buffer.as_slice())?;
                }
                Change::Delete { .. } => {
                    rows.remove(key)?;
                }
            }
        }
        tables.rows[at] = rows.into();
    }
    Ok(())
}

fn taken<T>(cell: &mut OnceCell<T>, open: impl FnOnce() -> Result<T, TableError>) -> Result<T, RedbError> {
    cell.take().map_or_else(|| Ok(open()?), Ok)
}

fn encode_row(table: Table, key: &[u8], record: &Record, revision: Revision, buffer: &mut Vec<u8>) {
    buffer.clear();
    codec::encode_value(record, revision, buffer);
    seal(table.name(), key, buffer);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_the_names_of_tables() {
        for table in Table::ALL {
            assert_eq!(ROWS[table as usize].name(), format!("{PREFIX}{table}"));
        }
    }
}
