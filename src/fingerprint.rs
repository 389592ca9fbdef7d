//! Fingerprints: what a request key is bound to (P1, F23).
//!
//! A fingerprint is the SHA-256 of a canonical form of the parameters: a retry that gives the same
//! in another order is the same request, and anything else is a different one. Beside the digest it
//! keeps a line in clear text, for an operator who has to see what a key is bound to: by default the
//! names of the parameters, and no values. See [`Summary`].

use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use sha2::{Digest as _, Sha256};

use crate::ids::fit;

/// A SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of `parts`, whose boundaries count: `["ab", "c"]` differs from `["a", "bc"]`.
    /// The tag keeps apart what is digested for different purposes.
    #[must_use]
    pub fn of_parts<'a>(tag: &str, parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_be_bytes());
            hash.update(bytes);
        };
        part(tag.as_bytes());
        parts.into_iter().for_each(part);
        Self(hash.finalize().into())
    }
}

impl fmt::Display for Digest {
    /// In hexadecimal; a precision cuts it, as in `{digest:.8}`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = f.precision().unwrap_or(64).min(64);
        for at in 0..shown {
            let byte = self.0[at / 2];
            let nibble = if at % 2 == 0 { byte >> 4 } else { byte & 15 };
            fmt::Write::write_char(f, char::from_digit(u32::from(nibble), 16).unwrap_or('?'))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The parameters of a request: their digest, and a line that tells an operator what they were.
///
/// Two fingerprints are equal if their digests are; the line does not count.
///
/// ```
/// use twobox::Fingerprint;
///
/// let first = Fingerprint::of([("item", "notebook"), ("quantity", "2")]);
/// let again = Fingerprint::of([("quantity", "2"), ("item", "notebook")]);
/// assert_eq!(first, again);
/// assert_eq!(again.summary(), "item quantity");
/// assert_ne!(first, Fingerprint::of([("item", "notebook"), ("quantity", "3")]));
/// ```
#[derive(Debug, Clone)]
pub struct Fingerprint {
    digest: Digest,
    summary: Arc<str>,
}

impl Fingerprint {
    /// The largest length of the summary, in bytes; what is longer is cut and ends in `…`.
    pub const MAX_SUMMARY: usize = 256;

    /// How many bytes are enough to fill a summary and one more: to be shown, a control character
    /// shrinks to half at most.
    const ENOUGH: usize = 2 * (Self::MAX_SUMMARY + 1);

    /// Of named fields. Their order does not matter; a name given twice counts twice. The names are
    /// kept in clear text, the values are not; [`Summary::of`] lets you choose.
    #[must_use]
    pub fn of<N: AsRef<str>, V: AsRef<str>>(fields: impl IntoIterator<Item = (N, V)>) -> Self {
        Summary::default().of(fields)
    }

    /// Of bytes that are canonical already, such as a signed document. Every byte counts. How many
    /// there are is kept in clear text; [`Summary::of_bytes`] lets you choose.
    #[must_use]
    pub fn of_bytes(bytes: &[u8]) -> Self {
        Summary::default().of_bytes(bytes)
    }

    /// Of a JSON document, in the canonical form of RFC 8785: the order of members, white space,
    /// and the way in which numbers and characters are written do not matter. The names of its
    /// outermost members are kept in clear text; [`Summary::of_json`] lets you choose.
    ///
    /// # Errors
    ///
    /// [`Invalid::NotJson`](crate::Invalid::NotJson) if the bytes are no JSON, or a member name
    /// stands twice in an object. [`Invalid::Inexact`](crate::Invalid::Inexact) if a number is not
    /// one that RFC 8785 keeps as it is written: it makes doubles (IEEE 754) of all, so that two
    /// numbers would be one. That is so for most with more than 15 digits and for integers beyond
    /// 2^53; give such as strings.
    ///
    /// ```
    /// use twobox::Fingerprint;
    ///
    /// let first = Fingerprint::of_json(br#"{"item": "caf\u00e9", "quantity": 2.0}"#)?;
    /// let again = Fingerprint::of_json("{\"quantity\":2,\"item\":\"café\"}".as_bytes())?;
    /// assert_eq!(first, again);
    /// assert_eq!(first.summary(), "item quantity");
    /// # Ok::<(), twobox::Invalid>(())
    /// ```
    #[cfg(feature = "json")]
    pub fn of_json(document: &[u8]) -> Result<Self, crate::Invalid> {
        Summary::default().of_json(document)
    }

    /// Made of what a store kept; only for adapters.
    #[must_use]
    pub fn from_stored(digest: Digest, summary: &str) -> Self {
        Self { digest, summary: fit(summary, Self::MAX_SUMMARY) }
    }

    /// The digest that counts.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// What an operator sees.
    #[must_use]
    pub fn summary(&self) -> &str {
        &self.summary
    }
}

/// What a fingerprint keeps of the parameters in clear text, in the tables, in errors and where
/// tables are shown. Whatever that is, the same parameters are the same fingerprint, so it may be
/// changed while requests are there.
///
/// ```
/// use twobox::{Fingerprint, Summary};
///
/// let parameters = [("user", "ada"), ("password", "hunter2")];
/// assert_eq!(Summary::Nothing.of(parameters).summary(), "");
/// assert_eq!(Summary::Names.of(parameters).summary(), "password user");
/// assert_eq!(Summary::All.of(parameters).summary(), "password=hunter2 user=ada");
/// assert_eq!(Summary::All.of(parameters), Fingerprint::of(parameters));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Summary {
    /// Nothing.
    Nothing,
    /// The names of fields or of the outermost members, and no values; of bytes, how many there
    /// are. For parameters whose names are no secret.
    #[default]
    Names,
    /// The beginning of the canonical form, values included, as far as it fits. For parameters
    /// without secrets: whoever reads the tables or the errors sees them.
    All,
}

impl Summary {
    /// As [`Fingerprint::of`].
    #[must_use]
    pub fn of<N: AsRef<str>, V: AsRef<str>>(
        self,
        fields: impl IntoIterator<Item = (N, V)>,
    ) -> Fingerprint {
        let mut fields: Vec<(N, V)> = fields.into_iter().collect();
        fn key<N: AsRef<str>, V: AsRef<str>>((name, value): &(N, V)) -> (&str, &str) {
            (name.as_ref(), value.as_ref())
        }
        fields.sort_unstable_by(|a, b| key(a).cmp(&key(b)));
        let parts = fields
            .iter()
            .flat_map(|(name, value)| [name.as_ref().as_bytes(), value.as_ref().as_bytes()]);
        let digest = Digest::of_parts("twobox/fields/1", parts);
        let mut summary = String::new();
        let shown = if self == Self::Nothing { &[] } else { &fields[..] };
        for (name, value) in shown {
            if !summary.is_empty() {
                summary.push(' ');
            }
            summary.push_str(name.as_ref());
            if self == Self::All {
                summary.push('=');
                summary.push_str(value.as_ref());
            }
            if summary.len() > Fingerprint::ENOUGH {
                break;
            }
        }
        Fingerprint { digest, summary: fit(&summary, Fingerprint::MAX_SUMMARY) }
    }

