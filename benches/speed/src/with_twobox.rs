//! The life of an order with twobox on redb.

use std::convert::Infallible;
use std::path::Path;

use redb::{ReadableDatabase, ReadableTableMetadata, TableDefinition};
use twobox::relay::{Relay, RelaySettings};
use twobox::{
    Body, CommitOrder, Consumer, Draft, Fingerprint, Handled, InProcess, Inbox, Message, Millis,
    Moment, OrderId, Owner, Request, RunError, Store,
};
use twobox_redb::{RedbOptions, RedbStore};

use crate::{CACHE, CONSUMER, Contender, CountedFile, EVENT_TYPE, NOW, Order, SCOPE, Syncs};

/// A store of twobox on redb.
#[derive(Debug)]
pub struct WithTwobox {
    store: RedbStore,
    syncs: Syncs,
}

const TIME: Millis = Millis::new(NOW);

impl Contender for WithTwobox {
    fn create(folder: &Path) -> Self {
        let (file, syncs) = CountedFile::create(&folder.join("twobox.redb"));
        Self { store: RedbOptions::new().cache_bytes(CACHE).create_on(file).unwrap(), syncs }
    }

    fn place(&self, orders: &[Order]) -> u64 {
        let requests: Vec<Request> = orders
            .iter()
            .map(|order| {
                Request::new(SCOPE, order.request(), Fingerprint::of_bytes(&order.body)).unwrap()
            })
            .collect();
        let commits = orders.iter().zip(&requests).map(|(order, request)| {
            let body = Body::new("application/octet-stream", &order.body).unwrap();
            let event = Draft::new(EVENT_TYPE, body.clone()).unwrap();
            CommitOrder::new(request, OrderId::new(order.id()).unwrap(), body, [event]).unwrap()
        });
        let commits: Vec<CommitOrder<'_>> = commits.collect();
        match &commits[..] {
            [commit] => u64::from(self.store.run(commit, TIME).unwrap().repeated),
            commits => {
                let placed = self.store.write(TIME, |tx| {
                    commits.iter().try_fold(0, |repeated, commit| {
                        Ok(repeated + u64::from(tx.run(commit)?.repeated))
                    })
                });
                placed.map_err(RunError::flatten).unwrap()
            }
        }
    }

    fn drain(&self, batch: usize) -> u64 {
        let settings = RelaySettings {
            window: batch,
            run: batch.min(16),
            ..RelaySettings::new(Owner::new("relay-1").unwrap())
        };
        let inbox = Inbox::new(&self.store, Consumer::new(CONSUMER).unwrap());
        let publisher = InProcess::new(inbox, |_, _: &Message| Ok::<_, Infallible>(Handled::Done));
        let mut relay = Relay::new(&self.store, publisher, settings, Moment::steady(TIME)).unwrap();
        relay.run_until_idle(Moment::steady(TIME)).unwrap().confirmed
    }

    fn applied(&self) -> u64 {
        const INBOX: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("twobox_inbox");
        self.store
            .database()
            .unwrap()
            .begin_read()
            .unwrap()
            .open_table(INBOX)
            .unwrap()
            .len()
            .unwrap()
    }

    fn syncs(&self) -> Option<u64> {
        Some(self.syncs.count())
    }
}
