//! Encodes exported events as payloads, which `Compactor::restore` reads again.
//!
//! Events are maps with the names of `kvevents.events`, without nil fields. An event that does not fit in a payload is divided between two
//! blocks; the second part names the last block of the first part as its parent.

use kvevents_index::apply::EVERY_TIER;

use super::event::{ExportedEvent, Location, Store, array, encode_extra_keys, split_extra_keys};

/// Number of bytes of `[ts, [`, and maximum bytes of a number or of the length of an array.
const HEAD: usize = 1 + 9 + ARRAY;
const NUMBER: usize = 9;
const ARRAY: usize = 5;
/// Number of bytes of a clear without a tier.
const CLEAR_BYTES: usize = 32;

/// Writes the payloads of a rank one after the other. The first one clears everything, and has no other events.
pub struct PayloadWriter {
    limit: usize,
    ts: f64,
    rank: Option<i64>,
    done: Vec<Vec<u8>>,
    out: Vec<u8>,
    events: u32,
}

impl PayloadWriter {
    /// Creates a writer of a rank's payloads. They have at most `limit` bytes, unless a single block takes more.
    pub fn new(limit: usize, ts: f64, rank: Option<i64>) -> Self {
        let mut writer = Self {
            limit: limit.saturating_sub(CLEAR_BYTES + NUMBER),
            ts,
            rank,
            done: Vec::new(),
            out: head(ts, rank),
            events: 0,
        };
        writer.write(|out| write_clear(None, out));
        writer.write(|out| write_clear(Some(EVERY_TIER), out));
        writer.end_payload();
        writer
    }

    /// Adds an event.
    pub fn add(&mut self, event: &ExportedEvent) {
        match event {
            ExportedEvent::Stored(store) => self.add_store(store),
            ExportedEvent::Removed(hashes, location) => self.add_removal(hashes, location),
            // `limit` leaves room for this event: it must not begin a payload, which would be taken for the beginning of another history.
            ExportedEvent::Cleared => self.write(|out| write_clear(None, out)),
        }
    }

    /// All payloads.
    pub fn finish(mut self) -> Vec<Vec<u8>> {
        if self.events > 0 {
            self.end_payload();
        }
        self.done
    }

    fn end_payload(&mut self) {
        let mut full = std::mem::replace(&mut self.out, head(self.ts, self.rank));
        full[HEAD - 4..HEAD].copy_from_slice(&self.events.to_be_bytes());
        if let Some(rank) = self.rank {
            signed(&mut full, rank);
        }
        self.events = 0;
        self.done.push(full);
    }

    fn write(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.out);
        self.events += 1;
    }

    /// Writes an event if there is room for all of it.
    fn try_write(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> bool {
        let start = self.out.len();
        self.write(write);
        let fits = self.out.len() <= self.limit;
        if !fits {
            self.out.truncate(start);
            self.events -= 1;
        }
        fits
    }

    /// Returns the end of those blocks from `first` on that fit in an event, which takes `overhead` bytes plus the blocks. At least one
    /// block fits, in its own payload if necessary.
    fn end_of_fitting_blocks(
        &mut self,
        first: usize,
        count: usize,
        overhead: usize,
        bytes_of: impl Fn(usize) -> usize,
    ) -> usize {
        loop {
            let mut left = self.limit.checked_sub(self.out.len() + overhead);
            let mut end = first;
            while end < count
                && let Some(less) = left.and_then(|left| left.checked_sub(bytes_of(end)))
            {
                (left, end) = (Some(less), end + 1);
            }
            let fits = end > first || (count == first && left.is_some());
            if fits || self.events == 0 {
                return end.max(count.min(first + 1));
            }
            self.end_payload();
        }
    }

    fn add_store(&mut self, store: &Store<'_>) {
        let blocks = StoreWriter {
            store,
            extra_keys: split_extra_keys(store.extra_keys.as_deref()).unwrap_or_default(),
            width: store.tokens.len() / store.hashes.len().max(1),
        };
        let (mut first, count) = (0, store.hashes.len());
        if self.try_write(|out| blocks.write(0, count, out)) {
            return;
        }
        let overhead = blocks.overhead();
        while first == 0 || first < count {
            let end = self.end_of_fitting_blocks(first, count, overhead, |at| blocks.bytes_of(at));
            self.write(|out| blocks.write(first, end, out));
            first = end.max(1);
        }
    }

    fn add_removal(&mut self, hashes: &[u64], location: &Location<'_>) {
        if self.try_write(|out| write_removal(hashes, location, out)) {
            return;
        }
        let mut empty = Vec::new();
        write_removal(&[], location, &mut empty);
        let mut first = 0;
        while first < hashes.len() {
            let overhead = empty.len() + ARRAY;
            let end = self.end_of_fitting_blocks(first, hashes.len(), overhead, |at| number_bytes(hashes[at]));
            self.write(|out| write_removal(&hashes[first..end], location, out));
            first = end;
        }
    }
}

