//! What a request key is bound to (P1, F23): the same parameters always give the same fingerprint,
//! others never do.

use std::hash::{DefaultHasher, Hash, Hasher};

use proptest::prelude::*;
use twobox::{Digest, Fingerprint, Invalid, Summary};

use crate::support::digests;

/// Texts that are easily confused with each other.
fn tokens() -> impl Strategy<Value = String> {
    prop_oneof![4 => "[ab=, ]{0,3}", 1 => ".{0,8}", 1 => "\\PC{200,300}"]
}

fn fields() -> impl Strategy<Value = Vec<(String, String)>> {
    prop::collection::vec((tokens(), tokens()), 0..5)
}

fn fits(fingerprint: &Fingerprint) -> Result<(), TestCaseError> {
    prop_assert!(fingerprint.summary().len() <= Fingerprint::MAX_SUMMARY, "{:?}", fingerprint);
    prop_assert!(!fingerprint.summary().contains(char::is_control), "{:?}", fingerprint);
    // A store gives back what it was given.
    let again = Fingerprint::from_stored(fingerprint.digest(), fingerprint.summary());
    prop_assert_eq!(again.summary(), fingerprint.summary());
    Ok(())
}

proptest! {
    #[test]
    fn the_order_of_fields_does_not_matter(fields in fields(), seed in any::<prop::sample::Index>()) {
        let first = Summary::All.of(fields.clone());
        let mut other = fields.clone();
        other.reverse();
        prop_assert_eq!(&Summary::All.of(other), &first);
        let mut other = fields;
        if !other.is_empty() {
            let by = seed.index(other.len());
            other.rotate_left(by);
        }
        let other = Summary::All.of(other);
        prop_assert_eq!(&other, &first);
        prop_assert_eq!(other.summary(), first.summary());
    }

    /// Equal if and only if the fields are the same ones, each as often (they are a multiset).
    #[test]
    fn other_fields_are_another_fingerprint(mut a in fields(), mut b in fields()) {
        let equal = Summary::All.of(a.clone()) == Summary::All.of(b.clone());
        a.sort();
        b.sort();
        prop_assert_eq!(equal, a == b);
    }

    #[test]
    fn a_field_given_twice_counts_twice(fields in fields(), name in tokens(), value in tokens()) {
        let once = [fields.clone(), vec![(name.clone(), value.clone())]].concat();
        let twice = [once.clone(), vec![(name, value)]].concat();
        prop_assert_ne!(Summary::All.of(fields), Summary::All.of(once.clone()));
        prop_assert_ne!(Summary::All.of(once), Summary::All.of(twice));
    }

    #[test]
    fn names_and_values_are_not_confused(a in tokens(), b in tokens(), c in tokens()) {
        prop_assert_eq!(Summary::All.of([(&a, &b)]) == Summary::All.of([(&b, &a)]), a == b);
        // Where one text ends and the next begins counts.
        let joined = format!("{a}{b}");
        prop_assert_eq!(Summary::All.of([(&joined, &c)]) == Summary::All.of([(&a, &format!("{b}{c}"))]), b.is_empty());
    }

    #[test]
    fn every_byte_counts(bytes in prop::collection::vec(any::<u8>(), 0..400), at in any::<prop::sample::Index>()) {
        let first = Summary::All.of_bytes(&bytes);
        prop_assert_eq!(&Summary::All.of_bytes(&bytes), &first);
        prop_assert_ne!(&Summary::All.of_bytes(&[&bytes[..], &[0]].concat()), &first);
        if !bytes.is_empty() {
            let mut other = bytes.clone();
            other[at.index(bytes.len())] ^= 1;
            prop_assert_ne!(&Summary::All.of_bytes(&other), &first);
        }
    }

    #[test]
    fn a_summary_fits_whatever_was_given(fields in fields(), bytes in prop::collection::vec(any::<u8>(), 0..600), text in "[\\x00-\\u{9f}é…]{0,600}", digest in digests()) {
        fits(&Summary::All.of(fields))?;
        fits(&Summary::All.of_bytes(&bytes))?;
        fits(&Summary::All.of_bytes(text.as_bytes()))?;
        fits(&Summary::All.of([(&text, &text)]))?;
        fits(&Fingerprint::from_stored(digest, &text))?;
    }

    /// Whoever sees a summary without the mark sees all of it.
    #[test]
    fn a_summary_that_is_cut_says_so(text in "[a\\u{80}-\\u{9f}é]{0,300}") {
        let shown: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        for (fingerprint, whole) in [
            (Summary::All.of_bytes(text.as_bytes()), shown.clone()),
            (Summary::All.of([("f", &text)]), format!("f={shown}")),
            (Summary::All.of([("f", text.as_str()), ("g", "h")]), format!("f={shown} g=h")),
        ] {
            if whole.len() <= Fingerprint::MAX_SUMMARY {
                prop_assert_eq!(fingerprint.summary(), whole);
            } else {
                let kept = fingerprint.summary().strip_suffix('…');
                prop_assert!(kept.is_some_and(|kept| whole.starts_with(kept) && kept.len() > 250), "{:?}", fingerprint);
            }
        }
    }

    #[test]
    fn the_boundaries_of_parts_count(a in prop::collection::vec(any::<Vec<u8>>(), 0..4), b in prop::collection::vec(any::<Vec<u8>>(), 0..4)) {
        let digest = |parts: &[Vec<u8>]| Digest::of_parts("t", parts.iter().map(Vec::as_slice));
        prop_assert_eq!(digest(&a) == digest(&b), a == b);
        let joined = vec![a.concat()];
        prop_assert_eq!(digest(&a) == digest(&joined), a == joined);
    }
}

