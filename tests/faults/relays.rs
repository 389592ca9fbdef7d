//! What went wrong with relays: order, leases, counters, clocks, outages, stopping (F2, F3, F4, F7,
//! F11 to F15, F20).

use core::time::Duration;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use twobox::relay::{
    Action, Counters, Published, Publisher, Relay, RelayMachine, RelaySettings, Ticket,
};
use twobox::store::{NoCall, drive};
use twobox::{
    Checked, Claim, DeliveryPolicy, EventId, InProcess, Inbox, Load, Message, Millis, Moment,
    OrderingKey, Reason, Receipt, Renew, Settle, Stale, Store, WhenDead,
};

use crate::support::{
    Flaky, Script, StoreFault, arrival, at, consumer, continuing, draft, dump, echo, effects, lane,
    name, next_of, outbox, pending, permutations, place, run_until, settings, state, states,
    window,
};

fn reason(text: &str) -> Reason {
    Reason::new(text)
}

/// What each key's events were, in the order in which they were published first.
fn first_publishes<'a>(
    sent: impl IntoIterator<Item = &'a Message>,
) -> BTreeMap<OrderingKey, Vec<u64>> {
    let mut lanes: BTreeMap<OrderingKey, Vec<u64>> = BTreeMap::new();
    for message in sent {
        let lane = lanes.entry(message.event.ordering_key.clone()).or_default();
        if !lane.contains(&message.place.sequence) {
            lane.push(message.place.sequence);
        }
    }
    lanes
}

/// Within a key strictly one after the other, as committed, whatever fails; the keys beside each
/// other (P4).
#[test]
fn f02_one_key_in_order_other_keys_in_parallel() {
    on_each_store!(|store: S| {
        let keys = ["a", "b", "c", "d"];
        for n in 0..10 {
            place(store, &format!("order-{n}"), keys.map(|key| draft("t", key)), at(0));
        }
        // Each event of "b" fails at first, each third one of "c" twice; the rest goes through.
        let mut tries: BTreeMap<EventId, u32> = BTreeMap::new();
        let mut confirmed: BTreeMap<OrderingKey, u64> = BTreeMap::new();
        let mut script = Script::new(|message, _| {
            let last = confirmed.entry(message.event.ordering_key.clone()).or_default();
            assert_eq!(
                message.place.sequence,
                *last + 1,
                "the one before it is confirmed, and it was not"
            );
            let tries = tries.entry(message.event.id.clone()).or_default();
            *tries += 1;
            match message.event.ordering_key.as_str() {
                "b" if *tries == 1 => Published::Failed(reason("no")),
                "c" if message.place.sequence % 3 == 0 && *tries <= 2 => {
                    Published::Failed(reason("no"))
                }
                _ => {
                    *last += 1;
                    Published::Confirmed
                }
            }
        });
        let mut relay =
            Relay::new(store, &mut script, settings("relay"), Moment::steady(at(0))).unwrap();
        run_until(&mut relay, at(0), at(3_600_000));
        drop(relay);
        assert_eq!(states(store), [("confirmed", 40)]);
        for batch in &script.batches {
            let keys: BTreeSet<&OrderingKey> =
                batch.iter().map(|(_, message)| &message.event.ordering_key).collect();
            assert_eq!(keys.len(), batch.len(), "two events of one key at the same time");
        }
        assert!(
            script.batches.iter().any(|batch| batch.len() == keys.len()),
            "keys are published in parallel"
        );
    });
}

/// At a consumer that asks for order: whatever order the broker makes of them, and although some of
/// the key were cancelled, dead, or redriven to its end, events are applied as they were published,
/// and none waits for one that will not come.
#[test]
fn f02_a_consumer_that_asks_for_order_gets_it() {
    on_each_store!(|store: S| {
        let ids = place(
            store,
            "a",
            (0..6).map(|n| draft(if n == 3 { "oversize" } else { "t" }, "k")),
            at(0),
        );
        let cancelled = store
            .run(twobox::Cancel::new([ids[1].clone()], reason("changed my mind")).unwrap(), at(0))
            .unwrap();
        assert_eq!(cancelled.done.len(), 1);
        let mut rejects = true;
        let mut script = Script::new(|message, _| match message.event.event_type.as_str() {
            "oversize" if std::mem::take(&mut rejects) => {
                Published::Rejected(reason("larger than 1 MiB"))
            }
            _ => Published::Confirmed,
        });
        Relay::new(store, &mut script, continuing("relay"), Moment::steady(at(0)))
            .unwrap()
            .run_until_idle(Moment::steady(at(0)))
            .unwrap();
        let redriven =
            store.run(twobox::Redrive::new([ids[3].clone()], window()).unwrap(), at(0)).unwrap();
        assert_eq!(redriven.done.len(), 1);
        Relay::new(store, &mut script, continuing("relay"), Moment::steady(at(0)))
            .unwrap()
            .run_until_idle(Moment::steady(at(0)))
            .unwrap();
        // What was rejected never arrived.
        let sent = script.sent().into_iter().filter(|message| message.place.sequence != 4);
        let sent: Vec<Message> = sent.cloned().collect();
        assert_eq!(
            sent.iter().map(|message| message.place.sequence).collect::<Vec<_>>(),
            [1, 3, 5, 6, 7]
        );

        for (n, arrivals) in permutations(sent.len()).into_iter().enumerate() {
            let receiver = Inbox::new(store, consumer(&format!("c-{n}"))).in_order();
            let mut applied = Vec::new();
            for _ in 0..sent.len() {
                for message in arrivals.iter().map(|arrival| &sent[*arrival]) {
                    match receiver.receive(message, at(1), echo::<S>).unwrap() {
                        Receipt::Applied => applied.push(message.place.sequence),
                        Receipt::WaitsFor(before) => assert!(!applied.contains(&before)),
                        Receipt::Duplicate => {}
                        other @ (Receipt::Deferred(_)
                        | Receipt::Failed(_)
                        | Receipt::Poisoned
                        | Receipt::Refused(_)) => {
                            panic!("{other:?}")
                        }
                    }
                }
            }
            assert_eq!(applied, [1, 3, 5, 6, 7], "they arrived as {arrivals:?}");
        }
    });
}

