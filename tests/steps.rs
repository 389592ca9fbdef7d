//! Transactions of several steps on redb, each compared with the reference store: what is written
//! late, kept open or shared in a transaction changes no answer and no row (P3, P4, P6), however
//! the steps come into it and however it ends.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use core::fmt::Debug;
use core::num::NonZeroU16;
use core::time::Duration;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use proptest::prelude::*;
use proptest::sample::Index;
use redb::TableDefinition;
use redb::backends::InMemoryBackend;
use twobox::{
    Body, Cancel, Checked, Claim, CommitOrder, DeliveryPolicy, Destinations, Discard, Draft, Due,
    Dump, Ending, EventId, EventState, Fingerprint, LaneKey, LeaseRef, Leased, Load, Millis,
    OrderId, OrderingKey, Owner, Purge, Query, Reader, Reason, Record, Redrive, RedriveWindow,
    Renew, Request, Retention, Settle, Settlement, Store, Table, Tables, Transaction, WhenDead,
};
use twobox_memory::MemoryStore;
use twobox_redb::{Lent, RedbOptions, RedbStore};

const OWN: TableDefinition<'_, &str, u64> = TableDefinition::new("own");

/// What is done, before it is known to what.
#[derive(Debug, Clone)]
enum Op {
    Place {
        request: u8,
        lanes: Vec<u8>,
        not_before: Option<u16>,
        other: bool,
    },
    Claim {
        limit: usize,
        run: usize,
        lease: u16,
        block: bool,
    },
    Settle {
        runs: Vec<(Index, usize, u8)>,
        block: bool,
    },
    Renew {
        runs: Vec<Index>,
        lease: u16,
    },
    Cancel(Vec<Index>),
    Redrive(Vec<Index>),
    Discard(Vec<Index>),
    Purge(Table),
    Load(u8),
    /// The transaction is handed out to the user, who does something in it.
    HandOut,
}

/// The same, of the events and leases that there are.
enum Step {
    Place(Request, Vec<Draft>, OrderId),
    Claim { limit: usize, run: usize, lease: Duration, block: bool },
    Settle(Vec<Settlement>, bool),
    Renew(Vec<LeaseRef>, Duration),
    Cancel(Vec<EventId>),
    Redrive(Vec<EventId>),
    Discard(Vec<EventId>),
    Purge(Table),
    Load(Query),
    HandOut,
}

/// How steps come into a transaction of redb.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Begun,
    /// The user's transaction, lent once for all steps, or anew for each.
    Lent,
    LentEach,
    Written,
    /// A transaction of ours that is handed out and lent to us again, for every other step.
    Nested,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    Commit,
    RollBack,
    Panic,
}

struct Settings {
    block: Checked<DeliveryPolicy>,
    go_on: Checked<DeliveryPolicy>,
    retention: Checked<Retention>,
    window: RedriveWindow,
}

impl Settings {
    fn new() -> Self {
        let policy = |when_dead| {
            let (base, cap) = (Duration::from_millis(1), Duration::from_millis(u16::MAX.into()));
            DeliveryPolicy {
                backoff_base: base,
                backoff_cap: cap,
                max_failures: 2,
                max_starts: 3,
                when_dead,
            }
            .checked()
            .unwrap()
        };
        let block = policy(WhenDead::Block);
        let minute = Duration::from_secs(60);
        let retention = Retention {
            events: minute,
            requests: minute,
            orders: Some(minute),
            ..Retention::default()
        };
        let retention = retention.checked(&block).unwrap();
        let window = retention.redrive_window();
        Self { go_on: policy(WhenDead::Continue), block, retention, window }
    }

    fn policy(&self, block: bool) -> &Checked<DeliveryPolicy> {
        if block { &self.block } else { &self.go_on }
    }
}

/// Names of 5 to 128 bytes, in no order.
fn lane(number: u8) -> OrderingKey {
    let filler = "x".repeat(usize::from(number) * 89 % 124);
    OrderingKey::new(format!("{:02x}{number:02x}{filler}", number.wrapping_mul(71))).unwrap()
}

fn shown<T: Debug, E: Debug>(result: Result<T, E>) -> String {
    match result {
        Ok(done) => format!("{done:?}"),
        Err(refused) => format!("refused {refused:?}"),
    }
}

