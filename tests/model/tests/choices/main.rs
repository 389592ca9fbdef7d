//! All choices: the memory store, which says what is right, against redb, on every sequence of commands up to a length, and on random
//! ones beyond it. Both must give the same answers and hold the same tables after each step.

#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::wildcard_enum_match_arm,
    reason = "figures are printed; a model picks out single rows and steps"
)]

mod command;
mod exhaustive;
mod random;