/// However few bytes are shown of what was given: control characters of two bytes shrink to one.
#[test]
fn a_summary_of_control_characters_is_cut_where_it_is_full() {
    for before in ["", "a"] {
        for controls in [250, 255, 256, 257, 258, 300, 1_000] {
            let text = format!("{before}{}", "\u{80}".repeat(controls));
            let shown = format!("{before}{}", " ".repeat(controls));
            let fits = shown.len() <= Fingerprint::MAX_SUMMARY;
            let expected = if fits {
                shown.clone()
            } else {
                format!("{}…", &shown[..Fingerprint::MAX_SUMMARY - '…'.len_utf8()])
            };
            assert_eq!(
                Summary::All.of_bytes(text.as_bytes()).summary(),
                expected,
                "{before:?} {controls}"
            );
            // The same behind a name of no bytes, and before another field.
            let fields = [("", &text[..]), ("b", "c")];
            let all = format!("={shown} b=c");
            let expected = if all.len() <= 256 { all } else { format!("{}…", &all[..253]) };
            assert_eq!(Summary::All.of(fields).summary(), expected, "{before:?} {controls}");
        }
    }
}

#[test]
fn the_kinds_of_fingerprints_are_kept_apart() {
    let text = r#"{"a":"b"}"#;
    let all = [
        Summary::All.of([("a", "b")]),
        Summary::All.of([(text, "")]),
        Summary::All.of([("", text)]),
        Fingerprint::of::<&str, &str>([]),
        Summary::All.of_bytes(text.as_bytes()),
        Summary::All.of_bytes(b""),
        Summary::All.of_bytes(b"a=b"),
        Summary::All.of_json(text.as_bytes()).unwrap(),
    ];
    for (at, one) in all.iter().enumerate() {
        assert!(all[at + 1..].iter().all(|other| other != one), "{one:?}");
    }
}

/// As equality, the hash is that of the digest: the line that is shown does not count.
#[test]
fn a_fingerprint_hashes_as_its_digest() {
    let hash = |fingerprint: &Fingerprint| {
        let mut hasher = DefaultHasher::new();
        fingerprint.hash(&mut hasher);
        hasher.finish()
    };
    let (two, three) = (Summary::All.of([("quantity", "2")]), Summary::All.of([("quantity", "3")]));
    let same = Fingerprint::from_stored(two.digest(), "another line");
    assert_eq!((&two, hash(&two)), (&same, hash(&same)));
    assert_ne!(hash(&two), hash(&three));
}

