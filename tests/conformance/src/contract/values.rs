//! Values that stores like to spoil: every byte, every length, texts that look alike, numbers at
//! their limits (F19).

use twobox::{
    Body, CallRow, CallState, DeliveryState, Destinations, Due, Event, EventId, EventRow,
    EventType, Headers, InboxRow, InboxState, LaneRow, Lease, Load, Millis, OrderId, OrderRow,
    OutboxRow, Owner, PlacedOrder, PositionRow, Query, Reader, Reason, Record, RequestKey,
    RequestRow, Revision, Stored, Summary,
};

use super::{committed, fill, load, rows, same};
use crate::failure::{Failure, ensure};
use crate::harness::Harness;

/// Writes the records and finds them again, one by one and all together, before and after a crash.
pub(super) fn come_back<H: Harness>(what: &str, records: &[Record]) -> Result<(), Failure> {
    let mut harness = H::open();
    fill(&harness, records)?;
    let mut right: Vec<Stored> = records
        .iter()
        .cloned()
        .map(|record| Stored { record, revision: Revision::FIRST })
        .collect();
    right.sort_by_cached_key(|row| row.record.key());
    for when in ["after the commit", "after a crash"] {
        same(&format!("{what}, {when}"), &committed(&harness)?, &right)?;
        let mut view = harness.store().view().map_err(Failure::store)?;
        for row in &right {
            let key = row.record.key();
            let found = load(&mut view, &Query::rows([key.clone()]))?.rows;
            same(&format!("{what}, {when}, {key}"), &found, std::slice::from_ref(row))?;
        }
        drop(view);
        harness = harness.crash();
    }
    Ok(())
}

/// Bodies hold any bytes: none, NUL, 0xFF, all 256, text that is not UTF-8, and a MiB (F19).
///
/// # Errors
///
/// The first body that came back otherwise.
pub fn any_bytes_in_bodies<H: Harness>() -> Result<(), Failure> {
    let every: Vec<u8> = (0..=255).collect();
    let large: Vec<u8> = (0..1_usize << 20).map(|n| (n % 251) as u8).collect();
    let bodies: [&[u8]; 9] = [
        b"",
        b"\0",
        b"\0\0after two NULs",
        b"before\0after",
        b"\xff\xfe\xfd",
        b"\xc3\x28",
        b"' \" \\ ; -- %",
        &every,
        &large,
    ];
    for (n, bytes) in bodies.iter().enumerate() {
        let name = format!("body-{n}");
        let records = [
            rows::order(&name, rows::body(bytes)?)?,
            rows::event(&name, rows::body(bytes)?)?,
            rows::lane("customer-7", None)?,
            rows::effect("loyalty", &name, rows::body(bytes)?)?,
        ];
        come_back::<H>(&format!("a body of {} bytes", bytes.len()), &records)?;
    }
    Ok(())
}

