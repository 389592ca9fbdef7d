//! A small store that is right, except for the one thing that its defect says. It keeps rows with
//! an index beside them, as a store in a file would, and a crash leaves what was made durable.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error as ThisError;
use twobox::{
    Applied, Batch, Change, End, EventId, EventRow, FORMAT_VERSION, IndexEntry, Key, Load, Millis,
    Query, Reader, Record, Revision, Rows, RunError, Seen, Store, StoreError, Stored, Table,
    Tables, Transaction, Transition, Writing,
};

use crate::defect::{Defect, Guard, Way};
use crate::disk::{Disk, text};

/// What can go wrong in it.
#[derive(Debug, ThisError)]
pub(crate) enum Error {
    #[error("the index is torn")]
    Torn,
    #[error("somebody else has committed")]
    Conflict,
}

impl StoreError for Error {
    fn is_conflict(&self) -> bool {
        matches!(self, Self::Conflict)
    }
}

/// How many batches were applied in all stores.
static APPLIED: AtomicUsize = AtomicUsize::new(0);

/// What a program sees, and what a crash leaves.
#[derive(Debug, Clone, Default)]
struct Kept {
    committed: Arc<Disk>,
    durable: Arc<Disk>,
    /// What the open transaction has written so far.
    open: Option<Arc<Disk>>,
    commits: usize,
    /// Whether the last commit may be lost.
    lost: bool,
    /// Events, which never change.
    cache: BTreeMap<EventId, EventRow>,
}

/// The store.
#[derive(Debug, Clone)]
pub(crate) struct Small {
    defect: &'static Defect,
    kept: Arc<Mutex<Kept>>,
    writer: Arc<Mutex<()>>,
}

impl Small {
    pub(crate) fn new(defect: &'static Defect) -> Self {
        Self { defect, kept: Arc::default(), writer: Arc::default() }
    }

    /// What a program finds that starts after this one was killed.
    pub(crate) fn crash(self) -> Self {
        let kept = self.kept();
        let (disk, commits) = (kept.durable.clone(), kept.commits);
        drop(kept);
        let (committed, durable) = (disk.clone(), disk);
        let kept = Kept { committed, durable, commits, ..Kept::default() };
        Self { kept: Arc::new(Mutex::new(kept)), ..Self::new(self.defect) }
    }

    /// The same, after the bytes of a row were changed.
    pub(crate) fn damage(self, key: &Key) -> Self {
        Arc::make_mut(&mut self.kept().durable).damaged.insert(key.clone());
        self.crash()
    }

    /// Whether it opens what another version has written.
    pub(crate) fn opens(&self, version: u32) -> bool {
        version == FORMAT_VERSION || self.is(Way::ReadsAnyFormat)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is(&self, way: Way) -> bool {
        self.defect.way == way
    }

    fn has_many_writers(&self) -> bool {
        self.is(Way::WritersDoNotWait) || self.finds_conflicts_at_the_commit()
    }

    fn finds_conflicts_at_the_commit(&self) -> bool {
        self.is(Way::WritersMeetConflicts) || self.is(Way::LaneEditsMeetNoConflicts)
    }
}

/// A state of the store, or the store itself.
#[derive(Debug)]
pub(crate) struct View<'a> {
    store: &'a Small,
    disk: Arc<Disk>,
}

fn load(defect: &Defect, disk: &Disk, query: &Query) -> Result<Rows, Error> {
    if (defect.fails)(query) {
        return Err(Error::Torn);
    }
    let mut asked = query.clone();
    (defect.ask)(&mut asked);
    if disk.damaged.iter().any(|key| shows(query, key)) && defect.way != Way::LeavesOutTheDamaged {
        return Err(Error::Torn);
    }
    let mut rows = disk.answer(defect, &asked);
    rows.rows.retain(|row| !disk.damaged.contains(&row.record.key()));
    (defect.answer)(query, &mut rows, disk);
    Ok(rows)
}

