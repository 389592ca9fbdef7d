//! Rows with an index of them, and the answers to queries from both.

use std::collections::{BTreeMap, BTreeSet};

use twobox::{
    CallState, Delivery, Due, EventId, EventState, Finished, InboxState, IndexEntry, Key, Lane,
    LaneKey, Millis, PlacedOrder, Query, Record, Revision, Rows, Stats, Stored, Table,
};

use crate::defect::Defect;

/// Rows, and an index of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disk {
    pub(crate) rows: BTreeMap<Key, Stored>,
    /// Under which text a row is kept, and under which key.
    pub(crate) keys: BTreeMap<(Table, String), Key>,
    pub(crate) due: BTreeSet<(Millis, LaneKey)>,
    pub(crate) places: BTreeMap<(LaneKey, u64), EventId>,
    pub(crate) dead: BTreeSet<EventId>,
    /// How often rows were written that are gone.
    pub(crate) gone: BTreeMap<Key, Revision>,
    pub(crate) own: BTreeMap<String, String>,
    /// Rows whose bytes are wrong.
    pub(crate) damaged: BTreeSet<Key>,
}

/// The text of a key, whose parts no other text has.
pub(crate) fn text(key: &Key) -> String {
    match key {
        Key::Request(key) => format!("{}\0{}", key.scope, key.id),
        Key::Order(id) => id.to_string(),
        Key::Event(id) | Key::Outbox(id) => id.to_string(),
        Key::Lane(key) => key.to_string(),
        Key::Position(consumer, key) => format!("{consumer}\0{key}"),
        Key::Inbox(consumer, id) | Key::Effect(consumer, id) | Key::Call(consumer, id) => {
            format!("{consumer}\0{id}")
        }
    }
}

impl Disk {
    /// The row of a key, as the store finds it.
    pub(crate) fn get(&self, defect: &Defect, key: &Key) -> Option<&Stored> {
        let text = (defect.key)(&text(key));
        self.rows.get(self.keys.get(&(key.table(), text))?)
    }

    pub(crate) fn delivery(&self, id: &EventId, envelope: bool) -> Option<Delivery> {
        let Record::Event(event) = &self.rows.get(&Key::Event(id.clone()))?.record else {
            return None;
        };
        let outbox = self.rows.get(&Key::Outbox(id.clone())).and_then(|stored| {
            let Record::Outbox(_, row) = &stored.record else { return None };
            Some((row.clone(), stored.revision))
        });
        Some(Delivery::new(event.clone(), outbox, envelope))
    }

    fn lane(&self, key: &LaneKey) -> Option<Lane> {
        let Stored { record: Record::Lane(key, row), revision } =
            self.rows.get(&Key::Lane(key.clone()))?
        else {
            return None;
        };
        let (key, row, revision) = (key.clone(), row.clone(), *revision);
        Some(Lane { key, row, revision, pending: Vec::new() })
    }

    fn pending(&self, defect: &Defect, lane: &Lane, envelope: bool) -> Vec<Delivery> {
        let from = (lane.key.clone(), (defect.from)(&lane.row));
        let places = self.places.range(from..=(lane.key.clone(), u64::MAX));
        let found = places.filter_map(|((_, at), id)| {
            let delivery = self.delivery(id, envelope)?;
            (defect.pending)(&lane.row, *at, &delivery.row).then_some(delivery)
        });
        found.collect()
    }

    pub(crate) fn answer(&self, defect: &Defect, query: &Query) -> Rows {
        match query {
            Query::Rows(keys) => {
                let rows = keys.as_slice().iter().filter_map(|key| self.get(defect, key));
                Rows::of(rows.cloned().collect())
            }
            Query::Due(due) => Rows { lanes: self.due(defect, due), ..Rows::default() },
            Query::Deliveries { events, run } => {
                let found = events.iter().filter_map(|id| self.delivery(id, false));
                let deliveries: Vec<Delivery> = found.collect();
                let keys: BTreeSet<&LaneKey> =
                    deliveries.iter().map(|next| &next.row.lane).collect();
                let lanes = keys.into_iter().filter_map(|key| {
                    let lane = self.lane(key)?;
                    let mut pending = self.pending(defect, &lane, false);
                    pending.truncate(*run);
                    Some(Lane { pending, ..lane })
                });
                Rows { lanes: lanes.collect(), deliveries: deliveries.clone(), ..Rows::default() }
            }
            Query::Dead { after, limit } => {
                let dead = self.dead.iter().filter(|id| Some(*id) > after.as_ref());
                let found = dead.filter_map(|id| self.delivery(id, false)).take(*limit);
                Rows { deliveries: found.collect(), ..Rows::default() }
            }
            Query::Finished(finished) => self.finished(finished),
            Query::Stats { now } => Rows { stats: self.stats(defect, *now), ..Rows::default() },
            Query::Walk { table, after, limit } => {
                let rows = self.rows.iter().filter(|(key, _)| key.table() == *table);
                let rows = rows.filter(|(key, _)| Some(*key) > after.as_ref()).take(*limit);
                Rows::of(rows.map(|(_, row)| row.clone()).collect())
            }
        }
    }

