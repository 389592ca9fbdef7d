//! A sync store in an async program. Each transaction lives on a thread of the runtime's blocking
//! pool, and is sent what to do.
//!
//! What a store promises stays as it is: the same calls reach it in the same order, and a
//! transaction that nobody holds any more is rolled back, also when a future is dropped between two
//! of them.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use thiserror::Error;
use tokio::sync::{RwLock, oneshot};
use tokio::task::spawn_blocking;
use twobox::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction,
};
use twobox::{
    Applied, Batch, End, Key, Load, Query, Reader, Rows, RunError, Store, StoreError, Tables,
    Transaction,
};

/// A sync store, such as the one on redb, as an async one. Its clones are one store: they begin one
/// transaction at a time, and the next one waits without occupying a thread. It works only within a
/// tokio runtime.
///
/// Tasks that run a transition at the same time, such as placing an order, share a commit if the
/// store lets callers do so, as the one on redb does.
///
/// For rows of your own in the same commit, use the store itself, with [`Blocking::call`].
///
/// ```
/// use twobox::store::asynchronous::AsyncStore;
/// use twobox::{Fingerprint, Millis, Register, Registered, Request, Store};
/// use twobox_memory::MemoryStore;
/// use twobox_tokio::Blocking;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = Blocking::new(MemoryStore::new());
/// let request = Request::new("customer-7", "req-001", Fingerprint::of([("item", "notebook")]))?;
/// assert_eq!(store.run(Register::new(&request), Millis::new(1_000)).await?, Registered::New);
///
/// let again = request.clone();
/// let registered = store.call(move |store| Store::run(store, Register::new(&again), Millis::new(2_000))).await??;
/// assert_eq!(registered, Registered::Open);
/// # Ok(())
/// # }
/// ```
pub struct Blocking<S> {
    store: Arc<S>,
    /// Held by a transaction that is open; shared by those that begin and end in one call.
    turn: Arc<RwLock<()>>,
}

impl<S> Blocking<S> {
    /// This store, for async programs.
    #[must_use]
    pub fn new(store: S) -> Self {
        Arc::new(store).into()
    }

    /// The store itself. Its calls block; see [`Blocking::call`].
    #[must_use]
    pub fn store(&self) -> &Arc<S> {
        &self.store
    }
}

impl<S: Send + Sync + 'static> Blocking<S> {
    /// Runs `work` with the store on a thread that may block. It runs to its end even if the future
    /// is dropped.
    ///
    /// Calls run side by side, so they share a commit if the store lets callers do so, as the one
    /// on redb does.
    ///
    /// # Errors
    ///
    /// [`ThreadEnded`] if it panicked, or the runtime shuts down.
    pub async fn call<R: Send + 'static>(
        &self,
        work: impl FnOnce(&S) -> R + Send + 'static,
    ) -> Result<R, ThreadEnded> {
        let store = self.store.clone();
        spawn_blocking(move || work(&store)).await.map_err(|_| ThreadEnded)
    }
}

/// A store that others have as well, and use with its own blocking calls.
impl<S> From<Arc<S>> for Blocking<S> {
    fn from(store: Arc<S>) -> Self {
        Self { store, turn: Arc::default() }
    }
}

impl<S> Clone for Blocking<S> {
    fn clone(&self) -> Self {
        Self { store: self.store.clone(), turn: self.turn.clone() }
    }
}

impl<S> fmt::Debug for Blocking<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocking").finish_non_exhaustive()
    }
}

/// The thread that worked on a store has ended before it answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "the thread that worked on the store has ended before it answered: it panicked, or the runtime shuts down; do the same again"
)]
pub struct ThreadEnded;

/// What can go wrong in a store on another thread.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BlockingError<E> {
    /// The store's own error.
    #[error("{0}")]
    Store(#[source] E),
    /// Nothing more is heard of the transaction. If it was not told to commit, it is rolled back.
    #[error(transparent)]
    ThreadEnded(#[from] ThreadEnded),
}

impl<E: StoreError> StoreError for BlockingError<E> {
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Store(error) if error.is_conflict())
    }
}

type Answer<T, E> = oneshot::Sender<Result<T, E>>;

/// What a store says of a commit.
type Ended<E> = Result<(), RunError<E, Infallible>>;

