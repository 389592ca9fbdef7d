//! What a sync store implements, and what it is given for that. All of it is public at the root of
//! the crate, and nowhere else.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::any::Any;
use core::convert::Infallible;
use core::error::Error;
use core::ops::{Deref, DerefMut};

use thiserror::Error;

use crate::boundary::DeadLetter;
use crate::boundary::{Batch, Decision, Query, Rows, Transition};
use crate::event::Body;
use crate::flow::{Called, RunFlow, Stop, WriteFlow};
use crate::ids::{Consumer, EventId, LaneKey, OrderId, Reason, RequestKey};
use crate::stats::Stats;
use crate::table::{
    EventRow, EventState, InboxRow, Key, LaneRow, OrderRow, RequestRow, Stored, Table,
};
use crate::time::Millis;

use super::driver::{Call, NoCall, drive};
use super::reading::readings;

/// What can go wrong in a store.
///
/// A store with many writers says which of its errors mean that another transaction was in the way.
/// The transaction is then over, and is run again.
pub trait StoreError: Error + 'static {
    /// Whether another transaction was in the way, as after a serialization failure or a deadlock:
    /// nothing was changed, and a retry helps.
    fn is_conflict(&self) -> bool {
        false
    }
}

impl StoreError for Infallible {}

/// Whether what a handler returned is a conflict of its store: as it is, or in a box, there also
/// as a source of another error.
pub(crate) fn is_conflict<S: StoreError, E: 'static>(error: &E) -> bool {
    type Shared = Box<dyn Error + Send + Sync>;
    let any: &dyn Any = error;
    if let Some(own) = any.downcast_ref::<S>() {
        return own.is_conflict();
    }
    let shared = any.downcast_ref::<Shared>().map(|boxed| &**boxed as &(dyn Error + 'static));
    let boxed = any.downcast_ref::<Box<dyn Error>>().map(|boxed| &**boxed);
    let mut next = boxed.or(shared);
    while let Some(error) = next {
        if error.downcast_ref::<S>().is_some_and(S::is_conflict) {
            return true;
        }
        next = error.source();
    }
    false
}

macro_rules! sync_readings {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),+) -> $answer:ty:
        $query:expr, $read:expr;)+) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        ///
        /// The store's own.
        fn $name(&mut self, $($arg: $type),+) -> Result<$answer, Self::Error> {
            let rows = self.load(&$query)?;
            Ok(($read)(rows))
        }
    )+};
}

/// Answers questions about one consistent state of the tables.
///
/// ```
/// use twobox::{Load, Millis, OrderId, Reader};
/// use twobox_memory::MemoryStore;
///
/// let store = MemoryStore::new();
/// let mut view = store.view()?;
/// assert_eq!(view.order(&OrderId::new("order-1")?)?, None);
/// assert_eq!(view.stats(Millis::new(1_000))?.all.pending, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Load {
    /// What can go wrong in the store.
    type Error: StoreError;

    /// Answers a query.
    ///
    /// # Errors
    ///
    /// The store's own. A row that cannot be read must be an error, never left out.
    ///
    /// # To be correct
    ///
    /// - The answer is complete, and in the order that the query defines.
    /// - Within one transaction, it shows what was applied before, and nothing that others have not
    ///   committed.
    /// - A lane and what is pending in it come from one snapshot, also where the store takes several
    ///   statements for them: the guard of the lane would otherwise hold for a decision over rows
    ///   that have changed since.
    fn load(&mut self, query: &Query) -> Result<Rows, Self::Error>;

    readings!(sync_readings);
}

/// Tables within an open transaction, which its owner will commit.
pub trait Tables: Load {
    /// Writes a batch.
    ///
    /// # Errors
    ///
    /// The store's own. The transaction must then be rolled back by its owner.
    ///
    /// # To be correct
    ///
    /// - Every guard is checked before anything is written. If one does not hold, nothing is
    ///   written, and its key is returned, if it is known. The transaction is then over.
    /// - All changes are written, or the transaction cannot be committed.
    /// - Nothing is visible to others before the commit, and after it either everything or nothing
    ///   is.
    /// - A row is written with the revision of [`Expect::written`](crate::Expect::written).
    fn apply(&mut self, batch: &Batch) -> Result<Applied, Self::Error>;

    /// Writes a batch, given what was loaded last in this transaction: since then nothing was
    /// written in it. A store that would read the rows again to check their guards may save that.
    ///
    /// # Errors
    ///
    /// As [`Tables::apply`].
    fn apply_seen(&mut self, batch: &Batch, seen: &Seen<'_>) -> Result<Applied, Self::Error> {
        let _ = seen;
        self.apply(batch)
    }

