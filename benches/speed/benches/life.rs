//! Placing and delivering orders: with twobox, by hand on redb, by hand on SQLite.
//!
//! No benchmark framework: those measure one candidate to its end and then the next, and on a
//! machine that others use as well the ratio of two such figures says who was busy meanwhile. Here
//! each round measures all three, one right after the other, and what counts is the median of the
//! rounds' ratios. Each life has a new database, which grows no larger than one round makes it.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::array;
use std::path::Path;
use std::time::Instant;

use twobox_speed::report::{Data, median};
use twobox_speed::{ByHand, Contender, Order, Sqlite, WithTwobox};

/// Microseconds for each order: to place it, to deliver its event, and both.
type Times = [f64; 3];
const PHASES: [&str; 3] = ["place", "drain", "life"];
const CONTENDERS: [(&str, Life); 3] =
    [("twobox", life::<WithTwobox>), ("by-hand", life::<ByHand>), ("sqlite", life::<Sqlite>)];

type Life = fn(&Path, &[Order], usize) -> Times;

fn life<C: Contender>(folder: &Path, orders: &[Order], batch: usize) -> Times {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let contender = C::create(folder.path());
    let begun = Instant::now();
    let repeated: u64 = orders.chunks(batch).map(|orders| contender.place(orders)).sum();
    let placed = begun.elapsed();
    let delivered = contender.drain(batch);
    let whole = begun.elapsed();
    assert_eq!((repeated, delivered), (0, orders.len() as u64));
    [placed, whole - placed, whole].map(|time| time.as_secs_f64() * 1e6 / orders.len() as f64)
}

fn main() {
    // Cargo tests benchmarks with another argument, or none.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let disk = std::env::temp_dir();
    let memory = Path::new("/dev/shm");
    let columns =
        "syncs,body bytes,batch,phase,contender,us per order,ratio to by hand,rounds,orders";
    let mut data = Data::new("life.csv", &[&disk, memory], columns);
    // How long a sync takes changes from one second to the next, so rounds on the disk are short
    // and many.
    for (syncs, folder, rounds, single, batched) in
        [("durable", disk.as_path(), 41, 16, 512), ("none", memory, 15, 512, 4096)]
    {
        for (size, batch, orders) in [
            (100, 1, single),
            (100, 256, batched),
            (1024, 1, single),
            (1024, 256, batched),
            (65_536, 1, single.min(128)),
            (65_536, 256, 512),
        ] {
            let rounds = if size == 65_536 { 15 } else { rounds };
            let placed: Vec<Order> = (0..orders).map(|number| Order::new(number, size)).collect();
            let rounds: Vec<[Times; 3]> = (0..rounds)
                .map(|round| {
                    let mut times = [[0.0; 3]; 3];
                    // Whoever comes first in one round is last in the next.
                    for turn in 0..3 {
                        let who = (round + turn) % 3;
                        times[who] = CONTENDERS[who].1(folder, &placed, batch);
                    }
                    times
                })
                .collect();
            for (phase, name) in PHASES.iter().enumerate() {
                let ratios: [f64; 3] = array::from_fn(|who| {
                    median(rounds.iter().map(|times| times[who][phase] / times[1][phase]))
                });
                for (who, (contender, _)) in CONTENDERS.iter().enumerate() {
                    let time = median(rounds.iter().map(|times| times[who][phase]));
                    let ratio = ratios[who];
                    let rounds = rounds.len();
                    data.push(&format!("{syncs},{size},{batch},{name},{contender},{time:.1},{ratio:.2},{rounds},{orders}"));
                }
            }
        }
    }
    data.keep();
}
