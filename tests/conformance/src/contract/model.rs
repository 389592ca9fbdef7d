//! Answers to queries, compared with a model that knows nothing but all rows: it sorts and filters
//! them.

use std::collections::{BTreeMap, BTreeSet};

use twobox::{
    CallState, Change, Counts, Delivery, DeliveryState, Destination, Destinations, Due, EventId,
    EventRow, EventState, Expect, Finished, InboxState, Key, Lane, LaneKey, LaneRow, Lease, Load,
    Millis, OutboxRow, Owner, Query, Reader, Record, Revision, Rows, Stats, Store, Stored, Table,
    Transaction,
};

use super::{all, committed, fill, load, put, rows, same, same_answer, write};
use crate::failure::{Failure, ensure};
use crate::harness::Harness;

/// All rows in the order of their keys, and what they come to.
pub(super) struct Model {
    rows: Vec<(Key, Stored)>,
    lanes: BTreeMap<LaneKey, (LaneRow, Revision)>,
    /// Each event with how it stands, by id.
    events: BTreeMap<EventId, (EventRow, EventState, Delivery)>,
    /// The pending events of each lane, in the order of their sequence.
    pending: BTreeMap<LaneKey, Vec<EventId>>,
    /// The lanes that have events, whatever became of them.
    used: BTreeSet<LaneKey>,
}

