//! Receive an event: apply its effect once for each (consumer, event id), in one commit with the inbox row (P5, F6, F8).

use thiserror::Error;

use crate::boundary::{Batch, Decision, Query, Rows, Transition};
use crate::event::{Body, Event};
use crate::fingerprint::Digest;
use crate::ids::{Consumer, EventId, OrderingKey, Reason};
use crate::table::{InboxRow, InboxState, Key, PositionRow, Record, Revision};
use crate::time::Millis;

/// Which event at which consumer, with the content that arrived.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Arrival {
    consumer: Consumer,
    event: EventId,
    content: Digest,
    /// When it was committed at its sender.
    time: Millis,
}

impl Arrival {
    fn new(consumer: Consumer, event: &Event) -> Self {
        Self { consumer, event: event.id.clone(), content: event.content_digest(), time: event.time }
    }

    fn key(&self) -> Key {
        Key::Inbox(self.consumer.clone(), self.event.clone())
    }

    /// The row that is there, if its content is what arrived.
    fn check<'a>(&self, rows: &'a Rows) -> Result<Option<(&'a InboxRow, Revision)>, ContentDiffers> {
        match rows.inbox() {
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
        let record = Record::Inbox(self.consumer.clone(), self.event.clone(), row);
        match there {
            None => batch.insert(record),
            Some(revision) => batch.update(revision, record),
        }
    }
}

/// An event came again under the same id with other content (P5). It is refused, not skipped: one of the two is wrong.
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
/// With [`Receive::in_order`], an event waits for the one that was published before it in its ordering key:
///
/// | its predecessor                     | what is written                                        | outcome   |
/// |-------------------------------------|--------------------------------------------------------|-----------|
/// | none, or at or before the position  | the same, and the position moves, if that brings it forward | the same |
/// | after the position                  | nothing                                                | [`Received::WaitsFor`] |
///
/// A sender counts anew in a key that was idle for its retention: an event with nothing before it that was committed later than all
/// that was applied sets the position back.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Receive {
    arrival: Arrival,
    effect: Option<Body>,
    place: Option<Place>,
}

/// Where an event stands among those of its ordering key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Place {
    ordering_key: OrderingKey,
    sequence: u64,
    after: u64,
}

impl Place {
    fn key(&self, consumer: &Consumer) -> Key {
        Key::Position(consumer.clone(), self.ordering_key.clone())
    }

    fn position(rows: &Rows) -> u64 {
        rows.position().map_or(0, |(row, _)| row.sequence)
    }

    /// Whether the consumer has come as far as this place.
    fn is_next(&self, rows: &Rows) -> bool {
        self.after <= Self::position(rows)
    }

    /// Moves the position to the place of an event that ended before, at another one: a redrive gave it this one, and those behind
    /// it must not wait for what is done already.
    fn pass(&self, arrival: &Arrival, now: Millis, rows: &Rows, batch: &mut Batch) {
        if self.is_next(rows) && self.sequence > Self::position(rows) {
            self.reach(arrival, now, rows, batch);
        }
    }

    /// Moves the position to this place, unless it is further already.
    fn reach(&self, arrival: &Arrival, now: Millis, rows: &Rows, batch: &mut Batch) {
        let there = rows.position();
        let row = match there {
            None => PositionRow { sequence: self.sequence, committed_at: arrival.time, at: now },
            // With nothing before it, and committed later than all that was applied, it is no latecomer: the sender has begun to
            // count anew, after the lane had been idle for its retention. Nothing else moves the position back, since nothing
            // would bring it forward again.
            Some((row, _)) => {
                let anew = self.after == 0 && arrival.time > row.committed_at;
                let sequence = if anew { self.sequence } else { self.sequence.max(row.sequence) };
                PositionRow { sequence, committed_at: arrival.time.max(row.committed_at), at: now }
            }
        };
        let record = Record::Position(arrival.consumer.clone(), self.ordering_key.clone(), row);
        match there {
            None => batch.insert(record),
            Some((_, revision)) => batch.update(revision, record),
        }
    }
}

impl Receive {
    /// `consumer` receives `event`. Whatever it does about it goes into the same transaction.
    #[must_use]
    pub fn new(consumer: Consumer, event: &Event) -> Self {
        Self { arrival: Arrival::new(consumer, event), effect: None, place: None }
    }

    /// In the order of the ordering key: not before the event with the sequence `after`, as the message says.
    #[must_use]
    pub fn in_order(mut self, ordering_key: OrderingKey, sequence: u64, after: u64) -> Self {
        self.place = Some(Place { ordering_key, sequence, after });
        self
    }

