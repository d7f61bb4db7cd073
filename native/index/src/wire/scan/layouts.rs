//! The layouts of events in all dialects. `kvevents.wire.dialects` has the same layouts; a Python test compares the two modules.

use super::Field;

/// Fields of array stores after the tag, in the longest form of any release (vLLM 0.22). All other forms are prefixes of this form.
pub const STORED_ARRAY: &[&str] = &[
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
];
const STORED_MAP: &[&str] = &[
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
    "lookahead_token_ids",
    "cache_salt",
    "block_keys",
    "block_digests",
    "parent_block_digest",
];
/// Fields of array removals after the tag, followed by the fields that only kvevents sends.
pub const REMOVED_ARRAY: &[&str] = &["block_hashes", "medium", "group_idx", "heartbeat"];
const REMOVED_MAP: &[&str] = &[
    "block_hashes",
    "medium",
    "group_idx",
    "locality",
    "ownership",
    "heartbeat",
    "block_digests",
];
/// Fields of array clears after the tag; only kvevents sends these fields.
pub const CLEARED_ARRAY: &[&str] = &["medium", "group_idx"];
const CLEARED_MAP: &[&str] = &["medium", "group_idx"];
/// Tags of events that do not change which blocks are resident. `kvevents.wire.dialects.NEUTRAL_KINDS` has the same tags.
pub const NEUTRAL_KINDS: &[&str] = &["BlockInactive"];

/// For each event: its tag, the fields of its array form in wire order, and the keys of its map form without `type`.
pub const LAYOUTS: [(&str, &[&str], &[&str]); 3] = [
    ("BlockStored", STORED_ARRAY, STORED_MAP),
    ("BlockRemoved", REMOVED_ARRAY, REMOVED_MAP),
    ("AllBlocksCleared", CLEARED_ARRAY, CLEARED_MAP),
];

/// Returns the role of a field in the scanner. A field that the index does not use has an `Ignored` role: the scanner checks its type and
/// skips it.
pub(super) fn field(name: &str) -> Result<Field, String> {
    Ok(match name {
        "block_hashes" => Field::BlockHashes,
        "parent_block_hash" => Field::Parent,
        "token_ids" => Field::TokenIds,
        "block_size" => Field::BlockSize,
        "lora_id" => Field::LoraId,
        "medium" => Field::Medium,
        "lora_name" => Field::LoraName,
        "extra_keys" => Field::ExtraKeys,
        "group_idx" => Field::Group,
        "kv_cache_spec_kind" => Field::SpecKind,
        "kv_cache_spec_sliding_window" => Field::Window,
        "locality" => Field::Locality,
        "ownership" => Field::Ownership,
        "cache_salt" => Field::CacheSalt,
        "session_id" => Field::IgnoredText,
        "lookahead_token_ids" => Field::Lookahead,
        "block_keys" => Field::BlockKeys,
        "block_digests" | "heartbeat" | "parent_block_digest" | "unknown_fields" => Field::IgnoredNil,
        _ => return Err(format!("unknown field {name}")),
    })
}

/// The names of text fields of stores that engines send but that the index does not use.
pub fn unused_texts() -> impl Iterator<Item = &'static str> {
    let names = STORED_MAP.iter().copied();
    names.filter(|name| matches!(field(name), Ok(Field::IgnoredText)))
}
