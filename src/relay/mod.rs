//! The relay: delivers committed events at least once, in order for each ordering key, over time
//! (P3, P4, P6).
//!
//! [`RelayMachine`] holds no clock, no randomness and no I/O. Whoever drives it tells it what
//! happened with `handle_*`, then takes what there is to do from
//! [`poll_action`](RelayMachine::poll_action) until there is nothing more, then waits until
//! something happens or the time of [`poll_timeout`](RelayMachine::poll_timeout) has come, and says
//! so with [`handle_timeout`](RelayMachine::handle_timeout). Every `handle_*` is total: what it
//! does not expect changes nothing.
//!
//! ```text
//!                 wake-up, timeout                    all runs settled
//!      +--------+ ---------------> +-----------+ ------------------------> (idle)
//!      |  idle  |                  | exchange: |
//!      +--------+ <--------------- | settle +  | <-------------+
//!          ^       nothing due     |   claim   |               | confirmed, or ended
//!          |                       +-----------+               |
//!          |                             | runs                |
//!          | pause is over               v                     |
//!      +--------+  unavailable     +-----------+ --------------+
//!      | paused | <--------------- |  publish  |
//!      +--------+                  +-----------+ <--> renew, before a lease runs out
//!
//!      stop: no more claims; what was not published is released; stopped when the last lease is settled
//! ```

mod driver;
mod held;
#[cfg(feature = "std")]
pub mod host;
mod left;
mod machine;
mod pace;
mod publisher;
mod settings;
mod slots;
pub mod trace;

use core::convert::Infallible;

use crate::store::RunError;

pub use driver::Relay;
pub use machine::{Action, Counters, Exchange, Phase, RelayMachine, Status, Ticket};
pub use publisher::{AsyncPublisher, Published, Publisher, answers};
pub use settings::RelaySettings;

/// Why a step of a relay failed: the store. The relay goes on with the next step, after a pause.
pub type RelayError<E> = RunError<E, Infallible>;
