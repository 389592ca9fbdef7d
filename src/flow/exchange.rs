//! The transaction of a relay: first settle, then claim, in one commit.

use core::convert::Infallible;

use super::run::unasked;
use super::{Ask, Flow, Steps, Stop, Then, Told, Tries};
use crate::boundary::{Decision, Rows, Transition};
use crate::time::Millis;
use crate::transition::claim::{Claim, Claimed};
use crate::transition::settle::{Settle, Settled};

/// What an exchange came to: what was settled, and what was claimed.
pub type Exchanged = (Option<Settled>, Option<Claimed>);

/// Settles and claims in one transaction. A claim that finds nothing, and has nothing to settle,
/// commits nothing.
#[derive(Debug, Clone)]
pub struct ExchangeFlow<'a> {
    settle: Option<Settle<'a>>,
    claim: Option<Claim<'a>>,
    now: Millis,
    assumes: bool,
    tries: Tries,
    /// What this transaction has come to so far.
    settled: Option<Settled>,
    claimed: Option<Claimed>,
    wrote: bool,
}

impl<'a> ExchangeFlow<'a> {
    /// Settles and claims at this time, whichever is given. If `assumes`, it settles without a look
    /// at the lanes, as long as no lease turns out to be stale.
    #[must_use]
    pub fn new(
        settle: Option<Settle<'a>>,
        claim: Option<Claim<'a>>,
        now: Millis,
        assumes: bool,
    ) -> Self {
        let (settled, claimed, tries) = (None, None, Tries::default());
        Self { settle, claim, now, assumes, tries, settled, claimed, wrote: false }
    }

    fn begin(&mut self) -> Ask {
        self.tries.begun();
        (self.settled, self.claimed, self.wrote) = (None, None, false);
        match &self.settle {
            None => self.look_for_more(),
            Some(settle) => match settle.assume(self.now).filter(|_| self.assumes) {
                Some(assumed) => self.settle(assumed),
                None => Ask::Load(settle.query(self.now)),
            },
        }
    }

    fn settle(&mut self, Decision { batch, outcome }: Decision<Settled>) -> Ask {
        self.settled = Some(outcome);
        if batch.is_empty() {
            return self.look_for_more();
        }
        self.wrote = true;
        let claim = self.claim.as_ref().map(|claim| Then::Load(claim.query(self.now)));
        Ask::Write(batch, claim.unwrap_or(Then::Commit))
    }

    fn look_for_more(&self) -> Ask {
        match &self.claim {
            Some(claim) => Ask::Load(claim.query(self.now)),
            None => self.end(),
        }
    }

    fn end(&self) -> Ask {
        if self.wrote { Ask::Commit } else { Ask::RollBack }
    }

    fn rows(&mut self, rows: &Rows) -> Ask {
        match (&self.settle, &self.claim) {
            (Some(settle), _) if self.settled.is_none() => {
                let Ok(decision) = settle.decide(self.now, rows);
                self.settle(decision)
            }
            (_, Some(claim)) => {
                let Ok(Decision { batch, outcome }) = claim.decide(self.now, rows);
                self.claimed = Some(outcome);
                if batch.is_empty() { self.end() } else { Ask::Write(batch, Then::Commit) }
            }
            (_, None) => unasked(),
        }
    }
}

impl Steps for ExchangeFlow<'_> {
    fn next(&mut self, told: Told<'_>) -> Ask {
        match told {
            Told::Start if self.settle.is_none() && self.claim.is_none() => Ask::Done,
            Told::Start => Ask::Begin,
            Told::Begun => self.begin(),
            Told::Rows(rows) => self.rows(rows),
            Told::Conflict(key) => {
                self.assumes = false;
                self.tries.conflict(key)
            }
            Told::Called(_) => unasked(),
            Told::Ended => self.tries.again().unwrap_or(Ask::Done),
        }
    }
}

impl Flow for ExchangeFlow<'_> {
    type Output = Exchanged;
    type Refusal = Infallible;

    fn finish(self) -> Result<Exchanged, Stop<Infallible>> {
        self.tries.finish((self.settled, self.claimed))
    }
}
