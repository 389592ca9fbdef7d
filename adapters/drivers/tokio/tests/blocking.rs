//! A sync store behind [`Blocking`]: it behaves as the store itself, and what is dropped is rolled
//! back.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::timeout;
use twobox::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction,
};
use twobox::{
    Body, CommitOrder, Draft, Fingerprint, Key, Load, Millis, OrderId, ParametersDiffer, Query,
    Reader, Register, Registered, Request, Rows, RunError, Store,
};
use twobox_memory::MemoryStore;
use twobox_redb::RedbStore;
use twobox_tokio::{Blocking, BlockingError, ThreadEnded};

const NOW: Millis = Millis::new(1_000);

fn request(n: usize) -> Request {
    Request::new("test", format!("req-{n}"), Fingerprint::of([("n", n.to_string())])).unwrap()
}

fn there(request: &Request) -> Query {
    Query::rows([Key::Request(request.key.clone())])
}

fn count<R: Reader>(store: &R) -> usize {
    let query = Query::Walk { table: twobox::Table::Requests, after: None, limit: 1_000 };
    store.view().unwrap().load(&query).unwrap().as_slice().len()
}

async fn like_the_store_itself<S: Store<Error: Send> + Send + Sync + 'static>(store: Blocking<S>) {
    let (first, second) = (request(1), request(2));
    // Dropped without a commit: rolled back, and the next one may begin.
    let mut tx = store.begin().await.unwrap();
    assert_eq!(tx.run(Register::new(&first), NOW).await.unwrap(), Registered::New);
    assert_eq!(tx.load(&there(&first)).await.unwrap().as_slice().len(), 1);
    drop(tx);
    let mut view = store.view().await.unwrap();
    assert_eq!(view.load(&there(&first)).await.unwrap(), Rows::default());
    // A view shows what it showed when it was opened.
    assert_eq!(store.run(Register::new(&first), NOW).await.unwrap(), Registered::New);
    assert_eq!(view.load(&there(&first)).await.unwrap(), Rows::default());
    assert_eq!(store.view().await.unwrap().load(&there(&first)).await.unwrap().as_slice().len(), 1);
    // Two transactions at a time: the second waits, and one that gives up waiting is not missed.
    let mut tx = store.begin().await.unwrap();
    tokio::select! {
        biased;
        _ = store.begin() => panic!("two transactions at a time"),
        () = tokio::task::yield_now() => {}
    }
    let waiting = tokio::spawn({
        let store = store.clone();
        let second = second.clone();
        async move { store.run(Register::new(&second), NOW).await.unwrap() }
    });
    assert_eq!(tx.run(Register::new(&second), NOW).await.unwrap(), Registered::New);
    tx.commit().await.unwrap();
    assert_eq!(waiting.await.unwrap(), Registered::Open);
    assert_eq!(count(&**store.store()), 2);
}

#[tokio::test(start_paused = true)]
async fn memory_behaves_as_itself() {
    like_the_store_itself(Blocking::new(MemoryStore::new())).await;
}

#[tokio::test(start_paused = true)]
async fn redb_behaves_as_itself() {
    like_the_store_itself(Blocking::new(
        RedbStore::create_on(redb::backends::InMemoryBackend::new()).unwrap(),
    ))
    .await;
}

/// A future that is dropped at any of its awaits leaves everything or nothing (P2), and the store
/// usable.
#[tokio::test(start_paused = true)]
async fn a_future_may_be_dropped_anywhere() {
    let store = Blocking::new(MemoryStore::new());
    let mut ended = 0;
    for polls in 1..=40 {
        let request = request(polls);
        let body = Body::text("notebook").unwrap();
        let order = OrderId::new(format!("order-{polls}")).unwrap();
        let commit =
            CommitOrder::new(&request, order, body.clone(), [Draft::new("created", body).unwrap()])
                .unwrap();
        let mut commit = Box::pin(store.run(&commit, NOW));
        let mut left = polls;
        ended += usize::from(
            std::future::poll_fn(|cx| {
                left -= 1;
                match commit.as_mut().poll(cx) {
                    std::task::Poll::Ready(done) => std::task::Poll::Ready(done.is_ok()),
                    std::task::Poll::Pending if left == 0 => std::task::Poll::Ready(false),
                    std::task::Poll::Pending => std::task::Poll::Pending,
                }
            })
            .await,
        );
        drop(commit);
        // The next transaction comes after whatever became of it.
        drop(store.begin().await.unwrap());
        let table = |table| Query::Walk { table, after: None, limit: 1_000 };
        let mut state = store.store().state();
        let mut rows = |name| state.load(&table(name)).unwrap().as_slice().len();
        let (orders, events) = (rows(twobox::Table::Orders), rows(twobox::Table::Events));
        assert_eq!(orders, events, "P2");
        assert!(orders >= ended, "what has answered is committed");
    }
    assert!(ended > 0 && ended < 40, "{ended}: all or none of them were dropped");
}

