#![doc = include_str!("../README.md")]
#![no_std]

extern crate alloc;

mod boundary;
mod checked;
pub mod codec;
mod event;
mod fingerprint;
mod ids;
mod inbox;
#[cfg(feature = "json")]
mod json;
mod policy;
pub mod relay;
mod render;
mod retention;
mod stats;
pub mod store;
mod table;
mod time;
pub mod transition;
mod upkeep;

pub use boundary::{Batch, Change, Decision, Expect, Keys, Query, Rows, Transition};
pub use checked::Checked;
pub use event::{Body, Draft, Event, Headers};
pub use fingerprint::{Digest, Fingerprint};
pub use ids::{
    Consumer, ContentType, EventId, EventType, HeaderName, HeaderValue, Invalid, OrderId,
    OrderingKey, Owner, Reason, RequestId, RequestKey, Scope,
};
pub use inbox::{Handled, Inbox, Receipt};
pub use policy::{DeliveryPolicy, WhenDead};
pub use render::Dump;
pub use retention::{RedriveWindow, Retention};
pub use stats::{Counts, Stats};
pub use store::{
    Applied, End, Load, Reader, RunError, Step, Stepped, Store, Tables, Transaction, Writing,
};
pub use table::{
    CallRow, CallState, DeliveryState, FORMAT_VERSION, InboxRow, InboxState, IndexEntry, Key,
    LaneRow, Lease, OrderRow, OutboxRow, Placed, PositionRow, Record, RequestRow, Revision, Stored,
    Table,
};
pub use time::Millis;
pub use transition::claim::{Claim, Claimed, Delivery, Run};
pub use transition::commit_order::{CommitOrder, CommitRefused, Committed};
pub use transition::lane::{LeaseRef, Place, Stale, StaleLease};
pub use transition::operator::{Cancel, Discard, NotDone, Operated, Redrive};
pub use transition::purge::{Purge, Purged};
pub use transition::receive::{
    ContentDiffers, CountFailure, FailureCounted, Receive, Received, RecordEffect, Retry, SkipTo,
};
pub use transition::register::{ParametersDiffer, Register, Registered, Request};
pub use transition::settle::{Ending, Renew, Renewed, RunResult, Settle, Settled};
pub use upkeep::{DeadLetter, dead_letters, purge_all, redrive_all};
