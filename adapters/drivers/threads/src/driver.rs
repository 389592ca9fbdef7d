//! The thread that drives the machine: it hears, acts until there is nothing to do, and waits.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use twobox::relay::host::{Report, guarded};
use twobox::relay::{Action, Published, RelayMachine, Ticket};
use twobox::store::{NoCall, Store, drive};

use crate::shared::{Mail, Shared};

pub(crate) struct Driver<S> {
    store: S,
    machine: RelayMachine,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    report: Report,
}

impl<S: Store> Driver<S> {
    pub(crate) fn new(
        store: S,
        machine: RelayMachine,
        shared: Arc<Shared>,
        workers: Vec<JoinHandle<()>>,
    ) -> Self {
        let report = Report::new(&machine);
        Self { store, machine, shared, workers, report }
    }

    /// Runs until it is told to stop. Whatever happens, it ends with a status that says so.
    pub(crate) fn run(mut self) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.run_until_stopped()));
        self.shared.jobs.close();
        if self.machine.status().publishing == 0 {
            self.workers.drain(..).for_each(|worker| drop(worker.join()));
        }
        self.shared.board.write(self.report.end(&self.machine, ended));
    }

    fn run_until_stopped(&mut self) {
        while !self.machine.is_stopped() {
            self.hear();
            let action = self.machine.poll_action();
            let idle = action.is_none();
            action.into_iter().for_each(|action| self.act(action));
            self.shared.board.write(self.report.now(&self.machine));
            if idle && !self.machine.is_stopped() {
                self.shared.mailbox.wait(self.machine.rest_for());
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
            self.machine.handle_published(now, &ticket, published);
        }
        if let Some(stop_by) = stop_by {
            // Before it may lose its patience, so that it gives up on nothing that has not begun.
            self.take_back(|_| true);
            self.machine.handle_stop(now, stop_by.since(now));
        }
    }

    fn act(&mut self, action: Action) {
        let now = self.machine.now();
        match action {
            Action::Exchange(exchange) => {
                let flow = exchange.flow(self.machine.settings(), now, false);
                let exchanged = guarded(|| drive(&self.store, flow, &mut NoCall));
                self.machine.conclude_exchange(self.shared.now(), exchanged);
            }
            Action::Renew(renew) => {
                let renewed = guarded(|| self.store.run(renew, now));
                let lost = self.machine.conclude_renewal(self.shared.now(), renewed);
                self.take_back(|ticket| lost.contains(&ticket.lease));
            }
            Action::Publish(tickets) => self.shared.jobs.extend(tickets, now),
        }
    }

    /// What no worker has begun, of those, is released.
    fn take_back(&mut self, of_those: impl Fn(&Ticket) -> bool) {
        let now = self.shared.now();
        for ticket in self.shared.jobs.take_back(of_those) {
            self.machine.handle_published(now, &ticket, Published::Abandoned);
        }
    }
}
