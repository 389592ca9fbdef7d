//! Every state to every state, and changes at random: what an adapter keeps to find rows must
//! follow each change, in whichever way it is written.

use twobox::{
    Batch, CallRow, CallState, Change, Decision, DeliveryState, EventId, Expect, InboxRow,
    InboxState, Key, LaneEdit, LaneKey, LaneRow, Lease, Millis, OrderId, OutboxRow, Owner,
    PlacedOrder, Query, Reader, Reason, Record, RequestRow, Revision, Rows, Seen, Store, Tables,
    Transaction, Transition,
};

use super::shadow::Shadow;
use super::{batch, load, put, rows};
use crate::chance::Chance;
use crate::failure::{Failure, ensure, short};
use crate::harness::Harness;

/// A row with this key that is given, or none.
type State = Option<Record>;

/// The change that leads from what is there to this state, if there is anything to do.
fn to(shadow: &Shadow, key: &Key, state: State) -> Option<Change> {
    let there = shadow.get(key).map(|row| row.revision);
    match (there, state) {
        (there, Some(record)) => Some(put(there.into(), record)),
        (Some(expect), None) => Some(Change::Delete { expect, key: key.clone() }),
        (None, None) => None,
    }
}

/// The states of an event's row in the outbox: none, or one that says what became of it.
fn outbox_states(id: &str, lane: &str, place: u64) -> Result<Vec<State>, Failure> {
    // The dead are not in the order of their ids.
    let time = |n: u64| Millis::new(1_000 + (place * 37 + n * 11) % 101);
    let made = |sequence, state| rows::outbox(id, lane, sequence, state);
    let Record::Outbox(key, moved) = made(place + 1_000, DeliveryState::Pending)? else {
        return Ok(Vec::new());
    };
    Ok(vec![
        None,
        Some(made(place, DeliveryState::Pending)?),
        Some(made(place, DeliveryState::Dead(time(1)))?),
        Some(made(place, DeliveryState::Discarded(time(2)))?),
        Some(made(place, DeliveryState::Cancelled(time(3)))?),
        Some(Record::Outbox(key, OutboxRow { moved: true, ..moved })),
    ])
}

/// The states of a lane without events.
fn lane_states(name: &str) -> Result<Vec<State>, Failure> {
    let Record::Lane(key, idle) = rows::lane(name, None)? else { return Ok(Vec::new()) };
    let owner = Owner::new("relay-1").map_err(Failure::new)?;
    let lease = Lease { owner, until: Millis::new(60), through: 9 };
    let blocked_by = Some(EventId::new("dead").map_err(Failure::new)?);
    let due = |millis| LaneRow { due: Some(Millis::new(millis)), ..idle.clone() };
    let states = [
        idle.clone(),
        due(20),
        due(40),
        LaneRow { lease: Some(lease), token: 6, ..due(60) },
        LaneRow { blocked_by, ..idle.clone() },
    ];
    let states = states.map(|row| Some(Record::Lane(key.clone(), row)));
    Ok([None].into_iter().chain(states).collect())
}

/// A lane with events in this state: due, leased, or blocked.
fn with_events(row: LaneRow, state: usize) -> LaneRow {
    // With nothing pending it is not due.
    let due = row.due.filter(|_| row.head < row.next);
    let leased = |until| {
        let owner = Owner::new("relay-1").ok()?;
        Some(Lease { owner, until, through: row.head + 2 })
    };
    match state {
        0 => LaneRow { due, ..row },
        1 => LaneRow { due, lease: due.and_then(leased), ..row },
        _ => LaneRow { due: None, blocked_by: EventId::new("dead").ok(), ..row },
    }
}

