//! What a store may do in its own way: `run`, `write` and `transact`. They must come to what begin,
//! load, apply and commit come to, once, also when the work fails or panics.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use thiserror::Error;
use twobox::{
    Applied, Batch, Decision, DeliveryState, End, EventState, Expect, Load as _, Millis, Query,
    Reader, Record, Revision, Rows, RunError, Store, Stored, Table, Tables, Transaction,
    Transition,
};

use super::{batch, committed, fill, load, put, rows, same, write};
use crate::failure::{Failure, ensure};
use crate::harness::Harness;

/// Writes a row once more, whatever is there, or is refused, or meets conflicts at first.
struct Touch {
    record: Record,
    refused: bool,
    conflicts: Cell<u32>,
}

#[derive(Debug, Error)]
#[error("it is refused")]
struct Refused;

impl Touch {
    fn new(record: &Record) -> Self {
        Self { record: record.clone(), refused: false, conflicts: Cell::new(0) }
    }
}

impl Transition for Touch {
    type Outcome = u64;
    type Refusal = Refused;

    fn query(&self, _now: Millis) -> Query {
        Query::rows([self.record.key()])
    }

    fn decide(&self, _now: Millis, rows: &Rows) -> Result<Decision<u64>, Refused> {
        if self.refused {
            return Err(Refused);
        }
        let there = rows.rows.first().map(|row| row.revision);
        let mut batch = Batch::new();
        let left = self.conflicts.get();
        self.conflicts.set(left.saturating_sub(1));
        let expect = if left > 0 { Some(Revision::from_stored(77)) } else { there };
        batch.put(expect, self.record.clone());
        Ok(Decision::new(batch, there.map_or(1, |there| there.get() + 1)))
    }
}

/// What the store must hold, with the number of writes of each row.
fn right(rows: &[(&Record, u64)]) -> Vec<Stored> {
    let stored = |(record, writes): &(&Record, u64)| Stored {
        record: (*record).clone(),
        revision: Revision::from_stored(*writes),
    };
    let mut rows: Vec<Stored> = rows.iter().map(stored).collect();
    rows.sort_by_cached_key(|row| row.record.key());
    rows
}

fn holds<H: Harness>(harness: &H, what: &str, rows: &[(&Record, u64)]) -> Result<(), Failure> {
    same(what, &committed(harness)?, &right(rows))
}

fn order(name: &str) -> Result<Record, Failure> {
    rows::order(name, rows::body("an order")?)
}

const NOW: Millis = Millis::new(0);

/// `transact` commits what the work has written if it says so, and nothing if it says to roll back.
/// Alone in a store it has no reason to run the work twice.
///
/// # Errors
///
/// What was there, or missing.
pub fn transact_ends_as_its_work_says<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    let (one, two) = (order("one")?, order("two")?);
    let calls = Cell::new(0);
    let mut ended = Ok(());
    let answer = harness.store().transact(|tx| {
        calls.set(calls.get() + 1);
        ended = write(tx, vec![put(Expect::Absent, one.clone())]);
        if ended.is_ok() { End::Commit(7) } else { End::RollBack(0) }
    });
    ensure(calls.get() == 1, || {
        format!("transact has called its work {} times, with nobody in the way", calls.get())
    })?;
    ended.map_err(|failure| failure.at("transact"))?;
    ensure(matches!(answer, Ok(7)), || format!("transact gives {answer:?}, not Ok(7)"))?;
    let what = "after transact with End::Commit";
    holds(&harness, what, &[(&one, 1)])?;
    harness = harness.crash();
    holds(&harness, &format!("{what} and a crash"), &[(&one, 1)])?;

    let update = put(Expect::Revision(Revision::FIRST), one.clone());
    let mut ended = Ok(());
    let answer = harness.store().transact(|tx| {
        ended = write(tx, vec![update.clone(), put(Expect::Absent, two.clone())]);
        End::RollBack(8)
    });
    ended.map_err(|failure| failure.at("transact"))?;
    ensure(matches!(answer, Ok(8)), || format!("transact gives {answer:?}, not Ok(8)"))?;
    let what = "after transact with End::RollBack";
    holds(&harness, what, &[(&one, 1)])?;

    // A conflict is for the caller to see, and to roll back.
    let bad = batch(vec![put(Expect::Absent, one.clone()), put(Expect::Absent, two.clone())])?;
    let answer = harness.store().transact(|tx| End::RollBack(tx.apply(&bad)));
    match answer.map_err(Failure::store)?.map_err(Failure::store)? {
        Applied::Conflict(_) => {}
        Applied::Written => return Err(Failure::new("transact: the guard of a row was ignored")),
    }
    harness = harness.crash();
    holds(&harness, &format!("{what} and a crash"), &[(&one, 1)])
}

