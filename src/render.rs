//! All tables as text: the one form in which snapshots, the demo and tools show what a store holds.
//!
//! The text is made of the rows alone, so it is the same for every adapter. Revisions, which count
//! writes and say nothing about the state, are not shown.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use crate::boundary::{Query, Rows};
use crate::event::{Body, Event};
use crate::ids::EventId;
use crate::store::Load;
use crate::store::asynchronous::AsyncLoad;
use crate::table::{
    DeliveryState, EventRow, EventState, Key, OutboxRow, Record, RequestRow, Table,
};
use crate::time::Millis;

const PAGE: usize = 256;

/// Where each event is on its way, and its row in the outbox, or what it would be.
pub type Events<'a> = BTreeMap<&'a EventId, (EventState, OutboxRow)>;

/// All rows of a store, in the order of their keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dump {
    records: Vec<Record>,
    shown: Shown,
    /// How many tables have been read.
    read: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shown {
    All,
    Lasting,
}

impl Dump {
    /// Reads all tables.
    ///
    /// # Errors
    ///
    /// The store's own.
    pub fn of<L: Load>(tables: &mut L) -> Result<Self, L::Error> {
        let mut dump = Self::empty();
        while let Some(query) = dump.next_page() {
            dump.add(tables.load(&query)?);
        }
        Ok(dump)
    }

    /// Reads all tables of an async store.
    ///
    /// # Errors
    ///
    /// The store's own.
    pub async fn of_async<L: AsyncLoad>(tables: &mut L) -> Result<Self, L::Error> {
        let mut dump = Self::empty();
        while let Some(query) = dump.next_page() {
            dump.add(tables.load(&query).await?);
        }
        Ok(dump)
    }

    const fn empty() -> Self {
        Self { records: Vec::new(), shown: Shown::All, read: 0 }
    }

    /// The question for the next page; `None` after the last table.
    fn next_page(&self) -> Option<Query> {
        let table = *Table::ALL.get(self.read)?;
        let last = self.records.last().filter(|record| record.table() == table);
        Some(Query::Walk { table, after: last.map(Record::key), limit: PAGE })
    }

    /// Adds a page.
    fn add(&mut self, page: Rows) {
        // A page that is not full is the last one of its table.
        self.read += usize::from(page.rows.len() < PAGE);
        self.records.extend(page.rows.into_iter().map(|stored| stored.record));
    }

    /// The delivery state of each event, with its row in the outbox or what it would be: what its
    /// lane and that row say together. An event whose lane is missing is left out.
    #[must_use]
    pub fn events(&self) -> Events<'_> {
        let mut outbox = BTreeMap::new();
        let mut lanes = BTreeMap::new();
        for record in &self.records {
            match record {
                Record::Outbox(id, row) => drop(outbox.insert(id, row)),
                Record::Lane(key, row) => drop(lanes.insert(key, row)),
                Record::Request(..)
                | Record::Order(..)
                | Record::Event(_)
                | Record::Inbox(..)
                | Record::Effect(..)
                | Record::Position(..)
                | Record::Call(..) => {}
            }
        }
        let events = self.records.iter().filter_map(|record| {
            let Record::Event(row) = record else { return None };
            let lane = lanes.get(&row.event.lane())?;
            let delivery = outbox
                .get(&row.event.id)
                .map_or_else(|| OutboxRow::untouched(row), |outbox| (*outbox).clone());
            Some((&row.event.id, (EventState::of(lane, &delivery), delivery)))
        });
        events.collect()
    }

    /// The same tables without what a fault may change for good: times, leases, and counters of
    /// attempts. After recovery this text equals that of a run without the fault (P8).
    #[must_use]
    pub fn lasting(mut self) -> Self {
        self.shown = Shown::Lasting;
        self
    }

    /// The rows, in the order of their keys.
    #[must_use]
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Each row as text, in the order of their keys.
    pub fn rows(&self) -> impl Iterator<Item = ShownRow> + '_ {
        let events = self.events();
        let shown = self.records.iter().filter(|record| self.shows(record));
        shown.map(move |record| self.row(record, &events))
    }

    /// Failures that an event has survived pass, as counters do.
    fn shows(&self, record: &Record) -> bool {
        let passing =
            matches!(record, Record::Outbox(_, OutboxRow { state: DeliveryState::Pending, .. }));
        self.shown == Shown::All || !passing
    }

    fn row(&self, record: &Record, events: &Events<'_>) -> ShownRow {
        let mut cells = cells(record);
        if let Record::Event(row) = record {
            cells.extend(event_cells(row, events));
        }
        let cells = cells.into_iter().filter(|cell| !cell.text.is_empty());
        let shown = cells.filter(|cell| self.shown == Shown::All || cell.kind == Kind::Lasting);
        let columns = shown.map(|cell| (cell.column, quoted(cell.text))).collect();
        ShownRow { key: record.key(), columns }
    }

    /// How many rows a table has.
    #[must_use]
    pub fn count(&self, table: Table) -> usize {
        self.records.iter().filter(|record| record.table() == table).count()
    }
}

