//! The life of an order with twobox on redb.

use std::convert::Infallible;
use std::path::Path;

use twobox::relay::{InProcess, Message, Relay, RelaySettings};
use twobox::{Body, CommitOrder, Consumer, Draft, Fingerprint, Handled, Inbox, Millis, OrderId, Owner, Request, RunError, Store};
use twobox_redb::RedbStore;

use crate::{CONSUMER, Contender, EVENT_TYPE, NOW, Order, SCOPE};

/// A store of twobox on redb.
#[derive(Debug)]
pub struct WithTwobox(pub RedbStore);

const TIME: Millis = Millis::new(NOW);

impl Contender for WithTwobox {
    fn create(folder: &Path) -> Self {
        Self(RedbStore::create(folder.join("twobox.redb")).unwrap())
    }

    fn place(&self, orders: &[Order]) {
        let requests: Vec<Request> = orders
            .iter()
            .map(|order| Request::new(SCOPE, order.request(), Fingerprint::of_bytes(&order.body)).unwrap())
            .collect();
        let commits = orders.iter().zip(&requests).map(|(order, request)| {
            let body = Body::new("application/octet-stream", &order.body).unwrap();
            let event = Draft::new(EVENT_TYPE, body.clone()).unwrap();
            CommitOrder::new(request, OrderId::new(order.id()).unwrap(), body, [event]).unwrap()
        });
        let commits: Vec<CommitOrder<'_>> = commits.collect();
        match &commits[..] {
            [commit] => assert!(!self.0.run(commit, TIME).unwrap().repeated),
            commits => {
                let placed = self.0.write(TIME, |tx| {
                    for commit in commits {
                        assert!(!tx.run(commit)?.repeated);
                    }
                    Ok(())
                });
                placed.map_err(RunError::flatten).unwrap();
            }
        }
    }

    fn drain(&self, batch: usize) -> u64 {
        let settings =
            RelaySettings { window: batch, run: batch.min(16), ..RelaySettings::new(Owner::new("relay-1").unwrap()) };
        let inbox = Inbox::new(&self.0, Consumer::new(CONSUMER).unwrap());
        let publisher = InProcess::new(inbox, |_, _: &Message| Ok::<_, Infallible>(Handled::Done));
        let mut relay = Relay::new(&self.0, publisher, settings, TIME).unwrap();
        relay.run_until_idle(TIME).unwrap().confirmed
    }
}
