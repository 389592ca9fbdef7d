//! The relay on tokio: what it promises while publishers are slow, fail, panic or hang, and the
//! store is slow or away.
//!
//! Tokio's time is paused: it goes on by itself when nothing else can, so hours cost nothing, and
//! each test knows when something happened. Polls are an hour away, so what is delivered before was
//! not found by chance.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use twobox::relay::{AsyncPublisher, Phase, Published, RelaySettings};
use twobox::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction, AsyncWriting,
};
use twobox::{
    Applied, AsyncHandler, Batch, Body, Checked, Claim, CommitOrder, Consumer, DeliveryPolicy,
    Draft, Dump, EventId, EventState, Fingerprint, Handled, InProcess, Inbox, Load, Message,
    Millis, Moment, OrderId, OrderingKey, OutboxRow, Owner, Query, Reader, Reason, Receipt,
    Request, Rows, Settle, Store, StoreError, Table, Tables, Transaction,
};
use twobox_memory::MemoryStore;
use twobox_redb::RedbStore;
use twobox_tokio::{Blocking, RelayTask, tokio_clock};

const HOUR: Duration = Duration::from_secs(3_600);
const LEASE: Duration = Duration::from_secs(30);
const START: Millis = Millis::new(1_000_000);

fn settings(name: &str) -> RelaySettings {
    let publish_timeout = HOUR * 1_000_000;
    let own = RelaySettings::new(Owner::new(name).unwrap());
    RelaySettings { poll: HOUR, lease: LEASE, publish_timeout, ..own }
}

/// Settings with which an event is never given up.
fn patient(name: &str) -> RelaySettings {
    let policy =
        DeliveryPolicy { max_failures: 10_000, max_starts: 20_000, ..DeliveryPolicy::default() }
            .checked()
            .unwrap();
    RelaySettings { policy, ..settings(name) }
}

fn key_of(lane: usize) -> OrderingKey {
    OrderingKey::new(format!("lane-{lane}")).unwrap()
}

/// Commits an event; its id is `e{n}`.
fn commit<S: Store>(store: &S, n: usize, lane: usize, now: Millis) {
    let request =
        Request::new("test", format!("req-{n}"), Fingerprint::of([("n", n.to_string())])).unwrap();
    let body = Body::text(n.to_string()).unwrap();
    let event =
        Draft::new("happened", body.clone()).unwrap().id(EventId::new(format!("e{n}")).unwrap());
    let order = OrderId::new(format!("order-{n}")).unwrap();
    store
        .run(
            CommitOrder::new(&request, order, body, [event.ordering_key(key_of(lane))]).unwrap(),
            now,
        )
        .unwrap();
}

/// The pending events, in the order of their ids.
fn outbox<R: Reader>(store: &R) -> Vec<OutboxRow> {
    let dump = Dump::of(&mut store.view().unwrap()).unwrap();
    let pending = dump
        .events()
        .into_values()
        .filter(|(state, _)| matches!(state, EventState::Pending | EventState::Leased));
    pending.map(|(_, row)| row).collect()
}

fn memory() -> Arc<Blocking<MemoryStore>> {
    Arc::new(Blocking::new(MemoryStore::new()))
}

fn redb() -> Arc<Blocking<RedbStore>> {
    Arc::new(Blocking::new(RedbStore::create_on(redb::backends::InMemoryBackend::new()).unwrap()))
}

/// Says which event it is asked to publish, and waits for the answer.
struct Told(UnboundedSender<(String, oneshot::Sender<Published>)>);

struct Asks(UnboundedReceiver<(String, oneshot::Sender<Published>)>);

fn told() -> (Told, Asks) {
    let (sender, receiver) = unbounded_channel();
    (Told(sender), Asks(receiver))
}

impl AsyncPublisher for Told {
    async fn publish(&self, batch: &[Message], _now: Millis) -> Vec<Published> {
        let mut answers = Vec::new();
        for message in batch {
            let (answer, told) = oneshot::channel();
            let _nobody_listens = self.0.send((message.event.id.to_string(), answer));
            answers.push(told.await.unwrap_or(Published::Abandoned));
        }
        answers
    }
}

impl Asks {
    async fn next(&mut self) -> (String, oneshot::Sender<Published>) {
        timeout(HOUR / 2, self.0.recv())
            .await
            .expect("nothing was published before the poll")
            .unwrap()
    }

    async fn confirm(&mut self) -> String {
        let (id, answer) = self.next().await;
        answer.send(Published::Confirmed).unwrap();
        id
    }
}

