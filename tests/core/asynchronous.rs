//! The async driver: the same as the sync one, its futures can be sent, and a future that is
//! dropped at any await leaves the tables as they were before or after, never between (P2, P8).

use core::future::Future;
use core::num::NonZeroU16;
use core::pin::pin;
use core::sync::atomic::Ordering::SeqCst;
use core::task::{Context, Poll, Waker};
use core::time::Duration;

use twobox::call::{CallKey, Intend, Start, WhenUnknown};
use twobox::flow::{CONFLICT_TRIES, ExchangeFlow};
use twobox::relay::{Exchange, RelaySettings};
use twobox::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction, AsyncWriting,
};
use twobox::store::{NoCall, asynchronous, drive};
use twobox::{
    AsyncHandler, Body, Cancel, Checked, Claim, CommitOrder, CountFailure, DeliveryPolicy,
    Destination, Draft, Dump, Ending, Event, Fingerprint, Handled, Headers, Inbox, Key, LeaseRef,
    Load, Message, Millis, ParametersDiffer, Query, Reader, Reason, Receive, Register, Registered,
    Renew, Request, Retention, RunError, Settle, Stats, Store, purge_all_async, redrive_all_async,
};
use twobox_memory::{MemoryStore, State};

use crate::driver::Rigged;
use crate::support::{lane_key, name};
use crate::waiting::{Waiting, answered, wait, waiting};

const NOW: Millis = Millis::new(1_000);

waiting!(MemoryStore);
waiting!(Rigged);

/// Polls a future so often at most and drops it; gives its output, if it came to its end.
fn poll_up_to<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    (0..polls).find_map(|_| match future.as_mut().poll(&mut context) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    })
}

/// More polls than any operation here needs.
const ENOUGH: usize = 1_000;

pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    poll_up_to(ENOUGH, future).unwrap()
}

fn request(id: &str) -> Request {
    Request::new("s", id, Fingerprint::of([("quantity", "2")])).unwrap()
}

fn draft() -> Draft {
    Draft::new("order.created", Body::text("event").unwrap()).unwrap().ordering_key(name("k"))
}

fn order<'a>(request: &'a Request, id: &str) -> CommitOrder<'a> {
    CommitOrder::new(request, name(id), Body::text("order").unwrap(), [draft(), draft()]).unwrap()
}

fn event() -> Event {
    Event {
        destination: Destination::default(),
        id: name("e"),
        order: name("o"),
        event_type: name("order.created"),
        schema_version: 1,
        ordering_key: name("k"),
        time: NOW,
        headers: Headers::new(),
        body: Body::text("x").unwrap(),
    }
}

/// Calls a macro with a short name, the tables beforehand, and a transition that changes them: one
/// of each kind.
macro_rules! each_transition {
    ($call:ident) => {
        let policy = Checked::<DeliveryPolicy>::default();
        let (first, second) = (request("r1"), request("r2"));
        let claim = || Claim::new(&policy, name("me"), Duration::from_millis(500), 10).unwrap();
        let lease = || LeaseRef { lane: lane_key("k"), token: NOW.get() + 1 };
        let failed = || Some(Ending::Failed(Reason::new("no")));
        let renew = || Renew::new([lease()], Duration::from_secs(9));
        let receive = || Receive::new(name("c"), &event()).effect(Body::text("points").unwrap());
        let fail = || CountFailure::new(name("c"), &event(), Reason::new("no"), 9);

        let empty = MemoryStore::new().state();
        let registered = after(&empty, |store| drop(store.run(Register::new(&first), NOW)));
        let committed = after(&registered, |store| drop(store.run(order(&first, "o1"), NOW)));
        let mut leased = Vec::new();
        let claimed = after(&committed, |store| leased = store.run(claim(), NOW).unwrap().leased);
        let settle = || Settle::new(&policy, [leased[0].settle(1, failed())]);
        let call = || CallKey { consumer: name("c"), event: name("e") };
        let intended = after(&empty, |store| drop(store.run(Intend::new(call()), NOW)));
        let started = Start::new(call(), Duration::from_secs(1), WhenUnknown::Wait);
        let failing = after(&empty, |store| drop(store.run(fail(), NOW)));

        $call!("register", &empty, Register::new(&first));
        $call!("commit an order that is registered", &registered, order(&first, "o1"));
        $call!("commit an order that is not", &committed, order(&second, "o2"));
        $call!("claim", &committed, claim());
        $call!("settle", &claimed, settle());
        $call!("renew", &claimed, renew());
        $call!("receive", &empty, receive());
        $call!("receive after a failure", &failing, receive());
        $call!("count the first failure", &empty, fail());
        $call!("count a failure", &failing, fail());
        $call!("cancel", &committed, Cancel::new([name("o1/2")], Reason::new("no")).unwrap());
        $call!("intend a call", &empty, Intend::new(call()));
        $call!("start a call", &intended, started.clone());
    };
}

