//! Scenarios as data: what happens in an order shop, command by command, and what each command must
//! give.
//!
//! The same data drives the tests of an adapter, the fault matrix and the snapshots, and may drive
//! a model checker or a fuzzer.

use std::fmt;

/// A purchase: the request and the order that it creates. The request key is `shop/<request>`, the
/// order `order:<request>`, and an event of type `order.created` is `order-created:<request>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Purchase {
    /// The request id.
    pub request: &'static str,
    /// The first parameter.
    pub item: &'static str,
    /// The second parameter.
    pub quantity: u32,
    /// The types of its events.
    pub events: &'static [&'static str],
    /// The ordering key of its events; the order id if there is none.
    pub lane: Option<&'static str>,
}

/// Which event: its type, and the request whose order brought it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventRef {
    /// The type of the event.
    pub event_type: &'static str,
    /// The request id.
    pub request: &'static str,
}

impl fmt::Display for EventRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.event_type.replace('.', "-"), self.request)
    }
}

/// How the broker answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Broker {
    /// It takes everything, and hands it to all consumers at once.
    Takes,
    /// It fails on this event and takes the others.
    FailsOn(EventRef),
    /// It will never take this event and takes the others.
    Rejects(EventRef),
    /// It cannot be reached.
    Unreachable,
    /// It hands everything to the consumers, but its answer gets lost.
    AnswerLost,
    /// To publish this event kills the program; it takes the others.
    Kills(EventRef),
}

/// What somebody does: a client, a relay, a consumer, or the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Command {
    /// A client registers the request, in a commit of its own.
    Register(Purchase),
    /// A client commits the order with its events.
    Commit(Purchase),
    /// A client registers the request and commits the order in one transaction.
    Place(Purchase),
    /// The same, with a row of the user's own. If `fails`, the user's code fails at the end and
    /// everything is rolled back.
    PlaceWithOwnRow {
        /// What is bought.
        purchase: Purchase,
        /// The key of the row.
        key: &'static str,
        /// What it says.
        value: &'static str,
        /// Whether the user's code fails.
        fails: bool,
    },
    /// Somebody reads a row of the user's own.
    ReadOwnRow(&'static str),
    /// A relay claims what is due, up to eight events, for a minute.
    Claim(&'static str),
    /// A relay publishes what it has claimed.
    Publish(&'static str, Broker),
    /// A relay renews its leases, for a minute from now.
    Renew(&'static str),
    /// A relay settles what it has claimed.
    Settle(&'static str),
    /// A consumer receives an event and applies it. If `fails`, its code fails at the end and
    /// everything is rolled back.
    Receive {
        /// Who receives.
        consumer: &'static str,
        /// What.
        event: EventRef,
        /// Whether the consumer's code fails.
        fails: bool,
    },
    /// A consumer receives an event under an id that it knows, with other content.
    ReceiveOther {
        /// Who receives.
        consumer: &'static str,
        /// Whose id it has.
        event: EventRef,
    },
    /// A consumer that asks for order receives an event, with its place in its ordering key: its
    /// sequence, and that of the event before it.
    ReceiveInOrder {
        /// Who receives.
        consumer: &'static str,
        /// What.
        event: EventRef,
        /// The sequence, and the sequence of the event before it.
        place: (u64, u64),
    },
    /// An operator cancels an event that is not delivered yet.
    Cancel(EventRef),
    /// An operator redrives a dead event.
    Redrive(EventRef),
    /// An operator redrives all dead events.
    RedriveAll,
    /// An operator discards a dead event.
    Discard(EventRef),
    /// A consumer counts that it failed on an event; it is set aside at the `limit`-th failure.
    CountFailure {
        /// Who failed.
        consumer: &'static str,
        /// On what.
        event: EventRef,
        /// The limit.
        limit: u32,
    },
    /// A consumer receives an event, and records in the same commit that a call is to be made
    /// outside because of it.
    Intend {
        /// Who receives.
        consumer: &'static str,
        /// What.
        event: EventRef,
    },
    /// A consumer starts such a call, or learns that somebody did. After [`PATIENCE`] without an
    /// end it is unknown, and the rule is to ask.
    StartCall {
        /// Who calls.
        consumer: &'static str,
        /// Because of what.
        event: EventRef,
    },
    /// The other side says that the call has happened, now or when it is asked, and the consumer
    /// records that.
    CallDone {
        /// Who called.
        consumer: &'static str,
        /// Because of what.
        event: EventRef,
    },
    /// Somebody purges all tables, two rows at a time. Events are kept for a week; requests and
    /// inboxes for 60 days.
    Purge,
    /// Somebody counts rows: orders, pending events, inbox rows, effects.
    Count,
    /// So many milliseconds go by.
    Wait(u64),
    /// The clock steps back by so many milliseconds.
    StepBack(u64),
    /// The program ends without warning, and the stores are opened again.
    Crash,
    /// A relay works until nothing is left to do, waiting where it has to; the broker answers as
    /// the scenario says.
    Drain(&'static str),
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Register(buy) => write!(f, "a client registers {buy}"),
            Self::Commit(buy) => write!(f, "a client commits the order of {buy}"),
            Self::Place(buy) => {
                write!(f, "a client registers and commits {buy} in one transaction")
            }
            Self::PlaceWithOwnRow { purchase, key, value, fails } => {
                write!(f, "a client commits {purchase} with a row of its own, {key}={value}")?;
                f.write_str(if *fails { ", and fails" } else { "" })
            }
            Self::ReadOwnRow(key) => write!(f, "somebody reads the own row {key}"),
            Self::Claim(relay) => write!(f, "{relay} claims"),
            Self::Publish(relay, broker) => {
                write!(f, "{relay} publishes")?;
                match broker {
                    Broker::Takes => Ok(()),
                    Broker::FailsOn(event) => write!(f, ", the broker fails on {event}"),
                    Broker::Rejects(event) => write!(f, ", the broker rejects {event}"),
                    Broker::Unreachable => f.write_str(", the broker cannot be reached"),
                    Broker::AnswerLost => f.write_str(", the broker's answer is lost"),
                    Broker::Kills(event) => write!(f, ", {event} kills the program"),
                }
            }
            Self::Renew(relay) => write!(f, "{relay} renews its leases"),
            Self::Settle(relay) => write!(f, "{relay} settles"),
            Self::Receive { consumer, event, fails: false } => {
                write!(f, "{consumer} receives {event}")
            }
            Self::Receive { consumer, event, fails: true } => {
                write!(f, "{consumer} receives {event} and fails")
            }
            Self::ReceiveOther { consumer, event } => {
                write!(f, "{consumer} receives other content as {event}")
            }
            Self::ReceiveInOrder { consumer, event, place: (sequence, after) } => {
                write!(f, "{consumer} receives {event} with sequence {sequence} after {after}")
            }
            Self::Cancel(event) => write!(f, "an operator cancels {event}"),
            Self::Redrive(event) => write!(f, "an operator redrives {event}"),
            Self::RedriveAll => f.write_str("an operator redrives all that is dead"),
            Self::Discard(event) => write!(f, "an operator discards {event}"),
            Self::CountFailure { consumer, event, .. } => {
                write!(f, "{consumer} counts a failure on {event}")
            }
            Self::Intend { consumer, event } => {
                write!(f, "{consumer} receives {event} and records that a call is to be made")
            }
            Self::StartCall { consumer, event } => {
                write!(f, "{consumer} starts the call for {event}")
            }
            Self::CallDone { consumer, event } => {
                write!(f, "{consumer} records that the call for {event} is done")
            }
            Self::Purge => f.write_str("somebody purges all tables"),
            Self::Count => f.write_str("somebody counts"),
            Self::Wait(millis) => write!(f, "{millis} ms go by"),
            Self::StepBack(millis) => write!(f, "the clock steps back by {millis} ms"),
            Self::Crash => f.write_str("the program crashes and is started again"),
            Self::Drain(relay) => write!(f, "{relay} works until nothing is left"),
        }
    }
}

impl fmt::Display for Purchase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} {})", self.request, self.quantity, self.item)
    }
}

