//! Damage ends in an error, never in a wrong row and never in a panic.

use std::collections::BTreeMap;

use redb::{ReadableTable, TableDefinition};
use twobox::codec::{encode_key, encode_value};
use twobox::{
    Applied, Batch, Change, DeliveryState, Destinations, Due, Expect, FORMAT_VERSION, IndexEntry,
    Key, Load, Query, Record, Revision, Store, Table, Tables, Transaction,
};
use twobox_redb::{Lent, RedbError, RedbStore};

use crate::common::{
    Disk, KEEPING, at, event, event_row, every_state, fill, lane, lane_row, outbox_row, sample,
    text,
};

type Rows = TableDefinition<'static, &'static [u8], &'static [u8]>;
const META: Rows = TableDefinition::new("twobox_meta");
const EVENTS: Rows = TableDefinition::new("twobox_events");
const OUTBOX: Rows = TableDefinition::new("twobox_outbox");
const DUE: Rows = TableDefinition::new("twobox_due");
const LANES: Rows = TableDefinition::new("twobox_lanes");
const PLACES: Rows = TableDefinition::new("twobox_places");
const DEAD: TableDefinition<'_, &[u8], ()> = TableDefinition::new("twobox_dead");

/// The format as it is described: CRC-32 of key and value, after the value; it begins with the
/// number of the table and the length of the key.
pub(crate) fn sealed(table: &str, key: &[u8], value: &[u8]) -> Vec<u8> {
    const TABLES: [&str; 12] = [
        "twobox_meta",
        "requests",
        "orders",
        "events",
        "outbox",
        "lanes",
        "inbox",
        "effects",
        "positions",
        "calls",
        "due lanes",
        "places of events",
    ];
    let number = 1 + TABLES.iter().position(|known| *known == table).unwrap() as u32;
    let mut hasher = crc32fast::Hasher::new_with_initial(number << 16 | key.len() as u32);
    hasher.update(&[key, value].concat());
    [value, &hasher.finalize().to_be_bytes()].concat()
}

/// The place of an event at the default destination.
fn place(lane: &str, sequence: u64) -> Vec<u8> {
    [&[0], lane.as_bytes(), &[0], &sequence.to_be_bytes()].concat()
}

/// What stands at a place, with this event.
fn stands(id: &str, event: &[u8]) -> Vec<u8> {
    [id.as_bytes(), &[0], event].concat()
}

/// The value of a row as it is kept.
fn value_of(record: &Record) -> Vec<u8> {
    let mut value = Vec::new();
    encode_value(record, Revision::FIRST, &mut value);
    if let Record::Event(row) = record { stands(row.event.id.as_str(), &value) } else { value }
}

/// Where the value of a row is, and its key there: that of an event lies at its place.
fn place_of(record: &Record) -> (&'static str, Rows, Vec<u8>) {
    if let Record::Event(row) = record {
        let event = &row.event;
        let place = place(event.ordering_key.as_str(), row.sequence);
        return ("places of events", PLACES, place);
    }
    let (table, mut key) = (record.table().name(), Vec::new());
    encode_key(&record.key(), &mut key);
    (table, TableDefinition::new(format!("twobox_{table}").leak()), key)
}

/// Lanes that are due at a time, as they are kept together.
fn block(due: u64, lanes: &[&str]) -> (Vec<u8>, Vec<u8>) {
    let key = [&[0], &due.to_be_bytes()[..], lanes[0].as_bytes()].concat();
    let value: Vec<u8> =
        lanes.iter().flat_map(|lane| [&[lane.len() as u8][..], lane.as_bytes()].concat()).collect();
    let value = sealed("due lanes", &key, &value);
    (key, value)
}

fn put(store: &RedbStore, table: Rows, key: &[u8], value: &[u8]) {
    let tx = store.database().unwrap().begin_write().unwrap();
    tx.open_table(table).unwrap().insert(key, value).unwrap();
    tx.commit().unwrap();
}

fn get(store: &RedbStore, table: Rows, key: &[u8]) -> Vec<u8> {
    let tx = store.database().unwrap().begin_write().unwrap();
    let table = tx.open_table(table).unwrap();
    table.get(key).unwrap().unwrap().value().to_vec()
}

fn filled() -> RedbStore {
    let store = RedbStore::create_on(Disk::default()).unwrap();
    fill(&store, every_state());
    store
}

