//! Receive an event: apply its effect once for each (consumer, event id), in one commit with the
//! inbox row (P5, F6, F8).

use thiserror::Error;

use crate::boundary::{Batch, Decision, Query, Rows, Transition};
use crate::event::{Body, Event};
use crate::fingerprint::Digest;
use crate::ids::{Consumer, EventId, OrderingKey, Reason};
use crate::message::LanePlace;
use crate::table::{InboxRow, InboxState, Key, PositionRow, Record, Revision};
use crate::time::Millis;

/// Which event at which consumer, with the content that arrived.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Arrival {
    consumer: Consumer,
    event: EventId,
    content: Digest,
}

impl Arrival {
    fn new(consumer: Consumer, event: &Event) -> Self {
        Self { consumer, event: event.id.clone(), content: event.content_digest() }
    }

    fn key(&self) -> Key {
        Key::Inbox(self.consumer.clone(), self.event.clone())
    }

    /// The row that is there, if its content is what arrived.
    fn check<'a>(
        &self,
        rows: &'a Rows,
    ) -> Result<Option<(&'a InboxRow, Revision)>, ContentDiffers> {
        match rows.inbox(&self.consumer, &self.event) {
            Some((row, _)) if row.content != self.content => Err(ContentDiffers {
                consumer: self.consumer.clone(),
                event: self.event.clone(),
                received: row.content,
                given: self.content,
            }),
            found => Ok(found),
        }
    }

    fn write(&self, batch: &mut Batch, there: Option<Revision>, row: InboxRow) {
        batch.put(there, Record::Inbox(self.consumer.clone(), self.event.clone(), row));
    }
}

/// An event came again under the same id with other content (P5). It is refused, not skipped: one
/// of the two is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "event {event} has other content than the one that consumer {consumer} received under this id \
     (content {received:.8}, now {given:.8}); an event id must never be used twice"
)]
pub struct ContentDiffers {
    /// Who received it.
    pub consumer: Consumer,
    /// The id.
    pub event: EventId,
    /// The content that was received first.
    pub received: Digest,
    /// The content that came now.
    pub given: Digest,
}

/// Marks an event as applied by a consumer, in the transaction that holds its effect.
///
/// | inbox row          | its content is | what is written            | outcome |
/// |--------------------|----------------|----------------------------|---------|
/// | none               |                | inbox row, and the effect if given | [`Received::Applied`] |
/// | failing            | the same       | inbox row, and the effect if given | [`Received::Applied`] |
/// | applied            | the same       | nothing                    | [`Received::Duplicate`] |
/// | poisoned           | the same       | nothing                    | [`Received::Poisoned`] |
/// | any                | other          | nothing                    | refused, [`ContentDiffers`] |
///
/// With [`Receive::in_order`], an event waits for the one that was published before it in its
/// ordering key:
///
/// | its predecessor                     | what is written                                        | outcome   |
/// |-------------------------------------|--------------------------------------------------------|-----------|
/// | none, or at or before the position  | the same, and the position moves, if that brings it forward | the same |
/// | after the position                  | nothing                                                | [`Received::WaitsFor`] |
///
/// A sender counts anew in a lane that it had purged: the first event of a later count waits for
/// nothing, those behind it for the one before them in that count, and a latecomer of an earlier
/// count is applied without moving the position.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Receive {
    arrival: Arrival,
    effect: Option<Body>,
    order: Option<InOrder>,
}

/// What an event that is received in order needs besides: its key and its place there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct InOrder {
    ordering_key: OrderingKey,
    place: LanePlace,
}

/// How far a consumer has come, as something that grows: the count, and the sequence in it.
type Progress = (Millis, u64);

impl InOrder {
    fn key(&self, consumer: &Consumer) -> Key {
        Key::Position(consumer.clone(), self.ordering_key.clone())
    }

    /// The position of the consumer.
    fn found<'a>(
        &self,
        consumer: &Consumer,
        rows: &'a Rows,
    ) -> Option<(&'a PositionRow, Revision)> {
        rows.position(consumer, &self.ordering_key)
    }

    fn progress(&self, consumer: &Consumer, rows: &Rows) -> Progress {
        let found = self.found(consumer, rows);
        found.map_or((Millis::new(0), 0), |(row, _)| (row.begun, row.sequence))
    }

    /// Whether the consumer has come as far as the event before this one, if there is one.
    fn is_next(&self, consumer: &Consumer, rows: &Rows) -> bool {
        let LanePlace { begun, after, .. } = self.place;
        after == 0 || (begun, after) <= self.progress(consumer, rows)
    }

    /// Moves the position to this place, unless it is as far already: never back, since nothing
    /// would bring it forward again.
    fn reach(&self, consumer: &Consumer, now: Millis, rows: &Rows, batch: &mut Batch) {
        let LanePlace { begun, sequence, .. } = self.place;
        if (begun, sequence) <= self.progress(consumer, rows) {
            return;
        }
        let row = PositionRow { begun, sequence, at: now };
        // An inbox row may follow, and an effect.
        batch.reserve(3);
        let record = Record::Position(consumer.clone(), self.ordering_key.clone(), row);
        batch.put(self.found(consumer, rows).map(|(_, revision)| revision), record);
    }
}

