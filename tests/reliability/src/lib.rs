//! What must hold when the power fails, a process is killed, many call at once, or bytes are
//! damaged.
//!
//! This library holds what the tests and the fuzz targets share. See `docs/reliability.md` for what
//! is tested and how.

pub mod disk;
pub mod hostile;
pub mod life;
pub mod seed;
pub mod shop;
pub mod tables;
