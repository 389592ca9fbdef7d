//! What the tests share: the stores, short ways to make orders and to look at rows, a publisher by
//! script, a store that fails.

use core::time::Duration;
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};

use thiserror::Error;
use twobox::relay::{Published, Publisher, Relay, RelayMachine, RelaySettings};
use twobox::{
    Applied, Batch, Body, Checked, CommitOrder, Consumer, DeliveryPolicy, Draft, Dump, Event,
    EventId, EventState, Fingerprint, Handled, InboxRow, InboxState, Invalid, LaneKey, LanePlace,
    LaneRow, Load, Message, Millis, Moment, OrderId, OrderingKey, OutboxRow, Query, Reader, Record,
    RedriveWindow, Request, Retention, Rows, Seen, Store, StoreError, Tables, Transaction,
    WhenDead, Writing,
};
use twobox_memory::MemoryStore;
use twobox_redb::RedbStore;

/// A store that the tests run on. It lives as long as the tests, so that handlers need not say for
/// how long.
pub(crate) trait Backend: Store + 'static {
    const NAME: &'static str;
    fn fresh() -> &'static Self;
}

impl Backend for MemoryStore {
    const NAME: &'static str = "memory";
    fn fresh() -> &'static Self {
        Box::leak(Box::new(Self::new()))
    }
}

impl Backend for RedbStore {
    const NAME: &'static str = "redb";
    fn fresh() -> &'static Self {
        Box::leak(Box::new(Self::create_on(redb::backends::InMemoryBackend::new()).unwrap()))
    }
}

/// Runs a test on a fresh store of each kind; what is printed shows on which one it failed.
macro_rules! on_each_store {
    (|$store:ident: $kind:ident| $body:block) => {{
        fn check<$kind: crate::support::Backend>($store: &'static $kind) {
            println!("on {}", $kind::NAME);
            $body
        }
        check(<twobox_memory::MemoryStore as crate::support::Backend>::fresh());
        check(<twobox_redb::RedbStore as crate::support::Backend>::fresh());
    }};
}

/// The lane of an ordering key at the default destination.
pub(crate) fn lane_key(ordering_key: &str) -> LaneKey {
    name::<OrderingKey>(ordering_key).into()
}

/// A name of whatever type is wanted.
pub(crate) fn name<T: for<'a> TryFrom<&'a str, Error = Invalid>>(text: &str) -> T {
    T::try_from(text).unwrap()
}

/// So many milliseconds after the time at which the tests begin.
pub(crate) fn at(millis: u64) -> Millis {
    Millis::new(1_000_000_000 + millis)
}

pub(crate) fn body(text: &str) -> Body {
    Body::text(text).unwrap()
}

pub(crate) fn draft(event_type: &str, key: &str) -> Draft {
    Draft::new(event_type, body(event_type)).unwrap().ordering_key(name(key))
}

pub(crate) fn request(id: &str) -> Request {
    Request::new("scope", id, Fingerprint::of([("id", id)])).unwrap()
}

/// Commits an order with these events; their ids are `<id>/1` and so on.
pub(crate) fn place<S: Store>(
    store: &S,
    id: &str,
    events: impl IntoIterator<Item = Draft>,
    now: Millis,
) -> Vec<EventId> {
    let request = request(id);
    let order = CommitOrder::new(&request, name::<OrderId>(id), body("an order"), events).unwrap();
    store.run(order, now).unwrap().placed.events
}

pub(crate) fn dump<S: Reader>(store: &S) -> Dump {
    Dump::of(&mut store.view().unwrap()).unwrap()
}

/// How an event stands, with its row in the outbox or what that would be.
fn standing<S: Reader>(store: &S, id: &EventId) -> (EventState, OutboxRow) {
    dump(store).events().remove(id).unwrap_or_else(|| panic!("no event {id}"))
}

pub(crate) fn outbox<S: Reader>(store: &S, id: &EventId) -> OutboxRow {
    standing(store, id).1
}

pub(crate) fn state<S: Reader>(store: &S, id: &EventId) -> &'static str {
    standing(store, id).0.name()
}

pub(crate) fn lane<S: Reader>(store: &S, key: &str) -> LaneRow {
    store.view().unwrap().lane(&lane_key(key)).unwrap().unwrap_or_else(|| panic!("no lane {key}"))
}

pub(crate) fn inbox_row<S: Reader>(store: &S, consumer: &str, id: &EventId) -> Option<InboxRow> {
    store.view().unwrap().received(&name(consumer), id).unwrap()
}

pub(crate) fn effect<S: Reader>(store: &S, consumer: &str, id: &EventId) -> Option<Body> {
    store.view().unwrap().effect(&name(consumer), id).unwrap()
}

