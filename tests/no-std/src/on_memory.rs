//! A whole cycle of twobox on the memory store with no std, no operating system's heap and no C
//! library, as on a device.
//!
//! It prints the largest amount of heap that was in use, and ends with an error if a figure is
//! wrong or that amount is above the limit.
//!
//! ```text
//! cargo run --release --manifest-path tests/no-std/Cargo.toml --bin on-memory
//! ```

#![no_std]
#![no_main]

extern crate alloc;

mod bare;
mod cycle;

use cycle::Wrong;
use twobox_memory::MemoryStore;

/// The size of the heap in bytes. There is no other memory to be had.
const HEAP: usize = 64 * 1024;
/// What of it may be in use at one time.
const LIMIT: usize = 7 * 1024 + 256;

/// What runs once the processor is ready; its result is the exit code.
fn run() -> i32 {
    cycle::report("on-memory", cycle(), LIMIT)
}

fn cycle() -> Result<(), Wrong> {
    let (sender, receiver) = (MemoryStore::new(), MemoryStore::new());
    cycle::register(&sender)?;
    cycle::commit(&sender)?;
    cycle::deliver(&sender, &receiver)?;
    cycle::look(&sender, &receiver)?;
    cycle::purge(&sender, &receiver)
}
