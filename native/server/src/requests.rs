//! Bodies of requests that the data plane answers. If these types cannot read a body, or their checks fail, the request is forwarded: the
//! control plane then answers the request or returns an error.

use std::time::Duration;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use kvevents_index::keys::{self, Item, Items};
use kvevents_routing::{Labels, ReservationRequest, State, Tie, Tier, Update, Weights};

use crate::fleet::{Lora, Scope, is_short};

const MAX_MEDIA: usize = 1_024;
const MAX_PROMPTS: usize = 1_024;
const MAX_LABELS: usize = 32;
/// Maximum number of characters of the name of a reservation.
const MAX_ID: usize = 128;
/// Minimum and maximum number of seconds until a reservation expires.
const RESERVATION_SECONDS: std::ops::RangeInclusive<f64> = 1.0..=86_400.0;
/// The tenant, or the group, of a request that does not state it.
const DEFAULT_NAME: &str = "default";

/// A value that must be an object: serde alone would also accept an array with the values of the fields.
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Fields<T>(std::marker::PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(serde::de::value::MapAccessDeserializer::new(map)).map(Object)
            }
        }

        from.deserialize_map(Fields(std::marker::PhantomData))
    }
}

/// Reads the value of a field that is present, and refuses null.
fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// A value that must be a list: serde alone would also accept msgpack binary data, as a list of bytes.
struct List<T>(Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Items<T>(std::marker::PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Items<T> {
            type Value = List<T>;

            fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str("an array")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Self::Value, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(items)).map(List)
            }
        }

        from.deserialize_any(Items(std::marker::PhantomData))
    }
}

/// Reads a list from a field that is present, and refuses null.
fn present_list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<Vec<T>>, D::Error> {
    List::deserialize(from).map(|List(items)| Some(items))
}

/// Reads a list or null.
fn optional_list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<Vec<T>>, D::Error> {
    Ok(Option::<List<T>>::deserialize(from)?.map(|List(items)| items))
}

/// Reads a list of lists from a field that is present, and refuses null.
fn present_lists<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<Vec<Vec<T>>>, D::Error> {
    let List(lists) = List::<List<T>>::deserialize(from)?;
    Ok(Some(lists.into_iter().map(|List(items)| items).collect()))
}

/// Reads labels; each name may occur only once.
fn labels<'de, D: Deserializer<'de>>(from: D) -> Result<Labels, D::Error> {
    struct LabelsVisitor;

    impl<'de> Visitor<'de> for LabelsVisitor {
        type Value = Labels;

        fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            out.write_str("labels by name")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Labels, A::Error> {
            let mut found = Labels::new();
            while let Some((name, value)) = map.next_entry()? {
                if found.insert(name, value).is_some() {
                    return Err(serde::de::Error::custom("a name occurs twice"));
                }
            }
            Ok(found)
        }
    }

    from.deserialize_map(LabelsVisitor)
}

/// Declares a request type with the given fields and the common fields of queries.
macro_rules! question {
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$meta])*
        #[derive(Default, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub(crate) struct $name {
            #[serde(deserialize_with = "present")]
            pub(crate) model_name: Option<String>,
            #[serde(deserialize_with = "present")]
            pub(crate) modelname: Option<String>,
            #[serde(deserialize_with = "present")]
            pub(crate) model: Option<String>,
            #[serde(deserialize_with = "present")]
            pub(crate) tenant_id: Option<String>,
            #[serde(deserialize_with = "present")]
            pub(crate) tenant: Option<String>,
            #[serde(deserialize_with = "present")]
            pub(crate) routing_group: Option<String>,
            #[serde(deserialize_with = "present")]
            pub(crate) group: Option<String>,
            pub(crate) lora_name: Option<String>,
            pub(crate) lora: Option<String>,
            pub(crate) lora_id: Option<i64>,
            pub(crate) cache_salt: Option<String>,
            pub(crate) salt: Option<String>,
            pub(crate) additionalsalt: Option<String>,
            pub(crate) additional_salt: Option<String>,
            pub(crate) whole_prompt: bool,
            $($(#[$field_meta])* pub(crate) $field: $kind,)*
        }

        impl Names for $name {
            fn names(&self) -> [[&Option<String>; 4]; 5] {
                [
                    [&self.model_name, &self.model, &self.modelname, &None],
                    [&self.tenant_id, &self.tenant, &None, &None],
                    [&self.routing_group, &self.group, &None, &None],
                    [&self.lora_name, &self.lora, &None, &None],
                    [&self.cache_salt, &self.salt, &self.additionalsalt, &self.additional_salt],
                ]
            }

            fn lora_id(&self) -> Option<i64> {
                self.lora_id
            }
        }
    };
}

