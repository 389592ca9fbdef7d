//! The relay machine, case by case: what there is to do after what has happened, how much, and when
//! to come back.
//!
//! What holds whatever happens is in `tests/machine.rs` and in `relay`; these are the figures.

use core::time::Duration;

use twobox::relay::{Action, Exchange, Phase, Published, RelayMachine, RelaySettings, Ticket};
use twobox::{
    Claim, Claimed, Delivery, DeliveryPolicy, Destination, Ending, Event, Headers, Lane, LaneRow,
    LeaseRef, Leased, Millis, Moment, Reason, Renew, Renewed, Revision, Rows, Settled, Settlement,
    Stale, StaleLease, Transition,
};

use crate::support::{LANE, lane_key, ms, name, pending, text};

const START: Millis = Millis::new(1_000_000);
const LEASE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(500);
const TIMEOUT: Duration = Duration::from_secs(3_600);
const MS: Duration = Duration::from_millis(1);

/// How long each pause is, of failures in a row.
const PAUSES: [u64; 8] = [500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000];

fn settings() -> RelaySettings {
    let settings = RelaySettings {
        window: 8,
        run: 3,
        lease: LEASE,
        poll: POLL,
        publish_timeout: TIMEOUT,
        ..RelaySettings::new(name("relay"))
    };
    assert_eq!((settings.pause_base, settings.pause_cap), (PAUSE, LEASE));
    settings
}

/// A claim of so many events, and of so many bytes, which the window leaves room for.
fn claims(claim: usize) -> Exchange {
    exchanges(vec![], claim)
}

fn exchanges(settle: Vec<Settlement>, claim: usize) -> Exchange {
    if claim == 0 {
        return Exchange { settle, claim, claim_bytes: 0, claim_run: 1, claim_lease: LEASE };
    }
    Exchange {
        settle,
        claim,
        claim_bytes: BYTES - (8 - claim) * BODY,
        claim_run: 3,
        claim_lease: LEASE,
    }
}

/// How many bytes of bodies the window has, and each body.
const BYTES: usize = 64 << 20;
const BODY: usize = 5;

/// A machine, and the store and the clock as the test plays them.
struct Played {
    machine: RelayMachine,
    now: Millis,
    token: u64,
}

impl Played {
    fn new() -> Self {
        Self {
            machine: RelayMachine::new(settings(), Moment::steady(START)).unwrap(),
            now: START,
            token: START.get(),
        }
    }

    /// One that holds runs of so many events of these lanes, and the tickets of their first events.
    fn holding(runs: &[(&str, usize)]) -> (Self, Vec<Ticket>) {
        let mut relay = Self::new();
        assert_eq!(relay.exchange(), claims(8));
        let tickets = relay.claimed(runs);
        assert_eq!(tickets.len(), runs.len());
        (relay, tickets)
    }

    /// When it wants to come back, by a clock that is steady.
    fn timeout(&self) -> Option<Millis> {
        self.machine.poll_timeout().map(|at| Millis::new(0) + at)
    }

