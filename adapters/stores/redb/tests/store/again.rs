//! The disk fails once, and is well again (F31): the store goes on, and what was committed is
//! there.

use std::collections::BTreeMap;

use redb::{Database, ReadableDatabase, TableDefinition};
use twobox::relay::{Published, Publisher, Relay, RelaySettings};
use twobox::{
    Draft, Fingerprint, Load, Message, Millis, Moment, Owner, Reader, Register, Request, RunError,
    Store, Transaction,
};
use twobox_redb::{RedbError, RedbOptions, RedbStore};

use crate::common::{Disk, KEEPING, at, sample, text};

/// With next to no cache, so that it reads much.
const OPTIONS: RedbOptions = KEEPING.cache_bytes(16 << 10);

const NOW: Millis = at(10_000);

struct Broker;

impl Publisher for Broker {
    fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
        batch.iter().map(|_| Published::Confirmed).collect()
    }
}

fn bind(store: &RedbStore, id: &str) -> Result<(), RedbError> {
    let request = Request::new("shop", id, Fingerprint::of([("item", id)])).unwrap();
    match store.run(Register::new(&request), NOW) {
        Ok(_) => Ok(()),
        Err(RunError::Store(error) | RunError::Unknown(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

fn place(store: &RedbStore, id: &str) -> Result<(), RedbError> {
    let request = Request::of("shop", id, [("item", id)]).unwrap();
    let order = request.order(id, "x".repeat(5_000), Draft::json("created", "{}").unwrap());
    match store.run(order.unwrap(), NOW) {
        Ok(_) => Ok(()),
        Err(RunError::Store(error) | RunError::Unknown(error)) => Err(error),
        Err(error) => panic!("{error}"),
    }
}

/// What a relay without threads does until there is nothing more to do.
fn deliver(store: &RedbStore) {
    let settings = RelaySettings::new(Owner::new("relay-1").unwrap());
    let mut relay = Relay::new(store, Broker, settings, Moment::steady(NOW)).unwrap();
    // After a failure it waits, and a claim of which nobody knew has its lease.
    for minute in 0..5 {
        // It says that the store failed, and goes on the next time.
        let _ = relay.run_until_idle(Moment::steady(Millis::new(NOW.get() + minute * 60_000)));
    }
}

/// How many events are pending or leased, and how many dead.
fn open_events(store: &RedbStore) -> Result<u64, RedbError> {
    let stats = store.view()?.stats(NOW)?.all;
    Ok(stats.pending + stats.dead)
}

/// Each call of the disk fails once, of whatever kind: while orders are placed, while a relay
/// delivers them, and while views look at all tables. After that everything goes on by itself, and
/// the tables are those of a life without a fault.
#[test]
fn f31_any_call_of_the_disk_fails_once_and_the_store_goes_on() {
    let mut struck = BTreeMap::<&str, usize>::new();
    let mut expected = None;
    for good in 0.. {
        let disk = Disk::default();
        let store = OPTIONS.create_on(disk.clone()).unwrap();
        disk.fail_once(good);
        for id in ["order-1", "order-2"] {
            // Retrying is always safe (P8).
            if let Err(error) = place(&store, id) {
                assert!(matches!(error, RedbError::Io(_)), "{good}: {error}");
                place(&store, id).unwrap_or_else(|error| panic!("{good}: {error}"));
            }
        }
        deliver(&store);
        let open = open_events(&store).or_else(|_| open_events(&store)).unwrap();
        assert_eq!(open, 0, "{good}: {:?}", disk.struck());
        let seen = text(&store).or_else(|error| {
            assert!(matches!(error, RedbError::Io(_)), "{good}: {error}");
            text(&store)
        });
        // Who claimed again counts another token and attempt; the rest is the same.
        let seen = seen.unwrap_or_else(|error| panic!("{good}: {error}"));
        let states = |line: &&str| !line.contains("token") && !line.starts_with("  lane");
        let seen: Vec<String> = seen.lines().filter(states).map(str::to_string).collect();
        assert_eq!(seen.len(), expected.get_or_insert_with(|| seen.clone()).len(), "{good}");
        match disk.struck() {
            Some(call) => *struck.entry(call).or_default() += 1,
            None => break,
        }
    }
    println!("{struck:?}");
    for call in ["read", "write", "sync"] {
        assert!(struck.get(call).is_some_and(|times| *times > 0), "no {call} failed: {struck:?}");
    }
}

/// A commit of several callers fails: each of them is told that nobody knows, and each goes on.
#[test]
fn f31_callers_that_share_a_commit_all_go_on() {
    let disk = Disk::default();
    let store = OPTIONS.create_on(disk.clone()).unwrap();
    for round in 0..40 {
        disk.fail_once(round);
        std::thread::scope(|scope| {
            for caller in 0..4 {
                let store = &store;
                scope.spawn(move || {
                    let id = format!("req-{round}-{caller}");
                    // Another one may hold the database for a moment.
                    let mut tries = 0;
                    while let Err(error) = bind(store, &id) {
                        tries += 1;
                        assert!(tries < 1_000, "{error}");
                        std::thread::yield_now();
                    }
                });
            }
        });
    }
    disk.fail_once(usize::MAX);
    let bound = text(&store).unwrap().lines().filter(|line| line.contains("req-")).count();
    assert!(bound >= 160, "{bound}");
}

/// Views look, and nobody writes: they find it out as well, and what was open says so.
#[test]
fn f31_a_view_opens_the_store_again() {
    let (bytes, expected) = sample();
    let disk = Disk::with(bytes);
    let store = OPTIONS.verify_on_open(false).open_on(disk.clone()).unwrap();
    let mut open = store.view().unwrap();
    disk.fail_once(0);
    // Until something is not in the cache.
    let failed = twobox::Dump::of(&mut open).map(|_| ()).unwrap_err();
    assert!(matches!(failed, RedbError::Io(_)), "{failed}");
    assert_eq!(text(&store).unwrap(), expected);
    assert!(matches!(twobox::Dump::of(&mut open), Err(RedbError::Stopped)));
    bind(&store, "after the fault").unwrap();
}

/// As long as the failed database is held, it is not opened beside itself; then it is.
#[test]
fn f31_what_holds_the_database_keeps_it_closed_and_the_error_says_so() {
    let disk = Disk::default();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    bind(&store, "before").unwrap();

    let held = store.database().unwrap();
    disk.fail_once(0);
    bind(&store, "unknown").unwrap_err();
    assert!(matches!(bind(&store, "held"), Err(RedbError::StillHeld)));
    assert!(matches!(store.view().map(drop), Err(RedbError::StillHeld)));
    drop(held);
    bind(&store, "given back").unwrap();

    let tx = store.begin().unwrap();
    disk.fail_once(0);
    // Something of the user's meets the disk.
    store.database().unwrap().begin_read().unwrap();
    tx.redb()
        .open_table(TableDefinition::<&str, u64>::new("mine"))
        .unwrap()
        .insert("a", 1)
        .unwrap();
    tx.commit().unwrap_err();
    bind(&store, "after the transaction").unwrap();
}

/// A database of the user's cannot be opened from here, and the error says so.
#[test]
fn f31_a_database_of_the_users_is_theirs_to_open() {
    let disk = Disk::default();
    let database = Database::builder().create_with_backend(disk.clone()).unwrap();
    let store = RedbStore::with_database(database).unwrap();
    disk.fail_once(0);
    assert!(matches!(bind(&store, "unknown"), Err(RedbError::Io(_))));
    let refused = bind(&store, "refused").unwrap_err();
    assert!(matches!(refused, RedbError::StoppedLent), "{refused}");
    drop(store);
    let database = Database::builder().create_with_backend(disk).unwrap();
    bind(&RedbStore::with_database(database).unwrap(), "again").unwrap();
}

/// What cannot be repaired is an error that says so, each time, and the file stays as it is.
#[test]
fn f31_what_cannot_be_repaired_says_so() {
    let (bytes, _) = sample();
    let disk = Disk::with(bytes);
    let store = RedbStore::open_on(disk.clone()).unwrap();
    disk.fail_once(0);
    bind(&store, "unknown").unwrap_err();
    let good = disk.bytes();
    disk.spoil();
    let spoilt = disk.bytes();
    for _ in 0..3 {
        let error = bind(&store, "refused").unwrap_err();
        assert!(matches!(error, RedbError::Damaged { .. } | RedbError::NotRedb { .. }), "{error}");
        assert!(disk.bytes() == spoilt, "it was changed");
    }
    disk.restore(good);
    bind(&store, "from the copy").unwrap();
}

/// After a sync that failed, the system takes for written what is not: only what is written again
/// reaches the disk.
#[test]
fn f31_what_a_failed_sync_lost_is_written_again() {
    let disk = Disk::forgetting();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    bind(&store, "before").unwrap();
    disk.fail_syncs(1);
    // On pages that nobody writes later.
    place(&store, "unknown").unwrap_err();
    bind(&store, "after").unwrap();
    let found = text(&store).unwrap();
    // The power is cut: what counts is what is on the disk itself.
    let left = RedbStore::open_on(Disk::with(disk.platter())).unwrap();
    assert_eq!(text(&left).unwrap(), found);
}