    /// With an effect to be recorded in the table of effects.
    #[must_use]
    pub fn effect(mut self, body: Body) -> Self {
        self.effect = Some(body);
        self
    }
}

/// What became of an event that arrived.
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

impl Transition for Receive {
    type Outcome = Received;
    type Refusal = ContentDiffers;

    fn query(&self, _now: Millis) -> Query {
        let place = self.place.as_ref();
        Query::rows([self.arrival.key()].into_iter().chain(place.map(|place| place.key(&self.arrival.consumer))))
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Received>, ContentDiffers> {
        let found = self.arrival.check(rows)?;
        if let Some(place) = self.place.as_ref().filter(|place| !place.is_next(rows)) {
            return Ok(Decision::nothing(Received::WaitsFor(place.after)));
        }
        let mut batch = Batch::new();
        let (failures, ended) = match found {
            None => (0, None),
            Some((row, _)) => match row.state {
                InboxState::Applied => (0, Some(Received::Duplicate)),
                InboxState::Poisoned => (0, Some(Received::Poisoned)),
                InboxState::Failing => (row.failures, None),
            },
        };
        if let Some(ended) = ended {
            if let Some(place) = &self.place {
                place.pass(&self.arrival, now, rows, &mut batch);
            }
            return Ok(Decision::new(batch, ended));
        }
        if let Some(place) = &self.place {
            place.reach(&self.arrival, now, rows, &mut batch);
        }
        let row = InboxRow {
            content: self.arrival.content,
            at: now,
            state: InboxState::Applied,
            failures,
            reason: None,
            effect: self.effect.is_some(),
        };
        self.arrival.write(&mut batch, found.map(|(_, revision)| revision), row);
        if let Some(effect) = &self.effect {
            let (consumer, event) = (self.arrival.consumer.clone(), self.arrival.event.clone());
            batch.insert(Record::Effect(consumer, event, effect.clone()));
        }
        Ok(Decision::new(batch, Received::Applied))
    }
}

/// Records the effect of an event in the transaction that has just applied it.
///
/// | inbox row                   | what is written                | outcome |
/// |-----------------------------|--------------------------------|---------|
/// | applied, without an effect  | the effect, and that it is there | `()`  |
/// | anything else               | nothing                        | `()`: the effect is there already, or there is nothing that it could be the effect of |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RecordEffect {
    consumer: Consumer,
    event: EventId,
    body: Body,
}

impl RecordEffect {
    /// The effect of `event` at `consumer`.
    #[must_use]
    pub const fn new(consumer: Consumer, event: EventId, body: Body) -> Self {
        Self { consumer, event, body }
    }
}

impl Transition for RecordEffect {
    type Outcome = ();
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        Query::rows([Key::Inbox(self.consumer.clone(), self.event.clone())])
    }

    fn decide(&self, _now: Millis, rows: &Rows) -> Result<Decision<()>, Self::Refusal> {
        let mut batch = Batch::new();
        if let Some((row, revision)) = rows.inbox()
            && row.state == InboxState::Applied
            && !row.effect
        {
            let (consumer, event) = (self.consumer.clone(), self.event.clone());
            batch.update(revision, Record::Inbox(consumer.clone(), event.clone(), InboxRow { effect: true, ..row.clone() }));
            batch.insert(Record::Effect(consumer, event, self.body.clone()));
        }
        Ok(Decision::new(batch, ()))
    }
}

/// Counts that a consumer failed on an event, after the transaction with its effect was rolled back.
///
/// | inbox row | failures with this one  | what is written | outcome |
/// |-----------|-------------------------|-----------------|---------|
/// | none, or failing | fewer than the limit | failing, with the reason | [`FailureCounted::ComesAgain`] |
/// | none, or failing | the limit        | poisoned, with the reason | [`FailureCounted::Poisoned`] |
/// | applied   |                         | nothing         | [`FailureCounted::AppliedAlready`] |
/// | poisoned  |                         | nothing         | [`FailureCounted::Poisoned`] |
/// | any, with other content |           | nothing         | refused, [`ContentDiffers`] |
///
/// With [`CountFailure::in_order`], the position moves with an event that is poisoned: those behind it do not wait for what will not come.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CountFailure {
    arrival: Arrival,
    reason: Reason,
    limit: u32,
    place: Option<Place>,
}

