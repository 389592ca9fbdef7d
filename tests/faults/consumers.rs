//! What went wrong at consumers: marks without effects, keys without the consumer, deferred events,
//! unknown types, calls to the outside (F6, F8, F9, F18, F22).

use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind};

use twobox::call::{CallEnd, CallKey, CallRefused, Intend, Resolve, Start, Started, WhenUnknown};
use twobox::relay::Relay;
use twobox::{
    CallState, Handled, InProcess, Inbox, InboxState, Key, Load, Message, Moment, Query, Reader,
    Reason, Receipt, RunError, Store,
};

use crate::support::{
    Flaky, StoreFault, arrival, at, body, consumer, continuing, draft, dump, echo, effect, effects,
    handler, inbox_row, outbox, place, run_until, settings, state,
};

/// The receiver dies at every point of its transaction, and the event comes again: the effect is
/// there once, and never without its mark, nor the mark without it (P5).
#[test]
fn f06_effect_and_mark_are_one_commit() {
    on_each_store!(|store: S| {
        for (n, fault) in StoreFault::ALL.into_iter().enumerate() {
            let arrived = arrival(&format!("event-{n}"), "k");
            let failing = Flaky::new(store, [Some(fault)]);
            let dies =
                Inbox::new(&failing, consumer("c")).receive(&arrived, at(0), echo::<Flaky<S>>);
            assert!(dies.is_err());
            let took = fault == StoreFault::CommitTook;
            assert_eq!(effects(store), n + usize::from(took));
            let again =
                Inbox::new(store, consumer("c")).receive(&arrived, at(1), echo::<S>).unwrap();
            assert_eq!(again, if took { Receipt::Duplicate } else { Receipt::Applied });
            assert_eq!(effects(store), n + 1);
        }
    });
}

/// The handler dies after it has written: by an error, and by a panic. Nothing of what it wrote is
/// there.
#[test]
fn f06_a_handler_that_breaks_off_leaves_nothing() {
    on_each_store!(|store: S| {
        let other = arrival("other", "k");
        let arrived = arrival("event", "k");
        let inbox = Inbox::new(store, consumer("c"));
        let writes = |tx: &mut twobox::Writing<'_, S::Tx<'_>>| {
            let _applied = tx
                .run(
                    twobox::Receive::new(consumer("side"), &other.event)
                        .effect(body("a row of the handler")),
                )
                .unwrap();
        };
        let failed = inbox.receive(&arrived, at(0), |tx, _| {
            writes(tx);
            Err::<Handled, _>("no")
        });
        assert_eq!(failed.unwrap(), Receipt::Failed(Reason::new("no")));
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            inbox.receive(&arrived, at(0), |tx, _| -> Result<Handled, String> {
                writes(tx);
                panic!("the handler panics, as the test wants")
            })
        }));
        assert!(panicked.is_err());
        assert_eq!(effects(store), 0);
        assert_eq!(inbox_row(store, "c", &arrived.event.id).unwrap().state, InboxState::Failing);
        assert_eq!(inbox.receive(&arrived, at(1), echo::<S>).unwrap(), Receipt::Applied);
        assert_eq!(effects(store), 1);
    });
}

/// One event of a batch fails at each place: the others are applied, it is not, and nothing is
/// there twice.
#[test]
fn f06_a_batch_is_applied_without_what_fails() {
    on_each_store!(|store: S| {
        for broken in 0..3 {
            let messages: Vec<Message> =
                (0..3).map(|n| arrival(&format!("event-{broken}-{n}"), "k")).collect();
            let inbox = Inbox::new(store, consumer("c"));
            let handler =
                handler::<S, _>(|_, message| match message.event.id == messages[broken].event.id {
                    true => Err("no"),
                    false => Ok(Handled::Effect(body(""))),
                });
            let before = effects(store);
            let receipts = inbox.receive_batch(&messages, at(0), handler).unwrap();
            for (n, receipt) in receipts.iter().enumerate() {
                assert_eq!(
                    *receipt,
                    if n == broken { Receipt::Failed(Reason::new("no")) } else { Receipt::Applied }
                );
            }
            assert_eq!(effects(store), before + 2);
        }
    });
}

