//! Stores to test with: a disk in memory that can be looked at, and rows in every state.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::{Arc, Mutex};

use redb::StorageBackend;
use twobox::{
    Applied, Batch, Body, CallRow, CallState, Change, Consumer, DeliveryState, Destination, Digest,
    Dump, Event, EventId, EventRow, EventType, Expect, Headers, InboxRow, InboxState, LaneRow,
    Lease, Millis, OrderId, OrderRow, OrderingKey, OutboxRow, Owner, PlacedOrder, PositionRow,
    Reader, Reason, Record, RequestKey, RequestRow, Store, Summary, Tables, Transaction,
};
use twobox_redb::{RedbError, RedbOptions, RedbStore};

/// A disk in memory. Its clones are the same disk.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disk(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    bytes: Vec<u8>,
    written: usize,
    /// How many reads and writes go well from now on.
    good: usize,
    /// Whether only the next one fails after that, and which one that was.
    once: bool,
    struck: Option<&'static str>,
    /// How many of the next syncs fail.
    syncs: usize,
    /// What is on the disk itself, and what the system still has to write, of a system that forgets
    /// what it could not write.
    platter: Option<Platter>,
    /// What the disk held after each write.
    history: Option<Vec<Vec<u8>>>,
}

/// What is on the disk itself, and the writes that wait for a sync, each at its place.
type Platter = (Vec<u8>, Vec<(usize, Vec<u8>)>);

impl Default for State {
    fn default() -> Self {
        Self {
            bytes: Vec::new(),
            written: 0,
            good: usize::MAX,
            once: false,
            struck: None,
            syncs: 0,
            platter: None,
            history: None,
        }
    }
}

impl Disk {
    /// After so many reads and writes, all of them fail.
    pub(crate) fn fail_after(&self, good: usize) {
        self.0.lock().unwrap().good = good;
    }

    /// After so many, one fails, and then they go well again.
    pub(crate) fn fail_once(&self, good: usize) {
        let mut state = self.0.lock().unwrap();
        (state.good, state.once, state.struck) = (good, true, None);
    }

    /// Which call has failed since [`Disk::fail_once`].
    pub(crate) fn struck(&self) -> Option<&'static str> {
        self.0.lock().unwrap().struck
    }

    pub(crate) fn fail_syncs(&self, count: usize) {
        self.0.lock().unwrap().syncs = count;
    }

    fn may_fail(&self, call: &'static str) -> io::Result<()> {
        let mut state = self.0.lock().unwrap();
        if let Some(left) = state.good.checked_sub(1) {
            state.good = left;
            return Ok(());
        }
        if state.once {
            state.good = usize::MAX;
        }
        state.struck = Some(call);
        Err(io::Error::other("the disk is gone"))
    }

    /// A disk under a system that takes for written what a sync could not write.
    pub(crate) fn forgetting() -> Self {
        Self(Arc::new(Mutex::new(State { platter: Some(Default::default()), ..State::default() })))
    }

    /// What is on the disk itself.
    pub(crate) fn platter(&self) -> Vec<u8> {
        self.0.lock().unwrap().platter.as_ref().unwrap().0.clone()
    }

    /// Changes bytes all over it, but not the first ones.
    pub(crate) fn spoil(&self) {
        let mut state = self.0.lock().unwrap();
        state.bytes.iter_mut().skip(64).step_by(97).for_each(|byte| *byte ^= 0x55);
    }

    pub(crate) fn restore(&self, bytes: Vec<u8>) {
        self.0.lock().unwrap().bytes = bytes;
    }

    pub(crate) fn with(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(State { bytes, ..State::default() })))
    }

    /// A disk that remembers what it held after each write.
    pub(crate) fn remembering(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(State { bytes, history: Some(Vec::new()), ..State::default() })))
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().bytes.clone()
    }

    pub(crate) fn history(&self) -> Vec<Vec<u8>> {
        self.0.lock().unwrap().history.take().unwrap()
    }

    /// How many bytes were written since this was asked last.
    pub(crate) fn written(&self) -> usize {
        std::mem::take(&mut self.0.lock().unwrap().written)
    }

    fn change(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.0.lock().unwrap();
        change(&mut state.bytes);
        let bytes = state.bytes.clone();
        if let Some(history) = &mut state.history {
            history.push(bytes);
        }
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.may_fail("read")?;
        let (state, start) = (self.0.lock().unwrap(), usize::try_from(offset).unwrap());
        let there = state.bytes.get(start..start + out.len()).ok_or(ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(there);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.may_fail("set_len")?;
        self.change(|bytes| bytes.resize(usize::try_from(len).unwrap(), 0));
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.may_fail("sync")?;
        let mut state = self.0.lock().unwrap();
        let state = &mut *state;
        let fails = state.syncs > 0;
        state.syncs = state.syncs.saturating_sub(1);
        if let Some((platter, waiting)) = &mut state.platter {
            platter.resize(state.bytes.len(), 0);
            for (start, data) in waiting.drain(..).filter(|_| !fails) {
                platter[start..start + data.len()].copy_from_slice(&data);
            }
        }
        if fails { Err(io::Error::other("it could not be written")) } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.may_fail("write")?;
        self.0.lock().unwrap().written += data.len();
        let start = usize::try_from(offset).unwrap();
        if let Some((_, waiting)) = &mut self.0.lock().unwrap().platter {
            waiting.push((start, data.to_vec()));
        }
        self.change(|bytes| bytes[start..start + data.len()].copy_from_slice(data));
        Ok(())
    }
}

