//! The whole kit on the store of bytes, and what it does with bytes that are damaged.

#![allow(clippy::unwrap_used, reason = "a harness that cannot open its store has nothing to test")]

use std::error::Error;

use twobox::codec::encode_key;
use twobox::{
    Destinations, Due, Fingerprint, Key, Load as _, Millis, Query, Reader as _, Register, Request,
    Store as _, Table,
};
use twobox_bytes::{BytesError, BytesStore, Map};
use twobox_conformance::{ErrorOf, Harness, Reference, TxOf};

struct Bytes(BytesStore);

fn own(key: &str) -> Vec<u8> {
    [&[255], key.as_bytes()].concat()
}

impl Harness for Bytes {
    type Store = BytesStore;
    const OWN_ROWS: bool = true;

    fn open() -> Self {
        Self(BytesStore::default())
    }

    fn crash(self) -> Self {
        Self(BytesStore::open(self.0.bytes()).unwrap())
    }

    fn store(&self) -> &BytesStore {
        &self.0
    }

    fn put_own_row(tx: &mut TxOf<'_, Self>, key: &str, value: &str) -> Result<(), ErrorOf<Self>> {
        tx.map().insert(own(key), value.into());
        Ok(())
    }

    fn own_row(tx: &mut TxOf<'_, Self>, key: &str) -> Result<Option<String>, ErrorOf<Self>> {
        Ok(tx.map().get(&own(key)).map(|value| String::from_utf8_lossy(value).into_owned()))
    }
}

twobox_conformance::suite!(Bytes, pairs: 20, reference: Reference);

/// A damaged row is an error that names its key, in each way of reading it, and never left out.
#[test]
fn a_damaged_row_is_an_error_that_names_it() -> Result<(), Box<dyn Error>> {
    let store = BytesStore::default();
    let request = Request::new("customer-7", "req-001", Fingerprint::of([("item", "notebook")]))?;
    store.run(Register::new(&request), Millis::new(1_000))?;
    let mut map = store.bytes();
    let mut key = vec![Table::Requests.number()];
    encode_key(&Key::Request(request.key.clone()), &mut key);
    map.get_mut(&key).unwrap().pop();
    let store = BytesStore::open(map)?;
    let mut view = store.view()?;
    let errors =
        [view.request(&request.key).unwrap_err(), view.walk(Table::Requests, None, 9).unwrap_err()];
    for error in errors {
        assert!(error.to_string().contains("customer-7\\x00req-001"), "{error}");
    }
    assert!(store.run(Register::new(&request), Millis::new(2_000)).is_err());
    Ok(())
}

/// An index entry whose row is gone is an error that names the row, and never left out: a lane that
/// is due, and a dead event.
#[test]
fn what_is_missing_is_an_error_that_names_it() -> Result<(), Box<dyn Error>> {
    let mut map = BytesStore::default().bytes();
    map.insert([&[100, 0][..], &1_u64.to_be_bytes(), b"lane-1"].concat(), Vec::new());
    map.insert([&[102][..], b"event-1"].concat(), Vec::new());
    let mut view = BytesStore::open(map)?.view()?;
    let due = Due {
        destinations: Destinations::ALL,
        now: Millis::new(9),
        floor: Millis::new(0),
        lanes: 9,
        run: 9,
        events: 9,
        bytes: 9,
    };
    let asked = [
        (Query::Due(due), "lanes lane-1"),
        (Query::Stats { now: Millis::new(9) }, "lanes lane-1"),
        (Query::Dead { after: None, limit: 9 }, "events event-1"),
    ];
    for (query, key) in asked {
        let error = view.load(&query).unwrap_err();
        assert!(matches!(&error, BytesError::Inconsistent(found) if found.key.to_string() == key));
    }
    Ok(())
}

/// Bytes of another program, or another version, are refused.
#[test]
fn the_format_is_checked() {
    assert_eq!(BytesStore::open(Map::new()).unwrap_err(), BytesError::Format);
    let mut map = BytesStore::default().bytes();
    map.values_mut().for_each(|version| version.push(0));
    assert_eq!(BytesStore::open(map).unwrap_err(), BytesError::Format);
}