fn rng(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// What the publishers of a test saw, and what they do next.
#[derive(Default)]
struct Seen {
    publishing: BTreeMap<OrderingKey, u64>,
    confirmed: BTreeMap<OrderingKey, Vec<u64>>,
    most_at_once: usize,
    /// What was not as promised: a panic of a publisher would not fail the test.
    wrong: Vec<String>,
    dice: u64,
}

/// A publisher that takes its time, and confirms, fails or panics as the dice say.
struct Unreliable(Arc<Mutex<Seen>>);

impl AsyncPublisher for Unreliable {
    async fn publish(&self, batch: &[Message], _now: Millis) -> Vec<Published> {
        let message = &batch[0];
        let key = message.event.ordering_key.clone();
        let span = {
            let mut seen = self.0.lock().unwrap();
            if batch.len() > 1
                || seen.publishing.insert(key.clone(), message.place.sequence).is_some()
            {
                seen.wrong.push(format!("P4: {key} is published twice at a time"));
            }
            seen.most_at_once = seen.most_at_once.max(seen.publishing.len());
            Duration::from_millis(rng(&mut seen.dice) % 60_000)
        };
        sleep(span).await;
        let answer = {
            let mut seen = self.0.lock().unwrap();
            seen.publishing.remove(&key);
            match rng(&mut seen.dice) % 10 {
                0 | 1 => Some(vec![Published::Failed(Reason::new("it failed"))]),
                2 => Some(vec![]),
                3 => None,
                _ => {
                    seen.confirmed.entry(key).or_default().push(message.place.sequence);
                    Some(vec![Published::Confirmed])
                }
            }
        };
        answer.expect("this is part of the test")
    }
}

/// P3, P4, F2: whatever the publishers do, each event of a key comes after the one before it, and
/// all come.
async fn in_order<S: Store<Error: Send> + Send + Sync + 'static>(
    store: Arc<Blocking<S>>,
    seed: u64,
    lanes: usize,
    events: usize,
) {
    let seen = Arc::new(Mutex::new(Seen { dice: seed, ..Seen::default() }));
    let relay = RelayTask::spawn(
        store.clone(),
        Unreliable(seen.clone()),
        patient("relay-1"),
        tokio_clock(START),
    )
    .unwrap();
    let (clock, waker) = (tokio_clock(START), relay.waker());
    for n in 0..events {
        let now = clock().wall;
        store.call(move |store| commit(store, n, n % lanes, now)).await.unwrap();
        waker.wake();
    }
    let all = events as u64;
    timeout(HOUR * 24, relay.wait_for(|status| status.counters.confirmed >= all))
        .await
        .expect("P3: not all of it came");
    let end = relay.stop(LEASE).await;
    assert_eq!((end.phase, end.publishing, end.error), (Phase::Stopped, 0, None));
    assert_eq!(
        (end.counters.confirmed, end.counters.dead, end.counters.stale),
        (all, 0, 0),
        "seed {seed}"
    );
    assert!(end.counters.failed > 0, "seed {seed}: nothing failed, so nothing was tested");
    let mut seen = seen.lock().unwrap();
    assert_eq!(seen.wrong, Vec::<String>::new());
    for lane in 0..lanes {
        let events = (events - lane).div_ceil(lanes) as u64;
        assert_eq!(
            seen.confirmed.remove(&key_of(lane)),
            Some((1..=events).collect()),
            "P4: seed {seed}, lane {lane}"
        );
    }
    assert!(seen.most_at_once > 1, "seed {seed}: other keys did not go on at the same time");
}

#[tokio::test(start_paused = true)]
async fn keys_are_in_order_whatever_publishers_do() {
    for seed in 1..=5 {
        in_order(memory(), seed * 0x9e37_79b9, 7, 60).await;
    }
}

#[tokio::test(start_paused = true)]
async fn keys_are_in_order_on_redb() {
    in_order(redb(), 77, 5, 25).await;
}

/// A consumer behind an inbox, which takes its time and loses answers.
struct Lossy<S> {
    consumer: Blocking<S>,
    dice: Arc<Mutex<u64>>,
    wrong: Arc<Mutex<Vec<Receipt>>>,
}

impl<S: Store<Error: Send> + Send + Sync + 'static> AsyncPublisher for Lossy<S> {
    async fn publish(&self, batch: &[Message], now: Millis) -> Vec<Published> {
        let mut answers = Vec::new();
        for message in batch {
            let message = message.clone();
            let receive = move |store: &S| {
                let inbox = Inbox::new(store, Consumer::new("loyalty").unwrap()).in_order();
                inbox
                    .receive(&message, now, |_, message| {
                        Ok::<_, Reason>(Handled::Effect(message.event.body.clone()))
                    })
                    .unwrap()
            };
            let receipt = self.consumer.call(receive).await.unwrap();
            if !matches!(receipt, Receipt::Applied | Receipt::Duplicate) {
                self.wrong.lock().unwrap().push(receipt);
            }
            let (span, lost) = {
                let mut dice = self.dice.lock().unwrap();
                (Duration::from_millis(rng(&mut dice) % 5_000), rng(&mut dice).is_multiple_of(4))
            };
            sleep(span).await;
            answers.push(if lost {
                Published::Failed(Reason::new("the answer was lost"))
            } else {
                Published::Confirmed
            });
        }
        answers
    }
}

