//! Bad input is refused at the door (F19), and the error says which field, which limit and which
//! value.

use core::time::Duration;

use twobox::relay::RelaySettings;
use twobox::{
    Body, Checked, Claim, CommitOrder, Consumer, ContentType, DeliveryPolicy, Draft, EventId,
    EventType, Fingerprint, HeaderName, HeaderValue, Headers, Invalid, OrderId, OrderingKey, Owner,
    Reason, Request, RequestId, RequestKey, Retention, Scope,
};

use crate::support::name;

/// A constructor of a text: its field, its limit, and whether it gives back what it was given.
struct Text {
    field: &'static str,
    max: usize,
    make: fn(&str) -> Result<String, Invalid>,
}

macro_rules! names {
    ($($name:ident, $field:literal, $max:literal;)*) => {
        [$(
            Text { field: $field, max: $max, make: |text| $name::new(text).map(|made| made.as_str().to_owned()) },
            Text { field: $field, max: $max, make: |text| $name::try_from(text).map(|made| made.to_string()) },
            Text { field: $field, max: $max, make: |text| $name::try_from(text.to_owned()).map(|made| made.as_ref().to_owned()) },
            Text { field: $field, max: $max, make: |text| text.parse::<$name>().map(|made| made.to_string()) },
        )*]
    };
}

/// All doors through which a text comes in.
fn texts() -> Vec<Text> {
    let mut texts = Vec::from(names! {
        Scope, "scope", 128;
        RequestId, "request id", 128;
        OrderId, "order id", 128;
        EventId, "event id", 160;
        OrderingKey, "ordering key", 128;
        Consumer, "consumer", 128;
        EventType, "event type", 128;
        Owner, "owner", 128;
        HeaderName, "header name", 64;
        HeaderValue, "header value", 1024;
        ContentType, "content type", 128;
    });

    texts.extend([
        Text {
            field: "scope",
            max: 128,
            make: |text| RequestKey::new(text, "r").map(|key| key.scope.to_string()),
        },
        Text {
            field: "request id",
            max: 128,
            make: |text| RequestKey::new("s", text).map(|key| key.id.to_string()),
        },
        Text {
            field: "scope",
            max: 128,
            make: |text| {
                Request::new(text, "r", Fingerprint::of_bytes(b""))
                    .map(|request| request.key.scope.to_string())
            },
        },
        Text {
            field: "request id",
            max: 128,
            make: |text| {
                Request::new("s", text, Fingerprint::of_bytes(b""))
                    .map(|request| request.key.id.to_string())
            },
        },
        Text {
            field: "content type",
            max: 128,
            make: |text| Body::new(text, b"x").map(|body| body.content_type().to_string()),
        },
        Text {
            field: "header name",
            max: 64,
            make: |text| {
                Headers::new()
                    .with(text, "v")
                    .map(|headers| headers.iter().next().unwrap().0.to_string())
            },
        },
        Text {
            field: "header value",
            max: 1024,
            make: |text| {
                Headers::new().with("n", text).map(|headers| headers.get("n").unwrap().to_string())
            },
        },
    ]);
    // What a draft holds cannot be looked at before it is committed.
    texts.push(Text {
        field: "event type",
        max: 128,
        make: |text| Draft::new(text, Body::text("x")?).map(|_| text.to_owned()),
    });

    texts
}

/// Texts of so many bytes, of characters of one to four bytes.
fn of_length(bytes: usize) -> impl Iterator<Item = String> {
    ["a", "é", "€", "𝄞"]
        .into_iter()
        .map(move |c| c.repeat(bytes / c.len()) + &"a".repeat(bytes % c.len()))
}

#[test]
fn texts_that_are_allowed_come_back_as_they_are() {
    for Text { field, max, make } in texts() {
        let some = ["a", " ", " a ", "A", "order/1", "\u{a0}", "\u{10ffff}", "e\u{301}"]
            .map(str::to_owned);
        for text in some.into_iter().chain(of_length(max)).chain(of_length(max - 1)) {
            assert_eq!(make(&text).unwrap(), text, "{field}");
        }
    }
}

