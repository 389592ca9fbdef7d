//! Rows as bytes, for stores that keep bytes: the format of version
//! [`FORMAT_VERSION`](crate::FORMAT_VERSION).
//!
//! Keys sort as bytes in the order of [`Key`]: their texts, which have no control characters, are
//! joined by a NUL. Values are a revision and the fields of the row; numbers are LEB128, times are
//! 8 bytes in big endian, texts and bytes have their length before them. What is read is checked as
//! strictly as what is given to a constructor, so damaged bytes end in [`Damaged`] and not in a
//! wrong row. That a value belongs to its key, and was not changed elsewhere, is for a checksum of
//! the adapter to find out.

use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use thiserror::Error;

use crate::event::{Body, Event, Headers};
use crate::fingerprint::{Digest, Fingerprint};
use crate::ids::{Destination, EventId, LaneKey, Name, Reason, RequestKey};
use crate::table::{
    CallRow, CallState, DeliveryState, EventRow, InboxRow, InboxState, Key, LaneRow, Lease,
    OrderRow, OutboxRow, PlacedOrder, PositionRow, Record, RequestRow, Revision, Stored, Table,
};
use crate::time::Millis;

/// Stored bytes that are no row: the store was damaged, or written by something else.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("a stored row of {table} is damaged: {what}; restore the store from a copy")]
pub struct Damaged {
    /// The table that the row was read from.
    pub table: Table,
    /// What is wrong with it.
    pub what: String,
}

const SEPARATOR: u8 = 0;

/// Appends the bytes of a key within its table.
pub fn encode_key(key: &Key, out: &mut Vec<u8>) {
    let (table, texts) = key.parts();
    for (at, text) in texts[..table.texts()].iter().enumerate() {
        if at > 0 {
            out.push(SEPARATOR);
        }
        out.extend_from_slice(text.as_bytes());
    }
}

/// Appends the bytes of a lane's key, as they are in the table of lanes.
pub fn encode_lane(key: &LaneKey, out: &mut Vec<u8>) {
    let [destination, ordering_key] = key.texts();
    out.extend_from_slice(destination.as_bytes());
    out.push(SEPARATOR);
    out.extend_from_slice(ordering_key.as_bytes());
}

/// Reads a lane's key back.
///
/// # Errors
///
/// [`Damaged`] if the bytes are not what [`encode_lane`] makes.
pub fn decode_lane(bytes: &[u8]) -> Result<LaneKey, Damaged> {
    Decoder::default().lane_key(Table::Lanes, bytes)
}

/// A name that fills the bytes.
fn name<T: Name>(table: Table, bytes: &[u8]) -> Result<T, Damaged> {
    let text =
        core::str::from_utf8(bytes).map_err(|error| Damaged { table, what: error.to_string() })?;
    T::try_from(text).map_err(|invalid| Damaged { table, what: invalid.to_string() })
}

