//! Answers to queries: rows by key, and rows that the index leads to.

use alloc::vec::Vec;
use core::cell::OnceCell;
use core::mem;
use core::ops::Bound;

use redb::{ReadableTable, TableError};
use twobox::codec::{self, Decoder, IndexPart};
use twobox::{IndexEntry, Key, Millis, OrderingKey, Query, Record, Rows, Stored, Table};

use super::due::Moves;
use super::seal::Place;
use super::{Bytes, DEAD, DUE, PENDING, ROWS, Source, Start, due, index_error};
use crate::error::{RedbError, shielded};

/// What the value of a pending event in the outbox begins with; after it stands the index entry
/// under which its row lies.
pub(super) const ELSEWHERE: u8 = 0;

/// What reading and writing use again and again.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) buffer: Vec<u8>,
    pub(super) entry: Vec<u8>,
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
            tables: Tables {
                source,
                rows: Default::default(),
                pending: OnceCell::new(),
                dead: OnceCell::new(),
                due: OnceCell::new(),
            },
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
    pub(super) pending: OnceCell<S::Table<'s, Bytes>>,
    pub(super) dead: OnceCell<S::Table<'s, ()>>,
    pub(super) due: OnceCell<S::Table<'s, Bytes>>,
}

impl<'s, S: Source> Tables<'s, S> {
    fn rows(&self, table: Table) -> Result<&S::Table<'s, Bytes>, RedbError> {
        let at = table as usize;
        opened(&self.rows[at], || self.source.table(ROWS[at]))
    }

    /// The row of this key.
    pub(super) fn get(
        &self,
        key: &Key,
        Scratch { buffer, decoder, .. }: &mut Scratch,
    ) -> Result<Option<Stored>, RedbError> {
        buffer.clear();
        codec::encode_key(key, buffer);
        self.get_bytes(key.table(), buffer, decoder)
    }

    fn get_bytes(
        &self,
        table: Table,
        key: &[u8],
        decoder: &mut Decoder,
    ) -> Result<Option<Stored>, RedbError> {
        match self.rows(table)?.get(key)? {
            Some(sealed) => self.read(table, key, sealed.value(), decoder).map(Some),
            None => Ok(None),
        }
    }

    /// The row with these bytes as its key and its value.
    fn read(
        &self,
        table: Table,
        key: &[u8],
        sealed: &[u8],
        decoder: &mut Decoder,
    ) -> Result<Stored, RedbError> {
        match Place::of(table).unseal(key, sealed)? {
            [ELSEWHERE, entry @ ..] => match self.pending()?.get(entry)? {
                Some(sealed) => read_pending(entry, sealed.value(), decoder),
                None => Err(index_error(entry, "there is no row in it")),
            },
            value => Ok(decoder.decode(table, key, value)?),
        }
    }

    fn pending(&self) -> Result<&S::Table<'s, Bytes>, RedbError> {
        opened(&self.pending, || self.source.table(PENDING))
    }

    fn dead(&self) -> Result<&S::Table<'s, ()>, RedbError> {
        opened(&self.dead, || self.source.table(DEAD))
    }

    /// The row of a dead event, which must have this index entry.
    fn dead_of(
        &self,
        entry: &[u8],
        Scratch { buffer, decoder, .. }: &mut Scratch,
    ) -> Result<Stored, RedbError> {
        let (table, key) = codec::indexed_row(entry)?;
        let stored = self
            .get_bytes(table, key, decoder)?
            .ok_or_else(|| index_error(entry, "there is no such row"))?;
        buffer.clear();
        if let Some(place) = stored.record.index_entry() {
            codec::encode_index_entry(&place, buffer);
        }
        if buffer == entry {
            Ok(stored)
        } else {
            Err(index_error(entry, "that row has another place in it"))
        }
    }

    /// Answers with a lane, if it exists, and its first pending events.
    fn push_lane(
        &self,
        lane: &OrderingKey,
        run: usize,
        rows: &mut Rows,
        scratch: &mut Scratch,
    ) -> Result<(), RedbError> {
        let Some(stored) = self.get(&Key::Lane(lane.clone()), scratch)? else { return Ok(()) };
        self.push_with_pending(stored, run, rows, scratch)
    }

    /// Answers with a lane that is due at this time, and its first pending events.
    fn push_due(
        &self,
        due: Millis,
        lane: &[u8],
        run: usize,
        rows: &mut Rows,
        scratch: &mut Scratch,
    ) -> Result<(), RedbError> {
        let Some(stored) = self.get_bytes(Table::Lanes, lane, &mut scratch.decoder)? else {
            return Err(due::error(due, lane, "there is no such row"));
        };
        if !matches!(&stored.record, Record::Lane(_, row) if row.due == Some(due)) {
            return Err(due::error(due, lane, "that row has another place in it"));
        }
        self.push_with_pending(stored, run, rows, scratch)
    }

    /// Answers with a row, and if it is a lane, with its first pending events.
    fn push_with_pending(
        &self,
        stored: Stored,
        run: usize,
        rows: &mut Rows,
        scratch: &mut Scratch,
    ) -> Result<(), RedbError> {
        let (lane, most) = if let Record::Lane(lane, row) = &stored.record {
            (
                Some(lane.clone()),
                run.min(usize::try_from(row.pending_at_most()).unwrap_or(usize::MAX)),
            )
        } else {
            (None, 0)
        };
        rows.push(stored);
        if let Some(lane) = lane.filter(|_| most > 0) {
            let Scratch { buffer, decoder, .. } = scratch;
            buffer.clear();
            let part = IndexPart::Pending(&lane);
            codec::encode_index_part(part, buffer);
            for found in self
                .pending()?
                .range((Bound::Included(Start(buffer)), Bound::Unbounded))?
                .take(most)
            {
                let (entry, sealed) = found?;
                if !codec::is_in_index_part(part, entry.value()) {
                    break;
                }
                rows.push(read_pending(entry.value(), sealed.value(), decoder)?);
            }
        }
        Ok(())
    }
}

