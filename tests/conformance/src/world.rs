//! The order shop: a sender's store, a receiver's store (the same or another one), relays, and a
//! clock. It executes commands on them through the drivers of the core, and through a plan of
//! faults.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use twobox::call::{CallEnd, CallKey, Intend, Resolve, Start, Started, WhenUnknown};
use twobox::{
    Body, Cancel, Checked, Claim, Claimed, CommitOrder, Committed, Consumer, CountFailure,
    DeliveryPolicy, Destination, Discard, Draft, Dump, Ending, Event, EventId, EventState,
    FailureCounted, Invalid, LanePlace, Leased, Message, Millis, Operated, OrderId, OrderingKey,
    Owner, PlacedOrder, Reason, Receipt, Receive, Received, Redrive, Register, Registered, Renew,
    Request, Retention, RunError, Settle, Settled, Stale, StaleLease, StoreError, Summary, Table,
    WhenDead,
};

use crate::failure::Failure;
use crate::fault::{BeginFault, Plan, PublishFault};
use crate::faulty::FaultError;
use crate::scenario::{Broker, Command, EventRef, LEASE, PATIENCE, Purchase, Scenario};
use crate::side::{Consuming, Delivering, Placing, Ran, Side, UserError};

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

fn ended<O, R, E: StoreError>(result: Ran<O, E, R>) -> Result<Ended<O, R>, Interrupt> {
    match result {
        Ok(outcome) => Ok(Ended::Done(outcome)),
        Err(RunError::Refused(refusal)) => Ok(Ended::Refused(refusal)),
        Err(RunError::Conflict(None)) => Err(Interrupt::Failed("a conflict".to_string())),
        Err(RunError::Conflict(Some(key))) => Err(Interrupt::Failed(format!("conflict at {key}"))),
        Err(RunError::Store(error) | RunError::Unknown(error)) => Err(interrupt(error)),
    }
}

fn interrupt<E: StoreError>(error: FaultError<E>) -> Interrupt {
    match error {
        FaultError::Crash => Interrupt::Crash,
        FaultError::Injected => Interrupt::Failed("an injected error".to_string()),
        FaultError::Contract(what) => Interrupt::Broken(Failure::new(what)),
        FaultError::Store(step, error) => Interrupt::Broken(Failure::store(error).at(step)),
    }
}

/// The outcome of what cannot be refused.
fn never<O, E: StoreError>(result: Ran<O, E, Infallible>) -> Result<O, Interrupt> {
    match ended(result)? {
        Ended::Done(outcome) => Ok(outcome),
        Ended::Refused(refusal) => match refusal {},
    }
}

/// What the code of a user came to.
fn of_user<O, E: StoreError>(
    result: Ran<O, E, UserError<E>>,
    text: impl FnOnce(O) -> String,
) -> Result<Outcome, Interrupt> {
    match ended(result)? {
        Ended::Done(done) => Ok(Outcome::of(text(done))),
        Ended::Refused(UserError::Fails) => Ok(Outcome::of("rolled back")),
        Ended::Refused(UserError::Refused(why)) => Ok(Outcome::refused(why)),
        Ended::Refused(UserError::Store(error)) => never(Err(error)),
    }
}

/// Events that a relay has claimed, and how far it got with them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct InHand {
    leased: Leased,
    confirmed: usize,
    ending: Option<Ending>,
}

/// The shop at one moment.
pub(crate) struct World<'s, S> {
    pub(crate) scenario: &'s Scenario,
    pub(crate) plan: Arc<Plan>,
    policy: Checked<DeliveryPolicy>,
    kept: Checked<Retention>,
    /// One store or two: the first is the sender's, the last the receiver's.
    sides: Vec<S>,
    clock: Millis,
    relays: BTreeMap<&'static str, Vec<InHand>>,
    /// The events in the order in which each came to the consumers for the first time.
    arrivals: Vec<EventId>,
}