/// A command, and what it must give when there are no faults, as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Step {
    /// What is done.
    pub command: Command,
    /// What it gives. A text that begins with `refused` must be a refusal in every run, with or
    /// without faults.
    pub gives: &'static str,
}

/// A story with its outcome. It ends in [`Command::Drain`], so that runs with and without faults
/// come to the same end (P8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scenario {
    /// Its name, as it stands in the names of tests and snapshots.
    pub name: &'static str,
    /// What happens, for somebody who sees only this.
    pub story: &'static str,
    /// Which consumers the broker hands events to.
    pub consumers: &'static [&'static str],
    /// How the broker answers while a relay drains.
    pub broker: Broker,
    /// Whether a dead event lets those behind it go on.
    pub dead_lets_go_on: bool,
    /// An event is dead after so many failed publishes, or half as many starts again.
    pub max_failures: u32,
    /// What happens, one after the other.
    pub steps: &'static [Step],
}

/// How long a lease lasts, in milliseconds.
pub const LEASE: u64 = 60_000;

/// How long a call may take before nobody knows what became of it, in milliseconds.
pub const PATIENCE: u64 = 30_000;

const DAY: u64 = 24 * 60 * 60 * 1_000;

const NOTEBOOK: Purchase = Purchase {
    request: "req-001",
    item: "notebook",
    quantity: 2,
    events: &["order.created"],
    lane: None,
};
/// The same request with another quantity.
const MORE_NOTEBOOKS: Purchase = Purchase { quantity: 3, ..NOTEBOOK };
const PENCILS: Purchase = Purchase { request: "req-002", item: "pencil", quantity: 12, ..NOTEBOOK };
const PAID_NOTEBOOK: Purchase = Purchase { events: &["order.created", "order.paid"], ..NOTEBOOK };
/// Two orders in one lane, and a third in its own.
const FIRST_OF_LANE: Purchase = Purchase { lane: Some("customer-7"), ..NOTEBOOK };
const SECOND_OF_LANE: Purchase = Purchase { lane: Some("customer-7"), ..PENCILS };
const OTHER_LANE: Purchase =
    Purchase { request: "req-003", item: "eraser", quantity: 1, ..NOTEBOOK };