/// The key of the inbox is the consumer and the event: in one store, each consumer applies it once,
/// whatever the others did.
#[test]
fn f08_each_consumer_has_its_own_copy() {
    on_each_store!(|store: S| {
        let arrived = arrival("event", "k");
        // Also where the two parts of the key run into each other: "a" and "aevent" and such.
        let consumers = ["loyalty", "mail", "loyalty/mail", "l"];
        for round in 0..3 {
            for name in consumers {
                let receipt = Inbox::new(store, consumer(name))
                    .in_order()
                    .receive(&arrived, at(round), echo::<S>)
                    .unwrap();
                assert_eq!(
                    receipt,
                    if round == 0 { Receipt::Applied } else { Receipt::Duplicate },
                    "{name}"
                );
            }
        }
        assert_eq!(effects(store), consumers.len());
        // One that fails does not keep the others from it, nor do they make it look done.
        let second = arrival("second", "k");
        let fails = Inbox::new(store, consumer("mail"))
            .receive(&second, at(4), |_, _| Err::<Handled, _>("no"))
            .unwrap();
        assert!(matches!(fails, Receipt::Failed(_)));
        assert_eq!(
            Inbox::new(store, consumer("loyalty")).receive(&second, at(5), echo::<S>).unwrap(),
            Receipt::Applied
        );
        assert_eq!(
            Inbox::new(store, consumer("mail")).receive(&second, at(6), echo::<S>).unwrap(),
            Receipt::Applied
        );
    });
}

/// To defer is not to finish: nothing is written, and the redelivery is no duplicate. Alone, in a
/// batch, and in order.
#[test]
fn f09_deferring_leaves_no_mark() {
    on_each_store!(|store: S| {
        let inbox = Inbox::new(store, consumer("c")).in_order();
        let later = Reason::new("not now");
        let messages: Vec<Message> =
            (0..3).map(|n| arrival(&format!("event-{n}"), &format!("k-{n}"))).collect();
        let mut defer = handler::<S, String>(|_, message| {
            let deferred = message.event.id == messages[1].event.id;
            Ok(if deferred { Handled::Defer(later.clone()) } else { Handled::Effect(body("")) })
        });
        let before = dump(store);
        for round in 0..3 {
            assert_eq!(
                inbox.receive(&messages[1], at(round), &mut defer).unwrap(),
                Receipt::Deferred(later.clone())
            );
            assert_eq!(dump(store), before);
        }
        let receipts = inbox.receive_batch(&messages, at(5), &mut defer).unwrap();
        assert_eq!(
            receipts,
            [Receipt::Applied, Receipt::Deferred(later.clone()), Receipt::Applied]
        );
        assert_eq!(inbox_row(store, "c", &messages[1].event.id), None);
        assert_eq!(inbox.receive(&messages[1], at(6), echo::<S>).unwrap(), Receipt::Applied);
        assert_eq!(effects(store), 3);
    });
}

/// Through a relay: a deferred event is not confirmed, comes again by itself, and is applied in the
/// end.
#[test]
fn f09_a_deferred_event_comes_again() {
    on_each_store!(|store: S| {
        let id = place(store, "a", [draft("t", "k")], at(0)).remove(0);
        let receiver = S::fresh();
        let mut calls = 0;
        let publisher = InProcess::new(Inbox::new(receiver, consumer("c")), |_, _| {
            calls += 1;
            Ok::<_, String>(if calls < 40 {
                Handled::Defer(Reason::new("not now"))
            } else {
                Handled::Effect(body(""))
            })
        });
        let mut relay =
            Relay::new(store, publisher, settings("relay"), Moment::steady(at(0))).unwrap();
        relay.run_until_idle(Moment::steady(at(0))).unwrap();
        assert_eq!((state(store, &id), effects(receiver)), ("pending", 0));
        run_until(&mut relay, at(0), at(600_000));
        assert_eq!((state(store, &id), effects(receiver)), ("confirmed", 1));
        drop(relay);
        // More often than an event may fail or be started: it is no failure.
        assert_eq!(calls, 40);
        assert_eq!((outbox(store, &id).failures, outbox(store, &id).starts), (0, 0));
    });
}