    fn after(&mut self, span: Duration) {
        self.now = self.now + span;
        self.machine.handle_timeout(Moment::steady(self.now));
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

    /// What is to be published, whatever else there is to do.
    fn publish_if_any(&mut self) -> Vec<Ticket> {
        let mut machine = self.machine.clone();
        if let Some(Action::Publish(tickets)) = machine.poll_action() {
            self.machine = machine;
            return tickets;
        }
        vec![]
    }

    /// What a claim gets of a lane with so many events.
    fn lease(&mut self, lane: &str, events: usize, alone: bool) -> Leased {
        let settings = self.machine.settings().clone();
        let event = |id: &str| Event {
            destination: Destination::default(),
            id: name(id),
            order: name("o"),
            event_type: name("t"),
            schema_version: 1,
            ordering_key: name(lane),
            time: ms(1),
            headers: Headers::new(),
            body: text("12345"),
        };
        let token = self.token + 1;
        let delivery = |n: u64| {
            let id = format!("{lane}/{token}/{n}");
            let row = pending(lane, n);
            Delivery { id: name(&id), row, revision: None, event: Some(event(&id)) }
        };
        let row = LaneRow {
            next: 99,
            due: Some(START),
            starts: if alone { 2 } else { 0 },
            token: self.token,
            ..LANE
        };
        self.token = token;
        let pending = (1..=events as u64).map(delivery).collect();
        let lane = Lane { key: lane_key(lane), row, revision: Revision::FIRST, pending };
        let claim = Claim::new(&settings.policy, name("relay"), settings.lease, 9).unwrap();
        let rows = Rows { lanes: vec![lane], ..Rows::default() };
        // Its token is the one that the test knows, whatever the time is.
        let decision = claim.run(9).decide(START, &rows).unwrap();
        let mut leased = decision.outcome.leased.into_iter().next().unwrap();
        leased.until = self.now + settings.lease;
        leased
    }

    fn exchanged(&mut self, leased: Vec<Leased>) {
        let claimed = Claimed { leased, ..Claimed::default() };
        self.machine.handle_exchanged(Moment::steady(self.now), (None, Some(claimed)));
    }

    fn failed(&mut self) {
        self.machine.handle_store_failed(Moment::steady(self.now), Reason::new("away"));
    }

    fn stop(&mut self) {
        self.machine.handle_stop(Moment::steady(self.now), Duration::MAX);
    }

    /// Renews what is to be renewed, and says for which leases.
    fn renews(&mut self) -> Renew {
        match self.machine.poll_action() {
            Some(Action::Renew(renew)) => renew,
            other => panic!("no renewal: {other:?}"),
        }
    }

    /// The exchange under way has settled what it was asked to, and claimed these; gives what is
    /// then published.
    fn claimed(&mut self, runs: &[(&str, usize)]) -> Vec<Ticket> {
        let leased = runs.iter().map(|(lane, events)| self.lease(lane, *events, false));
        let leased = leased.collect();
        self.exchanged(leased);
        self.publish()
    }

    /// The exchange under way was to settle, and not to claim.
    fn settled(&mut self) {
        self.machine.handle_exchanged(Moment::steady(self.now), (Some(Settled::default()), None));
    }

    fn ends(&mut self, ticket: &Ticket, answer: Published) {
        self.machine.handle_published(Moment::steady(self.now), ticket, answer);
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
        assert_eq!(self.timeout(), Some(self.now + span));
        self.after(span - MS);
        assert_eq!((self.machine.phase(), self.machine.poll_action()), (phase, None));
        self.after(MS);
        assert_eq!(self.machine.phase(), Phase::Running);
    }
}

/// The window counts what waits, what is under way and what is confirmed and not settled (F13).
/// While a call could begin there is a claim, and where the window has no room for it, one event
/// for each such call (P10).
#[test]
fn how_much_is_claimed() {
    for (held, claim) in [
        (&[("a", 1)][..], 7),
        (&[("a", 3)], 5),
        (&[("a", 3), ("b", 1)], 4),
        (&[("a", 2), ("b", 3)], 3),
    ] {
        let (mut relay, _) = Played::holding(held);
        assert_eq!(relay.machine.poll_action(), None, "{held:?}: not before the poll");
        relay.machine.handle_wakeup(Moment::steady(relay.now));
        assert_eq!(relay.exchange(), claims(claim), "{held:?}");
    }
    let (mut relay, _) = Played::holding(&[("a", 3), ("b", 3), ("c", 2)]);
    relay.machine.handle_wakeup(Moment::steady(relay.now));
    // All of it is one call.
    for slots in (1..8).rev() {
        let beyond = Exchange { claim: slots, claim_bytes: 1, claim_run: 1, ..claims(0) };
        assert_eq!(relay.exchange(), beyond);
        assert_eq!(relay.claimed(&[(&format!("lane-{slots}"), 1)]).len(), 1);
        relay.machine.handle_wakeup(Moment::steady(relay.now));
    }
    assert_eq!(relay.machine.poll_action(), None, "all slots are taken");
    assert_eq!(relay.timeout(), Some(relay.now + LEASE / 2), "only to renew");
    // Two are confirmed, two under way, and none is settled.
    let (mut relay, tickets) = Played::holding(&[("a", 2), ("b", 2)]);
    tickets.iter().for_each(|ticket| relay.confirm(ticket));
    assert_eq!(relay.publish().len(), 2);
    relay.machine.handle_wakeup(Moment::steady(relay.now));
    assert_eq!(relay.exchange().claim, 4);
    // One is confirmed, one under way, and one waits.
    let (mut relay, tickets) = Played::holding(&[("a", 3)]);
    relay.confirm(&tickets[0]);
    assert_eq!(relay.publish().len(), 1);
    relay.machine.handle_wakeup(Moment::steady(relay.now));
    assert_eq!(relay.exchange().claim, 5);
}

/// While all slots are taken, small claims would only cost transactions: there is one when half of
/// what it takes at a time is done.
#[test]
fn a_busy_relay_claims_by_halves() {
    for (held, claim) in [(2, 2), (3, 0), (4, 0)] {
        let two = RelaySettings { publishes: 2, ..settings() };
        let machine = RelayMachine::new(two, Moment::steady(START)).unwrap().batch(1);
        let mut relay = Played { machine, ..Played::new() };
        assert_eq!(relay.exchange().claim, 4, "it begins with two for each slot");
        let lanes: Vec<String> = (0..held).map(|n| format!("lane-{n}")).collect();
        let runs: Vec<(&str, usize)> = lanes.iter().map(|lane| (lane.as_str(), 1)).collect();
        assert_eq!(relay.claimed(&runs).len(), 1);
        assert_eq!(relay.publish().len(), 1);
        relay.machine.handle_wakeup(Moment::steady(relay.now));
        match relay.machine.poll_action() {
            Some(Action::Exchange(exchange)) => assert_eq!(exchange.claim, claim, "{held}"),
            other => assert_eq!((other, claim), (None, 0), "{held}"),
        }
    }
}

/// F35: it takes more at a time as long as that is published soon, and less when it is not.
#[test]
fn f35_a_relay_takes_what_it_publishes_soon() {
    let one = RelaySettings { publishes: 1, window: 64, ..settings() };
    let machine = RelayMachine::new(one, Moment::steady(START)).unwrap().batch(1);
    let mut relay = Played { machine, ..Played::new() };
    let mut taken = Vec::new();
    for (n, takes) in [1, 1, 1, 40, 40, 40, 90, 90, 90].into_iter().enumerate() {
        let claim = relay.exchange().claim;
        taken.push(claim);
        let lanes: Vec<String> = (0..claim).map(|lane| format!("{n}-{lane}")).collect();
        let runs: Vec<(&str, usize)> = lanes.iter().map(|lane| (lane.as_str(), 1)).collect();
        let mut next = relay.claimed(&runs);
        while let Some(ticket) = next.pop() {
            relay.after(MS * takes);
            relay.confirm(&ticket);
            next = relay.publish_if_any();
        }
    }
    assert_eq!(taken, [2, 4, 8, 16, 8, 4, 4, 2, 2]);
}

/// A claim rides along with a settlement before its time has come, if it is worth it.
#[test]
fn a_settlement_takes_a_claim_along() {
    for (held, claim) in
        [(&[("a", 1)][..], 8), (&[("a", 1), ("b", 3)], 5), (&[("a", 1), ("b", 3), ("c", 2)], 3)]
    {
        let (mut relay, tickets) = Played::holding(held);
        relay.confirm(&tickets[0]);
        assert_eq!(relay.timeout(), Some(relay.now), "{held:?}");
        let exchange = relay.exchange();
        assert_eq!((exchange.settle.len(), exchange.claim), (1, claim), "{held:?}");
        let settlement = &exchange.settle[0];
        assert_eq!((settlement.lease(), settlement.confirmed()), (&tickets[0].lease, 1));
        assert_eq!(
            (relay.machine.poll_action(), relay.timeout()),
            (None, (held.len() > 1).then_some(relay.now + TIMEOUT)),
            "{held:?}: it is under way"
        );
    }
}

/// What an exchange is made of: a settlement first, if there is one, and a claim, if there is one.
#[test]
fn an_exchange_is_two_transitions_at_most() {
    let settings = settings().checked().unwrap();
    let result = Played::new().lease("a", 1, false).settle(1, None);
    for settles in [false, true] {
        for claim in [0, 1, 8] {
            let settle = if settles { vec![result.clone()] } else { vec![] };
            let (settle, claims) =
                Exchange { settle, claim_bytes: 1, ..claims(claim) }.into_transitions(&settings);
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
        let claimed = Claimed { next_due, ..Claimed::default() };
        relay.machine.handle_exchanged(Moment::steady(START), (None, Some(claimed)));
        assert_eq!(relay.timeout(), Some(at), "{next_due:?}");
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
        assert_eq!(relay.exchange().claim, 1, "pause {n}");
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
            assert_eq!(relay.exchange().settle[0].confirmed(), 1);
            relay.settled();
            relay.rests(Phase::Paused, PAUSE);
            assert_eq!(relay.exchange().claim, 1);
        } else {
            relay.after(PAUSE);
            relay.machine.handle_wakeup(Moment::steady(relay.now));
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
    let mut relay = Played {
        machine: RelayMachine::new(small, Moment::steady(START)).unwrap(),
        ..Played::new()
    };
    assert_eq!(relay.exchange().claim, 2);
    let tickets = relay.claimed(&[("a", 1), ("b", 1)]);
    relay.unavailable(&tickets[0]);
    assert_eq!(relay.exchange().claim, 0);
    relay.settled();
    relay.after(PAUSE);
    relay.machine.handle_wakeup(Moment::steady(relay.now));
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
    relay.stop();
    relay.ends(&tickets[0], Published::Abandoned);
    assert!(!relay.machine.is_paused());
    let settle = relay.exchange().settle;
    assert_eq!((settle[0].lease(), settle[0].confirmed()), (&tickets[0].lease, 0));
    assert_eq!(settle[0].ended(), None);
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
    assert_eq!(wanted.settle.len(), 1);
    for (n, pause) in PAUSES.into_iter().enumerate() {
        relay.failed();
        relay.rests(Phase::StoreAway, Duration::from_millis(pause));
        assert_eq!(relay.exchange(), wanted, "pause {n}");
    }
    assert_eq!(relay.machine.counters().store_failures, 8);
    let next = relay.claimed(&[("a", 1)]);
    relay.confirm(&next[0]);
    let _ = relay.exchange();
    relay.failed();
    relay.rests(Phase::StoreAway, PAUSE);
}

/// F11: what the store said is told until it answers again.
#[test]
fn what_the_store_said_is_told() {
    let mut relay = Played::new();
    let _ = relay.exchange();
    relay.failed();
    assert_eq!(relay.machine.status().error, Some(Reason::new("away")));
    relay.after(PAUSE);
    let _ = relay.exchange();
    let _ = relay.claimed(&[]);
    assert_eq!(relay.machine.status().error, None);
}

/// The window is one of bytes as well (F36): once the bodies in it have come to so many, one event
/// is claimed for each call that could begin.
#[test]
fn f36_the_window_counts_bytes() {
    for (bytes, held, room) in [(20, 1, 15), (20, 3, 5), (15, 3, 0), (1, 1, 0)] {
        let small = RelaySettings { window_bytes: bytes, publishes: 2, ..settings() };
        let machine = RelayMachine::new(small, Moment::steady(START)).unwrap();
        let mut relay = Played { machine, ..Played::new() };
        assert_eq!(relay.exchange().claim_bytes, bytes);
        assert_eq!(relay.claimed(&[("a", held)]).len(), 1);
        relay.machine.handle_wakeup(Moment::steady(relay.now));
        let next = relay.exchange();
        let wanted = if room > 0 { (8 - held, room, 3) } else { (1, 1, 1) };
        assert_eq!((next.claim, next.claim_bytes, next.claim_run), wanted, "{bytes} {held}");
        assert_eq!(relay.claimed(&[("b", 1)]).len(), 1);
        relay.machine.handle_wakeup(Moment::steady(relay.now));
        if room > 5 {
            assert_eq!(relay.exchange().claim_bytes, room - BODY);
        } else {
            assert_eq!(relay.machine.poll_action(), None, "{bytes} {held}: all slots are taken");
        }
    }
}

/// F25: what does not end in time has failed, its lane is free for others, and it takes up a slot
/// until it has ended; one that takes up all slots is stuck, and claims nothing.
#[test]
fn f25_what_does_not_end_in_time_has_failed() {
    let short = RelaySettings { publishes: 2, publish_timeout: LEASE / 3, ..settings() };
    let machine = RelayMachine::new(short, Moment::steady(START)).unwrap().batch(1);
    let mut relay = Played { machine, ..Played::new() };
    let _ = relay.exchange();
    let mut hung = relay.claimed(&[("a", 2), ("b", 1), ("c", 1)]);
    hung.extend(relay.publish());
    assert_eq!((hung.len(), relay.machine.poll_action()), (2, None));
    assert_eq!(relay.timeout(), Some(START + LEASE / 3));
    relay.after(LEASE / 3 - MS);
    assert_eq!((relay.machine.poll_action(), relay.machine.phase()), (None, Phase::Running));
    relay.after(MS);
    let leases = hung.iter().map(|ticket| ticket.lease.clone()).collect();
    assert_eq!(relay.machine.poll_action(), Some(Action::GiveUp(leases)));
    let status = relay.machine.status();
    assert_eq!((status.phase, status.publishing, status.hung), (Phase::Stuck, 2, 2));
    assert_eq!(status.counters.overdue, 2);
    // What waits is given back too: another relay may take it.
    let exchange = relay.exchange();
    let settled: Vec<(&str, usize, bool)> = exchange
        .settle
        .iter()
        .map(|it| (it.lease().lane.ordering_key.as_str(), it.confirmed(), it.ended().is_some()))
        .collect();
    assert_eq!(settled, [("a", 0, true), ("b", 0, true), ("c", 0, false)]);
    assert_eq!(exchange.claim, 0);
    relay.settled();
    relay.machine.handle_wakeup(Moment::steady(relay.now));
    assert_eq!(relay.machine.poll_action(), None);
    // One is broken off, the other ends after all; what it says counts no more.
    relay.machine.handle_broken_off(Moment::steady(relay.now), &hung[0].lease);
    assert_eq!(relay.machine.phase(), Phase::Running);
    assert!(relay.exchange().claim > 0);
    let next = relay.claimed(&[("a", 1), ("d", 1)]);
    assert_eq!((next.len(), relay.machine.poll_action()), (1, None), "one slot is taken up");
    relay.confirm(&hung[1]);
    assert_eq!(relay.publish().len(), 1);
    assert_eq!(relay.machine.status().hung, 0);
    assert_eq!(relay.machine.counters().confirmed, 0);
}

/// F25: an answer that comes late counts, if nobody has looked at the clock before.
#[test]
fn f25_a_late_answer_counts_if_it_comes_first() {
    let (mut relay, tickets) = Played::holding(&[("a", 1)]);
    relay.now = relay.now + TIMEOUT * 2;
    relay.confirm(&tickets[0]);
    assert_eq!(relay.machine.counters().overdue, 0);
    let settle = relay.exchange().settle;
    assert_eq!((settle[0].confirmed(), settle[0].ended()), (1, None));
}

/// F33: a lease that has run out when the store answers is counted, and nothing is published under
/// it.
#[test]
fn f33_leases_too_short_for_the_store_are_counted() {
    let mut relay = Played::new();
    let _ = relay.exchange();
    let leased = relay.lease("a", 1, false);
    relay.now = relay.now + LEASE;
    relay.exchanged(vec![leased]);
    assert_eq!((relay.machine.counters().short, relay.machine.phase()), (1, Phase::Running));
    assert!(matches!(relay.machine.poll_action(), Some(Action::Renew(_))));
}

/// F12: what a stop waits for it waits for no longer than its patience; then it is released, what
/// the store said before does not count, and it tries once.
#[test]
fn a_stop_has_patience() {
    for store_fails in [false, true] {
        let (mut relay, _tickets) = Played::holding(&[("a", 2), ("b", 1)]);
        relay.machine.handle_stop(Moment::steady(relay.now), LEASE);
        // Of several stops the least patient counts.
        relay.machine.handle_stop(Moment::steady(relay.now), PAUSE);
        relay.machine.handle_stop(Moment::steady(relay.now), LEASE);
        assert_eq!(relay.timeout(), Some(relay.now + PAUSE));
        relay.after(PAUSE - MS);
        assert_eq!((relay.machine.gave_up(), relay.machine.poll_action()), (false, None));
        assert_eq!(relay.machine.status().publishing, 2);
        relay.after(MS);
        assert!(relay.machine.gave_up());
        let exchange = relay.exchange();
        assert_eq!((exchange.settle.len(), exchange.claim), (2, 0));
        assert_eq!(relay.machine.phase(), Phase::Stopping);
        if store_fails {
            relay.failed();
            assert!(relay.machine.status().error.is_some());
        } else {
            relay.settled();
        }
        let status = relay.machine.status();
        assert_eq!((status.phase, status.publishing), (Phase::Stopped, 2));
        assert_eq!((relay.machine.poll_action(), relay.timeout()), (None, None));
    }
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
            assert_eq!(action, Action::Exchange(claims(6)));
            relay.exchanged(vec![]);
        }
        assert_eq!(relay.machine.poll_action(), None);
        assert_eq!(relay.timeout(), Some(relay.now + MS));
        relay.after(MS);
        assert_eq!(relay.renews(), Renew::new([lease.clone()], LEASE));
    };
    for _ in 0..3 {
        half_is_over(&mut relay);
        let renewed = Renewed { leases: vec![(lease.clone(), relay.now + LEASE)], stale: vec![] };
        relay.machine.handle_renewed(Moment::steady(relay.now), &renewed);
    }
    // The renewal hangs.
    half_is_over(&mut relay);
    relay.after(LEASE / 2 - MS);
    let mut just_before = relay.machine.clone();
    just_before.handle_published(Moment::steady(relay.now), &tickets[0], Published::Confirmed);
    assert!(matches!(just_before.poll_action(), Some(Action::Publish(_))));
    relay.after(MS);
    relay.confirm(&tickets[0]);
    assert_eq!(relay.machine.poll_action(), None);
    // The store was asked when the lease was half over, so the new one is half over too.
    let renewed = Renewed { leases: vec![(lease.clone(), relay.now + LEASE / 2)], stale: vec![] };
    relay.machine.handle_renewed(Moment::steady(relay.now), &renewed);
    assert_eq!(relay.renews(), Renew::new([lease], LEASE));
    assert_eq!(relay.publish().len(), 1);
}

/// P4, P6: what is being published under a lease that is lost is waited for before anything else of
/// its lane is published, even under the lane's next lease; its answer settles nothing.
#[test]
fn a_lost_lease_holds_its_lane_until_the_publish_has_ended() {
    let (mut relay, tickets) = Played::holding(&[("a", 2), ("b", 1)]);
    relay.after(LEASE / 2);
    let both = tickets.iter().map(|ticket| ticket.lease.clone());
    assert_eq!(relay.renews(), Renew::new(both, LEASE));
    let lost = StaleLease { lease: tickets[0].lease.clone(), why: Stale::Ended };
    let kept = (tickets[1].lease.clone(), relay.now + LEASE);
    let renewed = Renewed { leases: vec![kept], stale: vec![lost] };
    // What was lost is told, so that its publish can be broken off.
    relay.machine.handle_renewed(Moment::steady(relay.now), &renewed);
    let lost = Action::BreakOff(vec![tickets[0].lease.clone()]);
    assert_eq!(relay.machine.poll_action(), Some(lost));
    assert_eq!(relay.machine.counters().stale, 1);
    assert_eq!(relay.exchange(), claims(7));
    // The lane is claimed again, and another one.
    let next = relay.claimed(&[("a", 2), ("c", 1)]);
    assert_eq!(
        next.iter().map(|ticket| ticket.lease.lane.ordering_key.as_str()).collect::<Vec<_>>(),
        ["c"]
    );
    // An answer for another lease of that lane, or for another event under it, is not what is
    // waited for.
    let other_event = Ticket { message: tickets[1].message.clone(), ..tickets[0].clone() };
    let other_token =
        Ticket { lease: LeaseRef { token: 99, ..tickets[0].lease.clone() }, ..tickets[0].clone() };
    for other in [other_event, other_token] {
        relay.confirm(&other);
        assert_eq!(relay.machine.poll_action(), None);
    }
    relay.confirm(&tickets[0]);
    let next = relay.publish();
    assert_eq!(
        next.iter().map(|ticket| ticket.lease.lane.ordering_key.as_str()).collect::<Vec<_>>(),
        ["a"]
    );
    assert_eq!(relay.machine.counters().confirmed, 0);
}

/// F4: what is tried alone is published while nothing else is, and nothing is claimed before it has
/// ended.
#[test]
fn what_is_tried_alone_is_alone() {
    let (mut relay, tickets) = Played::holding(&[("b", 2), ("c", 1)]);
    relay.machine.handle_wakeup(Moment::steady(relay.now));
    assert_eq!(relay.exchange().claim, 5);
    let alone = relay.lease("a", 1, true);
    assert!(alone.alone);
    relay.exchanged(vec![alone]);
    relay.machine.handle_wakeup(Moment::steady(relay.now));
    for ticket in &tickets {
        assert_eq!(relay.machine.poll_action(), None);
        relay.confirm(ticket);
    }
    // What has ended is settled meanwhile, and what is left waits.
    let tried = relay.publish();
    assert_eq!(
        tried.iter().map(|ticket| ticket.lease.lane.ordering_key.as_str()).collect::<Vec<_>>(),
        ["a"]
    );
    let exchange = relay.exchange();
    assert_eq!((exchange.settle.len(), exchange.claim), (1, 0));
    relay.settled();
    assert_eq!(relay.machine.poll_action(), None);
    assert_eq!(relay.timeout(), Some(relay.now + LEASE / 2), "only to renew");
    relay.confirm(&tried[0]);
    assert_eq!(
        relay
            .publish()
            .iter()
            .map(|ticket| ticket.lease.lane.ordering_key.as_str())
            .collect::<Vec<_>>(),
        ["b"]
    );
    assert_eq!(relay.exchange().claim, 6);
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
    relay.stop();
    assert_eq!(states(&relay), (false, false, Phase::Stopping));
    let exchange = relay.exchange();
    assert_eq!((exchange.settle.len(), exchange.claim), (1, 0));
    relay.settled();
    assert_eq!(states(&relay), (false, false, Phase::Stopping), "a publish is under way");
    relay.confirm(&tickets[0]);
    assert_eq!(states(&relay), (false, false, Phase::Stopping), "it is not settled");
    let exchange = relay.exchange();
    assert_eq!(exchange.settle[0].confirmed(), 1);
    assert_eq!(states(&relay), (false, false, Phase::Stopping), "its settlement is under way");
    relay.settled();
    assert_eq!(states(&relay), (true, true, Phase::Stopped));
    // One that is idle and was not asked to stop has not stopped; one that has nothing has at once.
    let mut relay = Played::new();
    assert_eq!(states(&relay), (true, false, Phase::Running));
    let _ = relay.exchange();
    assert_eq!(states(&relay), (false, false, Phase::Running), "a claim is under way");
    let mut relay = Played::new();
    relay.stop();
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
        let machine = RelayMachine::new(endless, Moment::steady(START)).unwrap();
        let mut relay = Played { machine, ..Played::new() };
        let _ = relay.exchange();
        let leased = relay.lease("a", 1, false);
        assert_eq!(leased.until, START + lease);
        relay.exchanged(vec![leased]);
        assert_eq!(relay.publish().len(), 1, "{lease:?}");
        assert_eq!(relay.machine.poll_action(), None);
        assert!(relay.timeout().is_some_and(|at| at > START));
    }
}

