//! Hostile bytes: whatever stands in a row, an index entry, a JSON document or a database file, the
//! answer is right or an error, never a panic and never a changed row (P1 to P5).

// A helper that cannot go on has found a failure, as a test has; and what was counted is printed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use twobox::{Reader, Stored, codec};
use twobox_redb::{RedbError, RedbOptions, RedbReader};
use twobox_reliability::disk::{Cut, Disk, Effort, cuts};
use twobox_reliability::hostile::{self, Verdict};
use twobox_reliability::life::{self, Contents};
use twobox_reliability::seed::{Seed, long};
use twobox_reliability::tables;

/// The store makes errors of the panics of redb; they are counted, not printed.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !info.location().is_some_and(|place| place.file().contains("redb-")) {
                before(info);
            }
        }));
    });
}

fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut paths: Vec<PathBuf> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "there is no corpus in {}", folder.display());
    paths.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

/// One change that a fuzzer would make too.
fn mutate(bytes: &mut Vec<u8>, others: &[(PathBuf, Vec<u8>)], seed: &mut Seed) {
    let at = seed.below(bytes.len() + 1);
    match seed.below(7) {
        0 if at < bytes.len() => bytes[at] ^= 1 << seed.below(8),
        1 if at < bytes.len() => bytes[at] = seed.draw() as u8,
        2 => bytes.insert(at, seed.draw() as u8),
        3 if at < bytes.len() => drop(bytes.remove(at)),
        4 => bytes.truncate(at),
        5 => {
            let (_, other) = &others[seed.below(others.len())];
            let from = seed.below(other.len() + 1);
            bytes.truncate(at);
            bytes.extend_from_slice(&other[from..]);
        }
        _ => {
            let places = [0x00, 0x7f, 0x80, 0xff];
            let count = seed.below(9);
            bytes.splice(at..at, std::iter::repeat_n(places[seed.below(4)], count));
        }
    }
}

/// Replays a corpus, and mutations of it.
fn replay(target: &str, mutations: usize, run: impl Fn(&[u8])) {
    quiet();
    let started = Instant::now();
    let corpus = corpus(target);
    for (path, bytes) in &corpus {
        catch_unwind(AssertUnwindSafe(|| run(bytes)))
            .unwrap_or_else(|_| panic!("{}", path.display()));
    }
    let mut seed = Seed::new(1);
    for number in 0..mutations {
        let (_, mut bytes) = corpus[seed.below(corpus.len())].clone();
        for _change in 0..1 + seed.below(4) {
            mutate(&mut bytes, &corpus, &mut seed);
        }
        catch_unwind(AssertUnwindSafe(|| run(&bytes)))
            .unwrap_or_else(|_| panic!("{target}: mutation {number}: {bytes:?}"));
    }
    println!(
        "hostile bytes, {target}: {} of the corpus, {mutations} mutations; {:.1?}",
        corpus.len(),
        started.elapsed()
    );
}

#[test]
fn rows() {
    replay("row", if long() { 5_000_000 } else { 20_000 }, hostile::row);
}

#[test]
fn json() {
    replay("json", if long() { 2_000_000 } else { 20_000 }, hostile::json);
}

#[test]
fn files() {
    let good = hostile::good_file();
    replay("file", if long() { 20_000 } else { 100 }, |bytes| hostile::file(bytes, &good));
}

const STALE: &str = "the format has changed: run `cargo test -p twobox-reliability --test hostile -- --ignored` and review the corpus";

/// The corpus has a row of each table; otherwise the mutations would
/// begin with nothing.
#[test]
fn the_corpus_is_read() {
    let mut read = BTreeMap::new();
    for (_, bytes) in corpus("row") {
        let [table, length, rest @ ..] = &bytes[..] else { continue };
        let (key, value) = rest.split_at((*length).into());
        read.insert(
            *table,
            codec::decode(twobox::Table::ALL[usize::from(*table)], key, value).expect(STALE),
        );
    }
    assert_eq!(read.len(), twobox::Table::ALL.len());
    assert!(corpus("json").iter().any(|(_, bytes)| twobox::Fingerprint::of_json(bytes).is_ok()));
}

