//! What can happen next in a world, and what it comes to.

use core::num::NonZeroU16;
use core::time::Duration;

use twobox::{
    Applied, Batch, Body, Cancel, Claim, Claimed, CommitRefused, CountFailure, DeliveryPolicy,
    DeliveryState, Discard, Ending, Event, InboxState, Key, Load, Millis, Purge, Reason, Receive,
    Received, Record, Redrive, Register, Registered, Renew, Retention, Rows, RunResult, Settle,
    Settled, Store, Table, Tables, Transaction, Transition,
};
use twobox_memory::{MemoryStore, State};

use crate::bug::Bug;
use crate::judge::Judged;
use crate::machine::Input;
use crate::scope::{Params, Scope, body, consumer, envelope, event_id, lane_of, number_of, owner};
use crate::world::{Copy, Held, Promise, World};

/// What a relay hears of a publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Answer {
    /// The broker has it.
    Confirmed,
    /// The broker has it, and the relay hears that it failed.
    Lost,
    /// It failed.
    Failed,
    /// The broker will never take it.
    Rejected,
    /// The broker is away.
    Unavailable,
}

/// One thing that happens. Lanes are named by one of their events.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the fields are what they are named")]
pub enum Step {
    /// A client registers a request.
    Register { request: u8, params: Params },
    /// A client commits an order.
    Commit { request: u8, params: Params },
    /// A relay claims, and gets the answer or crashes before.
    Claim { relay: u8, answered: bool },
    /// A relay publishes the next event of a run.
    Publish { relay: u8, lane: String, answer: Answer },
    /// A relay settles a run as far as it is, and gets the answer or not.
    Settle { relay: u8, lane: String, answered: bool },
    /// A relay renews a lease.
    Renew { relay: u8, lane: String },
    /// A relay forgets everything.
    Crash { relay: u8 },
    /// Something happens to a relay that is a machine.
    Machine { machine: u8, input: Input },
    /// The network delivers a copy, and the consumer applies it in a commit.
    Deliver { copy: Copy, consumer: u8 },
    /// Other content arrives under an id that the consumer has received.
    DeliverOther { event: u8, consumer: u8 },
    /// The network delivers a copy, and the consumer fails on it.
    Fail { copy: Copy, consumer: u8 },
    /// The operator cancels a pending event.
    Cancel { event: u8 },
    /// The operator redrives a dead event.
    Redrive { event: u8 },
    /// The operator discards a dead event.
    Discard { event: u8 },
    /// A table is purged.
    Purge(Table),
    /// A tick of the clock.
    Tick,
    /// The clock steps back by a tick.
    StepBack,
    /// The first one reads, then the second one happens, then the first one goes on with what it
    /// has read.
    Rival(Box<Step>, Box<Step>),
}

/// An event with the id of another one.
pub(crate) fn other_content(event: u8) -> Event {
    Event { body: body(event + 100), ..envelope(event) }
}

pub(crate) enum Ran<T: Transition> {
    Done(T::Outcome),
    Refused(T::Refusal),
    Conflict,
}

