//! A consumer in the same process, as a publisher: what a relay hands out goes to an inbox.

use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::ops::Deref;
use core::slice;

use crate::ids::Reason;
use crate::inbox::{AsyncHandler, AsyncTx, Handled, Inbox, Tx};
use crate::message::Message;
use crate::reception::Receipt;
use crate::relay::{AsyncPublisher, Published, Publisher};
use crate::store::asynchronous::AsyncStore;
use crate::store::{RunError, Store, Writing};
use crate::time::Millis;

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
    pub fn new<E: fmt::Display + 'static>(inbox: Inbox<R>, handler: H) -> Self
    where
        H: FnMut(&mut Writing<'_, Tx<'_, R>>, &Message) -> Result<Handled, E>,
    {
        Self { inbox, handler, faults: |_| None }
    }
}

impl<R: Deref<Target: AsyncStore>, H> InProcess<R, H> {
    /// Delivers to this inbox of an async store; see [`Inbox::receive_with`]. Several calls may be
    /// under way at the same time, and each has a clone of the handler and of the faults.
    pub fn new_async(inbox: Inbox<R>, handler: H) -> Self
    where
        H: for<'t> AsyncHandler<AsyncTx<'t, R>> + Clone,
    {
        Self { inbox, handler, faults: |_| None }
    }
}

impl<R, H> InProcess<R, H> {
    /// Injects faults: `faults` is asked for each message, before its batch is delivered.
    pub fn with_faults<F: FnMut(&Message) -> Option<Fault>>(self, faults: F) -> InProcess<R, H, F> {
        InProcess { inbox: self.inbox, handler: self.handler, faults }
    }
}

/// How many messages it likes at once: they are received in one commit.
const BATCH: usize = 256;

/// What is received in one commit, and what is answered for it if the true answer is lost.
type Part<'m> = (&'m [Message], Option<Published>);

/// A batch, in its order: what stands together without a fault is received in one commit.
fn parts(batch: &[Message], faults: impl FnMut(&Message) -> Option<Fault>) -> Vec<Part<'_>> {
    let (mut parts, mut from) = (Vec::new(), 0);
    for (at, fault) in batch.iter().map(faults).enumerate() {
        let Some(fault) = fault else { continue };
        parts.push((&batch[from..at], None));
        parts.push(match fault {
            Fault::Instead(answer) => (&[], Some(answer)),
            Fault::After(answer) => (slice::from_ref(&batch[at]), Some(answer)),
        });
        from = at + 1;
    }
    parts.push((&batch[from..], None));
    parts
}

/// What is answered for a part that was received.
fn answered<E, F>(
    received: Result<Vec<Receipt>, RunError<E, F>>,
    (messages, lost): Part<'_>,
) -> Vec<Published>
where
    RunError<E, F>: fmt::Display,
{
    match (lost, received) {
        (Some(answer), _) => vec![answer],
        (None, Ok(receipts)) => receipts.into_iter().map(Published::from).collect(),
        (None, Err(error)) => vec![Published::Unavailable(Reason::new(error)); messages.len()],
    }
}

impl<R, H, F, E> Publisher for InProcess<R, H, F>
where
    R: Deref<Target: Store>,
    H: FnMut(&mut Writing<'_, Tx<'_, R>>, &Message) -> Result<Handled, E>,
    E: fmt::Display + 'static,
    F: FnMut(&Message) -> Option<Fault>,
{
    fn batch(&self) -> usize {
        BATCH
    }

    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published> {
        let mut answers = Vec::with_capacity(batch.len());
        for part in parts(batch, &mut self.faults) {
            let received = self.inbox.receive_batch(part.0, now, &mut self.handler);
            answers.extend(answered(received, part));
        }
        answers
    }
}

impl<R, H, F> AsyncPublisher for InProcess<R, H, F>
where
    R: Deref<Target: AsyncStore> + Send + Sync,
    H: for<'t> AsyncHandler<AsyncTx<'t, R>> + Clone + Sync,
    F: FnMut(&Message) -> Option<Fault> + Clone + Send + Sync,
{
    fn batch(&self) -> usize {
        BATCH
    }

    async fn publish(&self, batch: &[Message], now: Millis) -> Vec<Published> {
        let mut handler = self.handler.clone();
        let mut answers = Vec::with_capacity(batch.len());
        for part in parts(batch, self.faults.clone()) {
            let received = self.inbox.receive_with(part.0, now, &mut handler).await;
            answers.extend(answered(received, part));
        }
        answers
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
