//! What every table holds after every fault: the text of the snapshots, one for each scenario, the
//! same for every adapter.
//!
//! `snapshots/README.md` says how it is read. It is made so that a change shows up only where it
//! matters: a state is shown once and as its difference from another one, and its name and the
//! places of the faults are counted within their step.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write};
use std::ops::ControlFlow;

use twobox::{Dump, Key, ShownRow};

use crate::failure::{Failure, ensure};
use crate::fault::{Fault, Point, Site};
use crate::harness::Subject;
use crate::matrix::points;
use crate::run::{End, Look, Moment, Run, Then, shown};
use crate::scenario::{Command, Scenario};
use crate::world::Layout;

#[cfg(test)]
mod tests;

/// Whether a fault of this kind can strike in a scenario.
///
/// # Errors
///
/// The first outcome or promise that does not hold.
pub fn strikes<H: Subject>(scenario: &Scenario, fault: Fault) -> Result<bool, Failure> {
    Ok(plain(scenario).finish::<H>()?.points.iter().any(|point| point.site == fault.site()))
}

/// Every table of sender and receiver, each with a store of its own: after each step, after each
/// kind of fault at each point where it can strike, and after the program has done everything
/// again. It shows what there is, right or wrong: whether it is right is for the
/// [matrix](crate::matrix) to say.
///
/// # Errors
///
/// The first outcome or promise that does not hold in a run without a fault, or a fault after which
/// the stores hold something else once they are opened again.
pub fn text<H: Subject>(scenario: &Scenario) -> Result<String, Failure> {
    let seen = Seen::of::<H>(scenario)?;
    let states = States::of(&seen);
    let mut text = format!("{}\n", scenario.story);
    write_steps(&mut text, scenario, &seen, &states)
        .and_then(|()| write_states_after_faults(&mut text, &states))
        .and_then(|()| write_faults(&mut text, scenario, &seen, &states))
        .and_then(|()| write_recovery(&mut text, &seen))
        .map_err(Failure::new)?;
    Ok(text)
}

/// Compares the text of a store with that of the reference.
///
/// # Errors
///
/// The first line that differs.
pub fn same_as<R: Subject, H: Subject>(scenario: &Scenario) -> Result<(), Failure> {
    let (right, found) = (text::<R>(scenario)?, text::<H>(scenario)?);
    let lines = || right.lines().zip(found.lines());
    let at = lines().take_while(|(right, found)| right == found).count();
    ensure(right == found, || {
        let line = |text: &str| text.lines().nth(at).unwrap_or("(the end)").trim().to_string();
        let before: Vec<&str> = right.lines().take(at).collect();
        let heading = before.iter().rfind(|line| !line.is_empty() && !line.starts_with(' '));
        format!(
            "{}: line {}, below \"{}\", is\n  {}\nbut the reference has\n  {}",
            scenario.name,
            at + 1,
            heading.unwrap_or(&""),
            line(&found),
            line(&right)
        )
    })
}

const fn plain(scenario: &Scenario) -> Run<'_> {
    Run {
        scenario,
        layout: Layout::TwoStores,
        faults: &[],
        then: Then::Restart,
        look: Look::Nowhere,
    }
}

/// The rows of all stores, by the number of the store and the key.
type Tables = BTreeMap<(usize, Key), ShownRow>;

fn tables(dumps: impl IntoIterator<Item = Dump>) -> Tables {
    let rows = |(store, dump): (usize, Dump)| {
        dump.rows().map(|row| ((store, row.key.clone()), row)).collect::<Vec<_>>()
    };
    dumps.into_iter().enumerate().flat_map(rows).collect()
}

