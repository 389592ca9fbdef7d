//! The tables: what is in a store, as types. Every adapter keeps these and nothing else of ours.
//!
//! The sender's side has requests, orders, events, outbox and lanes, the receiver's side inbox,
//! effects, positions and calls; one store may hold both. An event is written once, with its place
//! in its lane. That it is confirmed follows from its lane, which has moved past it; a row in
//! `outbox` says what else happened to it, and is there only if something did.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::event::{Body, Event};
use crate::fingerprint::{Digest, Fingerprint};
use crate::ids::{
    Consumer, Destination, EventId, EventType, LaneKey, OrderId, OrderingKey, Owner, Reason,
    RequestKey,
};
use crate::time::Millis;

/// The version of what is described here. An adapter writes it into each store that it creates, and
/// refuses a store that has another one.
pub const FORMAT_VERSION: u32 = 1;

/// The tables by name, in the order in which they are shown and locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    /// Request keys and what each is bound to (P1).
    Requests,
    /// One row for each order.
    Orders,
    /// Immutable envelopes with their payloads, each with its place in its lane.
    Events,
    /// What happened to events that were not simply confirmed (P3).
    Outbox,
    /// One row for each ordering key at each destination: who delivers it now, and when it is due
    /// (P4, P6).
    Lanes,
    /// What each consumer has received (P5).
    Inbox,
    /// What each consumer has recorded as the effect of an event (P5).
    Effects,
    /// How far each consumer that asks for order has come in each ordering key.
    Positions,
    /// Effects outside the transaction, such as a payment, and what is known of them (P9).
    Calls,
}

impl Table {
    /// All of them, in their order.
    pub const ALL: [Self; 9] = [
        Self::Requests,
        Self::Orders,
        Self::Events,
        Self::Outbox,
        Self::Lanes,
        Self::Inbox,
        Self::Effects,
        Self::Positions,
        Self::Calls,
    ];

    /// The name, as it is shown.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Orders => "orders",
            Self::Events => "events",
            Self::Outbox => "outbox",
            Self::Lanes => "lanes",
            Self::Inbox => "inbox",
            Self::Effects => "effects",
            Self::Positions => "positions",
            Self::Calls => "calls",
        }
    }

    /// A number that stays what it is, in each version: for keys of stores that keep all tables in
    /// one. It sorts as the table does.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Requests => 1,
            Self::Orders => 2,
            Self::Events => 3,
            Self::Outbox => 4,
            Self::Lanes => 5,
            Self::Inbox => 6,
            Self::Effects => 7,
            Self::Positions => 8,
            Self::Calls => 9,
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Which row: the table and the key in it. The order of keys is the order of tables, then of the
/// key's bytes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// A row of [`Table::Requests`].
    Request(RequestKey),
    /// A row of [`Table::Orders`].
    Order(OrderId),
    /// A row of [`Table::Events`].
    Event(EventId),
    /// A row of [`Table::Outbox`].
    Outbox(EventId),
    /// A row of [`Table::Lanes`].
    Lane(LaneKey),
    /// A row of [`Table::Inbox`].
    Inbox(Consumer, EventId),
    /// A row of [`Table::Effects`].
    Effect(Consumer, EventId),
    /// A row of [`Table::Positions`].
    Position(Consumer, OrderingKey),
    /// A row of [`Table::Calls`].
    Call(Consumer, EventId),
}

impl Key {
    /// The table that it is a key of.
    #[must_use]
    pub const fn table(&self) -> Table {
        match self {
            Self::Request(_) => Table::Requests,
            Self::Order(_) => Table::Orders,
            Self::Event(_) => Table::Events,
            Self::Outbox(_) => Table::Outbox,
            Self::Lane(_) => Table::Lanes,
            Self::Inbox(..) => Table::Inbox,
            Self::Effect(..) => Table::Effects,
            Self::Position(..) => Table::Positions,
            Self::Call(..) => Table::Calls,
        }
    }
}

/// A key as it is compared: the table, and the texts of the key, of which there are
/// [`Table::texts`]; the others are empty. It sorts as [`Key`] does.
pub(crate) type Parts<'a> = (Table, [&'a str; 4]);

