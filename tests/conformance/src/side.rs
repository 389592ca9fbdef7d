//! A program with one store, as the world sees it: each operation goes through the driver of the
//! core and through the plan of faults.

use std::convert::Infallible;
use std::num::NonZeroU16;
use std::sync::Arc;

use twobox::call::Intend;
use twobox::flow::{ExchangeFlow, Exchanged};
use twobox::store::{NoCall, drive};
use twobox::{
    Body, Checked, Claim, CommitOrder, Committed, Consumer, Dump, Handled, Inbox, Load, Message,
    Millis, Operated, Query, Receipt, Receive, Received, RedriveWindow, Register, Registered,
    Request, Retention, RunError, Settle, Store, StoreError, Stored, Table, Transition, purge_all,
    redrive_all,
};

use crate::failure::Failure;
use crate::fault::Plan;
use crate::faulty::{FaultError, Faulty};
use crate::harness::{ErrorOf, Harness};

/// What an operation came to in a store that fails where the plan says.
pub(crate) type Ran<O, E, R> = Result<O, RunError<FaultError<E>, R>>;

/// What the code of a user says to the driver, to have everything rolled back.
pub enum UserError<E: StoreError> {
    /// It fails.
    Fails,
    /// A transition was refused.
    Refused(String),
    /// The store failed.
    Store(RunError<FaultError<E>, Infallible>),
}

impl<E: StoreError> UserError<E> {
    /// Takes over what a transition within the user's transaction reported.
    pub(crate) fn of<R: std::fmt::Display>(error: RunError<FaultError<E>, R>) -> Self {
        match error {
            RunError::Refused(refusal) => Self::Refused(refusal.to_string()),
            RunError::Conflict(key) => Self::Store(RunError::Conflict(key)),
            RunError::Store(error) => Self::Store(RunError::Store(error)),
            RunError::Unknown(error) => Self::Store(RunError::Unknown(error)),
        }
    }

    pub(crate) fn own(error: E) -> Self {
        Self::Store(RunError::of(FaultError::of("a row of the user's own")(error)))
    }
}

/// A request and its order in one transaction, with a row of the user's own if there is one.
pub struct Placing<'a> {
    pub(crate) request: &'a Request,
    pub(crate) order: &'a CommitOrder<'a>,
    pub(crate) own: Option<(&'a str, &'a str)>,
    pub(crate) fails: bool,
}

/// An event that a consumer receives in a transaction of its own making, perhaps with the intent of
/// a call.
pub struct Consuming {
    pub(crate) receive: Receive,
    pub(crate) intend: Option<Intend>,
    pub(crate) fails: bool,
}

/// An event that comes to an inbox.
pub struct Delivering<'a> {
    pub(crate) consumer: Consumer,
    pub(crate) in_order: bool,
    pub(crate) message: &'a Message,
    pub(crate) effect: Body,
}

impl Delivering<'_> {
    pub(crate) fn inbox<R>(&self, store: R) -> Inbox<R> {
        let inbox = Inbox::new(store, self.consumer.clone());
        if self.in_order { inbox.in_order() } else { inbox }
    }
}

/// A program with one store.
pub trait Side: Sized + 'static {
    /// What can go wrong in the store.
    type Error: StoreError;

    /// Whether the user has rows of its own.
    const OWN_ROWS: bool;

    /// Opens a new and empty store.
    fn open(plan: &Arc<Plan>) -> Self;

    /// Ends the program and opens the store again.
    #[must_use]
    fn crash(self) -> Self;

    /// Runs a transition in a transaction of its own.
    fn run<T>(&self, transition: T, now: Millis) -> Ran<T::Outcome, Self::Error, T::Refusal>
    where
        T: Transition<Outcome: Send, Refusal: Send> + Send + Sync;

    /// Settles and claims in one transaction, as a relay does.
    fn exchange(
        &self,
        settle: Option<Settle<'_>>,
        claim: Option<Claim<'_>>,
        now: Millis,
    ) -> Ran<Exchanged, Self::Error, Infallible>;

    /// A client places an order in a transaction of its own making.
    fn place(
        &self,
        placing: &Placing<'_>,
        now: Millis,
    ) -> Ran<(Registered, Committed), Self::Error, UserError<Self::Error>>;

    /// A consumer receives an event in a transaction of its own making, and says whether a call is
    /// new.
    fn consume(
        &self,
        consuming: &Consuming,
        now: Millis,
    ) -> Ran<(Received, bool), Self::Error, UserError<Self::Error>>;

    /// An event comes to an inbox.
    fn deliver(
        &self,
        delivering: &Delivering<'_>,
        now: Millis,
    ) -> Ran<Receipt, Self::Error, Infallible>;

    /// Purges all tables.
    fn purge(
        &self,
        kept: &Checked<Retention>,
        limit: NonZeroU16,
        now: Millis,
    ) -> Ran<usize, Self::Error, Infallible>;

    /// Redrives all dead events.
    fn redrive(&self, window: RedriveWindow, now: Millis)
    -> Ran<Operated, Self::Error, Infallible>;

    /// All rows that are committed. No fault strikes here.
    fn dump(&self) -> Result<Dump, Failure>;

    /// The same with their revisions.
    fn stored(&self) -> Result<Vec<Stored>, Failure>;

    /// A row of the user's own.
    fn own_row(&self, key: &str) -> Result<Option<String>, Failure>;
}

