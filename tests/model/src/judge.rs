//! What must hold: in each world, and between the tables before and after a step.

use core::sync::atomic::Ordering;
use core::time::Duration;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

use twobox::relay::{Published, Publisher, Relay, RelaySettings};
use twobox::{
    Claimed, EventState, Handled, Inbox, InboxState, Key, Message, Millis, Moment, Reason, Record,
    Redrive, Store, Table,
};
use twobox_memory::{MemoryStore, State};

use crate::scope::{Params, Scope, consumer, event_id, lane_of, named, number_of, order_of, owner};
use crate::step::Step;
use crate::world::{Copy, Db, Held, Promise, Standing, World};

/// What a transition said of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Judged {
    Current,
    Stale,
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
    ///
    /// A rival may have committed what was not there to be seen.
    pub(crate) fn judge_claim(&mut self, all_seen: bool, before: &Db, claimed: &Claimed) {
        let now = self.time();
        // What it leaves, though it is due, it must come for at once: an event that may bring the
        // relay down is tried alone.
        let comes_at_once = claimed.next_due.is_some_and(|due| due <= now)
            && !(claimed.leased.is_empty() && claimed.dead.is_empty());
        let events = before.events();
        for (name, lane) in before.lanes() {
            let leased = claimed
                .leased
                .iter()
                .find(|leased| leased.lease.lane.ordering_key.as_str() == name);
            let first = events
                .iter()
                .filter(|(_, event)| {
                    event.row.lane.ordering_key.as_str() == name && event.is_pending()
                })
                .min_by_key(|(_, event)| event.row.sequence);
            let held = lane.lease.as_ref().is_some_and(|lease| lease.until > now);
            let waits =
                lane.blocked_by.is_some() || first.is_none_or(|(_, event)| event.row.due > now);
            match (leased, first) {
                (None, Some((event, _))) => {
                    let dead = claimed.dead.iter().any(|(dead, _)| *dead == event_id(*event));
                    self.break_unless(
                        Promise::P3,
                        !all_seen || held || waits || comes_at_once || dead,
                    );
                }
                (Some(leased), Some((event, _))) => {
                    self.break_unless(Promise::P6, !held);
                    self.break_unless(
                        Promise::P4,
                        !waits && leased.events[0].message.event.id == event_id(*event),
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
        let overtaken = self.db.events().into_iter().any(|(other, standing)| {
            let row = &standing.row;
            let before =
                other != event && row.lane == lane_of(event).into() && row.sequence < sequence;
            before && standing.is_pending() && self.ghost.broker & bit(other) == 0
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
            let missed = self.db.events().into_iter().any(|(other, standing)| {
                let row = &standing.row;
                let before = other != copy.event
                    && row.lane == lane_of(copy.event).into()
                    && row.sequence < copy.place.sequence;
                let wanted = standing.is_pending() || standing.state == Some(EventState::Confirmed);
                let set_aside = || self.inbox(other, number) == Some(InboxState::Poisoned);
                before && wanted && applied & bit(other) == 0 && !set_aside()
            });
            self.break_unless(Promise::P4, !missed);
        }
    }

    /// What a committed step did to the tables.
    pub(crate) fn judge_change(&mut self, scope: &Scope, step: &Step, before: State) {
        let before = Db(before);
        let after = self.db.clone();
        let (old, new) = (before.events(), after.events());
        for (event, standing) in &old {
            self.judge_delivery(scope, step, *event, standing, new.get(event));
        }
        for (event, standing) in new.iter().filter(|(event, _)| !old.contains_key(event)) {
            let fresh = self.ghost.committed & bit(*event) == 0 && standing.is_pending();
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
        let lanes = after.lanes();
        for (lane, row) in before.lanes() {
            let Some(now) = lanes.get(&lane) else { continue };
            // A token never comes again, so that a holder of long ago cannot take itself for the
            // current one.
            self.break_unless(Promise::P6, now.token >= row.token);
            // Nor does a place.
            self.break_unless(Promise::P4, now.next >= row.next);
        }
    }

    fn judge_delivery(
        &mut self,
        scope: &Scope,
        step: &Step,
        event: u8,
        old: &Standing,
        new: Option<&Standing>,
    ) {
        use EventState::{Cancelled, Confirmed, Dead, Discarded, Leased, Pending};
        let Some(new) = new else {
            let since = old.state.and_then(|state| state.finished_since(old.row.committed_at));
            let past = since.is_some_and(|at| self.time().since(at) > scope.retention.events);
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
            // Without its lane nobody can say how it stands.
            (_, None) | (None, _) => matches!(step, Step::Purge(_)),
            (Some(old), Some(now)) => match (old, now) {
                (Pending, Leased) => matches!(step, Step::Claim { .. }),
                (Leased, Pending) => matches!(step, Step::Settle { .. } | Step::Claim { .. }),
                // Only what the broker has confirmed to a relay is confirmed.
                (Leased, Confirmed) => {
                    matches!(step, Step::Settle { .. }) && self.ghost.broker & bit(event) != 0
                }
                (Leased, Dead(_)) => {
                    let ends = matches!(step, Step::Settle { .. } | Step::Claim { .. });
                    ends && new.row.reason.is_some()
                }
                // What was claimed before, and never settled.
                (Pending, Dead(_)) => {
                    matches!(step, Step::Claim { .. }) && new.row.reason.is_some()
                }
                // What may be on its way is not cancelled.
                (Pending, Cancelled(_)) => matches!(step, Step::Cancel { .. }),
                (Dead(_), Pending) => matches!(step, Step::Redrive { .. }),
                (Dead(_), Discarded(_)) => matches!(step, Step::Discard { .. }),
                (Pending | Leased | Confirmed | Dead(_) | Discarded(_) | Cancelled(_), _) => false,
            },
        };
        self.break_unless(Promise::P3, right);
        let moved = old.row.sequence != new.row.sequence && !matches!(step, Step::Redrive { .. });
        self.break_unless(Promise::P4, !moved && old.row.lane == new.row.lane);
    }

    fn judge_gone(
        &mut self,
        scope: &Scope,
        step: &Step,
        record: &Record,
        events: &BTreeMap<u8, Standing>,
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
                // Its count begins anew, and what stands in it would stand nowhere.
                let empty = !events.values().any(|event| event.row.lane == *key);
                let past = now.since(row.changed_at) > scope.retention.events;
                self.break_unless(Promise::P7, purge && past && empty && row.blocked_by.is_none());
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
        let events = self.db.events();
        // What happened to an event is not known of one that is not there.
        let known = self.db.table(Table::Outbox).all(|record| match record {
            Record::Outbox(id, _) => {
                number_of(&id).is_some_and(|event| events.contains_key(&event))
            }
            _ => false,
        });
        known
            && scope.events.iter().copied().all(|event| {
                let order = named(twobox::OrderId::new(format!("o{}", order_of(event))));
                let order = self.db.row(Key::Order(order)).is_some();
                let purged = self.ghost.purged & bit(event) != 0;
                order == (events.contains_key(&event) || purged)
            })
    }

    fn events_are_to_be_found(&self, scope: &Scope) -> bool {
        let (events, lanes) = (self.db.events(), self.db.lanes());
        scope.events.iter().copied().all(|event| {
            let committed = self.ghost.committed & bit(event) != 0;
            let purged = self.ghost.purged & bit(event) != 0;
            let there = events.get(&event).is_none_or(|standing| {
                let Some(lane) = lanes.get(standing.row.lane.ordering_key.as_str()) else {
                    return false;
                };
                // What is pending comes up: its lane has a time, or waits for an event that is
                // dead.
                let comes_up = || match &lane.blocked_by {
                    None => lane.due.is_some(),
                    Some(blocker) => number_of(blocker)
                        .and_then(|number| events.get(&number))
                        .is_some_and(Standing::is_dead),
                };
                match standing.state {
                    Some(EventState::Pending | EventState::Leased) => comes_up(),
                    Some(EventState::Confirmed) => self.ghost.broker & bit(event) != 0,
                    Some(
                        EventState::Dead(_) | EventState::Discarded(_) | EventState::Cancelled(_),
                    ) => true,
                    None => false,
                }
            });
            there && events.contains_key(&event) == (committed && !purged)
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
        let window = scope.retention.redrive_window();
        // Twice: what is dead already or has no start left is redriven, and must then go through.
        for _ in 0..2 {
            now = now + Duration::from_secs(3_600);
            let settings =
                RelaySettings { policy: scope.policy.clone(), ..RelaySettings::new(owner(9)) };
            let mut relay = named(Relay::new(&store, &arrived, settings, Moment::steady(now)));
            while relay.step(Moment::steady(now)) == Ok(true) {
                steps += 1;
                if steps > scope.drain_bound() {
                    return false;
                }
            }
            let events = Db(store.state()).events();
            let dead: Vec<_> = events.iter().filter(|(_, standing)| standing.is_dead()).collect();
            if !dead.is_empty() {
                let dead = dead.iter().map(|(event, _)| event_id(**event));
                let redrive = named(Redrive::new(dead, window)).force();
                let Ok(_redriven) = store.run(redrive, now).map_err(drop) else { return false };
            }
        }
        scope.longest_drain.fetch_max(steps, Ordering::Relaxed);
        let db = Db(store.state());
        let orders = (0..scope.requests).all(|request| {
            db.row(Key::Order(named(twobox::OrderId::new(format!("o{request}"))))).is_some()
        });
        orders
            && db
                .events()
                .values()
                .all(|event| event.state.is_some_and(|state| state.finished_since(now).is_some()))
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
        let messages: Vec<Message> = copies.iter().map(|copy| copy.message()).collect();
        let effect = |message: &Message| {
            let event = number_of(&message.event.id).ok_or_else(|| Reason::new("not ours"))?;
            Ok::<_, Reason>(Handled::Effect(crate::step::effect(event)))
        };
        for number in 0..scope.consumers {
            let inbox = Inbox::new(store, consumer(number)).max_failures(scope.max_failures);
            let inbox = if scope.in_order { inbox.in_order() } else { inbox };
            for _ in 0..=copies.len() {
                let received = inbox.receive_batch(&messages, now, |_, message| effect(message));
                let Ok(_receipts) = received else { return false };
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
