//! All tables as text: the one form in which snapshots, the demo and tools show what a store holds.
//!
//! The text is made of the rows alone, so it is the same for every adapter. Revisions, which count
//! writes and say nothing about the state, are not shown.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use crate::boundary::{Query, Rows};
use crate::event::Body;
use crate::store::Load;
use crate::store::asynchronous::AsyncLoad;
use crate::table::{Record, Table};
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

    /// How many rows a table has.
    #[must_use]
    pub fn count(&self, table: Table) -> usize {
        self.records.iter().filter(|record| record.table() == table).count()
    }
}

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for table in Table::ALL {
            let mut lines: Vec<Vec<String>> = Vec::new();
            for record in self.records.iter().filter(|record| record.table() == table) {
                let cells = cells(record)
                    .into_iter()
                    .filter(|cell| self.shown == Shown::All || cell.kind == Kind::Lasting);
                let (head, row): (Vec<String>, Vec<String>) =
                    cells.map(|cell| (cell.column.to_string(), cell.text)).unzip();
                if lines.is_empty() {
                    lines.push(head);
                }
                lines.push(row);
            }
            write_table(f, table, &lines)?;
        }
        Ok(())
    }
}

/// One table: a title, the columns, the rows; each column as wide as its widest text.
fn write_table(f: &mut fmt::Formatter<'_>, table: Table, lines: &[Vec<String>]) -> fmt::Result {
    if lines.is_empty() {
        return writeln!(f, "{table}: none");
    }
    writeln!(f, "{table}:")?;
    let width = |at: usize| {
        lines
            .iter()
            .filter_map(|line| line.get(at))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..lines[0].len()).map(width).collect();
    for line in lines {
        let mut text = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            text.push_str(&format!("  {cell:<width$}"));
        }
        writeln!(f, "{}", text.trim_end())?;
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

fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_string(), |value| value.to_string())
}

fn cells(record: &Record) -> Vec<Cell> {
    match record {
        Record::Request(key, row) => alloc::vec![
            lasting("request", key),
            lasting("bound to", row.fingerprint.summary()),
            lasting("order", or_dash(row.placed.as_ref().map(|placed| &placed.order))),
            lasting(
                "events",
                or_dash(row.placed.as_ref().map(|placed| {
                    placed.events.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
                })),
            ),
            passing("registered", row.registered_at),
            passing("placed", or_dash(row.placed.as_ref().map(|placed| placed.at))),
        ],
        Record::Order(id, row) => alloc::vec![
            lasting("order", id),
            lasting("request", &row.request),
            lasting("content type", row.body.content_type()),
            lasting("body", shown_body(&row.body)),
            passing("committed", row.committed_at),
        ],
        Record::Event(event) => alloc::vec![
            lasting("event", &event.id),
            lasting("order", &event.order),
            lasting("type", &event.event_type),
            lasting("version", event.schema_version),
            lasting("ordering key", &event.ordering_key),
            lasting("headers", {
                let headers: Vec<_> =
                    event.headers.iter().map(|(name, value)| format!("{name}={value}")).collect();
                if headers.is_empty() { "-".to_string() } else { headers.join(" ") }
            }),
            lasting("content type", event.body.content_type()),
            lasting("body", shown_body(&event.body)),
            passing("committed", event.time),
        ],
        Record::Outbox(id, row) => alloc::vec![
            lasting("event", id),
            lasting("lane", &row.lane),
            lasting("sequence", row.sequence),
            lasting("state", row.state.name()),
            passing("starts", row.starts),
            passing("failures", row.failures),
            passing("due", row.due),
            passing("finished", or_dash(finished(row.state))),
            passing("reason", or_dash(row.reason.as_ref())),
        ],
        Record::Lane(key, row) => alloc::vec![
            lasting("lane", key),
            lasting("next", row.next),
            lasting("confirmed", row.confirmed),
            lasting("blocked by", or_dash(row.blocked_by.as_ref())),
            passing("begun", row.begun),
            passing("due", or_dash(row.due)),
            passing("starts", row.starts),
            passing("token", row.token),
            passing("leased to", or_dash(row.lease.as_ref().map(|lease| &lease.owner))),
            passing("until", or_dash(row.lease.as_ref().map(|lease| lease.until))),
            passing("through", or_dash(row.lease.as_ref().map(|lease| lease.through))),
        ],
        Record::Inbox(consumer, id, row) => alloc::vec![
            lasting("consumer", consumer),
            lasting("event", id),
            lasting("state", row.state.name()),
            lasting("content", format!("{:.8}", row.content)),
            passing("failures", row.failures),
            passing("at", row.at),
            passing("reason", or_dash(row.reason.as_ref())),
        ],
        Record::Effect(consumer, id, body) => alloc::vec![
            lasting("consumer", consumer),
            lasting("event", id),
            lasting("content type", body.content_type()),
            lasting("body", shown_body(body)),
        ],
        Record::Position(consumer, key, row) => alloc::vec![
            lasting("consumer", consumer),
            lasting("ordering key", key),
            lasting("sequence", row.sequence),
            passing("begun", row.begun),
            passing("at", row.at),
        ],
        Record::Call(consumer, id, row) => alloc::vec![
            lasting("consumer", consumer),
            lasting("event", id),
            lasting("state", row.state.name()),
            passing("starts", row.starts),
            passing("at", row.at),
            passing("note", or_dash(row.note.as_ref())),
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
fn shown_body(body: &Body) -> String {
    const WIDEST: usize = 64;
    match core::str::from_utf8(body.bytes()) {
        Ok("") => "(empty)".to_string(),
        Ok(text) if text.len() <= WIDEST && !text.chars().any(char::is_control) => text.to_string(),
        Ok(_) | Err(_) => {
            let digest = crate::fingerprint::Digest::of_parts("twobox/body/1", [body.bytes()]);
            format!("{} bytes, sha256 {digest:.8}", body.bytes().len())
        }
    }
}
