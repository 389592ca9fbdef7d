//! What went wrong when somebody looked after a whole store: orders purged before their events,
//! limits lowered over events that were waiting, dead events put back in another order (F43 to F47).

use core::num::NonZeroU16;
use core::time::Duration;
use std::cell::Cell;

use twobox::{
    Cancel, Checked, Claim, CommitOrder, DeliveryPolicy, Discard, Ending, EventId, Leased, Millis,
    NotDone, OrderId, PassOver, Purge, Reader, Reason, Record, Retention, Settle, Store, Table,
    WhenDead, pass_over_all, purge_all, redrive_all,
};

use crate::support::{
    at, body, draft, dump, lane_key, name, outbox, place, request, state, window,
};

const LEASE: Duration = Duration::from_secs(30);
const DAY: Duration = Duration::from_secs(24 * 3600);

fn policy(when_dead: WhenDead) -> Checked<DeliveryPolicy> {
    DeliveryPolicy { when_dead, ..DeliveryPolicy::default() }.checked().unwrap()
}

fn claim<S: Store>(store: &S, policy: &Checked<DeliveryPolicy>, now: Millis) -> Vec<Leased> {
    store.run(Claim::new(policy, name("relay"), LEASE, 4096).unwrap(), now).unwrap().leased
}

/// Confirms the first event of a lane, or rejects it.
fn settle<S: Store>(
    store: &S,
    policy: &Checked<DeliveryPolicy>,
    leased: &Leased,
    rejected: bool,
    now: Millis,
) {
    let settlement = if rejected {
        leased.settle(0, Some(Ending::Rejected(Reason::new("no"))))
    } else {
        leased.settle(leased.events.len(), None)
    };
    let settled = store.run(Settle::new(policy, [settlement]), now).unwrap();
    assert_eq!(settled.stale, []);
}

fn orders<S: Reader>(store: &S) -> Vec<OrderId> {
    let dump = dump(store);
    let orders = dump.records().iter().filter_map(|record| {
        if let Record::Order(id, _) = record { Some(id.clone()) } else { None }
    });
    orders.collect()
}

/// Many events of two lanes are dead, with names that do not sort as they stand, and all are
/// redriven, or all of one type: they come in the order in which they stood, also those that are
/// dead a second time (P4).
#[test]
fn f43_what_is_redriven_keeps_the_order_of_its_lane() {
    on_each_store!(|store: S| {
        let policy = policy(WhenDead::Continue);
        let mut lanes = [Vec::new(), Vec::new()];
        for n in 0..600_usize {
            // The names of later events sort first, and those of the lanes alternate.
            let (lane, event_type) = (n % 2, ["even", "odd"][n / 2 % 2]);
            let id = name::<EventId>(&format!("{:04}-{}", (n * 7 + 5) % 600, 9_999 - n));
            place(
                store,
                &format!("o{n}"),
                [draft(event_type, ["a", "b"][lane]).id(id.clone())],
                at(0),
            );
            lanes[lane].push(id);
        }
        let bury = |count: usize, now| {
            for _ in 0..count {
                for leased in claim(store, &policy, now) {
                    settle(store, &policy, &leased, true, now);
                }
            }
        };
        let standing = |ids: &[EventId]| {
            let dump = dump(store);
            let events = dump.events();
            let mut standing: Vec<EventId> = ids.to_vec();
            standing.sort_by_key(|id| events[id].1.sequence);
            standing
        };
        bury(300, at(1));
        let event_type = twobox::EventType::new("odd").unwrap();
        let done = redrive_all(store, Some(&event_type), window(), at(2)).unwrap();
        assert_eq!((done.done.len(), done.refused.len()), (300, 0));
        let odd = |ids: &[EventId]| -> Vec<EventId> {
            ids.iter().enumerate().filter(|(n, _)| n % 2 == 1).map(|(_, id)| id.clone()).collect()
        };
        for ids in &lanes {
            assert_eq!(standing(&odd(ids)), odd(ids));
        }
        bury(150, at(3));
        assert_eq!(redrive_all(store, None, window(), at(4)).unwrap().done.len(), 600);
        for ids in &mut lanes {
            // What was redriven once stands behind what was not.
            let mut right = ids.clone();
            right.retain(|id| !odd(ids).contains(id));
            right.extend(odd(ids));
            assert_eq!(standing(&right), right);
        }
    });
}