/// The states of rows in other tables from which they may be removed, or not.
fn other_states(name: &str) -> Result<Vec<Vec<State>>, Failure> {
    let reason = Some(Reason::new("a reason"));
    let mut requests = vec![None, Some(rows::request("shop", name)?)];
    if let Some(Some(Record::Request(key, row))) = requests.last().cloned() {
        let order = OrderId::new(name).map_err(Failure::new)?;
        let placed = Some(PlacedOrder { order, events: Vec::new(), at: Millis::new(8) });
        requests.push(Some(Record::Request(key, RequestRow { placed, ..row })));
    }
    let mut inbox = vec![None];
    for state in [InboxState::Applied, InboxState::Failing, InboxState::Poisoned] {
        if let Record::Inbox(consumer, id, row) = rows::inbox("loyalty", name, state)? {
            let reason = reason.clone().filter(|_| state != InboxState::Applied);
            inbox.push(Some(Record::Inbox(consumer, id, InboxRow { reason, ..row })));
        }
    }
    let mut calls = vec![None];
    for state in [CallState::Intended, CallState::Started, CallState::Done, CallState::Unknown] {
        if let Record::Call(consumer, id, row) = rows::call("loyalty", name, state)? {
            let note = reason.clone().filter(|_| state == CallState::Unknown);
            calls.push(Some(Record::Call(consumer, id, CallRow { note, ..row })));
        }
    }
    Ok(vec![requests, inbox, calls])
}

/// Rows that change together: the key of each, and its states, one after the other.
struct Tour {
    rows: Vec<(Key, [State; 3])>,
    /// The lanes of the events, as each is after each change.
    lanes: Vec<(LaneKey, [LaneRow; 3])>,
    events: Vec<Record>,
}

impl Tour {
    /// Every three states that can follow each other, each in a row of its own.
    fn new() -> Result<Self, Failure> {
        let mut tour = Self { rows: Vec::new(), lanes: Vec::new(), events: Vec::new() };
        let mut count = 0;
        for at in threes(6) {
            count += 1;
            // Ids do not sort as sequences do, and each lane has a few events of each kind.
            let (id, lane) = (format!("e{:03}", count * 89 % 997), format!("lane {}", count % 27));
            let place = 1 + u64::try_from(count / 27).unwrap_or(0);
            tour.events.push(rows::event_in(&id, &lane, place, rows::body("an event")?)?);
            tour.add(&outbox_states(&id, &lane, place)?, at);
        }
        for (lane, at) in threes(3).enumerate() {
            let due = Some(Millis::new(100 + lane as u64));
            let Record::Lane(key, row) = rows::lane(&format!("lane {lane}"), due)? else {
                continue;
            };
            // It stands still, moves on, or moves past everything; and back again.
            let heads = [[1, 1, 1], [1, 4, 8], [1, 2_000, 5], [3, 3, 2_000]][lane % 4];
            let mut step = 0;
            let rows = at.map(|state| {
                let row = LaneRow { head: heads[step], next: 2_000, ..row.clone() };
                step += 1;
                with_events(row, state)
            });
            tour.lanes.push((key, rows));
        }
        for at in threes(6) {
            let name = format!("l{:03}", at[0] * 100 + at[1] * 10 + at[2]);
            tour.add(&lane_states(&name)?, at);
        }
        for (kind, count) in [3, 4, 5].into_iter().enumerate() {
            for at in threes(count) {
                let name = format!("r{:03}", at[0] * 100 + at[1] * 10 + at[2]);
                tour.add(&other_states(&name)?[kind], at);
            }
        }
        Ok(tour)
    }

    fn add(&mut self, states: &[State], at: [usize; 3]) {
        if let Some(key) = states.iter().flatten().next().map(Record::key) {
            self.rows.push((key, at.map(|at| states[at].clone())));
        }
    }

    /// The changes that lead to the states of this number.
    fn step(&self, shadow: &Shadow, step: usize) -> Result<Batch, Failure> {
        let mut changes = Vec::new();
        if step == 0 {
            changes.extend(self.events.iter().cloned().map(|row| put(Expect::Absent, row)));
        }
        for (key, rows) in &self.lanes {
            let row = Record::Lane(key.clone(), rows[step].clone());
            changes.extend(to(shadow, &Key::Lane(key.clone()), Some(row)));
        }
        for (key, states) in &self.rows {
            changes.extend(to(shadow, key, states[step].clone()));
        }
        batch(changes)
    }
}

impl Tour {
    /// Removes the events with what happened to them, and leaves their lanes idle.
    fn end(&self, shadow: &Shadow) -> Result<Batch, Failure> {
        let mut changes = Vec::new();
        for row in shadow.rows() {
            let state = match &row.record {
                Record::Event(_) | Record::Outbox(..) => None,
                Record::Lane(key, lane) if self.lanes.iter().any(|(this, _)| this == key) => {
                    let idle = LaneRow { head: lane.next, blocked_by: None, ..lane.clone() };
                    Some(Record::Lane(key.clone(), LaneRow { lease: None, due: None, ..idle }))
                }
                Record::Lane(..) | Record::Request(..) | Record::Order(..) => continue,
                Record::Inbox(..) | Record::Effect(..) => continue,
                Record::Position(..) | Record::Call(..) => continue,
            };
            changes.extend(to(shadow, &row.record.key(), state));
        }
        batch(changes)
    }
}

