//! twobox on redb.
