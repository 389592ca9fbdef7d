//! What the modules share: short ways to make names and rows, and strategies that make any row
//! there can be.

use core::fmt::Debug;
use core::time::Duration;

use proptest::prelude::*;
use twobox::{
    Applied, Batch, Body, CallRow, CallState, Change, Checked, Claim, Consumer, ContentType,
    Decision, Delivery, DeliveryPolicy, DeliveryState, Destination, Digest, Event, EventId,
    EventRow, EventType, Expect, Fingerprint, HeaderName, HeaderValue, Headers, InboxRow,
    InboxState, Invalid, Lane, LaneKey, LaneRow, Lease, Leased, Millis, OrderId, OrderRow,
    OrderingKey, OutboxRow, Owner, PlacedOrder, PositionRow, Reason, Record, RedriveWindow,
    RequestId, RequestKey, RequestRow, Retention, Revision, Rows, Scope, Store, Stored, Tables,
    Transaction, Transition, WhenDead,
};
use twobox_memory::MemoryStore;

/// The lane of an ordering key at the default destination.
pub(crate) fn lane_key(ordering_key: &str) -> LaneKey {
    name::<OrderingKey>(ordering_key).into()
}

/// A name of whatever type is wanted.
pub(crate) fn name<T: for<'a> TryFrom<&'a str, Error = Invalid>>(text: &str) -> T {
    T::try_from(text).unwrap()
}

pub(crate) fn ms(millis: u64) -> Millis {
    Millis::new(millis)
}

/// A row as it was read at a revision.
pub(crate) fn stored(revision: u64, record: Record) -> Stored {
    Stored { record, revision: Revision::from_stored(revision) }
}

/// The change that writes a new row.
pub(crate) fn insert(record: Record) -> Change {
    Change::Put { expect: Expect::Absent, record }
}

/// A store that holds these rows and no other.
pub(crate) fn store_of(records: impl IntoIterator<Item = Record>) -> MemoryStore {
    let store = MemoryStore::new();
    let mut tx = store.begin().unwrap();
    assert_eq!(
        tx.apply(&Batch::of(records.into_iter().map(insert).collect()).unwrap()).unwrap(),
        Applied::Written
    );
    tx.commit().unwrap();
    store
}

/// The change that writes a row which was read at a revision.
pub(crate) fn update(revision: u64, record: Record) -> Change {
    Change::Put { expect: Expect::Revision(Revision::from_stored(revision)), record }
}

/// A lane that has had no events.
pub(crate) const LANE: LaneRow = LaneRow {
    next: 1,
    head: 1,
    confirmed: 0,
    due: None,
    starts: 0,
    token: 0,
    lease: None,
    blocked_by: None,
    begun: Millis::new(0),
    changed_at: Millis::new(0),
};

/// A pending event at a place of a lane, committed at 100 and due since then.
pub(crate) fn pending(lane: &str, sequence: u64) -> OutboxRow {
    OutboxRow {
        lane: lane_key(lane),
        sequence,
        event_type: name("order.created"),
        committed_at: ms(100),
        due: ms(100),
        starts: 0,
        failures: 0,
        state: DeliveryState::Pending,
        reason: None,
        moved: false,
    }
}

pub(crate) fn lease(owner: &str, until: u64, through: u64) -> Lease {
    Lease { owner: name(owner), until: ms(until), through }
}

/// What a claim gets of a lane with these events: a lease with this token.
pub(crate) fn leased(key: &str, token: u64, ids: &[&str]) -> Leased {
    let event = |id: &str| Event {
        destination: Destination::default(),
        id: name(id),
        order: name("o"),
        event_type: name("order.created"),
        schema_version: 1,
        ordering_key: name(key),
        time: ms(1),
        headers: Headers::new(),
        body: text("x"),
    };
    let delivery = |(n, id): (u64, &&str)| Delivery {
        id: name(id),
        row: OutboxRow { due: ms(1), ..pending(key, n) },
        revision: None,
        event: Some(event(id)),
    };
    let row = LaneRow { next: 99, due: Some(ms(1)), token: token - 1, ..LANE };
    let pending = (1..).zip(ids).map(delivery).collect();
    let lane = Lane { key: lane_key(key), row, revision: Revision::FIRST, pending };
    let policy = Checked::default();
    let claim = Claim::new(&policy, name("me"), Duration::from_secs(59), 9).unwrap();
    let rows = Rows { lanes: vec![lane], ..Rows::default() };
    claim.decide(ms(1), &rows).unwrap().outcome.leased.remove(0)
}

/// When everything is decided.
pub(crate) const NOW: Millis = Millis::new(1_000);

pub(crate) fn decide<T: Transition>(
    transition: T,
    rows: &[Stored],
) -> Result<Decision<T::Outcome>, T::Refusal> {
    let mut rows = rows.to_vec();
    rows.sort_by_key(|stored| stored.record.key());
    transition.decide(NOW, &Rows::of(rows))
}

