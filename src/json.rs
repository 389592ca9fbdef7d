//! JSON in the canonical form of RFC 8785, for fingerprints (F23).

use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::ids::Invalid;

/// The canonical text of a document.
pub(crate) fn canonical(field: &'static str, document: &[u8]) -> Result<String, Invalid> {
    let refuse = |reason: String| Invalid::NotJson { field, reason: reason.into() };
    let Strict(value) = serde_json::from_slice(document).map_err(|error| refuse(error.to_string()))?;
    serde_json_canonicalizer::to_string(&value).map_err(|error| refuse(error.to_string()))
}

/// JSON as RFC 8785 presumes it (I-JSON, RFC 7493): no name twice in an object, no integer beyond those that a double tells apart.
/// The parser alone would keep the last of two members, and the canonical form would then blur what must differ.
struct Strict(Value);

/// The largest integer up to which each one is a double of its own.
const EXACT: u64 = 1 << 53;

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
        if value > EXACT {
            return Err(E::custom(format_args!("the integer {value} is larger than 2^53; give it as a string")));
        }
        Ok(Value::Number(value.into()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        if value.unsigned_abs() > EXACT {
            return Err(E::custom(format_args!("the integer {value} is smaller than -2^53; give it as a string")));
        }
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("a number that is not finite"))
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
                return Err(A::Error::custom(format_args!("the name {name:?} stands twice in an object")));
            }
            object.insert(name, value);
        }
        Ok(Value::Object(object))
    }
}