/// The questions for all rows of a store.
pub(crate) fn walks() -> impl Iterator<Item = Query> {
    Table::ALL.into_iter().map(|table| Query::Walk { table, after: None, limit: 10_000 })
}

impl<H: Harness> Side for Faulty<H> {
    type Error = ErrorOf<H>;

    const OWN_ROWS: bool = H::OWN_ROWS;

    fn open(plan: &Arc<Plan>) -> Self {
        Self { harness: H::open(), plan: Arc::clone(plan) }
    }

    fn crash(self) -> Self {
        Self { harness: self.harness.crash(), plan: self.plan }
    }

    fn run<T>(&self, transition: T, now: Millis) -> Ran<T::Outcome, ErrorOf<H>, T::Refusal>
    where
        T: Transition<Outcome: Send, Refusal: Send> + Send + Sync,
    {
        Store::run(self, transition, now)
    }

    fn exchange(
        &self,
        settle: Option<Settle<'_>>,
        claim: Option<Claim<'_>>,
        now: Millis,
    ) -> Ran<Exchanged, ErrorOf<H>, Infallible> {
        drive(self, ExchangeFlow::new(settle, claim, now, false), &mut NoCall)
    }

    fn place(
        &self,
        placing: &Placing<'_>,
        now: Millis,
    ) -> Ran<(Registered, Committed), ErrorOf<H>, UserError<ErrorOf<H>>> {
        self.write(now, |tx| {
            let registered = tx.run(Register::new(placing.request)).map_err(UserError::of)?;
            if let Some((key, value)) = placing.own {
                H::put_own_row(&mut tx.inner, key, value).map_err(UserError::own)?;
            }
            let committed = tx.run(placing.order).map_err(UserError::of)?;
            if placing.fails { Err(UserError::Fails) } else { Ok((registered, committed)) }
        })
    }

    fn consume(
        &self,
        consuming: &Consuming,
        now: Millis,
    ) -> Ran<(Received, bool), ErrorOf<H>, UserError<ErrorOf<H>>> {
        self.write(now, |tx| {
            let received = tx.run(&consuming.receive).map_err(UserError::of)?;
            let intend = consuming.intend.as_ref().filter(|_| received == Received::Applied);
            let new = match intend {
                Some(intend) => tx.run(intend).map_err(UserError::of)?,
                None => false,
            };
            let fails = consuming.fails && received == Received::Applied;
            if fails { Err(UserError::Fails) } else { Ok((received, new)) }
        })
    }

    fn deliver(
        &self,
        delivering: &Delivering<'_>,
        now: Millis,
    ) -> Ran<Receipt, ErrorOf<H>, Infallible> {
        let handled = Handled::Effect(delivering.effect.clone());
        let inbox = delivering.inbox(self);
        inbox.receive(delivering.message, now, |_, _| Ok::<_, Infallible>(handled.clone()))
    }

    fn purge(
        &self,
        kept: &Checked<Retention>,
        limit: NonZeroU16,
        now: Millis,
    ) -> Ran<usize, ErrorOf<H>, Infallible> {
        purge_all(self, kept, limit, now)
    }

    fn redrive(&self, window: RedriveWindow, now: Millis) -> Ran<Operated, ErrorOf<H>, Infallible> {
        redrive_all(self, None, window, now)
    }

    fn dump(&self) -> Result<Dump, Failure> {
        dump(self.inner())
    }

    fn stored(&self) -> Result<Vec<Stored>, Failure> {
        stored(self.inner())
    }

    fn own_row(&self, key: &str) -> Result<Option<String>, Failure> {
        own_row(&self.harness, key)
    }
}

/// All rows that are committed in a store.
pub(crate) fn dump<S: Store>(store: &S) -> Result<Dump, Failure> {
    let mut view = store.view().map_err(Failure::store)?;
    Dump::of(&mut view).map_err(|error| Failure::store(error).at("all rows of each table"))
}

/// The same with their revisions.
pub(crate) fn stored<S: Store>(store: &S) -> Result<Vec<Stored>, Failure> {
    let mut view = store.view().map_err(Failure::store)?;
    let mut rows = Vec::new();
    for walk in walks() {
        rows.extend(view.load(&walk).map_err(Failure::load(&walk))?.rows);
    }
    Ok(rows)
}

/// A row of the user's own.
pub(crate) fn own_row<H: Harness>(harness: &H, key: &str) -> Result<Option<String>, Failure> {
    let mut tx = harness.store().begin().map_err(Failure::store)?;
    H::own_row(&mut tx, key).map_err(Failure::store)
}