impl CountFailure {
    /// `consumer` failed on `event`; at the `limit`-th failure the event is set aside.
    #[must_use]
    pub fn new(consumer: Consumer, event: &Event, reason: Reason, limit: u32) -> Self {
        Self { arrival: Arrival::new(consumer, event), reason, limit, place: None }
    }

    /// In the order of the ordering key, as [`Receive::in_order`].
    #[must_use]
    pub fn in_order(mut self, ordering_key: OrderingKey, sequence: u64, after: u64) -> Self {
        self.place = Some(Place { ordering_key, sequence, after });
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
        let place = self.place.as_ref();
        Query::rows([self.arrival.key()].into_iter().chain(place.map(|place| place.key(&self.arrival.consumer))))
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<FailureCounted>, ContentDiffers> {
        let found = self.arrival.check(rows)?;
        let mut batch = Batch::new();
        let (failures, ended) = match found {
            None => (1, None),
            Some((row, _)) => match row.state {
                InboxState::Applied => (0, Some(FailureCounted::AppliedAlready)),
                InboxState::Poisoned => (0, Some(FailureCounted::Poisoned)),
                InboxState::Failing => (row.failures.saturating_add(1), None),
            },
        };
        if let Some(ended) = ended {
            if let Some(place) = &self.place {
                place.pass(&self.arrival, now, rows, &mut batch);
            }
            return Ok(Decision::new(batch, ended));
        }
        let (state, outcome) = if failures < self.limit {
            (InboxState::Failing, FailureCounted::ComesAgain)
        } else {
            (InboxState::Poisoned, FailureCounted::Poisoned)
        };
        if let Some(place) = self.place.as_ref().filter(|place| state == InboxState::Poisoned && place.is_next(rows)) {
            place.reach(&self.arrival, now, rows, &mut batch);
        }
        let row = InboxRow {
            content: self.arrival.content,
            at: now,
            state,
            failures,
            reason: Some(self.reason.clone()),
            effect: false,
        };
        self.arrival.write(&mut batch, found.map(|(_, revision)| revision), row);
        Ok(Decision::new(batch, outcome))
    }
}

/// An operator lets a consumer try an event again that was set aside.
///
/// | inbox row | what is written                     | outcome |
/// |-----------|-------------------------------------|---------|
/// | poisoned  | failing, without failures so far; the reason stays | `true`: when the event comes again, it is tried again |
/// | any other, or none | nothing                    | `false` |
///
/// The event has to come again: from the broker's own dead letters, or by a [`Redrive`](crate::Redrive) if it is dead at its sender.
/// A consumer that asks for order has gone on without it; it is applied out of its place then.
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
        let poisoned = rows.inbox().filter(|(row, _)| row.state == InboxState::Poisoned);
        if let Some((row, revision)) = poisoned {
            let row = InboxRow { at: now, state: InboxState::Failing, failures: 0, ..row.clone() };
            batch.update(revision, Record::Inbox(self.consumer.clone(), self.event.clone(), row));
        }
        Ok(Decision::new(batch, poisoned.is_some()))
    }
}

/// Sets where a consumer that asks for order stands: it waits for nothing that was published up to there. For one that begins in the
/// middle of an ordering key, or that an operator lets go on without what will not come.
///
/// | position                 | what is written | outcome |
/// |--------------------------|-----------------|---------|
/// | none, or before `sequence` | the position  | `true`  |
/// | at or after `sequence`   | nothing         | `false` |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SkipTo {
    consumer: Consumer,
    ordering_key: OrderingKey,
    sequence: u64,
}

impl SkipTo {
    /// `consumer` waits for no event of the ordering key up to `sequence`, as [`Received::WaitsFor`] names it.
    #[must_use]
    pub const fn new(consumer: Consumer, ordering_key: OrderingKey, sequence: u64) -> Self {
        Self { consumer, ordering_key, sequence }
    }
}

impl Transition for SkipTo {
    type Outcome = bool;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        Query::rows([Key::Position(self.consumer.clone(), self.ordering_key.clone())])
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<bool>, Self::Refusal> {
        let mut batch = Batch::new();
        let there = rows.position();
        let moves = there.is_none_or(|(row, _)| row.sequence < self.sequence);
        if moves {
            let committed_at = there.map_or(Millis::new(0), |(row, _)| row.committed_at);
            let row = PositionRow { sequence: self.sequence, committed_at, at: now };
            let record = Record::Position(self.consumer.clone(), self.ordering_key.clone(), row);
            match there {
                None => batch.insert(record),
                Some((_, revision)) => batch.update(revision, record),
            }
        }
        Ok(Decision::new(batch, moves))
    }
}
