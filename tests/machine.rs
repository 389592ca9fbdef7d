//! The relay machine alone, without a store: fed with whatever can happen, expected or not, in any
//! order.
//!
//! The driver below answers late, twice, for things it was never asked, under leases that are lost,
//! with a clock that jumps both ways. What must hold whatever it does: no panic, one ticket of a
//! lane at a time and in order (P4), no more than the window, in events and in bytes, and than the
//! slots (F13), a claim as soon as a call could begin (P10), no publish that is waited for after its
//! time (F25), no publish while it pauses or stops (F12, F15) or under a lease that has run out (F3), no result dropped
//! (F11), always a time to come back at, and never one that has passed (F13), and an end when it is
//! asked to stop, with no more patience than it is given.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use twobox::relay::{Action, Phase, Published, RelayMachine, RelaySettings, Ticket};
use twobox::{
    Body, Change, Checked, Claim, Claimed, CommitOrder, DeliveryPolicy, Draft, EventId,
    Fingerprint, LaneKey, LanePlace, LeaseRef, Leased, Millis, Moment, OrderId, OrderingKey, Owner,
    Reason, Record, Renew, Renewed, Request, Settle, Settled, Settlement, Stale, StaleLease, Store,
    Transition,
};
use twobox_memory::MemoryStore;

const START: Moment = Moment::steady(Millis::new(1_000_000_000));
const LEASE: Duration = Duration::from_secs(30);
const LANES: u8 = 6;
const WINDOW: usize = 12;
const WINDOW_BYTES: usize = 60;
/// How many calls may be under way, how many events each takes, and how long it may take.
const SLOTS: usize = 4;
const BATCH: usize = 2;
const TIMEOUT: Duration = Duration::from_secs(40);
/// The largest body.
const BODY: usize = 5 * LANES as usize;

/// Something that happens to the machine.
#[derive(Debug, Clone)]
enum Step {
    /// The time of day is set by so many milliseconds, either way.
    Clock(i64),
    /// So many milliseconds pass.
    Passes(u64),
    /// Time passes until the machine wants to come back.
    Wait,
    Wakeup,
    /// The transaction under way is committed; these lanes are claimed, some of them alone.
    Committed {
        lanes: Vec<(u8, u8)>,
        alone: bool,
        due_in: Option<u16>,
    },
    /// It fails.
    StoreFails,
    /// In the answer to a renewal, these are lost.
    Renewed {
        lost: u8,
    },
    /// A publish under way ends.
    Published {
        which: u8,
        how: u8,
    },
    /// What the machine waits for no longer ends after all, or was broken off.
    BrokenOff {
        which: u8,
        told: bool,
    },
    /// What was never asked, or was answered before.
    Unexpected(u8),
    /// It is asked to stop, with so many seconds of patience, or with patience for ever.
    Stop(Option<u64>),
}

fn steps() -> impl Strategy<Value = Step> {
    let lanes = prop::collection::vec((0..LANES, 1..5_u8), 0..5);
    prop_oneof![
        2 => (-90_000..90_000_i64).prop_map(Step::Clock),
        2 => (0..900_u64).prop_map(Step::Passes),
        2 => (0..90_000_u64).prop_map(Step::Passes),
        6 => Just(Step::Wait),
        2 => Just(Step::Wakeup),
        12 => (lanes, prop::bool::weighted(0.1), prop::option::of(any::<u16>()))
            .prop_map(|(lanes, alone, due_in)| Step::Committed { lanes, alone, due_in }),
        2 => Just(Step::StoreFails),
        4 => (0..4_u8).prop_map(|lost| Step::Renewed { lost }),
        16 => (any::<u8>(), 0..16_u8).prop_map(|(which, how)| Step::Published { which, how }),
        3 => (any::<u8>(), any::<bool>())
            .prop_map(|(which, told)| Step::BrokenOff { which, told }),
        3 => any::<u8>().prop_map(Step::Unexpected),
        1 => prop_oneof![Just(Some(0)), Just(Some(5)), Just(Some(60)), Just(None)]
            .prop_map(Step::Stop),
    ]
}