/// Texts in keys are kept and told apart byte by byte: at their greatest length, with any Unicode,
/// and where they differ only by case, by a space at the end, or by the form of an accent. Two
/// parts of a key never run into each other.
///
/// # Errors
///
/// The first key that was lost or found in the wrong place.
pub fn texts_at_their_limits<H: Harness>() -> Result<(), Failure> {
    let fill_up = |part: &str, max: usize| -> String {
        let mut text = part.repeat(max / part.len());
        text.push_str(&"x".repeat(max - text.len()));
        text
    };
    let mut names: Vec<String> = [
        "req-1",
        "REQ-1",
        "Req-1",
        "req-1 ",
        " req-1",
        "req-1  ",
        "req-10",
        "req-2",
        "re",
        "é",
        "e\u{301}",
        "É",
        "ß",
        "ss",
        "ı",
        "i",
        "I",
        "İ",
        "\u{202e}abc",
        "😀",
        "\u{ffff}",
        "\u{10ffff}",
        "%",
        "_",
        "*",
        "?",
        "'",
        "\"",
        "\\",
        "a/b",
        "a",
        "b",
        "b/c",
        "a/b/c",
        ":",
        "\u{a0}",
        "\u{feff}",
        "\u{200b}",
        "ﬀ",
        "ff",
        "ñ",
        "n\u{303}",
        "~",
    ]
    .map(str::to_string)
    .to_vec();
    names.extend(["x", "é", "語", "😀", " "].map(|part| fill_up(part, 128)));
    let mut records = Vec::new();
    for (n, name) in (1..).zip(&names) {
        records.push(rows::request("shop", name)?);
        records.push(rows::request(name, "shop")?);
        records.push(rows::order(name, rows::body("an order")?)?);
        records.push(rows::event_in(name, name, n + 3, rows::body("an event")?)?);
        records.push(rows::lane(name, Some(Millis::new(n)))?);
        records.push(rows::outbox(name, name, n + 3, DeliveryState::Pending)?);
        records.push(rows::inbox("loyalty", name, InboxState::Applied)?);
        records.push(rows::inbox(name, "loyalty", InboxState::Applied)?);
        records.push(rows::effect("loyalty", name, rows::body("an effect")?)?);
        records.push(rows::position("loyalty", name)?);
        records.push(rows::position(name, "customer-7")?);
        records.push(rows::call("loyalty", name, CallState::Done)?);
    }
    records.push(rows::lane("the longest", Some(Millis::new(1)))?);
    let longest = fill_up("語", EventId::MAX);
    records.push(rows::event_in(&longest, "the longest", 4, rows::body("an event")?)?);
    // Keys of two parts: the same text when the parts are put together.
    for (first, second) in
        [("a", "b/c"), ("a/b", "c"), ("ab", "c"), ("a", "bc"), ("ab ", "c"), ("ab", " c")]
    {
        records.push(rows::request(first, second)?);
        records.push(rows::inbox(first, second, InboxState::Applied)?);
        records.push(rows::effect(first, second, rows::body("an effect")?)?);
        records.push(rows::position(first, second)?);
        records.push(rows::call(first, second, CallState::Done)?);
    }
    come_back::<H>("texts in keys", &records)?;

    // Found through their lanes as well: each lane has its own event and no other.
    let harness = H::open();
    fill(&harness, &records)?;
    let mut view = harness.store().view().map_err(Failure::store)?;
    for name in &names {
        let id = EventId::new(name).map_err(Failure::new)?;
        let query = Query::Deliveries { events: vec![id], run: 10 };
        let found = view.load(&query).map_err(Failure::load(&query))?;
        let found: Vec<_> = found
            .lanes
            .iter()
            .map(|lane| {
                (lane.key.ordering_key.as_str(), lane.pending.iter().map(|next| next.id.as_str()))
            })
            .map(|(key, events)| (key, events.collect::<Vec<_>>()))
            .collect();
        ensure(found == [(name.as_str(), vec![name.as_str()])], || {
            format!("the lane {name:?} must have the event of this name, and there is {found:?}")
        })?;
    }
    Ok(())
}

