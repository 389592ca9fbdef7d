//! What an operator is told of the outbox (P3), case by case.

use core::time::Duration;

use twobox::{Counts, DeliveryState, LaneRow, OutboxRow, Record, Stats};

use crate::support::{LANE, NOW, lane, lease, ms, name, outbox, pending};

/// The counts over these lanes and what stands in them.
fn stats(records: impl IntoIterator<Item = Record>) -> Stats {
    let records: Vec<Record> = records.into_iter().collect();
    let mut stats = Stats::default();
    let rows = || {
        records
            .iter()
            .filter_map(|record| if let Record::Outbox(_, row) = record { Some(row) } else { None })
    };
    for record in &records {
        let Record::Lane(key, lane) = record else { continue };
        let pending = |row: &&OutboxRow| row.lane == *key && row.state == DeliveryState::Pending;
        stats.add_lane(NOW, lane, rows().filter(pending));
    }
    rows()
        .filter(|row| matches!(row.state, DeliveryState::Dead(_)))
        .for_each(|row| stats.add_dead(row));
    stats
}

/// How many are pending, due, leased and dead.
type Numbers = (u64, u64, u64, u64);

fn numbers(counts: Counts) -> Numbers {
    (counts.pending, counts.due, counts.leased, counts.dead)
}

fn counts(pending: u64, due: u64, leased: u64, dead: u64) -> Numbers {
    (pending, due, leased, dead)
}

/// A pending event that is due at a time.
fn due(key: &str, sequence: u64, at: u64) -> Record {
    outbox(&format!("{key}/{sequence}"), OutboxRow { due: ms(at), ..pending(key, sequence) })
}

fn leased(through: u64) -> LaneRow {
    LaneRow { lease: Some(lease("relay", 1_500, through)), ..LANE }
}

#[test]
fn what_counts_as_due_and_as_leased() {
    let blocked = LaneRow { blocked_by: Some(name("a/0")), ..LANE };
    let a = |row| lane("a", row);
    for (what, records, expected, oldest_due) in [
        ("nothing", vec![], counts(0, 0, 0, 0), None),
        ("due since now", vec![a(LANE), due("a", 1, 1_000)], counts(1, 1, 0, 0), Some(0)),
        ("due in a moment", vec![a(LANE), due("a", 1, 1_001)], counts(1, 0, 0, 0), None),
        (
            "behind one that is not due",
            vec![a(LANE), due("a", 1, 1_001), due("a", 2, 100)],
            counts(2, 0, 0, 0),
            None,
        ),
        (
            "before and behind one that is not due",
            vec![a(LANE), due("a", 1, 100), due("a", 2, 1_001), due("a", 3, 50)],
            counts(3, 1, 0, 0),
            Some(900),
        ),
        (
            "the oldest stands behind",
            vec![a(LANE), due("a", 1, 300), due("a", 2, 100)],
            counts(2, 2, 0, 0),
            Some(900),
        ),
        ("leased", vec![a(leased(1)), due("a", 1, 100)], counts(1, 0, 1, 0), None),
        (
            "leased in part",
            vec![a(leased(2)), due("a", 1, 9), due("a", 2, 9), due("a", 3, 9)],
            counts(3, 0, 2, 0),
            None,
        ),
        (
            "in a lane that is blocked",
            vec![a(blocked), due("a", 1, 100), due("a", 2, 100)],
            counts(2, 0, 0, 0),
            None,
        ),
        (
            "a key does not wait for another one",
            vec![
                a(LANE),
                due("a", 1, 1_001),
                lane("b", leased(1)),
                due("b", 1, 1),
                lane("c", LANE),
                due("c", 1, 400),
            ],
            counts(3, 1, 1, 0),
            Some(600),
        ),
        (
            "the oldest of all keys",
            vec![
                a(LANE),
                due("a", 1, 300),
                lane("b", LANE),
                due("b", 1, 100),
                lane("c", LANE),
                due("c", 1, 200),
            ],
            counts(3, 3, 0, 0),
            Some(900),
        ),
    ] {
        let found = stats(records);
        assert_eq!(
            (numbers(found.all), found.oldest_due),
            (expected, oldest_due.map(Duration::from_millis)),
            "{what}"
        );
        // All of them are of one type.
        let by_type: Vec<_> =
            found.by_type.into_iter().map(|(name, counts)| (name, numbers(counts))).collect();
        let expected_by_type =
            (expected != (0, 0, 0, 0)).then(|| (name("order.created"), expected));
        assert_eq!(by_type, Vec::from_iter(expected_by_type), "{what}");
    }
}

/// What is finished counts nowhere, and each type counts by itself.
#[test]
fn each_type_is_counted() {
    let of_type = |event_type: &str, sequence, state| {
        let row = OutboxRow { event_type: name(event_type), state, ..pending("a", sequence) };
        outbox(&format!("a/{sequence}"), row)
    };
    let at = ms(500);
    let found = stats([
        lane("a", leased(2)),
        of_type("paid", 1, DeliveryState::Pending),
        of_type("sent", 2, DeliveryState::Pending),
        of_type("paid", 3, DeliveryState::Pending),
        of_type("paid", 4, DeliveryState::Dead(at)),
        of_type("paid", 5, DeliveryState::Dead(at)),
        of_type("lost", 6, DeliveryState::Dead(at)),
        of_type("sent", 8, DeliveryState::Discarded(at)),
        of_type("none", 9, DeliveryState::Cancelled(at)),
    ]);
    assert_eq!(numbers(found.all), counts(3, 0, 2, 3));
    let expected = [
        (name("lost"), counts(0, 0, 0, 1)),
        (name("paid"), counts(2, 0, 1, 2)),
        (name("sent"), counts(1, 0, 1, 0)),
    ];
    let by_type = found.by_type.into_iter().map(|(name, counts)| (name, numbers(counts)));
    assert_eq!(by_type.collect::<Vec<_>>(), expected);
}
