//! What must hold for twobox on redb beside what must hold for every store.

#[cfg(test)]
mod again;
#[cfg(test)]
mod answers;
#[cfg(test)]
mod backups;
#[cfg(test)]
mod common;
#[cfg(test)]
mod cost;
#[cfg(test)]
#[allow(dead_code, reason = "the unit tests use it too")]
mod counted;
#[cfg(test)]
mod damage;
#[cfg(test)]
mod files;
#[cfg(test)]
mod leases;
#[cfg(test)]
mod processes;
#[cfg(test)]
mod sample;
#[cfg(test)]
mod yours;
