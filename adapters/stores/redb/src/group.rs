//! Group commit: callers that would wait for each other share a transaction and its commit, and
//! with it the syncs.
//!
//! redb writes one transaction at a time. Whoever comes meanwhile works, when its turn has come, in
//! the same redb transaction, and the last one, behind whom nobody waits, commits for all; so does
//! one of very many. A caller that is alone commits at once.
//!
//! Callers that a commit has answered come back one after the other. The first of them would find
//! nobody beside it and commit alone, so groups of one and of many would take turns. Therefore the
//! last one gives way a few times, as long as fewer are there than were at the commit before. After
//! a commit for one alone, nobody does.
//!
//! - Nobody is answered before everything that the answer follows from is durable: a caller that
//!   wrote nothing waits for the commit too, if others wrote before it (P1, P2, P5).
//! - redb cannot take back a part of a transaction. When somebody gives up after they have written,
//!   or panics, the whole is rolled back, and each of the others does its work again, in a
//!   transaction of its own, where nobody can spoil it.

use std::convert::Infallible;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use twobox::{End, RunError, Transaction};

use crate::RedbTransaction;
use crate::error::RedbError;

type Failure = RunError<RedbError, Infallible>;
type Begun = Result<RedbTransaction, RedbError>;

/// Those who share transactions: the callers of one store.
#[derive(Default)]
pub(crate) struct Group {
    /// Whoever holds the lock has the turn. Between turns, the transaction is here as long as
    /// somebody waits for the next one.
    turn: Mutex<Option<Open>>,
    waiting: AtomicUsize,
    /// How many shared the commit before.
    before: AtomicUsize,
}

/// How many callers share a commit at most: an endless stream of callers would put it off for ever.
const MOST: usize = 256;

/// How often a commit lets others run who were in the one before, and may not be awake yet.
const PATIENCE: usize = 64;

impl Group {
    /// Runs `work` as [`twobox::Store::transact`] says.
    pub(crate) fn transact<R>(
        &self,
        begin: &impl Fn() -> Begun,
        mut work: impl FnMut(&mut RedbTransaction) -> End<R>,
    ) -> Result<R, Failure> {
        match self.share(begin, &mut work)? {
            Some(answer) => Ok(answer),
            None => self.alone(begin, work),
        }
    }

    /// Runs `work` with others; no answer if what it was found in is not committed.
    fn share<R>(
        &self,
        begin: &impl Fn() -> Begun,
        work: impl FnOnce(&mut RedbTransaction) -> End<R>,
    ) -> Result<Option<R>, Failure> {
        let mut turn = self.turn();
        let open = match turn.take() {
            Some(open) => open,
            None => Open::begin(begin)?,
        };
        let (mut open, end) = or_drop(open, |open| work(&mut open.tx));
        let wrote = mem::take(open.tx.wrote.get_mut());
        let answer = match end {
            End::Commit(_) if *open.tx.broken.get_mut() => {
                return Err(RunError::Unknown(RedbError::Broken));
            }
            End::RollBack(answer) if wrote => return Ok((!open.shared).then_some(answer)),
            End::Commit(answer) | End::RollBack(answer) => answer,
        };
        open.shared |= wrote;
        if !open.shared {
            return Ok(Some(answer));
        }
        open.members += 1;
        let fate = open.promise.0.clone();
        if open.members < MOST && self.somebody_comes(open.members) {
            *turn = Some(open);
        } else {
            self.before.store(open.members, Ordering::Relaxed);
            open.commit();
        }
        drop(turn);
        match fate.wait() {
            Verdict::Committed => Ok(Some(answer)),
            Verdict::Failed(error) if wrote => Err(RunError::Unknown(error)),
            Verdict::Failed(_) | Verdict::RolledBack => Ok(None),
        }
    }