/// `run` loads, decides and writes once, in one commit; after a conflict it does so again. What is
/// refused changes nothing. `Tables::run` does the same in a transaction that others commit.
///
/// # Errors
///
/// What was there, or missing.
pub fn run_writes_once<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    let one = order("one")?;
    let touch = Touch::new(&one);
    for writes in 1..=2 {
        let outcome = harness.store().run(&touch, NOW);
        ensure(matches!(outcome, Ok(found) if found == writes), || {
            format!("run gives {outcome:?}, not Ok({writes})")
        })?;
        holds(&harness, "after run", &[(&one, writes)])?;
        harness = harness.crash();
        holds(&harness, "after run and a crash", &[(&one, writes)])?;
    }
    let refused = Touch { refused: true, ..Touch::new(&order("two")?) };
    let outcome = harness.store().run(&refused, NOW);
    ensure(matches!(outcome, Err(RunError::Refused(_))), || {
        format!("run of what is refused gives {outcome:?}")
    })?;
    holds(&harness, "after run of what is refused", &[(&one, 2)])?;
    touch.conflicts.set(3);
    let outcome = harness.store().run(&touch, NOW);
    ensure(matches!(outcome, Ok(3)), || format!("run gives {outcome:?} after three conflicts"))?;
    holds(&harness, "after run with three conflicts", &[(&one, 3)])?;

    let mut tx = harness.store().begin().map_err(Failure::store)?;
    let outcome = tx.run(&touch, NOW);
    ensure(matches!(outcome, Ok(4)), || format!("run in a transaction gives {outcome:?}"))?;
    let found = load(&mut tx, &Query::rows([one.key()]))?;
    same("after run in a transaction", &found.rows, &right(&[(&one, 4)]))?;
    let outcome = tx.run(&refused, NOW);
    ensure(matches!(outcome, Err(RunError::Refused(_))), || {
        format!("run of what is refused, in a transaction, gives {outcome:?}")
    })?;
    tx.commit().map_err(Failure::store)?;
    holds(&harness, "after run in a transaction and its commit", &[(&one, 4)])?;
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    tx.run(&touch, NOW).map_err(Failure::store)?;
    drop(tx);
    holds(&harness, "after run in a transaction that was dropped", &[(&one, 4)])?;
    touch.conflicts.set(1);
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    let outcome = tx.run(&touch, NOW);
    ensure(matches!(outcome, Err(RunError::Conflict(_))), || {
        format!("run in a transaction gives {outcome:?}, and a guard does not hold")
    })
}

