//! What can go wrong with a store on redb, and what to do about it.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
#[cfg(feature = "std")]
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(feature = "std")]
use std::path::PathBuf;

use thiserror::Error;
use twobox::codec::Damaged;

/// What a storage says when it fails.
#[cfg(feature = "std")]
pub(crate) type StorageFailure = std::io::Error;
#[cfg(not(feature = "std"))]
pub(crate) type StorageFailure = redb::BackendError;

/// A read beyond the end of a storage.
#[cfg(feature = "std")]
pub(crate) fn beyond_the_end() -> StorageFailure {
    std::io::ErrorKind::UnexpectedEof.into()
}

#[cfg(not(feature = "std"))]
pub(crate) fn beyond_the_end() -> StorageFailure {
    StorageFailure::Other("the storage ends before that".into())
}

/// A change of a storage by a fork of the process that has opened it.
#[cfg(feature = "std")]
pub(crate) fn of_another_process() -> StorageFailure {
    std::io::Error::other("another process has opened this storage")
}

#[cfg(not(feature = "std"))]
pub(crate) fn of_another_process() -> StorageFailure {
    StorageFailure::Other("another process has opened this storage".into())
}

/// Why a store could not be opened, read or written. Errors of opening leave the file as it was,
/// byte for byte.
///
/// It can be cloned, since a commit that several callers share fails for each of them.
#[derive(Debug, Clone, Error)]
#[non_exhaustive]
pub enum RedbError {
    /// There is no file to open.
    #[cfg(feature = "std")]
    #[error("there is no file {}; check the path, or make a new store with RedbStore::create", path.display())]
    Missing {
        /// What was to be opened.
        path: PathBuf,
    },
    /// There is something where a new store was to be created.
    #[error(
        "{place} is there already and was not changed; open it with RedbStore::open, or give another path"
    )]
    AlreadyExists {
        /// The path, or the storage that was given.
        place: String,
    },
    /// What was to be opened is not a redb file.
    #[error("{place} is not a redb file ({what}) and was not changed; check the path")]
    NotRedb {
        /// The path, or the storage that was given.
        place: String,
        /// What is there instead.
        what: &'static str,
    },
    /// A redb database without the tables of twobox.
    #[error(
        "this redb database is not a twobox store and was not changed; check the path, or add our tables to it with RedbStore::with_database"
    )]
    NotTwobox,
    /// The user has a table of one of our names.
    #[error(
        "the table {table:?} is not ours ({what}), but names that begin with \"twobox_\" are; rename that table, or keep the store in a file of its own"
    )]
    NameTaken {
        /// The table.
        table: String,
        /// How it differs.
        what: String,
    },
    /// A store of a version that this program does not know.
    #[error(
        "the store has format version {found}, this program knows version {known}, and nothing was changed; use the program of that version"
    )]
    UnknownFormat {
        /// The version of the store.
        found: u32,
        /// The version of this program.
        known: u32,
    },
    /// Another handle has the database open, here or in another process.
    #[error(
        "the database is open already, in this process or another one; close it there. To read while another process writes, that one must open the store with RedbOptions::shared"
    )]
    AlreadyOpen,
    /// A database that was not closed, and cannot be repaired by a reader.
    #[error(
        "the database was not closed by its last writer; open it once with RedbStore::open, which repairs it"
    )]
    NeedsRepair,
    /// The file is damaged, as far as redb can tell.
    #[error("the database is damaged: {what}; restore it from a copy")]
    Damaged {
        /// What was found.
        what: String,
    },
    /// A row that is not what was written.
    #[error(
        "the row {key:?} of {table} has a wrong checksum: it is damaged; restore the store from a copy"
    )]
    Checksum {
        /// The table.
        table: String,
        /// The bytes of its key, as text.
        key: String,
    },
    /// A row whose checksum is right, but which is none.
    #[error(transparent)]
    Row(#[from] Damaged),
    /// The index and the rows do not agree.
    #[error(
        "the index and {entry} do not agree, {what}: the store is damaged; restore it from a copy"
    )]
    Index {
        /// The row.
        entry: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The user has one of our tables open in this transaction.
    #[error(
        "the table {table:?} is open in this transaction; drop it before twobox is called, since redb opens a table once at a time"
    )]
    TableInUse {
        /// The table.
        table: String,
    },
    /// Reading or writing failed.
    #[error(
        "reading or writing the database failed: {0}; see to the disk. The store opens the database again by itself"
    )]
    Io(#[source] Arc<StorageFailure>),
    /// redb stopped after an earlier failure. The store opens the database again by itself when the
    /// next transaction or view begins; this is for those that were open.
    #[error(
        "the database stopped after an earlier failure; begin the transaction or the view again. What was committed is safe"
    )]
    Stopped,
    /// A database that is the user's stopped after an earlier failure, and cannot be opened again
    /// from here.
    #[error(
        "the database that was given to RedbStore::with_database stopped after an earlier failure; open it again and make a new store of it. What was committed is safe"
    )]
    StoppedLent,
    /// The database stopped after an earlier failure, and somebody still holds it.
    #[error(
        "the database stopped after an earlier failure, and is opened again once nobody holds it: end its open write transactions, and drop what RedbStore::database gave. What was committed is safe"
    )]
    StillHeld,
    /// Somebody holds the database, which is needed alone.
    #[error(
        "the database is in use: end its open transactions, and drop its views and what RedbStore::database gave"
    )]
    InUse,
    /// A backup lacks a table of the user's.
    #[error(
        "the backup would lack the table {table:?}, which is not ours, and was not made; copy it in the function that RedbView::backup takes"
    )]
    NotCopied {
        /// The table.
        table: String,
    },
    /// Another process has opened this store, and this one is a fork of it.
    #[cfg(feature = "std")]
    #[error(
        "the store was opened by process {opened_by}, of which this one is a fork, and nothing was done; open the file anew in the process that uses it, after that one has closed it"
    )]
    OtherProcess {
        /// The process that opened it.
        opened_by: u32,
    },
    /// The transaction is broken by an earlier error.
    #[error(
        "an earlier error has left this transaction half written; nothing of it was committed: begin it again"
    )]
    Broken,
    /// Anything else that redb says.
    #[error("redb: {0}; see its documentation of this error")]
    Redb(Arc<redb::Error>),
}

