//! Tables as text: what a snapshot shows, and what must not be able to spoil it.

use proptest::prelude::*;
use twobox::{
    Batch, Body, CallRow, CallState, DeliveryState, Dump, Event, Fingerprint, Headers, InboxRow,
    InboxState, LaneRow, Load, OrderRow, OutboxRow, Placed, PositionRow, Query, Reason, Record,
    RequestKey, RequestRow, Rows, Store, Table, Tables, Transaction,
};

use crate::support::{LANE, lease, ms, name, pending, records, store_of, stored, update};

fn dump(records: Vec<Record>) -> Dump {
    Dump::of(&mut store_of(records).state()).unwrap()
}

/// One row of each table at least.
fn every_table() -> Vec<Record> {
    let placed = Placed { order: name("o"), events: vec![name("o/1"), name("o/2")], at: ms(900) };
    let key = |id| RequestKey::new("s", id).unwrap();
    let fingerprint = Fingerprint::of([("item", "notebook")]);
    let event = |id: &str, headers, body| Event {
        id: name(id),
        order: name("o"),
        event_type: name("order.created"),
        schema_version: 1,
        ordering_key: name("k"),
        time: ms(1_000),
        headers,
        body,
    };
    let headers = Headers::new().with("trace", "7").unwrap().with("a", "b").unwrap();
    let inbox = InboxRow {
        content: event("o/1", Headers::new(), Body::text("x").unwrap()).content_digest(),
        at: ms(2_000),
        state: InboxState::Failing,
        failures: 2,
        reason: Some(Reason::new("no stock\nleft")),
        effect: false,
    };
    let dead = OutboxRow {
        state: DeliveryState::Dead(ms(3)),
        reason: Some(Reason::new("rejected")),
        failures: 1,
        ..pending("k", 2)
    };
    let lane = LaneRow {
        next: 3,
        due: Some(ms(1_500)),
        lease: Some(lease("me", 1_500, 1)),
        token: 1,
        starts: 1,
        ..LANE
    };
    vec![
        Record::Request(
            key("r1"),
            RequestRow {
                fingerprint: fingerprint.clone(),
                registered_at: ms(1),
                placed: Some(placed),
            },
        ),
        Record::Request(
            key("request-2"),
            RequestRow { fingerprint, registered_at: ms(20), placed: None },
        ),
        Record::Order(
            name("o"),
            OrderRow {
                request: key("r1"),
                committed_at: ms(1_000),
                body: Body::json("{}").unwrap(),
            },
        ),
        Record::Event(event("o/1", headers, Body::text("hello").unwrap())),
        Record::Event(event("o/2", Headers::new(), Body::new("a/b", [0, 159, 146, 150]).unwrap())),
        Record::Outbox(name("o/1"), pending("k", 1)),
        Record::Outbox(name("o/2"), dead),
        Record::Lane(name("k"), lane),
        Record::Lane(name("blocked"), LaneRow { blocked_by: Some(name("o/9")), ..LANE }),
        Record::Inbox(name("c"), name("o/1"), inbox),
        Record::Effect(name("c"), name("o/1"), Body::text("").unwrap()),
        Record::Position(
            name("c"),
            name("k"),
            PositionRow { begun: ms(1_000), sequence: 1, at: ms(2_000) },
        ),
        Record::Call(
            name("c"),
            name("o/1"),
            CallRow { state: CallState::Started, at: ms(2_000), starts: 1, note: None },
        ),
    ]
}

#[test]
fn every_table_reads_like_this() {
    let expected = "\
requests:
  request      bound to       order  events   registered  placed
  s/r1         item=notebook  o      o/1 o/2  1           900
  s/request-2  item=notebook  -      -        20          -
orders:
  order  request  content type      body  committed
  o      s/r1     application/json  {}    1000
events:
  event  order  type           version  ordering key  headers      content type  body                      committed
  o/1    o      order.created  1        k             a=b trace=7  text/plain    hello                     1000
  o/2    o      order.created  1        k             -            a/b           4 bytes, sha256 4a97e76b  1000
outbox:
  event  lane  sequence  state    starts  failures  due  finished  reason
  o/1    k     1         pending  0       0         100  -         -
  o/2    k     2         dead     0       1         100  3         rejected
lanes:
  lane     next  confirmed  blocked by  begun  due   starts  token  leased to  until  through
  blocked  1     0          o/9         0      -     0       0      -          -      -
  k        3     0          -           0      1500  1       1      me         1500   1
inbox:
  consumer  event  state    content   failures  at    reason
  c         o/1    failing  59f36437  2         2000  no stock left
effects:
  consumer  event  content type  body
  c         o/1    text/plain    (empty)
positions:
  consumer  ordering key  sequence  begun  at
  c         k             1         1000   2000
calls:
  consumer  event  state    starts  at    note
  c         o/1    started  1       2000  -
";
    assert_eq!(dump(every_table()).to_string(), expected);
}

