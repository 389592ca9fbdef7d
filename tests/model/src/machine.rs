//! Relays that are the real [`RelayMachine`]: its driver has one transaction and any number of
//! publishes under way, and which of them ends next, how, and how late the machine hears of the
//! time, is open.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::collections::BTreeMap;

use twobox::flow::Exchanged;
use twobox::relay::{Action, Exchange, Phase, Published, RelayMachine, RelaySettings, Ticket};
use twobox::{Checked, Key, LeaseRef, Millis, Moment, Reason, Renew, Renewed, RunError};

use crate::scope::{Params, Scope, event_id, named, number_of, owner};
use crate::stage::AnswerLost;
use crate::step::{Answer, Step};
use crate::world::{Copy, Promise, World};

/// A machine, and what its driver has under way for it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Driven {
    pub(crate) machine: RelayMachine,
    transaction: Option<Action>,
    /// By lane.
    publishing: BTreeMap<String, Ticket>,
    /// Publishes that the machine waits for no longer, by lane and token.
    hung: BTreeMap<(String, u64), Ticket>,
    /// It asked for a second transaction at once, or for a second publish in a lane (P4).
    broken: bool,
}

/// How a transaction ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Commit {
    /// It is committed.
    Committed,
    /// It is committed, and nobody knows.
    Unknown,
    /// It is committed, and then the process dies.
    Died,
    /// It fails.
    Failed,
}

/// What happens to a machine. Lanes are named.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Input {
    /// The transaction that is under way ends.
    Transaction(Commit),
    /// The publish that is under way in a lane ends.
    Published(String, Answer),
    /// The publish in a lane was handed out, and was dropped before it began.
    Dropped(String),
    /// What the machine waits for no longer is broken off, or ends after all: whether it has
    /// arrived.
    BrokenOff(String, u64, bool),
    /// It hears the time.
    Timeout,
    /// It hears of a commit.
    Wakeup,
    /// The process dies and begins anew.
    Crash,
    /// It is asked to stop.
    Stop,
    /// It is to wait no longer for what is under way: its patience has ended.
    Abandon,
    /// After it has stopped, it begins anew.
    Start,
}

impl Driven {
    pub(crate) fn start(scope: &Scope, number: u8, now: Millis) -> Self {
        let tick = Duration::from_millis(scope.tick);
        let settings = RelaySettings {
            policy: scope.policy.clone(),
            window: 2,
            run: 2,
            // Half of it is a tick, and so is every pause.
            lease: tick * 2,
            poll: tick,
            pause_base: tick,
            pause_cap: tick,
            // A lease can be renewed before a publish is overdue.
            publish_timeout: tick * 3,
            ..RelaySettings::new(owner(number))
        };
        let machine = named(RelayMachine::new(settings, Moment::steady(now)));
        let (publishing, hung) = (BTreeMap::new(), BTreeMap::new());
        let mut driven = Self { machine, transaction: None, publishing, hung, broken: false };
        driven.poll();
        driven
    }

    /// Takes what there is to do.
    fn poll(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Publish(tickets) => {
                    for ticket in tickets {
                        let lane = ticket.lease.lane.ordering_key.as_str().into();
                        self.broken |= self.publishing.insert(lane, ticket).is_some();
                    }
                }
                // A thread cannot break it off.
                Action::BreakOff(_) => {}
                Action::GiveUp(leases) => {
                    for lease in leases {
                        let lane: String = lease.lane.ordering_key.as_str().into();
                        let given_up = self.publishing.remove(&lane);
                        self.broken |= given_up.as_ref().is_none_or(|it| it.lease != lease);
                        self.hung.extend(given_up.map(|it| ((lane, lease.token), it)));
                    }
                }
                Action::Exchange(_) | Action::Renew(_) => {
                    self.broken |= self.transaction.replace(action).is_some();
                }
            }
            if self.broken {
                return;
            }
        }
    }

    /// What ends next if all goes well.
    fn next(&self) -> Option<Input> {
        let publish = || {
            self.publishing
                .keys()
                .next()
                .map(|lane| Input::Published(lane.clone(), Answer::Confirmed))
        };
        let hung = || {
            self.hung
                .keys()
                .next()
                .map(|(lane, token)| Input::BrokenOff(lane.clone(), *token, false))
        };
        let start = || (self.machine.phase() == Phase::Stopped).then_some(Input::Start);
        self.transaction
            .as_ref()
            .map(|_| Input::Transaction(Commit::Committed))
            .or_else(publish)
            .or_else(hung)
            .or_else(start)
    }
}

