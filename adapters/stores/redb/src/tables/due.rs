//! Lanes by their destination and the time at which they are due. Lanes of a destination that are
//! due at the same time lie together in blocks: those that are claimed together are due together
//! when their lease ends, and so to claim, to renew and to settle them costs a write for many of
//! them instead of one or two for each.
//!
//! The key of a block is a destination, a NUL, a time in big endian and the least ordering key that
//! can be in it: a block has what comes from its key on and before that of the next one. Its value
//! has the ordering keys of its lanes in their order, one at least, each with its length before it,
//! and a checksum.

use alloc::string::ToString;
use alloc::vec::Vec;
use core::mem;
use core::ops::{Bound, Range};

use redb::{ReadableTable, Table};
use twobox::Millis;
use twobox::codec::Damaged;

use super::place::{self, SEPARATOR};
use super::seal::Seal;
use super::{Bytes, Start};
use crate::error::RedbError;

/// A block gets no longer, in bytes, so that a page has some of them.
const FULL: usize = 1024;

/// Lanes that become due at a time, or are due at it no more, and are not written yet: what comes
/// together in a transaction is written together.
#[derive(Debug, Default)]
pub(crate) struct Moves {
    come: Vec<Moved>,
    go: Vec<Moved>,
    /// The keys of the lanes, one after the other.
    keys: Vec<u8>,
}

/// A time, and where the key of a lane is.
type Moved = (Millis, Range<usize>);

impl Moves {
    /// Notes that a lane comes or goes.
    pub(super) fn add(&mut self, due: Millis, lane: &[u8], comes: bool) {
        let moves = if comes { &mut self.come } else { &mut self.go };
        let start = self.keys.len();
        self.keys.extend_from_slice(lane);
        moves.push((due, start..self.keys.len()));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.come.is_empty() && self.go.is_empty()
    }

    /// Writes them.
    pub(super) fn write(&mut self, table: &mut Table<'_, Bytes, Bytes>) -> Result<(), RedbError> {
        let Self { come, go, keys } = mem::take(self);
        let moves = in_order(come, go, &keys);
        let (mut rest, mut key) = (&*moves, Vec::new());
        while let Some(first) = rest.first() {
            first.at.write(&mut key);
            let (these, later) = rest.split_at(until_next(table, &key, rest)?);
            let block = block_of(table, &key, first.at)?;
            write_block(table, block, these)?;
            rest = later;
        }
        Ok(())
    }
}

/// Where a lane stands among all that are due, and a block by the least lane that can be in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct At<'a> {
    destination: &'a [u8],
    due: Millis,
    ordering_key: &'a [u8],
}

impl<'a> At<'a> {
    /// That of a lane with this key.
    fn of(due: Millis, lane: &'a [u8]) -> Self {
        let (destination, ordering_key) = split(lane).unwrap_or((&[], lane));
        Self { destination, due, ordering_key }
    }

    fn read(key: &'a [u8]) -> Result<Self, RedbError> {
        let short = || damaged("a block of due lanes with a short key");
        let (destination, rest) = split(key).ok_or_else(short)?;
        let (due, ordering_key) = rest.split_first_chunk().ok_or_else(short)?;
        let due = Millis::new(u64::from_be_bytes(*due));
        Ok(Self { destination, due, ordering_key })
    }

    fn write(self, key: &mut Vec<u8>) {
        write_start(self.destination, self.due, key);
        key.extend_from_slice(self.ordering_key);
    }

    /// Whether it lies in blocks of the same kind.
    fn is_beside(self, other: Self) -> bool {
        (self.destination, self.due) == (other.destination, other.due)
    }

    /// The key of the lane.
    fn lane(self, key: &mut Vec<u8>) {
        write_lane(self.destination, self.ordering_key, key);
    }
}

/// What stands before the first NUL, and what behind it.
fn split(key: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = key.iter().position(|byte| *byte == SEPARATOR)?;
    Some((&key[..end], &key[end + 1..]))
}

/// What comes before the keys of all blocks of a destination from this time on, and behind those of
/// earlier times.
pub(super) fn write_start(destination: &[u8], due: Millis, key: &mut Vec<u8>) {
    key.clear();
    key.extend_from_slice(destination);
    key.push(SEPARATOR);
    key.extend_from_slice(&due.get().to_be_bytes());
}

