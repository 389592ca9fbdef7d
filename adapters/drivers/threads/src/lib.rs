//! The relay of twobox on std threads: one thread drives the machine, others publish.
//!
//! It keeps the promises of [`RelayMachine`] while publishes are slow, fail, panic or hang. Events
//! are delivered at least once (P3, P9), one after the other within an ordering key and side by
//! side across keys (P4, F2), under leases that are renewed in time (F3, P6). If the broker or the
//! store is away it pauses, and then goes on (F11, F15). When it stops, nothing is lost, and
//! nothing counts as done that is not (F12).
//!
//! ```
//! use std::sync::{Arc, mpsc};
//! use std::iter::repeat_with;
//! use std::time::Duration;
//!
//! use twobox::relay::{Phase, Published, Publisher, RelaySettings};
//! use twobox::{Draft, Message, Millis, Moment, Owner, Request, Store};
//! use twobox_memory::MemoryStore;
//! use twobox_threads::RelayThread;
//!
//! struct Broker(mpsc::Sender<String>);
//! impl Publisher for Broker {
//!     fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
//!         batch.iter().map(|message| match self.0.send(message.event.id.to_string()) {
//!             Ok(()) => Published::Confirmed,
//!             Err(error) => Published::Unavailable(twobox::Reason::new(error)),
//!         }).collect()
//!     }
//! }
//!
//! let store = Arc::new(MemoryStore::new());
//! let (sender, sent) = mpsc::channel();
//! let publishers = repeat_with(move || Broker(sender.clone()));
//! let settings = RelaySettings::new(Owner::new("relay-1")?);
//! let relay = RelayThread::spawn(store.clone(), 2, publishers, settings, Moment::now)?;
//! let waker = relay.waker();
//!
//! let request = Request::of("customer-7", "req-001", [("item", "notebook")])?;
//! let order = request.order("order-1", "{}", Draft::json("order.created", "{}")?)?;
//! store.run(order, Millis::now())?;
//! waker.wake();
//!
//! assert_eq!(sent.recv()?, "order-1/1");
//! let end = relay.stop(Duration::from_secs(5));
//! assert_eq!((end.phase, end.counters.confirmed, end.error), (Phase::Stopped, 1, None));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod driver;
mod shared;
mod worker;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use thiserror::Error;
use twobox::relay::{Publisher, RelayMachine, RelaySettings, Status};
use twobox::{Invalid, Moment, Store};

use driver::Driver;
use shared::Shared;
use worker::Workers;

/// A relay that runs on threads of its own until it is told to stop. Dropping it tells it to stop
/// at once, and waits for nothing.
#[derive(Debug)]
pub struct RelayThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Why a relay was not started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// The settings do not go together.
    #[error(transparent)]
    Settings(#[from] Invalid),
    /// There is nothing to publish with.
    #[error("there are fewer publishers than workers, or no workers; give each worker a publisher")]
    NoPublisher,
    /// The system gives no thread.
    #[error(
        "the system started no thread for the relay: {0}; give fewer workers, or raise the limit"
    )]
    Thread(#[from] io::Error),
}

