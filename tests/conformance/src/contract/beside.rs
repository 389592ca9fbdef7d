//! Transactions and views that are open at the same time.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use twobox::{
    Applied, Change, Expect, Key, LaneRow, Load as _, Millis, Query, Reader, Record, Revision,
    Store, StoreError, Stored, Table, Tables, Transaction,
};

use super::{all, batch, committed, fill, load, put, rows, same, write};
use crate::failure::{Failure, ensure};
use crate::harness::Harness;

/// A view shows one state for as long as it is open, whatever is committed meanwhile: each table,
/// and a lane with what is pending in it.
///
/// # Errors
///
/// What has changed in the view.
pub fn a_view_is_a_snapshot<H: Harness>() -> Result<(), Failure> {
    if !H::VIEWS_MEANWHILE {
        return Ok(());
    }
    let harness = H::open();
    fill(&harness, &rows::one_of_each("there")?)?;
    let queries = || {
        let now = Millis::new(50);
        let all = usize::MAX;
        let floor = Millis::new(0);
        let due = twobox::Due { now, floor, lanes: all, run: all, events: all, bytes: all };
        [Query::Due(due), Query::Stats { now }, Query::Dead { after: None, limit: all }]
    };
    let mut view = harness.store().view().map_err(Failure::store)?;
    let right = all(&mut view)?;
    let answers = queries().map(|query| load(&mut view, &query));
    // What was there is changed or gone, and there is more: one more event in a lane, and a row in
    // each table.
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    let mut changes: Vec<Change> =
        rows::one_of_each("more")?.into_iter().map(|record| put(Expect::Absent, record)).collect();
    changes.push(put(Expect::Absent, rows::event_in("late", "there", 2, rows::body("late")?)?));
    for stored in &right {
        let expect = stored.revision;
        let record = &stored.record;
        changes.push(if let Record::Lane(key, row) = record {
            let row = LaneRow { next: row.next + 1, head: 1, ..row.clone() };
            put(Expect::Revision(expect), Record::Lane(key.clone(), row))
        } else if matches!(record.table(), Table::Orders | Table::Calls) {
            Change::Delete { expect, key: record.key() }
        } else {
            put(Expect::Revision(expect), record.clone())
        });
    }
    write(&mut tx, changes)?;
    let what = "a view, when others have written and not committed";
    same(what, &all(&mut view)?, &right)?;
    tx.commit().map_err(Failure::store)?;
    let what = "a view that was opened before a commit";
    same(what, &all(&mut view)?, &right)?;
    for (query, right) in queries().into_iter().zip(answers) {
        let found = load(&mut view, &query)?;
        super::same_answer(&format!("{what}, the answer to {query:?}"), &found, &right?)?;
    }
    ensure(committed(&harness)? != right, || "the commit did not take".to_string())
}

/// How long a writer waits for the other one to have read. In a store with one writer that other
/// one waits as well, for the transaction.
const PATIENCE: Duration = Duration::from_millis(40);

/// What a writer does with the rows that it has read.
type Writes = fn(&str, Option<&Stored>) -> Result<Record, Failure>;