    /// Runs a transition in this transaction. Nothing counts before its owner has committed it.
    ///
    /// # Errors
    ///
    /// [`RunError::Refused`] by the rules, which leaves the transaction as it was;
    /// [`RunError::Conflict`] if another transaction changed what was read, and
    /// [`RunError::Store`]: the transaction is over, roll it back and start again.
    fn run<T: Transition>(
        &mut self,
        transition: T,
        now: Millis,
    ) -> Result<T::Outcome, RunError<Self::Error, T::Refusal>> {
        let query = transition.query(now);
        let rows = self.load(&query).map_err(RunError::of)?;
        let Decision { batch, outcome } =
            transition.decide(now, &rows).map_err(RunError::Refused)?;
        if batch.is_empty() {
            return Ok(outcome);
        }
        let seen = Seen { query: &query, rows: &rows };
        match self.apply_seen(&batch, &seen).map_err(RunError::of)? {
            Applied::Written => Ok(outcome),
            Applied::Conflict(key) => Err(RunError::Conflict(key)),
        }
    }
}

/// What was loaded last in a transaction.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// The question.
    pub query: &'a Query,
    /// The answer.
    pub rows: &'a Rows,
}

/// A transaction that can be committed. To drop it is to roll it back.
pub trait Transaction: Tables {
    /// Commits.
    ///
    /// # Errors
    ///
    /// The store's own. It is then unknown whether the commit took, unless the adapter's
    /// documentation says more.
    ///
    /// # To be correct
    ///
    /// - When it returns `Ok`, everything is there after a crash, as far as the store's durability
    ///   setting promises.
    /// - If it is not called, nothing is there.
    fn commit(self) -> Result<(), Self::Error>;
}

/// A store that can be read from.
pub trait Reader {
    /// What can go wrong in the store.
    type Error: StoreError;
    /// A consistent state of the tables.
    type View<'a>: Load<Error = Self::Error>
    where
        Self: 'a;

    /// Opens a consistent state of what is committed.
    ///
    /// # Errors
    ///
    /// The store's own.
    fn view(&self) -> Result<Self::View<'_>, Self::Error>;
}

/// A store: it begins transactions, and runs transitions in transactions of its own.
pub trait Store: Reader {
    /// A transaction of the store.
    type Tx<'a>: Transaction<Error = Self::Error>
    where
        Self: 'a;

    /// Begins a transaction that reads and writes.
    ///
    /// # Errors
    ///
    /// The store's own.
    ///
    /// # To be correct
    ///
    /// - Transactions that ran at the same time and both committed have the effect of one after the
    ///   other, or a guard of one did not hold.
    fn begin(&self) -> Result<Self::Tx<'_>, Self::Error>;

    /// Runs `work` in a transaction, and ends that as `work` says. [`Store::run`] and
    /// [`Store::write`] stand on it.
    ///
    /// A store may let callers that come at the same time share a transaction and its commit, and
    /// runs `work` again if that could not be committed for a reason that lies with another one.
    /// Callers do not notice: an answer, also one after [`End::RollBack`], is given once what it
    /// follows from is committed.
    ///
    /// # Errors
    ///
    /// [`RunError::Store`] if there is no transaction, [`RunError::Unknown`] if the commit failed.
    fn transact<R>(
        &self,
        mut work: impl FnMut(&mut Self::Tx<'_>) -> End<R>,
    ) -> Result<R, RunError<Self::Error, Infallible>> {
        let mut tx = self.begin().map_err(RunError::of)?;
        match work(&mut tx) {
            End::Commit(answer) => tx.commit().map(|()| answer).map_err(RunError::of_commit),
            End::RollBack(answer) => Ok(answer),
        }
    }

    /// Runs one transition in a transaction of its own, and commits it if it changes something.
    /// After a conflict it is run again.
    ///
    /// # Errors
    ///
    /// [`RunError`]; only after [`RunError::Unknown`] may anything have changed. Retrying is always
    /// safe.
    fn run<T: Transition>(
        &self,
        transition: T,
        now: Millis,
    ) -> Result<T::Outcome, RunError<Self::Error, T::Refusal>> {
        drive(self, RunFlow::new(transition, now, false), &mut NoCall)
    }

    /// Runs `work` in a transaction of its own and commits it, if it returns `Ok`: transitions and
    /// the user's own rows in one commit. An error or a panic in `work` rolls everything back.
    /// After a conflict, also one that `work` has met by itself or returns as the store's error, or
    /// as [`Store::transact`] says, `work` is run again from the beginning, so it must do nothing
    /// outside the transaction that may not be done twice.
    ///
    /// # Errors
    ///
    /// [`RunError::Refused`] with the error of `work`; otherwise as [`Store::run`].
    fn write<R, E: 'static>(
        &self,
        now: Millis,
        work: impl FnMut(&mut Writing<'_, Self::Tx<'_>>) -> Result<R, E>,
    ) -> Result<R, RunError<Self::Error, E>> {
        let mut work = Work { work, now, result: None, touched: false };
        drive(self, WriteFlow::default(), &mut work).map_err(RunError::widened)?;
        match work.result {
            Some(result) => result.map_err(RunError::Refused),
            // It was called before the flow came to its end; what else it met, it has said.
            None => Err(RunError::Conflict(None)),
        }
    }
}

