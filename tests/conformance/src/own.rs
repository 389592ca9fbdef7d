//! A store as its users have it, without faults: each operation goes through the store's own `run`,
//! `write` and `transact`.

use std::convert::Infallible;
use std::num::NonZeroU16;
use std::sync::Arc;

use twobox::flow::{ExchangeFlow, Exchanged};
use twobox::store::{NoCall, drive};
use twobox::{
    Checked, Claim, Committed, Dump, Handled, Millis, Operated, Receipt, Received, RedriveWindow,
    Register, Registered, Retention, RunError, Settle, Store, StoreError, Stored, Transition,
    purge_all, redrive_all,
};

use crate::failure::Failure;
use crate::fault::Plan;
use crate::faulty::FaultError;
use crate::harness::{ErrorOf, Harness};
use crate::side::{Consuming, Delivering, Placing, Ran, Side, UserError, dump, own_row, stored};

/// A store of which nothing is wrapped.
pub struct Own<H>(H);

/// The error of a store as that of one that may be told to fail.
fn wrapped<E: StoreError, R>(error: RunError<E, R>) -> RunError<FaultError<E>, R> {
    match error {
        RunError::Refused(refusal) => RunError::Refused(refusal),
        RunError::Conflict(key) => RunError::Conflict(key),
        RunError::Store(error) => RunError::Store(FaultError::of("before a commit")(error)),
        RunError::Unknown(error) => RunError::Unknown(FaultError::of("a commit")(error)),
    }
}

/// The error of a transition in a transaction of a user's own making.
fn in_work<E: StoreError, R: std::fmt::Display>(error: RunError<E, R>) -> UserError<E> {
    UserError::of(wrapped(error))
}

impl<H: Harness> Side for Own<H> {
    type Error = ErrorOf<H>;

    const OWN_ROWS: bool = H::OWN_ROWS;

    fn open(_plan: &Arc<Plan>) -> Self {
        Self(H::open())
    }

    fn crash(self) -> Self {
        Self(self.0.crash())
    }

    fn run<T>(&self, transition: T, now: Millis) -> Ran<T::Outcome, ErrorOf<H>, T::Refusal>
    where
        T: Transition<Outcome: Send, Refusal: Send> + Send + Sync,
    {
        self.0.store().run(transition, now).map_err(wrapped)
    }

    fn exchange(
        &self,
        settle: Option<Settle<'_>>,
        claim: Option<Claim<'_>>,
        now: Millis,
    ) -> Ran<Exchanged, ErrorOf<H>, Infallible> {
        let flow = ExchangeFlow::new(settle, claim, now, false);
        drive(self.0.store(), flow, &mut NoCall).map_err(wrapped)
    }

    fn place(
        &self,
        placing: &Placing<'_>,
        now: Millis,
    ) -> Ran<(Registered, Committed), ErrorOf<H>, UserError<ErrorOf<H>>> {
        let ended = self.0.store().write(now, |tx| {
            let registered = tx.run(Register::new(placing.request)).map_err(in_work)?;
            if let Some((key, value)) = placing.own {
                H::put_own_row(&mut *tx, key, value).map_err(UserError::own)?;
            }
            let committed = tx.run(placing.order).map_err(in_work)?;
            if placing.fails { Err(UserError::Fails) } else { Ok((registered, committed)) }
        });
        ended.map_err(wrapped)
    }

    fn consume(
        &self,
        consuming: &Consuming,
        now: Millis,
    ) -> Ran<(Received, bool), ErrorOf<H>, UserError<ErrorOf<H>>> {
        let ended = self.0.store().write(now, |tx| {
            let received = tx.run(&consuming.receive).map_err(in_work)?;
            let intend = consuming.intend.as_ref().filter(|_| received == Received::Applied);
            let new = match intend {
                Some(intend) => tx.run(intend).map_err(in_work)?,
                None => false,
            };
            let fails = consuming.fails && received == Received::Applied;
            if fails { Err(UserError::Fails) } else { Ok((received, new)) }
        });
        ended.map_err(wrapped)
    }

    fn deliver(
        &self,
        delivering: &Delivering<'_>,
        now: Millis,
    ) -> Ran<Receipt, ErrorOf<H>, Infallible> {
        let handled = Handled::Effect(delivering.effect.clone());
        let inbox = delivering.inbox(self.0.store());
        let received =
            inbox.receive(delivering.message, now, |_, _| Ok::<_, Infallible>(handled.clone()));
        received.map_err(wrapped)
    }

    fn purge(
        &self,
        kept: &Checked<Retention>,
        limit: NonZeroU16,
        now: Millis,
    ) -> Ran<usize, ErrorOf<H>, Infallible> {
        purge_all(self.0.store(), kept, limit, now).map_err(wrapped)
    }

    fn redrive(&self, window: RedriveWindow, now: Millis) -> Ran<Operated, ErrorOf<H>, Infallible> {
        redrive_all(self.0.store(), None, window, now).map_err(wrapped)
    }

    fn dump(&self) -> Result<Dump, Failure> {
        dump(self.0.store())
    }

    fn stored(&self) -> Result<Vec<Stored>, Failure> {
        stored(self.0.store())
    }

    fn own_row(&self, key: &str) -> Result<Option<String>, Failure> {
        own_row::<H>(&self.0, key)
    }
}