/// How many effects there are, each of an event that is marked as applied; a mark without its
/// effect is a failure (F6).
pub(crate) fn effects<S: Reader>(store: &S) -> usize {
    let (mut marks, mut effects) = (Vec::new(), Vec::new());
    for record in dump(store).records() {
        if let Record::Inbox(consumer, id, row) = record
            && row.state == InboxState::Applied
        {
            marks.push((consumer.clone(), id.clone()));
        }
        if let Record::Effect(consumer, id, _) = record {
            effects.push((consumer.clone(), id.clone()));
        }
    }
    assert_eq!(marks, effects, "each mark has its effect, and each effect its mark");
    effects.len()
}

pub(crate) fn envelope<S: Reader>(store: &S, id: &EventId) -> Event {
    let row = store.view().unwrap().event(id).unwrap();
    row.unwrap_or_else(|| panic!("no envelope of {id}")).event
}

/// The message that a relay would make of a committed event.
pub(crate) fn message<S: Reader>(store: &S, id: &EventId) -> Message {
    let (event, sequence) = (envelope(store, id), outbox(store, id).sequence);
    let place = LanePlace { begun: Millis::new(0), sequence, after: sequence - 1 };
    Message { event, place, attempt: 1 }
}

/// An event that arrives from elsewhere.
pub(crate) fn arrival(id: &str, key: &str) -> Message {
    let sender = MemoryStore::new();
    let ids = place(&sender, id, [draft("order.created", key)], at(0));
    message(&sender, &ids[0])
}

pub(crate) fn consumer(text: &str) -> Consumer {
    name(text)
}

/// All states of events, with how often each is there.
pub(crate) fn states<S: Reader>(store: &S) -> Vec<(&'static str, usize)> {
    let mut states = BTreeMap::new();
    for (state, _) in dump(store).events().values() {
        *states.entry(state.name()).or_default() += 1;
    }
    states.into_iter().collect()
}

/// How many events are to be delivered.
pub(crate) fn pending<S: Reader>(store: &S) -> usize {
    let dump = dump(store);
    let events = dump.events().into_values();
    events.filter(|(state, _)| matches!(state, EventState::Pending | EventState::Leased)).count()
}

/// A publisher that answers by script and keeps what it was given.
pub(crate) struct Script<F> {
    pub(crate) batches: Vec<Vec<(Millis, Message)>>,
    answer: F,
}

impl<F: FnMut(&Message, Millis) -> Published> Script<F> {
    pub(crate) fn new(answer: F) -> Self {
        Self { batches: Vec::new(), answer }
    }

    /// The events in the order in which they were published.
    pub(crate) fn sent(&self) -> Vec<&Message> {
        self.batches.iter().flatten().map(|(_, message)| message).collect()
    }

    pub(crate) fn ids(&self) -> Vec<&str> {
        self.sent().into_iter().map(|message| message.event.id.as_str()).collect()
    }

    pub(crate) fn times(&self, id: &EventId) -> Vec<Millis> {
        self.batches
            .iter()
            .flatten()
            .filter(|(_, message)| message.event.id == *id)
            .map(|(time, _)| *time)
            .collect()
    }
}

impl<F: FnMut(&Message, Millis) -> Published> Publisher for Script<F> {
    fn publish(&mut self, batch: &[Message], now: Millis) -> Vec<Published> {
        self.batches.push(batch.iter().map(|message| (now, message.clone())).collect());
        batch.iter().map(|message| (self.answer)(message, now)).collect()
    }
}

/// A handler for the inbox of a store; to be named where it is not passed on at once, so that it
/// takes every transaction of the store.
pub(crate) fn handler<S: Store, E>(
    handler: impl FnMut(&mut Writing<'_, S::Tx<'_>>, &Message) -> Result<Handled, E>,
) -> impl FnMut(&mut Writing<'_, S::Tx<'_>>, &Message) -> Result<Handled, E> {
    handler
}

/// A handler that records the event's body as its effect.
pub(crate) fn echo<S: Store>(
    _: &mut Writing<'_, S::Tx<'_>>,
    message: &Message,
) -> Result<Handled, String> {
    Ok(Handled::Effect(message.event.body.clone()))
}

/// All orders of so many things.
pub(crate) fn permutations(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![Vec::new()];
    }
    let shorter = permutations(n - 1);
    (0..n)
        .flat_map(|at| {
            shorter.iter().map(move |p| {
                let mut p = p.clone();
                p.insert(at, n - 1);
                p
            })
        })
        .collect()
}

pub(crate) fn settings(owner: &str) -> RelaySettings {
    // What nobody announces is found in a minute; what is due is found when it is due.
    RelaySettings { poll: Duration::from_secs(60), ..RelaySettings::new(name(owner)) }
}

/// For how long an event may be redriven by default.
pub(crate) fn window() -> RedriveWindow {
    let policy = Checked::default();
    Retention::default().checked(&policy).unwrap().redrive_window()
}

pub(crate) fn continuing(owner: &str) -> RelaySettings {
    let policy = DeliveryPolicy { when_dead: WhenDead::Continue, ..DeliveryPolicy::default() };
    RelaySettings { policy: policy.checked().unwrap(), ..settings(owner) }
}