/// The digests are stored, so they must never change.
#[test]
fn fingerprints_stay_what_they_are() {
    for (fingerprint, digest) in [
        (
            Summary::All.of([("item", "notebook"), ("quantity", "2")]),
            "cb78625a0d50cef9be9004dafa2a03c0b06a919f64c3bb456abad0f23e5e543a",
        ),
        (
            Summary::All.of_bytes(b"notebook"),
            "3ab23e6dcef18c87a58325b3a75c29700047ef9ab729903f32d0e193cca98b1b",
        ),
        (
            Summary::All.of_json(br#"{"item":"notebook","quantity":2}"#).unwrap(),
            "b180570848c5a0bc19129038d55a7ccae8c87e514ecd63de9175fc1d0d6bda44",
        ),
    ] {
        let found = fingerprint.digest();
        assert_eq!(found.to_string(), digest);
        assert_eq!(
            format!("{found:.8} {found:.0} {found:.99}"),
            format!("{}  {digest}", &digest[..8])
        );
        assert_eq!(format!("{found:?}"), digest);
    }
}

/// Asserts that a document has this canonical form.
fn assert_canonical(document: &str, canonical: &str) {
    let fingerprint = Summary::All
        .of_json(document.as_bytes())
        .unwrap_or_else(|invalid| panic!("{document}: {invalid}"));
    let expected = Digest::of_parts("twobox/json/1", [canonical.as_bytes()]);
    assert_eq!(
        fingerprint.digest(),
        expected,
        "{document}\n is {}\n not {canonical}",
        fingerprint.summary()
    );
}

fn refused(document: impl AsRef<[u8]>) -> String {
    match Summary::All.of_json(document.as_ref()) {
        Ok(fingerprint) => {
            panic!("{:?} is {fingerprint:?}", String::from_utf8_lossy(document.as_ref()))
        }
        Err(Invalid::NotJson { field: "request parameters", reason }) => reason.into(),
        Err(inexact @ Invalid::Inexact { field: "request parameters", .. }) => inexact.to_string(),
        Err(other) => panic!("{other:?}"),
    }
}

/// The examples of RFC 8785, sections 3.2.2 and 3.2.3; but a number that is not kept as it is
/// written is refused (F51), and stands here as the double that it would become.
#[test]
fn json_examples_of_the_rfc() {
    assert_canonical(
        r#"{
          "numbers": [333333333.3333333, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
          "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
          "literals": [null, true, false]
        }"#,
        r#"{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}"#,
    );
    assert_canonical(
        r#"{"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh", "1": "One",
            "\ud83d\ude00": "Emoji: Grinning Face", "\u0080": "Control", "\u00f6": "Latin Small Letter O With Diaeresis"}"#,
        "{\"\\r\":\"Carriage Return\",\"1\":\"One\",\"\u{80}\":\"Control\",\"ö\":\"Latin Small Letter O With Diaeresis\",\
         \"€\":\"Euro Sign\",\"😀\":\"Emoji: Grinning Face\",\"\u{fb33}\":\"Hebrew Letter Dalet With Dagesh\"}",
    );
}

/// Asserts that a way of writing a double has this canonical form if it has the same digits, and is
/// refused if it says something that the canonical form does not (F51).
fn assert_kept_or_refused(written: &str, canonical: &str) {
    let digits = |text: &str| {
        let mantissa = text.split(['e', 'E']).next().unwrap().replace(['-', '.'], "");
        mantissa.trim_matches('0').to_owned()
    };
    if digits(written) == digits(canonical) {
        assert_canonical(&format!("[{written}]"), &format!("[{canonical}]"));
    } else {
        let reason = refused(format!("[1,\n {written}]"));
        assert!(reason.contains("at line 2 column 2"), "{reason}");
    }
}