/// Whether the answer to a query has to do with a row.
fn shows(query: &Query, key: &Key) -> bool {
    match query {
        Query::Rows(keys) => keys.as_slice().contains(key),
        Query::Walk { table, .. } => key.table() == *table,
        Query::Finished(finished) => key.table() == finished.table,
        Query::Due(_) | Query::Deliveries { .. } | Query::Dead { .. } | Query::Stats { .. } => {
            matches!(key.table(), Table::Events | Table::Outbox | Table::Lanes)
        }
    }
}

impl Load for View<'_> {
    type Error = Error;

    fn load(&mut self, query: &Query) -> Result<Rows, Error> {
        if self.store.is(Way::ViewIsLive) {
            self.disk = self.store.kept().committed.clone();
        }
        let open = self.store.kept().open.clone();
        let open = open.filter(|_| self.store.is(Way::ViewSeesUncommitted));
        let mut rows = load(self.store.defect, open.as_ref().unwrap_or(&self.disk), query)?;
        if self.store.is(Way::AnswersAreTorn) {
            std::thread::sleep(std::time::Duration::from_millis(1));
            let later = self.store.kept().committed.clone();
            for (lane, later) in
                rows.lanes.iter_mut().zip(later.answer(self.store.defect, query).lanes)
            {
                lane.pending = later.pending;
            }
        }
        Ok(rows)
    }
}

impl Reader for Small {
    type Error = Error;
    type View<'a> = View<'a>;

    fn view(&self) -> Result<View<'_>, Error> {
        Ok(View { store: self, disk: self.kept().committed.clone() })
    }
}

/// A transaction.
#[derive(Debug)]
pub(crate) struct Tx<'a> {
    store: &'a Small,
    begun: Arc<Disk>,
    disk: Arc<Disk>,
    _writer: Option<MutexGuard<'a, ()>>,
    /// How many batches were written, and how many of them may be lost.
    batches: (usize, usize),
    index: (Vec<IndexEntry>, Vec<IndexEntry>),
    written: Vec<Change>,
}

impl Store for Small {
    type Tx<'a> = Tx<'a>;

    fn begin(&self) -> Result<Tx<'_>, Error> {
        let writer = match self.writer.lock() {
            _ if self.has_many_writers() => None,
            writer if self.is(Way::PanicPoisons) => Some(writer.unwrap()),
            writer => Some(writer.unwrap_or_else(PoisonError::into_inner)),
        };
        let disk = self.kept().committed.clone();
        let begun = disk.clone();
        Ok(Tx {
            store: self,
            begun,
            disk,
            _writer: writer,
            batches: (0, 0),
            index: Default::default(),
            written: Vec::new(),
        })
    }

    fn transact<R>(
        &self,
        work: impl FnMut(&mut Tx<'_>) -> End<R>,
    ) -> Result<R, RunError<Error, Infallible>> {
        self.transact_in(self.defect.way, work)
    }

    fn run<T: Transition>(
        &self,
        transition: T,
        now: Millis,
    ) -> Result<T::Outcome, RunError<Error, T::Refusal>> {
        for _ in 0..32 {
            let mut tx = self.begin().map_err(RunError::of)?;
            let outcome = match tx.run(&transition, now) {
                Err(RunError::Conflict(_)) if !self.is(Way::RunGivesUp) => continue,
                outcome => outcome?,
            };
            if !self.is(Way::RunCommitsNothing) {
                tx.commit().map_err(RunError::of_commit)?;
            }
            if self.is(Way::RunRunsTwice) {
                let mut tx = self.begin().map_err(RunError::of)?;
                let _again = tx.run(&transition, now);
                tx.commit().map_err(RunError::of_commit)?;
            }
            return Ok(outcome);
        }
        Err(RunError::Conflict(None))
    }

    fn write<R, E: 'static>(
        &self,
        now: Millis,
        work: impl FnMut(&mut Writing<'_, Tx<'_>>) -> Result<R, E>,
    ) -> Result<R, RunError<Error, E>> {
        OfWrite(self.clone()).write(now, work)
    }
}

