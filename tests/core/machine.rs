//! The relay machine, case by case: what there is to do after what has happened, how much, and when
//! to come back.
//!
//! What holds whatever happens is in `tests/machine.rs` and in `relay`; these are the figures.

use core::time::Duration;

use twobox::relay::{Action, Exchange, Phase, Published, RelayMachine, RelaySettings, Ticket};
use twobox::{
    Claimed, Delivery, DeliveryPolicy, LeaseRef, Millis, Place, Reason, Renewed, Run, RunResult,
    Settled, Stale, StaleLease,
};

use crate::support::{ms, name};

const START: Millis = Millis::new(1_000_000);
const LEASE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(500);
const MS: Duration = Duration::from_millis(1);

/// How long each pause is, of failures in a row.
const PAUSES: [u64; 8] = [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000];

fn settings() -> RelaySettings {
    let settings = RelaySettings {
        window: 8,
        run: 3,
        lease: LEASE,
        poll: POLL,
        ..RelaySettings::new(name("relay"))
    };
    assert_eq!((settings.pause_base, settings.pause_cap), (PAUSE, LEASE));
    settings
}

/// A machine, and the store and the clock as the test plays them.
struct Played {
    machine: RelayMachine,
    now: Millis,
    token: u64,
}

impl Played {
    fn new() -> Self {
        Self { machine: RelayMachine::new(settings(), START).unwrap(), now: START, token: 0 }
    }

    /// One that holds runs of so many events of these lanes, and the tickets of their first events.
    fn holding(runs: &[(&str, usize)]) -> (Self, Vec<Ticket>) {
        let mut relay = Self::new();
        assert_eq!(relay.exchange(), Exchange { settle: vec![], claim: 8 });
        let tickets = relay.claimed(runs);
        assert_eq!(tickets.len(), runs.len());
        (relay, tickets)
    }

    fn after(&mut self, span: Duration) {
        self.now = self.now + span;
        self.machine.handle_timeout(self.now);
    }

    fn exchange(&mut self) -> Exchange {
        match self.machine.poll_action() {
            Some(Action::Exchange(exchange)) => exchange,
            other => panic!("no exchange: {other:?}"),
        }
    }

    fn publish(&mut self) -> Vec<Ticket> {
        match self.machine.poll_action() {
            Some(Action::Publish(tickets)) => tickets,
            None => vec![],
            Some(other) => panic!("no publish: {other:?}"),
        }
    }

    fn run(&mut self, lane: &str, events: usize, alone: bool) -> Run {
        self.token += 1;
        let delivery = |n: u64| Delivery {
            event: name(&format!("{lane}/{}/{n}", self.token)),
            place: Place { begun: ms(1), sequence: n, after: n - 1 },
            attempt: 1,
        };
        let lease = LeaseRef { lane: name(lane), token: self.token };
        Run {
            deliveries: (1..=events as u64).map(delivery).collect(),
            lease,
            until: self.now + LEASE,
            alone,
        }
    }

    /// The exchange under way has settled what it was asked to, and claimed these; gives what is
    /// then published.
    fn claimed(&mut self, runs: &[(&str, usize)]) -> Vec<Ticket> {
        let runs = runs.iter().map(|(lane, events)| self.run(lane, *events, false)).collect();
        self.machine.handle_exchanged(self.now, None, Some(Claimed { runs, ..Claimed::default() }));
        self.publish()
    }

    /// The exchange under way was to settle, and not to claim.
    fn settled(&mut self) {
        self.machine.handle_exchanged(self.now, Some(&Settled::default()), None);
    }

    fn ends(&mut self, ticket: &Ticket, answer: Published) {
        self.machine.handle_published(self.now, ticket, answer);
    }

    fn confirm(&mut self, ticket: &Ticket) {
        self.ends(ticket, Published::Confirmed);
    }

    fn unavailable(&mut self, ticket: &Ticket) {
        self.ends(ticket, Published::Unavailable(Reason::new("away")));
    }

    /// It is in this phase for just so long, counted from now, and does nothing meanwhile.
    fn rests(&mut self, phase: Phase, span: Duration) {
        assert_eq!((self.machine.phase(), self.machine.poll_action()), (phase, None));
        assert_eq!(self.machine.poll_timeout(), Some(self.now + span));
        self.after(span - MS);
        assert_eq!((self.machine.phase(), self.machine.poll_action()), (phase, None));
        self.after(MS);
        assert_eq!(self.machine.phase(), Phase::Running);
    }
}

