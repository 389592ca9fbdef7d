//! The machine itself: when to claim, what to publish, what to settle, and when to come again.

use alloc::vec::Vec;
use core::time::Duration;

use super::Published;
use super::held::{Call, Ended, Lanes, Publishing, Term};
use super::left::Left;
use super::pace::Pace;
use super::settings::RelaySettings;
use super::slots::Slots;
use super::trace;
use crate::checked::Checked;
use crate::flow::{ExchangeFlow, Exchanged};
use crate::ids::{Invalid, LaneKey, Reason};
use crate::lane::LeaseRef;
use crate::message::Message;
use crate::time::{Millis, Moment};
use crate::transition::claim::{Claim, Claimed};
use crate::transition::settle::{Ending, Renew, Renewed, Settle, Settled, Settlement};

/// What there is to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use]
pub enum Action {
    /// Settle and claim in one transaction, at the time that [`RelayMachine::now`] has now, then
    /// [`RelayMachine::handle_exchanged`], or [`RelayMachine::handle_store_failed`] if it failed or
    /// nobody knows.
    Exchange(Exchange),
    /// Publish these in one call of the publisher: no two are of the same lane. Then
    /// [`RelayMachine::handle_published`] for each, as soon as it has ended.
    Publish(Vec<Ticket>),
    /// Run this at [`RelayMachine::now`], then [`RelayMachine::handle_renewed`] or
    /// [`RelayMachine::handle_store_failed`].
    Renew(Renew),
    /// These leases are lost. Break off what is being published under them if that is possible,
    /// then [`RelayMachine::handle_broken_off`] or [`RelayMachine::handle_published`].
    BreakOff(Vec<LeaseRef>),
    /// What is being published under these leases is overdue. Break it off, or find another
    /// publisher in its place, then [`RelayMachine::handle_broken_off`]; until that is said, it
    /// takes up a slot.
    GiveUp(Vec<LeaseRef>),
}

/// One transaction of the relay: first settle, then claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Exchange {
    /// What became of deliveries; may be empty.
    pub settle: Vec<Settlement>,
    /// How many events to claim; 0 for none.
    pub claim: usize,
    /// With how many bytes of bodies there is enough.
    pub claim_bytes: usize,
    /// How many events of one lane at most.
    pub claim_run: usize,
    /// How long the leases last: see [`Status::lease`].
    pub claim_lease: Duration,
}

impl Exchange {
    /// The flow that does it, for whoever drives flows on a store. See [`ExchangeFlow::new`].
    #[must_use]
    pub fn flow(
        self,
        settings: &Checked<RelaySettings>,
        now: Millis,
        assumes: bool,
    ) -> ExchangeFlow<'_> {
        let (settle, claim) = self.into_transitions(settings);
        ExchangeFlow::new(settle, claim, now, assumes)
    }

    /// The transitions to run, one after the other, in one transaction.
    #[must_use]
    pub fn into_transitions(
        self,
        settings: &Checked<RelaySettings>,
    ) -> (Option<Settle<'_>>, Option<Claim<'_>>) {
        let settle = (!self.settle.is_empty()).then(|| Settle::new(&settings.policy, self.settle));
        // The settings allow only windows and leases that a claim takes; a claim of nothing is
        // refused, and is none.
        let claim =
            Claim::new(&settings.policy, settings.owner.clone(), self.claim_lease, self.claim).ok();
        (settle, claim.map(|claim| claim.run(self.claim_run).bytes(self.claim_bytes)))
    }
}

/// One event to be published.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The lease under which it is published.
    pub lease: LeaseRef,
    /// What is to be published.
    pub message: Message,
}

