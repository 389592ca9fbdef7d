//! Stores that lose what was committed, keep what was not, or show what is not there yet.

use super::{Defect, RIGHT, Way};
use crate::defect::does;
use crate::defects;
use twobox::Change;

defects! {
    loses_the_last_commit: "contract::what_is_committed_stays",
        ["after a commit and a crash", "row requests shop/first is missing"],
        does(Way::LosesTheLastCommit);
    loses_the_last_commit_in_a_scenario: "scenarios::answer_lost",
        ["scenario answer_lost", "step"],
        does(Way::LosesTheLastCommit);
    each_third_commit_is_lost: "contract::what_is_committed_stays",
        ["after a commit", "row requests shop/third is missing"],
        does(Way::EachThirdCommitIsLost);
    writes_when_it_is_closed: "contract::what_is_committed_stays",
        ["after a commit and a crash", "row requests shop/first is missing"],
        does(Way::CommitsAtDrop);
    what_may_be_lost_takes_the_next_commit_with_it: "contract::any_change_is_followed",
        ["after a crash", "a crash"],
        does(Way::WhatMayBeLostTakesTheNext);
    one_write_that_may_be_lost_takes_others_with_it: "contract::any_change_is_followed",
        ["after a crash", "is missing"],
        does(Way::OneThatMayBeLostIsEnough);
    commits_what_is_dropped: "contract::what_is_not_committed_is_not_there",
        ["after a transaction was dropped", "row requests shop/new must not be there"],
        does(Way::DropCommits);
    commits_what_failed_in_a_scenario: "scenarios::consumption_fails",
        ["scenario consumption_fails"],
        does(Way::DropCommits);
    reads_not_its_own_writes: "contract::reads_its_own_writes",
        ["within the transaction that wrote them", "row requests shop/row is missing"],
        does(Way::ReadsNotItsOwnWrites);
    a_view_follows_what_is_committed: "contract::a_view_is_a_snapshot",
        ["a view that was opened before a commit", "row requests shop/more must not be there"],
        does(Way::ViewIsLive);
    a_view_shows_what_is_not_committed: "contract::a_view_is_a_snapshot",
        ["when others have written and not committed", "row requests shop/more must not be there"],
        does(Way::ViewSeesUncommitted);
    lanes_and_their_events_are_of_different_moments: "contract::an_answer_is_of_one_moment",
        ["the answer to Due", "lane busy", "of different moments"],
        does(Way::AnswersAreTorn);
    two_writers_lose_updates: "contract::two_writers_lose_nothing",
        ["two writers of one row that both change", "a write was lost", "lanes shared"],
        does(Way::WritersDoNotWait);
    a_lease_that_is_renewed_loses_an_append: "contract::two_writers_lose_nothing",
        ["one renews the lease and one appends", "a write was lost", "lanes shared"],
        does(Way::LaneEditsMeetNoConflicts);
    an_event_that_comes_again_is_the_old_one: "contract::any_change_is_followed",
        ["the answer to", "e"],
        does(Way::CachesEvents);
    the_index_comes_one_commit_late: "contract::every_state_follows_every_state",
        ["and a crash", "the answer to Due", "lane"],
        does(Way::IndexOneCommitLate);
    writes_half_of_a_batch: "contract::what_is_committed_stays",
        ["after a commit", "is missing"],
        Defect { batch: |changes| changes.truncate(changes.len().div_ceil(2)), ..RIGHT };
    ignores_deletes: "contract::revisions_count_writes",
        ["requests shop/row was deleted and is still there"],
        Defect {
            batch: |changes| changes.retain(|change| !matches!(change, Change::Delete { .. })),
            ..RIGHT
        };
    conflicts_come_by_chance: "faults::buy_once",
        ["faults have struck", "was to strike at point", "conflicts or errors of its own accord"],
        does(Way::ConflictsByChance);
    leaves_out_a_damaged_row: "damage::a_damaged_row_is_an_error",
        ["row requests shop/row is damaged", "Rows"],
        does(Way::LeavesOutTheDamaged);
    reads_any_format: "damage::another_format_is_refused",
        ["format version 0", "it is opened"],
        does(Way::ReadsAnyFormat);
}

/// A store that loses what may be lost, and nothing else, is right.
#[test]
fn what_may_be_lost_is_lost() {
    static DEFECT: Defect = does(Way::LosesWhatMayBeLost);
    crate::must_pass(&DEFECT, "contract::any_change_is_followed");
}

/// So is one with many writers that finds conflicts when it commits.
#[test]
fn writers_that_meet_conflicts_are_right() {
    static DEFECT: Defect = does(Way::WritersMeetConflicts);
    for check in ["two_writers_lose_nothing", "any_change_is_followed", "a_panic_leaves_nothing"] {
        crate::must_pass(&DEFECT, &format!("contract::{check}"));
    }
}
