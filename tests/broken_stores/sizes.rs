//! Stores that cut: answers, batches, keys, texts, bodies, numbers.

use super::{Defect, RIGHT};
use crate::defects;
use twobox::{
    Body, Event, EventRow, LaneRow, Millis, OrderRow, OutboxRow, PositionRow, Query, Reason, Record,
};

fn cut(body: &Body, to: impl FnOnce(usize) -> usize) -> Body {
    let bytes = &body.bytes()[..to(body.bytes().len())];
    Body::new(body.content_type(), bytes).unwrap()
}

/// Changes the bodies of orders, events and effects.
fn bodies(record: &mut Record, change: impl FnOnce(&Body) -> Body) {
    match record {
        Record::Order(_, row) => row.body = change(&row.body),
        Record::Event(row) => row.event.body = change(&row.event.body),
        Record::Effect(_, _, body) => *body = change(body),
        Record::Request(..) | Record::Outbox(..) | Record::Lane(..) | Record::Inbox(..) => {}
        Record::Position(..) | Record::Call(..) => {}
    }
}

fn first(text: &str, bytes: usize) -> String {
    text.bytes().take(bytes).map(char::from).collect()
}

defects! {
    walks_are_cut_at_100: "contract::answers_and_batches_of_any_size",
        ["the answer to Walk", "is missing"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Walk { .. }) { rows.rows.truncate(100); }
        }, ..RIGHT };
    rows_are_cut_at_16: "contract::every_state_follows_every_state",
        ["the answer to Rows", "is missing"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Rows(_)) { rows.rows.truncate(16); }
        }, ..RIGHT };
    rows_are_cut_at_999: "contract::answers_and_batches_of_any_size",
        ["the answer to Rows", "is missing"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Rows(_)) { rows.rows.truncate(999); }
        }, ..RIGHT };
    lanes_are_cut_at_256: "contract::answers_and_batches_of_any_size",
        ["the answer to Due", "its lanes", "is missing"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Due(_)) { rows.lanes.truncate(256); }
        }, ..RIGHT };
    runs_are_cut_at_300: "contract::answers_and_batches_of_any_size",
        ["its lanes", "lane many"],
        Defect { answer: |_, rows, _| {
            rows.lanes.iter_mut().for_each(|lane| lane.pending.truncate(300));
        }, ..RIGHT };
    the_dead_are_cut_at_700: "contract::answers_and_batches_of_any_size",
        ["the answer to Dead", "is missing"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Dead { .. }) { rows.deliveries.truncate(700); }
        }, ..RIGHT };
    deliveries_are_cut_at_1000: "contract::answers_and_batches_of_any_size",
        ["the answer to Deliveries", "is missing"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Deliveries { .. }) { rows.deliveries.truncate(1_000); }
        }, ..RIGHT };
    what_is_finished_ends_at_256: "contract::answers_and_batches_of_any_size",
        ["what is finished", "is missing"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Finished(_)) && rows.rows.len() > 256 {
                rows.rows.truncate(256);
                rows.next = None;
            }
        }, ..RIGHT };
    batches_are_cut_at_100: "contract::answers_and_batches_of_any_size",
        ["after a batch of", "is missing"],
        Defect { batch: |changes| changes.truncate(100), ..RIGHT };
    batches_are_cut_at_1000: "contract::answers_and_batches_of_any_size",
        ["after a batch of", "is missing"],
        Defect { batch: |changes| changes.truncate(1_000), ..RIGHT };
    guards_are_checked_up_to_256: "contract::answers_and_batches_of_any_size",
        ["in a batch of 257 rows the last guard was ignored"],
        Defect { guard: |guard| guard.at >= 256 || guard.holds(), ..RIGHT };
    keys_are_cut_at_64: "contract::keys_of_any_length",
        ["keys of any length", "revision: Revision(2)"],
        Defect { key: |text| first(text, 64), ..RIGHT };
    keys_are_cut_at_127: "contract::keys_of_any_length",
        ["keys of any length", "revision: Revision(2)"],
        Defect { key: |text| first(text, 127), ..RIGHT };
    keys_are_cut_at_159: "contract::keys_of_any_length",
        ["keys of any length", "revision: Revision(2)"],
        Defect { key: |text| first(text, 159), ..RIGHT };
    keys_are_cut_at_200: "contract::keys_of_any_length",
        ["keys of any length", "revision: Revision(2)"],
        Defect { key: |text| first(text, 200), ..RIGHT };
    keys_are_cut_at_255: "contract::keys_of_any_length",
        ["keys of any length", "revision: Revision(2)"],
        Defect { key: |text| first(text, 255), ..RIGHT };
    bodies_are_cut_at_64_kib: "contract::bodies_of_any_size",
        ["bodies of any size", "65536 bytes"],
        Defect { keep: |record| bodies(record, |body| {
            cut(body, |size| size.min(65_535))
        }), ..RIGHT };
    bodies_are_cut_at_4_mib: "contract::bodies_of_any_size",
        ["bodies of 4194305 bytes", "4194304 bytes"],
        Defect { keep: |record| bodies(record, |body| {
            cut(body, |size| size.min(4 << 20))
        }), ..RIGHT };
    the_size_of_bodies_wraps: "contract::bodies_of_any_size",
        ["bodies of any size", "0 bytes"],
        Defect { keep: |record| bodies(record, |body| cut(body, |size| size % 65_536)), ..RIGHT };
    bodies_end_at_nul: "contract::any_bytes_in_bodies",
        ["row orders body-", "bytes"],
        Defect { keep: |record| bodies(record, |body| {
            let nul = body.bytes().iter().position(|byte| *byte == 0);
            cut(body, |size| nul.unwrap_or(size))
        }), ..RIGHT };
    bodies_are_made_utf_8: "contract::any_bytes_in_bodies",
        ["row orders body-"],
        Defect { keep: |record| bodies(record, |body| {
            let text = String::from_utf8_lossy(body.bytes());
            Body::new(body.content_type(), text.as_bytes()).unwrap()
        }), ..RIGHT };
    the_last_byte_of_a_body_is_another: "contract::bodies_of_any_size",
        ["has another body, from byte"],
        Defect { keep: |record| bodies(record, |body| {
            let mut bytes = body.bytes().to_vec();
            if bytes.len() > 1_000 { bytes[1_000] ^= 1; }
            Body::new(body.content_type(), bytes).unwrap()
        }), ..RIGHT };
    reasons_are_cut_at_255: "contract::bodies_of_any_size",
        ["row outbox", "reason"],
        Defect { keep: |record| {
            if let Record::Outbox(_, OutboxRow { reason: Some(reason), .. }) = record {
                *reason = Reason::new(first(reason.as_str(), 255));
            }
        }, ..RIGHT };
    headers_are_cut_at_255: "contract::bodies_of_any_size",
        ["a header of 256 bytes", "row events"],
        Defect { keep: |record| {
            if let Record::Event(EventRow { event: Event { headers, .. }, .. }) = record {
                let none = twobox::Headers::new();
                *headers = headers.iter().fold(none, |headers, (name, value)| {
                    headers.with(name, first(value.as_str(), 255)).unwrap()
                });
            }
        }, ..RIGHT };
    a_request_has_255_events: "contract::every_state_comes_back",
        ["row requests shop/many"],
        Defect { keep: |record| {
            if let Record::Request(_, row) = record
                && let Some(placed) = &mut row.placed
            {
                placed.events.truncate(255);
            }
        }, ..RIGHT };
    starts_wrap_at_a_byte: "contract::numbers_at_their_limits",
        ["row lanes lane", "starts"],
        Defect { keep: |record| {
            if let Record::Lane(_, row) = record { row.starts &= 0xff; }
        }, ..RIGHT };
    failures_wrap_at_two_bytes: "contract::numbers_at_their_limits",
        ["row outbox", "failures: 65535"],
        Defect { keep: |record| {
            if let Record::Outbox(_, row) = record { row.failures &= 0xffff; }
        }, ..RIGHT };
    sequences_wrap_at_two_bytes: "contract::numbers_at_their_limits",
        ["row positions", "sequence: 0"],
        Defect { keep: |record| {
            if let Record::Position(_, _, row) = record {
                *row = PositionRow { sequence: row.sequence & 0xffff, ..row.clone() };
            }
        }, ..RIGHT };
    tokens_wrap_at_four_bytes: "contract::numbers_at_their_limits",
        ["row lanes lane", "token"],
        Defect { keep: |record| {
            if let Record::Lane(_, row) = record {
                *row = LaneRow { token: row.token & 0xffff_ffff, ..row.clone() };
            }
        }, ..RIGHT };
    numbers_are_floats: "contract::numbers_at_their_limits",
        ["row lanes lane", "9007199254740993"],
        Defect { keep: |record| {
            if let Record::Lane(_, row) = record { row.confirmed = row.confirmed as f64 as u64; }
        }, ..RIGHT };
    times_are_seconds: "contract::columns_are_kept_apart",
        ["row orders apart", "committed_at: Millis(5000)"],
        Defect { keep: |record| {
            if let Record::Order(_, row) = record {
                let committed_at = Millis::new(row.committed_at.get() / 1_000 * 1_000);
                *row = OrderRow { committed_at, ..row.clone() };
            }
        }, ..RIGHT };
}
