//! Transactions and views that are open at the same time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use twobox::{
    Applied, Change, Destinations, Due, EventId, Expect, Key, LaneEdit, LaneRow, Lease, Load as _,
    Millis, OrderId, Owner, Query, Reader, Record, Revision, Store, StoreError, Stored, Table,
    Tables, Transaction,
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
        let due = Due {
            destinations: Destinations::ALL,
            now,
            floor,
            lanes: all,
            run: all,
            events: all,
            bytes: all,
        };
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

/// An answer is of one moment: a lane and what is pending in it, while somebody puts events to the
/// lane all the time.
///
/// # Errors
///
/// The lane that was of another moment than its events.
pub fn an_answer_is_of_one_moment<H: Harness>() -> Result<(), Failure> {
    const LOADS: usize = 40;
    const COMMITS: u64 = 2_000;
    if !H::VIEWS_MEANWHILE {
        return Ok(());
    }
    let harness = H::open();
    let Record::Lane(key, row) = rows::lane("busy", Some(Millis::new(20)))? else { return Ok(()) };
    let row = LaneRow { head: 1, next: 1, ..row };
    fill(&harness, &[Record::Lane(key.clone(), row.clone())])?;
    let append = |place: u64| {
        let event = rows::event_in(&format!("e{place}"), "busy", place, rows::body("an event")?)?;
        let lane = Record::Lane(key.clone(), LaneRow { next: place + 1, ..row.clone() });
        let expect = Expect::Revision(Revision::from_stored(place));
        Ok::<_, Failure>(vec![put(Expect::Absent, event), put(expect, lane)])
    };
    let id = EventId::new("e1").map_err(Failure::new)?;
    let (store, done) = (harness.store(), &AtomicBool::new(false));
    let ask = || {
        for _ in 0..LOADS {
            let (now, floor, all) = (Millis::new(50), Millis::new(0), usize::MAX);
            let due = Due {
                destinations: Destinations::ALL,
                now,
                floor,
                lanes: all,
                run: all,
                events: all,
                bytes: all,
            };
            let events = vec![id.clone()];
            for query in [Query::Due(due), Query::Deliveries { events, run: all }] {
                let mut view = store.view().map_err(Failure::store)?;
                for lane in load(&mut view, &query)?.lanes {
                    let found = lane.pending.iter().map(|next| next.row.sequence);
                    ensure(found.eq(1..lane.row.next), || {
                        let (count, next) = (lane.pending.len(), lane.row.next);
                        format!(
                            "the answer to {query:?}, while others write: lane {} has its next \
                             event at {next}, and {count} pending events, the last at {:?}: they \
                             are of different moments",
                            lane.key,
                            lane.pending.last().map(|next| next.row.sequence)
                        )
                    })?;
                }
            }
        }
        Ok(())
    };
    thread::scope(|threads| {
        let (begins, begun) = channel();
        let writer = threads.spawn(move || {
            for place in 1..=COMMITS {
                if done.load(Ordering::Relaxed) {
                    break;
                }
                let mut tx = store.begin().map_err(Failure::store)?;
                write(&mut tx, append(place)?)?;
                tx.commit().map_err(Failure::store)?;
                let _nobody_waits = begins.send(());
            }
            Ok(())
        });
        let _it_writes = begun.recv_timeout(BEGINNING);
        let asked = ask();
        done.store(true, Ordering::Relaxed);
        let written = writer.join().unwrap_or_else(|_| Err(Failure::new("the store panicked")));
        asked.and(written)
    })
}

/// How long a writer waits for the other one to have read. In a store with one writer that other
/// one waits as well, for the transaction.
const PATIENCE: Duration = Duration::from_millis(200);

/// How long a thread may take to begin.
const BEGINNING: Duration = Duration::from_secs(10);

/// What a writer does with the row that it has read.
type Writes = fn(&str, Option<&Stored>) -> Result<Change, Failure>;

/// A row of an order for each writer.
fn own_order(name: &str, found: Option<&Stored>) -> Result<Change, Failure> {
    let expect = Expect::from(found.map(|row| row.revision));
    Ok(put(expect, rows::order(name, rows::body("an order")?)?))
}

/// Both put an event to the end of a lane.
fn append(_name: &str, found: Option<&Stored>) -> Result<Change, Failure> {
    match found.map(|row| (row.revision, row.record.clone())) {
        Some((revision, Record::Lane(key, row))) => {
            let row = LaneRow { next: row.next + 1, ..row };
            Ok(put(Expect::Revision(revision), Record::Lane(key, row)))
        }
        Some(_) | None => Err(Failure::new("the lane is gone")),
    }
}

