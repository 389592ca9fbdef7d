//! Checksums: each value carries one of the place where it lies, its key and itself, and is read
//! only if that is right. redb does not verify its pages when it reads them.
//!
//! It is the CRC-32 of key and value, after the value in big endian. The register begins with the
//! number of the place in its upper half, and the length of the key in the lower one: so the same
//! bytes in another place, or divided otherwise, have another checksum.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use crc32fast::Hasher;
use twobox::Table;

use crate::error::RedbError;

/// Where values lie: a table of redb.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seal {
    name: &'static str,
    /// It is in the file, in each checksum: it stays what it is.
    number: u16,
}

impl Seal {
    pub(super) const META: Self = Self { name: "twobox_meta", number: 1 };

    pub(super) const DUE: Self = Self { name: "due lanes", number: 11 };
    pub(super) const PLACES: Self = Self { name: "places of events", number: 12 };

    pub(super) const fn of(table: Table) -> Self {
        let number = match table {
            Table::Requests => 2,
            Table::Orders => 3,
            Table::Events => 4,
            Table::Outbox => 5,
            Table::Lanes => 6,
            Table::Inbox => 7,
            Table::Effects => 8,
            Table::Positions => 9,
            Table::Calls => 10,
        };
        Self { name: table.name(), number }
    }

    /// Appends the checksum to a value.
    pub(super) fn seal(self, key: &[u8], value: &mut Vec<u8>) {
        let sum = self.checksum(key, value);
        value.extend_from_slice(&sum.to_be_bytes());
    }

    /// The value without its checksum, if that is right.
    pub(super) fn unseal<'a>(self, key: &[u8], sealed: &'a [u8]) -> Result<&'a [u8], RedbError> {
        match sealed.split_last_chunk() {
            Some((value, sum)) if self.checksum(key, value).to_be_bytes() == *sum => Ok(value),
            Some(_) | None => Err(RedbError::Checksum {
                table: self.name.to_string(),
                key: String::from_utf8_lossy(key).into_owned(),
            }),
        }
    }

    fn checksum(self, key: &[u8], value: &[u8]) -> u32 {
        let mut hasher = Hasher::new_with_initial(u32::from(self.number) << 16 | key.len() as u32);
        hasher.update(key);
        hasher.update(value);
        hasher.finalize()
    }
}
