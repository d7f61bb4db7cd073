//! Encodes exported events as payloads that `Compactor::restore` reads.
//!
//! Events are maps with the names of `kvevents.events`, without nil fields. An event that does not fit in a payload is split before one of
//! its blocks. The second part names the last block of the first part as its parent.

use kvevents_index::apply::EVERY_TIER;
use kvevents_index::wire::msgpack::{write_array, write_integer, write_text, write_unsigned};

use super::event::{ExportedEvent, Location, Store, encode_extra_keys, split_extra_keys};

/// Number of bytes of `[ts, [`.
const HEAD_BYTES: usize = 1 + 9 + 5;
/// Maximum number of bytes of a rank.
const RANK_BYTES: usize = 9;
/// Number of bytes of a clear that names no tier.
const CLEAR_BYTES: usize = 32;

/// Writes the payloads of one rank, one after the other. The first payload has only one event, which clears everything.
pub struct PayloadWriter {
    limit: usize,
    ts: f64,
    rank: Option<i64>,
    done: Vec<Vec<u8>>,
    out: Vec<u8>,
    events: u32,
}

impl PayloadWriter {
    /// Creates a writer of the payloads of one rank. A payload has at most `limit` bytes, unless one block alone takes more.
    pub fn new(limit: usize, ts: f64, rank: Option<i64>) -> Self {
        let mut writer = Self {
            limit: limit.saturating_sub(2 * CLEAR_BYTES + RANK_BYTES),
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
            ExportedEvent::Stored(store) => {
                let writer = StoreWriter::new(store);
                self.add_blocks(0, store.hashes.len(), &|first, end, out| writer.write(first, end, out));
            }
            ExportedEvent::Removed(hashes, location) => {
                self.add_blocks(0, hashes.len(), &|first, end, out| {
                    write_removal(&hashes[first..end], location, out)
                });
            }
            // `limit` has room for two of these events: in a payload of its own, a clear would look like the beginning of another history.
            ExportedEvent::Cleared => self.write(|out| write_clear(None, out)),
        }
    }

    /// Ends the last payload, and returns all payloads.
    pub fn finish(mut self) -> Vec<Vec<u8>> {
        if self.events > 0 {
            self.end_payload();
        }
        self.done
    }

    fn end_payload(&mut self) {
        let mut full = std::mem::replace(&mut self.out, head(self.ts, self.rank));
        full[HEAD_BYTES - 4..HEAD_BYTES].copy_from_slice(&self.events.to_be_bytes());
        if let Some(rank) = self.rank {
            write_integer(rank.into(), &mut full);
        }
        self.events = 0;
        full.shrink_to(2 * full.len()); // its capacity is large if an event was written to it that did not fit
        self.done.push(full);
    }

    fn write(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.out);
        self.events += 1;
    }

    /// Writes an event, if the payload has room for it. Otherwise writes nothing, and returns the number of bytes of the event.
    fn try_write(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> Result<(), usize> {
        let start = self.out.len();
        self.write(write);
        if self.out.len() <= self.limit {
            return Ok(());
        }
        let bytes = self.out.len() - start;
        self.out.truncate(start);
        self.events -= 1;
        Err(bytes)
    }

    /// Writes the blocks `first..end` of an event, in parts that fit. A single block that does not fit gets a payload of its own.
    fn add_blocks(&mut self, first: usize, end: usize, write: &impl Fn(usize, usize, &mut Vec<u8>)) {
        let Err(bytes) = self.try_write(|out| write(first, end, out)) else {
            return;
        };
        let count = end - first;
        // Smaller parts would fill payloads better, but more parts take more bytes in total.
        if self.events > 0 && (count <= 1 || self.out.len() > self.limit / 2) {
            self.end_payload();
            self.add_blocks(first, end, write);
        } else if count > 1 {
            // The number of parts is one more than would suffice for blocks of equal size.
            let parts = bytes / self.limit.max(1) + 2;
            let step = count.div_ceil(parts);
            for start in (first..end).step_by(step) {
                self.add_blocks(start, end.min(start + step), write);
            }
        } else {
            self.write(|out| write(first, end, out));
        }
    }
}

