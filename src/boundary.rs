//! The boundary between the rules and the stores: decide, then apply.
//!
//! Every operation on tables is a [`Transition`] in three steps:
//!
//! 1. **query**: it says which rows it must see, as a [`Query`];
//! 2. **decide**: a pure function of the operation, the time and those rows gives a [`Batch`] of
//!    guarded changes and an outcome, or a refusal;
//! 3. **apply**: the adapter writes the batch in the transaction that it read in, and whoever owns
//!    the transaction commits.
//!
//! The core never commits, so an outcome is provisional until the owner of the transaction has
//! committed. Each change carries what it expects to find. Batches are sorted and name each key
//! once, so that locks are taken in one order.

use alloc::string::ToString;
use alloc::vec::Vec;
use core::iter::Peekable;
use core::mem::swap;

use crate::event::Event;
use crate::ids::{EventId, Invalid, OrderingKey};
use crate::table::{
    CallRow, InboxRow, Key, LaneRow, OrderRow, OutboxRow, Parts, PositionRow, Record, RequestRow,
    Revision, Stored, Table,
};
use crate::time::Millis;

/// An operation on tables: a typed query, and a pure decision over its answer.
pub trait Transition {
    /// What came of it, provisional until the transaction is committed.
    type Outcome;
    /// Why it was refused. A refusal changes nothing.
    type Refusal: core::error::Error + 'static;

    /// What it must see to decide.
    fn query(&self, now: Millis) -> Query;

    /// Decides over the answer to [`Transition::query`]. The same input always gives the same
    /// result.
    ///
    /// # Errors
    ///
    /// The refusal, if the rules do not allow the operation.
    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Self::Outcome>, Self::Refusal>;

    /// Whether a crash may undo it, after its commit, without breaking a promise: it is then done
    /// again. So a claim whose lease is gone, or a settlement, after which the event is delivered
    /// once more (P3) and the inbox absorbs it (P5). The starts and failures that it counted are
    /// lost with it (F4). A store may be told not to make such a commit durable at once. `false` if
    /// not said otherwise.
    fn may_be_lost(&self) -> bool {
        false
    }
}

impl<T: Transition + ?Sized> Transition for &T {
    type Outcome = T::Outcome;
    type Refusal = T::Refusal;

    fn query(&self, now: Millis) -> Query {
        (**self).query(now)
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<T::Outcome>, T::Refusal> {
        (**self).decide(now, rows)
    }

    fn may_be_lost(&self) -> bool {
        (**self).may_be_lost()
    }
}

/// What a transition decided: the changes, and what they will have come to once they are committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision<O> {
    /// The changes, none if everything stands as it should.
    pub batch: Batch,
    /// The outcome.
    pub outcome: O,
}

/// A question that a store answers. All answers are [`Rows`]; each variant says which, and in which
/// order. Where a lane is followed by its pending outbox rows, a store need not look for more than
/// the lane can have: [`LaneRow::pending_at_most`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Query {
    /// These rows. Answer: those that exist, in the order of their keys. A store may lock the rows,
    /// or the places where they would be.
    Rows(Keys),
    /// Which lanes can be claimed. Answer: the lanes with `due` at or before `now`, ordered by
    /// (`due`, ordering key), at most `lanes`. Each lane is followed by its first pending outbox
    /// rows in the order of their sequence, at most `run`. After the lane with which the answer has
    /// come to `events` outbox rows, there is none. If the answer is not cut by `lanes` or
    /// `events`, the first lane that is due later comes last, without outbox rows.
    Due {
        /// The time that `due` is compared with.
        now: Millis,
        /// How many lanes at most.
        lanes: usize,
        /// How many outbox rows at most for each lane.
        run: usize,
        /// With how many outbox rows there is enough. 0: the answer is empty.
        events: usize,
    },
    /// Lanes by name; the names are sorted, each once. Answer: those that exist, in the order of
    /// the keys; each is followed by its first pending outbox rows in the order of their sequence,
    /// at most as many as asked for it.
    Lanes(Vec<(OrderingKey, usize)>),
    /// Events by id, to change how they are delivered. Answer: the outbox rows that exist, in the
    /// order of the ids, and then, in the order of the keys, each lane that one of them stands in,
    /// followed by its first pending outbox rows, at most `run`.
    Deliveries {
        /// The ids, sorted, each once.
        events: Vec<EventId>,
        /// How many pending outbox rows at most for each lane.
        run: usize,
    },
    /// Pending events, to walk through them. Answer: the outbox rows of pending events in the order
    /// of (lane, sequence), after this place, at most `limit`; before the first row of each lane
    /// stands the row of the lane.
    Pending {
        /// Only places after this one, compared by lane, then sequence, then id. There need not be
        /// an event: one with the same lane and sequence and a later id comes after it.
        after: Option<(OrderingKey, u64, EventId)>,
        /// How many outbox rows at most.
        limit: usize,
    },
    /// Dead events. Answer: the outbox rows of dead events, in the order of their ids, after this
    /// id, at most `limit`.
    Dead {
        /// Only ids after this one.
        after: Option<EventId>,
        /// How many at most.
        limit: usize,
    },
    /// A part of a table, to walk through it. Answer: its rows in the order of their keys, after
    /// this key, at most `limit`.
    Walk {
        /// The table.
        table: Table,
        /// Only keys after this one; it must be a key of the table.
        after: Option<Key>,
        /// How many at most.
        limit: usize,
    },
}

