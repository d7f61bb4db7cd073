//! Events in the one form that `scan` reads.

use crate::keys;
use crate::step_counter;

use super::items::Items;
use super::value::{Value, write, write_array, write_bytes, write_integer, write_text};
use super::{BlockRemoved, BlockStored, Event, Token};

/// Returns a number's lowest 64 bits as a signed number.
fn signed(value: i128) -> i128 {
    i128::from(value as i64)
}

/// Encodes events as a payload that `scan` reads with larger limits than a peer's, and that leads an index to the same state.
pub fn normalised(events: &[Event]) -> Vec<u8> {
    let mut normaliser = Normaliser::default();
    events.iter().for_each(|event| normaliser.add(event));
    normaliser.finish(None)
}

/// Writes a payload in this form, one event after the other.
#[derive(Default)]
pub(super) struct Normaliser {
    out: Vec<u8>,
    count: u32,
}

/// The beginning of a batch, whose last four bytes are the number of events.
const BEGINNING: [u8; 7] = [0x92, 0x00, 0xDD, 0, 0, 0, 0];

impl Normaliser {
    pub fn add(&mut self, event: &Event) {
        if self.count == 0 {
            self.out.extend(BEGINNING);
        }
        self.count += 1;
        match event {
            Event::Stored(stored) => write_stored(stored, &mut self.out),
            Event::Removed(removed) => write_removed(removed, &mut self.out),
            Event::Cleared(fields) => write_cleared(fields, &mut self.out),
        }
    }

    pub fn finish(mut self, rank: Option<i128>) -> Vec<u8> {
        if self.count == 0 {
            return vec![0x92, 0x00, 0x90];
        }
        self.out[BEGINNING.len() - 4..BEGINNING.len()].copy_from_slice(&self.count.to_be_bytes());
        if let Some(rank) = rank {
            self.out[0] = 0x93;
            write_integer(signed(rank), &mut self.out);
        }
        self.out
    }
}

/// Writes the fields of a map event, and counts them.
struct FieldWriter<'a> {
    out: &'a mut Vec<u8>,
    start: usize,
    count: usize,
}

impl<'a> FieldWriter<'a> {
    fn new(tag: &str, out: &'a mut Vec<u8>) -> Self {
        let mut writer = Self {
            start: out.len(),
            out,
            count: 0,
        };
        // Of fewer fields than 16 a map can have the header of more.
        writer.out.extend([0xDE, 0, 0]);
        write_text(tag, writer.name("type"));
        writer
    }

    fn name(&mut self, name: &str) -> &mut Vec<u8> {
        self.count += 1;
        write_text(name, self.out);
        self.out
    }

    fn hashes(&mut self, name: &str, values: &[u64]) {
        let out = self.name(name);
        write_array(values.len(), out);
        values.iter().for_each(|&value| write_integer(value.into(), out));
    }

    fn integer(&mut self, name: &str, value: Option<i128>) {
        if let Some(value) = value {
            write_integer(value, self.name(name));
        }
    }

    fn text(&mut self, name: &str, value: Option<&str>) {
        if let Some(value) = value {
            write_text(value, self.name(name));
        }
    }

    fn finish(self) {
        self.out[self.start + 2] = self.count as u8;
    }
}

fn write_removed(event: &BlockRemoved, out: &mut Vec<u8>) {
    let mut fields = FieldWriter::new("BlockRemoved", out);
    fields.hashes("block_hashes", &event.block_hashes.values);
    fields.text("medium", event.medium.as_deref());
    fields.integer("group_idx", event.group_idx.map(signed));
    fields.text("locality", event.locality.as_deref());
    fields.text("ownership", event.ownership.as_deref());
    fields.finish();
}

/// Writes the tier and the group that a clear is limited to. Invalid fields are ignored: clearing too much never causes false matches.
fn write_cleared(unknown_fields: &[(String, Value)], out: &mut Vec<u8>) {
    let mut fields = FieldWriter::new("AllBlocksCleared", out);
    for (name, value) in unknown_fields {
        match (name.as_str(), value) {
            ("medium", Value::Text(medium)) => fields.text(name, Some(medium)),
            ("group_idx", Value::Int(group)) => fields.integer(name, Some(signed(*group))),
            _ => {}
        }
    }
    fields.finish();
}

