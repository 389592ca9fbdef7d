//! What each flow makes of a transaction that a store runs anew, of a conflict that only a handler
//! has met, and of an event that stands twice in a batch (P2, P5).

use std::collections::{BTreeMap, BTreeSet};

use core::cell::Cell;
use core::convert::Infallible;
use core::error::Error;
use core::fmt::{Debug, Display};
use core::num::NonZeroU16;
use core::sync::atomic::Ordering::SeqCst;
use core::time::Duration;

use proptest::prelude::*;
use twobox::flow::{Ask, Called, ExchangeFlow, Flow, ReceiveFlow, Steps, Stop, Told};
use twobox::store::asynchronous::{AsyncLoad, AsyncTables, AsyncWriting, write};
use twobox::store::{Call, NoCall, drive};
use twobox::{
    Batch, Body, Change, Checked, Claim, CommitOrder, DeliveryPolicy, Destination, Draft, End,
    Ending, Event, EventId, Fingerprint, Handled, Headers, Inbox, InboxState, Key, LanePlace, Load,
    Message, Millis, Query, Reader, Reason, Receipt, Register, Request, Retention, Revision,
    RunError, Settle, Store, Tables, Writing, purge_all, redrive_all,
};
use twobox_memory::MemoryStore;

use crate::asynchronous::block_on;
use crate::driver::{DiskError, Rigged, RiggedTransaction, RiggedView};
use crate::support::{name, text};
use crate::waiting::Waiting;

const NOW: Millis = Millis::new(1_000);

/// A store in which each transaction is run twice: first together with others, with whom it is
/// rolled back, then anew. The first run meets a conflict, if that is wanted.
#[derive(Debug, Default)]
struct Anew {
    store: Rigged,
    conflict: bool,
}

impl Reader for Anew {
    type Error = DiskError;
    type View<'a> = RiggedView;

    fn view(&self) -> Result<RiggedView, DiskError> {
        self.store.view()
    }
}

impl Store for Anew {
    type Tx<'a> = RiggedTransaction<'a>;

    fn begin(&self) -> Result<RiggedTransaction<'_>, DiskError> {
        self.store.begin()
    }

    fn transact<R>(
        &self,
        mut work: impl FnMut(&mut RiggedTransaction<'_>) -> End<R>,
    ) -> Result<R, RunError<DiskError, Infallible>> {
        self.store.conflicts.store(u32::from(self.conflict), SeqCst);
        let (End::Commit(_) | End::RollBack(_)) = work(&mut self.begin().map_err(RunError::of)?);
        self.store.conflicts.store(0, SeqCst);
        self.store.transact(work)
    }
}

/// The same tables in two stores, one of which runs each transaction anew; and what it met before.
fn both(work: impl Fn(&MemoryStore)) -> [(Anew, MemoryStore); 2] {
    [false, true].map(|conflict| {
        let plain = MemoryStore::new();
        work(&plain);
        let inner = MemoryStore::from_state(plain.state());
        (Anew { store: Rigged { inner, ..Rigged::default() }, conflict }, plain)
    })
}

impl Anew {
    /// It began so many transactions of its own, each of them twice, committed once each, and the
    /// tables are as they are in the other store.
    #[track_caller]
    fn ran(&self, transactions: u32, plain: &MemoryStore) {
        let (begun, _, committed) = self.store.counts();
        assert_eq!((begun, committed), (2 * transactions, transactions), "{self:?}");
        assert_eq!(self.store.inner.state(), plain.state());
    }
}

fn request() -> Request {
    Request::new("s", "r", Fingerprint::of([("quantity", "2")])).unwrap()
}

fn place(store: &MemoryStore) {
    let draft = Draft::new("order.created", text("event")).unwrap();
    let request = request();
    store.run(CommitOrder::new(&request, name("o"), text("order"), [draft]).unwrap(), NOW).unwrap();
}

/// Orders with an event each, and what a claim got of them.
fn claimed(policy: &Checked<DeliveryPolicy>, store: &MemoryStore) -> Vec<twobox::Leased> {
    place(store);
    let claim = Claim::new(policy, name("me"), Duration::from_secs(30), 9).unwrap();
    store.run(claim, NOW).unwrap().leased
}

