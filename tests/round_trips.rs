//! How often a program and a store over a network talk to each other in one operation, without the
//! user's own questions: counted on a store that sends together what the core says together.

#![allow(clippy::unwrap_used, reason = "what is made here is valid, and nothing fails")]

use core::convert::Infallible;
use core::future::Future;
use core::num::NonZeroU16;
use core::pin::pin;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use core::task::{Context, Poll, Waker};
use core::time::Duration;

use twobox::flow::ExchangeFlow;
use twobox::store::NoCall;
use twobox::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction, Ended, drive,
};
use twobox::{
    Applied, Batch, Body, Cancel, Checked, Claim, Claimed, DeliveryPolicy, Draft, Ending, Handled,
    Inbox, Key, Load, Message, Millis, OrderingKey, Owner, Query, Reason, Receipt, Register, Renew,
    Request, Retention, Rows, RunError, Settle, Store, Tables, Transaction, purge_all_async,
    redrive_all_async,
};
use twobox_memory::{MemoryStore, MemoryTransaction, State};

/// The memory store behind a network: each message there and back is counted. A transaction begins
/// with the first one in it, and needs none to be rolled back.
#[derive(Debug, Default)]
struct Counting {
    store: MemoryStore,
    trips: AtomicUsize,
}

impl Counting {
    fn trip(&self) {
        self.trips.fetch_add(1, Relaxed);
    }

    fn begun(&self) -> MemoryTransaction<'_> {
        let Ok(tx) = self.store.begin();
        tx
    }
}

/// A transaction that has begun once something was sent.
struct CountingTx<'s> {
    counting: &'s Counting,
    begun: Option<MemoryTransaction<'s>>,
}

impl<'s> CountingTx<'s> {
    fn send(&mut self) -> &mut MemoryTransaction<'s> {
        self.counting.trip();
        self.begun.get_or_insert_with(|| self.counting.begun())
    }
}

/// A view: each question is a round trip.
struct CountingView<'s> {
    counting: &'s Counting,
    state: State,
}

impl AsyncLoad for CountingView<'_> {
    type Error = Infallible;

    async fn load(&mut self, query: &Query) -> Result<Rows, Infallible> {
        self.counting.trip();
        self.state.load(query)
    }
}

impl AsyncLoad for CountingTx<'_> {
    type Error = Infallible;

    async fn load(&mut self, query: &Query) -> Result<Rows, Infallible> {
        self.send().load(query)
    }
}

impl AsyncTables for CountingTx<'_> {
    async fn apply(&mut self, batch: &Batch) -> Result<Applied, Infallible> {
        self.send().apply(batch)
    }

    async fn apply_then_load(
        &mut self,
        batch: &Batch,
        query: &Query,
    ) -> Result<Result<Rows, Option<Key>>, Infallible> {
        let tx = self.send();
        match tx.apply(batch)? {
            Applied::Written => tx.load(query).map(Ok),
            Applied::Conflict(key) => Ok(Err(key)),
        }
    }
}

fn apply_and_commit(mut tx: MemoryTransaction<'_>, batch: &Batch) -> Ended<Infallible> {
    let Ok(applied) = tx.apply(batch);
    match applied {
        Applied::Written => tx.commit().map_err(RunError::Unknown),
        Applied::Conflict(key) => Err(RunError::Conflict(key)),
    }
}

impl AsyncTransaction for CountingTx<'_> {
    async fn commit(self) -> Result<(), Infallible> {
        let Some(tx) = self.begun else { return Ok(()) };
        self.counting.trip();
        tx.commit()
    }

    async fn apply_and_commit(self, batch: &Batch) -> Ended<Infallible> {
        self.counting.trip();
        apply_and_commit(self.begun.unwrap_or_else(|| self.counting.begun()), batch)
    }
}

impl AsyncReader for Counting {
    type Error = Infallible;
    type View<'a> = CountingView<'a>;

    async fn view(&self) -> Result<CountingView<'_>, Infallible> {
        Ok(CountingView { counting: self, state: self.store.state() })
    }
}

impl AsyncStore for Counting {
    type Tx<'a> = CountingTx<'a>;

    const WRITES_FIRST: bool = true;

    async fn begin(&self) -> Result<CountingTx<'_>, Infallible> {
        Ok(CountingTx { counting: self, begun: None })
    }

    async fn autocommit(&self, batch: &Batch) -> Ended<Infallible> {
        self.trip();
        apply_and_commit(self.begun(), batch)
    }
}

/// A future of this store never waits.
fn ready<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => unreachable!("the store answers at once"),
    }
}