/// What a relay has done since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Events that were claimed.
    pub claimed: u64,
    /// Publishes that were handed out; some may have been taken back before a publisher was called.
    pub published: u64,
    /// Events that are confirmed and settled.
    pub confirmed: u64,
    /// Publishes that failed and will be tried again.
    pub failed: u64,
    /// Publishes that did not end in time.
    pub overdue: u64,
    /// Events that are dead.
    pub dead: u64,
    /// Leases that were not current any more.
    pub stale: u64,
    /// Leases that were too short: they had run out when the store's answer came, and nothing was
    /// published under them (F33), or another relay had taken the lane when what was published
    /// under them was to be settled (F30). See [`Status::lease`].
    pub short: u64,
    /// Times at which the broker could not be reached.
    pub unavailable: u64,
    /// Transactions that failed.
    pub store_failures: u64,
}

/// What a relay is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// It delivers, or waits for something to deliver.
    Running,
    /// It waits for the broker to come back (F15).
    Paused,
    /// It waits for the store to come back (F11).
    StoreAway,
    /// Every publisher hangs: it claims nothing before one of them is done (F25).
    Stuck,
    /// It claims no more, and waits for what is under way (F12).
    Stopping,
    /// It has stopped.
    Stopped,
}

/// What can be seen of a relay that runs on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// What it is doing.
    pub phase: Phase,
    /// What it has done so far.
    pub counters: Counters,
    /// How many publishes are under way; once it has stopped, how many it no longer waited for.
    pub publishing: usize,
    /// How many publishes did not end in time, and still have not ended. Each takes up a publisher;
    /// on threads those are in it too that have another in their place, and are not counted as under
    /// way any more.
    pub hung: usize,
    /// What the broker said when it could not be reached, if it has confirmed nothing since (F48).
    pub broker_error: Option<Reason>,
    /// How long its leases last. That is [`RelaySettings::lease`], unless it was too short for the
    /// publisher or the store: then it is longer, up to the longest backoff of the policy, for as
    /// long as the relay runs. If it is, make the setting so long.
    pub lease: Duration,
    /// What the store said, if the last that was asked of it failed. If a relay stopped with it, it
    /// could not give back its leases, and they run out by themselves.
    pub error: Option<Reason>,
}

/// Which transaction is under way, and since when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Asked {
    what: Transaction,
    at: Moment,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Transaction {
    Exchange,
    Renewal,
}

/// A relay without clock, randomness or I/O; see the module for how to drive it. It is a value,
/// which a model checker can clone and compare.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RelayMachine {
    settings: Checked<RelaySettings>,
    /// What it was last told. All intervals are by its uptime, and the times below are uptimes.
    now: Moment,
    lanes: Lanes,
    left: Left,
    slots: Slots,
    /// Leases under which nothing is to be published any more: lost, and overdue.
    break_off: Vec<LeaseRef>,
    give_up: Vec<LeaseRef>,
    /// How many events a call of the publisher takes.
    batch: usize,
    pace: Pace,
    /// How many publishes have been answered, for the pace.
    answered: u64,
    /// What is to be settled, and what the exchange under way settles.
    settlements: Vec<Ended>,
    settling: Vec<Ended>,
    /// How long leases last: as in the settings, or longer.
    lease: Duration,
    transaction: Option<Asked>,
    claim_at: Duration,
    /// Somebody committed events while a transaction was under way, which may have begun before.
    woken: bool,
    /// What the broker said when it could not be reached, if it has confirmed nothing since.
    broker_error: Option<Reason>,
    /// Whether something was confirmed since an event was last answered as unavailable.
    confirmed_since: bool,
    /// Doubles with each failure in a row: of the broker, and of the store.
    broker_failures: u32,
    store_failures: u32,
    paused_until: Option<Duration>,
    store_paused_until: Option<Duration>,
    /// What the store said, if it failed the last time.
    error: Option<Reason>,
    stop: Option<Stop>,
    counters: Counters,
}

/// A relay that is to stop.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Stop {
    /// Until then it waits for what is being published.
    patient_until: Duration,
    /// How many publishes were under way when its patience ended.
    gave_up_on: Option<usize>,
    /// Whether it has ended with something that it could not give back.
    ended: bool,
}

