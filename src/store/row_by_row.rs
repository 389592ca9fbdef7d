//! Answers to all queries, for stores that read row by row: an adapter says how its rows and index
//! entries are read, and has its [`Load::load`](super::Load::load).

use alloc::borrow::Cow;
use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;

use thiserror::Error;

use super::StoreError;
use crate::boundary::{Delivery, Destinations, Due, Finished, Lane, Query, Rows};
use crate::ids::{Destination, EventId, LaneKey, OrderingKey};
use crate::stats::Stats;
use crate::table::{
    CallState, DeliveryState, EventRow, EventState, InboxState, Key, OutboxRow, PlacedOrder,
    Record, Revision, Stored, Table,
};
use crate::time::Millis;

/// A purge looks at no more than so many rows for each that it may remove.
const LOOKS: usize = 16;

/// How the rows and the index entries of one consistent state are read; with it,
/// [`answer`] answers every query.
///
/// The index holds [`Record::index_entry`](crate::Record::index_entry) of each row that is there,
/// and nothing else. What cannot be read must be an error, never left out.
pub trait RowByRow {
    /// What can go wrong in the store.
    type Error: StoreError;

    /// The row with this key.
    ///
    /// # Errors
    ///
    /// The store's own.
    fn row(&self, key: &Key) -> Result<Option<Cow<'_, Stored>>, Self::Error>;

    /// The rows of a table after this key, in the order of their keys.
    fn rows_after(
        &self,
        table: Table,
        after: Option<&Key>,
    ) -> impl Iterator<Item = Result<Cow<'_, Stored>, Self::Error>>;

    /// The next destination that has an entry [`IndexEntry::Due`](crate::IndexEntry::Due), after
    /// this one. It must not cost more where many lanes are due at one destination.
    ///
    /// # Errors
    ///
    /// The store's own.
    fn destination_after(
        &self,
        after: Option<&Destination>,
    ) -> Result<Option<Destination>, Self::Error>;

    /// The entries [`IndexEntry::Due`](crate::IndexEntry::Due) of a destination at or after this
    /// time, in their order.
    fn due_from(
        &self,
        destination: &Destination,
        floor: Millis,
    ) -> impl Iterator<Item = Result<(Millis, OrderingKey), Self::Error>>;

    /// The entries [`IndexEntry::Place`](crate::IndexEntry::Place) of a lane at or after this
    /// sequence, in their order.
    fn places_from(
        &self,
        lane: &LaneKey,
        sequence: u64,
    ) -> impl Iterator<Item = Result<(u64, EventId), Self::Error>>;

    /// The entries [`IndexEntry::Dead`](crate::IndexEntry::Dead) after this id, in their order.
    fn dead_after(
        &self,
        after: Option<&EventId>,
    ) -> impl Iterator<Item = Result<EventId, Self::Error>>;

    /// The store's error for rows and index entries that contradict each other.
    fn inconsistent(&self, found: Inconsistent) -> Self::Error;
}

/// Rows and index entries that contradict each other: something is missing, or was changed
/// elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("the store contradicts itself at {key}: {what}; restore it from a copy")]
pub struct Inconsistent {
    /// The row that is wrong, or not there.
    pub key: Key,
    /// What is wrong.
    pub what: &'static str,
}

/// Answers a query row by row.
///
/// # Errors
///
/// The store's own, and [`RowByRow::inconsistent`] where a row is missing that another one, or the
/// index, leads to.
pub fn answer<S: RowByRow>(store: &S, query: &Query) -> Result<Rows, S::Error> {
    match query {
        Query::Rows(keys) => {
            // Often none is there; if one is, room for all of them is made at once.
            let (mut rows, mut keys) = (Vec::new(), keys.as_slice().iter());
            while let Some(key) = keys.next() {
                let Some(row) = store.row(key)? else { continue };
                if rows.is_empty() {
                    rows.reserve_exact(1 + keys.len());
                }
                rows.push(row.into_owned());
            }
            Ok(Rows::of(rows))
        }
        Query::Due(due) => Ok(Rows { lanes: lanes_due(store, due)?, ..Rows::default() }),
        Query::Deliveries { events, run } => deliveries(store, events, *run),
        Query::Dead { after, limit } => {
            let dead = store.dead_after(after.as_ref()).take(*limit);
            let deliveries = dead.map(|id| dead_event(store, id?)).collect::<Result<_, _>>()?;
            Ok(Rows { deliveries, ..Rows::default() })
        }
        Query::Finished(asked) => finished(store, asked),
        Query::Stats { now } => Ok(Rows { stats: stats(store, *now)?, ..Rows::default() }),
        Query::Walk { table, after, limit } => {
            Ok(Rows::of(owned(store.rows_after(*table, after.as_ref()).take(*limit))?))
        }
    }
}

