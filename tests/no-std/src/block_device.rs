//! A block device in memory of its own, which the heap does not count.

use core::fmt;

use redb::{BackendError, StorageBackend};
use spin::Mutex;

/// How many bytes it holds at most.
const SIZE: usize = 256 * 1024;

/// A device; it is there from the beginning, and holds what was written when the program above it
/// starts again.
pub(crate) struct BlockDevice(Mutex<Written>);

struct Written {
    blocks: [u8; SIZE],
    len: usize,
}

impl BlockDevice {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(Written { blocks: [0; SIZE], len: 0 }))
    }

    /// How much of it is in use.
    pub(crate) fn used(&self) -> usize {
        self.0.lock().len
    }
}

impl fmt::Debug for BlockDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockDevice").finish_non_exhaustive()
    }
}

impl StorageBackend for &'static BlockDevice {
    fn len(&self) -> Result<u64, BackendError> {
        Ok(self.used() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), BackendError> {
        let mut written = self.0.lock();
        out.copy_from_slice(written.part(offset, out.len())?);
        Ok(())
    }

    fn set_len(&self, len: u64) -> Result<(), BackendError> {
        let mut written = self.0.lock();
        let (old, new) = (written.len, usize::try_from(len).unwrap_or(usize::MAX));
        // What is cut off is read as zero if it is grown back.
        written.blocks.get_mut(old.min(new)..old.max(new)).ok_or_else(full)?.fill(0);
        written.len = new;
        Ok(())
    }

    fn sync_data(&self) -> Result<(), BackendError> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<(), BackendError> {
        let mut written = self.0.lock();
        written.part(offset, data.len())?.copy_from_slice(data);
        Ok(())
    }
}

impl Written {
    fn part(&mut self, offset: u64, size: usize) -> Result<&mut [u8], BackendError> {
        let end = (offset as usize).checked_add(size).filter(|end| *end <= self.len);
        end.map(|end| &mut self.blocks[offset as usize..end]).ok_or_else(full)
    }
}

fn full() -> BackendError {
    BackendError::Other("that is beyond the end of the block device".into())
}
