//! A shop that is killed: a sender, a relay and a receiver on real files, and what must be in the
//! files then.
//!
//! It runs in a process of its own (`src/bin/victim.rs`), and tells on its standard output what it
//! was told is committed, one line each. Whoever kills it compares those lines with the files:
//! nothing that was told is missing, nothing is there twice, the order holds (P2 to P5).

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;

use redb::{
    ConcurrencyMode, Database, ReadTransaction, ReadableTable, TableDefinition, TableError,
};
use twobox::relay::{Published, Publisher, Relay, RelaySettings};
use twobox::{
    Body, CommitOrder, Consumer, Draft, EventId, Fingerprint, Handled, Inbox, LaneKey, Load,
    Millis, Moment, OrderId, OrderingKey, Owner, Reader, Record, Request, Store, Tables,
    Transaction, Writing,
};
use twobox::{Dump, EventState, InProcess, Message};
use twobox_redb::{RedbError, RedbOptions, RedbReader, RedbStore, RedbTransaction};

use crate::tables;

/// Counts orders, in the commits that place them.
const PLACED: TableDefinition<'static, &str, u64> = TableDefinition::new("placed");
/// Counts how often an event was applied, in the commits that do so.
const APPLIED: TableDefinition<'static, &str, u64> = TableDefinition::new("applied");
/// What was applied, in its order.
const LOG: TableDefinition<'static, u64, &str> = TableDefinition::new("log");

/// How many events an order has.
pub const EVENTS: usize = 3;

type Failed = Box<dyn std::error::Error + Send + Sync>;

/// How the files are opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// By one process, each file alone.
    Alone,
    /// By one process that writes, and others that read.
    Shared,
    /// By several processes that write: redb's `MultiWriter`, which the adapter does not offer,
    /// through a database of the user's.
    Many,
}

/// Opens a file, or creates it.
///
/// # Errors
///
/// The store's.
pub fn open(path: &Path, mode: Mode) -> Result<RedbStore, Failed> {
    Ok(match mode {
        Mode::Alone => RedbOptions::new().open_or_create(path)?,
        Mode::Shared => RedbOptions::new().shared(true).open_or_create(path)?,
        Mode::Many => {
            let database = Database::builder()
                .set_concurrency_mode(ConcurrencyMode::MultiWriter)
                .open(path)?;
            RedbStore::with_database(database)?
        }
    })
}

/// A clock of the process's own, that begins a day after that of the last round.
pub struct Clock(AtomicU64);

impl Clock {
    /// The clock of a round.
    #[must_use]
    pub const fn new(round: u64) -> Self {
        Self(AtomicU64::new(1_790_000_000_000 + round * 86_400_000))
    }