/// P3, P5, P6: two relays on one store deliver everything at least once, and through an inbox
/// exactly once.
async fn two_relays<S: Store<Error: Send> + Send + Sync + 'static>(
    store: Arc<Blocking<S>>,
    consumer: Arc<Blocking<S>>,
    events: usize,
) {
    let (dice, wrong) = (Arc::new(Mutex::new(4_711)), Arc::new(Mutex::new(Vec::new())));
    let relays = ["relay-1", "relay-2"].map(|name| {
        let publisher =
            Lossy { consumer: (*consumer).clone(), dice: dice.clone(), wrong: wrong.clone() };
        let settings =
            RelaySettings { window: 4, run: 2, poll: Duration::from_secs(1), ..patient(name) };
        RelayTask::spawn(store.clone(), publisher, settings, tokio_clock(START)).unwrap()
    });
    let clock = tokio_clock(START);
    for n in 0..events {
        let now = clock().wall;
        store.call(move |store| commit(store, n, n % 5, now)).await.unwrap();
        relays.iter().for_each(|relay| relay.waker().wake());
    }
    let confirmed = || relays.iter().map(|relay| relay.status().counters.confirmed).sum::<u64>();
    for _ in 0..10_000 {
        if confirmed() == events as u64 {
            break;
        }
        sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(confirmed(), events as u64);
    let [first, second] = relays;
    let both = [first.stop(LEASE).await, second.stop(LEASE).await];
    assert!(
        both.iter().all(|end| end.counters.confirmed > 0),
        "one relay did all the work: {both:?}"
    );
    assert_eq!(*wrong.lock().unwrap(), [], "P4: the inbox had to wait for an earlier event");
    assert_eq!(outbox(&**store.store()), []);
    let dump = Dump::of(&mut consumer.store().view().unwrap()).unwrap();
    assert_eq!((dump.count(Table::Inbox), dump.count(Table::Effects)), (events, events));
}

#[tokio::test(start_paused = true)]
async fn two_relays_apply_each_event_once() {
    two_relays(memory(), memory(), 60).await;
}

#[tokio::test(start_paused = true)]
async fn two_relays_apply_each_event_once_on_redb() {
    two_relays(redb(), redb(), 20).await;
}

/// F37: the time of day is set a year ahead and back, again and again, while a publish takes as long
/// as ten leases: the lease is renewed in time, and no interval drifts.
#[tokio::test(start_paused = true)]
async fn f37_a_relay_whose_clock_is_set() {
    let (store, (publisher, mut asks)) = (memory(), told());
    let steady = tokio_clock(START);
    let clock = move || {
        let now = steady();
        let year = Duration::from_secs(31_536_000);
        let jumps = now.uptime.as_millis() % 7 == 3;
        Moment { wall: if jumps { now.wall + year } else { now.wall }, ..now }
    };
    commit(&**store.store(), 1, 1, START);
    let relay = RelayTask::spawn(store.clone(), publisher, settings("relay-1"), clock).unwrap();
    let began = Instant::now();
    let (_, answer) = asks.next().await;
    sleep(LEASE * 10).await;
    answer.send(Published::Confirmed).unwrap();
    let end = relay.wait_for(|status| status.counters.confirmed == 1).await;
    assert!(began.elapsed() < LEASE * 10 + Duration::from_secs(1));
    assert_eq!((end.counters.published, end.counters.stale, end.counters.short), (1, 0, 0));
    assert_eq!(relay.stop(LEASE).await.error, None);
}

/// Not a matter of paused time or of one thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_are_delivered_on_several_threads() {
    let (store, (publisher, mut asks)) = (memory(), told());
    let relay = RelayTask::spawn(store.clone(), publisher, settings("relay-1"), tokio_clock(START))
        .unwrap();
    for n in 0..50 {
        store.call(move |store| commit(store, n, n % 7, START)).await.unwrap();
        relay.waker().wake();
        assert_eq!(asks.confirm().await, format!("e{n}"));
    }
    assert_eq!(relay.stop(LEASE).await.counters.confirmed, 50);
}

/// F3: a publish that is longer than ten leases is renewed all the time, and another relay that
/// looks each second does not get it.
#[tokio::test(start_paused = true)]
async fn a_slow_publish_is_renewed_and_not_claimed_by_another() {
    let (store, (slow, mut asks), (rival, mut rival_asks)) = (memory(), told(), told());
    commit(&**store.store(), 1, 1, START);
    let first =
        RelayTask::spawn(store.clone(), slow, settings("relay-1"), tokio_clock(START)).unwrap();
    let (id, answer) = asks.next().await;
    assert_eq!(id, "e1");
    let eager = RelaySettings { poll: Duration::from_secs(1), ..settings("relay-2") };
    let second = RelayTask::spawn(store.clone(), rival, eager, tokio_clock(START)).unwrap();
    sleep(LEASE * 10).await;
    answer.send(Published::Confirmed).unwrap();
    first.wait_for(|status| status.counters.confirmed == 1).await;
    let ends = [first.stop(LEASE).await.counters, second.stop(LEASE).await.counters];
    assert_eq!((ends[0].confirmed, ends[0].stale, ends[1].claimed), (1, 0, 0));
    assert!(rival_asks.0.try_recv().is_err());
}

/// F15: an outage pauses the relay, longer each time, and counts against no event.
#[tokio::test(start_paused = true)]
async fn an_outage_burns_no_attempts() {
    let (store, (publisher, mut asks)) = (memory(), told());
    (0..9).for_each(|n| commit(&**store.store(), n, n % 3, START));
    let relay = RelayTask::spawn(store.clone(), publisher, settings("relay-1"), tokio_clock(START))
        .unwrap();
    let began = Instant::now();
    for outage in 1..=40 {
        // The first time all keys are under way, later it is one event that tries.
        for _ in 0..if outage == 1 { 3 } else { 1 } {
            let (_, answer) = asks.next().await;
            answer.send(Published::Unavailable(Reason::new("the broker is away"))).unwrap();
        }
        let paused =
            relay.wait_for(|status| status.phase == Phase::Paused && status.publishing == 0).await;
        assert_eq!((paused.phase, paused.counters.failed), (Phase::Paused, 0));
        assert!(asks.0.try_recv().is_err(), "it goes on in a pause");
    }
    assert!(
        began.elapsed() > settings("any").pause_cap * 30,
        "F13: it does not rest: {:?}",
        began.elapsed()
    );
    let (id, answer) = asks.next().await;
    relay.wait_for(|status| status.publishing == 1).await;
    let rows = outbox(&**store.store());
    assert_eq!((id.as_str(), rows.len()), ("e0", 9));
    assert!(rows.iter().all(|row| row.failures == 0 && row.starts == 0), "F15: {rows:?}");
    answer.send(Published::Confirmed).unwrap();
    for _ in 0..8 {
        asks.confirm().await;
    }
    relay.wait_for(|status| status.counters.confirmed == 9).await;
    let counters = relay.stop(LEASE).await.counters;
    assert_eq!(
        (counters.confirmed, counters.failed, counters.dead, counters.unavailable),
        (9, 0, 0, 42)
    );
}

