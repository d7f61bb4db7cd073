//! The tolerant decoder, which reads batches of any form, including forms that `scan` refuses.
//!
//! It reads the envelope first, and then each event on its own, so that an invalid event does not affect others. Invalid parts become
//! `Rejected`. The results and the reasons of rejections equal those of `kvevents.wire.decode_batch`.

mod fields;
mod items;
mod refusal;
mod scratch_writer;
mod value;

use std::borrow::Cow;

use crate::wire::msgpack::Int;
use crate::wire::scan::layouts::{CLEARED_ARRAY, NEUTRAL_KINDS, REMOVED_ARRAY, STORED_ARRAY};
use crate::wire::scan::{LENGTHS_WITHOUT_GROUP, Limits, Schema, Scratch, TIMESTAMP_SECONDS, scan};

use fields::{Fields, FreeFormBudget};
use refusal::Refusal;
use value::{NIL, declared_length, elements, head_of, integer, is_array, is_map, pairs};

use scratch_writer::ScratchWriter;

pub use value::Value;

/// Why an event, or another part of a batch, is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Reason {
    Oversized,
    Malformed,
    NotABatch,
    TooManyEvents,
    TooManyHashes,
    TooManyFields,
    TooDeep,
    UnknownTag,
    BadField,
    BadTimestamp,
    BadRank,
    /// The last entry of a full list: it represents all further rejected parts.
    More,
}

impl Reason {
    /// The word for the reason in metrics and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Oversized => "oversized",
            Self::Malformed => "malformed",
            Self::NotABatch => "not-a-batch",
            Self::TooManyEvents => "too-many-events",
            Self::TooManyHashes => "too-many-hashes",
            Self::TooManyFields => "too-many-fields",
            Self::TooDeep => "too-deep",
            Self::UnknownTag => "unknown-tag",
            Self::BadField => "bad-field",
            Self::BadTimestamp => "bad-timestamp",
            Self::BadRank => "bad-rank",
            Self::More => "more",
        }
    }
}

impl std::fmt::Display for Reason {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(self.as_str())
    }
}

/// Maximum number of bytes of a rejected part that are kept for diagnosis.
const MAX_RAW_BYTES: usize = 256;

/// A rejected part of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rejected {
    /// Why the part was rejected.
    pub reason: Reason,
    /// The reason as a sentence for operators. Peers can choose parts of it.
    pub detail: String,
    /// Index of the rejected event in its batch; None for the batch itself, its timestamp or its rank.
    pub index: Option<usize>,
    /// The first bytes of the rejected part.
    pub raw: Vec<u8>,
    /// Number of rejections that this entry represents; 1 unless the reason is `More`.
    pub count: usize,
}

impl Rejected {
    /// Whether this rejection loses events. The rejection of a timestamp or of a rank loses no event.
    pub fn loses_events(&self) -> bool {
        self.index.is_some() || !matches!(self.reason, Reason::BadTimestamp | Reason::BadRank)
    }
}

/// A token id in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Token {
    /// A number, sent as an integer or as decimal text.
    Single(Int),
    /// A token and its successor (SGLang under EAGLE).
    Pair(Box<[Int; 2]>),
    /// The first token of a multimodal item, which TensorRT-LLM replaces by the item's digest: 64 hexadecimal digits in lower case.
    Item(String),
}

impl Token {
    /// A token that no prompt has.
    pub const INVALID: Self = Self::Single(Int::INVALID);
}

/// A heartbeat: the state of a publisher. Only kvevents sends heartbeats.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct Heartbeat {
    /// State digest of the stream after the heartbeat's batch, as 32 hexadecimal digits; None if the publisher cannot compute it.
    pub digest: Option<String>,
    /// Maximum number of seconds until the next heartbeat.
    pub every: f64,
    pub trust: String,
    pub reason: String,
    pub incarnation: u64,
    /// Digest of the engine's own cache, as `kvevents.events.Heartbeat` defines it.
    pub attestation: Option<u64>,
}

/// Hashes of blocks, as numbers. The digests, if all hashes were sent as digests; the number of a digest is its last 8 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Hashes {
    pub values: Vec<u64>,
    pub digests: Option<Vec<Vec<u8>>>,
}