fn owned<'a, E>(rows: impl Iterator<Item = Result<Cow<'a, Stored>, E>>) -> Result<Vec<Stored>, E> {
    rows.map(|row| row.map(Cow::into_owned)).collect()
}

fn wrong<S: RowByRow, T>(store: &S, key: Key, what: &'static str) -> Result<T, S::Error> {
    Err(store.inconsistent(Inconsistent { key, what }))
}

/// An event, which must be there.
fn event<S: RowByRow>(store: &S, id: EventId) -> Result<EventRow, S::Error> {
    let key = Key::Event(id);
    match store.row(&key)?.map(|row| row.into_owned().record) {
        Some(Record::Event(row)) => Ok(row),
        _ => wrong(store, key, "the index leads to it, and there is no such event"),
    }
}

/// What happened to an event, if anything did.
fn outbox<S: RowByRow>(store: &S, id: EventId) -> Result<Option<(OutboxRow, Revision)>, S::Error> {
    let key = Key::Outbox(id);
    match store.row(&key)?.map(Cow::into_owned) {
        None => Ok(None),
        Some(Stored { record: Record::Outbox(_, row), revision }) => Ok(Some((row, revision))),
        Some(_) => wrong(store, key, "a row of another table lies there"),
    }
}

/// How an event stands.
fn delivery<S: RowByRow>(store: &S, event: EventRow, envelope: bool) -> Result<Delivery, S::Error> {
    let outbox = outbox(store, event.event.id.clone())?;
    Ok(Delivery::new(event, outbox, envelope))
}

/// An event that the index says is dead.
fn dead_event<S: RowByRow>(store: &S, id: EventId) -> Result<Delivery, S::Error> {
    let found = delivery(store, event(store, id)?, false)?;
    if matches!(found.row.state, DeliveryState::Dead(_)) {
        Ok(found)
    } else {
        wrong(store, Key::Outbox(found.id), "the index says that it is dead, and it is not")
    }
}

/// A lane without events, which must be there.
fn lane<S: RowByRow>(store: &S, key: &LaneKey) -> Result<Lane, S::Error> {
    let key = Key::Lane(key.clone());
    match store.row(&key)?.map(Cow::into_owned) {
        Some(Stored { record: Record::Lane(key, row), revision }) => {
            Ok(Lane { key, row, revision, pending: Vec::new() })
        }
        _ => wrong(store, key, "an event or the index leads to it, and there is no such lane"),
    }
}

/// A lane that the index says is due at this time.
fn due_lane<S: RowByRow>(store: &S, at: Millis, key: &LaneKey) -> Result<Lane, S::Error> {
    let lane = lane(store, key)?;
    if lane.row.index_due() == Some(at) {
        Ok(lane)
    } else {
        wrong(store, Key::Lane(lane.key), "the index has it at another time than its row")
    }
}

/// The pending events of a lane, in the order of their sequence.
fn pending<S: RowByRow>(
    store: &S,
    lane: &Lane,
    envelope: bool,
) -> impl Iterator<Item = Result<Delivery, S::Error>> {
    let places = store.places_from(&lane.key, lane.row.head);
    places.filter_map(move |place| {
        let found = place.and_then(|(sequence, id)| {
            let found = delivery(store, event(store, id)?, envelope)?;
            if found.row.lane != lane.key {
                return wrong(store, Key::Outbox(found.id), "the index has it in another lane");
            }
            let state = lane.state(&found.row);
            let pending = matches!(state, EventState::Pending | EventState::Leased);
            // Of the two places of an event that was moved, it stands at the later one.
            Ok((pending && found.row.sequence == sequence).then_some(found))
        });
        found.transpose()
    })
}

