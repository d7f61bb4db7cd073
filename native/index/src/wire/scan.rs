//! The scanner reads a batch of a known layout in one pass.
//!
//! `kvevents.wire.decode_batch` defines the meaning of a batch. `scan` accepts a payload only if `decode_batch` would return the same
//! events and reject nothing. `scan` refuses every payload with anything unexpected or rare.

mod extra;
pub(crate) mod layouts;
mod schema;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;

use crate::wire::msgpack::Reader;
use crate::wire::tokens::{self, Lengths};

pub use extra::{Extra, Id, extra_keys};
pub use schema::{Limits, Schema};

use schema::Layout;

/// The role of an event's field in the scanner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Field {
    BlockHashes,
    Parent,
    TokenIds,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    Group,
    SpecKind,
    Window,
    Locality,
    Ownership,
    CacheSalt,
    BlockKeys,
    Lookahead,
    /// The index does not use the field, which must be text or nil.
    IgnoredText,
    /// Only Python's structs use the field; any value except nil is refused.
    IgnoredNil,
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Stored,
    Removed,
    Cleared,
}

/// A range of bytes of a payload. A range never starts at 0, so an `Option` of a range needs no additional memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    start: NonZeroU32,
    length: u32,
}

impl Span {
    #[inline]
    pub(crate) fn new(start: usize, end: usize) -> Option<Self> {
        Some(Self {
            start: NonZeroU32::new(u32::try_from(start).ok()?)?,
            length: u32::try_from(end - start).ok()?,
        })
    }

    /// The bytes of this range in the scanned payload (or in `decode::ReadPayload::bytes`).
    #[inline]
    pub fn bytes(self, payload: &[u8]) -> &[u8] {
        let start = self.start.get() as usize;
        &payload[start..start + self.length as usize]
    }
}

/// A range of elements of one of the vectors in `Scratch`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Run {
    pub start: u32,
    pub length: u32,
}

impl Run {
    /// The elements in this range.
    #[inline]
    pub fn slice<T>(self, all: &[T]) -> &[T] {
        &all[self.start as usize..][..self.length as usize]
    }
}

/// One event; missing fields are zero, empty or None.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Kind of the event.
    pub kind: Kind,
    /// Whether the tokens are pairs `[token, next token]` (SGLang under EAGLE). The two token ids of a pair are adjacent in
    /// `Scratch::tokens`.
    pub pairs: bool,
    /// Number of token ids, or pairs, before the first one that is negative or exceeds 32 bits. `tokens` has the lowest 32 bits of a larger
    /// token id.
    pub keyable: u32,
    /// Whether the event has keys instead of tokens.
    pub keyed: bool,
    /// Whether the event is an array without an element for a group, as in vLLM before 0.20.
    pub lacks_group: bool,
    /// Range in `Scratch::hashes`.
    pub hashes: Run,
    /// Range in `Scratch::tokens`.
    pub tokens: Run,
    /// Range of the keys in `Scratch::hashes`.
    pub keys: Run,
    /// The hash of the parent of the first block, as announced; see `parent_hash`.
    pub parent: Option<u64>,
    /// Number of tokens per block.
    pub block_size: u64,
    /// Number of the LoRA.
    pub lora_id: Option<i64>,
    /// KV cache group.
    pub group: Option<i64>,
    /// Number of tokens of a sliding window.
    pub window: Option<i64>,
    /// Storage medium. All texts of an event are UTF-8.
    pub medium: Option<Span>,
    /// Name of the LoRA.
    pub lora_name: Option<Span>,
    /// Locality: LOCAL or REMOTE.
    pub locality: Option<Span>,
    /// Name of an offloading tier.
    pub ownership: Option<Span>,
    /// Kind of attention of the group.
    pub spec_kind: Option<Span>,
    /// The salt, as SGLang sends it.
    pub cache_salt: Option<Span>,
    /// Extra keys as msgpack, which the function `extra_keys` reads.
    pub extra_keys: Option<Span>,
    /// Whether some block has an extra key.
    pub has_extra_keys: bool,
    /// Tokens after each block that the block's hash also covers, as msgpack; `first_ints` reads those of the first block.
    pub lookahead: Option<Span>,
}

