//! The machine itself: when to claim, what to publish, what to settle, and when to come again.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::time::Duration;

use super::Published;
use super::held::{Lanes, Lost};
use super::settings::RelaySettings;
use super::trace;
use crate::checked::Checked;
use crate::flow::{ExchangeFlow, Exchanged};
use crate::ids::{EventId, Invalid, OrderingKey, Reason};
use crate::message::Message;
use crate::time::Millis;
use crate::transition::claim::{Claim, Claimed};
use crate::transition::lane::LeaseRef;
use crate::transition::settle::{Ending, Renew, Renewed, Settle, Settled, Settlement};

/// What there is to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use]
pub enum Action {
    /// Settle and claim in one transaction, at the time that [`RelayMachine::now`] has now, then
    /// [`RelayMachine::handle_exchanged`], or [`RelayMachine::handle_store_failed`] if it failed or
    /// nobody knows.
    Exchange(Exchange),
    /// Publish these, at the same time if possible: no two are of the same lane. Then
    /// [`RelayMachine::handle_published`] for each, as soon as it has ended.
    Publish(Vec<Ticket>),
    /// Run this at [`RelayMachine::now`], then [`RelayMachine::handle_renewed`] or
    /// [`RelayMachine::handle_store_failed`].
    Renew(Renew),
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
        // The settings allow only windows that a claim takes; a claim of nothing is refused, and is
        // none.
        let claim =
            Claim::new(&settings.policy, settings.owner.clone(), settings.lease, self.claim).ok();
        (settle, claim.map(|claim| claim.run(settings.run).bytes(self.claim_bytes)))
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
    /// Events that are dead.
    pub dead: u64,
    /// Leases that were not current any more.
    pub stale: u64,
    /// Times at which the broker could not be reached.
    pub unavailable: u64,
    /// Transactions that failed.
    pub store_failures: u64,
}

/// What a relay is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// It delivers, or waits for something to deliver.
    Running,
    /// It waits for the broker to come back (F15).
    Paused,
    /// It waits for the store to come back (F11).
    StoreAway,
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
    /// What the store said, if the last that was asked of it failed. If a relay stopped with it, it
    /// could not give back its leases, and they run out by themselves.
    pub error: Option<Reason>,
}

/// Which transaction is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum UnderWay {
    Exchange,
    Renewal,
}

/// A relay without clock, randomness or I/O; see the module for how to drive it. It is a value,
/// which a model checker can clone and compare.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RelayMachine {
    settings: Checked<RelaySettings>,
    /// The machine's own time, which never steps back, and the clock's time that it was last told.
    now: Millis,
    told: Millis,
    lanes: Lanes,
    /// Publishes that are under way although their lease is lost: nothing else of their lane is
    /// published before they end (P4).
    orphans: BTreeMap<OrderingKey, (u64, EventId)>,
    /// What is to be settled, and what the exchange under way settles.
    settlements: Vec<Settlement>,
    settling: Vec<Settlement>,
    transaction: Option<UnderWay>,
    claim_at: Millis,
    /// Somebody committed events while a transaction was under way, which may have begun before.
    woken: bool,
    /// Doubles with each failure in a row: of the broker, and of the store.
    broker_failures: u32,
    store_failures: u32,
    paused_until: Option<Millis>,
    store_paused_until: Option<Millis>,
    /// What the store said, if it failed the last time.
    error: Option<Reason>,
    stop: Option<Stop>,
    counters: Counters,
}

