//! A storage in memory that counts what is asked of it, and fails to sync when it is told to.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use redb::StorageBackend;
use redb::backends::InMemoryBackend;

/// The storage. Its clones are the same one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counted(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    storage: InMemoryBackend,
    syncs: AtomicUsize,
    growths: AtomicUsize,
    read: AtomicUsize,
    written: AtomicUsize,
    fails: AtomicBool,
}

/// What was asked of a storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    /// How often it was synced, beside once for each growth of the file, which depends on how full
    /// that was.
    pub(crate) syncs: usize,
    /// Bytes.
    pub(crate) read: usize,
    /// Bytes.
    pub(crate) written: usize,
}

impl Counted {
    /// What `work` asks of it.
    pub(crate) fn of<R>(&self, work: impl FnOnce() -> R) -> (R, Counts) {
        let Inner { syncs, growths, read, written, .. } = &*self.0;
        [syncs, growths, read, written].iter().for_each(|count| count.store(0, Ordering::SeqCst));
        let result = work();
        let [syncs, growths, read, written] =
            [syncs, growths, read, written].map(|count| count.load(Ordering::SeqCst));
        (result, Counts { syncs: syncs - growths, read, written })
    }

    /// Another storage with the same bytes.
    pub(crate) fn copy(&self) -> Self {
        let copy = Self::default();
        let mut bytes = vec![0; usize::try_from(self.0.storage.len().unwrap()).unwrap()];
        self.0.storage.read(0, &mut bytes).unwrap();
        copy.0.storage.set_len(bytes.len() as u64).unwrap();
        copy.0.storage.write(0, &bytes).unwrap();
        copy
    }

    /// From now on.
    pub(crate) fn fail(&self) {
        self.0.fails.store(true, Ordering::SeqCst);
    }

    pub(crate) fn fails(&self) -> bool {
        self.0.fails.load(Ordering::SeqCst)
    }
}

impl StorageBackend for Counted {
    fn len(&self) -> io::Result<u64> {
        self.0.storage.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read.fetch_add(out.len(), Ordering::SeqCst);
        self.0.storage.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if len > self.0.storage.len()? {
            self.0.growths.fetch_add(1, Ordering::SeqCst);
        }
        self.0.storage.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.syncs.fetch_add(1, Ordering::SeqCst);
        if self.fails() { Err(io::Error::other("the disk is gone")) } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.written.fetch_add(data.len(), Ordering::SeqCst);
        self.0.storage.write(offset, data)
    }
}
