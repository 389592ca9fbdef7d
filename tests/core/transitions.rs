//! Each row of each truth table: what comes of it, and exactly which guarded changes are written.
//!
//! At the end, properties of all transitions over any rows: they are total, deterministic, and
//! guard what they read.

use core::convert::Infallible;
use core::fmt::Debug;
use core::num::NonZeroU16;
use core::time::Duration;

use proptest::prelude::*;
use twobox::transition::call::{
    CallEnd, CallKey, CallRefused, Intend, Resolve, Start, Started, WhenUnknown,
};
use twobox::{
    Batch, Body, CallRow, CallState, Cancel, Checked, Claim, Claimed, CommitOrder, CommitRefused,
    Committed, ContentDiffers, CountFailure, Decision, Delivery, DeliveryPolicy, DeliveryState,
    Discard, Draft, Ending, Event, EventId, Expect, FailureCounted, Fingerprint, Headers, InboxRow,
    InboxState, Key, LaneRow, LeaseRef, Load, Millis, OrderRow, OrderingKey, OutboxRow,
    ParametersDiffer, Place, Placed, PositionRow, Purge, Query, Reader, Reason, Receive, Received,
    Record, RecordEffect, Redrive, Register, Registered, Renew, Renewed, Request, RequestRow,
    Retention, Retry, Rows, Run, RunResult, Settle, Settled, SkipTo, Stale, StaleLease, Store,
    Stored, Table, Tables, Transaction, Transition, WhenDead,
};
use twobox_memory::MemoryStore;

use crate::support::{
    LANE, NOW, bodies, call_rows, counts, decide, events, hasty, inbox_rows, insert, lane,
    lane_rows, lease, ms, name, numbers, outbox, pending, reasons, stored, text, times, update,
    window, writes, writes_nothing,
};

// Requests (P1)

fn request(quantity: &str) -> Request {
    Request::new("s", "r", Fingerprint::of([("quantity", quantity)])).unwrap()
}

fn bound(request: &Request, placed: Option<Placed>) -> Record {
    let row =
        RequestRow { fingerprint: request.fingerprint.clone(), registered_at: ms(10), placed };
    Record::Request(request.key.clone(), row)
}

/// The outcome of a commit at [`NOW`].
fn placed(order: &str, events: &[&str]) -> Placed {
    Placed { order: name(order), events: events.iter().map(|id| name(id)).collect(), at: NOW }
}

/// P1, F21, F24.
#[test]
fn register() {
    let two = request("2");
    let register = Register::new(&two);
    assert_eq!(register.query(NOW), Query::rows([Key::Request(two.key.clone())]));

    let new = RequestRow { fingerprint: two.fingerprint.clone(), registered_at: NOW, placed: None };
    assert_eq!(
        decide(register.clone(), &[]),
        writes([insert(Record::Request(two.key.clone(), new))], Registered::New)
    );
    assert_eq!(
        decide(register.clone(), &[stored(1, bound(&two, None))]),
        writes_nothing(Registered::Open)
    );
    let first = placed("other", &["e1", "e2"]);
    let row = stored(4, bound(&two, Some(first.clone())));
    assert_eq!(decide(register, &[row]), writes_nothing(Registered::Placed(first.clone())));

    let three = request("3");
    for placed in [None, Some(first)] {
        let refused = decide(Register::new(&three), &[stored(1, bound(&two, placed))]).unwrap_err();
        let differ = ParametersDiffer {
            key: two.key.clone(),
            bound: two.fingerprint.clone(),
            given: three.fingerprint.clone(),
        };
        assert_eq!(refused, differ);
        assert_eq!(
            refused.to_string(),
            "request s/r is bound to other parameters: it was registered with [quantity=2], now [quantity=3] was given; \
             retry with the first ones, or take a new request id"
        );
    }
}

/// What a commit of order `o` at [`NOW`] writes beside the request: one event in a lane of its own.
fn order_row(request: &Request) -> Record {
    Record::Order(
        name("o"),
        OrderRow { request: request.key.clone(), committed_at: NOW, body: text("order") },
    )
}

fn event(id: &str, lane: &str) -> Event {
    Event {
        id: name(id),
        order: name("o"),
        event_type: name("order.created"),
        schema_version: 1,
        ordering_key: name(lane),
        time: NOW,
        headers: Headers::new(),
        body: text("event"),
    }
}

fn fresh(lane: &str, sequence: u64) -> OutboxRow {
    OutboxRow { committed_at: NOW, due: NOW, ..pending(lane, sequence) }
}

/// A lane that begins at [`NOW`]: its count and its tokens do too, so that those of a lane which
/// was purged are told apart.
fn new_lane() -> LaneRow {
    LaneRow { token: NOW.get(), begun: NOW, changed_at: NOW, ..LANE }
}

fn place(begun: u64, sequence: u64, after: u64) -> Place {
    Place { begun: ms(begun), sequence, after }
}

fn position((begun, sequence): (u64, u64), at: Millis) -> Record {
    Record::Position(name("c"), name("k"), PositionRow { begun: ms(begun), sequence, at })
}

fn draft() -> Draft {
    Draft::new("order.created", text("event")).unwrap()
}

fn commit(request: &Request, drafts: impl IntoIterator<Item = Draft>) -> CommitOrder<'_> {
    CommitOrder::new(request, name("o"), text("order"), drafts).unwrap()
}

/// P1, P2: the rows of the table that write.
#[test]
fn commit_order() {
    let two = request("2");
    let one_event = commit(&two, [draft()]);
    let keys = [
        Key::Request(two.key.clone()),
        Key::Order(name("o")),
        Key::Event(name("o/1")),
        Key::Lane(name("o")),
    ];
    assert_eq!(one_event.query(NOW), Query::rows(keys));

    let first = placed("o", &["o/1"]);
    let committed = Committed { placed: first.clone(), repeated: false };
    let written = || {
        [
            insert(order_row(&two)),
            insert(Record::Event(event("o/1", "o"))),
            insert(outbox("o/1", fresh("o", 1))),
            insert(lane("o", LaneRow { next: 2, due: Some(NOW), ..new_lane() })),
        ]
    };
    let free = RequestRow {
        fingerprint: two.fingerprint.clone(),
        registered_at: NOW,
        placed: Some(first.clone()),
    };
    let expected = written().into_iter().chain([insert(Record::Request(two.key.clone(), free))]);
    assert_eq!(decide(one_event.clone(), &[]), writes(expected, committed.clone()));

    // It keeps the time at which it was registered.
    let expected = written().into_iter().chain([update(5, bound(&two, Some(first)))]);
    assert_eq!(decide(one_event, &[stored(5, bound(&two, None))]), writes(expected, committed));
}

/// P1, P2: the rows of the table that write nothing.
#[test]
fn commit_order_that_is_not_written() {
    let (two, three) = (request("2"), request("3"));
    let taken = stored(
        1,
        Record::Order(
            name("o"),
            OrderRow { request: name_key("x", "y"), committed_at: ms(1), body: text("") },
        ),
    );
    let event_taken = stored(1, Record::Event(Event { order: name("p"), ..event("o/2", "p") }));

    let first = placed("other", &["e1", "e2"]);
    let repeated = Committed { placed: first.clone(), repeated: true };
    let retry = commit(&two, [draft(), draft()]);
    // An order that is placed is not looked at again, nor are the ids that are given now.
    for rest in [&[][..], &[taken.clone(), event_taken.clone()]] {
        let rows = [&[stored(2, bound(&two, Some(first.clone())))], rest].concat();
        assert_eq!(decide(retry.clone(), &rows), writes_nothing(repeated.clone()));
    }

    for placed in [None, Some(first)] {
        for rest in [&[][..], &[taken.clone(), event_taken.clone()]] {
            let rows = [&[stored(2, bound(&two, placed.clone()))], rest].concat();
            let refused = decide(commit(&three, [draft()]), &rows);
            assert!(
                matches!(refused, Err(CommitRefused::ParametersDiffer(differ)) if differ.given == three.fingerprint)
            );
        }
    }

    for request_row in [&[][..], &[stored(2, bound(&two, None))]] {
        for rest in [&[][..], std::slice::from_ref(&event_taken)] {
            let rows = [request_row, std::slice::from_ref(&taken), rest].concat();
            let refused = decide(retry.clone(), &rows).unwrap_err();
            assert_eq!(
                refused,
                CommitRefused::OrderIdTaken { order: name("o"), owner: name_key("x", "y") }
            );
            assert_eq!(
                refused.to_string(),
                "order id \"o\" belongs to request x/y; take an id that only this request can have. If it is this request, its order was placed, and its key was purged"
            );
        }
        let rows = [request_row, std::slice::from_ref(&event_taken)].concat();
        let refused = decide(retry.clone(), &rows).unwrap_err();
        assert_eq!(refused, CommitRefused::EventIdTaken { event: name("o/2"), owner: name("p") });
        assert_eq!(
            refused.to_string(),
            "event id \"o/2\" belongs to order p; leave the id out, or make one of the order id"
        );
    }
}

