//! The sync driver: who commits, who tries again, and what is told when that is not known.

use core::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::panic::{AssertUnwindSafe, catch_unwind};

use twobox::flow::CONFLICT_TRIES;
use twobox::{
    Applied, Batch, Body, CommitOrder, Consumer, Destination, Draft, Event, EventId, Expect,
    Fingerprint, Key, Load, Millis, ParametersDiffer, Query, Reader, Receive, Received, Record,
    Register, Registered, Request, Revision, Rows, RunError, Store, StoreError, Stored, Tables,
    Transaction,
};
use twobox_memory::{MemoryStore, MemoryTransaction, State};

use crate::support::name;

const NOW: Millis = Millis::new(1_000);

/// A store over the one in memory that counts what is done and does not always do it.
#[derive(Debug, Default)]
pub(crate) struct Rigged {
    pub(crate) inner: MemoryStore,
    pub(crate) begun: AtomicU32,
    pub(crate) committed: AtomicU32,
    pub(crate) applied: AtomicU32,
    /// So many of the next batches meet a row that somebody else has changed.
    pub(crate) conflicts: AtomicU32,
    /// What the next steps do.
    pub(crate) load_fails: AtomicU32,
    pub(crate) load_conflicts: AtomicU32,
    pub(crate) apply_fails: AtomicU32,
    pub(crate) commit_fails: AtomicU32,
    pub(crate) commit_takes_and_fails: AtomicU32,
}

/// Takes one of what was set.
fn take(left: &AtomicU32) -> bool {
    left.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok()
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the disk is {0}")]
pub(crate) struct DiskError(pub(crate) &'static str);

impl StoreError for DiskError {
    fn is_conflict(&self) -> bool {
        self.0 == "busy"
    }
}

#[derive(Debug)]
pub(crate) struct RiggedTransaction<'a> {
    inner: MemoryTransaction<'a>,
    store: &'a Rigged,
}

impl Reader for Rigged {
    type Error = DiskError;
    type View<'a> = RiggedView;

    fn view(&self) -> Result<RiggedView, DiskError> {
        Ok(RiggedView(self.inner.state()))
    }
}

#[derive(Debug)]
pub(crate) struct RiggedView(State);

impl Load for RiggedView {
    type Error = DiskError;

    fn load(&mut self, query: &Query) -> Result<Rows, DiskError> {
        Ok(self.0.load(query).unwrap())
    }
}

impl Store for Rigged {
    type Tx<'a> = RiggedTransaction<'a>;

    fn begin(&self) -> Result<RiggedTransaction<'_>, DiskError> {
        self.begun.fetch_add(1, SeqCst);
        Ok(RiggedTransaction { inner: self.inner.begin().unwrap(), store: self })
    }
}

impl Load for RiggedTransaction<'_> {
    type Error = DiskError;

    fn load(&mut self, query: &Query) -> Result<Rows, DiskError> {
        if take(&self.store.load_fails) {
            Err(DiskError("unreadable"))
        } else if take(&self.store.load_conflicts) {
            Err(DiskError("busy"))
        } else {
            Ok(self.inner.load(query).unwrap())
        }
    }
}

impl Tables for RiggedTransaction<'_> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, DiskError> {
        self.store.applied.fetch_add(1, SeqCst);
        if take(&self.store.apply_fails) {
            return Err(DiskError("full"));
        }
        if take(&self.store.conflicts) {
            return Ok(Applied::Conflict(Some(batch.changes()[0].key())));
        }
        Ok(self.inner.apply(batch).unwrap())
    }
}

impl Transaction for RiggedTransaction<'_> {
    fn commit(self) -> Result<(), DiskError> {
        self.store.committed.fetch_add(1, SeqCst);
        if take(&self.store.commit_fails) {
            return Err(DiskError("gone"));
        }
        self.inner.commit().unwrap();
        if take(&self.store.commit_takes_and_fails) { Err(DiskError("gone")) } else { Ok(()) }
    }
}

impl Rigged {
    /// How often it began, applied and committed.
    pub(crate) fn counts(&self) -> (u32, u32, u32) {
        (self.begun.load(SeqCst), self.applied.load(SeqCst), self.committed.load(SeqCst))
    }

    fn is_empty(&self) -> bool {
        self.inner.state() == State::default()
    }

