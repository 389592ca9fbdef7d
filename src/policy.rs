//! Settings of delivery: leases, backoff, limits, and what a dead event does to its lane. All
//! defaults are here.

use alloc::format;
use alloc::string::String;
use core::time::Duration;

use crate::checked::{Checked, Settings, sealed::Sealed};
use crate::fingerprint::Digest;
use crate::ids::{EventId, Invalid};

/// How events are delivered, retried and given up.
///
/// ```
/// use core::time::Duration;
/// use twobox::{DeliveryPolicy, WhenDead};
///
/// let policy = DeliveryPolicy { max_failures: 5, when_dead: WhenDead::Continue, ..DeliveryPolicy::default() }.checked()?;
/// # Ok::<(), twobox::Invalid>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeliveryPolicy {
    /// The backoff after the first failure; it doubles with each further one. Default 1 s.
    pub backoff_base: Duration,
    /// The longest backoff. Default 5 minutes.
    pub backoff_cap: Duration,
    /// An event is dead after so many failed publishes. Default 16.
    pub max_failures: u32,
    /// An event is dead after so many starts, answered or not (F4). It must be larger than
    /// `max_failures`. Default 24. If a limit is lowered, an event whose last start was answered is
    /// tried once more before it is given up.
    pub max_starts: u32,
    /// What a dead event does to the events behind it in its lane. Default [`WhenDead::Block`].
    pub when_dead: WhenDead,
}

/// What a dead event does to the events behind it in its lane (P4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WhenDead {
    /// They wait until it is redriven or discarded: the order is kept at the price of the lane.
    Block,
    /// They go on without it; a redrive puts it behind them. Lanes that wait already, since they
    /// had another rule, go on when [`pass_over_all`](crate::pass_over_all) lets them.
    Continue,
}

impl Default for DeliveryPolicy {
    fn default() -> Self {
        Self {
            backoff_base: Duration::from_secs(1),
            backoff_cap: Duration::from_secs(300),
            max_failures: 16,
            max_starts: 24,
            when_dead: WhenDead::Block,
        }
    }
}

impl Default for Checked<DeliveryPolicy> {
    /// The defaults, which go together.
    fn default() -> Self {
        Self::new(DeliveryPolicy::default(), ())
    }
}

impl Sealed for DeliveryPolicy {}

impl Settings for DeliveryPolicy {
    type Against = ();
}

impl DeliveryPolicy {
    /// The policy, if its settings go together.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if a limit is zero, the backoff is shorter than a millisecond or longer than its
    /// cap, or `max_starts` is not larger than `max_failures`.
    pub fn checked(self) -> Result<Checked<Self>, Invalid> {
        let refuse = |field, reason: String| Err(Invalid::Unsafe { field, reason: reason.into() });
        let Self {
            backoff_base: base,
            backoff_cap: cap,
            max_failures: failures,
            max_starts: starts,
            when_dead: _,
        } = self;
        if base < Duration::from_millis(1) {
            let reason = format!(
                "it is {base:?}, a failing event would be retried in a hot loop; give at least 1 ms"
            );
            return refuse("backoff_base", reason);
        }
        if cap < base {
            return refuse(
                "backoff_cap",
                format!("it is {cap:?}, shorter than backoff_base ({base:?})"),
            );
        }
        if failures == 0 {
            return refuse(
                "max_failures",
                "it is 0, no event could ever be published; give at least 1".into(),
            );
        }
        if starts <= failures {
            let reason = format!(
                "it is {starts}, but each failure is a start too; give more than max_failures ({failures})"
            );
            return refuse("max_starts", reason);
        }
        Ok(Checked::new(self, ()))
    }

    /// Refuses a lease that is longer than the longest backoff: an event whose relay has died would
    /// be retried for longer than consumers need remember it (F10).
    pub(crate) fn check_lease(&self, lease: Duration) -> Result<(), Invalid> {
        if lease <= self.backoff_cap {
            return Ok(());
        }
        let cap = self.backoff_cap;
        let reason = format!(
            "it is {lease:?}, longer than backoff_cap ({cap:?}): an event would be retried for longer than its consumers need remember it; \
             give a shorter lease, or a longer backoff_cap"
        );
        Err(Invalid::Unsafe { field: "lease", reason: reason.into() })
    }

    /// How long an event may be retried before it is dead, if the broker can be reached: each start
    /// comes after the longest backoff, or when a lease has run out, which is not longer.
    #[must_use]
    pub fn longest_retry(&self) -> Duration {
        self.backoff_cap.saturating_mul(self.max_starts)
    }

    /// How long an event waits after its n-th failure, n from 1: the base doubled n - 1 times, at
    /// most the cap, and of that between one half and the whole. The jitter follows from the
    /// event's id and n alone, so it is the same in every run (F13).
    #[must_use]
    pub fn backoff(&self, event: &EventId, failures: u32) -> Duration {
        const NANOS: u128 = 1_000_000_000;
        // In nanoseconds, of which 128 bits hold more than a duration has.
        let doubled =
            self.backoff_base.as_nanos().saturating_mul(1 << failures.saturating_sub(1).min(127));
        let half = doubled.min(self.backoff_cap.as_nanos()) / 2;
        let digest = Digest::of_parts(
            "twobox/jitter/1",
            [event.as_str().as_bytes(), &failures.to_be_bytes()[..]],
        );
        let jitter = half * u128::from(digest.0[0]) / 255;
        let nanos = half + jitter;
        // (`Duration::from_nanos_u128` needs Rust 1.93.) The cap is a duration, so its seconds fit.
        let waits = Duration::new((nanos / NANOS) as u64, (nanos % NANOS) as u32);
        waits.max(Duration::from_millis(1))
    }
}
