//! What an operator or a timer does to a whole store, page by page: look at dead letters, redrive
//! them, and purge what is past its retention (P3, P7).

use alloc::vec::Vec;
use core::convert::Infallible;
use core::num::NonZeroU16;

use crate::checked::Checked;
use crate::flow::{PassOverFlow, PurgeFlow, RedriveFlow};
use crate::ids::{EventId, EventType};
use crate::retention::{RedriveWindow, Retention};
use crate::store::asynchronous::{self, AsyncStore};
use crate::store::{NoCall, RunError, Store, drive};
use crate::time::Millis;
use crate::transition::operator::Operated;

/// Redrives all dead events, or all of one type, in transactions of at most 256 each: those of a
/// lane in the order of their places. `window` is as in [`Redrive::new`](crate::Redrive::new); what
/// is past it is refused, and stands in the answer.
///
/// # Errors
///
/// The store's. What was redriven stays so: call again.
pub fn redrive_all<S: Store>(
    store: &S,
    event_type: Option<&EventType>,
    window: RedriveWindow,
    now: Millis,
) -> Result<Operated, RunError<S::Error, Infallible>> {
    drive(store, RedriveFlow::new(event_type, window, now), &mut NoCall)
}

/// As [`redrive_all`], in an async store.
///
/// # Errors
///
/// As there.
pub async fn redrive_all_async<S: AsyncStore>(
    store: &S,
    event_type: Option<&EventType>,
    window: RedriveWindow,
    now: Millis,
) -> Result<Operated, RunError<S::Error, Infallible>> {
    asynchronous::drive(store, RedriveFlow::new(event_type, window, now), NoCall).await
}

/// Lets all lanes go on that wait for a dead event, and says for which events they waited: for a
/// program that has changed its rule from [`WhenDead::Block`](crate::WhenDead::Block) to
/// [`WhenDead::Continue`](crate::WhenDead::Continue), which by itself counts only for what dies from
/// then on. The events stay dead.
///
/// # Errors
///
/// The store's. Lanes that go on do so: call again.
pub fn pass_over_all<S: Store>(
    store: &S,
    now: Millis,
) -> Result<Vec<EventId>, RunError<S::Error, Infallible>> {
    drive(store, PassOverFlow::new(now), &mut NoCall)
}

/// As [`pass_over_all`], in an async store.
///
/// # Errors
///
/// As there.
pub async fn pass_over_all_async<S: AsyncStore>(
    store: &S,
    now: Millis,
) -> Result<Vec<EventId>, RunError<S::Error, Infallible>> {
    asynchronous::drive(store, PassOverFlow::new(now), NoCall).await
}

/// Removes everything that is past its retention, in transactions that look at `limit` rows each,
/// and says how many rows were past it, not counting those that went with another row (P7).
///
/// # Errors
///
/// The store's. What was removed stays removed: call again.
pub fn purge_all<S: Store>(
    store: &S,
    retention: &Checked<Retention>,
    limit: NonZeroU16,
    now: Millis,
) -> Result<usize, RunError<S::Error, Infallible>> {
    drive(store, PurgeFlow::new(retention, limit, now), &mut NoCall)
}

/// As [`purge_all`], in an async store.
///
/// # Errors
///
/// As there.
pub async fn purge_all_async<S: AsyncStore>(
    store: &S,
    retention: &Checked<Retention>,
    limit: NonZeroU16,
    now: Millis,
) -> Result<usize, RunError<S::Error, Infallible>> {
    asynchronous::drive(store, PurgeFlow::new(retention, limit, now), NoCall).await
}
