//! Through a whole store page by page: purge what is past, redrive what is dead (P3, P7).
//!
//! A page is looked at in a view, which keeps nobody from writing, and only where there is something
//! to change in a transaction.

use alloc::vec::Vec;
use core::convert::Infallible;
use core::num::NonZeroU16;

use super::run::{RunFlow, unasked};
use super::{Ask, Flow, Steps, Stop, Told};
use crate::boundary::{Query, Rows, Transition};
use crate::checked::Checked;
use crate::ids::{EventId, EventType, OrderingKey};
use crate::retention::{RedriveWindow, Retention};
use crate::time::Millis;
use crate::transition::operator::{Operated, PassOver, Redrive};
use crate::transition::purge::Purge;

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
    run: Option<RunFlow<Purge<'a>>>,
    stop: Option<Stop<Infallible>>,
}

impl<'a> PurgeFlow<'a> {
    /// Purges at this time, in transactions that remove at most `limit` rows of a table each.
    #[must_use]
    pub fn new(retention: &'a Checked<Retention>, limit: NonZeroU16, now: Millis) -> Self {
        let tables = Purge::TABLES.iter();
        Self { retention, limit, now, removed: 0, tables, page: None, run: None, stop: None }
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
        self.run = Some(RunFlow::new(page, self.now, false));
        self.removing(Told::Start)
    }

    fn removing(&mut self, told: Told<'_>) -> Ask {
        let Some(run) = &mut self.run else { return unasked() };
        let ask = run.next(told);
        if !matches!(ask, Ask::Done) {
            return ask;
        }
        match self.run.take().map(RunFlow::finish) {
            None => unasked(),
            Some(Err(stop)) => {
                self.stop = Some(stop);
                Ask::Done
            }
            Some(Ok(purged)) => {
                self.removed += purged.removed;
                let page = self.page.take();
                self.look(page.zip(purged.next).map(|(page, key)| page.after(key)))
            }
        }
    }
}

impl Flow for PurgeFlow<'_> {
    type Output = usize;
    type Refusal = Infallible;

    fn finish(self) -> Result<usize, Stop<Infallible>> {
        self.stop.map_or(Ok(self.removed), Err)
    }
}

impl Steps for PurgeFlow<'_> {
    fn next(&mut self, told: Told<'_>) -> Ask {
        match told {
            Told::Start => self.look(None),
            Told::Rows(rows) if self.run.is_none() => self.found(rows),
            told @ (Told::Begun
            | Told::Rows(_)
            | Told::Conflict(_)
            | Told::Called(_)
            | Told::Ended) => self.removing(told),
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
    found: Vec<(OrderingKey, u64, EventId)>,
    run: Option<RunFlow<Redrive>>,
    stop: Option<Stop<Infallible>>,
}

impl<'a> RedriveFlow<'a> {
    /// So many events are looked at in one view, and redriven in one transaction.
    const PAGE: usize = 256;

    /// Redrives at this time what was committed within `window`; what is past it is refused, and
    /// stands in the answer.
    #[must_use]
    pub fn new(event_type: Option<&'a EventType>, window: RedriveWindow, now: Millis) -> Self {
        let (all, found) = (Operated::default(), Vec::new());
        Self { event_type, window, now, all, found, run: None, stop: None }
    }

    const fn look(after: Option<EventId>) -> Ask {
        Ask::View(Query::Dead { after, limit: Self::PAGE })
    }

    /// Keeps what is wanted of a page. Only when all are known is it known which come first.
    fn found(&mut self, rows: &Rows) -> Ask {
        let dead = rows.deliveries.iter();
        let wanted =
            dead.filter(|next| self.event_type.is_none_or(|wanted| *wanted == next.row.event_type));
        let places = wanted.map(|next| (next.row.lane.clone(), next.row.sequence, next.id.clone()));
        self.found.extend(places);
        match rows.deliveries.last() {
            Some(last) if rows.deliveries.len() == Self::PAGE => Self::look(Some(last.id.clone())),
            Some(_) | None => {
                // The first one comes last, to be taken from the end.
                self.found.sort_unstable_by(|a, b| b.cmp(a));
                self.redrive()
            }
        }
    }

    /// Redrives the next ones.
    fn redrive(&mut self) -> Ask {
        let rest = self.found.len().saturating_sub(Self::PAGE);
        let ids = self.found.drain(rest..).map(|(_, _, id)| id);
        match Redrive::new(ids, self.window) {
            // There are no more.
            Err(_) => Ask::Done,
            Ok(redrive) => {
                self.run = Some(RunFlow::new(redrive, self.now, false));
                self.redriving(Told::Start)
            }
        }
    }

    fn redriving(&mut self, told: Told<'_>) -> Ask {
        let Some(run) = &mut self.run else { return unasked() };
        let ask = run.next(told);
        if !matches!(ask, Ask::Done) {
            return ask;
        }
        match self.run.take().map(RunFlow::finish) {
            None => unasked(),
            Some(Err(stop)) => {
                self.stop = Some(stop);
                Ask::Done
            }
            Some(Ok(operated)) => {
                self.all.done.extend(operated.done);
                self.all.refused.extend(operated.refused);
                self.redrive()
            }
        }
    }
}

impl Flow for RedriveFlow<'_> {
    type Output = Operated;
    type Refusal = Infallible;

    fn finish(self) -> Result<Operated, Stop<Infallible>> {
        self.stop.map_or(Ok(self.all), Err)
    }
}

