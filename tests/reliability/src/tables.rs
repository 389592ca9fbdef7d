//! What must be true between the tables of one store at any moment, whatever happened before (P1 to
//! P6).
//!
//! [`check`] also puts every question that an index answers, and compares the answer with one that
//! is made of the rows alone: what an index loses would otherwise be an event that nobody delivers
//! (P3).

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;
use twobox::{
    DeliveryState, EventId, InboxState, Key, LaneRow, Load, Millis, OrderingKey, Query, Record,
    Stored, Table,
};

/// Why tables are not as they must be.
#[derive(Debug, Error)]
pub enum Broken<E> {
    /// They could not be read.
    #[error("the tables cannot be read: {0}")]
    Store(E),
    /// They contradict each other.
    #[error("the tables contradict each other: {0}")]
    Contradiction(String),
}

impl<E> From<E> for Broken<E> {
    fn from(error: E) -> Self {
        Self::Store(error)
    }
}

/// All rows of all tables with their revisions, in the order of their keys.
///
/// # Errors
///
/// The store's own.
pub fn rows<L: Load>(tables: &mut L) -> Result<Vec<Stored>, L::Error> {
    const PAGE: usize = 64;
    let mut rows: Vec<Stored> = Vec::new();
    for table in Table::ALL {
        let mut after: Option<Key> = None;
        loop {
            let page =
                tables.load(&Query::Walk { table, after: after.take(), limit: PAGE })?.into_vec();
            let full = page.len() == PAGE;
            after = page.last().map(|stored| stored.record.key());
            rows.extend(page);
            if !full {
                break;
            }
        }
    }
    Ok(rows)
}

/// Reads all rows, and checks that they and the answers of the store agree with each other.
///
/// # Errors
///
/// [`Broken`].
pub fn check<L: Load>(tables: &mut L) -> Result<Vec<Stored>, Broken<L::Error>> {
    let rows = rows(tables)?;
    let sorted = rows.windows(2).all(|pair| pair[0].record.key() < pair[1].record.key());
    demand(sorted, || "a walk gives its rows out of their order".to_string())?;
    let by_key: BTreeMap<Key, &Stored> =
        rows.iter().map(|stored| (stored.record.key(), stored)).collect();
    for stored in &rows {
        check_row(&by_key, &stored.record)?;
    }
    check_index(tables, &rows)?;
    Ok(rows)
}

fn demand<E>(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), Broken<E>> {
    if holds { Ok(()) } else { Err(Broken::Contradiction(otherwise())) }
}

/// What a row says of other rows.
fn check_row<E>(rows: &BTreeMap<Key, &Stored>, record: &Record) -> Result<(), Broken<E>> {
    let key = record.key();
    let there = |key: Key| rows.get(&key).map(|stored| &stored.record);
    match record {
        // P1, P2: what a request says it placed is there. Its events may have been purged, each
        // with its delivery state.
        Record::Request(request, row) => {
            if let Some(placed) = &row.placed {
                match there(Key::Order(placed.order.clone())) {
                    Some(Record::Order(_, order)) => {
                        demand(order.request == *request, || {
                            format!("{key} placed an order of {}", order.request)
                        })?;
                    }
                    Some(_) | None => {
                        demand(false, || format!("{key} has lost its order {}", placed.order))?;
                    }
                }
            }
        }
        Record::Order(id, row) => {
            if let Some(Record::Request(_, request)) = there(Key::Request(row.request.clone())) {
                let placed = request.placed.as_ref().map(|placed| &placed.order);
                demand(placed == Some(id), || {
                    format!("{key} belongs to a request that placed {placed:?}")
                })?;
            }
        }
        Record::Event(event) => {
            let outbox = there(Key::Outbox(event.id.clone())).is_some();
            demand(outbox, || format!("{key} has no delivery state"))?;
            let order = there(Key::Order(event.order.clone())).is_some();
            demand(order, || format!("{key} is there without its order {}", event.order))?;
        }
        Record::Outbox(id, row) => {
            demand(there(Key::Event(id.clone())).is_some(), || {
                format!("{key} has lost its envelope")
            })?;
            if row.state == DeliveryState::Pending {
                match there(Key::Lane(row.lane.clone())) {
                    Some(Record::Lane(_, lane)) => {
                        let within = lane.confirmed < row.sequence && row.sequence < lane.next;
                        demand(within, || {
                            format!("{key} has a sequence that its lane has passed or not given")
                        })?;
                    }
                    Some(_) | None => {
                        demand(false, || format!("{key} waits in a lane that is not there"))?;
                    }
                }
            }
        }
        Record::Lane(_, lane) => {
            if let Some(lease) = &lane.lease {
                demand(lane.due == Some(lease.until), || {
                    format!("{key} is leased and due at another time")
                })?;
            }
            if let Some(blocked_by) = &lane.blocked_by {
                let dead = matches!(there(Key::Outbox(blocked_by.clone())),
                    Some(Record::Outbox(_, row)) if matches!(row.state, DeliveryState::Dead(_)));
                demand(dead, || format!("{key} waits for {blocked_by}, which is not dead"))?;
                demand(lane.due.is_none(), || format!("{key} is blocked and due"))?;
            }
        }
        // P5: the effect and the inbox row, both or neither.
        Record::Inbox(consumer, id, row) => {
            let effect = there(Key::Effect(consumer.clone(), id.clone())).is_some();
            demand(effect == row.effect, || {
                format!("{key} says effect: {}, there is one: {effect}", row.effect)
            })?;
            demand(row.state == InboxState::Applied || !effect, || {
                format!("{key} was not applied and has an effect")
            })?;
        }
        Record::Effect(consumer, id, _) => {
            let inbox = there(Key::Inbox(consumer.clone(), id.clone())).is_some();
            demand(inbox, || format!("{key} is there without its inbox row"))?;
        }
        Record::Position(..) | Record::Call(..) => {}
    }
    Ok(())
}

