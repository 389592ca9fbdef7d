//! Opening on trial: redb changes a file by opening it, and we do not change what turns out not to
//! be ours, or damaged.
//!
//! A [`Trial`] lies between redb and the storage. At first it keeps what redb writes to itself;
//! once the store has been looked at and found good, [`Trial::accept`] does all of it in the same
//! order, syncs included, and from then on does at once what redb asks for. So a crash at any point
//! leaves what a crash in redb's own opening would have left. The locks are real from the beginning.
//!
//! It also notes what the storage meets, and keeps it from a process that did not open it.

use alloc::collections::BTreeMap;
use alloc::collections::btree_map::Entry;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Bound;
use core::sync::atomic::{AtomicBool, Ordering};

use redb::{BackendError, StorageBackend};
use spin::{Mutex, MutexGuard};

use crate::database::{Health, Unsynced};
use crate::error::{StorageFailure, beyond_the_end, of_another_process};
use crate::process::Process;

type Result<T, E = StorageFailure> = core::result::Result<T, E>;

const BLOCK: u64 = 4096;

/// How much is written again at once.
const REWRITTEN: u64 = 1 << 20;

/// A storage whose changes are kept back until they are accepted.
#[derive(Debug)]
pub(crate) struct Trial<B>(Arc<Inner<B>>);

#[derive(Debug)]
struct Inner<B> {
    storage: Arc<B>,
    health: Arc<Health>,
    process: Process,
    accepted: AtomicBool,
    kept: Mutex<Kept>,
}

/// What would be in the storage, as far as it differs.
#[derive(Debug, Default)]
struct Kept {
    changes: Vec<Kind>,
    blocks: BTreeMap<u64, Vec<u8>>,
    len: u64,
    /// How much of the storage still counts; behind it is what was grown, and zero.
    below: u64,
}

#[derive(Debug)]
enum Kind {
    Write(u64, Vec<u8>),
    SetLen(u64),
    Sync,
}

impl<B> Clone for Trial<B> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<B: StorageBackend> Trial<B> {
    pub(crate) fn new(storage: Arc<B>) -> Result<Self> {
        let len = storage.len()?;
        let kept = Mutex::new(Kept { len, below: len, ..Kept::default() });
        let (accepted, process) = (AtomicBool::new(false), Process::this());
        Ok(Self(Arc::new(Inner { storage, health: Arc::default(), process, accepted, kept })))
    }

    /// A storage of which nothing is kept back.
    pub(crate) fn accepted(storage: Arc<B>) -> Self {
        let (accepted, process) = (AtomicBool::new(true), Process::this());
        let (health, kept) = (Arc::default(), Mutex::default());
        Self(Arc::new(Inner { storage, health, process, accepted, kept }))
    }

    /// What the storage meets.
    pub(crate) fn health(&self) -> Arc<Health> {
        self.0.health.clone()
    }

    /// Does what was kept back. If that fails, what is left of it is never done.
    pub(crate) fn accept(&self, unsynced: Unsynced) -> Result<()> {
        let mut kept = self.kept();
        if unsynced.0 {
            rewrite(&*self.0.storage)?;
        }
        for change in &kept.changes {
            match change {
                Kind::Write(offset, data) => self.0.storage.write(*offset, data)?,
                Kind::SetLen(len) => self.0.storage.set_len(*len)?,
                Kind::Sync => self.0.storage.sync_data()?,
            }
        }
        *kept = Kept::default();
        self.0.accepted.store(true, Ordering::Release);
        Ok(())
    }

    /// The storage, once it is accepted.
    fn through(&self) -> Option<&B> {
        self.0.accepted.load(Ordering::Acquire).then_some(&*self.0.storage)
    }

    /// That this process may change the storage.
    fn may_change(&self) -> Result<()> {
        if self.0.process.is_this() { Ok(()) } else { Err(of_another_process()) }
    }

    /// Notes whether a call has failed.
    fn noted<T>(&self, done: Result<T>) -> Result<T> {
        done.inspect_err(|_| self.0.health.fail())
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.kept.lock()
    }
}

/// Writes all of a storage once more. After a sync that failed, a system may take for written what
/// never reached the disk; what is written again is not.
fn rewrite(storage: &impl StorageBackend) -> Result<()> {
    let len = storage.len()?;
    let mut piece = vec![0; REWRITTEN.min(len) as usize];
    let mut at = 0;
    while at < len {
        let piece = &mut piece[..REWRITTEN.min(len - at) as usize];
        storage.read(at, piece)?;
        storage.write(at, piece)?;
        at += piece.len() as u64;
    }
    storage.sync_data()
}

