//! The inbox: a consumer applies each event once, in one commit with what it does about it (P5,
//! F6).

use alloc::vec::Vec;
use core::convert::Infallible;
use core::fmt;
use core::future::Future;
use core::ops::Deref;
use core::slice;

use crate::event::Body;
use crate::flow::{Called, ReceiveFlow};
use crate::ids::{Consumer, Reason};
use crate::message::Message;
use crate::reception::{Receipt, Reception};
use crate::store::asynchronous::{
    self, AsyncCall, AsyncLoad, AsyncReader, AsyncStore, AsyncWriting,
};
use crate::store::{
    Call, Reader, RunError, Store, StoreError, Tables, Writing, drive, is_conflict,
};
use crate::time::Millis;

/// The inbox of one consumer in a store, sync or async, which it has as a reference or as an `Arc`.
/// Several consumers may share a store (F8).
///
/// What the consumer does outside of the store's transaction, such as sending a mail, can happen
/// twice (P9): hand the event id on, or see [`transition::call`](crate::transition::call).
#[derive(Debug)]
pub struct Inbox<R> {
    store: R,
    reception: Reception,
}

/// What a handler did about an event.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Handled {
    /// It is done; what was written goes into the commit.
    Done,
    /// It is done, and this is recorded in the table of effects.
    Effect(Body),
    /// Not now: nothing is written, not even that the event arrived, and it is to come again (F9).
    Defer(Reason),
}

impl<R> Inbox<R> {
    /// How often a consumer may fail on an event before it is set aside, if nothing else is said.
    pub const MAX_FAILURES: u32 = 16;

    /// The inbox of a consumer.
    #[must_use]
    pub const fn new(store: R, consumer: Consumer) -> Self {
        let max_failures = Self::MAX_FAILURES;
        Self { store, reception: Reception { consumer, max_failures, in_order: false } }
    }

    /// Sets an event aside after so many failures, 1 at least; [`Inbox::MAX_FAILURES`] if not
    /// given.
    #[must_use]
    pub fn max_failures(mut self, limit: u32) -> Self {
        self.reception.max_failures = limit.max(1);
        self
    }

    /// How it receives, for whoever drives a [`ReceiveFlow`] by themselves.
    #[must_use]
    pub const fn reception(&self) -> &Reception {
        &self.reception
    }

    /// Holds an event back until the one that was published before it in its ordering key has been
    /// applied or set aside. The ordering keys of all senders to this consumer must then differ.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        self.reception.in_order = true;
        self
    }
}

/// A transaction of the store behind an inbox.
pub(crate) type Tx<'t, R> = <<R as Deref>::Target as Store>::Tx<'t>;
pub(crate) type AsyncTx<'t, R> = <<R as Deref>::Target as AsyncStore>::Tx<'t>;
/// What the store behind an inbox says went wrong.
type Failed<R> = RunError<<<R as Deref>::Target as Reader>::Error, Infallible>;
type AsyncFailed<R> = RunError<<<R as Deref>::Target as AsyncReader>::Error, Infallible>;

impl<R: Deref<Target: Store>> Inbox<R> {
    /// Receives an event: if it comes for the first time, `handler` runs in the transaction that
    /// marks it as applied.
    ///
    /// An error of the handler rolls back what it wrote and counts as a failure; a panic rolls back
    /// and is not caught. The handler may run more than once, if the transaction conflicts with
    /// another one: a conflict of the store, also one that the handler returns, boxed or not, is no
    /// failure of it.
    ///
    /// # Errors
    ///
    /// Only the store's: the event must come again.
    pub fn receive<E: fmt::Display + 'static>(
        &self,
        message: &Message,
        now: Millis,
        handler: impl FnMut(&mut Writing<'_, Tx<'_, R>>, &Message) -> Result<Handled, E>,
    ) -> Result<Receipt, Failed<R>> {
        self.receive_batch(slice::from_ref(message), now, handler).map(only)
    }

    /// Receives several events in one commit, and answers for each in their order. One that fails,
    /// is deferred or refused does not take the others down: they are applied without it, for which
    /// their handlers run once more. If one of these fails then, the others come again.
    ///
    /// # Errors
    ///
    /// Only the store's: all of them must come again, and those that were applied are duplicates
    /// then.
    pub fn receive_batch<E: fmt::Display + 'static>(
        &self,
        messages: &[Message],
        now: Millis,
        handler: impl FnMut(&mut Writing<'_, Tx<'_, R>>, &Message) -> Result<Handled, E>,
    ) -> Result<Vec<Receipt>, Failed<R>> {
        let mut call = Handling { messages, now, handler, touched: false };
        drive(&*self.store, ReceiveFlow::new(&self.reception, messages, now), &mut call)
    }
}