/// The tables after some work.
fn after(before: &State, work: impl FnOnce(&MemoryStore)) -> State {
    let store = MemoryStore::from_state(before.clone());
    work(&store);
    store.state()
}

/// What remains when attempts and times are left aside (P8).
fn lasting(mut state: State) -> String {
    Dump::of(&mut state).unwrap().lasting().to_string()
}

#[test]
fn the_async_driver_is_the_sync_driver() {
    let (sync, other) = (MemoryStore::new(), Waiting(MemoryStore::new()));
    // In a row on one store: each operation twice, so that those which change nothing are there
    // too.
    macro_rules! both {
        ($what:literal, $before:expr, $transition:expr) => {
            for _ in 0..2 {
                let outcome = sync.run($transition, NOW);
                assert_eq!(block_on(other.run($transition, NOW)), outcome, $what);
                assert_eq!(other.0.state(), sync.state(), $what);
            }
            let outcome = sync.write(NOW, |tx| tx.run($transition));
            assert_eq!(
                block_on(asynchronous::write(&other, NOW, async |tx| tx.run($transition).await)),
                outcome,
                $what
            );
            assert_eq!(other.0.state(), sync.state(), $what);
            // And from where it changes something.
            let (sync, other) = (
                MemoryStore::from_state($before.clone()),
                Waiting(MemoryStore::from_state($before.clone())),
            );
            let outcome = sync.run($transition, NOW);
            assert!(outcome.is_ok());
            assert_ne!(&sync.state(), $before, $what);
            assert_eq!(block_on(other.run($transition, NOW)), outcome, $what);
            assert_eq!(other.0.state(), sync.state(), $what);
        };
    }
    each_transition!(both);

    // Refusals, in a transaction that is lent too.
    let others = Request { fingerprint: Fingerprint::of([("quantity", "3")]), ..request("r1") };
    let refused = sync.run(Register::new(&others), NOW);
    assert!(matches!(refused, Err(RunError::Refused(_))));
    assert_eq!(block_on(other.run(Register::new(&others), NOW)), refused);
    let lent = block_on(async {
        let mut tx = other.begin().await.unwrap();
        let refused = tx.run(Register::new(&others), NOW).await;
        let _ = tx.run(Register::new(&request("r9")), NOW).await.unwrap();
        tx.commit().await.unwrap();
        refused
    });
    assert_eq!(lent, refused);
    let _ = sync.run(Register::new(&request("r9")), NOW).unwrap();
    assert_eq!(other.0.state(), sync.state());

    // And the dump and the statistics of both.
    let dump = block_on(async { Dump::of_async(&mut other.view().await.unwrap()).await.unwrap() });
    assert_eq!(dump, Dump::of(&mut sync.view().unwrap()).unwrap());
    let stats = block_on(async { other.view().await.unwrap().stats(NOW).await.unwrap() });
    assert_eq!(stats, sync.view().unwrap().stats(NOW).unwrap());
    assert_ne!(stats, Stats::default());
}

