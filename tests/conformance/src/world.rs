//! The order shop: a sender's store, a receiver's store (the same or another one), relays, and a
//! clock. It executes commands on them through the drivers of the core, and through a plan of
//! faults.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU16;
use std::rc::Rc;
use std::time::Duration;

use twobox::transition::call::{CallEnd, CallKey, Intend, Resolve, Start, Started, WhenUnknown};
use twobox::{
    Body, Cancel, Checked, Claim, CommitOrder, Committed, Consumer, CountFailure, DeliveryPolicy,
    Discard, Draft, Dump, Ending, Event, EventId, FailureCounted, Fingerprint, Invalid, Key, Load,
    Millis, Operated, OrderId, OrderingKey, Owner, Place, Placed, Purge, Query, Reader, Reason,
    Receive, Received, Record, Redrive, Register, Registered, Renew, Request, Retention, Run,
    RunError, RunResult, Settle, Store, Table, WhenDead,
};

use crate::failure::Failure;
use crate::fault::{BeginFault, Plan, PublishFault};
use crate::faulty::{FaultError, Faulty};
use crate::harness::{ErrorOf, Harness};
use crate::scenario::{Broker, Command, EventRef, LEASE, PATIENCE, Purchase, Scenario};

/// When a scenario begins: late enough for a clock that steps back by an hour.
const START: u64 = 10_000_000;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Who holds what: one store for both sides, or one each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layout {
    /// Sender and receiver use the same store.
    OneStore,
    /// Each has its own.
    TwoStores,
}

impl Layout {
    /// Both of them.
    pub const ALL: [Self; 2] = [Self::OneStore, Self::TwoStores];
}

/// What a command came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) refused: bool,
    pub(crate) text: String,
}

impl Outcome {
    fn of(text: impl fmt::Display) -> Self {
        Self { refused: false, text: text.to_string() }
    }

    fn refused(why: impl fmt::Display) -> Self {
        Self { refused: true, text: format!("refused: {why}") }
    }
}

/// Why a command did not come to its end.
#[derive(Debug)]
pub(crate) enum Interrupt {
    /// The program died.
    Crash,
    /// It got an error, and may do the same again.
    Failed(String),
    /// The store did something that no store may do.
    Broken(Failure),
}

impl From<Failure> for Interrupt {
    fn from(failure: Failure) -> Self {
        Self::Broken(failure)
    }
}

impl From<Invalid> for Interrupt {
    fn from(invalid: Invalid) -> Self {
        Self::Broken(Failure::new(format_args!("the scenario is wrong: {invalid}")))
    }
}

/// Either an outcome, or the refusal of a transition.
enum Ended<O, R> {
    Done(O),
    Refused(R),
}

fn ended<O, R, E: std::error::Error>(
    result: Result<O, RunError<FaultError<E>, R>>,
) -> Result<Ended<O, R>, Interrupt> {
    match result {
        Ok(outcome) => Ok(Ended::Done(outcome)),
        Err(RunError::Refused(refusal)) => Ok(Ended::Refused(refusal)),
        Err(RunError::Conflict(key)) => Err(Interrupt::Failed(format!("conflict at {key}"))),
        Err(RunError::Store(error) | RunError::Unknown(error)) => Err(interrupt(error)),
    }
}

fn interrupt<E: std::error::Error>(error: FaultError<E>) -> Interrupt {
    match error {
        FaultError::Crash => Interrupt::Crash,
        FaultError::Injected => Interrupt::Failed("an injected error".to_string()),
        FaultError::Contract(what) => Interrupt::Broken(Failure::new(what)),
        FaultError::Store(error) => Interrupt::Broken(Failure::store(error)),
    }
}

/// The outcome of a transition that cannot be refused.
fn never<O>(ended: Ended<O, std::convert::Infallible>) -> O {
    match ended {
        Ended::Done(outcome) => outcome,
        Ended::Refused(refusal) => match refusal {},
    }
}

/// A run that a relay has claimed, and how far it got with it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct InHand {
    run: Run,
    confirmed: Vec<EventId>,
    ended: Option<(EventId, Ending)>,
}

/// What the code of a user says to the driver, to have everything rolled back.
enum UserError<E: std::error::Error> {
    Fails,
    Refused(String),
    Store(RunError<FaultError<E>, ()>),
}

