//! The life of an order by hand on SQLite: WAL, `synchronous=FULL`, so a commit is durable when it
//! returns.

use std::cell::RefCell;
use std::path::Path;

use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use crate::{CACHE, CONSUMER, Contender, EVENT_TYPE, LEASE, NOW, Order, SCOPE, digest};

/// A database of one's own.
#[derive(Debug)]
pub struct Sqlite(RefCell<Connection>);

const SCHEMA: &str = "
    CREATE TABLE requests (scope TEXT, id TEXT, fingerprint BLOB, placed TEXT, PRIMARY KEY (scope, id)) WITHOUT ROWID;
    CREATE TABLE orders (id TEXT PRIMARY KEY, body BLOB);
    CREATE TABLE outbox (
        sequence INTEGER PRIMARY KEY, event TEXT UNIQUE, type TEXT, lane TEXT, due INTEGER,
        starts INTEGER DEFAULT 0, token INTEGER DEFAULT 0, confirmed INTEGER DEFAULT 0, body BLOB
    );
    CREATE INDEX pending ON outbox (due, sequence) WHERE confirmed = 0;
    CREATE INDEX lanes ON outbox (lane, sequence) WHERE confirmed = 0;
    CREATE TABLE inbox (consumer TEXT, event TEXT, digest BLOB, at INTEGER, PRIMARY KEY (consumer, event)) WITHOUT ROWID;
";

impl Contender for Sqlite {
    fn create(folder: &Path) -> Self {
        let connection = Connection::open(folder.join("by-hand.sqlite")).unwrap();
        let mode: String =
            connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)).unwrap();
        assert_eq!(mode, "wal");
        connection.pragma_update(None, "synchronous", "FULL").unwrap();
        connection.pragma_update(None, "cache_size", -((CACHE >> 10) as i64)).unwrap();
        connection.execute_batch(SCHEMA).unwrap();
        connection.set_prepared_statement_cache_capacity(64);
        Self(RefCell::new(connection))
    }

    fn place(&self, orders: &[Order]) -> u64 {
        let mut connection = self.0.borrow_mut();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let mut repeated = 0;
        {
            let mut known = tx
                .prepare_cached("SELECT fingerprint FROM requests WHERE scope = ?1 AND id = ?2")
                .unwrap();
            let mut bind =
                tx.prepare_cached("INSERT INTO requests VALUES (?1, ?2, ?3, ?4)").unwrap();
            let mut insert = tx.prepare_cached("INSERT INTO orders VALUES (?1, ?2)").unwrap();
            let mut tell = tx
                .prepare_cached(
                    "INSERT INTO outbox (event, type, lane, due, body) VALUES (?1, ?2, ?3, ?4, ?5)",
                )
                .unwrap();
            for order in orders {
                let (id, request, fingerprint) =
                    (order.id(), order.request(), digest(&[&order.body]));
                let known = known.query_row(params![SCOPE, request], |row| {
                    Ok(row.get_ref(0)?.as_blob()? == fingerprint)
                });
                if let Some(same) = known.optional().unwrap() {
                    assert!(same);
                    repeated += 1;
                    continue;
                }
                bind.execute(params![SCOPE, request, fingerprint, id]).unwrap();
                insert.execute(params![id, order.body]).unwrap();
                tell.execute(params![format!("{id}/1"), EVENT_TYPE, id, NOW as i64, order.body])
                    .unwrap();
            }
        }
        tx.commit().unwrap();
        repeated
    }

    fn drain(&self, batch: usize) -> u64 {
        let mut connection = self.0.borrow_mut();
        let (mut leased, mut count) = (Vec::new(), 0);
        loop {
            leased = settle_and_claim(&mut connection, &leased, batch);
            if leased.is_empty() {
                return count;
            }
            receive(&mut connection, &leased);
            count += leased.len() as u64;
        }
    }

    fn applied(&self) -> u64 {
        self.0
            .borrow()
            .query_row("SELECT COUNT(*) FROM inbox", [], |row| row.get::<_, i64>(0))
            .unwrap() as u64
    }

    fn syncs(&self) -> Option<u64> {
        None
    }
}

/// An event that was leased.
struct Leased {
    sequence: i64,
    token: i64,
    event: String,
    body: Vec<u8>,
}

/// Confirms what was delivered and leases the first of each lane, in one commit.
fn settle_and_claim(
    connection: &mut Connection,
    delivered: &[Leased],
    batch: usize,
) -> Vec<Leased> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    let leased: Vec<Leased>;
    {
        let mut confirm = tx
            .prepare_cached("UPDATE outbox SET confirmed = 1 WHERE sequence = ?1 AND token = ?2")
            .unwrap();
        for Leased { sequence, token, .. } in delivered {
            confirm.execute([sequence, token]).unwrap();
        }
        let mut first = tx
            .prepare_cached(
                "SELECT sequence, token, event, body FROM outbox o WHERE confirmed = 0 AND due <= ?1 AND NOT EXISTS
                (SELECT 1 FROM outbox b WHERE b.confirmed = 0 AND b.lane = o.lane AND b.sequence < o.sequence)
                ORDER BY due, sequence LIMIT ?2",
            )
            .unwrap();
        leased = first
            .query_map(params![NOW as i64, batch as i64], |row| {
                Ok(Leased {
                    sequence: row.get(0)?,
                    token: row.get::<_, i64>(1)? + 1,
                    event: row.get(2)?,
                    body: row.get(3)?,
                })
            })
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap();
        let mut lease = tx
            .prepare_cached(
                "UPDATE outbox SET due = ?1, starts = starts + 1, token = ?2 WHERE sequence = ?3",
            )
            .unwrap();
        for Leased { sequence, token, .. } in &leased {
            lease.execute(params![(NOW + LEASE) as i64, token, sequence]).unwrap();
        }
    }
    if !(delivered.is_empty() && leased.is_empty()) {
        tx.commit().unwrap();
    }
    leased
}

/// Marks each event as applied, once, in one commit.
fn receive(connection: &mut Connection, leased: &[Leased]) {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    {
        let mut insert = tx
            .prepare_cached("INSERT INTO inbox VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING")
            .unwrap();
        let mut known = tx
            .prepare_cached("SELECT digest FROM inbox WHERE consumer = ?1 AND event = ?2")
            .unwrap();
        for Leased { event, body, .. } in leased {
            let digest = digest(&[event.as_bytes(), body]);
            if insert.execute(params![CONSUMER, event, digest, NOW as i64]).unwrap() == 0 {
                assert_eq!(
                    known.query_row([CONSUMER, event], |row| row.get::<_, Vec<u8>>(0)).unwrap(),
                    digest
                );
            }
        }
    }
    tx.commit().unwrap();
}
