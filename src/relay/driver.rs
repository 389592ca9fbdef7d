//! Drives a relay machine on a store and a publisher, one action after the other, in the calling
//! thread.

use alloc::vec::Vec;

use super::machine::{Action, Counters, RelayMachine, RelaySettings, Ticket};
use super::publisher::{Message, Published, Publisher};
use super::steps::{RelayError, read_messages, run_exchange};
use crate::ids::{Invalid, Reason};
use crate::store::Store;
use crate::time::Millis;
use crate::transition::settle::Renew;

/// A relay that publishes what a store has to deliver.
///
/// ```
/// use twobox::relay::{Message, Published, Publisher, Relay, RelaySettings};
/// use twobox::{Body, CommitOrder, Draft, Fingerprint, Millis, OrderId, Owner, Request, Store};
/// use twobox_memory::MemoryStore;
///
/// struct Print;
/// impl Publisher for Print {
///     fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
///         batch.iter().map(|message| { println!("{}", message.event.id); Published::Confirmed }).collect()
///     }
/// }
///
/// let (store, now) = (MemoryStore::new(), Millis::new(1_000));
/// let request = Request::new("customer-7", "req-001", Fingerprint::of([("item", "notebook")]))?;
/// let created = Draft::new("order.created", Body::text("notebook")?)?;
/// store.run(CommitOrder::new(&request, OrderId::new("order-1")?, Body::text("notebook")?, [created])?, now)?;
///
/// let mut relay = Relay::new(&store, Print, RelaySettings::new(Owner::new("relay-1")?), now)?;
/// assert_eq!(relay.run_until_idle(now)?.confirmed, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Relay<'a, S, P> {
    store: &'a S,
    publisher: P,
    machine: RelayMachine,
}

impl<'a, S: Store, P: Publisher> Relay<'a, S, P> {
    /// A relay between a store and a publisher.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the settings do not go together.
    pub fn new(
        store: &'a S,
        publisher: P,
        settings: RelaySettings,
        now: Millis,
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
    pub fn run_until_idle(&mut self, now: Millis) -> Result<Counters, RelayError<S::Error>> {
        self.machine.handle_wakeup(now);
        while self.step(now)? {}
        Ok(self.machine.counters())
    }

    /// Stops the relay: it claims no more, and gives back what it has not published (F12).
    ///
    /// # Errors
    ///
    /// The store's. What was not given back becomes due again when its lease runs out.
    pub fn stop(mut self, now: Millis) -> Result<Counters, RelayError<S::Error>> {
        self.machine.handle_stop(now);
        while self.step(now)? {}
        Ok(self.machine.counters())
    }

    /// Does the next thing, if there is one, and says whether there was. With nothing to do, call
    /// again at the time of [`RelayMachine::poll_timeout`].
    ///
    /// # Errors
    ///
    /// The store's. The machine has been told, and goes on after a pause.
    pub fn step(&mut self, now: Millis) -> Result<bool, RelayError<S::Error>> {
        self.machine.handle_timeout(now);
        let Some(action) = self.machine.poll_action() else { return Ok(false) };
        let result = match action {
            Action::Exchange(exchange) => {
                run_exchange(self.store, self.machine.settings(), self.machine.now(), exchange).map(
                    |(settled, claimed)| {
                        self.machine.handle_exchanged(now, settled.as_ref(), claimed);
                    },
                )
            }
            Action::Renew(leases) => {
                let renew = Renew::new(leases, self.machine.settings().lease);
                self.store
                    .run(renew, self.machine.now())
                    .map(|renewed| self.machine.handle_renewed(now, &renewed))
            }
            Action::Publish(tickets) => self.publish(now, &tickets),
        };
        match result {
            Ok(()) => Ok(true),
            Err(error) => {
                self.machine.handle_store_failed(now);
                Err(error)
            }
        }
    }

    fn publish(&mut self, now: Millis, tickets: &[Ticket]) -> Result<(), RelayError<S::Error>> {
        let read = match read_messages(self.store, tickets) {
            Ok(read) => read,
            Err(error) => {
                self.machine.handle_unread(now, tickets);
                return Err(error);
            }
        };
        let mut batch: Vec<Message> = Vec::with_capacity(tickets.len());
        let mut published: Vec<&Ticket> = Vec::with_capacity(tickets.len());
        for (ticket, message) in tickets.iter().zip(read) {
            match message {
                Ok(message) => {
                    batch.push(message);
                    published.push(ticket);
                }
                Err(answer) => self.machine.handle_published(now, ticket, answer),
            }
        }
        let mut answers = self.publisher.publish(&batch, self.machine.now()).into_iter();
        for ticket in published {
            let answer = answers
                .next()
                .unwrap_or_else(|| Published::Failed(Reason::new("the publisher gave no answer")));
            self.machine.handle_published(now, ticket, answer);
        }
        Ok(())
    }
}
