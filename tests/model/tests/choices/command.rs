//! The commands, and what a program remembers between them.

use core::fmt::Debug;
use core::num::NonZeroU16;
use core::time::Duration;
use std::collections::BTreeMap;

use twobox::call::{CallEnd, CallKey, Intend, Resolve, Start, WhenUnknown};
use twobox::{
    Body, Cancel, Checked, Claim, CommitOrder, Consumer, CountFailure, DeliveryPolicy, Destination,
    Discard, Draft, Ending, Event, EventId, EventType, Fingerprint, Headers, LanePlace, Leased,
    Millis, OrderId, OrderingKey, Owner, Purge, Reason, Receive, Redrive, Register, Renew, Request,
    Retention, Settle, Table, Tables, Transition, WhenDead,
};

/// One thing to do. Requests, relays and events are numbers; event 0 and 1 are of order 0, event 2
/// is of order 1; 0 and 2 have the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Register {
        request: u8,
        other: bool,
    },
    Commit {
        request: u8,
        other: bool,
    },
    Claim {
        relay: u8,
    },
    Settle {
        relay: u8,
        end: End,
    },
    Renew {
        relay: u8,
    },
    Cancel(u8),
    Redrive(u8),
    Discard(u8),
    Purge(Table),
    Receive {
        event: u8,
        in_order: bool,
    },
    ReceiveOther(u8),
    CountFailure(u8),
    Intend,
    Start(WhenUnknown),
    Resolve {
        done: bool,
    },
    /// So many seconds pass.
    Wait(u64),
}

/// How a lease ends: its events are all confirmed, or the first of them is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Confirmed,
    Released,
    Failed,
    Rejected,
    Unavailable,
}

/// The commands that are tried everywhere.
pub(crate) const ALL: [Command; 32] = [
    Command::Register { request: 0, other: false },
    Command::Register { request: 0, other: true },
    Command::Commit { request: 0, other: false },
    Command::Commit { request: 0, other: true },
    Command::Commit { request: 1, other: false },
    Command::Claim { relay: 0 },
    Command::Claim { relay: 1 },
    Command::Settle { relay: 0, end: End::Confirmed },
    Command::Settle { relay: 0, end: End::Released },
    Command::Settle { relay: 0, end: End::Failed },
    Command::Settle { relay: 0, end: End::Rejected },
    Command::Settle { relay: 0, end: End::Unavailable },
    Command::Settle { relay: 1, end: End::Confirmed },
    Command::Renew { relay: 0 },
    Command::Cancel(0),
    Command::Redrive(0),
    Command::Discard(0),
    Command::Purge(Table::Events),
    Command::Purge(Table::Lanes),
    Command::Purge(Table::Requests),
    Command::Purge(Table::Inbox),
    Command::Receive { event: 0, in_order: false },
    Command::Receive { event: 0, in_order: true },
    Command::Receive { event: 2, in_order: true },
    Command::ReceiveOther(0),
    Command::CountFailure(0),
    Command::Intend,
    Command::Start(WhenUnknown::Ask),
    Command::Start(WhenUnknown::Repeat),
    Command::Resolve { done: true },
    Command::Resolve { done: false },
    Command::Wait(100),
];

/// What a program remembers: the time, and what each relay has leased.
#[derive(Debug, Clone, Default)]
pub(crate) struct Memory {
    pub(crate) now: u64,
    pub(crate) held: BTreeMap<u8, Vec<Leased>>,
    policy: Policy,
}

#[derive(Debug, Clone)]
struct Policy {
    delivery: Checked<DeliveryPolicy>,
    kept: Checked<Retention>,
}

impl Default for Policy {
    fn default() -> Self {
        let ten = Duration::from_secs(10);
        let delivery = DeliveryPolicy {
            backoff_base: ten,
            backoff_cap: ten * 2,
            max_failures: 2,
            max_starts: 3,
            when_dead: WhenDead::Block,
        };
        let delivery = delivery.checked().unwrap();
        let kept = Retention {
            events: ten * 6,
            inbox: ten * 15,
            requests: ten * 6,
            orders: Some(ten * 6),
            ..Retention::default()
        };
        Self { kept: kept.checked(&delivery).unwrap(), delivery }
    }
}

fn request(number: u8, other: bool) -> Request {
    let quantity = if other { "2" } else { "1" };
    Request::new("shop", format!("r{number}"), Fingerprint::of([("quantity", quantity)])).unwrap()
}

fn id(event: u8) -> EventId {
    EventId::new(format!("e{event}")).unwrap()
}

fn lane(event: u8) -> OrderingKey {
    OrderingKey::new(if event == 1 { "b" } else { "a" }).unwrap()
}

fn body(number: u8) -> Body {
    Body::text(number.to_string()).unwrap()
}

fn event(number: u8, content: u8) -> Event {
    Event {
        destination: Destination::default(),
        id: id(number),
        order: OrderId::new("o").unwrap(),
        event_type: EventType::new("created").unwrap(),
        schema_version: 1,
        ordering_key: lane(number),
        time: Millis::new(0),
        headers: Headers::new(),
        body: body(content),
    }
}