/// Every three numbers below this one.
fn threes(end: usize) -> impl Iterator<Item = [usize; 3]> {
    (0..end * end * end).map(move |n| [n / end / end, n / end % end, n % end])
}

const LIMITS: [usize; 2] = [3, 100];

/// Rows go from every state to every other, and on to every third: in commits of their own, or
/// several in one transaction, so that one is written and removed again, or removed and written.
/// All queries must answer as the rows say, before and after each commit, and after a crash.
///
/// # Errors
///
/// The first answer that differs from the model's.
pub fn every_state_follows_every_state<H: Harness>() -> Result<(), Failure> {
    let tour = Tour::new()?;
    // After which steps there is a commit.
    for commits in [[true, true, true], [true, false, true], [false, false, true]] {
        let mut harness = H::open();
        let mut shadow = Shadow::default();
        let mut step = 0;
        while step < 3 {
            let mut tx = harness.store().begin().map_err(Failure::store)?;
            loop {
                let changes = tour.step(&shadow, step)?;
                applied(&mut shadow, &changes, tx.apply(&changes).map_err(Failure::store)?)?;
                step += 1;
                if commits[step - 1] {
                    break;
                }
                let when = format!("in the transaction, after step {step} of {commits:?}");
                shadow.check(&mut tx, &LIMITS[..1], &when)?;
            }
            tx.commit().map_err(Failure::store)?;
            let when = format!("after step {step} of {commits:?}");
            shadow.check(&mut harness.store().view().map_err(Failure::store)?, &LIMITS, &when)?;
            harness = harness.crash();
            let when = format!("{when} and a crash");
            shadow.check(&mut harness.store().view().map_err(Failure::store)?, &[], &when)?;
        }
        // The events go, and their lanes with nothing left in them can go.
        let changes = tour.end(&shadow)?;
        let mut tx = harness.store().begin().map_err(Failure::store)?;
        applied(&mut shadow, &changes, tx.apply(&changes).map_err(Failure::store)?)?;
        tx.commit().map_err(Failure::store)?;
        let when = "after all events were removed";
        shadow.check(&mut harness.store().view().map_err(Failure::store)?, &LIMITS, when)?;
    }
    Ok(())
}

/// Applies a batch to the model, and says whether the store has done the same.
fn applied(shadow: &mut Shadow, batch: &Batch, found: twobox::Applied) -> Result<(), Failure> {
    use twobox::Applied::{Conflict, Written};
    match (shadow.apply(batch), found) {
        (Ok(()), Written) | (Err(_), Conflict(None)) => Ok(()),
        (Err(key), Conflict(Some(found))) => {
            let broken = batch
                .changes()
                .iter()
                .any(|change| change.key() == found && change.on(shadow.get(&found)).is_none());
            ensure(broken, || {
                format!(
                    "the guard of {key} does not hold, but apply names {found}, whose guard does"
                )
            })
        }
        (Ok(()), Conflict(key)) => Err(Failure::new(format_args!(
            "all rows are as expected, but apply reports a conflict at {key:?}: {}",
            short(batch)
        ))),
        (Err(key), Written) => {
            let change = batch.changes().iter().find(|change| change.key() == key);
            Err(Failure::new(format_args!(
                "the guard of {key} does not hold, and apply writes: {} on {}",
                short(&change),
                short(&shadow.get(&key)),
            )))
        }
    }
}

/// A transition that asks one thing and writes another, which is decided already.
pub(crate) struct Fixed {
    pub(crate) query: Query,
    pub(crate) batch: Batch,
    pub(crate) may_be_lost: bool,
}

impl Transition for Fixed {
    type Outcome = ();
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        self.query.clone()
    }

    fn decide(&self, _now: Millis, _rows: &Rows) -> Result<Decision<()>, Self::Refusal> {
        let decision = Decision::new(self.batch.clone(), ());
        Ok(if self.may_be_lost { decision.may_be_lost() } else { decision })
    }
}

