//! How long finished rows are kept. All defaults are here (P7).

use alloc::format;
use core::time::Duration;

use crate::checked::{Checked, Settings, sealed::Sealed};
use crate::ids::Invalid;
use crate::policy::DeliveryPolicy;

/// How long what is finished is kept, each kind with its own age.
///
/// ```
/// use core::time::Duration;
/// use twobox::{Checked, DeliveryPolicy, Retention};
///
/// let policy: Checked<DeliveryPolicy> = Checked::default();
/// let kept = Retention { events: Duration::from_secs(3600), ..Retention::default() }.checked(&policy)?;
///
/// // A consumer that forgets before the sender has stopped to redeliver would apply an event twice.
/// let too_short = Retention { inbox: Duration::from_secs(60), ..Retention::default() };
/// assert!(too_short.checked(&policy).is_err());
/// # Ok::<(), twobox::Invalid>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Retention {
    /// Events that are cancelled or discarded, from then on, and confirmed ones, from their commit
    /// on; and lanes in which nothing has happened for as long. Default 7 days.
    pub events: Duration,
    /// Inbox rows of applied events, with their effects, and finished calls: how long a consumer
    /// knows a redelivery again. Default 30 days.
    pub inbox: Duration,
    /// For how long at least a client's retry gets the first outcome. Default 30 days. A request
    /// key is kept for as long as its order is, so this only says how soon orders may go.
    pub requests: Duration,
    /// Orders with the keys of their requests, or `None` to keep them for ever. Default `None`. A
    /// retry that comes after its order is gone places it again, whichever id it takes. Both are
    /// kept for longer while an event of the order is pending or dead.
    pub orders: Option<Duration>,
    /// Positions of consumers that ask for order, or `None` to keep them for ever. Default `None`.
    /// A consumer whose position is gone waits for ever, unless the sender has forgotten the lane
    /// first; so this must be longer than the senders' retention of events, by more than the time
    /// between two of their purges.
    pub positions: Option<Duration>,
}

impl Default for Retention {
    fn default() -> Self {
        const DAY: u64 = 24 * 60 * 60;
        Self {
            events: Duration::from_secs(7 * DAY),
            inbox: Duration::from_secs(30 * DAY),
            requests: Duration::from_secs(30 * DAY),
            orders: None,
            positions: None,
        }
    }
}

impl Sealed for Retention {}

impl Settings for Retention {
    /// The sender's policy.
    type Against = Checked<DeliveryPolicy>;
}

impl Retention {
    /// The shortest retention of events and requests.
    pub const SHORTEST: Duration = Duration::from_secs(60);

    /// The retention, if it is safe with this delivery policy of the sender.
    ///
    /// # Errors
    ///
    /// [`Invalid::Unsafe`] if the inbox is kept for less than twice the longest time over which an
    /// event is retried ([`DeliveryPolicy::longest_retry`]), orders for less than request keys,
    /// positions for less than twice as long as events or less than the inbox, or events or request
    /// keys for less than [`Retention::SHORTEST`].
    pub fn checked(self, policy: &Checked<DeliveryPolicy>) -> Result<Checked<Self>, Invalid> {
        let refuse = |field, reason| Err(Invalid::Unsafe { field, reason });
        let needed = policy.longest_retry().saturating_mul(2);
        if self.inbox < needed {
            let (given, needed) = (self.inbox.as_secs(), needed.as_secs());
            let reason = format!(
                "{given} s is too short: an event may be retried for so long that a consumer must know it for {needed} s; \
                 keep the inbox for longer, or retry for less"
            );
            return refuse("retention of the inbox", reason.into());
        }
        for (field, age) in
            [("retention of events", self.events), ("retention of requests", self.requests)]
        {
            if age < Self::SHORTEST {
                return refuse(
                    field,
                    format!("give at least {} s", Self::SHORTEST.as_secs()).into(),
                );
            }
        }
        if self.orders.is_some_and(|orders| orders < self.requests) {
            return refuse(
                "retention of orders",
                "an order must be kept for as long as the request that placed it".into(),
            );
        }
        if self
            .positions
            .is_some_and(|positions| positions < self.inbox.max(self.events.saturating_mul(2)))
        {
            let reason = "a consumer would wait for ever for an event that the sender still counts from; keep positions for as long as \
                          the inbox, and twice as long as events";
            return refuse("retention of positions", reason.into());
        }
        Ok(Checked::new(self, policy.clone()))
    }
}

impl Checked<Retention> {
    /// How long after its commit a dead event may be redriven without a consumer having forgotten
    /// it (F10): an event that is redriven at the end of this time is still known when it is dead
    /// again.
    #[must_use]
    pub fn redrive_window(&self) -> RedriveWindow {
        RedriveWindow(self.inbox.saturating_sub(self.against().longest_retry()))
    }
}

/// For how long after its commit an event may be redriven, as a [checked](Retention::checked)
/// retention allows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RedriveWindow(Duration);

impl RedriveWindow {
    /// The same as a duration.
    #[must_use]
    pub const fn get(self) -> Duration {
        self.0
    }
}
