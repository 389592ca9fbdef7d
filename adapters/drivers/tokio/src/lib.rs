//! The relay of twobox on tokio, and sync stores in async programs.
//!
//! [`RelayTask`] keeps the promises of [`RelayMachine`] while publishes are slow, fail, panic or
//! hang. Events are delivered at least once (P3, P9), one after the other within an ordering key
//! and side by side across keys (P4, F2), under leases that are renewed in time (F3, P6). If the
//! broker or the store is away it pauses, and then goes on (F11, F15). When it stops, nothing is
//! lost, and nothing counts as done that is not (F12). [`Blocking`] makes an async store of a sync
//! one.
//!
//! ```
//! use std::time::Duration;
//!
//! use tokio::sync::mpsc;
//! use twobox::relay::{AsyncPublisher, Phase, Published, RelaySettings};
//! use twobox::store::asynchronous::AsyncStore;
//! use twobox::{Draft, Message, Millis, Moment, Owner, Reason, Request};
//! use twobox_memory::MemoryStore;
//! use twobox_tokio::{Blocking, RelayTask};
//!
//! struct Broker(mpsc::Sender<String>);
//! impl AsyncPublisher for Broker {
//!     async fn publish(&self, batch: &[Message], _now: Millis) -> Vec<Published> {
//!         let mut answers = Vec::new();
//!         for message in batch {
//!             answers.push(match self.0.send(message.event.id.to_string()).await {
//!                 Ok(()) => Published::Confirmed,
//!                 Err(error) => Published::Unavailable(Reason::new(error)),
//!             });
//!         }
//!         answers
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = Blocking::new(MemoryStore::new());
//! let (sender, mut sent) = mpsc::channel(8);
//! let settings = RelaySettings::new(Owner::new("relay-1")?);
//! let relay = RelayTask::spawn(store.clone(), Broker(sender), settings, Moment::now)?;
//! let waker = relay.waker();
//!
//! let request = Request::of("customer-7", "req-001", [("item", "notebook")])?;
//! let order = request.order("order-1", "{}", Draft::json("order.created", "{}")?)?;
//! store.run(order, Millis::now()).await?;
//! waker.wake();
//!
//! assert_eq!(sent.recv().await.as_deref(), Some("order-1/1"));
//! let end = relay.stop(Duration::from_secs(5)).await;
//! assert_eq!((end.phase, end.counters.confirmed, end.error), (Phase::Stopped, 1, None));
//! # Ok(())
//! # }
//! ```

mod blocking;
mod driver;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use twobox::relay::host::stop_by;
use twobox::relay::{AsyncPublisher, RelayMachine, RelaySettings, Status};
use twobox::store::asynchronous::AsyncStore;
use twobox::{Invalid, Millis, Moment};

pub use blocking::{Blocking, BlockingError, BlockingTransaction, BlockingView, ThreadEnded};

use driver::Driver;

/// Clocks that show `start` now and follow tokio's time, also while that is paused. For tests.
pub fn tokio_clock(start: Millis) -> impl Fn() -> Moment + Clone + Send + Sync + 'static {
    let began = Instant::now();
    move || Moment::steady(start) + began.elapsed()
}

/// What a relay is told from outside of its task.
struct Control {
    wake: Notify,
    /// An uptime.
    stop_by: watch::Sender<Option<Duration>>,
    clock: Box<dyn Fn() -> Moment + Send + Sync>,
}

impl Control {
    fn now(&self) -> Moment {
        (self.clock)()
    }
}

/// A relay that runs in a task of its own. Dropping it tells it to stop at once, and waits for
/// nothing.
pub struct RelayTask {
    control: Arc<Control>,
    status: watch::Receiver<Status>,
    task: JoinHandle<()>,
}

impl RelayTask {
    /// Starts a relay from a store to a publisher, in the runtime of the caller. Each call of the
    /// publisher is a task of its own, with as many messages as it [wants](AsyncPublisher::batch),
    /// and at most [`RelaySettings::publishes`] run at once. One that is overdue is dropped. All
    /// times are those of `clock`: [`Moment::now`], or in a test [`tokio_clock`].
    ///
    /// A publisher that panics counts as failed for the events that it was called with.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the settings do not go together.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time enabled.
    pub fn spawn<S, P>(
        store: S,
        publisher: P,
        settings: RelaySettings,
        clock: impl Fn() -> Moment + Send + Sync + 'static,
    ) -> Result<Self, Invalid>
    where
        S: AsyncStore + Send + Sync + 'static,
        P: AsyncPublisher + 'static,
    {
        let machine = RelayMachine::new(settings, clock())?.batch(publisher.batch());
        let control = Arc::new(Control {
            wake: Notify::new(),
            stop_by: watch::Sender::new(None),
            clock: Box::new(clock),
        });
        let (sender, status) = watch::channel(machine.status());
        let task =
            tokio::spawn(Driver::new(store, publisher, machine, control.clone(), sender).run());
        Ok(Self { control, status, task })
    }

    /// A handle to announce commits with.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker { control: self.control.clone() }
    }

    /// What the relay is doing, and what it has done.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// The status as a channel that says when it changes. It is closed when the relay has stopped.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Waits until the status is as wanted, or the relay has stopped, and says what it is.
    pub async fn wait_for(&self, wanted: impl FnMut(&Status) -> bool) -> Status {
        let mut status = self.status.clone();
        let found = status.wait_for(wanted).await.map(|status| status.clone());
        found.unwrap_or_else(|_| self.status())
    }

    /// Tells the relay to stop, and does not wait. The relay claims no more, and releases what is
    /// not being published (F12). It waits for what is being published, but no longer than
    /// `patience`; then it drops and releases that too, without counting a failure. That may have
    /// reached the broker, so it may arrive twice (P9). Of several calls the least patient counts.
    pub fn request_stop(&self, patience: Duration) {
        let until = self.control.now().uptime.saturating_add(patience);
        self.control.stop_by.send_modify(|there| *there = Some(stop_by(*there, until)));
    }

    /// Waits until the relay has stopped; for ever, if it was not told to. If this future is
    /// dropped, so is the relay.
    pub async fn join(mut self) -> Status {
        // The task catches its own panics, and says so in the status; it is never aborted, unless
        // the runtime shuts down.
        let _ended = (&mut self.task).await;
        self.status()
    }

    /// Stops the relay, as [`RelayTask::request_stop`] and [`RelayTask::join`] do.
    pub async fn stop(self, patience: Duration) -> Status {
        self.request_stop(patience);
        self.join().await
    }
}

impl Drop for RelayTask {
    fn drop(&mut self) {
        if !self.task.is_finished() {
            self.request_stop(Duration::ZERO);
        }
    }
}

impl fmt::Debug for RelayTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelayTask").field("status", &self.status()).finish_non_exhaustive()
    }
}

/// Tells a relay in the same process that there is something to do. It is cheap to clone, to send
/// and to call.
///
/// Without it the relay finds out when it polls; a relay in another process always does.
#[derive(Clone)]
pub struct Waker {
    control: Arc<Control>,
}

impl Waker {
    /// Says that events were committed. Call it after the commit; before it, there is nothing to
    /// see yet.
    pub fn wake(&self) {
        self.control.wake.notify_one();
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
