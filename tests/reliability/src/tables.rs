//! What must be true between the tables of one store at any moment, whatever happened before (P1 to
//! P6).
//!
//! [`check`] also puts every question that an index answers, and compares the answer with one that
//! is made of the rows alone: what an index loses would otherwise be an event that nobody delivers
//! (P3).

use std::collections::{BTreeMap, BTreeSet};

use std::time::Duration;

use thiserror::Error;
use twobox::{
    Delivery, DeliveryState, Destinations, Due, EventRow, EventState, InboxState, Key, Lane,
    LaneKey, Load, Millis, Query, Record, Stats, Stored, Table,
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
            let page = tables.walk(table, after.take(), PAGE)?;
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
        Record::Event(EventRow { event, sequence, .. }) => {
            let order = there(Key::Order(event.order.clone())).is_some();
            demand(order, || format!("{key} is there without its order {}", event.order))?;
            let lane = there(Key::Lane(event.lane()));
            let given = matches!(lane, Some(Record::Lane(_, lane)) if *sequence < lane.next);
            demand(given, || format!("{key} has a place that no lane has given"))?;
        }
        Record::Outbox(id, row) => {
            match there(Key::Event(id.clone())) {
                Some(Record::Event(event)) => {
                    let same = row.lane == event.event.lane()
                        && row.event_type == event.event.event_type
                        && row.committed_at == event.event.time
                        && (row.moved || row.sequence == event.sequence);
                    demand(same, || format!("{key} is of another event than its envelope"))?;
                }
                Some(_) | None => demand(false, || format!("{key} has lost its envelope"))?,
            }
            let lane = there(Key::Lane(row.lane.clone()));
            let given = matches!(lane, Some(Record::Lane(_, lane)) if row.sequence < lane.next);
            demand(given, || format!("{key} has a place that no lane has given"))?;
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
    let (lanes, dead) = standing(rows);
    for lane in lanes.values() {
        let places: BTreeSet<u64> = lane.pending.iter().map(|next| next.row.sequence).collect();
        demand(places.len() == lane.pending.len(), || {
            format!("two events stand at one place of lane {}", lane.key)
        })?;
        // P3: what waits in a lane will be claimed, unless the lane waits for an operator.
        let due = !lane.pending.is_empty() && lane.row.blocked_by.is_none();
        // A lane whose last events were cancelled may be looked at once for nothing.
        let looked_at = lane.row.due.is_some() && lane.row.head < lane.row.next;
        demand(lane.row.due.is_some() == due || looked_at, || {
            format!("lane {} is due at {:?}; it has {due}", lane.key, lane.row.due)
        })?;
    }

    let mut due: Vec<&Lane> = lanes.values().filter(|lane| lane.row.due.is_some()).collect();
    due.sort_by_key(|lane| (lane.row.due, &lane.key));
    let most = usize::MAX;
    let all = Due {
        destinations: Destinations::ALL,
        now: Millis::MAX.before(Duration::from_millis(1)),
        floor: Millis::new(0),
        lanes: most,
        run: most,
        events: most,
        bytes: most,
    };
    let answer = tables.load(&Query::Due(all))?.lanes;
    demand(answer.iter().eq(due.iter().copied()), || {
        format!("the lanes that are due are {answer:?}, but by the rows {due:?}")
    })?;

    let answer = tables.load(&Query::Dead { after: None, limit: most })?.deliveries;
    demand(answer == dead, || format!("{answer:?} are dead, but by the rows {dead:?}"))?;

    let mut stats = Stats::default();
    let now = Millis::new(0);
    for lane in lanes.values() {
        stats.add_lane(now, &lane.row, lane.pending.iter().map(|next| &next.row));
    }
    dead.iter().for_each(|next| stats.add_dead(&next.row));
    let answer = tables.stats(now)?;
    demand(answer == stats, || format!("it counts {answer:?}, but by the rows {stats:?}"))
}

/// All lanes with all that is pending in them, and what is dead, as the rows say.
fn standing(rows: &[Stored]) -> (BTreeMap<LaneKey, Lane>, Vec<Delivery>) {
    let mut lanes = BTreeMap::new();
    let mut outbox = BTreeMap::new();
    for stored in rows {
        match &stored.record {
            Record::Lane(key, row) => {
                let (row, revision) = (row.clone(), stored.revision);
                let lane = Lane { key: key.clone(), row, revision, pending: Vec::new() };
                lanes.insert(key.clone(), lane);
            }
            Record::Outbox(id, row) => {
                outbox.insert(id.clone(), (row.clone(), stored.revision));
            }
            Record::Request(..)
            | Record::Order(..)
            | Record::Event(_)
            | Record::Inbox(..)
            | Record::Effect(..)
            | Record::Position(..)
            | Record::Call(..) => {}
        }
    }
    let mut dead = Vec::new();
    for stored in rows {
        let Record::Event(event) = &stored.record else { continue };
        let found = outbox.get(&event.event.id).cloned();
        let delivery = Delivery::new(event.clone(), found.clone(), true);
        if let DeliveryState::Dead(_) = delivery.row.state {
            dead.push(Delivery::new(event.clone(), found, false));
        }
        let Some(lane) = lanes.get_mut(&event.event.lane()) else { continue };
        if let EventState::Pending | EventState::Leased = lane.state(&delivery.row) {
            lane.pending.push(delivery);
        }
    }
    for lane in lanes.values_mut() {
        lane.pending.sort_by_key(|next| next.row.sequence);
    }
    (lanes, dead)
}
