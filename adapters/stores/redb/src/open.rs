//! Creating and opening: how a file becomes a store, and how everything else is refused without
//! being changed.

use alloc::boxed::Box;
use alloc::string::ToString;
use alloc::sync::Arc;
#[cfg(feature = "std")]
use {
    crate::RedbReader,
    crate::database::ReadHome,
    core::sync::atomic::{AtomicU32, Ordering},
    redb::backends::FileBackend,
    std::fs::{self, File, OpenOptions},
    std::io::{self, ErrorKind},
    std::path::{Path, PathBuf},
    std::process,
};

use core::num::NonZeroU16;
use redb::{Builder, ConcurrencyMode, Database, ReadableDatabase, StorageBackend};

use twobox::{EndLeases, LeasesEnded, Millis, RunError, Store};

use crate::database::{Home, Open, Unsynced};
use crate::error::{RedbError, shielded};
#[cfg(feature = "std")]
use crate::group::Group;
use crate::trial::Trial;
#[cfg(feature = "std")]
use crate::views::Views;
use crate::{RedbStore, tables};

/// The first bytes of every redb file.
const MAGIC: [u8; 9] = *b"redb\x1a\x0a\xa9\x0d\x0a";

/// How a store is opened.
///
/// ```
/// use twobox_redb::RedbOptions;
///
/// let folder = tempfile::tempdir()?;
/// let store = RedbOptions::new().cache_bytes(8 << 20).shared(true).open_or_create(folder.path().join("shop.redb"))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct RedbOptions {
    cache_bytes: usize,
    verify: bool,
    shared: bool,
    sync_deliveries: bool,
    end_leases: bool,
}

/// At so many lanes opening looks in one transaction.
const PAGE: NonZeroU16 = NonZeroU16::new(256).unwrap();

impl Default for RedbOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl RedbOptions {
    /// A cache of 64 MiB; verified when it is opened, and leases ended; for this process alone; each
    /// commit durable when it returns.
    pub const fn new() -> Self {
        Self {
            cache_bytes: 64 << 20,
            verify: true,
            shared: false,
            sync_deliveries: true,
            end_leases: true,
        }
    }

    /// With at most so many bytes of the file kept in memory. Default 64 MiB.
    pub const fn cache_bytes(mut self, bytes: usize) -> Self {
        self.cache_bytes = bytes;
        self
    }

    /// Whether opening verifies the checksums of the whole file. Default true.
    ///
    /// redb does not verify its pages when it reads them, so damage would be found late. The rows
    /// have checksums of their own and never come out changed, but damage elsewhere can lead to
    /// rows as they once were, or hide some. It can also make redb panic, which ends the process if
    /// it happens while a database is being closed. Verifying reads the whole file once; turn it
    /// off if that takes too long for your file, and verify at another time with
    /// [`redb::Database::check_integrity`]. A reader ([`RedbOptions::open_read_only`]) cannot
    /// verify.
    pub const fn verify_on_open(mut self, verify: bool) -> Self {
        self.verify = verify;
        self
    }

    /// Whether other processes may read the store while this one writes (redb's `SingleWriter`
    /// mode). Default false.
    ///
    /// It costs one more sync of the disk for each commit, and needs locks on ranges of a file, as
    /// Linux, Apple systems and Windows have them.
    pub const fn shared(mut self, shared: bool) -> Self {
        self.shared = shared;
        self
    }

    /// Whether a relay's own commits are made durable at once: claims, renewals and settlements
    /// alone. Default true.
    ///
    /// If not, they cost no sync, and become durable with the next other commit, or when the store
    /// is closed. If the process is killed or the power fails before that, events that were
    /// confirmed are delivered again, which a consumer's inbox absorbs as always (P3, P5), and
    /// starts and failures that were counted are forgotten. An event that kills the process before
    /// any other commit therefore does so again and again, without a start being counted (F4): turn
    /// this off only where no event can. Everything else is durable when it returns, as always. A
    /// store that is [shared](RedbOptions::shared) makes every commit durable.
    pub const fn sync_deliveries(mut self, sync: bool) -> Self {
        self.sync_deliveries = sync;
        self
    }

    /// Whether opening ends the leases that it finds. Default true.
    ///
    /// One process at a time writes a store. So whoever has leased lanes in it before is gone, or
    /// has closed it, and a process that is started again after it was killed need not wait until
    /// the leases run out (F32). Starts that were not answered stay counted (F4). Opening reads the
    /// row of each lane for this. Turn it off if a relay goes on over the closing and opening of its
    /// store: it loses its leases, and what it was publishing is published again.
    ///
    /// A store that opens its file again by itself keeps the leases, and so does
    /// [`RedbOptions::with_database`]: the relays are alive.
    pub const fn end_leases(mut self, end: bool) -> Self {
        self.end_leases = end;
        self
    }
}

