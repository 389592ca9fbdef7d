//! Drives flows on a sync store: asks it what the flow asks, and tells the flow what came of it.

use core::convert::Infallible;

use super::{Applied, End, Load as _, RunError, Seen, Store, StoreError as _, Tables};
use crate::boundary::{Query, Rows};
use crate::flow::{Ask, Called, Flow, Steps, Then, Told};

/// The user's handlers, as a flow calls them.
pub trait Call<X> {
    /// Does work number `n` in the transaction.
    fn call(&mut self, tx: &mut X, n: usize) -> Called;

    /// Whether the last work may have read or written rows of twobox, so that what was loaded
    /// before is no longer what was loaded last.
    fn touched(&self) -> bool {
        true
    }
}

/// For flows that call nobody.
#[derive(Debug, Clone, Copy)]
pub struct NoCall;

impl<X> Call<X> for NoCall {
    fn call(&mut self, _tx: &mut X, _n: usize) -> Called {
        Called::Done
    }
}

/// What a driver of a flow returns.
pub(super) type Driven<F, E> = Result<<F as Flow>::Output, RunError<E, <F as Flow>::Refusal>>;

/// Runs a flow to its end.
///
/// # Errors
///
/// The store's, or those of the flow.
pub fn drive<S, F, C>(store: &S, mut flow: F, call: &mut C) -> Driven<F, S::Error>
where
    S: Store + ?Sized,
    F: Flow,
    C: for<'a> Call<S::Tx<'a>>,
{
    to_the_end(store, &mut flow, call).map_err(RunError::widened)?;
    flow.finish().map_err(RunError::stopped)
}

/// The same for all flows and all handlers: there is one copy of it for each store.
fn to_the_end<'s, S: Store + ?Sized + 's>(
    store: &S,
    flow: &mut dyn Steps,
    call: &'s mut dyn for<'a> Call<S::Tx<'a>>,
) -> Result<(), RunError<S::Error, Infallible>> {
    let mut ask = flow.next(Told::Start);
    loop {
        ask = match ask {
            Ask::Done => return Ok(()),
            Ask::View(query) => {
                let mut view = store.view().map_err(RunError::of)?;
                let rows = view.load(&query).map_err(RunError::of)?;
                // A view may keep others from writing.
                drop(view);
                flow.next(Told::Rows(&rows))
            }
            // Out of a transaction there is nothing else to do but to begin one.
            Ask::Begin
            | Ask::Load(_)
            | Ask::Write(..)
            | Ask::Call(_)
            | Ask::Commit
            | Ask::RollBack => {
                let ended = store.transact(|tx| in_transaction(tx, flow, call));
                match ended {
                    Ok(Ok(())) => flow.next(Told::Ended),
                    Ok(Err(error)) => return Err(error),
                    Err(RunError::Conflict(key)) => {
                        let _rolled_back = flow.next(Told::Conflict(key));
                        flow.next(Told::Ended)
                    }
                    Err(error) => return Err(error),
                }
            }
        };
    }
}

/// Runs the part of a flow that is in one transaction.
fn in_transaction<X: Tables>(
    tx: &mut X,
    flow: &mut dyn Steps,
    call: &mut dyn Call<X>,
) -> End<Result<(), RunError<X::Error, Infallible>>> {
    let mut seen: Option<(Query, Rows)> = None;
    let mut ask = flow.next(Told::Begun);
    loop {
        ask = match ask {
            Ask::Load(query) | Ask::View(query) => match tx.load(&query) {
                Err(error) if error.is_conflict() => flow.next(Told::Conflict(None)),
                Err(error) => return End::RollBack(Err(RunError::Store(error))),
                Ok(rows) => {
                    let (_, rows) = seen.insert((query, rows));
                    flow.next(Told::Rows(rows))
                }
            },
            Ask::Write(batch, then) => {
                let applied = match &seen {
                    None => tx.apply(&batch),
                    Some((query, rows)) => tx.apply_seen(&batch, &Seen { query, rows }),
                };
                seen = None;
                match (applied, then) {
                    (Ok(Applied::Written), Then::Commit) => return End::Commit(Ok(())),
                    (Ok(Applied::Written), Then::Load(query)) => Ask::Load(query),
                    (Ok(Applied::Conflict(key)), _) => flow.next(Told::Conflict(key)),
                    (Err(error), _) if error.is_conflict() => flow.next(Told::Conflict(None)),
                    (Err(error), _) => return End::RollBack(Err(RunError::Store(error))),
                }
            }
            Ask::Call(n) => {
                let called = call.call(tx, n);
                if call.touched() {
                    seen = None;
                }
                flow.next(Told::Called(called))
            }
            Ask::Commit => return End::Commit(Ok(())),
            Ask::RollBack | Ask::Begin | Ask::Done => return End::RollBack(Ok(())),
        };
    }
}
