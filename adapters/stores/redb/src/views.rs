//! Which views are open, and since when (F49).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::lock::Lock;

/// The open views of a store.
#[derive(Debug, Clone)]
pub(crate) struct Views(Arc<Lock<Opened>>);

#[derive(Debug, Default)]
struct Opened {
    next: u64,
    /// When each was opened; the first one has been open longest.
    since: BTreeMap<u64, Instant>,
}

impl Default for Views {
    fn default() -> Self {
        Self(Arc::new(Lock::new(Opened::default())))
    }
}

impl Views {
    /// Counts a view for as long as this is kept.
    pub(crate) fn open(&self) -> OpenView {
        let mut opened = self.0.lock();
        let number = opened.next;
        opened.next += 1;
        opened.since.insert(number, Instant::now());
        drop(opened);
        OpenView { number, views: self.clone() }
    }

    pub(crate) fn oldest(&self) -> Option<Duration> {
        self.0.lock().since.values().next().map(Instant::elapsed)
    }
}

/// A view that is open.
#[derive(Debug)]
pub(crate) struct OpenView {
    number: u64,
    views: Views,
}

impl Drop for OpenView {
    fn drop(&mut self) {
        self.views.0.lock().since.remove(&self.number);
    }
}
