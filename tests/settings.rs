//! `docs/settings.md` says what the settings are if nothing else is said: this compares it with the
//! code, row by row.

// A helper that cannot go on has found a failure, as a test has.
#![allow(clippy::unwrap_used, clippy::panic)]

use core::time::Duration;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use twobox::relay::{Published, Relay, RelaySettings};
use twobox::{
    Body, Claim, CommitOrder, Consumer, DeliveryPolicy, Draft, EventId, Fingerprint, Handled,
    Headers, Inbox, Millis, Moment, Owner, Reason, Receipt, Request, Retention, Store, WhenDead,
};
use twobox_memory::MemoryStore;
use twobox_redb::RedbOptions;

/// The rows of the page by section and setting: default, unit, consequence.
fn page() -> BTreeMap<(String, String), (String, String, String)> {
    let text =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/settings.md")).unwrap();
    let mut rows = BTreeMap::new();
    let mut section = String::new();
    for line in text.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            section = title.split('`').nth(1).unwrap_or("limits").to_string();
        }
        if line.starts_with("| `") {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let [name, value, unit, consequence] = cells[..] else {
                panic!("not four cells: {line}")
            };
            let key = (section.clone(), name.trim_matches('`').to_string());
            let row = (value.to_string(), unit.to_string(), consequence.to_string());
            assert!(rows.insert(key, row).is_none(), "{name} stands twice");
        }
    }
    rows
}

fn ms(duration: Duration) -> (String, &'static str) {
    (duration.as_millis().to_string(), "ms")
}

fn number(value: impl ToString, unit: &'static str) -> (String, &'static str) {
    (value.to_string(), unit)
}

fn maybe(duration: Option<Duration>) -> (String, &'static str) {
    (duration.map_or_else(|| "None".to_string(), |duration| duration.as_millis().to_string()), "ms")
}

/// The settings as the code has them. Each struct is taken apart by all of its fields, so that a
/// new one cannot be forgotten.
fn code() -> BTreeMap<(String, String), (String, &'static str)> {
    let DeliveryPolicy { backoff_base, backoff_cap, max_failures, max_starts, when_dead } =
        DeliveryPolicy::default();
    let settings = RelaySettings::new(Owner::new("relay").unwrap());
    let RelaySettings {
        owner: _,
        policy,
        window,
        window_bytes,
        run,
        publishes,
        publish_timeout,
        lease,
        poll,
        pause_base,
        pause_cap,
    } = settings;
    assert_eq!(policy.as_ref(), &DeliveryPolicy::default());
    let Retention { events, inbox, requests, orders, positions } = Retention::default();
    let when_dead = match when_dead {
        WhenDead::Block => "Block",
        WhenDead::Continue => "Continue",
    };
    let options = format!("{:?}", RedbOptions::new());
    let rows = [
        ("DeliveryPolicy", "backoff_base", ms(backoff_base)),
        ("DeliveryPolicy", "backoff_cap", ms(backoff_cap)),
        ("DeliveryPolicy", "max_failures", number(max_failures, "times")),
        ("DeliveryPolicy", "max_starts", number(max_starts, "times")),
        ("DeliveryPolicy", "when_dead", number(when_dead, "rule")),
        ("RelaySettings", "window", number(window, "events")),
        ("RelaySettings", "window_bytes", number(window_bytes, "bytes")),
        ("RelaySettings", "run", number(run, "events")),
        ("RelaySettings", "publishes", number(publishes, "calls")),
        ("RelaySettings", "publish_timeout", ms(publish_timeout)),
        ("RelaySettings", "lease", ms(lease)),
        ("RelaySettings", "poll", ms(poll)),
        ("RelaySettings", "pause_base", ms(pause_base)),
        ("RelaySettings", "pause_cap", ms(pause_cap)),
        ("Retention", "events", ms(events)),
        ("Retention", "inbox", ms(inbox)),
        ("Retention", "requests", ms(requests)),
        ("Retention", "orders", maybe(orders)),
        ("Retention", "positions", maybe(positions)),
        ("Inbox", "max_failures", number(failures_of_an_inbox(), "times")),
        ("Inbox", "in_order", number(an_inbox_waits(), "rule")),
        ("RedbOptions", "cache_bytes", number(said_by(&options, "cache_bytes"), "bytes")),
        ("RedbOptions", "verify_on_open", number(said_by(&options, "verify"), "rule")),
        ("RedbOptions", "shared", number(said_by(&options, "shared"), "rule")),
        ("RedbOptions", "sync_deliveries", number(said_by(&options, "sync_deliveries"), "rule")),
        ("RedbOptions", "end_leases", number(said_by(&options, "end_leases"), "rule")),
        ("limits", "CommitOrder::MAX_EVENTS", number(CommitOrder::MAX_EVENTS, "events")),
        ("limits", "Claim::MAX", number(Claim::MAX, "events")),
        ("limits", "Body::MAX", number(Body::MAX, "bytes")),
        ("limits", "Headers::MAX", number(Headers::MAX, "headers")),
        ("limits", "EventId::MAX", number(EventId::MAX, "bytes")),
        ("limits", "Reason::MAX", number(Reason::MAX, "bytes")),
        ("limits", "Retention::SHORTEST", ms(Retention::SHORTEST)),
        ("limits", "CONFLICT_TRIES", number(twobox::flow::CONFLICT_TRIES, "times")),
    ];
    rows.into_iter()
        .map(|(section, name, row)| ((section.to_string(), name.to_string()), row))
        .collect()
}