fn name_key(scope: &str, id: &str) -> twobox::RequestKey {
    twobox::RequestKey::new(scope, id).unwrap()
}

/// P4: events join the end of their lanes, in the order in which they were given.
#[test]
fn commit_order_appends_to_lanes() {
    let two = request("2");
    let keyed = |key: &str| draft().ordering_key(name(key));
    let given = draft()
        .id(name("mine"))
        .schema_version(7)
        .header("h", "v")
        .unwrap()
        .not_before(ms(5_000))
        .ordering_key(name("a"));
    let many = commit(&two, [keyed("b"), given, keyed("a"), draft(), keyed("b")]);
    let first = placed("o", &["o/1", "mine", "o/3", "o/4", "o/5"]);
    let row = RequestRow {
        fingerprint: two.fingerprint.clone(),
        registered_at: NOW,
        placed: Some(first.clone()),
    };

    // What is in the lanes before, and what the lanes become; a, which is empty, is due when its
    // first new event is.
    let leased = LaneRow {
        next: 9,
        confirmed: 7,
        due: Some(ms(400)),
        token: 3,
        lease: Some(lease("me", 400, 8)),
        starts: 1,
        ..LANE
    };
    for (a, a_after, b, b_after) in [
        (
            None,
            (0, LaneRow { due: Some(ms(5_000)), ..new_lane() }),
            None,
            (0, LaneRow { due: Some(NOW), ..new_lane() }),
        ),
        // Empty, after events that were confirmed.
        (
            Some(LaneRow { next: 4, confirmed: 3, token: 2, ..LANE }),
            (3, LaneRow { due: Some(ms(5_000)), confirmed: 3, token: 2, ..LANE }),
            // Something waits there already, and is leased: neither the time nor the lease changes.
            Some(leased.clone()),
            (8, leased),
        ),
        // Blocked: it stays so.
        (
            Some(LaneRow { next: 4, blocked_by: Some(name("dead")), ..LANE }),
            (3, LaneRow { blocked_by: Some(name("dead")), ..LANE }),
            Some(LaneRow { next: 2, due: Some(ms(9_000)), ..LANE }),
            (1, LaneRow { due: Some(ms(9_000)), ..LANE }),
        ),
    ] {
        let (a_last, b_last) = (a_after.0, b_after.0);
        let lane_rows =
            [a.map(|row| stored(6, lane("a", row))), b.map(|row| stored(8, lane("b", row)))];
        let rows: Vec<Stored> = lane_rows.into_iter().flatten().collect();
        let after = |key: &str, revision: u64, row: LaneRow, last: u64| {
            let record = lane(key, LaneRow { next: last + 3, changed_at: NOW, ..row });
            if last == 0 && rows.is_empty() { insert(record) } else { update(revision, record) }
        };
        let mine = Event {
            schema_version: 7,
            headers: Headers::new().with("h", "v").unwrap(),
            ..event("mine", "a")
        };
        let changes = [
            insert(Record::Request(two.key.clone(), row.clone())),
            insert(order_row(&two)),
            insert(Record::Event(event("o/1", "b"))),
            insert(outbox("o/1", fresh("b", b_last + 1))),
            insert(Record::Event(mine)),
            insert(outbox("mine", OutboxRow { due: ms(5_000), ..fresh("a", a_last + 1) })),
            insert(Record::Event(event("o/3", "a"))),
            insert(outbox("o/3", fresh("a", a_last + 2))),
            insert(Record::Event(event("o/4", "o"))),
            insert(outbox("o/4", fresh("o", 1))),
            insert(Record::Event(event("o/5", "b"))),
            insert(outbox("o/5", fresh("b", b_last + 2))),
            insert(lane("o", LaneRow { next: 2, due: Some(NOW), ..new_lane() })),
            after("a", 6, a_after.1, a_last),
            after("b", 8, b_after.1, b_last),
        ];
        let committed = Committed { placed: first.clone(), repeated: false };
        assert_eq!(decide(many.clone(), &rows), writes(changes, committed));
    }
}

// Delivery (P3, P4, P6)

fn policy(when_dead: WhenDead) -> Checked<DeliveryPolicy> {
    DeliveryPolicy { max_failures: 2, max_starts: 4, when_dead, ..DeliveryPolicy::default() }
        .checked()
        .unwrap()
}

const LEASE: Duration = Duration::from_millis(500);
const UNTIL: u64 = 1_500;

fn claim(policy: &Checked<DeliveryPolicy>, limit: usize) -> Claim<'_> {
    Claim::new(policy, name("me"), LEASE, limit).unwrap()
}

fn run_of(key: &str, token: u64, deliveries: &[(&str, u64, u64, u32)]) -> Run {
    let delivery = |&(event, sequence, after, attempt): &(&str, u64, u64, u32)| {
        let place = Place { begun: LANE.begun, sequence, after };
        Delivery { event: name(event), place, attempt }
    };
    Run {
        lease: LeaseRef { lane: name(key), token },
        until: ms(UNTIL),
        alone: false,
        deliveries: deliveries.iter().map(delivery).collect(),
    }
}

fn lane_due(due: u64) -> LaneRow {
    LaneRow { next: 9, confirmed: 2, due: Some(ms(due)), token: 7, ..LANE }
}

fn leased_lane(through: u64) -> LaneRow {
    LaneRow {
        due: Some(ms(UNTIL)),
        lease: Some(lease("me", UNTIL, through)),
        token: 8,
        starts: 1,
        ..lane_due(0)
    }
}

#[test]
fn claim_asks_for_two_events_at_least() {
    let block = policy(WhenDead::Block);
    for (claim, lanes, run, events) in [
        (claim(&block, 1), 1, 2, 2),
        (claim(&block, 4096), 4096, 16, 4096),
        (claim(&block, 5), 5, 5, 5),
        (claim(&block, 100).run(0), 100, 2, 100),
        (claim(&block, 100).run(usize::MAX), 100, 100, 100),
    ] {
        // The second event says when the lane is due if the first one is given up.
        assert_eq!(claim.query(NOW), Query::Due { now: NOW, lanes, run, events });
    }
}

/// The first row: a lane that is due, with its events that are due (P4, P6).
#[test]
fn claim_of_a_lane_that_is_due() {
    let block = policy(WhenDead::Block);
    let rows = [
        stored(5, lane("a", lane_due(100))),
        stored(1, outbox("e3", OutboxRow { starts: 1, due: NOW, ..pending("a", 3) })),
        stored(1, outbox("e4", OutboxRow { starts: 2, due: NOW, ..pending("a", 4) })),
        // A place was left by an event that was cancelled; what is due later ends the run, whatever
        // is behind it.
        stored(1, outbox("e6", OutboxRow { due: ms(1_001), ..pending("a", 6) })),
        stored(1, outbox("e7", pending("a", 7))),
    ];
    let deliveries = [("e3", 3, 2, 2), ("e4", 4, 3, 3)];
    for (most, through) in [(16, 4), (2, 4), (1, 3), (0, 3)] {
        let got = &deliveries[..deliveries.len().min(most.max(1))];
        let claimed = Claimed { runs: vec![run_of("a", 8, got)], dead: vec![], next_due: None };
        let expected =
            writes::<_, Infallible>([update(5, lane("a", leased_lane(through)))], claimed);
        assert_eq!(decide(claim(&block, 10).run(most), &rows), expected);
    }
    // A lease that would end after the end of time ends there.
    let endless = DeliveryPolicy { backoff_cap: Duration::MAX, ..DeliveryPolicy::default() }
        .checked()
        .unwrap();
    let forever = Claim::new(&endless, name("me"), Duration::MAX, 10).unwrap();
    assert_eq!(decide(forever, &rows).unwrap().outcome.runs[0].until, Millis::MAX);
}

/// The second and third row: after a lease that nobody settled, the first event only, to find out
/// which one it is (F4); after two of them, or with one start left, nothing else is claimed with
/// it, whether it stands before the others or behind them.
#[test]
fn claim_after_a_lease_that_nobody_settled() {
    let block = policy(WhenDead::Block);
    for (settled, unsettled, alone) in
        [(0, 1, false), (1, 1, false), (2, 1, true), (0, 2, true), (1, 2, true), (0, 3, true)]
    {
        let lapsed = |key| {
            let row = LaneRow {
                lease: Some(lease("other", 1_000, 4)),
                starts: unsettled,
                ..lane_due(1_000)
            };
            stored(5, lane(key, row))
        };
        let event = |id, key, sequence, starts| {
            stored(1, outbox(id, OutboxRow { starts, ..pending(key, sequence) }))
        };
        let started = [lapsed("a"), event("e3", "a", 3, settled), event("e4", "a", 4, 0)];
        let plain = [stored(5, lane("b", lane_due(1_000))), event("f3", "b", 3, 0)];
        let run = |deliveries| Run { alone, ..run_of("a", 8, deliveries) };
        let tried = run(&[("e3", 3, 2, settled + unsettled + 1)]);
        let beside = run_of("b", 8, &[("f3", 3, 2, 1)]);
        let after = || update(5, lane("a", LaneRow { starts: unsettled + 1, ..leased_lane(3) }));
        let plain_after = || update(5, lane("b", leased_lane(3)));

        let first = decide(claim(&block, 10), &[&started[..], &plain].concat());
        let behind = decide(claim(&block, 10), &[&plain[..], &started].concat());
        if alone {
            let claimed = Claimed { runs: vec![tried], dead: vec![], next_due: Some(NOW) };
            assert_eq!(first, writes([after()], claimed), "{settled} {unsettled}");
            let claimed = Claimed { runs: vec![beside], dead: vec![], next_due: Some(NOW) };
            assert_eq!(behind, writes([plain_after()], claimed), "{settled} {unsettled}");
        } else {
            let claimed =
                Claimed { runs: vec![tried.clone(), beside.clone()], dead: vec![], next_due: None };
            assert_eq!(first, writes([after(), plain_after()], claimed), "{settled} {unsettled}");
            let claimed = Claimed { runs: vec![beside, tried], dead: vec![], next_due: None };
            assert_eq!(behind, writes([after(), plain_after()], claimed), "{settled} {unsettled}");
        }
    }
}

