//! A worker: publishes one message after the other, and outlives the panics of its publisher.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

use twobox::Reason;
use twobox::relay::{Published, Publisher, panicked, trace};

use crate::shared::{Job, Shared};

pub(crate) fn work<P: Publisher>(mut publisher: P, shared: &Shared) {
    while let Some(Job { ticket, message, now }) = shared.jobs.next() {
        // After a panic the publisher is called again: what it holds is its own to keep in order.
        let publish = AssertUnwindSafe(|| {
            publisher.publish(slice::from_ref(&message), now).into_iter().next()
        });
        let published = trace::publish(&message, || match catch_unwind(publish) {
            Ok(Some(answer)) => answer,
            Ok(None) => Published::Failed(Reason::new("the publisher gave no answer")),
            Err(panic) => Published::Failed(panicked("publisher", &*panic)),
        });
        // What waits for a worker would only run into the same outage (F15).
        let unavailable = matches!(published, Published::Unavailable(_));
        let taken_back =
            if unavailable { shared.jobs.take_back(|_| true) } else { VecDeque::new() };
        let taken_back = taken_back.into_iter().map(|job| (job.ticket, Published::Abandoned));
        shared
            .mailbox
            .post(|mail| mail.answers.extend([(ticket, published)].into_iter().chain(taken_back)));
    }
}