fn consumer() -> Consumer {
    Consumer::new("mail").unwrap()
}

fn call() -> CallKey {
    CallKey { consumer: consumer(), event: id(0) }
}

/// The answer as text, whatever it is.
fn answer<X: Tables, T: Transition>(tables: &mut X, transition: T, now: Millis) -> String
where
    T::Outcome: Debug,
{
    format!("{:?}", tables.run(transition, now))
}

impl Memory {
    /// The same at another time.
    pub(crate) fn at(&self, now: u64) -> Self {
        Self { now, ..self.clone() }
    }

    pub(crate) fn time(&self) -> Millis {
        Millis::new(1_000 + self.now * 1_000)
    }

    /// Does what is asked within a transaction, and gives the answer, with what is leased if it was
    /// a claim.
    pub(crate) fn ask<X: Tables>(&self, tables: &mut X, command: Command) -> (String, Vec<Leased>) {
        let (now, Policy { delivery, kept }) = (self.time(), &self.policy);
        let none = |answer: String| (answer, Vec::new());
        let held = |relay: u8| self.held.get(&relay).into_iter().flatten();
        match command {
            Command::Register { request: number, other } => {
                none(answer(tables, Register::new(&request(number, other)), now))
            }
            Command::Commit { request: number, other } => {
                let events = if number == 0 { vec![0, 1] } else { vec![2] };
                let drafts = events.into_iter().map(|event| {
                    Draft::new("created", body(event))
                        .unwrap()
                        .id(id(event))
                        .ordering_key(lane(event))
                });
                let request = request(number, other);
                let order = OrderId::new(format!("o{number}")).unwrap();
                none(answer(
                    tables,
                    CommitOrder::new(&request, order, body(number), drafts).unwrap(),
                    now,
                ))
            }
            Command::Claim { relay } => {
                let owner = Owner::new(format!("relay-{relay}")).unwrap();
                let claim = Claim::new(delivery, owner, Duration::from_secs(20), 4).unwrap().run(2);
                let claimed = tables.run(claim, now);
                (format!("{claimed:?}"), claimed.map(|claimed| claimed.leased).unwrap_or_default())
            }
            Command::Settle { relay, end } => {
                let settled = held(relay).map(|leased| {
                    let reason = Reason::new("no");
                    match end {
                        End::Confirmed => leased.settle(leased.events.len(), None),
                        End::Released => leased.release(),
                        End::Failed => leased.settle(0, Some(Ending::Failed(reason))),
                        End::Rejected => leased.settle(0, Some(Ending::Rejected(reason))),
                        End::Unavailable => leased.settle(0, Some(Ending::Unavailable(reason))),
                    }
                });
                none(answer(tables, Settle::new(delivery, settled), now))
            }
            Command::Renew { relay } => {
                let leases = held(relay).map(|leased| leased.lease.clone());
                none(answer(tables, Renew::new(leases, Duration::from_secs(20)), now))
            }
            Command::Cancel(event) => {
                none(answer(tables, Cancel::new([id(event)], Reason::new("no")).unwrap(), now))
            }
            Command::Redrive(event) => {
                none(answer(tables, Redrive::new([id(event)], kept.redrive_window()).unwrap(), now))
            }
            Command::Discard(event) => {
                none(answer(tables, Discard::new([id(event)], Reason::new("no")).unwrap(), now))
            }
            Command::Purge(table) => {
                none(answer(tables, Purge::new(kept, table, NonZeroU16::MIN), now))
            }
            Command::Receive { event: number, in_order } => {
                let receive = Receive::new(consumer(), &event(number, number)).effect(body(number));
                let receive = if in_order {
                    receive.in_order(
                        lane(number),
                        LanePlace {
                            begun: Millis::new(0),
                            sequence: number.into(),
                            after: u64::from(number) / 2,
                        },
                    )
                } else {
                    receive
                };
                none(answer(tables, receive, now))
            }
            Command::ReceiveOther(number) => {
                none(answer(tables, Receive::new(consumer(), &event(number, 9)), now))
            }
            Command::CountFailure(number) => none(answer(
                tables,
                CountFailure::new(consumer(), &event(number, number), Reason::new("no"), 2),
                now,
            )),
            Command::Intend => none(answer(tables, Intend::new(call()), now)),
            Command::Start(rule) => {
                none(answer(tables, Start::new(call(), Duration::from_secs(50), rule), now))
            }
            Command::Resolve { done } => {
                let end =
                    if done { CallEnd::Done(None) } else { CallEnd::NotDone(Reason::new("no")) };
                none(answer(tables, Resolve::new(call(), end), now))
            }
            Command::Wait(_) => none(String::new()),
        }
    }

    /// Remembers what came of a command. A relay keeps what it held when it has settled it, so
    /// that it may do so again.
    pub(crate) fn learn(&mut self, command: Command, leased: Vec<Leased>) {
        if let Command::Claim { relay } = command
            && !leased.is_empty()
        {
            self.held.insert(relay, leased);
        }
        if let Command::Wait(time) = command {
            self.now += time;
        }
    }
}