const THIRD_OF_LANE: Purchase = Purchase { lane: Some("customer-7"), ..OTHER_LANE };

const CREATED_1: EventRef = EventRef { event_type: "order.created", request: "req-001" };
const CREATED_2: EventRef = EventRef { event_type: "order.created", request: "req-002" };
const CREATED_3: EventRef = EventRef { event_type: "order.created", request: "req-003" };

const PAID_1: EventRef = EventRef { event_type: "order.paid", request: "req-001" };

const A: &str = "relay-1";
const B: &str = "relay-2";
const LOYALTY: &str = "loyalty";
const MAIL: &str = "mailing";

use Command::{
    CallDone, Cancel, Claim, Commit, Count, CountFailure, Crash, Discard, Drain, Intend, Place,
    PlaceWithOwnRow, Publish, Purge, ReadOwnRow, Receive, ReceiveInOrder, ReceiveOther, Redrive,
    RedriveAll, Register, Renew, Settle, StartCall, StepBack, Wait,
};

const fn step(command: Command, gives: &'static str) -> Step {
    Step { command, gives }
}

const fn receive(consumer: &'static str, event: EventRef, gives: &'static str) -> Step {
    step(Receive { consumer, event, fails: false }, gives)
}

/// The rest of a scenario is the same for most of them.
const PLAIN: Scenario = Scenario {
    name: "",
    story: "",
    consumers: &[LOYALTY],
    broker: Broker::Takes,
    dead_lets_go_on: false,
    max_failures: 16,
    steps: &[],
};

macro_rules! define {
    ($($name:ident: $story:literal { $($field:ident: $value:expr),* $(,)? } [$($step:expr),* $(,)?])*) => {
        $(
            #[doc = $story]
            #[allow(non_upper_case_globals)]
            pub const $name: Scenario =
                Scenario { name: stringify!($name), story: $story, $($field: $value,)* steps: &[$($step),*], ..PLAIN };
        )*

        /// All scenarios.
        pub const ALL: &[Scenario] = &[$($name),*];
    };
}