/// The numbers of RFC 8785, appendix B, in several ways of writing them.
#[test]
fn json_numbers_of_the_rfc() {
    for (bits, canonical) in [
        (0x0000_0000_0000_0000, "0"),
        (0x8000_0000_0000_0000, "0"),
        (0x0000_0000_0000_0001, "5e-324"),
        (0x8000_0000_0000_0001, "-5e-324"),
        (0x7fef_ffff_ffff_ffff, "1.7976931348623157e+308"),
        (0xffef_ffff_ffff_ffff, "-1.7976931348623157e+308"),
        (0x4340_0000_0000_0000, "9007199254740992"),
        (0xc340_0000_0000_0000, "-9007199254740992"),
        (0x4430_0000_0000_0000, "295147905179352830000"),
        (0x44b5_2d02_c7e1_4af5, "9.999999999999997e+22"),
        (0x44b5_2d02_c7e1_4af6, "1e+23"),
        (0x44b5_2d02_c7e1_4af7, "1.0000000000000001e+23"),
        (0x444b_1ae4_d6e2_ef4e, "999999999999999700000"),
        (0x444b_1ae4_d6e2_ef4f, "999999999999999900000"),
        (0x444b_1ae4_d6e2_ef50, "1e+21"),
        (0x3eb0_c6f7_a0b5_ed8c, "9.999999999999997e-7"),
        (0x3eb0_c6f7_a0b5_ed8d, "0.000001"),
        (0x41b3_de43_5555_5553, "333333333.3333332"),
        (0x41b3_de43_5555_5554, "333333333.33333325"),
        (0x41b3_de43_5555_5555, "333333333.3333333"),
        (0x41b3_de43_5555_5556, "333333333.3333334"),
        (0x41b3_de43_5555_5557, "333333333.33333343"),
        (0xbecb_f647_612f_3696, "-0.0000033333333333333333"),
        (0x4314_3ff3_c1cb_0959, "1424953923781206.2"),
    ] {
        let number = f64::from_bits(bits);
        assert_kept_or_refused(&format!("{number:e}"), canonical);
        assert_kept_or_refused(&format!("{number:E}"), canonical);
        assert_kept_or_refused(&format!("{number:.17e}"), canonical);
        if canonical.contains(['.', 'e']) {
            assert_canonical(canonical, canonical);
        }
    }
}

proptest! {
    /// A double is written in its shortest form, and what has another value than that is refused, so
    /// one value has one fingerprint, and two values have two (F51).
    #[test]
    fn a_json_number_is_its_double(bits in any::<u64>()) {
        let number = f64::from_bits(bits);
        prop_assume!(number.is_finite());
        // Of two forms that are as short and as near RFC 8785 takes the even one, and Rust not.
        let shortest = Summary::All.of_json(serde_json::to_string(&number).unwrap().as_bytes());
        let shortest = shortest.unwrap();
        prop_assert_eq!(shortest.summary().parse::<f64>().unwrap(), number);
        for digits in [17, 20, 40] {
            assert_kept_or_refused(&format!("{number:.digits$e}"), shortest.summary());
        }
    }

    #[test]
    fn an_integer_is_what_it_is(integer in -(1_i64 << 53)..=1 << 53) {
        assert_canonical(&integer.to_string(), &integer.to_string());
        assert_canonical(&format!("{integer}.0"), &integer.to_string());
    }

    /// A string has one form, however its characters were written.
    #[test]
    fn escapes_do_not_matter(text in ".{0,8}|[\\x00-\\x7f]{0,8}") {
        let escaped: String = text.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
        let plain = Summary::All.of_json(format!("\"{escaped}\"").as_bytes()).unwrap();
        let upper: String = text.encode_utf16().map(|unit| format!("\\u{unit:04X}")).collect();
        prop_assert_eq!(&Summary::All.of_json(format!("\"{upper}\"").as_bytes()).unwrap(), &plain);
        if !text.contains(|c: char| c < ' ' || c == '"' || c == '\\') {
            prop_assert_eq!(&Summary::All.of_json(format!("\"{text}\"").as_bytes()).unwrap(), &plain);
        }
    }

    #[test]
    fn any_bytes_are_json_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..20), text in "[\\[\\]{}\":,0-9eE+.\\\\u -]{0,20}") {
        for document in [&bytes[..], text.as_bytes()] {
            if let Ok(fingerprint) = Summary::All.of_json(document) {
                // The canonical form is JSON again, and its own canonical form.
                if !fingerprint.summary().ends_with('…') && !fingerprint.summary().contains('\u{7f}') {
                    prop_assert_eq!(Summary::All.of_json(fingerprint.summary().as_bytes()).unwrap(), fingerprint);
                }
            }
        }
    }
}

