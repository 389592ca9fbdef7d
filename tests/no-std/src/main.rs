//! A whole cycle of twobox with no std, no operating system's heap and no C library, as on a device: a request is registered, its
//! order committed with an event, the event claimed, received in another store, settled, and received a second time (P1, P2, P5).
//!
//! It prints the largest amount of heap that was in use, and ends with an error if a figure is wrong or the heap is too small.
//!
//! ```text
//! cargo run --manifest-path tests/no-std/Cargo.toml
//! ```

#![no_std]
#![no_main]

extern crate alloc;

mod bare;

use alloc::string::{String, ToString};
use core::fmt::{Display, Write};
use core::time::Duration;

use twobox::{
    Body, Claim, CommitOrder, Consumer, DeliveryPolicy, DeliveryState, Draft, Dump, Event, Fingerprint, Invalid, Key, Load,
    Millis, OrderId, Owner, Query, Reader, Receive, Received, Record, Register, Registered, Request, RunResult, Settle, Store,
    Table,
};
use twobox_memory::MemoryStore;

/// What runs once the processor is ready; its result is the exit code.
fn run() -> i32 {
    match cycle() {
        Ok(()) => {
            let heap = bare::peak();
            let _ = writeln!(bare::Console, "no_std cycle: peak heap {heap} bytes of {}", bare::HEAP);
            0
        }
        Err(wrong) => {
            let _ = writeln!(bare::Console, "no_std cycle failed: {wrong}");
            1
        }
    }
}

/// What went wrong, for the console.
struct Wrong(String);

impl<E: core::error::Error> From<E> for Wrong {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

impl Display for Wrong {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}

fn check<T: PartialEq + core::fmt::Debug>(what: &str, found: T, right: T) -> Result<(), Wrong> {
    if found == right { Ok(()) } else { Err(Wrong(alloc::format!("{what}: {found:?}, it must be {right:?}"))) }
}

fn cycle() -> Result<(), Wrong> {
    let (now, later) = (Millis::new(1_000), Millis::new(2_000));
    let (sender, receiver) = (MemoryStore::new(), MemoryStore::new());

    let request = Request::new("till-3", "req-001", Fingerprint::of([("item", "notebook"), ("quantity", "2")]))?;
    check("register", sender.run(Register::new(&request), now)?, Registered::New)?;
    let order = order(&request)?;
    check("commit", sender.run(&order, now)?.repeated, false)?;
    check("commit again", sender.run(&order, now)?.repeated, true)?;

    let policy = DeliveryPolicy::default();
    let claimed = sender.run(Claim::new(&policy, Owner::new("till-3")?, Duration::from_secs(30), 1)?, now)?;
    for run in claimed.runs {
        let mut result = RunResult::released(run.lease);
        for delivery in run.deliveries {
            let event = event(&sender, Key::Event(delivery.event))?;
            check("receive", receive(&receiver, &event, now)?, Received::Applied)?;
            check("receive again", receive(&receiver, &event, later)?, Received::Duplicate)?;
            result.confirmed.push(event.id);
        }
        check("settle", sender.run(Settle::new(&policy, [result]), later)?.confirmed, 1)?;
    }

    let (sent, received) = (Dump::of(&mut sender.view()?)?, Dump::of(&mut receiver.view()?)?);
    check("orders", sent.count(Table::Orders), 1)?;
    check("inbox", received.count(Table::Inbox), 1)?;
    check("effects", received.count(Table::Effects), 1)?;
    let confirmed = |record: &&Record| matches!(record, Record::Outbox(_, row) if row.state == DeliveryState::Confirmed(later));
    check("confirmed", sent.records().iter().filter(confirmed).count(), 1)
}

fn order(request: &Request) -> Result<CommitOrder<'_>, Invalid> {
    let body = Body::json(r#"{"item":"notebook","quantity":2}"#)?;
    CommitOrder::new(request, OrderId::new("order:req-001")?, body.clone(), [Draft::new("order.created", body)?])
}

fn event(store: &MemoryStore, key: Key) -> Result<Event, Wrong> {
    let rows = store.view()?.load(&Query::rows([key]))?.into_vec();
    match rows.into_iter().next().map(|stored| stored.record) {
        Some(Record::Event(event)) => Ok(event),
        found => Err(Wrong(alloc::format!("an event was expected, found {found:?}"))),
    }
}

fn receive(store: &MemoryStore, event: &Event, now: Millis) -> Result<Received, Wrong> {
    let effect = Body::text("2 notebooks packed")?;
    Ok(store.run(Receive::new(Consumer::new("parcels")?, event).effect(effect), now)?)
}
