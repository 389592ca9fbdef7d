//! What went wrong when somebody tidied up: finished rows overwritten, marks forgotten too early,
//! the wrong rows purged (F5, F10, F16).

use core::num::NonZeroU16;
use core::time::Duration;
use std::collections::BTreeMap;

use twobox::{
    Applied, Batch, CallRow, CallState, Cancel, Change, Checked, Claim, DeliveryPolicy,
    DeliveryState, Destination, Discard, Ending, EventId, EventRow, EventState, Expect,
    Fingerprint, Handled, Inbox, InboxRow, InboxState, Key, LaneRow, Lease, Leased, Load, Millis,
    NotDone, OrderRow, OrderingKey, OutboxRow, PlacedOrder, PositionRow, Purge, Reader, Reason,
    Receipt, Record, Redrive, RequestKey, RequestRow, Retention, Settle, Settlement, Store, Table,
    Tables, Transaction, Transition, WhenDead, purge_all, redrive_all,
};

use crate::support::{
    Backend, at, body, consumer, draft, dump, effects, lane_key, message, name, outbox, place,
    state, window,
};

const LEASE: Duration = Duration::from_secs(30);

fn policy() -> Checked<DeliveryPolicy> {
    DeliveryPolicy { when_dead: WhenDead::Continue, ..DeliveryPolicy::default() }.checked().unwrap()
}

fn claim<'a>(policy: &'a Checked<DeliveryPolicy>, owner: &str) -> Claim<'a> {
    Claim::new(policy, name(owner), LEASE, 10).unwrap()
}

/// The first of the events is rejected.
fn rejected(leased: &Leased, reason: &str) -> Settlement {
    leased.settle(0, Some(Ending::Rejected(Reason::new(reason))))
}

/// What a transition decides on the state that is there now, to be applied later.
fn decided<S: Reader, T: Transition>(store: &S, transition: &T, now: Millis) -> Batch {
    let rows = store.view().unwrap().load(&transition.query(now)).unwrap();
    let Ok(decision) = transition.decide(now, &rows) else { panic!("it is not refused") };
    decision.batch
}

fn apply<S: Store>(store: &S, batch: &Batch) -> Applied {
    let mut tx = store.begin().unwrap();
    let applied = tx.apply(batch).unwrap();
    tx.commit().unwrap();
    applied
}

/// Whoever has read an event before it was confirmed, and writes afterwards, loses: in every
/// operation that writes delivery state. The confirmed row stays.
#[test]
fn f05_a_rescuer_loses_to_the_finished_row() {
    on_each_store!(|store: S| {
        let policy = policy();
        for rescuer in ["claim after the lease", "settle", "release", "cancel"] {
            let lane = format!("k {rescuer}");
            let id = place(store, rescuer, [draft("t", &lane)], at(0)).remove(0);
            // What the rescuer decides before the event is leased, or while it is.
            let early =
                decided(store, &Cancel::new([id.clone()], Reason::new("rescued")).unwrap(), at(0));
            let leased = store.run(claim(&policy, "worker"), at(0)).unwrap().leased.remove(0);
            let stale = match rescuer {
                "claim after the lease" => decided(store, &claim(&policy, "rescuer"), at(60_000)),
                "settle" => {
                    let rescued = rejected(&leased, "rescued");
                    decided(store, &Settle::new(&policy, [rescued]), at(1))
                }
                "release" => decided(store, &Settle::new(&policy, [leased.release()]), at(1)),
                _ => early,
            };
            assert!(!stale.is_empty());
            let confirmed = leased.settle(1, None);
            assert_eq!(store.run(Settle::new(&policy, [confirmed]), at(2)).unwrap().confirmed, 1);
            let finished = dump(store);
            assert!(matches!(apply(store, &stale), Applied::Conflict(_)), "{rescuer}");
            assert_eq!(dump(store), finished, "{rescuer}");
            // Asked again on what is there, it sees that there is nothing to rescue.
            let cancelled = store
                .run(Cancel::new([id.clone()], Reason::new("rescued")).unwrap(), at(3))
                .unwrap();
            assert!(matches!(
                cancelled.refused[..],
                [(_, NotDone::State { state: EventState::Confirmed, .. })]
            ));
        }
    });
}

