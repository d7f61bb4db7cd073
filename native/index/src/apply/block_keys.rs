//! Computes the keys of the blocks of a store from the store's tokens and extra keys.

use std::sync::LazyLock;

use super::{EventHashes, PayloadEvents};
use crate::groups::GroupKind;
use crate::keys::{self, Scheme};
use crate::wire::decode;
use crate::wire::scan::{Event, Extra, Id, Kind, Limits, Schema, Scratch, extra_keys};

/// The leading blocks of a store with tokens: all blocks before the first one whose key cannot be computed.
pub(super) struct TokenStore<'a> {
    pub(super) hashes: &'a [u64],
    pub(super) tokens: &'a [u32],
    pub(super) pairs: bool,
    pub(super) scheme: Scheme,
    pub(super) lora: u64,
    /// The salt of the first block; None if the first block inherits its parent's salt.
    pub(super) salt: Option<u64>,
    /// The salt in the event's field `cache_salt`.
    pub(super) own_salt: Option<u64>,
    /// Whether the event lacks the field for salts and other extra keys.
    pub(super) is_unkeyed: bool,
    pub(super) placement: u16,
}

impl<'a> TokenStore<'a> {
    /// Reads the event's blocks, without their salt and placement.
    pub(super) fn read(read: &PayloadEvents<'a>, event: &Event) -> Result<Self, &'static str> {
        let is_below_device = || !read.location(event).is_on_device();
        let count = event.keyable_blocks(is_below_device).ok_or("length-mismatch")?;
        let hashes = &event.hashes.slice(&read.scratch.hashes)[..count];
        if count == 0 && event.hashes.length > 0 {
            return Err("bad-token");
        }
        let keyed = (count * event.block_size as usize) << u32::from(event.pairs);
        let tokens = &event.tokens.slice(&read.scratch.tokens)[..keyed];
        let lora = keys::lora(read.bytes(event.lora_name), event.lora_id);
        let scheme = Scheme {
            size: event.block_size as u32,
            eagle: event.pairs,
        };
        Ok(Self {
            hashes,
            tokens,
            pairs: event.pairs,
            scheme,
            lora,
            salt: None,
            own_salt: read.bytes(event.cache_salt).and_then(keys::stated_salt),
            is_unkeyed: event.extra_keys.is_none() && event.cache_salt.is_none(),
            placement: 0,
        })
    }

    /// Returns an error if the keys of some blocks of the event cannot be computed.
    pub(super) fn check_whole(&self, event: &Event) -> Result<(), &'static str> {
        let is_whole = self.hashes.len() == event.hashes.length as usize;
        if is_whole { Ok(()) } else { Err("bad-token") }
    }

    /// Returns the blocks before the block `end`.
    pub(super) fn up_to(&self, end: usize) -> Self {
        let tokens = (end * self.scheme.size as usize) << u32::from(self.pairs);
        Self {
            hashes: &self.hashes[..end],
            tokens: &self.tokens[..tokens],
            ..*self
        }
    }

    /// Tokens that the hash of block `at` covers.
    pub(super) fn window<'b>(&'b self, at: usize, buffer: &'b mut Vec<u32>) -> &'b [u32] {
        let size = self.scheme.size as usize;
        if !self.pairs {
            return &self.tokens[at * size..][..size];
        }
        let pairs = &self.tokens[at * size * 2..][..size * 2];
        buffer.clear();
        buffer.extend(pairs.iter().step_by(2));
        buffer.push(pairs[pairs.len() - 1]);
        buffer
    }
}

/// Keys of the blocks of one store.
#[derive(Debug, Default)]
pub struct StoredKeys {
    /// Keys of all blocks before the first one that has no key.
    pub keys: Vec<u64>,
    /// Part of the seed that the event's own salt contributes; 0 for a first block without a salt, None if the salt is that of the parent.
    pub salt: Option<u64>,
    /// Why the blocks after those in `keys` have no key; None if all blocks have one.
    pub unkeyed: Option<&'static str>,
}

/// Returns the keys of the blocks of a payload that consists of one store. `parent` has the key of the parent of the first block, and the
/// part of the seed that the parent's salt contributes. Returns None for any other payload.
pub fn stored_keys(payload: &[u8], parent: Option<(u64, u64)>) -> Option<StoredKeys> {
    static SCHEMA: LazyLock<Option<Schema>> = LazyLock::new(|| Some(Schema::new(Limits::default()).ok()?.unlimited()));
    let (mut scratch, mut work, schema) = (Scratch::default(), EventHashes::default(), SCHEMA.as_ref()?);
    let batch = decode::read(payload, schema, &mut scratch);
    let read = PayloadEvents {
        bytes: &batch.bytes,
        scratch: &scratch,
    };
    let [event] = &scratch.events[..] else { return None };
    if event.kind != Kind::Stored || !batch.rejected.is_empty() {
        return None;
    }
    let event = &*event.without_zero_parent(|| parent.is_some());
    let salt = salt_of(&read, event, &mut work.extras);
    let unkeyed = keys_after(&read, event, salt, parent, &mut work).err();
    Some(StoredKeys {
        salt,
        unkeyed,
        keys: work.keys,
    })
}