/// A redrive window of just this length, which must be 2 ms or longer.
pub(crate) fn window(length: Duration) -> RedriveWindow {
    let policy = hasty();
    Retention { inbox: length + policy.longest_retry(), ..Retention::default() }
        .checked(&policy)
        .unwrap()
        .redrive_window()
}

/// The policy by which an event is retried for the shortest time.
pub(crate) fn hasty() -> Checked<DeliveryPolicy> {
    let ms = Duration::from_millis(1);
    let policy = DeliveryPolicy {
        backoff_base: ms,
        backoff_cap: ms,
        max_failures: 1,
        max_starts: 2,
        when_dead: WhenDead::Block,
    };
    policy.checked().unwrap()
}

/// A decision to write exactly these changes.
pub(crate) fn writes<O, R>(
    changes: impl IntoIterator<Item = Change>,
    outcome: O,
) -> Result<Decision<O>, R> {
    Ok(Decision { batch: Batch::of(changes.into_iter().collect()).unwrap(), outcome })
}

pub(crate) fn writes_nothing<O, R>(outcome: O) -> Result<Decision<O>, R> {
    Ok(Decision { batch: Batch::new(), outcome })
}

pub(crate) fn text(text: &str) -> Body {
    Body::text(text).unwrap()
}

pub(crate) fn outbox(id: &str, row: OutboxRow) -> Record {
    Record::Outbox(name(id), row)
}

pub(crate) fn lane(key: &str, row: LaneRow) -> Record {
    Record::Lane(lane_key(key), row)
}

/// Names made of what is hard: prefixes of each other, several bytes a character, characters next
/// to the separators.
pub(crate) fn names<T: for<'a> TryFrom<&'a str, Error = Invalid> + Debug + Clone>(
    max: usize,
) -> BoxedStrategy<T> {
    let hard = prop::sample::select(vec![
        'a',
        'b',
        'B',
        ' ',
        '!',
        '/',
        '~',
        'é',
        '\u{7ff}',
        '€',
        '\u{ffff}',
        '\u{10000}',
        '\u{10ffff}',
    ]);
    let short = prop::collection::vec(
        prop_oneof![4 => prop::sample::select(vec!['a', 'b']), 1 => hard],
        1..6,
    );
    let short = short.prop_map(|chars| chars.into_iter().collect::<String>());
    let longest = prop_oneof![Just("x".repeat(max)), Just("é".repeat(max / 2))];
    prop_oneof![20 => short, 1 => longest].prop_map(|text| name(&text)).boxed()
}

/// Numbers, with those at the ends more often.
pub(crate) fn numbers() -> BoxedStrategy<u64> {
    prop_oneof![4 => 0..5_u64, 1 => Just(127), 1 => Just(128), 1 => Just(i64::MAX as u64), 1 => Just(i64::MAX as u64 - 1), 2 => 0..=i64::MAX as u64]
        .boxed()
}

pub(crate) fn counts() -> BoxedStrategy<u32> {
    prop_oneof![4 => 0..5_u32, 1 => Just(u32::MAX), 1 => Just(u32::MAX - 1), 1 => any::<u32>()]
        .boxed()
}

pub(crate) fn times() -> BoxedStrategy<Millis> {
    numbers().prop_map(Millis::new).boxed()
}

pub(crate) fn digests() -> BoxedStrategy<Digest> {
    any::<[u8; 32]>().prop_map(Digest).boxed()
}

pub(crate) fn reasons() -> BoxedStrategy<Option<Reason>> {
    prop::option::of(prop_oneof![8 => ".{0,12}", 1 => Just("…é".repeat(300))].prop_map(Reason::new))
        .boxed()
}

pub(crate) fn bodies() -> BoxedStrategy<Body> {
    (names::<ContentType>(ContentType::MAX), prop::collection::vec(any::<u8>(), 0..40))
        .prop_map(|(content_type, bytes)| Body::new(content_type, bytes).unwrap())
        .boxed()
}

pub(crate) fn fingerprints() -> BoxedStrategy<Fingerprint> {
    (digests(), ".{0,20}")
        .prop_map(|(digest, summary)| Fingerprint::from_stored(digest, &summary))
        .boxed()
}

pub(crate) fn headers() -> BoxedStrategy<Headers> {
    prop::collection::btree_map(
        names::<HeaderName>(HeaderName::MAX),
        names::<HeaderValue>(HeaderValue::MAX),
        0..5,
    )
    .prop_map(|pairs| {
        pairs
            .iter()
            .try_fold(Headers::new(), |headers, (name, value)| headers.with(name, value))
            .unwrap()
    })
    .boxed()
}

fn request_keys() -> BoxedStrategy<RequestKey> {
    (names::<Scope>(Scope::MAX), names::<RequestId>(RequestId::MAX))
        .prop_map(|(scope, id)| RequestKey { scope, id })
        .boxed()
}

fn order_ids() -> BoxedStrategy<OrderId> {
    names(OrderId::MAX)
}

fn event_ids() -> BoxedStrategy<EventId> {
    names(EventId::MAX)
}

fn ordering_keys() -> BoxedStrategy<OrderingKey> {
    names(OrderingKey::MAX)
}

fn consumers() -> BoxedStrategy<Consumer> {
    names(Consumer::MAX)
}

