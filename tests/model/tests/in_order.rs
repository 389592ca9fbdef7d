//! Faults that the model found in consumers that ask for order: each would have made them wait for
//! ever (P4, P8).

#![allow(clippy::unwrap_used, reason = "tests")]

use twobox::{
    Body, Consumer, CountFailure, Destination, Event, EventId, EventType, FailureCounted, Headers,
    LanePlace, Millis, OrderId, OrderingKey, Reason, Receive, Received, Store,
};
use twobox_memory::MemoryStore;

fn event(name: &str) -> Event {
    Event {
        destination: Destination::default(),
        id: EventId::new(name).unwrap(),
        order: OrderId::new("o").unwrap(),
        event_type: EventType::new("created").unwrap(),
        schema_version: 1,
        ordering_key: key(),
        time: Millis::new(0),
        headers: Headers::new(),
        body: Body::text(name).unwrap(),
    }
}

fn key() -> OrderingKey {
    OrderingKey::new("k").unwrap()
}

fn consumer() -> Consumer {
    Consumer::new("c").unwrap()
}

fn place(begun: u64, sequence: u64, after: u64) -> LanePlace {
    LanePlace { begun: Millis::new(begun), sequence, after }
}

/// What comes of arrivals, one after the other: which event, its sequence, and the one before it.
fn arrive(store: &MemoryStore, arrivals: &[(&str, u64, u64)]) -> Vec<Received> {
    let places: Vec<_> =
        arrivals.iter().map(|&(name, sequence, after)| (name, place(1, sequence, after))).collect();
    arrive_at(store, &places)
}

fn arrive_at(store: &MemoryStore, arrivals: &[(&str, LanePlace)]) -> Vec<Received> {
    let receive = |&(name, place): &(&str, LanePlace)| {
        store
            .run(Receive::new(consumer(), &event(name)).in_order(key(), place), Millis::new(1))
            .unwrap()
    };
    arrivals.iter().map(receive).collect()
}

#[test]
fn a_late_copy_of_a_skipped_event_holds_nobody_up() {
    let store = MemoryStore::new();
    // The sender gave "lost" up and has passed over it; then a copy of it comes after all.
    let received = arrive(&store, &[("second", 2, 0), ("lost", 1, 0), ("third", 3, 2)]);
    assert_eq!(received, [Received::Applied; 3]);
}

#[test]
fn a_redriven_event_that_was_applied_holds_nobody_up() {
    let store = MemoryStore::new();
    // "first" was applied, its confirmation was lost, it was given up, and it is redriven behind
    // "second".
    let received =
        arrive(&store, &[("first", 1, 0), ("second", 2, 0), ("first", 3, 2), ("third", 4, 3)]);
    assert_eq!(
        received,
        [Received::Applied, Received::Applied, Received::Duplicate, Received::Applied]
    );
}

#[test]
fn a_redriven_event_that_was_applied_keeps_its_place() {
    let store = MemoryStore::new();
    // "second" is late: were the redriven event confirmed now, its place would never be reached.
    let received = arrive(
        &store,
        &[("first", 1, 0), ("first", 3, 2), ("second", 2, 0), ("first", 3, 2), ("third", 4, 3)],
    );
    let expected = [
        Received::Applied,
        Received::WaitsFor(2),
        Received::Applied,
        Received::Duplicate,
        Received::Applied,
    ];
    assert_eq!(received, expected);
}

#[test]
fn a_redriven_event_that_was_set_aside_holds_nobody_up() {
    let store = MemoryStore::new();
    let fail = |sequence, after| {
        let count = CountFailure::new(consumer(), &event("first"), Reason::new("no"), 1)
            .in_order(key(), place(1, sequence, after));
        store.run(count, Millis::new(1)).unwrap()
    };
    assert_eq!(fail(1, 0), FailureCounted::Poisoned);
    assert_eq!(arrive(&store, &[("second", 2, 1)]), [Received::Applied]);
    assert_eq!(fail(3, 2), FailureCounted::Poisoned);
    assert_eq!(arrive(&store, &[("third", 4, 3)]), [Received::Applied]);
}

#[test]
fn a_sender_that_counts_anew_is_followed() {
    let store = MemoryStore::new();
    let old = [("first", place(1, 1, 0)), ("second", place(1, 2, 1))];
    // Its later count is in order, too, and a late copy of its earlier one neither waits nor moves
    // anything.
    let new = [
        ("fourth", place(9, 2, 1)),
        ("third", place(9, 1, 0)),
        ("late", place(1, 7, 6)),
        ("fourth", place(9, 2, 1)),
    ];
    assert_eq!(arrive_at(&store, &old), [Received::Applied; 2]);
    let expected = [Received::WaitsFor(1), Received::Applied, Received::Applied, Received::Applied];
    assert_eq!(arrive_at(&store, &new), expected);
    assert_eq!(arrive_at(&store, &[("fifth", place(9, 3, 2))]), [Received::Applied]);
}

/// The sender's clock stepped back after "lost" was committed, so that it seems the youngest of all
/// (F7).
#[test]
fn a_late_copy_that_seems_young_holds_nobody_up() {
    let store = MemoryStore::new();
    let lost = Event { time: Millis::new(99), ..event("lost") };
    assert_eq!(arrive(&store, &[("second", 2, 0)]), [Received::Applied]);
    let late = Receive::new(consumer(), &lost).in_order(key(), place(1, 1, 0));
    assert_eq!(store.run(late, Millis::new(1)), Ok(Received::Applied));
    assert_eq!(arrive(&store, &[("third", 3, 2)]), [Received::Applied]);
}

/// Its clock stepped back between two counts: it cannot be followed, but it is heard (F7).
#[test]
fn a_sender_that_seems_to_count_earlier_is_heard() {
    let store = MemoryStore::new();
    let places = [
        ("first", place(9, 1, 0)),
        ("second", place(3, 1, 0)),
        ("fourth", place(3, 3, 2)),
        ("third", place(3, 2, 1)),
    ];
    assert_eq!(arrive_at(&store, &places), [Received::Applied; 4]);
}
