//! Callers who share a commit, whatever becomes of one of them. That they share it is certain: the
//! first keeps its turn until all others wait for theirs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use redb::{ReadableDatabase, ReadableTableMetadata, TableDefinition};
use twobox::{
    Body, CommitOrder, CommitRefused, Committed, Draft, Dump, Fingerprint, Millis, OrderId, Reader,
    Register, Registered, Request, RunError, Store, Table,
};

use crate::{RedbError, RedbOptions, RedbReader, RedbStore};

use super::MOST;
use counted::Counted;

#[path = "../../tests/store/counted.rs"]
#[allow(dead_code, reason = "other tests use it too")]
mod counted;

const NOW: Millis = Millis::new(1_000);
const MINE: TableDefinition<'_, u64, u64> = TableDefinition::new("mine");

fn store() -> (Counted, RedbStore) {
    let storage = Counted::default();
    let store = RedbStore::create_on(storage.clone()).unwrap();
    (storage, store)
}

/// The order `n`, with the parameters `item`.
fn place(store: &RedbStore, n: usize, item: &str) -> Placing {
    let request =
        Request::new("shop", format!("req-{n}"), Fingerprint::of([("item", item)])).unwrap();
    let body = Body::text(item).unwrap();
    let event = Draft::new("order.created", body.clone()).unwrap();
    store.run(
        CommitOrder::new(&request, OrderId::new(format!("order-{n}")).unwrap(), body, [event])
            .unwrap(),
        NOW,
    )
}

type Placing = Result<Committed, RunError<RedbError, CommitRefused>>;

fn orders(store: &RedbStore) -> usize {
    Dump::of(&mut store.view().unwrap()).unwrap().count(Table::Orders)
}

type Work<'w, R> = Box<dyn FnOnce() -> R + Send + 'w>;

/// Lets all do their work in one transaction, one after the other as given, after a first one that
/// holds it open until all wait. Says what came of each, and how many syncs there were.
fn together<R: Send>(
    store: &RedbStore,
    storage: &Counted,
    work: Vec<Work<'_, R>>,
) -> (Vec<thread::Result<R>>, usize) {
    let ((started, results), counts) = storage.of(|| {
        thread::scope(|scope| {
            let first = AtomicBool::new(true);
            let mut threads = Vec::new();
            let count = work.len();
            let mut work = work.into_iter();
            let started = store.write(NOW, |tx| {
                // It may run again, when another one has spoilt the transaction.
                if first.swap(false, Ordering::SeqCst) {
                    for waiting in 1..=count {
                        let work = work.next().unwrap();
                        threads.push(scope.spawn(|| catch_unwind(AssertUnwindSafe(work))));
                        while store.group.waiting.load(Ordering::SeqCst) < waiting {
                            thread::yield_now();
                        }
                    }
                }
                tx.redb()
                    .open_table(MINE)
                    .map_err(RedbError::from)?
                    .insert(0, 0)
                    .map_err(RedbError::from)?;
                Ok::<_, RedbError>(())
            });
            let results: Vec<_> =
                threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            (started, results)
        })
    });
    // Whatever the others did, the first one has its row, or was told that the commit failed.
    match started {
        Ok(()) => assert_eq!(
            store
                .database()
                .unwrap()
                .begin_read()
                .unwrap()
                .open_table(MINE)
                .unwrap()
                .len()
                .unwrap(),
            1
        ),
        Err(RunError::Unknown(_)) => assert!(storage.fails()),
        Err(error) => panic!("{error}"),
    }
    (results, counts.syncs)
}

fn placing<'w>(store: &'w RedbStore, n: usize, item: &'static str) -> Work<'w, Placing> {
    Box::new(move || place(store, n, item))
}

