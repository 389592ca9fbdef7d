//! What the rules have in common about a lane: one holder at a time (P6), the first pending event
//! first (P4).

use thiserror::Error;

use crate::ids::{EventId, LaneKey, Owner};
use crate::table::{LaneRow, Lease};
use crate::time::Millis;

/// A lease as its holder knows it: the lane, and the fencing token that the claim gave (P6).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseRef {
    /// The lane.
    pub lane: LaneKey,
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
#[non_exhaustive]
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
    /// The store has lost events that it covers, or what was known of them.
    #[error("the store has lost what it covers")]
    Lost,
}

/// A change of a lane by the holder of its lease. It is guarded by the fencing token and not by the
/// revision, and names what changes and not the whole row, so that events that others append
/// meanwhile are no conflict.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LaneEdit {
    /// Ends the lease.
    Free {
        /// The first event that may be pending now.
        head: u64,
        /// The event that was confirmed last.
        confirmed: u64,
        /// How often the first pending event was started without having been settled.
        starts: u32,
        /// When the lane is due, if it has anything pending and is not blocked.
        due: Millis,
        /// The dead event that the lane waits for from now on.
        blocked_by: Option<EventId>,
    },
    /// Makes the lease last until this time, and never shorter than before.
    Renew {
        /// The time.
        until: Millis,
    },
}

impl LaneRow {
    /// How many events can be pending in it. A store need not look for more.
    #[must_use]
    pub const fn pending_at_most(&self) -> u64 {
        self.next.saturating_sub(self.head)
    }

    /// A lane that has had no events. Its tokens begin with the time, so that those of a lane that
    /// was purged do not come again.
    pub(crate) const fn empty(now: Millis) -> Self {
        Self {
            next: 1,
            head: 1,
            confirmed: 0,
            due: None,
            starts: 0,
            token: now.get(),
            lease: None,
            blocked_by: None,
            begun: now,
            changed_at: now,
        }
    }

    /// Puts an event to the end of the lane and gives its sequence.
    pub(crate) fn append(&mut self, now: Millis, due: Millis) -> u64 {
        let sequence = self.next;
        self.next += 1;
        self.changed_at = now;
        // With something before it, the lane is due when that is; a blocked lane stays so.
        if self.due.is_none() && self.blocked_by.is_none() {
            self.head = sequence;
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

    /// Ends a lease, if there is one: nothing before `head` is pending, and what stands there, if
    /// anything does, is due then.
    pub(crate) fn free(&mut self, now: Millis, head: u64, due: Millis) {
        self.lease = None;
        self.changed_at = now;
        self.head = head;
        self.due = (self.blocked_by.is_none() && head < self.next).then_some(due);
    }

    /// Whether a lease covers events, or an edit passes some, that the lane never had: the store has
    /// lost them, and will give their places to others.
    fn lost(&self, lease: &Lease, edit: &LaneEdit) -> bool {
        matches!(edit, LaneEdit::Free { head, .. } if *head > self.next || lease.through >= self.next)
    }

    /// Whether an edit can be made under this lease, as [`LaneRow::edited`] would.
    pub(crate) fn admits(&self, lease: &LeaseRef, edit: &LaneEdit) -> Result<(), Stale> {
        let current = self.current(lease)?;
        if self.lost(current, edit) { Err(Stale::Lost) } else { Ok(()) }
    }

    /// The row after an edit under this token, at this time; `None` if the token is not that of a
    /// current lease, or if it would end a lease that covers events which the store has lost.
    #[must_use]
    pub fn edited(&self, token: u64, edit: &LaneEdit, at: Millis) -> Option<Self> {
        let lease = self.lease.as_ref().filter(|_| self.token == token)?;
        if self.lost(lease, edit) {
            return None;
        }
        let mut row = self.clone();
        match edit {
            LaneEdit::Free { head, confirmed, starts, due, blocked_by } => {
                row.confirmed = *confirmed;
                row.starts = *starts;
                row.blocked_by.clone_from(blocked_by);
                row.free(at, *head, *due);
            }
            LaneEdit::Renew { until } => {
                let until = lease.until.max(*until);
                row.due = Some(until);
                row.lease = Some(Lease { until, ..lease.clone() });
            }
        }
        debug_assert!(
            row.token == self.token && row.next == self.next,
            "the holder takes no place"
        );
        Some(row)
    }

    /// Where the lane stands among those that have something pending: when it can be claimed, or
    /// at the end of time while it is blocked.
    #[must_use]
    pub fn index_due(&self) -> Option<Millis> {
        let blocked = self.blocked_by.is_some().then_some(Millis::MAX);
        self.due.or(blocked)
    }
}
