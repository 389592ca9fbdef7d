//! The faults that real outboxes and inboxes had, each as a whole kind: what must not happen here,
//! and the right outcome.
//!
//! The name of a test begins with the number of its fault; `docs/faults.md` has the table of all of
//! them. Where a store is involved, a test runs on each.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

#[macro_use]
mod support;

mod consumers;
mod events;
mod operators;
mod relays;
mod requests;
mod table;
mod upkeep;