fn perform(
    tx: &mut impl Tables,
    step: &Step,
    now: Millis,
    settings: &Settings,
    runs: &mut Vec<Leased>,
) -> String {
    match step {
        Step::Place(request, drafts, id) => shown(
            tx.run(
                CommitOrder::new(request, id.clone(), Body::text("o").unwrap(), drafts.clone())
                    .unwrap(),
                now,
            ),
        ),
        Step::Claim { limit, run, lease, block } => {
            let owner = Owner::new("relay").unwrap();
            let claimed = tx.run(
                Claim::new(settings.policy(*block), owner, *lease, *limit).unwrap().run(*run),
                now,
            );
            runs.extend(claimed.iter().flat_map(|claimed| claimed.leased.clone()));
            shown(claimed)
        }
        Step::Settle(results, block) => {
            shown(tx.run(Settle::new(settings.policy(*block), results.clone()), now))
        }
        Step::Renew(leases, lease) => shown(tx.run(Renew::new(leases.clone(), *lease), now)),
        Step::Cancel(events) => {
            shown(tx.run(Cancel::new(events.clone(), Reason::new("c")).unwrap(), now))
        }
        Step::Redrive(events) => {
            shown(tx.run(Redrive::new(events.clone(), settings.window).unwrap(), now))
        }
        Step::Discard(events) => {
            shown(tx.run(Discard::new(events.clone(), Reason::new("d")).unwrap(), now))
        }
        Step::Purge(table) => shown(
            tx.run(Purge::new(&settings.retention, *table, NonZeroU16::new(40).unwrap()), now),
        ),
        Step::Load(query) => shown(tx.load(query)),
        Step::HandOut => String::new(),
    }
}

#[derive(Default)]
struct World {
    events: Vec<EventId>,
    runs: Vec<Leased>,
}

impl World {
    fn events(&self, chosen: &[Index]) -> Vec<EventId> {
        let mut events: Vec<EventId> = chosen
            .iter()
            .filter(|_| !self.events.is_empty())
            .map(|at| at.get(&self.events).clone())
            .collect();
        events.push(EventId::new("nobody's").unwrap());
        events
    }

    fn run(&self, at: Index) -> Option<&Leased> {
        // Mostly those of late.
        let recent = &self.runs[self.runs.len().saturating_sub(40)..];
        (!recent.is_empty()).then(|| at.get(recent))
    }

    fn step(&mut self, op: &Op, now: Millis) -> Step {
        let ms = |ms: u16| Duration::from_millis(u64::from(ms) + 1);
        match op {
            Op::Place { request, lanes, not_before, other } => {
                let parameters = Fingerprint::of([("other", if *other { "1" } else { "0" })]);
                let id = format!("r{request}");
                let order = OrderId::new(format!("order-{id}")).unwrap();
                let drafts = lanes.iter().map(|number| {
                    let draft = Draft::new("t", Body::text("e").unwrap()).unwrap();
                    let draft =
                        if *number == 255 { draft } else { draft.ordering_key(lane(*number)) };
                    not_before.map_or(draft.clone(), |late| draft.not_before(now + ms(late)))
                });
                self.events.extend(
                    (1..=lanes.len()).map(|n| EventId::new(format!("{order}/{n}")).unwrap()),
                );
                self.events.sort();
                self.events.dedup();
                Step::Place(Request::new("s", id, parameters).unwrap(), drafts.collect(), order)
            }
            Op::Claim { limit, run, lease, block } => {
                Step::Claim { limit: *limit, run: *run, lease: ms(*lease), block: *block }
            }
            Op::Settle { runs, block } => {
                let results = runs.iter().filter_map(|(at, confirmed, ending)| {
                    let why = Reason::new("w");
                    let ending = match ending {
                        0 => Some(Ending::Failed(why)),
                        1 => Some(Ending::Rejected(why)),
                        2 => Some(Ending::Deferred(why)),
                        3 => Some(Ending::Unavailable(why)),
                        _ => None,
                    };
                    Some(self.run(*at)?.settle(*confirmed, ending))
                });
                Step::Settle(results.collect(), *block)
            }
            Op::Renew { runs, lease } => Step::Renew(
                runs.iter().filter_map(|at| Some(self.run(*at)?.lease.clone())).collect(),
                ms(*lease),
            ),
            Op::Cancel(events) => Step::Cancel(self.events(events)),
            Op::Redrive(events) => Step::Redrive(self.events(events)),
            Op::Discard(events) => Step::Discard(self.events(events)),
            Op::Purge(table) => Step::Purge(*table),
            Op::Load(0) => Step::Load(Query::Stats { now }),
            Op::Load(1) => Step::Load(Query::Dead { after: None, limit: usize::MAX }),
            Op::Load(2) => {
                let events = self.events.clone();
                Step::Load(Query::Deliveries { events, run: 3 })
            }
            Op::Load(n) => Step::Load(Query::Due(Due {
                destinations: Destinations::ALL,
                now,
                floor: Millis::new(0),
                lanes: usize::from(*n) * 9,
                run: usize::from(*n % 4),
                events: 50,
                // Each body has one.
                bytes: usize::from(*n) * 12,
            })),
            Op::HandOut => Step::HandOut,
        }
    }
}

