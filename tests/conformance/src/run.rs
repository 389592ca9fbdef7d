//! Runs a scenario, with faults or without, and looks at the tables after every step.
//!
//! A fault is followed by a recovery: whoever got an error does the same again, and a program that
//! died is started again and does everything again from the first step. That must come to the same
//! end as a run without a fault (P8).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use twobox::{Dump, EventId, EventState, Fingerprint, InboxState, LaneRow, Record, RequestKey};

use crate::failure::{Failure, ensure};
use crate::fault::{Fault, Plan, Point, Site};
use crate::harness::Subject;
use crate::scenario::{Command, Scenario};
use crate::side::Side;
use crate::world::{Interrupt, Layout, Outcome, World, applies};

/// What a program does after a fault that it has survived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Then {
    /// It does the same step again, if that failed, and goes on.
    GoOn,
    /// It is closed and opened again, and does everything again.
    Restart,
}

/// Where a run stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Moment {
    /// This step has come to its end, and not by an error.
    Done(usize),
    /// A fault has struck in this step, and the step has come to its end, whichever that was.
    AfterFault,
    /// The stores were opened again after that.
    Reopened,
    /// The run goes on from this step; the fault is over.
    GoesOn(usize),
}

/// How much is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Look {
    /// At all tables after every step from this one on: those before it are as in a run without
    /// faults, which is looked at from 0.
    From(usize),
    /// Only at the end.
    AtTheEnd,
    /// Nowhere: what comes of the commands is shown, right or wrong.
    Nowhere,
}

/// One run of a scenario.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) layout: Layout,
    /// Which faults strike, and at which point, from 1.
    pub(crate) faults: &'a [(usize, Fault)],
    pub(crate) then: Then,
    pub(crate) look: Look,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct End {
    /// The points that were reached.
    pub(crate) points: Vec<Point>,
    /// The step of each wait of an async store.
    pub(crate) waits: Vec<usize>,
    /// What each step gave last, by its number from 0.
    pub(crate) outcomes: BTreeMap<usize, String>,
    /// All rows of each store.
    pub(crate) dumps: Vec<Dump>,
    /// What must not depend on faults (P8).
    pub(crate) lasting: String,
}

