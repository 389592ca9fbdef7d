//! Each row of each truth table: what comes of it, and exactly which guarded changes are written.
//!
//! At the end, properties of all transitions over any rows: they are total, deterministic, and
//! guard what they read.

use core::fmt::Debug;
use core::num::NonZeroU16;
use core::time::Duration;
use std::collections::BTreeSet;

use proptest::prelude::*;
use twobox::call::{CallEnd, CallKey, CallRefused, Intend, Resolve, Start, Started, WhenUnknown};
use twobox::{
    Batch, Body, CallRow, CallState, Cancel, Change, Claim, CommitOrder, CommitRefused, Committed,
    ContentDiffers, CountFailure, Decision, Delivery, DeliveryPolicy, DeliveryState, Destination,
    Discard, Draft, Ending, Event, EventId, EventRow, Expect, FailureCounted, Headers, InboxRow,
    InboxState, Key, Lane, LaneKey, LanePlace, LaneRow, LeaseRef, Millis, OrderRow, OrderingKey,
    OutboxRow, ParametersDiffer, PlacedOrder, PositionRow, Purge, Query, Reason, Receive, Received,
    Record, Redrive, Register, Registered, Renew, Request, RequestRow, Retention, Retry, Revision,
    Rows, Settle, SkipTo, Stored, Summary, Table, Transition, WhenDead,
};

use crate::support::{
    LANE, NOW, bodies, call_rows, counts, decide, events, hasty, inbox_rows, insert, lane,
    lane_key, lane_rows, lease, ms, name, numbers, pending, reasons, stored, text, times, update,
    window, writes, writes_nothing,
};

// Requests (P1)

fn request(quantity: &str) -> Request {
    Request::new("s", "r", Summary::All.of([("quantity", quantity)])).unwrap()
}

fn bound(request: &Request, placed: Option<PlacedOrder>) -> Record {
    let row =
        RequestRow { fingerprint: request.fingerprint.clone(), registered_at: ms(10), placed };
    Record::Request(request.key.clone(), row)
}

/// The outcome of a commit at [`NOW`].
fn placed(order: &str, events: &[&str]) -> PlacedOrder {
    PlacedOrder { order: name(order), events: events.iter().map(|id| name(id)).collect(), at: NOW }
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
        destination: Destination::default(),
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

/// What is written of an event of order `o`: its place in its lane, due at once.
fn fresh(event: Event, sequence: u64) -> Record {
    Record::Event(EventRow { event, sequence, due: NOW })
}

/// The outcome of a commit that writes.
fn is_committed(decided: Result<Decision<Committed>, CommitRefused>, changes: Vec<Change>) {
    let Decision { batch, outcome } = decided.unwrap();
    assert_eq!(batch, Batch::of(changes).unwrap());
    assert_eq!((outcome.body, outcome.repeated), (Some(text("order")), false));
}

/// The outcome of a commit that was there before.
fn is_repeated(
    decided: Result<Decision<Committed>, CommitRefused>,
    placed: &PlacedOrder,
    body: Option<Body>,
) {
    let Decision { batch, outcome } = decided.unwrap();
    assert!(batch.is_empty());
    assert_eq!((&outcome.placed, outcome.body, outcome.repeated), (placed, body, true));
}

/// A lane that begins at [`NOW`]: its count and its tokens do too, so that those of a lane which
/// was purged are told apart.
fn new_lane() -> LaneRow {
    LaneRow { token: NOW.get(), begun: NOW, changed_at: NOW, ..LANE }
}

fn place(begun: u64, sequence: u64, after: u64) -> LanePlace {
    LanePlace { begun: ms(begun), sequence, after }
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
        Key::Lane(lane_key("o")),
    ];
    assert_eq!(one_event.query(NOW), Query::rows(keys));

    let first = placed("o", &["o/1"]);
    let written = || {
        vec![
            insert(order_row(&two)),
            insert(fresh(event("o/1", "o"), 1)),
            insert(lane("o", LaneRow { next: 2, due: Some(NOW), ..new_lane() })),
        ]
    };
    let free = RequestRow {
        fingerprint: two.fingerprint.clone(),
        registered_at: NOW,
        placed: Some(first.clone()),
    };
    let mut expected = written();
    expected.push(insert(Record::Request(two.key.clone(), free)));
    is_committed(decide(one_event.clone(), &[]), expected);
    // That is what it assumes.
    assert_eq!(one_event.assume(NOW), decide(one_event.clone(), &[]).ok());
    let own = one_event.clone().event(draft().ordering_key(name("o"))).unwrap();
    assert_eq!(own.assume(NOW), decide(own.clone(), &[]).ok());
    // But nothing where a row is there as a rule, which it would only meet.
    let others = own.clone().event(draft().ordering_key(name("customer-7"))).unwrap();
    let registered = one_event.clone().registered();
    let longer = registered.clone().event(draft()).unwrap();
    assert_eq!(
        [others, registered.clone(), longer].map(|order| order.assume(NOW)),
        [const { None }; 3]
    );
    assert_eq!(decide(registered, &[]), decide(one_event.clone(), &[]));

    // It keeps the time at which it was registered.
    let mut expected = written();
    expected.push(update(5, bound(&two, Some(first))));
    is_committed(decide(one_event, &[stored(5, bound(&two, None))]), expected);
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
    let event_taken = stored(1, fresh(Event { order: name("p"), ..event("o/2", "p") }, 1));

    let first = placed("other", &["e1", "e2"]);
    let retry = commit(&two, [draft(), draft()]);
    // An order that is placed is not looked at again, nor are the ids that are given now.
    for rest in [&[][..], &[taken.clone(), event_taken.clone()]] {
        let rows = [&[stored(2, bound(&two, Some(first.clone())))], rest].concat();
        is_repeated(decide(retry.clone(), &rows), &first, None);
    }
    // What was committed first comes back, if it is the order that was asked for.
    let same = placed("o", &["e1"]);
    let request_row = stored(2, bound(&two, Some(same.clone())));
    let order = OrderRow { request: two.key.clone(), committed_at: ms(1), body: text("first") };
    let rows = [request_row.clone(), stored(1, Record::Order(name("o"), order))];
    is_repeated(decide(retry.clone(), &rows), &same, Some(text("first")));
    is_repeated(decide(retry.clone(), &[request_row]), &same, None);

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
        head: 8,
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
            Some(LaneRow { next: 4, head: 4, confirmed: 3, token: 2, ..LANE }),
            (3, LaneRow { due: Some(ms(5_000)), head: 4, confirmed: 3, token: 2, ..LANE }),
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
            insert(fresh(event("o/1", "b"), b_last + 1)),
            insert(Record::Event(EventRow { event: mine, sequence: a_last + 1, due: ms(5_000) })),
            insert(fresh(event("o/3", "a"), a_last + 2)),
            insert(fresh(event("o/4", "o"), 1)),
            insert(fresh(event("o/5", "b"), b_last + 2)),
            insert(lane("o", LaneRow { next: 2, due: Some(NOW), ..new_lane() })),
            after("a", 6, a_after.1, a_last),
            after("b", 8, b_after.1, b_last),
        ];
        is_committed(decide(many.clone(), &rows), changes.into());
    }
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
    let receive = |at: LanePlace| Receive::new(name("c"), &event).in_order(name("k"), at);
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