/// F25: what comes late counts, as long as the machine has not heard that it is overdue: all of a
/// call, and of all calls that are told together.
#[test]
fn f25_all_that_comes_late_together_counts() {
    let (mut relay, tickets) = Played::holding(&[("a", 1), ("b", 1), ("c", 1)]);
    relay.now = relay.now + TIMEOUT;
    tickets.iter().take(2).for_each(|ticket| relay.confirm(ticket));
    relay.after(Duration::ZERO);
    assert_eq!((relay.machine.counters().overdue, relay.machine.status().publishing), (1, 1));
    relay.confirm(&tickets[2]);
    assert_eq!(relay.machine.status().publishing, 0);
    let settled: Vec<usize> = match relay.machine.poll_action() {
        Some(Action::GiveUp(leases)) if leases == [tickets[2].lease.clone()] => {
            relay.exchange().settle.iter().map(Settlement::confirmed).collect()
        }
        other => panic!("nothing is overdue: {other:?}"),
    };
    assert_eq!(settled, [1, 1, 0]);
}

/// What the time of day is after so many steps.
type Clock = fn(u64) -> u64;

/// Times of day that a clock may show while 10 ms pass each, and what it is about.
const CLOCKS: [(&str, Clock); 7] = [
    ("steady", |n| 1_000_000 + 10 * n),
    ("in turn", |n| if n.is_multiple_of(2) { 1_000_000 } else { 999_000 }),
    ("a year ahead for 60 ms", |n| if (50..56).contains(&n) { 31_536_000_000 } else { 1_000_000 }),
    ("back by an hour", |n| if n < 50 { 9_000_000 + 10 * n } else { 5_400_000 + 10 * n }),
    ("ahead by an hour", |n| if n < 50 { 1_000_000 + 10 * n } else { 4_600_000 + 10 * n }),
    ("at its end", |_| u64::MAX),
    ("at its beginning", |_| 0),
];