/// A request that can state each field of a prompt's scope under several names.
pub(crate) trait Names {
    fn names(&self) -> [[&Option<String>; 4]; 5];
    fn lora_id(&self) -> Option<i64>;

    /// Returns the scope of the prompt. Returns None if the model is missing, or if two names of a field have different values.
    fn scope(&self) -> Option<Scope> {
        let [model, tenant, group, lora, salt] = self.names();
        let lora = pick_value(lora, true)?.map(|name| Lora::Name(name.clone()));
        Some(Scope {
            model: pick_value(model, false)?.filter(|model| !model.is_empty())?.clone(),
            tenant: pick_value(tenant, false)?.map_or_else(|| DEFAULT_NAME.into(), String::clone),
            group: pick_value(group, false)?.map_or_else(|| DEFAULT_NAME.into(), String::clone),
            lora: lora.or(self.lora_id().filter(|id| *id >= 0).map(Lora::Id)),
            salt: pick_value(salt, true)?.cloned(),
        })
    }

    /// Whether each name has a length that `/v1` admits.
    fn has_good_names(&self) -> bool {
        let mut given = self.names().into_iter().flatten().flatten();
        given.all(|name| is_name(name))
    }
}

/// Returns the value of a field that has several names. If `is_optional`, an empty value counts as absent. Returns None if two names have
/// different values.
fn pick_value(names: [&Option<String>; 4], is_optional: bool) -> Option<Option<&String>> {
    let given = names.into_iter().flatten();
    let mut given = given.filter(|value| !(is_optional && value.is_empty()));
    let first = given.next();
    given.all(|other| Some(other) == first).then_some(first)
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && is_short(name)
}

/// The name of an instance, or a hash: a signed or unsigned 64-bit number, or a text.
pub(crate) enum Id {
    Unsigned(u64),
    Signed(i64),
    Text(String),
}

impl<'de> Deserialize<'de> for Id {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl serde::de::Visitor<'_> for Visitor {
            type Value = Id;

            fn expecting(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                out.write_str("a number of 64 bits or text")
            }

            fn visit_u64<E>(self, number: u64) -> Result<Id, E> {
                Ok(Id::Unsigned(number))
            }

            fn visit_i64<E>(self, number: i64) -> Result<Id, E> {
                Ok(u64::try_from(number).map_or(Id::Signed(number), Id::Unsigned))
            }

            fn visit_str<E>(self, text: &str) -> Result<Id, E> {
                Ok(Id::Text(text.to_owned()))
            }
        }

        from.deserialize_any(Visitor)
    }
}

impl Id {
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Unsigned(number) => number.to_string(),
            Self::Signed(number) => number.to_string(),
            Self::Text(text) => text.clone(),
        }
    }

    /// Returns the hash; None if the text is not a hash.
    pub(crate) fn hash(&self) -> Option<u64> {
        match self {
            Self::Unsigned(number) => Some(*number),
            Self::Signed(number) => Some(*number as u64),
            Self::Text(text) => of_text(text),
        }
    }
}

