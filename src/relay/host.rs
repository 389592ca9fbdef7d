//! What drivers with std have in common: how they ask a store and a publisher that may panic, and
//! what they show of a relay.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::any::Any;
use core::fmt::Display;
use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{Phase, Published, RelayMachine, Status, Ticket, answers, trace};
use crate::ids::Reason;
use crate::message::Message;

/// What a panic has left.
pub type Panic = Box<dyn Any + Send>;

/// Asks something of a store. What panics there has failed: its transaction is rolled back as it
/// unwinds.
///
/// # Errors
///
/// The error or the panic, as a reason.
pub fn guarded<T, E: Display>(ask: impl FnOnce() -> Result<T, E>) -> Result<T, Reason> {
    answered(catch_unwind(AssertUnwindSafe(ask)))
}

/// An answer of a store that may have panicked on the way.
///
/// # Errors
///
/// As [`guarded`].
pub fn answered<T, E: Display>(answer: Result<Result<T, E>, Panic>) -> Result<T, Reason> {
    match answer {
        Ok(answer) => answer.map_err(Reason::new),
        Err(panic) => Err(panicked("store", &*panic)),
    }
}

/// What a publisher is to be called with, for these tickets.
#[must_use]
pub fn messages(tickets: &[Ticket]) -> Vec<Message> {
    tickets.iter().map(|ticket| ticket.message.clone()).collect()
}

/// What one call of a publisher has come to, for each of its tickets; `tracing` is told. If it
/// panicked, all of them have failed.
#[must_use]
pub fn published(
    tickets: Vec<Ticket>,
    given: Result<Vec<Published>, Panic>,
) -> Vec<(Ticket, Published)> {
    let n = tickets.len();
    let failed = |panic: Panic| vec![Published::Failed(panicked("publisher", &*panic)); n];
    let answers = answers(given.unwrap_or_else(failed), n);
    let published: Vec<_> = tickets.into_iter().zip(answers).collect();
    published.iter().for_each(|(ticket, answer)| trace::published(&ticket.message, answer));
    published
}

/// By which uptime a relay that is told to stop gives up waiting. The least patient counts.
#[must_use]
pub fn stop_by(there: Option<Duration>, until: Duration) -> Duration {
    there.map_or(until, |there| there.min(until))
}

/// What a driver shows of its relay.
#[derive(Debug)]
pub struct Report {
    phase: Phase,
    /// Why the relay itself has ended, if it was not told to.
    panic: Option<Reason>,
}

impl Report {
    /// Of a relay that begins.
    #[must_use]
    pub fn new(machine: &RelayMachine) -> Self {
        Self { phase: machine.phase(), panic: None }
    }

    /// How it stands now; `tracing` is told when the phase changes.
    #[must_use]
    pub fn now(&mut self, machine: &RelayMachine) -> Status {
        self.shows(machine, machine.phase())
    }

    /// How it stands when the driver has ended: because the machine has stopped, or with a panic.
    #[must_use]
    pub fn end(&mut self, machine: &RelayMachine, ended: Result<(), Panic>) -> Status {
        self.panic = ended.err().map(|panic| panicked("relay", &*panic));
        self.shows(machine, Phase::Stopped)
    }

    fn shows(&mut self, machine: &RelayMachine, phase: Phase) -> Status {
        if self.phase != phase {
            self.phase = phase;
            trace::phase(phase);
        }
        let mut status = machine.status();
        status.phase = phase;
        status.error = self.panic.clone().or(status.error);
        status
    }
}

/// A panic as a reason.
fn panicked(who: &str, panic: &(dyn Any + Send)) -> Reason {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let text = text.unwrap_or("it did not say why");
    Reason::new(format_args!("the {who} panicked: {text}"))
}