/// Writes, and then gives up.
fn giving_up(store: &RedbStore, n: usize, panics: bool) -> Work<'_, Placing> {
    Box::new(move || {
        let given_up = store.write(NOW, |tx| {
            let request =
                Request::new("shop", format!("req-{n}"), Fingerprint::of([("item", "notebook")]))
                    .unwrap();
            assert_eq!(tx.run(Register::new(&request)).unwrap(), Registered::New);
            assert!(!panics, "this is part of the test");
            Err::<(), ()>(())
        });
        assert!(matches!(given_up, Err(RunError::Refused(()))), "{given_up:?}");
        Err(RunError::Store(RedbError::Broken))
    })
}

/// P2: one commit for all, and each is told when it is durable.
#[test]
fn callers_that_come_at_once_share_a_commit() {
    let (storage, store) = store();
    let (placed, syncs) =
        together(&store, &storage, (1..=8).map(|n| placing(&store, n, "notebook")).collect());
    assert!(placed.into_iter().all(|placed| !placed.unwrap().unwrap().repeated));
    assert_eq!((orders(&store), syncs), (8, 1));
}

/// A lone caller commits at once, and one that changes nothing does not commit.
#[test]
fn a_lone_caller_waits_for_nobody() {
    let (storage, store) = store();
    let (placed, counts) = storage.of(|| place(&store, 1, "notebook"));
    assert_eq!((placed.unwrap().repeated, counts.syncs), (false, 1));
    let ((), counts) = storage.of(|| {
        assert!(place(&store, 1, "notebook").unwrap().repeated);
        assert!(matches!(
            place(&store, 1, "pen"),
            Err(RunError::Refused(CommitRefused::ParametersDiffer(_)))
        ));
        store.write(NOW, |_| Ok::<_, ()>(())).unwrap();
    });
    assert_eq!(counts.syncs, 0);
}

/// P1: a retry that meets its first try in the same commit is answered as ever, and a misuse
/// refused. Neither is a reason to commit again.
#[test]
fn the_same_key_at_once() {
    let (storage, store) = store();
    let work = vec![
        placing(&store, 1, "notebook"),
        placing(&store, 1, "notebook"),
        placing(&store, 1, "pen"),
        placing(&store, 2, "pen"),
    ];
    let (placed, syncs) = together(&store, &storage, work);
    let [first, again, misuse, other] = placed.try_into().unwrap();
    assert!(!first.unwrap().unwrap().repeated);
    assert!(again.unwrap().unwrap().repeated);
    assert!(matches!(misuse.unwrap(), Err(RunError::Refused(CommitRefused::ParametersDiffer(_)))));
    assert!(!other.unwrap().unwrap().repeated);
    assert_eq!((orders(&store), syncs), (2, 1));
}

/// Whoever gives up after they have written, or panics, takes nobody else's work with them,
/// wherever they stand (P2).
#[test]
fn who_gives_up_spoils_nobody() {
    for panics in [false, true] {
        for place in 0..4 {
            let (storage, store) = store();
            let mut work: Vec<Work<'_, Placing>> =
                (1..=3).map(|n| placing(&store, n, "notebook")).collect();
            work.insert(place, giving_up(&store, 9, panics));
            let (mut placed, _) = together(&store, &storage, work);
            let gave_up = placed.remove(place);
            assert_eq!(gave_up.is_err(), panics, "at {place}");
            for placed in placed {
                assert!(!placed.unwrap().unwrap().repeated, "at {place}");
            }
            assert_eq!(orders(&store), 3, "at {place}, panics: {panics}");
        }
    }
}