/// The same for what an operator decides about a dead event while another one has decided already.
#[test]
fn f05_of_two_operators_one_loses() {
    on_each_store!(|store: S| {
        let policy = policy();
        for winner in ["redrive", "discard"] {
            let id = place(store, winner, [draft("t", winner)], at(0)).remove(0);
            let leased = store.run(claim(&policy, "worker"), at(0)).unwrap().leased.remove(0);
            let settle = Settle::new(&policy, [rejected(&leased, "no")]);
            let dead = store.run(settle, at(1)).unwrap().dead;
            assert_eq!(dead, [(id.clone(), lane_key(winner))]);
            let redrive = Redrive::new([id.clone()], window()).unwrap();
            let discard = Discard::new([id.clone()], Reason::new("given up")).unwrap();
            let (first, second) =
                (decided(store, &redrive, at(2)), decided(store, &discard, at(2)));
            let (first, second, end) = if winner == "redrive" {
                (first, second, "pending")
            } else {
                (second, first, "discarded")
            };
            assert_eq!(apply(store, &first), Applied::Written);
            assert!(matches!(apply(store, &second), Applied::Conflict(_)));
            assert_eq!(state(store, &id), end);
            let done = store
                .run(Cancel::new([id], Reason::new("end of the round")).unwrap(), at(3))
                .unwrap();
            assert_eq!(done.done.len(), usize::from(winner == "redrive"));
        }
    });
}

/// Settings under which a consumer could forget too early are refused when they are made (P7).
#[test]
fn f10_a_window_that_is_too_short_is_refused() {
    let policy: Checked<DeliveryPolicy> = Checked::default();
    let needed = policy.longest_retry() * 2;
    let with = |inbox| Retention { inbox, ..Retention::default() };
    assert!(with(needed).checked(&policy).is_ok());
    for inbox in [Duration::ZERO, Duration::from_secs(1), needed - Duration::from_millis(1)] {
        let refused = with(inbox).checked(&policy).unwrap_err().to_string();
        assert!(
            refused.contains("retention of the inbox")
                && refused.contains(&needed.as_secs().to_string()),
            "{refused}"
        );
    }
    // The other way round: retrying for longer needs a longer memory.
    let patient = DeliveryPolicy {
        backoff_cap: Duration::from_secs(24 * 3600),
        max_failures: 100,
        max_starts: 101,
        ..DeliveryPolicy::default()
    };
    assert!(Retention::default().checked(&patient.checked().unwrap()).is_err());
    // What is redriven at the end of the window may be retried for as long as any: it is still
    // known then.
    let kept = Retention::default().checked(&policy).unwrap();
    assert_eq!(kept.redrive_window().get() + policy.longest_retry(), kept.inbox);
}

