//! The tables of a transaction, and the rows in them by key and by place.

use alloc::vec::Vec;
use core::cell::{OnceCell, RefCell};
use core::mem;
use core::ops::Bound;

use redb::{AccessGuard, TableError};
use twobox::codec::{self, Decoder};
use twobox::{
    Delivery, EventId, EventRow, EventState, Key, Lane, LaneKey, OutboxRow, Record, Revision,
    Stored, Table,
};

use super::due::Moves;
use super::seal::Seal;
use super::{Bytes, DEAD, DUE, PLACES, ROWS, Readable, Source, place};
use crate::error::RedbError;

/// What reading and writing use again and again.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) buffer: Vec<u8>,
    pub(super) place: Vec<u8>,
    pub(super) keys: Vec<u8>,
    pub(super) lane: Vec<u8>,
    pub(super) decoder: Decoder,
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
                ends: Default::default(),
                places: OnceCell::new(),
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

/// What is known of the end of a table in this transaction. Ids often follow each other, so that
/// rows of a large transaction come behind all that are there; of these one need not be looked for.
#[derive(Debug, Default)]
pub(super) enum End {
    #[default]
    Unknown,
    /// A row was not there: it may pay off to find out.
    Missed,
    /// No key is greater; empty if there are no rows.
    Known(Vec<u8>),
}

/// Tables, each opened when it is first needed.
pub(super) struct Tables<'s, S: Source> {
    pub(super) source: &'s S,
    pub(super) rows: [OnceCell<S::Table<'s, Bytes>>; Table::ALL.len()],
    ends: [RefCell<End>; Table::ALL.len()],
    pub(super) places: OnceCell<S::Table<'s, Bytes>>,
    pub(super) dead: OnceCell<S::Table<'s, ()>>,
    pub(super) due: OnceCell<S::Table<'s, Bytes>>,
}

impl<S: Source> Tables<'_, S> {
    /// Notes that a row was written, or removed.
    pub(super) fn wrote(&mut self, table: Table, key: &[u8], there: bool) {
        let end = self.ends[table as usize].get_mut();
        if let End::Known(last) = end {
            if !there {
                *end = End::Unknown;
            } else if key > last.as_slice() {
                last.clear();
                last.extend_from_slice(key);
            }
        }
    }
}

/// The tables to read from, whichever kind of transaction they are in: so all that reads is there
/// once, and not once for each kind.
pub(super) trait Look {
    fn rows(&self, table: Table) -> Result<&dyn Readable<Bytes>, RedbError>;
    fn places(&self) -> Result<&dyn Readable<Bytes>, RedbError>;
    fn dead(&self) -> Result<&dyn Readable<()>, RedbError>;
    fn due(&self) -> Result<&dyn Readable<Bytes>, RedbError>;
    /// What is known of the end of a table.
    fn end(&self, table: Table) -> &RefCell<End>;
}

impl<S: Source> Look for Tables<'_, S> {
    fn rows(&self, table: Table) -> Result<&dyn Readable<Bytes>, RedbError> {
        let at = table as usize;
        Ok(opened(&self.rows[at], || self.source.table(ROWS[at]))?)
    }

    fn places(&self) -> Result<&dyn Readable<Bytes>, RedbError> {
        Ok(opened(&self.places, || self.source.table(PLACES))?)
    }

    fn dead(&self) -> Result<&dyn Readable<()>, RedbError> {
        Ok(opened(&self.dead, || self.source.table(DEAD))?)
    }

    fn due(&self) -> Result<&dyn Readable<Bytes>, RedbError> {
        Ok(opened(&self.due, || self.source.table(DUE))?)
    }

    fn end(&self, table: Table) -> &RefCell<End> {
        &self.ends[table as usize]
    }
}

