//! What open views cost, and backups of a store that is in use (F49).

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use redb::{
    MultimapTableDefinition, ReadTransaction, ReadableDatabase, ReadableTable, TableDefinition,
    WriteTransaction,
};
use twobox::{Draft, Dump, Load, Millis, Reader, Request, Store, Table};
use twobox_redb::{RedbError, RedbReader, RedbStore};

use crate::common::{Disk, KEEPING, at, every_state, fill, text};

/// A table of the user's: how many orders there are.
const PLACED: TableDefinition<'_, &str, u64> = TableDefinition::new("placed");

const NOW: Millis = at(10_000);

/// Places an order and counts it, in one commit.
fn place(store: &RedbStore, id: &str) {
    let request = Request::of("shop", id, [("item", "pen")]).unwrap();
    let draft = Draft::json("order.created", "{}").unwrap();
    let order = request.order(id, "x".repeat(3_000), draft).unwrap();
    let placed = store.write(NOW, |tx| {
        let placed = tx.run(&order).map_err(|error| error.to_string())?;
        let mut table = tx.redb().open_table(PLACED).map_err(|error| error.to_string())?;
        let before = table.get("orders").unwrap().map_or(0, |count| count.value());
        table.insert("orders", before + 1).map_err(|error| error.to_string())?;
        Ok::<_, String>(placed)
    });
    assert!(!placed.unwrap().repeated);
}

fn copy_placed(from: &ReadTransaction, to: &WriteTransaction) -> Result<(), redb::Error> {
    let mut table = to.open_table(PLACED)?;
    for row in from.open_table(PLACED)?.iter()? {
        let (key, value) = row?;
        table.insert(key.value(), value.value())?;
    }
    Ok(())
}

/// P2: while others write, a backup is all of one moment, with the user's tables; it opens, goes on,
/// and is as it was however much is written afterwards.
#[test]
fn f49_a_backup_is_the_store_of_one_moment() {
    let folder = tempfile::tempdir().unwrap();
    let store = RedbStore::create(folder.path().join("shop.redb")).unwrap();
    place(&store, "first");
    let done = AtomicBool::new(false);
    let mut counts = Vec::new();
    std::thread::scope(|scope| {
        for writer in 0..2 {
            let (store, done) = (&store, &done);
            scope.spawn(move || {
                for n in 0..2_000 {
                    if done.load(Ordering::Relaxed) {
                        break;
                    }
                    place(store, &format!("{writer}-{n}"));
                }
            });
        }
        for n in 0..5 {
            let path = folder.path().join(format!("backup-{n}.redb"));
            let mut view = store.view().unwrap();
            view.backup(&path, copy_placed).unwrap();
            let again = view.backup(&path, copy_placed).unwrap_err();
            assert!(matches!(again, RedbError::AlreadyExists { .. }), "{again}");
            let copy = KEEPING.open(&path).unwrap();
            let expected = Dump::of(&mut view).unwrap();
            assert_eq!(text(&copy).unwrap(), expected.to_string());
            let placed = copy.database().unwrap().begin_read().unwrap().open_table(PLACED).unwrap();
            let count = placed.get("orders").unwrap().unwrap().value();
            assert_eq!(expected.count(Table::Orders) as u64, count, "P2");
            counts.push(count);
            place(&copy, "works on");
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(counts.first() < counts.last(), "nobody wrote meanwhile: {counts:?}");
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 6, "{left:?}");
}

/// Every table, in every state, from a reader as well; a table of the user's is not left out in
/// silence, and what is damaged is not copied.
#[test]
fn f49_a_backup_is_whole_or_says_what_it_lacks() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let store = RedbStore::create(path("shop.redb")).unwrap();
    fill(&store, every_state());
    store.backup(path("copy.redb")).unwrap();
    let copy = KEEPING.open(path("copy.redb")).unwrap();
    assert_eq!(text(&copy).unwrap(), text(&store).unwrap());
    copy.close().unwrap();
    let reader = RedbReader::open(path("copy.redb")).unwrap();
    reader.view().unwrap().backup(path("copy of a copy.redb"), |_, _| Ok(())).unwrap();
    let copy = KEEPING.open(path("copy of a copy.redb")).unwrap();
    assert_eq!(text(&copy).unwrap(), text(&store).unwrap());

    let mine = store.database().unwrap().begin_write().unwrap();
    mine.open_multimap_table(MultimapTableDefinition::<&str, u64>::new("mine")).unwrap();
    mine.commit().unwrap();
    let refused = store.backup(path("without mine.redb")).unwrap_err();
    assert!(matches!(&refused, RedbError::NotCopied { table } if table == "mine"), "{refused}");
    assert!(!path("without mine.redb").exists());

    let tx = store.database().unwrap().begin_write().unwrap();
    let orders = TableDefinition::<&[u8], &[u8]>::new("twobox_orders");
    tx.open_table(orders).unwrap().insert(&b"order-1"[..], &b"spoilt"[..]).unwrap();
    tx.delete_multimap_table(MultimapTableDefinition::<&str, u64>::new("mine")).unwrap();
    tx.commit().unwrap();
    let refused = store.backup(path("damaged.redb")).unwrap_err();
    assert!(matches!(refused, RedbError::Checksum { .. }), "{refused}");
    assert!(!path("damaged.redb").exists());
}

/// An open view keeps the file growing, and can be seen; afterwards the file is made small again,
/// but not under a view, a transaction, or a database that is held.
#[test]
fn f49_an_old_view_is_seen_and_the_file_is_made_small_again() {
    let disk = Disk::default();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    assert_eq!(store.oldest_view(), None);
    let before = Instant::now();
    let old = store.view().unwrap();
    for n in 0..200 {
        place(&store, &format!("order-{n}"));
        drop(store.view().unwrap());
    }
    assert!(store.oldest_view().unwrap() <= before.elapsed());
    assert!(matches!(store.compact(), Err(RedbError::InUse)), "under a view");
    let since = Instant::now();
    let young = store.view().unwrap();
    assert!(store.oldest_view().unwrap() >= since.elapsed());
    drop(old);
    assert!(store.oldest_view().unwrap() <= since.elapsed(), "the young one is the oldest now");
    drop(young);
    assert_eq!(store.oldest_view(), None);

    let tx = store.begin().unwrap();
    assert!(matches!(store.compact(), Err(RedbError::InUse)), "under a transaction");
    drop(tx);
    let held = store.database().unwrap();
    assert!(matches!(store.compact(), Err(RedbError::InUse)), "held");
    drop(held);
    let (large, expected) = (disk.bytes().len(), text(&store).unwrap());
    assert!(store.compact().unwrap());
    assert!(disk.bytes().len() < large / 2, "{} of {large}", disk.bytes().len());
    assert_eq!(text(&store).unwrap(), expected);
    place(&store, "after");
    store.view().unwrap().order(&twobox::OrderId::new("after").unwrap()).unwrap().unwrap();
}