/// Appends the bytes of a row with its revision, without its key.
///
/// [`decode`] takes all of it: a number has [`i64::MAX`] as its largest value, as times do, and one
/// that lies beyond is written as that. An order that was placed names at most
/// [`CommitOrder::MAX_EVENTS`](crate::CommitOrder::MAX_EVENTS) events, which is asserted in a debug
/// build.
pub fn encode_value(record: &Record, revision: Revision, out: &mut Vec<u8>) {
    let mut out = Writer(out);
    out.number(revision.get());
    match record {
        Record::Request(_, row) => {
            out.digest(row.fingerprint.digest());
            out.text(row.fingerprint.summary());
            out.time(row.registered_at);
            out.option(row.placed.as_ref(), |out, placed| {
                debug_assert!(placed.events.len() <= crate::CommitOrder::MAX_EVENTS);
                out.text(placed.order.as_str());
                out.number(placed.events.len() as u64);
                placed.events.iter().for_each(|id| out.text(id.as_str()));
                out.time(placed.at);
            });
        }
        Record::Order(_, row) => {
            out.text(row.request.scope.as_str());
            out.text(row.request.id.as_str());
            out.time(row.committed_at);
            out.body(&row.body);
        }
        Record::Event(EventRow { event, sequence, due }) => {
            out.number(*sequence);
            out.time(*due);
            out.text(event.order.as_str());
            out.text(event.event_type.as_str());
            out.number(event.schema_version.into());
            out.text(event.destination.as_str());
            out.text(event.ordering_key.as_str());
            out.time(event.time);
            out.number(event.headers.iter().len() as u64);
            for (name, value) in event.headers.iter() {
                out.text(name.as_str());
                out.text(value.as_str());
            }
            out.body(&event.body);
        }
        Record::Outbox(_, row) => {
            out.lane(&row.lane);
            out.number(row.sequence);
            out.text(row.event_type.as_str());
            out.time(row.committed_at);
            out.time(row.due);
            out.number(row.starts.into());
            out.number(row.failures.into());
            match row.state {
                DeliveryState::Pending => out.number(0),
                DeliveryState::Dead(at) => out.state(1, at),
                DeliveryState::Discarded(at) => out.state(2, at),
                DeliveryState::Cancelled(at) => out.state(3, at),
            }
            out.option(row.reason.as_ref(), |out, reason| out.text(reason.as_str()));
            out.number(row.moved.into());
        }
        Record::Lane(_, row) => {
            out.number(row.next);
            out.number(row.head);
            out.number(row.confirmed);
            out.option(row.due, Writer::time);
            out.number(row.starts.into());
            out.number(row.token);
            out.option(row.lease.as_ref(), |out, lease| {
                out.text(lease.owner.as_str());
                out.time(lease.until);
                out.number(lease.through);
            });
            out.option(row.blocked_by.as_ref(), |out, id| out.text(id.as_str()));
            out.time(row.begun);
            out.time(row.changed_at);
        }
        Record::Inbox(_, _, row) => {
            out.digest(row.content);
            out.time(row.at);
            out.number(match row.state {
                InboxState::Applied => 0,
                InboxState::Failing => 1,
                InboxState::Poisoned => 2,
            });
            out.number(row.failures.into());
            out.option(row.reason.as_ref(), |out, reason| out.text(reason.as_str()));
            out.number(row.effect.into());
        }
        Record::Effect(_, _, body) => out.body(body),
        Record::Position(_, _, row) => {
            out.time(row.begun);
            out.number(row.sequence);
            out.time(row.at);
        }
        Record::Call(_, _, row) => {
            out.number(match row.state {
                CallState::Intended => 0,
                CallState::Started => 1,
                CallState::Done => 2,
                CallState::Unknown => 3,
            });
            out.time(row.at);
            out.number(row.starts.into());
            out.option(row.note.as_ref(), |out, note| out.text(note.as_str()));
        }
    }
}

/// Reads a row back from the bytes of its key and its value.
///
/// # Errors
///
/// [`Damaged`] if they are not what [`encode_key`] and [`encode_value`] make.
pub fn decode(table: Table, key: &[u8], value: &[u8]) -> Result<Stored, Damaged> {
    Decoder::default().decode(table, key, value)
}

/// Reads rows that belong together, one after the other: names that come again soon, such as a lane
/// in its events, are checked once and share their memory.
#[derive(Debug, Default)]
pub struct Decoder {
    /// The names that were read last, and where the next one goes.
    recent: [Option<Arc<str>>; 8],
    next: usize,
}

