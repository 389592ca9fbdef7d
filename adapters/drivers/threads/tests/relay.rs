//! The relay on threads: what it promises while publishers are slow, fail, panic or hang, and the
//! store comes and goes.
//!
//! The clock is set by hand, and nothing sleeps: tests wait for what happens. Polls are an hour
//! away, so what is delivered was not found by chance.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, Weak};
use std::time::Duration;

use redb::StorageBackend;
use twobox::relay::{Counters, Phase, Published, Publisher, RelaySettings};
use twobox::{
    Applied, Batch, Body, Claim, CommitOrder, Consumer, DeliveryPolicy, Draft, Dump, EventId,
    EventState, Fingerprint, Handled, InProcess, Inbox, Load, Message, Millis, Moment, OrderId,
    OrderingKey, OutboxRow, Owner, Query, Reader, Reason, Receipt, Request, Rows, Store,
    StoreError, Table, Tables, Transaction,
};
use twobox_memory::MemoryStore;
use twobox_redb::{RedbOptions, RedbStore};
use twobox_threads::{RelayThread, SpawnError, Waker};

const HOUR: Duration = Duration::from_secs(3_600);
const LEASE: Duration = Duration::from_secs(30);

/// A clock that is set by hand. To set it is to wait until each relay has looked at it, so that
/// however the threads are scheduled, a relay gets on with each step of the clock.
#[derive(Clone, Default)]
struct Clock(Arc<(AtomicU64, Relays)>);

/// Those that look at a clock: how to tell them, and when they have looked.
type Relays = Mutex<Vec<(Waker, Weak<Looked>)>>;

/// The latest time at which a relay has looked.
#[derive(Default)]
struct Looked(Mutex<u64>, Condvar);

impl Looked {
    fn see(&self, value: u64) {
        let mut seen = self.0.lock().unwrap();
        *seen = value.max(*seen);
        self.1.notify_all();
    }

    /// A relay that has stopped looks no more, so the wait has an end.
    fn wait_for(&self, value: u64) {
        let seen = self.0.lock().unwrap();
        drop(
            self.1
                .wait_timeout_while(seen, Duration::from_millis(200), |seen| *seen < value)
                .unwrap(),
        );
    }
}

impl Clock {
    fn now(&self) -> Millis {
        Millis::new(1_000_000 + self.0.0.load(Ordering::SeqCst))
    }

    fn advance(&self, span: Duration) {
        self.0.0.fetch_add(span.as_millis() as u64, Ordering::SeqCst);
        let relays = self.0.1.lock().unwrap();
        relays.iter().for_each(|(waker, _)| waker.clock_moved());
        relays
            .iter()
            .filter_map(|(_, seen)| seen.upgrade())
            .for_each(|seen| seen.wait_for(self.now().get()));
    }

    fn relay<S: Store + Send + Sync + 'static, P: Publisher + Send + 'static>(
        &self,
        store: &Arc<S>,
        publishers: impl IntoIterator<Item = P>,
        settings: RelaySettings,
    ) -> RelayThread {
        let publishers: Vec<P> = publishers.into_iter().collect();
        self.relay_of(store, publishers.len(), publishers, settings)
    }

    /// With more publishers than workers.
    fn relay_of<S: Store + Send + Sync + 'static, P: Publisher + Send + 'static>(
        &self,
        store: &Arc<S>,
        workers: usize,
        publishers: Vec<P>,
        settings: RelaySettings,
    ) -> RelayThread {
        let (clock, seen) = (self.clone(), Arc::new(Looked::default()));
        let weak = Arc::downgrade(&seen);
        let look = move || {
            let now = clock.now();
            seen.see(now.get());
            Moment::steady(now)
        };
        let relay = RelayThread::spawn(store.clone(), workers, publishers, settings, look).unwrap();
        self.0.1.lock().unwrap().push((relay.waker(), weak));
        relay
    }
}

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
    commit_body(store, n, lane, n.to_string(), now);
}

fn commit_body<S: Store>(store: &S, n: usize, lane: usize, body: String, now: Millis) {
    let request =
        Request::new("test", format!("req-{n}"), Fingerprint::of([("n", n.to_string())])).unwrap();
    let body = Body::text(body).unwrap();
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

/// A publisher that says what it is asked, and does as it is told.
struct Told {
    asked: Sender<String>,
    answers: Arc<Mutex<Receiver<Published>>>,
}

/// Publishers that are told what to answer, what they are asked, and the way to tell them.
fn told(publishers: usize) -> (Vec<Told>, Receiver<String>, Sender<Published>) {
    let (asked, asks) = channel();
    let (tell, answers) = channel();
    let answers = Arc::new(Mutex::new(answers));
    let told =
        (0..publishers).map(|_| Told { asked: asked.clone(), answers: answers.clone() }).collect();
    (told, asks, tell)
}

impl Publisher for Told {
    fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
        batch
            .iter()
            .map(|message| {
                let _nobody_listens = self.asked.send(message.event.id.to_string());
                // A test that has ended waits for no answer.
                self.answers.lock().unwrap().recv().unwrap_or(Published::Abandoned)
            })
            .collect()
    }
}

