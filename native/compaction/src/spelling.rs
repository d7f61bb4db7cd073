//! Events that are told, as payloads that `Compactor::fold` reads again.
//!
//! They are map events in the names of `kvevents.events`, without what is nil. Where an event does not fit in a payload any more it is
//! cut between two blocks, of which the first is then the parent of the second.

use super::store::{Place, Store, Told, entries, joined};

/// Bytes of `[ts, [`, and the most that a number or the length of an array takes.
const HEAD: usize = 1 + 9 + ARRAY;
const NUMBER: usize = 9;
const ARRAY: usize = 5;

/// Payloads that are written one after the other.
pub struct Sheets {
    limit: usize,
    ts: f64,
    done: Vec<Vec<u8>>,
    out: Vec<u8>,
    events: u32,
}

impl Sheets {
    /// Payloads of at most `limit` bytes, but for one block that takes more. A clear of everything is the first event.
    pub fn new(limit: usize, ts: f64) -> Self {
        let mut sheets = Self {
            limit,
            ts,
            done: Vec::new(),
            out: head(ts),
            events: 0,
        };
        sheets.event(|out| map(out, 1, "AllBlocksCleared"));
        sheets
    }

    /// The next event.
    pub fn take(&mut self, event: &Told) {
        match event {
            Told::Stored(store) => self.stored(store),
            Told::Removed(hashes, place) => self.removed(hashes, place),
        }
    }

    /// All payloads.
    pub fn finish(mut self) -> Vec<Vec<u8>> {
        self.turn();
        self.done
    }

    fn turn(&mut self) {
        let mut full = std::mem::replace(&mut self.out, head(self.ts));
        full[HEAD - 4..HEAD].copy_from_slice(&self.events.to_be_bytes());
        self.events = 0;
        self.done.push(full);
    }

    fn event(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.out);
        self.events += 1;
    }

    /// Writes an event if there is room for all of it.
    fn fits(&mut self, write: impl FnOnce(&mut Vec<u8>)) -> bool {
        let start = self.out.len();
        write(&mut self.out);
        let fits = self.out.len() <= self.limit;
        if fits {
            self.events += 1;
        } else {
            self.out.truncate(start);
        }
        fits
    }

    /// How many blocks from `first` on still fit beside what an event takes without any; one at least, in a payload of its own if need
    /// be.
    fn room(&mut self, first: usize, count: usize, shell: usize, cost: impl Fn(usize) -> usize) -> usize {
        loop {
            let mut left = self.limit.checked_sub(self.out.len() + shell);
            let mut end = first;
            while end < count
                && let Some(less) = left.and_then(|left| left.checked_sub(cost(end)))
            {
                (left, end) = (Some(less), end + 1);
            }
            let fits = end > first || (count == first && left.is_some());
            if fits || self.events == 0 {
                return end.max(count.min(first + 1));
            }
            self.turn();
        }
    }

    fn stored(&mut self, store: &Store) {
        let mut extras = Vec::new();
        let _ = entries(store.extra_keys.as_deref(), &mut extras);
        let blocks = Blocks {
            store,
            extras,
            each: store.tokens.len() / store.hashes.len().max(1),
        };
        let (mut first, count) = (0, store.hashes.len());
        if self.fits(|out| blocks.spell(0, count, out)) {
            return;
        }
        let shell = blocks.shell();
        while first == 0 || first < count {
            let end = self.room(first, count, shell, |at| blocks.cost(at));
            self.event(|out| blocks.spell(first, end, out));
            first = end.max(1);
        }
    }

    fn removed(&mut self, hashes: &[u64], place: &Place) {
        if self.fits(|out| removal(hashes, place, out)) {
            return;
        }
        let mut shell = Vec::new();
        removal(&[], place, &mut shell);
        let mut first = 0;
        while first < hashes.len() {
            let end = self.room(first, hashes.len(), shell.len() + ARRAY, |at| number_bytes(hashes[at]));
            self.event(|out| removal(&hashes[first..end], place, out));
            first = end;
        }
    }
}

/// A store, a part at a time.
struct Blocks<'a> {
    store: &'a Store,
    extras: Vec<Option<&'a [u8]>>,
    /// Numbers that are the tokens of one block.
    each: usize,
}

