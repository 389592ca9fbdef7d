//! What the traits of the core ask of every store, checked without the rules: guards, revisions,
//! commit and rollback, answers to queries, and values that stores like to spoil.

mod model;
mod rows;
mod values;

use twobox::{
    Applied, Batch, Change, Expect, Key, Load, Query, Reader, Record, Revision, Store, Stored,
    Table, Tables, Transaction,
};

use crate::failure::{Failure, ensure};
use crate::harness::Harness;

pub use model::{answers_are_those_of_the_model, answers_follow_every_change, walk_in_pages};
pub use values::{
    any_bytes_in_bodies, every_state_comes_back, numbers_at_their_limits, texts_at_their_limits,
};

/// Calls a macro with the names of all contract tests: `each_contract!(callback, anything)`.
#[doc(hidden)]
#[macro_export]
macro_rules! each_contract {
    ($callback:path, $($given:tt)*) => {
        $callback! {
            { $($given)* }
            a_broken_guard_stops_the_whole_batch revisions_count_writes what_is_not_committed_is_not_there
            what_is_committed_stays reads_its_own_writes answers_are_those_of_the_model answers_follow_every_change
            walk_in_pages any_bytes_in_bodies texts_at_their_limits numbers_at_their_limits every_state_comes_back
        }
    };
}

/// A change that writes a row.
pub(crate) fn put(expect: Expect, record: Record) -> Change {
    Change::Put { expect, record }
}

/// Makes a batch of changes that name each row once.
pub(crate) fn batch(changes: Vec<Change>) -> Result<Batch, Failure> {
    Batch::of(changes).map_err(Failure::new)
}

/// Applies changes that must succeed.
pub(crate) fn write(tx: &mut impl Tables, changes: Vec<Change>) -> Result<(), Failure> {
    match tx.apply(&batch(changes)?).map_err(Failure::store)? {
        Applied::Written => Ok(()),
        Applied::Conflict(key) => Err(Failure::new(format_args!(
            "the row {key} is as expected, but apply reports a conflict"
        ))),
    }
}

/// Writes records that are not there yet, and commits.
pub(crate) fn fill<H: Harness>(harness: &H, records: &[Record]) -> Result<(), Failure> {
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    write(&mut tx, records.iter().cloned().map(|record| put(Expect::Absent, record)).collect())?;
    tx.commit().map_err(Failure::store)
}

/// All rows, table by table, with their revisions.
pub(crate) fn all(tables: &mut impl Load) -> Result<Vec<Stored>, Failure> {
    let mut rows = Vec::new();
    for table in Table::ALL {
        let walk = Query::Walk { table, after: None, limit: 100_000 };
        rows.extend(tables.load(&walk).map_err(Failure::store)?.into_vec());
    }
    Ok(rows)
}

/// All rows that are committed.
pub(crate) fn committed<H: Harness>(harness: &H) -> Result<Vec<Stored>, Failure> {
    all(&mut harness.store().view().map_err(Failure::store)?)
}

/// Compares rows, and says where they begin to differ.
pub(crate) fn same(what: &str, found: &[Stored], right: &[Stored]) -> Result<(), Failure> {
    ensure(found == right, || {
        let at = found.iter().zip(right).position(|(found, right)| found != right);
        let at = at.unwrap_or_else(|| found.len().min(right.len()));
        let text = |rows: &[Stored]| {
            rows.get(at).map_or("nothing".to_string(), |row| short(&format!("{row:?}")))
        };
        let (count, other) = (found.len(), right.len());
        format!(
            "{what}: {count} rows, {other} are right; row {} is\n  {}\nand must be\n  {}",
            at + 1,
            text(found),
            text(right)
        )
    })
}

fn short(text: &str) -> String {
    if text.chars().count() > 400 {
        text.chars().take(400).chain("...".chars()).collect()
    } else {
        text.to_string()
    }
}

/// Every guard is checked before anything is written: one that does not hold, wherever it stands in
/// the batch, stops all of it and its key is returned. This holds for a row that should be absent
/// and is there, one that should be there and is absent, and one at another revision, in every
/// table, for a put and for a delete.
///
/// # Errors
///
/// The first batch that was treated wrongly.
pub fn a_broken_guard_stops_the_whole_batch<H: Harness>() -> Result<(), Failure> {
    let harness = H::open();
    let (there, free) = (rows::one_of_each("there")?, rows::one_of_each("zfree")?);
    fill(&harness, &there)?;
    let right = committed(&harness)?;
    for at in 0..there.len() {
        let (old, new) = (&there[at], &free[at]);
        let wrong = Revision::from_stored(2);
        let bad = [
            put(Expect::Absent, old.clone()),
            put(Expect::Revision(wrong), old.clone()),
            put(Expect::Revision(Revision::FIRST), new.clone()),
            Change::Delete { expect: wrong, key: old.key() },
            Change::Delete { expect: Revision::FIRST, key: new.key() },
        ];
        for change in bad {
            // Around the bad change, all other rows are changed rightly: updated, inserted and
            // removed.
            let others = (0..there.len()).filter(|other| *other != at).flat_map(|other| {
                let update = match other % 2 {
                    0 => put(Expect::Revision(Revision::FIRST), there[other].clone()),
                    _ => Change::Delete { expect: Revision::FIRST, key: there[other].key() },
                };
                [update, put(Expect::Absent, free[other].clone())]
            });
            let key = change.key();
            let what = format!("a batch whose change of {key} expects {:?}", change.expect());
            let bad = batch(others.chain([change]).collect())?;
            let mut tx = harness.store().begin().map_err(Failure::store)?;
            let applied = tx.apply(&bad).map_err(Failure::store)?;
            ensure(applied == Applied::Conflict(key.clone()), || {
                format!("{what} must be a conflict at this row, not {applied:?}")
            })?;
            same(&format!("{what} must write nothing"), &all(&mut tx)?, &right)?;
            tx.commit().map_err(Failure::store)?;
            same(
                &format!("{what} must write nothing, also when the transaction is committed"),
                &committed(&harness)?,
                &right,
            )?;
        }
    }
    Ok(())
}

