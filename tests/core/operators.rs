//! What an operator does, row by row of its truth tables: what comes of it, and exactly which
//! guarded changes are written (P3, P4).

use core::time::Duration;

use twobox::{
    Cancel, Decision, Delivery, DeliveryState, Discard, EventState, Lane, LaneRow, NotDone,
    Operated, OutboxRow, Query, Reason, Redrive, Revision, Rows, Transition,
};

use crate::support::{
    LANE, NOW, lane, lane_key, lease, ms, name, outbox, pending, update, window, writes,
    writes_nothing,
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
    let due = Some(ms(100));
    LaneRow { next: 9, head: 3, confirmed: 2, due, token: 7, starts: 1, ..LANE }
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
    LaneRow { head: 4, due: None, blocked_by: Some(name("e3")), ..waiting() }
}

fn delivery((id, row): &(&str, OutboxRow)) -> Delivery {
    let revision = Some(Revision::from_stored(4));
    Delivery { id: name(id), row: row.clone(), revision, event: None }
}

fn lane_of(key: &str, row: LaneRow, revision: u64, pending: &[(&str, OutboxRow)]) -> Lane {
    let revision = Revision::from_stored(revision);
    Lane { key: lane_key(key), row, revision, pending: pending.iter().map(delivery).collect() }
}

/// The answer: these events, and their lane with what is pending in it.
fn answer(targets: &[(&str, OutboxRow)], row: LaneRow, behind: &[(&str, OutboxRow)]) -> Rows {
    let is_pending = |(_, row): &&(&str, OutboxRow)| row.state == DeliveryState::Pending;
    let mut pending: Vec<_> = targets.iter().filter(is_pending).chain(behind).cloned().collect();
    pending.sort_by_key(|(_, row)| row.sequence);
    let lanes = vec![lane_of("a", row, 5, &pending)];
    Rows { deliveries: targets.iter().map(delivery).collect(), lanes, ..Rows::default() }
}