/// F37: whatever the time of day does, it is what stamps are made by, as it is told, and no interval
/// is longer or shorter for it: polls, renewals and the time a publish may take.
#[test]
fn f37_intervals_go_by_uptime_and_stamps_by_the_time_of_day() {
    let lease = Duration::from_millis(200);
    let timeout = Duration::from_millis(700);
    for (what, clock) in CLOCKS {
        let at = |n: u64| Moment {
            wall: Millis::new(clock(n)),
            uptime: Duration::from_secs(5) + Duration::from_millis(10 * n),
        };
        let own = RelaySettings { lease, publish_timeout: timeout, ..settings() };
        let mut machine = RelayMachine::new(own, at(0)).unwrap();
        let mut played = Played::new();
        assert!(matches!(machine.poll_action(), Some(Action::Exchange(_))), "{what}");
        let mut leased = played.lease("a", 1, false);
        leased.until = at(0).wall + lease;
        let mut until = leased.until;
        let claimed = Claimed { leased: vec![leased], ..Claimed::default() };
        machine.handle_exchanged(at(0), (None, Some(claimed)));
        let Some(Action::Publish(tickets)) = machine.poll_action() else { panic!("{what}") };
        let (mut renewed_at, mut given_up_at) = (vec![0], None);
        for n in 1..=100 {
            machine.handle_timeout(at(n));
            assert_eq!(machine.now(), at(n).wall, "{what}: the time of day, as it is told");
            while let Some(action) = machine.poll_action() {
                match action {
                    Action::Renew(_) => {
                        renewed_at.push(n);
                        until = until.max(machine.now() + lease);
                        let leases = vec![(tickets[0].lease.clone(), until)];
                        machine.handle_renewed(at(n), &Renewed { leases, stale: vec![] });
                    }
                    Action::GiveUp(_) => given_up_at = Some(n),
                    Action::Exchange(_) => {
                        let claimed = Claimed::default();
                        machine.handle_exchanged(at(n), (None, Some(claimed)));
                    }
                    other @ (Action::Publish(_) | Action::BreakOff(_)) => {
                        panic!("{what}: {other:?}")
                    }
                }
            }
            // What is next comes when it would with a clock that is steady.
            let next = machine.poll_timeout().unwrap();
            assert!(next > at(n).uptime && next <= at(n).uptime + POLL, "{what}: {next:?}");
        }
        assert_eq!(given_up_at, Some(70), "{what}: a publish has its time, no more and no less");
        let renewals: Vec<u64> = renewed_at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(renewals.len() >= 6, "{what}: {renewed_at:?}");
        // Renewed when half of it is over, and at once where the clock is set ahead: others go by it.
        assert!(renewals.iter().all(|after| *after <= 10), "{what}: {renewed_at:?}");
        assert!(renewals.len() <= 8, "{what}: a clock makes no endless renewals: {renewed_at:?}");
        assert_eq!(machine.counters().short, 0, "{what}: no lease was too short");
    }
}

