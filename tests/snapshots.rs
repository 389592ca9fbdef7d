//! The snapshots: what every table holds after each kind of fault, a file for each scenario. There
//! is one set for all adapters, in `snapshots/`, where a README says how they are read. The
//! reference store records it here; every other store is compared with the reference where it is
//! tested, and never writes a file.
//!
//! After a change of a rule, run `cargo insta test --test snapshots` and review what it did to the
//! tables.

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use common::Memory;
use twobox_conformance::scenario::{ALL, Scenario};
use twobox_conformance::{Failure, Fault, snapshot};

fn check(scenario: &Scenario) -> Result<(), Failure> {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../snapshots");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    let text = snapshot::text::<Memory>(scenario)?;
    settings.bind(|| insta::assert_snapshot!(scenario.name, text));
    Ok(())
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

/// No file is left over from a scenario that is gone, and none waits for a review.
#[test]
fn no_snapshot_is_unreferenced() {
    let named: BTreeSet<String> = ALL.iter().map(|one| format!("{}.snap", one.name)).collect();
    let files = std::fs::read_dir(folder()).unwrap();
    let there: BTreeSet<String> = files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != "README.md")
        .collect();
    assert_eq!(there, named);
}

/// Who reads a snapshot is told what each fault is.
#[test]
fn each_fault_is_explained() {
    let text = std::fs::read_to_string(folder().join("README.md")).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for fault in Fault::ALL {
        let line = format!("- {}: {}", fault.name().replace('_', " "), fault.sentence());
        assert!(text.contains(&line), "{line}");
    }
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("snapshots")
}