impl World {
    /// All steps that may do something.
    pub(crate) fn steps(&self, scope: &Scope, steps: &mut Vec<Step>) {
        for request in 0..scope.requests {
            let placed = self.ghost.placed[usize::from(request)];
            if self.ghost.bound[usize::from(request)].is_none() {
                steps.push(Step::Register { request, params: Params::First });
            }
            if !placed || scope.other_params {
                steps.push(Step::Commit { request, params: Params::First });
            }
            if scope.other_params {
                steps.push(Step::Register { request, params: Params::Other });
                steps.push(Step::Commit { request, params: Params::Other });
                if placed {
                    steps.push(Step::Commit { request, params: Params::FreshOrder });
                }
            }
        }
        for relay in 0..scope.relays {
            self.relay_steps(relay, steps);
        }
        for machine in 0..scope.machines {
            self.machine_steps(machine, steps);
        }
        for consumer in 0..scope.consumers {
            for copy in &self.network {
                steps.push(Step::Deliver { copy: *copy, consumer });
                if self.faults > 0
                    && (!scope.in_order
                        || (copy.place.after == 0
                            || (copy.place.begun, copy.place.after)
                                <= self.position(copy.event, consumer)))
                {
                    steps.push(Step::Fail { copy: *copy, consumer });
                }
            }
            if scope.other_params {
                let received = scope
                    .events
                    .iter()
                    .copied()
                    .filter(|event| self.inbox(*event, consumer).is_some());
                steps.extend(received.map(|event| Step::DeliverOther { event, consumer }));
            }
        }
        if self.operations > 0 {
            for record in self.db.table(Table::Outbox) {
                if let Record::Outbox(id, row) = record
                    && let Some(event) = number_of(&id)
                {
                    match row.state {
                        DeliveryState::Pending => steps.push(Step::Cancel { event }),
                        DeliveryState::Dead(_) => {
                            steps.extend([Step::Redrive { event }, Step::Discard { event }]);
                        }
                        DeliveryState::Confirmed(_)
                        | DeliveryState::Discarded(_)
                        | DeliveryState::Cancelled(_) => {}
                    }
                }
            }
        }
        steps.extend(scope.purges.iter().map(|table| Step::Purge(*table)));
        if scope.rivals {
            let atomic: Vec<Step> =
                steps.iter().filter(|step| step.is_transaction()).cloned().collect();
            for first in &atomic {
                // A relay has one transaction at a time.
                for second in atomic
                    .iter()
                    .filter(|second| first.relay().is_none() || first.relay() != second.relay())
                {
                    steps.push(Step::Rival(Box::new(first.clone()), Box::new(second.clone())));
                }
            }
        }
        if self.now < scope.ticks * scope.tick && self.may_tick(scope) {
            steps.push(Step::Tick);
        }
        if scope.clock_back && !self.stepped_back && self.now > 0 {
            steps.push(Step::StepBack);
        }
    }

    fn relay_steps(&self, relay: u8, steps: &mut Vec<Step>) {
        let faulty = self.faults > 0;
        steps.push(Step::Claim { relay, answered: true });
        if faulty {
            steps.push(Step::Claim { relay, answered: false });
        }
        for (lane, held) in &self.relays[usize::from(relay)] {
            let lane = || lane.clone();
            if !held.asked && held.ended.is_none() && held.confirmed < held.deliveries.len() {
                steps.push(Step::Publish { relay, lane: lane(), answer: Answer::Confirmed });
                if faulty {
                    for answer in
                        [Answer::Lost, Answer::Failed, Answer::Rejected, Answer::Unavailable]
                    {
                        steps.push(Step::Publish { relay, lane: lane(), answer });
                    }
                }
            }
            // To give back what was not tried is what a relay does when it stops, which counts as a
            // fault.
            let released = held.confirmed == 0 && held.ended.is_none() && !held.asked;
            if !released || faulty {
                steps.push(Step::Settle { relay, lane: lane(), answered: true });
            }
            if faulty && !released && !held.asked {
                steps.push(Step::Settle { relay, lane: lane(), answered: false });
            }
            if !held.asked {
                steps.push(Step::Renew { relay, lane: lane() });
            }
        }
        if faulty && !self.relays[usize::from(relay)].is_empty() {
            steps.push(Step::Crash { relay });
        }
    }

    /// Whether the world keeps to the longest retry if the clock goes on.
    fn may_tick(&self, scope: &Scope) -> bool {
        let Some(longest) = scope.longest_retry else { return true };
        self.db.table(Table::Outbox).all(|record| {
            let Record::Outbox(id, row) = record else { return true };
            let since = number_of(&id).map_or(0, |event| self.ghost.since[usize::from(event)]);
            row.state != DeliveryState::Pending
                || (self.now + scope.tick).saturating_sub(since) <= longest * scope.tick
        })
    }

    pub(crate) fn inbox(&self, event: u8, number: u8) -> Option<InboxState> {
        match self.db.row(Key::Inbox(consumer(number), event_id(event))) {
            Some(Record::Inbox(_, _, row)) => Some(row.state),
            _ => None,
        }
    }

    fn position(&self, event: u8, number: u8) -> (Millis, u64) {
        match self.db.row(Key::Position(consumer(number), lane_of(event))) {
            Some(Record::Position(_, _, row)) => (row.begun, row.sequence),
            _ => (Millis::new(0), 0),
        }
    }

