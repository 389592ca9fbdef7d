//! What the relay tells `tracing`: each step, with the event's id, type and attempt on the span of
//! its publish.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use twobox::relay::{AsyncPublisher, Published, RelaySettings};
use twobox::{
    Body, CommitOrder, Draft, Fingerprint, Message, Millis, OrderId, Owner, Reason, Request, Store,
};
use twobox_memory::MemoryStore;
use twobox_tokio::{Blocking, RelayTask, tokio_clock};

/// Writes down what is told, a line each.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

impl Lines {
    fn add(&self, mut line: Line, fields: impl FnOnce(&mut Line)) {
        fields(&mut line);
        self.0.lock().unwrap().push(line.0);
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("twobox")
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.add(Line(span.metadata().name().into()), |line| span.record(line));
        Id::from_u64(1)
    }
    fn event(&self, event: &Event<'_>) {
        self.add(Line(event.metadata().level().to_string()), |line| event.record(line));
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Fails at first, then hangs, then confirms.
struct Unwell;

impl AsyncPublisher for Unwell {
    async fn publish(&self, batch: &[Message], _now: Millis) -> Vec<Published> {
        let answer = match batch[0].attempt {
            1 => Published::Failed(Reason::new("no route")),
            2 => std::future::pending().await,
            _ => Published::Confirmed,
        };
        batch.iter().map(|_| answer.clone()).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn each_step_is_told() {
    let lines = Lines::default();
    tracing::subscriber::set_global_default(lines.clone()).unwrap();
    let store = Arc::new(Blocking::new(MemoryStore::new()));
    let request = Request::new("test", "req-1", Fingerprint::of([("n", "1")])).unwrap();
    let body = Body::text("1").unwrap();
    let draft = Draft::new("happened", body.clone()).unwrap();
    let order =
        CommitOrder::new(&request, OrderId::new("order-1").unwrap(), body, [draft]).unwrap();
    Store::run(&**store.store(), order, Millis::new(1_000)).unwrap();
    let settings = RelaySettings::new(Owner::new("relay-1").unwrap());
    let relay = RelayTask::spawn(store, Unwell, settings, tokio_clock(Millis::new(1_000))).unwrap();
    relay.wait_for(|status| status.counters.confirmed == 1).await;
    relay.stop(Duration::ZERO).await;
    let lines = lines.0.lock().unwrap().join("\n");
    for told in [
        "DEBUG message=claimed lanes=1 events=1",
        "publish id=order-1/1 lane=order-1 type=happened attempt=1",
        "WARN message=failed id=order-1/1 lane=order-1 reason=no route",
        "DEBUG message=settled confirmed=0 retried=1 released=0 dead=0 stale=0",
        "WARN message=overdue id=order-1/1 lane=order-1 \
         reason=the publish did not end within 10000 ms",
        "publish id=order-1/1 lane=order-1 type=happened attempt=3",
        "DEBUG message=confirmed",
        "DEBUG message=settled confirmed=1 retried=0 released=0 dead=0 stale=0",
        "INFO message=the relay is now phase=Stopped",
    ] {
        assert!(lines.lines().any(|line| line == told), "{told:?} is missing in\n{lines}");
    }
}
