//! What is done with bytes that somebody may have damaged or made up. Each function is the body of
//! a fuzz target, and is called by a test with a corpus and its mutations. A panic is a finding.

use twobox::codec;
use twobox::{
    Body, CommitOrder, Draft, Fingerprint, Invalid, Millis, OrderId, Request, RunError, Store,
    Stored, Summary, Table,
};
use twobox_redb::{RedbError, RedbOptions};

use crate::disk::Disk;
use crate::life::{self, Contents};
use crate::tables::Broken;

/// A row: the first byte says of which table, the second how long the key is. What is read must be
/// written as the same bytes again.
pub fn row(bytes: &[u8]) {
    let [table, length, rest @ ..] = bytes else { return };
    let table = Table::ALL[usize::from(*table) % Table::ALL.len()];
    let (key, value) = rest.split_at(rest.len().min((*length).into()));
    if let Ok(stored) = codec::decode(table, key, value) {
        let (mut key_again, mut value_again) = (Vec::new(), Vec::new());
        codec::encode_key(&stored.record.key(), &mut key_again);
        codec::encode_value(&stored.record, stored.revision, &mut value_again);
        assert_eq!(stored.record.table(), table, "a row of another table");
        assert_eq!(
            (&key_again[..], &value_again[..]),
            (key, value),
            "two forms of one row: {stored:?}"
        );
        // Names that are known from the row before change nothing.
        let mut decoder = codec::Decoder::default();
        let twice = [(); 2].map(|()| decoder.decode(table, key, value));
        assert_eq!(twice, [Ok(stored.clone()), Ok(stored)], "read otherwise the second time");
    }
}

/// A JSON document: what it is bound to does not depend on white space, and its canonical form is
/// bound to the same. A number with a fraction or an exponent is a double, and may have the form of
/// an integer that is refused when it is given as one.
pub fn json(bytes: &[u8]) {
    if let Ok(fingerprint) = Summary::All.of_json(bytes) {
        let padded = [b" \n", bytes, b"\t\r"].concat();
        assert_eq!(Summary::All.of_json(&padded).as_ref(), Ok(&fingerprint), "white space counts");
        if fingerprint.summary().len() < Fingerprint::MAX_SUMMARY
            && !bytes.iter().any(|byte| *byte > 126 || *byte == b'\\')
        {
            match Summary::All.of_json(fingerprint.summary().as_bytes()) {
                Ok(again) => {
                    assert_eq!(again, fingerprint, "the canonical form is another document");
                }
                Err(error) => assert!(
                    matches!(error, Invalid::Inexact { .. }),
                    "the canonical form is refused: {error}"
                ),
            }
        }
    }
}

/// A whole database file, or an edit of a good one: if the first byte is even, the rest is the
/// file; otherwise it is groups of 4 bytes, each a place (24 bits, as a share of the file) and what
/// is to be mixed into the byte there.
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
    /// It does not, or cannot be read to its end, or refuses to go on.
    Refused(RedbError),
    /// It opens, can be read, and is wrong.
    Wrong(String),
}

impl<E: std::fmt::Display> From<RunError<RedbError, E>> for Verdict {
    fn from(error: RunError<RedbError, E>) -> Self {
        match error {
            RunError::Store(error) | RunError::Unknown(error) => Self::Refused(error),
            RunError::Refused(refused) => Self::Wrong(refused.to_string()),
            RunError::Conflict(key) => {
                Self::Wrong(format!("a conflict over {key:?}, with nobody else there"))
            }
        }
    }
}

impl From<Broken<RedbError>> for Verdict {
    fn from(broken: Broken<RedbError>) -> Self {
        match broken {
            Broken::Store(error) => Self::Refused(error),
            Broken::Contradiction(what) => Self::Wrong(what),
        }
    }
}

/// Opens the bytes of a file, reads everything, writes to it, and reads everything again.
#[must_use]
pub fn open(bytes: &[u8]) -> Verdict {
    live_on(bytes).map_or_else(|verdict| *verdict, Verdict::Opened)
}

fn live_on(bytes: &[u8]) -> Result<Contents, Box<Verdict>> {
    let refused = |error| Box::new(Verdict::Refused(error));
    let wrong = |invalid: Invalid| Box::new(Verdict::Wrong(invalid.to_string()));
    let store = RedbOptions::new()
        .cache_bytes(4 << 20)
        .end_leases(false)
        .open_on(Disk::of(bytes.to_vec()))
        .map_err(refused)?;
    let before = Contents::of(&store).map_err(Verdict::from)?;
    // Larger than a page, in a place of its own.
    let request =
        Request::new("hostile", "a new request", Fingerprint::of_bytes(b"")).map_err(wrong)?;
    let body = Body::new("text/plain", [b'n'; 9_000]).map_err(wrong)?;
    let draft = Draft::new("created", body.clone()).map_err(wrong)?;
    let order =
        CommitOrder::new(&request, OrderId::new("a new order").map_err(wrong)?, body, [draft])
            .map_err(wrong)?;
    let placed = store.run(order, Millis::new(0)).map_err(Verdict::from)?;
    let after = Contents::of(&store).map_err(Verdict::from)?;
    // What is written goes to where nothing is: a request, an order, an event and its lane.
    let old = |row: &&Stored| before.rows.contains(row);
    let kept =
        after.rows.iter().filter(old).count() == before.rows.len() && after.own == before.own;
    let new = if placed.repeated { 0 } else { 4 };
    if !kept || after.rows.len() != before.rows.len() + new {
        return Err(Box::new(Verdict::Wrong("a new order has changed other rows".to_string())));
    }
    store.close().map_err(refused)?;
    Ok(before)
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
