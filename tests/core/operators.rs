//! What an operator does, row by row of its truth tables: what comes of it, and exactly which
//! guarded changes are written (P3, P4).

use core::time::Duration;

use twobox::{
    Cancel, DeliveryState, Discard, LaneRow, NotDone, Operated, OutboxRow, Query, Reason, Redrive,
    Stored, Transition,
};

use crate::support::{
    LANE, NOW, decide, insert, lane, lease, ms, name, outbox, pending, stored, update, window,
    writes, writes_nothing,
};

const WINDOW: Duration = Duration::from_millis(1_000);

fn cancel(events: &[&str]) -> Cancel {
    Cancel::new(events.iter().map(|id| name(id)), Reason::new("why")).unwrap()
}

fn redrive(events: &[&str]) -> Redrive {
    Redrive::new(events.iter().map(|id| name(id)), window(WINDOW)).unwrap()
}

fn discard(events: &[&str]) -> Discard {
    Discard::new(events.iter().map(|id| name(id)), Reason::new("why")).unwrap()
}

fn done(events: &[&str]) -> Operated {
    Operated { done: events.iter().map(|id| name(id)).collect(), refused: vec![] }
}

fn refused(events: &[(&str, NotDone)]) -> Operated {
    Operated {
        done: vec![],
        refused: events.iter().map(|(id, why)| (name(id), why.clone())).collect(),
    }
}

fn waiting() -> LaneRow {
    LaneRow { next: 9, confirmed: 2, due: Some(ms(100)), token: 7, starts: 1, ..LANE }
}

fn dead(sequence: u64) -> OutboxRow {
    OutboxRow {
        state: DeliveryState::Dead(ms(500)),
        starts: 3,
        failures: 2,
        reason: Some(Reason::new("no")),
        ..pending("a", sequence)
    }
}

fn blocked() -> LaneRow {
    LaneRow { due: None, blocked_by: Some(name("e3")), ..waiting() }
}

/// The answer: these events, then their lane with what is pending in it.
fn answer(
    targets: &[(&str, OutboxRow)],
    row: LaneRow,
    behind: &[(&str, OutboxRow)],
) -> Vec<Stored> {
    let event = |revision, (id, row): &(&str, OutboxRow)| stored(revision, outbox(id, row.clone()));
    let targets_read = targets.iter().map(|target| event(4, target));
    let pending =
        targets.iter().filter(|(_, row)| row.state == DeliveryState::Pending).chain(behind);
    let mut pending: Vec<_> = pending.collect();
    pending.sort_by_key(|(_, row)| row.sequence);
    let lane = stored(5, lane("a", row));
    targets_read.chain([lane]).chain(pending.iter().map(|target| event(4, target))).collect()
}

#[test]
fn all_ask_for_one_event_more_than_they_name() {
    let query = Query::Deliveries { events: vec![name("e3"), name("e4")], run: 3 };
    assert_eq!(cancel(&["e4", "e3", "e4"]).query(NOW), query);
    assert_eq!(redrive(&["e3", "e4"]).query(NOW), query);
    assert_eq!(discard(&["e3", "e4"]).query(NOW), query);
}

#[test]
fn cancel_what_is_pending() {
    let cancelled = |row: OutboxRow| OutboxRow {
        state: DeliveryState::Cancelled(NOW),
        reason: Some(Reason::new("why")),
        ..row
    };
    let (third, fourth) = (pending("a", 3), OutboxRow { due: ms(7_000), ..pending("a", 4) });
    let after = |due: Option<u64>, starts| {
        update(5, lane("a", LaneRow { due: due.map(ms), starts, changed_at: NOW, ..waiting() }))
    };

    // The first of its lane: the starts that are counted there were its own.
    for (behind, due) in [(vec![("e4", fourth.clone())], Some(7_000)), (vec![], None)] {
        let rows = answer(&[("e3", third.clone())], waiting(), &behind);
        let changes = [update(4, outbox("e3", cancelled(third.clone()))), after(due, 0)];
        assert_eq!(decide(cancel(&["e3"]), &rows), writes(changes, done(&["e3"])));
    }
    // One behind it.
    let rows = answer(&[("e4", fourth.clone())], waiting(), &[("e3", third.clone())]);
    let changes = [update(4, outbox("e4", cancelled(fourth.clone()))), after(Some(100), 1)];
    assert_eq!(decide(cancel(&["e4"]), &rows), writes(changes, done(&["e4"])));
    // Both, and nothing is left.
    let rows = answer(&[("e3", third.clone()), ("e4", fourth.clone())], waiting(), &[]);
    let both = [
        update(4, outbox("e3", cancelled(third.clone()))),
        update(4, outbox("e4", cancelled(fourth))),
        after(None, 0),
    ];
    assert_eq!(decide(cancel(&["e3", "e4"]), &rows), writes(both, done(&["e3", "e4"])));
    // In a lane that is blocked, which stays so.
    let rows = answer(&[("e4", pending("a", 4))], blocked(), &[("e5", pending("a", 5))]);
    let changes = [
        update(4, outbox("e4", cancelled(pending("a", 4)))),
        update(5, lane("a", LaneRow { starts: 0, changed_at: NOW, ..blocked() })),
    ];
    assert_eq!(decide(cancel(&["e4"]), &rows), writes(changes, done(&["e4"])));
}

