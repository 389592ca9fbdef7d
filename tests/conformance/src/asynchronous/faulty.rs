//! An async store that wraps another one and strikes at the points of a plan, and at the waits: the
//! future of an operation may be dropped at each of them.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::num::NonZeroU16;
use std::pin::pin;
use std::slice;
use std::sync::Arc;
use std::task::Poll;

use twobox::flow::{ExchangeFlow, Exchanged};
use twobox::store::NoCall;
use twobox::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction, Ended, drive, write,
};
use twobox::{
    Applied, Batch, Checked, Claim, Committed, Dump, Handled, Key, Millis, Operated, Query,
    Receipt, Received, RedriveWindow, Register, Registered, Retention, Rows, RunError, Settle,
    Stored, Transition, purge_all_async, redrive_all_async,
};

use super::{AsyncErrorOf, AsyncHarness, AsyncTxOf};
use crate::failure::Failure;
use crate::fault::{ApplyFault, CommitFault, Plan};
use crate::faulty::{
    FaultError, FaultyTables, after_rival, half, reported, rival_of, without_reason,
};
use crate::side::{Consuming, Delivering, Placing, Ran, Side, UserError, walks};

/// An async store that fails where the plan says.
pub struct AsyncFaulty<H, const WRITES_FIRST: bool> {
    harness: H,
    plan: Arc<Plan>,
}

impl<H: AsyncHarness, const W: bool> AsyncFaulty<H, W> {
    fn inner(&self) -> &H::Store {
        self.harness.store()
    }

    /// Waits for an operation, or drops it at a wait.
    fn wait_for<O, R>(
        &self,
        operation: impl Future<Output = Ran<O, AsyncErrorOf<H>, R>>,
    ) -> Ran<O, AsyncErrorOf<H>, R> {
        H::block_on(async {
            let mut operation = pin!(operation);
            poll_fn(|context| {
                let polled = operation.as_mut().poll(context);
                let dropped = polled.is_pending() && self.plan.wait().is_some();
                if dropped {
                    Poll::Ready(Err(RunError::Unknown(FaultError::Injected)))
                } else {
                    polled
                }
            })
            .await
        })
    }
}

impl<H: AsyncHarness, const W: bool> AsyncReader for AsyncFaulty<H, W> {
    type Error = FaultError<AsyncErrorOf<H>>;
    type View<'a> = FaultyTables<'a, <H::Store as AsyncReader>::View<'a>>;

    async fn view(&self) -> Result<Self::View<'_>, Self::Error> {
        let inner = self.inner().view().await.map_err(FaultError::of("view"))?;
        Ok(FaultyTables { inner, plan: &self.plan, looked: false })
    }

    async fn load_once(&self, query: &Query) -> Result<Rows, Self::Error> {
        match self.plan.load() {
            None => self.inner().load_once(query).await.map_err(FaultError::of_load(query)),
            Some(fault) => Err(fault.into()),
        }
    }
}

impl<H: AsyncHarness, const W: bool> AsyncStore for AsyncFaulty<H, W> {
    type Tx<'a> = FaultyTables<'a, AsyncTxOf<'a, H>>;

    const WRITES_FIRST: bool = W;

    async fn begin(&self) -> Result<Self::Tx<'_>, Self::Error> {
        let inner = self.inner().begin().await.map_err(FaultError::of("begin"))?;
        Ok(FaultyTables { inner, plan: &self.plan, looked: false })
    }

    async fn autocommit(&self, batch: &Batch) -> Ended<Self::Error> {
        if let Some(fault) = self.plan.apply() {
            let tx = self.begin().await.map_err(RunError::of)?;
            return tx.strike_and_commit(fault, batch).await;
        }
        let fault = self.plan.commit();
        if fault == Some(CommitFault::DidNotTake) {
            return self.begin().await.map_err(RunError::of)?.apply_and_fail(batch).await;
        }
        self.inner().autocommit(batch).await.map_err(wrapped)?;
        failed_after(fault)
    }
}

impl<X: AsyncLoad> AsyncLoad for FaultyTables<'_, X> {
    type Error = FaultError<X::Error>;

    async fn load(&mut self, query: &Query) -> Result<Rows, Self::Error> {
        self.looked = true;
        match self.plan.load() {
            None => self.inner.load(query).await.map_err(FaultError::of_load(query)),
            Some(fault) => Err(fault.into()),
        }
    }
}