#[test]
fn rows_are_kept_as_described() {
    let store = filled();
    for record in every_state() {
        let ((table, at, key), value) = (place_of(&record), value_of(&record));
        assert_eq!(get(&store, at, &key), sealed(table, &key, &value), "{}", record.key());
        // By its id one finds where an event lies.
        if let Record::Event(row) = &record {
            let id = row.event.id.as_str().as_bytes();
            assert_eq!(get(&store, EVENTS, id), sealed("events", id, &key));
        }
    }
    // Where a redrive has moved an event to, there is nothing but that.
    let moved = place("customer-7", 6);
    let value = sealed("places of events", &moved, &stands("e6", b""));
    assert_eq!(get(&store, PLACES, &moved), value);
    let mut due: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    for record in every_state() {
        if let Some(IndexEntry::Due(_, time, lane)) = record.index_entry() {
            due.entry(time.get()).or_default().push(lane.to_string());
        }
    }
    for (time, mut lanes) in due {
        lanes.sort();
        let (key, value) = block(time, &lanes.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(get(&store, DUE, &key), value, "{time}");
    }
    assert_eq!(
        get(&store, META, b"format"),
        sealed("twobox_meta", b"format", &FORMAT_VERSION.to_be_bytes())
    );
}

/// Every byte of every value, changed; values cut and lengthened; values in the place of others.
#[test]
fn a_changed_value_is_never_a_row() {
    let store = filled();
    for record in every_state() {
        let (key, (name, table, bytes)) = (record.key(), place_of(&record));
        let whole = get(&store, table, &bytes);
        let flipped = (0..whole.len()).flat_map(|at| {
            [1, 0x80].map(|bit| {
                let mut value = whole.clone();
                value[at] ^= bit;
                value
            })
        });
        let cut = (0..whole.len()).map(|length| whole[..length].to_vec());
        let longer = [[&whole[..], &[0]].concat(), [&whole[..], &whole[..]].concat()];
        let elsewhere = sealed(name, b"another key", &whole[..whole.len() - 4]);
        let other_table = if key.table() == Table::Calls { "inbox" } else { "calls" };
        let other_table = sealed(other_table, &bytes, &whole[..whole.len() - 4]);
        let tx = store.database().unwrap().begin_write().unwrap();
        for value in flipped.chain(cut).chain(longer).chain([elsewhere, other_table]) {
            tx.open_table(table).unwrap().insert(bytes.as_slice(), value.as_slice()).unwrap();
            let mut lent = Lent::new(&tx).unwrap();
            let error = lent.load(&Query::rows([key.clone()])).unwrap_err();
            assert!(
                matches!(&error, RedbError::Checksum { table, .. } if table == name),
                "{error}"
            );
            // A change of the row is refused as well: its guard cannot be checked.
            let change = Change::Delete { expect: Revision::FIRST, key: key.clone() };
            let error = lent.apply(&Batch::of(vec![change]).unwrap()).unwrap_err();
            assert!(matches!(error, RedbError::Checksum { .. }), "{error}");
        }
    }
}

#[test]
fn a_value_that_is_whole_but_no_row_is_damage() {
    let store = filled();
    let e1 = place("customer-7", 1);
    for value in [b"\x01".as_slice(), b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"] {
        put(&store, PLACES, &e1, &sealed("places of events", &e1, &stands("e1", value)));
        let error = text(&store).unwrap_err();
        assert!(matches!(error, RedbError::Row(_)), "{error}");
    }
    put(&store, EVENTS, b"e1", &sealed("events", b"e1", b"nowhere"));
    let error = text(&store).unwrap_err();
    assert!(matches!(error, RedbError::Index { .. }), "{error}");
}

/// The index and the rows have to agree, whichever of them is wrong.
#[test]
fn an_index_entry_without_its_row_is_damage() {
    let due = Query::Due(Due {
        destinations: Destinations::ALL,
        now: at(99_999),
        floor: at(0),
        lanes: 9,
        run: 9,
        events: 99,
        bytes: 999_999,
    });
    let stats = Query::Stats { now: at(0) };
    let dead = Query::Dead { after: None, limit: 9 };
    let row = Query::rows([Key::Event(event("e5"))]);
    let cancelled = Query::Deliveries { events: vec![event("e5")], run: 9 };
    let remove = |table: Rows, key: &'static [u8]| {
        move |tx: &redb::WriteTransaction| {
            tx.open_table(table).unwrap().remove(key).unwrap().unwrap();
        }
    };
    let lose = || {
        |tx: &redb::WriteTransaction| {
            let place = place("customer-7", 5);
            tx.open_table(PLACES).unwrap().remove(place.as_slice()).unwrap().unwrap();
        }
    };
    let enter = |entry: Vec<u8>, value: Vec<u8>| {
        move |tx: &redb::WriteTransaction| {
            let value = sealed("places of events", &entry, &value);
            drop(tx.open_table(PLACES).unwrap().insert(&*entry, &*value).unwrap());
        }
    };
    let enter_block = |(key, value): (Vec<u8>, Vec<u8>)| {
        move |tx: &redb::WriteTransaction| {
            drop(tx.open_table(DUE).unwrap().insert(key.as_slice(), value.as_slice()).unwrap());
        }
    };
    let too_short = [b"\0", 5_u64.to_be_bytes().as_slice(), b"a"].concat();
    let too_short = (too_short.clone(), sealed("due lanes", &too_short, b"\x02a"));
    let unsealed = (block(5, &["customer-7"]).0, b"\x01a".to_vec());
    let garbage = |bytes: &'static [u8]| {
        move |tx: &redb::WriteTransaction| {
            drop(tx.open_table(DEAD).unwrap().insert(bytes, ()).unwrap());
        }
    };
    type Harm = Box<dyn Fn(&redb::WriteTransaction)>;
    let cases: Vec<(&Query, Harm)> = vec![
        (&due, Box::new(remove(LANES, b"\0customer-7"))),
        (&row, Box::new(lose())),
        (&cancelled, Box::new(lose())),
        (&dead, Box::new(remove(OUTBOX, b"f1"))),
        (&due, Box::new(enter_block(block(5, &["customer-7"])))),
        (&due, Box::new(enter_block(block(5, &["nobody"])))),
        (&due, Box::new(enter_block(block(5, &["no\nname"])))),
        (&due, Box::new(enter_block((b"\x00".to_vec(), sealed("due lanes", b"\x00", b"\x01a"))))),
        (&due, Box::new(enter_block(too_short))),
        (&due, Box::new(enter_block(unsealed))),
        // An event that is said to have moved, and is not there; one with half a place.
        (&stats, Box::new(enter(place("customer-9", 6), stands("nobody", b"")))),
        (&stats, Box::new(enter(place("customer-9", 6), b"nobody".to_vec()))),
        (&stats, Box::new(enter(b"\0customer-9\x00\x01".to_vec(), b"\x01".to_vec()))),
        (&dead, Box::new(garbage(b"e4"))),
        (&dead, Box::new(garbage(b"nobody"))),
        (&dead, Box::new(garbage(b""))),
    ];
    for (n, (query, harm)) in cases.into_iter().enumerate() {
        let store = filled();
        let mut tx = store.begin().unwrap();
        assert!(tx.load(query).is_ok());
        harm(tx.redb());
        let error = tx.load(query).unwrap_err();
        let named = matches!(
            error,
            RedbError::Index { .. } | RedbError::Row(_) | RedbError::Checksum { .. }
        );
        assert!(named, "case {n}: {error}");
    }
}

