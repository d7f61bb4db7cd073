//! Converts multimodal items from the form in which TensorRT-LLM announces them to the form in which prompts name them.
//!
//! Version 2 of TensorRT-LLM's KV cache manager replaces the first token of an item by the item's digest. It replaces each later token by
//! the size of the vocabulary plus the token's position in the item. Version 1 replaces every token of an item by the same placeholder
//! token. `mm_keys` has an entry for each part of an item in a block: the item, and the number of the item's tokens before that part
//! (`gen_multi_modal_tokens` and `KVCacheEventSerializer` in TensorRT-LLM).
//!
//! This module finds the consecutive tokens of each item, called a run, and replaces them by placeholders. Each block of a run gets the
//! extra key that `keys::locals` computes for a prompt with an item at this position. If the tokens of a block's items cannot be found, the
//! block gets a key that no prompt has.

use super::value::Value;
use super::{BlockStored, Token};
use crate::keys;

/// Number of bytes of the extra key that marks blocks whose items have an unknown form. The mark is only the beginning of the items' text,
/// since it is written for each block.
const MARK_BYTES: usize = 16;

/// Consecutive tokens of one item.
#[derive(Debug)]
pub(super) struct Run {
    pub start: usize,
    pub end: usize,
    id: Id,
    /// Position of the item's first token, which can be before the first block of the event.
    origin: i64,
}

/// The hash of an item, as `keys::Item` has it.
#[derive(Clone, Copy, Debug)]
struct Id {
    hash: u64,
    is_placeless: bool,
}

/// An entry of `mm_keys`: the part of an item that is in one block.
struct Part<'a> {
    hash: &'a Value,
    id: Id,
    /// Number of tokens of the item before this part.
    offset: i64,
}

impl<'a> Part<'a> {
    fn read(item: &'a Value) -> Option<Self> {
        let (hash, uuid, offset) = match item {
            Value::Map(fields) => {
                let field = |wanted: &str| fields.iter().find(|(name, _)| name == wanted).map(|(_, value)| value);
                (field("hash")?, field("uuid"), field("start_offset")?)
            }
            Value::List(pair) => match &pair[..] {
                [hash, offset] => (hash, None, offset),
                _ => return None,
            },
            _ => return None,
        };
        let Value::Int(offset) = offset else { return None };
        let offset = i64::try_from(*offset).ok().filter(|offset| *offset >= 0)?;
        // A client knows the uuid that it has sent, but not the digest that the engine computes from the uuid and the contents.
        let id = match (uuid, hash) {
            (Some(Value::Text(text)), _) | (_, Value::Text(text)) => Id::from_digest(keys::item_text(text)),
            (_, Value::Bytes(bytes)) => Id::from_digest(keys::item_bytes(bytes)),
            (_, Value::Int(number)) => Id {
                hash: *number as u64,
                is_placeless: true,
            },
            _ => return None,
        };
        Some(Self { hash, id, offset })
    }
}

impl Id {
    fn from_digest(hash: u64) -> Self {
        Self {
            hash,
            is_placeless: false,
        }
    }
}

impl Run {
    /// Extra key of the item for a block that begins at `start`.
    fn key(&self, start: usize) -> Value {
        let key = if self.id.is_placeless {
            self.id.hash
        } else {
            keys::item_at(self.id.hash, self.origin.saturating_sub(start as i64))
        };
        Value::Int(key.into())
    }
}

/// The items of a store.
#[derive(Debug, Default)]
pub(super) struct Items {
    /// The runs, in the order of their tokens.
    pub runs: Vec<Run>,
    /// Extra keys, each with the position of its block, in the order of the blocks.
    pub keys: Vec<(usize, Value)>,
    /// An extra key for every block if the form of the items is unknown; empty if the form is known.
    pub mark: Vec<u8>,
}