/// A lease that the store gave, as the driver of the test knows it.
#[derive(Debug)]
struct Given {
    lane: LaneKey,
    /// By both clocks: its end, and when half of it is over.
    until: Moment,
    half: Moment,
    alone: bool,
    events: Vec<EventId>,
    bytes: usize,
    /// How many of them were given to be published.
    published: usize,
    confirmed: usize,
    /// The last publish ended and was not confirmed.
    ended: bool,
    /// Others have taken the lane; what the machine settles under this lease will turn out to be
    /// stale.
    lost: bool,
}

/// A call of the publisher: its number, and by when it must have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Call {
    number: u64,
    deadline: Duration,
}

struct Driver {
    machine: RelayMachine,
    clock: Moment,
    /// What the machine was told of it last.
    told: Moment,
    transaction: Option<Action>,
    /// When that was asked.
    asked: Moment,
    /// How long the leases of the last claim last.
    lease: Duration,
    publishing: Vec<(Ticket, Call)>,
    /// What is overdue, and still under way.
    hung: Vec<(Ticket, Call)>,
    calls: u64,
    /// By token: each lease that was given and is not settled.
    leases: BTreeMap<u64, Given>,
    tokens: u64,
    sequences: BTreeMap<LaneKey, u64>,
    stopping: bool,
    /// Until when it is patient, once it stops.
    patient_until: Duration,
    gave_up: bool,
    /// What the store was asked last has failed.
    failed: bool,
    /// Answers that are over, to be given once more.
    old: Vec<Ticket>,
    /// The broker was away, and has confirmed nothing since.
    probing: bool,
    /// It has confirmed something since an event was last unavailable.
    confirmed_since: bool,
}

impl Driver {
    fn new() -> Self {
        let settings = RelaySettings {
            window: WINDOW,
            window_bytes: WINDOW_BYTES,
            run: 4,
            publishes: SLOTS,
            publish_timeout: TIMEOUT,
            lease: LEASE,
            ..RelaySettings::new(Owner::new("relay").unwrap())
        };
        Self {
            machine: RelayMachine::new(settings, START).unwrap().batch(BATCH),
            clock: START,
            told: START,
            transaction: None,
            asked: START,
            lease: LEASE,
            publishing: Vec::new(),
            hung: Vec::new(),
            calls: 0,
            leases: BTreeMap::new(),
            tokens: 0,
            sequences: BTreeMap::new(),
            stopping: false,
            patient_until: Duration::MAX,
            gave_up: false,
            failed: false,
            old: Vec::new(),
            probing: false,
            confirmed_since: false,
        }
    }

    /// What to tell the machine.
    const fn now(&mut self) -> Moment {
        self.told = self.clock;
        self.told
    }

