//! I/O errors at every call of the disk: a typed error, no panic and no lie. What was told is
//! there, what failed before its commit is not (P1 to P8), and a store whose disk is well again
//! goes on by itself (F31).

use std::time::Instant;

use twobox::{Fingerprint, Millis, Register, Request, Store};
use twobox_redb::{RedbError, RedbOptions};
use twobox_reliability::disk::{Disk, Failure, Fault};
use twobox_reliability::life::{self, Contents, Trouble};
use twobox_reliability::seed::{Seed, long};

use crate::power::{Whole, contents, options, whole};

#[derive(Debug, Default)]
struct Counts {
    faults: usize,
    opening: usize,
    before_commit: usize,
    in_commit: usize,
    /// Faults that nobody was told of, since the disk was only to be used better, or was being
    /// closed.
    silent: usize,
    recovered: usize,
}

fn is_typed(error: &RedbError) -> bool {
    matches!(error, RedbError::Io(_) | RedbError::Stopped | RedbError::Broken)
        // A read that ends early is what a truncated file gives.
        || matches!(error, RedbError::Damaged { what } if !what.contains("panicked"))
}

/// One life with one fault.
fn fail(whole: &Whole, options: RedbOptions, fault: Fault, counts: &mut Counts) {
    let mut told = 0;
    let disk = Disk::failing(Vec::new(), fault);
    let ended = life::live(&disk, options, 0, &mut |_, _| told += 1);
    let (_, struck) = disk.calls();
    if struck == 0 {
        assert!(ended.trouble.is_none(), "no fault, and yet {:?}", ended.trouble);
        return;
    }
    counts.faults += 1;
    let case = format!("{fault:?}, {told} told, {:?}", ended.trouble);
    // Whether the commit under way may be there.
    let open_end = match &ended.trouble {
        None => {
            counts.silent += 1;
            false
        }
        Some(Trouble::Open(error)) => {
            assert!(is_typed(error), "{case}");
            counts.opening += 1;
            false
        }
        Some(Trouble::Store(error)) => {
            assert!(is_typed(error), "{case}");
            counts.before_commit += 1;
            false
        }
        Some(Trouble::Unknown(error)) => {
            assert!(is_typed(error), "{case}");
            counts.in_commit += 1;
            true
        }
        Some(Trouble::Wrong(what)) => panic!("{what}: {case}"),
    };
    if told == 0 {
        // The creation failed, and says so; there is nothing to be found.
        assert!(ended.trouble.is_some());
        return;
    }
    let check = |found: &Contents, when: &str| {
        let state =
            whole.state(told, found).unwrap_or_else(|wrong| panic!("{wrong}, {when}: {case}"));
        let same = whole.told[told - 1].1 == *found;
        assert!(
            same || open_end,
            "what failed before its commit is there: {state}, {when}: {case}"
        );
    };
    if let (Some(store), Some(_)) = (&ended.store, &ended.trouble) {
        // It shows what is committed, or nothing as long as the disk fails.
        match Contents::of(store) {
            Ok(found) => check(&found, "in the failed store"),
            Err(error) => assert!(fault.lasting, "{error:?}: {case}"),
        }
        let request =
            Request::new("customer-7", "after the fault", Fingerprint::of([("item", "pen")]))
                .unwrap();
        if fault.lasting
            && let Err(refused) = store.run(Register::new(&request), Millis::new(0))
        {
            assert!(
                matches!(&refused, twobox::RunError::Store(error) if is_typed(error)),
                "{refused:?}: {case}"
            );
        } else {
            assert!(!fault.lasting, "a disk that fails takes a commit: {case}");
        }
    }
    drop(ended.store);
    let mut seed = Seed::new(fault.at);
    for (bytes, when) in
        [(disk.bytes(), "after a restart"), (disk.after_cut(&mut seed), "after a cut of the power")]
    {
        let reopened = options.open_on(Disk::of(bytes.clone()));
        let store = reopened.unwrap_or_else(|error| panic!("{error}, {when}: {case}"));
        check(&contents(&store), when);
        drop(store);
        if ended.trouble.is_some() && fault.at.is_multiple_of(5) {
            whole.recover(bytes, options, told);
            counts.recovered += 1;
        }
    }
}

#[test]
fn calls_of_the_disk_fail() {
    let started = Instant::now();
    // With next to no cache, so that it reads much, and writes before it commits.
    let options = options().cache_bytes(16 << 10);
    let whole = whole(options);
    let quiet = Disk::failing(
        Vec::new(),
        Fault { at: u64::MAX, failure: Failure::Nothing, lasting: false },
    );
    drop(life::live(&quiet, options, 0, &mut |_, _| {}));
    let (calls, _) = quiet.calls();
    let mut counts = Counts::default();
    let mut variant = 0;
    for failure in [Failure::Nothing, Failure::Half, Failure::Full] {
        for lasting in [false, true] {
            // In the short form each variant meets other calls.
            let step = if long() { 1 } else { 149 };
            for at in (variant..calls).step_by(step) {
                fail(&whole, options, Fault { at, failure, lasting }, &mut counts);
            }
            variant += 13;
        }
    }
    let Counts { faults, opening, before_commit, in_commit, silent, recovered } = counts;
    println!(
        "I/O errors: {calls} calls of the disk, {faults} faults: {opening} in opening and closing, {before_commit} before a commit, \
         {in_commit} in a commit, {silent} without consequence; {recovered} lives recovered; {:.1?}",
        started.elapsed()
    );
    assert!(
        opening > 0 && before_commit > 0 && in_commit > 0,
        "every kind of end must have been seen"
    );
}
