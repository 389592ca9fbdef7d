//! Queries are answered, and batches applied, as a model says that keeps plain rows and looks at
//! all of them.

use std::collections::BTreeMap;

use proptest::prelude::*;
use twobox::{
    Applied, Batch, Change, DeliveryState, EventId, Expect, Key, Load, Millis, OrderingKey,
    OutboxRow, Query, Reader, Record, Revision, Store, Stored, Table, Tables, Transaction,
};
use twobox_redb::{RedbError, RedbStore};

use crate::common::{Disk, at, event, every_state, fill, lane, lane_row, outbox_row};

type Model = BTreeMap<Key, Stored>;

fn lanes(model: &Model) -> impl Iterator<Item = (&OrderingKey, Option<Millis>)> {
    model.values().filter_map(|stored| {
        if let Record::Lane(key, row) = &stored.record { Some((key, row.due)) } else { None }
    })
}

fn outbox(model: &Model) -> impl Iterator<Item = (&Stored, &EventId, &OutboxRow)> {
    model.values().filter_map(|stored| {
        if let Record::Outbox(id, row) = &stored.record { Some((stored, id, row)) } else { None }
    })
}

fn with_pending(model: &Model, name: &OrderingKey, run: usize, answer: &mut Vec<Stored>) {
    let Some(stored) = model.get(&Key::Lane(name.clone())) else { return };
    answer.push(stored.clone());
    let mut pending: Vec<_> = outbox(model)
        .filter(|(_, _, row)| row.lane == *name && row.state == DeliveryState::Pending)
        .collect();
    pending.sort_by_key(|(_, id, row)| (row.sequence, (*id).clone()));
    answer.extend(pending.into_iter().take(run).map(|(stored, ..)| stored.clone()));
}

/// The answer, from a look at all rows.
fn expected(model: &Model, query: &Query) -> Vec<Stored> {
    let mut answer = Vec::new();
    match query {
        Query::Rows(keys) => {
            answer.extend(keys.as_slice().iter().filter_map(|key| model.get(key)).cloned());
        }
        Query::Due { now, lanes: most, run, events } => {
            let mut by_due: Vec<_> =
                lanes(model).filter_map(|(key, due)| due.map(|due| (due, key))).collect();
            by_due.sort();
            let due = by_due.iter().filter(|(due, _)| due <= now).count();
            by_due.truncate((due + 1).min(*most));
            for (given, (due, key)) in by_due.into_iter().enumerate() {
                if answer.len() - given >= *events {
                    break;
                }
                with_pending(model, key, if due <= *now { *run } else { 0 }, &mut answer);
            }
        }
        Query::Lanes(names) => {
            names.iter().for_each(|(name, run)| with_pending(model, name, *run, &mut answer));
        }
        Query::Deliveries { events, run } => {
            let mut names = Vec::new();
            for (stored, _, row) in outbox(model).filter(|(_, id, _)| events.contains(id)) {
                answer.push(stored.clone());
                names.push(row.lane.clone());
            }
            names.sort();
            names.dedup();
            names.iter().for_each(|name| with_pending(model, name, *run, &mut answer));
        }
        Query::Pending { after, limit } => {
            let mut pending: Vec<_> = outbox(model)
                .filter(|(_, _, row)| row.state == DeliveryState::Pending)
                .map(|(stored, id, row)| ((row.lane.clone(), row.sequence, id.clone()), stored))
                .filter(|(place, _)| after.as_ref().is_none_or(|after| place > after))
                .collect();
            pending.sort_by(|(a, _), (b, _)| a.cmp(b));
            pending.truncate(*limit);
            for lane in pending.chunk_by(|((a, ..), _), ((b, ..), _)| a == b) {
                answer.extend(model.get(&Key::Lane(lane[0].0.0.clone())).cloned());
                answer.extend(lane.iter().map(|(_, stored)| (*stored).clone()));
            }
        }
        Query::Dead { after, limit } => {
            let dead = outbox(model).filter(|(_, id, row)| {
                matches!(row.state, DeliveryState::Dead(_))
                    && after.as_ref().is_none_or(|after| *id > after)
            });
            answer.extend(dead.take(*limit).map(|(stored, ..)| stored.clone()));
        }
        Query::Walk { table, after, limit } => {
            let rows = model.iter().filter(|(key, _)| {
                key.table() == *table && after.as_ref().is_none_or(|after| *key > after)
            });
            answer.extend(rows.take(*limit).map(|(_, stored)| stored.clone()));
        }
    }
    answer
}