impl Items {
    pub fn of_store(event: &BlockStored) -> Self {
        let blocks = event.block_hashes.values.len();
        let items_field = event.unknown_fields.iter().find(|(name, _)| name == "mm_keys");
        let items_field = items_field
            .map(|(_, items_field)| items_field)
            .filter(|items_field| has_content(items_field));
        let has_digests = event.token_ids.iter().any(|token| matches!(token, Token::Item(_)));
        if items_field.is_none() && !has_digests {
            return Self::default();
        }
        let (mut mark, mut lists) = (Vec::new(), Vec::new());
        if let Some(items_field) = items_field {
            lists = lists_of(items_field, blocks).unwrap_or_else(|| {
                mark = items_field.debug_text(MARK_BYTES).into_bytes();
                mark.truncate(MARK_BYTES);
                Vec::new()
            });
        }
        let size = usize::try_from(event.block_size).unwrap_or(0);
        let has_pairs = event.token_ids.iter().any(|token| matches!(token, Token::Pair(_)));
        if size == 0 || has_pairs || size.checked_mul(blocks) != Some(event.token_ids.len()) {
            return Self { mark, ..Self::default() };
        }
        let mut search = Search {
            tokens: &event.token_ids,
            size,
            parts: lists.iter().map(|items| items.iter().map(Part::read).collect()).collect(),
            has_digests,
            counts: vec![0; blocks],
            vocabulary: None,
            largest_text: -1,
        };
        let runs = search.runs();
        let (mut keys, mut first) = (Vec::new(), 0);
        for (block, &count) in search.counts.iter().enumerate() {
            let (start, end) = (block * size, block * size + size);
            first += runs[first..].iter().take_while(|run| run.end <= start).count();
            let inside = runs[first..].iter().take_while(|run| run.start < end);
            keys.extend(inside.map(|run| (block, run.key(start))));
            let expected = lists.get(block).copied().unwrap_or_default();
            if !lists.is_empty() && count != expected.len() {
                keys.push((block, Value::List(vec![Value::List(expected.to_vec())])));
            }
        }
        Self { runs, keys, mark }
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.mark.is_empty()
    }
}

/// Returns the items of each block; an empty list if no block has items. Returns None if the form of the items is unknown.
fn lists_of(items_field: &Value, blocks: usize) -> Option<Vec<&[Value]>> {
    let Value::List(all) = items_field else { return None };
    let per_block = (all.len() == blocks).then(|| all.iter().map(list_of).collect::<Option<Vec<_>>>());
    // A list that is not divided by block belongs to the event's only block.
    let lists = per_block.flatten().or_else(|| (blocks == 1).then(|| vec![&all[..]]))?;
    let has_items = lists.iter().any(|items| !items.is_empty());
    Some(if has_items { lists } else { Vec::new() })
}

fn list_of(block: &Value) -> Option<&[Value]> {
    match block {
        Value::Nil => Some(&[]),
        Value::List(items) => Some(items),
        _ => None,
    }
}

fn has_content(value: &Value) -> bool {
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

/// The search for the runs in the tokens of a store.
struct Search<'a> {
    tokens: &'a [Token],
    size: usize,
    /// Parts of items, by block; empty if the store has no `mm_keys`.
    parts: Vec<Vec<Option<Part<'a>>>>,
    /// Whether digests replace the first tokens of items (version 2).
    has_digests: bool,
    /// Number of runs found so far in each block.
    counts: Vec<usize>,
    /// Size of the vocabulary, once it is known: larger tokens belong to items (version 2).
    vocabulary: Option<i128>,
    /// The largest token so far that belongs to no item; the vocabulary's size is above this token.
    largest_text: i128,
}

