//! A sync store in an async program: each transaction lives on a thread of the runtime's blocking
//! pool, and does as it is told.
//!
//! What a store promises stays as it is: the same calls reach it in the same order, and a
//! transaction that nobody holds any more is rolled back, also when a future is dropped between two
//! of them.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Mutex, oneshot};
use tokio::task::spawn_blocking;
use twobox::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction,
};
use twobox::{Applied, Batch, Load, Query, Reader, Rows, Store, Tables, Transaction};

/// A sync store, such as that of redb, as an async one. Its clones are one store: they begin one
/// transaction at a time, and who comes next waits without a thread. Only within a tokio runtime.
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
    turn: Arc<Mutex<()>>,
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
    /// Does something with the store on a thread that may block. It is done to its end even if the
    /// future is dropped.
    ///
    /// Calls run side by side, so tasks that place orders in this way share a commit where the
    /// store lets callers do so, as that on redb does.
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
pub enum BlockingError<E> {
    /// The store's own error.
    #[error("{0}")]
    Store(#[source] E),
    /// Nothing more is heard of the transaction. If it was not told to commit, it is rolled back.
    #[error(transparent)]
    ThreadEnded(#[from] ThreadEnded),
}

type Answer<T, E> = oneshot::Sender<Result<T, E>>;

enum Command<E> {
    Load(Query, Answer<Rows, E>),
    Apply(Batch, Answer<Applied, E>),
    Commit(Answer<(), E>),
}

/// The way to a thread that holds a view or a transaction. When it is dropped, the thread drops
/// that.
struct Remote<E>(UnboundedSender<Command<E>>);

impl<E: Send + 'static> Remote<E> {
    /// Starts `work` on a thread, which says when it has begun and then does as it is told.
    async fn start(
        work: impl FnOnce(Answer<(), E>, UnboundedReceiver<Command<E>>) + Send + 'static,
    ) -> Result<Self, BlockingError<E>> {
        let (commands, told) = unbounded_channel();
        let (begun, answer) = oneshot::channel();
        spawn_blocking(move || work(begun, told));
        heard(answer).await.map(|()| Self(commands))
    }

    async fn ask<T>(
        &self,
        command: impl FnOnce(Answer<T, E>) -> Command<E>,
    ) -> Result<T, BlockingError<E>> {
        let (sender, answer) = oneshot::channel();
        // If the thread has ended, so must the way to the answer, which the error of it holds.
        drop(self.0.send(command(sender)));
        heard(answer).await
    }
}

async fn heard<T, E>(answer: oneshot::Receiver<Result<T, E>>) -> Result<T, BlockingError<E>> {
    match answer.await {
        Ok(answer) => answer.map_err(BlockingError::Store),
        Err(_) => Err(ThreadEnded.into()),
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
        let work = move |begun: Answer<(), S::Error>,
                         mut told: UnboundedReceiver<Command<S::Error>>| {
            let Some(mut view) = begin(store.view(), begun) else { return };
            while let Some(Command::Load(query, answer)) = told.blocking_recv() {
                let _dropped = answer.send(view.load(&query));
            }
        };
        Remote::start(work).await.map(BlockingView)
    }
}

impl<S> AsyncStore for Blocking<S>
where
    S: Store<Error: Send> + Send + Sync + 'static,
{
    type Tx<'a> = BlockingTransaction<S::Error>;

    async fn begin(&self) -> Result<BlockingTransaction<S::Error>, Self::Error> {
        let turn = self.turn.clone().lock_owned().await;
        let store = self.store.clone();
        let work = move |begun: Answer<(), S::Error>,
                         mut told: UnboundedReceiver<Command<S::Error>>| {
            // The next transaction has to wait until this one is dropped, wherever its future is by
            // then.
            let _turn = turn;
            let Some(mut tx) = begin(store.begin(), begun) else { return };
            while let Some(command) = told.blocking_recv() {
                match command {
                    Command::Load(query, answer) => drop(answer.send(tx.load(&query))),
                    Command::Apply(batch, answer) => drop(answer.send(tx.apply(&batch))),
                    Command::Commit(answer) => {
                        let _dropped = answer.send(tx.commit());
                        return;
                    }
                }
            }
        };
        Remote::start(work).await.map(BlockingTransaction)
    }
}

/// Says whether something has begun; `None` if it has not, or nobody waits for it any more.
fn begin<T, E>(result: Result<T, E>, begun: Answer<(), E>) -> Option<T> {
    match result {
        Ok(it) => begun.send(Ok(())).is_ok().then_some(it),
        Err(error) => {
            let _dropped = begun.send(Err(error));
            None
        }
    }
}

impl<E: std::error::Error + Send + 'static> AsyncLoad for BlockingView<E> {
    type Error = BlockingError<E>;

    async fn load(&mut self, query: &Query) -> Result<Rows, Self::Error> {
        self.0.ask(|answer| Command::Load(query.clone(), answer)).await
    }
}

impl<E: std::error::Error + Send + 'static> AsyncLoad for BlockingTransaction<E> {
    type Error = BlockingError<E>;

    async fn load(&mut self, query: &Query) -> Result<Rows, Self::Error> {
        self.0.ask(|answer| Command::Load(query.clone(), answer)).await
    }
}

impl<E: std::error::Error + Send + 'static> AsyncTables for BlockingTransaction<E> {
    async fn apply(&mut self, batch: &Batch) -> Result<Applied, Self::Error> {
        self.0.ask(|answer| Command::Apply(batch.clone(), answer)).await
    }
}

impl<E: std::error::Error + Send + 'static> AsyncTransaction for BlockingTransaction<E> {
    async fn commit(self) -> Result<(), Self::Error> {
        self.0.ask(Command::Commit).await
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