fn rng(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// What the publishers of a test saw, in the order in which it began and ended, and the confirmed
/// events of each key.
#[derive(Default)]
struct Seen {
    publishing: BTreeMap<OrderingKey, u64>,
    confirmed: BTreeMap<OrderingKey, Vec<u64>>,
    /// What was not as promised: a panic of a publisher would not fail the test.
    wrong: Vec<String>,
    dice: u64,
}

/// A publisher that confirms, fails or panics as the dice say, and lets others go first.
struct Unreliable(Arc<Mutex<Seen>>);

impl Publisher for Unreliable {
    fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
        let message = &batch[0];
        let key = message.event.ordering_key.clone();
        let mut seen = self.0.lock().unwrap();
        if batch.len() > 1 || seen.publishing.insert(key.clone(), message.place.sequence).is_some()
        {
            seen.wrong.push(format!("P4: {key} is published twice at a time"));
        }
        let turns = rng(&mut seen.dice) % 50;
        drop(seen);
        (0..turns).for_each(|_| std::thread::yield_now());
        let mut seen = self.0.lock().unwrap();
        seen.publishing.remove(&key);
        match rng(&mut seen.dice) % 10 {
            0 | 1 => vec![Published::Failed(Reason::new("it failed"))],
            2 => vec![],
            3 => {
                drop(seen);
                panic!("this is part of the test")
            }
            _ => {
                seen.confirmed.entry(key).or_default().push(message.place.sequence);
                vec![Published::Confirmed]
            }
        }
    }
}

/// P3, P4, F2: whatever the publishers do, each event of a key comes after the one before it, and
/// all come.
fn in_order<S: Store + Send + Sync + 'static>(store: S, seed: u64, lanes: usize, events: usize) {
    let (clock, store) = (Clock::default(), Arc::new(store));
    let seen = Arc::new(Mutex::new(Seen { dice: seed, ..Seen::default() }));
    let relay = clock.relay(&store, (0..4).map(|_| Unreliable(seen.clone())), patient("relay-1"));
    let waker = relay.waker();
    for n in 0..events {
        commit(&*store, n, n % lanes, clock.now());
        waker.wake();
    }
    // Backoffs are waited for by setting the clock.
    let all = events as u64;
    for _ in 0..10_000 {
        let status =
            relay.wait_for(|status| status.counters.confirmed >= all || status.publishing == 0);
        if status.counters.confirmed >= all {
            break;
        }
        clock.advance(Duration::from_millis(200));
        std::thread::yield_now();
    }
    let end = relay.stop(LEASE);
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
}

/// P4: a key waits for its own events only. Two are under way at a time, or this test would not
/// end.
#[test]
fn keys_do_not_wait_for_each_other() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    (0..4).for_each(|n| commit(&*store, n, n % 2, clock.now()));
    let (publishers, asked, answer) = told(2);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    let mut under_way = [asked.recv().unwrap(), asked.recv().unwrap()];
    under_way.sort_unstable();
    assert_eq!(under_way, ["e0", "e1"]);
    (0..4).for_each(|_| answer.send(Published::Confirmed).unwrap());
    relay.wait_for(|status| status.counters.confirmed == 4);
}

#[test]
fn keys_are_in_order_whatever_publishers_do() {
    (1..=5).for_each(|seed| in_order(MemoryStore::new(), seed * 0x9e37_79b9, 7, 60));
}

#[test]
fn keys_are_in_order_on_redb() {
    let store = RedbStore::create_on(redb::backends::InMemoryBackend::new()).unwrap();
    in_order(store, 77, 5, 25);
}

/// A consumer behind an inbox, which loses answers.
struct Lossy<S> {
    consumer: Arc<S>,
    dice: Arc<Mutex<u64>>,
    wrong: Arc<Mutex<Vec<Receipt>>>,
}

impl<S: Store> Publisher for Lossy<S> {
    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published> {
        let inbox = Inbox::new(&*self.consumer, Consumer::new("loyalty").unwrap()).in_order();
        let receive = |message: &Message| {
            let receipt = inbox
                .receive(message, now, |_, message| {
                    Ok::<_, Reason>(Handled::Effect(message.event.body.clone()))
                })
                .unwrap();
            if !matches!(receipt, Receipt::Applied | Receipt::Duplicate) {
                self.wrong.lock().unwrap().push(receipt);
            }
            if rng(&mut self.dice.lock().unwrap()).is_multiple_of(4) {
                Published::Failed(Reason::new("the answer was lost"))
            } else {
                Published::Confirmed
            }
        };
        batch.iter().map(receive).collect()
    }
}

/// P3, P5, P6: two relays on one store deliver everything at least once, and through an inbox
/// exactly once.
fn two_relays<S: Store + Send + Sync + 'static>(store: S, consumer: S, events: usize) {
    let (clock, store, consumer) = (Clock::default(), Arc::new(store), Arc::new(consumer));
    let (dice, wrong) = (Arc::new(Mutex::new(4_711)), Arc::new(Mutex::new(Vec::new())));
    let relays = ["relay-1", "relay-2"].map(|name| {
        let publishers = (0..2).map(|_| Lossy {
            consumer: consumer.clone(),
            dice: dice.clone(),
            wrong: wrong.clone(),
        });
        clock.relay(&store, publishers, RelaySettings { window: 4, run: 2, ..patient(name) })
    });
    for n in 0..events {
        commit(&*store, n, n % 5, clock.now());
        relays.iter().for_each(|relay| relay.waker().wake());
    }
    let confirmed = || relays.iter().map(|relay| relay.status().counters.confirmed).sum::<u64>();
    let mut rounds = 0;
    while confirmed() < events as u64 {
        rounds += 1;
        assert!(rounds < 100_000, "only {} are confirmed", confirmed());
        relays[rounds % 2].wait_for(|status| status.publishing == 0);
        clock.advance(Duration::from_millis(100));
        relays[rounds % 2].waker().wake();
        std::thread::yield_now();
    }
    let ends = relays.map(|relay| relay.stop(LEASE));
    assert_eq!(ends.iter().map(|end| end.counters.confirmed).sum::<u64>(), events as u64);
    assert_eq!(*wrong.lock().unwrap(), [], "P4: the inbox had to wait for an earlier event");
    assert_eq!(outbox(&*store), []);
    let dump = Dump::of(&mut consumer.view().unwrap()).unwrap();
    assert_eq!((dump.count(Table::Inbox), dump.count(Table::Effects)), (events, events));
}

