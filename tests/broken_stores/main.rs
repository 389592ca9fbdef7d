//! The kit is tested itself: stores that are wrong on purpose, each in one way that a real one was
//! or could be, must fail it, with a message that says what is wrong.

#![allow(clippy::unwrap_used, reason = "what is made of valid parts is valid")]

mod answers;
mod columns;
mod commits;
mod defect;
mod disk;
mod drivers;
mod guards;
mod index;
mod sizes;
mod store;

use std::cell::Cell;

use defect::{Defect, RIGHT, Way};
use disk::Disk;
use store::Small;
use twobox::Key;
use twobox_conformance::{
    Damage, ErrorOf, Harness, TxOf, check, contract, failures, matrix, scenario,
};

thread_local! {
    /// What is wrong with the stores that this thread opens.
    static DEFECT: Cell<&'static Defect> = const { Cell::new(&RIGHT) };
}

/// The harness of the store with that defect.
pub(crate) struct Broken(Small);

impl Harness for Broken {
    type Store = Small;

    fn open() -> Self {
        Self(Small::new(DEFECT.get()))
    }

    fn crash(self) -> Self {
        Self(self.0.crash())
    }

    fn store(&self) -> &Small {
        &self.0
    }

    fn put_own_row(tx: &mut TxOf<'_, Self>, key: &str, value: &str) -> Result<(), ErrorOf<Self>> {
        tx.put_own(key, value);
        Ok(())
    }

    fn own_row(tx: &mut TxOf<'_, Self>, key: &str) -> Result<Option<String>, ErrorOf<Self>> {
        Ok(tx.own(key))
    }
}

impl Damage for Broken {
    fn damage(self, row: &Key) -> Result<Self, String> {
        Ok(Self(self.0.damage(row)))
    }

    fn open_as(self, version: u32) -> Result<Self, String> {
        if self.0.opens(version) { Ok(self) } else { Err("another version".to_string()) }
    }
}

/// The store itself is right: without a defect nothing fails.
#[test]
fn a_store_without_a_defect_passes() {
    let found = failures::<Broken>();
    assert!(found.is_empty(), "{found:#?}");
}

twobox_conformance::suite_damage!(Broken);

/// A store with this defect must fail this check, and be told so in these words.
fn must_fail(name: &str, defect: &'static Defect, found_by: &str, says: &[&str]) {
    DEFECT.set(defect);
    let found = match found_by {
        "damage::a_damaged_row_is_an_error" => contract::a_damaged_row_is_an_error::<Broken>(),
        "damage::another_format_is_refused" => contract::another_format_is_refused::<Broken>(),
        "faults::buy_once" => matrix::singles::<Broken>(&scenario::buy_once).map(drop),
        _ => check::<Broken>(found_by),
    };
    let others = found.is_ok().then(failures::<Broken>);
    assert!(others.is_none(), "a store that {name} must fail {found_by}; it fails {others:#?}");
    let text = found.unwrap_err().to_string();
    for word in says {
        assert!(text.contains(word), "{name}: {word:?} is not said in: {text}");
    }
}

/// A store that does something in its own way, which is right, must pass.
fn must_pass(way: &'static Defect, found_by: &str) {
    DEFECT.set(way);
    let found = check::<Broken>(found_by);
    assert!(found.is_ok(), "{found:?}");
}

/// Defects by name, each with the check that finds it, and with what that must say: each is a test.
macro_rules! defects {
    ($($name:ident: $found_by:literal, [$($says:literal),+], $defect:expr;)+) => {$(
        #[test]
        fn $name() {
            static DEFECT: Defect = $defect;
            crate::must_fail(stringify!($name), &DEFECT, $found_by, &[$($says),+]);
        }
    )+};
}

pub(crate) use defects;