/// One publish takes as long as a third of the lease, and a run has many: the lease is renewed in
/// time, and nobody else gets the lane.
#[test]
fn f03_a_lease_is_renewed_for_as_long_as_its_run_takes() {
    on_each_store!(|store: S| {
        place(store, "a", (0..10).map(|_| draft("t", "k")), at(0));
        let slow = RelaySettings { publish_timeout: Duration::from_secs(60), ..settings("slow") };
        let mut machine = RelayMachine::new(slow, Moment::steady(at(0))).unwrap();
        let policy = machine.settings().policy.clone();
        let (mut now, mut renewals, mut published) = (at(0), 0, Vec::new());
        // What is being published, and when that will have ended.
        let mut under_way: Option<(Ticket, Millis)> = None;
        for _ in 0..1_000 {
            match machine.poll_action() {
                Some(Action::Exchange(exchange)) => {
                    let flow = exchange.flow(machine.settings(), now, false);
                    let exchanged = drive(store, flow, &mut NoCall).unwrap();
                    assert!(exchanged.0.iter().all(|settled| settled.stale.is_empty()));
                    machine.handle_exchanged(Moment::steady(now), exchanged);
                }
                Some(Action::Renew(renew)) => {
                    renewals += 1;
                    assert!(
                        lane(store, "k").lease.unwrap().until > now,
                        "renewed before it ran out"
                    );
                    let renewed = store.run(renew, now).unwrap();
                    machine.handle_renewed(Moment::steady(now), &renewed);
                }
                Some(Action::Publish(tickets)) => {
                    let [ticket] = <[Ticket; 1]>::try_from(tickets).unwrap();
                    assert!(under_way.is_none(), "one at a time");
                    under_way = Some((ticket, now + Duration::from_secs(10)));
                }
                other @ Some(Action::BreakOff(_) | Action::GiveUp(_)) => {
                    panic!("nothing is lost or overdue: {other:?}")
                }
                None if pending(store) == 0 => break,
                None => {
                    let ends = under_way.as_ref().map(|(_, ends)| *ends);
                    now = next_of(&machine).into_iter().chain(ends).min().unwrap();
                    machine.handle_timeout(Moment::steady(now));
                    // All the while others look for work and find none.
                    let rival =
                        Claim::new(&policy, name("rival"), Duration::from_secs(30), 10).unwrap();
                    assert!(store.run(rival, now).unwrap().leased.is_empty());
                    if let Some((ticket, _)) = under_way.take_if(|(_, ends)| *ends <= now) {
                        published.push(ticket.message.place.sequence);
                        machine.handle_published(
                            Moment::steady(now),
                            &ticket,
                            Published::Confirmed,
                        );
                    }
                }
            }
        }
        assert!(published.into_iter().eq(1..=10));
        assert!(renewals >= 5, "{renewals}");
        assert_eq!(states(store), [("confirmed", 10)]);
    });
}

/// A relay sleeps through its lease and another one takes over: what the sleeper settles or renews
/// afterwards changes nothing, and it is told who has taken the lane (P6).
#[test]
fn f03_a_stale_holder_is_refused_and_told() {
    on_each_store!(|store: S| {
        place(store, "a", [draft("t", "k"), draft("t", "k")], at(0));
        let policy = Checked::<DeliveryPolicy>::default();
        let claim =
            |owner: &str| Claim::new(&policy, name(owner), Duration::from_secs(30), 10).unwrap();
        let sleeper = store.run(claim("sleeper"), at(0)).unwrap().leased.remove(0);
        assert!(store.run(claim("rival"), at(29_999)).unwrap().leased.is_empty());
        let rival = store.run(claim("rival"), at(30_000)).unwrap().leased.remove(0);
        // An event that was started and not settled is tried alone.
        assert_eq!(
            (sleeper.events.len(), rival.events.len(), rival.events[0].message.attempt),
            (2, 1, 2)
        );

        let before = dump(store);
        let settled =
            store.run(Settle::new(&policy, [sleeper.settle(2, None)]), at(30_001)).unwrap();
        assert_eq!((settled.confirmed, settled.stale.len()), (0, 1));
        assert_eq!(
            settled.stale[0].why,
            Stale::TakenOver { owner: name("rival"), token: rival.lease.token }
        );
        assert!(settled.stale[0].to_string().contains("rival has taken the lane"));
        let renewed = store
            .run(Renew::new([sleeper.lease.clone()], Duration::from_secs(30)), at(30_001))
            .unwrap();
        assert_eq!((renewed.leases.len(), renewed.stale.len()), (0, 1));
        assert_eq!(dump(store), before);

        assert_eq!(
            store.run(Settle::new(&policy, [rival.settle(1, None)]), at(30_002)).unwrap().confirmed,
            1
        );
        let late = store.run(Settle::new(&policy, [sleeper.settle(2, None)]), at(30_003)).unwrap();
        assert_eq!(late.stale[0].why, Stale::Ended);
        assert_eq!(states(store), [("confirmed", 1), ("pending", 1)]);
    });
}

/// A publisher with a message that brings the process down: whatever is published from then on is
/// never answered.
struct Killer<'k> {
    killer: &'k EventId,
    killed: &'k Cell<bool>,
    delivered: &'k mut Vec<EventId>,
}