/// The third row: no start left (F4), and what the policy says of the lane then (P4).
#[test]
fn claim_of_an_event_without_a_start_left() {
    for (starts, lane_starts) in [(4, 0), (0, 4), (1, 3), (2, 3)] {
        for (when_dead, next, due) in [
            (WhenDead::Block, Some(ms(700)), None),
            (WhenDead::Block, None, None),
            (WhenDead::Continue, Some(ms(700)), Some(ms(700))),
            (WhenDead::Continue, Some(ms(7_000)), Some(ms(7_000))),
            (WhenDead::Continue, None, None),
        ] {
            let policy = policy(when_dead);
            let before = LaneRow {
                lease: Some(lease("other", 900, 3)),
                starts: lane_starts,
                ..lane_due(900)
            };
            let head = OutboxRow {
                starts,
                failures: 1,
                reason: Some(Reason::new("first")),
                ..pending("a", 3)
            };
            let mut rows =
                vec![stored(5, lane("a", before)), stored(6, outbox("e3", head.clone()))];
            rows.extend(
                next.map(|due| stored(7, outbox("e4", OutboxRow { due, ..pending("a", 4) }))),
            );

            let reason = format!(
                "started {} times, the last {lane_starts} without an answer: it may bring the relay down",
                starts + lane_starts
            );
            let dead = OutboxRow {
                starts: starts + lane_starts,
                state: DeliveryState::Dead(NOW),
                reason: Some(Reason::new(reason)),
                ..head
            };
            let blocked_by = (when_dead == WhenDead::Block).then(|| name("e3"));
            let after = LaneRow { due, blocked_by, changed_at: NOW, ..lane_due(0) };
            let claimed = Claimed { runs: vec![], dead: vec![name("e3")], next_due: Some(NOW) };
            let expected =
                writes([update(6, outbox("e3", dead)), update(5, lane("a", after))], claimed);
            assert_eq!(decide(claim(&policy, 10), &rows), expected);
        }
    }
}

/// The fourth row: nothing is due, or not yet.
#[test]
fn claim_of_nothing() {
    let block = policy(WhenDead::Block);
    assert_eq!(decide(claim(&block, 10), &[]), writes_nothing(Claimed::default()));
    let later = Claimed { next_due: Some(ms(1_001)), ..Claimed::default() };
    // An event that is due later, or another's lease that lasts.
    let leased = LaneRow { lease: Some(lease("other", 1_001, 3)), starts: 1, ..lane_due(1_001) };
    for row in [lane_due(1_001), leased] {
        assert_eq!(
            decide(claim(&block, 10), &[stored(5, lane("a", row))]),
            writes_nothing(later.clone())
        );
    }
}

/// One claim over several lanes: the limit holds, and the outcome says when to come again.
#[test]
fn claim_of_several_lanes() {
    let block = policy(WhenDead::Block);
    let mut rows = Vec::new();
    for key in ["c", "a", "b"] {
        rows.push(stored(5, lane(key, lane_due(100))));
        rows.push(stored(1, outbox(&format!("{key}3"), pending(key, 3))));
        rows.push(stored(1, outbox(&format!("{key}4"), pending(key, 4))));
    }
    let whole =
        |key: &str| run_of(key, 8, &[(&format!("{key}3"), 3, 2, 1), (&format!("{key}4"), 4, 3, 1)]);
    let later = stored(3, lane("d", lane_due(2_000)));
    let with_later = [&rows[..], &[later]].concat();
    for (limit, rows, runs, next_due) in [
        // In the order of the answer, which is that of the due times, and not of the names.
        (7, &rows, vec![whole("c"), whole("a"), whole("b")], None),
        (7, &with_later, vec![whole("c"), whole("a"), whole("b")], Some(ms(2_000))),
        (6, &rows, vec![whole("c"), whole("a"), whole("b")], Some(NOW)),
        (5, &rows, vec![whole("c"), whole("a"), run_of("b", 8, &[("b3", 3, 2, 1)])], Some(NOW)),
        (2, &rows, vec![whole("c")], Some(NOW)),
        (1, &rows, vec![run_of("c", 8, &[("c3", 3, 2, 1)])], Some(NOW)),
    ] {
        let changes = runs.iter().map(|run| {
            let through = run.deliveries.last().unwrap().place.sequence;
            update(5, Record::Lane(run.lease.lane.clone(), leased_lane(through)))
        });
        let expected =
            writes(changes.collect::<Vec<_>>(), Claimed { runs, dead: vec![], next_due });
        assert_eq!(decide(claim(&block, limit), rows), expected, "{limit}");
    }
}

/// Where less is claimed than was looked at, the answer may have been cut before other lanes: with
/// as many events as were asked for.
#[test]
fn claim_from_an_answer_that_was_cut() {
    let block = policy(WhenDead::Block);
    // After a lease that nobody settled: one event of three.
    let rows = [
        stored(5, lane("a", LaneRow { starts: 1, ..lane_due(100) })),
        stored(1, outbox("e3", pending("a", 3))),
        stored(1, outbox("e4", pending("a", 4))),
        stored(1, outbox("e5", pending("a", 5))),
    ];
    for (limit, next_due) in [(2, Some(NOW)), (3, Some(NOW)), (4, None), (5, None)] {
        let claimed =
            Claimed { runs: vec![run_of("a", 8, &[("e3", 3, 2, 2)])], dead: vec![], next_due };
        let after = update(5, lane("a", LaneRow { starts: 2, ..leased_lane(3) }));
        assert_eq!(decide(claim(&block, limit), &rows), writes([after], claimed), "{limit}");
    }
}

/// An event that would be tried alone, and is given up or due later instead, keeps no other lane
/// waiting.
#[test]
fn claim_goes_on_after_a_lane_that_gave_nothing() {
    let block = policy(WhenDead::Block);
    for (starts, due, dead) in [(2, ms(100), vec![name("e3")]), (0, ms(1_001), vec![])] {
        let rows = [
            stored(5, lane("a", LaneRow { starts: 2, ..lane_due(100) })),
            stored(6, outbox("e3", OutboxRow { starts, due, ..pending("a", 3) })),
            stored(5, lane("b", lane_due(200))),
            stored(1, outbox("f3", pending("b", 3))),
        ];
        let claimed =
            Claimed { runs: vec![run_of("b", 8, &[("f3", 3, 2, 1)])], dead, next_due: Some(NOW) };
        assert_eq!(decide(claim(&block, 10), &rows).unwrap().outcome, claimed, "{starts}");
    }
}

/// A lane that says it is due and has nothing due is put right, and the claim is to be made again:
/// behind it may be others.
#[test]
fn claim_puts_a_lane_right() {
    let block = policy(WhenDead::Block);
    for (head, due) in [(None, None), (Some(ms(1_001)), Some(ms(1_001)))] {
        let mut rows = vec![stored(5, lane("a", lane_due(100)))];
        rows.extend(head.map(|due| stored(7, outbox("e3", OutboxRow { due, ..pending("a", 3) }))));
        let claimed = Claimed { next_due: Some(NOW), ..Claimed::default() };
        let after = LaneRow { due, changed_at: NOW, ..lane_due(0) };
        assert_eq!(
            decide(claim(&block, 10), &rows),
            writes([update(5, lane("a", after))], claimed)
        );
    }
}

/// P3: no store looks for fewer events than there can be.
#[test]
fn how_many_events_can_be_pending() {
    for (next, confirmed, most) in [
        (1, 0, 0),
        (2, 0, 1),
        (5, 0, 4),
        (5, 2, 2),
        (5, 4, 0),
        (u64::MAX, 0, u64::MAX - 1),
        (1, 7, 0),
        (0, 0, 0),
    ] {
        assert_eq!(
            LaneRow { next, confirmed, ..LANE }.pending_at_most(),
            most,
            "{next} {confirmed}"
        );
    }
}

fn lease_ref(key: &str, token: u64) -> LeaseRef {
    LeaseRef { lane: name(key), token }
}