/// Numbers of elements, the tag included, that array stores without a group can have (vLLM before 0.20). SGLang before 0.5.20 also sends
/// six or seven elements.
pub(super) const LENGTHS_WITHOUT_GROUP: RangeInclusive<usize> = 6..=9;

/// The hash of an empty tuple in CPython from 3.8 on. SGLang 0.4.7 to 0.4.9 send this hash as the parent of a prompt's first block.
const EMPTY_TUPLE_HASH: u64 = 5_740_354_900_026_072_187;

impl Event {
    /// Hash of the parent of the event's first block; None if that block is the first of a prompt.
    pub fn parent_hash(&self) -> Option<u64> {
        self.parent.filter(|&parent| parent != EMPTY_TUPLE_HASH)
    }

    /// Returns the event without a parent of 0, if the stream holds no block with that hash. llm-d's simulator (in arrays) and older
    /// releases of LMCache send 0 for "no parent".
    #[inline]
    pub fn without_zero_parent(&self, holds_zero: impl FnOnce() -> bool) -> Cow<'_, Self> {
        if self.parent == Some(0) && !holds_zero() {
            Cow::Owned(Self {
                parent: None,
                ..self.clone()
            })
        } else {
            Cow::Borrowed(self)
        }
    }

    /// Whether another store of the event's blocks can mean another copy. This is so in vLLM's block pool, whose events name a group from
    /// 0.20 on.
    #[inline]
    pub fn may_be_copy(&self) -> bool {
        self.group.is_some() || self.lacks_group
    }

    /// The block size of a store that has one key for each hash instead of tokens; None for any other event.
    pub fn size_of_keyed(&self) -> Option<u32> {
        let size = u32::try_from(self.block_size).ok().filter(|&size| size > 0);
        size.filter(|_| self.keyed && self.tokens.length == 0 && self.keys.length == self.hashes.length)
    }

    /// Number of blocks of a store whose keys can be computed: all blocks before the first token that is not a 32-bit token id. None if the
    /// number of tokens or keys does not match the number of hashes. `is_below_device` is whether the blocks are on a tier below the device.
    #[inline]
    pub fn keyable_blocks(&self, is_below_device: impl FnOnce() -> bool) -> Option<usize> {
        if self.keyed {
            return self.size_of_keyed().map(|_| self.hashes.length as usize);
        }
        let size = u32::try_from(self.block_size).ok().filter(|&size| size > 0)?;
        let tokens = u64::from(self.tokens.length >> u32::from(self.pairs));
        let is_whole = u64::from(size).checked_mul(self.hashes.length.into()) == Some(tokens);
        (is_whole || self.has_next_token(size) && is_below_device()).then_some((self.keyable / size) as usize)
    }

    /// Whether the tokens of a block are followed by one more. In a store below the device, it is the first token of the next block: LMCache
    /// sends chunks so, up to at least 0.5.6 (`convert_tokens_to_list`, <https://github.com/LMCache/LMCache/issues/4543>).
    fn has_next_token(&self, size: u32) -> bool {
        let is_single = self.hashes.length == 1 && self.group.is_none() && !self.pairs;
        is_single && size > 1 && self.tokens.length.checked_sub(1) == Some(size)
    }

    #[inline]
    pub(crate) fn new(kind: Kind) -> Self {
        Self {
            kind,
            pairs: false,
            keyable: 0,
            keyed: false,
            lacks_group: false,
            hashes: Run::default(),
            tokens: Run::default(),
            keys: Run::default(),
            parent: None,
            block_size: 0,
            lora_id: None,
            group: None,
            window: None,
            medium: None,
            lora_name: None,
            locality: None,
            ownership: None,
            spec_kind: None,
            cache_salt: None,
            extra_keys: None,
            has_extra_keys: false,
            lookahead: None,
        }
    }
}

