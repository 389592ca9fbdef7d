//! What went wrong with events: overlooked, known by their payload, cut by a store (F1, F17, F19).

use core::time::Duration;

use proptest::prelude::*;
use twobox::call::{CallEnd, CallKey, CallRefused, Resolve, Start, WhenUnknown};
use twobox::relay::{Published, Relay};
use twobox::{
    Applied, Body, Cancel, CommitOrder, Discard, Draft, Ending, EventId, EventType, Handled,
    InProcess, Inbox, Invalid, LeaseRef, Load, Moment, NotDone, OrderId, OrderingKey, Reason,
    Receipt, Redrive, Register, Renew, Request, RunError, Settle, Stale, Tables, Transition,
};

use crate::support::{
    Backend, Script, at, body, consumer, draft, dump, echo, effect, effects, lane_key, message,
    name, outbox, permutations, place, request, settings, state, window,
};

/// Numbers are given in one order and committed in another, and a relay looks after each commit:
/// each event is delivered, once, whatever was seen before it. All orders of four requests over two
/// keys.
#[test]
fn f01_a_late_commit_of_a_lower_number_is_delivered() {
    on_each_store!(|store: S| {
        let mut expected = Vec::new();
        let mut sent = Vec::new();
        for (n, permutation) in permutations(4).into_iter().enumerate() {
            // The keys are bound in the order of their numbers.
            let id = |number: usize| format!("{n:02}-{number}");
            let requests: Vec<Request> = (0..4).map(|number| request(&id(number))).collect();
            for request in &requests {
                store.run(Register::new(request), at(0)).unwrap();
            }
            for number in permutation {
                let key = format!("key-{}", number % 2);
                expected.extend(place(store, &id(number), [draft("t", &key)], at(0)));
                let mut script = Script::new(|_, _| Published::Confirmed);
                Relay::new(store, &mut script, settings("relay"), Moment::steady(at(0)))
                    .unwrap()
                    .run_until_idle(Moment::steady(at(0)))
                    .unwrap();
                sent.extend(script.sent().into_iter().map(|message| message.event.id.clone()));
            }
        }
        assert_eq!(sent, expected);
    });
}

/// An event that is due later stands before others of its key, which wait (P4); in another key
/// nobody waits for it.
#[test]
fn f01_a_lower_number_that_is_due_later_is_not_passed_over() {
    on_each_store!(|store: S| {
        let later = place(store, "a", [draft("t", "k").not_before(at(5_000))], at(0)).remove(0);
        let behind = place(store, "b", [draft("t", "k")], at(0)).remove(0);
        let beside = place(store, "c", [draft("t", "other")], at(0)).remove(0);
        let mut script = Script::new(|_, _| Published::Confirmed);
        let mut relay =
            Relay::new(store, &mut script, settings("relay"), Moment::steady(at(0))).unwrap();
        relay.run_until_idle(Moment::steady(at(4_999))).unwrap();
        relay.run_until_idle(Moment::steady(at(5_000))).unwrap();
        assert_eq!(script.ids(), [beside.as_str(), later.as_str(), behind.as_str()]);
    });
}

/// Two commits that were decided on the same state of a key cannot both take: the later one meets
/// the guard of the lane, and runs again with the next number. So no number is given before the
/// commit that uses it.
#[test]
fn f01_a_number_is_given_under_the_guard_of_its_lane() {
    on_each_store!(|store: S| {
        place(store, "before", [draft("t", "k")], at(0));
        let (one, two) = (request("one"), request("two"));
        let first = CommitOrder::new(&one, name("one"), body(""), [draft("t", "k")]).unwrap();
        let second = CommitOrder::new(&two, name("two"), body(""), [draft("t", "k")]).unwrap();
        let decide = |order: &CommitOrder<'_>| {
            let rows = store.view().unwrap().load(&order.query(at(1))).unwrap();
            order.decide(at(1), &rows).unwrap().batch
        };
        let (late, early) = (decide(&first), decide(&second));
        let apply = |batch| {
            let mut tx = store.begin().unwrap();
            let applied = tx.apply(batch).unwrap();
            twobox::Transaction::commit(tx).unwrap();
            applied
        };
        assert_eq!(apply(&early), Applied::Written);
        assert!(matches!(apply(&late), Applied::Conflict(_)));
        store.run(&first, at(1)).unwrap();
        let number = |id: &str| outbox(store, &name(id)).sequence;
        assert_eq!((number("before/1"), number("two/1"), number("one/1")), (1, 2, 3));
    });
}

