//! The life of an order, step by step, on whatever stores: a request is registered, its order
//! committed with an event, and a relay brings the event to an inbox in another store. The first
//! confirmation is lost, so the event comes a second time, and is not handled again (P1, P2, P5).
//! At last everything is past its retention, and purged (P7).
//!
//! A program calls the steps one after the other, and may close and open its stores in between.

use alloc::format;
use alloc::string::{String, ToString};
use core::fmt::{Debug, Display, Formatter, Write};
use core::num::NonZeroU16;
use core::time::Duration;

use twobox::relay::{Published, Relay, RelaySettings};
use twobox::{
    Body, Checked, CommitOrder, Consumer, Draft, Dump, EventId, EventState, Fault, Fingerprint,
    Handled, InProcess, Inbox, Invalid, Load, Millis, Moment, OrderId, Owner, Reader, Reason,
    Register, Registered, Request, Retention, Store, Table, purge_all,
};

use crate::bare;

const NOW: Millis = Millis::new(1_000);

/// Says how a cycle ended and what it needed, and gives the exit code: an error if it went wrong,
/// or took more heap than `limit`.
pub(crate) fn report(program: &str, ended: Result<(), Wrong>, limit: usize) -> i32 {
    let peak = bare::peak();
    let within = if peak <= limit {
        Ok(())
    } else {
        Err(Wrong(format!("it took {peak} bytes of heap, {limit} are allowed")))
    };
    match ended.and(within) {
        Ok(()) => {
            let _ = writeln!(bare::Console, "{program}: peak heap {peak} bytes, limit {limit}");
            0
        }
        Err(wrong) => {
            let _ = writeln!(bare::Console, "{program} failed: {wrong}");
            1
        }
    }
}

/// What went wrong, for the console.
pub(crate) struct Wrong(String);

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
    if found == right {
        Ok(())
    } else {
        Err(Wrong(format!("{what}: {found:?}, it must be {right:?}")))
    }
}

fn request() -> Result<Request, Invalid> {
    Request::new("till-3", "req-001", Fingerprint::of([("item", "notebook"), ("quantity", "2")]))
}

pub(crate) fn register(sender: &impl Store) -> Result<(), Wrong> {
    check("register", sender.run(Register::new(&request()?), NOW)?, Registered::New)
}

pub(crate) fn commit(sender: &impl Store) -> Result<(), Wrong> {
    let request = request()?;
    let body = Body::json(r#"{"item":"notebook","quantity":2}"#)?;
    let events = [Draft::new("order.created", body.clone())?];
    let order = CommitOrder::new(&request, OrderId::new("order:req-001")?, body, events)?;
    check("commit", sender.run(&order, NOW)?.repeated, false)?;
    check("commit again", sender.run(&order, NOW)?.repeated, true)
}

/// Claims, publishes, receives and settles, until the event is confirmed.
pub(crate) fn deliver(sender: &impl Store, receiver: &impl Store) -> Result<(), Wrong> {
    let (mut handled, mut arrived) = (0, 0);
    let settings = RelaySettings::new(Owner::new("till-3")?);
    let later = NOW + settings.policy.backoff_base;
    let inbox = Inbox::new(receiver, Consumer::new("parcels")?);
    let parcels = InProcess::new(inbox, |_, _| {
        handled += 1;
        Body::text("2 notebooks packed").map(Handled::Effect)
    });
    let parcels = parcels.with_faults(|_| {
        arrived += 1;
        (arrived == 1)
            .then(|| Fault::After(Published::Failed(Reason::new("the confirmation was lost"))))
    });
    let mut relay = Relay::new(sender, parcels, settings, Moment::steady(NOW))?;
    check("confirmed at first", relay.run_until_idle(Moment::steady(NOW))?.confirmed, 0)?;
    check("confirmed later", relay.run_until_idle(Moment::steady(later))?.confirmed, 1)?;
    drop(relay);
    check("arrived", arrived, 2)?;
    check("handled", handled, 1)
}

/// Looks at what is in the stores after the delivery.
pub(crate) fn look(sender: &impl Reader, receiver: &impl Reader) -> Result<(), Wrong> {
    let (sent, received) = (Dump::of(&mut sender.view()?)?, Dump::of(&mut receiver.view()?)?);
    check("orders", sent.count(Table::Orders), 1)?;
    check("inbox", received.count(Table::Inbox), 1)?;
    check("effects", received.count(Table::Effects), 1)?;
    let event = EventId::new("order:req-001/1")?;
    check("the event", sender.view()?.event_state(&event)?, Some(EventState::Confirmed))
}

/// Removes what is past its retention: the order with its request, the event with its lane, and the
/// inbox row with its effect.
pub(crate) fn purge(sender: &impl Store, receiver: &impl Store) -> Result<(), Wrong> {
    let kept = Retention::default();
    let kept = Retention { orders: Some(kept.requests), ..kept }.checked(&Checked::default())?;
    let (after, page) = (NOW + kept.requests + Duration::from_secs(60), NonZeroU16::MIN);
    let purged = purge_all(sender, &kept, page, after)? + purge_all(receiver, &kept, page, after)?;
    check("purged", purged, 5)?;
    check("rows that are left", Dump::of(&mut sender.view()?)?.records().len(), 0)
}
