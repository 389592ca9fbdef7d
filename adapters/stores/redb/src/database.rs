//! The database of a store, and how it is opened again.
//!
//! redb does nothing more with a database after its storage has failed once: what it knows of the
//! file may be wrong. To open the file again repairs it. A store does so by itself, when the next
//! one asks for a transaction or a view, and tries once for each of them.
//!
//! Before that, the database that failed must be gone, with its locks, so nobody else may hold it:
//! no clone of what [`RedbStore::database`](crate::RedbStore::database) gave, and no open write
//! transaction. Views of it stay, and answer with errors.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering};

#[cfg(feature = "std")]
use redb::ReadOnlyDatabase;
use redb::{Database, TransactionError};

use crate::error::RedbError;
use crate::lock::Lock;
use crate::process::Process;

/// What a storage has met, for the store that lies on it.
#[derive(Debug, Default)]
pub(crate) struct Health {
    /// A call has failed.
    failed: AtomicBool,
    /// What was written may not be on the disk, whatever a later sync says.
    unsynced: AtomicBool,
    /// Its database is gone.
    closed: AtomicBool,
}

impl Health {
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::Release);
    }

    pub(crate) fn fail_sync(&self) {
        self.unsynced.store(true, Ordering::Release);
        self.fail();
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

/// A database, and what its storage meets.
pub(crate) type Open = (Arc<Database>, Arc<Health>);

/// Opens the database again. If what was written last may not be on the disk, all of it must be
/// written once more.
type Again = Box<dyn Fn(Unsynced) -> Result<Open, RedbError> + Send + Sync>;

/// Whether a sync has failed since the last one of all there is. A system may forget what it could
/// not write, and say of the next sync that all is well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unsynced(pub(crate) bool);

/// The database of a store.
pub(crate) struct Home {
    state: Lock<State>,
    /// How to open it again; not for a database that is the user's.
    again: Option<Again>,
    process: Process,
}

struct State {
    database: Option<Arc<Database>>,
    health: Arc<Health>,
    /// How often it was opened.
    times: u64,
    unsynced: Unsynced,
}

/// How often it lets others run who are about to give the database back.
const PATIENCE: usize = 1_000;

impl Home {
    /// A database that is opened again by this.
    pub(crate) fn own((database, health): Open, again: Again) -> Self {
        Self::of(database, health, Some(again))
    }

    /// A database of the user's.
    pub(crate) fn lent(database: Arc<Database>) -> Self {
        Self::of(database, Arc::default(), None)
    }

    fn of(database: Arc<Database>, health: Arc<Health>, again: Option<Again>) -> Self {
        let unsynced = Unsynced(false);
        let state = State { database: Some(database), health, times: 0, unsynced };
        Self { state: Lock::new(state), again, process: Process::this() }
    }

    /// That this is the process that opened it (F56).
    pub(crate) fn check_process(&self) -> Result<(), RedbError> {
        self.process.check()
    }

    /// The database, which is opened again if it has stopped.
    pub(crate) fn get(&self) -> Result<Arc<Database>, RedbError> {
        self.current().map(|(database, _)| database)
    }

    /// Begins something in the database. If that has stopped, it is opened again, once.
    pub(crate) fn begin<T>(
        &self,
        begin: impl Fn(&Database) -> Result<T, RedbError>,
    ) -> Result<T, RedbError> {
        let (database, times) = self.current()?;
        match begin(&database) {
            Err(error) if self.again.is_none() && matches!(error, RedbError::Stopped) => {
                Err(RedbError::StoppedLent)
            }
            Err(RedbError::Stopped | RedbError::Io(_) | RedbError::Damaged { .. })
                if self.again.is_some() =>
            {
                drop(database);
                let mut state = self.state.lock();
                // Another one may have been faster.
                if state.times == times {
                    self.open_again(&mut state)?;
                }
                drop(state);
                begin(&*self.get()?)
            }
            begun => begun,
        }
    }

    /// Does something with the database while nobody else holds it; everyone else waits.
    pub(crate) fn alone<R>(
        &self,
        work: impl FnOnce(&mut Database) -> Result<R, RedbError>,
    ) -> Result<R, RedbError> {
        drop(self.current()?);
        let mut state = self.state.lock();
        let database = state.database.take().ok_or(RedbError::Stopped)?;
        match alone(database) {
            Ok(mut database) => {
                let done = work(&mut database);
                state.database = Some(Arc::new(database));
                done
            }
            Err(shared) => {
                state.database = Some(shared);
                Err(RedbError::InUse)
            }
        }
    }

    /// Takes the database out of the store, for good.
    pub(crate) fn into_inner(self) -> Option<Database> {
        self.state.into_inner().database.and_then(Arc::into_inner)
    }

    fn current(&self) -> Result<(Arc<Database>, u64), RedbError> {
        self.check_process()?;
        let mut state = self.state.lock();
        if self.again.is_some() && state.has_stopped() {
            self.open_again(&mut state)?;
        }
        let database = state.database.clone().ok_or(RedbError::Stopped)?;
        Ok((database, state.times))
    }

    fn open_again(&self, state: &mut State) -> Result<(), RedbError> {
        let Some(again) = &self.again else { return Err(RedbError::StoppedLent) };
        if let Some(database) = state.database.take() {
            match alone(database) {
                // It says that it has failed, which is known.
                Ok(database) => drop(database),
                Err(shared) => {
                    state.database = Some(shared);
                    return Err(RedbError::StillHeld);
                }
            }
        }
        // With a transaction that is open it is closed when that ends.
        if !state.health.closed.load(Ordering::Acquire) {
            return Err(RedbError::StillHeld);
        }
        state.unsynced.0 |= state.health.unsynced.swap(false, Ordering::AcqRel);
        let opened = again(state.unsynced);
        // To open it writes and syncs as well.
        state.unsynced.0 |= matches!(opened, Err(RedbError::Io(_)));
        let (database, health) = opened?;
        *state = State {
            database: Some(database),
            health,
            times: state.times + 1,
            unsynced: Unsynced(false),
        };
        Ok(())
    }
}

impl State {
    /// Whether the database is gone, or does nothing more.
    fn has_stopped(&self) -> bool {
        let Some(database) = &self.database else { return true };
        if !self.health.has_failed() {
            return false;
        }
        // A view of it would find that out late, or never.
        let stopped = match database.try_begin_write() {
            Ok(_) | Err(TransactionError::WouldBlock) => false,
            Err(_) => true,
        };
        if !stopped {
            // A write that redb can do without.
            self.health.failed.store(false, Ordering::Release);
        }
        stopped
    }
}

/// The database of a reader, which may be opened beside itself.
#[cfg(feature = "std")]
pub(crate) struct ReadHome {
    open: Lock<Reading>,
    again: ReadAgain,
    process: Process,
}

#[cfg(feature = "std")]
type Reading = (Arc<ReadOnlyDatabase>, Arc<Health>);

#[cfg(feature = "std")]
type ReadAgain = Box<dyn Fn() -> Result<Reading, RedbError> + Send + Sync>;

#[cfg(feature = "std")]
impl ReadHome {
    /// Opens it like this, now and after each failure.
    pub(crate) fn new(again: ReadAgain) -> Result<Self, RedbError> {
        Ok(Self { open: Lock::new(again()?), again, process: Process::this() })
    }

    /// The database, which is opened again if it has failed.
    pub(crate) fn get(&self) -> Result<Arc<ReadOnlyDatabase>, RedbError> {
        self.process.check()?;
        let mut open = self.open.lock();
        if open.1.has_failed() {
            *open = (self.again)()?;
        }
        Ok(open.0.clone())
    }
}

/// The database, if nobody else holds it, or will give it back at once.
fn alone(mut database: Arc<Database>) -> Result<Database, Arc<Database>> {
    for _ in 0..PATIENCE {
        match Arc::try_unwrap(database) {
            Ok(alone) => return Ok(alone),
            Err(shared) => database = shared,
        }
        crate::lock::give_way();
    }
    Err(database)
}
