//! The life of 2,560 orders, for a profiler: `phases CONTENDER BATCH BYTES`, with the phases as
//! functions of their own.
//!
//! ```text
//! valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*drain_phase*' target/release/phases twobox 256 100
//! ```

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

use twobox_speed::{ByHand, Contender, Order, Sqlite, WithTwobox};

const ORDERS: u64 = 2560;

#[inline(never)]
fn place_phase<C: Contender>(contender: &C, orders: &[Order], batch: usize) {
    for orders in orders.chunks(batch) {
        assert_eq!(contender.place(orders), 0);
    }
}

#[inline(never)]
fn drain_phase<C: Contender>(contender: &C, batch: usize) {
    assert_eq!(contender.drain(batch), ORDERS);
}

fn life<C: Contender>(batch: usize, size: usize) {
    let folder = tempfile::tempdir_in(Path::new("/dev/shm")).unwrap();
    let contender = C::create(folder.path());
    let orders: Vec<Order> = (0..ORDERS).map(|number| Order::new(number, size)).collect();
    place_phase(&contender, &orders, batch);
    drain_phase(&contender, batch);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [who, batch, size] = &arguments[..] else { panic!("phases CONTENDER BATCH BYTES") };
    let (batch, size) = (batch.parse().unwrap(), size.parse().unwrap());
    match who.as_str() {
        "twobox" => life::<WithTwobox>(batch, size),
        "by-hand" => life::<ByHand>(batch, size),
        "sqlite" => life::<Sqlite>(batch, size),
        _ => panic!("twobox, by-hand or sqlite"),
    }
}