/// Stored blocks; fields as in `kvevents.events.BlockStored`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct BlockStored {
    pub block_hashes: Hashes,
    pub parent_block_hash: Option<u64>,
    pub parent_block_digest: Option<Vec<u8>>,
    pub token_ids: Vec<Token>,
    pub block_size: i128,
    pub lora_id: Option<i128>,
    pub medium: Option<String>,
    pub lora_name: Option<String>,
    /// Extra keys by block; None if the field is nil.
    pub extra_keys: Option<Vec<Option<Vec<Value>>>>,
    pub group_idx: Option<i128>,
    pub kv_cache_spec_kind: Option<String>,
    pub kv_cache_spec_sliding_window: Option<i128>,
    pub locality: Option<String>,
    pub ownership: Option<String>,
    pub lookahead_token_ids: Option<Vec<Vec<i128>>>,
    pub cache_salt: Option<String>,
    pub block_keys: Option<Vec<u64>>,
    /// The property of the same name in `scan::Event`.
    pub lacks_group: bool,
    /// Names and values of texts that engines send but that the index does not use (`scan::layouts::unused_texts`). None if the event lacks
    /// the field.
    pub unused_texts: Vec<(&'static str, Option<String>)>,
    /// Names and values of fields that this release does not know; in array events, a position represents the name.
    pub unknown_fields: Vec<(String, Value)>,
}

/// Removed blocks; fields as in `kvevents.events.BlockRemoved`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct BlockRemoved {
    pub block_hashes: Hashes,
    pub medium: Option<String>,
    pub group_idx: Option<i128>,
    pub locality: Option<String>,
    pub ownership: Option<String>,
    pub heartbeat: Option<Heartbeat>,
    /// The same property as in `BlockStored`.
    pub unknown_fields: Vec<(String, Value)>,
}

/// An event of a batch.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Event {
    Stored(Box<BlockStored>),
    Removed(Box<BlockRemoved>),
    /// The cache was cleared: all of it, or only the tier and the group in the fields `medium` and `group_idx`.
    Cleared(Vec<(String, Value)>),
}

/// A decoded batch.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Batch {
    /// Seconds since the epoch; 0 if the timestamp could not be read.
    pub ts: f64,
    /// Data-parallel rank that the batch states.
    pub rank: Option<i128>,
    /// The events that could be read, in the order of the batch.
    pub events: Vec<Event>,
    /// The rejected events and fields.
    pub rejected: Vec<Rejected>,
}

/// The result of reading a payload, except the contents of its scratch.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct ReadPayload<'a> {
    /// The bytes to which the spans of the events refer: the payload itself if the scanner has read it.
    pub bytes: Cow<'a, [u8]>,
    /// The rejected events and fields.
    pub rejected: Vec<Rejected>,
    /// The last heartbeat of the batch. The digest covers the whole batch and all earlier batches.
    pub heartbeat: Option<Box<Heartbeat>>,
}

/// Decodes a batch in any form. A payload that is not a batch has no events.
pub fn decode(payload: &[u8], limits: &Limits) -> Batch {
    let mut events = Vec::new();
    let batch = read_batch(payload, limits, |event| events.push(event));
    Batch { events, ..batch }
}

/// Reads a payload in any form into a scratch: by `scan` if it accepts the payload, otherwise by the tolerant decoder.
#[inline]
pub fn read<'a>(payload: &'a [u8], schema: &Schema, scratch: &mut Scratch) -> ReadPayload<'a> {
    if scan(payload, schema, scratch).is_some() {
        return ReadPayload {
            bytes: Cow::Borrowed(payload),
            ..ReadPayload::default()
        };
    }
    decode_into(payload, schema.limits(), scratch)
}

/// Decodes a batch in any form into a scratch. Each event is dropped before the next one is decoded.
#[cold]
pub fn decode_into(payload: &[u8], limits: &Limits, scratch: &mut Scratch) -> ReadPayload<'static> {
    let (mut writer, mut heartbeat) = (ScratchWriter::new(scratch), None);
    let batch = read_batch(payload, limits, |event| {
        writer.add(&event);
        if let Event::Removed(removed) = event {
            heartbeat = removed.heartbeat.or_else(|| heartbeat.take());
        }
    });
    let bytes = writer.bytes.into();
    scratch.payload_bytes = payload.len();
    (scratch.ts, scratch.rank) = (batch.ts, batch.rank.map(|rank| rank as i64));
    ReadPayload {
        bytes,
        rejected: batch.rejected,
        heartbeat: heartbeat.map(Box::new),
    }
}

