#![doc = include_str!("../README.md")]
#![no_std]
#![cfg_attr(docsrs, feature(doc_cfg))]

extern crate alloc;
#[cfg(feature = "std")]
extern crate std;

mod boundary;
mod checked;
pub mod codec;
mod event;
mod fingerprint;
pub mod flow;
mod ids;
mod in_process;
mod inbox;
#[cfg(feature = "json")]
mod json;
mod lane;
mod message;
mod policy;
mod reception;
pub mod relay;
mod render;
mod retention;
mod stats;
pub mod store;
mod table;
mod time;
mod transition;
mod upkeep;

pub use boundary::{
    Batch, Change, DeadLetter, Decision, Delivery, Destinations, Due, Expect, Finished, Keys, Lane,
    Query, Rows, Transition, Write,
};
pub use checked::{Checked, Settings};
pub use event::{Body, Draft, Event, Headers};
pub use fingerprint::{Digest, Fingerprint, Summary};
pub use ids::{
    Consumer, ContentType, Destination, EventId, EventType, HeaderName, HeaderValue, Invalid,
    LaneKey, OrderId, OrderingKey, Owner, Reason, RequestId, RequestKey, Scope,
};
pub use in_process::{Fault, InProcess};
pub use inbox::{AsyncHandler, Handled, Inbox};
pub use lane::{LaneEdit, LeaseRef, Stale, StaleLease};
pub use message::{LanePlace, Message};
pub use policy::{DeliveryPolicy, WhenDead};
pub use reception::{Receipt, Reception};
pub use render::{Dump, Events, ShownRow};
pub use retention::{RedriveWindow, Retention};
pub use stats::{Counts, Stats};
pub use store::synchronous::{
    Applied, End, Load, Reader, RunError, Seen, Store, StoreError, Tables, Transaction, Writing,
};
pub use table::{
    CallRow, CallState, DeliveryState, EventRow, EventState, FORMAT_VERSION, InboxRow, InboxState,
    IndexEntry, Key, LaneRow, Lease, OrderRow, OutboxRow, PlacedOrder, PositionRow, Record,
    RequestRow, Revision, Stored, Table,
};
pub use time::{Millis, Moment};
pub use transition::call;
pub use transition::claim::{Claim, Claimed, Leased, LeasedEvent};
pub use transition::commit_order::{CommitOrder, CommitRefused, Committed};
pub use transition::end_leases::{EndLeases, LeasesEnded};
pub use transition::operator::{Cancel, Discard, NotDone, Operated, PassOver, Redrive};
pub use transition::purge::{Purge, Purged};
pub use transition::receive::{
    ContentDiffers, CountFailure, FailureCounted, Receive, Received, Retry, SkipTo,
};
pub use transition::register::{ParametersDiffer, Register, Registered, Request};
pub use transition::settle::{Ending, Renew, Renewed, Settle, Settled, Settlement};
pub use upkeep::{
    pass_over_all, pass_over_all_async, purge_all, purge_all_async, redrive_all, redrive_all_async,
};
