//! Drives a relay machine on a store and a publisher, one action after the other, in the calling
//! thread.

use alloc::vec::Vec;
use core::iter::repeat_with;
use core::mem::take;
use core::time::Duration;

use super::machine::{Action, Counters, RelayMachine, Ticket};
use super::publisher::{Published, Publisher, answers};
use super::settings::RelaySettings;
use super::{RelayError, trace};
use crate::ids::{Invalid, Reason};
use crate::lane::LeaseRef;
use crate::message::Message;
use crate::store::{NoCall, Store, drive};
use crate::time::Moment;

/// A relay that publishes what a store has to deliver.
///
/// ```
/// use twobox::relay::{Published, Publisher, Relay, RelaySettings};
/// use twobox::{
///     Body, CommitOrder, Draft, Fingerprint, Message, Millis, Moment, OrderId, Owner, Request, Store,
/// };
/// use twobox_memory::MemoryStore;
///
/// struct Print;
/// impl Publisher for Print {
///     fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
///         batch.iter().map(|message| { println!("{}", message.event.id); Published::Confirmed }).collect()
///     }
/// }
///
/// let (store, now) = (MemoryStore::new(), Moment::steady(Millis::new(1_000)));
/// let request = Request::new("customer-7", "req-001", Fingerprint::of([("item", "notebook")]))?;
/// let created = Draft::new("order.created", Body::text("notebook")?)?;
/// store.run(CommitOrder::new(&request, OrderId::new("order-1")?, Body::text("notebook")?, [created])?, now.wall)?;
///
/// let mut relay = Relay::new(&store, Print, RelaySettings::new(Owner::new("relay-1")?), now)?;
/// assert_eq!(relay.run_until_idle(now)?.confirmed, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Relay<S, P> {
    store: S,
    publisher: P,
    machine: RelayMachine,
}

impl<S: Store, P: Publisher> Relay<S, P> {
    /// A relay between a store and a publisher.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the settings do not go together.
    pub fn new(
        store: S,
        publisher: P,
        settings: RelaySettings,
        now: Moment,
    ) -> Result<Self, Invalid> {
        Ok(Self { store, publisher, machine: RelayMachine::new(settings, now)? })
    }

    /// The machine, to look at its counters and state.
    #[must_use]
    pub fn machine(&self) -> &RelayMachine {
        &self.machine
    }

    /// The publisher, to look at it or to change it between two steps.
    pub fn publisher_mut(&mut self) -> &mut P {
        &mut self.publisher
    }

    /// Delivers everything that can be delivered at this time: until nothing is due, or the broker
    /// cannot be reached. It returns what the relay has done since it was made.
    ///
    /// # Errors
    ///
    /// The store's. Nothing is lost by it: call again.
    pub fn run_until_idle(&mut self, now: Moment) -> Result<Counters, RelayError<S::Error>> {
        self.machine.handle_wakeup(now);
        while self.step(now)? {}
        Ok(self.machine.counters())
    }

    /// Stops the relay: it claims no more, and gives back what it has not published (F12).
    ///
    /// # Errors
    ///
    /// The store's. What was not given back becomes due again when its lease runs out.
    pub fn stop(mut self, now: Moment) -> Result<Counters, RelayError<S::Error>> {
        self.machine.handle_stop(now, Duration::MAX);
        while self.step(now)? {}
        Ok(self.machine.counters())
    }

    /// Does the next thing, if there is one, and says whether there was. With nothing to do, call
    /// again at the uptime of [`RelayMachine::poll_timeout`].
    ///
    /// # Errors
    ///
    /// The store's. The machine has been told, and goes on after a pause.
    pub fn step(&mut self, now: Moment) -> Result<bool, RelayError<S::Error>> {
        self.machine.handle_timeout(now);
        let Some(action) = self.machine.poll_action() else { return Ok(false) };
        match action {
            Action::Exchange(exchange) => {
                // A lease is seldom stale, so it settles without a look.
                let flow = exchange.flow(self.machine.settings(), self.machine.now(), true);
                let exchanged = drive(&self.store, flow, &mut NoCall);
                let (told, failed) = told(exchanged);
                self.machine.conclude_exchange(now, told);
                failed.map_or(Ok(true), Err)
            }
            Action::Renew(renew) => {
                let (told, failed) = told(self.store.run(renew, self.machine.now()));
                self.machine.conclude_renewal(now, told);
                failed.map_or(Ok(true), Err)
            }
            Action::Publish(tickets) => {
                self.publish(now, tickets);
                Ok(true)
            }
            // Nothing is under way here that could be broken off.
            Action::BreakOff(leases) | Action::GiveUp(leases) => {
                leases.iter().for_each(|lease| self.machine.handle_broken_off(now, lease));
                Ok(true)
            }
        }
    }

    fn publish(&mut self, now: Moment, tickets: Vec<Ticket>) {
        let (leases, batch) =
            tickets.into_iter().map(|ticket| (ticket.lease, ticket.message)).unzip();
        let at = self.machine.now();
        let under_way = UnderWay { machine: &mut self.machine, leases, batch, now };
        let given = self.publisher.publish(&under_way.batch, at);
        under_way.end(given);
    }
}

/// What the publisher is called with. If it panics, and somebody catches that, all of it has
/// failed (F34).
struct UnderWay<'a> {
    machine: &'a mut RelayMachine,
    leases: Vec<LeaseRef>,
    batch: Vec<Message>,
    now: Moment,
}

impl UnderWay<'_> {
    fn end(mut self, given: Vec<Published>) {
        let answers = answers(given, self.batch.len());
        self.answer(answers);
    }

    fn answer(&mut self, answers: impl Iterator<Item = Published>) {
        let tickets = take(&mut self.leases).into_iter().zip(take(&mut self.batch));
        for ((lease, message), answer) in tickets.zip(answers) {
            trace::published(&message, &answer);
            self.machine.handle_published(self.now, &Ticket { lease, message }, answer);
        }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let failed = || Published::Failed(Reason::new("the publisher panicked"));
        self.answer(repeat_with(failed));
    }
}

/// What the machine is told of an answer of the store, and the error for the caller.
fn told<T, E: core::error::Error>(answer: Result<T, E>) -> (Result<T, Reason>, Option<E>) {
    match answer {
        Ok(value) => (Ok(value), None),
        Err(error) => (Err(Reason::new(&error)), Some(error)),
    }
}
