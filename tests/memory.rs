//! The conformance suite on the reference store: all of it, with each single fault in each layout
//! and recovery, and all pairs. Other stores are compared with this one, and run less.

mod common;

use common::Memory;
use twobox_conformance::matrix::{pairs, singles};
use twobox_conformance::scenario::ALL;
use twobox_conformance::{Failure, Fault, snapshot};

twobox_conformance::suite!(Memory);

/// The matrix is not empty by mistake: each scenario has faults at load, apply, commit and begin,
/// and each kind of fault strikes somewhere.
#[test]
fn every_kind_of_fault_strikes() -> Result<(), Failure> {
    for fault in Fault::ALL {
        let struck = ALL
            .iter()
            .filter(|scenario| matches!(snapshot::strikes::<Memory>(scenario, fault), Ok(true)))
            .count();
        let least = if fault.site() == twobox_conformance::Site::Publish { 15 } else { ALL.len() };
        assert!(struck >= least, "{} strikes in {struck} scenarios only", fault.name());
    }
    Ok(())
}

/// The shortest scenario has 23 points, 109 runs with a single fault in each layout, and more
/// than 900 pairs. Fewer would mean that the matrix does not reach what it should.
#[test]
fn the_matrix_is_as_large_as_it_should_be() -> Result<(), Failure> {
    let scenario = &twobox_conformance::scenario::buy_once;
    let (one, two) = (singles::<Memory>(scenario)?, pairs::<Memory>(scenario, 1)?);
    assert_eq!((one.points, one.singles), (46, 218));
    assert!(two.pairs > 900, "{two:?}");
    Ok(())
}

/// How much all of it is, and how long it takes: `cargo test --test memory how_much -- --ignored
/// --nocapture`.
#[test]
#[ignore = "it only prints"]
fn how_much() -> Result<(), Failure> {
    let (mut points, mut one, mut two, mut known) = (0, 0, 0, 0);
    for scenario in ALL {
        let (single, pair) = (singles::<Memory>(scenario)?, pairs::<Memory>(scenario, 1)?);
        println!("{:20} {single:?} {pair:?}", scenario.name);
        points += single.points;
        one += single.singles;
        two += pair.pairs;
        known += pair.known;
    }
    println!(
        "{} scenarios, {points} points, {one} single faults, {two} pairs, of which {known} ended early",
        ALL.len()
    );
    Ok(())
}