question! {
    /// The request of `/query`.
    Query {
        instance_id: Option<Id>,
        block_size: Option<u64>,
        #[serde(deserialize_with = "present_list")]
        token_ids: Option<Vec<u32>>,
    }
}

question! {
    /// The request of `/query_by_hash`.
    HashQuery {
        instance_id: Option<Id>,
        block_size: Option<u64>,
        #[serde(deserialize_with = "optional_list")]
        block_hashes: Option<Vec<Id>>,
        #[serde(deserialize_with = "optional_list")]
        seq_hashes: Option<Vec<Id>>,
        #[serde(deserialize_with = "optional_list")]
        block_hash: Option<Vec<Id>>,
    }
}

/// Reads a hash: decimal digits, with an optional minus and without leading zeros; or up to 16 hexadecimal digits after `0x`.
fn of_text(text: &str) -> Option<u64> {
    if let Some(digits) = text.strip_prefix("0x") {
        let is_hex = (1..=16).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        return is_hex.then(|| u64::from_str_radix(digits, 16).ok())?;
    }
    let (digits, is_negative) = text.strip_prefix('-').map_or((text, false), |digits| (digits, true));
    let is_plain = digits.bytes().all(|digit| digit.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    if !is_plain || digits.is_empty() {
        return None;
    }
    if is_negative {
        return text.parse::<i64>().ok().map(|number| number as u64);
    }
    digits.parse().ok()
}

/// One image, or other multimodal item, of a prompt.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Media {
    id: Id,
    start: u32,
    length: u32,
}

impl Media {
    fn item(&self) -> Item {
        let (id, placeless) = match &self.id {
            Id::Unsigned(number) => (*number, true),
            Id::Signed(number) => (*number as u64, true),
            Id::Text(text) => (keys::item_text(text), false),
        };
        Item {
            id,
            placeless,
            start: self.start.into(),
            length: self.length.into(),
        }
    }
}

/// Returns the multimodal items of a prompt for the index. Returns None if there are too many items.
pub(crate) fn items(media: &[Object<Media>]) -> Option<Items> {
    let items = || media.iter().map(|Object(one)| one.item()).collect::<Vec<_>>();
    (media.len() <= MAX_MEDIA).then(|| items().into())
}

question! {
    /// The request of `/v1/match`.
    Match {
        mm: Vec<Object<Media>>,
        expected: bool,
        #[serde(deserialize_with = "present_list")]
        tokens: Option<Vec<u32>>,
    }
}

question! {
    /// The request of `/v1/match_many`.
    MatchMany {
        mm: Vec<Object<Media>>,
        expected: bool,
        #[serde(deserialize_with = "present_lists")]
        prompts: Option<Vec<Vec<u32>>>,
    }
}

impl MatchMany {
    /// Returns the prompts; None if there are too many.
    pub(crate) fn checked(&self) -> Option<&[Vec<u32>]> {
        self.prompts.as_deref().filter(|prompts| prompts.len() <= MAX_PROMPTS)
    }
}

question! {
    /// The request of `/v1/select`.
    Select {
        mm: Vec<Object<Media>>,
        expected: bool,
        #[serde(deserialize_with = "present_list")]
        tokens: Option<Vec<u32>>,
        candidates: Option<Vec<Object<Candidate>>>,
        tiers: Weights<Tier>,
        #[serde(deserialize_with = "present")]
        wait_weight: Option<f64>,
        #[serde(deserialize_with = "present")]
        load_weight: Option<f64>,
        trust: Weights<State>,
        tie: Tie,
        expect_seconds: f64,
        explain: bool,
        ignores_cache: bool,
        #[serde(deserialize_with = "labels")]
        labels: Labels,
        session: Option<String>,
        reserve: Reserve,
    }
}

/// The reservation that a request asks for, if any.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum Reserve {
    Asked(bool),
    As(Object<ReserveAs>),
}

