//! A sync store behind [`Blocking`]: it behaves as the store itself, and what is dropped is rolled
//! back.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Barrier;
use std::task::Poll;
use std::time::Duration;

use tokio::time::timeout;
use twobox::relay::{Action, Published, RelayMachine, RelaySettings};
use twobox::store::NoCall;
use twobox::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction, drive, write,
};
use twobox::{
    Applied, Batch, Body, CommitOrder, Draft, End, Fingerprint, Key, Load, Millis, Moment, OrderId,
    Owner, ParametersDiffer, Query, Reader, Register, Registered, Request, Rows, RunError, Store,
    StoreError, Table, Tables, Transaction,
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

fn order(request: &Request, n: usize) -> CommitOrder<'_> {
    let body = Body::text("notebook").unwrap();
    let event = Draft::new("created", body.clone()).unwrap();
    CommitOrder::new(request, OrderId::new(format!("order-{n}")).unwrap(), body, [event]).unwrap()
}

fn count<R: Reader>(store: &R, table: Table) -> usize {
    let query = Query::Walk { table, after: None, limit: 1_000 };
    store.view().unwrap().load(&query).unwrap().rows.len()
}

async fn like_the_store_itself<S: Store<Error: Send> + Send + Sync + 'static>(store: Blocking<S>) {
    let (first, second) = (request(1), request(2));
    // Dropped without a commit: rolled back, and the next one may begin.
    let mut tx = store.begin().await.unwrap();
    assert_eq!(tx.run(Register::new(&first), NOW).await.unwrap(), Registered::New);
    assert_eq!(tx.load(&there(&first)).await.unwrap().rows.len(), 1);
    drop(tx);
    let mut view = store.view().await.unwrap();
    assert_eq!(view.load(&there(&first)).await.unwrap(), Rows::default());
    // A view shows what it showed when it was opened.
    assert_eq!(store.run(Register::new(&first), NOW).await.unwrap(), Registered::New);
    assert_eq!(view.load(&there(&first)).await.unwrap(), Rows::default());
    assert_eq!(store.view().await.unwrap().load(&there(&first)).await.unwrap().rows.len(), 1);
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
    assert_eq!(count(&**store.store(), Table::Requests), 2);
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

