//! What a store answers to a query: rows, lanes with their pending events, and events with their
//! delivery state.

use alloc::vec::Vec;
use core::cmp::Ordering;
use core::iter::Peekable;
use core::slice;

use crate::event::{Body, Event};
use crate::ids::{Consumer, EventId, LaneKey, OrderId, OrderingKey, RequestKey};
use crate::stats::Stats;
use crate::table::{
    CallRow, EventRow, EventState, InboxRow, Key, LaneRow, OrderRow, OutboxRow, Parts, PositionRow,
    Record, RequestRow, Revision, Stored, Table, parts,
};

/// The answer to a [`Query`](crate::Query). The query's documentation says what is in it, and in
/// which order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rows {
    /// Rows of tables.
    pub rows: Vec<Stored>,
    /// Events with their delivery state.
    pub deliveries: Vec<Delivery>,
    /// Lanes, and what is pending in them.
    pub lanes: Vec<Lane>,
    /// Where to go on.
    pub next: Option<Key>,
    /// Counts.
    pub stats: Stats,
}

/// An event with its delivery state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Delivery {
    /// The event.
    pub id: EventId,
    /// Its row in the outbox, or what it would be: [`OutboxRow::untouched`].
    pub row: OutboxRow,
    /// The revision of that row; `None` if there is none.
    pub revision: Option<Revision>,
    /// The envelope and the payload, where a query asks for it.
    pub event: Option<Event>,
}

impl Delivery {
    /// What the row of an event and the one in the outbox, if there is one, come to; with or
    /// without the envelope.
    #[must_use]
    pub fn new(row: EventRow, outbox: Option<(OutboxRow, Revision)>, envelope: bool) -> Self {
        let id = row.event.id.clone();
        let (state, revision) = match outbox {
            None => (OutboxRow::untouched(&row), None),
            Some((state, revision)) => (state, Some(revision)),
        };
        Self { id, row: state, revision, event: envelope.then_some(row.event) }
    }
}

/// A dead event: which, since when, and why. See [`Load::dead_letters`](crate::Load::dead_letters).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeadLetter {
    /// The event. Its envelope and payload are a row of their own, to be read with
    /// [`Load::event`](crate::Load::event).
    pub event: EventId,
    /// Its type, its state with the time, its starts and failures, and the last reason.
    pub row: OutboxRow,
}

impl From<Delivery> for DeadLetter {
    fn from(dead: Delivery) -> Self {
        Self { event: dead.id, row: dead.row }
    }
}

/// A lane with its first pending events.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Lane {
    /// Its destination and ordering key.
    pub key: LaneKey,
    /// Its row.
    pub row: LaneRow,
    /// The revision of its row.
    pub revision: Revision,
    /// Its first pending events, in the order of their sequence.
    pub pending: Vec<Delivery>,
}

impl Lane {
    /// How an event of this lane stands.
    #[must_use]
    pub fn state(&self, row: &OutboxRow) -> EventState {
        EventState::of(&self.row, row)
    }
}

/// The lane with this key, in an answer with lanes in the order of their keys; to be asked for in
/// that order too.
pub(crate) fn seek<'a>(
    lanes: &mut Peekable<slice::Iter<'a, Lane>>,
    key: &LaneKey,
) -> Option<&'a Lane> {
    while lanes.next_if(|lane| lane.key < *key).is_some() {}
    lanes.peek().copied().filter(|lane| lane.key == *key)
}

/// The rows of lanes in an answer with rows in the order of their keys; to be asked for in that
/// order too.
pub(crate) struct LaneRows<'a>(slice::Iter<'a, Stored>);

impl<'a> LaneRows<'a> {
    pub(crate) fn of(rows: &'a Rows) -> Self {
        let first = rows.rows.partition_point(|row| row.record.table() < Table::Lanes);
        Self(rows.rows[first..].iter())
    }

    /// The row of the lane with this key, which is not before the one that was asked for last.
    pub(crate) fn seek(&mut self, key: &LaneKey) -> Option<&'a LaneRow> {
        while let Some(Stored { record: Record::Lane(there, row), .. }) = self.0.as_slice().first()
        {
            match there.cmp(key) {
                Ordering::Less => drop(self.0.next()),
                Ordering::Equal => return Some(row),
                Ordering::Greater => return None,
            }
        }
        None
    }
}

impl Rows {
    /// The answer with these rows of tables.
    #[must_use]
    pub fn of(rows: Vec<Stored>) -> Self {
        Self { rows, ..Self::default() }
    }

    /// The row with this key, in rows that are in the order of their keys.
    #[must_use]
    pub fn get(&self, key: &Key) -> Option<&Stored> {
        self.find(key.parts())
    }

    fn find(&self, key: Parts<'_>) -> Option<&Stored> {
        debug_assert!(self.rows.is_sorted_by(|a, b| a.record.parts() < b.record.parts()));
        let at = self.rows.binary_search_by(|stored| stored.record.parts().cmp(&key));
        at.ok().map(|at| &self.rows[at])
    }
}

/// How each kind of row is found by its key, with its revision.
macro_rules! rows_by_key {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),+) -> $row:ty: $key:expr, $pattern:pat => $found:expr;)+) => {
        impl Rows {$(
            $(#[$doc])*
            #[must_use]
            pub fn $name(&self, $($arg: &$type),+) -> Option<(&$row, Revision)> {
                let stored = self.find($key)?;
                if let $pattern = &stored.record { Some(($found, stored.revision)) } else { None }
            }
        )+}
    };
}

rows_by_key! {
    /// A request.
    request(key: RequestKey) -> RequestRow:
        parts(Table::Requests, [key.scope.as_str(), key.id.as_str()]), Record::Request(_, row) => row;
    /// An order.
    order(id: OrderId) -> OrderRow: parts(Table::Orders, [id.as_str()]), Record::Order(_, row) => row;
    /// An event with its place.
    event(id: EventId) -> EventRow: parts(Table::Events, [id.as_str()]), Record::Event(row) => row;
    /// What happened to an event.
    outbox(id: EventId) -> OutboxRow: parts(Table::Outbox, [id.as_str()]), Record::Outbox(_, row) => row;
    /// A lane.
    lane(key: LaneKey) -> LaneRow: parts(Table::Lanes, key.texts()), Record::Lane(_, row) => row;
    /// What a consumer received.
    inbox(consumer: Consumer, event: EventId) -> InboxRow:
        parts(Table::Inbox, [consumer.as_str(), event.as_str()]), Record::Inbox(_, _, row) => row;
    /// An effect.
    effect(consumer: Consumer, event: EventId) -> Body:
        parts(Table::Effects, [consumer.as_str(), event.as_str()]), Record::Effect(_, _, body) => body;
    /// How far a consumer has come.
    position(consumer: Consumer, key: OrderingKey) -> PositionRow:
        parts(Table::Positions, [consumer.as_str(), key.as_str()]), Record::Position(_, _, row) => row;
    /// A call.
    call(consumer: Consumer, event: EventId) -> CallRow:
        parts(Table::Calls, [consumer.as_str(), event.as_str()]), Record::Call(_, _, row) => row;
}
