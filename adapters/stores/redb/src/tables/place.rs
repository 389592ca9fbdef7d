//! Where an event stands: its lane, a NUL, its sequence in big endian, and its id, as bytes that sort
//! so. What stands there are its envelope and its payload, so that a claim reads them in one go.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crate::error::RedbError;

const SEPARATOR: u8 = 0;

/// Appends what all places of a lane begin with.
pub(super) fn write_lane(lane: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(lane.as_bytes());
    out.push(SEPARATOR);
}

/// Appends what the place of an event has before its id.
pub(super) fn write_sequence(lane: &str, sequence: u64, out: &mut Vec<u8>) {
    write_lane(lane, out);
    out.extend_from_slice(&sequence.to_be_bytes());
}

/// Appends a place.
pub(super) fn write(lane: &str, sequence: u64, id: &str, out: &mut Vec<u8>) {
    write_sequence(lane, sequence, out);
    out.extend_from_slice(id.as_bytes());
}

/// The sequence and the id of a place in a lane with a name of this length.
pub(super) fn split(place: &[u8], lane: usize) -> Result<(u64, &[u8]), RedbError> {
    let rest = place.get(lane + 1..).unwrap_or_default();
    match rest.split_first_chunk() {
        Some((sequence, id)) => Ok((u64::from_be_bytes(*sequence), id)),
        None => Err(error(place, "it ends too early")),
    }
}

/// A place that does not go together with the row that it leads to, or comes from.
pub(super) fn error(place: &[u8], what: &'static str) -> RedbError {
    let lane = place.iter().position(|byte| *byte == SEPARATOR).unwrap_or(place.len());
    let id = place.get(lane + 9..).unwrap_or_default();
    let shown = String::from_utf8_lossy(id).into_owned();
    let entry = "outbox ".to_string() + &shown;
    RedbError::Index { entry, what }
}

/// An entry of the index that does not go together with the event that it leads to.
pub(super) fn index_error(id: &[u8], what: &'static str) -> RedbError {
    let entry = "outbox ".to_string() + &String::from_utf8_lossy(id);
    RedbError::Index { entry, what }
}
