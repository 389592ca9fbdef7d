//! The snapshots: what every table looks like after each kind of fault in each scenario. There is
//! one set for all adapters, in `snapshots/`. The reference store records it here; every other
//! store is compared with the reference where it is tested, and never writes a file.
//!
//! After a change of a rule, run `cargo insta test --test snapshots` and review what it did to the
//! tables.

mod common;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use common::Memory;
use twobox_conformance::scenario::{ALL, Scenario};
use twobox_conformance::{Failure, Fault, snapshot};

/// All snapshots of a scenario are looked at before the first difference is reported, so that a
/// review shows all of them.
fn check(scenario: &Scenario) -> Result<(), Failure> {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let mut different = None;
    for fault in Fault::ALL {
        let Some(text) = snapshot::text::<Memory>(scenario, fault)? else { continue };
        let name = snapshot::name(scenario, fault);
        let same = catch_unwind(AssertUnwindSafe(|| {
            settings.bind(|| insta::assert_snapshot!(name.as_str(), text));
        }));
        different = different.or(same.err());
    }
    match different {
        None => Ok(()),
        Some(first) => std::panic::resume_unwind(first),
    }
}

macro_rules! tests {
    ({} $($name:ident)*) => {$(
        #[test]
        fn $name() -> Result<(), Failure> {
            check(&twobox_conformance::scenario::$name)
        }
    )*};
}

twobox_conformance::each_scenario!(tests,);

/// The list that makes the tests names each scenario.
#[test]
fn each_scenario_is_tested() {
    let mut tested: BTreeSet<&str> = BTreeSet::new();
    macro_rules! names {
        ({} $($name:ident)*) => {$( tested.insert(stringify!($name)); )*};
    }
    twobox_conformance::each_scenario!(names,);
    let all: BTreeSet<&str> = ALL.iter().map(|scenario| scenario.name).collect();
    assert_eq!(tested, all);
}

/// No file is left over from a scenario or a fault that is gone, and none waits for a review.
#[test]
fn no_snapshot_is_unreferenced() -> Result<(), Failure> {
    let mut named = BTreeSet::new();
    for scenario in ALL {
        for fault in Fault::ALL {
            if snapshot::strikes::<Memory>(scenario, fault)? {
                named.insert(format!("{}.snap", snapshot::name(scenario, fault)));
            }
        }
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("snapshots");
    let there = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().file_name().into_string().unwrap());
    let there: BTreeSet<String> = there.collect();
    let left_over: Vec<&String> = there.difference(&named).collect();
    let missing: Vec<&String> = named.difference(&there).collect();
    assert!(
        left_over.is_empty() && missing.is_empty(),
        "left over: {left_over:?}, missing: {missing:?}"
    );
    Ok(())
}
