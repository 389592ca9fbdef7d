//! Points for orders: two orders go to a broker that fails once, and one message arrives twice.
//!
//! The points are a table of the consumer's own, in the store that holds its inbox: the row of the
//! inbox and the points are one commit, so a message that comes again adds nothing. All figures are
//! counted from the tables.
//!
//! ```text
//! cargo run --example relay
//! ```

use std::error::Error;
use std::io::{self, Write};

use redb::{ReadableDatabase, ReadableTable, TableDefinition, WriteTransaction};
use serde_json::{Value, json};
use twobox::relay::{Published, Publisher, Relay, RelaySettings};
use twobox::{
    Body, CommitOrder, Consumer, DeliveryPolicy, Draft, Dump, EventState, Handled, Inbox, Message,
    Millis, Moment, OrderingKey, Owner, Reader, Reason, Request, Store, Table,
};
use twobox_redb::RedbStore;

type Failure = Box<dyn Error>;

/// Points by user.
const POINTS: TableDefinition<'_, u64, u64> = TableDefinition::new("points");

fn main() -> Result<(), Failure> {
    run(&mut io::stdout().lock())
}

pub(crate) fn run(out: &mut impl Write) -> Result<(), Failure> {
    let dir = tempfile::tempdir()?;
    let shop = RedbStore::create(dir.path().join("shop.redb"))?;
    let loyalty = RedbStore::create(dir.path().join("loyalty.redb"))?;
    let now = Millis::new(1_000);

    place(&shop, "req-1", 1, 19_900, now)?;
    if place_and_break_off(&shop, "req-2", 2, 500, now).is_ok() {
        return Err("the order of user 2 must be rolled back".into());
    }
    place(&shop, "req-3", 1, 10_000, now)?;
    let dump = Dump::of(&mut shop.view()?)?;
    writeln!(out, "orders={} outbox={}", dump.count(Table::Orders), dump.count(Table::Events))?;

    let mut broker = Broker { failures_left: 1, sent: Vec::new() };
    let mut relay = Relay::new(
        &shop,
        &mut broker,
        RelaySettings::new(Owner::new("relay-1")?),
        Moment::steady(now),
    )?;
    let confirmed = relay.run_until_idle(Moment::steady(now))?.confirmed;
    writeln!(out, "broker fails: confirmed={confirmed} {}", outbox(&shop)?)?;
    // The failed event waits for its backoff, and the other one of the same user behind it.
    let later = now + DeliveryPolicy::default().backoff_base;
    let confirmed = relay.run_until_idle(Moment::steady(later))?.confirmed;
    writeln!(out, "retry: confirmed={confirmed} {}", outbox(&shop)?)?;

    // Each event is handled once, in one commit with its row in the inbox (P5).
    let inbox = Inbox::new(&loyalty, Consumer::new("points")?);
    let repeated = broker.sent.first();
    for message in broker.sent.iter().chain(repeated) {
        let receipt = inbox.receive(message, later, |tx, message| {
            add_points(tx.redb(), &message.event.body)?;
            Ok::<_, Failure>(Handled::Done)
        })?;
        writeln!(
            out,
            "message {} of order {}: {receipt:?}",
            message.event.id, message.event.order
        )?;
    }
    let points = loyalty.database()?.begin_read()?.open_table(POINTS)?;
    for row in points.iter()? {
        let (user, points) = row?;
        writeln!(out, "user {} has {} points", user.value(), points.value())?;
    }
    Ok(())
}

/// An order and its event in one commit. The events of one user keep their order.
fn order(request: &Request, user: u64, amount: u64) -> Result<CommitOrder<'_>, Failure> {
    let body = json!({ "user": user, "amount": amount }).to_string();
    let event = Draft::json("order.created", &body)?
        .ordering_key(OrderingKey::new(format!("user-{user}"))?);
    Ok(request.order(format!("order-{}", request.key.id), body, event)?)
}

fn request(id: &str, user: u64, amount: u64) -> Result<Request, Failure> {
    let parameters = [("user", user.to_string()), ("amount", amount.to_string())];
    Ok(Request::of(format!("user-{user}"), id, parameters)?)
}

fn place(shop: &RedbStore, id: &str, user: u64, amount: u64, now: Millis) -> Result<(), Failure> {
    let request = request(id, user, amount)?;
    shop.run(order(&request, user, amount)?, now)?;
    Ok(())
}

fn place_and_break_off(
    shop: &RedbStore,
    id: &str,
    user: u64,
    amount: u64,
    now: Millis,
) -> Result<(), Failure> {
    let request = request(id, user, amount)?;
    let order = order(&request, user, amount)?;
    shop.write(now, |tx| {
        tx.run(&order)?;
        Err(Failure::from("something went wrong in the same transaction"))
    })?;
    Ok(())
}

/// A broker that fails for a while, and otherwise keeps what it gets.
struct Broker {
    failures_left: u32,
    sent: Vec<Message>,
}

impl Publisher for Broker {
    fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
        batch.iter().map(|message| self.publish_one(message)).collect()
    }
}

impl Broker {
    fn publish_one(&mut self, message: &Message) -> Published {
        if self.failures_left > 0 {
            self.failures_left -= 1;
            return Published::Failed(Reason::new("the broker closed the connection"));
        }
        self.sent.push(message.clone());
        Published::Confirmed
    }
}

/// How many events are pending, and how often they and the others failed.
fn outbox(shop: &RedbStore) -> Result<String, Failure> {
    let (mut pending, mut failed) = (0, 0);
    for (state, row) in Dump::of(&mut shop.view()?)?.events().into_values() {
        pending += u32::from(matches!(state, EventState::Pending | EventState::Leased));
        failed += row.failures;
    }
    Ok(format!("pending={pending} failed_attempts={failed}"))
}

/// Adds the points of an order to those of its user.
fn add_points(tx: &WriteTransaction, order: &Body) -> Result<(), Failure> {
    let order: Value = serde_json::from_slice(order.bytes())?;
    let (user, amount) = order["user"]
        .as_u64()
        .zip(order["amount"].as_u64())
        .ok_or("an order has a user and an amount")?;
    let mut points = tx.open_table(POINTS)?;
    let before = points.get(user)?.map_or(0, |points| points.value());
    points.insert(user, before + amount / 100)?;
    Ok(())
}
