//! A whole cycle of twobox on redb with no std, no operating system's heap, no files and no C
//! library, as on a device whose storage is a block device. The database is closed after each step
//! and opened again, as after a restart.
//!
//! It prints the largest amount of heap that was in use, and ends with an error if a figure is
//! wrong or that amount is above the limit.
//!
//! ```text
//! cargo run --release --manifest-path tests/no-std/Cargo.toml --features redb --bin on-redb
//! ```

#![no_std]
#![no_main]

extern crate alloc;

mod bare;
mod block_device;
mod cycle;

use core::fmt::Write;

use block_device::BlockDevice;
use cycle::Wrong;
use twobox_redb::{RedbOptions, RedbStore};

/// The size of the heap in bytes. There is no other memory to be had.
const HEAP: usize = 256 * 1024;
/// What of it may be in use at one time.
const LIMIT: usize = 70 * 1024;
/// redb's cache in bytes. It works with none; what is left are the pages that the largest
/// transaction changes.
const CACHE: usize = 0;

static DEVICE: BlockDevice = BlockDevice::new();

/// What runs once the processor is ready; its result is the exit code.
fn run() -> i32 {
    let code = cycle::report("on-redb", cycle(), LIMIT);
    let _ = writeln!(bare::Console, "on-redb: {} bytes of the block device", DEVICE.used());
    code
}

fn cycle() -> Result<(), Wrong> {
    let options = RedbOptions::new().cache_bytes(CACHE);
    options.create_on(&DEVICE)?.close()?;
    let step = |step: fn(&RedbStore) -> Result<(), Wrong>| {
        let store = options.open_on(&DEVICE)?;
        step(&store)?;
        Ok::<_, Wrong>(store.close()?)
    };
    step(cycle::register)?;
    step(cycle::commit)?;
    step(|store| cycle::deliver(store, store))?;
    step(|store| cycle::look(store, store))?;
    step(|store| cycle::purge(store, store))
}