/// Two writers lose nothing of each other: each reads, waits until the other one has read as well,
/// and writes; one of them waits, or meets a conflict and begins again. So it is for one row that
/// both change, and for two rows.
///
/// # Errors
///
/// What was lost.
pub fn two_writers_lose_nothing<H: Harness>() -> Result<(), Failure> {
    let shared: Writes = |_, found| match found.map(|row| row.record.clone()) {
        Some(Record::Lane(key, row)) => {
            Ok(Record::Lane(key, LaneRow { next: row.next + 1, ..row }))
        }
        Some(_) | None => rows::lane("shared", Some(Millis::new(10))),
    };
    let own: Writes = |name, _| rows::order(name, rows::body("an order")?);
    for (what, key, writes) in
        [("one row that both change", Some("shared"), shared), ("two rows, one of each", None, own)]
    {
        let mut harness = H::open();
        fill(&harness, &[rows::lane("shared", Some(Millis::new(10)))?])?;
        let (to_b, from_a) = channel();
        let (to_a, from_b) = channel();
        let store = harness.store();
        thread::scope(|threads| {
            let a = threads.spawn(move || writer(store, "a", key, writes, &to_b, &from_b));
            let b = threads.spawn(move || writer(store, "b", key, writes, &to_a, &from_a));
            let ended = [a.join(), b.join()];
            ended.into_iter().try_for_each(|ended| {
                ended.unwrap_or_else(|_| Err(Failure::new("the store panicked")))
            })
        })
        .map_err(|failure| failure.at(what))?;
        let right = match key {
            Some(_) => vec![("lanes shared", 3)],
            None => vec![("orders a", 1), ("orders b", 1), ("lanes shared", 1)],
        };
        for when in ["after both commits", "after a crash"] {
            let found: Vec<(String, u64)> = committed(&harness)?
                .iter()
                .map(|row| (row.record.key().to_string(), row.revision.get()))
                .collect();
            ensure(found.iter().map(|(key, at)| (key.as_str(), *at)).eq(right.clone()), || {
                format!(
                    "two writers of {what}, {when}: a write was lost. There is {found:?}, and must \
                     be {right:?} (rows with revisions)"
                )
            })?;
            harness = harness.crash();
        }
    }
    Ok(())
}

fn writer<S: Store>(
    store: &S,
    name: &str,
    key: Option<&str>,
    writes: Writes,
    other: &Sender<()>,
    others: &Receiver<()>,
) -> Result<(), Failure> {
    let conflict = |error: S::Error| match error.is_conflict() {
        true => Ok(()),
        false => Err(Failure::store(error)),
    };
    for try_number in 0..100 {
        let mut tx = match store.begin() {
            Ok(tx) => tx,
            Err(error) => {
                conflict(error)?;
                continue;
            }
        };
        let key = match key {
            Some(lane) => Key::Lane(twobox::OrderingKey::new(lane).map_err(Failure::new)?),
            None => Key::Order(twobox::OrderId::new(name).map_err(Failure::new)?),
        };
        let found = match tx.load(&Query::rows([key])) {
            Ok(found) => found.rows,
            Err(error) => {
                conflict(error)?;
                continue;
            }
        };
        if try_number == 0 {
            let _other_is_done = other.send(());
            let _it_waits = others.recv_timeout(PATIENCE);
        }
        let expect = Expect::from(found.first().map(|row| row.revision));
        let record = writes(name, found.first())?;
        match tx.apply(&batch(vec![put(expect, record)])?) {
            Ok(Applied::Written) => match tx.commit() {
                Ok(()) => return Ok(()),
                Err(error) => conflict(error)?,
            },
            Ok(Applied::Conflict(_)) => {}
            Err(error) => conflict(error)?,
        }
    }
    Err(Failure::new(format_args!("writer {name} has met nothing but conflicts, 100 times")))
}

/// A row that was written hundreds of times has the revision of its last write.
///
/// # Errors
///
/// The first revision that is wrong.
pub fn revisions_go_on<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    let record = rows::order("row", rows::body("an order")?)?;
    let mut expect = Expect::Absent;
    for writes in 1..=300_u64 {
        let mut tx = harness.store().begin().map_err(Failure::store)?;
        write(&mut tx, vec![put(expect, record.clone())])
            .map_err(|failure| failure.at(format_args!("write {writes} of one row")))?;
        tx.commit().map_err(Failure::store)?;
        expect = Expect::Revision(Revision::from_stored(writes));
    }
    let right = [Stored { record, revision: Revision::from_stored(300) }];
    same("after 300 writes of a row", &committed(&harness)?, &right)?;
    harness = harness.crash();
    same("after 300 writes of a row and a crash", &committed(&harness)?, &right)
}
