//! What went wrong with requests: keys that stick, keys that others share, fingerprints that change
//! (F21, F23, F24).

use twobox::{
    CommitOrder, CommitRefused, Fingerprint, OrderId, ParametersDiffer, Register, Registered,
    Request, RunError, Store, Table,
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
