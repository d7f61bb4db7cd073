//! Events in the one form that `scan` reads.

use super::value::{Value, write, write_array, write_bytes, write_integer, write_text};
use super::{BlockRemoved, BlockStored, Event, Token};

/// Numbers of which 64 bits count: from 2^63 on they are below zero.
fn signed(value: i128) -> i128 {
    i128::from(value as i64)
}

/// Events as a payload that `scan` reads by limits that are larger than a peer's, and that leads an index to the same state.
pub fn normalised(events: &[Event]) -> Vec<u8> {
    let mut out = vec![0x92, 0x00];
    write_array(events.len(), &mut out);
    for event in events {
        match event {
            Event::Stored(stored) => write_stored(stored, &mut out),
            Event::Removed(removed) => write_removed(removed, &mut out),
            Event::Cleared(fields) => write_cleared(fields, &mut out),
        }
    }
    out
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

/// The tier and the group that a clear is about. A field that makes no sense says nothing: to clear too much gives no false credit.
fn write_cleared(unrecognised: &[(String, Value)], out: &mut Vec<u8>) {
    let mut fields = FieldWriter::new("AllBlocksCleared", out);
    for (name, value) in unrecognised {
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
    write_tokens(&event.token_ids, fields.name("token_ids"));
    fields.integer("block_size", Some(event.block_size.max(0)));
    fields.integer("lora_id", event.lora_id.map(signed));
    fields.text("medium", event.medium.as_deref());
    fields.text("lora_name", event.lora_name.as_deref());
    if let Some(blocks) = extra_keys(event) {
        let out = fields.name("extra_keys");
        write_array(blocks.len(), out);
        for block in &blocks {
            match block {
                None => out.push(0xC0),
                Some(keys) => {
                    write_array(keys.len(), out);
                    keys.iter().for_each(|key| write_extra(key, out));
                }
            }
        }
    }
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
    fields.finish();
}

/// As they are; of tokens and pairs mixed, which are of no block, as many that are none.
fn write_tokens(tokens: &[Token], out: &mut Vec<u8>) {
    let singles = tokens.iter().filter(|token| matches!(token, Token::Single(_))).count();
    let is_mixed = singles > 0 && singles < tokens.len();
    write_array(tokens.len(), out);
    for token in tokens {
        match token {
            _ if is_mixed => write_integer(-1, out),
            Token::Single(value) => write_integer(value.as_i128(), out),
            Token::Pair(pair) => {
                write_array(2, out);
                pair.iter().for_each(|value| write_integer(value.as_i128(), out));
            }
        }
    }
}

// --- extra keys

type Keys = Vec<Option<Vec<Value>>>;

/// Extra keys of all blocks, with TensorRT-LLM's `mm_keys` among them.
fn extra_keys(event: &BlockStored) -> Option<Keys> {
    let mut keys: Keys = event.extra_keys.clone().unwrap_or_default();
    let items = event
        .unrecognised
        .iter()
        .find(|(name, _)| name == "mm_keys")
        .map(|(_, value)| value);
    if let Some(items) = items.filter(|items| is_something(items)) {
        let more = multimodal_keys(items, event.block_hashes.values.len());
        let length = keys.len().max(more.len());
        keys.resize(length, Some(Vec::new()));
        let found = more.into_iter().map(Some).chain(std::iter::repeat(None));
        for (block, found) in keys.iter_mut().zip(found) {
            block.get_or_insert_default().extend(found.unwrap_or_default());
        }
    }
    (!keys.is_empty()).then_some(keys)
}

fn is_something(value: &Value) -> bool {
    match value {
        Value::Nil | Value::Bool(false) | Value::Int(0) => false,
        Value::Float(value) => *value != 0.0,
        Value::Text(text) => !text.is_empty(),
        Value::Bytes(bytes) => !bytes.is_empty(),
        Value::List(items) => !items.is_empty(),
        Value::Map(fields) => !fields.is_empty(),
        _ => true,
    }
}

/// Per block a list of `{"hash", "start_offset"}`, or of pairs of the two. A list that is not one per block is of the only block.
/// Anything else marks every block, so that none of them is credited.
fn multimodal_keys(given: &Value, blocks: usize) -> Vec<Vec<Value>> {
    let is_block = |block: &Value| matches!(block, Value::Nil | Value::List(_));
    match given {
        Value::List(all) if all.len() == blocks && all.iter().all(is_block) => {
            let items = |block: &Value| match block {
                Value::List(items) => items.iter().map(item).collect(),
                _ => Vec::new(),
            };
            all.iter().map(items).collect()
        }
        Value::List(items) if blocks == 1 => vec![items.iter().map(item).collect()],
        _ => vec![vec![encoded(given)]; blocks],
    }
}

fn item(item: &Value) -> Value {
    let Value::Map(fields) = item else { return item.clone() };
    let find = |wanted: &str| fields.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.clone());
    match find("hash") {
        Some(hash) => Value::List(vec![hash, find("start_offset").unwrap_or(Value::Nil)]),
        None => item.clone(),
    }
}

fn encoded(value: &Value) -> Value {
    let mut bytes = Vec::new();
    write(value, &mut bytes);
    Value::Bytes(bytes)
}

/// A key that the index knows as it is; any other as bytes, which no prompt has: its block is like no other, and never credited.
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