/// P8: when the commit fails, whoever wrote is told that nobody knows, and nobody is told that an
/// order of it is there.
#[test]
fn a_commit_that_fails_is_told_to_all() {
    let (storage, store) = store();
    let failing = Mutex::new(Some(storage.clone()));
    let mut work: Vec<Work<'_, Placing>> =
        (1..=3).map(|n| placing(&store, n, "notebook")).collect();
    // A retry in the same transaction found the order there, which may now be gone.
    work.push(placing(&store, 1, "notebook"));
    work.insert(
        0,
        Box::new(|| {
            let storage = failing.lock().unwrap().take().unwrap();
            storage.fail();
            place(&store, 4, "notebook")
        }),
    );
    let (placed, _) = together(&store, &storage, work);
    let placed: Vec<Placing> = placed.into_iter().map(Result::unwrap).collect();
    let (again, wrote) = placed.split_last().unwrap();
    for placed in wrote {
        assert!(matches!(placed, Err(RunError::Unknown(RedbError::Io(_)))), "{placed:?}");
    }
    assert!(matches!(again, Err(RunError::Store(_))), "{again:?}");
}

/// A panic leaves neither pages that nobody frees nor a file that is to be repaired.
#[test]
fn a_panic_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.redb");
    let store = RedbOptions::new().shared(true).create(&path).unwrap();
    let pages =
        || store.database().unwrap().begin_write().unwrap().stats().unwrap().allocated_pages();
    let before = pages();
    assert!(catch_unwind(AssertUnwindSafe(giving_up(&store, 1, true))).is_err());
    assert_eq!(pages(), before);
    store.close().unwrap();
    RedbReader::open(&path).unwrap();
}

/// Whoever breaks the transaction with redb's own means, as by a panic in the middle of a change,
/// spoils nobody else's work: nothing was committed, and only this one is told so (P2).
#[test]
fn who_breaks_the_transaction_spoils_nobody() {
    const YOURS: TableDefinition<'_, u64, u64> = TableDefinition::new("yours");
    for place in 0..4 {
        let (storage, store) = store();
        let mut work: Vec<Work<'_, Placing>> =
            (1..=3).map(|n| placing(&store, n, "notebook")).collect();
        let breaking: Work<'_, Placing> = Box::new(|| {
            let broken = store.write(NOW, |tx| {
                let mut table = tx.redb().open_table(YOURS).unwrap();
                table.insert(1, 1).unwrap();
                let caught = catch_unwind(AssertUnwindSafe(|| {
                    table.retain(|_, _| panic!("this is part of the test"))
                }));
                assert!(caught.is_err());
                Ok::<_, ()>(())
            });
            assert!(matches!(broken, Err(RunError::Unknown(RedbError::Broken))), "{broken:?}");
            Err(RunError::Store(RedbError::Broken))
        });
        work.insert(place, breaking);
        let (mut placed, _) = together(&store, &storage, work);
        assert!(placed.remove(place).is_ok(), "at {place}");
        assert!(placed.into_iter().all(|placed| !placed.unwrap().unwrap().repeated), "at {place}");
        assert_eq!(orders(&store), 3, "at {place}");
    }
}

/// However many come, and never cease to, a commit is not put off for ever.
#[test]
fn those_who_never_cease_to_come_put_no_commit_off() {
    fn comes<'s, 'e>(scope: &'s thread::Scope<'s, 'e>, store: &'e RedbStore, left: usize) {
        scope.spawn(move || {
            let mut next = (left > 0).then(|| left - 1);
            let written = store.write(NOW, |tx| {
                if let Some(left) = next.take() {
                    comes(scope, store, left);
                    while store.group.waiting.load(Ordering::SeqCst) == 0 {
                        thread::yield_now();
                    }
                }
                tx.redb()
                    .open_table(MINE)
                    .map_err(RedbError::from)?
                    .insert(left as u64, 0)
                    .map_err(RedbError::from)?;
                Ok::<_, RedbError>(())
            });
            assert!(written.is_ok(), "{written:?}");
        });
    }
    let (storage, store) = store();
    let ((), counts) = storage.of(|| thread::scope(|scope| comes(scope, &store, MOST)));
    assert_eq!(
        store.database().unwrap().begin_read().unwrap().open_table(MINE).unwrap().len().unwrap(),
        MOST as u64 + 1
    );
    assert_eq!(counts.syncs, 2);
}
