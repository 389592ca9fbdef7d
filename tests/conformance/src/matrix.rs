//! The fault matrix: each scenario with each kind of fault at each point, and with all pairs of two
//! (P8).

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;

use crate::failure::{Failure, ensure};
use crate::fault::{Fault, Point, WaitFault};
use crate::harness::Subject;
use crate::run::{Look, Moment, Run, Then, shown};
use crate::scenario::Scenario;
use crate::world::{Layout, World};

/// How much a check has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Tally {
    /// How many points, or waits, a run without faults has.
    pub points: usize,
    /// How many runs there were with one fault.
    pub singles: usize,
    /// How many runs there were with two faults.
    pub pairs: usize,
    /// How many of the runs ended early, since they came to a state from which the rest was known.
    pub known: usize,
}

/// Runs a scenario without faults, with one store and with two, and checks each outcome: through
/// begin, load, apply and commit, and through the store's own `run`, `write` and `transact`.
///
/// # Errors
///
/// The first outcome or promise that does not hold.
pub fn scenario<H: Subject>(scenario: &Scenario) -> Result<(), Failure> {
    for layout in Layout::ALL {
        let run = Run { scenario, layout, faults: &[], then: Then::GoOn, look: Look::From(0) };
        let right = run.finish::<H>()?;
        let own = run.finish_on::<H::Own>();
        let own = own.map_err(|failure| failure.at("through the store's own run and transact"))?;
        ensure(own.dumps == right.dumps, || {
            let place = run.place(scenario.steps.len());
            let (found, right) = (shown(&own.dumps, |dump| dump), shown(&right.dumps, |dump| dump));
            format!(
                "{place} the tables must be the same through the store's own run, write and \
                 transact as through begin, load, apply and commit.\nBy the latter:\n{right}\nBy \
                 its own:\n{found}"
            )
        })?;
    }
    Ok(())
}

/// Runs a scenario with each kind of fault at each point, with one store and with two: the program
/// is started again after it, or does the same step again. After each step the promises must hold,
/// and the end must be that of a run without faults (P8).
///
/// # Errors
///
/// The first outcome or promise that does not hold.
pub fn singles<H: Subject>(scenario: &Scenario) -> Result<Tally, Failure> {
    let mut tally = Tally::default();
    for layout in Layout::ALL {
        each_single::<H>(scenario, layout, &[Then::Restart, Then::GoOn], &mut tally)?;
    }
    Ok(tally)
}

/// The same with one store, where the program does the same step again, for a store that is
/// compared with a reference: what is done with two stores where the program is started again is in
/// [`same_as`](crate::snapshot::same_as).
///
/// # Errors
///
/// The first outcome or promise that does not hold.
pub fn singles_in_one_store<H: Subject>(scenario: &Scenario) -> Result<Tally, Failure> {
    let mut tally = Tally::default();
    each_single::<H>(scenario, Layout::OneStore, &[Then::GoOn], &mut tally)?;
    Ok(tally)
}

/// Runs a scenario on an async store, in which each operation in turn is dropped at each of its
/// waits, with one store and with two: whoever dropped it does the same again, or is started again.
/// After each step the promises must hold, and the end must be that of a run without (P8). This is
/// for a store that waits at the same places in every run.
///
/// # Errors
///
/// The first outcome or promise that does not hold.
pub fn drops<H: Subject>(scenario: &Scenario) -> Result<Tally, Failure> {
    let mut tally = Tally::default();
    for layout in Layout::ALL {
        let plain = Run { scenario, layout, faults: &[], then: Then::GoOn, look: Look::From(0) };
        let right = plain.finish::<H>()?;
        tally.points += right.waits.len();
        for (wait, step) in (1..).zip(right.waits) {
            let look = Look::From(step.saturating_sub(1));
            for then in [Then::Restart, Then::GoOn] {
                let faults = &[(wait, Fault::Wait(WaitFault::Dropped))];
                let run = Run { faults, then, look, ..plain };
                same_end(&run, &run.finish::<H>()?.lasting, &right.lasting)?;
                tally.singles += 1;
            }
        }
    }
    Ok(tally)
}

fn each_single<H: Subject>(
    scenario: &Scenario,
    layout: Layout,
    thens: &[Then],
    tally: &mut Tally,
) -> Result<(), Failure> {
    let plain = Run { scenario, layout, faults: &[], then: Then::GoOn, look: Look::From(0) };
    let right = plain.finish::<H>()?;
    tally.points += right.points.len();
    for (at, fault) in points(&right.points, 0) {
        // The steps before are those of the run without faults; the last of them is what the first
        // look after the fault is compared with.
        let look = Look::From(right.points[at - 1].step.saturating_sub(1));
        // Whoever dies is started again in any case.
        let thens = if fault.kills() { &thens[..1] } else { thens };
        for then in thens {
            let run = Run { faults: &[(at, fault)], then: *then, look, ..plain };
            same_end(&run, &run.finish::<H>()?.lasting, &right.lasting)?;
            tally.singles += 1;
        }
    }
    Ok(())
}