/// Opening changes nothing.
pub(crate) const KEEPING: RedbOptions = RedbOptions::new().end_leases(false);

pub(crate) const fn at(millis: u64) -> Millis {
    Millis::new(millis)
}

pub(crate) fn lane(name: &str) -> OrderingKey {
    OrderingKey::new(name).unwrap()
}

pub(crate) fn event(id: &str) -> EventId {
    EventId::new(id).unwrap()
}

pub(crate) fn outbox_row(lane: &OrderingKey, sequence: u64, state: DeliveryState) -> OutboxRow {
    OutboxRow {
        lane: lane.clone().into(),
        sequence,
        event_type: EventType::new("order.created").unwrap(),
        committed_at: at(1_000),
        due: at(1_000),
        starts: 0,
        failures: 0,
        state,
        reason: None,
        moved: false,
    }
}

pub(crate) fn event_row(id: &str, lane: &OrderingKey, sequence: u64, body: u8) -> EventRow {
    let event = Event {
        destination: Destination::default(),
        id: event(id),
        order: OrderId::new("order-1").unwrap(),
        event_type: EventType::new("order.created").unwrap(),
        schema_version: u32::from(body) + 1,
        ordering_key: lane.clone(),
        time: at(1_000),
        headers: Headers::new().with("traceparent", "00-4bf9").unwrap(),
        body: Body::new("application/octet-stream", [0, body, 255]).unwrap(),
    };
    EventRow { event, sequence, due: at(1_000) }
}

pub(crate) fn lane_row(due: Option<Millis>) -> LaneRow {
    LaneRow {
        next: 9,
        head: 1,
        confirmed: 0,
        due,
        starts: 0,
        token: 0,
        lease: None,
        blocked_by: None,
        begun: at(1_000),
        changed_at: at(1_000),
    }
}

