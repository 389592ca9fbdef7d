//! Rows to fill a store with.

use twobox::{
    Body, CallRow, CallState, Consumer, DeliveryState, Destination, Digest, Event, EventId,
    EventRow, EventType, Fingerprint, Headers, InboxRow, InboxState, LaneKey, LaneRow, Lease,
    Millis, OrderId, OrderRow, OrderingKey, OutboxRow, Owner, PlacedOrder, PositionRow, Reason,
    Record, RequestKey, RequestRow,
};

use crate::failure::Failure;

type Made<T> = Result<T, Failure>;

fn invalid(invalid: twobox::Invalid) -> Failure {
    Failure::new(invalid)
}

pub(crate) fn body(bytes: impl AsRef<[u8]>) -> Made<Body> {
    Body::new("application/octet-stream", bytes).map_err(invalid)
}

pub(super) fn request(scope: &str, id: &str) -> Made<Record> {
    let row = RequestRow {
        fingerprint: Fingerprint::of([("item", id)]),
        registered_at: Millis::new(7),
        placed: None,
    };
    Ok(Record::Request(RequestKey::new(scope, id).map_err(invalid)?, row))
}

pub(crate) fn order(id: &str, body: Body) -> Made<Record> {
    let request = RequestKey::new("shop", "req-001").map_err(invalid)?;
    Ok(Record::Order(
        OrderId::new(id).map_err(invalid)?,
        OrderRow { request, committed_at: Millis::new(8), body },
    ))
}

/// A small number that follows from an id, so that rows with different ids differ in more.
fn kind(id: &str) -> u64 {
    id.bytes().map(u64::from).sum::<u64>() % 5
}

/// The type of an event, one of a few.
fn type_of(id: &str) -> Made<EventType> {
    EventType::new(["order.created", "order.paid", "sent"][kind(id) as usize % 3]).map_err(invalid)
}

/// Between a destination and an ordering key, in a text for both.
const AT: &str = "=>";

/// A lane from a text: what stands before `=>` is its destination.
pub(super) fn lane_key(text: &str) -> Made<LaneKey> {
    let (destination, ordering_key) = match text.split_once(AT) {
        Some((at, key)) => (Destination::new(at).map_err(invalid)?, key),
        None => (Destination::default(), text),
    };
    Ok(LaneKey { destination, ordering_key: OrderingKey::new(ordering_key).map_err(invalid)? })
}

/// The text that [`lane_key`] makes this lane of.
pub(super) fn lane_text(LaneKey { destination, ordering_key }: &LaneKey) -> String {
    if destination.is_default() {
        return ordering_key.to_string();
    }
    format!("{destination}{AT}{ordering_key}")
}

/// An event in a lane of its own.
pub(super) fn event(id: &str, body: Body) -> Made<Record> {
    event_in(id, "customer-7", 1, body)
}

pub(super) fn event_in(id: &str, lane: &str, sequence: u64, body: Body) -> Made<Record> {
    let LaneKey { destination, ordering_key } = lane_key(lane)?;
    let event = Event {
        id: EventId::new(id).map_err(invalid)?,
        order: OrderId::new("order:req-001").map_err(invalid)?,
        event_type: type_of(id)?,
        schema_version: 1,
        destination,
        ordering_key,
        time: Millis::new(9),
        headers: Headers::new(),
        body,
    };
    Ok(Record::Event(EventRow { event, sequence, due: Millis::new(10 + kind(id)) }))
}

pub(super) fn outbox(id: &str, lane: &str, sequence: u64, state: DeliveryState) -> Made<Record> {
    let row = OutboxRow {
        lane: lane_key(lane)?,
        sequence,
        event_type: type_of(id)?,
        committed_at: Millis::new(9),
        due: Millis::new(12 + kind(id)),
        starts: 2,
        failures: 1,
        state,
        reason: None,
        moved: false,
    };
    Ok(Record::Outbox(EventId::new(id).map_err(invalid)?, row))
}

