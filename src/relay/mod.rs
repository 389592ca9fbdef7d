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
mod machine;
mod publisher;
mod steps;
pub mod trace;

pub use driver::Relay;
pub use machine::{Action, Counters, Exchange, Phase, RelayMachine, RelaySettings, Status, Ticket};
pub use publisher::{AsyncPublisher, Fault, InProcess, Message, Published, Publisher};
pub use steps::{
    Exchanged, RelayError, panicked, read_messages, read_messages_async, run_exchange,
    run_exchange_async,
};
