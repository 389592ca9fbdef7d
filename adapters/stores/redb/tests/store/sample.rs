//! A store of format version 1, kept for ever: today's program opens it and reads every row.

use std::path::{Path, PathBuf};

use twobox::{Fingerprint, Register, Request, Store, Table};
use twobox_redb::{RedbReader, RedbStore};

use crate::common::{KEEPING, at, every_state, fill, text};

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/samples")
}

#[test]
fn the_sample_of_format_1_opens() {
    let expected = std::fs::read_to_string(samples().join("format-1.txt")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("copy.redb");
    std::fs::copy(samples().join("format-1.redb"), &path).unwrap();
    assert_eq!(text(&RedbReader::open(&path).unwrap()).unwrap(), expected);
    let store = KEEPING.open(&path).unwrap();
    assert_eq!(text(&store).unwrap(), expected);
    // It can be written, too.
    let request = Request::new("shop", "req-new", Fingerprint::of([("item", "pen")])).unwrap();
    let _ = store.run(Register::new(&request), at(5_000)).unwrap();
    assert_ne!(text(&store).unwrap(), expected);
}

#[test]
fn the_sample_has_rows_of_every_table() {
    let records = every_state();
    for table in Table::ALL {
        assert!(
            records.iter().any(|record| record.table() == table),
            "{table}: add rows of every state, and write the sample"
        );
    }
}

#[test]
#[ignore = "it writes the sample anew, once for each format version: remove the old one first"]
fn write_the_sample() {
    let path = samples().join("format-1.redb");
    let store = RedbStore::create(&path).unwrap();
    fill(&store, every_state());
    std::fs::write(samples().join("format-1.txt"), text(&store).unwrap()).unwrap();
    store.close().unwrap();
    redb::Database::open(&path).unwrap().compact().unwrap();
}
