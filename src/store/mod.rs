//! Stores: what an adapter implements, and the drivers that run transitions on it.
//!
//! An adapter implements [`Reader`] and [`Store`] with their transactions, or their async twins in
//! [`asynchronous`]: begin, load, apply, commit. Everything else is provided. What each method must
//! do, so that the promises hold, is said on the method, and checked by the conformance kit.

pub mod asynchronous;

use core::convert::Infallible;
use core::ops::{Deref, DerefMut};

use thiserror::Error;

use crate::boundary::{Batch, Decision, Query, Rows, Transition};
use crate::table::Key;
use crate::time::Millis;

/// How often a driver runs a transition again, in a transaction of its own, after another one
/// changed what it had read.
pub const CONFLICT_TRIES: u32 = 32;

/// Answers questions about one consistent state of the tables.
pub trait Load {
    /// What can go wrong in the store.
    type Error: core::error::Error + 'static;

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
    fn load(&mut self, query: &Query) -> Result<Rows, Self::Error>;
}

/// Tables within an open transaction, whoever will commit it.
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
    ///   written, and its key is returned.
    /// - All changes are written, or the transaction cannot be committed.
    /// - Nothing is visible to others before the commit, and after it either everything or nothing
    ///   is.
    /// - A row is written with the revision of [`Expect::written`](crate::Expect::written).
    fn apply(&mut self, batch: &Batch) -> Result<Applied, Self::Error>;

    /// Runs a transition in this transaction. Nothing counts before its owner has committed it.
    ///
    /// # Errors
    ///
    /// [`RunError::Refused`] by the rules, which leaves the transaction as it was;
    /// [`RunError::Conflict`] if another transaction changed what was read, and
    /// [`RunError::Store`]: roll back, and start again.
    fn run<T: Transition>(
        &mut self,
        transition: T,
        now: Millis,
    ) -> Result<T::Outcome, RunError<Self::Error, T::Refusal>> {
        self.step(&transition, now).map(|step| step.outcome)
    }

    /// Loads what a transition asks for, lets it decide, and applies its batch: [`Tables::run`],
    /// which also says whether there was one. An adapter may do it in a way of its own, if it has
    /// to read again nothing that it has just loaded.
    ///
    /// # Errors
    ///
    /// As [`Tables::run`].
    fn step<T: Transition>(&mut self, transition: &T, now: Millis) -> Stepped<T, Self::Error> {
        let rows = self.load(&transition.query(now)).map_err(RunError::Store)?;
        let Decision { batch, outcome } =
            transition.decide(now, &rows).map_err(RunError::Refused)?;
        if batch.is_empty() {
            return Ok(Step { outcome, wrote: false });
        }
        match self.apply(&batch).map_err(RunError::Store)? {
            Applied::Written => Ok(Step { outcome, wrote: true }),
            Applied::Conflict(key) => Err(RunError::Conflict(key)),
        }
    }
}

/// What [`Tables::step`] returns.
pub type Stepped<T, E> =
    Result<Step<<T as Transition>::Outcome>, RunError<E, <T as Transition>::Refusal>>;

/// A transition that came to its end in a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step<O> {
    /// Its outcome.
    pub outcome: O,
    /// Whether a batch was written. If not, there is nothing to commit.
    pub wrote: bool,
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

