//! The truth tables of delivery: what a claim leases, what a settlement and a renewal write, and
//! exactly under which guards (P3, P4, P6).

use core::time::Duration;

use twobox::flow::ExchangeFlow;
use twobox::store::{NoCall, drive};
use twobox::{
    Change, Checked, Claim, Claimed, Decision, Delivery, DeliveryPolicy, DeliveryState,
    Destination, Destinations, Due, Ending, Event, EventId, Headers, Key, Lane, LaneEdit, LaneRow,
    LeaseRef, Leased, Millis, OutboxRow, Query, Reason, Renew, Revision, Rows, Settle, Settled,
    Settlement, Stale, StaleLease, Stored, Transition, WhenDead,
};

use crate::support::{
    LANE, NOW, insert, lane, lane_key, lease, ms, name, outbox, pending, store_of, stored, text,
    update,
};

fn policy(when_dead: WhenDead) -> Checked<DeliveryPolicy> {
    DeliveryPolicy { max_failures: 2, max_starts: 4, when_dead, ..DeliveryPolicy::default() }
        .checked()
        .unwrap()
}

const LEASE: Duration = Duration::from_millis(500);
const UNTIL: u64 = 1_500;
/// The token after that of a lane that is due.
const TOKEN: u64 = 1_007;

fn claim(policy: &Checked<DeliveryPolicy>, limit: usize) -> Claim<'_> {
    Claim::new(policy, name("me"), LEASE, limit).unwrap()
}

/// A lane that is due, and where nothing before its third event is pending.
fn lane_due(due: u64) -> LaneRow {
    LaneRow { next: 9, head: 3, confirmed: 2, due: Some(ms(due)), token: 1_006, ..LANE }
}

/// The same lane after a claim.
fn leased_lane(through: u64) -> LaneRow {
    LaneRow {
        due: Some(ms(UNTIL)),
        lease: Some(lease("me", UNTIL, through)),
        token: TOKEN,
        starts: 1,
        ..lane_due(0)
    }
}

fn event(id: &str, key: &str, body: &str) -> Event {
    Event {
        destination: Destination::default(),
        id: name(id),
        order: name("o"),
        event_type: name("order.created"),
        schema_version: 1,
        ordering_key: name(key),
        time: ms(100),
        headers: Headers::new(),
        body: text(body),
    }
}

/// A lane in an answer, at revision 5.
fn lane_of(key: &str, row: LaneRow, pending: Vec<Delivery>) -> Lane {
    Lane { key: lane_key(key), row, revision: Revision::from_stored(5), pending }
}

/// A pending event that nothing has happened to.
fn untouched(id: &str, key: &str, sequence: u64) -> Delivery {
    let event = Some(event(id, key, "12345"));
    Delivery { id: name(id), row: pending(key, sequence), revision: None, event }
}

/// A pending event with a row in the outbox, at revision 6.
fn touched(id: &str, row: OutboxRow) -> Delivery {
    let event = Some(event(id, row.lane.ordering_key.as_str(), "12345"));
    Delivery { id: name(id), row, revision: Some(Revision::from_stored(6)), event }
}

fn answer(lanes: Vec<Lane>) -> Rows {
    Rows { lanes, ..Rows::default() }
}

fn decided(claim: &Claim<'_>, lanes: Vec<Lane>) -> Decision<Claimed> {
    claim.decide(NOW, &answer(lanes)).unwrap()
}

/// A lease as a test sees it: its lane and token, whether it is alone, and of each event the id,
/// the sequence, the one before it, and the attempt.
type Seen<'a> = (&'a str, u64, bool, Vec<(&'a str, u64, u64, u32)>);

fn seen(claimed: &Claimed) -> Vec<Seen<'_>> {
    let one = |leased: &'_ Leased| {
        assert!(leased.until >= ms(UNTIL), "longer after a start without an answer");
        assert!(!leased.events.is_empty());
    };
    claimed.leased.iter().for_each(one);
    claimed
        .leased
        .iter()
        .map(|leased| {
            let events = leased.events.iter().map(|next| {
                let message = &next.message;
                let place = message.place;
                assert_eq!(place.begun, LANE.begun);
                (message.event.id.as_str(), place.sequence, place.after, message.attempt)
            });
            (
                leased.lease.lane.ordering_key.as_str(),
                leased.lease.token,
                leased.alone,
                events.collect(),
            )
        })
        .collect()
}

fn changes(decision: &Decision<Claimed>) -> &[Change] {
    assert!(decision.batch.may_be_lost(), "a claim may be lost");
    decision.batch.changes()
}

