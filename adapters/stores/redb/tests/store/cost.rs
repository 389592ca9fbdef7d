//! What is asked of the disk, counted: syncs for each step of an order's life, and bytes that do
//! not grow with what lies in the store.

use std::convert::Infallible;
use std::mem;
use std::time::Duration;

use redb::Builder;
use twobox::relay::{Relay, RelaySettings};
use twobox::{
    Body, Checked, Claim, Claimed, CommitOrder, Consumer, DeliveryPolicy, Destination, Digest,
    Draft, Event, EventRow, EventType, Fingerprint, Handled, Headers, InProcess, Inbox, InboxRow,
    InboxState, LaneKey, LaneRow, Leased, Message, Moment, OrderId, OrderRow, Owner, PlacedOrder,
    Receive, Record, Register, Request, RequestKey, RequestRow, RunError, Settle, Store,
};
use twobox_redb::{RedbOptions, RedbStore};

use crate::common::{Disk, at, event, event_row, fill, lane, lane_row};
use crate::counted::{Counted, Counts};

const NOW: twobox::Millis = at(10_000);

fn store() -> (Counted, RedbStore) {
    let storage = Counted::default();
    let store = RedbStore::create_on(storage.clone()).unwrap();
    (storage, store)
}

fn unsynced() -> RedbOptions {
    RedbOptions::new().sync_deliveries(false)
}

fn request(n: usize) -> Request {
    Request::new("shop", format!("new-{n:07}"), Fingerprint::of([("item", "notebook")])).unwrap()
}

fn order(request: &Request, n: usize) -> CommitOrder<'_> {
    let body = Body::text("x".repeat(100)).unwrap();
    let event = Draft::new("order.created", body.clone()).unwrap();
    CommitOrder::new(request, OrderId::new(format!("new-{n:07}")).unwrap(), body, [event]).unwrap()
}

fn place(store: &RedbStore, orders: std::ops::Range<usize>) {
    let placed = store
        .write(NOW, |tx| orders.clone().try_for_each(|n| tx.run(order(&request(n), n)).map(drop)));
    placed.map_err(RunError::flatten).unwrap();
}

/// P1, P2: one sync for each commit, and none where nothing is written.
#[test]
fn an_order_costs_one_sync_or_two() {
    let (storage, store) = store();
    let request = request(1);
    let ((), together) = storage.of(|| drop(store.run(order(&request, 1), NOW).unwrap()));
    let ((), again) = storage.of(|| drop(store.run(order(&request, 1), NOW).unwrap()));
    assert_eq!((together.syncs, again.syncs), (1, 0));

    let request = self::request(2);
    let ((), register) = storage.of(|| drop(store.run(Register::new(&request), NOW).unwrap()));
    let ((), commit) = storage.of(|| drop(store.run(order(&request, 2), NOW).unwrap()));
    assert_eq!((register.syncs, commit.syncs), (1, 1));

    let ((), many) = storage.of(|| place(&store, 3..259));
    assert_eq!(many.syncs, 1);
}

/// P3, P5: to deliver n events in batches of b, the sender syncs n / b + 1 times, since each batch
/// is settled with the next claim, and the receiver n / b times.
#[test]
fn deliveries_cost_a_sync_a_batch_on_each_side() {
    for (events, batch) in [(16, 1), (64, 16), (256, 64), (256, 256)] {
        let (sender, shop) = store();
        let (receiver, loyalty) = store();
        place(&shop, 0..events);
        let settings = RelaySettings {
            window: batch,
            run: 1,
            ..RelaySettings::new(Owner::new("relay-1").unwrap())
        };
        let inbox = Inbox::new(&loyalty, Consumer::new("loyalty").unwrap());
        let publisher = InProcess::new(inbox, |_, _: &Message| Ok::<_, Infallible>(Handled::Done));
        let mut relay = Relay::new(&shop, publisher, settings, Moment::steady(NOW)).unwrap();
        let ((confirmed, received), sent) = sender
            .of(|| receiver.of(|| relay.run_until_idle(Moment::steady(NOW)).unwrap().confirmed));
        assert_eq!(confirmed, events as u64);
        assert_eq!(
            (sent.syncs, received.syncs),
            (events / batch + 1, events / batch),
            "{events} events in batches of {batch}"
        );
        // Nothing to do costs nothing.
        let (_, idle) = sender.of(|| relay.run_until_idle(Moment::steady(NOW)).unwrap());
        assert_eq!(idle.syncs, 0);
    }
}

