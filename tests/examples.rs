//! The examples say what they should, line by line: P1, P2, P5, P8 and P9 as a reader sees them.

#![allow(clippy::unwrap_used, reason = "these are tests")]

#[path = "../examples/demo.rs"]
#[expect(dead_code, reason = "its main belongs to the program")]
mod demo;
#[path = "../examples/own_tables.rs"]
#[expect(dead_code, reason = "its main belongs to the program")]
mod own_tables;
#[path = "../examples/relay.rs"]
#[expect(dead_code, reason = "its main belongs to the program")]
mod relay;

use twobox::Table;

const DEMO: [&str; 14] = [
    "Temporary redb files; no network.",
    "before commit failed: orders=0 outbox=0 reserved_keys=1",
    "same key, different parameters before order: rejected",
    "retry same request: order=order:req-001 events=1",
    "same request again: orders=1 outbox=1",
    "same key, different parameters after order: rejected",
    "client response lost: committed_orders=2",
    "retry after lost response: orders=2 outbox=2",
    "delivery acknowledgement lost: local_effects=1 pending=2",
    "after reconnect: pending=2 local_effects=1",
    "recovery delivery: order-created:req-001 local_effect=skipped",
    "recovery delivery: order-created:req-002 local_effect=applied",
    "finished: orders=2 pending=0 inbox=2 local_effects=2",
    "temporary files cleaned up: True",
];
const IN_MEMORY: &str = "Temporary memory stores; no files, no network.";

fn demo(args: &[&str]) -> String {
    let mut out = Vec::new();
    demo::run(args.iter().map(ToString::to_string), &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn lines(text: &str) -> Vec<&str> {
    text.lines().collect()
}

/// The demo's lines on redb and in memory; only the first one says which store it is.
#[test]
fn demo_prints_its_lines_on_each_store() {
    assert_eq!(lines(&demo(&[])), DEMO);
    assert_eq!(demo(&[]), demo(&["--store", "redb"]));
    let memory = demo(&["--store", "memory"]);
    assert_eq!(lines(&memory)[0], IN_MEMORY);
    assert_eq!(lines(&memory)[1..], DEMO[1..]);
}

/// With `--tables`, all tables of both sides follow each step, and they are the same on each store.
#[test]
fn demo_shows_all_tables_after_each_step() {
    let (redb, memory) = (demo(&["--tables"]), demo(&["--tables", "--store", "memory"]));
    assert_eq!(lines(&redb)[1..], lines(&memory)[1..]);
    let mut rest = redb.as_str();
    for (step, next) in DEMO[1..].iter().zip(&DEMO[2..]) {
        let (_, after) = rest
            .split_once(&format!("{step}\n"))
            .unwrap_or_else(|| panic!("{step:?} is not in\n{rest}"));
        let (shown, _) = after
            .split_once(&format!("{next}\n"))
            .unwrap_or_else(|| panic!("{next:?} is not in\n{after}"));
        for table in Table::ALL {
            let title = format!("{table}:");
            assert_eq!(
                shown.lines().filter(|line| line.starts_with(&title)).count(),
                2,
                "{table} after {step:?}"
            );
        }
        rest = after;
    }
}

#[test]
fn demo_refuses_what_it_does_not_know() {
    for args in [
        &["--help-me"][..],
        &["--store"],
        &["--store", "paper"],
        &["tables"],
        &["--tables", "--tabels"],
    ] {
        let mut out = Vec::new();
        let refusal =
            demo::run(args.iter().map(ToString::to_string), &mut out).unwrap_err().to_string();
        assert!(
            refusal.ends_with("usage: demo [--store redb|memory] [--tables]"),
            "{args:?}: {refusal}"
        );
        assert_eq!(out, b"", "{args:?}");
    }
}

#[test]
fn relay_keeps_the_order_and_counts_each_message_once() {
    let mut out = Vec::new();
    relay::run(&mut out).unwrap();
    let right = [
        "orders=2 outbox=2",
        "broker fails: confirmed=0 pending=2 failed_attempts=1",
        "retry: confirmed=2 pending=0 failed_attempts=1",
        "message order-req-1/1 of order order-req-1: Applied",
        "message order-req-3/1 of order order-req-3: Applied",
        "message order-req-1/1 of order order-req-1: Duplicate",
        "user 1 has 299 points",
    ];
    assert_eq!(lines(&String::from_utf8(out).unwrap()), right);
}

#[test]
fn own_tables_are_in_the_same_commit() {
    let mut out = Vec::new();
    own_tables::run(&mut out).unwrap();
    let right = [
        "at first: stock=3 orders=0 events=0",
        "2 sold, twobox began the transaction: stock=1 orders=1 events=1",
        "out of stock: 2 wanted, 1 left",
        "2 not sold: stock=1 orders=1 events=1",
        "1 sold, the program began the transaction: stock=0 orders=2 events=2",
        "out of stock: 1 wanted, 0 left",
        "1 not sold: stock=0 orders=2 events=2",
    ];
    assert_eq!(lines(&String::from_utf8(out).unwrap()), right);
}