/// In a lane that waits for one of its dead events, that one keeps its place and comes first; those
/// that were passed over before come behind, in their order (P4).
#[test]
fn f43_what_a_lane_waits_for_comes_first() {
    on_each_store!(|store: S| {
        let ids = place(store, "o", (0..4).map(|_| draft("t", "k")), at(0));
        for when_dead in [WhenDead::Continue, WhenDead::Continue, WhenDead::Block] {
            let policy = policy(when_dead);
            settle(store, &policy, &claim(store, &policy, at(1))[0], true, at(1));
        }
        assert_eq!(redrive_all(store, None, window(), at(2)).unwrap().done.len(), 3);
        let places: Vec<u64> = ids.iter().map(|id| outbox(store, id).sequence).collect();
        assert_eq!(places, [5, 6, 3, 4]);
    });
}

/// An event has failed many times, each time with an answer, and then the limits are lowered, to any
/// number: it is tried once more before it is given up, and then for the reason that the broker gave
/// (F4 counts what was not answered).
#[test]
fn f44_a_lowered_limit_leaves_a_try_to_what_was_answered() {
    on_each_store!(|store: S| {
        let generous = policy(WhenDead::Continue);
        let mut now = at(0);
        for (max_failures, max_starts) in [(1, 2), (2, 3), (7, 8), (8, 9), (9, 10), (1, 24)] {
            let lowered = DeliveryPolicy { max_failures, max_starts, ..DeliveryPolicy::default() };
            let lowered = lowered.checked().unwrap();
            let tag = format!("{max_failures}-{max_starts}");
            let fail = |policy: &Checked<DeliveryPolicy>, now| {
                let leased = claim(store, policy, now).remove(0);
                let failed = leased.settle(0, Some(Ending::Failed(Reason::new("not today"))));
                let _ = store.run(Settle::new(policy, [failed]), now).unwrap();
            };
            let id = place(store, &tag, [draft("t", &tag)], now).remove(0);
            for _ in 0..8 {
                fail(&generous, now);
                now = now + generous.backoff_cap;
            }
            assert_eq!((state(store, &id), outbox(store, &id).failures), ("pending", 8));
            fail(&lowered, now);
            let row = outbox(store, &id);
            assert_eq!((row.starts, row.failures), (9, 9), "it was tried under {tag}");
            assert_eq!(row.reason, Some(Reason::new("not today")));
            let dead = max_failures <= 9;
            assert_eq!(state(store, &id), if dead { "dead" } else { "pending" });
            let given_up = Discard::new([id], Reason::new("end of the round")).unwrap();
            assert_eq!(store.run(given_up, now).unwrap().done.len(), 1);
        }
    });
}

/// A failure that was the last start is answered: the event is dead by that, and not for bringing
/// the relay down.
#[test]
fn f44_what_was_answered_is_not_dead_for_want_of_an_answer() {
    on_each_store!(|store: S| {
        let policy = DeliveryPolicy { max_failures: 3, max_starts: 4, ..DeliveryPolicy::default() };
        let policy = policy.checked().unwrap();
        let id = place(store, "o", [draft("t", "k")], at(0)).remove(0);
        // Three starts without an answer, then one that fails.
        let mut now = at(0);
        for _ in 0..3 {
            let leased = claim(store, &policy, now);
            assert_eq!(leased.len(), 1);
            now = leased[0].until;
        }
        let leased = claim(store, &policy, now).remove(0);
        let failed = leased.settle(0, Some(Ending::Failed(Reason::new("not today"))));
        let settled = store.run(Settle::new(&policy, [failed]), now).unwrap();
        assert_eq!(settled.dead, [(id.clone(), lane_key("k"))]);
        let row = outbox(store, &id);
        assert_eq!((row.starts, row.reason), (4, Some(Reason::new("not today"))));
    });
}