/// P3, P5: with deliveries that are not synced the sender syncs not at all, what is lost when the
/// power fails is delivered again, and the inbox absorbs it. Everything else is synced as ever, and
/// brings the deliveries before it along.
#[test]
fn deliveries_that_are_not_synced_come_again_after_a_power_cut() {
    let disk = Disk::default();
    let (_, loyalty) = store();
    let deliver = |shop: &RedbStore| {
        let mut handled = 0;
        let inbox = Inbox::new(&loyalty, Consumer::new("loyalty").unwrap());
        let publisher = InProcess::new(inbox, |_, _: &Message| {
            handled += 1;
            Ok::<_, Infallible>(Handled::Done)
        });
        let settings = RelaySettings {
            window: 4,
            run: 1,
            ..RelaySettings::new(Owner::new("relay-1").unwrap())
        };
        let confirmed = Relay::new(shop, publisher, settings, Moment::steady(NOW))
            .unwrap()
            .run_until_idle(Moment::steady(NOW))
            .unwrap()
            .confirmed;
        (confirmed, handled)
    };
    let shop = unsynced().create_on(disk.clone()).unwrap();
    place(&shop, 0..8);
    assert_eq!(deliver(&shop), (8, 8));
    let cut = Disk::with(disk.bytes());
    let after = unsynced().open_on(cut.clone()).unwrap();
    assert_eq!(deliver(&after), (8, 0), "all come again, and none is handled again");
    place(&after, 8..9);
    let after = RedbStore::open_on(Disk::with(cut.bytes())).unwrap();
    assert_eq!(
        deliver(&after),
        (1, 1),
        "the order's commit has made the deliveries before it durable"
    );
}

#[test]
fn deliveries_that_are_not_synced_cost_no_sync() {
    let sender = Counted::default();
    let shop = unsynced().create_on(sender.clone()).unwrap();
    let (_, loyalty) = store();
    place(&shop, 0..64);
    let inbox = Inbox::new(&loyalty, Consumer::new("loyalty").unwrap());
    let publisher = InProcess::new(inbox, |_, _: &Message| Ok::<_, Infallible>(Handled::Done));
    let settings =
        RelaySettings { window: 16, run: 1, ..RelaySettings::new(Owner::new("relay-1").unwrap()) };
    let mut relay = Relay::new(&shop, publisher, settings, Moment::steady(NOW)).unwrap();
    let (confirmed, counts) =
        sender.of(|| relay.run_until_idle(Moment::steady(NOW)).unwrap().confirmed);
    assert_eq!((confirmed, counts.syncs), (64, 0));
    let ((), counts) = sender.of(|| place(&shop, 64..65));
    assert_eq!(counts.syncs, 1);
}

/// F4: a start that is not synced is not counted when the process is killed, unless something else
/// was committed since.
#[test]
fn starts_that_are_not_synced_are_forgotten() {
    let policy = Checked::<DeliveryPolicy>::default();
    for (synced, starts) in [(true, [1, 2, 3]), (false, [1, 1, 1])] {
        let disk = Disk::default();
        let shop = RedbStore::create_on(disk.clone()).unwrap();
        place(&shop, 0..1);
        shop.close().unwrap();
        let mut bytes = disk.bytes();
        let lives = [1, 2, 3].map(|life| {
            let disk = Disk::with(mem::take(&mut bytes));
            let shop = RedbOptions::new().sync_deliveries(synced).open_on(disk.clone()).unwrap();
            let claim =
                Claim::new(&policy, Owner::new("relay-1").unwrap(), Duration::from_secs(1), 1)
                    .unwrap();
            let claimed = shop.run(claim, at(life * 10_000_000)).unwrap();
            // Killed: what was written by then is there, and nothing is closed.
            bytes = disk.bytes();
            claimed.leased[0].events[0].message.attempt
        });
        assert_eq!(lives, starts);
    }
}

