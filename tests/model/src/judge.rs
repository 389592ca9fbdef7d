//! What must hold: in each world, and between the tables before and after a step.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use twobox::relay::{Message, Published, Publisher, Relay, RelaySettings};
use twobox::{
    Claimed, DeliveryState, InboxState, Key, LaneRow, Millis, OutboxRow, Receive, Record, Redrive,
    Store, Table,
};
use twobox_memory::{MemoryStore, State};

use crate::scope::{
    Params, Scope, consumer, envelope, event_id, lane_of, named, number_of, order_of, owner,
};
use crate::step::Step;
use crate::world::{Copy, Db, Held, Promise, World};

/// What a transition said of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Judged {
    Current,
    Stale,
}

fn outbox(db: &Db) -> BTreeMap<u8, OutboxRow> {
    let rows = db.table(Table::Outbox);
    let rows = rows.filter_map(|record| {
        if let Record::Outbox(id, row) = record { Some((number_of(&id)?, row)) } else { None }
    });
    rows.collect()
}

fn lanes(db: &Db) -> BTreeMap<String, LaneRow> {
    let rows = db.table(Table::Lanes);
    let rows = rows.filter_map(|record| {
        if let Record::Lane(key, row) = record { Some((key.as_str().into(), row)) } else { None }
    });
    rows.collect()
}

const fn bit(event: u8) -> u8 {
    1 << event
}

impl World {
    /// The parameters of a request were accepted or not (P1).
    pub(crate) fn judge_params(&mut self, request: u8, params: Params, accepted: bool) {
        let bound = &mut self.ghost.bound[usize::from(request)];
        let right = bound.is_none_or(|bound| bound == params.bound());
        if accepted && bound.is_none() {
            *bound = Some(params.bound());
        }
        self.break_unless(Promise::P1, accepted == right);
    }

    /// A lease was taken for current or not (P6): it must be what was written down, and a stale one
    /// changes nothing.
    pub(crate) fn judge_lease(&mut self, held: &Held, judged: Judged, changed: bool) {
        let right = match judged {
            Judged::Current => !held.stale,
            Judged::Stale => held.stale && !changed,
        };
        self.break_unless(Promise::P6, right);
    }

    /// A claim must take what is due, and nothing that another one holds (P3, P4, P6).
    pub(crate) fn judge_claim(&mut self, view: &State, before: &Db, claimed: &Claimed) {
        let now = self.time();
        // A rival may have committed what was not there to be seen.
        let all_seen = *view == before.0;
        // What it leaves, though it is due, it must come for at once: an event that may bring the
        // relay down is tried alone.
        let comes_at_once = claimed.next_due.is_some_and(|due| due <= now)
            && !(claimed.runs.is_empty() && claimed.dead.is_empty());
        let rows = outbox(before);
        for (name, lane) in lanes(before) {
            let run = claimed.runs.iter().find(|run| run.lease.lane.as_str() == name);
            let first = rows.iter().filter(|(_, row)| {
                row.lane.as_str() == name && row.state == DeliveryState::Pending
            });
            let first = first.min_by_key(|(_, row)| row.sequence);
            let leased = lane.lease.as_ref().is_some_and(|lease| lease.until > now);
            let waits = lane.blocked_by.is_some() || first.is_none_or(|(_, row)| row.due > now);
            match (run, first) {
                (None, Some((event, _))) => {
                    self.break_unless(
                        Promise::P3,
                        !all_seen
                            || leased
                            || waits
                            || comes_at_once
                            || claimed.dead.contains(&event_id(*event)),
                    );
                }
                (Some(run), Some((event, _))) => {
                    self.break_unless(Promise::P6, !leased);
                    self.break_unless(
                        Promise::P4,
                        !waits && run.deliveries[0].event == event_id(*event),
                    );
                }
                (Some(_), None) => self.break_unless(Promise::P4, false),
                (None, None) => {}
            }
        }
    }

    /// An event goes to the broker: those before it must be there, or be passed over by the rule
    /// (P4).
    pub(crate) fn judge_publish(&mut self, event: u8, sequence: u64) {
        let rows = outbox(&self.db);
        let overtaken = rows.iter().any(|(other, row)| {
            let before = *other != event && row.lane == lane_of(event) && row.sequence < sequence;
            before && row.state == DeliveryState::Pending && self.ghost.broker & bit(*other) == 0
        });
        self.break_unless(Promise::P4, !overtaken);
    }

