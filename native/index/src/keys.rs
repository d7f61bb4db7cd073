//! Block keys: the rolling hash over tokens that routers share.
//!
//! `local = XXH3-64(u32-LE tokens, seed)`, `key[0] = local[0]`, `key[i] = XXH3-64(key[i-1] LE || local[i] LE, seed 1337)`: the functions
//! `compute_block_hash_for_seq` and `compute_seq_hash_for_block` of NVIDIA Dynamo (crate dynamo-kv-router 1.6.1, `protocols.rs`), and
//! `compute_content_hash` and `chain_prefix_hash` of SMG (crate kv-index 2.0.0, `block.rs`). Namespaces change the seed of local hashes:
//! `1337 + XXH3(LoRA) + XXH3(salt, seed 1)`.

use std::ops::Deref;

use crate::step_counter;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

const SEED: u64 = 1337;
const SALT_SEED: u64 = 1;
const LORA_ID_SEED: u64 = 2;
const UNTAGGED_SEED: u64 = 3;

/// Replaces each token of a multimodal item if the engine announces other tokens for the item than the prompt has (TensorRT-LLM).
pub const PLACEHOLDER: u32 = u32::MAX;

/// The rule by which the tokens of a prompt are divided into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scheme {
    /// Tokens per block.
    pub size: u32,
    /// Whether a block's hash also covers the first token of the next block (SGLang under EAGLE).
    pub eagle: bool,
}

impl Scheme {
    /// Number of tokens that the hash of one block covers.
    pub fn window(self) -> usize {
        self.size as usize + usize::from(self.eagle)
    }

    /// Number of whole blocks of a prompt.
    pub fn blocks(self, tokens: usize) -> usize {
        tokens.saturating_sub(usize::from(self.eagle)) / self.size as usize
    }
}

/// The part of a seed that a LoRA's name contributes. Clients that cannot omit a field send an empty name for the base model.
pub fn lora_name(name: &[u8]) -> u64 {
    if name.is_empty() { 0 } else { xxh3_64(name) }
}

/// The part of a seed for a LoRA that is known by its number only (vLLM before 0.14). A negative number, such as the -1 of Mooncake, means
/// the base model.
pub fn lora_id(id: i64) -> u64 {
    if id < 0 {
        0
    } else {
        xxh3_64_with_seed(&id.to_le_bytes(), LORA_ID_SEED)
    }
}

/// The part of a seed that the LoRA of a store contributes. The number counts if the store has no name.
pub fn lora(name: Option<&[u8]>, id: Option<i64>) -> u64 {
    match name.filter(|name| !name.is_empty()) {
        Some(name) => lora_name(name),
        None => id.map_or(0, lora_id),
    }
}

/// The part of a seed that a salt contributes. An empty salt means no salt.
pub fn salt(salt: &[u8]) -> u64 {
    if salt.is_empty() {
        0
    } else {
        xxh3_64_with_seed(salt, SALT_SEED)
    }
}

/// The part of a seed that the field for salts of a store contributes; None if the field is empty, as if it were missing.
pub fn stated_salt(text: &[u8]) -> Option<u64> {
    (!text.is_empty()).then(|| salt(text))
}

/// The seed of local hashes in a namespace, given the parts of its LoRA and its salt, each of which is 0 if absent.
pub fn seed(lora: u64, salt: u64) -> u64 {
    SEED.wrapping_add(lora).wrapping_add(salt)
}

/// The number for a textual identifier of a multimodal item: the first 16 digits of a hexadecimal digest, as in Dynamo, or the hash of any
/// other text.
pub fn item_text(id: &str) -> u64 {
    if id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return u64::from_str_radix(&id[..16], 16).unwrap_or(0);
    }
    xxh3_64(id.as_bytes())
}

/// The number for a multimodal item's identifier that consists of bytes.
pub fn item_bytes(id: &[u8]) -> u64 {
    xxh3_64(id)
}

/// The hash of an item that begins `offset` tokens after the beginning of its block.
pub fn item_at(id: u64, offset: i64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&id.to_le_bytes());
    bytes[8..].copy_from_slice(&offset.to_le_bytes());
    xxh3_64(&bytes)
}

/// The hash of an extra key whose meaning is unknown, such as the digest of prompt embeddings.
pub fn untagged_hash(key: &[u8]) -> u64 {
    xxh3_64_with_seed(key, UNTAGGED_SEED)
}

#[cfg(target_endian = "big")]
compile_error!("tokens are hashed in the byte order of memory, which must be little-endian");

/// The bytes of token ids, in the byte order of this machine.
pub fn bytes_of(tokens: &[u32]) -> &[u8] {
    // SAFETY: u32 has no padding, u8 has no alignment, and the length is that of the slice in bytes.
    unsafe { std::slice::from_raw_parts(tokens.as_ptr().cast(), size_of_val(tokens)) }
}

/// Hash of the tokens of one block.
#[inline]
pub fn local(tokens: &[u32], seed: u64) -> u64 {
    xxh3_64_with_seed(bytes_of(tokens), seed)
}

/// Hash of the tokens and extra keys of one block; sorts `extras`.
pub fn local_with(tokens: &[u32], extras: &mut [u64], seed: u64) -> u64 {
    local_in(&mut Vec::new(), tokens, extras, seed)
}