impl Publisher for Killer<'_> {
    fn publish(&mut self, batch: &[Message], _: Millis) -> Vec<Published> {
        if batch.iter().any(|message| message.event.id == *self.killer) {
            self.killed.set(true);
        } else {
            self.delivered.extend(batch.iter().map(|message| message.event.id.clone()));
        }
        batch.iter().map(|_| Published::Confirmed).collect()
    }
}

/// An event kills the process each time it is published, without an answer. It is dead after the
/// limit of starts, and says so; what was claimed together with it, in its lane or in others, is
/// delivered and never dies for it.
#[test]
fn f04_an_event_that_kills_the_process_is_dead_and_no_other() {
    on_each_store!(|store: S| {
        for killer_at in [0, 3, 6] {
            let keys: Vec<String> = (0..5).map(|n| format!("{killer_at}-{n}")).collect();
            let drafts = keys.iter().flat_map(|key| (0..8).map(move |_| draft("t", key)));
            let ids = place(store, &format!("order-{killer_at}"), drafts, at(0));
            // In the lane in the middle, at each place of the run.
            let killer = ids[16 + killer_at].clone();
            let mut delivered = Vec::new();
            let policy = DeliveryPolicy {
                max_failures: 3,
                max_starts: 6,
                when_dead: WhenDead::Continue,
                ..DeliveryPolicy::default()
            };
            let policy = policy.checked().unwrap();
            let (mut now, mut deaths) = (at(0), 0);
            for life in 0..200 {
                let settings =
                    RelaySettings { policy: policy.clone(), ..settings(&format!("relay-{life}")) };
                let killed = Cell::new(false);
                let publisher =
                    Killer { killer: &killer, killed: &killed, delivered: &mut delivered };
                let mut relay =
                    Relay::new(store, publisher, settings, Moment::steady(now)).unwrap();
                for _ in 0..10_000 {
                    let stepped = relay.step(Moment::steady(now)).unwrap();
                    if killed.get() {
                        // The process is gone: what it would have settled is never settled.
                        break;
                    }
                    if !stepped {
                        match next_of(relay.machine()) {
                            Some(next) if pending(store) > 0 => now = next,
                            _ => break,
                        }
                    }
                }
                deaths += u32::from(killed.get());
                if pending(store) == 0 {
                    break;
                }
            }
            let row = outbox(store, &killer);
            assert_eq!(state(store, &killer), "dead");
            assert_eq!(row.starts, policy.max_starts);
            assert!(row.reason.unwrap().as_str().contains("without an answer"));
            for id in ids.iter().filter(|id| **id != killer) {
                assert_eq!(state(store, id), "confirmed", "{id} died for {killer}");
                assert!(delivered.contains(id));
            }
            // Once for each event of the run before it, and once for each of its own starts.
            assert!(deaths <= 8 + policy.max_starts, "{deaths} deaths");
        }
    });
}

/// The clock steps back at each moment of a delivery: the relay goes on, and is late by no more
/// than the step. What it waits for by itself it waits for as long as ever (F37).
#[test]
fn f07_a_clock_that_steps_back() {
    on_each_store!(|store: S| {
        for step_at in 0..12 {
            let key = format!("k-{step_at}");
            let ids = place(
                store,
                &format!("a-{step_at}"),
                (0..3).map(|_| draft("t", &key)),
                at(7_200_000),
            );
            let mut tries = 0;
            let mut script = Script::new(|_, _| {
                tries += 1;
                if tries == 2 { Published::Failed(reason("no")) } else { Published::Confirmed }
            });
            let mut relay =
                Relay::new(store, &mut script, settings("relay"), Moment::steady(at(7_200_000)))
                    .unwrap();
            let mut clock = Moment::steady(at(7_200_000));
            for step in 0..150 {
                if step == step_at {
                    clock.wall = clock.wall.before(Duration::from_secs(20));
                }
                if !relay.step(clock).unwrap() {
                    clock = clock + Duration::from_millis(250);
                }
            }
            // All of it within seconds after the step was caught up with.
            assert_eq!(
                ids.iter().map(|id| state(store, id)).collect::<Vec<_>>(),
                ["confirmed"; 3],
                "step {step_at}"
            );
        }
    });
}

/// F37: the clock jumps a year ahead and back while a relay claims: what it holds is settled by the
/// clock as it is then, a failed event is due after its backoff, and all of it is delivered within
/// seconds.
#[test]
fn f37_a_relay_outlives_a_clock_that_jumps_for_a_moment() {
    on_each_store!(|store: S| {
        let ids = place(store, "a", ["k", "k", "l"].map(|key| draft("t", key)), at(0));
        let mut tries = 0;
        let mut script = Script::new(|_, _| {
            tries += 1;
            if tries == 1 { Published::Failed(reason("no")) } else { Published::Confirmed }
        });
        let mut clock = Moment::steady(at(0));
        let mut relay = Relay::new(store, &mut script, settings("relay"), clock).unwrap();
        let year = Duration::from_secs(31_536_000);
        assert!(relay.step(Moment { wall: clock.wall + year, ..clock }).unwrap(), "it claims");
        assert!(lane(store, "k").lease.unwrap().until > at(0) + year);
        clock = clock + Duration::from_millis(60);
        while relay.step(clock).unwrap() {}
        let due = outbox(store, &ids[0]).due;
        assert!(due > clock.wall && due <= clock.wall + Duration::from_secs(1), "{due}");
        assert_eq!(lane(store, "k").due, Some(due));
        assert_eq!(relay.machine().now(), clock.wall);
        for _ in 0..100 {
            clock = clock + Duration::from_millis(50);
            while relay.step(clock).unwrap() {}
        }
        assert_eq!(states(store), [("confirmed", 3)]);
    });
}

