//! Through a whole store page by page: purge what is past, redrive what is dead (P3, P7).
//!
//! A page is looked at in a view, which keeps nobody from writing, and only where there is something
//! to change in a transaction.

use alloc::vec::Vec;
use core::convert::Infallible;
use core::fmt::Debug;
use core::num::NonZeroU16;

use super::run::{RunFlow, unasked};
use super::{Ask, Flow, Steps, Stop, Told};
use crate::boundary::{Query, Rows, Transition};
use crate::checked::Checked;
use crate::ids::{EventId, EventType, LaneKey};
use crate::retention::{RedriveWindow, Retention};
use crate::time::Millis;
use crate::transition::operator::{Operated, PassOver, Redrive};
use crate::transition::purge::{Purge, Purged};

/// So many dead events are looked at in one view, and operated on in one transaction.
const PAGE: usize = 256;

const fn look_at_dead(after: Option<EventId>) -> Ask {
    Ask::View(Query::Dead { after, limit: PAGE })
}

/// The transition that a page came to, while it runs, and why there was no going on.
#[derive(Debug, Clone)]
struct Running<T: Transition<Outcome: Debug + Clone, Refusal = Infallible>> {
    run: Option<RunFlow<T>>,
    stop: Option<Stop<Infallible>>,
}

impl<T: Transition<Outcome: Debug + Clone, Refusal = Infallible>> Running<T> {
    const fn new() -> Self {
        Self { run: None, stop: None }
    }

    /// Whether a page is being looked at, and nothing runs.
    const fn looks(&self) -> bool {
        self.run.is_none()
    }

    /// Runs this one.
    fn start(&mut self, transition: T, now: Millis) -> Ask {
        self.run.insert(RunFlow::new(transition, now, false)).next(Told::Start)
    }

    /// Goes on with it: what it asks, or what it came to.
    fn next(&mut self, told: Told<'_>) -> Result<T::Outcome, Ask> {
        let Some(mut run) = self.run.take() else { return Err(unasked()) };
        let ask = run.next(told);
        if !matches!(ask, Ask::Done) {
            self.run = Some(run);
            return Err(ask);
        }
        run.finish().map_err(|stop| {
            self.stop = Some(stop);
            Ask::Done
        })
    }

    fn finish<O>(self, output: O) -> Result<O, Stop<Infallible>> {
        self.stop.map_or(Ok(output), Err)
    }
}

/// Removes everything that is past its retention, and says how many rows that were, not counting
/// those that went with another row.
#[derive(Debug, Clone)]
pub struct PurgeFlow<'a> {
    retention: &'a Checked<Retention>,
    limit: NonZeroU16,
    now: Millis,
    removed: usize,
    tables: core::slice::Iter<'static, crate::Table>,
    page: Option<Purge<'a>>,
    running: Running<Purge<'a>>,
}

impl<'a> PurgeFlow<'a> {
    /// Purges at this time, in transactions that remove at most `limit` rows of a table each.
    #[must_use]
    pub fn new(retention: &'a Checked<Retention>, limit: NonZeroU16, now: Millis) -> Self {
        let tables = Purge::TABLES.iter();
        Self { retention, limit, now, removed: 0, tables, page: None, running: Running::new() }
    }

    /// Looks at a page, or else at the next table, or is done.
    fn look(&mut self, page: Option<Purge<'a>>) -> Ask {
        let next =
            || self.tables.next().map(|table| Purge::new(self.retention, *table, self.limit));
        self.page = page.or_else(next);
        match &self.page {
            None => Ask::Done,
            Some(page) => Ask::View(page.query(self.now)),
        }
    }

    /// Removes what was found in a page, or goes on.
    fn found(&mut self, rows: &Rows) -> Ask {
        let Some(page) = self.page.take() else { return unasked() };
        if rows.rows.is_empty() && rows.deliveries.is_empty() {
            let next = rows.next.clone().map(|key| page.after(key));
            return self.look(next);
        }
        self.page = Some(page.clone());
        self.running.start(page, self.now)
    }

    fn removed(&mut self, purged: Purged) -> Ask {
        self.removed += purged.removed;
        let page = self.page.take();
        self.look(page.zip(purged.next).map(|(page, key)| page.after(key)))
    }
}

impl Flow for PurgeFlow<'_> {
    type Output = usize;
    type Refusal = Infallible;

    fn finish(self) -> Result<usize, Stop<Infallible>> {
        self.running.finish(self.removed)
    }
}

impl Steps for PurgeFlow<'_> {
    fn next(&mut self, told: Told<'_>) -> Ask {
        match told {
            Told::Start => self.look(None),
            Told::Rows(rows) if self.running.looks() => self.found(rows),
            told @ (Told::Begun
            | Told::Rows(_)
            | Told::Conflict(_)
            | Told::Called(_)
            | Told::Ended) => match self.running.next(told) {
                Ok(purged) => self.removed(purged),
                Err(ask) => ask,
            },
        }
    }
}

/// Redrives all dead events, or all of one type: those of a lane in the order of their places,
/// however many there are, so that those which go to its end stand there in that order (P4).
#[derive(Debug, Clone)]
pub struct RedriveFlow<'a> {
    event_type: Option<&'a EventType>,
    window: RedriveWindow,
    now: Millis,
    all: Operated,
    /// What is to be redriven, by lane and place; while it looks, as it was found.
    found: Vec<(LaneKey, u64, EventId)>,
    running: Running<Redrive>,
}

