//! Points for orders: two orders go to a broker that fails once, and one message arrives twice.
//!
//! The points are a table of the consumer's own, in the store that holds its inbox: the row of the inbox and the points are one
//! commit, so a message that comes again adds nothing. All figures are counted from the tables.
//!
//! ```text
//! cargo run --example relay
//! ```

use std::error::Error;
use std::io::{self, Write};
use std::time::Duration;

use redb::{ReadableDatabase, ReadableTable, TableDefinition};
use serde_json::{Value, json};
use twobox::{
    Body, Claim, CommitOrder, Consumer, DeliveryPolicy, DeliveryState, Draft, Dump, Ending, Event, EventId, Fingerprint, Key,
    Load, Millis, OrderId, OrderingKey, Owner, Query, Reader, Reason, Receive, Received, Record, Request, RunResult, Settle,
    Store, Table,
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
    let policy = DeliveryPolicy::default();
    let now = Millis::new(1_000);

    place(&shop, "req-1", 1, 19_900, now)?;
    if place_and_break_off(&shop, "req-2", 2, 500, now).is_ok() {
        return Err("the order of user 2 must be rolled back".into());
    }
    place(&shop, "req-3", 1, 10_000, now)?;
    let dump = Dump::of(&mut shop.view()?)?;
    writeln!(out, "orders={} outbox={}", dump.count(Table::Orders), dump.count(Table::Outbox))?;

    let mut broker = Broker { failures_left: 1, sent: Vec::new() };
    let sent = relay(&shop, &mut broker, &policy, now)?;
    writeln!(out, "broker fails: sent={sent} {}", outbox(&shop)?)?;
    // The failed event waits for its backoff, and the other one of the same user behind it.
    let later = now + policy.backoff_base;
    let sent = relay(&shop, &mut broker, &policy, later)?;
    writeln!(out, "retry: sent={sent} {}", outbox(&shop)?)?;
    let sent = relay(&shop, &mut broker, &policy, later)?;
    writeln!(out, "nothing left: sent={sent} {}", outbox(&shop)?)?;

    let repeated = broker.sent.first();
    for event in broker.sent.iter().chain(repeated) {
        let received = receive(&loyalty, event, later)?;
        writeln!(out, "message {} of order {}: {received:?}", event.id, event.order)?;
    }
    let points = loyalty.database().begin_read()?.open_table(POINTS)?;
    for row in points.iter()? {
        let (user, points) = row?;
        writeln!(out, "user {} has {} points", user.value(), points.value())?;
    }
    Ok(())
}

/// An order and its event in one commit. The events of one user keep their order.
fn order(request: &Request, user: u64, amount: u64) -> Result<CommitOrder<'_>, Failure> {
    let id = OrderId::new(format!("order-{}", request.key.id))?;
    let body = Body::json(json!({ "user": user, "amount": amount }).to_string())?;
    let event = Draft::new("order.created", body.clone())?.ordering_key(OrderingKey::new(format!("user-{user}"))?);
    Ok(CommitOrder::new(request, id, body, [event])?)
}

fn request(id: &str, user: u64, amount: u64) -> Result<Request, Failure> {
    let parameters = Fingerprint::of([("user", user.to_string()), ("amount", amount.to_string())]);
    Ok(Request::new(format!("user-{user}"), id, parameters)?)
}

fn place(shop: &RedbStore, id: &str, user: u64, amount: u64, now: Millis) -> Result<(), Failure> {
    let request = request(id, user, amount)?;
    shop.run(order(&request, user, amount)?, now)?;
    Ok(())
}

fn place_and_break_off(shop: &RedbStore, id: &str, user: u64, amount: u64, now: Millis) -> Result<(), Failure> {
    let request = request(id, user, amount)?;
    let order = order(&request, user, amount)?;
    shop.write(now, |tx| {
        tx.run(&order)?;
        Err(Failure::from("something went wrong in the same transaction"))
    })?;
    Ok(())
}

/// A broker that fails for a while.
struct Broker {
    failures_left: u32,
    sent: Vec<Event>,
}

impl Broker {
    fn publish(&mut self, event: &Event) -> Result<(), Failure> {
        if self.failures_left > 0 {
            self.failures_left -= 1;
            return Err("the broker closed the connection".into());
        }
        self.sent.push(event.clone());
        Ok(())
    }
}

/// Publishes what is due, and says how much of it the broker has.
fn relay(shop: &RedbStore, broker: &mut Broker, policy: &DeliveryPolicy, now: Millis) -> Result<usize, Failure> {
    let claim = Claim::new(policy, Owner::new("relay-1")?, Duration::from_secs(30), 100)?;
    let mut results = Vec::new();
    for run in shop.run(claim, now)?.runs {
        let mut result = RunResult::released(run.lease);
        for delivery in run.deliveries {
            match broker.publish(&event(shop, delivery.event.clone())?) {
                Ok(()) => result.confirmed.push(delivery.event),
                Err(failure) => {
                    result.ended = Some((delivery.event, Ending::Failed(Reason::new(failure))));
                    break; // What stands behind it waits for it.
                }
            }
        }
        results.push(result);
    }
    let settled = shop.run(Settle::new(policy, results), now)?;
    settled.stale.into_iter().next().map_or(Ok(settled.confirmed), |stale| Err(stale.into()))
}

fn event(shop: &RedbStore, id: EventId) -> Result<Event, Failure> {
    let rows = shop.view()?.load(&Query::rows([Key::Event(id)]))?.into_vec();
    match rows.into_iter().next().map(|stored| stored.record) {
        Some(Record::Event(event)) => Ok(event),
        found => Err(format!("the event is not in its table, found {found:?}").into()),
    }
}

/// How many events are pending, and how often they and the others failed.
fn outbox(shop: &RedbStore) -> Result<String, Failure> {
    let (mut pending, mut failed) = (0, 0);
    for record in Dump::of(&mut shop.view()?)?.records() {
        if let Record::Outbox(_, row) = record {
            pending += u32::from(row.state == DeliveryState::Pending);
            failed += row.failures;
        }
    }
    Ok(format!("pending={pending} failed_attempts={failed}"))
}

/// Adds the points of an order, once for each event (P5).
fn receive(loyalty: &RedbStore, event: &Event, now: Millis) -> Result<Received, Failure> {
    let received = loyalty.write(now, |tx| {
        let received = tx.run(Receive::new(Consumer::new("points")?, event))?;
        match received {
            Received::Applied => {
                let order: Value = serde_json::from_slice(event.body.bytes())?;
                let (user, amount) =
                    order["user"].as_u64().zip(order["amount"].as_u64()).ok_or("an order has a user and an amount")?;
                let mut points = tx.redb().open_table(POINTS)?;
                let before = points.get(user)?.map_or(0, |points| points.value());
                points.insert(user, before + amount / 100)?;
            }
            Received::Duplicate | Received::Poisoned | Received::WaitsFor(_) => {}
        }
        Ok::<_, Failure>(received)
    })?;
    Ok(received)
}