    /// Takes all there is to do, and checks each of it.
    fn drain(&mut self) {
        let now = self.now();
        self.machine.handle_timeout(now);
        self.check_patience();
        let mut actions = 0;
        while let Some(action) = self.machine.poll_action() {
            actions += 1;
            assert!(actions < 100, "it is busy without end");
            match &action {
                Action::Exchange(exchange) => {
                    assert!(self.transaction.is_none(), "one transaction at a time");
                    assert!(
                        exchange.claim > 0 || !exchange.settle.is_empty(),
                        "an exchange of nothing"
                    );
                    assert!(
                        exchange.claim == 0 || !(self.stopping || self.machine.is_paused()),
                        "a claim in a pause"
                    );
                    exchange.settle.iter().for_each(|result| self.check_result(result));
                    let settled: Vec<u64> =
                        exchange.settle.iter().map(|result| result.lease().token).collect();
                    let open = self
                        .leases
                        .iter()
                        .filter(|(token, given)| !settled.contains(token) && !given.lost);
                    let (open, bytes) = open.fold((0, 0), |(events, bytes), (_, given)| {
                        (events + given.events.len(), bytes + given.bytes)
                    });
                    assert!(
                        exchange.claim == 0 || exchange.claim + open <= WINDOW + SLOTS,
                        "more than the window"
                    );
                    assert!(
                        exchange.claim == 0
                            || (exchange.claim_bytes > 0
                                && exchange.claim_bytes + bytes
                                    <= WINDOW_BYTES + (SLOTS + 1) * BODY),
                        "more than the window's bytes"
                    );
                    let trying = self.leases.iter().any(|(token, leased)| {
                        leased.alone && !leased.lost && !settled.contains(token)
                    });
                    assert!(
                        exchange.claim == 0 || !trying,
                        "a claim while an event is tried alone (F4)"
                    );
                    (self.transaction, self.asked) = (Some(action), self.told);
                }
                Action::Renew(renew) => {
                    assert!(self.transaction.is_none(), "one transaction at a time");
                    let leases = self.renewed_by(renew);
                    assert!(!leases.is_empty());
                    assert!(
                        leases.iter().all(|lease| self.leases.contains_key(&lease.token)),
                        "renews what it does not hold"
                    );
                    (self.transaction, self.asked) = (Some(action), self.told);
                }
                Action::Publish(tickets) => {
                    assert!(!self.stopping && !self.machine.is_paused(), "a publish in a pause");
                    let held = |ticket: &&Ticket| {
                        self.leases.get(&ticket.lease.token).is_some_and(|leased| !leased.lost)
                    };
                    let beside = self.publishing.iter().map(|it| &it.0).filter(held).count();
                    assert!(
                        !self.probing || beside + tickets.len() <= 1,
                        "a probe is a single event (F15)"
                    );
                    for ticket in tickets {
                        self.check_ticket(ticket);
                    }
                    assert!(tickets.len() <= BATCH, "more than a call takes");
                    let deadline = self.told.uptime + TIMEOUT;
                    let call = Call { number: self.calls, deadline };
                    self.calls += 1;
                    self.publishing.extend(tickets.iter().map(|ticket| (ticket.clone(), call)));
                    assert!(self.slots() <= SLOTS, "more calls than slots");
                    let alone = self.publishing.iter().any(|(t, _)| {
                        self.leases.get(&t.lease.token).is_some_and(|l| l.alone && !l.lost)
                    });
                    assert!(
                        !alone || self.publishing.len() == 1,
                        "what is tried alone is alone (F4)"
                    );
                }
                Action::BreakOff(lost) => {
                    let of =
                        |lease: &LeaseRef| self.publishing.iter().any(|it| it.0.lease == *lease);
                    assert!(lost.iter().all(of), "it breaks off what is not under way");
                    let held = |lease: &LeaseRef| {
                        self.leases.get(&lease.token).is_some_and(|given| !given.lost)
                    };
                    assert!(!lost.iter().any(held), "it breaks off what is not lost");
                }
                Action::GiveUp(leases) => {
                    let now = self.told.uptime;
                    for lease in leases {
                        let at = self.publishing.iter().position(|it| it.0.lease == *lease);
                        let given_up = self.publishing.remove(at.expect("it is under way"));
                        assert!(given_up.1.deadline <= now, "given up before its time (F25)");
                        if let Some(given) = self.leases.get_mut(&lease.token) {
                            given.ended = true;
                        }
                        self.hung.push(given_up);
                    }
                }
            }
        }
        let status = self.machine.status();
        assert_eq!(status.error.is_some(), self.failed, "the last error, and no other");
        let under_way = self.publishing.len() + self.hung.len();
        assert!(
            self.gave_up || status.publishing == under_way,
            "{under_way} publishes are under way, not {}",
            status.publishing
        );
        assert!(self.gave_up || status.hung == self.hung.len(), "how many hang (F25)");
        assert!(
            self.publishing.iter().all(|(_, call)| self.told.uptime < call.deadline),
            "it waits for what is overdue (F25)"
        );
        match self.machine.poll_timeout() {
            Some(at) => assert!(
                at > self.told.uptime,
                "it wants to come back at {at:?}, and it is {:?} (F13)",
                self.told
            ),
            None => assert!(
                self.transaction.is_some()
                    || !self.publishing.is_empty()
                    || !self.hung.is_empty()
                    || self.machine.is_stopped(),
                "nothing is under way, and it does not want to come back"
            ),
        }
        // What is being published is renewed when half of its lease is over, as soon as the store
        // is there and not busy (F3).
        if self.transaction.is_none() && !self.stopping && self.machine.phase() != Phase::StoreAway
        {
            for leased in self
                .publishing
                .iter()
                .filter_map(|(ticket, _)| self.leases.get(&ticket.lease.token))
                .filter(|l| !l.lost)
            {
                let half = leased.half.uptime;
                assert!(
                    self.told.uptime < half
                        && self.told.wall < leased.half.wall
                        && self.machine.poll_timeout().is_some_and(|at| at <= half),
                    "not renewed in time"
                );
            }
        }
    }

