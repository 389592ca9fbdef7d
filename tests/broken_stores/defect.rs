//! What can be wrong with a store: functions that do something else than what is right, or a way of
//! its own.

use twobox::{
    Change, EventState, Key, LaneEdit, LaneRow, Millis, OutboxRow, Query, Record, Revision, Rows,
    Stored,
};

use crate::disk::Disk;

/// What a store does in its own way. Each function is given what would be right.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Defect {
    /// What is asked instead.
    pub(crate) ask: fn(&mut Query),
    /// What becomes of an answer.
    pub(crate) answer: fn(&Query, &mut Rows, &Disk),
    /// Whether a query fails.
    pub(crate) fails: fn(&Query) -> bool,
    /// What becomes of the changes of a batch.
    pub(crate) batch: fn(&mut Vec<Change>),
    /// Whether a guard holds: of a change, at this place in the batch, of the row that is there,
    /// and which row was seen before, if somebody says what was.
    pub(crate) guard: fn(&Guard<'_>) -> bool,
    /// Which row a broken guard is said to be of.
    pub(crate) names: fn(Key) -> Key,
    /// What a lane becomes by an edit.
    pub(crate) edited: fn(&LaneRow, u64, &LaneEdit, Millis) -> Option<LaneRow>,
    /// What becomes of a row when it is kept.
    pub(crate) keep: fn(&mut Record),
    /// What becomes of a revision.
    pub(crate) revision: fn(Revision) -> Revision,
    /// Which row a key is of, by its table and its parts.
    pub(crate) key: fn(&str) -> String,
    /// Whether the entry of a row goes when that becomes another one, or goes itself.
    pub(crate) goes: fn(&Record, Option<&Record>) -> bool,
    /// Whether the entry of a row comes when it is written in the place of another one.
    pub(crate) comes: fn(Option<&Record>, &Record) -> bool,
    /// From which place on there may be pending events.
    pub(crate) from: fn(&LaneRow) -> u64,
    /// Whether what is found at a place is pending.
    pub(crate) pending: fn(&LaneRow, u64, &OutboxRow) -> bool,
    /// What else.
    pub(crate) way: Way,
}

/// What is not a matter of one row or one answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Right,
    TransactCommitsNothing,
    TransactCommitsARollBack,
    TransactRunsTwice,
    TransactRunsAgain,
    TransactSwallowsPanics,
    RunCommitsNothing,
    RunRunsTwice,
    RunGivesUp,
    WriteCommitsNothing,
    WriteCommitsAnError,
    TxRunWritesNothing,
    TxRunIgnoresConflicts,
    PanicPoisons,
    PanicCommits,
    DropCommits,
    ViewIsLive,
    AnswersAreTorn,
    ViewSeesUncommitted,
    WritersDoNotWait,
    WritersMeetConflicts,
    LaneEditsMeetNoConflicts,
    CachesEvents,
    ReadsNotItsOwnWrites,
    LosesTheLastCommit,
    EachThirdCommitIsLost,
    CommitsAtDrop,
    LosesWhatMayBeLost,
    WhatMayBeLostTakesTheNext,
    OneThatMayBeLostIsEnough,
    IndexOneCommitLate,
    IndexAddsThenRemoves,
    IndexRemovesThenAdds,
    SeenIsEnough,
    SeenForgetsTheIndex,
    RevisionsGoOnAfterDelete,
    ConflictsByChance,
    OwnRows,
    LeavesOutTheDamaged,
    ReadsAnyFormat,
}

/// What is known where a guard is checked.
pub(crate) struct Guard<'a> {
    pub(crate) change: &'a Change,
    pub(crate) at: usize,
    pub(crate) there: Option<&'a Stored>,
}

impl Guard<'_> {
    pub(crate) fn holds(&self) -> bool {
        self.change.on(self.there).is_some()
    }
}

/// A store without a defect.
pub(crate) const RIGHT: Defect = Defect {
    ask: |_| {},
    answer: |_, _, _| {},
    fails: |_| false,
    batch: |_| {},
    guard: |guard| guard.holds(),
    names: |key| key,
    edited: LaneRow::edited,
    keep: |_| {},
    revision: |revision| revision,
    key: |text| text.to_string(),
    goes: |_, _| true,
    comes: |_, _| true,
    from: |lane| lane.head,
    pending: |lane, at, row| {
        let state = EventState::of(lane, row);
        row.sequence == at && matches!(state, EventState::Pending | EventState::Leased)
    },
    way: Way::Right,
};

/// A defect that is not a matter of one row or one answer.
pub(crate) const fn does(way: Way) -> Defect {
    Defect { way, ..RIGHT }
}
