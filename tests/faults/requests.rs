//! What went wrong with requests: keys that stick, keys that others share, fingerprints that change
//! (F21, F23, F24, F51, F53).

use core::num::NonZeroU16;
use core::time::Duration;

use twobox::{
    Cancel, Checked, CommitOrder, CommitRefused, Draft, Dump, Fingerprint, Invalid, Load, OrderId,
    ParametersDiffer, Reason, Register, Registered, Request, Retention, RunError, Store, Summary,
    Table, purge_all,
};

use crate::support::{Flaky, StoreFault, at, body, draft, dump, name, place};

/// The request dies at every point there is, at any time; whoever has the same parameters goes on
/// at once (P1).
#[test]
fn f21_the_same_parameters_may_go_on_after_any_failure() {
    on_each_store!(|store: S| {
        let faults = StoreFault::ALL.into_iter().map(Some).chain([None]);
        for (n, (dies_registering, dies_placing)) in
            faults.clone().flat_map(|a| faults.clone().map(move |b| (a, b))).enumerate()
        {
            let id = format!("req-{n}");
            let request =
                Request::new("caller", &id, Fingerprint::of([("n", n.to_string())])).unwrap();
            let order =
                CommitOrder::new(&request, name::<OrderId>(&id), body(""), [draft("t", &id)])
                    .unwrap();
            let first = Flaky::new(store, [dies_registering, dies_placing]);
            let _died = first.run(Register::new(&request), at(0));
            let _died = first.run(&order, at(0));

            // At the same moment, with no pause and no repair: never "in progress".
            let registered = store.run(Register::new(&request), at(0)).unwrap();
            let placed = store.run(&order, at(0)).unwrap();
            let took = |fault| matches!(fault, None | Some(StoreFault::CommitTook));
            assert_eq!(
                placed.repeated,
                took(dies_placing),
                "{dies_registering:?} {dies_placing:?}"
            );
            match registered {
                Registered::New => assert!(!took(dies_registering) && !took(dies_placing)),
                Registered::Open => assert!(took(dies_registering) && !took(dies_placing)),
                Registered::Placed(first) => assert!(took(dies_placing) && first == placed.placed),
            }
            assert_eq!(dump(store).count(Table::Orders), n + 1);
        }
    });
}

/// A refused order leaves its key open for the same parameters, whatever it was refused for.
#[test]
fn f21_a_refused_order_does_not_hold_its_key() {
    on_each_store!(|store: S| {
        place(store, "taken", [draft("t", "k")], at(0));
        let request = Request::new("caller", "req", Fingerprint::of([("a", "1")])).unwrap();
        store.run(Register::new(&request), at(1)).unwrap();
        let refused = [
            CommitOrder::new(&request, name("taken"), body(""), [draft("t", "k")]).unwrap(),
            CommitOrder::new(
                &request,
                name("mine"),
                body(""),
                [draft("t", "k").id(name("taken/1"))],
            )
            .unwrap(),
        ];
        for order in &refused {
            let before = dump(store);
            let Err(RunError::Refused(why)) = store.run(order, at(2)) else {
                panic!("it must be refused")
            };
            assert!(
                matches!(
                    why,
                    CommitRefused::OrderIdTaken { .. } | CommitRefused::EventIdTaken { .. }
                ),
                "{why}"
            );
            assert_eq!(dump(store), before);
            assert_eq!(store.run(Register::new(&request), at(3)).unwrap(), Registered::Open);
        }
        let order = CommitOrder::new(&request, name("mine"), body(""), [draft("t", "k")]).unwrap();
        assert!(!store.run(&order, at(4)).unwrap().repeated);
    });
}

