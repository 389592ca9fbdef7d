//! Whoever reads a snapshot as its README says comes to the tables after each fault.

use super::*;
use crate::harness::Harness;
use crate::scenario::ALL;
use twobox_memory::MemoryStore;

struct Memory(MemoryStore);

impl Harness for Memory {
    type Store = MemoryStore;

    fn open() -> Self {
        Self(MemoryStore::new())
    }

    fn crash(self) -> Self {
        Self(self.0.crash())
    }

    fn store(&self) -> &MemoryStore {
        &self.0
    }
}

/// The columns of each row, by store, table and key.
type Read = BTreeMap<String, BTreeMap<String, String>>;

/// The words between blanks; blanks in quotes belong to a word.
fn split(line: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for part in line.split(' ').filter(|part| !part.is_empty()) {
        match words.last_mut().filter(|word| word.matches('"').count() % 2 == 1) {
            Some(open) => *open = format!("{open} {part}"),
            None => words.push(part.to_string()),
        }
    }
    words
}

fn follow(state: &mut Read, change: &str) {
    let words = split(change);
    let key = words[1..4].join(" ");
    if words[0] == "-" {
        state.remove(&key);
        return;
    }
    let row = state.entry(key).or_default();
    for column in &words[4..] {
        let (name, value) = column.split_once('=').unwrap();
        match value {
            "" => drop(row.remove(name)),
            _ => drop(row.insert(name.to_string(), value.to_string())),
        }
    }
}

/// All states by name, from the steps and from the states after faults.
fn read_states(text: &str) -> BTreeMap<String, Read> {
    let (mut name, mut state) = ("at the start".to_string(), Read::new());
    let mut states = BTreeMap::from([(name.clone(), state.clone())]);
    for line in text.lines() {
        if let Some((this, base)) = line.split_once(": as ").filter(|_| line.ends_with(", but")) {
            name = this.to_string();
            state = states[base.strip_suffix(", but").unwrap()].clone();
        } else if let Some((step, _)) = line.split_once(": ").filter(|_| line.starts_with("step "))
        {
            name = format!("after {step}");
        } else if ["  +", "  ~", "  -"].iter().any(|sign| line.starts_with(sign)) {
            follow(&mut state, line);
        }
        states.insert(name.clone(), state.clone());
    }
    states
}

fn numbers(ranges: &str) -> impl Iterator<Item = usize> + '_ {
    ranges.split(", ").flat_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        first.parse().unwrap()..=last.parse().unwrap()
    })
}

/// The name of the state after each fault, by the name of the fault with its place.
fn read_faults(text: &str) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut step = "";
    for line in text.lines().filter(|line| !line.is_empty()) {
        let Some(line) = line.strip_prefix("  ") else {
            step = line;
            continue;
        };
        let (from, state) = line.split_once(" -> ").unwrap();
        let (place, faults) = from.split_once(": ").unwrap();
        let places: Vec<String> = match place.split_once(' ') {
            Some((site, ranges)) => numbers(ranges).map(|at| format!("{site} {at}")).collect(),
            None => vec![place.to_string()],
        };
        for place in places {
            for fault in faults.split(", ") {
                all.insert(format!("{step}, {place}, {fault}"), state.to_string());
            }
        }
    }
    all
}

fn as_read(tables: &Tables) -> Read {
    let row = |((store, key), row): (&(usize, Key), &ShownRow)| {
        let store = ["sender", "receiver"][*store];
        let name = ShownRow { columns: Vec::new(), ..row.clone() };
        let columns = row.columns.iter().map(|(name, value)| ((*name).to_string(), value.clone()));
        (format!("{store} {} {name}", key.table()), columns.collect())
    };
    tables.iter().map(row).collect()
}

#[test]
fn the_tables_after_each_fault_can_be_read_from_the_text() -> Result<(), Failure> {
    for scenario in ALL {
        let text = text::<Memory>(scenario)?;
        let (states, rest) = text.split_once("==== FAULTS").unwrap();
        let (faults, _) = rest.split_once("\n\n").unwrap().1.split_once("====").unwrap();
        let (states, faults) = (read_states(states), read_faults(faults));
        let seen = Seen::of::<Memory>(scenario)?;
        assert_eq!(faults.len(), seen.struck.len(), "{}", scenario.name);
        for struck in &seen.struck {
            let state = &faults[&struck.name()];
            let place = format!("{}: {}: {state}", scenario.name, struck.name());
            assert_eq!(states[state], as_read(&struck.tables), "{place}");
        }
    }
    Ok(())
}

#[test]
fn a_store_that_holds_something_else_once_it_is_opened_again_is_found() {
    let seen = Seen::of::<Memory>(&crate::scenario::buy_once).unwrap();
    let (before, after) = (&seen.steps[&0], &seen.steps[&1]);
    assert!(same_when_reopened(before, before).is_ok());
    let failure = same_when_reopened(before, after).unwrap_err().to_string();
    assert!(failure.contains("\n  + sender orders order:req-001 "), "{failure}");
}

#[test]
fn an_end_that_differs_is_an_exception() {
    let seen = Seen::of::<Memory>(&crate::scenario::buy_once).unwrap();
    let right = tables(seen.right.dumps.iter().cloned().map(Dump::lasting));
    let mut struck = seen.struck.into_iter().next().unwrap();
    assert_eq!(struck.exception(&right), None);
    struck.end = Ok(Tables::new());
    let text = struck.exception(&right).unwrap();
    assert!(text.starts_with("\nstep 1, begin, clock steps back:\n  - sender requests "), "{text}");
    struck.end = Err(Failure::new("stuck"));
    assert!(struck.exception(&right).unwrap().ends_with("  no end: stuck\n"));
}

#[test]
fn numbers_that_follow_each_other_are_a_range() {
    assert_eq!(ranges(&[1, 2, 3, 7]), "1-3, 7");
    assert_eq!(ranges(&[1, 3, 4]), "1, 3-4");
}