fn result(confirmed: &[&str], ended: Option<(&str, Ending)>) -> RunResult {
    RunResult {
        lease: lease_ref("a", 8),
        confirmed: confirmed.iter().map(|id| name(id)).collect(),
        ended: ended.map(|(id, ending)| (name(id), ending)),
    }
}

/// A lane that is leased through event 5, with events 3 to 6 pending; event 6 is due later.
fn leased_rows() -> Vec<Stored> {
    vec![
        stored(5, lane("a", LaneRow { starts: 2, ..leased_lane(5) })),
        stored(13, outbox("e3", OutboxRow { starts: 1, ..pending("a", 3) })),
        stored(14, outbox("e4", OutboxRow { due: ms(104), ..pending("a", 4) })),
        stored(15, outbox("e5", OutboxRow { due: ms(105), ..pending("a", 5) })),
        stored(16, outbox("e6", OutboxRow { due: ms(7_000), ..pending("a", 6) })),
    ]
}

/// The lane afterwards: free, and due at this time.
fn freed(due: Option<u64>, confirmed: u64) -> LaneRow {
    LaneRow { due: due.map(ms), confirmed, token: 8, changed_at: NOW, ..lane_due(0) }
}

fn confirmed(sequence: u64, starts: u32) -> OutboxRow {
    let due = if sequence == 3 { ms(100) } else { ms(100 + sequence) };
    OutboxRow { due, starts, state: DeliveryState::Confirmed(NOW), ..pending("a", sequence) }
}

#[test]
fn settle_asks_for_one_event_more_than_it_names() {
    let block = policy(WhenDead::Block);
    let reason = || Ending::Failed(Reason::new("no"));
    let other = RunResult { lease: lease_ref("b", 1), ..result(&[], None) };
    let query = |results: Vec<RunResult>| Settle::new(&block, results).query(NOW);
    let of = |lanes: &[(&str, usize)]| {
        Query::Lanes(lanes.iter().map(|(lane, run)| (name(lane), *run)).collect())
    };
    assert_eq!(query(vec![]), of(&[]));
    assert_eq!(
        query(vec![other.clone(), result(&["e3"], Some(("e4", reason())))]),
        of(&[("a", 3), ("b", 1)])
    );
    // Two results for one lane: it is asked for once, with the events of the longer one.
    assert_eq!(
        query(vec![result(&["e3"], None), result(&["e3", "e4"], None), other]),
        of(&[("a", 3), ("b", 1)])
    );
}

/// Confirmed: one, several, all that are covered, and the last of the lane.
#[test]
fn settle_confirmed() {
    let block = policy(WhenDead::Block);
    let rows = leased_rows();
    // The starts that nobody settled are counted to the first event; the others were started once.
    let all = [
        update(13, outbox("e3", confirmed(3, 3))),
        update(14, outbox("e4", confirmed(4, 1))),
        update(15, outbox("e5", confirmed(5, 1))),
    ];
    for (named, due) in [(1, Some(104)), (2, Some(105)), (3, Some(7_000))] {
        let after = freed(due, 2 + named as u64);
        let changes = all[..named].iter().cloned().chain([update(5, lane("a", after))]);
        let settled = Settled { confirmed: named, ..Settled::default() };
        let ids = &["e3", "e4", "e5"][..named];
        assert_eq!(
            decide(Settle::new(&block, [result(ids, None)]), &rows),
            writes(changes, settled)
        );
    }
    // Nothing behind it.
    let changes = all.iter().cloned().chain([update(5, lane("a", freed(None, 5)))]);
    let settled = Settled { confirmed: 3, ..Settled::default() };
    assert_eq!(
        decide(Settle::new(&block, [result(&["e3", "e4", "e5"], None)]), &rows[..4]),
        writes(changes, settled)
    );
}

/// A lease that ran out and was not taken is current: to settle under it saves a delivery.
#[test]
fn settle_under_a_lease_that_ran_out() {
    let block = policy(WhenDead::Block);
    let rows = leased_rows();
    let late = Settle::new(&block, [result(&["e3"], None)])
        .decide(ms(UNTIL + 1), &Rows::new(rows))
        .unwrap();
    assert_eq!((late.outcome.confirmed, late.outcome.stale), (1, vec![]));
}

/// Not named: the lane is given back as it was, and the start is not counted (F12).
#[test]
fn settle_released() {
    let block = policy(WhenDead::Block);
    for (starts, left) in [(2, 1), (1, 0), (0, 0)] {
        let mut rows = leased_rows();
        rows[0] = stored(5, lane("a", LaneRow { starts, ..leased_lane(5) }));
        let after = LaneRow { starts: left, ..freed(Some(100), 2) };
        let released = RunResult::released(lease_ref("a", 8));
        let expected = writes([update(5, lane("a", after))], Settled::default());
        assert_eq!(decide(Settle::new(&block, [released]), &rows), expected);
    }
}

/// Failed, rejected, unavailable: as the first event and behind one that was confirmed, for both
/// policies.
#[test]
fn settle_ended() {
    let reason = Reason::new("no such host");
    for when_dead in [WhenDead::Block, WhenDead::Continue] {
        let policy = policy(when_dead);
        for behind in [false, true] {
            let (id, sequence, revision, starts, unsettled, due, next_due) =
                if behind { ("e4", 4, 14, 0, 1, 104, 105) } else { ("e3", 3, 13, 1, 2, 100, 104) };
            let done = if behind { sequence - 1 } else { 2 };
            for failures in [0, 1] {
                let before = OutboxRow { starts, failures, due: ms(due), ..pending("a", sequence) };
                let mut rows = leased_rows();
                rows[sequence as usize - 2] = stored(revision, outbox(id, before.clone()));

                let failed = OutboxRow {
                    starts: starts + unsettled,
                    failures: failures + 1,
                    reason: Some(reason.clone()),
                    ..before.clone()
                };
                let retry_at = NOW + policy.backoff(&name(id), failures + 1);
                let retried = OutboxRow { due: retry_at, ..failed.clone() };
                let dead = OutboxRow { state: DeliveryState::Dead(NOW), ..failed };
                // An outage counts against no event: neither a failure nor the start (F15).
                let unavailable = OutboxRow {
                    starts: starts + unsettled - 1,
                    reason: Some(reason.clone()),
                    ..before
                };
                // Nor does it when a consumer asks to have it later (F9).
                let again_at = NOW + policy.backoff(&name(id), 1);
                let deferred = OutboxRow { due: again_at, ..unavailable.clone() };

                let gone_on = match when_dead {
                    WhenDead::Block => LaneRow { blocked_by: Some(name(id)), ..freed(None, done) },
                    WhenDead::Continue => freed(Some(next_due), done),
                };
                let (is_retried, is_dead, is_released) = (
                    Settled { retried: 1, ..Settled::default() },
                    Settled { dead: vec![name(id)], ..Settled::default() },
                    Settled { released: 1, ..Settled::default() },
                );
                let failed = Ending::Failed(reason.clone());
                let cases = [
                    // The second failure is once too often.
                    if failures == 0 {
                        (failed, retried, freed(Some(retry_at.get()), done), is_retried)
                    } else {
                        (failed, dead.clone(), gone_on.clone(), is_dead.clone())
                    },
                    (Ending::Rejected(reason.clone()), dead, gone_on, is_dead),
                    (
                        Ending::Unavailable(reason.clone()),
                        unavailable,
                        freed(Some(due), done),
                        is_released.clone(),
                    ),
                    (
                        Ending::Deferred(reason.clone()),
                        deferred,
                        freed(Some(again_at.get()), done),
                        is_released,
                    ),
                ];
                for (ending, event, lane_after, settled) in cases {
                    let mut changes =
                        vec![update(revision, outbox(id, event)), update(5, lane("a", lane_after))];
                    let mut settled = settled;
                    let mut named: &[&str] = &[];
                    if behind {
                        changes.push(update(13, outbox("e3", confirmed(3, 3))));
                        settled.confirmed = 1;
                        named = &["e3"];
                    }
                    let given = Settle::new(&policy, [result(named, Some((id, ending.clone())))]);
                    assert_eq!(
                        decide(given, &rows),
                        writes(changes, settled),
                        "{ending:?} {when_dead:?}"
                    );
                }
            }
        }
    }
}

