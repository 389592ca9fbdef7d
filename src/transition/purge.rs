//! Purge: remove what is finished and past its retention, in bounded batches (P7, F16).

use core::num::NonZeroU16;
use core::time::Duration;

use crate::boundary::{Batch, Decision, Query, Rows, Transition};
use crate::checked::Checked;
use crate::retention::Retention;
use crate::table::{CallState, InboxState, Key, Record, Revision, Table};
use crate::time::Millis;

/// Looks at one page of a table and removes what has been finished for longer than its retention.
///
/// | table     | what is removed                                                  | what stays, whatever its age |
/// |-----------|------------------------------------------------------------------|------------------------------|
/// | outbox    | confirmed, cancelled and discarded, each with its event          | pending, dead                |
/// | lanes     | idle ones                                                        | with a pending or dead event to wait for |
/// | requests  | with an order placed                                             | without an order             |
/// | orders    | all, if orders have a retention                                  |                              |
/// | inbox     | applied, each with its effect                                    | failing, poisoned            |
/// | positions | all, if positions have a retention                               |                              |
/// | calls     | done                                                             | intended, started, unknown   |
///
/// Events and effects go with the row that they belong to; to purge those tables themselves removes
/// nothing. The ages are counted from the time at which a row came into its last state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Purge<'a> {
    retention: &'a Checked<Retention>,
    table: Table,
    after: Option<Key>,
    limit: NonZeroU16,
}

impl<'a> Purge<'a> {
    /// The tables that there is something to purge from, in a good order.
    pub const TABLES: [Table; 7] = [
        Table::Outbox,
        Table::Lanes,
        Table::Requests,
        Table::Orders,
        Table::Inbox,
        Table::Positions,
        Table::Calls,
    ];

    /// Looks at `limit` rows of a table, from its beginning.
    #[must_use]
    pub const fn new(retention: &'a Checked<Retention>, table: Table, limit: NonZeroU16) -> Self {
        Self { retention, table, after: None, limit }
    }

    /// The same for the rows after this one, as [`Purged::next`] says.
    #[must_use]
    pub fn after(mut self, key: Key) -> Self {
        self.table = key.table();
        self.after = Some(key);
        self
    }

    /// Whether a row that came into its state at this time may go.
    fn is_past(now: Millis, at: Millis, age: Duration) -> bool {
        now.since(at) > age
    }
}

/// What a purge did.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use]
pub struct Purged {
    /// How many rows of the table are gone.
    pub removed: usize,
    /// Where to go on; `None` at the end of the table.
    pub next: Option<Key>,
}

impl Transition for Purge<'_> {
    type Outcome = Purged;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        Query::Walk { table: self.table, after: self.after.clone(), limit: self.limit.get().into() }
    }

    fn decide(&self, now: Millis, rows: &Rows) -> Result<Decision<Purged>, Self::Refusal> {
        let kept = self.retention;
        // Rows that go with others are of another table.
        let (mut batch, mut others) = (Batch::new(), Batch::new());
        let mut removed = 0;
        for stored in rows.as_slice() {
            // What goes with a row was written once, so its revision is the first.
            let (past, with) = match &stored.record {
                Record::Request(_, row) => (
                    row.placed
                        .as_ref()
                        .is_some_and(|placed| Self::is_past(now, placed.at, kept.requests)),
                    None,
                ),
                Record::Order(_, row) => {
                    (kept.orders.is_some_and(|age| Self::is_past(now, row.committed_at, age)), None)
                }
                Record::Outbox(id, row) => {
                    let past = row
                        .state
                        .finished_at()
                        .is_some_and(|at| Self::is_past(now, at, kept.events));
                    (past, Some(Key::Event(id.clone())))
                }
                Record::Lane(_, row) => {
                    let idle = row.due.is_none() && row.blocked_by.is_none() && row.lease.is_none();
                    (idle && Self::is_past(now, row.changed_at, kept.events), None)
                }
                Record::Inbox(consumer, id, row) => match row.state {
                    InboxState::Applied => {
                        let effect = row.effect.then(|| Key::Effect(consumer.clone(), id.clone()));
                        (Self::is_past(now, row.at, kept.inbox), effect)
                    }
                    InboxState::Failing | InboxState::Poisoned => (false, None),
                },
                Record::Position(_, _, row) => {
                    (kept.positions.is_some_and(|age| Self::is_past(now, row.at, age)), None)
                }
                Record::Call(_, _, row) => match row.state {
                    CallState::Done => (Self::is_past(now, row.at, kept.inbox), None),
                    CallState::Intended | CallState::Started | CallState::Unknown => (false, None),
                },
                Record::Event(_) | Record::Effect(..) => (false, None),
            };
            if past {
                batch.delete(stored.revision, stored.record.key());
                with.into_iter().for_each(|key| others.delete(Revision::FIRST, key));
                removed += 1;
            }
        }
        batch.append(others);
        let full = rows.as_slice().len() == usize::from(self.limit.get());
        let next = rows.as_slice().last().filter(|_| full).map(|stored| stored.record.key());
        Ok(Decision::new(batch, Purged { removed, next }))
    }
}
