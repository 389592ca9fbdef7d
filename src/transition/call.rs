//! Effects outside the transaction, such as a payment or a mail, which can happen twice (P9, F22).
//!
//! No commit can hold such an effect, but a row can hold what is known of it: that it is to be
//! made, that it was started, that it is done. If the program dies after the start, nobody knows
//! whether it happened; that is a state of its own, and what to do about it is a rule that the user
//! chose, never a guess. The event id is the key to hand to the other side, so that it can
//! recognise a repetition.
//!
//! ```text
//!   intend          start             finish
//!   -------> intended -----> started ---------> done
//!               ^  ^           |  |              ^
//!               |  +- fail ----+  | start again, after the patience is over
//!               |                 v              |
//!               +- resolve(no) - unknown - resolve(yes), finish
//! ```
//!
//! Commit the intent together with the inbox row, commit the start before the call is made, and
//! commit the end after it.

use core::time::Duration;

use thiserror::Error;

use crate::boundary::{Batch, Decision, Query, Rows, Transition};
use crate::ids::{Consumer, EventId, Reason};
use crate::table::{CallRow, CallState, Key, Record, Revision};
use crate::time::Millis;

/// Which call: what a consumer does outside because of an event.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallKey {
    /// Who makes it.
    pub consumer: Consumer,
    /// Because of which event. Its id is the idempotency key to hand to the other side.
    pub event: EventId,
}

impl CallKey {
    fn query(&self) -> Query {
        Query::rows([Key::Call(self.consumer.clone(), self.event.clone())])
    }

    fn write(&self, batch: &mut Batch, there: Option<Revision>, row: CallRow) {
        batch.put(there, Record::Call(self.consumer.clone(), self.event.clone(), row));
    }
}

/// What was asked of a call does not fit its state.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CallRefused {
    /// No intent was committed.
    #[error("consumer {} has not recorded the intent of a call for event {}; commit the intent first", key.consumer, key.event)]
    NotIntended {
        /// Which call.
        key: CallKey,
    },
    /// It was not started, so it cannot have ended.
    #[error("the call of consumer {} for event {} is {}, so it cannot be ended; start it first", key.consumer, key.event, state.name())]
    NotStarted {
        /// Which call.
        key: CallKey,
        /// What is known of it.
        state: CallState,
    },
    /// It has been started again since, and that start is under way.
    #[error(
        "the call of consumer {} for event {} has been started again since: this is about start {given}, the last is {last}",
        key.consumer, key.event
    )]
    StartedAgain {
        /// Which call.
        key: CallKey,
        /// The start that was given.
        given: u32,
        /// The number of the last start.
        last: u32,
    },
    /// It is done already.
    #[error("the call of consumer {} for event {} is done already", key.consumer, key.event)]
    Done {
        /// Which call.
        key: CallKey,
    },
}

/// Records that a call is to be made; in the transaction that applies the event.
///
/// | call      | what is written | outcome |
/// |-----------|-----------------|---------|
/// | none      | intended        | `true`  |
/// | any       | nothing         | `false` |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Intend(CallKey);

impl Intend {
    /// Intends this call.
    #[must_use]
    pub const fn new(call: CallKey) -> Self {
        Self(call)
    }
}

impl Transition for Intend {
    type Outcome = bool;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        self.0.query()
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<bool>, Self::Refusal> {
        let mut batch = Batch::with_capacity(1);
        let new = rows.call(&self.0.consumer, &self.0.event).is_none();
        if new {
            self.0.write(
                &mut batch,
                None,
                CallRow { state: CallState::Intended, at: now, starts: 0, note: None },
            );
        }
        Ok(Decision::new(batch, new))
    }
}

/// What to do about a call that was started, if nobody knows whether it happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WhenUnknown {
    /// Ask the other side, by the event id, and say with [`Resolve`] what it answered.
    Ask,
    /// Make it again: the other side recognises a repetition by the event id, or it does no harm.
    Repeat,
    /// Wait until an operator says with [`Resolve`] whether it happened.
    Wait,
}

/// Starts a call. Commit this before the call is made.
///
/// | call                                  | rule                    | what is written    | outcome |
/// |---------------------------------------|-------------------------|--------------------|---------|
/// | intended                              |                         | started            | [`Started::Call`] |
/// | started, within the patience          |                         | nothing            | [`Started::UnderWay`] |
/// | started, longer ago; or unknown       | [`WhenUnknown::Repeat`] | started once more  | [`Started::Call`] |
/// | started, longer ago; or unknown       | [`WhenUnknown::Ask`]    | unknown            | [`Started::Ask`] |
/// | started, longer ago; or unknown       | [`WhenUnknown::Wait`]   | unknown            | [`Started::Wait`] |
/// | done                                  |                         | nothing            | [`Started::Done`] |
/// | none                                  |                         | nothing            | refused, [`CallRefused::NotIntended`] |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Start {
    call: CallKey,
    patience: Duration,
    when_unknown: WhenUnknown,
}

impl Start {
    /// Starts a call; one that was started more than `patience` ago and has not ended counts as
    /// unknown.
    #[must_use]
    pub const fn new(call: CallKey, patience: Duration, when_unknown: WhenUnknown) -> Self {
        Self { call, patience, when_unknown }
    }
}

