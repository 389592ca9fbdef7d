//! The tables in a redb transaction: how rows and the index are kept, how queries are answered and batches applied.
//!
//! | redb table      | key                  | value                                             |
//! |-----------------|----------------------|---------------------------------------------------|
//! | `twobox_meta`   | `format`             | the format version, with a checksum               |
//! | `twobox_NAME`, one for each [`Table`] | the row's key | the row as bytes, with a checksum |
//! | `twobox_index`  | the row's index entry | nothing                                           |
//!
//! A checksum is the CRC-32 of table, key and value, and is checked at each read: redb does not verify its pages then.
//! An index entry is checked against the row that it leads to. No table is open longer than one call, so the user may open any
//! table of theirs, and ours to look at, in the same transaction.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::borrow::Borrow;
use core::ops::{Bound, Range};

use redb::{MultimapTableHandle, ReadableTableMetadata as _};
use redb::{ReadOnlyTable, ReadTransaction, ReadableTable, TableDefinition, TableError, TableHandle, Value, WriteTransaction};
use spin::LazyLock;
use twobox::codec::{self, IndexPart};
use twobox::{
    Applied, Batch, Change, FORMAT_VERSION, IndexEntry, Key, OrderingKey, Query, Record, Revision, Rows, Stored, Table,
};

use crate::error::{RedbError, shielded};

type Bytes = &'static [u8];

const PREFIX: &str = "twobox_";
const META: TableDefinition<'_, Bytes, Bytes> = TableDefinition::new("twobox_meta");
const INDEX: TableDefinition<'_, Bytes, ()> = TableDefinition::new("twobox_index");
const FORMAT: &[u8] = b"format";

static NAMES: LazyLock<[String; Table::ALL.len()]> = LazyLock::new(|| Table::ALL.map(|table| format!("{PREFIX}{table}")));

fn definition(table: Table) -> TableDefinition<'static, Bytes, Bytes> {
    TableDefinition::new(&NAMES[table as usize])
}

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
    for table in Table::ALL {
        tx.table(definition(table))?;
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
    for table in Table::ALL {
        tx.table(definition(table))?;
    }
    tx.table(INDEX)?;
    Ok(())
}

/// One of the tables of rows, open.
struct Opened<T> {
    table: Table,
    rows: T,
}

impl<T: ReadableTable<Bytes, Bytes>> Opened<T> {
    fn open<'s, S: Source<Table<'s, Bytes> = T> + 's>(source: &'s S, table: Table) -> Result<Self, RedbError> {
        Ok(Self { table, rows: source.table(definition(table))? })
    }

    /// The row with these bytes as its key.
    fn get(&self, key: &[u8]) -> Result<Option<Stored>, RedbError> {
        match self.rows.get(key)? {
            Some(sealed) => self.read(key, sealed.value()).map(Some),
            None => Ok(None),
        }
    }

    fn read(&self, key: &[u8], sealed: &[u8]) -> Result<Stored, RedbError> {
        Ok(codec::decode(self.table, key, unseal(self.table.name(), key, sealed)?)?)
    }
}

/// Answers a query.
pub(crate) fn load<S: Source>(source: &S, query: &Query) -> Result<Rows, RedbError> {
    shielded(|| answer(source, query))
}

