//! What the threads of a relay share: a mailbox to the driver, a queue to the workers, and the
//! status for everybody.
//!
//! Nothing that can panic runs under one of the locks, so a poisoned one is taken as it is.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use twobox::Millis;
use twobox::relay::host::stop_by;
use twobox::relay::{Phase, Published, Status, Ticket};

pub(crate) struct Shared {
    pub(crate) mailbox: Mailbox,
    pub(crate) jobs: Jobs,
    pub(crate) board: Board,
    clock: Box<dyn Fn() -> Millis + Send + Sync>,
}

impl Shared {
    pub(crate) fn new(clock: Box<dyn Fn() -> Millis + Send + Sync>, status: Status) -> Self {
        Self {
            mailbox: Mailbox::default(),
            jobs: Jobs::default(),
            board: Board::new(status),
            clock,
        }
    }

    pub(crate) fn now(&self) -> Millis {
        (self.clock)()
    }

    pub(crate) fn request_stop(&self, patience: Duration) {
        let until = self.now() + patience;
        self.mailbox.post(|mail| mail.stop_by = Some(stop_by(mail.stop_by, until)));
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("status", &self.board.read()).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the driver has to hear. What is said twice is heard once.
#[derive(Default)]
pub(crate) struct Mail {
    pub(crate) woken: bool,
    pub(crate) clock_moved: bool,
    pub(crate) stop_by: Option<Millis>,
    pub(crate) answers: Vec<(Ticket, Published)>,
}

impl Mail {
    fn is_empty(&self) -> bool {
        !self.woken && !self.clock_moved && self.stop_by.is_none() && self.answers.is_empty()
    }
}

#[derive(Default)]
pub(crate) struct Mailbox {
    mail: Mutex<Mail>,
    arrived: Condvar,
}

impl Mailbox {
    pub(crate) fn post(&self, write: impl FnOnce(&mut Mail)) {
        write(&mut lock(&self.mail));
        self.arrived.notify_one();
    }

    pub(crate) fn take(&self) -> Mail {
        std::mem::take(&mut lock(&self.mail))
    }

    /// Waits until there is mail, but no longer than `limit`.
    pub(crate) fn wait(&self, limit: Option<Duration>) {
        let mail = lock(&self.mail);
        match limit {
            Some(limit) => {
                drop(self.arrived.wait_timeout_while(mail, limit, |mail| mail.is_empty()));
            }
            None => drop(self.arrived.wait_while(mail, |mail| mail.is_empty())),
        }
    }
}

/// What a worker publishes at once.
pub(crate) struct Batch {
    pub(crate) tickets: Vec<Ticket>,
    pub(crate) now: Millis,
}

#[derive(Default)]
pub(crate) struct Jobs {
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// Publishes that wait for a worker, each with the time at which it was handed out.
#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Ticket, Millis)>,
    /// Workers that wait for something to do.
    idle: usize,
    closed: bool,
}

impl Jobs {
    /// All at once: a worker that runs into an outage takes back what waits, and must find it
    /// there.
    pub(crate) fn extend(&self, tickets: Vec<Ticket>, now: Millis) {
        lock(&self.queue).waiting.extend(tickets.into_iter().map(|ticket| (ticket, now)));
        self.changed.notify_all();
    }

    /// What to publish next, at most so much, and no more than leaves the other workers that have
    /// nothing to do their share; `None` once the queue is closed.
    pub(crate) fn next(&self, most: usize) -> Option<Batch> {
        let mut queue = lock(&self.queue);
        queue.idle += 1;
        let wait = |queue: &mut Queue| queue.waiting.is_empty() && !queue.closed;
        let waited = self.changed.wait_while(queue, wait);
        queue = waited.unwrap_or_else(PoisonError::into_inner);
        let share = queue.waiting.len().div_ceil(queue.idle);
        queue.idle -= 1;
        let now = queue.waiting.front()?.1;
        let taken = queue.waiting.drain(..share.min(most.max(1)));
        Some(Batch { tickets: taken.map(|(ticket, _)| ticket).collect(), now })
    }

    /// Takes back what no worker has begun, of those.
    pub(crate) fn take_back(&self, of_those: impl Fn(&Ticket) -> bool) -> Vec<Ticket> {
        let mut queue = lock(&self.queue);
        let (taken, left) =
            queue.waiting.drain(..).partition::<VecDeque<_>, _>(|(ticket, _)| of_those(ticket));
        queue.waiting = left;
        taken.into_iter().map(|(ticket, _)| ticket).collect()
    }

    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }
}

/// The status, and who waits for it to change.
pub(crate) struct Board {
    status: Mutex<Status>,
    changed: Condvar,
}

impl Board {
    fn new(status: Status) -> Self {
        Self { status: Mutex::new(status), changed: Condvar::new() }
    }

    pub(crate) fn read(&self) -> Status {
        lock(&self.status).clone()
    }

    pub(crate) fn write(&self, status: Status) {
        let mut there = lock(&self.status);
        if *there != status {
            *there = status;
            self.changed.notify_all();
        }
    }

    pub(crate) fn wait_for(
        &self,
        patience: Option<Duration>,
        mut wanted: impl FnMut(&Status) -> bool,
    ) -> Status {
        let begun = Instant::now();
        let mut status = lock(&self.status);
        // Not under wait_while: `wanted` is the user's, and may look at the relay.
        loop {
            let now = status.clone();
            drop(status);
            if now.phase == Phase::Stopped || wanted(&now) {
                return now;
            }
            let same = |status: &mut Status| *status == now;
            status = match patience.map(|patience| patience.saturating_sub(begun.elapsed())) {
                None => self
                    .changed
                    .wait_while(lock(&self.status), same)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return now,
                Some(left) => {
                    let changed = self.changed.wait_timeout_while(lock(&self.status), left, same);
                    changed.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}
