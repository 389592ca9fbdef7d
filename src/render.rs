//! All tables as text: the one form in which snapshots, the demo and tools show what a store holds.
//!
//! The text is made of the rows alone, so it is the same for every adapter. Revisions, which count
//! writes and say nothing about the state, are not shown.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use crate::boundary::{Query, Rows};
use crate::event::{Body, Event};
use crate::store::Load;
use crate::store::asynchronous::AsyncLoad;
use crate::table::{Key, Record, RequestRow, Table};
use crate::time::Millis;

const PAGE: usize = 256;

/// All rows of a store, in the order of their keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dump {
    records: Vec<Record>,
    shown: Shown,
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
        let mut dump = Self { records: Vec::new(), shown: Shown::All };
        for table in Table::ALL {
            while dump.add(tables.load(&dump.next_page(table))?) {}
        }
        Ok(dump)
    }

    /// Reads all tables of an async store.
    ///
    /// # Errors
    ///
    /// The store's own.
    pub async fn of_async<L: AsyncLoad>(tables: &mut L) -> Result<Self, L::Error> {
        let mut dump = Self { records: Vec::new(), shown: Shown::All };
        for table in Table::ALL {
            while dump.add(tables.load(&dump.next_page(table)).await?) {}
        }
        Ok(dump)
    }

    fn next_page(&self, table: Table) -> Query {
        let last = self.records.last().filter(|record| record.table() == table);
        Query::Walk { table, after: last.map(Record::key), limit: PAGE }
    }

    /// Adds a page, and says whether there may be another one.
    fn add(&mut self, page: Rows) -> bool {
        let page = page.into_vec();
        let full = page.len() == PAGE;
        self.records.extend(page.into_iter().map(|stored| stored.record));
        full
    }

    /// The same tables without what a fault may change for good: times, leases, and attempt
    /// counters. After recovery this text equals that of a run without the fault (P8).
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
        self.records.iter().map(|record| self.row(record))
    }

    fn row(&self, record: &Record) -> ShownRow {
        let cells = cells(record).into_iter().filter(|cell| !cell.text.is_empty());
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
        f.write_str(&match self.key.parts() {
            (_, only, "") => quoted(only),
            (_, first, second) => quoted(format!("{first}/{second}")),
        })?;
        self.columns.iter().try_for_each(|(column, value)| write!(f, " {column}={value}"))
    }
}

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for table in Table::ALL {
            let records = self.records.iter().filter(|record| record.table() == table);
            write_table(f, table, records.map(|record| self.row(record)))?;
        }
        Ok(())
    }
}

/// One table: its name, and a line for each row.
fn write_table(
    f: &mut fmt::Formatter<'_>,
    table: Table,
    rows: impl Iterator<Item = ShownRow>,
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
        Record::Event(event) => alloc::vec![
            lasting("order", &event.order),
            lasting("type", &event.event_type),
            lasting("version", event.schema_version),
            lasting("ordering_key", &event.ordering_key),
            lasting("headers", headers_text(event)),
            lasting("content_type", event.body.content_type()),
            shown_body(&event.body),
            passing("committed", event.time),
        ],
        Record::Outbox(_, row) => alloc::vec![
            lasting("lane", &row.lane),
            lasting("sequence", row.sequence),
            lasting("state", row.state.name()),
            passing("starts", count(row.starts)),
            passing("failures", count(row.failures)),
            passing("due", row.due),
            passing("finished", or_empty(finished(row.state))),
            passing("reason", or_empty(row.reason.as_ref())),
        ],
        Record::Lane(_, row) => alloc::vec![
            lasting("next", row.next),
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

fn finished(state: crate::table::DeliveryState) -> Option<Millis> {
    use crate::table::DeliveryState as State;
    match state {
        State::Pending => None,
        State::Confirmed(at) | State::Dead(at) | State::Discarded(at) | State::Cancelled(at) => {
            Some(at)
        }
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
