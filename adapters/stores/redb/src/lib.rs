//! twobox on [redb]: outbox and inbox in an embedded database file, with the user's own tables in
//! the same commits.
//!
//! Each commit is durable when it returns (but see [`RedbOptions::sync_deliveries`]), and atomic
//! (P2, P5): the rows of twobox and the user's, or none of them. One transaction writes at a time,
//! so guards never fail here, except in a transaction of the user's that read before. Beginning a
//! transaction waits for the one that is open; on the same thread that is a deadlock, as with any
//! lock.
//!
//! Callers of [`Store::run`] and [`Store::write`] that come at the same time share a commit, and
//! each returns when it is durable. So the more threads write, the fewer syncs each of them costs;
//! a lone caller waits for nobody.
//!
//! ```
//! use redb::{ReadableDatabase, TableDefinition};
//! use twobox::{Body, CommitOrder, Draft, Fingerprint, Millis, OrderId, Request, Store};
//! use twobox_redb::RedbStore;
//!
//! const STOCK: TableDefinition<&str, u64> = TableDefinition::new("stock");
//!
//! let folder = tempfile::tempdir()?;
//! let store = RedbStore::create(folder.path().join("shop.redb"))?;
//!
//! // The order, its event and a row of our own: one commit.
//! let request = Request::new("customer-7", "req-001", Fingerprint::of([("item", "notebook")]))?;
//! let events = [Draft::new("order.created", Body::json(r#"{"item":"notebook"}"#)?)?];
//! let order = CommitOrder::new(&request, OrderId::new("order-1")?, Body::json("{}")?, events)?;
//! let placed = store.write(Millis::new(1_000), |tx| -> Result<_, Box<dyn std::error::Error>> {
//!     tx.redb().open_table(STOCK)?.insert("notebook", 39)?;
//!     Ok(tx.run(&order)?)
//! }).map_err(|error| error.to_string())?;
//! assert!(!placed.repeated);
//! assert_eq!(store.database()?.begin_read()?.open_table(STOCK)?.get("notebook")?.unwrap().value(), 39);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A database that is yours
//!
//! [`RedbStore::with_database`] makes a store of a database that is open already, [`Lent`] runs
//! transitions in a write transaction of yours, which you commit, and [`RedbView`] reads in a read
//! transaction of yours. In the database we touch only tables whose names begin with `twobox_`.
//!
//! ```
//! use twobox::{Fingerprint, Millis, Register, Request, Tables};
//! use twobox_redb::Lent;
//!
//! let folder = tempfile::tempdir()?;
//! let database = redb::Database::create(folder.path().join("mine.redb"))?;
//! let mine = database.begin_write()?;
//! let request = Request::new("customer-7", "req-001", Fingerprint::of([("item", "notebook")]))?;
//! Lent::new(&mine)?.run(Register::new(&request), Millis::new(1_000))?;
//! mine.commit()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Damage
//!
//! Opening verifies the file (see [`RedbOptions::verify_on_open`]). It refuses, without changing a
//! byte, a file that is damaged, beyond repair, of another version, or not ours. Each row has a
//! checksum that is checked when it is read. Damage that makes redb panic all the same becomes
//! [`RedbError::Damaged`], unless the program is built to abort on a panic.
//!
//! # Without std
//!
//! Without the feature `std` (on by default) there are no files and no shared commits, and a store
//! lives on whatever implements
//! [`StorageBackend`]: see [`RedbStore::create_on`] and [`RedbStore::open_on`]. redb is then built without std as well, which it offers
//! with its feature `experimental-api-5` only, so the program's own manifest must turn that on, and
//! a panic must abort:
//!
//! ```toml
//! [dependencies]
//! redb = { version = "4.6", default-features = false, features = ["experimental-api-5"] }
//! twobox-redb = { version = "0.1", default-features = false }
//!
//! [profile.release]
//! panic = "abort"
//! ```

#![cfg_attr(not(feature = "std"), no_std)]
#![cfg_attr(docsrs, feature(doc_cfg))]

extern crate alloc;

mod backup;
mod database;
mod error;
#[cfg(feature = "std")]
mod group;
mod lock;
mod open;
mod process;
mod tables;
mod trial;
#[cfg(feature = "std")]
mod views;

use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "std")]
use std::path::Path;

use redb::{
    Database, Durability, ReadTransaction, ReadableDatabase, StorageBackend, WriteTransaction,
};
use self_cell::self_cell;
use spin::Mutex;
use twobox::{Applied, Batch, Load, Query, Reader, Rows, Seen, Store, Tables, Transaction};
#[cfg(feature = "std")]
use {core::convert::Infallible, redb::ReadOnlyDatabase, twobox::End, twobox::RunError};

