//! The inbox: a consumer applies each event once, in one commit with what it does about it (P5,
//! F6).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::convert::Infallible;
use core::fmt;
use core::ops::Deref;

use crate::event::Body;
use crate::ids::{Consumer, Reason};
use crate::relay::Message;
use crate::store::{Reader, RunError, Store, Writing};
use crate::time::Millis;
use crate::transition::receive::{
    ContentDiffers, CountFailure, FailureCounted, Receive, Received, RecordEffect,
};

/// The inbox of one consumer in a store, which it has as a reference or as an `Arc`. Several
/// consumers may share a store (F8).
///
/// What the consumer does outside of the store's transaction, such as sending a mail, can happen
/// twice (P9): hand the event id on, or see [`transition::call`](crate::transition::call).
#[derive(Debug)]
pub struct Inbox<R> {
    store: R,
    consumer: Consumer,
    max_failures: u32,
    in_order: bool,
}

/// What a handler made of an event.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Handled {
    /// It is done; what was written goes into the commit.
    Done,
    /// It is done, and this is recorded in the table of effects.
    Effect(Body),
    /// Not now: nothing is written, not even that it came, and it is to come again (F9).
    Defer(Reason),
}

/// What became of an event at a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Receipt {
    /// Its effect is committed now.
    Applied,
    /// Its effect was committed before.
    Duplicate,
    /// It is to come again, for this reason; nothing was written.
    Deferred(Reason),
    /// It is to come again when the event with this sequence of its ordering key has been applied;
    /// nothing was written.
    WaitsFor(u64),
    /// The handler failed; that was counted, its effect was rolled back, and the event is to come
    /// again.
    Failed(Reason),
    /// It has failed too often and is set aside with its last reason; it need not come again.
    Poisoned,
    /// It has other content than what was received under its id.
    Refused(ContentDiffers),
}

/// Why a transaction with a batch is rolled back.
enum Back<E> {
    Store(RunError<E, Infallible>),
    /// The event at this place was not applied, but its handler may have written something.
    Without(usize, NotApplied),
}

enum NotApplied {
    Deferred(Reason),
    Failed(Reason),
}

/// A transaction of the store behind an inbox.
pub(crate) type Tx<'t, R> = <<R as Deref>::Target as Store>::Tx<'t>;
/// What the store behind an inbox says went wrong.
type StoreError<R> = <<R as Deref>::Target as Reader>::Error;

impl<R: Deref<Target: Store>> Inbox<R> {
    /// How often a consumer may fail on an event before it is set aside, if nothing else is said.
    pub const MAX_FAILURES: u32 = 16;

    /// The inbox of a consumer.
    #[must_use]
    pub fn new(store: R, consumer: Consumer) -> Self {
        Self { store, consumer, max_failures: Self::MAX_FAILURES, in_order: false }
    }

    /// Sets an event aside after so many failures, 1 at least; [`Inbox::MAX_FAILURES`] if not
    /// given.
    #[must_use]
    pub fn max_failures(mut self, limit: u32) -> Self {
        self.max_failures = limit.max(1);
        self
    }

