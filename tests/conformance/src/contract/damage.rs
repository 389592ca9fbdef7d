//! What is damaged, or was written by another version.

use twobox::{Dump, FORMAT_VERSION, Load as _, Query, Reader, Record, Revision, Stored};

use super::{fill, rows, same};
use crate::failure::{Failure, ensure};
use crate::harness::Damage;

/// A row that cannot be read is an error of whoever asks for it, and never left out: by its key, in
/// a walk, and in a dump. The store may also refuse to be opened. Other rows are as they were, or
/// an error as well.
///
/// # Errors
///
/// The first row that was left out, or came as another one.
pub fn a_damaged_row_is_an_error<H: Damage>() -> Result<(), Failure> {
    for at in 0..rows::one_of_each("row")?.len() {
        let harness = H::open();
        let records = rows::one_of_each("row")?;
        fill(&harness, &records)?;
        let key = records[at].key();
        let Ok(harness) = harness.damage(&key) else { continue };
        let mut view = harness.store().view().map_err(Failure::store)?;
        let walk = Query::Walk { table: key.table(), after: None, limit: 100 };
        for query in [Query::rows([key.clone()]), walk] {
            let found = view.load(&query);
            ensure(found.is_err(), || {
                format!("row {key} is damaged, and the answer to {query:?} is {found:?}")
            })?;
        }
        ensure(Dump::of(&mut view).is_err(), || {
            format!("row {key} is damaged, and a dump leaves it out")
        })?;
        for record in records.iter().filter(|record| record.key() != key) {
            let query = Query::rows([record.key()]);
            let right = [Stored { record: Record::clone(record), revision: Revision::FIRST }];
            if let Ok(found) = view.load(&query) {
                same(&format!("row {key} is damaged, {query:?}"), &found.rows, &right)?;
            }
        }
    }
    Ok(())
}

/// A store that has another format version is not opened; one that has ours is.
///
/// # Errors
///
/// The version that was opened, or was not.
pub fn another_format_is_refused<H: Damage>() -> Result<(), Failure> {
    for version in [FORMAT_VERSION, 0, FORMAT_VERSION + 1, u32::MAX] {
        let opened = H::open().open_as(version).err();
        ensure(opened.is_none() == (version == FORMAT_VERSION), || {
            let what =
                opened.map_or("it is opened".to_string(), |error| format!("it says {error}"));
            format!("a store of format version {version}: {what}; ours is {FORMAT_VERSION}")
        })?;
    }
    Ok(())
}