/// What `future` comes to, if that is within so many polls.
async fn polled<T>(future: &mut (impl Future<Output = T> + Unpin), polls: usize) -> Option<T> {
    let mut left = polls;
    std::future::poll_fn(|cx| {
        left -= 1;
        match Pin::new(&mut *future).poll(cx) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// A future that is dropped at any of its awaits leaves everything or nothing (P2), and the store
/// usable, whether it goes in one trip or step by step.
#[tokio::test(start_paused = true)]
async fn a_future_may_be_dropped_anywhere() {
    for steps in [false, true] {
        let store = Blocking::new(MemoryStore::new());
        let mut ended = 0;
        for polls in 1..=40 {
            let request = request(polls);
            let order = order(&request, polls);
            let mut commit = Box::pin(async {
                if !steps {
                    return store.run(&order, NOW).await.map(drop);
                }
                let mut tx = store.begin().await.map_err(RunError::Store)?;
                tx.run(&order, NOW).await?;
                tx.commit().await.map_err(RunError::Unknown)
            });
            // What goes in one trip is held up there every other time, so that it is dropped.
            let held = (!steps && polls % 2 == 0).then(|| Store::begin(&**store.store()));
            let polls = if held.is_some() { 1 } else { polls };
            ended += usize::from(polled(&mut commit, polls).await.is_some_and(|it| it.is_ok()));
            drop((commit, held));
            // The next transaction comes after whatever became of it.
            drop(store.begin().await.unwrap());
            let [orders, events] =
                [Table::Orders, Table::Events].map(|table| count(&**store.store(), table));
            assert_eq!(orders, events, "P2");
            assert!(orders >= ended, "what has answered is committed");
        }
        assert!(ended > 0 && ended < 40, "{ended}: all or none of them were dropped");
    }
}

/// To place an order, or to answer a question, is one trip to a thread, and the transaction of a
/// relay is two. Each trip is one time that the future waits, at most.
#[tokio::test(start_paused = true)]
async fn what_belongs_together_goes_in_one_trip() {
    let store = Blocking::new(MemoryStore::new());
    let request = request(1);
    let order = order(&request, 1);
    let placed = polled(&mut Box::pin(store.run(&order, NOW)), 2).await;
    assert!(placed.expect("an order is one trip").is_ok());
    let query = there(&request);
    let loaded = polled(&mut Box::pin(store.load_once(&query)), 2).await;
    assert_eq!(loaded.expect("a question is one trip").unwrap().rows.len(), 1);

    let settings = RelaySettings::new(Owner::new("relay-1").unwrap());
    let (mut machine, mut exchanges) =
        (RelayMachine::new(settings, Moment::steady(NOW)).unwrap(), 0);
    while let Some(action) = machine.poll_action() {
        match action {
            Action::Exchange(exchange) => {
                let settings = machine.settings().clone();
                let flow = exchange.flow(&settings, NOW, Blocking::<MemoryStore>::WRITES_FIRST);
                let exchanged = polled(&mut Box::pin(drive(&store, flow, NoCall)), 3).await;
                machine
                    .handle_exchanged(Moment::steady(NOW), exchanged.expect("two trips").unwrap());
                exchanges += 1;
            }
            Action::Publish(tickets) => tickets.iter().for_each(|ticket| {
                machine.handle_published(Moment::steady(NOW), ticket, Published::Confirmed);
            }),
            Action::Renew(_) | Action::BreakOff(_) | Action::GiveUp(_) => {
                panic!("no lease is half over, and nothing is overdue")
            }
        }
    }
    assert_eq!((exchanges, machine.counters().confirmed), (2, 1));
}

/// A store in which nobody's transaction goes on before so many have come.
struct Meets(MemoryStore, Barrier);

impl Reader for Meets {
    type Error = Infallible;
    type View<'a> = <MemoryStore as Reader>::View<'a>;
    fn view(&self) -> Result<Self::View<'_>, Infallible> {
        self.0.view()
    }
}

impl Store for Meets {
    type Tx<'a> = <MemoryStore as Store>::Tx<'a>;
    fn begin(&self) -> Result<Self::Tx<'_>, Infallible> {
        self.0.begin()
    }

    fn transact<R>(
        &self,
        work: impl FnMut(&mut Self::Tx<'_>) -> End<R>,
    ) -> Result<R, RunError<Infallible, Infallible>> {
        self.1.wait();
        self.0.transact(work)
    }
}

/// P1: what several tasks commit at the same time comes to the store at the same time, so that it
/// can be one commit. If it did not, this test would not end.
#[tokio::test]
async fn tasks_may_share_a_commit() {
    let store = Blocking::new(Meets(MemoryStore::new(), Barrier::new(3)));
    let place = |n| {
        let store = store.clone();
        tokio::spawn(async move {
            let request = request(n);
            store.run(order(&request, n), NOW).await.unwrap().repeated
        })
    };
    let placed = [place(1), place(2), place(3)];
    for placed in placed {
        assert!(!placed.await.unwrap());
    }
    assert_eq!(count(&**store.store(), Table::Orders), 3);
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
    assert_eq!(count(&**store.store(), Table::Requests), 1);
}

/// The same by a closure, which commits or rolls back.
#[tokio::test]
async fn a_closure_commits_or_rolls_back() {
    let store = Blocking::new(MemoryStore::new());
    let request = request(2);
    let refused = write(&store, NOW, async |tx| {
        tx.run(Register::new(&request)).await.unwrap();
        Err::<(), _>("no")
    });
    assert!(matches!(refused.await, Err(RunError::Refused("no"))));
    assert_eq!(count(&**store.store(), Table::Requests), 0);
    let registered = write(&store, NOW, async |tx| tx.run(Register::new(&request)).await);
    assert_eq!(registered.await.unwrap(), Registered::New);
}

/// A store that panics where it is looked at, and that cannot begin.
struct Broken;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the disk is away")]
struct Away;

impl StoreError for Away {}

struct Never;

impl Load for Never {
    type Error = Away;
    fn load(&mut self, _: &Query) -> Result<Rows, Away> {
        unreachable!("there is no transaction")
    }
}

impl Tables for Never {
    fn apply(&mut self, _: &Batch) -> Result<Applied, Away> {
        unreachable!("there is no transaction")
    }
}

impl Transaction for Never {
    fn commit(self) -> Result<(), Away> {
        unreachable!("there is no transaction")
    }
}

impl Reader for Broken {
    type Error = Away;
    type View<'a> = Never;
    fn view(&self) -> Result<Never, Away> {
        panic!("this is part of the test")
    }
}

impl Store for Broken {
    type Tx<'a> = Never;
    fn begin(&self) -> Result<Never, Away> {
        Err(Away)
    }
}

#[tokio::test]
async fn a_panic_of_the_store_is_an_error() {
    let store = Blocking::new(Broken);
    assert!(matches!(store.view().await, Err(BlockingError::ThreadEnded(ThreadEnded))));
    let loaded = store.load_once(&there(&request(1))).await;
    assert!(matches!(loaded, Err(BlockingError::ThreadEnded(ThreadEnded))));
    assert_eq!(store.call(|_| panic!("this is part of the test")).await, Err::<(), _>(ThreadEnded));
}

/// F11: whatever is asked first of a transaction that did not begin says so, and that nothing has
/// changed.
#[tokio::test]
async fn a_transaction_that_does_not_begin_says_so() {
    let store = Blocking::new(Broken);
    let (query, batch) = (there(&request(1)), Batch::new());
    let away = |error: BlockingError<Away>| matches!(error, BlockingError::Store(Away));
    assert!(away(store.begin().await.unwrap().load(&query).await.unwrap_err()));
    assert!(away(store.begin().await.unwrap().apply(&batch).await.unwrap_err()));
    let mut tx = store.begin().await.unwrap();
    assert!(away(tx.apply_then_load(&batch, &query).await.unwrap_err()));
    assert!(away(store.begin().await.unwrap().commit().await.unwrap_err()));
    for ended in [
        store.begin().await.unwrap().apply_and_commit(&batch).await,
        store.autocommit(&batch).await,
    ] {
        assert!(matches!(ended, Err(RunError::Store(BlockingError::Store(Away)))), "{ended:?}");
    }
    let ran = store.run(Register::new(&request(1)), NOW).await;
    assert!(matches!(ran, Err(RunError::Store(BlockingError::Store(Away)))), "{ran:?}");
}

/// A store that panics as it begins.
struct Panics;

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
        panic!("this is part of the test")
    }
}

/// Nobody knows whether something that panicked has committed.
#[tokio::test]
async fn after_a_panic_nobody_knows() {
    let store = Blocking::new(Panics);
    for _ in 0..50 {
        let ended = store.run(Register::new(&request(1)), NOW).await;
        let unknown = matches!(ended, Err(RunError::Unknown(BlockingError::ThreadEnded(_))));
        assert!(unknown, "{ended:?}");
        let mut tx = store.begin().await.unwrap();
        let loaded = tx.load(&there(&request(1))).await;
        assert!(matches!(loaded, Err(BlockingError::ThreadEnded(ThreadEnded))));
    }
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
