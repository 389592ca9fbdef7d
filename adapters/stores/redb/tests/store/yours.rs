//! The user's own tables in the same commits, on databases of ours and of theirs (P2, P5).

use redb::{
    Database, MultimapTableDefinition, ReadableDatabase, ReadableTableMetadata, TableDefinition,
};
use twobox::{
    Body, Checked, Claim, Claimed, CommitOrder, Committed, Consumer, DeliveryPolicy, Draft, Dump,
    Fingerprint, Key, Load, Millis, OrderId, Owner, Query, Reader, Receive, Received, Register,
    Request, RunError, Settle, Store, Table, Tables, Transaction,
};
use twobox_redb::{Lent, RedbError, RedbStore, RedbView};

use crate::common::{Disk, at, event, text};

const STOCK: TableDefinition<'_, &str, u64> = TableDefinition::new("stock");

fn request(id: &str) -> Request {
    Request::new("customer-7", id, Fingerprint::of([("item", "notebook")])).unwrap()
}

fn order<'a>(request: &'a Request, id: &str, body: Body) -> CommitOrder<'a> {
    let draft = Draft::new("order.created", body).unwrap();
    CommitOrder::new(request, OrderId::new(id).unwrap(), Body::json("{}").unwrap(), [draft])
        .unwrap()
}

fn stock(database: &Database) -> Option<u64> {
    let table = database.begin_read().unwrap().open_table(STOCK).ok()?;
    table.get("notebook").unwrap().map(|found| found.value())
}

#[test]
fn our_transaction_with_your_table_is_one_commit() {
    let store = RedbStore::create_on(Disk::default()).unwrap();
    let request = request("req-1");
    let order = order(&request, "order-1", Body::json("1").unwrap());
    let empty = text(&store).unwrap();

    // Refused: neither the row of yours nor anything of ours is there.
    let refused: Result<(), RunError<RedbError, String>> = store.write(at(1), |tx| {
        tx.redb().open_table(STOCK).unwrap().insert("notebook", 7).unwrap();
        let _ = tx.run(&order).unwrap();
        Err("no more notebooks".to_string())
    });
    assert!(matches!(refused, Err(RunError::Refused(_))));
    assert_eq!((stock(&store.database().unwrap()), text(&store).unwrap()), (None, empty.clone()));

    // A crash before the commit: the same.
    let mut tx = store.begin().unwrap();
    tx.redb().open_table(STOCK).unwrap().insert("notebook", 7).unwrap();
    let _ = tx.run(&order, at(1)).unwrap();
    drop(tx);
    assert_eq!((stock(&store.database().unwrap()), text(&store).unwrap()), (None, empty));

    let mut tx = store.begin().unwrap();
    tx.redb().open_table(STOCK).unwrap().insert("notebook", 7).unwrap();
    let _ = tx.run(&order, at(1)).unwrap();
    tx.commit().unwrap();
    assert_eq!(stock(&store.database().unwrap()), Some(7));
    assert_eq!(Dump::of(&mut store.view().unwrap()).unwrap().count(Table::Events), 1);
}

#[test]
fn your_transaction_with_our_tables_is_one_commit() {
    let database = Database::builder().create_with_backend(Disk::default()).unwrap();
    let request = request("req-1");
    let order = order(&request, "order-1", Body::json("1").unwrap());
    for commit in [false, true] {
        let mine = database.begin_write().unwrap();
        mine.open_table(STOCK).unwrap().insert("notebook", 7).unwrap();
        let committed: Committed = Lent::new(&mine).unwrap().run(&order, at(1)).unwrap();
        assert!(!committed.repeated);
        // One of yours may stay open meanwhile, and ours can be looked at.
        let open = mine.open_table(STOCK).unwrap();
        assert!(Lent::new(&mine).unwrap().run(&order, at(2)).unwrap().repeated);
        drop(open);
        if commit {
            mine.commit().unwrap();
            assert_eq!(stock(&database), Some(7));
            let mut view = RedbView::new(database.begin_read().unwrap()).unwrap();
            assert_eq!(
                view.load(&Query::rows([Key::Event(event("order-1/1"))])).unwrap().rows.len(),
                1
            );
            assert_eq!(view.redb().open_table(STOCK).unwrap().len().unwrap(), 1);
        } else {
            mine.abort().unwrap();
            assert_eq!(stock(&database), None);
            assert!(matches!(
                RedbView::new(database.begin_read().unwrap()),
                Err(RedbError::NotTwobox)
            ));
        }
    }
    let store = RedbStore::with_database(database).unwrap();
    assert!(store.run(&order, at(3)).unwrap().repeated);
}

#[test]
fn with_database_adds_our_tables_once_and_touches_no_other() {
    let disk = Disk::default();
    let database = Database::builder().create_with_backend(disk.clone()).unwrap();
    let mine = database.begin_write().unwrap();
    mine.open_table(STOCK).unwrap().insert("notebook", 7).unwrap();
    mine.commit().unwrap();
    let store = RedbStore::with_database(database).unwrap();
    let request = request("req-1");
    let _ = store.run(Register::new(&request), at(1)).unwrap();
    let database = std::sync::Arc::clone(&store.database().unwrap());
    drop(store);
    let before = disk.bytes();
    let store = RedbStore::with_database(database).unwrap();
    assert!(disk.bytes() == before, "a store is left as it is");
    let view = store.database().unwrap().begin_read().unwrap();
    let names: Vec<String> = view
        .list_tables()
        .unwrap()
        .map(|table| redb::TableHandle::name(&table).to_string())
        .collect();
    let others: Vec<&String> = names.iter().filter(|name| !name.starts_with("twobox_")).collect();
    assert_eq!(others, ["stock"]);
    assert_eq!(names.len(), 1 + Table::ALL.len() + 4);
    assert_eq!(stock(&store.database().unwrap()), Some(7));
}

