//! Stores whose own `run`, `write` or `transact` is wrong, or that do not survive a panic.

use super::{Defect, Way};
use crate::defect::does;
use crate::defects;

defects! {
    transact_commits_nothing: "contract::transact_ends_as_its_work_says",
        ["after transact with End::Commit", "row orders one is missing"],
        does(Way::TransactCommitsNothing);
    transact_commits_what_is_to_be_rolled_back: "contract::transact_ends_as_its_work_says",
        ["after transact with End::RollBack", "row orders one is"],
        does(Way::TransactCommitsARollBack);
    transact_runs_the_work_twice: "contract::transact_ends_as_its_work_says",
        ["transact has called its work 2 times"],
        does(Way::TransactRunsTwice);
    transact_runs_the_work_again_for_nothing: "contract::transact_ends_as_its_work_says",
        ["transact has called its work 2 times"],
        does(Way::TransactRunsAgain);
    transact_swallows_panics: "contract::a_panic_leaves_nothing",
        ["transact has swallowed a panic"],
        does(Way::TransactSwallowsPanics);
    scenarios_of_transact_that_commits_nothing: "scenarios::buy_once",
        ["through the store's own run and transact", "step"],
        does(Way::TransactCommitsNothing);
    run_commits_nothing: "contract::run_writes_once",
        ["after run", "row orders one is missing"],
        does(Way::RunCommitsNothing);
    run_runs_twice: "contract::run_writes_once",
        ["after run", "row orders one is", "Revision(2)"],
        does(Way::RunRunsTwice);
    run_gives_up_after_a_conflict: "contract::run_writes_once",
        ["after three conflicts", "Conflict"],
        does(Way::RunGivesUp);
    scenarios_of_run_that_commits_nothing: "scenarios::retry_request",
        ["through the store's own run and transact", "step"],
        does(Way::RunCommitsNothing);
    write_commits_nothing: "contract::write_commits_what_its_work_wrote",
        ["after write", "row orders one is missing"],
        does(Way::WriteCommitsNothing);
    write_commits_what_failed: "contract::write_commits_what_its_work_wrote",
        ["after write whose work fails", "row orders one is", "Revision(2)"],
        does(Way::WriteCommitsAnError);
    scenarios_of_write_that_commits_what_failed: "scenarios::consumption_fails",
        ["through the store's own run and transact"],
        does(Way::WriteCommitsAnError);
    run_in_a_transaction_writes_nothing: "contract::run_writes_once",
        ["after run", "row orders one is missing"],
        does(Way::TxRunWritesNothing);
    run_in_a_transaction_ignores_conflicts: "contract::run_writes_once",
        ["after run with three conflicts", "row orders one is"],
        does(Way::TxRunIgnoresConflicts);
    a_panic_poisons_a_lock: "contract::a_panic_leaves_nothing",
        ["after a panic in transact", "is a lock poisoned?"],
        does(Way::PanicPoisons);
    a_panic_commits: "contract::a_panic_leaves_nothing",
        ["after a panic in transact", "row orders bad must not be there"],
        does(Way::PanicCommits);
    own_rows_are_not_said: "contract::own_rows_are_kept_as_the_harness_says",
        ["Harness::OWN_ROWS says that there are no own rows"],
        does(Way::OwnRows);
}