/// F12: what was not published is released at once, what is being published is waited for, and
/// nothing is counted.
#[tokio::test(start_paused = true)]
async fn a_stop_waits_for_what_is_under_way_and_releases_the_rest() {
    let (store, (publisher, mut asks), (rival, mut rival_asks)) = (memory(), told(), told());
    commit(&**store.store(), 0, 0, START);
    commit(&**store.store(), 1, 0, START);
    let relay = RelayTask::spawn(store.clone(), publisher, settings("relay-1"), tokio_clock(START))
        .unwrap();
    let (id, answer) = asks.next().await;
    assert_eq!(id, "e0");
    relay.request_stop(LEASE * 4);
    relay.wait_for(|status| status.phase == Phase::Stopping).await;
    commit(&**store.store(), 2, 2, START);
    relay.waker().wake();
    let rival =
        RelayTask::spawn(store.clone(), rival, settings("relay-2"), tokio_clock(START)).unwrap();
    assert_eq!(rival_asks.confirm().await, "e2");
    sleep(LEASE * 3).await;
    answer.send(Published::Confirmed).unwrap();
    let end = relay.join().await;
    assert_eq!((end.phase, end.publishing, end.error), (Phase::Stopped, 0, None));
    assert_eq!((end.counters.confirmed, end.counters.failed), (1, 0));
    assert!(asks.0.try_recv().is_err(), "it went on after it was told to stop");
    rival.waker().wake();
    assert_eq!(rival_asks.confirm().await, "e1");
    rival.wait_for(|status| status.counters.confirmed == 2).await;
    assert_eq!(outbox(&**store.store()), []);
}

/// F12: when its patience has ended it drops and releases what is still being published, and counts
/// no failure.
#[tokio::test(start_paused = true)]
async fn a_stop_gives_up_on_a_publish_that_hangs() {
    let (store, (publisher, mut asks), (rival, mut rival_asks)) = (memory(), told(), told());
    commit(&**store.store(), 1, 1, START);
    let relay = RelayTask::spawn(store.clone(), publisher, settings("relay-1"), tokio_clock(START))
        .unwrap();
    let (_, answer) = asks.next().await;
    let began = Instant::now();
    let end = relay.stop(LEASE * 3).await;
    assert_eq!(began.elapsed().as_secs(), (LEASE * 3).as_secs());
    assert_eq!((end.phase, end.publishing, end.error), (Phase::Stopped, 1, None));
    assert_eq!((end.counters.confirmed, end.counters.failed), (0, 0));
    let [row] = &outbox(&**store.store())[..] else { panic!("it is pending") };
    assert_eq!((row.failures, row.starts), (0, 0));
    // The publish was dropped, and nobody waits for its answer.
    let mut answer = answer;
    timeout(LEASE, answer.closed()).await.unwrap();
    let rival =
        RelayTask::spawn(store.clone(), rival, settings("relay-2"), tokio_clock(START)).unwrap();
    assert_eq!(rival_asks.confirm().await, "e1");
    rival.wait_for(|status| status.counters.confirmed == 1).await;
}

/// F12: to drop the handle, or a stop that is waited for, is a stop without patience.
#[tokio::test(start_paused = true)]
async fn a_relay_that_is_dropped_stops_at_once() {
    for drop_a_stop in [false, true] {
        let (store, (publisher, mut asks), (rival, mut rival_asks)) = (memory(), told(), told());
        commit(&**store.store(), 1, 1, START);
        let relay =
            RelayTask::spawn(store.clone(), publisher, settings("relay-1"), tokio_clock(START))
                .unwrap();
        let _never_answered = asks.next().await;
        let mut status = relay.watch();
        if drop_a_stop {
            assert!(timeout(LEASE, relay.stop(HOUR)).await.is_err());
        } else {
            drop(relay);
        }
        let began = Instant::now();
        status.wait_for(|status| status.phase == Phase::Stopped).await.unwrap();
        let rival = RelayTask::spawn(store.clone(), rival, settings("relay-2"), tokio_clock(START))
            .unwrap();
        assert_eq!(rival_asks.confirm().await, "e1");
        assert!(began.elapsed() < LEASE / 10, "its lease was not released");
        rival.wait_for(|status| status.counters.confirmed == 1).await;
    }
}