/// P1, P5: no crash may undo what is not done again by itself.
#[test]
fn what_no_crash_may_undo() {
    let (two, event) = (request("2"), event("e", "k"));
    macro_rules! check {
        ($($transition:expr),* $(,)?) => {$(
            let decision = decide($transition, &[]).unwrap();
            assert!(!decision.batch.is_empty(), "it writes something");
            assert!(!decision.batch.may_be_lost());
        )*};
    }
    check![
        Register::new(&two),
        commit(&two, [draft()]),
        Receive::new(name("c"), &event),
        CountFailure::new(name("c"), &event, Reason::new("no"), 3),
        SkipTo::new(name("c"), name("k"), place(1, 2, 1)),
        Intend::new(call_key()),
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
    // Tokens and places that the operations below name, or the largest there are.
    let small = || prop_oneof![4 => 0..4_u64, 1 => Just(i64::MAX as u64)];
    let lane = (one_of::<OrderingKey>(LANES), lane_rows(), small(), small(), any::<bool>());
    let lane = lane.prop_map(|(key, row, token, through, is_leased)| {
        let lease = is_leased.then(|| lease("me", 700, through));
        Record::Lane(key.into(), LaneRow { token, lease, ..row })
    });
    let request_row = (any::<bool>(), any::<bool>()).prop_map(|(same, is_placed)| {
        bound(&request(if same { "2" } else { "3" }), is_placed.then(|| placed("o", &["o/1"])))
    });
    let inbox = (one_of(EVENTS), inbox_rows(), any::<bool>()).prop_map(|(id, row, same)| {
        let content = if same { event("e", "k").content_digest() } else { row.content };
        Record::Inbox(name("c"), id, InboxRow { content, ..row })
    });
    let rest = prop_oneof![
        events().prop_flat_map(
            |event| one_of(EVENTS).prop_map(move |id| fresh(Event { id, ..event.clone() }, 1))
        ),
        Just(order_row(&request("2"))),
        (one_of(EVENTS), bodies()).prop_map(|(id, body)| Record::Effect(name("c"), id, body)),
        request_row,
        inbox,
        (one_of(EVENTS), call_rows()).prop_map(|(id, row)| Record::Call(name("c"), id, row)),
        (numbers(), times(), times()).prop_map(|(sequence, begun, at)| {
            Record::Position(name("c"), name("k"), PositionRow { begun, sequence, at })
        }),
    ];
    let rows = prop::collection::vec(prop_oneof![1 => lane, 2 => rest], 0..10);
    rows.prop_map(|mut rows| {
        rows.sort_by_key(Record::key);
        rows.dedup_by_key(|record| record.key());
        rows
    })
}

/// An answer with lanes and events in them; what they say is anything.
fn standing() -> impl Strategy<Value = Rows> {
    let row = (0..6_u64, times(), counts(), counts(), 0..4_u8, reasons(), any::<bool>());
    let row = row.prop_map(|(sequence, due, starts, failures, state, reason, moved)| {
        let state = match state {
            0 | 1 => DeliveryState::Pending,
            2 => DeliveryState::Dead(due),
            _ => DeliveryState::Discarded(due),
        };
        OutboxRow { due, starts, failures, state, reason, moved, ..pending("x", sequence) }
    });
    let delivery = (one_of::<EventId>(EVENTS), row, prop::option::of(1..9_u64), any::<bool>());
    let delivery = delivery.prop_map(|(id, row, revision, envelope)| {
        let event = envelope.then(|| Event { id: id.clone(), ..event("e", "a") });
        Delivery { id, row, revision: revision.map(Revision::from_stored), event }
    });
    let delivery = delivery.boxed();
    let lane = (lane_rows(), prop::collection::vec(delivery.clone(), 0..3));
    let lanes = prop::collection::btree_map(one_of::<OrderingKey>(LANES), lane, 0..3);
    let targets = prop::collection::vec((delivery, one_of::<OrderingKey>(LANES)), 0..4);
    (lanes, targets).prop_map(|(lanes, targets)| {
        let revision = Revision::from_stored(7);
        let mut seen = BTreeSet::new();
        let lanes = lanes.into_iter().map(|(key, (row, pending))| {
            // An event stands once in all of them.
            let mut pending = pending;
            pending.retain(|next| seen.insert(next.id.clone()));
            Lane { key: key.into(), row, revision, pending }
        });
        let mut deliveries: Vec<Delivery> = targets
            .into_iter()
            .map(|(next, lane)| Delivery {
                row: OutboxRow { lane: lane.into(), ..next.row },
                ..next
            })
            .collect();
        deliveries.sort_by(|a, b| a.id.cmp(&b.id));
        deliveries.dedup_by(|a, b| a.id == b.id);
        Rows { lanes: lanes.collect(), deliveries, ..Rows::default() }
    })
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

/// Each change expects what was read, and nothing where nothing was; a lane is changed under the
/// token of its lease.
fn guards(batch: &Batch, rows: &Rows) -> Result<(), TestCaseError> {
    let lane = |key: &LaneKey| {
        let by_key = rows.lane(key).map(|(row, revision)| (row.clone(), revision));
        let found = rows.lanes.iter().find(|lane| lane.key == *key);
        by_key.or_else(|| found.map(|lane| (lane.row.clone(), lane.revision)))
    };
    // At random an event stands more than once, and each time otherwise.
    let outbox = |id: &EventId, expect: Expect| {
        let all = rows.deliveries.iter().chain(rows.lanes.iter().flat_map(|lane| &lane.pending));
        all.filter(|next| next.id == *id).any(|next| Expect::from(next.revision) == expect)
    };
    batch.changes().iter().try_for_each(|change| {
        let key = change.key();
        let read = if let Key::Lane(key) = &key {
            lane(key).map(|(_, revision)| revision)
        } else {
            rows.get(&key).map(|stored| stored.revision)
        };
        match change {
            Change::Put { expect, record: Record::Outbox(id, _) } => {
                prop_assert!(outbox(id, *expect), "{:?}", change);
            }
            Change::Put { expect, .. } => prop_assert_eq!(*expect, Expect::from(read)),
            Change::Delete { expect, .. } => prop_assert_eq!(Some(*expect), read),
            Change::Lane { key, token, .. } => {
                let (row, _) = lane(key).unwrap();
                prop_assert!(row.lease.is_some() && row.token == *token);
            }
        }
        Ok(())
    })
}

/// The answer of a store that holds these rows, with a revision of its own for each row.
fn answer(records: &[Record], query: &Query) -> Rows {
    let Query::Rows(keys) = query else { panic!("{query:?}") };
    let there = |key: &Key| records.iter().find(|record| record.key() == *key);
    let found = keys.as_slice().iter().filter_map(there);
    Rows::of((100..).zip(found).map(|(revision, row)| stored(revision, row.clone())).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn all_are_sound(
        records in related_rows(),
        others in related_rows(),
        standing in standing(),
        now in times(),
        when_dead in prop::sample::select(vec![WhenDead::Block, WhenDead::Continue]),
        (limit, run) in (1..5_usize, 0..5_usize),
        (max_failures, max_starts) in (counts(), counts()),
        span in numbers().prop_map(Duration::from_millis),
        keys in prop::collection::vec(one_of::<OrderingKey>(LANES), 1..4),
        tokens in prop::collection::vec((one_of::<OrderingKey>(LANES), 0..4_u64), 0..4),
        targets in prop::collection::btree_set(one_of::<EventId>(EVENTS), 1..4),
        confirmed in 0..3_usize,
    ) {
        let ms = Duration::from_millis(1);
        let max_failures = max_failures.clamp(1, u32::MAX - 1);
        let max_starts = max_starts.max(max_failures.saturating_add(1));
        let policy = DeliveryPolicy {
            backoff_base: ms,
            backoff_cap: Duration::MAX,
            max_failures,
            max_starts,
            when_dead,
        };
        let policy = policy.checked().unwrap();
        let request = request("2");
        let drafts = keys.into_iter().map(|key| draft().ordering_key(key));
        let leases = tokens.into_iter().map(|(lane, token)| LeaseRef { lane: lane.into(), token });
        let event = event("e", "k");
        let place = place(u64::from(max_starts) % 3, max_starts.into(), max_failures.into());
        let no = || Reason::new("no");
        // Of an answer to another question.
        let sorted: Vec<Stored> = others.into_iter().map(|record| stored(7, record)).collect();
        let no_answer = Rows { rows: sorted, ..standing.clone() };

        macro_rules! check {
            ($rows:expr; $($transition:expr),* $(,)?) => {$(
                let transition = $transition;
                let rows = $rows(&transition.query(now));
                guards(&is_sound(&transition, now, &rows)?, &rows)?;
                // Rows that are no answer must not bring it down either.
                is_sound(&transition, now, &no_answer)?;
            )*};
        }
        check![|query: &Query| answer(&records, query);
            Register::new(&request),
            commit(&request, drafts),
            Renew::new(leases, span),
            Receive::new(name("c"), &event).effect(text("points")),
            Receive::new(name("c"), &event).in_order(name("k"), place),
            CountFailure::new(name("c"), &event, no(), max_failures),
            Intend::new(call_key()),
            Start::new(call_key(), span, WhenUnknown::Repeat),
            Start::new(call_key(), span, WhenUnknown::Ask),
            Resolve::new(call_key(), CallEnd::NotDone(no())),
        ];
        let claim = Claim::new(&policy, name("me"), span + ms, limit).unwrap().run(run);
        check![|_: &Query| standing.clone();
            &claim,
            Cancel::new(targets.clone(), no()).unwrap(),
            Redrive::new(targets.clone(), window(span.max(ms * 2))).unwrap(),
            Redrive::new(targets.clone(), window(span.max(ms * 2))).unwrap().force(),
            Discard::new(targets, no()).unwrap(),
        ];
        // What was claimed is settled, whatever is in the lanes by then.
        let claimed = claim.decide(now, &standing).unwrap().outcome;
        for ending in [
            None,
            Some(Ending::Failed(no())),
            Some(Ending::Rejected(no())),
            Some(Ending::Unavailable(no())),
            Some(Ending::Deferred(no())),
        ] {
            let settlements = claimed.leased.iter().map(|one| one.settle(confirmed, ending.clone()));
            let settle = Settle::new(&policy, settlements);
            let rows = answer(&records, &settle.query(now));
            let batch = is_sound(&settle, now, &rows)?;
            let lanes = batch.changes().iter().filter(|change| matches!(change, Change::Lane { .. }));
            let lanes = Batch::of(lanes.cloned().collect()).unwrap();
            guards(&lanes, &rows)?;
        }
        // A purge removes what it was answered, and what goes with it.
        for table in Table::ALL {
            let age = span.max(Retention::SHORTEST);
            let retention = Retention {
                orders: Some(age),
                positions: Some(age * 2),
                events: age,
                inbox: age,
                requests: age,
            };
            let retention = retention.checked(&hasty()).unwrap();
            let limit = NonZeroU16::MIN.saturating_add(u16::from(run as u8));
            let purge = Purge::new(&retention, table, limit);
            let _ = is_sound(&purge, now, &Rows::of(Vec::new()))?;
            let mut rows = Rows { rows: no_answer.rows.clone(), ..Rows::default() };
            rows.rows.retain(|stored| stored.record.table() == table);
            let _ = is_sound(&purge, now, &rows)?;
        }
    }
}
