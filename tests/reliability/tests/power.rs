//! Power loss: after a cut at any write, what was told is there, what was under way is there as a
//! whole or not at all, and doing the same again comes to the same end (P1 to P8).

use std::collections::BTreeSet;
use std::time::Instant;

use redb::ReadableTable;
use twobox::{Dump, Reader};
use twobox_redb::{RedbError, RedbOptions, RedbStore};
use twobox_reliability::disk::{Cut, Disk, Effort, Looked, Op, cuts};
use twobox_reliability::life::{self, Contents};
use twobox_reliability::seed::long;

/// A life without a fault: what was done to the disk, and what was in the store each time that a
/// commit was told.
pub(crate) struct Whole {
    pub(crate) record: Vec<Op>,
    /// The step and the contents, after the creation and then after each call.
    pub(crate) told: Vec<(usize, Contents)>,
    pub(crate) end: End,
}

/// What faults must not change: the lasting part of our tables, and the user's rows.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct End {
    lasting: String,
    own: Vec<(String, u64)>,
}

impl End {
    pub(crate) fn of(store: &RedbStore) -> Self {
        let own = Contents::of(store).unwrap().own;
        Self { lasting: Dump::of(&mut store.view().unwrap()).unwrap().lasting().to_string(), own }
    }
}

pub(crate) fn options() -> RedbOptions {
    RedbOptions::new().cache_bytes(4 << 20).end_leases(false)
}

/// What is in a store, which must agree with itself.
pub(crate) fn contents(store: &RedbStore) -> Contents {
    Contents::of(store).unwrap_or_else(|broken| panic!("{broken}"))
}

pub(crate) fn whole(options: RedbOptions) -> Whole {
    let disk = Disk::recording(Vec::new());
    let mut told = Vec::new();
    let ended =
        life::live(&disk, options, 0, &mut |step, store| told.push((step, contents(store))));
    assert!(ended.trouble.is_none(), "{:?}", ended.trouble);
    let store = ended.store.unwrap();
    let end = End::of(&store);
    store.close().unwrap();
    Whole { record: disk.record(), told, end }
}

impl Whole {
    /// Which of the states that were told is found, if `told` were told before the fault: the last
    /// of them, or the one that was under way. Anything else is a broken promise.
    pub(crate) fn state(&self, told: usize, found: &Contents) -> Result<usize, String> {
        let is = |state: usize| self.told.get(state).is_some_and(|(_, contents)| contents == found);
        let last = told - 1;
        if is(last) {
            Ok(last)
        } else if is(told) {
            Ok(told)
        } else {
            let states: Vec<usize> = (0..self.told.len()).filter(|state| is(*state)).collect();
            Err(format!(
                "{told} commits were told; what is found is what was there after those of {states:?}"
            ))
        }
    }

    /// Does the same again from what is on a disk, and comes to the same end.
    pub(crate) fn recover(&self, bytes: Vec<u8>, options: RedbOptions, told: usize) {
        // The step of the first call that was not told; a step that was broken off is done again
        // from its beginning.
        let step = self.told.get(told).map_or(self.told[told - 1].0 + 1, |(step, _)| *step);
        let ended = life::live(&Disk::of(bytes), options, step, &mut |_, _| {});
        assert!(
            ended.trouble.is_none(),
            "recovery from {told} told commits, step {step}: {:?}",
            ended.trouble
        );
        assert_eq!(
            End::of(&ended.store.unwrap()),
            self.end,
            "P8: recovery from {told} told commits, step {step}"
        );
    }
}

#[derive(Debug, Default)]
struct Counts {
    looked: Looked,
    /// Disks on which the commit under way was there, and on which it was not.
    kept: usize,
    lost: usize,
    /// Disks that a creation that was broken off has left.
    half_created: usize,
    recovered: usize,
    cut_again: usize,
}

