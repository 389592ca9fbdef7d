//! Faults that the model found in claims.

#![allow(clippy::unwrap_used, reason = "tests")]

use core::time::Duration;

use twobox::{
    Body, Checked, Claim, CommitOrder, DeliveryPolicy, Draft, Fingerprint, Millis, OrderId, Owner,
    Request, Store,
};
use twobox_memory::MemoryStore;

/// A relay with room for a single event, or that probes a broker after an outage, would have
/// claimed without a pause while a lane is leased, or due later (F13, F15).
#[test]
fn a_claim_of_one_event_says_when_to_come_again() {
    let store = MemoryStore::new();
    let request = Request::new("shop", "r", Fingerprint::of([("quantity", "1")])).unwrap();
    let later = Millis::new(60_000);
    let draft = Draft::new("created", Body::text("later").unwrap()).unwrap().not_before(later);
    let order = OrderId::new("o").unwrap();
    let commit = CommitOrder::new(&request, order, Body::text("o").unwrap(), [draft]).unwrap();
    store.run(commit, Millis::new(1)).unwrap();
    let policy: Checked<DeliveryPolicy> = Checked::default();
    let owner = Owner::new("relay").unwrap();
    let claim = Claim::new(&policy, owner, Duration::from_secs(1), 1).unwrap();
    let claimed = store.run(&claim, Millis::new(2)).unwrap();
    assert_eq!((claimed.leased.len(), claimed.next_due), (0, Some(later)));
    // When it is due it is claimed, and then there may be more.
    let claimed = store.run(&claim, later).unwrap();
    assert_eq!((claimed.leased.len(), claimed.next_due), (1, Some(later)));
}
