//! How large a world is, and the names in it.

use core::sync::atomic::AtomicUsize;
use core::time::Duration;
use std::sync::Arc;

use stateright::{Model, Property};
use twobox::{
    Body, Checked, CommitOrder, Consumer, DeliveryPolicy, Destination, Draft, Event, EventId,
    Fingerprint, Invalid, Millis, OrderId, OrderingKey, Owner, Request, Retention, Table, WhenDead,
};

use crate::bug::Bug;
use crate::step::Step;
use crate::world::{Promise, World};

/// The consumers, of which a scope has the first ones.
pub const CONSUMERS: [&str; 2] = ["mail", "stock"];

/// What there is in a world, and how often things may happen that could happen for ever.
#[derive(Debug, Clone)]
pub struct Scope {
    /// Requests, 1 or 2; each creates an order.
    pub requests: u8,
    /// Events, of 0 to 4: 0 and 1 are of the first order, the others of the second. 1 and 3 have
    /// ordering key `b`, the others `a`.
    pub events: Vec<u8>,
    /// Whether clients come again with other parameters and with another order id.
    pub other_params: bool,
    /// Relays that are the transitions of one, in any order.
    pub relays: u8,
    /// Relays that are the real machine.
    pub machines: u8,
    /// Consumers, 1 or 2.
    pub consumers: u8,
    /// Whether consumers ask for order.
    pub in_order: bool,
    /// The last tick of the clock.
    pub ticks: u64,
    /// How many milliseconds a tick takes.
    pub tick: u64,
    /// Whether the clock may step back, once.
    pub clock_back: bool,
    /// How many crashes, lost answers, failed publishes and failing handlers there may be.
    pub faults: u8,
    /// How many times an operator may cancel, redrive or discard.
    pub operations: u8,
    /// The tables that are purged, and what is kept.
    pub purges: Vec<Table>,
    /// How long finished rows are kept.
    pub retention: Checked<Retention>,
    /// After how many failures of a consumer an event is set aside.
    pub max_failures: u32,
    /// How relays deliver.
    pub policy: Checked<DeliveryPolicy>,
    /// If the inbox is purged: the world keeps what the documentation asks for, namely that no
    /// event is retried and no copy is under way for longer than this, and that no relay hangs for
    /// longer after its lease and publishes then.
    pub longest_retry: Option<u64>,
    /// Whether transactions may read before others commit.
    pub rivals: bool,
    /// Whether relays settle, and clients commit, without a look first. Each step comes to the same
    /// the other way, which is judged too.
    pub assumes: bool,
    /// What is wrong with the rules.
    pub bug: Option<Bug>,
    /// The most steps that relays have needed, in any state so far, to bring everything to its end.
    pub longest_drain: Arc<AtomicUsize>,
}

impl Scope {
    /// How many milliseconds a tick takes, if a scope does not say otherwise: no retention may be
    /// shorter.
    pub const TICK: u64 = 60_000;

    /// Two requests and orders, three events in two keys, two relays, one consumer; nothing goes
    /// wrong yet.
    #[must_use]
    pub fn new() -> Self {
        let tick = Duration::from_millis(Self::TICK);
        let policy = DeliveryPolicy {
            backoff_base: tick,
            backoff_cap: tick,
            max_failures: 2,
            max_starts: 3,
            when_dead: WhenDead::Block,
        };
        let policy = named(policy.checked());
        let retention = Retention {
            events: tick,
            inbox: tick * 100,
            requests: tick,
            orders: Some(tick),
            positions: None,
        };
        Self {
            requests: 2,
            events: vec![0, 1, 2],
            other_params: false,
            relays: 2,
            machines: 0,
            consumers: 1,
            in_order: false,
            ticks: 2,
            tick: Self::TICK,
            clock_back: false,
            faults: 1,
            operations: 0,
            purges: Vec::new(),
            retention: named(retention.checked(&policy)),
            policy,
            max_failures: 2,
            longest_retry: None,
            rivals: false,
            assumes: true,
            bug: None,
            longest_drain: Arc::default(),
        }
    }

    /// The same with other settings of delivery.
    #[must_use]
    pub fn delivered(mut self, change: impl FnOnce(&mut DeliveryPolicy)) -> Self {
        let mut policy = self.policy.as_ref().clone();
        change(&mut policy);
        self.policy = named(policy.checked());
        self
    }