#[test]
fn two_relays_apply_each_event_once() {
    two_relays(MemoryStore::new(), MemoryStore::new(), 60);
}

#[test]
fn two_relays_apply_each_event_once_on_redb() {
    let store = || RedbStore::create_on(redb::backends::InMemoryBackend::new()).unwrap();
    two_relays(store(), store(), 20);
}

/// A relay that has just begun a publish of `e1`, and another one that would like to.
#[test]
fn a_slow_publish_is_renewed_and_not_claimed_by_another() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    commit(&*store, 1, 1, clock.now());
    let (slow, asked, answer) = told(1);
    let first = clock.relay(&store, slow, settings("relay-1"));
    assert_eq!(asked.recv().unwrap(), "e1");
    let (rival, rival_asked, _rival_answer) = told(1);
    let second = clock.relay(&store, rival, settings("relay-2"));
    for _ in 0..20 {
        // F3: three leases long, in steps of a sixth. The first must have renewed before the second
        // looks.
        let until = || {
            let lane = store.view().unwrap().lane(&key_of(1).into()).unwrap().unwrap();
            lane.lease.unwrap().until
        };
        clock.advance(LEASE / 6);
        for _ in 0..1_000_000 {
            if until() > clock.now() + LEASE / 3 {
                break;
            }
            std::thread::yield_now();
        }
        assert!(until() > clock.now() + LEASE / 3, "F3: the lease was not renewed");
        second.waker().wake();
    }
    answer.send(Published::Confirmed).unwrap();
    first.wait_for(|status| status.counters.confirmed == 1);
    let ends = [first, second].map(|relay| relay.stop(LEASE).counters);
    assert_eq!((ends[0].confirmed, ends[0].stale, ends[1].claimed), (1, 0, 0));
    assert!(rival_asked.try_recv().is_err());
}

/// F15: an outage pauses the relay, longer each time, and counts against no event.
#[test]
fn an_outage_burns_no_attempts() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    (0..9).for_each(|n| commit(&*store, n, n % 3, clock.now()));
    let (publishers, asked, answer) = told(2);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    for outage in 1..=40 {
        // The first time two are under way, later it is one that tries.
        let under_way = if outage == 1 { 2 } else { 1 };
        (0..under_way).for_each(|_| drop(asked.recv().unwrap()));
        (0..under_way).for_each(|_| {
            answer.send(Published::Unavailable(Reason::new("the broker is away"))).unwrap();
        });
        let paused =
            relay.wait_for(|status| status.phase == Phase::Paused && status.publishing == 0);
        assert_eq!((paused.phase, paused.counters.failed), (Phase::Paused, 0));
        clock.advance(settings("any").pause_cap);
    }
    let rows = outbox(&*store);
    assert_eq!(rows.len(), 9);
    assert!(rows.iter().all(|row| row.failures == 0 && row.starts == 0), "F15: {rows:?}");
    (0..9).for_each(|_| answer.send(Published::Confirmed).unwrap());
    relay.wait_for(|status| status.counters.confirmed == 9);
    let Counters { confirmed, failed, dead, unavailable, .. } = relay.stop(LEASE).counters;
    assert_eq!((confirmed, failed, dead, unavailable), (9, 0, 0, 41));
}

/// F12: what was not published is released at once, what is being published is waited for, and
/// nothing is counted.
#[test]
fn a_stop_waits_for_what_is_under_way_and_releases_the_rest() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    (0..6).for_each(|n| commit(&*store, n, n % 3, clock.now()));
    let (publishers, asked, answer) = told(1);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    assert_eq!(asked.recv().unwrap(), "e0");
    relay.request_stop(LEASE);
    relay.wait_for(|status| status.phase == Phase::Stopping && status.publishing == 1);
    // Another relay has the other keys at once, and not the one that is being published.
    let (rivals, rival_asked, rival_answer) = told(3);
    let rival = clock.relay(&store, rivals, settings("relay-2"));
    (0..4).for_each(|_| rival_answer.send(Published::Confirmed).unwrap());
    let mut others: Vec<String> = (0..4).map(|_| rival_asked.recv().unwrap()).collect();
    others.sort_unstable();
    assert_eq!(others, ["e1", "e2", "e4", "e5"]);
    answer.send(Published::Confirmed).unwrap();
    let end = relay.join();
    assert_eq!((end.phase, end.publishing, end.error), (Phase::Stopped, 0, None));
    assert_eq!((end.counters.confirmed, end.counters.failed), (1, 0));
    rival.waker().wake();
    rival_answer.send(Published::Confirmed).unwrap();
    assert_eq!(rival_asked.recv().unwrap(), "e3");
    rival.wait_for(|status| status.counters.confirmed == 5);
    assert_eq!(outbox(&*store), []);
}

