//! The thread that drives the machine: it hears, acts until there is nothing to do, and waits.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use twobox::relay::{
    Action, Phase, Published, RelayMachine, Status, Ticket, panicked, read_messages, run_exchange,
    trace,
};
use twobox::{LeaseRef, Millis, Reason, Renew, Store};

use crate::shared::{Job, Mail, Shared};

pub(crate) struct Driver<S> {
    store: Arc<S>,
    machine: RelayMachine,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Tickets that a worker has, or that wait for one.
    publishing: usize,
    /// What the store said, if it failed the last time.
    error: Option<Reason>,
    /// In the machine's time, which does not step back.
    give_up_at: Option<Millis>,
    gave_up: bool,
    phase: Phase,
}

impl<S: Store> Driver<S> {
    pub(crate) fn new(
        store: Arc<S>,
        machine: RelayMachine,
        shared: Arc<Shared>,
        workers: Vec<JoinHandle<()>>,
    ) -> Self {
        let phase = machine.phase();
        Self {
            store,
            machine,
            shared,
            workers,
            publishing: 0,
            error: None,
            give_up_at: None,
            gave_up: false,
            phase,
        }
    }

    /// Runs until it is told to stop. Whatever happens, it ends with a status that says so.
    pub(crate) fn run(mut self) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run_until_stopped())) {
            self.error = Some(panicked("relay", &*panic));
        }
        self.shared.jobs.close();
        if self.publishing == 0 {
            self.workers.drain(..).for_each(|worker| drop(worker.join()));
        }
        self.report(Phase::Stopped);
    }

    fn run_until_stopped(&mut self) {
        loop {
            self.hear();
            let action = self.machine.poll_action();
            let idle = action.is_none();
            if let Some(action) = action {
                self.act(action);
            }
            // After its patience has ended it tries once.
            if self.machine.is_stopped() || (self.gave_up && self.error.is_some()) {
                return;
            }
            self.report(self.machine.phase());
            if idle {
                self.shared.mailbox.wait(self.wait_limit());
            }
        }
    }

    fn hear(&mut self) {
        let Mail { woken, clock_moved: _, stop_by, answers } = self.shared.mailbox.take();
        let now = self.shared.now();
        self.machine.handle_timeout(now);
        if woken {
            self.machine.handle_wakeup(now);
        }
        for (ticket, published) in answers {
            self.answer(now, &ticket, published);
        }
        if let Some(stop_by) = stop_by {
            let give_up_at = self.machine.now() + stop_by.since(now);
            self.give_up_at =
                Some(self.give_up_at.map_or(give_up_at, |there| there.min(give_up_at)));
            self.machine.handle_stop(now);
            self.take_back(now, |_| true);
        }
        if !self.gave_up && self.give_up_at.is_some_and(|at| at <= self.machine.now()) {
            self.gave_up = true;
            // What the store said before does not count against the last try.
            self.error = None;
            self.machine.abandon(now);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Exchange(exchange) => {
                let exchange = || {
                    run_exchange(
                        &*self.store,
                        self.machine.settings(),
                        self.machine.now(),
                        exchange,
                    )
                };
                match guarded(exchange) {
                    Ok((settled, claimed)) => {
                        self.error = None;
                        trace::exchanged(settled.as_ref(), claimed.as_ref());
                        self.machine.handle_exchanged(self.shared.now(), settled.as_ref(), claimed);
                    }
                    Err(error) => {
                        self.store_failed(error);
                        self.machine.handle_store_failed(self.shared.now());
                    }
                }
            }
            Action::Renew(leases) => {
                let renew = Renew::new(leases, self.machine.settings().lease);
                match guarded(|| self.store.run(renew, self.machine.now())) {
                    Ok(renewed) => {
                        self.error = None;
                        trace::renewed(&renewed);
                        let now = self.shared.now();
                        self.machine.handle_renewed(now, &renewed);
                        let stale: BTreeSet<&LeaseRef> =
                            renewed.stale.iter().map(|stale| &stale.lease).collect();
                        self.take_back(now, |ticket| stale.contains(&ticket.lease));
                    }
                    Err(error) => {
                        self.store_failed(error);
                        self.machine.handle_store_failed(self.shared.now());
                    }
                }
            }
            Action::Publish(tickets) => match guarded(|| read_messages(&*self.store, &tickets)) {
                Ok(messages) => {
                    let now = self.machine.now();
                    let mut jobs = Vec::with_capacity(tickets.len());
                    for (ticket, message) in tickets.into_iter().zip(messages) {
                        self.publishing += 1;
                        match message {
                            Ok(message) => jobs.push(Job { ticket, message, now }),
                            Err(answer) => self.answer(self.shared.now(), &ticket, answer),
                        }
                    }
                    self.shared.jobs.extend(jobs);
                }
                Err(error) => {
                    self.store_failed(error);
                    self.machine.handle_unread(self.shared.now(), &tickets);
                }
            },
        }
    }

    fn answer(&mut self, now: Millis, ticket: &Ticket, published: Published) {
        self.publishing -= 1;
        self.machine.handle_published(now, ticket, published);
    }

    /// What no worker has begun, of those, is released.
    fn take_back(&mut self, now: Millis, of_those: impl Fn(&Ticket) -> bool) {
        for job in self.shared.jobs.take_back(of_those) {
            self.answer(now, &job.ticket, Published::Abandoned);
        }
    }

    fn store_failed(&mut self, error: Reason) {
        trace::store_failed(&error);
        self.error = Some(error);
    }

    fn wait_limit(&self) -> Option<Duration> {
        let give_up_at = self.give_up_at.filter(|_| !self.gave_up);
        let next = [self.machine.poll_timeout(), give_up_at].into_iter().flatten().min();
        next.map(|at| at.since(self.machine.now()))
    }

    fn report(&mut self, phase: Phase) {
        if self.phase != phase {
            self.phase = phase;
            trace::phase(phase);
        }
        let counters = self.machine.counters();
        self.shared.board.write(Status {
            phase,
            counters,
            publishing: self.publishing,
            error: self.error.clone(),
        });
    }
}

/// Asks something of the store. What panics there has failed: its transaction is rolled back as it
/// unwinds.
fn guarded<T, E: Display>(ask: impl FnOnce() -> Result<T, E>) -> Result<T, Reason> {
    match catch_unwind(AssertUnwindSafe(ask)) {
        Ok(answer) => answer.map_err(Reason::new),
        Err(panic) => Err(panicked("store", &*panic)),
    }
}