/// Writes a store, or some of its blocks.
struct StoreWriter<'a> {
    store: &'a Store<'a>,
    extra_keys: Vec<Option<&'a [u8]>>,
    /// Number of values in the tokens of one block.
    width: usize,
}

impl<'a> StoreWriter<'a> {
    fn tokens(&self, first: usize, end: usize) -> &'a [u32] {
        &self.store.tokens[first * self.width..end * self.width]
    }

    /// Tokens after a block that its hash also covers: the first tokens of the next block. They are unknown for the last block before
    /// `end`.
    fn lookahead(&self, at: usize, end: usize) -> &'a [u32] {
        let behind = (at + 1) * self.width;
        let count = if at + 1 < end.min(self.store.hashes.len()) {
            self.store.lookahead
        } else {
            0
        };
        self.store.tokens.get(behind..behind + count).unwrap_or_default()
    }

    /// Maximum number of bytes of an event without blocks.
    fn overhead(&self) -> usize {
        let mut out = Vec::new();
        self.write(0, 0, &mut out);
        out.len() + 5 * ARRAY + NUMBER + "extra_keys ".len()
    }

    /// Bytes of one block.
    fn bytes_of(&self, at: usize) -> usize {
        let tokens: usize = self.tokens(at, at + 1).iter().map(|&token| number_bytes(token.into())).sum();
        let pairs = if self.store.pairs { self.width / 2 } else { 0 };
        let extra_keys = self.extra_keys.get(at).map_or(0, |keys| keys.map_or(1, <[u8]>::len));
        let key = self.store.keys.as_ref().map_or(0, |keys| number_bytes(keys[at]));
        let lookahead: usize = self
            .lookahead(at, at + 2)
            .iter()
            .map(|&token| number_bytes(token.into()))
            .sum();
        number_bytes(self.store.hashes[at]) + tokens + pairs + key + extra_keys + ARRAY + lookahead
    }

    /// Writes an event with the blocks `first..end`.
    fn write(&self, first: usize, end: usize, out: &mut Vec<u8>) {
        let store = self.store;
        let parent = if first > 0 && self.width > 0 {
            Some(store.hashes[first - 1])
        } else {
            store.parent
        };
        let extra_keys = self.extra_keys.get(first..end).unwrap_or_default();
        let mut fields = Fields::open(out, "BlockStored");
        fields.hashes("block_hashes", &store.hashes[first..end]);
        fields.name("parent_block_hash");
        match parent {
            Some(hash) => number(fields.out, hash),
            None => fields.out.push(0xC0),
        }
        fields.name("token_ids");
        tokens(fields.out, self.tokens(first, end), store.pairs);
        fields.name("block_size");
        number(fields.out, store.block_size);
        fields.integer("lora_id", store.namespace.lora_id);
        fields.text("lora_name", store.namespace.lora_name.as_deref());
        // A first block states even that it has no extra keys: below the device, a store without this field leaves them unknown.
        if extra_keys.iter().any(Option::is_some) || (first == 0 && !extra_keys.is_empty()) {
            fields.name("extra_keys");
            fields.out.extend_from_slice(&encode_extra_keys(extra_keys.iter().copied()));
        }
        fields.location(&store.location);
        fields.text("kv_cache_spec_kind", store.kind.as_deref());
        fields.integer("kv_cache_spec_sliding_window", store.window);
        fields.text("cache_salt", store.namespace.cache_salt.as_deref());
        if let Some(keys) = &store.keys {
            fields.hashes("block_keys", &keys[first..end]);
        }
        if store.lookahead > 0 {
            fields.name("lookahead_token_ids");
            array(fields.out, end - first);
            (first..end).for_each(|at| tokens(fields.out, self.lookahead(at, end), false));
        }
        fields.close();
    }
}