/// Stale, for every reason there is: it changes nothing and says why (P6, F3, F5).
#[test]
fn settle_stale() {
    let block = policy(WhenDead::Block);
    let failed = |id: &'static str| Some((id, Ending::Failed(Reason::new("no"))));
    let token = |token| RunResult { lease: lease_ref("a", token), ..result(&["e3"], None) };
    let not_covered = |id: &str| Stale::NotCovered { event: name(id) };
    let mut ended = leased_rows();
    ended[0] = stored(5, lane("a", LaneRow { lease: None, ..leased_lane(5) }));
    let taken_over = Stale::TakenOver { owner: name("me"), token: 8 };
    for (rows, given, why, message) in [
        (
            leased_rows(),
            token(7),
            taken_over.clone(),
            "the lease 7 of lane \"a\" is not current: me has taken the lane since, with token 8",
        ),
        (
            leased_rows(),
            token(9),
            taken_over,
            "the lease 9 of lane \"a\" is not current: me has taken the lane since, with token 8",
        ),
        (
            ended.clone(),
            token(8),
            Stale::Ended,
            "the lease 8 of lane \"a\" is not current: it was settled or released already",
        ),
        (
            ended,
            RunResult::released(lease_ref("a", 8)),
            Stale::Ended,
            "the lease 8 of lane \"a\" is not current: it was settled or released already",
        ),
        (
            vec![],
            token(8),
            Stale::NoLane,
            "the lease 8 of lane \"a\" is not current: there is no such lane",
        ),
        (
            leased_rows(),
            result(&["e4"], None),
            not_covered("e4"),
            "the lease 8 of lane \"a\" is not current: event e4 is not the next one that it covers",
        ),
        // In another order, twice, beyond the lease, unknown, and the same for the event that ended
        // it.
        (leased_rows(), result(&["e3", "e5"], None), not_covered("e5"), ""),
        (leased_rows(), result(&["e3", "e3"], None), not_covered("e3"), ""),
        (leased_rows(), result(&["e3", "e4", "e5", "e6"], None), not_covered("e6"), ""),
        (leased_rows(), result(&["x"], None), not_covered("x"), ""),
        (leased_rows(), result(&[], failed("e4")), not_covered("e4"), ""),
        (leased_rows(), result(&["e3", "e4", "e5"], failed("e6")), not_covered("e6"), ""),
        (leased_rows()[..1].to_vec(), result(&[], failed("e3")), not_covered("e3"), ""),
    ] {
        let stale = StaleLease { lease: given.lease.clone(), why };
        if !message.is_empty() {
            assert_eq!(stale.to_string(), message);
        }
        let settled = Settled { stale: vec![stale], ..Settled::default() };
        assert_eq!(decide(Settle::new(&block, [given]), &rows), writes_nothing(settled));
    }
}

/// A stale run does not hold up the others; of two results for one lane the later is stale, unless
/// the first was.
#[test]
fn settle_several() {
    let block = policy(WhenDead::Block);
    let mut rows = leased_rows();
    rows.push(stored(
        6,
        lane("b", LaneRow { lease: Some(lease("me", UNTIL, 3)), ..leased_lane(3) }),
    ));
    rows.push(stored(17, outbox("f3", pending("b", 3))));
    let b = RunResult { lease: lease_ref("b", 8), confirmed: vec![name("f3")], ended: None };
    let b_settled = [
        update(6, lane("b", LaneRow { due: None, confirmed: 3, ..freed(None, 3) })),
        update(
            17,
            outbox(
                "f3",
                OutboxRow {
                    due: ms(100),
                    ..OutboxRow {
                        state: DeliveryState::Confirmed(NOW),
                        starts: 1,
                        ..pending("b", 3)
                    }
                },
            ),
        ),
    ];
    let a_settled =
        [update(5, lane("a", freed(Some(104), 3))), update(13, outbox("e3", confirmed(3, 3)))];
    let stale = |key: &str, token, why| StaleLease { lease: lease_ref(key, token), why };
    let wrong = result(&["e5"], None);
    let not_covered = Stale::NotCovered { event: name("e5") };
    let none = RunResult::released(lease_ref("aa", 1));
    let last = RunResult::released(lease_ref("z", 1));

    for (results, a_counts, expected_stale) in [
        (vec![b.clone(), wrong.clone()], false, vec![stale("a", 8, not_covered.clone())]),
        (
            vec![b.clone(), wrong.clone(), result(&["e3"], None)],
            true,
            vec![stale("a", 8, not_covered)],
        ),
        (
            vec![result(&["e3"], None), result(&["e3"], None), b.clone()],
            true,
            vec![stale("a", 8, Stale::Ended)],
        ),
        (vec![result(&["e3"], None), wrong, b.clone()], true, vec![stale("a", 8, Stale::Ended)]),
        (
            vec![last, b, none, result(&["e3"], None)],
            true,
            vec![stale("aa", 1, Stale::NoLane), stale("z", 1, Stale::NoLane)],
        ),
    ] {
        let changes = b_settled.iter().chain(a_settled.iter().filter(|_| a_counts)).cloned();
        let settled = Settled {
            confirmed: 1 + usize::from(a_counts),
            stale: expected_stale,
            ..Settled::default()
        };
        assert_eq!(decide(Settle::new(&block, results), &rows), writes(changes, settled));
    }
}

/// P6, F3: renewed until later and never until earlier, or stale.
#[test]
fn renew() {
    let rows = leased_rows();
    let renew = |leases: &[LeaseRef], lasts: u64| {
        Renew::new(leases.iter().cloned(), Duration::from_millis(lasts))
    };
    let a = lease_ref("a", 8);
    assert_eq!(
        renew(&[lease_ref("b", 1), a.clone(), a.clone()], 9).query(NOW),
        Query::Lanes(vec![(name("a"), 0), (name("b"), 0)])
    );
    // At most as long as it lasts already: nothing needs to be written.
    for (lasts, until) in
        [(501, 1_501), (10_000, 11_000), (u64::MAX, u64::MAX), (500, UNTIL), (1, UNTIL), (0, UNTIL)]
    {
        let row = LaneRow {
            starts: 2,
            due: Some(ms(until)),
            lease: Some(lease("me", until, 5)),
            ..leased_lane(5)
        };
        let renewed = Renewed { leases: vec![(a.clone(), ms(until))], stale: vec![] };
        // Asked for twice it is renewed once.
        assert_eq!(
            decide(renew(&[a.clone(), a.clone()], lasts), &rows),
            writes([update(5, lane("a", row))], renewed)
        );
    }

    let other = lease_ref("a", 7);
    let free = [stored(5, lane("a", LaneRow { lease: None, ..leased_lane(5) }))];
    for (rows, lease, why) in [
        (&rows[..], other, Stale::TakenOver { owner: name("me"), token: 8 }),
        (&free[..], a.clone(), Stale::Ended),
        (&[][..], a.clone(), Stale::NoLane),
    ] {
        let renewed =
            Renewed { leases: vec![], stale: vec![StaleLease { lease: lease.clone(), why }] };
        assert_eq!(decide(renew(&[lease], 9), rows), writes_nothing(renewed));
    }

    // A stale one does not hold up the others.
    let row = LaneRow {
        starts: 2,
        due: Some(ms(2_000)),
        lease: Some(lease("me", 2_000, 5)),
        ..leased_lane(5)
    };
    let stale = |key: &str, token, why| StaleLease { lease: lease_ref(key, token), why };
    let renewed = Renewed {
        leases: vec![(a.clone(), ms(2_000))],
        stale: vec![
            stale("a", 7, Stale::TakenOver { owner: name("me"), token: 8 }),
            stale("b", 1, Stale::NoLane),
        ],
    };
    let given = renew(&[lease_ref("b", 1), a, lease_ref("a", 7)], 1_000);
    assert_eq!(decide(given, &rows), writes([update(5, lane("a", row))], renewed));
}

// Receiving (P5)

fn inbox(state: InboxState, failures: u32, event: &Event) -> Record {
    let row = InboxRow {
        content: event.content_digest(),
        at: ms(10),
        state,
        failures,
        reason: Some(Reason::new("before")),
        effect: false,
    };
    Record::Inbox(name("c"), event.id.clone(), row)
}

fn other_contents() -> [Event; 4] {
    let event = event("e", "k");
    [
        Event { body: text("other"), ..event.clone() },
        Event { body: Body::json("event").unwrap(), ..event.clone() },
        Event { event_type: name("order.changed"), ..event.clone() },
        Event { schema_version: 2, ..event },
    ]
}

/// P5, F6, F8, F9.
#[test]
fn receive() {
    let event = event("e", "k");
    let receive = || Receive::new(name("c"), &event);
    let effect = || insert(Record::Effect(name("c"), name("e"), text("points")));
    assert_eq!(receive().query(NOW), Query::rows([Key::Inbox(name("c"), name("e"))]));

    let applied = |failures, effect| {
        let content = event.content_digest();
        let row = InboxRow {
            content,
            at: NOW,
            state: InboxState::Applied,
            failures,
            reason: None,
            effect,
        };
        Record::Inbox(name("c"), name("e"), row)
    };
    let with_effect = || receive().effect(text("points"));
    assert_eq!(decide(receive(), &[]), writes([insert(applied(0, false))], Received::Applied));
    assert_eq!(
        decide(with_effect(), &[]),
        writes([insert(applied(0, true)), effect()], Received::Applied)
    );
    let failing = [stored(3, inbox(InboxState::Failing, 2, &event))];
    assert_eq!(
        decide(receive(), &failing),
        writes([update(3, applied(2, false))], Received::Applied)
    );
    assert_eq!(
        decide(with_effect(), &failing),
        writes([update(3, applied(2, true)), effect()], Received::Applied)
    );
    for (state, outcome) in
        [(InboxState::Applied, Received::Duplicate), (InboxState::Poisoned, Received::Poisoned)]
    {
        let row = [stored(3, inbox(state, 2, &event))];
        assert_eq!(decide(receive(), &row), writes_nothing(outcome));
        assert_eq!(decide(with_effect(), &row), writes_nothing(outcome));
    }
    for other in other_contents() {
        for state in [InboxState::Applied, InboxState::Failing, InboxState::Poisoned] {
            let refused = decide(with_effect(), &[stored(3, inbox(state, 2, &other))]).unwrap_err();
            assert_eq!(refused, differs(&other, &event));
            let (received, given) = (other.content_digest(), event.content_digest());
            assert_eq!(
                refused.to_string(),
                format!(
                    "event e has other content than the one that consumer c received under this id \
                     (content {received:.8}, now {given:.8}); an event id must never be used twice"
                )
            );
        }
    }
    // What a broker may change on its way is no other content.
    let row = [stored(3, inbox(InboxState::Applied, 0, &event))];
    let again =
        Event { time: ms(1), headers: Headers::new().with("h", "v").unwrap(), ..event.clone() };
    assert_eq!(decide(Receive::new(name("c"), &again), &row), writes_nothing(Received::Duplicate));
}

