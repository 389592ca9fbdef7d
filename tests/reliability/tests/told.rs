//! What callers of one store are told is so: whoever shares a commit with them, gives up after they
//! have written, panics, or reads alone, and also when the power fails at the moment of the answer
//! (P1, P2).

use std::collections::BTreeSet;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use redb::{
    ConcurrencyMode, Database, ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction,
};
use twobox::{
    Body, Checked, Claim, CommitOrder, CommitRefused, DeliveryPolicy, Draft, Fingerprint, Key,
    Leased, Load, Millis, OrderId, Owner, Query, Reader, Record, Request, RequestKey, RunError,
    Settle, Store, Stored, Tables, Transaction,
};
use twobox_redb::{RedbError, RedbOptions, RedbStore};
use twobox_reliability::disk::{Disk, Failure, Fault};
use twobox_reliability::seed::{Seed, long};
use twobox_reliability::shop::PATIENCE;
use twobox_reliability::tables;

const THREADS: usize = 8;
const STEPS: usize = 20;
const YOURS: TableDefinition<'_, (), u64> = TableDefinition::new("yours");

/// The ways in which a store is opened.
type Open = fn(Disk) -> RedbStore;
const STORES: [Open; 4] = [
    |disk| RedbStore::create_on(disk).unwrap(),
    |disk| RedbOptions::new().sync_deliveries(false).create_on(disk).unwrap(),
    |disk| RedbOptions::new().shared(true).sync_deliveries(false).create_on(disk).unwrap(),
    |disk| {
        let database = Database::builder()
            .set_concurrency_mode(ConcurrencyMode::MultiWriter)
            .create_with_backend(disk)
            .unwrap();
        RedbOptions::new().sync_deliveries(false).with_database(database).unwrap()
    },
];

/// What a caller was told.
#[derive(Debug, Clone)]
enum Fact {
    /// The order of this name is there, and its request has this quantity.
    Placed(String, &'static str),
    /// The request of this name has another quantity than this one.
    Bound(String, &'static str),
    /// There is an order of this name.
    Seen(String),
    /// There is none, since whoever would have placed it gave up.
    Absent(String),
    /// The user's row had this number; no other caller gave it the same.
    Counted(u64),
}

fn request(name: &str, quantity: &str) -> Request {
    Request::new("customer-7", name, Fingerprint::of([("quantity", quantity)])).unwrap()
}

fn order<'r>(request: &'r Request, name: &str) -> CommitOrder<'r> {
    let body = Body::text(name).unwrap();
    let event = Draft::new("created", body.clone()).unwrap();
    CommitOrder::new(request, OrderId::new(name).unwrap(), body, [event]).unwrap()
}

/// Counts one more in the user's table.
fn count(tx: &WriteTransaction) -> u64 {
    let mut table = tx.open_table(YOURS).unwrap();
    let number = table.get(()).unwrap().map_or(0, |found| found.value()) + 1;
    table.insert((), number).unwrap();
    number
}

struct Caller<'s> {
    store: &'s RedbStore,
    seed: Seed,
    told: Vec<Fact>,
    /// How often work was run again.
    again: usize,
}

impl Caller<'_> {
    /// Does something in a transaction of its own, and notes what came of it.
    fn step(&mut self, own: &str, now: Millis) {
        let shared = format!("shared-{}", self.seed.below(6));
        let quantity = ["1", "2"][self.seed.below(2)];
        let fact = match self.seed.below(9) {
            0 => {
                assert!(
                    !self.store.run(order(&request(own, quantity), own), now).unwrap().repeated
                );
                Fact::Placed(own.to_string(), quantity)
            }
            1 | 2 => match self.store.run(order(&request(&shared, quantity), &shared), now) {
                Ok(_) => Fact::Placed(shared, quantity),
                Err(RunError::Refused(CommitRefused::ParametersDiffer(_))) => {
                    Fact::Bound(shared, quantity)
                }
                Err(error) => panic!("{error}"),
            },
            3 => {
                self.give_up(own, now, || Err("given up"));
                Fact::Absent(own.to_string())
            }
            4 => {
                let gone = catch_unwind(AssertUnwindSafe(|| {
                    self.give_up(own, now, || panic::resume_unwind(Box::new("a panic")));
                }));
                assert!(gone.is_err());
                Fact::Absent(own.to_string())
            }
            5 => {
                let query = Query::rows([Key::Order(OrderId::new(&shared).unwrap())]);
                let found = self
                    .store
                    .write(now, |tx| {
                        thread::yield_now();
                        tx.load(&query)
                    })
                    .unwrap();
                if found.rows.is_empty() {
                    return;
                }
                Fact::Seen(shared)
            }
            6 => {
                let mut tx = self.store.begin().unwrap();
                let number = count(tx.redb());
                assert!(!tx.run(order(&request(own, quantity), own), now).unwrap().repeated);
                if self.seed.coin() {
                    tx.commit().unwrap();
                    self.told.push(Fact::Counted(number));
                    Fact::Placed(own.to_string(), quantity)
                } else {
                    drop(tx);
                    Fact::Absent(own.to_string())
                }
            }
            7 => {
                let mut runs = 0;
                let number = self.store.write(now, |tx| {
                    runs += 1;
                    let number = count(tx.redb());
                    thread::yield_now();
                    Ok::<_, String>(number)
                });
                self.again += runs - 1;
                Fact::Counted(number.unwrap())
            }
            _ => return self.deliver(now),
        };
        self.told.push(fact);
    }

    /// Writes, and then does not commit.
    fn give_up(&mut self, own: &str, now: Millis, end: impl Fn() -> Result<(), &'static str>) {
        let mut runs = 0;
        let given_up = self.store.write(now, |tx| {
            runs += 1;
            count(tx.redb());
            assert!(!tx.run(order(&request(own, "1"), own)).unwrap().repeated);
            thread::yield_now();
            end()
        });
        assert!(matches!(given_up, Err(RunError::Refused("given up"))), "{given_up:?}");
        self.again += runs - 1;
    }

    /// Claims something, and confirms it or not. This may be lost.
    fn deliver(&mut self, now: Millis) {
        let policy = Checked::<DeliveryPolicy>::default();
        let claim =
            Claim::new(&policy, Owner::new("relay").unwrap(), Duration::from_secs(1), 2).unwrap();
        let claimed = self.store.run(claim, now).unwrap();
        if self.seed.coin() {
            let all = |leased: &Leased| leased.settle(leased.events.len(), None);
            let confirmed: Vec<_> = claimed.leased.iter().map(all).collect();
            let _ = self.store.run(Settle::new(&policy, confirmed), now).unwrap();
        }
    }
}