/// The window counts what waits, what is under way and what is confirmed and not settled (F13).
/// Small claims beside much that is under way would only cost transactions.
#[test]
fn how_much_is_claimed() {
    for (held, claim) in [
        (&[("a", 1)][..], 7),
        (&[("a", 3)], 5),
        (&[("a", 3), ("b", 1)], 4),
        (&[("a", 2), ("b", 3)], 0),
        (&[("a", 3), ("b", 3), ("c", 2)], 0),
    ] {
        let (mut relay, _) = Played::holding(held);
        assert_eq!(relay.machine.poll_action(), None, "{held:?}: not before the poll");
        relay.machine.handle_wakeup(relay.now);
        if claim > 0 {
            assert_eq!(relay.exchange(), Exchange { settle: vec![], claim }, "{held:?}");
        } else {
            assert_eq!(relay.machine.poll_action(), None, "{held:?}");
            assert_eq!(
                relay.machine.poll_timeout(),
                Some(relay.now + LEASE / 2),
                "{held:?}: only to renew"
            );
        }
    }
    // Two are confirmed, two under way, and none is settled.
    let (mut relay, tickets) = Played::holding(&[("a", 2), ("b", 2)]);
    tickets.iter().for_each(|ticket| relay.confirm(ticket));
    assert_eq!(relay.publish().len(), 2);
    relay.machine.handle_wakeup(relay.now);
    assert_eq!(relay.exchange().claim, 4);
    // One is confirmed, one under way, and one waits.
    let (mut relay, tickets) = Played::holding(&[("a", 3)]);
    relay.confirm(&tickets[0]);
    assert_eq!(relay.publish().len(), 1);
    relay.machine.handle_wakeup(relay.now);
    assert_eq!(relay.exchange().claim, 5);
}

/// A claim rides along with a settlement before its time has come, if it is worth it.
#[test]
fn a_settlement_takes_a_claim_along() {
    for (held, claim) in
        [(&[("a", 1)][..], 8), (&[("a", 1), ("b", 3)], 5), (&[("a", 1), ("b", 3), ("c", 2)], 0)]
    {
        let (mut relay, tickets) = Played::holding(held);
        relay.confirm(&tickets[0]);
        let confirmed = vec![tickets[0].delivery.event.clone()];
        let settle = vec![RunResult { lease: tickets[0].lease.clone(), confirmed, ended: None }];
        assert_eq!(relay.machine.poll_timeout(), Some(relay.now), "{held:?}");
        assert_eq!(relay.exchange(), Exchange { settle, claim }, "{held:?}");
        assert_eq!(
            (relay.machine.poll_action(), relay.machine.poll_timeout()),
            (None, None),
            "{held:?}: it is under way"
        );
    }
}

/// What an exchange is made of: a settlement first, if there is one, and a claim, if there is one.
#[test]
fn an_exchange_is_two_transitions_at_most() {
    let settings = settings().checked().unwrap();
    let result = RunResult {
        lease: LeaseRef { lane: name("a"), token: 1 },
        confirmed: vec![name("e")],
        ended: None,
    };
    for settles in [false, true] {
        for claim in [0, 1, 8] {
            let settle = if settles { vec![result.clone()] } else { vec![] };
            let (settle, claims) = Exchange { settle, claim }.into_transitions(&settings);
            assert_eq!((settle.is_some(), claims.is_some()), (settles, claim > 0));
        }
    }
}

/// When to look again (F13): when the store says, not before now, and not later than the poll.
#[test]
fn when_to_claim_again() {
    let poll = START + POLL;
    for (next_due, at) in [
        (None, poll),
        (Some(ms(1)), START),
        (Some(START), START),
        (Some(START + MS), START + MS),
        (Some(poll.before(MS)), poll.before(MS)),
        (Some(poll + MS), poll),
        (Some(Millis::MAX), poll),
    ] {
        let mut relay = Played::new();
        assert_eq!(relay.exchange().claim, 8);
        relay.machine.handle_exchanged(
            START,
            None,
            Some(Claimed { next_due, ..Claimed::default() }),
        );
        assert_eq!(relay.machine.poll_timeout(), Some(at), "{next_due:?}");
        if at > START {
            assert_eq!(relay.machine.poll_action(), None, "{next_due:?}");
        }
        relay.after(at.since(START));
        assert_eq!(relay.exchange().claim, 8, "{next_due:?}");
    }
}

