//! The world in which the relays live: what happens when, and what must be true at the end.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use twobox::flow::Exchanged;
use twobox::relay::{Action, Published, RelayMachine, RelaySettings, Ticket};
use twobox::store::{NoCall, drive};
use twobox::{
    Body, Checked, CommitOrder, Consumer, DeliveryPolicy, Discard, Draft, Dump, EventId,
    EventState, Fingerprint, Handled, Inbox, InboxState, Load, Message, Millis, Moment, OrderId,
    OrderingKey, Owner, Reason, Receipt, Record, Register, Renewed, Request, Store, Table,
    WhenDead,
};

use crate::chance::Chance;

const START: Millis = Millis::new(1_790_000_000_000);
const SECOND: u64 = 1_000;
const MINUTE: u64 = 60 * SECOND;
const HOUR: u64 = 60 * MINUTE;

const RELAYS: usize = 3;
const CONSUMERS: [&str; 2] = ["loyalty", "mail"];
/// One of the consumers fails on some events and sets them aside.
const PICKY: &str = "mail";

/// How long a relay that stops waits for what is under way.
const PATIENCE: Duration = Duration::from_secs(20);

const OUTAGE: core::ops::Range<u64> = 15 * MINUTE..25 * MINUTE;
const SLOW: core::ops::Range<u64> = 40 * MINUTE..45 * MINUTE;

/// Which hour to run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) events: usize,
    pub(crate) keys: u64,
    pub(crate) when_dead: WhenDead,
}

impl Plan {
    fn policy(self) -> Checked<DeliveryPolicy> {
        let policy = DeliveryPolicy {
            backoff_base: Duration::from_millis(500),
            backoff_cap: Duration::from_secs(30),
            max_failures: 5,
            max_starts: 9,
            when_dead: self.when_dead,
        };
        policy.checked().unwrap()
    }
}

/// How an event behaves; its type says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Nature {
    Good,
    /// Each publish fails.
    Fails,
    /// The broker will never take it.
    Rejected,
    /// It brings down each relay that publishes it.
    Kills,
    /// One consumer fails on it and sets it aside.
    SetAside,
}

impl Nature {
    fn of(event_type: &str) -> Self {
        match event_type {
            "fails" => Self::Fails,
            "rejected" => Self::Rejected,
            "kills" => Self::Kills,
            "set-aside" => Self::SetAside,
            _ => Self::Good,
        }
    }

    const fn event_type(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Fails => "fails",
            Self::Rejected => "rejected",
            Self::Kills => "kills",
            Self::SetAside => "set-aside",
        }
    }

    /// Whether it ends dead.
    const fn is_poison(self) -> bool {
        matches!(self, Self::Fails | Self::Rejected | Self::Kills)
    }
}

/// What is to happen.
#[derive(Debug)]
enum Happening {
    Order(usize),
    /// Something for one life of a relay; if it has ended since, nobody hears it.
    Relay(usize, u32, Heard),
    /// An event arrives at the broker, whatever has become of the relay that sent it.
    Arrives(usize, u32, Box<Ticket>),
    Dies(usize),
    Starts(usize),
    Stops(usize),
    /// It stands still for longer than its leases last, and then goes on as if nothing had been.
    Freezes(usize),
    ClockSteps(usize, i64),
    OperatorLooks,
}

#[derive(Debug)]
enum Heard {
    Timeout,
    Exchanged(Exchanged),
    Renewed(Renewed),
    Published(Box<Ticket>, Published),
}

struct Relay {
    /// How often it was started.
    life: u32,
    machine: Option<RelayMachine>,
    /// How far its clock is off, in milliseconds.
    clock: i64,
    timeout: Option<Duration>,
    frozen_until: u64,
}

struct Order {
    request: Request,
    id: OrderId,
    drafts: Vec<Draft>,
    tries_rolled_back: u32,
}

