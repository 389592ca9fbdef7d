//! The machine itself: which lanes it holds, what is being published, what is to be settled, and
//! when to come again.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;

use super::Published;
use crate::checked::Checked;
use crate::ids::{EventId, Invalid, OrderingKey, Owner, Reason};
use crate::policy::DeliveryPolicy;
use crate::time::Millis;
use crate::transition::claim::{Claim, Claimed, Delivery};
use crate::transition::lane::LeaseRef;
use crate::transition::settle::{Ending, Renewed, RunResult, Settle, Settled};

/// How a relay works. All defaults are here.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RelaySettings {
    /// The relay's own name; two relays that run at once must not share one.
    pub owner: Owner,
    /// How delivery is retried and given up.
    pub policy: Checked<DeliveryPolicy>,
    /// How many events may be claimed and not yet settled. Default 256.
    pub window: usize,
    /// How many events of one lane are claimed at once. Default 16.
    pub run: usize,
    /// How long a lease lasts; it is renewed when half of it is over. It must not be longer than
    /// the policy's longest backoff. Default 30 s.
    pub lease: Duration,
    /// When to look for events that nobody has announced. Default 1 s.
    pub poll: Duration,
    /// The first pause after the broker could not be reached, or the store failed; it doubles each
    /// time. Default 500 ms.
    pub pause_base: Duration,
    /// The longest pause. Default 30 s.
    pub pause_cap: Duration,
}

impl RelaySettings {
    /// The defaults for a relay of this name.
    #[must_use]
    pub fn new(owner: Owner) -> Self {
        Self {
            owner,
            policy: Checked::default(),
            window: 256,
            run: 16,
            lease: Duration::from_secs(30),
            poll: Duration::from_secs(1),
            pause_base: Duration::from_millis(500),
            pause_cap: Duration::from_secs(30),
        }
    }

    /// The settings, if they go together.
    ///
    /// # Errors
    ///
    /// [`Invalid`] if the window is not 1 to [`Claim::MAX`], the run is not 1 to the window, a time
    /// is too short, or the lease is longer than the policy's longest backoff.
    pub fn checked(self) -> Result<Checked<Self>, Invalid> {
        let refuse = |field, reason: &str| Err(Invalid::Unsafe { field, reason: reason.into() });
        if self.window == 0 || self.window > Claim::MAX {
            return Err(Invalid::OutOfRange {
                field: "window",
                min: 1,
                max: Claim::MAX as u64,
                value: self.window as u64,
            });
        }
        if self.run == 0 || self.run > self.window {
            return Err(Invalid::OutOfRange {
                field: "run",
                min: 1,
                max: self.window as u64,
                value: self.run as u64,
            });
        }
        if self.lease < Duration::from_millis(10) {
            return refuse(
                "lease",
                "it would run out before anything could be published; give at least 10 ms",
            );
        }
        self.policy.check_lease(self.lease)?;
        if self.poll < Duration::from_millis(1) || self.pause_base < Duration::from_millis(1) {
            return refuse("poll and pause_base", "the relay would never rest; give at least 1 ms");
        }
        if self.pause_cap < self.pause_base {
            return refuse("pause_cap", "it is shorter than pause_base");
        }
        Ok(Checked::new(self))
    }
}

/// What there is to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use]
pub enum Action {
    /// Settle and claim in one transaction, at the time that [`RelayMachine::now`] has now, then
    /// [`RelayMachine::handle_exchanged`], or [`RelayMachine::handle_store_failed`] if it failed or
    /// nobody knows.
    Exchange(Exchange),
    /// Publish these, at the same time if possible: no two are of the same lane. Then
    /// [`RelayMachine::handle_published`] for each, as soon as it has ended, or
    /// [`RelayMachine::handle_unread`].
    Publish(Vec<Ticket>),
    /// Renew these leases for another [`RelaySettings::lease`] from [`RelayMachine::now`] on, then
    /// [`RelayMachine::handle_renewed`] or [`RelayMachine::handle_store_failed`].
    Renew(Vec<LeaseRef>),
}