/// Orders that were delivered, applied and confirmed.
fn done(n: usize) -> [Record; 5] {
    let name = format!("done-{n:07}");
    let (id, key, order) = (event(&format!("{name}/1")), lane(&name), OrderId::new(&name).unwrap());
    let (request, body) =
        (RequestKey::new("shop", &name).unwrap(), Body::text("x".repeat(100)).unwrap());
    let placed =
        Some(PlacedOrder { order: order.clone(), events: vec![id.clone()], at: at(1_000) });
    let content = Digest::of_parts("done", [name.as_bytes()]);
    [
        Record::Request(
            request.clone(),
            RequestRow {
                fingerprint: Fingerprint::of([("item", "notebook")]),
                registered_at: at(1_000),
                placed,
            },
        ),
        Record::Order(
            order.clone(),
            OrderRow { request, committed_at: at(1_000), body: body.clone() },
        ),
        Record::Event(EventRow {
            sequence: 1,
            due: at(1_000),
            event: Event {
                destination: Destination::default(),
                id: id.clone(),
                order,
                event_type: EventType::new("order.created").unwrap(),
                schema_version: 1,
                ordering_key: key.clone(),
                time: at(1_000),
                headers: Headers::new(),
                body,
            },
        }),
        Record::Lane(key.into(), LaneRow { next: 2, head: 2, confirmed: 1, ..lane_row(None) }),
        Record::Inbox(
            Consumer::new("loyalty").unwrap(),
            id,
            InboxRow {
                content,
                at: at(2_000),
                state: InboxState::Applied,
                failures: 0,
                reason: None,
                effect: false,
            },
        ),
    ]
}

/// Events of one lane, which wait for the first one, and that for another hour.
fn waiting(events: usize) -> Vec<Record> {
    let key = lane("stuck");
    let lane = LaneRow {
        next: events as u64 + 1,
        confirmed: 0,
        ..lane_row(Some(NOW + Duration::from_secs(3_600)))
    };
    let rows = (1..=events).map(|n| {
        let row = event_row(&format!("stuck-{n:07}"), &key, n as u64, 1);
        Record::Event(EventRow { due: NOW + Duration::from_secs(3_600), ..row })
    });
    rows.chain([Record::Lane(key.clone().into(), lane)]).collect()
}

/// A closed store in which `orders` are delivered, and `stuck` events wait in one lane.
fn filled(orders: usize, stuck: usize) -> Counted {
    let (storage, store) = store();
    for from in (0..orders).step_by(2_000) {
        fill(&store, (from..orders.min(from + 2_000)).flat_map(done).collect());
    }
    if stuck > 0 {
        fill(&store, waiting(stuck));
    }
    store.close().unwrap();
    storage
}

/// What each step asks of a copy of this store, for so many orders. With a cache of no bytes every
/// visit of a page is a read; with redb's default, a page is written once a commit.
fn steps(storage: &Counted, orders: usize, cache: Option<usize>) -> Vec<(&'static str, Counts)> {
    let storage = storage.copy();
    let mut builder = Builder::new();
    cache.map(|bytes| builder.set_cache_size(bytes));
    let store =
        RedbStore::with_database(builder.create_with_backend(storage.clone()).unwrap()).unwrap();
    // The first commit after opening costs more.
    place(&store, 8_000_000..8_000_001);
    let claim = |limit: usize| {
        let policy = Checked::<DeliveryPolicy>::default();
        let claim =
            Claim::new(&policy, Owner::new("relay-1").unwrap(), Duration::from_secs(30), limit)
                .unwrap();
        store.run(claim, NOW).unwrap()
    };
    assert_eq!(claim(1).leased.len(), 1);
    let consumer = Consumer::new("loyalty").unwrap();
    let mut counts = Vec::new();
    let mut step = |name, work: &mut dyn FnMut()| counts.push((name, storage.of(work).1));
    step("register", &mut || {
        let registered = store.write(NOW, |tx| {
            (0..orders).try_for_each(|n| tx.run(Register::new(&request(n))).map(drop))
        });
        registered.map_err(RunError::flatten).unwrap();
    });
    step("place", &mut || place(&store, 0..orders));
    let mut claimed = Claimed::default();
    step("claim", &mut || claimed = claim(orders));
    assert_eq!(claimed.leased.len(), orders);
    step("receive", &mut || {
        let received = store.write(NOW, |tx| {
            (0..orders).try_for_each(|n| {
                let [_, _, Record::Event(EventRow { event, .. }), ..] = done(9_000_000 + n) else {
                    panic!("it is an event")
                };
                tx.run(Receive::new(consumer.clone(), &event)).map(drop)
            })
        });
        received.map_err(RunError::flatten).unwrap();
    });
    step("settle", &mut || {
        let results: Vec<_> =
            claimed.leased.iter().map(|next: &Leased| next.settle(1, None)).collect();
        assert_eq!(
            store.run(Settle::new(&Checked::default(), results), NOW).unwrap().confirmed,
            orders
        );
    });
    counts
}

