//! Writes decoded events into a scratch, as `scan` does.

use crate::keys;
use crate::step_counter;
use crate::wire::msgpack::{Int, write_array, write_bytes, write_integer, write_text};
use crate::wire::scan::{self, Kind, Run, Scratch, Span};

use super::items::Items;
use super::value::Value;
use super::{BlockRemoved, BlockStored, Event, Token};

/// Writes events into a scratch one after another. Of an integer with more than 64 bits, only the lowest 64 bits are written.
pub(super) struct ScratchWriter<'a> {
    scratch: &'a mut Scratch,
    /// The bytes of texts and lists, to which the spans of the events refer. Spans never start at 0.
    pub bytes: Vec<u8>,
}

impl<'a> ScratchWriter<'a> {
    /// Empties a scratch, and creates a writer for it.
    pub fn new(scratch: &'a mut Scratch) -> Self {
        scratch.clear();
        Self { scratch, bytes: vec![0] }
    }

    pub fn add(&mut self, event: &Event) {
        let event = match event {
            Event::Stored(stored) => self.stored(stored),
            Event::Removed(removed) => self.removed(removed),
            Event::Cleared(fields) => self.cleared(fields),
        };
        self.scratch.events.push(event);
    }

    fn removed(&mut self, removed: &BlockRemoved) -> scan::Event {
        self.scratch.digests |= removed.block_hashes.digests.is_some();
        scan::Event {
            hashes: self.hashes(&removed.block_hashes.values),
            medium: self.text(removed.medium.as_deref()),
            group: lowest_bits(removed.group_idx),
            locality: self.text(removed.locality.as_deref()),
            ownership: self.text(removed.ownership.as_deref()),
            ..scan::Event::new(Kind::Removed)
        }
    }

    /// Writes the tier and the group of a clear. Invalid fields are ignored: a clear of too many blocks never causes false matches.
    fn cleared(&mut self, fields: &[(String, Value)]) -> scan::Event {
        let mut event = scan::Event::new(Kind::Cleared);
        for (name, value) in fields {
            match (name.as_str(), value) {
                ("medium", Value::Text(medium)) => event.medium = self.text(Some(medium)),
                ("group_idx", Value::Int(group)) => event.group = lowest_bits(Some(*group)),
                _ => {}
            }
        }
        event
    }

    fn stored(&mut self, stored: &BlockStored) -> scan::Event {
        self.scratch.digests |= stored.block_hashes.digests.is_some() || stored.parent_block_digest.is_some();
        let items = Items::of_store(stored);
        let hashes = self.hashes(&stored.block_hashes.values);
        let keys = stored.block_keys.as_deref().map(|keys| self.hashes(keys));
        let window = stored.kv_cache_spec_sliding_window;
        let mut event = scan::Event {
            hashes,
            keys: keys.unwrap_or_default(),
            keyed: keys.is_some(),
            lacks_group: stored.lacks_group,
            parent: stored.parent_block_hash,
            block_size: stored.block_size.max(0) as u64,
            lora_id: lowest_bits(stored.lora_id),
            group: lowest_bits(stored.group_idx),
            window: window.map(|window| window.min(i64::MAX.into()) as i64),
            medium: self.text(stored.medium.as_deref()),
            lora_name: self.text(stored.lora_name.as_deref()),
            locality: self.text(stored.locality.as_deref()),
            ownership: self.text(stored.ownership.as_deref()),
            spec_kind: self.text(stored.kv_cache_spec_kind.as_deref()),
            cache_salt: self.text(stored.cache_salt.as_deref()),
            extra_keys: self.extra_keys(stored, &items),
            lookahead: self.lookahead(stored),
            ..scan::Event::new(Kind::Stored)
        };
        if let Some(written) = event.extra_keys {
            scan::extra_keys(written.bytes(&self.bytes), |_, _| event.has_extra_keys = true);
        }
        self.tokens(&stored.token_ids, &items, &mut event);
        event
    }

