//! Stores: what an adapter implements, and the drivers that run transitions on it.
//!
//! An adapter implements [`Reader`] and [`Store`] with their transactions, or their async twins in
//! [`asynchronous`]: begin, load, apply, commit. Everything else is provided. What each method must
//! do, so that the promises hold, is said on the method, under "To be correct", and checked by the
//! conformance kit.
//!
//! For all of them:
//!
//! - **A conflict ends a transaction.** After a guard that does not hold, and after an error that
//!   [is a conflict](StoreError::is_conflict), nothing more is read, written or committed in it;
//!   whoever owns it rolls it back and begins again. Which row it was may be unknown.
//! - **Numbers and times fit a signed 64-bit column.** [`Millis::MAX`](crate::Millis::MAX) is
//!   [`i64::MAX`], and no sequence, revision, token or count is larger.
//! - **Texts are compared as bytes**, in keys and in the order of answers. They have no control
//!   characters; bodies may have any byte.
//! - **A panic of the user's work is an end like any other**: the transaction is rolled back, and
//!   the store goes on.

pub mod asynchronous;

mod driver;
mod reading;
mod row_by_row;
pub(crate) mod synchronous;

pub use driver::{Call, NoCall, drive};
pub use row_by_row::{Inconsistent, RowByRow, answer};
pub(crate) use synchronous::{
    Applied, End, Load, Reader, RunError, Seen, Store, StoreError, Tables, Writing, is_conflict,
};