/// Cuts the power in a life, and says what was wrong first.
fn cut_everywhere(
    whole: &Whole,
    record: &[Op],
    options: RedbOptions,
    effort: Effort,
) -> Result<Counts, String> {
    let mut counts = Counts::default();
    let mut recovered = BTreeSet::new();
    let looked = cuts(&[], record, effort, |Cut { told, bytes }| {
        let disk = Disk::recording(bytes.to_vec());
        let opened = options.open_on(disk.clone());
        if told == 0 {
            // Nobody was told that there is a store. A half-made one is refused as such; a whole
            // one is empty.
            match opened {
                Ok(store) => assert_eq!(contents(&store), whole.told[0].1),
                Err(
                    RedbError::NotRedb { .. } | RedbError::NotTwobox | RedbError::Damaged { .. },
                ) => counts.half_created += 1,
                Err(error) => return Err(format!("a half-made store: {error}")),
            }
            return Ok(());
        }
        let store = opened.map_err(|error| format!("after {told} told commits: {error}"))?;
        let found = Contents::of(&store)
            .map_err(|broken| format!("after {told} told commits: {broken}"))?;
        let state = whole.state(told, &found)?;
        drop(store);
        *(if state == told { &mut counts.kept } else { &mut counts.lost }) += 1;
        // Once for each commit and what became of it; in the short form, for some of them.
        if recovered.insert((told, state)) && (long() || (told + state).is_multiple_of(16)) {
            whole.recover(bytes.to_vec(), options, told);
            counts.recovered += 1;
            // The power is cut again while the store is opened, repaired and closed.
            let effort = Effort { exhaustive: 1, sampled: 1, torn: 1 };
            let again = cuts(bytes, &disk.record(), effort, |Cut { bytes, .. }| {
                let store = options
                    .open_on(Disk::of(bytes.to_vec()))
                    .map_err(|error| format!("cut again: {error}"))?;
                assert_eq!(contents(&store), found, "cut again, after {told} told commits");
                Ok::<(), String>(())
            })?;
            counts.cut_again += again.disks;
        }
        Ok(())
    })?;
    counts.looked = looked;
    Ok(counts)
}

fn power_is_cut(name: &str, options: RedbOptions, short: Effort) {
    let started = Instant::now();
    let whole = whole(options);
    let effort = if long() { Effort { exhaustive: 8, sampled: 24, torn: 6 } } else { short };
    let counts = cut_everywhere(&whole, &whole.record, options, effort)
        .unwrap_or_else(|wrong| panic!("{wrong}"));
    let Counts { looked, kept, lost, half_created, recovered, cut_again } = counts;
    println!(
        "power loss, {name}: {} cuts ({} of them exhaustive, up to {} unsynced writes), {} disks: {kept} with the commit under way, \
         {lost} without, {half_created} half created; {recovered} lives recovered, {cut_again} disks cut again; {:.1?}",
        looked.cuts,
        looked.exhaustive,
        looked.unsynced,
        looked.disks,
        started.elapsed(),
    );
    assert!(
        kept > 0 && lost > 0 && half_created > 0 && recovered > 0,
        "both ends of a commit must have been seen"
    );
}

/// P1 to P8, in a store of one process.
#[test]
fn power_is_cut_at_every_write() {
    power_is_cut("one process", options(), Effort { exhaustive: 1, sampled: 0, torn: 1 });
}

/// P1 to P8, in a store that other processes may read.
#[test]
fn power_is_cut_at_every_write_of_a_shared_store() {
    power_is_cut("shared", options().shared(true), Effort { exhaustive: 0, sampled: 0, torn: 0 });
}

/// The test sees what it is to see: a disk that does not sync when it says so breaks promises.
#[test]
fn a_disk_that_lies_is_noticed() {
    let whole = whole(options());
    let creation = whole.record.iter().position(|op| matches!(op, Op::Told)).unwrap();
    let lie =
        |(at, op): (usize, &Op)| (at < creation || !matches!(op, Op::Sync)).then(|| op.clone());
    let record: Vec<Op> =
        whole.record.iter().enumerate().filter_map(lie).take(creation + 60).collect();
    let effort = Effort { exhaustive: 0, sampled: 4, torn: 0 };
    let wrong = cut_everywhere(&whole, &record, options(), effort).unwrap_err();
    assert!(wrong.contains("told"), "{wrong}");
}

/// The power is cut while a backup is made: what is left is no store, or all of it.
#[test]
fn f49_a_backup_that_is_cut_is_whole_or_none() {
    let options = options();
    let ended = life::live(&Disk::default(), options, 0, &mut |_, _| {});
    let store = ended.store.unwrap();
    let (expected, disk) = (contents(&store), Disk::recording(Vec::new()));
    let copied = store.view().unwrap().backup_on(disk.clone(), |from, to| {
        let mut copy = to.open_table(life::STOCK)?;
        for row in from.open_table(life::STOCK)?.iter()? {
            let (key, value) = row?;
            copy.insert(key.value(), value.value())?;
        }
        Ok(())
    });
    copied.unwrap();
    disk.told();
    let (mut whole, mut none) = (0, 0);
    let effort = Effort { exhaustive: 6, sampled: 8, torn: 2 };
    let looked = cuts(&[], &disk.record(), effort, |Cut { told, bytes }| {
        match options.open_on(Disk::of(bytes.to_vec())) {
            Ok(store) => {
                assert!(contents(&store) == expected, "a part of a backup is a store");
                whole += 1;
            }
            Err(RedbError::NotRedb { .. } | RedbError::NotTwobox | RedbError::Damaged { .. })
                if told == 0 =>
            {
                none += 1;
            }
            Err(error) => return Err(format!("{told} told: {error}")),
        }
        Ok(())
    });
    looked.unwrap();
    assert!(whole > 0 && none > 0, "{whole} whole, {none} none");
}