pub(super) fn lane(key: &str, due: Option<Millis>) -> Made<Record> {
    let row = LaneRow {
        next: 9,
        head: 4,
        confirmed: 3,
        due,
        starts: 1,
        token: 5,
        lease: None,
        blocked_by: None,
        begun: Millis::new(6),
        changed_at: Millis::new(6),
    };
    Ok(Record::Lane(lane_key(key)?, row))
}

pub(super) fn inbox(consumer: &str, id: &str, state: InboxState) -> Made<Record> {
    let content = Digest::of_parts("content", [id.as_bytes()]);
    let row = InboxRow {
        content,
        at: Millis::new(11),
        state,
        failures: 1,
        reason: None,
        effect: state == InboxState::Applied,
    };
    Ok(Record::Inbox(
        Consumer::new(consumer).map_err(invalid)?,
        EventId::new(id).map_err(invalid)?,
        row,
    ))
}

pub(super) fn effect(consumer: &str, id: &str, body: Body) -> Made<Record> {
    Ok(Record::Effect(
        Consumer::new(consumer).map_err(invalid)?,
        EventId::new(id).map_err(invalid)?,
        body,
    ))
}

pub(super) fn position(consumer: &str, key: &str) -> Made<Record> {
    let row = PositionRow { begun: Millis::new(11), sequence: 4, at: Millis::new(12) };
    Ok(Record::Position(
        Consumer::new(consumer).map_err(invalid)?,
        OrderingKey::new(key).map_err(invalid)?,
        row,
    ))
}

pub(super) fn call(consumer: &str, id: &str, state: CallState) -> Made<Record> {
    let row = CallRow { state, at: Millis::new(13), starts: 1, note: None };
    Ok(Record::Call(
        Consumer::new(consumer).map_err(invalid)?,
        EventId::new(id).map_err(invalid)?,
        row,
    ))
}

/// One row for each table, in the order of the tables.
pub(crate) fn one_of_each(name: &str) -> Made<Vec<Record>> {
    Ok(vec![
        request("shop", name)?,
        order(name, body("an order")?)?,
        event_in(name, name, 1, body("an event")?)?,
        outbox(name, name, 1, DeliveryState::Pending)?,
        lane(name, Some(Millis::new(10)))?,
        inbox("loyalty", name, InboxState::Applied)?,
        effect("loyalty", name, body("an effect")?)?,
        position("loyalty", name)?,
        call("loyalty", name, CallState::Started)?,
    ])
}

