//! Whether an answer is right, and if not, which row is wrong and in what.

use std::fmt;

use twobox::{Body, Delivery, Key, Lane, Record, Revision, Rows, Stored};

use crate::failure::{Failure, ensure, short};

/// A part of an answer that a failure can name.
pub(crate) trait Part: PartialEq + fmt::Debug {
    fn name(&self) -> String;

    /// What is not part of equality, or not of the text.
    fn beside(&self) -> (Option<&str>, Option<&Body>);
}

impl Part for Stored {
    fn name(&self) -> String {
        format!("row {}", self.record.key())
    }

    fn beside(&self) -> (Option<&str>, Option<&Body>) {
        match &self.record {
            // Two fingerprints are equal if their digests are.
            Record::Request(_, row) => (Some(row.fingerprint.summary()), None),
            Record::Order(_, row) => (None, Some(&row.body)),
            Record::Event(row) => (None, Some(&row.event.body)),
            Record::Effect(_, _, body) => (None, Some(body)),
            Record::Outbox(..) | Record::Lane(..) | Record::Inbox(..) => (None, None),
            Record::Position(..) | Record::Call(..) => (None, None),
        }
    }
}

impl Part for (Key, Revision) {
    fn name(&self) -> String {
        format!("row {}", self.0)
    }

    fn beside(&self) -> (Option<&str>, Option<&Body>) {
        (None, None)
    }
}

impl Part for Delivery {
    fn name(&self) -> String {
        format!("event {}", self.id)
    }

    fn beside(&self) -> (Option<&str>, Option<&Body>) {
        (None, self.event.as_ref().map(|event| &event.body))
    }
}

impl Part for Lane {
    fn name(&self) -> String {
        format!("lane {}", self.key)
    }

    fn beside(&self) -> (Option<&str>, Option<&Body>) {
        (None, None)
    }
}

/// Compares rows, and says where they begin to differ.
pub(crate) fn same<T: Part>(what: &str, found: &[T], right: &[T]) -> Result<(), Failure> {
    let equal = |(found, right): (&T, &T)| found == right && found.beside().0 == right.beside().0;
    let at = found.iter().zip(right).take_while(|pair| equal(*pair)).count();
    ensure(at == found.len() && at == right.len(), || {
        let (count, other) = (found.len(), right.len());
        format!("{what}: {count} found, {other} are right; {}", wrong(found, right, at))
    })
}

/// What is wrong at the first place at which answers differ.
fn wrong<T: Part>(found: &[T], right: &[T], at: usize) -> String {
    let is_in = |rows: &[T], name: &str| rows.iter().any(|row| row.name() == name);
    match (found.get(at), right.get(at)) {
        (Some(is), Some(must)) if is.name() == must.name() => {
            format!("{} {}", must.name(), difference(is, must))
        }
        (_, Some(must)) if !is_in(found, &must.name()) => {
            format!("{} is missing, it must be\n  {}", must.name(), short(must))
        }
        (Some(is), _) if !is_in(right, &is.name()) => {
            format!("{} must not be there, and it is\n  {}", is.name(), short(is))
        }
        (Some(is), Some(must)) => {
            format!("{} stands where {} must be: the order is wrong", is.name(), must.name())
        }
        (Some(is), None) => format!("{} is there twice", is.name()),
        (None, must) => format!("it ends before {}", must.map(Part::name).unwrap_or_default()),
    }
}

/// In what a row differs from what it must be.
fn difference<T: Part>(is: &T, must: &T) -> String {
    if let ((Some(is), _), (Some(must), _)) = (is.beside(), must.beside())
        && is != must
    {
        return format!("has the summary {is:?}, it must be {must:?}");
    }
    let (is_text, must_text) = (format!("{is:?}"), format!("{must:?}"));
    if is_text == must_text {
        let bytes = |part: &T| part.beside().1.map(|body| body.bytes().to_vec());
        let (is, must) = (bytes(is).unwrap_or_default(), bytes(must).unwrap_or_default());
        let at = is.iter().zip(&must).take_while(|(is, must)| is == must).count();
        return format!("has another body, from byte {at} of {} on", must.len());
    }
    // From the field in which they begin to differ.
    let same = is_text.bytes().zip(must_text.bytes()).take_while(|(is, must)| is == must).count();
    let start = is_text.as_bytes()[..same].windows(2).rposition(|two| matches!(two, b", " | b"{ "));
    let start = start.map_or(0, |at| at + 2);
    let from = |text: &str| text.get(start..).unwrap_or(text).chars().take(160).collect::<String>();
    format!("is\n  ...{}\nand must be\n  ...{}", from(&is_text), from(&must_text))
}

/// Compares answers, and says which of their parts differs.
pub(crate) fn same_answer(what: &str, found: &Rows, right: &Rows) -> Result<(), Failure> {
    same(what, &found.rows, &right.rows)?;
    same(&format!("{what}, its deliveries"), &found.deliveries, &right.deliveries)?;
    same(&format!("{what}, its lanes"), &found.lanes, &right.lanes)?;
    ensure(found.stats == right.stats, || {
        format!("{what}: the counts are\n  {:?}\nand must be\n  {:?}", found.stats, right.stats)
    })?;
    ensure(found.next == right.next, || {
        format!("{what}: it says to go on after {:?}, not {:?}", found.next, right.next)
    })
}