fn few(most: usize) -> impl Strategy<Value = Vec<Index>> {
    prop::collection::vec(any::<Index>(), 0..most)
}

fn op() -> impl Strategy<Value = Op> {
    let many = prop_oneof![
        prop::collection::vec(any::<u8>(), 1..4),
        prop::collection::vec(any::<u8>(), 30..90),
        prop::collection::vec(0..4_u8, 1..12),
    ];
    let time = || prop_oneof![Just(0_u16), Just(9), Just(999), any::<u16>()];
    let result = (any::<Index>(), 0..4_usize, 0..6_u8);
    prop_oneof![
        6 => (any::<u8>(), many, prop::option::weighted(0.3, time()), prop::bool::weighted(0.1))
            .prop_map(|(request, lanes, not_before, other)| Op::Place { request, lanes, not_before, other }),
        6 => (prop_oneof![1..4_usize, 20..200_usize], 1..6_usize, time(), any::<bool>())
            .prop_map(|(limit, run, lease, block)| Op::Claim { limit, run, lease, block }),
        5 => (prop::collection::vec(result, 0..40), any::<bool>()).prop_map(|(runs, block)| Op::Settle { runs, block }),
        3 => (few(60), time()).prop_map(|(runs, lease)| Op::Renew { runs, lease }),
        2 => few(20).prop_map(Op::Cancel),
        3 => few(60).prop_map(Op::Redrive),
        1 => few(20).prop_map(Op::Discard),
        2 => prop::sample::select(Purge::TABLES.to_vec()).prop_map(Op::Purge),
        2 => (0..9_u8).prop_map(Op::Load),
        2 => Just(Op::HandOut),
    ]
}

fn transaction() -> impl Strategy<Value = (Way, End, i64, Vec<Op>)> {
    let way =
        prop::sample::select(vec![Way::Begun, Way::Lent, Way::LentEach, Way::Written, Way::Nested]);
    let end = prop_oneof![6 => Just(End::Commit), 1 => Just(End::RollBack), 1 => Just(End::Panic)];
    let pass = prop_oneof![4 => Just(0_i64), 3 => Just(10), 3 => Just(1_000), 2 => Just(70_000), 1 => Just(-5_000)];
    (way, end, pass, prop::collection::vec(op(), 1..7))
}

fn in_redb(
    store: &RedbStore,
    way: Way,
    end: End,
    steps: &[Step],
    now: Millis,
    settings: &Settings,
) -> Vec<String> {
    let mut runs = Vec::new();
    let mut answers = Vec::new();
    let touch = |tx: &redb::WriteTransaction| {
        tx.open_table(OWN).unwrap().insert("n", now.get()).unwrap();
    };
    match way {
        Way::Begun | Way::Nested => {
            let mut tx = store.begin().unwrap();
            for (at, step) in steps.iter().enumerate() {
                if let Step::HandOut = step {
                    touch(tx.redb());
                }
                if way == Way::Nested && at % 2 == 1 {
                    answers.push(perform(
                        &mut Lent::new(tx.redb()).unwrap(),
                        step,
                        now,
                        settings,
                        &mut runs,
                    ));
                } else {
                    answers.push(perform(&mut tx, step, now, settings, &mut runs));
                }
            }
            if end == End::Commit {
                tx.commit().unwrap();
            }
        }
        Way::Lent | Way::LentEach => {
            let tx = store.database().unwrap().begin_write().unwrap();
            let mut lent = Lent::new(&tx).unwrap();
            for step in steps {
                if let Step::HandOut = step {
                    touch(&tx);
                }
                if way == Way::LentEach {
                    lent = Lent::new(&tx).unwrap();
                }
                answers.push(perform(&mut lent, step, now, settings, &mut runs));
            }
            if end == End::Commit {
                tx.commit().unwrap();
            } else {
                tx.abort().unwrap();
            }
        }
        Way::Written => {
            let answers_of = Cell::new(Vec::new());
            let written = catch_unwind(AssertUnwindSafe(|| {
                store.write(now, |tx| {
                    let mut answers = Vec::new();
                    for step in steps {
                        if let Step::HandOut = step {
                            touch(tx.redb());
                        }
                        answers.push(perform(&mut **tx, step, now, settings, &mut Vec::new()));
                    }
                    answers_of.set(answers);
                    match end {
                        End::Commit => Ok(()),
                        End::RollBack => Err("changed my mind"),
                        // No message: nothing is wrong.
                        End::Panic => resume_unwind(Box::new("away")),
                    }
                })
            }));
            assert_eq!(written.is_err(), end == End::Panic);
            assert_eq!(written.is_ok_and(|written| written.is_ok()), end == End::Commit);
            answers = answers_of.take();
        }
    }
    answers
}

