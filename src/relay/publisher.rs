//! What a relay publishes to.

use alloc::vec::Vec;
use core::future::Future;

use crate::ids::Reason;
use crate::message::Message;
use crate::time::Millis;

/// What became of a publish.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[must_use]
pub enum Published {
    /// The broker certainly has it, and has routed it (F20).
    Confirmed,
    /// It failed, or may have failed: counted, and retried after a backoff.
    Failed(Reason),
    /// The broker will never take it: dead at once (F14).
    Rejected(Reason),
    /// The consumer wants it later: retried after a backoff, and not counted as a failure (F9).
    Deferred(Reason),
    /// The broker cannot be reached: nothing counts against the event, and the relay pauses (F15).
    /// If another event was confirmed since the last such answer, only this one waits, as if it was
    /// deferred (F27).
    Unavailable(Reason),
    /// The publish was given up, as when the relay stops: the event is released, and nothing counts
    /// against it (F12). A relay that is not stopping pauses.
    Abandoned,
}

/// Hands events to a broker.
pub trait Publisher {
    /// Publishes a batch and answers for each of its messages, in their order. No two of them are of
    /// the same lane, so they may be published at the same time. A message without an
    /// answer counts as failed.
    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published>;

    /// The largest batch that it wants, where several messages are ready. A message that takes long
    /// holds up the answers of its whole batch. Default 1.
    fn batch(&self) -> usize {
        1
    }
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

    /// As [`Publisher::batch`].
    fn batch(&self) -> usize {
        1
    }
}

impl<P: Publisher + ?Sized> Publisher for &mut P {
    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published> {
        (**self).publish(batch, now)
    }

    fn batch(&self) -> usize {
        (**self).batch()
    }
}

/// The answers of a publisher, one for each of so many messages: what it left without an answer has
/// failed.
pub fn answers(given: Vec<Published>, messages: usize) -> impl Iterator<Item = Published> {
    let none = || Published::Failed(Reason::new("the publisher gave no answer"));
    given.into_iter().chain(core::iter::repeat_with(none)).take(messages)
}