/// The user's work in [`Store::write`], with what it returned last.
struct Work<F, R, E> {
    work: F,
    now: Millis,
    result: Option<Result<R, E>>,
    touched: bool,
}

impl<X: Tables, F, R, E: 'static> Call<X> for Work<F, R, E>
where
    F: FnMut(&mut Writing<'_, X>) -> Result<R, E>,
{
    fn call(&mut self, tx: &mut X, _n: usize) -> Called {
        let mut writing = Writing::new(tx, self.now);
        let result = (self.work)(&mut writing);
        let conflict = writing.conflict();
        let called = match (conflict, &result) {
            (Some(key), _) => Called::Conflict(key),
            (None, Ok(_)) => Called::Done,
            (None, Err(error)) if is_conflict::<X::Error, E>(error) => Called::Conflict(None),
            (None, Err(_)) => Called::Failed(Reason::new("")),
        };
        self.touched = writing.touched();
        self.result = Some(result);
        called
    }

    fn touched(&self) -> bool {
        self.touched
    }
}

/// How a transaction of [`Store::transact`] ends, with the answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum End<R> {
    /// Commit it.
    Commit(R),
    /// Roll it back.
    RollBack(R),
}

/// A transaction of [`Store::write`]. It derefs to the adapter's transaction, which gives access to
/// the user's own tables.
#[derive(Debug)]
pub struct Writing<'t, X> {
    tx: &'t mut X,
    now: Millis,
    conflict: Option<Option<Key>>,
    touched: bool,
}

impl<'t, X: Tables> Writing<'t, X> {
    pub(crate) fn new(tx: &'t mut X, now: Millis) -> Self {
        Self { tx, now, conflict: None, touched: false }
    }

    /// The conflict that it has met, with the row if it is known.
    pub(crate) fn conflict(&self) -> Option<Option<Key>> {
        self.conflict.clone()
    }

    /// Whether rows of twobox may have been read or written.
    pub(crate) const fn touched(&self) -> bool {
        self.touched
    }

    /// The time that was given to [`Store::write`].
    pub fn now(&self) -> Millis {
        self.now
    }

    /// Runs a transition in this transaction.
    ///
    /// # Errors
    ///
    /// As [`Tables::run`]. After a conflict the transaction is rolled back and run again, whatever
    /// is made of the error.
    pub fn run<T: Transition>(
        &mut self,
        transition: T,
    ) -> Result<T::Outcome, RunError<X::Error, T::Refusal>> {
        let now = self.now;
        Tables::run(self, transition, now)
    }

    /// Notes a conflict in what the transaction has answered.
    fn noting<T>(&mut self, answer: Result<T, X::Error>) -> Result<T, X::Error> {
        if answer.as_ref().is_err_and(StoreError::is_conflict) {
            self.conflict.get_or_insert(None);
        }
        answer
    }

    fn noting_applied(&mut self, applied: Result<Applied, X::Error>) -> Result<Applied, X::Error> {
        if let Ok(Applied::Conflict(key)) = &applied {
            self.conflict.get_or_insert_with(|| key.clone());
        }
        self.noting(applied)
    }
}

/// Whatever meets a conflict in it, the transaction is rolled back and run again.
impl<X: Tables> Load for Writing<'_, X> {
    type Error = X::Error;

    fn load(&mut self, query: &Query) -> Result<Rows, X::Error> {
        self.touched = true;
        let rows = self.tx.load(query);
        self.noting(rows)
    }
}

impl<X: Tables> Tables for Writing<'_, X> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, X::Error> {
        self.touched = true;
        let applied = self.tx.apply(batch);
        self.noting_applied(applied)
    }

    fn apply_seen(&mut self, batch: &Batch, seen: &Seen<'_>) -> Result<Applied, X::Error> {
        self.touched = true;
        let applied = self.tx.apply_seen(batch, seen);
        self.noting_applied(applied)
    }

    fn run<T: Transition>(
        &mut self,
        transition: T,
        now: Millis,
    ) -> Result<T::Outcome, RunError<X::Error, T::Refusal>> {
        self.touched = true;
        let result = self.tx.run(transition, now);
        if let Err(RunError::Conflict(key)) = &result {
            self.conflict.get_or_insert_with(|| key.clone());
        }
        result
    }
}

