//! How a consumer receives, and what became of an event there: what an inbox and its flow share.

use crate::ids::{Consumer, Reason};
use crate::message::Message;
use crate::transition::receive::{ContentDiffers, CountFailure, Receive};

/// How a consumer receives, as its inbox was told: see [`Inbox::reception`](crate::Inbox::reception).
#[derive(Debug, Clone)]
pub struct Reception {
    pub(crate) consumer: Consumer,
    pub(crate) max_failures: u32,
    pub(crate) in_order: bool,
}

impl Reception {
    pub(crate) fn receive(&self, message: &Message) -> Receive {
        let receive = Receive::new(self.consumer.clone(), &message.event);
        if !self.in_order {
            return receive;
        }
        receive.in_order(message.event.ordering_key.clone(), message.place)
    }

    pub(crate) fn count_failure(&self, message: &Message, reason: Reason) -> CountFailure {
        let (consumer, limit) = (self.consumer.clone(), self.max_failures);
        let count = CountFailure::new(consumer, &message.event, reason, limit);
        if !self.in_order {
            return count;
        }
        count.in_order(message.event.ordering_key.clone(), message.place)
    }
}

/// What became of an event at a consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Receipt {
    /// Its effect is committed now.
    Applied,
    /// Its effect was committed before.
    Duplicate,
    /// It is to come again, for this reason; nothing was written.
    Deferred(Reason),
    /// It is to come again when the event with this sequence of its ordering key has been applied;
    /// nothing was written.
    WaitsFor(u64),
    /// The handler failed; that was counted, its effect was rolled back, and the event is to come
    /// again.
    Failed(Reason),
    /// It has failed too often and is set aside, with the last reason; it need not come again.
    Poisoned,
    /// Its content differs from what was received under its id.
    Refused(ContentDiffers),
}