/// A table of the user's that has one of our names is never written to, and the error names it.
#[test]
fn a_table_of_yours_with_our_name_is_refused() {
    type Make = fn(&redb::WriteTransaction);
    let makers: [(&str, Make); 5] = [
        ("twobox_meta", |tx| {
            drop(tx.open_table(TableDefinition::<&str, u64>::new("twobox_meta")).unwrap());
        }),
        ("twobox_meta", |tx| {
            let table = TableDefinition::<&[u8], &[u8]>::new("twobox_meta");
            tx.open_table(table).unwrap().insert(&b"mine"[..], &b"mine"[..]).unwrap();
        }),
        ("twobox_events", |tx| {
            drop(tx.open_table(TableDefinition::<&str, u64>::new("twobox_events")).unwrap());
        }),
        ("twobox_mine", |tx| {
            drop(tx.open_table(TableDefinition::<&str, u64>::new("twobox_mine")).unwrap());
        }),
        ("twobox_dead", |tx| {
            drop(
                tx.open_multimap_table(MultimapTableDefinition::<&str, u64>::new("twobox_dead"))
                    .unwrap(),
            );
        }),
    ];
    for (name, make) in makers {
        let disk = Disk::default();
        let database = Database::builder().create_with_backend(disk.clone()).unwrap();
        let tx = database.begin_write().unwrap();
        make(&tx);
        tx.commit().unwrap();
        let tx = database.begin_write().unwrap();
        let named = |error: &RedbError| matches!(error, RedbError::NameTaken { table, .. } if table == name);
        let error = Lent::new(&tx).unwrap_err();
        assert!(named(&error), "{error}");
        drop(tx);
        let error = RedbStore::with_database(database).unwrap_err();
        assert!(named(&error), "{error}");
        let before = disk.bytes();
        let error = RedbStore::open_on(disk.clone()).unwrap_err();
        assert!(named(&error) || matches!(error, RedbError::NotTwobox), "{error}");
        assert!(disk.bytes() == before, "{name}");
    }
}

#[test]
fn a_table_of_ours_that_you_hold_open_is_named() {
    let database = Database::builder().create_with_backend(Disk::default()).unwrap();
    let request = request("req-1");
    let tx = database.begin_write().unwrap();
    let mut lent = Lent::new(&tx).unwrap();
    let held = tx.open_table(TableDefinition::<&[u8], &[u8]>::new("twobox_requests")).unwrap();
    let error = lent.run(Register::new(&request), at(1)).unwrap_err();
    assert!(
        matches!(&error, RunError::Store(RedbError::TableInUse { table }) if table == "twobox_requests"),
        "{error}"
    );
    // Nothing is broken by it.
    drop(held);
    assert!(lent.run(Register::new(&request), at(1)).is_ok());
    tx.commit().unwrap();
}

/// The sender's and the receiver's side in one file, or each in its own (P5, P6).
#[test]
fn sender_and_receiver_share_a_file_or_not() {
    let one = RedbStore::create_on(Disk::default()).unwrap();
    let other = RedbStore::create_on(Disk::default()).unwrap();
    for (sender, receiver) in
        [(&one, &one), (&other, &RedbStore::create_on(Disk::default()).unwrap())]
    {
        let request = request("req-1");
        let _ = sender.run(order(&request, "order-1", Body::json("1").unwrap()), at(1)).unwrap();
        let policy = Checked::<DeliveryPolicy>::default();
        let claimed: Claimed = sender
            .run(
                Claim::new(
                    &policy,
                    Owner::new("relay").unwrap(),
                    std::time::Duration::from_secs(30),
                    8,
                )
                .unwrap(),
                at(2),
            )
            .unwrap();
        let leased = &claimed.leased[0];
        let envelope = leased.events[0].message.event.clone();
        let consumer = Consumer::new("loyalty").unwrap();
        let receive = Receive::new(consumer, &envelope).effect(Body::text("10 points").unwrap());
        assert_eq!(receiver.run(&receive, at(3)).unwrap(), Received::Applied);
        assert_eq!(
            sender.run(Settle::new(&policy, [leased.settle(1, None)]), at(4)).unwrap().confirmed,
            1
        );
        let dump = Dump::of(&mut receiver.view().unwrap()).unwrap();
        assert_eq!((dump.count(Table::Inbox), dump.count(Table::Effects)), (1, 1));
    }
}

/// A payload is written once: what changes while its event is delivered is small.
#[test]
fn no_payload_is_written_again() {
    const PAYLOAD: usize = 512 << 10;
    let disk = Disk::default();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    let request = request("req-1");
    disk.written();
    let body = Body::new("application/octet-stream", vec![7; PAYLOAD]).unwrap();
    let _ = store.run(order(&request, "order-1", body), at(1)).unwrap();
    assert!(disk.written() >= PAYLOAD);

    let policy = Checked::<DeliveryPolicy>::default();
    let mut now = at(2);
    for _ in 0..4 {
        let claim = Claim::new(
            &policy,
            Owner::new("relay").unwrap(),
            std::time::Duration::from_secs(30),
            8,
        )
        .unwrap();
        let claimed = store.run(claim, now).unwrap();
        let failed = twobox::Ending::Failed(twobox::Reason::new("no"));
        let result = claimed.leased[0].settle(0, Some(failed));
        assert_eq!(store.run(Settle::new(&policy, [result]), now).unwrap().retried, 1);
        now = Millis::new(now.get() + 1_000_000);
    }
    let written = disk.written();
    assert!(written > 0 && written < PAYLOAD / 2, "{written} bytes for eight changes of state");
}
