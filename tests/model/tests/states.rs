//! All states of small worlds (P1 to P8), and that the judge sees what is wrong.

use core::time::Duration;
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};
use twobox_model::{Bug, Scope};

/// Looks at all states and prints how many there are.
fn check(name: &str, scope: Scope) {
    let begun = Instant::now();
    let checker = scope.checker().threads(2).spawn_bfs().join();
    let (states, depth) = (checker.unique_state_count(), checker.max_depth());
    println!("{name}: {states} states, depth {depth}, {:.1} s", begun.elapsed().as_secs_f32());
    for (property, path) in checker.discoveries() {
        println!("{property} is broken by");
        for action in path.clone().into_actions() {
            println!("    {action:?}");
        }
        println!("{:#?}", path.last_state());
    }
    assert!(checker.is_done() && checker.discoveries().is_empty(), "{name}: a promise is broken, see above");
}

#[test]
fn deliveries() {
    check("deliveries", Scope { ..Scope::new() });
}