    fn hashes(&mut self, values: &[u64]) -> Run {
        let start = self.scratch.hashes.len() as u32;
        self.scratch.hashes.extend(values);
        Run {
            start,
            length: values.len() as u32,
        }
    }

    fn text(&mut self, text: Option<&str>) -> Option<Span> {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(text?.as_bytes());
        Span::new(start, self.bytes.len())
    }

    /// Writes tokens, and placeholders for the tokens of multimodal items. The first token determines whether all tokens are single or
    /// pairs; a token of the other form becomes an invalid token.
    fn tokens(&mut self, tokens: &[Token], items: &Items, event: &mut scan::Event) {
        let out = &mut self.scratch.tokens;
        let start = out.len();
        event.pairs = matches!(tokens.first(), Some(Token::Pair(_)));
        event.keyable = tokens.len() as u32;
        let mut runs = items.runs.iter().peekable();
        let mut write = |at: usize, token: Int| {
            if !token.is_u32() {
                event.keyable = event.keyable.min(at as u32);
            }
            out.push(token.bits as u32);
        };
        for (at, token) in tokens.iter().enumerate() {
            while runs.next_if(|run| run.end <= at).is_some() {}
            let is_placeholder = runs.peek().is_some_and(|run| run.start <= at);
            match token {
                Token::Pair(pair) if event.pairs => pair.iter().for_each(|&token| write(at, token)),
                _ if event.pairs => [Int::INVALID; 2].into_iter().for_each(|token| write(at, token)),
                _ if is_placeholder => write(at, Int::from(keys::PLACEHOLDER)),
                Token::Single(token) => write(at, *token),
                _ => write(at, Int::INVALID),
            }
        }
        event.tokens = Run {
            start: start as u32,
            length: (out.len() - start) as u32,
        };
    }

    /// Writes the extra keys of all blocks, and those of multimodal items, as msgpack.
    fn extra_keys(&mut self, stored: &BlockStored, items: &Items) -> Option<Span> {
        if stored.token_ids.is_empty() {
            return None; // no keys are computed
        }
        // Tokens after the last block belong to no block.
        let blocks = stored.block_hashes.values.len();
        let given = stored.extra_keys.as_deref().unwrap_or_default();
        let given = &given[..given.len().min(blocks)];
        let length = if items.is_empty() { given.len() } else { blocks };
        if length == 0 {
            return None;
        }
        let (start, out) = (self.bytes.len(), &mut self.bytes);
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
        Span::new(start, out.len())
    }

    /// Writes, as msgpack, the tokens after the first block that the block's hash also covers. Such tokens of later blocks are not used.
    fn lookahead(&mut self, stored: &BlockStored) -> Option<Span> {
        let lists = stored.lookahead_token_ids.as_deref()?;
        let start = self.bytes.len();
        write_array(lists.len().min(1), &mut self.bytes);
        if let Some(first) = lists.first() {
            write_array(first.len(), &mut self.bytes);
            first.iter().for_each(|&token| write_integer(token, &mut self.bytes));
        }
        Span::new(start, self.bytes.len())
    }
}

fn lowest_bits(value: Option<i128>) -> Option<i64> {
    value.map(|value| value as i64)
}

/// Writes an extra key unchanged if the index supports it. Replaces any other extra key by bytes that no prompt has, so that its block
/// never matches.
fn write_extra(key: &Value, out: &mut Vec<u8>) {
    step_counter::count(1);
    match key {
        Value::Text(text) => write_text(text.as_bytes(), out),
        Value::Int(number) => write_integer(*number, out),
        Value::Bytes(bytes) => write_bytes(bytes, out),
        Value::List(parts) => match &parts[..] {
            [
                id @ (Value::Text(_) | Value::Int(_) | Value::Bytes(_)),
                offset @ Value::Int(number),
            ] if i64::try_from(*number).is_ok() => {
                write_array(2, out);
                write_extra(id, out);
                write_extra(offset, out);
            }
            _ => write_bytes(key.debug_text(usize::MAX).as_bytes(), out),
        },
        _ => write_bytes(key.debug_text(usize::MAX).as_bytes(), out),
    }
}
