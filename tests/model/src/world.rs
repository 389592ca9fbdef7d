//! A world: the tables, what relays hold in memory, what is on the network, and what the judge has written down.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{Hash, Hasher};

use twobox::{LeaseRef, Load, Millis, Query, Record, Table};
use twobox_memory::State;

use crate::scope::{Params, Scope};

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

/// The tables. Two that differ in revisions alone are the same: revisions count writes, and are compared only within one
/// transaction, which begins and ends within one step.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct Db(pub State);

impl Db {
    /// The rows of a table.
    pub fn table(&self, table: Table) -> impl Iterator<Item = Record> {
        let Ok(rows) = self.0.clone().load(&Query::Walk { table, after: None, limit: usize::MAX });
        rows.into_vec().into_iter().map(|stored| stored.record)
    }

    /// The row with a key.
    pub fn row(&self, key: twobox::Key) -> Option<Record> {
        let Ok(rows) = self.0.clone().load(&Query::rows([key]));
        rows.into_vec().pop().map(|stored| stored.record)
    }
}

impl Hash for Db {
    fn hash<H: Hasher>(&self, state: &mut H) {
        for table in Table::ALL {
            self.table(table).for_each(|record| record.hash(state));
        }
    }
}

impl std::fmt::Debug for Db {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Ok(dump) = twobox::Dump::of(&mut self.0.clone());
        write!(f, "\n{dump}")
    }
}

/// A run that a relay holds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Held {
    pub(crate) lease: LeaseRef,
    /// Event, sequence, and the sequence before it.
    pub(crate) deliveries: Vec<(u8, u64, u64)>,
    /// How many of them the broker has confirmed.
    pub(crate) confirmed: usize,
    /// What ended the run.
    pub(crate) ended: Option<crate::step::Answer>,
    /// It was settled, and the answer was lost: it can only be settled again.
    pub(crate) asked: bool,
    /// Written down by the judge: another claim took the lane, or a settle of this run was committed.
    pub(crate) stale: bool,
}

/// An event on the network. It stays there: whether it is delivered never, once or often, and when, is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Copy {
    /// Which event.
    pub event: u8,
    /// Its place in its lane.
    pub sequence: u64,
    /// The place before it.
    pub after: u64,
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
    /// When an event was committed or redriven, if the world keeps to a longest retry.
    pub since: [u64; 3],
    /// The promises that were broken by a step.
    pub broken: u8,
}

/// One state of everything.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    /// The clock.
    pub now: u64,
    /// The tables of the sender and of the receivers.
    pub db: Db,
    /// What each relay holds, by lane.
    pub relays: Vec<BTreeMap<String, Held>>,
    /// What is on the network.
    pub network: BTreeSet<Copy>,
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
            now: 0,
            db: Db::default(),
            relays: vec![BTreeMap::new(); scope.relays.into()],
            network: BTreeSet::new(),
            faults: scope.faults,
            operations: scope.operations,
            stepped_back: false,
            ghost: Ghost::default(),
        }
    }

    pub(crate) fn time(&self) -> Millis {
        Millis::new(self.now)
    }

    pub(crate) fn break_unless(&mut self, promise: Promise, holds: bool) {
        if !holds {
            self.ghost.broken |= promise.bit();
        }
    }
}