impl<X> Deref for Writing<'_, X> {
    type Target = X;
    fn deref(&self) -> &X {
        self.tx
    }
}

impl<X> DerefMut for Writing<'_, X> {
    fn deref_mut(&mut self) -> &mut X {
        self.touched = true;
        self.tx
    }
}

/// Whether a batch was written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Applied {
    /// All of it.
    Written,
    /// Nothing, since a row is not what the batch expects: this one, if the store knows which. The
    /// transaction is over, whatever else might still be done in it.
    Conflict(Option<Key>),
}

/// Why a transition failed. `E` is the store's error, `R` the refusal.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RunError<E, R> {
    /// The rules do not allow it. Nothing was changed.
    #[error("{0}")]
    Refused(R),
    /// Another transaction was in the way: it has changed this row since it was read, if the store
    /// knows which. Nothing was changed: roll back and retry.
    #[error("another transaction was in the way{}; roll back and run it again", of_row(.0))]
    Conflict(Option<Key>),
    /// The store failed before the commit. Nothing was changed: retry when the store is back.
    #[error("the store failed before the commit, nothing was changed: {0}")]
    Store(#[source] E),
    /// The commit failed, and may have taken effect or not. Retry: the same call finds out.
    #[error("the commit failed and may have taken or not; run the same again to find out: {0}")]
    Unknown(#[source] E),
}

/// The row of a conflict, as it stands in an error.
fn of_row(key: &Option<Key>) -> alloc::string::String {
    key.as_ref().map_or_else(Default::default, |key| alloc::format!(" at {key}"))
}

impl<E: StoreError, R> RunError<E, R> {
    /// What went wrong in a store before the commit.
    pub fn of(error: E) -> Self {
        if error.is_conflict() { Self::Conflict(None) } else { Self::Store(error) }
    }

    /// What went wrong in a store at the commit.
    pub fn of_commit(error: E) -> Self {
        if error.is_conflict() { Self::Conflict(None) } else { Self::Unknown(error) }
    }
}

impl<E, R> RunError<E, R> {
    /// The refusal, or else the error of the store.
    ///
    /// # Errors
    ///
    /// Everything that is not a refusal.
    pub(crate) fn split(self) -> Result<R, RunError<E, Infallible>> {
        match self {
            Self::Refused(refusal) => Ok(refusal),
            Self::Conflict(key) => Err(RunError::Conflict(key)),
            Self::Store(error) => Err(RunError::Store(error)),
            Self::Unknown(error) => Err(RunError::Unknown(error)),
        }
    }
}

impl<E, R> RunError<E, RunError<E, R>> {
    /// The error of a transition that ran in [`Store::write`] and was returned from it, as the one
    /// that it is.
    #[must_use]
    pub fn flatten(self) -> RunError<E, R> {
        self.split().unwrap_or_else(RunError::widened)
    }
}

impl<E, R> RunError<E, R> {
    /// What a flow stopped for.
    pub(crate) fn stopped(stop: Stop<R>) -> Self {
        match stop {
            Stop::Refused(refusal) => Self::Refused(refusal),
            Stop::Conflict(key) => Self::Conflict(key),
        }
    }
}

impl<E> RunError<E, Infallible> {
    /// As the error of something that could also have been refused.
    pub(crate) fn widened<R>(self) -> RunError<E, R> {
        match self {
            Self::Refused(never) => match never {},
            Self::Conflict(key) => RunError::Conflict(key),
            Self::Store(error) => RunError::Store(error),
            Self::Unknown(error) => RunError::Unknown(error),
        }
    }
}

/// A store behind a reference or an `Arc` is a store.
macro_rules! stores_behind {
    ($($pointer:ty),+) => {$(
        impl<S: Reader> Reader for $pointer {
            type Error = S::Error;
            type View<'a>
                = S::View<'a>
            where
                Self: 'a;

            fn view(&self) -> Result<S::View<'_>, S::Error> {
                (**self).view()
            }
        }

        impl<S: Store> Store for $pointer {
            type Tx<'a>
                = S::Tx<'a>
            where
                Self: 'a;

            fn begin(&self) -> Result<S::Tx<'_>, S::Error> {
                (**self).begin()
            }

            fn transact<R>(
                &self,
                work: impl FnMut(&mut S::Tx<'_>) -> End<R>,
            ) -> Result<R, RunError<S::Error, Infallible>> {
                (**self).transact(work)
            }
        }
    )+};
}

stores_behind!(&S, Arc<S>);
