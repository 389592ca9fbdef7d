//! The task that drives the machine: it starts what there is to do, and waits for whatever ends
//! first.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::slice;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::select;
use tokio::sync::{oneshot, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::sleep;
use twobox::relay::{
    Action, AsyncPublisher, Exchanged, Message, Phase, Published, RelayMachine, RelaySettings,
    Status, Ticket, panicked, read_messages_async, run_exchange_async, trace,
};
use twobox::store::asynchronous::AsyncStore;
use twobox::{Checked, LeaseRef, Millis, Reason, Renew, Renewed};

use crate::Control;

/// What the store has answered.
enum Step {
    Exchanged(Result<Exchanged, Reason>),
    Renewed(Result<Renewed, Reason>),
    Read(Vec<Ticket>, Result<Vec<Result<Message, Published>>, Reason>),
}

pub(crate) struct Driver<S, P> {
    store: Arc<S>,
    publisher: Arc<P>,
    settings: Arc<Checked<RelaySettings>>,
    machine: RelayMachine,
    control: Arc<Control>,
    status: watch::Sender<Status>,
    /// What the store is asked: one transaction at most, and envelopes to be read.
    steps: JoinSet<Step>,
    publishes: JoinSet<(Ticket, Published)>,
    /// The leases under which something is being published. When one is not ours any more, it is
    /// dropped from here, and the publish with it.
    leases: BTreeMap<LeaseRef, oneshot::Sender<()>>,
    /// Tickets whose envelopes are being read.
    reading: usize,
    /// What the store said, if it failed the last time.
    error: Option<Reason>,
    /// In the machine's time, which does not step back.
    give_up_at: Option<Millis>,
    /// Publishes that were under way when its patience ended.
    gave_up_on: Option<usize>,
    phase: Phase,
}

impl<S, P> Driver<S, P>
where
    S: AsyncStore + Send + Sync + 'static,
    P: AsyncPublisher + 'static,
{
    pub(crate) fn new(
        store: Arc<S>,
        publisher: P,
        machine: RelayMachine,
        control: Arc<Control>,
        status: watch::Sender<Status>,
    ) -> Self {
        Self {
            store,
            publisher: Arc::new(publisher),
            settings: Arc::new(machine.settings().clone()),
            phase: machine.phase(),
            machine,
            control,
            status,
            steps: JoinSet::new(),
            publishes: JoinSet::new(),
            leases: BTreeMap::new(),
            reading: 0,
            error: None,
            give_up_at: None,
            gave_up_on: None,
        }
    }

    /// Runs until it is told to stop. Whatever happens, it ends with a status that says so.
    pub(crate) async fn run(mut self) {
        if let Err(panic) = caught(self.run_until_stopped()).await {
            self.error = Some(panicked("relay", &*panic));
        }
        self.report(Phase::Stopped);
    }

    async fn run_until_stopped(&mut self) {
        let control = self.control.clone();
        let mut stop = control.stop_by.subscribe();
        stop.mark_changed();
        loop {
            self.machine.handle_timeout(self.now());
            if self.gave_up_on.is_none()
                && self.give_up_at.is_some_and(|at| at <= self.machine.now())
            {
                self.give_up();
            }
            while let Some(action) = self.machine.poll_action() {
                self.start(action);
            }
            // After its patience has ended it tries once.
            if self.machine.is_stopped() || (self.gave_up_on.is_some() && self.error.is_some()) {
                return;
            }
            self.report(self.machine.phase());
            let limit = self.wait_limit();
            select! {
                () = control.wake.notified() => self.machine.handle_wakeup(self.now()),
                // The sender is ours too, so it is never closed.
                Ok(()) = stop.changed() => {
                    let stop_by = *stop.borrow_and_update();
                    self.stop(stop_by);
                }
                Some(step) = self.steps.join_next() => self.handle_step(step),
                Some(published) = self.publishes.join_next() => self.handle_published(published),
                () = sleep(limit.unwrap_or_default()), if limit.is_some() => {}
            }
        }
    }

    fn start(&mut self, action: Action) {
        let (store, settings, now) =
            (self.store.clone(), self.settings.clone(), self.machine.now());
        match action {
            Action::Exchange(exchange) => {
                let step = async move {
                    guarded(run_exchange_async(&*store, &settings, now, exchange)).await
                };
                self.steps.spawn(async { Step::Exchanged(step.await) })
            }
            Action::Renew(leases) => {
                let step = async move {
                    guarded(store.run(Renew::new(leases, settings.lease), now)).await
                };
                self.steps.spawn(async { Step::Renewed(step.await) })
            }
            Action::Publish(tickets) => {
                self.reading += tickets.len();
                self.steps.spawn(async move {
                    let messages = guarded(read_messages_async(&*store, &tickets)).await;
                    Step::Read(tickets, messages)
                })
            }
        };
    }

    fn handle_step(&mut self, step: Result<Step, JoinError>) {
        let now = self.now();
        match step {
            Ok(Step::Exchanged(Ok((settled, claimed)))) => {
                self.store_answered();
                trace::exchanged(settled.as_ref(), claimed.as_ref());
                self.machine.handle_exchanged(now, settled.as_ref(), claimed);
            }
            Ok(Step::Renewed(Ok(renewed))) => {
                self.store_answered();
                trace::renewed(&renewed);
                self.machine.handle_renewed(now, &renewed);
                // Whoever has the lease now publishes the same (F3).
                for stale in &renewed.stale {
                    self.leases.remove(&stale.lease);
                }
            }
            Ok(Step::Read(tickets, read)) => {
                self.reading -= tickets.len();
                match read {
                    Ok(messages) => tickets.into_iter().zip(messages).for_each(
                        |(ticket, message)| match message {
                            Ok(_) if !self.machine.may_begin(&ticket) => {
                                self.machine.handle_published(now, &ticket, Published::Abandoned);
                            }
                            Ok(message) => self.publish(ticket, message),
                            Err(answer) => self.machine.handle_published(now, &ticket, answer),
                        },
                    ),
                    // What it gave up on it does not miss.
                    Err(_) if self.gave_up_on.is_some() => {}
                    Err(error) => {
                        self.store_failed(error);
                        self.machine.handle_unread(now, &tickets);
                    }
                }
            }
            Ok(Step::Exchanged(Err(error)) | Step::Renewed(Err(error))) => {
                self.store_failed(error);
                self.machine.handle_store_failed(now);
            }
            // Panics are caught where they happen, so the runtime shuts down, and soon drops this
            // task as well.
            Err(error) => {
                self.store_failed(Reason::new(error));
                self.machine.handle_store_failed(now);
            }
        }
    }

    fn publish(&mut self, ticket: Ticket, message: Message) {
        let (publisher, now) = (self.publisher.clone(), self.machine.now());
        let (lease, lost) = oneshot::channel();
        self.leases.insert(ticket.lease.clone(), lease);
        self.publishes.spawn(async move {
            let publish = async { publisher.publish(slice::from_ref(&message), now).await };
            let published = trace::publish_async(&message, async {
                match caught(publish).await {
                    Ok(answers) => {
                        let none =
                            || Published::Failed(Reason::new("the publisher gave no answer"));
                        answers.into_iter().next().unwrap_or_else(none)
                    }
                    Err(panic) => Published::Failed(panicked("publisher", &*panic)),
                }
            });
            let published = select! {
                biased;
                published = published => published,
                // The machine has to hear of it: until then this publish holds its key back (P4).
                _ = lost => Published::Abandoned,
            };
            (ticket, published)
        });
    }

    fn handle_published(&mut self, published: Result<(Ticket, Published), JoinError>) {
        // The others were aborted as its patience ended, and nobody waits for them.
        if let Ok((ticket, published)) = published {
            self.leases.remove(&ticket.lease);
            self.machine.handle_published(self.now(), &ticket, published);
        }
    }

    fn stop(&mut self, stop_by: Option<Millis>) {
        let Some(stop_by) = stop_by else { return };
        let now = self.now();
        self.machine.handle_stop(now);
        let give_up_at = self.machine.now() + stop_by.since(now);
        self.give_up_at = Some(self.give_up_at.map_or(give_up_at, |there| there.min(give_up_at)));
    }

    /// Its patience has ended: what is being published is dropped, and its lease released.
    fn give_up(&mut self) {
        self.gave_up_on = Some(self.publishing());
        self.publishes.abort_all();
        // What the store said before does not count against the last try.
        self.error = None;
        self.machine.abandon(self.now());
    }

    fn store_answered(&mut self) {
        // What was asked before something else failed says nothing about how the store is now.
        if self.machine.phase() != Phase::StoreAway {
            self.error = None;
        }
    }

    fn store_failed(&mut self, error: Reason) {
        trace::store_failed(&error);
        self.error = Some(error);
    }

    fn now(&self) -> Millis {
        self.control.now()
    }

    fn publishing(&self) -> usize {
        self.gave_up_on.unwrap_or(self.reading + self.publishes.len())
    }

    fn wait_limit(&self) -> Option<Duration> {
        let give_up_at = self.give_up_at.filter(|_| self.gave_up_on.is_none());
        let next = [self.machine.poll_timeout(), give_up_at].into_iter().flatten().min();
        next.map(|at| at.since(self.machine.now()))
    }

    fn report(&mut self, phase: Phase) {
        if self.phase != phase {
            self.phase = phase;
            trace::phase(phase);
        }
        let counters = self.machine.counters();
        let status =
            Status { phase, counters, publishing: self.publishing(), error: self.error.clone() };
        self.status.send_if_modified(|there| {
            let changed = *there != status;
            *there = status;
            changed
        });
    }
}

/// Asks something of the store. What panics there has failed: its transaction is rolled back as it
/// unwinds.
async fn guarded<T, E: Display>(ask: impl Future<Output = Result<T, E>>) -> Result<T, Reason> {
    match caught(ask).await {
        Ok(answer) => answer.map_err(Reason::new),
        Err(panic) => Err(panicked("store", &*panic)),
    }
}

/// The output of a future, or its panic.
async fn caught<T>(future: impl Future<Output = T>) -> Result<T, Box<dyn Any + Send>> {
    let mut future = pin!(future);
    // After a panic the future is not polled again.
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(output)) => Poll::Ready(Ok(output)),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}