/// Decodes a batch, and passes each event to `take`.
fn read_batch(payload: &[u8], limits: &Limits, mut take: impl FnMut(Event)) -> Batch {
    let mut batch = Batch::default();
    let envelope = match checked(payload, limits) {
        Ok(envelope) => envelope,
        Err(refusal) => {
            batch.rejected.push(refusal.rejected(payload, None));
            return batch;
        }
    };
    let mut more = 0;
    let mut reject = |refusal: Refusal<'_>, raw, index| {
        if batch.rejected.len() < limits.max_rejected {
            batch.rejected.push(refusal.rejected(raw, index));
        } else {
            more += 1;
        }
    };
    batch.ts = timestamp(envelope.ts).unwrap_or_else(|| {
        let words = "is neither seconds nor milliseconds since the epoch";
        reject(
            Refusal::for_value(Reason::BadTimestamp, "the timestamp", words),
            envelope.ts,
            None,
        );
        0.0
    });
    batch.rank = if head_of(envelope.rank) == 0xC0 {
        None
    } else {
        let rank = value::integer(envelope.rank);
        if rank.is_none() {
            let refusal = Refusal::for_value(Reason::BadRank, "the data-parallel rank", "is not an integer");
            reject(refusal, envelope.rank, None);
        }
        rank
    };
    let mut free = FreeFormBudget::new(limits.max_free_form_bytes);
    for (index, raw) in envelope.events.into_iter().enumerate() {
        match event(raw, limits, &mut free, false) {
            Ok(event) => event.into_iter().for_each(&mut take),
            Err(refusal) => reject(refusal, raw, Some(index)),
        }
    }
    if more > 0 {
        batch.rejected.push(Rejected {
            reason: Reason::More,
            detail: format!("{more} more were set aside"),
            index: None,
            raw: Vec::new(),
            count: more,
        });
    }
    batch
}

/// Maximum number of bytes of a payload, whatever the configured limits: for each byte of a payload, `ScratchWriter` writes up to 30 bytes,
/// and its positions have 32 bits.
const MAX_PAYLOAD_BYTES: usize = u32::MAX as usize / 32;

fn checked<'a>(payload: &'a [u8], limits: &Limits) -> Result<Envelope<'a>, Refusal<'a>> {
    let (length, limit) = (payload.len(), limits.max_payload_bytes.min(MAX_PAYLOAD_BYTES));
    if length > limit {
        let unit = "bytes; the limit max_payload_bytes is";
        return Err(Refusal::exceeding(Reason::Oversized, "the payload", length, unit, limit));
    }
    envelope(payload, limits)
}

/// A batch that is divided into parts, which are not decoded yet.
struct Envelope<'a> {
    ts: &'a [u8],
    events: Vec<&'a [u8]>,
    rank: &'a [u8],
}

/// Returns the elements of an array; rejects an array of more than `limit` elements with the reason `too_many`.
fn bounded_elements<'a>(
    raw: &'a [u8],
    what: &'static str,
    limit: usize,
    too_many: Reason,
) -> Result<Vec<&'a [u8]>, Refusal<'a>> {
    check_length(raw, what, limit, too_many)?;
    elements(raw).map_err(|reason| Refusal::for_value(reason, what, "is not an array"))
}

/// The names and values of a map.
fn bounded_pairs<'a>(raw: &'a [u8], what: &'static str, limit: usize) -> Result<Vec<(&'a str, &'a [u8])>, Refusal<'a>> {
    check_length(raw, what, limit, Reason::TooManyFields)?;
    pairs(raw).map_err(|reason| Refusal::for_value(reason, what, "has a key that is not a string"))
}

fn check_length<'a>(raw: &[u8], what: &'static str, limit: usize, too_many: Reason) -> Result<(), Refusal<'a>> {
    let count = declared_length(raw);
    if count > limit {
        return Err(Refusal::exceeding(too_many, what, count, "elements; the limit is", limit));
    }
    Ok(())
}