/// Maximum number of bytes of a scratch per byte of the largest payload that it has held. On the wire, a hash or a token takes at least one
/// byte, and an event at least 18. In a scratch, a hash takes eight bytes, and a token four. The capacity of a vector doubles when it
/// grows.
pub const SCRATCH_BYTES_PER_PAYLOAD_BYTE: usize = 2 * (8 + 4 + size_of::<Event>().div_ceil(18));

/// Maximum number of bytes that `Scratch::shrink` does not release; most batches of a busy engine need less.
pub const MIN_SCRATCH_BYTES: usize = 1 << 20;

/// The result of a scan; its memory is reused for the next scan.
#[derive(Debug, Default)]
pub struct Scratch {
    /// The hashes and keys of all events.
    pub hashes: Vec<u64>,
    /// The token ids of all events.
    pub tokens: Vec<u32>,
    /// The events, in the order of the batch.
    pub events: Vec<Event>,
    /// Number of bytes of the scanned payload.
    pub payload_bytes: usize,
    /// Timestamp in seconds since the epoch.
    pub ts: f64,
    /// Data-parallel rank that the batch states.
    pub rank: Option<i64>,
    /// Whether some hash was a digest; `hashes` has the last 8 bytes of each digest.
    pub digests: bool,
    lengths: Lengths,
}

impl Scratch {
    /// Returns the rank that the batch states for its events. In a batch that states no rank, a clear concerns all ranks of the stream.
    #[inline]
    pub fn stated_rank(&self) -> Option<i64> {
        self.rank.filter(|_| !self.events.is_empty())
    }

    /// Removes the contents, but keeps the memory.
    pub fn clear(&mut self) {
        self.hashes.clear();
        self.tokens.clear();
        self.events.clear();
        (self.payload_bytes, self.ts, self.rank, self.digests) = (0, 0.0, None, false);
    }

    /// Number of bytes of memory.
    pub fn bytes(&self) -> usize {
        self.hashes.capacity() * size_of::<u64>()
            + self.tokens.capacity() * size_of::<u32>()
            + self.events.capacity() * size_of::<Event>()
    }

    /// Removes the contents, and releases memory in excess of `MIN_SCRATCH_BYTES`.
    pub fn shrink(&mut self) {
        self.clear();
        if self.bytes() > MIN_SCRATCH_BYTES {
            *self = Self::default();
        }
    }
}

/// Range of timestamps in seconds; a larger timestamp is in milliseconds, or invalid. `kvevents.wire.tolerant` has the same maximum.
pub const TIMESTAMP_SECONDS: std::ops::RangeInclusive<f64> = 0.0..=1e11;

/// Maximum number of nested containers in unknown elements of a batch.
const SKIPPED_NESTING: usize = 8;

/// Reads `payload` into `scratch`. Returns None for a payload that the scanner refuses; the contents of the scratch are then undefined.
pub fn scan(payload: &[u8], schema: &Schema, scratch: &mut Scratch) -> Option<()> {
    scratch.clear();
    if payload.len() > schema.limits.max_payload_bytes || payload.len() > u32::MAX as usize {
        return None;
    }
    scratch.payload_bytes = payload.len();
    let mut scanner = Scanner {
        reader: Reader::new(payload, 0),
        schema,
        scratch,
        free_form_bytes_left: schema.limits.max_free_form_bytes,
        hashes_at: 0,
    };
    scanner.batch().filter(|()| scanner.reader.left() == 0)
}

