//! Numbers that look random and are the same in every run.

/// A generator of numbers: `SplitMix64`.
#[derive(Debug, Clone)]
pub struct Seed(u64);

impl Seed {
    /// The numbers that belong to this one.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut number = self.0;
        number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        number ^ (number >> 31)
    }

    /// A number below the limit; 0 if the limit is 0.
    pub fn below(&mut self, limit: usize) -> usize {
        let limit = limit.max(1) as u64;
        // It is below a `usize`.
        (self.draw() % limit) as usize
    }

    /// One of two.
    pub fn coin(&mut self) -> bool {
        self.draw() & 1 == 1
    }
}

/// Whether the long form of the tests is asked for, with `TWOBOX_LONG=1`.
#[must_use]
pub fn long() -> bool {
    std::env::var_os("TWOBOX_LONG").is_some_and(|value| value == "1")
}
