//! What a transition changes: rows under guards, in the order of their keys.

use alloc::borrow::Cow;
use alloc::string::ToString;
use alloc::vec::Vec;
use core::mem::swap;

use crate::ids::{Invalid, LaneKey};
use crate::lane::LaneEdit;
use crate::table::{Key, LaneRow, Parts, Record, Revision, Stored, Table, parts};
use crate::time::Millis;

/// What a change expects to find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Expect {
    /// No row with this key.
    Absent,
    /// The row at this revision.
    Revision(Revision),
}

impl Expect {
    /// Whether what is there is what was expected.
    #[must_use]
    pub fn holds(self, found: Option<Revision>) -> bool {
        match self {
            Self::Absent => found.is_none(),
            Self::Revision(revision) => found == Some(revision),
        }
    }

    /// The revision of the row after it is written.
    #[must_use]
    pub fn written(self) -> Revision {
        match self {
            Self::Absent => Revision::FIRST,
            Self::Revision(revision) => revision.next(),
        }
    }
}

impl From<Option<Revision>> for Expect {
    fn from(found: Option<Revision>) -> Self {
        found.map_or(Self::Absent, Self::Revision)
    }
}

/// One guarded change of one row.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Change {
    /// Write the row, with [`Expect::written`] as its revision.
    Put {
        /// What must be there.
        expect: Expect,
        /// What is there afterwards.
        record: Record,
    },
    /// Remove the row.
    Delete {
        /// What must be there.
        expect: Revision,
        /// Which row.
        key: Key,
    },
    /// Change a lane, if it is leased under this token. [`LaneRow::edited`](crate::LaneRow::edited)
    /// gives the row after it; its revision grows by one.
    Lane {
        /// Which lane.
        key: LaneKey,
        /// The fencing token of the lease.
        token: u64,
        /// What changes.
        edit: LaneEdit,
        /// When.
        at: Millis,
    },
}

/// What a change does to the row that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write<'a> {
    /// Write this, with this revision.
    Put(Cow<'a, Record>, Revision),
    /// Remove it.
    Remove,
}

impl Change {
    /// Which row.
    #[must_use]
    pub fn key(&self) -> Key {
        match self {
            Self::Put { record, .. } => record.key(),
            Self::Delete { key, .. } => key.clone(),
            Self::Lane { key, .. } => Key::Lane(key.clone()),
        }
    }

    fn parts(&self) -> Parts<'_> {
        match self {
            Self::Put { record, .. } => record.parts(),
            Self::Delete { key, .. } => key.parts(),
            Self::Lane { key, .. } => parts(Table::Lanes, key.texts()),
        }
    }

    /// What is to be written, if the guard holds for the row that is there; `None` if it does not.
    #[must_use]
    pub fn on(&self, found: Option<&Stored>) -> Option<Write<'_>> {
        let lane = match found.map(|stored| &stored.record) {
            Some(Record::Lane(_, row)) => Some(row),
            Some(
                Record::Request(..)
                | Record::Order(..)
                | Record::Event(_)
                | Record::Outbox(..)
                | Record::Inbox(..)
                | Record::Effect(..)
                | Record::Position(..)
                | Record::Call(..),
            )
            | None => None,
        };
        self.on_row(found.map(|stored| stored.revision), lane)
    }

    /// The same for a lane that has this row.
    #[must_use]
    pub fn on_lane(&self, row: &LaneRow, revision: Revision) -> Option<Write<'_>> {
        self.on_row(Some(revision), Some(row))
    }

    fn on_row(&self, revision: Option<Revision>, lane: Option<&LaneRow>) -> Option<Write<'_>> {
        match self {
            Self::Put { expect, record } => {
                expect.holds(revision).then(|| Write::Put(Cow::Borrowed(record), expect.written()))
            }
            Self::Delete { expect, .. } => (revision == Some(*expect)).then_some(Write::Remove),
            Self::Lane { key, token, edit, at } => {
                let row = lane?.edited(*token, edit, *at)?;
                Some(Write::Put(Cow::Owned(Record::Lane(key.clone(), row)), revision?.next()))
            }
        }
    }
}

/// Guarded changes, sorted by key, each key once.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Batch {
    changes: Vec<Change>,
    pub(super) may_be_lost: bool,
}

impl Batch {
    /// No changes.
    #[must_use]
    pub const fn new() -> Self {
        Self { changes: Vec::new(), may_be_lost: false }
    }

    /// No changes, with room for as many as will be needed.
    pub(crate) fn with_capacity(changes: usize) -> Self {
        Self { changes: Vec::with_capacity(changes), may_be_lost: false }
    }

    /// Makes room for so many changes more, and for no others.
    pub(crate) fn reserve(&mut self, changes: usize) {
        self.changes.reserve_exact(changes);
    }

    /// The changes, in the order of their keys.
    #[must_use]
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// A batch of changes given in any order. It is for tests of adapters: a transition makes its
    /// own batch.
    ///
    /// # Errors
    ///
    /// [`Invalid::Twice`] if two changes name the same row.
    pub fn of(mut changes: Vec<Change>) -> Result<Self, Invalid> {
        changes.sort_by(|a, b| a.parts().cmp(&b.parts()));
        match changes.windows(2).find(|pair| pair[0].parts() == pair[1].parts()) {
            Some(pair) => {
                let value = pair[0].key().to_string().into();
                Err(Invalid::Twice { field: "the key of a change", value })
            }
            None => Ok(Self { changes, may_be_lost: false }),
        }
    }

    /// Whether there is nothing to change.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// Whether a crash may undo the commit of this without breaking a promise; see
    /// [`Decision::may_be_lost`](crate::Decision::may_be_lost).
    #[must_use]
    pub const fn may_be_lost(&self) -> bool {
        self.may_be_lost
    }

    /// Writes a row that is not there.
    pub fn insert(&mut self, record: Record) {
        self.changes.push(Change::Put { expect: Expect::Absent, record });
    }

    /// Writes a row that is there with this revision.
    pub fn update(&mut self, expect: Revision, record: Record) {
        self.changes.push(Change::Put { expect: Expect::Revision(expect), record });
    }

    /// Writes a row that is there with this revision, or not there.
    pub fn put(&mut self, found: Option<Revision>, record: Record) {
        self.changes.push(Change::Put { expect: found.into(), record });
    }

    /// Removes a row that is there with this revision.
    pub fn delete(&mut self, expect: Revision, key: Key) {
        self.changes.push(Change::Delete { expect, key });
    }

    /// Changes a lane under this token.
    pub(crate) fn edit(&mut self, key: LaneKey, token: u64, edit: LaneEdit, at: Millis) {
        self.changes.push(Change::Lane { key, token, edit, at });
    }

    /// Adds the changes of another batch, of other tables: if both are in order, so are they
    /// together.
    pub(crate) fn append(&mut self, mut other: Self) {
        if other.changes.first().map(Change::parts) < self.changes.first().map(Change::parts) {
            swap(&mut self.changes, &mut other.changes);
        }
        self.changes.append(&mut other.changes);
    }

    pub(super) fn in_order(mut self) -> Self {
        // In place, and next to nothing if they are in order already.
        self.changes.sort_unstable_by(|a, b| a.parts().cmp(&b.parts()));
        debug_assert!(
            self.changes.windows(2).all(|pair| pair[0].parts() < pair[1].parts()),
            "a batch names a key twice"
        );
        self
    }
}
