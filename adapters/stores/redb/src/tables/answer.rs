//! Answers to queries.

use alloc::vec::Vec;
use core::ops::Bound;

use twobox::codec;
use twobox::{
    CallState, Delivery, DeliveryState, Due, EventId, EventState, Finished, InboxState, Key, Lane,
    Millis, OrderingKey, PlacedOrder, Query, Record, Rows, Stats, Stored, Table,
};

use super::load::{Look, Opened, Scratch};
use super::seal::Seal;
use super::{Source, due, place};
use crate::error::{RedbError, shielded};

/// A purge looks at no more than so many rows for each that it may remove.
const LOOKS: usize = 16;

/// Answers a query.
pub(crate) fn load<S: Source>(
    Opened { tables, scratch, .. }: &mut Opened<'_, S>,
    query: &Query,
) -> Result<Rows, RedbError> {
    shielded(|| answer(tables, query, scratch))
}

fn answer(tables: &dyn Look, query: &Query, scratch: &mut Scratch) -> Result<Rows, RedbError> {
    match query {
        Query::Rows(keys) => {
            let mut rows = Vec::with_capacity(keys.as_slice().len());
            for key in keys.as_slice() {
                rows.extend(tables.get(key, scratch)?);
            }
            Ok(Rows::of(rows))
        }
        Query::Due(due) => Ok(Rows { lanes: lanes_due(tables, due, scratch)?, ..Rows::default() }),
        Query::Deliveries { events, run } => deliveries(tables, events, *run, scratch),
        Query::Dead { after, limit } => dead(tables, after.as_ref(), *limit, scratch),
        Query::Finished(finished) => self::finished(tables, finished, scratch),
        Query::Stats { now } => {
            Ok(Rows { stats: stats(tables, *now, scratch)?, ..Rows::default() })
        }
        Query::Walk { table, after, limit } => {
            let mut rows = Vec::new();
            walk(tables, *table, after.as_ref(), scratch, |_, stored| {
                rows.push(stored);
                Ok(rows.len() < *limit)
            })?;
            rows.truncate(*limit);
            Ok(Rows::of(rows))
        }
    }
}

/// A lane that the index says is due at this time.
fn due_lane(
    tables: &dyn Look,
    at: Millis,
    key: &[u8],
    scratch: &mut Scratch,
) -> Result<Lane, RedbError> {
    let lane = tables.lane(key, &mut scratch.decoder)?;
    let lane = lane.ok_or_else(|| due::error(key, "there is no such row"))?;
    if lane.row.index_due() == Some(at) {
        Ok(lane)
    } else {
        Err(due::error(key, "that row has another place in it"))
    }
}

fn lanes_due(
    tables: &dyn Look,
    Due { now, floor, lanes, run, events, bytes }: &Due,
    scratch: &mut Scratch,
) -> Result<Vec<Lane>, RedbError> {
    let mut found = Vec::new();
    let (mut events, mut bytes) = (*events, *bytes);
    let start = floor.get().to_be_bytes();
    // A block that begins before the floor has lanes of its own time only.
    let start = match floor.get() {
        0 => Bound::Unbounded,
        _ => Bound::Included(&start[..]),
    };
    for block in tables.due()?.range(start)? {
        let (key, sealed) = block?;
        let (at, block) = due::lanes(key.value(), sealed.value())?;
        for key in block {
            if found.len() == *lanes || events == 0 || bytes == 0 || at == Millis::MAX {
                return Ok(found);
            }
            let mut lane = due_lane(tables, at, key?, scratch)?;
            if at > *now {
                found.push(lane);
                return Ok(found);
            }
            let sum = tables.add_pending(&mut lane, *run, true, bytes, scratch)?;
            events = events.saturating_sub(lane.pending.len());
            bytes = bytes.saturating_sub(sum);
            found.push(lane);
        }
    }
    Ok(found)
}