pub use error::RedbError;
pub use open::RedbOptions;

use database::Home;
use error::shielded;
#[cfg(feature = "std")]
use group::Group;
use tables::Opened;
#[cfg(feature = "std")]
use views::{OpenView, Views};

/// A store in a redb database.
///
/// After an error of the disk, redb does no more with a database that is open. The store opens the
/// file or the storage again, with the repair that it needs, when the next transaction or view
/// begins; if that fails, it answers with the error, and tries again the next time (F31). This
/// needs the database to be held by nobody else, see [`RedbError::StillHeld`]; one that was given
/// to [`RedbStore::with_database`] stays as it is, see [`RedbError::StoppedLent`]. Views and
/// transactions that were open answer with [`RedbError::Stopped`], and a commit that failed is
/// unknown as always. After a sync that failed, all of the file is written and synced once more.
#[derive(Debug)]
pub struct RedbStore {
    home: Home,
    sync_deliveries: bool,
    #[cfg(feature = "std")]
    group: Group,
    #[cfg(feature = "std")]
    views: Views,
}

impl RedbStore {
    /// Creates a store at a path where there is nothing, as [`RedbOptions::create`] does.
    ///
    /// # Errors
    ///
    /// As there.
    #[cfg(feature = "std")]
    pub fn create(path: impl AsRef<Path>) -> Result<Self, RedbError> {
        RedbOptions::new().create(path)
    }

    /// Opens a store, as [`RedbOptions::open`] does.
    ///
    /// # Errors
    ///
    /// As there.
    #[cfg(feature = "std")]
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RedbError> {
        RedbOptions::new().open(path)
    }

    /// Opens the store at this path, or creates it, as [`RedbOptions::open_or_create`] does.
    ///
    /// # Errors
    ///
    /// As there.
    #[cfg(feature = "std")]
    pub fn open_or_create(path: impl AsRef<Path>) -> Result<Self, RedbError> {
        RedbOptions::new().open_or_create(path)
    }

    /// Creates a store on an empty storage, as [`RedbOptions::create_on`] does.
    ///
    /// # Errors
    ///
    /// As there.
    ///
    /// ```
    /// let store = twobox_redb::RedbStore::create_on(redb::backends::InMemoryBackend::new())?;
    /// # Ok::<(), twobox_redb::RedbError>(())
    /// ```
    pub fn create_on(storage: impl StorageBackend) -> Result<Self, RedbError> {
        RedbOptions::new().create_on(storage)
    }

    /// Opens the store on a storage, as [`RedbOptions::open_on`] does.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn open_on(storage: impl StorageBackend) -> Result<Self, RedbError> {
        RedbOptions::new().open_on(storage)
    }

    /// The store in a database that is open already, as [`RedbOptions::with_database`] does.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn with_database(database: impl Into<Arc<Database>>) -> Result<Self, RedbError> {
        RedbOptions::new().with_database(database)
    }

    /// The database, for the user's own tables, and for all that redb can do with it. Do not keep
    /// it: as long as it is held, it cannot be opened again after a failure of the disk.
    ///
    /// # Errors
    ///
    /// Why it could not be opened again, after it has failed.
    pub fn database(&self) -> Result<Arc<Database>, RedbError> {
        self.home.get()
    }

    /// Closes the database, unless others hold it. To drop the store does the same and says nothing
    /// of errors.
    ///
    /// # Errors
    ///
    /// What redb says. What was committed is there all the same.
    pub fn close(self) -> Result<(), RedbError> {
        self.home.check_process()?;
        match self.home.into_inner() {
            Some(database) => Ok(database.close()?),
            None => Ok(()),
        }
    }
}

impl Reader for RedbStore {
    type Error = RedbError;
    type View<'a> = RedbView;

    fn view(&self) -> Result<RedbView, RedbError> {
        let tx = self.home.begin(|database| Ok(database.begin_read()?))?;
        Ok(RedbView {
            tx,
            #[cfg(feature = "std")]
            open: Some(self.views.open()),
        })
    }
}

impl Store for RedbStore {
    type Tx<'a> = RedbTransaction;

    fn begin(&self) -> Result<RedbTransaction, RedbError> {
        self.home.begin(|database| RedbTransaction::begin(database, self.sync_deliveries))
    }

