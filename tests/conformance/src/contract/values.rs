//! Values that stores like to spoil: every byte, every length, texts that look alike, numbers at
//! their limits (F19).

use twobox::{
    CallRow, CallState, DeliveryState, Event, EventId, InboxRow, InboxState, LaneRow, Lease, Load,
    Millis, OrderingKey, OutboxRow, Owner, PositionRow, Query, Reader, Reason, Record, Revision,
    Stored,
};

use super::{committed, fill, rows, same};
use crate::failure::Failure;
use crate::harness::Harness;

/// Writes the records and finds them again, one by one and all together, before and after a crash.
fn come_back<H: Harness>(what: &str, records: &[Record]) -> Result<(), Failure> {
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
            let found = view.load(&Query::rows([key.clone()])).map_err(Failure::store)?.into_vec();
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
        records.push(rows::event(name, rows::body("an event")?)?);
        records.push(rows::lane(name, Some(Millis::new(n)))?);
        records.push(rows::outbox(name, name, n, DeliveryState::Pending)?);
        records.push(rows::inbox("loyalty", name, InboxState::Applied)?);
        records.push(rows::inbox(name, "loyalty", InboxState::Applied)?);
        records.push(rows::effect("loyalty", name, rows::body("an effect")?)?);
        records.push(rows::position("loyalty", name)?);
        records.push(rows::position(name, "customer-7")?);
        records.push(rows::call("loyalty", name, CallState::Done)?);
    }
    records.push(rows::event(&fill_up("語", EventId::MAX), rows::body("an event")?)?);
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
        let lane = OrderingKey::new(name).map_err(Failure::new)?;
        let found = view.load(&Query::Lanes(vec![(lane, 10)])).map_err(Failure::store)?.into_vec();
        let right: Vec<Stored> = records
            .iter()
            .filter(|record| match record {
                Record::Lane(key, _) => key.as_str() == name,
                Record::Outbox(_, row) => row.lane.as_str() == name,
                Record::Request(..)
                | Record::Order(..)
                | Record::Event(_)
                | Record::Inbox(..)
                | Record::Effect(..)
                | Record::Position(..)
                | Record::Call(..) => false,
            })
            .map(|record| Stored { record: record.clone(), revision: Revision::FIRST })
            .collect();
        same(&format!("the lane {name:?}"), &found, &right)?;
    }
    Ok(())
}

/// Times, sequences and counters keep their value up to their largest, and sort as numbers.
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
        255,
        256,
        u64::from(u32::MAX),
        i64::MAX as u64,
        i64::MAX as u64 + 1,
        u64::MAX - 1,
        u64::MAX,
    ];
    let mut records = Vec::new();
    for (n, number) in numbers.into_iter().enumerate() {
        let time = Millis::new(number);
        if let Record::Lane(key, _) = rows::lane(&format!("lane-{n}"), None)? {
            let owner = Owner::new("relay-1").map_err(Failure::new)?;
            let lease = Some(Lease { owner, until: time, through: number });
            let starts = u32::try_from(number).unwrap_or(u32::MAX);
            let lane = LaneRow {
                // The first has events with all of these sequences.
                next: if n == 0 { u64::MAX } else { number },
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
        if let Record::Outbox(id, row) =
            rows::outbox(&format!("event-{}", 99 - n), "lane-0", number, DeliveryState::Pending)?
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
        records.push(rows::outbox(
            &format!("done-{n}"),
            "lane-1",
            number,
            DeliveryState::Confirmed(time),
        )?);
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
        if let Record::Event(event) = rows::event(&format!("event-{n}"), rows::body("an event")?)? {
            records.push(Record::Event(Event { time, schema_version: u32::MAX, ..event }));
        }
    }
    come_back::<H>("numbers", &records)?;

    let harness = H::open();
    fill(&harness, &records)?;
    let mut view = harness.store().view().map_err(Failure::store)?;
    let due = Query::Due { now: Millis::MAX, lanes: 100, run: 0, events: 100 };
    let lanes = view.load(&due).map_err(Failure::store)?.into_vec();
    let right: Vec<Stored> = records
        .iter()
        .filter(|record| matches!(record, Record::Lane(..)))
        .map(|record| Stored { record: record.clone(), revision: Revision::FIRST })
        .collect();
    same("lanes by the time at which they are due", &lanes, &right)?;
    let first = OrderingKey::new("lane-0").map_err(Failure::new)?;
    let found = view.load(&Query::Lanes(vec![(first, 100)])).map_err(Failure::store)?.into_vec();
    let sequences: Vec<u64> = found
        .iter()
        .filter_map(|row| {
            if let Record::Outbox(_, row) = &row.record { Some(row.sequence) } else { None }
        })
        .collect();
    crate::failure::ensure(sequences == numbers, || {
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
