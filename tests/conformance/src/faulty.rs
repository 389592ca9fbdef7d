//! A store that wraps another one and strikes at the points of a [`Plan`]. It sits between the
//! driver and the adapter, so the adapter sees nothing but calls that it must be able to bear.

use std::fmt;
use std::rc::Rc;

use thiserror::Error;
use twobox::{
    Applied, Batch, Change, Expect, Key, Load, Query, Reader, Record, Rows, Store, Stored, Tables,
    Transaction,
};

use crate::fault::{ApplyFault, CommitFault, LoadFault, Plan};
use crate::harness::{ErrorOf, Harness, TxOf};

/// A store that fails where the plan says.
pub(crate) struct Faulty<H> {
    harness: H,
    plan: Rc<Plan>,
}

impl<H: Harness> Faulty<H> {
    pub(crate) const fn new(harness: H, plan: Rc<Plan>) -> Self {
        Self { harness, plan }
    }

    /// The store without faults.
    pub(crate) fn inner(&self) -> &H::Store {
        self.harness.store()
    }

    pub(crate) fn crash(self) -> Self {
        Self { harness: self.harness.crash(), plan: self.plan }
    }
}

/// What such a store reports.
#[derive(Debug, Error)]
pub(crate) enum FaultError<E: fmt::Debug + fmt::Display> {
    /// The program is dead: whoever sees this must open the store again.
    #[error("the program died")]
    Crash,
    /// An error that the plan asked for.
    #[error("an injected error")]
    Injected,
    /// The wrapped store broke its contract.
    #[error("{0}")]
    Contract(String),
    /// An error of the wrapped store, which nobody asked for.
    #[error("{0}")]
    Store(E),
}

/// A transaction or a view of such a store.
pub(crate) struct FaultyTables<'p, X> {
    inner: X,
    plan: &'p Plan,
}

impl<X> FaultyTables<'_, X> {
    pub(crate) fn inner_mut(&mut self) -> &mut X {
        &mut self.inner
    }
}

impl<H: Harness> Reader for Faulty<H> {
    type Error = FaultError<ErrorOf<H>>;
    type View<'a> = FaultyTables<'a, <H::Store as Reader>::View<'a>>;

    fn view(&self) -> Result<Self::View<'_>, Self::Error> {
        Ok(FaultyTables {
            inner: self.inner().view().map_err(FaultError::Store)?,
            plan: &self.plan,
        })
    }
}

impl<H: Harness> Store for Faulty<H> {
    type Tx<'a> = FaultyTables<'a, TxOf<'a, H>>;

    fn begin(&self) -> Result<Self::Tx<'_>, Self::Error> {
        Ok(FaultyTables {
            inner: self.inner().begin().map_err(FaultError::Store)?,
            plan: &self.plan,
        })
    }
}

impl<X: Load> Load for FaultyTables<'_, X> {
    type Error = FaultError<X::Error>;

    fn load(&mut self, query: &Query) -> Result<Rows, Self::Error> {
        match self.plan.load() {
            None => self.inner.load(query).map_err(FaultError::Store),
            Some(LoadFault::Crash) => Err(FaultError::Crash),
            Some(LoadFault::Fails) => Err(FaultError::Injected),
        }
    }
}

impl<X: Tables> Tables for FaultyTables<'_, X> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, Self::Error> {
        match self.plan.apply() {
            None => self.inner.apply(batch).map_err(FaultError::Store),
            Some(ApplyFault::RivalWrites) => self.after_a_rival(batch),
            Some(ApplyFault::Conflict) => match batch.changes().first() {
                Some(change) => Ok(Applied::Conflict(change.key())),
                None => Ok(Applied::Written),
            },
            Some(ApplyFault::FailsPartWay) => {
                let half = batch.changes()[..batch.changes().len().div_ceil(2)].to_vec();
                let half =
                    Batch::of(half).map_err(|error| FaultError::Contract(error.to_string()))?;
                match self.inner.apply(&half).map_err(FaultError::Store)? {
                    Applied::Written => Err(FaultError::Injected),
                    Applied::Conflict(key) => Err(conflict_without_reason(&key)),
                }
            }
        }
    }
}

impl<X: Tables> FaultyTables<'_, X> {
    /// Lets a rival write the first row of the batch, and then applies it: its guard must not hold.
    /// The rival writes through the same transaction, which every store allows, and is rolled back
    /// with it.
    fn after_a_rival(&mut self, batch: &Batch) -> Result<Applied, FaultError<X::Error>> {
        let Some(change) = batch.changes().first() else { return Ok(Applied::Written) };
        let there =
            self.inner.load(&Query::rows([change.key()])).map_err(FaultError::Store)?.into_vec();
        let rival = match (there.into_iter().next(), change) {
            (Some(Stored { record, revision }), _) => {
                Some(Change::Put { expect: Expect::Revision(revision), record })
            }
            (None, Change::Put { record, .. }) => {
                Some(Change::Put { expect: Expect::Absent, record: Record::clone(record) })
            }
            (None, Change::Delete { .. }) => None,
        };
        let rival = Batch::of(rival.into_iter().collect())
            .map_err(|error| FaultError::Contract(error.to_string()))?;
        if let Applied::Conflict(key) = self.inner.apply(&rival).map_err(FaultError::Store)? {
            return Err(conflict_without_reason(&key));
        }
        match self.inner.apply(batch).map_err(FaultError::Store)? {
            Applied::Conflict(key) if key == change.key() => Ok(Applied::Conflict(key)),
            Applied::Conflict(key) => Err(FaultError::Contract(format!(
                "a rival has written {}, but the store reports a conflict at {key}",
                change.key()
            ))),
            Applied::Written => Err(FaultError::Contract(format!(
                "a rival has written {} since it was read, but the store has not checked the guard and wrote over it",
                change.key()
            ))),
        }
    }
}

fn conflict_without_reason<E: fmt::Debug + fmt::Display>(key: &Key) -> FaultError<E> {
    FaultError::Contract(format!(
        "the store reports a conflict at {key}, although the row is as the batch expects"
    ))
}

impl<X: Transaction> Transaction for FaultyTables<'_, X> {
    fn commit(self) -> Result<(), Self::Error> {
        match self.plan.commit() {
            None => self.inner.commit().map_err(FaultError::Store),
            Some(CommitFault::DidNotTake) => Err(FaultError::Injected),
            Some(CommitFault::TookButFailed) => {
                self.inner.commit().map_err(FaultError::Store)?;
                Err(FaultError::Injected)
            }
            Some(CommitFault::CrashAfter) => {
                self.inner.commit().map_err(FaultError::Store)?;
                Err(FaultError::Crash)
            }
        }
    }
}
