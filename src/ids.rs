//! Names and limits: every text that becomes part of a key, and the one place where bad input is
//! refused.
//!
//! A value of these types is valid once it is made, so nothing behind the constructors checks
//! again. The rules are the same for all of them: at least one byte, at most the stated number of
//! bytes of UTF-8, no control characters (a NUL would end a text in some stores and is our
//! separator in keys). Upper and lower case differ, nothing is trimmed, and the order is that of
//! the bytes.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use core::fmt;

use thiserror::Error;

/// What was wrong with a value given to a constructor: the field, the limit and the value.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Invalid {
    /// A text that must not be empty was.
    #[error("{field} is empty; give it 1 to {max} bytes")]
    Empty {
        /// The field that was given.
        field: &'static str,
        /// The largest length in bytes.
        max: usize,
    },
    /// A value longer than its limit.
    #[error("{field} is {length} bytes long, the limit is {max}; it begins {begins:?}")]
    TooLong {
        /// The field that was given.
        field: &'static str,
        /// The largest length in bytes.
        max: usize,
        /// The length that was given, in bytes.
        length: usize,
        /// The first characters of what was given.
        begins: Box<str>,
    },
    /// A text with a control character.
    #[error(
        "{field} has the control character {found:?} at byte {at}, which is not allowed; the value is {value:?}"
    )]
    ControlCharacter {
        /// The field that was given.
        field: &'static str,
        /// Where the character begins.
        at: usize,
        /// The character.
        found: char,
        /// What was given.
        value: Box<str>,
    },
    /// A number or count outside of its range.
    #[error("{field} is {value}, it must lie between {min} and {max}")]
    OutOfRange {
        /// The field that was given.
        field: &'static str,
        /// The smallest that is allowed.
        min: u64,
        /// The largest that is allowed.
        max: u64,
        /// What was given.
        value: u64,
    },
    /// A name that must stand once was given twice.
    #[error("{field} {value:?} is given twice; each must stand once")]
    Twice {
        /// The field that was given.
        field: &'static str,
        /// What was given twice.
        value: Box<str>,
    },
    /// Bytes that are not JSON, or JSON that has no canonical form.
    #[error("{field} is not JSON with a canonical form: {reason}")]
    NotJson {
        /// The field that was given.
        field: &'static str,
        /// What the parser said.
        reason: Box<str>,
    },
    /// A number in JSON that a double does not hold as it is written.
    #[error(
        "{field} has the number {number} at line {line} column {column}, which a double does not \
         hold as it is written; give it as a string"
    )]
    Inexact {
        /// The field that was given.
        field: &'static str,
        /// The beginning of the number.
        number: Box<str>,
        /// The line in which it stands, from 1.
        line: usize,
        /// The column at which it begins, from 1.
        column: usize,
    },
    /// Settings that do not go together.
    #[error("{field}: {reason}")]
    Unsafe {
        /// The setting.
        field: &'static str,
        /// Why it is refused and what to give instead.
        reason: Box<str>,
    },
}

/// The beginning of a text, for messages: at most `max` bytes, cut between characters.
pub(crate) fn beginning(text: &str, max: usize) -> &str {
    &text[..boundary(text, max)]
}

