//! Bugs that are put around the rules, one for each promise, to show that the judge sees them.

use twobox::{Change, DeliveryState, LaneRow, Millis, OutboxRow, Record, Stored};

use crate::scope::{Params, Scope};
use crate::step::Step;

/// What is wrong with the rules. The product has no such switches: rows are changed before a
/// transition sees them, or changes are left out of what it decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bug {
    /// Parameters are not compared (P1).
    ForgetFingerprint,
    /// The order is committed, and its events would be in a commit of their own (P2).
    SplitOrder,
    /// An event that failed is gone from the outbox (P3).
    LoseFailed,
    /// The lane of an event that failed is not due again (P3).
    ForgetDue,
    /// A claim passes over an event that has failed (P4).
    PassOver,
    /// The inbox row is not in the commit of the effect (P5).
    DropInboxRow,
    /// Other content under the same id is skipped as a duplicate (P5).
    SkipOtherContent,
    /// The lease token is not compared (P6).
    IgnoreToken,
    /// A lease that has not run out does not keep others away (P6).
    IgnoreLease,
    /// Purge takes the pending for finished (P7).
    PurgePending,
    /// The backoff has no end (P8).
    BackoffForever,
    /// Purge does not wait for the retention of the inbox (P7).
    PurgeEarly,
}

impl Bug {
    /// Changes the rows that a transition will see.
    pub(crate) fn rows(self, step: &Step, token: Option<u64>, rows: &mut Vec<Stored>) {
        match (self, step) {
            (
                Self::ForgetFingerprint,
                Step::Register { request, .. } | Step::Commit { request, .. },
            ) => {
                for stored in rows {
                    if let (
                        Record::Request(_, row),
                        Step::Register { params, .. } | Step::Commit { params, .. },
                    ) = (&mut stored.record, step)
                    {
                        row.fingerprint = Scope::request(*request, *params).fingerprint;
                    }
                }
            }
            (Self::PassOver, Step::Claim { .. }) => {
                let behind: Vec<_> = rows
                    .iter()
                    .filter_map(|stored| {
                        if let Record::Outbox(_, row) = &stored.record { Some(row) } else { None }
                    })
                    .filter(|row| row.failures == 0)
                    .map(|row| row.lane.clone())
                    .collect();
                let passed = |row: &OutboxRow| row.failures > 0 && behind.contains(&row.lane);
                rows.retain(
                    |stored| !matches!(&stored.record, Record::Outbox(_, row) if passed(row)),
                );
            }
            (Self::IgnoreToken, Step::Settle { .. } | Step::Renew { .. }) => {
                for stored in rows {
                    if let (Record::Lane(_, row), Some(token)) = (&mut stored.record, token) {
                        row.token = token;
                    }
                }
            }
            (Self::IgnoreLease, Step::Claim { .. }) => {
                for stored in rows {
                    if let Record::Lane(_, row @ LaneRow { lease: Some(_), .. }) =
                        &mut stored.record
                    {
                        row.due = Some(Millis::new(0));
                    }
                }
            }
            (Self::PurgePending, Step::Purge(_)) => {
                for stored in rows {
                    if let Record::Outbox(
                        _,
                        row @ OutboxRow { state: DeliveryState::Pending, .. },
                    ) = &mut stored.record
                    {
                        row.state = DeliveryState::Confirmed(row.committed_at);
                    }
                }
            }
            (Self::SkipOtherContent, Step::DeliverOther { event, .. }) => {
                for stored in rows {
                    if let Record::Inbox(_, _, row) = &mut stored.record {
                        row.content = crate::step::other_content(*event).content_digest();
                    }
                }
            }
            (
                Self::ForgetFingerprint
                | Self::PassOver
                | Self::IgnoreToken
                | Self::IgnoreLease
                | Self::PurgePending
                | Self::PurgeEarly
                | Self::SkipOtherContent
                | Self::SplitOrder
                | Self::LoseFailed
                | Self::ForgetDue
                | Self::BackoffForever
                | Self::DropInboxRow,
                _,
            ) => {}
        }
    }

    /// Changes what a transition decided.
    pub(crate) fn changes(self, step: &Step, changes: &mut Vec<Change>) {
        match (self, step) {
            (Self::SplitOrder, Step::Commit { .. }) => changes.retain(|change| match change {
                Change::Put { record, .. } => {
                    matches!(record, Record::Request(..) | Record::Order(..))
                }
                Change::Delete { .. } => true,
            }),
            (Self::LoseFailed, Step::Settle { .. }) => {
                for change in changes {
                    if let Change::Put { expect: twobox::Expect::Revision(expect), record } = change
                        && let Record::Outbox(_, OutboxRow { state: DeliveryState::Pending, .. }) =
                            record
                    {
                        *change = Change::Delete { expect: *expect, key: record.key() };
                    }
                }
            }
            (Self::ForgetDue, Step::Settle { .. }) => {
                for change in changes {
                    if let Change::Put { record: Record::Lane(_, row), .. } = change {
                        row.due = None;
                    }
                }
            }
            (Self::BackoffForever, Step::Settle { .. }) => {
                let failed = |change: &Change| matches!(change, Change::Put { record: Record::Outbox(_, row), .. } if row.state == DeliveryState::Pending);
                if changes.iter().any(failed) {
                    for change in changes {
                        if let Change::Put { record: Record::Outbox(_, row), .. } = change {
                            row.due = Millis::MAX;
                        } else if let Change::Put { record: Record::Lane(_, row), .. } = change {
                            row.due = Some(Millis::MAX);
                        }
                    }
                }
            }
            (Self::DropInboxRow, Step::Deliver { .. }) => {
                changes.retain(|change| {
                    !matches!(change, Change::Put { record: Record::Inbox(..), .. })
                });
            }
            (
                Self::ForgetFingerprint
                | Self::PassOver
                | Self::IgnoreToken
                | Self::IgnoreLease
                | Self::PurgePending
                | Self::PurgeEarly
                | Self::SkipOtherContent
                | Self::SplitOrder
                | Self::LoseFailed
                | Self::ForgetDue
                | Self::BackoffForever
                | Self::DropInboxRow,
                _,
            ) => {}
        }
    }
}

impl Params {
    /// The parameters as they are bound: a fresh order id is none of them.
    #[must_use]
    pub fn bound(self) -> Self {
        match self {
            Self::First | Self::FreshOrder => Self::First,
            Self::Other => Self::Other,
        }
    }
}
