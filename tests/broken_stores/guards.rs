//! Stores that check guards wrongly, count revisions wrongly, or change a lane wrongly.

use super::{Defect, RIGHT, Way};
use crate::defect::{Guard, does};
use crate::defects;
use twobox::{Change, Expect, Key, LaneEdit, LaneRow, Revision};

fn is_lane(guard: &Guard<'_>) -> bool {
    matches!(guard.change, Change::Lane { .. })
}

defects! {
    ignores_guards: "contract::a_broken_guard_stops_the_whole_batch",
        ["a batch with the bad Put", "must be a conflict at this row, not Written"],
        Defect { guard: |guard| is_lane(guard) && guard.holds() || !is_lane(guard), ..RIGHT };
    checks_the_first_guard_only: "contract::a_broken_guard_stops_the_whole_batch",
        ["must be a conflict at this row, not Written"],
        Defect { guard: |guard| guard.at > 0 || guard.holds(), ..RIGHT };
    inserts_over_what_is_there: "contract::a_broken_guard_stops_the_whole_batch",
        ["expect: Absent", "must be a conflict"],
        Defect {
            guard: |guard| match guard.change {
                Change::Put { expect: Expect::Absent, .. } => true,
                Change::Put { .. } | Change::Delete { .. } | Change::Lane { .. } => guard.holds(),
            },
            ..RIGHT
        };
    updates_whatever_revision_is_there: "contract::a_broken_guard_stops_the_whole_batch",
        ["expect: Revision(Revision(2))", "must be a conflict"],
        Defect {
            guard: |guard| match guard.change {
                Change::Put { expect: Expect::Revision(_), .. } => guard.there.is_some(),
                Change::Put { .. } | Change::Delete { .. } | Change::Lane { .. } => guard.holds(),
            },
            ..RIGHT
        };
    updates_what_is_not_there: "contract::a_broken_guard_stops_the_whole_batch",
        ["expect: Revision(Revision(1))", "must be a conflict"],
        Defect {
            guard: |guard| match guard.change {
                Change::Put { .. } => guard.there.is_none() || guard.holds(),
                Change::Delete { .. } | Change::Lane { .. } => guard.holds(),
            },
            ..RIGHT
        };
    removes_whatever_revision_is_there: "contract::a_broken_guard_stops_the_whole_batch",
        ["the bad Delete", "must be a conflict"],
        Defect {
            guard: |guard| match guard.change {
                Change::Delete { .. } => guard.there.is_some(),
                Change::Put { .. } | Change::Lane { .. } => guard.holds(),
            },
            ..RIGHT
        };
    removes_what_is_not_there: "contract::a_broken_guard_stops_the_whole_batch",
        ["the bad Delete", "must be a conflict"],
        Defect {
            guard: |guard| match guard.change {
                Change::Delete { .. } => guard.there.is_none() || guard.holds(),
                Change::Put { .. } | Change::Lane { .. } => guard.holds(),
            },
            ..RIGHT
        };
    names_another_row_in_a_conflict: "contract::a_broken_guard_stops_the_whole_batch",
        ["must be a conflict at this row, not Conflict"],
        Defect {
            names: |key| if let Key::Event(id) = key { Key::Outbox(id) } else { key },
            ..RIGHT
        };
    takes_what_was_seen_for_all_there_is: "contract::any_change_is_followed",
        ["apply_seen", "reports a conflict"],
        does(Way::SeenIsEnough);
    revisions_stay_one: "contract::revisions_count_writes",
        ["after write 2", "its revision is [1]"],
        Defect { revision: |_| Revision::FIRST, ..RIGHT };
    revisions_go_on_after_a_row_was_removed: "contract::revisions_count_writes",
        ["after write 1 in round 1", "its revision is [4]"],
        does(Way::RevisionsGoOnAfterDelete);
    revisions_wrap_at_a_byte: "contract::revisions_go_on",
        ["write 257 of one row", "conflict at orders row"],
        Defect { revision: |at| Revision::from_stored(at.get() & 0xff), ..RIGHT };
    a_lane_changes_under_any_token: "contract::a_lane_changes_under_its_token",
        ["a batch with the bad Lane", "token: 4", "must be a conflict"],
        Defect {
            guard: |guard| is_lane(guard) && guard.there.is_some() || guard.holds(),
            edited: |row, _, edit, at| row.edited(row.token, edit, at),
            ..RIGHT
        };
    a_lane_changes_without_a_lease: "contract::a_lane_changes_under_its_token",
        ["a batch with the bad Lane", "key: \"other\"", "must be a conflict"],
        Defect {
            guard: |guard| match (guard.change, guard.there.map(|row| &row.record)) {
                (Change::Lane { token, .. }, Some(twobox::Record::Lane(_, row))) => {
                    row.token == *token
                }
                _ => guard.holds(),
            },
            ..RIGHT
        };
    a_lane_is_freed_beyond_its_end: "contract::a_lane_changes_under_its_token",
        ["a batch with the bad Lane", "head: 11", "must be a conflict"],
        Defect {
            guard: |guard| match (guard.change, guard.there.map(|row| &row.record)) {
                (Change::Lane { token, .. }, Some(twobox::Record::Lane(_, row))) => {
                    row.token == *token && row.lease.is_some()
                }
                _ => guard.holds(),
            },
            ..RIGHT
        };
    a_lane_keeps_its_head_when_it_is_freed: "contract::a_lane_changes_under_its_token",
        ["row lanes ends", "head: 4", "head: 9"],
        Defect { edited: |row, token, edit, at| {
            let head = row.head;
            row.edited(token, edit, at).map(|row| LaneRow { head, ..row })
        }, ..RIGHT };
    a_freed_lane_stays_leased: "contract::a_lane_changes_under_its_token",
        ["row lanes ends", "lease: Some"],
        Defect { edited: |row, token, edit, at| {
            let lease = row.lease.clone();
 let edited = row.edited(token, edit, at)?;
 let frees = matches!(edit, LaneEdit::Free { .. });
 Some(if frees { LaneRow { lease, ..edited } } else { edited })
        }, ..RIGHT };
    a_freed_lane_keeps_its_starts: "contract::a_lane_changes_under_its_token",
        ["row lanes ends", "starts: 1"],
        Defect { edited: |row, token, edit, at| {
            let starts = row.starts;
            row.edited(token, edit, at).map(|row| LaneRow { starts, ..row })
        }, ..RIGHT };
    a_lane_that_is_blocked_stays_due: "contract::a_lane_changes_under_its_token",
        ["which is not due any more", "due: Some"],
        Defect { edited: |row, token, edit, at| {
            let edited = row.edited(token, edit, at)?;
            let due = if let LaneEdit::Free { due, .. } = edit { Some(*due) } else { edited.due };
            Some(LaneRow { due, ..edited })
        }, ..RIGHT };
    an_empty_lane_stays_due: "contract::a_lane_changes_under_its_token",
        ["which is not due any more", "due: Some"],
        Defect { edited: |row, token, edit, at| {
            let edited = row.edited(token, edit, at)?;
            let due = if let LaneEdit::Free { due, .. } = edit { Some(*due) } else { edited.due };
            let due = due.filter(|_| edited.blocked_by.is_none());
            Some(LaneRow { due, ..edited })
        }, ..RIGHT };
    a_renewed_lease_gets_shorter: "contract::a_lane_changes_under_its_token",
        ["a lane after Renew { until: Millis(30) }", "until: Millis(30)"],
        Defect { edited: |row, token, edit, at| {
            let edited = row.edited(token, edit, at)?;
            let LaneEdit::Renew { until } = edit else { return Some(edited) };
            let lease = edited.lease.map(|lease| twobox::Lease { until: *until, ..lease });
            Some(LaneRow { lease, due: Some(*until), ..edited })
        }, ..RIGHT };
    a_lane_keeps_when_it_changed: "contract::a_lane_changes_under_its_token",
        ["row lanes ends", "changed_at"],
        Defect { edited: |row, token, edit, at| {
            let changed_at = row.changed_at;
            row.edited(token, edit, at).map(|row| LaneRow { changed_at, ..row })
        }, ..RIGHT };
}