impl RelayMachine {
    /// A relay that begins to claim at once.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the settings do not go together.
    pub fn new(settings: RelaySettings, now: Moment) -> Result<Self, Invalid> {
        let settings = settings.checked()?;
        let lease = settings.lease;
        Ok(Self {
            batch: usize::MAX,
            pace: Pace::new(settings.window, now.uptime),
            now,
            lanes: Lanes::default(),
            left: Left::default(),
            slots: Slots::new(slots(&settings)),
            break_off: Vec::new(),
            give_up: Vec::new(),
            settings,
            answered: 0,
            settlements: Vec::new(),
            settling: Vec::new(),
            lease,
            transaction: None,
            claim_at: now.uptime,
            woken: false,
            broker_error: None,
            confirmed_since: false,
            broker_failures: 0,
            store_failures: 0,
            paused_until: None,
            store_paused_until: None,
            error: None,
            stop: None,
            counters: Counters::default(),
        })
    }

    /// Gives a call of the publisher at most so many events, 1 at least; without it, as many as are
    /// ready.
    #[must_use]
    pub fn batch(mut self, most: usize) -> Self {
        self.batch = most.max(1);
        self.pace = Pace::new(self.least(), self.now.uptime);
        self
    }

    /// How many events keep all slots busy while the next ones are claimed.
    fn least(&self) -> usize {
        slots(&self.settings).saturating_mul(self.batch).saturating_mul(2).min(self.settings.window)
    }

    /// How it works.
    #[must_use]
    pub const fn settings(&self) -> &Checked<RelaySettings> {
        &self.settings
    }

    /// What it has done.
    #[must_use]
    pub const fn counters(&self) -> Counters {
        self.counters
    }

    /// What can be seen of it from outside.
    #[must_use]
    pub fn status(&self) -> Status {
        Status {
            phase: self.phase(),
            counters: self.counters,
            publishing: self.publishing(),
            hung: self.left.hung(),
            lease: self.lease,
            broker_error: self.broker_error.clone(),
            error: self.error.clone(),
        }
    }

    fn publishing(&self) -> usize {
        let gave_up_on = self.stop.as_ref().and_then(|stop| stop.gave_up_on);
        gave_up_on.unwrap_or(self.lanes.publishing() + self.left.len())
    }

    /// What it is doing.
    #[must_use]
    pub fn phase(&self) -> Phase {
        if self.is_stopped() {
            Phase::Stopped
        } else if self.is_stopping() {
            Phase::Stopping
        } else if self.store_paused_until.is_some() {
            Phase::StoreAway
        } else if self.is_stuck() {
            Phase::Stuck
        } else if self.is_paused() {
            Phase::Paused
        } else {
            Phase::Running
        }
    }