impl Receive {
    /// `consumer` receives `event`. Whatever it does about it goes into the same transaction.
    #[must_use]
    pub fn new(consumer: Consumer, event: &Event) -> Self {
        Self { arrival: Arrival::new(consumer, event), effect: None, order: None }
    }

    /// In the order of the ordering key: not before the event that was published before it, as the
    /// message's place says.
    #[must_use]
    pub fn in_order(mut self, ordering_key: OrderingKey, place: LanePlace) -> Self {
        self.order = Some(InOrder { ordering_key, place });
        self
    }

    /// With an effect to be recorded in the table of effects.
    #[must_use]
    pub fn effect(mut self, body: Body) -> Self {
        self.effect = Some(body);
        self
    }
}

/// What to do about an event that arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[must_use]
pub enum Received {
    /// It came for the first time: its effect belongs into this transaction.
    Applied,
    /// It was applied before: there is nothing to do but to confirm it.
    Duplicate,
    /// It was set aside after too many failures: there is nothing to do until an operator decides.
    Poisoned,
    /// It is to come again when the event with this sequence of its ordering key has been applied.
    WaitsFor(u64),
}

impl Receive {
    /// The rows that it must see.
    pub(crate) fn keys(&self) -> impl Iterator<Item = Key> {
        let order = self.order.as_ref().map(|order| order.key(&self.arrival.consumer));
        [self.arrival.key()].into_iter().chain(order)
    }
}

impl Transition for Receive {
    type Outcome = Received;
    type Refusal = ContentDiffers;

    fn query(&self, _now: Millis) -> Query {
        Query::rows(self.keys())
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Received>, ContentDiffers> {
        let found = self.arrival.check(rows)?;
        let mut batch = Batch::new();
        if let Some(order) = &self.order {
            if !order.is_next(&self.arrival.consumer, rows) {
                return Ok(Decision::nothing(Received::WaitsFor(order.place.after)));
            }
            // Also for one that is done: a redrive may have given it this place, and those behind
            // it wait for that.
            order.reach(&self.arrival.consumer, now, rows, &mut batch);
        }
        let failures = match found {
            None => 0,
            Some((row, _)) => match row.state {
                InboxState::Applied => return Ok(Decision::new(batch, Received::Duplicate)),
                InboxState::Poisoned => return Ok(Decision::new(batch, Received::Poisoned)),
                InboxState::Failing => row.failures,
            },
        };
        let row = InboxRow {
            content: self.arrival.content,
            at: now,
            state: InboxState::Applied,
            failures,
            reason: None,
            effect: self.effect.is_some(),
        };
        batch.reserve(1 + usize::from(self.effect.is_some()));
        self.arrival.write(&mut batch, found.map(|(_, revision)| revision), row);
        if let Some(effect) = &self.effect {
            let (consumer, event) = (self.arrival.consumer.clone(), self.arrival.event.clone());
            batch.insert(Record::Effect(consumer, event, effect.clone()));
        }
        Ok(Decision::new(batch, Received::Applied))
    }
}

/// Counts that a consumer failed on an event, after the transaction with its effect was rolled
/// back.
///
/// | inbox row | failures with this one  | what is written | outcome |
/// |-----------|-------------------------|-----------------|---------|
/// | none, or failing | fewer than the limit | failing, with the reason | [`FailureCounted::ComesAgain`] |
/// | none, or failing | the limit        | poisoned, with the reason | [`FailureCounted::Poisoned`] |
/// | applied   |                         | nothing         | [`FailureCounted::AppliedAlready`] |
/// | poisoned  |                         | nothing         | [`FailureCounted::Poisoned`] |
/// | any, with other content |           | nothing         | refused, [`ContentDiffers`] |
///
/// With [`CountFailure::in_order`], the position moves with an event that is poisoned: those behind
/// it do not wait for what will not come.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CountFailure {
    arrival: Arrival,
    reason: Reason,
    limit: u32,
    order: Option<InOrder>,
}

impl CountFailure {
    /// `consumer` failed on `event`; at the `limit`-th failure the event is set aside.
    #[must_use]
    pub fn new(consumer: Consumer, event: &Event, reason: Reason, limit: u32) -> Self {
        Self { arrival: Arrival::new(consumer, event), reason, limit, order: None }
    }

    /// In the order of the ordering key, as [`Receive::in_order`].
    #[must_use]
    pub fn in_order(mut self, ordering_key: OrderingKey, place: LanePlace) -> Self {
        self.order = Some(InOrder { ordering_key, place });
        self
    }
}