/// Drops an operation after each number of polls until it comes to its end, and checks what each
/// leaves behind. It says how many polls it took.
fn cancel_at_each_await(
    what: &str,
    before: &State,
    work: impl AsyncFn(&Waiting<MemoryStore>),
) -> usize {
    let whole = Waiting(MemoryStore::from_state(before.clone()));
    block_on(work(&whole));
    let end = whole.0.state();
    assert_ne!(&end, before, "{what} changes something");
    let (mut not_taken, mut taken) = (0, 0);
    let polls = (0..ENOUGH).find(|polls| {
        let store = Waiting(MemoryStore::from_state(before.clone()));
        let ended = poll_up_to(*polls, work(&store)).is_some();
        let left = store.0.state();
        if left == end {
            taken += 1;
        } else {
            assert_eq!(
                &left, before,
                "{what}, dropped after {polls} polls, left something between"
            );
            assert_eq!(taken, 0, "{what}, dropped after {polls} polls, was taken back");
            not_taken += 1;
        }
        // The same again comes to the same end (P8), and the store is not left locked.
        block_on(work(&store));
        assert_eq!(
            lasting(store.0.state()),
            lasting(end.clone()),
            "{what} again, after {polls} polls"
        );
        assert!(!ended || left == end);
        ended
    });
    // Once at least it was dropped after the commit took and before the answer.
    assert!(not_taken >= 8 && taken >= 2, "{what}: {not_taken} {taken}");
    polls.unwrap()
}

#[test]
fn a_run_that_is_dropped_is_before_or_after() {
    macro_rules! cancel {
        ($what:literal, $before:expr, $transition:expr) => {
            let polls = cancel_at_each_await($what, $before, async |store| {
                drop(AsyncStore::run(store, $transition, NOW).await)
            });
            // Begin, load, apply and commit wait twice each.
            assert_eq!(polls, 9, $what);
        };
    }
    each_transition!(cancel);
}

/// P2: two transitions and what is between them.
#[test]
fn a_write_that_is_dropped_is_before_or_after() {
    let empty = MemoryStore::new().state();
    let two = request("r");
    let polls = cancel_at_each_await("register and commit", &empty, async |store| {
        let written = asynchronous::write(store, NOW, async |tx| {
            let _ = tx.run(Register::new(&two)).await.unwrap();
            wait().await;
            tx.run(order(&two, "o")).await
        });
        assert_eq!(written.await.unwrap().placed.order, name("o"));
    });
    assert_eq!(polls, 14);
    let polls = cancel_at_each_await("receive at two consumers", &empty, async |store| {
        let written = asynchronous::write(store, NOW, async |tx| {
            for consumer in ["c", "d"] {
                let _ = tx
                    .run(
                        Receive::new(name(consumer), &event())
                            .effect(Body::text(consumer).unwrap()),
                    )
                    .await?;
            }
            Ok::<_, RunError<_, _>>(tx.now())
        });
        assert_eq!(written.await, Ok(NOW));
    });
    assert_eq!(polls, 13);
}

/// As the sync driver: a conflict is tried again, is bounded, and is not lost when the closure
/// ignores it.
#[test]
fn a_conflict_is_tried_again() {
    let two = request("r");
    let key = Key::Request(two.key.clone());
    let nested = |error| match error {
        RunError::Conflict(key) => RunError::Conflict(key),
        other @ (RunError::Refused(_) | RunError::Store(_) | RunError::Unknown(_)) => {
            RunError::Refused(other)
        }
    };
    let rigged =
        |conflicts: u32| Waiting(Rigged { conflicts: conflicts.into(), ..Rigged::default() });
    for (conflicts, expected) in [
        (0, Ok(Registered::New)),
        (CONFLICT_TRIES, Ok(Registered::New)),
        (CONFLICT_TRIES + 1, Err(RunError::Conflict(Some(key.clone())))),
        (u32::MAX, Err(RunError::Conflict(Some(key.clone())))),
    ] {
        let begun = conflicts.min(CONFLICT_TRIES) + 1;
        let committed = u32::from(expected.is_ok());
        let counts =
            |store: &Waiting<Rigged>| (store.0.begun.load(SeqCst), store.0.committed.load(SeqCst));
        let store = rigged(conflicts);
        assert_eq!(block_on(store.run(Register::new(&two), NOW)), expected);
        assert_eq!(counts(&store), (begun, committed));

        let store = rigged(conflicts);
        let written = block_on(asynchronous::write(&store, NOW, async |tx| {
            tx.run(Register::new(&two)).await
        }));
        assert_eq!(written, expected.clone().map_err(nested));
        assert_eq!(counts(&store), (begun, committed));

        let store = rigged(conflicts);
        let ignored = block_on(asynchronous::write(&store, NOW, async |tx| {
            let _ = tx.run(Register::new(&two)).await;
            Ok::<_, ParametersDiffer>(Registered::New)
        }));
        assert_eq!(ignored, expected);
        assert_eq!(counts(&store), (begun, committed));
    }

    // What changes nothing is not committed, and an error rolls back.
    let store = rigged(0);
    for (run, registered) in [(1, Registered::New), (2, Registered::Open)] {
        assert_eq!(block_on(store.run(Register::new(&two), NOW)), Ok(registered));
        assert_eq!((store.0.begun.load(SeqCst), store.0.committed.load(SeqCst)), (run, 1));
    }
    let before = store.0.inner.state();
    let refused = block_on(asynchronous::write(&store, NOW, async |tx| {
        let _ = tx.run(Register::new(&request("q"))).await.unwrap();
        Err::<(), _>("sold out")
    }));
    assert_eq!(refused, Err(RunError::Refused("sold out")));
    assert_eq!(store.0.inner.state(), before);
}

