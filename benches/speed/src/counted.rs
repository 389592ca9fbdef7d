//! A file for redb that counts its syncs: one for each commit that is durable when it returns. When
//! it has grown, it is synced once more, which is not counted.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use redb::StorageBackend;
use redb::backends::FileBackend;

/// A new file for a database.
#[derive(Debug)]
pub struct CountedFile {
    file: FileBackend,
    grown: AtomicBool,
    syncs: Syncs,
}

/// How often a file was synced.
#[derive(Debug, Clone, Default)]
pub struct Syncs(Arc<AtomicU64>);

impl Syncs {
    /// So far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl CountedFile {
    /// Where there is nothing yet.
    #[must_use]
    pub fn create(path: &Path) -> (Self, Syncs) {
        let syncs = Syncs::default();
        let file = File::options().read(true).write(true).create_new(true).open(path);
        let file = FileBackend::new(file.unwrap()).unwrap();
        (Self { file, grown: AtomicBool::new(false), syncs: syncs.clone() }, syncs)
    }
}

impl StorageBackend for CountedFile {
    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        // After it has shrunk, there is no sync of its own.
        if len > self.file.len()? {
            self.grown.store(true, Ordering::Relaxed);
        }
        self.file.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        if !self.grown.swap(false, Ordering::Relaxed) {
            self.syncs.0.fetch_add(1, Ordering::Relaxed);
        }
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write(offset, data)
    }

    fn close(&self) -> io::Result<()> {
        self.file.close()
    }
}
