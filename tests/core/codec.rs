//! Rows as bytes: what was written comes back, orders are kept, and damage is found and never a
//! wrong row or a panic.

use proptest::prelude::*;
use twobox::codec::{Damaged, Decoder, decode, decode_revision, encode_key, encode_value};
use twobox::{
    Batch, Body, Change, DeliveryState, Destination, Event, EventId, EventRow, Fingerprint,
    Headers, IndexEntry, Key, Millis, OutboxRow, PlacedOrder, Record, RequestKey, RequestRow,
    Revision, Stored, Table,
};

use crate::support::{insert, lane_key, name, numbers, pending, records, stored};

fn key_bytes(key: &Key) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_key(key, &mut bytes);
    bytes
}

fn value_bytes(stored: &Stored) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode_value(&stored.record, stored.revision, &mut bytes);
    bytes
}

fn rows() -> impl Strategy<Value = Stored> {
    (records(), numbers()).prop_map(|(record, revision)| stored(revision, record))
}

/// What was read must be what would have been written: no two rows of bytes for one row.
fn canonical(table: Table, key: &[u8], value: &[u8]) -> Result<(), TestCaseError> {
    if let Ok(row) = decode(table, key, value) {
        prop_assert_eq!(row.record.table(), table);
        prop_assert_eq!(key_bytes(&row.record.key()), key);
        prop_assert_eq!(value_bytes(&row), value, "{:?}", row);
    }
    Ok(())
}

/// Calls `check` with each cut and each flip of one bit.
fn each_damage(
    bytes: &[u8],
    mut check: impl FnMut(&[u8]) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    (0..bytes.len()).try_for_each(|end| check(&bytes[..end]))?;
    let mut flipped = bytes.to_vec();
    for at in 0..bytes.len() {
        for bit in 0..8 {
            flipped[at] ^= 1 << bit;
            check(&flipped)?;
            flipped[at] ^= 1 << bit;
        }
    }
    Ok(())
}

proptest! {
    // Each case of the damages is thousands of rows.
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_damaged_value_is_found_or_is_another_row(row in rows()) {
        let key = key_bytes(&row.record.key());
        let value = value_bytes(&row);
        each_damage(&value, |damaged| canonical(row.record.table(), &key, damaged))?;
        // Each field says where it ends, so a value that was cut is never a row.
        for end in 0..value.len() {
            prop_assert!(decode(row.record.table(), &key, &value[..end]).is_err(), "cut at {}", end);
        }
    }

    #[test]
    fn a_damaged_key_is_found_or_is_another_row(row in rows()) {
        let value = value_bytes(&row);
        each_damage(&key_bytes(&row.record.key()), |damaged| canonical(row.record.table(), damaged, &value))?;
    }
}

/// What is written can be read, whatever a transition of a program's own puts in a row.
#[test]
fn a_number_beyond_the_largest_is_written_as_the_largest() {
    let row = |number| Record::Outbox(name("e"), pending("a", number));
    for beyond in [i64::MAX as u64 + 1, u64::MAX] {
        let largest = stored(i64::MAX as u64, row(i64::MAX as u64));
        assert_eq!(value_bytes(&stored(beyond, row(beyond))), value_bytes(&largest));
        let key = key_bytes(&largest.record.key());
        assert_eq!(decode(Table::Outbox, &key, &value_bytes(&largest)), Ok(largest));
    }
}