/// What was met in a run that does not count is forgotten: one run that counts, and one commit.
#[test]
fn a_transaction_that_is_run_anew_begins_anew() {
    let request = request();
    for (anew, plain) in both(|_| ()) {
        assert_eq!(
            anew.run(Register::new(&request), NOW).unwrap(),
            plain.run(Register::new(&request), NOW).unwrap()
        );
        anew.ran(1, &plain);
    }
    for (anew, plain) in both(|_| ()) {
        let mut runs = 0;
        let written = anew.write(NOW, |tx| {
            runs += 1;
            tx.run(Register::new(&request))
        });
        assert_eq!((written.unwrap(), runs), (plain.run(Register::new(&request), NOW).unwrap(), 2));
        anew.ran(1, &plain);
    }
    let policy = Checked::<DeliveryPolicy>::default();
    for (anew, plain) in both(|store| drop(claimed(&policy, store))) {
        let leased = claimed(&policy, &MemoryStore::new());
        let exchange = || {
            let settle = Settle::new(&policy, [leased[0].settle(1, None)]);
            let claim = Claim::new(&policy, name("me"), Duration::from_secs(30), 9).unwrap();
            ExchangeFlow::new(Some(settle), Some(claim), NOW, false)
        };
        assert_eq!(
            drive(&anew, exchange(), &mut NoCall).unwrap(),
            drive(&plain, exchange(), &mut NoCall).unwrap()
        );
        anew.ran(1, &plain);
    }
}

/// The flows that go through a store page by page: a page is done once.
#[test]
fn a_page_that_is_run_anew_is_done_once() {
    let policy = Checked::<DeliveryPolicy>::default();
    let kept = Retention::default().checked(&policy).unwrap();
    let dead = |store: &MemoryStore| {
        let rejected = Some(Ending::Rejected(Reason::new("too large")));
        let settlement = claimed(&policy, store)[0].settle(0, rejected);
        assert_eq!(store.run(Settle::new(&policy, [settlement]), NOW).unwrap().dead.len(), 1);
    };
    for (anew, plain) in both(dead) {
        let redriven = redrive_all(&anew, None, kept.redrive_window(), NOW).unwrap();
        assert_eq!(redriven, redrive_all(&plain, None, kept.redrive_window(), NOW).unwrap());
        assert_eq!(redriven.done, [name("o/1")]);
        anew.ran(1, &plain);
    }
    let confirmed = |store: &MemoryStore| {
        let settlement = claimed(&policy, store)[0].settle(1, None);
        assert_eq!(store.run(Settle::new(&policy, [settlement]), NOW).unwrap().confirmed, 1);
    };
    for (anew, plain) in both(confirmed) {
        let (limit, late) = (NonZeroU16::new(9).unwrap(), NOW + Duration::from_secs(9_000_000));
        let purged = purge_all(&anew, &kept, limit, late).unwrap();
        assert_eq!(purged, purge_all(&plain, &kept, limit, late).unwrap());
        // The event and its lane; the request stays with its order.
        assert_eq!(purged, 2);
        anew.ran(2, &plain);
    }
}

fn message(id: &str, sequence: u64) -> Message {
    let event = Event {
        destination: Destination::default(),
        id: name(id),
        order: name("o"),
        event_type: name("order.created"),
        schema_version: 1,
        ordering_key: name("k"),
        time: NOW,
        headers: Headers::new(),
        body: Body::text("x").unwrap(),
    };
    let place = LanePlace { begun: NOW, sequence, after: sequence - 1 };
    Message { event, place, attempt: 1 }
}

/// P5: what a handler made of rows that were never committed counts for nothing: neither a failure
/// nor a deferral of it, nor that it ran.
#[test]
fn what_a_handler_made_of_a_run_that_does_not_count_is_forgotten() {
    let messages = ["e1", "e2", "e3"].map(|id| message(id, 1));
    let mishaps: [fn() -> Result<Handled, &'static str>; 3] = [
        || Ok(Handled::Done),
        || Ok(Handled::Defer(Reason::new("not now"))),
        || Err("no such row"),
    ];
    for mishap in mishaps {
        for (anew, plain) in both(|_| ()) {
            let calls = Cell::new(0);
            let receipts = Inbox::new(&anew, name("c")).receive_batch(&messages, NOW, |_, _| {
                calls.set(calls.get() + 1);
                // The second handler of the first run.
                if calls.get() == 2 { mishap() } else { Ok(Handled::Done) }
            });
            assert_eq!(receipts.unwrap(), [const { Receipt::Applied }; 3]);
            assert_eq!(calls.get(), 6, "each handler once in each run");
            let inbox = Inbox::new(&plain, name("c"));
            let _receipts =
                inbox.receive_batch(&messages, NOW, |_, _| Ok::<_, &str>(Handled::Done));
            anew.ran(1, &plain);
        }
    }
}

type Tx<'t, 's> = Writing<'t, RiggedTransaction<'s>>;
type AsyncTx<'t, 's> = AsyncWriting<'t, Waiting<RiggedTransaction<'s>>>;

