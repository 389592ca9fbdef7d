//! The backoff (F13): it doubles, is capped, and has jitter that is the same in every run.

use core::time::Duration;

use proptest::prelude::*;
use twobox::{Checked, DeliveryPolicy, EventId, Millis};

use crate::support::{name, names};

fn policy(base: Duration, cap: Duration) -> Checked<DeliveryPolicy> {
    DeliveryPolicy { backoff_base: base, backoff_cap: cap, ..DeliveryPolicy::default() }
        .checked()
        .unwrap()
}

/// What the n-th backoff is before its jitter, in nanoseconds: the base doubled n - 1 times, at
/// most the cap.
fn whole(base: Duration, cap: Duration, failures: u32) -> u128 {
    let doublings = failures.saturating_sub(1).min(127);
    let doubled = base.as_nanos().checked_mul(1 << doublings);
    doubled.map_or(cap.as_nanos(), |doubled| doubled.min(cap.as_nanos()))
}

fn durations() -> impl Strategy<Value = Duration> {
    prop_oneof![
        Just(Duration::from_millis(1)),
        Just(Duration::from_millis(1) + Duration::from_nanos(1)),
        (1..10_000_u64).prop_map(Duration::from_millis),
        (1_000_000..u64::MAX).prop_map(Duration::from_nanos),
        (1..u64::MAX).prop_map(Duration::from_secs),
        Just(Duration::MAX),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Between one half and the whole, for any settings that are allowed and any number of
    /// failures.
    #[test]
    fn a_backoff_lies_between_one_half_and_the_whole(
        (a, b) in (durations(), durations()),
        event in names::<EventId>(EventId::MAX),
        failures in prop_oneof![0..70_u32, any::<u32>(), Just(u32::MAX)],
    ) {
        let (base, cap) = (a.min(b), a.max(b));
        let policy = policy(base, cap);
        let backoff = policy.backoff(&event, failures);
        let whole = whole(base, cap, failures);
        prop_assert!(backoff.as_nanos() >= whole / 2 && backoff.as_nanos() <= whole, "{:?} of {}", backoff, whole);
        prop_assert!(backoff >= Duration::from_millis(1));
        prop_assert_eq!(policy.backoff(&event, failures), backoff);
        // A time it is added to does not overflow either.
        prop_assert!(Millis::MAX + backoff == Millis::MAX);
    }

    /// Settings that have not been checked yet do not spin and do not panic either.
    #[test]
    fn no_backoff_is_zero(base in durations(), failures in any::<u32>()) {
        for (backoff_base, backoff_cap) in [(Duration::ZERO, base), (base, Duration::ZERO), (Duration::ZERO, Duration::ZERO)] {
            let policy = DeliveryPolicy { backoff_base, backoff_cap, ..DeliveryPolicy::default() };
            prop_assert!(policy.backoff(&name("e"), failures) >= Duration::from_millis(1));
        }
    }
}

#[test]
fn the_default_doubles_up_to_its_cap() {
    let policy = DeliveryPolicy::default();
    let half_seconds = |failures| (policy.backoff(&name("e"), failures).as_millis() / 500) as u64;
    for (failures, seconds) in (1..).zip([1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]) {
        assert!((seconds..=seconds * 2).contains(&half_seconds(failures)), "{failures}");
    }
    assert!((300..=600).contains(&half_seconds(u32::MAX)));
}

/// Events that failed together do not come again together: the jitter uses its range.
#[test]
fn the_jitter_differs_from_event_to_event() {
    let policy = policy(Duration::from_secs(1), Duration::from_secs(1));
    let of_event = |n: u32| policy.backoff(&name(&format!("e{n}")), 1);
    let of_failure = |n: u32| policy.backoff(&name("e"), n);
    for backoffs in [(0..400).map(of_event).collect::<Vec<_>>(), (1..400).map(of_failure).collect()]
    {
        let mut tenths: Vec<u128> =
            backoffs.iter().map(|backoff| (backoff.as_millis() - 500) / 50).collect();
        tenths.sort_unstable();
        tenths.dedup();
        assert!((10..=11).contains(&tenths.len()), "{tenths:?}");
    }
}

/// It follows from the event and the count alone, so a snapshot shows the same times everywhere.
#[test]
fn the_jitter_stays_what_it_is() {
    let policy = DeliveryPolicy::default();
    let found: Vec<u128> =
        (1..=4).map(|failures| policy.backoff(&name("o/1"), failures).as_millis()).collect();
    assert_eq!(found, [711, 1466, 2400, 7482]);
}