/// F12: when its patience has ended it releases what is still being published, and counts no
/// failure.
#[test]
fn a_stop_gives_up_on_a_publish_that_hangs() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    commit(&*store, 1, 1, clock.now());
    let (publishers, asked, answer) = told(1);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    assert_eq!(asked.recv().unwrap(), "e1");
    relay.request_stop(LEASE * 3);
    // Its patience is longer than a lease, which is renewed meanwhile.
    for step in 1..=6 {
        assert_ne!(relay.status().phase, Phase::Stopped, "step {step}");
        clock.advance(LEASE / 2);
    }
    let end = relay.join();
    assert_eq!((end.phase, end.publishing, end.error), (Phase::Stopped, 1, None));
    assert_eq!((end.counters.confirmed, end.counters.failed), (0, 0));
    let [row] = &outbox(&*store)[..] else { panic!("it is pending") };
    assert_eq!((row.failures, row.starts), (0, 0));
    let (rivals, rival_asked, rival_answer) = told(1);
    let rival = clock.relay(&store, rivals, settings("relay-2"));
    assert_eq!(rival_asked.recv().unwrap(), "e1");
    rival_answer.send(Published::Confirmed).unwrap();
    rival.wait_for(|status| status.counters.confirmed == 1);
    // The first publisher still hangs, and ends by itself.
    answer.send(Published::Confirmed).unwrap();
}

#[test]
fn a_relay_that_is_dropped_stops_at_once() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    commit(&*store, 1, 1, clock.now());
    let (publishers, asked, _answer) = told(1);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    assert_eq!(asked.recv().unwrap(), "e1");
    drop(relay);
    let (rivals, rival_asked, rival_answer) = told(1);
    rival_answer.send(Published::Confirmed).unwrap();
    let rival = clock.relay(&store, rivals, settings("relay-2"));
    let mut rounds = 0;
    while rival_asked.try_recv().is_err() {
        rounds += 1;
        assert!(rounds < 1_000_000, "F12: its leases were not released");
        rival.waker().wake();
        std::thread::yield_now();
    }
}

#[test]
fn a_wakeup_delivers_without_waiting_for_the_poll() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    let (publishers, asked, answer) = told(1);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    let waker = relay.waker();
    for n in 0..100 {
        commit(&*store, n, n, clock.now());
        waker.wake();
        answer.send(Published::Confirmed).unwrap();
        assert_eq!(asked.recv().unwrap(), format!("e{n}"));
    }
    assert_eq!(relay.stop(LEASE).counters.confirmed, 100);
}

#[test]
fn the_poll_finds_what_nobody_has_announced() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    let (publishers, asked, answer) = told(1);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    // Its first claim is over when the first event is confirmed.
    for n in 0..5 {
        commit(&*store, n, n, clock.now());
        answer.send(Published::Confirmed).unwrap();
        for _ in 0..1_000_000 {
            if let Ok(id) = asked.try_recv() {
                assert_eq!(id, format!("e{n}"));
                break;
            }
            clock.advance(HOUR);
            std::thread::yield_now();
        }
        let confirmed =
            relay.wait_for(|status| status.counters.confirmed == n as u64 + 1).counters.confirmed;
        assert_eq!(confirmed, n as u64 + 1);
    }
}

/// A store whose ways of failing are switched on and off.
#[derive(Default)]
struct Flaky {
    store: MemoryStore,
    fault: Mutex<Option<Fault>>,
    /// The next commit says that it is there, and takes until it is told.
    slow: Mutex<Option<(Sender<()>, Receiver<()>)>>,
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
#[error("the disk is away")]
struct Away;

impl StoreError for Away {}

impl Flaky {
    fn set(&self, fault: Option<Fault>) {
        *self.fault.lock().unwrap() = fault;
    }

    fn fails(&self, fault: Fault) -> Result<(), Away> {
        if *self.fault.lock().unwrap() == Some(fault) { Err(Away) } else { Ok(()) }
    }
}

struct FlakyTx<'a>(<MemoryStore as Store>::Tx<'a>, &'a Flaky);
struct FlakyView(<MemoryStore as Reader>::View<'static>);

impl Load for FlakyView {
    type Error = Away;
    fn load(&mut self, query: &Query) -> Result<Rows, Away> {
        Ok(self.0.load(query).unwrap())
    }
}

impl Reader for Flaky {
    type Error = Away;
    type View<'a> = FlakyView;
    fn view(&self) -> Result<FlakyView, Away> {
        Ok(FlakyView(self.store.state()))
    }
}

impl Store for Flaky {
    type Tx<'a> = FlakyTx<'a>;
    fn begin(&self) -> Result<FlakyTx<'_>, Away> {
        assert!(self.fails(Fault::Panic).is_ok(), "this is part of the test");
        self.fails(Fault::Begin)?;
        Ok(FlakyTx(self.store.begin().unwrap(), self))
    }
}

impl Load for FlakyTx<'_> {
    type Error = Away;
    fn load(&mut self, query: &Query) -> Result<Rows, Away> {
        Ok(self.0.load(query).unwrap())
    }
}

impl Tables for FlakyTx<'_> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, Away> {
        Ok(self.0.apply(batch).unwrap())
    }
}

