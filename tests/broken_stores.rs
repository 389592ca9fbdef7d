//! The kit is tested itself: stores that are wrong on purpose, each in one way that real ones were,
//! must fail it.

#![allow(clippy::unwrap_used, reason = "what is made of valid parts is valid")]

use std::cell::{Cell, RefCell};
use std::convert::Infallible;

use twobox::{
    Applied, Batch, Body, Change, Delivery, DeliveryState, Due, Event, EventRow, Expect, Key, Load,
    Millis, OrderRow, Query, Reader, Record, Revision, Rows, Store, Table, Tables, Transaction,
};
use twobox_conformance::{Harness, failures};
use twobox_memory::{MemoryStore, MemoryTransaction, State};

/// What is wrong with a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Defect {
    IgnoresGuards,
    ChecksTheFirstGuardOnly,
    AppliesHalf,
    IgnoresDeletes,
    LosesTheLastCommit,
    SaysItHasCommitted,
    CommitsWhatIsDropped,
    DoesNotReadItsOwnWrites,
    RevisionsStayOne,
    WalksBackwards,
    ReordersDeliveries,
    ConfirmedStaysPending,
    DueIgnoresNow,
    DueForgetsTheLimit,
    DropsTheLastOfAFullPage,
    ForgetsTheLaterLane,
    IgnoresCase,
    TrimsKeys,
    JoinsKeysWithASlash,
    EndsBodiesAtNul,
    TimesAsTexts,
}

use Defect::*;

/// Each defect with a check that must find it; others may as well.
const DEFECTS: [(Defect, &str); 21] = [
    (IgnoresGuards, "contract::a_broken_guard_stops_the_whole_batch"),
    (ChecksTheFirstGuardOnly, "contract::a_broken_guard_stops_the_whole_batch"),
    (AppliesHalf, "scenarios::buy_once"),
    (IgnoresDeletes, "contract::revisions_count_writes"),
    (LosesTheLastCommit, "scenarios::answer_lost"),
    (SaysItHasCommitted, "scenarios::buy_once"),
    (CommitsWhatIsDropped, "scenarios::consumption_fails"),
    (DoesNotReadItsOwnWrites, "scenarios::one_transaction"),
    (RevisionsStayOne, "contract::revisions_count_writes"),
    (WalksBackwards, "contract::walk_in_pages"),
    (ReordersDeliveries, "scenarios::two_events"),
    (ConfirmedStaysPending, "contract::answers_are_those_of_the_model"),
    (DueIgnoresNow, "contract::answers_are_those_of_the_model"),
    (DueForgetsTheLimit, "contract::answers_are_those_of_the_model"),
    (DropsTheLastOfAFullPage, "contract::walk_in_pages"),
    (ForgetsTheLaterLane, "scenarios::dead_blocks"),
    (IgnoresCase, "contract::texts_at_their_limits"),
    (TrimsKeys, "contract::texts_at_their_limits"),
    (JoinsKeysWithASlash, "contract::texts_at_their_limits"),
    (EndsBodiesAtNul, "contract::any_bytes_in_bodies"),
    (TimesAsTexts, "contract::numbers_at_their_limits"),
];

/// The harness of the store with the defect of this number.
struct Broken<const N: usize>(BrokenStore);

impl<const N: usize> Harness for Broken<N> {
    type Store = BrokenStore;

    fn open() -> Self {
        Self(BrokenStore::new(DEFECTS.get(N).map(|(defect, _)| *defect), State::default()))
    }

    fn crash(self) -> Self {
        let last = self.0.inner.state();
        let state = if self.0.defect == Some(LosesTheLastCommit) {
            self.0.before_last.take()
        } else {
            last
        };
        Self(BrokenStore::new(self.0.defect, state))
    }

    fn store(&self) -> &BrokenStore {
        &self.0
    }
}

