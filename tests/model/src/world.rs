//! A world: the tables, what relays hold in memory, what is on the network, and what the judge has
//! written down.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

use twobox::{
    DeliveryState, EventId, EventState, Key, LanePlace, LaneRow, Leased, Load, Message, Millis,
    OutboxRow, Query, Record, Revision, Stored, Table,
};
use twobox_memory::State;

use crate::machine::Driven;
use crate::scope::{Params, Scope, envelope, number_of};

/// The promises that are judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "they are described in the README")]
pub enum Promise {
    P1,
    P2,
    P3,
    P4,
    P5,
    P6,
    P7,
}

impl Promise {
    pub(crate) const fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// The tables, compared by what can still make a difference; see the hash of [`World`].
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Db(pub State);

/// How an event stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// Its row in the outbox, or what it would be.
    pub row: OutboxRow,
    /// The revision of that row, if there is one.
    pub revision: Option<Revision>,
    /// What its lane and its row say together; `None` if its lane is not there.
    pub state: Option<EventState>,
}

impl Standing {
    /// Whether it is to be delivered.
    pub fn is_pending(&self) -> bool {
        matches!(self.state, Some(EventState::Pending | EventState::Leased))
    }

    /// Whether it was given up, for an operator to say what is to become of it.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, Some(EventState::Dead(_)))
    }
}

impl Db {
    /// The rows of a table, with their revisions.
    pub fn stored(&self, table: Table) -> impl Iterator<Item = Stored> {
        let Ok(rows) = self.0.clone().load(&Query::Walk { table, after: None, limit: usize::MAX });
        rows.rows.into_iter()
    }

    /// The rows of a table.
    pub fn table(&self, table: Table) -> impl Iterator<Item = Record> {
        self.stored(table).map(|stored| stored.record)
    }

    /// The row with a key.
    pub fn row(&self, key: Key) -> Option<Record> {
        let Ok(rows) = self.0.clone().load(&Query::rows([key]));
        rows.rows.into_iter().next().map(|stored| stored.record)
    }

    /// The lanes, by name.
    pub fn lanes(&self) -> BTreeMap<String, LaneRow> {
        let rows = self.table(Table::Lanes).filter_map(|record| match record {
            Record::Lane(key, row) => Some((key.ordering_key.as_str().into(), row)),
            _ => None,
        });
        rows.collect()
    }

    /// How all events stand, by number.
    pub fn events(&self) -> BTreeMap<u8, Standing> {
        let lanes = self.lanes();
        let mut outbox = BTreeMap::new();
        for stored in self.stored(Table::Outbox) {
            if let Record::Outbox(id, row) = stored.record {
                outbox.insert(id, (row, stored.revision));
            }
        }
        let standing = |record| {
            let Record::Event(event) = record else { return None };
            let (row, revision) = match outbox.get(&event.event.id) {
                None => (OutboxRow::untouched(&event), None),
                Some((row, revision)) => (row.clone(), Some(*revision)),
            };
            let state =
                lanes.get(row.lane.ordering_key.as_str()).map(|lane| EventState::of(lane, &row));
            Some((number_of(&event.event.id)?, Standing { row, revision, state }))
        };
        self.table(Table::Events).filter_map(standing).collect()
    }
}

impl std::fmt::Debug for Db {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Ok(dump) = twobox::Dump::of(&mut self.0.clone());
        write!(f, "\n{dump}")
    }
}

/// A lane that a relay holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub(crate) leased: Leased,
    /// How the leased events stood when they were claimed, and how often the first one was started
    /// without an answer: what the relay will settle by.
    pub(crate) claimed: Vec<(u8, Standing)>,
    pub(crate) starts: u32,
    /// How many of them the broker has confirmed.
    pub(crate) confirmed: usize,
    /// What ended it.
    pub(crate) ended: Option<crate::step::Answer>,
    /// It was settled, and the answer was lost: it can only be settled again.
    pub(crate) asked: bool,
    /// Written down by the judge: another claim took the lane, or a settle of this lease was
    /// committed.
    pub(crate) stale: bool,
}

/// An event on the network. It stays there: whether it is delivered never, once or often, and when,
/// is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Copy {
    /// Which event.
    pub event: u8,
    /// Where it stands in its lane.
    pub place: LanePlace,
}

impl Copy {
    /// It as a consumer gets it.
    pub(crate) fn message(self) -> Message {
        Message { event: envelope(self.event), place: self.place, attempt: 1 }
    }
}

/// What is written down from outside of the rules, to judge by.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Ghost {
    /// The parameters that were accepted first, by request.
    pub bound: [Option<Params>; 2],
    /// Whether the order is committed, by request.
    pub placed: [bool; 2],
    /// The events that are committed, as bits.
    pub committed: u8,
    /// The events that were purged.
    pub purged: u8,
    /// The events that the broker has confirmed to a relay.
    pub broker: u8,
    /// The events that were applied, by consumer.
    pub applied: [u8; 2],
    /// The lease of each lane, by its token, where machines deliver: that of the last claim, until
    /// it is settled.
    pub leases: BTreeMap<String, u64>,
    /// When an event was committed or redriven, if the world keeps to a longest retry.
    pub since: [u64; 5],
    /// The promises that were broken by a step.
    pub broken: u8,
}