    /// The world after a step; `None` if it cannot happen or comes to nothing new.
    pub(crate) fn after(&self, scope: &Scope, step: &Step) -> Option<Self> {
        let mut after = self.clone();
        if let Step::Rival(first, second) = step {
            after.perform(scope, second, &self.db.0)?;
            after.wrote = false;
            after.perform(scope, first, &self.db.0)?;
            if !after.wrote {
                // It is as if it had come first.
                return None;
            }
        } else {
            after.perform(scope, step, &self.db.0)?;
        }
        after.wrote = false;
        Some(after)
    }

    /// Runs a transition: it decides over what it read in `view`, and the batch is applied to what
    /// is there now.
    pub(crate) fn run<T: Transition>(
        &mut self,
        scope: &Scope,
        step: &Step,
        view: &State,
        token: Option<u64>,
        transition: &T,
    ) -> Ran<T> {
        let at = if scope.bug == Some(Bug::IgnoreLease) { Millis::MAX } else { self.time() };
        let Ok(rows) = view.clone().load(&transition.query(at));
        let rows = match scope.bug {
            None => rows,
            Some(bug) => {
                let mut rows = rows.into_vec();
                bug.rows(step, token, &mut rows);
                Rows::new(rows)
            }
        };
        let decision = match transition.decide(self.time(), &rows) {
            Ok(decision) => decision,
            Err(refusal) => return Ran::Refused(refusal),
        };
        let batch = match scope.bug {
            None => decision.batch,
            Some(bug) => {
                let mut changes = decision.batch.changes().to_vec();
                bug.changes(step, &mut changes);
                crate::scope::named(Batch::of(changes))
            }
        };
        if batch.is_empty() {
            return Ran::Done(decision.outcome);
        }
        let store = MemoryStore::from_state(self.db.0.clone());
        let Ok(mut tx) = store.begin();
        let Ok(applied) = tx.apply(&batch);
        match applied {
            Applied::Conflict(_) => Ran::Conflict,
            Applied::Written => {
                let Ok(()) = tx.commit();
                self.wrote = true;
                let before = std::mem::replace(&mut self.db.0, store.state());
                self.judge_change(scope, step, before);
                Ran::Done(decision.outcome)
            }
        }
    }

