//! The decoder of index entries.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| twobox_reliability::hostile::index_entry(bytes));
