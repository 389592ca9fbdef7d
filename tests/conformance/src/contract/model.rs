//! Answers to queries, compared with a model that knows nothing but all rows: it sorts and filters
//! them.

use twobox::{
    Change, DeliveryState, EventId, Expect, Key, LaneRow, Load, Millis, OrderingKey, Query, Reader,
    Record, Store, Stored, Table, Transaction,
};

use super::{all, committed, fill, put, rows, same, write};
use crate::failure::Failure;
use crate::harness::Harness;

/// All rows in the order of their keys.
struct Model(Vec<(Key, Stored)>);

impl Model {
    fn new(rows: &[Stored]) -> Self {
        let mut sorted: Vec<(Key, Stored)> =
            rows.iter().map(|row| (row.record.key(), row.clone())).collect();
        sorted.sort_by(|a, b| a.0.cmp(&b.0));
        Self(sorted)
    }

    /// A lane and its first pending events.
    fn with_run(&self, key: &OrderingKey, run: usize) -> Vec<Stored> {
        let rows = || self.0.iter().map(|(_, row)| row);
        let Some(lane) =
            rows().find(|row| matches!(&row.record, Record::Lane(there, _) if there == key))
        else {
            return Vec::new();
        };
        let mut pending: Vec<(u64, Stored)> =
            rows().filter_map(|row| pending_in(key, row)).collect();
        pending.sort_by_key(|(sequence, _)| *sequence);
        std::iter::once(lane.clone())
            .chain(pending.into_iter().map(|(_, row)| row).take(run))
            .collect()
    }

    /// The lanes that are due some time.
    fn due(&self) -> Vec<(Millis, OrderingKey)> {
        let lane = |row: &Stored| {
            if let Record::Lane(key, lane) = &row.record {
                lane.due.map(|due| (due, key.clone()))
            } else {
                None
            }
        };
        let mut due: Vec<(Millis, OrderingKey)> =
            self.0.iter().filter_map(|(_, row)| lane(row)).collect();
        due.sort();
        due
    }

    fn outbox(&self, id: &EventId) -> Option<Stored> {
        self.0
            .iter()
            .map(|(_, row)| row)
            .find(|row| matches!(&row.record, Record::Outbox(there, _) if there == id))
            .cloned()
    }

    /// The rows whose key is after this one, for which `pick` holds, at most `limit`.
    fn after(
        &self,
        after: Option<&Key>,
        limit: usize,
        pick: impl Fn(&Record) -> bool,
    ) -> Vec<Stored> {
        let rows = self
            .0
            .iter()
            .filter(|(key, row)| after.is_none_or(|after| key > after) && pick(&row.record));
        rows.map(|(_, row)| row.clone()).take(limit).collect()
    }

