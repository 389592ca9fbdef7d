//! One transition in a transaction of its own, and the user's own work in one.

use crate::boundary::{Decision, Transition};
use crate::time::Millis;

use super::{Ask, Called, Flow, Steps, Stop, Then, Told, Tries};

/// Runs one transition in a transaction of its own, and commits it if it changes something. After a
/// conflict it is run again.
#[derive(Debug, Clone)]
pub struct RunFlow<T: Transition> {
    transition: T,
    now: Millis,
    /// Whether it writes what it assumes first, and looks only after a conflict.
    assumes: bool,
    tries: Tries,
    outcome: Option<Result<T::Outcome, T::Refusal>>,
}

impl<T: Transition> RunFlow<T> {
    /// Runs this transition at this time. If `assumes`, it first writes what it assumes.
    #[must_use]
    pub fn new(transition: T, now: Millis, assumes: bool) -> Self {
        Self { transition, now, assumes, tries: Tries::default(), outcome: None }
    }

    fn write(&mut self, decision: Decision<T::Outcome>) -> Ask {
        let Decision { batch, outcome } = decision;
        self.outcome = Some(Ok(outcome));
        if batch.is_empty() { Ask::RollBack } else { Ask::Write(batch, Then::Commit) }
    }
}

impl<T: Transition> Steps for RunFlow<T> {
    fn next(&mut self, told: Told<'_>) -> Ask {
        match told {
            Told::Start => Ask::Begin,
            Told::Begun => {
                self.tries.begun();
                self.outcome = None;
                let assumed = self.assumes.then(|| self.transition.assume(self.now)).flatten();
                match assumed {
                    Some(decision) => self.write(decision),
                    None => Ask::Load(self.transition.query(self.now)),
                }
            }
            Told::Rows(rows) => match self.transition.decide(self.now, rows) {
                Ok(decision) => self.write(decision),
                Err(refusal) => {
                    self.outcome = Some(Err(refusal));
                    Ask::RollBack
                }
            },
            Told::Conflict(key) => {
                self.assumes = false;
                self.tries.conflict(key)
            }
            Told::Called(_) => unasked(),
            Told::Ended => self.tries.again().unwrap_or(Ask::Done),
        }
    }
}

impl<T: Transition> Flow for RunFlow<T> {
    type Output = T::Outcome;
    type Refusal = T::Refusal;

    fn finish(self) -> Result<T::Outcome, Stop<T::Refusal>> {
        let outcome = self.tries.finish(self.outcome)?;
        // It is done when it has decided.
        outcome.ok_or(Stop::Conflict(None))?.map_err(Stop::Refused)
    }
}

/// The user's own work in a transaction of its own. The value and the error are kept by whoever
/// calls the handler: here it counts only whether it is to be committed.
#[derive(Debug, Clone, Default)]
pub struct WriteFlow {
    tries: Tries,
}

impl Steps for WriteFlow {
    fn next(&mut self, told: Told<'_>) -> Ask {
        match told {
            Told::Start => Ask::Begin,
            Told::Begun => {
                self.tries.begun();
                Ask::Call(0)
            }
            Told::Called(Called::Done | Called::Effect(_)) => Ask::Commit,
            Told::Called(Called::Defer(_) | Called::Failed(_)) => Ask::RollBack,
            Told::Called(Called::Conflict(key)) | Told::Conflict(key) => self.tries.conflict(key),
            Told::Rows(_) => unasked(),
            Told::Ended => self.tries.again().unwrap_or(Ask::Done),
        }
    }
}

impl Flow for WriteFlow {
    type Output = ();
    type Refusal = core::convert::Infallible;

    fn finish(self) -> Result<(), Stop<core::convert::Infallible>> {
        self.tries.finish(())
    }
}

/// What a driver tells that was never asked: begin anew, which is always right.
pub(super) fn unasked() -> Ask {
    debug_assert!(false, "a flow is told what it has not asked");
    Ask::RollBack
}
