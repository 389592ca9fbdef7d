//! The experiment: orders and their events, with faults at the points where programs lose things,
//! or do them twice.
//!
//! A sender and a receiver have a store each. Each figure is counted from their tables, and each
//! fault is real: the operation ends where the fault strikes, and the program goes on with what the
//! stores hold.
//!
//! ```text
//! cargo run --example demo                      on redb, in temporary files
//! cargo run --example demo -- --store memory    the same in memory
//! cargo run --example demo -- --tables          with all tables after each step
//! ```

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use twobox::relay::{Published, Publisher, Relay, RelaySettings};
use twobox::{
    Body, CommitOrder, Committed, Consumer, Draft, Dump, EventId, EventState, Handled, Inbox,
    Message, Millis, Moment, OrderId, OrderingKey, Owner, ParametersDiffer, Reason, Receipt,
    Register, Request, RunError, Store, Summary, Table,
};
use twobox_memory::MemoryStore;
use twobox_redb::{RedbOptions, RedbStore};

type Failure = Box<dyn Error>;

const USAGE: &str = "usage: demo [--store redb|memory] [--tables]";
const LEASE: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    match run(std::env::args().skip(1), &mut io::stdout().lock()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

pub(crate) fn run(
    mut args: impl Iterator<Item = String>,
    out: &mut impl Write,
) -> Result<(), Failure> {
    let (mut store, mut tables) = ("redb".to_string(), false);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--store" => store = args.next().ok_or(USAGE)?,
            "--tables" => tables = true,
            unknown => return Err(format!("unknown argument {unknown:?}\n{USAGE}").into()),
        }
    }
    match store.as_str() {
        // To swap the store is to name another one.
        "redb" => experiment::<RedbStore>(Screen { out, tables }),
        "memory" => experiment::<MemoryStore>(Screen { out, tables }),
        unknown => Err(format!("unknown store {unknown:?}\n{USAGE}").into()),
    }
}

/// What differs from store to store: how it is opened. Everything else is the same.
trait DemoStore: Store + Sized {
    const BANNER: &str;

    fn create(file: &Path) -> Result<Self, Failure>;

    /// Closes the store, and opens what it left.
    fn reopen(self, file: &Path) -> Result<Self, Failure>;
}

impl DemoStore for RedbStore {
    const BANNER: &str = "Temporary redb files; no network.";

    fn create(file: &Path) -> Result<Self, Failure> {
        Ok(Self::create(file)?)
    }

    fn reopen(self, file: &Path) -> Result<Self, Failure> {
        self.close()?;
        // By default, opening ends the leases of a process that is gone. Here nobody is.
        Ok(RedbOptions::new().end_leases(false).open(file)?)
    }
}

impl DemoStore for MemoryStore {
    const BANNER: &str = "Temporary memory stores; no files, no network.";

    fn create(_: &Path) -> Result<Self, Failure> {
        Ok(Self::new())
    }

    fn reopen(self, _: &Path) -> Result<Self, Failure> {
        Ok(self.crash())
    }
}

/// Where something breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum Fault {
    #[error("fault: aborted before the commit")]
    BeforeCommit,
    #[error("fault: committed, but the reply was lost")]
    ReplyLost,
    #[error("fault: the receiver has committed, but the confirmation was lost")]
    ConfirmationLost,
}

impl Fault {
    /// Aborts here, if this is the planned fault.
    fn strike(self, planned: Option<Self>) -> Result<(), Self> {
        if planned == Some(self) { Err(self) } else { Ok(()) }
    }

    /// This fault, and nothing else, must have ended what was done.
    fn must_end<T>(self, result: Result<T, Failure>) -> Result<(), Failure> {
        match result {
            Err(failure) if failure.downcast_ref() == Some(&self) => Ok(()),
            Err(failure) => Err(failure),
            Ok(_) => Err(format!("it did not happen: {self}").into()),
        }
    }
}