impl Default for Reserve {
    fn default() -> Self {
        Self::Asked(false)
    }
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ReserveAs {
    id: Option<String>,
    seconds: Option<f64>,
}

/// Whether a text can be the name of a reservation. The name is a part of a path, and a name that consists of dots would lead to a
/// different path.
pub(crate) fn is_id(id: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:".contains(&byte);
    (1..=MAX_ID).contains(&id.len()) && id.bytes().all(is_plain) && id.bytes().any(|byte| byte != b'.')
}

fn is_expiry(seconds: &f64) -> bool {
    RESERVATION_SECONDS.contains(seconds)
}

/// A requested change of a reservation.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ReservationUpdate {
    first_token: bool,
    output_tokens: Option<u64>,
    seconds: Option<f64>,
}

impl ReservationUpdate {
    /// Returns the change of the reservation. Returns None if a number is out of range.
    pub(crate) fn checked(&self) -> Option<Update> {
        self.seconds.iter().all(is_expiry).then(|| Update {
            first_token: self.first_token,
            output_tokens: self.output_tokens,
            time: self.seconds.map(Duration::from_secs_f64),
        })
    }
}

impl Select {
    /// The requested reservation. It expires after `seconds`, unless the request states another time.
    pub(crate) fn reservation(&self, seconds: f64) -> Option<ReservationRequest<'_>> {
        let (id, given) = match &self.reserve {
            Reserve::Asked(false) => return None,
            Reserve::Asked(true) => (None, None),
            Reserve::As(Object(reserve)) => (reserve.id.as_deref(), reserve.seconds),
        };
        Some(ReservationRequest {
            id,
            time: Duration::from_secs_f64(given.unwrap_or(seconds)),
        })
    }

    /// Whether all names and numbers of the request are within their limits.
    pub(crate) fn has_valid_fields(&self) -> bool {
        let is_weight = |weight: &f64| (0.0..=1.0).contains(weight);
        let candidates = self.candidates.as_deref().unwrap_or_default();
        (self.tiers.0.iter().all(|(_, weight)| is_weight(weight)))
            && self.trust.0.iter().all(|(_, weight)| is_weight(weight))
            && ([self.wait_weight, self.load_weight].iter().flatten()).all(|weight| (0.0..=1000.0).contains(weight))
            && (0.0..=60.0).contains(&self.expect_seconds)
            && self.labels.len() <= MAX_LABELS
            && self
                .labels
                .iter()
                .flat_map(|(name, value)| [name, value])
                .chain(&self.session)
                .all(|text| is_name(text))
            && match &self.reserve {
                Reserve::Asked(_) => true,
                Reserve::As(Object(reserve)) => reserve.id.iter().all(|id| is_id(id)) && reserve.seconds.iter().all(is_expiry),
            }
            && candidates
                .iter()
                .all(|Object(one)| is_name(&one.instance) && one.load.is_none_or(|load| load >= 0.0 && load.is_finite()))
    }
}

/// A candidate that a request names.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Candidate {
    pub(crate) instance: String,
    #[serde(default)]
    rank: u32,
    /// Load of the candidate; None if the load counts that the engine reports.
    #[serde(default)]
    pub(crate) load: Option<f64>,
}

impl Candidate {
    pub(crate) fn new(instance: &str, rank: i64) -> Self {
        Self {
            instance: instance.to_owned(),
            rank: rank as u32,
            load: None,
        }
    }

    pub(crate) fn rank(&self) -> i64 {
        self.rank.into()
    }
}

