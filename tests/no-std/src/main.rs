//! A whole cycle of twobox with no std, no operating system's heap and no C library, as on a device: a request is registered, its
//! order committed with an event, and a relay brings the event to an inbox in another store. The first confirmation is lost, so
//! the event comes a second time, and is not handled again (P1, P2, P5).
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
use core::fmt::{Debug, Display, Formatter, Write};

use twobox::relay::{Fault, InProcess, Published, Relay, RelaySettings};
use twobox::{
    Body, CommitOrder, Consumer, DeliveryState, Draft, Dump, Fingerprint, Handled, Inbox, Invalid, Millis, OrderId, Owner,
    Reader, Reason, Record, Register, Registered, Request, Store, Table,
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
    fn fmt(&self, f: &mut Formatter<'_>) -> core::fmt::Result {
        f.write_str(&self.0)
    }
}

fn check<T: PartialEq + Debug>(what: &str, found: T, right: T) -> Result<(), Wrong> {
    if found == right { Ok(()) } else { Err(Wrong(alloc::format!("{what}: {found:?}, it must be {right:?}"))) }
}

fn cycle() -> Result<(), Wrong> {
    let now = Millis::new(1_000);
    let (sender, receiver) = (MemoryStore::new(), MemoryStore::new());

    let request = Request::new("till-3", "req-001", Fingerprint::of([("item", "notebook"), ("quantity", "2")]))?;
    check("register", sender.run(Register::new(&request), now)?, Registered::New)?;
    let order = order(&request)?;
    check("commit", sender.run(&order, now)?.repeated, false)?;
    check("commit again", sender.run(&order, now)?.repeated, true)?;

    let (mut handled, mut arrived) = (0, 0);
    let settings = RelaySettings::new(Owner::new("till-3")?);
    let later = now + settings.policy.backoff_base;
    let inbox = Inbox::new(&receiver, Consumer::new("parcels")?);
    let parcels = InProcess::new(inbox, |_, _| {
        handled += 1;
        Body::text("2 notebooks packed").map(Handled::Effect)
    });
    let parcels = parcels.with_faults(|_| {
        arrived += 1;
        (arrived == 1).then(|| Fault::After(Published::Failed(Reason::new("the confirmation was lost"))))
    });
    let mut relay = Relay::new(&sender, parcels, settings, now)?;
    check("confirmed at first", relay.run_until_idle(now)?.confirmed, 0)?;
    check("confirmed later", relay.run_until_idle(later)?.confirmed, 1)?;
    drop(relay);
    check("arrived", arrived, 2)?;
    check("handled", handled, 1)?;

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
