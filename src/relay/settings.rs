//! How a relay works: its settings, which are checked before it begins.

use core::time::Duration;

use crate::checked::{Checked, Settings, sealed::Sealed};
use crate::ids::{Invalid, Owner};
use crate::policy::DeliveryPolicy;
use crate::transition::claim::Claim;

/// How a relay works. All defaults are here.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RelaySettings {
    /// The relay's own name; two relays that run at once must not share one.
    pub owner: Owner,
    /// How delivery is retried and given up.
    pub policy: Checked<DeliveryPolicy>,
    /// How many events may be claimed and not yet settled. Default 256. As long as a call could
    /// begin, one event more is claimed for it, so that what hangs keeps nothing else waiting
    /// (P10).
    pub window: usize,
    /// How many bytes of bodies it may hold of these; one event more may come on top. Default
    /// 64 MiB.
    pub window_bytes: usize,
    /// How many events of one lane are claimed at once. Default 16.
    pub run: usize,
    /// How many calls of the publisher may be under way at once, at most as many as the window has
    /// events. Default 256; a relay on threads has as many as it has workers.
    pub publishes: usize,
    /// How long a call of the publisher may take. After that its events have failed, and another
    /// relay may take their lanes (F25). Default 10 s.
    pub publish_timeout: Duration,
    /// How long a lease lasts; it is renewed when half of it is over. It must not be longer than
    /// the policy's longest backoff. Default 30 s.
    pub lease: Duration,
    /// When to look for events that nobody has announced. Default 1 s.
    pub poll: Duration,
    /// The first pause after the broker could not be reached, or the store failed; it doubles each
    /// time. Default 500 ms.
    pub pause_base: Duration,
    /// The longest pause. Default 30 s.
    pub pause_cap: Duration,
}

impl Sealed for RelaySettings {}

impl Settings for RelaySettings {
    type Against = ();
}

impl RelaySettings {
    /// The defaults for a relay of this name.
    #[must_use]
    pub fn new(owner: Owner) -> Self {
        Self {
            owner,
            policy: Checked::default(),
            window: 256,
            window_bytes: 64 << 20,
            run: 16,
            publishes: 256,
            publish_timeout: Duration::from_secs(10),
            lease: Duration::from_secs(30),
            poll: Duration::from_secs(1),
            pause_base: Duration::from_millis(500),
            pause_cap: Duration::from_secs(30),
        }
    }

    /// The settings, if they go together.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the window is not 1 to [`Claim::MAX`], the run is not 1 to the window, the
    /// window has no bytes, nothing may be published, a time is too short, or the lease is longer
    /// than the policy's longest backoff.
    pub fn checked(self) -> Result<Checked<Self>, Invalid> {
        let refuse = |field, reason: &str| Err(Invalid::Unsafe { field, reason: reason.into() });
        let out_of_range = |field, max: usize, value: usize| {
            Err(Invalid::OutOfRange { field, min: 1, max: max as u64, value: value as u64 })
        };
        if self.window == 0 || self.window > Claim::MAX {
            return out_of_range("window", Claim::MAX, self.window);
        }
        if self.window_bytes == 0 {
            return out_of_range("window_bytes", usize::MAX, 0);
        }
        if self.run == 0 || self.run > self.window {
            return out_of_range("run", self.window, self.run);
        }
        if self.publishes == 0 {
            return out_of_range("publishes", usize::MAX, 0);
        }
        if self.publish_timeout < Duration::from_millis(1) {
            return refuse("publish_timeout", "no publish could succeed; give at least 1 ms");
        }
        if self.lease < Duration::from_millis(10) {
            let reason = "it would run out before anything could be published; give at least 10 ms";
            return refuse("lease", reason);
        }
        self.policy.check_lease(self.lease)?;
        if self.poll < Duration::from_millis(1) || self.pause_base < Duration::from_millis(1) {
            let reason = "the relay would never rest; give at least 1 ms";
            return refuse("poll and pause_base", reason);
        }
        if self.pause_cap < self.pause_base {
            return refuse("pause_cap", "it is shorter than pause_base");
        }
        Ok(Checked::new(self, ()))
    }
}