/// A relay that is to stop.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Stop {
    /// Until then it waits for what is being published.
    patient_until: Millis,
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
    pub fn new(settings: RelaySettings, now: Millis) -> Result<Self, Invalid> {
        Ok(Self {
            settings: settings.checked()?,
            now,
            told: now,
            lanes: Lanes::default(),
            orphans: BTreeMap::new(),
            settlements: Vec::new(),
            settling: Vec::new(),
            transaction: None,
            claim_at: now,
            woken: false,
            broker_failures: 0,
            store_failures: 0,
            paused_until: None,
            store_paused_until: None,
            error: None,
            stop: None,
            counters: Counters::default(),
        })
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
            error: self.error.clone(),
        }
    }

    fn publishing(&self) -> usize {
        let gave_up_on = self.stop.as_ref().and_then(|stop| stop.gave_up_on);
        gave_up_on.unwrap_or(self.lanes.publishing() + self.orphans.len())
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

    /// The time to give to the transitions that this relay runs. It follows the clock that
    /// `handle_*` are given, but where that steps back it goes on from where it was (F7): leases do
    /// not seem to last for longer, and the relay does not wait for the clock to catch up.
    #[must_use]
    pub const fn now(&self) -> Millis {
        self.now
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Millis) {
        self.now = self.now + now.since(self.told);
        self.told = now;
        if self.paused_until.is_some_and(|until| until <= self.now) {
            self.paused_until = None;
            self.claim_at = self.now;
        }
        if self.store_paused_until.is_some_and(|until| until <= self.now) {
            self.store_paused_until = None;
        }
        self.lose_patience();
    }

    /// Somebody has committed events: there is something to claim before the next poll.
    pub fn handle_wakeup(&mut self, now: Millis) {
        self.handle_timeout(now);
        self.claim_at = self.claim_at.min(self.now);
        self.woken = self.transaction.is_some();
    }

    /// An exchange is committed.
    pub fn handle_exchanged(&mut self, now: Millis, (settled, claimed): Exchanged) {
        self.handle_timeout(now);
        if !self.ends(UnderWay::Exchange) {
            return;
        }
        self.store_answered();
        self.settling.clear();
        if let Some(settled) = settled {
            self.count_settled(&settled);
        }
        match claimed {
            Some(claimed) => self.hold(claimed),
            // A settled lane may have more to deliver.
            None => self.claim_at = self.claim_at.min(self.now),
        }
    }

    fn count_settled(&mut self, settled: &Settled) {
        self.counters.confirmed += settled.confirmed as u64;
        self.counters.failed += settled.retried as u64;
        self.counters.dead += settled.dead.len() as u64;
        self.counters.stale += settled.stale.len() as u64;
    }

    fn hold(&mut self, claimed: Claimed) {
        self.counters.dead += claimed.dead.len() as u64;
        let poll = self.now + self.settings.poll;
        let woken = core::mem::take(&mut self.woken).then_some(self.now);
        let next_due = woken.or(claimed.next_due);
        self.claim_at = next_due.map_or(poll, |due| due.clamp(self.now, poll));
        for leased in claimed.leased {
            debug_assert!(!leased.events.is_empty(), "a lease covers an event");
            self.counters.claimed += leased.events.len() as u64;
            let renew_at = self.renew_at(leased.until);
            // Our own lease of the lane may have run out before we claimed it again.
            let lost = self.lanes.hold(leased, renew_at);
            self.orphan(lost);
        }
        if self.is_stopping() || self.is_paused() {
            self.release_waiting();
        }
    }

    /// Leases are renewed, or lost: under a lost one nothing more is published. Returns the lost
    /// leases, so that a publish under one of them can be aborted.
    pub fn handle_renewed(&mut self, now: Millis, renewed: &Renewed) -> Vec<LeaseRef> {
        self.handle_timeout(now);
        let mut lost = Vec::new();
        if !self.ends(UnderWay::Renewal) {
            return lost;
        }
        self.store_answered();
        for (lease, until) in &renewed.leases {
            self.lanes.renewed(lease, *until, self.renew_at(*until));
        }
        for stale in &renewed.stale {
            if !self.lanes.holds(&stale.lease) {
                continue;
            }
            self.counters.stale += 1;
            let publishing = self.lanes.lose(&stale.lease.lane);
            self.orphan(publishing);
            lost.push(stale.lease.clone());
        }
        lost
    }

    /// The transaction of the last exchange or renewal failed, or nobody knows whether it took
    /// effect. What was to be settled is settled again after a pause (F11); if it had been settled
    /// already, its lease turns out to be stale.
    pub fn handle_store_failed(&mut self, now: Millis, error: Reason) {
        self.handle_timeout(now);
        if self.transaction.take().is_none() {
            return;
        }
        self.error = Some(error);
        self.settlements.append(&mut self.settling);
        self.counters.store_failures += 1;
        self.store_failures += 1;
        let pause = self.pause(self.store_failures);
        self.store_paused_until = Some(self.now + pause);
        self.claim_at = self.claim_at.max(self.now + pause);
        if let Some(stop) = &mut self.stop {
            // After its patience has ended it tries once.
            stop.ended |= stop.gave_up_on.is_some();
        }
    }

    /// An exchange has come to its end, whichever that was: told to `tracing`, and handled.
    pub fn conclude_exchange(&mut self, now: Millis, exchanged: Result<Exchanged, Reason>) {
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

    /// A renewal has come to its end, whichever that was: told to `tracing`, and handled. Gives the
    /// leases that were lost, as [`RelayMachine::handle_renewed`].
    pub fn conclude_renewal(
        &mut self,
        now: Millis,
        renewed: Result<Renewed, Reason>,
    ) -> Vec<LeaseRef> {
        match renewed {
            Ok(renewed) => {
                trace::renewed(&renewed);
                self.handle_renewed(now, &renewed)
            }
            Err(error) => {
                trace::store_failed(&error);
                self.handle_store_failed(now, error);
                Vec::new()
            }
        }
    }

    /// For how long there is nothing to do, if nothing happens; see [`RelayMachine::poll_timeout`].
    #[must_use]
    pub fn rest_for(&self) -> Option<Duration> {
        self.poll_timeout().map(|at| at.since(self.now))
    }

    /// A publish has ended.
    pub fn handle_published(&mut self, now: Millis, ticket: &Ticket, published: Published) {
        self.handle_timeout(now);
        let (lane, event) = (&ticket.lease.lane, &ticket.message.event.id);
        if self
            .orphans
            .get(lane)
            .is_some_and(|orphan| *orphan == (ticket.lease.token, event.clone()))
        {
            self.orphans.remove(lane);
            return;
        }
        if !self.lanes.publishes(ticket) {
            return;
        }
        let ending = match published {
            Published::Confirmed => return self.confirmed(lane),
            Published::Failed(reason) => Ending::Failed(reason),
            Published::Rejected(reason) => Ending::Rejected(reason),
            Published::Deferred(reason) => Ending::Deferred(reason),
            Published::Unavailable(reason) => {
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

    fn confirmed(&mut self, lane: &OrderingKey) {
        // While it pauses, this is the answer to a publish from before.
        if !self.is_paused() {
            self.broker_failures = 0;
        }
        let waits = self.lanes.confirm(lane);
        if !waits || self.is_stopping() || self.is_paused() {
            self.end_lane(lane, None);
        }
    }

    /// Stops: claims no more, and releases what is not being published (F12). What is being
    /// published it waits for, but no longer than `patience`; then that is released too, and no
    /// failure is counted, although it may have reached the broker (P9). Of several calls the least
    /// patient counts.
    pub fn handle_stop(&mut self, now: Millis, patience: Duration) {
        self.handle_timeout(now);
        let until = self.now + patience;
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
            Some(stop) if stop.gave_up_on.is_none() && stop.patient_until <= self.now => {
                stop.gave_up_on = Some(publishing);
            }
            Some(_) | None => return,
        }
        // What the store said before does not count against the last try.
        self.error = None;
        self.store_paused_until = None;
        self.lanes.all().iter().for_each(|lane| self.end_lane(lane, None));
        self.orphans.clear();
    }

    /// What there is to do next; `None` if there is nothing before the next event or timeout.
    pub fn poll_action(&mut self) -> Option<Action> {
        let may_ask = self.transaction.is_none() && self.store_paused_until.is_none();
        if may_ask && !self.is_stopped() {
            let renew = self.lanes.to_renew(self.now);
            if !renew.is_empty() {
                self.transaction = Some(UnderWay::Renewal);
                return Some(Action::Renew(Renew::new(renew, self.settings.lease)));
            }
        }
        let publish = self.next_publishes();
        if !publish.is_empty() {
            self.counters.published += publish.len() as u64;
            return Some(Action::Publish(publish));
        }
        if may_ask && !self.is_stopped() {
            let (claim, claim_bytes) = if self.wants_claim() { self.free() } else { (0, 0) };
            if claim > 0 || !self.settlements.is_empty() {
                self.transaction = Some(UnderWay::Exchange);
                self.settling = core::mem::take(&mut self.settlements);
                let settle = self.settling.clone();
                return Some(Action::Exchange(Exchange { settle, claim, claim_bytes }));
            }
        }
        None
    }

    /// When to call [`RelayMachine::handle_timeout`], if nothing happens before; `None` if only
    /// something that happens can give it more to do. Once [`RelayMachine::poll_action`] has
    /// nothing more, this lies in the future.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Millis> {
        if self.is_stopped() {
            return None;
        }
        let patience = self.stop.as_ref().filter(|stop| stop.gave_up_on.is_none());
        let patience = patience.map(|stop| stop.patient_until).filter(|end| *end < Millis::MAX);
        if self.transaction.is_some() {
            return patience;
        }
        let claim =
            self.may_claim().then(|| self.claim_at.max(self.paused_until.unwrap_or(self.claim_at)));
        let settle = (!self.settlements.is_empty()).then_some(self.now);
        let next = [self.lanes.renew_at(), claim, settle].into_iter().flatten().min();
        let next = next.map(|at| at.max(self.store_paused_until.unwrap_or(at)));
        [next, patience].into_iter().flatten().min()
    }

    /// How many events it may claim, and with how many bytes there is enough.
    fn free(&self) -> (usize, usize) {
        let (events, bytes) = self.lanes.size();
        let free = self.settings.window.saturating_sub(events);
        let free_bytes = self.settings.window_bytes.saturating_sub(bytes);
        // The first publish after an outage is a probe.
        let free = if self.broker_failures > 0 { free.min(1) } else { free };
        if free_bytes == 0 { (0, 0) } else { (free, free_bytes) }
    }

    /// Whether it may claim when the time for it has come.
    fn may_claim(&self) -> bool {
        // Small claims while much is under way would only cost transactions.
        let worthwhile = self.lanes.is_empty() || self.free().0 * 2 >= self.settings.window;
        let probing = self.broker_failures > 0 && !self.lanes.is_empty();
        // What is claimed now would be counted as started if the event that is tried alone brings
        // the process down.
        !self.is_stopping() && worthwhile && !probing && !self.lanes.alone()
    }

    fn wants_claim(&self) -> bool {
        // A claim that rides along with a settlement costs no commit of its own, and finds what the
        // settlement set free.
        let is_time = self.claim_at <= self.now || !self.settlements.is_empty();
        self.may_claim() && !self.is_paused() && is_time
    }

    /// While the relay pauses or stops, there is none: what was waiting is given back, see
    /// [`RelayMachine::release_waiting`].
    fn next_publishes(&mut self) -> Vec<Ticket> {
        // What is tried alone (F4), and the first publish after an outage (F15), wait until nothing
        // is under way.
        let single = self.lanes.alone() || self.broker_failures > 0;
        if single && (!self.orphans.is_empty() || self.lanes.publishing() > 0) {
            return Vec::new();
        }
        let most = if single { 1 } else { usize::MAX };
        self.lanes.take(self.now, most, |lane| self.orphans.contains_key(lane))
    }

    /// Whether this is the answer to the transaction that is under way, which has then ended.
    fn ends(&mut self, what: UnderWay) -> bool {
        let ends = self.transaction == Some(what);
        if ends {
            self.transaction = None;
        }
        ends
    }

    /// Others hold this lane now: what is being published is waited for.
    fn orphan(&mut self, lost: Option<Lost>) {
        self.orphans.extend(lost.map(Lost::into_orphan));
    }

    fn end_lane(&mut self, lane: &OrderingKey, ending: Option<Ending>) {
        self.settlements.extend(self.lanes.end(lane, ending));
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
            self.paused_until = Some(self.now + self.pause(self.broker_failures));
        }
        self.release_waiting();
    }

    /// When half of a lease is over. One that never ends is never renewed: its end is no longer so
    /// long after its beginning as the setting says.
    fn renew_at(&self, until: Millis) -> Millis {
        if until == Millis::MAX { until } else { until.before(self.settings.lease / 2) }
    }

    fn pause(&self, failures: u32) -> Duration {
        let doubled = 1_u32.checked_shl(failures.saturating_sub(1).min(31)).unwrap_or(u32::MAX);
        self.settings.pause_base.saturating_mul(doubled).min(self.settings.pause_cap)
    }
}

impl Lost {
    fn into_orphan(self) -> (OrderingKey, (u64, EventId)) {
        (self.lane, (self.token, self.event))
    }
}
