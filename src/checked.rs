//! Settings that have been found to go together: what is refused when settings are made cannot be
//! used later (P7, F10).

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
pub struct Checked<T>(T);

impl<T> Checked<T> {
    /// For the checks alone.
    pub(crate) const fn new(settings: T) -> Self {
        Self(settings)
    }
}

impl<T> Deref for Checked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> AsRef<T> for Checked<T> {
    fn as_ref(&self) -> &T {
        &self.0
    }
}
