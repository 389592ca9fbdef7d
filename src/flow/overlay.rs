//! Several transitions over rows that were loaded once, written once: what one of them decides, the
//! next one sees.

use alloc::vec::Vec;

use crate::boundary::{Batch, Change, Decision, Query, Rows, Transition, Write};
use crate::table::{Key, Revision, Stored};
use crate::time::Millis;

/// Rows as they were loaded, and as the transitions so far have changed them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Overlay {
    /// In the order of their keys.
    rows: Vec<(Key, Row)>,
}

#[derive(Debug, Clone)]
struct Row {
    /// The revision that the store has; `None` if it has no such row.
    stored: Option<Revision>,
    /// What is there now; `None` if nothing is.
    now: Option<Stored>,
    changed: bool,
}

impl Overlay {
    /// These rows, with room for as many as there will be at most.
    pub(crate) fn new(rows: &Rows, most: usize) -> Self {
        debug_assert!(rows.rows.is_sorted_by_key(|stored| stored.record.key()));
        let row = |stored: &Stored| {
            let there = Some(stored.revision);
            (stored.record.key(), Row { stored: there, now: Some(stored.clone()), changed: false })
        };
        let mut kept = Vec::with_capacity(most.max(rows.rows.len()));
        kept.extend(rows.rows.iter().map(row));
        Self { rows: kept }
    }

    /// Decides over the rows as they are now. All rows that are asked for must have been looked for
    /// in the store.
    pub(crate) fn decide<T: Transition>(
        &self,
        transition: &T,
        now: Millis,
    ) -> Result<Decision<T::Outcome>, T::Refusal> {
        let query = transition.query(now);
        debug_assert!(matches!(query, Query::Rows(_)), "an overlay answers by keys alone");
        let keys = if let Query::Rows(keys) = &query { keys.as_slice() } else { &[] };
        let mut rows = Vec::new();
        for (n, key) in keys.iter().enumerate() {
            let Ok(at) = self.find(key) else { continue };
            if let Some(row) = &self.rows[at].1.now {
                rows.reserve_exact(keys.len() - n);
                rows.push(row.clone());
            }
        }
        transition.decide(now, &Rows::of(rows))
    }

    /// Runs a transition.
    pub(crate) fn run<T: Transition>(
        &mut self,
        transition: &T,
        now: Millis,
    ) -> Result<T::Outcome, T::Refusal> {
        let Decision { batch, outcome } = self.decide(transition, now)?;
        self.keep(&batch);
        Ok(outcome)
    }

    /// Keeps what was decided over the rows as they are now.
    pub(crate) fn keep(&mut self, batch: &Batch) {
        batch.changes().iter().for_each(|change| self.apply(change));
    }

    fn find(&self, key: &Key) -> Result<usize, usize> {
        // Most are asked for in their order, and are not there yet.
        match self.rows.last() {
            Some((last, _)) if last < key => Err(self.rows.len()),
            _ => self.rows.binary_search_by(|(there, _)| there.cmp(key)),
        }
    }

    fn apply(&mut self, change: &Change) {
        let key = change.key();
        let at = self.find(&key).unwrap_or_else(|at| {
            self.rows.insert(at, (key, Row { stored: None, now: None, changed: false }));
            at
        });
        let row = &mut self.rows[at].1;
        // The decision was made over this row, so its guard holds.
        let write = change.on(row.now.as_ref());
        debug_assert!(write.is_some(), "a transition has not seen what it changes");
        row.changed = true;
        row.now = match write {
            Some(Write::Put(record, revision)) => {
                Some(Stored { record: record.into_owned(), revision })
            }
            Some(Write::Remove) | None => None,
        };
    }

    /// What all of them have changed, under guards of what the store has.
    pub(crate) fn into_batch(self) -> Batch {
        let mut batch = Batch::with_capacity(self.rows.len());
        for (key, row) in self.rows.into_iter().filter(|(_, row)| row.changed) {
            match (row.now.map(|stored| stored.record), row.stored) {
                (Some(record), found) => batch.put(found, record),
                (None, Some(revision)) => batch.delete(revision, key),
                (None, None) => {}
            }
        }
        batch
    }
}