/// An exchange of a relay is one commit, with either driver. After a conflict it is tried again, as
/// often as said and no more.
#[test]
fn an_exchange_is_one_commit_and_is_tried_again() {
    let settings = RelaySettings::new(name("me")).checked().unwrap();
    let two = request("r");
    let mut leased = Vec::new();
    let claimed = after(&MemoryStore::new().state(), |store| {
        store.run(order(&two, "o"), NOW).unwrap();
        let claim = Claim::new(&settings.policy, name("me"), settings.lease, 1).unwrap();
        leased = store.run(claim, NOW).unwrap().leased;
    });
    let settle = leased[0].settle(1, None);
    let exchange = |settle, claim| Exchange {
        settle,
        claim,
        claim_bytes: 1_000,
        claim_run: 16,
        claim_lease: settings.lease,
    };
    for (exchange, writes) in [
        (exchange(vec![settle.clone()], 0), true),
        (exchange(vec![settle.clone()], 9), true),
        // The lane is leased, so there is nothing to claim.
        (exchange(vec![], 9), false),
    ] {
        for conflicts in [0, 1, CONFLICT_TRIES, CONFLICT_TRIES + 1, u32::MAX] {
            let rigged = || Rigged {
                inner: MemoryStore::from_state(claimed.clone()),
                conflicts: conflicts.into(),
                ..Rigged::default()
            };
            let (sync, other) = (rigged(), Waiting(rigged()));
            let flow = || exchange.clone().flow(&settings, NOW, false);
            let exchanged = drive(&sync, flow(), &mut NoCall);
            assert_eq!(block_on(asynchronous::drive(&other, flow(), NoCall)), exchanged);
            assert_eq!(other.0.inner.state(), sync.inner.state());
            assert_eq!(other.0.counts(), sync.counts());
            let (begun, _, committed) = sync.counts();
            if !writes {
                assert_eq!((begun, committed), (1, 0));
                assert_eq!(exchanged.unwrap().1.unwrap().leased, []);
            } else if conflicts <= CONFLICT_TRIES {
                assert_eq!((begun, committed), (conflicts + 1, 1));
                let (settled, claimed) = exchanged.unwrap();
                assert_eq!(settled.unwrap().confirmed, 1);
                // What the settlement set free is claimed in the same commit.
                assert_eq!(
                    claimed.map(|claimed| claimed.leased.len()),
                    (exchange.claim > 0).then_some(1)
                );
            } else {
                assert_eq!((begun, committed), (CONFLICT_TRIES + 1, 0));
                assert!(matches!(exchanged, Err(RunError::Conflict(_))), "{exchanged:?}");
                assert_eq!(sync.inner.state(), claimed);
            }
        }
    }
    // An exchange of nothing begins nothing.
    let (sync, other) = (Rigged::default(), Waiting(Rigged::default()));
    let nothing = || exchange(vec![], 0).flow(&settings, NOW, false);
    assert_eq!(drive(&sync, nothing(), &mut NoCall), Ok((None, None)));
    assert_eq!(block_on(asynchronous::drive(&other, nothing(), NoCall)), Ok((None, None)));
    assert_eq!((sync.counts(), other.0.counts()), ((0, 0, 0), (0, 0, 0)));
}