/// Computes the keys of the blocks of a store, and writes them into `work`.
fn keys_after(
    read: &PayloadEvents<'_>,
    event: &Event,
    salt: Option<u64>,
    parent: Option<(u64, u64)>,
    work: &mut EventHashes,
) -> Result<(), &'static str> {
    if !GroupKind::from_spec(read.bytes(event.spec_kind), None).is_some_and(GroupKind::is_full) {
        return Err("other-group");
    }
    if event.keyed {
        event.size_of_keyed().ok_or("length-mismatch")?;
        work.keys.extend(event.keys.slice(&read.scratch.hashes));
        return Ok(());
    }
    if event.tokens.length == 0 {
        return Err("no-tokens");
    }
    let store = TokenStore::read(read, event)?;
    let parent = event.parent_hash().map(|_| parent.ok_or("parent-unknown")).transpose()?;
    let seed = keys::seed(store.lora, salt.or(parent.map(|(_, salt)| salt)).unwrap_or(0));
    hash_all(&store, 0, parent.map(|(key, _)| key), seed, work);
    store.check_whole(event)
}

/// Returns the part of the seed that the salt of an event contributes; 0 for a first block without a salt. Writes the event's other extra
/// keys into `extras`.
pub(super) fn salt_of(read: &PayloadEvents<'_>, event: &Event, extras: &mut Vec<(usize, u64)>) -> Option<u64> {
    let is_root = event.parent_hash().is_none();
    let bare = extras_of(read.extra_keys(event), read.bytes(event.lora_name), is_root, extras);
    let own = read.bytes(event.cache_salt).and_then(keys::stated_salt);
    if is_root { Some(own.or(bare).unwrap_or(0)) } else { own }
}

/// Writes the local hashes and the keys of all blocks from the index `first` on into `work`.
pub(super) fn hash_all(store: &TokenStore<'_>, first: usize, parent: Option<u64>, seed: u64, work: &mut EventHashes) {
    let count = store.hashes.len() - first;
    let mut roller = keys::Roller::new(parent, count, &mut work.locals, &mut work.keys);
    let size = store.scheme.size as usize;
    if work.extras.is_empty() && !store.pairs {
        for block in store.tokens[first * size..].chunks_exact(size) {
            roller.push(keys::local(block, seed));
        }
    } else {
        for at in first..store.hashes.len() {
            let mut extras: Vec<u64> = extras_at(&work.extras, at).collect();
            roller.push(keys::local_with(store.window(at, &mut work.window), &mut extras, seed));
        }
    }
}

/// Returns the extra keys of the block with the index `at`; `extras` is sorted by the index of the block.
pub fn extras_at(extras: &[(usize, u64)], at: usize) -> impl Iterator<Item = u64> + '_ {
    let start = extras.partition_point(|(block, _)| *block < at);
    extras[start..]
        .iter()
        .take_while(move |(block, _)| *block == at)
        .map(|(_, extra)| *extra)
}

/// Reads extra keys into `extras`, as pairs of block index and hash. Returns the salt, which is a plain text among the extra keys of a
/// prompt's first block.
pub fn extras_of(raw: Option<&[u8]>, lora: Option<&[u8]>, is_root: bool, extras: &mut Vec<(usize, u64)>) -> Option<u64> {
    extras.clear();
    let raw = raw?;
    let (mut salt, mut last) = (None, usize::MAX);
    extra_keys(raw, |block, extra| {
        let first = block != last;
        last = block;
        let hash = match extra {
            Extra::Text(text) if first && lora == Some(text.as_bytes()) => return,
            Extra::Text(text) if block == 0 && is_root && salt.is_none() => {
                salt = Some(keys::salt(text.as_bytes()));
                return;
            }
            Extra::Text(text) => keys::untagged_hash(text.as_bytes()),
            Extra::Bytes(bytes) => keys::untagged_hash(bytes),
            Extra::Int(number) => number as u64,
            Extra::Pair(Id::Int(number), _) => number as u64,
            Extra::Pair(Id::Text(id), offset) => keys::item_at(keys::item_text(id), offset),
            Extra::Pair(Id::Bytes(id), offset) => keys::item_at(keys::item_bytes(id), offset),
        };
        extras.push((block, hash));
    });
    salt
}
