//! The life of an order, three times: with twobox on redb, by hand on redb, and by hand on SQLite.
//!
//! The three do the same: a request is bound to its parameters, the order and its event are one
//! commit, a relay leases what is due in the order of each key, a consumer marks each event as
//! applied once, and the confirmation is written with the next claim. The two by hand are what a
//! careful engineer would write for exactly this, and no more: no failures and dead letters, no
//! operator, no headers, no checksums of rows.

// A benchmark that cannot go on has nothing to report.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod by_hand;
mod counted;
pub mod report;
mod sqlite;
mod with_twobox;

pub use by_hand::ByHand;
pub use counted::{CountedFile, Syncs};
pub use sqlite::Sqlite;
pub use with_twobox::WithTwobox;

use std::path::Path;

use sha2::{Digest, Sha256};

/// An order to place, or an event about it to receive.
#[derive(Debug, Clone)]
pub struct Order {
    /// Its number, from which all of its ids are made.
    pub number: u64,
    /// The body of the order, and of its event.
    pub body: Vec<u8>,
}

impl Order {
    /// An order with a body of so many bytes, which no two orders share.
    #[must_use]
    pub fn new(number: u64, size: usize) -> Self {
        let seed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let body = (0..size as u64)
            .map(|at| b'a' + (seed.rotate_left(at as u32 % 64) % 26) as u8)
            .collect();
        Self { number, body }
    }

    fn request(&self) -> String {
        format!("req-{:010}", self.number)
    }

    fn id(&self) -> String {
        format!("order-{:010}", self.number)
    }
}

/// Whoever places and delivers orders.
pub trait Contender: Sized {
    /// A new store in this folder.
    fn create(folder: &Path) -> Self;

    /// Places orders, in one commit. Says how many were there already.
    fn place(&self, orders: &[Order]) -> u64;

    /// Delivers to the consumer, `batch` events a commit, until nothing is due. Says how many.
    fn drain(&self, batch: usize) -> u64;

    /// How many events the consumer has marked as applied.
    fn applied(&self) -> u64;

    /// How often the file was synced so far, if that is counted.
    fn syncs(&self) -> Option<u64>;
}

/// What is said of everything by hand: the parameters' fingerprint, and the content of an event.
fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// How much of a database is kept in memory: what twobox has by default, for each of the three.
const CACHE: usize = 64 << 20;
const SCOPE: &str = "shop";
const CONSUMER: &str = "loyalty";
const EVENT_TYPE: &str = "order.created";
const LEASE: u64 = 30_000;
/// All happens at one time: no clock is read.
const NOW: u64 = 1_000_000;
