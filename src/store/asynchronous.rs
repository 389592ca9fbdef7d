//! The async twins of the store traits, for stores that are reached over a network.
//!
//! They differ from the sync ones in two ways. Each step may wait, and a future may be dropped at
//! any await: what was not committed is then rolled back, as if the program had died there. And
//! what follows a step is said with it, so that a store can send both in one round trip: a write
//! with the commit or the next question ([`AsyncTables::apply_then_load`],
//! [`AsyncTransaction::apply_and_commit`]), or a whole transaction at once
//! ([`AsyncStore::autocommit`]). All of these are provided, and a store that gains nothing
//! implements none of them.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::future::Future;
use core::ops::{Deref, DerefMut};

use super::reading::readings;
use super::{Applied, NoCall, RunError, StoreError, is_conflict};
use crate::boundary::DeadLetter;
use crate::boundary::{Batch, Decision, Query, Rows, Transition};
use crate::event::Body;
use crate::flow::{Ask, Called, Flow, RunFlow, Then, Told, WriteFlow};
use crate::ids::{Consumer, EventId, LaneKey, OrderId, Reason, RequestKey};
use crate::stats::Stats;
use crate::table::{
    EventRow, EventState, InboxRow, Key, LaneRow, OrderRow, RequestRow, Stored, Table,
};
use crate::time::Millis;

macro_rules! async_readings {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),+) -> $answer:ty:
        $query:expr, $read:expr;)+) => {$(
        $(#[$doc])*
        fn $name(
            &mut self,
            $($arg: $type),+
        ) -> impl Future<Output = Result<$answer, Self::Error>> + Send {
            async move {
                let rows = self.load(&$query).await?;
                Ok(($read)(rows))
            }
        }
    )+};
}

/// As [`Load`](super::Load).
pub trait AsyncLoad: Send {
    /// What can go wrong in the store.
    type Error: StoreError + Send;

    /// As [`Load::load`](super::Load::load).
    fn load(&mut self, query: &Query) -> impl Future<Output = Result<Rows, Self::Error>> + Send;

    readings!(async_readings);
}

/// As [`Tables`](super::Tables).
pub trait AsyncTables: AsyncLoad {
    /// As [`Tables::apply`](super::Tables::apply).
    fn apply(&mut self, batch: &Batch)
    -> impl Future<Output = Result<Applied, Self::Error>> + Send;

    /// Writes a batch, and then answers a query, if the guards hold.
    fn apply_then_load(
        &mut self,
        batch: &Batch,
        query: &Query,
    ) -> impl Future<Output = Result<Result<Rows, Option<Key>>, Self::Error>> + Send {
        async move {
            match self.apply(batch).await? {
                Applied::Written => self.load(query).await.map(Ok),
                Applied::Conflict(key) => Ok(Err(key)),
            }
        }
    }

    /// As [`Tables::run`](super::Tables::run).
    fn run<T>(
        &mut self,
        transition: T,
        now: Millis,
    ) -> impl Future<Output = Result<T::Outcome, RunError<Self::Error, T::Refusal>>> + Send
    where
        T: Transition<Outcome: Send, Refusal: Send> + Send + Sync,
    {
        async move {
            let rows = self.load(&transition.query(now)).await.map_err(RunError::of)?;
            let Decision { batch, outcome } =
                transition.decide(now, &rows).map_err(RunError::Refused)?;
            if batch.is_empty() {
                return Ok(outcome);
            }
            match self.apply(&batch).await.map_err(RunError::of)? {
                Applied::Written => Ok(outcome),
                Applied::Conflict(key) => Err(RunError::Conflict(key)),
            }
        }
    }
}

/// As [`Transaction`](crate::Transaction): to drop it is to roll it back.
pub trait AsyncTransaction: AsyncTables + Sized {
    /// As [`Transaction::commit`](crate::Transaction::commit). If the future is dropped, the commit
    /// has taken or it has not.
    fn commit(self) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Writes a batch and commits, if the guards hold; otherwise nothing is written.
    fn apply_and_commit(self, batch: &Batch) -> impl Future<Output = Ended<Self::Error>> + Send {
        async move {
            let mut tx = self;
            match tx.apply(batch).await.map_err(RunError::of)? {
                Applied::Written => tx.commit().await.map_err(RunError::of_commit),
                Applied::Conflict(key) => Err(RunError::Conflict(key)),
            }
        }
    }
}

