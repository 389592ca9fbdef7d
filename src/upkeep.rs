//! What an operator or a timer does to a whole store, page by page: look at dead letters, redrive
//! them, purge what is past (P3, P7).

use alloc::vec::Vec;
use core::convert::Infallible;
use core::num::NonZeroU16;

use crate::boundary::Query;
use crate::checked::Checked;
use crate::ids::{EventId, EventType};
use crate::retention::{RedriveWindow, Retention};
use crate::store::{Load, RunError, Store};
use crate::table::{OutboxRow, Record};
use crate::time::Millis;
use crate::transition::operator::{Operated, Redrive};
use crate::transition::purge::Purge;

/// A dead event: which, since when, and why.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeadLetter {
    /// The event. Its envelope and payload are a row of their own, to be read with [`Query::rows`].
    pub event: EventId,
    /// Its type, its state with the time, its starts and failures, and the last reason.
    pub row: OutboxRow,
}

/// The dead events with an id after `after`, at most `limit`, in the order of their ids. To redrive
/// or discard some of them, see [`Redrive`] and [`Discard`](crate::Discard).
///
/// # Errors
///
/// The store's own.
///
/// ```
/// use twobox::{Reader, dead_letters};
/// use twobox_memory::MemoryStore;
///
/// let store = MemoryStore::new();
/// for letter in dead_letters(&mut store.view()?, None, 100)? {
///     println!("{} {}: {:?}", letter.event, letter.row.event_type, letter.row.reason);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn dead_letters<L: Load>(
    tables: &mut L,
    after: Option<EventId>,
    limit: usize,
) -> Result<Vec<DeadLetter>, L::Error> {
    let rows = tables.load(&Query::Dead { after, limit })?.into_vec();
    let letter = |record| {
        if let Record::Outbox(event, row) = record { Some(DeadLetter { event, row }) } else { None }
    };
    Ok(rows.into_iter().filter_map(|stored| letter(stored.record)).collect())
}

/// Redrives all dead events, or all of one type, in transactions of at most 256 each. `window` is
/// as in [`Redrive::new`]; what is past it is refused, and stands in the answer.
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
    const PAGE: usize = 256;
    let mut all = Operated::default();
    let mut after = None;
    loop {
        let mut view = store.view().map_err(RunError::Store)?;
        let letters = dead_letters(&mut view, after, PAGE).map_err(RunError::Store)?;
        // A view may keep others from writing.
        drop(view);
        let full = letters.len() == PAGE;
        after = letters.last().map(|letter| letter.event.clone());
        let wanted = letters
            .into_iter()
            .filter(|letter| event_type.is_none_or(|wanted| *wanted == letter.row.event_type));
        // A page without one of the type is no redrive.
        if let Ok(redrive) = Redrive::new(wanted.map(|letter| letter.event), window) {
            let operated = store.run(redrive, now)?;
            all.done.extend(operated.done);
            all.refused.extend(operated.refused);
        }
        if !full {
            return Ok(all);
        }
    }
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
    let mut removed = 0;
    for table in Purge::TABLES {
        let mut purge = Some(Purge::new(retention, table, limit));
        while let Some(page) = purge {
            let purged = store.run(&page, now)?;
            removed += purged.removed;
            purge = purged.next.map(|key| page.after(key));
        }
    }
    Ok(removed)
}