fn expected_apply(model: &mut Model, batch: &Batch) -> Applied {
    for change in batch.changes() {
        let found = model.get(&change.key()).map(|stored| stored.revision);
        if !change.expect().holds(found) {
            return Applied::Conflict(change.key());
        }
    }
    for change in batch.changes() {
        match change {
            Change::Put { expect, record } => {
                model.insert(
                    change.key(),
                    Stored { record: record.clone(), revision: expect.written() },
                );
            }
            Change::Delete { key, .. } => {
                model.remove(key);
            }
        }
    }
    Applied::Written
}

// Names of which one begins another, so that a range that ends too early or too late is noticed.
const LANES: [&str; 4] = ["a", "aa", "a b", "b"];
const EVENTS: [&str; 6] = ["e", "e1", "e10", "e2", "f", "é"];

fn any_lane() -> impl Strategy<Value = OrderingKey> {
    (0..LANES.len()).prop_map(|n| lane(LANES[n]))
}

fn any_event() -> impl Strategy<Value = EventId> {
    (0..EVENTS.len()).prop_map(|n| event(EVENTS[n]))
}

fn any_state() -> impl Strategy<Value = DeliveryState> {
    prop_oneof![
        4 => Just(DeliveryState::Pending),
        1 => Just(DeliveryState::Confirmed(at(1))),
        2 => Just(DeliveryState::Dead(at(2))),
        1 => Just(DeliveryState::Discarded(at(3))),
        1 => Just(DeliveryState::Cancelled(at(4))),
    ]
}

fn any_record() -> impl Strategy<Value = Record> {
    prop_oneof![
        (any_lane(), proptest::option::of(0_u64..6))
            .prop_map(|(name, due)| Record::Lane(name, lane_row(due.map(|due| at(due * 50))))),
        (any_event(), any_lane(), 1_u64..300, any_state()).prop_map(
            |(id, name, sequence, state)| Record::Outbox(id, outbox_row(&name, sequence, state))
        ),
        (0..every_state().len()).prop_map(|n| every_state().swap_remove(n)),
    ]
}

/// A change of a row; whether it is a removal, and whether it expects the wrong thing.
fn any_change() -> impl Strategy<Value = (Record, bool, bool)> {
    (any_record(), proptest::bool::weighted(0.2), proptest::bool::weighted(0.05))
}

fn any_query() -> impl Strategy<Value = Query> {
    let few = || 0_usize..5;
    prop_oneof![
        proptest::collection::vec(any_record().prop_map(|record| record.key()), 0..6)
            .prop_map(Query::rows),
        (0_u64..300, few(), few(), 0_usize..9).prop_map(|(now, lanes, run, events)| Query::Due {
            now: at(now),
            lanes,
            run,
            events
        }),
        proptest::collection::vec((any_lane(), few()), 0..4).prop_map(|mut lanes| {
            lanes.sort();
            lanes.dedup_by(|a, b| a.0 == b.0);
            Query::Lanes(lanes)
        }),
        (proptest::collection::btree_set(any_event(), 0..5), few()).prop_map(|(events, run)| {
            Query::Deliveries { events: events.into_iter().collect(), run }
        }),
        (proptest::option::of((any_lane(), 0_u64..300, any_event())), few())
            .prop_map(|(after, limit)| Query::Pending { after, limit }),
        (proptest::option::of(any_event()), few())
            .prop_map(|(after, limit)| Query::Dead { after, limit }),
        (any_record(), any::<bool>(), few()).prop_map(|(record, from_start, limit)| Query::Walk {
            table: record.table(),
            after: (!from_start).then(|| record.key()),
            limit
        }),
    ]
}

