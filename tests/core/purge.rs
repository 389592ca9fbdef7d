//! Purge, row by row of its truth table: what goes, what stays, and at which age (P7).

use core::convert::Infallible;
use core::num::NonZeroU16;
use core::time::Duration;

use twobox::relay::{Message, RelaySettings};
use twobox::{
    Body, CallRow, CallState, Change, Checked, Claim, CommitOrder, Decision, DeliveryPolicy,
    DeliveryState, Draft, Fingerprint, Handled, Inbox, InboxRow, InboxState, Key, LaneRow, Load,
    Millis, OrderRow, OutboxRow, Placed, PositionRow, Purge, Purged, Query, Reader, Reason,
    Receipt, Record, Request, RequestKey, RequestRow, Retention, Revision, Rows, Store, Stored,
    Table, Transition, purge_all,
};
use twobox_memory::MemoryStore;

use crate::support::{LANE, hasty, lane, lease, ms, name, outbox, pending, stored, text, writes};

const AGE: Duration = Duration::from_secs(600);
/// Rows that came into their state at [`AT`] have had it for [`AGE`].
const AT: Millis = Millis::new(400);
const NOW: Millis = Millis::new(600_400);

/// All tables keep rows for so long, but positions for twice as long.
fn retention(age: Duration) -> Checked<Retention> {
    let kept = Retention {
        events: age,
        inbox: age,
        requests: age,
        orders: Some(age),
        positions: Some(age * 2),
    };
    kept.checked(&hasty()).unwrap()
}

/// What a purge decides about these rows now.
fn decide(purge: &Purge<'_>, rows: &[Stored]) -> Result<Decision<Purged>, Infallible> {
    purge.decide(NOW, &Rows::new(rows.to_vec()))
}

fn limit(rows: u16) -> NonZeroU16 {
    NonZeroU16::new(rows).unwrap()
}

/// What is removed if there is this row alone: at its retention nothing, and right after it this
/// row, with what goes with it.
fn goes(record: &Record, with: Option<Key>) {
    let rows = [stored(5, record.clone())];
    let key = record.key();
    let removal = |expect, key| Change::Delete { expect: Revision::from_stored(expect), key };
    let gone =
        [removal(5, key)].into_iter().chain(with.map(|key| removal(Revision::FIRST.get(), key)));
    let purge = |age| {
        // Positions are kept twice as long as the rest.
        let kept = retention(if record.table() == Table::Positions { age / 2 } else { age });
        decide(&Purge::new(&kept, record.table(), limit(10)), &rows)
    };
    assert_eq!(
        purge(AGE - Duration::from_millis(1)),
        writes(gone, Purged { removed: 1, next: None }),
        "{record:?}"
    );
    assert_eq!(purge(AGE), writes([], Purged { removed: 0, next: None }), "{record:?}");
}

/// However old it is.
fn stays(record: Record) {
    let purge = decide(
        &Purge::new(&retention(Retention::SHORTEST), record.table(), limit(10)),
        &[stored(5, record.clone())],
    );
    assert_eq!(purge, writes([], Purged { removed: 0, next: None }), "{record:?}");
}

#[test]
fn events() {
    for state in
        [DeliveryState::Confirmed(AT), DeliveryState::Discarded(AT), DeliveryState::Cancelled(AT)]
    {
        goes(&outbox("e", OutboxRow { state, ..pending("a", 1) }), Some(Key::Event(name("e"))));
    }
    for state in [DeliveryState::Pending, DeliveryState::Dead(ms(0))] {
        stays(outbox("e", OutboxRow { state, ..pending("a", 1) }));
    }
}

#[test]
fn lanes() {
    let idle = || LaneRow { changed_at: AT, ..LANE };
    goes(&lane("a", idle()), None);
    stays(lane("a", LaneRow { due: Some(ms(100)), ..LANE }));
    stays(lane("a", LaneRow { blocked_by: Some(name("e")), ..LANE }));
    stays(lane("a", LaneRow { lease: Some(lease("me", 1, 1)), ..LANE }));
}

#[test]
fn requests_and_orders() {
    let key = || RequestKey::new("s", "r").unwrap();
    let request = |placed| {
        Record::Request(
            key(),
            RequestRow {
                fingerprint: Fingerprint::of([("item", "notebook")]),
                registered_at: ms(0),
                placed,
            },
        )
    };
    goes(&request(Some(Placed { order: name("o"), events: vec![name("e")], at: AT })), None);
    stays(request(None));

    let order = Record::Order(
        name("o"),
        OrderRow { request: key(), committed_at: AT, body: text("order") },
    );
    goes(&order, None);
    let kept = Retention { orders: None, ..Retention::default() }.checked(&hasty()).unwrap();
    let purge = decide(&Purge::new(&kept, Table::Orders, limit(10)), &[stored(5, order)]);
    assert_eq!(purge, writes([], Purged { removed: 0, next: None }));
}