impl Kept {
    fn block<'k>(&'k mut self, storage: &impl StorageBackend, number: u64) -> Result<&'k mut [u8]> {
        match self.blocks.entry(number) {
            Entry::Occupied(there) => Ok(there.into_mut()),
            Entry::Vacant(place) => {
                let mut block = vec![0; BLOCK as usize];
                let start = number * BLOCK;
                let real = self.below.saturating_sub(start).min(BLOCK) as usize;
                if real > 0 {
                    storage.read(start, &mut block[..real])?;
                }
                Ok(place.insert(block))
            }
        }
    }

    fn read(&self, storage: &impl StorageBackend, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= self.len);
        let end = end.ok_or_else(beyond_the_end)?;
        let real = self.below.clamp(offset, end) - offset;
        let (there, grown) = out.split_at_mut(real as usize);
        grown.fill(0);
        if !there.is_empty() {
            storage.read(offset, there)?;
        }
        for (number, block) in self.blocks.range(offset / BLOCK..=end / BLOCK) {
            let start = number * BLOCK;
            let (from, to) = (start.max(offset), (start + BLOCK).min(end));
            if from < to {
                out[(from - offset) as usize..(to - offset) as usize]
                    .copy_from_slice(&block[(from - start) as usize..(to - start) as usize]);
            }
        }
        Ok(())
    }

    fn write(&mut self, storage: &impl StorageBackend, offset: u64, data: &[u8]) -> Result<()> {
        let mut at = 0;
        while at < data.len() {
            let place = offset + at as u64;
            let within = (place % BLOCK) as usize;
            let size = (BLOCK as usize - within).min(data.len() - at);
            self.block(storage, place / BLOCK)?[within..within + size]
                .copy_from_slice(&data[at..at + size]);
            at += size;
        }
        self.len = self.len.max(offset + data.len() as u64);
        self.changes.push(Kind::Write(offset, data.to_vec()));
        Ok(())
    }

    fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.blocks.retain(|number, _| number * BLOCK < len);
            if let Some(last) = self.blocks.get_mut(&(len / BLOCK)) {
                last[(len % BLOCK) as usize..].fill(0);
            }
            self.below = self.below.min(len);
        }
        self.len = len;
        self.changes.push(Kind::SetLen(len));
    }
}

impl<B: StorageBackend> StorageBackend for Trial<B> {
    fn len(&self) -> Result<u64> {
        match self.through() {
            Some(storage) => self.noted(storage.len()),
            None => Ok(self.kept().len),
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        match self.through() {
            Some(storage) => self.noted(storage.read(offset, out)),
            None => self.kept().read(&*self.0.storage, offset, out),
        }
    }

    fn set_len(&self, len: u64) -> Result<()> {
        self.may_change()?;
        match self.through() {
            Some(storage) => self.noted(storage.set_len(len)),
            None => {
                self.kept().set_len(len);
                Ok(())
            }
        }
    }

    fn sync_data(&self) -> Result<()> {
        self.may_change()?;
        match self.through() {
            Some(storage) => storage.sync_data().inspect_err(|_| self.0.health.fail_sync()),
            None => {
                self.kept().changes.push(Kind::Sync);
                Ok(())
            }
        }
    }

    fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.may_change()?;
        match self.through() {
            Some(storage) => self.noted(storage.write(offset, data)),
            None => self.kept().write(&*self.0.storage, offset, data),
        }
    }

    fn close(&self) -> Result<()> {
        // In a fork, the locks are those of the process that opened it.
        let closed = if self.0.process.is_this() { self.0.storage.close() } else { Ok(()) };
        self.0.health.close();
        closed
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.storage.try_lock_range(start, end)
    }