#[test]
fn claim_asks_for_what_it_may_take() {
    let block = policy(WhenDead::Block);
    let all = usize::MAX;
    for (claim, lanes, run, events, bytes, floor) in [
        (claim(&block, 1), 1, 1, 1, all, 0),
        (claim(&block, 4096), 4096, 16, 4096, all, 0),
        (claim(&block, 5), 5, 5, 5, all, 0),
        (claim(&block, 100).run(0), 100, 1, 100, all, 0),
        (claim(&block, 100).run(all), 100, 100, 100, all, 0),
        (claim(&block, 9).bytes(77), 9, 9, 9, 77, 0),
        // One event is claimed in any case.
        (claim(&block, 9).bytes(0), 9, 9, 9, 1, 0),
        (claim(&block, 9).floor(ms(5)), 9, 9, 9, all, 5),
    ] {
        let due = Due {
            destinations: Destinations::ALL,
            now: NOW,
            floor: ms(floor),
            lanes,
            run,
            events,
            bytes,
        };
        assert_eq!(claim.query(NOW), Query::Due(due));
        assert!(claim.assume(NOW).is_none(), "which lanes are due cannot be assumed");
    }
}

/// The first row: a lane that is due, with its events that are due (P4, P6).
#[test]
fn claim_of_a_lane_that_is_due() {
    let block = policy(WhenDead::Block);
    let rows = || {
        vec![lane_of(
            "a",
            LaneRow { head: 2, ..lane_due(100) },
            vec![
                touched("e3", OutboxRow { starts: 1, due: NOW, ..pending("a", 3) }),
                touched("e4", OutboxRow { starts: 2, due: NOW, ..pending("a", 4) }),
                // A place was left by an event that was cancelled; what is due later ends what is
                // claimed, whatever is behind it.
                touched("e6", OutboxRow { due: ms(1_001), ..pending("a", 6) }),
                untouched("e7", "a", 7),
            ],
        )]
    };
    for (most, through, got) in [
        (16, 4, vec![("e3", 3, 2, 2), ("e4", 4, 3, 3)]),
        (2, 4, vec![("e3", 3, 2, 2), ("e4", 4, 3, 3)]),
        (1, 3, vec![("e3", 3, 2, 2)]),
        (0, 3, vec![("e3", 3, 2, 2)]),
    ] {
        let decision = decided(&claim(&block, 10).run(most), rows());
        // The lane's head moves to the first event that is pending.
        assert_eq!(changes(&decision), [update(5, lane("a", leased_lane(through)))]);
        assert_eq!(seen(&decision.outcome), [("a", TOKEN, false, got)]);
        assert_eq!((&decision.outcome.dead, decision.outcome.next_due), (&vec![], None));
    }
    // A lease that would end after the end of time ends there.
    let endless = DeliveryPolicy { backoff_cap: Duration::MAX, ..DeliveryPolicy::default() };
    let endless = endless.checked().unwrap();
    let forever = Claim::new(&endless, name("me"), Duration::MAX, 10).unwrap();
    assert_eq!(decided(&forever, rows()).outcome.leased[0].until, Millis::MAX);
}

/// The second and third row: after a lease that nobody settled, the first event only, to find out
/// which one it is (F4); after two of them, or with one start left, nothing else is claimed with
/// it, whether it stands before the others or behind them.
#[test]
fn claim_after_a_lease_that_nobody_settled() {
    let block = policy(WhenDead::Block);
    for (settled, unsettled, alone) in
        [(0, 1, false), (1, 1, false), (2, 1, true), (0, 2, true), (1, 2, true), (0, 3, true)]
    {
        let started = || {
            let lapsed = Some(lease("other", 1_000, 4));
            let row = LaneRow { lease: lapsed, starts: unsettled, ..lane_due(1_000) };
            let first = touched("e3", OutboxRow { starts: settled, ..pending("a", 3) });
            lane_of("a", row, vec![first, untouched("e4", "a", 4)])
        };
        let plain = || lane_of("b", lane_due(1_000), vec![untouched("f3", "b", 3)]);
        let tried = ("a", TOKEN, alone, vec![("e3", 3, 2, settled + unsettled + 1)]);
        let beside = ("b", TOKEN, false, vec![("f3", 3, 2, 1)]);
        // Twice as long for each start without an answer, or as long as any lease for the last one.
        let last = settled + unsettled + 1 >= block.max_starts;
        let until = NOW + if last { block.backoff_cap } else { LEASE * 2_u32.pow(unsettled) };
        let after = || {
            let lease = leased_lane(3).lease.map(|lease| twobox::Lease { until, ..lease });
            let row = LaneRow { starts: unsettled + 1, due: Some(until), lease, ..leased_lane(3) };
            update(5, lane("a", row))
        };
        let plain_after = || update(5, lane("b", leased_lane(3)));

        let first = decided(&claim(&block, 10), vec![started(), plain()]);
        let behind = decided(&claim(&block, 10), vec![plain(), started()]);
        let next = (first.outcome.next_due, behind.outcome.next_due);
        if alone {
            assert_eq!(seen(&first.outcome), [tried], "{settled} {unsettled}");
            assert_eq!(changes(&first), [after()]);
            assert_eq!(seen(&behind.outcome), [beside], "{settled} {unsettled}");
            assert_eq!(changes(&behind), [plain_after()]);
            assert_eq!(next, (Some(NOW), Some(NOW)));
        } else {
            assert_eq!(seen(&first.outcome), [tried.clone(), beside.clone()]);
            assert_eq!(seen(&behind.outcome), [beside, tried]);
            assert_eq!(changes(&first), [after(), plain_after()]);
            assert_eq!(changes(&behind), [after(), plain_after()]);
            assert_eq!(next, (None, None));
        }
    }
}