#[test]
fn what_lasts_reads_like_this() {
    let expected = "\
requests:
  request      bound to       order  events
  s/r1         item=notebook  o      o/1 o/2
  s/request-2  item=notebook  -      -
orders:
  order  request  content type      body
  o      s/r1     application/json  {}
events:
  event  order  type           version  ordering key  headers      content type  body
  o/1    o      order.created  1        k             a=b trace=7  text/plain    hello
  o/2    o      order.created  1        k             -            a/b           4 bytes, sha256 4a97e76b
outbox:
  event  lane  sequence  state
  o/1    k     1         pending
  o/2    k     2         dead
lanes:
  lane     next  confirmed  blocked by
  blocked  1     0          o/9
  k        3     0          -
inbox:
  consumer  event  state    content
  c         o/1    failing  59f36437
effects:
  consumer  event  content type  body
  c         o/1    text/plain    (empty)
positions:
  consumer  ordering key  sequence
  c         k             1
calls:
  consumer  event  state
  c         o/1    started
";
    assert_eq!(dump(every_table()).lasting().to_string(), expected);
}

#[test]
fn an_empty_store_says_so() {
    let none = "requests: none\norders: none\nevents: none\noutbox: none\nlanes: none\ninbox: none\neffects: none\npositions: none\ncalls: none\n";
    assert_eq!(dump(vec![]).to_string(), none);
    assert_eq!(dump(vec![]).lasting().to_string(), none);
}

/// P8: what a fault may change for good is not shown by `lasting`, and everything else is.
#[test]
fn lasting_hides_times_leases_and_attempts_and_nothing_else() {
    let whole = dump(every_table()).lasting().to_string();
    let with = |change: &dyn Fn(&mut Record)| {
        let mut records = every_table();
        records.iter_mut().for_each(change);
        dump(records).lasting().to_string()
    };
    let later = ms(77_777);
    assert_eq!(
        whole,
        with(&|record| match record {
            Record::Request(_, row) => {
                row.registered_at = later;
                row.placed.iter_mut().for_each(|placed| placed.at = later);
            }
            Record::Order(_, row) => row.committed_at = later,
            Record::Event(event) => event.time = later,
            Record::Outbox(_, row) => {
                (row.committed_at, row.due, row.starts, row.failures, row.reason) =
                    (later, later, 7, 7, Some(Reason::new("other")));
                if row.state != DeliveryState::Pending {
                    row.state = DeliveryState::Dead(later);
                }
            }
            Record::Lane(_, row) =>
                (row.due, row.starts, row.token, row.lease) =
                    (None, 7, 7, Some(lease("other", 7, 7))),
            Record::Inbox(_, _, row) => (row.at, row.failures, row.reason) = (later, 7, None),
            Record::Position(_, _, row) => row.at = later,
            Record::Call(_, _, row) => (row.at, row.starts, row.note) = (later, 7, None),
            Record::Effect(..) => (),
        })
    );
    let (other_body, order) =
        (Body::text("other").unwrap(), Placed { order: name("p"), events: vec![], at: ms(1) });
    let changes: [&dyn Fn(&mut Record); 19] = [
        &|record| {
            if let Record::Request(_, row) = record {
                row.fingerprint = Fingerprint::of([("item", "pen")]);
            }
        },
        &|record| {
            if let Record::Request(_, row) = record {
                row.placed = Some(order.clone());
            }
        },
        &|record| {
            if let Record::Order(_, row) = record {
                row.request.scope = name("t");
            }
        },
        &|record| {
            if let Record::Order(_, row) = record {
                row.body = other_body.clone();
            }
        },
        &|record| {
            if let Record::Event(event) = record {
                event.order = name("p");
            }
        },
        &|record| {
            if let Record::Event(event) = record {
                event.event_type = name("t");
            }
        },
        &|record| {
            if let Record::Event(event) = record {
                event.schema_version = 2;
            }
        },
        &|record| {
            if let Record::Event(event) = record {
                event.ordering_key = name("l");
            }
        },
        &|record| {
            if let Record::Event(event) = record {
                event.headers = Headers::new().with("x", "y").unwrap();
            }
        },
        &|record| {
            if let Record::Event(event) = record {
                event.body = other_body.clone();
            }
        },
        &|record| {
            if let Record::Outbox(_, row) = record {
                row.lane = name("l");
            }
        },
        &|record| {
            if let Record::Outbox(_, row) = record {
                row.state = DeliveryState::Confirmed(ms(1));
            }
        },
        &|record| {
            if let Record::Lane(_, row) = record {
                row.next = 9;
            }
        },
        &|record| {
            if let Record::Lane(_, row) = record {
                row.confirmed = 9;
            }
        },
        &|record| {
            if let Record::Lane(_, row) = record {
                row.blocked_by = Some(name("e"));
            }
        },
        &|record| {
            if let Record::Inbox(_, _, row) = record {
                row.state = InboxState::Applied;
            }
        },
        &|record| {
            if let Record::Effect(_, _, body) = record {
                *body = other_body.clone();
            }
        },
        &|record| {
            if let Record::Position(_, _, row) = record {
                row.sequence = 9;
            }
        },
        &|record| {
            if let Record::Call(_, _, row) = record {
                row.state = CallState::Done;
            }
        },
    ];
    for (at, change) in changes.iter().enumerate() {
        assert_ne!(with(change), whole, "change {at}");
    }
}