/// What a batch does, in a few words.
fn described(batch: &Batch) -> String {
    let one = |change: &Change| match change {
        Change::Put { expect: Expect::Absent, record } => format!("insert {}", record.key()),
        Change::Put { expect: Expect::Revision(at), record } => {
            format!("update {} at {}", record.key(), at.get())
        }
        Change::Delete { expect, key } => format!("remove {key} at {}", expect.get()),
        Change::Lane { key, token, edit, .. } => format!("lane {key} under {token}: {edit:?}"),
    };
    batch.changes().iter().map(one).collect::<Vec<_>>().join(", ")
}

/// A store with what is in it, and what may be in it after a crash.
struct Walker<H> {
    harness: Option<H>,
    chance: Chance,
    shadow: Shadow,
    /// What may be there after a crash: what was committed for good, and what came after it and
    /// may be lost.
    possible: Vec<Shadow>,
    /// The next sequence in each lane.
    next: u64,
    log: Vec<String>,
}

const NAMES: [&str; 4] = ["a", "ab", "mail=>a", "ma=>Z"];
const STEPS: usize = 90;

/// Rows change at random: inserted, updated and removed, under guards that hold and some that do
/// not, lanes under their tokens; through the store's own `run`, `write` and `transact`, through
/// `apply` and `apply_seen`; committed, dropped, or committed so that a crash may lose it. All
/// queries must answer as the rows say, also after a crash.
///
/// # Errors
///
/// The first answer that differs from the model's, with the steps that led to it.
pub fn any_change_is_followed<H: Harness>() -> Result<(), Failure> {
    for seed in 1..=4 {
        let mut walker = Walker::<H> {
            harness: Some(H::open()),
            chance: Chance(seed),
            shadow: Shadow::default(),
            possible: vec![Shadow::default()],
            next: 1,
            log: Vec::new(),
        };
        for _ in 0..STEPS {
            walker.step().map_err(|failure| {
                let steps = walker.log.iter().rev().take(4).rev();
                let steps: Vec<&str> = steps.map(String::as_str).collect();
                let count = walker.log.len();
                let steps = steps.join("\n  ");
                failure.at(format_args!(
                    "seed {seed}, after {count} steps, of which the last are\n  {steps}\n"
                ))
            })?;
        }
    }
    Ok(())
}

impl<H: Harness> Walker<H> {
    fn store(&self) -> Result<&H::Store, Failure> {
        let harness = self.harness.as_ref().ok_or_else(|| Failure::new("there is no store"))?;
        Ok(harness.store())
    }

    fn step(&mut self) -> Result<(), Failure> {
        let changes = self.changes()?;
        let way = self.chance.of([
            "apply",
            "apply_seen",
            "transact",
            "write",
            "run",
            "twice",
            "dropped",
            "rolled back",
        ]);
        let may_be_lost = self.chance.once_in(4);
        let lost = if may_be_lost { " (may be lost)" } else { "" };
        self.log.push(format!("{way}{lost}: {}", described(&changes)));
        let query = self.question(&changes);
        let fixed = Fixed { query: query.clone(), batch: changes, may_be_lost };
        let decision = fixed.decide(Millis::new(0), &Rows::default());
        let Ok(Decision { batch, .. }) = decision;
        let mut after = self.shadow.clone();
        let holds = after.apply(&batch);
        let now = Millis::new(0);
        let store = self.store()?;
        let mut committed = holds.is_ok();
        match way {
            "transact" | "rolled back" => {
                let keep = committed && way == "transact";
                let mut found = None;
                let ended = store.transact(|tx| {
                    found = Some(tx.apply(&batch));
                    if keep { twobox::End::Commit(()) } else { twobox::End::RollBack(()) }
                });
                ended.map_err(Failure::store)?;
                committed = keep;
                let found =
                    found.ok_or_else(|| Failure::new("transact has not called the work"))?;
                applied(&mut self.shadow.clone(), &batch, found.map_err(Failure::store)?)?;
            }
            "write" => {
                let ended = store.write(now, |tx| tx.run(&fixed));
                self.ended(ended.map_err(twobox::RunError::flatten), &holds)?;
            }
            "run" => self.ended(store.run(&fixed, now), &holds)?,
            _ => {
                let mut tx = store.begin().map_err(Failure::store)?;
                let found = if way == "apply_seen" {
                    let rows = load(&mut tx, &query)?;
                    tx.apply_seen(&batch, &Seen { query: &query, rows: &rows })
                } else {
                    tx.apply(&batch)
                };
                applied(&mut self.shadow.clone(), &batch, found.map_err(Failure::store)?)?;
                if committed && self.chance_of(5) {
                    after.check(&mut tx, &[], "within the transaction")?;
                }
                committed &= way != "dropped";
                if committed && way == "twice" {
                    // The same rows once more: what was inserted is updated, and so on.
                    let again = self.again(&batch, &after)?;
                    applied(&mut after, &again, tx.apply(&again).map_err(Failure::store)?)?;
                }
                if committed {
                    tx.commit().map_err(Failure::store)?;
                }
            }
        }
        if committed && !batch.is_empty() {
            self.shadow = after;
            // What was written twice was written once for good.
            if !may_be_lost || way == "twice" {
                self.possible.clear();
            }
            self.possible.push(self.shadow.clone());
        }
        self.shadow.check(&mut self.store()?.view().map_err(Failure::store)?, &[2], "after it")?;
        if self.chance.once_in(4) { self.crash() } else { Ok(()) }
    }

