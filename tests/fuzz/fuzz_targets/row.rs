//! The decoder of rows, of each table.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| twobox_reliability::hostile::row(bytes));
