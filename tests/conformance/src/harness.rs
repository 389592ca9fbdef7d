//! What the author of an adapter writes: how to open a store, and how to crash it.

use twobox::{Key, Reader, Store};

use crate::faulty::Faulty;
use crate::own::Own;
use crate::side::Side;

/// The transaction of a harness' store.
pub type TxOf<'a, H> = <<H as Harness>::Store as Store>::Tx<'a>;

/// The error of a harness' store.
pub type ErrorOf<H> = <<H as Harness>::Store as Reader>::Error;

/// A store under test. It is implemented once for each adapter; see the [example](crate#example).
///
/// The kit opens thousands of stores, one after another and in several threads, so a store should
/// be cheap to open: in memory or in a temporary folder. What cannot be opened may panic, since
/// there is nothing to test then.
pub trait Harness: Sized + 'static {
    /// The store, which two threads write to at once.
    type Store: Store + Sync;

    /// Whether [`Harness::put_own_row`] and [`Harness::own_row`] are implemented. They should be
    /// for every store in which a user has tables of their own. What a scenario writes there is
    /// checked only if they are: of the stores in this repository that is redb, since the reference
    /// store holds nothing but the tables of twobox. The snapshots do not show such rows.
    const OWN_ROWS: bool = false;

    /// Whether a view and a transaction can be open at the same time, in one thread. Only a store
    /// with a single connection says no.
    const VIEWS_MEANWHILE: bool = true;

    /// Opens a new and empty store.
    fn open() -> Self;

    /// Ends the program without warning and opens the store again: everything is lost that is not
    /// committed, and nothing else. What may be lost in a crash is not lost here, so a store that
    /// can be told to lose it is opened without that.
    ///
    /// The store must not get a chance to write what it still has in the memory of the program:
    /// copy its files while it is open, and open the copy. To close a file and open it again does
    /// not show a commit that was in memory only.
    #[must_use]
    fn crash(self) -> Self;

    /// The store.
    fn store(&self) -> &Self::Store;

    /// Writes a row into a table of the user's own, within an open transaction.
    ///
    /// # Errors
    ///
    /// The store's own.
    fn put_own_row(
        _tx: &mut TxOf<'_, Self>,
        _key: &str,
        _value: &str,
    ) -> Result<(), ErrorOf<Self>> {
        Ok(())
    }

    /// Reads such a row.
    ///
    /// # Errors
    ///
    /// The store's own.
    fn own_row(_tx: &mut TxOf<'_, Self>, _key: &str) -> Result<Option<String>, ErrorOf<Self>> {
        Ok(None)
    }
}

/// A store whose files a test can spoil; see [`suite_damage!`](crate::suite_damage).
pub trait Damage: Harness {
    /// Changes the bytes of a row where the store keeps them, and opens it again. If it refuses to
    /// open, as it may, that is an error with what it says.
    ///
    /// # Errors
    ///
    /// The store's own.
    fn damage(self, row: &Key) -> Result<Self, String>;

    /// Writes a format version where the store keeps its own, which is
    /// [`FORMAT_VERSION`](twobox::FORMAT_VERSION), and opens it again.
    ///
    /// # Errors
    ///
    /// The store's own.
    fn open_as(self, version: u32) -> Result<Self, String>;
}

/// What the scenarios run on: each [`Harness`].
pub trait Subject: Sized + 'static {
    /// The store between the driver and the faults.
    #[doc(hidden)]
    type Side: Side;

    /// The store with its own `run`, `write` and `transact`, and no faults.
    #[doc(hidden)]
    type Own: Side;
}

impl<H: Harness> Subject for H {
    type Side = Faulty<H>;
    type Own = Own<H>;
}
