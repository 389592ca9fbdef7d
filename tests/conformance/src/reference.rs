//! The harness of the reference store, with which others are compared.

use twobox_memory::MemoryStore;

use crate::harness::Harness;

/// Opens memory stores: what is given as `reference:` to [`suite!`](crate::suite).
#[derive(Debug)]
pub struct Reference(MemoryStore);

impl Harness for Reference {
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