    fn check_ticket(&mut self, ticket: &Ticket) {
        let lane = &ticket.lease.lane;
        assert!(
            self.publishing.iter().all(|(other, _)| other.lease.lane != *lane),
            "two tickets of lane {lane}"
        );
        let leased = self
            .leases
            .get_mut(&ticket.lease.token)
            .expect("published under a lease that is lost or settled");
        assert_eq!(*lane, leased.lane);
        assert!(!leased.lost, "published under a lease that is lost (P6)");
        let Moment { wall, uptime } = leased.until;
        assert!(
            self.told.wall < wall && self.told.uptime < uptime,
            "published under a lease that has run out (F3)"
        );
        assert_eq!(
            ticket.message.event.id, leased.events[leased.published],
            "the order of the lane"
        );
        assert_eq!(
            leased.confirmed, leased.published,
            "before the one in front of it was confirmed"
        );
        leased.published += 1;
    }

    /// Its patience ends when it was told that it would, and then it waits for nothing that is
    /// under way.
    fn check_patience(&mut self) {
        let ended = self.stopping && self.patient_until <= self.told.uptime;
        if ended && !self.gave_up {
            (self.gave_up, self.failed) = (true, false);
            let under_way = self.publishing.drain(..).chain(self.hung.drain(..));
            self.old.extend(under_way.map(|(ticket, _)| ticket));
        }
        assert_eq!(self.machine.gave_up(), self.gave_up, "patience (F12)");
    }

    fn is_under_way(&self, ticket: &Ticket) -> bool {
        self.publishing.iter().chain(&self.hung).any(|(other, _)| other == ticket)
    }

    /// How many slots are taken.
    fn slots(&self) -> usize {
        let under_way = self.publishing.iter().chain(&self.hung);
        under_way.map(|(_, call)| call.number).collect::<BTreeSet<_>>().len()
    }

    /// P10: as soon as the store is free, it looks for something to publish if a call could begin.
    fn check_liveness(&self) {
        let held = |lane: &LaneKey| self.publishing.iter().any(|it| it.0.lease.lane == *lane);
        let waits = self.leases.values().filter(|given| !given.lost && !given.ended);
        let mut waits = waits.filter(|given| given.published < given.events.len());
        let excused = self.stopping
            || self.machine.is_paused()
            || self.probing
            || self.machine.phase() == Phase::StoreAway
            || self.leases.values().any(|given| given.alone && !given.lost)
            || waits.any(|given| !held(&given.lane))
            || matches!(self.transaction, Some(Action::Renew(_)));
        let claims = matches!(&self.transaction, Some(Action::Exchange(it)) if it.claim > 0);
        assert!(excused || claims || self.slots() >= SLOTS, "P10: a slot is idle");
    }

    /// The leases that a renewal is for.
    fn renewed_by(&self, renew: &Renew) -> Vec<LeaseRef> {
        let assumed = renew.assume(self.machine.now()).expect("one lease of a lane");
        assumed.outcome.leases.into_iter().map(|(lease, _)| lease).collect()
    }

    /// How long a renewal makes leases last.
    fn renewed_for(renew: &Renew) -> Duration {
        let assumed = renew.assume(START.wall).expect("one lease of a lane");
        assumed.outcome.leases[0].1.since(START.wall)
    }

    /// A result is true: it says that confirmed which was, from the first on, and nothing that was
    /// not.
    fn check_result(&self, result: &Settlement) {
        let lease = result.lease();
        let Some(given) = self.leases.get(&lease.token) else {
            panic!("it settles what it does not hold: {result:?}")
        };
        assert_eq!(given.lane, lease.lane);
        // What it would write says what it means.
        let policy: Checked<DeliveryPolicy> = Checked::default();
        let settle = Settle::new(&policy, [result.clone()]);
        let assumed = settle.assume(self.machine.now()).unwrap();
        assert_eq!(
            assumed.outcome.confirmed, given.confirmed,
            "all that was confirmed, and only that (F11, F12)"
        );
        for change in assumed.batch.changes() {
            if let Change::Put { record: Record::Outbox(event, _), .. } = change {
                assert_eq!(*event, given.events[given.confirmed]);
            }
        }
    }

