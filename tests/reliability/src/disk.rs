//! A disk in memory that loses power and fails as disks do.
//!
//! A [`Disk`] records what is done to it. A write counts as safe from the next sync on; until then,
//! a cut of the power may keep it, lose it, or keep a part of its sectors, each write for itself,
//! whatever the order. [`cuts`] makes of a record what a cut could leave behind.

use std::io::{self, ErrorKind};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use redb::{BackendError, StorageBackend};

use crate::seed::Seed;

/// What a disk writes as one: all of it or nothing.
pub const SECTOR: u64 = 512;

/// One thing that was done to a disk.
#[derive(Debug, Clone)]
pub enum Op {
    /// Bytes were written at a place.
    Write(u64, Arc<[u8]>),
    /// The length was set.
    SetLen(u64),
    /// All before it is safe.
    Sync,
    /// The user of the disk was told that a commit has succeeded.
    Told,
}

/// How a call of a disk fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Failure {
    /// An I/O error; nothing was done.
    Nothing,
    /// A read or write ends half-way; a sync fails and what it was to make safe is lost in part.
    Half,
    /// There is no space left: writes and growth fail, everything else works.
    Full,
}

/// When calls fail.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// The first call that fails, counted from 0.
    pub at: u64,
    /// How.
    pub failure: Failure,
    /// Whether all calls after it fail too.
    pub lasting: bool,
}

/// A disk, which all of its clones share.
#[derive(Debug, Clone, Default)]
pub struct Disk(Arc<Mutex<Medium>>);

#[derive(Debug, Default)]
struct Medium {
    bytes: Vec<u8>,
    /// What is safe, and what was done since; only while there may be a fault.
    safe: Option<(Vec<u8>, Vec<Op>)>,
    record: Option<Vec<Op>>,
    calls: u64,
    fault: Option<Fault>,
    struck: u64,
}

impl Disk {
    /// A disk with these bytes on it.
    #[must_use]
    pub fn of(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(Medium { bytes, ..Medium::default() })))
    }

    /// A disk with these bytes, of which calls fail.
    #[must_use]
    pub fn failing(bytes: Vec<u8>, fault: Fault) -> Self {
        let safe = Some((bytes.clone(), Vec::new()));
        Self(Arc::new(Mutex::new(Medium { bytes, safe, fault: Some(fault), ..Medium::default() })))
    }

    /// An empty disk that records what is done to it.
    #[must_use]
    pub fn recording(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(Medium { bytes, record: Some(Vec::new()), ..Medium::default() })))
    }

    /// What is on it.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.medium().bytes.clone()
    }

    /// Records that the user was told of a commit.
    pub fn told(&self) {
        if let Some(record) = &mut self.medium().record {
            record.push(Op::Told);
        }
    }

    /// What was recorded.
    #[must_use]
    pub fn record(&self) -> Vec<Op> {
        self.medium().record.clone().unwrap_or_default()
    }

    /// How many calls there were, and how many of them failed.
    #[must_use]
    pub fn calls(&self) -> (u64, u64) {
        let medium = self.medium();
        (medium.calls, medium.struck)
    }

    /// What is on a disk with faults after its power was cut now.
    #[must_use]
    pub fn after_cut(&self, seed: &mut Seed) -> Vec<u8> {
        let medium = self.medium();
        let Some((safe, since)) = &medium.safe else { return medium.bytes.clone() };
        let mut bytes = safe.clone();
        since.iter().for_each(|op| keep(&mut bytes, op, Kept::any(seed)));
        bytes
    }

    fn medium(&self) -> MutexGuard<'_, Medium> {
        // Whatever panicked, the bytes are what they are.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Call {
    Look,
    Read,
    Write,
    Grow,
    Sync,
}

impl Medium {
    /// Counts a call, and says whether it fails.
    fn strikes(&mut self, call: &Call) -> Option<Failure> {
        let number = self.calls;
        self.calls += 1;
        let fault = self.fault?;
        let hit = number == fault.at || (fault.lasting && number > fault.at);
        let concerned = match fault.failure {
            Failure::Nothing => true,
            Failure::Half => !matches!(call, Call::Look | Call::Grow),
            Failure::Full => matches!(call, Call::Write | Call::Grow),
        };
        if hit && concerned {
            self.struck += 1;
            return Some(fault.failure);
        }
        None
    }

    fn done(&mut self, op: Op) {
        keep(&mut self.bytes, &op, Kept::Whole);
        match (&mut self.safe, &op) {
            (Some((safe, since)), Op::Sync) => {
                safe.clone_from(&self.bytes);
                since.clear();
            }
            (Some((_, since)), Op::Write(..) | Op::SetLen(_)) => since.push(op.clone()),
            (None, _) | (_, Op::Told) => {}
        }
        if let Some(record) = &mut self.record {
            record.push(op);
        }
    }
}