impl Query {
    /// The question for these rows.
    #[must_use]
    pub fn rows(keys: impl IntoIterator<Item = Key>) -> Self {
        Self::Rows(Keys::new(keys))
    }

    /// A query that needs no rows.
    #[must_use]
    pub fn none() -> Self {
        Self::rows([])
    }
}

/// Keys in their order, each once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Keys(Vec<Key>);

impl Keys {
    /// Sorts the keys and drops what stands twice.
    #[must_use]
    pub fn new(keys: impl IntoIterator<Item = Key>) -> Self {
        let mut keys: Vec<Key> = keys.into_iter().collect();
        keys.sort_unstable();
        keys.dedup();
        Self(keys)
    }

    /// The keys.
    #[must_use]
    pub fn as_slice(&self) -> &[Key] {
        &self.0
    }
}

/// The answer to a [`Query`]: rows in the order that the query defines.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Rows(Vec<Stored>);

impl Rows {
    /// Rows in the order that the query defines; only for adapters.
    #[must_use]
    pub fn new(rows: Vec<Stored>) -> Self {
        Self(rows)
    }

    /// All of them.
    #[must_use]
    pub fn as_slice(&self) -> &[Stored] {
        &self.0
    }

    /// Takes the rows out.
    #[must_use]
    pub fn into_vec(self) -> Vec<Stored> {
        self.0
    }

    /// Adds a row to the end.
    pub fn push(&mut self, stored: Stored) {
        self.0.push(stored);
    }

    fn find<'a, T>(&'a self, pick: impl Fn(&'a Record) -> Option<T>) -> Option<(T, Revision)> {
        self.0.iter().find_map(|stored| pick(&stored.record).map(|row| (row, stored.revision)))
    }

    pub(crate) fn request(&self) -> Option<(&RequestRow, Revision)> {
        self.find(|record| if let Record::Request(_, row) = record { Some(row) } else { None })
    }

    pub(crate) fn order(&self) -> Option<(&OrderRow, Revision)> {
        self.find(|record| if let Record::Order(_, row) = record { Some(row) } else { None })
    }

    pub(crate) fn event(&self) -> Option<(&Event, Revision)> {
        self.find(|record| if let Record::Event(event) = record { Some(event) } else { None })
    }

    /// The outbox rows at the beginning of the answer.
    pub(crate) fn outbox(&self) -> impl Iterator<Item = (&EventId, &OutboxRow, Revision)> {
        self.0.iter().map_while(|stored| {
            if let Record::Outbox(id, row) = &stored.record {
                Some((id, row, stored.revision))
            } else {
                None
            }
        })
    }

    /// A lane in an answer that is in the order of the keys.
    pub(crate) fn lane(&self, key: &OrderingKey) -> Option<(&LaneRow, Revision)> {
        let wanted = (Table::Lanes, key.as_str(), "");
        let stored =
            &self.0[self.0.binary_search_by(|stored| stored.record.parts().cmp(&wanted)).ok()?];
        if let Record::Lane(_, row) = &stored.record { Some((row, stored.revision)) } else { None }
    }

    pub(crate) fn inbox(&self) -> Option<(&InboxRow, Revision)> {
        self.find(|record| if let Record::Inbox(_, _, row) = record { Some(row) } else { None })
    }

    pub(crate) fn position(&self) -> Option<(&PositionRow, Revision)> {
        self.find(|record| if let Record::Position(_, _, row) = record { Some(row) } else { None })
    }

    pub(crate) fn call(&self) -> Option<(&CallRow, Revision)> {
        self.find(|record| if let Record::Call(_, _, row) = record { Some(row) } else { None })
    }

    /// The lanes in the answer, each with the outbox rows that follow it.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = LaneView<'_>> {
        let starts = self.0.iter().enumerate().filter_map(|(at, stored)| {
            if let Record::Lane(key, row) = &stored.record {
                Some((at, key, row, stored.revision))
            } else {
                None
            }
        });
        starts.map(|(at, key, row, revision)| {
            let rest = &self.0[at + 1..];
            let end = rest
                .iter()
                .position(|stored| !matches!(stored.record, Record::Outbox(..)))
                .unwrap_or(rest.len());
            LaneView { key, row, revision, pending: &rest[..end] }
        })
    }
}

/// A lane with its first pending outbox rows.
#[derive(Clone, Copy)]
pub(crate) struct LaneView<'a> {
    pub(crate) key: &'a OrderingKey,
    pub(crate) row: &'a LaneRow,
    pub(crate) revision: Revision,
    pending: &'a [Stored],
}