/// A memory store with a defect, or without one.
struct BrokenStore {
    inner: MemoryStore,
    defect: Option<Defect>,
    before_last: RefCell<State>,
    commits: Cell<u32>,
}

impl BrokenStore {
    fn new(defect: Option<Defect>, state: State) -> Self {
        let before_last = RefCell::new(state.clone());
        Self { inner: MemoryStore::from_state(state), defect, before_last, commits: Cell::new(0) }
    }
}

struct BrokenView {
    state: State,
    defect: Option<Defect>,
}

struct BrokenTransaction<'a> {
    /// Taken by the commit.
    inner: Option<MemoryTransaction<'a>>,
    begun: State,
    store: &'a BrokenStore,
}

impl Reader for BrokenStore {
    type Error = Infallible;
    type View<'a> = BrokenView;

    fn view(&self) -> Result<BrokenView, Infallible> {
        Ok(BrokenView { state: self.inner.state(), defect: self.defect })
    }
}

impl Store for BrokenStore {
    type Tx<'a> = BrokenTransaction<'a>;

    fn begin(&self) -> Result<BrokenTransaction<'_>, Infallible> {
        Ok(BrokenTransaction {
            begun: self.inner.state(),
            inner: Some(self.inner.begin()?),
            store: self,
        })
    }
}

impl Load for BrokenView {
    type Error = Infallible;

    fn load(&mut self, query: &Query) -> Result<Rows, Infallible> {
        load(self.defect, &mut self.state, query)
    }
}

impl Load for BrokenTransaction<'_> {
    type Error = Infallible;

    fn load(&mut self, query: &Query) -> Result<Rows, Infallible> {
        match &mut self.inner {
            Some(inner) if self.store.defect != Some(DoesNotReadItsOwnWrites) => {
                load(self.store.defect, inner, query)
            }
            Some(_) | None => self.begun.load(query),
        }
    }
}

fn load(
    defect: Option<Defect>,
    tables: &mut impl Load<Error = Infallible>,
    query: &Query,
) -> Result<Rows, Infallible> {
    let asked = match (defect, query) {
        (Some(DueIgnoresNow), Query::Due(due)) => Query::Due(Due { now: Millis::MAX, ..*due }),
        (Some(DueForgetsTheLimit), Query::Due(due)) => Query::Due(Due { lanes: 1_000, ..*due }),
        _ => query.clone(),
    };
    let mut rows = tables.load(&asked)?;
    match (defect, query) {
        (Some(RevisionsStayOne), _) => {
            rows.rows.iter_mut().for_each(|row| row.revision = Revision::FIRST);
        }
        (Some(WalksBackwards), Query::Walk { .. }) => rows.rows.reverse(),
        (Some(DropsTheLastOfAFullPage), Query::Walk { limit, .. }) if rows.rows.len() == *limit => {
            drop(rows.rows.pop());
        }
        (Some(ReordersDeliveries), Query::Due(_)) => {
            rows.lanes.iter_mut().for_each(|lane| lane.pending.reverse());
        }
        (Some(ForgetsTheLaterLane), Query::Due(due)) => {
            rows.lanes.retain(|lane| lane.row.due.is_none_or(|at| at <= due.now));
        }
        (Some(TimesAsTexts), Query::Due(_)) => {
            rows.lanes.sort_by_key(|lane| lane.row.due.map(|due| due.to_string()));
        }
        (Some(ConfirmedStaysPending), Query::Due(due)) => {
            let walk = |table| Query::Walk { table, after: None, limit: usize::MAX };
            let events = tables.load(&walk(Table::Events))?.rows;
            let outbox = tables.load(&walk(Table::Outbox))?;
            for lane in rows.lanes.iter_mut().filter(|lane| lane.row.due <= Some(due.now)) {
                let all = events.iter().filter_map(|stored| {
                    let Record::Event(row) = &stored.record else { return None };
                    let found = outbox.outbox(&row.event.id);
                    let found = found.map(|(row, revision)| (row.clone(), revision));
                    Some(Delivery::new(row.clone(), found, true))
                });
                lane.pending = all
                    .filter(|event| event.row.lane == lane.key)
                    .filter(|event| event.row.state == DeliveryState::Pending)
                    .collect();
                lane.pending.sort_by_key(|event| event.row.sequence);
                lane.pending.truncate(due.run);
            }
        }
        _ => {}
    }
    Ok(rows)
}