impl twobox::StoreError for RedbError {}

impl RedbError {
    /// Whether something in the store is not what was written.
    pub(crate) const fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Damaged { .. } | Self::Checksum { .. } | Self::Row(_) | Self::Index { .. }
        )
    }
}

impl From<StorageFailure> for RedbError {
    fn from(error: StorageFailure) -> Self {
        Self::Io(Arc::new(error))
    }
}

impl From<redb::Error> for RedbError {
    fn from(error: redb::Error) -> Self {
        #[cfg(feature = "std")]
        use std::io::ErrorKind::{InvalidData, UnexpectedEof};
        let said = error.to_string();
        match error {
            redb::Error::DatabaseAlreadyOpen | redb::Error::LockProtocolMismatch => {
                Self::AlreadyOpen
            }
            redb::Error::RepairAborted => Self::NeedsRepair,
            redb::Error::Corrupted(what) => Self::Damaged { what },
            #[cfg(feature = "std")]
            redb::Error::Io(error) if matches!(error.kind(), UnexpectedEof | InvalidData) => {
                Self::Damaged { what: said }
            }
            #[cfg(feature = "std")]
            redb::Error::Io(error) => error.into(),
            #[cfg(not(feature = "std"))]
            redb::Error::Backend(error) => StorageFailure::Other(error).into(),
            redb::Error::PreviousIo
            | redb::Error::DatabaseClosed
            | redb::Error::LockPoisoned(_) => Self::Stopped,
            redb::Error::TransactionPoisoned => Self::Broken,
            redb::Error::TransactionInProgress => Self::InUse,
            redb::Error::TableAlreadyOpen(table, _) => Self::TableInUse { table },
            redb::Error::TableDoesNotExist(table) => {
                Self::Damaged { what: format!("the table {table:?} is missing") }
            }
            #[cfg(feature = "std")]
            redb::Error::TableTypeMismatch { table, .. } => Self::NameTaken { table, what: said },
            #[cfg(not(feature = "std"))]
            redb::Error::TableTypeMismatch(error) => {
                Self::NameTaken { table: error.table().to_string(), what: said }
            }
            redb::Error::TableIsMultimap(table) => Self::NameTaken { table, what: said },
            other => Self::Redb(Arc::new(other)),
        }
    }
}

macro_rules! from_redb {
    ($($kind:ident)*) => {$(
        impl From<redb::$kind> for RedbError {
            fn from(error: redb::$kind) -> Self {
                redb::Error::from(error).into()
            }
        }
    )*};
}

from_redb!(StorageError CompactionError DatabaseError TransactionError TableError CommitError);

/// Runs `work` and makes an error of a panic in redb. It does not verify the checksums of its pages
/// when it reads them, and some damage makes it panic; a store has to answer with an error. What
/// panicked is not used again: a transaction rolls back.
#[cfg(feature = "std")]
pub(crate) fn shielded<R>(work: impl FnOnce() -> Result<R, RedbError>) -> Result<R, RedbError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.downcast_ref::<String>().cloned());
        let what = text.unwrap_or_else(|| "no message".to_string());
        Err(RedbError::Damaged { what: format!("redb panicked: {what}") })
    })
}

/// Without std a panic ends the program.
#[cfg(not(feature = "std"))]
pub(crate) fn shielded<R>(work: impl FnOnce() -> Result<R, RedbError>) -> Result<R, RedbError> {
    work()
}