/// One transaction of the relay: first settle, then claim.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Exchange {
    /// What became of runs; may be empty.
    pub settle: Vec<RunResult>,
    /// How many events to claim; 0 for none.
    pub claim: usize,
}

impl Exchange {
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
        (settle, claim.map(|claim| claim.run(settings.run)))
    }
}

/// One event to be published.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// The lease under which it is published.
    pub lease: LeaseRef,
    /// Which event, and where it stands.
    pub delivery: Delivery,
}

/// What a relay has done since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
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

/// What a relay is about.
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
pub struct Status {
    /// What it is about.
    pub phase: Phase,
    /// What it has done so far.
    pub counters: Counters,
    /// How many publishes are under way; once it has stopped, how many it no longer waited for.
    pub publishing: usize,
    /// What the store said, if the last that was asked of it failed. If a relay stopped with it, it
    /// could not give back its leases, and they run out by themselves.
    pub error: Option<Reason>,
}

/// A run that the relay holds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Held {
    token: u64,
    until: Millis,
    renew_at: Millis,
    /// Nothing else is published while its event is (F4).
    alone: bool,
    waiting: VecDeque<Delivery>,
    publishing: Option<EventId>,
    confirmed: Vec<EventId>,
}

impl Held {
    fn publishes(&self, ticket: &Ticket) -> bool {
        self.token == ticket.lease.token && self.publishing.as_ref() == Some(&ticket.delivery.event)
    }
}

/// Which transaction is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum UnderWay {
    Exchange,
    Renewal,
}

