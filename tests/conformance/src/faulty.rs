//! A store that wraps another one and strikes at the points of a [`Plan`]. It sits between the
//! driver and the adapter, so the adapter sees nothing but calls that it must be able to bear.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;
use twobox::{
    Applied, Batch, Change, Expect, Key, LaneRow, Load, Query, Reader, Record, Rows, Seen, Store,
    StoreError, Stored, Tables, Transaction,
};

use crate::failure::short;
use crate::fault::{ApplyFault, CommitFault, LoadFault, Plan};
use crate::harness::{ErrorOf, Harness, TxOf};

/// A store that fails where the plan says.
pub struct Faulty<H> {
    pub(crate) harness: H,
    pub(crate) plan: Arc<Plan>,
}

/// What such a store reports.
#[derive(Debug, Error)]
pub enum FaultError<E: fmt::Debug + fmt::Display> {
    /// The program is dead: whoever sees this must open the store again.
    #[error("the program died")]
    Crash,
    /// An error that the plan asked for.
    #[error("an injected error")]
    Injected,
    /// The wrapped store broke its contract.
    #[error("{0}")]
    Contract(String),
    /// An error of the wrapped store, which nobody asked for, and in what.
    #[error("{0}: {1}")]
    Store(String, E),
}

impl<E: fmt::Debug + fmt::Display> FaultError<E> {
    /// An error of the wrapped store in this step.
    pub(crate) fn of(step: &str) -> impl FnOnce(E) -> Self {
        move |error| Self::Store(step.to_string(), error)
    }

    /// An error of the wrapped store when it was asked this.
    pub(crate) fn of_load(query: &Query) -> impl FnOnce(E) -> Self {
        move |error| Self::Store(short(query), error)
    }
}

impl<E: StoreError> StoreError for FaultError<E> {
    fn is_conflict(&self) -> bool {
        if let Self::Store(_, error) = self { error.is_conflict() } else { false }
    }
}

impl<E: fmt::Debug + fmt::Display> From<LoadFault> for FaultError<E> {
    fn from(fault: LoadFault) -> Self {
        match fault {
            LoadFault::Crash => Self::Crash,
            LoadFault::Fails => Self::Injected,
        }
    }
}

/// A transaction or a view of such a store.
pub struct FaultyTables<'p, X> {
    pub(crate) inner: X,
    pub(crate) plan: &'p Plan,
    /// Whether it was asked anything. What is written before that is only assumed to fit, so that
    /// a conflict has a reason.
    pub(crate) looked: bool,
}

impl<H: Harness> Faulty<H> {
    /// The store without faults.
    pub(crate) fn inner(&self) -> &H::Store {
        self.harness.store()
    }
}

impl<H: Harness> Reader for Faulty<H> {
    type Error = FaultError<ErrorOf<H>>;
    type View<'a> = FaultyTables<'a, <H::Store as Reader>::View<'a>>;

    fn view(&self) -> Result<Self::View<'_>, Self::Error> {
        let inner = self.inner().view().map_err(FaultError::of("view"))?;
        Ok(FaultyTables { inner, plan: &self.plan, looked: false })
    }
}

impl<H: Harness> Store for Faulty<H> {
    type Tx<'a> = FaultyTables<'a, TxOf<'a, H>>;

    fn begin(&self) -> Result<Self::Tx<'_>, Self::Error> {
        let inner = self.inner().begin().map_err(FaultError::of("begin"))?;
        Ok(FaultyTables { inner, plan: &self.plan, looked: false })
    }
}

impl<X: Load> Load for FaultyTables<'_, X> {
    type Error = FaultError<X::Error>;

    fn load(&mut self, query: &Query) -> Result<Rows, Self::Error> {
        self.looked = true;
        match self.plan.load() {
            None => self.inner.load(query).map_err(FaultError::of_load(query)),
            Some(fault) => Err(fault.into()),
        }
    }
}

impl<X: Tables> Tables for FaultyTables<'_, X> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, Self::Error> {
        match self.plan.apply() {
            None => self.inner.apply(batch).map_err(FaultError::of("apply")),
            Some(fault) => self.strike(fault, batch),
        }
    }

    fn apply_seen(&mut self, batch: &Batch, seen: &Seen<'_>) -> Result<Applied, Self::Error> {
        match self.plan.apply() {
            None => self.inner.apply_seen(batch, seen).map_err(FaultError::of("apply")),
            Some(fault) => self.strike(fault, batch),
        }
    }
}