/// The rule is changed from waiting to going on, with many lanes that wait: one command lets all of
/// them go on, in their order, and the dead events stay dead. It takes the write turn only where a
/// lane waits (P3, P4).
#[test]
fn f45_lanes_that_wait_go_on_when_the_rule_is_changed() {
    on_each_store!(|store: S| {
        let (block, goes_on) = (policy(WhenDead::Block), policy(WhenDead::Continue));
        let mut ids = Vec::new();
        for n in 0..300 {
            let events = (0..3).map(|_| draft("t", &format!("k-{n}")));
            ids.push(place(store, &format!("o-{n:03}"), events, at(0)));
        }
        for leased in claim(store, &block, at(1)) {
            settle(store, &block, &leased, true, at(1));
        }
        // The new rule alone frees nothing: what a lane waits for was decided before.
        assert_eq!(claim(store, &goes_on, at(2)).len(), 0);
        let watched = Watched { store, looks: Cell::new(0), begun: Cell::new(0) };
        let first: Vec<EventId> = ids.iter().map(|ids| ids[0].clone()).collect();
        assert_eq!(pass_over_all(&watched, at(2)).unwrap(), first);
        assert_eq!(watched.begun.get(), 2);
        let claimed = claim(store, &goes_on, at(3));
        assert_eq!(claimed.len(), 300);
        for leased in &claimed {
            settle(store, &goes_on, leased, false, at(3));
        }
        for ids in ids.iter().take(5) {
            assert_eq!([state(store, &ids[0]), state(store, &ids[1])], ["dead", "confirmed"]);
            assert_eq!(state(store, &ids[2]), "confirmed");
        }
        // A second time there is nothing to do.
        assert_eq!(pass_over_all(&watched, at(4)).unwrap(), []);
        assert_eq!(watched.begun.get(), 2);
        let nothing = store.run(PassOver::new([first[0].clone()]).unwrap(), at(4)).unwrap();
        assert!(matches!(nothing.refused[..], [(_, NotDone::State { .. })]));
        // They are redriven and discarded as ever.
        assert_eq!(redrive_all(store, None, window(), at(5)).unwrap().done.len(), 300);
    });
}

/// A store that counts transactions, and in which somebody else commits an order at each look: who
/// holds the write turn then waits for ever.
struct Watched<S: 'static> {
    store: &'static S,
    looks: Cell<u32>,
    begun: Cell<u32>,
}

impl<S: Store> Reader for Watched<S> {
    type Error = S::Error;
    type View<'a>
        = S::View<'a>
    where
        Self: 'a;

    fn view(&self) -> Result<S::View<'_>, S::Error> {
        self.looks.set(self.looks.get() + 1);
        let order = format!("during-{}", self.looks.get());
        place(self.store, &order, [draft("t", &order)], at(0) + DAY * 400);
        self.store.view()
    }
}

impl<S: Store> Store for Watched<S> {
    type Tx<'a>
        = S::Tx<'a>
    where
        Self: 'a;

    fn begin(&self) -> Result<S::Tx<'_>, S::Error> {
        self.begun.set(self.begun.get() + 1);
        self.store.begin()
    }
}

/// A purge takes the write turn for no page in which nothing goes, however many it looks at, and
/// keeps it for no longer than one page (P7).
#[test]
fn f46_a_purge_takes_the_write_turn_only_where_something_goes() {
    on_each_store!(|store: S| {
        let policy = policy(WhenDead::Continue);
        let kept = Retention { orders: Some(DAY * 30), ..Retention::default() };
        let kept = kept.checked(&policy).unwrap();
        let page = NonZeroU16::new(2).unwrap();
        let watched = Watched { store, looks: Cell::new(0), begun: Cell::new(0) };
        // Of all that is old nothing may go: it is pending, or dead, or belongs to such an event.
        for n in 0..100 {
            place(store, &format!("old-{n}"), [draft("t", &format!("k-{n}"))], at(0));
        }
        for leased in claim(store, &policy, at(0)).iter().take(50) {
            settle(store, &policy, leased, true, at(0));
        }
        let late = at(0) + DAY * 400;
        assert_eq!(purge_all(&watched, &kept, page, late).unwrap(), 0);
        assert!(watched.looks.get() > 7, "it has looked at more than one page of a table");
        assert_eq!(watched.begun.get(), 0);
        // The others are confirmed: now there is something to remove, two rows at a time.
        for leased in claim(store, &policy, at(0) + LEASE * 2) {
            settle(store, &policy, &leased, false, at(0) + LEASE * 2);
        }
        let orders = watched.looks.get();
        let removed = purge_all(&watched, &kept, page, late).unwrap();
        // Event, lane, request and order of each.
        assert_eq!(removed, 200);
        assert!((100..=110).contains(&watched.begun.get()), "{}", watched.begun.get());
        // Whoever had something to commit between two pages has committed it.
        let during = watched.looks.get() - orders;
        assert!(during > 100, "each page is looked at before, in {during} looks");
        assert_eq!(
            u32::try_from(dump(store).count(Table::Orders)).unwrap(),
            50 + watched.looks.get()
        );
        watched.begun.set(0);
        assert_eq!(purge_all(&watched, &kept, page, late).unwrap(), 0);
        assert_eq!(watched.begun.get(), 0);
    });
}

