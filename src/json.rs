//! JSON in the canonical form of RFC 8785, for fingerprints (F23).

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::ids::{Invalid, beginning};

/// The canonical text of a document.
pub(crate) fn canonical(field: &'static str, document: &[u8]) -> Result<String, Invalid> {
    let refuse = |reason: String| Invalid::NotJson { field, reason: reason.into() };
    let document = core::str::from_utf8(document).map_err(|error| refuse(error.to_string()))?;
    let Strict(value) =
        serde_json::from_str(document).map_err(|error| refuse(error.to_string()))?;
    if let Some(integer) = inexact_integer(document) {
        return Err(refuse(alloc::format!(
            "the integer {integer} lies beyond 2^53; give it as a string"
        )));
    }
    serde_json_canonicalizer::to_string(&value).map_err(|error| refuse(error.to_string()))
}

/// The largest integer up to which each one is a double of its own.
const EXACT: u64 = 1 << 53;

/// The first integer of a JSON document that a double does not tell apart from its neighbours. The
/// parser makes doubles of the largest ones, so only the document shows what they were.
fn inexact_integer(document: &str) -> Option<&str> {
    let mut rest = document;
    while let Some(start) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        rest = &rest[start..];
        if let Some(string) = rest.strip_prefix('"') {
            let mut escaped = false;
            let end = string.find(|c: char| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            })?;
            rest = &string[end + 1..];
            continue;
        }
        let end = rest
            .find(|c: char| !matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E'))
            .unwrap_or(rest.len());
        let number = &rest[..end];
        let digits = number.trim_start_matches('-');
        let integer = digits.bytes().all(|byte| byte.is_ascii_digit());
        if integer && digits.parse::<u64>().map_or(true, |integer| integer > EXACT) {
            return Some(beginning(number, 40));
        }
        rest = &rest[end..];
    }
    None
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