fn answer<S: Source>(source: &S, query: &Query) -> Result<Rows, RedbError> {
    let mut rows = Rows::default();
    let mut buffer = Vec::new();
    match query {
        Query::Rows(keys) => {
            for keys in keys.as_slice().chunk_by(|a, b| a.table() == b.table()) {
                let table = Opened::open(source, keys[0].table())?;
                for key in keys {
                    if let Some(stored) = table.get(bytes_of(key, &mut buffer))? {
                        rows.push(stored);
                    }
                }
            }
        }
        Query::Due { now, lanes, run, events } => {
            let queues = Queues::open(source)?;
            for (given, entry) in queues.entries(IndexPart::Due, None)?.take(*lanes).enumerate() {
                if rows.as_slice().len() - given >= *events {
                    break;
                }
                let entry = entry?;
                let IndexEntry::Due(due, lane) = &entry else { continue };
                rows.push(queues.row_of(&entry)?);
                if due > now {
                    break;
                }
                queues.push_pending(lane, *run, &mut rows)?;
            }
        }
        Query::Lanes(lanes) => {
            let queues = Queues::open(source)?;
            for (lane, run) in lanes {
                queues.push_lane(lane, *run, &mut rows)?;
            }
        }
        Query::Deliveries { events, run } => {
            let queues = Queues::open(source)?;
            let mut lanes = Vec::new();
            for id in events {
                let Some(stored) = queues.outbox.get(bytes_of(&Key::Outbox(id.clone()), &mut buffer))? else { continue };
                if let Record::Outbox(_, row) = &stored.record {
                    lanes.push(row.lane.clone());
                }
                rows.push(stored);
            }
            lanes.sort_unstable();
            lanes.dedup();
            for lane in &lanes {
                queues.push_lane(lane, *run, &mut rows)?;
            }
        }
        Query::Pending { after, limit } => {
            let queues = Queues::open(source)?;
            let after = after.clone().map(|(lane, sequence, id)| IndexEntry::Pending(lane, sequence, id));
            let mut last = None;
            for entry in queues.entries(IndexPart::AllPending, after.as_ref())?.take(*limit) {
                let entry = entry?;
                let IndexEntry::Pending(lane, ..) = &entry else { continue };
                if last.as_ref() != Some(lane) {
                    queues.push_lane(lane, 0, &mut rows)?;
                    last = Some(lane.clone());
                }
                rows.push(queues.row_of(&entry)?);
            }
        }
        Query::Dead { after, limit } => {
            let queues = Queues::open(source)?;
            let after = after.clone().map(IndexEntry::Dead);
            for entry in queues.entries(IndexPart::Dead, after.as_ref())?.take(*limit) {
                rows.push(queues.row_of(&entry?)?);
            }
        }
        Query::Walk { table, after, limit } => {
            let table = Opened::open(source, *table)?;
            let start = match after {
                Some(key) => Bound::Excluded(bytes_of(key, &mut buffer)),
                None => Bound::Unbounded,
            };
            for found in table.rows.range(from(start))?.take(*limit) {
                let (key, sealed) = found?;
                rows.push(table.read(key.value(), sealed.value())?);
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

/// All keys from here on.
fn from(start: Bound<&[u8]>) -> (Bound<Place<'_>>, Bound<Place<'_>>) {
    (start.map(Place), Bound::Unbounded)
}

/// The bytes of a key, in a buffer that is used again.
fn bytes_of<'b>(key: &Key, buffer: &'b mut Vec<u8>) -> &'b [u8] {
    buffer.clear();
    codec::encode_key(key, buffer);
    buffer
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

/// The lanes and what stands in them.
struct Queues<'s, S: Source + 's> {
    index: S::Table<'s, ()>,
    lanes: Opened<S::Table<'s, Bytes>>,
    outbox: Opened<S::Table<'s, Bytes>>,
}

impl<'s, S: Source> Queues<'s, S> {
    fn open(source: &'s S) -> Result<Self, RedbError> {
        let (lanes, outbox) = (Opened::open(source, Table::Lanes)?, Opened::open(source, Table::Outbox)?);
        Ok(Self { index: source.table(INDEX)?, lanes, outbox })
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
        let range = self.index.range(from(start))?;
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
        let (key, mut buffer) = (key_of(entry), Vec::new());
        let table = if key.table() == Table::Lanes { &self.lanes } else { &self.outbox };
        let stored = table.get(bytes_of(&key, &mut buffer))?.ok_or_else(|| index_error(entry, "there is no such row"))?;
        if stored.record.index_entry().as_ref() == Some(entry) {
            Ok(stored)
        } else {
            Err(index_error(entry, "that row has another place in it"))
        }
    }

    /// Answers with a lane, if it exists, and its first pending events.
    fn push_lane(&self, lane: &OrderingKey, run: usize, rows: &mut Rows) -> Result<(), RedbError> {
        let mut buffer = Vec::new();
        let Some(stored) = self.lanes.get(bytes_of(&Key::Lane(lane.clone()), &mut buffer))? else { return Ok(()) };
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

/// Writes a batch, if all of its guards hold. After an error nothing or a part of it may be written.
pub(crate) fn apply(tx: &WriteTransaction, batch: &Batch) -> Result<Applied, RedbError> {
    shielded(|| {
        let mut tables: Vec<Opened<redb::Table<'_, Bytes, Bytes>>> = Vec::new();
        let mut index = None;
        let mut keys = Vec::new();
        let mut checked = Vec::with_capacity(batch.changes().len());
        for change in batch.changes() {
            let key = change.key();
            // A batch is sorted by table first, so each is opened once.
            if tables.last().is_none_or(|last| last.table != key.table()) {
                tables.push(Opened::open(tx, key.table())?);
            }
            let (table, start) = (tables.len() - 1, keys.len());
            codec::encode_key(&key, &mut keys);
            let found = tables[table].get(&keys[start..])?;
            if !change.expect().holds(found.as_ref().map(|stored| stored.revision)) {
                return Ok(Applied::Conflict(key));
            }
            let old = found.and_then(|stored| stored.record.index_entry());
            let new = match change {
                Change::Put { record, .. } => record.index_entry(),
                Change::Delete { .. } => None,
            };
            let moved = old != new;
            if moved && index.is_none() {
                index = Some(tx.open_table(INDEX)?);
            }
            checked.push(Checked { change, table, key: start..keys.len(), moved: moved.then_some((old, new)) });
        }
        write(&mut tables, index.as_mut(), &keys, &checked)?;
        Ok(Applied::Written)
    })
}

/// A change whose guard holds.
struct Checked<'a> {
    change: &'a Change,
    /// Which of the open tables.
    table: usize,
    /// Where its key is in the buffer of keys.
    key: Range<usize>,
    /// The index entries of the row before and after, if they differ.
    moved: Option<(Option<IndexEntry>, Option<IndexEntry>)>,
}

/// Writes the index, then the rows.
fn write(
    tables: &mut [Opened<redb::Table<'_, Bytes, Bytes>>],
    index: Option<&mut redb::Table<'_, Bytes, ()>>,
    keys: &[u8],
    changes: &[Checked<'_>],
) -> Result<(), RedbError> {
    let mut buffer = Vec::new();
    if let Some(index) = index {
        for (old, new) in changes.iter().filter_map(|checked| checked.moved.as_ref()) {
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
    }
    for Checked { change, table, key, .. } in changes {
        let (Opened { table, rows }, key) = (&mut tables[*table], &keys[key.clone()]);
        match change {
            Change::Put { expect, record } => {
                encode_row(*table, key, record, expect.written(), &mut buffer);
                rows.insert(key, buffer.as_slice())?;
            }
            Change::Delete { .. } => {
                rows.remove(key)?;
            }
        }
    }
    Ok(())
}

fn encode_row(table: Table, key: &[u8], record: &Record, revision: Revision, buffer: &mut Vec<u8>) {
    buffer.clear();
    codec::encode_value(record, revision, buffer);
    seal(table.name(), key, buffer);
}
