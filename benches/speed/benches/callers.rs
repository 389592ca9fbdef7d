//! Many callers that place single orders in one store, each waiting until its order is durable
//! before it places the next.

#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Instant;

use twobox_speed::report::{Data, median};
use twobox_speed::{ByHand, Contender, Order, WithTwobox};
use twobox_tokio::Blocking;

/// How orders come: from so many threads or tasks, or all from one caller in one write, with twobox
/// or by hand.
const CALLERS: [(&str, u64); 10] = [
    ("threads", 1),
    ("threads", 2),
    ("threads", 4),
    ("threads", 8),
    ("threads", 16),
    ("threads", 32),
    ("threads", 64),
    ("tasks", 64),
    ("in one write", 64),
    ("in one write by hand", 64),
];
const SIZE: usize = 100;

/// Orders a second, and orders for each commit.
fn run(folder: &Path, kind: &str, callers: u64, most: u64) -> [f64; 2] {
    let folder = tempfile::tempdir_in(folder).unwrap();
    let each = (most / callers).min(most / 16);
    if kind == "in one write by hand" {
        return counted(&ByHand::create(folder.path()), callers * each, |store| {
            in_one_write(store, callers, each)
        });
    }
    let store = Arc::new(WithTwobox::create(folder.path()));
    counted(&*store, callers * each, |_| match kind {
        "tasks" => on_tasks(&store, callers, each),
        "threads" => on_threads(&store, callers, each),
        _ => in_one_write(&*store, callers, each),
    })
}

fn counted<C: Contender>(store: &C, orders: u64, work: impl FnOnce(&C) -> f64) -> [f64; 2] {
    let before = store.syncs().unwrap();
    let seconds = work(store);
    [orders as f64 / seconds, orders as f64 / (store.syncs().unwrap() - before) as f64]
}

/// What callers place at the same time, placed by one: what is left to be gained if there were no
/// threads to switch between.
fn in_one_write<C: Contender>(store: &C, callers: u64, each: u64) -> f64 {
    let begun = Instant::now();
    for number in 0..each {
        let orders: Vec<Order> = (0..callers).map(|caller| order(caller, number)).collect();
        assert_eq!(store.place(&orders), 0);
    }
    begun.elapsed().as_secs_f64()
}

fn order(caller: u64, number: u64) -> Order {
    Order::new(caller * 1_000_000 + number, SIZE)
}

fn on_threads(store: &WithTwobox, callers: u64, each: u64) -> f64 {
    let start = Barrier::new(callers as usize + 1);
    let begun = thread::scope(|scope| {
        for caller in 0..callers {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                for number in 0..each {
                    assert_eq!(store.place(&[order(caller, number)]), 0);
                }
            });
        }
        start.wait();
        Instant::now()
    });
    begun.elapsed().as_secs_f64()
}

fn on_tasks(store: &Arc<WithTwobox>, callers: u64, each: u64) -> f64 {
    let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
    let store = Blocking::from(store.clone());
    let begun = Instant::now();
    runtime.block_on(async {
        let callers = (0..callers).map(|caller| {
            let store = store.clone();
            tokio::spawn(async move {
                for number in 0..each {
                    let repeated =
                        store.call(move |store| store.place(&[order(caller, number)])).await;
                    assert_eq!(repeated, Ok(0));
                }
            })
        });
        // All of them are started before the first is waited for.
        for caller in callers.collect::<Vec<_>>() {
            caller.await.unwrap();
        }
    });
    begun.elapsed().as_secs_f64()
}

fn main() {
    // Cargo tests benchmarks with another argument, or none.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let disk = std::env::temp_dir();
    let memory = Path::new("/dev/shm");
    let columns = "syncs,callers,kind,orders a second,ratio to one caller,orders a commit,rounds";
    let mut data = Data::new("callers.csv", &[&disk, memory], columns);
    for (syncs, folder, rounds, most) in
        [("durable", disk.as_path(), 7, 4096), ("none", memory, 5, 16_384)]
    {
        let rounds: Vec<Vec<[f64; 2]>> = (0..rounds)
            .map(|_| {
                CALLERS.iter().map(|(kind, callers)| run(folder, kind, *callers, most)).collect()
            })
            .collect();
        for (at, (kind, callers)) in CALLERS.iter().enumerate() {
            let speed = median(rounds.iter().map(|round| round[at][0]));
            let ratio = median(rounds.iter().map(|round| round[at][0] / round[0][0]));
            let shared = median(rounds.iter().map(|round| round[at][1]));
            data.push(&format!(
                "{syncs},{callers},{kind},{speed:.0},{ratio:.2},{shared:.1},{}",
                rounds.len()
            ));
        }
    }
    data.keep();
}