    /// An event was applied: never twice, together with its effect (P5), and in order if the
    /// consumer asks for it (P4).
    pub(crate) fn judge_applied(&mut self, scope: &Scope, copy: Copy, number: u8) {
        let applied = self.ghost.applied[usize::from(number)];
        self.break_unless(Promise::P5, applied & bit(copy.event) == 0);
        self.ghost.applied[usize::from(number)] |= bit(copy.event);
        if scope.in_order {
            let missed = outbox(&self.db).iter().any(|(other, row)| {
                let before = *other != copy.event
                    && row.lane == lane_of(copy.event)
                    && row.sequence < copy.place.sequence;
                let wanted =
                    matches!(row.state, DeliveryState::Pending | DeliveryState::Confirmed(_));
                let set_aside = || self.inbox(*other, number) == Some(InboxState::Poisoned);
                before && wanted && applied & bit(*other) == 0 && !set_aside()
            });
            self.break_unless(Promise::P4, !missed);
        }
    }

    /// What a committed step did to the tables.
    pub(crate) fn judge_change(&mut self, scope: &Scope, step: &Step, before: State) {
        let before = Db(before);
        let after = self.db.clone();
        let (old, new) = (outbox(&before), outbox(&after));
        for (event, row) in &old {
            self.judge_delivery(scope, step, *event, row, new.get(event));
        }
        for event in new.keys().filter(|event| !old.contains_key(event)) {
            let fresh = self.ghost.committed & bit(*event) == 0;
            self.break_unless(Promise::P3, fresh && matches!(step, Step::Commit { .. }));
        }
        let gone = |table: Table| {
            let there: BTreeSet<Key> = after.table(table).map(|record| record.key()).collect();
            before
                .table(table)
                .filter(move |record| !there.contains(&record.key()))
                .collect::<Vec<_>>()
        };
        for record in
            gone(Table::Requests).into_iter().chain(gone(Table::Lanes)).chain(gone(Table::Inbox))
        {
            self.judge_gone(scope, step, &record, &new);
        }
        // Events and effects are written once; purge relies on it.
        for record in gone(Table::Orders).into_iter().chain(gone(Table::Positions)) {
            let promise = if record.table() == Table::Orders { Promise::P2 } else { Promise::P7 };
            self.break_unless(promise, false);
        }
        for (lane, row) in lanes(&before) {
            // A token never comes again, so that a holder of long ago cannot take itself for the
            // current one.
            let backwards = lanes(&after).get(&lane).is_some_and(|now| now.token < row.token);
            self.break_unless(Promise::P6, !backwards);
        }
    }

    fn judge_delivery(
        &mut self,
        scope: &Scope,
        step: &Step,
        event: u8,
        old: &OutboxRow,
        new: Option<&OutboxRow>,
    ) {
        use DeliveryState::{Cancelled, Confirmed, Dead, Discarded, Pending};
        let Some(new) = new else {
            let past = old
                .state
                .finished_at()
                .is_some_and(|at| self.time().since(at) > scope.retention.events);
            if matches!(step, Step::Purge(_)) {
                self.break_unless(Promise::P7, past);
                self.ghost.purged |= bit(event);
            } else {
                self.break_unless(Promise::P3, false);
            }
            return;
        };
        let right = match (old.state, new.state) {
            (old, new) if old == new => true,
            // Only what the broker has confirmed to a relay is confirmed.
            (Pending, Confirmed(_)) => {
                matches!(step, Step::Settle { .. }) && self.ghost.broker & bit(event) != 0
            }
            (Pending, Dead(_)) => {
                matches!(step, Step::Settle { .. } | Step::Claim { .. }) && new.reason.is_some()
            }
            (Pending, Cancelled(_)) => matches!(step, Step::Cancel { .. }),
            (Dead(_), Pending) => matches!(step, Step::Redrive { .. }),
            (Dead(_), Discarded(_)) => matches!(step, Step::Discard { .. }),
            (Pending | Confirmed(_) | Dead(_) | Discarded(_) | Cancelled(_), _) => false,
        };
        self.break_unless(Promise::P3, right);
        let moved = old.sequence != new.sequence && !matches!(step, Step::Redrive { .. });
        self.break_unless(Promise::P4, !moved && old.lane == new.lane);
    }

