//! Batches: each guard is checked, then the index and the rows are written.

use alloc::vec::Vec;
use core::cell::OnceCell;
use core::mem;
use core::ops::Range;

use redb::{TableError, WriteTransaction};
use twobox::codec;
use twobox::{
    Applied, Batch, Change, Decision, IndexEntry, Key, Millis, Query, Record, Revision, Rows,
    RunError, Step, Stepped, Stored, Table, Transition,
};

use super::due::Moves;
use super::load::{ELSEWHERE, Opened, Scratch, Tables, load};
use super::seal::Place;
use super::{DEAD, DUE, PENDING, ROWS, Source, index_error};
use crate::error::{RedbError, shielded};

/// Writes a batch, if all of its guards hold. After an error nothing or a part of it may be
/// written.
pub(crate) fn apply(
    opened: &mut Opened<'_, WriteTransaction>,
    batch: &Batch,
) -> Result<Applied, RedbError> {
    shielded(|| write_all(opened, Known::default(), batch))
}

/// Writes what is still to be written before the transaction is committed, or used by others. The
/// flag is raised if a part of it may be left.
pub(crate) fn flush(
    opened: &mut Opened<'_, WriteTransaction>,
    broken: &mut bool,
) -> Result<(), RedbError> {
    let Opened { tables, moves, .. } = opened;
    if moves.is_empty() {
        return Ok(());
    }
    let flushed = shielded(|| {
        let mut due = taken(&mut tables.due, || tables.source.table(DUE))?;
        moves.write(&mut due)?;
        tables.due = due.into();
        Ok(())
    });
    *broken |= flushed.is_err();
    flushed
}

/// Answers a query in a transaction that writes.
pub(crate) fn load_written(
    opened: &mut Opened<'_, WriteTransaction>,
    query: &Query,
    broken: &mut bool,
) -> Result<Rows, RedbError> {
    if matches!(query, Query::Due { .. }) {
        flush(opened, broken)?;
    }
    load(opened, query)
}

/// Runs a transition, as [`twobox::Tables::step`] says. The flag is raised before anything is
/// written, and lowered when all of it is.
pub(crate) fn step<T: Transition>(
    opened: &mut Opened<'_, WriteTransaction>,
    broken: &mut bool,
    transition: &T,
    now: Millis,
) -> Stepped<T, RedbError> {
    let query = transition.query(now);
    let rows = load_written(opened, &query, broken).map_err(RunError::Store)?;
    let Decision { batch, outcome } = transition.decide(now, &rows).map_err(RunError::Refused)?;
    if batch.is_empty() {
        return Ok(Step { outcome, wrote: false });
    }
    *broken = true;
    let applied = shielded(|| write_all(opened, Known::new(&query, &rows), &batch))
        .map_err(RunError::Store)?;
    *broken = false;
    match applied {
        Applied::Written => Ok(Step { outcome, wrote: true }),
        Applied::Conflict(key) => Err(RunError::Conflict(key)),
    }
}

/// Rows that were loaded since anything was written in the transaction, so that they need not be
/// read again. They are asked for in the order of their keys, as the changes of a batch are.
#[derive(Default)]
struct Known<'a> {
    /// Keys that were loaded, whether there are rows or not, and rows that were found, both in the
    /// order of keys.
    asked: &'a [Key],
    found: Vec<(Key, &'a Stored)>,
    /// Those before these places are before the key that was asked for last.
    next: (usize, usize),
}

