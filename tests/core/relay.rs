//! The relay machine as a concurrent driver sees it: transactions and publishes are under way while
//! other things happen.
//!
//! A driver is only as good as what the machine tells it: when there is nothing to do it must say
//! until when (or the driver spins), one key must not be published twice at a time (P4), nothing
//! must be published under a lease that has run out (F3), and no wake-up may be lost.

use std::time::Duration;

use proptest::prelude::*;
use twobox::relay::{Action, Phase, Published, RelayMachine, RelaySettings, Ticket};
use twobox::store::{NoCall, drive};
use twobox::{
    Body, Claimed, CommitOrder, DeliveryPolicy, Draft, Fingerprint, Handled, InProcess, Inbox,
    LeaseRef, Load, Millis, Moment, OrderId, Reader, Reason, Request, Settled, Stale, StaleLease,
    Store,
};
use twobox_memory::MemoryStore;

use crate::support::{lane_key, leased, ms, name};

const HOUR: Duration = Duration::from_secs(3_600);

fn settings() -> RelaySettings {
    let policy =
        DeliveryPolicy { max_failures: 500, max_starts: 1_000, ..DeliveryPolicy::default() };
    let policy = policy.checked().unwrap();
    RelaySettings { window: 8, run: 3, poll: HOUR, policy, ..RelaySettings::new(name("relay-1")) }
}

fn commit(store: &MemoryStore, n: usize, lane: u8, now: Millis) {
    let request =
        Request::new("test", format!("req-{n}"), Fingerprint::of([("n", n.to_string())])).unwrap();
    let body = Body::text(n.to_string()).unwrap();
    let draft =
        Draft::new("happened", body.clone()).unwrap().ordering_key(name(&format!("lane-{lane}")));
    store
        .run(
            CommitOrder::new(
                &request,
                OrderId::new(format!("order-{n:04}")).unwrap(),
                body,
                [draft],
            )
            .unwrap(),
            now,
        )
        .unwrap();
}

/// A driver that finishes nothing by itself: what it was given is under way until it is told how
/// that ends.
struct World {
    store: MemoryStore,
    machine: RelayMachine,
    now: Millis,
    committed: usize,
    transaction: Option<(Action, Millis)>,
    publishing: Vec<Ticket>,
    hung: Vec<Ticket>,
}

impl World {
    fn new() -> Self {
        let machine = RelayMachine::new(settings(), Moment::steady(ms(1_000))).unwrap();
        let store = MemoryStore::new();
        Self {
            store,
            machine,
            now: ms(1_000),
            committed: 0,
            transaction: None,
            publishing: Vec::new(),
            hung: Vec::new(),
        }
    }

    fn commit(&mut self, lane: u8) {
        self.committed += 1;
        commit(&self.store, self.committed, lane, self.now);
        self.machine.handle_wakeup(Moment::steady(self.now));
    }