/// The lane with this key, if it is there, in an answer with lanes in the order of their keys; to
/// be asked for in that order too.
pub(crate) fn seek<'a>(
    lanes: &mut Peekable<impl Iterator<Item = LaneView<'a>>>,
    key: &OrderingKey,
) -> Option<LaneView<'a>> {
    while lanes.next_if(|lane| lane.key < key).is_some() {}
    lanes.peek().copied().filter(|lane| lane.key == key)
}

impl<'a> LaneView<'a> {
    /// Its first pending events, in order.
    pub(crate) fn pending(
        self,
    ) -> impl Iterator<Item = (&'a EventId, &'a OutboxRow, Revision)> + Clone {
        self.pending.iter().filter_map(|stored| {
            if let Record::Outbox(id, row) = &stored.record {
                Some((id, row, stored.revision))
            } else {
                None
            }
        })
    }
}

/// What a change expects to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Expect {
    /// No row with this key.
    Absent,
    /// The row at this revision.
    Revision(Revision),
}

impl Expect {
    /// Whether what is there is what was expected.
    #[must_use]
    pub fn holds(self, found: Option<Revision>) -> bool {
        match self {
            Self::Absent => found.is_none(),
            Self::Revision(revision) => found == Some(revision),
        }
    }

    /// The revision of the row after it is written.
    #[must_use]
    pub fn written(self) -> Revision {
        match self {
            Self::Absent => Revision::FIRST,
            Self::Revision(revision) => revision.next(),
        }
    }
}

/// One guarded change of one row.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Change {
    /// Write the row, with [`Expect::written`] as its revision.
    Put {
        /// What must be there.
        expect: Expect,
        /// What is there afterwards.
        record: Record,
    },
    /// Remove the row.
    Delete {
        /// What must be there.
        expect: Revision,
        /// Which row.
        key: Key,
    },
}

impl Change {
    /// Which row.
    #[must_use]
    pub fn key(&self) -> Key {
        match self {
            Self::Put { record, .. } => record.key(),
            Self::Delete { key, .. } => key.clone(),
        }
    }

    fn parts(&self) -> Parts<'_> {
        match self {
            Self::Put { record, .. } => record.parts(),
            Self::Delete { key, .. } => key.parts(),
        }
    }

    /// What must be there.
    #[must_use]
    pub fn expect(&self) -> Expect {
        match self {
            Self::Put { expect, .. } => *expect,
            Self::Delete { expect, .. } => Expect::Revision(*expect),
        }
    }
}

/// Guarded changes, sorted by key, each key once.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Batch(Vec<Change>);

impl Batch {
    /// No changes.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// No changes, with room for as many as will be needed.
    pub(crate) fn with_capacity(changes: usize) -> Self {
        Self(Vec::with_capacity(changes))
    }

    /// The changes, in the order of their keys.
    #[must_use]
    pub fn changes(&self) -> &[Change] {
        &self.0
    }

    /// Changes in any order; for tests of adapters, since a transition makes its own batch.
    ///
    /// # Errors
    ///
    /// [`Invalid::Twice`] if two changes name the same row.
    pub fn of(changes: Vec<Change>) -> Result<Self, Invalid> {
        let batch = Self(changes).in_order();
        match batch.0.windows(2).find(|pair| pair[0].parts() == pair[1].parts()) {
            Some(pair) => Err(Invalid::Twice {
                field: "the key of a change",
                value: pair[0].key().to_string().into(),
            }),
            None => Ok(batch),
        }
    }

    /// Whether there is nothing to change.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn insert(&mut self, record: Record) {
        self.0.push(Change::Put { expect: Expect::Absent, record });
    }

    pub(crate) fn update(&mut self, expect: Revision, record: Record) {
        self.0.push(Change::Put { expect: Expect::Revision(expect), record });
    }

    /// Adds the changes of another batch, of another table: if both are in order, so are they
    /// together.
    pub(crate) fn append(&mut self, mut other: Self) {
        if other.0.first().map(Change::parts) < self.0.first().map(Change::parts) {
            swap(self, &mut other);
        }
        self.0.append(&mut other.0);
    }

    pub(crate) fn delete(&mut self, expect: Revision, key: Key) {
        self.0.push(Change::Delete { expect, key });
    }

    fn in_order(mut self) -> Self {
        // In place, and next to nothing if they are in order already.
        self.0.sort_unstable_by(|a, b| a.parts().cmp(&b.parts()));
        self
    }
}

impl<O> Decision<O> {
    pub(crate) fn new(batch: Batch, outcome: O) -> Self {
        let batch = batch.in_order();
        debug_assert!(
            batch.0.windows(2).all(|pair| pair[0].parts() < pair[1].parts()),
            "a batch names a key twice"
        );
        Self { batch, outcome }
    }

    pub(crate) fn nothing(outcome: O) -> Self {
        Self { batch: Batch::new(), outcome }
    }
}
