//! Purge, row by row of its truth table: what goes, what stays, and at which age (P7).

use core::num::NonZeroU16;
use core::time::Duration;

use twobox::relay::RelaySettings;
use twobox::{
    Body, CallRow, CallState, Checked, Claim, CommitOrder, DeliveryPolicy, DeliveryState,
    Destination, Draft, Dump, EventRow, Fingerprint, Finished, Handled, Inbox, InboxRow,
    InboxState, Key, LaneRow, Millis, OrderRow, OutboxRow, PlacedOrder, PositionRow, Purge, Query,
    Reader, Reason, Receipt, Record, Request, RequestKey, RequestRow, Retention, Store, Table,
    Transition, purge_all,
};
use twobox_memory::MemoryStore;

use crate::support::{
    LANE, hasty, lane, lane_key, lease, ms, name, outbox, pending, store_of, text,
};

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

fn limit(rows: u16) -> NonZeroU16 {
    NonZeroU16::new(rows).unwrap()
}

/// The keys that a purge of this table removes from a store with these rows.
fn purged(table: Table, rows: &[Record], kept: &Checked<Retention>) -> Vec<Key> {
    let store = store_of(rows.iter().cloned());
    let purged = store.run(Purge::new(kept, table, limit(10)), NOW).unwrap();
    let left = Dump::of(&mut store.view().unwrap()).unwrap();
    let is_left = |key: &Key| left.records().iter().any(|record| record.key() == *key);
    let mut gone: Vec<Key> = rows.iter().map(Record::key).filter(|key| !is_left(key)).collect();
    gone.sort();
    let with_others = gone.iter().filter(|key| key.table() == table).count();
    assert_eq!((purged.removed, purged.next), (with_others, None));
    gone
}

/// The first row goes with these others once it is past its retention, and at it nothing does.
fn goes(rows: &[Record], with: &[Key]) {
    let table = rows[0].table();
    // Positions are kept twice as long as the rest.
    let kept = |age| retention(if table == Table::Positions { age / 2 } else { age });
    let mut gone = [&[rows[0].key()], with].concat();
    gone.sort();
    assert_eq!(purged(table, rows, &kept(AGE - Duration::from_millis(1))), gone);
    assert_eq!(purged(table, rows, &kept(AGE)), [], "{rows:?}");
}

/// However old it is.
fn stays(rows: &[Record]) {
    assert_eq!(purged(rows[0].table(), rows, &retention(Retention::SHORTEST)), []);
}

fn event(id: &str, sequence: u64, time: Millis) -> Record {
    let event = twobox::Event {
        destination: Destination::default(),
        id: name(id),
        order: name("o"),
        event_type: name("order.created"),
        schema_version: 1,
        ordering_key: name("a"),
        time,
        headers: twobox::Headers::new(),
        body: text("event"),
    };
    Record::Event(EventRow { event, sequence, due: time })
}

/// A lane that has moved past its first event, and has another one at 5 that is not due yet.
fn moved_on() -> Record {
    lane("a", LaneRow { next: 6, head: 2, due: Some(Millis::MAX), ..LANE })
}

#[test]
fn events() {
    // Confirmed, by its lane alone: it counts from its commit.
    goes(&[event("e", 1, AT), moved_on()], &[]);
    // Confirmed after failures.
    let failed = outbox("e", OutboxRow { failures: 3, ..pending("a", 1) });
    goes(&[event("e", 1, AT), moved_on(), failed], &[Key::Outbox(name("e"))]);
    for state in [DeliveryState::Discarded(AT), DeliveryState::Cancelled(AT)] {
        let row = outbox("e", OutboxRow { state, ..pending("a", 1) });
        goes(&[event("e", 1, ms(0)), moved_on(), row], &[Key::Outbox(name("e"))]);
    }
    // Pending, leased, redriven, dead.
    stays(&[event("e", 5, ms(0)), moved_on()]);
    let held = LaneRow { lease: Some(lease("me", 1, 5)), next: 6, head: 2, ..LANE };
    stays(&[event("e", 5, ms(0)), lane("a", LaneRow { due: Some(ms(1)), ..held })]);
    let row = outbox("e", OutboxRow { moved: true, ..pending("a", 5) });
    stays(&[event("e", 1, ms(0)), moved_on(), row]);
    let row = outbox("e", OutboxRow { state: DeliveryState::Dead(ms(0)), ..pending("a", 1) });
    stays(&[event("e", 1, ms(0)), moved_on(), row]);
}

/// A lane that was purged counts anew, so none of its events may be left.
#[test]
fn lanes() {
    let idle = || lane("a", LaneRow { next: 6, head: 6, changed_at: AT, ..LANE });
    goes(&[idle()], &[]);
    stays(&[idle(), event("e", 1, ms(0))]);
    stays(&[lane("a", LaneRow { next: 2, due: Some(ms(100)), ..LANE }), event("e", 1, ms(0))]);
    let blocked = LaneRow { next: 2, head: 2, blocked_by: Some(name("e")), ..LANE };
    let dead = outbox("e", OutboxRow { state: DeliveryState::Dead(ms(0)), ..pending("a", 1) });
    stays(&[lane("a", blocked), event("e", 1, ms(0)), dead]);
}

