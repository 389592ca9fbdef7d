//! Time as an input: the core has no clock, and compares only times that its caller gave (F7).

use core::fmt;
use core::time::Duration;

/// A point in time: milliseconds since the Unix epoch, in UTC.
///
/// All times of one store must come from one clock, or from clocks kept together: they are compared
/// with each other. The clock may step back; what then happens is that something becomes due later
/// than it would have.
///
/// ```
/// use core::time::Duration;
/// use twobox::Millis;
///
/// let now = Millis::new(1_000);
/// assert_eq!(now + Duration::from_secs(2), Millis::new(3_000));
/// assert_eq!(now.since(Millis::new(5_000)), Duration::ZERO);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Millis(u64);

impl Millis {
    /// The latest time there is; what would lie beyond stays here. It fits a signed 64-bit column.
    pub const MAX: Self = Self(i64::MAX as u64);

    /// The time so many milliseconds after the Unix epoch.
    #[must_use]
    pub const fn new(millis: u64) -> Self {
        if millis > Self::MAX.0 { Self::MAX } else { Self(millis) }
    }

    /// The time of the system's clock, in UTC. A time before 1970 is 1970.
    #[cfg(feature = "std")]
    #[must_use]
    pub fn now() -> Self {
        use std::time::{SystemTime, UNIX_EPOCH};
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self::new(0) + since
    }

    /// Milliseconds since the Unix epoch.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// How long ago `earlier` was; zero if it is not earlier.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// The time so long before this one; the epoch if that lies before it.
    #[must_use]
    pub fn before(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(whole_millis(span)))
    }
}

impl core::ops::Add<Duration> for Millis {
    type Output = Self;
    fn add(self, span: Duration) -> Self {
        Self::new(self.0.saturating_add(whole_millis(span)))
    }
}

/// A moment by two clocks: the time of day, which may be set and steps, and a time that only passes.
///
/// Stamps are made by the first one, and intervals are measured by the second one, so neither
/// drifts where the clock of the machine is set (F37).
///
/// ```
/// use core::time::Duration;
/// use twobox::{Millis, Moment};
///
/// let begun = Moment::steady(Millis::new(1_000));
/// let later = begun + Duration::from_secs(2);
/// assert_eq!(later.wall, Millis::new(3_000));
/// assert_eq!(later.since(begun), Duration::from_secs(2));
/// // The clock was set back by an hour, and two seconds have passed all the same.
/// let set = Moment { wall: Millis::new(0), ..later };
/// assert_eq!(set.since(begun), Duration::from_secs(2));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment {
    /// The time of day, for stamps in a store. It may step either way.
    pub wall: Millis,
    /// The time since any fixed point, for intervals. It never steps back. It may stand still
    /// while the computer sleeps.
    pub uptime: Duration,
}

impl Moment {
    /// This time of a clock that is never set: its uptime is counted from the epoch. For tests, and
    /// for devices whose only clock is of that kind. With the time of day of a computer, intervals
    /// would drift when that is set.
    #[must_use]
    pub const fn steady(wall: Millis) -> Self {
        Self { wall, uptime: Duration::from_millis(wall.get()) }
    }

    /// The system's clocks. The uptime begins with the first call in this process.
    #[cfg(feature = "std")]
    #[must_use]
    pub fn now() -> Self {
        use std::sync::OnceLock;
        use std::time::Instant;
        static BEGUN: OnceLock<Instant> = OnceLock::new();
        Self { wall: Millis::now(), uptime: BEGUN.get_or_init(Instant::now).elapsed() }
    }

    /// How much time has passed since `earlier`; none if that is not earlier.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.uptime.saturating_sub(earlier.uptime)
    }
}

impl core::ops::Add<Duration> for Moment {
    type Output = Self;
    /// The moment so much later, with neither clock set meanwhile.
    fn add(self, span: Duration) -> Self {
        Self { wall: self.wall + span, uptime: self.uptime.saturating_add(span) }
    }
}

fn whole_millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
