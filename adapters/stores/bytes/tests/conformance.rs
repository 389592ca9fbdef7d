//! The whole kit on the store of bytes, and what it does with bytes that are damaged.

use std::error::Error;

use twobox::codec::encode_key;
use twobox::{
    Fingerprint, Key, Load as _, Millis, Reader as _, Register, Request, Store as _, Table,
};
use twobox_bytes::{BytesError, BytesStore, Map};
use twobox_conformance::{ErrorOf, Harness, Reference, TxOf};

struct Bytes(BytesStore);

impl Harness for Bytes {
    type Store = BytesStore;
    const OWN_ROWS: bool = true;

    fn open() -> Self {
        Self(BytesStore::new())
    }

    fn crash(self) -> Self {
        Self(BytesStore::open(self.0.bytes()).unwrap())
    }

    fn store(&self) -> &BytesStore {
        &self.0
    }

    fn put_own_row(tx: &mut TxOf<'_, Self>, key: &str, value: &str) -> Result<(), ErrorOf<Self>> {
        tx.put_own(key, value);
        Ok(())
    }

    fn own_row(tx: &mut TxOf<'_, Self>, key: &str) -> Result<Option<String>, ErrorOf<Self>> {
        Ok(tx.own(key).map(|value| String::from_utf8_lossy(value).into_owned()))
    }
}

twobox_conformance::suite!(Bytes, pairs: 20, reference: Reference);

/// A damaged row is an error that names its key, in each way of reading it, and never left out.
#[test]
fn a_damaged_row_is_an_error_that_names_it() -> Result<(), Box<dyn Error>> {
    let store = BytesStore::new();
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

/// Bytes of another program, or another version, are refused.
#[test]
fn the_format_is_checked() {
    assert_eq!(BytesStore::open(Map::new()).unwrap_err(), BytesError::Format);
    let mut map = BytesStore::new().bytes();
    map.values_mut().for_each(|version| version.push(0));
    assert_eq!(BytesStore::open(map).unwrap_err(), BytesError::Format);
}