/// The confirmation was lost, the event is dead although it was applied, and an operator redrives
/// it at every age: within the window it is a duplicate, past the window it is refused, and only a
/// forced redrive applies it again, as it says.
#[test]
fn f10_a_redrive_past_the_window_is_refused_or_forced() {
    on_each_store!(|store: S| {
        let policy = policy();
        let kept = Retention::default().checked(&policy).unwrap();
        let within = kept.redrive_window();
        let window = within.get();
        let secs = Duration::from_secs;
        let ages = [
            secs(0),
            secs(3600),
            window - secs(1),
            window,
            window + secs(1),
            kept.inbox,
            kept.inbox + secs(1),
            kept.inbox * 2,
        ];
        for (n, age) in ages.into_iter().enumerate() {
            let receiver = S::fresh();
            let id = place(store, &format!("event-{n}"), [draft("t", &format!("k-{n}"))], at(0))
                .remove(0);
            let leased = store.run(claim(&policy, "worker"), at(0)).unwrap().leased.remove(0);
            let inbox = Inbox::new(receiver, consumer("c"));
            let mut times = 0;
            let mut deliver = |now| {
                let received = inbox.receive(&message(store, &id), now, |_, _| {
                    times += 1;
                    Ok::<_, String>(Handled::Effect(body("")))
                });
                (received.unwrap(), times)
            };
            assert_eq!(deliver(at(0)), (Receipt::Applied, 1));
            let settle = Settle::new(&policy, [rejected(&leased, "no")]);
            let _ = store.run(settle, at(0)).unwrap();

            let now = at(0) + age;
            let page = NonZeroU16::new(10).unwrap();
            purge_all(store, &kept, page, now).unwrap();
            purge_all(receiver, &kept, page, now).unwrap();
            let redrive = Redrive::new([id.clone()], within).unwrap();
            let operated = store.run(&redrive, now).unwrap();
            if age < window {
                assert_eq!(operated.done, std::slice::from_ref(&id));
                // However late the redelivery comes, as long as it may be retried, it is known
                // again.
                let last = now + policy.longest_retry();
                purge_all(receiver, &kept, page, last).unwrap();
                assert_eq!(deliver(last), (Receipt::Duplicate, 1), "{age:?}");
            } else {
                let refused = &operated.refused[0].1;
                assert_eq!(*refused, NotDone::PastWindow { age, window });
                assert!(refused.to_string().contains("force"));
                assert_eq!(state(store, &id), "dead");
                assert_eq!(
                    store.run(redrive.force(), now).unwrap().done,
                    std::slice::from_ref(&id)
                );
                let forgotten = age > kept.inbox;
                assert_eq!(deliver(now).0 == Receipt::Applied, forgotten, "{age:?}");
            }
            assert_eq!(effects(receiver), 1);
            let _ = store
                .run(Cancel::new([id], Reason::new("end of the round")).unwrap(), now)
                .unwrap();
        }
    });
}

/// The ages of the test: each kind has another one, so that no two can be confused.
fn kept() -> Checked<Retention> {
    let secs = Duration::from_secs;
    // Retried for 80 s at most.
    let policy = DeliveryPolicy {
        backoff_cap: secs(10),
        max_failures: 7,
        max_starts: 8,
        ..DeliveryPolicy::default()
    };
    let kept = Retention {
        events: secs(100),
        inbox: secs(200),
        requests: secs(300),
        orders: Some(secs(400)),
        positions: Some(secs(500)),
    };
    kept.checked(&policy.checked().unwrap()).unwrap()
}