    pub(crate) fn perform(&mut self, scope: &Scope, step: &Step, view: &State) -> Option<()> {
        match step {
            Step::Register { request, params } => {
                let asked = Scope::request(*request, *params);
                match self.run(scope, step, view, None, &Register::new(&asked)) {
                    Ran::Done(registered) => {
                        self.judge_params(*request, *params, true);
                        let placed = self.ghost.placed[usize::from(*request)];
                        self.break_unless(
                            Promise::P1,
                            placed == matches!(registered, Registered::Placed(_)),
                        );
                    }
                    Ran::Refused(_) => self.judge_params(*request, *params, false),
                    Ran::Conflict => return None,
                }
            }
            Step::Commit { request, params } => {
                self.commit(scope, step, view, *request, *params)?;
            }
            Step::Claim { relay, answered } => {
                self.spend(*answered)?;
                let claim =
                    Claim::new(&scope.policy, owner(*relay), Duration::from_millis(Scope::TICK), 4);
                let claim = crate::scope::named(claim).run(2);
                let before = self.db.clone();
                match self.run(scope, step, view, None, &claim) {
                    Ran::Done(claimed) => {
                        self.judge_claim(view, &before, &claimed);
                        self.take(*relay, claimed, *answered);
                    }
                    Ran::Refused(never) => match never {},
                    Ran::Conflict => return None,
                }
            }
            Step::Publish { relay, lane, answer } => {
                self.spend(*answer == Answer::Confirmed)?;
                self.publish(*relay, lane, *answer)?;
            }
            Step::Settle { relay, lane, answered } => {
                let held = self.relays[usize::from(*relay)].get(lane)?;
                let released = held.confirmed == 0 && held.ended.is_none() && !held.asked;
                self.spend(*answered && !released)?;
                self.settle(scope, step, view, (*relay, lane), *answered)?;
            }
            Step::Renew { relay, lane } => {
                let held = self.relays[usize::from(*relay)].get(lane)?.clone();
                let before = self.db.0.clone();
                let renew = Renew::new([held.lease.clone()], Duration::from_millis(Scope::TICK));
                match self.run(scope, step, view, Some(held.lease.token), &renew) {
                    Ran::Done(renewed) => {
                        let judged =
                            if renewed.stale.is_empty() { Judged::Current } else { Judged::Stale };
                        self.judge_lease(&held, judged, before != self.db.0);
                        if judged == Judged::Stale {
                            self.relays[usize::from(*relay)].remove(lane);
                        }
                    }
                    Ran::Refused(never) => match never {},
                    Ran::Conflict => return None,
                }
            }
            Step::Crash { relay } => {
                self.spend(false)?;
                self.relays[usize::from(*relay)].clear();
            }
            Step::Machine { machine, input } => self.machine_step(scope, *machine, input)?,
            Step::Deliver { copy, consumer } => {
                self.deliver(scope, step, view, *copy, *consumer)?;
            }
            Step::DeliverOther { event, consumer: number } => {
                let before = self.db.0.clone();
                let receive = Receive::new(consumer(*number), &other_content(*event));
                let refused =
                    matches!(self.run(scope, step, view, None, &receive), Ran::Refused(_));
                self.break_unless(Promise::P5, refused && before == self.db.0);
            }
            Step::Fail { copy, consumer: number } => {
                self.spend(false)?;
                // The handler failed, so it had run: the event was next.
                let limit = scope.max_failures;
                let mut count = CountFailure::new(
                    consumer(*number),
                    &envelope(copy.event),
                    Reason::new("no"),
                    limit,
                );
                if scope.in_order {
                    count = count.in_order(lane_of(copy.event), copy.place);
                }
                match self.run(scope, step, view, None, &count) {
                    Ran::Done(_) => {}
                    Ran::Refused(_) => self.break_unless(Promise::P5, false),
                    Ran::Conflict => return None,
                }
            }
            Step::Cancel { event } => {
                let cancel =
                    crate::scope::named(Cancel::new([event_id(*event)], Reason::new("no")));
                self.operate(scope, step, view, &cancel)?;
            }
            Step::Redrive { event } => {
                let window = scope.retention.redrive_window(&scope.policy);
                let redrive = crate::scope::named(Redrive::new([event_id(*event)], window));
                self.operate(scope, step, view, &redrive)?;
                if scope.longest_retry.is_some() {
                    self.ghost.since[usize::from(*event)] = self.now;
                }
            }
            Step::Discard { event } => {
                let discard =
                    crate::scope::named(Discard::new([event_id(*event)], Reason::new("no")));
                self.operate(scope, step, view, &discard)?;
            }
            Step::Purge(table) => {
                // Checked against a policy by which nobody retries.
                let hasty = || {
                    let ms = Duration::from_millis(1);
                    let policy = DeliveryPolicy {
                        backoff_base: ms,
                        backoff_cap: ms,
                        ..scope.policy.as_ref().clone()
                    }
                    .checked()?;
                    Retention { inbox: ms * 10, ..scope.retention.as_ref().clone() }
                        .checked(&policy)
                };
                let early =
                    (scope.bug == Some(Bug::PurgeEarly)).then(|| crate::scope::named(hasty()));
                let retention = early.as_ref().unwrap_or(&scope.retention);
                let purge = Purge::new(retention, *table, NonZeroU16::MAX);
                match self.run(scope, step, view, None, &purge) {
                    Ran::Done(_) => {}
                    Ran::Refused(never) => match never {},
                    Ran::Conflict => return None,
                }
            }
            Step::Tick => {
                self.now += scope.tick;
                if scope.longest_retry.is_some() {
                    self.network.clear();
                    self.relays.iter_mut().for_each(|relay| relay.retain(|_, held| !held.stale));
                }
            }
            Step::StepBack => {
                self.now = self.now.checked_sub(scope.tick)?;
                self.stepped_back = true;
            }
            Step::Rival(..) => return None,
        }
        Some(())
    }

    /// Takes a fault from what is left of them, unless nothing goes wrong.
    pub(crate) fn spend(&mut self, well: bool) -> Option<()> {
        if !well {
            self.faults = self.faults.checked_sub(1)?;
        }
        Some(())
    }

