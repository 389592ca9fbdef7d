//! The faults: at which sites they strike, and what each does. Sites are numbered as they are
//! reached, in the driver and in the delivery, so that every adapter has the same points.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A kind of place at which a fault can strike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Site {
    /// A command begins.
    Begin,
    /// A query is about to be answered.
    Load,
    /// A batch is about to be written.
    Apply,
    /// A transaction is about to be committed.
    Commit,
    /// An event is about to be published.
    Publish,
    /// An operation of an async store waits. These are counted on their own.
    Wait,
}

impl Site {
    /// The name, as it is shown.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Begin => "begin",
            Self::Load => "load",
            Self::Apply => "apply",
            Self::Commit => "commit",
            Self::Publish => "publish",
            Self::Wait => "wait",
        }
    }
}

/// A fault before a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BeginFault {
    /// The clock steps back by an hour.
    ClockStepsBack,
    /// The program ends and the stores are opened again.
    CloseAndReopen,
    /// Another process does the same first, and is not heard of again.
    RivalFirst,
}

/// A fault before a query is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LoadFault {
    /// The program dies.
    Crash,
    /// The store reports an error.
    Fails,
}

/// A fault before a batch is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ApplyFault {
    /// A rival has written the first row of the batch since it was read, so that the store itself
    /// must find the guard broken.
    RivalWrites,
    /// The store reports a conflict, as it would for a deadlock or a serialisation failure.
    Conflict,
    /// Half of the batch is written, then the store reports an error.
    FailsPartWay,
}

/// A fault at a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CommitFault {
    /// It fails, and nothing is written.
    DidNotTake,
    /// It reports failure, but everything is written.
    TookButFailed,
    /// It takes, and the program dies before anybody hears of it.
    CrashAfter,
}

/// A fault at a publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PublishFault {
    /// Nothing arrives, and the broker reports an error.
    Fails,
    /// The event arrives, but the relay is told that it did not.
    ConfirmationLost,
    /// Publishing takes longer than the lease, and another relay delivers meanwhile.
    LeaseRunsOut,
}

/// A fault at a wait of an async store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WaitFault {
    /// The future of the operation is dropped, as when whoever waited for it gives up.
    Dropped,
}

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// Before a command.
    Begin(BeginFault),
    /// Before a query is answered.
    Load(LoadFault),
    /// Before a batch is written.
    Apply(ApplyFault),
    /// At a commit.
    Commit(CommitFault),
    /// At a publish.
    Publish(PublishFault),
    /// At a wait; see [`matrix::drops`](crate::matrix::drops).
    Wait(WaitFault),
}

impl Fault {
    /// All of them that strike in every store.
    pub const ALL: [Self; 14] = [
        Self::Load(LoadFault::Crash),
        Self::Load(LoadFault::Fails),
        Self::Apply(ApplyFault::RivalWrites),
        Self::Apply(ApplyFault::Conflict),
        Self::Apply(ApplyFault::FailsPartWay),
        Self::Commit(CommitFault::DidNotTake),
        Self::Commit(CommitFault::TookButFailed),
        Self::Commit(CommitFault::CrashAfter),
        Self::Publish(PublishFault::Fails),
        Self::Publish(PublishFault::ConfirmationLost),
        Self::Publish(PublishFault::LeaseRunsOut),
        Self::Begin(BeginFault::ClockStepsBack),
        Self::Begin(BeginFault::CloseAndReopen),
        Self::Begin(BeginFault::RivalFirst),
    ];

    /// Where it strikes.
    #[must_use]
    pub const fn site(self) -> Site {
        match self {
            Self::Begin(_) => Site::Begin,
            Self::Load(_) => Site::Load,
            Self::Apply(_) => Site::Apply,
            Self::Commit(_) => Site::Commit,
            Self::Publish(_) => Site::Publish,
            Self::Wait(_) => Site::Wait,
        }
    }