/// Events are announced while the relay rests, and while a claim is under way that does not see
/// them.
#[tokio::test(start_paused = true)]
async fn a_wakeup_delivers_without_waiting_for_the_poll() {
    let (store, (publisher, mut asks)) = (Arc::new(Flaky::default()), told());
    let relay = RelayTask::spawn(store.clone(), publisher, settings("relay-1"), tokio_clock(START))
        .unwrap();
    let (clock, waker, began) = (tokio_clock(START), relay.waker(), Instant::now());
    store.set_delay(Duration::from_millis(500));
    for n in 0..50 {
        commit(&*store.inner, n, n, clock().wall);
        waker.wake();
        sleep(Duration::from_millis(100 * (n as u64 % 9))).await;
        commit(&*store.inner, n + 100, n + 100, clock().wall);
        waker.wake();
        let both = BTreeSet::from([asks.confirm().await, asks.confirm().await]);
        assert_eq!(both, BTreeSet::from([format!("e{n}"), format!("e{}", n + 100)]));
    }
    assert!(began.elapsed() < HOUR / 10, "it waited: {:?}", began.elapsed());
    relay.wait_for(|status| status.counters.confirmed == 100).await;
    assert_eq!(relay.stop(LEASE).await.counters.confirmed, 100);
}

#[tokio::test(start_paused = true)]
async fn the_poll_finds_what_nobody_has_announced() {
    let (store, (publisher, mut asks)) = (memory(), told());
    let settings = RelaySettings { poll: LEASE, ..settings("relay-1") };
    let relay = RelayTask::spawn(store.clone(), publisher, settings, tokio_clock(START)).unwrap();
    let clock = tokio_clock(START);
    for n in 0..5 {
        sleep(LEASE * 2).await;
        commit(&**store.store(), n, n, clock().wall);
        let began = Instant::now();
        assert_eq!(asks.confirm().await, format!("e{n}"));
        assert!(began.elapsed() <= LEASE + Duration::from_millis(10), "{:?}", began.elapsed());
    }
    relay.stop(LEASE).await;
}

/// A store whose ways of failing are switched on and off, and which takes its time. Others may
/// write while a transaction is open; what then does not fit together fails in the commit.
#[derive(Default)]
struct Flaky {
    inner: Arc<MemoryStore>,
    fault: Mutex<Option<Fault>>,
    delay: Mutex<Duration>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Begin,
    Commit,
    /// It takes, and the answer is lost.
    CommitTakes,
    Panic,
}

#[derive(Debug, thiserror::Error)]
#[error("the network is away")]
struct Away;

impl StoreError for Away {}

impl Flaky {
    fn on(inner: Arc<MemoryStore>) -> Self {
        Self { inner, ..Self::default() }
    }

    fn set(&self, fault: Option<Fault>) {
        *self.fault.lock().unwrap() = fault;
    }

    fn set_delay(&self, delay: Duration) {
        *self.delay.lock().unwrap() = delay;
    }

    fn fails(&self, fault: Fault) -> Result<(), Away> {
        if *self.fault.lock().unwrap() == Some(fault) { Err(Away) } else { Ok(()) }
    }

    async fn wait(&self) {
        let delay = *self.delay.lock().unwrap();
        sleep(delay).await;
    }
}

struct FlakyView(<MemoryStore as Reader>::View<'static>);

struct FlakyTx<'a> {
    store: &'a Flaky,
    fork: MemoryStore,
    batches: Vec<Batch>,
}

fn apply(store: &MemoryStore, batches: &[Batch]) -> Applied {
    let mut tx = Store::begin(store).unwrap();
    for batch in batches {
        if let Applied::Conflict(key) = tx.apply(batch).unwrap() {
            return Applied::Conflict(key);
        }
    }
    tx.commit().unwrap();
    Applied::Written
}

impl AsyncLoad for FlakyView {
    type Error = Away;
    async fn load(&mut self, query: &Query) -> Result<Rows, Away> {
        Ok(self.0.load(query).unwrap())
    }
}

impl AsyncReader for Flaky {
    type Error = Away;
    type View<'a> = FlakyView;
    async fn view(&self) -> Result<FlakyView, Away> {
        Ok(FlakyView(self.inner.state()))
    }
}

impl AsyncStore for Flaky {
    type Tx<'a> = FlakyTx<'a>;
    async fn begin(&self) -> Result<FlakyTx<'_>, Away> {
        assert!(self.fails(Fault::Panic).is_ok(), "this is part of the test");
        self.fails(Fault::Begin)?;
        Ok(FlakyTx {
            store: self,
            fork: MemoryStore::from_state(self.inner.state()),
            batches: Vec::new(),
        })
    }
}

impl AsyncLoad for FlakyTx<'_> {
    type Error = Away;
    async fn load(&mut self, query: &Query) -> Result<Rows, Away> {
        let rows = self.fork.state().load(query).unwrap();
        self.store.wait().await;
        Ok(rows)
    }
}

impl AsyncTables for FlakyTx<'_> {
    async fn apply(&mut self, batch: &Batch) -> Result<Applied, Away> {
        self.batches.push(batch.clone());
        Ok(apply(&self.fork, std::slice::from_ref(batch)))
    }
}

impl AsyncTransaction for FlakyTx<'_> {
    async fn commit(self) -> Result<(), Away> {
        self.store.fails(Fault::Commit)?;
        match apply(&self.store.inner, &self.batches) {
            Applied::Written => self.store.fails(Fault::CommitTakes),
            Applied::Conflict(_) => Err(Away),
        }
    }
}

