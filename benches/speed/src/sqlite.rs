//! The life of an order by hand on SQLite: WAL, `synchronous=FULL`, so a commit is durable when it returns.

use std::cell::RefCell;
use std::path::Path;

use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

use crate::{CONSUMER, Contender, EVENT_TYPE, LEASE, NOW, Order, SCOPE, digest};

/// A database of one's own.
#[derive(Debug)]
pub struct Sqlite(RefCell<Connection>);

const SCHEMA: &str = "
    CREATE TABLE requests (scope TEXT, id TEXT, fingerprint BLOB, placed TEXT, PRIMARY KEY (scope, id)) WITHOUT ROWID;
    CREATE TABLE orders (id TEXT PRIMARY KEY, body BLOB);
    CREATE TABLE outbox (
        sequence INTEGER PRIMARY KEY, event TEXT UNIQUE, type TEXT, lane TEXT, due INTEGER, starts INTEGER DEFAULT 0, confirmed INTEGER DEFAULT 0, body BLOB
    );
    CREATE INDEX pending ON outbox (due, sequence) WHERE confirmed = 0;
    CREATE INDEX lanes ON outbox (lane, sequence) WHERE confirmed = 0;
    CREATE TABLE inbox (consumer TEXT, event TEXT, digest BLOB, at INTEGER, PRIMARY KEY (consumer, event)) WITHOUT ROWID;
";

impl Contender for Sqlite {
    fn create(folder: &Path) -> Self {
        let connection = Connection::open(folder.join("by-hand.sqlite")).unwrap();
        let mode: String = connection.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)).unwrap();
        assert_eq!(mode, "wal");
        connection.pragma_update(None, "synchronous", "FULL").unwrap();
        connection.execute_batch(SCHEMA).unwrap();
        connection.set_prepared_statement_cache_capacity(64);
        Self(RefCell::new(connection))
    }

    fn place(&self, orders: &[Order]) {
        let mut connection = self.0.borrow_mut();
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        for order in orders {
            let (id, fingerprint) = (order.id(), digest(&[&order.body]));
            let known: Option<Vec<u8>> = tx
                .prepare_cached("SELECT fingerprint FROM requests WHERE scope = ?1 AND id = ?2")
                .unwrap()
                .query_row(params![SCOPE, order.request()], |row| row.get(0))
                .optional()
                .unwrap();
            if let Some(known) = known {
                assert_eq!(known, fingerprint);
                continue;
            }
            let mut insert = tx.prepare_cached("INSERT INTO requests VALUES (?1, ?2, ?3, ?4)").unwrap();
            insert.execute(params![SCOPE, order.request(), fingerprint, id]).unwrap();
            tx.prepare_cached("INSERT INTO orders VALUES (?1, ?2)").unwrap().execute(params![id, order.body]).unwrap();
            let mut insert =
                tx.prepare_cached("INSERT INTO outbox (event, type, lane, due, body) VALUES (?1, ?2, ?3, ?4, ?5)").unwrap();
            insert.execute(params![format!("{id}/1"), EVENT_TYPE, id, NOW as i64, order.body]).unwrap();
        }
        tx.commit().unwrap();
    }

    fn drain(&self, batch: usize) -> u64 {
        let mut connection = self.0.borrow_mut();
        let (mut leased, mut count): (Vec<(i64, String, Vec<u8>)>, _) = (Vec::new(), 0);
        loop {
            // Confirms what was delivered and leases the first of each lane, in one commit.
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
            let settles = !leased.is_empty();
            for (sequence, ..) in &leased {
                let mut confirm = tx.prepare_cached("UPDATE outbox SET confirmed = 1 WHERE sequence = ?1").unwrap();
                confirm.execute([sequence]).unwrap();
            }
            leased = tx
                .prepare_cached(
                    "SELECT sequence, event, body FROM outbox o WHERE confirmed = 0 AND due <= ?1 AND NOT EXISTS
                    (SELECT 1 FROM outbox b WHERE b.confirmed = 0 AND b.lane = o.lane AND b.sequence < o.sequence)
                    ORDER BY due, sequence LIMIT ?2",
                )
                .unwrap()
                .query_map(params![NOW as i64, batch as i64], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
                .unwrap()
                .collect::<Result<_, _>>()
                .unwrap();
            for (sequence, ..) in &leased {
                let mut lease =
                    tx.prepare_cached("UPDATE outbox SET due = ?1, starts = starts + 1 WHERE sequence = ?2").unwrap();
                lease.execute(params![(NOW + LEASE) as i64, sequence]).unwrap();
            }
            if settles || !leased.is_empty() {
                tx.commit().unwrap();
            } else {
                drop(tx);
            }
            if leased.is_empty() {
                return count;
            }
            let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
            for (_, event, body) in &leased {
                let digest = digest(&[event.as_bytes(), body]);
                let mut insert =
                    tx.prepare_cached("INSERT INTO inbox VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING").unwrap();
                if insert.execute(params![CONSUMER, event, digest, NOW as i64]).unwrap() == 0 {
                    let mut known = tx.prepare_cached("SELECT digest FROM inbox WHERE consumer = ?1 AND event = ?2").unwrap();
                    assert_eq!(known.query_row([CONSUMER, event], |row| row.get::<_, Vec<u8>>(0)).unwrap(), digest);
                }
            }
            tx.commit().unwrap();
            count += leased.len() as u64;
        }
    }
}
