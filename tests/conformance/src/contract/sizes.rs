//! Sizes at which stores like to cut: how many rows are in an answer or in a batch, how long keys
//! and texts are, how large bodies are.

use twobox::{
    Batch, CallState, Change, Consumer, DeliveryState, EventId, EventRow, Expect, Headers,
    InboxState, LaneRow, Millis, OrderId, Reader, Reason, Record, Revision, Store, Tables,
    Transaction,
};

use super::shadow::Shadow;
use super::values::come_back;
use super::{batch, committed, put, rows, same, write};
use crate::failure::{Failure, ensure};
use crate::harness::Harness;

/// How many rows there are of each kind: more than any page that is common.
const MANY: u64 = 1_100;

/// Rows of every table, many of each, and many events in one lane, many lanes that are due, and
/// many that are dead.
fn many() -> Result<Vec<Record>, Failure> {
    let mut records = Vec::new();
    let due = Some(Millis::new(20));
    for (lane, next) in [("many", MANY + 1), ("many dead", MANY + 1)] {
        if let Record::Lane(key, row) = rows::lane(lane, due)? {
            records.push(Record::Lane(key, LaneRow { head: 1, next, ..row }));
        }
    }
    for n in 1..=MANY {
        // Ids do not sort as sequences do.
        let name = format!("{:04}", n * 7 % (MANY + 1));
        records.push(rows::event_in(&format!("p{name}"), "many", n, rows::body("an event")?)?);
        records.push(rows::event_in(&format!("d{name}"), "many dead", n, rows::body("dead")?)?);
        let dead = DeliveryState::Dead(Millis::new(n * 13 % 101));
        records.push(rows::outbox(&format!("d{name}"), "many dead", n, dead)?);
        let lane = format!("lane {name}");
        if let Record::Lane(key, row) = rows::lane(&lane, Some(Millis::new(n * 11 % 103)))? {
            records.push(Record::Lane(key, LaneRow { head: 1, ..row }));
        }
        records.push(rows::event_in(&format!("l{name}"), &lane, 1, rows::body("one")?)?);
        // These can be removed.
        records.push(rows::lane(&format!("idle {name}"), None)?);
        records.extend(rows::finished(&name)?);
        records.push(rows::order(&name, rows::body("an order")?)?);
        records.push(rows::inbox("loyalty", &name, InboxState::Applied)?);
        records.push(rows::effect("loyalty", &name, rows::body("an effect")?)?);
        records.push(rows::position("loyalty", &name)?);
    }
    Ok(records)
}

/// Batches and answers are whole, however many rows they have: thousands in a batch, and in the
/// answer to each query; and cut where the query says, and nowhere else.
///
/// # Errors
///
/// The first answer that was cut, or batch of which a part was written.
pub fn answers_and_batches_of_any_size<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    let mut shadow = Shadow::default();
    let changes = batch(many()?.into_iter().map(|row| put(Expect::Absent, row)).collect())?;
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    write(&mut tx, changes.changes().to_vec())?;
    tx.commit().map_err(Failure::store)?;
    let _written = shadow.apply(&changes);
    let count = changes.changes().len();
    let when = format!("after a batch of {count} rows");
    let limits = [257, 1_025];
    shadow.check(&mut harness.store().view().map_err(Failure::store)?, &limits, &when)?;
    harness = harness.crash();
    let when = format!("{when} and a crash");
    shadow.check(&mut harness.store().view().map_err(Failure::store)?, &[], &when)?;

    // The guard of the last row does not hold, behind so many that do.
    let stored = shadow.stored();
    for rows in [17, 101, 257, 301, 701, 1_025] {
        let orders = stored.iter().filter(|row| matches!(row.record, Record::Order(..)));
        let mut changes: Vec<Change> = orders
            .take(rows)
            .map(|row| put(Expect::Revision(row.revision), row.record.clone()))
            .collect();
        if let Some(Change::Put { expect, .. }) = changes.last_mut() {
            *expect = Expect::Revision(Revision::from_stored(5));
        }
        let bad = batch(changes)?;
        let mut tx = harness.store().begin().map_err(Failure::store)?;
        let applied = tx.apply(&bad).map_err(Failure::store)?;
        let conflict = matches!(applied, twobox::Applied::Conflict(_));
        ensure(conflict, || format!("in a batch of {rows} rows the last guard was ignored"))?;
    }
    let gone: Batch = batch(
        stored
            .iter()
            .map(|row| Change::Delete { expect: row.revision, key: row.record.key() })
            .collect(),
    )?;
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    write(&mut tx, gone.changes().to_vec())?;
    tx.commit().map_err(Failure::store)?;
    let what = format!("after a batch that removes {count} rows");
    same(&what, &committed(&harness)?, &[])?;
    Shadow::default().check(&mut harness.store().view().map_err(Failure::store)?, &[], &what)
}