impl<E: std::error::Error> UserError<E> {
    /// Takes over what a transition within the user's transaction reported.
    fn of<R: fmt::Display>(error: RunError<FaultError<E>, R>) -> Self {
        match error {
            RunError::Refused(refusal) => Self::Refused(refusal.to_string()),
            RunError::Conflict(key) => Self::Store(RunError::Conflict(key)),
            RunError::Store(error) => Self::Store(RunError::Store(error)),
            RunError::Unknown(error) => Self::Store(RunError::Unknown(error)),
        }
    }
}

/// The shop at one moment.
pub(crate) struct World<'s, H> {
    pub(crate) scenario: &'s Scenario,
    pub(crate) plan: Rc<Plan>,
    policy: Checked<DeliveryPolicy>,
    kept: Checked<Retention>,
    /// One store or two: the first is the sender's, the last the receiver's.
    sides: Vec<Faulty<H>>,
    clock: Millis,
    relays: BTreeMap<&'static str, Vec<InHand>>,
    /// The events in the order in which each came to the consumers for the first time.
    arrivals: Vec<EventId>,
}

impl<'s, H: Harness> World<'s, H> {
    pub(crate) fn new(scenario: &'s Scenario, layout: Layout, plan: Plan) -> Self {
        let plan = Rc::new(plan);
        let stores = match layout {
            Layout::OneStore => 1,
            Layout::TwoStores => 2,
        };
        let sides = (0..stores).map(|_| Faulty::new(H::open(), Rc::clone(&plan))).collect();
        let when_dead = if scenario.dead_lets_go_on { WhenDead::Continue } else { WhenDead::Block };
        let max_starts = scenario.max_failures + scenario.max_failures / 2;
        let policy = DeliveryPolicy {
            max_failures: scenario.max_failures,
            max_starts,
            when_dead,
            ..DeliveryPolicy::default()
        };
        let policy = policy.checked().expect("scenarios allow failures");
        let kept = Retention {
            events: DAY * 7,
            inbox: DAY * 60,
            requests: DAY * 60,
            ..Retention::default()
        };
        let kept = kept
            .checked(&policy)
            .expect("events are retried for hours, and consumers remember them for months");
        let relays = BTreeMap::new();
        Self {
            scenario,
            plan,
            policy,
            kept,
            sides,
            clock: Millis::new(START),
            relays,
            arrivals: Vec::new(),
        }
    }

    fn sender(&self) -> &Faulty<H> {
        &self.sides[0]
    }

    fn receiver(&self) -> &Faulty<H> {
        &self.sides[self.sides.len() - 1]
    }

    /// Ends the program and opens the stores again: what was not committed is lost, and so is what
    /// the relays had in hand.
    pub(crate) fn reopen(&mut self) {
        self.sides = std::mem::take(&mut self.sides).into_iter().map(Faulty::crash).collect();
        self.relays.clear();
    }

    /// All rows of each store, the sender's first. No fault strikes here.
    pub(crate) fn dumps(&self) -> Result<Vec<Dump>, Failure> {
        let dump = |side: &Faulty<H>| {
            Dump::of(&mut side.inner().view().map_err(Failure::store)?).map_err(Failure::store)
        };
        self.sides.iter().map(dump).collect()
    }

    /// The user's own rows that the scenario writes.
    pub(crate) fn own_rows(&self) -> Result<Vec<Option<String>>, Failure> {
        let keys = self.scenario.steps.iter().filter_map(|step| {
            if let Command::PlaceWithOwnRow { key, .. } = step.command { Some(key) } else { None }
        });
        keys.map(|key| self.own_row(key)).collect()
    }

    fn own_row(&self, key: &str) -> Result<Option<String>, Failure> {
        let mut tx = self.sides[0].inner().begin().map_err(Failure::store)?;
        H::own_row(&mut tx, key).map_err(Failure::store)
    }

    pub(crate) fn arrivals(&self) -> &[EventId] {
        &self.arrivals
    }