    fn due(&self, defect: &Defect, due: &Due) -> Vec<Lane> {
        let (mut found, mut events, mut bytes) = (Vec::new(), due.events, due.bytes);
        let asked = |(time, key): &&(Millis, LaneKey)| {
            *time >= due.floor && due.destinations.contains(&key.destination)
        };
        for (time, key) in self.due.iter().filter(asked) {
            if found.len() == due.lanes || events == 0 || bytes == 0 || *time == Millis::MAX {
                break;
            }
            let Some(mut lane) = self.lane(key) else { continue };
            if *time > due.now {
                found.push(lane);
                break;
            }
            for delivery in self.pending(defect, &lane, true).into_iter().take(due.run) {
                let size = delivery.event.as_ref().map_or(0, |event| event.body.bytes().len());
                lane.pending.push(delivery);
                bytes = bytes.saturating_sub(size);
                if bytes == 0 {
                    break;
                }
            }
            events = events.saturating_sub(lane.pending.len());
            found.push(lane);
        }
        found
    }

    /// Whether an event of an order is pending or dead.
    fn is_awaited(&self, placed: &PlacedOrder) -> bool {
        let mut found = placed.events.iter().filter_map(|id| self.delivery(id, false));
        found.any(|next| {
            let lane = self.lane(&next.row.lane);
            lane.is_some_and(|lane| {
                lane.state(&next.row).finished_since(next.row.committed_at).is_none()
            })
        })
    }

    fn finished(&self, Finished { table, until, after, limit }: &Finished) -> Rows {
        let mut found = Rows::default();
        let rows = self.rows.iter().filter(|(key, _)| key.table() == *table);
        for (key, stored) in rows.filter(|(key, _)| Some(*key) > after.as_ref()) {
            if found.rows.len() + found.deliveries.len() == *limit {
                let last = found.rows.last().map(|stored| stored.record.key());
                let event = found.deliveries.last().map(|next| Key::Event(next.id.clone()));
                found.next = last.or(event);
                break;
            }
            let since = match &stored.record {
                Record::Request(_, row) => {
                    let placed = row.placed.as_ref();
                    placed.filter(|placed| !self.is_awaited(placed)).map(|placed| placed.at)
                }
                Record::Order(id, row) => {
                    let request = self.rows.get(&Key::Request(row.request.clone()));
                    let kept = request.is_some_and(|request| request.record.places(id));
                    (!kept).then_some(row.committed_at)
                }
                Record::Lane(key, row) => {
                    let places = (key.clone(), 0)..=(key.clone(), u64::MAX);
                    let empty = self.places.range(places).next().is_none();
                    (empty && row.index_due().is_none()).then_some(row.changed_at)
                }
                Record::Inbox(_, _, row) => (row.state == InboxState::Applied).then_some(row.at),
                Record::Position(_, _, row) => Some(row.at),
                Record::Call(_, _, row) => (row.state == CallState::Done).then_some(row.at),
                Record::Outbox(..) | Record::Effect(..) => None,
                Record::Event(row) => {
                    let delivery = self.delivery(&row.event.id, false);
                    let state = delivery.as_ref().and_then(|delivery| {
                        Some(EventState::of(&self.lane(&delivery.row.lane)?.row, &delivery.row))
                    });
                    let since = state.and_then(|state| state.finished_since(row.event.time));
                    found
                        .deliveries
                        .extend(delivery.filter(|_| since.is_some_and(|at| at <= *until)));
                    continue;
                }
            };
            if since.is_some_and(|since| since <= *until) {
                found.rows.extend(self.rows.get(key).cloned());
            }
        }
        found
    }

    fn stats(&self, defect: &Defect, now: Millis) -> Stats {
        let mut stats = Stats::default();
        for lane in self.due.iter().filter_map(|(_, key)| self.lane(key)) {
            let pending = self.pending(defect, &lane, false);
            stats.add_lane(now, &lane.row, pending.iter().map(|delivery| &delivery.row));
        }
        let dead = self.dead.iter().filter_map(|id| self.delivery(id, false));
        dead.for_each(|delivery| stats.add_dead(&delivery.row));
        stats
    }

    pub(crate) fn insert(&mut self, entry: IndexEntry) {
        match entry {
            IndexEntry::Due(destination, due, ordering_key) => {
                self.due.insert((due, LaneKey { destination, ordering_key }));
            }
            IndexEntry::Place(lane, sequence, id) => {
                self.places.insert((lane, sequence), id);
            }
            IndexEntry::Dead(id) => drop(self.dead.insert(id)),
        }
    }

    pub(crate) fn remove(&mut self, entry: &IndexEntry) {
        match entry {
            IndexEntry::Due(destination, due, ordering_key) => {
                let (destination, ordering_key) = (destination.clone(), ordering_key.clone());
                self.due.remove(&(*due, LaneKey { destination, ordering_key }));
            }
            IndexEntry::Place(lane, at, _) => drop(self.places.remove(&(lane.clone(), *at))),
            IndexEntry::Dead(id) => drop(self.dead.remove(id)),
        }
    }

    /// The rows of this one, with the index of another one.
    pub(crate) fn with_index_of(&self, other: &Self) -> Self {
        let (due, places, dead) = (other.due.clone(), other.places.clone(), other.dead.clone());
        Self { due, places, dead, ..self.clone() }
    }
}