/// Runs a scenario with two faults: the second at each point that is reached after the first, also
/// during the recovery.
///
/// Runs that come to the same state go on in the same way, so each state is followed only once. Of
/// the pairs that are left, each `stride`-th is run: 1 for all.
///
/// # Errors
///
/// The first promise that does not hold.
pub fn pairs<H: Subject>(scenario: &Scenario, stride: usize) -> Result<Tally, Failure> {
    let mut tally = Tally::default();
    let plain = Run {
        scenario,
        layout: Layout::TwoStores,
        faults: &[],
        then: Then::GoOn,
        look: Look::AtTheEnd,
    };
    let right = plain.finish::<H>()?;
    tally.points = right.points.len();
    let mut first_seen = BTreeSet::new();
    let mut second_seen = BTreeSet::new();
    let mut number = 0;
    for (at, fault) in points(&right.points, 0) {
        let first = Run { faults: &[(at, fault)], ..plain };
        tally.singles += 1;
        let Some(end) = unless_known::<H>(&first, &mut first_seen)? else {
            tally.known += 1;
            continue;
        };
        same_end(&first, &end.lasting, &right.lasting)?;
        for second in points(&end.points, at) {
            number += 1;
            if number % stride != 0 {
                continue;
            }
            let run = Run { faults: &[(at, fault), second], ..plain };
            tally.pairs += 1;
            match unless_known::<H>(&run, &mut second_seen)? {
                None => tally.known += 1,
                Some(end) => same_end(&run, &end.lasting, &right.lasting)?,
            }
        }
    }
    Ok(tally)
}

/// The same for a store that is slow to open: which pairs lead to different states is found out
/// with a reference, and each `stride`-th of those is run with the store.
///
/// # Errors
///
/// The first promise that does not hold.
pub fn pairs_beside<R: Subject, H: Subject>(
    scenario: &Scenario,
    stride: usize,
) -> Result<Tally, Failure> {
    let mut tally = Tally::default();
    let plain = Run {
        scenario,
        layout: Layout::TwoStores,
        faults: &[],
        then: Then::GoOn,
        look: Look::AtTheEnd,
    };
    let right = plain.finish::<H>()?;
    tally.points = right.points.len();
    let mut seen = BTreeSet::new();
    let mut number = 0;
    for (at, fault) in points(&right.points, 0) {
        let first = Run { faults: &[(at, fault)], ..plain };
        let Some(end) = unless_known::<R>(&first, &mut seen)? else {
            tally.known += 1;
            continue;
        };
        for second in points(&end.points, at) {
            number += 1;
            if number % stride == 0 {
                let run = Run { faults: &[(at, fault), second], ..plain };
                same_end(&run, &run.finish::<H>()?.lasting, &right.lasting)?;
                tally.pairs += 1;
            }
        }
    }
    Ok(tally)
}

/// The points after some, each with each kind of fault that can strike there.
pub(crate) fn points(points: &[Point], after: usize) -> impl Iterator<Item = (usize, Fault)> + '_ {
    (1..)
        .zip(points)
        .skip(after)
        .flat_map(|(at, point)| Fault::at(point.site).map(move |fault| (at, fault)))
}

/// Runs until the last fault is over, and on to the end if no run before was in the same state
/// there.
fn unless_known<H: Subject>(
    run: &Run<'_>,
    seen: &mut BTreeSet<u64>,
) -> Result<Option<crate::run::End>, Failure> {
    run.run::<H>(|moment, world: &World<'_, H::Side>| {
        let Moment::GoesOn(step) = moment else { return Ok(ControlFlow::Continue(())) };
        if world.plan.struck() < run.faults.len() {
            return Ok(ControlFlow::Continue(()));
        }
        let mut hasher = DefaultHasher::new();
        (step, world.state()?).hash(&mut hasher);
        Ok(if seen.insert(hasher.finish()) {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        })
    })
}

fn same_end(run: &Run<'_>, found: &str, right: &str) -> Result<(), Failure> {
    ensure(found == right, || {
        let place = run.place(run.scenario.steps.len());
        format!(
            "P8: {place} the tables must be as without the fault.\nWithout it:\n{right}\nWith it:\n{found}"
        )
    })
}

/// What the tables are at the end of a scenario without faults, as text; two stores.
///
/// # Errors
///
/// The first outcome or promise that does not hold.
pub fn end<H: Subject>(scenario: &Scenario) -> Result<String, Failure> {
    let run = Run {
        scenario,
        layout: Layout::TwoStores,
        faults: &[],
        then: Then::GoOn,
        look: Look::From(0),
    };
    Ok(shown(&run.finish::<H>()?.dumps, |dump| dump))
}