/// The last start was answered, and by the limit there is none left: it is tried once more (F44).
#[test]
fn claim_of_an_event_that_was_answered_last() {
    for starts in [4, 9] {
        let head = OutboxRow { starts, failures: 1, ..pending("a", 3) };
        let lanes = vec![lane_of("a", lane_due(900), vec![touched("e3", head)])];
        let Claimed { leased, dead, .. } =
            decided(&claim(&policy(WhenDead::Block), 10), lanes).outcome;
        assert_eq!((leased.len(), dead), (1, vec![]), "after {starts} starts");
    }
}

/// The fourth row: no start left (F4), and what the policy says of the lane then (P4).
#[test]
fn claim_of_an_event_without_a_start_left() {
    for (starts, lane_starts) in [(3, 1), (0, 4), (1, 3), (2, 3)] {
        for (when_dead, next, due) in [
            (WhenDead::Block, Some(ms(700)), None),
            (WhenDead::Block, None, None),
            (WhenDead::Continue, Some(ms(700)), Some(ms(700))),
            (WhenDead::Continue, Some(ms(7_000)), Some(ms(7_000))),
            // What comes next was not in the answer: the lane is looked at again.
            (WhenDead::Continue, None, Some(NOW)),
        ] {
            let policy = policy(when_dead);
            let lapsed = Some(lease("other", 900, 3));
            let before = LaneRow { lease: lapsed, starts: lane_starts, ..lane_due(900) };
            let reason = Some(Reason::new("first"));
            let head = OutboxRow { starts, failures: 1, reason, ..pending("a", 3) };
            let mut waiting = vec![touched("e3", head.clone())];
            let row = |due| OutboxRow { due, ..pending("a", 4) };
            waiting.extend(next.map(|due| touched("e4", row(due))));

            let reason = format!(
                "started {} times, the last {lane_starts} without an answer: it may bring the \
                 relay down",
                starts + lane_starts
            );
            let dead = OutboxRow {
                starts: starts + lane_starts,
                state: DeliveryState::Dead(NOW),
                reason: Some(Reason::new(reason)),
                ..head
            };
            let blocked_by = (when_dead == WhenDead::Block).then(|| name("e3"));
            let after = LaneRow { due, blocked_by, head: 4, changed_at: NOW, ..lane_due(0) };
            let decision = decided(&claim(&policy, 10), vec![lane_of("a", before, waiting)]);
            assert_eq!(
                changes(&decision),
                [update(6, outbox("e3", dead)), update(5, lane("a", after))]
            );
            let Claimed { leased, dead, next_due } = decision.outcome;
            assert_eq!((leased, dead), (vec![], vec![(name("e3"), lane_key("a"))]));
            assert_eq!(next_due, Some(NOW));
        }
    }
}

/// The last row: nothing is due, or not yet.
#[test]
fn claim_of_nothing() {
    let block = policy(WhenDead::Block);
    assert_eq!(decided(&claim(&block, 10), vec![]).outcome, Claimed::default());
    // An event that is due later, or another's lease that lasts.
    let leased = LaneRow { lease: Some(lease("other", 1_001, 3)), starts: 1, ..lane_due(1_001) };
    for row in [lane_due(1_001), leased] {
        let decision = decided(&claim(&block, 10), vec![lane_of("a", row, vec![])]);
        assert!(decision.batch.is_empty());
        let later = Claimed { next_due: Some(ms(1_001)), ..Claimed::default() };
        assert_eq!(decision.outcome, later);
    }
}

/// One claim over several lanes: the limits hold, and the outcome says when to come again.
#[test]
fn claim_of_several_lanes() {
    let block = policy(WhenDead::Block);
    let two = |key: &str| {
        let ids = [3, 4].map(|n| untouched(&format!("{key}{n}"), key, n));
        lane_of(key, lane_due(100), ids.into())
    };
    let all = || vec![two("c"), two("a"), two("b")];
    let later = || vec![two("c"), two("a"), two("b"), lane_of("d", lane_due(2_000), vec![])];
    // In the order of the answer, which is that of the due times, and not of the names.
    for (claim, rows, counts, next_due) in [
        (claim(&block, 7), all(), vec![("c", 2), ("a", 2), ("b", 2)], None),
        (claim(&block, 7), later(), vec![("c", 2), ("a", 2), ("b", 2)], Some(ms(2_000))),
        (claim(&block, 6), all(), vec![("c", 2), ("a", 2), ("b", 2)], Some(NOW)),
        (claim(&block, 5), all(), vec![("c", 2), ("a", 2), ("b", 1)], Some(NOW)),
        (claim(&block, 2), all(), vec![("c", 2)], Some(NOW)),
        (claim(&block, 1), all(), vec![("c", 1)], Some(NOW)),
        // Six bodies of five bytes each reach the limit, so the answer may have been cut.
        (claim(&block, 9).bytes(30), all(), vec![("c", 2), ("a", 2), ("b", 2)], Some(NOW)),
        (claim(&block, 9).bytes(31), all(), vec![("c", 2), ("a", 2), ("b", 2)], None),
    ] {
        let decision = decided(&claim, rows);
        let found: Vec<_> = seen(&decision.outcome)
            .into_iter()
            .map(|(key, _, _, events)| (key.to_string(), events.len()))
            .collect();
        let wanted: Vec<_> = counts.iter().map(|(key, n)| (key.to_string(), *n)).collect();
        assert_eq!((found, decision.outcome.next_due), (wanted, next_due));
        let mut leased: Vec<_> = counts
            .iter()
            .map(|(key, n)| update(5, lane(key, leased_lane(2 + *n as u64))))
            .collect();
        leased.sort_by_key(Change::key);
        assert_eq!(changes(&decision), leased);
    }
}