    fn now(&self) -> Millis {
        Millis::new(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

/// Tells what is committed. A pipe that is closed has nobody who wants to know.
fn tell(line: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Places an order, and counts it in a table of our own.
///
/// # Errors
///
/// The store's.
pub fn place(store: &RedbStore, id: &str, lane: usize, now: Millis) -> Result<bool, Failed> {
    let request = Request::new("shop", id, Fingerprint::of([("order", id)]))?;
    let drafts = (0..EVENTS).map(|number| {
        let draft = Draft::new("order.changed", Body::text(format!("{id} {number}"))?)?;
        Ok(draft.ordering_key(OrderingKey::new(format!("lane-{}", (lane + number / 2) % 5))?))
    });
    let drafts = drafts.collect::<Result<Vec<_>, twobox::Invalid>>()?;
    let order = CommitOrder::new(&request, OrderId::new(id)?, Body::text(id)?, drafts)?;
    let committed = store.write(now, |tx| {
        let committed = tx.run(&order)?;
        if !committed.repeated {
            let mut placed = tx.redb().open_table(PLACED)?;
            let count = placed.get("orders")?.map_or(0, |count| count.value());
            placed.insert("orders", count + 1)?;
        }
        Ok::<_, Failed>(committed)
    });
    Ok(committed.map_err(|error| error.to_string())?.repeated)
}

fn apply(tx: &RedbTransaction, message: &Message) -> Result<Handled, redb::Error> {
    let id = message.event.id.as_str();
    let mut applied = tx.redb().open_table(APPLIED)?;
    let count = applied.get(id)?.map_or(0, |count| count.value());
    applied.insert(id, count + 1)?;
    let mut log = tx.redb().open_table(LOG)?;
    let next = log.last()?.map_or(0, |(number, _)| number.value() + 1);
    log.insert(next, id)?;
    Ok(Handled::Done)
}

/// Places orders of a round from `first` to before `end`, and says so each time.
///
/// # Errors
///
/// The store's.
pub fn send(
    store: &RedbStore,
    name: &str,
    orders: std::ops::Range<usize>,
    clock: &Clock,
    mut sent: impl FnMut(),
) -> Result<(), Failed> {
    for number in orders {
        let id = format!("{name}-{number}");
        place(store, &id, number, clock.now())?;
        tell(&format!("placed {id}"))?;
        sent();
    }
    Ok(())
}

/// Delivers in the process, and says what was applied.
struct Telling<P>(P);

impl<P: Publisher> Publisher for Telling<P> {
    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published> {
        let answers = self.0.publish(batch, now);
        for (message, answer) in batch.iter().zip(&answers) {
            if *answer == Published::Confirmed {
                // Whoever does not listen will not miss it.
                let _ = tell(&format!("applied {}", message.event.id));
            }
        }
        answers
    }
}

/// Relays as long as `wait` says so, and then until everything is delivered.
///
/// # Errors
///
/// The store's, or that it comes to no end.
pub fn relay(
    sender: &RedbStore,
    receiver: &RedbStore,
    clock: &Clock,
    mut wait: impl FnMut() -> bool,
) -> Result<(), Failed> {
    let inbox = Inbox::new(receiver, Consumer::new("points")?);
    let publisher =
        InProcess::new(inbox, |tx: &mut Writing<'_, RedbTransaction>, message: &Message| {
            apply(tx, message)
        });
    let mut settings = RelaySettings::new(Owner::new(format!("relay-{}", process::id()))?);
    (settings.window, settings.run) = (8, 4);
    let mut relay = Relay::new(sender, Telling(publisher), settings, Moment::steady(clock.now()))?;
    let mut run =
        || relay.run_until_idle(Moment::steady(clock.now())).map_err(|error| error.to_string());
    while wait() {
        run()?;
    }
    for _round in 0..1_000 {
        run()?;
        if sender.view()?.stats(clock.now())?.all.pending == 0 {
            return Ok(());
        }
        // Something waits for a lease of one that is gone, or for a pause.
        clock.0.fetch_add(10_000, Ordering::Relaxed);
    }
    Err("the relay came to no end".into())
}

/// Opens a store and a view, and forks. The child tries all that it could do with them, and says
/// what became of that; then the parent goes on.
///
/// # Errors
///
/// The store's in the parent, or that there is no child.
#[cfg(unix)]
pub fn forks(folder: &Path, mode: Mode) -> Result<(), Failed> {
    let path = folder.join("sender.redb");
    let store = open(&path, mode)?;
    place(&store, "before", 0, Millis::new(0))?;
    let reader = if mode == Mode::Shared { Some(RedbReader::open(&path)?) } else { None };
    let open = (store.begin()?, store.view()?);
    let parent = process::id();
    match fork::fork()? {
        fork::Fork::Child => {
            let refused = |what, error: Option<RedbError>| match error {
                Some(RedbError::OtherProcess { opened_by }) => {
                    tell(&format!("{what} is refused, {}", opened_by == parent))
                }
                other => tell(&format!("{what}: {other:?}")),
            };
            let placed = place(&store, "in the child", 1, Millis::new(0));
            tell(&format!("place: {}", placed.is_err()))?;
            refused("begin", store.begin().err())?;
            refused("view", store.view().err())?;
            refused("database", store.database().err())?;
            if let Some(reader) = reader {
                refused("reader", reader.view().err())?;
            }
            // It was opened by the parent, and so is its end.
            let (mut tx, view) = open;
            let request = Request::of("shop", "in a transaction", [("a", "b")])?;
            let ran = tx.run(twobox::Register::new(&request), Millis::new(0));
            let committed = ran.is_ok() && tx.commit().is_ok();
            tell(&format!("commit: {committed}"))?;
            drop(view);
            refused("close", store.close().err())?;
            tell("the child ends")?;
            process::exit(0);
        }
        fork::Fork::Parent(child) => {
            fork::waitpid(child)?;
            drop(open);
            let again = RedbStore::open(&path).map(drop);
            tell(&format!("still locked: {}", matches!(again, Err(RedbError::AlreadyOpen))))?;
            place(&store, "after", 2, Millis::new(0))?;
            store.close()?;
            tell("the parent ends")?;
            Ok(())
        }
    }
}

/// Says that it publishes, and does so for ever.
struct Hanging;

impl Publisher for Hanging {
    fn publish(&mut self, _batch: &[Message], _now: Millis) -> Vec<Published> {
        // Whoever does not listen kills it later.
        let _ = tell("publishing");
        loop {
            thread::park();
        }
    }
}

/// Places orders, leases all of their lanes, and comes to no end.
///
/// # Errors
///
/// The store's.
pub fn hold(
    folder: &Path,
    mode: Mode,
    round: u64,
    orders: std::ops::Range<usize>,
) -> Result<(), Failed> {
    let store = open(&folder.join("sender.redb"), mode)?;
    let clock = Clock::new(round);
    send(&store, &format!("r{round}"), orders, &clock, || {})?;
    let settings = RelaySettings::new(Owner::new("the one that is killed")?);
    let now = Moment::steady(clock.now());
    Relay::new(&store, Hanging, settings, now)?
        .run_until_idle(now)
        .map(drop)
        .map_err(|error| error.to_string().into())
}

/// Sends and relays at the same time, in two threads.
///
/// # Errors
///
/// The store's.
pub fn run(
    folder: &Path,
    mode: Mode,
    round: u64,
    orders: std::ops::Range<usize>,
) -> Result<(), Failed> {
    let (sender, receiver) =
        (open(&folder.join("sender.redb"), mode)?, open(&folder.join("receiver.redb"), mode)?);
    tell("opened")?;
    let clock = Clock::new(round);
    let (bell, rung) = mpsc::channel();
    thread::scope(|scope| {
        let rings = move || rung.recv().is_ok();
        let relaying = scope.spawn(|| relay(&sender, &receiver, &clock, rings));
        let sent = send(&sender, &format!("r{round}"), orders, &clock, || {
            // A relay that has failed says so below.
            let _ = bell.send(());
        });
        drop(bell);
        sent.and(relaying.join().unwrap_or_else(|_| Err("the relay panicked".into())))
    })?;
    tell("finished")?;
    Ok(())
}

/// Waits until the standard input is closed, with a thread of its own, and says whether it still is
/// open.
pub fn until_input_ends() -> impl FnMut() -> bool {
    let (ended, end) = mpsc::channel::<()>();
    thread::spawn(move || {
        let _read = io::stdin().read_to_end(&mut Vec::new());
        drop(ended);
    });
    move || !matches!(end.try_recv(), Err(mpsc::TryRecvError::Disconnected))
}

/// What is in the files.
#[derive(Debug, Default)]
pub struct Found {
    /// The orders.
    pub orders: BTreeSet<String>,
    /// How many events are pending.
    pub pending: usize,
    /// Those that were applied.
    pub applied: BTreeSet<String>,
}

impl Found {
    /// Reads both files, and checks what must hold between them.
    ///
    /// # Errors
    ///
    /// What does not hold, or why they cannot be read.
    pub fn of(sender: &RedbStore, receiver: &RedbStore) -> Result<Self, Failed> {
        // The sender first: what it has confirmed by then, the receiver has applied.
        let mut from = sender.view()?;
        let to = receiver.view()?;
        Self::in_views(&mut from, to)
    }

    fn in_views(
        from: &mut twobox_redb::RedbView,
        mut to: twobox_redb::RedbView,
    ) -> Result<Self, Failed> {
        tables::check(&mut to)?;
        let (found, confirmed, places) = Self::sent(from)?;
        let mut found = found;
        // P5: once each.
        let applied = read(to.redb(), APPLIED, |id, count| (id.to_string(), count))?;
        if let Some((id, count)) = applied.iter().find(|(_, count)| *count != 1) {
            return Err(format!("P5: {id} was applied {count} times").into());
        }
        let applied: BTreeSet<String> = applied.into_iter().map(|(id, _)| id).collect();
        // P3: what is confirmed was applied.
        if let Some(id) = confirmed.iter().find(|id| !applied.contains(id.as_str())) {
            return Err(format!("P3: {id} is confirmed and was never applied").into());
        }
        // P4: in the order of the lane.
        let log = read(to.redb(), LOG, |_, id| EventId::new(id))?;
        let mut last: BTreeMap<&LaneKey, u64> = BTreeMap::new();
        for id in log {
            let id = id?;
            // What the sender has not in this view was committed after it.
            let Some((lane, sequence)) = places.get(&id) else { continue };
            let before = last.insert(lane, *sequence).unwrap_or(0);
            if *sequence != before + 1 {
                return Err(format!("P4: in {lane}, {sequence} was applied after {before}").into());
            }
        }
        found.applied = applied;
        Ok(found)
    }

    /// What the sender's side holds, checked; which events are confirmed; and where each event
    /// stands.
    ///
    /// # Errors
    ///
    /// What does not hold, or why it cannot be read.
    #[expect(clippy::type_complexity, reason = "three things of one walk")]
    pub fn sent(
        from: &mut twobox_redb::RedbView,
    ) -> Result<(Self, Vec<EventId>, BTreeMap<EventId, (LaneKey, u64)>), Failed> {
        let rows = tables::check(from)?;
        let dump = Dump::of(from)?;
        let (mut found, mut confirmed, mut places) = (Self::default(), Vec::new(), BTreeMap::new());
        for stored in rows {
            match stored.record {
                Record::Order(id, _) => {
                    found.orders.insert(id.as_str().to_string());
                }
                Record::Request(..)
                | Record::Event(_)
                | Record::Outbox(..)
                | Record::Lane(..)
                | Record::Inbox(..)
                | Record::Effect(..)
                | Record::Position(..)
                | Record::Call(..) => {}
            }
        }
        for (id, (state, row)) in dump.events() {
            match state {
                EventState::Pending | EventState::Leased => found.pending += 1,
                EventState::Confirmed => confirmed.push(id.clone()),
                EventState::Dead(_) | EventState::Discarded(_) | EventState::Cancelled(_) => {}
            }
            places.insert(id.clone(), (row.lane, row.sequence));
        }
        // P2: all events of an order, and our own row in the same commit.
        if places.len() != found.orders.len() * EVENTS {
            return Err(
                format!("P2: {} orders have {} events", found.orders.len(), places.len()).into()
            );
        }
        let counted = read(from.redb(), PLACED, |_, count| count)?;
        if counted.first().copied().unwrap_or(0) != found.orders.len() as u64 {
            return Err(format!(
                "our own row counts {counted:?} orders, there are {}",
                found.orders.len()
            )
            .into());
        }
        Ok((found, confirmed, places))
    }
}

fn read<K: redb::Key, V: redb::Value, T>(
    tx: &ReadTransaction,
    table: TableDefinition<'_, K, V>,
    row: impl Fn(K::SelfType<'_>, V::SelfType<'_>) -> T,
) -> Result<Vec<T>, Failed> {
    match tx.open_table(table) {
        Ok(table) => {
            let mut rows = Vec::new();
            for found in table.iter()? {
                let (key, value) = found?;
                rows.push(row(key.value(), value.value()));
            }
            Ok(rows)
        }
        Err(TableError::TableDoesNotExist(_)) => Ok(Vec::new()),
        Err(error) => Err(error.into()),
    }
}

/// How long a test waits for something that must come, before it says that it does not.
pub const PATIENCE: Duration = Duration::from_secs(120);