impl Decoder {
    /// Reads the next row; see [`decode`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn decode(&mut self, table: Table, key: &[u8], value: &[u8]) -> Result<Stored, Damaged> {
        let key = self.key(table, key)?;
        self.row(key, value)
    }

    /// Reads the row that has this key.
    ///
    /// # Errors
    ///
    /// As [`decode`].
    pub fn row(&mut self, key: Key, value: &[u8]) -> Result<Stored, Damaged> {
        decode_row(Parser { table: key.table(), rest: value, names: self }, key)
    }

    /// Reads a key.
    fn key(&mut self, table: Table, key: &[u8]) -> Result<Key, Damaged> {
        Ok(match table {
            Table::Requests => {
                let (scope, id) = self.pair(table, key)?;
                Key::Request(RequestKey { scope, id })
            }
            Table::Orders => Key::Order(self.name(table, key)?),
            // The ids of events seldom come again.
            Table::Events => Key::Event(name(table, key)?),
            Table::Outbox => Key::Outbox(self.name(table, key)?),
            Table::Lanes => Key::Lane(self.lane_key(table, key)?),
            Table::Inbox => self.pair(table, key).map(|(consumer, id)| Key::Inbox(consumer, id))?,
            Table::Effects => {
                self.pair(table, key).map(|(consumer, id)| Key::Effect(consumer, id))?
            }
            Table::Positions => {
                self.pair(table, key).map(|(consumer, lane)| Key::Position(consumer, lane))?
            }
            Table::Calls => self.pair(table, key).map(|(consumer, id)| Key::Call(consumer, id))?,
        })
    }

    /// Reads how an event stands to which nothing has happened, and not its headers and its body.
    ///
    /// # Errors
    ///
    /// As [`decode`].
    pub fn untouched(&mut self, key: &[u8], value: &[u8]) -> Result<(EventId, OutboxRow), Damaged> {
        let mut value = Parser { table: Table::Events, rest: value, names: self };
        value.number()?;
        let id = value.names.name(Table::Events, key)?;
        let (sequence, due) = (value.number()?, value.time()?);
        value.bytes()?;
        let event_type = value.name()?;
        value.number()?;
        let (lane, committed_at) = (value.lane()?, value.time()?);
        Ok((id, OutboxRow::untouched_in(lane, sequence, event_type, committed_at, due)))
    }

    /// A name that fills the bytes.
    fn name<T: Name>(&mut self, table: Table, bytes: &[u8]) -> Result<T, Damaged> {
        if bytes.len() <= T::MAX
            && let Some(known) =
                self.recent.iter().flatten().find(|known| known.as_bytes() == bytes)
        {
            return Ok(T::of_checked(known.clone()));
        }
        let name: T = name(table, bytes)?;
        self.recent[self.next] = name.text().cloned();
        self.next = (self.next + 1) % self.recent.len();
        Ok(name)
    }

    /// A destination whose text fills the bytes.
    fn destination(&mut self, table: Table, bytes: &[u8]) -> Result<Destination, Damaged> {
        if bytes.is_empty() {
            return Ok(Destination::default());
        }
        self.name(table, bytes)
    }

    /// A lane whose key fills the bytes.
    fn lane_key(&mut self, table: Table, key: &[u8]) -> Result<LaneKey, Damaged> {
        let (destination, ordering_key) = split(table, key)?;
        Ok(LaneKey {
            destination: self.destination(table, destination)?,
            ordering_key: self.name(table, ordering_key)?,
        })
    }

    /// Two names with a separator between them.
    fn pair<A: Name, B: Name>(&mut self, table: Table, key: &[u8]) -> Result<(A, B), Damaged> {
        let (first, second) = split(table, key)?;
        Ok((self.name(table, first)?, self.name(table, second)?))
    }
}

/// What is before the first separator in a key, and what is behind it.
fn split(table: Table, key: &[u8]) -> Result<(&[u8], &[u8]), Damaged> {
    let end = key.iter().position(|byte| *byte == SEPARATOR);
    let end = end.ok_or_else(|| Damaged { table, what: "no separator in its key".to_string() })?;
    Ok((&key[..end], &key[end + 1..]))
}