    /// Takes all there is to do, and checks what a driver relies on.
    fn drain(&mut self) {
        self.machine.handle_timeout(Moment::steady(self.now));
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Exchange(_) | Action::Renew(_) => {
                    assert!(self.transaction.is_none(), "two transactions at a time");
                    self.transaction = Some((action, self.machine.now()));
                }
                Action::Publish(tickets) => {
                    tickets.into_iter().for_each(|ticket| self.start(ticket));
                }
                // Like a thread, which cannot break it off.
                Action::BreakOff(_) => {}
                Action::GiveUp(leases) => {
                    let of_those = |ticket: &mut Ticket| leases.contains(&ticket.lease);
                    let before = self.hung.len();
                    self.hung.extend(self.publishing.extract_if(.., of_those));
                    assert_eq!(self.hung.len() - before, leases.len(), "F25: what is under way");
                }
            }
        }
        let timeout = self.machine.poll_timeout();
        assert!(
            timeout.is_none_or(|at| at > Moment::steady(self.now).uptime),
            "a driver would spin: {timeout:?} at {}",
            self.machine.now()
        );
        let idle = self.transaction.is_none() && self.publishing.is_empty();
        assert!(!idle || timeout.is_some(), "a driver would wait for ever");
    }

    fn start(&mut self, ticket: Ticket) {
        let same = self.publishing.iter().find(|other| other.lease.lane == ticket.lease.lane);
        assert_eq!(same, None, "P4: two publishes of one key at a time");
        let row = self.store.view().unwrap().lane(&ticket.lease.lane).unwrap().unwrap();
        let until = row.lease.as_ref().map(|lease| lease.until);
        assert!(
            until.is_some_and(|until| until > self.machine.now()),
            "F3: published under a lease until {until:?}"
        );
        self.publishing.push(ticket);
    }

    /// The transaction under way is over. Where it fails, it has taken or it has not.
    fn finish_transaction(&mut self, takes: bool, answered: bool) {
        let Some((action, began)) = self.transaction.take() else { return };
        let settings = self.machine.settings().clone();
        match action {
            Action::Exchange(exchange) if takes => {
                let flow = exchange.flow(&settings, began, began.get() % 2 == 0);
                let exchanged = drive(&self.store, flow, &mut NoCall).unwrap();
                if answered {
                    return self.machine.handle_exchanged(Moment::steady(self.now), exchanged);
                }
            }
            Action::Renew(renew) if takes => {
                let renewed = self.store.run(renew, began).unwrap();
                if answered {
                    return self.machine.handle_renewed(Moment::steady(self.now), &renewed);
                }
            }
            Action::Exchange(_) | Action::Renew(_) => {}
            Action::Publish(_) | Action::BreakOff(_) | Action::GiveUp(_) => {
                unreachable!("it is no transaction")
            }
        }
        self.machine.handle_store_failed(Moment::steady(self.now), Reason::new("away"));
    }

    fn finish_publish(&mut self, at: u8, answer: Option<Published>) {
        let (publishing, hung) = (self.publishing.len(), self.hung.len());
        if publishing + hung > 0 {
            let at = usize::from(at) % (publishing + hung);
            let ticket = match at.checked_sub(publishing) {
                None => self.publishing.remove(at),
                Some(at) => self.hung.remove(at),
            };
            match answer {
                Some(answer) => {
                    self.machine.handle_published(Moment::steady(self.now), &ticket, answer);
                }
                None => self.machine.handle_published(
                    Moment::steady(self.now),
                    &ticket,
                    Published::Abandoned,
                ),
            }
        }
    }
}

proptest! {
    #[test]
    fn whatever_happens_meanwhile_a_driver_is_told_the_right_thing(steps in prop::collection::vec((0..12_u8, any::<u8>()), 1..120)) {
        let mut world = World::new();
        world.drain();
        for (step, n) in steps {
            match step {
                0 | 1 => world.commit(n % 6),
                2 | 3 => world.finish_transaction(true, true),
                4 => world.finish_transaction(n % 2 == 0, false),
                5 | 6 => world.finish_publish(n, Some(Published::Confirmed)),
                7 => world.finish_publish(n, Some(Published::Failed(Reason::new("it failed")))),
                8 => world.finish_publish(n, Some(Published::Unavailable(Reason::new("it is away")))),
                9 => world.finish_publish(n, None),
                10 => world.now = world.now + Duration::from_millis(200 * u64::from(n)),
                _ => world.now = world.now.before(Duration::from_millis(20 * u64::from(n))),
            }
            world.drain();
        }
        // P3, P8: with nothing in the way any more, all of it is delivered, and in no more time
        // than a wait costs.
        for _ in 0..2_000 {
            world.finish_transaction(true, true);
            world.drain();
            world.finish_publish(0, Some(Published::Confirmed));
            world.drain();
            if world.transaction.is_none() && world.publishing.is_empty() {
                if world.machine.counters().confirmed >= world.committed as u64 && world.machine.is_idle() {
                    break;
                }
                let wait = world.machine.rest_for().expect("nothing is under way");
                world.now = world.now + wait;
                world.drain();
            }
        }
        let stats = world.store.view().unwrap().stats(world.now).unwrap();
        prop_assert_eq!(stats.all.pending, 0);
    }
}

/// Events are committed, and announced, after the claim under way has looked for them.
#[test]
fn a_wakeup_during_a_transaction_is_not_lost() {
    for answered in [true, false] {
        let mut world = World::new();
        world.drain();
        let Some((Action::Exchange(exchange), _)) = world.transaction.take() else {
            panic!("it claims at once")
        };
        let settings_of = world.machine.settings().clone();
        let flow = exchange.flow(&settings_of, world.now, false);
        let exchanged = drive(&world.store, flow, &mut NoCall).unwrap();
        world.commit(1);
        if answered {
            world.machine.handle_exchanged(Moment::steady(world.now), exchanged);
        } else {
            world.machine.handle_store_failed(Moment::steady(world.now), Reason::new("away"));
            world.now = world.now + settings().pause_base;
        }
        world.drain();
        world.finish_transaction(true, true);
        world.drain();
        assert_eq!(
            world.publishing.len(),
            1,
            "without waiting for the poll, which is an hour away"
        );
    }
}

