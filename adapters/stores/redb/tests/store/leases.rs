//! Leases do not outlive the process that had the file (F32).

use std::time::Duration;

use redb::Database;
use twobox::{
    Body, Claim, Claimed, CommitOrder, DeliveryPolicy, Draft, Load, Millis, OrderId, OrderingKey,
    Owner, Reader, Register, Request, RunError, Settle, Stale, Store,
};
use twobox_redb::{RedbError, RedbOptions, RedbStore};

use crate::common::{Disk, at};

const NOW: Millis = at(10_000);
/// More than are looked at in one transaction.
const LANES: usize = 600;

fn fill(store: &RedbStore) {
    let events = |order: usize| {
        (0..100).map(move |n| {
            let lane = OrderingKey::new(format!("lane-{:04}", order * 100 + n)).unwrap();
            Draft::json("created", "{}").unwrap().ordering_key(lane)
        })
    };
    for order in 0..LANES / 100 {
        let request = Request::of("shop", format!("req-{order}"), [("item", "pen")]).unwrap();
        let id = OrderId::new(format!("order-{order}")).unwrap();
        let order =
            CommitOrder::new(&request, id, Body::json("{}").unwrap(), events(order)).unwrap();
        assert!(!store.run(order, NOW).unwrap().repeated);
    }
}

fn claim(store: &RedbStore, limit: usize) -> Claimed {
    let policy = DeliveryPolicy::default().checked().unwrap();
    let owner = Owner::new("relay-1").unwrap();
    let lease = Duration::from_secs(30);
    store.run(Claim::new(&policy, owner, lease, limit).unwrap(), NOW).unwrap()
}

fn leased(store: &RedbStore) -> u64 {
    store.view().unwrap().stats(NOW).unwrap().all.leased
}

/// P3, P6: all of them, however many; a holder from before is refused; what was never answered is
/// counted.
#[test]
fn f32_opening_ends_all_leases_and_their_holders_are_refused() {
    let disk = Disk::default();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    fill(&store);
    let old = claim(&store, LANES - 10);
    assert_eq!(leased(&store), LANES as u64 - 10);
    store.close().unwrap();

    let store = RedbStore::open_on(disk.clone()).unwrap();
    assert_eq!(leased(&store), 0);
    let policy = DeliveryPolicy::default().checked().unwrap();
    let settle = |store: &RedbStore| {
        let settlements: Vec<_> = old.leased.iter().map(|leased| leased.settle(1, None)).collect();
        let settled = store.run(Settle::new(&policy, settlements), NOW).unwrap();
        assert_eq!((settled.stale.len(), settled.confirmed), (old.leased.len(), 0));
        settled.stale
    };
    assert!(settle(&store).iter().all(|stale| stale.why == Stale::Ended));
    // On the same clock: nothing has to run out.
    let again = claim(&store, LANES);
    assert_eq!(again.leased.len(), LANES);
    let attempts = again.leased.iter().map(|leased| leased.events[0].message.attempt);
    assert_eq!(attempts.filter(|attempt| *attempt == 2).count(), LANES - 10, "F4");
    assert!(settle(&store).iter().all(|stale| matches!(stale.why, Stale::TakenOver { .. })));
}

/// The leases of a relay that is alive stay: where the store opens its file again by itself, in a
/// database of the user's, and where opening is told to keep them.
#[test]
fn f32_leases_of_the_living_stay() {
    let disk = Disk::default();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    fill(&store);
    let _claimed = claim(&store, 10);
    disk.fail_once(0);
    let request = Request::of("shop", "another", [("item", "pen")]).unwrap();
    let broken = store.run(Register::new(&request), NOW);
    assert!(matches!(broken, Err(RunError::Unknown(RedbError::Io(_)))), "{broken:?}");
    assert_eq!(leased(&store), 10, "opened again by itself");
    store.close().unwrap();
    let store = RedbOptions::new().end_leases(false).open_on(disk.clone()).unwrap();
    assert_eq!(leased(&store), 10);
    store.close().unwrap();
    let database = Database::builder().create_with_backend(disk).unwrap();
    let store = RedbStore::with_database(database).unwrap();
    assert_eq!(leased(&store), 10);
}
