//! Answers to queries.

use alloc::vec::Vec;
use core::ops::Bound;

use redb::Range;
use twobox::codec;
use twobox::{
    CallState, Delivery, DeliveryState, Destinations, Due, EventId, EventState, Finished,
    InboxState, Key, Lane, LaneKey, Millis, PlacedOrder, Query, Record, Rows, Stats, Stored, Table,
};

use super::load::{Look, Opened, Scratch};
use super::seal::Seal;
use super::{Bytes, Source, due, place};
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
    destination: &[u8],
    ordering_key: &[u8],
    Scratch { lane: key, decoder, .. }: &mut Scratch,
) -> Result<Lane, RedbError> {
    due::write_lane(destination, ordering_key, key);
    let lane = tables.lane(key, decoder)?;
    let lane = lane.ok_or_else(|| due::error(key, "there is no such row"))?;
    if lane.row.index_due() == Some(at) {
        Ok(lane)
    } else {
        Err(due::error(key, "that row has another place in it"))
    }
}

/// What is due at a destination and was not looked at yet, at or after a time.
struct Waiting<'t> {
    destination: Vec<u8>,
    blocks: Range<'t, Bytes, Bytes>,
    /// The block that it has come to: its time, what is left of it, and the lane that is next.
    at: Millis,
    block: Vec<u8>,
    next: core::ops::Range<usize>,
}

impl<'t> Waiting<'t> {
    /// From this range of blocks on; `None` if there is nothing.
    fn of(
        destination: Vec<u8>,
        blocks: Range<'t, Bytes, Bytes>,
    ) -> Result<Option<Self>, RedbError> {
        let (at, block, next) = (Millis::new(0), Vec::new(), 0..0);
        let mut waiting = Self { destination, blocks, at, block, next };
        Ok(waiting.advance()?.then_some(waiting))
    }

    /// Goes on to the next lane; says whether there is one.
    fn advance(&mut self) -> Result<bool, RedbError> {
        if self.next.end == self.block.len() {
            let Some(found) = self.blocks.next().transpose()? else { return Ok(false) };
            return self.begin(found.0.value(), found.1.value());
        }
        self.next = due::next_lane(&self.block, self.next.end)?;
        Ok(true)
    }

    /// Goes on to the first lane of a block; says whether it is one of this destination.
    fn begin(&mut self, key: &[u8], sealed: &[u8]) -> Result<bool, RedbError> {
        if due::destination(key)? != self.destination {
            return Ok(false);
        }
        let (at, block) = due::lanes(key, sealed)?;
        self.at = at;
        self.block.clear();
        self.block.extend_from_slice(block.bytes());
        self.next = due::next_lane(&self.block, 0)?;
        Ok(true)
    }

    fn ordering_key(&self) -> &[u8] {
        &self.block[self.next.clone()]
    }

    /// Where its next lane stands among those of all destinations.
    fn place(&self) -> (Millis, &[u8], &[u8]) {
        (self.at, &self.destination, self.ordering_key())
    }
}

/// What waits at each of the destinations that are asked for. Those that are left out cost one look
/// each, however much waits there.
fn waiting<'t>(
    tables: &'t dyn Look,
    Due { destinations, floor, .. }: &Due,
    key: &mut Vec<u8>,
) -> Result<Vec<Waiting<'t>>, RedbError> {
    let table = tables.due()?;
    let from = |destination: &[u8], key: &mut Vec<u8>| {
        due::write_start(destination, *floor, key);
        Waiting::of(destination.to_vec(), table.range(Bound::Included(key))?)
    };
    let except = match destinations {
        Destinations::Only(only) => {
            return Ok(from(only.as_str().as_bytes(), key)?.into_iter().collect());
        }
        Destinations::Except(except) => except,
    };
    let mut found = Vec::with_capacity(1);
    key.clear();
    while let Some((first, _)) = table.range(Bound::Included(key))?.next().transpose()? {
        let destination = due::destination(first.value())?;
        if except.binary_search_by(|next| next.as_str().as_bytes().cmp(destination)).is_err() {
            found.extend(from(destination, key)?);
        }
        due::write_end(destination, key);
    }
    Ok(found)
}

fn lanes_due(tables: &dyn Look, due: &Due, scratch: &mut Scratch) -> Result<Vec<Lane>, RedbError> {
    let mut found = Vec::new();
    let (mut events, mut bytes) = (due.events, due.bytes);
    let mut waiting = waiting(tables, due, &mut scratch.lane)?;
    while found.len() < due.lanes && events > 0 && bytes > 0 {
        let first = (0..waiting.len()).min_by_key(|n| waiting[*n].place());
        let Some(first) = first else { break };
        let next = &mut waiting[first];
        if next.at == Millis::MAX {
            break;
        }
        let mut lane = due_lane(tables, next.at, &next.destination, next.ordering_key(), scratch)?;
        if next.at > due.now {
            found.push(lane);
            break;
        }
        let sum = tables.add_pending(&mut lane, due.run, true, bytes, scratch)?;
        events = events.saturating_sub(lane.pending.len());
        bytes = bytes.saturating_sub(sum);
        found.push(lane);
        if !next.advance()? {
            waiting.swap_remove(first);
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
    let mut lanes: Vec<LaneKey> =
        found.deliveries.iter().map(|next| next.row.lane.clone()).collect();
    lanes.sort_unstable();
    lanes.dedup();
    for key in lanes {
        let mut lane = lane_of(tables, &key, scratch)?;
        tables.add_pending(&mut lane, run, false, usize::MAX, scratch)?;
        found.lanes.push(lane);
    }
    Ok(found)
}

/// The lane of an event.
fn lane_of(
    tables: &dyn Look,
    key: &LaneKey,
    Scratch { lane: bytes, decoder, .. }: &mut Scratch,
) -> Result<Lane, RedbError> {
    bytes.clear();
    codec::encode_lane(key, bytes);
    let lane = tables.lane(bytes, decoder)?;
    lane.ok_or_else(|| due::error(bytes, "there is an event in it, but no such row"))
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
                let gone = idle && tables.is_without_events(key, &mut scratch.place)?;
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
    let lane = lane_of(tables, key, scratch)?;
    let since = EventState::of(&lane.row, &delivery.row).finished_since(committed_at);
    Ok(since.is_some_and(|since| since <= until))
}

fn stats(tables: &dyn Look, now: Millis, scratch: &mut Scratch) -> Result<Stats, RedbError> {
    let mut stats = Stats::default();
    for block in tables.due()?.range(Bound::Unbounded)? {
        let (key, sealed) = block?;
        let destination = due::destination(key.value())?;
        let (at, block) = due::lanes(key.value(), sealed.value())?;
        for ordering_key in block {
            let mut lane = due_lane(tables, at, destination, ordering_key?, scratch)?;
            tables.add_pending(&mut lane, usize::MAX, false, usize::MAX, scratch)?;
            stats.add_lane(now, &lane.row, lane.pending.iter().map(|next| &next.row));
        }
    }
    for entry in tables.dead()?.range(Bound::Unbounded)? {
        stats.add_dead(&dead_event(tables, entry?.0.value(), scratch)?.row);
    }
    Ok(stats)
}
