//! What the traits ask of an async store beside what they ask of every store.

use twobox::store::asynchronous::{AsyncLoad, AsyncStore, AsyncTables, AsyncTransaction, write};
use twobox::{Batch, Change, Expect, Key, Millis, Query, Record, Revision, RunError, Stored};

use super::AsyncHarness;
use crate::contract::{Fixed, batch, put, rows, same};
use crate::failure::{Failure, ensure};

/// Calls a macro with the names of all contract tests for async stores alone:
/// `each_async_contract!(callback, anything)`.
#[doc(hidden)]
#[macro_export]
macro_rules! each_async_contract {
    ($callback:path, $($given:tt)*) => {
        $callback! {
            { $($given)* }
            steps_in_one_trip_are_as_one_by_one a_dropped_transaction_leaves_nothing
            run_and_write_commit_once
        }
    };
}

/// All rows that are committed, by a question that is asked once.
async fn committed<S: AsyncStore>(store: &S) -> Result<Vec<Stored>, Failure> {
    let mut rows = Vec::new();
    for walk in crate::side::walks() {
        let once = store.load_once(&walk).await.map_err(Failure::load(&walk))?;
        let mut view = store.view().await.map_err(Failure::store)?;
        same("load_once", &once.rows, &view.load(&walk).await.map_err(Failure::load(&walk))?.rows)?;
        rows.extend(once.rows);
    }
    Ok(rows)
}

/// One row in each table, with the rows that these changes leave, and a batch whose guard does not
/// hold anywhere in it.
fn batches() -> Result<(Vec<Stored>, Batch, Vec<Batch>), Failure> {
    let records = rows::one_of_each("row")?;
    let put_all = |expect| records.iter().cloned().map(move |record| put(expect, record));
    let good = batch(put_all(Expect::Absent).collect())?;
    let bad = (0..records.len()).map(|at| {
        let change = Change::Delete { expect: Revision::FIRST, key: records[at].key() };
        let others = put_all(Expect::Absent).enumerate().filter(|(other, _)| *other != at);
        batch(others.map(|(_, change)| change).chain([change]).collect())
    });
    let bad = bad.collect::<Result<_, _>>()?;
    let stored = records.iter().cloned();
    let stored = stored.map(|record| Stored { record, revision: Revision::FIRST }).collect();
    Ok((stored, good, bad))
}

/// A write with the next question, with the commit, or as a whole transaction is what each of them
/// is alone: everything is written, or, if a guard does not hold, nothing, and that is a conflict.
///
/// # Errors
///
/// What was done otherwise.
pub fn steps_in_one_trip_are_as_one_by_one<H: AsyncHarness>() -> Result<(), Failure> {
    H::block_on(async {
        let (right, good, bad) = batches()?;
        let keys: Vec<Key> = right.iter().map(|row| row.record.key()).collect();
        let all = Query::rows(keys);
        let harness = H::open().await;
        let store = harness.store();
        for bad in &bad {
            let tx = store.begin().await.map_err(Failure::store)?;
            conflict("apply_and_commit", tx.apply_and_commit(bad).await)?;
            conflict("autocommit", store.autocommit(bad).await)?;
            let mut tx = store.begin().await.map_err(Failure::store)?;
            let found = tx.apply_then_load(bad, &all).await.map_err(Failure::store)?;
            ensure(found.is_err(), || "apply_then_load: a guard does not hold".to_string())?;
            drop(tx);
            same("after a conflict", &committed(store).await?, &[])?;
        }
        let mut tx = store.begin().await.map_err(Failure::store)?;
        match tx.apply_then_load(&good, &all).await.map_err(Failure::store)? {
            Ok(found) => same("what apply_then_load has loaded", &found.rows, &right)?,
            Err(key) => {
                return Err(Failure::new(format_args!("apply_then_load: a conflict at {key:?}")));
            }
        }
        drop(tx);
        same("after a transaction was dropped", &committed(store).await?, &[])?;

        for step in ["apply_and_commit", "autocommit", "apply_then_load"] {
            let harness = H::open().await;
            let store = harness.store();
            let written = match step {
                "autocommit" => store.autocommit(&good).await,
                "apply_and_commit" => {
                    let mut tx = store.begin().await.map_err(Failure::store)?;
                    same("at first", &tx.load(&all).await.map_err(Failure::load(&all))?.rows, &[])?;
                    tx.apply_and_commit(&good).await
                }
                _ => {
                    let mut tx = store.begin().await.map_err(Failure::store)?;
                    let _rows = tx.apply_then_load(&good, &all).await.map_err(Failure::store)?;
                    tx.commit().await.map_err(RunError::of_commit)
                }
            };
            written.map_err(|error| Failure::new(format_args!("{step}: {error}")))?;
            same(step, &committed(store).await?, &right)?;
            let harness = harness.crash().await;
            same(&format!("{step}, and a crash"), &committed(harness.store()).await?, &right)?;
        }
        Ok(())
    })
}