/// P4: what may be published already is not cancelled; what is behind it is, and the lane is
/// written, so that a claim meets the guard.
#[test]
fn cancel_in_a_lane_that_is_leased() {
    let leased =
        || LaneRow { lease: Some(lease("me", 1_500, 4)), due: Some(ms(1_500)), ..waiting() };
    for sequence in [3, 4] {
        let rows = answer(&[("e", pending("a", sequence))], leased(), &[]);
        assert_eq!(
            decide(cancel(&["e"]), &rows),
            writes_nothing(refused(&[("e", NotDone::Leased)]))
        );
    }
    let rows = answer(
        &[("e5", pending("a", 5))],
        leased(),
        &[("e3", pending("a", 3)), ("e4", pending("a", 4))],
    );
    let cancelled = OutboxRow {
        state: DeliveryState::Cancelled(NOW),
        reason: Some(Reason::new("why")),
        ..pending("a", 5)
    };
    let changes = [update(4, outbox("e5", cancelled)), update(5, lane("a", leased()))];
    assert_eq!(decide(cancel(&["e5"]), &rows), writes(changes, done(&["e5"])));
}

#[test]
fn what_cannot_be_done_changes_nothing() {
    let states = [
        DeliveryState::Pending,
        DeliveryState::Confirmed(ms(5)),
        DeliveryState::Dead(ms(5)),
        DeliveryState::Discarded(ms(5)),
        DeliveryState::Cancelled(ms(5)),
    ];
    for state in states {
        let rows = answer(&[("e3", OutboxRow { state, ..pending("a", 3) })], waiting(), &[]);
        let not = |wanted| writes_nothing(refused(&[("e3", NotDone::State { state, wanted })]));
        if state != DeliveryState::Pending {
            assert_eq!(decide(cancel(&["e3"]), &rows), not("pending"));
        }
        if !matches!(state, DeliveryState::Dead(_)) {
            assert_eq!(decide(redrive(&["e3"]), &rows), not("dead"));
            assert_eq!(decide(redrive(&["e3"]).force(), &rows), not("dead"));
            assert_eq!(decide(discard(&["e3"]), &rows), not("dead"));
        }
    }
    let nothing = refused(&[("e3", NotDone::NoEvent), ("e4", NotDone::NoEvent)]);
    assert_eq!(decide(cancel(&["e3", "e4"]), &[]), writes_nothing(nothing.clone()));
    assert_eq!(decide(redrive(&["e3", "e4"]), &[]), writes_nothing(nothing.clone()));
    assert_eq!(decide(discard(&["e3", "e4"]), &[]), writes_nothing(nothing));
}

/// What cannot be done to one does not hold up the others, nor write their lanes; all are answered
/// in the order of their ids.
#[test]
fn each_event_has_its_own_answer() {
    let rows = [
        stored(4, outbox("e1", pending("b", 1))),
        stored(4, outbox("e3", pending("a", 3))),
        stored(4, outbox("e4", dead(4))),
        stored(5, lane("a", waiting())),
        stored(4, outbox("e3", pending("a", 3))),
        stored(6, lane("b", LaneRow { lease: Some(lease("me", 1_500, 1)), ..waiting() })),
        stored(4, outbox("e1", pending("b", 1))),
    ];
    let cancelled = OutboxRow {
        state: DeliveryState::Cancelled(NOW),
        reason: Some(Reason::new("why")),
        ..pending("a", 3)
    };
    let state = NotDone::State { state: DeliveryState::Dead(ms(500)), wanted: "pending" };
    let outcome = Operated {
        done: vec![name("e3")],
        refused: vec![
            (name("e0"), NotDone::NoEvent),
            (name("e1"), NotDone::Leased),
            (name("e4"), state),
        ],
    };
    let after = LaneRow { due: None, starts: 0, changed_at: NOW, ..waiting() };
    let changes = [update(4, outbox("e3", cancelled)), update(5, lane("a", after))];
    assert_eq!(decide(cancel(&["e0", "e1", "e3", "e4"]), &rows), writes(changes, outcome));
}

