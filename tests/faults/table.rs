//! The table in `docs/faults.md` names for each fault what holds it off and which tests show it:
//! this keeps it true.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Where tests of faults are: here, and what only the core, a driver or a store can show.
const FOLDERS: [&str; 6] = [
    "tests/faults",
    "tests/core",
    "adapters/drivers/threads/tests",
    "adapters/drivers/tokio/tests",
    "adapters/stores/redb/tests/store",
    "tests/reliability/tests",
];

/// The names of the tests in the sources of these folders.
fn tests() -> BTreeSet<String> {
    let mut tests = BTreeSet::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let entries = FOLDERS.iter().flat_map(|folder| fs::read_dir(root.join(folder)).unwrap());
    for entry in entries {
        let source = fs::read_to_string(entry.unwrap().path()).unwrap();
        let mut lines = source.lines().map(str::trim);
        while let Some(line) = lines.next() {
            if line == "#[test]" || line.starts_with("#[tokio::test") {
                let declared = lines.next().unwrap().trim_start_matches("async ");
                let declared = declared.trim_start_matches("fn ");
                tests.insert(declared.split('(').next().unwrap().to_string());
            }
        }
    }
    tests
}

#[test]
fn faults_table_is_complete() {
    let page =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/faults.md")).unwrap();
    let tests = tests();
    let mut named: BTreeMap<u32, Vec<&str>> = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| F")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [number, fault, holds, shown] = cells[..] else { panic!("not four cells: {line}") };
        let number: u32 = number.trim_start_matches('F').parse().unwrap();
        assert!(!fault.is_empty() && !holds.is_empty(), "F{number} says nothing");
        let shown: Vec<&str> = shown.split('`').filter(|name| name.starts_with('f')).collect();
        assert!(!shown.is_empty(), "F{number} names no test");
        for name in &shown {
            assert!(tests.contains(*name), "F{number} names {name}, and there is no such test");
            assert!(name.starts_with(&format!("f{number:02}_")), "{name} is not of F{number}");
        }
        assert!(named.insert(number, shown).is_none(), "F{number} stands twice");
    }
    let missing: Vec<u32> = (1..=24).filter(|number| !named.contains_key(number)).collect();
    assert!(missing.is_empty(), "one row for each of F1 to F24: {missing:?}");
    let named: BTreeSet<&str> = named.into_values().flatten().collect();
    let missing: Vec<&String> = tests
        .iter()
        .filter(|name| {
            name.starts_with('f')
                && name.as_bytes()[1].is_ascii_digit()
                && !named.contains(name.as_str())
        })
        .collect();
    assert!(missing.is_empty(), "not in docs/faults.md: {missing:?}");
}