fn decode_row(mut value: Parser<'_, '_>, key: Key) -> Result<Stored, Damaged> {
    let revision = Revision::from_stored(value.number()?);
    let record = match key {
        Key::Request(key) => {
            let digest = value.digest()?;
            let summary = value.text()?;
            let fingerprint = Fingerprint::from_stored(digest, summary);
            if fingerprint.summary() != summary {
                return Err(value.damaged("a summary that was never made"));
            }
            let registered_at = value.time()?;
            let placed = value.option(|value| {
                let order = value.name()?;
                let events = value.list(crate::CommitOrder::MAX_EVENTS, Parser::name)?;
                Ok(PlacedOrder { order, events, at: value.time()? })
            })?;
            Record::Request(key, RequestRow { fingerprint, registered_at, placed })
        }
        Key::Order(id) => {
            let request = RequestKey { scope: value.name()?, id: value.name()? };
            Record::Order(
                id,
                OrderRow { request, committed_at: value.time()?, body: value.body()? },
            )
        }
        Key::Event(id) => event_row(&mut value, id).map(Record::Event)?,
        Key::Outbox(id) => Record::Outbox(
            id,
            OutboxRow {
                lane: value.lane()?,
                sequence: value.number()?,
                event_type: value.name()?,
                committed_at: value.time()?,
                due: value.time()?,
                starts: value.small()?,
                failures: value.small()?,
                state: match value.number()? {
                    0 => DeliveryState::Pending,
                    1 => DeliveryState::Dead(value.time()?),
                    2 => DeliveryState::Discarded(value.time()?),
                    3 => DeliveryState::Cancelled(value.time()?),
                    other => {
                        return Err(value
                            .damaged(alloc::format!("no delivery state has the number {other}")));
                    }
                },
                reason: value.option(Parser::reason)?,
                moved: value.option(|_| Ok(()))?.is_some(),
            },
        ),
        Key::Lane(key) => Record::Lane(
            key,
            LaneRow {
                next: value.number()?,
                head: value.number()?,
                confirmed: value.number()?,
                due: value.option(Parser::time)?,
                starts: value.small()?,
                token: value.number()?,
                lease: value.option(|value| {
                    Ok(Lease {
                        owner: value.name()?,
                        until: value.time()?,
                        through: value.number()?,
                    })
                })?,
                blocked_by: value.option(Parser::name)?,
                begun: value.time()?,
                changed_at: value.time()?,
            },
        ),
        Key::Inbox(consumer, id) => {
            let row = InboxRow {
                content: value.digest()?,
                at: value.time()?,
                state: match value.number()? {
                    0 => InboxState::Applied,
                    1 => InboxState::Failing,
                    2 => InboxState::Poisoned,
                    other => {
                        return Err(
                            value.damaged(alloc::format!("no inbox state has the number {other}"))
                        );
                    }
                },
                failures: value.small()?,
                reason: value.option(Parser::reason)?,
                effect: value.option(|_| Ok(()))?.is_some(),
            };
            Record::Inbox(consumer, id, row)
        }
        Key::Effect(consumer, id) => Record::Effect(consumer, id, value.body()?),
        Key::Position(consumer, ordering_key) => Record::Position(
            consumer,
            ordering_key,
            PositionRow { begun: value.time()?, sequence: value.number()?, at: value.time()? },
        ),
        Key::Call(consumer, id) => {
            let state = match value.number()? {
                0 => CallState::Intended,
                1 => CallState::Started,
                2 => CallState::Done,
                3 => CallState::Unknown,
                other => {
                    return Err(
                        value.damaged(alloc::format!("no call state has the number {other}"))
                    );
                }
            };
            let row = CallRow {
                state,
                at: value.time()?,
                starts: value.small()?,
                note: value.option(Parser::reason)?,
            };
            Record::Call(consumer, id, row)
        }
    };
    if value.rest.is_empty() {
        Ok(Stored { record, revision })
    } else {
        Err(value.damaged(alloc::format!("{} bytes too many", value.rest.len())))
    }
}

/// An event with its place.
fn event_row(value: &mut Parser<'_, '_>, id: EventId) -> Result<EventRow, Damaged> {
    let (sequence, due) = (value.number()?, value.time()?);
    let event = Event {
        id,
        order: value.name()?,
        event_type: value.name()?,
        schema_version: value.small()?,
        destination: value.destination()?,
        ordering_key: value.name()?,
        time: value.time()?,
        headers: headers(value)?,
        body: value.body()?,
    };
    Ok(EventRow { event, sequence, due })
}

fn headers(value: &mut Parser<'_, '_>) -> Result<Headers, Damaged> {
    let pairs = value.list(Headers::MAX, |value| Ok((value.text()?, value.text()?)))?;
    // A name that stands twice is refused below.
    if !pairs.is_sorted_by_key(|(name, _)| *name) {
        return Err(value.damaged("headers that are not in their order"));
    }
    let headers = pairs
        .into_iter()
        .try_fold(Headers::new(), |headers, (name, value)| headers.with(name, value));
    headers.map_err(|invalid| value.damaged(invalid))
}

/// Reads the revision of a row from its value, and nothing else.
///
/// # Errors
///
/// [`Damaged`] if there is none.
pub fn decode_revision(table: Table, value: &[u8]) -> Result<Revision, Damaged> {
    let mut names = Decoder::default();
    Parser { table, rest: value, names: &mut names }.number().map(Revision::from_stored)
}

struct Writer<'a>(&'a mut Vec<u8>);

impl Writer<'_> {
    fn number(&mut self, number: u64) {
        let mut number = number.min(i64::MAX as u64);
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    fn time(&mut self, time: Millis) {
        self.0.extend_from_slice(&time.get().to_be_bytes());
    }

    fn state(&mut self, tag: u64, at: Millis) {
        self.number(tag);
        self.time(at);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    fn lane(&mut self, lane: &LaneKey) {
        lane.texts().iter().for_each(|text| self.text(text));
    }

    fn digest(&mut self, digest: Digest) {
        self.0.extend_from_slice(&digest.0);
    }

    fn body(&mut self, body: &Body) {
        self.text(body.content_type().as_str());
        self.bytes(body.bytes());
    }

    fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        match value {
            None => self.number(0),
            Some(value) => {
                self.number(1);
                write(self, value);
            }
        }
    }
}

