//! Answers to queries: rows by key, and rows that the index leads to.

use alloc::vec::Vec;
use core::cell::OnceCell;
use core::mem;
use core::ops::Bound;

use redb::{AccessGuard, ReadableTable, TableError};
use twobox::codec::{self, Decoder, IndexPart};
use twobox::{IndexEntry, Key, Millis, OrderingKey, Query, Record, Rows, Stored, Table};

use super::due::Moves;
use super::seal::Place;
use super::{Bytes, DUE, INDEX, ROWS, Source, Start, due, index_error};
use crate::error::{RedbError, shielded};

/// What reading and writing use again and again.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) buffer: Vec<u8>,
    pub(super) keys: Vec<u8>,
    decoder: Decoder,
}

/// The tables in a transaction.
pub(crate) struct Opened<'s, S: Source> {
    pub(super) tables: Tables<'s, S>,
    pub(super) scratch: Scratch,
    pub(super) moves: Moves,
}

impl<'s, S: Source> Opened<'s, S> {
    pub(crate) fn new(source: &'s S) -> Self {
        Self {
            tables: Tables { source, rows: Default::default(), index: OnceCell::new(), due: OnceCell::new() },
            scratch: Scratch::default(),
            moves: Moves::default(),
        }
    }

    /// Closes the tables, so that others can open them.
    pub(crate) fn close(&mut self) {
        *self = Self { moves: mem::take(&mut self.moves), ..Self::new(self.tables.source) };
    }
}

/// Tables, each opened when it is first needed.
pub(super) struct Tables<'s, S: Source> {
    pub(super) source: &'s S,
    pub(super) rows: [OnceCell<S::Table<'s, Bytes>>; Table::ALL.len()],
    pub(super) index: OnceCell<S::Table<'s, ()>>,
    pub(super) due: OnceCell<S::Table<'s, Bytes>>,
}

impl<'s, S: Source> Tables<'s, S> {
    fn rows(&self, table: Table) -> Result<&S::Table<'s, Bytes>, RedbError> {
        let at = table as usize;
        opened(&self.rows[at], || self.source.table(ROWS[at]))
    }

    /// The row of this key.
    pub(super) fn get(&self, key: &Key, Scratch { buffer, decoder, .. }: &mut Scratch) -> Result<Option<Stored>, RedbError> {
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
                Bound::Excluded(Start(buffer))
            }
            None => {
                codec::encode_index_part(part, buffer);
                Bound::Included(Start(buffer))
            }
        };
        let range = opened(&self.index, || self.source.table(INDEX))?.range((start, Bound::Unbounded))?;
        Ok(range.map_while(move |found| match found {
            Ok((entry, _)) => codec::is_in_index_part(part, entry.value()).then_some(Ok(entry)),
            Err(error) => Some(Err(error.into())),
        }))
    }

    /// The row that an index entry leads to. That there is none, or that it belongs elsewhere, is damage.
    fn row_of(&self, entry: &[u8], Scratch { buffer, decoder, .. }: &mut Scratch) -> Result<Stored, RedbError> {
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
        self.push_with_pending(stored, run, rows, scratch)
    }

    /// Answers with a lane that is due at this time, and its first pending events.
    fn push_due(&self, due: Millis, lane: &[u8], run: usize, rows: &mut Rows, scratch: &mut Scratch) -> Result<(), RedbError> {
        let Some(stored) = self.get_bytes(Table::Lanes, lane, &mut scratch.decoder)? else {
            return Err(due::error(due, lane, "there is no such row"));
        };
        if !matches!(&stored.record, Record::Lane(_, row) if row.due == Some(due)) {
            return Err(due::error(due, lane, "that row has another place in it"));
        }
        self.push_with_pending(stored, run, rows, scratch)
    }

    /// Answers with a row, and if it is a lane, with its first pending events.
    fn push_with_pending(&self, stored: Stored, run: usize, rows: &mut Rows, scratch: &mut Scratch) -> Result<(), RedbError> {
        let (lane, most) = if let Record::Lane(lane, row) = &stored.record {
            (Some(lane.clone()), run.min(usize::try_from(row.pending_at_most()).unwrap_or(usize::MAX)))
        } else {
            (None, 0)
        };
        rows.push(stored);
        if let Some(lane) = lane.filter(|_| most > 0) {
            for entry in self.entries(IndexPart::Pending(&lane), None, scratch)?.take(most) {
                rows.push(self.row_of(entry?.value(), scratch)?);
            }
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
    Ok(decoder.decode(table, key, Place::of(table).unseal(key, sealed)?)?)
}

/// Answers a query.
pub(crate) fn load<S: Source>(Opened { tables, scratch, .. }: &mut Opened<'_, S>, query: &Query) -> Result<Rows, RedbError> {
    shielded(|| answer(tables, scratch, query))
}

fn answer<S: Source>(tables: &Tables<'_, S>, scratch: &mut Scratch, query: &Query) -> Result<Rows, RedbError> {
    let most = if let Query::Lanes(lanes) = query { lanes.len() * 2 } else { 0 };
    let mut rows = Rows::new(Vec::with_capacity(most));
    match query {
        Query::Rows(keys) => {
            for key in keys.as_slice() {
                if let Some(stored) = tables.get(key, scratch)? {
                    rows.push(stored);
                }
            }
        }
        Query::Due { now, lanes, run, events } => {
            let mut given = 0;
            'blocks: for block in opened(&tables.due, || tables.source.table(DUE))?.iter()? {
                let (key, sealed) = block?;
                let (due, block) = due::lanes(key.value(), sealed.value())?;
                for lane in block {
                    if given == *lanes || rows.as_slice().len() - given >= *events {
                        break 'blocks;
                    }
                    tables.push_due(due, lane?, if due > *now { 0 } else { *run }, &mut rows, scratch)?;
                    given += 1;
                    if due > *now {
                        break 'blocks;
                    }
                }
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
            let Scratch { buffer, decoder, .. } = scratch;
            buffer.clear();
            let start = match after {
                Some(key) => {
                    codec::encode_key(key, buffer);
                    Bound::Excluded(Start(buffer))
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
