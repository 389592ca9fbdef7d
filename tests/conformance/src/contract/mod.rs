//! What the traits of the core ask of every store, checked without the rules: guards, revisions,
//! commit and rollback, answers to queries, and values that stores like to spoil.

mod beside;
mod compare;
mod damage;
mod drivers;
mod model;
pub(crate) mod rows;
mod shadow;
mod sizes;
mod states;
mod values;

use twobox::{
    Applied, Batch, Change, Destinations, Due, EventId, Expect, Key, LaneEdit, LaneKey, LaneRow,
    Lease, Load, Millis, Owner, Query, Reader, Record, Revision, Rows, Store, Stored, Table,
    Tables, Transaction,
};

use crate::failure::{Failure, ensure, short};
use crate::harness::Harness;

pub use beside::{
    a_view_is_a_snapshot, an_answer_is_of_one_moment, revisions_go_on, two_writers_lose_nothing,
};
pub(crate) use compare::{same, same_answer};
pub use damage::{a_damaged_row_is_an_error, another_format_is_refused};
pub use drivers::{
    a_panic_leaves_nothing, own_rows_are_kept_as_the_harness_says, readings_are_answers,
    run_writes_once, transact_ends_as_its_work_says, write_commits_what_its_work_wrote,
};
pub use model::{answers_are_those_of_the_model, answers_follow_every_change, walk_in_pages};
pub use sizes::{answers_and_batches_of_any_size, bodies_of_any_size, keys_of_any_length};
pub(crate) use states::Fixed;
pub use states::{any_change_is_followed, every_state_follows_every_state};
pub use values::{
    any_bytes_in_bodies, columns_are_kept_apart, every_state_comes_back, numbers_at_their_limits,
    texts_at_their_limits,
};

