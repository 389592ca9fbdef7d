//! A copy of all tables of a view, in another database (F49).

use core::ops::Bound;

use redb::{
    Database, MultimapTableHandle, Range, ReadTransaction, TableDefinition, TableHandle, Value,
    WriteTransaction,
};
use twobox::Table;

use alloc::collections::BTreeSet;
use alloc::string::{String, ToString};

use super::seal::Seal;
use super::{Bytes, DEAD, DUE, META, PLACES, ROWS, Readable, Source, open_all};
use crate::error::RedbError;

/// With so many bytes of rows a commit of the copy is large enough.
const PIECE: usize = 4 << 20;

/// Copies what a view shows into an empty database: our tables, then what `own` copies, and at last
/// what says that this is a store. So a copy that was broken off is none.
pub(crate) fn copy(
    from: &ReadTransaction,
    to: &Database,
    own: impl FnOnce(&ReadTransaction, &WriteTransaction) -> Result<(), redb::Error>,
) -> Result<(), RedbError> {
    for (table, definition) in Table::ALL.into_iter().zip(ROWS) {
        copy_sealed(from, to, definition, Seal::of(table))?;
    }
    copy_sealed(from, to, PLACES, Seal::PLACES)?;
    copy_sealed(from, to, DUE, Seal::DUE)?;
    copy_table(from, to, DEAD, |_, ()| Ok(0))?;

    let last = to.begin_write()?;
    own(from, &last)?;
    open_all(&last)?;
    {
        let mut meta = last.table(META)?;
        for row in Readable::range(&from.table(META)?, Bound::Unbounded)? {
            let (key, value) = row?;
            let _valid = Seal::META.unseal(key.value(), value.value())?;
            meta.insert(key.value(), value.value())?;
        }
    }
    let there: BTreeSet<String> = names(last.list_tables()?, last.list_multimap_tables()?);
    let all = names(from.list_tables()?, from.list_multimap_tables()?);
    if let Some(table) = all.difference(&there).next() {
        return Err(RedbError::NotCopied { table: table.clone() });
    }
    Ok(last.commit()?)
}

fn names(
    tables: impl Iterator<Item: TableHandle>,
    multimaps: impl Iterator<Item: MultimapTableHandle>,
) -> BTreeSet<String> {
    let tables = tables.map(|table| table.name().to_string());
    tables.chain(multimaps.map(|table| table.name().to_string())).collect()
}

/// Copies a table whose values have checksums, which are looked at.
fn copy_sealed(
    from: &ReadTransaction,
    to: &Database,
    definition: TableDefinition<'static, Bytes, Bytes>,
    seal: Seal,
) -> Result<(), RedbError> {
    copy_table(from, to, definition, |key, value| {
        seal.unseal(key, value)?;
        Ok(value.len())
    })
}

/// Copies a table in pieces, each in a commit of its own. `size` looks at a value and says how large
/// it is.
fn copy_table<V: Value + 'static>(
    from: &ReadTransaction,
    to: &Database,
    definition: TableDefinition<'static, Bytes, V>,
    size: impl Fn(&[u8], V::SelfType<'_>) -> Result<usize, RedbError>,
) -> Result<(), RedbError> {
    let table = from.table(definition)?;
    let mut rows: Range<'_, Bytes, V> = Readable::range(&table, Bound::Unbounded)?;
    let mut more = true;
    while more {
        let tx = to.begin_write()?;
        {
            let mut copy = tx.table(definition)?;
            let mut bytes = 0;
            while bytes < PIECE && more {
                match rows.next() {
                    None => more = false,
                    Some(row) => {
                        let (key, value) = row?;
                        bytes += key.value().len() + size(key.value(), value.value())?;
                        copy.insert(key.value(), value.value())?;
                    }
                }
            }
        }
        tx.commit()?;
    }
    Ok(())
}