fn conflict<E, R>(what: &str, ended: Result<(), RunError<E, R>>) -> Result<(), Failure> {
    ensure(matches!(ended, Err(RunError::Conflict(_))), || {
        format!("{what}: a guard does not hold, and that is no conflict")
    })
}

/// A transaction that is dropped after any of its steps leaves nothing, and the store goes on.
///
/// # Errors
///
/// What was there.
pub fn a_dropped_transaction_leaves_nothing<H: AsyncHarness>() -> Result<(), Failure> {
    H::block_on(async {
        let (_, good, _) = batches()?;
        let harness = H::open().await;
        for steps in 0..3 {
            let mut tx = harness.store().begin().await.map_err(Failure::store)?;
            if steps > 0 {
                let _rows = tx.load(&Query::none()).await.map_err(Failure::store)?;
            }
            if steps > 1 {
                let _written = tx.apply(&good).await.map_err(Failure::store)?;
            }
            drop(tx);
            same("after a transaction was dropped", &committed(harness.store()).await?, &[])?;
        }
        let order = rows::order("order", rows::body("an order")?)?;
        let order = batch(vec![put(Expect::Absent, Record::clone(&order))])?;
        let ended = harness.store().autocommit(&order).await;
        ensure(ended.is_ok(), || "after that nothing can be written any more".to_string())
    })
}

/// What a store may do in its own way, `run` and `write`, comes to one commit of what was written,
/// and to nothing after an error. `run` in a transaction is committed with it, and only then.
///
/// # Errors
///
/// What was there, or missing.
pub fn run_and_write_commit_once<H: AsyncHarness>() -> Result<(), Failure> {
    let order = rows::order("order", rows::body("an order")?)?;
    let now = Millis::new(0);
    let updates = |there: u64| {
        let expect = match there {
            0 => Expect::Absent,
            at => Expect::Revision(Revision::from_stored(at)),
        };
        let query = Query::rows([order.key()]);
        let batch = batch(vec![put(expect, order.clone())])?;
        Ok::<_, Failure>(Fixed { query, batch, may_be_lost: false })
    };
    let right = |writes| {
        let revision = Revision::from_stored(writes);
        [Stored { record: order.clone(), revision }]
    };
    H::block_on(async {
        let mut harness = H::open().await;
        harness.store().run(updates(0)?, now).await.map_err(Failure::store)?;
        same("after run", &committed(harness.store()).await?, &right(1))?;
        let update = updates(1)?;
        let ended = write(harness.store(), now, async |tx| tx.run(&update).await).await;
        ended.map_err(|error| Failure::store(error.flatten()))?;
        same("after write", &committed(harness.store()).await?, &right(2))?;
        let update = updates(2)?;
        let ended = write(harness.store(), now, async |tx| {
            tx.run(&update).await.map_err(|error| error.to_string())?;
            Err::<(), _>("it fails".to_string())
        });
        let ended = ended.await;
        ensure(matches!(&ended, Err(RunError::Refused(why)) if why == "it fails"), || {
            format!("write gives {ended:?}, and its work fails")
        })?;
        same("after write whose work fails", &committed(harness.store()).await?, &right(2))?;
        let mut tx = harness.store().begin().await.map_err(Failure::store)?;
        tx.run(updates(2)?, now).await.map_err(Failure::store)?;
        drop(tx);
        let what = "after run in a transaction that was dropped";
        same(what, &committed(harness.store()).await?, &right(2))?;
        let mut tx = harness.store().begin().await.map_err(Failure::store)?;
        tx.run(updates(2)?, now).await.map_err(Failure::store)?;
        tx.commit().await.map_err(Failure::store)?;
        let ended = harness.store().run(updates(1)?, now).await;
        ensure(matches!(ended, Err(RunError::Conflict(_))), || {
            format!("run gives {ended:?}, and a guard does not hold")
        })?;
        harness = harness.crash().await;
        same("after that and a crash", &committed(harness.store()).await?, &right(3))
    })
}