/// What leads from one to the other, a line for each row.
fn changes(from: &Tables, to: &Tables) -> String {
    let keys: BTreeSet<_> = from.keys().chain(to.keys()).collect();
    let change = |key: &(usize, Key)| {
        let (sign, row) = match (from.get(key), to.get(key)) {
            (None, Some(row)) => ('+', row.clone()),
            (Some(before), Some(row)) if before != row => ('~', changed_columns(before, row)),
            (Some(row), None) => ('-', ShownRow { columns: Vec::new(), ..row.clone() }),
            (Some(_), Some(_)) | (None, None) => return None,
        };
        let store = if key.0 == 0 { "sender" } else { "receiver" };
        Some(format!("  {sign} {store} {} {row}\n", key.1.table()))
    };
    keys.into_iter().filter_map(change).collect()
}

/// The columns that have another value, or none any more.
fn changed_columns(from: &ShownRow, to: &ShownRow) -> ShownRow {
    let is_new = |column: &&(_, _)| !from.columns.contains(column);
    let is_gone = |(name, _): &&(&str, _)| to.columns.iter().all(|(other, _)| other != name);
    let new = to.columns.iter().filter(is_new).cloned();
    let gone = from.columns.iter().filter(is_gone).map(|(name, _)| (*name, String::new()));
    ShownRow { key: to.key.clone(), columns: new.chain(gone).collect() }
}

/// What is seen in a scenario.
struct Seen {
    right: End,
    /// After each step without a fault, by its number from 0.
    steps: BTreeMap<usize, Tables>,
    struck: Vec<Struck>,
}

/// What is seen when a fault strikes.
struct Struck {
    place: Place,
    fault: Fault,
    tables: Tables,
    end: Result<Tables, Failure>,
}