fn write_clear(medium: Option<&[u8]>, out: &mut Vec<u8>) {
    let mut fields = Fields::open(out, "AllBlocksCleared");
    fields.text("medium", medium);
    fields.close();
}

fn write_removal(hashes: &[u64], location: &Location<'_>, out: &mut Vec<u8>) {
    let mut fields = Fields::open(out, "BlockRemoved");
    fields.hashes("block_hashes", hashes);
    fields.location(location);
    fields.close();
}

// --- msgpack

/// Writes the fields of an event that is a map, and counts them.
struct Fields<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
    count: u8,
}

impl<'a> Fields<'a> {
    fn open(out: &'a mut Vec<u8>, tag: &str) -> Self {
        let start = out.len();
        out.extend_from_slice(&[0xDE, 0, 0]);
        text(out, b"type");
        text(out, tag.as_bytes());
        Self { out, start, count: 1 }
    }

    fn close(self) {
        self.out[self.start + 2] = self.count;
    }

    fn name(&mut self, name: &str) {
        text(self.out, name.as_bytes());
        self.count += 1;
    }

    fn hashes(&mut self, name: &str, values: &[u64]) {
        self.name(name);
        array(self.out, values.len());
        values.iter().for_each(|&value| number(self.out, value));
    }

    fn text(&mut self, name: &str, value: Option<&[u8]>) {
        if let Some(value) = value {
            self.name(name);
            text(self.out, value);
        }
    }

    fn integer(&mut self, name: &str, value: Option<i64>) {
        if let Some(value) = value {
            self.name(name);
            signed(self.out, value);
        }
    }

    fn location(&mut self, location: &Location<'_>) {
        self.text("medium", location.medium.as_deref());
        self.integer("group_idx", location.group);
        self.text("locality", location.locality.as_deref());
        self.text("ownership", location.ownership.as_deref());
    }
}

/// `[ts, [`, the number of events to be filled in. A rank comes after the events.
fn head(ts: f64, rank: Option<i64>) -> Vec<u8> {
    let mut out = vec![if rank.is_some() { 0x93 } else { 0x92 }, 0xCB];
    out.extend_from_slice(&ts.to_be_bytes());
    out.extend_from_slice(&[0xDD, 0, 0, 0, 0]);
    out
}

fn text(out: &mut Vec<u8>, value: &[u8]) {
    match value.len() {
        length @ 0..=31 => out.push(0xA0 | length as u8),
        length => {
            out.push(0xDB);
            out.extend_from_slice(&(length as u32).to_be_bytes());
        }
    }
    out.extend_from_slice(value);
}

fn signed(out: &mut Vec<u8>, value: i64) {
    match u64::try_from(value) {
        Ok(value) => number(out, value),
        Err(_) => {
            out.push(0xD3);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}

/// Number of bytes that `number` writes.
#[inline]
fn number_bytes(value: u64) -> usize {
    let above = |limit: u64| usize::from(value > limit);
    1 + above(0x7F) + above(0xFF) + 2 * above(0xFFFF) + 4 * above(0xFFFF_FFFF)
}

#[inline]
fn number(out: &mut Vec<u8>, value: u64) {
    // Arrays of fixed length: copying a variable number of bytes takes several times as long.
    match value {
        0..=0x7F => out.push(value as u8),
        0x80..=0xFF => out.extend_from_slice(&[0xCC, value as u8]),
        0x100..=0xFFFF => {
            let [high, low] = (value as u16).to_be_bytes();
            out.extend_from_slice(&[0xCD, high, low]);
        }
        0x1_0000..=0xFFFF_FFFF => {
            let [a, b, c, d] = (value as u32).to_be_bytes();
            out.extend_from_slice(&[0xCE, a, b, c, d]);
        }
        _ => {
            out.push(0xCF);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}

/// Token ids, or under EAGLE pairs of them.
fn tokens(out: &mut Vec<u8>, values: &[u32], pairs: bool) {
    if !pairs {
        array(out, values.len());
        return values.iter().for_each(|&value| number(out, value.into()));
    }
    array(out, values.len() / 2);
    for pair in values.chunks_exact(2) {
        out.push(0x92);
        pair.iter().for_each(|&value| number(out, value.into()));
    }
}
