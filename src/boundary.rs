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

mod answer;
mod batch;

use alloc::vec::Vec;

pub use answer::{DeadLetter, Delivery, Lane, Rows};
pub(crate) use answer::{LaneRows, seek};
pub use batch::{Batch, Change, Expect, Write};

use crate::ids::{Destination, EventId};
use crate::table::{Key, Table};
use crate::time::Millis;

/// An operation on tables: a typed query, and a pure decision over its answer.
///
/// A program may have transitions of its own, over the tables of twobox: they run as these do.
pub trait Transition {
    /// The outcome, provisional until the transaction is committed.
    type Outcome;
    /// Why the rules refused it. A refusal changes nothing.
    type Refusal: core::error::Error + 'static;

    /// The rows that it must see to decide.
    fn query(&self, now: Millis) -> Query;

    /// Decides over the answer to [`Transition::query`]. The same input always gives the same
    /// result.
    ///
    /// # Errors
    ///
    /// The refusal, if the rules do not allow the operation.
    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Self::Outcome>, Self::Refusal>;

    /// What it decides if the tables are as they usually are, such as a key that is free. A store
    /// over a network writes that first, and asks the query only if a guard does not hold. `None`
    /// if nothing can be assumed.
    fn assume(&self, now: Millis) -> Option<Decision<Self::Outcome>> {
        let _ = now;
        None
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

    fn assume(&self, now: Millis) -> Option<Decision<T::Outcome>> {
        (**self).assume(now)
    }
}

/// What a transition decided: the changes, and the outcome that they have once they are committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decision<O> {
    /// The changes; none if everything is as it should be.
    pub batch: Batch,
    /// The outcome.
    pub outcome: O,
}

impl<O> Decision<O> {
    /// These changes, with this outcome.
    ///
    /// # Panics
    ///
    /// In a debug build, if two changes name the same row.
    #[must_use]
    pub fn new(batch: Batch, outcome: O) -> Self {
        Self { batch: batch.in_order(), outcome }
    }

    /// No changes.
    #[must_use]
    pub const fn nothing(outcome: O) -> Self {
        Self { batch: Batch::new(), outcome }
    }

    /// Says that a crash may undo the commit of this without breaking a promise, so that a store
    /// may skip its sync. It holds for claims, renewals and settlements: the event is delivered
    /// once more (P3), and the inbox absorbs it (P5). The starts and failures that were counted are
    /// lost with it (F4).
    #[must_use]
    pub const fn may_be_lost(mut self) -> Self {
        self.batch.may_be_lost = true;
        self
    }
}

/// A question that a store answers. All answers are [`Rows`]; each variant says what is in them.
///
/// A lane and what is pending in it come from one snapshot: a guard on a lane's revision would
/// otherwise hold for a decision over rows that have changed since.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Query {
    /// These rows. Answer: [`Rows::rows`], those that exist, in the order of their keys. A store
    /// may lock the rows, or the places where they would be.
    Rows(Keys),
    /// Which lanes can be claimed. Answer: [`Rows::lanes`], those with `due` at or before `now`,
    /// ordered by (`due`, key), whatever their destinations, each with its first pending events in the order of their
    /// sequence, and their envelopes.
    ///
    /// The answer is cut at the limits. A lane with which `events` or `bytes` is reached is the
    /// last one; of a lane with which `bytes` is reached, the event that reaches it is the last. If
    /// nothing was cut, the first lane that is due later comes last, without events.
    ///
    /// A store may leave out lanes that another transaction holds locked.
    Due(Due),
    /// Events by id, to change how they are delivered. Answer: [`Rows::deliveries`], those that
    /// exist, in the order of the ids, and [`Rows::lanes`], in the order of the keys, each lane
    /// that one of them stands in with its first pending events, at most `run`, without envelopes.
    Deliveries {
        /// The ids, sorted, each once.
        events: Vec<EventId>,
        /// How many pending events at most for each lane.
        run: usize,
    },
    /// Dead events. Answer: [`Rows::deliveries`], in the order of their ids, after this id, at most
    /// `limit`.
    Dead {
        /// Only ids after this one.
        after: Option<EventId>,
        /// How many at most.
        limit: usize,
    },
    /// What a purge may remove. See [`Finished`].
    Finished(Finished),
    /// How the events stand at this time. Answer: [`Rows::stats`].
    Stats {
        /// The time.
        now: Millis,
    },
    /// A part of a table, to walk through it. Answer: [`Rows::rows`] in the order of their keys,
    /// after this key, at most `limit`.
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
    pub const fn none() -> Self {
        Self::Rows(Keys(Vec::new()))
    }
}

