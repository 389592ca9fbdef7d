//! All states of small worlds (P1 to P8), and that the judge sees what is wrong.

#![allow(clippy::print_stdout, reason = "it prints how much was looked at, and what is wrong")]

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model, Path};
use twobox::{Table, WhenDead};
use twobox_model::{Bug, Scope, Step, World};

const TICK: Duration = Duration::from_millis(Scope::TICK);

fn show(property: &str, path: &Path<World, Step>) {
    println!("{property} is broken by");
    for step in path.clone().into_actions() {
        println!("    {step:?}");
    }
    println!("which comes to {:#?}", path.last_state());
}

/// Looks at all states and prints how many there are.
fn check(name: &str, scope: Scope) {
    let begun = Instant::now();
    let (longest, bound) = (Arc::clone(&scope.longest_drain), scope.drain_bound());
    let checker = scope.checker().threads(2).spawn_bfs().join();
    let (states, steps, depth) =
        (checker.unique_state_count(), checker.state_count(), checker.max_depth());
    let drain = longest.load(Ordering::Relaxed);
    println!(
        "{name}: {states} states, {steps} steps, depth {depth}; drained in {drain} steps at most, {bound} allowed; {:.1} s",
        begun.elapsed().as_secs_f32()
    );
    for (property, path) in checker.discoveries() {
        show(property, &path);
    }
    assert!(
        checker.is_done() && checker.discoveries().is_empty(),
        "{name}: a promise is broken, see above"
    );
}

/// One order with two events in two keys, with faults: crashes, lost answers, failed publishes, a
/// clock that steps back (P3, P6, P8).
fn one_order(faults: u8) -> Scope {
    Scope {
        requests: 1,
        events: vec![0, 1],
        relays: 1,
        faults,
        ticks: 1,
        clock_back: true,
        ..Scope::new()
    }
}

/// Clients that come again with other parameters and other order ids, and requests that are purged
/// (P1, P2, P7).
fn clients(ticks: u64) -> Scope {
    Scope {
        other_params: true,
        relays: 0,
        faults: 0,
        ticks,
        purges: vec![Table::Requests],
        ..Scope::new()
    }
    .keeping(|kept| kept.requests = TICK)
}

/// Two orders with three events in two keys and two relays (P3, P4, P6).
fn two_relays(faults: u8, ticks: u64) -> Scope {
    Scope { faults, ticks, ..Scope::new() }
}

/// A consumer that asks for order, where events are skipped: cancelled, given up, discarded,
/// redriven (P4, P5).
fn in_order(when_dead: WhenDead, faults: u8, operations: u8) -> Scope {
    let scope = Scope {
        events: vec![0, 2, 4],
        relays: 1,
        in_order: true,
        max_failures: 1,
        ticks: 0,
        faults,
        operations,
        ..Scope::new()
    };
    scope.delivered(|policy| {
        (policy.when_dead, policy.max_failures, policy.max_starts) = (when_dead, 1, 2);
    })
}

/// One order, for so long that everything is purged; the operator redrives what is dead (P5, P7,
/// F10).
fn retention(ticks: u64, faults: u8) -> Scope {
    let mut scope = Scope {
        requests: 1,
        events: vec![0],
        relays: 1,
        ticks,
        faults,
        operations: 1,
        longest_retry: Some(2),
        ..Scope::new()
    };
    scope.purges = vec![Table::Events, Table::Lanes, Table::Requests, Table::Inbox];
    scope
        .delivered(|policy| (policy.max_failures, policy.max_starts) = (1, 2))
        .keeping(|kept| kept.inbox = TICK * 4)
}

/// Two transactions at once, of which the first one read before the second one committed.
fn rivals(faults: u8, ticks: u64) -> Scope {
    Scope { requests: 1, events: vec![0, 1], rivals: true, faults, ticks, ..Scope::new() }
}

/// Two orders in one key and one relay, with or without a look at the lane that it settles (P3, P4,
/// P6).
fn appends(relays: u8, ticks: u64) -> Scope {
    Scope { relays, events: vec![0, 2], ..two_relays(1, ticks) }
}

/// Relays that are the real machine, with leases of two ticks (P3, P4, P6, P8, F3, F11, F12, F15).
fn machines(machines: u8, events: &[u8], faults: u8, ticks: u64) -> Scope {
    let requests = if events.iter().any(|event| *event >= 2) { 2 } else { 1 };
    let scope = Scope {
        requests,
        events: events.into(),
        relays: 0,
        machines,
        faults,
        ticks,
        ..Scope::new()
    };
    // No lease is longer than the longest backoff; the first one, of which there are no more, stays
    // a tick.
    scope.delivered(|policy| policy.backoff_cap = TICK * 2)
}

#[test]
fn one_order_and_every_fault() {
    check("one order, 1 fault", one_order(1));
}

#[test]
fn clients_that_come_again() {
    check("clients", clients(3));
}

#[test]
fn two_orders_and_two_relays() {
    check("two orders, two relays", two_relays(0, 1));
}