/// One row for every state of every table, which it reached at `then`, and how long it is kept;
/// `None` for ever.
fn every_state(tag: &str, then: Millis) -> Vec<(Record, Option<Duration>)> {
    let kept = kept();
    let mut rows: Vec<(Record, Option<Duration>)> = Vec::new();
    let id = |what: &str| format!("{tag} {what}");

    let request = |what: &str| RequestKey::new("scope", id(what)).unwrap();
    let row = |placed| RequestRow {
        fingerprint: Fingerprint::of_bytes(b""),
        registered_at: then,
        placed,
    };
    let placed = PlacedOrder { order: name("gone"), events: vec![name("gone/1")], at: then };
    rows.push((Record::Request(request("open"), row(None)), None));
    rows.push((Record::Request(request("placed"), row(Some(placed))), kept.orders));
    let order = OrderRow { request: request("placed"), committed_at: then, body: body("") };
    rows.push((Record::Order(name(&id("order")), order), kept.orders));

    // Long ago: what counts is when it was finished. When an event was confirmed is not kept, so of
    // that it is when it was committed.
    let ago = Millis::new(0);
    let lane: OrderingKey = name(&id("lane of events"));
    for (sequence, what, committed_at, state, age) in [
        (1, "confirmed", then, None, Some(kept.events)),
        (2, "confirmed late", then, Some(DeliveryState::Pending), Some(kept.events)),
        (3, "pending", ago, None, None),
        (4, "failed", ago, Some(DeliveryState::Pending), None),
        (5, "dead", ago, Some(DeliveryState::Dead(then)), None),
        (6, "discarded", ago, Some(DeliveryState::Discarded(then)), Some(kept.events)),
        (7, "cancelled", ago, Some(DeliveryState::Cancelled(then)), Some(kept.events)),
    ] {
        let event = twobox::Event {
            destination: Destination::default(),
            id: name(&id(what)),
            order: name("gone"),
            event_type: name("t"),
            schema_version: 1,
            ordering_key: lane.clone(),
            time: committed_at,
            headers: twobox::Headers::new(),
            body: body(""),
        };
        let row = EventRow { event, sequence, due: ago };
        if let Some(state) = state {
            let outbox = OutboxRow { starts: 1, state, ..OutboxRow::untouched(&row) };
            rows.push((Record::Outbox(row.event.id.clone(), outbox), age));
        }
        rows.push((Record::Event(row), age));
    }

    let idle = LaneRow {
        next: 2,
        head: 2,
        confirmed: 1,
        due: None,
        starts: 0,
        token: 1,
        lease: None,
        blocked_by: None,
        begun: then,
        changed_at: then,
    };
    let events = LaneRow { next: 8, head: 3, confirmed: 2, due: Some(then), ..idle.clone() };
    rows.push((Record::Lane(lane.into(), events), None));
    // Nothing is pending in this one, and it is there for as long as one of its events is.
    let lane: OrderingKey = name(&id("lane of a dead event"));
    let event = twobox::Event {
        destination: Destination::default(),
        id: name(&id("the only one")),
        order: name("gone"),
        event_type: name("t"),
        schema_version: 1,
        ordering_key: lane.clone(),
        time: ago,
        headers: twobox::Headers::new(),
        body: body(""),
    };
    let row = EventRow { event, sequence: 1, due: ago };
    let dead = OutboxRow { state: DeliveryState::Dead(then), ..OutboxRow::untouched(&row) };
    rows.push((Record::Outbox(row.event.id.clone(), dead), None));
    rows.push((Record::Event(row), None));
    rows.push((Record::Lane(lane.into(), idle.clone()), None));
    let lease = Lease { owner: name("relay"), until: then, through: 1 };
    for (what, row, age) in [
        ("idle", idle.clone(), Some(kept.events)),
        ("due", LaneRow { due: Some(then), ..idle.clone() }, None),
        (
            "due in a year",
            LaneRow { due: Some(then + Duration::from_secs(31_536_000)), ..idle.clone() },
            None,
        ),
        ("leased", LaneRow { due: Some(then), lease: Some(lease), ..idle.clone() }, None),
        ("blocked", LaneRow { blocked_by: Some(name("dead")), ..idle }, None),
    ] {
        rows.push((Record::Lane(lane_key(&id(what)), row), age));
    }

    for (what, state, effect, age) in [
        ("applied", InboxState::Applied, false, Some(kept.inbox)),
        ("applied with effect", InboxState::Applied, true, Some(kept.inbox)),
        ("failing", InboxState::Failing, false, None),
        ("poisoned", InboxState::Poisoned, false, None),
    ] {
        let event = name::<EventId>(&id(what));
        let row = InboxRow {
            content: twobox::Digest([0; 32]),
            at: then,
            state,
            failures: 0,
            reason: None,
            effect,
        };
        rows.push((Record::Inbox(consumer("c"), event.clone(), row), age));
        if effect {
            rows.push((Record::Effect(consumer("c"), event, body("")), age));
        }
    }
    rows.push((
        Record::Position(
            consumer("c"),
            name(&id("k")),
            PositionRow { begun: then, sequence: 1, at: then },
        ),
        kept.positions,
    ));
    for (state, age) in [
        (CallState::Intended, None),
        (CallState::Started, None),
        (CallState::Unknown, None),
        (CallState::Done, Some(kept.inbox)),
    ] {
        rows.push((
            Record::Call(
                consumer("c"),
                name(&id(state.name())),
                CallRow { state, at: then, starts: 1, note: None },
            ),
            age,
        ));
    }
    rows
}