    /// Runs `work` in a transaction that nobody shares.
    fn alone<R>(
        &self,
        begin: &impl Fn() -> Begun,
        work: impl FnMut(&mut RedbTransaction) -> End<R>,
    ) -> Result<R, Failure> {
        let mut turn = self.turn();
        if let Some(open) = turn.take() {
            open.commit();
        }
        let (mut tx, end) = or_drop(begin().map_err(RunError::Store)?, work);
        match end {
            End::Commit(answer) if *tx.wrote.get_mut() => {
                tx.commit().map(|()| answer).map_err(RunError::Unknown)
            }
            End::Commit(answer) | End::RollBack(answer) => Ok(answer),
        }
    }

    /// Whether somebody waits for the next turn, if need be after those were let run who shared the
    /// commit before.
    fn somebody_comes(&self, members: usize) -> bool {
        let patience = if members < self.before.load(Ordering::Relaxed) { PATIENCE } else { 0 };
        (0..=patience).any(|tried| {
            if tried > 0 {
                thread::yield_now();
            }
            self.waiting.load(Ordering::SeqCst) > 0
        })
    }

    fn turn(&self) -> MutexGuard<'_, Option<Open>> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // After a panic there is no open transaction, which is as it should be.
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        turn
    }
}

/// Runs `work` with this, which is dropped before a panic goes on: to roll back, and to say so.
/// While a thread unwinds, redb rolls nothing back, loses the pages, and has the file repaired when
/// it is opened.
fn or_drop<X, R>(mut with: X, work: impl FnOnce(&mut X) -> R) -> (X, R) {
    match catch_unwind(AssertUnwindSafe(|| work(&mut with))) {
        Ok(result) => (with, result),
        Err(panic) => {
            drop(with);
            resume_unwind(panic)
        }
    }
}

/// A transaction that is shared.
struct Open {
    tx: RedbTransaction,
    /// Whether somebody has written in it and waits for its end.
    shared: bool,
    /// How many wait for its end.
    members: usize,
    /// Dropped after the transaction, so that it is rolled back when they are told.
    promise: Promise,
}

impl Open {
    fn begin(begin: impl Fn() -> Begun) -> Result<Self, Failure> {
        let tx = begin().map_err(RunError::Store)?;
        Ok(Self { tx, shared: false, members: 0, promise: Promise::default() })
    }

    fn commit(self) {
        let verdict = match self.tx.commit() {
            Ok(()) => Verdict::Committed,
            // By something that one of them did to it with redb's own means.
            Err(RedbError::Broken) => Verdict::RolledBack,
            Err(error) => Verdict::Failed(error),
        };
        self.promise.0.tell(verdict);
    }
}

/// That those who wait are told. Unless they were, it was rolled back.
#[derive(Default)]
struct Promise(Arc<Fate>);

impl Drop for Promise {
    fn drop(&mut self) {
        self.0.tell(Verdict::RolledBack);
    }
}

/// What became of a transaction.
#[derive(Clone)]
enum Verdict {
    Committed,
    RolledBack,
    /// Nobody knows whether it took.
    Failed(RedbError),
}

/// What becomes of a transaction, for those who wait.
#[derive(Default)]
struct Fate {
    said: Mutex<Said>,
    told: Condvar,
}

#[derive(Default)]
struct Said {
    verdict: Option<Verdict>,
    /// How many sleep until it is said.
    asleep: usize,
}

impl Fate {
    /// The first word counts.
    fn tell(&self, verdict: Verdict) {
        let mut said = self.said();
        if said.verdict.is_none() {
            said.verdict = Some(verdict);
            // To wake nobody is a system call too, and most commits are of one caller.
            if said.asleep > 0 {
                self.told.notify_all();
            }
        }
    }

    fn wait(&self) -> Verdict {
        let mut said = self.said();
        loop {
            if let Some(verdict) = &said.verdict {
                return verdict.clone();
            }
            said.asleep += 1;
            said = self.told.wait(said).unwrap_or_else(PoisonError::into_inner);
            said.asleep -= 1;
        }
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
