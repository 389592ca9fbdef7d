//! What can happen next in a world, and what it comes to.

use core::num::NonZeroU16;
use core::time::Duration;

use twobox::flow::{ExchangeFlow, Exchanged, Flow, RunFlow};
use twobox::store::{NoCall, drive};
use twobox::{
    Body, Cancel, Claim, Claimed, CommitRefused, DeliveryPolicy, Discard, Ending, Event, Handled,
    Inbox, InboxState, Key, LanePlace, Message, Millis, Purge, Reason, Receipt, Record, Redrive,
    Register, Registered, Renew, Retention, RunError, Settle, Table, Transition,
};
use twobox_memory::State;

use crate::bug::Bug;
use crate::judge::Judged;
use crate::machine::Input;
use crate::scope::{Params, Scope, body, consumer, envelope, event_id, number_of, owner};
use crate::stage::{AnswerLost, CLAIM, Stage};
use crate::world::{Copy, Db, Held, Promise, World};

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
    /// A relay publishes the next event of a lane that it holds.
    Publish { relay: u8, lane: String, answer: Answer },
    /// A relay settles a lane as far as it is, and gets the answer or not.
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

/// What a flow came to on a [`Stage`].
pub(crate) type Ran<T, R = core::convert::Infallible> = Result<T, RunError<AnswerLost, R>>;

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
                if self.faults > 0 {
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
            for (event, standing) in self.db.events() {
                if standing.is_pending() {
                    steps.push(Step::Cancel { event });
                } else if standing.is_dead() {
                    steps.extend([Step::Redrive { event }, Step::Discard { event }]);
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
            if !held.asked && held.ended.is_none() && held.confirmed < held.leased.events.len() {
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
        self.db.events().into_iter().all(|(event, standing)| {
            let since = self.ghost.since[usize::from(event)];
            !standing.is_pending()
                || (self.now + scope.tick).saturating_sub(since) <= longest * scope.tick
        })
    }

    pub(crate) fn inbox(&self, event: u8, number: u8) -> Option<InboxState> {
        match self.db.row(Key::Inbox(consumer(number), event_id(event))) {
            Some(Record::Inbox(_, _, row)) => Some(row.state),
            _ => None,
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

    /// Runs a transition: what its first transaction reads is what was there in `view`, and what it
    /// writes meets what is there now; after a conflict it looks again.
    pub(crate) fn run<T: Transition>(
        &mut self,
        scope: &Scope,
        step: &Step,
        view: &State,
        token: Option<u64>,
        transition: &T,
    ) -> Ran<T::Outcome, T::Refusal> {
        let now = self.time();
        let assumes = transition.assume(now).is_some();
        let flow = |assumes| RunFlow::new(transition, now, assumes);
        self.drive(scope, step, view, token, (true, assumes), flow).0
    }

    /// Settles and claims in one transaction, and gets the answer or not.
    pub(crate) fn exchange(
        &mut self,
        scope: &Scope,
        step: &Step,
        view: &State,
        (settle, claim): (Option<Settle<'_>>, Option<Claim<'_>>),
        token: Option<u64>,
        answered: bool,
    ) -> Ran<Exchanged> {
        let (now, assumes, all_seen) = (self.time(), settle.is_some(), *view == self.db.0);
        let flow = |assumes| ExchangeFlow::new(settle.clone(), claim.clone(), now, assumes);
        let (ran, seen) = self.drive(scope, step, view, token, (answered, assumes), flow);
        if let Ok((_, Some(claimed))) = &ran {
            self.judge_claim(all_seen, &seen, claimed);
        }
        ran
    }

    /// Drives a flow, and gives the tables as a claim in it saw them. A flow that can assume what
    /// it does not look at is driven a second time, the other way, and must come to the same.
    fn drive<F: Flow>(
        &mut self,
        scope: &Scope,
        step: &Step,
        view: &State,
        token: Option<u64>,
        (answered, assumes): (bool, bool),
        flow: impl Fn(bool) -> F,
    ) -> (Ran<F::Output, F::Refusal>, Db) {
        let stage = || {
            let stage = Stage::new(step, scope.bug, token, &self.db.0, view);
            if answered { stage } else { stage.losing_answers() }
        };
        let first = stage();
        let ran = drive(&first, flow(scope.assumes), &mut NoCall);
        // Who has read before others committed, and is refused for it, was before them.
        let same = assumes && scope.bug.is_none() && *view == self.db.0;
        let differs = same && {
            let second = stage();
            let ran_too = drive(&second, flow(!scope.assumes), &mut NoCall);
            ran.is_ok() != ran_too.is_ok() || first.state() != second.state()
        };
        let (after, written) = (first.state(), first.into_written());
        let claim = written.iter().find(|written| written.claim);
        let seen = Db(claim.map_or(after, |claim| claim.before.clone()));
        self.break_unless(Promise::P6, !differs);
        // In a world of this size nobody meets others for ever.
        self.break_unless(Promise::P3, !matches!(ran, Err(RunError::Conflict(_))));
        self.land(scope, step, written);
        (ran, seen)
    }

    /// Receives a message as a consumer whose handler does this about it, and says whether the
    /// handler was called.
    fn receive(
        &mut self,
        scope: &Scope,
        step: &Step,
        view: &State,
        number: u8,
        message: &Message,
        handler: impl Fn() -> Result<Handled, Reason>,
    ) -> (Ran<Receipt>, bool) {
        let stage = Stage::new(step, scope.bug, None, &self.db.0, view);
        let inbox = Inbox::new(&stage, consumer(number)).max_failures(scope.max_failures);
        let inbox = if scope.in_order { inbox.in_order() } else { inbox };
        let mut called = false;
        let receipt = inbox.receive(message, self.time(), |_, _| {
            called = true;
            handler()
        });
        let written = stage.into_written();
        self.land(scope, step, written);
        (receipt, called)
    }

    /// What was committed on a stage is there now.
    fn land(&mut self, scope: &Scope, step: &Step, written: Vec<crate::stage::Written>) {
        for written in written {
            self.wrote = true;
            self.db.0 = written.after;
            let step = if written.claim { &CLAIM } else { step };
            self.judge_change(scope, step, written.before);
        }
    }

    pub(crate) fn perform(&mut self, scope: &Scope, step: &Step, view: &State) -> Option<()> {
        match step {
            Step::Register { request, params } => {
                let asked = Scope::request(*request, *params);
                match self.run(scope, step, view, None, &Register::new(&asked)) {
                    Ok(registered) => {
                        self.judge_params(*request, *params, true);
                        let placed = self.ghost.placed[usize::from(*request)];
                        self.break_unless(
                            Promise::P1,
                            placed == matches!(registered, Registered::Placed(_)),
                        );
                    }
                    Err(RunError::Refused(_)) => self.judge_params(*request, *params, false),
                    Err(_) => return None,
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
                // The answer is lost on the way to a relay that is not there any more.
                let Ok((_, claimed)) =
                    self.exchange(scope, step, view, (None, Some(claim)), None, true)
                else {
                    return None;
                };
                self.take(*relay, claimed?, *answered);
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
                let lease = held.leased.lease.clone();
                let token = Some(lease.token);
                let renew = Renew::new([lease], Duration::from_millis(Scope::TICK));
                let Ok(renewed) = self.run(scope, step, view, token, &renew) else { return None };
                let judged = if renewed.stale.is_empty() { Judged::Current } else { Judged::Stale };
                self.judge_lease(&held, judged, before != self.db.0);
                if judged == Judged::Stale {
                    self.relays[usize::from(*relay)].remove(lane);
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
                // At no place that it would have to wait for.
                let place = LanePlace { begun: Millis::new(0), sequence: 0, after: 0 };
                let message = Message { event: other_content(*event), place, attempt: 1 };
                let done = || Ok(Handled::Done);
                let (receipt, _) = self.receive(scope, step, view, *number, &message, done);
                let refused = matches!(receipt, Ok(Receipt::Refused(_)));
                self.break_unless(Promise::P5, refused && before == self.db.0);
            }
            Step::Fail { copy, consumer: number } => {
                self.spend(false)?;
                let fail = || Err(Reason::new("no"));
                let (receipt, called) =
                    self.receive(scope, step, view, *number, &copy.message(), fail);
                match receipt {
                    // It is as any delivery if the handler was not even called.
                    Ok(_) if !called => return None,
                    // Somebody else may have been faster.
                    Ok(Receipt::Failed(_) | Receipt::Poisoned | Receipt::Duplicate) => {}
                    Ok(_) => self.break_unless(Promise::P5, false),
                    Err(_) => return None,
                }
            }
            Step::Cancel { event } => {
                let cancel =
                    crate::scope::named(Cancel::new([event_id(*event)], Reason::new("no")));
                self.operate(scope, step, view, &cancel)?;
            }
            Step::Redrive { event } => {
                let window = scope.retention.redrive_window();
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
                let Ok(_purged) = self.run(scope, step, view, None, &purge) else { return None };
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
            Ok(committed) => {
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
                        if self.db.row(Key::Event(event_id(event))).is_none() {
                            continue;
                        }
                        self.ghost.committed |= 1 << event;
                        if scope.longest_retry.is_some() {
                            self.ghost.since[usize::from(event)] = self.now;
                        }
                    }
                }
            }
            Err(RunError::Refused(CommitRefused::ParametersDiffer(_))) => {
                self.judge_params(request, params, false);
            }
            // The request was forgotten, the order is still there: it is not placed again.
            Err(RunError::Refused(CommitRefused::OrderIdTaken { .. })) => {
                let known = self.ghost.bound[at].is_some() && self.ghost.placed[at];
                let there = self
                    .db
                    .row(Key::Order(crate::scope::named(twobox::OrderId::new(format!(
                        "o{request}"
                    )))))
                    .is_some();
                self.break_unless(Promise::P1, !known && there);
            }
            Err(RunError::Refused(CommitRefused::EventIdTaken { .. })) => {
                self.break_unless(Promise::P2, false);
            }
            Err(_) => return None,
        }
        Some(())
    }

    fn take(&mut self, relay: u8, claimed: Claimed, answered: bool) {
        // With an event that is given up, the lease of its lane has ended too.
        let dead = claimed.dead.iter().map(|(_, lane)| lane);
        for lane in dead.chain(claimed.leased.iter().map(|leased| &leased.lease.lane)) {
            for relay in &mut self.relays {
                relay
                    .get_mut(lane.ordering_key.as_str())
                    .into_iter()
                    .for_each(|held| held.stale = true);
            }
        }
        if !answered {
            // It crashed.
            self.relays[usize::from(relay)].clear();
            return;
        }
        let (events, lanes) = (self.db.events(), self.db.lanes());
        for leased in claimed.leased {
            let lane = leased.lease.lane.ordering_key.as_str().to_string();
            let standing = |number: u8| Some((number, events.get(&number)?.clone()));
            let numbers = leased.events.iter().map(|next| number_of(&next.message.event.id));
            let held = Held {
                claimed: numbers.flatten().filter_map(standing).collect(),
                starts: lanes.get(&lane).map_or(0, |lane| lane.starts),
                leased,
                confirmed: 0,
                ended: None,
                asked: false,
                stale: false,
            };
            self.relays[usize::from(relay)].insert(lane, held);
        }
    }

    fn publish(&mut self, relay: u8, lane: &str, answer: Answer) -> Option<()> {
        let held = self.relays[usize::from(relay)].get(lane)?;
        let message = &held.leased.events.get(held.confirmed)?.message;
        let (event, place) = (number_of(&message.event.id)?, self.place(message.place));
        if matches!(answer, Answer::Confirmed | Answer::Lost) {
            self.judge_publish(event, place.sequence);
            self.network.insert(Copy { event, place });
        }
        let held = self.relays[usize::from(relay)].get_mut(lane)?;
        match answer {
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
        let reason = Reason::new("no");
        let ended = held.ended.map(|answer| match answer {
            Answer::Rejected => Ending::Rejected(reason),
            Answer::Unavailable => Ending::Unavailable(reason),
            Answer::Failed | Answer::Lost | Answer::Confirmed => Ending::Failed(reason),
        });
        let settlement = held.leased.settle(held.confirmed, ended);
        let settle = Settle::new(&scope.policy, [settlement]);
        let (before, token) = (self.db.0.clone(), Some(held.leased.lease.token));
        let ran = self.exchange(scope, step, view, (Some(settle), None), token, answered);
        let changed = before != self.db.0;
        let holds = &mut self.relays[usize::from(relay)];
        match ran {
            Ok((Some(settled), _)) => {
                holds.remove(lane);
                let judged = if settled.stale.is_empty() { Judged::Current } else { Judged::Stale };
                self.judge_lease(&held, judged, changed);
            }
            // The commit took, and all that the relay knows is that it does not know.
            Err(RunError::Unknown(AnswerLost)) => {
                let judged = if changed { Judged::Current } else { Judged::Stale };
                holds.insert(lane.to_string(), Held { asked: true, stale: true, ..held.clone() });
                self.judge_lease(&held, judged, changed);
            }
            Ok((None, _)) | Err(_) => return None,
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
        let done = || Ok(Handled::Effect(effect(copy.event)));
        let (receipt, _) = self.receive(scope, step, view, number, &copy.message(), done);
        match receipt {
            Ok(Receipt::Applied) => self.judge_applied(scope, copy, number),
            Ok(Receipt::Duplicate) => {
                let applied = self.ghost.applied[usize::from(number)] & (1 << copy.event) != 0;
                self.break_unless(Promise::P5, applied);
            }
            Ok(Receipt::Poisoned | Receipt::WaitsFor(_)) => {}
            Ok(Receipt::Refused(_) | Receipt::Deferred(_) | Receipt::Failed(_)) => {
                self.break_unless(Promise::P5, false);
            }
            Err(_) => return None,
        }
        Some(())
    }

    fn operate<T>(&mut self, scope: &Scope, step: &Step, view: &State, operation: &T) -> Option<()>
    where
        T: Transition<Outcome = twobox::Operated, Refusal = core::convert::Infallible>,
    {
        self.operations = self.operations.checked_sub(1)?;
        let Ok(operated) = self.run(scope, step, view, None, operation) else { return None };
        // What was refused has changed nothing, and is not worth a state.
        (!operated.done.is_empty()).then_some(())
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