    /// All that the rest of a run depends on, beside the step.
    pub(crate) fn state(&self) -> Result<impl std::hash::Hash + use<'s, H>, Failure> {
        let mut rows = Vec::new();
        for side in &self.sides {
            let mut view = side.inner().view().map_err(Failure::store)?;
            for table in Table::ALL {
                let walk = Query::Walk { table, after: None, limit: 10_000 };
                rows.extend(view.load(&walk).map_err(Failure::store)?.into_vec());
            }
        }
        Ok((rows, self.clock, self.relays.clone(), self.own_rows()?))
    }

    /// Does what the command says, after the fault that strikes before it.
    pub(crate) fn begin(&mut self, command: Command) -> Result<Outcome, Interrupt> {
        let fault = match command {
            Command::Wait(_)
            | Command::StepBack(_)
            | Command::Count
            | Command::ReadOwnRow(_)
            | Command::Crash => None,
            Command::Register(_)
            | Command::Commit(_)
            | Command::Place(_)
            | Command::PlaceWithOwnRow { .. }
            | Command::Claim(_)
            | Command::Publish(..)
            | Command::Renew(_)
            | Command::Settle(_)
            | Command::Receive { .. }
            | Command::ReceiveOther { .. }
            | Command::ReceiveInOrder { .. }
            | Command::CountFailure { .. }
            | Command::Intend { .. }
            | Command::StartCall { .. }
            | Command::CallDone { .. }
            | Command::Purge
            | Command::Cancel(_)
            | Command::Redrive(_)
            | Command::Discard(_)
            | Command::Drain(_) => self.plan.begin(),
        };
        match fault {
            None => {}
            Some(BeginFault::ClockStepsBack) => {
                self.clock = self.clock.before(Duration::from_secs(3_600));
            }
            Some(BeginFault::CloseAndReopen) => return Err(Interrupt::Crash),
            Some(BeginFault::RivalFirst) => {
                let in_hand = self.relays.clone();
                self.plan.pause(true);
                let rival = self.execute(command);
                self.plan.pause(false);
                let _settled = rival?;
                self.relays = in_hand;
            }
        }
        self.execute(command)
    }

    fn execute(&mut self, command: Command) -> Result<Outcome, Interrupt> {
        match command {
            Command::Register(buy) => self.register(buy),
            Command::Commit(buy) => self.commit(buy),
            Command::Place(buy) => self.place(buy, None),
            Command::PlaceWithOwnRow { purchase, key, value, fails } => {
                self.place(purchase, Some((key, value, fails)))
            }
            Command::ReadOwnRow(key) => {
                Ok(Outcome::of(self.own_row(key)?.unwrap_or_else(|| "no row".to_string())))
            }
            Command::Claim(relay) => self.claim(relay).map(|claimed| claimed.0),
            Command::Publish(relay, broker) => self.publish(relay, broker),
            Command::Renew(relay) => self.renew(relay),
            Command::Settle(relay) => {
                self.settle(relay).map(|settled| Outcome::of(Tally(&settled)))
            }
            Command::Receive { consumer, event, fails } => {
                self.receive_one(consumer, &event_of(event)?, fails)
            }
            Command::ReceiveOther { consumer, event } => {
                let event =
                    Event { body: Body::json(r#"{"quantity":"1000"}"#)?, ..event_of(event)? };
                self.receive_one(consumer, &event, false)
            }
            Command::ReceiveInOrder { consumer, event, place: (sequence, after) } => {
                let event = event_of(event)?;
                let receive = receive_of(consumer, &event)?
                    .in_order(event.ordering_key, Place { begun: Millis::new(0), sequence, after });
                self.receive(&receive, false)
            }
            Command::Cancel(event) => {
                let cancel = Cancel::new(
                    [EventId::new(event.to_string())?],
                    Reason::new("the client has changed its mind"),
                )?;
                Ok(operated(&never(ended(self.sender().run(cancel, self.clock))?), "cancelled"))
            }
            Command::Redrive(event) => {
                let redrive = Redrive::new(
                    [EventId::new(event.to_string())?],
                    self.kept.redrive_window(&self.policy),
                )?;
                Ok(operated(&never(ended(self.sender().run(redrive, self.clock))?), "redriven"))
            }
            Command::Discard(event) => {
                let discard =
                    Discard::new([EventId::new(event.to_string())?], Reason::new("sent by hand"))?;
                Ok(operated(&never(ended(self.sender().run(discard, self.clock))?), "discarded"))
            }
            Command::CountFailure { consumer, event, limit } => {
                let reason = Reason::new("the points program is away");
                let count =
                    CountFailure::new(Consumer::new(consumer)?, &event_of(event)?, reason, limit);
                Ok(match ended(self.receiver().run(count, self.clock))? {
                    Ended::Done(FailureCounted::ComesAgain) => Outcome::of("comes again"),
                    Ended::Done(FailureCounted::Poisoned) => Outcome::of("poisoned"),
                    Ended::Done(FailureCounted::AppliedAlready) => Outcome::of("applied already"),
                    Ended::Refused(refusal) => Outcome::refused(refusal),
                })
            }
            Command::Intend { consumer, event } => self.intend(consumer, event),
            Command::StartCall { consumer, event } => {
                let start = Start::new(
                    call_of(consumer, event)?,
                    Duration::from_millis(PATIENCE),
                    WhenUnknown::Ask,
                );
                Ok(match ended(self.receiver().run(start, self.clock))? {
                    Ended::Done(Started::Call(_)) => Outcome::of("make the call"),
                    Ended::Done(Started::UnderWay) => Outcome::of("somebody is making it"),
                    Ended::Done(Started::Ask) => Outcome::of("ask the other side"),
                    Ended::Done(Started::Wait) => Outcome::of("wait for an operator"),
                    Ended::Done(Started::Done(None)) => Outcome::of("done already"),
                    Ended::Done(Started::Done(Some(note))) => {
                        Outcome::of(format_args!("done already: {note}"))
                    }
                    Ended::Refused(refusal) => Outcome::refused(refusal),
                })
            }
            Command::CallDone { consumer, event } => {
                let end = CallEnd::Done(Some(Reason::new(format_args!("receipt {event}"))));
                Ok(
                    match ended(
                        self.receiver()
                            .run(Resolve::new(call_of(consumer, event)?, end), self.clock),
                    )? {
                        Ended::Done(()) => Outcome::of("recorded"),
                        Ended::Refused(refusal) => Outcome::refused(refusal),
                    },
                )
            }
            Command::Purge => self.purge(),
            Command::Count => self.count(),
            Command::Wait(millis) => {
                self.clock = self.clock + Duration::from_millis(millis);
                Ok(Outcome::of("done"))
            }
            Command::StepBack(millis) => {
                self.clock = self.clock.before(Duration::from_millis(millis));
                Ok(Outcome::of("done"))
            }
            Command::Crash => {
                self.reopen();
                Ok(Outcome::of("done"))
            }
            Command::Drain(relay) => self.drain(relay),
        }
    }

    fn register(&self, buy: Purchase) -> Result<Outcome, Interrupt> {
        let request = request_of(buy)?;
        Ok(match ended(self.sender().run(Register::new(&request), self.clock))? {
            Ended::Done(registered) => Outcome::of(registered_text(&registered)),
            Ended::Refused(refusal) => Outcome::refused(refusal),
        })
    }

    fn commit(&self, buy: Purchase) -> Result<Outcome, Interrupt> {
        let request = request_of(buy)?;
        Ok(match ended(self.sender().run(order_of(&request, buy)?, self.clock))? {
            Ended::Done(committed) => Outcome::of(committed_text(&committed)),
            Ended::Refused(refusal) => Outcome::refused(refusal),
        })
    }

    /// Register and commit in one transaction, with a row of the user's own if there is one.
    fn place(&self, buy: Purchase, own: Option<(&str, &str, bool)>) -> Result<Outcome, Interrupt> {
        let request = request_of(buy)?;
        let order = order_of(&request, buy)?;
        let result = self.sender().write(self.clock, |tx| {
            let registered =
                tx.run(Register::new(&request)).map_err(UserError::<ErrorOf<H>>::of)?;
            if let Some((key, value, _)) = own {
                let put = H::put_own_row(tx.inner_mut(), key, value);
                put.map_err(|error| UserError::Store(RunError::Store(FaultError::Store(error))))?;
            }
            let committed = tx.run(&order).map_err(UserError::of)?;
            if own.is_some_and(|(_, _, fails)| fails) {
                return Err(UserError::Fails);
            }
            Ok(format!("{}; {}", registered_text(&registered), committed_text(&committed)))
        });
        match ended(result)? {
            Ended::Done(text) => Ok(Outcome::of(text)),
            Ended::Refused(UserError::Fails) => Ok(Outcome::of("rolled back")),
            Ended::Refused(UserError::Refused(why)) => Ok(Outcome::refused(why)),
            Ended::Refused(UserError::Store(error)) => match ended(Err::<(), _>(error))? {
                Ended::Done(()) | Ended::Refused(()) => {
                    Err(Failure::new("a refusal without a reason").into())
                }
            },
        }
    }

    /// Claims, and says when there will be more.
    fn claim(&mut self, relay: &'static str) -> Result<(Outcome, Option<Millis>), Interrupt> {
        let claim = Claim::new(&self.policy, Owner::new(relay)?, Duration::from_millis(LEASE), 8)?;
        let claimed = never(ended(self.sender().run(claim, self.clock))?);
        let events: Vec<&str> = claimed
            .runs
            .iter()
            .flat_map(|run| &run.deliveries)
            .map(|one| one.event.as_str())
            .collect();
        let mut text = format!(
            "claimed {}",
            if events.is_empty() { "nothing".to_string() } else { events.join(" ") }
        );
        claimed.dead.iter().for_each(|event| text.push_str(&format!(", dead {event}")));
        let runs =
            claimed.runs.into_iter().map(|run| InHand { run, confirmed: Vec::new(), ended: None });
        self.relays.entry(relay).or_default().extend(runs);
        Ok((Outcome::of(text), claimed.next_due))
    }

    /// Publishes what the relay has in hand, event by event; what happened to each is noted at
    /// once, for a settle or a second try.
    fn publish(&mut self, relay: &'static str, broker: Broker) -> Result<Outcome, Interrupt> {
        let mut texts = Vec::new();
        for at in 0..self.relays.get(relay).map_or(0, Vec::len) {
            while let Some((event, until)) = self.next_to_publish(relay, at) {
                let (text, ending) = self.publish_one(&event, until, broker)?;
                texts.push(format!("{event} {text}"));
                if matches!(broker, Broker::Kills(kills) if kills.to_string() == event.as_str()) {
                    self.reopen();
                    return Ok(Outcome::of(texts.join("; ")));
                }
                if let Some(hand) = self.relays.get_mut(relay).and_then(|hands| hands.get_mut(at)) {
                    match ending {
                        None => hand.confirmed.push(event),
                        Some(ending) => hand.ended = Some((event, ending)),
                    }
                }
            }
        }
        Ok(Outcome::of(if texts.is_empty() {
            "nothing to publish".to_string()
        } else {
            texts.join("; ")
        }))
    }

    fn next_to_publish(&self, relay: &str, at: usize) -> Option<(EventId, Millis)> {
        let hand = self.relays.get(relay)?.get(at)?;
        if hand.ended.is_some() {
            return None;
        }
        hand.run
            .deliveries
            .get(hand.confirmed.len())
            .map(|delivery| (delivery.event.clone(), hand.run.until))
    }

    /// Publishes one event, and says what to settle it with if it is not confirmed.
    fn publish_one(
        &mut self,
        id: &EventId,
        until: Millis,
        broker: Broker,
    ) -> Result<(String, Option<Ending>), Interrupt> {
        let event = self.read_event(id)?;
        let is = |other: EventRef| other.to_string() == id.as_str();
        let failed = |text: &str| {
            Ok((text.to_string(), Some(Ending::Failed(Reason::new("the broker failed")))))
        };
        let mut lost = broker == Broker::AnswerLost;
        match self.plan.publish() {
            None => {}
            Some(PublishFault::Fails) => return failed("failed"),
            Some(PublishFault::ConfirmationLost) => lost = true,
            Some(PublishFault::LeaseRunsOut) => {
                self.clock = self.clock.max(until);
                self.plan.pause(true);
                let rival = self
                    .claim("relay-9")
                    .and_then(|_| self.publish("relay-9", broker))
                    .and_then(|_| self.settle("relay-9"));
                self.plan.pause(false);
                let _settled = rival?;
            }
        }
        match broker {
            Broker::FailsOn(other) if is(other) => failed("failed"),
            Broker::Rejects(other) if is(other) => Ok((
                "rejected".to_string(),
                Some(Ending::Rejected(Reason::new("the broker will never take it"))),
            )),
            Broker::Kills(other) if is(other) => Ok(("killed the program".to_string(), None)),
            Broker::Unreachable => Ok((
                "unavailable".to_string(),
                Some(Ending::Unavailable(Reason::new("the broker is away"))),
            )),
            Broker::Takes
            | Broker::AnswerLost
            | Broker::FailsOn(_)
            | Broker::Rejects(_)
            | Broker::Kills(_) => {
                let text = self.arrive(&event)?;
                if lost { failed(&format!("{text}, answer lost")) } else { Ok((text, None)) }
            }
        }
    }

    fn read_event(&self, id: &EventId) -> Result<Event, Interrupt> {
        let store = self.sender();
        let rows = store
            .view()
            .and_then(|mut view| view.load(&Query::rows([Key::Event(id.clone())])))
            .map_err(interrupt)?;
        let event = rows
            .into_vec()
            .into_iter()
            .find_map(|row| if let Record::Event(event) = row.record { Some(event) } else { None });
        event.ok_or_else(|| {
            Failure::new(format_args!("P3: event {id} was claimed, but it is not there")).into()
        })
    }

    /// The event reaches the consumers.
    fn arrive(&mut self, event: &Event) -> Result<String, Interrupt> {
        if !self.arrivals.contains(&event.id) {
            self.arrivals.push(event.id.clone());
        }
        let mut texts = Vec::new();
        for consumer in self.scenario.consumers {
            texts.push(format!("{} by {consumer}", self.receive_one(consumer, event, false)?.text));
        }
        Ok(texts.join(", "))
    }

    fn receive_one(
        &self,
        consumer: &str,
        event: &Event,
        fails: bool,
    ) -> Result<Outcome, Interrupt> {
        self.receive(&receive_of(consumer, event)?, fails)
    }

    fn receive(&self, receive: &Receive, fails: bool) -> Result<Outcome, Interrupt> {
        let result = if fails {
            self.receiver().write(self.clock, |tx| {
                let received = tx.run(receive).map_err(UserError::<ErrorOf<H>>::of)?;
                if received == Received::Applied { Err(UserError::Fails) } else { Ok(received) }
            })
        } else {
            self.receiver().run(receive, self.clock).map_err(|error| match error {
                RunError::Refused(refusal) => {
                    RunError::Refused(UserError::Refused(refusal.to_string()))
                }
                RunError::Conflict(key) => RunError::Conflict(key),
                RunError::Store(error) => RunError::Store(error),
                RunError::Unknown(error) => RunError::Unknown(error),
            })
        };
        match ended(result)? {
            Ended::Done(Received::Applied) => Ok(Outcome::of("applied")),
            Ended::Done(Received::Duplicate) => Ok(Outcome::of("skipped")),
            Ended::Done(Received::Poisoned) => Ok(Outcome::of("poisoned")),
            Ended::Done(Received::WaitsFor(sequence)) => {
                Ok(Outcome::of(format_args!("waits for {sequence}")))
            }
            Ended::Refused(UserError::Fails) => Ok(Outcome::of("rolled back")),
            Ended::Refused(UserError::Refused(why)) => Ok(Outcome::refused(why)),
            Ended::Refused(UserError::Store(error)) => match ended(Err::<(), _>(error))? {
                Ended::Done(()) | Ended::Refused(()) => {
                    Err(Failure::new("a refusal without a reason").into())
                }
            },
        }
    }

    /// Receives an event, and records in the same commit that a call is to be made, unless it was
    /// received before.
    fn intend(&self, consumer: &str, event: EventRef) -> Result<Outcome, Interrupt> {
        let receive = receive_of(consumer, &event_of(event)?)?;
        let call = call_of(consumer, event)?;
        let result = self.receiver().write(self.clock, |tx| {
            let received = tx.run(&receive).map_err(UserError::<ErrorOf<H>>::of)?;
            if received == Received::Applied {
                let new = tx.run(Intend::new(call.clone())).map_err(UserError::of)?;
                return Ok(if new {
                    "applied, a call is to be made"
                } else {
                    "applied, but the call was there before"
                });
            }
            Ok("skipped")
        });
        match ended(result)? {
            Ended::Done(text) => Ok(Outcome::of(text)),
            Ended::Refused(UserError::Fails) => Ok(Outcome::of("rolled back")),
            Ended::Refused(UserError::Refused(why)) => Ok(Outcome::refused(why)),
            Ended::Refused(UserError::Store(error)) => match ended(Err::<(), _>(error))? {
                Ended::Done(()) | Ended::Refused(()) => {
                    Err(Failure::new("a refusal without a reason").into())
                }
            },
        }
    }

    /// Purges every table of each store, in batches so small that they do not end with the table.
    fn purge(&self) -> Result<Outcome, Interrupt> {
        const BATCH: NonZeroU16 = NonZeroU16::MIN.saturating_add(1);
        const BATCHES: usize = 100;
        let mut texts = Vec::new();
        for table in Purge::TABLES {
            let mut removed = 0;
            for side in &self.sides {
                let mut next = None;
                for batch in 0.. {
                    if batch == BATCHES {
                        return Err(
                            Failure::new(format_args!("the purge of {table} has no end")).into()
                        );
                    }
                    let purge = Purge::new(&self.kept, table, BATCH);
                    let purge = if let Some(key) = next { purge.after(key) } else { purge };
                    let purged = never(ended(side.run(purge, self.clock))?);
                    removed += purged.removed;
                    next = purged.next;
                    if next.is_none() {
                        break;
                    }
                }
            }
            if removed > 0 {
                texts.push(format!("{table}={removed}"));
            }
        }
        Ok(Outcome::of(format_args!(
            "removed {}",
            if texts.is_empty() { "nothing".to_string() } else { texts.join(" ") }
        )))
    }

    fn renew(&mut self, relay: &str) -> Result<Outcome, Interrupt> {
        let leases =
            self.relays.get(relay).into_iter().flatten().map(|hand| hand.run.lease.clone());
        let renewed = never(ended(
            self.sender().run(Renew::new(leases, Duration::from_millis(LEASE)), self.clock),
        )?);
        for (lease, until) in &renewed.leases {
            let hands = self.relays.get_mut(relay).into_iter().flatten();
            hands.filter(|hand| hand.run.lease == *lease).for_each(|hand| hand.run.until = *until);
        }
        let stale: Vec<String> =
            renewed.stale.iter().map(|stale| format!("stale: {}", stale.why)).collect();
        Ok(Outcome::of(if stale.is_empty() {
            format!("{} renewed", renewed.leases.len())
        } else {
            stale.join("; ")
        }))
    }

    fn settle(&mut self, relay: &str) -> Result<twobox::Settled, Interrupt> {
        let hands = self.relays.get(relay).cloned().unwrap_or_default();
        let results = hands.into_iter().map(|hand| RunResult {
            lease: hand.run.lease,
            confirmed: hand.confirmed,
            ended: hand.ended,
        });
        let settled =
            never(ended(self.sender().run(Settle::new(&self.policy, results), self.clock))?);
        self.relays.remove(relay);
        Ok(settled)
    }

    fn count(&self) -> Result<Outcome, Interrupt> {
        let dumps = self.dumps()?;
        let rows = || dumps.iter().flat_map(Dump::records);
        let count = |table: Table| rows().filter(|row| row.table() == table).count();
        let pending = rows().filter(|row| matches!(row, Record::Outbox(_, row) if row.state == twobox::DeliveryState::Pending));
        Ok(Outcome::of(format_args!(
            "requests={} orders={} pending={} inbox={} effects={}",
            count(Table::Requests),
            count(Table::Orders),
            pending.count(),
            count(Table::Inbox),
            count(Table::Effects)
        )))
    }

    /// A relay works until nothing is due any more, and waits for what is due later.
    fn drain(&mut self, relay: &'static str) -> Result<Outcome, Interrupt> {
        const ROUNDS: usize = 200;
        let mut all = twobox::Settled::default();
        for _ in 0..ROUNDS {
            self.publish(relay, self.scenario.broker)?;
            let settled = self.settle(relay)?;
            all.confirmed += settled.confirmed;
            all.dead.extend(settled.dead);
            let (claimed, next) = self.claim(relay)?;
            if let Some((_, dead)) = claimed.text.split_once(", dead ") {
                all.dead.push(EventId::new(dead)?);
            }
            if self.relays.get(relay).is_none_or(Vec::is_empty) {
                match next {
                    None => {
                        let tally = Tally(&all).to_string();
                        let tally = if tally == "nothing settled" {
                            String::new()
                        } else {
                            format!(", {tally}")
                        };
                        return Ok(Outcome::of(format_args!("at rest{tally}")));
                    }
                    Some(due) => self.clock = self.clock.max(due),
                }
            }
        }
        Err(Failure::new(format_args!("{relay} has not come to rest after {ROUNDS} rounds")).into())
    }
}

/// What was settled, as text.
struct Tally<'a>(&'a twobox::Settled);

