//! The tables in a redb transaction: how rows and the index are kept, how queries are answered and
//! batches applied.
//!
//! | redb table      | key                  | value                                             |
//! |-----------------|----------------------|---------------------------------------------------|
//! | `twobox_meta`   | `format`             | the format version, with a checksum               |
//! | `twobox_NAME`, one for each [`Table`] | the row's key | the row as bytes, with a checksum |
//! | `twobox_events` | the event's id       | its place, with a checksum                        |
//! | `twobox_places` | a place: destination, NUL, ordering key, NUL, sequence | the event's id, NUL, the event as bytes, with a checksum; without the event, where a redrive has moved it to |
//! | `twobox_dead`   | a dead event's id    | nothing                                           |
//! | `twobox_due`    | a destination, NUL, a time, an ordering key | lanes that are due then, with a checksum; see `due`  |
//!
//! An event lies where a claim comes by, in the order of its lane, so that a claim reads envelopes
//! and payloads in one go; by its id one finds where that is. Any other index entry is checked
//! against the row that it leads to.

mod answer;
mod apply;
mod copy;
mod due;
mod load;
mod place;
mod seal;

use alloc::string::ToString;
use core::borrow::Borrow;
use core::ops::Bound;

use redb::{
    AccessGuard, MultimapTableHandle, Range, ReadOnlyTable, ReadTransaction, ReadableTable,
    ReadableTableMetadata, StorageError, TableDefinition, TableError, TableHandle, Value,
    WriteTransaction,
};
use twobox::{FORMAT_VERSION, Table};

use crate::error::RedbError;

pub(crate) use answer::load;
pub(crate) use apply::{apply, flush, load_written};
pub(crate) use copy::copy;
pub(crate) use load::Opened;

use seal::Seal;

type Bytes = &'static [u8];

const PREFIX: &str = "twobox_";
const META: TableDefinition<'_, Bytes, Bytes> = TableDefinition::new("twobox_meta");
const PLACES: TableDefinition<'_, Bytes, Bytes> = TableDefinition::new("twobox_places");
const DEAD: TableDefinition<'_, Bytes, ()> = TableDefinition::new("twobox_dead");
const DUE: TableDefinition<'_, Bytes, Bytes> = TableDefinition::new("twobox_due");
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

/// A table that can be read, of whichever kind of transaction.
trait Readable<V: Value + 'static> {
    fn get(&self, key: &[u8]) -> Result<Option<AccessGuard<'_, V>>, StorageError>;

    /// All from a key on.
    fn range(&self, from: Bound<&[u8]>) -> Result<Range<'_, Bytes, V>, StorageError>;

    /// The last key.
    fn last(&self) -> Result<Option<AccessGuard<'_, Bytes>>, StorageError>;

    fn is_empty(&self) -> Result<bool, StorageError>;
}

impl<V: Value + 'static, T: ReadableTable<Bytes, V>> Readable<V> for T {
    fn get(&self, key: &[u8]) -> Result<Option<AccessGuard<'_, V>>, StorageError> {
        ReadableTable::get(self, key)
    }

    fn range(&self, from: Bound<&[u8]>) -> Result<Range<'_, Bytes, V>, StorageError> {
        let from = from.map(Start);
        ReadableTable::range(self, (from, Bound::Unbounded))
    }

    fn last(&self) -> Result<Option<AccessGuard<'_, Bytes>>, StorageError> {
        Ok(ReadableTable::last(self)?.map(|(key, _)| key))
    }

    fn is_empty(&self) -> Result<bool, StorageError> {
        ReadableTableMetadata::is_empty(self)
    }
}

/// A transaction whose tables can be read.
pub(crate) trait Source {
    type Table<'a, V: Value + 'static>: ReadableTable<Bytes, V>
    where
        Self: 'a;

    fn table<V: Value + 'static>(
        &self,
        definition: TableDefinition<'_, Bytes, V>,
    ) -> Result<Self::Table<'_, V>, TableError>;
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

/// Reads the format version: an error unless it is ours, `None` if there is none.
fn format_in<T: ReadableTable<Bytes, Bytes>>(meta: &T) -> Result<Option<()>, RedbError> {
    let Some(sealed) = meta.get(FORMAT)? else { return Ok(None) };
    let value = Seal::META.unseal(FORMAT, sealed.value())?;
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
    Ok(open_all(tx)?)
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
        return Err(RedbError::NameTaken {
            table,
            what: "the database has no format version of twobox".to_string(),
        });
    }
    if !ReadableTableMetadata::is_empty(&meta)? {
        let what = "it has rows, but no format version of twobox".to_string();
        return Err(RedbError::NameTaken { table: META.name().to_string(), what });
    }
    let mut version = FORMAT_VERSION.to_be_bytes().to_vec();
    Seal::META.seal(FORMAT, &mut version);
    meta.insert(FORMAT, version.as_slice())?;
    Ok(open_all(tx)?)
}

/// Opens all tables, which creates them in a transaction that writes.
fn open_all<S: Source>(source: &S) -> Result<(), TableError> {
    for definition in ROWS {
        source.table(definition)?;
    }
    source.table(PLACES)?;
    source.table(DEAD)?;
    source.table(DUE)?;
    Ok(())
}

/// A key as a bound of a range. It is no reference, so it says by itself which kind of range it
/// makes, to each of redb's interfaces.
struct Start<'a>(&'a [u8]);

impl<'a> Borrow<&'a [u8]> for Start<'a> {
    fn borrow(&self) -> &&'a [u8] {
        &self.0
    }
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