/// How a transaction ended, as a store says it.
pub type Ended<E> = Result<(), RunError<E, core::convert::Infallible>>;

/// As [`Reader`](super::Reader).
pub trait AsyncReader: Sync {
    /// What can go wrong in the store.
    type Error: StoreError + Send;
    /// A consistent state of the tables.
    type View<'a>: AsyncLoad<Error = Self::Error>
    where
        Self: 'a;

    /// As [`Reader::view`](super::Reader::view).
    fn view(&self) -> impl Future<Output = Result<Self::View<'_>, Self::Error>> + Send;

    /// Answers one query from what is committed.
    fn load_once(&self, query: &Query) -> impl Future<Output = Result<Rows, Self::Error>> + Send {
        async move { self.view().await?.load(query).await }
    }
}

/// As [`Store`](super::Store).
pub trait AsyncStore: AsyncReader {
    /// A transaction of the store.
    type Tx<'a>: AsyncTransaction<Error = Self::Error>
    where
        Self: 'a;

    /// Whether to write first what a transition assumes, and look only if a guard does not hold:
    /// right for a store over a network, where each look costs a round trip.
    const WRITES_FIRST: bool = false;

    /// As [`Store::begin`](super::Store::begin). A store may wait with it until something is asked
    /// in the transaction, to send both at once.
    fn begin(&self) -> impl Future<Output = Result<Self::Tx<'_>, Self::Error>> + Send;

    /// A whole transaction: writes a batch and commits, if the guards hold.
    fn autocommit(&self, batch: &Batch) -> impl Future<Output = Ended<Self::Error>> + Send {
        async move { self.begin().await.map_err(RunError::of)?.apply_and_commit(batch).await }
    }

    /// As [`Store::run`](super::Store::run).
    fn run<T>(
        &self,
        transition: T,
        now: Millis,
    ) -> impl Future<Output = Result<T::Outcome, RunError<Self::Error, T::Refusal>>> + Send
    where
        T: Transition<Outcome: Send, Refusal: Send> + Send + Sync,
    {
        drive(self, RunFlow::new(transition, now, Self::WRITES_FIRST), NoCall)
    }
}

/// As [`Store::write`](super::Store::write), on an async store.
///
/// It is no method of [`AsyncStore`], so that its future is `Send`, and a runtime with several
/// threads can spawn it, for any store, known or not, if `work` owns what it captures
/// (`async move`, with clones). The compiler does not find that out for one that captures
/// references; there, [`AsyncStore::begin`], [`AsyncTables::run`] and
/// [`AsyncTransaction::commit`] do the same, without another try after a conflict.
///
/// # Errors
///
/// As there.
pub async fn write<S, R, E: 'static>(
    store: &S,
    now: Millis,
    work: impl AsyncFnMut(&mut AsyncWriting<'_, S::Tx<'_>>) -> Result<R, E>,
) -> Result<R, RunError<S::Error, E>>
where
    S: AsyncStore + ?Sized,
{
    let mut result = None;
    let call = Work { work, now, result: &mut result };
    drive(store, WriteFlow::default(), call).await.map_err(RunError::widened)?;
    match result {
        Some(result) => result.map_err(RunError::Refused),
        // It was called before the flow came to its end; what else it met, it has said.
        None => Err(RunError::Conflict(None)),
    }
}

/// The user's handlers, as a flow calls them.
pub trait AsyncCall<X> {
    /// Does work number `n` in the transaction.
    #[allow(async_fn_in_trait, reason = "whether the future is Send follows from the handler's")]
    async fn call(&mut self, tx: &mut X, n: usize) -> Called;
}

impl<X> AsyncCall<X> for NoCall {
    async fn call(&mut self, _tx: &mut X, _n: usize) -> Called {
        Called::Done
    }
}

/// The user's work in [`write()`], with what it returned last.
struct Work<'r, F, R, E> {
    work: F,
    now: Millis,
    result: &'r mut Option<Result<R, E>>,
}