/// The parts of a key of these texts.
pub(crate) fn parts<'a, const N: usize>(table: Table, texts: [&'a str; N]) -> Parts<'a> {
    const { assert!(N <= 4, "no key has more texts") };
    debug_assert_eq!(table.texts(), N, "each key has all of its texts");
    let mut all = [""; 4];
    all[..N].copy_from_slice(&texts);
    (table, all)
}

impl Table {
    /// How many texts a key has.
    pub(crate) const fn texts(self) -> usize {
        match self {
            Self::Orders | Self::Events | Self::Outbox => 1,
            Self::Requests
            | Self::Lanes
            | Self::Inbox
            | Self::Effects
            | Self::Positions
            | Self::Calls => 2,
        }
    }
}

impl Key {
    pub(crate) fn parts(&self) -> Parts<'_> {
        let table = self.table();
        match self {
            Self::Request(key) => parts(table, [key.scope.as_str(), key.id.as_str()]),
            Self::Order(id) => parts(table, [id.as_str()]),
            Self::Event(id) | Self::Outbox(id) => parts(table, [id.as_str()]),
            Self::Lane(key) => parts(table, key.texts()),
            Self::Inbox(consumer, id) | Self::Effect(consumer, id) | Self::Call(consumer, id) => {
                parts(table, [consumer.as_str(), id.as_str()])
            }
            Self::Position(consumer, key) => parts(table, [consumer.as_str(), key.as_str()]),
        }
    }

    /// The texts of the key, with a slash between them; the default destination is left out.
    pub(crate) fn text(&self) -> String {
        let (table, texts) = self.parts();
        let texts = &texts[..table.texts()];
        texts[texts.iter().take_while(|text| text.is_empty()).count()..].join("/")
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.table(), self.text())
    }
}

/// How often a row has been written. It starts at 1 and grows by one with each write; a row that is
/// written anew after it was deleted starts at 1 again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Revision(u64);

impl Revision {
    /// The revision of a row that was just inserted.
    pub const FIRST: Self = Self(1);

    /// Made of what a store kept; only for adapters.
    #[must_use]
    pub const fn from_stored(value: u64) -> Self {
        Self(value)
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The revision after the next write.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

/// What a request key is bound to, and what came of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequestRow {
    /// The parameters of the first request with this key.
    pub fingerprint: Fingerprint,
    /// When the key was bound.
    pub registered_at: Millis,
    /// The order, once it is committed.
    pub placed: Option<PlacedOrder>,
}

/// The first outcome of a request, which every retry gets again (P1).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlacedOrder {
    /// The order that the request created.
    pub order: OrderId,
    /// Its events, in their order.
    pub events: Vec<EventId>,
    /// When it was committed.
    pub at: Millis,
}

/// An order: whatever its request created.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OrderRow {
    /// The request that created it.
    pub request: RequestKey,
    /// When it was committed.
    pub committed_at: Millis,
    /// What it says.
    pub body: Body,
}

/// An event with its place in its lane: written once, never changed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventRow {
    /// The envelope and the payload.
    pub event: Event,
    /// Its place in its lane, from 1.
    pub sequence: u64,
    /// Not published before this time.
    pub due: Millis,
}

/// The delivery state of an event that something happened to, other than being confirmed (P3).
///
/// An event to which nothing happened has no such row; [`OutboxRow::untouched`] says what it would
/// be.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OutboxRow {
    /// The lane that it stands in; the same as in the event.
    pub lane: LaneKey,
    /// Its place in the lane: that of the event, until a redrive gives it one at the end.
    pub sequence: u64,
    /// What the event is about; the same as in the event.
    pub event_type: EventType,
    /// When it was committed; the same as in the event.
    pub committed_at: Millis,
    /// Not published before this time.
    pub due: Millis,
    /// How often a publish was started without being confirmed, as far as settled; a start that
    /// nobody settled is counted in the lane (F4).
    pub starts: u32,
    /// How often a publish failed (F15: an outage is no failure of the event).
    pub failures: u32,
    /// Whether it is still to be delivered.
    pub state: DeliveryState,
    /// Why it failed last, or was given up.
    pub reason: Option<Reason>,
    /// Whether a redrive gave it its place.
    pub moved: bool,
}

