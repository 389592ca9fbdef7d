//! What a relay tells `tracing`, if that feature is on.

#![cfg_attr(not(feature = "tracing"), expect(unused_variables, reason = "without the feature nothing is told"))]

use twobox::relay::{Message, Phase, Published};
use twobox::{Claimed, Reason, Renewed, Settled};

/// Publishes in a span of its own.
pub(crate) fn publish(message: &Message, publish: impl FnOnce() -> Published) -> Published {
    #[cfg(feature = "tracing")]
    let _span = {
        let event = &message.event;
        tracing::debug_span!("publish", id = %event.id, r#type = %event.event_type, attempt = message.attempt).entered()
    };
    let published = publish();
    #[cfg(feature = "tracing")]
    match &published {
        Published::Confirmed => tracing::debug!("confirmed"),
        Published::Failed(reason) => tracing::warn!(%reason, "failed"),
        Published::Rejected(reason) => tracing::error!(%reason, "rejected"),
        Published::Deferred(reason) => tracing::debug!(%reason, "deferred"),
        Published::Unavailable(reason) => tracing::warn!(%reason, "the broker cannot be reached"),
        Published::Abandoned => tracing::debug!("abandoned"),
    }
    published
}

pub(crate) fn exchanged(settled: Option<&Settled>, claimed: Option<&Claimed>) {
    #[cfg(feature = "tracing")]
    {
        if let Some(settled) = settled {
            let Settled { confirmed, retried, released, dead, stale } = settled;
            tracing::debug!(confirmed, retried, released, dead = dead.len(), stale = stale.len(), "settled");
            dead.iter().for_each(|id| tracing::error!(%id, "dead"));
            stale.iter().for_each(|stale| tracing::warn!("{stale}"));
        }
        if let Some(claimed) = claimed {
            let events: usize = claimed.runs.iter().map(|run| run.deliveries.len()).sum();
            tracing::debug!(lanes = claimed.runs.len(), events, "claimed");
            claimed.dead.iter().for_each(|id| tracing::error!(%id, "dead: it was started too often"));
        }
    }
}

pub(crate) fn renewed(renewed: &Renewed) {
    #[cfg(feature = "tracing")]
    {
        tracing::debug!(leases = renewed.leases.len(), "renewed");
        renewed.stale.iter().for_each(|stale| tracing::warn!("{stale}"));
    }
}

pub(crate) fn store_failed(reason: &Reason) {
    #[cfg(feature = "tracing")]
    tracing::warn!(%reason, "the store failed");
}

pub(crate) fn phase(phase: Phase) {
    #[cfg(feature = "tracing")]
    tracing::info!(?phase, "the relay is now");
}
