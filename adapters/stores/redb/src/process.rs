//! Which process has opened a store (F56).
//!
//! A process that forks has everything twice, the cache and what is known of the file included, but
//! the file once. The child would write over what its parent writes, and give back its locks. So
//! only the process that has opened a store uses it.

use crate::error::RedbError;

/// A process; without std there is one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process {
    #[cfg(feature = "std")]
    id: u32,
}

impl Process {
    /// The one that runs this.
    pub(crate) fn this() -> Self {
        Self {
            #[cfg(feature = "std")]
            id: std::process::id(),
        }
    }

    /// Whether it is the one that runs this.
    pub(crate) fn is_this(self) -> bool {
        #[cfg(feature = "std")]
        return self.id == std::process::id();
        #[cfg(not(feature = "std"))]
        return true;
    }

    pub(crate) fn check(self) -> Result<(), RedbError> {
        #[cfg(feature = "std")]
        if !self.is_this() {
            return Err(RedbError::OtherProcess { opened_by: self.id });
        }
        Ok(())
    }
}
