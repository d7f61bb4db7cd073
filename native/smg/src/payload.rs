//! Encodes batches as payloads of a vLLM publisher, with all fields of map events.

use serde::Serialize;

use crate::messages::{Batch, Block, Data, Key, Removed, Stored};

/// The medium of each `KvCacheTier`. The first value of `KvCacheTier` is an unspecified tier.
const MEDIA: [Option<&str>; 5] = [None, Some("GPU"), Some("CPU"), Some("DISK"), Some("EXTERNAL")];
/// `KV_CACHE_LOCALITY_REMOTE`.
const REMOTE: i32 = 2;

#[derive(Serialize)]
#[serde(tag = "type")]
enum Event<'a> {
    BlockStored(BlockStored<'a>),
    BlockRemoved(BlockRemoved<'a>),
    AllBlocksCleared {},
}

#[derive(Serialize)]
struct BlockStored<'a> {
    block_hashes: Vec<u64>,
    parent_block_hash: Option<u64>,
    token_ids: Vec<u32>,
    block_size: i32,
    lora_id: Option<i64>,
    medium: Option<&'a str>,
    lora_name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extra_keys: Option<Vec<Option<Vec<ExtraKey<'a>>>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group_idx: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_cache_spec_kind: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_cache_spec_sliding_window: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    locality: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ownership: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<&'a str>,
}

#[derive(Serialize)]
struct BlockRemoved<'a> {
    block_hashes: Vec<u64>,
    medium: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group_idx: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    locality: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ownership: Option<&'a str>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum ExtraKey<'a> {
    Text(&'a str),
    Number(i64),
    Blob(#[serde(serialize_with = "as_bytes")] &'a [u8]),
    Item(&'a str, i64),
}

fn as_bytes<S: serde::Serializer>(bytes: &&[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_bytes(bytes)
}

/// Returns the payload of a batch; None if the batch has an event of an unknown kind.
pub fn encode(batch: &Batch) -> Option<Vec<u8>> {
    let mut events = Vec::with_capacity(batch.events.len());
    for event in &batch.events {
        match &event.data {
            Some(Data::Stored(stored)) => stores(stored, &mut events),
            Some(Data::Removed(removed)) => events.push(Event::BlockRemoved(removal(removed))),
            Some(Data::Cleared(_)) => events.push(Event::AllBlocksCleared {}),
            None => return None,
        }
    }
    let mut payload = Vec::new();
    let mut to = rmp_serde::Serializer::new(&mut payload).with_struct_map();
    let batch = (batch.timestamp, events, batch.dp_rank);
    batch.serialize(&mut to).ok()?;
    Some(payload)
}

/// Adds a store for each run of blocks with the same size, LoRA and level, since a store in vLLM's form has only one of each.
fn stores<'a>(stored: &'a Stored, events: &mut Vec<Event<'a>>) {
    let kind = |block: &Block| (block.block_size, block.lora_id, block.cache_level);
    let mut parent = stored.parent_block_hash.map(unsigned);
    for run in stored.blocks.chunk_by(|a, b| kind(a) == kind(b)) {
        let Some((first, last)) = run.first().zip(run.last()) else {
            continue;
        };
        let keys = || run.iter().map(extra_keys).collect();
        events.push(Event::BlockStored(BlockStored {
            block_hashes: run.iter().map(|block| unsigned(block.block_hash)).collect(),
            parent_block_hash: parent,
            token_ids: run.iter().flat_map(|block| &block.token_ids).copied().collect(),
            block_size: first.block_size,
            lora_id: first.lora_id,
            medium: medium(stored.medium.as_deref(), stored.tier, first.cache_level),
            lora_name: stored.lora_name.as_deref(),
            extra_keys: run.iter().any(|block| !block.extra_keys.is_empty()).then(keys),
            group_idx: stored.group_idx,
            kv_cache_spec_kind: stored.kv_cache_spec_kind.as_deref(),
            kv_cache_spec_sliding_window: stored.kv_cache_spec_sliding_window,
            locality: locality(stored.locality),
            ownership: stored.ownership.as_deref(),
            cache_salt: stored.cache_salt.as_deref(),
        }));
        parent = Some(unsigned(last.block_hash));
    }
}

fn removal(removed: &Removed) -> BlockRemoved<'_> {
    BlockRemoved {
        block_hashes: removed.block_hashes.iter().copied().map(unsigned).collect(),
        medium: medium(removed.medium.as_deref(), removed.tier, removed.cache_level),
        group_idx: removed.group_idx,
        locality: locality(removed.locality),
        ownership: removed.ownership.as_deref(),
    }
}

/// Returns a hash as an unsigned number, as engines send it. The servicer sends its lower 64 bits as a signed number.
fn unsigned(hash: i64) -> u64 {
    hash.cast_unsigned()
}

fn medium(medium: Option<&str>, tier: Option<i32>, level: Option<i32>) -> Option<&str> {
    let tier = tier.or(level.map(|level| level.saturating_add(1)));
    medium.or_else(|| MEDIA.get(usize::try_from(tier?).ok()?).copied().flatten())
}

fn locality(locality: Option<i32>) -> Option<&'static str> {
    (locality == Some(REMOTE)).then_some("REMOTE")
}

fn extra_keys(block: &Block) -> Option<Vec<ExtraKey<'_>>> {
    let keys = block.extra_keys.iter().filter_map(|each| each.key.as_ref());
    let keys: Vec<_> = keys
        .map(|key| match key {
            Key::Text(text) => ExtraKey::Text(text),
            Key::Blob(bytes) => ExtraKey::Blob(bytes),
            Key::Number(number) => ExtraKey::Number(*number),
            Key::Multimodal(item) => ExtraKey::Item(&item.identifier, item.offset),
        })
        .collect();
    (!keys.is_empty()).then_some(keys)
}
