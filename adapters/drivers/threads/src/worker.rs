//! Workers: threads with a publisher each, that are given one call after the other. Of one that
//! hangs nobody can break the call off; another takes its place (F25).

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

use twobox::relay::host::{messages, published};
use twobox::relay::{Publisher, Ticket};
use twobox::{LeaseRef, Millis, Owner};

use crate::shared::Shared;

/// How many threads may hang for each worker, with that of the worker itself. With more of them it
/// is left alone: threads are not for free.
const THREADS_EACH: usize = 5;

/// One call of a publisher.
struct Call {
    tickets: Vec<Ticket>,
    now: Millis,
}

/// A thread with a publisher.
struct Worker {
    calls: Sender<Call>,
    thread: JoinHandle<()>,
    /// Under which leases it is publishing; none if it has nothing to do.
    leases: Vec<LeaseRef>,
    /// How many of these are not overdue.
    waited_for: usize,
}

/// All workers of a relay.
pub(crate) struct Workers<I> {
    name: Owner,
    shared: Arc<Shared>,
    /// Where publishers come from.
    publishers: I,
    most: usize,
    /// By number, and the next one.
    workers: BTreeMap<usize, Worker>,
    next: usize,
    /// Threads that hang, each with another in its place.
    replaced: BTreeMap<usize, JoinHandle<()>>,
}

impl<I> Workers<I>
where
    I: Iterator<Item: Publisher + Send + 'static>,
{
    pub(crate) fn new(name: Owner, shared: Arc<Shared>, publishers: I) -> Self {
        let (workers, replaced) = (BTreeMap::new(), BTreeMap::new());
        Self { name, shared, publishers, most: 0, workers, next: 0, replaced }
    }

    /// Starts a worker for this publisher.
    pub(crate) fn start(&mut self, publisher: I::Item) -> io::Result<()> {
        let (calls, receiver) = channel();
        let (number, shared) = (self.next, self.shared.clone());
        let thread = Builder::new()
            .name(format!("{} publisher", self.name))
            .spawn(move || work(publisher, &receiver, number, &shared))?;
        let worker = Worker { calls, thread, leases: Vec::new(), waited_for: 0 };
        self.workers.insert(number, worker);
        self.next += 1;
        self.most = self.most.max(self.workers.len());
        Ok(())
    }

    /// How many threads hang, and have another in their place.
    pub(crate) fn replaced(&self) -> usize {
        self.replaced.len()
    }

    /// Gives a call to a worker that has nothing to do. There is one: the machine has as many slots
    /// as there are workers. If there is none after all, the call is overdue some time.
    pub(crate) fn publish(&mut self, tickets: Vec<Ticket>, now: Millis) {
        let idle = self.workers.values_mut().find(|worker| worker.leases.is_empty());
        debug_assert!(idle.is_some(), "a slot is a worker");
        if let Some(worker) = idle {
            worker.leases = tickets.iter().map(|ticket| ticket.lease.clone()).collect();
            worker.waited_for = tickets.len();
            let sent = worker.calls.send(Call { tickets, now });
            debug_assert!(sent.is_ok(), "a worker waits for calls as long as it is one");
        }
    }

    /// A worker has ended its call.
    pub(crate) fn ended(&mut self, number: usize) {
        if let Some(worker) = self.workers.get_mut(&number) {
            (worker.leases, worker.waited_for) = (Vec::new(), 0);
        }
        self.replaced.remove(&number);
    }

    /// What is published under these leases is overdue.
    pub(crate) fn overdue(&mut self, leases: &[LeaseRef]) {
        for worker in self.workers.values_mut() {
            worker.waited_for -= worker.leases.iter().filter(|it| leases.contains(it)).count();
        }
    }

    /// Puts another in the place of each worker that hangs, as long as there are publishers. Gives
    /// the leases under which they were publishing.
    pub(crate) fn replace(&mut self) -> Vec<LeaseRef> {
        let hung = |worker: &Worker| worker.waited_for == 0 && !worker.leases.is_empty();
        let numbers: Vec<usize> =
            self.workers.iter().filter(|(_, it)| hung(it)).map(|(number, _)| *number).collect();
        let mut leases = Vec::new();
        for number in numbers {
            if self.replaced.len() + self.most >= self.most * THREADS_EACH {
                break;
            }
            // What makes publishers is the user's, and may panic.
            let next = catch_unwind(AssertUnwindSafe(|| self.publishers.next()));
            let Ok(Some(publisher)) = next else { break };
            if self.start(publisher).is_err() {
                break;
            }
            if let Some(worker) = self.workers.remove(&number) {
                leases.extend(worker.leases);
                // Without a sender it ends with the call that it hangs in.
                self.replaced.insert(number, worker.thread);
            }
            self.most = self.workers.len();
        }
        leases
    }

    /// Lets all of them end; waits for those that have nothing to do, and if `patient` for the
    /// others.
    pub(crate) fn end(self, patient: bool) {
        for worker in self.workers.into_values() {
            drop(worker.calls);
            if patient || worker.leases.is_empty() {
                // It catches the panics of its publisher.
                drop(worker.thread.join());
            }
        }
    }
}

fn work<P: Publisher>(mut publisher: P, calls: &Receiver<Call>, number: usize, shared: &Shared) {
    for Call { tickets, now } in calls {
        let batch = messages(&tickets);
        // After a panic the publisher is called again: what it holds is its own to keep in order.
        let given = catch_unwind(AssertUnwindSafe(|| publisher.publish(&batch, now)));
        let published = published(tickets, given);
        shared.mailbox.post(|mail| mail.answers.push((number, published)));
    }
}