    /// A number that does not change what comes later, for a look that is not always taken.
    fn chance_of(&self, times: usize) -> bool {
        self.log.len().is_multiple_of(times)
    }

    /// How `run` or `write` must end.
    fn ended<E: twobox::StoreError>(
        &self,
        ended: Result<(), twobox::RunError<E, core::convert::Infallible>>,
        holds: &Result<(), Key>,
    ) -> Result<(), Failure> {
        match (ended, holds) {
            (Ok(()), Ok(())) | (Err(twobox::RunError::Conflict(_)), Err(_)) => Ok(()),
            (Ok(()), Err(key)) => Err(Failure::new(format_args!(
                "the guard of {key} does not hold, and it is said to be committed"
            ))),
            (Err(error), _) => Err(Failure::store(error)),
        }
    }

    fn crash(&mut self) -> Result<(), Failure> {
        self.log.push("a crash".to_string());
        self.harness = self.harness.take().map(Harness::crash);
        // The last one that it can be; what differs is said of the one before the crash.
        let is = |shadow: &Shadow| {
            let mut view = self.store()?.view().map_err(Failure::store)?;
            shadow.check(&mut view, &[], "after a crash")
        };
        match self.possible.iter().rev().find(|shadow| is(shadow).is_ok()).cloned() {
            Some(kept) => self.shadow = kept,
            None => is(&self.shadow)?,
        }
        self.possible = vec![self.shadow.clone()];
        Ok(())
    }

    /// The rows of a batch, written once more.
    fn again(&self, first: &Batch, after: &Shadow) -> Result<Batch, Failure> {
        let changes = first.changes().iter().filter_map(|change| {
            let row = after.get(&change.key())?;
            Some(put(Expect::Revision(row.revision), row.record.clone()))
        });
        batch(changes.collect())
    }

    /// A question before the write, which sees the rows of the batch or others.
    fn question(&mut self, batch: &Batch) -> Query {
        let keys = batch.changes().iter().map(Change::key);
        match self.chance.below(4) {
            0 => Query::none(),
            1 => Query::rows(keys),
            2 => Query::rows(keys.skip(1)),
            _ => {
                let events = self.shadow.rows().filter_map(|row| {
                    if let Record::Event(row) = &row.record {
                        Some(row.event.id.clone())
                    } else {
                        None
                    }
                });
                Query::Deliveries { events: events.collect(), run: 3 }
            }
        }
    }