/// A row as text: its key, and then `column=value` for each column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShownRow {
    /// Which row it is.
    pub key: Key,
    /// The columns that are not empty. A value that is not one word stands in quotes.
    pub columns: Vec<(&'static str, String)>,
}

impl fmt::Display for ShownRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&quoted(self.key.text()))?;
        self.columns.iter().try_for_each(|(column, value)| write!(f, " {column}={value}"))
    }
}

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows: Vec<ShownRow> = self.rows().collect();
        for table in Table::ALL {
            write_table(f, table, rows.iter().filter(|row| row.key.table() == table))?;
        }
        Ok(())
    }
}

/// One table: its name, and a line for each row.
fn write_table<'r>(
    f: &mut fmt::Formatter<'_>,
    table: Table,
    rows: impl Iterator<Item = &'r ShownRow>,
) -> fmt::Result {
    let mut rows = rows.peekable();
    if rows.peek().is_none() {
        return writeln!(f, "{table}: none");
    }
    writeln!(f, "{table}:")?;
    for row in rows {
        writeln!(f, "  {row}")?;
    }
    Ok(())
}

#[derive(PartialEq, Eq)]
enum Kind {
    /// Part of the state that faults must not change (P8).
    Lasting,
    /// A time, a lease, or a counter of attempts.
    Passing,
}

struct Cell {
    column: &'static str,
    kind: Kind,
    text: String,
}

fn lasting(column: &'static str, text: impl ToString) -> Cell {
    Cell { column, kind: Kind::Lasting, text: text.to_string() }
}

fn passing(column: &'static str, text: impl ToString) -> Cell {
    Cell { column, kind: Kind::Passing, text: text.to_string() }
}

/// Nothing for what is not there, so that the column is not shown.
fn or_empty<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

/// Nothing for 0, which is what a count begins with.
fn count(number: impl Into<u64>) -> String {
    or_empty(Some(number.into()).filter(|number| *number > 0))
}

fn headers_text(event: &Event) -> String {
    let headers = event.headers.iter();
    let headers = headers.map(|(name, value)| format!("{name}={}", quoted(value)));
    headers.collect::<Vec<_>>().join(" ")
}

fn events_text(row: &RequestRow) -> String {
    let events = row.placed.iter().flat_map(|placed| &placed.events);
    events.map(quoted).collect::<Vec<_>>().join(" ")
}

/// A text as it is, or in quotes if it is not one word or seems to hold a quotation.
fn quoted(text: impl ToString) -> String {
    let text = text.to_string();
    let misread =
        text.starts_with('"') || text.contains("=\"") || text.contains(char::is_whitespace);
    if misread || text.is_empty() { format!("{text:?}") } else { text }
}