fn deliveries(
    tables: &dyn Look,
    events: &[EventId],
    run: usize,
    scratch: &mut Scratch,
) -> Result<Rows, RedbError> {
    let mut found = Rows::default();
    for id in events {
        let delivery = tables.delivery(id.as_str().as_bytes(), &mut scratch.decoder)?;
        found.deliveries.extend(delivery);
    }
    let mut lanes: Vec<OrderingKey> =
        found.deliveries.iter().map(|next| next.row.lane.clone()).collect();
    lanes.sort_unstable();
    lanes.dedup();
    for key in lanes {
        let lane = tables.lane(key.as_str().as_bytes(), &mut scratch.decoder)?;
        let mut lane = lane.ok_or_else(|| lane_is_missing(&key))?;
        tables.add_pending(&mut lane, run, false, usize::MAX, scratch)?;
        found.lanes.push(lane);
    }
    Ok(found)
}

fn lane_is_missing(key: &OrderingKey) -> RedbError {
    due::error(key.as_str().as_bytes(), "there is an event in it, but no such row")
}

fn dead(
    tables: &dyn Look,
    after: Option<&EventId>,
    limit: usize,
    scratch: &mut Scratch,
) -> Result<Rows, RedbError> {
    let after = after.map_or(Bound::Unbounded, |id| Bound::Excluded(id.as_str().as_bytes()));
    let mut found = Rows::default();
    for entry in tables.dead()?.range(after)?.take(limit) {
        let entry = entry?.0;
        found.deliveries.push(dead_event(tables, entry.value(), scratch)?);
    }
    Ok(found)
}

/// An event that the index says is dead.
fn dead_event(tables: &dyn Look, id: &[u8], scratch: &mut Scratch) -> Result<Delivery, RedbError> {
    let delivery = tables.delivery(id, &mut scratch.decoder)?;
    let delivery = delivery.ok_or_else(|| place::index_error(id, "there is no such event"))?;
    if matches!(delivery.row.state, DeliveryState::Dead(_)) {
        Ok(delivery)
    } else {
        Err(place::index_error(id, "that event is not dead"))
    }
}

/// Looks at the rows of a table after a key, for as long as `look` wants more.
fn walk(
    tables: &dyn Look,
    table: Table,
    after: Option<&Key>,
    scratch: &mut Scratch,
    mut look: impl FnMut(&mut Scratch, Stored) -> Result<bool, RedbError>,
) -> Result<(), RedbError> {
    let mut start = Vec::new();
    after.iter().for_each(|key| codec::encode_key(key, &mut start));
    let start = after.map_or(Bound::Unbounded, |_| Bound::Excluded(start.as_slice()));
    for found in tables.rows(table)?.range(start)? {
        let (key, sealed) = found?;
        let stored = tables.read(table, key.value(), sealed.value(), &mut scratch.decoder)?;
        if !look(scratch, stored)? {
            break;
        }
    }
    Ok(())
}

fn finished(
    tables: &dyn Look,
    finished: &Finished,
    scratch: &mut Scratch,
) -> Result<Rows, RedbError> {
    match finished.table {
        Table::Events => finished_events(tables, finished, scratch),
        Table::Outbox | Table::Effects => Ok(Rows::default()),
        Table::Requests
        | Table::Orders
        | Table::Lanes
        | Table::Inbox
        | Table::Positions
        | Table::Calls => finished_rows(tables, finished, scratch),
    }
}

fn finished_rows(
    tables: &dyn Look,
    Finished { table, until, after, limit }: &Finished,
    scratch: &mut Scratch,
) -> Result<Rows, RedbError> {
    let mut found = Rows::default();
    let mut looks = limit.saturating_mul(LOOKS);
    // Where to go on, if there is anything behind it.
    let mut last = None;
    walk(tables, *table, after.as_ref(), scratch, |scratch, stored| {
        if last.is_some() {
            found.next = last.take();
            return Ok(false);
        }
        let since = match &stored.record {
            Record::Request(_, row) => match &row.placed {
                Some(placed) if placed.at <= *until && !is_awaited(tables, placed, scratch)? => {
                    Some(placed.at)
                }
                Some(_) | None => None,
            },
            Record::Order(id, row) if row.committed_at <= *until => {
                let request = tables.get(&Key::Request(row.request.clone()), scratch)?;
                let kept = request.is_some_and(|request| request.record.places(id));
                (!kept).then_some(row.committed_at)
            }
            Record::Order(..) => None,
            Record::Lane(key, row) => {
                let idle = row.index_due().is_none() && row.changed_at <= *until;
                let gone = idle && tables.is_without_events(key.as_str(), &mut scratch.place)?;
                gone.then_some(row.changed_at)
            }
            Record::Inbox(_, _, row) => (row.state == InboxState::Applied).then_some(row.at),
            Record::Position(_, _, row) => Some(row.at),
            Record::Call(_, _, row) => (row.state == CallState::Done).then_some(row.at),
            Record::Event(_) | Record::Outbox(..) | Record::Effect(..) => None,
        };
        looks -= 1;
        let full = looks == 0 || found.rows.len() + 1 == *limit;
        let past = since.is_some_and(|since| since <= *until);
        last = (looks == 0 || (past && full)).then(|| stored.record.key());
        if past {
            found.rows.push(stored);
        }
        Ok(true)
    })?;
    Ok(found)
}

