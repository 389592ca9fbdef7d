//! What is missing is said, and not skipped: a row without the one that it needs comes only of a
//! batch that no transition makes.

#![allow(clippy::unwrap_used, reason = "what cannot be made is a failure of the test")]

use twobox::{
    Batch, DeliveryState, EventId, EventType, Load as _, Millis, OrderingKey, OutboxRow,
    Reader as _, Record, Store as _, Tables as _, Transaction as _,
};
use twobox_memory::MemoryStore;

/// A dead event whose envelope is gone is not left out of the dead letters.
#[test]
#[should_panic(expected = "the store contradicts itself at events event-1")]
fn a_dead_event_without_its_row_is_not_left_out() {
    let row = OutboxRow {
        lane: OrderingKey::new("lane-1").unwrap().into(),
        sequence: 1,
        event_type: EventType::new("sent").unwrap(),
        committed_at: Millis::new(1),
        due: Millis::new(1),
        starts: 1,
        failures: 1,
        state: DeliveryState::Dead(Millis::new(2)),
        reason: None,
        moved: false,
    };
    let mut batch = Batch::new();
    batch.insert(Record::Outbox(EventId::new("event-1").unwrap(), row));
    let store = MemoryStore::new();
    let mut tx = store.begin().unwrap();
    assert_eq!(tx.apply(&batch), Ok(twobox::Applied::Written));
    tx.commit().unwrap();
    let _ = store.view().unwrap().dead_letters(None, 9);
}