/// A relay without clock, randomness or I/O; see the module for how to drive it. It is a value:
/// whoever looks at all that can happen to it copies and compares it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RelayMachine {
    settings: Checked<RelaySettings>,
    /// The machine's own time, which never steps back, and the clock's time that it was last told.
    now: Millis,
    told: Millis,
    held: BTreeMap<OrderingKey, Held>,
    /// Publishes that are under way although their lease is lost: nothing else of their lane is
    /// published before they end (P4).
    orphans: BTreeMap<OrderingKey, (u64, EventId)>,
    /// What is to be settled, and what the exchange under way settles.
    results: Vec<RunResult>,
    settling: Vec<RunResult>,
    transaction: Option<UnderWay>,
    claim_at: Millis,
    /// Somebody committed events while a transaction was under way, which may have begun before.
    woken: bool,
    /// Doubles with each failure in a row: of the broker, and of the store.
    broker_failures: u32,
    store_failures: u32,
    /// The last envelopes could not be read: that rows can be written says nothing about it.
    unread: bool,
    paused_until: Option<Millis>,
    store_paused_until: Option<Millis>,
    stopping: bool,
    counters: Counters,
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
            held: BTreeMap::new(),
            orphans: BTreeMap::new(),
            results: Vec::new(),
            settling: Vec::new(),
            transaction: None,
            claim_at: now,
            woken: false,
            broker_failures: 0,
            store_failures: 0,
            unread: false,
            paused_until: None,
            store_paused_until: None,
            stopping: false,
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
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What it is about.
    #[must_use]
    pub fn phase(&self) -> Phase {
        if self.is_stopped() {
            Phase::Stopped
        } else if self.stopping {
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
    pub fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    /// Whether it holds nothing and has nothing to settle. It may still claim when its time comes.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.held.is_empty() && self.results.is_empty() && self.transaction.is_none()
    }

    /// Whether it was asked to stop, and everything that it held is settled.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.stopping && self.is_idle()
    }

    /// The time to give to the transitions that this relay runs. It follows the clock that
    /// `handle_*` are given, but where that steps back it goes on from where it was (F7): leases do
    /// not seem to last for longer, and the relay does not wait for the clock to catch up.
    #[must_use]
    pub fn now(&self) -> Millis {
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
    }

    /// Somebody has committed events: there is something to claim before the next poll.
    pub fn handle_wakeup(&mut self, now: Millis) {
        self.handle_timeout(now);
        self.claim_at = self.claim_at.min(self.now);
        self.woken = self.transaction.is_some();
    }

    /// An exchange is committed.
    pub fn handle_exchanged(
        &mut self,
        now: Millis,
        settled: Option<&Settled>,
        claimed: Option<Claimed>,
    ) {
        self.handle_timeout(now);
        if !self.ends(UnderWay::Exchange) {
            return;
        }
        self.store_answered();
        self.settling.clear();
        if let Some(settled) = settled {
            self.counters.confirmed += settled.confirmed as u64;
            self.counters.failed += settled.retried as u64;
            self.counters.dead += settled.dead.len() as u64;
            self.counters.stale += settled.stale.len() as u64;
        }
        let Some(claimed) = claimed else {
            // A settled lane may have more to deliver.
            self.claim_at = self.claim_at.min(self.now);
            return;
        };
        self.counters.dead += claimed.dead.len() as u64;
        let poll = self.now + self.settings.poll;
        let woken = core::mem::take(&mut self.woken).then_some(self.now);
        self.claim_at = woken.or(claimed.next_due).map_or(poll, |due| due.clamp(self.now, poll));
        for run in claimed.runs {
            self.counters.claimed += run.deliveries.len() as u64;
            let held = Held {
                token: run.lease.token,
                until: run.until,
                renew_at: self.renew_at(run.until),
                alone: run.alone,
                waiting: run.deliveries.into(),
                publishing: None,
                confirmed: Vec::new(),
            };
            // Our own lease of the lane may have run out before we claimed it again.
            let lost = self.held.insert(run.lease.lane.clone(), held);
            self.lose(run.lease.lane, lost);
        }
        if self.stopping || self.paused_until.is_some() {
            self.release_waiting();
        }
    }

    /// Leases are renewed, or not any more: what is not ours is not published.
    pub fn handle_renewed(&mut self, now: Millis, renewed: &Renewed) {
        self.handle_timeout(now);
        if !self.ends(UnderWay::Renewal) {
            return;
        }
        self.store_answered();
        for (lease, until) in &renewed.leases {
            let renew_at = self.renew_at(*until);
            if let Some(held) =
                self.held.get_mut(&lease.lane).filter(|held| held.token == lease.token)
            {
                held.until = *until;
                held.renew_at = renew_at;
            }
        }
        for stale in &renewed.stale {
            if self.held.get(&stale.lease.lane).is_some_and(|held| held.token == stale.lease.token)
            {
                self.counters.stale += 1;
                let lost = self.held.remove(&stale.lease.lane);
                self.lose(stale.lease.lane.clone(), lost);
            }
        }
    }

    /// The transaction of the last exchange or renewal failed, or nobody knows whether it took.
    /// What was to be settled is settled again after a pause (F11); if it had been settled, that
    /// will turn out to be stale.
    pub fn handle_store_failed(&mut self, now: Millis) {
        self.handle_timeout(now);
        if self.transaction.take().is_none() {
            return;
        }
        self.results.append(&mut self.settling);
        self.store_away();
    }

    /// The envelopes of these tickets could not be read: they are released, and no failure is
    /// counted, since nothing was published. The relay goes on after a pause (F11).
    pub fn handle_unread(&mut self, now: Millis, tickets: &[Ticket]) {
        tickets.iter().for_each(|ticket| self.handle_published(now, ticket, Published::Abandoned));
        self.handle_timeout(now);
        self.unread = true;
        self.store_away();
    }

    /// A publish has ended.
    pub fn handle_published(&mut self, now: Millis, ticket: &Ticket, published: Published) {
        self.handle_timeout(now);
        let lane = &ticket.lease.lane;
        if self.orphans.get(lane).is_some_and(|(token, event)| {
            (*token, event) == (ticket.lease.token, &ticket.delivery.event)
        }) {
            self.orphans.remove(lane);
            return;
        }
        let Some(held) = self.held.get_mut(lane).filter(|held| held.publishes(ticket)) else {
            return;
        };
        held.publishing = None;
        self.unread &= published == Published::Abandoned;
        let event = ticket.delivery.event.clone();
        let (mut unavailable, mut given_up) = (false, false);
        let ended = match published {
            Published::Confirmed => {
                // While it pauses, this is the answer to a publish from before.
                if self.paused_until.is_none() {
                    self.broker_failures = 0;
                }
                held.confirmed.push(event);
                if !held.waiting.is_empty() && !self.stopping && self.paused_until.is_none() {
                    return;
                }
                None
            }
            Published::Failed(reason) => Some((event, Ending::Failed(reason))),
            Published::Rejected(reason) => Some((event, Ending::Rejected(reason))),
            Published::Deferred(reason) => Some((event, Ending::Deferred(reason))),
            Published::Unavailable(reason) => {
                unavailable = true;
                Some((event, Ending::Unavailable(reason)))
            }
            Published::Abandoned => {
                given_up = true;
                None
            }
        };
        self.end_run(lane, ended);
        if unavailable {
            self.broker_away();
        } else if given_up && !self.stopping {
            self.rest();
        }
    }

    /// Whether a publish that was handed out and has not begun should still begin. If not, it is
    /// [`Published::Abandoned`].
    #[must_use]
    pub fn may_begin(&self, ticket: &Ticket) -> bool {
        let held = self.held.get(&ticket.lease.lane).is_some_and(|held| held.publishes(ticket));
        held && !self.stopping && self.paused_until.is_none()
    }

    /// Stops: claims no more, and releases what is not being published (F12). What is being
    /// published is still waited for; see [`RelayMachine::abandon`].
    pub fn handle_stop(&mut self, now: Millis) {
        self.handle_timeout(now);
        self.stopping = true;
        self.release_waiting();
    }

    /// Waits no longer for publishes that are under way: their outcome is unknown, so they are
    /// released, and no failure is counted (F12). That is tried at once, even in a pause after the
    /// store has failed.
    pub fn abandon(&mut self, now: Millis) {
        self.handle_timeout(now);
        self.store_paused_until = None;
        let lanes: Vec<OrderingKey> = self.held.keys().cloned().collect();
        lanes.iter().for_each(|lane| self.end_run(lane, None));
        self.orphans.clear();
    }

    /// What there is to do next; `None` if there is nothing before the next event or timeout.
    pub fn poll_action(&mut self) -> Option<Action> {
        if self.transaction.is_none() && self.store_paused_until.is_none() {
            let renew: Vec<LeaseRef> = self
                .held
                .iter()
                .filter(|(_, held)| held.renew_at <= self.now)
                .map(|(lane, held)| LeaseRef { lane: lane.clone(), token: held.token })
                .collect();
            if !renew.is_empty() {
                self.transaction = Some(UnderWay::Renewal);
                return Some(Action::Renew(renew));
            }
        }
        let publish = self.next_publishes();
        if !publish.is_empty() {
            self.counters.published += publish.len() as u64;
            return Some(Action::Publish(publish));
        }
        if self.transaction.is_none() && self.store_paused_until.is_none() {
            let claim = if self.wants_claim() { self.free() } else { 0 };
            if claim > 0 || !self.results.is_empty() {
                self.transaction = Some(UnderWay::Exchange);
                self.settling = core::mem::take(&mut self.results);
                return Some(Action::Exchange(Exchange { settle: self.settling.clone(), claim }));
            }
        }
        None
    }

    /// When to call [`RelayMachine::handle_timeout`], if nothing happens before; `None` if only
    /// something that happens can give it more to do. Once [`RelayMachine::poll_action`] has
    /// nothing more, this lies in the future.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Millis> {
        if self.transaction.is_some() {
            return None;
        }
        let renew = self.held.values().map(|held| held.renew_at).min();
        let claim =
            self.may_claim().then(|| self.claim_at.max(self.paused_until.unwrap_or(self.claim_at)));
        let settle = (!self.results.is_empty()).then_some(self.now);
        let next = [renew, claim, settle].into_iter().flatten().min();
        next.map(|at| at.max(self.store_paused_until.unwrap_or(at)))
    }

    fn free(&self) -> usize {
        let held = |held: &Held| {
            held.waiting.len() + held.confirmed.len() + usize::from(held.publishing.is_some())
        };
        let used: usize = self.held.values().map(held).sum();
        let free = self.settings.window.saturating_sub(used);
        // The first publish after an outage is a probe.
        if self.broker_failures > 0 { free.min(1) } else { free }
    }

    /// Whether it may claim when the time for it has come.
    fn may_claim(&self) -> bool {
        // Small claims while much is under way would only cost transactions.
        let worthwhile = self.held.is_empty() || self.free() * 2 >= self.settings.window;
        let probing = self.broker_failures > 0 && !self.held.is_empty();
        // What is claimed now would be counted as started if the event that is tried alone brings
        // the process down.
        let trying = self.held.values().any(|held| held.alone);
        !self.stopping && worthwhile && !probing && !trying
    }

    fn wants_claim(&self) -> bool {
        // A claim that rides along with a settlement costs no commit of its own, and finds what the
        // settlement set free.
        let is_time = self.claim_at <= self.now || !self.results.is_empty();
        self.may_claim() && self.paused_until.is_none() && is_time
    }

    /// While the relay pauses or stops, there is none: what was waiting is given back, see
    /// [`RelayMachine::release_waiting`].
    fn next_publishes(&mut self) -> Vec<Ticket> {
        // What is tried alone (F4), and the first publish after an outage (F15), wait until nothing
        // is under way.
        let alone = self.held.values().any(|held| held.alone);
        let single = alone || self.broker_failures > 0;
        if single
            && (!self.orphans.is_empty()
                || self.held.values().any(|held| held.publishing.is_some()))
        {
            return Vec::new();
        }
        let most = if single { 1 } else { usize::MAX };
        let mut tickets = Vec::new();
        for (lane, held) in self.held.iter_mut().filter(|(_, held)| held.alone == alone) {
            // Under a lease that has run out another may publish: it is renewed first (F3).
            if tickets.len() < most
                && held.publishing.is_none()
                && self.now < held.until
                && !self.orphans.contains_key(lane)
                && let Some(delivery) = held.waiting.pop_front()
            {
                held.publishing = Some(delivery.event.clone());
                tickets.push(Ticket {
                    lease: LeaseRef { lane: lane.clone(), token: held.token },
                    delivery,
                });
            }
        }
        tickets
    }

    /// Whether this is the answer to the transaction that is under way, which has then ended.
    fn ends(&mut self, what: UnderWay) -> bool {
        let ends = self.transaction == Some(what);
        if ends {
            self.transaction = None;
        }
        ends
    }

    /// Others hold this lane now: what was confirmed is theirs to find out, what is being published
    /// is waited for.
    fn lose(&mut self, lane: OrderingKey, lost: Option<Held>) {
        if let Some(Held { token, publishing: Some(event), .. }) = lost {
            self.orphans.insert(lane, (token, event));
        }
    }

    fn end_run(&mut self, lane: &OrderingKey, ended: Option<(EventId, Ending)>) {
        if let Some(held) = self.held.remove(lane) {
            let lease = LeaseRef { lane: lane.clone(), token: held.token };
            self.results.push(RunResult { lease, confirmed: held.confirmed, ended });
        }
    }

    /// Ends the runs of which nothing is being published; what they have left is released.
    fn release_waiting(&mut self) {
        let resting = self
            .held
            .iter()
            .filter(|(_, held)| held.publishing.is_none())
            .map(|(lane, _)| lane.clone());
        let resting: Vec<OrderingKey> = resting.collect();
        resting.iter().for_each(|lane| self.end_run(lane, None));
    }

    fn store_answered(&mut self) {
        if !self.unread {
            self.store_failures = 0;
        }
    }

    fn store_away(&mut self) {
        self.counters.store_failures += 1;
        self.store_failures += 1;
        let pause = self.pause(self.store_failures);
        self.store_paused_until = Some(self.now + pause);
        self.claim_at = self.claim_at.max(self.now + pause);
    }

    fn broker_away(&mut self) {
        self.counters.unavailable += 1;
        // The answers of one batch are one failure; it may rest already for another reason.
        if self.paused_until.is_none() || self.broker_failures == 0 {
            self.broker_failures += 1;
        }
        self.rest();
    }

    /// Pauses, and gives back what is not being published.
    fn rest(&mut self) {
        if self.paused_until.is_none() {
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