    #[cfg(feature = "std")]
    /// With the others that come at the same time; a transaction of [`Store::begin`] is shared with
    /// nobody.
    fn transact<R>(
        &self,
        work: impl FnMut(&mut RedbTransaction) -> End<R>,
    ) -> Result<R, RunError<RedbError, Infallible>> {
        // Before the lock of the group, which nobody gives back in a fork.
        self.home.check_process().map_err(RunError::Store)?;
        self.group.transact(&|| self.begin(), work)
    }
}

/// A store that is open for reading alone; see [`RedbOptions::open_read_only`]. After an error of
/// the disk it is opened again when the next view begins, as [`RedbStore`] is (F31).
#[cfg(feature = "std")]
pub struct RedbReader {
    home: database::ReadHome,
}

#[cfg(feature = "std")]
impl RedbReader {
    /// Opens a store to read it, as [`RedbOptions::open_read_only`] does.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RedbError> {
        RedbOptions::new().open_read_only(path)
    }

    /// The database, for the user's own tables.
    ///
    /// # Errors
    ///
    /// Why it could not be opened again, after the disk has failed.
    pub fn database(&self) -> Result<Arc<ReadOnlyDatabase>, RedbError> {
        self.home.get()
    }
}

#[cfg(feature = "std")]
impl Reader for RedbReader {
    type Error = RedbError;
    type View<'a> = RedbView;

    /// Each view shows what is committed by now, by whichever process.
    fn view(&self) -> Result<RedbView, RedbError> {
        let database = self.home.get()?;
        shielded(|| RedbView::new(database.begin_read()?))
    }
}

/// The tables of twobox in a read transaction.
///
/// As long as it is open, redb reuses nothing of what it shows: the file only grows, by what is
/// written meanwhile. Open a view for what you have to look at, and drop it then;
/// [`RedbStore::oldest_view`] says whether one stays. [`RedbStore::compact`] makes the file small
/// again.
pub struct RedbView {
    tx: ReadTransaction,
    /// Counts it, if it is one of a store.
    #[cfg(feature = "std")]
    #[expect(dead_code, reason = "it is dropped with the view")]
    open: Option<OpenView>,
}

impl RedbView {
    /// The tables in a read transaction of the user's.
    ///
    /// # Errors
    ///
    /// [`RedbError::NotTwobox`] if the database has none of ours, [`RedbError::UnknownFormat`], or
    /// what redb says.
    pub fn new(tx: ReadTransaction) -> Result<Self, RedbError> {
        tables::check_format(&tx)?;
        Ok(Self {
            tx,
            #[cfg(feature = "std")]
            open: None,
        })
    }

    /// The transaction, for the user's own tables at the same moment.
    #[must_use]
    pub fn redb(&self) -> &ReadTransaction {
        &self.tx
    }
}

impl Load for RedbView {
    type Error = RedbError;

    fn load(&mut self, query: &Query) -> Result<Rows, RedbError> {
        tables::load(&mut Opened::new(&self.tx), query)
    }
}

/// A transaction of the store.
pub struct RedbTransaction {
    tables: Kept,
    /// Whether a part of something may be written.
    broken: AtomicBool,
    /// Whether something may have been written.
    wrote: AtomicBool,
    /// Whether the commit must be durable.
    durable: AtomicBool,
}

self_cell! {
    /// A transaction and our tables, which stay open in it from one call to the next: to open one
    /// costs as much as a read or two.
    struct Kept {
        owner: WriteTransaction,
        #[not_covariant]
        dependent: KeptTables,
    }
}

type KeptTables<'t> = Mutex<Opened<'t, WriteTransaction>>;

impl RedbTransaction {
    fn begin(database: &Database, durable: bool) -> Result<Self, RedbError> {
        let tables = Kept::new(database.begin_write()?, |tx| Mutex::new(Opened::new(tx)));
        Ok(Self {
            tables,
            broken: AtomicBool::new(false),
            wrote: AtomicBool::new(false),
            durable: AtomicBool::new(durable),
        })
    }

    /// The transaction, for the user's own tables: they are written in the same commit. Tables
    /// whose names begin with `twobox_` may be opened to look at them, and must be dropped before a
    /// transition runs.
    #[must_use]
    pub fn redb(&self) -> &WriteTransaction {
        self.wrote.store(true, Ordering::Relaxed);
        self.durable.store(true, Ordering::Relaxed);
        self.tables.with_dependent(|_, tables| {
            let mut tables = tables.lock();
            // Whoever looks at our tables, or lends us the transaction again, finds all that was
            // written. An error is told by the commit.
            let mut broken = false;
            let _told_later = tables::flush(&mut tables, &mut broken);
            self.broken.fetch_or(broken, Ordering::Relaxed);
            // redb opens a table once at a time, and now it is the user's turn.
            tables.close();
        });
        self.tables.borrow_owner()
    }

