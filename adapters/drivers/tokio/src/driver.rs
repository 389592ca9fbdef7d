//! The task that drives the machine: it starts what there is to do, and waits for whatever ends
//! first.

use std::fmt::Display;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::sleep;
use twobox::flow::Exchanged;
use twobox::relay::host::{Panic, Report, answered, messages, published};
use twobox::relay::{
    Action, AsyncPublisher, Published, RelayMachine, RelaySettings, Status, Ticket,
};
use twobox::store::NoCall;
use twobox::store::asynchronous::{AsyncStore, drive};
use twobox::{Checked, LeaseRef, Moment, Reason, Renewed};

use crate::Control;

/// What the store has answered.
enum Step {
    Exchanged(Result<Exchanged, Reason>),
    Renewed(Result<Renewed, Reason>),
}

/// A call of the publisher that is under way.
struct Call {
    tickets: Vec<Ticket>,
    /// The leases of those that are still waited for.
    ours: Vec<LeaseRef>,
    task: AbortHandle,
}

#[expect(clippy::disallowed_types, reason = "task ids have no order, and none matters here")]
type Calls = std::collections::HashMap<Id, Call>;

pub(crate) struct Driver<S, P> {
    store: Arc<S>,
    publisher: Arc<P>,
    settings: Arc<Checked<RelaySettings>>,
    machine: RelayMachine,
    control: Arc<Control>,
    status: watch::Sender<Status>,
    report: Report,
    /// What the store is asked: one transaction at most.
    steps: JoinSet<Step>,
    publishes: JoinSet<Result<Vec<Published>, Panic>>,
    calls: Calls,
}