impl fmt::Display for Tally<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut texts = Vec::new();
        for (count, what) in [
            (self.0.confirmed, "confirmed"),
            (self.0.retried, "retried"),
            (self.0.released, "released"),
        ] {
            if count > 0 {
                texts.push(format!("{count} {what}"));
            }
        }
        texts.extend(self.0.dead.iter().map(|event| format!("dead {event}")));
        texts.extend(self.0.stale.iter().map(|stale| format!("stale: {}", stale.why)));
        f.write_str(&if texts.is_empty() {
            "nothing settled".to_string()
        } else {
            texts.join(", ")
        })
    }
}

fn placed_text(placed: &Placed) -> String {
    let events: Vec<&str> = placed.events.iter().map(EventId::as_str).collect();
    format!("{} with {}", placed.order, events.join(" "))
}

fn registered_text(registered: &Registered) -> String {
    match registered {
        Registered::New => "new".to_string(),
        Registered::Open => "open".to_string(),
        Registered::Placed(placed) => format!("placed {}", placed_text(placed)),
    }
}

fn committed_text(committed: &Committed) -> String {
    format!(
        "{} {}",
        if committed.repeated { "repeated" } else { "committed" },
        placed_text(&committed.placed)
    )
}

fn operated(operated: &Operated, what: &str) -> Outcome {
    match operated.refused.first() {
        None => Outcome::of(what),
        Some((_, why)) => Outcome::of(format_args!("not {what}: {why}")),
    }
}