impl Small {
    fn transact_in<R>(
        &self,
        way: Way,
        mut work: impl FnMut(&mut Tx<'_>) -> End<R>,
    ) -> Result<R, RunError<Error, Infallible>> {
        let mut tx = self.begin().map_err(RunError::of)?;
        let mut end = if way == Way::TransactSwallowsPanics {
            match catch_unwind(AssertUnwindSafe(|| work(&mut tx))) {
                Ok(end) => end,
                Err(_) => return Err(RunError::Conflict(None)),
            }
        } else {
            work(&mut tx)
        };
        if way == Way::TransactRunsTwice {
            end = work(&mut tx);
        }
        if way == Way::TransactRunsAgain {
            drop(tx);
            tx = self.begin().map_err(RunError::of)?;
            end = work(&mut tx);
        }
        match end {
            End::Commit(answer) if way == Way::TransactCommitsNothing => Ok(answer),
            End::RollBack(answer) if way != Way::TransactCommitsARollBack => Ok(answer),
            End::Commit(answer) | End::RollBack(answer) => {
                tx.commit().map(|()| answer).map_err(RunError::of_commit)
            }
        }
    }
}

/// The store as its `write` uses it.
struct OfWrite(Small);

impl Reader for OfWrite {
    type Error = Error;
    type View<'a> = View<'a>;

    fn view(&self) -> Result<View<'_>, Error> {
        self.0.view()
    }
}

impl Store for OfWrite {
    type Tx<'a> = Tx<'a>;

    fn begin(&self) -> Result<Tx<'_>, Error> {
        self.0.begin()
    }

    fn transact<R>(
        &self,
        work: impl FnMut(&mut Tx<'_>) -> End<R>,
    ) -> Result<R, RunError<Error, Infallible>> {
        let way = if self.0.is(Way::WriteCommitsNothing) {
            Way::TransactCommitsNothing
        } else if self.0.is(Way::WriteCommitsAnError) {
            Way::TransactCommitsARollBack
        } else {
            self.0.defect.way
        };
        self.0.transact_in(way, work)
    }
}

impl Load for Tx<'_> {
    type Error = Error;

    fn load(&mut self, query: &Query) -> Result<Rows, Error> {
        let own = !self.store.is(Way::ReadsNotItsOwnWrites);
        load(self.store.defect, if own { &self.disk } else { &self.begun }, query)
    }
}

impl Tables for Tx<'_> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, Error> {
        Ok(self.write(batch, None))
    }

    fn apply_seen(&mut self, batch: &Batch, seen: &Seen<'_>) -> Result<Applied, Error> {
        Ok(self.write(batch, Some(seen)))
    }

    fn run<T: Transition>(
        &mut self,
        transition: T,
        now: Millis,
    ) -> Result<T::Outcome, RunError<Error, T::Refusal>> {
        let query = transition.query(now);
        let rows = self.load(&query).map_err(RunError::of)?;
        let decision = transition.decide(now, &rows).map_err(RunError::Refused)?;
        if self.store.is(Way::TxRunWritesNothing) {
            return Ok(decision.outcome);
        }
        let seen = Seen { query: &query, rows: &rows };
        match self.apply_seen(&decision.batch, &seen).map_err(RunError::of)? {
            Applied::Conflict(key) if !self.store.is(Way::TxRunIgnoresConflicts) => {
                Err(RunError::Conflict(key))
            }
            Applied::Written | Applied::Conflict(_) => Ok(decision.outcome),
        }
    }
}