impl<'a> Known<'a> {
    fn new(query: &'a Query, rows: &'a Rows) -> Self {
        let asked = if let Query::Rows(keys) = query { keys.as_slice() } else { &[] };
        let of_outbox = |stored: &&Stored| matches!(stored.record, Record::Outbox(..));
        // Outbox rows may stand between those of lanes. Taken apart, both are in order already, or
        // nearly, which a stable sort makes use of.
        let mut found: Vec<_> = rows
            .as_slice()
            .iter()
            .filter(of_outbox)
            .map(|stored| (stored.record.key(), stored))
            .collect();
        found.extend(
            rows.as_slice()
                .iter()
                .filter(|stored| !of_outbox(stored))
                .map(|stored| (stored.record.key(), stored)),
        );
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
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

fn write_all(
    Opened { tables, scratch, moves }: &mut Opened<'_, WriteTransaction>,
    mut known: Known<'_>,
    batch: &Batch,
) -> Result<Applied, RedbError> {
    // Taken, so that the rest can be used meanwhile.
    let mut keys = mem::take(&mut scratch.keys);
    keys.clear();
    let mut checked = Vec::with_capacity(batch.changes().len());
    for change in batch.changes() {
        let (key, start) = (change.key(), keys.len());
        codec::encode_key(&key, &mut keys);
        let read;
        let found = match known.get(&key) {
            Some(found) => found,
            None => {
                read = tables.get(&key, scratch)?;
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
        checked.push(Checked { change, table: key.table(), key: start..keys.len(), old, new });
    }
    write(tables, moves, &keys, &checked, scratch)?;
    scratch.keys = keys;
    Ok(Applied::Written)
}

/// A change whose guard holds.
struct Checked<'a> {
    change: &'a Change,
    table: Table,
    /// Where its key is in the buffer of keys.
    key: Range<usize>,
    /// The index entries of the row, before and after.
    old: Option<IndexEntry>,
    new: Option<IndexEntry>,
}

impl Checked<'_> {
    /// The index entries that go and come.
    fn moved(&self) -> impl Iterator<Item = (&IndexEntry, bool)> {
        let moved = self.old != self.new;
        let gone = self.old.iter().map(|entry| (entry, false));
        gone.chain(self.new.iter().map(|entry| (entry, true))).filter(move |_| moved)
    }

    /// The pending event that is there afterwards, with its place.
    fn pending(&self) -> Option<(&Record, Revision, &IndexEntry)> {
        match (self.change, &self.new) {
            (Change::Put { expect, record }, Some(place @ IndexEntry::Pending(..))) => {
                Some((record, expect.written(), place))
            }
            (Change::Put { .. } | Change::Delete { .. }, _) => None,
        }
    }
}

/// Writes what the index says, then the rows.
fn write(
    tables: &mut Tables<'_, WriteTransaction>,
    moves: &mut Moves,
    keys: &[u8],
    changes: &[Checked<'_>],
    Scratch { buffer, entry, .. }: &mut Scratch,
) -> Result<(), RedbError> {
    for (entry, comes) in changes.iter().flat_map(Checked::moved) {
        if let IndexEntry::Due(due, lane) = entry {
            moves.add(*due, lane, comes);
        }
    }
    // A batch is sorted by table first.
    for changes in changes.chunk_by(|a, b| a.table == b.table) {
        let table = changes[0].table;
        if table == Table::Outbox {
            write_pending(tables, changes, entry, buffer)?;
            write_dead(tables, changes, entry)?;
        }
        let at = table as usize;
        let mut rows = taken(&mut tables.rows[at], || tables.source.table(ROWS[at]))?;
        for checked in changes {
            let key = &keys[checked.key.clone()];
            buffer.clear();
            match (checked.change, checked.pending()) {
                (Change::Delete { .. }, _) => {
                    rows.remove(key)?;
                    continue;
                }
                (Change::Put { .. }, Some(_)) if checked.old == checked.new => continue,
                (Change::Put { .. }, Some((_, _, place))) => {
                    buffer.push(ELSEWHERE);
                    codec::encode_index_entry(place, buffer);
                }
                (Change::Put { expect, record }, None) => {
                    codec::encode_value(record, expect.written(), buffer);
                }
            }
            Place::of(table).seal(key, buffer);
            rows.insert(key, buffer.as_slice())?;
        }
        tables.rows[at] = rows.into();
    }
    Ok(())
}

/// Writes the rows of pending events.
fn write_pending(
    tables: &mut Tables<'_, WriteTransaction>,
    changes: &[Checked<'_>],
    entry: &mut Vec<u8>,
    buffer: &mut Vec<u8>,
) -> Result<(), RedbError> {
    let mut pending = taken(&mut tables.pending, || tables.source.table(PENDING))?;
    for checked in changes {
        for (gone, _) in checked
            .moved()
            .filter(|(place, comes)| !comes && matches!(place, IndexEntry::Pending(..)))
        {
            entry.clear();
            codec::encode_index_entry(gone, entry);
            if pending.remove(entry.as_slice())?.is_none() {
                return Err(index_error(entry, "its entry is missing"));
            }
        }
        if let Some((record, revision, place)) = checked.pending() {
            entry.clear();
            codec::encode_index_entry(place, entry);
            buffer.clear();
            codec::encode_value(record, revision, buffer);
            Place::PENDING.seal(entry, buffer);
            pending.insert(entry.as_slice(), buffer.as_slice())?;
        }
    }
    tables.pending = pending.into();
    Ok(())
}

/// Writes which events are dead.
fn write_dead(
    tables: &mut Tables<'_, WriteTransaction>,
    changes: &[Checked<'_>],
    entry: &mut Vec<u8>,
) -> Result<(), RedbError> {
    let of_dead = |(place, _): &(&IndexEntry, bool)| matches!(place, IndexEntry::Dead(_));
    let mut moved = changes.iter().flat_map(Checked::moved).filter(of_dead).peekable();
    if moved.peek().is_none() {
        return Ok(());
    }
    let mut dead = taken(&mut tables.dead, || tables.source.table(DEAD))?;
    for (place, comes) in moved {
        entry.clear();
        codec::encode_index_entry(place, entry);
        if comes {
            dead.insert(entry.as_slice(), ())?;
        } else if dead.remove(entry.as_slice())?.is_none() {
            return Err(index_error(entry, "its entry is missing"));
        }
    }
    tables.dead = dead.into();
    Ok(())
}

fn taken<T>(
    cell: &mut OnceCell<T>,
    open: impl FnOnce() -> Result<T, TableError>,
) -> Result<T, RedbError> {
    cell.take().map_or_else(|| Ok(open()?), Ok)
}