    /// A lease of events of a lane, from the place after `after` on, each with a body of so many
    /// bytes, as a claim would give it.
    fn lease(&self, lane: &LaneKey, after: u64, bodies: &[usize]) -> Leased {
        let (store, now) = (MemoryStore::new(), self.machine.now());
        let request = Request::new("shop", "req", Fingerprint::of([("n", "1")])).unwrap();
        let drafts = (after + 1..).zip(bodies).map(|(n, bytes)| {
            let draft = Draft::new("created", Body::text("b".repeat(*bytes)).unwrap()).unwrap();
            draft
                .id(EventId::new(format!("{lane}/{n}")).unwrap())
                .ordering_key(lane.ordering_key.clone())
        });
        let body = Body::text("an order").unwrap();
        let order = OrderId::new("order").unwrap();
        store.run(CommitOrder::new(&request, order, body, drafts).unwrap(), now).unwrap();
        let policy: Checked<DeliveryPolicy> = Checked::default();
        let owner = Owner::new("relay").unwrap();
        let claim = Claim::new(&policy, owner, LEASE, bodies.len()).unwrap().run(bodies.len());
        let mut leased = store.run(claim, now).unwrap().leased.remove(0);
        for (n, next) in (after + 1..).zip(&mut leased.events) {
            next.message.place = LanePlace { begun: Millis::new(0), sequence: n, after: n - 1 };
        }
        leased
    }

    fn claimed(
        &mut self,
        (limit, bytes): (usize, usize),
        lanes: &[(u8, u8)],
        alone: bool,
        due_in: Option<u16>,
    ) -> Claimed {
        let now = self.asked;
        let mut claimed = Claimed {
            next_due: due_in.map(|millis| now.wall + Duration::from_millis(millis.into())),
            ..Claimed::default()
        };
        let (mut left, mut left_bytes) = (limit, bytes);
        for (lane, events) in lanes {
            // Lanes have bodies of different sizes.
            let size = usize::from(*lane) * 5;
            let lane = LaneKey::from(OrderingKey::new(format!("lane-{lane}")).unwrap());
            // The store gives a lane again only when its lease is over; by then the relay may still
            // hold it.
            let held = self
                .leases
                .values()
                .any(|given| given.lane == lane && !given.lost && given.until.wall > now.wall);
            let events = usize::from(*events).min(4).min(left).min(if alone { 1 } else { 4 });
            // With the event that reaches the bytes there is enough.
            let events = if size == 0 { events } else { events.min(left_bytes.div_ceil(size)) };
            if held
                || events == 0
                || left_bytes == 0
                || claimed.leased.iter().any(|leased| leased.lease.lane == lane)
                || (alone && !claimed.leased.is_empty())
            {
                continue;
            }
            left -= events;
            left_bytes = left_bytes.saturating_sub(events * size);
            self.leases
                .values_mut()
                .filter(|given| given.lane == lane)
                .for_each(|given| given.lost = true);
            self.tokens += 1;
            let next = self.sequences.entry(lane.clone()).or_default();
            let after = *next;
            *next += events as u64;
            let until = now + self.lease;
            let mut leased = self.lease(&lane, after, &vec![size; events]);
            let lease = LeaseRef { lane: lane.clone(), token: self.tokens };
            (leased.lease, leased.until, leased.alone) = (lease, until.wall, alone);
            let given = Given {
                lane,
                until,
                half: now + self.lease / 2,
                alone,
                events: leased.events.iter().map(|next| next.message.event.id.clone()).collect(),
                bytes: events * size,
                published: 0,
                confirmed: 0,
                ended: false,
                lost: false,
            };
            self.leases.insert(self.tokens, given);
            claimed.leased.push(leased);
        }
        claimed
    }