/// Times, sequences and counters keep their value up to their largest, which fits a signed 64-bit
/// column, and sort as numbers.
///
/// # Errors
///
/// The first number that came back otherwise, or in the wrong place.
pub fn numbers_at_their_limits<H: Harness>() -> Result<(), Failure> {
    let numbers = [
        0,
        1,
        9,
        10,
        127,
        128,
        255,
        256,
        32_767,
        32_768,
        65_535,
        65_536,
        i32::MAX as u64,
        i32::MAX as u64 + 1,
        u64::from(u32::MAX),
        u64::from(u32::MAX) + 1,
        (1 << 53) - 1,
        (1 << 53) + 1,
        i64::MAX as u64 - 1,
        i64::MAX as u64,
    ];
    let mut records = Vec::new();
    for (n, number) in numbers.into_iter().enumerate() {
        // What is due at the end of time is never due.
        let time = Millis::new(number.min(i64::MAX as u64 - 1));
        if let Record::Lane(key, _) = rows::lane(&format!("lane-{n}"), None)? {
            let owner = Owner::new("relay-1").map_err(Failure::new)?;
            let lease = Some(Lease { owner, until: time, through: number });
            let starts = u32::try_from(number).unwrap_or(u32::MAX);
            let lane = LaneRow {
                // The first has events with all of these sequences.
                next: if n == 0 { i64::MAX as u64 } else { number },
                head: if n == 0 { 0 } else { number },
                confirmed: number,
                due: Some(time),
                starts,
                token: number,
                lease,
                blocked_by: None,
                begun: time,
                changed_at: time,
            };
            records.push(Record::Lane(key, lane));
        }
        let name = format!("event-{}", 99 - n);
        if let Record::Event(row) =
            rows::event_in(&name, "lane-0", number, rows::body("an event")?)?
        {
            let event = Event { time, schema_version: u32::MAX, ..row.event };
            records.push(Record::Event(EventRow { event, due: time, ..row }));
        }
        if let Record::Outbox(id, row) =
            rows::outbox(&name, "lane-0", number, DeliveryState::Pending)?
        {
            records.push(Record::Outbox(
                id,
                OutboxRow {
                    due: time,
                    committed_at: time,
                    starts: u32::MAX,
                    failures: u32::MAX,
                    ..row
                },
            ));
        }
        if let Record::Inbox(consumer, id, row) =
            rows::inbox("loyalty", &format!("event-{n}"), InboxState::Failing)?
        {
            records.push(Record::Inbox(
                consumer,
                id,
                InboxRow { at: time, failures: u32::MAX, ..row },
            ));
        }
        if let Record::Position(consumer, key, _) = rows::position("loyalty", &format!("lane-{n}"))?
        {
            records.push(Record::Position(
                consumer,
                key,
                PositionRow { begun: time, sequence: number, at: time },
            ));
        }
        if let Record::Call(consumer, id, row) =
            rows::call("loyalty", &format!("event-{n}"), CallState::Started)?
        {
            records.push(Record::Call(consumer, id, CallRow { at: time, starts: u32::MAX, ..row }));
        }
    }
    come_back::<H>("numbers", &records)?;

    let harness = H::open();
    fill(&harness, &records)?;
    let mut view = harness.store().view().map_err(Failure::store)?;
    // Of two that are due at the same time the key decides.
    let mut right: Vec<(Millis, String)> = records
        .iter()
        .filter_map(|record| {
            let Record::Lane(key, row) = record else { return None };
            Some((row.due?, key.to_string()))
        })
        .collect();
    right.sort();
    let (floor, lanes, run, events, bytes) = (Millis::new(0), 100, 100, 100, usize::MAX);
    let due = Query::Due(Due {
        destinations: Destinations::ALL,
        now: Millis::MAX,
        floor,
        lanes,
        run,
        events,
        bytes,
    });
    let lanes = view.load(&due).map_err(Failure::load(&due))?.lanes;
    let found: Vec<(Millis, String)> =
        lanes.iter().filter_map(|lane| Some((lane.row.due?, lane.key.to_string()))).collect();
    ensure(found == right, || {
        format!("the lanes must come when they are due, in the order {right:?}, not {found:?}")
    })?;
    let first = lanes.iter().find(|lane| lane.key.ordering_key.as_str() == "lane-0");
    let sequences: Vec<u64> = first
        .map(|lane| lane.pending.iter().map(|delivery| delivery.row.sequence).collect())
        .unwrap_or_default();
    ensure(sequences == numbers, || {
        format!("the events of a lane must come in the order {numbers:?}, not {sequences:?}")
    })
}

/// Every state of every row comes back as it was, with and without each optional part, and a reason
/// of the greatest length.
///
/// # Errors
///
/// The first row that came back otherwise.
pub fn every_state_comes_back<H: Harness>() -> Result<(), Failure> {
    let mut records = rows::every_shape()?;
    if let Record::Inbox(consumer, id, row) =
        rows::inbox("loyalty", "long reason", InboxState::Poisoned)?
    {
        records.push(Record::Inbox(
            consumer,
            id,
            InboxRow { reason: Some(Reason::new("語".repeat(1000))), ..row },
        ));
    }
    come_back::<H>("every shape of a row", &records)
}

/// Every column is kept for itself: in rows in which no two columns of one kind have the same
/// value, whatever they usually have. A text that is there and empty is not one that is absent, and
/// a text that is cut is not the same.
///
/// # Errors
///
/// The first row that came back otherwise.
pub fn columns_are_kept_apart<H: Harness>() -> Result<(), Failure> {
    come_back::<H>("rows whose columns all differ", &apart()?)
}