    /// Whether it waits for the broker to come back.
    #[must_use]
    pub const fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    /// Whether it holds nothing and has nothing to settle. It may still claim when its time comes.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.lanes.is_empty() && self.settlements.is_empty() && self.transaction.is_none()
    }

    const fn is_stopping(&self) -> bool {
        self.stop.is_some()
    }

    /// Whether it was asked to stop, and everything that it held is settled, or was given up.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.ended || self.is_idle())
    }

    /// The time to give to the transitions that this relay runs: that of the clock, as it was told
    /// last. Where that was set, stamps are by what it shows since (F7, F37): leases are guarded by
    /// their tokens, and renewed by uptime.
    #[must_use]
    pub const fn now(&self) -> Millis {
        self.now.wall
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Moment) {
        self.go_with(now);
        self.fail_overdue();
        if self.paused_until.is_some_and(|until| until <= self.uptime()) {
            self.paused_until = None;
            self.claim_at = self.uptime();
        }
        if self.store_paused_until.is_some_and(|until| until <= self.uptime()) {
            self.store_paused_until = None;
        }
        self.lose_patience();
    }

    fn go_with(&mut self, now: Moment) {
        // An uptime that steps back is none: no time has passed.
        self.now = Moment { uptime: now.uptime.max(self.uptime()), ..now };
    }

    const fn uptime(&self) -> Duration {
        self.now.uptime
    }

    /// The uptime so much later.
    const fn after(&self, span: Duration) -> Duration {
        self.now.uptime.saturating_add(span)
    }

    /// What should have ended by now has failed, and its lane is free for others (F25).
    fn fail_overdue(&mut self) {
        for lane in self.lanes.overdue(self.uptime()) {
            let timeout = self.settings.publish_timeout.as_millis();
            let reason = Reason::new(format_args!("the publish did not end within {timeout} ms"));
            let ended = self.lanes.end(&lane, Some(Ending::Failed(reason.clone())));
            debug_assert!(ended.is_some(), "what is overdue is held");
            if let Some((ended, publishing)) = ended {
                self.settlements.push(ended);
                self.counters.overdue += 1;
                if let Some(it) = publishing {
                    trace::overdue(&it.event, &lane, &reason);
                    self.left.add(it);
                }
            }
        }
        self.give_up.extend(self.left.pass(self.uptime()));
        if self.is_stuck() {
            self.release_waiting();
        }
    }

    /// Whether every slot is taken up by a publish that did not end in time.
    fn is_stuck(&self) -> bool {
        self.left.hung() > 0 && self.left.hung_slots() >= slots(&self.settings)
    }

    /// Somebody has committed events: there is something to claim before the next poll.
    pub fn handle_wakeup(&mut self, now: Moment) {
        self.handle_timeout(now);
        self.claim_at = self.claim_at.min(self.uptime());
        self.woken = self.transaction.is_some();
    }

    /// An exchange is committed.
    pub fn handle_exchanged(&mut self, now: Moment, (settled, claimed): Exchanged) {
        self.handle_timeout(now);
        let Some(asked) = self.ends(Transaction::Exchange) else { return };
        self.store_answered();
        let settling = core::mem::take(&mut self.settling);
        if let Some(settled) = settled {
            self.count_settled(&settled, &settling);
        }
        match claimed {
            Some(claimed) => self.hold(claimed, asked),
            // A settled lane may have more to deliver.
            None => self.claim_at = self.claim_at.min(self.uptime()),
        }
    }

    fn count_settled(&mut self, settled: &Settled, settling: &[Ended]) {
        for stale in &settled.stale {
            let ended = settling.iter().find(|it| *it.settlement.lease() == stale.lease);
            let outlived = ended.and_then(|it| it.term.outlived(self.uptime()));
            self.was_short(outlived);
        }
        self.counters.confirmed += settled.confirmed as u64;
        self.counters.failed += settled.retried as u64;
        self.counters.dead += settled.dead.len() as u64;
        self.counters.stale += settled.stale.len() as u64;
    }

    fn hold(&mut self, claimed: Claimed, asked: Moment) {
        self.counters.dead += claimed.dead.len() as u64;
        let (now, poll) = (self.uptime(), self.after(self.settings.poll));
        let woken = core::mem::take(&mut self.woken).then_some(now);
        let due = |due: Millis| asked.uptime.saturating_add(due.since(asked.wall));
        let next_due = woken.or(claimed.next_due.map(due));
        self.claim_at = next_due.map_or(poll, |due| due.clamp(now, poll));
        let lasts = self.lease;
        for leased in claimed.leased {
            debug_assert!(!leased.events.is_empty(), "a lease covers an event");
            self.counters.claimed += leased.events.len() as u64;
            // It may be longer than it was asked to be, after starts without an answer.
            let lease = leased.until.since(asked.wall).max(lasts);
            let term = self.term(asked, lease, leased.until);
            // Our own lease of the lane may have run out before we claimed it again.
            let lost = self.lanes.hold(leased, term);
            self.leave(lost);
        }
        if self.is_stopping() || self.is_paused() || self.is_stuck() {
            self.release_waiting();
        }
    }

    /// Leases are renewed, or lost: under a lost one nothing more is published.
    pub fn handle_renewed(&mut self, now: Moment, renewed: &Renewed) {
        self.handle_timeout(now);
        let Some(asked) = self.ends(Transaction::Renewal) else { return };
        self.store_answered();
        let lasts = self.lease;
        for (lease, until) in &renewed.leases {
            let term = self.term(asked, lasts, *until);
            self.lanes.renewed(lease, term);
        }
        for stale in &renewed.stale {
            if self.lanes.holds(&stale.lease) {
                self.counters.stale += 1;
                let lost = self.lanes.lose(&stale.lease.lane);
                self.leave(lost);
            }
        }
    }

    /// The transaction of the last exchange or renewal failed, or nobody knows whether it took
    /// effect. What was to be settled is settled again after a pause (F11); if it had been settled
    /// already, its lease turns out to be stale.
    pub fn handle_store_failed(&mut self, now: Moment, error: Reason) {
        self.handle_timeout(now);
        if self.transaction.take().is_none() {
            return;
        }
        self.error = Some(error);
        self.settlements.append(&mut self.settling);
        self.counters.store_failures += 1;
        self.store_failures += 1;
        let pause = self.pause(self.store_failures);
        self.store_paused_until = Some(self.after(pause));
        self.claim_at = self.claim_at.max(self.after(pause));
        if let Some(stop) = &mut self.stop {
            // After its patience has ended it tries once.
            stop.ended |= stop.gave_up_on.is_some();
        }
    }

    /// An exchange has come to its end, whichever that was: told to `tracing`, and handled.
    pub fn conclude_exchange(&mut self, now: Moment, exchanged: Result<Exchanged, Reason>) {
        match exchanged {
            Ok(exchanged) => {
                trace::exchanged(&exchanged);
                self.handle_exchanged(now, exchanged);
            }
            Err(error) => {
                trace::store_failed(&error);
                self.handle_store_failed(now, error);
            }
        }
    }

    /// A renewal has come to its end, whichever that was: told to `tracing`, and handled.
    pub fn conclude_renewal(&mut self, now: Moment, renewed: Result<Renewed, Reason>) {
        match renewed {
            Ok(renewed) => {
                trace::renewed(&renewed);
                self.handle_renewed(now, &renewed);
            }
            Err(error) => {
                trace::store_failed(&error);
                self.handle_store_failed(now, error);
            }
        }
    }

    /// For how long there is nothing to do, if nothing happens; see [`RelayMachine::poll_timeout`].
    #[must_use]
    pub fn rest_for(&self) -> Option<Duration> {
        self.poll_timeout().map(|at| at.saturating_sub(self.uptime()))
    }

    /// A publish has ended. What comes late, but before the machine has heard that it is overdue,
    /// counts; so tell it of all that have ended before anything else. This is the only `handle_*`
    /// that lets nothing become overdue: call [`RelayMachine::handle_timeout`] when all are told.
    pub fn handle_published(&mut self, now: Moment, ticket: &Ticket, published: Published) {
        self.go_with(now);
        if let Some(slot) = self.left.ended(|it| it.is(ticket)) {
            self.slots.ended(slot);
        } else if self.lanes.publishes(ticket) {
            self.answered += 1;
            self.end_publish(&ticket.lease.lane, published);
        }
    }

    /// What was being published under this lease is broken off.
    pub fn handle_broken_off(&mut self, now: Moment, lease: &LeaseRef) {
        self.handle_timeout(now);
        if let Some(slot) = self.left.ended(|it| it.lease == *lease) {
            self.slots.ended(slot);
        }
    }

    fn end_publish(&mut self, lane: &LaneKey, published: Published) {
        let ending = match published {
            Published::Confirmed => return self.confirmed(lane),
            Published::Failed(reason) => Ending::Failed(reason),
            Published::Rejected(reason) => Ending::Rejected(reason),
            Published::Deferred(reason) => Ending::Deferred(reason),
            Published::Unavailable(reason) => {
                self.broker_error = Some(reason.clone());
                // It takes others: only this event is to wait, and where all of them are answered
                // like that, the next one says so (F27).
                if core::mem::take(&mut self.confirmed_since) && !self.is_paused() {
                    self.counters.unavailable += 1;
                    return self.end_lane(lane, Some(Ending::Deferred(reason)));
                }
                self.end_lane(lane, Some(Ending::Unavailable(reason)));
                return self.broker_away();
            }
            Published::Abandoned => {
                self.end_lane(lane, None);
                if !self.is_stopping() {
                    self.rest();
                }
                return;
            }
        };
        self.end_lane(lane, Some(ending));
    }

    fn confirmed(&mut self, lane: &LaneKey) {
        // While it pauses, this is the answer to a publish from before.
        if !self.is_paused() {
            self.broker_failures = 0;
            self.broker_error = None;
            self.confirmed_since = true;
        }
        let Some((slot, waits)) = self.lanes.confirm(lane) else { return };
        self.slots.ended(slot);
        if !waits || self.is_stopping() || self.is_paused() {
            self.end_lane(lane, None);
        }
    }

    /// Stops: claims no more, and releases what is not being published (F12). What is being
    /// published it waits for, but no longer than `patience`; then that is released too, and no
    /// failure is counted, although it may have reached the broker (P9). Of several calls the least
    /// patient counts.
    pub fn handle_stop(&mut self, now: Moment, patience: Duration) {
        self.handle_timeout(now);
        let until = self.after(patience);
        let stop =
            self.stop.get_or_insert(Stop { patient_until: until, gave_up_on: None, ended: false });
        stop.patient_until = stop.patient_until.min(until);
        self.release_waiting();
        self.lose_patience();
    }

    /// Whether it no longer waits for what is being published, which may then be aborted.
    #[must_use]
    pub fn gave_up(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.gave_up_on.is_some())
    }

    /// Waits no longer for publishes that are under way once its patience has ended. What they were
    /// is released at once, even in a pause after the store has failed.
    fn lose_patience(&mut self) {
        let publishing = self.publishing();
        match &mut self.stop {
            Some(stop) if stop.gave_up_on.is_none() && stop.patient_until <= self.now.uptime => {
                stop.gave_up_on = Some(publishing);
            }
            Some(_) | None => return,
        }
        // What the store said before does not count against the last try.
        self.error = None;
        self.store_paused_until = None;
        self.lanes.all().iter().for_each(|lane| self.end_lane(lane, None));
        self.left.clear();
        self.slots = Slots::new(slots(&self.settings));
        self.break_off.clear();
        self.give_up.clear();
        debug_assert!(self.lanes.is_empty() && self.lanes.publishing() == 0);
    }

    /// What there is to do next; `None` if there is nothing before the next event or timeout.
    pub fn poll_action(&mut self) -> Option<Action> {
        if !self.break_off.is_empty() {
            return Some(Action::BreakOff(core::mem::take(&mut self.break_off)));
        }
        if !self.give_up.is_empty() {
            return Some(Action::GiveUp(core::mem::take(&mut self.give_up)));
        }
        let may_ask = self.transaction.is_none() && self.store_paused_until.is_none();
        if may_ask && !self.is_stopped() {
            let renew = self.lanes.to_renew(self.now);
            if !renew.is_empty() {
                self.ask(Transaction::Renewal);
                return Some(Action::Renew(Renew::new(renew, self.lease)));
            }
        }
        let publish = self.next_publishes();
        if !publish.is_empty() {
            self.counters.published += publish.len() as u64;
            return Some(Action::Publish(publish));
        }
        if may_ask && !self.is_stopped() {
            let room = if self.wants_claim() {
                let (least, now) = (self.least(), self.uptime());
                self.pace.claims(least, self.settings.window, now, self.answered);
                self.free()
            } else {
                Room::NONE
            };
            if room.events > 0 || !self.settlements.is_empty() {
                debug_assert!(
                    self.settling.is_empty(),
                    "an exchange ends before the next one begins"
                );
                self.ask(Transaction::Exchange);
                self.settling = core::mem::take(&mut self.settlements);
                let settle = self.settling.iter().map(|it| it.settlement.clone()).collect();
                return Some(Action::Exchange(Exchange {
                    settle,
                    claim: room.events,
                    claim_bytes: room.bytes,
                    claim_run: room.run,
                    claim_lease: self.lease,
                }));
            }
        }
        None
    }

    /// At which uptime to call [`RelayMachine::handle_timeout`], if nothing happens before; `None`
    /// if only something that happens can give it more to do. Once [`RelayMachine::poll_action`] has
    /// nothing more, this lies in the future.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Duration> {
        if self.is_stopped() {
            return None;
        }
        let patience = self.stop.as_ref().filter(|stop| stop.gave_up_on.is_none());
        let patience = patience.map(|stop| stop.patient_until).filter(|end| *end < Duration::MAX);
        let overdue = [self.lanes.overdue_at(), self.left.next()].into_iter().flatten();
        let soonest = patience.into_iter().chain(overdue).min();
        if self.transaction.is_some() {
            return soonest;
        }
        let claim =
            self.may_claim().then(|| self.claim_at.max(self.paused_until.unwrap_or(self.claim_at)));
        let settle = (!self.settlements.is_empty()).then_some(self.uptime());
        let next = [self.lanes.renew_at(), claim, settle].into_iter().flatten().min();
        let next = next.map(|at| at.max(self.store_paused_until.unwrap_or(at)));
        [next, soonest].into_iter().flatten().min()
    }

    /// How many slots are left when everything is published that waits for one.
    fn idle_slots(&self) -> usize {
        let calls = self.lanes.ready(self.left.held_back()).div_ceil(self.batch);
        self.slots.free().saturating_sub(calls)
    }

    /// What it may claim. It holds at most one event more for each slot than the window has.
    fn free(&self) -> Room {
        let (events, bytes) = self.lanes.size();
        let RelaySettings { window_bytes, run, .. } = *self.settings;
        let room = Room {
            events: self.pace.events().saturating_sub(events),
            bytes: window_bytes.saturating_sub(bytes),
            run,
        };
        // The first publish after an outage is a probe.
        if self.broker_failures > 0 {
            return Room { events: 1, run: 1, ..room };
        }
        // What is stuck takes room, and must not keep slots from what is not (F26): for each of
        // these an event is taken that the window has no room for.
        let idle = self.idle_slots();
        if (room.events == 0 || room.bytes == 0) && idle > 0 {
            return Room { events: idle, bytes: 1, run: 1 };
        }
        room
    }

    /// Whether it may claim when the time for it has come.
    fn may_claim(&self) -> bool {
        let probing = self.broker_failures > 0 && !self.lanes.is_empty();
        // What is claimed now would be counted as started if the event that is tried alone brings
        // the process down.
        if self.is_stopping() || probing || self.lanes.alone() || self.is_stuck() {
            return false;
        }
        // Small claims while all slots are busy would only cost transactions.
        let idle = self.lanes.is_empty() || self.idle_slots() > 0;
        let room = self.free();
        room.bytes > 0 && (idle || room.events * 2 >= self.pace.events())
    }

    fn wants_claim(&self) -> bool {
        // A claim that rides along with a settlement costs no commit of its own, and finds what the
        // settlement set free.
        let is_time = self.claim_at <= self.uptime() || !self.settlements.is_empty();
        self.may_claim() && !self.is_paused() && is_time
    }

    /// While the relay pauses or stops, there is none: what was waiting is given back, see
    /// [`RelayMachine::release_waiting`].
    fn next_publishes(&mut self) -> Vec<Ticket> {
        // What is tried alone (F4), and the first publish after an outage (F15), wait until nothing
        // is under way; for what is overdue nobody waits.
        let single = self.lanes.alone() || self.broker_failures > 0;
        if single && (!self.left.held_back().is_empty() || self.lanes.publishing() > 0) {
            return Vec::new();
        }
        let Some(slot) = self.slots.next() else { return Vec::new() };
        let most = if single { 1 } else { self.batch };
        let call = Call { slot, deadline: self.after(self.settings.publish_timeout) };
        let tickets = self.lanes.take(self.now, most, self.left.held_back(), call);
        debug_assert!(
            tickets.is_empty() || !(self.is_paused() || self.is_stopping()),
            "while it pauses or stops, nothing begins"
        );
        if !tickets.is_empty() {
            self.slots.take(tickets.len());
        }
        tickets
    }

    fn ask(&mut self, what: Transaction) {
        self.transaction = Some(Asked { what, at: self.now });
    }

    /// If this is the answer to the transaction that is under way, that has ended: when it began.
    fn ends(&mut self, what: Transaction) -> Option<Moment> {
        let asked = self.transaction.take_if(|asked| asked.what == what)?;
        Some(asked.at)
    }

    /// The lease of a publish that is under way is lost.
    fn leave(&mut self, publishing: Option<Publishing>) {
        if let Some(publishing) = publishing {
            self.break_off.push(publishing.lease.clone());
            self.left.add(publishing);
        }
    }

    fn end_lane(&mut self, lane: &LaneKey, ending: Option<Ending>) {
        let Some((ended, publishing)) = self.lanes.end(lane, ending) else { return };
        self.settlements.push(ended);
        if let Some(publishing) = publishing {
            self.slots.ended(publishing.call.slot);
        }
    }

    /// Ends the leases of lanes of which nothing is being published; what they have left is
    /// released.
    fn release_waiting(&mut self) {
        self.lanes.resting().iter().for_each(|lane| self.end_lane(lane, None));
    }

    fn store_answered(&mut self) {
        self.store_failures = 0;
        self.error = None;
    }

    fn broker_away(&mut self) {
        self.counters.unavailable += 1;
        // The answers of one batch are one failure; it may rest already for another reason.
        if !self.is_paused() || self.broker_failures == 0 {
            self.broker_failures += 1;
        }
        self.rest();
    }

    /// Pauses, and gives back what is not being published.
    fn rest(&mut self) {
        if !self.is_paused() {
            self.paused_until = Some(self.after(self.pause(self.broker_failures)));
        }
        self.release_waiting();
    }

    /// When a lease ends for which the store was asked then; counted if that was too long ago.
    fn term(&mut self, asked: Moment, lease: Duration, until: Millis) -> Term {
        let term = Term::new(asked.uptime, lease, until);
        self.was_short(term.outlived(self.uptime()));
        term
    }

    /// A lease had run out when it was needed, after so long: the next ones are twice as long, as
    /// far as the policy allows, so that an event whose publishes are answered is not given up as
    /// one that never was (F30).
    fn was_short(&mut self, outlived: Option<Duration>) {
        let Some(outlived) = outlived else { return };
        self.counters.short += 1;
        let longest = self.settings.policy.backoff_cap;
        self.lease = self.lease.max(outlived.saturating_mul(2)).min(longest);
    }

    fn pause(&self, failures: u32) -> Duration {
        let doubled = 1_u32.checked_shl(failures.saturating_sub(1).min(31)).unwrap_or(u32::MAX);
        self.settings.pause_base.saturating_mul(doubled).min(self.settings.pause_cap)
    }
}

/// How many calls may be under way.
fn slots(settings: &RelaySettings) -> usize {
    settings.publishes.min(settings.window)
}

/// What may be claimed.
#[derive(Debug, Clone, Copy)]
struct Room {
    events: usize,
    bytes: usize,
    run: usize,
}

impl Room {
    const NONE: Self = Self { events: 0, bytes: 0, run: 1 };
}
