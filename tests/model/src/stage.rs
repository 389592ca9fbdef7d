//! The store that the flows of a step run on: the memory store, with a bug around the rules, a
//! transaction that has read before others committed, and a commit whose answer is lost.

use core::fmt;
use std::cell::RefCell;

use twobox::{
    Applied, Batch, Load, Millis, Query, Reader, Rows, Store, StoreError, Tables, Transaction,
};
use twobox_memory::{MemoryStore, State};

use crate::bug::Bug;
use crate::scope::named;
use crate::step::Step;

/// A store for one step.
pub(crate) struct Stage {
    step: Step,
    bug: Option<Bug>,
    /// The token of the lease that the step is about.
    token: Option<u64>,
    committed: RefCell<State>,
    /// What the first transaction reads, if others have committed since.
    behind: RefCell<Option<State>>,
    written: RefCell<Vec<Written>>,
    loses_answer: bool,
}

/// A batch that was committed.
pub(crate) struct Written {
    /// Whether it was that of a claim.
    pub(crate) claim: bool,
    pub(crate) before: State,
    pub(crate) after: State,
}

/// The commit took, and its answer was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AnswerLost;

impl fmt::Display for AnswerLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the answer was lost")
    }
}

impl core::error::Error for AnswerLost {}
impl StoreError for AnswerLost {}

impl Stage {
    /// A step on these tables, of which the first transaction reads what was there in `view`.
    pub(crate) fn new(
        step: &Step,
        bug: Option<Bug>,
        token: Option<u64>,
        tables: &State,
        view: &State,
    ) -> Self {
        let behind = (view != tables).then(|| view.clone());
        Self {
            step: step.clone(),
            bug,
            token,
            committed: RefCell::new(tables.clone()),
            behind: RefCell::new(behind),
            written: RefCell::default(),
            loses_answer: false,
        }
    }

    /// The same, and the answer to each commit is lost.
    pub(crate) fn losing_answers(mut self) -> Self {
        self.loses_answer = true;
        self
    }

    pub(crate) fn state(&self) -> State {
        self.committed.borrow().clone()
    }

    /// What was committed, batch by batch.
    pub(crate) fn into_written(self) -> Vec<Written> {
        self.written.into_inner()
    }
}

impl Reader for Stage {
    type Error = AnswerLost;
    type View<'a> = StageTx<'a>;

    fn view(&self) -> Result<StageTx<'_>, AnswerLost> {
        self.begin()
    }
}

impl Store for Stage {
    type Tx<'a> = StageTx<'a>;

    fn begin(&self) -> Result<StageTx<'_>, AnswerLost> {
        let behind = self.behind.borrow_mut().take();
        let state = self.state();
        Ok(StageTx { stage: self, behind, state, written: Vec::new(), claims: false })
    }
}

/// A transaction: it reads what was there when it began, and its own writes; the guards of these
/// are checked against what is there now.
pub(crate) struct StageTx<'s> {
    stage: &'s Stage,
    behind: Option<State>,
    state: State,
    written: Vec<Written>,
    /// Whether it has asked for what is due, so that what it writes next is a claim.
    claims: bool,
}

impl Load for StageTx<'_> {
    type Error = AnswerLost;

    fn load(&mut self, query: &Query) -> Result<Rows, AnswerLost> {
        self.claims = matches!(query, Query::Due(_));
        let view = self.behind.as_ref().unwrap_or(&self.state);
        let asked = match (self.stage.bug, query) {
            (Some(Bug::IgnoreLease), Query::Due(due)) => {
                Query::Due(twobox::Due { now: Millis::MAX, ..due.clone() })
            }
            _ => query.clone(),
        };
        let Ok(mut rows) = view.clone().load(&asked);
        if let Some(bug) = self.stage.bug {
            bug.rows(&self.stage.step, self.stage.token, query, view, &mut rows);
        }
        Ok(rows)
    }
}

fn applied(state: &State, batch: &Batch) -> Result<State, Applied> {
    let store = MemoryStore::from_state(state.clone());
    let Ok(mut tx) = store.begin();
    let Ok(applied) = tx.apply(batch);
    if applied != Applied::Written {
        return Err(applied);
    }
    let Ok(()) = tx.commit();
    Ok(store.state())
}

impl Tables for StageTx<'_> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, AnswerLost> {
        let changed = self.stage.bug.map(|bug| {
            let mut changes = batch.changes().to_vec();
            let step = if self.claims { &CLAIM } else { &self.stage.step };
            bug.changes(step, &self.state, &mut changes);
            named(Batch::of(changes))
        });
        let batch = changed.as_ref().unwrap_or(batch);
        let after = match applied(&self.state, batch) {
            Ok(after) => after,
            Err(conflict) => return Ok(conflict),
        };
        if let Some(behind) = &mut self.behind {
            match applied(behind, batch) {
                Ok(after) => *behind = after,
                Err(conflict) => return Ok(conflict),
            }
        }
        let before = core::mem::replace(&mut self.state, after.clone());
        self.written.push(Written { claim: self.claims, before, after });
        Ok(Applied::Written)
    }
}

impl Transaction for StageTx<'_> {
    fn commit(mut self) -> Result<(), AnswerLost> {
        *self.stage.committed.borrow_mut() = self.state;
        self.stage.written.borrow_mut().append(&mut self.written);
        if self.stage.loses_answer { Err(AnswerLost) } else { Ok(()) }
    }
}

/// A claim, whoever makes it.
pub(crate) const CLAIM: Step = Step::Claim { relay: 0, answered: true };