    fn commit(
        &mut self,
        scope: &Scope,
        step: &Step,
        view: &State,
        request: u8,
        params: Params,
    ) -> Option<()> {
        let asked = Scope::request(request, params);
        let at = usize::from(request);
        match self.run(scope, step, view, None, &scope.commit(&asked, request, params)) {
            Ran::Done(committed) => {
                self.judge_params(request, params, true);
                self.break_unless(Promise::P1, committed.repeated == self.ghost.placed[at]);
                self.break_unless(
                    Promise::P1,
                    committed.placed.order.as_str() == format!("o{request}"),
                );
                self.ghost.placed[at] = true;
                if !committed.repeated {
                    for event in scope
                        .events
                        .iter()
                        .copied()
                        .filter(|event| crate::scope::order_of(*event) == request)
                    {
                        // Whether all of them are there is for P2 to say.
                        if self.db.row(Key::Outbox(event_id(event))).is_none() {
                            continue;
                        }
                        self.ghost.committed |= 1 << event;
                        if scope.longest_retry.is_some() {
                            self.ghost.since[usize::from(event)] = self.now;
                        }
                    }
                }
            }
            Ran::Refused(CommitRefused::ParametersDiffer(_)) => {
                self.judge_params(request, params, false);
            }
            // The request was forgotten, the order is still there: it is not placed again.
            Ran::Refused(CommitRefused::OrderIdTaken { .. }) => {
                let known = self.ghost.bound[at].is_some() && self.ghost.placed[at];
                let there = self
                    .db
                    .row(Key::Order(crate::scope::named(twobox::OrderId::new(format!(
                        "o{request}"
                    )))))
                    .is_some();
                self.break_unless(Promise::P1, !known && there);
            }
            Ran::Refused(CommitRefused::EventIdTaken { .. }) => {
                self.break_unless(Promise::P2, false);
            }
            Ran::Conflict => return None,
        }
        Some(())
    }

    fn take(&mut self, relay: u8, claimed: Claimed, answered: bool) {
        // With an event that is given up, the lease of its lane has ended too.
        for lane in claimed.dead.iter().filter_map(number_of).map(lane_of) {
            for relay in &mut self.relays {
                relay.get_mut(lane.as_str()).into_iter().for_each(|held| held.stale = true);
            }
        }
        for run in claimed.runs {
            let lane = run.lease.lane.as_str().to_string();
            for relay in &mut self.relays {
                if let Some(held) = relay.get_mut(&lane) {
                    held.stale = true;
                }
            }
            if answered {
                let deliveries = run.deliveries.iter();
                let deliveries = deliveries
                    .filter_map(|d| number_of(&d.event).map(|event| (event, self.place(d.place))))
                    .collect();
                let held = Held {
                    lease: run.lease,
                    deliveries,
                    confirmed: 0,
                    ended: None,
                    asked: false,
                    stale: false,
                };
                self.relays[usize::from(relay)].insert(lane, held);
            }
        }
        if !answered {
            // It crashed.
            self.relays[usize::from(relay)].clear();
        }
    }

    fn publish(&mut self, relay: u8, lane: &str, answer: Answer) -> Option<()> {
        let held = self.relays[usize::from(relay)].get(lane)?;
        let (event, place) = *held.deliveries.get(held.confirmed)?;
        let there = self.db.row(Key::Event(event_id(event))).is_some();
        if there && matches!(answer, Answer::Confirmed | Answer::Lost) {
            self.judge_publish(event, place.sequence);
            self.network.insert(Copy { event, place });
        }
        let held = self.relays[usize::from(relay)].get_mut(lane)?;
        match answer {
            // What has no envelope cannot be published; only a relay whose lease has ended can meet
            // that.
            Answer::Confirmed if !there => {
                let current = !held.stale;
                held.ended = Some(Answer::Rejected);
                self.break_unless(Promise::P3, !current);
            }
            Answer::Confirmed => {
                held.confirmed += 1;
                self.ghost.broker |= 1 << event;
            }
            Answer::Lost => held.ended = Some(Answer::Failed),
            Answer::Failed | Answer::Rejected | Answer::Unavailable => held.ended = Some(answer),
        }
        Some(())
    }

