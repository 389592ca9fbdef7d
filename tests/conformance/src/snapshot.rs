//! What every table looks like after a kind of fault: the text of the snapshots, the same for every
//! adapter.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::ops::ControlFlow;

use crate::failure::{Failure, ensure};
use crate::fault::Fault;
use crate::harness::Harness;
use crate::matrix::points;
use crate::run::{End, Look, Moment, Run, Then, shown};
use crate::scenario::{Command, Scenario};
use crate::world::Layout;

/// The name of a snapshot.
#[must_use]
pub fn name(scenario: &Scenario, fault: Fault) -> String {
    format!("{}__{}", scenario.name, fault.name())
}

/// Whether a fault of this kind can strike in a scenario; if so it has a snapshot.
///
/// # Errors
///
/// The first outcome or promise that does not hold.
pub fn strikes<H: Harness>(scenario: &Scenario, fault: Fault) -> Result<bool, Failure> {
    Ok(plain(scenario).finish::<H>()?.points.iter().any(|point| point.site == fault.site()))
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

/// What is seen at one point: the tables after the fault, after reopening, and after recovery.
struct Seen {
    at: usize,
    texts: [String; 3],
}

/// Every table of sender and receiver, each with a store of its own, after a fault of this kind at
/// each point where it can strike: right after it, after the stores were opened again, and after
/// the program has done everything again. It shows what there is, right or wrong: whether it is
/// right is for the [matrix](crate::matrix) to say. `None` if the scenario has no such point.
///
/// # Errors
///
/// The first outcome or promise that does not hold.
pub fn text<H: Harness>(scenario: &Scenario, fault: Fault) -> Result<Option<String>, Failure> {
    let plain = plain(scenario);
    let right = plain.finish::<H>()?;
    let mut all = Vec::new();
    for (at, _) in points(&right.points, 0).filter(|(_, kind)| *kind == fault) {
        let faults = [(at, fault)];
        let mut texts = [String::new(), String::new(), String::new()];
        let run = Run { faults: &faults, ..plain };
        let end = run.run::<H>(|moment, world| {
            match moment {
                Moment::AfterFault => texts[0] = shown(&world.dumps()?, |dump| dump),
                Moment::Reopened => texts[1] = shown(&world.dumps()?, |dump| dump),
                Moment::GoesOn(_) => {}
            }
            Ok(ControlFlow::Continue(()))
        });
        texts[2] = match end {
            Ok(end) => end.map(|end| end.lasting).unwrap_or_default(),
            Err(failure) => format!("--- there is no end: {failure}\n"),
        };
        all.push(Seen { at, texts });
    }
    if all.is_empty() {
        return Ok(None);
    }
    let mut text = String::new();
    write_all(&mut text, scenario, fault, &right, &all).map_err(Failure::new)?;
    Ok(Some(text))
}

/// Compares the text of a store with that of the reference.
///
/// # Errors
///
/// The first line that differs.
pub fn same_as<R: Harness, H: Harness>(scenario: &Scenario) -> Result<(), Failure> {
    for fault in Fault::ALL {
        let (right, found) = (
            text::<R>(scenario, fault)?.unwrap_or_default(),
            text::<H>(scenario, fault)?.unwrap_or_default(),
        );
        let differs = right.lines().zip(found.lines()).position(|(right, found)| right != found);
        ensure(right == found, || {
            let at = differs.unwrap_or_else(|| right.lines().count().min(found.lines().count()));
            let line = |text: &str| text.lines().nth(at).unwrap_or("(the end)").to_string();
            let name = name(scenario, fault);
            format!(
                "{name}: line {} is\n  {}\nbut the reference has\n  {}",
                at + 1,
                line(&found),
                line(&right)
            )
        })?;
    }
    Ok(())
}

fn write_all(
    text: &mut String,
    scenario: &Scenario,
    fault: Fault,
    right: &End,
    all: &[Seen],
) -> std::fmt::Result {
    writeln!(text, "{}\n", scenario.story)?;
    writeln!(text, "The fault: {}", fault.sentence())?;
    writeln!(
        text,
        "After it the stores are opened again, and everything is done again from the first step.\n"
    )?;
    writeln!(text, "The steps, each with what it gives without the fault:")?;
    for (number, step) in (1..).zip(scenario.steps) {
        let here = all.iter().filter(|seen| right.points[seen.at - 1].step + 1 == number);
        let here: Vec<String> = here.map(|seen| seen.at.to_string()).collect();
        let strikes = if here.is_empty() {
            String::new()
        } else {
            format!("  <- strikes at {}", listed(&here))
        };
        writeln!(text, "{number:>3}  {}{strikes}", step.command)?;
        // Not every store has rows of the user's own, and the text is the same for all.
        let outcome = right
            .outcomes
            .get(&(number - 1))
            .filter(|_| !matches!(step.command, Command::ReadOwnRow(_)));
        if let Some(outcome) = outcome.filter(|outcome| *outcome != "done") {
            writeln!(text, "       {outcome}")?;
        }
    }
    writeln!(text)?;
    write_phase(text, "AFTER THE FAULT", all, 0)?;
    if all.iter().all(|seen| seen.texts[0] == seen.texts[1]) {
        writeln!(text, "==== AFTER REOPENING, wherever it strikes: the same.\n")?;
    } else {
        write_phase(text, "AFTER REOPENING", all, 1)?;
    }
    write_phase(text, "AFTER RECOVERY (without times, leases and counters)", all, 2)
}

/// One phase: the points whose tables are the same stand together, and a table that was shown for
/// another point is not shown again.
fn write_phase(text: &mut String, title: &str, all: &[Seen], phase: usize) -> std::fmt::Result {
    let mut groups: Vec<(&str, Vec<String>)> = Vec::new();
    for seen in all {
        let tables = seen.texts[phase].as_str();
        match groups.iter_mut().find(|(there, _)| *there == tables) {
            Some((_, points)) => points.push(seen.at.to_string()),
            None => groups.push((tables, vec![seen.at.to_string()])),
        }
    }
    let alone = groups.len() == 1;
    let mut shown: BTreeMap<(usize, String), String> = BTreeMap::new();
    for (tables, points) in groups {
        let strikes = if alone {
            "wherever it strikes".to_string()
        } else {
            format!("if it strikes at {}", listed(&points))
        };
        writeln!(text, "==== {title}, {strikes}:\n")?;
        let blocks = blocks(tables);
        let mut alike: Option<(String, Vec<&str>)> = None;
        for (at, block) in blocks.iter().enumerate() {
            let (name, rest) = block.split_once(':').unwrap_or((block, ""));
            let state = match rest.trim_end() {
                "" => None,
                " none" => Some("none".to_string()),
                _ => shown.get(&(at, block.clone())).map(|point| format!("as at {point}")),
            };
            match (state, &mut alike) {
                (Some(state), Some((there, names))) if *there == state => names.push(name),
                (state, _) => {
                    write_alike(text, alike.take())?;
                    match state {
                        Some(state) => alike = Some((state, vec![name])),
                        None => {
                            text.push_str(block);
                            shown.insert((at, block.clone()), listed(&points[..1]));
                        }
                    }
                }
            }
        }
        write_alike(text, alike)?;
        writeln!(text)?;
    }
    Ok(())
}

/// Tables that stand side by side and are all empty, or all as at another point.
fn write_alike(text: &mut String, alike: Option<(String, Vec<&str>)>) -> std::fmt::Result {
    match alike {
        Some((state, names)) => writeln!(text, "{}: {state}", names.join(", ")),
        None => Ok(()),
    }
}

/// The tables one by one, and the titles of the stores: a line that is not indented begins a new
/// one.
fn blocks(tables: &str) -> Vec<String> {
    let mut blocks: Vec<String> = Vec::new();
    for line in tables.lines().filter(|line| !line.starts_with("own row")) {
        match blocks.last_mut() {
            Some(block) if line.starts_with(' ') => block.push_str(&format!("{line}\n")),
            Some(_) | None => blocks.push(format!("{line}\n")),
        }
    }
    blocks
}

fn listed(points: &[String]) -> String {
    format!("point{} {}", if points.len() == 1 { "" } else { "s" }, points.join(", "))
}
