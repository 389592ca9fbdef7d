//! Many callers: threads that share a store. The promises hold, nothing hangs, and a handler that
//! panics takes nobody along (P1, P4, P5, P6).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use redb::backends::InMemoryBackend;
use twobox::relay::{Published, Publisher, Relay, RelaySettings};
use twobox::{
    Body, Checked, CommitOrder, CommitRefused, Committed, Consumer, DeliveryPolicy, Destination,
    Draft, Dump, Event, EventId, EventRow, EventState, Fingerprint, Handled, Inbox, LaneKey, Load,
    Message, Millis, Moment, OrderId, OrderingKey, Owner, Reason, Receipt, Record, Register,
    Registered, Request, RunError, Store, Stored, Table,
};
use twobox_memory::MemoryStore;
use twobox_redb::RedbStore;
use twobox_reliability::seed::{Seed, long};
use twobox_reliability::shop::PATIENCE;
use twobox_reliability::tables;

const THREADS: usize = 8;

/// How often each test is run.
fn rounds() -> u64 {
    if long() { 100 } else { 4 }
}

/// Runs a test on each store, with a watchdog: a round that hangs fails.
fn on_each_store(name: &str, on_memory: fn(&MemoryStore, u64), on_redb: fn(&RedbStore, u64)) {
    let started = Instant::now();
    let (done, waiting) = mpsc::channel();
    let work = thread::spawn(move || {
        for round in 0..rounds() {
            on_memory(&MemoryStore::new(), round);
            on_redb(&RedbStore::create_on(InMemoryBackend::new()).unwrap(), round);
            // Whoever waits sees the end of this thread too.
            let _ = done.send(());
        }
    });
    for round in 0..rounds() {
        match waiting.recv_timeout(PATIENCE) {
            Ok(()) => {}
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("{name}: round {round} hangs"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    work.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
    println!(
        "many callers, {name}: {} rounds of {THREADS} threads on each of 2 stores; {:.1?}",
        rounds(),
        started.elapsed()
    );
}

/// Starts the same work in all threads at the same moment.
fn at_once<R: Send>(work: impl Fn(usize) -> R + Sync) -> Vec<R> {
    let (barrier, work) = (Barrier::new(THREADS), &work);
    thread::scope(|scope| {
        let start = |number| {
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                work(number)
            })
        };
        let threads: Vec<_> = (0..THREADS).map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic)))
            .collect()
    })
}

fn rows<S: Store>(store: &S) -> Vec<Stored>
where
    S::Error: Debug,
{
    tables::check(&mut store.view().unwrap()).unwrap()
}

const NOW: Millis = Millis::new(1_000);

/// Whatever happens, nothing is given up.
fn patient() -> Checked<DeliveryPolicy> {
    let base = DeliveryPolicy::default().backoff_base;
    let policy = DeliveryPolicy {
        backoff_cap: base,
        max_failures: 5_000,
        max_starts: 10_000,
        ..DeliveryPolicy::default()
    };
    policy.checked().unwrap()
}

fn request(id: &str, quantity: &str) -> Request {
    Request::new("customer-7", id, Fingerprint::of([("quantity", quantity)])).unwrap()
}

fn commit<S: Store>(
    store: &S,
    request: &Request,
    id: &str,
    lanes: &[&str],
) -> Result<Committed, RunError<S::Error, CommitRefused>> {
    let body = Body::text(id).unwrap();
    let draft = |lane: &&str| {
        Draft::new("created", body.clone()).unwrap().ordering_key(OrderingKey::new(*lane).unwrap())
    };
    let order =
        CommitOrder::new(request, OrderId::new(id).unwrap(), body.clone(), lanes.iter().map(draft))
            .unwrap();
    store.run(order, NOW)
}

/// P1: of requests with one key and two sets of parameters, one set wins and the other is refused,
/// each time; there is one order.
fn one_key<S: Store + Sync>(store: &S, _round: u64)
where
    S::Error: Debug + Send,
{
    let answers = at_once(|number| {
        let request = request("req-1", ["2", "3"][number % 2]);
        let registered = store.run(Register::new(&request), NOW);
        let committed = commit(store, &request, "order-1", &["a"]);
        (number % 2, registered, committed)
    });
    let winners: BTreeSet<usize> = answers
        .iter()
        .filter(|(_, registered, _)| registered.is_ok())
        .map(|(parameters, ..)| *parameters)
        .collect();
    assert_eq!(winners.len(), 1, "P1: the key is bound to one set of parameters");
    let news = answers
        .iter()
        .filter(|(_, registered, _)| matches!(registered, Ok(Registered::New)))
        .count();
    let firsts = answers
        .iter()
        .filter(|(.., committed)| committed.as_ref().is_ok_and(|committed| !committed.repeated))
        .count();
    assert_eq!((news, firsts), (1, 1), "P1: one was the first");
    let placed: Vec<_> =
        answers.iter().filter_map(|(.., committed)| committed.as_ref().ok()).collect();
    assert!(
        placed.iter().all(|committed| committed.placed == placed[0].placed),
        "P1: all get the first outcome"
    );
    for (parameters, registered, committed) in &answers {
        if !winners.contains(parameters) {
            assert!(matches!(registered, Err(RunError::Refused(_))), "{registered:?}");
            assert!(
                matches!(committed, Err(RunError::Refused(CommitRefused::ParametersDiffer(_)))),
                "{committed:?}"
            );
        }
    }
    assert_eq!(
        rows(store).iter().filter(|stored| stored.record.table() == Table::Orders).count(),
        1
    );
}

