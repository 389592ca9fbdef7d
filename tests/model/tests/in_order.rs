//! Faults that the model found in consumers that ask for order: each would have made them wait for ever (P4, P8).

#![allow(clippy::unwrap_used, reason = "tests")]

use twobox::{
    Body, Consumer, CountFailure, Event, EventId, EventType, FailureCounted, Headers, Millis, OrderId, OrderingKey, Reason,
    Receive, Received, Store,
};
use twobox_memory::MemoryStore;

fn event(name: &str) -> Event {
    Event {
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

/// What comes of arrivals, one after the other: which event, its sequence, and the one before it.
fn arrive(store: &MemoryStore, arrivals: &[(&str, u64, u64)]) -> Vec<Received> {
    let receive = |&(name, sequence, after): &(&str, u64, u64)| {
        store.run(Receive::new(consumer(), &event(name)).in_order(key(), sequence, after), Millis::new(1)).unwrap()
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
    // "first" was applied, its confirmation was lost, it was given up, and it is redriven behind "second".
    let received = arrive(&store, &[("first", 1, 0), ("second", 2, 0), ("first", 3, 2), ("third", 4, 3)]);
    assert_eq!(received, [Received::Applied, Received::Applied, Received::Duplicate, Received::Applied]);
}

#[test]
fn a_redriven_event_that_was_applied_keeps_its_place() {
    let store = MemoryStore::new();
    // "second" is late: were the redriven event confirmed now, its place would never be reached.
    let received = arrive(&store, &[("first", 1, 0), ("first", 3, 2), ("second", 2, 0), ("first", 3, 2), ("third", 4, 3)]);
    let expected = [Received::Applied, Received::WaitsFor(2), Received::Applied, Received::Duplicate, Received::Applied];
    assert_eq!(received, expected);
}

#[test]
fn a_redriven_event_that_was_set_aside_holds_nobody_up() {
    let store = MemoryStore::new();
    let fail = |sequence, after| {
        let count = CountFailure::new(consumer(), &event("first"), Reason::new("no"), 1).in_order(key(), sequence, after);
        store.run(count, Millis::new(1)).unwrap()
    };
    assert_eq!(fail(1, 0), FailureCounted::Poisoned);
    assert_eq!(arrive(&store, &[("second", 2, 1)]), [Received::Applied]);
    assert_eq!(fail(3, 2), FailureCounted::Poisoned);
    assert_eq!(arrive(&store, &[("third", 4, 3)]), [Received::Applied]);
}

#[test]
fn a_sender_that_counts_anew_is_heard() {
    let store = MemoryStore::new();
    let received = arrive(&store, &[("first", 1, 0), ("second", 2, 1), ("third", 1, 0), ("fourth", 2, 1), ("fifth", 3, 2)]);
    assert_eq!(received, [Received::Applied; 5]);
}