    /// A few changes, such that a lane is there for each event, and what is pending has a time.
    fn changes(&mut self) -> Result<Batch, Failure> {
        let mut wanted: Vec<(Key, State)> = Vec::new();
        for _ in 0..1 + self.chance.below(5) {
            match self.chance.below(8) {
                0..=1 => self.new_event(&mut wanted)?,
                2..=3 => self.outbox(&mut wanted)?,
                4 => self.event_goes(&mut wanted),
                5 => self.lane(&mut wanted)?,
                _ => self.other(&mut wanted)?,
            }
        }
        let mut changes = Vec::new();
        let mut planned = self.shadow.clone();
        for (key, state) in wanted {
            let change = to(&self.shadow, &key, state);
            if changes.iter().all(|other: &Change| other.key() != key)
                && let Some(change) = change
            {
                let _planned = planned.apply(&batch(vec![change.clone()])?);
                changes.push(change);
            }
        }
        self.lanes_follow(&planned, &mut changes)?;
        if self.chance.once_in(6) && !changes.is_empty() {
            let at = self.chance.below(changes.len());
            changes[at] = self.wrong(changes[at].clone());
        } else if self.chance.once_in(5) {
            self.edit(&mut changes)?;
        }
        batch(changes)
    }

    fn new_event(&mut self, wanted: &mut Vec<(Key, State)>) -> Result<(), Failure> {
        let lane = self.chance.of(NAMES);
        // The id of one that was there, or was not committed, comes again with something else.
        let id = format!("e{:02}", self.chance.below(40));
        if self.shadow.get(&Key::Event(EventId::new(&id).map_err(Failure::new)?)).is_some() {
            return Ok(());
        }
        let event =
            rows::event_in(&id, lane, self.next, rows::body(vec![7; self.chance.below(9)])?)?;
        self.next += 1 + self.chance.below(2) as u64;
        wanted.push((event.key(), Some(event)));
        Ok(())
    }

    /// An event that is there.
    fn some_event(&mut self) -> Option<(EventId, LaneKey, u64)> {
        let events = self.shadow.rows().filter_map(|row| {
            let Record::Event(row) = &row.record else { return None };
            Some((row.event.id.clone(), row.event.lane(), row.sequence))
        });
        let events: Vec<_> = events.collect();
        (!events.is_empty()).then(|| events[self.chance.below(events.len())].clone())
    }

    fn outbox(&mut self, wanted: &mut Vec<(Key, State)>) -> Result<(), Failure> {
        let Some((id, lane, place)) = self.some_event() else { return Ok(()) };
        let at = Millis::new(self.chance.below(100) as u64);
        let dead = DeliveryState::Dead(at);
        let states = [DeliveryState::Pending, DeliveryState::Pending, dead, dead];
        let others = [DeliveryState::Discarded(at), DeliveryState::Cancelled(at)];
        let state =
            if self.chance.once_in(3) { self.chance.of(others) } else { self.chance.of(states) };
        let moved = self.chance.once_in(2);
        let sequence = if moved { self.next } else { place };
        self.next += 1;
        let made = rows::outbox(id.as_str(), &rows::lane_text(&lane), sequence, state)?;
        if let Record::Outbox(id, row) = made {
            let gone = self.chance.once_in(5);
            let row = (!gone).then(|| Record::Outbox(id.clone(), OutboxRow { moved, ..row }));
            wanted.push((Key::Outbox(id), row));
        }
        Ok(())
    }

    fn event_goes(&mut self, wanted: &mut Vec<(Key, State)>) {
        if let Some((id, _, _)) = self.some_event() {
            wanted.push((Key::Event(id.clone()), None));
            wanted.push((Key::Outbox(id), None));
        }
    }

    fn lane(&mut self, wanted: &mut Vec<(Key, State)>) -> Result<(), Failure> {
        let name = self.chance.of(NAMES);
        let due = Some(Millis::new(self.chance.below(100) as u64));
        let Record::Lane(key, row) = rows::lane(name, due)? else { return Ok(()) };
        let head = 1 + self.chance.below(self.next as usize) as u64;
        let row = LaneRow { head, next: self.next + 50, ..row };
        let owner = Owner::new("relay-1").map_err(Failure::new)?;
        let lease = due.map(|until| Lease { owner, until, through: head + 1 });
        let blocked_by = Some(EventId::new("dead").map_err(Failure::new)?);
        let row = match self.chance.below(4) {
            0 => LaneRow { blocked_by, due: None, ..row },
            1 | 2 => LaneRow { lease, token: self.chance.below(3) as u64, ..row },
            _ => row,
        };
        wanted.push((Key::Lane(key.clone()), Some(Record::Lane(key, row))));
        Ok(())
    }

