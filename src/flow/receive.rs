//! Several events at one consumer, in one commit: one look, the handlers, one write (P5, F6).
//!
//! What a handler wrote before it failed cannot be told apart from what the others wrote, so all is
//! rolled back, and the handlers that did not fail run once more, without it. If one of these fails
//! then, nothing of them is committed, and they are to come again: no handler runs more than twice
//! in one delivery, but for conflicts.

use alloc::vec::Vec;
use core::convert::Infallible;

use super::{Ask, Called, Flow, Overlay, Steps, Stop, Then, Told, Tries};
use crate::boundary::Query;
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
            // Only looked at: what is decided is not kept before the handler has run.
            let receipt = match self.overlay.look(&self.receives[at], self.now) {
                Err(refusal) => Receipt::Refused(refusal),
                Ok(Received::WaitsFor(sequence)) => Receipt::WaitsFor(sequence),
                Ok(Received::Applied) => match &self.known[at] {
                    Known::Nothing => return Ask::Call(at),
                    Known::Ran if self.rounds < 2 => return Ask::Call(at),
                    Known::Ran => Receipt::Deferred(Reason::new(
                        "it was rolled back with another event, whose handler failed",
                    )),
                    Known::Deferred(reason) => Receipt::Deferred(reason.clone()),
                    Known::Failed(reason) => self.count_failure(message, reason.clone()),
                },
                Ok(Received::Duplicate) => self.keep(at, Receipt::Duplicate),
                Ok(Received::Poisoned) => self.keep(at, Receipt::Poisoned),
            };
            self.receipts.push(receipt);
        }
        self.end()
    }

    /// Keeps what was decided of an event that is done: its position may have moved.
    fn keep(&mut self, at: usize, receipt: Receipt) -> Receipt {
        match self.overlay.run(&self.receives[at], self.now) {
            Ok(_) => receipt,
            Err(refusal) => Receipt::Refused(refusal),
        }
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
        let receive = match effect {
            None => self.receives[at].clone(),
            Some(body) => self.receives[at].clone().effect(body),
        };
        match self.overlay.run(&receive, self.now) {
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