/// Returns the request that the query string of a raw prompt states. Returns None if any part of the query string is unusual.
pub(crate) fn of_query_string(query: &str) -> Option<Match> {
    let mut request = Match::default();
    let mut seen: Vec<&str> = Vec::new();
    for pair in query.split('&') {
        let (name, value) = pair.split_once('=')?;
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/:".contains(&byte);
        if !value.bytes().all(is_plain) || seen.contains(&name) {
            return None;
        }
        seen.push(name);
        let text = Some(value.to_owned());
        match name {
            "model_name" => request.model_name = text,
            "modelname" => request.modelname = text,
            "model" => request.model = text,
            "tenant_id" => request.tenant_id = text,
            "tenant" => request.tenant = text,
            "routing_group" => request.routing_group = text,
            "group" => request.group = text,
            "lora_name" => request.lora_name = text,
            "lora" => request.lora = text,
            "cache_salt" => request.cache_salt = text,
            "salt" => request.salt = text,
            "expected" => request.expected = value.parse().ok()?,
            "whole_prompt" => request.whole_prompt = value.parse().ok()?,
            _ => return None,
        }
    }
    Some(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_read_in_every_spelling() {
        let read = |text: &str| serde_json::from_str::<Id>(text).unwrap().hash();
        assert_eq!(read("1"), Some(1));
        assert_eq!(read("-1"), Some(u64::MAX));
        assert_eq!(read("18446744073709551615"), Some(u64::MAX));
        assert_eq!(read("\"0x14f0d0ee1a2a2e2b\""), Some(0x14f0_d0ee_1a2a_2e2b));
        assert_eq!(read("\"-1\""), Some(u64::MAX));
        for wrong in [
            "\"\"",
            "\"01\"",
            "\"1_0\"",
            "\" 5\"",
            "\"0x\"",
            "\"0b11\"",
            "\"-\"",
            "\"18446744073709551616\"",
            "\"+1\"",
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn reading_ends_at_the_first_name_that_has_no_weight_or_occurs_twice() {
        for (field, known) in [("tiers", "cpu"), ("trust", "EXACT")] {
            let read = |names: &[&str]| {
                let weights: Vec<String> = names.iter().map(|name| format!("{name:?}: 0.5")).collect();
                serde_json::from_str::<Select>(&format!("{{{field:?}: {{{}}}}}", weights.join(", ")))
            };
            assert!(read(&[known]).is_ok());
            let names: Vec<String> = (0..10_000).map(|number| format!("{number}")).collect();
            let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
            names[0] = known;
            for wrong in [&names, &[known; 10_000][..]] {
                let error = read(wrong).err().unwrap();
                assert!(error.column() < 40, "{error}");
            }
        }
    }

    #[test]
    fn two_names_of_one_field_must_agree() {
        let read = |text: &str| serde_json::from_str::<Query>(text).unwrap().scope();
        assert!(read(r#"{"model": "a", "model_name": "b"}"#).is_none());
        assert!(read(r#"{"model": "a", "model_name": "a"}"#).is_some());
        assert!(read(r#"{"model": ""}"#).is_none());
        let scope = read(r#"{"model": "a", "lora": "", "lora_id": 7, "salt": "", "cache_salt": "x", "tenant": ""}"#).unwrap();
        assert_eq!(
            (scope.lora, scope.salt.as_deref(), &*scope.tenant),
            (Some(Lora::Id(7)), Some("x"), "")
        );
    }

    #[test]
    fn unusual_query_strings_are_not_read() {
        for text in [
            r#"{"model": "a", "token_ids": [1], "what": 1}"#,
            r#"{"model": "a", "token_ids": [-1]}"#,
            r#"{"model": "a", "token_ids": [1.5]}"#,
            r#"{"model": "a", "token_ids": null}"#,
            r#"{"model": "a", "model": "a", "token_ids": []}"#,
            r#"{"model": null, "token_ids": []}"#,
        ] {
            assert!(serde_json::from_str::<Query>(text).is_err(), "{text}");
        }
        assert!(serde_json::from_str::<Select>(r#"{"labels": {"zone": "a", "zone": "a"}}"#).is_err());
        assert!(of_query_string("model=a&model=a").is_none());
        assert!(of_query_string("model=%61").is_none());
        assert!(of_query_string("model=a&what=1").is_none());
        assert!(of_query_string("model=a&whole_prompt=true").unwrap().whole_prompt);
    }
}