/// F11: a store that fails makes the relay pause and say why; when it is back, everything goes on,
/// and nothing is counted.
#[tokio::test(start_paused = true)]
async fn a_store_that_fails_is_waited_for() {
    for fault in [Fault::Begin, Fault::Commit, Fault::CommitTakes, Fault::Panic] {
        let (store, (publisher, mut asks)) = (Arc::new(Flaky::default()), told());
        // A claim that takes unnoticed is a start without an answer (F4), and here there are many.
        let relay =
            RelayTask::spawn(store.clone(), publisher, patient("relay-1"), tokio_clock(START))
                .unwrap();
        let clock = tokio_clock(START);
        let inner = store.inner.clone();
        commit(&*inner, 1, 1, START);
        relay.waker().wake();
        let (id, answer) = asks.next().await;
        assert_eq!(id, "e1", "{fault:?}");
        store.set(Some(fault));
        commit(&*inner, 2, 2, clock().wall);
        relay.waker().wake();
        answer.send(Published::Confirmed).unwrap();
        let away =
            timeout(HOUR, relay.wait_for(|status| status.phase == Phase::StoreAway)).await.unwrap();
        let said = away.error.unwrap().to_string();
        let wanted =
            if fault == Fault::Panic { "the store panicked" } else { "the network is away" };
        assert!(said.contains(wanted), "{fault:?}: {said}");
        sleep(HOUR / 4).await;
        let failures = relay.status().counters.store_failures;
        assert!(
            (2..200).contains(&failures),
            "{fault:?}: it does not rest, or tries no more: {failures}"
        );
        store.set(None);
        commit(&*inner, 3, 3, clock().wall);
        // What was confirmed while the store was away may come again (P9), what took unnoticed ends
        // with its lease, which is the longer the more often that was (F30).
        let longest = DeliveryPolicy::default().backoff_cap;
        let began = Instant::now();
        while !outbox(&*inner).is_empty() && began.elapsed() < longest + LEASE * 4 {
            let _nothing_yet = timeout(LEASE / 10, asks.confirm()).await;
        }
        assert_eq!(outbox(&*inner), [], "F11: {fault:?}");
        let end = relay.stop(LEASE).await;
        assert_eq!((end.counters.failed, end.counters.dead, end.error), (0, 0, None), "{fault:?}");
    }
}

/// A store that does not come back does not keep a relay from stopping, and it says that its leases
/// are left.
#[tokio::test(start_paused = true)]
async fn a_stop_ends_without_the_store() {
    let (store, (publisher, mut asks)) = (Arc::new(Flaky::default()), told());
    commit(&*store.inner, 1, 1, START);
    let relay = RelayTask::spawn(store.clone(), publisher, settings("relay-1"), tokio_clock(START))
        .unwrap();
    let (_, answer) = asks.next().await;
    store.set(Some(Fault::Begin));
    answer.send(Published::Confirmed).unwrap();
    let began = Instant::now();
    let end = relay.stop(LEASE).await;
    assert_eq!(began.elapsed().as_secs(), LEASE.as_secs());
    assert_eq!((end.phase, end.counters.confirmed), (Phase::Stopped, 0));
    assert!(end.error.unwrap().as_str().contains("the network is away"));
}

/// F3, P6: a relay that cannot renew loses its lease to another one, and drops the publish that it
/// has no right to any more.
#[tokio::test(start_paused = true)]
async fn a_publish_under_a_lost_lease_is_dropped() {
    let (shared, (publisher, mut asks), (rival, mut rival_asks)) =
        (Arc::new(MemoryStore::new()), told(), told());
    let store = Arc::new(Flaky::on(shared.clone()));
    commit(&*shared, 1, 1, START);
    commit(&*shared, 2, 1, START);
    let relay = RelayTask::spawn(store.clone(), publisher, settings("relay-1"), tokio_clock(START))
        .unwrap();
    let (_, mut answer) = asks.next().await;
    store.set(Some(Fault::Begin));
    let eager = RelaySettings { poll: Duration::from_secs(1), ..settings("relay-2") };
    let rival = RelayTask::spawn(
        Arc::new(Blocking::from(shared.clone())),
        rival,
        eager,
        tokio_clock(START),
    )
    .unwrap();
    let (id, rival_answer) = rival_asks.next().await;
    assert_eq!(id, "e1");
    store.set(None);
    timeout(LEASE * 2, answer.closed())
        .await
        .expect("the publish goes on under a lease that is lost");
    let lost = relay.wait_for(|status| status.counters.stale == 1).await;
    assert_eq!((lost.counters.stale, lost.counters.failed), (1, 0));
    rival_answer.send(Published::Confirmed).unwrap();
    rival.wait_for(|status| status.counters.confirmed == 1).await;
    assert!(asks.0.try_recv().is_err(), "P4");
    // What was dropped is not waited for: its lane goes on, wherever its next event is claimed.
    assert_eq!(rival_asks.confirm().await, "e2");
    rival.wait_for(|status| status.counters.confirmed == 2).await;
    rival.stop(LEASE).await;
    commit(&*shared, 3, 1, START);
    relay.waker().wake();
    assert_eq!(asks.confirm().await, "e3");
    let end = relay.wait_for(|status| status.counters.confirmed == 1).await;
    assert_eq!((end.counters.confirmed, end.publishing), (1, 0));
}