fn error(failure: Failure) -> io::Error {
    match failure {
        Failure::Nothing => io::Error::other("the disk does not answer"),
        Failure::Half => io::Error::from(ErrorKind::UnexpectedEof),
        Failure::Full => io::Error::from(ErrorKind::StorageFull),
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        let mut medium = self.medium();
        match medium.strikes(&Call::Look) {
            Some(failure) => Err(error(failure)),
            None => Ok(medium.bytes.len() as u64),
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let mut medium = self.medium();
        let failure = medium.strikes(&Call::Read);
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = start.saturating_add(out.len());
        let there = medium.bytes.get(start..end).ok_or(ErrorKind::UnexpectedEof)?;
        match failure {
            None => out.copy_from_slice(there),
            Some(failure) => {
                if failure == Failure::Half {
                    let half = out.len() / 2;
                    out[..half].copy_from_slice(&there[..half]);
                }
                return Err(error(failure));
            }
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut medium = self.medium();
        if let Some(failure) = medium.strikes(&Call::Grow) {
            return Err(error(failure));
        }
        medium.done(Op::SetLen(len));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut medium = self.medium();
        match medium.strikes(&Call::Sync) {
            None => medium.done(Op::Sync),
            Some(failure) => {
                if failure == Failure::Half
                    && let Some((safe, since)) = &mut medium.safe
                {
                    // What the system could not write it forgets, and a second sync would say that
                    // all is well.
                    let mut seed = Seed::new(since.len() as u64);
                    let mut left = safe.clone();
                    since.iter().for_each(|op| keep(&mut left, op, Kept::any(&mut seed)));
                    since.clear();
                    safe.clone_from(&left);
                    medium.bytes = left;
                }
                return Err(error(failure));
            }
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut medium = self.medium();
        match medium.strikes(&Call::Write) {
            None => medium.done(Op::Write(offset, data.into())),
            Some(failure) => {
                if failure != Failure::Nothing {
                    medium.done(Op::Write(offset, data[..data.len() / 2].into()));
                }
                return Err(error(failure));
            }
        }
        Ok(())
    }

    // One handle has the disk, so that no lock is held elsewhere.

    fn try_lock_range(&self, _start: Bound<u64>, _end: Bound<u64>) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn try_lock_shared_range(
        &self,
        _start: Bound<u64>,
        _end: Bound<u64>,
    ) -> Result<bool, BackendError> {
        Ok(true)
    }

    fn lock_range(&self, _start: Bound<u64>, _end: Bound<u64>) -> Result<(), BackendError> {
        Ok(())
    }

    fn lock_shared_range(&self, _start: Bound<u64>, _end: Bound<u64>) -> Result<(), BackendError> {
        Ok(())
    }

    fn unlock_range(&self, _start: Bound<u64>, _end: Bound<u64>) -> Result<(), BackendError> {
        Ok(())
    }

    fn query_lock_range(&self, _start: Bound<u64>, _end: Bound<u64>) -> Result<bool, BackendError> {
        Ok(false)
    }
}

/// What a cut leaves of one unsynced write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    Nothing,
    Whole,
    /// The first sectors, so many of all in 256 parts.
    First(u8),
    /// The last sectors, likewise.
    Last(u8),
    /// Each sector or not, by a seed.
    Some(u64),
}

impl Kept {
    fn any(seed: &mut Seed) -> Self {
        match seed.below(6) {
            0 | 1 => Self::Nothing,
            2 | 3 => Self::Whole,
            4 => Self::First(seed.draw() as u8),
            _ => Self::Some(seed.draw()),
        }
    }
}

/// Does to the bytes what is left of something that was done.
fn keep(bytes: &mut Vec<u8>, op: &Op, kept: Kept) {
    match op {
        Op::Sync | Op::Told => {}
        Op::SetLen(len) => {
            if kept != Kept::Nothing {
                bytes.resize(usize::try_from(*len).unwrap_or(usize::MAX), 0);
            }
        }
        Op::Write(offset, data) => {
            let sectors = sectors(*offset, data.len());
            let count = sectors.len();
            let mut seed = Seed::new(if let Kept::Some(seed) = kept { seed } else { 0 });
            for (number, range) in sectors.into_iter().enumerate() {
                let share = |part: u8| number * 256 < count * usize::from(part);
                let survives = match kept {
                    Kept::Nothing => false,
                    Kept::Whole => true,
                    Kept::First(part) => share(part),
                    Kept::Last(part) => !share(part),
                    Kept::Some(_) => seed.coin(),
                };
                if survives {
                    let place = usize::try_from(*offset).unwrap_or(usize::MAX);
                    let end = place + range.end;
                    if bytes.len() < end {
                        bytes.resize(end, 0);
                    }
                    bytes[place + range.start..end].copy_from_slice(&data[range]);
                }
            }
        }
    }
}

/// The parts of a write that lie in one sector each, as ranges of its data.
fn sectors(offset: u64, length: usize) -> Vec<std::ops::Range<usize>> {
    let mut parts = Vec::new();
    let mut start = 0;
    while start < length {
        // Less than a sector is left of this one.
        let room = (SECTOR - (offset + start as u64) % SECTOR) as usize;
        let end = length.min(start + room);
        parts.push(start..end);
        start = end;
    }
    parts
}

/// What a cut of the power left.
pub struct Cut<'c> {
    /// How many commits the user had been told of when it came.
    pub told: usize,
    /// What is on the disk.
    pub bytes: &'c [u8],
}

/// How many remains of one cut are looked at.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// All subsets of the unsynced writes, if they are so many or fewer. Each is then kept whole or
    /// lost.
    pub exhaustive: usize,
    /// Otherwise so many of them, by seed.
    pub sampled: usize,
    /// In so many ways the last write is torn.
    pub torn: usize,
}

