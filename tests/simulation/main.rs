//! An hour of three relays, two consumers and a broker with bad days, in simulated time.
//!
//! Everything that can go wrong does, by script and by chance: relays die with leases in their
//! hands or sleep through them, a message brings down whoever publishes it, the broker is slow and
//! then away, confirmations get lost, a clock steps back, a relay is stopped and started again. At
//! the end, each event has had its effect once at each consumer and in order, except those that
//! nobody could deliver, and these are exactly the ones that are dead (P3, P4, P5, F4, F15).
//!
//! All of it follows from a seed. A failure prints it; `TWOBOX_SEED=<seed> cargo test --test
//! simulation` runs it again.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

mod chance;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use twobox::{Store, WhenDead};
use twobox_memory::MemoryStore;
use twobox_redb::RedbStore;

use world::{Plan, Told, World};

/// The seeds to run: those given, or the one that the user asks for.
fn seeds(given: impl IntoIterator<Item = u64>) -> Vec<u64> {
    match std::env::var("TWOBOX_SEED") {
        Ok(seed) => vec![seed.parse().expect("TWOBOX_SEED is a number")],
        Err(_) => given.into_iter().collect(),
    }
}

/// Runs the hour, checks how it ended, and gives all tables of both stores, and what has happened.
fn simulate<S: Store + 'static>(plan: Plan, open: fn() -> S) -> (String, Told) {
    let run = || {
        let (sender, receiver) = (open(), open());
        let mut world = World::new(plan, &sender, &receiver);
        world.run();
        world.check();
        (world.tables(), world.told)
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        panic!("with TWOBOX_SEED={} and {plan:?}: {}", plan.seed, text.unwrap_or("it panicked"))
    })
}

fn redb() -> RedbStore {
    RedbStore::create_on(redb::backends::InMemoryBackend::new()).unwrap()
}

#[test]
fn ten_thousand_events() {
    for seed in seeds([1]) {
        let plan = Plan { seed, events: 10_000, keys: 200, when_dead: WhenDead::Continue };
        let (_, told) = simulate(plan, MemoryStore::new);
        // The script was not for nothing.
        let Told {
            deaths,
            unavailable,
            lost_confirmations,
            duplicates,
            stale,
            renewals,
            rolled_back,
        } = told;
        assert!(
            deaths > 10 && unavailable > 100 && stale > 0 && renewals > 10 && rolled_back > 100
        );
        assert!(lost_confirmations > 50 && duplicates > lost_confirmations);
    }
}

#[test]
fn many_hours() {
    for seed in seeds(100..112) {
        let when_dead = if seed % 2 == 0 { WhenDead::Continue } else { WhenDead::Block };
        simulate(Plan { seed, events: 400, keys: 12, when_dead }, MemoryStore::new);
    }
}

/// The same seed ends in the same tables to the last byte, on whichever store.
#[test]
fn the_same_seed_is_the_same_hour() {
    for seed in seeds([7]) {
        let plan = Plan { seed, events: 150, keys: 8, when_dead: WhenDead::Block };
        let (first, _) = simulate(plan, MemoryStore::new);
        assert!(first == simulate(plan, MemoryStore::new).0, "it differs from run to run");
        assert!(first == simulate(plan, redb).0, "it differs from store to store");
        assert!(
            first != simulate(Plan { seed: seed + 1, ..plan }, MemoryStore::new).0,
            "the seed counts"
        );
    }
}