fn write_stored(event: &BlockStored, out: &mut Vec<u8>) {
    let mut fields = FieldWriter::new("BlockStored", out);
    fields.hashes("block_hashes", &event.block_hashes.values);
    let parent = fields.name("parent_block_hash");
    match event.parent_block_hash {
        Some(hash) => write_integer(hash.into(), parent),
        None => parent.push(0xC0),
    }
    let items = Items::of_store(event);
    write_tokens(&event.token_ids, &items, fields.name("token_ids"));
    fields.integer("block_size", Some(event.block_size.max(0)));
    fields.integer("lora_id", event.lora_id.map(signed));
    fields.text("medium", event.medium.as_deref());
    fields.text("lora_name", event.lora_name.as_deref());
    write_extra_keys(event, &items, &mut fields);
    fields.integer("group_idx", event.group_idx.map(signed));
    fields.text("kv_cache_spec_kind", event.kv_cache_spec_kind.as_deref());
    let window = event.kv_cache_spec_sliding_window.map(|window| window.min(i64::MAX.into()));
    fields.integer("kv_cache_spec_sliding_window", window);
    fields.text("locality", event.locality.as_deref());
    fields.text("ownership", event.ownership.as_deref());
    fields.text("cache_salt", event.cache_salt.as_deref());
    if let Some(keys) = &event.block_keys {
        fields.hashes("block_keys", keys);
    }
    if let Some(blocks) = &event.lookahead_token_ids {
        let out = fields.name("lookahead_token_ids");
        write_array(blocks.len(), out);
        for tokens in blocks {
            write_array(tokens.len(), out);
            tokens.iter().for_each(|&token| write_integer(token, out));
        }
    }
    fields.finish();
}

/// Writes tokens, with placeholders for those of multimodal items. All have the form of the first one, single tokens or pairs; a token of
/// the other form is invalid.
fn write_tokens(tokens: &[Token], items: &Items, out: &mut Vec<u8>) {
    let has_pairs = matches!(tokens.first(), Some(Token::Pair(_)));
    write_array(tokens.len(), out);
    let mut runs = items.runs.iter().peekable();
    for (at, token) in tokens.iter().enumerate() {
        while runs.next_if(|run| run.end <= at).is_some() {}
        let is_placeholder = runs.peek().is_some_and(|run| run.start <= at);
        match token {
            Token::Pair(pair) if has_pairs => {
                write_array(2, out);
                pair.iter().for_each(|value| write_integer(value.as_i128(), out));
            }
            _ if has_pairs => out.extend([0x92, 0xFF, 0xFF]),
            _ if is_placeholder => write_integer(keys::PLACEHOLDER.into(), out),
            Token::Single(value) => write_integer(value.as_i128(), out),
            _ => write_integer(-1, out),
        }
    }
}

// --- extra keys

/// Writes the extra keys of all blocks, including multimodal items.
fn write_extra_keys(event: &BlockStored, items: &Items, fields: &mut FieldWriter<'_>) {
    if event.token_ids.is_empty() {
        return; // no key is made
    }
    // What comes after the last block belongs to no block.
    let blocks = event.block_hashes.values.len();
    let given = event.extra_keys.as_deref().unwrap_or_default();
    let given = &given[..given.len().min(blocks)];
    let length = if items.is_empty() { given.len() } else { blocks };
    if length == 0 {
        return;
    }
    let out = fields.name("extra_keys");
    write_array(length, out);
    step_counter::count(length);
    let mut rest = &items.keys[..];
    for at in 0..length {
        let keys = given.get(at).and_then(Option::as_deref);
        let (own, others) = rest.split_at(rest.partition_point(|(block, _)| *block == at));
        rest = others;
        let mark = items.mark.as_slice();
        if keys.is_none() && own.is_empty() && mark.is_empty() {
            out.push(0xC0);
            continue;
        }
        let keys = keys.unwrap_or_default();
        write_array(keys.len() + own.len() + usize::from(!mark.is_empty()), out);
        keys.iter().for_each(|key| write_extra(key, out));
        own.iter().for_each(|(_, key)| write_extra(key, out));
        if !mark.is_empty() {
            write_bytes(mark, out);
        }
    }
}

/// Writes a key that the index supports unchanged, and any other key as bytes that no prompt has, so that its block never matches.
fn write_extra(key: &Value, out: &mut Vec<u8>) {
    let is_plain = |key: &Value| matches!(key, Value::Text(_) | Value::Int(_) | Value::Bytes(_));
    let is_known = match key {
        Value::List(parts) => match &parts[..] {
            [id, Value::Int(offset)] => is_plain(id) && i64::try_from(*offset).is_ok(),
            _ => false,
        },
        key => is_plain(key),
    };
    if is_known {
        write(key, out);
    } else {
        let mut bytes = Vec::new();
        write(key, &mut bytes);
        write_bytes(&bytes, out);
    }
}
