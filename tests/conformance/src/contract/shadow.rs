//! The tables as they must be: all rows, to which every change is applied as it says, and the
//! questions to compare them with a store.

use std::collections::BTreeMap;

use twobox::{
    Batch, Destinations, Due, EventId, Finished, Key, Load, Millis, Query, Record, Stored, Table,
    Write,
};

use super::model::{Model, pages};
use super::{load, same, same_answer};
use crate::failure::Failure;

/// All rows, in the order of their keys.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Shadow {
    rows: BTreeMap<Key, Stored>,
}

impl Shadow {
    pub(super) fn get(&self, key: &Key) -> Option<&Stored> {
        self.rows.get(key)
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = &Stored> {
        self.rows.values()
    }

    pub(super) fn stored(&self) -> Vec<Stored> {
        self.rows.values().cloned().collect()
    }

    /// Applies a batch, or says which guard does not hold.
    pub(super) fn apply(&mut self, batch: &Batch) -> Result<(), Key> {
        let mut writes = Vec::new();
        for change in batch.changes() {
            let key = change.key();
            match change.on(self.rows.get(&key)) {
                None => return Err(key),
                Some(write) => writes.push((key, write)),
            }
        }
        for (key, write) in writes {
            match write {
                Write::Put(record, revision) => {
                    self.rows.insert(key, Stored { record: record.into_owned(), revision });
                }
                Write::Remove => drop(self.rows.remove(&key)),
            }
        }
        Ok(())
    }

    /// Compares all tables, and the answers to all kinds of queries, with those of a store. The
    /// limits are those at which answers are cut; without a limit everything is asked for anyway.
    pub(super) fn check(
        &self,
        tables: &mut impl Load,
        limits: &[usize],
        when: &str,
    ) -> Result<(), Failure> {
        let rows = self.stored();
        for table in Table::ALL {
            let walk = Query::Walk { table, after: None, limit: usize::MAX };
            let right = rows.iter().filter(|row| row.record.table() == table).cloned();
            let right: Vec<Stored> = right.collect();
            let what = format!("{when}, the answer to {walk:?}");
            same(&what, &load(tables, &walk)?.rows, &right)?;
        }
        let model = Model::new(&rows);
        for query in self.questions(limits)? {
            let found = load(tables, &query)?;
            if let Some(right) = model.answer(&query) {
                let what = || format!("{when}, the answer to {}", crate::failure::short(&query));
                same_answer(&what(), &found, &right)?;
            }
        }
        for table in Table::ALL {
            for until in [9, i64::MAX as u64].map(Millis::new) {
                for limit in limits.iter().copied() {
                    let from = Finished { table, until, after: None, limit };
                    pages(tables, &model, from).map_err(|failure| failure.at(when))?;
                }
            }
        }
        Ok(())
    }

    fn questions(&self, limits: &[usize]) -> Result<Vec<Query>, Failure> {
        let all = usize::MAX;
        let keys: Vec<Key> = self.rows.keys().cloned().collect();
        let events = self.rows().filter_map(|row| {
            if let Record::Event(row) = &row.record { Some(row.event.id.clone()) } else { None }
        });
        let mut events: Vec<EventId> = events.collect();
        let dues = self
            .rows()
            .filter_map(|row| if let Record::Lane(_, row) = &row.record { row.due } else { None });
        let mut dues: Vec<Millis> = dues.collect();
        dues.sort_unstable();
        let middle = dues.get(dues.len() / 2).copied().unwrap_or_default();
        let late = Millis::new(i64::MAX as u64 - 1);
        let due = |now, floor, lanes, run, events, bytes| {
            Query::Due(Due {
                destinations: Destinations::ALL,
                now,
                floor,
                lanes,
                run,
                events,
                bytes,
            })
        };
        let start = Millis::new(0);
        let mut queries = vec![
            due(late, start, all, all, all, all),
            due(middle, start, all, 2, all, all),
            due(late, middle, all, 1, all, all),
            Query::Dead { after: None, limit: all },
            Query::Deliveries { events: events.clone(), run: all },
            Query::rows(keys.iter().cloned()),
        ];
        for limit in limits.iter().copied() {
            queries.extend([
                due(late, start, limit, 1, all, all),
                due(late, start, all, limit, all, all),
                due(late, start, all, all, limit, all),
                due(late, start, all, all, all, limit),
                Query::Dead { after: None, limit },
                Query::Dead { after: events.get(events.len() / 2).cloned(), limit },
                Query::rows(keys.iter().take(limit).cloned()),
            ]);
            let walks = Table::ALL.map(|table| {
                let after = keys.iter().find(|key| key.table() == table).cloned();
                Query::Walk { table, after, limit }
            });
            queries.extend(walks);
        }
        events.push(EventId::new("nothing").map_err(Failure::new)?);
        events.sort_unstable();
        let events = events.into_iter().step_by(3).collect();
        queries.push(Query::Deliveries { events, run: 2 });
        // What is counted wrongly says least of what is wrong.
        queries.extend([Millis::new(13), middle, late].map(|now| Query::Stats { now }));
        Ok(queries)
    }
}