/// An event that would be tried alone, and is given up or due later instead, keeps no other lane
/// waiting; a lane that gave nothing may be due again itself.
#[test]
fn claim_goes_on_after_a_lane_that_gave_nothing() {
    let block = policy(WhenDead::Block);
    for (starts, due, dead) in [(2, ms(100), 1), (0, ms(1_001), 0)] {
        let head = touched("e3", OutboxRow { starts, due, ..pending("a", 3) });
        let first = lane_of("a", LaneRow { starts: 2, ..lane_due(100) }, vec![head]);
        let second = lane_of("b", lane_due(200), vec![untouched("f3", "b", 3)]);
        let claimed = decided(&claim(&block, 10), vec![first, second]).outcome;
        assert_eq!(seen(&claimed), [("b", TOKEN, false, vec![("f3", 3, 2, 1)])]);
        assert_eq!((claimed.dead.len(), claimed.next_due), (dead, Some(NOW)));
    }
}

/// A lane that says it is due and has nothing due is put right, and the claim is to be made again:
/// behind it may be others.
#[test]
fn claim_puts_a_lane_right() {
    let block = policy(WhenDead::Block);
    for (first, head, due) in [(None, 9, None), (Some(ms(1_001)), 4, Some(ms(1_001)))] {
        let row = |due| OutboxRow { due, ..pending("a", 4) };
        let waiting = first.map(|due| touched("e4", row(due))).into_iter().collect();
        let decision = decided(&claim(&block, 10), vec![lane_of("a", lane_due(100), waiting)]);
        let after = LaneRow { due, head, changed_at: NOW, ..lane_due(0) };
        assert_eq!(changes(&decision), [update(5, lane("a", after))]);
        assert_eq!(decision.outcome, Claimed { next_due: Some(NOW), ..Claimed::default() });
    }
}

/// A store that answers without envelopes breaks its contract: a lane is leased as far as there is
/// something to publish, and not for nothing.
#[test]
fn claim_without_envelopes_leases_nothing() {
    let block = policy(WhenDead::Block);
    let bare = |id, key, sequence| Delivery { event: None, ..untouched(id, key, sequence) };
    let lanes = vec![
        lane_of("a", lane_due(100), vec![bare("e3", "a", 3), untouched("e4", "a", 4)]),
        lane_of("b", lane_due(100), vec![untouched("f3", "b", 3), bare("f4", "b", 4)]),
        lane_of("c", LaneRow { starts: 2, ..lane_due(100) }, vec![bare("g3", "c", 3)]),
    ];
    let decision = decided(&claim(&block, 10), lanes);
    assert_eq!(changes(&decision), [update(5, lane("b", leased_lane(3)))]);
    assert_eq!(seen(&decision.outcome), [("b", TOKEN, false, vec![("f3", 3, 2, 1)])]);
    assert_eq!((decision.outcome.dead, decision.outcome.next_due), (vec![], None));
}

/// P6: tokens grow with the time as well, so that one of a claim that a crash has undone does not
/// come again with the next one.
#[test]
fn a_token_does_not_come_again() {
    let block = policy(WhenDead::Block);
    for (before, now, token) in [(1_006, 1_000, 1_007), (0, 1_000, 1_000), (999, 1_000, 1_000)] {
        let row = LaneRow { token: before, ..lane_due(100) };
        let lanes = answer(vec![lane_of("a", row, vec![untouched("e3", "a", 3)])]);
        let claimed = claim(&block, 1).decide(ms(now), &lanes).unwrap().outcome;
        assert_eq!(claimed.leased[0].lease.token, token);
    }
}

/// P3: no store looks for fewer events than there can be.
#[test]
fn how_many_events_can_be_pending() {
    for (next, head, most) in
        [(1, 1, 0), (2, 1, 1), (5, 1, 4), (5, 3, 2), (5, 5, 0), (u64::MAX, 1, u64::MAX - 1)]
    {
        assert_eq!(LaneRow { next, head, ..LANE }.pending_at_most(), most, "{next} {head}");
    }
}

fn lease_ref(key: &str, token: u64) -> LeaseRef {
    LeaseRef { lane: lane_key(key), token }
}