fn end_at_nul(record: Record) -> Record {
    let end = |body: Body| {
        let bytes = body.bytes().split(|byte| *byte == 0).next().unwrap_or_default();
        Body::new(body.content_type(), bytes).unwrap()
    };
    match record {
        Record::Order(id, row) => Record::Order(id, OrderRow { body: end(row.body), ..row }),
        Record::Event(row) => {
            let event = Event { body: end(row.event.body), ..row.event };
            Record::Event(EventRow { event, ..row })
        }
        Record::Effect(consumer, id, body) => Record::Effect(consumer, id, end(body)),
        Record::Request(..) | Record::Outbox(..) | Record::Lane(..) | Record::Inbox(..) => record,
        Record::Position(..) | Record::Call(..) => record,
    }
}

/// The text of a key, as a store with this defect has it.
fn text(defect: Defect, key: &Key) -> String {
    let text = match key {
        Key::Request(key) => format!("{}\0{}", key.scope, key.id),
        Key::Order(id) => id.to_string(),
        Key::Event(id) | Key::Outbox(id) => id.to_string(),
        Key::Lane(key) => key.to_string(),
        Key::Position(consumer, key) => format!("{consumer}\0{key}"),
        Key::Inbox(consumer, id) | Key::Effect(consumer, id) | Key::Call(consumer, id) => {
            format!("{consumer}\0{id}")
        }
    };
    if defect == IgnoresCase {
        text.to_lowercase()
    } else if defect == TrimsKeys {
        text.trim_end().to_string()
    } else {
        text.replace('\0', "/")
    }
}

impl Tables for BrokenTransaction<'_> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, Infallible> {
        let Some(inner) = &mut self.inner else { return Ok(Applied::Written) };
        let Some(defect) = self.store.defect else { return inner.apply(batch) };
        let mut changes = batch.changes().to_vec();
        match defect {
            IgnoresGuards | ChecksTheFirstGuardOnly | RevisionsStayOne => {
                let mut forced = Vec::new();
                for (at, change) in changes.into_iter().enumerate() {
                    let there = inner.load(&Query::rows([change.key()]))?.rows.pop();
                    let first = there.as_ref().map(|_| Revision::FIRST);
                    let found = there.as_ref().map(|row| row.revision);
                    let shown = if defect == RevisionsStayOne { first } else { found };
                    let guard = match &change {
                        Change::Put { expect, .. } => Some(*expect),
                        Change::Delete { expect, .. } => Some(Expect::Revision(*expect)),
                        Change::Lane { .. } => None,
                    };
                    let holds = guard.is_none_or(|expect| expect.holds(shown));
                    let checked = defect == RevisionsStayOne
                        || (defect == ChecksTheFirstGuardOnly && at == 0);
                    if checked && !holds {
                        return Ok(Applied::Conflict(Some(change.key())));
                    }
                    let expect = there.map(|row| row.revision);
                    match (change, expect) {
                        (Change::Put { record, .. }, expect) => {
                            forced.push(Change::Put { expect: expect.into(), record });
                        }
                        (Change::Delete { key, .. }, Some(expect)) => {
                            forced.push(Change::Delete { expect, key });
                        }
                        (Change::Delete { .. }, None) => {}
                        (lane @ Change::Lane { .. }, _) => forced.push(lane),
                    }
                }
                changes = forced;
            }
            AppliesHalf => changes.truncate(changes.len().div_ceil(2)),
            IgnoresDeletes => changes.retain(|change| !matches!(change, Change::Delete { .. })),
            EndsBodiesAtNul => changes.iter_mut().for_each(|change| {
                if let Change::Put { record, .. } = change {
                    *record = end_at_nul(record.clone());
                }
            }),
            IgnoresCase | TrimsKeys | JoinsKeysWithASlash => {
                let mut seen = Vec::new();
                for change in &changes {
                    let key = change.key();
                    let new = matches!(change, Change::Put { expect: Expect::Absent, .. });
                    let walk = Query::Walk { table: key.table(), after: None, limit: usize::MAX };
                    let there = inner.load(&walk)?.rows.into_iter().map(|row| row.record.key());
                    let same = |other: &Key| {
                        other.table() == key.table() && text(defect, other) == text(defect, &key)
                    };
                    if new && there.chain(seen.iter().cloned()).any(|other| same(&other)) {
                        return Ok(Applied::Conflict(Some(key)));
                    }
                    seen.push(key);
                }
            }
            LosesTheLastCommit
            | SaysItHasCommitted
            | CommitsWhatIsDropped
            | DoesNotReadItsOwnWrites
            | WalksBackwards
            | ReordersDeliveries
            | ConfirmedStaysPending
            | DueIgnoresNow
            | DueForgetsTheLimit
            | DropsTheLastOfAFullPage
            | ForgetsTheLaterLane
            | TimesAsTexts => {}
        }
        inner.apply(&Batch::of(changes).unwrap())
    }
}