#[test]
fn one_key_is_registered_by_all() {
    on_each_store("one key", one_key, one_key);
}

/// P2, P4: orders of all threads in one lane and in a lane of each; sequences have no gap, and each
/// thread's orders keep their order.
fn lanes<S: Store + Sync>(store: &S, _round: u64)
where
    S::Error: Debug + Send,
{
    const ORDERS: usize = 6;
    at_once(|thread| {
        for number in 0..ORDERS {
            let id = format!("{thread}-{number}");
            assert!(
                !commit(store, &request(&id, "1"), &id, &["all", &format!("own-{thread}"), "all"])
                    .unwrap()
                    .repeated
            );
        }
    });
    let mut places: BTreeMap<OrderingKey, BTreeMap<u64, EventId>> = BTreeMap::new();
    for stored in rows(store) {
        if let Record::Event(EventRow { event, sequence, .. }) = stored.record {
            assert!(
                places.entry(event.ordering_key).or_default().insert(sequence, event.id).is_none(),
                "two events at one place"
            );
        }
    }
    for (lane, events) in places {
        let expected = if lane.as_str() == "all" { THREADS * ORDERS * 2 } else { ORDERS };
        assert!(events.keys().copied().eq(1..=expected as u64), "P4: {lane} has gaps");
        let mut last: BTreeMap<String, (usize, String)> = BTreeMap::new();
        for id in events.values() {
            let (order, event) = id.as_str().split_once('/').unwrap();
            let (thread, number) = order.split_once('-').unwrap();
            let place = (number.parse().unwrap(), event.to_string());
            assert!(
                last.insert(thread.to_string(), place.clone()).is_none_or(|before| before < place),
                "P4: {id} in {lane}"
            );
        }
    }
}

#[test]
fn orders_are_committed_in_one_lane_and_in_many() {
    on_each_store("lanes", lanes, lanes);
}

/// How many settles came too late.
static STALE: AtomicU64 = AtomicU64::new(0);

/// What relays publish to: it notes what comes, and sometimes fails.
struct Broker<'b> {
    came: &'b Mutex<Vec<EventId>>,
    seed: Seed,
}

impl Publisher for Broker<'_> {
    fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
        let answer = |message: &Message| {
            thread::yield_now();
            if self.seed.below(8) == 0 {
                return Published::Failed(Reason::new("lost on the way"));
            }
            self.came.lock().unwrap().push(message.event.id.clone());
            // Sometimes it came, and the confirmation is lost.
            if self.seed.below(8) == 0 {
                Published::Failed(Reason::new("no answer"))
            } else {
                Published::Confirmed
            }
        };
        batch.iter().map(answer).collect()
    }
}

/// P3, P4, P6: relays race for lanes, with leases that run out under them, while orders are still
/// committed. Every event comes; what came for the first time came in the order of its lane; who
/// was too late is told.
fn relays<S: Store + Sync>(store: &S, round: u64)
where
    S::Error: Debug + Send,
{
    const ORDERS: usize = 6;
    let (came, clock) = (Mutex::new(Vec::new()), AtomicU64::new(10_000));
    let counters = at_once(|thread| {
        if thread % 2 == 0 {
            for number in 0..ORDERS {
                let id = format!("{thread}-{number}");
                assert!(
                    !commit(store, &request(&id, "1"), &id, &["a", "b", "a"]).unwrap().repeated
                );
            }
        }
        let broker = Broker { came: &came, seed: Seed::new(round * 100 + thread as u64) };
        let mut settings = RelaySettings::new(Owner::new(format!("relay-{thread}")).unwrap());
        (settings.window, settings.run, settings.lease) = (6, 3, Duration::from_millis(500));
        settings.policy = patient();
        let now = || Moment::steady(Millis::new(clock.fetch_add(40, Ordering::Relaxed)));
        let mut relay = Relay::new(store, broker, settings, now()).unwrap();
        for _step in 0..60 {
            let _went_on = relay.step(now()).unwrap();
        }
        relay.stop(now()).unwrap()
    });
    // One more finishes what is left.
    let broker = Broker { came: &came, seed: Seed::new(round) };
    let mut settings = RelaySettings::new(Owner::new("relay-last").unwrap());
    settings.policy = patient();
    settings.lease = settings.policy.backoff_cap;
    let begun = Moment::steady(Millis::new(10_000_000));
    let mut relay = Relay::new(store, broker, settings, begun).unwrap();
    let last = (1..1_000)
        .map(|hour| relay.run_until_idle(begun + Duration::from_secs(hour * 3_600)).unwrap())
        .take_while(|_| store.view().unwrap().stats(Millis::new(0)).unwrap().all.pending > 0)
        .count();
    assert!(last < 998, "P3: something is never delivered");
    let came = came.lock().unwrap().clone();
    let mut first: BTreeMap<LaneKey, Vec<u64>> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let dump = Dump::of(&mut store.view().unwrap()).unwrap();
    let places = dump.events();
    for id in &came {
        if seen.insert(id.clone()) {
            let (_, row) = &places[id];
            first.entry(row.lane.clone()).or_default().push(row.sequence);
        }
    }
    assert_eq!(seen.len(), places.len(), "P3: every event came");
    assert!(
        places.values().all(|(state, _)| *state == EventState::Confirmed),
        "P3: and is confirmed"
    );
    for (lane, sequences) in first {
        assert!(sequences.is_sorted(), "P4: in {lane} they came first in the order {sequences:?}");
    }
    STALE.fetch_add(counters.iter().map(|counters| counters.stale).sum(), Ordering::Relaxed);
    let confirmed: u64 = counters.iter().map(|counters| counters.confirmed).sum::<u64>()
        + relay.machine().counters().confirmed;
    assert_eq!(confirmed, places.len() as u64, "P6: each event was settled by one holder");
}

