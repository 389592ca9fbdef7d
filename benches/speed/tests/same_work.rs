//! The three do the same work, or there is nothing to compare.

#![allow(missing_docs, clippy::unwrap_used)]

use twobox_speed::{ByHand, Contender, Order, Sqlite, WithTwobox};

/// Lives the lives of 40 orders, and says how often the file was synced while they were placed,
/// placed again, and delivered.
fn life<C: Contender>(batch: usize) -> [Option<u64>; 3] {
    let folder = tempfile::tempdir().unwrap();
    let contender = C::create(folder.path());
    let orders: Vec<Order> = (0..40).map(|number| Order::new(number, 100)).collect();
    let place = || orders.chunks(batch).map(|orders| contender.place(orders)).sum::<u64>();
    let mut last = contender.syncs();
    let mut since = || {
        let before = std::mem::replace(&mut last, contender.syncs());
        last.zip(before).map(|(now, before)| now - before)
    };
    assert_eq!(place(), 0);
    let placed = since();
    assert_eq!(place(), 40, "an order that was placed is recognised (P1)");
    let again = since();
    assert_eq!(contender.drain(batch), 40, "each event is delivered (P3)");
    let drained = since();
    assert_eq!(contender.applied(), 40, "and applied once (P5)");
    assert_eq!(contender.drain(batch), 0, "and then nothing is due");
    [placed, again, drained]
}

#[test]
fn all_three_deliver_each_event_once_and_recognise_a_retry() {
    for batch in [1, 16] {
        life::<WithTwobox>(batch);
        life::<ByHand>(batch);
        life::<Sqlite>(batch);
    }
}

#[test]
fn twobox_syncs_as_often_as_by_hand() {
    // A commit of each chunk; then claims with the confirmations of the batch before, and a commit
    // of the inbox for each batch.
    for (batch, chunks) in [(1, 40), (16, 3)] {
        let expected = [Some(chunks), Some(0), Some(2 * chunks + 1)];
        assert_eq!(life::<WithTwobox>(batch), expected);
        let [placed, _, drained] = life::<ByHand>(batch);
        assert_eq!([placed, drained], [expected[0], expected[2]]);
    }
}
