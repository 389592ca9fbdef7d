//! What can be read of the tables by name, as methods of sync and async stores alike: each reading
//! is said once, as a question and as what its answer comes to.

/// Gives each reading to a macro that makes a method of it.
macro_rules! readings {
    ($make:ident) => {
        $make! {
            /// A request, and what came of it.
            request(key: &RequestKey) -> Option<RequestRow>:
                Query::rows([Key::Request(key.clone())]),
                |rows: Rows| rows.request(key).map(|(row, _)| row.clone());
            /// An order.
            order(id: &OrderId) -> Option<OrderRow>:
                Query::rows([Key::Order(id.clone())]),
                |rows: Rows| rows.order(id).map(|(row, _)| row.clone());
            /// An event, with its envelope, its payload and its place.
            event(id: &EventId) -> Option<EventRow>:
                Query::rows([Key::Event(id.clone())]),
                |rows: Rows| rows.event(id).map(|(row, _)| row.clone());
            /// The delivery state of an event.
            event_state(id: &EventId) -> Option<EventState>:
                Query::Deliveries { events: alloc::vec![id.clone()], run: 0 },
                |rows: Rows| {
                    let (delivery, lane) = (rows.deliveries.first()?, rows.lanes.first()?);
                    Some(lane.state(&delivery.row))
                };
            /// A lane.
            lane(key: &LaneKey) -> Option<LaneRow>:
                Query::rows([Key::Lane(key.clone())]),
                |rows: Rows| rows.lane(key).map(|(row, _)| row.clone());
            /// What became of an event at a consumer, if it has arrived there.
            received(consumer: &Consumer, event: &EventId) -> Option<InboxRow>:
                Query::rows([Key::Inbox(consumer.clone(), event.clone())]),
                |rows: Rows| rows.inbox(consumer, event).map(|(row, _)| row.clone());
            /// What a consumer has recorded as the effect of an event.
            effect(consumer: &Consumer, event: &EventId) -> Option<Body>:
                Query::rows([Key::Effect(consumer.clone(), event.clone())]),
                |rows: Rows| rows.effect(consumer, event).map(|(row, _)| row.clone());
            /// The dead events with an id after `after`, at most `limit`, in the order of their
            /// ids. To redrive or discard some of them, see [`Redrive`](crate::Redrive) and
            /// [`Discard`](crate::Discard).
            dead_letters(after: Option<EventId>, limit: usize) -> Vec<DeadLetter>:
                Query::Dead { after, limit },
                |rows: Rows| rows.deliveries.into_iter().map(DeadLetter::from).collect();
            /// How many events stand how, at this time.
            stats(now: Millis) -> Stats: Query::Stats { now }, |rows: Rows| rows.stats;
            /// The rows of a table after a key, at most `limit`, in the order of their keys.
            walk(table: Table, after: Option<Key>, limit: usize) -> Vec<Stored>:
                Query::Walk { table, after, limit }, |rows: Rows| rows.rows;
        }
    };
}

pub(super) use readings;