    fn judge_gone(
        &mut self,
        scope: &Scope,
        step: &Step,
        record: &Record,
        outbox: &BTreeMap<u8, OutboxRow>,
    ) {
        let now = self.time();
        let purge = matches!(step, Step::Purge(_));
        match record {
            Record::Request(key, row) => {
                let past = row
                    .placed
                    .as_ref()
                    .is_some_and(|placed| now.since(placed.at) > scope.retention.requests);
                self.break_unless(Promise::P7, purge && past);
                if let Some(request) = key
                    .id
                    .as_str()
                    .strip_prefix('r')
                    .and_then(|number| number.parse::<usize>().ok())
                {
                    self.ghost.bound[request] = None;
                    self.ghost.placed[request] = false;
                }
            }
            Record::Lane(key, row) => {
                let pending = outbox
                    .values()
                    .any(|row| row.lane == *key && row.state == DeliveryState::Pending);
                let past = now.since(row.changed_at) > scope.retention.events;
                self.break_unless(
                    Promise::P7,
                    purge && past && !pending && row.blocked_by.is_none(),
                );
            }
            Record::Inbox(_, _, row) => {
                let past =
                    row.state == InboxState::Applied && now.since(row.at) > scope.retention.inbox;
                self.break_unless(Promise::P7, purge && past);
            }
            Record::Order(..)
            | Record::Event(_)
            | Record::Outbox(..)
            | Record::Effect(..)
            | Record::Position(..)
            | Record::Call(..) => {}
        }
    }

    /// Whether all promises hold in this world.
    pub(crate) fn is_sound(&self, scope: &Scope) -> bool {
        use Promise::{P1, P2, P3, P4, P5, P6, P7};
        [P1, P2, P3, P4, P5, P6, P7].iter().all(|promise| self.holds(scope, *promise))
    }

    /// Whether a promise holds in this world.
    pub(crate) fn holds(&self, scope: &Scope, promise: Promise) -> bool {
        if self.ghost.broken != 0 {
            return self.ghost.broken & promise.bit() == 0;
        }
        match promise {
            Promise::P1 => self.requests_are_bound(scope),
            Promise::P2 => self.orders_have_their_events(scope),
            Promise::P3 => self.events_are_to_be_found(scope),
            Promise::P5 => self.effects_have_their_rows(),
            Promise::P4 | Promise::P6 | Promise::P7 => true,
        }
    }

    fn requests_are_bound(&self, scope: &Scope) -> bool {
        (0..scope.requests).all(|request| {
            let bound = self.ghost.bound[usize::from(request)];
            match self.db.row(Key::Request(Scope::request(request, Params::First).key)) {
                Some(Record::Request(_, row)) => {
                    bound.is_some_and(|params| {
                        Scope::request(request, params).fingerprint == row.fingerprint
                    }) && row.placed.is_some() == self.ghost.placed[usize::from(request)]
                }
                _ => bound.is_none(),
            }
        })
    }

    fn orders_have_their_events(&self, scope: &Scope) -> bool {
        let rows = outbox(&self.db);
        scope.events.iter().copied().all(|event| {
            let order = self
                .db
                .row(Key::Order(named(twobox::OrderId::new(format!("o{}", order_of(event))))))
                .is_some();
            let envelope = self.db.row(Key::Event(event_id(event))).is_some();
            let purged = self.ghost.purged & bit(event) != 0;
            rows.contains_key(&event) == envelope && order == (envelope || purged)
        })
    }

    fn events_are_to_be_found(&self, scope: &Scope) -> bool {
        let (rows, lanes) = (outbox(&self.db), lanes(&self.db));
        scope.events.iter().copied().all(|event| {
            let committed = self.ghost.committed & bit(event) != 0;
            let purged = self.ghost.purged & bit(event) != 0;
            let there = rows.get(&event).is_none_or(|row| {
                // What is pending comes up: its lane has a time, or waits for an event that is
                // dead.
                let comes_up =
                    lanes.get(row.lane.as_str()).is_some_and(|lane| match &lane.blocked_by {
                        None => lane.due.is_some(),
                        Some(blocker) => number_of(blocker)
                            .and_then(|number| rows.get(&number))
                            .is_some_and(|row| matches!(row.state, DeliveryState::Dead(_))),
                    });
                row.state != DeliveryState::Pending || comes_up
            });
            there && rows.contains_key(&event) == (committed && !purged)
        })
    }

    fn effects_have_their_rows(&self) -> bool {
        let applied = self.db.table(Table::Inbox).filter_map(|record| {
            if let Record::Inbox(consumer, id, row) = record {
                row.effect.then_some(Key::Effect(consumer, id))
            } else {
                None
            }
        });
        let effects = self.db.table(Table::Effects).map(|record| record.key());
        applied.collect::<BTreeSet<_>>() == effects.collect::<BTreeSet<_>>()
    }