/// A handler was renamed, and nobody takes the old type any more: its events are not confirmed as
/// if they were done. They are tried again, are set aside in the end, and an operator sees which,
/// of what type, and why (P3).
#[test]
fn f18_an_event_that_no_one_can_handle_stays_visible() {
    fn handle(message: &Message) -> Result<Handled, String> {
        match message.event.event_type.as_str() {
            "order.created" => Ok(Handled::Effect(body(""))),
            unknown => Err(format!("there is no handler for {unknown}")),
        }
    }
    on_each_store!(|store: S| {
        // Whoever gives up first, the relay or the inbox.
        for (n, limit) in [3, 1_000].into_iter().enumerate() {
            let keys = [format!("k-{n}"), format!("other-{n}")];
            let ids = place(
                store,
                &format!("a-{n}"),
                [draft("order.renamed", &keys[0]), draft("order.created", &keys[1])],
                at(0),
            );
            let receiver = S::fresh();
            let inbox = Inbox::new(receiver, consumer("c")).max_failures(limit);
            let publisher = InProcess::new(inbox, |_, message| handle(message));
            let mut relay =
                Relay::new(store, publisher, continuing("relay"), Moment::steady(at(0))).unwrap();
            relay.run_until_idle(Moment::steady(at(0))).unwrap();
            // At once: visible as pending, with the reason.
            let stats = store.view().unwrap().stats(at(0)).unwrap();
            assert_eq!(stats.by_type[&twobox::EventType::new("order.renamed").unwrap()].pending, 1);
            assert_eq!(
                outbox(store, &ids[0]).reason.unwrap().as_str(),
                "there is no handler for order.renamed"
            );
            run_until(&mut relay, at(0), at(24 * 3_600_000));
            // In the end: in the hands of an operator, with the reason.
            let row = inbox_row(receiver, "c", &ids[0]).unwrap();
            assert_eq!(row.reason.unwrap().as_str(), "there is no handler for order.renamed");
            if limit == 3 {
                assert_eq!(row.state, InboxState::Poisoned);
            } else {
                assert_eq!(row.state, InboxState::Failing);
                assert_eq!(state(store, &ids[0]), "dead");
                let stats = store.view().unwrap().stats(at(0)).unwrap();
                assert_eq!(
                    stats.by_type[&twobox::EventType::new("order.renamed").unwrap()].dead,
                    1
                );
            }
            assert_eq!(effect(receiver, "c", &ids[0]), None);
            assert_eq!((state(store, &ids[1]), effects(receiver)), ("confirmed", 1));
        }
    });
}

/// A consumer that asks for order sets an event aside: the rest of its key goes on.
#[test]
fn f18_an_event_set_aside_does_not_hold_up_its_key() {
    on_each_store!(|store: S| {
        let ids = place(
            store,
            "a",
            (0..4).map(|n| draft(if n == 1 { "bad" } else { "good" }, "k")),
            at(0),
        );
        let receiver = S::fresh();
        let inbox = Inbox::new(receiver, consumer("c")).in_order().max_failures(2);
        let publisher =
            InProcess::new(inbox, |_, message| match message.event.event_type.as_str() {
                "bad" => Err("no"),
                _ => Ok(Handled::Effect(body(""))),
            });
        let mut relay =
            Relay::new(store, publisher, settings("relay"), Moment::steady(at(0))).unwrap();
        run_until(&mut relay, at(0), at(3_600_000));
        assert_eq!(inbox_row(receiver, "c", &ids[1]).unwrap().state, InboxState::Poisoned);
        assert_eq!(ids.iter().map(|id| state(store, id)).collect::<Vec<_>>(), ["confirmed"; 4]);
        assert_eq!(effects(receiver), 3);
    });
}

fn call_row<S: Reader>(store: &S, call: &CallKey) -> twobox::CallRow {
    let key = Key::Call(call.consumer.clone(), call.event.clone());
    let rows = store.view().unwrap().load(&Query::rows([key])).unwrap();
    rows.call(&call.consumer, &call.event).unwrap().0.clone()
}

/// The intent of a call is committed with the inbox row: neither is there without the other.
fn intend<S: Store>(store: &S, event: &str) -> CallKey {
    let arrived = arrival(event, "k");
    let call = CallKey { consumer: consumer("payments"), event: arrived.event.id.clone() };
    let inbox = Inbox::new(store, consumer("payments"));
    let received = inbox.receive(&arrived, at(0), |tx, _| {
        assert!(tx.run(Intend::new(call.clone())).unwrap());
        Ok::<_, String>(Handled::Done)
    });
    assert_eq!(received.unwrap(), Receipt::Applied);
    let again = inbox.receive(&arrived, at(0), |_, _| -> Result<Handled, String> {
        panic!("a duplicate is not handled")
    });
    assert_eq!(again.unwrap(), Receipt::Duplicate);
    call
}