#[test]
fn requests_and_orders() {
    let key = || RequestKey::new("s", "r").unwrap();
    let request = |placed| {
        let fingerprint = Fingerprint::of([("item", "notebook")]);
        Record::Request(key(), RequestRow { fingerprint, registered_at: ms(0), placed })
    };
    let placed = PlacedOrder { order: name("o"), events: vec![name("e")], at: AT };
    goes(&[request(Some(placed.clone()))], &[]);
    stays(&[request(None)]);

    let order = OrderRow { request: key(), committed_at: AT, body: text("order") };
    let order = Record::Order(name("o"), order);
    goes(std::slice::from_ref(&order), &[]);
    let kept = Retention { orders: None, ..Retention::default() }.checked(&hasty()).unwrap();
    assert_eq!(purged(Table::Orders, &[order], &kept), []);
    // A key is kept for as long as its order (F53).
    assert_eq!(purged(Table::Requests, &[request(Some(placed))], &kept), []);
}

#[test]
fn what_consumers_keep() {
    let inbox = |state, at, effect| {
        let content = Fingerprint::of([("a", "b")]).digest();
        let row = InboxRow { content, at, state, failures: 0, reason: None, effect };
        Record::Inbox(name("c"), name("e"), row)
    };
    goes(&[inbox(InboxState::Applied, AT, false)], &[]);
    let effect = Record::Effect(name("c"), name("e"), text("points"));
    goes(&[inbox(InboxState::Applied, AT, true), effect.clone()], &[effect.key()]);
    stays(&[inbox(InboxState::Failing, ms(0), false)]);
    stays(&[inbox(InboxState::Poisoned, ms(0), false)]);

    let row = PositionRow { begun: ms(0), sequence: 1, at: AT };
    let position = Record::Position(name("c"), name("k"), row);
    goes(std::slice::from_ref(&position), &[]);
    let kept = Retention { positions: None, ..Retention::default() }.checked(&hasty()).unwrap();
    assert_eq!(purged(Table::Positions, &[position], &kept), []);

    let call = |state, at| {
        Record::Call(name("c"), name("e"), CallRow { state, at, starts: 1, note: None })
    };
    goes(&[call(CallState::Done, AT)], &[]);
    for state in [CallState::Intended, CallState::Started, CallState::Unknown] {
        stays(&[call(state, ms(0))]);
    }
}

/// What a purge asks for: what is finished and older than its retention, page by page. For what is
/// kept for ever, and at a time before which nothing can be old, it asks for nothing.
#[test]
fn what_a_purge_asks_for() {
    let kept = retention(AGE);
    let until = NOW.before(AGE + Duration::from_millis(1));
    let page = Purge::new(&kept, Table::Events, limit(3));
    let asked = |table, after| Query::Finished(Finished { table, until, after, limit: 3 });
    assert_eq!(page.query(NOW), asked(Table::Events, None));
    let key = Key::Lane(lane_key("a"));
    assert_eq!(page.clone().after(key.clone()).query(NOW), asked(Table::Lanes, Some(key)));
    assert_eq!(page.query(ms(600_000)), Query::none());
    assert!(page.query(ms(600_001)) != Query::none());
    let forever = Retention::default().checked(&hasty()).unwrap();
    for table in [Table::Orders, Table::Positions, Table::Outbox, Table::Effects] {
        assert_eq!(Purge::new(&forever, table, limit(3)).query(NOW), Query::none());
    }
    assert!(page.assume(NOW).is_none());
}

/// F16: page by page, and the next one begins after the last row that was removed.
#[test]
fn a_page_is_full_or_the_last() {
    let kept = retention(Retention::SHORTEST);
    let rows = [event("e1", 1, AT), event("e2", 2, AT), event("e3", 3, AT), {
        lane("a", LaneRow { next: 6, head: 4, due: Some(Millis::MAX), ..LANE })
    }];
    for (most, removed) in [(1, vec![1, 1, 1]), (2, vec![2, 1]), (4, vec![3])] {
        let store = store_of(rows.iter().cloned());
        let mut page = Some(Purge::new(&kept, Table::Events, limit(most)));
        let mut found = Vec::new();
        while let Some(next) = page {
            let purged = store.run(&next, NOW).unwrap();
            found.push(purged.removed);
            page = purged.next.map(|key| next.after(key));
        }
        // A page that was full may be followed by an empty one.
        found.retain(|removed| *removed > 0);
        assert_eq!(found, removed);
        let store = store_of(rows.iter().cloned());
        assert_eq!(purge_all(&store, &kept, limit(most), NOW).unwrap(), 3);
    }
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
        let message = &claimed.leased[0].events[0].message;
        let receipt = inbox.receive(message, now, |_, _| Ok::<_, Reason>(Handled::Done)).unwrap();
        applied += u32::from(receipt == Receipt::Applied);
        now = now + longest;
        let _ = purge_all(&stockroom, &kept, limit(100), now).unwrap();
    }
    assert_eq!(applied, 1);
}
