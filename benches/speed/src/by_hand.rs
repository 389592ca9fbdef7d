//! The life of an order by hand on redb, with the same commits as twobox.
//!
//! What twobox does not write is not written here either: an event is inserted once, with its place
//! in its lane and its due time, and that it is confirmed follows from its lane. It lies where a
//! claim comes by, and is found by its id.

use std::path::Path;

use redb::{
    Builder, Database, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
};

use crate::{
    CACHE, CONSUMER, Contender, CountedFile, EVENT_TYPE, LEASE, NOW, Order, SCOPE, Syncs, digest,
};

type Bytes = &'static [u8];
/// Bytes of a length.
const LENGTH: usize = 4;

const REQUESTS: TableDefinition<'_, &str, Bytes> = TableDefinition::new("requests");
const ORDERS: TableDefinition<'_, &str, Bytes> = TableDefinition::new("orders");
/// Events by lane and sequence, and where an event is by its id.
const EVENTS: TableDefinition<'_, (&str, u64), Bytes> = TableDefinition::new("events");
const PLACES: TableDefinition<'_, &str, (&str, u64)> = TableDefinition::new("places");
const LANES: TableDefinition<'_, &str, Bytes> = TableDefinition::new("lanes");
/// Lanes by the time at which they are due.
const DUE: TableDefinition<'_, (u64, &str), ()> = TableDefinition::new("due");
const INBOX: TableDefinition<'_, (&str, &str), &[u8; 40]> = TableDefinition::new("inbox");

/// A database of one's own.
#[derive(Debug)]
pub struct ByHand {
    database: Database,
    syncs: Syncs,
}

/// What is known of a lane: the last sequence in it, the first that is not confirmed, when it is
/// due or its lease ends, the token of its lease, and how often its first event was started.
#[derive(Default, Clone, Copy)]
struct Lane {
    last: u64,
    next: u64,
    due: u64,
    token: u64,
    starts: u64,
}

impl Lane {
    fn read(bytes: &[u8]) -> Self {
        let (chunks, _) = bytes.as_chunks::<8>();
        let [last, next, due, token, starts] =
            [0, 1, 2, 3, 4].map(|at| u64::from_be_bytes(chunks[at]));
        Self { last, next, due, token, starts }
    }

    fn bytes(self) -> [u8; 40] {
        let mut bytes = [0; 40];
        let (chunks, _) = bytes.as_chunks_mut::<8>();
        for (chunk, value) in
            chunks.iter_mut().zip([self.last, self.next, self.due, self.token, self.starts])
        {
            *chunk = value.to_be_bytes();
        }
        bytes
    }
}

/// An event as bytes: its parts, each behind its length.
fn envelope(parts: &[&[u8]]) -> Vec<u8> {
    let mut envelope =
        Vec::with_capacity(parts.iter().map(|part| LENGTH + part.len()).sum::<usize>());
    for part in parts {
        envelope.extend_from_slice(&(part.len() as u32).to_be_bytes());
        envelope.extend_from_slice(part);
    }
    envelope
}

/// The id of an event, which is its first part.
fn event_id(envelope: &[u8]) -> &str {
    let (length, rest) = envelope.split_first_chunk::<LENGTH>().unwrap();
    str::from_utf8(&rest[..u32::from_be_bytes(*length) as usize]).unwrap()
}

/// An event that was leased.
struct Leased {
    lane: String,
    sequence: u64,
    token: u64,
    envelope: Vec<u8>,
}

impl ByHand {
    /// Confirms what was delivered and leases what is next, in one commit.
    fn settle_and_claim(&self, delivered: &[Leased], batch: usize) -> Vec<Leased> {
        let tx = self.database.begin_write().unwrap();
        let mut leased = Vec::with_capacity(batch);
        {
            let events = tx.open_table(EVENTS).unwrap();
            let mut lanes = tx.open_table(LANES).unwrap();
            let mut due = tx.open_table(DUE).unwrap();
            for Leased { lane: key, sequence, token, .. } in delivered {
                let mut lane = Lane::read(lanes.get(key.as_str()).unwrap().unwrap().value());
                if lane.token != *token {
                    continue;
                }
                due.remove((lane.due, key.as_str())).unwrap();
                lane.next = sequence + 1;
                lane.starts = 0;
                if lane.next <= lane.last {
                    lane.due = NOW;
                    due.insert((lane.due, key.as_str()), ()).unwrap();
                }
                lanes.insert(key.as_str(), lane.bytes().as_slice()).unwrap();
            }
            let free: Vec<(u64, String)> = due
                .range((0, "")..(NOW + 1, ""))
                .unwrap()
                .take(batch)
                .map(|entry| {
                    entry.map(|(key, _)| (key.value().0, key.value().1.to_string())).unwrap()
                })
                .collect();
            for (at, key) in free {
                let mut lane = Lane::read(lanes.get(key.as_str()).unwrap().unwrap().value());
                let place = (key.as_str(), lane.next);
                let envelope = events.get(place).unwrap().unwrap().value().to_vec();
                due.remove((at, key.as_str())).unwrap();
                lane.due = NOW + LEASE;
                lane.token += 1;
                lane.starts += 1;
                due.insert((lane.due, key.as_str()), ()).unwrap();
                lanes.insert(key.as_str(), lane.bytes().as_slice()).unwrap();
                leased.push(Leased { lane: key, sequence: lane.next, token: lane.token, envelope });
            }
        }
        if !(delivered.is_empty() && leased.is_empty()) {
            tx.commit().unwrap();
        }
        leased
    }

