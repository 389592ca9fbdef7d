//! End the leases of those who are gone (F32).

use core::num::NonZeroU16;

use crate::boundary::{Batch, Decision, Query, Rows, Transition};
use crate::table::{Key, Record, Stored, Table};
use crate::time::Millis;

/// Ends the leases of a page of lanes, whoever holds them: for a store that one process has alone,
/// when that process opens it. Whoever held a lease is gone by then, and nobody would deliver those
/// lanes before the lease ran out.
///
/// | the lane is     | what is written                                   |
/// |-----------------|---------------------------------------------------|
/// | leased          | the lane: no lease, due since it changed last     |
/// | not leased      | nothing                                           |
///
/// The token stays, and the next claim takes a later one, so that a holder who is not gone after all
/// is refused as stale (P6). The starts stay too: they were not answered, and count (F4).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EndLeases {
    after: Option<Key>,
    limit: NonZeroU16,
}

impl EndLeases {
    /// Looks at the first `limit` lanes, in the order of their keys.
    #[must_use]
    pub const fn new(limit: NonZeroU16) -> Self {
        Self { after: None, limit }
    }

    /// Looks at those after this one, as [`LeasesEnded::next`] says; it must be the key of a lane.
    #[must_use]
    pub fn after(mut self, key: Key) -> Self {
        self.after = Some(key);
        self
    }
}

/// What became of leases.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[must_use]
pub struct LeasesEnded {
    /// How many were ended.
    pub ended: usize,
    /// Where to go on; `None` at the end of the table.
    pub next: Option<Key>,
}

impl Transition for EndLeases {
    type Outcome = LeasesEnded;
    type Refusal = core::convert::Infallible;

    fn query(&self, _now: Millis) -> Query {
        let limit = self.limit.get().into();
        Query::Walk { table: Table::Lanes, after: self.after.clone(), limit }
    }

    fn decide(&self, _now: Millis, rows: &Rows) -> Result<Decision<LeasesEnded>, Self::Refusal> {
        let mut batch = Batch::new();
        let mut ended = 0;
        for Stored { record, revision } in &rows.rows {
            if let Record::Lane(key, row) = record
                && row.lease.is_some()
            {
                let mut row = row.clone();
                // Times are compared with times of the lane, so no clock is needed. A claim looks at
                // when the first event is due.
                row.free(row.changed_at, row.head, row.changed_at);
                batch.update(*revision, Record::Lane(key.clone(), row));
                ended += 1;
            }
        }
        let full = rows.rows.len() >= usize::from(self.limit.get());
        let next = rows.rows.last().filter(|_| full).map(|last| last.record.key());
        Ok(Decision::new(batch, LeasesEnded { ended, next }).may_be_lost())
    }
}