/// F3: a call goes on as long as one of its events is still under a lease of its relay, and what
/// came of the others is theirs to find out who have them now.
#[tokio::test(start_paused = true)]
async fn a_batch_goes_on_if_one_of_its_leases_is_lost() {
    let (shared, (publisher, mut asks), (rival, mut rival_asks)) =
        (Arc::new(MemoryStore::new()), told(), told());
    let store = Arc::new(Flaky::on(shared.clone()));
    commit(&*shared, 1, 1, START);
    commit(&*shared, 2, 2, START);
    let batches = Batches { told: publisher, most: 2, calls: Arc::default() };
    let relay =
        RelayTask::spawn(store.clone(), batches, settings("relay-1"), tokio_clock(START)).unwrap();
    let (id, answer) = asks.next().await;
    assert_eq!(id, "e1");
    store.set(Some(Fault::Begin));
    let window = RelaySettings { window: 1, run: 1, ..settings("relay-2") };
    let eager = RelaySettings { poll: Duration::from_secs(1), ..window };
    let rival =
        RelayTask::spawn(Blocking::from(shared.clone()), rival, eager, tokio_clock(START)).unwrap();
    let (id, rival_answer) = rival_asks.next().await;
    assert_eq!(id, "e1");
    store.set(None);
    relay.wait_for(|status| status.counters.stale == 1).await;
    answer.send(Published::Confirmed).expect("the call goes on");
    assert_eq!(asks.confirm().await, "e2");
    let one = relay.wait_for(|status| status.counters.confirmed == 1).await;
    assert_eq!((one.counters.confirmed, one.counters.stale, one.publishing), (1, 1, 0));
    rival_answer.send(Published::Confirmed).unwrap();
    rival.wait_for(|status| status.counters.confirmed == 1).await;
    assert_eq!(outbox(&*shared), []);
}

/// F25: such a call is dropped when the rest of it is overdue, and keeps no slot.
#[tokio::test(start_paused = true)]
async fn f25_a_batch_with_a_lost_lease_is_dropped_when_it_hangs() {
    let (shared, (publisher, mut asks)) = (Arc::new(MemoryStore::new()), told());
    let store = Arc::new(Flaky::on(shared.clone()));
    commit(&*shared, 1, 1, START);
    commit(&*shared, 2, 2, START);
    let batches = Batches { told: publisher, most: 2, calls: Arc::default() };
    let impatient = RelaySettings { publish_timeout: LEASE * 9, ..settings("relay-1") };
    let relay = RelayTask::spawn(store.clone(), batches, impatient, tokio_clock(START)).unwrap();
    let (_, mut answer) = asks.next().await;
    store.set(Some(Fault::Begin));
    // Its leases run out, and another takes the first of its lanes.
    sleep(LEASE + Duration::from_secs(1)).await;
    let policy = Checked::<DeliveryPolicy>::default();
    let now = START + (LEASE + Duration::from_secs(1));
    let claim = Claim::new(&policy, Owner::new("relay-2").unwrap(), LEASE, 1).unwrap();
    let rival = shared.run(claim, now).unwrap().leased.remove(0);
    let settle = Settle::new(&policy, [rival.settle(1, None)]);
    assert_eq!(shared.run(settle, now).unwrap().confirmed, 1);
    store.set(None);
    relay.wait_for(|status| status.counters.stale == 1).await;
    timeout(LEASE * 10, answer.closed()).await.expect("F25: it hangs for ever");
    let end = relay.wait_for(|status| status.publishing == 0).await;
    assert_eq!((end.phase, end.error), (Phase::Running, None));
    assert_eq!((end.counters.overdue, end.hung), (1, 0));
}

/// A publisher that likes so many at once, and writes down how many it got.
struct Batches {
    told: Told,
    most: usize,
    calls: Arc<Mutex<Vec<usize>>>,
}

impl AsyncPublisher for Batches {
    fn batch(&self) -> usize {
        self.most
    }

    async fn publish(&self, batch: &[Message], now: Millis) -> Vec<Published> {
        self.calls.lock().unwrap().push(batch.len());
        self.told.publish(batch, now).await
    }
}

/// A publisher gets what is ready together, as many as it likes: 1 if it does not say.
#[tokio::test(start_paused = true)]
async fn a_publisher_gets_as_many_as_it_likes() {
    for (most, wanted) in [(0, vec![1; 10]), (1, vec![1; 10]), (4, vec![4, 4, 2]), (256, vec![10])]
    {
        let (store, (told, mut asks)) = (memory(), told());
        (0..10).for_each(|n| commit(&**store.store(), n, n, START));
        let calls = Arc::new(Mutex::new(Vec::new()));
        let batches = Batches { told, most, calls: calls.clone() };
        let relay = RelayTask::spawn(store, batches, settings("relay-1"), tokio_clock(START));
        let relay = relay.unwrap();
        for _ in 0..10 {
            asks.confirm().await;
        }
        relay.wait_for(|status| status.counters.confirmed == 10).await;
        assert_eq!(*calls.lock().unwrap(), wanted);
        assert_eq!(relay.stop(LEASE).await.counters.failed, 0);
    }
}

/// A panic counts as failed for the events of its call, and for no others.
#[tokio::test(start_paused = true)]
async fn a_panic_fails_the_events_of_its_call() {
    struct Panics(Mutex<bool>);
    impl AsyncPublisher for Panics {
        fn batch(&self) -> usize {
            4
        }
        async fn publish(&self, batch: &[Message], _now: Millis) -> Vec<Published> {
            let first = std::mem::take(&mut *self.0.lock().unwrap());
            assert!(!first, "this is part of the test");
            vec![Published::Confirmed; batch.len()]
        }
    }
    let store = memory();
    (0..10).for_each(|n| commit(&**store.store(), n, n, START));
    let publisher = Panics(Mutex::new(true));
    let relay =
        RelayTask::spawn(store, publisher, settings("relay-1"), tokio_clock(START)).unwrap();
    relay.wait_for(|status| status.counters.confirmed == 10).await;
    let end = relay.stop(LEASE).await.counters;
    assert_eq!((end.confirmed, end.failed, end.dead), (10, 4, 0));
}

