//! What the rules have in common about a lane: one holder at a time (P6), the first pending event
//! first (P4).

use thiserror::Error;

use crate::ids::{EventId, OrderingKey, Owner};
use crate::table::{LaneRow, Lease};
use crate::time::Millis;

/// A lease as its holder knows it: the lane, and the fencing token that the claim gave (P6).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseRef {
    /// The lane.
    pub lane: OrderingKey,
    /// The token, different for each lease of the lane.
    pub token: u64,
}

/// A lease that is not current: what was done under it changed nothing (P6, F3).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Error)]
#[error("the lease {} of lane {:?} is not current: {why}", lease.token, lease.lane)]
pub struct StaleLease {
    /// The lease that was given.
    pub lease: LeaseRef,
    /// Why it does not count.
    pub why: Stale,
}

/// Why a lease does not count.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Error)]
pub enum Stale {
    /// It ran out, and another claim has taken the lane since.
    #[error("{owner} has taken the lane since, with token {token}")]
    TakenOver {
        /// Who holds the lane now.
        owner: Owner,
        /// The token of that lease.
        token: u64,
    },
    /// It was settled or released already.
    #[error("it was settled or released already")]
    Ended,
    /// There is no such lane.
    #[error("there is no such lane")]
    NoLane,
    /// It does not cover this event, or not as the next one.
    #[error("event {event} is not the next one that it covers")]
    NotCovered {
        /// The event that was given.
        event: EventId,
    },
}

/// Where an event stands among those of its ordering key, as its sender counts them: what a message
/// says, so that a consumer can put events in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// When the lane began to count. It begins anew if it was purged after it had been idle for its
    /// retention.
    pub begun: Millis,
    /// The event's place in that count, from 1.
    pub sequence: u64,
    /// The place of the event that is published before it, 0 if there was none. A consumer that has
    /// applied that one may apply this one.
    pub after: u64,
}

impl LaneRow {
    /// How many events can be pending in it: those that it got after the one that was confirmed
    /// last. A store need not look for more.
    #[must_use]
    pub const fn pending_at_most(&self) -> u64 {
        self.next.saturating_sub(self.confirmed).saturating_sub(1)
    }

    /// A lane that has had no events. Its tokens begin with the time, so that those of a lane that
    /// was purged do not come again.
    pub(crate) const fn empty(now: Millis) -> Self {
        let token = now.get();
        Self {
            next: 1,
            confirmed: 0,
            due: None,
            starts: 0,
            token,
            lease: None,
            blocked_by: None,
            begun: now,
            changed_at: now,
        }
    }

    /// Puts an event to the end of the lane and gives its sequence.
    pub(crate) fn append(&mut self, now: Millis, due: Millis) -> u64 {
        let sequence = self.next;
        self.next = self.next.saturating_add(1);
        self.changed_at = now;
        // With something before it, the lane is due when that is; a blocked lane stays so.
        if self.due.is_none() && self.blocked_by.is_none() {
            self.due = Some(due);
        }
        sequence
    }

    /// The lease, if it is the current one. A lease that ran out stays current until another claim
    /// takes the lane: to settle under it does no harm and saves a delivery.
    pub(crate) fn current(&self, lease: &LeaseRef) -> Result<&Lease, Stale> {
        match &self.lease {
            Some(current) if self.token == lease.token => Ok(current),
            Some(current) => {
                Err(Stale::TakenOver { owner: current.owner.clone(), token: self.token })
            }
            None => Err(Stale::Ended),
        }
    }

    /// Whether a pending event is being delivered.
    pub(crate) fn leases(&self, sequence: u64) -> bool {
        self.lease.as_ref().is_some_and(|lease| sequence <= lease.through)
    }

    /// Ends a lease: the first pending event is now due at `head_due`, if there is one.
    pub(crate) fn free(&mut self, now: Millis, head_due: Option<Millis>) {
        self.lease = None;
        self.changed_at = now;
        self.due = if self.blocked_by.is_some() { None } else { head_due };
    }
}