fn cells(record: &Record) -> Vec<Cell> {
    match record {
        Record::Request(_, row) => alloc::vec![
            lasting("bound_to", row.fingerprint.summary()),
            lasting("order", or_empty(row.placed.as_ref().map(|placed| &placed.order))),
            lasting("events", events_text(row)),
            passing("registered", row.registered_at),
            passing("placed", or_empty(row.placed.as_ref().map(|placed| placed.at))),
        ],
        Record::Order(_, row) => alloc::vec![
            lasting("request", &row.request),
            lasting("content_type", row.body.content_type()),
            shown_body(&row.body),
            passing("committed", row.committed_at),
        ],
        Record::Event(EventRow { event, due, .. }) => alloc::vec![
            lasting("order", &event.order),
            lasting("type", &event.event_type),
            lasting("version", event.schema_version),
            lasting("destination", &event.destination),
            lasting("ordering_key", &event.ordering_key),
            lasting("headers", headers_text(event)),
            lasting("content_type", event.body.content_type()),
            shown_body(&event.body),
            passing("committed", event.time),
            passing("due", due),
        ],
        Record::Outbox(_, row) => alloc::vec![
            lasting("lane", &row.lane),
            lasting("sequence", row.sequence),
            lasting("gave_up", or_empty(gave_up(row.state).map(|(what, _)| what))),
            passing("at", or_empty(gave_up(row.state).map(|(_, at)| at))),
            passing("starts", count(row.starts)),
            passing("failures", count(row.failures)),
            passing("due", row.due),
            passing("reason", or_empty(row.reason.as_ref())),
        ],
        Record::Lane(_, row) => alloc::vec![
            lasting("next", row.next),
            passing("head", row.head),
            lasting("confirmed", count(row.confirmed)),
            lasting("blocked_by", or_empty(row.blocked_by.as_ref())),
            passing("begun", row.begun),
            passing("due", or_empty(row.due)),
            passing("starts", count(row.starts)),
            passing("token", count(row.token)),
            passing("leased_to", or_empty(row.lease.as_ref().map(|lease| &lease.owner))),
            passing("until", or_empty(row.lease.as_ref().map(|lease| lease.until))),
            passing("through", or_empty(row.lease.as_ref().map(|lease| lease.through))),
        ],
        Record::Inbox(_, _, row) => alloc::vec![
            lasting("state", row.state.name()),
            lasting("content", format!("{:.8}", row.content)),
            passing("failures", count(row.failures)),
            passing("at", row.at),
            passing("reason", or_empty(row.reason.as_ref())),
        ],
        Record::Effect(_, _, body) => {
            alloc::vec![lasting("content_type", body.content_type()), shown_body(body)]
        }
        Record::Position(_, _, row) => alloc::vec![
            lasting("sequence", row.sequence),
            passing("begun", row.begun),
            passing("at", row.at),
        ],
        Record::Call(_, _, row) => alloc::vec![
            lasting("state", row.state.name()),
            passing("starts", count(row.starts)),
            passing("at", row.at),
            passing("note", or_empty(row.note.as_ref())),
        ],
    }
}

/// Where an event is on its way.
fn event_cells(row: &EventRow, events: &Events<'_>) -> [Cell; 3] {
    let found = events.get(&row.event.id);
    let state = found.map(|(state, _)| *state);
    // That it is leased passes.
    let lasting_state = match state {
        Some(EventState::Leased) => Some(EventState::Pending),
        state => state,
    };
    let sequence = found.map_or(row.sequence, |(_, delivery)| delivery.sequence);
    [
        lasting("sequence", sequence),
        lasting("state", lasting_state.map_or("without a lane", EventState::name)),
        passing("leased", if state == Some(EventState::Leased) { "yes" } else { "" }),
    ]
}

/// What became of an event that was given up, and when.
fn gave_up(state: DeliveryState) -> Option<(&'static str, Millis)> {
    match state {
        DeliveryState::Pending => None,
        DeliveryState::Dead(at) => Some(("dead", at)),
        DeliveryState::Discarded(at) => Some(("discarded", at)),
        DeliveryState::Cancelled(at) => Some(("cancelled", at)),
    }
}

/// A short text as it is, anything else as its size and the beginning of its digest.
fn shown_body(body: &Body) -> Cell {
    const WIDEST: usize = 64;
    match core::str::from_utf8(body.bytes()) {
        Ok(text) if text.len() <= WIDEST && !text.chars().any(char::is_control) => {
            lasting("body", text)
        }
        Ok(_) | Err(_) => {
            let digest = crate::fingerprint::Digest::of_parts("twobox/body/1", [body.bytes()]);
            lasting("body_sha256", format!("{digest:.8} of {} bytes", body.bytes().len()))
        }
    }
}