/// F15: pauses double while the broker is away, and one event at a time is tried after each; once
/// it is back, all is as before.
#[test]
fn after_an_outage_one_event_is_tried() {
    let (mut relay, tickets) = Played::holding(&[("a", 1), ("b", 2), ("c", 1)]);
    let mut under_way = tickets;
    for (n, pause) in PAUSES.into_iter().enumerate() {
        // The answers of one batch are one failure.
        under_way.iter().for_each(|ticket| relay.unavailable(ticket));
        let exchange = relay.exchange();
        assert_eq!((exchange.settle.len(), exchange.claim), (under_way.len(), 0), "pause {n}");
        relay.settled();
        relay.rests(Phase::Paused, Duration::from_millis(pause));
        assert_eq!(relay.exchange(), Exchange { settle: vec![], claim: 1 }, "pause {n}");
        under_way = relay.claimed(&[("a", 1)]);
        assert_eq!(under_way.len(), 1);
    }
    assert_eq!(relay.machine.counters().unavailable, 3 + 7);
    relay.confirm(&under_way[0]);
    assert_eq!(relay.exchange().claim, 8);
    let again = relay.claimed(&[("a", 1), ("b", 1)]);
    assert_eq!(again.len(), 2);
    again.iter().for_each(|ticket| relay.unavailable(ticket));
    assert_eq!(relay.exchange().settle.len(), 2);
    relay.settled();
    relay.rests(Phase::Paused, PAUSE);
}

/// F15: nothing is claimed or published beside what is still under way after the pause, and only an
/// answer from after it counts.
#[test]
fn a_probe_waits_for_what_is_under_way() {
    for confirmed_in_pause in [true, false] {
        let (mut relay, tickets) = Played::holding(&[("a", 1), ("b", 2)]);
        relay.unavailable(&tickets[0]);
        assert_eq!(relay.exchange().claim, 0);
        relay.settled();
        if confirmed_in_pause {
            relay.confirm(&tickets[1]);
            // Its run ends there, so that what is left of it is given back.
            assert_eq!(relay.exchange().settle[0].confirmed, [tickets[1].delivery.event.clone()]);
            relay.settled();
            relay.rests(Phase::Paused, PAUSE);
            assert_eq!(relay.exchange().claim, 1);
        } else {
            relay.after(PAUSE);
            relay.machine.handle_wakeup(relay.now);
            assert_eq!(
                (relay.machine.phase(), relay.machine.poll_action()),
                (Phase::Running, None)
            );
            relay.confirm(&tickets[1]);
            let Some(Action::Publish(next)) = relay.machine.poll_action() else {
                panic!("the broker is back")
            };
            relay.confirm(&next[0]);
            assert_eq!(relay.exchange().claim, 8);
        }
    }
    // Not either where the window is so small that a claim would be worth it.
    let small = RelaySettings { window: 2, run: 1, ..settings() };
    let mut relay = Played { machine: RelayMachine::new(small, START).unwrap(), ..Played::new() };
    assert_eq!(relay.exchange().claim, 2);
    let tickets = relay.claimed(&[("a", 1), ("b", 1)]);
    relay.unavailable(&tickets[0]);
    assert_eq!(relay.exchange().claim, 0);
    relay.settled();
    relay.after(PAUSE);
    relay.machine.handle_wakeup(relay.now);
    assert_eq!((relay.machine.phase(), relay.machine.poll_action()), (Phase::Running, None));
    relay.confirm(&tickets[1]);
    assert_eq!(relay.exchange().claim, 2);
    // A claim may bring more than was asked for: one of them is tried.
    let (mut relay, tickets) = Played::holding(&[("a", 1)]);
    relay.unavailable(&tickets[0]);
    let _ = relay.exchange();
    relay.settled();
    relay.after(PAUSE);
    assert_eq!(relay.exchange().claim, 1);
    let probe = relay.claimed(&[("a", 2), ("b", 1)]);
    assert_eq!((probe.len(), relay.machine.poll_action()), (1, None));
    relay.confirm(&probe[0]);
    assert_eq!(relay.publish().len(), 2);
}