/// Lengths around each power of two, and others that are usual, up to the largest.
fn lengths(max: usize) -> Vec<usize> {
    let powers = (0..26).map(|n| 1_usize << n).flat_map(|n| [n - 1, n, n + 1]);
    let mut all: Vec<usize> = powers.chain([10, 100, 191, 200, 250, 254, 1_000, max]).collect();
    all.retain(|length| (1..=max).contains(length));
    all.sort_unstable();
    all.dedup();
    all
}

/// Keys of any length are told apart by their last byte, in each table and each part of a key.
///
/// # Errors
///
/// The first key that was lost, or found in the place of another.
pub fn keys_of_any_length<H: Harness>() -> Result<(), Failure> {
    let mut records = Vec::new();
    let mut place = 1;
    records.push(rows::lane("lane", Some(Millis::new(10)))?);
    for length in lengths(EventId::MAX) {
        for end in ["a", "b"] {
            let name = format!("{}{end}", "k".repeat(length - 1));
            place += 1;
            records.push(rows::event_in(&name, "lane", place, rows::body("an event")?)?);
            records.push(rows::outbox(&name, "lane", place, DeliveryState::Dead(Millis::new(3)))?);
            if length <= OrderId::MAX {
                records.push(rows::order(&name, rows::body("an order")?)?);
                records.push(rows::lane(&name, Some(Millis::new(10)))?);
            }
        }
    }
    // Keys of two parts, which are this long together: a long one and a short one, and both long.
    for length in lengths(Consumer::MAX + EventId::MAX).into_iter().skip(1) {
        let longest = Consumer::MAX.min(length - 1);
        let shortest = length.saturating_sub(EventId::MAX).max(1);
        for first in [shortest, longest] {
            for end in ["a", "b"].into_iter().filter(|_| length > first) {
                let second = format!("{}{end}", "k".repeat(length - first - 1));
                let first = "c".repeat(first);
                records.push(rows::inbox(&first, &second, InboxState::Applied)?);
                records.push(rows::effect(&first, &second, rows::body("an effect")?)?);
                records.push(rows::call(&first, &second, CallState::Started)?);
                if second.len() <= OrderId::MAX {
                    records.push(rows::request(&first, &second)?);
                    records.push(rows::position(&first, &second)?);
                }
            }
            if longest == shortest {
                break;
            }
        }
    }
    come_back::<H>("keys of any length", &records)?;
    // Found in the indexes as well.
    let harness = H::open();
    let mut shadow = Shadow::default();
    let changes = batch(records.into_iter().map(|row| put(Expect::Absent, row)).collect())?;
    let _written = shadow.apply(&changes);
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    write(&mut tx, changes.changes().to_vec())?;
    shadow.check(&mut tx, &[], "with keys of any length")
}

/// Bodies, and reasons, of any length come back whole: around each power of two, and as large as
/// can be.
///
/// # Errors
///
/// The first one that came back otherwise.
pub fn bodies_of_any_size<H: Harness>() -> Result<(), Failure> {
    let body = |length: usize| {
        let bytes: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
        rows::body(bytes)
    };
    let mut records = vec![rows::lane("lane", Some(Millis::new(10)))?];
    for (place, length) in (1..).zip(lengths(70_000)) {
        let name = format!("length-{length:08}");
        records.push(rows::order(&name, body(length)?)?);
        records.push(rows::event_in(&name, "lane", place, body(length)?)?);
        records.push(rows::effect("loyalty", &name, body(length)?)?);
        let dead = rows::outbox(&name, "lane", place, DeliveryState::Dead(Millis::new(3)))?;
        if let Record::Outbox(id, row) = dead {
            let reason = Some(Reason::new("r".repeat(length.min(Reason::MAX))));
            records.push(Record::Outbox(id, twobox::OutboxRow { reason, ..row }));
        }
    }
    come_back::<H>("bodies of any size", &records)?;
    let header = |length: usize| {
        let headers = Headers::new().with("name", "v".repeat(length)).map_err(Failure::new)?;
        let event = rows::event_in(&format!("header {length}"), "lane", 900, body(1)?)?;
        let Record::Event(row) = event else { return Ok(Vec::new()) };
        let event = twobox::Event { headers, ..row.event };
        Ok::<_, Failure>(vec![Record::Event(EventRow { event, ..row })])
    };
    for length in [1, 127, 128, 255, 256, 257, 1_000] {
        let mut records = header(length)?;
        records.push(rows::lane("lane", Some(Millis::new(10)))?);
        come_back::<H>(&format!("a header of {length} bytes"), &records)?;
    }
    for length in [(4 << 20) + 1, twobox::Body::MAX] {
        let name = format!("length-{length}");
        let records = [
            rows::order(&name, body(length)?)?,
            rows::event_in(&name, "lane", 1, body(length)?)?,
            rows::lane("lane", Some(Millis::new(10)))?,
        ];
        come_back::<H>(&format!("bodies of {length} bytes"), &records)?;
    }
    Ok(())
}
