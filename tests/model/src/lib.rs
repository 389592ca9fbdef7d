//! Every state that twobox can come to in a small world, for a model checker (P1 to P8).
//!
//! There is no second model of the rules here: a [`World`] holds the
//! [`State`](twobox_memory::State) of the memory store, and a [`Step`] runs a transition of the
//! core on it, or tells the real relay machine what has happened. What the model adds is what the
//! core is not: clients that retry, relays that crash, a network that loses, repeats and reorders,
//! a clock, an operator. A [`Scope`] says how much of that there is.
//!
//! What must hold is judged from outside of the rules, by what is written down in [`Ghost`] and by
//! comparing the tables before and after each step. A [`Bug`] is put around a transition to show
//! that the judge would notice.
//!
//! Atomic steps are enough: a crash before a commit leaves nothing, which is the state before; one
//! after the commit loses the answer, which is a step of its own. A transaction that read before
//! another one committed is [`Step::Rival`].

#![allow(
    clippy::wildcard_enum_match_arm,
    reason = "the model picks out single rows and steps; the product itself matches all of them"
)]

mod bug;
mod judge;
mod machine;
mod scope;
mod stage;
mod step;
mod world;

pub use bug::Bug;
pub use machine::{Commit, Driven, Input};
pub use scope::{CONSUMERS, Params, Scope};
pub use step::{Answer, Step};
pub use world::{Copy, Ghost, Held, Promise, World};