/// Each lane with something pending is due or blocked (P3), no other one is due, and none has more
/// of it than it can have, or a place past its end.
fn check(store: &MemoryStore) {
    let dump = Dump::of(&mut store.view().unwrap()).unwrap();
    let events = dump.events();
    let mut pending: BTreeMap<&LaneKey, u64> = BTreeMap::new();
    for (state, row) in events.values() {
        if matches!(state, EventState::Pending | EventState::Leased) {
            *pending.entry(&row.lane).or_default() += 1;
        }
    }
    let mut lanes = 0;
    for record in dump.records() {
        let Record::Lane(key, row) = record else { continue };
        lanes += 1;
        assert!(row.due.is_none() || row.blocked_by.is_none(), "{key}: {row:?}");
        let pending = pending.remove(key).unwrap_or(0);
        assert!(pending <= row.pending_at_most(), "{pending} pending in {key}: {row:?}");
        let comes_up = row.due.is_some() || row.blocked_by.is_some();
        assert!(pending == 0 || comes_up, "nobody delivers {key}: {row:?}");
        let (head, confirmed) = (row.head, row.confirmed);
        assert!(head <= row.next && confirmed < row.next, "{key}: {row:?}");
    }
    assert!(pending.is_empty(), "pending without a lane: {pending:?}");
    assert_eq!(lanes, dump.count(Table::Lanes));
}

fn run(transactions: Vec<(Way, End, i64, Vec<Op>)>) {
    let settings = Settings::new();
    let memory = MemoryStore::new();
    let redb = RedbOptions::new().cache_bytes(1 << 20).create_on(InMemoryBackend::new()).unwrap();
    let (mut world, mut now) = (World::default(), 1_000_000_i64);
    for (way, end, pass, ops) in transactions {
        now += pass;
        let at = Millis::new(u64::try_from(now).unwrap());
        let (mut steps, mut answers) = (Vec::new(), Vec::new());
        let held = world.runs.len();
        let mut tx = memory.begin().unwrap();
        for op in &ops {
            let step = world.step(op, at);
            answers.push(perform(&mut tx, &step, at, &settings, &mut world.runs));
            steps.push(step);
        }
        if end == End::Commit {
            tx.commit().unwrap();
        } else {
            drop(tx);
            // A claim that is not committed gives no lease: its token comes again.
            world.runs.truncate(held);
        }
        let found = in_redb(&redb, way, end, &steps, at, &settings);
        for (at, (found, answer)) in found.iter().zip(&answers).enumerate() {
            assert_eq!(found, answer, "step {at}, {:?}, of {way:?}: {ops:?}", ops[at]);
        }
        assert_eq!(found.len(), answers.len());
        let text = |dump: Dump| dump.to_string();
        let (in_memory, in_redb) =
            (Dump::of(&mut memory.view().unwrap()), Dump::of(&mut redb.view().unwrap()));
        assert_eq!(text(in_redb.unwrap()), text(in_memory.unwrap()), "after {way:?} {end:?}");
        for due in [at, Millis::MAX] {
            let (floor, bytes) = (Millis::new(0), usize::MAX);
            let due = Due {
                destinations: Destinations::ALL,
                now: due,
                floor,
                lanes: 4096,
                run: 3,
                events: 4096,
                bytes,
            };
            let due = Query::Due(due);
            assert_eq!(
                redb.view().unwrap().load(&due).unwrap(),
                memory.view().unwrap().load(&due).unwrap()
            );
        }
        check(&memory);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn steps_in_a_transaction_of_redb_are_those_of_the_reference_store(transactions in prop::collection::vec(transaction(), 1..16)) {
        run(transactions);
    }
}