/// An error of a handler that has the store's as its source.
#[derive(Debug, thiserror::Error)]
#[error("no stock: {0}")]
struct StockError(#[source] DiskError);

/// A row that is changed although it is not there.
fn hopeless() -> Batch {
    let change = Change::Delete { expect: Revision::FIRST, key: Key::Order(name("o")) };
    Batch::of(vec![change]).unwrap()
}

/// A handler meets a conflict of the store by itself, and returns it, or makes what it likes of it:
/// the transaction is run anew, and that counts as no failure of the consumer (P5).
#[test]
fn a_conflict_that_a_handler_returns_is_no_failure_of_it() {
    type Failed = Box<dyn Error>;
    type Shared = Box<dyn Error + Send + Sync>;
    fn looked<E: From<DiskError>>(tx: &mut Tx<'_, '_>) -> Result<(), E> {
        Ok(tx.load(&Query::none()).map(drop)?)
    }
    fn own<E: From<DiskError>>(tx: &mut Tx<'_, '_>) -> Result<(), E> {
        // Past what notes it.
        Ok(RiggedTransaction::load(tx, &Query::none()).map(drop)?)
    }
    /// Receives an event, and does the same in a write.
    fn check<E: Display + Debug + 'static>(handler: impl Fn(&mut Tx<'_, '_>) -> Result<(), E>) {
        let store = Rigged::default();
        let calls = Cell::new(0);
        let receipt = Inbox::new(&store, name("c")).receive(&message("e", 1), NOW, |tx, _| {
            calls.set(calls.get() + 1);
            store.load_conflicts.store(u32::from(calls.get() == 1), SeqCst);
            handler(tx).map(|()| Handled::Done)
        });
        assert_eq!((receipt.unwrap(), calls.get()), (Receipt::Applied, 2));
        assert_eq!((store.begun.load(SeqCst), store.committed.load(SeqCst)), (2, 1));
        let row = store.view().unwrap().received(&name("c"), &name("e")).unwrap().unwrap();
        assert_eq!((row.failures, row.state), (0, InboxState::Applied));

        let (store, calls) = (Rigged::default(), Cell::new(0));
        let written = store.write(NOW, |tx| {
            calls.set(calls.get() + 1);
            store.load_conflicts.store(u32::from(calls.get() == 1), SeqCst);
            handler(tx)
        });
        written.unwrap();
        assert_eq!((calls.get(), store.committed.load(SeqCst)), (2, 1));
    }
    check(looked::<DiskError>);
    check(looked::<Failed>);
    check(|tx| looked::<DiskError>(tx).map_err(|error| error.to_string()));
    check(|tx| looked::<DiskError>(tx).or(Ok::<_, DiskError>(())));
    check(own::<DiskError>);
    check(own::<Failed>);
    check(own::<Shared>);
    check(|tx| own::<DiskError>(tx).map_err(|error| Failed::from(StockError(error))));
    check(|tx| own::<DiskError>(tx).map_err(|error| Shared::from(StockError(error))));

    // Of a guard, where the answer is no error.
    let store = Rigged::default();
    let mut calls = 0;
    let written = store.write(NOW, |tx| {
        calls += 1;
        if calls == 1 { tx.apply(&hopeless()).map(drop) } else { Ok(()) }
    });
    assert_eq!((written.unwrap(), calls), ((), 2));

    // What is no conflict is a failure, boxed or not.
    let store = Rigged::default();
    let inbox = Inbox::new(&store, name("c"));
    let receipt = inbox.receive(&message("e", 1), NOW, |_, _| Err(DiskError("full"))).unwrap();
    assert_eq!(receipt, Receipt::Failed(Reason::new("the disk is full")));
    let failed = |_: &mut Tx<'_, '_>, _: &Message| Err(Failed::from(StockError(DiskError("full"))));
    let receipt = inbox.receive(&message("f", 1), NOW, failed).unwrap();
    assert_eq!(receipt, Receipt::Failed(Reason::new("no stock: the disk is full")));
}

/// The same with an async store.
#[test]
fn a_conflict_that_an_async_handler_returns_is_no_failure_of_it() {
    for way in 0..4 {
        let handler = async |store: &Rigged, tx: &mut AsyncTx<'_, '_>, calls: &Cell<u32>| {
            calls.set(calls.get() + 1);
            store.load_conflicts.store(u32::from(calls.get() == 1), SeqCst);
            match way {
                0 => tx.load(&Query::none()).await.map(drop),
                // Past what notes it.
                1 => Waiting::load(tx, &Query::none()).await.map(drop),
                2 if calls.get() == 1 => tx.apply(&hopeless()).await.map(drop),
                3 if calls.get() == 1 => {
                    let answer = tx.apply_then_load(&hopeless(), &Query::none()).await;
                    answer.map(drop)
                }
                _ => Ok(()),
            }
        };
        let (store, calls) = (Waiting(Rigged::default()), Cell::new(0));
        let messages = [message("e", 1)];
        let inbox = Inbox::new(&store, name("c"));
        let received = inbox.receive_async(&messages, NOW, async |tx, _| {
            handler(&store.0, tx, &calls).await.map(|()| Handled::Done)
        });
        let receipts = block_on(received).unwrap();
        assert_eq!((receipts, calls.get()), (vec![Receipt::Applied], 2), "{way}");
        let calls = Cell::new(0);
        let written = write(&store, NOW, async |tx| handler(&store.0, tx, &calls).await);
        block_on(written).unwrap();
        assert_eq!((calls.get(), store.0.committed.load(SeqCst)), (2, 2), "{way}");
    }
}