impl World {
    pub(crate) fn machine_steps(&self, machine: u8, steps: &mut Vec<Step>) {
        let driven = &self.machines[usize::from(machine)];
        let faulty = self.faults > 0;
        let mut push = |input| steps.push(Step::Machine { machine, input });
        if driven.transaction.is_some() {
            push(Input::Transaction(Commit::Committed));
            if faulty {
                [Commit::Unknown, Commit::Died, Commit::Failed]
                    .into_iter()
                    .map(Input::Transaction)
                    .for_each(&mut push);
            }
        }
        for (lane, token) in driven.hung.keys() {
            let arrived = [false, true].into_iter();
            arrived.map(|it| Input::BrokenOff(lane.clone(), *token, it)).for_each(&mut push);
        }
        for lane in driven.publishing.keys() {
            push(Input::Published(lane.clone(), Answer::Confirmed));
            if faulty {
                push(Input::Dropped(lane.clone()));
                let answers = [Answer::Lost, Answer::Failed, Answer::Rejected, Answer::Unavailable];
                answers
                    .into_iter()
                    .map(|answer| Input::Published(lane.clone(), answer))
                    .for_each(&mut push);
            }
        }
        match driven.machine.phase() {
            Phase::Stopped => push(Input::Start),
            Phase::Stopping => push(Input::Abandon),
            Phase::Running | Phase::Paused | Phase::StoreAway | Phase::Stuck | _ => {
                [Input::Timeout, Input::Wakeup].into_iter().for_each(&mut push);
                if faulty {
                    [Input::Crash, Input::Stop].into_iter().for_each(&mut push);
                }
            }
        }
    }

    pub(crate) fn machine_step(&mut self, scope: &Scope, number: u8, input: &Input) -> Option<()> {
        let now = self.time();
        let mut driven = self.machines[usize::from(number)].clone();
        match input {
            Input::Transaction(commit) => {
                self.spend(*commit == Commit::Committed)?;
                self.transaction(scope, number, &mut driven, *commit)?;
            }
            Input::Published(lane, answer) => {
                self.spend(*answer == Answer::Confirmed)?;
                let ticket = driven.publishing.remove(lane)?;
                self.arrive(&ticket, *answer)?;
                driven.machine.handle_published(Moment::steady(now), &ticket, answer.told());
            }
            Input::BrokenOff(lane, token, arrived) => {
                let ticket = driven.hung.remove(&(lane.clone(), *token))?;
                if *arrived {
                    self.arrive(&ticket, Answer::Lost)?;
                }
                driven.machine.handle_broken_off(Moment::steady(now), &ticket.lease);
            }
            Input::Dropped(lane) => {
                self.spend(false)?;
                let ticket = driven.publishing.remove(lane)?;
                driven.machine.handle_published(Moment::steady(now), &ticket, Published::Abandoned);
            }
            Input::Timeout => driven.machine.handle_timeout(Moment::steady(now)),
            Input::Wakeup => driven.machine.handle_wakeup(Moment::steady(now)),
            Input::Crash => {
                self.spend(false)?;
                driven = Driven::start(scope, number, now);
            }
            Input::Stop => {
                self.spend(false)?;
                driven.machine.handle_stop(Moment::steady(now), Duration::MAX);
            }
            Input::Abandon => driven.machine.handle_stop(Moment::steady(now), Duration::ZERO),
            Input::Start => driven = Driven::start(scope, number, now),
        }
        driven.poll();
        self.break_unless(Promise::P4, !driven.broken);
        self.machines[usize::from(number)] = driven;
        Some(())
    }

