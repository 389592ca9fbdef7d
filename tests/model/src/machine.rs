//! Relays that are the real [`RelayMachine`]: its driver has one transaction and any number of
//! publishes under way, and which of them ends next, how, and how late the machine hears of the
//! time, is open.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::collections::BTreeMap;

use twobox::relay::{Action, Exchange, Phase, Published, RelayMachine, RelaySettings, Ticket};
use twobox::{
    Checked, Claimed, DeliveryState, Key, LeaseRef, Millis, Reason, Record, Renew, Renewed,
    Settled, Table,
};

use crate::scope::{Params, Scope, event_id, named, number_of, owner};
use crate::step::{Answer, Ran, Step};
use crate::world::{Copy, Promise, World};

/// A machine, and what its driver has under way for it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Driven {
    pub(crate) machine: RelayMachine,
    transaction: Option<Action>,
    /// By lane.
    publishing: BTreeMap<String, Ticket>,
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
    /// The envelope for a lane cannot be read.
    Unread(String),
    /// It hears the time.
    Timeout,
    /// It hears of a commit.
    Wakeup,
    /// The process dies and begins anew.
    Crash,
    /// It is asked to stop.
    Stop,
    /// It is to wait no longer for what is under way.
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
            ..RelaySettings::new(owner(number))
        };
        let machine = named(RelayMachine::new(settings, now));
        let mut driven =
            Self { machine, transaction: None, publishing: BTreeMap::new(), broken: false };
        driven.poll();
        driven
    }

    /// Takes what there is to do.
    fn poll(&mut self) {
        while let Some(action) = self.machine.poll_action() {
            if let Action::Publish(tickets) = action {
                for ticket in tickets {
                    self.broken |=
                        self.publishing.insert(ticket.lease.lane.as_str().into(), ticket).is_some();
                }
            } else {
                self.broken |= self.transaction.replace(action).is_some();
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
        let start = || (self.machine.phase() == Phase::Stopped).then_some(Input::Start);
        self.transaction
            .as_ref()
            .map(|_| Input::Transaction(Commit::Committed))
            .or_else(publish)
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
        for lane in driven.publishing.keys() {
            push(Input::Published(lane.clone(), Answer::Confirmed));
            if faulty {
                let answers = [Answer::Lost, Answer::Failed, Answer::Rejected, Answer::Unavailable];
                answers
                    .into_iter()
                    .map(|answer| Input::Published(lane.clone(), answer))
                    .for_each(&mut push);
                push(Input::Unread(lane.clone()));
            }
        }
        match driven.machine.phase() {
            Phase::Stopped => push(Input::Start),
            Phase::Stopping => push(Input::Abandon),
            Phase::Running | Phase::Paused | Phase::StoreAway => {
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
                driven.machine.handle_published(now, &ticket, answer.told());
            }
            Input::Unread(lane) => {
                self.spend(false)?;
                let ticket = driven.publishing.remove(lane)?;
                driven.machine.handle_unread(now, &[ticket]);
            }
            Input::Timeout => driven.machine.handle_timeout(now),
            Input::Wakeup => driven.machine.handle_wakeup(now),
            Input::Crash => {
                self.spend(false)?;
                driven = Driven::start(scope, number, now);
            }
            Input::Stop => {
                self.spend(false)?;
                driven.machine.handle_stop(now);
            }
            Input::Abandon => driven.machine.abandon(now),
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
        if commit == Commit::Failed {
            driven.machine.handle_store_failed(clock);
            return Some(());
        }
        self.now = driven.machine.now().get();
        let answer = match action {
            Action::Exchange(exchange) => {
                let (settled, claimed) =
                    self.exchange(scope, number, exchange, driven.machine.settings())?;
                Answered::Exchange(settled, claimed)
            }
            Action::Renew(leases) => Answered::Renewal(self.renew(
                scope,
                number,
                leases,
                driven.machine.settings().lease,
            )?),
            Action::Publish(_) => return None,
        };
        self.now = clock.get();
        match (commit, answer) {
            (Commit::Committed, Answered::Exchange(settled, claimed)) => {
                driven.machine.handle_exchanged(clock, settled.as_ref(), claimed);
            }
            (Commit::Committed, Answered::Renewal(renewed)) => {
                driven.machine.handle_renewed(clock, &renewed);
            }
            (Commit::Died, _) => *driven = Driven::start(scope, number, clock),
            (Commit::Unknown | Commit::Failed, _) => driven.machine.handle_store_failed(clock),
        }
        Some(())
    }

    fn exchange(
        &mut self,
        scope: &Scope,
        relay: u8,
        exchange: Exchange,
        settings: &Checked<RelaySettings>,
    ) -> Option<(Option<Settled>, Option<Claimed>)> {
        let leases: Vec<LeaseRef> =
            exchange.settle.iter().map(|result| result.lease.clone()).collect();
        let (settle, claim) = exchange.into_transitions(settings);
        let settled = match settle {
            None => None,
            Some(settle) => {
                let step = Step::Settle { relay, lane: String::new(), answered: true };
                let before = self.db.0.clone();
                let token = leases.first().map(|lease| lease.token);
                let Ran::Done(settled) = self.run(scope, &step, &before, token, &settle) else {
                    return None;
                };
                for lease in &leases {
                    let current = self.ghost.leases.get(lease.lane.as_str()) == Some(&lease.token);
                    let stale = settled.stale.iter().any(|stale| stale.lease == *lease);
                    self.break_unless(Promise::P6, current != stale);
                    if current {
                        self.ghost.leases.remove(lease.lane.as_str());
                    }
                }
                self.break_unless(
                    Promise::P6,
                    settled.stale.len() < leases.len() || before == self.db.0,
                );
                Some(settled)
            }
        };
        let claimed = match claim {
            None => None,
            Some(claim) => {
                let step = Step::Claim { relay, answered: true };
                let before = self.db.clone();
                let Ran::Done(claimed) = self.run(scope, &step, &before.0, None, &claim) else {
                    return None;
                };
                self.judge_claim(&before.0, &before, &claimed);
                // With an event that is given up, the lease of its lane has ended too.
                for lane in claimed.dead.iter().filter_map(number_of).map(crate::scope::lane_of) {
                    self.ghost.leases.remove(lane.as_str());
                }
                for run in &claimed.runs {
                    self.ghost.leases.insert(run.lease.lane.as_str().into(), run.lease.token);
                }
                Some(claimed)
            }
        };
        Some((settled, claimed))
    }

    fn renew(
        &mut self,
        scope: &Scope,
        relay: u8,
        leases: Vec<LeaseRef>,
        lease: Duration,
    ) -> Option<Renewed> {
        let step = Step::Renew { relay, lane: String::new() };
        let before = self.db.0.clone();
        let token = leases.first().map(|lease| lease.token);
        let Ran::Done(renewed) =
            self.run(scope, &step, &before, token, &Renew::new(leases.clone(), lease))
        else {
            return None;
        };
        for lease in &leases {
            let current = self.ghost.leases.get(lease.lane.as_str()) == Some(&lease.token);
            let stale = renewed.stale.iter().any(|stale| stale.lease == *lease);
            self.break_unless(Promise::P6, current != stale);
        }
        Some(renewed)
    }

    /// What a publish does at the broker.
    fn arrive(&mut self, ticket: &Ticket, answer: Answer) -> Option<()> {
        let event = number_of(&ticket.delivery.event)?;
        self.break_unless(Promise::P2, self.db.row(Key::Event(event_id(event))).is_some());
        if matches!(answer, Answer::Confirmed | Answer::Lost) {
            self.judge_publish(event, ticket.delivery.place.sequence);
            self.network.insert(Copy { event, place: ticket.delivery.place });
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
                let wait = |driven: &Driven| {
                    Some(driven.machine.poll_timeout()?.since(driven.machine.now()))
                };
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
        let waits = |lane| match self.db.row(Key::Lane(lane)) {
            Some(Record::Lane(_, row)) => row.blocked_by.is_none(),
            _ => true,
        };
        let pending = |record| match record {
            Record::Outbox(_, row) => row.state == DeliveryState::Pending && waits(row.lane),
            _ => false,
        };
        !self.db.table(Table::Outbox).any(pending)
    }
}

/// What the store answers.
enum Answered {
    Exchange(Option<Settled>, Option<Claimed>),
    Renewal(Renewed),
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