#[test]
fn what_consumers_keep() {
    let inbox = |state, at, effect| {
        let content = Fingerprint::of([("a", "b")]).digest();
        Record::Inbox(
            name("c"),
            name("e"),
            InboxRow { content, at, state, failures: 0, reason: None, effect },
        )
    };
    goes(&inbox(InboxState::Applied, AT, false), None);
    goes(&inbox(InboxState::Applied, AT, true), Some(Key::Effect(name("c"), name("e"))));
    stays(inbox(InboxState::Failing, ms(0), false));
    stays(inbox(InboxState::Poisoned, ms(0), false));

    let position =
        Record::Position(name("c"), name("k"), PositionRow { begun: ms(0), sequence: 1, at: AT });
    goes(&position, None);
    let kept = Retention { positions: None, ..Retention::default() }.checked(&hasty()).unwrap();
    let purge = decide(&Purge::new(&kept, Table::Positions, limit(10)), &[stored(5, position)]);
    assert_eq!(purge, writes([], Purged { removed: 0, next: None }));

    let call = |state, at| {
        Record::Call(name("c"), name("e"), CallRow { state, at, starts: 1, note: None })
    };
    goes(&call(CallState::Done, AT), None);
    for state in [CallState::Intended, CallState::Started, CallState::Unknown] {
        stays(call(state, ms(0)));
    }
}

/// F16: page by page, and the next one begins after the last row that was looked at, whether it
/// went or stayed.
#[test]
fn a_page_is_full_or_the_last() {
    let kept = retention(Retention::SHORTEST);
    let confirmed = |id| {
        stored(5, outbox(id, OutboxRow { state: DeliveryState::Confirmed(AT), ..pending("a", 1) }))
    };
    let rows = [confirmed("e1"), confirmed("e2"), stored(5, outbox("e3", pending("a", 3)))];
    for (most, next) in [(3, Some(Key::Outbox(name("e3")))), (4, None)] {
        let purged = decide(&Purge::new(&kept, Table::Outbox, limit(most)), &rows).unwrap().outcome;
        assert_eq!(purged, Purged { removed: 2, next });
    }
    let purge = Purge::new(&kept, Table::Outbox, limit(3));
    assert_eq!(purge.query(NOW), Query::Walk { table: Table::Outbox, after: None, limit: 3 });
    let after = Some(Key::Lane(name("a")));
    let expected = Query::Walk { table: Table::Lanes, after: after.clone(), limit: 3 };
    assert_eq!(purge.after(Key::Lane(name("a"))).query(NOW), expected);
}

/// Between two deliveries of an event without an answer there is a lease, as often as it has
/// starts; an inbox that is kept for less forgets an event that comes again (P5, P7).
#[test]
fn an_inbox_remembers_an_event_as_long_as_its_leases_run_out() {
    let policy = Checked::<DeliveryPolicy>::default();
    let kept = Retention { inbox: policy.longest_retry() * 2, ..Retention::default() }
        .checked(&policy)
        .unwrap();
    let (shop, stockroom) = (MemoryStore::new(), MemoryStore::new());
    let request = Request::new("s", "r", Fingerprint::of([("a", "b")])).unwrap();
    let body = Body::text("b").unwrap();
    let order =
        CommitOrder::new(&request, name("o"), body.clone(), [Draft::new("t", body).unwrap()])
            .unwrap();
    let mut now = ms(1_000_000);
    let _ = shop.run(&order, now).unwrap();
    let inbox = Inbox::new(&stockroom, name("c"));
    let mut applied = 0;
    // The longest lease that relays are allowed; each of them dies after the event was received.
    let longest = policy.backoff_cap;
    let relay = |lease| RelaySettings { lease, ..RelaySettings::new(name("r")) }.checked();
    assert!(relay(longest + Duration::from_millis(1)).is_err());
    let relay = relay(longest).unwrap();
    for _ in 0..policy.max_starts {
        let claimed =
            shop.run(Claim::new(&relay.policy, name("r"), relay.lease, 1).unwrap(), now).unwrap();
        let delivery = &claimed.runs[0].deliveries[0];
        let rows =
            shop.view().unwrap().load(&Query::rows([Key::Event(delivery.event.clone())])).unwrap();
        let Record::Event(event) = rows.as_slice()[0].record.clone() else { panic!("no event") };
        let message = Message { event, place: delivery.place, attempt: delivery.attempt };
        let receipt = inbox.receive(&message, now, |_, _| Ok::<_, Reason>(Handled::Done)).unwrap();
        applied += u32::from(receipt == Receipt::Applied);
        now = now + longest;
        let _ = purge_all(&stockroom, &kept, limit(100), now).unwrap();
    }
    assert_eq!(applied, 1);
}