/// F12: a publish that was given up makes a pause, and is no failure of the broker unless it says
/// so meanwhile.
#[test]
fn what_is_given_up_makes_a_pause() {
    for meanwhile in [false, true] {
        let (mut relay, tickets) = Played::holding(&[("a", 1), ("b", 1)]);
        relay.ends(&tickets[0], Published::Abandoned);
        assert_eq!(relay.machine.phase(), Phase::Paused);
        if meanwhile {
            relay.unavailable(&tickets[1]);
        } else {
            relay.confirm(&tickets[1]);
        }
        assert_eq!(relay.exchange().claim, 0);
        relay.settled();
        relay.rests(Phase::Paused, PAUSE);
        assert_eq!(relay.exchange().claim, if meanwhile { 1 } else { 8 });
        let next = relay.claimed(&[("a", 1)]);
        relay.unavailable(&next[0]);
        let _ = relay.exchange();
        relay.settled();
        relay.rests(Phase::Paused, PAUSE * if meanwhile { 2 } else { 1 });
    }
    // A relay that stops does not pause for it.
    let (mut relay, tickets) = Played::holding(&[("a", 1)]);
    relay.machine.handle_stop(relay.now);
    relay.ends(&tickets[0], Published::Abandoned);
    assert!(!relay.machine.is_paused());
    assert_eq!(relay.exchange().settle, [RunResult::released(tickets[0].lease.clone())]);
    relay.settled();
    assert_eq!(relay.machine.phase(), Phase::Stopped);
}

/// F11: pauses double while the store is away, what was to be settled is settled again, and an
/// answer ends it.
#[test]
fn pauses_double_while_the_store_is_away() {
    let (mut relay, tickets) = Played::holding(&[("a", 1)]);
    relay.confirm(&tickets[0]);
    let wanted = relay.exchange();
    for (n, pause) in PAUSES.into_iter().enumerate() {
        relay.machine.handle_store_failed(relay.now);
        relay.rests(Phase::StoreAway, Duration::from_millis(pause));
        assert_eq!(relay.exchange(), wanted, "pause {n}");
    }
    assert_eq!(relay.machine.counters().store_failures, 8);
    let next = relay.claimed(&[("a", 1)]);
    relay.confirm(&next[0]);
    let _ = relay.exchange();
    relay.machine.handle_store_failed(relay.now);
    relay.rests(Phase::StoreAway, PAUSE);
}

/// F11: that rows can be written does not mean that envelopes can be read; a publish that began
/// does.
#[test]
fn pauses_double_while_envelopes_cannot_be_read() {
    let (mut relay, mut tickets) = Played::holding(&[("a", 1)]);
    for pause in &PAUSES[..4] {
        relay.machine.handle_unread(relay.now, &tickets);
        relay.after(Duration::from_millis(*pause) - MS);
        assert_eq!(relay.machine.phase(), Phase::StoreAway);
        // It rests until the first failure is over and the store may be asked again.
        relay.after(MS);
        let exchange = relay.exchange();
        assert_eq!(exchange.settle, [RunResult::released(tickets[0].lease.clone())]);
        tickets = relay.claimed(&[("a", 1)]);
        assert_eq!(tickets.len(), 1);
    }
    relay.ends(&tickets[0], Published::Failed(Reason::new("no")));
    let _ = relay.exchange();
    let tickets = relay.claimed(&[("a", 1)]);
    relay.machine.handle_unread(relay.now, &tickets);
    relay.after(PAUSE - MS);
    assert_eq!(relay.machine.phase(), Phase::StoreAway);
    relay.after(MS);
    assert_eq!(relay.machine.phase(), Phase::Running);
}

/// F3: a lease is renewed when half of it is over, each time, and nothing is published under one
/// that has run out.
#[test]
fn leases_are_renewed_in_time() {
    let (mut relay, tickets) = Played::holding(&[("a", 2)]);
    let lease = tickets[0].lease.clone();
    // Polls find nothing meanwhile.
    let half_is_over = |relay: &mut Played| {
        relay.after(LEASE / 2 - MS);
        if let Some(action) = relay.machine.poll_action() {
            assert_eq!(action, Action::Exchange(Exchange { settle: vec![], claim: 6 }));
            relay.machine.handle_exchanged(relay.now, None, Some(Claimed::default()));
        }
        assert_eq!(relay.machine.poll_action(), None);
        assert_eq!(relay.machine.poll_timeout(), Some(relay.now + MS));
        relay.after(MS);
        assert_eq!(relay.machine.poll_action(), Some(Action::Renew(vec![lease.clone()])));
    };
    for _ in 0..3 {
        half_is_over(&mut relay);
        let renewed = Renewed { leases: vec![(lease.clone(), relay.now + LEASE)], stale: vec![] };
        relay.machine.handle_renewed(relay.now, &renewed);
    }
    // The renewal hangs.
    half_is_over(&mut relay);
    relay.after(LEASE / 2 - MS);
    let mut just_before = relay.machine.clone();
    just_before.handle_published(relay.now, &tickets[0], Published::Confirmed);
    assert!(matches!(just_before.poll_action(), Some(Action::Publish(_))));
    relay.after(MS);
    relay.confirm(&tickets[0]);
    assert_eq!(relay.machine.poll_action(), None);
    let renewed = Renewed { leases: vec![(lease.clone(), relay.now + LEASE)], stale: vec![] };
    relay.machine.handle_renewed(relay.now, &renewed);
    assert_eq!(relay.publish().len(), 1);
}

