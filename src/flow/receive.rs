//! Several events at one consumer, in one commit: one look, the handlers, one write (P5, F6).
//!
//! What a handler wrote before it failed cannot be told apart from what the others wrote, so all is
//! rolled back, and the handlers that did not fail run once more, without it. If one of these fails
//! then, nothing of them is committed, and they are to come again: no handler runs more than twice
//! in one delivery, but for conflicts. Of an event that stands twice in a batch, only one has its
//! turn.

use alloc::vec::Vec;
use core::convert::Infallible;

use super::{Ask, Called, Flow, Overlay, Steps, Stop, Then, Told, Tries};
use crate::boundary::{Batch, Decision, Query};
use crate::event::Body;
use crate::ids::Reason;
use crate::message::Message;
use crate::reception::{Receipt, Reception};
use crate::time::Millis;
use crate::transition::receive::{ContentDiffers, FailureCounted, Receive, Received};

/// What is known of an event from an earlier round, so that its handler does not run again.
#[derive(Debug, Clone, Default)]
enum Known {
    /// Its handler is to run.
    #[default]
    Nothing,
    /// Its handler ran in the first round, and what it did was rolled back.
    Ran,
    Deferred(Reason),
    Failed(Reason),
}

/// Receives several events in one commit, and answers for each in their order.
/// [`Inbox::receive_batch`](crate::Inbox::receive_batch) drives it with a closure.
///
/// ```
/// use twobox::flow::{Called, ReceiveFlow};
/// use twobox::store::{Call, drive};
/// use twobox::{Consumer, Inbox, Message, Millis, Receipt, Store};
/// use twobox_memory::MemoryStore;
///
/// /// Calls the handler of each event by its number in the batch.
/// struct Print<'m>(&'m [Message]);
///
/// impl<X> Call<X> for Print<'_> {
///     fn call(&mut self, _tx: &mut X, n: usize) -> Called {
///         println!("{}", self.0[n].event.id);
///         Called::Done
///     }
/// }
///
/// fn receive(store: &impl Store, messages: &[Message], now: Millis) -> Vec<Receipt> {
///     let inbox = Inbox::new(store, Consumer::new("loyalty").unwrap()).in_order();
///     let flow = ReceiveFlow::new(inbox.reception(), messages, now);
///     drive(store, flow, &mut Print(messages)).unwrap()
/// }
/// assert!(receive(&MemoryStore::new(), &[], Millis::new(1_000)).is_empty());
/// ```
#[derive(Debug, Clone)]
pub struct ReceiveFlow<'a> {
    reception: &'a Reception,
    messages: &'a [Message],
    now: Millis,
    known: Vec<Known>,
    /// Rounds that were rolled back, since a handler failed in them. What a round has found is
    /// known only once it has ended: a transaction that is run anew, or that met a conflict, may
    /// have shown a handler what was never committed.
    rounds: u32,
    tries: Tries,
    /// For each event where one with its id stands first; empty if none stands twice.
    twins: Vec<usize>,
    // Of this round.
    found: Vec<(usize, Known)>,
    /// For each event that stands first whether one with its id had its turn, and where.
    turns: Vec<Option<usize>>,
    receives: Vec<Receive>,
    overlay: Overlay,
    receipts: Vec<Receipt>,
    called: bool,
    spoilt: bool,
    /// What was decided of the event whose handler was called last.
    decided: Batch,
}

impl<'a> ReceiveFlow<'a> {
    /// Receives these messages at this time.
    #[must_use]
    pub fn new(reception: &'a Reception, messages: &'a [Message], now: Millis) -> Self {
        Self {
            reception,
            messages,
            now,
            known: messages.iter().map(|_| Known::Nothing).collect(),
            twins: twins(messages),
            found: Vec::new(),
            turns: Vec::new(),
            rounds: 0,
            tries: Tries::default(),
            receives: messages.iter().map(|message| reception.receive(message)).collect(),
            overlay: Overlay::default(),
            receipts: Vec::with_capacity(messages.len()),
            called: false,
            spoilt: false,
            decided: Batch::new(),
        }
    }

    fn begin(&mut self) -> Ask {
        self.tries.begun();
        self.found.clear();
        self.turns.clear();
        self.turns.resize(self.twins.len(), None);
        self.receipts.clear();
        (self.called, self.spoilt) = (false, false);
        Ask::Load(Query::rows(self.receives.iter().flat_map(Receive::keys)))
    }