/// F12: at the end of its patience a relay tries once more to give back its leases, even while it
/// waits for the store.
#[test]
fn what_is_abandoned_is_released_at_once() {
    let mut world = World::new();
    world.commit(1);
    world.drain();
    world.finish_transaction(true, true);
    world.drain();
    world.commit(2);
    world.drain();
    world.finish_transaction(false, false);
    assert_eq!(world.machine.phase(), Phase::StoreAway);
    world.machine.handle_stop(Moment::steady(world.now), HOUR);
    world.drain();
    assert_eq!(world.transaction, None);
    world.machine.handle_stop(Moment::steady(world.now), Duration::ZERO);
    world.drain();
    world.finish_transaction(true, true);
    assert_eq!(world.machine.phase(), Phase::Stopped);
    assert_eq!(world.machine.counters().failed, 0);
}

/// F15: a relay says that it waits for the broker, for as long as it does.
#[test]
fn a_relay_says_that_it_is_paused() {
    let mut world = World::new();
    world.commit(1);
    world.drain();
    world.finish_transaction(true, true);
    world.drain();
    assert_eq!((world.machine.is_paused(), world.machine.phase()), (false, Phase::Running));
    world.finish_publish(0, Some(Published::Unavailable(Reason::new("away"))));
    assert_eq!((world.machine.is_paused(), world.machine.phase()), (true, Phase::Paused));
    assert_eq!(world.machine.counters().unavailable, 1);
    world.machine.handle_timeout(Moment::steady(world.now + settings().pause_base / 2));
    assert_eq!((world.machine.is_paused(), world.machine.phase()), (true, Phase::Paused));
    world.machine.handle_timeout(Moment::steady(world.now + settings().pause_base));
    assert_eq!((world.machine.is_paused(), world.machine.phase()), (false, Phase::Running));
}

/// All that a relay is told of is counted.
#[test]
fn a_relay_counts_what_it_has_done() {
    let mut machine = RelayMachine::new(settings(), Moment::steady(ms(1_000))).unwrap();
    for token in 1..=2 {
        let lease = LeaseRef { lane: lane_key("a"), token };
        let settled = Settled {
            confirmed: 2,
            retried: 3,
            released: 4,
            dead: vec![(name("d1"), lane_key("a"))],
            stale: vec![StaleLease { lease: lease.clone(), why: Stale::Ended }],
        };
        let dead = ["d2", "d3", "d4"].map(|id| (name(id), lane_key("a"))).into();
        let claimed = Claimed { leased: vec![leased("a", token, &["e"])], dead, next_due: None };
        assert!(matches!(machine.poll_action(), Some(Action::Exchange(_))));
        machine.handle_exchanged(Moment::steady(ms(1_000)), (Some(settled), Some(claimed)));
        let Some(Action::Publish(tickets)) = machine.poll_action() else {
            panic!("it publishes what it has claimed")
        };
        machine.handle_published(Moment::steady(ms(1_000)), &tickets[0], Published::Confirmed);
    }
    for failures in 1..=2 {
        assert!(matches!(machine.poll_action(), Some(Action::Exchange(_))));
        machine.handle_store_failed(Moment::steady(ms(1_000 * failures)), Reason::new("away"));
        machine.handle_timeout(Moment::steady(ms(1_000 * failures + 1_000)));
    }
    let counters = machine.counters();
    assert_eq!((counters.claimed, counters.published, counters.confirmed), (2, 2, 4));
    assert_eq!((counters.failed, counters.dead, counters.stale), (6, 8, 2));
    assert_eq!((counters.unavailable, counters.store_failures), (0, 2));
}

/// What holds a publisher can be shown, whatever its handler is.
#[test]
fn a_publisher_in_process_can_be_shown() {
    let store = MemoryStore::new();
    let publisher =
        InProcess::new(Inbox::new(&store, name("c")), |_, _| Ok::<_, String>(Handled::Done));
    assert_eq!(format!("{publisher:?}"), "InProcess { .. }");
}
