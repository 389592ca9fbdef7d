//! What the drivers of a relay tell `tracing`: every answer, every lease that is lost and every
//! event that is dead, at its level.

use core::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Metadata, Subscriber};
use twobox::relay::{Phase, Published, trace};
use twobox::{
    Body, Claimed, Destination, Event, Headers, LanePlace, LeaseRef, Message, Reason, Renewed,
    Settled, Stale, StaleLease,
};

use crate::support::{lane_key, leased, ms, name};

/// Writes down what is told, a line each, and where a span is entered and left.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {field}={value:?}").unwrap();
    }
}

impl Lines {
    fn add(&self, mut line: Line, fields: impl FnOnce(&mut Line)) {
        fields(&mut line);
        self.0.lock().unwrap().push(line.0);
    }
}

impl Subscriber for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.add(Line(span.metadata().name().into()), |line| span.record(line));
        Id::from_u64(1)
    }
    fn event(&self, event: &tracing::Event<'_>) {
        assert_eq!(event.metadata().target(), "twobox", "F48: one target for all");
        self.add(Line(event.metadata().level().to_string()), |line| event.record(line));
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {
        self.add(Line("enter".into()), |_| ());
    }
    fn exit(&self, _: &Id) {
        self.add(Line("exit".into()), |_| ());
    }
}

/// What is told meanwhile.
fn told(work: impl FnOnce()) -> Vec<String> {
    let lines = Lines::default();
    tracing::subscriber::with_default(lines.clone(), work);
    lines.0.lock().unwrap().clone()
}

fn message() -> Message {
    let event = Event {
        destination: Destination::default(),
        id: name("o/1"),
        order: name("o"),
        event_type: name("order.created"),
        schema_version: 1,
        ordering_key: name("k"),
        time: ms(1),
        headers: Headers::new(),
        body: Body::text("x").unwrap(),
    };
    Message { event, place: LanePlace { begun: ms(1), sequence: 1, after: 0 }, attempt: 2 }
}

/// F48: an answer is told within the span of its publish, and what warns says itself which event of
/// which lane it is about.
#[test]
fn f48_each_answer_is_told_with_its_event_and_lane() {
    let no = || Reason::new("no");
    for (answer, line) in [
        (Published::Confirmed, "DEBUG message=confirmed"),
        (Published::Failed(no()), "WARN message=failed id=o/1 lane=k reason=no"),
        (Published::Rejected(no()), "ERROR message=rejected id=o/1 lane=k reason=no"),
        (Published::Deferred(no()), "DEBUG message=deferred reason=no"),
        (
            Published::Unavailable(no()),
            "WARN message=the broker cannot be reached id=o/1 lane=k reason=no",
        ),
        (Published::Abandoned, "DEBUG message=abandoned"),
    ] {
        let span = "publish id=o/1 lane=k type=order.created attempt=2";
        let lines = told(|| trace::published(&message(), &answer));
        assert_eq!(lines, [span, "enter", line, "exit"]);
    }
}

#[test]
fn the_rest_is_told() {
    let lease = || LeaseRef { lane: lane_key("k"), token: 7 };
    let stale = || vec![StaleLease { lease: lease(), why: Stale::Ended }];
    let lost = "WARN message=the lease 7 of lane \"k\" is not current: it was settled or released already lane=k";
    let settled = Settled {
        confirmed: 1,
        retried: 2,
        released: 3,
        dead: vec![(name("d1"), lane_key("k")), (name("d2"), lane_key("l"))],
        stale: stale(),
    };
    let dead = vec![(name("d3"), lane_key("k"))];
    let claimed = Claimed { leased: vec![leased("k", 7, &["e1", "e2"])], dead, next_due: None };
    let renewed = Renewed { leases: vec![(lease(), ms(9)), (lease(), ms(9))], stale: stale() };
    let cases: [(Vec<String>, &[&str]); 6] = [
        (
            told(|| trace::exchanged(&(Some(settled), None))),
            &[
                "DEBUG message=settled confirmed=1 retried=2 released=3 dead=2 stale=1",
                "ERROR message=dead id=d1 lane=k",
                "ERROR message=dead id=d2 lane=l",
                lost,
            ],
        ),
        (
            told(|| trace::exchanged(&(None, Some(claimed)))),
            &[
                "DEBUG message=claimed lanes=1 events=2",
                "ERROR message=dead: it was started too often id=d3 lane=k",
            ],
        ),
        (told(|| trace::exchanged(&(None, None))), &[]),
        (told(|| trace::renewed(&renewed)), &["DEBUG message=renewed leases=2", lost]),
        (
            told(|| trace::store_failed(&"disk full")),
            &["WARN message=the store failed reason=disk full"],
        ),
        (
            told(|| trace::phase(Phase::StoreAway)),
            &["INFO message=the relay is now phase=StoreAway"],
        ),
    ];
    for (lines, expected) in cases {
        assert_eq!(lines, expected);
    }
}
