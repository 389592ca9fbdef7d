//! All choices: the memory store, which says what is right, against redb, on every sequence of
//! commands up to a length, and on random ones beyond it. Both must give the same answers and hold
//! the same tables after each step.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "tests, which print how much was looked at"
)]

mod command;
mod exhaustive;
mod random;