/// Whether a store keeps what was told.
fn check(store: &RedbStore, told: &[Fact]) -> Vec<Stored> {
    let rows = tables::check(&mut store.view().unwrap()).unwrap();
    let counted = store
        .database()
        .unwrap()
        .begin_read()
        .unwrap()
        .open_table(YOURS)
        .map_or(0, |table| table.get(()).unwrap().map_or(0, |found| found.value()));
    let find = |key: Key| {
        rows.iter().find(|stored| stored.record.key() == key).map(|stored| &stored.record)
    };
    let there = |name: &String| find(Key::Order(OrderId::new(name).unwrap())).is_some();
    let has = |name: &String, quantity: &str| match find(Key::Request(
        RequestKey::new("customer-7", name).unwrap(),
    )) {
        Some(Record::Request(_, row)) => {
            row.fingerprint == Fingerprint::of([("quantity", quantity)])
        }
        _ => panic!("the request {name} is gone"),
    };
    for fact in told {
        let holds = match fact {
            Fact::Placed(name, quantity) => there(name) && has(name, quantity),
            Fact::Bound(name, quantity) => there(name) && !has(name, quantity),
            Fact::Seen(name) => there(name),
            Fact::Absent(name) => !there(name),
            Fact::Counted(number) => counted >= *number,
        };
        assert!(holds, "{fact:?} was told, and is not so");
    }
    rows
}

/// Some threads do things at random; says how often work was run again, and how many cuts were
/// looked at.
fn round(open: Open, round: u64) -> (usize, usize) {
    let never = Fault { at: u64::MAX, failure: Failure::Nothing, lasting: false };
    let disk = Disk::failing(Vec::new(), never);
    let store = open(disk.clone());
    let callers: Vec<_> = thread::scope(|scope| {
        let (store, disk) = (&store, &disk);
        let run = |thread: usize| {
            let seed = Seed::new(round * 100 + thread as u64);
            let mut caller = Caller { store, seed, told: Vec::new(), again: 0 };
            let mut cuts = Vec::new();
            for step in 0..STEPS {
                caller.step(&format!("{thread}-{step}"), Millis::new(1_000 + 1_000 * step as u64));
                // Above all after answers that may follow from what somebody else has just written.
                if matches!(caller.told.last(), Some(Fact::Seen(_) | Fact::Bound(..)))
                    || caller.seed.below(8) == 0
                {
                    cuts.push((disk.after_cut(&mut caller.seed), caller.told.len()));
                }
            }
            (caller.told, caller.again, cuts)
        };
        let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || run(thread))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic)))
            .collect()
    });
    let mut looked = 0;
    for (told, _, cuts) in &callers {
        for (bytes, so_far) in cuts {
            looked += 1;
            check(
                &RedbOptions::new().end_leases(false).open_on(Disk::of(bytes.clone())).unwrap(),
                &told[..*so_far],
            );
        }
    }
    let told: Vec<Fact> = callers.iter().flat_map(|(told, ..)| told.iter().cloned()).collect();
    let rows = check(&store, &told);
    let placed: BTreeSet<_> = told
        .iter()
        .filter_map(|fact| if let Fact::Placed(name, _) = fact { Some(name) } else { None })
        .collect();
    assert_eq!(
        rows.iter().filter(|stored| matches!(stored.record, Record::Order(..))).count(),
        placed.len()
    );
    let mut counted: Vec<_> = told
        .iter()
        .filter_map(|fact| if let Fact::Counted(number) = fact { Some(*number) } else { None })
        .collect();
    counted.sort_unstable();
    assert!(counted.iter().copied().eq(1..=counted.len() as u64), "{counted:?}");
    (callers.iter().map(|(_, again, _)| again).sum(), looked)
}