impl Search<'_> {
    fn runs(&mut self) -> Vec<Run> {
        let (mut runs, mut at) = (Vec::<Run>::new(), 0);
        while at < self.tokens.len() {
            match self.run_at(at, runs.last().map(|run| run.id)) {
                Some(run) => {
                    (at / self.size..=(run.end - 1) / self.size).for_each(|block| self.counts[block] += 1);
                    at = run.end;
                    runs.push(run);
                }
                None => {
                    self.largest_text = self.largest_text.max(self.number(at).unwrap_or(-1));
                    at += 1;
                }
            }
        }
        runs
    }

    /// Returns the run that begins at a token. `last` is the item of the previous run.
    fn run_at(&mut self, at: usize, last: Option<Id>) -> Option<Run> {
        let run = |id, origin: i64, end| {
            Some(Run {
                start: at,
                end,
                id,
                origin,
            })
        };
        let part = self.next_part(at).map(|part| (part.id, part.offset));
        if let Token::Item(digest) = &self.tokens[at] {
            let same = |part: &&Part<'_>| matches!(part.hash, Value::Text(text) if text.eq_ignore_ascii_case(digest));
            let id = self.next_part(at).filter(same).map(|part| part.id);
            let is_second = |next: i128| self.vocabulary.map_or(next > self.largest_text, |size| next == size + 1);
            let second = self.number(at + 1).filter(|&next| is_second(next));
            self.vocabulary = second.map(|next| next - 1).or(self.vocabulary);
            let end = match second {
                Some(_) if self.can_continue(at + 1) => self.end_of(at + 1, 1),
                _ => at + 1,
            };
            return run(id.unwrap_or_else(|| Id::from_digest(keys::item_text(digest))), at as i64, end);
        }
        let value = self.number(at)?;
        let step = i128::from(self.number(at + 1) == Some(value + 1));
        match (part, last) {
            // The item began before this event.
            (Some((id, offset @ 1..)), _) if at.is_multiple_of(self.size) && self.fits_item(value, offset) => {
                if step == 1 {
                    self.vocabulary = self.vocabulary.or(Some(value - i128::from(offset)));
                }
                run(id, (at as i64).saturating_sub(offset), self.end_of(at, step))
            }
            // The item follows tokens that belong to no item.
            (_, Some(id)) if self.vocabulary.is_some_and(|size| value > size) => run(id, at as i64, self.end_of(at, 1)),
            (Some((id, 0)), _) if !self.has_digests && self.is_beginning(at) => run(id, at as i64, self.end_of(at, step)),
            _ => None,
        }
    }

    /// Whether a token can belong to an item that has `offset` tokens before it.
    fn fits_item(&self, value: i128, offset: i64) -> bool {
        self.vocabulary.is_none_or(|size| value == size + i128::from(offset))
    }

    fn number(&self, at: usize) -> Option<i128> {
        match self.tokens.get(at)? {
            Token::Single(value) => Some(value.as_i128()),
            _ => None,
        }
    }

    /// The first part, in the block of the token at `at`, whose run was not found yet.
    fn next_part(&self, at: usize) -> Option<&Part<'_>> {
        let block = at / self.size;
        self.parts.get(block)?.get(self.counts[block])?.as_ref()
    }

    /// Whether the item of the preceding token can include the token at `at`.
    fn can_continue(&self, at: usize) -> bool {
        let is_continued = |parts: &Vec<Option<Part<'_>>>| matches!(parts.first(), Some(Some(part)) if part.offset > 0);
        !at.is_multiple_of(self.size) || self.parts.is_empty() || self.parts.get(at / self.size).is_some_and(is_continued)
    }

    /// Returns the end of the run that begins at the token `at`. Each token of the run equals its predecessor plus `step`.
    fn end_of(&self, at: usize, step: i128) -> usize {
        let mut end = at + 1;
        while let (Some(before), Some(next)) = (self.number(end - 1), self.number(end))
            && next == before + step
            && self.can_continue(end)
        {
            end += 1;
        }
        end
    }

    /// Whether the next item of a block begins at the token `at`, in a store without digests. If the next block continues the item, the
    /// offset there determines the beginning. Otherwise the item begins at the first of several equal tokens.
    fn is_beginning(&self, at: usize) -> bool {
        let (block, end) = (at / self.size, (at / self.size + 1) * self.size);
        let parts = &self.parts[block];
        let next = self.parts.get(block + 1).and_then(|parts| parts.first()?.as_ref());
        let last = parts.last().filter(|_| self.counts[block] + 1 == parts.len());
        if let (Some(Some(last)), Some(next)) = (last, next)
            && next.hash == last.hash
            && (1..=self.size as i64).contains(&next.offset)
        {
            return at as i64 == end as i64 - next.offset;
        }
        at + 1 < end && self.number(at) == self.number(at + 1)
    }
}