impl<X: AsyncTables> AsyncTables for FaultyTables<'_, X> {
    async fn apply(&mut self, batch: &Batch) -> Result<Applied, Self::Error> {
        match self.plan.apply() {
            None => self.inner.apply(batch).await.map_err(FaultError::of("apply")),
            Some(fault) => self.strike_async(fault, batch).await,
        }
    }

    async fn apply_then_load(
        &mut self,
        batch: &Batch,
        query: &Query,
    ) -> Result<Result<Rows, Option<Key>>, Self::Error> {
        if let Some(fault) = self.plan.apply() {
            return match self.strike_async(fault, batch).await? {
                Applied::Written => self.load(query).await.map(Ok),
                Applied::Conflict(key) => Ok(Err(key)),
            };
        }
        match self.plan.load() {
            None => {
                self.inner.apply_then_load(batch, query).await.map_err(FaultError::of_load(query))
            }
            Some(fault) => match self.inner.apply(batch).await.map_err(FaultError::of("apply"))? {
                Applied::Written => Err(fault.into()),
                Applied::Conflict(key) => Ok(Err(key)),
            },
        }
    }
}

impl<X: AsyncTables> FaultyTables<'_, X> {
    async fn strike_async(
        &mut self,
        fault: ApplyFault,
        batch: &Batch,
    ) -> Result<Applied, FaultError<X::Error>> {
        match fault {
            ApplyFault::Conflict => Ok(reported(batch)),
            ApplyFault::FailsPartWay => {
                match self.inner.apply(&half(batch)?).await.map_err(FaultError::of("apply"))? {
                    Applied::Written => Err(FaultError::Injected),
                    Applied::Conflict(key) if !self.looked => Ok(Applied::Conflict(key)),
                    Applied::Conflict(key) => Err(without_reason(key.as_ref())),
                }
            }
            ApplyFault::RivalWrites => {
                let Some(change) = batch.changes().first() else { return Ok(Applied::Written) };
                let key = Query::rows([change.key()]);
                let there = self.inner.load(&key).await.map_err(FaultError::of_load(&key))?;
                let Some(rival) = rival_of(change, there.rows.first())? else {
                    return self.inner.apply(batch).await.map_err(FaultError::of("apply"));
                };
                let rival = self.inner.apply(&rival).await.map_err(FaultError::of("apply"))?;
                if let Applied::Conflict(key) = rival {
                    return Err(without_reason(key.as_ref()));
                }
                after_rival(change, self.looked, self.inner.apply(batch).await)
            }
        }
    }
}

impl<X: AsyncTransaction> AsyncTransaction for FaultyTables<'_, X> {
    async fn commit(self) -> Result<(), Self::Error> {
        let fault = self.plan.commit();
        if fault == Some(CommitFault::DidNotTake) {
            return Err(FaultError::Injected);
        }
        self.inner.commit().await.map_err(FaultError::of("commit"))?;
        match fault {
            None => Ok(()),
            Some(CommitFault::DidNotTake | CommitFault::TookButFailed) => Err(FaultError::Injected),
            Some(CommitFault::CrashAfter) => Err(FaultError::Crash),
        }
    }

    async fn apply_and_commit(self, batch: &Batch) -> Ended<Self::Error> {
        if let Some(fault) = self.plan.apply() {
            return self.strike_and_commit(fault, batch).await;
        }
        let fault = self.plan.commit();
        if fault == Some(CommitFault::DidNotTake) {
            return self.apply_and_fail(batch).await;
        }
        self.inner.apply_and_commit(batch).await.map_err(wrapped)?;
        failed_after(fault)
    }
}

impl<X: AsyncTransaction> FaultyTables<'_, X> {
    async fn strike_and_commit(
        mut self,
        fault: ApplyFault,
        batch: &Batch,
    ) -> Ended<FaultError<X::Error>> {
        match self.strike_async(fault, batch).await.map_err(RunError::of)? {
            Applied::Written => self.commit().await.map_err(RunError::of_commit),
            Applied::Conflict(key) => Err(RunError::Conflict(key)),
        }
    }

    /// The commit does not take.
    async fn apply_and_fail(mut self, batch: &Batch) -> Ended<FaultError<X::Error>> {
        let applied = self.inner.apply(batch).await;
        match applied.map_err(FaultError::of("apply")).map_err(RunError::of)? {
            Applied::Written => Err(RunError::Unknown(FaultError::Injected)),
            Applied::Conflict(key) => Err(RunError::Conflict(key)),
        }
    }
}

/// How a transaction ended in the wrapped store.
fn wrapped<E: twobox::StoreError>(
    error: RunError<E, Infallible>,
) -> RunError<FaultError<E>, Infallible> {
    match error {
        RunError::Refused(never) => match never {},
        RunError::Conflict(key) => RunError::Conflict(key),
        RunError::Store(error) => RunError::Store(FaultError::of("autocommit")(error)),
        RunError::Unknown(error) => RunError::Unknown(FaultError::of("autocommit")(error)),
    }
}

/// A commit that has taken, whatever is said of it.
fn failed_after<E: twobox::StoreError>(fault: Option<CommitFault>) -> Ended<FaultError<E>> {
    Err(RunError::Unknown(match fault {
        None => return Ok(()),
        Some(CommitFault::DidNotTake | CommitFault::TookButFailed) => FaultError::Injected,
        Some(CommitFault::CrashAfter) => FaultError::Crash,
    }))
}