/// Computes `local_with`; `bytes` is a buffer that the caller reuses for the next block.
fn local_in(bytes: &mut Vec<u8>, tokens: &[u32], extras: &mut [u64], seed: u64) -> u64 {
    if extras.is_empty() {
        return local(tokens, seed);
    }
    extras.sort_unstable();
    bytes.clear();
    bytes.extend_from_slice(bytes_of(tokens));
    bytes.extend(extras.iter().flat_map(|extra| extra.to_le_bytes()));
    xxh3_64_with_seed(bytes, seed)
}

/// Computes the key of a block from its parent's key and its own local hash.
#[inline]
pub fn chained(parent: u64, local: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&parent.to_le_bytes());
    bytes[8..].copy_from_slice(&local.to_le_bytes());
    xxh3_64_with_seed(&bytes, SEED)
}

/// Replaces local hashes by keys. `parent` is the key of the block before the first one.
pub fn chain(parent: Option<u64>, hashes: &mut [u64]) {
    let mut before = parent;
    for hash in hashes {
        if let Some(parent) = before {
            *hash = chained(parent, *hash);
        }
        before = Some(*hash);
    }
}

/// Computes keys step by step while the caller computes local hashes. So the processor can hash a block during the computation of the
/// previous block's key.
pub struct Roller<'a> {
    before: Option<u64>,
    locals: &'a mut Vec<u64>,
    keys: &'a mut Vec<u64>,
}

impl<'a> Roller<'a> {
    /// Clears `locals` and `keys`, for the hashes and keys of `count` blocks after the block with the key `parent`.
    pub fn new(parent: Option<u64>, count: usize, locals: &'a mut Vec<u64>, keys: &'a mut Vec<u64>) -> Self {
        locals.clear();
        keys.clear();
        locals.reserve(count);
        keys.reserve(count);
        Self {
            before: parent,
            locals,
            keys,
        }
    }

    /// Adds the next block.
    #[inline]
    pub fn push(&mut self, local: u64) {
        let key = self.before.map_or(local, |parent| chained(parent, local));
        self.before = Some(key);
        self.locals.push(local);
        self.keys.push(key);
    }
}

/// One multimodal item of a prompt.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    /// Hash of the item's identifier.
    pub id: u64,
    /// Whether the identifier was a number, which is used unchanged at any position of the item (as in Dynamo).
    pub placeless: bool,
    /// First token of the item's span.
    pub start: i64,
    /// Number of tokens of the item's span.
    pub length: i64,
}

/// The multimodal items of a prompt, in the order of their first tokens.
#[derive(Clone, Debug, Default)]
pub struct Items(Vec<Item>);

impl From<Vec<Item>> for Items {
    fn from(mut items: Vec<Item>) -> Self {
        items.sort_by_key(|item| item.start);
        Self(items)
    }
}

impl Deref for Items {
    type Target = [Item];

    fn deref(&self) -> &[Item] {
        &self.0
    }
}

/// A prompt with a placeholder for each token of its items.
pub fn with_placeholders(tokens: &[u32], items: &Items) -> Vec<u32> {
    let mut replaced = tokens.to_vec();
    let place = |at: i64| usize::try_from(at).unwrap_or(0).min(tokens.len());
    let mut filled = 0;
    for item in items.iter() {
        let (start, end) = (place(item.start).max(filled), place(item.start.saturating_add(item.length)));
        if start < end {
            replaced[start..end].fill(PLACEHOLDER);
            filled = end;
        }
    }
    replaced
}

/// Computes local hashes of blocks without extra keys. This is a separate function, since the loop needs all registers.
#[inline(never)]
pub fn append_plain_hashes(tokens: &[u32], size: usize, seed: u64, out: &mut Vec<u64>) {
    out.extend(tokens.chunks_exact(size).map(|block| local(block, seed)));
}

/// Maximum number by which the items of one block may exceed its tokens. Items rarely share tokens; the frames and the sound of a video do.
/// With blocks of one token, each further item adds some milliseconds to the time for a prompt of 500,000 tokens.
const MAX_OVERLAPS: usize = 3;
/// The local hash of a block with more items than any engine sends, and of all blocks after it.
const NO_BLOCK: u64 = 0;

/// Appends the local hashes of the blocks `blocks` of a prompt to `out`.
pub fn locals(tokens: &[u32], scheme: Scheme, seed: u64, items: &Items, blocks: std::ops::Range<usize>, out: &mut Vec<u64>) {
    let size = scheme.size as usize;
    let window = scheme.window();
    if items.is_empty() && window == size {
        return append_plain_hashes(&tokens[blocks.start * size..blocks.end * size], size, seed, out);
    }
    let mut next = items.iter().peekable();
    let (mut inside, mut extras, mut bytes): (Vec<&Item>, Vec<u64>, Vec<u8>) = Default::default();
    for block in blocks.clone() {
        let (start, end) = ((block * size) as i64, (block * size + size) as i64);
        inside.extend(std::iter::from_fn(|| next.next_if(|item| item.start < end)));
        inside.retain(|item| item.start.saturating_add(item.length) > start);
        step_counter::count(1 + inside.len());
        if inside.len() > size + MAX_OVERLAPS {
            out.resize(out.len() + (blocks.end - block), NO_BLOCK);
            return;
        }
        extras.clear();
        extras.extend(inside.iter().map(|item| {
            if item.placeless {
                item.id
            } else {
                item_at(item.id, item.start - start)
            }
        }));
        out.push(local_in(&mut bytes, &tokens[block * size..][..window], &mut extras, seed));
    }
}