/// The order of this request and its event in one commit, after its key was bound in a commit of
/// its own.
fn place<S: Store>(
    store: &S,
    request: &Request,
    now: Millis,
    planned: Option<Fault>,
) -> Result<Committed, Failure> {
    store.run(Register::new(request), now)?;

    let id = &request.key.id;
    let body = Body::text(request.fingerprint.summary())?;
    let event = Draft::new("order.created", body.clone())?
        .id(EventId::new(format!("order-created:{id}"))?)
        .ordering_key(OrderingKey::new(&request.key.scope)?);
    let order = CommitOrder::new(request, OrderId::new(format!("order:{id}"))?, body, [event])?;
    let committed = store.write(now, |tx| {
        let committed = tx.run(&order)?;
        Fault::BeforeCommit.strike(planned)?;
        Ok(committed)
    });
    let committed = committed.map_err(|error| match error {
        RunError::Refused(own) => own,
        RunError::Conflict(_) | RunError::Store(_) | RunError::Unknown(_) => Failure::from(error),
    })?;

    Fault::ReplyLost.strike(planned)?;
    Ok(committed)
}

/// Whether a request is refused because its key is bound to other parameters.
fn ask<S: Store>(store: &S, request: &Request, now: Millis) -> Result<&'static str, Failure> {
    match place(store, request, now, None) {
        Ok(_) => Ok("accepted"),
        Err(failure) if failure.is::<RunError<S::Error, ParametersDiffer>>() => Ok("rejected"),
        Err(failure) => Err(failure),
    }
}

/// Carries events to the receiver, in whose store the effect and the row of the inbox are one
/// commit, and keeps its receipts.
struct Courier<'a, S> {
    inbox: Inbox<&'a S>,
    receipts: Vec<(EventId, Receipt)>,
}

impl<S: Store> Publisher for Courier<'_, S> {
    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published> {
        let mut answers = Vec::new();
        for message in batch {
            let receipt = self.inbox.receive(message, now, |_tx, message| {
                Body::text(format!("parcel for {}", message.event.order)).map(Handled::Effect)
            });
            answers.push(match receipt {
                Ok(receipt) => {
                    self.receipts.push((message.event.id.clone(), receipt.clone()));
                    Published::from(receipt)
                }
                Err(failure) => Published::Unavailable(Reason::new(failure)),
            });
        }
        answers
    }
}

/// Delivers what is due. `receipt` is called when the receiver has committed, and the sender's
/// store does not know it yet.
fn deliver<S: Store>(
    sender: &S,
    receiver: &S,
    now: Millis,
    mut receipt: impl FnMut(EventId, Receipt) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let courier =
        Courier { inbox: Inbox::new(receiver, Consumer::new("parcels")?), receipts: Vec::new() };
    let settings = RelaySettings { lease: LEASE, ..RelaySettings::new(Owner::new("demo")?) };
    let mut relay = Relay::new(sender, courier, settings, Moment::steady(now))?;
    // With nothing to do between the steps, this would be `relay.run_until_idle(now)?`.
    while relay.step(Moment::steady(now))? {
        for (event, received) in relay.publisher_mut().receipts.drain(..) {
            receipt(event, received)?;
        }
    }
    Ok(())
}

/// How many rows there are, counted from the tables.
struct Figures {
    keys: usize,
    orders: usize,
    events: usize,
    outbox: usize,
    pending: usize,
    inbox: usize,
    effects: usize,
}

impl Figures {
    fn of<S: Store>(store: &S) -> Result<Self, Failure> {
        let dump = Dump::of(&mut store.view()?)?;
        // Every committed event is in the outbox; what it waits for follows from its lane.
        let states: Vec<EventState> = dump.events().into_values().map(|(state, _)| state).collect();
        let is_pending =
            |state: &&EventState| matches!(state, EventState::Pending | EventState::Leased);
        Ok(Self {
            keys: dump.count(Table::Requests),
            orders: dump.count(Table::Orders),
            events: dump.count(Table::Events),
            outbox: states.len(),
            pending: states.iter().filter(is_pending).count(),
            inbox: dump.count(Table::Inbox),
            effects: dump.count(Table::Effects),
        })
    }
}

/// Prints the steps, and after each one all tables, if they are wanted.
struct Screen<'a, W> {
    out: &'a mut W,
    tables: bool,
}

impl<W: Write> Screen<'_, W> {
    fn step<S: Store>(
        &mut self,
        sender: &S,
        receiver: &S,
        line: impl Display,
    ) -> Result<(), Failure> {
        writeln!(self.out, "{line}")?;
        if self.tables {
            writeln!(self.out, "\nsender\n------\n{}", Dump::of(&mut sender.view()?)?)?;
            writeln!(self.out, "receiver\n--------\n{}", Dump::of(&mut receiver.view()?)?)?;
        }
        Ok(())
    }
}