/// One renews its lease of a lane, under its token, while the other one puts an event to its end.
fn renew_or_append(name: &str, found: Option<&Stored>) -> Result<Change, Failure> {
    if name == "b" {
        return append(name, found);
    }
    let (until, at) = (Millis::new(400), Millis::new(11));
    let key = rows::lane_key("shared")?;
    Ok(Change::Lane { key, token: 5, edit: LaneEdit::Renew { until }, at })
}

/// Two writers lose nothing of each other: each reads, waits until the other one has read as well,
/// and writes, one after the other; one of them waits, or meets a conflict and begins again. So it is for one row that
/// both change, for a lane that one changes under its token, and for two rows.
///
/// # Errors
///
/// What was lost.
pub fn two_writers_lose_nothing<H: Harness>() -> Result<(), Failure> {
    let Record::Lane(key, row) = rows::lane("shared", Some(Millis::new(20)))? else {
        return Ok(());
    };
    let owner = Owner::new("relay-1").map_err(Failure::new)?;
    let lease = Some(Lease { owner, until: Millis::new(20), through: 8 });
    let row = LaneRow { lease, token: 5, ..row };
    let appended = |by| LaneRow { next: row.next + by, ..row.clone() };
    let renew = LaneEdit::Renew { until: Millis::new(400) };
    let renewed = appended(1).edited(5, &renew, Millis::new(11)).unwrap_or_else(|| row.clone());
    let cases: [(&str, bool, Writes, LaneRow, u64); 3] = [
        ("one row that both change", true, append, appended(2), 3),
        (
            "a lane, of which one renews the lease and one appends",
            true,
            renew_or_append,
            renewed,
            3,
        ),
        ("two rows, one of each", false, own_order, row.clone(), 1),
    ];
    for (what, shared, writes, after, revision) in cases {
        let mut harness = H::open();
        fill(&harness, &[Record::Lane(key.clone(), row.clone())])?;
        let lane = shared.then(|| Key::Lane(key.clone()));
        let (to_b, from_a) = channel();
        let (to_a, from_b) = channel();
        let (store, lane) = (harness.store(), lane.as_ref());
        thread::scope(|threads| {
            let a = threads.spawn(move || writer(store, "a", lane, writes, &to_b, &from_b));
            let b = threads.spawn(move || writer(store, "b", lane, writes, &to_a, &from_a));
            let ended = [a.join(), b.join()];
            ended.into_iter().try_for_each(|ended| {
                ended.unwrap_or_else(|_| Err(Failure::new("the store panicked")))
            })
        })
        .map_err(|failure| failure.at(what))?;
        let mut right = Vec::new();
        for name in ["a", "b"].into_iter().filter(|_| !shared) {
            let record = rows::order(name, rows::body("an order")?)?;
            right.push(Stored { record, revision: Revision::FIRST });
        }
        let revision = Revision::from_stored(revision);
        right.push(Stored { record: Record::Lane(key.clone(), after), revision });
        for when in ["after both commits", "after a crash"] {
            let what = format!("two writers of {what}, {when}: a write was lost");
            same(&what, &committed(&harness)?, &right)?;
            harness = harness.crash();
        }
    }
    Ok(())
}

fn writer<S: Store>(
    store: &S,
    name: &str,
    lane: Option<&Key>,
    writes: Writes,
    other: &Sender<()>,
    others: &Receiver<()>,
) -> Result<(), Failure> {
    let conflict = |error: S::Error| match error.is_conflict() {
        true => Ok(()),
        false => Err(Failure::store(error)),
    };
    let _other_is_there = other.send(());
    let _it_begins = others.recv_timeout(BEGINNING);
    for try_number in 0..100 {
        let mut tx = match store.begin() {
            Ok(tx) => tx,
            Err(error) => {
                conflict(error)?;
                continue;
            }
        };
        let key = match lane {
            Some(lane) => lane.clone(),
            None => Key::Order(OrderId::new(name).map_err(Failure::new)?),
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
            let _it_has_read = others.recv_timeout(PATIENCE);
            // The first one writes when the second one has committed, and hangs up.
            if name == "a" {
                let _it_has_committed = others.recv_timeout(PATIENCE);
            }
        }
        match tx.apply(&batch(vec![writes(name, found.first())?])?) {
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