struct Parser<'a, 'n> {
    table: Table,
    rest: &'a [u8],
    names: &'n mut Decoder,
}

impl<'a> Parser<'a, '_> {
    fn damaged(&self, what: impl ToString) -> Damaged {
        Damaged { table: self.table, what: what.to_string() }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Damaged> {
        let (taken, rest) =
            self.rest.split_at_checked(length).ok_or_else(|| self.damaged("it ends too early"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn number(&mut self) -> Result<u64, Damaged> {
        // Most numbers are small.
        if let [byte @ 0..0x80, rest @ ..] = self.rest {
            self.rest = rest;
            return Ok((*byte).into());
        }
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            let bits = u64::from(byte & 0x7f);
            if bits << shift >> shift != bits {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                // One form for each number, so that equal rows are equal bytes; 0 alone is one of
                // the small ones.
                return if byte == 0 {
                    Err(self.damaged("a number with idle digits"))
                } else if number > i64::MAX as u64 {
                    Err(self.damaged("a number that is too large"))
                } else {
                    Ok(number)
                };
            }
        }
        Err(self.damaged("a number that is too large"))
    }

    fn small(&mut self) -> Result<u32, Damaged> {
        u32::try_from(self.number()?).map_err(|_| self.damaged("a number that is too large"))
    }

    fn time(&mut self) -> Result<Millis, Damaged> {
        let bytes = self.take(8)?;
        let bytes = bytes.try_into().map_err(|_| self.damaged("a short time"))?;
        let millis = u64::from_be_bytes(bytes);
        let time = Millis::new(millis);
        // What is beyond the end of time was not written by us.
        if time.get() == millis { Ok(time) } else { Err(self.damaged("a time that is too late")) }
    }

    fn bytes(&mut self) -> Result<&'a [u8], Damaged> {
        let length = self.number()?;
        self.take(usize::try_from(length).unwrap_or(usize::MAX))
    }

    fn text(&mut self) -> Result<&'a str, Damaged> {
        core::str::from_utf8(self.bytes()?).map_err(|error| self.damaged(error))
    }

    fn name<T: Name>(&mut self) -> Result<T, Damaged> {
        let bytes = self.bytes()?;
        self.names.name(self.table, bytes)
    }

    fn destination(&mut self) -> Result<Destination, Damaged> {
        let bytes = self.bytes()?;
        self.names.destination(self.table, bytes)
    }

    fn lane(&mut self) -> Result<LaneKey, Damaged> {
        Ok(LaneKey { destination: self.destination()?, ordering_key: self.name()? })
    }

    fn reason(&mut self) -> Result<Reason, Damaged> {
        let text = self.text()?;
        let reason = Reason::new(text);
        // It is made to fit when it is given, so one that does not fit was not written by us.
        if reason.as_str() == text {
            Ok(reason)
        } else {
            Err(self.damaged("a reason that was never made"))
        }
    }

    fn digest(&mut self) -> Result<Digest, Damaged> {
        let bytes = self.take(32)?;
        bytes.try_into().map(Digest).map_err(|_| self.damaged("a short digest"))
    }

    fn body(&mut self) -> Result<Body, Damaged> {
        let content_type = self.name()?;
        Body::of_type(content_type, self.bytes()?).map_err(|invalid| self.damaged(invalid))
    }

    fn option<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, Damaged>,
    ) -> Result<Option<T>, Damaged> {
        match self.number()? {
            0 => Ok(None),
            1 => read(self).map(Some),
            other => {
                Err(self.damaged(alloc::format!("{other} where something is there (1) or not (0)")))
            }
        }
    }

    fn list<T>(
        &mut self,
        max: usize,
        mut read: impl FnMut(&mut Self) -> Result<T, Damaged>,
    ) -> Result<Vec<T>, Damaged> {
        let length = self.number()?;
        if length > max as u64 {
            return Err(self.damaged(alloc::format!("a list of {length}, the limit is {max}")));
        }
        (0..length).map(|_| read(self)).collect()
    }
}