/// F37: the clock is set ahead by more than a lease: the relay's own leases are renewed before
/// anything is published under them or claimed, since others may take what is over by the clock.
#[test]
fn f37_a_clock_set_ahead_has_leases_renewed_at_once() {
    let (mut relay, tickets) = Played::holding(&[("a", 2)]);
    let begun = Moment::steady(relay.now);
    let set = Moment { wall: relay.now + LEASE * 2, ..begun };
    relay.machine.handle_published(set, &tickets[0], Published::Confirmed);
    let lease = tickets[0].lease.clone();
    assert_eq!(relay.renews(), Renew::new([lease.clone()], LEASE));
    assert_eq!(relay.machine.poll_action(), None, "others may have taken the lane");
    let leases = vec![(lease, set.wall + LEASE)];
    relay.machine.handle_renewed(set, &Renewed { leases, stale: vec![] });
    assert_eq!(relay.publish().len(), 1);
    // And set back: nothing is to be done before half of the lease has passed.
    relay.machine.handle_timeout(begun);
    relay.machine.handle_timeout(begun + (LEASE / 2 - MS));
    let _poll = relay.machine.poll_action();
    relay.exchanged(vec![]);
    assert_eq!(relay.machine.poll_action(), None);
}

/// F37: an uptime that steps back, which it must not, is one at which no time has passed.
#[test]
fn f37_an_uptime_that_steps_back_is_none() {
    let mut machine = RelayMachine::new(settings(), Moment::steady(START)).unwrap();
    let _ = machine.poll_action();
    machine.handle_exchanged(Moment::steady(START), (None, Some(Claimed::default())));
    let next = machine.poll_timeout();
    machine.handle_timeout(Moment { uptime: Duration::ZERO, ..Moment::steady(START) });
    assert_eq!((machine.poll_timeout(), machine.rest_for()), (next, Some(POLL)));
    assert_eq!(machine.poll_action(), None);
}