fn finished_events(
    tables: &dyn Look,
    Finished { until, after, limit, .. }: &Finished,
    scratch: &mut Scratch,
) -> Result<Rows, RedbError> {
    let mut found = Rows::default();
    let mut start = Vec::new();
    after.iter().for_each(|key| codec::encode_key(key, &mut start));
    let start = after.as_ref().map_or(Bound::Unbounded, |_| Bound::Excluded(start.as_slice()));
    let looks = limit.saturating_mul(LOOKS);
    // Where to go on, if there is anything behind it.
    let mut last = None;
    for (n, event) in tables.rows(Table::Events)?.range(start)?.enumerate() {
        if last.is_some() {
            found.next = last;
            break;
        }
        let (id, sealed) = event?;
        Seal::of(Table::Events).unseal(id.value(), sealed.value())?;
        let delivery = tables.delivery(id.value(), &mut scratch.decoder)?;
        let delivery = delivery.ok_or_else(|| place::index_error(id.value(), "it is gone"))?;
        let id = delivery.id.clone();
        if is_finished(tables, &delivery, *until, scratch)? {
            found.deliveries.push(delivery);
        }
        if found.deliveries.len() == *limit || n + 1 == looks {
            last = Some(Key::Event(id));
        }
    }
    Ok(found)
}

/// Whether an event of an order is pending or dead.
fn is_awaited(
    tables: &dyn Look,
    placed: &PlacedOrder,
    scratch: &mut Scratch,
) -> Result<bool, RedbError> {
    for id in &placed.events {
        let delivery = tables.delivery(id.as_str().as_bytes(), &mut scratch.decoder)?;
        let Some(delivery) = delivery else { continue };
        if !is_finished(tables, &delivery, Millis::MAX, scratch)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether nothing can happen to an event any more since this time.
fn is_finished(
    tables: &dyn Look,
    delivery: &Delivery,
    until: Millis,
    scratch: &mut Scratch,
) -> Result<bool, RedbError> {
    let (key, committed_at) = (&delivery.row.lane, delivery.row.committed_at);
    // None is confirmed before it is committed.
    if delivery.row.state == DeliveryState::Pending && committed_at > until {
        return Ok(false);
    }
    let lane = tables.lane(key.as_str().as_bytes(), &mut scratch.decoder)?;
    let lane = lane.ok_or_else(|| lane_is_missing(key))?;
    let since = EventState::of(&lane.row, &delivery.row).finished_since(committed_at);
    Ok(since.is_some_and(|since| since <= until))
}

fn stats(tables: &dyn Look, now: Millis, scratch: &mut Scratch) -> Result<Stats, RedbError> {
    let mut stats = Stats::default();
    for block in tables.due()?.range(Bound::Unbounded)? {
        let (key, sealed) = block?;
        let (at, block) = due::lanes(key.value(), sealed.value())?;
        for key in block {
            let mut lane = due_lane(tables, at, key?, scratch)?;
            tables.add_pending(&mut lane, usize::MAX, false, usize::MAX, scratch)?;
            stats.add_lane(now, &lane.row, lane.pending.iter().map(|next| &next.row));
        }
    }
    for entry in tables.dead()?.range(Bound::Unbounded)? {
        stats.add_dead(&dead_event(tables, entry?.0.value(), scratch)?.row);
    }
    Ok(stats)
}