/// A store that can be read.
pub trait Reader {
    /// What can go wrong in the store.
    type Error: core::error::Error + 'static;
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
    /// Nobody notices: an answer, also one after [`End::RollBack`], is given when what it was found
    /// in is committed.
    ///
    /// # Errors
    ///
    /// [`RunError::Store`] if there is no transaction, [`RunError::Unknown`] if the commit failed.
    fn transact<R>(
        &self,
        mut work: impl FnMut(&mut Self::Tx<'_>) -> End<R>,
    ) -> Result<R, RunError<Self::Error, Infallible>> {
        let mut tx = self.begin().map_err(RunError::Store)?;
        match work(&mut tx) {
            End::Commit(answer) => tx.commit().map(|()| answer).map_err(RunError::Unknown),
            End::RollBack(answer) => Ok(answer),
        }
    }

    /// Runs one transition in a transaction of its own, and commits it if it changes something.
    /// After a conflict it is run again.
    ///
    /// # Errors
    ///
    /// [`RunError`]; only after [`RunError::Unknown`] may anything have changed. To do the same
    /// again is always safe.
    fn run<T: Transition>(
        &self,
        transition: T,
        now: Millis,
    ) -> Result<T::Outcome, RunError<Self::Error, T::Refusal>> {
        without_conflict(self, |tx| match tx.step(&transition, now) {
            Ok(Step { outcome, wrote: true }) => End::Commit(Ok(outcome)),
            Ok(Step { outcome, wrote: false }) => End::RollBack(Ok(outcome)),
            Err(error) => End::RollBack(Err(error)),
        })
    }

    /// Runs `work` in a transaction of its own and commits it, if it returns `Ok`: transitions and
    /// the user's own rows in one commit. An error or a panic in `work` rolls everything back.
    /// After a conflict, or as [`Store::transact`] says, `work` is run again from the beginning, so
    /// it must not do anything outside of the transaction that may not be done twice.
    ///
    /// # Errors
    ///
    /// [`RunError::Refused`] with the error of `work`; otherwise as [`Store::run`].
    fn write<R, E>(
        &self,
        now: Millis,
        mut work: impl FnMut(&mut Writing<'_, Self::Tx<'_>>) -> Result<R, E>,
    ) -> Result<R, RunError<Self::Error, E>> {
        without_conflict(self, |tx| {
            let mut writing = Writing { tx, now, conflict: None };
            let result = work(&mut writing);
            match (writing.conflict, result) {
                (None, Ok(value)) => End::Commit(Ok(value)),
                (None, Err(error)) => End::RollBack(Err(RunError::Refused(error))),
                (Some(key), _) => End::RollBack(Err(RunError::Conflict(key))),
            }
        })
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

/// Runs `work` again, as often as it makes sense, after a conflict.
fn without_conflict<S: Store + ?Sized, R, E>(
    store: &S,
    mut work: impl FnMut(&mut S::Tx<'_>) -> End<Result<R, RunError<S::Error, E>>>,
) -> Result<R, RunError<S::Error, E>> {
    let mut conflicts = 0;
    loop {
        match store.transact(&mut work) {
            Ok(Err(RunError::Conflict(_))) if conflicts < CONFLICT_TRIES => conflicts += 1,
            Ok(answer) => return answer,
            Err(error) => return Err(error.widened()),
        }
    }
}

/// A transaction of [`Store::write`]. It derefs to the adapter's transaction, which gives access to
/// the user's own tables.
#[derive(Debug)]
pub struct Writing<'t, X> {
    tx: &'t mut X,
    now: Millis,
    conflict: Option<Key>,
}

impl<X: Tables> Writing<'_, X> {
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
        let result = self.tx.run(transition, self.now);
        if let Err(RunError::Conflict(key)) = &result {
            self.conflict = Some(key.clone());
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
        self.tx
    }
}

/// Whether a batch was written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Applied {
    /// All of it.
    Written,
    /// Nothing, since the row with this key is not what the batch expects.
    Conflict(Key),
}

/// Why a transition did not come to its end. `E` is the store's error, `R` the refusal.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RunError<E, R> {
    /// The rules do not allow it. Nothing was changed.
    #[error("{0}")]
    Refused(R),
    /// Another transaction has changed this row since it was read. Nothing was changed: roll back
    /// and run it again.
    #[error("another transaction has changed {0} in the meantime; roll back and run it again")]
    Conflict(Key),
    /// The store failed before the commit. Nothing was changed: run it again when the store is
    /// well.
    #[error("the store failed before the commit, nothing was changed: {0}")]
    Store(#[source] E),
    /// The commit failed, and nobody knows whether it took: run the same again, it will find out.
    #[error("the commit failed and may have taken or not; run the same again to find out: {0}")]
    Unknown(#[source] E),
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