/// When a relay whose clocks are steady wants to come back.
pub(crate) fn next_of(machine: &RelayMachine) -> Option<Millis> {
    let uptime = machine.poll_timeout()?;
    let millis = uptime.as_nanos().div_ceil(1_000_000);
    Some(Millis::new(u64::try_from(millis).unwrap_or(u64::MAX)))
}

/// Lets a relay do all that it has to do until this time, and gives the time at which it rested
/// last. It must never be busy for long.
pub(crate) fn run_until<S: Store, P: Publisher>(
    relay: &mut Relay<S, P>,
    from: Millis,
    until: Millis,
) -> Millis {
    let mut now = from;
    for _ in 0..200_000 {
        let mut steps = 0;
        while relay.step(Moment::steady(now)).unwrap() {
            steps += 1;
            assert!(steps < 10_000, "the relay does not come to rest (F13)");
        }
        let next = next_of(relay.machine()).unwrap_or(Millis::MAX);
        if next > until {
            return now;
        }
        assert!(next > now, "at {now} it says to come again at {next} (F13)");
        now = next;
    }
    panic!("the relay is busy without end (F13)");
}

/// What goes wrong with a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreFault {
    Begin,
    Load,
    Apply,
    /// The commit fails and did not take.
    Commit,
    /// The commit reports a failure and did take.
    CommitTook,
}

impl StoreFault {
    pub(crate) const ALL: [Self; 5] =
        [Self::Begin, Self::Load, Self::Apply, Self::Commit, Self::CommitTook];
}

/// A store that fails by script: each transaction takes the next entry.
pub(crate) struct Flaky<S: 'static> {
    store: &'static S,
    script: Cell<VecDeque<Option<StoreFault>>>,
}

#[derive(Debug, Error)]
pub(crate) enum FlakyError<E> {
    #[error("{0}")]
    Own(E),
    #[error("the store is away: {0:?}")]
    Away(StoreFault),
}

impl<E: core::error::Error + 'static> StoreError for FlakyError<E> {}

impl<S> Flaky<S> {
    pub(crate) fn new(
        store: &'static S,
        script: impl IntoIterator<Item = Option<StoreFault>>,
    ) -> Self {
        Self { store, script: Cell::new(script.into_iter().collect()) }
    }
}

pub(crate) struct FlakyTx<T> {
    tx: T,
    fault: Option<StoreFault>,
}

impl<S: Store> Reader for Flaky<S> {
    type Error = FlakyError<S::Error>;
    type View<'a>
        = FlakyTx<S::View<'a>>
    where
        Self: 'a;

    fn view(&self) -> Result<Self::View<'_>, Self::Error> {
        Ok(FlakyTx { tx: self.store.view().map_err(FlakyError::Own)?, fault: None })
    }
}

impl<S: Store> Store for Flaky<S> {
    type Tx<'a>
        = FlakyTx<S::Tx<'a>>
    where
        Self: 'a;

    fn begin(&self) -> Result<Self::Tx<'_>, Self::Error> {
        let mut script = self.script.take();
        let fault = script.pop_front().flatten();
        self.script.set(script);
        match fault {
            Some(StoreFault::Begin) => Err(FlakyError::Away(StoreFault::Begin)),
            _ => Ok(FlakyTx { tx: self.store.begin().map_err(FlakyError::Own)?, fault }),
        }
    }
}

impl<T: Load> Load for FlakyTx<T> {
    type Error = FlakyError<T::Error>;

    fn load(&mut self, query: &Query) -> Result<Rows, Self::Error> {
        match self.fault {
            Some(fault @ StoreFault::Load) => Err(FlakyError::Away(fault)),
            _ => self.tx.load(query).map_err(FlakyError::Own),
        }
    }
}

impl<T: Tables> Tables for FlakyTx<T> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, Self::Error> {
        match self.fault {
            Some(fault @ StoreFault::Apply) => Err(FlakyError::Away(fault)),
            _ => self.tx.apply(batch).map_err(FlakyError::Own),
        }
    }

    fn apply_seen(&mut self, batch: &Batch, seen: &Seen<'_>) -> Result<Applied, Self::Error> {
        match self.fault {
            Some(fault @ StoreFault::Apply) => Err(FlakyError::Away(fault)),
            _ => self.tx.apply_seen(batch, seen).map_err(FlakyError::Own),
        }
    }
}

impl<T: Transaction> Transaction for FlakyTx<T> {
    fn commit(self) -> Result<(), Self::Error> {
        match self.fault {
            Some(fault @ StoreFault::Commit) => Err(FlakyError::Away(fault)),
            Some(fault @ StoreFault::CommitTook) => {
                self.tx.commit().map_err(FlakyError::Own)?;
                Err(FlakyError::Away(fault))
            }
            _ => self.tx.commit().map_err(FlakyError::Own),
        }
    }
}