    /// Holds an event back until the one that was published before it in its ordering key has been
    /// applied or set aside. The ordering keys of all senders to this consumer must then differ.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        self.in_order = true;
        self
    }

    /// Receives an event: if it comes for the first time, `handler` runs in the transaction that
    /// marks it as applied.
    ///
    /// An error of the handler rolls back what it wrote and is counted; a panic rolls back and is
    /// not caught. The handler may run more than once, if the transaction meets another one.
    ///
    /// # Errors
    ///
    /// Only the store's: the event must come again.
    pub fn receive<E: fmt::Display>(
        &self,
        message: &Message,
        now: Millis,
        handler: impl FnMut(&mut Writing<'_, Tx<'_, R>>, &Message) -> Result<Handled, E>,
    ) -> Result<Receipt, RunError<StoreError<R>, Infallible>> {
        let mut receipts = self.receive_batch(core::slice::from_ref(message), now, handler)?;
        // There is one receipt for each message, and there is one message.
        Ok(receipts.pop().unwrap_or(Receipt::Duplicate))
    }

    /// Receives several events in one commit, and answers for each in their order. One that fails,
    /// is deferred or refused does not take the others down: they are applied without it, for which
    /// their handlers run again.
    ///
    /// # Errors
    ///
    /// Only the store's: all of them must come again, and those that were applied are duplicates
    /// then.
    pub fn receive_batch<E: fmt::Display>(
        &self,
        messages: &[Message],
        now: Millis,
        mut handler: impl FnMut(&mut Writing<'_, Tx<'_, R>>, &Message) -> Result<Handled, E>,
    ) -> Result<Vec<Receipt>, RunError<StoreError<R>, Infallible>> {
        let mut without: BTreeMap<usize, NotApplied> = BTreeMap::new();
        let mut receipts = loop {
            let round = self.store.write(now, |tx| {
                let mut receipts = Vec::with_capacity(messages.len());
                for (at, message) in messages.iter().enumerate() {
                    if without.contains_key(&at) {
                        // Its place is filled below.
                        receipts.push(Receipt::Duplicate);
                        continue;
                    }
                    receipts.push(self.receive_in(tx, at, message, &mut handler)?);
                }
                Ok(receipts)
            });
            match round {
                Ok(receipts) => break receipts,
                Err(RunError::Refused(Back::Store(error))) => return Err(error),
                Err(RunError::Refused(Back::Without(at, why))) => {
                    without.insert(at, why);
                }
                Err(RunError::Conflict(key)) => return Err(RunError::Conflict(key)),
                Err(RunError::Store(error)) => return Err(RunError::Store(error)),
                Err(RunError::Unknown(error)) => return Err(RunError::Unknown(error)),
            }
        };
        for (at, why) in without {
            receipts[at] = match why {
                NotApplied::Deferred(reason) => Receipt::Deferred(reason),
                NotApplied::Failed(reason) => self.count_failure(&messages[at], reason, now)?,
            };
        }
        Ok(receipts)
    }

    /// Receives one event of a batch in the batch's transaction.
    fn receive_in<E: fmt::Display>(
        &self,
        tx: &mut Writing<'_, Tx<'_, R>>,
        at: usize,
        message: &Message,
        handler: &mut impl FnMut(&mut Writing<'_, Tx<'_, R>>, &Message) -> Result<Handled, E>,
    ) -> Result<Receipt, Back<StoreError<R>>> {
        let mut receive = Receive::new(self.consumer.clone(), &message.event);
        if self.in_order {
            receive = receive.in_order(message.event.ordering_key.clone(), message.place);
        }
        match tx.run(receive).map_err(RunError::split) {
            Ok(Received::Applied) => {}
            Ok(Received::Duplicate) => return Ok(Receipt::Duplicate),
            Ok(Received::Poisoned) => return Ok(Receipt::Poisoned),
            Ok(Received::WaitsFor(sequence)) => return Ok(Receipt::WaitsFor(sequence)),
            Err(Ok(refusal)) => return Ok(Receipt::Refused(refusal)),
            Err(Err(error)) => return Err(Back::Store(error)),
        }
        match handler(tx, message) {
            Ok(Handled::Done) => Ok(Receipt::Applied),
            Ok(Handled::Effect(body)) => {
                let effect =
                    RecordEffect::new(self.consumer.clone(), message.event.id.clone(), body);
                tx.run(effect).map(|()| Receipt::Applied).map_err(Back::Store)
            }
            Ok(Handled::Defer(reason)) => Err(Back::Without(at, NotApplied::Deferred(reason))),
            Err(error) => Err(Back::Without(at, NotApplied::Failed(Reason::new(error)))),
        }
    }

    fn count_failure(
        &self,
        message: &Message,
        reason: Reason,
        now: Millis,
    ) -> Result<Receipt, RunError<StoreError<R>, Infallible>> {
        let mut count = CountFailure::new(
            self.consumer.clone(),
            &message.event,
            reason.clone(),
            self.max_failures,
        );
        if self.in_order {
            count = count.in_order(message.event.ordering_key.clone(), message.place);
        }
        match self.store.run(count, now).map_err(RunError::split) {
            Ok(FailureCounted::ComesAgain) => Ok(Receipt::Failed(reason)),
            Ok(FailureCounted::Poisoned) => Ok(Receipt::Poisoned),
            Ok(FailureCounted::AppliedAlready) => Ok(Receipt::Duplicate),
            Err(Ok(refusal)) => Ok(Receipt::Refused(refusal)),
            Err(Err(error)) => Err(error),
        }
    }
}
