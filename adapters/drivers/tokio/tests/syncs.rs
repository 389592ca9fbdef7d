//! What deliveries cost on a disk: whether a commit may be lost comes through to the store.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::Duration;

use redb::StorageBackend;
use redb::backends::InMemoryBackend;
use twobox::relay::{AsyncPublisher, Published, RelaySettings};
use twobox::store::asynchronous::AsyncStore;
use twobox::{Draft, Message, Millis, Owner, Request};
use twobox_redb::RedbOptions;
use twobox_tokio::{Blocking, RelayTask, tokio_clock};

const START: Millis = Millis::new(1_000_000);

/// A storage in memory that counts its syncs, beside once for each growth of the file.
#[derive(Debug, Clone, Default)]
struct Counted(Arc<(InMemoryBackend, AtomicIsize)>);

impl Counted {
    fn syncs(&self) -> isize {
        self.0.1.load(Ordering::SeqCst)
    }
}

impl StorageBackend for Counted {
    fn len(&self) -> io::Result<u64> {
        self.0.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if len > self.0.0.len()? {
            self.0.1.fetch_sub(1, Ordering::SeqCst);
        }
        self.0.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.1.fetch_add(1, Ordering::SeqCst);
        self.0.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.0.write(offset, data)
    }
}

/// Fails for each event once.
struct FailsFirst;

impl AsyncPublisher for FailsFirst {
    async fn publish(&self, batch: &[Message], _now: Millis) -> Vec<Published> {
        let answer = |message: &Message| match message.attempt {
            1 => Published::Failed(twobox::Reason::new("no route")),
            _ => Published::Confirmed,
        };
        batch.iter().map(answer).collect()
    }
}

/// P3, P9: with `sync_deliveries(false)`, to deliver costs no sync, and to place an order one as
/// before (P1); else each transaction of the relay costs one.
#[tokio::test(start_paused = true)]
async fn deliveries_that_may_be_lost_are_not_synced() {
    for synced in [true, false] {
        let storage = Counted::default();
        let store = RedbOptions::new().sync_deliveries(synced).create_on(storage.clone()).unwrap();
        let store = Blocking::new(store);
        let before = storage.syncs();
        for n in 0..20 {
            let request = Request::of("shop", format!("req-{n}"), [("item", "notebook")]).unwrap();
            let draft = Draft::json("order.created", "{}").unwrap();
            let order = request.order(format!("order-{n}"), "{}", draft).unwrap();
            store.run(order, START).await.unwrap();
        }
        let placed = storage.syncs();
        assert_eq!(placed - before, 20, "P1: synced {synced}");

        let settings = RelaySettings::new(Owner::new("relay-1").unwrap());
        let relay =
            RelayTask::spawn(store.clone(), FailsFirst, settings, tokio_clock(START)).unwrap();
        relay.wait_for(|status| status.counters.confirmed == 20).await;
        let end = relay.stop(Duration::ZERO).await;
        assert_eq!((end.counters.failed, end.error), (20, None));
        let delivered = storage.syncs() - placed;
        assert_eq!(delivered > 0, synced, "synced {synced}: {delivered} syncs");
    }
}