/// Calls a macro with the names of all contract tests: `each_contract!(callback, anything)`.
#[doc(hidden)]
#[macro_export]
macro_rules! each_contract {
    ($callback:path, $($given:tt)*) => {
        $callback! {
            { $($given)* }
            a_broken_guard_stops_the_whole_batch revisions_count_writes
            what_is_not_committed_is_not_there what_is_committed_stays reads_its_own_writes
            answers_are_those_of_the_model answers_follow_every_change
            a_lane_changes_under_its_token walk_in_pages any_bytes_in_bodies texts_at_their_limits
            numbers_at_their_limits every_state_comes_back every_state_follows_every_state
            any_change_is_followed transact_ends_as_its_work_says run_writes_once
            write_commits_what_its_work_wrote a_panic_leaves_nothing
            own_rows_are_kept_as_the_harness_says a_view_is_a_snapshot two_writers_lose_nothing
            revisions_go_on answers_and_batches_of_any_size keys_of_any_length bodies_of_any_size
            columns_are_kept_apart readings_are_answers
            an_answer_is_of_one_moment
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
        Applied::Conflict(key) => {
            let at = key.map_or_else(String::new, |key| format!(" at {key}"));
            let what = "all rows are as expected, but apply reports a conflict";
            Err(Failure::new(format_args!("{what}{at}")))
        }
    }
}

/// Writes records that are not there yet, and commits.
pub(crate) fn fill<H: Harness>(harness: &H, records: &[Record]) -> Result<(), Failure> {
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    write(&mut tx, records.iter().cloned().map(|record| put(Expect::Absent, record)).collect())?;
    tx.commit().map_err(Failure::store)
}

/// Answers a query, which must not fail.
pub(crate) fn load(tables: &mut impl Load, query: &Query) -> Result<Rows, Failure> {
    tables.load(query).map_err(Failure::load(query))
}

/// All rows, table by table, with their revisions.
pub(crate) fn all(tables: &mut impl Load) -> Result<Vec<Stored>, Failure> {
    let mut rows = Vec::new();
    for table in Table::ALL {
        let walk = Query::Walk { table, after: None, limit: 100_000 };
        rows.extend(load(tables, &walk)?.rows);
    }
    Ok(rows)
}

/// All rows that are committed.
pub(crate) fn committed<H: Harness>(harness: &H) -> Result<Vec<Stored>, Failure> {
    all(&mut harness.store().view().map_err(Failure::store)?)
}

/// Every guard is checked before anything is written: one that does not hold, wherever it stands in
/// the batch, stops all of it, and its key is returned if the store knows which it is. This holds
/// for a row that should be absent and is there, one that should be there and is absent, and one at
/// another revision, in every table, for a put and for a delete.
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
            let what = format!("a batch with the bad {}", short(&change));
            let bad = batch(others.chain([change]).collect())?;
            let mut tx = harness.store().begin().map_err(Failure::store)?;
            let applied = tx.apply(&bad).map_err(Failure::store)?;
            let right_key = [Applied::Conflict(Some(key)), Applied::Conflict(None)];
            ensure(right_key.contains(&applied), || {
                format!("{what} must be a conflict at this row, not {applied:?}")
            })?;
            // After a conflict a transaction is over.
            drop(tx);
            same(&format!("{what} must write nothing"), &committed(&harness)?, &right)?;
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
                    .map_err(Failure::load(&keys))?
                    .rows
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

/// A change of a lane under its lease is guarded by the token and not by the revision: it is
/// written though the row was written since, in the same batch as other changes, and its revision
/// grows by one. Under another token, or without a lease, it is a conflict.
///
/// # Errors
///
/// The first change that was treated wrongly.
pub fn a_lane_changes_under_its_token<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    let Record::Lane(key, row) = rows::lane("lane", Some(Millis::new(20)))? else { return Ok(()) };
    let owner = Owner::new("relay-1").map_err(Failure::new)?;
    let lease = Some(Lease { owner, until: Millis::new(20), through: 8 });
    let leased = LaneRow { lease, token: 5, ..row };
    let other = rows::lane("other", Some(Millis::new(20)))?;
    let ends = rows::lane_key("ends")?;
    let last = Record::Lane(ends.clone(), leased.clone());
    fill(&harness, &[Record::Lane(key.clone(), leased.clone()), other, last])?;
    let at = Millis::new(15);
    let change = |lane: &str, token, edit: LaneEdit| {
        let key = rows::lane_key(lane)?;
        Ok(Change::Lane { key, token, edit, at })
    };
    let renew = || LaneEdit::Renew { until: Millis::new(40) };
    let freed = |head, blocked_by| {
        let due = Millis::new(30);
        LaneEdit::Free { head, confirmed: head - 1, starts: 0, due, blocked_by }
    };
    let free = || freed(6, None);
    let shorter = || LaneEdit::Renew { until: Millis::new(30) };
    // An append meanwhile.
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    let appended = LaneRow { next: leased.next + 1, ..leased.clone() };
    let append = Record::Lane(key.clone(), appended.clone());
    write(&mut tx, vec![put(Expect::Revision(Revision::FIRST), append)])?;
    tx.commit().map_err(Failure::store)?;
    let right = committed(&harness)?;
    let bad = [
        change("lane", 4, renew())?,
        change("lane", 6, free())?,
        change("other", 5, free())?,
        change("nobody", 5, renew())?,
        change("lane", 5, freed(appended.next + 1, None))?,
    ];
    for bad in bad {
        let what = format!("a batch with the bad {bad:?}");
        let good = put(Expect::Absent, rows::order("order", rows::body("an order")?)?);
        let bad = batch(vec![good, bad])?;
        let mut tx = harness.store().begin().map_err(Failure::store)?;
        let applied = tx.apply(&bad).map_err(Failure::store)?;
        ensure(matches!(applied, Applied::Conflict(_)), || format!("{what} must be a conflict"))?;
        drop(tx);
        same(&format!("{what} must write nothing"), &committed(&harness)?, &right)?;
    }
    // With nothing left in it, or blocked, it is not due any more.
    let dead = Some(EventId::new("dead").map_err(Failure::new)?);
    for edit in [freed(leased.next, None), freed(6, dead)] {
        let what = format!("a lane after {edit:?}, which is not due any more");
        let row = leased.edited(5, &edit, at).ok_or_else(|| Failure::new("the token is right"))?;
        let mut tx = harness.store().begin().map_err(Failure::store)?;
        write(&mut tx, vec![change("ends", 5, edit)?])?;
        let keys = Query::rows([Key::Lane(ends.clone())]);
        let record = Record::Lane(ends.clone(), row);
        let right = [Stored { record, revision: Revision::FIRST.next() }];
        same(&what, &load(&mut tx, &keys)?.rows, &right)?;
    }
    let mut row = appended;
    for (writes, edit) in (3..).zip([renew(), shorter(), free()]) {
        let mut tx = harness.store().begin().map_err(Failure::store)?;
        let order = rows::order(&format!("order-{writes}"), rows::body("an order")?)?;
        let what = format!("a lane after {edit:?}");
        row = row.edited(5, &edit, at).ok_or_else(|| Failure::new("the token is right"))?;
        write(&mut tx, vec![change("lane", 5, edit)?, put(Expect::Absent, order)])?;
        let revision = Revision::from_stored(writes);
        let right = [Stored { record: Record::Lane(key.clone(), row.clone()), revision }];
        let keys = Query::rows([Key::Lane(key.clone())]);
        same(&what, &tx.load(&keys).map_err(Failure::load(&keys))?.rows, &right)?;
        tx.commit().map_err(Failure::store)?;
        harness = harness.crash();
        let mut view = harness.store().view().map_err(Failure::store)?;
        same(&what, &view.load(&keys).map_err(Failure::load(&keys))?.rows, &right)?;
        // It is found where it is due now.
        let due = row.due.unwrap_or_default();
        let (floor, lanes, run, events, bytes) = (due, 2, 1, 1, 1);
        let due = Query::Due(Due {
            destinations: Destinations::ALL,
            now: due,
            floor,
            lanes,
            run,
            events,
            bytes,
        });
        let found = view.load(&due).map_err(Failure::load(&due))?.lanes;
        let found: Vec<&LaneKey> = found.iter().map(|lane| &lane.key).collect();
        ensure(found == [&key], || format!("{what} must be found when it is due, not {found:?}"))?;
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
        let found = load(&mut tx, &Query::rows(keys.clone()))?.rows;
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
