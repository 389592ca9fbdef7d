//! Backups of a store that is in use, and what open views cost it (F49).

use redb::{ReadTransaction, StorageBackend, WriteTransaction};
#[cfg(feature = "std")]
use {
    crate::open::{fresh_path, publish},
    redb::backends::FileBackend,
    std::fs::{self, File},
    std::io::ErrorKind,
    std::path::Path,
};

use alloc::string::ToString;

use crate::error::{RedbError, shielded};
use crate::{RedbOptions, RedbStore, RedbView, tables};

impl RedbView {
    /// Copies what this view shows into a new store at a path where there is nothing, while others
    /// go on writing. The copy is compact, durable, and complete before it gets its name; a crash
    /// may leave a file beside it whose name ends in `.new`, which can be removed.
    ///
    /// `own` copies the user's own tables, from the view into the copy, as far as there are any:
    /// redb cannot copy a table without its types.
    ///
    /// The checksum of each row is looked at on the way. The copy has the leases that were there,
    /// which end when it is opened (see [`RedbOptions::end_leases`]). Whoever works on with a copy
    /// delivers again what was confirmed since, and inboxes absorb that (P5).
    ///
    /// # Errors
    ///
    /// [`RedbError::AlreadyExists`], [`RedbError::NotCopied`], the error of `own`, or what redb says
    /// of either database. There is nothing at the path then.
    #[cfg(feature = "std")]
    pub fn backup(
        &self,
        path: impl AsRef<Path>,
        own: impl FnOnce(&ReadTransaction, &WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), RedbError> {
        let path = path.as_ref();
        let exists = || RedbError::AlreadyExists { place: path.display().to_string() };
        if path.try_exists()? {
            return Err(exists());
        }
        let fresh = fresh_path(path);
        let made = self.backup_file(&fresh, own).and_then(|()| match publish(&fresh, path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(exists()),
            published => published.map_err(RedbError::from),
        });
        if made.is_err() {
            // It may never have been made; what counts is the error that we have.
            let _ = fs::remove_file(&fresh);
        }
        made
    }

    #[cfg(feature = "std")]
    fn backup_file(
        &self,
        path: &Path,
        own: impl FnOnce(&ReadTransaction, &WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), RedbError> {
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        self.backup_on(FileBackend::new(file)?, own)
    }

    /// As [`RedbView::backup`], onto an empty storage. What a crash leaves half copied is refused
    /// by [`RedbOptions::open_on`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn backup_on(
        &self,
        storage: impl StorageBackend,
        own: impl FnOnce(&ReadTransaction, &WriteTransaction) -> Result<(), redb::Error>,
    ) -> Result<(), RedbError> {
        if storage.len()? > 0 {
            return Err(RedbError::AlreadyExists { place: "the storage".to_string() });
        }
        shielded(|| {
            let copy = RedbOptions::new().builder().create_with_backend(storage)?;
            tables::copy(self.redb(), &copy, own)?;
            Ok(copy.close()?)
        })
    }
}

impl RedbStore {
    /// Copies all that is committed by now into a new store, as [`RedbView::backup`] does; for a
    /// store without tables of the user's own.
    ///
    /// # Errors
    ///
    /// As there.
    #[cfg(feature = "std")]
    pub fn backup(&self, path: impl AsRef<Path>) -> Result<(), RedbError> {
        twobox::Reader::view(self)?.backup(path, |_, _| Ok(()))
    }

    /// Makes the file as small as it can be, and says whether it has become smaller. It takes as
    /// long as to write the whole file, and everyone else waits until it is done.
    ///
    /// # Errors
    ///
    /// [`RedbError::InUse`] at once if a view or a transaction is open, or the program holds what
    /// [`RedbStore::database`] gave; otherwise what redb says.
    pub fn compact(&self) -> Result<bool, RedbError> {
        self.home.alone(|database| shielded(|| Ok(database.compact()?)))
    }

    /// How long the view has been open that has been open longest, of those that this store has
    /// given; `None` if there is none. As long as a view is open, nothing that it shows is reused,
    /// and the file grows with each commit.
    #[cfg(feature = "std")]
    #[must_use]
    pub fn oldest_view(&self) -> Option<core::time::Duration> {
        self.views.oldest()
    }
}
