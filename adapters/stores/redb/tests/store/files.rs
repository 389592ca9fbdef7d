//! Files: what becomes a store, what is opened, and what is refused and left as it is.

use std::fs;
use std::path::Path;

use redb::{Database, TableDefinition};
use twobox::{Fingerprint, Register, Request, Store, Tables};
use twobox_redb::{RedbError, RedbOptions, RedbReader, RedbStore};

use crate::common::{Disk, KEEPING, at, every_state, fill, sample, text, write};
use crate::damage::sealed;

/// What an error is, for tables of cases.
#[expect(clippy::wildcard_enum_match_arm, reason = "no other is expected in any case")]
fn kind(error: &RedbError) -> &'static str {
    match error {
        RedbError::Missing { .. } => "missing",
        RedbError::AlreadyExists { .. } => "exists",
        RedbError::NotRedb { .. } => "not redb",
        RedbError::NotTwobox => "not twobox",
        RedbError::UnknownFormat { .. } => "format",
        RedbError::AlreadyOpen => "open already",
        RedbError::NeedsRepair => "needs repair",
        RedbError::Damaged { .. } => "damaged",
        RedbError::NameTaken { .. } => "name taken",
        _ => "other",
    }
}

fn opened(path: &Path) -> (&'static str, &'static str) {
    let writer = KEEPING
        .open(path)
        .and_then(|store| text(&store))
        .map_or_else(|error| kind(&error), |_| "fine");
    let reader = RedbReader::open(path)
        .and_then(|reader| text(&reader))
        .map_or_else(|error| kind(&error), |_| "fine");
    (writer, reader)
}

/// A database of somebody else, closed or as a crash leaves it.
fn foreign(folder: &Path, crashed: bool) -> Vec<u8> {
    let path = folder.join("foreign.redb");
    let database = Database::create(&path).unwrap();
    let tx = database.begin_write().unwrap();
    tx.open_table(TableDefinition::<&str, u64>::new("mine")).unwrap().insert("a", 1).unwrap();
    tx.commit().unwrap();
    if !crashed {
        drop(database);
    }
    let bytes = fs::read(&path).unwrap();
    fs::remove_file(path).unwrap();
    bytes
}

/// A store with another format version; the checksum of the version is right.
fn of_version(version: u32) -> Vec<u8> {
    let disk = Disk::default();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    let value = version.to_be_bytes();
    let tx = store.database().unwrap().begin_write().unwrap();
    tx.open_table(TableDefinition::<&[u8], &[u8]>::new("twobox_meta"))
        .unwrap()
        .insert(&b"format"[..], sealed("twobox_meta", b"format", &value).as_slice())
        .unwrap();
    tx.commit().unwrap();
    store.close().unwrap();
    disk.bytes()
}

fn without(table: &str) -> Vec<u8> {
    let disk = Disk::default();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    let tx = store.database().unwrap().begin_write().unwrap();
    assert!(tx.delete_table(TableDefinition::<&[u8], &[u8]>::new(table)).unwrap());
    tx.commit().unwrap();
    store.close().unwrap();
    disk.bytes()
}

fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_u32;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state.to_le_bytes()[0]
    })
    .take(length)
    .collect()
}

#[test]
fn a_file_that_is_no_store_is_named_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, _) = sample();
    let cases: Vec<(&str, Vec<u8>, (&str, &str))> = vec![
        ("empty", Vec::new(), ("not redb", "not redb")),
        ("one byte", vec![0], ("not redb", "not redb")),
        ("zeros", vec![0; 4096], ("not redb", "not redb")),
        ("text", b"orders: none\n".to_vec(), ("not redb", "not redb")),
        ("SQLite", [&b"SQLite format 3\0"[..], &[0; 4080]].concat(), ("not redb", "not redb")),
        ("noise", noise(100_000), ("not redb", "not redb")),
        ("magic and noise", [&whole[..9], &noise(100_000)].concat(), ("damaged", "damaged")),
        ("magic alone", whole[..9].to_vec(), ("damaged", "damaged")),
        ("of somebody else", foreign(folder.path(), false), ("not twobox", "not twobox")),
        ("of somebody else, crashed", foreign(folder.path(), true), ("not twobox", "needs repair")),
        ("version 0", of_version(0), ("format", "format")),
        ("version 2", of_version(2), ("format", "format")),
        ("version 4294967295", of_version(u32::MAX), ("format", "format")),
        ("without events", without("twobox_events"), ("damaged", "damaged")),
        ("without index", without_the_dead(), ("damaged", "damaged")),
        ("without meta", without("twobox_meta"), ("not twobox", "not twobox")),
    ];
    for (name, bytes, expected) in cases {
        let path = folder.path().join("case.redb");
        write(&path, &bytes);
        assert_eq!(opened(&path), expected, "{name}");
        assert!(fs::read(&path).unwrap() == bytes, "{name}: changed");
        // Nothing is made on top of it.
        assert_eq!(kind(&RedbStore::create(&path).unwrap_err()), "exists", "{name}");
        assert!(fs::read(&path).unwrap() == bytes, "{name}: changed");
    }
    let message = KEEPING.open_on(Disk::with(of_version(2))).unwrap_err().to_string();
    assert!(message.contains("version 2") && message.contains("version 1"), "{message}");
    assert_eq!(opened(&folder.path().join("none.redb")), ("missing", "missing"));
    assert_eq!(opened(folder.path()).0, "not redb");
    assert_eq!(kind(&RedbStore::create(folder.path()).unwrap_err()), "exists");
}