impl<'s, S: Side> World<'s, S> {
    pub(crate) fn new(scenario: &'s Scenario, layout: Layout, plan: Plan) -> Self {
        let plan = Arc::new(plan);
        let stores = match layout {
            Layout::OneStore => 1,
            Layout::TwoStores => 2,
        };
        let sides = (0..stores).map(|_| S::open(&plan)).collect();
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

    fn sender(&self) -> &S {
        &self.sides[0]
    }

    fn receiver(&self) -> &S {
        &self.sides[self.sides.len() - 1]
    }

    /// Ends the program and opens the stores again: what was not committed is lost, and so is what
    /// the relays had in hand.
    pub(crate) fn reopen(&mut self) {
        self.sides = std::mem::take(&mut self.sides).into_iter().map(S::crash).collect();
        self.relays.clear();
    }

    /// All rows of each store, the sender's first. No fault strikes here.
    pub(crate) fn dumps(&self) -> Result<Vec<Dump>, Failure> {
        self.sides.iter().map(S::dump).collect()
    }

    /// The user's own rows that the scenario writes.
    pub(crate) fn own_rows(&self) -> Result<Vec<Option<String>>, Failure> {
        let keys = self.scenario.steps.iter().filter_map(|step| {
            if let Command::PlaceWithOwnRow { key, .. } = step.command { Some(key) } else { None }
        });
        keys.map(|key| self.own_row(key)).collect()
    }

    fn own_row(&self, key: &str) -> Result<Option<String>, Failure> {
        self.sender().own_row(key)
    }

    pub(crate) fn arrivals(&self) -> &[EventId] {
        &self.arrivals
    }

    /// All that the rest of a run depends on, beside the step.
    pub(crate) fn state(&self) -> Result<impl std::hash::Hash + use<S>, Failure> {
        let rows = self.sides.iter().map(S::stored).collect::<Result<Vec<_>, _>>()?;
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
            | Command::RedriveAll
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
            Command::Claim(relay) => Ok(Outcome::of(ClaimedText(&self.claim(relay)?))),
            Command::Publish(relay, broker) => self.publish(relay, broker),
            Command::Renew(relay) => self.renew(relay),
            Command::Settle(relay) => Ok(Outcome::of(Tally(&self.settle(relay)?))),
            Command::Receive { consumer, event, fails: false } => {
                self.deliver(consumer, &message_of(event_of(event)?), false)
            }
            Command::Receive { consumer, event, fails: true } => {
                let receive = receive_of(consumer, &event_of(event)?)?;
                self.consume(&Consuming { receive, intend: None, fails: true })
            }
            Command::ReceiveOther { consumer, event } => {
                let body = Body::json(r#"{"quantity":"1000"}"#)?;
                self.deliver(consumer, &message_of(Event { body, ..event_of(event)? }), false)
            }
            Command::ReceiveInOrder { consumer, event, place: (sequence, after) } => {
                let place = LanePlace { begun: Millis::new(0), sequence, after };
                let message = Message { place, ..message_of(event_of(event)?) };
                self.deliver(consumer, &message, true)
            }
            Command::Cancel(event) => {
                let cancel = Cancel::new(
                    [EventId::new(event.to_string())?],
                    Reason::new("the client has changed its mind"),
                )?;
                Ok(operated(&never(self.sender().run(cancel, self.clock))?, "cancelled"))
            }
            Command::Redrive(event) => {
                let redrive =
                    Redrive::new([EventId::new(event.to_string())?], self.kept.redrive_window())?;
                Ok(operated(&never(self.sender().run(redrive, self.clock))?, "redriven"))
            }
            Command::RedriveAll => {
                let window = self.kept.redrive_window();
                let operated = never(self.sender().redrive(window, self.clock))?;
                let done: Vec<&str> = operated.done.iter().map(EventId::as_str).collect();
                let done = if done.is_empty() { "nothing".to_string() } else { done.join(" ") };
                Ok(Outcome::of(format_args!("redriven {done}")))
            }
            Command::Discard(event) => {
                let discard =
                    Discard::new([EventId::new(event.to_string())?], Reason::new("sent by hand"))?;
                Ok(operated(&never(self.sender().run(discard, self.clock))?, "discarded"))
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
            Command::Intend { consumer, event } => {
                let receive = receive_of(consumer, &event_of(event)?)?;
                let intend = Some(Intend::new(call_of(consumer, event)?));
                self.consume(&Consuming { receive, intend, fails: false })
            }
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
        let placing = Placing {
            request: &request,
            order: &order_of(&request, buy)?,
            own: own.map(|(key, value, _)| (key, value)),
            fails: own.is_some_and(|(_, _, fails)| fails),
        };
        of_user(self.sender().place(&placing, self.clock), |(registered, committed)| {
            format!("{}; {}", registered_text(&registered), committed_text(&committed))
        })
    }

    fn claim_for(&self, relay: &str) -> Result<Claim<'_>, Invalid> {
        Claim::new(&self.policy, Owner::new(relay)?, Duration::from_millis(LEASE), 8)
    }

    fn take_in_hand(&mut self, relay: &'static str, claimed: &Claimed) {
        let hands = claimed.leased.iter().cloned();
        let hands = hands.map(|leased| InHand { leased, confirmed: 0, ending: None });
        self.relays.entry(relay).or_default().extend(hands);
    }

    fn claim(&mut self, relay: &'static str) -> Result<Claimed, Interrupt> {
        let claim = self.claim_for(relay)?;
        let (_, claimed) = never(self.sender().exchange(None, Some(claim), self.clock))?;
        let claimed = claimed.unwrap_or_default();
        self.take_in_hand(relay, &claimed);
        Ok(claimed)
    }

    /// What a relay has to settle.
    fn settle_for(&self, relay: &str) -> Option<Settle<'_>> {
        let hands = self.relays.get(relay).filter(|hands| !hands.is_empty())?;
        let settle = |hand: &InHand| hand.leased.settle(hand.confirmed, hand.ending.clone());
        Some(Settle::new(&self.policy, hands.iter().map(settle)))
    }

    fn settle(&mut self, relay: &str) -> Result<Settled, Interrupt> {
        let settle = self.settle_for(relay).unwrap_or_else(|| Settle::new(&self.policy, []));
        let (settled, _) = never(self.sender().exchange(Some(settle), None, self.clock))?;
        self.relays.remove(relay);
        Ok(settled.unwrap_or_default())
    }

    /// Publishes what the relay has in hand, event by event; what happened to each is noted at
    /// once, for a settle or a second try.
    fn publish(&mut self, relay: &'static str, broker: Broker) -> Result<Outcome, Interrupt> {
        let mut texts = Vec::new();
        for at in 0..self.relays.get(relay).map_or(0, Vec::len) {
            while let Some((event, until)) = self.next_to_publish(relay, at) {
                let (text, ending) = self.publish_one(&event, until, broker)?;
                texts.push(format!("{} {text}", event.id));
                if matches!(broker, Broker::Kills(kills) if is(kills, &event)) {
                    self.reopen();
                    return Ok(Outcome::of(texts.join("; ")));
                }
                if let Some(hand) = self.relays.get_mut(relay).and_then(|hands| hands.get_mut(at)) {
                    match ending {
                        None => hand.confirmed += 1,
                        ending => hand.ending = ending,
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

    fn next_to_publish(&self, relay: &str, at: usize) -> Option<(Event, Millis)> {
        let hand = self.relays.get(relay)?.get(at).filter(|hand| hand.ending.is_none())?;
        let next = hand.leased.events.get(hand.confirmed)?;
        Some((next.message.event.clone(), hand.leased.until))
    }

    /// Publishes one event, and says what to settle it with if it is not confirmed.
    fn publish_one(
        &mut self,
        event: &Event,
        until: Millis,
        broker: Broker,
    ) -> Result<(String, Option<Ending>), Interrupt> {
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
            Broker::FailsOn(other) if is(other, event) => failed("failed"),
            Broker::Rejects(other) if is(other, event) => Ok((
                "rejected".to_string(),
                Some(Ending::Rejected(Reason::new("the broker will never take it"))),
            )),
            Broker::Kills(other) if is(other, event) => {
                Ok(("killed the program".to_string(), None))
            }
            Broker::Unreachable => Ok((
                "unavailable".to_string(),
                Some(Ending::Unavailable(Reason::new("the broker is away"))),
            )),
            Broker::Takes
            | Broker::AnswerLost
            | Broker::FailsOn(_)
            | Broker::Rejects(_)
            | Broker::Kills(_) => {
                let text = self.arrive(event)?;
                if lost { failed(&format!("{text}, answer lost")) } else { Ok((text, None)) }
            }
        }
    }

    /// The event reaches the consumers.
    fn arrive(&mut self, event: &Event) -> Result<String, Interrupt> {
        if !self.arrivals.contains(&event.id) {
            self.arrivals.push(event.id.clone());
        }
        let message = message_of(event.clone());
        let mut texts = Vec::new();
        for consumer in self.scenario.consumers {
            texts.push(format!("{} by {consumer}", self.deliver(consumer, &message, false)?.text));
        }
        Ok(texts.join(", "))
    }

    /// An event comes to the inbox of a consumer.
    fn deliver(
        &self,
        consumer: &str,
        message: &Message,
        in_order: bool,
    ) -> Result<Outcome, Interrupt> {
        let effect = effect_of(consumer, &message.event)?;
        let consumer = Consumer::new(consumer)?;
        let delivering = Delivering { consumer, in_order, message, effect };
        match never(self.receiver().deliver(&delivering, self.clock))? {
            Receipt::Applied => Ok(Outcome::of("applied")),
            Receipt::Duplicate => Ok(Outcome::of("skipped")),
            Receipt::Poisoned => Ok(Outcome::of("poisoned")),
            Receipt::WaitsFor(sequence) => Ok(Outcome::of(format_args!("waits for {sequence}"))),
            Receipt::Refused(why) => Ok(Outcome::refused(why)),
            Receipt::Deferred(why) | Receipt::Failed(why) => {
                let what = format!("P5: an event was not applied, though nobody failed: {why}");
                Err(Failure::new(what).into())
            }
        }
    }

    /// A consumer receives an event in a transaction of its own making.
    fn consume(&self, consuming: &Consuming) -> Result<Outcome, Interrupt> {
        let intends = consuming.intend.is_some();
        of_user(self.receiver().consume(consuming, self.clock), |(received, new)| {
            let text = match received {
                Received::Applied if intends && new => "applied, a call is to be made",
                Received::Applied if intends => "applied, but the call was there before",
                Received::Applied => "applied",
                Received::Duplicate => "skipped",
                Received::Poisoned => "poisoned",
                Received::WaitsFor(sequence) => return format!("waits for {sequence}"),
            };
            text.to_string()
        })
    }

    /// Purges all tables of each store, in batches so small that they do not end with the table.
    fn purge(&self) -> Result<Outcome, Interrupt> {
        const BATCH: NonZeroU16 = NonZeroU16::MIN.saturating_add(1);
        let before = self.dumps()?;
        for side in &self.sides {
            let _rows = never(side.purge(&self.kept, BATCH, self.clock))?;
        }
        let after = self.dumps()?;
        let count =
            |dumps: &[Dump], table| dumps.iter().map(|dump| dump.count(table)).sum::<usize>();
        let texts = Table::ALL.into_iter().filter_map(|table| {
            let removed = count(&before, table).saturating_sub(count(&after, table));
            (removed > 0).then(|| format!("{table}={removed}"))
        });
        let texts: Vec<String> = texts.collect();
        let removed = if texts.is_empty() { "nothing".to_string() } else { texts.join(" ") };
        Ok(Outcome::of(format_args!("removed {removed}")))
    }

    fn renew(&mut self, relay: &str) -> Result<Outcome, Interrupt> {
        let hands = self.relays.get(relay).into_iter().flatten();
        let leases = hands.map(|hand| hand.leased.lease.clone());
        let renew = Renew::new(leases, Duration::from_millis(LEASE));
        let renewed = never(self.sender().run(renew, self.clock))?;
        for (lease, until) in &renewed.leases {
            let hands = self.relays.get_mut(relay).into_iter().flatten();
            hands
                .filter(|hand| hand.leased.lease == *lease)
                .for_each(|hand| hand.leased.until = *until);
        }
        let stale: Vec<String> = renewed.stale.iter().map(stale_text).collect();
        Ok(Outcome::of(if stale.is_empty() {
            format!("{} renewed", renewed.leases.len())
        } else {
            stale.join("; ")
        }))
    }

    fn count(&self) -> Result<Outcome, Interrupt> {
        let dumps = self.dumps()?;
        let count = |table: Table| dumps.iter().map(|dump| dump.count(table)).sum::<usize>();
        let events = dumps.iter().flat_map(|dump| dump.events().into_values());
        let pending = events
            .filter(|(state, _)| matches!(state, EventState::Pending | EventState::Leased))
            .count();
        Ok(Outcome::of(format_args!(
            "requests={} orders={} pending={} inbox={} effects={}",
            count(Table::Requests),
            count(Table::Orders),
            pending,
            count(Table::Inbox),
            count(Table::Effects)
        )))
    }

    /// A relay works until nothing is due any more, and waits for what is due later.
    fn drain(&mut self, relay: &'static str) -> Result<Outcome, Interrupt> {
        const ROUNDS: usize = 200;
        let mut all = Settled::default();
        for _ in 0..ROUNDS {
            self.publish(relay, self.scenario.broker)?;
            let (settle, claim) = (self.settle_for(relay), self.claim_for(relay)?);
            let exchanged = self.sender().exchange(settle, Some(claim), self.clock);
            let (settled, claimed) = never(exchanged)?;
            self.relays.remove(relay);
            let (settled, claimed) = (settled.unwrap_or_default(), claimed.unwrap_or_default());
            self.take_in_hand(relay, &claimed);
            all.confirmed += settled.confirmed;
            all.dead.extend(settled.dead);
            all.dead.extend(claimed.dead);
            if self.relays.get(relay).is_none_or(Vec::is_empty) {
                match claimed.next_due {
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

/// Why a lease does not count, as text. Tokens begin with the time and grow: which numbers they
/// are, the tables say (P6).
fn stale_text(stale: &StaleLease) -> String {
    let before = stale.lease.token;
    match &stale.why {
        Stale::TakenOver { owner, token } if *token > before => {
            format!("stale: {owner} has taken the lane since, with a newer token")
        }
        Stale::TakenOver { owner, token } => {
            format!("stale: {owner} has taken the lane since, with token {token} after {before}")
        }
        why @ (Stale::Ended | Stale::NoLane | Stale::Lost | _) => format!("stale: {why}"),
    }
}

/// What was settled, as text.
struct Tally<'a>(&'a Settled);

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
        texts.extend(self.0.dead.iter().map(|(event, _)| format!("dead {event}")));
        texts.extend(self.0.stale.iter().map(stale_text));
        f.write_str(&if texts.is_empty() {
            "nothing settled".to_string()
        } else {
            texts.join(", ")
        })
    }
}

/// What was claimed, as text.
struct ClaimedText<'a>(&'a Claimed);

impl fmt::Display for ClaimedText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("claimed")?;
        let events = || self.0.leased.iter().flat_map(|leased| &leased.events);
        events().try_for_each(|event| write!(f, " {}", event.message.event.id))?;
        if events().next().is_none() {
            f.write_str(" nothing")?;
        }
        self.0.dead.iter().try_for_each(|(event, _)| write!(f, ", dead {event}"))
    }
}

fn placed_text(placed: &PlacedOrder) -> String {
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

fn effect_of(consumer: &str, event: &Event) -> Result<Body, Invalid> {
    Body::text(format!("{consumer} heard of {}", event.id))
}

fn receive_of(consumer: &str, event: &Event) -> Result<Receive, Invalid> {
    Ok(Receive::new(Consumer::new(consumer)?, event).effect(effect_of(consumer, event)?))
}

/// The event on its way to a consumer that does not ask for order.
const fn message_of(event: Event) -> Message {
    let place = LanePlace { begun: Millis::new(0), sequence: 1, after: 0 };
    Message { event, place, attempt: 1 }
}

/// Whether this is the event.
fn is(other: EventRef, event: &Event) -> bool {
    other.to_string() == event.id.as_str()
}

fn call_of(consumer: &str, event: EventRef) -> Result<CallKey, Invalid> {
    Ok(CallKey { consumer: Consumer::new(consumer)?, event: EventId::new(event.to_string())? })
}

fn request_of(buy: Purchase) -> Result<Request, Invalid> {
    let quantity = buy.quantity.to_string();
    Request::new(
        "shop",
        buy.request,
        Summary::All.of([("item", buy.item), ("quantity", quantity.as_str())]),
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
        destination: Destination::default(),
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

/// Whether a step means anything to this side.
pub(crate) fn applies<S: Side>(command: Command) -> bool {
    S::OWN_ROWS || !matches!(command, Command::ReadOwnRow(_))
}