/// The last boundary between characters that is not past `max`. (`str::floor_char_boundary` needs
/// Rust 1.91.)
fn boundary(text: &str, max: usize) -> usize {
    (0..=max.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

/// Checks a text against the rules at the top of this module.
pub(crate) fn check_text(field: &'static str, max: usize, text: &str) -> Result<(), Invalid> {
    if text.is_empty() {
        return Err(Invalid::Empty { field, max });
    }
    if text.len() > max {
        let (length, begins) = (text.len(), beginning(text, 32).into());
        return Err(Invalid::TooLong { field, max, length, begins });
    }
    // Most texts are plain, and each row that is read has several.
    if text.bytes().fold(true, |plain, byte| plain & matches!(byte, b' '..=b'~')) {
        return Ok(());
    }
    match text.char_indices().find(|(_, c)| c.is_control()) {
        Some((at, found)) => {
            Err(Invalid::ControlCharacter { field, at, found, value: text.into() })
        }
        None => Ok(()),
    }
}

/// A text of this module, for those who have checked it already.
pub(crate) trait Name: for<'a> TryFrom<&'a str, Error = Invalid> {
    const MAX: usize;

    /// Of a text that is right, if it is not longer than [`Name::MAX`]: the other rules are the
    /// same for all names.
    fn of_checked(text: Arc<str>) -> Self;

    /// Its text, if it has one: a destination may have none.
    fn text(&self) -> Option<&Arc<str>>;
}

macro_rules! name {
    ($(#[$doc:meta])* $name:ident, $field:literal, $max:literal) => {
        $(#[$doc])*
        #[doc = concat!("\n\n1 to ", $max, " bytes, no control characters. Cloning it is cheap and copies no text.")]
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The largest length in bytes.
            pub const MAX: usize = $max;

            #[doc = concat!("Makes a ", $field, " of the text.\n\n# Errors\n\n[`Invalid`] if the text is empty, too long or has a control character.")]
            pub fn new(text: impl AsRef<str>) -> Result<Self, Invalid> {
                let text = text.as_ref();
                check_text($field, Self::MAX, text)?;
                Ok(Self(text.into()))
            }

            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl Name for $name {
            const MAX: usize = $max;

            fn of_checked(text: Arc<str>) -> Self {
                Self(text)
            }

            fn text(&self) -> Option<&Arc<str>> {
                Some(&self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<&str> for $name {
            type Error = Invalid;
            fn try_from(text: &str) -> Result<Self, Invalid> {
                Self::new(text)
            }
        }

        impl TryFrom<String> for $name {
            type Error = Invalid;
            fn try_from(text: String) -> Result<Self, Invalid> {
                Self::new(text)
            }
        }

        impl core::str::FromStr for $name {
            type Err = Invalid;
            fn from_str(text: &str) -> Result<Self, Invalid> {
                Self::new(text)
            }
        }
    };
}

name!(
    /// Whose request ids these are: a user, a tenant, an API client (P1, F24).
    ///
    /// Two scopes may use the same request id without meeting.
    Scope, "scope", 128
);
name!(
    /// The caller's name for one intention, the idempotency key: the same for a retry, a new one to
    /// do it again.
    RequestId, "request id", 128
);
name!(
    /// The name of the order that a request creates. An order is whatever one request creates.
    OrderId, "order id", 128
);
name!(
    /// The name of one event, the same over all its deliveries (P5).
    EventId, "event id", 160
);
name!(
    /// Events with the same ordering key at the same destination are published one after the other,
    /// in commit order (P4).
    OrderingKey, "ordering key", 128
);
name!(
    /// Who receives: each consumer applies an event once, whatever other consumers do (P5, F8).
    Consumer, "consumer", 128
);
name!(
    /// What happened, such as `order.created`.
    EventType, "event type", 128
);
name!(
    /// Who holds a lease: one running relay. Two relays that run at once must not share a name.
    Owner, "owner", 128
);
name!(
    /// The name of an event header.
    HeaderName, "header name", 64
);
name!(
    /// The value of an event header.
    HeaderValue, "header value", 1024
);
name!(
    /// The media type of a body, such as `application/json`.
    ContentType, "content type", 128
);

/// Where an event is published to: a topic, a queue, another service.
///
/// Events of one destination keep those of another one waiting for nothing, also if they have the
/// same ordering key. A program with a single destination need not name it: the default is the one
/// without a name, whose text is empty, and which comes before all others.
///
/// ```
/// use twobox::Destination;
///
/// let invoices = Destination::new("invoices")?;
/// assert!(Destination::default() < invoices && Destination::default().is_default());
/// assert!(Destination::new("").is_err());
/// # Ok::<(), twobox::Invalid>(())
/// ```
///
/// 1 to 128 bytes, no control characters. Cloning it is cheap and copies no text.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Destination(Option<Arc<str>>);

impl Destination {
    /// The largest length in bytes.
    pub const MAX: usize = 128;

    /// Makes a destination of the text.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the text is empty, too long or has a control character. The destination
    /// without a name is the default.
    pub fn new(text: impl AsRef<str>) -> Result<Self, Invalid> {
        let text = text.as_ref();
        check_text("destination", Self::MAX, text)?;
        Ok(Self(Some(text.into())))
    }

    /// The text, empty for the default.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or_default()
    }

    /// Whether it is the one without a name.
    #[must_use]
    pub const fn is_default(&self) -> bool {
        self.0.is_none()
    }
}

impl Name for Destination {
    const MAX: usize = Self::MAX;

    fn of_checked(text: Arc<str>) -> Self {
        Self(Some(text))
    }

    fn text(&self) -> Option<&Arc<str>> {
        self.0.as_ref()
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

impl AsRef<str> for Destination {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl TryFrom<&str> for Destination {
    type Error = Invalid;
    fn try_from(text: &str) -> Result<Self, Invalid> {
        Self::new(text)
    }
}

impl TryFrom<String> for Destination {
    type Error = Invalid;
    fn try_from(text: String) -> Result<Self, Invalid> {
        Self::new(text)
    }
}

impl core::str::FromStr for Destination {
    type Err = Invalid;
    fn from_str(text: &str) -> Result<Self, Invalid> {
        Self::new(text)
    }
}

/// A lane: the events of one ordering key at one destination, published one after the other in
/// commit order (P4).
///
/// It is shown as `destination/ordering key`, and at the default destination as the ordering key
/// alone.
///
/// ```
/// use twobox::{Destination, LaneKey, OrderingKey};
///
/// let ordering_key = OrderingKey::new("customer-7")?;
/// let lane = LaneKey::from(ordering_key.clone());
/// assert_eq!(lane.to_string(), "customer-7");
/// let lane = LaneKey { destination: Destination::new("invoices")?, ordering_key };
/// assert_eq!(lane.to_string(), "invoices/customer-7");
/// # Ok::<(), twobox::Invalid>(())
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneKey {
    /// Where its events are published to.
    pub destination: Destination,
    /// In whose order.
    pub ordering_key: OrderingKey,
}

impl LaneKey {
    /// The texts of the key.
    pub(crate) fn texts(&self) -> [&str; 2] {
        [self.destination.as_str(), self.ordering_key.as_str()]
    }
}

/// The lane at the default destination.
impl From<OrderingKey> for LaneKey {
    fn from(ordering_key: OrderingKey) -> Self {
        Self { destination: Destination::default(), ordering_key }
    }
}

impl fmt::Display for LaneKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.destination.0 {
            None => self.ordering_key.fmt(f),
            Some(destination) => write!(f, "{destination}/{}", self.ordering_key),
        }
    }
}

impl fmt::Debug for LaneKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.destination.0 {
            None => fmt::Debug::fmt(&self.ordering_key, f),
            Some(destination) => write!(f, "{destination:?}/{:?}", self.ordering_key),
        }
    }
}

/// A request id and the scope that it counts in. This is what a fingerprint is bound to (P1).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKey {
    /// Whose request it is.
    pub scope: Scope,
    /// The caller's name for it.
    pub id: RequestId,
}

impl RequestKey {
    /// Makes a key of the two texts.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if one of them is refused.
    ///
    /// ```
    /// let key = twobox::RequestKey::new("customer-7", "req-001")?;
    /// assert_eq!(key.to_string(), "customer-7/req-001");
    /// # Ok::<(), twobox::Invalid>(())
    /// ```
    pub fn new(scope: impl AsRef<str>, id: impl AsRef<str>) -> Result<Self, Invalid> {
        Ok(Self { scope: Scope::new(scope)?, id: RequestId::new(id)? })
    }
}

impl fmt::Display for RequestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.scope, self.id)
    }
}

/// Why something failed or was given up, for an operator to read: at most 512 bytes.
///
/// It comes from outside (a broker's message, an error's text), so it is made to fit and never
/// refused: control characters become spaces, and what is too long is cut and ends in `…`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reason(Arc<str>);

impl Reason {
    /// The largest length in bytes.
    pub const MAX: usize = 512;

    /// Makes a reason from anything that can be displayed.
    #[must_use]
    pub fn new(text: impl fmt::Display) -> Self {
        Self(fit(&alloc::format!("{text}"), Self::MAX))
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// Makes a text fit for one line of at most `max` bytes.
pub(crate) fn fit(text: &str, max: usize) -> Arc<str> {
    const MORE: &str = "…";
    // Most are ASCII, of which this is next to nothing: there is no branch in it.
    let plain = |text: &str| text.bytes().fold(true, |all, byte| all & (32..127).contains(&byte));
    if text.len() <= max && (plain(text) || !text.contains(char::is_control)) {
        return text.into();
    }
    let mut line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if line.len() > max {
        line.truncate(boundary(&line, max - MORE.len()));
        line.push_str(MORE);
    }
    line.into()
}

impl OrderingKey {
    /// The key of the lane that an order's events stand in if they name none: the order's id, whose
    /// limit is the same.
    pub(crate) fn of_order(order: &OrderId) -> Self {
        Self(order.0.clone())
    }
}
