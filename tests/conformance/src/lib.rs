//! The kit with which the author of a twobox adapter proves that it is correct.
//!
//! What a store must do is said on the traits in [`twobox::store`]. This kit checks it:
//!
//! - **contract tests**: guards, revisions, commit and rollback; the answer to every query compared
//!   with a naive model, after every change of state, in whichever way it is written; a store's own
//!   `run`, `write` and `transact`; views and writers at the same time; panics; answers, batches,
//!   keys and bodies of any size; any bytes, texts that look alike, numbers at their limits, and
//!   each column with a value of its own;
//! - **scenarios**: what happens in an order shop, as [data](scenario), with the outcome of each
//!   step;
//! - **the fault matrix**: each scenario with each kind of [`Fault`] at each point where it can
//!   strike, then with all pairs of two. After each step the promises are looked up in the tables,
//!   and the end must be that of a run without a fault (P8);
//! - **the same tables**: after each fault, a store must hold exactly what the reference store
//!   holds.
//!
//! # Example
//!
//! Implement a [`Harness`], which says how to open a store and how to crash it, and call [`suite!`]
//! in a test of the adapter. It makes a few dozen tests, each with a name of its own.
//!
//! ```
//! use twobox_conformance::Harness;
//! use twobox_memory::MemoryStore;
//!
//! struct Memory(MemoryStore);
//!
//! impl Harness for Memory {
//!     type Store = MemoryStore;
//!
//!     fn open() -> Self {
//!         Self(MemoryStore::new())
//!     }
//!
//!     // A crash loses what was not committed, and nothing else. For a store in a file: copy the
//!     // file while it is open, and open the copy.
//!     fn crash(self) -> Self {
//!         Self(self.0.crash())
//!     }
//!
//!     fn store(&self) -> &MemoryStore {
//!         &self.0
//!     }
//! }
//!
//! // Compared with the reference store it finds more, and takes less time.
//! twobox_conformance::suite!(Memory, pairs: 20, reference: twobox_conformance::Reference);
//!
//! // The checks are functions as well.
//! use twobox_conformance::{matrix, scenario};
//!
//! twobox_conformance::contract::revisions_count_writes::<Memory>()?;
//! let tally = matrix::singles::<Memory>(&scenario::buy_once)?;
//! assert!(tally.singles > 100);
//! # Ok::<(), twobox_conformance::Failure>(())
//! ```
//!
//! An async store has an [`AsyncHarness`], as short as this one, and [`suite_async!`]: the same
//! scenarios, faults and snapshots run through the async driver of the core. If it waits at the same
//! places in every run, [`matrix::drops`] drops each operation at each wait as well.
//!
//! # When a check fails
//!
//! A failure of a contract test names the query, the row, and what is wrong with it, and of one with
//! changes at random also the last steps. A failure of a scenario names the scenario, whether sender and receiver shared a store, which fault struck at
//! which point, the step, and the promise or the outcome that does not hold. Points are numbered as
//! they are reached: at the beginning of a command, and before each load, apply, commit and
//! publish. They are the same for every store.
//!
//! # What it cannot see
//!
//! A crash is what [`Harness::crash`] makes of it. A copy of a file shows what was written, and not
//! what was flushed: a loss of power needs a storage that forgets. Two threads write at once in one
//! test, in an order that is given; a test of other races, and of several processes, is left to the
//! adapter. So is damage, unless the harness can make it: see [`Damage`] and [`suite_damage!`].

pub mod asynchronous;
mod chance;
pub mod contract;
mod failure;
mod fault;
mod faulty;
mod harness;
pub mod matrix;
mod own;
mod reference;
mod run;
pub mod scenario;
mod side;
pub mod snapshot;
mod suite;
mod world;

pub use asynchronous::{Async, AsyncErrorOf, AsyncHarness, AsyncTxOf, Blocking};
pub use failure::Failure;
pub use fault::{
    ApplyFault, BeginFault, CommitFault, Fault, LoadFault, Point, PublishFault, Site, WaitFault,
};
pub use harness::{Damage, ErrorOf, Harness, Subject, TxOf};
pub use reference::Reference;
pub use scenario::Scenario;
pub use suite::{check, failures};
pub use world::Layout;

/// The README, whose example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