/// A lease of events 3 to 5 of lane a, of which the first was started once and then once without
/// an answer. Event 6 is due later.
fn leased_with(first: OutboxRow, policy: &Checked<DeliveryPolicy>) -> Leased {
    let row = |due, sequence| OutboxRow { due: ms(due), ..pending("a", sequence) };
    let waiting = vec![
        touched("e3", first),
        touched("e4", row(104, 4)),
        touched("e5", row(105, 5)),
        touched("e6", row(7_000, 6)),
    ];
    let mut decision = decided(&claim(policy, 10), vec![lane_of("a", lane_due(100), waiting)]);
    decision.outcome.leased.remove(0)
}

fn leased(policy: &Checked<DeliveryPolicy>) -> Leased {
    leased_with(OutboxRow { starts: 1, ..pending("a", 3) }, policy)
}

/// The lane as the claim has left it.
fn lane_rows() -> Vec<Stored> {
    vec![stored(9, lane("a", leased_lane(5)))]
}

fn free(head: u64, confirmed: u64, starts: u32, due: u64, blocked_by: Option<&str>) -> Change {
    let blocked_by = blocked_by.map(name::<EventId>);
    let edit = LaneEdit::Free { head, confirmed, starts, due: ms(due), blocked_by };
    Change::Lane { key: lane_key("a"), token: TOKEN, edit, at: NOW }
}

fn settled(policy: &Checked<DeliveryPolicy>, given: Settlement) -> Decision<Settled> {
    let ended = given.ended().map(|(id, _)| id.clone());
    let settle = Settle::new(policy, [given]);
    let keys = [Key::Lane(lane_key("a"))].into_iter().chain(ended.clone().map(Key::Outbox));
    assert_eq!(settle.query(NOW), Query::rows(keys));
    // Of the events, only the first has a row in the outbox.
    let first = ended.filter(|id| id.as_str() == "e3");
    let outbox = first.map(|id| stored(6, outbox(id.as_str(), pending("a", 3))));
    let rows = outbox.into_iter().chain(lane_rows()).collect();
    let decision = settle.decide(NOW, &Rows::of(rows)).unwrap();
    // What is assumed without a look is the same, as long as the lease is current.
    assert_eq!(settle.assume(NOW), Some(decision.clone()));
    assert!(decision.batch.may_be_lost(), "a settlement may be lost");
    decision
}

/// Confirmed: one, several, all that are covered. Only the lane is written, under its token.
#[test]
fn settle_confirmed() {
    let block = policy(WhenDead::Block);
    for (count, head, due) in [(1, 4, 104), (2, 5, 105), (3, 6, NOW.get())] {
        let decision = settled(&block, leased(&block).settle(count, None));
        assert_eq!(decision.batch.changes(), [free(head, 2 + count as u64, 0, due, None)]);
        assert_eq!(decision.outcome, Settled { confirmed: count, ..Settled::default() });
    }
    // More than there are is all that there are.
    let all = leased(&block).settle(3, None);
    assert_eq!(leased(&block).settle(99, Some(Ending::Failed(Reason::new("no")))), all);
}

/// Not named: the lane is given back as it was, and the start is not counted (F12).
#[test]
fn settle_released() {
    let block = policy(WhenDead::Block);
    let decision = settled(&block, leased(&block).release());
    assert_eq!(decision.batch.changes(), [free(3, 2, 0, 100, None)]);
    assert_eq!(decision.outcome, Settled::default());
    // A start before this one that nobody settled stays counted.
    let lapsed = LaneRow { starts: 1, lease: Some(lease("x", 900, 3)), ..lane_due(100) };
    let waiting = vec![untouched("e3", "a", 3)];
    let lanes = vec![lane_of("a", lapsed, waiting)];
    let again = decided(&claim(&block, 10), lanes).outcome.leased.remove(0);
    let decision = settled(&block, again.release());
    assert_eq!(decision.batch.changes(), [free(3, 2, 1, 100, None)]);
}