/// A body that is short text is shown; others are told apart by their size and digest.
#[test]
fn bodies_that_are_long_or_binary_are_summarised() {
    let shown = |bytes: &[u8]| {
        let text =
            dump(vec![Record::Effect(name("c"), name("e"), Body::new("a/b", bytes).unwrap())])
                .to_string();
        let mut rows =
            text.lines().filter_map(|line| line.strip_prefix("  c         e      a/b           "));
        rows.next().unwrap().to_owned()
    };
    assert_eq!(shown(b""), "(empty)");
    assert_eq!(shown("é".repeat(32).as_bytes()), "é".repeat(32));
    assert_eq!(shown(br#"{"a":"\n"}"#), r#"{"a":"\n"}"#);
    for summarised in [
        "é".repeat(33).as_bytes(),
        &[b'x'; 65],
        b"a\nb",
        b"\0",
        b"\x1b[2J",
        b"\xff",
        "\u{85}".as_bytes(),
        &[7; 5_000],
    ] {
        let text = shown(summarised);
        let (size, digest) = text.split_once(" bytes, sha256 ").unwrap();
        assert_eq!(size, summarised.len().to_string());
        assert!(
            digest.len() == 8 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{digest}"
        );
    }
    assert_ne!(shown(b"a\n"), shown(b"b\n"));
}

/// Revisions count writes, and pages are how a store is read: neither is to be seen.
#[test]
fn the_text_is_made_of_the_rows_alone() {
    let first = store_of(every_table());
    let before = Dump::of(&mut first.state()).unwrap();
    for revision in 1..4 {
        let mut tx = first.begin().unwrap();
        let again = every_table().into_iter().map(|record| update(revision, record)).collect();
        assert_eq!(tx.apply(&Batch::of(again).unwrap()).unwrap(), twobox::Applied::Written);
        tx.commit().unwrap();
    }
    assert_eq!(Dump::of(&mut first.state()).unwrap(), before);
    assert_eq!(Dump::of(&mut first.begin().unwrap()).unwrap().to_string(), before.to_string());
}

/// A table of any length is shown in full and in order, also when it fills its last page.
#[test]
fn long_tables_are_read_in_pages() {
    for rows in [1, 255, 256, 257, 511, 512, 513, 1_000] {
        let effects = (0..rows).map(|n| {
            Record::Effect(name("c"), name(&format!("e{n:04}")), Body::text("x").unwrap())
        });
        let records: Vec<Record> = effects.chain([Record::Lane(name("k"), LANE)]).collect();
        let dump = dump(records);
        assert_eq!(
            (dump.count(Table::Effects), dump.count(Table::Lanes), dump.count(Table::Inbox)),
            (rows, 1, 0)
        );
        assert_eq!(dump.records().len(), rows + 1);
        assert!(dump.records().is_sorted_by(|a, b| a.key() < b.key()));
    }
}

/// Rows as they are, without a store that would have to understand them.
struct Fixed(Vec<Record>);

impl Load for Fixed {
    type Error = core::convert::Infallible;

    fn load(&mut self, query: &Query) -> Result<Rows, Self::Error> {
        let Query::Walk { table, after: None, .. } = query else { return Ok(Rows::default()) };
        let rows = self.0.iter().filter(|record| record.table() == *table);
        Ok(Rows::new(rows.map(|record| stored(1, record.clone())).collect()))
    }
}

proptest! {
    /// Whatever texts are in the rows: a line a row, and each column begins at the same place in
    /// every line.
    #[test]
    fn no_text_breaks_the_table(mut records in prop::collection::vec(records(), 0..12)) {
        records.sort_by_key(Record::key);
        records.dedup_by_key(|record| record.key());
        let whole = Dump::of(&mut Fixed(records.clone())).unwrap();
        for text in [whole.to_string(), whole.clone().lasting().to_string()] {
            prop_assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{:?}", text);
            let mut lines = text.lines();
            for table in Table::ALL {
                let rows = whole.count(table);
                let title = lines.next().unwrap();
                if rows == 0 {
                    prop_assert_eq!(title, format!("{table}: none"));
                    continue;
                }
                prop_assert_eq!(title, format!("{table}:"));
                let head: Vec<char> = lines.next().unwrap().chars().collect();
                // Where a column begins: after two spaces or more.
                let starts: Vec<usize> = (2..head.len()).filter(|at| head[at - 2..*at] == [' ', ' '] && head[*at] != ' ').collect();
                prop_assert!(starts.len() >= 2);
                for _ in 0..rows {
                    let row: Vec<char> = lines.next().unwrap().chars().collect();
                    for start in &starts {
                        prop_assert!(row.len() <= *start || row[start - 2..*start] == [' ', ' '], "{}", text);
                    }
                }
            }
            prop_assert_eq!(lines.next(), None);
        }
    }
}
