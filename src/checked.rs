//! Settings that have been found to go together: what the check refuses cannot be used later (P7,
//! F10).

use core::ops::Deref;

/// Settings that have passed their check, which is the only way to get them:
/// [`DeliveryPolicy::checked`](crate::DeliveryPolicy::checked),
/// [`RelaySettings::checked`](crate::relay::RelaySettings::checked) and
/// [`Retention::checked`](crate::Retention::checked). They can be read, but not changed; to change
/// them, clone the settings inside and have them checked again.
///
/// ```
/// use twobox::{Checked, DeliveryPolicy};
///
/// let policy: Checked<DeliveryPolicy> = DeliveryPolicy { max_failures: 5, ..DeliveryPolicy::default() }.checked()?;
/// let patient = DeliveryPolicy { max_failures: 9, ..policy.as_ref().clone() }.checked()?;
/// assert_eq!((policy.max_failures, patient.max_failures), (5, 9));
/// # Ok::<(), twobox::Invalid>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Checked<T: Settings> {
    settings: T,
    against: T::Against,
}

/// Settings that are checked before they can be used.
pub trait Settings: sealed::Sealed {
    /// What they were checked against.
    type Against: core::fmt::Debug + Clone + PartialEq + Eq + core::hash::Hash;
}

pub(crate) mod sealed {
    /// It is sealed: each of the settings says so beside its check.
    pub trait Sealed {}
}

impl<T: Settings> Checked<T> {
    /// For the checks alone.
    pub(crate) const fn new(settings: T, against: T::Against) -> Self {
        Self { settings, against }
    }

    /// What they were checked against.
    #[must_use]
    pub const fn against(&self) -> &T::Against {
        &self.against
    }
}

impl<T: Settings> Deref for Checked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.settings
    }
}

impl<T: Settings> AsRef<T> for Checked<T> {
    fn as_ref(&self) -> &T {
        &self.settings
    }
}