fn request_rows() -> BoxedStrategy<RequestRow> {
    let placed = (order_ids(), prop::collection::vec(event_ids(), 0..4), times())
        .prop_map(|(order, events, at)| PlacedOrder { order, events, at });
    (fingerprints(), times(), prop::option::of(placed))
        .prop_map(|(fingerprint, registered_at, placed)| RequestRow {
            fingerprint,
            registered_at,
            placed,
        })
        .boxed()
}

fn order_rows() -> BoxedStrategy<OrderRow> {
    (request_keys(), times(), bodies())
        .prop_map(|(request, committed_at, body)| OrderRow { request, committed_at, body })
        .boxed()
}

pub(crate) fn events() -> BoxedStrategy<Event> {
    let names = (event_ids(), order_ids(), names::<EventType>(EventType::MAX), ordering_keys());
    (names, counts(), times(), headers(), bodies())
        .prop_map(|((id, order, event_type, ordering_key), schema_version, time, headers, body)| {
            Event {
                destination: Destination::default(),
                id,
                order,
                event_type,
                schema_version,
                ordering_key,
                time,
                headers,
                body,
            }
        })
        .boxed()
}

fn outbox_rows() -> BoxedStrategy<OutboxRow> {
    let state = prop_oneof![
        2 => Just(DeliveryState::Pending),
        1 => times().prop_map(DeliveryState::Dead),
        1 => times().prop_map(DeliveryState::Discarded),
        1 => times().prop_map(DeliveryState::Cancelled),
    ];
    let place = (ordering_keys(), numbers(), names::<EventType>(EventType::MAX));
    (place, times(), times(), counts(), counts(), state, reasons(), any::<bool>())
        .prop_map(
            |(
                (lane, sequence, event_type),
                committed_at,
                due,
                starts,
                failures,
                state,
                reason,
                moved,
            )| {
                OutboxRow {
                    lane: lane.into(),
                    sequence,
                    event_type,
                    committed_at,
                    due,
                    starts,
                    failures,
                    state,
                    reason,
                    moved,
                }
            },
        )
        .boxed()
}

pub(crate) fn lane_rows() -> BoxedStrategy<LaneRow> {
    let lease = (names::<Owner>(Owner::MAX), times(), numbers())
        .prop_map(|(owner, until, through)| Lease { owner, until, through });
    let holder = (prop::option::of(lease), prop::option::of(event_ids()), times(), times());
    (numbers(), numbers(), numbers(), prop::option::of(times()), counts(), numbers(), holder)
        .prop_map(
            |(
                next,
                head,
                confirmed,
                due,
                starts,
                token,
                (lease, blocked_by, begun, changed_at),
            )| {
                LaneRow {
                    next,
                    head,
                    confirmed,
                    due,
                    starts,
                    token,
                    lease,
                    blocked_by,
                    begun,
                    changed_at,
                }
            },
        )
        .boxed()
}

pub(crate) fn inbox_rows() -> BoxedStrategy<InboxRow> {
    let state =
        prop::sample::select(vec![InboxState::Applied, InboxState::Failing, InboxState::Poisoned]);
    (digests(), times(), state, counts(), reasons(), any::<bool>())
        .prop_map(|(content, at, state, failures, reason, effect)| InboxRow {
            content,
            at,
            state,
            failures,
            reason,
            effect,
        })
        .boxed()
}

pub(crate) fn call_rows() -> BoxedStrategy<CallRow> {
    let state = prop::sample::select(vec![
        CallState::Intended,
        CallState::Started,
        CallState::Done,
        CallState::Unknown,
    ]);
    (state, times(), counts(), reasons())
        .prop_map(|(state, at, starts, note)| CallRow { state, at, starts, note })
        .boxed()
}

/// Any row of any table.
pub(crate) fn records() -> BoxedStrategy<Record> {
    prop_oneof![
        (request_keys(), request_rows()).prop_map(|(key, row)| Record::Request(key, row)),
        (order_ids(), order_rows()).prop_map(|(id, row)| Record::Order(id, row)),
        (events(), numbers(), times()).prop_map(|(event, sequence, due)| {
            Record::Event(EventRow { event, sequence, due })
        }),
        (event_ids(), outbox_rows()).prop_map(|(id, row)| Record::Outbox(id, row)),
        (ordering_keys(), lane_rows()).prop_map(|(key, row)| Record::Lane(key.into(), row)),
        (consumers(), event_ids(), inbox_rows())
            .prop_map(|(consumer, id, row)| Record::Inbox(consumer, id, row)),
        (consumers(), event_ids(), bodies())
            .prop_map(|(consumer, id, body)| Record::Effect(consumer, id, body)),
        (consumers(), ordering_keys(), numbers(), times(), times()).prop_map(
            |(consumer, key, sequence, begun, at)| {
                Record::Position(consumer, key, PositionRow { begun, sequence, at })
            }
        ),
        (consumers(), event_ids(), call_rows())
            .prop_map(|(consumer, id, row)| Record::Call(consumer, id, row)),
    ]
    .boxed()
}