/// Which lanes to claim from; see [`Query::Due`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Due {
    /// The time that `due` is compared with.
    pub now: Millis,
    /// Only lanes that are due at or after this time. It spares a store whose index keeps entries
    /// for a while after they have moved from reading over them each time.
    pub floor: Millis,
    /// Of which destinations. What waits at the others costs nothing, however much that is.
    pub destinations: Destinations,
    /// How many lanes at most.
    pub lanes: usize,
    /// How many events at most for each lane.
    pub run: usize,
    /// With how many events the answer ends: the lane that reaches them is the last one. 0: the
    /// answer is empty.
    pub events: usize,
    /// With how many bytes of bodies the answer ends: the event that reaches them is the last one.
    /// 0: the answer is empty.
    pub bytes: usize,
}

/// Some of the destinations that there are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Destinations {
    /// All but these, in ascending order, each once.
    Except(Vec<Destination>),
    /// This one alone.
    Only(Destination),
}

impl Destinations {
    /// All of them.
    pub const ALL: Self = Self::Except(Vec::new());

    /// All but these.
    #[must_use]
    pub fn except(destinations: impl IntoIterator<Item = Destination>) -> Self {
        let mut except: Vec<Destination> = destinations.into_iter().collect();
        except.sort_unstable();
        except.dedup();
        Self::Except(except)
    }

    /// Whether this is one of them.
    #[must_use]
    pub fn contains(&self, destination: &Destination) -> bool {
        match self {
            Self::Except(except) => except.binary_search(destination).is_err(),
            Self::Only(only) => only == destination,
        }
    }
}

/// Rows of a table that nothing can happen to any more, and that came into their last state at or
/// before a time. Answer: at most `limit` of them in the order of their keys, after this key, and
/// [`Rows::next`]: the key after which to go on, or `None` if there are no more. A store may answer
/// with fewer, or none, so as not to look at too much at once.
///
/// | table       | which                                         | since      | answer in |
/// |-------------|-----------------------------------------------|------------|-----------|
/// | `requests`  | with an order none of whose events is pending or dead | placed | [`Rows::rows`] |
/// | `orders`    | whose request is gone, or names another order | committed  | [`Rows::rows`]; bodies may be left out |
/// | `events`    | confirmed, or discarded or cancelled          | committed; discarded or cancelled | [`Rows::deliveries`] |
/// | `lanes`     | nothing pending, not blocked, none of its events left | changed | [`Rows::rows`] |
/// | `inbox`     | applied                                       | applied    | [`Rows::rows`] |
/// | `positions` | all                                           | moved      | [`Rows::rows`] |
/// | `calls`     | done                                          | done       | [`Rows::rows`] |
/// | `outbox`, `effects` | none: they go with their event and inbox row |     |           |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Finished {
    /// The table.
    pub table: Table,
    /// The last time at which a row may have come into its last state.
    pub until: Millis,
    /// Only keys after this one; it must be a key of the table.
    pub after: Option<Key>,
    /// How many at most.
    pub limit: usize,
}

/// Keys in ascending order, each once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Keys(Vec<Key>);

impl Keys {
    /// Sorts the keys and drops duplicates.
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
