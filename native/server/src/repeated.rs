//! Finds names that occur twice in one object of a body. Programs differ in which of the two values counts, and a value can be a tenant.

use std::collections::HashSet;
use std::fmt::Formatter;

use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Checks that no name occurs twice in one object of a JSON or msgpack body.
///
/// # Errors
///
/// A sentence with the first name that occurs twice, or with the reason why the body cannot be read.
pub fn check_names(body: &[u8], is_msgpack: bool) -> Result<(), String> {
    let checked: Result<Value, String> = if is_msgpack {
        rmp_serde::from_slice(body).map_err(|error| error.to_string())
    } else {
        serde_json::from_slice(body).map_err(|error| error.to_string())
    };
    checked.map(|_| ())
}

/// A value in which no name occurs twice in one object. Contains the text, if the value is a text.
struct Value(Option<String>);

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, out: &mut Formatter<'_>) -> std::fmt::Result {
        out.write_str("a value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut names = HashSet::new();
        while let Some((Value(name), Value(_))) = map.next_entry()? {
            if let Some(twice) = name.and_then(|name| names.replace(name)) {
                return Err(A::Error::custom(format_args!("the field {twice:?} occurs twice")));
            }
        }
        Ok(Value(None))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        while items.next_element::<Value>()?.is_some() {}
        Ok(Value(None))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        Ok(Value(Some(text.to_owned())))
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Value, E> {
        Ok(Value(None))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Value, E> {
        Ok(Value(None))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Value, E> {
        Ok(Value(None))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Value, E> {
        Ok(Value(None))
    }

    fn visit_bytes<E: Error>(self, _: &[u8]) -> Result<Value, E> {
        Ok(Value(None))
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value(None))
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        IgnoredAny::deserialize(from).map(|_| Value(None))
    }
}

#[cfg(test)]
mod tests {
    use super::check_names;

    #[test]
    fn a_name_that_occurs_twice_is_found_at_any_depth() {
        for text in [
            r#"{"a": 1, "a": 1}"#,
            r#"{"a": 1, "b": null, "\u0061": 2.5}"#,
            r#"[{}, [{"b": {"a": [], "c": "a", "a": "a"}}]]"#,
        ] {
            let error = check_names(text.as_bytes(), false).unwrap_err();
            assert!(error.starts_with("the field \"a\" occurs twice"), "{error}");
        }
        assert_eq!(
            check_names(br#"{"a": {"a": "b"}, "b": ["a", "a", -1, 1e300, true]}"#, false),
            Ok(())
        );
        assert!(check_names(b"\x82\xa1a\x01\xa1a\x02", true).is_err());
        // The body has an extension type, binary data, and names that are not texts.
        assert_eq!(check_names(b"\x83\xa1a\xd4\x01\x00\x01\xc4\x01a\x02\xc0", true), Ok(()));
    }

    #[test]
    fn too_deep_nesting_is_an_error() {
        assert!(check_names(&b"[".repeat(100_000), false).is_err());
        assert!(check_names(&b"\x91".repeat(100_000), true).is_err());
    }
}