impl<X: Tables> FaultyTables<'_, X> {
    fn strike(
        &mut self,
        fault: ApplyFault,
        batch: &Batch,
    ) -> Result<Applied, FaultError<X::Error>> {
        match fault {
            ApplyFault::Conflict => Ok(reported(batch)),
            ApplyFault::FailsPartWay => {
                match self.inner.apply(&half(batch)?).map_err(FaultError::of("apply"))? {
                    Applied::Written => Err(FaultError::Injected),
                    Applied::Conflict(key) if !self.looked => Ok(Applied::Conflict(key)),
                    Applied::Conflict(key) => Err(without_reason(key.as_ref())),
                }
            }
            // The rival writes through the same transaction, which every store allows, and is
            // rolled back with it.
            ApplyFault::RivalWrites => {
                let Some(change) = batch.changes().first() else { return Ok(Applied::Written) };
                let key = change.key();
                let query = Query::rows([key]);
                let there = self.inner.load(&query).map_err(FaultError::of_load(&query))?;
                let Some(rival) = rival_of(change, there.rows.first())? else {
                    return self.inner.apply(batch).map_err(FaultError::of("apply"));
                };
                let rival = self.inner.apply(&rival).map_err(FaultError::of("apply"))?;
                if let Applied::Conflict(key) = rival {
                    return Err(without_reason(key.as_ref()));
                }
                after_rival(change, self.looked, self.inner.apply(batch))
            }
        }
    }
}

/// A conflict that is reported although no row has changed.
pub(crate) fn reported(batch: &Batch) -> Applied {
    batch.changes().first().map_or(Applied::Written, |change| Applied::Conflict(Some(change.key())))
}

/// The first half of a batch.
pub(crate) fn half<E: fmt::Debug + fmt::Display>(batch: &Batch) -> Result<Batch, FaultError<E>> {
    let changes = batch.changes();
    let half = changes[..changes.len().div_ceil(2)].to_vec();
    Batch::of(half).map_err(|error| FaultError::Contract(error.to_string()))
}

/// What a rival writes to the row of a change, so that its guard must not hold; `None` if there is
/// nothing to write.
pub(crate) fn rival_of<E: fmt::Debug + fmt::Display>(
    change: &Change,
    there: Option<&Stored>,
) -> Result<Option<Batch>, FaultError<E>> {
    let rival = match (there, change) {
        // An edit of a lane is guarded by its token: the rival has claimed it.
        (Some(Stored { record: Record::Lane(key, row), revision }), Change::Lane { .. }) => {
            let row = LaneRow { token: row.token + 1, ..row.clone() };
            Some((Expect::Revision(*revision), Record::Lane(key.clone(), row)))
        }
        (Some(Stored { record, revision }), _) => {
            Some((Expect::Revision(*revision), record.clone()))
        }
        (None, Change::Put { record, .. }) => Some((Expect::Absent, record.clone())),
        (None, Change::Delete { .. } | Change::Lane { .. }) => None,
    };
    let put = |(expect, record)| Batch::of(vec![Change::Put { expect, record }]);
    rival.map(put).transpose().map_err(|error| FaultError::Contract(error.to_string()))
}

/// What became of a batch whose first row a rival has written.
pub(crate) fn after_rival<E: StoreError>(
    change: &Change,
    looked: bool,
    applied: Result<Applied, E>,
) -> Result<Applied, FaultError<E>> {
    let rival = change.key();
    match applied.map_err(FaultError::of("apply"))? {
        Applied::Conflict(Some(key)) if looked && key != rival => Err(FaultError::Contract(
            format!("a rival has written {rival}, but the store reports a conflict at {key}"),
        )),
        Applied::Conflict(key) => Ok(Applied::Conflict(key)),
        Applied::Written => Err(FaultError::Contract(format!(
            "a rival has written {rival} since it was read, but the store has not checked the \
             guard and wrote over it"
        ))),
    }
}

pub(crate) fn without_reason<E: fmt::Debug + fmt::Display>(key: Option<&Key>) -> FaultError<E> {
    let at = key.map_or_else(String::new, |key| format!(" at {key}"));
    FaultError::Contract(format!(
        "the store reports a conflict{at}, although the rows are as the batch expects"
    ))
}

impl<X: Transaction> Transaction for FaultyTables<'_, X> {
    fn commit(self) -> Result<(), Self::Error> {
        let fault = self.plan.commit();
        if fault == Some(CommitFault::DidNotTake) {
            return Err(FaultError::Injected);
        }
        self.inner.commit().map_err(FaultError::of("commit"))?;
        match fault {
            None => Ok(()),
            Some(CommitFault::DidNotTake | CommitFault::TookButFailed) => Err(FaultError::Injected),
            Some(CommitFault::CrashAfter) => Err(FaultError::Crash),
        }
    }
}
