//! The life of a store, from its creation to a purge: everything that a sender, a relay, a receiver
//! and an operator do with it.
//!
//! It runs on any [`Disk`], says each time that it was told of a commit, and can be taken up at any
//! of its steps: "doing the same again" (P8) after a fault is to take it up at the step that was
//! not finished. Sender and receiver share the store, so a commit of either meets the pages of
//! both.

use core::time::Duration;
use std::num::NonZeroU16;

use redb::{ReadableTable, TableDefinition};
use thiserror::Error;
use twobox::call::{CallEnd, CallKey, Intend, Resolve, Start, WhenUnknown};
use twobox::{
    Body, Cancel, Checked, Claim, CommitOrder, Consumer, DeliveryPolicy, Discard, Draft, Ending,
    EventId, Fingerprint, Handled, Inbox, Message, Millis, OrderId, OrderingKey, Owner, Purge,
    Reader, Reason, Receipt, Redrive, RedriveWindow, Register, Request, Retention, RunError,
    Settle, Store, Stored, Transition,
};
use twobox_redb::{RedbError, RedbOptions, RedbStore};

use crate::disk::Disk;
use crate::tables::{self, Broken};

/// A table of the user's own, which is written in the same commits: how many there are of each
/// thing.
pub const STOCK: TableDefinition<'static, &str, u64> = TableDefinition::new("stock");

/// When the life begins.
const BIRTH: u64 = 1_790_000_000_000;

/// Why a life came to an early end.
#[derive(Debug, Error)]
pub enum Trouble {
    /// The store could not be created, opened or closed.
    #[error("creating, opening or closing failed: {0}")]
    Open(RedbError),
    /// The store failed before a commit.
    #[error("the store failed before a commit: {0}")]
    Store(RedbError),
    /// The store failed in a commit.
    #[error("the store failed in a commit: {0}")]
    Unknown(RedbError),
    /// Something went on that never should.
    #[error("{0}")]
    Wrong(String),
}

impl<R: std::fmt::Display> From<RunError<RedbError, R>> for Trouble {
    fn from(error: RunError<RedbError, R>) -> Self {
        match error {
            RunError::Store(error) => Self::Store(error),
            RunError::Unknown(error) => Self::Unknown(error),
            RunError::Refused(refused) => Self::Wrong(format!("refused: {refused}")),
            RunError::Conflict(key) => {
                Self::Wrong(format!("a conflict over {key:?}, with nobody else there"))
            }
        }
    }
}

impl From<twobox::Invalid> for Trouble {
    fn from(invalid: twobox::Invalid) -> Self {
        Self::Wrong(invalid.to_string())
    }
}

/// An error of redb in the user's own work.
fn own(error: impl Into<redb::Error>) -> Trouble {
    Trouble::Store(error.into().into())
}

type Step = fn(&mut Life<'_>) -> Result<(), Trouble>;

/// The steps in their order. Each can be done again.
const STEPS: &[Step] = &[
    |life| life.register("req-1", "2"),
    |life| {
        life.place(
            "req-1",
            "2",
            &[("created", "customer-7"), ("reserved", "customer-7"), ("billed", "customer-8")],
            40,
        )
    },
    // Larger than a page.
    |life| life.place("req-2", "9", &[("created", "customer-7"), ("bad", "customer-9")], 9_000),
    |life| life.deliver(8),
    |life| life.reopen(),
    |life| life.place("req-3", "1", &[("created", "customer-9"), ("poison", "customer-7")], 300),
    |life| life.operate("req-2/2", &|id, life| Redrive::new([id], life.window()), true),
    |life| life.deliver(3),
    |life| life.call("req-1/1"),
    |life| {
        life.place(
            "req-4",
            "4",
            &[("bad", "customer-8"), ("created", "customer-8"), ("late", "customer-7")],
            10,
        )
    },
    |life| life.deliver(8),
    |life| {
        life.operate("req-4/1", &|id, _| Discard::new([id], Reason::new("nobody wants it")), false)
    },
    |life| life.place("req-5", "5", &[("unwanted", "customer-1"), ("created", "customer-1")], 10),
    |life| {
        life.operate(
            "req-5/1",
            &|id, _| Cancel::new([id], Reason::new("changed their mind")),
            false,
        )
    },
    |life| life.purge(),
    |life| life.deliver(8),
    |life| life.register("req-6", "6"),
    |life| life.place("req-7", "7", &[("bad", "customer-2"), ("created", "customer-2")], 2_000),
    |life| life.deliver(8),
    |life| life.reopen(),
];

/// A life that is lived on a disk.
pub struct Life<'d> {
    disk: &'d Disk,
    options: RedbOptions,
    store: Option<RedbStore>,
    now: Millis,
    policy: Checked<DeliveryPolicy>,
    kept: Checked<Retention>,
    redriven: bool,
    step: usize,
    told: &'d mut dyn FnMut(usize, &RedbStore),
}