/// P4, P6: what is being published under a lease that is lost is waited for before anything else of
/// its lane is published, even under the lane's next lease; its answer settles nothing.
#[test]
fn a_lost_lease_holds_its_lane_until_the_publish_has_ended() {
    let (mut relay, tickets) = Played::holding(&[("a", 2), ("b", 1)]);
    relay.after(LEASE / 2);
    assert!(
        matches!(relay.machine.poll_action(), Some(Action::Renew(leases)) if leases.len() == 2)
    );
    let lost = StaleLease { lease: tickets[0].lease.clone(), why: Stale::Ended };
    let kept = (tickets[1].lease.clone(), relay.now + LEASE);
    relay.machine.handle_renewed(relay.now, &Renewed { leases: vec![kept], stale: vec![lost] });
    assert_eq!(relay.machine.counters().stale, 1);
    assert!(!relay.machine.may_begin(&tickets[0]) && relay.machine.may_begin(&tickets[1]));
    assert_eq!(relay.exchange(), Exchange { settle: vec![], claim: 7 });
    // The lane is claimed again, and another one.
    let next = relay.claimed(&[("a", 2), ("c", 1)]);
    assert_eq!(next.iter().map(|ticket| ticket.lease.lane.as_str()).collect::<Vec<_>>(), ["c"]);
    // An answer for another lease of that lane, or for another event under it, is not what is
    // waited for.
    let other_event = Ticket { delivery: tickets[1].delivery.clone(), ..tickets[0].clone() };
    let other_token =
        Ticket { lease: LeaseRef { token: 99, ..tickets[0].lease.clone() }, ..tickets[0].clone() };
    for other in [other_event, other_token] {
        relay.confirm(&other);
        assert_eq!(relay.machine.poll_action(), None);
    }
    relay.confirm(&tickets[0]);
    let next = relay.publish();
    assert_eq!(next.iter().map(|ticket| ticket.lease.lane.as_str()).collect::<Vec<_>>(), ["a"]);
    assert_eq!(relay.machine.counters().confirmed, 0);
}

/// F4: what is tried alone is published while nothing else is, and nothing is claimed before it has
/// ended.
#[test]
fn what_is_tried_alone_is_alone() {
    let (mut relay, tickets) = Played::holding(&[("b", 2), ("c", 1)]);
    relay.machine.handle_wakeup(relay.now);
    assert_eq!(relay.exchange().claim, 5);
    let alone = relay.run("a", 1, true);
    relay.machine.handle_exchanged(
        relay.now,
        None,
        Some(Claimed { runs: vec![alone], ..Claimed::default() }),
    );
    relay.machine.handle_wakeup(relay.now);
    for ticket in &tickets {
        assert_eq!(relay.machine.poll_action(), None);
        relay.confirm(ticket);
    }
    // What has ended is settled meanwhile, and what is left waits.
    assert_eq!(
        relay.publish().iter().map(|ticket| ticket.lease.lane.as_str()).collect::<Vec<_>>(),
        ["a"]
    );
    let exchange = relay.exchange();
    assert_eq!((exchange.settle.len(), exchange.claim), (1, 0));
    relay.settled();
    assert_eq!(relay.machine.poll_action(), None);
    assert_eq!(relay.machine.poll_timeout(), Some(relay.now + LEASE / 2), "only to renew");
    let a = LeaseRef { lane: name("a"), token: 3 };
    let event = name("a/3/1");
    let delivery =
        Delivery { event, place: Place { begun: ms(1), sequence: 1, after: 0 }, attempt: 1 };
    relay.confirm(&Ticket { lease: a, delivery });
    assert_eq!(
        relay.publish().iter().map(|ticket| ticket.lease.lane.as_str()).collect::<Vec<_>>(),
        ["b"]
    );
    assert_eq!(relay.exchange().claim, 6);
}

