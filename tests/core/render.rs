//! Tables as text: what a snapshot shows, and what must not be able to spoil it.

use proptest::prelude::*;
use twobox::{
    Batch, Body, CallRow, CallState, DeliveryState, Destination, Dump, Event, EventRow, Headers,
    InboxRow, InboxState, LaneRow, Load, OrderRow, OutboxRow, PlacedOrder, PositionRow, Query,
    Reason, Record, RequestKey, RequestRow, Rows, Store, Summary, Table, Tables, Transaction,
};

use crate::support::{LANE, lane_key, lease, ms, name, pending, records, store_of, stored, update};

fn dump(records: Vec<Record>) -> Dump {
    Dump::of(&mut store_of(records).state()).unwrap()
}

/// One row of each table at least.
fn placed_event(event: Event, sequence: u64) -> Record {
    Record::Event(EventRow { event, sequence, due: ms(100) })
}

fn every_table() -> Vec<Record> {
    let placed =
        PlacedOrder { order: name("o"), events: vec![name("o/1"), name("o/2")], at: ms(900) };
    let key = |id| RequestKey::new("s", id).unwrap();
    let fingerprint = Summary::All.of([("item", "notebook")]);
    let event = |id: &str, headers, body| Event {
        destination: Destination::default(),
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
        placed_event(event("o/1", headers, Body::text("hello").unwrap()), 1),
        placed_event(
            event("o/2", Headers::new(), Body::new("a/b", [0, 159, 146, 150]).unwrap()),
            2,
        ),
        Record::Outbox(name("o/1"), pending("k", 1)),
        Record::Outbox(name("o/2"), dead),
        Record::Lane(lane_key("k"), lane),
        Record::Lane(lane_key("blocked"), LaneRow { blocked_by: Some(name("o/9")), ..LANE }),
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
    let expected = r#"requests:
  s/r1 bound_to=item=notebook order=o events="o/1 o/2" registered=1 placed=900
  s/request-2 bound_to=item=notebook registered=20
orders:
  o request=s/r1 content_type=application/json body={} committed=1000
events:
  o/1 order=o type=order.created version=1 ordering_key=k headers="a=b trace=7" content_type=text/plain body=hello committed=1000 due=100 sequence=1 state=pending leased=yes
  o/2 order=o type=order.created version=1 ordering_key=k content_type=a/b body_sha256="4a97e76b of 4 bytes" committed=1000 due=100 sequence=2 state=dead
outbox:
  o/1 lane=k sequence=1 due=100
  o/2 lane=k sequence=2 gave_up=dead at=3 failures=1 due=100 reason=rejected
lanes:
  blocked next=1 head=1 blocked_by=o/9 begun=0
  k next=3 head=1 begun=0 due=1500 starts=1 token=1 leased_to=me until=1500 through=1
inbox:
  c/o/1 state=failing content=59f36437 failures=2 at=2000 reason="no stock left"
effects:
  c/o/1 content_type=text/plain
positions:
  c/k sequence=1 begun=1000 at=2000
calls:
  c/o/1 state=started starts=1 at=2000
"#;
    assert_eq!(dump(every_table()).to_string(), expected);
}

#[test]
fn what_lasts_reads_like_this() {
    let expected = r#"requests:
  s/r1 bound_to=item=notebook order=o events="o/1 o/2"
  s/request-2 bound_to=item=notebook
orders:
  o request=s/r1 content_type=application/json body={}
events:
  o/1 order=o type=order.created version=1 ordering_key=k headers="a=b trace=7" content_type=text/plain body=hello sequence=1 state=pending
  o/2 order=o type=order.created version=1 ordering_key=k content_type=a/b body_sha256="4a97e76b of 4 bytes" sequence=2 state=dead
outbox:
  o/2 lane=k sequence=2 gave_up=dead
lanes:
  blocked next=1 blocked_by=o/9
  k next=3
inbox:
  c/o/1 state=failing content=59f36437
effects:
  c/o/1 content_type=text/plain
positions:
  c/k sequence=1
calls:
  c/o/1 state=started
"#;
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
            Record::Event(row) => (row.event.time, row.due) = (later, later),
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
        (Body::text("other").unwrap(), PlacedOrder { order: name("p"), events: vec![], at: ms(1) });
    let changes: [&dyn Fn(&mut Record); 19] = [
        &|record| {
            if let Record::Request(_, row) = record {
                row.fingerprint = Summary::All.of([("item", "pen")]);
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
            if let Record::Event(EventRow { event, .. }) = record {
                event.order = name("p");
            }
        },
        &|record| {
            if let Record::Event(EventRow { event, .. }) = record {
                event.event_type = name("t");
            }
        },
        &|record| {
            if let Record::Event(EventRow { event, .. }) = record {
                event.schema_version = 2;
            }
        },
        &|record| {
            if let Record::Event(EventRow { event, .. }) = record {
                event.ordering_key = name("l");
            }
        },
        &|record| {
            if let Record::Event(EventRow { event, .. }) = record {
                event.headers = Headers::new().with("x", "y").unwrap();
            }
        },
        &|record| {
            if let Record::Event(EventRow { event, .. }) = record {
                event.body = other_body.clone();
            }
        },
        &|record| {
            if let Record::Outbox(_, row) = record {
                row.lane = lane_key("l");
            }
        },
        &|record| {
            if let Record::Outbox(_, row) = record {
                row.state = DeliveryState::Cancelled(ms(1));
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
        let body = Body::new("a/b", bytes).unwrap();
        let text = dump(vec![Record::Effect(name("c"), name("e"), body)]).to_string();
        let mut rows = text.lines().filter_map(|line| line.strip_prefix("  c/e content_type=a/b"));
        rows.next().unwrap().to_owned()
    };
    assert_eq!(shown(b""), "");
    assert_eq!(shown("é".repeat(32).as_bytes()), format!(" body={}", "é".repeat(32)));
    assert_eq!(shown(br#"{"a":"\n"}"#), r#" body={"a":"\n"}"#);
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
        let of_size = format!(" of {} bytes\"", summarised.len());
        let digest = text.strip_prefix(" body_sha256=\"").unwrap().strip_suffix(&of_size).unwrap();
        assert!(
            digest.len() == 8 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{digest}"
        );
    }
    assert_ne!(shown(b"a\n"), shown(b"b\n"));
}

/// What is not one word, or looks as if it began a quotation, stands in quotes.
#[test]
fn values_are_quoted_where_they_could_be_misread() {
    let shown = |key: &str, text: &str| {
        let body = Body::new("a/b", text.as_bytes()).unwrap();
        dump(vec![Record::Effect(name("c"), name(key), body)]).to_string()
    };
    for (key, text, expected) in [
        ("e", "x=y", r#"  c/e content_type=a/b body=x=y"#),
        ("e", "x=\"y\"", r#"  c/e content_type=a/b body="x=\"y\"""#),
        ("e", "x body=y", r#"  c/e content_type=a/b body="x body=y""#),
        ("e", r#""x""#, r#"  c/e content_type=a/b body="\"x\"""#),
        ("e", r#"a "x" \"#, r#"  c/e content_type=a/b body="a \"x\" \\""#),
        ("e\u{a0}f body=g", "x", r#"  "c/e\u{a0}f body=g" content_type=a/b body=x"#),
    ] {
        assert!(shown(key, text).lines().any(|line| line == expected), "{}", shown(key, text));
    }
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
        let records: Vec<Record> = effects.chain([Record::Lane(lane_key("k"), LANE)]).collect();
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
        Ok(Rows::of(rows.map(|record| stored(1, record.clone())).collect()))
    }
}

/// The words of a line: quotations, and what stands between blanks.
fn words(mut line: &str) -> Vec<String> {
    let mut words = Vec::new();
    while !line.is_empty() {
        let (mut end, mut in_quotes, mut escaped) = (line.len(), false, false);
        for (at, c) in line.char_indices() {
            match c {
                _ if escaped => escaped = false,
                '\\' if in_quotes => escaped = true,
                '"' if in_quotes || at == 0 || line[..at].ends_with('=') => in_quotes = !in_quotes,
                ' ' if !in_quotes => {
                    end = at;
                    break;
                }
                _ => {}
            }
        }
        words.push(line[..end].to_owned());
        line = line[end..].strip_prefix(' ').unwrap_or_default();
    }
    words
}

proptest! {
    /// Whatever texts are in the rows: a line a row, which is its key and then a column each.
    #[test]
    fn no_text_breaks_the_table(mut records in prop::collection::vec(records(), 0..12)) {
        records.sort_by_key(Record::key);
        records.dedup_by_key(|record| record.key());
        let whole = Dump::of(&mut Fixed(records.clone())).unwrap();
        for dump in [whole.clone(), whole.clone().lasting()] {
            let text = dump.to_string();
            prop_assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{:?}", text);
            let mut lines = text.lines();
            let mut rows = dump.rows();
            for table in Table::ALL {
                let title = lines.next().unwrap();
                let shown = dump.rows().filter(|row| row.key.table() == table).count();
                if shown == 0 {
                    prop_assert_eq!(title, format!("{table}: none"));
                    continue;
                }
                prop_assert_eq!(title, format!("{table}:"));
                for _ in 0..shown {
                    let row = rows.next().unwrap();
                    prop_assert_eq!(row.key.table(), table);
                    let row = row.to_string();
                    prop_assert_eq!(lines.next().unwrap(), format!("  {row}"));
                    for column in &words(&row)[1..] {
                        let (column, value) = column.split_once('=').unwrap();
                        prop_assert!(column.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'), "{}", row);
                        prop_assert!(!value.is_empty(), "{}", row);
                    }
                }
            }
            prop_assert_eq!(lines.next(), None);
            prop_assert_eq!(rows.next(), None);
        }
    }
}