/// P4 at the receiver: an event waits for the one that was published before it.
#[test]
fn receive_in_order() {
    let event = event("e", "k");
    let receive = |at: Place| Receive::new(name("c"), &event).in_order(name("k"), at);
    let keys = [Key::Inbox(name("c"), name("e")), Key::Position(name("c"), name("k"))];
    assert_eq!(receive(place(20, 5, 4)).query(NOW), Query::rows(keys));

    let content = event.content_digest();
    let row = InboxRow {
        content,
        at: NOW,
        state: InboxState::Applied,
        failures: 0,
        reason: None,
        effect: false,
    };
    let applied = insert(Record::Inbox(name("c"), name("e"), row));
    let standing = |there: Option<(u64, u64)>| {
        there.map(|there| stored(6, position(there, ms(10)))).into_iter().collect::<Vec<_>>()
    };
    // Where the consumer stands, the place of the event, and where the consumer stands afterwards:
    // each time the beginning of the count, and the sequence.
    for (there, at, moved) in [
        (None, place(20, 1, 0), Some((20, 1))),
        (None, place(20, 5, 0), Some((20, 5))),
        (Some((20, 4)), place(20, 5, 4), Some((20, 5))),
        (Some((20, 4)), place(20, 7, 4), Some((20, 7))),
        (Some((20, 4)), place(20, 7, 3), Some((20, 7))),
        // One that comes late does not move it back, be it the very first.
        (Some((20, 9)), place(20, 5, 4), None),
        (Some((20, 9)), place(20, 1, 0), None),
        (Some((20, u64::MAX)), place(20, u64::MAX, u64::MAX), None),
        // A sender that counts anew is followed, and what comes late of its earlier count waits for
        // nothing.
        (Some((20, 9)), place(21, 1, 0), Some((21, 1))),
        (Some((21, 1)), place(21, 2, 1), Some((21, 2))),
        (Some((21, 1)), place(20, 12, 11), None),
    ] {
        let rows = standing(there);
        let moves = moved
            .map(|to| position(to, NOW))
            .map(|to| if rows.is_empty() { insert(to) } else { update(6, to) });
        let changes = [applied.clone()].into_iter().chain(moves);
        assert_eq!(
            decide(receive(at), &rows),
            writes(changes, Received::Applied),
            "{there:?} {at:?}"
        );
    }
    for (there, at) in [
        (None, place(20, 2, 1)),
        (Some((20, 4)), place(20, 6, 5)),
        (Some((20, 4)), place(20, u64::MAX, u64::MAX - 1)),
        // The first of the later count has not come.
        (Some((20, 9)), place(21, 2, 1)),
    ] {
        assert_eq!(
            decide(receive(at), &standing(there)),
            writes_nothing(Received::WaitsFor(at.after))
        );
    }
    // What is done waits too, and then moves the position to a place that a redrive gave it: those
    // behind it wait for that place.
    for (state, outcome) in
        [(InboxState::Applied, Received::Duplicate), (InboxState::Poisoned, Received::Poisoned)]
    {
        let decided = |there| {
            let rows: Vec<Stored> =
                [stored(3, inbox(state, 2, &event))].into_iter().chain(standing(there)).collect();
            decide(receive(place(20, 9, 8)), &rows)
        };
        assert_eq!(decided(None), writes_nothing(Received::WaitsFor(8)));
        assert_eq!(decided(Some((20, 7))), writes_nothing(Received::WaitsFor(8)));
        assert_eq!(decided(Some((20, 8))), writes([update(6, position((20, 9), NOW))], outcome));
        for there in [(20, 9), (20, 10), (21, 1)] {
            assert_eq!(decided(Some(there)), writes_nothing(outcome));
        }
    }
}

/// P5: an effect is recorded once, beside the row that says so.
#[test]
fn record_effect() {
    let event = event("e", "k");
    let record = || RecordEffect::new(name("c"), name("e"), text("points"));
    assert_eq!(record().query(NOW), Query::rows([Key::Inbox(name("c"), name("e"))]));
    assert_eq!(decide(record(), &[]), writes_nothing(()));
    for state in [InboxState::Applied, InboxState::Failing, InboxState::Poisoned] {
        for effect in [false, true] {
            let Record::Inbox(consumer, id, row) = inbox(state, 2, &event) else { unreachable!() };
            let with = |effect| {
                Record::Inbox(consumer.clone(), id.clone(), InboxRow { effect, ..row.clone() })
            };
            let expected = if state == InboxState::Applied && !effect {
                writes(
                    [
                        update(3, with(true)),
                        insert(Record::Effect(name("c"), name("e"), text("points"))),
                    ],
                    (),
                )
            } else {
                writes_nothing(())
            };
            assert_eq!(decide(record(), &[stored(3, with(effect))]), expected);
        }
    }
}

// Calls outside of the transaction (P9, F22)

fn call_key() -> CallKey {
    CallKey { consumer: name("c"), event: name("e") }
}

fn call(state: CallState, at: u64, starts: u32, note: Option<&str>) -> Record {
    Record::Call(
        name("c"),
        name("e"),
        CallRow { state, at: ms(at), starts, note: note.map(Reason::new) },
    )
}

const CALL_STATES: [CallState; 4] =
    [CallState::Intended, CallState::Started, CallState::Unknown, CallState::Done];

#[test]
fn intend() {
    let intend = Intend::new(call_key());
    assert_eq!(intend.query(NOW), Query::rows([Key::Call(name("c"), name("e"))]));
    assert_eq!(
        decide(intend.clone(), &[]),
        writes([insert(call(CallState::Intended, 1_000, 0, None))], true)
    );
    for state in CALL_STATES {
        assert_eq!(
            decide(intend.clone(), &[stored(3, call(state, 10, 2, None))]),
            writes_nothing(false)
        );
    }
}

#[test]
fn start() {
    let unknown = "it was started, and nobody knows whether it happened";
    for rule in [WhenUnknown::Ask, WhenUnknown::Repeat, WhenUnknown::Wait] {
        let start = Start::new(call_key(), Duration::from_millis(100), rule);
        assert_eq!(start.query(NOW), Query::rows([Key::Call(name("c"), name("e"))]));
        assert_eq!(decide(start.clone(), &[]), Err(CallRefused::NotIntended { key: call_key() }));
        let again =
            writes([update(3, call(CallState::Started, 1_000, 3, Some("n")))], Started::Call(3));
        let from = |state, at| decide(start.clone(), &[stored(3, call(state, at, 2, Some("n")))]);
        assert_eq!(from(CallState::Intended, 10), again);
        assert_eq!(
            from(CallState::Done, 10),
            writes_nothing(Started::Done(Some(Reason::new("n"))))
        );
        // The end of the patience, and a clock that stepped back (F7).
        for at in [901, 1_000, 5_000] {
            assert_eq!(from(CallState::Started, at), writes_nothing(Started::UnderWay));
        }
        let outcome = match rule {
            WhenUnknown::Ask => Started::Ask,
            WhenUnknown::Wait => Started::Wait,
            WhenUnknown::Repeat => {
                assert_eq!(from(CallState::Started, 900), again);
                assert_eq!(from(CallState::Unknown, 1_000), again);
                continue;
            }
        };
        let found =
            writes([update(3, call(CallState::Unknown, 1_000, 2, Some(unknown)))], outcome.clone());
        assert_eq!(from(CallState::Started, 900), found);
        assert_eq!(from(CallState::Unknown, 1_000), writes_nothing(outcome));
    }
}

