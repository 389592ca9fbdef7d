//! Orders, events and bodies: what a program has to say, before and after it is committed.
//!
//! A [`Draft`] is an event as its author describes it. [`CommitOrder`](crate::CommitOrder)
//! completes it to an [`Event`]: the immutable envelope with its payload, which keeps its id over
//! all deliveries (P5). The attributes are those of CloudEvents 1.0: id, type, time, dataschema (as
//! a schema version), datacontenttype, and partitionkey (the ordering key).

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::fingerprint::Digest;
use crate::ids::{
    ContentType, Destination, EventId, EventType, HeaderName, HeaderValue, Invalid, LaneKey,
    OrderId, OrderingKey,
};
use crate::time::Millis;

/// Bytes and what they are: at most 16 MiB. Any byte may occur (F19). Cloning copies no bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Body {
    content_type: ContentType,
    bytes: Arc<[u8]>,
}

impl Body {
    /// The largest size in bytes.
    pub const MAX: usize = 16 << 20;

    /// Bytes of a media type.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the content type is refused or there are more than [`Body::MAX`] bytes.
    ///
    /// ```
    /// let body = twobox::Body::new("application/json", r#"{"item":"notebook"}"#)?;
    /// assert_eq!(body.bytes().len(), 19);
    /// # Ok::<(), twobox::Invalid>(())
    /// ```
    pub fn new(content_type: impl AsRef<str>, bytes: impl AsRef<[u8]>) -> Result<Self, Invalid> {
        Self::of_type(ContentType::new(content_type)?, bytes.as_ref())
    }

    pub(crate) fn of_type(content_type: ContentType, bytes: &[u8]) -> Result<Self, Invalid> {
        if bytes.len() > Self::MAX {
            return Err(Invalid::TooLong {
                field: "body",
                max: Self::MAX,
                length: bytes.len(),
                begins: alloc::string::String::from_utf8_lossy(&bytes[..32]).into(),
            });
        }
        Ok(Self { content_type, bytes: bytes.into() })
    }

    /// A JSON document, of content type `application/json`. The text is not parsed.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if it is too large.
    pub fn json(text: impl AsRef<str>) -> Result<Self, Invalid> {
        Self::new("application/json", text.as_ref())
    }

    /// Plain text, of content type `text/plain`.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if it is too large.
    pub fn text(text: impl AsRef<str>) -> Result<Self, Invalid> {
        Self::new("text/plain", text.as_ref())
    }

    /// What the bytes are.
    #[must_use]
    pub fn content_type(&self) -> &ContentType {
        &self.content_type
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Body({}, {} bytes)", self.content_type, self.bytes.len())
    }
}

/// Names and values that travel with an event, such as `traceparent`: at most 64, each name once.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Headers(Vec<(HeaderName, HeaderValue)>);

impl Headers {
    /// The largest number of headers.
    pub const MAX: usize = 64;

    /// No headers.
    #[must_use]
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    /// With one header more.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the name or the value is refused, the name is there already, or the headers
    /// are full.
    pub fn with(mut self, name: impl AsRef<str>, value: impl AsRef<str>) -> Result<Self, Invalid> {
        let (name, value) = (HeaderName::new(name)?, HeaderValue::new(value)?);
        if self.0.len() == Self::MAX {
            return Err(Invalid::OutOfRange {
                field: "headers",
                min: 0,
                max: Self::MAX as u64,
                value: Self::MAX as u64 + 1,
            });
        }
        match self.0.binary_search_by(|(there, _)| there.cmp(&name)) {
            Ok(_) => Err(Invalid::Twice { field: "header", value: name.as_str().into() }),
            Err(at) => {
                self.0.insert(at, (name, value));
                Ok(self)
            }
        }
    }

    /// The value of a header.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&HeaderValue> {
        self.0.iter().find(|(there, _)| there.as_str() == name).map(|(_, value)| value)
    }

    /// All of them, sorted by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&HeaderName, &HeaderValue)> {
        self.0.iter().map(|(name, value)| (name, value))
    }
}