    fn other(&mut self, wanted: &mut Vec<(Key, State)>) -> Result<(), Failure> {
        let name = self.chance.of(NAMES);
        let made = match self.chance.below(3) {
            0 => {
                let order = rows::order(name, rows::body(name)?)?;
                vec![order, rows::effect("loyalty", name, rows::body("an effect")?)?]
            }
            1 => vec![rows::position("loyalty", name)?],
            _ => {
                let states = other_states(name)?.into_iter();
                let states = states.map(|of| of[self.chance.below(of.len())].clone());
                states.flatten().collect()
            }
        };
        let gone = self.chance.once_in(3);
        wanted.extend(made.into_iter().map(|record| (record.key(), (!gone).then_some(record))));
        Ok(())
    }

    /// Each lane with an event is there, and if something is pending in it, it is due or blocked.
    /// With an event goes its row in the outbox.
    fn lanes_follow(&self, planned: &Shadow, changes: &mut Vec<Change>) -> Result<(), Failure> {
        let stored = planned.stored();
        let used = stored.iter().filter_map(|row| {
            if let Record::Event(row) = &row.record { Some(row.event.lane()) } else { None }
        });
        let mut used: Vec<LaneKey> = used.collect();
        for row in &stored {
            let Record::Outbox(id, _) = &row.record else { continue };
            if planned.get(&Key::Event(id.clone())).is_none() {
                let key = row.record.key();
                changes.retain(|change| change.key() != key);
                changes.extend(to(&self.shadow, &key, None));
            }
        }
        used.sort_unstable();
        used.dedup();
        for key in used {
            let lane = Key::Lane(key.clone());
            let there = planned.get(&lane).map(|row| row.record.clone());
            let new = rows::lane(&rows::lane_text(&key), Some(Millis::new(7)))?;
            let row = match (there, new) {
                (Some(Record::Lane(_, row)), _) => row,
                (None, Record::Lane(_, row)) => LaneRow { head: 1, next: self.next + 50, ..row },
                (Some(_) | None, _) => continue,
            };
            let mut fixed = row.clone();
            if fixed.blocked_by.is_none() && fixed.due.is_none() {
                fixed.due = Some(Millis::new(self.next));
            }
            if planned.get(&lane).is_none() || fixed != row {
                changes.retain(|change| change.key() != lane);
                changes.extend(to(&self.shadow, &lane, Some(Record::Lane(key, fixed))));
            }
        }
        Ok(())
    }

    /// A change whose guard does not hold.
    fn wrong(&mut self, change: Change) -> Change {
        let other = self.chance.below(3) as u64;
        let not = |revision: Revision| Revision::from_stored(revision.get() + 1 + other);
        match change {
            Change::Put { expect: Expect::Absent, record } => {
                put(Expect::Revision(Revision::from_stored(1 + other)), record)
            }
            Change::Put { expect: Expect::Revision(at), record } => {
                let expect = if other == 0 { Expect::Absent } else { Expect::Revision(not(at)) };
                put(expect, record)
            }
            Change::Delete { expect, key } => Change::Delete { expect: not(expect), key },
            lane @ Change::Lane { .. } => lane,
        }
    }

    /// A lane changes under a token, which is the right one or not.
    fn edit(&mut self, changes: &mut Vec<Change>) -> Result<(), Failure> {
        let key = rows::lane_key(self.chance.of(NAMES))?;
        let Some(Record::Lane(_, row)) =
            self.shadow.get(&Key::Lane(key.clone())).map(|row| &row.record)
        else {
            return Ok(());
        };
        let time = |n: usize| Millis::new(n as u64);
        let (token, next, head) = (row.token, row.next, row.head);
        let token = if self.chance.once_in(4) { token + 1 } else { token };
        let edit = if self.chance.once_in(3) {
            LaneEdit::Renew { until: time(self.chance.below(200)) }
        } else {
            let blocked_by = Some(EventId::new("dead").map_err(Failure::new)?);
            LaneEdit::Free {
                head: self.chance.of([head, head + 1, next - 1, next - 1, next + 1]),
                confirmed: head,
                starts: 3,
                due: time(self.chance.below(100)),
                blocked_by: blocked_by.filter(|_| self.chance.once_in(4)),
            }
        };
        let lane = Key::Lane(key.clone());
        changes.retain(|change| change.key() != lane);
        changes.push(Change::Lane { key, token, edit, at: time(90) });
        Ok(())
    }
}