/// What is in a store, with its revisions and with the user's own rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Contents {
    /// Our rows.
    pub rows: Vec<Stored>,
    /// The user's.
    pub own: Vec<(String, u64)>,
}

impl Contents {
    /// Reads and checks what is committed.
    ///
    /// # Errors
    ///
    /// [`Broken`].
    pub fn of(store: &RedbStore) -> Result<Self, Broken<RedbError>> {
        let mut view = store.view().map_err(Broken::Store)?;
        let rows = tables::check(&mut view)?;
        let redb = |error: redb::Error| Broken::Store(RedbError::from(error));
        let own = match view.redb().open_table(STOCK) {
            Ok(stock) => {
                let mut own = Vec::new();
                for row in stock.iter().map_err(|error| redb(error.into()))? {
                    let (name, count) = row.map_err(|error| redb(error.into()))?;
                    own.push((name.value().to_string(), count.value()));
                }
                own
            }
            Err(redb::TableError::TableDoesNotExist(_)) => Vec::new(),
            Err(error) => return Err(redb(error.into())),
        };
        Ok(Self { rows, own })
    }
}

/// A life that has ended, early or not.
pub struct Ended {
    /// Why it ended early, if it did.
    pub trouble: Option<Trouble>,
    /// The step that was not finished.
    pub step: usize,
    /// The store as it was then, if it was open.
    pub store: Option<RedbStore>,
}

/// Lives from a step on; step 0 begins on an empty disk. After each commit, and each call that
/// committed nothing, `told` gets the step and the store.
pub fn live(
    disk: &Disk,
    options: RedbOptions,
    from: usize,
    told: &mut dyn FnMut(usize, &RedbStore),
) -> Ended {
    // Whoever comes back finds that some time has passed.
    let now = Millis::new(BIRTH) + Duration::from_secs(3_600 * from as u64);
    let policy = DeliveryPolicy { max_failures: 2, ..DeliveryPolicy::default() };
    let policy = policy.checked().expect("it allows more starts than failures");
    let kept = Retention { requests: Duration::from_secs(14 * 86_400), ..Retention::default() };
    let kept = kept.checked(&policy).expect("consumers remember for a month");
    let mut life = Life {
        disk,
        options,
        store: None,
        now,
        policy,
        kept,
        redriven: from > 6,
        step: from,
        told,
    };
    let trouble = life.go_on(from).err();
    Ended { trouble, step: life.step, store: life.store }
}

