//! JSON in the canonical form of RFC 8785, for fingerprints (F23).

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::ids::{Invalid, beginning};

/// The canonical text of a document, and the names of its outermost members, or else what it is.
pub(crate) fn canonical(field: &'static str, document: &[u8]) -> Result<(String, String), Invalid> {
    let refuse = |reason: String| Invalid::NotJson { field, reason: reason.into() };
    let document = core::str::from_utf8(document).map_err(|error| refuse(error.to_string()))?;
    let Strict(value) =
        serde_json::from_str(document).map_err(|error| refuse(error.to_string()))?;
    if let Some((at, number)) = inexact_number(document) {
        let (line, column) = place(document, at);
        let number = beginning(number, 40).into();
        return Err(Invalid::Inexact { field, number, line, column });
    }
    let text =
        serde_json_canonicalizer::to_string(&value).map_err(|error| refuse(error.to_string()))?;
    Ok((text, names(&value)))
}

fn names(value: &Value) -> String {
    match value {
        Value::Object(members) => members.keys().map(String::as_str).collect::<Vec<_>>().join(" "),
        Value::Array(_) => "an array".to_string(),
        Value::String(_) => "a string".to_string(),
        Value::Number(_) => "a number".to_string(),
        Value::Bool(_) => "true or false".to_string(),
        Value::Null => "null".to_string(),
    }
}

/// The largest integer up to which each one is a double of its own.
const EXACT: u64 = 1 << 53;

/// The first number of a JSON document that its canonical form would not keep, and where it
/// begins: two of these could come to the same double, and two requests would be one (F51). The
/// parser makes doubles of them, so only the document shows what they were.
fn inexact_number(document: &str) -> Option<(usize, &str)> {
    let mut at = 0;
    while let Some(start) =
        document[at..].find(|c: char| c == '"' || c == '-' || c.is_ascii_digit())
    {
        at += start;
        let rest = &document[at..];
        if let Some(string) = rest.strip_prefix('"') {
            let mut escaped = false;
            let end = string.find(|c: char| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            })?;
            at += end + 2;
            continue;
        }
        let end = rest
            .find(|c: char| !matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E'))
            .unwrap_or(rest.len());
        let number = &rest[..end];
        if !is_exact(number) {
            return Some((at, number));
        }
        at += end;
    }
    None
}

/// Whether a number has the value that RFC 8785 keeps of it, in the shortest form of its double.
/// Integers end at 2^53, also where one beyond happens to be a double: what is refused
/// should not depend on the last digit.
fn is_exact(number: &str) -> bool {
    let digits = number.trim_start_matches('-');
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return digits.parse().is_ok_and(|integer: u64| integer <= EXACT);
    }
    let kept =
        number.parse::<f64>().ok().map(|double| serde_json_canonicalizer::to_string(&double));
    kept.is_some_and(|kept| kept.is_ok_and(|kept| Decimal::of(number) == Decimal::of(&kept)))
}

/// The value of a decimal number, whichever way it is written.
#[derive(PartialEq)]
struct Decimal {
    negative: bool,
    /// From the first digit that is not zero to the last one.
    digits: String,
    /// Of the last digit.
    exponent: i64,
}

impl Decimal {
    fn of(number: &str) -> Self {
        let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let negative = whole.starts_with('-');
        let digits = String::from(whole.trim_start_matches('-')) + fraction;
        let digits = digits.trim_start_matches('0');
        let shortest = digits.trim_end_matches('0');
        if shortest.is_empty() {
            return Self { negative: false, digits: String::new(), exponent: 0 };
        }
        // One that does not fit is so far below that the number is no double at all, or zero.
        let exponent = exponent.parse().unwrap_or(i64::MIN);
        let places = |text: &str| i64::try_from(text.len()).unwrap_or(i64::MAX);
        let moved = places(digits).saturating_sub(places(shortest));
        let exponent = exponent.saturating_sub(places(fraction)).saturating_add(moved);
        Self { negative, digits: shortest.into(), exponent }
    }
}

/// The line and the column of a place, both from 1.
fn place(document: &str, at: usize) -> (usize, usize) {
    let before = &document[..at];
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    (line, column)
}

/// JSON as RFC 8785 presumes it (I-JSON, RFC 7493): no name twice in an object. The parser alone
/// would keep the last of two members, and the canonical form would then blur what must differ.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        input.deserialize_any(StrictVisitor).map(Self)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_string()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value)
            .map(Value::Number)
            .ok_or_else(|| E::custom("a number that is not finite"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        while let Some(Strict(item)) = items.next_element()? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some((name, Strict(value))) = members.next_entry::<String, Strict>()? {
            if object.contains_key(&name) {
                return Err(A::Error::custom(format_args!(
                    "the name {name:?} stands twice in an object"
                )));
            }
            object.insert(name, value);
        }
        Ok(Value::Object(object))
    }
}