/// Failed, rejected, unavailable, deferred: as the first event and behind one that was confirmed,
/// for both policies, with a row in the outbox and without.
#[test]
fn settle_ended() {
    let reason = Reason::new("no such host");
    for when_dead in [WhenDead::Block, WhenDead::Continue] {
        let policy = policy(when_dead);
        for failures in [0, 1] {
            let first = OutboxRow { starts: 1, failures, ..pending("a", 3) };
            let failed = OutboxRow {
                starts: 2,
                failures: failures + 1,
                reason: Some(reason.clone()),
                ..first.clone()
            };
            let retry_at = NOW + policy.backoff(&name("e3"), failures + 1);
            let retried = OutboxRow { due: retry_at, ..failed.clone() };
            let dead = OutboxRow { state: DeliveryState::Dead(NOW), ..failed };
            // An outage counts against no event: neither a failure nor the start (F15). Nor does
            // it when a consumer asks to have it later (F9).
            // It is due now: behind what waits already (F27).
            let unavailable = OutboxRow { reason: Some(reason.clone()), due: NOW, ..first.clone() };
            let again_at = NOW + policy.backoff(&name("e3"), 1);
            let deferred = OutboxRow { due: again_at, ..unavailable.clone() };
            let gave_up = match when_dead {
                WhenDead::Block => free(4, 2, 0, 104, Some("e3")),
                WhenDead::Continue => free(4, 2, 0, 104, None),
            };
            let is_dead =
                || Settled { dead: vec![(name("e3"), lane_key("a"))], ..Settled::default() };
            let is_released = || Settled { released: 1, ..Settled::default() };
            let is_retried = Settled { retried: 1, ..Settled::default() };
            let why = || reason.clone();
            let cases = [
                // The second failure is once too often.
                if failures == 0 {
                    (
                        Ending::Failed(why()),
                        retried,
                        free(3, 2, 0, retry_at.get(), None),
                        is_retried,
                    )
                } else {
                    (Ending::Failed(why()), dead.clone(), gave_up.clone(), is_dead())
                },
                (Ending::Rejected(why()), dead, gave_up, is_dead()),
                (
                    Ending::Unavailable(why()),
                    unavailable,
                    free(3, 2, 0, NOW.get(), None),
                    is_released(),
                ),
                (
                    Ending::Deferred(why()),
                    deferred,
                    free(3, 2, 0, again_at.get(), None),
                    is_released(),
                ),
            ];
            for (ending, row, freed, outcome) in cases {
                let given = leased_with(first.clone(), &policy).settle(0, Some(ending.clone()));
                let decision = settled(&policy, given);
                let expected = [update(6, outbox("e3", row)), freed];
                assert_eq!(decision.batch.changes(), expected, "{ending:?} {when_dead:?}");
                assert_eq!(decision.outcome, outcome);
            }
        }
    }
}

/// The same behind an event that was confirmed, which has no row in the outbox: it gets one.
#[test]
fn settle_ended_behind_a_confirmed_event() {
    let block = policy(WhenDead::Block);
    let ids = vec![untouched("e3", "a", 3), untouched("e4", "a", 4), untouched("e5", "a", 5)];
    let lanes = vec![lane_of("a", lane_due(100), ids)];
    let leased = decided(&claim(&block, 10), lanes).outcome.leased.remove(0);
    let reason = Reason::new("no");
    let decision = settled(&block, leased.settle(1, Some(Ending::Failed(reason.clone()))));
    let due = NOW + block.backoff(&name("e4"), 1);
    let (starts, failures, reason) = (1, 1, Some(reason));
    let row = OutboxRow { starts, failures, due, reason, ..pending("a", 4) };
    assert_eq!(
        decision.batch.changes(),
        [insert(outbox("e4", row)), free(4, 3, 0, due.get(), None)]
    );
    assert_eq!(decision.outcome, Settled { confirmed: 1, retried: 1, ..Settled::default() });
}

/// P6: what an edit makes of a lane, and under which token; events that others append meanwhile
/// are no conflict.
#[test]
fn a_lane_is_changed_under_its_token() {
    let free = |head, due, blocked_by: Option<&str>| LaneEdit::Free {
        head,
        confirmed: head - 1,
        starts: 1,
        due: ms(due),
        blocked_by: blocked_by.map(name),
    };
    let leased = LaneRow { starts: 2, ..leased_lane(5) };
    let freed = |head: u64, due: Option<u64>| LaneRow {
        head,
        confirmed: head - 1,
        starts: 1,
        due: due.map(ms),
        lease: None,
        changed_at: NOW,
        ..leased.clone()
    };
    let renewed = |until: u64| LaneRow {
        due: Some(ms(until)),
        lease: Some(lease("me", until, 5)),
        ..leased.clone()
    };
    for (edit, after) in [
        // Something is left behind it, or nothing is, or a dead event blocks it.
        (free(6, 700, None), freed(6, Some(700))),
        (free(9, 700, None), freed(9, None)),
        (free(6, 700, Some("e5")), LaneRow { blocked_by: Some(name("e5")), ..freed(6, None) }),
        // Longer, and never shorter than before.
        (LaneEdit::Renew { until: ms(2_000) }, renewed(2_000)),
        (LaneEdit::Renew { until: ms(1_000) }, renewed(UNTIL)),
    ] {
        assert_eq!(leased.edited(TOKEN, &edit, NOW), Some(after.clone()), "{edit:?}");
        // Appended to meanwhile: it is the same, but for what was appended.
        let longer = LaneRow { next: 12, ..leased.clone() };
        let found = longer.edited(TOKEN, &edit, NOW).unwrap();
        let due = if after.head == 9 { Some(ms(700)) } else { after.due };
        assert_eq!(found, LaneRow { next: 12, due, ..after }, "{edit:?}");
        for token in [0, TOKEN - 1, TOKEN + 1] {
            assert_eq!(leased.edited(token, &edit, NOW), None, "another lease");
        }
        let ended = LaneRow { lease: None, ..leased.clone() };
        assert_eq!(ended.edited(TOKEN, &edit, NOW), None, "no lease");
        // The store has lost the events that the lease covers.
        let shorter = LaneRow { next: 5, ..leased.clone() }.edited(TOKEN, &edit, NOW);
        assert_eq!(shorter.is_none(), matches!(edit, LaneEdit::Free { .. }), "{edit:?}");
    }
}