#[test]
fn an_empty_text_is_refused() {
    for Text { field, max, make } in texts() {
        let refused = make("").unwrap_err();
        assert_eq!(refused, Invalid::Empty { field, max });
        assert_eq!(refused.to_string(), format!("{field} is empty; give it 1 to {max} bytes"));
    }
}

/// The limit counts bytes, not characters, and a long value is not repeated in full.
#[test]
fn a_text_over_its_limit_is_refused() {
    for Text { field, max, make } in texts() {
        for length in [max + 1, max + 2, max * 10] {
            for text in of_length(length) {
                let refused = make(&text).unwrap_err();
                let Invalid::TooLong { begins, .. } = &refused else { panic!("{refused:?}") };
                assert!(
                    text.starts_with(&**begins) && (29..=32).contains(&begins.len()),
                    "{begins:?}"
                );
                let expected = format!(
                    "{field} is {length} bytes long, the limit is {max}; it begins {begins:?}"
                );
                assert_eq!(refused.to_string(), expected);
            }
        }
    }
}

/// All 65 control characters, wherever they stand.
#[test]
fn a_control_character_is_refused() {
    for Text { field, make, .. } in texts() {
        for found in ('\0'..='\u{ff}').filter(|c| c.is_control()) {
            for (at, value) in [
                (0, format!("{found}")),
                (0, format!("{found}a")),
                (3, format!("aé{found}")),
                (2, format!("é{found}a")),
            ] {
                let refused = make(&value).unwrap_err();
                assert_eq!(
                    refused,
                    Invalid::ControlCharacter { field, at, found, value: value.as_str().into() }
                );
                let message = refused.to_string();
                assert!(
                    message.starts_with(&format!(
                        "{field} has the control character {found:?} at byte {at},"
                    )),
                    "{message}"
                );
                assert!(message.ends_with(&format!("the value is {value:?}")), "{message}");
                assert!(!message.contains(char::is_control), "{message:?}");
            }
        }
    }
}

/// Any bytes survive in a body (F19), up to its limit.
#[test]
fn a_body_holds_any_bytes() {
    let all: Vec<u8> = (0..=255).collect();
    assert_eq!(Body::new("a/b", &all).unwrap().bytes(), &all[..]);
    assert_eq!(Body::text("\0\n").unwrap().bytes(), b"\0\n");
    assert_eq!(Body::json("").unwrap().bytes(), b"");
    assert_eq!(Body::new("a/b", vec![0xff; Body::MAX]).unwrap().bytes().len(), 16 << 20);
    let refused = Body::new("a/b", vec![b'x'; Body::MAX + 1]).unwrap_err();
    let begins = "x".repeat(32);
    assert_eq!(
        refused.to_string(),
        format!("body is 16777217 bytes long, the limit is 16777216; it begins {begins:?}")
    );
    // The error says what it can of bytes that are no text.
    assert!(matches!(
        Body::new("a/b", vec![0xff; Body::MAX + 1]),
        Err(Invalid::TooLong { field: "body", .. })
    ));
}

/// What is written to a log shows names and reasons as texts, and no payload.
#[test]
fn a_log_shows_names_and_no_payload() {
    assert_eq!(
        format!("{:?}", Body::json("{\"secret\":1}").unwrap()),
        "Body(application/json, 12 bytes)"
    );
    assert_eq!(format!("{:?}", name::<OrderId>("o\"1")), "\"o\\\"1\"");
    assert_eq!(format!("{:?}", Reason::new("no \"route\"")), "\"no \\\"route\\\"\"");
}