/// F37: the clock shows two times in turn, a second apart: each stamp is one of them, and the work
/// is done in the time that it takes with a steady one.
#[test]
fn f37_a_clock_that_shows_two_times_in_turn() {
    on_each_store!(|store: S| {
        place(store, "a", (0..20).map(|n| draft("t", &format!("k-{n}"))), at(999_000));
        let mut script = Script::new(|_, _| Published::Confirmed);
        let clock = |n: u64| Moment {
            wall: at(if n.is_multiple_of(2) { 999_000 } else { 1_000_000 }),
            uptime: Duration::from_millis(n),
        };
        let short = RelaySettings { lease: Duration::from_millis(100), ..settings("relay") };
        let mut relay = Relay::new(store, &mut script, short, clock(0)).unwrap();
        for n in 0..100 {
            relay.step(clock(n)).unwrap();
            assert_eq!(relay.machine().now(), clock(n).wall);
        }
        assert_eq!(states(store), [("confirmed", 20)]);
        for n in 0..20 {
            let row = lane(store, &format!("k-{n}"));
            assert!([at(999_000), at(1_000_000)].contains(&row.changed_at), "{row:?}");
        }
    });
}

/// Two relays whose clocks are hours apart share a store: the fast one takes over leases that the
/// slow one holds. Both go on publishing; P6 decides whose word counts. Nothing is lost, and in
/// each key the first publishes are in order.
#[test]
fn f07_a_relay_that_is_hours_ahead() {
    on_each_store!(|store: S| {
        for n in 0..5 {
            place(store, &format!("order-{n}"), ["a", "b", "c"].map(|key| draft("t", key)), at(0));
        }
        let policy = Checked::<DeliveryPolicy>::default();
        let claim =
            |owner: &str| Claim::new(&policy, name(owner), Duration::from_secs(30), 64).unwrap();
        let ahead = Duration::from_secs(5 * 3600);
        let mut sent: Vec<(OrderingKey, u64)> = Vec::new();
        let mut stale = 0;
        for round in 0..100 {
            let now = at(round * 1_000);
            // The slow one claims and publishes, the fast one takes over in between, and then the
            // slow one settles.
            let slow = store.run(claim("slow"), now).unwrap().leased;
            let fast = store.run(claim("fast"), now + ahead).unwrap().leased;
            let mut results = Vec::new();
            for leased in slow.iter().chain(&fast) {
                let events = leased.events.iter().map(|next| &next.message);
                sent.extend(
                    events.map(|message| {
                        (message.event.ordering_key.clone(), message.place.sequence)
                    }),
                );
                results.push(leased.settle(leased.events.len(), None));
            }
            stale += store.run(Settle::new(&policy, results), now).unwrap().stale.len();
        }
        assert!(stale > 0, "leases were taken over");
        assert_eq!(states(store), [("confirmed", 15)]);
        for key in ["a", "b", "c"] {
            let mut firsts: Vec<u64> = Vec::new();
            for (_, sequence) in sent.iter().filter(|(lane, _)| lane.as_str() == key) {
                if !firsts.contains(sequence) {
                    firsts.push(*sequence);
                }
            }
            assert!(firsts.into_iter().eq(1..=5), "{key}");
        }
    });
}

/// The store of the relay is away at each transaction in each way, for one time or for long:
/// whatever was published and not settled goes back and is delivered again, the relay comes to its
/// end, and the consumer has each event once.
#[test]
fn f11_a_store_that_was_away_loses_nothing() {
    on_each_store!(|store: S| {
        for (n, (fault, first)) in StoreFault::ALL
            .into_iter()
            .flat_map(|fault| (0..6).map(move |first| (fault, first)))
            .enumerate()
        {
            for length in [1, 5] {
                let key = |event: usize| format!("k-{n}-{length}-{}", event % 2);
                let ids = place(
                    store,
                    &format!("a-{n}-{length}"),
                    (0..4).map(|event| draft("t", &key(event))),
                    at(0),
                );
                let receiver = S::fresh();
                let publisher =
                    InProcess::new(Inbox::new(receiver, consumer("c")).in_order(), echo::<S>);
                let script = std::iter::repeat_n(None, first)
                    .chain(std::iter::repeat_n(Some(fault), length));
                let flaky = Flaky::new(store, script);
                let mut relay =
                    Relay::new(&flaky, publisher, settings("relay"), Moment::steady(at(0)))
                        .unwrap();
                let (mut now, mut failures) = (at(0), 0);
                for _ in 0..10_000 {
                    match relay.step(Moment::steady(now)) {
                        Ok(true) => {}
                        Err(_) => failures += 1,
                        Ok(false) => match next_of(relay.machine()) {
                            Some(next) if next <= at(600_000) => now = next,
                            _ => break,
                        },
                    }
                }
                let context = format!("{fault:?} at {first}, {length} times");
                assert!(failures <= length, "{context}");
                assert!(ids.iter().all(|id| state(store, id) == "confirmed"), "{context}");
                // The store's fault is not the event's.
                assert!(ids.iter().all(|id| outbox(store, id).failures == 0), "{context}");
                assert_eq!(effects(receiver), 4, "{context}");
            }
        }
    });
}