/// All of a batch or nothing (P2): what failed part-way cannot be committed.
#[test]
fn a_batch_that_finds_a_broken_index_cannot_be_committed() {
    let store = RedbStore::create_on(Disk::default()).unwrap();
    let half = half_a_batch(&store);
    let before = text(&store).unwrap();
    let mut tx = store.begin().unwrap();
    let place = place("a", 1);
    tx.redb().open_table(PLACES).unwrap().remove(place.as_slice()).unwrap().unwrap();
    assert!(matches!(tx.apply(&half), Err(RedbError::Index { .. })));
    assert!(matches!(tx.apply(&half), Err(RedbError::Broken)));
    assert!(matches!(tx.commit(), Err(RedbError::Broken)));
    assert_eq!(text(&store).unwrap(), before);
    // The store goes on, and without the damage the batch is fine.
    let mut tx = store.begin().unwrap();
    assert_eq!(tx.apply(&half).unwrap(), Applied::Written);
    tx.commit().unwrap();
    assert_ne!(text(&store).unwrap(), before);
}

/// Fills the store, and gives a batch that changes several of its tables.
fn half_a_batch(store: &RedbStore) -> Batch {
    let name = lane("a");
    fill(
        store,
        vec![
            Record::Lane(name.clone().into(), lane_row(Some(at(1)))),
            Record::Event(event_row("e1", &name, 1, 1)),
            Record::Outbox(event("e1"), outbox_row(&name, 1, DeliveryState::Dead(at(1)))),
        ],
    );
    Batch::of(vec![
        Change::Put { expect: Expect::Absent, record: Record::Event(event_row("e0", &name, 2, 1)) },
        Change::Delete { expect: Revision::FIRST, key: Key::Event(event("e1")) },
        Change::Delete { expect: Revision::FIRST, key: Key::Outbox(event("e1")) },
        Change::Put {
            expect: Expect::Revision(Revision::FIRST),
            record: Record::Lane(name.into(), lane_row(Some(at(2)))),
        },
    ])
    .unwrap()
}