fn receive_of(consumer: &str, event: &Event) -> Result<Receive, Invalid> {
    let effect = Body::text(format!("{consumer} heard of {}", event.id))?;
    Ok(Receive::new(Consumer::new(consumer)?, event).effect(effect))
}

fn call_of(consumer: &str, event: EventRef) -> Result<CallKey, Invalid> {
    Ok(CallKey { consumer: Consumer::new(consumer)?, event: EventId::new(event.to_string())? })
}

fn request_of(buy: Purchase) -> Result<Request, Invalid> {
    let quantity = buy.quantity.to_string();
    Request::new(
        "shop",
        buy.request,
        Fingerprint::of([("item", buy.item), ("quantity", quantity.as_str())]),
    )
}

fn order_of(request: &Request, buy: Purchase) -> Result<CommitOrder<'_>, Invalid> {
    let body = Body::json(format!(r#"{{"item":"{}","quantity":{}}}"#, buy.item, buy.quantity))?;
    let draft = |event_type: &&'static str| {
        let id = EventRef { event_type, request: buy.request };
        let draft = Draft::new(event_type, event_body(id)?)?.id(EventId::new(id.to_string())?);
        Ok(match buy.lane {
            None => draft,
            Some(lane) => draft.ordering_key(OrderingKey::new(lane)?),
        })
    };
    let events = buy.events.iter().map(draft).collect::<Result<Vec<_>, Invalid>>()?;
    CommitOrder::new(request, OrderId::new(format!("order:{}", buy.request))?, body, events)
}

fn event_body(event: EventRef) -> Result<Body, Invalid> {
    Body::json(format!(r#"{{"order":"order:{}"}}"#, event.request))
}

/// The event as it comes from a broker, to a consumer that knows nothing of the sender's store.
fn event_of(event: EventRef) -> Result<Event, Invalid> {
    Ok(Event {
        id: EventId::new(event.to_string())?,
        order: OrderId::new(format!("order:{}", event.request))?,
        event_type: twobox::EventType::new(event.event_type)?,
        schema_version: 1,
        ordering_key: OrderingKey::new(format!("order:{}", event.request))?,
        time: Millis::new(START),
        headers: twobox::Headers::new(),
        body: event_body(event)?,
    })
}

/// Whether a step means anything to this harness.
pub(crate) fn applies<H: Harness>(command: Command) -> bool {
    H::OWN_ROWS || !matches!(command, Command::ReadOwnRow(_))
}