impl<H: AsyncHarness, const W: bool> Side for AsyncFaulty<H, W> {
    type Error = AsyncErrorOf<H>;

    const OWN_ROWS: bool = H::OWN_ROWS;

    fn open(plan: &Arc<Plan>) -> Self {
        Self { harness: H::block_on(H::open()), plan: Arc::clone(plan) }
    }

    fn crash(self) -> Self {
        Self { harness: H::block_on(self.harness.crash()), plan: self.plan }
    }

    fn run<T>(&self, transition: T, now: Millis) -> Ran<T::Outcome, AsyncErrorOf<H>, T::Refusal>
    where
        T: Transition<Outcome: Send, Refusal: Send> + Send + Sync,
    {
        self.wait_for(AsyncStore::run(self, transition, now))
    }

    fn exchange(
        &self,
        settle: Option<Settle<'_>>,
        claim: Option<Claim<'_>>,
        now: Millis,
    ) -> Ran<Exchanged, AsyncErrorOf<H>, Infallible> {
        self.wait_for(drive(self, ExchangeFlow::new(settle, claim, now, W), NoCall))
    }

    fn place(
        &self,
        placing: &Placing<'_>,
        now: Millis,
    ) -> Ran<(Registered, Committed), AsyncErrorOf<H>, UserError<AsyncErrorOf<H>>> {
        self.wait_for(write(self, now, async |tx| {
            let registered = tx.run(Register::new(placing.request)).await.map_err(UserError::of)?;
            if let Some((key, value)) = placing.own {
                H::put_own_row(&mut tx.inner, key, value).await.map_err(UserError::own)?;
            }
            let committed = tx.run(placing.order).await.map_err(UserError::of)?;
            if placing.fails { Err(UserError::Fails) } else { Ok((registered, committed)) }
        }))
    }

    fn consume(
        &self,
        consuming: &Consuming,
        now: Millis,
    ) -> Ran<(Received, bool), AsyncErrorOf<H>, UserError<AsyncErrorOf<H>>> {
        self.wait_for(write(self, now, async |tx| {
            let received = tx.run(&consuming.receive).await.map_err(UserError::of)?;
            let intend = consuming.intend.as_ref().filter(|_| received == Received::Applied);
            let new = match intend {
                Some(intend) => tx.run(intend).await.map_err(UserError::of)?,
                None => false,
            };
            let fails = consuming.fails && received == Received::Applied;
            if fails { Err(UserError::Fails) } else { Ok((received, new)) }
        }))
    }

    fn deliver(
        &self,
        delivering: &Delivering<'_>,
        now: Millis,
    ) -> Ran<Receipt, AsyncErrorOf<H>, Infallible> {
        let handled = Handled::Effect(delivering.effect.clone());
        let inbox = delivering.inbox(self);
        let messages = slice::from_ref(delivering.message);
        let receipts =
            inbox.receive_async(messages, now, async |_, _| Ok::<_, Infallible>(handled.clone()));
        let mut receipts = self.wait_for(receipts)?;
        match (receipts.pop(), receipts.len()) {
            (Some(receipt), 0) => Ok(receipt),
            (found, more) => {
                let what = format!("P5: {found:?} and {more} more receipts for one message");
                Err(RunError::Store(FaultError::Contract(what)))
            }
        }
    }

    fn purge(
        &self,
        kept: &Checked<Retention>,
        limit: NonZeroU16,
        now: Millis,
    ) -> Ran<usize, AsyncErrorOf<H>, Infallible> {
        self.wait_for(purge_all_async(self, kept, limit, now))
    }

    fn redrive(
        &self,
        window: RedriveWindow,
        now: Millis,
    ) -> Ran<Operated, AsyncErrorOf<H>, Infallible> {
        self.wait_for(redrive_all_async(self, None, window, now))
    }

    fn dump(&self) -> Result<Dump, Failure> {
        H::block_on(async {
            let mut view = self.inner().view().await.map_err(Failure::store)?;
            Dump::of_async(&mut view).await.map_err(Failure::store)
        })
    }

    fn stored(&self) -> Result<Vec<Stored>, Failure> {
        H::block_on(async {
            let mut view = self.inner().view().await.map_err(Failure::store)?;
            let mut rows = Vec::new();
            for walk in walks() {
                rows.extend(view.load(&walk).await.map_err(Failure::load(&walk))?.rows);
            }
            Ok(rows)
        })
    }

    fn own_row(&self, key: &str) -> Result<Option<String>, Failure> {
        H::block_on(async {
            let mut tx = self.inner().begin().await.map_err(Failure::store)?;
            H::own_row(&mut tx, key).await.map_err(Failure::store)
        })
    }
}