/// Several transitions in one commit, in a task of their own: the futures of a transaction can be
/// sent.
#[tokio::test]
async fn a_transaction_can_be_spawned() {
    let store = Blocking::new(MemoryStore::new());
    let spawned = {
        let store = store.clone();
        tokio::spawn(async move {
            let request = request(1);
            let mut tx = store.begin().await.map_err(RunError::Store)?;
            tx.run(Register::new(&request), NOW).await?;
            let registered = tx.run(Register::new(&request), NOW).await?;
            tx.commit().await.map_err(RunError::Unknown)?;
            Ok::<_, RunError<_, ParametersDiffer>>(registered)
        })
    };
    assert_eq!(spawned.await.unwrap().unwrap(), Registered::Open);
    assert_eq!(count(&**store.store()), 1);
}

/// The same by a closure, which commits or rolls back.
#[tokio::test]
async fn a_closure_commits_or_rolls_back() {
    let store = Blocking::new(MemoryStore::new());
    let request = request(2);
    let refused = store.write(NOW, async |tx| {
        tx.run(Register::new(&request)).await.unwrap();
        Err::<(), _>("no")
    });
    assert!(matches!(refused.await, Err(RunError::Refused("no"))));
    assert_eq!(count(&**store.store()), 0);
    let registered = store.write(NOW, async |tx| tx.run(Register::new(&request)).await);
    assert_eq!(registered.await.unwrap(), Registered::New);
}

/// A store that panics where it is told to.
struct Panics(MemoryStore);

impl Reader for Panics {
    type Error = Infallible;
    type View<'a> = <MemoryStore as Reader>::View<'a>;
    fn view(&self) -> Result<Self::View<'_>, Infallible> {
        panic!("this is part of the test")
    }
}

impl Store for Panics {
    type Tx<'a> = <MemoryStore as Store>::Tx<'a>;
    fn begin(&self) -> Result<Self::Tx<'_>, Infallible> {
        self.0.begin()
    }
}

#[tokio::test]
async fn a_panic_of_the_store_is_an_error() {
    let store = Blocking::new(Panics(MemoryStore::new()));
    assert!(matches!(store.view().await, Err(BlockingError::ThreadEnded(ThreadEnded))));
    assert_eq!(store.call(|_| panic!("this is part of the test")).await, Err::<(), _>(ThreadEnded));
    assert_eq!(store.run(Register::new(&request(1)), NOW).await.unwrap(), Registered::New);
}

/// A store that panics where somebody looks at its rows.
struct Torn;

impl Load for Torn {
    type Error = Infallible;
    fn load(&mut self, _query: &Query) -> Result<Rows, Infallible> {
        panic!("this is part of the test")
    }
}

impl Reader for Torn {
    type Error = Infallible;
    type View<'a> = Torn;
    fn view(&self) -> Result<Torn, Infallible> {
        Ok(Self)
    }
}

/// After a panic there is an answer to each further question: nobody waits for a thread that has
/// ended.
#[tokio::test(start_paused = true)]
async fn a_thread_that_has_ended_is_not_waited_for() {
    let store = Blocking::new(Torn);
    let mut view = store.view().await.unwrap();
    for _ in 0..8 {
        let query = there(&request(1));
        // Tokio's time goes on by itself when nothing else can, so a wait without an end fails.
        let loaded = timeout(Duration::from_secs(3_600), view.load(&query)).await;
        let loaded = loaded.expect("it waits for a thread that has ended");
        assert!(matches!(loaded, Err(BlockingError::ThreadEnded(ThreadEnded))));
        // By then the thread of the first question is gone.
        store.call(|_| ()).await.unwrap();
    }
}