/// The program dies between the start of a payment and its end: nobody knows whether it happened.
/// What is done then is the rule that the user chose: never a silent repetition, never a silent
/// success.
#[test]
fn f22_an_unknown_outcome_is_resolved_by_the_chosen_rule() {
    const PATIENCE: Duration = Duration::from_secs(60);
    on_each_store!(|store: S| {
        for (rule, then) in [
            (WhenUnknown::Repeat, Started::Call(2)),
            (WhenUnknown::Ask, Started::Ask),
            (WhenUnknown::Wait, Started::Wait),
        ] {
            let call = intend(store, &format!("{rule:?}"));
            let start = |now| store.run(Start::new(call.clone(), PATIENCE, rule), at(now)).unwrap();
            assert_eq!(start(0), Started::Call(1));
            // Here it dies. Within the patience it may still be under way, and nobody else makes
            // it.
            for now in [0, 1, 59_999] {
                assert_eq!(start(now), Started::UnderWay, "{rule:?}");
            }
            // Also if the clock has stepped back.
            assert_eq!(
                store
                    .run(Start::new(call.clone(), PATIENCE, rule), twobox::Millis::new(0))
                    .unwrap(),
                Started::UnderWay
            );
            assert_eq!(start(60_000), then);
            match rule {
                WhenUnknown::Repeat => {
                    assert_eq!(
                        (call_row(store, &call).state, call_row(store, &call).starts),
                        (CallState::Started, 2)
                    );
                    assert_eq!(start(60_001), Started::UnderWay);
                }
                WhenUnknown::Ask | WhenUnknown::Wait => {
                    // A state of its own, with a reason, however often somebody comes by.
                    for now in [60_001, 10_000_000] {
                        assert_eq!(start(now), then);
                        let row = call_row(store, &call);
                        assert_eq!((row.state, row.starts), (CallState::Unknown, 1));
                        assert!(row.note.unwrap().as_str().contains("nobody knows"));
                    }
                }
            }
            // It turns out that it did not happen: it is made once more. Then it turns out that it
            // did: never again.
            let resolve = |end, now| store.run(Resolve::new(call.clone(), end), at(now));
            resolve(CallEnd::NotDone(Reason::new("the bank has no such transfer")), 20_000_000)
                .unwrap();
            let Started::Call(last) = start(20_000_000) else { panic!("it is made") };
            // The answer of an earlier start comes late: it says nothing of the one that is under
            // way.
            let late = Resolve::new(call.clone(), CallEnd::NotDone(Reason::new("refused")))
                .of_start(last - 1);
            assert!(matches!(
                store.run(late, at(20_000_000)),
                Err(RunError::Refused(CallRefused::StartedAgain { .. }))
            ));
            assert_eq!(call_row(store, &call).state, CallState::Started);
            resolve(CallEnd::Done(Some(Reason::new("receipt 7"))), 20_000_001).unwrap();
            for now in [20_000_002, 90_000_000] {
                assert_eq!(start(now), Started::Done(Some(Reason::new("receipt 7"))));
            }
            assert!(resolve(CallEnd::NotDone(Reason::new("no")), 90_000_000).is_err());
            assert_eq!(call_row(store, &call).state, CallState::Done);
        }
    });
}

/// The store fails at every point of the start and of the end: the call is made only after its
/// start is known to be committed, and a call whose end was not recorded is unknown, not done and
/// not open.
#[test]
fn f22_a_crash_around_the_call() {
    on_each_store!(|store: S| {
        for fault in StoreFault::ALL {
            let took = fault == StoreFault::CommitTook;
            let call = intend(store, &format!("{fault:?}"));
            let start = || Start::new(call.clone(), Duration::from_secs(60), WhenUnknown::Wait);
            // Around the start: nobody may make the call, since nobody was told to.
            assert!(Flaky::new(store, [Some(fault)]).run(start(), at(0)).is_err());
            let next = store.run(start(), at(60_000)).unwrap();
            assert_eq!(next, if took { Started::Wait } else { Started::Call(1) });
            if took {
                store
                    .run(
                        Resolve::new(
                            call.clone(),
                            CallEnd::NotDone(Reason::new("it was not made")),
                        ),
                        at(60_000),
                    )
                    .unwrap();
                assert_eq!(store.run(start(), at(60_000)).unwrap(), Started::Call(2));
            }
            // Around the end.
            let done = || Resolve::new(call.clone(), CallEnd::Done(None));
            assert!(Flaky::new(store, [Some(fault)]).run(done(), at(60_001)).is_err());
            let next = store.run(start(), at(180_000)).unwrap();
            assert_eq!(next, if took { Started::Done(None) } else { Started::Wait });
            store.run(done(), at(180_001)).unwrap();
            assert_eq!(store.run(start(), at(180_002)).unwrap(), Started::Done(None));
        }
    });
}