#[test]
fn headers_have_a_limit_and_stand_once() {
    let full = (0..Headers::MAX)
        .try_fold(Headers::new(), |headers, n| headers.with(format!("h{n}"), "v"))
        .unwrap();
    assert_eq!(full.iter().len(), 64);
    assert_eq!(
        full.clone().with("one-more", "v").unwrap_err().to_string(),
        "headers is 65, it must lie between 0 and 64"
    );
    let twice = Headers::new().with("a", "1").unwrap().with("a", "2").unwrap_err();
    assert_eq!(twice, Invalid::Twice { field: "header", value: "a".into() });
    assert_eq!(twice.to_string(), "header \"a\" is given twice; each must stand once");
    // Upper and lower case differ, and the order in which they are given does not matter.
    let ab = Headers::new().with("a", "1").unwrap().with("A", "2").unwrap();
    let ba = Headers::new().with("A", "2").unwrap().with("a", "1").unwrap();
    assert_eq!(ab, ba);
    assert_eq!(
        ab.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>(),
        ["A=2", "a=1"]
    );
    // Through a draft, the same door.
    let draft = Draft::new("t", Body::text("").unwrap()).unwrap();
    assert!(draft.clone().header("a", "1").unwrap().header("a", "1").is_err());
    assert!(draft.header("", "1").is_err());
}

fn draft(id: Option<&str>) -> Draft {
    let draft = Draft::new("order.created", Body::text("x").unwrap()).unwrap();
    id.map_or(draft.clone(), |id| draft.id(name(id)))
}

#[test]
fn an_order_has_1_to_256_events() {
    let request = Request::new("s", "r", Fingerprint::of_bytes(b"")).unwrap();
    let commit = |events| {
        CommitOrder::new(&request, name("o"), Body::text("x").unwrap(), vec![draft(None); events])
    };
    assert!(commit(1).is_ok() && commit(256).is_ok());
    for events in [0, 257, 1000] {
        let refused = commit(events).unwrap_err();
        let message =
            format!("the number of events of an order is {events}, it must lie between 1 and 256");
        assert_eq!(refused.to_string(), message);
    }
    // The longest order id leaves room for the number of the last event.
    let longest = CommitOrder::new(
        &request,
        name(&"o".repeat(OrderId::MAX)),
        Body::text("x").unwrap(),
        vec![draft(None); 256],
    );
    assert!(longest.is_ok());
}

#[test]
fn the_event_ids_of_an_order_differ() {
    let request = Request::new("s", "r", Fingerprint::of_bytes(b"")).unwrap();
    let commit = |ids: &[Option<&str>]| {
        CommitOrder::new(
            &request,
            name("o"),
            Body::text("x").unwrap(),
            ids.iter().map(|id| draft(*id)),
        )
    };
    assert!(commit(&[Some("a"), Some("b"), None]).is_ok());
    for (ids, twice) in [
        (&[Some("a"), Some("b"), Some("a")][..], "a"),
        // An id of the author's own that is the one which another event is given.
        (&[None, Some("o/1")], "o/1"),
        (&[Some("o/2"), None], "o/2"),
    ] {
        assert_eq!(
            commit(ids).unwrap_err(),
            Invalid::Twice { field: "event id", value: twice.into() }
        );
    }
}

#[test]
fn a_claim_has_a_limit_and_a_lease() {
    let policy =
        DeliveryPolicy { backoff_cap: Duration::from_secs(9), ..DeliveryPolicy::default() }
            .checked()
            .unwrap();
    let claim = |lease, limit| Claim::new(&policy, name("o"), lease, limit).map(|_| ());
    let ms = Duration::from_millis(1);
    assert_eq!(claim(ms, 1), Ok(()));
    assert_eq!(claim(Duration::from_secs(9), Claim::MAX), Ok(()));
    // F10: a lease that is longer than the longest backoff is no basis for what consumers remember.
    assert_eq!(
        claim(Duration::from_secs(10), 1).unwrap_err().to_string(),
        "lease: it is 10s, longer than backoff_cap (9s): an event would be retried for longer than its consumers need remember it; \
         give a shorter lease, or a longer backoff_cap"
    );
    for limit in [0, Claim::MAX + 1, usize::MAX] {
        assert_eq!(
            claim(ms, limit).unwrap_err().to_string(),
            format!("limit is {limit}, it must lie between 1 and 4096")
        );
    }
    for lease in [Duration::ZERO, Duration::from_nanos(999_999)] {
        let refused = claim(lease, 1).unwrap_err().to_string();
        assert_eq!(refused, format!("lease: it is {lease:?}, it must last for 1 ms at least"));
    }
}