#[test]
fn resolve() {
    let ends = [
        (CallEnd::Done(None), CallState::Done, None),
        (CallEnd::Done(Some(Reason::new("n"))), CallState::Done, Some("n")),
        (CallEnd::NotDone(Reason::new("n")), CallState::Intended, Some("n")),
        (CallEnd::Unknown(Reason::new("n")), CallState::Unknown, Some("n")),
    ];
    for (end, state, note) in ends {
        let resolve = Resolve::new(call_key(), end.clone());
        assert_eq!(resolve.query(NOW), Query::rows([Key::Call(name("c"), name("e"))]));
        let from = |state| decide(resolve.clone(), &[stored(3, call(state, 10, 2, Some("old")))]);
        let ended = writes([update(3, call(state, 1_000, 2, note))], ());
        assert_eq!(from(CallState::Started), ended);
        assert_eq!(from(CallState::Unknown), ended);
        let done = if state == CallState::Done {
            writes_nothing(())
        } else {
            Err(CallRefused::Done { key: call_key() })
        };
        assert_eq!(from(CallState::Done), done);
        // That it happened is believed as soon as it can have happened.
        let not_started =
            Err(CallRefused::NotStarted { key: call_key(), state: CallState::Intended });
        let happened = matches!(end, CallEnd::Done(_));
        assert_eq!(
            from(CallState::Intended),
            if happened { ended.clone() } else { not_started.clone() }
        );
        assert_eq!(
            decide(resolve.clone(), &[stored(3, call(CallState::Intended, 10, 0, None))]),
            not_started
        );
        assert_eq!(decide(resolve.clone(), &[]), Err(CallRefused::NotIntended { key: call_key() }));
        for state in [CallState::Started, CallState::Unknown] {
            // Of the last start, and of one before it.
            let of = |start| {
                decide(
                    resolve.clone().of_start(start),
                    &[stored(3, call(state, 10, 2, Some("old")))],
                )
            };
            let again = Err(CallRefused::StartedAgain { key: call_key(), given: 1, last: 2 });
            assert_eq!(of(2), ended);
            assert_eq!(of(1), if happened { ended.clone() } else { again });
        }
    }
}

fn differs(received: &Event, given: &Event) -> ContentDiffers {
    ContentDiffers {
        consumer: name("c"),
        event: name("e"),
        received: received.content_digest(),
        given: given.content_digest(),
    }
}

/// P5, F9, F11: a failure leaves no mark of being done, and is counted until the limit.
#[test]
fn count_failure() {
    let event = event("e", "k");
    let count = |limit| CountFailure::new(name("c"), &event, Reason::new("no stock"), limit);
    assert_eq!(count(3).query(NOW), Query::rows([Key::Inbox(name("c"), name("e"))]));
    let counted = |state, failures| {
        let row = InboxRow {
            content: event.content_digest(),
            at: NOW,
            state,
            failures,
            reason: Some(Reason::new("no stock")),
            effect: false,
        };
        Record::Inbox(name("c"), name("e"), row)
    };
    let (again, poisoned) = (FailureCounted::ComesAgain, FailureCounted::Poisoned);
    assert_eq!(decide(count(2), &[]), writes([insert(counted(InboxState::Failing, 1))], again));
    for limit in [0, 1] {
        assert_eq!(
            decide(count(limit), &[]),
            writes([insert(counted(InboxState::Poisoned, 1))], poisoned)
        );
    }
    let failing = [stored(3, inbox(InboxState::Failing, 2, &event))];
    assert_eq!(
        decide(count(4), &failing),
        writes([update(3, counted(InboxState::Failing, 3))], again)
    );
    for limit in [3, 2, 0] {
        assert_eq!(
            decide(count(limit), &failing),
            writes([update(3, counted(InboxState::Poisoned, 3))], poisoned)
        );
    }
    for limit in [0, 9] {
        let row = |state| [stored(3, inbox(state, 2, &event))];
        assert_eq!(
            decide(count(limit), &row(InboxState::Applied)),
            writes_nothing(FailureCounted::AppliedAlready)
        );
        assert_eq!(decide(count(limit), &row(InboxState::Poisoned)), writes_nothing(poisoned));
    }
    for other in other_contents() {
        for state in [InboxState::Applied, InboxState::Failing, InboxState::Poisoned] {
            assert_eq!(
                decide(count(3), &[stored(3, inbox(state, 2, &other))]),
                Err(differs(&other, &event))
            );
        }
    }
}

/// P3: what a consumer has set aside can be tried again, and nothing else changes by it.
#[test]
fn retry() {
    let event = event("e", "k");
    let retry = || Retry::new(name("c"), name("e"));
    assert_eq!(retry().query(NOW), Query::rows([Key::Inbox(name("c"), name("e"))]));
    assert_eq!(decide(retry(), &[]), writes_nothing(false));
    for state in [InboxState::Applied, InboxState::Failing] {
        assert_eq!(decide(retry(), &[stored(3, inbox(state, 2, &event))]), writes_nothing(false));
    }
    let Record::Inbox(consumer, id, row) = inbox(InboxState::Poisoned, 2, &event) else {
        unreachable!()
    };
    let again = InboxRow { at: NOW, state: InboxState::Failing, failures: 0, ..row };
    let expected = writes([update(3, Record::Inbox(consumer, id, again))], true);
    assert_eq!(decide(retry(), &[stored(3, inbox(InboxState::Poisoned, 2, &event))]), expected);
}

/// P4 at the receiver: a consumer waits for nothing before the place to which it skips, and never
/// goes back.
#[test]
fn skip_to() {
    let skip = || SkipTo::new(name("c"), name("k"), place(20, 9, 5));
    assert_eq!(skip().query(NOW), Query::rows([Key::Position(name("c"), name("k"))]));
    assert_eq!(decide(skip(), &[]), writes([insert(position((20, 5), NOW))], true));
    for there in [(20, 4), (19, 7)] {
        let moved = writes([update(2, position((20, 5), NOW))], true);
        assert_eq!(decide(skip(), &[stored(2, position(there, ms(10)))]), moved);
    }
    for there in [(20, 5), (20, 6), (20, u64::MAX), (21, 1)] {
        assert_eq!(decide(skip(), &[stored(2, position(there, ms(10)))]), writes_nothing(false));
    }
    // The event that waited is next then.
    let waiting = Receive::new(name("c"), &event("e", "k")).in_order(name("k"), place(20, 9, 5));
    assert_eq!(decide(waiting.clone(), &[]).unwrap().outcome, Received::WaitsFor(5));
    assert_eq!(
        decide(waiting, &[stored(1, position((20, 5), NOW))]).unwrap().outcome,
        Received::Applied
    );
}

/// In order, the position moves with an event that is set aside, and only then: the events behind
/// it do not wait for it (F18).
#[test]
fn count_failure_in_order() {
    let event = event("e", "k");
    let count = |limit, after| {
        CountFailure::new(name("c"), &event, Reason::new("no stock"), limit)
            .in_order(name("k"), place(20, 7, after))
    };
    let key = [Key::Inbox(name("c"), name("e")), Key::Position(name("c"), name("k"))];
    assert_eq!(count(3, 5).query(NOW), Query::rows(key));
    let moved = |decided: Result<Decision<FailureCounted>, ContentDiffers>| {
        let batch = decided.unwrap().batch;
        let found = batch.changes().iter().find(|change| matches!(change.key(), Key::Position(..)));
        found.cloned()
    };
    for (there, after, to) in [
        (None, 0, Some(7)),
        (None, 5, None),
        (Some(5), 5, Some(7)),
        (Some(6), 5, Some(7)),
        (Some(4), 5, None),
    ] {
        let rows: Vec<Stored> =
            there.into_iter().map(|there| stored(2, position((20, there), ms(10)))).collect();
        let expected = to.map(|to| match there {
            None => insert(position((20, to), NOW)),
            Some(_) => update(2, position((20, to), NOW)),
        });
        assert_eq!(moved(decide(count(1, after), &rows)), expected, "{there:?} {after}");
        assert_eq!(moved(decide(count(2, after), &rows)), None, "it comes again");
    }
}

// All of them

/// P1, P3, P5: a crash may undo what is then done again, and nothing else; a transition that is
/// lent says the same.
#[test]
fn what_a_crash_may_undo() {
    let (two, event, policy) = (request("2"), event("e", "k"), policy(WhenDead::Block));
    let retention = Retention::default().checked(&policy).unwrap();
    let events = || [name("e")];
    let no = || Reason::new("no");
    macro_rules! check {
        ($may_be_lost:literal: $($transition:expr),* $(,)?) => {$(
            let transition = $transition;
            assert_eq!(transition.may_be_lost(), $may_be_lost, "{transition:?}");
            assert_eq!(Transition::may_be_lost(&&transition), $may_be_lost, "{transition:?}, lent");
        )*};
    }
    check![true:
        claim(&policy, 1),
        Settle::new(&policy, [result(&["e"], None)]),
        Renew::new([lease_ref("a", 8)], LEASE),
    ];
    check![false:
        Register::new(&two),
        commit(&two, [draft()]),
        Receive::new(name("c"), &event),
        RecordEffect::new(name("c"), name("e"), text("points")),
        CountFailure::new(name("c"), &event, no(), 3),
        Retry::new(name("c"), name("e")),
        SkipTo::new(name("c"), name("k"), place(1, 1, 0)),
        Cancel::new(events(), no()).unwrap(),
        Redrive::new(events(), window(LEASE)).unwrap(),
        Discard::new(events(), no()).unwrap(),
        Purge::new(&retention, Table::Events, NonZeroU16::MIN),
        Intend::new(call_key()),
        Start::new(call_key(), LEASE, WhenUnknown::Ask),
        Resolve::new(call_key(), CallEnd::NotDone(no())),
    ];
}