fn experiment<S: DemoStore>(mut screen: Screen<'_, impl Write>) -> Result<(), Failure> {
    let dir = tempfile::tempdir()?;
    let (sender_file, receiver_file) = (dir.path().join("sender"), dir.path().join("receiver"));
    let (sender, receiver) = (S::create(&sender_file)?, S::create(&receiver_file)?);
    writeln!(screen.out, "{}", S::BANNER)?;

    // The time is an input. Here it is the program's own, and stands still until a lease has to run
    // out.
    let now = Millis::new(1_000);
    let notebooks = |id, quantity| {
        // Nothing in it is a secret, so it may be seen in clear text.
        let parameters = Summary::All.of([("item", "notebook"), ("quantity", quantity)]);
        Request::new("customer-7", id, parameters)
    };
    let (first, same_key) = (notebooks("req-001", "2")?, notebooks("req-001", "3")?);
    let second = notebooks("req-002", "1")?;

    Fault::BeforeCommit.must_end(place(&sender, &first, now, Some(Fault::BeforeCommit)))?;
    let Figures { orders, outbox, keys, .. } = Figures::of(&sender)?;
    let line =
        format!("before commit failed: orders={orders} outbox={outbox} reserved_keys={keys}");
    screen.step(&sender, &receiver, line)?;

    let verdict = ask(&sender, &same_key, now)?;
    screen.step(
        &sender,
        &receiver,
        format!("same key, different parameters before order: {verdict}"),
    )?;

    let order = place(&sender, &first, now, None)?.placed.order;
    let Figures { events, .. } = Figures::of(&sender)?;
    screen.step(
        &sender,
        &receiver,
        format!("retry same request: order={order} events={events}"),
    )?;

    place(&sender, &first, now, None)?;
    let Figures { orders, outbox, .. } = Figures::of(&sender)?;
    screen.step(
        &sender,
        &receiver,
        format!("same request again: orders={orders} outbox={outbox}"),
    )?;

    let verdict = ask(&sender, &same_key, now)?;
    screen.step(
        &sender,
        &receiver,
        format!("same key, different parameters after order: {verdict}"),
    )?;

    Fault::ReplyLost.must_end(place(&sender, &second, now, Some(Fault::ReplyLost)))?;
    let Figures { orders, .. } = Figures::of(&sender)?;
    screen.step(&sender, &receiver, format!("client response lost: committed_orders={orders}"))?;

    place(&sender, &second, now, None)?;
    let Figures { orders, outbox, .. } = Figures::of(&sender)?;
    screen.step(
        &sender,
        &receiver,
        format!("retry after lost response: orders={orders} outbox={outbox}"),
    )?;

    let lost = |_, _| Err(Fault::ConfirmationLost.into());
    Fault::ConfirmationLost.must_end(deliver(&sender, &receiver, now, lost))?;
    let (effects, pending) = (Figures::of(&receiver)?.effects, Figures::of(&sender)?.pending);
    let line = format!("delivery acknowledgement lost: local_effects={effects} pending={pending}");
    screen.step(&sender, &receiver, line)?;

    let (sender, receiver) = (sender.reopen(&sender_file)?, receiver.reopen(&receiver_file)?);
    let (effects, pending) = (Figures::of(&receiver)?.effects, Figures::of(&sender)?.pending);
    screen.step(
        &sender,
        &receiver,
        format!("after reconnect: pending={pending} local_effects={effects}"),
    )?;

    // Nobody settled the lease of the delivery that broke off, so its events come again once it has
    // run out.
    deliver(&sender, &receiver, now + LEASE, |event, receipt| {
        let effect = match receipt {
            Receipt::Applied => "applied",
            Receipt::Duplicate => "skipped",
            Receipt::Deferred(_) | Receipt::WaitsFor(_) | Receipt::Failed(_) => "comes again",
            Receipt::Poisoned | Receipt::Refused(_) => "set aside",
        };
        screen.step(&sender, &receiver, format!("recovery delivery: {event} local_effect={effect}"))
    })?;

    let Figures { orders, pending, .. } = Figures::of(&sender)?;
    let Figures { inbox, effects, .. } = Figures::of(&receiver)?;
    let line = format!(
        "finished: orders={orders} pending={pending} inbox={inbox} local_effects={effects}"
    );
    screen.step(&sender, &receiver, line)?;

    drop((sender, receiver));
    let path = dir.path().to_path_buf();
    dir.close()?;
    writeln!(
        screen.out,
        "temporary files cleaned up: {}",
        if path.exists() { "False" } else { "True" }
    )?;
    Ok(())
}