/// `write` commits all that its work has written if that returns `Ok`, once, and nothing if it
/// returns an error. After a conflict the work is run again, and only the last run counts.
///
/// # Errors
///
/// What was there, or missing.
pub fn write_commits_what_its_work_wrote<H: Harness>() -> Result<(), Failure> {
    let mut harness = H::open();
    let (one, two) = (order("one")?, order("two")?);
    let (first, second) = (Touch::new(&one), Touch::new(&two));
    let answer = harness.store().write(NOW, |tx| {
        let first = tx.run(&first).map_err(Flat::flat)?;
        let second = tx.run(&second).map_err(Flat::flat)?;
        Ok::<_, String>(first + second)
    });
    ensure(matches!(answer, Ok(2)), || format!("write gives {answer:?}, not Ok(2)"))?;
    holds(&harness, "after write", &[(&one, 1), (&two, 1)])?;
    harness = harness.crash();
    holds(&harness, "after write and a crash", &[(&one, 1), (&two, 1)])?;

    let answer = harness.store().write(NOW, |tx| {
        tx.run(&first).map_err(Flat::flat)?;
        Err::<(), _>("it fails".to_string())
    });
    ensure(matches!(&answer, Err(RunError::Refused(why)) if why == "it fails"), || {
        format!("write gives {answer:?}, and its work fails")
    })?;
    holds(&harness, "after write whose work fails", &[(&one, 1), (&two, 1)])?;

    second.conflicts.set(2);
    let calls = Cell::new(0);
    let answer = harness.store().write(NOW, |tx| {
        calls.set(calls.get() + 1);
        let first = tx.run(&first).map_err(Flat::flat)?;
        let second = tx.run(&second).map_err(Flat::flat)?;
        Ok::<_, String>(first + second)
    });
    ensure(matches!(answer, Ok(4)) && calls.get() == 3, || {
        format!("write gives {answer:?} after {} calls, of which two met a conflict", calls.get())
    })?;
    holds(&harness, "after write with two conflicts", &[(&one, 2), (&two, 2)])?;
    harness = harness.crash();
    holds(&harness, "after write and a crash", &[(&one, 2), (&two, 2)])
}

/// An error as text; for the work, a conflict is an error like any other.
trait Flat {
    fn flat(self) -> String;
}

impl<E: std::fmt::Display, R: std::fmt::Display> Flat for RunError<E, R> {
    fn flat(self) -> String {
        self.to_string()
    }
}

/// What can be read by name is what the answers to the questions come to.
///
/// # Errors
///
/// The first reading that differs.
pub fn readings_are_answers<H: Harness>() -> Result<(), Failure> {
    let harness = H::open();
    let mut records = rows::one_of_each("row")?;
    records.push(rows::event_in("dead", "row", 2, rows::body("dead")?)?);
    records.push(rows::outbox("dead", "row", 2, DeliveryState::Dead(Millis::new(3)))?);
    fill(&harness, &records)?;
    let mut view = harness.store().view().map_err(Failure::store)?;
    let mut wrong = Vec::new();
    for record in &records {
        let found = match record {
            Record::Request(key, row) => view.request(key).map(|found| found.as_ref() == Some(row)),
            Record::Order(id, row) => view.order(id).map(|found| found.as_ref() == Some(row)),
            Record::Event(row) => {
                view.event(&row.event.id).map(|found| found.as_ref() == Some(row))
            }
            Record::Lane(key, row) => view.lane(key).map(|found| found.as_ref() == Some(row)),
            Record::Inbox(consumer, id, row) => {
                view.received(consumer, id).map(|found| found.as_ref() == Some(row))
            }
            Record::Effect(consumer, id, body) => {
                view.effect(consumer, id).map(|found| found.as_ref() == Some(body))
            }
            Record::Outbox(id, row) => {
                let state = match row.state {
                    DeliveryState::Dead(at) => EventState::Dead(at),
                    DeliveryState::Discarded(at) => EventState::Discarded(at),
                    DeliveryState::Cancelled(at) => EventState::Cancelled(at),
                    // The lane has come to 4.
                    DeliveryState::Pending => EventState::Confirmed,
                };
                view.event_state(id).map(|found| found == Some(state))
            }
            Record::Position(..) | Record::Call(..) => Ok(true),
        };
        if !found.map_err(|error| Failure::store(error).at(record.key()))? {
            wrong.push(record.key().to_string());
        }
    }
    ensure(wrong.is_empty(), || {
        format!("read by name, these are not as they were written: {wrong:?}")
    })?;
    let dead =
        view.dead_letters(None, 10).map_err(|error| Failure::store(error).at("dead_letters"))?;
    ensure(dead.len() == 1, || format!("dead_letters gives {dead:?}, and one event is dead"))?;
    let now = Millis::new(50);
    let stats = view.stats(now).map_err(|error| Failure::store(error).at("stats"))?;
    let answer = load(&mut view, &Query::Stats { now })?.stats;
    ensure(stats == answer, || format!("stats gives {stats:?}, and the query {answer:?}"))?;
    let walked = view.walk(Table::Orders, None, 10).map_err(Failure::store)?;
    same("walk", &walked, &right(&[(&records[1], 1)]))
}