    /// Ends the transaction that is under way, at the time that the machine knew when it began.
    fn transaction(
        &mut self,
        scope: &Scope,
        number: u8,
        driven: &mut Driven,
        commit: Commit,
    ) -> Option<()> {
        let action = driven.transaction.take()?;
        let clock = self.time();
        let (known, failed) = (commit != Commit::Unknown, commit == Commit::Failed);
        let failure = failed.then(|| Reason::new("the store is away"));
        let lost = |_| Reason::new(AnswerLost);
        self.now = driven.machine.now().get();
        let settings = driven.machine.settings().clone();
        let told = match action {
            Action::Exchange(exchange) => Told::Exchange(match failure {
                Some(failure) => Err(failure),
                None => {
                    self.settle_and_claim(scope, number, exchange, &settings, known)?.map_err(lost)
                }
            }),
            Action::Renew(renew) => Told::Renewal(match failure {
                Some(failure) => Err(failure),
                None => self.renew(scope, number, &renew, known)?.map_err(lost),
            }),
            Action::Publish(_) | Action::BreakOff(_) | Action::GiveUp(_) => return None,
        };
        self.now = clock.get();
        match told {
            _ if commit == Commit::Died => *driven = Driven::start(scope, number, clock),
            Told::Exchange(exchanged) => {
                driven.machine.conclude_exchange(Moment::steady(clock), exchanged);
            }
            Told::Renewal(renewed) => {
                driven.machine.conclude_renewal(Moment::steady(clock), renewed);
            }
        }
        Some(())
    }

    /// The machine's exchange, whose answer may be lost after the commit.
    fn settle_and_claim(
        &mut self,
        scope: &Scope,
        relay: u8,
        exchange: Exchange,
        settings: &Checked<RelaySettings>,
        known: bool,
    ) -> Option<Result<Exchanged, AnswerLost>> {
        let leases: Vec<LeaseRef> =
            exchange.settle.iter().map(|settlement| settlement.lease().clone()).collect();
        let token = leases.first().map(|lease| lease.token);
        let step = Step::Settle { relay, lane: String::new(), answered: true };
        let before = self.db.clone();
        let transitions = || exchange.clone().into_transitions(settings);
        let mut lost = None;
        if !known {
            let mut world = self.clone();
            lost = world.exchange(scope, &step, &before.0, transitions(), token, false).err();
            // What was not committed has no answer that could be lost.
            let right = match &lost {
                Some(error) => *error == RunError::Unknown(AnswerLost),
                None => world.db == before,
            };
            self.break_unless(Promise::P3, right);
        }
        let ran = self.exchange(scope, &step, &before.0, transitions(), token, true);
        let Ok((settled, claimed)) = ran else { return None };
        if let Some(settled) = &settled {
            for lease in &leases {
                let stale = settled.stale.iter().any(|stale| stale.lease == *lease);
                self.judge_ghost(lease, stale);
                if !stale {
                    self.ghost.leases.remove(lease.lane.ordering_key.as_str());
                }
            }
            // What is stale changes nothing.
            let nothing = settled.stale.len() == leases.len() && claimed.is_none();
            self.break_unless(Promise::P6, !nothing || before == self.db);
        }
        if let Some(claimed) = &claimed {
            // With an event that is given up, the lease of its lane has ended too.
            for (_, lane) in &claimed.dead {
                self.ghost.leases.remove(lane.ordering_key.as_str());
            }
            for leased in &claimed.leased {
                let lane = leased.lease.lane.ordering_key.as_str().into();
                self.ghost.leases.insert(lane, leased.lease.token);
            }
        }
        Some(match lost {
            Some(_) => Err(AnswerLost),
            None => Ok((settled, claimed)),
        })
    }