#[test]
fn json_that_says_the_same_is_the_same() {
    for (same, canonical) in [
        (
            &[r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#, " {\n\t\"a\" : 1 ,\r\n \"b\" : 2 } "][..],
            r#"{"a":1,"b":2}"#,
        ),
        (&["2", "2.0", "2.00", "2e0", "0.2e1", "20E-1", "200e-2"], "2"),
        (&["-0", "0", "0.0", "-0.0", "0e9"], "0"),
        (&["1e20", "100000000000000000000.0", "1E+20"], "100000000000000000000"),
        (&[r#""é""#, r#""\u00e9""#, r#""\u00E9""#], "\"é\""),
        (&[r#""\/""#, r#""/""#, r#""\u002f""#], "\"/\""),
        (
            &[r#""\u0008\u0009\u000a\u000c\u000d\u0022\u005c\u001f""#, r#""\b\t\n\f\r\"\\\u001F""#],
            r#""\b\t\n\f\r\"\\\u001f""#,
        ),
        (&[r#"[[], {}, {"": {"": []}}]"#], r#"[[],{},{"":{"":[]}}]"#),
        (
            &[r#"{"a":{"d":1,"c":2},"A":[{"f":1,"e":2}]}"#],
            r#"{"A":[{"e":2,"f":1}],"a":{"c":2,"d":1}}"#,
        ),
    ] {
        same.iter().for_each(|document| assert_canonical(document, canonical));
    }
}

#[test]
fn json_that_says_something_else_differs() {
    for (a, b) in [
        ("2", "\"2\""),
        ("[1,2]", "[2,1]"),
        ("null", "{}"),
        ("[]", "{}"),
        (r#"{"a":null}"#, "{}"),
        (r#"{"a":1}"#, r#"{"A":1}"#),
        ("\"é\"", "\"e\u{301}\""),
        ("0.1", "0.10000000000000002"),
        ("9007199254740991", "9007199254740992"),
    ] {
        assert_ne!(
            Summary::All.of_json(a.as_bytes()).unwrap(),
            Summary::All.of_json(b.as_bytes()).unwrap(),
            "{a} {b}"
        );
    }
}

#[test]
fn a_json_name_that_stands_twice_is_refused() {
    for document in [
        r#"{"a":1,"a":1}"#,
        r#"{"a":1,"b":2,"a":3}"#,
        r#"{"a":1,"\u0061":1}"#,
        r#"[{"x":{"a":1,"a":2}}]"#,
    ] {
        assert!(refused(document).starts_with("the name \"a\" stands twice in an object"));
    }
}

/// Integers that a double cannot tell apart from their neighbours would give two requests one
/// fingerprint.
#[test]
fn a_json_integer_beyond_2_to_the_53_is_refused() {
    for integer in [
        "9007199254740993",
        "-9007199254740993",
        "9223372036854775807",
        "-9223372036854775808",
        "-9223372036854775809",
        "18446744073709551615",
        "18446744073709551616",
        "18446744073709551617",
        "123456789012345678901234567890",
        "-123456789012345678901234567890",
    ] {
        for document in
            [integer.to_owned(), format!("[1, {integer}]"), format!("{{\"a\\\"1\": {integer} }}")]
        {
            let reason = refused(&document);
            assert!(reason.contains(integer) && reason.contains("give it as a string"), "{reason}");
        }
        // As a string it is what it is.
        assert!(
            Summary::All.of_json(format!("{{\"{integer}\":\"{integer}\"}}").as_bytes()).is_ok()
        );
    }
}

#[test]
fn what_is_no_json_is_refused() {
    for document in [
        "",
        " ",
        "nul",
        "tru",
        "{",
        "}",
        "[",
        "[1",
        "[1,]",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{a:1}",
        "'a'",
        "\"",
        "\"\\x\"",
        "\"\u{1}\"",
        "01",
        "1.",
        ".5",
        "+1",
        "1e",
        "--1",
        "0x1",
        "NaN",
        "Infinity",
        "-Infinity",
        "1e309",
        "-1e309",
        "1 2",
        "{} x",
        "\"\\ud800\"",
        "\"\\udc00\\ud800\"",
        "\"\\ud83d\\u0041\"",
        "\u{feff}{}",
        "// c\n1",
        "1 /* c */",
    ] {
        refused(document);
    }
    for document in [&b"\"\xff\""[..], b"\"\xc0\x80\"", b"\"\xed\xa0\x80\"", b"\xff"] {
        refused(document);
    }
}

/// The parser has a limit of its own; whatever it is, the stack holds.
#[test]
fn deep_json_does_not_overflow_the_stack() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}"), ("[{\"a\":", "}]")] {
        for depth in [60, 1_000, 100_000] {
            let inner = if open == "[" { "" } else { "1" };
            let document = open.repeat(depth) + inner + &close.repeat(depth);
            assert_eq!(
                Summary::All.of_json(document.as_bytes()).is_ok(),
                depth == 60,
                "{depth} {open}"
            );
            refused(open.repeat(depth));
        }
    }
}