/// What comes behind the keys of all blocks of a destination, and before those of the next one.
pub(super) fn write_end(destination: &[u8], key: &mut Vec<u8>) {
    key.clear();
    key.extend_from_slice(destination);
    key.push(SEPARATOR + 1);
}

/// The key of a lane.
pub(super) fn write_lane(destination: &[u8], ordering_key: &[u8], key: &mut Vec<u8>) {
    key.clear();
    key.extend_from_slice(destination);
    key.push(SEPARATOR);
    key.extend_from_slice(ordering_key);
}

struct Move<'a> {
    at: At<'a>,
    comes: bool,
}

/// All moves in the order of blocks, without those that came and went.
fn in_order(mut come: Vec<Moved>, mut go: Vec<Moved>, keys: &[u8]) -> Vec<Move<'_>> {
    let named = |(due, at): &Moved| At::of(*due, &keys[at.clone()]);
    // Each transition has noted them in the order of lanes, so much is in order already, which a
    // stable sort makes use of.
    come.sort_by(|a, b| named(a).cmp(&named(b)));
    go.sort_by(|a, b| named(a).cmp(&named(b)));
    let (mut come, mut go) = (come.iter().map(named).peekable(), go.iter().map(named).peekable());
    let mut moves = Vec::with_capacity(come.len() + go.len());
    loop {
        let comes = match (come.peek(), go.peek()) {
            (None, None) => return moves,
            (Some(_), None) => true,
            (None, Some(_)) => false,
            (Some(come_next), Some(go_next)) if come_next == go_next => {
                come.next();
                go.next();
                continue;
            }
            (Some(come_next), Some(go_next)) => come_next < go_next,
        };
        let next = if comes { come.next() } else { go.next() };
        moves.extend(next.map(|at| Move { at, comes }));
    }
}

fn damaged(what: &str) -> RedbError {
    Damaged { table: twobox::Table::Lanes, what: what.into() }.into()
}

/// The destination that a block is of.
pub(super) fn destination(key: &[u8]) -> Result<&[u8], RedbError> {
    At::read(key).map(|at| at.destination)
}

/// The time and the ordering keys of a block.
pub(super) fn lanes<'a>(key: &[u8], sealed: &'a [u8]) -> Result<(Millis, Lanes<'a>), RedbError> {
    Ok((At::read(key)?.due, Lanes(Seal::DUE.unseal(key, sealed)?)))
}

/// The ordering keys of a block that are left.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lanes<'a>(&'a [u8]);

impl Lanes<'_> {
    /// What is left, as bytes.
    pub(super) const fn bytes(&self) -> &[u8] {
        self.0
    }
}

/// Where the next ordering key of a block lies, of which all before `at` has been read.
pub(super) fn next_lane(block: &[u8], at: usize) -> Result<Range<usize>, RedbError> {
    let length = block.get(at).map(|length| usize::from(*length));
    let end = length.map(|length| at + 1 + length).filter(|end| *end <= block.len());
    end.map(|end| at + 1..end).ok_or_else(|| damaged("a block of due lanes ends too early"))
}

impl<'a> Iterator for Lanes<'a> {
    type Item = Result<&'a [u8], RedbError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let next = next_lane(self.0, 0);
        let found = next.map(|next| {
            let (lane, rest) = (&self.0[next.clone()], &self.0[next.end..]);
            self.0 = rest;
            lane
        });
        if found.is_err() {
            self.0 = &[];
        }
        Some(found)
    }
}

/// An entry that is not as the rows say.
pub(super) fn error(lane: &[u8], what: &'static str) -> RedbError {
    RedbError::Index { entry: "lanes ".to_string() + &place::shown_lane(lane), what }
}

/// The key of a block and its ordering keys.
type Block = (Vec<u8>, Vec<u8>);

/// How many of these moves, of which the first has this key, belong into the same block.
fn until_next(
    table: &Table<'_, Bytes, Bytes>,
    key: &[u8],
    moves: &[Move<'_>],
) -> Result<usize, RedbError> {
    if moves.len() == 1 {
        return Ok(1);
    }
    let next = table.range((Bound::Excluded(Start(key)), Bound::Unbounded))?.next().transpose()?;
    let next = next.as_ref().map(|(key, _)| At::read(key.value())).transpose()?;
    let before_next = |other: &&Move<'_>| {
        other.at.is_beside(moves[0].at) && next.is_none_or(|next| other.at < next)
    };
    Ok(moves.iter().take_while(before_next).count())
}