/// What a failure came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[must_use]
pub enum FailureCounted {
    /// When the event comes again, it is tried again.
    ComesAgain,
    /// The event is set aside for an operator, and the broker need not bring it again.
    Poisoned,
    /// Somebody else has applied it in the meantime.
    AppliedAlready,
}

impl Transition for CountFailure {
    type Outcome = FailureCounted;
    type Refusal = ContentDiffers;

    fn query(&self, _now: Millis) -> Query {
        let order = self.order.as_ref().map(|order| order.key(&self.arrival.consumer));
        Query::rows([self.arrival.key()].into_iter().chain(order))
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<FailureCounted>, ContentDiffers> {
        let found = self.arrival.check(rows)?;
        let failures = found.map_or(0, |(row, _)| row.failures).saturating_add(1);
        let (state, outcome) = match found.map(|(row, _)| row.state) {
            Some(InboxState::Applied) => (None, FailureCounted::AppliedAlready),
            Some(InboxState::Poisoned) => (None, FailureCounted::Poisoned),
            None | Some(InboxState::Failing) if failures < self.limit => {
                (Some(InboxState::Failing), FailureCounted::ComesAgain)
            }
            None | Some(InboxState::Failing) => {
                (Some(InboxState::Poisoned), FailureCounted::Poisoned)
            }
        };
        let mut batch = Batch::new();
        // What has ended holds nobody up, at whatever place it came.
        let ended = self.order.as_ref().filter(|order| {
            outcome != FailureCounted::ComesAgain && order.is_next(&self.arrival.consumer, rows)
        });
        if let Some(order) = ended {
            order.reach(&self.arrival.consumer, now, rows, &mut batch);
        }
        if let Some(state) = state {
            let (content, reason) = (self.arrival.content, Some(self.reason.clone()));
            let row = InboxRow { content, at: now, state, failures, reason, effect: false };
            batch.reserve(1);
            self.arrival.write(&mut batch, found.map(|(_, revision)| revision), row);
        }
        Ok(Decision::new(batch, outcome))
    }
}

/// Lets a consumer retry an event that was set aside.
///
/// | inbox row | what is written                     | outcome |
/// |-----------|-------------------------------------|---------|
/// | poisoned  | failing, without failures so far; the reason stays | `true`: when the event comes again, it is tried again |
/// | any other, or none | nothing                    | `false` |
///
/// The event has to arrive again: from the broker's own dead letters; by a
/// [`Redrive`](crate::Redrive), if it is dead at its sender; or, if it was confirmed there, by a
/// call of [`Inbox::receive`](crate::Inbox::receive) with the sender's event, which is kept until
/// it is purged. A consumer that asks for order has gone on without it, and then applies it out of
/// order.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Retry {
    consumer: Consumer,
    event: EventId,
}

impl Retry {
    /// Lets `consumer` try `event` again.
    #[must_use]
    pub const fn new(consumer: Consumer, event: EventId) -> Self {
        Self { consumer, event }
    }
}

impl Transition for Retry {
    type Outcome = bool;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        Query::rows([Key::Inbox(self.consumer.clone(), self.event.clone())])
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<bool>, Self::Refusal> {
        let mut batch = Batch::new();
        let found = rows.inbox(&self.consumer, &self.event);
        let poisoned = found.filter(|(row, _)| row.state == InboxState::Poisoned);
        if let Some((row, revision)) = poisoned {
            let row = InboxRow { at: now, state: InboxState::Failing, failures: 0, ..row.clone() };
            batch.reserve(1);
            batch.update(revision, Record::Inbox(self.consumer.clone(), self.event.clone(), row));
        }
        Ok(Decision::new(batch, poisoned.is_some()))
    }
}

/// Lets a consumer that asks for order go on with the event at a place: it waits for nothing that
/// was published before. For one that begins in the middle of an ordering key, or that waits for
/// what will not come.
///
/// | position                      | what is written | outcome |
/// |-------------------------------|-----------------|---------|
/// | none, or before the event's predecessor | the position of the predecessor | `true`  |
/// | there, or further             | nothing         | `false` |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SkipTo {
    consumer: Consumer,
    order: InOrder,
}

impl SkipTo {
    /// `consumer` waits for nothing before the event at this place, which is that of the message
    /// for which it answered [`Received::WaitsFor`].
    #[must_use]
    pub const fn new(consumer: Consumer, ordering_key: OrderingKey, place: LanePlace) -> Self {
        // The place that counts as reached is that of the predecessor.
        let place = LanePlace { sequence: place.after, ..place };
        Self { consumer, order: InOrder { ordering_key, place } }
    }
}

impl Transition for SkipTo {
    type Outcome = bool;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        Query::rows([self.order.key(&self.consumer)])
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<bool>, Self::Refusal> {
        let mut batch = Batch::new();
        self.order.reach(&self.consumer, now, rows, &mut batch);
        let moved = !batch.is_empty();
        Ok(Decision::new(batch, moved))
    }
}