fn one_of<T: for<'a> TryFrom<&'a str, Error = twobox::Invalid> + Clone + Debug + 'static>(
    names: &'static [&'static str],
) -> impl Strategy<Value = T> {
    prop::sample::select(names).prop_map(|text| name(text))
}

const LANES: &[&str] = &["a", "b", "o"];
const EVENTS: &[&str] = &["o/1", "o/2", "e"];

/// Rows that belong together, by their names; what they say is anything.
fn related_rows() -> impl Strategy<Value = Vec<Record>> {
    let outbox = (
        one_of(EVENTS),
        one_of::<OrderingKey>(LANES),
        0..6_u64,
        times(),
        counts(),
        counts(),
        any::<bool>(),
        reasons(),
    );
    let outbox =
        outbox.prop_map(|(id, lane, sequence, due, starts, failures, is_pending, reason)| {
            let state = if is_pending { DeliveryState::Pending } else { DeliveryState::Dead(due) };
            Record::Outbox(
                id,
                OutboxRow { lane, due, starts, failures, state, reason, ..pending("x", sequence) },
            )
        });
    // Tokens and places that the operations below name, or the largest there are.
    let small = || prop_oneof![4 => 0..4_u64, 1 => Just(u64::MAX)];
    let lane = (one_of(LANES), lane_rows(), small(), small(), any::<bool>());
    let lane = lane.prop_map(|(key, row, token, through, is_leased)| {
        let lease = is_leased.then(|| lease("me", 700, through));
        Record::Lane(key, LaneRow { token, lease, ..row })
    });
    let request_row = (any::<bool>(), any::<bool>()).prop_map(|(same, is_placed)| {
        bound(&request(if same { "2" } else { "3" }), is_placed.then(|| placed("o", &["o/1"])))
    });
    let inbox = (one_of(EVENTS), inbox_rows(), any::<bool>()).prop_map(|(id, row, same)| {
        let content = if same { event("e", "k").content_digest() } else { row.content };
        Record::Inbox(name("c"), id, InboxRow { content, ..row })
    });
    let rest = prop_oneof![
        events()
            .prop_flat_map(|event| one_of(EVENTS)
                .prop_map(move |id| Record::Event(Event { id, ..event.clone() }))),
        Just(order_row(&request("2"))),
        (one_of(EVENTS), bodies()).prop_map(|(id, body)| Record::Effect(name("c"), id, body)),
        request_row,
        inbox,
        (one_of(EVENTS), call_rows()).prop_map(|(id, row)| Record::Call(name("c"), id, row)),
        (numbers(), times(), times()).prop_map(|(sequence, begun, at)| {
            Record::Position(name("c"), name("k"), PositionRow { begun, sequence, at })
        }),
    ];
    let rows = prop::collection::vec(prop_oneof![4 => outbox, 4 => lane, 1 => rest], 0..10);
    rows.prop_map(|mut rows| {
        rows.sort_by_key(Record::key);
        rows.dedup_by_key(|record| record.key());
        rows
    })
}

fn results() -> impl Strategy<Value = Vec<RunResult>> {
    let ending = prop_oneof![
        Just(Ending::Failed(Reason::new("f"))),
        Just(Ending::Rejected(Reason::new("r"))),
        Just(Ending::Unavailable(Reason::new("u"))),
        Just(Ending::Deferred(Reason::new("d"))),
    ];
    let result = (
        one_of(LANES),
        0..4_u64,
        prop::collection::vec(one_of::<EventId>(EVENTS), 0..3),
        prop::option::of((one_of(EVENTS), ending)),
    );
    let result = result.prop_map(|(lane, token, confirmed, ended)| RunResult {
        lease: LeaseRef { lane, token },
        confirmed,
        ended,
    });
    prop::collection::vec(result, 0..4)
}

/// A transition is total and deterministic; its batch is sorted and names each key once. Gives the
/// batch, if it is not refused.
fn is_sound<T>(transition: &T, now: Millis, rows: &Rows) -> Result<Batch, TestCaseError>
where
    T: Transition<Outcome: PartialEq + Debug, Refusal: PartialEq + Debug>,
{
    let decided = transition.decide(now, rows);
    prop_assert_eq!(&decided, &transition.decide(now, rows));
    let batch = decided.map_or(Batch::new(), |decision| decision.batch);
    prop_assert!(batch.changes().is_sorted_by(|a, b| a.key() < b.key()), "{:?}", batch);
    Ok(batch)
}

/// Each change expects what was read, and nothing where nothing was.
fn guards(batch: &Batch, rows: &Rows) -> Result<(), TestCaseError> {
    batch.changes().iter().try_for_each(|change| {
        let read = rows.as_slice().iter().find(|stored| stored.record.key() == change.key());
        prop_assert_eq!(
            change.expect(),
            read.map_or(Expect::Absent, |stored| Expect::Revision(stored.revision))
        );
        Ok(())
    })
}

/// The answer of a store that holds these rows, with a revision of its own for each row.
fn answer(records: &[Record], query: &Query) -> Rows {
    let store = MemoryStore::new();
    let mut tx = store.begin().unwrap();
    let _ = tx.apply(&Batch::of(records.iter().cloned().map(insert).collect()).unwrap()).unwrap();
    tx.commit().unwrap();
    let rows = store.view().unwrap().load(query).unwrap().into_vec();
    Rows::new((100..).zip(rows).map(|(revision, row)| stored(revision, row.record)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn all_are_sound(
        records in related_rows(),
        shuffled in related_rows().prop_shuffle(),
        now in times(),
        when_dead in prop::sample::select(vec![WhenDead::Block, WhenDead::Continue]),
        (limit, run) in (1..5_usize, 0..5_usize),
        (max_failures, max_starts, span) in (counts(), counts(), numbers().prop_map(Duration::from_millis)),
        results in results(),
        keys in prop::collection::vec(one_of::<OrderingKey>(LANES), 1..4),
        targets in prop::collection::vec(one_of::<EventId>(EVENTS), 1..4),
    ) {
        let ms = Duration::from_millis(1);
        let (max_failures, max_starts) = (max_failures.clamp(1, u32::MAX - 1), max_starts.max(max_failures.saturating_add(2)));
        let policy = DeliveryPolicy { backoff_base: ms, backoff_cap: Duration::MAX, max_failures, max_starts, when_dead };
        let policy = policy.checked().unwrap();
        let request = request("2");
        let drafts = keys.into_iter().map(|key| draft().ordering_key(key));
        let leases = results.iter().map(|result| result.lease.clone());
        let event = event("e", "k");

        let no_answer = Rows::new(shuffled.into_iter().map(|record| stored(7, record)).collect());

        macro_rules! check {
            ($($transition:expr),* $(,)?) => {$(
                let transition = $transition;
                let rows = answer(&records, &transition.query(now));
                guards(&is_sound(&transition, now, &rows)?, &rows)?;
                // Rows that are no answer must not bring it down either.
                is_sound(&transition, now, &no_answer)?;
            )*};
        }
        check![
            Register::new(&request),
            commit(&request, drafts),
            Claim::new(&policy, name("me"), span + LEASE, limit).unwrap().run(run),
            Settle::new(&policy, results.clone()),
            Renew::new(leases, span),
            Receive::new(name("c"), &event).effect(text("points")),
            Receive::new(name("c"), &event).in_order(name("k"), place(u64::from(max_starts) % 3, max_starts.into(), max_failures.into())),
            RecordEffect::new(name("c"), name("e"), text("points")),
            CountFailure::new(name("c"), &event, Reason::new("no"), max_failures),
            Cancel::new(targets.clone(), Reason::new("no")).unwrap(),
            Redrive::new(targets.clone(), window(span.max(ms * 2))).unwrap(),
            Redrive::new(targets.clone(), window(span.max(ms * 2))).unwrap().force(),
            Discard::new(targets, Reason::new("no")).unwrap(),
            Intend::new(call_key()),
            Start::new(call_key(), span, WhenUnknown::Repeat),
            Start::new(call_key(), span, WhenUnknown::Ask),
            Resolve::new(call_key(), CallEnd::NotDone(Reason::new("no"))),
        ];
        // What a purge removes beside a row was written once, so it does not read it first.
        for table in Table::ALL {
            let age = span.max(Retention::SHORTEST);
            let retention = Retention { orders: Some(age), positions: Some(age * 2), events: age, inbox: age, requests: age };
            let retention = retention.checked(&hasty()).unwrap();
            let purge = Purge::new(&retention, table, NonZeroU16::MIN.saturating_add(u16::from(run as u8)));
            let _ = is_sound(&purge, now, &answer(&records, &purge.query(now)))?;
            let _ = is_sound(&purge, now, &no_answer)?;
        }
    }
}
