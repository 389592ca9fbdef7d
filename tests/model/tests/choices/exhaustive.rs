//! Every sequence of commands up to a length, from several beginnings.

use std::time::Instant;

use exhaustigen::Gen;
use redb::backends::InMemoryBackend;
use twobox::{Dump, Store};
use twobox_memory::MemoryStore;
use twobox_redb::RedbStore;

use crate::command::{ALL, Command, End, Memory};

const BOTH: [Command; 2] =
    [Command::Commit { request: 0, other: false }, Command::Commit { request: 1, other: false }];
const CLAIMED: [Command; 3] = [BOTH[0], BOTH[1], Command::Claim { relay: 0 }];
const DEAD: [Command; 5] = [
    BOTH[0],
    BOTH[1],
    CLAIMED[2],
    Command::Settle { relay: 0, end: End::Rejected },
    Command::Receive { event: 0, in_order: true },
];
const DONE: [Command; 5] = [
    BOTH[0],
    CLAIMED[2],
    Command::Settle { relay: 0, end: End::Confirmed },
    Command::Intend,
    Command::Wait(100),
];

/// Runs every sequence of this length after each beginning, and says how many there were.
///
/// A sequence runs in one transaction of each store, which is rolled back at its end. The tables
/// are compared at the end of each sequence alone: each shorter one is a sequence of its own.
fn compare(length: usize) -> usize {
    let (memory, redb) =
        (MemoryStore::new(), RedbStore::create_on(InMemoryBackend::new()).unwrap());
    let mut sequences = 0;
    for beginning in [&[][..], &BOTH, &CLAIMED, &DEAD, &DONE] {
        let mut choices = Gen::new();
        while !choices.done() {
            let chosen: Vec<Command> = (0..length).map(|_| *choices.pick(&ALL)).collect();
            let (mut left, mut right) = (memory.begin().unwrap(), redb.begin().unwrap());
            let mut remembered = Memory::default();
            for command in beginning.iter().chain(&chosen).copied() {
                let (expected, leased) = remembered.ask(&mut left, command);
                let (answer, _) = remembered.ask(&mut right, command);
                assert_eq!(answer, expected, "{command:?} in {beginning:?}, {chosen:?}");
                remembered.learn(command, leased);
            }
            let (expected, found) = (Dump::of(&mut left).unwrap(), Dump::of(&mut right).unwrap());
            assert_eq!(found.to_string(), expected.to_string(), "after {beginning:?}, {chosen:?}");
            sequences += 1;
        }
    }
    sequences
}

fn up_to(longest: usize) {
    for length in 1..=longest {
        let begun = Instant::now();
        let sequences = compare(length);
        println!(
            "{sequences} sequences of {length} commands, {:.1} s",
            begun.elapsed().as_secs_f32()
        );
    }
}

#[test]
fn every_short_sequence_comes_to_the_same() {
    up_to(2);
}

/// `cargo test --release -p twobox-model --test choices -- --ignored --nocapture`
#[test]
#[ignore = "takes a minute or two"]
fn every_longer_sequence_comes_to_the_same() {
    up_to(3);
}