/// The destinations that something is due at.
fn destinations<S: RowByRow>(store: &S) -> impl Iterator<Item = Result<Destination, S::Error>> {
    let next = |last: &Result<Destination, S::Error>| {
        store.destination_after(Some(last.as_ref().ok()?)).transpose()
    };
    core::iter::successors(store.destination_after(None).transpose(), next)
}

/// What is due at some destinations at or after a time, in the order of times and then of lanes.
struct Merged<'d, I: Iterator> {
    /// Those of each destination that are left.
    entries: Vec<(&'d Destination, I)>,
    /// The first ones of them, the least on top, each with its place there.
    first: BinaryHeap<Reverse<(Millis, LaneKey, usize)>>,
}

impl<'d, E, I: Iterator<Item = Result<(Millis, OrderingKey), E>>> Merged<'d, I> {
    fn of(
        destinations: &'d [Destination],
        entries: impl Fn(&'d Destination) -> I,
    ) -> Result<Self, E> {
        let entries = destinations.iter().map(|destination| (destination, entries(destination)));
        let entries: Vec<_> = entries.collect();
        let mut merged = Self { first: BinaryHeap::with_capacity(entries.len()), entries };
        (0..destinations.len()).try_for_each(|at| merged.advance(at))?;
        Ok(merged)
    }

    /// Takes the next one of a destination.
    fn advance(&mut self, at: usize) -> Result<(), E> {
        let (destination, entries) = &mut self.entries[at];
        if let Some((due, ordering_key)) = entries.next().transpose()? {
            let key = LaneKey { destination: destination.clone(), ordering_key };
            self.first.push(Reverse((due, key, at)));
        }
        Ok(())
    }

    fn next(&mut self) -> Result<Option<(Millis, LaneKey)>, E> {
        let Some(Reverse((due, key, at))) = self.first.pop() else { return Ok(None) };
        self.advance(at)?;
        Ok(Some((due, key)))
    }
}

fn lanes_due<S: RowByRow>(
    store: &S,
    Due { now, floor, destinations, lanes, run, events, bytes }: &Due,
) -> Result<Vec<Lane>, S::Error> {
    let mut found = Vec::new();
    let (mut events, mut bytes) = (*events, *bytes);
    let at: Vec<Destination> = match destinations {
        Destinations::Only(only) => alloc::vec![only.clone()],
        Destinations::Except(_) => self::destinations(store)
            .filter(|at| at.as_ref().map_or(true, |at| destinations.contains(at)))
            .collect::<Result<_, _>>()?,
    };
    let mut entries = Merged::of(&at, |at| store.due_from(at, *floor))?;
    while found.len() < *lanes
        && let Some((due, key)) = entries.next()?
    {
        if events == 0 || bytes == 0 || due == Millis::MAX {
            break;
        }
        let mut lane = due_lane(store, due, &key)?;
        if due > *now {
            found.push(lane);
            break;
        }
        let most = usize::try_from(lane.row.pending_at_most()).unwrap_or(usize::MAX);
        let mut first = Vec::with_capacity(most.min(*run));
        for next in pending(store, &lane, true).take(*run) {
            let next = next?;
            let size = next.event.as_ref().map_or(0, |event| event.body.bytes().len());
            first.push(next);
            bytes = bytes.saturating_sub(size);
            if bytes == 0 {
                break;
            }
        }
        events = events.saturating_sub(first.len());
        lane.pending = first;
        found.push(lane);
    }
    Ok(found)
}

fn deliveries<S: RowByRow>(store: &S, events: &[EventId], run: usize) -> Result<Rows, S::Error> {
    let mut found = Rows::default();
    for id in events {
        if store.row(&Key::Event(id.clone()))?.is_some() {
            found.deliveries.push(delivery(store, event(store, id.clone())?, false)?);
        }
    }
    let mut keys: Vec<_> = found.deliveries.iter().map(|next| next.row.lane.clone()).collect();
    keys.sort_unstable();
    keys.dedup();
    for key in &keys {
        let mut lane = lane(store, key)?;
        lane.pending = pending(store, &lane, false).take(run).collect::<Result<_, _>>()?;
        found.lanes.push(lane);
    }
    Ok(found)
}

/// Whether an event of an order is pending or dead.
fn is_awaited<S: RowByRow>(store: &S, placed: &PlacedOrder) -> Result<bool, S::Error> {
    for id in &placed.events {
        let Some(stored) = store.row(&Key::Event(id.clone()))? else { continue };
        let Record::Event(row) = stored.into_owned().record else { continue };
        let time = row.event.time;
        let next = delivery(store, row, false)?;
        if lane(store, &next.row.lane)?.state(&next.row).finished_since(time).is_none() {
            return Ok(true);
        }
    }
    Ok(false)
}

fn finished<S: RowByRow>(
    store: &S,
    Finished { table, until, after, limit }: &Finished,
) -> Result<Rows, S::Error> {
    let mut found = Rows::default();
    let mut last = None;
    for (looked, stored) in store.rows_after(*table, after.as_ref()).enumerate() {
        let stored = stored?;
        let full = found.rows.len() + found.deliveries.len() == *limit;
        if full || looked == limit.saturating_mul(LOOKS) {
            found.next = last;
            break;
        }
        last = Some(stored.record.key());
        let since = match &stored.record {
            Record::Request(_, row) => match &row.placed {
                Some(placed) if placed.at <= *until && !is_awaited(store, placed)? => {
                    Some(placed.at)
                }
                Some(_) | None => None,
            },
            Record::Order(id, row) if row.committed_at <= *until => {
                let request = store.row(&Key::Request(row.request.clone()))?;
                let kept = request.is_some_and(|request| request.record.places(id));
                (!kept).then_some(row.committed_at)
            }
            Record::Order(..) => None,
            Record::Lane(key, row) => {
                let idle = row.index_due().is_none() && row.changed_at <= *until;
                let gone = idle && store.places_from(key, 0).next().transpose()?.is_none();
                gone.then_some(row.changed_at)
            }
            Record::Inbox(_, _, row) => (row.state == InboxState::Applied).then_some(row.at),
            Record::Position(_, _, row) => Some(row.at),
            Record::Call(_, _, row) => (row.state == CallState::Done).then_some(row.at),
            Record::Event(row) => {
                let time = row.event.time;
                // None is confirmed before it is committed.
                let outbox = Key::Outbox(row.event.id.clone());
                if time > *until && store.row(&outbox)?.is_none() {
                    continue;
                }
                let next = delivery(store, row.clone(), false)?;
                let since = lane(store, &next.row.lane)?.state(&next.row).finished_since(time);
                if since.is_some_and(|since| since <= *until) {
                    found.deliveries.push(next);
                }
                None
            }
            Record::Outbox(..) | Record::Effect(..) => None,
        };
        if since.is_some_and(|since| since <= *until) {
            found.rows.push(stored.into_owned());
        }
    }
    Ok(found)
}

fn stats<S: RowByRow>(store: &S, now: Millis) -> Result<Stats, S::Error> {
    let mut stats = Stats::default();
    for destination in destinations(store) {
        let destination = destination?;
        for entry in store.due_from(&destination, Millis::new(0)) {
            let (at, ordering_key) = entry?;
            let key = LaneKey { destination: destination.clone(), ordering_key };
            let lane = due_lane(store, at, &key)?;
            let pending = pending(store, &lane, false).collect::<Result<Vec<Delivery>, _>>()?;
            stats.add_lane(now, &lane.row, pending.iter().map(|next| &next.row));
        }
    }
    for id in store.dead_after(None) {
        stats.add_dead(&dead_event(store, id?)?.row);
    }
    Ok(stats)
}
