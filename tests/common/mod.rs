//! The harness of the reference store, which several tests share.

pub(crate) use twobox_conformance::Reference as Memory;
