//! The relay machine alone, without a store: fed with whatever can happen, expected or not, in any
//! order.
//!
//! The driver below answers late, twice, for things it was never asked, under leases that are lost,
//! with a clock that jumps both ways. What must hold whatever it does: no panic, one ticket of a
//! lane at a time and in order (P4), no more than the window (F13), no publish while it pauses or
//! stops (F12, F15) or under a lease that has run out (F3), no result dropped (F11), always a time
//! to come back at, and never one that has passed (F13), and an end when it is asked to stop.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use core::time::Duration;
use std::collections::BTreeMap;

use proptest::prelude::*;
use twobox::relay::{Action, Phase, Published, RelayMachine, RelaySettings, Ticket};
use twobox::{
    Claimed, Delivery, EventId, LeaseRef, Millis, OrderingKey, Owner, Place, Reason, Renewed, Run,
    RunResult, Settled, Stale, StaleLease,
};

const START: Millis = Millis::new(1_000_000_000);
const LEASE: Duration = Duration::from_secs(30);
const LANES: u8 = 6;

/// Something that happens to the machine.
#[derive(Debug, Clone)]
enum Step {
    /// The clock that the machine is told moves by so many milliseconds, either way.
    Clock(i64),
    /// Time passes until the machine wants to come back.
    Wait,
    Wakeup,
    /// The transaction under way is committed; runs of these lanes are claimed, some of them alone.
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
    /// The envelopes of a publish cannot be read.
    Unread {
        which: u8,
    },
    /// What was never asked, or was answered before.
    Unexpected(u8),
    Abandon,
    Stop,
}

fn steps() -> impl Strategy<Value = Step> {
    let lanes = prop::collection::vec((0..LANES, 1..5_u8), 0..5);
    prop_oneof![
        2 => (-90_000..90_000_i64).prop_map(Step::Clock),
        2 => (0..900_i64).prop_map(Step::Clock),
        6 => Just(Step::Wait),
        2 => Just(Step::Wakeup),
        12 => (lanes, prop::bool::weighted(0.1), prop::option::of(any::<u16>()))
            .prop_map(|(lanes, alone, due_in)| Step::Committed { lanes, alone, due_in }),
        2 => Just(Step::StoreFails),
        4 => (0..4_u8).prop_map(|lost| Step::Renewed { lost }),
        16 => (any::<u8>(), 0..16_u8).prop_map(|(which, how)| Step::Published { which, how }),
        1 => any::<u8>().prop_map(|which| Step::Unread { which }),
        3 => any::<u8>().prop_map(Step::Unexpected),
        1 => Just(Step::Abandon),
        1 => Just(Step::Stop),
    ]
}

/// A lease that the store gave, as the driver of the test knows it.
#[derive(Debug)]
struct Leased {
    lane: OrderingKey,
    until: Millis,
    alone: bool,
    events: Vec<EventId>,
    /// How many of them were given to be published.
    published: usize,
    confirmed: usize,
    /// The last publish ended and was not confirmed.
    ended: bool,
    /// Others have taken the lane; what the machine settles under this lease will turn out to be
    /// stale.
    lost: bool,
}

struct Driver {
    machine: RelayMachine,
    clock: Millis,
    transaction: Option<Action>,
    publishing: Vec<Ticket>,
    /// By token: each lease that was given and is not settled.
    leases: BTreeMap<u64, Leased>,
    tokens: u64,
    sequences: BTreeMap<OrderingKey, u64>,
    stopping: bool,
    /// Answers that are over, to be given once more.
    old: Vec<Ticket>,
    /// The broker was away, and has confirmed nothing since.
    probing: bool,
}

impl Driver {
    fn new() -> Self {
        let settings = RelaySettings {
            window: 12,
            run: 4,
            lease: LEASE,
            ..RelaySettings::new(Owner::new("relay").unwrap())
        };
        Self {
            machine: RelayMachine::new(settings, START).unwrap(),
            clock: START,
            transaction: None,
            publishing: Vec::new(),
            leases: BTreeMap::new(),
            tokens: 0,
            sequences: BTreeMap::new(),
            stopping: false,
            old: Vec::new(),
            probing: false,
        }
    }

