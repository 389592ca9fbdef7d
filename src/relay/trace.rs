//! What the drivers of a relay tell `tracing`, if that feature is on; without it, each of these
//! does nothing.

#![cfg_attr(
    not(feature = "tracing"),
    expect(unused_variables, reason = "without the feature nothing is told")
)]

use core::fmt::Display;
use core::future::Future;

use super::{Message, Phase, Published};
use crate::transition::claim::Claimed;
use crate::transition::settle::{Renewed, Settled};

#[cfg(feature = "tracing")]
fn span(message: &Message) -> tracing::Span {
    let event = &message.event;
    tracing::debug_span!("publish", id = %event.id, r#type = %event.event_type, attempt = message.attempt)
}

#[cfg(feature = "tracing")]
fn published(published: &Published) {
    match published {
        Published::Confirmed => tracing::debug!("confirmed"),
        Published::Failed(reason) => tracing::warn!(%reason, "failed"),
        Published::Rejected(reason) => tracing::error!(%reason, "rejected"),
        Published::Deferred(reason) => tracing::debug!(%reason, "deferred"),
        Published::Unavailable(reason) => tracing::warn!(%reason, "the broker cannot be reached"),
        Published::Abandoned => tracing::debug!("abandoned"),
    }
}

/// Publishes a message in a span of its own, and tells the answer there.
pub fn publish(message: &Message, publish: impl FnOnce() -> Published) -> Published {
    #[cfg(feature = "tracing")]
    let _span = span(message).entered();
    let answer = publish();
    #[cfg(feature = "tracing")]
    published(&answer);
    answer
}

/// As [`publish`].
pub async fn publish_async(
    message: &Message,
    publish: impl Future<Output = Published>,
) -> Published {
    #[cfg(feature = "tracing")]
    let publish = tracing::Instrument::instrument(
        async move {
            let answer = publish.await;
            published(&answer);
            answer
        },
        span(message),
    );
    publish.await
}

/// Tells what an exchange came to.
pub fn exchanged(settled: Option<&Settled>, claimed: Option<&Claimed>) {
    #[cfg(feature = "tracing")]
    {
        if let Some(settled) = settled {
            let Settled { confirmed, retried, released, dead, stale } = settled;
            tracing::debug!(
                confirmed,
                retried,
                released,
                dead = dead.len(),
                stale = stale.len(),
                "settled"
            );
            dead.iter().for_each(|id| tracing::error!(%id, "dead"));
            stale.iter().for_each(|stale| tracing::warn!("{stale}"));
        }
        if let Some(claimed) = claimed {
            let events: usize = claimed.runs.iter().map(|run| run.deliveries.len()).sum();
            tracing::debug!(lanes = claimed.runs.len(), events, "claimed");
            claimed
                .dead
                .iter()
                .for_each(|id| tracing::error!(%id, "dead: it was started too often"));
        }
    }
}

/// Tells which leases were renewed, and which are lost.
pub fn renewed(renewed: &Renewed) {
    #[cfg(feature = "tracing")]
    {
        tracing::debug!(leases = renewed.leases.len(), "renewed");
        renewed.stale.iter().for_each(|stale| tracing::warn!("{stale}"));
    }
}

/// Tells that the store failed.
pub fn store_failed(reason: &dyn Display) {
    #[cfg(feature = "tracing")]
    tracing::warn!(%reason, "the store failed");
}

/// Tells what the relay is about now.
pub fn phase(phase: Phase) {
    #[cfg(feature = "tracing")]
    tracing::info!(?phase, "the relay is now");
}