    /// The answer to a query, as its documentation defines it.
    fn answer(&self, query: &Query) -> Vec<Stored> {
        match query {
            Query::Rows(keys) => {
                let rows = self.0.iter().filter(|(key, _)| keys.as_slice().contains(key));
                rows.map(|(_, row)| row.clone()).collect()
            }
            Query::Due { now, lanes, run, events } => {
                let due = self.due();
                let later = due.iter().position(|(due, _)| due > now).unwrap_or(due.len());
                let (mut answer, mut given) = (Vec::new(), 0);
                for (at, (_, key)) in
                    due.iter().enumerate().take(*lanes).take_while(|(at, _)| *at <= later)
                {
                    if given >= *events {
                        break;
                    }
                    let lane = self.with_run(key, if at < later { *run } else { 0 });
                    given += lane.len() - 1;
                    answer.extend(lane);
                }
                answer
            }
            Query::Lanes(lanes) => {
                lanes.iter().flat_map(|(key, run)| self.with_run(key, *run)).collect()
            }
            Query::Deliveries { events, run } => {
                let found: Vec<Stored> = events.iter().filter_map(|id| self.outbox(id)).collect();
                let lane = |row: &Stored| {
                    if let Record::Outbox(_, row) = &row.record {
                        Some(row.lane.clone())
                    } else {
                        None
                    }
                };
                let mut lanes: Vec<OrderingKey> = found.iter().filter_map(lane).collect();
                lanes.sort();
                lanes.dedup();
                found
                    .into_iter()
                    .chain(lanes.iter().flat_map(|key| self.with_run(key, *run)))
                    .collect()
            }
            Query::Pending { after, limit } => {
                let pending = |row: &Stored| {
                    if let Record::Outbox(id, event) = &row.record
                        && event.state == DeliveryState::Pending
                    {
                        Some(((event.lane.clone(), event.sequence, id.clone()), row.clone()))
                    } else {
                        None
                    }
                };
                let mut rows: Vec<_> = self.0.iter().filter_map(|(_, row)| pending(row)).collect();
                rows.retain(|(place, _)| after.as_ref().is_none_or(|after| place > after));
                rows.sort_by(|a, b| a.0.cmp(&b.0));
                rows.truncate(*limit);
                let mut last = None;
                let with_lane = rows.into_iter().flat_map(|((lane, _, _), row)| {
                    let first = last.as_ref() != Some(&lane);
                    let head = if first { self.with_run(&lane, 0) } else { Vec::new() };
                    last = Some(lane);
                    head.into_iter().chain([row])
                });
                with_lane.collect()
            }
            Query::Dead { after, limit } => {
                let after = after.clone().map(Key::Outbox);
                self.after(
                    after.as_ref(),
                    *limit,
                    |record| matches!(record, Record::Outbox(_, row) if matches!(row.state, DeliveryState::Dead(_))),
                )
            }
            Query::Walk { table, after, limit } => {
                self.after(after.as_ref(), *limit, |record| record.table() == *table)
            }
        }
    }
}

fn pending_in(lane: &OrderingKey, row: &Stored) -> Option<(u64, Stored)> {
    match &row.record {
        Record::Outbox(_, event)
            if event.lane == *lane && event.state == DeliveryState::Pending =>
        {
            Some((event.sequence, row.clone()))
        }
        Record::Outbox(..)
        | Record::Request(..)
        | Record::Order(..)
        | Record::Event(_)
        | Record::Lane(..)
        | Record::Inbox(..)
        | Record::Effect(..)
        | Record::Position(..)
        | Record::Call(..) => None,
    }
}

const LANES: usize = 7;

fn lane_name(lane: usize) -> String {
    // The names do not sort as the due times do, and one is the beginning of another.
    ["m", "c", "a", "ab", "z", "A", "customer-7"][lane % LANES].to_string()
}

/// Lanes that are due at several times, some at the same and one never, with events of every state
/// whose ids do not sort as their sequences do.
fn populate() -> Result<Vec<Record>, Failure> {
    let mut records = Vec::new();
    for lane in 0..LANES {
        let due = [Some(50), Some(20), Some(20), None, Some(0), Some(u64::MAX), Some(40)][lane];
        records.push(rows::lane(&lane_name(lane), due.map(Millis::new))?);
        for sequence in 1..=6_u64 {
            let state = match (sequence as usize + lane) % 6 {
                0 => DeliveryState::Confirmed(Millis::new(1)),
                1 => DeliveryState::Dead(Millis::new(2)),
                2 => [
                    DeliveryState::Discarded(Millis::new(3)),
                    DeliveryState::Cancelled(Millis::new(4)),
                ][lane % 2],
                _ => DeliveryState::Pending,
            };
            let id = format!("{}-{}-{lane}", (sequence * 7 + lane as u64 * 3) % 10, sequence);
            // Sequences are far apart, so that they sort as numbers and not as texts.
            records.push(rows::outbox(&id, &lane_name(lane), sequence * sequence * 3, state)?);
        }
    }
    records.push(rows::outbox(
        "an event without a lane",
        "no such lane",
        1,
        DeliveryState::Pending,
    )?);
    for name in ["a", "B", "c", "ca", "d "] {
        let mut more = rows::one_of_each(name)?;
        // Lanes and outbox rows are there already.
        more.retain(|record| !matches!(record.table(), Table::Lanes | Table::Outbox));
        records.extend(more);
    }
    Ok(records)
}