impl Transaction for FlakyTx<'_> {
    fn commit(self) -> Result<(), Away> {
        self.1.fails(Fault::Commit)?;
        if let Some((there, told)) = self.1.slow.lock().unwrap().take() {
            there.send(()).unwrap();
            told.recv().unwrap();
        }
        self.0.commit().unwrap();
        self.1.fails(Fault::CommitTakes)
    }
}

/// F11: a store that fails makes the relay pause and say why; when it is back, everything goes on,
/// and nothing is counted.
#[test]
fn a_store_that_fails_is_waited_for() {
    for fault in [Fault::Begin, Fault::Commit, Fault::CommitTakes, Fault::Panic] {
        let (clock, store) = (Clock::default(), Arc::new(Flaky::default()));
        let (publishers, asked, answer) = told(1);
        // A claim that took unnoticed ends with its lease.
        let relay = clock.relay(&store, publishers, settings("relay-1"));
        commit(&store.store, 1, 1, clock.now());
        commit(&store.store, 2, 2, clock.now());
        relay.waker().wake();
        assert_eq!(asked.recv().unwrap(), "e1", "{fault:?}");
        store.set(Some(fault));
        answer.send(Published::Confirmed).unwrap();
        let away = relay.wait_for(|status| status.phase == Phase::StoreAway);
        assert_eq!(away.phase, Phase::StoreAway, "{fault:?}");
        let said = away.error.unwrap().to_string();
        let wanted = if fault == Fault::Panic { "the store panicked" } else { "the disk is away" };
        assert!(said.contains(wanted), "{fault:?}: {said}");
        store.set(None);
        (0..9).for_each(|_| answer.send(Published::Confirmed).unwrap());
        let mut rounds = 0;
        while !outbox(&store.store).is_empty() {
            rounds += 1;
            assert!(rounds < 1_000_000, "F11: {fault:?}, {:?}", outbox(&store.store));
            clock.advance(LEASE / 4);
            std::thread::yield_now();
        }
        let end = relay.stop(LEASE);
        assert_eq!((end.counters.failed, end.counters.dead, end.error), (0, 0, None), "{fault:?}");
        assert!(end.counters.store_failures > 0, "{fault:?}");
    }
}

/// A store that does not come back does not keep a relay from stopping, and it says that its leases
/// are left.
#[test]
fn a_stop_ends_without_the_store() {
    let (clock, store) = (Clock::default(), Arc::new(Flaky::default()));
    commit(&store.store, 1, 1, clock.now());
    let (publishers, asked, _answer) = told(1);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    assert_eq!(asked.recv().unwrap(), "e1");
    store.set(Some(Fault::Begin));
    let end = relay.stop(Duration::ZERO);
    assert_eq!((end.phase, end.publishing), (Phase::Stopped, 1));
    assert!(end.error.unwrap().as_str().contains("the disk is away"));
}

/// P4, P5: consumers in the same process, each with its thread, share an inbox; when nothing is
/// pending, each event has been applied once.
#[test]
fn consumers_in_the_same_process() {
    let (clock, store) = (
        Clock::default(),
        Arc::new(RedbStore::create_on(redb::backends::InMemoryBackend::new()).unwrap()),
    );
    (0..40).for_each(|n| commit(&*store, n, n % 4, clock.now()));
    let handled = Arc::new(Mutex::new(BTreeMap::<OrderingKey, Vec<EventId>>::new()));
    let consumers = (0..3).map(|_| {
        let (inbox, handled) =
            (Inbox::new(store.clone(), Consumer::new("loyalty").unwrap()), handled.clone());
        InProcess::new(inbox, move |_, message: &Message| {
            handled
                .lock()
                .unwrap()
                .entry(message.event.ordering_key.clone())
                .or_default()
                .push(message.event.id.clone());
            Ok::<_, String>(Handled::Effect(message.event.body.clone()))
        })
    });
    let relay = clock.relay(&store, consumers, settings("relay-1"));
    relay.wait_for(|_| outbox(&*store).is_empty());
    let end = relay.stop(LEASE);
    assert_eq!((end.counters.confirmed, end.counters.failed), (40, 0));
    assert_eq!(Dump::of(&mut store.view().unwrap()).unwrap().count(Table::Effects), 40);
    for (lane, events) in &*handled.lock().unwrap() {
        let wanted: Vec<EventId> = (0..40)
            .filter(|n| key_of(n % 4) == *lane)
            .map(|n| EventId::new(format!("e{n}")).unwrap())
            .collect();
        assert_eq!(*events, wanted, "{lane}");
    }
}

/// Who waits for what never comes gives up, and is told how it stands: here behind a dead event
/// (P4).
#[test]
fn a_wait_has_an_end() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    (0..2).for_each(|n| commit(&*store, n, 0, clock.now()));
    let (publishers, asked, answer) = told(1);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    assert_eq!(asked.recv().unwrap(), "e0");
    answer.send(Published::Rejected(Reason::new("no"))).unwrap();
    let dead = relay.wait_at_most(HOUR, |status| status.counters.dead == 1);
    assert_eq!(dead.counters.dead, 1);
    let stuck = relay.wait_at_most(Duration::from_millis(1), |_| outbox(&*store).is_empty());
    assert_eq!(
        (stuck.phase, stuck.counters.confirmed, outbox(&*store).len()),
        (Phase::Running, 0, 1)
    );
    relay.stop(LEASE);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let store = Arc::new(MemoryStore::new());
    let none: [Told; 0] = [];
    let refused = RelayThread::spawn(store.clone(), 1, none, settings("relay-1"), || {
        Moment::steady(Millis::new(1))
    })
    .unwrap_err();
    assert!(matches!(refused, SpawnError::NoPublisher), "{refused}");
    let wrong = RelaySettings { window: 0, ..settings("relay-1") };
    let refused = RelayThread::spawn(store, 1, told(1).0, wrong, || Moment::steady(Millis::new(1)))
        .unwrap_err();
    assert!(matches!(refused, SpawnError::Settings(_)), "{refused}");
}

