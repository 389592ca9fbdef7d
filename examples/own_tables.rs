//! Stock and order in one commit: a table of the program's own beside those of twobox, in the same
//! transaction of redb.
//!
//! There are two ways. Either twobox begins the transaction and the program writes in it, or the
//! program begins it and lends it to twobox. Either way an order without stock leaves nothing: no
//! order, no event, no change of the stock.
//!
//! ```text
//! cargo run --example own_tables
//! ```

use std::error::Error;
use std::io::{self, Write};

use redb::{ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};
use twobox::{CommitOrder, Draft, Dump, Millis, Reader, Request, Store, Table, Tables};
use twobox_redb::{Lent, RedbStore};

type Failure = Box<dyn Error>;

/// How much there is of each item.
const STOCK: TableDefinition<'_, &str, u64> = TableDefinition::new("stock");

fn main() -> Result<(), Failure> {
    run(&mut io::stdout().lock())
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Failure> {
    let dir = tempfile::tempdir()?;
    let store = RedbStore::create(dir.path().join("shop.redb"))?;
    let tx = store.database()?.begin_write()?;
    tx.open_table(STOCK)?.insert("notebook", 3)?;
    tx.commit()?;
    let now = Millis::new(1_000);
    writeln!(out, "at first: {}", figures(&store)?)?;

    sell_in_our_transaction(&store, "req-001", 2, now)?;
    writeln!(out, "2 sold, twobox began the transaction: {}", figures(&store)?)?;
    refused(out, sell_in_our_transaction(&store, "req-002", 2, now))?;
    writeln!(out, "2 not sold: {}", figures(&store)?)?;

    sell_in_your_transaction(&store, "req-003", 1, now)?;
    writeln!(out, "1 sold, the program began the transaction: {}", figures(&store)?)?;
    refused(out, sell_in_your_transaction(&store, "req-004", 1, now))?;
    writeln!(out, "1 not sold: {}", figures(&store)?)?;
    Ok(())
}

/// twobox begins the transaction and commits it, unless this ends with an error; the program's
/// table is reached through `redb()`.
fn sell_in_our_transaction(
    store: &RedbStore,
    id: &str,
    quantity: u64,
    now: Millis,
) -> Result<(), Failure> {
    let request = request(id, quantity)?;
    let order = order(&request)?;
    store.write(now, |tx| {
        tx.run(&order)?;
        take_from_stock(tx.redb(), quantity)
    })?;
    Ok(())
}

/// The program begins the transaction and commits it, or drops it and so rolls it back; twobox runs
/// in it.
fn sell_in_your_transaction(
    store: &RedbStore,
    id: &str,
    quantity: u64,
    now: Millis,
) -> Result<(), Failure> {
    let request = request(id, quantity)?;
    let tx = store.database()?.begin_write()?;
    Lent::new(&tx)?.run(order(&request)?, now)?;
    take_from_stock(&tx, quantity)?;
    tx.commit()?;
    Ok(())
}

fn request(id: &str, quantity: u64) -> Result<Request, Failure> {
    let parameters = [("item", "notebook"), ("quantity", &quantity.to_string())];
    Ok(Request::of("customer-7", id, parameters)?)
}

fn order(request: &Request) -> Result<CommitOrder<'_>, Failure> {
    let event = Draft::json("order.created", r#"{"item":"notebook"}"#)?;
    Ok(request.order(format!("order:{}", request.key.id), r#"{"item":"notebook"}"#, event)?)
}

#[derive(Debug, thiserror::Error)]
#[error("out of stock: {wanted} wanted, {left} left")]
struct OutOfStock {
    wanted: u64,
    left: u64,
}

fn take_from_stock(tx: &WriteTransaction, quantity: u64) -> Result<(), Failure> {
    let mut stock = tx.open_table(STOCK)?;
    let left = stock.get("notebook")?.map_or(0, |left| left.value());
    stock.insert(
        "notebook",
        left.checked_sub(quantity).ok_or(OutOfStock { wanted: quantity, left })?,
    )?;
    Ok(())
}

fn refused(out: &mut impl Write, result: Result<(), Failure>) -> Result<(), Failure> {
    let refusal = result.err().ok_or("it was sold without being there")?;
    Ok(writeln!(out, "{refusal}")?)
}

fn figures(store: &RedbStore) -> Result<String, Failure> {
    let stock = store
        .database()?
        .begin_read()?
        .open_table(STOCK)?
        .get("notebook")?
        .map_or(0, |left| left.value());
    let dump = Dump::of(&mut store.view()?)?;
    Ok(format!(
        "stock={stock} orders={} events={}",
        dump.count(Table::Orders),
        dump.count(Table::Events)
    ))
}