const NOW: Millis = Millis::new(1_000_000);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// What is counted, as a table.
#[derive(Default)]
struct Trips(Vec<(&'static str, usize)>);

impl Trips {
    /// Does something and counts.
    fn count<T>(
        &mut self,
        store: &Counting,
        what: &'static str,
        work: impl Future<Output = T>,
    ) -> T {
        let before = store.trips.load(Relaxed);
        let done = ready(work);
        self.0.push((what, store.trips.load(Relaxed) - before));
        done
    }
}

fn request(n: usize) -> Request {
    Request::of("shop", format!("req-{n}"), [("item", "notebook")]).unwrap()
}

fn draft() -> Draft {
    Draft::json("order.created", "{}").unwrap()
}

/// So many orders with an event each, in lanes of their own.
fn place(store: &Counting, from: usize, count: usize) {
    for n in from..from + count {
        let order = format!("order-{n}");
        let request = request(n);
        ready(store.run(request.order(order, "{}", draft()).unwrap(), NOW)).unwrap();
    }
}

fn claim(policy: &Checked<DeliveryPolicy>) -> Claim<'_> {
    Claim::new(policy, Owner::new("relay-1").unwrap(), Duration::from_secs(60), 256).unwrap()
}

fn settle<'a>(policy: &'a Checked<DeliveryPolicy>, claimed: &Claimed) -> Settle<'a> {
    Settle::new(policy, claimed.leased.iter().map(|leased| leased.settle(1, None)))
}

async fn exchange(
    store: &Counting,
    settle: Option<Settle<'_>>,
    claim: Option<Claim<'_>>,
) -> (usize, Claimed) {
    let flow = ExchangeFlow::new(settle, claim, NOW, Counting::WRITES_FIRST);
    let Ok((settled, claimed)) = drive(store, flow, NoCall).await else {
        unreachable!("nobody else is there")
    };
    (settled.map_or(0, |settled| settled.confirmed), claimed.unwrap_or_default())
}

