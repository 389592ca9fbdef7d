//! Every transition, in a store with a thousand orders.

use std::num::NonZeroU16;
use std::time::Duration;

use twobox::call::{CallEnd, CallKey, Intend, Resolve, Start, Started, WhenUnknown};
use twobox::{
    Body, Cancel, Checked, Claim, Claimed, CommitOrder, Consumer, CountFailure, Discard, Draft,
    Dump, Ending, Event, EventId, FailureCounted, Fingerprint, LanePlace, LeaseRef, Load, Millis,
    OrderId, OrderingKey, Owner, Purge, Reader, Reason, Receive, Received, Redrive, Register,
    Registered, Renew, Request, Retention, Retry, Settle, Settlement, SkipTo, Store, Table,
    Transition,
};
use twobox_memory::{MemoryStore, State};

use crate::Failed;
use crate::counted::count;

/// How many orders there are, each with one event in a lane of its own, received by one consumer.
const ORDERS: usize = 1_000;
const NOW: Millis = Millis::new(1_790_000_000_000);
const LATER: Millis = Millis::new(1_790_000_100_000);
const LEASE: Duration = Duration::from_secs(30);
const BODY: &str = r#"{"item":"notebook","quantity":2,"customer":"customer-7","note":"a body of about a hundred bytes"}"#;

/// What a transition came to.
struct After<O> {
    outcome: O,
    state: State,
}

/// Counts a transition in this state: deciding alone, and the whole run in a transaction of its
/// own. It must come out as `right` says, so that it is what its name says.
fn transition<T: Transition>(
    name: &str,
    state: &State,
    transition: &T,
    right: impl FnOnce(&T::Outcome) -> bool,
) -> Result<After<T::Outcome>, Failed> {
    let rows = state.clone().load(&transition.query(LATER))?;
    count(&format!("{name}/decide"), || transition.decide(LATER, &rows))??;
    drop(rows);
    let store = MemoryStore::from_state(state.clone());
    let outcome = count(&format!("{name}/run"), || store.run(transition, LATER))??;
    if !right(&outcome) {
        return Err(format!("{name} came out as something else").into());
    }
    Ok(After { outcome, state: store.state() })
}

fn request(number: usize) -> Result<Request, Failed> {
    let fingerprint = Fingerprint::of([("item", "notebook"), ("quantity", "2")]);
    Ok(Request::new("customer-7", format!("request-{number:05}"), fingerprint)?)
}

fn order(request: &Request, number: usize, events: usize) -> Result<CommitOrder<'_>, Failed> {
    let draft = || Draft::new("order.created", Body::json(BODY)?);
    let events = (0..events).map(|_| draft()).collect::<Result<Vec<_>, _>>()?;
    Ok(CommitOrder::new(
        request,
        OrderId::new(format!("order-{number:05}"))?,
        Body::json(BODY)?,
        events,
    )?)
}

fn event(state: &State, number: usize) -> Result<Event, Failed> {
    let id = EventId::new(format!("order-{number:05}/1"))?;
    let row = state.clone().event(&id)?.ok_or("there is no such event")?;
    Ok(row.event)
}

pub(crate) fn run() -> Result<(), Failed> {
    // What is done once in a program is done.
    let _ = Fingerprint::of([("once", "")]);
    fingerprints()?;
    let state = orders()?;
    let delivered = sender(&state)?;
    operator(&state, &delivered)?;
    receiver(&state)?;
    calls(&state)?;
    purge(&delivered)?;
    render()
}

fn fingerprints() -> Result<(), Failed> {
    count("fingerprint-of-2-fields", || {
        Fingerprint::of([("item", "notebook"), ("quantity", "2")])
    })?;
    Ok(())
}

fn orders() -> Result<State, Failed> {
    let store = MemoryStore::new();
    let consumer = Consumer::new("parcels")?;
    for number in 0..ORDERS {
        store.run(&order(&request(number)?, number, 1)?, NOW)?;
        let _ = store.run(Receive::new(consumer.clone(), &event(&store.state(), number)?), NOW)?;
    }
    Ok(store.state())
}

/// What a sender does; the state in which events are confirmed and dead.
fn sender(state: &State) -> Result<State, Failed> {
    let new = request(ORDERS)?;
    let registered =
        transition("register-new", state, &Register::new(&new), |found| *found == Registered::New)?
            .state;
    transition("register-again", &registered, &Register::new(&new), |found| {
        *found == Registered::Open
    })?;
    let one = order(&new, ORDERS, 1)?;
    let committed = transition("commit-1-event", &registered, &one, |done| !done.repeated)?.state;
    transition("commit-again", &committed, &one, |done| done.repeated)?;
    let four = order(&new, ORDERS, 4)?;
    transition("commit-4-events", &registered, &four, |done| done.placed.events.len() == 4)?;

    let (policy, owner) = (Checked::default(), Owner::new("relay-1")?);
    let claim = |limit| Claim::new(&policy, owner.clone(), LEASE, limit);
    let claimed = transition("claim-1", state, &claim(1)?, |claimed| claimed.leased.len() == 1)?;
    let settle = Settle::new(&policy, confirmed(&claimed.outcome));
    transition("settle-1", &claimed.state, &settle, |settled| settled.confirmed == 1)?;

    let claimed = transition("claim-64", state, &claim(64)?, |claimed| claimed.leased.len() == 64)?;
    let renew = Renew::new(leases(&claimed.outcome), LEASE * 2);
    transition("renew-64", &claimed.state, &renew, |renewed| renewed.leases.len() == 64)?;
    let failed = Settle::new(&policy, ended(&claimed.outcome, Ending::Failed).into_iter().take(1));
    transition("settle-1-failed", &claimed.state, &failed, |settled| settled.retried == 1)?;
    let settle = Settle::new(&policy, confirmed(&claimed.outcome));
    transition("settle-64", &claimed.state, &settle, |settled| settled.confirmed == 64)?;

    // Once more, so that they have been confirmed for a while.
    let store = MemoryStore::from_state(claimed.state);
    let _ = store.run(&settle, NOW)?;
    // The next ones are rejected, so that there is something dead.
    let claimed = store.run(&claim(64)?, LATER)?;
    let _ = store.run(Settle::new(&policy, ended(&claimed, Ending::Rejected)), LATER)?;
    Ok(store.state())
}

