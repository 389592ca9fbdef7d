//! What a query reads, and what it does not. That its answer is right is for the conformance kit to
//! say.

use twobox::{Destinations, Due, Load, Query, Reader, Record};
use twobox_redb::{RedbError, RedbStore};

use crate::common::{Disk, at, event_row, fill, lane, lane_row};

type Rows = redb::TableDefinition<'static, &'static [u8], &'static [u8]>;
const PLACES: Rows = redb::TableDefinition::new("twobox_places");
const LANES: Rows = redb::TableDefinition::new("twobox_lanes");

/// What a claim does not need is not looked at: rows that cannot be read there do not disturb it.
#[test]
fn due_reads_nothing_that_is_confirmed_waits_or_comes_later() {
    let smash = |store: &RedbStore, table: Rows, key: &[u8]| {
        let tx = store.database().unwrap().begin_write().unwrap();
        tx.open_table(table).unwrap().insert(key, &b"x"[..]).unwrap();
        tx.commit().unwrap();
    };
    let place = |sequence: u64| [b"\0now\0", &sequence.to_be_bytes()[..]].concat();
    let store = RedbStore::create_on(Disk::default()).unwrap();
    let (now, later, last) = (lane("now"), lane("later"), lane("last"));
    let passed = twobox::LaneRow { next: 4, head: 2, confirmed: 1, ..lane_row(Some(at(10))) };
    fill(
        &store,
        vec![
            Record::Lane(now.clone().into(), passed),
            Record::Lane(later.into(), lane_row(Some(at(20)))),
            Record::Lane(last.into(), lane_row(Some(at(30)))),
            Record::Event(event_row("e1", &now, 1, 1)),
            Record::Event(event_row("e2", &now, 2, 2)),
            Record::Event(event_row("e3", &now, 3, 3)),
        ],
    );
    for (table, key) in [(PLACES, place(1)), (PLACES, place(3)), (LANES, b"\0last".to_vec())] {
        smash(&store, table, &key);
    }
    let most = Due {
        destinations: Destinations::ALL,
        now: at(10),
        floor: at(0),
        lanes: 9,
        run: 1,
        events: 9,
        bytes: 999,
    };
    let due = Query::Due(most);
    let lanes = store.view().unwrap().load(&due).unwrap().lanes;
    let found: Vec<_> = lanes
        .iter()
        .map(|lane| {
            (
                lane.key.ordering_key.as_str(),
                lane.pending.iter().map(|next| next.id.as_str()).collect(),
            )
        })
        .collect();
    assert_eq!(found, [("now", vec!["e2"]), ("later", vec![])]);

    // What it does need has to be whole.
    for (table, key) in [(LANES, b"\0later".to_vec()), (PLACES, place(2))] {
        smash(&store, table, &key);
        let error = store.view().unwrap().load(&due).unwrap_err();
        assert!(matches!(error, RedbError::Checksum { .. }), "{error}");
    }
}