impl Run<'_> {
    /// Runs to the end. `watch` sees the world after each step and around each fault, and may stop
    /// the run; then there is no end.
    pub(crate) fn run<H: Subject>(
        &self,
        watch: impl FnMut(Moment, &World<'_, H::Side>) -> Result<ControlFlow<()>, Failure>,
    ) -> Result<Option<End>, Failure> {
        self.run_on::<H::Side>(watch)
    }

    fn run_on<S: Side>(
        &self,
        mut watch: impl FnMut(Moment, &World<'_, S>) -> Result<ControlFlow<()>, Failure>,
    ) -> Result<Option<End>, Failure> {
        let steps = self.scenario.steps;
        let mut world = World::<S>::new(self.scenario, self.layout, Plan::new(self.faults));
        let purges = steps.iter().any(|step| step.command == Command::Purge);
        let mut witness = Witness { purges, ..Witness::default() };
        let mut outcomes = BTreeMap::new();
        let (mut at, mut handled) = (0, 0);
        while let Some(step) = steps.get(at) {
            let this = at;
            let place = |failure: Failure| failure.at(self.place(this));
            if !applies::<S>(step.command) {
                at += 1;
                continue;
            }
            world.plan.enter(at);
            let result = world.begin(step.command);
            let struck = world.plan.struck() > handled;
            handled = world.plan.struck();
            if struck && watch(Moment::AfterFault, &world)?.is_break() {
                return Ok(None);
            }
            let restart = match result {
                Ok(outcome) => {
                    if self.look != Look::Nowhere {
                        check_outcome(step.gives, &outcome, handled > 0).map_err(place)?;
                    }
                    outcomes.insert(at, outcome.text);
                    at += 1;
                    if watch(Moment::Done(this), &world)?.is_break() {
                        return Ok(None);
                    }
                    struck && self.then == Then::Restart
                }
                Err(Interrupt::Crash) => true,
                Err(Interrupt::Failed(_)) if struck => self.then == Then::Restart,
                Err(Interrupt::Failed(why)) => {
                    return Err(place(Failure::new(format_args!("{why}, without a reason"))));
                }
                Err(Interrupt::Broken(failure)) => return Err(place(failure)),
            };
            if restart {
                world.reopen();
                at = 0;
            }
            if matches!(self.look, Look::From(step) if this >= step || handled > 0) {
                witness.look(&world.dumps()?, world.arrivals()).map_err(place)?;
            }
            if struck {
                if restart && watch(Moment::Reopened, &world)?.is_break() {
                    return Ok(None);
                }
                if watch(Moment::GoesOn(at), &world)?.is_break() {
                    return Ok(None);
                }
            }
        }
        let place = |failure: Failure| failure.at(self.place(steps.len()));
        let dumps = world.dumps()?;
        if self.look != Look::Nowhere {
            witness.look(&dumps, world.arrivals()).map_err(place)?;
        }
        let struck = world.plan.struck();
        ensure(struck == self.faults.len(), || self.missed(struck, &world.plan.points()))
            .map_err(place)?;
        let mut lasting: String = shown(&dumps, Dump::lasting);
        world.own_rows()?.iter().for_each(|row| lasting.push_str(&format!("own row: {row:?}\n")));
        let (points, waits) = (world.plan.points(), world.plan.waits());
        Ok(Some(End { points, waits, outcomes, dumps, lasting }))
    }

    /// Runs to the end.
    pub(crate) fn finish<H: Subject>(&self) -> Result<End, Failure> {
        self.finish_on::<H::Side>()
    }

    /// Runs to the end with a store as somebody sees it.
    pub(crate) fn finish_on<S: Side>(&self) -> Result<End, Failure> {
        self.run_on::<S>(|_, _| Ok(ControlFlow::Continue(())))?
            .ok_or_else(|| Failure::new("the run has no end"))
    }

    /// For a failure: not all faults have struck.
    fn missed(&self, struck: usize, points: &[Point]) -> String {
        let (all, reached) = (self.faults.len(), points.len());
        let next = self.faults.get(struck).map_or(String::new(), |(at, fault)| {
            let there = points.get(at - 1).map(|point| format!("a {}", point.site.name()));
            let there = there.unwrap_or_else(|| "not reached".to_string());
            format!("{} was to strike at point {at}, which is {there}; ", fault.name())
        });
        format!(
            "only {struck} of {all} faults have struck: {next}this run came to {reached} points, \
             and an earlier one with the same steps to others. The same calls must come to the \
             same each time: look for a store that reports conflicts or errors of its own accord, \
             for an answer that depends on the time or on chance, or for stores that share a file"
        )
    }

    /// For a failure: which run this is, and which step.
    pub(crate) fn place(&self, at: usize) -> String {
        let mut text = format!("scenario {} with {:?}", self.scenario.name, self.layout);
        for (number, (point, fault)) in self.faults.iter().enumerate() {
            text.push_str(if number == 0 { ", " } else { " and " });
            let at = if fault.site() == Site::Wait { "wait" } else { "point" };
            text.push_str(&format!("{} at {at} {point}", fault.name()));
        }
        if !self.faults.is_empty() {
            text.push_str(match self.then {
                Then::GoOn => ", then it goes on",
                Then::Restart => ", then it is started again",
            });
        }
        match self.scenario.steps.get(at) {
            Some(step) => format!("{text}: step {} ({})", at + 1, step.command),
            None => format!("{text}: at the end"),
        }
    }
}

/// The tables of all stores as text, each with its title.
pub(crate) fn shown(dumps: &[Dump], view: impl Fn(Dump) -> Dump) -> String {
    let titles: &[&str] = if dumps.len() == 1 {
        &["the store"]
    } else {
        &["the sender's store", "the receiver's store"]
    };
    titles
        .iter()
        .zip(dumps)
        .map(|(title, dump)| format!("--- {title}\n{}", view(dump.clone())))
        .collect()
}

/// Without faults a step gives exactly what the scenario says; after one it may find its work done,
/// but what must be refused is refused, and nothing else is (P1, P5).
fn check_outcome(gives: &str, outcome: &Outcome, faults: bool) -> Result<(), Failure> {
    let must_refuse = gives.starts_with("refused");
    let right = if faults { outcome.refused == must_refuse } else { outcome.text == gives };
    ensure(right, || format!("it must give\n  {gives}\nbut it gave\n  {}", outcome.text))
}

/// What was seen so far, to say what must never change.
#[derive(Default)]
struct Witness {
    bound: BTreeMap<RequestKey, Fingerprint>,
    committed: BTreeMap<EventId, Record>,
    /// Whether somebody purges. Then an event may go when it is finished (P7).
    purges: bool,
    finished: BTreeSet<EventId>,
}

impl Witness {
    /// The promises that can be seen in the tables, at any time.
    fn look(&mut self, dumps: &[Dump], arrivals: &[EventId]) -> Result<(), Failure> {
        let mut outbox = BTreeSet::new();
        let mut events = BTreeMap::new();
        let mut deliveries = BTreeMap::new();
        let mut orders = BTreeMap::new();
        let mut placed = BTreeMap::new();
        let mut applied = BTreeMap::new();
        let mut effects = BTreeMap::new();
        let mut lanes = BTreeMap::new();
        for dump in dumps {
            deliveries.extend(dump.events().into_iter().map(|(id, found)| (id.clone(), found)));
            let unsorted = dump.records().windows(2).find(|pair| pair[0].key() >= pair[1].key());
            if let Some(pair) = unsorted {
                return Err(Failure::new(format_args!(
                    "{} comes before {}, or twice",
                    pair[0].key(),
                    pair[1].key()
                )));
            }
            for record in dump.records() {
                match record {
                    Record::Request(key, row) => {
                        let first = self
                            .bound
                            .entry(key.clone())
                            .or_insert_with(|| row.fingerprint.clone());
                        ensure(*first == row.fingerprint, || {
                            format!(
                                "P1: {key} was bound to [{}], now to [{}]",
                                first.summary(),
                                row.fingerprint.summary()
                            )
                        })?;
                        placed.extend(
                            row.placed.as_ref().map(|placed| (key.clone(), placed.clone())),
                        );
                    }
                    Record::Order(id, row) => drop(orders.insert(id.clone(), row.clone())),
                    Record::Event(row) => drop(events.insert(row.event.id.clone(), record.clone())),
                    Record::Outbox(id, _) => drop(outbox.insert(id.clone())),
                    Record::Lane(key, row) => drop(lanes.insert(key.clone(), row.clone())),
                    Record::Inbox(consumer, id, row) => {
                        if row.state == InboxState::Applied && row.effect {
                            applied.insert((consumer.clone(), id.clone()), ());
                        }
                    }
                    Record::Effect(consumer, id, _) => {
                        effects.insert((consumer.clone(), id.clone()), ());
                    }
                    Record::Position(..) | Record::Call(..) => {}
                }
            }
        }
        for (id, order) in &orders {
            let there = placed.get(&order.request).is_some_and(|placed| placed.order == *id);
            ensure(there, || {
                format!(
                    "P2: order {id} is there, but its request {} does not say so",
                    order.request
                )
            })?;
        }
        for (key, placed) in &placed {
            ensure(orders.contains_key(&placed.order), || {
                format!("P2: request {key} has order {}, which is not there", placed.order)
            })?;
            for id in &placed.events {
                let there = events.contains_key(id) && deliveries.contains_key(id);
                let gone = self.purges && !events.contains_key(id) && !outbox.contains(id);
                ensure(there || gone, || {
                    format!(
                        "P2: order {} is there without its event {id} in events and its lane",
                        placed.order
                    )
                })?;
            }
        }
        ensure(events.keys().eq(deliveries.keys()), || {
            "P2: there are events without a lane".to_string()
        })?;
        ensure(outbox.iter().all(|id| events.contains_key(id)), || {
            "P2: there are rows of the outbox without their event".to_string()
        })?;
        let owned: BTreeSet<&EventId> = placed.values().flat_map(|placed| &placed.events).collect();
        ensure(events.keys().all(|id| owned.contains(id)), || {
            "P2: there are events that belong to no order".to_string()
        })?;
        for (id, event) in &self.committed {
            let purged = self.purges && self.finished.contains(id) && !events.contains_key(id);
            ensure(purged || events.get(id) == Some(event), || {
                format!(
                    "P3, P7: event {id} was committed and is gone without being finished, or has changed"
                )
            })?;
        }
        self.finished = deliveries
            .iter()
            .filter(|(_, (state, row))| state.finished_since(row.committed_at).is_some())
            .map(|(id, _)| id.clone())
            .collect();
        self.committed = events;
        let mut places = BTreeMap::new();
        for (id, (state, row)) in &deliveries {
            let lane = lanes.get(&row.lane);
            ensure(lane.is_some_and(|lane| row.sequence < lane.next), || {
                format!("P4: event {id} stands in no lane")
            })?;
            // That it is confirmed follows from its lane; that it was published does not.
            ensure(*state != EventState::Confirmed || arrivals.contains(id), || {
                format!("P3: event {id} is confirmed and has never arrived")
            })?;
            let other = places.insert((row.lane.clone(), row.sequence), (id, *state));
            ensure(other.is_none(), || format!("P4: event {id} stands at the place of another"))?;
        }
        let mut waits = None;
        for ((lane, _), (id, state)) in &places {
            match state {
                EventState::Pending | EventState::Leased => waits = Some(lane),
                EventState::Confirmed => ensure(waits != Some(lane), || {
                    format!("P4: event {id} is confirmed before another one in its lane")
                })?,
                EventState::Dead(_) | EventState::Discarded(_) | EventState::Cancelled(_) => {}
            }
        }
        for (key, row) in &lanes {
            let mut events = places.iter().filter(|((lane, _), _)| lane == key);
            let pending = events
                .any(|(_, (_, state))| matches!(state, EventState::Pending | EventState::Leased));
            check_lane(row, pending).map_err(|failure| failure.at(format_args!("lane {key}")))?;
        }
        for (at, id) in arrivals.iter().enumerate() {
            let Some((_, row)) = deliveries.get(id) else { continue };
            let later = arrivals[..at].iter().filter_map(|other| deliveries.get(other));
            let overtaken = later
                .filter(|(_, other)| other.lane == row.lane)
                .any(|(_, other)| other.sequence > row.sequence);
            ensure(!overtaken, || format!("P4: event {id} arrived after a later one of its lane"))?;
        }
        ensure(applied == effects, || {
            format!(
                "P5: the events that inboxes say are applied, and those with an effect, differ: {applied:?}, {effects:?}"
            )
        })
    }
}

/// What a lane says of itself: what is pending in it will be due, unless it waits for an operator
/// (P3), and a lease has an end at which it is (P6).
fn check_lane(row: &LaneRow, pending: bool) -> Result<(), Failure> {
    ensure(row.head <= row.next && row.confirmed < row.next, || {
        format!("P4: it has come to {} of {}", row.head, row.next)
    })?;
    let waits = row.due.is_some() || row.blocked_by.is_some();
    ensure(waits || !pending, || {
        "P3: something is pending in it, and it is never due".to_string()
    })?;
    let until = row.lease.as_ref().map(|lease| lease.until);
    ensure(until.is_none() || until == row.due, || {
        "P6: it is leased, and not due when the lease ends".to_string()
    })
}