/// Work that panics leaves nothing, and the store goes on: whoever comes next reads and writes,
/// also in another thread. It panics in `transact`, in `write`, in `run`, and with a transaction or
/// a view in hand.
///
/// # Errors
///
/// What was there, or how the store fails afterwards.
pub fn a_panic_leaves_nothing<H: Harness>() -> Result<(), Failure> {
    let harness = H::open();
    let there = order("there")?;
    fill(&harness, std::slice::from_ref(&there))?;
    let bad = batch(vec![put(Expect::Absent, order("bad")?)])?;
    let store = harness.store();
    let panic = || -> () { resume_unwind(Box::new("the work panics")) };
    for (writes, place) in (1..).zip(["transact", "write", "run", "a transaction", "a view"]) {
        let panicked = catch_unwind(AssertUnwindSafe(|| match place {
            "transact" => {
                let _ended = store.transact(|tx| {
                    let _written = tx.apply(&bad);
                    panic();
                    End::Commit(())
                });
            }
            "write" => {
                let _ended = store.write(NOW, |tx| {
                    let _written = tx.apply(&bad);
                    panic();
                    Ok::<_, String>(())
                });
            }
            "run" => {
                let _ended = store.run(Panics, NOW);
            }
            "a transaction" => {
                let mut tx = store.begin();
                let _written = tx.as_mut().map(|tx| tx.apply(&bad));
                panic();
                drop(tx);
            }
            _ => {
                let view = store.view();
                panic();
                drop(view);
            }
        }));
        ensure(panicked.is_err(), || format!("{place} has swallowed a panic of its work"))?;
        let works = || {
            holds(&harness, "after it", &[(&there, writes)])?;
            let outcome = store.run(Touch::new(&there), NOW).map_err(Failure::store)?;
            ensure(outcome == writes + 1, || format!("run gives {outcome}"))?;
            holds(&harness, "after it and a run", &[(&there, writes + 1)])
        };
        let works = catch_unwind(AssertUnwindSafe(works));
        let place = format!("after a panic in {place}");
        match works {
            Ok(works) => works.map_err(|failure| failure.at(place))?,
            Err(_) => {
                let what = "the store panics when it is used: is a lock poisoned?";
                return Err(Failure::new(what).at(place));
            }
        }
    }
    Ok(())
}

/// A transition that panics.
struct Panics;

impl Transition for Panics {
    type Outcome = ();
    type Refusal = Refused;

    fn query(&self, _now: Millis) -> Query {
        Query::none()
    }

    fn decide(&self, _now: Millis, _rows: &Rows) -> Result<Decision<()>, Refused> {
        resume_unwind(Box::new("the transition panics"))
    }
}

/// A user's own rows are there if the harness says so, and it does not say that there are none if
/// they are kept: then they would be checked nowhere.
///
/// # Errors
///
/// What was there, or missing.
pub fn own_rows_are_kept_as_the_harness_says<H: Harness>() -> Result<(), Failure> {
    let harness = H::open();
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    H::put_own_row(&mut tx, "key", "value").map_err(Failure::store)?;
    let within = H::own_row(&mut tx, "key").map_err(Failure::store)?;
    tx.commit().map_err(Failure::store)?;
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    let after = H::own_row(&mut tx, "key").map_err(Failure::store)?;
    let right = H::OWN_ROWS.then(|| "value".to_string());
    let says = if H::OWN_ROWS { "there are own rows" } else { "there are no own rows" };
    ensure(within == right && after == right, || {
        format!(
            "Harness::OWN_ROWS says that {says}, but an own row that was put is {within:?} in its \
             transaction and {after:?} after the commit"
        )
    })
}