    fn with_tables<R>(
        &mut self,
        work: impl FnOnce(&mut Opened<'_, WriteTransaction>, &mut bool) -> R,
    ) -> R {
        let broken = self.broken.get_mut();
        self.tables.with_dependent_mut(|_, tables| work(tables.get_mut(), broken))
    }
}

impl Load for RedbTransaction {
    type Error = RedbError;

    fn load(&mut self, query: &Query) -> Result<Rows, RedbError> {
        self.with_tables(|tables, broken| tables::load_written(tables, query, broken))
    }
}

impl RedbTransaction {
    fn write(&mut self, batch: &Batch, seen: Option<&Seen<'_>>) -> Result<Applied, RedbError> {
        let applied = self.with_tables(|tables, broken| apply(tables, batch, seen, broken));
        if !matches!(applied, Ok(Applied::Conflict(_))) {
            *self.wrote.get_mut() = true;
            *self.durable.get_mut() |= !batch.may_be_lost();
        }
        applied
    }
}

impl Tables for RedbTransaction {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, RedbError> {
        self.write(batch, None)
    }

    fn apply_seen(&mut self, batch: &Batch, seen: &Seen<'_>) -> Result<Applied, RedbError> {
        self.write(batch, Some(seen))
    }
}

impl Transaction for RedbTransaction {
    /// Commits. After [`RedbError::Broken`] nothing was committed, after any other error the store
    /// must be opened again to find out.
    fn commit(mut self) -> Result<(), RedbError> {
        if *self.broken.get_mut() {
            return Err(RedbError::Broken);
        }
        self.with_tables(tables::flush)?;
        let mut tx = self.tables.into_owner();
        if !self.durable.into_inner() {
            // Refused where processes share the database; then the commit is durable.
            let _shared = tx.set_durability(Durability::None);
        }
        shielded(|| Ok(tx.commit()?))
    }
}

/// The tables of twobox in an open write transaction of the user's, who commits it, or rolls it
/// back after an error.
pub struct Lent<'t> {
    tx: &'t WriteTransaction,
    broken: bool,
}

impl<'t> Lent<'t> {
    /// Runs transitions in this transaction. If the database has no tables of ours, they are added
    /// in it.
    ///
    /// # Errors
    ///
    /// [`RedbError::NameTaken`] if there are other tables of our names,
    /// [`RedbError::UnknownFormat`], or what redb says. Roll back then.
    pub fn new(tx: &'t WriteTransaction) -> Result<Self, RedbError> {
        shielded(|| tables::prepare(tx))?;
        Ok(Self { tx, broken: false })
    }
}

impl Load for Lent<'_> {
    type Error = RedbError;

    fn load(&mut self, query: &Query) -> Result<Rows, RedbError> {
        tables::load(&mut Opened::new(self.tx), query)
    }
}

impl Lent<'_> {
    fn write(&mut self, batch: &Batch, seen: Option<&Seen<'_>>) -> Result<Applied, RedbError> {
        let mut tables = Opened::new(self.tx);
        let applied = apply(&mut tables, batch, seen, &mut self.broken)?;
        tables::flush(&mut tables, &mut self.broken)?;
        Ok(applied)
    }
}

impl Tables for Lent<'_> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, RedbError> {
        self.write(batch, None)
    }

    fn apply_seen(&mut self, batch: &Batch, seen: &Seen<'_>) -> Result<Applied, RedbError> {
        self.write(batch, Some(seen))
    }
}

/// Applies a batch, and nothing more once that has failed: a part of a batch may be written then.
fn apply(
    tables: &mut Opened<'_, WriteTransaction>,
    batch: &Batch,
    seen: Option<&Seen<'_>>,
    broken: &mut bool,
) -> Result<Applied, RedbError> {
    if *broken {
        return Err(RedbError::Broken);
    }
    let applied = tables::apply(tables, batch, seen);
    *broken = applied.is_err();
    applied
}

/// redb's own types have nothing to show.
macro_rules! debug_by_name {
    ($($name:ty),*) => {$(
        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    )*};
}

debug_by_name!(Home, RedbView, RedbTransaction, Lent<'_>);
#[cfg(feature = "std")]
debug_by_name!(Group, RedbReader);

/// The README, whose example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
