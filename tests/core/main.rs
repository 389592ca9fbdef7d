//! The core by itself: every rule, limit, format and driver of it, without a store of its own.
//!
//! One module a subject. What holds across stores is the conformance kit's.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

mod asynchronous;
mod codec;
mod delivery;
mod driver;
mod fingerprint;
mod flows;
mod limits;
mod machine;
mod operators;
mod policy;
mod purge;
mod relay;
mod render;
mod stats;
mod support;
mod trace;
mod transitions;
#[path = "../common/waiting.rs"]
mod waiting;