impl Tx<'_> {
    fn write(&mut self, batch: &Batch, seen: Option<&Seen<'_>>) -> Applied {
        let defect = self.store.defect;
        if self.store.is(Way::ConflictsByChance) && APPLIED.fetch_add(1, Relaxed) % 7 == 6 {
            return Applied::Conflict(None);
        }
        let mut changes = batch.changes().to_vec();
        (defect.batch)(&mut changes);
        for (at, change) in changes.iter().enumerate() {
            let key = change.key();
            let mut there = self.disk.get(defect, &key);
            // What was asked, and is not in the answer, is taken to be absent.
            if let Some(seen) = seen.filter(|_| self.store.is(Way::SeenIsEnough)) {
                there = seen.rows.rows.iter().find(|row| row.record.key() == key);
            }
            if !(defect.guard)(&Guard { change, at, there }) {
                return Applied::Conflict(Some((defect.names)(key)));
            }
        }
        changes.iter().for_each(|change| self.write_one(change, seen.is_some()));
        self.batches.0 += usize::from(!batch.is_empty());
        self.batches.1 += usize::from(!batch.is_empty() && batch.may_be_lost());
        if self.store.is(Way::ViewSeesUncommitted) {
            self.store.kept().open = Some(self.disk.clone());
        }
        Applied::Written
    }

    /// Whether what was written is still right, given what others have committed since.
    fn rebased(&mut self) -> bool {
        let now = self.store.kept().committed.clone();
        if Arc::ptr_eq(&now, &self.begun) {
            return true;
        }
        let written = std::mem::take(&mut self.written);
        let edits = |change: &&Change| matches!(change, Change::Lane { .. });
        let changed = |change: &&Change| {
            let key = change.key();
            now.rows.get(&key) != self.begun.rows.get(&key)
        };
        let lanes_too = self.store.is(Way::WritersMeetConflicts);
        if written
            .iter()
            .filter(|change| lanes_too || !edits(change))
            .any(|change| changed(&change))
        {
            return false;
        }
        // The lanes that were changed under their tokens are put as they were read and changed.
        let mine = std::mem::replace(&mut self.disk, now);
        for change in &written {
            let key = change.key();
            let record = mine.rows.get(&key).map(|row| row.record.clone());
            let found = self.disk.rows.get(&key).map(|row| row.revision);
            let change = match (record, found) {
                (Some(record), found) => Change::Put { expect: found.into(), record },
                (None, Some(expect)) => Change::Delete { expect, key },
                (None, None) => continue,
            };
            self.write_one(&change, false);
        }
        true
    }

    fn write_one(&mut self, change: &Change, seen: bool) {
        let defect = self.store.defect;
        if self.store.finds_conflicts_at_the_commit() {
            self.written.push(change.clone());
        }
        let disk = Arc::make_mut(&mut self.disk);
        let name = (change.key().table(), (defect.key)(&text(&change.key())));
        let key = disk.keys.get(&name).cloned().unwrap_or_else(|| change.key());
        let old = disk.rows.get(&key).cloned();
        let new = match change {
            Change::Put { record, .. } => {
                let next = old.as_ref().map(|old| old.revision.next());
                let gone = disk.gone.get(&key).map(|gone| gone.next());
                let gone = gone.filter(|_| defect.way == Way::RevisionsGoOnAfterDelete);
                let revision = next.or(gone).unwrap_or(Revision::FIRST);
                Some(Stored { record: record.clone(), revision })
            }
            Change::Delete { .. } => None,
            Change::Lane { key, token, edit, at } => old.as_ref().and_then(|stored| {
                let Record::Lane(_, row) = &stored.record else { return None };
                let row = (defect.edited)(row, *token, edit, *at).unwrap_or_else(|| row.clone());
                let record = Record::Lane(key.clone(), row);
                Some(Stored { record, revision: stored.revision.next() })
            }),
        };
        let new = new.map(|Stored { mut record, revision }| {
            (defect.keep)(&mut record);
            Stored { record, revision: (defect.revision)(revision) }
        });
        let (was, is) = (old.as_ref().map(|row| &row.record), new.as_ref().map(|row| &row.record));
        let indexed = !(seen && defect.way == Way::SeenForgetsTheIndex);
        let gone = was.filter(|was| indexed && (defect.goes)(was, is));
        let gone = gone.and_then(Record::index_entry);
        let comes = is.filter(|is| indexed && (defect.comes)(was, is));
        let comes = comes.and_then(Record::index_entry);
        let late = matches!(defect.way, Way::IndexAddsThenRemoves | Way::IndexRemovesThenAdds);
        if late {
            self.index.0.extend(gone);
            self.index.1.extend(comes);
        } else {
            gone.iter().for_each(|entry| disk.remove(entry));
            comes.into_iter().for_each(|entry| disk.insert(entry));
        }
        if let Some(old) = &old {
            disk.gone.insert(key.clone(), old.revision);
        }
        match new {
            Some(mut row) => {
                let key = row.record.key();
                if let (Way::CachesEvents, Record::Event(event)) = (defect.way, &mut row.record) {
                    let mut kept = self.store.kept();
                    let known = kept.cache.entry(event.event.id.clone());
                    *event = known.or_insert_with(|| event.clone()).clone();
                }
                disk.keys.insert(name, key.clone());
                disk.rows.insert(key, row);
            }
            None => {
                disk.keys.remove(&name);
                disk.rows.remove(&key);
            }
        }
    }

    fn finish(&mut self) {
        let store = self.store;
        let (gone, comes) = std::mem::take(&mut self.index);
        if !gone.is_empty() || !comes.is_empty() {
            let disk = Arc::make_mut(&mut self.disk);
            if store.is(Way::IndexAddsThenRemoves) {
                comes.into_iter().for_each(|entry| disk.insert(entry));
                gone.iter().for_each(|entry| disk.remove(entry));
            } else {
                gone.iter().for_each(|entry| disk.remove(entry));
                comes.into_iter().for_each(|entry| disk.insert(entry));
            }
        }
        let mut kept = store.kept();
        kept.commits += 1;
        kept.open = None;
        if store.is(Way::EachThirdCommitIsLost) && kept.commits.is_multiple_of(3) {
            return;
        }
        let before = std::mem::replace(&mut kept.committed, self.disk.clone());
        let (all, lost) = self.batches;
        let may_be_lost = (store.is(Way::LosesWhatMayBeLost) && all > 0 && lost == all)
            || (store.is(Way::OneThatMayBeLostIsEnough) && lost > 0)
            || (store.is(Way::WhatMayBeLostTakesTheNext) && (lost > 0 || kept.lost))
            || store.is(Way::CommitsAtDrop);
        kept.lost = lost > 0;
        if store.is(Way::LosesTheLastCommit) {
            kept.durable = before;
        } else if store.is(Way::IndexOneCommitLate) {
            kept.durable = Arc::new(self.disk.with_index_of(&before));
        } else if !may_be_lost {
            kept.durable = self.disk.clone();
        }
    }

    /// A row of the user's own, where the store has any.
    pub(crate) fn put_own(&mut self, key: &str, value: &str) {
        if self.store.is(Way::OwnRows) {
            Arc::make_mut(&mut self.disk).own.insert(key.to_string(), value.to_string());
        }
    }

    pub(crate) fn own(&self, key: &str) -> Option<String> {
        self.disk.own.get(key).cloned()
    }
}

impl Transaction for Tx<'_> {
    fn commit(mut self) -> Result<(), Error> {
        let conflict = self.store.finds_conflicts_at_the_commit() && !self.rebased();
        if !conflict {
            self.finish();
        }
        self.batches = (usize::MAX, 0);
        if conflict { Err(Error::Conflict) } else { Ok(()) }
    }
}

impl Drop for Tx<'_> {
    fn drop(&mut self) {
        let committed = self.batches.0 == usize::MAX;
        self.store.kept().open = None;
        let panics = self.store.is(Way::PanicCommits) && std::thread::panicking();
        if !committed && (self.store.is(Way::DropCommits) || panics) {
            self.finish();
        }
    }
}