/// A publisher that likes so many at once, and writes down how many it got.
struct Batches {
    told: Told,
    most: usize,
    calls: Arc<Mutex<Vec<usize>>>,
}

impl Publisher for Batches {
    fn batch(&self) -> usize {
        self.most
    }

    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published> {
        self.calls.lock().unwrap().push(batch.len());
        self.told.publish(batch, now)
    }
}

/// A publisher gets what is ready when it has nothing to do, as many as it likes: 1 if it does not
/// say.
#[test]
fn a_publisher_gets_as_many_as_it_likes() {
    for (most, wanted) in [(0, vec![1; 10]), (1, vec![1; 10]), (4, vec![4, 4, 2]), (64, vec![10])] {
        let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
        (0..10).for_each(|n| commit(&*store, n, n, clock.now()));
        let (mut publishers, _asked, answer) = told(1);
        let calls = Arc::new(Mutex::new(Vec::new()));
        let told = publishers.remove(0);
        let relay = clock.relay(
            &store,
            [Batches { told, most, calls: calls.clone() }],
            settings("relay-1"),
        );
        (0..10).for_each(|_| answer.send(Published::Confirmed).unwrap());
        relay.wait_for(|status| status.counters.confirmed == 10);
        assert_eq!(*calls.lock().unwrap(), wanted);
    }
}

/// A panic counts as failed for the events of its call, and for no others.
#[test]
fn a_panic_fails_the_events_of_its_call() {
    struct Panics(bool);
    impl Publisher for Panics {
        fn batch(&self) -> usize {
            4
        }
        fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
            assert!(!std::mem::take(&mut self.0), "this is part of the test");
            vec![Published::Confirmed; batch.len()]
        }
    }
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    (0..10).for_each(|n| commit(&*store, n, n, clock.now()));
    let relay = clock.relay(&store, [Panics(true)], settings("relay-1"));
    relay.wait_for(|status| status.counters.confirmed == 6 && status.counters.failed == 4);
    let end = relay.stop(LEASE).counters;
    assert_eq!((end.confirmed, end.failed, end.dead), (6, 4, 0));
}

/// F12: a stop without patience gives up on what has begun, and the rest is released as what it is.
#[test]
fn a_stop_gives_up_on_nothing_that_has_not_begun() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    (0..3).for_each(|n| commit(&*store, n, n, clock.now()));
    let (publishers, asked, _answer) = told(1);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    assert_eq!(asked.recv().unwrap(), "e0");
    let end = relay.stop(Duration::ZERO);
    assert_eq!((end.phase, end.publishing, end.error), (Phase::Stopped, 1, None));
    let rows = outbox(&*store);
    assert!(rows.iter().all(|row| (row.starts, row.failures) == (0, 0)), "{rows:?}");
    assert_eq!(rows.len(), 3);
}

/// F3: what no worker has begun when its lease is lost is not begun any more.
#[test]
fn what_waits_under_a_lost_lease_is_taken_back() {
    let (clock, store) = (Clock::default(), Arc::new(Flaky::default()));
    (1..3).for_each(|n| commit(&store.store, n, n, clock.now()));
    let (publishers, asked, answer) = told(1);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    assert_eq!(asked.recv().unwrap(), "e1");
    store.set(Some(Fault::Begin));
    clock.advance(LEASE);
    relay.wait_for(|status| status.phase == Phase::StoreAway);
    // Another relay, without the fault, takes both lanes over.
    let policy = settings("any").policy;
    let claim = Claim::new(&policy, Owner::new("relay-2").unwrap(), LEASE, 8);
    let claimed = store.store.run(claim.unwrap(), clock.now()).unwrap();
    assert_eq!(claimed.leased.len(), 2);
    store.set(None);
    let mut rounds = 0;
    while relay.status().counters.stale < 2 {
        rounds += 1;
        assert!(rounds < 1_000, "P6: {:?}", relay.status());
        clock.advance(LEASE / 6);
    }
    // The first goes on, since nobody can break it off; the second never begins.
    relay.wait_for(|status| status.publishing == 1);
    answer.send(Published::Confirmed).unwrap();
    let end = relay.wait_for(|status| status.publishing == 0);
    assert_eq!((end.counters.confirmed, end.counters.stale), (0, 2));
    relay.stop(LEASE);
    assert!(asked.try_recv().is_err(), "P6: it was published without a lease");
}

/// Publishers that hang with some events, until they are let go, and confirm the others.
#[derive(Clone)]
struct Hanging {
    hangs: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    let_go: Arc<(Mutex<bool>, Condvar)>,
    asked: Sender<String>,
}

impl Hanging {
    fn on(hangs: impl Fn(&str) -> bool + Send + Sync + 'static) -> (Self, Receiver<String>) {
        let (asked, asks) = channel();
        (Self { hangs: Arc::new(hangs), let_go: Arc::default(), asked }, asks)
    }

