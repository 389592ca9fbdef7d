//! A disk that fails once, below a relay on tokio (F31).

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redb::StorageBackend;
use twobox::Load;
use twobox::relay::{AsyncPublisher, Phase, Published, RelaySettings};
use twobox::store::asynchronous::{AsyncReader, AsyncStore};
use twobox::{Body, Draft, Message, Millis, Owner, Reader, Request};
use twobox_redb::RedbOptions;
use twobox_tokio::{Blocking, RelayTask, tokio_clock};

const START: Millis = Millis::new(1_000_000);

/// A storage in memory of which one call fails, and then all is well again.
#[derive(Debug, Clone, Default)]
struct FailsOnce(Arc<(redb::backends::InMemoryBackend, Mutex<Option<Call>>)>);

/// A kind of call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Read,
    Write,
    Sync,
}

impl FailsOnce {
    /// The next call of this kind fails.
    fn fail(&self, call: Call) {
        *self.0.1.lock().unwrap() = Some(call);
    }

    /// Whether it has.
    fn has_failed(&self) -> bool {
        self.0.1.lock().unwrap().is_none()
    }

    fn may_fail(&self, call: Call) -> io::Result<()> {
        match self.0.1.lock().unwrap().take_if(|fails| *fails == call) {
            Some(_) => Err(io::Error::other("the disk is gone")),
            None => Ok(()),
        }
    }
}

impl StorageBackend for FailsOnce {
    fn len(&self) -> io::Result<u64> {
        self.0.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.may_fail(Call::Read)?;
        StorageBackend::read(&self.0.0, offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.0.0.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.may_fail(Call::Sync)?;
        self.0.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.may_fail(Call::Write)?;
        StorageBackend::write(&self.0.0, offset, data)
    }
}

/// The first publish has the disk fail at what comes next.
struct Breaks(FailsOnce, Mutex<Option<Call>>);

impl AsyncPublisher for Breaks {
    async fn publish(&self, batch: &[Message], _now: Millis) -> Vec<Published> {
        if let Some(call) = self.1.lock().unwrap().take() {
            self.0.fail(call);
        }
        batch.iter().map(|_| Published::Confirmed).collect()
    }
}

/// P3: a call of the disk fails once while a relay settles, and the disk is well again: the relay
/// goes on by itself, and so does everyone else.
#[tokio::test(start_paused = true)]
async fn f31_a_relay_on_tokio_goes_on_when_the_disk_is_well_again() {
    for call in [Call::Read, Call::Write, Call::Sync] {
        let disk = FailsOnce::default();
        // With next to no cache it reads much; with enough, it writes in commits alone.
        let cache = if call == Call::Read { 16 << 10 } else { 1 << 20 };
        let options = RedbOptions::new().cache_bytes(cache);
        let store = Blocking::new(options.create_on(disk.clone()).unwrap());
        let place = async |n: usize| {
            let request = Request::of("shop", format!("req-{n}"), [("item", "notebook")]).unwrap();
            let draft =
                Draft::new("order.created", Body::text("x".repeat(5_000)).unwrap()).unwrap();
            let order = request.order(format!("order-{n}"), "{}", draft).unwrap();
            store.run(order, START).await
        };
        for n in 0..20 {
            place(n).await.unwrap();
        }
        let publisher = Breaks(disk.clone(), Mutex::new(Some(call)));
        let settings = RelaySettings::new(Owner::new("relay-1").unwrap());
        let relay =
            RelayTask::spawn(store.clone(), publisher, settings, tokio_clock(START)).unwrap();
        let failed = relay.wait_for(|status| status.counters.store_failures > 0).await;
        assert!(disk.has_failed() && failed.error.is_some(), "{call:?}");
        place(20).await.unwrap();
        let done = |status: &twobox::relay::Status| {
            status.phase == Phase::Running && status.counters.confirmed + status.counters.stale > 20
        };
        relay.wait_for(done).await;
        let end = relay.stop(Duration::ZERO).await;
        assert_eq!(end.error, None, "{call:?}");
        let pending = store.store().view().unwrap().stats(START).unwrap().all.pending;
        assert_eq!(pending, 0, "{call:?}");
        drop(store.view().await.unwrap());
    }
}