/// What a runtime with several threads asks of a future.
fn sendable<F: Future + Send>(future: F) -> F {
    future
}

/// For any store and any transition, without knowing them.
fn run_is_send<'a, S: AsyncStore>(
    store: &'a S,
    request: &'a Request,
) -> impl Future<Output: Sized> + Send + 'a {
    sendable(store.run(Register::new(request), NOW))
}

/// For any store, with a closure that owns what it captures.
fn write_is_send<'a, S: AsyncStore>(
    store: &'a S,
    request: Request,
) -> impl Future<Output: Sized> + Send + 'a {
    sendable(asynchronous::write(store, NOW, async move |tx| tx.run(Register::new(&request)).await))
}

/// For any store, with a closure as well.
fn receive_async_is_send<'a, S: AsyncStore + Send>(
    inbox: &'a Inbox<&'a S>,
    message: &'a Message,
) -> impl Future<Output: Sized> + Send + 'a {
    sendable(inbox.receive_async(core::slice::from_ref(message), NOW, async move |tx, _| {
        let _ = tx.load(&Query::none()).await;
        Ok::<_, &str>(Handled::Done)
    }))
}

/// For any store: what goes through all of it, and the transaction of a relay.
async fn the_rest_is_send<S: AsyncStore>(store: &S) {
    let policy = Checked::<DeliveryPolicy>::default();
    let kept = Retention::default().checked(&policy).unwrap();
    let limit = NonZeroU16::new(9).unwrap();
    sendable(purge_all_async(store, &kept, limit, NOW)).await.unwrap();
    let _ = sendable(redrive_all_async(store, None, kept.redrive_window(), NOW)).await.unwrap();
    let claim = Claim::new(&policy, name("me"), Duration::from_secs(9), 9).unwrap();
    let flow = ExchangeFlow::new(None, Some(claim), NOW, S::WRITES_FIRST);
    let _ = sendable(asynchronous::drive(store, flow, NoCall)).await.unwrap();
    let mut view = sendable(store.view()).await.unwrap();
    let _ = sendable(Dump::of_async(&mut view)).await.unwrap();
    let _ = sendable(view.stats(NOW)).await.unwrap();
}

/// For any store and any handler that is a type of its own.
async fn receive_is_send<S: AsyncStore + Send>(
    inbox: &Inbox<&S>,
    message: &Message,
    mut handler: impl for<'a> AsyncHandler<S::Tx<'a>>,
) -> bool {
    let receiving = inbox.receive_with(core::slice::from_ref(message), NOW, &mut handler);
    sendable(receiving).await.is_ok()
}

struct Nothing;

impl<X: AsyncTables> AsyncHandler<X> for Nothing {
    type Error = String;

    async fn handle(
        &mut self,
        tx: &mut AsyncWriting<'_, X>,
        _message: &Message,
    ) -> Result<Handled, String> {
        let _ = tx.load(&Query::none()).await.map_err(|error| error.to_string())?;
        Ok(Handled::Done)
    }
}

#[test]
fn futures_can_be_sent() {
    let store = Waiting(MemoryStore::new());
    let two = request("r");
    let place = twobox::LanePlace { begun: NOW, sequence: 1, after: 0 };
    let message = Message { event: event(), place, attempt: 1 };
    assert!(block_on(receive_is_send(&Inbox::new(&store, name("c")), &message, Nothing)));
    let _ = block_on(run_is_send(&store, &two));
    let _ = block_on(write_is_send(&store, request("r")));
    let _ = block_on(receive_async_is_send(&Inbox::new(&store, name("c")), &message));
    block_on(sendable(the_rest_is_send(&store)));
    let mut view = block_on(sendable(store.view())).unwrap();
    let _ = block_on(sendable(Dump::of_async(&mut view))).unwrap();
    block_on(sendable(async {
        let mut tx = store.begin().await.unwrap();
        let _ = tx.run(Register::new(&two), NOW).await.unwrap();
        tx.commit().await.unwrap();
    }));
    // A closure that owns what it captures; see what is said at `write` about references.
    let written = sendable(asynchronous::write(&store, NOW, async move |tx| {
        tx.run(Register::new(&two)).await
    }));
    assert_eq!(block_on(written), Ok(Registered::Open));
}
