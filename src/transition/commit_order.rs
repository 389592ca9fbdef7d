//! Commit an order with its events: both or neither (P2), once for each request (P1), in order for
//! each key (P4).

use alloc::string::ToString;
use alloc::vec::Vec;

use thiserror::Error;

use super::register::{ParametersDiffer, Request};
use crate::boundary::{Batch, Decision, Query, Rows, Transition};
use crate::event::{Body, Draft, Event};
use crate::ids::{EventId, Invalid, LaneKey, OrderId, OrderingKey, RequestKey};
use crate::table::{EventRow, Key, LaneRow, OrderRow, PlacedOrder, Record, RequestRow, Revision};
use crate::time::Millis;

/// Commits the order that a request creates, with one to 256 events.
///
/// | the request is      | its parameters are | order id and event ids are | what is written                                 | outcome |
/// |---------------------|--------------------|----------------------------|-------------------------------------------------|---------|
/// | free                |                    | free                       | request, order, events, lanes           | [`Committed`], not repeated |
/// | bound, no order yet | the same           | free                       | the same; the request's row is changed          | [`Committed`], not repeated |
/// | bound, order placed | the same           | (not looked at)            | nothing                                         | [`Committed`], repeated: the first outcome |
/// | bound               | others             | (not looked at)            | nothing                                         | refused, [`CommitRefused::ParametersDiffer`] |
/// | free, or no order yet | the same         | the order's is taken       | nothing                                         | refused, [`CommitRefused::OrderIdTaken`] |
/// | free, or no order yet | the same         | an event's is taken        | nothing                                         | refused, [`CommitRefused::EventIdTaken`] |
///
/// The request may have been registered before, in a commit of its own or in this transaction, or
/// not at all.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CommitOrder<'a> {
    request: &'a Request,
    order: OrderId,
    body: Body,
    events: Vec<Draft>,
    ids: Vec<EventId>,
    registered: bool,
}

impl<'a> CommitOrder<'a> {
    /// The largest number of events of one order.
    pub const MAX_EVENTS: usize = 256;

    /// The order that `request` creates, with its events in the order in which they are to be
    /// published.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if there is no event, there are more than [`CommitOrder::MAX_EVENTS`], or two
    /// have the same id.
    pub fn new(
        request: &'a Request,
        order: OrderId,
        body: Body,
        events: impl IntoIterator<Item = Draft>,
    ) -> Result<Self, Invalid> {
        let events: Vec<Draft> = events.into_iter().collect();
        if events.is_empty() || events.len() > Self::MAX_EVENTS {
            let (max, value) = (Self::MAX_EVENTS as u64, events.len() as u64);
            return Err(Invalid::OutOfRange {
                field: "the number of events of an order",
                min: 1,
                max,
                value,
            });
        }
        let ids: Vec<EventId> = (1..)
            .zip(&events)
            .map(|(n, draft)| match &draft.id {
                Some(id) => Ok(id.clone()),
                None => EventId::new([order.as_str(), "/", &n.to_string()].concat()),
            })
            .collect::<Result<_, _>>()?;
        let mut sorted: Vec<&EventId> = ids.iter().collect();
        sorted.sort_unstable();
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Invalid::Twice { field: "event id", value: pair[0].as_str().into() });
        }
        Ok(Self { request, order, body, events, ids, registered: false })
    }

    /// The same with one event more, to be published after those so far.
    ///
    /// # Errors
    ///
    /// As [`CommitOrder::new`].
    pub fn event(self, draft: Draft) -> Result<Self, Invalid> {
        let Self { request, order, body, mut events, registered, .. } = self;
        events.push(draft);
        Ok(Self { registered, ..Self::new(request, order, body, events)? })
    }

    /// Says that the request was registered before. It is right in any case; over a network it
    /// saves a round trip, since nothing is written on the assumption that the key is free.
    #[must_use]
    pub const fn registered(mut self) -> Self {
        self.registered = true;
        self
    }

    fn lane_of(&self, draft: &Draft) -> LaneKey {
        // An order id that is a key of its own is as long as a key may be: both limits are the
        // same.
        let own = || OrderingKey::of_order(&self.order);
        let ordering_key = draft.ordering_key.clone().unwrap_or_else(own);
        LaneKey { destination: draft.destination.clone(), ordering_key }
    }
}

/// The outcome of a commit, the same for every retry.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub struct Committed {
    /// The order and its events.
    pub placed: PlacedOrder,
    /// What the order says: for a retry, what was committed first. `None` if that order was purged,
    /// or has another id than the one that was given now.
    pub body: Option<Body>,
    /// Whether the order was there already, and nothing was written.
    pub repeated: bool,
}

