//! Long random histories, with commits, transactions that are given up, and stores that are closed
//! and opened again; what fails is shrunk.

use proptest::prelude::*;
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest, prop_state_machine};
use tempfile::TempDir;
use twobox::call::WhenUnknown;
use twobox::{Dump, Reader, Store, Table, Transaction};
use twobox_memory::{MemoryStore, State};
use twobox_redb::{RedbOptions, RedbStore};

use crate::command::{Command, End, Memory};

#[derive(Debug, Clone)]
enum Step {
    /// In a transaction of its own.
    Commit(Command),
    /// Several in one transaction.
    Together(Vec<Command>),
    /// In a transaction that is never committed.
    GiveUp(Vec<Command>),
    /// The store is closed, or dropped in the middle, and opened again.
    Reopen,
}

#[derive(Debug, Clone, Default)]
struct Reference {
    state: State,
    memory: Memory,
    /// As it was before the last step, and what the last step answered.
    before: Memory,
    answers: Vec<String>,
}

/// Runs the commands in a transaction of any store.
fn run<S: Store>(
    store: &S,
    memory: &Memory,
    commands: &[Command],
    commit: bool,
) -> (Vec<String>, Memory) {
    let mut memory = memory.clone();
    let mut tx = store.begin().unwrap();
    let mut answers = Vec::new();
    for command in commands {
        let (answer, leased) = memory.ask(&mut tx, *command);
        answers.push(answer);
        memory.learn(*command, leased);
    }
    if commit {
        tx.commit().unwrap();
    }
    (answers, memory)
}

impl Step {
    fn commands(&self) -> (&[Command], bool) {
        match self {
            Self::Commit(command) => (core::slice::from_ref(command), true),
            Self::Together(commands) => (commands, true),
            Self::GiveUp(commands) => (commands, false),
            Self::Reopen => (&[], false),
        }
    }
}

fn commands() -> impl Strategy<Value = Command> {
    let end = prop_oneof![
        4 => Just(End::Confirmed),
        1 => Just(End::Released),
        2 => Just(End::Failed),
        1 => Just(End::Rejected),
        1 => Just(End::Unavailable)
    ];
    let table = prop::sample::select(Table::ALL.to_vec());
    let rule = prop::sample::select(vec![WhenUnknown::Ask, WhenUnknown::Repeat, WhenUnknown::Wait]);
    prop_oneof![
        1 => (0..2_u8, any::<bool>()).prop_map(|(request, other)| Command::Register { request, other }),
        3 => (0..2_u8, prop::bool::weighted(0.2)).prop_map(|(request, other)| Command::Commit { request, other }),
        5 => (0..2_u8).prop_map(|relay| Command::Claim { relay }),
        5 => (0..2_u8, end).prop_map(|(relay, end)| Command::Settle { relay, end }),
        1 => (0..2_u8).prop_map(|relay| Command::Renew { relay }),
        1 => (0..3_u8).prop_map(Command::Cancel),
        2 => (0..3_u8).prop_map(Command::Redrive),
        1 => (0..3_u8).prop_map(Command::Discard),
        2 => table.prop_map(Command::Purge),
        3 => (0..3_u8, any::<bool>()).prop_map(|(event, in_order)| Command::Receive { event, in_order }),
        1 => (0..3_u8).prop_map(Command::ReceiveOther),
        1 => (0..3_u8).prop_map(Command::CountFailure),
        1 => Just(Command::Intend),
        1 => rule.prop_map(Command::Start),
        1 => any::<bool>().prop_map(|done| Command::Resolve { done }),
        3 => prop_oneof![Just(5), Just(20), Just(200)].prop_map(Command::Wait),
    ]
}

struct Histories;

impl ReferenceStateMachine for Histories {
    type State = Reference;
    type Transition = Step;

    fn init_state() -> BoxedStrategy<Reference> {
        Just(Reference::default()).boxed()
    }

    fn transitions(_state: &Reference) -> BoxedStrategy<Step> {
        let several = || prop::collection::vec(commands(), 1..5);
        prop_oneof![
            12 => commands().prop_map(Step::Commit),
            2 => several().prop_map(Step::Together),
            1 => several().prop_map(Step::GiveUp),
            1 => Just(Step::Reopen),
        ]
        .boxed()
    }

    fn apply(mut state: Reference, step: &Step) -> Reference {
        let store = MemoryStore::from_state(state.state.clone());
        let (commands, commit) = step.commands();
        let (answers, memory) = run(&store, &state.memory, commands, commit);
        state.before = core::mem::take(&mut state.memory);
        // Who gives up remembers the time alone.
        state.memory = if commit { memory } else { state.before.at(memory.now) };
        state.answers = answers;
        state.state = store.state();
        state
    }
}

struct OnDisk {
    folder: TempDir,
    store: Option<RedbStore>,
}

impl OnDisk {
    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("store.redb")
    }
}

struct Redb;

impl StateMachineTest for Redb {
    type SystemUnderTest = OnDisk;
    type Reference = Histories;

    fn init_test(_reference: &Reference) -> OnDisk {
        let mut disk = OnDisk { folder: tempfile::tempdir().unwrap(), store: None };
        disk.store = Some(RedbOptions::new().create(disk.path()).unwrap());
        disk
    }

    fn apply(mut disk: OnDisk, reference: &Reference, step: Step) -> OnDisk {
        if matches!(step, Step::Reopen) {
            // One database cannot be open twice.
            drop(disk.store.take());
            let options = RedbOptions::new().end_leases(false);
            disk.store = Some(options.open(disk.path()).unwrap());
        }
        let store = disk.store.as_ref().unwrap();
        let (commands, commit) = step.commands();
        let (answers, _) = run(store, &reference.before, commands, commit);
        assert_eq!(answers, reference.answers, "{step:?}");
        let expected = Dump::of(&mut reference.state.clone()).unwrap().to_string();
        assert_eq!(
            Dump::of(&mut store.view().unwrap()).unwrap().to_string(),
            expected,
            "after {step:?}"
        );
        disk
    }
}

prop_state_machine! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// `PROPTEST_CASES` says how many histories there are.
    #[test]
    fn long_histories_come_to_the_same(sequential 1..40 => Redb);
}