impl OutboxRow {
    /// The row of an event to which nothing has happened.
    #[must_use]
    pub fn untouched(row: &EventRow) -> Self {
        Self::new(&row.event, row.sequence, row.due)
    }

    pub(crate) fn new(event: &Event, sequence: u64, due: Millis) -> Self {
        let (lane, event_type) = (event.lane(), event.event_type.clone());
        Self::untouched_in(lane, sequence, event_type, event.time, due)
    }

    pub(crate) const fn untouched_in(
        lane: LaneKey,
        sequence: u64,
        event_type: EventType,
        committed_at: Millis,
        due: Millis,
    ) -> Self {
        Self {
            lane,
            sequence,
            event_type,
            committed_at,
            due,
            starts: 0,
            failures: 0,
            state: DeliveryState::Pending,
            reason: None,
            moved: false,
        }
    }
}

/// What a row of the outbox says of an event. A pending one is confirmed once its lane has moved
/// past it: see [`LaneRow::head`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeliveryState {
    /// To be delivered, or confirmed.
    Pending,
    /// Given up at this time, for an operator to redrive or discard.
    Dead(Millis),
    /// Dead, then discarded by an operator at this time.
    Discarded(Millis),
    /// Cancelled at this time, before it was delivered.
    Cancelled(Millis),
}

/// The delivery state of an event, as its lane and its row in the outbox say together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventState {
    /// To be delivered.
    Pending,
    /// To be delivered, and covered by a lease: it may be on its way.
    Leased,
    /// The broker has it.
    Confirmed,
    /// Given up at this time, for an operator to redrive or discard.
    Dead(Millis),
    /// Dead, then discarded by an operator at this time.
    Discarded(Millis),
    /// Cancelled at this time, before it was delivered.
    Cancelled(Millis),
}

impl EventState {
    /// What a lane and an event's row in the outbox say together.
    #[must_use]
    pub fn of(lane: &LaneRow, row: &OutboxRow) -> Self {
        match row.state {
            DeliveryState::Dead(at) => Self::Dead(at),
            DeliveryState::Discarded(at) => Self::Discarded(at),
            DeliveryState::Cancelled(at) => Self::Cancelled(at),
            DeliveryState::Pending if row.sequence < lane.head => Self::Confirmed,
            DeliveryState::Pending if lane.leases(row.sequence) => Self::Leased,
            DeliveryState::Pending => Self::Pending,
        }
    }

    /// Since when nothing can happen to it any more, if that is so. When an event was confirmed is
    /// not kept, so for a confirmed one it is the time of its commit.
    #[must_use]
    pub const fn finished_since(self, committed_at: Millis) -> Option<Millis> {
        match self {
            Self::Pending | Self::Leased | Self::Dead(_) => None,
            Self::Confirmed => Some(committed_at),
            Self::Discarded(at) | Self::Cancelled(at) => Some(at),
        }
    }

    /// The name, as it is shown.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Leased => "leased",
            Self::Confirmed => "confirmed",
            Self::Dead(_) => "dead",
            Self::Discarded(_) => "discarded",
            Self::Cancelled(_) => "cancelled",
        }
    }
}

/// The queue of one ordering key at one destination: its pending events are delivered in the order of their sequence,
/// by one holder at a time.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LaneRow {
    /// The sequence that the next event gets.
    pub next: u64,
    /// The first sequence at which an event may be pending: what stands before it is confirmed,
    /// unless its row in the outbox says that it was given up.
    pub head: u64,
    /// The sequence of the event that was confirmed last; 0 before the first.
    pub confirmed: u64,
    /// When its first pending event can be claimed: its due time, or while it is leased the end of
    /// the lease. `None` if nothing is pending, or a dead event blocks the lane.
    pub due: Option<Millis>,
    /// How often its first pending event was started without having been settled (F4).
    pub starts: u32,
    /// How many leases there have been: the fencing token of the last one (P6).
    pub token: u64,
    /// Who delivers it now.
    pub lease: Option<Lease>,
    /// The dead event that the lane waits for, if the rule is to wait.
    pub blocked_by: Option<EventId>,
    /// When it began to count its events.
    pub begun: Millis,
    /// When an event was last put to it or settled in it.
    pub changed_at: Millis,
}

