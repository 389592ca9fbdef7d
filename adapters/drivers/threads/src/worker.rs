//! A worker: publishes one batch after the other, and outlives the panics of its publisher.

use std::panic::{AssertUnwindSafe, catch_unwind};

use twobox::relay::host::{messages, published};
use twobox::relay::{Published, Publisher};

use crate::shared::{Batch, Shared};

pub(crate) fn work<P: Publisher>(mut publisher: P, shared: &Shared) {
    while let Some(Batch { tickets, now }) = shared.jobs.next(publisher.batch()) {
        let batch = messages(&tickets);
        // After a panic the publisher is called again: what it holds is its own to keep in order.
        let given = catch_unwind(AssertUnwindSafe(|| publisher.publish(&batch, now)));
        let mut published = published(tickets, given);
        // What waits for a worker would only run into the same outage (F15).
        if published.iter().any(|(_, answer)| matches!(answer, Published::Unavailable(_))) {
            let taken_back = shared.jobs.take_back(|_| true);
            published.extend(taken_back.into_iter().map(|ticket| (ticket, Published::Abandoned)));
        }
        shared.mailbox.post(|mail| mail.answers.extend(published));
    }
}