    fn let_go(&self) {
        *self.let_go.0.lock().unwrap() = true;
        self.let_go.1.notify_all();
    }
}

impl Publisher for Hanging {
    fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
        let publish = |message: &Message| {
            let id = message.event.id.as_str();
            let _nobody_listens = self.asked.send(id.into());
            if (self.hangs)(id) {
                let go = self.let_go.0.lock().unwrap();
                drop(self.let_go.1.wait_while(go, |go| !*go).unwrap());
            }
            Published::Confirmed
        };
        batch.iter().map(publish).collect()
    }
}

const TIMEOUT: Duration = Duration::from_secs(10);

fn impatient(name: &str) -> RelaySettings {
    RelaySettings { publish_timeout: TIMEOUT, ..settings(name) }
}

/// F25: two publishes that never end keep nothing else from being published, as long as there are
/// publishers to take their place; what hangs has failed, is counted, and comes again.
#[test]
fn f25_what_hangs_is_replaced() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    (0..52).for_each(|n| commit(&*store, n, n, clock.now()));
    let (publisher, asks) = Hanging::on(|id| id == "e0" || id == "e1");
    let publishers = vec![publisher.clone(); 4];
    let relay = clock.relay_of(&store, 2, publishers, impatient("relay-1"));
    let mut hung = [asks.recv().unwrap(), asks.recv().unwrap()];
    hung.sort_unstable();
    assert_eq!(hung, ["e0", "e1"]);
    // Until they are overdue, all workers are busy.
    clock.advance(TIMEOUT - Duration::from_millis(1));
    assert_eq!((relay.status().hung, asks.try_recv().is_err()), (0, true));
    clock.advance(Duration::from_millis(1));
    let done = relay.wait_for(|status| status.counters.confirmed == 50);
    assert_eq!((done.hung, done.counters.overdue, done.counters.failed), (2, 2, 2));
    assert_eq!(done.phase, Phase::Running);
    let waiting: Vec<u32> = outbox(&*store).iter().map(|row| row.failures).collect();
    assert_eq!(waiting, [1, 1], "F25: they have failed, and wait for their backoff");
    publisher.let_go();
    relay.wait_for(|status| status.hung == 0);
    clock.advance(HOUR);
    let end = relay.wait_for(|status| status.counters.confirmed == 52);
    assert_eq!((end.hung, outbox(&*store).len()), (0, 0));
}

/// F25: a relay all of whose publishers hang says so, and gives back what it holds: another relay
/// publishes it.
#[test]
fn f25_a_relay_that_is_stuck_leaves_the_rest_to_others() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    (0..20).for_each(|n| commit(&*store, n, n, clock.now()));
    let (stuck, asks) = Hanging::on(|_| true);
    let relay = clock.relay_of(&store, 2, vec![stuck.clone(); 2], impatient("relay-1"));
    let hung = [asks.recv().unwrap(), asks.recv().unwrap()];
    clock.advance(TIMEOUT);
    let status = relay.wait_for(|status| status.phase == Phase::Stuck);
    assert_eq!((status.hung, status.publishing), (2, 2));
    let (well, _) = Hanging::on(|_| false);
    let other = clock.relay_of(&store, 2, vec![well; 2], settings("relay-2"));
    other.wait_for(|status| status.counters.confirmed == 18);
    clock.advance(HOUR);
    other.wait_for(|status| status.counters.confirmed == 20);
    assert_eq!(outbox(&*store), [], "{hung:?} as well");
    // It hears of its publishes at last, and goes on.
    stuck.let_go();
    let again = relay.wait_for(|status| status.hung == 0);
    assert_eq!((again.phase, again.counters.confirmed), (Phase::Running, 0));
}

/// F25: threads that hang are replaced so often, and then no more.
#[test]
fn f25_not_all_threads_of_the_machine_hang() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    (0..20).for_each(|n| commit(&*store, n, n, clock.now()));
    let (publisher, asks) = Hanging::on(|_| true);
    let relay = clock.relay_of(&store, 1, vec![publisher.clone(); 20], impatient("relay-1"));
    for n in 1..5 {
        asks.recv().unwrap();
        clock.advance(TIMEOUT);
        relay.wait_for(|status| status.counters.overdue == n);
    }
    asks.recv().unwrap();
    clock.advance(TIMEOUT);
    let status = relay.wait_for(|status| status.phase == Phase::Stuck);
    assert_eq!((status.hung, status.counters.overdue), (5, 5));
    publisher.let_go();
    relay.wait_for(|status| status.hung == 0 && status.phase == Phase::Running);
}

/// F26, P10: keys that are stuck, with more events than the window has, keep no other key waiting
/// while a worker is free.
#[test]
fn f26_stuck_keys_keep_no_other_waiting() {
    let (clock, store) = (Clock::default(), Arc::new(MemoryStore::new()));
    (0..90).for_each(|n| commit(&*store, n, n % 9, clock.now()));
    let (publisher, asks) = Hanging::on(|id| id != "e90");
    let small = RelaySettings { window: 32, run: 8, ..settings("relay-1") };
    let relay = clock.relay_of(&store, 10, vec![publisher.clone(); 10], small);
    (0..9).for_each(|_| drop(asks.recv().unwrap()));
    commit(&*store, 90, 90, clock.now());
    relay.waker().wake();
    assert_eq!(asks.recv().unwrap(), "e90", "F26");
    publisher.let_go();
    relay.wait_for(|status| status.counters.confirmed == 91);
}

