//! Fingerprints of JSON documents.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| twobox_reliability::hostile::json(bytes));
