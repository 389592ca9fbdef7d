//! A million orders through their whole life on one file, with retention: how large the file and
//! the process become.
//!
//! `cargo run --release -p twobox-speed --bin soak [-- ORDERS]` writes `benches/data/soak.csv`.

// A measurement that cannot go on has nothing to report.
#![allow(clippy::unwrap_used)]

use std::convert::Infallible;
use std::fs;
use std::num::NonZeroU16;
use std::time::Duration;

use twobox::relay::{Relay, RelaySettings};
use twobox::{
    Body, CommitOrder, Consumer, DeliveryPolicy, Draft, Fingerprint, Handled, InProcess, Inbox,
    Message, Millis, Moment, OrderId, Owner, Request, Retention, RunError, Store,
};
use twobox_redb::RedbStore;
use twobox_speed::report::Data;

const BATCH: u64 = 256;
/// So many batches between two purges.
const PURGE_EVERY: u64 = 40;
/// The time from one batch to the next: 256 orders a second.
const TICK: Duration = Duration::from_secs(1);

fn main() {
    let orders: u64 = std::env::args().nth(1).map_or(1_000_000, |orders| orders.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("soak.redb");
    let store = RedbStore::create(&file).unwrap();
    // Retried for less than a minute and a half, so that an inbox of three minutes is safe.
    let policy = DeliveryPolicy {
        backoff_cap: Duration::from_secs(10),
        max_failures: 5,
        max_starts: 8,
        ..DeliveryPolicy::default()
    };
    let policy = policy.checked().unwrap();
    let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
    let retention = Retention {
        events: minutes(1),
        inbox: minutes(3),
        requests: minutes(3),
        orders: Some(minutes(3)),
        positions: None,
    };
    let retention = retention.checked(&policy).unwrap();

    let mut data =
        Data::new("soak.csv", &[folder.path()], "orders,file bytes,resident bytes,rows purged");
    let (mut now, mut purged) = (Millis::new(1_000_000_000), 0);
    let settings = RelaySettings {
        lease: policy.backoff_cap,
        policy,
        ..RelaySettings::new(Owner::new("relay-1").unwrap())
    };
    let inbox = Inbox::new(&store, Consumer::new("loyalty").unwrap());
    let publisher = InProcess::new(inbox, |_, _: &Message| Ok::<_, Infallible>(Handled::Done));
    let mut relay = Relay::new(&store, publisher, settings, Moment::steady(now)).unwrap();
    for batch in 0..orders.div_ceil(BATCH) {
        let placed = store.write(now, |tx| {
            (batch * BATCH..(batch + 1) * BATCH).try_for_each(|n| {
                let request = Request::new(
                    "shop",
                    format!("req-{n:09}"),
                    Fingerprint::of([("n", n.to_string())]),
                )
                .unwrap();
                let body = Body::text("x".repeat(200)).unwrap();
                let event = Draft::new("order.created", body.clone()).unwrap();
                tx.run(
                    CommitOrder::new(
                        &request,
                        OrderId::new(format!("order-{n:09}")).unwrap(),
                        body,
                        [event],
                    )
                    .unwrap(),
                )
                .map(drop)
            })
        });
        placed.map_err(RunError::flatten).unwrap();
        let confirmed = relay.run_until_idle(Moment::steady(now)).unwrap().confirmed;
        assert_eq!(confirmed, (batch + 1) * BATCH, "everything is delivered");
        now = now + TICK;
        if batch % PURGE_EVERY == PURGE_EVERY - 1 {
            purged += twobox::purge_all(&store, &retention, NonZeroU16::MAX, now).unwrap();
            let length = fs::metadata(&file).unwrap().len();
            data.push(&format!("{},{length},{},{purged}", (batch + 1) * BATCH, resident()));
        }
    }
    data.keep();
}

/// What the process has in memory, in bytes.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}