    fn try_lock_shared_range(
        &self,
        start: Bound<u64>,
        end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        self.0.storage.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.storage.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.storage.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        if self.0.process.is_this() { self.0.storage.unlock_range(start, end) } else { Ok(()) }
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.storage.query_lock_range(start, end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use redb::backends::InMemoryBackend;

    use std::io::ErrorKind;
    use std::sync::Mutex;

    use super::*;

    fn in_memory(bytes: &[u8]) -> InMemoryBackend {
        let storage = InMemoryBackend::new();
        storage.set_len(bytes.len() as u64).unwrap();
        StorageBackend::write(&storage, 0, bytes).unwrap();
        storage
    }

    fn bytes(storage: &impl StorageBackend) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(storage.len().unwrap()).unwrap()];
        storage.read(0, &mut bytes).unwrap();
        bytes
    }

    /// What reached a storage, in order.
    #[derive(Debug, Default)]
    struct Log(Mutex<Vec<String>>);

    impl Log {
        fn add(&self, what: String) -> Result<()> {
            self.0.lock().unwrap().push(what);
            Ok(())
        }
    }

    impl StorageBackend for Log {
        fn len(&self) -> Result<u64> {
            Ok(0)
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<()> {
            Err(ErrorKind::UnexpectedEof.into())
        }

        fn set_len(&self, len: u64) -> Result<()> {
            self.add(format!("length {len}"))
        }

        fn sync_data(&self) -> Result<()> {
            self.add("sync".to_string())
        }

        fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
            self.add(format!("write {data:?} at {offset}"))
        }
    }

    /// A crash while a trial is accepted leaves what a crash of redb would have left.
    #[test]
    fn what_was_kept_back_is_done_in_order_with_its_syncs() {
        let trial = Trial::new(Arc::new(Log::default())).unwrap();
        trial.set_len(8).unwrap();
        trial.write(4, &[1]).unwrap();
        trial.sync_data().unwrap();
        trial.write(4, &[2]).unwrap();
        trial.sync_data().unwrap();
        assert!(trial.0.storage.0.lock().unwrap().is_empty());
        trial.accept(Unsynced(false)).unwrap();
        trial.write(5, &[3]).unwrap();
        let done = trial.0.storage.0.lock().unwrap().join(", ");
        assert_eq!(done, "length 8, write [1] at 4, sync, write [2] at 4, sync, write [3] at 5");
    }

    #[derive(Debug, Clone)]
    enum Step {
        Write(usize, usize, u8),
        Grow(usize),
        Shrink(usize),
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0..20_000_usize, 0..9_000_usize, 1..255_u8).prop_map(|(at, size, byte)| Step::Write(at, size, byte)),
            1 => (0..9_000_usize).prop_map(Step::Grow),
            1 => (0..9_000_usize).prop_map(Step::Shrink),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

        /// What is kept back reads as if it were there, is nowhere before it is accepted, and
        /// everywhere after.
        #[test]
        fn a_trial_reads_as_the_storage_will_and_changes_nothing_before(
            start in proptest::collection::vec(any::<u8>(), 0..12_000),
            steps in proptest::collection::vec(any_step(), 0..12),
            ranges in proptest::collection::vec((0..20_000_usize, 0..9_000_usize), 4),
        ) {
            let trial = Trial::new(Arc::new(in_memory(&start))).unwrap();
            let mut model = start.clone();
            for step in steps {
                match step {
                    Step::Write(at, size, byte) => {
                        let (at, size) = (at.min(model.len()), size.min(model.len() - at.min(model.len())));
                        trial.write(at as u64, &vec![byte; size]).unwrap();
                        model[at..at + size].fill(byte);
                    }
                    Step::Grow(by) => {
                        model.resize(model.len() + by, 0);
                        trial.set_len(model.len() as u64).unwrap();
                    }
                    Step::Shrink(by) => {
                        model.truncate(model.len().saturating_sub(by));
                        trial.set_len(model.len() as u64).unwrap();
                    }
                }
                prop_assert!(bytes(&trial) == model);
                prop_assert!(bytes(&*trial.0.storage) == start);
                for (at, size) in &ranges {
                    let mut out = vec![0; *size];
                    match (trial.read(*at as u64, &mut out), model.get(*at..at + size)) {
                        (Ok(()), Some(there)) => prop_assert!(out == there),
                        (Err(_), None) => {}
                        (found, there) => prop_assert!(false, "{found:?}, {}", there.is_some()),
                    }
                }
            }
            trial.accept(Unsynced(false)).unwrap();
            prop_assert!(bytes(&*trial.0.storage) == model);
            trial.set_len(7).unwrap();
            prop_assert_eq!(trial.0.storage.len().unwrap(), 7);
        }
    }
}