/// Every shape that a row can have: each state, and with and without each optional part.
pub(super) fn every_shape() -> Made<Vec<Record>> {
    let now = Millis::new(12);
    let id = |text: &str| EventId::new(text).map_err(invalid);
    let mut records = Vec::new();
    for (name, events) in [("none", None), ("one", Some(1)), ("many", Some(256))] {
        let Record::Request(key, row) = request("shop", name)? else { continue };
        let placed = events.map(|count| {
            let events =
                (1..=count).map(|n| id(&format!("{name}/{n}"))).collect::<Made<Vec<_>>>()?;
            Ok::<_, Failure>(PlacedOrder {
                order: OrderId::new(name).map_err(invalid)?,
                events,
                at: now,
            })
        });
        records.push(Record::Request(key, RequestRow { placed: placed.transpose()?, ..row }));
    }
    records.push(lane("lane", Some(now))?);
    let states = [
        ("pending", DeliveryState::Pending),
        ("dead", DeliveryState::Dead(now)),
        ("discarded", DeliveryState::Discarded(now)),
        ("cancelled", DeliveryState::Cancelled(now)),
    ];
    for (n, (name, state)) in (1..).zip(states) {
        for (m, (with, reason)) in
            (0..).zip([("without", None), ("with", Some(Reason::new("the broker failed")))])
        {
            for moved in [false, true] {
                let name = format!("{name} {with} {moved}");
                let sequence = 2 * (2 * n + m) + u64::from(moved);
                records.push(event_in(&name, "lane", sequence, body("an event")?)?);
                let place = if moved { sequence + 1_000 } else { sequence };
                let Record::Outbox(id, row) = outbox(&name, "lane", place, state)? else {
                    continue;
                };
                records
                    .push(Record::Outbox(id, OutboxRow { reason: reason.clone(), moved, ..row }));
            }
        }
    }
    let lease = Lease { owner: Owner::new("relay-1").map_err(invalid)?, until: now, through: 4 };
    for (n, due) in [None, Some(Millis::new(0)), Some(now)].into_iter().enumerate() {
        for (m, lease) in [None, Some(lease.clone())].into_iter().enumerate() {
            for (k, blocked_by) in [None, Some(id("dead")?)].into_iter().enumerate() {
                let Record::Lane(key, row) = lane(&format!("{n}{m}{k}"), due)? else { continue };
                records
                    .push(Record::Lane(key, LaneRow { lease: lease.clone(), blocked_by, ..row }));
            }
        }
    }
    for state in [InboxState::Applied, InboxState::Failing, InboxState::Poisoned] {
        for reason in [None, Some(Reason::new("the consumer failed"))] {
            let name = format!("{} {}", state.name(), reason.is_some());
            let Record::Inbox(consumer, id, row) = inbox("loyalty", &name, state)? else {
                continue;
            };
            records.push(Record::Inbox(consumer, id, InboxRow { reason, ..row }));
        }
    }
    for state in [CallState::Intended, CallState::Started, CallState::Done, CallState::Unknown] {
        for note in [None, Some(Reason::new("the bank says yes"))] {
            let name = format!("{} {}", state.name(), note.is_some());
            let Record::Call(consumer, id, row) = call("loyalty", &name, state)? else { continue };
            records.push(Record::Call(consumer, id, CallRow { note, ..row }));
        }
    }
    let mut headers = Headers::new();
    for n in 0..Headers::MAX {
        headers = headers.with(format!("name-{n:02}"), "v".repeat(1024)).map_err(invalid)?;
    }
    records.push(lane("headers", Some(now))?);
    for (n, (name, headers)) in (1..).zip([("none", Headers::new()), ("full", headers)]) {
        if let Record::Event(row) = event_in(name, "headers", n, body("an event")?)? {
            let event = Event { headers, schema_version: u32::MAX, ..row.event };
            records.push(Record::Event(EventRow { event, ..row }));
        }
    }
    Ok(records)
}

/// A request, and the order with these events that it has placed.
pub(super) fn placed(name: &str, events: &[&str]) -> Made<Vec<Record>> {
    let (request, order) = (request("placed", name)?, order(name, body("an order")?)?);
    let (Record::Request(key, row), Record::Order(id, order)) = (request, order) else {
        return Ok(Vec::new());
    };
    let events = events.iter().map(|id| EventId::new(*id).map_err(invalid));
    let events = events.collect::<Made<Vec<_>>>()?;
    let placed = Some(PlacedOrder { order: id.clone(), events, at: Millis::new(8) });
    Ok(vec![
        Record::Request(key.clone(), RequestRow { placed, ..row }),
        Record::Order(id, OrderRow { request: key, ..order }),
    ])
}

/// Rows of the receiver and requests that a purge may remove, and some that it may not.
pub(super) fn finished(name: &str) -> Made<Vec<Record>> {
    let mut records = vec![
        inbox("mailing", name, InboxState::Failing)?,
        inbox("points", name, InboxState::Poisoned)?,
        call("mailing", name, CallState::Done)?,
        call("points", name, CallState::Unknown)?,
    ];
    if let Record::Request(key, row) = request("market", name)? {
        let order = OrderId::new(name).map_err(invalid)?;
        let placed = Some(PlacedOrder { order, events: Vec::new(), at: Millis::new(8) });
        records.push(Record::Request(key, RequestRow { placed, ..row }));
    }
    Ok(records)
}
