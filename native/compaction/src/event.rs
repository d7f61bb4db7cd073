//! Events with all data that a snapshot must contain. Their data are borrowed from a payload, or owned in an export.

use std::borrow::Cow;

use kvevents_index::apply::PayloadEvents;
use kvevents_index::groups::engine_hash::MAX_LOOKAHEAD;
use kvevents_index::rules::location::owned;
pub use kvevents_index::rules::location::{Location, Text};
use kvevents_index::wire::msgpack::{Reader, write_array};
use kvevents_index::wire::scan::{Event, first_ints};

/// Maximum number of nested containers in the extra keys of one block.
const EXTRA_NESTING: usize = 4;

fn borrowed<'a>(text: &'a Text<'_>) -> Text<'a> {
    text.as_deref().map(Cow::Borrowed)
}

/// The namespace of a block, as announced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct Namespace<'a> {
    pub lora_id: Option<i64>,
    pub lora_name: Text<'a>,
    pub cache_salt: Text<'a>,
    /// The extra keys of this block, as a list in msgpack.
    pub extra_keys: Text<'a>,
}

impl Namespace<'_> {
    /// Returns a copy with owned data.
    pub fn to_static(&self) -> Namespace<'static> {
        Namespace {
            lora_id: self.lora_id,
            lora_name: owned(&self.lora_name),
            cache_salt: owned(&self.cache_salt),
            extra_keys: owned(&self.extra_keys),
        }
    }

    /// Returns a copy of the namespace without extra keys.
    pub fn without_extra_keys(&self) -> Namespace<'_> {
        Namespace {
            lora_id: self.lora_id,
            lora_name: borrowed(&self.lora_name),
            cache_salt: borrowed(&self.cache_salt),
            extra_keys: None,
        }
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        let texts = [&self.lora_name, &self.cache_salt, &self.extra_keys];
        texts.into_iter().flatten().map(|text| text.len() + 16).sum()
    }
}

/// A store; fields as in `scan::Event`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Store<'a> {
    pub hashes: Cow<'a, [u64]>,
    pub parent: Option<u64>,
    /// Token ids; under EAGLE, pairs of token ids, one after another.
    pub tokens: Cow<'a, [u32]>,
    pub pairs: bool,
    /// Number of leading blocks whose keys can be computed. None if the number of tokens or keys does not match the number of hashes.
    pub keyable: Option<usize>,
    /// Keys, if the store has keys instead of tokens.
    pub keys: Option<Cow<'a, [u64]>>,
    pub block_size: u64,
    pub location: Location<'a>,
    /// Kind of attention of the group.
    pub kind: Text<'a>,
    /// Sliding window of the group, in tokens.
    pub window: Option<i64>,
    /// The namespace of the blocks, without their extra keys.
    pub namespace: Namespace<'a>,
    /// The extra keys as msgpack: a list or nil for each block.
    pub extra_keys: Text<'a>,
    /// Number of tokens after each block that the block's hash also covers; 0 if the store does not list them.
    pub lookahead: usize,
}

impl Store<'_> {
    /// Whether the store has tokens or keys for its blocks.
    pub fn has_content(&self) -> bool {
        !self.tokens.is_empty() || self.keys.is_some()
    }
}

/// One event of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "nearly all events are stores")]
pub enum ExportedEvent {
    /// A store of blocks, each of which is the parent of the next block.
    Stored(Store<'static>),
    /// A removal of one copy of each of these hashes at this location.
    Removed(Vec<u64>, Location<'static>),
    /// A clear that names no tier: earlier copies below the device might be gone.
    Cleared,
}

/// Returns the store that an event of a payload describes.
pub fn store_of<'a>(read: &'a PayloadEvents<'_>, event: &Event) -> Store<'a> {
    let text = |span| read.bytes(span).map(Cow::Borrowed);
    let mut location = read.location(event);
    if event.may_be_copy() {
        // The group is set even if the engine names none. In exported maps, a repeated store counts as another copy only if it names a
        // group. A block without a group is in group 0.
        location.group.get_or_insert(0);
    }
    Store {
        hashes: event.hashes.slice(&read.scratch.hashes).into(),
        parent: event.parent_hash(),
        tokens: event.tokens.slice(&read.scratch.tokens).into(),
        pairs: event.pairs,
        keyable: event.keyable_blocks(|| !location.is_on_device()),
        keys: event.keyed.then(|| event.keys.slice(&read.scratch.hashes).into()),
        block_size: event.block_size,
        location,
        kind: text(event.spec_kind),
        window: event.window,
        namespace: Namespace {
            lora_id: event.lora_id,
            lora_name: text(event.lora_name),
            cache_salt: text(event.cache_salt),
            extra_keys: None,
        },
        extra_keys: text(event.extra_keys),
        lookahead: lookahead_of(read.bytes(event.lookahead)),
    }
}

fn lookahead_of(raw: Option<&[u8]>) -> usize {
    let mut first = Vec::new();
    raw.into_iter().for_each(|raw| first_ints(raw, &mut first));
    first.len().min(MAX_LOOKAHEAD)
}

/// Returns the extra keys of each block; None for a block whose entry is nil. Returns None if `raw` is nested too deeply.
pub fn split_extra_keys(raw: Option<&[u8]>) -> Option<Vec<Option<&[u8]>>> {
    let mut found = Vec::new();
    let Some(raw) = raw else { return Some(found) };
    let mut reader = Reader::new(raw, 0);
    for _ in 0..reader.array()? {
        let start = reader.at;
        found.push(if reader.nil() {
            None
        } else {
            reader.skip(EXTRA_NESTING)?;
            Some(&raw[start..reader.at])
        });
    }
    Some(found)
}

/// Encodes the extra keys of several blocks as the field of one event; None if no block has extra keys.
pub fn join_extra_keys<'a>(blocks: impl ExactSizeIterator<Item = Option<&'a [u8]>> + Clone) -> Option<Vec<u8>> {
    blocks.clone().any(|block| block.is_some()).then(|| encode_extra_keys(blocks))
}

/// Encodes the extra keys of each block; nil for a block without extra keys.
pub fn encode_extra_keys<'a>(blocks: impl ExactSizeIterator<Item = Option<&'a [u8]>>) -> Vec<u8> {
    let mut raw = Vec::new();
    write_array(blocks.len(), &mut raw);
    for block in blocks {
        raw.extend_from_slice(block.unwrap_or(&[0xC0]));
    }
    raw
}
