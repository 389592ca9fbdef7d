//! Where an event stands: its lane, a NUL, and its sequence in big endian, as bytes that sort so.
//! What stands there are its id, a NUL, and its envelope and its payload, so that a claim reads them
//! in one go.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use twobox::{LaneKey, codec};

use crate::error::RedbError;

pub(super) const SEPARATOR: u8 = 0;

/// Appends what all places of a lane begin with.
pub(super) fn write_lane(lane: &LaneKey, out: &mut Vec<u8>) {
    codec::encode_lane(lane, out);
    out.push(SEPARATOR);
}

/// Appends a place.
pub(super) fn write(lane: &LaneKey, sequence: u64, out: &mut Vec<u8>) {
    write_lane(lane, out);
    out.extend_from_slice(&sequence.to_be_bytes());
}

/// The sequence of a place in a lane whose places begin with so many bytes.
pub(super) fn sequence(place: &[u8], lane: usize) -> Result<u64, RedbError> {
    let sequence = place.get(lane..).and_then(|rest| rest.try_into().ok());
    sequence.map(u64::from_be_bytes).ok_or_else(|| error(place, "it is of another length"))
}

/// Appends what stands at a place before the event.
pub(super) fn write_id(id: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(id);
    out.push(SEPARATOR);
}

/// The id and the event that stand at a place.
pub(super) fn split<'v>(place: &[u8], value: &'v [u8]) -> Result<(&'v [u8], &'v [u8]), RedbError> {
    match value.iter().position(|byte| *byte == SEPARATOR) {
        Some(end) => Ok((&value[..end], &value[end + 1..])),
        None => Err(error(place, "no id stands there")),
    }
}

/// A place that does not go together with the row that it leads to, or comes from.
pub(super) fn error(place: &[u8], what: &'static str) -> RedbError {
    let (lane, sequence) = place.split_last_chunk().unwrap_or((place, &[0; 8]));
    let lane = shown_lane(lane.strip_suffix(&[SEPARATOR]).unwrap_or(lane));
    let entry = format!("place {} of lane {lane}", u64::from_be_bytes(*sequence));
    RedbError::Index { entry, what }
}

/// A lane by the bytes of its key, as it is shown.
pub(super) fn shown_lane(key: &[u8]) -> String {
    match codec::decode_lane(key) {
        Ok(lane) => lane.to_string(),
        Err(_) => String::from_utf8_lossy(key).into_owned(),
    }
}

/// An entry of the index that does not go together with the event that it leads to.
pub(super) fn index_error(id: &[u8], what: &'static str) -> RedbError {
    let entry = "outbox ".to_string() + &String::from_utf8_lossy(id);
    RedbError::Index { entry, what }
}