fn without_the_dead() -> Vec<u8> {
    let disk = Disk::default();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    let tx = store.database().unwrap().begin_write().unwrap();
    assert!(tx.delete_table(TableDefinition::<&[u8], ()>::new("twobox_dead")).unwrap());
    tx.commit().unwrap();
    store.close().unwrap();
    disk.bytes()
}

#[test]
fn a_file_that_was_cut_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cut.redb");
    let (whole, rows) = sample();
    let few = (0..20).map(|n| n * whole.len() / 20);
    let edges = [
        1,
        8,
        9,
        10,
        63,
        64,
        128,
        319,
        320,
        321,
        4095,
        4096,
        4097,
        whole.len() - 4096,
        whole.len() - 1,
    ];
    for length in edges.into_iter().chain(few) {
        write(&path, &whole[..length]);
        let expected = if length < 9 { "not redb" } else { "damaged" };
        assert_eq!(kind(&KEEPING.open(&path).unwrap_err()), expected, "{length} bytes");
        // A reader looks only at what it reads, and that is right.
        let read = RedbReader::open(&path).and_then(|reader| text(&reader));
        assert!(read.is_err() || read.is_ok_and(|read| read == rows), "{length} bytes");
        assert!(fs::read(&path).unwrap() == whole[..length], "{length} bytes: changed");
    }
}

/// A reader cannot verify the file, but what it reads is right, or an error; and it changes
/// nothing.
#[test]
fn a_reader_of_a_damaged_file_never_gets_a_wrong_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("flipped.redb");
    let (whole, expected) = sample();
    let (mut refused, mut right) = (0, 0);
    let pages = (1..whole.len() / 4096)
        .flat_map(|page| [0, 2, 3, 9, 60, 300, 4000].map(|at| page * 4096 + at));
    for offset in (9..320).step_by(3).chain(pages) {
        let mut bytes = whole.clone();
        bytes[offset] ^= 0xff;
        write(&path, &bytes);
        match RedbReader::open(&path).and_then(|reader| text(&reader)) {
            Ok(found) => {
                assert_eq!(found, expected, "byte {offset}");
                right += 1;
            }
            Err(_) => refused += 1,
        }
        assert!(fs::read(&path).unwrap() == bytes, "byte {offset}: changed");
    }
    println!("{refused} refused, {right} right");
    assert!(refused > 10 && right > 0);
}

#[test]
fn create_open_and_open_or_create_say_what_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.redb");
    assert_eq!(kind(&KEEPING.open(&path).unwrap_err()), "missing");
    assert!(!path.exists());
    let store = RedbStore::create(&path).unwrap();
    fill(&store, every_state());
    let expected = text(&store).unwrap();
    store.close().unwrap();
    assert_eq!(kind(&RedbStore::create(&path).unwrap_err()), "exists");
    assert_eq!(text(&KEEPING.open_or_create(&path).unwrap()).unwrap(), expected);
    assert_eq!(text(&KEEPING.verify_on_open(false).open(&path).unwrap()).unwrap(), expected);
    let other = folder.path().join("other.redb");
    drop(KEEPING.open_or_create(&other).unwrap());
    assert_eq!(opened(&other), ("fine", "fine"));
    // What was made on the way is gone, after a failure as well.
    let mut names: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["other.redb", "shop.redb"]);
    let nowhere = folder.path().join("none").join("shop.redb");
    assert!(matches!(RedbStore::create(nowhere), Err(RedbError::Io(_))));
}

#[test]
fn a_storage_that_is_not_empty_is_not_created_on_and_an_empty_one_not_opened() {
    let (whole, expected) = sample();
    let disk = Disk::with(whole.clone());
    assert_eq!(kind(&RedbStore::create_on(disk.clone()).unwrap_err()), "exists");
    assert!(disk.bytes() == whole);
    assert_eq!(text(&KEEPING.open_on(disk).unwrap()).unwrap(), expected);
    let empty = Disk::default();
    assert_eq!(kind(&KEEPING.open_on(empty.clone()).unwrap_err()), "not redb");
    assert!(empty.bytes().is_empty());
}