/// An event as its author describes it, before the order that it belongs to is committed.
///
/// Only a type and a body are needed. What is left out is derived when the order is committed: the
/// id is `<order id>/<n>` with n counted from 1, the ordering key is the order id, the destination
/// is the default one, the schema version is 1, and the event is due at once.
///
/// ```
/// use twobox::{Body, Destination, Draft, EventId, Millis, OrderingKey};
///
/// let draft = Draft::new("order.created", Body::json(r#"{"item":"notebook"}"#)?)?
///     .id(EventId::new("order-created:req-001")?)
///     .destination(Destination::new("invoices")?)
///     .ordering_key(OrderingKey::new("customer-7")?)
///     .schema_version(2)
///     .header("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")?
///     .not_before(Millis::new(60_000));
/// # Ok::<(), twobox::Invalid>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Draft {
    pub(crate) id: Option<EventId>,
    pub(crate) event_type: EventType,
    pub(crate) schema_version: u32,
    pub(crate) destination: Destination,
    pub(crate) ordering_key: Option<OrderingKey>,
    pub(crate) headers: Headers,
    pub(crate) not_before: Option<Millis>,
    pub(crate) body: Body,
}

impl Draft {
    /// An event of a type, with a body.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the type is refused.
    pub fn new(event_type: impl AsRef<str>, body: Body) -> Result<Self, Invalid> {
        Ok(Self {
            id: None,
            event_type: EventType::new(event_type)?,
            schema_version: 1,
            destination: Destination::default(),
            ordering_key: None,
            headers: Headers::new(),
            not_before: None,
            body,
        })
    }

    /// An event of a type, with a JSON document as its body.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the type is refused, or the document is too large.
    pub fn json(event_type: impl AsRef<str>, text: impl AsRef<str>) -> Result<Self, Invalid> {
        Self::new(event_type, Body::json(text)?)
    }

    /// With an id of the author's own. It must be the same when the request is retried, and unique
    /// in the store.
    #[must_use]
    pub fn id(mut self, id: EventId) -> Self {
        self.id = Some(id);
        self
    }

    /// With the version of the body's schema; 1 if not given.
    #[must_use]
    pub fn schema_version(mut self, version: u32) -> Self {
        self.schema_version = version;
        self
    }

    /// With the destination that the event is published to; the default one if not given.
    #[must_use]
    pub fn destination(mut self, destination: Destination) -> Self {
        self.destination = destination;
        self
    }

    /// With the key in whose order the event is published at its destination (P4); the order id if
    /// not given.
    #[must_use]
    pub fn ordering_key(mut self, key: OrderingKey) -> Self {
        self.ordering_key = Some(key);
        self
    }

    /// With a header.
    ///
    /// # Errors
    ///
    /// As [`Headers::with`].
    pub fn header(
        mut self,
        name: impl AsRef<str>,
        value: impl AsRef<str>,
    ) -> Result<Self, Invalid> {
        self.headers = self.headers.with(name, value)?;
        Ok(self)
    }

    /// Not published before this time. Later events of the same lane, with its destination and its
    /// ordering key, wait behind it.
    #[must_use]
    pub fn not_before(mut self, time: Millis) -> Self {
        self.not_before = Some(time);
        self
    }
}

/// A committed event: envelope and payload, never changed again.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Event {
    /// The same over all deliveries (P5).
    pub id: EventId,
    /// The order whose commit brought it.
    pub order: OrderId,
    /// What happened.
    pub event_type: EventType,
    /// The version of the body's schema.
    pub schema_version: u32,
    /// Where it is published to.
    pub destination: Destination,
    /// The key in whose order it is published there (P4).
    pub ordering_key: OrderingKey,
    /// When it was committed, by the clock of the sender.
    pub time: Millis,
    /// What travels with it.
    pub headers: Headers,
    /// The payload.
    pub body: Body,
}

impl Event {
    /// The lane that it stands in.
    #[must_use]
    pub fn lane(&self) -> LaneKey {
        LaneKey { destination: self.destination.clone(), ordering_key: self.ordering_key.clone() }
    }

    /// The digest of what a consumer acts on: type, schema version, content type and body. Headers,
    /// which a broker may change on the way, do not count, and neither does the destination. The same id with another digest is
    /// refused (P5).
    #[must_use]
    pub fn content_digest(&self) -> Digest {
        Digest::of_parts(
            "twobox/content/1",
            [
                self.event_type.as_str().as_bytes(),
                &self.schema_version.to_be_bytes()[..],
                self.body.content_type.as_str().as_bytes(),
                self.body.bytes(),
            ],
        )
    }
}