/// The store of the consumer is away: that counts against no event, and all of them are applied
/// once it is back.
#[test]
fn f11_a_consumer_whose_store_was_away_gets_all_of_it() {
    on_each_store!(|store: S| {
        for (n, fault) in StoreFault::ALL.into_iter().enumerate() {
            let ids = place(
                store,
                &format!("a-{n}"),
                (0..4).map(|event| draft("t", &format!("k-{n}-{event}"))),
                at(0),
            );
            let receiver = S::fresh();
            let flaky = Flaky::new(receiver, std::iter::repeat_n(Some(fault), 40));
            let publisher = InProcess::new(Inbox::new(&flaky, consumer("c")), echo::<Flaky<S>>);
            let mut relay =
                Relay::new(store, publisher, settings("relay"), Moment::steady(at(0))).unwrap();
            run_until(&mut relay, at(0), at(3_600_000));
            assert!(
                ids.iter()
                    .all(|id| (state(store, id), outbox(store, id).failures) == ("confirmed", 0)),
                "{fault:?}"
            );
            assert_eq!(effects(receiver), 4);
        }
    });
}

/// A relay is stopped at each moment: what it has not published is free at once, nothing counts as
/// a failure, nothing is marked that was not confirmed, and the next relay delivers the rest.
#[test]
fn f12_stopping_releases_and_marks_nothing_done() {
    on_each_store!(|store: S| {
        for stop_at in 0..12 {
            let keys = [format!("{stop_at}-a"), format!("{stop_at}-b")];
            let drafts = (0..3).flat_map(|_| keys.iter().map(|key| draft("t", key)));
            let ids = place(store, &format!("order-{stop_at}"), drafts, at(0));
            let mut script = Script::new(|_, _| Published::Confirmed);
            let mut relay =
                Relay::new(store, &mut script, settings("first"), Moment::steady(at(0))).unwrap();
            for _ in 0..stop_at {
                relay.step(Moment::steady(at(0))).unwrap();
            }
            relay.stop(Moment::steady(at(0))).unwrap();
            let sent: BTreeSet<EventId> =
                script.sent().into_iter().map(|message| message.event.id.clone()).collect();
            for id in &ids {
                let row = outbox(store, id);
                assert_eq!(state(store, id) == "confirmed", sent.contains(id));
                assert_eq!((row.failures, row.starts), (0, 0), "stop {stop_at}");
            }
            for key in &keys {
                assert_eq!((lane(store, key).lease, lane(store, key).starts), (None, 0));
            }
            let mut script = Script::new(|_, _| Published::Confirmed);
            Relay::new(store, &mut script, settings("next"), Moment::steady(at(0)))
                .unwrap()
                .run_until_idle(Moment::steady(at(0)))
                .unwrap();
            assert_eq!(script.sent().len(), ids.len() - sent.len());
            assert!(script.sent().iter().all(|message| message.attempt == 1));
            assert!(ids.iter().all(|id| state(store, id) == "confirmed"));
        }
    });
}

/// A publish is given up while it is under way, by a stop or a time-out: nobody knows, so it is
/// neither done nor failed, and comes again.
#[test]
fn f12_a_publish_that_was_given_up_is_not_a_success() {
    on_each_store!(|store: S| {
        let id = place(store, "a", [draft("t", "k")], at(0)).remove(0);
        let mut machine = RelayMachine::new(settings("relay"), Moment::steady(at(0))).unwrap();
        let policy = machine.settings().policy.clone();
        let claim = || Claim::new(&policy, name("relay"), Duration::from_secs(30), 1).unwrap();
        let Some(Action::Exchange(_)) = machine.poll_action() else { panic!("it claims first") };
        machine.handle_exchanged(
            Moment::steady(at(0)),
            (None, Some(store.run(claim(), at(0)).unwrap())),
        );
        let Some(Action::Publish(tickets)) = machine.poll_action() else {
            panic!("then it publishes")
        };
        machine.handle_stop(Moment::steady(at(1)), Duration::from_millis(1));
        assert!(!machine.is_stopped() && !machine.gave_up());
        machine.handle_timeout(Moment::steady(at(2)));
        assert!(machine.gave_up(), "its patience has ended");
        // The answer comes after all, and changes nothing any more.
        machine.handle_published(Moment::steady(at(2)), &tickets[0], Published::Confirmed);
        let Some(Action::Exchange(exchange)) = machine.poll_action() else {
            panic!("it gives back")
        };
        assert_eq!((exchange.claim, exchange.settle.len()), (0, 1));
        let settled = store.run(Settle::new(&policy, exchange.settle), at(2)).unwrap();
        machine.handle_exchanged(Moment::steady(at(2)), (Some(settled), None));
        assert!(machine.is_stopped());
        let row = outbox(store, &id);
        assert_eq!((state(store, &id), row.failures, row.starts), ("pending", 0, 0));
        assert_eq!(store.run(claim(), at(2)).unwrap().leased.len(), 1, "free at once");
    });
}

/// A broken event does not spin: it is tried again after pauses that grow, are not the same for
/// all, and end; all the while the rest goes on as if it were not there.
#[test]
fn f13_a_failing_event_backs_off_while_others_go_on() {
    on_each_store!(|store: S| {
        let policy = Checked::<DeliveryPolicy>::default();
        let bad: Vec<EventId> = (0..5)
            .map(|n| {
                place(store, &format!("bad-{n}"), [draft("bad", &format!("bad-{n}"))], at(0))
                    .remove(0)
            })
            .collect();
        let mut script = Script::new(|message, _| match message.event.event_type.as_str() {
            "bad" => Published::Failed(reason("connection reset")),
            _ => Published::Confirmed,
        });
        let mut relay =
            Relay::new(store, &mut script, settings("relay"), Moment::steady(at(0))).unwrap();
        for minute in 0..120 {
            let now = at(minute * 60_000);
            let good =
                place(store, &format!("good-{minute}"), [draft("good", "good")], now).remove(0);
            relay.run_until_idle(Moment::steady(now)).unwrap();
            assert_eq!(state(store, &good), "confirmed", "at once, in minute {minute}");
            run_until(&mut relay, now, now + Duration::from_millis(59_999));
        }
        drop(relay);
        let mut seconds = BTreeSet::new();
        for id in &bad {
            let times = script.times(id);
            assert_eq!(times.len(), policy.max_failures as usize, "tried so often and no more");
            for (n, pair) in (1..).zip(times.windows(2)) {
                let (pause, whole) = (
                    pair[1].since(pair[0]),
                    (policy.backoff_base * (1 << (n - 1))).min(policy.backoff_cap),
                );
                assert!(pause >= whole / 2, "pause {n} is {pause:?}");
                // A poll may come as late as the next announced event or second.
                assert!(pause <= whole + Duration::from_secs(2), "pause {n} is {pause:?}");
            }
            seconds.insert(times[5]);
            assert_eq!(state(store, id), "dead");
            assert_eq!(outbox(store, id).reason.unwrap().as_str(), "connection reset");
        }
        assert!(seconds.len() > 1, "with jitter");
    });
}