/// Writes the corpus anew, after the format has changed.
#[test]
#[ignore = "it writes files"]
fn write_the_corpus() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    let write = |target: &str, name: &str, bytes: &[u8]| {
        fs::create_dir_all(folder.join(target)).unwrap();
        fs::write(folder.join(target).join(name), bytes).unwrap();
    };
    let mut all = Vec::new();
    drop(life::live(&Disk::default(), RedbOptions::new(), 0, &mut |_, store| {
        all.extend(Contents::of(store).unwrap().rows);
    }));
    // The longest row of a table, but for those with a large body, has the most in it.
    all.sort_by_cached_key(|stored: &Stored| {
        let mut value = Vec::new();
        codec::encode_value(&stored.record, stored.revision, &mut value);
        if value.len() < 500 { value.len() } else { 0 }
    });
    for stored in all {
        let (mut key, mut bytes) = (Vec::new(), Vec::new());
        codec::encode_key(&stored.record.key(), &mut key);
        bytes.extend([stored.record.table() as u8, key.len() as u8]);
        bytes.extend(key);
        codec::encode_value(&stored.record, stored.revision, &mut bytes);
        write("row", stored.record.table().name(), &bytes);
    }
    write(
        "json",
        "object",
        r#"{"item":"caf\u00e9","quantity":2.0,"tags":[true,null,-1e-7,""]}"#.as_bytes(),
    );
    write("json", "twice", br#"{"a":1,"a":2}"#);
    write("json", "doubles", b"[9007199254740993.0, 900719925440992e4, 1e20]");
    write("json", "large", b"[9007199254740992, 9007199254740993, 1e400]");
    write("file", "magic", b"\x00redb\x1a\x0a\xa9\x0d\x0a\x00\x00\x00\x00\x10\x00\x00");
    write("file", "header", b"\x01\x00\x00\x10\x01\x00\x00\x80\xff");
    write("file", "pages", b"\x01\x10\x00\x00\x01\x40\x00\x00\xff\xc0\x00\x00\x80");
}

/// What became of flips.
#[derive(Debug, Default)]
struct Flips {
    right: usize,
    refused: BTreeMap<&'static str, usize>,
}

fn name(error: &RedbError) -> &'static str {
    #[expect(clippy::wildcard_enum_match_arm, reason = "it may become more")]
    match error {
        RedbError::NotRedb { .. } => "not redb",
        RedbError::NotTwobox => "not twobox",
        RedbError::NameTaken { .. } => "name taken",
        RedbError::UnknownFormat { .. } => "unknown format",
        RedbError::NeedsRepair => "needs repair",
        RedbError::Damaged { what } if what.contains("panicked") => "damaged, by a panic of redb",
        RedbError::Damaged { .. } => "damaged",
        RedbError::Checksum { .. } => "checksum of a row",
        RedbError::Row(_) => "row",
        RedbError::Index { .. } => "index",
        RedbError::Io(_) => "i/o",
        RedbError::Stopped => "stopped",
        RedbError::Redb(_) => "redb",
        _ => "other",
    }
}

/// Flips a bit in bytes of a file, so many bytes apart, in two threads; what the file says must be
/// right, or an error.
fn flip(
    what: &str,
    good: &[u8],
    stride: usize,
    check: impl Fn(usize, &[u8]) -> Result<(), RedbError> + Sync,
) {
    quiet();
    let started = Instant::now();
    let half = |parity: usize| {
        let mut flips = Flips::default();
        let mut bytes = good.to_vec();
        // The header, with everything that leads to the rest, at each byte.
        let header = 0..good.len().min(320);
        let places = header.clone().chain((header.end..good.len()).step_by(stride));
        for (_, place) in places.enumerate().filter(|(number, _)| number % 2 == parity) {
            let bit = 1 << (Seed::new(place as u64).below(8));
            bytes[place] ^= bit;
            let checked = catch_unwind(AssertUnwindSafe(|| check(place, &bytes)));
            match checked.unwrap_or_else(|_| {
                panic!("{what}: a panic, with bit {bit:#x} of byte {place} flipped")
            }) {
                Ok(()) => flips.right += 1,
                Err(error) => *flips.refused.entry(name(&error)).or_default() += 1,
            }
            bytes[place] ^= bit;
        }
        flips
    };
    let [mut flips, other] = thread::scope(|scope| {
        let threads = [0, 1].map(|parity| scope.spawn(move || half(parity)));
        threads.map(|thread| thread.join().unwrap())
    });
    flips.right += other.right;
    other
        .refused
        .into_iter()
        .for_each(|(name, count)| *flips.refused.entry(name).or_default() += count);
    let refused: usize = flips.refused.values().sum();
    println!(
        "hostile bytes, {what} of {} bytes: {} flips, {} with the right answer, {refused} refused {:?}; {:.1?}",
        good.len(),
        flips.right + refused,
        flips.right,
        flips.refused,
        started.elapsed()
    );
    assert!(flips.right > 0 && refused > 0);
}

fn opened_right(bytes: &[u8], expected: &Contents, place: usize) -> Result<(), RedbError> {
    match hostile::open(bytes) {
        Verdict::Opened(found) => {
            assert!(found == *expected, "byte {place}: what is read is not what was written");
            Ok(())
        }
        Verdict::Refused(error) => Err(error),
        Verdict::Wrong(what) => panic!("byte {place}: {what}"),
    }
}