/// A retry that says the same in other words is the same request; one that says something else is
/// refused (P1).
#[test]
fn f23_a_retry_is_known_by_what_it_says_and_not_by_how() {
    const SAME: &[&[&str]] = &[
        &[
            r#"{"a":1,"b":[true,null]}"#,
            r#"{"b":[true,null],"a":1}"#,
            "{ \"b\" : [ true , null ] ,\n \"a\":1 }",
        ],
        // Numbers: one value, many spellings.
        &[r#"{"n":1}"#, r#"{"n":1.0}"#, r#"{"n":1e0}"#, r#"{"n":10e-1}"#, r#"{"n":1.000}"#],
        &[r#"{"n":0}"#, r#"{"n":0.0}"#, r#"{"n":-0}"#, r#"{"n":0e5}"#],
        &[r#"{"n":1e21}"#, r#"{"n":10e20}"#, r#"{"n":1.0E+21}"#],
        &[r#"{"n":0.1}"#, r#"{"n":1e-1}"#, r#"{"n":0.10}"#],
        // Characters: escaped or not, in pairs or not, in names or values.
        &[r#"{"caf\u00e9":"\u20ac"}"#, r#"{"café":"€"}"#],
        &[r#"["\ud83d\ude00"]"#, r#"["😀"]"#],
        &[r#"["\u0000\u000a\/"]"#, r#"["\u0000\n/"]"#],
        // Names are sorted by UTF-16 units, where a character beyond the first plane comes before
        // U+FFFD.
        &[r#"{"\ufffd":1,"😀":2}"#, r#"{"😀":2,"\ufffd":1}"#],
        // Nested, in any depth.
        &[r#"[{"x":{"b":1,"a":[{"d":1,"c":2}]}}]"#, r#"[{"x":{"a":[{"c":2,"d":1}],"b":1}}]"#],
    ];
    on_each_store!(|store: S| {
        for (n, spellings) in SAME.iter().enumerate() {
            let request = |text: &str| {
                Request::new(
                    "caller",
                    format!("req-{n}"),
                    Fingerprint::of_json(text.as_bytes()).unwrap(),
                )
                .unwrap()
            };
            assert_eq!(
                store.run(Register::new(&request(spellings[0])), at(0)).unwrap(),
                Registered::New
            );
            for spelling in *spellings {
                assert_eq!(
                    store.run(Register::new(&request(spelling)), at(1)).unwrap(),
                    Registered::Open,
                    "{spelling}"
                );
            }
            for (other, spellings) in SAME.iter().enumerate().filter(|(other, _)| *other != n) {
                let refused = store.run(Register::new(&request(spellings[0])), at(1));
                assert!(
                    matches!(refused, Err(RunError::Refused(ParametersDiffer { .. }))),
                    "{n} {other}"
                );
            }
        }
    });
    // What looks alike and is not: the order of lists, text and number, e with an accent in one
    // character and in two.
    let differ = [
        [r#"[1,2]"#, r#"[2,1]"#],
        [r#"{"n":1}"#, r#"{"n":"1"}"#],
        [r#"["\u00e9"]"#, r#"["e\u0301"]"#],
        [r#"{"a":null}"#, r#"{}"#],
        [r#"{"n":9007199254740991}"#, r#"{"n":9007199254740990}"#],
    ];
    let of = |text: &str| Fingerprint::of_json(text.as_bytes()).unwrap();
    differ.iter().for_each(|[a, b]| assert_ne!(of(a), of(b)));
    // What the canonical form cannot tell apart is refused instead of being taken for the same.
    for text in [r#"{"a":1,"a":2}"#, r#"{"n":9007199254740993}"#] {
        assert!(Fingerprint::of_json(text.as_bytes()).is_err(), "{text}");
    }
    let fields = [("b", "2"), ("a", "1"), ("a", "0")];
    let mut reversed = fields;
    reversed.reverse();
    assert_eq!(Fingerprint::of(fields), Fingerprint::of(reversed));
}

fn of_number(number: &str) -> Result<Fingerprint, Invalid> {
    Fingerprint::of_json(format!("{{\"n\":[{number}]}}").as_bytes())
}

/// Numbers that differ are two requests, or refused with their place: never one, although the
/// canonical form knows doubles only. What a double holds as it is written is one number, however
/// it is spelt (P1).
#[test]
fn f51_numbers_that_differ_are_never_one() {
    let pairs = [
        ["1.000000000000000001", "1.000000000000000002"],
        ["9007199254740993.0", "9007199254740992.0"],
        ["9007199254740993e0", "9007199254740992e0"],
        ["900719925474099.3e1", "900719925474099.2e1"],
        ["0.1", "0.10000000000000000001"],
        ["-0.1", "-0.10000000000000000001"],
        ["0.30000000000000004", "0.3000000000000000444"],
        // Too small for a double, so they would be zero.
        ["1e-400", "2e-400"],
        ["1e-400", "0"],
        ["1e-99999999999999999999", "0"],
        ["-1e-400", "0"],
        ["4e-324", "5e-324"],
        // The largest double, and what is rounded to it.
        ["1.7976931348623157e308", "1.79769313486231571e308"],
        ["123456789012345678e1", "123456789012345679e1"],
    ];
    for [a, b] in pairs {
        match (of_number(a), of_number(b)) {
            (Ok(a), Ok(b)) => panic!("both are taken: {} {}", a.summary(), b.summary()),
            (a, b) => assert!(a.is_ok() || b.is_ok() || a != b, "one error for two numbers"),
        }
    }
    for [a, b] in [["0.1", "0.2"], ["9007199254740992", "-9007199254740992"], ["1e-5", "1e5"]] {
        assert_ne!(of_number(a).unwrap(), of_number(b).unwrap());
    }
    on_each_store!(|store: S| {
        let same: &[&[&str]] = &[
            &["1", "1.0", "1e0", "10e-1", "0.1e1", "1.000000000000000000000000000"],
            &["0", "-0", "0.000", "0e99999999999999999999", "-0e-400"],
            &["9007199254740992", "9007199254740992.0", "9007199254740.992e3"],
            &["5e-324", "0.5E-323", "50e-325"],
            &["123456789.125", "123456789125e-3"],
        ];
        for (n, spellings) in same.iter().enumerate() {
            for (nth, spelling) in spellings.iter().enumerate() {
                let fingerprint = of_number(spelling).expect(spelling);
                let request = Request::new("s", format!("r-{n}"), fingerprint).unwrap();
                let registered = store.run(Register::new(&request), at(0)).unwrap();
                let expected = if nth == 0 { Registered::New } else { Registered::Open };
                assert_eq!(registered, expected, "{spelling}");
            }
        }
    });
    // The place is that of the number, not of the like of it in a string or before it.
    let document = "{\"é1.000000000000000001\": 1.5,\n  \"n\": 1.000000000000000001}";
    let Err(Invalid::Inexact { number, line, column, .. }) =
        Fingerprint::of_json(document.as_bytes())
    else {
        panic!("it must be refused")
    };
    assert_eq!((&*number, line, column), ("1.000000000000000001", 2, 8));
}

/// A retry is known for as long as the order that it would place again, also when each try makes an
/// order id of its own (P1, P7).
#[test]
fn f53_a_key_is_known_for_as_long_as_its_order() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    on_each_store!(|store: S| {
        for (n, days) in [None, Some(60), Some(30)].into_iter().enumerate() {
            let kept = Retention { orders: days.map(|days| DAY * days), ..Retention::default() };
            let kept = kept.checked(&Checked::default()).unwrap();
            let request = Request::of("s", format!("r-{n}"), [("a", "1")]).unwrap();
            let mut tries = 0;
            let mut commit = |now| {
                tries += 1;
                let order = name::<OrderId>(&format!("order-{n}-{tries}"));
                let event = Draft::new("t", body("t")).unwrap();
                store.run(CommitOrder::new(&request, order, body(""), [event]).unwrap(), now)
            };
            let begun = at(0) + DAY * 1000 * n as u32;
            let first = commit(begun).unwrap();
            assert!(!first.repeated);
            // What is pending would keep them (F47).
            let cancel = Cancel::new(first.placed.events.clone(), Reason::new("no more")).unwrap();
            assert_eq!(store.run(cancel, begun).unwrap().done.len(), 1);
            for day in [29, 30, 31, 59, 60, 61, 900] {
                let now = begun + DAY * day + Duration::from_millis(1);
                let _ = purge_all(store, &kept, NonZeroU16::MAX, now).unwrap();
                if days.is_some_and(|days| day >= days) {
                    // Both are gone, and only then it is a new intention.
                    assert_eq!(store.view().unwrap().request(&request.key).unwrap(), None);
                    assert_eq!(store.view().unwrap().order(&first.placed.order).unwrap(), None);
                    continue;
                }
                let again = commit(now).unwrap();
                assert!(again.repeated, "placed again on day {day}, orders are kept {days:?}");
                assert_eq!(again.placed, first.placed);
            }
        }
    });
}

/// The same id of two callers is two requests: each has its own parameters, its own order and its
/// own outcome.
#[test]
fn f24_two_callers_may_use_the_same_key() {
    on_each_store!(|store: S| {
        // Also where the two parts run into each other when they are written one after the other.
        let keys =
            [("alice", "1"), ("bob", "1"), ("a", "b/c"), ("a/b", "c"), ("ab", "c"), ("a", "bc")];
        let requests = keys
            .map(|(scope, id)| Request::new(scope, id, Fingerprint::of([("of", scope)])).unwrap());
        let orders: Vec<_> = (0..)
            .zip(&requests)
            .map(|(n, request)| {
                CommitOrder::new(request, name(&format!("order-{n}")), body(""), [draft("t", "k")])
                    .unwrap()
            })
            .collect();
        for order in &orders {
            assert!(!store.run(order, at(0)).unwrap().repeated);
        }
        for ((n, request), order) in (0..).zip(&requests).zip(&orders) {
            let again = store.run(order, at(1)).unwrap();
            assert!(again.repeated);
            assert_eq!(again.placed.order, name(&format!("order-{n}")));
            assert_eq!(
                store.run(Register::new(request), at(1)).unwrap(),
                Registered::Placed(again.placed)
            );
        }
        assert_eq!(dump(store).count(Table::Requests), keys.len());
    });
}

/// P1: what is kept of parameters in clear text is a choice, and by default no value is: not in the
/// tables, not where they are shown, and not in the error of other parameters. Whatever is chosen,
/// the same parameters are the same request.
#[test]
fn f56_no_value_of_a_parameter_is_kept_in_clear_text_unless_it_is_asked_for() {
    on_each_store!(|store: S| {
        let secret = [("user", "ada"), ("password", "hunter2")];
        let other = [("user", "ada"), ("password", "hunter3")];
        let by_default = |parameters: [(&str, &str); 2]| Fingerprint::of(parameters);
        let bytes = Fingerprint::of_bytes(b"password=hunter2");
        let json = Fingerprint::of_json(br#"{"user":"ada","password":{"is":"hunter2"}}"#).unwrap();
        let array = Fingerprint::of_json(br#"["hunter2"]"#).unwrap();
        let mut errors = String::new();
        for (id, first, second) in [
            ("fields", by_default(secret), by_default(other)),
            ("bytes", bytes, Fingerprint::of_bytes(b"password=hunter3")),
            ("json", json, Fingerprint::of_json(br#"{"password":{"is":"hunter3"}}"#).unwrap()),
            ("array", array, Fingerprint::of_json(br#"["hunter3"]"#).unwrap()),
            ("nothing", Summary::Nothing.of(secret), Summary::Nothing.of(other)),
        ] {
            let (first, second) =
                [first, second].map(|f| Request::new("shop", id, f).unwrap()).into();
            assert_eq!(store.run(Register::new(&first), at(0)).unwrap(), Registered::New);
            let differ = store.run(Register::new(&second), at(0)).unwrap_err().to_string();
            let alike = first.fingerprint.summary() == second.fingerprint.summary();
            assert_eq!(differ.contains("of digest"), alike, "{differ}");
            errors += &differ;
        }
        let shown = Dump::of(&mut store.view().unwrap()).unwrap().to_string();
        for text in [&errors, &shown] {
            assert!(!text.contains("hunter"), "{text}");
        }
        assert!(errors.contains("[password user] of digest "), "{errors}");
        assert!(shown.contains("password user"), "{shown}");

        // A program that changes its choice finds its requests again.
        let again = Request::new("shop", "fields", Summary::All.of(secret)).unwrap();
        assert_eq!(store.run(Register::new(&again), at(0)).unwrap(), Registered::Open);
        assert_eq!(Summary::All.of(secret).summary(), "password=hunter2 user=ada");
    });
}