/// A flow that tells which transaction it is in.
struct Watched<'c, F>(F, &'c Cell<u32>);

impl<F: Steps> Steps for Watched<'_, F> {
    fn next(&mut self, told: Told<'_>) -> Ask {
        self.1.set(self.1.get() + u32::from(told == Told::Begun));
        self.0.next(told)
    }
}

impl<F: Flow> Flow for Watched<'_, F> {
    type Output = F::Output;
    type Refusal = F::Refusal;

    fn finish(self) -> Result<F::Output, Stop<F::Refusal>> {
        self.0.finish()
    }
}

/// Handlers that do what was drawn for them, in turn.
struct Drawn<'c> {
    messages: &'c [Message],
    attempt: &'c Cell<u32>,
    outcomes: std::vec::IntoIter<Called>,
    /// In which transaction each was called.
    calls: BTreeSet<(u32, EventId)>,
}

impl<X> Call<X> for Drawn<'_> {
    fn call(&mut self, _tx: &mut X, n: usize) -> Called {
        let id = &self.messages[n].event.id;
        assert!(
            self.calls.insert((self.attempt.get(), id.clone())),
            "{id} twice in transaction {}",
            self.attempt.get()
        );
        self.outcomes.next().unwrap_or(Called::Done)
    }
}

/// Events of few ids, so that most stand more than once, some with other content.
fn batches() -> impl Strategy<Value = Vec<Message>> {
    let one = (0..4_u64, prop::bool::weighted(0.1)).prop_map(|(n, other)| {
        let mut message = message(&format!("e{n}"), 1);
        if other {
            message.event.body = text("y");
        }
        message
    });
    prop::collection::vec(one, 0..9)
}

fn outcomes() -> impl Strategy<Value = Vec<Called>> {
    let outcome = prop_oneof![
        4 => Just(Called::Done),
        2 => Just(Called::Effect(text("points"))),
        2 => Just(Called::Defer(Reason::new("not now"))),
        2 => Just(Called::Failed(Reason::new("no such row"))),
        1 => Just(Called::Conflict(None)),
    ];
    prop::collection::vec(outcome, 0..9)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// P5: of an event that stands more than once in a batch, the handler is called at most once
    /// in each transaction, and it is applied at most once.
    #[test]
    fn an_event_that_stands_twice_is_handled_once(
        messages in batches(),
        outcomes in outcomes(),
    ) {
        let store = MemoryStore::new();
        let inbox = Inbox::new(&store, name("c"));
        let attempt = Cell::new(0);
        let (outcomes, calls) = (outcomes.into_iter(), BTreeSet::new());
        let mut call = Drawn { messages: &messages, attempt: &attempt, outcomes, calls };
        let flow = ReceiveFlow::new(inbox.reception(), &messages, NOW);
        let receipts = drive(&store, Watched(flow, &attempt), &mut call).unwrap();
        prop_assert_eq!(receipts.len(), messages.len());
        let mut applied = BTreeMap::new();
        for (message, receipt) in messages.iter().zip(&receipts) {
            let id = &message.event.id;
            match receipt {
                Receipt::Applied => prop_assert_eq!(applied.insert(id, message), None),
                // The only way to be a duplicate here, and nothing is said to be one that is not.
                Receipt::Duplicate => prop_assert!(applied.contains_key(id)),
                Receipt::Deferred(_) | Receipt::Failed(_) | Receipt::Refused(_) => {}
                Receipt::Poisoned | Receipt::WaitsFor(_) => prop_assert!(false, "{:?}", receipt),
            }
            let row = store.view().unwrap().received(&name("c"), id).unwrap();
            let is_applied = row.is_some_and(|row| row.state == InboxState::Applied);
            prop_assert_eq!(is_applied, receipts.iter().zip(&messages).any(|(receipt, other)| {
                other.event.id == *id && *receipt == Receipt::Applied
            }));
        }
    }
}