define! {
    buy_once: "A client buys two notebooks; a relay delivers the event, and the loyalty program applies it." {} [
        step(Register(NOTEBOOK), "new"),
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Publish(A, Broker::Takes), "order-created:req-001 applied by loyalty"),
        step(Settle(A), "1 confirmed"),
        step(Drain(A), "at rest"),
        step(Count, "requests=1 orders=1 pending=0 inbox=1 effects=1"),
    ]

    retry_request: "A client sends the same request again before its order exists, and twice after: there is one order, and the answer is the same (P1)." {} [
        step(Register(NOTEBOOK), "new"),
        step(Register(NOTEBOOK), "open"),
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Commit(NOTEBOOK), "repeated order:req-001 with order-created:req-001"),
        step(Register(NOTEBOOK), "placed order:req-001 with order-created:req-001"),
        step(Place(NOTEBOOK), "placed order:req-001 with order-created:req-001; repeated order:req-001 with order-created:req-001"),
        step(Count, "requests=1 orders=1 pending=1 inbox=0 effects=0"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    other_parameters: "A client uses the key of its request again for three notebooks instead of two, before the order exists and after: it is refused, and the first request is as it was (P1)." {} [
        step(Register(NOTEBOOK), "new"),
        step(Register(MORE_NOTEBOOKS), "refused: request shop/req-001 is bound to other parameters: it was registered with [item=notebook quantity=2], now [item=notebook quantity=3] was given; retry with the first ones, or take a new request id"),
        step(Commit(MORE_NOTEBOOKS), "refused: request shop/req-001 is bound to other parameters: it was registered with [item=notebook quantity=2], now [item=notebook quantity=3] was given; retry with the first ones, or take a new request id"),
        step(Count, "requests=1 orders=0 pending=0 inbox=0 effects=0"),
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Register(MORE_NOTEBOOKS), "refused: request shop/req-001 is bound to other parameters: it was registered with [item=notebook quantity=2], now [item=notebook quantity=3] was given; retry with the first ones, or take a new request id"),
        step(Place(MORE_NOTEBOOKS), "refused: request shop/req-001 is bound to other parameters: it was registered with [item=notebook quantity=2], now [item=notebook quantity=3] was given; retry with the first ones, or take a new request id"),
        step(Register(NOTEBOOK), "placed order:req-001 with order-created:req-001"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    two_orders: "Two clients buy; each order has its own lane, and one claim gets both events." {} [
        step(Register(NOTEBOOK), "new"),
        step(Register(PENCILS), "new"),
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Commit(PENCILS), "committed order:req-002 with order-created:req-002"),
        step(Claim(A), "claimed order-created:req-001 order-created:req-002"),
        step(Publish(A, Broker::Takes), "order-created:req-001 applied by loyalty; order-created:req-002 applied by loyalty"),
        step(Settle(A), "2 confirmed"),
        step(Drain(A), "at rest"),
        step(Count, "requests=2 orders=2 pending=0 inbox=2 effects=2"),
    ]

    two_events: "An order has two events, created and paid (P2). The broker fails on the first, so the second waits; then both are delivered, in their order (P4)." {} [
        step(Commit(PAID_NOTEBOOK), "committed order:req-001 with order-created:req-001 order-paid:req-001"),
        step(Claim(A), "claimed order-created:req-001 order-paid:req-001"),
        step(Publish(A, Broker::FailsOn(CREATED_1)), "order-created:req-001 failed"),
        step(Settle(A), "1 retried"),
        step(Claim(A), "claimed nothing"),
        step(Wait(1_000), "done"),
        step(Claim(A), "claimed order-created:req-001 order-paid:req-001"),
        step(Publish(A, Broker::Takes), "order-created:req-001 applied by loyalty; order-paid:req-001 applied by loyalty"),
        step(Settle(A), "2 confirmed"),
        step(Drain(A), "at rest"),
    ]

    answer_lost: "A client commits its order and dies before it hears of it. It sends the request again and gets the order that is there." {} [
        step(Register(NOTEBOOK), "new"),
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Crash, "done"),
        step(Register(NOTEBOOK), "placed order:req-001 with order-created:req-001"),
        step(Commit(NOTEBOOK), "repeated order:req-001 with order-created:req-001"),
        step(Count, "requests=1 orders=1 pending=1 inbox=0 effects=0"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    delivery_lost: "The broker loses an event and reports an error. The relay delivers it again, under the same id." {} [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Publish(A, Broker::FailsOn(CREATED_1)), "order-created:req-001 failed"),
        step(Count, "requests=1 orders=1 pending=1 inbox=0 effects=0"),
        step(Settle(A), "1 retried"),
        step(Wait(1_000), "done"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Publish(A, Broker::Takes), "order-created:req-001 applied by loyalty"),
        step(Settle(A), "1 confirmed"),
        step(Drain(A), "at rest"),
    ]

    confirmation_lost: "A consumer has applied two events, but the relay dies before it notes that. When its lease has run out the events come again, and the consumer skips both (P5)." {} [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Commit(PENCILS), "committed order:req-002 with order-created:req-002"),
        step(Claim(A), "claimed order-created:req-001 order-created:req-002"),
        step(Publish(A, Broker::AnswerLost), "order-created:req-001 applied by loyalty, answer lost; order-created:req-002 applied by loyalty, answer lost"),
        step(Count, "requests=2 orders=2 pending=2 inbox=2 effects=2"),
        step(Crash, "done"),
        step(Count, "requests=2 orders=2 pending=2 inbox=2 effects=2"),
        step(Claim(B), "claimed nothing"),
        step(Wait(LEASE), "done"),
        step(Claim(B), "claimed order-created:req-001 order-created:req-002"),
        step(Publish(B, Broker::Takes), "order-created:req-001 skipped by loyalty; order-created:req-002 skipped by loyalty"),
        step(Settle(B), "2 confirmed"),
        step(Count, "requests=2 orders=2 pending=0 inbox=2 effects=2"),
        step(Drain(B), "at rest"),
    ]

    consumption_fails: "A consumer fails before its commit; then the same event comes twice, then that of another order. Rows are counted around each step (P5, F6)." {} [
        step(Register(NOTEBOOK), "new"),
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Register(PENCILS), "new"),
        step(Commit(PENCILS), "committed order:req-002 with order-created:req-002"),
        step(Count, "requests=2 orders=2 pending=2 inbox=0 effects=0"),
        step(Receive { consumer: LOYALTY, event: CREATED_1, fails: true }, "rolled back"),
        step(Count, "requests=2 orders=2 pending=2 inbox=0 effects=0"),
        receive(LOYALTY, CREATED_1, "applied"),
        step(Count, "requests=2 orders=2 pending=2 inbox=1 effects=1"),
        receive(LOYALTY, CREATED_1, "skipped"),
        step(Count, "requests=2 orders=2 pending=2 inbox=1 effects=1"),
        receive(LOYALTY, CREATED_2, "applied"),
        step(Count, "requests=2 orders=2 pending=2 inbox=2 effects=2"),
        step(Drain(A), "at rest, 2 confirmed"),
        step(Count, "requests=2 orders=2 pending=0 inbox=2 effects=2"),
        step(Register(MORE_NOTEBOOKS), "refused: request shop/req-001 is bound to other parameters: it was registered with [item=notebook quantity=2], now [item=notebook quantity=3] was given; retry with the first ones, or take a new request id"),
        step(Count, "requests=2 orders=2 pending=0 inbox=2 effects=2"),
    ]

    two_consumers: "Two consumers receive the same event: each applies it once, whatever the other does (P5, F8)." { consumers: &[LOYALTY, MAIL] } [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        receive(LOYALTY, CREATED_1, "applied"),
        step(Receive { consumer: MAIL, event: CREATED_1, fails: true }, "rolled back"),
        step(Count, "requests=1 orders=1 pending=1 inbox=1 effects=1"),
        receive(MAIL, CREATED_1, "applied"),
        receive(LOYALTY, CREATED_1, "skipped"),
        step(Count, "requests=1 orders=1 pending=1 inbox=2 effects=2"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    other_content: "An event comes again under the same id with other content: it is refused, not skipped, and the effect is as it was (P5)." {} [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        receive(LOYALTY, CREATED_1, "applied"),
        step(ReceiveOther { consumer: LOYALTY, event: CREATED_1 }, "refused: event order-created:req-001 has other content than the one that consumer loyalty received under this id (content 338a1ba2, now d5dc6c1e); an event id must never be used twice"),
        receive(LOYALTY, CREATED_1, "skipped"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    own_rows: "A client writes a row of its own in the transaction of its order. First its code fails, and everything is rolled back; then both are there (P2)." {} [
        step(PlaceWithOwnRow { purchase: NOTEBOOK, key: "stock/notebook", value: "38", fails: true }, "rolled back"),
        step(ReadOwnRow("stock/notebook"), "no row"),
        step(Count, "requests=0 orders=0 pending=0 inbox=0 effects=0"),
        step(PlaceWithOwnRow { purchase: NOTEBOOK, key: "stock/notebook", value: "38", fails: false }, "new; committed order:req-001 with order-created:req-001"),
        step(Crash, "done"),
        step(ReadOwnRow("stock/notebook"), "38"),
        step(Count, "requests=1 orders=1 pending=1 inbox=0 effects=0"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    ordered_again: "A lane is delivered to its end, and more is ordered in it, twice. What was confirmed is not published again (P3, P4)." {} [
        step(Commit(FIRST_OF_LANE), "committed order:req-001 with order-created:req-001"),
        step(Drain(A), "at rest, 1 confirmed"),
        step(Commit(SECOND_OF_LANE), "committed order:req-002 with order-created:req-002"),
        step(Claim(A), "claimed order-created:req-002"),
        step(Publish(A, Broker::Takes), "order-created:req-002 applied by loyalty"),
        step(Settle(A), "1 confirmed"),
        step(Commit(THIRD_OF_LANE), "committed order:req-003 with order-created:req-003"),
        step(Claim(A), "claimed order-created:req-003"),
        step(Publish(A, Broker::Takes), "order-created:req-003 applied by loyalty"),
        step(Settle(A), "1 confirmed"),
        step(Drain(A), "at rest"),
        step(Count, "requests=3 orders=3 pending=0 inbox=3 effects=3"),
    ]

    stale_holder: "A relay publishes for longer than its lease lasts, and another relay takes over. The first is refused when it settles, and told so; the second settles (P6, F3)." {} [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Wait(LEASE), "done"),
        step(Claim(B), "claimed order-created:req-001"),
        step(Publish(A, Broker::Takes), "order-created:req-001 applied by loyalty"),
        step(Renew(A), "stale: relay-2 has taken the lane since, with a newer token"),
        step(Settle(A), "stale: relay-2 has taken the lane since, with a newer token"),
        step(Count, "requests=1 orders=1 pending=1 inbox=1 effects=1"),
        step(Publish(B, Broker::Takes), "order-created:req-001 skipped by loyalty"),
        step(Settle(B), "1 confirmed"),
        step(Drain(A), "at rest"),
    ]

    lease_renewed: "A relay renews its lease before it runs out, so another relay does not get the event (F3)." {} [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Wait(40_000), "done"),
        step(Renew(A), "1 renewed"),
        step(Wait(40_000), "done"),
        step(Claim(B), "claimed nothing"),
        step(Publish(A, Broker::Takes), "order-created:req-001 applied by loyalty"),
        step(Settle(A), "1 confirmed"),
        step(Drain(A), "at rest"),
    ]

    dead_blocks: "The broker fails on an event three times: it waits longer each time and is dead at the end. The event behind it in the lane waits for an operator; another lane is not held up (P4, F13)." { broker: Broker::FailsOn(CREATED_1), max_failures: 3 } [
        step(Commit(FIRST_OF_LANE), "committed order:req-001 with order-created:req-001"),
        step(Commit(SECOND_OF_LANE), "committed order:req-002 with order-created:req-002"),
        step(Commit(OTHER_LANE), "committed order:req-003 with order-created:req-003"),
        step(Claim(A), "claimed order-created:req-001 order-created:req-002 order-created:req-003"),
        step(Publish(A, Broker::FailsOn(CREATED_1)), "order-created:req-001 failed; order-created:req-003 applied by loyalty"),
        step(Settle(A), "1 confirmed, 1 retried"),
        step(Claim(A), "claimed nothing"),
        step(Wait(1_000), "done"),
        step(Claim(A), "claimed order-created:req-001 order-created:req-002"),
        step(Publish(A, Broker::FailsOn(CREATED_1)), "order-created:req-001 failed"),
        step(Settle(A), "1 retried"),
        step(Drain(A), "at rest, dead order-created:req-001"),
        step(Claim(A), "claimed nothing"),
        step(Count, "requests=3 orders=3 pending=1 inbox=1 effects=1"),
    ]

    dead_lets_go_on: "The broker fails on an event three times, and it is dead. The rule is that the event behind it in the lane goes on without it (P4)." { broker: Broker::FailsOn(CREATED_1), max_failures: 3, dead_lets_go_on: true } [
        step(Commit(FIRST_OF_LANE), "committed order:req-001 with order-created:req-001"),
        step(Commit(SECOND_OF_LANE), "committed order:req-002 with order-created:req-002"),
        step(Claim(A), "claimed order-created:req-001 order-created:req-002"),
        step(Publish(A, Broker::FailsOn(CREATED_1)), "order-created:req-001 failed"),
        step(Settle(A), "1 retried"),
        step(Drain(A), "at rest, 1 confirmed, dead order-created:req-001"),
        step(Count, "requests=2 orders=2 pending=0 inbox=1 effects=1"),
    ]

    rejected: "The broker will never take an event, which is dead at once; everything else goes on (F14)." { broker: Broker::Rejects(CREATED_1) } [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Commit(PENCILS), "committed order:req-002 with order-created:req-002"),
        step(Claim(A), "claimed order-created:req-001 order-created:req-002"),
        step(Publish(A, Broker::Rejects(CREATED_1)), "order-created:req-001 rejected; order-created:req-002 applied by loyalty"),
        step(Settle(A), "1 confirmed, dead order-created:req-001"),
        step(Drain(A), "at rest"),
    ]

    redriven: "The broker rejects an event, which is dead. An operator redrives it, and it is delivered under the same id (P3, P5)." {} [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Redrive(CREATED_1), "not redriven: it is pending, and this can be done only to events that are dead"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Publish(A, Broker::Rejects(CREATED_1)), "order-created:req-001 rejected"),
        step(Settle(A), "dead order-created:req-001"),
        step(Count, "requests=1 orders=1 pending=0 inbox=0 effects=0"),
        step(RedriveAll, "redriven order-created:req-001"),
        step(RedriveAll, "redriven nothing"),
        step(Count, "requests=1 orders=1 pending=1 inbox=0 effects=0"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    discarded: "The broker rejects an event, which is dead and holds up the next one in its lane. An operator discards it, and the lane goes on (P3, P4)." { broker: Broker::Rejects(CREATED_1) } [
        step(Commit(FIRST_OF_LANE), "committed order:req-001 with order-created:req-001"),
        step(Commit(SECOND_OF_LANE), "committed order:req-002 with order-created:req-002"),
        step(Drain(A), "at rest, dead order-created:req-001"),
        step(Count, "requests=2 orders=2 pending=1 inbox=0 effects=0"),
        step(Discard(CREATED_1), "discarded"),
        step(Drain(A), "at rest, 1 confirmed"),
        step(Count, "requests=2 orders=2 pending=0 inbox=1 effects=1"),
    ]

    cancelled: "An operator cancels an event before it is delivered. Its order stays, and the next one in its lane is delivered (P3)." {} [
        step(Commit(FIRST_OF_LANE), "committed order:req-001 with order-created:req-001"),
        step(Commit(SECOND_OF_LANE), "committed order:req-002 with order-created:req-002"),
        step(Cancel(CREATED_1), "cancelled"),
        step(Claim(A), "claimed order-created:req-002"),
        step(Publish(A, Broker::Takes), "order-created:req-002 applied by loyalty"),
        step(Settle(A), "1 confirmed"),
        step(Drain(A), "at rest"),
    ]

    outage: "The broker cannot be reached, more often than an event may fail. That counts against no event; when the broker is back they are delivered (F15)." {} [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Publish(A, Broker::Unreachable), "order-created:req-001 unavailable"),
        step(Settle(A), "1 released"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Publish(A, Broker::Unreachable), "order-created:req-001 unavailable"),
        step(Settle(A), "1 released"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Publish(A, Broker::Unreachable), "order-created:req-001 unavailable"),
        step(Settle(A), "1 released"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Publish(A, Broker::Unreachable), "order-created:req-001 unavailable"),
        step(Settle(A), "1 released"),
        step(Drain(A), "at rest, 1 confirmed"),
        step(Count, "requests=1 orders=1 pending=0 inbox=1 effects=1"),
    ]

    one_transaction: "A client registers its request and commits its order in one transaction: both are there, or neither (P2)." {} [
        step(Place(NOTEBOOK), "new; committed order:req-001 with order-created:req-001"),
        step(Place(NOTEBOOK), "placed order:req-001 with order-created:req-001; repeated order:req-001 with order-created:req-001"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    kills_the_relay: "An event brings the relay down each time it is published. Starts are counted too, so it is dead in the end and says why (F4)." { broker: Broker::Kills(CREATED_1), max_failures: 3 } [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Publish(A, Broker::Kills(CREATED_1)), "order-created:req-001 killed the program"),
        step(Claim(A), "claimed nothing"),
        step(Wait(LEASE), "done"),
        step(Claim(A), "claimed order-created:req-001"),
        step(Publish(A, Broker::Kills(CREATED_1)), "order-created:req-001 killed the program"),
        step(Count, "requests=1 orders=1 pending=1 inbox=0 effects=0"),
        step(Drain(A), "at rest, dead order-created:req-001"),
        step(Count, "requests=1 orders=1 pending=0 inbox=0 effects=0"),
    ]

    deferred: "A consumer asks to have an event again later. That is not taken for done: when it comes again, it is applied (F9)." {} [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(CountFailure { consumer: LOYALTY, event: CREATED_1, limit: 10 }, "comes again"),
        step(Count, "requests=1 orders=1 pending=1 inbox=1 effects=0"),
        receive(LOYALTY, CREATED_1, "applied"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    poisoned: "A consumer fails on an event three times. It is set aside for an operator, has no effect, and does not hold up the next one." {} [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Commit(PENCILS), "committed order:req-002 with order-created:req-002"),
        step(CountFailure { consumer: LOYALTY, event: CREATED_1, limit: 3 }, "comes again"),
        step(CountFailure { consumer: LOYALTY, event: CREATED_1, limit: 3 }, "comes again"),
        step(CountFailure { consumer: LOYALTY, event: CREATED_1, limit: 3 }, "poisoned"),
        receive(LOYALTY, CREATED_1, "poisoned"),
        receive(LOYALTY, CREATED_2, "applied"),
        step(Count, "requests=2 orders=2 pending=2 inbox=2 effects=1"),
        step(Drain(A), "at rest, 2 confirmed"),
    ]

    in_order: "A consumer asks for order. The second event of an order comes first and has to wait; after the first one it is applied (P4)." { consumers: &[] } [
        step(Commit(PAID_NOTEBOOK), "committed order:req-001 with order-created:req-001 order-paid:req-001"),
        step(ReceiveInOrder { consumer: LOYALTY, event: PAID_1, place: (2, 1) }, "waits for 1"),
        step(Count, "requests=1 orders=1 pending=2 inbox=0 effects=0"),
        step(ReceiveInOrder { consumer: LOYALTY, event: CREATED_1, place: (1, 0) }, "applied"),
        step(ReceiveInOrder { consumer: LOYALTY, event: PAID_1, place: (2, 1) }, "applied"),
        step(ReceiveInOrder { consumer: LOYALTY, event: CREATED_1, place: (1, 0) }, "skipped"),
        step(Count, "requests=1 orders=1 pending=2 inbox=2 effects=2"),
        step(Drain(A), "at rest, 2 confirmed"),
    ]

    clock_steps_back: "The clock of the program steps back by an hour after an order is committed. The event is delivered later than it would have been, and nothing else changes (F7)." {} [
        step(Wait(3_600_000), "done"),
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(StepBack(3_600_000), "done"),
        step(Claim(A), "claimed nothing"),
        step(Wait(3_600_000), "done"),
        step(Claim(A), "claimed order-created:req-001"),
        step(StepBack(3_600_000), "done"),
        step(Publish(A, Broker::Takes), "order-created:req-001 applied by loyalty"),
        step(Settle(A), "1 confirmed"),
        step(Drain(A), "at rest"),
    ]

    redriven_elsewhere: "An event is dead after one consumer has applied it. An operator redrives it, another relay delivers it, and only the other consumer applies it (P5, P6, F8)." { consumers: &[LOYALTY, MAIL] } [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Claim(A), "claimed order-created:req-001"),
        receive(LOYALTY, CREATED_1, "applied"),
        step(Publish(A, Broker::Rejects(CREATED_1)), "order-created:req-001 rejected"),
        step(Settle(A), "dead order-created:req-001"),
        step(Claim(B), "claimed nothing"),
        step(Redrive(CREATED_1), "redriven"),
        step(Claim(B), "claimed order-created:req-001"),
        step(Claim(A), "claimed nothing"),
        step(Publish(B, Broker::Takes), "order-created:req-001 skipped by loyalty, applied by mailing"),
        step(Settle(B), "1 confirmed"),
        step(Redrive(CREATED_1), "not redriven: it is confirmed, and this can be done only to events that are dead"),
        step(Drain(A), "at rest"),
        step(Count, "requests=1 orders=1 pending=0 inbox=2 effects=2"),
    ]

    call: "A consumer makes a call outside of the transaction: that it is to be made is committed with the inbox row, that it is started before it is made, and that it is done after it (P9)." { consumers: &[MAIL] } [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(StartCall { consumer: MAIL, event: CREATED_2 }, "refused: consumer mailing has not recorded the intent of a call for event order-created:req-002; commit the intent first"),
        step(Intend { consumer: MAIL, event: CREATED_1 }, "applied, a call is to be made"),
        step(StartCall { consumer: MAIL, event: CREATED_1 }, "make the call"),
        step(CallDone { consumer: MAIL, event: CREATED_1 }, "recorded"),
        step(Intend { consumer: MAIL, event: CREATED_1 }, "skipped"),
        step(StartCall { consumer: MAIL, event: CREATED_1 }, "done already: receipt order-created:req-001"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    call_unknown: "A consumer dies after it has started a call. Nobody knows whether it has happened, and that is what the table says; by the rule the other side is asked, and it has happened (P9, F22)." { consumers: &[MAIL] } [
        step(Commit(NOTEBOOK), "committed order:req-001 with order-created:req-001"),
        step(Intend { consumer: MAIL, event: CREATED_1 }, "applied, a call is to be made"),
        step(StartCall { consumer: MAIL, event: CREATED_1 }, "make the call"),
        step(Crash, "done"),
        step(Intend { consumer: MAIL, event: CREATED_1 }, "skipped"),
        step(StartCall { consumer: MAIL, event: CREATED_1 }, "somebody is making it"),
        step(Wait(PATIENCE), "done"),
        step(StartCall { consumer: MAIL, event: CREATED_1 }, "ask the other side"),
        step(CallDone { consumer: MAIL, event: CREATED_1 }, "recorded"),
        step(StartCall { consumer: MAIL, event: CREATED_1 }, "done already: receipt order-created:req-001"),
        step(Drain(A), "at rest, 1 confirmed"),
    ]

    purge: "Three orders: the event of one is delivered, that of another is dead, and the third waits behind it. Eight days later all tables are purged: only the delivered event is gone, with its lane. Its request still gets the first outcome, and a redelivery is skipped (P7, F16)." { broker: Broker::Rejects(CREATED_1) } [
        step(Commit(OTHER_LANE), "committed order:req-003 with order-created:req-003"),
        step(Commit(FIRST_OF_LANE), "committed order:req-001 with order-created:req-001"),
        step(Commit(SECOND_OF_LANE), "committed order:req-002 with order-created:req-002"),
        step(Drain(A), "at rest, 1 confirmed, dead order-created:req-001"),
        step(Purge, "removed nothing"),
        step(Wait(8 * DAY), "done"),
        step(Purge, "removed events=1 lanes=1"),
        step(Purge, "removed nothing"),
        step(Count, "requests=3 orders=3 pending=1 inbox=1 effects=1"),
        step(Commit(OTHER_LANE), "repeated order:req-003 with order-created:req-003"),
        receive(LOYALTY, CREATED_3, "skipped"),
        step(Drain(A), "at rest"),
        step(Count, "requests=3 orders=3 pending=1 inbox=1 effects=1"),
    ]
}

/// Calls a macro with the names of all scenarios, after what it is given: `each_scenario!(callback,
/// anything)`.
#[doc(hidden)]
#[macro_export]
macro_rules! each_scenario {
    ($callback:path, $($given:tt)*) => {
        $callback! {
            { $($given)* }
            buy_once retry_request other_parameters two_orders two_events answer_lost delivery_lost confirmation_lost
            consumption_fails two_consumers other_content own_rows ordered_again stale_holder lease_renewed dead_blocks dead_lets_go_on
            rejected redriven discarded cancelled outage one_transaction kills_the_relay deferred poisoned in_order clock_steps_back
            redriven_elsewhere call call_unknown purge
        }
    };
}
