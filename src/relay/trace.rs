//! What the drivers of a relay tell `tracing`, if that feature is on; without it, each of these
//! does nothing.

#![cfg_attr(
    not(feature = "tracing"),
    expect(unused_variables, reason = "without the feature nothing is told")
)]

use core::fmt::Display;

use super::{Phase, Published};
use crate::flow::Exchanged;
use crate::ids::{EventId, LaneKey, Reason};
use crate::message::Message;
use crate::transition::settle::Renewed;

#[cfg(feature = "tracing")]
fn span(message: &Message) -> tracing::Span {
    let event = &message.event;
    tracing::debug_span!("publish", id = %event.id, r#type = %event.event_type, attempt = message.attempt)
}

/// Tells what a publish came to.
pub fn published(message: &Message, published: &Published) {
    #[cfg(feature = "tracing")]
    span(message).in_scope(|| match published {
        Published::Confirmed => tracing::debug!("confirmed"),
        Published::Failed(reason) => tracing::warn!(%reason, "failed"),
        Published::Rejected(reason) => tracing::error!(%reason, "rejected"),
        Published::Deferred(reason) => tracing::debug!(%reason, "deferred"),
        Published::Unavailable(reason) => tracing::warn!(%reason, "the broker cannot be reached"),
        Published::Abandoned => tracing::debug!("abandoned"),
    });
}

/// Tells that a publish did not end in time.
pub fn overdue(id: &EventId, lane: &LaneKey, reason: &Reason) {
    #[cfg(feature = "tracing")]
    tracing::warn!(%id, %lane, %reason, "overdue");
}

/// Tells what an exchange came to.
pub fn exchanged((settled, claimed): &Exchanged) {
    #[cfg(feature = "tracing")]
    {
        if let Some(settled) = settled {
            let crate::Settled { confirmed, retried, released, dead, stale } = settled;
            tracing::debug!(
                confirmed,
                retried,
                released,
                dead = dead.len(),
                stale = stale.len(),
                "settled"
            );
            dead.iter().for_each(|(id, lane)| tracing::error!(%id, %lane, "dead"));
            stale.iter().for_each(|stale| tracing::warn!("{stale}"));
        }
        if let Some(claimed) = claimed {
            let events: usize = claimed.leased.iter().map(|leased| leased.events.len()).sum();
            tracing::debug!(lanes = claimed.leased.len(), events, "claimed");
            for (id, lane) in &claimed.dead {
                tracing::error!(%id, %lane, "dead: it was started too often");
            }
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