/// A consumer in the same process, which writes down what it handles.
#[derive(Clone, Default)]
struct Ledger(Arc<Mutex<BTreeMap<OrderingKey, Vec<EventId>>>>);

impl<X: AsyncTables> AsyncHandler<X> for Ledger {
    type Error = Reason;

    async fn handle(
        &mut self,
        _tx: &mut AsyncWriting<'_, X>,
        message: &Message,
    ) -> Result<Handled, Reason> {
        let mut handled = self.0.lock().unwrap();
        let of_key = handled.entry(message.event.ordering_key.clone()).or_default();
        of_key.push(message.event.id.clone());
        Ok(Handled::Effect(message.event.body.clone()))
    }
}

/// P4, P5: a consumer in the same process, behind an inbox, which loses some answers and is not
/// reached at times: when nothing is pending, each event has been applied once.
#[tokio::test(start_paused = true)]
async fn consumers_in_the_same_process() {
    let (store, ledger, dice) = (redb(), Ledger::default(), Arc::new(Mutex::new(4_711)));
    (0..40).for_each(|n| commit(&**store.store(), n, n % 4, START));
    let inbox = Inbox::new(store.clone(), Consumer::new("loyalty").unwrap()).in_order();
    let consumer = InProcess::new_async(inbox, ledger.clone()).with_faults(move |_: &Message| {
        let failed = Published::Failed(Reason::new("the answer was lost"));
        match rng(&mut dice.lock().unwrap()) % 10 {
            0 => Some(twobox::Fault::Instead(failed)),
            1 | 2 => Some(twobox::Fault::After(failed)),
            _ => None,
        }
    });
    let relay =
        RelayTask::spawn(store.clone(), consumer, patient("relay-1"), tokio_clock(START)).unwrap();
    let done = relay.wait_for(|status| status.counters.confirmed == 40);
    timeout(HOUR * 24, done).await.expect("P3: not all of it came");
    let end = relay.stop(LEASE).await;
    assert!(end.counters.failed > 0, "nothing failed, so nothing was tested");
    assert_eq!((end.counters.dead, outbox(&**store.store()).len()), (0, 0));
    let dump = Dump::of(&mut store.store().view().unwrap()).unwrap();
    assert_eq!((dump.count(Table::Inbox), dump.count(Table::Effects)), (40, 40));
    for (lane, events) in &*ledger.0.lock().unwrap() {
        let wanted: Vec<EventId> = (0..40)
            .filter(|n| key_of(n % 4) == *lane)
            .map(|n| EventId::new(format!("e{n}")).unwrap())
            .collect();
        assert_eq!(*events, wanted, "{lane}");
    }
}

/// F25: a publish that never ends is dropped when its time is over, has failed, and keeps nothing
/// else from being published, also where it takes the only slot.
#[tokio::test(start_paused = true)]
async fn f25_what_hangs_is_dropped() {
    let (store, (publisher, mut asks)) = (memory(), told());
    let settings = RelaySettings {
        publishes: 2,
        publish_timeout: Duration::from_secs(10),
        ..settings("relay-1")
    };
    let relay = RelayTask::spawn(store.clone(), publisher, settings, tokio_clock(START)).unwrap();
    store.call(|store| (0..12).for_each(|n| commit(store, n, n, START))).await.unwrap();
    relay.waker().wake();
    let hung = [asks.next().await, asks.next().await];
    let began = Instant::now();
    for _ in 2..12 {
        asks.confirm().await;
    }
    assert_eq!(began.elapsed().as_secs(), 10, "F25: the others go on when these are overdue");
    let status = relay.wait_for(|status| status.counters.confirmed == 10).await;
    assert_eq!((status.hung, status.counters.overdue, status.counters.failed), (0, 2, 2));
    assert!(hung.into_iter().all(|(_, answer)| answer.is_closed()), "their futures are dropped");
    // They come again after their backoff.
    asks.confirm().await;
    asks.confirm().await;
    relay.wait_for(|status| status.counters.confirmed == 12).await;
}

/// F26, P10: events that take long keep no others waiting, however many of their keys the relay
/// holds.
#[tokio::test(start_paused = true)]
async fn f26_slow_keys_keep_no_other_waiting() {
    let (store, (publisher, mut asks)) = (memory(), told());
    let small = RelaySettings { window: 32, run: 8, ..settings("relay-1") };
    let relay = RelayTask::spawn(store.clone(), publisher, small, tokio_clock(START)).unwrap();
    store.call(|store| (0..90).for_each(|n| commit(store, n, n % 9, START))).await.unwrap();
    relay.waker().wake();
    let mut slow = Vec::new();
    for _ in 0..9 {
        slow.push(asks.next().await);
    }
    let began = Instant::now();
    store.call(|store| (100..200).for_each(|n| commit(store, n, n, START))).await.unwrap();
    relay.waker().wake();
    for _ in 100..200 {
        let id = asks.confirm().await;
        assert_eq!(id.len(), "e100".len(), "one of the others: {id}");
    }
    assert_eq!(began.elapsed(), Duration::ZERO, "F26");
    relay.wait_for(|status| status.counters.confirmed == 100).await;
}