    fn settle(
        &mut self,
        scope: &Scope,
        step: &Step,
        view: &State,
        (relay, lane): (u8, &str),
        answered: bool,
    ) -> Option<()> {
        let held = self.relays[usize::from(relay)].get(lane)?.clone();
        let events: Vec<_> = held.deliveries.iter().map(|(event, _)| event_id(*event)).collect();
        let ended = held.ended.map(|answer| {
            let reason = Reason::new("no");
            let ending = match answer {
                Answer::Rejected => Ending::Rejected(reason),
                Answer::Unavailable => Ending::Unavailable(reason),
                Answer::Failed | Answer::Lost | Answer::Confirmed => Ending::Failed(reason),
            };
            (events[held.confirmed].clone(), ending)
        });
        let result = RunResult {
            lease: held.lease.clone(),
            confirmed: events[..held.confirmed].to_vec(),
            ended,
        };
        let before = self.db.0.clone();
        let outcome: Settled = match self.run(
            scope,
            step,
            view,
            Some(held.lease.token),
            &Settle::new(&scope.policy, [result]),
        ) {
            Ran::Done(settled) => settled,
            Ran::Refused(never) => match never {},
            Ran::Conflict => return None,
        };
        let judged = if outcome.stale.is_empty() { Judged::Current } else { Judged::Stale };
        self.judge_lease(&held, judged, before != self.db.0);
        let runs = &mut self.relays[usize::from(relay)];
        if answered {
            runs.remove(lane);
        } else {
            runs.insert(lane.to_string(), Held { asked: true, stale: true, ..held });
        }
        Some(())
    }

    fn deliver(
        &mut self,
        scope: &Scope,
        step: &Step,
        view: &State,
        copy: Copy,
        number: u8,
    ) -> Option<()> {
        let mut receive =
            Receive::new(consumer(number), &envelope(copy.event)).effect(effect(copy.event));
        if scope.in_order {
            receive = receive.in_order(lane_of(copy.event), copy.place);
        }
        match self.run(scope, step, view, None, &receive) {
            Ran::Done(Received::Applied) => self.judge_applied(scope, copy, number),
            Ran::Done(Received::Duplicate) => {
                let applied = self.ghost.applied[usize::from(number)] & (1 << copy.event) != 0;
                self.break_unless(Promise::P5, applied);
            }
            Ran::Done(Received::Poisoned | Received::WaitsFor(_)) => {}
            Ran::Refused(_) => self.break_unless(Promise::P5, false),
            Ran::Conflict => return None,
        }
        Some(())
    }

    fn operate<T>(&mut self, scope: &Scope, step: &Step, view: &State, operation: &T) -> Option<()>
    where
        T: Transition<Outcome = twobox::Operated, Refusal = core::convert::Infallible>,
    {
        self.operations = self.operations.checked_sub(1)?;
        match self.run(scope, step, view, None, operation) {
            // What was refused has changed nothing, and is not worth a state.
            Ran::Done(operated) => (!operated.done.is_empty()).then_some(()),
            Ran::Refused(never) => match never {},
            Ran::Conflict => None,
        }
    }
}

pub(crate) fn effect(event: u8) -> Body {
    body(event + 50)
}

impl Step {
    fn relay(&self) -> Option<u8> {
        if let Self::Claim { relay, .. } | Self::Settle { relay, .. } | Self::Renew { relay, .. } =
            self
        {
            Some(*relay)
        } else {
            None
        }
    }

    /// Whether it is a transaction.
    fn is_transaction(&self) -> bool {
        match self {
            Self::Register { .. }
            | Self::Commit { .. }
            | Self::Claim { .. }
            | Self::Settle { .. }
            | Self::Renew { .. }
            | Self::Deliver { .. }
            | Self::DeliverOther { .. }
            | Self::Fail { .. }
            | Self::Cancel { .. }
            | Self::Redrive { .. }
            | Self::Discard { .. }
            | Self::Purge(_) => true,
            Self::Publish { .. }
            | Self::Crash { .. }
            | Self::Machine { .. }
            | Self::Tick
            | Self::StepBack
            | Self::Rival(..) => false,
        }
    }
}
