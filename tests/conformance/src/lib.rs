//! draft
pub mod contract;
mod failure;
mod fault;
mod faulty;
mod harness;
pub mod matrix;
mod run;
pub mod scenario;
pub mod snapshot;
mod suite;
mod world;

pub use failure::Failure;
pub use fault::{ApplyFault, BeginFault, CommitFault, Fault, LoadFault, Point, PublishFault, Site};
pub use harness::{ErrorOf, Harness, TxOf};
pub use scenario::Scenario;
pub use world::Layout;
