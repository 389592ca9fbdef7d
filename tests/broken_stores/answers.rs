//! Stores that answer a query wrongly though their rows and their index are right.

use super::{Defect, Disk, RIGHT};
use crate::defects;
use twobox::{Destinations, Due, Finished, Key, Millis, OutboxRow, Query, Record, Rows, Table};

/// Changes the question for due lanes.
fn due(query: &mut Query, change: impl FnOnce(&mut Due)) {
    if let Query::Due(due) = query {
        change(due);
    }
}

fn finished(query: &mut Query, change: impl FnOnce(&mut Finished)) {
    if let Query::Finished(finished) = query {
        change(finished);
    }
}

/// The rows of a table, whatever their state.
fn all_of(disk: &Disk, table: Table) -> Rows {
    let rows = disk.rows.iter().filter(|(key, _)| key.table() == table);
    Rows::of(rows.map(|(_, row)| row.clone()).collect())
}

defects! {
    walks_backwards: "contract::walk_in_pages",
        ["a walk through", "in pages of 1"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Walk { .. }) { rows.rows.reverse(); }
        }, ..RIGHT };
    drops_the_last_of_a_full_page: "contract::walk_in_pages",
        ["a walk through requests in pages of 1", "is missing"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Walk { limit, .. } if *limit == rows.rows.len()) {
                rows.rows.pop();
            }
        }, ..RIGHT };
    a_walk_begins_at_its_key_and_not_after_it: "contract::walk_in_pages",
        ["a walk through requests in pages of 1", "is missing"],
        Defect { answer: |query, rows, disk| {
            if let Query::Walk { after: Some(after), limit, .. } = query
                && let Some(row) = disk.rows.get(after)
            {
                rows.rows.insert(0, row.clone());
                rows.rows.truncate(*limit);
            }
        }, ..RIGHT };
    rows_come_as_they_were_written: "contract::every_state_follows_every_state",
        ["the answer to Rows", "the order is wrong"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Rows(_)) { rows.rows.sort_by_key(|row| row.revision); }
        }, ..RIGHT };
    answers_for_all_destinations: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "its lanes"],
        Defect { ask: |query| due(query, |due| due.destinations = Destinations::ALL), ..RIGHT };
    leaves_out_what_sorts_behind_an_excepted_destination: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "its lanes"],
        Defect { answer: |query, rows, _| {
            if let Query::Due(Due { destinations: Destinations::Except(except), .. }) = query
                && let Some(first) = except.first()
            {
                rows.lanes.retain(|lane| lane.key.destination < *first);
            }
        }, ..RIGHT };
    answers_destination_by_destination: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "its lanes"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Due(_)) {
                rows.lanes.sort_by(|a, b| a.key.destination.cmp(&b.key.destination));
            }
        }, ..RIGHT };
    reorders_the_events_of_a_lane: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "its lanes", "lane"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Due(_)) {
                rows.lanes.iter_mut().for_each(|lane| lane.pending.reverse());
            }
        }, ..RIGHT };
    reorders_events_in_a_scenario: "scenarios::two_events",
        ["scenario two_events"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Due(_)) {
                rows.lanes.iter_mut().for_each(|lane| lane.pending.reverse());
            }
        }, ..RIGHT };
    finds_what_is_not_due_yet: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "lane"],
        Defect { ask: |query| due(query, |due| due.now = Millis::MAX), ..RIGHT };
    begins_before_the_floor: "contract::answers_are_those_of_the_model",
        ["floor", "lane"],
        Defect { ask: |query| due(query, |due| due.floor = Millis::new(0)), ..RIGHT };
    forgets_the_limit_of_lanes: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "lanes: 0", "must not be there"],
        Defect { ask: |query| due(query, |due| due.lanes = 1_000), ..RIGHT };
    forgets_the_limit_of_a_run: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "run: 1"],
        Defect { ask: |query| due(query, |due| due.run = 1_000), ..RIGHT };
    forgets_the_limit_of_events: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "must not be there"],
        Defect { ask: |query| due(query, |due| due.events = 1_000), ..RIGHT };
    forgets_the_limit_of_bytes: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "bytes: 1"],
        Defect { ask: |query| due(query, |due| due.bytes = usize::MAX), ..RIGHT };
    forgets_the_lane_that_is_due_later: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "is missing"],
        Defect { answer: |query, rows, _| {
            let Query::Due(due) = query else { return };
            rows.lanes.retain(|lane| lane.row.due.is_none_or(|at| at <= due.now));
        }, ..RIGHT };
    forgets_the_later_lane_in_a_scenario: "scenarios::dead_blocks",
        ["scenario dead_blocks"],
        Defect { answer: |query, rows, _| {
            let Query::Due(due) = query else { return };
            rows.lanes.retain(|lane| lane.row.due.is_none_or(|at| at <= due.now));
        }, ..RIGHT };
    times_sort_as_texts: "contract::numbers_at_their_limits",
        ["the lanes must come when they are due"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Due(_)) {
                rows.lanes.sort_by_key(|lane| lane.row.due.map(|due| due.to_string()));
            }
        }, ..RIGHT };
    sequences_sort_as_texts: "contract::numbers_at_their_limits",
        ["the events of a lane must come in the order"],
        Defect { answer: |_, rows, _| {
            for lane in &mut rows.lanes {
                lane.pending.sort_by_key(|next| next.row.sequence.to_string());
            }
        }, ..RIGHT };
    keys_sort_without_case: "contract::texts_at_their_limits",
        ["texts in keys", "the order is wrong"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Walk { .. }) {
                rows.rows.sort_by_key(|row| row.record.key().to_string().to_lowercase());
            }
        }, ..RIGHT };
    events_that_are_due_come_without_their_envelopes: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "event: None"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Due(_)) {
                let pending = rows.lanes.iter_mut().flat_map(|lane| &mut lane.pending);
                pending.for_each(|next| next.event = None);
            }
        }, ..RIGHT };
    deliveries_come_without_their_lanes: "contract::answers_are_those_of_the_model",
        ["the answer to Deliveries", "its lanes", "is missing"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Deliveries { .. }) { rows.lanes.clear(); }
        }, ..RIGHT };
    deliveries_forget_their_revision: "contract::answers_are_those_of_the_model",
        ["the answer to Deliveries", "revision: None"],
        Defect { answer: |_, rows, _| {
            rows.deliveries.iter_mut().for_each(|next| next.revision = None);
        }, ..RIGHT };
    deliveries_show_rows_as_if_nothing_had_happened: "contract::answers_are_those_of_the_model",
        ["the answer to Deliveries", "event"],
        Defect { answer: |_, rows, disk| {
            for next in &mut rows.deliveries {
                let event = disk.rows.get(&Key::Event(next.id.clone())).map(|row| &row.record);
                if let Some(Record::Event(row)) = event { next.row = OutboxRow::untouched(row); }
            }
        }, ..RIGHT };
    the_dead_come_in_the_order_of_time: "contract::every_state_follows_every_state",
        ["the answer to Dead", "the order is wrong"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Dead { .. }) {
                rows.deliveries.sort_by_key(|next| next.row.state);
            }
        }, ..RIGHT };
    the_dead_begin_at_the_id_and_not_after_it: "contract::answers_are_those_of_the_model",
        ["the answer to Dead", "is missing"],
        Defect { answer: |query, rows, disk| {
            if let Query::Dead { after: Some(after), limit } = query
                && disk.dead.contains(after)
            {
                rows.deliveries.splice(0..0, disk.delivery(after, false));
                rows.deliveries.truncate(*limit);
            }
        }, ..RIGHT };
    a_purge_takes_what_is_too_young: "contract::answers_are_those_of_the_model",
        ["what is finished", "must not be there"],
        Defect { ask: |query| finished(query, |finished| finished.until = Millis::MAX), ..RIGHT };
    a_purge_leaves_what_is_just_old_enough: "contract::answers_are_those_of_the_model",
        ["what is finished", "is missing"],
        Defect { ask: |query| finished(query, |finished| {
            finished.until = Millis::new(finished.until.get().saturating_sub(1));
        }), ..RIGHT };
    a_purge_takes_failing_events: "contract::answers_are_those_of_the_model",
        ["what is finished", "Inbox", "a page of"],
        Defect { answer: |query, rows, disk| {
            if let Query::Finished(Finished { table: Table::Inbox, after: None, .. }) = query {
                *rows = all_of(disk, Table::Inbox);
            }
        }, ..RIGHT };
    a_purge_takes_open_requests: "contract::every_state_follows_every_state",
        ["what is finished", "requests", "must not be there"],
        Defect { answer: |query, rows, disk| {
            let Query::Finished(finished) = query else { return };
            if (finished.table, finished.limit) == (Table::Requests, 100) {
                *rows = all_of(disk, Table::Requests);
                rows.rows.truncate(100);
            }
        }, ..RIGHT };
    a_purge_has_no_end: "contract::answers_are_those_of_the_model",
        ["what is finished", "no end"],
        Defect { answer: |query, rows, _| {
            if let Query::Finished(finished) = query { rows.next.clone_from(&finished.after); }
            if let (Query::Finished(_), None) = (query, &rows.next) {
                rows.next = rows.rows.first().map(|row| row.record.key());
            }
        }, ..RIGHT };
    a_purge_ends_where_there_is_nothing_for_a_while: "contract::answers_are_those_of_the_model",
        ["what is finished", "is missing"],
        Defect { answer: |query, rows, disk| {
            let Query::Finished(Finished { table, after, limit, .. }) = query else { return };
            let all = all_of(disk, *table).rows.into_iter().map(|row| row.record.key());
            let looked: Vec<Key> =
                all.filter(|key| Some(key) > after.as_ref()).take(*limit).collect();
            rows.rows.retain(|row| looked.contains(&row.record.key()));
            rows.deliveries.retain(|next| looked.contains(&Key::Event(next.id.clone())));
            let found = rows.rows.len() + rows.deliveries.len() > 0;
            rows.next = looked.last().filter(|_| found).cloned();
        }, ..RIGHT };
    counts_forget_the_dead: "contract::answers_are_those_of_the_model",
        ["the answer to Stats", "the counts are"],
        Defect { answer: |_, rows, _| rows.stats.all.dead = 0, ..RIGHT };
    counts_all_as_due: "contract::answers_are_those_of_the_model",
        ["the answer to Stats", "the counts are"],
        Defect { answer: |_, rows, _| rows.stats.all.due = rows.stats.all.pending, ..RIGHT };
    counts_know_one_type: "contract::answers_are_those_of_the_model",
        ["the answer to Stats", "the counts are"],
        Defect { answer: |_, rows, _| {
            let all = rows.stats.all;
            rows.stats.by_type.values_mut().take(1).for_each(|counts| *counts = all);
        }, ..RIGHT };
    counts_how_old_the_youngest_is: "contract::answers_are_those_of_the_model",
        ["the answer to Stats", "the counts are"],
        Defect { answer: |_, rows, _| {
            rows.stats.oldest_due = rows.stats.oldest_due.map(|_| core::time::Duration::ZERO);
        }, ..RIGHT };
    lanes_that_are_due_at_once_come_backwards: "contract::answers_are_those_of_the_model",
        ["the answer to Due", "the order is wrong"],
        Defect { answer: |query, rows, _| {
            if matches!(query, Query::Due(_)) {
                rows.lanes.reverse();
                rows.lanes.sort_by_key(|lane| lane.row.due);
            }
        }, ..RIGHT };
    counts_fail: "contract::answers_are_those_of_the_model",
        ["Stats { now:", "the index is torn"],
        Defect { fails: |query| matches!(query, Query::Stats { .. }), ..RIGHT };
    a_query_fails_in_a_scenario: "scenarios::buy_once",
        ["scenario buy_once", "step", "Due(Due {", "the index is torn"],
        Defect { fails: |query| matches!(query, Query::Due(_)), ..RIGHT };
}