/// Divides a batch, which is an array of at least 2 elements or a map, into its parts.
fn envelope<'a>(payload: &'a [u8], limits: &Limits) -> Result<Envelope<'a>, Refusal<'a>> {
    let (head, what) = (head_of(payload), "the batch");
    let (ts, events, rank) = if is_map(head) {
        let fields = bounded_pairs(payload, what, limits.max_fields)?;
        let find = |wanted: &str| fields.iter().find(|(name, _)| *name == wanted).map(|(_, raw)| *raw);
        let ranks = ["data_parallel_rank", "attn_dp_rank"].map(find);
        let rank = ranks.into_iter().flatten().find(|raw| head_of(raw) != 0xC0);
        (find("ts"), find("events"), rank)
    } else if is_array(head) {
        let parts = bounded_elements(payload, what, limits.max_fields, Reason::NotABatch)?;
        (parts.first().copied(), parts.get(1).copied(), parts.get(2).copied())
    } else {
        return Err(Refusal::new(Reason::NotABatch, "a batch is an array or a map"));
    };
    let events = events.filter(|raw| is_array(head_of(raw)));
    let (Some(ts), Some(events)) = (ts, events) else {
        let words = "a batch is [ts, events, ...] or a map with ts and events";
        return Err(Refusal::new(Reason::NotABatch, words));
    };
    Ok(Envelope {
        ts,
        events: bounded_elements(events, "the list of events", limits.max_events, Reason::TooManyEvents)?,
        rank: rank.unwrap_or(NIL),
    })
}

/// Seconds since the epoch. Peers may send milliseconds instead (Mooncake RFC #1527).
fn timestamp(raw: &[u8]) -> Option<f64> {
    let sent = match value::value(raw, 0, &mut 0).ok()? {
        Value::Int(value) => value as f64,
        Value::Float(value) => value,
        _ => return None,
    };
    if TIMESTAMP_SECONDS.contains(&sent) {
        return Some(sent);
    }
    (sent > *TIMESTAMP_SECONDS.end() && sent <= TIMESTAMP_SECONDS.end() * 1000.0).then_some(sent / 1000.0)
}

/// Decodes an event. Returns None if the event is of a neutral kind, which changes no block.
fn event<'a>(
    raw: &'a [u8],
    limits: &Limits,
    free: &mut FreeFormBudget,
    is_wrapped: bool,
) -> Result<Option<Event>, Refusal<'a>> {
    let head = head_of(raw);
    if !is_wrapped && let Some(inner) = value::bin(raw) {
        // llm-d's storage connector sends each event as a bin, and 0 for "no parent".
        let mut event = event(inner, limits, free, true)?;
        if let Some(Event::Stored(stored)) = &mut event
            && stored.parent_block_hash == Some(0)
        {
            stored.parent_block_hash = None;
        }
        return Ok(event);
    }
    let (tag, fields) = if is_array(head) {
        array_fields(raw, limits)?
    } else if is_map(head) {
        map_fields(raw, limits)?
    } else {
        return Err(Refusal::new(Reason::Malformed, "an event is an array or a map"));
    };
    if NEUTRAL_KINDS.contains(&tag) {
        return Ok(None);
    }
    let fields = Fields::new(fields, limits, free);
    let event = match tag {
        "BlockStored" => fields.stored().map(|stored| Event::Stored(Box::new(stored))),
        "BlockRemoved" => fields.removed().map(|removed| Event::Removed(Box::new(removed))),
        "AllBlocksCleared" => fields.cleared().map(Event::Cleared),
        _ => Err(Refusal::unknown_tag(tag)),
    };
    let mut event = event?;
    if let Event::Stored(stored) = &mut event {
        // llm-d's storage connector holds each block once.
        stored.lacks_group = !is_wrapped && is_array(head) && LENGTHS_WITHOUT_GROUP.contains(&declared_length(raw));
    }
    Ok(Some(event))
}

type Named<'a> = Vec<(Cow<'a, str>, &'a [u8])>;

