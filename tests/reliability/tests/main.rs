//! Power loss, real death, many callers, hostile bytes. See `docs/reliability.md`; `TWOBOX_LONG=1`
//! asks for the long form.

// A helper that cannot go on has found a failure, as a test has; and what was counted is printed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod callers;
mod death;
mod io_errors;
mod power;
mod told;