    fn has(&self, key: Key) -> bool {
        !self.inner.state().load(&Query::rows([key])).unwrap().rows.is_empty()
    }
}

fn request(id: &str, quantity: &str) -> Request {
    Request::new("s", id, Fingerprint::of([("quantity", quantity)])).unwrap()
}

fn order<'a>(request: &'a Request, id: &str) -> CommitOrder<'a> {
    let draft = Draft::new("order.created", Body::text("event").unwrap()).unwrap();
    CommitOrder::new(request, name(id), Body::text("order").unwrap(), [draft]).unwrap()
}

/// What every store checks before it writes: a row that is not there, or one that nobody has
/// written since it was read.
#[test]
fn a_guard_holds_for_what_it_expects_alone() {
    let revision = Revision::from_stored;
    for (expect, found, holds) in [
        (Expect::Absent, None, true),
        (Expect::Absent, Some(1), false),
        (Expect::Revision(revision(2)), Some(2), true),
        (Expect::Revision(revision(2)), Some(1), false),
        (Expect::Revision(revision(2)), Some(3), false),
        (Expect::Revision(revision(2)), None, false),
    ] {
        assert_eq!(expect.holds(found.map(revision)), holds, "{expect:?} {found:?}");
    }
    assert_eq!(
        (Expect::Absent.written(), Expect::Revision(revision(2)).written()),
        (revision(1), revision(3))
    );
}

/// P1: what changes something is committed once, and what changes nothing is not.
#[test]
fn an_operation_that_changes_nothing_does_not_commit() {
    let store = Rigged::default();
    let (two, three) = (request("r", "2"), request("r", "3"));
    assert_eq!(store.run(Register::new(&two), NOW), Ok(Registered::New));
    assert_eq!(store.counts(), (1, 1, 1));
    assert_eq!(store.run(Register::new(&two), NOW), Ok(Registered::Open));
    assert_eq!(store.counts(), (2, 1, 1));
    assert!(matches!(
        store.run(Register::new(&three), NOW),
        Err(RunError::Refused(ParametersDiffer { .. }))
    ));
    assert_eq!(store.counts(), (3, 1, 1));
    assert!(!store.run(order(&two, "o"), NOW).unwrap().repeated);
    assert_eq!(store.counts(), (4, 2, 2));
    assert!(store.run(order(&two, "o"), NOW).unwrap().repeated);
    assert_eq!(store.counts(), (5, 2, 2));
}

/// A conflict in a transaction of our own is tried again, as often as said and no more.
#[test]
fn a_conflict_is_tried_again() {
    let two = request("r", "2");
    let key = Key::Request(two.key.clone());
    for conflicts in [0, 1, CONFLICT_TRIES] {
        let store = Rigged { conflicts: conflicts.into(), ..Rigged::default() };
        assert_eq!(store.run(Register::new(&two), NOW), Ok(Registered::New));
        assert_eq!(store.counts(), (conflicts + 1, conflicts + 1, 1));

        let store = Rigged { conflicts: conflicts.into(), ..Rigged::default() };
        let mut runs = 0;
        let written = store.write(NOW, |tx| {
            runs += 1;
            tx.run(Register::new(&two))
        });
        assert_eq!(written, Ok(Registered::New));
        assert_eq!((runs, store.counts()), (conflicts + 1, (conflicts + 1, conflicts + 1, 1)));
    }
    for conflicts in [CONFLICT_TRIES + 1, u32::MAX] {
        let store = Rigged { conflicts: conflicts.into(), ..Rigged::default() };
        let conflict = store.run(Register::new(&two), NOW).unwrap_err();
        assert_eq!(conflict, RunError::Conflict(Some(key.clone())));
        assert_eq!(
            conflict.to_string(),
            "another transaction was in the way at requests s/r; roll back and run it again"
        );
        assert_eq!(store.counts(), (CONFLICT_TRIES + 1, CONFLICT_TRIES + 1, 0));

        let store = Rigged { conflicts: conflicts.into(), ..Rigged::default() };
        let written = store.write(NOW, |tx| tx.run(Register::new(&two)));
        assert_eq!(written, Err(RunError::Conflict(Some(key.clone()))));
        assert_eq!(store.counts(), (CONFLICT_TRIES + 1, CONFLICT_TRIES + 1, 0));
        assert!(store.is_empty());
    }
}