/// The value of a field, as `Debug` shows it.
fn said_by(debug: &str, field: &str) -> String {
    let (_, value) = debug.split_once(&format!("{field}: ")).unwrap();
    value.split([',', ' ', '}']).next().unwrap().to_string()
}

/// The second event of a key, whose first one has not arrived.
fn second_event() -> twobox::Message {
    let store = MemoryStore::new();
    let request = Request::new("scope", "req", Fingerprint::of_bytes(b"")).unwrap();
    let drafts = [1, 2].map(|_| Draft::new("t", Body::text("").unwrap()).unwrap());
    let order = CommitOrder::new(
        &request,
        twobox::OrderId::new("order").unwrap(),
        Body::text("").unwrap(),
        drafts,
    )
    .unwrap();
    store.run(order, Millis::new(1)).unwrap();
    let mut sent = Vec::new();
    struct Keep<'k>(&'k mut Vec<twobox::Message>);
    impl twobox::relay::Publisher for Keep<'_> {
        fn publish(&mut self, batch: &[twobox::Message], _: Millis) -> Vec<Published> {
            self.0.extend_from_slice(batch);
            vec![Published::Confirmed; batch.len()]
        }
    }
    let settings = RelaySettings::new(Owner::new("relay").unwrap());
    Relay::new(&store, Keep(&mut sent), settings, Moment::steady(Millis::new(1)))
        .unwrap()
        .run_until_idle(Moment::steady(Millis::new(1)))
        .unwrap();
    sent.remove(1)
}

/// After how many failures an inbox sets an event aside, if nothing is said.
fn failures_of_an_inbox() -> usize {
    let (store, message) = (MemoryStore::new(), second_event());
    let inbox = Inbox::new(&store, Consumer::new("c").unwrap());
    let fail = || inbox.receive(&message, Millis::new(1), |_, _| Err::<Handled, _>("no")).unwrap();
    1 + (0..1_000).take_while(|_| matches!(fail(), Receipt::Failed(_))).count()
}

/// Whether an inbox waits for the event before, if nothing is said.
fn an_inbox_waits() -> bool {
    let (store, message) = (MemoryStore::new(), second_event());
    let inbox = Inbox::new(&store, Consumer::new("c").unwrap());
    let receipt =
        inbox.receive(&message, Millis::new(1), |_, _| Ok::<_, String>(Handled::Done)).unwrap();
    matches!(receipt, Receipt::WaitsFor(_))
}

#[test]
fn the_page_says_what_the_code_does() {
    let (page, code) = (page(), code());
    assert!(
        page.keys().eq(code.keys()),
        "on the page: {:?}\nin the code: {:?}",
        page.keys(),
        code.keys()
    );
    for (key, (value, unit)) in &code {
        let (said, its_unit, consequence) = &page[key];
        assert_eq!((said.as_str(), its_unit.as_str()), (value.as_str(), *unit), "{key:?}");
        assert!(consequence.len() > 10, "{key:?} says nothing of its consequence");
    }
}

/// The defaults go together, and so do the sentences about them.
#[test]
fn the_defaults_go_together() {
    let policy = DeliveryPolicy::default().checked().unwrap();
    RelaySettings::new(Owner::new("relay").unwrap()).checked().unwrap();
    Retention::default().checked(&policy).unwrap();
    // For how long an event is tried: all waits between the first and the last try, at their
    // shortest and at their longest.
    let waits = (1..policy.max_failures)
        .map(|n| (policy.backoff_base * (1 << (n - 1))).min(policy.backoff_cap));
    let longest: Duration = waits.sum();
    let said =
        format!("tried for {} to {} minutes", longest.as_secs() / 120, longest.as_secs() / 60);
    assert!(
        page()[&("DeliveryPolicy".to_string(), "max_failures".to_string())].2.contains(&said),
        "{said}"
    );
}