/// P4: an event for which its lane waits keeps its place, and any other goes to the end of its
/// lane.
#[test]
fn redrive_what_is_dead() {
    let again = |sequence| OutboxRow {
        due: NOW,
        reason: Some(Reason::new("no")),
        ..pending("a", sequence)
    };
    let behind = [("e5", OutboxRow { due: ms(200), ..pending("a", 5) })];
    let changed = LaneRow { changed_at: NOW, ..waiting() };
    let other = || LaneRow { blocked_by: Some(name("e2")), ..blocked() };
    for (before, behind, sequence, after) in [
        (blocked(), &behind[..], 3, LaneRow { due: Some(NOW), starts: 0, ..changed.clone() }),
        (blocked(), &[], 3, LaneRow { due: Some(NOW), starts: 0, ..changed.clone() }),
        // The lane has gone on: its first event stays the first, with the starts that are counted
        // for it.
        (
            LaneRow { due: Some(ms(200)), ..waiting() },
            &behind,
            9,
            LaneRow { next: 10, due: Some(ms(200)), ..changed.clone() },
        ),
        (
            LaneRow { due: None, ..waiting() },
            &[],
            9,
            LaneRow { next: 10, due: Some(NOW), starts: 0, ..changed.clone() },
        ),
        // It waits for another one.
        (other(), &behind, 9, LaneRow { next: 10, changed_at: NOW, ..other() }),
    ] {
        let rows = answer(&[("e3", dead(3))], before.clone(), behind);
        let changes = [update(4, outbox("e3", again(sequence))), update(5, lane("a", after))];
        assert_eq!(decide(redrive(&["e3"]), &rows), writes(changes, done(&["e3"])), "{before:?}");
    }
    // Its lane was purged: it begins anew.
    let new =
        LaneRow { next: 2, due: Some(NOW), token: NOW.get(), begun: NOW, changed_at: NOW, ..LANE };
    let changes = [update(4, outbox("e3", again(1))), insert(lane("a", new))];
    assert_eq!(
        decide(redrive(&["e3"]), &[stored(4, outbox("e3", dead(3)))]),
        writes(changes, done(&["e3"]))
    );
}

/// F10: not what consumers may have forgotten, unless it is forced.
#[test]
fn redrive_within_the_window() {
    for (committed_at, within) in [(2, true), (1, true), (0, false)] {
        let row = OutboxRow { committed_at: ms(committed_at), ..dead(3) };
        let rows = answer(&[("e3", row)], blocked(), &[]);
        let past = NotDone::PastWindow {
            age: Duration::from_millis(1_000 - committed_at),
            window: WINDOW,
        };
        let outcome = if within { done(&["e3"]) } else { refused(&[("e3", past)]) };
        assert_eq!(decide(redrive(&["e3"]), &rows).unwrap().outcome, outcome, "{committed_at}");
        assert_eq!(
            decide(redrive(&["e3"]).force(), &rows).unwrap().outcome,
            done(&["e3"]),
            "{committed_at}"
        );
    }
}

/// P3, P4: it stays on record why, and only the lane that waited for it goes on.
#[test]
fn discard_what_is_dead() {
    let behind = [("e5", OutboxRow { due: ms(200), ..pending("a", 5) })];
    let other = || LaneRow { blocked_by: Some(name("e2")), ..blocked() };
    for (before, after) in [
        (blocked(), LaneRow { due: Some(ms(200)), ..waiting() }),
        (LaneRow { due: Some(ms(200)), ..waiting() }, LaneRow { due: Some(ms(200)), ..waiting() }),
        (other(), other()),
    ] {
        for (reason, recorded) in [(Some("no"), "why; it was dead because: no"), (None, "why")] {
            let row = OutboxRow { reason: reason.map(Reason::new), ..dead(3) };
            let discarded = OutboxRow {
                state: DeliveryState::Discarded(NOW),
                reason: Some(Reason::new(recorded)),
                ..row.clone()
            };
            let rows = answer(&[("e3", row)], before.clone(), &behind);
            let after = LaneRow { changed_at: NOW, ..after.clone() };
            let changes = [update(4, outbox("e3", discarded)), update(5, lane("a", after))];
            assert_eq!(
                decide(discard(&["e3"]), &rows),
                writes(changes, done(&["e3"])),
                "{before:?}"
            );
        }
    }
}