impl Life<'_> {
    fn go_on(&mut self, from: usize) -> Result<(), Trouble> {
        let empty =
            redb::StorageBackend::len(self.disk).map_err(|error| Trouble::Open(error.into()))? == 0;
        let opened = if empty {
            self.options.create_on(self.disk.clone())
        } else {
            self.options.open_on(self.disk.clone())
        };
        self.store = Some(opened.map_err(Trouble::Open)?);
        if empty {
            self.tell()?;
        }
        for (number, step) in STEPS.iter().enumerate().skip(from) {
            self.step = number;
            self.now =
                self.now.max(Millis::new(BIRTH) + Duration::from_secs(3_600 * number as u64));
            step(self)?;
        }
        self.step = STEPS.len();
        Ok(())
    }

    fn store(&self) -> Result<&RedbStore, Trouble> {
        self.store.as_ref().ok_or_else(|| Trouble::Wrong("the store is not open".to_string()))
    }

    fn tell(&mut self) -> Result<(), Trouble> {
        let store = self
            .store
            .as_ref()
            .ok_or_else(|| Trouble::Wrong("the store is not open".to_string()))?;
        self.disk.told();
        (self.told)(self.step, store);
        Ok(())
    }

    fn run<T: Transition>(&mut self, transition: T) -> Result<T::Outcome, Trouble> {
        let outcome = self.store()?.run(transition, self.now)?;
        self.tell()?;
        Ok(outcome)
    }

    fn reopen(&mut self) -> Result<(), Trouble> {
        if let Some(store) = self.store.take() {
            store.close().map_err(Trouble::Open)?;
        }
        self.store = Some(self.options.open_on(self.disk.clone()).map_err(Trouble::Open)?);
        Ok(())
    }

    fn register(&mut self, id: &str, quantity: &str) -> Result<(), Trouble> {
        let request = request(id, quantity)?;
        self.run(Register::new(&request))?;
        Ok(())
    }

    /// An order with its events, and a row of our own, which must count each order once.
    fn place(
        &mut self,
        id: &str,
        quantity: &str,
        events: &[(&str, &str)],
        size: usize,
    ) -> Result<(), Trouble> {
        let request = request(id, quantity)?;
        let mut drafts = Vec::new();
        for (event_type, lane) in events {
            let body = Body::new("text/plain", vec![b'a' + (drafts.len() as u8); size])?;
            drafts.push(Draft::new(event_type, body)?.ordering_key(OrderingKey::new(*lane)?));
        }
        let order = CommitOrder::new(&request, OrderId::new(id)?, Body::text(quantity)?, drafts)?;
        let write = self.store()?.write(self.now, |tx| {
            let committed = tx.run(&order).map_err(Trouble::from)?;
            if !committed.repeated {
                let mut stock = tx.redb().open_table(STOCK).map_err(own)?;
                let orders = stock.get("orders").map_err(own)?.map_or(0, |count| count.value());
                stock.insert("orders", orders + 1).map_err(own)?;
            }
            Ok(())
        });
        flat(write)?;
        self.tell()
    }

    /// Claims, publishes to both consumers, and settles, until there is nothing more. A "bad" event
    /// fails until it was redriven.
    fn deliver(&mut self, limit: usize) -> Result<(), Trouble> {
        for _round in 0..64 {
            let policy = self.policy.clone();
            let claim =
                Claim::new(&policy, Owner::new("relay-1")?, Duration::from_secs(30), limit)?;
            let claimed = self.run(claim)?;
            let mut results = Vec::new();
            for leased in &claimed.leased {
                let (mut confirmed, mut ending) = (0, None);
                for event in &leased.events {
                    let message = &event.message;
                    let bad = message.event.event_type.as_str() == "bad"
                        && !(self.redriven && message.event.id.as_str() == "req-2/2");
                    if bad {
                        ending = Some(Ending::Failed(Reason::new("the broker did not take it")));
                        break;
                    }
                    self.receive(message)?;
                    confirmed += 1;
                }
                results.push(leased.settle(confirmed, ending));
            }
            if results.is_empty() {
                match claimed.next_due {
                    Some(due) => self.now = self.now.max(due),
                    None => return Ok(()),
                }
                continue;
            }
            let settled = self.run(Settle::new(&policy, results))?;
            if !settled.stale.is_empty() {
                return Err(Trouble::Wrong(format!(
                    "a stale lease, with no other relay: {:?}",
                    settled.stale
                )));
            }
        }
        Err(Trouble::Wrong("the relay came to no end".to_string()))
    }

    /// Two consumers: one counts in a table of its own and asks for order, the other fails on what
    /// is poison to it.
    fn receive(&mut self, message: &Message) -> Result<(), Trouble> {
        let store = self.store()?;
        let stock = Inbox::new(store, Consumer::new("stock")?).in_order();
        let receipt = stock.receive(message, self.now, |tx, message| {
            let mut stock = tx.redb().open_table(STOCK).map_err(own)?;
            let name = format!("applied {}", message.event.id);
            let count = stock.get(name.as_str()).map_err(own)?.map_or(0, |count| count.value());
            stock.insert(name.as_str(), count + 1).map_err(own)?;
            Body::text(message.event.event_type.as_str())
                .map(Handled::Effect)
                .map_err(Trouble::from)
        })?;
        if !matches!(receipt, Receipt::Applied | Receipt::Duplicate) {
            return Err(Trouble::Wrong(format!(
                "consumer stock: {} {receipt:?}",
                message.event.id
            )));
        }
        self.tell()?;
        for _attempt in 0..3 {
            let audit = Inbox::new(self.store()?, Consumer::new("audit")?).max_failures(2);
            let receipt = audit.receive(message, self.now, |_tx, message| {
                if message.event.event_type.as_str() == "poison" {
                    Err("cannot read it")
                } else {
                    Ok(Handled::Done)
                }
            })?;
            self.tell()?;
            match receipt {
                Receipt::Applied | Receipt::Duplicate | Receipt::Poisoned => return Ok(()),
                Receipt::Failed(_) => {}
                Receipt::Deferred(_) | Receipt::WaitsFor(_) | Receipt::Refused(_) => {
                    return Err(Trouble::Wrong(format!(
                        "consumer audit: {} {receipt:?}",
                        message.event.id
                    )));
                }
            }
        }
        Err(Trouble::Wrong("a poisonous event was never set aside".to_string()))
    }

    fn operate<T: Transition>(
        &mut self,
        id: &str,
        operation: &dyn Fn(EventId, &Self) -> Result<T, twobox::Invalid>,
        redrive: bool,
    ) -> Result<(), Trouble> {
        let operation = operation(EventId::new(id)?, self)?;
        self.redriven |= redrive;
        self.run(operation)?;
        Ok(())
    }

    fn window(&self) -> RedriveWindow {
        self.kept.redrive_window()
    }

    /// A call outside, from its intent to its end.
    fn call(&mut self, id: &str) -> Result<(), Trouble> {
        let call = CallKey { consumer: Consumer::new("payment")?, event: EventId::new(id)? };
        self.run(Intend::new(call.clone()))?;
        let _started = self.run(Start::new(call.clone(), Duration::ZERO, WhenUnknown::Repeat))?;
        self.run(Resolve::new(call, CallEnd::Done(Some(Reason::new("paid")))))
    }

    /// Two weeks later, what is finished goes, a few rows at a time; consumers still remember.
    fn purge(&mut self) -> Result<(), Trouble> {
        let retention = self.kept.clone();
        let now = self.now;
        self.now = Millis::new(BIRTH) + Duration::from_secs(20 * 86_400);
        let five = NonZeroU16::MIN.saturating_add(4);
        for table in Purge::TABLES {
            let mut purge = Some(Purge::new(&retention, table, five));
            while let Some(page) = purge {
                let purged = self.run(&page)?;
                purge = purged.next.map(|key| page.after(key));
            }
        }
        self.now = now;
        Ok(())
    }
}

fn request(id: &str, quantity: &str) -> Result<Request, twobox::Invalid> {
    Request::new("customer-7", id, Fingerprint::of([("item", "notebook"), ("quantity", quantity)]))
}

fn flat<T>(result: Result<T, RunError<RedbError, Trouble>>) -> Result<T, Trouble> {
    result.map_err(|error| match error {
        RunError::Refused(trouble) => trouble,
        other @ (RunError::Conflict(_) | RunError::Store(_) | RunError::Unknown(_)) => other.into(),
    })
}