/// What to do now about a call.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[must_use]
pub enum Started {
    /// Make it, with the event id as the key for the other side. This is the number of the start,
    /// for [`Resolve::of_start`].
    Call(u32),
    /// Somebody is making it just now.
    UnderWay,
    /// Ask the other side whether it happened.
    Ask,
    /// An operator has to say whether it happened.
    Wait,
    /// It is done; this was noted then.
    Done(Option<Reason>),
}

impl Transition for Start {
    type Outcome = Started;
    type Refusal = CallRefused;

    fn query(&self, _now: Millis) -> Query {
        self.call.query()
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Started>, CallRefused> {
        let Some((row, revision)) = rows.call(&self.call.consumer, &self.call.event) else {
            return Err(CallRefused::NotIntended { key: self.call.clone() });
        };
        let start = row.starts.saturating_add(1);
        let (state, outcome) = match (row.state, self.when_unknown) {
            (CallState::Done, _) => return Ok(Decision::nothing(Started::Done(row.note.clone()))),
            (CallState::Started, _) if now.since(row.at) < self.patience => {
                return Ok(Decision::nothing(Started::UnderWay));
            }
            (CallState::Intended, _)
            | (CallState::Started | CallState::Unknown, WhenUnknown::Repeat) => {
                (CallState::Started, Started::Call(start))
            }
            (CallState::Started | CallState::Unknown, WhenUnknown::Ask) => {
                (CallState::Unknown, Started::Ask)
            }
            (CallState::Started | CallState::Unknown, WhenUnknown::Wait) => {
                (CallState::Unknown, Started::Wait)
            }
        };
        let mut batch = Batch::with_capacity(1);
        if state == CallState::Started {
            let row = CallRow { state, at: now, starts: start, note: row.note.clone() };
            self.call.write(&mut batch, Some(revision), row);
        } else if row.state != state {
            let note = Some(Reason::new("it was started, and nobody knows whether it happened"));
            self.call.write(
                &mut batch,
                Some(revision),
                CallRow { state, at: now, starts: row.starts, note },
            );
        }
        Ok(Decision::new(batch, outcome))
    }
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CallEnd {
    /// It happened; what the other side answered may be noted.
    Done(Option<Reason>),
    /// It certainly did not happen, for this reason; it may be started again.
    NotDone(Reason),
    /// Nobody knows, for this reason.
    Unknown(Reason),
}

/// Records how a call ended, or what was found out about one that is unknown.
///
/// | call               | end        | what is written | outcome |
/// |--------------------|------------|-----------------|---------|
/// | started or unknown | done       | done            | `()`    |
/// | started or unknown | not done   | intended        | `()`    |
/// | started or unknown | unknown    | unknown         | `()`    |
/// | done               | done       | nothing         | `()`    |
/// | done               | other      | nothing         | refused, [`CallRefused::Done`] |
/// | intended, after a start | done  | done            | `()`    |
/// | intended           | other, or it was never started | nothing | refused, [`CallRefused::NotStarted`] |
/// | none               | any        | nothing         | refused, [`CallRefused::NotIntended`] |
/// | started or unknown, after another start than the given one | not done, unknown | nothing | refused, [`CallRefused::StartedAgain`] |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Resolve {
    call: CallKey,
    end: CallEnd,
    start: Option<u32>,
}

impl Resolve {
    /// This call ended so.
    #[must_use]
    pub const fn new(call: CallKey, end: CallEnd) -> Self {
        Self { call, end, start: None }
    }

    /// Says it of this start only, as the one who made it can: that this one did not happen says
    /// nothing about a later one. Without this, it is said of all starts, as after asking the other
    /// side.
    #[must_use]
    pub const fn of_start(mut self, start: u32) -> Self {
        self.start = Some(start);
        self
    }
}

impl Transition for Resolve {
    type Outcome = ();
    type Refusal = CallRefused;

    fn query(&self, _now: Millis) -> Query {
        self.call.query()
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<()>, CallRefused> {
        let key = || self.call.clone();
        let Some((row, revision)) = rows.call(&self.call.consumer, &self.call.event) else {
            return Err(CallRefused::NotIntended { key: key() });
        };
        match (row.state, &self.end) {
            (CallState::Done, CallEnd::Done(_)) => return Ok(Decision::nothing(())),
            (CallState::Done, CallEnd::NotDone(_) | CallEnd::Unknown(_)) => {
                return Err(CallRefused::Done { key: key() });
            }
            // Somebody said too early that it did not happen.
            (CallState::Intended, CallEnd::Done(_)) if row.starts > 0 => {}
            (state @ CallState::Intended, _) => {
                return Err(CallRefused::NotStarted { key: key(), state });
            }
            // That it happened once is enough to be done.
            (CallState::Started | CallState::Unknown, CallEnd::Done(_)) => {}
            (
                CallState::Started | CallState::Unknown,
                CallEnd::NotDone(_) | CallEnd::Unknown(_),
            ) => {
                if let Some(given) = self.start.filter(|given| *given != row.starts) {
                    return Err(CallRefused::StartedAgain { key: key(), given, last: row.starts });
                }
            }
        }
        let (state, note) = match &self.end {
            CallEnd::Done(note) => (CallState::Done, note.clone()),
            CallEnd::NotDone(reason) => (CallState::Intended, Some(reason.clone())),
            CallEnd::Unknown(reason) => (CallState::Unknown, Some(reason.clone())),
        };
        let mut batch = Batch::with_capacity(1);
        self.call.write(
            &mut batch,
            Some(revision),
            CallRow { state, at: now, starts: row.starts, note },
        );
        Ok(Decision::new(batch, ()))
    }
}