/// A disk that fails at any read or write, in a transaction of the user's who commits after an
/// error: redb refuses, and after opening again there is all of the batch or nothing (P2).
#[test]
fn a_disk_that_fails_leaves_all_of_a_batch_or_nothing() {
    let disk = Disk::default();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    let half = half_a_batch(&store);
    let before = text(&store).unwrap();
    store.close().unwrap();
    let whole = disk.bytes();
    let (mut in_apply, mut in_commit) = (0, 0);
    for fails_at in 0..1_000 {
        let disk = Disk::with(whole.clone());
        // Nothing is cached, so that every read is one of the disk.
        let store = KEEPING.cache_bytes(0).open_on(disk.clone()).unwrap();
        let tx = store.database().unwrap().begin_write().unwrap();
        let mut lent = Lent::new(&tx).unwrap();
        disk.fail_after(fails_at);
        let applied = lent.apply(&half);
        let committed = tx.commit();
        let done = committed.is_ok();
        assert!(!done || applied.is_ok());
        in_apply += usize::from(applied.is_err());
        in_commit += usize::from(applied.is_ok() && !done);
        drop(store);
        disk.fail_after(usize::MAX);
        let found = text(&KEEPING.open_on(disk).unwrap()).unwrap();
        assert!(
            if done { found != before } else { applied.is_ok() || found == before },
            "fails at {fails_at}"
        );
        if done {
            assert!(in_apply > 2 && in_commit > 2, "{in_apply} {in_commit}");
            return;
        }
    }
    panic!("it never succeeds");
}

/// A bit flipped anywhere in the file: an error that leaves the bytes alone, or the right rows.
#[test]
fn a_file_with_a_flipped_byte_is_refused_or_right() {
    let (whole, expected) = sample();
    let (mut refused, mut right) = (0, 0);
    // Each byte of the headers, and some in each page: its kind, its count, its first keys, the
    // middle and the end.
    let pages = (1..whole.len() / 4096)
        .flat_map(|page| [0, 2, 4, 9, 40, 700, 2048, 3000, 4095].map(|at| page * 4096 + at));
    for offset in (0..320).chain(pages) {
        let masks: &[u8] = if offset < 320 { &[0x01, 0xff] } else { &[0x81] };
        for mask in masks {
            let mut bytes = whole.clone();
            bytes[offset] ^= mask;
            let disk = Disk::with(bytes.clone());
            match KEEPING.open_on(disk.clone()).map(|store| text(&store)) {
                Ok(found) => {
                    assert_eq!(found.unwrap(), expected, "byte {offset}, {mask:#x}");
                    right += 1;
                }
                Err(error) => {
                    let named = matches!(
                        error,
                        RedbError::Damaged { .. }
                            | RedbError::NotRedb { .. }
                            | RedbError::NotTwobox
                            | RedbError::Redb(_)
                    );
                    assert!(named, "byte {offset}, {mask:#x}: {error:?}");
                    assert!(disk.bytes() == bytes, "byte {offset}, {mask:#x}: changed");
                    refused += 1;
                }
            }
        }
    }
    println!("{} bytes: {refused} flips refused, {right} without effect", whole.len());
    assert!(refused > 100 && right > 0);
}