/// What an async consumer does about an event.
pub trait AsyncHandler<X>: Send {
    /// Why it failed.
    type Error: fmt::Display + 'static;

    /// Does it, in the transaction that marks the event as applied.
    fn handle(
        &mut self,
        tx: &mut AsyncWriting<'_, X>,
        message: &Message,
    ) -> impl Future<Output = Result<Handled, Self::Error>> + Send;
}

impl<R: Deref<Target: AsyncStore>> Inbox<R> {
    /// As [`Inbox::receive_batch`], on an async store. The future is `Send`, as that of
    /// [`asynchronous::write`] is.
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn receive_async<E: fmt::Display + 'static>(
        &self,
        messages: &[Message],
        now: Millis,
        handler: impl AsyncFnMut(&mut AsyncWriting<'_, AsyncTx<'_, R>>, &Message) -> Result<Handled, E>,
    ) -> Result<Vec<Receipt>, AsyncFailed<R>> {
        let flow = ReceiveFlow::new(&self.reception, messages, now);
        let call = AsyncHandling { messages, now, handler: Closure(handler) };
        asynchronous::drive(&*self.store, flow, call).await
    }

    /// As [`Inbox::receive_async`], with a handler that is a type of its own; the future is `Send`,
    /// whoever asks.
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn receive_with<H>(
        &self,
        messages: &[Message],
        now: Millis,
        handler: &mut H,
    ) -> Result<Vec<Receipt>, AsyncFailed<R>>
    where
        H: for<'a> AsyncHandler<AsyncTx<'a, R>>,
    {
        let flow = ReceiveFlow::new(&self.reception, messages, now);
        let call = AsyncHandling { messages, now, handler: Typed(handler) };
        asynchronous::drive(&*self.store, flow, call).await
    }
}

/// The one receipt for the one message. A consumer that answered for none has not received it.
fn only(mut receipts: Vec<Receipt>) -> Receipt {
    debug_assert_eq!(receipts.len(), 1, "one receipt for one message");
    receipts.pop().unwrap_or_else(|| Receipt::Deferred(Reason::new("there is no receipt for it")))
}

/// What a handler made of an event, as a flow is told.
fn called<S: StoreError, E: fmt::Display + 'static>(handled: Result<Handled, E>) -> Called {
    match handled {
        Ok(Handled::Done) => Called::Done,
        Ok(Handled::Effect(body)) => Called::Effect(body),
        Ok(Handled::Defer(reason)) => Called::Defer(reason),
        // The store's doing, and not the consumer's: it counts against no event.
        Err(error) if is_conflict::<S, E>(&error) => Called::Conflict(None),
        Err(error) => Called::Failed(Reason::new(error)),
    }
}

/// A sync handler, as a flow calls it.
struct Handling<'m, H> {
    messages: &'m [Message],
    now: Millis,
    handler: H,
    touched: bool,
}

impl<X, H, E> Call<X> for Handling<'_, H>
where
    X: Tables,
    H: FnMut(&mut Writing<'_, X>, &Message) -> Result<Handled, E>,
    E: fmt::Display + 'static,
{
    fn call(&mut self, tx: &mut X, n: usize) -> Called {
        let mut writing = Writing::new(tx, self.now);
        let handled = (self.handler)(&mut writing, &self.messages[n]);
        self.touched = writing.touched();
        writing.conflict().map_or_else(|| called::<X::Error, _>(handled), Called::Conflict)
    }

    fn touched(&self) -> bool {
        self.touched
    }
}

/// An async handler, as a flow calls it.
struct AsyncHandling<'m, H> {
    messages: &'m [Message],
    now: Millis,
    handler: H,
}

struct Closure<F>(F);
struct Typed<'h, H>(&'h mut H);

impl<X, F, E> AsyncCall<X> for AsyncHandling<'_, Closure<F>>
where
    X: AsyncLoad,
    F: AsyncFnMut(&mut AsyncWriting<'_, X>, &Message) -> Result<Handled, E>,
    E: fmt::Display + 'static,
{
    async fn call(&mut self, tx: &mut X, n: usize) -> Called {
        let mut writing = AsyncWriting::new(tx, self.now);
        let handled = (self.handler.0)(&mut writing, &self.messages[n]).await;
        writing.conflict().map_or_else(|| called::<X::Error, _>(handled), Called::Conflict)
    }
}

impl<X, H> AsyncCall<X> for AsyncHandling<'_, Typed<'_, H>>
where
    X: AsyncLoad,
    H: AsyncHandler<X>,
{
    async fn call(&mut self, tx: &mut X, n: usize) -> Called {
        let mut writing = AsyncWriting::new(tx, self.now);
        let handled = self.handler.0.handle(&mut writing, &self.messages[n]).await;
        writing.conflict().map_or_else(|| called::<X::Error, _>(handled), Called::Conflict)
    }
}