/// A message that the broker will never take is dead at its first answer, with the broker's reason.
/// Others of the batch, of other keys, and of its own key, if the rule is to go on, are delivered
/// in the same moment.
#[test]
fn f14_a_rejected_event_is_dead_at_once_and_the_rest_goes_on() {
    on_each_store!(|store: S| {
        for (rule, settings, behind) in [
            ("block", settings("relay"), "pending"),
            ("continue", continuing("relay"), "confirmed"),
        ] {
            let drafts = (0..9).map(|n| {
                draft(if n == 4 { "oversize" } else { "t" }, &format!("{rule}-{}", n % 3))
            });
            let ids = place(store, rule, drafts, at(0));
            let mut script = Script::new(|message, _| match message.event.event_type.as_str() {
                "oversize" => Published::Rejected(reason("larger than 1 MiB")),
                _ => Published::Confirmed,
            });
            Relay::new(store, &mut script, settings, Moment::steady(at(0)))
                .unwrap()
                .run_until_idle(Moment::steady(at(0)))
                .unwrap();
            let row = outbox(store, &ids[4]);
            assert_eq!(
                (state(store, &ids[4]), row.starts, row.reason.unwrap().as_str()),
                ("dead", 1, "larger than 1 MiB")
            );
            for (n, id) in ids.iter().enumerate().filter(|(n, _)| *n != 4) {
                assert_eq!(
                    state(store, id),
                    if n == 7 { behind } else { "confirmed" },
                    "event {n}, {rule}"
                );
            }
        }
    });
}

/// The broker is away for an hour: the relay waits and probes, no event loses an attempt, and
/// afterwards all are delivered, in order.
#[test]
fn f15_an_outage_counts_against_no_event() {
    on_each_store!(|store: S| {
        for n in 0..10 {
            place(store, &format!("order-{n}"), ["a", "b", "c"].map(|key| draft("t", key)), at(0));
        }
        let back = at(3_600_000);
        let mut script = Script::new(|_, now| match now < back {
            true => Published::Unavailable(reason("connection refused")),
            false => Published::Confirmed,
        });
        let mut relay =
            Relay::new(store, &mut script, settings("relay"), Moment::steady(at(0))).unwrap();
        run_until(&mut relay, at(0), at(3_599_000));
        assert_eq!(states(store), [("pending", 30)]);
        let stats = store.view().unwrap().stats(at(3_599_000)).unwrap();
        assert_eq!(
            (stats.all.due, stats.all.dead, stats.oldest_due),
            (30, 0, Some(Duration::from_secs(3_599)))
        );
        let reasons = dump(store).to_string();
        assert!(reasons.contains("connection refused"), "an operator sees why");
        run_until(&mut relay, at(3_599_000), at(3_700_000));
        drop(relay);
        assert_eq!(states(store), [("confirmed", 30)]);
        for (id, (_, row)) in dump(store).events() {
            assert_eq!((row.failures, row.starts), (0, 0), "{id}");
        }
        for (key, sequences) in first_publishes(script.sent()) {
            assert!(sequences.into_iter().eq(1..=10), "{key}");
        }
        // The first batch, and then single probes with pauses of up to 30 s.
        let probes: Vec<usize> =
            script.batches.iter().filter(|batch| batch[0].0 < back).map(Vec::len).collect();
        assert!(probes[1..].iter().all(|probe| *probe == 1), "{probes:?}");
        assert!((100..200).contains(&probes.len()), "{} probes", probes.len());
    });
}