/// Settings that do not go together are refused when they are made: no hot loop (F13), no event
/// that is never published.
#[test]
fn a_policy_is_checked() {
    let good = DeliveryPolicy::default;
    let ms = Duration::from_millis;
    for policy in [
        good(),
        DeliveryPolicy {
            backoff_base: ms(1),
            backoff_cap: ms(1),
            max_failures: 1,
            max_starts: 2,
            ..good()
        },
        DeliveryPolicy { backoff_base: Duration::MAX, backoff_cap: Duration::MAX, ..good() },
        DeliveryPolicy { max_failures: u32::MAX - 1, max_starts: u32::MAX, ..good() },
    ] {
        assert_eq!(policy.clone().checked().unwrap().as_ref(), &policy);
    }
    for (policy, message) in [
        (
            DeliveryPolicy { backoff_base: Duration::ZERO, ..good() },
            "backoff_base: it is 0ns, a failing event would be retried in a hot loop; give at least 1 ms",
        ),
        (
            DeliveryPolicy { backoff_base: Duration::from_micros(999), ..good() },
            "backoff_base: it is 999µs, a failing event would be retried in a hot loop; give at least 1 ms",
        ),
        (
            DeliveryPolicy { backoff_base: ms(20), backoff_cap: ms(19), ..good() },
            "backoff_cap: it is 19ms, shorter than backoff_base (20ms)",
        ),
        (
            DeliveryPolicy { max_failures: 0, ..good() },
            "max_failures: it is 0, no event could ever be published; give at least 1",
        ),
        (
            DeliveryPolicy { max_failures: 3, max_starts: 3, ..good() },
            "max_starts: it is 3, but each failure is a start too; give more than max_failures (3)",
        ),
        (
            DeliveryPolicy { max_failures: 3, max_starts: 0, ..good() },
            "max_starts: it is 0, but each failure is a start too; give more than max_failures (3)",
        ),
    ] {
        assert_eq!(policy.checked().unwrap_err().to_string(), message);
    }
}

/// Whether settings are refused because of this field.
fn refuses<T>(checked: Result<T, Invalid>, wanted: &str) -> bool {
    matches!(checked, Err(Invalid::Unsafe { field, .. } | Invalid::OutOfRange { field, .. }) if field == wanted)
}

#[test]
fn the_settings_of_a_relay_are_checked() {
    let good = || RelaySettings::new(name("relay-1"));
    let (ms, micros) = (Duration::from_millis, Duration::from_micros);
    for settings in [
        good(),
        RelaySettings { window: 1, run: 1, ..good() },
        RelaySettings { window: Claim::MAX, run: Claim::MAX, ..good() },
        RelaySettings { lease: ms(10), poll: ms(1), pause_base: ms(1), pause_cap: ms(1), ..good() },
    ] {
        assert_eq!(settings.clone().checked().unwrap().as_ref(), &settings);
    }
    for (settings, field) in [
        (RelaySettings { window: 0, run: 0, ..good() }, "window"),
        (RelaySettings { window: Claim::MAX + 1, ..good() }, "window"),
        (RelaySettings { run: 0, ..good() }, "run"),
        (RelaySettings { window: 5, run: 6, ..good() }, "run"),
        (RelaySettings { lease: micros(9_999), ..good() }, "lease"),
        (RelaySettings { lease: good().policy.backoff_cap + ms(1), ..good() }, "lease"),
        (RelaySettings { poll: micros(999), ..good() }, "poll and pause_base"),
        (RelaySettings { pause_base: micros(999), ..good() }, "poll and pause_base"),
        (RelaySettings { pause_base: ms(20), pause_cap: ms(19), ..good() }, "pause_cap"),
    ] {
        assert!(refuses(settings.clone().checked(), field), "{settings:?}");
    }
}