/// Whether the answers that a store finds by an index are those that follow from its rows.
fn check_index<L: Load>(tables: &mut L, rows: &[Stored]) -> Result<(), Broken<L::Error>> {
    let mut lanes: BTreeMap<OrderingKey, (&LaneRow, &Stored)> = BTreeMap::new();
    let mut pending: BTreeMap<(OrderingKey, u64), &Stored> = BTreeMap::new();
    let mut dead: BTreeMap<EventId, &Stored> = BTreeMap::new();
    for stored in rows {
        match &stored.record {
            Record::Lane(key, row) => {
                lanes.insert(key.clone(), (row, stored));
            }
            Record::Outbox(id, row) => match row.state {
                DeliveryState::Pending => {
                    let twice = pending.insert((row.lane.clone(), row.sequence), stored).is_some();
                    demand(!twice, || {
                        format!("two events stand at place {} of lane {}", row.sequence, row.lane)
                    })?;
                }
                DeliveryState::Dead(_) => {
                    dead.insert(id.clone(), stored);
                }
                DeliveryState::Confirmed(_)
                | DeliveryState::Discarded(_)
                | DeliveryState::Cancelled(_) => {}
            },
            Record::Request(..)
            | Record::Order(..)
            | Record::Event(_)
            | Record::Inbox(..)
            | Record::Effect(..)
            | Record::Position(..)
            | Record::Call(..) => {}
        }
    }
    let waiting: BTreeSet<&OrderingKey> = pending.keys().map(|(lane, _)| lane).collect();
    for (key, (lane, _)) in &lanes {
        // P3: what waits in a lane will be claimed, unless the lane waits for an operator.
        let due = waiting.contains(key) && lane.blocked_by.is_none();
        demand(lane.due.is_some() == due, || {
            format!("lane {key} is due at {:?}; something to claim in it: {due}", lane.due)
        })?;
    }
    let in_lane = |lane: &OrderingKey| {
        pending
            .range((lane.clone(), 0)..=(lane.clone(), u64::MAX))
            .map(|(_, stored)| (*stored).clone())
            .collect::<Vec<_>>()
    };
    let all_of = |lanes: &mut dyn Iterator<Item = (&OrderingKey, &Stored)>| {
        lanes
            .flat_map(|(key, stored)| [vec![stored.clone()], in_lane(key)].concat())
            .collect::<Vec<_>>()
    };

    let asked = lanes.keys().map(|key| (key.clone(), usize::MAX)).collect();
    let expected = all_of(&mut lanes.iter().map(|(key, (_, stored))| (key, *stored)));
    compare(tables, &Query::Lanes(asked), &expected)?;

    let mut due: Vec<(Millis, &OrderingKey, &Stored)> = lanes
        .iter()
        .filter_map(|(key, (row, stored))| row.due.map(|due| (due, key, *stored)))
        .collect();
    due.sort_by_key(|(due, key, _)| (*due, *key));
    let query =
        Query::Due { now: Millis::MAX, lanes: usize::MAX, run: usize::MAX, events: usize::MAX };
    compare(tables, &query, &all_of(&mut due.iter().map(|(_, key, stored)| (*key, *stored))))?;

    let expected = all_of(
        &mut lanes
            .iter()
            .filter(|(key, _)| waiting.contains(key))
            .map(|(key, (_, stored))| (key, *stored)),
    );
    compare(tables, &Query::Pending { after: None, limit: usize::MAX }, &expected)?;

    let expected: Vec<Stored> = dead.values().map(|stored| (*stored).clone()).collect();
    compare(tables, &Query::Dead { after: None, limit: usize::MAX }, &expected)?;
    Ok(())
}

fn compare<L: Load>(
    tables: &mut L,
    query: &Query,
    expected: &[Stored],
) -> Result<(), Broken<L::Error>> {
    let answer = tables.load(query)?.into_vec();
    demand(answer == expected, || {
        format!("{query:?} gives {answer:?}, but by the rows it is {expected:?}")
    })
}