/// F25: what was published in time is not overdue because the store was slow to answer meanwhile.
#[test]
fn f25_a_slow_store_makes_nothing_overdue() {
    // That the answer of the publisher is there before the store's can be seen from nowhere; so it
    // gets ever more time to arrive.
    let overdue = (0..12).map(|round| {
        let (clock, store) = (Clock::default(), Arc::new(Flaky::default()));
        commit(&store.store, 1, 1, clock.now());
        let (publishers, asked, answer) = told(1);
        let relay = clock.relay(&store, publishers, impatient("relay-1"));
        assert_eq!(asked.recv().unwrap(), "e1");
        let ((there, is_there), (tell, told)) = (channel(), channel());
        *store.slow.lock().unwrap() = Some((there, told));
        commit(&store.store, 2, 2, clock.now());
        relay.waker().wake();
        is_there.recv().unwrap();
        answer.send(Published::Confirmed).unwrap();
        std::thread::sleep(Duration::from_millis(1 << round));
        clock.0.0.fetch_add(TIMEOUT.as_millis() as u64, Ordering::SeqCst);
        tell.send(()).unwrap();
        relay.wait_for(|status| status.counters.confirmed + status.counters.overdue == 1);
        relay.stop(Duration::ZERO).counters.overdue
    });
    assert!(overdue.into_iter().any(|overdue| overdue == 0), "the answer was not heard");
}

/// A storage in memory of which one call fails, and then all is well again.
#[derive(Debug, Clone, Default)]
struct FailsOnce(Arc<(redb::backends::InMemoryBackend, Mutex<Option<Call>>)>);

/// A kind of call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Read,
    Write,
    Sync,
}

impl FailsOnce {
    /// The next call of this kind fails.
    fn fail(&self, call: Call) {
        *self.0.1.lock().unwrap() = Some(call);
    }

    /// Whether it has.
    fn has_failed(&self) -> bool {
        self.0.1.lock().unwrap().is_none()
    }

    fn may_fail(&self, call: Call) -> io::Result<()> {
        match self.0.1.lock().unwrap().take_if(|fails| *fails == call) {
            Some(_) => Err(io::Error::other("the disk is gone")),
            None => Ok(()),
        }
    }
}

impl StorageBackend for FailsOnce {
    fn len(&self) -> io::Result<u64> {
        self.0.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.may_fail(Call::Read)?;
        StorageBackend::read(&self.0.0, offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.may_fail(Call::Sync)?;
        self.0.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.may_fail(Call::Write)?;
        StorageBackend::write(&self.0.0, offset, data)
    }
}

/// P3: a call of the disk fails once while a relay settles, and the disk is well again: the relay
/// waits for the store, and goes on by itself.
#[test]
fn f31_a_relay_goes_on_when_the_disk_is_well_again() {
    for call in [Call::Read, Call::Write, Call::Sync] {
        let (clock, disk) = (Clock::default(), FailsOnce::default());
        // With next to no cache it reads much; with enough, it writes in commits alone.
        let cache = if call == Call::Read { 16 << 10 } else { 1 << 20 };
        let options = RedbOptions::new().cache_bytes(cache);
        let store = Arc::new(options.create_on(disk.clone()).unwrap());
        let (publishers, asked, answer) = told(1);
        (0..20).for_each(|n| commit_body(&*store, n, n, "x".repeat(5_000), clock.now()));
        let relay = clock.relay(&store, publishers, settings("relay-1"));
        assert!(asked.recv().is_ok());
        disk.fail(call);
        answer.send(Published::Confirmed).unwrap();
        (0..60).for_each(|_| answer.send(Published::Confirmed).unwrap());
        let failed = relay.wait_for(|status| status.counters.store_failures > 0);
        assert!(disk.has_failed() && failed.error.is_some(), "{call:?}: {failed:?}");
        for _ in 0..100 {
            clock.advance(LEASE);
            if outbox(&*store).is_empty() {
                break;
            }
        }
        assert!(outbox(&*store).is_empty(), "{call:?}: {:?}", relay.status());
        let end = relay.stop(LEASE);
        assert_eq!((end.phase, end.error), (Phase::Stopped, None), "{call:?}");
    }
}

/// What cannot be repaired is a phase with its error.
#[test]
fn f31_what_cannot_be_repaired_is_a_phase_with_its_error() {
    let (clock, disk) = (Clock::default(), FailsOnce::default());
    let store = Arc::new(RedbStore::create_on(disk.clone()).unwrap());
    (0..2).for_each(|n| commit(&*store, n, n, clock.now()));
    let (publishers, asked, answer) = told(1);
    let relay = clock.relay(&store, publishers, settings("relay-1"));
    assert!(asked.recv().is_ok());
    disk.fail(Call::Sync);
    // Whoever opens it again finds other bytes.
    let spoilt = vec![0; usize::try_from(disk.len().unwrap()).unwrap()];
    StorageBackend::write(&disk.0.0, 0, &spoilt).unwrap();
    (0..4).for_each(|_| answer.send(Published::Confirmed).unwrap());
    relay.wait_for(|status| status.counters.store_failures > 0);
    for _ in 0..10 {
        clock.advance(LEASE);
    }
    let status = relay.wait_for(|status| status.counters.store_failures > 2);
    assert_eq!(status.phase, Phase::StoreAway);
    let error = status.error.unwrap().to_string();
    assert!(error.contains("damaged") || error.contains("not a redb file"), "{error}");
}