/// Every variant, with limits from nothing to more than there is.
fn questions(rows: &[Stored]) -> Result<Vec<Query>, Failure> {
    let mut queries = Vec::new();
    let some = [0, 1, 2, 3, 5, 100];
    for now in [0, 19, 20, 39, 45, 50, u64::MAX - 1, u64::MAX].map(Millis::new) {
        for lanes in [0, 1, 3, 100] {
            for run in [0, 2, 100] {
                queries.extend([0, 1, 4, 100].map(|events| Query::Due { now, lanes, run, events }));
            }
        }
    }
    let mut names: Vec<OrderingKey> = (0..LANES)
        .map(|lane| OrderingKey::new(lane_name(lane)))
        .collect::<Result<_, _>>()
        .map_err(Failure::new)?;
    names.push(OrderingKey::new("nobody").map_err(Failure::new)?);
    names.sort();
    for step in 1..=names.len() {
        queries.push(Query::Lanes(
            names
                .iter()
                .cloned()
                .step_by(step)
                .enumerate()
                .map(|(run, name)| (name, run))
                .collect(),
        ));
    }
    queries.push(Query::Lanes(Vec::new()));
    let mut events: Vec<EventId> = rows
        .iter()
        .filter_map(
            |row| if let Record::Outbox(id, _) = &row.record { Some(id.clone()) } else { None },
        )
        .collect();
    events.push(EventId::new("nothing").map_err(Failure::new)?);
    events.sort();
    for step in [1, 2, 3, 7, 100] {
        for run in [0, 1, 3, 100] {
            queries.push(Query::Deliveries {
                events: events.iter().cloned().step_by(step).collect(),
                run,
            });
        }
    }
    let place = |row: &Stored| {
        if let Record::Outbox(id, row) = &row.record {
            Some((row.lane.clone(), row.sequence, id.clone()))
        } else {
            None
        }
    };
    for limit in some {
        queries.push(Query::Pending { after: None, limit });
        queries.extend(
            rows.iter()
                .filter_map(place)
                .step_by(3)
                .map(|after| Query::Pending { after: Some(after), limit }),
        );
        // A place that no event has: the id counts as well as the sequence.
        for id in ["!", "~"] {
            let id = EventId::new(id).map_err(Failure::new)?;
            let places = rows
                .iter()
                .filter_map(place)
                .step_by(2)
                .map(|(lane, sequence, _)| (lane, sequence, id.clone()));
            queries.extend(places.map(|after| Query::Pending { after: Some(after), limit }));
        }
        queries.push(Query::Dead { after: None, limit });
        queries.extend(
            events.iter().step_by(3).map(|after| Query::Dead { after: Some(after.clone()), limit }),
        );
    }
    let keys: Vec<Key> = rows.iter().map(|row| row.record.key()).collect();
    for step in [1, 2, 5] {
        queries.push(Query::rows(keys.iter().cloned().step_by(step)));
    }
    queries.push(Query::none());
    Ok(queries)
}

fn compare(tables: &mut impl Load, when: &str) -> Result<(), Failure> {
    let rows = all(tables)?;
    let model = Model::new(&rows);
    for query in questions(&rows)? {
        let found = tables.load(&query).map_err(Failure::store)?.into_vec();
        same(&format!("{when}, the answer to {query:?}"), &found, &model.answer(&query))?;
    }
    Ok(())
}

/// Every query answers with the rows that it defines, in its order and within its limits: in the
/// transaction that wrote the rows, after the commit, and after a crash.
///
/// # Errors
///
/// The first answer that differs from the model's.
pub fn answers_are_those_of_the_model<H: Harness>() -> Result<(), Failure> {
    let harness = H::open();
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    write(&mut tx, populate()?.into_iter().map(|record| put(Expect::Absent, record)).collect())?;
    compare(&mut tx, "in the transaction")?;
    tx.commit().map_err(Failure::store)?;
    compare(&mut harness.store().view().map_err(Failure::store)?, "after the commit")?;
    let harness = harness.crash();
    compare(&mut harness.store().view().map_err(Failure::store)?, "after a crash")
}