/// The right to deliver the first events of a lane, for a time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease {
    /// Who holds it.
    pub owner: Owner,
    /// When another may take it.
    pub until: Millis,
    /// The sequence of the last event that it covers; the first is the lane's first pending one.
    pub through: u64,
}

/// What became of an event at one consumer (P5).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InboxRow {
    /// The digest of the content that was received first; the same id with another content is
    /// refused.
    pub content: Digest,
    /// When this state was reached.
    pub at: Millis,
    /// What became of it.
    pub state: InboxState,
    /// How often the consumer failed on it.
    pub failures: u32,
    /// Why it failed last.
    pub reason: Option<Reason>,
    /// Whether a row in [`Table::Effects`] goes with it.
    pub effect: bool,
}

/// Whether a consumer is done with an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum InboxState {
    /// Its effect is committed, together with this row.
    Applied,
    /// The consumer failed on it and left no effect; when it comes again, it is retried.
    Failing,
    /// It failed too often and was set aside for an operator.
    Poisoned,
}

impl InboxState {
    /// The name, as it is shown.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Failing => "failing",
            Self::Poisoned => "poisoned",
        }
    }
}

/// How far a consumer has come in an ordering key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PositionRow {
    /// When the sender's lane began the count that the sequence belongs to.
    pub begun: Millis,
    /// The sequence of the last event that was applied in order.
    pub sequence: u64,
    /// When.
    pub at: Millis,
}

/// An effect outside the transaction, and what is known of it (P9).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CallRow {
    /// What is known.
    pub state: CallState,
    /// Since when.
    pub at: Millis,
    /// How often it was started.
    pub starts: u32,
    /// What there is to say about it: the answer, or why it is unknown.
    pub note: Option<Reason>,
}

/// What is known of an effect outside the transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CallState {
    /// It is to be made, and was not started.
    Intended,
    /// It was started, and there is no answer yet. After a crash nobody knows whether it happened.
    Started,
    /// It happened.
    Done,
    /// It was started, and nobody knows whether it happened.
    Unknown,
}

impl CallState {
    /// The name, as it is shown.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Intended => "intended",
            Self::Started => "started",
            Self::Done => "done",
            Self::Unknown => "unknown",
        }
    }
}

/// One row with its key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Record {
    /// A row of [`Table::Requests`].
    Request(RequestKey, RequestRow),
    /// A row of [`Table::Orders`].
    Order(OrderId, OrderRow),
    /// A row of [`Table::Events`]; its key is the event's id.
    Event(EventRow),
    /// A row of [`Table::Outbox`].
    Outbox(EventId, OutboxRow),
    /// A row of [`Table::Lanes`].
    Lane(LaneKey, LaneRow),
    /// A row of [`Table::Inbox`].
    Inbox(Consumer, EventId, InboxRow),
    /// A row of [`Table::Effects`].
    Effect(Consumer, EventId, Body),
    /// A row of [`Table::Positions`].
    Position(Consumer, OrderingKey, PositionRow),
    /// A row of [`Table::Calls`].
    Call(Consumer, EventId, CallRow),
}

impl Record {
    /// The key.
    #[must_use]
    pub fn key(&self) -> Key {
        match self {
            Self::Request(key, _) => Key::Request(key.clone()),
            Self::Order(id, _) => Key::Order(id.clone()),
            Self::Event(row) => Key::Event(row.event.id.clone()),
            Self::Outbox(id, _) => Key::Outbox(id.clone()),
            Self::Lane(key, _) => Key::Lane(key.clone()),
            Self::Inbox(consumer, id, _) => Key::Inbox(consumer.clone(), id.clone()),
            Self::Effect(consumer, id, _) => Key::Effect(consumer.clone(), id.clone()),
            Self::Position(consumer, key, _) => Key::Position(consumer.clone(), key.clone()),
            Self::Call(consumer, id, _) => Key::Call(consumer.clone(), id.clone()),
        }
    }

