//! Several events at one consumer, in one commit: one look, the handlers, one write (P5, F6).
//!
//! What a handler wrote before it failed cannot be told apart from what the others wrote, so all is
//! rolled back, and the handlers that did not fail run once more, without it. If one of these fails
//! then, nothing of them is committed, and they are to come again: no handler runs more than twice
//! in one delivery, but for conflicts.

use alloc::vec::Vec;
use core::convert::Infallible;

use super::{Ask, Called, Flow, Overlay, Steps, Stop, Then, Told, Tries};
use crate::boundary::{Batch, Decision, Query};
use crate::event::Body;
use crate::ids::Reason;
use crate::inbox::{Receipt, Reception};
use crate::message::Message;
use crate::time::Millis;
use crate::transition::receive::{ContentDiffers, FailureCounted, Receive, Received};

/// What is known of an event from an earlier round, so that its handler does not run again.
#[derive(Debug, Clone)]
enum Known {
    /// Its handler is to run.
    Nothing,
    /// Its handler ran in the first round, and what it did was rolled back.
    Ran,
    Deferred(Reason),
    Failed(Reason),
}

/// Receives several events in one commit, and answers for each in their order.
#[derive(Debug, Clone)]
pub struct ReceiveFlow<'a> {
    reception: &'a Reception,
    messages: &'a [Message],
    now: Millis,
    known: Vec<Known>,
    /// Rounds that were rolled back, since a handler failed in them.
    rounds: u32,
    tries: Tries,
    // Of this round.
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

    fn called(&mut self, called: Called) -> Ask {
        let at = self.receipts.len();
        self.called = true;
        let receipt = match called {
            Called::Conflict(key) => return self.tries.conflict(key),
            Called::Done => self.applied(at, None),
            Called::Effect(body) => self.applied(at, Some(body)),
            Called::Defer(reason) => {
                self.spoilt = true;
                self.known[at] = Known::Deferred(reason.clone());
                Receipt::Deferred(reason)
            }
            Called::Failed(reason) => {
                self.spoilt = true;
                self.known[at] = Known::Failed(reason.clone());
                self.count_failure(&self.messages[at], reason)
            }
        };
        self.receipts.push(receipt);
        self.go_on()
    }

    fn applied(&mut self, at: usize, effect: Option<Body>) -> Receipt {
        self.known[at] = Known::Ran;
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
            return Ask::Begin;
        }
        Ask::Done
    }
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
                self.overlay = Overlay::new(rows);
                self.go_on()
            }
            Told::Called(called) => self.called(called),
            Told::Conflict(key) => self.tries.conflict(key),
            Told::Ended => self.ended(),
        }
    }
}
