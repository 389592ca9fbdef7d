//! Work on a store as state machines: what to ask of it, and in which order, without any I/O.
//!
//! A [`Flow`] asks: load this, write that, call the user's handler, commit. It is told what came of
//! it, and comes to a value at its end. One sync driver ([`store::drive`](crate::store::drive)) and
//! one async driver ([`drive`](crate::store::asynchronous::drive)) run all of them, so each rule
//! about what follows what stands once: trying again after a conflict, receiving a batch, going
//! through a table page by page.
//!
//! ```text
//!            +-> View(query) --> Rows --+
//!            |                          |
//!   Start ---+-> Begin ----------> Begun (again, if the store ran it together with others)
//!            |                          |  Load -> Rows, Write -> Written or Conflict, Call -> Called
//!            |                          v
//!            +<---- Ended(committed, or not) <---- Write(.., Commit), Commit, RollBack
//!            |
//!            +-> Done
//! ```

mod exchange;
mod overlay;
mod receive;
mod run;
mod upkeep;

use crate::boundary::{Batch, Query, Rows};
use crate::table::Key;

pub use exchange::{ExchangeFlow, Exchanged};
pub use receive::ReceiveFlow;
pub use run::{RunFlow, WriteFlow};
pub use upkeep::{PassOverFlow, PurgeFlow, RedriveFlow};

pub(crate) use overlay::Overlay;

/// How often a flow begins again, after another transaction changed what it had read.
pub const CONFLICT_TRIES: u32 = 32;

/// What a flow asks, whatever it comes to: so there is one sync driver, and not one for each flow.
pub trait Steps {
    /// What to do next, told what came of what was asked before.
    fn next(&mut self, told: Told<'_>) -> Ask;
}

/// Work on a store as a state machine.
pub trait Flow: Steps + Sized {
    /// What it comes to.
    type Output;
    /// Why it was refused.
    type Refusal;

    /// What it came to, once it has asked for [`Ask::Done`].
    ///
    /// # Errors
    ///
    /// Why it came to nothing.
    fn finish(self) -> Result<Self::Output, Stop<Self::Refusal>>;
}

/// What a flow asks of whoever drives it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Ask {
    /// Answer this from what is committed now.
    View(Query),
    /// Begin a transaction.
    Begin,
    /// Answer this in the transaction.
    Load(Query),
    /// Write this in the transaction. What follows is said with it, so that both can go in one
    /// round trip.
    Write(Batch, Then),
    /// Let the user's handler do its work number `n` in the transaction.
    Call(usize),
    /// Commit the transaction.
    Commit,
    /// Roll the transaction back.
    RollBack,
    /// It has come to its end.
    Done,
}

/// What follows a write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Then {
    /// The commit.
    Commit,
    /// This question, in the same transaction.
    Load(Query),
}

/// What a flow is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told<'a> {
    /// Nothing yet: begin.
    Start,
    /// A transaction has begun, perhaps anew: nothing of an earlier one counts.
    Begun,
    /// The answer.
    Rows(&'a Rows),
    /// A guard did not hold: that of this row, if the store knows which. Nothing may be read or
    /// written in the transaction any more.
    Conflict(Option<Key>),
    /// The handler has done its work.
    Called(Called),
    /// The transaction is committed, or rolled back.
    Ended,
}

/// What came of a handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Called {
    /// What it wrote may be committed.
    Done,
    /// The same, and this is to be recorded as its effect.
    Effect(crate::event::Body),
    /// What it wrote must be rolled back; it wants to be called again another time.
    Defer(crate::ids::Reason),
    /// What it wrote must be rolled back; it failed.
    Failed(crate::ids::Reason),
    /// It met a conflict of this row.
    Conflict(Option<Key>),
}

/// Why a flow came to no value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop<R> {
    /// The rules do not allow it.
    Refused(R),
    /// It has begun anew as often as makes sense.
    Conflict(Option<Key>),
}

/// Counts how often a flow has begun again, in one place for all of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Tries {
    conflicts: u32,
    /// The conflict that was met and is not dealt with.
    last: Option<Option<Key>>,
}

impl Tries {
    /// A transaction has begun, perhaps anew: a conflict of an earlier run of it counts no more.
    fn begun(&mut self) {
        self.last = None;
    }

    /// A conflict was met: the transaction is rolled back, and then see [`Tries::again`].
    fn conflict(&mut self, key: Option<Key>) -> Ask {
        self.last = Some(key);
        Ask::RollBack
    }

    /// After a transaction has ended: what to do, if that was for a conflict.
    fn again(&mut self) -> Option<Ask> {
        self.last.as_ref()?;
        self.conflicts += 1;
        if self.conflicts > CONFLICT_TRIES {
            return Some(Ask::Done);
        }
        self.last = None;
        Some(Ask::Begin)
    }

    /// What a flow came to that has not ended with a conflict.
    fn finish<T, R>(self, value: T) -> Result<T, Stop<R>> {
        self.last.map_or(Ok(value), |key| Err(Stop::Conflict(key)))
    }
}