impl Transaction for BrokenTransaction<'_> {
    fn commit(mut self) -> Result<(), Infallible> {
        let Some(inner) = self.inner.take() else { return Ok(()) };
        let commits = self.store.commits.get() + 1;
        self.store.commits.set(commits);
        self.store.before_last.replace(self.begun.clone());
        if self.store.defect == Some(SaysItHasCommitted) && commits.is_multiple_of(3) {
            return Ok(());
        }
        inner.commit()
    }
}

impl Drop for BrokenTransaction<'_> {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.take()
            && self.store.defect == Some(CommitsWhatIsDropped)
        {
            let Ok(()) = inner.commit();
        }
    }
}

/// The wrapper itself is right: without a defect nothing fails.
#[test]
fn a_store_without_a_defect_passes() {
    let found = failures::<Broken<{ usize::MAX }>>();
    assert!(found.is_empty(), "{found:#?}");
}

fn must_fail<const N: usize>() {
    let (defect, check) = DEFECTS[N];
    let found = failures::<Broken<N>>();
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert!(
        names.contains(&check),
        "a store that {defect:?} must fail {check}; it fails {names:?}"
    );
    for (name, failure) in &found {
        assert!(!failure.to_string().is_empty(), "{name} does not say what is wrong");
    }
}

macro_rules! must_fail {
    ($($name:ident: $number:literal)*) => {
        $(
            #[test]
            fn $name() {
                must_fail::<$number>();
            }
        )*

        #[test]
        fn no_defect_is_left_out() {
            let numbers = [$($number),*];
            assert!(numbers.into_iter().eq(0..DEFECTS.len()));
        }
    };
}

must_fail! {
    ignores_guards: 0
    checks_the_first_guard_only: 1
    applies_half: 2
    ignores_deletes: 3
    loses_the_last_commit: 4
    says_it_has_committed: 5
    commits_what_is_dropped: 6
    does_not_read_its_own_writes: 7
    revisions_stay_one: 8
    walks_backwards: 9
    reorders_deliveries: 10
    confirmed_stays_pending: 11
    due_ignores_now: 12
    due_forgets_the_limit: 13
    drops_the_last_of_a_full_page: 14
    forgets_the_later_lane: 15
    ignores_case: 16
    trims_keys: 17
    joins_keys_with_a_slash: 18
    ends_bodies_at_nul: 19
    times_as_texts: 20
}