fn batch(model: &Model, changes: Vec<(Record, bool, bool)>) -> Batch {
    let mut by_key = BTreeMap::new();
    for (record, remove, wrong) in changes {
        let key = record.key();
        let found = model.get(&key).map(|stored| stored.revision);
        let expect = match (found, wrong) {
            (None, false) => Expect::Absent,
            (None, true) => Expect::Revision(Revision::FIRST),
            (Some(revision), false) => Expect::Revision(revision),
            (Some(revision), true) => Expect::Revision(revision.next()),
        };
        let change = match expect {
            Expect::Revision(expect) if remove => Change::Delete { expect, key: key.clone() },
            Expect::Absent | Expect::Revision(_) => Change::Put { expect, record },
        };
        by_key.insert(key, change);
    }
    Batch::of(by_key.into_values().collect()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_query_is_answered_and_every_batch_applied_as_in_the_model(
        steps in proptest::collection::vec((proptest::collection::vec(any_change(), 0..8), proptest::bool::weighted(0.8)), 1..12),
        queries in proptest::collection::vec(any_query(), 12),
    ) {
        let store = RedbStore::create_on(Disk::default()).unwrap();
        let mut committed = Model::new();
        for (changes, commit) in steps {
            let mut model = committed.clone();
            let batch = batch(&model, changes);
            let mut tx = store.begin().unwrap();
            prop_assert_eq!(tx.apply(&batch).unwrap(), expected_apply(&mut model, &batch));
            let mut view = store.view().unwrap();
            for query in &queries {
                // Within the transaction what it wrote is seen, outside nothing of it.
                let (inside, outside) = (tx.load(query).unwrap(), view.load(query).unwrap());
                prop_assert_eq!(inside.as_slice(), expected(&model, query), "{:?}", query);
                prop_assert_eq!(outside.as_slice(), expected(&committed, query), "{:?}", query);
            }
            if commit {
                tx.commit().unwrap();
                committed = model;
            }
        }
        let mut view = store.view().unwrap();
        for table in Table::ALL {
            let all = Query::Walk { table, after: None, limit: usize::MAX };
            let rows = view.load(&all).unwrap();
            prop_assert_eq!(rows.as_slice(), expected(&committed, &all));
        }
    }
}

/// What a claim does not need is not looked at: rows that cannot be read there do not disturb it.
#[test]
fn due_reads_nothing_that_is_confirmed_waits_or_comes_later() {
    const OUTBOX: redb::TableDefinition<'_, &[u8], &[u8]> =
        redb::TableDefinition::new("twobox_outbox");
    const LANES: redb::TableDefinition<'_, &[u8], &[u8]> =
        redb::TableDefinition::new("twobox_lanes");
    let smash = |store: &RedbStore, table, key: &str| {
        let tx = store.database().begin_write().unwrap();
        tx.open_table(table).unwrap().insert(key.as_bytes(), &b"x"[..]).unwrap();
        tx.commit().unwrap();
    };
    let store = RedbStore::create_on(Disk::default()).unwrap();
    let (now, later, last) = (lane("now"), lane("later"), lane("last"));
    fill(
        &store,
        vec![
            Record::Lane(now.clone(), lane_row(Some(at(10)))),
            Record::Lane(later, lane_row(Some(at(20)))),
            Record::Lane(last, lane_row(Some(at(30)))),
            Record::Outbox(event("e1"), outbox_row(&now, 1, DeliveryState::Confirmed(at(5)))),
            Record::Outbox(event("e2"), outbox_row(&now, 2, DeliveryState::Pending)),
            Record::Outbox(event("e3"), outbox_row(&now, 3, DeliveryState::Pending)),
        ],
    );
    for (table, key) in [(OUTBOX, "e1"), (OUTBOX, "e3"), (LANES, "last")] {
        smash(&store, table, key);
    }
    let due = Query::Due { now: at(10), lanes: 9, run: 1, events: 9 };
    let rows = store.view().unwrap().load(&due).unwrap();
    let keys: Vec<String> =
        rows.as_slice().iter().map(|stored| stored.record.key().to_string()).collect();
    assert_eq!(keys, ["lanes now", "outbox e2", "lanes later"]);

    // What it does need has to be whole.
    for (table, key) in [(LANES, "later"), (OUTBOX, "e2")] {
        smash(&store, table, key);
        let error = store.view().unwrap().load(&due).unwrap_err();
        assert!(matches!(error, RedbError::Checksum { .. }), "{error}");
    }
}
