//! What the threads of a relay share: a mailbox to the driver, a queue to the workers, and the
//! status for everybody.
//!
//! Nothing that can panic runs under one of the locks, so a poisoned one is taken as it is.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use twobox::Moment;
use twobox::relay::host::stop_by;
use twobox::relay::{Phase, Published, Status, Ticket};

pub(crate) struct Shared {
    pub(crate) mailbox: Mailbox,
    pub(crate) board: Board,
    clock: Box<dyn Fn() -> Moment + Send + Sync>,
}

impl Shared {
    pub(crate) fn new(clock: Box<dyn Fn() -> Moment + Send + Sync>, status: Status) -> Self {
        Self { mailbox: Mailbox::default(), board: Board::new(status), clock }
    }

    pub(crate) fn now(&self) -> Moment {
        (self.clock)()
    }

    pub(crate) fn request_stop(&self, patience: Duration) {
        let until = self.now().uptime.saturating_add(patience);
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
    /// An uptime.
    pub(crate) stop_by: Option<Duration>,
    /// What calls have come to.
    pub(crate) answers: Vec<Answers>,
}

/// What a call has come to, with the number of its worker.
pub(crate) type Answers = (usize, Vec<(Ticket, Published)>);

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

    pub(crate) fn take_answers(&self) -> Vec<Answers> {
        std::mem::take(&mut lock(&self.mail).answers)
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
