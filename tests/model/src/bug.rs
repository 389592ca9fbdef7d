//! Bugs that are put around the rules, one for each promise, to show that the judge sees them.

use twobox::{
    Change, Delivery, DeliveryState, EventState, Expect, Key, LaneEdit, LaneRow, Load, Millis,
    Query, Record, Revision, Rows, Stored, Table,
};
use twobox_memory::State;

use crate::scope::{Params, Scope};
use crate::step::Step;

/// What is wrong with the rules. The product has no such switches: rows are changed before a
/// transition sees them, or the changes that it decided are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bug {
    /// Parameters are not compared (P1).
    ForgetFingerprint,
    /// The order is committed, and its events would be in a commit of their own (P2).
    SplitOrder,
    /// An event that failed is gone (P3).
    LoseFailed,
    /// The lane of an event that failed is not due again (P3).
    ForgetDue,
    /// A claim moves its lane past the event that it should have taken (P3).
    MovePast,
    /// A claim passes over an event that has failed (P4).
    PassOver,
    /// The inbox row is not in the commit of the effect (P5).
    DropInboxRow,
    /// Other content under the same id is skipped as a duplicate (P5).
    SkipOtherContent,
    /// The lease token is not compared, neither in the look nor in the edit (P6).
    IgnoreToken,
    /// A settlement looks at no lane, and its edit does not compare the token (P6).
    BlindEdit,
    /// A lease that has not run out does not keep others away (P6).
    IgnoreLease,
    /// Purge takes the pending for finished (P7).
    PurgePending,
    /// Purge takes a lane that still has events, so that its count begins again (P7).
    PurgeLane,
    /// The backoff has no end (P8).
    BackoffForever,
    /// Purge does not wait for the retention of the inbox (P7).
    PurgeEarly,
}

/// A row of these tables.
fn stored(state: &State, key: &Key) -> Option<Stored> {
    let Ok(rows) = state.clone().load(&Query::rows([key.clone()]));
    rows.rows.into_iter().next()
}

/// The rows of a table.
fn table(state: &State, table: Table) -> Vec<Stored> {
    let Ok(rows) = state.clone().load(&Query::Walk { table, after: None, limit: usize::MAX });
    rows.rows
}

