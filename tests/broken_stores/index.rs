//! Stores whose index does not follow the rows: an entry that stays, or goes, at some change.

use super::{Defect, RIGHT, Way};
use crate::defect::does;
use crate::defects;
use twobox::{DeliveryState, EventState, Record};

fn dead(record: &Record) -> bool {
    matches!(record, Record::Outbox(_, row) if matches!(row.state, DeliveryState::Dead(_)))
}

fn state(record: Option<&Record>) -> Option<DeliveryState> {
    if let Some(Record::Outbox(_, row)) = record { Some(row.state) } else { None }
}

fn moved(record: &Record) -> bool {
    matches!(record, Record::Outbox(_, row) if row.moved)
}

fn lane(record: Option<&Record>) -> Option<&twobox::LaneRow> {
    if let Some(Record::Lane(_, row)) = record { Some(row) } else { None }
}

defects! {
    a_lane_that_is_due_later_stays_where_it_was: "contract::every_state_follows_every_state",
        ["the answer to Due", "lane l"],
        Defect { goes: |old, new| lane(Some(old)).is_none() || lane(new).is_none(), ..RIGHT };
    a_lane_that_is_idle_stays_due: "contract::every_state_follows_every_state",
        ["the answer to", "lane"],
        Defect {
            goes: |old, new| {
                let idle = lane(new).is_some_and(|row| row.index_due().is_none());
                lane(Some(old)).is_none() || !idle
            },
            ..RIGHT
        };
    a_lane_that_is_gone_stays_due: "contract::every_state_follows_every_state",
        ["the answer to Due", "lane"],
        Defect { goes: |old, new| lane(Some(old)).is_none() || new.is_some(), ..RIGHT };
    a_lane_that_is_blocked_is_not_counted: "contract::every_state_follows_every_state",
        ["Stats", "the counts are"],
        Defect {
            comes: |_, new| lane(Some(new)).is_none_or(|row| row.blocked_by.is_none()),
            ..RIGHT
        };
    a_lane_that_is_blocked_is_still_due: "contract::every_state_follows_every_state",
        ["the answer to", "lane"],
        Defect {
            goes: |old, new| {
                lane(Some(old)).is_none() || lane(new).is_none_or(|row| row.blocked_by.is_none())
            },
            ..RIGHT
        };
    a_lane_that_is_let_go_stays_blocked: "contract::every_state_follows_every_state",
        ["the answer to"],
        Defect {
            goes: |old, _| lane(Some(old)).is_none_or(|row| row.blocked_by.is_none()),
            ..RIGHT
        };
    a_lane_that_is_leased_is_not_found_when_that_ends: "contract::every_state_follows_every_state",
        ["the answer to Due", "lane"],
        Defect {
            comes: |_, new| lane(Some(new)).is_none_or(|row| row.lease.is_none()),
            ..RIGHT
        };
    a_lane_that_is_claimed_stays_due: "contract::every_state_follows_every_state",
        ["the answer to", "lane"],
        Defect {
            goes: |old, new| {
                lane(Some(old)).is_none() || lane(new).is_none_or(|row| row.lease.is_none())
            },
            ..RIGHT
        };
    a_lane_that_is_freed_stays_due_when_its_lease_ends: "contract::every_state_follows_every_state",
        ["the answer to", "lane"],
        Defect {
            goes: |old, new| {
                let freed = lane(new).is_some_and(|row| row.lease.is_none());
                !(lane(Some(old)).is_some_and(|row| row.lease.is_some()) && freed)
            },
            ..RIGHT
        };
    a_lane_that_is_freed_is_not_due: "contract::every_state_follows_every_state",
        ["the answer to", "lane"],
        Defect {
            comes: |old, new| {
                let freed = lane(Some(new)).is_some_and(|row| row.lease.is_none());
                !(lane(old).is_some_and(|row| row.lease.is_some()) && freed)
            },
            ..RIGHT
        };
    an_event_redriven_stays_dead: "contract::every_state_follows_every_state",
        ["the answer to Dead", "must not be there"],
        Defect {
            goes: |old, new| !(dead(old) && state(new) == Some(DeliveryState::Pending)),
            ..RIGHT
        };
    an_event_discarded_stays_dead: "contract::every_state_follows_every_state",
        ["the answer to Dead", "must not be there"],
        Defect {
            goes: |old, new| {
                !(dead(old) && matches!(state(new), Some(DeliveryState::Discarded(_))))
            },
            ..RIGHT
        };
    an_event_cancelled_stays_dead: "contract::every_state_follows_every_state",
        ["the answer to Dead", "must not be there"],
        Defect {
            goes: |old, new| {
                !(dead(old) && matches!(state(new), Some(DeliveryState::Cancelled(_))))
            },
            ..RIGHT
        };
    a_row_of_the_dead_that_goes_stays_dead: "contract::every_state_follows_every_state",
        ["the answer to Dead", "must not be there"],
        Defect { goes: |old, new| !dead(old) || new.is_some(), ..RIGHT };
    an_event_that_dies_at_once_is_not_among_the_dead: "contract::every_state_follows_every_state",
        ["the answer to Dead", "is missing"],
        Defect { comes: |old, new| !dead(new) || old.is_some(), ..RIGHT };
    an_event_that_dies_later_is_not_among_the_dead: "contract::every_state_follows_every_state",
        ["the answer to Dead", "is missing"],
        Defect { comes: |old, new| !dead(new) || old.is_none(), ..RIGHT };
    an_event_redriven_that_dies_again_is_not_among_the_dead:
        "contract::every_state_follows_every_state",
        ["the answer to Dead", "is missing"],
        Defect { comes: |old, new| !(dead(new) && old.is_some_and(moved)), ..RIGHT };
    an_event_redriven_has_no_place: "contract::every_state_follows_every_state",
        ["its lanes", "lane"],
        Defect { comes: |_, new| !moved(new) || dead(new), ..RIGHT };
    an_event_redriven_after_its_death_has_no_place: "contract::every_state_follows_every_state",
        ["its lanes", "lane"],
        Defect { comes: |old, new| !(moved(new) && old.is_some_and(dead)), ..RIGHT };
    an_event_redriven_stays_at_its_old_place_too: "contract::every_state_follows_every_state",
        ["its lanes", "lane"],
        Defect {
            pending: |lane, _, row| {
                matches!(EventState::of(lane, row), EventState::Pending | EventState::Leased)
            },
            ..RIGHT
        };
    an_event_that_goes_leaves_its_place: "contract::every_state_follows_every_state",
        ["after all events were removed", "table: Lanes", "is missing"],
        Defect { goes: |old, _| !matches!(old, Record::Event(_)), ..RIGHT };
    what_is_confirmed_stays_pending: "contract::every_state_follows_every_state",
        ["its lanes", "lane"],
        Defect {
            from: |_| 0,
            pending: |_, at, row| row.sequence == at && row.state == DeliveryState::Pending,
            ..RIGHT
        };
    what_is_confirmed_is_published_again: "scenarios::ordered_again",
        ["scenario ordered_again", "step 4"],
        Defect {
            from: |_| 0,
            pending: |_, at, row| row.sequence == at && row.state == DeliveryState::Pending,
            ..RIGHT
        };
    the_dead_are_pending: "contract::every_state_follows_every_state",
        ["its lanes", "lane"],
        Defect {
            pending: |lane, at, row| {
                row.sequence == at && row.sequence >= lane.head
                    && matches!(row.state, DeliveryState::Pending | DeliveryState::Dead(_))
            },
            ..RIGHT
        };
    the_cancelled_are_pending: "contract::every_state_follows_every_state",
        ["its lanes", "lane"],
        Defect {
            pending: |lane, at, row| {
                row.sequence == at && row.sequence >= lane.head
                    && matches!(row.state, DeliveryState::Pending | DeliveryState::Cancelled(_))
            },
            ..RIGHT
        };
    the_leased_are_not_pending: "contract::every_state_follows_every_state",
        ["its lanes", "lane"],
        Defect {
            pending: |lane, at, row| {
                row.sequence == at && EventState::of(lane, row) == EventState::Pending
            },
            ..RIGHT
        };
    what_is_removed_and_written_in_one_transaction_loses_its_entry:
        "contract::every_state_follows_every_state",
        ["after step 2", "is missing"],
        does(Way::IndexAddsThenRemoves);
    what_is_written_and_removed_in_one_transaction_keeps_its_entry:
        "contract::every_state_follows_every_state",
        ["in the transaction, after step"],
        does(Way::IndexRemovesThenAdds);
    what_was_seen_before_is_written_without_its_entry: "contract::any_change_is_followed",
        ["apply_seen", "the answer to"],
        does(Way::SeenForgetsTheIndex);
}