#[cfg(feature = "std")]
impl RedbOptions {
    /// Creates a store at a path where there is nothing.
    ///
    /// The file is complete before it gets its name, so a crash leaves a whole store or none. It
    /// may leave a file beside it whose name ends in `.new`, which can be removed.
    ///
    /// # Errors
    ///
    /// [`RedbError::AlreadyExists`], or [`RedbError::Io`].
    pub fn create(self, path: impl AsRef<Path>) -> Result<RedbStore, RedbError> {
        let path = path.as_ref();
        let exists = || RedbError::AlreadyExists { place: path.display().to_string() };
        if path.try_exists()? {
            return Err(exists());
        }
        let fresh = fresh_path(path);
        let made = self.make(&fresh).and_then(|()| match publish(&fresh, path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(exists()),
            published => published.map_err(RedbError::from),
        });
        if made.is_err() {
            // It may never have been made; what counts is the error that we have.
            let _ = fs::remove_file(&fresh);
        }
        made?;
        self.open(path)
    }

    fn make(self, path: &Path) -> Result<(), RedbError> {
        let file = File::options().read(true).write(true).create_new(true).open(path)?;
        let store = self.create_on(FileBackend::new(file)?)?;
        store.close()
    }

    /// Opens a store.
    ///
    /// When the disk has failed, the store opens the file of this path again by itself; see
    /// [`RedbStore`].
    ///
    /// # Errors
    ///
    /// [`RedbError`]. The file is then as it was before, byte for byte, unless the disk failed.
    pub fn open(self, path: impl AsRef<Path>) -> Result<RedbStore, RedbError> {
        let path = path.as_ref().to_path_buf();
        self.own(move |unsynced| {
            let file = open_file(&path, File::options().read(true).write(true))?;
            let place = path.display().to_string();
            self.open_storage(&Arc::new(FileBackend::new(file)?), &place, unsynced)
        })
    }

    /// Opens the store at this path, or creates it.
    ///
    /// # Errors
    ///
    /// As [`RedbOptions::open`] and [`RedbOptions::create`].
    pub fn open_or_create(self, path: impl AsRef<Path>) -> Result<RedbStore, RedbError> {
        let path = path.as_ref();
        match self.open(path) {
            Err(RedbError::Missing { .. }) => match self.create(path) {
                // Somebody else was faster.
                Err(RedbError::AlreadyExists { .. }) => self.open(path),
                created => created,
            },
            opened => opened,
        }
    }

    /// Opens a store to read it, even while another process writes it, if that one has it open as
    /// [`RedbOptions::shared`].
    ///
    /// # Errors
    ///
    /// [`RedbError`], among them [`RedbError::NeedsRepair`] if the last writer did not close it.
    /// The file is never changed.
    pub fn open_read_only(self, path: impl AsRef<Path>) -> Result<RedbReader, RedbError> {
        let path = path.as_ref().to_path_buf();
        let again = move || {
            let file = FileBackend::new(open_file(&path, File::options().read(true))?)?;
            check_magic(&file, &path.display().to_string())?;
            shielded(|| {
                let mut builder = self.builder();
                // A reader in this mode goes together with a writer that has the file open, and
                // with none.
                builder.set_concurrency_mode(ConcurrencyMode::SingleWriter);
                let storage = Trial::accepted(Arc::new(file));
                let health = storage.health();
                let database = builder.open_read_only_with_backend(storage)?;
                tables::check(&database.begin_read()?)?;
                Ok((Arc::new(database), health))
            })
        };
        Ok(RedbReader { home: ReadHome::new(Box::new(again))? })
    }
}

impl RedbOptions {
    /// Creates a store on an empty storage of any kind, such as
    /// [`redb::backends::InMemoryBackend`].
    ///
    /// # Errors
    ///
    /// [`RedbError::AlreadyExists`] if it is not empty. What a crash leaves half created is refused by [`RedbOptions::open_on`]:
    /// empty the storage and create it again.
    pub fn create_on(self, storage: impl StorageBackend) -> Result<RedbStore, RedbError> {
        if storage.len()? > 0 {
            return Err(RedbError::AlreadyExists { place: "the storage".to_string() });
        }
        let storage = Arc::new(storage);
        let trial = Trial::accepted(storage.clone());
        let database = Arc::new(self.builder().create_with_backend(trial.clone())?);
        prepare(&database)?;
        let again = self.again_on(storage);
        Ok(self.over(Home::own((database, trial.health()), Box::new(again))))
    }

    /// The store in a database that is open already, of which these options set
    /// [`RedbOptions::sync_deliveries`] alone. If it has no store, our tables are added, in a
    /// commit of their own.
    ///
    /// # Errors
    ///
    /// [`RedbError::NameTaken`] if there are other tables of our names,
    /// [`RedbError::UnknownFormat`], or what redb says.
    pub fn with_database(self, database: impl Into<Arc<Database>>) -> Result<RedbStore, RedbError> {
        let database = database.into();
        prepare(&database)?;
        Ok(self.over(Home::lent(database)))
    }

    /// Opens the store on a storage of any kind.
    ///
    /// When the storage has failed, the store opens it again by itself, once
    /// [`StorageBackend::close`] was called: it must be of use after that.
    ///
    /// # Errors
    ///
    /// As [`RedbOptions::open`].
    pub fn open_on(self, storage: impl StorageBackend) -> Result<RedbStore, RedbError> {
        self.own(self.again_on(Arc::new(storage)))
    }

