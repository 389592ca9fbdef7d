//! Register a request: bind its key to its parameters, before anything else happens (P1, F21, F24).

use core::fmt;

use thiserror::Error;

use super::commit_order::CommitOrder;
use crate::boundary::{Batch, Decision, Query, Rows, Transition};
use crate::event::{Body, Draft};
use crate::fingerprint::Fingerprint;
use crate::ids::{Invalid, OrderId, RequestKey};
use crate::table::{Key, PlacedOrder, Record, RequestRow};
use crate::time::Millis;

/// A request: the caller's key for one intention, and the parameters that it is bound to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request {
    /// The key.
    pub key: RequestKey,
    /// The parameters.
    pub fingerprint: Fingerprint,
}

impl Request {
    /// A request of `scope` with its id and parameters.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the scope or the id is refused.
    ///
    /// ```
    /// use twobox::{Fingerprint, Request};
    ///
    /// let request = Request::new("customer-7", "req-001", Fingerprint::of([("item", "notebook"), ("quantity", "2")]))?;
    /// # Ok::<(), twobox::Invalid>(())
    /// ```
    pub fn new(
        scope: impl AsRef<str>,
        id: impl AsRef<str>,
        fingerprint: Fingerprint,
    ) -> Result<Self, Invalid> {
        Ok(Self { key: RequestKey::new(scope, id)?, fingerprint })
    }

    /// A request of `scope` with its id and its parameters as fields; see [`Fingerprint::of`].
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the scope or the id is refused.
    pub fn of<N: AsRef<str>, V: AsRef<str>>(
        scope: impl AsRef<str>,
        id: impl AsRef<str>,
        parameters: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Self, Invalid> {
        Self::new(scope, id, Fingerprint::of(parameters))
    }

    /// The order that this request creates, with its first event; more may follow.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the order id is refused.
    ///
    /// ```
    /// use twobox::{Draft, Request};
    ///
    /// let request = Request::of("customer-7", "req-001", [("item", "notebook")])?;
    /// let order = request
    ///     .order("order:req-001", r#"{"item":"notebook"}"#, Draft::json("order.created", "{}")?)?
    ///     .event(Draft::json("stock.reserved", "{}")?)?;
    /// # Ok::<(), twobox::Invalid>(())
    /// ```
    pub fn order(
        &self,
        id: impl AsRef<str>,
        json: impl AsRef<str>,
        event: Draft,
    ) -> Result<CommitOrder<'_>, Invalid> {
        CommitOrder::new(self, OrderId::new(id)?, Body::json(json)?, [event])
    }

    /// The refusal, if the key is bound to other parameters.
    pub(crate) fn check(&self, bound: &RequestRow) -> Result<(), ParametersDiffer> {
        if bound.fingerprint == self.fingerprint {
            return Ok(());
        }
        Err(ParametersDiffer {
            key: self.key.clone(),
            bound: bound.fingerprint.clone(),
            given: self.fingerprint.clone(),
        })
    }
}

/// The key is bound to different parameters (P1). Retry with the first ones, or use a new request
/// id for a new intention.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "request {key} is bound to other parameters: {}; retry with the first ones, or take a new \
     request id",
    Told(bound, given)
)]
pub struct ParametersDiffer {
    /// Which key.
    pub key: RequestKey,
    /// What it is bound to.
    pub bound: Fingerprint,
    /// What was given now.
    pub given: Fingerprint,
}

/// What was bound and what was given, told so that they differ also where their summaries do not.
struct Told<'a>(&'a Fingerprint, &'a Fingerprint);

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bound, given) = self;
        let (is, was) = (bound.summary(), given.summary());
        if is == was {
            let (bound, given) = (bound.digest(), given.digest());
            return write!(
                f,
                "it was registered with [{is}] of digest {bound:.8}, now it has {given:.8}"
            );
        }
        write!(f, "it was registered with [{is}], now [{was}] was given")
    }
}

/// Binds a request key to its parameters.
///
/// | the key is          | its parameters are | what is written | outcome                     |
/// |---------------------|--------------------|-----------------|-----------------------------|
/// | free                |                    | the request     | [`Registered::New`]         |
/// | bound, no order yet | the same           | nothing         | [`Registered::Open`]        |
/// | bound, order placed | the same           | nothing         | [`Registered::Placed`]      |
/// | bound               | others             | nothing         | refused, [`ParametersDiffer`] |
///
/// A key never answers "in progress": anyone with the same parameters may go on after any failure
/// (F21).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Register<'a> {
    request: &'a Request,
}

impl<'a> Register<'a> {
    /// Registers this request.
    #[must_use]
    pub const fn new(request: &'a Request) -> Self {
        Self { request }
    }
}

/// What a registration found.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Registered {
    /// The key was free and is bound now.
    New,
    /// The key was bound to the same parameters; there is no order yet.
    Open,
    /// The request has its order already; this is its first outcome.
    Placed(PlacedOrder),
}

impl Transition for Register<'_> {
    type Outcome = Registered;
    type Refusal = ParametersDiffer;

    fn query(&self, _now: Millis) -> Query {
        Query::rows([Key::Request(self.request.key.clone())])
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Registered>, ParametersDiffer> {
        let Some((bound, _)) = rows.request(&self.request.key) else {
            let row = RequestRow {
                fingerprint: self.request.fingerprint.clone(),
                registered_at: now,
                placed: None,
            };
            let mut batch = Batch::with_capacity(1);
            batch.insert(Record::Request(self.request.key.clone(), row));
            return Ok(Decision::new(batch, Registered::New));
        };
        self.request.check(bound)?;
        Ok(Decision::nothing(match &bound.placed {
            None => Registered::Open,
            Some(placed) => Registered::Placed(placed.clone()),
        }))
    }

    /// That the key is free.
    fn assume(&self, now: Millis) -> Option<Decision<Registered>> {
        self.decide(now, &Rows::default()).ok()
    }
}
