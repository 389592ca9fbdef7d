//! What is done with bytes that somebody may have damaged or made up. Each function is the body of a fuzz target, and is called by a test
//! with a corpus and its mutations. A panic is a finding.

use redb::StorageBackend;
use redb::backends::InMemoryBackend;
use twobox::codec;
use twobox::{Fingerprint, Table};
use twobox_redb::{RedbError, RedbOptions};

use crate::disk::Disk;
use crate::life::{self, Contents};
use crate::tables::Broken;

/// A row: the first byte says of which table, the second how long the key is. What is read must be written as the same bytes again.
pub fn row(bytes: &[u8]) {
    let [table, length, rest @ ..] = bytes else { return };
    let table = Table::ALL[usize::from(*table) % Table::ALL.len()];
    let (key, value) = rest.split_at(rest.len().min((*length).into()));
    if let Ok(stored) = codec::decode(table, key, value) {
        let (mut key_again, mut value_again) = (Vec::new(), Vec::new());
        codec::encode_key(&stored.record.key(), &mut key_again);
        codec::encode_value(&stored.record, stored.revision, &mut value_again);
        assert_eq!(stored.record.table(), table, "a row of another table");
        assert_eq!((&key_again[..], &value_again[..]), (key, value), "two forms of one row: {stored:?}");
    }
}

/// An index entry, likewise.
pub fn index_entry(bytes: &[u8]) {
    if let Ok(entry) = codec::decode_index_entry(bytes) {
        let mut again = Vec::new();
        codec::encode_index_entry(&entry, &mut again);
        assert_eq!(again, bytes, "two forms of one entry: {entry:?}");
    }
}

/// A JSON document: what it is bound to does not depend on white space, and its canonical form is bound to the same.
pub fn json(bytes: &[u8]) {
    if let Ok(fingerprint) = Fingerprint::of_json(bytes) {
        let padded = [b" \n", bytes, b"\t\r"].concat();
        assert_eq!(Fingerprint::of_json(&padded).as_ref(), Ok(&fingerprint), "white space counts");
        if fingerprint.summary().len() < Fingerprint::MAX_SUMMARY && !bytes.iter().any(|byte| *byte > 126 || *byte == b'\\') {
            let again = Fingerprint::of_json(fingerprint.summary().as_bytes());
            assert_eq!(again.as_ref(), Ok(&fingerprint), "the canonical form is another document");
        }
    }
}

/// A whole database file, or an edit of a good one: if the first byte is even, the rest is the file; otherwise it is groups
/// of 4 bytes, each a place (24 bits, as a share of the file) and what is to be mixed into the byte there.
pub fn file(bytes: &[u8], good: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    if kind % 2 == 0 {
        let _verdict = open(rest);
        return;
    }
    let mut edited = good.to_vec();
    for edit in rest.chunks_exact(4) {
        let place = u64::from(u32::from_be_bytes([0, edit[0], edit[1], edit[2]]));
        // Less than the length of the file.
        let place = ((place * good.len() as u64) >> 24) as usize;
        edited[place] ^= edit[3];
    }
    let _verdict = open(&edited);
}

/// What a store says to a file.
#[derive(Debug)]
pub enum Verdict {
    /// It opens, and holds this.
    Opened(Contents),
    /// It does not, or cannot be read to its end.
    Refused(RedbError),
    /// It opens, can be read, and contradicts itself.
    Contradicts(String),
}

/// Opens the bytes of a file, reads everything, and lives on in it.
#[must_use]
pub fn open(bytes: &[u8]) -> Verdict {
    let storage = InMemoryBackend::new();
    let copied = storage.set_len(bytes.len() as u64).and_then(|()| StorageBackend::write(&storage, 0, bytes));
    if let Err(error) = copied {
        return Verdict::Refused(error.into());
    }
    let store = match RedbOptions::new().cache_bytes(4 << 20).open_on(storage) {
        Ok(store) => store,
        Err(error) => return Verdict::Refused(error),
    };
    let verdict = match Contents::of(&store) {
        Ok(contents) => Verdict::Opened(contents),
        Err(Broken::Store(error)) => Verdict::Refused(error),
        Err(Broken::Contradiction(what)) => Verdict::Contradicts(what),
    };
    if let Err(error) = store.close() {
        return Verdict::Refused(error);
    }
    verdict
}

/// A good file in which a life was lived to its end.
///
/// # Panics
///
/// If there is none, since nothing can be tested then.
#[must_use]
pub fn good_file() -> Vec<u8> {
    let disk = Disk::default();
    let ended = life::live(&disk, RedbOptions::new(), 0, &mut |_, _| {});
    assert!(ended.trouble.is_none(), "a life without faults failed: {:?}", ended.trouble);
    drop(ended.store);
    disk.bytes()
}