    /// Whether everything comes to its end when nothing goes wrong any more (P8), first for the
    /// relays that are there, if they are machines.
    pub(crate) fn drains(&self, scope: &Scope) -> bool {
        if scope.machines == 0 {
            return self.drains_anew(scope);
        }
        // A bug may have left its traces, and does no more harm.
        let scope = &Scope { bug: None, ..scope.clone() };
        self.machines_drain(scope).is_some_and(|world| world.drains_anew(scope))
    }

    /// The clients retry, all relays are started anew, each in-flight copy arrives, and an operator
    /// redrives what is dead.
    fn drains_anew(&self, scope: &Scope) -> bool {
        let store = MemoryStore::from_state(self.db.0.clone());
        for request in 0..scope.requests {
            let params = self.ghost.bound[usize::from(request)].unwrap_or(Params::First);
            let request_row = Scope::request(request, params);
            // It is refused only if the request was purged, and its order is there.
            let _placed = store.run(scope.commit(&request_row, request, params), self.time());
        }
        let arrived = Arrived { world: self, copies: RefCell::new(self.network.clone()) };
        let (mut now, mut steps) = (self.time(), 0);
        let window = scope.retention.redrive_window(&scope.policy);
        // Twice: what is dead already or has no start left is redriven, and must then go through.
        for _ in 0..2 {
            now = now + Duration::from_secs(3_600);
            let settings =
                RelaySettings { policy: scope.policy.clone(), ..RelaySettings::new(owner(9)) };
            let mut relay = named(Relay::new(&store, &arrived, settings, now));
            while relay.step(now) == Ok(true) {
                steps += 1;
                if steps > scope.drain_bound() {
                    return false;
                }
            }
            let rows = outbox(&Db(store.state()));
            let dead: Vec<_> = rows
                .iter()
                .filter(|(_, row)| matches!(row.state, DeliveryState::Dead(_)))
                .collect();
            if !dead.is_empty() {
                let redrive =
                    named(Redrive::new(dead.iter().map(|(event, _)| event_id(**event)), window))
                        .force();
                let Ok(_redriven) = store.run(redrive, now).map_err(drop) else { return false };
            }
        }
        scope.longest_drain.fetch_max(steps, Ordering::Relaxed);
        let db = Db(store.state());
        let orders = (0..scope.requests).all(|request| {
            db.row(Key::Order(named(twobox::OrderId::new(format!("o{request}"))))).is_some()
        });
        orders
            && outbox(&db).values().all(|row| row.state.finished_at().is_some())
            && self.consumers_end(scope, &store, &arrived, now)
    }

    /// Each consumer gets each copy again and again, until nothing changes: it must then have
    /// applied or set aside all of them.
    fn consumers_end(
        &self,
        scope: &Scope,
        store: &MemoryStore,
        arrived: &Arrived<'_>,
        now: Millis,
    ) -> bool {
        let copies = arrived.copies.borrow();
        for number in 0..scope.consumers {
            for _ in 0..=copies.len() {
                for copy in copies.iter() {
                    let mut receive = Receive::new(consumer(number), &envelope(copy.event))
                        .effect(crate::step::effect(copy.event));
                    if scope.in_order {
                        receive = receive.in_order(lane_of(copy.event), copy.place);
                    }
                    let Ok(_received) = store.run(receive, now) else { return false };
                }
            }
            let db = Db(store.state());
            let ended = |event: u8| match db.row(Key::Inbox(consumer(number), event_id(event))) {
                Some(Record::Inbox(_, _, row)) => row.state != InboxState::Failing,
                _ => false,
            };
            if !copies.iter().all(|copy| ended(copy.event)) {
                return false;
            }
        }
        true
    }
}

/// A broker that takes everything.
struct Arrived<'w> {
    world: &'w World,
    copies: RefCell<BTreeSet<Copy>>,
}

impl Publisher for &Arrived<'_> {
    fn publish(&mut self, batch: &[Message], _now: Millis) -> Vec<Published> {
        let copies = batch.iter().filter_map(|message| {
            let event = number_of(&message.event.id)?;
            Some(Copy { event, place: self.world.place(message.place) })
        });
        self.copies.borrow_mut().extend(copies);
        batch.iter().map(|_| Published::Confirmed).collect()
    }
}