    /// As [`Fingerprint::of_bytes`].
    #[must_use]
    pub fn of_bytes(self, bytes: &[u8]) -> Fingerprint {
        let digest = Digest::of_parts("twobox/bytes/1", [bytes]);
        let beginning = &bytes[..bytes.len().min(Fingerprint::ENOUGH)];
        let summary = match self {
            Self::Nothing => String::new(),
            Self::Names => format!("{} bytes", bytes.len()),
            Self::All => String::from_utf8_lossy(beginning).into_owned(),
        };
        Fingerprint { digest, summary: fit(&summary, Fingerprint::MAX_SUMMARY) }
    }

    /// As [`Fingerprint::of_json`].
    ///
    /// # Errors
    ///
    /// As there.
    #[cfg(feature = "json")]
    pub fn of_json(self, document: &[u8]) -> Result<Fingerprint, crate::Invalid> {
        let (canonical, names) = crate::json::canonical("request parameters", document)?;
        let digest = Digest::of_parts("twobox/json/1", [canonical.as_bytes()]);
        let summary = match self {
            Self::Nothing => "",
            Self::Names => &names,
            Self::All => &canonical,
        };
        Ok(Fingerprint { digest, summary: fit(summary, Fingerprint::MAX_SUMMARY) })
    }
}

impl PartialEq for Fingerprint {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Fingerprint {}

impl core::hash::Hash for Fingerprint {
    fn hash<H: core::hash::Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}
