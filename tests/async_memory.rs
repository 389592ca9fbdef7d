//! The conformance suite on the async face of the reference store, which waits at every step: the
//! tables must be those of the sync one after each fault, and so must they be after any operation
//! was dropped at any of its waits (P8).

mod common;
#[path = "common/waiting.rs"]
mod waiting;

use common::Memory;
use twobox::store::asynchronous::{AsyncReader, AsyncStore};
use twobox::{Reader, Store};
use twobox_conformance::scenario::{self, ALL};
use twobox_conformance::{Async, AsyncHarness, Failure, matrix};
use twobox_memory::MemoryStore;
use waiting::{Waiting, answered, waiting};

waiting!(MemoryStore);

impl AsyncHarness for Waiting<MemoryStore> {
    type Store = Self;

    async fn open() -> Self {
        Self(MemoryStore::new())
    }

    async fn crash(self) -> Self {
        Self(self.0.crash())
    }

    fn store(&self) -> &Self {
        self
    }
}

twobox_conformance::suite_async!(Waiting<MemoryStore>, pairs: 5, reference: Memory);

/// Each operation of each scenario is dropped at each of its waits: register, commit, claim,
/// publish to inboxes with effects, settle, purge, redrive; then done again, or all of it.
mod drops {
    use super::*;
    twobox_conformance::each_scenario!(twobox_conformance::__matrix_tests, |scenario| {
        matrix::drops::<Async<Waiting<MemoryStore>>>(scenario).map(drop)
    });
}

/// The same with transitions that are written first as they assume.
mod drops_writes_first {
    use super::*;
    twobox_conformance::each_scenario!(twobox_conformance::__matrix_tests, |scenario| {
        matrix::drops::<Async<Waiting<MemoryStore>, true>>(scenario).map(drop)
    });
}

/// The matrix is not empty by mistake: the shortest scenario begins six transactions, each with a
/// load, five with a write and a commit, and each step waits twice; with two layouts and two
/// recoveries. What is written first is not looked at.
#[test]
fn every_wait_is_reached() -> Result<(), Failure> {
    let looks = matrix::drops::<Async<Waiting<MemoryStore>>>(&scenario::buy_once)?;
    let waits = 2 * (6 + 6 + 5 + 5);
    assert_eq!((looks.points, looks.singles), (2 * waits, 4 * waits));
    let looks = matrix::drops::<Async<Waiting<MemoryStore>>>(&scenario::two_events)?;
    let writes = matrix::drops::<Async<Waiting<MemoryStore>, true>>(&scenario::two_events)?;
    assert!(writes.points < looks.points, "{writes:?}");
    Ok(())
}

/// How much all of it is: `cargo test --test async_memory how_much -- --ignored --nocapture`.
#[test]
#[ignore = "it only prints"]
fn how_much() -> Result<(), Failure> {
    let (mut waits, mut runs) = (0, 0);
    for scenario in ALL {
        let dropped = matrix::drops::<Async<Waiting<MemoryStore>>>(scenario)?;
        let first = matrix::drops::<Async<Waiting<MemoryStore>, true>>(scenario)?;
        waits += dropped.points + first.points;
        runs += dropped.singles + first.singles;
    }
    println!("{} scenarios, {waits} waits, {runs} operations dropped", ALL.len());
    Ok(())
}
