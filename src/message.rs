//! An event on its way: what a publisher is given, and what a consumer gets.

use crate::event::Event;
use crate::time::Millis;

/// An event on its way: what a publisher is given, and what a consumer gets.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Message {
    /// The envelope and the payload.
    pub event: Event,
    /// Where it stands among the events of its lane.
    pub place: LanePlace,
    /// Which start of a publish this is, from 1. A consumer must not rely on it.
    pub attempt: u32,
}

/// Where an event stands among those of its lane, as its sender counts them, so that a
/// consumer can put events in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LanePlace {
    /// When the lane began to count. It begins anew if it was purged after it had been idle for its
    /// retention.
    pub begun: Millis,
    /// The event's place in that count, from 1.
    pub sequence: u64,
    /// The place of the event that is published before it, 0 if there was none. A consumer that has
    /// applied that one may apply this one.
    pub after: u64,
}