impl dyn Look + '_ {
    /// The row of this key.
    pub(super) fn get(
        &self,
        key: &Key,
        Scratch { buffer, decoder, .. }: &mut Scratch,
    ) -> Result<Option<Stored>, RedbError> {
        buffer.clear();
        codec::encode_key(key, buffer);
        let table = key.table();
        let Some(sealed) = self.value(table, buffer)? else { return Ok(None) };
        let value = Seal::of(table).unseal(buffer, sealed.value())?;
        let stored = if table == Table::Events {
            self.at_place(value, buffer, |value| Ok(decoder.row(key.clone(), value)?))?
        } else {
            decoder.row(key.clone(), value)?
        };
        Ok(Some(stored))
    }

    pub(super) fn get_bytes(
        &self,
        table: Table,
        key: &[u8],
        decoder: &mut Decoder,
    ) -> Result<Option<Stored>, RedbError> {
        match self.value(table, key)? {
            Some(sealed) => self.read(table, key, sealed.value(), decoder).map(Some),
            None => Ok(None),
        }
    }

    /// The value of this key.
    fn value(&self, table: Table, key: &[u8]) -> Result<Option<AccessGuard<'_, Bytes>>, RedbError> {
        let rows = self.rows(table)?;
        let mut end = self.end(table).borrow_mut();
        if let End::Missed = *end {
            let last = rows.last()?.map(|last| last.value().to_vec());
            *end = End::Known(last.unwrap_or_default());
        }
        if let End::Known(last) = &*end
            && key > last.as_slice()
        {
            return Ok(None);
        }
        let found = rows.get(key)?;
        if found.is_none() && matches!(*end, End::Unknown) {
            *end = End::Missed;
        }
        Ok(found)
    }

    /// The row with these bytes as its key and its value.
    pub(super) fn read(
        &self,
        table: Table,
        key: &[u8],
        sealed: &[u8],
        decoder: &mut Decoder,
    ) -> Result<Stored, RedbError> {
        let value = Seal::of(table).unseal(key, sealed)?;
        if table == Table::Events {
            return self.at_place(value, key, |value| Ok(decoder.decode(table, key, value)?));
        }
        Ok(decoder.decode(table, key, value)?)
    }

    /// The place of an event.
    pub(super) fn place_of(&self, id: &[u8]) -> Result<Option<Vec<u8>>, RedbError> {
        let Some(sealed) = self.value(Table::Events, id)? else { return Ok(None) };
        Ok(Some(Seal::of(Table::Events).unseal(id, sealed.value())?.to_vec()))
    }

    /// Reads an event at its place.
    fn at_place<T>(
        &self,
        place: &[u8],
        id: &[u8],
        read: impl FnOnce(&[u8]) -> Result<T, RedbError>,
    ) -> Result<T, RedbError> {
        let Some(sealed) = self.places()?.get(place)? else {
            return Err(place::error(place, "there is no event at its place"));
        };
        match place::split(place, Seal::PLACES.unseal(place, sealed.value())?)? {
            (there, event) if there == id => read(event),
            _ => Err(place::error(place, "another event is at its place")),
        }
    }

    /// The revision of an event, given its place.
    pub(super) fn revision_at(&self, place: &[u8], id: &[u8]) -> Result<Revision, RedbError> {
        self.at_place(place, id, |event| Ok(codec::decode_revision(Table::Events, event)?))
    }

    /// What is in the outbox of an event. Few events have something there, often none has.
    pub(super) fn outbox(
        &self,
        id: &[u8],
        decoder: &mut Decoder,
    ) -> Result<Option<(OutboxRow, Revision)>, RedbError> {
        if self.rows(Table::Outbox)?.is_empty()? {
            return Ok(None);
        }
        let stored = self.get_bytes(Table::Outbox, id, decoder)?;
        Ok(stored.and_then(|Stored { record, revision }| match record {
            Record::Outbox(_, row) => Some((row, revision)),
            Record::Request(..)
            | Record::Order(..)
            | Record::Event(_)
            | Record::Lane(..)
            | Record::Inbox(..)
            | Record::Effect(..)
            | Record::Position(..)
            | Record::Call(..) => None,
        }))
    }

    /// How an event stands, without its envelope; `None` if there is no such event.
    pub(super) fn delivery(
        &self,
        id: &[u8],
        decoder: &mut Decoder,
    ) -> Result<Option<Delivery>, RedbError> {
        let Some(sealed) = self.rows(Table::Events)?.get(id)? else { return Ok(None) };
        let place = Seal::of(Table::Events).unseal(id, sealed.value())?;
        let (id, untouched) =
            self.at_place(place, id, |value| Ok(decoder.untouched(id, value)?))?;
        let outbox = self.outbox(id.as_str().as_bytes(), decoder)?;
        Ok(Some(without_envelope(id, untouched, outbox)))
    }

    /// A lane by the bytes of its key.
    pub(super) fn lane(
        &self,
        key: &[u8],
        decoder: &mut Decoder,
    ) -> Result<Option<Lane>, RedbError> {
        let stored = self.get_bytes(Table::Lanes, key, decoder)?;
        Ok(stored.and_then(|Stored { record, revision }| match record {
            Record::Lane(key, row) => Some(Lane { key, row, revision, pending: Vec::new() }),
            Record::Request(..)
            | Record::Order(..)
            | Record::Event(_)
            | Record::Outbox(..)
            | Record::Inbox(..)
            | Record::Effect(..)
            | Record::Position(..)
            | Record::Call(..) => None,
        }))
    }

    /// Gives a lane its first pending events, at most `run`, with their envelopes or without, and
    /// no more once their bodies have come to `bytes`; says how many bytes these were.
    pub(super) fn add_pending(
        &self,
        lane: &mut Lane,
        run: usize,
        envelopes: bool,
        bytes: usize,
        Scratch { place, decoder, .. }: &mut Scratch,
    ) -> Result<usize, RedbError> {
        let most = usize::try_from(lane.row.pending_at_most()).unwrap_or(usize::MAX).min(run);
        if most == 0 {
            return Ok(0);
        }
        place.clear();
        place::write_lane(&lane.key, place);
        let prefix = place.len();
        place.extend_from_slice(&lane.row.head.to_be_bytes());
        lane.pending.reserve_exact(most);
        let mut sum = 0;
        // The head is nearly always pending, and often enough: to look for it alone costs less than
        // to go through a range.
        if let Some(sealed) = self.places()?.get(place.as_slice())? {
            let head = self.pending_at(lane, prefix, place, sealed.value(), envelopes, decoder)?;
            sum += add(lane, head);
            if lane.pending.len() == most || sum >= bytes {
                return Ok(sum);
            }
        }
        for found in self.places()?.range(Bound::Excluded(place))? {
            let (at, sealed) = found?;
            let at = at.value();
            if !at.starts_with(&place[..prefix]) {
                break;
            }
            let next = self.pending_at(lane, prefix, at, sealed.value(), envelopes, decoder)?;
            sum += add(lane, next);
            if lane.pending.len() == most || sum >= bytes {
                break;
            }
        }
        Ok(sum)
    }

    /// What is pending at a place of a lane, if anything is; all its places begin with so many bytes.
    fn pending_at(
        &self,
        lane: &Lane,
        prefix: usize,
        at: &[u8],
        sealed: &[u8],
        envelopes: bool,
        decoder: &mut Decoder,
    ) -> Result<Option<Delivery>, RedbError> {
        let sequence = place::sequence(at, prefix)?;
        let (id, event) = place::split(at, Seal::PLACES.unseal(at, sealed)?)?;
        let delivery = self.standing(id, event, envelopes, decoder)?;
        let state = EventState::of(&lane.row, &delivery.row);
        let pending = matches!(state, EventState::Pending | EventState::Leased);
        Ok((pending && delivery.row.sequence == sequence).then_some(delivery))
    }

    /// How an event stands, given what stands at a place.
    fn standing(
        &self,
        id: &[u8],
        value: &[u8],
        envelope: bool,
        decoder: &mut Decoder,
    ) -> Result<Delivery, RedbError> {
        if value.is_empty() {
            return self.moved(id, envelope, decoder);
        }
        let outbox = self.outbox(id, decoder)?;
        if !envelope {
            let (id, untouched) = decoder.untouched(id, value)?;
            return Ok(without_envelope(id, untouched, outbox));
        }
        let stored = decoder.decode(Table::Events, id, value)?;
        let row = event_of(stored).ok_or_else(|| place::error(id, "there is no event"))?;
        Ok(Delivery::new(row, outbox, true))
    }

    /// How an event stands that a redrive has moved here.
    fn moved(
        &self,
        id: &[u8],
        envelope: bool,
        decoder: &mut Decoder,
    ) -> Result<Delivery, RedbError> {
        let stored = self.get_bytes(Table::Events, id, decoder)?;
        let row = stored.and_then(event_of);
        let row = row.ok_or_else(|| place::error(id, "there is no such event"))?;
        let outbox = self.outbox(id, decoder)?;
        Ok(Delivery::new(row, outbox, envelope))
    }

    /// Whether no event has a place in a lane.
    pub(super) fn is_without_events(
        &self,
        lane: &LaneKey,
        place: &mut Vec<u8>,
    ) -> Result<bool, RedbError> {
        place.clear();
        place::write_lane(lane, place);
        let first = self.places()?.range(Bound::Included(place))?.next().transpose()?;
        Ok(first.is_none_or(|(at, _)| !at.value().starts_with(place)))
    }
}

/// Adds an event to a lane, if there is one; says how many bytes its body has.
fn add(lane: &mut Lane, next: Option<Delivery>) -> usize {
    let Some(next) = next else { return 0 };
    let bytes = next.event.as_ref().map_or(0, |event| event.body.bytes().len());
    lane.pending.push(next);
    bytes
}

fn event_of(stored: Stored) -> Option<EventRow> {
    if let Record::Event(row) = stored.record { Some(row) } else { None }
}

fn without_envelope(
    id: EventId,
    untouched: OutboxRow,
    outbox: Option<(OutboxRow, Revision)>,
) -> Delivery {
    let (row, revision) = match outbox {
        None => (untouched, None),
        Some((row, revision)) => (row, Some(revision)),
    };
    Delivery { id, row, revision, event: None }
}

pub(super) fn opened<T>(
    cell: &OnceCell<T>,
    open: impl FnOnce() -> Result<T, TableError>,
) -> Result<&T, RedbError> {
    if let Some(table) = cell.get() {
        return Ok(table);
    }
    let table = open()?;
    Ok(cell.get_or_init(|| table))
}