/// One state of everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// Whether ages and tokens can make a difference: whether something is purged, consumers ask
    /// for order, or machines hold them.
    pub ages: bool,
    /// The clock.
    pub now: u64,
    /// The tables of the sender and of the receivers.
    pub db: Db,
    /// What each relay holds, by lane.
    pub relays: Vec<BTreeMap<String, Held>>,
    /// The relays that are machines.
    pub machines: Vec<Driven>,
    /// What is on the network.
    pub network: BTreeSet<Copy>,
    /// Whether a transaction of the step under way has written something.
    pub(crate) wrote: bool,
    /// How much may still go wrong.
    pub faults: u8,
    /// How much the operator may still do.
    pub operations: u8,
    /// Whether the clock has stepped back.
    pub stepped_back: bool,
    /// What is written down.
    pub ghost: Ghost,
}

impl World {
    pub(crate) fn new(scope: &Scope) -> Self {
        Self {
            ages: scope.machines > 0
                || !scope.purges.is_empty()
                || (scope.in_order && scope.ticks > 0),
            now: 0,
            db: Db::default(),
            relays: vec![BTreeMap::new(); scope.relays.into()],
            machines: (0..scope.machines)
                .map(|number| Driven::start(scope, number, Millis::new(0)))
                .collect(),
            network: BTreeSet::new(),
            wrote: false,
            faults: scope.faults,
            operations: scope.operations,
            stepped_back: false,
            ghost: Ghost::default(),
        }
    }

    pub(crate) fn time(&self) -> Millis {
        Millis::new(self.now)
    }

    /// A place as a message says it. Where nothing is purged, a lane begins to count once, and it
    /// makes no difference when.
    pub(crate) fn place(&self, place: LanePlace) -> LanePlace {
        if self.ages { place } else { LanePlace { begun: Millis::new(0), ..place } }
    }

    pub(crate) fn break_unless(&mut self, promise: Promise, holds: bool) {
        if !holds {
            self.ghost.broken |= promise.bit();
        }
    }
}

/// Two worlds are the same if they differ in nothing that can ever make a difference:
///
/// - revisions count writes. Most are compared within one transaction, which begins and ends within
///   one step, so never across steps. Those in the outbox are held with a lease: all that counts of
///   one is whether it is still that of its row;
/// - a fencing token only grows while its lane exists, so all that counts of a token that a relay
///   holds is whether it is that of the lane. Where lanes are purged, and tokens begin anew, or
///   where machines hold them, tokens and revisions count in full;
/// - where nothing is purged, it makes no difference since when something has been done (a redrive
///   is within its window there).
impl Hash for World {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let (lanes, events) = if self.ages {
            (BTreeMap::new(), BTreeMap::new())
        } else {
            (self.db.lanes(), self.db.events())
        };
        for table in Table::ALL {
            for mut stored in self.db.stored(table) {
                if !self.ages {
                    forget_ages(&mut stored.record, &events);
                } else if table == Table::Outbox {
                    stored.revision.hash(state);
                }
                stored.record.hash(state);
            }
        }
        for held in &self.relays {
            held.len().hash(state);
            for (lane, held) in held {
                lane.hash(state);
                (held.confirmed, held.ended, held.asked, held.stale).hash(state);
                if self.ages {
                    held.leased.hash(state);
                    continue;
                }
                let token = lanes.get(lane).map(|lane| lane.token);
                (token == Some(held.leased.lease.token), held.starts).hash(state);
                for ((event, standing), next) in held.claimed.iter().zip(&held.leased.events) {
                    let now = events.get(event).and_then(|now| now.revision);
                    let mut record =
                        Record::Outbox(next.message.event.id.clone(), standing.row.clone());
                    forget_ages(&mut record, &events);
                    let place = self.place(next.message.place);
                    (record, place, standing.revision.map(|held| now == Some(held))).hash(state);
                }
            }
        }
        (
            &self.machines,
            self.now,
            &self.network,
            self.faults,
            self.operations,
            self.stepped_back,
            &self.ghost,
        )
            .hash(state);
    }
}

fn forget_ages(record: &mut Record, events: &BTreeMap<u8, Standing>) {
    let never = Millis::new(0);
    // When an event is due counts while it is pending.
    let pending = |id: &EventId| {
        let standing = number_of(id).and_then(|event| events.get(&event));
        standing.is_some_and(Standing::is_pending)
    };
    match record {
        Record::Request(_, row) => {
            row.registered_at = never;
            if let Some(placed) = &mut row.placed {
                placed.at = never;
            }
        }
        Record::Order(_, row) => row.committed_at = never,
        Record::Event(row) => {
            row.event.time = never;
            let standing = number_of(&row.event.id).and_then(|event| events.get(&event));
            if !standing.is_some_and(|now| now.is_pending() && now.revision.is_none()) {
                row.due = never;
            }
        }
        Record::Outbox(id, row) => {
            row.committed_at = never;
            row.state = match row.state {
                DeliveryState::Pending => DeliveryState::Pending,
                DeliveryState::Dead(_) => DeliveryState::Dead(never),
                DeliveryState::Discarded(_) => DeliveryState::Discarded(never),
                DeliveryState::Cancelled(_) => DeliveryState::Cancelled(never),
            };
            if !pending(id) {
                row.due = never;
            }
        }
        Record::Lane(_, row) => {
            row.begun = never;
            row.changed_at = never;
            row.token = 0;
        }
        Record::Inbox(_, _, row) => row.at = never,
        Record::Position(_, _, row) => row.at = never,
        Record::Call(_, _, row) => row.at = never,
        Record::Effect(..) => {}
    }
}