/// Writes a store, or a store of some of its blocks.
struct StoreWriter<'a> {
    store: &'a Store<'a>,
    extra_keys: Vec<Option<&'a [u8]>>,
    /// Number of elements of `Store::tokens` for one block.
    width: usize,
}

impl<'a> StoreWriter<'a> {
    fn new(store: &'a Store<'a>) -> Self {
        Self {
            store,
            extra_keys: split_extra_keys(store.extra_keys.as_deref()).unwrap_or_default(),
            width: store.tokens.len() / store.hashes.len().max(1),
        }
    }

    fn tokens(&self, first: usize, end: usize) -> &'a [u32] {
        &self.store.tokens[first * self.width..end * self.width]
    }

    /// The tokens after a block that its hash also covers, which are the first tokens of the next block. For the last block, no such tokens
    /// are known.
    fn lookahead(&self, at: usize, end: usize) -> &'a [u32] {
        let behind = (at + 1) * self.width;
        let count = if at + 1 < end { self.store.lookahead } else { 0 };
        self.store.tokens.get(behind..behind + count).unwrap_or_default()
    }

    /// Writes a store with the blocks `first..end`.
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
            Some(hash) => write_unsigned(hash, fields.out),
            None => fields.out.push(0xC0),
        }
        fields.name("token_ids");
        tokens(fields.out, self.tokens(first, end), store.pairs);
        fields.name("block_size");
        write_unsigned(store.block_size, fields.out);
        fields.integer("lora_id", store.namespace.lora_id);
        fields.text("lora_name", store.namespace.lora_name.as_deref());
        // The store of a prompt's first block always has this field, even without extra keys. If it were missing in a store below the
        // device, the extra keys would count as unknown.
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
            write_array(end - first, fields.out);
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

// --- writing msgpack

/// Writes a map event field by field, and counts the fields.
struct Fields<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
    count: u8,
}

impl<'a> Fields<'a> {
    fn open(out: &'a mut Vec<u8>, tag: &str) -> Self {
        let start = out.len();
        out.extend_from_slice(&[0xDE, 0, 0]);
        write_text(b"type", out);
        write_text(tag.as_bytes(), out);
        Self { out, start, count: 1 }
    }

    fn close(self) {
        self.out[self.start + 2] = self.count;
    }

    fn name(&mut self, name: &str) {
        write_text(name.as_bytes(), self.out);
        self.count += 1;
    }

    fn hashes(&mut self, name: &str, values: &[u64]) {
        self.name(name);
        write_array(values.len(), self.out);
        values.iter().for_each(|&value| write_unsigned(value, self.out));
    }

    fn text(&mut self, name: &str, value: Option<&[u8]>) {
        if let Some(value) = value {
            self.name(name);
            write_text(value, self.out);
        }
    }

    fn integer(&mut self, name: &str, value: Option<i64>) {
        if let Some(value) = value {
            self.name(name);
            write_integer(value.into(), self.out);
        }
    }

    fn location(&mut self, location: &Location<'_>) {
        self.text("medium", location.medium.as_deref());
        self.integer("group_idx", location.group);
        self.text("locality", location.locality.as_deref());
        self.text("ownership", location.ownership.as_deref());
    }
}

/// Writes `[ts, [`. The number of events is written later, at the end of the payload. The rank, if any, follows the events.
fn head(ts: f64, rank: Option<i64>) -> Vec<u8> {
    let mut out = vec![if rank.is_some() { 0x93 } else { 0x92 }, 0xCB];
    out.extend_from_slice(&ts.to_be_bytes());
    out.extend_from_slice(&[0xDD, 0, 0, 0, 0]);
    out
}

/// Writes token ids or, under EAGLE, pairs of token ids.
fn tokens(out: &mut Vec<u8>, values: &[u32], pairs: bool) {
    if !pairs {
        write_array(values.len(), out);
        return values.iter().for_each(|&value| write_unsigned(value.into(), out));
    }
    write_array(values.len() / 2, out);
    for pair in values.chunks_exact(2) {
        out.push(0x92);
        pair.iter().for_each(|&value| write_unsigned(value.into(), out));
    }
}
