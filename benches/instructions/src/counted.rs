//! What is counted: a function runs alone, with its allocations counted here, and its instructions
//! by Callgrind around it.
//!
//! What the C library does for the allocator and to compare bytes is left out. How many
//! instructions that takes depends on what was allocated and freed long before, and on where the
//! bytes lie, so they would hide what changes. The allocations themselves are counted, and so are
//! the calls that compare.

use std::alloc::System;
use std::fmt;
use std::hint::black_box;
use std::io::{self, Write};

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

use crate::Failed;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// What Callgrind is told: it begins to count at [`begin`], counts what [`alone`] runs, except for
/// what is left out, and writes what it has counted before [`say`].
pub(crate) const CALLGRIND: [&str; 8] = [
    "--zero-before=*::counted::begin*",
    "--toggle-collect=*::counted::alone*",
    "--toggle-collect=malloc",
    "--toggle-collect=calloc",
    "--toggle-collect=realloc",
    "--toggle-collect=free",
    "--toggle-collect=__memcmp*",
    "--dump-before=*::counted::say*",
];

/// What something took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) instructions: u64,
    /// Those that made a block larger among them.
    pub(crate) allocations: u64,
    pub(crate) bytes: u64,
}

impl Counts {
    pub(crate) fn exceeds(&self, most: &Self) -> bool {
        self.instructions > most.instructions
            || self.allocations > most.allocations
            || self.bytes > most.bytes
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>12} {:>12} {:>12}", self.instructions, self.allocations, self.bytes)
    }
}

/// A name with its counts, as a line of text has them.
pub(crate) fn parse(line: &str) -> Result<(String, Counts), Failed> {
    let wrong = || format!("this is no name with three counts: {line:?}");
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [name, counts @ ..] = fields.as_slice() else { return Err(wrong().into()) };
    let counts = counts.iter().map(|field| field.parse()).collect::<Result<Vec<u64>, _>>()?;
    let [instructions, allocations, bytes] = counts[..] else { return Err(wrong().into()) };
    Ok((name.to_string(), Counts { instructions, allocations, bytes }))
}

/// Runs `work` with everything counted. What it returns is dropped afterwards.
pub(crate) fn count<R>(name: &str, work: impl FnOnce() -> R) -> Result<R, Failed> {
    let region = Region::new(ALLOCATOR);
    begin();
    let result = alone(work);
    let stats = region.change();
    // Of a block that grew only what was added is known; the allocator may have had to copy it.
    let grown = u64::try_from(stats.bytes_reallocated).unwrap_or(0);
    let (allocations, bytes) =
        ((stats.allocations + stats.reallocations) as u64, stats.bytes_allocated as u64 + grown);
    say(name, Counts { instructions: 0, allocations, bytes })?;
    Ok(result)
}

#[inline(never)]
fn begin() {
    black_box(());
}

#[inline(never)]
fn alone<R>(work: impl FnOnce() -> R) -> R {
    black_box(work())
}

#[inline(never)]
fn say(name: &str, counts: Counts) -> Result<(), Failed> {
    Ok(writeln!(io::stdout(), "{name} {counts}")?)
}