/// Nothing is forgotten too early (P7).
#[test]
fn a_retention_is_refused_at_its_limits() {
    let seconds = Duration::from_secs;
    // Retried for 100 s at most.
    let policy = DeliveryPolicy {
        backoff_cap: seconds(10),
        max_failures: 9,
        max_starts: 10,
        ..DeliveryPolicy::default()
    };
    let policy = policy.checked().unwrap();
    let kept = || Retention {
        events: seconds(100),
        inbox: seconds(200),
        requests: seconds(60),
        orders: None,
        positions: None,
    };
    let checked = |retention: Retention| retention.checked(&policy);
    assert_eq!(checked(kept()).unwrap().as_ref(), &kept());
    let short = seconds(200) - Duration::from_millis(1);
    assert!(refuses(checked(Retention { inbox: short, ..kept() }), "retention of the inbox"));

    let shortest = Retention { events: Retention::SHORTEST, ..kept() };
    assert_eq!(checked(shortest.clone()).unwrap().as_ref(), &shortest);
    let shorter = Retention::SHORTEST - Duration::from_millis(1);
    assert!(refuses(checked(Retention { events: shorter, ..kept() }), "retention of events"));
    assert!(refuses(checked(Retention { requests: shorter, ..kept() }), "retention of requests"));

    assert!(checked(Retention { orders: Some(seconds(60)), ..kept() }).is_ok());
    assert!(refuses(
        checked(Retention { orders: Some(seconds(59)), ..kept() }),
        "retention of orders"
    ));

    // As long as the inbox, and twice as long as events, whichever is longer.
    for (events, needed) in [(99, 200), (100, 200), (101, 202)] {
        let positions =
            |age| Retention { events: seconds(events), positions: Some(seconds(age)), ..kept() };
        assert!(checked(positions(needed)).is_ok(), "{events}");
        assert!(refuses(checked(positions(needed - 1)), "retention of positions"), "{events}");
    }
    // F10.
    let kept = checked(kept()).unwrap();
    assert_eq!(kept.redrive_window().get(), seconds(100));
    assert_eq!(kept.against(), &policy);
}

/// Settings without an end are found safe or refused, and no check panics (P7, F10).
#[test]
fn checks_take_settings_without_an_end() {
    let endless = DeliveryPolicy { backoff_cap: Duration::MAX, ..DeliveryPolicy::default() }
        .checked()
        .unwrap();
    assert!(refuses(Retention::default().checked(&endless), "retention of the inbox"));
    let for_ever = || Retention {
        events: Duration::MAX,
        inbox: Duration::MAX,
        requests: Duration::MAX,
        orders: Some(Duration::MAX),
        positions: Some(Duration::MAX),
    };
    for policy in [endless, Checked::default()] {
        let kept = for_ever().checked(&policy).unwrap();
        assert_eq!(kept.redrive_window().get(), Duration::MAX - policy.longest_retry());
    }
}

/// A reason comes from outside, so it is never refused: it is made to fit into one line.
#[test]
fn a_reason_is_made_to_fit() {
    assert_eq!(Reason::new("").as_str(), "");
    assert_eq!(Reason::new(format_args!("exit {}", 7)).as_str(), "exit 7");
    assert_eq!(Reason::new("a\0b\nc\r\nd\u{85}é").as_str(), "a b c  d é");
    for length in [Reason::MAX - 1, Reason::MAX] {
        of_length(length).for_each(|text| assert_eq!(Reason::new(&text).as_str(), text));
    }
    for length in [Reason::MAX + 1, Reason::MAX + 2, Reason::MAX * 10] {
        for text in of_length(length) {
            let reason = Reason::new(&text);
            let kept = reason.as_str().strip_suffix('…').unwrap();
            assert!(
                text.starts_with(kept)
                    && (Reason::MAX - 3..=Reason::MAX).contains(&reason.as_str().len())
            );
        }
    }
    // What is made to fit fits: made again, it stays the same.
    for text in of_length(2000) {
        let reason = Reason::new(text + "\n");
        assert_eq!(Reason::new(reason.as_str()), reason);
    }
}