#[test]
fn what_callers_are_told_is_so() {
    let (started, rounds) = (Instant::now(), if long() { 100 } else { 1 });
    let (done, waiting) = mpsc::channel();
    let work = thread::spawn(move || {
        for number in 0..rounds {
            for (kind, open) in STORES.into_iter().enumerate() {
                // Whoever waits sees the end of this thread too.
                let _ = done.send(round(open, number * 10 + kind as u64));
            }
        }
    });
    let (mut again, mut cuts) = (0, 0);
    loop {
        match waiting.recv_timeout(PATIENCE) {
            Ok((more, looked)) => (again, cuts) = (again + more, cuts + looked),
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    work.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
    println!(
        "told: {rounds} rounds of {THREADS} threads on each of 4 stores, {cuts} cuts; work ran again {again} times; {:.1?}",
        started.elapsed()
    );
    assert!(again > 0, "nobody shared a transaction with one that gave up");
}

/// What a thread of [`callers_of_a_failing_disk`] was told, and how it ended.
type Told = (Vec<Fact>, Option<RunError<RedbError, CommitRefused>>);

/// Places orders of its own and shared ones, and sometimes gives up after that, until the store
/// fails.
fn until_it_fails(store: &RedbStore, thread: usize, seed: &mut Seed) -> Told {
    let mut told = Vec::new();
    for step in 0..8 {
        let (own, shared) = (format!("{thread}-{step}"), format!("shared-{}", seed.below(3)));
        let (quantity, gives_up) = (["1", "2"][seed.below(2)], seed.below(5) == 0);
        let name = if gives_up || seed.coin() { &own } else { &shared };
        let placed = store.write(Millis::new(1_000), |tx| {
            let placed = tx.run(order(&request(name, quantity), name));
            thread::yield_now();
            placed.map_err(Some).and_then(|_| if gives_up { Err(None) } else { Ok(()) })
        });
        let error = match placed {
            Ok(()) => None,
            Err(RunError::Refused(error)) => error,
            Err(RunError::Conflict(key)) => Some(RunError::Conflict(key)),
            Err(RunError::Store(error)) => Some(RunError::Store(error)),
            Err(RunError::Unknown(error)) => Some(RunError::Unknown(error)),
        };
        match error {
            None if gives_up => told.push(Fact::Absent(own)),
            None => told.push(Fact::Placed(name.clone(), quantity)),
            Some(RunError::Refused(_)) => told.push(Fact::Bound(name.clone(), quantity)),
            Some(error) => {
                if *name == own && (gives_up || matches!(error, RunError::Store(_))) {
                    told.push(Fact::Absent(own));
                }
                return (told, Some(error));
            }
        }
    }
    (told, None)
}

/// P8: callers share the failure of a disk as they share its commits. What each was told before and
/// by the error itself is so, after the failure and after a cut of the power.
#[test]
fn callers_of_a_failing_disk() {
    let empty = Disk::default();
    RedbStore::create_on(empty.clone()).unwrap().close().unwrap();
    let start = empty.bytes();
    let (mut failed, mut unknown) = (0, 0);
    for failure in [Failure::Nothing, Failure::Half, Failure::Full] {
        for lasting in [false, true] {
            for at in (0..400).step_by(if long() { 1 } else { 16 }) {
                let disk = Disk::failing(start.clone(), Fault { at, failure, lasting });
                // It may fail at once.
                let Ok(store) =
                    RedbOptions::new().cache_bytes(0).end_leases(false).open_on(disk.clone())
                else {
                    continue;
                };
                let callers: Vec<Told> = thread::scope(|scope| {
                    let store = &store;
                    let run = move |thread: usize| {
                        until_it_fails(store, thread, &mut Seed::new(at * 10 + thread as u64))
                    };
                    let threads: Vec<_> =
                        (0..4).map(|thread| scope.spawn(move || run(thread))).collect();
                    threads
                        .into_iter()
                        .map(|thread| {
                            thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
                        })
                        .collect()
                });
                failed += callers
                    .iter()
                    .filter(|(_, error)| matches!(error, Some(RunError::Store(_))))
                    .count();
                unknown += callers
                    .iter()
                    .filter(|(_, error)| matches!(error, Some(RunError::Unknown(_))))
                    .count();
                let told: Vec<Fact> = callers.into_iter().flat_map(|(told, _)| told).collect();
                check(
                    &RedbOptions::new()
                        .end_leases(false)
                        .open_on(Disk::of(disk.after_cut(&mut Seed::new(at))))
                        .unwrap(),
                    &told,
                );
                drop(store);
                check(
                    &RedbOptions::new().end_leases(false).open_on(Disk::of(disk.bytes())).unwrap(),
                    &told,
                );
            }
        }
    }
    println!(
        "told: {failed} callers of a failing disk learned that nothing was changed, {unknown} that nobody knows"
    );
    assert!(failed > 0 && unknown > 0);
}
