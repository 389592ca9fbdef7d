//! The conformance suite on redb. Its tables must be those of the reference store after each fault;
//! nothing is recorded here.

#![allow(clippy::unwrap_used, reason = "a harness that cannot open its store has nothing to test")]

mod common;

use std::io;
use std::sync::Arc;

use common::Memory;
use redb::backends::InMemoryBackend;
use redb::{ReadableTable, StorageBackend, TableDefinition};
use tempfile::TempDir;
use twobox::Key;
use twobox::codec::encode_key;
use twobox_conformance::{Damage, ErrorOf, Failure, Harness, TxOf, matrix, scenario};
use twobox_redb::{RedbOptions, RedbStore};

/// A table of the user's own.
const OWN: TableDefinition<'_, &str, &str> = TableDefinition::new("own");

fn put_own_row(
    tx: &redb::WriteTransaction,
    key: &str,
    value: &str,
) -> Result<(), twobox_redb::RedbError> {
    tx.open_table(OWN)?.insert(key, value)?;
    Ok(())
}

fn own_row(
    tx: &redb::WriteTransaction,
    key: &str,
) -> Result<Option<String>, twobox_redb::RedbError> {
    Ok(tx.open_table(OWN)?.get(key)?.map(|value| value.value().to_string()))
}

/// A small cache, and no look at the whole file when it is opened, which is tested elsewhere and
/// takes most of the time here.
const OPTIONS: RedbOptions =
    RedbOptions::new().cache_bytes(1 << 20).verify_on_open(false).end_leases(false);

/// redb on bytes in memory, which stay when the store is gone.
struct OnBytes {
    store: RedbStore,
    bytes: Bytes,
}

#[derive(Debug, Clone)]
struct Bytes(Arc<InMemoryBackend>);

impl StorageBackend for Bytes {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        StorageBackend::read(&*self.0, offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        StorageBackend::write(&*self.0, offset, data)
    }
}

impl Bytes {
    /// The bytes as they are now, as a program finds them that starts after this one was killed.
    fn copy(&self) -> Self {
        let mut bytes = vec![0; usize::try_from(self.len().unwrap()).unwrap()];
        StorageBackend::read(self, 0, &mut bytes).unwrap();
        let copy = InMemoryBackend::new();
        copy.set_len(bytes.len() as u64).unwrap();
        StorageBackend::write(&copy, 0, &bytes).unwrap();
        Self(Arc::new(copy))
    }
}

impl Harness for OnBytes {
    type Store = RedbStore;
    const OWN_ROWS: bool = true;

    fn open() -> Self {
        let bytes = Bytes(Arc::new(InMemoryBackend::new()));
        let store = OPTIONS.create_on(bytes.clone()).unwrap();
        Self { store, bytes }
    }

    /// The copy is made before the store is closed, so redb finds a database that was not closed
    /// and has to repair it.
    fn crash(self) -> Self {
        let bytes = self.bytes.copy();
        let store = OPTIONS.open_on(bytes.clone()).unwrap();
        Self { store, bytes }
    }

    fn store(&self) -> &RedbStore {
        &self.store
    }

    fn put_own_row(tx: &mut TxOf<'_, Self>, key: &str, value: &str) -> Result<(), ErrorOf<Self>> {
        put_own_row(tx.redb(), key, value)
    }

    fn own_row(tx: &mut TxOf<'_, Self>, key: &str) -> Result<Option<String>, ErrorOf<Self>> {
        own_row(tx.redb(), key)
    }
}

/// A table as redb knows it.
type Kept<'a> = TableDefinition<'a, &'static [u8], &'static [u8]>;

/// A CRC-32 that begins with this value.
fn crc32(first: u32, bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
    let byte = |crc: u32, byte: &u8| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc));
    !bytes.iter().fold(!first, byte)
}

impl OnBytes {
    /// Changes a value and opens the store again, as if the bytes on the disk had been changed.
    fn spoiled(
        self,
        table: &str,
        key: &[u8],
        change: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Self, String> {
        let tx = self.store.database().unwrap().begin_write().unwrap();
        {
            let mut table = tx.open_table(Kept::new(table)).unwrap();
            let mut value = table.get(key).unwrap().unwrap().value().to_vec();
            change(&mut value);
            table.insert(key, &*value).unwrap();
        }
        tx.commit().unwrap();
        let bytes = self.bytes.copy();
        let store = OPTIONS.open_on(bytes.clone()).map_err(|error| error.to_string())?;
        Ok(Self { store, bytes })
    }
}

impl Damage for OnBytes {
    fn damage(self, row: &Key) -> Result<Self, String> {
        let mut key = Vec::new();
        encode_key(row, &mut key);
        let table = format!("twobox_{}", row.table().name());
        self.spoiled(&table, &key, |value| value[0] ^= 1)
    }

    fn open_as(self, version: u32) -> Result<Self, String> {
        self.spoiled("twobox_meta", b"format", |value| {
            let sealed = [&b"format"[..], &version.to_be_bytes()].concat();
            let seal = crc32(1 << 16 | 6, &sealed);
            *value = [version.to_be_bytes(), seal.to_be_bytes()].concat();
        })
    }
}

twobox_conformance::suite_damage!(OnBytes);

// A run costs many times what it costs in memory, so the reference, in `tests/memory.rs`, runs
// everything: each single fault with one store and with two, each going on and started again, and
// all pairs. Here each single fault is run with one store going on, and with two stores started
// again, where the tables must be the reference's; and each 200th pair.
twobox_conformance::suite!(OnBytes, pairs: 200, reference: Memory);

/// What is reopened here is as it was, leases included: that opening ends them is tested elsewhere.
const KEEPING: RedbOptions = RedbOptions::new().end_leases(false);

/// redb in a file.
struct InFile {
    store: RedbStore,
    folder: TempDir,
}

impl Harness for InFile {
    type Store = RedbStore;
    const OWN_ROWS: bool = true;

    fn open() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = RedbStore::create(folder.path().join("shop.redb")).unwrap();
        Self { store, folder }
    }

    fn crash(self) -> Self {
        drop(self.store);
        let store = KEEPING.open(self.folder.path().join("shop.redb")).unwrap();
        Self { store, folder: self.folder }
    }

    fn store(&self) -> &RedbStore {
        &self.store
    }

    fn put_own_row(tx: &mut TxOf<'_, Self>, key: &str, value: &str) -> Result<(), ErrorOf<Self>> {
        put_own_row(tx.redb(), key, value)
    }

    fn own_row(tx: &mut TxOf<'_, Self>, key: &str) -> Result<Option<String>, ErrorOf<Self>> {
        own_row(tx.redb(), key)
    }
}

/// What a real file adds, in scenarios that crash.
#[test]
fn in_a_file() -> Result<(), Failure> {
    twobox_conformance::contract::what_is_committed_stays::<InFile>()?;
    let scenarios = [scenario::answer_lost, scenario::confirmation_lost, scenario::own_rows];
    scenarios.iter().try_for_each(matrix::scenario::<InFile>)
}