/// What a thread is told to do with its view or transaction.
enum Command<E> {
    Load(Query, Answer<Rows, E>),
    Apply(Batch, Answer<Applied, E>),
    ApplyThenLoad(Batch, Query, Answer<Result<Rows, Option<Key>>, E>),
    ApplyAndCommit(Batch, Answer<(), RunError<E, Infallible>>),
    Commit(Answer<(), E>),
}

impl<E: StoreError> Command<E> {
    /// Nothing is done of it.
    fn fail(self, error: E) {
        match self {
            Self::Load(_, answer) => drop(answer.send(Err(error))),
            Self::Apply(_, answer) => drop(answer.send(Err(error))),
            Self::ApplyThenLoad(_, _, answer) => drop(answer.send(Err(error))),
            Self::ApplyAndCommit(_, answer) => drop(answer.send(Err(RunError::of(error)))),
            Self::Commit(answer) => drop(answer.send(Err(error))),
        }
    }

    /// Does it in a transaction, which is over with `None`. Whoever does not wait for the answer
    /// any more is not missed.
    fn run<X: Transaction<Error = E>>(self, mut tx: X) -> Option<X> {
        match self {
            Self::Load(query, answer) => drop(answer.send(tx.load(&query))),
            Self::Apply(batch, answer) => drop(answer.send(tx.apply(&batch))),
            Self::ApplyThenLoad(batch, query, answer) => {
                let rows = match tx.apply(&batch) {
                    Ok(Applied::Written) => tx.load(&query).map(Ok),
                    Ok(Applied::Conflict(key)) => Ok(Err(key)),
                    Err(error) => Err(error),
                };
                drop(answer.send(rows));
            }
            Self::ApplyAndCommit(batch, answer) => {
                let ended = match applied(&mut tx, &batch) {
                    Ok(()) => tx.commit().map_err(RunError::of_commit),
                    Err(error) => Err(error),
                };
                drop(answer.send(ended));
                return None;
            }
            Self::Commit(answer) => {
                drop(answer.send(tx.commit()));
                return None;
            }
        }
        Some(tx)
    }
}

fn applied<X: Tables>(tx: &mut X, batch: &Batch) -> Ended<X::Error> {
    match tx.apply(batch).map_err(RunError::of)? {
        Applied::Written => Ok(()),
        Applied::Conflict(key) => Err(RunError::Conflict(key)),
    }
}

/// The way to a thread that holds a view or a transaction. When it is dropped, the thread drops
/// that.
struct Remote<E>(Sender<Command<E>>);

impl<E> Remote<E> {
    /// Asks, and gives the thread's answer; none if it has ended.
    async fn ask<T, F>(
        &self,
        command: impl FnOnce(Answer<T, F>) -> Command<E>,
    ) -> Result<Result<T, F>, ThreadEnded> {
        let (sender, answer) = oneshot::channel();
        // If the thread has ended, so must the way to the answer, which an error would hold.
        drop(self.0.send(command(sender)));
        answer.await.map_err(|_| ThreadEnded)
    }

    async fn load(&self, query: &Query) -> Result<Rows, BlockingError<E>> {
        told(self.ask(|answer| Command::Load(query.clone(), answer)).await)
    }
}

fn told<T, E>(answer: Result<Result<T, E>, ThreadEnded>) -> Result<T, BlockingError<E>> {
    answer?.map_err(BlockingError::Store)
}

/// How a commit ended. If the thread has ended before it said so, nobody knows whether it took.
fn ended<E>(answer: Result<Ended<E>, ThreadEnded>) -> Ended<BlockingError<E>> {
    match answer {
        Ok(Ok(())) => Ok(()),
        Ok(Err(RunError::Conflict(key))) => Err(RunError::Conflict(key)),
        Ok(Err(RunError::Store(error))) => Err(RunError::Store(BlockingError::Store(error))),
        Ok(Err(RunError::Unknown(error))) => Err(RunError::Unknown(BlockingError::Store(error))),
        Ok(Err(RunError::Refused(never))) => match never {},
        Err(ended) => Err(RunError::Unknown(ended.into())),
    }
}

/// A consistent state of a [`Blocking`] store.
pub struct BlockingView<E>(Remote<E>);

/// A transaction of a [`Blocking`] store.
pub struct BlockingTransaction<E>(Remote<E>);