/// Appends the integers of the first list in a scanned list of lists.
pub fn first_ints(raw: &[u8], out: &mut Vec<u32>) {
    let mut reader = Reader::new(raw, 0);
    let count = reader.array().filter(|&lists| lists > 0).and_then(|_| reader.array());
    let int = |_| Some(reader.int()?.bits as u32);
    out.extend((0..count.unwrap_or(0)).map_while(int));
}

struct Scanner<'a> {
    reader: Reader<'a>,
    schema: &'a Schema,
    scratch: &'a mut Scratch,
    free_form_bytes_left: usize,
    /// Position of the list of hashes of the previous event.
    hashes_at: usize,
}

/// The first bytes of a list of one 64-bit hash.
const SINGLE_HASH_HEAD: [u8; 2] = [0x91, 0xCF];
/// Number of bytes of such a hash.
const HASH_BYTES: usize = 8;

impl<'a> Scanner<'a> {
    fn batch(&mut self) -> Option<()> {
        let parts = self.reader.array()?;
        if parts < 2 || parts > self.schema.limits.max_fields {
            return None;
        }
        let ts = self.reader.number()?;
        if !TIMESTAMP_SECONDS.contains(&ts) {
            return None;
        }
        self.scratch.ts = ts;
        self.events()?;
        if parts > 2 && !self.reader.nil() {
            self.scratch.rank = Some(self.reader.int()?.as_i64()?);
        }
        for _ in 3..parts {
            self.reader.skip(SKIPPED_NESTING)?;
        }
        Some(())
    }

    fn events(&mut self) -> Option<()> {
        let count = self.reader.array()?;
        if count > self.schema.limits.max_events {
            return None;
        }
        let mut left = count;
        while left > 0 {
            let start = self.reader.at;
            match self.reader.peek()? {
                0x90..=0x9F | 0xDC | 0xDD => self.array_event()?,
                _ => self.map_event()?,
            }
            left -= 1;
            if self.schema.joins && left > 0 {
                left -= self.join(start, left);
            }
        }
        Some(())
    }

    /// If the previous event, which begins at `start`, removes one hash, joins up to `max_count` following events to it. These events must
    /// also remove one hash, and differ only in the hash. Returns the number of joined events.
    fn join(&mut self, start: usize, max_count: usize) -> usize {
        let single = self.hashes_at;
        let (data, end, hash) = (self.reader.data(), self.reader.at, single + SINGLE_HASH_HEAD.len());
        let Some(event) = self.scratch.events.last_mut() else {
            return 0;
        };
        if event.kind != Kind::Removed || event.hashes.length != 1 || !data[single..].starts_with(&SINGLE_HASH_HEAD) {
            return 0;
        }
        let (head, tail) = (&data[start..hash], &data[hash + HASH_BYTES..end]);
        let mut joined = 0;
        for next in data[end..].chunks_exact(end - start).take(max_count) {
            let (before, rest) = next.split_at(head.len());
            let Some((hash, behind)) = rest.split_first_chunk::<HASH_BYTES>() else {
                break;
            };
            if before != head || behind != tail {
                break;
            }
            self.scratch.hashes.push(u64::from_be_bytes(*hash));
            joined += 1;
        }
        event.hashes.length += joined as u32;
        self.reader.at += joined * (end - start);
        joined
    }

    fn array_event(&mut self) -> Option<()> {
        let parts = self.reader.array()?;
        if parts == 0 || parts > self.schema.limits.max_fields {
            return None;
        }
        let layout = self.tag()?;
        let fields = layout.array.get(..parts - 1)?;
        if fields.len() < layout.array_needed {
            return None;
        }
        let mut event = Event::new(layout.kind);
        event.lacks_group = LENGTHS_WITHOUT_GROUP.contains(&parts);
        for &field in fields {
            self.field(field, &mut event)?;
        }
        self.scratch.events.push(event);
        Some(())
    }

