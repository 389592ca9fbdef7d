//! What a check found wrong.

use std::fmt;

use thiserror::Error;
use twobox::Query;

/// A check that did not hold: where, and what was found. Its `Debug` is its text, so that a test
/// which returns it reads well.
#[derive(Clone, PartialEq, Eq, Error)]
#[error("{text}")]
pub struct Failure {
    text: String,
}

impl Failure {
    /// Says what was wrong, and what would have been right.
    pub fn new(what: impl fmt::Display) -> Self {
        Self { text: what.to_string() }
    }

    /// Says in addition where it was found.
    #[must_use]
    pub fn at(self, place: impl fmt::Display) -> Self {
        Self { text: format!("{place}: {}", self.text) }
    }

    /// Makes a failure of an error of the store, where none was injected.
    pub(crate) fn store(error: impl fmt::Display) -> Self {
        Self::new(format_args!("the store failed although no fault was injected: {error}"))
    }

    /// The same, of the answer to a query.
    pub(crate) fn load<E: fmt::Display>(query: &Query) -> impl FnOnce(E) -> Self {
        move |error| Self::store(error).at(short(query))
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Fails unless the condition holds.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(Failure::new(what())) }
}

/// What something is, in a few words.
pub(crate) fn short(value: &impl fmt::Debug) -> String {
    let text = format!("{value:?}");
    match text.char_indices().nth(400) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}
