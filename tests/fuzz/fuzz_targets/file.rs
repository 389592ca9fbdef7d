//! Whole database files, and edits of a good one.
#![no_main]

use std::sync::LazyLock;

static GOOD: LazyLock<Vec<u8>> = LazyLock::new(twobox_reliability::hostile::good_file);

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| twobox_reliability::hostile::file(bytes, &GOOD));