impl<S, P> Driver<S, P>
where
    S: AsyncStore + Send + Sync + 'static,
    P: AsyncPublisher + 'static,
{
    pub(crate) fn new(
        store: S,
        publisher: P,
        machine: RelayMachine,
        control: Arc<Control>,
        status: watch::Sender<Status>,
    ) -> Self {
        Self {
            store: Arc::new(store),
            publisher: Arc::new(publisher),
            settings: Arc::new(machine.settings().clone()),
            report: Report::new(&machine),
            machine,
            control,
            status,
            steps: JoinSet::new(),
            publishes: JoinSet::new(),
            calls: Calls::default(),
        }
    }

    /// Runs until it is told to stop. Whatever happens, it ends with a status that says so. What is
    /// still being published is dropped with it.
    pub(crate) async fn run(mut self) {
        let ended = caught(self.run_until_stopped()).await;
        let status = self.report.end(&self.machine, ended);
        self.show(status);
    }

    async fn run_until_stopped(&mut self) {
        let control = self.control.clone();
        let mut stop = control.stop_by.subscribe();
        stop.mark_changed();
        loop {
            self.hear_published();
            self.machine.handle_timeout(self.now());
            while let Some(action) = self.machine.poll_action() {
                self.start(action);
            }
            if self.machine.gave_up() {
                self.publishes.abort_all();
            }
            if self.machine.is_stopped() {
                return;
            }
            let status = self.report.now(&self.machine);
            self.show(status);
            let limit = self.machine.rest_for();
            tokio::select! {
                () = control.wake.notified() => {
                    self.hear_published();
                    self.machine.handle_wakeup(self.now());
                }
                // The sender is ours too, so it is never closed.
                Ok(()) = stop.changed() => {
                    self.hear_published();
                    if let Some(stop_by) = *stop.borrow_and_update() {
                        let now = self.now();
                        self.machine.handle_stop(now, stop_by.saturating_sub(now.uptime));
                    }
                }
                Some(step) = self.steps.join_next() => {
                    self.hear_published();
                    self.handle_step(step);
                }
                Some(ended) = self.publishes.join_next_with_id() => self.handle_ended(ended),
                () = sleep(limit.unwrap_or_default()), if limit.is_some() => {}
            }
        }
    }

    /// Hears of all calls that have ended, before the machine hears anything else: they are not
    /// overdue because this task had no turn.
    fn hear_published(&mut self) {
        while let Some(ended) = self.publishes.try_join_next_with_id() {
            self.handle_ended(ended);
        }
    }

    fn handle_ended(&mut self, ended: Result<(Id, Result<Vec<Published>, Panic>), JoinError>) {
        match ended {
            Ok((id, given)) => self.handle_published(id, |it| published(it, given)),
            Err(aborted) => self.handle_published(aborted.id(), abandoned),
        }
    }

    fn start(&mut self, action: Action) {
        let (store, settings, now) =
            (self.store.clone(), self.settings.clone(), self.machine.now());
        match action {
            Action::Exchange(exchange) => {
                self.steps.spawn(async move {
                    let flow = exchange.flow(&settings, now, S::WRITES_FIRST);
                    Step::Exchanged(guarded(drive(&*store, flow, NoCall)).await)
                });
            }
            Action::Renew(renew) => {
                self.steps
                    .spawn(async move { Step::Renewed(guarded(store.run(renew, now)).await) });
            }
            Action::Publish(tickets) => self.publish(tickets),
            Action::BreakOff(leases) | Action::GiveUp(leases) => self.break_off(&leases),
        }
    }

    fn publish(&mut self, tickets: Vec<Ticket>) {
        let (publisher, now) = (self.publisher.clone(), self.machine.now());
        let batch = messages(&tickets);
        let task = self
            .publishes
            .spawn(async move { caught(async { publisher.publish(&batch, now).await }).await });
        let ours = tickets.iter().map(|ticket| ticket.lease.clone()).collect();
        self.calls.insert(task.id(), Call { tickets, ours, task });
    }

    fn handle_step(&mut self, step: Result<Step, JoinError>) {
        let now = self.now();
        match step {
            Ok(Step::Exchanged(exchanged)) => self.machine.conclude_exchange(now, exchanged),
            Ok(Step::Renewed(renewed)) => self.machine.conclude_renewal(now, renewed),
            // Panics are caught where they happen, so the runtime shuts down, and soon drops this
            // task as well.
            Err(error) => self.machine.conclude_exchange(now, Err(Reason::new(error))),
        }
    }

    /// What is published under these leases is overdue, or whoever has them now publishes the same
    /// (F3). A call goes on as long as it has something else to publish. A lost one may be overdue
    /// as well.
    fn break_off(&mut self, lost: &[LeaseRef]) {
        for call in self.calls.values_mut() {
            call.ours.retain(|lease| !lost.contains(lease));
            if call.ours.is_empty() {
                call.task.abort();
            }
        }
    }

    /// A call has ended, and its future is dropped: from here on others of its lanes may be
    /// published.
    fn handle_published(
        &mut self,
        id: Id,
        ended: impl FnOnce(Vec<Ticket>) -> Vec<(Ticket, Published)>,
    ) {
        let Some(call) = self.calls.remove(&id) else { return };
        let now = self.now();
        for (ticket, published) in ended(call.tickets) {
            self.machine.handle_published(now, &ticket, published);
        }
    }

    fn now(&self) -> Moment {
        self.control.now()
    }

    fn show(&self, status: Status) {
        self.status.send_if_modified(|there| {
            let changed = *there != status;
            *there = status;
            changed
        });
    }
}

/// What a call that was broken off has come to.
fn abandoned(tickets: Vec<Ticket>) -> Vec<(Ticket, Published)> {
    let given = vec![Published::Abandoned; tickets.len()];
    published(tickets, Ok(given))
}

/// Asks something of the store. What panics there has failed: its transaction is rolled back as it
/// unwinds.
async fn guarded<T, E: Display>(ask: impl Future<Output = Result<T, E>>) -> Result<T, Reason> {
    answered(caught(ask).await)
}

/// The output of a future, or its panic.
async fn caught<T>(future: impl Future<Output = T>) -> Result<T, Panic> {
    let mut future = pin!(future);
    // After a panic the future is not polled again.
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}