    fn renew(
        &mut self,
        scope: &Scope,
        relay: u8,
        renew: &Renew,
        known: bool,
    ) -> Option<Result<Renewed, AnswerLost>> {
        let step = Step::Renew { relay, lane: String::new() };
        let before = self.db.0.clone();
        let Ok(renewed) = self.run(scope, &step, &before, None, renew) else { return None };
        for (lease, _) in &renewed.leases {
            self.judge_ghost(lease, false);
        }
        for stale in &renewed.stale {
            self.judge_ghost(&stale.lease, true);
        }
        Some(if known { Ok(renewed) } else { Err(AnswerLost) })
    }

    /// Whether a lease was rightly taken for stale, or not (P6).
    fn judge_ghost(&mut self, lease: &LeaseRef, stale: bool) {
        let current = self.ghost.leases.get(lease.lane.ordering_key.as_str()) == Some(&lease.token);
        self.break_unless(Promise::P6, current != stale);
    }

    /// What a publish does at the broker.
    fn arrive(&mut self, ticket: &Ticket, answer: Answer) -> Option<()> {
        let message = &ticket.message;
        let event = number_of(&message.event.id)?;
        self.break_unless(Promise::P2, self.db.row(Key::Event(event_id(event))).is_some());
        if matches!(answer, Answer::Confirmed | Answer::Lost) {
            self.judge_publish(event, message.place.sequence);
            self.network.insert(Copy { event, place: message.place });
        }
        if answer == Answer::Confirmed {
            self.ghost.broker |= 1 << event;
        }
        Some(())
    }

    /// Whether these very machines bring everything to its end when nothing goes wrong any more
    /// (P8), and where that leads: each event is then finished, dead, or behind one that is.
    pub(crate) fn machines_drain(&self, scope: &Scope) -> Option<Self> {
        let mut world = Self { faults: 0, ..self.clone() };
        for request in 0..scope.requests {
            let params = world.ghost.bound[usize::from(request)].unwrap_or(Params::First);
            let view = world.db.0.clone();
            world.perform(scope, &Step::Commit { request, params }, &view)?;
        }
        for steps in 0..=scope.drain_bound() {
            if world.ghost.broken != 0 {
                return None;
            }
            if world.has_ended() {
                scope.longest_drain.fetch_max(steps, Ordering::Relaxed);
                return Some(world);
            }
            let next = (0..scope.machines)
                .find_map(|number| Some((number, world.machines[usize::from(number)].next()?)));
            if let Some((number, input)) = next {
                world.machine_step(scope, number, &input)?;
                continue;
            }
            for number in 0..scope.machines {
                world.machine_step(scope, number, &Input::Timeout)?;
            }
            if world.machines.iter().all(|driven| driven.next().is_none()) {
                let wait = |driven: &Driven| driven.machine.rest_for();
                let wait = world.machines.iter().filter_map(wait).min()?;
                world.now = (world.time() + wait).get();
                for number in 0..scope.machines {
                    world.machine_step(scope, number, &Input::Timeout)?;
                }
            }
        }
        None
    }

    fn has_ended(&self) -> bool {
        let lanes = self.db.lanes();
        let blocked = |lane: &str| lanes.get(lane).is_some_and(|lane| lane.blocked_by.is_some());
        let events = self.db.events();
        !events
            .values()
            .any(|event| event.is_pending() && !blocked(event.row.lane.ordering_key.as_str()))
    }
}

/// What the machine is told of its transaction.
enum Told {
    Exchange(Result<Exchanged, Reason>),
    Renewal(Result<Renewed, Reason>),
}

impl Answer {
    /// What the machine is told.
    fn told(self) -> Published {
        let reason = Reason::new("no");
        match self {
            Self::Confirmed => Published::Confirmed,
            Self::Lost | Self::Failed => Published::Failed(reason),
            Self::Rejected => Published::Rejected(reason),
            Self::Unavailable => Published::Unavailable(reason),
        }
    }
}