/// How much was looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Looked {
    /// Places of the record at which the power was cut.
    pub cuts: usize,
    /// Those of which all subsets of whole writes were looked at.
    pub exhaustive: usize,
    /// Disks that were left.
    pub disks: usize,
    /// The most unsynced writes at a cut.
    pub unsynced: usize,
}

/// Cuts the power after each entry of a record, and shows what may be left then. What is left
/// without the last write was shown at the cut before.
///
/// # Errors
///
/// The first error of `look`.
pub fn cuts<E>(
    start: &[u8],
    record: &[Op],
    effort: Effort,
    mut look: impl FnMut(Cut<'_>) -> Result<(), E>,
) -> Result<Looked, E> {
    let mut safe = start.to_vec();
    let mut unsynced: Vec<&Op> = Vec::new();
    let mut looked = Looked::default();
    let (mut told, mut bytes) = (0, Vec::new());
    for (at, op) in record.iter().enumerate() {
        looked.cuts += 1;
        let earlier = unsynced.len();
        match op {
            Op::Sync => unsynced.drain(..).for_each(|op| keep(&mut safe, op, Kept::Whole)),
            Op::Told => told += 1,
            Op::Write(..) | Op::SetLen(_) => unsynced.push(op),
        }
        looked.unsynced = looked.unsynced.max(unsynced.len());
        let mut show = |kept: &[Kept]| {
            bytes.clone_from(&safe);
            unsynced.iter().zip(kept).for_each(|(op, kept)| keep(&mut bytes, op, *kept));
            looked.disks += 1;
            look(Cut { told, bytes: &bytes })
        };
        // What is decided for each write that came before; the last one, if this was one, is kept.
        let free = earlier.min(unsynced.len());
        let with_last = |mut kept: Vec<Kept>| {
            kept.resize(unsynced.len(), Kept::Whole);
            kept
        };
        let mut seed = Seed::new(at as u64);
        if free < effort.exhaustive {
            for subset in 0_u64..1 << free {
                let whole = |number: usize| {
                    if subset >> number & 1 == 1 { Kept::Whole } else { Kept::Nothing }
                };
                show(&with_last((0..free).map(whole).collect()))?;
            }
        } else {
            show(&with_last(vec![Kept::Whole; free]))?;
            show(&with_last(vec![Kept::Nothing; free]))?;
            for _ in 0..effort.sampled {
                show(&with_last((0..free).map(|_| Kept::any(&mut seed)).collect()))?;
            }
        }
        let several =
            matches!(op, Op::Write(offset, data) if sectors(*offset, data.len()).len() > 1);
        for way in 0..if several { effort.torn } else { 0 } {
            let mut kept: Vec<Kept> = (0..free)
                .map(|_| if way == 0 { Kept::Whole } else { Kept::any(&mut seed) })
                .collect();
            kept.push(match way % 3 {
                0 => Kept::First(seed.draw() as u8),
                1 => Kept::Last(seed.draw() as u8),
                _ => Kept::Some(seed.draw()),
            });
            show(&kept)?;
        }
        looked.exhaustive += usize::from(free < effort.exhaustive);
    }
    Ok(looked)
}
