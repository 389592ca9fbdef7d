//! Stores that keep columns as one that usually have the same value, or take what is empty for what
//! is absent, or texts for equal that are not.

use super::{Defect, RIGHT};
use crate::defects;
use twobox::{DeliveryState, Fingerprint, InboxState, Reason, Record};

/// A defect in how the rows of one table are kept.
macro_rules! keep {
    ($pattern:pat => $change:expr) => {
        Defect {
            keep: |record| {
                if let $pattern = record {
                    $change;
                }
            },
            ..RIGHT
        }
    };
}

fn octets(body: &twobox::Body) -> twobox::Body {
    twobox::Body::new("application/octet-stream", body.bytes()).unwrap()
}

fn unless_empty(reason: &Option<Reason>) -> Option<Reason> {
    reason.clone().filter(|reason| !reason.as_str().is_empty())
}

defects! {
    a_request_was_registered_when_its_order_was_placed: "contract::columns_are_kept_apart",
        ["row requests shop/apart-0", "registered_at: Millis(5002)"],
        keep!(Record::Request(_, row) => if let Some(placed) = &row.placed {
            row.registered_at = placed.at;
        });
    an_order_was_placed_when_its_request_was_registered: "contract::columns_are_kept_apart",
        ["row requests shop/apart-0", "at: Millis(5001)"],
        keep!(Record::Request(_, row) => if let Some(placed) = &mut row.placed {
            placed.at = row.registered_at;
        });
    events_of_a_request_are_sorted: "contract::columns_are_kept_apart",
        ["row requests shop/apart-0", "events: [\"b\", \"one\"]"],
        keep!(Record::Request(_, row) => if let Some(placed) = &mut row.placed {
            placed.events.sort();
        });
    a_summary_is_cut: "contract::columns_are_kept_apart",
        ["row requests shop/apart-0 has the summary"],
        keep!(Record::Request(_, row) => {
            let cut: String = row.fingerprint.summary().chars().take(64).collect();
            row.fingerprint = Fingerprint::from_stored(row.fingerprint.digest(), &cut);
        });
    a_summary_is_not_kept: "contract::columns_are_kept_apart",
        ["row requests shop/apart-0 has the summary \"\""],
        keep!(Record::Request(_, row) => {
            row.fingerprint = Fingerprint::from_stored(row.fingerprint.digest(), "");
        });
    an_order_has_no_content_type: "contract::columns_are_kept_apart",
        ["row orders apart", "application/octet-stream"],
        keep!(Record::Order(_, row) => row.body = octets(&row.body));
    an_event_has_no_content_type: "contract::columns_are_kept_apart",
        ["row events event-", "application/octet-stream"],
        keep!(Record::Event(row) => row.event.body = octets(&row.event.body));
    an_effect_has_no_content_type: "contract::columns_are_kept_apart",
        ["row effects loyalty/apart", "application/octet-stream"],
        keep!(Record::Effect(_, _, body) => *body = octets(body));
    an_event_has_no_headers: "contract::columns_are_kept_apart",
        ["row events event-", "headers: Headers([])"],
        keep!(Record::Event(row) => row.event.headers = twobox::Headers::new());
    an_event_is_of_its_request: "contract::columns_are_kept_apart",
        ["row events event-", "order: \"order:req-001\""],
        keep!(Record::Event(row) => {
            row.event.order = twobox::OrderId::new("order:req-001").unwrap();
        });
    all_events_are_of_one_type: "contract::columns_are_kept_apart",
        ["row events event-", "event_type: \"order.created\""],
        keep!(Record::Event(row) => {
            row.event.event_type = twobox::EventType::new("order.created").unwrap();
        });
    an_order_is_of_the_request_with_its_name: "contract::columns_are_kept_apart",
        ["row orders apart", "scope: \"shop\""],
        keep!(Record::Order(id, row) => {
            row.request = twobox::RequestKey::new("shop", id.as_str()).unwrap();
        });
    an_event_is_due_when_it_is_committed: "contract::columns_are_kept_apart",
        ["row events event-", "due: Millis(5021)"],
        keep!(Record::Event(row) => row.due = row.event.time);
    an_event_has_version_one: "contract::columns_are_kept_apart",
        ["row events event-", "schema_version: 1"],
        keep!(Record::Event(row) => row.event.schema_version = 1);
    a_retry_is_due_when_the_event_was_committed: "contract::columns_are_kept_apart",
        ["row outbox event-", "due: Millis(5021)"],
        keep!(Record::Outbox(_, row) => row.due = row.committed_at);
    starts_are_failures: "contract::columns_are_kept_apart",
        ["row outbox event-", "starts: 3"],
        keep!(Record::Outbox(_, row) => row.starts = row.failures);
    failures_are_starts: "contract::columns_are_kept_apart",
        ["row outbox event-", "failures: 5"],
        keep!(Record::Outbox(_, row) => row.failures = row.starts);
    the_time_of_a_state_is_when_it_was_due: "contract::columns_are_kept_apart",
        ["row outbox event-", "Dead(Millis(5023))"],
        keep!(Record::Outbox(_, row) => match &mut row.state {
            DeliveryState::Pending => {}
            DeliveryState::Dead(at) => *at = row.due,
            DeliveryState::Discarded(at) | DeliveryState::Cancelled(at) => *at = row.due,
        });
    the_discarded_are_cancelled: "contract::columns_are_kept_apart",
        ["row outbox event-", "Cancelled(Millis(5012))"],
        keep!(Record::Outbox(_, row) => if let DeliveryState::Discarded(at) = row.state {
            row.state = DeliveryState::Cancelled(at);
        });
    only_the_pending_were_moved: "contract::columns_are_kept_apart",
        ["row outbox event-", "moved: false"],
        keep!(Record::Outbox(_, row) => row.moved &= row.state == DeliveryState::Pending);
    an_event_that_is_pending_has_no_reason: "contract::columns_are_kept_apart",
        ["row outbox event-", "reason: None"],
        keep!(Record::Outbox(_, row) => if row.state == DeliveryState::Pending {
            row.reason = None;
        });
    an_empty_reason_is_none: "contract::columns_are_kept_apart",
        ["row outbox event-", "reason: None"],
        keep!(Record::Outbox(_, row) => row.reason = unless_empty(&row.reason));
    an_empty_reason_of_a_consumer_is_none: "contract::columns_are_kept_apart",
        ["row inbox loyalty/", "reason: None"],
        keep!(Record::Inbox(_, _, row) => row.reason = unless_empty(&row.reason));
    an_empty_note_is_none: "contract::columns_are_kept_apart",
        ["row calls loyalty/", "note: None"],
        keep!(Record::Call(_, _, row) => row.note = unless_empty(&row.note));
    a_lane_begins_when_it_changes: "contract::columns_are_kept_apart",
        ["row lanes lane-", "begun: Millis(5008)"],
        keep!(Record::Lane(_, row) => row.begun = row.changed_at);
    a_lane_changes_when_it_begins: "contract::columns_are_kept_apart",
        ["row lanes lane-", "changed_at: Millis(5007)"],
        keep!(Record::Lane(_, row) => row.changed_at = row.begun);
    a_lane_has_confirmed_all_before_its_head: "contract::columns_are_kept_apart",
        ["row lanes lane-", "confirmed: 90"],
        keep!(Record::Lane(_, row) => row.confirmed = row.head - 1);
    a_lane_begins_behind_what_it_confirmed: "contract::columns_are_kept_apart",
        ["row lanes lane-", "head: 82"],
        keep!(Record::Lane(_, row) => row.head = row.confirmed + 1);
    a_lane_is_due_when_its_lease_ends: "contract::columns_are_kept_apart",
        ["row lanes lane-", "due: Some(Millis(5005))"],
        keep!(Record::Lane(_, row) => if let Some(lease) = &row.lease {
            row.due = Some(lease.until);
        });
    a_lease_ends_when_its_lane_is_due: "contract::columns_are_kept_apart",
        ["row lanes lane-", "until: Millis(5006)"],
        keep!(Record::Lane(_, row) => if let (Some(lease), Some(due)) = (&mut row.lease, row.due) {
            lease.until = due;
        });
    a_lease_covers_the_whole_lane: "contract::columns_are_kept_apart",
        ["row lanes lane-", "through: 98"],
        keep!(Record::Lane(_, row) => if let Some(lease) = &mut row.lease {
            lease.through = row.next - 1;
        });
    a_lane_that_is_due_is_not_blocked: "contract::columns_are_kept_apart",
        ["row lanes lane-", "blocked_by: None"],
        keep!(Record::Lane(_, row) => if row.due.is_some() { row.blocked_by = None; });
    a_lane_without_a_lease_has_no_starts: "contract::columns_are_kept_apart",
        ["row lanes lane-", "starts: 0"],
        keep!(Record::Lane(_, row) => if row.lease.is_none() { row.starts = 0; });
    what_is_applied_has_an_effect: "contract::columns_are_kept_apart",
        ["row inbox loyalty/applied-0-false", "effect: true"],
        keep!(Record::Inbox(_, _, row) => row.effect = row.state == InboxState::Applied);
    what_is_applied_has_not_failed: "contract::columns_are_kept_apart",
        ["row inbox loyalty/applied-", "failures: 0"],
        keep!(Record::Inbox(_, _, row) => if row.state == InboxState::Applied {
            row.failures = 0;
        });
    a_position_begins_when_it_moves: "contract::columns_are_kept_apart",
        ["row positions loyalty/apart", "begun: Millis(5032)"],
        keep!(Record::Position(_, _, row) => row.begun = row.at);
    a_position_moves_when_it_begins: "contract::columns_are_kept_apart",
        ["row positions loyalty/apart", "at: Millis(5031)"],
        keep!(Record::Position(_, _, row) => row.at = row.begun);
    a_call_was_started_once: "contract::columns_are_kept_apart",
        ["row calls loyalty/", "starts: 1"],
        keep!(Record::Call(_, _, row) => row.starts = row.starts.min(1));
    ignores_case: "contract::texts_at_their_limits",
        ["row requests", "revision: Revision(2)"],
        Defect { key: str::to_lowercase, ..RIGHT };
    trims_keys: "contract::texts_at_their_limits",
        ["row requests", "revision: Revision(2)"],
        Defect { key: |text| text.trim_end().to_string(), ..RIGHT };
    joins_keys_with_a_slash: "contract::texts_at_their_limits",
        ["row requests", "revision: Revision(2)"],
        Defect { key: |text| text.replace('\0', "/"), ..RIGHT };
    joins_keys_with_nothing: "contract::texts_at_their_limits",
        ["row requests", "revision: Revision(2)"],
        Defect { key: |text| text.replace('\0', ""), ..RIGHT };
    accents_do_not_count: "contract::texts_at_their_limits",
        ["row requests", "revision: Revision(2)"],
        Defect { key: |text| text.replace("e\u{301}", "é"), ..RIGHT };
}