/// A lease that ran out and was not taken is current: to settle under it saves a delivery.
#[test]
fn settle_under_a_lease_that_ran_out() {
    let block = policy(WhenDead::Block);
    let settle = Settle::new(&block, [leased(&block).settle(1, None)]);
    let late = settle.decide(ms(UNTIL + 1), &Rows::of(lane_rows())).unwrap();
    assert_eq!((late.outcome.confirmed, late.outcome.stale), (1, vec![]));
}

/// Stale, for every reason there is: it changes nothing and says why (P6, F3, F5).
#[test]
fn settle_stale() {
    let block = policy(WhenDead::Block);
    let with = |row: LaneRow| vec![stored(9, lane("a", row))];
    let taken_over = |token| Stale::TakenOver { owner: name("me"), token };
    for (rows, why, message) in [
        (
            with(LaneRow { token: TOKEN + 1, ..leased_lane(5) }),
            taken_over(TOKEN + 1),
            "the lease 1007 of lane \"a\" is not current: me has taken the lane since, with token 1008",
        ),
        (
            with(LaneRow { token: TOKEN - 1, ..leased_lane(5) }),
            taken_over(TOKEN - 1),
            "the lease 1007 of lane \"a\" is not current: me has taken the lane since, with token 1006",
        ),
        (
            with(LaneRow { lease: None, ..leased_lane(5) }),
            Stale::Ended,
            "the lease 1007 of lane \"a\" is not current: it was settled or released already",
        ),
        (
            vec![],
            Stale::NoLane,
            "the lease 1007 of lane \"a\" is not current: there is no such lane",
        ),
    ] {
        let stale = StaleLease { lease: lease_ref("a", TOKEN), why };
        assert_eq!(stale.to_string(), message);
        for given in [leased(&block).settle(1, None), leased(&block).release()] {
            let decision = Settle::new(&block, [given]).decide(NOW, &Rows::of(rows.clone()));
            let Decision { batch, outcome } = decision.unwrap();
            assert_eq!(batch.changes(), []);
            assert_eq!(outcome, Settled { stale: vec![stale.clone()], ..Settled::default() });
        }
    }
}

/// The store has lost events that the lease covers, or what it had noted of one: the guards of what
/// would be written could never hold, so the lease is stale, and not tried again for ever.
#[test]
fn settle_what_the_store_has_lost() {
    let block = policy(WhenDead::Block);
    let failed = || leased(&block).settle(0, Some(Ending::Failed(Reason::new("no"))));
    let noted = |revision| stored(revision, outbox("e3", pending("a", 3)));
    let lane_of = |next| stored(9, lane("a", LaneRow { next, ..leased_lane(5) }));
    for (given, rows, lost) in [
        // It covers events 3 to 5.
        (leased(&block).settle(3, None), vec![lane_of(6)], false),
        (leased(&block).settle(3, None), vec![lane_of(5)], true),
        (leased(&block).settle(1, None), vec![lane_of(5)], true),
        (leased(&block).release(), vec![lane_of(3)], true),
        (failed(), vec![noted(6), lane_of(9)], false),
        (failed(), vec![noted(5), lane_of(9)], true),
        (failed(), vec![lane_of(9)], true),
    ] {
        let settle = Settle::new(&block, [given.clone()]);
        let Decision { batch, outcome } = settle.decide(NOW, &Rows::of(rows.clone())).unwrap();
        let stale = StaleLease { lease: lease_ref("a", TOKEN), why: Stale::Lost };
        assert_eq!(batch.is_empty(), lost, "{given:?} {rows:?}");
        assert_eq!(outcome.stale, if lost { vec![stale.clone()] } else { vec![] });
        let message =
            "the lease 1007 of lane \"a\" is not current: the store has lost what it covers";
        assert_eq!(stale.to_string(), message);

        // In a store, whether the lanes are looked at first or not.
        for assumes in [false, true] {
            let store = store_of(rows.iter().map(|row| row.record.clone()));
            let flow = ExchangeFlow::new(Some(settle.clone()), None, NOW, assumes);
            let before = store.state();
            let settled = drive(&store, flow, &mut NoCall).unwrap().0.unwrap();
            // A row that was just written is at revision 1.
            if lost || rows.len() > 1 {
                assert_eq!(settled, Settled { stale: vec![stale.clone()], ..Settled::default() });
                assert_eq!(store.state(), before);
            } else {
                assert_eq!(settled.confirmed, 3);
            }
        }
    }
}