/// So few round trips, as the table says, and no more.
#[test]
fn round_trips_are_few() {
    let store = Counting::default();
    let mut trips = Trips::default();
    let policy = Checked::<DeliveryPolicy>::default();

    // The sender.
    trips.count(&store, "register", store.run(Register::new(&request(0)), NOW)).unwrap();
    trips.count(&store, "register again", store.run(Register::new(&request(0)), NOW)).unwrap();
    let first = request(1);
    let three = first.order("order-1", "{}", draft()).unwrap();
    let three = three.event(draft()).unwrap().event(draft()).unwrap();
    trips.count(&store, "order with 3 events", store.run(&three, NOW)).unwrap();
    trips.count(&store, "the same order again", store.run(&three, NOW)).unwrap();
    let key = || OrderingKey::new("customer-7").unwrap();
    let (second, third) = (request(2), request(3));
    let order = second.order("order-2", "{}", draft().ordering_key(key())).unwrap();
    ready(store.run(order, NOW)).unwrap();
    let order = third.order("order-3", "{}", draft().ordering_key(key())).unwrap();
    trips.count(&store, "order in a lane that is there", store.run(order, NOW)).unwrap();
    let fourth = request(4);
    let _new = ready(store.run(Register::new(&fourth), NOW)).unwrap();
    let order = || fourth.order("order-4", "{}", draft()).unwrap();
    let registered = store.run(order().registered(), NOW);
    trips.count(&store, "order of a registered request", registered).unwrap();
    let fifth = request(5);
    let _new = ready(store.run(Register::new(&fifth), NOW)).unwrap();
    let order = || fifth.order("order-5", "{}", draft()).unwrap();
    trips.count(&store, "the same, which nobody said", store.run(order(), NOW)).unwrap();

    // The relay.
    let store = Counting::default();
    place(&store, 0, 512);
    let (_, first) = trips.count(&store, "claim 256", exchange(&store, None, Some(claim(&policy))));
    assert_eq!(first.leased.len(), 256);
    assert!(
        first.leased.iter().all(|leased| !leased.events[0].message.event.body.bytes().is_empty())
    );
    let leases = first.leased.iter().map(|leased| leased.lease.clone());
    let renew = Renew::new(leases, Duration::from_secs(90));
    let renewed = trips.count(&store, "renew 256", store.run(renew, NOW)).unwrap();
    assert_eq!(renewed.leases.len(), 256);
    let both = exchange(&store, Some(settle(&policy, &first)), Some(claim(&policy)));
    let (settled, second) = trips.count(&store, "settle and claim 256", both);
    assert_eq!((settled, second.leased.len()), (256, 256));
    let rest = exchange(&store, Some(settle(&policy, &second)), None);
    let (settled, _) = trips.count(&store, "settle 256", rest);
    assert_eq!(settled, 256);
    let stale = exchange(&store, Some(settle(&policy, &second)), None);
    let (settled, _) = trips.count(&store, "settle 256 under stale leases", stale);
    assert_eq!(settled, 0);
    let nothing = exchange(&store, None, Some(claim(&policy)));
    let (_, nothing) = trips.count(&store, "claim nothing", nothing);
    assert!(nothing.leased.is_empty());

    // The receiver.
    let messages: Vec<Message> =
        first.leased.iter().map(|leased| leased.events[0].message.clone()).collect();
    let receiver = Counting::default();
    let inbox = Inbox::new(&receiver, twobox::Consumer::new("loyalty").unwrap()).in_order();
    let effect = || Ok::<_, &str>(Handled::Effect(Body::text("points").unwrap()));
    for (what, messages) in
        [("receive one with its effect", &messages[..1]), ("receive 256 with effects", &messages)]
    {
        let received = inbox.receive_async(messages, NOW, async |_, _| effect());
        let receipts = trips.count(&receiver, what, received).unwrap();
        let applied = receipts.iter().filter(|receipt| **receipt == Receipt::Applied).count();
        assert_eq!(applied, if messages.len() == 1 { 1 } else { 255 });
    }
    let again = inbox.receive_async(&messages, NOW, async |_, _| effect());
    let receipts = trips.count(&receiver, "receive 256 duplicates", again).unwrap();
    assert!(receipts.iter().all(|receipt| *receipt == Receipt::Duplicate));
    let other = Inbox::new(&receiver, twobox::Consumer::new("mailing").unwrap());
    let failing = other.receive_async(&messages, NOW, async |_, message: &Message| {
        if message.event.id == messages[9].event.id { Err("away") } else { effect() }
    });
    let receipts = trips.count(&receiver, "receive 256, one fails", failing).unwrap();
    let applied = receipts.iter().filter(|receipt| **receipt == Receipt::Applied).count();
    assert_eq!(applied, 255);

    // The operator.
    let store = Counting::default();
    place(&store, 0, 200);
    let (_, claimed) = ready(exchange(&store, None, Some(claim(&policy))));
    let rejected = || Some(Ending::Rejected(Reason::new("too large")));
    let rejected = claimed.leased.iter().map(|leased| leased.settle(0, rejected()));
    let _nothing = ready(exchange(&store, Some(Settle::new(&policy, rejected)), None));
    let kept = Retention::default().checked(&policy).unwrap();
    let redriven = redrive_all_async(&store, None, kept.redrive_window(), NOW);
    let redriven = trips.count(&store, "redrive 200", redriven).unwrap();
    assert_eq!(redriven.done.len(), 200);
    let cancel = Cancel::new(redriven.done, Reason::new("sold out")).unwrap();
    let cancelled = trips.count(&store, "cancel 200", store.run(cancel, NOW)).unwrap();
    assert_eq!(cancelled.done.len(), 200);
    let limit = NonZeroU16::new(1_000).unwrap();
    let purged = purge_all_async(&store, &kept, limit, NOW + DAY);
    let purged = trips.count(&store, "purge where nothing is past", purged).unwrap();
    assert_eq!(purged, 0);
    let purged = purge_all_async(&store, &kept, limit, NOW + 9 * DAY);
    let purged = trips.count(&store, "purge 200 events and lanes", purged).unwrap();
    assert_eq!(purged, 400);

    trips.0.iter().for_each(|(what, trips)| println!("{trips:>3}  {what}"));
    let right = [
        ("register", 1),
        ("register again", 2),
        ("order with 3 events", 1),
        ("the same order again", 2),
        ("order in a lane that is there", 2),
        ("order of a registered request", 2),
        // The write that meets the row shows nothing of it and ends the transaction, so a look and
        // another write follow.
        ("the same, which nobody said", 3),
        ("claim 256", 2),
        ("renew 256", 1),
        ("settle and claim 256", 2),
        ("settle 256", 1),
        ("settle 256 under stale leases", 2),
        ("claim nothing", 1),
        ("receive one with its effect", 2),
        ("receive 256 with effects", 2),
        ("receive 256 duplicates", 1),
        ("receive 256, one fails", 3),
        ("redrive 200", 3),
        ("cancel 200", 2),
        ("purge where nothing is past", 7),
        ("purge 200 events and lanes", 11),
    ];
    assert_eq!(trips.0, right);
}
