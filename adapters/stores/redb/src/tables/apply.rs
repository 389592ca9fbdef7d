//! Batches: each guard is checked, then the index and the rows are written.

use alloc::borrow::Cow;
use alloc::vec::Vec;
use core::cell::OnceCell;
use core::mem;
use core::ops::Range;

use redb::{TableError, WriteTransaction};
use twobox::codec;
use twobox::{
    Applied, Batch, Change, DeliveryState, Key, Lane, LaneKey, Query, Record, Revision, Rows, Seen,
    Stored, Table, Write,
};

use super::answer::load;
use super::due::Moves;
use super::load::{Look, Opened, Scratch, Tables};
use super::seal::Seal;
use super::{DEAD, DUE, PLACES, ROWS, Source, place};
use crate::error::{RedbError, shielded};

/// Writes a batch, if all of its guards hold. After an error nothing or a part of it may be
/// written.
pub(crate) fn apply(
    opened: &mut Opened<'_, WriteTransaction>,
    batch: &Batch,
    seen: Option<&Seen<'_>>,
) -> Result<Applied, RedbError> {
    let known = seen.map_or_else(Known::default, |seen| Known::new(seen.query, seen.rows));
    shielded(|| write_all(opened, known, batch))
}

/// Writes what is still to be written before the transaction is committed, or used by others. The
/// flag is raised if a part of it may be left.
pub(crate) fn flush(
    opened: &mut Opened<'_, WriteTransaction>,
    broken: &mut bool,
) -> Result<(), RedbError> {
    let Opened { tables, moves, .. } = opened;
    if moves.is_empty() {
        return Ok(());
    }
    let flushed = shielded(|| {
        let mut due = taken(&mut tables.due, || tables.source.table(DUE))?;
        moves.write(&mut due)?;
        tables.due = due.into();
        Ok(())
    });
    *broken |= flushed.is_err();
    flushed
}

/// Answers a query in a transaction that writes.
pub(crate) fn load_written(
    opened: &mut Opened<'_, WriteTransaction>,
    query: &Query,
    broken: &mut bool,
) -> Result<Rows, RedbError> {
    if matches!(query, Query::Due(_) | Query::Stats { .. }) {
        flush(opened, broken)?;
    }
    load(opened, query)
}

/// Rows that were loaded since anything was written in the transaction, so that they need not be
/// read again. They are asked for in the order of their keys, as the changes of a batch are.
#[derive(Default)]
struct Known<'a> {
    /// Keys that were loaded, whether there are rows or not, and rows that were found, both in the
    /// order of keys.
    asked: &'a [Key],
    found: &'a [Stored],
    /// Lanes in the order of their keys.
    lanes: Vec<&'a Lane>,
    /// Those before these places are before the key that was asked for last.
    next: (usize, usize, usize),
}

impl<'a> Known<'a> {
    fn new(query: &'a Query, rows: &'a Rows) -> Self {
        let (asked, found) = match query {
            Query::Rows(keys) => (keys.as_slice(), rows.rows.as_slice()),
            Query::Due(_)
            | Query::Deliveries { .. }
            | Query::Dead { .. }
            | Query::Finished(_)
            | Query::Stats { .. }
            | Query::Walk { .. } => (&[][..], &[][..]),
        };
        let mut lanes: Vec<&Lane> = rows.lanes.iter().collect();
        lanes.sort_by(|a, b| a.key.cmp(&b.key));
        Self { asked, found, lanes, next: (0, 0, 0) }
    }

