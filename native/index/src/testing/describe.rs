//! Scanned events with owned values, for tests that compare them with the events of another decoder.

use crate::wire::decode::decode_into;
use crate::wire::scan::{Event, Extra, Id, Kind, Limits, Schema, Scratch, Span, extra_keys, scan};

/// The enum `Id` with owned values.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum OwnedId {
    Int(i128),
    Text(String),
    Bytes(Vec<u8>),
}

/// The enum `Extra` with owned values.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum OwnedExtra {
    Text(String),
    Pair(OwnedId, i64),
    Int(i128),
    Bytes(Vec<u8>),
}

impl From<Extra<'_>> for OwnedExtra {
    fn from(extra: Extra<'_>) -> Self {
        match extra {
            Extra::Text(text) => Self::Text(text.into()),
            Extra::Int(value) => Self::Int(value),
            Extra::Bytes(bytes) => Self::Bytes(bytes.into()),
            Extra::Pair(Id::Int(value), offset) => Self::Pair(OwnedId::Int(value), offset),
            Extra::Pair(Id::Text(text), offset) => Self::Pair(OwnedId::Text(text.into()), offset),
            Extra::Pair(Id::Bytes(bytes), offset) => Self::Pair(OwnedId::Bytes(bytes.into()), offset),
        }
    }
}

/// The struct `Event` with owned values.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct OwnedEvent {
    pub kind: Kind,
    pub hashes: Vec<u64>,
    pub parent: Option<u64>,
    pub tokens: Vec<u32>,
    pub pairs: bool,
    pub keyable: u32,
    pub lacks_group: bool,
    pub keys: Option<Vec<u64>>,
    pub block_size: u64,
    pub lora_id: Option<i64>,
    pub group: Option<i64>,
    pub window: Option<i64>,
    pub medium: Option<String>,
    pub lora_name: Option<String>,
    pub locality: Option<String>,
    pub ownership: Option<String>,
    pub spec_kind: Option<String>,
    pub cache_salt: Option<String>,
    /// Extra keys with the positions of their blocks, in order; None if the field is nil.
    pub extra_keys: Option<Vec<(usize, OwnedExtra)>>,
}

/// Returns the events that `scan` reads from a payload; None if `scan` refuses the payload.
pub fn describe(payload: &[u8], schema: &Schema) -> Option<Vec<OwnedEvent>> {
    let mut scratch = Scratch::default();
    scan(payload, schema, &mut scratch)?;
    Some(all_described(payload, &scratch))
}

/// Returns the events that the tolerant decoder writes into a scratch for an index.
pub fn describe_decoded(payload: &[u8], limits: &Limits) -> Vec<OwnedEvent> {
    let mut scratch = Scratch::default();
    let batch = decode_into(payload, limits, &mut scratch);
    all_described(&batch.bytes, &scratch)
}

fn all_described(bytes: &[u8], scratch: &Scratch) -> Vec<OwnedEvent> {
    scratch.events.iter().map(|event| described(event, bytes, scratch)).collect()
}

fn described(event: &Event, bytes: &[u8], scratch: &Scratch) -> OwnedEvent {
    let text = |span: Option<Span>| span.map(|span| String::from_utf8_lossy(span.bytes(bytes)).into_owned());
    OwnedEvent {
        kind: event.kind,
        hashes: event.hashes.slice(&scratch.hashes).to_vec(),
        parent: event.parent,
        tokens: event.tokens.slice(&scratch.tokens).to_vec(),
        pairs: event.pairs,
        keyable: event.keyable,
        lacks_group: event.lacks_group,
        keys: event.keyed.then(|| event.keys.slice(&scratch.hashes).to_vec()),
        block_size: event.block_size,
        lora_id: event.lora_id,
        group: event.group,
        window: event.window,
        medium: text(event.medium),
        lora_name: text(event.lora_name),
        locality: text(event.locality),
        ownership: text(event.ownership),
        spec_kind: text(event.spec_kind),
        cache_salt: text(event.cache_salt),
        extra_keys: event.extra_keys.map(|span| {
            let mut found = Vec::new();
            let _ = extra_keys(span.bytes(bytes), |block, extra| found.push((block, extra.into())));
            assert_eq!(event.has_extra_keys, !found.is_empty());
            found
        }),
    }
}
