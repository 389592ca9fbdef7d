//! Drives a relay machine: asks the store in this thread, and gives workers what to publish.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use twobox::relay::host::{Report, guarded};
use twobox::relay::{Action, Publisher, RelayMachine, Status};
use twobox::store::{NoCall, drive};
use twobox::{Moment, Store};

use crate::shared::{Answers, Mail, Shared};
use crate::worker::Workers;

pub(crate) struct Driver<S, I> {
    store: S,
    machine: RelayMachine,
    shared: Arc<Shared>,
    workers: Workers<I>,
    report: Report,
}

impl<S, I> Driver<S, I>
where
    S: Store,
    I: Iterator<Item: Publisher + Send + 'static>,
{
    pub(crate) fn new(
        store: S,
        machine: RelayMachine,
        shared: Arc<Shared>,
        workers: Workers<I>,
    ) -> Self {
        let report = Report::new(&machine);
        Self { store, machine, shared, workers, report }
    }

    /// Runs until it is told to stop. Whatever happens, it ends with a status that says so.
    pub(crate) fn run(mut self) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.run_until_stopped()));
        let status = self.report.end(&self.machine, ended);
        let status = self.with_replaced(status);
        self.workers.end(status.publishing == 0);
        self.shared.board.write(status);
    }

    fn run_until_stopped(&mut self) {
        while !self.machine.is_stopped() {
            self.hear();
            let action = self.machine.poll_action();
            let idle = action.is_none();
            action.into_iter().for_each(|action| self.act(action));
            let status = self.report.now(&self.machine);
            self.shared.board.write(self.with_replaced(status));
            if idle && !self.machine.is_stopped() {
                self.shared.mailbox.wait(self.machine.rest_for());
            }
        }
    }

    fn with_replaced(&self, status: Status) -> Status {
        let mut status = status;
        status.hung += self.workers.replaced();
        status
    }

    fn hear(&mut self) {
        let Mail { woken, clock_moved: _, stop_by, answers } = self.shared.mailbox.take();
        let now = self.shared.now();
        self.hear_answers(now, answers);
        self.machine.handle_timeout(now);
        if woken {
            self.machine.handle_wakeup(now);
        }
        if let Some(stop_by) = stop_by {
            self.machine.handle_stop(now, stop_by.saturating_sub(now.uptime));
        }
        self.replace_hung();
    }

    fn hear_answers(&mut self, now: Moment, answers: Vec<Answers>) {
        for (worker, answers) in answers {
            self.workers.ended(worker);
            for (ticket, published) in answers {
                self.machine.handle_published(now, &ticket, published);
            }
        }
    }

    /// The store has answered. What was published meanwhile is heard first: it is not overdue
    /// because the store was slow.
    fn hear_after_store(&mut self) -> Moment {
        let answers = self.shared.mailbox.take_answers();
        let now = self.shared.now();
        self.hear_answers(now, answers);
        now
    }

    fn act(&mut self, action: Action) {
        let now = self.machine.now();
        match action {
            Action::Exchange(exchange) => {
                let flow = exchange.flow(self.machine.settings(), now, false);
                let exchanged = guarded(|| drive(&self.store, flow, &mut NoCall));
                let now = self.hear_after_store();
                self.machine.conclude_exchange(now, exchanged);
            }
            Action::Renew(renew) => {
                let renewed = guarded(|| self.store.run(renew, now));
                let now = self.hear_after_store();
                self.machine.conclude_renewal(now, renewed);
            }
            Action::Publish(tickets) => self.workers.publish(tickets, now),
            // A thread cannot be told to stop: it goes on until it is done, or overdue.
            Action::BreakOff(_) => {}
            Action::GiveUp(leases) => {
                self.workers.overdue(&leases);
                self.replace_hung();
            }
        }
    }

    fn replace_hung(&mut self) {
        for lease in self.workers.replace() {
            self.machine.handle_broken_off(self.shared.now(), &lease);
        }
    }
}