    /// How to open what lies on this storage.
    fn again_on(
        self,
        storage: Arc<impl StorageBackend>,
    ) -> impl Fn(Unsynced) -> Result<Open, RedbError> + Send + Sync + 'static {
        move |unsynced| self.open_storage(&storage, "the storage", unsynced)
    }

    /// A store that is opened like this, now and after each failure.
    fn own(
        self,
        open: impl Fn(Unsynced) -> Result<Open, RedbError> + Send + Sync + 'static,
    ) -> Result<RedbStore, RedbError> {
        let opened = open(Unsynced(false))?;
        let store = self.over(Home::own(opened, Box::new(open)));
        if self.end_leases {
            end_leases(&store)?;
        }
        Ok(store)
    }

    fn open_storage(
        self,
        storage: &Arc<impl StorageBackend>,
        place: &str,
        unsynced: Unsynced,
    ) -> Result<Open, RedbError> {
        check_magic(&**storage, place)?;
        let trial = Trial::new(storage.clone())?;
        shielded(|| {
            let mut builder = self.builder();
            builder.set_check_integrity_on_open(self.verify);
            let database = builder.create_with_backend(trial.clone())?;
            tables::check(&database.begin_read()?)?;
            trial.accept(unsynced)?;
            Ok((Arc::new(database), trial.health()))
        })
    }

    fn over(self, home: Home) -> RedbStore {
        RedbStore {
            home,
            sync_deliveries: self.sync_deliveries,
            #[cfg(feature = "std")]
            group: Group::default(),
            #[cfg(feature = "std")]
            views: Views::default(),
        }
    }

    pub(crate) fn builder(self) -> Builder {
        let mut builder = Database::builder();
        builder.set_cache_size(self.cache_bytes);
        if self.shared {
            builder.set_concurrency_mode(ConcurrencyMode::SingleWriter);
        }
        builder
    }
}

#[cfg(feature = "std")]
fn open_file(path: &Path, options: &OpenOptions) -> Result<File, RedbError> {
    options.open(path).map_err(|error| {
        if error.kind() == ErrorKind::NotFound {
            RedbError::Missing { path: path.to_path_buf() }
        } else if error.kind() == ErrorKind::IsADirectory {
            RedbError::NotRedb { place: path.display().to_string(), what: "it is a folder" }
        } else {
            error.into()
        }
    })
}

/// Ends the leases of a process that is gone.
fn end_leases(store: &RedbStore) -> Result<(), RedbError> {
    let mut page = EndLeases::new(PAGE);
    loop {
        // What is done follows from the rows alone, whatever the time.
        match store.run(&page, Millis::new(0)) {
            Ok(LeasesEnded { next: Some(next), .. }) => page = page.after(next),
            Ok(LeasesEnded { next: None, .. }) => return Ok(()),
            // Whoever comes to the row is told. The other leases run out by themselves.
            Err(RunError::Store(error)) if error.is_damage() => return Ok(()),
            Err(RunError::Store(error) | RunError::Unknown(error)) => return Err(error),
            // Nobody else has the store.
            Err(RunError::Conflict(_)) => {}
            Err(RunError::Refused(never)) => match never {},
        }
    }
}

/// Makes a store of the database, unless it is one.
fn prepare(database: &Database) -> Result<(), RedbError> {
    shielded(|| match tables::check(&database.begin_read()?) {
        Err(RedbError::NotTwobox) => {
            let tx = database.begin_write()?;
            tables::prepare(&tx)?;
            Ok(tx.commit()?)
        }
        checked => checked,
    })
}

/// Looks at the first bytes: redb would make a database of an empty storage.
fn check_magic(storage: &impl StorageBackend, place: &str) -> Result<(), RedbError> {
    let refuse = |what| Err(RedbError::NotRedb { place: place.to_string(), what });
    let mut begins = [0; MAGIC.len()];
    match storage.len()? {
        0 => refuse("it is empty"),
        len if len < begins.len() as u64 => refuse("it is too short"),
        _ => {
            storage.read(0, &mut begins)?;
            if begins == MAGIC { Ok(()) } else { refuse("it begins with other bytes") }
        }
    }
}

/// A path in the same folder that no one else uses.
#[cfg(feature = "std")]
pub(crate) fn fresh_path(path: &Path) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}-{}.new", process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    path.with_file_name(name)
}

/// Gives the file its name, if nothing has that name, and makes the name durable.
#[cfg(feature = "std")]
pub(crate) fn publish(fresh: &Path, path: &Path) -> io::Result<()> {
    match fs::hard_link(fresh, path) {
        Ok(()) => fs::remove_file(fresh)?,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(error),
        // A file system without links; nothing was there a moment ago.
        Err(_) => fs::rename(fresh, path)?,
    }
    #[cfg(unix)]
    {
        let folder =
            path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        File::open(folder)?.sync_all()?;
    }
    Ok(())
}