#[test]
fn consumers_in_order() {
    check("in order, block", in_order(WhenDead::Block, 1, 1));
    check("in order, continue", in_order(WhenDead::Continue, 1, 1));
}

#[test]
fn relays_that_are_machines() {
    check("a machine, one event, 1 fault", machines(1, &[0], 1, 2));
    check("two machines, one event", machines(2, &[0], 0, 1));
}

/// An append between a claim and its settlement is no conflict, and a settlement whose answer is
/// lost turns out to be stale, with a look and without one (P3, P4, P6, F11).
#[test]
fn appends_before_a_settlement() {
    check("appends, 1 fault", appends(1, 1));
}

#[test]
fn everything_is_purged() {
    check("retention", retention(5, 0));
}

#[test]
fn rival_transactions() {
    check("rivals", rivals(0, 1));
}

/// The large bounds: `cargo test --release -p twobox-model --test states -- --ignored --nocapture
/// --test-threads 1`.
macro_rules! large {
    ($($name:ident: $scope:expr;)*) => {$(
        #[test]
        #[ignore = "takes up to some minutes"]
        fn $name() {
            check(stringify!($name), $scope);
        }
    )*};
}

large! {
    large_one_order_and_two_faults: one_order(2);
    large_clients: clients(6);
    large_two_consumers: Scope { consumers: 2, ..one_order(1) };
    large_two_orders_two_relays: two_relays(0, 2);
    large_two_orders_one_fault: Scope { relays: 1, ..two_relays(1, 1) };
    large_one_key_two_relays: appends(2, 1);
    large_one_key_with_looks: Scope { assumes: false, ..appends(2, 1) };
    large_in_order_block: in_order(WhenDead::Block, 2, 2);
    large_in_order_continue: in_order(WhenDead::Continue, 2, 2);
    large_retention: retention(7, 1);
    large_rivals: rivals(1, 1);
    large_machine_two_keys: machines(1, &[0, 1], 1, 1);
    large_machine_one_key: machines(1, &[0, 2], 1, 1);
    large_machine_two_faults: machines(1, &[0], 2, 2);
    large_two_machines: machines(2, &[0], 0, 3);
    large_two_machines_two_events: machines(2, &[0, 2], 0, 1);
    large_two_machines_one_fault: machines(2, &[0], 1, 2);
}

/// With the bug, the checker finds that this promise is broken, and finds it as the first one.
fn finds(bug: Bug, property: &'static str, scope: Scope) {
    let scope = Scope { bug: Some(bug), ..scope };
    let checker =
        scope.checker().threads(1).finish_when(HasDiscoveries::AnyFailures).spawn_bfs().join();
    let discoveries = checker.discoveries();
    for (property, path) in &discoveries {
        println!("{bug:?}");
        show(property, path);
    }
    let found: BTreeSet<&str> = discoveries.keys().copied().collect();
    assert_eq!(found, BTreeSet::from([property]), "{bug:?}");
}

#[test]
fn p1_is_judged() {
    finds(Bug::ForgetFingerprint, "P1", clients(3));
}

#[test]
fn p2_is_judged() {
    finds(Bug::SplitOrder, "P2", one_order(0));
}

#[test]
fn p3_is_judged() {
    finds(Bug::LoseFailed, "P3", one_order(1));
    finds(Bug::ForgetDue, "P3", one_order(1));
    finds(Bug::MovePast, "P3", one_order(0));
}

#[test]
fn p4_is_judged() {
    finds(Bug::PassOver, "P4", appends(1, 1));
}

#[test]
fn p5_is_judged() {
    finds(Bug::DropInboxRow, "P5", one_order(0));
    finds(Bug::SkipOtherContent, "P5", Scope { other_params: true, ticks: 0, ..one_order(0) });
}

#[test]
fn p6_is_judged() {
    let two_keys = || Scope { requests: 1, events: vec![0, 1], ..two_relays(0, 1) };
    finds(Bug::IgnoreToken, "P6", Scope { assumes: false, ..two_keys() });
    finds(Bug::BlindEdit, "P6", two_keys());
    finds(Bug::IgnoreLease, "P6", two_keys());
}

#[test]
fn p7_is_judged() {
    finds(Bug::PurgePending, "P7", retention(3, 1));
    finds(Bug::PurgeEarly, "P7", retention(3, 1));
    finds(Bug::PurgeLane, "P7", retention(3, 1));
}

#[test]
fn machines_are_judged() {
    finds(Bug::ForgetDue, "P3", machines(1, &[0], 1, 1));
    finds(Bug::MovePast, "P3", machines(1, &[0], 0, 1));
    finds(Bug::IgnoreToken, "P6", Scope { assumes: false, ..machines(2, &[0], 0, 2) });
    finds(Bug::BlindEdit, "P6", machines(2, &[0], 0, 2));
    finds(Bug::BackoffForever, "P8", machines(1, &[0], 1, 1));
}

/// An event that is never due again is pending for ever: only the drain sees that (P8).
#[test]
fn p8_is_judged() {
    finds(Bug::BackoffForever, "P8", one_order(1));
}