    /// Marks each event as applied, once, in one commit.
    fn receive(&self, leased: &[Leased]) {
        let tx = self.database.begin_write().unwrap();
        {
            let mut inbox = tx.open_table(INBOX).unwrap();
            for Leased { envelope, .. } in leased {
                let event = event_id(envelope);
                let digest = digest(&[envelope]);
                let known =
                    inbox.get((CONSUMER, event)).unwrap().map(|row| row.value()[..32] == digest);
                match known {
                    Some(same) => assert!(same),
                    None => {
                        let mut row = [0; 40];
                        row[..32].copy_from_slice(&digest);
                        row[32..].copy_from_slice(&NOW.to_be_bytes());
                        inbox.insert((CONSUMER, event), &row).unwrap();
                    }
                }
            }
        }
        tx.commit().unwrap();
    }
}

impl Contender for ByHand {
    fn create(folder: &Path) -> Self {
        let (file, syncs) = CountedFile::create(&folder.join("by-hand.redb"));
        let database = Builder::new().set_cache_size(CACHE).create_with_backend(file).unwrap();
        let tx = database.begin_write().unwrap();
        for table in [REQUESTS, ORDERS, LANES] {
            tx.open_table(table).unwrap();
        }
        tx.open_table(EVENTS).unwrap();
        tx.open_table(PLACES).unwrap();
        tx.open_table(DUE).unwrap();
        tx.open_table(INBOX).unwrap();
        tx.commit().unwrap();
        Self { database, syncs }
    }

    fn place(&self, orders: &[Order]) -> u64 {
        let mut repeated = 0;
        let tx = self.database.begin_write().unwrap();
        {
            let mut requests = tx.open_table(REQUESTS).unwrap();
            let mut table = tx.open_table(ORDERS).unwrap();
            let mut events = tx.open_table(EVENTS).unwrap();
            let mut places = tx.open_table(PLACES).unwrap();
            let mut lanes = tx.open_table(LANES).unwrap();
            let mut due = tx.open_table(DUE).unwrap();
            for order in orders {
                let (id, fingerprint) = (order.id(), digest(&[&order.body]));
                let request = format!("{SCOPE}\0{}", order.request());
                // The fingerprint, and what came of it.
                let mut bound = fingerprint.to_vec();
                bound.extend_from_slice(id.as_bytes());
                let known = requests.get(request.as_str()).unwrap().map(|row| row.value() == bound);
                if let Some(same) = known {
                    assert!(same);
                    repeated += 1;
                    continue;
                }
                requests.insert(request.as_str(), bound.as_slice()).unwrap();
                let event = format!("{id}/1");
                assert!(table.insert(id.as_str(), order.body.as_slice()).unwrap().is_none());
                let there = lanes.get(id.as_str()).unwrap().map(|row| Lane::read(row.value()));
                let mut lane = there.unwrap_or_default();
                lane.last += 1;
                if lane.next == 0 || lane.next == lane.last {
                    lane.next = lane.last;
                    lane.due = NOW;
                    due.insert((NOW, id.as_str()), ()).unwrap();
                }
                lanes.insert(id.as_str(), lane.bytes().as_slice()).unwrap();
                let place = (id.as_str(), lane.last);
                assert!(places.insert(event.as_str(), place).unwrap().is_none());
                let (id, now) = (id.as_bytes(), NOW.to_be_bytes());
                let parts = [event.as_bytes(), id, EVENT_TYPE.as_bytes(), &now, &now, &order.body];
                events.insert(place, envelope(&parts).as_slice()).unwrap();
            }
        }
        tx.commit().unwrap();
        repeated
    }

    fn drain(&self, batch: usize) -> u64 {
        let (mut delivered, mut count) = (Vec::new(), 0);
        loop {
            delivered = self.settle_and_claim(&delivered, batch);
            if delivered.is_empty() {
                return count;
            }
            self.receive(&delivered);
            count += delivered.len() as u64;
        }
    }
    fn applied(&self) -> u64 {
        self.database.begin_read().unwrap().open_table(INBOX).unwrap().len().unwrap()
    }

    fn syncs(&self) -> Option<u64> {
        Some(self.syncs.count())
    }
}
