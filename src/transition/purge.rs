//! Purge: remove what is finished and past its retention, in bounded batches (P7, F16).

use core::num::NonZeroU16;
use core::time::Duration;

use crate::boundary::{Batch, Decision, Finished, Query, Rows, Transition};
use crate::checked::Checked;
use crate::retention::Retention;
use crate::table::{InboxRow, Key, Record, Revision, Stored, Table};
use crate::time::Millis;

/// Removes rows of a table that have been finished for longer than their retention.
///
/// | table     | what is removed                                                  | what stays, whatever its age |
/// |-----------|------------------------------------------------------------------|------------------------------|
/// | events    | confirmed, cancelled and discarded, each with its row in the outbox | pending, dead             |
/// | lanes     | idle ones without events                                         | with an event left           |
/// | requests  | with an order placed, if orders have a retention                 | without an order, or with an event that stays |
/// | orders    | whose request is gone, if orders have a retention                | with its request left        |
/// | inbox     | applied, each with its effect                                    | failing, poisoned            |
/// | positions | all, if positions have a retention                               |                              |
/// | calls     | done                                                             | intended, started, unknown   |
///
/// An order that is still to be delivered, or was given up and not discarded, keeps its request, and
/// that keeps the order (P2, P3): a request says which events are of its order.
///
/// Rows of the outbox and effects go with the row that they belong to; to purge those tables
/// themselves removes nothing. The ages are counted from the time at which a row came into its last
/// state; that of a confirmed event from its commit.
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
        Table::Events,
        Table::Lanes,
        Table::Requests,
        Table::Orders,
        Table::Inbox,
        Table::Positions,
        Table::Calls,
    ];

    /// Removes at most `limit` rows of a table, from its beginning.
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

    /// For how long what is finished is kept; `None` for ever.
    fn age(&self) -> Option<Duration> {
        match self.table {
            Table::Events | Table::Lanes => Some(self.retention.events),
            // A key goes with its order: a retry would place that again (F53).
            Table::Requests | Table::Orders => self.retention.orders,
            Table::Inbox | Table::Calls => Some(self.retention.inbox),
            Table::Positions => self.retention.positions,
            Table::Outbox | Table::Effects => None,
        }
    }
}

/// What a purge did.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
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

    fn query(&self, now: Millis) -> Query {
        // A row goes when it is older than its age, and not before.
        let age = self.age().map(|age| age + Duration::from_millis(1));
        match age.filter(|age| now.since(Millis::new(0)) >= *age) {
            None => Query::none(),
            Some(age) => Query::Finished(Finished {
                table: self.table,
                until: now.before(age),
                after: self.after.clone(),
                limit: self.limit.get().into(),
            }),
        }
    }

    fn decide(&self, _now: Millis, rows: &Rows) -> Result<Decision<Purged>, Self::Refusal> {
        // Rows that go with others are of another table.
        let (mut batch, mut others) = (Batch::new(), Batch::new());
        for Stored { record, revision } in &rows.rows {
            batch.delete(*revision, record.key());
            if let Record::Inbox(consumer, id, InboxRow { effect: true, .. }) = record {
                // An effect is written once, with its inbox row.
                others.delete(Revision::FIRST, Key::Effect(consumer.clone(), id.clone()));
            }
        }
        for delivery in &rows.deliveries {
            // As is an event.
            batch.delete(Revision::FIRST, Key::Event(delivery.id.clone()));
            if let Some(revision) = delivery.revision {
                others.delete(revision, Key::Outbox(delivery.id.clone()));
            }
        }
        batch.append(others);
        let removed = rows.rows.len() + rows.deliveries.len();
        Ok(Decision::new(batch, Purged { removed, next: rows.next.clone() }))
    }
}