/// The same while rows change: each event is moved on through all states, each lane becomes due at
/// other times, and then row after row is removed. What an adapter keeps to find rows must follow.
///
/// # Errors
///
/// The first answer that differs from the model's.
pub fn answers_follow_every_change<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    fill(&harness, &populate()?)?;
    for round in 0..6_u64 {
        let changes = committed(&harness)?.into_iter().enumerate().filter_map(|(at, row)| {
            let expect = Expect::Revision(row.revision);
            match row.record {
                Record::Outbox(id, event) => {
                    let at_time = Millis::new(round);
                    let state = match event.state {
                        DeliveryState::Pending => DeliveryState::Dead(at_time),
                        DeliveryState::Dead(_) => DeliveryState::Confirmed(at_time),
                        DeliveryState::Confirmed(_) => DeliveryState::Discarded(at_time),
                        DeliveryState::Discarded(_) => DeliveryState::Cancelled(at_time),
                        DeliveryState::Cancelled(_) => DeliveryState::Pending,
                    };
                    Some(put(expect, Record::Outbox(id, twobox::OutboxRow { state, ..event })))
                }
                Record::Lane(key, lane) => {
                    let due = [None, Some(Millis::new(45)), Some(Millis::new(round)), lane.due]
                        [(at + round as usize) % 4];
                    Some(put(expect, Record::Lane(key, LaneRow { due, ..lane })))
                }
                Record::Request(..)
                | Record::Order(..)
                | Record::Event(_)
                | Record::Inbox(..)
                | Record::Effect(..)
                | Record::Position(..)
                | Record::Call(..) => None,
            }
        });
        let changes: Vec<Change> = changes.collect();
        let mut tx = harness.store().begin().map_err(Failure::store)?;
        write(&mut tx, changes)?;
        compare(&mut tx, &format!("within the transaction of round {round}"))?;
        tx.commit().map_err(Failure::store)?;
        harness = harness.crash();
        compare(
            &mut harness.store().view().map_err(Failure::store)?,
            &format!("after round {round}"),
        )?;
    }
    for round in 0..4 {
        let rows = committed(&harness)?;
        let gone = rows
            .iter()
            .step_by(2)
            .map(|row| Change::Delete { expect: row.revision, key: row.record.key() });
        let mut tx = harness.store().begin().map_err(Failure::store)?;
        write(&mut tx, gone.collect())?;
        tx.commit().map_err(Failure::store)?;
        compare(
            &mut harness.store().view().map_err(Failure::store)?,
            &format!("after half of the rows was removed, round {round}"),
        )?;
    }
    Ok(())
}

/// A walk goes through a table in pages of any size, and begins after any key, also one that is not
/// there.
///
/// # Errors
///
/// The first page that is wrong.
pub fn walk_in_pages<H: Harness>() -> Result<(), Failure> {
    let harness = H::open();
    fill(&harness, &populate()?)?;
    let rows = committed(&harness)?;
    let absent = ["Z", "aa", "c ", "zz"]
        .map(rows::one_of_each)
        .into_iter()
        .collect::<Result<Vec<_>, _>>()?;
    let model = Model::new(&rows);
    let mut view = harness.store().view().map_err(Failure::store)?;
    for table in Table::ALL {
        let there: Vec<Stored> =
            rows.iter().filter(|row| row.record.table() == table).cloned().collect();
        for limit in [1, 2, 3, there.len(), there.len() + 1] {
            let mut walked: Vec<Stored> = Vec::new();
            for _ in 0..=there.len() {
                let after = walked.last().map(|row| row.record.key());
                let page = view
                    .load(&Query::Walk { table, after, limit })
                    .map_err(Failure::store)?
                    .into_vec();
                let last = page.len() < limit;
                walked.extend(page);
                if last {
                    break;
                }
            }
            same(&format!("a walk through {table} in pages of {limit}"), &walked, &there)?;
        }
        let keys = absent.iter().flatten().map(Record::key).filter(|key| key.table() == table);
        for after in keys.chain(there.iter().map(|row| row.record.key())) {
            for limit in [0, 2, 100] {
                let query = Query::Walk { table, after: Some(after.clone()), limit };
                let found = view.load(&query).map_err(Failure::store)?.into_vec();
                same(&format!("the answer to {query:?}"), &found, &model.answer(&query))?;
            }
        }
    }
    Ok(())
}