impl<X: AsyncLoad, F, R, E: 'static> AsyncCall<X> for Work<'_, F, R, E>
where
    F: AsyncFnMut(&mut AsyncWriting<'_, X>) -> Result<R, E>,
{
    async fn call(&mut self, tx: &mut X, _n: usize) -> Called {
        let mut writing = AsyncWriting { tx, now: self.now, conflict: None };
        let result = (self.work)(&mut writing).await;
        let called = match (writing.conflict, &result) {
            (Some(key), _) => Called::Conflict(key),
            (None, Ok(_)) => Called::Done,
            (None, Err(error)) if is_conflict::<X::Error, E>(error) => Called::Conflict(None),
            (None, Err(_)) => Called::Failed(Reason::new("")),
        };
        *self.result = Some(result);
        called
    }
}

/// As [`Writing`](super::Writing).
#[derive(Debug)]
pub struct AsyncWriting<'t, X> {
    tx: &'t mut X,
    now: Millis,
    conflict: Option<Option<Key>>,
}

impl<'t, X> AsyncWriting<'t, X> {
    pub(crate) fn new(tx: &'t mut X, now: Millis) -> Self {
        Self { tx, now, conflict: None }
    }

    /// The conflict that it has met, with the row if it is known.
    pub(crate) fn conflict(self) -> Option<Option<Key>> {
        self.conflict
    }
}

impl<X: AsyncTables> AsyncWriting<'_, X> {
    /// The time that was given to [`write()`].
    pub fn now(&self) -> Millis {
        self.now
    }

    /// As [`Writing::run`](super::Writing::run).
    ///
    /// # Errors
    ///
    /// As [`Tables::run`](super::Tables::run).
    #[expect(clippy::manual_async_fn, reason = "says that the future is Send, whoever asks")]
    pub fn run<T>(
        &mut self,
        transition: T,
    ) -> impl Future<Output = Result<T::Outcome, RunError<X::Error, T::Refusal>>> + Send
    where
        T: Transition<Outcome: Send, Refusal: Send> + Send + Sync,
    {
        async move {
            let now = self.now;
            AsyncTables::run(self, transition, now).await
        }
    }

    /// Notes a conflict in what the transaction has answered.
    fn noting<T>(&mut self, answer: Result<T, X::Error>) -> Result<T, X::Error> {
        if answer.as_ref().is_err_and(StoreError::is_conflict) {
            self.conflict.get_or_insert(None);
        }
        answer
    }
}

/// As [`Writing`](super::Writing): whatever meets a conflict in it, the transaction is rolled back
/// and run again.
impl<X: AsyncTables> AsyncLoad for AsyncWriting<'_, X> {
    type Error = X::Error;

    async fn load(&mut self, query: &Query) -> Result<Rows, X::Error> {
        let rows = self.tx.load(query).await;
        self.noting(rows)
    }
}

impl<X: AsyncTables> AsyncTables for AsyncWriting<'_, X> {
    async fn apply(&mut self, batch: &Batch) -> Result<Applied, X::Error> {
        let applied = self.tx.apply(batch).await;
        if let Ok(Applied::Conflict(key)) = &applied {
            self.conflict.get_or_insert_with(|| key.clone());
        }
        self.noting(applied)
    }

    async fn apply_then_load(
        &mut self,
        batch: &Batch,
        query: &Query,
    ) -> Result<Result<Rows, Option<Key>>, X::Error> {
        let answer = self.tx.apply_then_load(batch, query).await;
        if let Ok(Err(key)) = &answer {
            self.conflict.get_or_insert_with(|| key.clone());
        }
        self.noting(answer)
    }

    async fn run<T>(
        &mut self,
        transition: T,
        now: Millis,
    ) -> Result<T::Outcome, RunError<X::Error, T::Refusal>>
    where
        T: Transition<Outcome: Send, Refusal: Send> + Send + Sync,
    {
        let result = self.tx.run(transition, now).await;
        if let Err(RunError::Conflict(key)) = &result {
            self.conflict.get_or_insert_with(|| key.clone());
        }
        result
    }
}

impl<X> Deref for AsyncWriting<'_, X> {
    type Target = X;
    fn deref(&self) -> &X {
        self.tx
    }
}