/// A crash after any write of a creation: the storage is refused and unchanged, or it is an empty
/// store.
#[test]
fn a_creation_that_crashed_is_refused_or_complete() {
    let disk = Disk::remembering(Vec::new());
    let store = RedbStore::create_on(disk.clone()).unwrap();
    let expected = text(&store).unwrap();
    store.close().unwrap();
    let (mut refused, mut complete) = (0, 0);
    for bytes in disk.history() {
        let disk = Disk::with(bytes.clone());
        match KEEPING.open_on(disk.clone()) {
            Ok(store) => {
                assert_eq!(text(&store).unwrap(), expected);
                complete += 1;
            }
            Err(error) => {
                assert!(["not redb", "not twobox", "damaged"].contains(&kind(&error)), "{error}");
                assert!(disk.bytes() == bytes);
                refused += 1;
            }
        }
    }
    assert!(refused > 0 && complete > 0);
}

/// A crash after any write of a commit, or of the opening after that: everything of it is there, or
/// nothing (P2).
#[test]
fn a_crash_at_any_write_leaves_the_rows_before_or_after() {
    let (whole, before) = sample();
    let request = Request::new("shop", "req-new", Fingerprint::of([("item", "pen")])).unwrap();
    let store = KEEPING.open_on(Disk::with(whole.clone())).unwrap();
    let _ = store.run(Register::new(&request), at(5_000)).unwrap();
    let after = text(&store).unwrap();

    let disk = Disk::remembering(whole);
    let store = KEEPING.open_on(disk.clone()).unwrap();
    let _ = store.run(Register::new(&request), at(5_000)).unwrap();
    store.close().unwrap();
    let (mut old, mut new) = (0, 0);
    for bytes in disk.history() {
        let reopened = Disk::remembering(bytes);
        let found = text(&KEEPING.open_on(reopened.clone()).unwrap()).unwrap();
        assert!(found == before || found == after);
        if found == before {
            old += 1;
        } else {
            new += 1;
        }
        // And a crash while that was opened changes nothing of it.
        for bytes in reopened.history() {
            assert_eq!(text(&KEEPING.open_on(Disk::with(bytes)).unwrap()).unwrap(), found);
        }
    }
    assert!(old > 0 && new > 0, "{old} {new}");
}

#[test]
fn a_store_that_was_not_closed_is_repaired_by_a_writer_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (path, copy) = (folder.path().join("shop.redb"), folder.path().join("crashed.redb"));
    let store = RedbStore::create(&path).unwrap();
    fill(&store, every_state());
    let expected = text(&store).unwrap();
    let request = Request::new("shop", "req-new", Fingerprint::of([("item", "pen")])).unwrap();
    let mut tx = store.begin().unwrap();
    let _ = tx.run(Register::new(&request), at(1)).unwrap();
    // The process ends here: the copy is what it leaves.
    let left = fs::read(&path).unwrap();
    write(&copy, &left);
    assert_eq!(kind(&RedbReader::open(&copy).unwrap_err()), "needs repair");
    assert!(fs::read(&copy).unwrap() == left);
    for verify in [true, false] {
        write(&copy, &left);
        let store = KEEPING.verify_on_open(verify).open(&copy).unwrap();
        assert_eq!(text(&store).unwrap(), expected);
    }
    assert_eq!(text(&RedbReader::open(&copy).unwrap()).unwrap(), expected);
}

#[test]
fn a_store_is_open_once_unless_it_is_shared_with_readers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.redb");
    let (alone, shared) = (KEEPING, KEEPING.shared(true));
    drop(alone.create(&path).unwrap());
    let fails =
        |result: Result<(), RedbError>| result.map_or_else(|error| kind(&error), |()| "fine");
    let write = |options: RedbOptions| fails(options.open(&path).map(drop));
    let read = || fails(RedbReader::open(&path).map(drop));

    let writer = alone.open(&path).unwrap();
    let before = fs::read(&path).unwrap();
    assert_eq!([write(alone), write(shared), read()], ["open already"; 3]);
    assert_eq!(kind(&KEEPING.open_or_create(&path).unwrap_err()), "open already");
    assert!(fs::read(&path).unwrap() == before);
    drop(writer);

    let writer = shared.open(&path).unwrap();
    assert_eq!([write(alone), write(shared), read()], ["open already", "open already", "fine"]);
    drop(writer);

    let reader = RedbReader::open(&path).unwrap();
    assert_eq!([write(alone), write(shared), read()], ["open already", "fine", "fine"]);
    drop(reader);
    assert_eq!([write(alone), write(shared), read()], ["fine"; 3]);
}