/// F30, F33: where a lease had run out when the store answered, or when what was published under it
/// was to be settled, the next ones are twice as long as that took, and no longer than the policy's
/// longest backoff.
#[test]
fn f30_a_relay_makes_longer_what_was_too_short() {
    let longest = settings().policy.backoff_cap;
    for (took, lasts) in [(LEASE, LEASE * 2), (LEASE * 3, LEASE * 6), (LEASE * 9, longest)] {
        // The store is slow.
        let mut relay = Played::new();
        let _ = relay.exchange();
        let mut leased = relay.lease("a", 1, false);
        leased.until = relay.now + LEASE;
        relay.after(took);
        relay.exchanged(vec![leased]);
        let status = relay.machine.status();
        assert_eq!((status.counters.short, status.lease), (1, lasts), "{took:?}");
        let Some(Action::Renew(renew)) = relay.machine.poll_action() else { panic!("{took:?}") };
        let until = renew.assume(relay.now).unwrap().outcome.leases[0].1;
        assert_eq!(until, relay.now + lasts);
        // The publisher is slow, and keeps the thread: nothing is renewed meanwhile.
        let (mut relay, tickets) = Played::holding(&[("a", 1)]);
        relay.now = relay.now + took;
        relay.confirm(&tickets[0]);
        assert_eq!(relay.exchange().settle.len(), 1);
        let stale = StaleLease { lease: tickets[0].lease.clone(), why: Stale::Ended };
        let settled = Settled { stale: vec![stale], ..Settled::default() };
        relay.machine.handle_exchanged(Moment::steady(relay.now), (Some(settled), None));
        let status = relay.machine.status();
        assert_eq!((status.counters.short, status.lease), (1, lasts), "{took:?}");
        assert_eq!(relay.exchange().claim_lease, lasts);
    }
    // A lease that was lost before its time says nothing of how long it should be.
    let (mut relay, tickets) = Played::holding(&[("a", 1)]);
    relay.confirm(&tickets[0]);
    let _ = relay.exchange();
    let stale = StaleLease { lease: tickets[0].lease.clone(), why: Stale::Ended };
    let settled = Settled { stale: vec![stale], ..Settled::default() };
    relay.machine.handle_exchanged(Moment::steady(relay.now), (Some(settled), None));
    let status = relay.machine.status();
    assert_eq!((status.counters.stale, status.counters.short, status.lease), (1, 0, LEASE));
}