    /// Goes on to the next event whose handler is to run.
    fn go_on(&mut self) -> Ask {
        while let Some(message) = self.messages.get(self.receipts.len()) {
            let at = self.receipts.len();
            let Decision { batch, outcome } =
                match self.overlay.decide(&self.receives[at], self.now) {
                    Ok(decision) => decision,
                    Err(refusal) => {
                        self.receipts.push(Receipt::Refused(refusal));
                        continue;
                    }
                };
            let receipt = match outcome {
                Received::WaitsFor(sequence) => Receipt::WaitsFor(sequence),
                // One of the same id had its turn, and is not applied all the same.
                Received::Applied if !self.takes_turn(at) => {
                    Receipt::Deferred(Reason::new("it stands in the batch before, unapplied"))
                }
                Received::Applied => match &self.known[at] {
                    Known::Ran if self.rounds >= 2 => Receipt::Deferred(Reason::new(
                        "it was rolled back with another event, whose handler failed",
                    )),
                    // It is kept if the handler does not fail.
                    Known::Nothing | Known::Ran => {
                        self.decided = batch;
                        return Ask::Call(at);
                    }
                    Known::Deferred(reason) => Receipt::Deferred(reason.clone()),
                    Known::Failed(reason) => self.count_failure(message, reason.clone()),
                },
                // Of what is done the position may have moved.
                Received::Duplicate => {
                    self.overlay.keep(&batch);
                    Receipt::Duplicate
                }
                Received::Poisoned => {
                    self.overlay.keep(&batch);
                    Receipt::Poisoned
                }
            };
            self.receipts.push(receipt);
        }
        self.end()
    }

    /// Whether this event is the first of its id to have its turn in this round.
    fn takes_turn(&mut self, at: usize) -> bool {
        let Some(first) = self.twins.get(at) else { return true };
        *self.turns[*first].get_or_insert(at) == at
    }

    fn called(&mut self, called: Called) -> Ask {
        let at = self.receipts.len();
        self.called = true;
        let receipt = match called {
            Called::Conflict(key) => return self.tries.conflict(key),
            Called::Done => self.applied(at, None),
            Called::Effect(body) => self.applied(at, Some(body)),
            Called::Defer(reason) => {
                self.spoilt = true;
                self.found.push((at, Known::Deferred(reason.clone())));
                Receipt::Deferred(reason)
            }
            Called::Failed(reason) => {
                self.spoilt = true;
                self.found.push((at, Known::Failed(reason.clone())));
                self.count_failure(&self.messages[at], reason)
            }
        };
        self.receipts.push(receipt);
        self.go_on()
    }

    fn applied(&mut self, at: usize, effect: Option<Body>) -> Receipt {
        self.found.push((at, Known::Ran));
        let Some(body) = effect else {
            self.overlay.keep(&core::mem::take(&mut self.decided));
            return Receipt::Applied;
        };
        match self.overlay.run(&self.receives[at].clone().effect(body), self.now) {
            Ok(_) => Receipt::Applied,
            Err(refusal) => Receipt::Refused(refusal),
        }
    }

    fn count_failure(&mut self, message: &Message, reason: Reason) -> Receipt {
        let count = self.reception.count_failure(message, reason.clone());
        let counted: Result<_, ContentDiffers> = self.overlay.run(&count, self.now);
        match counted {
            Ok(FailureCounted::ComesAgain) => Receipt::Failed(reason),
            Ok(FailureCounted::Poisoned) => Receipt::Poisoned,
            Ok(FailureCounted::AppliedAlready) => Receipt::Duplicate,
            Err(refusal) => Receipt::Refused(refusal),
        }
    }

    fn end(&mut self) -> Ask {
        if self.spoilt {
            return Ask::RollBack;
        }
        debug_assert_eq!(self.receipts.len(), self.messages.len(), "one receipt for each message");
        let batch = core::mem::take(&mut self.overlay).into_batch();
        match (batch.is_empty(), self.called) {
            (false, _) => Ask::Write(batch, Then::Commit),
            (true, true) => Ask::Commit,
            (true, false) => Ask::RollBack,
        }
    }

    fn ended(&mut self) -> Ask {
        if let Some(again) = self.tries.again() {
            return again;
        }
        if self.spoilt {
            self.rounds += 1;
            for (at, known) in self.found.drain(..) {
                self.known[at] = known;
            }
            return Ask::Begin;
        }
        Ask::Done
    }
}

/// For each event that stands more than once, where it stands first.
fn twins(messages: &[Message]) -> Vec<usize> {
    let id = |at: usize| &messages[at].event.id;
    let mut places: Vec<usize> = (0..messages.len()).collect();
    places.sort_unstable_by_key(|at| (id(*at), *at));
    if places.windows(2).all(|pair| id(pair[0]) != id(pair[1])) {
        return Vec::new();
    }
    let mut twins: Vec<usize> = (0..messages.len()).collect();
    for same in places.chunk_by(|a, b| id(*a) == id(*b)) {
        same.iter().for_each(|at| twins[*at] = same[0]);
    }
    twins
}

impl Flow for ReceiveFlow<'_> {
    type Output = Vec<Receipt>;
    type Refusal = Infallible;

    fn finish(self) -> Result<Vec<Receipt>, Stop<Infallible>> {
        self.tries.finish(self.receipts)
    }
}

impl Steps for ReceiveFlow<'_> {
    fn next(&mut self, told: Told<'_>) -> Ask {
        match told {
            Told::Start if self.messages.is_empty() => Ask::Done,
            Told::Start => Ask::Begin,
            Told::Begun => self.begin(),
            Told::Rows(rows) => {
                self.overlay = Overlay::new(rows, self.receives.len());
                self.go_on()
            }
            Told::Called(called) => self.called(called),
            Told::Conflict(key) => self.tries.conflict(key),
            Told::Ended => self.ended(),
        }
    }
}