impl Steps for RedriveFlow<'_> {
    fn next(&mut self, told: Told<'_>) -> Ask {
        match told {
            Told::Start => Self::look(None),
            Told::Rows(rows) if self.run.is_none() => self.found(rows),
            told @ (Told::Begun
            | Told::Rows(_)
            | Told::Conflict(_)
            | Told::Called(_)
            | Told::Ended) => self.redriving(told),
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
    run: Option<RunFlow<PassOver>>,
    stop: Option<Stop<Infallible>>,
}

impl PassOverFlow {
    const PAGE: usize = 256;

    /// Does so at this time.
    #[must_use]
    pub const fn new(now: Millis) -> Self {
        Self { now, passed: Vec::new(), page: Vec::new(), after: None, run: None, stop: None }
    }

    const fn look(after: Option<EventId>) -> Ask {
        Ask::View(Query::Dead { after, limit: Self::PAGE })
    }

    fn next_page(&mut self) -> Ask {
        self.after.take().map_or(Ask::Done, |after| Self::look(Some(after)))
    }

    fn found(&mut self, rows: &Rows) -> Ask {
        let page = core::mem::take(&mut self.page);
        if page.is_empty() {
            // A page of dead events: how do their lanes stand?
            let events: Vec<EventId> = rows.deliveries.iter().map(|next| next.id.clone()).collect();
            self.after = events.last().filter(|_| events.len() == Self::PAGE).cloned();
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
            Ok(pass_over) => {
                self.run = Some(RunFlow::new(pass_over, self.now, false));
                self.passing(Told::Start)
            }
        }
    }

    fn passing(&mut self, told: Told<'_>) -> Ask {
        let Some(run) = &mut self.run else { return unasked() };
        let ask = run.next(told);
        if !matches!(ask, Ask::Done) {
            return ask;
        }
        match self.run.take().map(RunFlow::finish) {
            None => unasked(),
            Some(Err(stop)) => {
                self.stop = Some(stop);
                Ask::Done
            }
            Some(Ok(operated)) => {
                self.passed.extend(operated.done);
                self.next_page()
            }
        }
    }
}

impl Flow for PassOverFlow {
    type Output = Vec<EventId>;
    type Refusal = Infallible;

    fn finish(self) -> Result<Vec<EventId>, Stop<Infallible>> {
        self.stop.map_or(Ok(self.passed), Err)
    }
}

impl Steps for PassOverFlow {
    fn next(&mut self, told: Told<'_>) -> Ask {
        match told {
            Told::Start => Self::look(None),
            Told::Rows(rows) if self.run.is_none() => self.found(rows),
            told @ (Told::Begun
            | Told::Rows(_)
            | Told::Conflict(_)
            | Told::Called(_)
            | Told::Ended) => self.passing(told),
        }
    }
}