proptest! {
    #[test]
    fn a_row_comes_back(row in rows()) {
        let key = row.record.key();
        prop_assert_eq!(decode(row.record.table(), &key_bytes(&key), &value_bytes(&row)).unwrap(), row);
    }

    /// Names that were read before are read as if they were not.
    #[test]
    fn rows_come_back_one_after_the_other(rows in prop::collection::vec(rows(), 1..40)) {
        let mut decoder = Decoder::default();
        for row in rows {
            let key = key_bytes(&row.record.key());
            prop_assert_eq!(decoder.decode(row.record.table(), &key, &value_bytes(&row)).unwrap(), row);
        }
    }

    /// What is read of a row without the rest of it is what is in it.
    #[test]
    fn a_part_is_read_as_the_whole(row in rows()) {
        let value = value_bytes(&row);
        prop_assert_eq!(decode_revision(row.record.table(), &value), Ok(row.revision));
        if let Record::Event(event) = &row.record {
            let key = key_bytes(&row.record.key());
            let found = Decoder::default().untouched(&key, &value).unwrap();
            prop_assert_eq!(found, (event.event.id.clone(), OutboxRow::untouched(event)));
        }
    }

    #[test]
    fn keys_of_a_table_sort_as_their_bytes(a in records(), b in records()) {
        let (a, b) = (a.key(), b.key());
        if a.table() == b.table() {
            prop_assert_eq!(a.cmp(&b), key_bytes(&a).cmp(&key_bytes(&b)), "{} {}", a, b);
        } else {
            prop_assert_eq!(a.cmp(&b), a.table().cmp(&b.table()));
        }
    }

    /// Adapters lock and write in this order. A deletion sorts as the row that it removes.
    #[test]
    fn a_batch_is_sorted_as_its_keys(changes in prop::collection::vec((records(), any::<bool>()), 0..24)) {
        let change = |(record, deleted): (Record, bool)| {
            if deleted { Change::Delete { expect: Revision::FIRST, key: record.key() } } else { insert(record) }
        };
        let changes: Vec<Change> = changes.into_iter().map(change).collect();
        let mut keys: Vec<Key> = changes.iter().map(Change::key).collect();
        keys.sort();
        match Batch::of(changes) {
            Ok(batch) => prop_assert_eq!(batch.changes().iter().map(Change::key).collect::<Vec<_>>(), keys),
            Err(_) => prop_assert!(keys.windows(2).any(|pair| pair[0] == pair[1])),
        }
    }

    #[test]
    fn any_bytes_are_a_row_or_damaged(key in prop::collection::vec(any::<u8>(), 0..20), value in prop::collection::vec(any::<u8>(), 0..80)) {
        Table::ALL.into_iter().try_for_each(|table| canonical(table, &key, &value))?;
    }

    /// What follows a key that is right: small bytes are the ones that mean something.
    #[test]
    fn any_small_bytes_are_a_row_or_damaged(value in prop::collection::vec(0..4_u8, 0..60)) {
        Table::ALL.into_iter().try_for_each(|table| {
            canonical(table, b"a", &value)?;
            canonical(table, b"a\0b", &value)
        })?;
    }

    #[test]
    fn bytes_after_the_end_are_found(row in rows(), more in prop::collection::vec(any::<u8>(), 1..4)) {
        let value = [value_bytes(&row), more].concat();
        prop_assert!(decode(row.record.table(), &key_bytes(&row.record.key()), &value).is_err());
    }
}

fn outbox(value: &[u8]) -> Result<Stored, Damaged> {
    decode(Table::Outbox, b"e", value)
}

/// A length that is larger than what follows must not be believed, however large it is.
#[test]
fn a_length_is_not_believed() {
    for length in
        [&[0x7f][..], &[0xff, 0xff, 0x03], &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]]
    {
        let value = [&[1][..], length, b"abc"].concat();
        let damaged = outbox(&value).unwrap_err();
        assert_eq!(
            damaged.to_string(),
            "a stored row of outbox is damaged: it ends too early; restore the store from a copy"
        );
        for table in Table::ALL {
            assert!(decode(table, b"a\0b", &value).is_err());
        }
    }
}

/// A number has one form: without idle digits, and no larger than its type.
#[test]
fn a_number_has_one_form() {
    let mut good = Vec::new();
    encode_value(&Record::Outbox(name("e"), pending("a", 1)), Revision::FIRST, &mut good);
    assert_eq!(good[0], 1);
    for (revision, what) in [
        (&[0x81, 0x00][..], "a number with idle digits"),
        (&[0x80, 0x80, 0x00][..], "a number with idle digits"),
        (
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02][..],
            "a number that is too large",
        ),
        (
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x81, 0x00][..],
            "a number that is too large",
        ),
    ] {
        assert_eq!(outbox(&[revision, &good[1..]].concat()).unwrap_err().what, what);
    }
    // The largest is that of a signed 64-bit column.
    let nines = [0xff; 8];
    let largest = [&nines[..], &[0x7f], &good[1..]].concat();
    assert_eq!(outbox(&largest).unwrap().revision, Revision::from_stored(i64::MAX as u64));
    let larger = [&nines[..], &[0xff, 0x01], &good[1..]].concat();
    assert!(outbox(&larger).is_err());
}

/// The eight names that a decoder has read last are kept once, however often they come again.
#[test]
fn names_that_come_again_are_shared() {
    let mut decoder = Decoder::default();
    let mut read = |event: &str| {
        let row = stored(1, Record::Effect(name("c"), name(event), Body::text("x").unwrap()));
        let decoded = decoder
            .decode(Table::Effects, &key_bytes(&row.record.key()), &value_bytes(&row))
            .unwrap();
        assert_eq!(decoded, row);
        let Record::Effect(consumer, event, _) = decoded.record else { panic!("no effect") };
        (consumer, event)
    };
    let events = ["e1", "e2", "e3", "e4", "e5", "e6"];
    let first = events.map(&mut read);
    let again = events.map(&mut read);
    for (first, again) in first.iter().zip(&again) {
        assert_eq!(first.0.as_str().as_ptr(), again.0.as_str().as_ptr(), "{first:?}");
        assert_eq!(first.1.as_str().as_ptr(), again.1.as_str().as_ptr(), "{first:?}");
    }
}

