//! The async twins of the store traits, for stores that are reached over a network.
//!
//! They differ from the sync ones in nothing but that each step may wait. A future may be dropped
//! at any await: what was not committed is then rolled back, as if the program had died there.

use core::future::Future;
use core::ops::{Deref, DerefMut};

use super::{Applied, CONFLICT_TRIES, RunError};
use crate::boundary::{Batch, Query, Rows, Transition};
use crate::table::Key;
use crate::time::Millis;

/// As [`Load`](super::Load).
pub trait AsyncLoad: Send {
    /// What can go wrong in the store.
    type Error: core::error::Error + Send + 'static;

    /// As [`Load::load`](super::Load::load).
    fn load(&mut self, query: &Query) -> impl Future<Output = Result<Rows, Self::Error>> + Send;
}

/// As [`Tables`](super::Tables).
pub trait AsyncTables: AsyncLoad {
    /// As [`Tables::apply`](super::Tables::apply).
    fn apply(&mut self, batch: &Batch)
    -> impl Future<Output = Result<Applied, Self::Error>> + Send;

    /// As [`Tables::run`](super::Tables::run).
    fn run<T>(
        &mut self,
        transition: T,
        now: Millis,
    ) -> impl Future<Output = Result<T::Outcome, RunError<Self::Error, T::Refusal>>> + Send
    where
        T: Transition<Outcome: Send, Refusal: Send> + Send + Sync,
    {
        async move { step(self, &transition, now).await.map(|(outcome, _)| outcome) }
    }
}

/// As [`Transaction`](super::Transaction): to drop it is to roll it back.
pub trait AsyncTransaction: AsyncTables {
    /// As [`Transaction::commit`](super::Transaction::commit). If the future is dropped, the commit
    /// has taken or it has not.
    fn commit(self) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// As [`Reader`](super::Reader).
pub trait AsyncReader: Sync {
    /// What can go wrong in the store.
    type Error: core::error::Error + Send + 'static;
    /// A consistent state of the tables.
    type View<'a>: AsyncLoad<Error = Self::Error>
    where
        Self: 'a;

    /// As [`Reader::view`](super::Reader::view).
    fn view(&self) -> impl Future<Output = Result<Self::View<'_>, Self::Error>> + Send;
}

/// As [`Store`](super::Store).
pub trait AsyncStore: AsyncReader {
    /// A transaction of the store.
    type Tx<'a>: AsyncTransaction<Error = Self::Error>
    where
        Self: 'a;

    /// As [`Store::begin`](super::Store::begin).
    fn begin(&self) -> impl Future<Output = Result<Self::Tx<'_>, Self::Error>> + Send;

    /// As [`Store::run`](super::Store::run).
    fn run<T>(
        &self,
        transition: T,
        now: Millis,
    ) -> impl Future<Output = Result<T::Outcome, RunError<Self::Error, T::Refusal>>> + Send
    where
        T: Transition<Outcome: Send, Refusal: Send> + Send + Sync,
    {
        async move {
            let mut conflicts = 0;
            loop {
                let mut tx = self.begin().await.map_err(RunError::Store)?;
                match step(&mut tx, &transition, now).await {
                    Ok((outcome, false)) => return Ok(outcome),
                    Ok((outcome, true)) => {
                        return tx.commit().await.map(|()| outcome).map_err(RunError::Unknown);
                    }
                    Err(RunError::Conflict(_)) if conflicts < CONFLICT_TRIES => conflicts += 1,
                    Err(error) => return Err(error),
                }
            }
        }
    }

    /// As [`Store::write`](super::Store::write).
    ///
    /// The future is `Send`, so that a runtime with several threads can spawn it, if `work` owns
    /// what it captures (`async move`, with clones). The compiler does not find that out for one
    /// that captures references; there, [`AsyncStore::begin`], [`AsyncTables::run`] and
    /// [`AsyncTransaction::commit`] do the same, without another try after a conflict.
    #[allow(async_fn_in_trait, reason = "whether the future is Send follows from the closure's")]
    async fn write<R, E>(
        &self,
        now: Millis,
        mut work: impl AsyncFnMut(&mut AsyncWriting<Self::Tx<'_>>) -> Result<R, E>,
    ) -> Result<R, RunError<Self::Error, E>> {
        let mut conflicts = 0;
        loop {
            let mut writing = AsyncWriting {
                tx: self.begin().await.map_err(RunError::Store)?,
                now,
                conflict: None,
            };
            let result = work(&mut writing).await;
            match (writing.conflict, result) {
                (None, Ok(value)) => {
                    return writing.tx.commit().await.map(|()| value).map_err(RunError::Unknown);
                }
                (None, Err(error)) => return Err(RunError::Refused(error)),
                (Some(_), _) if conflicts < CONFLICT_TRIES => conflicts += 1,
                (Some(key), _) => return Err(RunError::Conflict(key)),
            }
        }
    }
}

/// As [`Writing`](super::Writing).
#[derive(Debug)]
pub struct AsyncWriting<X> {
    tx: X,
    now: Millis,
    conflict: Option<Key>,
}

impl<X: AsyncTables> AsyncWriting<X> {
    /// The time that was given to [`AsyncStore::write`].
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
            let result = self.tx.run(transition, self.now).await;
            if let Err(RunError::Conflict(key)) = &result {
                self.conflict = Some(key.clone());
            }
            result
        }
    }
}

impl<X> Deref for AsyncWriting<X> {
    type Target = X;
    fn deref(&self) -> &X {
        &self.tx
    }
}

impl<X> DerefMut for AsyncWriting<X> {
    fn deref_mut(&mut self) -> &mut X {
        &mut self.tx
    }
}

type Stepped<T, E> =
    Result<(<T as Transition>::Outcome, bool), RunError<E, <T as Transition>::Refusal>>;

/// Runs a transition, and says whether a batch was written.
async fn step<X, T>(tables: &mut X, transition: &T, now: Millis) -> Stepped<T, X::Error>
where
    X: AsyncTables + ?Sized,
    T: Transition<Outcome: Send, Refusal: Send> + Sync,
{
    let rows = tables.load(&transition.query(now)).await.map_err(RunError::Store)?;
    let decision = transition.decide(now, &rows).map_err(RunError::Refused)?;
    if decision.batch.is_empty() {
        return Ok((decision.outcome, false));
    }
    match tables.apply(&decision.batch).await.map_err(RunError::Store)? {
        Applied::Written => Ok((decision.outcome, true)),
        Applied::Conflict(key) => Err(RunError::Conflict(key)),
    }
}