impl<S> AsyncReader for Blocking<S>
where
    S: Reader<Error: Send> + Send + Sync + 'static,
{
    type Error = BlockingError<S::Error>;
    type View<'a> = BlockingView<S::Error>;

    async fn view(&self) -> Result<BlockingView<S::Error>, Self::Error> {
        let store = self.store.clone();
        let (commands, commanded) = channel();
        let (begun, answer) = oneshot::channel();
        spawn_blocking(move || {
            let mut view = match store.view() {
                Ok(view) => view,
                Err(error) => return drop(begun.send(Err(error))),
            };
            // If nobody waits for it any more, nothing is asked of it either.
            let _opened = begun.send(Ok(()));
            while let Ok(Command::Load(query, answer)) = commanded.recv() {
                drop(answer.send(view.load(&query)));
            }
        });
        told(answer.await.map_err(|_| ThreadEnded))?;
        Ok(BlockingView(Remote(commands)))
    }

    async fn load_once(&self, query: &Query) -> Result<Rows, Self::Error> {
        let query = query.clone();
        told(self.call(move |store| store.view()?.load(&query)).await)
    }
}

impl<S> AsyncStore for Blocking<S>
where
    S: Store<Error: Send> + Send + Sync + 'static,
{
    type Tx<'a> = BlockingTransaction<S::Error>;

    /// One trip to a thread instead of three, and it shares its commit.
    const WRITES_FIRST: bool = true;

    /// What goes wrong as it begins is told by what is asked first.
    async fn begin(&self) -> Result<BlockingTransaction<S::Error>, Self::Error> {
        let turn = self.turn.clone().write_owned().await;
        let store = self.store.clone();
        let (commands, commanded) = channel::<Command<S::Error>>();
        spawn_blocking(move || {
            // The next transaction has to wait until this one is dropped, wherever its future is by
            // then.
            let _turn = turn;
            let mut tx = match store.begin() {
                Ok(tx) => tx,
                Err(error) => {
                    if let Ok(command) = commanded.recv() {
                        command.fail(error);
                    }
                    return;
                }
            };
            while let Ok(command) = commanded.recv() {
                match command.run(tx) {
                    Some(open) => tx = open,
                    None => return,
                }
            }
        });
        Ok(BlockingTransaction(Remote(commands)))
    }

    /// With those of other tasks in one commit, where the store lets callers share one.
    async fn autocommit(&self, batch: &Batch) -> Ended<Self::Error> {
        // It waits for a transaction that is open without a thread, and not for others of its kind.
        let turn = self.turn.clone().read_owned().await;
        let batch = batch.clone();
        let work = move |store: &S| {
            let _turn = turn;
            let work = |tx: &mut S::Tx<'_>| match applied(tx, &batch) {
                Ok(()) => End::Commit(Ok(())),
                Err(error) => End::RollBack(Err(error)),
            };
            store.transact(work).and_then(|ended| ended)
        };
        ended(self.call(work).await)
    }
}

impl<E: StoreError + Send> AsyncLoad for BlockingView<E> {
    type Error = BlockingError<E>;

    async fn load(&mut self, query: &Query) -> Result<Rows, Self::Error> {
        self.0.load(query).await
    }
}

impl<E: StoreError + Send> AsyncLoad for BlockingTransaction<E> {
    type Error = BlockingError<E>;

    async fn load(&mut self, query: &Query) -> Result<Rows, Self::Error> {
        self.0.load(query).await
    }
}

impl<E: StoreError + Send> AsyncTables for BlockingTransaction<E> {
    async fn apply(&mut self, batch: &Batch) -> Result<Applied, Self::Error> {
        told(self.0.ask(|answer| Command::Apply(batch.clone(), answer)).await)
    }

    async fn apply_then_load(
        &mut self,
        batch: &Batch,
        query: &Query,
    ) -> Result<Result<Rows, Option<Key>>, Self::Error> {
        let both = |answer| Command::ApplyThenLoad(batch.clone(), query.clone(), answer);
        told(self.0.ask(both).await)
    }
}

impl<E: StoreError + Send> AsyncTransaction for BlockingTransaction<E> {
    async fn commit(self) -> Result<(), Self::Error> {
        told(self.0.ask(Command::Commit).await)
    }

    async fn apply_and_commit(self, batch: &Batch) -> Ended<Self::Error> {
        ended(self.0.ask(|answer| Command::ApplyAndCommit(batch.clone(), answer)).await)
    }
}

impl<E> fmt::Debug for BlockingView<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockingView").finish_non_exhaustive()
    }
}

impl<E> fmt::Debug for BlockingTransaction<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockingTransaction").finish_non_exhaustive()
    }
}