/// A row begins with revision 1, and each write adds 1; a row that was deleted begins anew.
///
/// # Errors
///
/// The first revision that is wrong.
pub fn revisions_count_writes<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    for record in rows::one_of_each("row")? {
        let key = record.key();
        let keys = Query::rows([key.clone()]);
        for round in 0..2 {
            for writes in 1..=3_u64 {
                let expect = if writes == 1 {
                    Expect::Absent
                } else {
                    Expect::Revision(Revision::from_stored(writes - 1))
                };
                let mut tx = harness.store().begin().map_err(Failure::store)?;
                write(&mut tx, vec![put(expect, record.clone())])?;
                tx.commit().map_err(Failure::store)?;
                let mut view = harness.store().view().map_err(Failure::store)?;
                let found: Vec<u64> = view
                    .load(&keys)
                    .map_err(Failure::store)?
                    .as_slice()
                    .iter()
                    .map(|row| row.revision.get())
                    .collect();
                ensure(found == [writes], || {
                    format!(
                        "{key}: after write {writes} in round {round} its revision is {found:?}"
                    )
                })?;
            }
            let mut tx = harness.store().begin().map_err(Failure::store)?;
            write(
                &mut tx,
                vec![Change::Delete { expect: Revision::from_stored(3), key: key.clone() }],
            )?;
            tx.commit().map_err(Failure::store)?;
            harness = harness.crash();
            let found = committed(&harness)?;
            ensure(found.is_empty(), || format!("{key} was deleted and is still there"))?;
        }
    }
    Ok(())
}

/// A transaction that is dropped leaves nothing, neither before nor after a crash, and its rows are
/// not visible to others while it is open.
///
/// # Errors
///
/// What was there.
pub fn what_is_not_committed_is_not_there<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    fill(&harness, &rows::one_of_each("there")?)?;
    let right = committed(&harness)?;
    for touch in 0..3 {
        let mut tx = harness.store().begin().map_err(Failure::store)?;
        let changes = match touch {
            0 => rows::one_of_each("new")?
                .into_iter()
                .map(|record| put(Expect::Absent, record))
                .collect(),
            1 => right
                .iter()
                .map(|row| put(Expect::Revision(row.revision), row.record.clone()))
                .collect(),
            _ => right
                .iter()
                .map(|row| Change::Delete { expect: row.revision, key: row.record.key() })
                .collect(),
        };
        write(&mut tx, changes)?;
        if H::VIEWS_MEANWHILE {
            same("while a transaction is open", &committed(&harness)?, &right)?;
        }
        drop(tx);
        same("after a transaction was dropped", &committed(&harness)?, &right)?;
        harness = harness.crash();
        same("after a transaction was dropped, and a crash", &committed(&harness)?, &right)?;
    }
    Ok(())
}

/// A transaction that was committed is there as a whole, before and after a crash.
///
/// # Errors
///
/// What was not there.
pub fn what_is_committed_stays<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    let mut right = Vec::new();
    for name in ["first", "second", "third"] {
        fill(&harness, &rows::one_of_each(name)?)?;
        right.extend(
            rows::one_of_each(name)?
                .into_iter()
                .map(|record| Stored { record, revision: Revision::FIRST }),
        );
        right.sort_by_cached_key(|row: &Stored| row.record.key());
        same("after a commit", &committed(&harness)?, &right)?;
        harness = harness.crash();
        same("after a commit and a crash", &committed(&harness)?, &right)?;
    }
    Ok(())
}

/// Within a transaction every later load and apply sees what was applied before.
///
/// # Errors
///
/// What was not seen.
pub fn reads_its_own_writes<H: Harness>() -> Result<(), Failure> {
    let harness = H::open();
    let records = rows::one_of_each("row")?;
    let keys: Vec<Key> = records.iter().map(Record::key).collect();
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    let mut expect = Expect::Absent;
    for writes in 1..=3_u64 {
        write(&mut tx, records.iter().cloned().map(|record| put(expect, record)).collect())?;
        let revision = Revision::from_stored(writes);
        let right: Vec<Stored> =
            records.iter().cloned().map(|record| Stored { record, revision }).collect();
        let found = tx.load(&Query::rows(keys.clone())).map_err(Failure::store)?.into_vec();
        same("within the transaction that wrote them", &found, &right)?;
        expect = Expect::Revision(revision);
    }
    let revision = Revision::from_stored(3);
    write(
        &mut tx,
        keys.iter().cloned().map(|key| Change::Delete { expect: revision, key }).collect(),
    )?;
    same("within the transaction that removed them", &all(&mut tx)?, &[])?;
    write(&mut tx, records.iter().cloned().map(|record| put(Expect::Absent, record)).collect())?;
    tx.commit().map_err(Failure::store)?;
    ensure(committed(&harness)?.len() == records.len(), || {
        "rows that were removed and written again are missing".to_string()
    })
}