impl<'a> Blocks<'a> {
    fn tokens(&self, first: usize, end: usize) -> &'a [u32] {
        &self.store.tokens[first * self.each..end * self.each]
    }

    /// Bytes of an event of no blocks, about.
    fn shell(&self) -> usize {
        let mut out = Vec::new();
        self.spell(0, 0, &mut out);
        out.len() + 4 * ARRAY + NUMBER + "extra_keys ".len()
    }

    /// Bytes of one block.
    fn cost(&self, at: usize) -> usize {
        let tokens: usize = self.tokens(at, at + 1).iter().map(|&token| number_bytes(token.into())).sum();
        let pairs = if self.store.pairs { self.each / 2 } else { 0 };
        let extra = self.extras.get(at).map_or(0, |extra| extra.map_or(1, <[u8]>::len));
        let key = self.store.keys.as_ref().map_or(0, |keys| number_bytes(keys[at]));
        number_bytes(self.store.hashes[at]) + tokens + pairs + key + extra
    }

    /// Blocks from `first` to before `end`, as an event.
    fn spell(&self, first: usize, end: usize, out: &mut Vec<u8>) {
        let store = self.store;
        let parent = if first > 0 && self.each > 0 {
            Some(store.hashes[first - 1])
        } else {
            store.parent
        };
        let extra = joined(self.extras.get(first..end).unwrap_or_default().iter().copied());
        let mut fields = Fields::open(out, "BlockStored");
        fields.key("block_hashes");
        hashes(fields.out, &store.hashes[first..end]);
        fields.key("parent_block_hash");
        match parent {
            Some(hash) => number(fields.out, hash),
            None => fields.out.push(0xC0),
        }
        fields.key("token_ids");
        tokens(fields.out, self.tokens(first, end), store.pairs);
        fields.key("block_size");
        number(fields.out, store.block_size);
        fields.integer("lora_id", store.lora_id);
        fields.text("lora_name", store.lora_name.as_deref());
        fields.raw("extra_keys", extra.as_deref());
        fields.place(&store.place);
        fields.text("kv_cache_spec_kind", store.kind.as_deref());
        fields.integer("kv_cache_spec_sliding_window", store.window);
        fields.text("cache_salt", store.cache_salt.as_deref());
        if let Some(keys) = &store.keys {
            fields.key("block_keys");
            hashes(fields.out, &keys[first..end]);
        }
        fields.close();
    }
}

fn removal(gone: &[u64], place: &Place, out: &mut Vec<u8>) {
    let mut fields = Fields::open(out, "BlockRemoved");
    fields.key("block_hashes");
    hashes(fields.out, gone);
    fields.place(place);
    fields.close();
}

// --- msgpack

/// Fields of a map event, which are counted as they are written.
struct Fields<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
    count: u8,
}

impl<'a> Fields<'a> {
    fn open(out: &'a mut Vec<u8>, tag: &str) -> Self {
        let start = out.len();
        map(out, 0, tag);
        Self { out, start, count: 1 }
    }

    fn close(self) {
        self.out[self.start + 2] = self.count;
    }

    fn key(&mut self, name: &str) {
        text(self.out, name.as_bytes());
        self.count += 1;
    }

    fn text(&mut self, name: &str, value: Option<&[u8]>) {
        if let Some(value) = value {
            self.key(name);
            text(self.out, value);
        }
    }

    fn integer(&mut self, name: &str, value: Option<i64>) {
        if let Some(value) = value {
            self.key(name);
            match u64::try_from(value) {
                Ok(value) => number(self.out, value),
                Err(_) => {
                    self.out.push(0xD3);
                    self.out.extend_from_slice(&value.to_be_bytes());
                }
            }
        }
    }

    fn raw(&mut self, name: &str, value: Option<&[u8]>) {
        if let Some(value) = value {
            self.key(name);
            self.out.extend_from_slice(value);
        }
    }

    fn place(&mut self, place: &Place) {
        self.text("medium", place.medium.as_deref());
        self.integer("group_idx", place.group);
        self.text("locality", place.locality.as_deref());
        self.text("ownership", place.ownership.as_deref());
    }
}

/// `[ts, [`, the number of events to be filled in.
fn head(ts: f64) -> Vec<u8> {
    let mut out = vec![0x92, 0xCB];
    out.extend_from_slice(&ts.to_be_bytes());
    out.extend_from_slice(&[0xDD, 0, 0, 0, 0]);
    out
}

/// The head of a map event with so many fields, its tag among them.
fn map(out: &mut Vec<u8>, fields: u8, tag: &str) {
    out.extend_from_slice(&[0xDE, 0, fields]);
    text(out, b"type");
    text(out, tag.as_bytes());
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

fn array(out: &mut Vec<u8>, length: usize) {
    match length {
        0..=15 => out.push(0x90 | length as u8),
        16..=0xFFFF => {
            out.push(0xDC);
            out.extend_from_slice(&(length as u16).to_be_bytes());
        }
        _ => {
            out.push(0xDD);
            out.extend_from_slice(&(length as u32).to_be_bytes());
        }
    }
}

/// Bytes that `number` writes.
#[inline]
fn number_bytes(value: u64) -> usize {
    let above = |limit: u64| usize::from(value > limit);
    1 + above(0x7F) + above(0xFF) + 2 * above(0xFFFF) + 4 * above(0xFFFF_FFFF)
}

#[inline]
fn number(out: &mut Vec<u8>, value: u64) {
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

fn hashes(out: &mut Vec<u8>, values: &[u64]) {
    array(out, values.len());
    values.iter().for_each(|&value| number(out, value));
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
