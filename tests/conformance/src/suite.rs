//! The macro that makes the tests of an adapter, and the same checks as a list.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::failure::Failure;
use crate::harness::Harness;
use crate::{matrix, scenario};

/// A check by its name, as it stands before the name of a test: `contract::...`, `scenarios::...`.
type Check = (String, fn() -> Result<(), Failure>);

/// The contract tests, and all scenarios without faults.
fn checks<H: Harness>() -> Vec<Check> {
    let mut checks: Vec<Check> = Vec::new();
    macro_rules! contracts {
        ({ $given:ident } $($name:ident)*) => {
            $(checks.push((
                concat!("contract::", stringify!($name)).to_string(),
                crate::contract::$name::<H>,
            ));)*
        };
    }
    macro_rules! scenarios {
        ({ $given:ident } $($name:ident)*) => {
            $(checks.push((
                concat!("scenarios::", stringify!($name)).to_string(),
                || matrix::scenario::<H>(&scenario::$name),
            ));)*
        };
    }
    crate::each_contract!(contracts, H);
    crate::each_scenario!(scenarios, H);
    checks
}

/// Runs the contract tests and all scenarios without faults, and says which fail. This is for tests
/// of the kit itself, which give it stores that are wrong. A store that panics fails as well.
#[must_use]
pub fn failures<H: Harness>() -> Vec<(String, Failure)> {
    let run = |(name, check): Check| Some((name, caught(check).err()?));
    checks::<H>().into_iter().filter_map(run).collect()
}

/// Runs one of these checks.
///
/// # Errors
///
/// What it finds; or that there is no such check.
pub fn check<H: Harness>(name: &str) -> Result<(), Failure> {
    match checks::<H>().into_iter().find(|(this, _)| this == name) {
        Some((_, check)) => caught(check),
        None => Err(Failure::new(format_args!("there is no check {name}"))),
    }
}

/// What a check comes to; a panic in it is a failure.
fn caught(check: impl Fn() -> Result<(), Failure>) -> Result<(), Failure> {
    // Whatever was opened is gone.
    catch_unwind(AssertUnwindSafe(check)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
        Err(Failure::new(format_args!("the store panicked: {text}")))
    })
}

/// Makes the tests for a [`Harness`](crate::Harness), each with a name of its own:
///
/// - `contract::*`: what the core's traits ask of a store;
/// - `scenarios::*`: each scenario without faults, with one store and with two, also through the
///   store's own `run`, `write` and `transact`;
/// - `faults::*`: each scenario with each kind of fault at each point (P8);
/// - `pairs::*`: the same with all pairs of two faults, or with each n-th if `pairs: n` is given,
///   for stores that are slow to open;
/// - `tables::*`: the same tables as a reference, if one is given, after each fault.
///
/// If a reference is given, which must pass all of it itself, each single fault is run twice and
/// not four times: with one store, where the program does the same step again, in `faults::*`, and
/// with two, where it is started again, in `tables::*`. The pairs are found with the reference, and
/// each n-th is run.
///
/// ```ignore
/// twobox_conformance::suite!(MyHarness);
/// twobox_conformance::suite!(MyHarness, pairs: 20);
/// twobox_conformance::suite!(MyHarness, pairs: 20, reference: twobox_conformance::Reference);
/// ```
#[macro_export]
macro_rules! suite {
    ($harness:ty) => {
        $crate::suite!($harness, pairs: 1);
    };
    ($harness:ty, $($rest:tt)*) => {
        mod contract {
            use super::*;
            $crate::each_contract!($crate::__contract_tests, $harness);
        }
        $crate::__scenario_suite!($harness, $($rest)*);
    };
}

/// Makes the tests for a harness with [`Damage`](crate::Damage), in `damage::*`: a row that cannot
/// be read is an error, and another format is refused.
///
/// ```ignore
/// twobox_conformance::suite_damage!(MyHarness);
/// ```
#[macro_export]
macro_rules! suite_damage {
    ($harness:ty) => {
        mod damage {
            use super::*;
            $crate::__contract_tests! {
                { $harness }
                a_damaged_row_is_an_error another_format_is_refused
            }
        }
    };
}

/// As [`suite!`](crate::suite), for an [`AsyncHarness`](crate::AsyncHarness). The scenarios run
/// through the async driver, and the single faults once more, in `writes_first::*`, with transitions
/// that are written first as they assume.
#[macro_export]
macro_rules! suite_async {
    ($harness:ty) => {
        $crate::suite_async!($harness, pairs: 1);
    };
    ($harness:ty, $($rest:tt)*) => {
        mod contract {
            use super::*;
            $crate::each_contract!($crate::__contract_tests, $crate::Blocking<$harness>);
            $crate::each_async_contract!($crate::__async_contract_tests, $harness);
        }
        $crate::__scenario_suite!($crate::Async<$harness>, $($rest)*);
        mod writes_first {
            use super::*;
            $crate::each_scenario!($crate::__matrix_tests, |scenario| {
                $crate::matrix::singles::<$crate::Async<$harness, true>>(scenario).map(drop)
            });
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __scenario_suite {
    ($subject:ty, pairs: $stride:literal) => {
        $crate::__scenarios!($subject);
        mod faults {
            use super::*;
            $crate::each_scenario!($crate::__matrix_tests, |scenario| {
                $crate::matrix::singles::<$subject>(scenario).map(drop)
            });
        }
        mod pairs {
            use super::*;
            $crate::each_scenario!($crate::__matrix_tests, |scenario| {
                $crate::matrix::pairs::<$subject>(scenario, $stride).map(drop)
            });
        }
    };
    ($subject:ty, pairs: $stride:literal, reference: $reference:ty) => {
        $crate::__scenarios!($subject);
        mod faults {
            use super::*;
            $crate::each_scenario!($crate::__matrix_tests, |scenario| {
                $crate::matrix::singles_in_one_store::<$subject>(scenario).map(drop)
            });
        }
        mod pairs {
            use super::*;
            $crate::each_scenario!($crate::__matrix_tests, |scenario| {
                $crate::matrix::pairs_beside::<$reference, $subject>(scenario, $stride).map(drop)
            });
        }
        mod tables {
            use super::*;
            $crate::each_scenario!($crate::__matrix_tests, |scenario| {
                $crate::snapshot::same_as::<$reference, $subject>(scenario)
            });
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __scenarios {
    ($subject:ty) => {
        mod scenarios {
            use super::*;
            $crate::each_scenario!($crate::__matrix_tests, |scenario| {
                $crate::matrix::scenario::<$subject>(scenario)
            });
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __contract_tests {
    ({ $harness:ty } $($name:ident)*) => {$(
        #[test]
        fn $name() -> Result<(), $crate::Failure> {
            $crate::contract::$name::<$harness>()
        }
    )*};
}

#[doc(hidden)]
#[macro_export]
macro_rules! __async_contract_tests {
    ({ $harness:ty } $($name:ident)*) => {$(
        #[test]
        fn $name() -> Result<(), $crate::Failure> {
            $crate::asynchronous::contract::$name::<$harness>()
        }
    )*};
}

#[doc(hidden)]
#[macro_export]
macro_rules! __matrix_tests {
    ({ |$scenario:ident| $check:expr } $($name:ident)*) => {$(
        #[test]
        fn $name() -> Result<(), $crate::Failure> {
            let $scenario = &$crate::scenario::$name;
            $check
        }
    )*};
}