    fn commit(&mut self, lanes: &[(u8, u8)], alone: bool, due_in: Option<u16>, lost: u8) {
        match self.transaction.take() {
            None | Some(Action::Publish(_) | Action::BreakOff(_) | Action::GiveUp(_)) => {}
            Some(Action::Exchange(exchange)) => {
                let mut settled = Settled::default();
                for result in &exchange.settle {
                    let given = self.leases.remove(&result.lease().token);
                    settled.confirmed += given.map_or(0, |given| given.confirmed);
                }
                let settled = (!exchange.settle.is_empty()).then_some(settled);
                self.lease = exchange.claim_lease;
                let limits = (exchange.claim, exchange.claim_bytes);
                let claimed =
                    (exchange.claim > 0).then(|| self.claimed(limits, lanes, alone, due_in));
                self.failed = false;
                let now = self.now();
                self.machine.handle_exchanged(now, (settled, claimed));
            }
            Some(Action::Renew(renew)) => {
                let lasts = Self::renewed_for(&renew);
                let until = self.asked + lasts;
                let mut renewed = Renewed::default();
                for (n, lease) in self.renewed_by(&renew).into_iter().enumerate() {
                    // It may have been settled in the meantime, or be to be settled.
                    if n < usize::from(lost) {
                        if let Some(given) = self.leases.get_mut(&lease.token) {
                            given.lost = true;
                        }
                        renewed.stale.push(StaleLease { lease, why: Stale::Ended });
                    } else {
                        // The store never makes a lease shorter.
                        let mut until = until;
                        if let Some(given) = self.leases.get_mut(&lease.token) {
                            until.wall = until.wall.max(given.until.wall);
                            given.until = until;
                            given.half = self.asked + lasts / 2;
                            given.half.wall = until.wall.before(lasts / 2);
                        }
                        renewed.leases.push((lease, until.wall));
                    }
                }
                self.failed = false;
                let now = self.now();
                self.machine.handle_renewed(now, &renewed);
            }
        }
    }

    fn publish_ends(&mut self, which: u8, how: u8) {
        if self.publishing.is_empty() {
            return;
        }
        let (ticket, _) = self.publishing.remove(usize::from(which) % self.publishing.len());
        let reason = Reason::new("no");
        let answer = match how {
            0 => Published::Failed(reason),
            1 => Published::Rejected(reason),
            2 => Published::Unavailable(reason),
            3 => Published::Abandoned,
            4 => Published::Deferred(reason),
            _ => Published::Confirmed,
        };
        if let Some(leased) = self.leases.get_mut(&ticket.lease.token) {
            leased.ended = answer != Published::Confirmed;
            leased.confirmed += usize::from(answer == Published::Confirmed);
        }
        let paused = self.machine.is_paused();
        let known = self.leases.get(&ticket.lease.token).is_some_and(|leased| !leased.lost);
        if known && !paused && answer == Published::Confirmed {
            (self.probing, self.confirmed_since) = (false, true);
        }
        if known && matches!(answer, Published::Unavailable(_)) {
            // One event stops nothing (F27).
            self.probing |= !std::mem::take(&mut self.confirmed_since) || paused;
        }
        let now = self.now();
        self.machine.handle_published(now, &ticket, answer);
        self.old.push(ticket);
    }