/// Orders have a retention, and one of an order's events is pending, leased, failed or dead: the
/// order stays, and so does what its request is bound to (P1 to P3), whatever their age, in pages of
/// any size. Once the event is confirmed, cancelled or discarded, they go.
#[test]
fn f47_an_order_stays_until_its_events_are_finished() {
    on_each_store!(|store: S| {
        let policy = policy(WhenDead::Continue);
        let kept = Retention { orders: Some(DAY * 30), ..Retention::default() };
        let kept = kept.checked(&policy).unwrap();
        let mut now = at(0);
        for (n, standing) in ["pending", "leased", "failed", "dead"].into_iter().enumerate() {
            for page in [1, 2, 100] {
                let tag = format!("{standing}-{page}");
                // One event has a name that says nothing of its order, and another one of the order
                // is confirmed and gone.
                let waits = draft("t", &format!("{tag}-waits")).id(name(&format!("w{n}-{page}")));
                let ids = place(store, &tag, [draft("t", &format!("{tag}-done")), waits], now);
                place(store, &format!("{tag}-done"), [draft("t", &format!("{tag}-2"))], now);
                for leased in claim(store, &policy, now) {
                    let waits = leased.lease.lane == lane_key(&format!("{tag}-waits"));
                    match standing {
                        "pending" if waits => {
                            let _ =
                                store.run(Settle::new(&policy, [leased.release()]), now).unwrap();
                        }
                        "leased" if waits => {}
                        "failed" if waits => {
                            let failed = leased.settle(0, Some(Ending::Failed(Reason::new("no"))));
                            let _ = store.run(Settle::new(&policy, [failed]), now).unwrap();
                        }
                        _ => settle(store, &policy, &leased, waits, now),
                    }
                }
                let page = NonZeroU16::new(page).unwrap();
                for _ in 0..2 {
                    now = now + DAY * 40;
                    purge_all(store, &kept, page, now).unwrap();
                    assert_eq!(orders(store), [name::<OrderId>(&tag)], "{standing}");
                    assert_eq!(dump(store).count(Table::Requests), 1, "{standing}");
                    assert!(!dump(store).events().contains_key(&ids[0]));
                }
                // The same request is answered with the first outcome.
                assert_eq!(
                    place(
                        store,
                        &tag,
                        [
                            draft("t", &format!("{tag}-done")),
                            draft("t", "k").id(name(&format!("w{n}-{page}")))
                        ],
                        now
                    ),
                    ids
                );
                let waits: EventId = ids[1].clone();
                if standing == "dead" {
                    let discard = Discard::new([waits.clone()], Reason::new("given up")).unwrap();
                    assert_eq!(store.run(discard, now).unwrap().done.len(), 1);
                } else if standing == "leased" {
                    settle(store, &policy, &claim(store, &policy, now)[0], false, now);
                    assert_eq!(state(store, &waits), "confirmed");
                } else {
                    let cancel = Cancel::new([waits.clone()], Reason::new("no more")).unwrap();
                    assert_eq!(store.run(cancel, now).unwrap().done.len(), 1);
                }
                purge_all(store, &kept, page, now).unwrap();
                assert_eq!(orders(store), [], "{standing}");
                assert_eq!(dump(store).count(Table::Requests), 0);
                now = now + DAY * 8;
                purge_all(store, &kept, page, now).unwrap();
                assert_eq!(dump(store).records(), [], "{standing}");
            }
        }
    });
}

/// The key of a request that is gone is bound anew, to nothing or to another order: that keeps no
/// order but its own.
#[test]
fn f47_an_order_whose_key_is_bound_anew_is_not_kept_for_it() {
    on_each_store!(|store: S| {
        let policy = policy(WhenDead::Continue);
        let kept = Retention {
            requests: DAY * 10,
            events: DAY,
            orders: Some(DAY * 30),
            ..Retention::default()
        };
        let kept = kept.checked(&policy).unwrap();
        let page = NonZeroU16::new(10).unwrap();
        place(store, "old", [draft("t", "k")], at(0));
        settle(store, &policy, &claim(store, &policy, at(0))[0], false, at(0));
        // Whoever purges dies before it comes to the orders.
        for table in [Table::Events, Table::Requests] {
            let purged = store.run(Purge::new(&kept, table, page), at(0) + DAY * 31).unwrap();
            assert_eq!(purged.removed, 1, "{table:?}");
        }
        assert_eq!((dump(store).count(Table::Requests), orders(store).len()), (0, 1));
        let again = request("old");
        let events = [draft("t", "k").id(name("another"))];
        let order = CommitOrder::new(&again, name("new"), body("an order"), events);
        let placed = store.run(order.unwrap(), at(0) + DAY * 32).unwrap();
        assert_eq!(placed.placed.order, name::<OrderId>("new"));
        purge_all(store, &kept, page, at(0) + DAY * 40).unwrap();
        assert_eq!(orders(store), [name::<OrderId>("new")]);
    });
}