/// A store that holds every state of every table, at every age: what goes is what is finished and
/// past its retention, and nothing else; in pages of any size, at any time, and twice (P7).
#[test]
fn f16_purge_takes_what_is_finished_and_past_its_retention() {
    let edges = [0, 1, 100, 200, 300, 400, 500, 10_000];
    let ages: Vec<Duration> = edges
        .into_iter()
        .flat_map(|secs| {
            [Duration::from_secs(secs), Duration::from_secs(secs) + Duration::from_millis(1)]
        })
        .collect();
    let now = at(100_000_000);
    let mut rows: Vec<(Record, bool)> = Vec::new();
    for (n, age) in ages.iter().enumerate() {
        for (record, kept) in every_state(&format!("{n:02}"), now.before(*age)) {
            rows.push((record, kept.is_some_and(|kept| *age > kept)));
        }
    }
    for table in Table::ALL {
        let of = |gone| rows.iter().any(|(record, goes)| record.table() == table && *goes == gone);
        assert!(of(true) && of(false), "{table}: the test has rows that go and rows that stay");
    }
    let pages = [1, 2, 7, 1_000];
    macro_rules! check {
        ($store:ty) => {
            for page in pages {
                let store = <$store as Backend>::fresh();
                let inserts = rows.iter().map(|(record, _)| Change::Put {
                    expect: Expect::Absent,
                    record: record.clone(),
                });
                assert_eq!(apply(store, &Batch::of(inserts.collect()).unwrap()), Applied::Written);
                let page = NonZeroU16::new(page).unwrap();
                let before: Vec<Record> = dump(store).records().to_vec();
                // By a clock that has stepped far back, nothing is past anything.
                assert_eq!(purge_all(store, &kept(), page, Millis::new(1)).unwrap(), 0);
                assert_eq!(dump(store).records(), before);

                let removed = purge_all(store, &kept(), page, now).unwrap();
                let goes: BTreeMap<Key, bool> =
                    rows.iter().map(|(record, goes)| (record.key(), *goes)).collect();
                let stays: Vec<&Record> =
                    before.iter().filter(|record| !goes[&record.key()]).collect();
                let after = dump(store);
                assert!(after.records().iter().eq(stays.iter().copied()), "page {page}:\n{after}");
                let along =
                    |record: &Record| matches!(record, Record::Outbox(..) | Record::Effect(..));
                let counted = rows.iter().filter(|(record, goes)| *goes && !along(record)).count();
                assert_eq!(removed, counted);
                assert_eq!(purge_all(store, &kept(), page, now).unwrap(), 0);
            }
        };
    }
    check!(twobox_memory::MemoryStore);
    check!(twobox_redb::RedbStore);
    // To purge the tables whose rows go with others removes nothing by itself.
    assert!(!Purge::TABLES.contains(&Table::Outbox) && !Purge::TABLES.contains(&Table::Effects));
}