/// With `orders` delivered ones, or with `stuck` events that wait behind one lane's head, each step
/// reads and writes little more than with 1,000 delivered orders, in percent: a page for each level
/// by which a tree is deeper, and nothing for what lies in it.
fn cost_does_not_grow(orders: usize, stuck: usize, percent: usize) {
    let (base, delivered, waiting) = (filled(1_000, 0), filled(orders, 0), filled(1_000, stuck));
    let mut more = Vec::new();
    // Visits of pages, for a single order; and bytes written, for a single one and for many.
    for (count, cache) in [(1, Some(0)), (1, None), (64, None)] {
        let counted = |storage| {
            let (steps, read) = (steps(storage, count, cache), cache.is_some());
            steps
                .into_iter()
                .map(move |(step, counts)| (step, if read { counts.read } else { counts.written }))
        };
        for (what, grown) in [("delivered", &delivered), ("waiting", &waiting)] {
            for ((step, base), (_, grown)) in counted(&base).zip(counted(grown)) {
                let kind = if cache.is_some() { "read" } else { "written" };
                let line = format!("{what}, {step} {count}: {base} bytes {kind}, now {grown}");
                println!("{line}");
                if 100 * grown > percent * base {
                    more.push(line);
                }
            }
        }
    }
    assert_eq!(more, Vec::<String>::new());
}

/// A claim that leaves out a destination reads with 20,000 lanes that are due there what it reads with 200,
/// but for a page for each level by which the trees are deeper; and a claim from a single
/// destination likewise.
#[test]
fn what_waits_at_a_destination_that_is_left_out_costs_nothing() {
    let claim = |away: usize, choose: &dyn Fn(Claim<'static>) -> Claim<'static>| {
        let (storage, store) = store();
        let lanes = (0..away).map(|n| {
            let destination = Destination::new("away").unwrap();
            let key = LaneKey { destination, ordering_key: lane(&format!("k{n:05}")) };
            Record::Lane(key, lane_row(Some(at(1_000))))
        });
        fill(&store, lanes.collect());
        place(&store, 0..4);
        store.close().unwrap();
        let database = Builder::new().set_cache_size(0).create_with_backend(storage.clone());
        let store = RedbStore::with_database(database.unwrap()).unwrap();
        let policy: &'static Checked<DeliveryPolicy> = Box::leak(Box::default());
        let owner = Owner::new("relay-1").unwrap();
        let claim = Claim::new(policy, owner, Duration::from_secs(30), 4).unwrap();
        let (leased, counts) =
            storage.of(|| store.run(choose(claim.clone()), NOW).unwrap().leased.len());
        assert_eq!(leased, 4);
        counts.read
    };
    let except = |claim: Claim<'static>| claim.except([Destination::new("away").unwrap()]);
    let only = |claim: Claim<'static>| claim.only(Destination::default());
    for (what, choose) in
        [("except", &except as &dyn Fn(Claim<'static>) -> Claim<'static>), ("only", &only)]
    {
        let (few, many) = (claim(200, choose), claim(20_000, choose));
        println!("{what}: {few} bytes read, then {many}");
        assert!(2 * many <= 3 * few, "{what}: {few} bytes read, then {many}");
    }
}

#[test]
fn what_lies_in_the_store_costs_nothing() {
    cost_does_not_grow(30_000, 10_000, 150);
}

/// Here the trees are up to two levels deeper, which is most for a single order.
#[test]
#[ignore = "takes minutes; in a release build: cargo test --release -p twobox-redb --test store -- --ignored --nocapture a_million"]
fn a_million_delivered_orders_cost_nothing() {
    cost_does_not_grow(1_000_000, 100_000, 175);
}
