//! Answers to queries: rows by key, and rows that the index leads to.

use alloc::vec::Vec;
use core::borrow::Borrow;
use core::cell::OnceCell;
use core::ops::Bound;

use redb::{AccessGuard, ReadableTable, TableError};
use twobox::codec::{self, Decoder, IndexPart};
use twobox::{IndexEntry, Key, OrderingKey, Query, Record, Rows, Stored, Table};

use super::{Bytes, INDEX, ROWS, Source, index_error, unseal};
use crate::error::{RedbError, shielded};

/// What answering uses again and again.
#[derive(Default)]
pub(super) struct Scratch {
    buffer: Vec<u8>,
    decoder: Decoder,
}

/// The tables in a transaction, each opened when it is first needed.
pub(crate) struct Opened<'s, S: Source> {
    pub(super) source: &'s S,
    pub(super) rows: [OnceCell<S::Table<'s, Bytes>>; Table::ALL.len()],
    pub(super) index: OnceCell<S::Table<'s, ()>>,
}

impl<'s, S: Source> Opened<'s, S> {
    pub(crate) fn new(source: &'s S) -> Self {
        Self { source, rows: Default::default(), index: OnceCell::new() }
    }

    fn rows(&self, table: Table) -> Result<&S::Table<'s, Bytes>, RedbError> {
        let at = table as usize;
        opened(&self.rows[at], || self.source.table(ROWS[at]))
    }

    /// The row of this key.
    pub(super) fn get(&self, key: &Key, Scratch { buffer, decoder }: &mut Scratch) -> Result<Option<Stored>, RedbError> {
        buffer.clear();
        codec::encode_key(key, buffer);
        self.get_bytes(key.table(), buffer, decoder)
    }

    fn get_bytes(&self, table: Table, key: &[u8], decoder: &mut Decoder) -> Result<Option<Stored>, RedbError> {
        match self.rows(table)?.get(key)? {
            Some(sealed) => read(table, key, sealed.value(), decoder).map(Some),
            None => Ok(None),
        }
    }

    /// The entries of a part of the index, in their order, after this one.
    fn entries<'p>(
        &self,
        part: IndexPart<'p>,
        after: Option<&IndexEntry>,
        Scratch { buffer, .. }: &mut Scratch,
    ) -> Result<impl Iterator<Item = Result<AccessGuard<'_, Bytes>, RedbError>> + use<'_, 'p, 's, S>, RedbError> {
        buffer.clear();
        let start = match after {
            Some(entry) => {
                codec::encode_index_entry(entry, buffer);
                Bound::Excluded(Place(buffer))
            }
            None => {
                codec::encode_index_part(part, buffer);
                Bound::Included(Place(buffer))
            }
        };
        let range = opened(&self.index, || self.source.table(INDEX))?.range((start, Bound::Unbounded))?;
        Ok(range.map_while(move |found| match found {
            Ok((entry, _)) => codec::is_in_index_part(part, entry.value()).then_some(Ok(entry)),
            Err(error) => Some(Err(error.into())),
        }))
    }

    /// The row that an index entry leads to. That there is none, or that it belongs elsewhere, is damage.
    fn row_of(&self, entry: &[u8], Scratch { buffer, decoder }: &mut Scratch) -> Result<Stored, RedbError> {
        let (table, key) = codec::indexed_row(entry)?;
        let stored = self.get_bytes(table, key, decoder)?.ok_or_else(|| index_error(entry, "there is no such row"))?;
        buffer.clear();
        if let Some(place) = stored.record.index_entry() {
            codec::encode_index_entry(&place, buffer);
        }
        if buffer == entry { Ok(stored) } else { Err(index_error(entry, "that row has another place in it")) }
    }

    /// Answers with a lane, if it exists, and its first pending events.
    fn push_lane(&self, lane: &OrderingKey, run: usize, rows: &mut Rows, scratch: &mut Scratch) -> Result<(), RedbError> {
        let Some(stored) = self.get(&Key::Lane(lane.clone()), scratch)? else { return Ok(()) };
        rows.push(stored);
        self.push_pending(lane, run, rows, scratch)
    }

    fn push_pending(&self, lane: &OrderingKey, run: usize, rows: &mut Rows, scratch: &mut Scratch) -> Result<(), RedbError> {
        for entry in self.entries(IndexPart::Pending(lane), None, scratch)?.take(run) {
            rows.push(self.row_of(entry?.value(), scratch)?);
        }
        Ok(())
    }
}