/// A list is as long as a constructor allows, and a length beyond that is not believed.
#[test]
fn a_list_has_its_limit() {
    let row = |events| {
        let events = (0..events).map(|n| name(&format!("e{n}"))).collect();
        let placed = Some(PlacedOrder { order: name("o"), events, at: Millis::new(1) });
        let fingerprint = Fingerprint::of([("item", "notebook")]);
        let row = RequestRow { fingerprint, registered_at: Millis::new(1), placed };
        stored(1, Record::Request(RequestKey::new("s", "r").unwrap(), row))
    };
    for events in [0, 256] {
        let decoded = decode(Table::Requests, b"s\0r", &value_bytes(&row(events)));
        assert_eq!(decoded, Ok(row(events)));
    }
    // 256 becomes 257; what follows are texts and small numbers.
    let mut value = value_bytes(&row(256));
    let at = value.windows(2).rposition(|bytes| bytes == [0x80, 0x02]).unwrap();
    value[at] = 0x81;
    let damaged = decode(Table::Requests, b"s\0r", &value).unwrap_err();
    assert_eq!(damaged.what, "a list of 257, the limit is 256");
}

/// Headers are stored in their order, each name once.
#[test]
fn headers_that_were_never_written_so_are_damaged() {
    let event = |headers: &[(&str, &str)]| {
        let mut value = Vec::new();
        let headers = headers
            .iter()
            .try_fold(Headers::new(), |headers, (name, value)| headers.with(*name, *value))
            .unwrap();
        let event = Event {
            destination: Destination::default(),
            id: name("e"),
            order: name("o"),
            event_type: name("t"),
            schema_version: 1,
            ordering_key: name("k"),
            time: Millis::new(1),
            headers,
            body: Body::text("x").unwrap(),
        };
        let row = EventRow { event, sequence: 1, due: Millis::new(1) };
        encode_value(&Record::Event(row), Revision::FIRST, &mut value);
        value
    };
    let good = event(&[("n1", "v"), ("n2", "v")]);
    let at = |digit| good.windows(2).position(|two| two == [b'n', digit]).unwrap() + 1;
    let (first, second) = (at(b'1'), at(b'2'));
    for (digits, damaged) in [
        (*b"12", None),
        (*b"13", None),
        (*b"32", Some("headers that are not in their order")),
        (*b"22", Some("header \"n2\" is given twice; each must stand once")),
    ] {
        let mut value = good.clone();
        (value[first], value[second]) = (digits[0], digits[1]);
        let found = decode(Table::Events, b"e", &value).err().map(|damaged| damaged.what);
        assert_eq!(found.as_deref(), damaged, "{digits:?}");
    }
}

/// What a constructor would have made to fit was not written by us.
#[test]
fn texts_that_were_made_to_fit_are_damaged_if_they_do_not() {
    let mut value = Vec::new();
    let row = OutboxRow { reason: Some(twobox::Reason::new("no\u{20}answer")), ..pending("a", 1) };
    encode_value(&Record::Outbox(name("e"), row), Revision::FIRST, &mut value);
    assert!(outbox(&value).is_ok());
    let at = value.iter().rposition(|byte| *byte == b' ').unwrap();
    value[at] = b'\n';
    assert!(outbox(&value).is_err(), "a control character in a reason");
}

/// Every row has at most one entry, which tells where it stands (P3: a dead event is found, a
/// blocked lane is not due).
#[test]
fn index_entries_follow_from_the_row() {
    let at = Millis::new(7);
    let place = || IndexEntry::Place(lane_key("a"), 3, name("e"));
    for (state, moved, entry) in [
        (DeliveryState::Pending, false, None),
        (DeliveryState::Pending, true, Some(place())),
        (DeliveryState::Dead(at), false, Some(IndexEntry::Dead(name("e")))),
        (DeliveryState::Dead(at), true, Some(IndexEntry::Dead(name("e")))),
        (DeliveryState::Discarded(at), true, None),
        (DeliveryState::Cancelled(at), true, None),
    ] {
        let row = OutboxRow { state, moved, ..pending("a", 3) };
        assert_eq!(Record::Outbox(name("e"), row).index_entry(), entry);
    }
    let blocked = Some(name::<EventId>("e"));
    for (due, blocked_by, stands) in
        [(None, None, None), (Some(at), None, Some(at)), (None, blocked, Some(Millis::MAX))]
    {
        let row = twobox::LaneRow { due, blocked_by, ..crate::support::LANE };
        let entry = stands.map(|at| IndexEntry::Due(Destination::default(), at, name("a")));
        assert_eq!(Record::Lane(lane_key("a"), row).index_entry(), entry);
    }
}

/// A text that was right as one name may be too long for another.
#[test]
fn a_known_name_is_not_right_everywhere() {
    let event = stored(1, crate::support::outbox(&"x".repeat(EventId::MAX), pending("a", 1)));
    let key = key_bytes(&event.record.key());
    let mut decoder = Decoder::default();
    assert_eq!(decoder.decode(Table::Outbox, &key, &value_bytes(&event)).unwrap(), event);
    let lane = stored(1, crate::support::lane("a", crate::support::LANE));
    let key = [b"\0", &key[..]].concat();
    let damaged = decoder.decode(Table::Lanes, &key, &value_bytes(&lane)).unwrap_err();
    assert!(damaged.what.contains("ordering key is 160 bytes long"), "{damaged}");
    assert_eq!(decoder.decode(Table::Lanes, b"\0a", &value_bytes(&lane)).unwrap(), lane);
}