/// F48, F27: the status says why the broker cannot be reached until it has confirmed something; one
/// event that is unavailable while others are confirmed makes no pause, and the next one does.
#[test]
fn f48_the_status_says_why_the_broker_is_away() {
    let (mut relay, tickets) = Played::holding(&[("a", 1), ("b", 1), ("c", 1), ("d", 1)]);
    assert_eq!(relay.machine.status().broker_error, None);
    relay.confirm(&tickets[0]);
    relay.unavailable(&tickets[1]);
    assert_eq!(relay.machine.phase(), Phase::Running, "others are confirmed");
    assert_eq!(relay.machine.status().broker_error, Some(Reason::new("away")));
    relay.confirm(&tickets[2]);
    assert_eq!(relay.machine.status().broker_error, None);
    let settled = relay.exchange().settle;
    let endings: Vec<Option<&Ending>> =
        settled.iter().map(|it| it.ended().map(|(_, ending)| ending)).collect();
    assert_eq!(endings, [None, Some(&Ending::Deferred(Reason::new("away"))), None]);
    relay.settled();
    // Twice in a row is the broker, and not the event.
    let (mut relay, tickets) = Played::holding(&[("a", 1), ("b", 1), ("c", 1)]);
    relay.confirm(&tickets[0]);
    relay.unavailable(&tickets[1]);
    relay.unavailable(&tickets[2]);
    assert_eq!(relay.machine.phase(), Phase::Paused);
    let status = relay.machine.status();
    assert_eq!((status.broker_error, status.counters.unavailable), (Some(Reason::new("away")), 2));
}