pub(super) fn opened<T>(cell: &OnceCell<T>, open: impl FnOnce() -> Result<T, TableError>) -> Result<&T, RedbError> {
    match cell.get() {
        Some(there) => Ok(there),
        None => {
            let opened = open()?;
            Ok(cell.get_or_init(|| opened))
        }
    }
}

/// The row with these bytes as its key and its value.
fn read(table: Table, key: &[u8], sealed: &[u8], decoder: &mut Decoder) -> Result<Stored, RedbError> {
    Ok(decoder.decode(table, key, unseal(table.name(), key, sealed)?)?)
}

/// Answers a query.
pub(crate) fn load<S: Source>(tables: &Opened<'_, S>, query: &Query) -> Result<Rows, RedbError> {
    shielded(|| answer(tables, query))
}

fn answer<S: Source>(tables: &Opened<'_, S>, query: &Query) -> Result<Rows, RedbError> {
    let mut rows = Rows::default();
    let scratch = &mut Scratch::default();
    match query {
        Query::Rows(keys) => {
            for key in keys.as_slice() {
                if let Some(stored) = tables.get(key, scratch)? {
                    rows.push(stored);
                }
            }
        }
        Query::Due { now, lanes, run, events } => {
            for (given, entry) in tables.entries(IndexPart::Due, None, scratch)?.take(*lanes).enumerate() {
                if rows.as_slice().len() - given >= *events {
                    break;
                }
                let stored = tables.row_of(entry?.value(), scratch)?;
                let Record::Lane(lane, row) = &stored.record else { continue };
                let (lane, later) = (lane.clone(), row.due.is_some_and(|due| due > *now));
                rows.push(stored);
                if later {
                    break;
                }
                tables.push_pending(&lane, *run, &mut rows, scratch)?;
            }
        }
        Query::Lanes(lanes) => {
            for (lane, run) in lanes {
                tables.push_lane(lane, *run, &mut rows, scratch)?;
            }
        }
        Query::Deliveries { events, run } => {
            let mut lanes = Vec::new();
            for id in events {
                let Some(stored) = tables.get(&Key::Outbox(id.clone()), scratch)? else { continue };
                if let Record::Outbox(_, row) = &stored.record {
                    lanes.push(row.lane.clone());
                }
                rows.push(stored);
            }
            lanes.sort_unstable();
            lanes.dedup();
            for lane in &lanes {
                tables.push_lane(lane, *run, &mut rows, scratch)?;
            }
        }
        Query::Pending { after, limit } => {
            let after = after.clone().map(|(lane, sequence, id)| IndexEntry::Pending(lane, sequence, id));
            let mut last = None;
            for entry in tables.entries(IndexPart::AllPending, after.as_ref(), scratch)?.take(*limit) {
                let stored = tables.row_of(entry?.value(), scratch)?;
                let Record::Outbox(_, row) = &stored.record else { continue };
                if last.as_ref() != Some(&row.lane) {
                    tables.push_lane(&row.lane, 0, &mut rows, scratch)?;
                    last = Some(row.lane.clone());
                }
                rows.push(stored);
            }
        }
        Query::Dead { after, limit } => {
            let after = after.clone().map(IndexEntry::Dead);
            for entry in tables.entries(IndexPart::Dead, after.as_ref(), scratch)?.take(*limit) {
                rows.push(tables.row_of(entry?.value(), scratch)?);
            }
        }
        Query::Walk { table, after, limit } => {
            let Scratch { buffer, decoder } = scratch;
            let start = match after {
                Some(key) => {
                    codec::encode_key(key, buffer);
                    Bound::Excluded(Place(buffer))
                }
                None => Bound::Unbounded,
            };
            for found in tables.rows(*table)?.range((start, Bound::Unbounded))?.take(*limit) {
                let (key, sealed) = found?;
                rows.push(read(*table, key.value(), sealed.value(), decoder)?);
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