pub(super) fn opened<T>(
    cell: &OnceCell<T>,
    open: impl FnOnce() -> Result<T, TableError>,
) -> Result<&T, RedbError> {
    match cell.get() {
        Some(there) => Ok(there),
        None => {
            let opened = open()?;
            Ok(cell.get_or_init(|| opened))
        }
    }
}

/// The row of a pending event.
fn read_pending(entry: &[u8], sealed: &[u8], decoder: &mut Decoder) -> Result<Stored, RedbError> {
    let (table, key) = codec::indexed_row(entry)?;
    Ok(decoder.decode(table, key, Place::PENDING.unseal(entry, sealed)?)?)
}

/// Where to begin after an index entry, or at the first.
fn after<'b>(entry: Option<&IndexEntry>, buffer: &'b mut Vec<u8>) -> Bound<Start<'b>> {
    let Some(entry) = entry else { return Bound::Unbounded };
    buffer.clear();
    codec::encode_index_entry(entry, buffer);
    Bound::Excluded(Start(buffer))
}

/// Answers a query.
pub(crate) fn load<S: Source>(
    Opened { tables, scratch, .. }: &mut Opened<'_, S>,
    query: &Query,
) -> Result<Rows, RedbError> {
    shielded(|| answer(tables, scratch, query))
}

fn answer<S: Source>(
    tables: &Tables<'_, S>,
    scratch: &mut Scratch,
    query: &Query,
) -> Result<Rows, RedbError> {
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
                    tables.push_due(
                        due,
                        lane?,
                        if due > *now { 0 } else { *run },
                        &mut rows,
                        scratch,
                    )?;
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
        Query::Pending { after: last, limit } => {
            let last =
                last.clone().map(|(lane, sequence, id)| IndexEntry::Pending(lane, sequence, id));
            let start = after(last.as_ref(), &mut scratch.buffer);
            let mut lane = None;
            for found in tables.pending()?.range((start, Bound::Unbounded))?.take(*limit) {
                let (entry, sealed) = found?;
                let stored = read_pending(entry.value(), sealed.value(), &mut scratch.decoder)?;
                let Record::Outbox(_, row) = &stored.record else { continue };
                if lane.as_ref() != Some(&row.lane) {
                    tables.push_lane(&row.lane, 0, &mut rows, scratch)?;
                    lane = Some(row.lane.clone());
                }
                rows.push(stored);
            }
        }
        Query::Dead { after: last, limit } => {
            let last = last.clone().map(IndexEntry::Dead);
            let start = after(last.as_ref(), &mut scratch.buffer);
            for found in tables.dead()?.range((start, Bound::Unbounded))?.take(*limit) {
                rows.push(tables.dead_of(found?.0.value(), scratch)?);
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
                rows.push(tables.read(*table, key.value(), sealed.value(), decoder)?);
            }
        }
    }
    Ok(rows)
}
