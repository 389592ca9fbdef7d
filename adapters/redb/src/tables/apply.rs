//! Batches: each guard is checked, then the index and the rows are written.

use alloc::vec::Vec;
use core::cell::OnceCell;
use core::ops::Range;

use redb::{TableError, WriteTransaction};
use twobox::codec;
use twobox::{
    Applied, Batch, Change, Decision, IndexEntry, Key, Millis, Query, Record, Revision, Rows, RunError, Step, Stepped, Stored,
    Table, Transition,
};

use super::load::{Opened, Scratch, load};
use super::{INDEX, ROWS, Source, index_error, seal};
use crate::error::{RedbError, shielded};

/// Writes a batch, if all of its guards hold. After an error nothing or a part of it may be written.
pub(crate) fn apply(tables: &mut Opened<'_, WriteTransaction>, batch: &Batch) -> Result<Applied, RedbError> {
    shielded(|| write_all(tables, Known::default(), batch))
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
    let applied = shielded(|| write_all(tables, Known::new(&query, &rows), &batch)).map_err(RunError::Store)?;
    *broken = false;
    match applied {
        Applied::Written => Ok(Step { outcome, wrote: true }),
        Applied::Conflict(key) => Err(RunError::Conflict(key)),
    }
}

/// Rows that were loaded since anything was written in the transaction, so that they need not be read again. They are asked for in the
/// order of their keys, as the changes of a batch are.
#[derive(Default)]
struct Known<'a> {
    /// Keys that were loaded, whether there are rows or not, and rows that were found, both in the order of keys.
    asked: &'a [Key],
    found: Vec<(Key, &'a Stored)>,
    /// Those before these places are before the key that was asked for last.
    next: (usize, usize),
}

impl<'a> Known<'a> {
    fn new(query: &'a Query, rows: &'a Rows) -> Self {
        let asked = if let Query::Rows(keys) = query { keys.as_slice() } else { &[] };
        let mut found: Vec<_> = rows.as_slice().iter().map(|stored| (stored.record.key(), stored)).collect();
        // By table first: what is left of each is in order already, or nearly.
        found.sort_by_key(|(key, _)| key.table());
        for rows in found.chunk_by_mut(|(a, _), (b, _)| a.table() == b.table()) {
            rows.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        Self { asked, found, next: (0, 0) }
    }

    /// The row of this key, or that there is none; nothing if that is not known.
    fn get(&mut self, key: &Key) -> Option<Option<&'a Stored>> {
        let (asked, found) = &mut self.next;
        *found += self.found[*found..].iter().take_while(|(found, _)| found < key).count();
        if let Some((there, stored)) = self.found.get(*found)
            && there == key
        {
            return Some(Some(stored));
        }
        *asked += self.asked[*asked..].iter().take_while(|asked| *asked < key).count();
        (self.asked.get(*asked) == Some(key)).then_some(None)
    }
}

fn write_all(tables: &mut Opened<'_, WriteTransaction>, mut known: Known<'_>, batch: &Batch) -> Result<Applied, RedbError> {
    let mut keys = Vec::with_capacity(batch.changes().len() * 32);
    let mut checked = Vec::with_capacity(batch.changes().len());
    let mut scratch = Scratch::default();
    for change in batch.changes() {
        let (key, start) = (change.key(), keys.len());
        codec::encode_key(&key, &mut keys);
        let read;
        let found = match known.get(&key) {
            Some(found) => found,
            None => {
                read = tables.get(&key, &mut scratch)?;
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
    let mut buffer = Vec::with_capacity(256);
    let mut moved = changes.iter().filter_map(|checked| checked.moved.as_ref()).peekable();
    if moved.peek().is_some() {
        let mut index = taken(&mut tables.index, || tables.source.table(INDEX))?;
        for (old, new) in moved {
            if let Some(old) = old {
                buffer.clear();
                codec::encode_index_entry(old, &mut buffer);
                if index.remove(buffer.as_slice())?.is_none() {
                    return Err(index_error(&buffer, "its entry is missing"));
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