impl<X> DerefMut for AsyncWriting<'_, X> {
    fn deref_mut(&mut self) -> &mut X {
        self.tx
    }
}

type Driven<F, E> = Result<<F as Flow>::Output, RunError<E, <F as Flow>::Refusal>>;

/// Runs a flow to its end, as [`drive`](super::drive) does.
///
/// # Errors
///
/// As there.
pub async fn drive<S, F, C>(store: &S, mut flow: F, mut call: C) -> Driven<F, S::Error>
where
    S: AsyncStore + ?Sized,
    F: Flow,
    C: for<'a> AsyncCall<S::Tx<'a>>,
{
    let mut ask = flow.next(Told::Start);
    loop {
        ask = match ask {
            Ask::Done => return flow.finish().map_err(RunError::stopped),
            Ask::View(query) => {
                let rows = store.load_once(&query).await.map_err(RunError::of)?;
                flow.next(Told::Rows(&rows))
            }
            // Out of a transaction there is nothing else to do but to begin one.
            Ask::Begin
            | Ask::Load(_)
            | Ask::Write(..)
            | Ask::Call(_)
            | Ask::Commit
            | Ask::RollBack => match transaction(store, &mut flow, &mut call).await {
                Ok(()) => flow.next(Told::Ended),
                Err(RunError::Conflict(key)) => {
                    let _rolled_back = flow.next(Told::Conflict(key));
                    flow.next(Told::Ended)
                }
                Err(error) => return Err(error.widened()),
            },
        };
    }
}

/// Runs the part of a flow that is in one transaction. Whatever it returns, the transaction is over.
async fn transaction<S, F, C>(store: &S, flow: &mut F, call: &mut C) -> Ended<S::Error>
where
    S: AsyncStore + ?Sized,
    F: Flow,
    C: for<'a> AsyncCall<S::Tx<'a>>,
{
    let mut ask = flow.next(Told::Begun);
    if let Ask::Write(batch, Then::Commit) = &ask {
        return store.autocommit(batch).await;
    }
    let mut tx = store.begin().await.map_err(RunError::of)?;
    loop {
        ask = match ask {
            Ask::Load(query) | Ask::View(query) => {
                let rows = tx.load(&query).await.map_err(RunError::of)?;
                flow.next(Told::Rows(&rows))
            }
            Ask::Write(batch, Then::Commit) => return tx.apply_and_commit(&batch).await,
            Ask::Write(batch, Then::Load(query)) => {
                match tx.apply_then_load(&batch, &query).await.map_err(RunError::of)? {
                    Ok(rows) => flow.next(Told::Rows(&rows)),
                    Err(key) => return Err(RunError::Conflict(key)),
                }
            }
            Ask::Call(n) => {
                let called = call.call(&mut tx, n).await;
                flow.next(Told::Called(called))
            }
            Ask::Commit => return tx.commit().await.map_err(RunError::of_commit),
            Ask::RollBack | Ask::Begin | Ask::Done => return Ok(()),
        };
    }
}

/// A store behind a reference or an `Arc` is a store.
macro_rules! stores_behind {
    ($($pointer:ty: $($bound:path)|*),+) => {$(
        impl<S: AsyncReader $(+ $bound)*> AsyncReader for $pointer {
            type Error = S::Error;
            type View<'a>
                = S::View<'a>
            where
                Self: 'a;

            fn view(&self) -> impl Future<Output = Result<S::View<'_>, S::Error>> + Send {
                (**self).view()
            }

            fn load_once(
                &self,
                query: &Query,
            ) -> impl Future<Output = Result<Rows, S::Error>> + Send {
                (**self).load_once(query)
            }
        }

        impl<S: AsyncStore $(+ $bound)*> AsyncStore for $pointer {
            type Tx<'a>
                = S::Tx<'a>
            where
                Self: 'a;

            const WRITES_FIRST: bool = S::WRITES_FIRST;

            fn begin(&self) -> impl Future<Output = Result<S::Tx<'_>, S::Error>> + Send {
                (**self).begin()
            }

            fn autocommit(&self, batch: &Batch) -> impl Future<Output = Ended<S::Error>> + Send {
                (**self).autocommit(batch)
            }
        }
    )+};
}

stores_behind!(&S:, Arc<S>: Send);