/// Why an order was not committed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CommitRefused {
    /// The request is bound to other parameters.
    #[error(transparent)]
    ParametersDiffer(#[from] ParametersDiffer),
    /// Another request has an order of this name.
    #[error(
        "order id {order:?} belongs to request {owner}; take an id that only this request can have. If it is this request, its order was placed, and its key was purged"
    )]
    OrderIdTaken {
        /// The id.
        order: OrderId,
        /// The request that has it.
        owner: RequestKey,
    },
    /// Another order has an event of this name.
    #[error(
        "event id {event:?} belongs to order {owner}; leave the id out, or make one of the order id"
    )]
    EventIdTaken {
        /// The id.
        event: EventId,
        /// The order that has it.
        owner: OrderId,
    },
}

impl Transition for CommitOrder<'_> {
    type Outcome = Committed;
    type Refusal = CommitRefused;

    fn query(&self, _now: Millis) -> Query {
        let own = [Key::Request(self.request.key.clone()), Key::Order(self.order.clone())];
        let events = self.ids.iter().cloned().map(Key::Event);
        let lanes = self.events.iter().map(|draft| Key::Lane(self.lane_of(draft)));
        Query::rows(own.into_iter().chain(events).chain(lanes))
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Committed>, CommitRefused> {
        let bound = rows.request(&self.request.key);
        let order = rows.order(&self.order);
        if let Some((row, _)) = bound {
            self.request.check(row)?;
            if let Some(placed) = &row.placed {
                let first = order.filter(|_| placed.order == self.order);
                let body = first.map(|(order, _)| order.body.clone());
                let committed = Committed { placed: placed.clone(), body, repeated: true };
                return Ok(Decision::nothing(committed));
            }
        }
        if let Some((row, _)) = order {
            let (order, owner) = (self.order.clone(), row.request.clone());
            return Err(CommitRefused::OrderIdTaken { order, owner });
        }
        if let Some((row, _)) = self.ids.iter().find_map(|id| rows.event(id)) {
            let (event, owner) = (row.event.id.clone(), row.event.order.clone());
            return Err(CommitRefused::EventIdTaken { event, owner });
        }

        // Request and order, each event, and as many lanes at most.
        let mut batch = Batch::with_capacity(2 + 2 * self.events.len());
        let placed = PlacedOrder { order: self.order.clone(), events: self.ids.clone(), at: now };
        let registered_at = bound.map_or(now, |(row, _)| row.registered_at);
        let fingerprint = self.request.fingerprint.clone();
        let row = RequestRow { fingerprint, registered_at, placed: Some(placed.clone()) };
        let found = bound.map(|(_, revision)| revision);
        batch.put(found, Record::Request(self.request.key.clone(), row));
        let request = self.request.key.clone();
        let order = OrderRow { request, committed_at: now, body: self.body.clone() };
        batch.insert(Record::Order(self.order.clone(), order));
        self.append_events(now, rows, &mut batch);
        let body = Some(self.body.clone());
        Ok(Decision::new(batch, Committed { placed, body, repeated: false }))
    }

    /// That nothing of it is there, and that its lanes are new; but nothing, if its request was
    /// registered, or an ordering key is not that of the order alone: others usually have used it.
    fn assume(&self, now: Millis) -> Option<Decision<Committed>> {
        let own = |key: &OrderingKey| *key == OrderingKey::of_order(&self.order);
        let new = self.events.iter().all(|draft| draft.ordering_key.as_ref().is_none_or(own));
        if self.registered || !new {
            return None;
        }
        self.decide(now, &Rows::default()).ok()
    }
}

impl CommitOrder<'_> {
    /// Puts each event to the end of its lane.
    fn append_events(&self, now: Millis, rows: &Rows, batch: &mut Batch) {
        // In the order of their keys, each once.
        let mut lanes: Vec<(LaneKey, LaneRow, Option<Revision>)> = Vec::with_capacity(1);
        for (draft, id) in self.events.iter().zip(&self.ids) {
            let key = self.lane_of(draft);
            let at = lanes.binary_search_by(|(there, _, _)| there.cmp(&key)).unwrap_or_else(|at| {
                let found = rows.lane(&key);
                let row = found.map_or_else(|| LaneRow::empty(now), |(row, _)| row.clone());
                lanes.insert(at, (key.clone(), row, found.map(|(_, revision)| revision)));
                at
            });
            let due = draft.not_before.unwrap_or(now);
            let sequence = lanes[at].1.append(now, due);
            let event = Event {
                id: id.clone(),
                order: self.order.clone(),
                event_type: draft.event_type.clone(),
                schema_version: draft.schema_version,
                destination: key.destination,
                ordering_key: key.ordering_key,
                time: now,
                headers: draft.headers.clone(),
                body: draft.body.clone(),
            };
            batch.insert(Record::Event(EventRow { event, sequence, due }));
        }
        debug_assert!(lanes.is_sorted_by(|a, b| a.0 < b.0), "each lane is written once");
        for (key, lane, revision) in lanes {
            debug_assert!(
                lane.next > rows.lane(&key).map_or(1, |(found, _)| found.next),
                "a place is given once"
            );
            batch.put(revision, Record::Lane(key, lane));
        }
    }
}