    /// The lane of this key, if it is known.
    fn lane(&mut self, key: &Key) -> Option<&'a Lane> {
        let Key::Lane(key) = key else { return None };
        let next = &mut self.next.2;
        *next += self.lanes[*next..].iter().take_while(|lane| lane.key < *key).count();
        self.lanes.get(*next).copied().filter(|lane| lane.key == *key)
    }

    /// The row of this key, or that there is none; nothing if that is not known.
    fn get(&mut self, key: &Key) -> Option<Option<&Stored>> {
        let (asked, found, _) = &mut self.next;
        *found += self.found[*found..].iter().take_while(|row| is_before(row, key)).count();
        if let Some(row) = self.found.get(*found).filter(|row| is_at(row, key)) {
            return Some(Some(row));
        }
        *asked += self.asked[*asked..].iter().take_while(|asked| *asked < key).count();
        (self.asked.get(*asked) == Some(key)).then_some(None)
    }
}

fn is_before(stored: &Stored, key: &Key) -> bool {
    stored.record.cmp_key(key).is_lt()
}

fn is_at(stored: &Stored, key: &Key) -> bool {
    stored.record.cmp_key(key).is_eq()
}

fn write_all(
    Opened { tables, scratch, moves }: &mut Opened<'_, WriteTransaction>,
    mut known: Known<'_>,
    batch: &Batch,
) -> Result<Applied, RedbError> {
    // Taken, so that the rest can be used meanwhile.
    let mut keys = mem::take(&mut scratch.keys);
    keys.clear();
    let mut checked = Vec::with_capacity(batch.changes().len());
    for change in batch.changes() {
        let (key, start) = (change.key(), keys.len());
        codec::encode_key(&key, &mut keys);
        let at = start..keys.len();
        match check(tables, scratch, &mut known, change, &key, &keys[at.clone()])? {
            Some((write, old)) => {
                checked.push(Checked { write, table: key.table(), key: at, old });
            }
            None => {
                scratch.keys = keys;
                return Ok(Applied::Conflict(Some(key)));
            }
        }
    }
    write(tables, moves, &keys, &checked, scratch)?;
    scratch.keys = keys;
    Ok(Applied::Written)
}

/// What stood in the index for a row.
#[derive(Default)]
enum Old {
    #[default]
    Nothing,
    /// The due time of a lane.
    Due(twobox::Millis),
    /// The place of an event, or of an outbox row that was moved.
    Place(Vec<u8>),
    Dead,
}

impl Old {
    fn of(stored: &Stored) -> Self {
        match &stored.record {
            Record::Lane(_, row) => row.index_due().map_or(Self::Nothing, Self::Due),
            Record::Event(row) => Self::Place(place_at(&row.event.lane(), row.sequence)),
            Record::Outbox(_, row) => match row.state {
                DeliveryState::Dead(_) => Self::Dead,
                DeliveryState::Pending if row.moved => {
                    Self::Place(place_at(&row.lane, row.sequence))
                }
                DeliveryState::Pending
                | DeliveryState::Discarded(_)
                | DeliveryState::Cancelled(_) => Self::Nothing,
            },
            Record::Request(..)
            | Record::Order(..)
            | Record::Inbox(..)
            | Record::Effect(..)
            | Record::Position(..)
            | Record::Call(..) => Self::Nothing,
        }
    }
}

fn place_at(lane: &LaneKey, sequence: u64) -> Vec<u8> {
    let mut place = Vec::new();
    place::write(lane, sequence, &mut place);
    place
}

/// A change whose guard holds.
struct Checked<'a> {
    write: Write<'a>,
    table: Table,
    /// Where its key is in the buffer of keys.
    key: Range<usize>,
    old: Old,
}

/// What a change writes, if its guard holds, and what stood in the index before.
fn check<'c>(
    tables: &dyn Look,
    scratch: &mut Scratch,
    known: &mut Known<'_>,
    change: &'c Change,
    key: &Key,
    bytes: &[u8],
) -> Result<Option<(Write<'c>, Old)>, RedbError> {
    if let Some(Lane { row, revision, .. }) = known.lane(key) {
        let old = row.index_due().map_or(Old::Nothing, Old::Due);
        return Ok(change.on_lane(row, *revision).map(|write| (write, old)));
    }
    if let Some(found) = known.get(key) {
        let write = change.on(found);
        return Ok(write.map(|write| (write, found.map_or(Old::Nothing, Old::of))));
    }
    if key.table() == Table::Events {
        return check_event(tables, change, bytes);
    }
    let found = tables.get(key, scratch)?;
    let write = change.on(found.as_ref());
    Ok(write.map(|write| (write, found.as_ref().map_or(Old::Nothing, Old::of))))
}