/// A publisher whose broker took the message and had no place for it says so: that is no
/// confirmation, whichever way it says it, and the event stays, with the broker's words. Only
/// `Confirmed` confirms.
#[test]
fn f20_unroutable_is_no_confirmation() {
    on_each_store!(|store: S| {
        let answers = [
            (Published::Confirmed, "confirmed"),
            (Published::Failed(reason("312 NO_ROUTE: returned by the exchange")), "pending"),
            (Published::Rejected(reason("no stream takes this subject")), "dead"),
            (Published::Unavailable(reason("no exchange of this name")), "pending"),
            (Published::Deferred(reason("the queue is full")), "pending"),
            (Published::Abandoned, "pending"),
        ];
        for (n, (answer, expected)) in answers.into_iter().enumerate() {
            let id =
                place(store, &format!("a-{n}"), [draft("t", &format!("k-{n}"))], at(0)).remove(0);
            let mut answered = false;
            let mut script = Script::new(|message, _| {
                assert!(!std::mem::replace(&mut answered, true), "once");
                assert_eq!(message.event.id, id);
                answer.clone()
            });
            let mut relay =
                Relay::new(store, &mut script, settings("relay"), Moment::steady(at(0))).unwrap();
            relay.run_until_idle(Moment::steady(at(0))).unwrap();
            drop(relay);
            let row = outbox(store, &id);
            assert_eq!(state(store, &id), expected, "{answer:?}");
            match &answer {
                Published::Failed(why)
                | Published::Rejected(why)
                | Published::Deferred(why)
                | Published::Unavailable(why) => {
                    assert_eq!(row.reason.as_ref(), Some(why));
                }
                Published::Confirmed | Published::Abandoned => assert_eq!(row.reason, None),
            }
            let cancel = twobox::Cancel::new([id], reason("end of the round")).unwrap();
            let _ = store.run(cancel, at(0)).unwrap();
        }
        // A publisher that answers for fewer messages than it was given has confirmed only those.
        struct Silent;
        impl Publisher for Silent {
            fn publish(&mut self, _: &[Message], _: Millis) -> Vec<Published> {
                Vec::new()
            }
        }
        let id = place(store, "silent", [draft("t", "silent")], at(0)).remove(0);
        Relay::new(store, Silent, settings("relay"), Moment::steady(at(0)))
            .unwrap()
            .run_until_idle(Moment::steady(at(0)))
            .unwrap();
        assert_eq!((state(store, &id), outbox(store, &id).failures), ("pending", 1));
    });
}

/// At the consumer's door: the inbox answers a redelivery whose first copy arrived without a
/// confirmation (P5, P9).
#[test]
fn f20_a_lost_confirmation_is_delivered_again_and_applied_once() {
    on_each_store!(|store: S| {
        let arrived = arrival("event", "k");
        let inbox = Inbox::new(store, consumer("c"));
        let receipts: Vec<Receipt> =
            (0..3).map(|n| inbox.receive(&arrived, at(n), echo::<S>).unwrap()).collect();
        assert_eq!(receipts, [Receipt::Applied, Receipt::Duplicate, Receipt::Duplicate]);
    });
}

/// A publisher that panics, in a program that catches that and goes on with the relay.
#[test]
fn f34_a_panic_that_is_caught_is_a_failure() {
    on_each_store!(|store: S| {
        place(store, "a", [draft("t", "k"), draft("t", "l")], at(0));
        let mut panics = true;
        let mut script = Script::new(|_, _| {
            assert!(!std::mem::take(&mut panics), "this is part of the test");
            Published::Confirmed
        });
        let mut relay =
            Relay::new(store, &mut script, settings("relay"), Moment::steady(at(0))).unwrap();
        let step = std::panic::AssertUnwindSafe(|| relay.run_until_idle(Moment::steady(at(0))));
        assert!(std::panic::catch_unwind(step).is_err());
        let status = relay.machine().status();
        assert_eq!((status.publishing, status.hung), (0, 0), "F34: nothing is pinned");
        run_until(&mut relay, at(1), at(600_000));
        let counters = relay.machine().counters();
        assert_eq!((counters.failed, counters.confirmed, counters.stale), (2, 2, 0));
        assert_eq!(states(store), [("confirmed", 2)]);
    });
}

/// So many relays with four slots each, 256 events that take 50 ms each to publish, in simulated
/// time: when the last one is confirmed.
fn all_confirmed_after<S: Store>(store: &S, relays: usize) -> u64 {
    for n in 0..256 {
        place(store, &format!("o{n}"), [draft("t", &format!("k{n}"))], at(0));
    }
    let machine = |n| {
        let four = RelaySettings { publishes: 4, ..settings(&format!("relay-{n}")) };
        RelayMachine::new(four, Moment::steady(at(0))).unwrap().batch(1)
    };
    let mut relays: Vec<(RelayMachine, Vec<(Ticket, Millis)>)> =
        (0..relays).map(|n| (machine(n), Vec::new())).collect();
    let mut now = at(0);
    loop {
        for (machine, under_way) in &mut relays {
            for (ticket, _) in under_way.extract_if(.., |(_, ends)| *ends <= now) {
                machine.handle_published(Moment::steady(now), &ticket, Published::Confirmed);
            }
            machine.handle_timeout(Moment::steady(now));
            while let Some(action) = machine.poll_action() {
                match action {
                    Action::Exchange(exchange) => {
                        let flow = exchange.flow(machine.settings(), machine.now(), false);
                        let exchanged = drive(store, flow, &mut NoCall).unwrap();
                        machine.handle_exchanged(Moment::steady(now), exchanged);
                    }
                    Action::Publish(tickets) => {
                        let ends = now + Duration::from_millis(50);
                        under_way.extend(tickets.into_iter().map(|ticket| (ticket, ends)));
                    }
                    Action::Renew(_) | Action::BreakOff(_) | Action::GiveUp(_) => {
                        unreachable!("all is published long before a lease is half over")
                    }
                }
            }
        }
        let confirmed: u64 = relays.iter().map(|it| it.0.counters().confirmed).sum();
        if confirmed == 256 {
            return now.since(at(0)).as_millis().try_into().unwrap();
        }
        let ends = relays.iter().flat_map(|it| &it.1).map(|(_, ends)| *ends);
        let polls = relays.iter().filter_map(|it| next_of(&it.0));
        now = ends.chain(polls).min().unwrap();
    }
}