impl Bug {
    /// Changes the rows that a transition will see.
    pub(crate) fn rows(
        self,
        step: &Step,
        token: Option<u64>,
        query: &Query,
        state: &State,
        rows: &mut Rows,
    ) {
        match (self, step, query) {
            (
                Self::ForgetFingerprint,
                Step::Register { request, params } | Step::Commit { request, params },
                _,
            ) => {
                for stored in &mut rows.rows {
                    if let Record::Request(_, row) = &mut stored.record {
                        row.fingerprint = Scope::request(*request, *params).fingerprint;
                    }
                }
            }
            (Self::PassOver, _, Query::Due(_)) => {
                for lane in &mut rows.lanes {
                    if lane.pending.iter().any(|next| next.row.failures == 0) {
                        lane.pending.retain(|next| next.row.failures == 0);
                    }
                }
            }
            (Self::IgnoreToken, Step::Settle { .. } | Step::Renew { .. }, Query::Rows(_)) => {
                for stored in &mut rows.rows {
                    if let (Record::Lane(_, row), Some(token)) = (&mut stored.record, token) {
                        row.token = token;
                    }
                }
            }
            (Self::IgnoreLease, _, Query::Due(_)) => {
                for lane in &mut rows.lanes {
                    if lane.row.lease.is_some() {
                        lane.row.due = Some(Millis::new(0));
                    }
                }
            }
            (Self::PurgePending, Step::Purge(Table::Events), Query::Finished(_)) => {
                rows.deliveries = Self::pending(state);
            }
            (Self::PurgeLane, Step::Purge(Table::Lanes), Query::Finished(finished)) => {
                rows.rows = table(state, Table::Lanes);
                rows.rows.retain(|stored| match &stored.record {
                    Record::Lane(_, row) => {
                        row.index_due().is_none() && row.changed_at <= finished.until
                    }
                    _ => false,
                });
            }
            (Self::SkipOtherContent, Step::DeliverOther { event, .. }, _) => {
                for stored in &mut rows.rows {
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
                | Self::PurgeLane
                | Self::PurgeEarly
                | Self::SkipOtherContent
                | Self::SplitOrder
                | Self::LoseFailed
                | Self::ForgetDue
                | Self::MovePast
                | Self::BlindEdit
                | Self::BackoffForever
                | Self::DropInboxRow,
                _,
                _,
            ) => {}
        }
    }

    /// All events that are pending, as if a purge had been answered with them.
    fn pending(state: &State) -> Vec<Delivery> {
        let events = table(state, Table::Events).into_iter().filter_map(|event| {
            let Record::Event(row) = event.record else { return None };
            let outbox = stored(state, &Key::Outbox(row.event.id.clone()));
            let outbox = outbox.and_then(|outbox| match outbox.record {
                Record::Outbox(_, row) => Some((row, outbox.revision)),
                _ => None,
            });
            let lane = stored(state, &Key::Lane(row.event.ordering_key.clone().into()))?;
            let Record::Lane(_, lane) = lane.record else { return None };
            let delivery = Delivery::new(row, outbox, false);
            let state = EventState::of(&lane, &delivery.row);
            matches!(state, EventState::Pending | EventState::Leased).then_some(delivery)
        });
        events.collect()
    }

    /// Changes what a transition decided over these tables.
    pub(crate) fn changes(self, step: &Step, state: &State, changes: &mut Vec<Change>) {
        match (self, step) {
            (Self::SplitOrder, Step::Commit { .. }) => changes.retain(|change| match change {
                Change::Put { record, .. } => {
                    matches!(record, Record::Request(..) | Record::Order(..))
                }
                Change::Delete { .. } | Change::Lane { .. } => true,
            }),
            (Self::LoseFailed, Step::Settle { .. }) => {
                for change in changes {
                    if let Change::Put { record: Record::Outbox(id, row), .. } = change
                        && row.state == DeliveryState::Pending
                    {
                        let key = Key::Event(id.clone());
                        *change = Change::Delete { expect: Revision::FIRST, key };
                    }
                }
            }
            (Self::ForgetDue, Step::Settle { .. }) => {
                rewrite_lanes(state, changes, |row| row.due = None);
            }
            (Self::MovePast, Step::Claim { .. }) => {
                for row in lanes_put(changes) {
                    row.head = (row.head + 1).min(row.next);
                }
            }
            // It only passes over, and does not say that what it passes over is confirmed.
            (Self::PassOver, Step::Claim { .. }) => {
                for change in changes {
                    if let Change::Put { record: Record::Lane(key, row), .. } = change
                        && let Some(Stored { record: Record::Lane(_, before), .. }) =
                            stored(state, &Key::Lane(key.clone()))
                    {
                        row.head = before.head;
                    }
                }
            }
            (Self::IgnoreToken, Step::Settle { .. } | Step::Renew { .. })
            | (Self::BlindEdit, Step::Settle { .. }) => rewrite_lanes(state, changes, |_| {}),
            (Self::BackoffForever, Step::Settle { .. }) => {
                let failed = |change: &Change| matches!(change, Change::Put { record: Record::Outbox(_, row), .. } if row.state == DeliveryState::Pending);
                if changes.iter().any(failed) {
                    for change in changes {
                        match change {
                            Change::Put { record: Record::Outbox(_, row), .. } => {
                                row.due = Millis::MAX;
                            }
                            Change::Lane { edit: LaneEdit::Free { due, .. }, .. } => {
                                *due = Millis::MAX;
                            }
                            _ => {}
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
                | Self::PurgeLane
                | Self::PurgeEarly
                | Self::SkipOtherContent
                | Self::SplitOrder
                | Self::LoseFailed
                | Self::ForgetDue
                | Self::MovePast
                | Self::BlindEdit
                | Self::BackoffForever
                | Self::DropInboxRow,
                _,
            ) => {}
        }
    }
}

/// The rows of lanes that are written in full.
fn lanes_put(changes: &mut [Change]) -> impl Iterator<Item = &mut LaneRow> {
    changes.iter_mut().filter_map(|change| match change {
        Change::Put { record: Record::Lane(_, row), .. } => Some(row),
        _ => None,
    })
}

/// Writes the lanes that are edited in full, whatever token the edit names, with a change to what
/// comes of it.
fn rewrite_lanes(state: &State, changes: &mut [Change], rewrite: impl Fn(&mut LaneRow)) {
    for change in changes {
        if let Change::Lane { key, edit, at, .. } = change
            && let Some(Stored { record: Record::Lane(_, row), revision }) =
                stored(state, &Key::Lane(key.clone()))
            && let Some(mut row) = row.edited(row.token, edit, *at)
        {
            rewrite(&mut row);
            let expect = Expect::Revision(revision);
            *change = Change::Put { expect, record: Record::Lane(key.clone(), row) };
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
