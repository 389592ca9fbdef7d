//! The harness of the reference store, which several tests share.

use twobox_conformance::Harness;
use twobox_memory::MemoryStore;

/// Opens memory stores.
pub(crate) struct Memory(MemoryStore);

impl Harness for Memory {
    type Store = MemoryStore;

    fn open() -> Self {
        Self(MemoryStore::new())
    }

    fn crash(self) -> Self {
        Self(self.0.crash())
    }

    fn store(&self) -> &MemoryStore {
        &self.0
    }
}