impl<'a> RedriveFlow<'a> {
    /// Redrives at this time what was committed within `window`; what is past it is refused, and
    /// stands in the answer.
    #[must_use]
    pub fn new(event_type: Option<&'a EventType>, window: RedriveWindow, now: Millis) -> Self {
        let (all, found) = (Operated::default(), Vec::new());
        Self { event_type, window, now, all, found, running: Running::new() }
    }

    /// Keeps what is wanted of a page. Only when all are known is it known which come first.
    fn found(&mut self, rows: &Rows) -> Ask {
        let dead = rows.deliveries.iter();
        let wanted =
            dead.filter(|next| self.event_type.is_none_or(|wanted| *wanted == next.row.event_type));
        let places = wanted.map(|next| (next.row.lane.clone(), next.row.sequence, next.id.clone()));
        self.found.extend(places);
        match rows.deliveries.last() {
            Some(last) if rows.deliveries.len() == PAGE => look_at_dead(Some(last.id.clone())),
            Some(_) | None => {
                // The first one comes last, to be taken from the end.
                self.found.sort_unstable_by(|a, b| b.cmp(a));
                self.redrive()
            }
        }
    }

    /// Redrives the next ones.
    fn redrive(&mut self) -> Ask {
        let rest = self.found.len().saturating_sub(PAGE);
        let ids = self.found.drain(rest..).map(|(_, _, id)| id);
        match Redrive::new(ids, self.window) {
            // There are no more.
            Err(_) => Ask::Done,
            Ok(redrive) => self.running.start(redrive, self.now),
        }
    }

    fn redriven(&mut self, operated: Operated) -> Ask {
        self.all.done.extend(operated.done);
        self.all.refused.extend(operated.refused);
        self.redrive()
    }
}

impl Flow for RedriveFlow<'_> {
    type Output = Operated;
    type Refusal = Infallible;

    fn finish(self) -> Result<Operated, Stop<Infallible>> {
        self.running.finish(self.all)
    }
}

impl Steps for RedriveFlow<'_> {
    fn next(&mut self, told: Told<'_>) -> Ask {
        match told {
            Told::Start => look_at_dead(None),
            Told::Rows(rows) if self.running.looks() => self.found(rows),
            told @ (Told::Begun
            | Told::Rows(_)
            | Told::Conflict(_)
            | Told::Called(_)
            | Told::Ended) => match self.running.next(told) {
                Ok(operated) => self.redriven(operated),
                Err(ask) => ask,
            },
        }
    }
}

/// Lets all lanes go on that wait for a dead event, and says for which events they waited.
#[derive(Debug, Clone)]
pub struct PassOverFlow {
    now: Millis,
    passed: Vec<EventId>,
    /// The dead events of a page, of which it is to be seen whether a lane waits for them.
    page: Vec<EventId>,
    /// The page after this id comes next; `None` after the last page.
    after: Option<EventId>,
    running: Running<PassOver>,
}

impl PassOverFlow {
    /// Does so at this time.
    #[must_use]
    pub const fn new(now: Millis) -> Self {
        let running = Running::new();
        Self { now, passed: Vec::new(), page: Vec::new(), after: None, running }
    }

    fn next_page(&mut self) -> Ask {
        self.after.take().map_or(Ask::Done, |after| look_at_dead(Some(after)))
    }

    fn found(&mut self, rows: &Rows) -> Ask {
        let page = core::mem::take(&mut self.page);
        if page.is_empty() {
            // A page of dead events: how do their lanes stand?
            let events: Vec<EventId> = rows.deliveries.iter().map(|next| next.id.clone()).collect();
            self.after = events.last().filter(|_| events.len() == PAGE).cloned();
            if events.is_empty() {
                return Ask::Done;
            }
            self.page.clone_from(&events);
            return Ask::View(Query::Deliveries { events, run: 0 });
        }
        let waits = rows.lanes.iter().filter_map(|lane| lane.row.blocked_by.clone());
        let waits = waits.filter(|id| page.binary_search(id).is_ok());
        match PassOver::new(waits) {
            // No lane waits for one of them.
            Err(_) => self.next_page(),
            Ok(pass_over) => self.running.start(pass_over, self.now),
        }
    }

    fn passed(&mut self, operated: Operated) -> Ask {
        self.passed.extend(operated.done);
        self.next_page()
    }
}

impl Flow for PassOverFlow {
    type Output = Vec<EventId>;
    type Refusal = Infallible;

    fn finish(self) -> Result<Vec<EventId>, Stop<Infallible>> {
        self.running.finish(self.passed)
    }
}

impl Steps for PassOverFlow {
    fn next(&mut self, told: Told<'_>) -> Ask {
        match told {
            Told::Start => look_at_dead(None),
            Told::Rows(rows) if self.running.looks() => self.found(rows),
            told @ (Told::Begun
            | Told::Rows(_)
            | Told::Conflict(_)
            | Told::Called(_)
            | Told::Ended) => match self.running.next(told) {
                Ok(operated) => self.passed(operated),
                Err(ask) => ask,
            },
        }
    }
}