/// Rows of every table in every state.
pub(crate) fn every_state() -> Vec<Record> {
    let (first, second) = (lane("customer-7"), lane("customer-8"));
    let request = |id: &str| RequestKey::new("shop", id).unwrap();
    let order = OrderId::new("order-1").unwrap();
    let bound = |placed| RequestRow {
        fingerprint: Summary::All.of([("item", "notebook"), ("quantity", "2")]),
        registered_at: at(900),
        placed,
    };
    // e1 is confirmed, and e6 was redriven to the end of its lane.
    let states = [
        ("e2", 2, DeliveryState::Cancelled(at(1_600))),
        ("e3", 3, DeliveryState::Discarded(at(1_700))),
        ("e5", 5, DeliveryState::Pending),
    ];
    let events: Vec<EventId> =
        ["e1", "e2", "e3", "e4", "e5", "e6", "f1"].into_iter().map(event).collect();
    let mut records = vec![
        Record::Request(request("req-open"), bound(None)),
        Record::Request(
            request("req-placed"),
            bound(Some(PlacedOrder {
                order: order.clone(),
                events: events.clone(),
                at: at(1_000),
            })),
        ),
        Record::Order(
            order.clone(),
            OrderRow {
                request: request("req-placed"),
                committed_at: at(1_000),
                body: Body::json("{}").unwrap(),
            },
        ),
    ];
    for (sequence, id) in (1..).zip(["e1", "e2", "e3", "e4", "e5"]) {
        records.push(Record::Event(event_row(id, &first, sequence, sequence as u8)));
    }
    records.push(Record::Event(event_row("e6", &first, 0, 6)));
    records.push(Record::Event(event_row("f1", &second, 1, 7)));
    for (id, sequence, state) in states {
        records.push(Record::Outbox(event(id), outbox_row(&first, sequence, state)));
    }
    let moved = outbox_row(&first, 6, DeliveryState::Pending);
    records.push(Record::Outbox(event("e6"), OutboxRow { moved: true, ..moved }));
    records.push(Record::Outbox(
        event("f1"),
        OutboxRow {
            starts: 16,
            failures: 16,
            reason: Some(Reason::new("no route")),
            ..outbox_row(&second, 1, DeliveryState::Dead(at(1_800)))
        },
    ));
    let lease = Lease { owner: Owner::new("relay-1").unwrap(), until: at(9_000), through: 4 };
    records.push(Record::Lane(
        first.into(),
        LaneRow {
            next: 7,
            head: 4,
            confirmed: 1,
            starts: 1,
            token: 3,
            lease: Some(lease),
            ..lane_row(Some(at(9_000)))
        },
    ));
    records.push(Record::Lane(
        second.into(),
        LaneRow { next: 2, head: 2, blocked_by: Some(event("f1")), ..lane_row(None) },
    ));
    records.push(Record::Lane(lane("customer-9").into(), lane_row(Some(at(20_000)))));
    let consumer = Consumer::new("loyalty").unwrap();
    let states =
        [("e1", InboxState::Applied), ("e2", InboxState::Failing), ("e3", InboxState::Poisoned)];
    for (id, state) in states {
        let (failures, reason) = match state {
            InboxState::Applied => (0, None),
            InboxState::Failing | InboxState::Poisoned => {
                (2, Some(Reason::new("no such customer")))
            }
        };
        let content = Digest::of_parts("sample", [id.as_bytes()]);
        records.push(Record::Inbox(
            consumer.clone(),
            event(id),
            InboxRow {
                content,
                at: at(2_000),
                state,
                failures,
                reason,
                effect: state == InboxState::Applied,
            },
        ));
    }
    records.push(Record::Effect(consumer.clone(), event("e1"), Body::text("10 points").unwrap()));
    records.push(Record::Position(
        consumer.clone(),
        lane("customer-7"),
        PositionRow { begun: at(1_000), sequence: 1, at: at(2_000) },
    ));
    let states = [
        ("e1", CallState::Done, Some("receipt 4711")),
        ("e2", CallState::Intended, None),
        ("e3", CallState::Started, None),
        ("e4", CallState::Unknown, Some("no answer")),
    ];
    for (id, state, note) in states {
        let starts = u32::from(state != CallState::Intended);
        let row = CallRow { state, at: at(2_500), starts, note: note.map(Reason::new) };
        records.push(Record::Call(consumer.clone(), event(id), row));
    }
    records
}

/// Inserts the records, in one commit.
pub(crate) fn fill(store: &RedbStore, records: Vec<Record>) {
    let puts =
        records.into_iter().map(|record| Change::Put { expect: Expect::Absent, record }).collect();
    let mut tx = store.begin().unwrap();
    assert_eq!(tx.apply(&Batch::of(puts).unwrap()).unwrap(), Applied::Written);
    tx.commit().unwrap();
}

/// All tables as text.
pub(crate) fn text<R: Reader<Error = RedbError>>(store: &R) -> Result<String, RedbError> {
    Ok(Dump::of(&mut store.view()?)?.to_string())
}

/// The bytes of a closed store with rows in every state, and its tables as text.
pub(crate) fn sample() -> (Vec<u8>, String) {
    let disk = Disk::default();
    let store = RedbStore::create_on(disk.clone()).unwrap();
    fill(&store, every_state());
    let text = text(&store).unwrap();
    store.close().unwrap();
    (disk.bytes(), text)
}

pub(crate) fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}