/// So many relays that publish in their own thread, as [`Relay`] does: while one of them publishes,
/// it renews nothing. Each publish is confirmed, and each relay looks each millisecond.
fn blocking_relays<S: Store>(store: &S, relays: u64, lease: u64, publish: u64) -> Vec<Counters> {
    let machine = |n: u64| {
        let own = RelaySettings {
            lease: Duration::from_millis(lease),
            poll: Duration::from_millis(1),
            publish_timeout: Duration::from_secs(3_600),
            ..RelaySettings::new(name(&format!("relay-{n}")))
        };
        RelayMachine::new(own, Moment::steady(at(0))).unwrap().batch(1)
    };
    let mut relays: Vec<(RelayMachine, Option<(Ticket, Moment)>)> =
        (0..relays).map(|n| (machine(n), None)).collect();
    for millis in 0..3_600_000 {
        let now = Moment::steady(at(millis));
        for (machine, under_way) in &mut relays {
            if let Some((ticket, _)) = under_way.take_if(|(_, ends)| *ends <= now) {
                machine.handle_published(now, &ticket, Published::Confirmed);
            }
            if under_way.is_some() {
                continue;
            }
            machine.handle_timeout(now);
            while let Some(action) = machine.poll_action() {
                match action {
                    Action::Exchange(exchange) => {
                        let flow = exchange.flow(machine.settings(), machine.now(), true);
                        machine.handle_exchanged(now, drive(store, flow, &mut NoCall).unwrap());
                    }
                    Action::Renew(renew) => {
                        let renewed = store.run(renew, machine.now()).unwrap();
                        machine.handle_renewed(now, &renewed);
                    }
                    Action::Publish(tickets) => {
                        let [ticket] = <[Ticket; 1]>::try_from(tickets).unwrap();
                        *under_way = Some((ticket, now + Duration::from_millis(publish)));
                        break;
                    }
                    Action::BreakOff(leases) | Action::GiveUp(leases) => {
                        leases.iter().for_each(|lease| machine.handle_broken_off(now, lease));
                    }
                }
            }
        }
        if pending(store) == 0 {
            break;
        }
    }
    relays.iter().map(|(machine, _)| machine.counters()).collect()
}

/// F30: the lease is shorter than a publish, and relays take the lane from each other: what is
/// confirmed each time comes to its end, after few publishes, and is never given up as something
/// that brings relays down. The counters say that the lease is too short.
#[test]
fn f30_what_is_confirmed_each_time_is_never_dead() {
    on_each_store!(|store: S| {
        let _one_for_each_case = store;
        for (relays, lease, publish) in
            [(1, 100, 150), (2, 100, 150), (30, 100, 150), (2, 10, 9_000), (30, 10, 2_000)]
        {
            let store = S::fresh();
            let ids = place(store, "a", [draft("t", "k"), draft("t", "k")], at(0));
            let counters = blocking_relays(store, relays, lease, publish);
            let context = format!("{relays} relays, lease {lease}, publish {publish}");
            assert_eq!(states(store), [("confirmed", 2)], "{context}");
            assert!(ids.iter().all(|id| outbox(store, id).failures == 0), "{context}");
            assert_eq!(counters.iter().map(|it| it.dead).sum::<u64>(), 0, "{context}");
            let short: u64 = counters.iter().map(|it| it.short).sum();
            assert!(relays == 1 || short > 0, "{context}: it is told that leases are too short");
            // A lease doubles each time that it was too short.
            let published: u64 = counters.iter().map(|it| it.published).sum();
            let doubled = u64::from((publish / lease).ilog2()) + 2;
            assert!(published <= 2 * doubled, "{context}: published {published} times");
        }
    });
}

/// F27: the oldest event is always answered as unavailable. A probe takes another one each time, and
/// one event stops no others: all of them are delivered within a minute, those that come later
/// within two of the longest pauses, and nothing counts against any.
#[test]
fn f27_one_event_that_is_unavailable_stops_no_others() {
    on_each_store!(|store: S| {
        let bad = place(store, "bad", [draft("t", "bad")], at(0)).remove(0);
        let good = |n: usize, now: Millis| {
            let drafts = (0..20).map(|k| draft("t", &format!("k-{n}-{k}")));
            place(store, &format!("good-{n}"), drafts, now)
        };
        (0..10).for_each(|n| drop(good(n, at(1))));
        let unwell = bad.clone();
        let mut script = Script::new(move |message, _| {
            if message.event.id == unwell {
                Published::Unavailable(reason("no such queue"))
            } else {
                Published::Confirmed
            }
        });
        let own = RelaySettings { poll: Duration::from_secs(1), ..settings("relay") };
        let cap = own.pause_cap;
        let mut relay = Relay::new(store, &mut script, own, Moment::steady(at(1))).unwrap();
        run_until(&mut relay, at(1), at(60_000));
        assert_eq!(states(store), [("confirmed", 200), ("pending", 1)]);
        for n in 10..20 {
            let now = at(n as u64 * 120_000);
            run_until(&mut relay, now.before(Duration::from_secs(1)), now);
            good(n, now);
            run_until(&mut relay, now, now + cap * 2 + Duration::from_secs(2));
            assert_eq!(states(store), [("confirmed", 20 * (n + 1)), ("pending", 1)], "round {n}");
        }
        let row = outbox(store, &bad);
        assert_eq!((row.starts, row.failures), (0, 0));
        let status = relay.machine().status();
        let said = status.broker_error.map(|reason| reason.to_string());
        assert!(said.is_none_or(|said| said == "no such queue"), "F48");
        let tries = relay.publisher_mut().times(&bad).len();
        assert!(tries < 200, "it is tried {tries} times");
    });
}

/// A relay takes what it publishes soon, and leaves the rest to others: with more relays, the same
/// is done sooner.
#[test]
fn f35_relays_share_the_work() {
    on_each_store!(|store: S| {
        let _one_for_each_count = store;
        for (relays, most) in [(1, 3_200), (2, 1_700), (4, 1_000), (8, 600)] {
            let took = all_confirmed_after(S::fresh(), relays);
            println!("{relays} relays: {took} ms");
            assert!(took <= most, "F35: {relays} relays take {took} ms");
        }
    });
}