    /// Takes all there is to do, and checks each of it.
    fn drain(&mut self) {
        self.machine.handle_timeout(self.clock);
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
                        exchange.settle.iter().map(|result| result.lease.token).collect();
                    let open = self
                        .leases
                        .iter()
                        .filter(|(token, leased)| !settled.contains(token) && !leased.lost);
                    let open: usize = open.map(|(_, leased)| leased.events.len()).sum();
                    assert!(
                        exchange.claim == 0 || exchange.claim + open <= 12,
                        "more than the window"
                    );
                    let trying = self.leases.iter().any(|(token, leased)| {
                        leased.alone && !leased.lost && !settled.contains(token)
                    });
                    assert!(
                        exchange.claim == 0 || !trying,
                        "a claim while an event is tried alone (F4)"
                    );
                    self.transaction = Some(action);
                }
                Action::Renew(leases) => {
                    assert!(self.transaction.is_none(), "one transaction at a time");
                    assert!(!leases.is_empty());
                    assert!(
                        leases.iter().all(|lease| self.leases.contains_key(&lease.token)),
                        "renews what it does not hold"
                    );
                    self.transaction = Some(action);
                }
                Action::Publish(tickets) => {
                    assert!(!self.stopping && !self.machine.is_paused(), "a publish in a pause");
                    let held = |ticket: &&Ticket| {
                        self.leases.get(&ticket.lease.token).is_some_and(|leased| !leased.lost)
                    };
                    let beside = self.publishing.iter().filter(held).count();
                    assert!(
                        !self.probing || beside + tickets.len() <= 1,
                        "a probe is a single event (F15)"
                    );
                    for ticket in tickets {
                        self.check_ticket(ticket);
                    }
                    self.publishing.extend(tickets.iter().cloned());
                    let alone = self.publishing.iter().any(|t| {
                        self.leases.get(&t.lease.token).is_some_and(|l| l.alone && !l.lost)
                    });
                    assert!(
                        !alone || self.publishing.len() == 1,
                        "what is tried alone is alone (F4)"
                    );
                }
            }
        }
        match self.machine.poll_timeout() {
            Some(at) => assert!(
                at > self.machine.now(),
                "it wants to come back at {at}, and it is {} (F13)",
                self.machine.now()
            ),
            None => assert!(
                self.transaction.is_some()
                    || !self.publishing.is_empty()
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
                .filter_map(|ticket| self.leases.get(&ticket.lease.token))
                .filter(|l| !l.lost)
            {
                let half = leased.until.before(LEASE / 2);
                assert!(
                    self.machine.now() < half
                        && self.machine.poll_timeout().is_some_and(|at| at <= half),
                    "not renewed in time"
                );
            }
        }
    }

    fn check_ticket(&mut self, ticket: &Ticket) {
        let lane = &ticket.lease.lane;
        assert!(
            self.publishing.iter().all(|other| other.lease.lane != *lane),
            "two tickets of lane {lane}"
        );
        let leased = self
            .leases
            .get_mut(&ticket.lease.token)
            .expect("published under a lease that is lost or settled");
        assert_eq!(*lane, leased.lane);
        assert!(!leased.lost, "published under a lease that is lost (P6)");
        assert!(self.machine.now() < leased.until, "published under a lease that has run out (F3)");
        assert_eq!(ticket.delivery.event, leased.events[leased.published], "the order of the run");
        assert_eq!(
            leased.confirmed, leased.published,
            "before the one in front of it was confirmed"
        );
        leased.published += 1;
    }

    /// A result is true: it says that confirmed which was, from the first on, and nothing that was
    /// not.
    fn check_result(&self, result: &RunResult) {
        let Some(leased) = self.leases.get(&result.lease.token) else {
            panic!("it settles what it does not hold: {result:?}")
        };
        assert_eq!(leased.lane, result.lease.lane);
        assert_eq!(
            result.confirmed[..],
            leased.events[..leased.confirmed],
            "all that was confirmed, and only that (F11, F12)"
        );
        if let Some((event, _)) = &result.ended {
            assert_eq!(*event, leased.events[leased.confirmed]);
        }
    }

    fn claimed(
        &mut self,
        limit: usize,
        lanes: &[(u8, u8)],
        alone: bool,
        due_in: Option<u16>,
    ) -> Claimed {
        let now = self.machine.now();
        let mut claimed = Claimed {
            next_due: due_in.map(|millis| now + Duration::from_millis(millis.into())),
            ..Claimed::default()
        };
        let mut left = limit;
        for (lane, events) in lanes {
            let lane = OrderingKey::new(format!("lane-{lane}")).unwrap();
            // The store gives a lane again only when its lease is over; by then a run of the
            // relay's own may still be held.
            let held = self
                .leases
                .values()
                .any(|leased| leased.lane == lane && !leased.lost && leased.until > now);
            let events = usize::from(*events).min(4).min(left).min(if alone { 1 } else { 4 });
            if held
                || events == 0
                || claimed.runs.iter().any(|run| run.lease.lane == lane)
                || (alone && !claimed.runs.is_empty())
            {
                continue;
            }
            left -= events;
            self.leases
                .values_mut()
                .filter(|leased| leased.lane == lane)
                .for_each(|leased| leased.lost = true);
            self.tokens += 1;
            let next = self.sequences.entry(lane.clone()).or_default();
            let deliveries: Vec<Delivery> = (1..=events as u64)
                .map(|n| Delivery {
                    event: EventId::new(format!("{lane}/{}", *next + n)).unwrap(),
                    place: Place {
                        begun: Millis::new(0),
                        sequence: *next + n,
                        after: *next + n - 1,
                    },
                    attempt: 1,
                })
                .collect();
            *next += events as u64;
            let until = now + LEASE;
            let ids = deliveries.iter().map(|delivery| delivery.event.clone()).collect();
            let leased = Leased {
                lane: lane.clone(),
                until,
                alone,
                events: ids,
                published: 0,
                confirmed: 0,
                ended: false,
                lost: false,
            };
            self.leases.insert(self.tokens, leased);
            claimed.runs.push(Run {
                lease: LeaseRef { lane, token: self.tokens },
                until,
                alone,
                deliveries,
            });
        }
        claimed
    }

    fn commit(&mut self, lanes: &[(u8, u8)], alone: bool, due_in: Option<u16>, lost: u8) {
        match self.transaction.take() {
            None | Some(Action::Publish(_)) => {}
            Some(Action::Exchange(exchange)) => {
                let mut settled = Settled::default();
                for result in &exchange.settle {
                    settled.confirmed += result.confirmed.len();
                    self.leases.remove(&result.lease.token);
                }
                let settled = (!exchange.settle.is_empty()).then_some(settled);
                let claimed = (exchange.claim > 0)
                    .then(|| self.claimed(exchange.claim, lanes, alone, due_in));
                self.machine.handle_exchanged(self.clock, settled.as_ref(), claimed);
            }
            Some(Action::Renew(leases)) => {
                let until = self.machine.now() + LEASE;
                let mut renewed = Renewed::default();
                for (n, lease) in leases.into_iter().enumerate() {
                    if n < usize::from(lost) {
                        if let Some(leased) = self.leases.get_mut(&lease.token) {
                            leased.lost = true;
                        }
                        renewed.stale.push(StaleLease { lease, why: Stale::Ended });
                    } else {
                        // It may have been settled in the meantime.
                        if let Some(leased) = self.leases.get_mut(&lease.token) {
                            leased.until = until;
                        }
                        renewed.leases.push((lease, until));
                    }
                }
                self.machine.handle_renewed(self.clock, &renewed);
            }
        }
    }

    fn publish_ends(&mut self, which: u8, how: u8) {
        if self.publishing.is_empty() {
            return;
        }
        let ticket = self.publishing.remove(usize::from(which) % self.publishing.len());
        let reason = Reason::new("no");
        let answer = match how {
            0 => Published::Failed(reason),
            1 => Published::Rejected(reason),
            2 => Published::Unavailable(reason),
            3 => Published::Abandoned,
            _ => Published::Confirmed,
        };
        if let Some(leased) = self.leases.get_mut(&ticket.lease.token) {
            leased.ended = answer != Published::Confirmed;
            leased.confirmed += usize::from(answer == Published::Confirmed);
        }
        let paused = self.machine.is_paused();
        let known = self.leases.get(&ticket.lease.token).is_some_and(|leased| !leased.lost);
        if known && !paused && answer == Published::Confirmed {
            self.probing = false;
        }
        if known && matches!(answer, Published::Unavailable(_)) {
            self.probing = true;
        }
        self.machine.handle_published(self.clock, &ticket, answer);
        self.old.push(ticket);
    }

    fn unexpected(&mut self, which: u8) {
        let lease = LeaseRef {
            lane: OrderingKey::new(format!("lane-{}", which % LANES)).unwrap(),
            token: 77_777,
        };
        let delivery = Delivery {
            event: EventId::new("unknown").unwrap(),
            place: Place { begun: Millis::new(0), sequence: 1, after: 0 },
            attempt: 1,
        };
        let exchange = matches!(self.transaction, Some(Action::Exchange(_)));
        match which % 6 {
            0 => self.machine.handle_published(
                self.clock,
                &Ticket { lease, delivery },
                Published::Confirmed,
            ),
            // An answer that was given before.
            1 => {
                if let Some(ticket) =
                    self.old.last().filter(|ticket| !self.publishing.contains(ticket))
                {
                    self.machine.handle_published(
                        self.clock,
                        ticket,
                        Published::Rejected(Reason::new("twice")),
                    );
                }
            }
            // The answer to another transaction than the one that is under way.
            2 if !exchange => {
                let run = Run {
                    lease,
                    until: self.clock + LEASE,
                    alone: false,
                    deliveries: vec![delivery],
                };
                let claimed = Claimed { runs: vec![run], ..Claimed::default() };
                self.machine.handle_exchanged(self.clock, None, Some(claimed));
            }
            3 if exchange || self.transaction.is_none() => {
                let mut renewed = Renewed::default();
                for (token, leased) in &self.leases {
                    let lease = LeaseRef { lane: leased.lane.clone(), token: *token };
                    renewed.stale.push(StaleLease { lease, why: Stale::NoLane });
                }
                self.machine.handle_renewed(self.clock, &renewed);
            }
            4 if self.transaction.is_none() => self.machine.handle_store_failed(self.clock),
            _ => {}
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Clock(millis) => {
                self.clock = Millis::new(self.clock.get().saturating_add_signed(*millis));
            }
            Step::Wait => {
                if let Some(at) = self.machine.poll_timeout() {
                    self.clock = self.clock + at.since(self.machine.now());
                }
            }
            Step::Wakeup => self.machine.handle_wakeup(self.clock),
            Step::Committed { lanes, alone, due_in } => self.commit(lanes, *alone, *due_in, 0),
            Step::StoreFails => {
                if self.transaction.take().is_some() {
                    self.machine.handle_store_failed(self.clock);
                }
            }
            Step::Renewed { lost } => {
                if matches!(self.transaction, Some(Action::Renew(_))) {
                    self.commit(&[], false, None, *lost);
                }
            }
            Step::Published { which, how } => self.publish_ends(*which, *how),
            Step::Unread { which } => {
                if !self.publishing.is_empty() {
                    let ticket =
                        self.publishing.remove(usize::from(*which) % self.publishing.len());
                    if let Some(leased) = self.leases.get_mut(&ticket.lease.token) {
                        leased.ended = true;
                    }
                    self.machine.handle_unread(self.clock, std::slice::from_ref(&ticket));
                    self.old.push(ticket);
                }
            }
            Step::Unexpected(which) => self.unexpected(*which),
            Step::Abandon => {
                self.machine.abandon(self.clock);
                self.old.append(&mut self.publishing);
            }
            Step::Stop => {
                self.machine.handle_stop(self.clock);
                self.stopping = true;
            }
        }
    }

    /// Asks it to stop, and answers all that it asks: it comes to its end, with every lease settled
    /// or lost.
    fn stop(&mut self) {
        self.machine.handle_stop(self.clock);
        self.stopping = true;
        for _ in 0..200 {
            self.drain();
            if self.machine.is_stopped() {
                break;
            }
            if self.transaction.is_some() {
                self.commit(&[(1, 1)], false, None, 0);
            } else if !self.publishing.is_empty() {
                self.publish_ends(0, 4);
            } else {
                self.step(&Step::Wait);
            }
        }
        assert!(self.machine.is_stopped(), "it never stops");
        assert_eq!(self.machine.poll_action(), None);
        assert_eq!(self.machine.poll_timeout(), None);
        let open: Vec<&Leased> = self.leases.values().filter(|leased| !leased.lost).collect();
        assert!(open.is_empty(), "leases that nobody settled: {open:?}");
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