pub(crate) struct World<'a, S> {
    plan: Plan,
    sender: &'a S,
    receiver: &'a S,
    chance: Chance,
    now: u64,
    agenda: BTreeMap<(u64, u64), Happening>,
    appointments: u64,
    relays: Vec<Relay>,
    orders: Vec<Order>,
    orders_left: usize,
    /// What was committed in each key, in order.
    committed: BTreeMap<OrderingKey, Vec<(EventId, Nature)>>,
    /// What each consumer has applied in each key, in order.
    applied: BTreeMap<(Consumer, OrderingKey), Vec<EventId>>,
    /// What arrived at both consumers, or was set aside.
    arrived: BTreeSet<EventId>,
    pub(crate) told: Told,
}

/// What has happened, to know that the script was not for nothing.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) deaths: u32,
    pub(crate) unavailable: u32,
    pub(crate) lost_confirmations: u32,
    pub(crate) duplicates: u32,
    pub(crate) stale: u32,
    pub(crate) renewals: u32,
    pub(crate) rolled_back: u32,
}

impl<'a, S: Store + 'static> World<'a, S> {
    pub(crate) fn new(plan: Plan, sender: &'a S, receiver: &'a S) -> Self {
        let relay = |_| Relay { life: 0, machine: None, clock: 0, timeout: None, frozen_until: 0 };
        let mut world = Self {
            plan,
            sender,
            receiver,
            chance: Chance::new(plan.seed),
            now: 0,
            agenda: BTreeMap::new(),
            appointments: 0,
            relays: (0..RELAYS).map(relay).collect(),
            orders: Vec::new(),
            orders_left: 0,
            committed: BTreeMap::new(),
            applied: BTreeMap::new(),
            arrived: BTreeSet::new(),
            told: Told::default(),
        };
        world.write_orders();
        (0..RELAYS).for_each(|relay| world.at(relay as u64 * 100, Happening::Starts(relay)));
        world.at(5 * MINUTE, Happening::Freezes(0));
        world.at(10 * MINUTE, Happening::Dies(1));
        world.at(27 * MINUTE, Happening::Freezes(1));
        world.at(41 * MINUTE, Happening::Freezes(2));
        world.at(30 * MINUTE, Happening::ClockSteps(2, -20 * MINUTE as i64));
        world.at(35 * MINUTE, Happening::Stops(0));
        world.at(42 * MINUTE, Happening::Dies(2));
        world.at(50 * MINUTE, Happening::ClockSteps(2, 20 * MINUTE as i64));
        world.at(MINUTE, Happening::OperatorLooks);
        world
    }

    fn at(&mut self, time: u64, happening: Happening) {
        self.appointments += 1;
        self.agenda.insert((time.max(self.now), self.appointments), happening);
    }

    /// Orders of one to four events, spread over the hour; of each kind of poison there is some.
    fn write_orders(&mut self) {
        let mut events = 0;
        while events < self.plan.events {
            let n = self.orders.len();
            let count = (self.chance.within(1..5) as usize).min(self.plan.events - events);
            let drafts: Vec<Draft> = (0..count).map(|place| self.draft(events + place)).collect();
            events += count;
            let request = Request::new(
                "shop",
                format!("req-{n:05}"),
                Fingerprint::of([("n", n.to_string())]),
            )
            .unwrap();
            let order = Order {
                request,
                id: OrderId::new(format!("order-{n:05}")).unwrap(),
                drafts,
                tries_rolled_back: 0,
            };
            self.orders.push(order);
            let time = self.chance.within(0..HOUR);
            self.at(time, Happening::Order(n));
        }
        self.orders_left = self.orders.len();
    }

    fn draft(&mut self, number: usize) -> Draft {
        let nature = match number * 1_000 / self.plan.events {
            // The first of each kind comes for sure, the others by chance.
            _ if number == self.plan.events / 3 || number == self.plan.events / 2 => Nature::Kills,
            _ if number % (self.plan.events / 5) == 7 => Nature::Fails,
            _ if number % (self.plan.events / 5) == 11 => Nature::Rejected,
            _ if number % (self.plan.events / 5) == 13 => Nature::SetAside,
            _ => Nature::Good,
        };
        let key =
            OrderingKey::new(format!("key-{:03}", self.chance.within(0..self.plan.keys))).unwrap();
        let draft = Draft::new(nature.event_type(), Body::text(number.to_string()).unwrap())
            .unwrap()
            .ordering_key(key);
        if self.chance.per_mille(20) {
            let time = self.chance.within(0..HOUR);
            return draft.not_before(START + Duration::from_millis(time));
        }
        draft
    }

    pub(crate) fn run(&mut self) {
        for _ in 0..20_000_000_u64 {
            let Some(((time, _), happening)) = self.agenda.pop_first() else {
                panic!("nothing more happens, and not all is done")
            };
            self.now = time;
            assert!(time < 6 * HOUR, "it does not come to an end: {:?}", self.told);
            let looks = matches!(happening, Happening::OperatorLooks);
            self.happen(happening);
            if looks
                && self.orders_left == 0
                && self.pending() == 0
                && self.relays.iter().all(Relay::rests)
            {
                return;
            }
        }
        panic!("too much happens: {:?}", self.told);
    }

    fn time(&self) -> Millis {
        START + Duration::from_millis(self.now)
    }

    fn clock(&self, relay: usize) -> Millis {
        Millis::new(self.time().get().saturating_add_signed(self.relays[relay].clock))
    }

    /// What a relay hears: the time of day of its clock, and how much time has passed.
    fn moment(&self, relay: usize) -> Moment {
        Moment { wall: self.clock(relay), uptime: Duration::from_millis(self.now) }
    }

    fn is_frozen(&self, relay: usize) -> bool {
        self.now < self.relays[relay].frozen_until
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Order(n) => self.order(n),
            Happening::Relay(relay, life, heard)
                if self.is_frozen(relay) && self.relays[relay].life == life =>
            {
                self.at(self.relays[relay].frozen_until, Happening::Relay(relay, life, heard));
            }
            Happening::Relay(relay, life, heard) => {
                if self.relays[relay].life == life && self.relays[relay].machine.is_some() {
                    self.hear(relay, heard);
                    self.attend(relay);
                }
            }
            Happening::Arrives(relay, life, ticket) => {
                let answer = self.arrive(&ticket.message);
                self.happen(Happening::Relay(relay, life, Heard::Published(ticket, answer)));
            }
            Happening::Starts(relay) => {
                let life = self.relays[relay].life + 1;
                let owner = Owner::new(format!("relay-{relay}-{life}")).unwrap();
                let settings = RelaySettings {
                    policy: self.plan.policy(),
                    window: 64,
                    run: 8,
                    lease: Duration::from_secs(20),
                    poll: Duration::from_secs(2),
                    pause_base: Duration::from_millis(500),
                    pause_cap: Duration::from_secs(10),
                    ..RelaySettings::new(owner)
                };
                let machine = RelayMachine::new(settings, self.moment(relay)).unwrap();
                self.relays[relay] = Relay {
                    life,
                    machine: Some(machine),
                    timeout: None,
                    frozen_until: 0,
                    clock: self.relays[relay].clock,
                };
                self.attend(relay);
            }
            Happening::Dies(relay) => {
                // With leases in its hands, if it is alive.
                match &self.relays[relay].machine {
                    Some(machine) if !machine.is_idle() => self.die(relay),
                    _ => self.at(self.now + 50, Happening::Dies(relay)),
                }
            }
            Happening::Freezes(relay) => match &self.relays[relay].machine {
                Some(machine) if !machine.is_idle() => {
                    self.relays[relay].frozen_until = self.now + 45 * SECOND;
                }
                _ => self.at(self.now + 50, Happening::Freezes(relay)),
            },
            Happening::Stops(relay) => {
                let clock = self.moment(relay);
                match &mut self.relays[relay].machine {
                    Some(machine) => {
                        machine.handle_stop(clock, PATIENCE);
                        self.attend(relay);
                    }
                    None => self.at(self.now + SECOND, Happening::Stops(relay)),
                }
            }
            Happening::ClockSteps(relay, by) => {
                self.relays[relay].clock += by;
                self.attend(relay);
            }
            Happening::OperatorLooks => self.operator(),
        }
    }

    fn order(&mut self, n: usize) {
        let now = self.time();
        let order = &self.orders[n];
        if self.chance.per_mille(300) {
            self.sender.run(Register::new(&order.request), now).unwrap();
        }
        let body = Body::text("an order").unwrap();
        let commit =
            CommitOrder::new(&order.request, order.id.clone(), body, order.drafts.clone()).unwrap();
        if self.chance.per_mille(100) && order.tries_rolled_back < 3 {
            let rolled_back: Result<(), _> = self.sender.write(now, |tx| {
                tx.run(&commit).unwrap();
                Err("the program changed its mind")
            });
            assert!(rolled_back.is_err());
            self.told.rolled_back += 1;
            self.orders[n].tries_rolled_back += 1;
            let later = self.now + self.chance.within(1..5 * MINUTE);
            self.at(later, Happening::Order(n));
            return;
        }
        let committed = self.sender.run(&commit, now).unwrap();
        assert!(!committed.repeated);
        if self.chance.per_mille(20) {
            // The answer was lost.
            assert!(self.sender.run(&commit, now).unwrap().repeated);
        }
        for id in committed.placed.events {
            let event = self.sender.view().unwrap().event(&id).unwrap().expect("it is committed");
            let event = event.event;
            let nature = Nature::of(event.event_type.as_str());
            self.committed.entry(event.ordering_key).or_default().push((id, nature));
        }
        self.orders_left -= 1;
        // The relay in the same process hears of it.
        let (clock, frozen) = (self.moment(0), self.is_frozen(0));
        if let Some(machine) = self.relays[0].machine.as_mut().filter(|_| !frozen) {
            machine.handle_wakeup(clock);
            self.attend(0);
        }
    }

    fn hear(&mut self, relay: usize, heard: Heard) {
        let clock = self.moment(relay);
        let Some(machine) = &mut self.relays[relay].machine else { return };
        match heard {
            Heard::Timeout => machine.handle_timeout(clock),
            Heard::Exchanged(exchanged) => {
                let settled = exchanged.0.as_ref();
                self.told.stale += settled.map_or(0, |settled| settled.stale.len() as u32);
                machine.conclude_exchange(clock, Ok(exchanged));
            }
            Heard::Renewed(renewed) => {
                self.told.renewals += renewed.leases.len() as u32;
                machine.conclude_renewal(clock, Ok(renewed));
            }
            Heard::Published(ticket, answer) => machine.handle_published(clock, &ticket, answer),
        }
    }

    /// Does what a relay wants to have done, and makes an appointment for when it wants to come
    /// back.
    fn attend(&mut self, relay: usize) {
        let (clock, life) = (self.moment(relay), self.relays[relay].life);
        if self.is_frozen(relay) {
            return;
        }
        for _ in 0..1_000 {
            let Some(machine) = &mut self.relays[relay].machine else { return };
            machine.handle_timeout(clock);
            let (now, settings) = (machine.now(), machine.settings().clone());
            let Some(action) = machine.poll_action() else {
                if machine.is_stopped() {
                    self.relays[relay].machine = None;
                    self.at(self.now + 10 * SECOND, Happening::Starts(relay));
                } else if let Some(at) = machine.poll_timeout() {
                    assert!(at > clock.uptime, "it wants to come back in the past");
                    if self.relays[relay].timeout != Some(at) {
                        self.relays[relay].timeout = Some(at);
                        let wait =
                            u64::try_from(at.saturating_sub(clock.uptime).as_millis()).unwrap();
                        self.at(self.now + wait, Happening::Relay(relay, life, Heard::Timeout));
                    }
                }
                return;
            };
            let answered = self.now + self.chance.within(1..20);
            match action {
                Action::Exchange(exchange) => {
                    // One of them settles without a look, as over a network.
                    let flow = exchange.flow(&settings, now, relay == 1);
                    let exchanged = drive(self.sender, flow, &mut NoCall).unwrap();
                    self.at(answered, Happening::Relay(relay, life, Heard::Exchanged(exchanged)));
                }
                Action::Renew(renew) => {
                    let renewed = self.sender.run(renew, now).unwrap();
                    self.at(answered, Happening::Relay(relay, life, Heard::Renewed(renewed)));
                }
                Action::Publish(tickets) => self.publish(relay, life, tickets),
                // What is under way under a lease that is lost arrives all the same, and so does
                // what is overdue.
                Action::BreakOff(_) => {}
                Action::GiveUp(leases) => {
                    leases.iter().for_each(|lease| machine.handle_broken_off(clock, lease));
                }
            }
        }
        panic!("relay {relay} is busy without end");
    }

    fn publish(&mut self, relay: usize, life: u32, tickets: Vec<Ticket>) {
        let mut dies = false;
        for ticket in tickets {
            self.check_turn(&ticket.message);
            dies |= Nature::of(ticket.message.event.event_type.as_str()) == Nature::Kills;
            if dies {
                // What comes behind it in the batch was not sent.
                break;
            }
            let slow = SLOW.contains(&self.now) && self.chance.per_mille(100);
            let takes = if slow {
                self.chance.within(2 * SECOND..40 * SECOND)
            } else {
                self.chance.within(5..60)
            };
            self.at(self.now + takes, Happening::Arrives(relay, life, Box::new(ticket)));
        }
        if dies {
            self.die(relay);
        }
    }

    /// P4: everything that was committed before it in its key has arrived, or is something that
    /// nobody can deliver.
    fn check_turn(&self, message: &Message) {
        let lane = &self.committed[&message.event.ordering_key];
        for (id, nature) in lane.iter().take_while(|(id, _)| *id != message.event.id) {
            assert!(
                nature.is_poison() || self.arrived.contains(id),
                "{} before {id}",
                message.event.id
            );
        }
    }

    fn die(&mut self, relay: usize) {
        self.told.deaths += 1;
        self.relays[relay].machine = None;
        let later = self.now + self.chance.within(SECOND..5 * SECOND);
        self.at(later, Happening::Starts(relay));
    }

    /// An event arrives at the broker, which hands it to both consumers.
    fn arrive(&mut self, message: &Message) -> Published {
        let nature = Nature::of(message.event.event_type.as_str());
        if OUTAGE.contains(&self.now) {
            self.told.unavailable += 1;
            return Published::Unavailable(Reason::new("connection refused"));
        }
        match nature {
            Nature::Fails => return Published::Failed(Reason::new("connection reset")),
            Nature::Rejected => return Published::Rejected(Reason::new("too large")),
            Nature::Kills => panic!("it never gets so far"),
            Nature::Good | Nature::SetAside => {}
        }
        for name in CONSUMERS {
            let consumer = Consumer::new(name).unwrap();
            let inbox = Inbox::new(self.receiver, consumer.clone()).in_order().max_failures(2);
            let receipt = inbox.receive(message, self.time(), |_, message| {
                if nature == Nature::SetAside && name == PICKY {
                    return Err("cannot handle it");
                }
                Ok(Handled::Effect(message.event.body.clone()))
            });
            match receipt.unwrap() {
                Receipt::Applied => {
                    let key = (consumer, message.event.ordering_key.clone());
                    self.applied.entry(key).or_default().push(message.event.id.clone());
                }
                Receipt::Duplicate => self.told.duplicates += 1,
                Receipt::Poisoned => assert_eq!((nature, name), (Nature::SetAside, PICKY)),
                Receipt::Failed(reason) => return Published::Failed(reason),
                other @ (Receipt::Deferred(_) | Receipt::WaitsFor(_) | Receipt::Refused(_)) => {
                    panic!("{} at {name}: {other:?}", message.event.id)
                }
            }
        }
        self.arrived.insert(message.event.id.clone());
        if self.chance.per_mille(10) {
            self.told.lost_confirmations += 1;
            return Published::Failed(Reason::new("the confirmation was lost"));
        }
        Published::Confirmed
    }

    /// Each minute an operator looks at what is dead; where it blocks its lane, it is discarded.
    fn operator(&mut self) {
        if self.plan.when_dead == WhenDead::Block {
            let dead = self.states(|state| matches!(state, EventState::Dead(_)));
            if !dead.is_empty() {
                let discard =
                    Discard::new(dead.into_iter().take(256), Reason::new("seen by the operator"))
                        .unwrap();
                let operated = self.sender.run(discard, self.time()).unwrap();
                assert!(operated.refused.is_empty(), "{operated:?}");
            }
        }
        self.at(self.now + MINUTE, Happening::OperatorLooks);
    }

    fn states(&self, wanted: impl Fn(EventState) -> bool) -> BTreeSet<EventId> {
        let dump = Dump::of(&mut self.sender.view().unwrap()).unwrap();
        let events = dump.events().into_iter().filter(|(_, (state, _))| wanted(*state));
        events.map(|(id, _)| id.clone()).collect()
    }

    fn pending(&self) -> u64 {
        self.sender.view().unwrap().stats(self.time()).unwrap().all.pending
    }

    /// How it must have ended.
    pub(crate) fn check(&self) {
        let of = |wanted: fn(Nature) -> bool| -> BTreeSet<EventId> {
            self.committed
                .values()
                .flatten()
                .filter(|(_, nature)| wanted(*nature))
                .map(|(id, _)| id.clone())
                .collect()
        };
        // P3: every event is confirmed or dead, and dead are exactly those that nobody could
        // deliver (F4, F15).
        assert_eq!(self.committed.values().map(Vec::len).sum::<usize>(), self.plan.events);
        let given_up =
            self.states(|state| matches!(state, EventState::Dead(_) | EventState::Discarded(_)));
        assert_eq!(given_up, of(Nature::is_poison), "given up, and poison");
        let confirmed = self.states(|state| state == EventState::Confirmed);
        assert_eq!(confirmed, of(|nature| !nature.is_poison()), "confirmed, and not poison");
        // P4, P5: each consumer has applied all the others, once, in the order of their key.
        let mut effects = 0;
        for name in CONSUMERS {
            for (key, committed) in &self.committed {
                let takes = |nature: Nature| {
                    !nature.is_poison() && (nature != Nature::SetAside || name != PICKY)
                };
                let expected: Vec<&EventId> = committed
                    .iter()
                    .filter(|(_, nature)| takes(*nature))
                    .map(|(id, _)| id)
                    .collect();
                let applied = self.applied.get(&(Consumer::new(name).unwrap(), key.clone()));
                let applied: Vec<&EventId> = applied.into_iter().flatten().collect();
                assert_eq!(applied, expected, "{name} in {key}");
                effects += applied.len();
            }
        }
        let receiver = Dump::of(&mut self.receiver.view().unwrap()).unwrap();
        assert_eq!(receiver.count(Table::Effects), effects);
        let set_aside = receiver
            .records()
            .iter()
            .filter(|r| matches!(r, Record::Inbox(_, _, row) if row.state == InboxState::Poisoned));
        assert_eq!(set_aside.count(), of(|nature| nature == Nature::SetAside).len());
    }

    pub(crate) fn tables(&self) -> String {
        let dump = |store: &S| Dump::of(&mut store.view().unwrap()).unwrap().to_string();
        format!("{}{}", dump(self.sender), dump(self.receiver))
    }
}

impl Relay {
    /// Nothing is under way that could still change the tables.
    fn rests(&self) -> bool {
        self.machine.as_ref().is_none_or(RelayMachine::is_idle)
    }
}
