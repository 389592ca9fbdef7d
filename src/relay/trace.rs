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

/// What everything is told under, so that a program filters by the name of the library (F48).
#[cfg(feature = "tracing")]
const TARGET: &str = "twobox";

#[cfg(feature = "tracing")]
fn span(message: &Message) -> tracing::Span {
    let event = &message.event;
    tracing::debug_span!(target: TARGET, "publish", id = %event.id, lane = %event.lane(), r#type = %event.event_type, attempt = message.attempt)
}

/// Tells what a publish came to.
pub fn published(message: &Message, published: &Published) {
    // A span may be filtered out, so what warns names the event itself.
    #[cfg(feature = "tracing")]
    let (id, lane) = (&message.event.id, message.event.lane());
    #[cfg(feature = "tracing")]
    span(message).in_scope(|| match published {
        Published::Confirmed => tracing::debug!(target: TARGET, "confirmed"),
        Published::Failed(reason) => tracing::warn!(target: TARGET, %id, %lane, %reason, "failed"),
        Published::Rejected(reason) => {
            tracing::error!(target: TARGET, %id, %lane, %reason, "rejected");
        }
        Published::Deferred(reason) => tracing::debug!(target: TARGET, %reason, "deferred"),
        Published::Unavailable(reason) => {
            tracing::warn!(target: TARGET, %id, %lane, %reason, "the broker cannot be reached");
        }
        Published::Abandoned => tracing::debug!(target: TARGET, "abandoned"),
    });
}

/// Tells that a publish did not end in time.
pub fn overdue(id: &EventId, lane: &LaneKey, reason: &Reason) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, %id, %lane, %reason, "overdue");
}

/// Tells what an exchange came to.
pub fn exchanged((settled, claimed): &Exchanged) {
    #[cfg(feature = "tracing")]
    {
        if let Some(settled) = settled {
            let crate::Settled { confirmed, retried, released, dead, stale } = settled;
            tracing::debug!(target: TARGET, confirmed,
                retried,
                released,
                dead = dead.len(),
                stale = stale.len(),
                "settled"
            );
            dead.iter().for_each(|(id, lane)| tracing::error!(target: TARGET, %id, %lane, "dead"));
            stale.iter().for_each(
                |stale| tracing::warn!(target: TARGET, lane = %stale.lease.lane, "{stale}"),
            );
        }
        if let Some(claimed) = claimed {
            let events: usize = claimed.leased.iter().map(|leased| leased.events.len()).sum();
            tracing::debug!(target: TARGET, lanes = claimed.leased.len(), events, "claimed");
            for (id, lane) in &claimed.dead {
                tracing::error!(target: TARGET, %id, %lane, "dead: it was started too often");
            }
        }
    }
}

/// Tells which leases were renewed, and which are lost.
pub fn renewed(renewed: &Renewed) {
    #[cfg(feature = "tracing")]
    {
        tracing::debug!(target: TARGET, leases = renewed.leases.len(), "renewed");
        renewed
            .stale
            .iter()
            .for_each(|stale| tracing::warn!(target: TARGET, lane = %stale.lease.lane, "{stale}"));
    }
}

/// Tells that the store failed.
pub fn store_failed(reason: &dyn Display) {
    #[cfg(feature = "tracing")]
    tracing::warn!(target: TARGET, %reason, "the store failed");
}

/// Tells what the relay is about now.
pub fn phase(phase: Phase) {
    #[cfg(feature = "tracing")]
    tracing::info!(target: TARGET, ?phase, "the relay is now");
}
