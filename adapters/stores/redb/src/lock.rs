//! A lock for what may take as long as to open a file: with std, who waits for it sleeps.

#[cfg(feature = "std")]
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(not(feature = "std"))]
use spin::{Mutex, MutexGuard};

/// A value behind a lock.
#[derive(Debug)]
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(Mutex::new(value))
    }
}

#[cfg(feature = "std")]
impl<T> Lock<T> {
    /// What is behind it is whole at any time, so a panic spoils nothing.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(not(feature = "std"))]
impl<T> Lock<T> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock()
    }

    pub(crate) fn into_inner(self) -> T {
        self.0.into_inner()
    }
}

/// Lets others run.
pub(crate) fn give_way() {
    #[cfg(feature = "std")]
    std::thread::yield_now();
    #[cfg(not(feature = "std"))]
    core::hint::spin_loop();
}