impl RelayThread {
    /// Starts a relay from a store to a broker, with so many workers. Each worker is a thread with
    /// a publisher of its own, the first ones of `publishers`; each gets as many messages at a time
    /// as it [wants](Publisher::batch). All times are those of `clock`: [`Moment::now`], or a
    /// function of your own (see [`Waker::clock_moved`]).
    ///
    /// A publisher that panics counts as failed for the events that it was called with, and is
    /// called again for the next ones. One that hangs longer than
    /// [`RelaySettings::publish_timeout`] counts as failed too, and a worker with the next publisher
    /// takes its place, so give more of them than workers: [`repeat_with`](std::iter::repeat_with).
    /// Up to four times as many threads as workers may hang; then those that hang are replaced no
    /// more.
    ///
    /// # Errors
    ///
    /// [`SpawnError`]; nothing runs then.
    pub fn spawn<S, I>(
        store: S,
        workers: usize,
        publishers: I,
        settings: RelaySettings,
        clock: impl Fn() -> Moment + Send + Sync + 'static,
    ) -> Result<Self, SpawnError>
    where
        S: Store + Send + 'static,
        I: IntoIterator<Item: Publisher + Send + 'static, IntoIter: Send + 'static>,
    {
        let name = settings.owner.clone();
        let now = clock();
        let mut publishers = publishers.into_iter();
        let first: Vec<_> = publishers.by_ref().take(workers).collect();
        if first.is_empty() || first.len() < workers {
            return Err(SpawnError::NoPublisher);
        }
        let batch = first.iter().map(Publisher::batch).min().unwrap_or(1);
        let settings = RelaySettings { publishes: workers, ..settings };
        let machine = RelayMachine::new(settings, now)?.batch(batch);
        let shared = Arc::new(Shared::new(Box::new(clock), machine.status()));
        // Whatever fails from here on, the workers that run already end with what they are told by.
        let mut workers = Workers::new(name.clone(), shared.clone(), publishers);
        for publisher in first {
            workers.start(publisher)?;
        }
        let driver = Driver::new(store, machine, shared.clone(), workers);
        let thread = thread::Builder::new().name(name.to_string()).spawn(move || driver.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// A handle to announce commits with.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker { shared: self.shared.clone() }
    }

    /// What the relay is doing, and what it has done.
    #[must_use]
    pub fn status(&self) -> Status {
        self.shared.board.read()
    }

    /// Waits until the status is as wanted, or the relay has stopped, and says what it is. `wanted`
    /// is asked after each change only: if what you wait for may never come, use
    /// [`RelayThread::wait_at_most`].
    pub fn wait_for(&self, wanted: impl FnMut(&Status) -> bool) -> Status {
        self.shared.board.wait_for(None, wanted)
    }

    /// As [`RelayThread::wait_for`], but no longer than `patience`. To drain a store before a stop,
    /// wait until its [`Stats`](twobox::Stats) count nothing as due or leased: `store.view()?` with
    /// [`Load::stats`](twobox::Load::stats). What waits for a backoff, or behind a dead event, is
    /// not waited for then.
    pub fn wait_at_most(&self, patience: Duration, wanted: impl FnMut(&Status) -> bool) -> Status {
        self.shared.board.wait_for(Some(patience), wanted)
    }

    /// Tells the relay to stop, and does not wait. The relay claims no more, and releases what is
    /// not being published (F12). It waits for what is being published, but no longer than
    /// `patience`; then it releases that too, without counting a failure. That may have reached the
    /// broker, so it may arrive twice (P9). Of several calls the least patient counts.
    pub fn request_stop(&self, patience: Duration) {
        self.shared.request_stop(patience);
    }

    /// Waits until the relay has stopped; for ever, if it was not told to.
    pub fn join(mut self) -> Status {
        self.join_thread();
        self.status()
    }

    /// Stops the relay, as [`RelayThread::request_stop`] and [`RelayThread::join`] do. A publisher
    /// that is not done by then keeps its thread until it is.
    pub fn stop(self, patience: Duration) -> Status {
        self.request_stop(patience);
        self.join()
    }

    fn join_thread(&mut self) {
        if let Some(thread) = self.thread.take() {
            // The thread catches its own panics, and says so in the status.
            let _ended = thread.join();
        }
    }
}

impl Drop for RelayThread {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.request_stop(Duration::ZERO);
        }
    }
}

/// Tells a relay in the same process that there is something to do. It is cheap to clone, to send
/// and to call.
///
/// Without it the relay finds out when it polls; a relay in another process always does.
#[derive(Clone)]
pub struct Waker {
    shared: Arc<Shared>,
}

impl Waker {
    /// Says that events were committed. Call it after the commit; before it, there is nothing to
    /// see yet.
    pub fn wake(&self) {
        self.shared.mailbox.post(|mail| mail.woken = true);
    }

    /// Says that the clock has moved by more or less than time has passed: a test has set its
    /// clock, or the computer has slept.
    pub fn clock_moved(&self) {
        self.shared.mailbox.post(|mail| mail.clock_moved = true);
    }
}

impl fmt::Debug for Waker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waker").finish_non_exhaustive()
    }
}

/// The README, whose example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
