//! What a relay publishes to: a broker, or a consumer in the same process.

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::future::Future;
use core::ops::Deref;
use core::slice;

use crate::event::Event;
use crate::ids::Reason;
use crate::inbox::{Handled, Inbox, Receipt, Tx};
use crate::store::{Store, Writing};
use crate::time::Millis;
use crate::transition::lane::Place;

/// An event on its way: what a publisher is given, and what a consumer gets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Message {
    /// The envelope and the payload.
    pub event: Event,
    /// Where it stands among the events of its ordering key.
    pub place: Place,
    /// Which start of a publish this is, from 1. A consumer must not rely on it.
    pub attempt: u32,
}

/// What became of a publish.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[must_use]
pub enum Published {
    /// The broker has it for sure, and has a place for it to go to (F20).
    Confirmed,
    /// It failed, or nobody knows: counted, and tried again after a backoff.
    Failed(Reason),
    /// The broker will never take it: dead at once (F14).
    Rejected(Reason),
    /// The consumer asks to have it again later: tried again after a backoff, and counted as no
    /// failure (F9).
    Deferred(Reason),
    /// The broker cannot be reached: counted against no event; the relay pauses (F15).
    Unavailable(Reason),
    /// The publish was given up, as when the relay stops: released, and counted against no event
    /// (F12). A relay that does not stop pauses.
    Abandoned,
}

/// Hands events to a broker.
pub trait Publisher {
    /// Publishes a batch and answers for each of its messages, in their order. No two of them have
    /// the same ordering key, so they may be published at the same time. What is left without an
    /// answer counts as failed.
    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published>;
}

/// The async twin of [`Publisher`].
pub trait AsyncPublisher: Send + Sync {
    /// As [`Publisher::publish`]. Several calls may be under way at the same time. A future that is
    /// dropped counts as [`Published::Abandoned`].
    fn publish(
        &self,
        batch: &[Message],
        now: Millis,
    ) -> impl Future<Output = Vec<Published>> + Send;
}

impl<P: Publisher + ?Sized> Publisher for &mut P {
    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published> {
        (**self).publish(batch, now)
    }
}

/// A publisher that calls a consumer in the same process, through its inbox: applied and duplicate
/// are confirmed, what fails is tried again, and what is refused is dead at the sender. What the
/// consumer sets aside as poison is confirmed, as to a broker, so that the rest goes on: it is no
/// dead letter, but a row of the consumer's inbox. Whether the consumer or the sender gives up
/// first follows from which of [`Inbox::max_failures`] and
/// [`DeliveryPolicy::max_failures`](crate::DeliveryPolicy) is smaller; with equal ones it is the
/// consumer.
///
/// Its faults can be injected, for tests and demonstrations.
pub struct InProcess<R, H, F = fn(&Message) -> Option<Fault>> {
    inbox: Inbox<R>,
    handler: H,
    faults: F,
}

/// What may go wrong between a relay and a consumer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The publish does not happen, and this is the answer.
    Instead(Published),
    /// The consumer gets the event, and then this is the answer: the confirmation is lost.
    After(Published),
}

impl<R, H, F> fmt::Debug for InProcess<R, H, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcess").finish_non_exhaustive()
    }
}

impl<R: Deref<Target: Store>, H> InProcess<R, H> {
    /// Delivers to this inbox, with this handler; see [`Inbox::receive`].
    // The bound is here as well, so that a closure is taken for a handler of every transaction.
    pub fn new<E: fmt::Display>(inbox: Inbox<R>, handler: H) -> Self
    where
        H: FnMut(&mut Writing<'_, Tx<'_, R>>, &Message) -> Result<Handled, E>,
    {
        Self { inbox, handler, faults: |_| None }
    }

    /// Asks for each message whether something goes wrong with it.
    pub fn with_faults<F: FnMut(&Message) -> Option<Fault>>(self, faults: F) -> InProcess<R, H, F> {
        InProcess { inbox: self.inbox, handler: self.handler, faults }
    }
}

impl<R, H, F, E> Publisher for InProcess<R, H, F>
where
    R: Deref<Target: Store>,
    H: FnMut(&mut Writing<'_, Tx<'_, R>>, &Message) -> Result<Handled, E>,
    E: fmt::Display,
    F: FnMut(&Message) -> Option<Fault>,
{
    /// What stands together without a fault is received in one commit.
    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published> {
        let mut answers = Vec::with_capacity(batch.len());
        for (at, message) in batch.iter().enumerate() {
            let Some(fault) = (self.faults)(message) else { continue };
            let before = &batch[answers.len()..at];
            answers.extend(self.deliver(before, now));
            answers.push(match fault {
                Fault::Instead(answer) => answer,
                Fault::After(answer) => {
                    let _lost = self.deliver(slice::from_ref(message), now);
                    answer
                }
            });
        }
        let rest = &batch[answers.len()..];
        answers.extend(self.deliver(rest, now));
        answers
    }
}

impl<R: Deref<Target: Store>, H, F> InProcess<R, H, F> {
    fn deliver<E>(&mut self, messages: &[Message], now: Millis) -> Vec<Published>
    where
        H: FnMut(&mut Writing<'_, Tx<'_, R>>, &Message) -> Result<Handled, E>,
        E: fmt::Display,
    {
        if messages.is_empty() {
            return Vec::new();
        }
        match self.inbox.receive_batch(messages, now, &mut self.handler) {
            Ok(receipts) => receipts.into_iter().map(Published::from).collect(),
            Err(error) => vec![Published::Unavailable(Reason::new(error)); messages.len()],
        }
    }
}

impl From<Receipt> for Published {
    /// What a consumer made of an event, as the answer of a publisher that called it: what is
    /// applied, or set aside, need not come again.
    fn from(receipt: Receipt) -> Self {
        match receipt {
            Receipt::Applied | Receipt::Duplicate | Receipt::Poisoned => Self::Confirmed,
            Receipt::Failed(reason) => Self::Failed(reason),
            Receipt::Deferred(reason) => Self::Deferred(reason),
            Receipt::WaitsFor(sequence) => Self::Deferred(Reason::new(format_args!(
                "the consumer waits for sequence {sequence} of its ordering key"
            ))),
            Receipt::Refused(refusal) => Self::Rejected(Reason::new(refusal)),
        }
    }
}
