//! What the drivers of a relay have in common: how an action is carried out on a store, sync or
//! async.

use alloc::string::String;
use alloc::vec::Vec;
use core::any::Any;
use core::convert::Infallible;
use core::future::Future;

use super::machine::{Exchange, RelaySettings, Ticket};
use super::publisher::{Message, Published};
use crate::boundary::{Query, Rows};
use crate::checked::Checked;
use crate::event::Event;
use crate::ids::Reason;
use crate::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction,
};
use crate::store::{CONFLICT_TRIES, Load, Reader, RunError, Store};
use crate::table::{Key, Record};
use crate::time::Millis;
use crate::transition::claim::Claimed;
use crate::transition::settle::Settled;

/// Why a step of a relay failed: the store. The relay goes on with the next step, after a pause.
pub type RelayError<E> = RunError<E, Infallible>;

/// What an exchange came to, for
/// [`RelayMachine::handle_exchanged`](super::RelayMachine::handle_exchanged).
pub type Exchanged = (Option<Settled>, Option<Claimed>);

/// Carries out [`Action::Exchange`](super::Action::Exchange): settles and claims in one
/// transaction.
///
/// # Errors
///
/// The store's, for
/// [`RelayMachine::handle_store_failed`](super::RelayMachine::handle_store_failed).
pub fn run_exchange<S: Store>(
    store: &S,
    settings: &Checked<RelaySettings>,
    now: Millis,
    exchange: Exchange,
) -> Result<Exchanged, RelayError<S::Error>> {
    let (settle, claim) = exchange.into_transitions(settings);
    let Some(settle) = settle else {
        // A claim that finds nothing commits nothing.
        return Ok((None, claim.map(|claim| store.run(claim, now)).transpose()?));
    };
    let write = store.write(now, |tx| {
        let settled = tx.run(&settle)?;
        let claimed = claim.as_ref().map(|claim| tx.run(claim)).transpose()?;
        Ok((Some(settled), claimed))
    });
    write.map_err(RunError::flatten)
}

/// As [`run_exchange`].
///
/// # Errors
///
/// As there.
#[expect(
    clippy::manual_async_fn,
    reason = "says that the future is Send, which a driver that spawns relies on"
)]
pub fn run_exchange_async<'a, S: AsyncStore>(
    store: &'a S,
    settings: &'a Checked<RelaySettings>,
    now: Millis,
    exchange: Exchange,
) -> impl Future<Output = Result<Exchanged, RelayError<S::Error>>> + Send + 'a {
    async move {
        let (settle, claim) = exchange.into_transitions(settings);
        let Some(settle) = settle else {
            let Some(claim) = claim else { return Ok((None, None)) };
            return Ok((None, Some(store.run(claim, now).await?)));
        };
        let mut conflicts = 0;
        loop {
            let mut tx = store.begin().await.map_err(RunError::Store)?;
            let settled = tx.run(&settle, now).await;
            let both = match (settled, &claim) {
                (Ok(settled), Some(claim)) => {
                    tx.run(claim, now).await.map(|claimed| (Some(settled), Some(claimed)))
                }
                (settled, _) => settled.map(|settled| (Some(settled), None)),
            };
            match both {
                Ok(exchanged) => {
                    return tx.commit().await.map(|()| exchanged).map_err(RunError::Unknown);
                }
                Err(RunError::Conflict(_)) if conflicts < CONFLICT_TRIES => conflicts += 1,
                Err(error) => return Err(error),
            }
        }
    }
}

/// Reads what is to be published for the tickets of [`Action::Publish`](super::Action::Publish),
/// and answers for each in their order: the message, or what to say of it where the store has no
/// envelope.
///
/// # Errors
///
/// The store's, for [`RelayMachine::handle_unread`](super::RelayMachine::handle_unread).
pub fn read_messages<R: Reader>(
    store: &R,
    tickets: &[Ticket],
) -> Result<Vec<Result<Message, Published>>, RelayError<R::Error>> {
    let mut view = store.view().map_err(RunError::Store)?;
    let rows = view.load(&envelopes_of(tickets)).map_err(RunError::Store)?;
    Ok(messages_of(tickets, rows))
}

/// As [`read_messages`].
///
/// # Errors
///
/// As there.
#[expect(
    clippy::manual_async_fn,
    reason = "says that the future is Send, which a driver that spawns relies on"
)]
pub fn read_messages_async<'a, R: AsyncReader>(
    store: &'a R,
    tickets: &'a [Ticket],
) -> impl Future<Output = Result<Vec<Result<Message, Published>>, RelayError<R::Error>>> + Send + 'a
{
    async move {
        let mut view = store.view().await.map_err(RunError::Store)?;
        let rows = view.load(&envelopes_of(tickets)).await.map_err(RunError::Store)?;
        Ok(messages_of(tickets, rows))
    }
}

/// A panic of the `who` that a driver has called, as a reason.
#[must_use]
pub fn panicked(who: &str, panic: &(dyn Any + Send)) -> Reason {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Reason::new(format_args!("the {who} panicked: {}", text.unwrap_or("it did not say why")))
}

fn envelopes_of(tickets: &[Ticket]) -> Query {
    Query::rows(tickets.iter().map(|ticket| Key::Event(ticket.delivery.event.clone())))
}

fn messages_of(tickets: &[Ticket], rows: Rows) -> Vec<Result<Message, Published>> {
    let events = rows.into_vec().into_iter().filter_map(|stored| {
        if let Record::Event(event) = stored.record { Some(event) } else { None }
    });
    let mut events: Vec<Event> = events.collect();
    events.sort_unstable_by(|a, b| a.id.cmp(&b.id));
    let message = |ticket: &Ticket| {
        let delivery = &ticket.delivery;
        match events.binary_search_by(|event| event.id.cmp(&delivery.event)) {
            Ok(at) => Ok(Message {
                event: events[at].clone(),
                place: delivery.place,
                attempt: delivery.attempt,
            }),
            Err(_) => Err(Published::Rejected(Reason::new(
                "its envelope is not in the store, which must be damaged",
            ))),
        }
    };
    tickets.iter().map(message).collect()
}