/// Whoever names something that is not there is told so, in every operation there is; nobody takes
/// "no row" for success.
#[test]
fn f17_to_change_nothing_is_an_error() {
    on_each_store!(|store: S| {
        let id = place(store, "a", [draft("t", "k")], at(0)).remove(0);
        let before = dump(store);
        let ghost: EventId = name("ghost");
        let reason = || Reason::new("why");
        let policy = settings("relay").policy;

        let operated = [
            store.run(Cancel::new([ghost.clone()], reason()).unwrap(), at(1)).unwrap(),
            store.run(Redrive::new([ghost.clone()], window()).unwrap().force(), at(1)).unwrap(),
            store.run(Discard::new([ghost.clone()], reason()).unwrap(), at(1)).unwrap(),
        ];
        for operated in operated {
            assert_eq!(
                (operated.done, operated.refused),
                (vec![], vec![(ghost.clone(), NotDone::NoEvent)])
            );
        }

        let lease = |lane: &str| LeaseRef { lane: lane_key(lane), token: 1 };
        // Leases of another store, whose events have the same ids.
        let elsewhere = S::fresh();
        place(elsewhere, "a", [draft("t", "k")], at(0));
        let claim = twobox::Claim::new(&policy, name("relay"), Duration::from_secs(30), 1).unwrap();
        let mut other = elsewhere.run(claim, at(0)).unwrap().leased.remove(0);
        assert_eq!(other.events[0].message.event.id, id);
        let results = ["ghost", "k"].map(|lane| {
            other.lease = lease(lane);
            let rejected = Some(Ending::Rejected(reason()));
            if lane == "k" { other.settle(0, rejected) } else { other.settle(1, None) }
        });
        let settled = store.run(Settle::new(&policy, results), at(1)).unwrap();
        let why: Vec<&Stale> = settled.stale.iter().map(|stale| &stale.why).collect();
        assert_eq!((settled.confirmed, why), (0, vec![&Stale::NoLane, &Stale::Ended]));
        let renewed = store
            .run(Renew::new([lease("ghost"), lease("k")], Duration::from_secs(30)), at(1))
            .unwrap();
        assert_eq!((renewed.leases.len(), renewed.stale.len()), (0, 2));

        let call = CallKey { consumer: consumer("c"), event: ghost };
        let started =
            store.run(Start::new(call.clone(), Duration::ZERO, WhenUnknown::Repeat), at(1));
        assert!(matches!(started, Err(RunError::Refused(CallRefused::NotIntended { .. }))));
        let resolved = store.run(Resolve::new(call, CallEnd::Done(None)), at(1));
        assert!(matches!(resolved, Err(RunError::Refused(CallRefused::NotIntended { .. }))));
        assert_eq!(dump(store), before);
    });
}

/// A settlement can be made of a lease alone, and is of nothing but what that covers: not of what
/// came into its lane since, nor of what is in another one, whatever number is given.
#[test]
fn f17_an_event_is_known_by_its_id_and_place() {
    on_each_store!(|store: S| {
        let ids = place(store, "a", [draft("t", "k"), draft("t", "k"), draft("t", "other")], at(0));
        let relay = settings("relay");
        let claim =
            twobox::Claim::new(&relay.policy, relay.owner.clone(), relay.lease, 10).unwrap();
        let leased = store.run(claim, at(0)).unwrap().leased;
        let leased = leased.into_iter().find(|leased| leased.lease.lane == lane_key("k")).unwrap();
        let events = leased.events.iter().map(|next| &next.message.event.id);
        assert!(events.eq(&ids[..2]));
        let since = place(store, "b", [draft("t", "k")], at(1)).remove(0);
        // More than there are; and with that, nothing is left that an ending could have befallen.
        let too_many = leased.settle(9, Some(Ending::Rejected(Reason::new("too large"))));
        let settled = store.run(Settle::new(&relay.policy, [too_many]), at(2)).unwrap();
        assert_eq!((settled.confirmed, settled.dead.len(), settled.stale.len()), (2, 0, 0));
        let of = |id: &EventId| state(store, id);
        assert_eq!(ids.iter().map(of).collect::<Vec<_>>(), ["confirmed", "confirmed", "leased"]);
        assert_eq!(of(&since), "pending");
    });
}