fn leases(claimed: &Claimed) -> Vec<LeaseRef> {
    claimed.leased.iter().map(|leased| leased.lease.clone()).collect()
}

fn confirmed(claimed: &Claimed) -> Vec<Settlement> {
    claimed.leased.iter().map(|leased| leased.settle(leased.events.len(), None)).collect()
}

fn ended(claimed: &Claimed, ending: fn(Reason) -> Ending) -> Vec<Settlement> {
    let ending = || Some(ending(Reason::new("the broker has no such queue")));
    claimed.leased.iter().map(|leased| leased.settle(0, ending())).collect()
}

fn operator(state: &State, delivered: &State) -> Result<(), Failed> {
    let reason = || Reason::new("the customer has called");
    let pending = || EventId::new("order-00500/1");
    let dead = |count: usize| -> Result<Vec<EventId>, Failed> {
        let dead = delivered.clone().dead_letters(None, count)?;
        Ok(dead.into_iter().map(|letter| letter.event).collect())
    };
    let policy = Checked::default();
    let window = Retention::default().checked(&policy)?.redrive_window();
    transition("cancel-1", state, &Cancel::new([pending()?], reason())?, |operated| {
        operated.done.len() == 1
    })?;
    transition("redrive-1", delivered, &Redrive::new(dead(1)?, window)?, |operated| {
        operated.done.len() == 1
    })?;
    transition("redrive-64", delivered, &Redrive::new(dead(64)?, window)?, |operated| {
        operated.done.len() == 64
    })?;
    transition("discard-1", delivered, &Discard::new(dead(1)?, reason())?, |operated| {
        operated.done.len() == 1
    })?;
    Ok(())
}

fn receiver(state: &State) -> Result<(), Failed> {
    let event = event(state, 500)?;
    let (parcels, mails) = (Consumer::new("parcels")?, Consumer::new("mails")?);
    let body = Body::text("2 notebooks packed")?;
    let place = |sequence, after| LanePlace { begun: NOW, sequence, after };
    let key = || OrderingKey::new("customer-7");

    count("digest-of-content", || event.content_digest())?;
    let new = Receive::new(mails.clone(), &event);
    let applied = |received: &Received| *received == Received::Applied;
    transition("receive-new", state, &new, applied)?;
    transition("receive-with-effect", state, &new.clone().effect(body), applied)?;
    transition("receive-duplicate", state, &Receive::new(parcels, &event), |received| {
        *received == Received::Duplicate
    })?;
    let first =
        transition("receive-in-order", state, &new.clone().in_order(key()?, place(1, 0)), applied)?
            .state;
    let third = Receive::new(mails.clone(), &event).in_order(key()?, place(3, 2));
    transition("receive-that-waits", &first, &third, |received| {
        *received == Received::WaitsFor(2)
    })?;
    transition("skip-to", &first, &SkipTo::new(mails.clone(), key()?, place(9, 8)), |moved| {
        *moved
    })?;

    let failed = |limit| {
        CountFailure::new(mails.clone(), &event, Reason::new("the database is locked"), limit)
    };
    transition("count-failure", state, &failed(16), |counted| {
        *counted == FailureCounted::ComesAgain
    })?;
    let poisoned = transition("count-last-failure", state, &failed(1), |counted| {
        *counted == FailureCounted::Poisoned
    })?
    .state;
    transition("retry", &poisoned, &Retry::new(mails.clone(), event.id.clone()), |retried| {
        *retried
    })?;
    Ok(())
}

fn calls(state: &State) -> Result<(), Failed> {
    let call =
        CallKey { consumer: Consumer::new("payments")?, event: EventId::new("order-00500/1")? };
    let intended = transition("intend", state, &Intend::new(call.clone()), |new| *new)?.state;
    let start = Start::new(call.clone(), LEASE, WhenUnknown::Ask);
    let started =
        transition("start", &intended, &start, |started| *started == Started::Call(1))?.state;
    transition("resolve", &started, &Resolve::new(call, CallEnd::Done(None)), |()| true)?;
    Ok(())
}

fn purge(delivered: &State) -> Result<(), Failed> {
    let page = NonZeroU16::new(64).ok_or("64 is not 0")?;
    // The store looks at 16 rows for each that may go.
    let looks = NonZeroU16::new(64 / 16).ok_or("4 is not 0")?;
    let policy = Checked::default();
    let soon =
        Retention { events: Retention::SHORTEST, ..Retention::default() }.checked(&policy)?;
    let default = Retention::default().checked(&policy)?;
    transition("purge-64-of-64", delivered, &Purge::new(&soon, Table::Events, page), |purged| {
        purged.removed == 64
    })?;
    transition(
        "purge-0-of-64",
        delivered,
        &Purge::new(&default, Table::Events, looks),
        |purged| purged.removed == 0,
    )?;
    Ok(())
}

/// An order with its event as text.
fn render() -> Result<(), Failed> {
    let store = MemoryStore::new();
    store.run(&order(&request(0)?, 0, 1)?, NOW)?;
    count("dump-of-1-order", || Dump::of(&mut store.view()?).map(|dump| dump.to_string()))??;
    Ok(())
}