/// P6, F12, F15: what was handed out and has not begun is not begun under a lease that is gone, in
/// a pause, or while the relay stops.
#[test]
fn what_may_still_begin() {
    let begun = |happens: &dyn Fn(&mut Played, &[Ticket])| {
        let (mut relay, tickets) = Played::holding(&[("a", 2), ("b", 1)]);
        happens(&mut relay, &tickets);
        tickets.iter().map(|ticket| relay.machine.may_begin(ticket)).collect::<Vec<_>>()
    };
    assert_eq!(begun(&|_, _| ()), [true, true]);
    assert_eq!(begun(&|relay, tickets| relay.confirm(&tickets[0])), [false, true]);
    assert_eq!(
        begun(&|relay, tickets| relay.ends(&tickets[1], Published::Failed(Reason::new("no")))),
        [true, false]
    );
    assert_eq!(begun(&|relay, tickets| relay.unavailable(&tickets[1])), [false, false]);
    assert_eq!(begun(&|relay, _| relay.machine.handle_stop(relay.now)), [false, false]);
    assert_eq!(begun(&|relay, _| relay.machine.abandon(relay.now)), [false, false]);
    // Another event of the same lease, another lease of the same lane.
    let (relay, tickets) = Played::holding(&[("a", 2), ("b", 1)]);
    let other_event = Ticket { delivery: tickets[1].delivery.clone(), ..tickets[0].clone() };
    let other_token =
        Ticket { lease: LeaseRef { token: 99, ..tickets[0].lease.clone() }, ..tickets[0].clone() };
    let other_lane = Ticket { lease: LeaseRef { lane: name("c"), token: 1 }, ..tickets[0].clone() };
    for other in [other_event, other_token, other_lane] {
        assert!(!relay.machine.may_begin(&other), "{other:?}");
    }
}

/// F12: a relay that stops gives back what waits, waits for what is under way, settles both, and
/// has then stopped.
#[test]
fn a_relay_stops_when_all_is_settled() {
    let (mut relay, tickets) = Played::holding(&[("a", 2), ("b", 1)]);
    relay.confirm(&tickets[1]);
    let states = |relay: &Played| {
        (relay.machine.is_idle(), relay.machine.is_stopped(), relay.machine.phase())
    };
    assert_eq!(states(&relay), (false, false, Phase::Running));
    relay.machine.handle_stop(relay.now);
    assert_eq!(states(&relay), (false, false, Phase::Stopping));
    let exchange = relay.exchange();
    assert_eq!((exchange.settle.len(), exchange.claim), (1, 0));
    relay.settled();
    assert_eq!(states(&relay), (false, false, Phase::Stopping), "a publish is under way");
    relay.confirm(&tickets[0]);
    assert_eq!(states(&relay), (false, false, Phase::Stopping), "it is not settled");
    let exchange = relay.exchange();
    assert_eq!(exchange.settle[0].confirmed, [tickets[0].delivery.event.clone()]);
    assert_eq!(states(&relay), (false, false, Phase::Stopping), "its settlement is under way");
    relay.settled();
    assert_eq!(states(&relay), (true, true, Phase::Stopped));
    // One that is idle and was not asked to stop has not stopped; one that has nothing has at once.
    let mut relay = Played::new();
    assert_eq!(states(&relay), (true, false, Phase::Running));
    let _ = relay.exchange();
    assert_eq!(states(&relay), (false, false, Phase::Running), "a claim is under way");
    let mut relay = Played::new();
    relay.machine.handle_stop(relay.now);
    assert_eq!((states(&relay), relay.machine.poll_action()), ((true, true, Phase::Stopped), None));
}

/// A lease without an end is not renewed, which would never come to an end, and its events are
/// published (P3).
#[test]
fn a_lease_that_never_ends_is_not_renewed() {
    for lease in [Duration::MAX, Duration::MAX / 2, Duration::from_millis(u64::MAX)] {
        let policy = DeliveryPolicy { backoff_cap: Duration::MAX, ..DeliveryPolicy::default() }
            .checked()
            .unwrap();
        let endless = RelaySettings { lease, policy, ..settings() };
        let mut relay =
            Played { machine: RelayMachine::new(endless, START).unwrap(), now: START, token: 0 };
        let _ = relay.exchange();
        let run = Run { until: START + lease, ..relay.run("a", 1, false) };
        relay.machine.handle_exchanged(
            START,
            None,
            Some(Claimed { runs: vec![run], ..Claimed::default() }),
        );
        assert_eq!(relay.publish().len(), 1, "{lease:?}");
        assert_eq!(relay.machine.poll_action(), None);
        assert!(relay.machine.poll_timeout().is_some_and(|at| at > START));
    }
}