/// What is left of a lane after a purge delivers on: a redriven event, and new events. The lane is
/// there for as long as one of its events is, so that its count does not begin again.
#[test]
fn f16_a_lane_with_a_dead_event_goes_on_after_a_purge() {
    on_each_store!(|store: S| {
        let policy = policy();
        let ids = place(store, "a", [draft("t", "k"), draft("t", "k")], at(0));
        let settle = |now, confirmed, ending| {
            let leased = store.run(claim(&policy, "worker"), now).unwrap().leased.remove(0);
            let settlement = leased.settle(confirmed, ending);
            let settled = store.run(Settle::new(&policy, [settlement]), now).unwrap();
            assert_eq!((settled.confirmed, settled.stale.len()), (confirmed, 0));
        };
        settle(at(0), 0, Some(Ending::Rejected(Reason::new("no"))));
        settle(at(0), 1, None);
        let later = at(0) + Duration::from_secs(8 * 24 * 3600);
        let kept = Retention::default().checked(&policy).unwrap();
        purge_all(store, &kept, NonZeroU16::new(5).unwrap(), later).unwrap();
        assert_eq!(dump(store).count(Table::Lanes), 1);
        assert_eq!((dump(store).count(Table::Events), state(store, &ids[0])), (1, "dead"));
        let new = place(store, "b", [draft("t", "k")], later).remove(0);
        let redriven = store
            .run(Redrive::new([ids[0].clone()], kept.redrive_window()).unwrap(), later)
            .unwrap();
        assert_eq!(redriven.done, [ids[0].clone()]);
        assert_eq!((outbox(store, &new).sequence, outbox(store, &ids[0]).sequence), (3, 4));
        settle(later, 2, None);
        assert_eq!((state(store, &new), state(store, &ids[0])), ("confirmed", "confirmed"));
    });
}

/// Dead letters are listed page by page, and redriven one by one, or all of a type, or all (P3).
#[test]
fn p3_dead_letters_are_listed_and_redriven_by_type() {
    on_each_store!(|store: S| {
        let policy = policy();
        let many = |event_type: &'static str, n: usize| {
            (0..n).map(move |n| draft(event_type, &format!("{event_type}-{n}")))
        };
        let renamed = place(store, "a", many("renamed", 256), at(0));
        let oversize = place(store, "b", many("oversize", 60), at(0));
        let reject_all = |now| {
            let claim = Claim::new(&policy, name("relay"), LEASE, Claim::MAX).unwrap();
            let leased = store.run(claim, now).unwrap().leased;
            let rejected = leased.iter().map(|leased| rejected(leased, "no"));
            store.run(Settle::new(&policy, rejected), now).unwrap().dead.len()
        };
        assert_eq!(reject_all(at(1)), 316);
        let listed = |limit| {
            let (mut view, mut after, mut letters) = (store.view().unwrap(), None, Vec::new());
            loop {
                let page = view.dead_letters(after, limit).unwrap();
                assert!(page.len() <= limit);
                let Some(last) = page.last() else { return letters };
                after = Some(last.event.clone());
                letters.extend(page);
            }
        };
        let mut all: Vec<EventId> = renamed.iter().chain(&oversize).cloned().collect();
        all.sort();
        for limit in [1, 7, 1_000] {
            let letters = listed(limit);
            assert_eq!(letters.iter().map(|letter| letter.event.clone()).collect::<Vec<_>>(), all);
            assert!(letters.iter().all(|letter| letter.row.reason == Some(Reason::new("no"))));
        }

        let event_type = twobox::EventType::new("oversize").unwrap();
        let mut done = redrive_all(store, Some(&event_type), window(), at(2)).unwrap();
        assert_eq!((done.done.len(), done.refused.len()), (60, 0));
        done.done.sort();
        let mut expected = oversize.clone();
        expected.sort();
        assert_eq!(done.done, expected);
        assert_eq!(listed(1_000).len(), 256);
        // Past the window all are refused, and each is named.
        let refused = redrive_all(store, None, window(), at(0) + window().get()).unwrap();
        assert_eq!((refused.done.len(), refused.refused.len()), (0, 256));
        assert_eq!(redrive_all(store, None, window(), at(3)).unwrap().done.len(), 256);
        assert_eq!(listed(1_000), []);
        assert_eq!(reject_all(at(4)), 316);
    });
}