    /// Whether it is a request that has placed this order: the order is kept as long as that is.
    #[must_use]
    pub fn places(&self, order: &OrderId) -> bool {
        let Self::Request(_, RequestRow { placed: Some(placed), .. }) = self else { return false };
        placed.order == *order
    }

    /// How its key compares with another one, without making it.
    #[must_use]
    pub fn cmp_key(&self, key: &Key) -> core::cmp::Ordering {
        self.parts().cmp(&key.parts())
    }

    /// The parts of its key.
    pub(crate) fn parts(&self) -> Parts<'_> {
        let table = self.table();
        match self {
            Self::Request(key, _) => parts(table, [key.scope.as_str(), key.id.as_str()]),
            Self::Order(id, _) => parts(table, [id.as_str()]),
            Self::Event(row) => parts(table, [row.event.id.as_str()]),
            Self::Outbox(id, _) => parts(table, [id.as_str()]),
            Self::Lane(key, _) => parts(table, key.texts()),
            Self::Inbox(consumer, id, _)
            | Self::Effect(consumer, id, _)
            | Self::Call(consumer, id, _) => parts(table, [consumer.as_str(), id.as_str()]),
            Self::Position(consumer, key, _) => parts(table, [consumer.as_str(), key.as_str()]),
        }
    }

    /// The table.
    #[must_use]
    pub const fn table(&self) -> Table {
        match self {
            Self::Request(..) => Table::Requests,
            Self::Order(..) => Table::Orders,
            Self::Event(_) => Table::Events,
            Self::Outbox(..) => Table::Outbox,
            Self::Lane(..) => Table::Lanes,
            Self::Inbox(..) => Table::Inbox,
            Self::Effect(..) => Table::Effects,
            Self::Position(..) => Table::Positions,
            Self::Call(..) => Table::Calls,
        }
    }
}

/// Where a row stands in the orders that questions are asked in. A store that cannot sort by a
/// column keeps these entries beside its tables: each row has at most one, and it follows from the
/// row alone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IndexEntry {
    /// A lane with something pending, by the time at which it can be claimed, among those of its
    /// destination; one that is blocked stands at [`Millis::MAX`].
    Due(Destination, Millis, OrderingKey),
    /// An event, by its place in its lane. An event that was redriven has two: that of the event,
    /// which its lane has passed, and that of its row in the outbox.
    Place(LaneKey, u64, EventId),
    /// A dead event, by its id.
    Dead(EventId),
}

impl Record {
    /// The entry that belongs to this row.
    #[must_use]
    pub fn index_entry(&self) -> Option<IndexEntry> {
        match self {
            Self::Lane(LaneKey { destination, ordering_key }, row) => row
                .index_due()
                .map(|due| IndexEntry::Due(destination.clone(), due, ordering_key.clone())),
            Self::Event(EventRow { event, sequence, .. }) => {
                Some(IndexEntry::Place(event.lane(), *sequence, event.id.clone()))
            }
            Self::Outbox(id, row) => match row.state {
                DeliveryState::Dead(_) => Some(IndexEntry::Dead(id.clone())),
                DeliveryState::Pending if row.moved => {
                    Some(IndexEntry::Place(row.lane.clone(), row.sequence, id.clone()))
                }
                DeliveryState::Pending
                | DeliveryState::Discarded(_)
                | DeliveryState::Cancelled(_) => None,
            },
            Self::Request(..)
            | Self::Order(..)
            | Self::Inbox(..)
            | Self::Effect(..)
            | Self::Position(..)
            | Self::Call(..) => None,
        }
    }
}

/// A row as it was read, with the revision that a change of it must expect.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Stored {
    /// The row with its key.
    pub record: Record,
    /// Its revision.
    pub revision: Revision,
}