fn array_fields<'a>(raw: &'a [u8], limits: &Limits) -> Result<(&'a str, Named<'a>), Refusal<'a>> {
    let items = bounded_elements(raw, "the event", limits.max_fields, Reason::TooManyFields)?;
    let tag = tag_of(items.first().copied().unwrap_or(NIL))?;
    let names: &[&'static str] = match tag {
        "BlockStored" => STORED_ARRAY,
        "BlockRemoved" => REMOVED_ARRAY,
        "AllBlocksCleared" => CLEARED_ARRAY,
        _ => &[],
    };
    let name = |at: usize| match names.get(at) {
        Some(&name) => Cow::Borrowed(name),
        None => Cow::Owned((at + 1).to_string()),
    };
    let fields = items.iter().skip(1).enumerate().map(|(at, raw)| (name(at), *raw));
    Ok((tag, fields.collect()))
}

fn map_fields<'a>(raw: &'a [u8], limits: &Limits) -> Result<(&'a str, Named<'a>), Refusal<'a>> {
    let fields = bounded_pairs(raw, "the event", limits.max_fields)?;
    let find = |wanted: &str| fields.iter().find(|(name, _)| *name == wanted).map(|(_, raw)| *raw);
    let mooncake = match find("event_type").map(tag_of).transpose()? {
        Some("stored") => Some("BlockStored"),
        Some("removed") => Some("BlockRemoved"),
        Some("cleared") => Some("AllBlocksCleared"),
        _ => None,
    };
    let tag = match mooncake {
        Some(tag) => tag,
        None => tag_of(find("type").unwrap_or(NIL))?,
    };
    let is_tag = |name: &str| name == "type" || mooncake.is_some() && name == "event_type";
    let fields = fields.into_iter().filter(|(name, _)| !is_tag(name));
    let fields = fields.map(|(name, raw)| (Cow::Borrowed(name), raw)).collect();
    Ok((
        tag,
        if mooncake.is_some() {
            from_mooncake(tag, fields)?
        } else {
            fields
        },
    ))
}

/// Converts fields with the names of Mooncake RFC #1527 to fields with vLLM's names. If a field occurs under both names, the one with the
/// name of the RFC counts; Mooncake's compatibility mode has added the other.
///
/// <https://github.com/kvcache-ai/Mooncake/pull/2214>. Tokens, parent and block size are nil if the publisher does not know them. If a store
/// begins within a prompt (`base_block_idx`) and its parent is unknown, its tokens are dropped, since its prefix is unknown. An event is
/// rejected if its publisher could not read a hash from the object's key, since such an event names no block.
fn from_mooncake<'a>(tag: &str, mut fields: Named<'a>) -> Result<Named<'a>, Refusal<'a>> {
    let names = [
        ("seq_hashes", "block_hashes"),
        ("parent_hash", "parent_block_hash"),
        ("additional_salt", "cache_salt"),
    ];
    for (theirs, ours) in names {
        if let Some(at) = fields.iter().position(|(name, _)| name == theirs) {
            let raw = fields.remove(at).1;
            fields.retain(|(name, _)| name != ours);
            fields.push((Cow::Borrowed(ours), raw));
        }
    }
    fields.retain(|(_, raw)| head_of(raw) != 0xC0);
    let names_no_block = |(name, raw): &(Cow<'_, str>, &[u8])| name == "block_hashes" && *raw == [0x90];
    if tag != "AllBlocksCleared" && fields.iter().any(names_no_block) {
        let words = "is empty: the object key contains no hash";
        return Err(Refusal::for_value(Reason::BadField, "seq_hashes", words));
    }
    if tag == "BlockStored" {
        let find = |wanted: &str| fields.iter().find(|(name, _)| name == wanted).map(|(_, raw)| *raw);
        let is_within_prompt = find("base_block_idx").is_some_and(|raw| integer(raw) != Some(0));
        if is_within_prompt && find("parent_block_hash").is_none() {
            fields.retain(|(name, _)| name != "token_ids");
        }
        for (name, raw) in [("token_ids", &[0x90][..]), ("block_size", &[0])] {
            if fields.iter().all(|(known, _)| known != name) {
                fields.push((Cow::Borrowed(name), raw));
            }
        }
    }
    Ok(fields)
}

fn tag_of(raw: &[u8]) -> Result<&str, Refusal<'_>> {
    let text = value::text(raw).ok().flatten();
    text.ok_or(Refusal::for_value(Reason::UnknownTag, "the event type", "is not a string"))
}
