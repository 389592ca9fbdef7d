//! The conformance suite on the reference store, and how much it runs.

mod common;

use common::Memory;
use twobox_conformance::Failure;
use twobox_conformance::matrix::{Tally, pairs, singles};
use twobox_conformance::scenario::ALL;

twobox_conformance::suite!(Memory);

#[test]
#[ignore = "x"]
fn tally() {
    for s in ALL {
        let t = std::time::Instant::now();
        let a = singles::<Memory>(s);
        let t1 = t.elapsed();
        let b = pairs::<Memory>(s, 1);
        println!("{} {a:?} {t1:?} {b:?} {:?}", s.name, t.elapsed());
    }
}