/// The key and the value of the block that this key, which is that of a lane, belongs into, if
/// there is one.
fn block_of(
    table: &Table<'_, Bytes, Bytes>,
    key: &[u8],
    at: At<'_>,
) -> Result<Option<Block>, RedbError> {
    let Some((found, sealed)) =
        table.range((Bound::Unbounded, Bound::Included(Start(key))))?.next_back().transpose()?
    else {
        return Ok(None);
    };
    let found = found.value();
    if !At::read(found)?.is_beside(at) {
        return Ok(None);
    }
    Ok(Some((found.to_vec(), Seal::DUE.unseal(found, sealed.value())?.to_vec())))
}

/// Writes what a block comes to, as so many blocks as it needs.
fn write_block(
    table: &mut Table<'_, Bytes, Bytes>,
    block: Option<Block>,
    moves: &[Move<'_>],
) -> Result<(), RedbError> {
    let Some(Move { at: first, .. }) = moves.first() else { return Ok(()) };
    let (mut key, old) = block.unwrap_or_default();
    let known = !key.is_empty();
    // If they are too many for one block, each gets the same share: the next one that comes finds
    // room.
    let bytes = |comes| {
        moves
            .iter()
            .filter(|moved| moved.comes == comes)
            .map(|moved| 1 + moved.at.ordering_key.len())
            .sum::<usize>()
    };
    let whole = (old.len() + bytes(true)).saturating_sub(bytes(false));
    let share = whole.div_ceil(whole.div_ceil(FULL).max(1));
    let mut value = Vec::with_capacity(FULL + 8);
    let mut flush = |key: &[u8], value: &mut Vec<u8>| -> Result<(), RedbError> {
        Seal::DUE.seal(key, value);
        table.insert(key, value.as_slice())?;
        value.clear();
        Ok(())
    };
    let mut push = |ordering_key: &[u8]| {
        let at = At { ordering_key, ..*first };
        if !value.is_empty()
            && (value.len() >= share || value.len() + 1 + ordering_key.len() > FULL)
        {
            flush(&key, &mut value)?;
            at.write(&mut key);
        } else if key.is_empty() {
            at.write(&mut key);
        }
        // It has 128 bytes at most.
        value.push(ordering_key.len() as u8);
        value.extend_from_slice(ordering_key);
        Ok::<_, RedbError>(())
    };
    let mut old = Lanes(&old);
    let mut head = old.next().transpose()?;
    let error = |at: &At<'_>, what| {
        let mut lane = Vec::new();
        at.lane(&mut lane);
        error(&lane, what)
    };
    for Move { at, comes } in moves {
        let lane = at.ordering_key;
        while let Some(before) = head.filter(|head| *head < lane) {
            push(before)?;
            head = old.next().transpose()?;
        }
        match (comes, head == Some(lane)) {
            (true, false) => push(lane)?,
            (false, true) => head = old.next().transpose()?,
            (true, true) => return Err(error(at, "its entry is there already")),
            (false, false) => return Err(error(at, "its entry is missing")),
        }
    }
    while let Some(lane) = head {
        push(lane)?;
        head = old.next().transpose()?;
    }
    if !value.is_empty() {
        flush(&key, &mut value)?;
    } else if known {
        table.remove(key.as_slice())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use redb::backends::InMemoryBackend;
    use redb::{Database, ReadableTableMetadata as _};

    use twobox::{Destination, LaneKey, OrderingKey, codec};

    use super::*;
    use crate::tables::DUE;

    /// Lanes with names of all lengths, at three destinations, the default among them.
    fn lane(number: u8) -> LaneKey {
        let filler = "x".repeat(usize::from(number) * 37 % 126);
        let ordering_key = OrderingKey::new(format!("{number:02x}{filler}")).unwrap();
        let destination = match number % 3 {
            0 => Destination::default(),
            1 => Destination::new("a").unwrap(),
            _ => Destination::new("a".repeat(128)).unwrap(),
        };
        LaneKey { destination, ordering_key }
    }

    fn bytes(lane: &LaneKey) -> Vec<u8> {
        let mut key = Vec::new();
        codec::encode_lane(lane, &mut key);
        key
    }

    fn place((due, lane): &(Millis, LaneKey)) -> (&Destination, Millis, &OrderingKey) {
        (&lane.destination, *due, &lane.ordering_key)
    }

    /// What a transaction moves: a time, and lanes of which each changes sides.
    fn transactions() -> impl Strategy<Value = Vec<Vec<(u64, Vec<u8>)>>> {
        let lanes = prop_oneof![
            prop::collection::vec(any::<u8>(), 1..4),
            prop::collection::vec(any::<u8>(), 30..120)
        ];
        prop::collection::vec(prop::collection::vec((0..3_u64, lanes), 1..4), 1..8)
    }

    proptest! {
        /// Whatever comes and goes, also in one transaction: the blocks have what is due, in its
        /// order, none is too long and none is empty.
        #[test]
        fn blocks_have_what_is_due(transactions in transactions()) {
            let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
            let mut model = BTreeSet::new();
            for transaction in transactions {
                let tx = database.begin_write().unwrap();
                let mut table = tx.open_table(DUE).unwrap();
                let mut moves = Moves::default();
                for (due, lane) in transaction.into_iter().flat_map(|(due, lanes)| lanes.into_iter().map(move |lane| (due, lane))) {
                    let (due, lane) = (Millis::new(due), self::lane(lane));
                    let comes = !model.remove(&(due, lane.clone()));
                    moves.add(due, &bytes(&lane), comes);
                    if comes {
                        model.insert((due, lane));
                    }
                }
                moves.write(&mut table).unwrap();
                prop_assert!(moves.is_empty());
                let mut found = Vec::new();
                for block in table.iter().unwrap() {
                    let (key, sealed) = block.unwrap();
                    let (due, block) = lanes(key.value(), sealed.value()).unwrap();
                    prop_assert!(!block.0.is_empty() && block.0.len() <= FULL);
                    let block: Vec<&[u8]> = block.collect::<Result<_, _>>().unwrap();
                    let at = At::read(key.value()).unwrap();
                    prop_assert!(at.ordering_key <= block[0]);
                    let mut lane = Vec::new();
                    found.extend(block.into_iter().map(|ordering_key| {
                        write_lane(at.destination, ordering_key, &mut lane);
                        (due, codec::decode_lane(&lane).unwrap())
                    }));
                }
                let mut right: Vec<_> = model.iter().cloned().collect();
                right.sort_by(|a, b| place(a).cmp(&place(b)));
                prop_assert_eq!(found, right);
                drop(table);
                tx.commit().unwrap();
            }
        }
    }

    /// What is due at the same time takes few writes: 78 lanes of 12 bytes are in a block.
    #[test]
    fn lanes_that_come_together_lie_together() {
        let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
        let tx = database.begin_write().unwrap();
        let mut table = tx.open_table(DUE).unwrap();
        for (comes, blocks) in [(true, 4), (false, 0)] {
            let mut moves = Moves::default();
            (0..256).for_each(|n| {
                moves.add(Millis::new(1), format!("\0order-{n:06}").as_bytes(), comes);
            });
            moves.write(&mut table).unwrap();
            assert_eq!(table.len().unwrap(), blocks);
        }
        // One by one, in any order: a block that is full becomes two with room.
        for n in 0..256_u32 {
            let mut moves = Moves::default();
            moves.add(
                Millis::new(1),
                format!("\0order-{:06}", n.wrapping_mul(97) % 256).as_bytes(),
                true,
            );
            moves.write(&mut table).unwrap();
        }
        let blocks = table.len().unwrap();
        assert!((4..=8).contains(&blocks), "{blocks} blocks");
    }

    /// What is there already does not come, and what is not there does not go.
    #[test]
    fn moves_that_do_not_fit_are_damage() {
        let database = Database::builder().create_with_backend(InMemoryBackend::new()).unwrap();
        let tx = database.begin_write().unwrap();
        let mut table = tx.open_table(DUE).unwrap();
        let mut moved = |due, number, comes| {
            let mut moves = Moves::default();
            moves.add(Millis::new(due), &bytes(&lane(number)), comes);
            moves.write(&mut table)
        };
        moved(1, 1, true).unwrap();
        for (due, number, comes, what) in [
            (1, 1, true, "there already"),
            (1, 2, false, "missing"),
            (1, 0, false, "missing"),
            (2, 1, false, "missing"),
        ] {
            let error = moved(due, number, comes).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
        moved(1, 1, false).unwrap();
        assert!(table.is_empty().unwrap());
    }
}