/// A stale lease does not hold up the others; of two settlements for one lane the later is stale,
/// unless the first was; and then nothing is assumed.
#[test]
fn settle_several() {
    let block = policy(WhenDead::Block);
    let other = |key: &str| {
        let id = format!("{key}3");
        let lanes = vec![lane_of(key, lane_due(100), vec![untouched(&id, key, 3)])];
        decided(&claim(&block, 10), lanes).outcome.leased.remove(0).settle(1, None)
    };
    let a = || leased(&block).settle(1, None);
    let mut rows = lane_rows();
    rows.push(stored(6, lane("b", leased_lane(3))));
    let ended = |key: &str, why| StaleLease { lease: lease_ref(key, TOKEN), why };
    for (given, confirmed, stale, twice) in [
        (vec![other("b"), a()], 2, vec![], false),
        (vec![a(), a(), other("b")], 2, vec![ended("a", Stale::Ended)], true),
        (
            vec![other("z"), other("b"), other("aa"), a()],
            2,
            vec![ended("aa", Stale::NoLane), ended("z", Stale::NoLane)],
            false,
        ),
    ] {
        let settle = Settle::new(&block, given);
        let decision = settle.decide(NOW, &Rows::of(rows.clone())).unwrap();
        assert_eq!(decision.batch.changes().len(), 2);
        assert_eq!((decision.outcome.confirmed, decision.outcome.stale), (confirmed, stale));
        assert_eq!(settle.assume(NOW).is_none(), twice);
    }
}

/// P6, F3: renewed until later and never until earlier, or stale.
#[test]
fn renew() {
    let rows = lane_rows();
    let renew = |leases: &[LeaseRef], lasts: u64| {
        Renew::new(leases.iter().cloned(), Duration::from_millis(lasts))
    };
    let a = lease_ref("a", TOKEN);
    assert_eq!(
        renew(&[lease_ref("b", 1), a.clone(), a.clone()], 9).query(NOW),
        Query::rows([Key::Lane(lane_key("a")), Key::Lane(lane_key("b"))])
    );
    let end = Millis::MAX.get();
    for (lasts, until) in
        [(501, 1_501), (10_000, 11_000), (u64::MAX, end), (500, UNTIL), (1, UNTIL), (0, UNTIL)]
    {
        let edit = LaneEdit::Renew { until: ms(until) };
        let change = Change::Lane { key: lane_key("a"), token: TOKEN, edit, at: NOW };
        // Asked for twice it is renewed once.
        let twice = renew(&[a.clone(), a.clone()], lasts);
        let decision = twice.decide(NOW, &Rows::of(rows.clone())).unwrap();
        assert_eq!(decision.batch.changes(), [change]);
        assert_eq!(decision.outcome.leases, [(a.clone(), ms(until))]);
        // Without a look it lasts for as long at least.
        let assumed = twice.assume(NOW).unwrap();
        assert_eq!(assumed.outcome.leases, [(a.clone(), NOW + Duration::from_millis(lasts))]);
        assert!(decision.batch.may_be_lost() && assumed.batch.may_be_lost());
    }
    let free = vec![stored(5, lane("a", LaneRow { lease: None, ..leased_lane(5) }))];
    for (rows, lease, why) in [
        (rows.clone(), lease_ref("a", 7), Stale::TakenOver { owner: name("me"), token: TOKEN }),
        (free, a.clone(), Stale::Ended),
        (vec![], a.clone(), Stale::NoLane),
    ] {
        let decision = renew(std::slice::from_ref(&lease), 9).decide(NOW, &Rows::of(rows)).unwrap();
        assert!(decision.batch.is_empty());
        assert_eq!(decision.outcome.leases, []);
        assert_eq!(decision.outcome.stale, [StaleLease { lease, why }]);
    }
    // A stale one does not hold up the others.
    let both = renew(&[lease_ref("z", 1), a.clone()], 1_000).decide(NOW, &Rows::of(rows)).unwrap();
    assert_eq!((both.outcome.leases.len(), both.outcome.stale.len()), (1, 1));
    assert_eq!(both.batch.changes().len(), 1);
}

/// F30: a lease lasts twice as long after each start in a row that nobody answered, and as long as
/// any lease may when it is the last one.
#[test]
fn f30_a_lease_doubles_with_each_start_without_an_answer() {
    let policy = DeliveryPolicy {
        backoff_cap: Duration::from_secs(60),
        max_failures: 3,
        max_starts: 10,
        ..DeliveryPolicy::default()
    };
    let policy = policy.checked().unwrap();
    let lease = Duration::from_secs(2);
    let claim = Claim::new(&policy, name("relay"), lease, 9).unwrap();
    for (starts, seconds) in [(0, 2), (1, 4), (2, 8), (3, 16), (4, 32), (5, 60), (9, 60), (10, 0)] {
        let row = LaneRow { next: 9, due: Some(NOW), starts, ..LANE };
        let lane = Lane {
            key: lane_key("k"),
            row,
            revision: Revision::FIRST,
            pending: vec![untouched("e", "k", 1)],
        };
        let leased = decided(&claim, vec![lane]).outcome.leased;
        let until = leased.first().map(|leased| leased.until);
        let expected = (seconds > 0).then_some(NOW + Duration::from_secs(seconds));
        assert_eq!(until, expected, "after {starts}");
    }
}