impl Seen {
    fn of<H: Subject>(scenario: &Scenario) -> Result<Self, Failure> {
        let plain = plain(scenario);
        let mut steps = BTreeMap::new();
        let right = plain.run::<H>(|moment, world| {
            if let Moment::Done(step) = moment {
                steps.insert(step, tables(world.dumps()?));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        let right = right.ok_or_else(|| Failure::new("the run has no end"))?;
        let struck = points(&right.points, 0).map(|(at, fault)| {
            let faults = [(at, fault)];
            let place = Place::of(&right.points[..at]);
            Struck::of::<H>(&Run { faults: &faults, ..plain }, place, fault)
        });
        let struck = struck.collect::<Result<_, _>>()?;
        Ok(Self { right, steps, struck })
    }
}

impl Struck {
    /// # Errors
    ///
    /// If the stores hold something else once they are opened again.
    fn of<H: Subject>(run: &Run<'_>, place: Place, fault: Fault) -> Result<Self, Failure> {
        let (mut struck, mut reopened) = (None, None);
        let end = run.run::<H>(|moment, world| {
            match moment {
                Moment::AfterFault => struck = Some(tables(world.dumps()?)),
                Moment::Reopened => reopened = Some(tables(world.dumps()?)),
                Moment::Done(_) | Moment::GoesOn(_) => {}
            }
            Ok(ControlFlow::Continue(()))
        });
        let end = end.map(|end| end.into_iter().flat_map(|end| end.dumps).map(Dump::lasting));
        let tables = struck.ok_or_else(|| Failure::new("the fault has not struck"))?;
        same_when_reopened(&tables, reopened.as_ref().unwrap_or(&tables))
            .map_err(|failure| failure.at(run.place(place.step)))?;
        Ok(Self { place, fault, tables, end: end.map(self::tables) })
    }

    fn name(&self) -> String {
        format!("step {}, {}, {}", self.place.step + 1, self.place, words(self.fault))
    }

    /// How the end differs from the right one.
    fn exception(&self, right: &Tables) -> Option<String> {
        match &self.end {
            Ok(end) if end == right => None,
            Ok(end) => Some(format!("\n{}:\n{}", self.name(), changes(right, end))),
            Err(failure) => Some(format!("\n{}:\n  no end: {failure}\n", self.name())),
        }
    }
}

fn same_when_reopened(before: &Tables, after: &Tables) -> Result<(), Failure> {
    ensure(before == after, || {
        let changes = changes(before, after);
        format!("the stores hold something else after they were opened again:\n{changes}")
    })
}

fn words(fault: Fault) -> String {
    fault.name().replace('_', " ")
}

/// A point by its place in its step, so that a point more or less in one step leaves the others
/// alone.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Place {
    step: usize,
    site: Site,
    /// From 1, among those of this site in this step.
    number: usize,
}

impl Place {
    /// The place of the last of these points.
    fn of(points: &[Point]) -> Self {
        let Point { site, step } = points[points.len() - 1];
        let number = points.iter().filter(|point| point.site == site && point.step == step).count();
        Self { step, site, number }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", site_with(self.site, self.number))
    }
}

/// A step begins once, so that needs no number.
fn site_with(site: Site, numbers: impl fmt::Display) -> String {
    if site == Site::Begin { site.name().to_string() } else { format!("{} {numbers}", site.name()) }
}

/// Each distinct state of all tables under the name of the place where it is seen first.
struct States {
    all: Vec<State>,
    /// The state after each step without a fault, as an index.
    after: BTreeMap<usize, usize>,
}

struct State {
    name: String,
    tables: Tables,
    /// The step, if only a fault in it leads to this state.
    by_fault_in: Option<usize>,
    /// The state that it is shown as a difference from, as an index.
    base: usize,
}

impl States {
    fn of(seen: &Seen) -> Self {
        let (name, tables) = ("at the start".to_string(), Tables::new());
        let start = State { name, tables, by_fault_in: None, base: 0 };
        let mut states = Self { all: vec![start], after: BTreeMap::new() };
        for (step, tables) in &seen.steps {
            let name = format!("after step {}", step + 1);
            let at = states.add(tables, name, None, &[states.before(*step)]);
            states.after.insert(*step, at);
        }
        for struck in &seen.struck {
            let step = struck.place.step;
            states.add(&struck.tables, struck.name(), Some(step), &states.near(step));
        }
        states
    }

    /// Adds a state, unless it is there, as its difference from the most similar one near it.
    fn add(
        &mut self,
        tables: &Tables,
        name: String,
        by_fault_in: Option<usize>,
        near: &[usize],
    ) -> usize {
        self.position(tables).unwrap_or_else(|| {
            let length = |at: &&usize| changes(&self.all[**at].tables, tables).len();
            let base = near.iter().min_by_key(length).copied().unwrap_or(0);
            self.all.push(State { name, tables: tables.clone(), by_fault_in, base });
            self.all.len() - 1
        })
    }

    fn position(&self, tables: &Tables) -> Option<usize> {
        self.all.iter().position(|state| state.tables == *tables)
    }

    fn name_of(&self, tables: &Tables) -> &str {
        self.position(tables).map_or("unknown", |at| &self.all[at].name)
    }

    fn before(&self, step: usize) -> usize {
        self.after.range(..step).next_back().map_or(0, |(_, at)| *at)
    }

    /// The states around a step, and those that faults in it lead to.
    fn near(&self, step: usize) -> Vec<usize> {
        let by_fault = |at: &usize| self.all[*at].by_fault_in == Some(step);
        let around = [self.before(step)].into_iter().chain(self.after.get(&step).copied());
        around.chain((0..self.all.len()).filter(by_fault)).collect()
    }
}

fn write_steps(
    text: &mut String,
    scenario: &Scenario,
    seen: &Seen,
    states: &States,
) -> fmt::Result {
    for (at, step) in scenario.steps.iter().enumerate() {
        writeln!(text, "\nstep {}: {}", at + 1, step.command)?;
        // Not every store has rows of the user's own, and the text is the same for all.
        let same_for_all = !matches!(step.command, Command::ReadOwnRow(_));
        let outcome = seen.right.outcomes.get(&at).filter(|_| same_for_all);
        if let Some(outcome) = outcome.filter(|outcome| *outcome != "done") {
            writeln!(text, "    {outcome}")?;
        }
        if let Some(after) = seen.steps.get(&at) {
            text.push_str(&changes(&states.all[states.before(at)].tables, after));
        }
    }
    Ok(())
}

fn write_states_after_faults(text: &mut String, states: &States) -> fmt::Result {
    writeln!(text, "\n==== STATES THAT ONLY A FAULT LEADS TO")?;
    for state in states.all.iter().filter(|state| state.by_fault_in.is_some()) {
        let base = &states.all[state.base];
        writeln!(text, "\n{}: as {}, but", state.name, base.name)?;
        text.push_str(&changes(&base.tables, &state.tables));
    }
    Ok(())
}

fn write_faults(
    text: &mut String,
    scenario: &Scenario,
    seen: &Seen,
    states: &States,
) -> fmt::Result {
    writeln!(text, "\n==== FAULTS, AND THE STATE AFTER EACH, ALSO WHEN THE STORES ARE REOPENED")?;
    for step in 0..scenario.steps.len() {
        let here: Vec<&Struck> =
            seen.struck.iter().filter(|struck| struck.place.step == step).collect();
        if !here.is_empty() {
            writeln!(text, "\nstep {}", step + 1)?;
            write_faults_of_step(text, &here, states)?;
        }
    }
    Ok(())
}

/// Faults that lead to the same states, wherever they strike, share their lines.
fn write_faults_of_step(text: &mut String, here: &[&Struck], states: &States) -> fmt::Result {
    let sites: BTreeSet<Site> = here.iter().map(|struck| struck.place.site).collect();
    for site in sites {
        let mut alike: Vec<(Vec<String>, Vec<&str>)> = Vec::new();
        for fault in Fault::at(site) {
            let struck = here.iter().filter(|struck| struck.fault == fault);
            let after: Vec<&str> = struck.map(|struck| states.name_of(&struck.tables)).collect();
            match alike.iter_mut().find(|(_, other)| *other == after) {
                Some((faults, _)) => faults.push(words(fault)),
                None => alike.push((vec![words(fault)], after)),
            }
        }
        for (faults, after) in alike {
            for (numbers, state) in by_state(&after) {
                let place = site_with(site, ranges(&numbers));
                writeln!(text, "  {place}: {} -> {state}", faults.join(", "))?;
            }
        }
    }
    Ok(())
}

/// The numbers, from 1, of the points that lead to each state.
fn by_state<'a>(after: &[&'a str]) -> Vec<(Vec<usize>, &'a str)> {
    let mut all: Vec<(Vec<usize>, &str)> = Vec::new();
    for (number, state) in (1..).zip(after) {
        match all.iter_mut().find(|(_, other)| other == state) {
            Some((numbers, _)) => numbers.push(number),
            None => all.push((vec![number], state)),
        }
    }
    all
}

/// Numbers that ascend, as `1-3, 7`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|one, next| one + 1 == *next);
    let text = runs.map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run[0].to_string(),
    });
    text.collect::<Vec<_>>().join(", ")
}

fn write_recovery(text: &mut String, seen: &Seen) -> fmt::Result {
    writeln!(text, "\n==== THE END, WITHOUT A FAULT AND AFTER RECOVERY FROM EACH")?;
    writeln!(text, "\nTimes, leases, counters of attempts and empty tables are not shown.\n")?;
    let end = shown(&seen.right.dumps, Dump::lasting);
    for line in end.lines().filter(|line| line.starts_with(' ') || !line.ends_with(": none")) {
        writeln!(text, "{line}")?;
    }
    let right = tables(seen.right.dumps.iter().cloned().map(Dump::lasting));
    let exceptions: Vec<String> =
        seen.struck.iter().filter_map(|struck| struck.exception(&right)).collect();
    writeln!(text, "\nExceptions:{}", if exceptions.is_empty() { " none" } else { "" })?;
    text.push_str(&exceptions.concat());
    Ok(())
}