fn decide<T: Transition>(transition: T, rows: &Rows) -> Result<Decision<T::Outcome>, T::Refusal> {
    transition.decide(NOW, rows)
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
    let after = |head, due: Option<u64>, starts| {
        let due = due.map(ms);
        update(5, lane("a", LaneRow { head, due, starts, changed_at: NOW, ..waiting() }))
    };

    // The first of its lane: the starts that are counted there were its own.
    for (behind, head, due) in [(vec![("e4", fourth.clone())], 4, Some(7_000)), (vec![], 9, None)] {
        let rows = answer(&[("e3", third.clone())], waiting(), &behind);
        let changes = [update(4, outbox("e3", cancelled(third.clone()))), after(head, due, 0)];
        assert_eq!(decide(cancel(&["e3"]), &rows), writes(changes, done(&["e3"])));
    }
    // One behind it.
    let rows = answer(&[("e4", fourth.clone())], waiting(), &[("e3", third.clone())]);
    let changes = [update(4, outbox("e4", cancelled(fourth.clone()))), after(3, Some(100), 1)];
    assert_eq!(decide(cancel(&["e4"]), &rows), writes(changes, done(&["e4"])));
    // Both, and nothing is left.
    let rows = answer(&[("e3", third.clone()), ("e4", fourth.clone())], waiting(), &[]);
    let both = [
        update(4, outbox("e3", cancelled(third.clone()))),
        update(4, outbox("e4", cancelled(fourth))),
        after(9, None, 0),
    ];
    assert_eq!(decide(cancel(&["e3", "e4"]), &rows), writes(both, done(&["e3", "e4"])));
    // In a lane that is blocked, which stays so.
    let rows = answer(&[("e4", pending("a", 4))], blocked(), &[("e5", pending("a", 5))]);
    let changes = [
        update(4, outbox("e4", cancelled(pending("a", 4)))),
        update(5, lane("a", LaneRow { head: 5, starts: 0, changed_at: NOW, ..blocked() })),
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
    for (sequence, state, shown) in [
        (3, DeliveryState::Pending, EventState::Pending),
        (2, DeliveryState::Pending, EventState::Confirmed),
        (3, DeliveryState::Dead(ms(5)), EventState::Dead(ms(5))),
        (3, DeliveryState::Discarded(ms(5)), EventState::Discarded(ms(5))),
        (3, DeliveryState::Cancelled(ms(5)), EventState::Cancelled(ms(5))),
    ] {
        let row = OutboxRow { state, ..pending("a", sequence) };
        let lanes = vec![lane_of("a", waiting(), 5, &[])];
        let rows = Rows { deliveries: vec![delivery(&("e3", row))], lanes, ..Rows::default() };
        let not =
            |wanted| writes_nothing(refused(&[("e3", NotDone::State { state: shown, wanted })]));
        if shown != EventState::Pending {
            assert_eq!(decide(cancel(&["e3"]), &rows), not("pending"));
        }
        if !matches!(shown, EventState::Dead(_)) {
            assert_eq!(decide(redrive(&["e3"]), &rows), not("dead"));
            assert_eq!(decide(redrive(&["e3"]).force(), &rows), not("dead"));
            assert_eq!(decide(discard(&["e3"]), &rows), not("dead"));
        }
    }
    let nothing = refused(&[("e3", NotDone::NoEvent), ("e4", NotDone::NoEvent)]);
    assert_eq!(decide(cancel(&["e3", "e4"]), &Rows::default()), writes_nothing(nothing.clone()));
    assert_eq!(decide(redrive(&["e3", "e4"]), &Rows::default()), writes_nothing(nothing.clone()));
    assert_eq!(decide(discard(&["e3", "e4"]), &Rows::default()), writes_nothing(nothing));
}

/// What cannot be done to one does not hold up the others, nor write their lanes; all are answered
/// in the order of their ids.
#[test]
fn each_event_has_its_own_answer() {
    let leased = LaneRow { lease: Some(lease("me", 1_500, 1)), head: 1, ..waiting() };
    let targets = [("e1", pending("b", 1)), ("e3", pending("a", 3)), ("e4", dead(4))];
    let rows = Rows {
        deliveries: targets.iter().map(delivery).collect(),
        lanes: vec![
            lane_of("a", waiting(), 5, &targets[1..2]),
            lane_of("b", leased, 6, &targets[..1]),
        ],
        ..Rows::default()
    };
    let cancelled = OutboxRow {
        state: DeliveryState::Cancelled(NOW),
        reason: Some(Reason::new("why")),
        ..pending("a", 3)
    };
    let state = NotDone::State { state: EventState::Dead(ms(500)), wanted: "pending" };
    let outcome = Operated {
        done: vec![name("e3")],
        refused: vec![
            (name("e0"), NotDone::NoEvent),
            (name("e1"), NotDone::Leased),
            (name("e4"), state),
        ],
    };
    let after = LaneRow { head: 9, due: None, starts: 0, changed_at: NOW, ..waiting() };
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
        moved: sequence == 9,
        ..pending("a", sequence)
    };
    let behind = [("e5", OutboxRow { due: ms(200), ..pending("a", 5) })];
    let changed = LaneRow { changed_at: NOW, ..waiting() };
    let other = || LaneRow { blocked_by: Some(name("e2")), ..blocked() };
    let gone_on = |head, due| LaneRow { head, due, ..waiting() };
    for (before, behind, sequence, after) in [
        // Its lane waits for it: it is the first again.
        (blocked(), &behind[..], 3, LaneRow { due: Some(NOW), starts: 0, ..changed.clone() }),
        (blocked(), &[], 3, LaneRow { due: Some(NOW), starts: 0, ..changed.clone() }),
        // The lane has gone on: its first event stays the first, with the starts that are counted
        // for it.
        (
            gone_on(5, Some(ms(200))),
            &behind,
            9,
            LaneRow { next: 10, head: 5, due: Some(ms(200)), ..changed.clone() },
        ),
        (
            gone_on(9, None),
            &[],
            9,
            LaneRow { next: 10, head: 9, due: Some(NOW), starts: 0, ..changed.clone() },
        ),
        // It waits for another one.
        (other(), &behind, 9, LaneRow { next: 10, head: 5, changed_at: NOW, ..other() }),
    ] {
        let rows = answer(&[("e3", dead(3))], before.clone(), behind);
        let changes = [update(4, outbox("e3", again(sequence))), update(5, lane("a", after))];
        assert_eq!(decide(redrive(&["e3"]), &rows), writes(changes, done(&["e3"])), "{before:?}");
    }
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
        (blocked(), LaneRow { head: 5, due: Some(ms(200)), ..waiting() }),
        (
            LaneRow { head: 4, due: Some(ms(200)), ..waiting() },
            LaneRow { head: 5, due: Some(ms(200)), ..waiting() },
        ),
        (other(), LaneRow { head: 5, ..other() }),
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