impl Model {
    pub(super) fn new(rows: &[Stored]) -> Self {
        let mut sorted: Vec<(Key, Stored)> =
            rows.iter().map(|row| (row.record.key(), row.clone())).collect();
        sorted.sort_by(|a, b| a.0.cmp(&b.0));
        let (mut lanes, mut outbox) = (BTreeMap::new(), BTreeMap::new());
        for Stored { record, revision } in rows {
            match record {
                Record::Lane(key, row) => drop(lanes.insert(key.clone(), (row.clone(), *revision))),
                Record::Outbox(id, row) => {
                    outbox.insert(id.clone(), (row.clone(), *revision));
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
        let events = rows.iter().filter_map(|row| {
            let Record::Event(event) = &row.record else { return None };
            let id = event.event.id.clone();
            let found = outbox.get(&id);
            let delivery = Delivery {
                id: id.clone(),
                row: found.map_or_else(|| OutboxRow::untouched(event), |(row, _)| row.clone()),
                revision: found.map(|(_, revision)| *revision),
                event: None,
            };
            let (lane, _) = lanes.get(&event.event.lane())?;
            Some((id, (event.clone(), EventState::of(lane, &delivery.row), delivery)))
        });
        let events: BTreeMap<EventId, (EventRow, EventState, Delivery)> = events.collect();
        let mut pending: BTreeMap<LaneKey, Vec<EventId>> = BTreeMap::new();
        for (id, (_, state, delivery)) in &events {
            if matches!(state, EventState::Pending | EventState::Leased) {
                pending.entry(delivery.row.lane.clone()).or_default().push(id.clone());
            }
        }
        let place = |id: &EventId| events.get(id).map(|(_, _, found)| found.row.sequence);
        pending.values_mut().for_each(|events| events.sort_by_key(place));
        let used = events.values().map(|(row, _, _)| row.event.lane()).collect();
        Self { rows: sorted, lanes, events, pending, used }
    }

    /// The first pending events of a lane.
    fn pending(&self, key: &LaneKey, run: usize, envelope: bool) -> Vec<Delivery> {
        let events = self.pending.get(key).into_iter().flatten().take(run);
        let found = events.filter_map(|id| {
            let (row, _, delivery) = self.events.get(id)?;
            let event = envelope.then(|| row.event.clone());
            Some(Delivery { event, ..delivery.clone() })
        });
        found.collect()
    }

    fn lane(&self, key: &LaneKey, pending: Vec<Delivery>) -> Option<Lane> {
        let (row, revision) = self.lanes.get(key)?;
        Some(Lane { key: key.clone(), row: row.clone(), revision: *revision, pending })
    }

    /// The lanes that can be claimed.
    fn due(&self, due: &Due) -> Vec<Lane> {
        let times = self.lanes.iter().filter_map(|(key, (row, _))| Some((row.due?, key)));
        let asked = |key: &LaneKey| due.destinations.contains(&key.destination);
        let times = times.filter(|(time, key)| *time >= due.floor && asked(key));
        let mut times: Vec<_> = times.collect();
        times.sort();
        let (mut found, mut events, mut bytes): (Vec<Lane>, usize, usize) = (Vec::new(), 0, 0);
        for (time, key) in times {
            if found.len() == due.lanes || events >= due.events || bytes >= due.bytes {
                break;
            }
            if time > due.now {
                found.extend(self.lane(key, Vec::new()));
                break;
            }
            let mut pending = Vec::new();
            for delivery in self.pending(key, due.run, true) {
                if bytes >= due.bytes {
                    break;
                }
                bytes += delivery.event.as_ref().map_or(0, |event| event.body.bytes().len());
                pending.push(delivery);
            }
            events += pending.len();
            found.extend(self.lane(key, pending));
        }
        found
    }

    fn deliveries(&self, events: &[EventId], run: usize) -> Rows {
        let found = events.iter().filter_map(|id| Some(self.events.get(id)?.2.clone()));
        let deliveries: Vec<Delivery> = found.collect();
        let lanes: BTreeSet<_> = deliveries.iter().map(|next| &next.row.lane).collect();
        let lanes =
            lanes.into_iter().filter_map(|key| self.lane(key, self.pending(key, run, false)));
        Rows { lanes: lanes.collect(), deliveries: deliveries.clone(), ..Rows::default() }
    }

    /// Since when nothing can happen to a row any more.
    fn finished_since(&self, record: &Record) -> Option<Millis> {
        match record {
            Record::Request(_, row) => {
                let placed = row.placed.as_ref()?;
                let mut events = placed.events.iter().filter_map(|id| self.events.get(id));
                let finished =
                    events.all(|(row, state, _)| state.finished_since(row.event.time).is_some());
                finished.then_some(placed.at)
            }
            Record::Order(id, row) => {
                let key = Key::Request(row.request.clone());
                let kept =
                    self.rows.iter().any(|(at, request)| *at == key && request.record.places(id));
                (!kept).then_some(row.committed_at)
            }
            Record::Event(row) => {
                let (_, state, _) = self.events.get(&row.event.id)?;
                match state {
                    EventState::Pending | EventState::Leased | EventState::Dead(_) => None,
                    EventState::Confirmed => Some(row.event.time),
                    EventState::Discarded(at) | EventState::Cancelled(at) => Some(*at),
                }
            }
            Record::Lane(key, row) => {
                let empty = !self.used.contains(key);
                let idle = row.due.is_none() && row.blocked_by.is_none();
                (empty && idle).then_some(row.changed_at)
            }
            Record::Inbox(_, _, row) => (row.state == InboxState::Applied).then_some(row.at),
            Record::Position(_, _, row) => Some(row.at),
            Record::Call(_, _, row) => (row.state == CallState::Done).then_some(row.at),
            Record::Outbox(..) | Record::Effect(..) => None,
        }
    }

    /// What a purge may remove, all of it: the keys of rows of tables with their revisions, and
    /// events.
    fn finished(&self, finished: &Finished) -> (Vec<(Key, Revision)>, Vec<Delivery>) {
        let (mut found, mut deliveries) = (Vec::new(), Vec::new());
        let after = |key: &Key| finished.after.as_ref().is_none_or(|after| key > after);
        for (key, stored) in self.rows.iter().filter(|(key, _)| after(key)) {
            let since = self.finished_since(&stored.record);
            if key.table() != finished.table || since.is_none_or(|since| since > finished.until) {
                continue;
            }
            if let Key::Event(id) = key {
                deliveries.extend(self.events.get(id).map(|(_, _, delivery)| delivery.clone()));
            } else {
                found.push((key.clone(), stored.revision));
            }
        }
        (found, deliveries)
    }

    fn stats(&self, now: Millis) -> Stats {
        let mut stats = Stats::default();
        // The lanes in which an event stands that nothing but a relay keeps waiting.
        let mut behind = BTreeSet::new();
        let mut events: Vec<_> = self.events.values().collect();
        events.sort_by_key(|(_, _, delivery)| (&delivery.row.lane, delivery.row.sequence));
        for (row, state, delivery) in events {
            let mut counts = Counts::default();
            match state {
                EventState::Dead(_) => counts.dead = 1,
                EventState::Pending | EventState::Leased => {
                    let (lane, _) = &self.lanes[&delivery.row.lane];
                    if delivery.row.due > now || lane.blocked_by.is_some() || lane.lease.is_some() {
                        behind.insert(delivery.row.lane.clone());
                    }
                    counts.pending = 1;
                    counts.leased = u64::from(*state == EventState::Leased);
                    counts.due = u64::from(!behind.contains(&delivery.row.lane));
                }
                EventState::Confirmed | EventState::Discarded(_) | EventState::Cancelled(_) => {
                    continue;
                }
            }
            if counts.due == 1 {
                stats.oldest_due = stats.oldest_due.max(Some(now.since(delivery.row.due)));
            }
            let by_type = stats.by_type.entry(row.event.event_type.clone()).or_default();
            for all in [&mut stats.all, by_type] {
                all.pending += counts.pending;
                all.due += counts.due;
                all.leased += counts.leased;
                all.dead += counts.dead;
            }
        }
        stats
    }

    /// The rows whose key is after this one, of a table.
    fn after(&self, table: Table, after: Option<&Key>, limit: usize) -> Vec<Stored> {
        let rows = self
            .rows
            .iter()
            .filter(|(key, _)| key.table() == table && after.is_none_or(|after| key > after));
        rows.map(|(_, row)| row.clone()).take(limit).collect()
    }

    /// The answer to a query, as its documentation defines it; `None` if a store has a choice.
    pub(super) fn answer(&self, query: &Query) -> Option<Rows> {
        Some(match query {
            Query::Rows(keys) => {
                let rows =
                    self.rows.iter().filter(|(key, _)| keys.as_slice().binary_search(key).is_ok());
                Rows::of(rows.map(|(_, row)| row.clone()).collect())
            }
            Query::Due(due) => Rows { lanes: self.due(due), ..Rows::default() },
            Query::Deliveries { events, run } => self.deliveries(events, *run),
            Query::Dead { after, limit } => {
                let dead = self.events.iter().filter(|(id, (_, state, _))| {
                    matches!(state, EventState::Dead(_)) && after.as_ref().is_none_or(|at| *id > at)
                });
                let dead = dead.map(|(_, (_, _, delivery))| delivery.clone()).take(*limit);
                Rows { deliveries: dead.collect(), ..Rows::default() }
            }
            Query::Finished(_) => return None,
            Query::Stats { now } => Rows { stats: self.stats(*now), ..Rows::default() },
            Query::Walk { table, after, limit } => {
                Rows::of(self.after(*table, after.as_ref(), *limit))
            }
        })
    }
}

const LANES: usize = 8;

fn lane_name(lane: usize) -> String {
    // The names do not sort as the due times do, and one is the beginning of another.
    ["m", "mail=>c", "a", "mail=>a", "ma=>z", "A", "mail=>customer-7", "idle"][lane % LANES]
        .to_string()
}

/// How an event is put into a lane: at which sequence, and what its row in the outbox says, if it
/// has one.
fn put_event(
    records: &mut Vec<Record>,
    id: &str,
    lane: &str,
    sequence: u64,
    state: Option<DeliveryState>,
) -> Result<(), Failure> {
    let size = usize::try_from(sequence % 7).unwrap_or(0);
    records.push(rows::event_in(id, lane, sequence, rows::body("x".repeat(size))?)?);
    if let Some(state) = state {
        records.push(rows::outbox(id, lane, sequence, state)?);
    }
    Ok(())
}

/// Lanes that are due at several times, some at the same, one blocked and one idle, with events of
/// every state whose ids do not sort as their sequences do; the lanes have moved past some of them.
/// All of it could have come about by the rules.
fn populate() -> Result<Vec<Record>, Failure> {
    let mut records = Vec::new();
    for lane in 0..LANES {
        let due = [
            Some(50),
            Some(20),
            Some(20),
            None,
            Some(0),
            Some(i64::MAX as u64 - 1),
            Some(40),
            None,
        ][lane];
        let name = lane_name(lane);
        let Record::Lane(key, mut row) = rows::lane(&name, due.map(Millis::new))? else { continue };
        for place in 1..=8_u64 {
            // Sequences are far apart, so that they sort as numbers and not as texts.
            let sequence = place * place * 3;
            let id = format!("{}-{place}-{lane}", (place * 7 + lane as u64 * 3) % 10);
            let state = match (place as usize + lane) % 6 {
                0 => Some(DeliveryState::Pending),
                1 => Some(DeliveryState::Dead(Millis::new(2))),
                2 => Some(
                    [
                        DeliveryState::Discarded(Millis::new(3)),
                        DeliveryState::Cancelled(Millis::new(4)),
                    ][lane % 2],
                ),
                _ => None,
            };
            put_event(&mut records, &id, &name, sequence, state)?;
            // An order of each event and of one that is gone; of some the request is gone too.
            let of = rows::placed(&format!("of {id}"), &["gone", &id])?;
            records.extend(of.into_iter().skip(usize::from(place == 8)));
        }
        // The lane has moved past its first two events, or all of them.
        (row.next, row.confirmed) = (300, 3);
        row.head = if lane == 7 { row.next } else { 27 };
        match lane {
            3 => row.blocked_by = Some(EventId::new("dead").map_err(Failure::new)?),
            2 | 6 => {
                let owner = Owner::new("relay-1").map_err(Failure::new)?;
                let until = row.due.unwrap_or_default();
                row.lease = Some(Lease { owner, until, through: 75 });
            }
            _ => {}
        }
        // One that a redrive has put to the end: its event stands where the lane has moved past.
        let moved = format!("moved-{lane}");
        records.push(rows::event_in(&moved, &name, 1, rows::body("moved")?)?);
        let at = if lane == 7 { 250 } else { 299 };
        if let Record::Outbox(id, outbox) = rows::outbox(&moved, &name, at, DeliveryState::Pending)?
        {
            records.push(Record::Outbox(id, OutboxRow { moved: true, ..outbox }));
        }
        records.push(Record::Lane(key, row));
    }
    // Lanes without events: one is idle, one waits for nothing that is there.
    records.push(rows::lane("empty", None)?);
    records.push(rows::lane("empty and due", Some(Millis::new(30)))?);
    for name in ["a", "B", "c", "ca", "d "] {
        let mut more = rows::one_of_each(name)?;
        // Lanes, events and outbox rows are there already.
        more.retain(|record| {
            !matches!(record.table(), Table::Lanes | Table::Outbox | Table::Events)
        });
        records.extend(more);
        records.extend(rows::finished(name)?);
    }
    Ok(records)
}

/// Every variant, with limits from nothing to more than there is.
fn questions(rows: &[Stored]) -> Result<Vec<Query>, Failure> {
    let mut queries = Vec::new();
    let some = [0, 1, 2, 3, 5, 100];
    let late = i64::MAX as u64 - 1;
    let [ma, mail, mb] = ["ma", "mail", "mb"].map(Destination::new);
    let (ma, mail, mb) =
        (ma.map_err(Failure::new)?, mail.map_err(Failure::new)?, mb.map_err(Failure::new)?);
    let choices = [
        Destinations::Only(Destination::default()),
        Destinations::Only(ma.clone()),
        Destinations::Only(mail.clone()),
        Destinations::Only(mb.clone()),
        Destinations::except([Destination::default()]),
        Destinations::except([mail.clone()]),
        Destinations::except([mb, ma, Destination::default()]),
    ];
    for now in [0, 13, 20, 39, 45, 50, late].map(Millis::new) {
        for lanes in [0, 1, 3, 100] {
            for run in [1, 2, 100] {
                for (events, bytes) in
                    [(0, 100), (1, 100), (4, 100), (100, 1), (100, 5), (100, 12), (100, 1000)]
                {
                    let floor = Millis::new(0);
                    queries.push(Query::Due(Due {
                        destinations: Destinations::ALL,
                        now,
                        floor,
                        lanes,
                        run,
                        events,
                        bytes,
                    }));
                }
            }
        }
        for floor in [1, 20, 21, 40, late].map(Millis::new) {
            let (lanes, run, events, bytes) = (100, 2, 100, 1000);
            let destinations = Destinations::ALL;
            queries.push(Query::Due(Due { destinations, now, floor, lanes, run, events, bytes }));
        }
        for destinations in &choices {
            for (floor, lanes) in [(0, 1), (0, 100), (21, 100)] {
                let (floor, destinations) = (Millis::new(floor), destinations.clone());
                let (run, events, bytes) = (2, 100, 1000);
                let due = Due { destinations, now, floor, lanes, run, events, bytes };
                queries.push(Query::Due(due));
            }
        }
        queries.push(Query::Stats { now });
    }
    let events = rows.iter().filter_map(|row| {
        if let Record::Event(row) = &row.record { Some(row.event.id.clone()) } else { None }
    });
    let mut events: Vec<EventId> = events.collect();
    events.push(EventId::new("nothing").map_err(Failure::new)?);
    events.sort();
    for step in [1, 2, 3, 7, 100] {
        for run in [0, 1, 3, 100] {
            let events = events.iter().cloned().step_by(step).collect();
            queries.push(Query::Deliveries { events, run });
        }
    }
    for limit in some {
        queries.push(Query::Dead { after: None, limit });
        let afters = events.iter().step_by(3).cloned();
        queries.extend(afters.map(|after| Query::Dead { after: Some(after), limit }));
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
        let found = tables.load(&query).map_err(Failure::load(&query))?;
        if let Some(right) = model.answer(&query) {
            same_answer(&format!("{when}, the answer to {query:?}"), &found, &right)?;
        }
    }
    for table in Table::ALL {
        for until in [0, 2, 3, 9, 13, i64::MAX as u64].map(Millis::new) {
            for limit in [1, 3, 100] {
                pages(tables, &model, Finished { table, until, after: None, limit })
                    .map_err(|failure| failure.at(when))?;
            }
        }
    }
    Ok(())
}

/// Goes through what is finished page by page. A store may answer with fewer than there are, so
/// that all pages together count, and that each is in order.
pub(super) fn pages(tables: &mut impl Load, model: &Model, from: Finished) -> Result<(), Failure> {
    let what = format!("what is finished, {from:?}");
    let right = model.finished(&from);
    let mut next = from;
    let (mut found, mut deliveries) = (Vec::new(), Vec::new());
    for _ in 0..=model.rows.len() {
        let page = load(tables, &Query::Finished(next.clone()))?;
        let count = page.rows.len() + page.deliveries.len();
        ensure(count <= next.limit, || format!("{what}: a page of {count}"))?;
        found.extend(page.rows.iter().map(|row| (row.record.key(), row.revision)));
        deliveries.extend(page.deliveries);
        let Some(key) = page.next else {
            same(&what, &found, &right.0)?;
            return same(&format!("{what}, its deliveries"), &deliveries, &right.1);
        };
        ensure(Some(&key) > next.after.as_ref() && key.table() == next.table, || {
            format!("{what}: after {:?} comes {key}, so it has no end", next.after)
        })?;
        next.after = Some(key);
    }
    Err(Failure::new(format_args!("{what}: there are more pages than rows")))
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

/// The same while rows change: each row of the outbox is moved on through all states and goes, each
/// lane moves back and forth over its events and becomes due at other times, and then event after
/// event is removed, and lane after lane. What an adapter keeps to find rows must follow.
///
/// # Errors
///
/// The first answer that differs from the model's.
pub fn answers_follow_every_change<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    fill(&harness, &populate()?)?;
    for round in 0..6_u64 {
        let changes = committed(&harness)?.into_iter().enumerate();
        let changes = changes.filter_map(|(at, row)| changed(round, at, row)).collect();
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
        let gone: BTreeSet<EventId> = Model::new(&rows).events.into_keys().step_by(2).collect();
        let left = |key: &LaneKey| {
            rows.iter().any(|row| {
                let Record::Event(row) = &row.record else { return false };
                row.event.lane() == *key && !gone.contains(&row.event.id)
            })
        };
        let goes = |(at, row): &(usize, &Stored)| match &row.record {
            Record::Event(row) => gone.contains(&row.event.id),
            Record::Outbox(id, _) => gone.contains(id),
            // A lane is there for as long as one of its events is.
            Record::Lane(key, _) => !left(key),
            Record::Request(..)
            | Record::Order(..)
            | Record::Inbox(..)
            | Record::Effect(..)
            | Record::Position(..)
            | Record::Call(..) => at % 2 == 0,
        };
        let gone = rows.iter().enumerate().filter(goes);
        let gone = gone
            .map(|(_, row)| Change::Delete { expect: row.revision, key: row.record.key() })
            .collect();
        let mut tx = harness.store().begin().map_err(Failure::store)?;
        write(&mut tx, gone)?;
        tx.commit().map_err(Failure::store)?;
        compare(
            &mut harness.store().view().map_err(Failure::store)?,
            &format!("after half of the rows was removed, round {round}"),
        )?;
    }
    Ok(())
}

/// How a row changes from round to round.
fn changed(round: u64, at: usize, row: Stored) -> Option<Change> {
    let expect = Expect::Revision(row.revision);
    let now = Millis::new(round);
    match row.record {
        Record::Outbox(id, event) => {
            let state = match event.state {
                DeliveryState::Pending => DeliveryState::Dead(now),
                DeliveryState::Dead(_) => DeliveryState::Discarded(now),
                DeliveryState::Discarded(_) => DeliveryState::Cancelled(now),
                DeliveryState::Cancelled(_) if event.moved => DeliveryState::Pending,
                DeliveryState::Cancelled(_) => {
                    return Some(Change::Delete { expect: row.revision, key: Key::Outbox(id) });
                }
            };
            Some(put(expect, Record::Outbox(id, OutboxRow { state, ..event })))
        }
        Record::Lane(key, lane) => {
            let turn = at + usize::try_from(round).unwrap_or(0);
            let due = [Some(Millis::new(45)), Some(now), lane.due][turn % 3];
            // With something pending it is due, or it is blocked.
            let due = due
                .filter(|_| lane.blocked_by.is_none())
                .or(lane.blocked_by.is_none().then_some(Millis::new(31)));
            let head = [1, 12, 75, 192, 300][turn % 5];
            let blocked_by = lane.blocked_by.clone();
            // A lane with a lease is due when that ends.
            let lease = lane.lease.clone().zip(due).map(|(lease, until)| Lease { until, ..lease });
            Some(put(expect, Record::Lane(key, LaneRow { due, head, blocked_by, lease, ..lane })))
        }
        Record::Request(..)
        | Record::Order(..)
        | Record::Event(_)
        | Record::Inbox(..)
        | Record::Effect(..)
        | Record::Position(..)
        | Record::Call(..) => None,
    }
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
                let walk = Query::Walk { table, after, limit };
                let page = view.load(&walk).map_err(Failure::load(&walk))?.rows;
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
                let right = model.after(table, Some(&after), limit);
                let query = Query::Walk { table, after: Some(after.clone()), limit };
                let found = view.load(&query).map_err(Failure::load(&query))?.rows;
                same(&format!("the answer to {query:?}"), &found, &right)?;
            }
        }
    }
    Ok(())
}