/// Two events with the same bytes are two; one that comes again with its bytes in another form is
/// refused, and nothing of it is lost.
#[test]
fn f17_the_payload_is_not_the_identity() {
    on_each_store!(|store: S| {
        let ids = place(store, "a", [draft("t", "k"), draft("t", "k")], at(0));
        let inbox = Inbox::new(store, consumer("c"));
        let receive = |message: &_| {
            inbox
                .receive(message, at(1), |_, _| Ok::<_, String>(Handled::Effect(body(""))))
                .unwrap()
        };
        for id in &ids {
            assert_eq!(receive(&message(store, id)), Receipt::Applied);
        }
        let mut other = message(store, &ids[0]);
        other.event.body = Body::text("the same in other words").unwrap();
        let Receipt::Refused(refused) = receive(&other) else { panic!("it must be refused") };
        assert_eq!(refused.event, ids[0]);
        assert_eq!(effects(store), 2);
    });
}

/// Every byte there is goes through: order, event, store, relay, inbox, effect.
#[test]
fn f19_any_bytes_survive() {
    on_each_store!(|store: S| {
        let all: Vec<u8> = (0..=u8::MAX).collect();
        let bodies = [&b""[..], b"\0", b"a\0b", &all, b"\xff\xfe", b"\xed\xa0\x80", &[0; 4096]];
        let drafts = bodies.map(|bytes| Draft::new("t", Body::new("a/b", bytes).unwrap()).unwrap());
        let ids = place(store, "a", drafts, at(0));
        let receiver = S::fresh();
        let publisher = InProcess::new(Inbox::new(receiver, consumer("c")), echo::<S>);
        Relay::new(store, publisher, settings("relay"), Moment::steady(at(0)))
            .unwrap()
            .run_until_idle(Moment::steady(at(0)))
            .unwrap();
        for (id, bytes) in ids.iter().zip(bodies) {
            assert_eq!(effect(receiver, "c", id).unwrap().bytes(), bytes);
        }
    });
}

/// What a store could not keep is refused before it gets there, and the error says what was wrong
/// with which field.
#[test]
fn f19_names_are_checked_at_the_door() {
    for bad in ["\0", "a\0b", "line\nbreak", "\u{7f}", "\u{85}"] {
        let found = bad.chars().find(|c| c.is_control()).unwrap();
        let refused: [(&str, Option<Invalid>); 8] = [
            ("scope", Request::new(bad, "r", twobox::Fingerprint::of_bytes(b"")).err()),
            ("request id", Request::new("s", bad, twobox::Fingerprint::of_bytes(b"")).err()),
            ("order id", OrderId::new(bad).err()),
            ("event id", EventId::new(bad).err()),
            ("ordering key", OrderingKey::new(bad).err()),
            ("event type", EventType::new(bad).err()),
            ("consumer", twobox::Consumer::new(bad).err()),
            ("content type", Body::new(bad, b"").err()),
        ];
        for (field, error) in refused {
            let error = error.unwrap_or_else(|| panic!("{field} took {bad:?}")).to_string();
            assert!(error.contains(field) && error.contains(&format!("{found:?}")), "{error}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a name is allowed to be, each store finds it again and keeps it apart from its
    /// neighbours.
    #[test]
    fn f19_any_name_that_is_allowed_is_kept(names in prop::collection::btree_set("[ -~é€\u{10000}\u{10ffff}]{1,20}", 2..6)) {
        fn check<S: Backend>(names: &std::collections::BTreeSet<String>) {
            let store = S::fresh();
            for text in names {
                place(store, text, [Draft::new(text, body(text)).unwrap().id(name(text)).ordering_key(name(text))], at(0));
            }
            let mut script = Script::new(|_, _| Published::Confirmed);
            Relay::new(store, &mut script, settings("relay"), Moment::steady(at(0))).unwrap().run_until_idle(Moment::steady(at(0))).unwrap();
            let mut sent = script.ids();
            sent.sort_unstable();
            assert!(sent.iter().eq(names.iter()), "{sent:?} {names:?}");
            for message in script.sent() {
                assert_eq!(message.event.body.bytes(), message.event.id.as_str().as_bytes());
            }
        }
        check::<twobox_memory::MemoryStore>(&names);
        check::<twobox_redb::RedbStore>(&names);
    }
}