fn apart() -> Result<Vec<Record>, Failure> {
    let time = |n: u64| Millis::new(5_000 + n);
    let id = |text: &str| EventId::new(text).map_err(Failure::new);
    let mut records = Vec::new();
    let fingerprints = [
        Summary::All.of([("note", "n".repeat(100))]),
        Summary::All.of([("note", "é".repeat(200))]),
        Summary::All.of_bytes(b""),
    ];
    for (n, fingerprint) in fingerprints.into_iter().enumerate() {
        let Record::Request(key, _) = rows::request("shop", &format!("apart-{n}"))? else {
            continue;
        };
        let order = OrderId::new("another").map_err(Failure::new)?;
        let placed = Some(PlacedOrder { order, events: vec![id("one")?, id("b")?], at: time(2) });
        records
            .push(Record::Request(key, RequestRow { fingerprint, registered_at: time(1), placed }));
    }
    if let Record::Order(id, _) = rows::order("apart", rows::body("an order")?)? {
        let request = RequestKey::new("another shop", "another request").map_err(Failure::new)?;
        let body = Body::json("{}").map_err(Failure::new)?;
        let row = OrderRow { request, committed_at: time(3), body };
        records.push(Record::Order(id, row));
    }
    let owner = Owner::new("relay-1").map_err(Failure::new)?;
    let lane = |name: &str, with: u32| {
        let Record::Lane(key, _) = rows::lane(name, None)? else {
            return Err(Failure::new("a lane"));
        };
        let lease = Lease { owner: owner.clone(), until: time(5), through: 93 };
        let row = LaneRow {
            next: 99,
            head: 91,
            confirmed: 81,
            due: (with & 1 == 1).then(|| time(6)),
            starts: 71,
            token: 61,
            lease: (with & 2 == 2).then_some(lease),
            blocked_by: if with & 4 == 4 { Some(id("blocks")?) } else { None },
            begun: time(7),
            changed_at: time(8),
        };
        Ok(Record::Lane(key, row))
    };
    for with in 0..8 {
        records.push(lane(&format!("lane-{with}"), with)?);
    }
    let states = [
        DeliveryState::Pending,
        DeliveryState::Dead(time(11)),
        DeliveryState::Discarded(time(12)),
        DeliveryState::Cancelled(time(13)),
    ];
    let event_type = EventType::new("order.shipped").map_err(Failure::new)?;
    let reasons = [None, Some(Reason::new("")), Some(Reason::new("because"))];
    for (n, state) in (1..).zip(states) {
        for (m, reason) in (0..).zip(&reasons) {
            for moved in [false, true] {
                let place = 100 * n + 10 * m + u64::from(moved);
                let name = format!("event-{place}");
                if let Record::Event(row) =
                    rows::event_in(&name, "lane-1", place, rows::body("e")?)?
                {
                    let event = Event {
                        time: time(21),
                        schema_version: 5,
                        event_type: event_type.clone(),
                        order: OrderId::new("the order").map_err(Failure::new)?,
                        headers: Headers::new().with("name", "value").map_err(Failure::new)?,
                        body: Body::text("a text").map_err(Failure::new)?,
                        ..row.event
                    };
                    records.push(Record::Event(EventRow { event, due: time(22), ..row }));
                }
                if let Record::Outbox(id, row) = rows::outbox(&name, "lane-1", place, state)? {
                    let sequence = if moved { place + 5_000 } else { place };
                    let row = OutboxRow { sequence, committed_at: time(21), due: time(23), ..row };
                    let row = OutboxRow { event_type: event_type.clone(), ..row };
                    let row =
                        OutboxRow { starts: 5, failures: 3, moved, reason: reason.clone(), ..row };
                    records.push(Record::Outbox(id, row));
                }
            }
        }
    }
    for state in [InboxState::Applied, InboxState::Failing, InboxState::Poisoned] {
        for (m, reason) in reasons.iter().enumerate() {
            // An applied event need not have an effect.
            for effect in [false, true] {
                let name = format!("{}-{m}-{effect}", state.name());
                if let Record::Inbox(consumer, id, row) = rows::inbox("loyalty", &name, state)? {
                    let row = InboxRow { effect, reason: reason.clone(), failures: 4, ..row };
                    records.push(Record::Inbox(consumer, id, row));
                }
            }
        }
    }
    let odd = Body::new("application/x-odd", b"odd").map_err(Failure::new)?;
    records.push(rows::effect("loyalty", "apart", odd)?);
    if let Record::Position(consumer, key, _) = rows::position("loyalty", "apart")? {
        let row = PositionRow { begun: time(31), sequence: 41, at: time(32) };
        records.push(Record::Position(consumer, key, row));
    }
    for state in [CallState::Intended, CallState::Started, CallState::Done, CallState::Unknown] {
        for (m, note) in reasons.iter().enumerate() {
            let name = format!("{}-{m}", state.name());
            if let Record::Call(consumer, id, row) = rows::call("loyalty", &name, state)? {
                let row = CallRow { note: note.clone(), starts: m as u32, at: time(33), ..row };
                records.push(Record::Call(consumer, id, row));
            }
        }
    }
    Ok(records)
}