/// In a store that was closed.
#[test]
fn bits_flip_in_a_closed_file() {
    let good = hostile::good_file();
    let opened = hostile::open(&good);
    let Verdict::Opened(expected) = opened else { panic!("the good file is none: {opened:?}") };
    let stride = if long() { 1 } else { 4_099 };
    flip("a closed file", &good, stride, |place, bytes| opened_right(bytes, &expected, place));
}

/// A file that was not closed, what is in it, and what was in it before its last commit.
fn unclosed(options: RedbOptions) -> (Vec<u8>, Contents, Contents) {
    let disk = Disk::recording(Vec::new());
    let mut told: Vec<Contents> = Vec::new();
    drop(
        life::live(&disk, options, 0, &mut |_, store| told.push(Contents::of(store).unwrap()))
            .store,
    );
    let (record, effort) = (disk.record(), Effort { exhaustive: 0, sampled: 0, torn: 0 });
    let mut left = Vec::new();
    cuts::<()>(&[], &record[..record.len() * 3 / 4], effort, |Cut { bytes, .. }| {
        bytes.clone_into(&mut left);
        Ok(())
    })
    .unwrap();
    let opened = hostile::open(&left);
    let Verdict::Opened(expected) = opened else { panic!("the good file is none: {opened:?}") };
    let last = told.iter().position(|contents| *contents == expected).unwrap();
    (left, expected, told[last - 1].clone())
}

/// In a store that was not closed, and is repaired when it is opened. What damages the last commit
/// cannot be told from a power loss in the middle of it, which undoes it as a whole; anything else
/// is an error.
#[test]
fn bits_flip_in_a_file_to_be_repaired() {
    let (left, expected, before) = unclosed(RedbOptions::new());
    let undone = AtomicUsize::new(0);
    let stride = if long() { 2 } else { 8_209 };
    flip("a file to be repaired", &left, stride, |place, bytes| match hostile::open(bytes) {
        Verdict::Opened(found) if found == before => {
            undone.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        Verdict::Opened(found) => {
            assert!(found == expected, "byte {place}: what is read is not what was written");
            Ok(())
        }
        Verdict::Refused(error) => Err(error),
        Verdict::Wrong(what) => panic!("byte {place}: {what}"),
    });
    println!(
        "hostile bytes, a file to be repaired: the last commit was undone after {} flips",
        undone.into_inner()
    );
}

/// In a shared store that was not closed. It commits in two phases, so that the last commit cannot
/// be undone by damage.
#[test]
fn bits_flip_in_a_shared_file_to_be_repaired() {
    let (left, expected, _) = unclosed(RedbOptions::new().shared(true));
    let stride = if long() { 7 } else { 8_209 };
    flip("a shared file to be repaired", &left, stride, |place, bytes| {
        opened_right(bytes, &expected, place)
    });
}

/// A reader cannot verify a file before it reads. Rows may be missing from what it finds, and where
/// damage leads to a page that is no longer in use, it finds rows as they once were; but none that
/// never was.
#[test]
fn bits_flip_under_a_reader() {
    let good = hostile::good_file();
    let opened = hostile::open(&good);
    let Verdict::Opened(expected) = opened else { panic!("the good file is none: {opened:?}") };
    // All rows of all times.
    let mut ever: Vec<Stored> = Vec::new();
    drop(life::live(&Disk::default(), RedbOptions::new(), 0, &mut |_, store| {
        ever.extend(Contents::of(store).unwrap().rows);
    }));
    let folder = tempfile::tempdir().unwrap();
    let stride = if long() { 3 } else { 8_209 };
    let (missing, stale) = (AtomicUsize::new(0), AtomicUsize::new(0));
    flip("a file under a reader", &good, stride, |place, bytes| {
        let path = folder.path().join(format!("{:?}", thread::current().id()));
        if fs::metadata(&path).is_ok_and(|there| there.len() == bytes.len() as u64) {
            fs::File::options()
                .write(true)
                .open(&path)?
                .write_all_at(&bytes[place..=place], place as u64)?;
        } else {
            fs::write(&path, bytes)?;
        }
        let read = RedbReader::open(&path).and_then(|reader| tables::rows(&mut reader.view()?));
        fs::File::options()
            .write(true)
            .open(&path)?
            .write_all_at(&good[place..=place], place as u64)?;
        let read = read?;
        let changed = read.iter().find(|row| !expected.rows.contains(row) && !ever.contains(row));
        assert!(changed.is_none(), "byte {place}: a changed row: {changed:?}");
        if read.iter().any(|row| !expected.rows.contains(row)) {
            stale.fetch_add(1, Ordering::Relaxed);
        } else if read.len() < expected.rows.len() {
            missing.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    });
    let (missing, stale) = (missing.into_inner(), stale.into_inner());
    println!(
        "hostile bytes, a file under a reader: without an error, rows were missing after {missing} flips, of an earlier time after {stale}"
    );
}