/// The same for an event, whose body is not read for it.
fn check_event<'c>(
    tables: &dyn Look,
    change: &'c Change,
    id: &[u8],
) -> Result<Option<(Write<'c>, Old)>, RedbError> {
    let place = tables.place_of(id)?;
    let revision = place.as_deref().map(|place| tables.revision_at(place, id)).transpose()?;
    let write = match change {
        Change::Put { expect, record } => {
            expect.holds(revision).then(|| Write::Put(Cow::Borrowed(record), expect.written()))
        }
        Change::Delete { expect, .. } => (revision == Some(*expect)).then_some(Write::Remove),
        Change::Lane { .. } => None,
    };
    Ok(write.map(|write| (write, place.map_or(Old::Nothing, Old::Place))))
}

/// Writes what the index says, and the rows.
fn write(
    tables: &mut Tables<'_, WriteTransaction>,
    moves: &mut Moves,
    keys: &[u8],
    changes: &[Checked<'_>],
    scratch: &mut Scratch,
) -> Result<(), RedbError> {
    // A batch is sorted by table first.
    for changes in changes.chunk_by(|a, b| a.table == b.table) {
        let table = changes[0].table;
        match table {
            Table::Events => write_events(tables, keys, changes, scratch)?,
            Table::Outbox => {
                write_moved(tables, keys, changes, scratch)?;
                write_dead(tables, keys, changes)?;
                write_rows(tables, table, keys, changes, scratch)?;
            }
            Table::Lanes => {
                changes.iter().for_each(|change| change.note_due(moves, keys));
                write_rows(tables, table, keys, changes, scratch)?;
            }
            Table::Requests
            | Table::Orders
            | Table::Inbox
            | Table::Effects
            | Table::Positions
            | Table::Calls => write_rows(tables, table, keys, changes, scratch)?,
        }
    }
    Ok(())
}

impl Checked<'_> {
    /// The row that is written.
    fn put(&self) -> Option<(&Record, Revision)> {
        match &self.write {
            Write::Put(record, revision) => Some((record, *revision)),
            Write::Remove => None,
        }
    }

    /// Notes how a lane moves among those that are due.
    fn note_due(&self, moves: &mut Moves, keys: &[u8]) {
        let old = if let Old::Due(due) = self.old { Some(due) } else { None };
        let new = match self.put() {
            Some((Record::Lane(_, row), _)) => row.index_due(),
            Some(_) | None => None,
        };
        if old != new {
            let lane = &keys[self.key.clone()];
            old.into_iter().for_each(|due| moves.add(due, lane, false));
            new.into_iter().for_each(|due| moves.add(due, lane, true));
        }
    }
}