#[test]
fn relays_race_for_leases() {
    on_each_store("relays", relays, relays);
    let stale = STALE.load(Ordering::Relaxed);
    println!("many callers, relays: {stale} settles came too late and were refused");
    assert!(stale > 0, "the race was none");
}

fn message(number: usize) -> Message {
    let event = Event {
        destination: Destination::default(),
        id: EventId::new(format!("event-{number}")).unwrap(),
        order: OrderId::new("order").unwrap(),
        event_type: "created".try_into().unwrap(),
        schema_version: 1,
        ordering_key: OrderingKey::new("a").unwrap(),
        time: NOW,
        headers: twobox::Headers::new(),
        body: Body::text("body").unwrap(),
    };
    Message {
        event,
        place: twobox::LanePlace { begun: Millis::new(0), sequence: 1, after: 0 },
        attempt: 1,
    }
}

/// P5: handlers panic after they have written; that is rolled back, the others go on, and each
/// event is applied once in the end.
fn panics<S: Store + Sync>(store: &S, round: u64)
where
    S::Error: Debug + Send,
{
    const EVENTS: usize = 6;
    let consumer = || Consumer::new("points").unwrap();
    let applied = at_once(|thread| {
        let inbox = Inbox::new(store, consumer());
        let mut seed = Seed::new(round * 100 + thread as u64);
        let mut applied = 0;
        for number in 0..EVENTS {
            for _attempt in 0..20 {
                let fails = seed.coin();
                let received = catch_unwind(AssertUnwindSafe(|| {
                    inbox.receive(&message(number), NOW, |tx, _| {
                        let other = Request::new(
                            "handler",
                            format!("{thread}-{number}"),
                            Fingerprint::of_bytes(b""),
                        )
                        .unwrap();
                        tx.run(Register::new(&other)).unwrap();
                        if fails {
                            panic::resume_unwind(Box::new("the handler panics"));
                        }
                        Ok::<_, String>(Handled::Effect(Body::text(thread.to_string()).unwrap()))
                    })
                }));
                match received {
                    Err(_panic) => assert!(fails),
                    Ok(receipt) => match receipt.unwrap() {
                        Receipt::Applied => {
                            applied += 1;
                            break;
                        }
                        Receipt::Duplicate => break,
                        other @ (Receipt::Deferred(_)
                        | Receipt::WaitsFor(_)
                        | Receipt::Failed(_)
                        | Receipt::Poisoned
                        | Receipt::Refused(_)) => panic!("{other:?}"),
                    },
                }
            }
        }
        applied
    });
    assert_eq!(applied.iter().sum::<usize>(), EVENTS, "P5: each event was applied once");
    let rows = rows(store);
    let of = |table| rows.iter().filter(|stored| stored.record.table() == table).count();
    let counts = (of(Table::Inbox), of(Table::Effects), of(Table::Requests));
    assert_eq!(
        counts,
        (EVENTS, EVENTS, EVENTS),
        "P5: what a handler wrote before it panicked was rolled back"
    );
}

#[test]
fn handlers_panic() {
    on_each_store("panics", panics, panics);
}

/// A store that is shared by handles of an [`Arc`] lives as long as the last of them.
#[test]
fn a_store_is_shared_by_handles() {
    let store = Arc::new(RedbStore::create_on(InMemoryBackend::new()).unwrap());
    let answers = at_once(|number| {
        let store = Arc::clone(&store);
        let request = request(&number.to_string(), "1");
        store.run(Register::new(&request), NOW).unwrap()
    });
    assert_eq!(answers, vec![Registered::New; THREADS]);
}