/// In a transaction that somebody lent us the conflict is handed up, and nothing is committed for
/// them.
#[test]
fn a_conflict_in_a_lent_transaction_is_handed_up() {
    let two = request("r", "2");
    let store = Rigged { conflicts: 1.into(), ..Rigged::default() };
    let mut tx = store.begin().unwrap();
    assert_eq!(
        tx.run(Register::new(&two), NOW),
        Err(RunError::Conflict(Some(Key::Request(two.key.clone()))))
    );
    assert_eq!(store.counts(), (1, 1, 0));
    // Its owner may run it again in the same transaction, since a conflict wrote nothing.
    assert_eq!(tx.run(Register::new(&two), NOW), Ok(Registered::New));
    // It sees what was applied before; others see nothing before the commit.
    assert_eq!(tx.run(Register::new(&two), NOW), Ok(Registered::Open));
    assert!(store.is_empty());
    tx.commit().unwrap();
    assert!(store.has(Key::Request(two.key)));
}

/// P2: all transitions of a `write` are one commit.
#[test]
fn a_write_is_one_commit() {
    let store = Rigged::default();
    let two = request("r", "2");
    let committed = store.write(NOW, |tx| {
        assert_eq!(tx.now(), NOW);
        assert_eq!(tx.run(Register::new(&two)).unwrap(), Registered::New);
        tx.run(order(&two, "o"))
    });
    assert!(!committed.unwrap().repeated);
    assert_eq!(store.counts(), (1, 2, 1));
    assert!(store.has(Key::Order(name("o"))) && store.has(Key::Event(name("o/1"))));
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum ShopError {
    #[error("sold out")]
    SoldOut,
    #[error(transparent)]
    Register(#[from] RunError<DiskError, ParametersDiffer>),
}

#[test]
fn an_error_rolls_a_write_back() {
    let store = Rigged::default();
    let two = request("r", "2");
    let refused = store.write(NOW, |tx| {
        let _ = tx.run(Register::new(&two))?;
        Err::<(), _>(ShopError::SoldOut)
    });
    assert_eq!(refused, Err(RunError::Refused(ShopError::SoldOut)));
    assert_eq!(store.counts(), (1, 1, 0));
    assert!(store.is_empty());
}

#[test]
fn a_panic_rolls_a_write_back() {
    let store = Rigged::default();
    let two = request("r", "2");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        store.write(NOW, |tx| -> Result<(), ShopError> {
            let _ = tx.run(Register::new(&two))?;
            std::panic::resume_unwind(Box::new("sold out"))
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(store.counts(), (1, 1, 0));
    assert!(store.is_empty());
    // The store is not left locked.
    assert_eq!(store.run(Register::new(&two), NOW), Ok(Registered::New));
}

/// A refusal leaves the transaction as it was: who expects it may go on.
#[test]
fn a_refusal_that_is_handled_leaves_the_write_usable() {
    let store = Rigged::default();
    let (two, three, other) = (request("r", "2"), request("r", "3"), request("q", "1"));
    let written = store.write(NOW, |tx| -> Result<_, ShopError> {
        let _ = tx.run(Register::new(&two))?;
        assert!(matches!(tx.run(Register::new(&three)), Err(RunError::Refused(_))));
        Ok(tx.run(Register::new(&other))?)
    });
    assert_eq!(written, Ok(Registered::New));
    assert!(store.has(Key::Request(two.key)) && store.has(Key::Request(other.key)));
    assert_eq!(store.counts(), (1, 2, 1));
}

/// A conflict is no refusal: whatever is made of it, nothing is committed that was decided on what
/// is no longer so.
#[test]
fn a_conflict_that_is_ignored_rolls_the_write_back() {
    let two = request("r", "2");
    for (conflicts, result) in [
        (1, Ok(2)),
        (CONFLICT_TRIES, Ok(CONFLICT_TRIES + 1)),
        (u32::MAX, Err(RunError::Conflict(Some(Key::Request(two.key.clone()))))),
    ] {
        for fails in [false, true] {
            let store = Rigged { conflicts: conflicts.into(), ..Rigged::default() };
            let mut runs = 0;
            let written = store.write(NOW, |tx| {
                runs += 1;
                let registered = tx.run(Register::new(&two));
                // What the closure makes of the conflict does not matter, be it success or an error
                // of its own.
                if fails && registered.is_err() { Err(ShopError::SoldOut) } else { Ok(runs) }
            });
            assert_eq!(written, result);
            assert_eq!(store.is_empty(), result.is_err());
            assert_eq!(store.counts().2, u32::from(result.is_ok()));
        }
    }
}

/// A conflict in one transition, after another was applied: the first one goes too, and comes again
/// with the next try.
#[test]
fn a_conflict_rolls_back_what_came_before_it() {
    let store = Rigged::default();
    let (two, other) = (request("r", "2"), request("q", "1"));
    let mut seen = Vec::new();
    let written = store.write(NOW, |tx| -> Result<(), ShopError> {
        seen.push(tx.run(Register::new(&two))?);
        if seen.len() == 1 {
            store.conflicts.store(1, SeqCst);
        }
        tx.run(Register::new(&other)).map(|_| ()).map_err(ShopError::from)
    });
    assert_eq!(written, Ok(()));
    assert_eq!(seen, [Registered::New, Registered::New]);
    assert_eq!(store.counts(), (2, 4, 1));
}

/// A store that fails before the commit has changed nothing; it is not tried again behind the
/// caller's back.
#[test]
fn a_store_that_fails_is_reported() {
    let two = request("r", "2");
    for (store, error) in [
        (Rigged { load_fails: 1.into(), ..Rigged::default() }, DiskError("unreadable")),
        (Rigged { apply_fails: 1.into(), ..Rigged::default() }, DiskError("full")),
    ] {
        let failed = store.run(Register::new(&two), NOW).unwrap_err();
        assert_eq!(failed, RunError::Store(error.clone()));
        assert_eq!(
            failed.to_string(),
            format!("the store failed before the commit, nothing was changed: {error}")
        );
        assert_eq!((store.begun.load(SeqCst), store.committed.load(SeqCst)), (1, 0));
        assert!(store.is_empty());
        assert_eq!(store.run(Register::new(&two), NOW), Ok(Registered::New));
    }
}

/// After a commit that failed nobody knows; to run the same again finds out and comes to the same
/// end (P1, P8).
#[test]
fn a_commit_that_fails_is_unknown() {
    let two = request("r", "2");
    let rigged = |takes: bool| Rigged {
        commit_fails: u32::from(!takes).into(),
        commit_takes_and_fails: u32::from(takes).into(),
        ..Rigged::default()
    };
    for (takes, again) in [(false, Registered::New), (true, Registered::Open)] {
        let store = rigged(takes);
        let unknown = store.run(Register::new(&two), NOW).unwrap_err();
        assert_eq!(unknown, RunError::Unknown(DiskError("gone")));
        assert_eq!(
            unknown.to_string(),
            "the commit failed and may have taken or not; run the same again to find out: the disk is gone"
        );
        assert_eq!(store.is_empty(), !takes);
        assert_eq!(store.counts(), (1, 1, 1));
        assert_eq!(store.run(Register::new(&two), NOW), Ok(again.clone()));

        let store = rigged(takes);
        let write = || store.write(NOW, |tx| tx.run(Register::new(&two)));
        assert_eq!(write(), Err(RunError::Unknown(DiskError("gone"))));
        assert_eq!(write(), Ok(again));
    }
}

/// P5, F6: an effect and its mark are one commit, and the user's part is left out when there is
/// nothing to do.
#[test]
fn an_effect_is_applied_once() {
    let store = Rigged::default();
    let (consumer, event): (Consumer, EventId) = (name("c"), name("e"));
    let event = Event {
        destination: Destination::default(),
        id: event,
        order: name("o"),
        event_type: name("order.created"),
        schema_version: 1,
        ordering_key: name("k"),
        time: NOW,
        headers: twobox::Headers::new(),
        body: Body::text("x").unwrap(),
    };
    let receive = || {
        store.write(NOW, |tx| {
            let received = tx.run(
                Receive::new(consumer.clone(), &event).effect(Body::text("points").unwrap()),
            )?;
            Ok::<_, RunError<DiskError, twobox::ContentDiffers>>(received)
        })
    };
    assert_eq!(receive(), Ok(Received::Applied));
    assert_eq!(receive(), Ok(Received::Duplicate));
    let effects = store
        .view()
        .unwrap()
        .load(&Query::Walk { table: twobox::Table::Effects, after: None, limit: 9 })
        .unwrap();
    assert!(matches!(&effects.rows[..], [Stored { record: Record::Effect(..), .. }]));
}