    fn map_event(&mut self) -> Option<()> {
        let pairs = self.reader.map()?;
        if pairs == 0 || pairs > self.schema.limits.max_fields || !self.reader.rest().starts_with(b"\xA4type") {
            return None;
        }
        self.reader.at += 5;
        let layout = self.tag()?;
        let mut event = Event::new(layout.kind);
        let (mut seen, mut next) = (0_u64, 0);
        for _ in 1..pairs {
            let at = self.name(layout, next)?;
            if seen >> at & 1 != 0 {
                return None;
            }
            seen |= 1 << at;
            next = at + 1;
            self.field(layout.names[at].field, &mut event)?;
        }
        if seen & layout.needed != layout.needed {
            return None;
        }
        self.scratch.events.push(event);
        Some(())
    }

    #[inline]
    fn tag(&mut self) -> Option<&'a Layout> {
        let tag = self.reader.raw_text()?;
        self.schema.layouts.iter().find(|layout| layout.tag.as_bytes() == tag)
    }

    /// Returns the position of a map event's next key in the layout; usually this is `expected` or a position shortly after it.
    #[inline]
    fn name(&mut self, layout: &Layout, expected: usize) -> Option<usize> {
        let rest = self.reader.rest();
        let found = |at: &usize| layout.names[*at].starts(rest);
        let at = (expected..layout.names.len())
            .find(found)
            .or_else(|| (0..expected).find(found))?;
        self.reader.at += layout.names[at].length;
        Some(at)
    }

    #[inline]
    fn field(&mut self, field: Field, event: &mut Event) -> Option<()> {
        let start = self.reader.at;
        match field {
            Field::BlockHashes => {
                self.hashes_at = start;
                event.hashes = self.hashes()?;
            }
            Field::Parent => event.parent = self.parent()?,
            Field::TokenIds => self.tokens(event)?,
            Field::BlockSize => event.block_size = self.size()?,
            Field::LoraId => event.lora_id = self.integer()?,
            Field::Group => event.group = self.integer()?,
            Field::Window => event.window = self.integer()?,
            Field::Medium => event.medium = self.text()?,
            Field::LoraName => event.lora_name = self.text()?,
            Field::Locality => event.locality = self.text()?,
            Field::Ownership => event.ownership = self.text()?,
            Field::SpecKind => event.spec_kind = self.text()?,
            Field::CacheSalt => event.cache_salt = self.text()?,
            Field::BlockKeys => self.keys(event)?,
            Field::ExtraKeys => self.extra_keys(event)?,
            Field::IgnoredText => drop(self.text()?),
            Field::Lookahead => event.lookahead = self.int_lists()?,
            Field::IgnoredNil => self.reader.nil().then_some(())?,
        }
        if event.kind == Kind::Cleared {
            // A clear is left to `decode_batch`, which reads its fields as free-form fields.
            self.free(self.reader.at - start)?;
        }
        Some(())
    }

    fn free(&mut self, bytes: usize) -> Option<()> {
        self.free_form_bytes_left = self.free_form_bytes_left.checked_sub(bytes)?;
        Some(())
    }

    #[inline]
    fn hashes(&mut self) -> Option<Run> {
        let (start, most) = (self.scratch.hashes.len(), self.schema.limits.max_hashes);
        if most > 0
            && let Some([0x91, 0xCF | 0xD3, bytes @ ..]) = self.reader.rest().first_chunk::<{ 2 + HASH_BYTES }>()
        {
            self.scratch.hashes.push(u64::from_be_bytes(*bytes));
            self.reader.at += 2 + HASH_BYTES;
            return Some(Run {
                start: start as u32,
                length: 1,
            });
        }
        self.list_of_hashes(start)
    }

    fn list_of_hashes(&mut self, start: usize) -> Option<Run> {
        let count = self.reader.array()?;
        if count > self.schema.limits.max_hashes {
            return None;
        }
        self.scratch.hashes.reserve(count);
        let quick = self.reader.rest().as_chunks::<{ 1 + HASH_BYTES }>().0.iter().take(count);
        let quick = quick.map_while(|chunk| match chunk {
            [0xCF | 0xD3, bytes @ ..] => Some(u64::from_be_bytes(*bytes)),
            _ => None,
        });
        self.scratch.hashes.extend(quick);
        let done = self.scratch.hashes.len() - start;
        self.reader.at += done * (1 + HASH_BYTES);
        for _ in done..count {
            let hash = self.hash()?;
            self.scratch.hashes.push(hash);
        }
        Some(Run {
            start: start as u32,
            length: count as u32,
        })
    }

    /// Reads a hash: an integer modulo 2^64, or the last 8 bytes of a digest.
    #[inline]
    fn hash(&mut self) -> Option<u64> {
        if let Some([0xCF | 0xD3, bytes @ ..]) = self.reader.rest().first_chunk::<9>() {
            self.reader.at += 9;
            return Some(u64::from_be_bytes(*bytes));
        }
        if matches!(self.reader.peek()?, 0xC4..=0xC6) {
            self.scratch.digests = true;
            return Some(u64::from_be_bytes(*self.reader.bin()?.last_chunk()?));
        }
        Some(self.reader.int()?.bits)
    }

    /// Reads keys, which are like hashes but are never digests.
    fn keys(&mut self, event: &mut Event) -> Option<()> {
        if self.reader.nil() {
            return Some(());
        }
        let digests = std::mem::take(&mut self.scratch.digests);
        (event.keys, event.keyed) = (self.hashes()?, true);
        let none = !std::mem::replace(&mut self.scratch.digests, digests);
        none.then_some(())
    }

    #[inline]
    fn parent(&mut self) -> Option<Option<u64>> {
        if self.reader.nil() {
            Some(None)
        } else {
            self.hash().map(Some)
        }
    }

    #[inline]
    fn tokens(&mut self, event: &mut Event) -> Option<()> {
        let (count, start) = (self.reader.array()?, self.scratch.tokens.len());
        let found = tokens::read(&mut self.reader, count, &mut self.scratch.tokens, &mut self.scratch.lengths)?;
        event.tokens = Run {
            start: start as u32,
            length: (self.scratch.tokens.len() - start) as u32,
        };
        (event.pairs, event.keyable) = (found.pairs, found.keyable as u32);
        Some(())
    }

    #[inline]
    fn size(&mut self) -> Option<u64> {
        let size = self.reader.int()?;
        (!size.negative).then_some(size.bits)
    }

    #[inline]
    fn integer(&mut self) -> Option<Option<i64>> {
        if self.reader.nil() {
            Some(None)
        } else {
            self.reader.int()?.as_i64().map(Some)
        }
    }

    #[inline]
    fn text(&mut self) -> Option<Option<Span>> {
        if self.reader.nil() {
            return Some(None);
        }
        let length = self.reader.text_bytes()?.len();
        Some(Some(Span::new(self.reader.at - length, self.reader.at)?))
    }

    fn extra_keys(&mut self, event: &mut Event) -> Option<()> {
        (event.extra_keys, event.has_extra_keys) = (None, false);
        if self.reader.nil() {
            return Some(());
        }
        let start = self.reader.at;
        extra::walk(&mut self.reader, self.schema.limits.max_hashes, |_, _| {
            event.has_extra_keys = true
        })?;
        self.free(self.reader.at - start)?;
        event.extra_keys = Some(Span::new(start, self.reader.at)?);
        Some(())
    }

    fn int_lists(&mut self) -> Option<Option<Span>> {
        if self.reader.nil() {
            return Some(None);
        }
        let (start, lists) = (self.reader.at, self.reader.array()?);
        if lists > self.schema.limits.max_hashes {
            return None;
        }
        for _ in 0..lists {
            for _ in 0..self.reader.array()? {
                self.reader.int()?;
            }
        }
        Some(Some(Span::new(start, self.reader.at)?))
    }
}