    /// All that strike at a site.
    pub fn at(site: Site) -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(move |fault| fault.site() == site)
    }

    /// Whether the program dies of it.
    #[must_use]
    pub const fn kills(self) -> bool {
        match self {
            Self::Load(LoadFault::Crash)
            | Self::Commit(CommitFault::CrashAfter)
            | Self::Begin(BeginFault::CloseAndReopen) => true,
            Self::Load(LoadFault::Fails)
            | Self::Apply(
                ApplyFault::RivalWrites | ApplyFault::Conflict | ApplyFault::FailsPartWay,
            )
            | Self::Commit(CommitFault::DidNotTake | CommitFault::TookButFailed)
            | Self::Publish(
                PublishFault::Fails | PublishFault::ConfirmationLost | PublishFault::LeaseRunsOut,
            )
            | Self::Begin(BeginFault::ClockStepsBack | BeginFault::RivalFirst)
            | Self::Wait(WaitFault::Dropped) => false,
        }
    }

    /// The name, as it stands in messages and snapshots.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Load(LoadFault::Crash) => "crash_before_load",
            Self::Load(LoadFault::Fails) => "load_fails",
            Self::Apply(ApplyFault::RivalWrites) => "rival_writes",
            Self::Apply(ApplyFault::Conflict) => "conflict_reported",
            Self::Apply(ApplyFault::FailsPartWay) => "apply_fails_part_way",
            Self::Commit(CommitFault::DidNotTake) => "commit_did_not_take",
            Self::Commit(CommitFault::TookButFailed) => "commit_took_but_failed",
            Self::Commit(CommitFault::CrashAfter) => "crash_after_commit",
            Self::Publish(PublishFault::Fails) => "publish_fails",
            Self::Publish(PublishFault::ConfirmationLost) => "confirmation_is_lost",
            Self::Publish(PublishFault::LeaseRunsOut) => "lease_runs_out",
            Self::Begin(BeginFault::ClockStepsBack) => "clock_steps_back",
            Self::Begin(BeginFault::CloseAndReopen) => "close_and_reopen",
            Self::Begin(BeginFault::RivalFirst) => "rival_first",
            Self::Wait(WaitFault::Dropped) => "operation_is_dropped",
        }
    }

    /// What happens, in a sentence.
    #[must_use]
    pub const fn sentence(self) -> &'static str {
        match self {
            Self::Load(LoadFault::Crash) => "The program dies just before it reads from a store.",
            Self::Load(LoadFault::Fails) => "The store reports an error when it is read.",
            Self::Apply(ApplyFault::RivalWrites) => {
                "Between the read and the write a rival writes the same row; the store finds out, and the driver runs the transition again."
            }
            Self::Apply(ApplyFault::Conflict) => {
                "The store reports a conflict although no row has changed; the driver runs the transition again."
            }
            Self::Apply(ApplyFault::FailsPartWay) => {
                "Half of the changes are written, then the store reports an error."
            }
            Self::Commit(CommitFault::DidNotTake) => "The commit fails, and nothing was written.",
            Self::Commit(CommitFault::TookButFailed) => {
                "The commit reports a failure, but everything was written."
            }
            Self::Commit(CommitFault::CrashAfter) => {
                "The commit takes, and the program dies before anybody hears of it."
            }
            Self::Publish(PublishFault::Fails) => {
                "The broker reports an error, and the event does not arrive."
            }
            Self::Publish(PublishFault::ConfirmationLost) => {
                "The event arrives, but the relay is told that it did not."
            }
            Self::Publish(PublishFault::LeaseRunsOut) => {
                "Publishing takes longer than the lease; meanwhile relay-9 claims, delivers and settles the same event."
            }
            Self::Begin(BeginFault::ClockStepsBack) => {
                "The clock steps back by an hour before a step."
            }
            Self::Begin(BeginFault::CloseAndReopen) => {
                "The program ends before a step, and the stores are opened again."
            }
            Self::Begin(BeginFault::RivalFirst) => {
                "Another process does the same step just before, and is not heard of again."
            }
            Self::Wait(WaitFault::Dropped) => {
                "Whoever waits for an operation gives up, and its future is dropped."
            }
        }
    }
}

/// One point of a run: what kind of place it was, and in which step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Point {
    /// The kind of place.
    pub site: Site,
    /// The step of the scenario, from 0.
    pub step: usize,
}

/// Counts the points of a run, and strikes at some of them.
#[derive(Debug, Default)]
pub struct Plan {
    /// Which faults, and at which point, from 1.
    faults: Vec<(usize, Fault)>,
    progress: Mutex<Progress>,
}

#[derive(Debug, Default)]
struct Progress {
    points: Vec<Point>,
    step: usize,
    struck: usize,
    paused: bool,
    /// The step of each wait.
    waits: Vec<usize>,
}

impl Plan {
    pub(crate) fn new(faults: &[(usize, Fault)]) -> Self {
        Self { faults: faults.to_vec(), ..Self::default() }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        // Whoever panicked in between has changed nothing by halves.
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The points that were reached so far.
    pub(crate) fn points(&self) -> Vec<Point> {
        self.progress().points.clone()
    }

    /// How many faults have struck so far.
    pub(crate) fn struck(&self) -> usize {
        self.progress().struck
    }

    pub(crate) fn enter(&self, step: usize) {
        self.progress().step = step;
    }

    /// Stops and resumes counting, while somebody else is at work.
    pub(crate) fn pause(&self, paused: bool) {
        self.progress().paused = paused;
    }

    /// In which step each wait was so far.
    pub(crate) fn waits(&self) -> Vec<usize> {
        self.progress().waits.clone()
    }

    /// An operation waits: whether it is dropped.
    pub(crate) fn wait(&self) -> Option<WaitFault> {
        let mut progress = self.progress();
        if progress.paused {
            return None;
        }
        let step = progress.step;
        progress.waits.push(step);
        let number = progress.waits.len();
        let fault = self.faults.iter().find_map(|(at, fault)| {
            if let Fault::Wait(fault) = fault { (*at == number).then_some(*fault) } else { None }
        })?;
        progress.struck += 1;
        Some(fault)
    }

    fn reach(&self, site: Site) -> Option<Fault> {
        let mut progress = self.progress();
        if progress.paused {
            return None;
        }
        let point = Point { site, step: progress.step };
        progress.points.push(point);
        let number = progress.points.len();
        let mut faults = self.faults.iter();
        let fault = faults.find(|(at, fault)| *at == number && fault.site() == site)?.1;
        progress.struck += 1;
        Some(fault)
    }

    pub(crate) fn begin(&self) -> Option<BeginFault> {
        if let Some(Fault::Begin(fault)) = self.reach(Site::Begin) { Some(fault) } else { None }
    }

    pub(crate) fn load(&self) -> Option<LoadFault> {
        if let Some(Fault::Load(fault)) = self.reach(Site::Load) { Some(fault) } else { None }
    }

    pub(crate) fn apply(&self) -> Option<ApplyFault> {
        if let Some(Fault::Apply(fault)) = self.reach(Site::Apply) { Some(fault) } else { None }
    }

    pub(crate) fn commit(&self) -> Option<CommitFault> {
        if let Some(Fault::Commit(fault)) = self.reach(Site::Commit) { Some(fault) } else { None }
    }

    pub(crate) fn publish(&self) -> Option<PublishFault> {
        if let Some(Fault::Publish(fault)) = self.reach(Site::Publish) { Some(fault) } else { None }
    }
}