/// Writes the rows of a table.
fn write_rows(
    tables: &mut Tables<'_, WriteTransaction>,
    table: Table,
    keys: &[u8],
    changes: &[Checked<'_>],
    Scratch { buffer, .. }: &mut Scratch,
) -> Result<(), RedbError> {
    let at = table as usize;
    let mut rows = taken(&mut tables.rows[at], || tables.source.table(ROWS[at]))?;
    for checked in changes {
        let key = &keys[checked.key.clone()];
        let put = checked.put();
        tables.wrote(table, key, put.is_some());
        match put {
            None => drop(rows.remove(key)?),
            Some((record, revision)) => {
                buffer.clear();
                codec::encode_value(record, revision, buffer);
                Seal::of(table).seal(key, buffer);
                rows.insert(key, buffer.as_slice())?;
            }
        }
    }
    tables.rows[at] = rows.into();
    Ok(())
}

/// Writes events: where each stands, and what stands there.
fn write_events(
    tables: &mut Tables<'_, WriteTransaction>,
    keys: &[u8],
    changes: &[Checked<'_>],
    Scratch { buffer, place, .. }: &mut Scratch,
) -> Result<(), RedbError> {
    let at = Table::Events as usize;
    let mut rows = taken(&mut tables.rows[at], || tables.source.table(ROWS[at]))?;
    let mut places = taken(&mut tables.places, || tables.source.table(PLACES))?;
    for checked in changes {
        let id = &keys[checked.key.clone()];
        let new = checked.put();
        tables.wrote(Table::Events, id, new.is_some());
        place.clear();
        if let Some((Record::Event(row), _)) = new {
            place::write(&row.event.lane(), row.sequence, place);
        }
        if let Old::Place(old) = &checked.old
            && (new.is_none() || old != place)
            && places.remove(old.as_slice())?.is_none()
        {
            return Err(place::error(old, "there is no event at its place"));
        }
        let Some((record, revision)) = new else {
            rows.remove(id)?;
            continue;
        };
        buffer.clear();
        place::write_id(id, buffer);
        codec::encode_value(record, revision, buffer);
        Seal::PLACES.seal(place, buffer);
        places.insert(place.as_slice(), buffer.as_slice())?;
        Seal::of(Table::Events).seal(id, place);
        rows.insert(id, place.as_slice())?;
    }
    tables.rows[at] = rows.into();
    tables.places = places.into();
    Ok(())
}

/// Writes the places of events that were moved: nothing stands there but that they are here now.
fn write_moved(
    tables: &mut Tables<'_, WriteTransaction>,
    keys: &[u8],
    changes: &[Checked<'_>],
    Scratch { buffer, .. }: &mut Scratch,
) -> Result<(), RedbError> {
    let new = |checked: &Checked<'_>| match checked.put() {
        Some((Record::Outbox(_, row), _)) if row.moved && row.state == DeliveryState::Pending => {
            Some(place_at(&row.lane, row.sequence))
        }
        Some(_) | None => None,
    };
    for checked in changes {
        let new = new(checked);
        let old = if let Old::Place(old) = &checked.old { Some(old) } else { None };
        if old == new.as_ref() {
            continue;
        }
        let mut places = taken(&mut tables.places, || tables.source.table(PLACES))?;
        if let Some(old) = old
            && places.remove(old.as_slice())?.is_none()
        {
            return Err(place::error(old, "its entry is missing"));
        }
        if let Some(place) = new {
            buffer.clear();
            place::write_id(&keys[checked.key.clone()], buffer);
            Seal::PLACES.seal(&place, buffer);
            places.insert(place.as_slice(), buffer.as_slice())?;
        }
        tables.places = places.into();
    }
    Ok(())
}

/// Writes which events are dead.
fn write_dead(
    tables: &mut Tables<'_, WriteTransaction>,
    keys: &[u8],
    changes: &[Checked<'_>],
) -> Result<(), RedbError> {
    for checked in changes {
        let was = matches!(checked.old, Old::Dead);
        let is = matches!(
            checked.put(),
            Some((Record::Outbox(_, row), _)) if matches!(row.state, DeliveryState::Dead(_))
        );
        if was == is {
            continue;
        }
        let id = &keys[checked.key.clone()];
        let mut dead = taken(&mut tables.dead, || tables.source.table(DEAD))?;
        if is {
            dead.insert(id, ())?;
        } else if dead.remove(id)?.is_none() {
            return Err(place::index_error(id, "its entry is missing"));
        }
        tables.dead = dead.into();
    }
    Ok(())
}

fn taken<T>(
    cell: &mut OnceCell<T>,
    open: impl FnOnce() -> Result<T, TableError>,
) -> Result<T, RedbError> {
    cell.take().map_or_else(|| Ok(open()?), Ok)
}