    /// The same with another retention.
    #[must_use]
    pub fn keeping(mut self, change: impl FnOnce(&mut Retention)) -> Self {
        let mut retention = self.retention.as_ref().clone();
        change(&mut retention);
        self.retention = named(retention.checked(&self.policy));
        self
    }

    /// How many steps relays may need to bring everything to its end: for each event and each
    /// relay, and once more to find out that there is nothing left, a transaction, a publish and a
    /// wait, and all of that again after what is dead was redriven.
    #[must_use]
    pub const fn drain_bound(&self) -> usize {
        2 * 3 * (self.events.len() + self.machines as usize + 1)
    }

    pub(crate) fn request(request: u8, params: Params) -> Request {
        let quantity = if params == Params::Other { "2" } else { "1" };
        named(Request::new(
            "shop",
            format!("r{request}"),
            Fingerprint::of([("quantity", quantity)]),
        ))
    }

    pub(crate) fn commit<'r>(
        &self,
        request: &'r Request,
        number: u8,
        params: Params,
    ) -> CommitOrder<'r> {
        // A client that makes up a new order id when it retries must still get the first outcome.
        let order =
            if params == Params::FreshOrder { format!("x{number}") } else { format!("o{number}") };
        let drafts =
            self.events.iter().copied().filter(|event| order_of(*event) == number).map(|event| {
                let draft = named(Draft::new("created", body(event))).ordering_key(lane_of(event));
                if params == Params::FreshOrder { draft } else { draft.id(event_id(event)) }
            });
        named(CommitOrder::new(request, named(OrderId::new(order)), body(number), drafts))
    }
}

impl Default for Scope {
    fn default() -> Self {
        Self::new()
    }
}

/// What a client sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Params {
    /// The first parameters.
    First,
    /// Other parameters under the same request key.
    Other,
    /// The first parameters, with another order id.
    FreshOrder,
}

/// The names here are all valid.
#[allow(clippy::panic, reason = "a model whose names are refused cannot begin")]
pub(crate) fn named<T>(made: Result<T, Invalid>) -> T {
    match made {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

pub(crate) fn event_id(event: u8) -> EventId {
    named(EventId::new(format!("e{event}")))
}

/// The number of an event; `None` for those of a fresh order.
pub(crate) fn number_of(event: &EventId) -> Option<u8> {
    event.as_str().strip_prefix('e').and_then(|number| number.parse().ok())
}

pub(crate) const fn order_of(event: u8) -> u8 {
    if event >= 2 { 1 } else { 0 }
}

pub(crate) fn lane_of(event: u8) -> OrderingKey {
    named(OrderingKey::new(if event % 2 == 1 { "b" } else { "a" }))
}

pub(crate) fn body(number: u8) -> Body {
    named(Body::text(number.to_string()))
}

pub(crate) fn consumer(number: u8) -> Consumer {
    named(Consumer::new(CONSUMERS[usize::from(number)]))
}

pub(crate) fn owner(relay: u8) -> Owner {
    named(Owner::new(format!("relay-{relay}")))
}

/// The envelope of an event, as it is on its way.
pub(crate) fn envelope(event: u8) -> Event {
    Event {
        destination: Destination::default(),
        id: event_id(event),
        order: named(OrderId::new(format!("o{}", order_of(event)))),
        event_type: named(twobox::EventType::new("created")),
        schema_version: 1,
        ordering_key: lane_of(event),
        time: Millis::new(0),
        headers: twobox::Headers::new(),
        body: body(event),
    }
}

impl Model for Scope {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        // What is broken already needs no further look.
        if world.ghost.broken == 0 {
            world.steps(self, steps);
        }
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        world.after(self, &step)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("P1", |scope, world: &World| world.holds(scope, Promise::P1)),
            Property::always("P2", |scope, world: &World| world.holds(scope, Promise::P2)),
            Property::always("P3", |scope, world: &World| world.holds(scope, Promise::P3)),
            Property::always("P4", |scope, world: &World| world.holds(scope, Promise::P4)),
            Property::always("P5", |scope, world: &World| world.holds(scope, Promise::P5)),
            Property::always("P6", |scope, world: &World| world.holds(scope, Promise::P6)),
            Property::always("P7", |scope, world: &World| world.holds(scope, Promise::P7)),
            // Where all others hold: after the faults have stopped, a bounded number of fair steps
            // brings everything to its end.
            Property::always("P8", |scope, world: &World| {
                !world.is_sound(scope) || world.drains(scope)
            }),
        ]
    }
}