    fn unexpected(&mut self, which: u8) {
        let lease = LeaseRef {
            lane: OrderingKey::new(format!("lane-{}", which % LANES)).unwrap().into(),
            token: 77_777,
        };
        let mut leased = self.lease(&lease.lane, 100, &[1]);
        leased.lease = lease.clone();
        let message = leased.events[0].message.clone();
        let exchange = matches!(self.transaction, Some(Action::Exchange(_)));
        match which % 6 {
            0 => {
                let (now, ticket) = (self.now(), Ticket { lease, message });
                self.machine.handle_published(now, &ticket, Published::Confirmed);
            }
            // An answer that was given before.
            1 => {
                if let Some(ticket) =
                    self.old.last().cloned().filter(|ticket| !self.is_under_way(ticket))
                {
                    let now = self.now();
                    self.machine.handle_published(
                        now,
                        &ticket,
                        Published::Rejected(Reason::new("twice")),
                    );
                }
            }
            // The answer to another transaction than the one that is under way.
            2 if !exchange => {
                let claimed = Claimed { leased: vec![leased], ..Claimed::default() };
                let now = self.now();
                self.machine.handle_exchanged(now, (None, Some(claimed)));
            }
            3 if exchange || self.transaction.is_none() => {
                let mut renewed = Renewed::default();
                for (token, leased) in &self.leases {
                    let lease = LeaseRef { lane: leased.lane.clone(), token: *token };
                    renewed.stale.push(StaleLease { lease, why: Stale::NoLane });
                }
                let now = self.now();
                self.machine.handle_renewed(now, &renewed);
            }
            4 if self.transaction.is_none() => {
                let now = self.now();
                self.machine.handle_store_failed(now, Reason::new("away"));
            }
            _ => {}
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Clock(millis) => {
                let set = self.clock.wall.get().saturating_add_signed(*millis);
                self.clock.wall = Millis::new(set);
            }
            Step::Passes(millis) => self.clock = self.clock + Duration::from_millis(*millis),
            Step::Wait => {
                if let Some(rest) = self.machine.rest_for() {
                    self.clock = self.clock + rest;
                }
            }
            Step::Wakeup => {
                let now = self.now();
                self.machine.handle_wakeup(now);
                if self.transaction.is_none() {
                    self.drain();
                    self.check_liveness();
                }
            }
            Step::Committed { lanes, alone, due_in } => self.commit(lanes, *alone, *due_in, 0),
            Step::StoreFails => {
                if self.transaction.take().is_some() {
                    self.failed = true;
                    let now = self.now();
                    self.machine.handle_store_failed(now, Reason::new("away"));
                }
            }
            Step::Renewed { lost } => {
                if matches!(self.transaction, Some(Action::Renew(_))) {
                    self.commit(&[], false, None, *lost);
                }
            }
            Step::Published { which, how } => self.publish_ends(*which, *how),
            Step::BrokenOff { which, told } => {
                if !self.hung.is_empty() {
                    let at = usize::from(*which) % self.hung.len();
                    let (ticket, _) = self.hung.remove(at);
                    if *told {
                        let late = Published::Confirmed;
                        let now = self.now();
                        self.machine.handle_published(now, &ticket, late);
                    } else {
                        let now = self.now();
                        self.machine.handle_broken_off(now, &ticket.lease);
                    }
                    self.old.push(ticket);
                }
            }
            Step::Unexpected(which) => self.unexpected(*which),
            Step::Stop(patience) => {
                self.ask_to_stop(patience.map_or(Duration::MAX, Duration::from_secs));
            }
        }
        self.check_patience();
    }

    fn ask_to_stop(&mut self, patience: Duration) {
        self.stopping = true;
        let now = self.now();
        self.machine.handle_stop(now, patience);
        self.patient_until = self.patient_until.min(self.told.uptime.saturating_add(patience));
    }

    /// Asks it to stop, and answers all that it asks: it comes to its end, with every lease settled
    /// or lost.
    fn stop(&mut self) {
        self.ask_to_stop(Duration::MAX);
        for _ in 0..200 {
            self.drain();
            if self.machine.is_stopped() {
                break;
            }
            if self.transaction.is_some() {
                self.commit(&[(1, 1)], false, None, 0);
            } else if !self.publishing.is_empty() {
                self.publish_ends(0, 15);
            } else {
                self.step(&Step::Wait);
            }
        }
        assert!(self.machine.is_stopped(), "it never stops");
        assert_eq!(self.machine.poll_action(), None);
        assert_eq!(self.machine.poll_timeout(), None);
        let open: Vec<&Given> = self.leases.values().filter(|leased| !leased.lost).collect();
        // After its patience has ended it tries once to give back what it holds, and says so if that
        // has failed.
        let could_not = self.gave_up && self.failed;
        assert!(open.is_empty() || could_not, "leases that nobody settled: {open:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_it_keeps_its_rules(steps in prop::collection::vec(steps(), 0..120)) {
        let mut driver = Driver::new();
        driver.drain();
        for step in &steps {
            driver.step(step);
            driver.drain();
        }
        driver.stop();
    }
}
