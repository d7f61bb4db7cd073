//! Learns from stores: the groups of an engine, the scheme by which it hashes blocks, and the salts of its prompts.

use super::PayloadEvents;
use super::block_keys::TokenStore;
use crate::groups::GroupKind;
use crate::groups::engine_hash::Sample;
use crate::store::shared_state::SharedState;
use crate::stream::Stream;
use crate::wire::scan::{Event, Extra, extra_keys, first_ints};

/// Maximum number of prompts of one batch from which salts are learned.
const MAX_SALTED: usize = 1_024;

impl Stream {
    /// Learns a group of the engine.
    #[inline]
    pub(super) fn learn(&mut self, shared: &SharedState, group: i64, kind: GroupKind, size: u32) -> Result<(), &'static str> {
        if self.groups.kind(group).is_none() && self.groups.all().len() >= shared.limits.groups {
            return Err("too-many-groups");
        }
        self.has_new_groups |= self.groups.learn(group, kind, size);
        Ok(())
    }

    /// Learns the scheme by which the engine hashes prompts, and the salt of a prompt, from the prompt's first block.
    #[inline]
    pub(super) fn learn_hashing(&mut self, read: &PayloadEvents<'_>, event: &Event) {
        if event.lookahead.is_some() && !self.groups.has_lookahead {
            (self.groups.has_lookahead, self.has_new_groups) = (true, true);
        }
        self.learn_inputs(read, event);
        let has_key = u64::from(event.keyable) >= event.block_size;
        let is_plain = event.lora_name.is_none() && event.lora_id.is_none() && !event.pairs && has_key;
        let is_wanted = event.extra_keys.is_some() || (self.groups.hashing.is_none() && self.sample.is_none());
        if is_wanted && is_plain && event.parent_hash().is_none() {
            self.learn_from_root(read, event);
        }
    }

    /// Learns whether hashes of blocks might cover values that no event contains. Keys do not show the namespace of their blocks.
    #[inline]
    pub(super) fn learn_inputs(&mut self, read: &PayloadEvents<'_>, event: &Event) {
        if !self.groups.has_unknown_inputs && (event.keyed || has_unknown_inputs(read, event)) {
            (self.groups.has_unknown_inputs, self.has_new_groups) = (true, true);
        }
    }

    /// Learns whether hashes cover only their own page, without the pages before it, as in SGLang 0.4.8 to 0.5.6. In these releases, a
    /// parent can be any of several blocks with its hash, and a block whose parent is `nil` is not always the first block of a prompt.
    #[inline]
    pub(super) fn learn_page_hashes(&mut self, store: &TokenStore<'_>, parent: Option<u64>) {
        if parent.is_none() && !self.evidence.has_page_hashes && self.evidence.pages_left > 0 {
            self.compare_page_hash(store);
        }
    }

    #[cold]
    fn compare_page_hash(&mut self, store: &TokenStore<'_>) {
        if let Some(&hash) = store.hashes.first() {
            self.evidence.pages_left -= 1;
            let size = store.scheme.size as usize;
            let hash_of = |tokens: &[u32]| tuple_hash(tokens.iter().map(|&token| u64::from(token)));
            let expected = if store.pairs {
                tuple_hash(store.tokens.chunks_exact(2).take(size).map(hash_of))
            } else {
                hash_of(&store.tokens[..size])
            };
            self.evidence.has_page_hashes = hash == expected;
        }
    }

    #[cold]
    fn learn_from_root(&mut self, read: &PayloadEvents<'_>, event: &Event) {
        let (mut salt, mut is_plain) = (None, true);
        if let Some(raw) = read.extra_keys(event) {
            extra_keys(raw, |block, extra| match extra {
                Extra::Text(text) if block == 0 && salt.is_none() => salt = Some(text),
                _ => is_plain &= block > 0,
            });
        }
        let (hashes, tokens) = (
            event.hashes.slice(&read.scratch.hashes),
            event.tokens.slice(&read.scratch.tokens),
        );
        let size = usize::try_from(event.block_size).unwrap_or(usize::MAX);
        let is_whole = size.checked_mul(hashes.len()) == Some(tokens.len());
        let mut lookahead = Vec::new();
        if let Some(raw) = read.bytes(event.lookahead) {
            first_ints(raw, &mut lookahead);
        }
        let is_known = is_plain && is_whole && event.lookahead.is_some() != lookahead.is_empty();
        let sample = || Sample::from_block(tokens.get(..size).filter(|_| is_known)?, &lookahead, *hashes.first()?);
        match salt {
            None if self.groups.hashing.is_none() && self.sample.is_none() => {
                self.sample = sample();
                self.has_new_groups |= self.groups.needs_hashing();
            }
            None => {}
            Some(salt) => {
                let may_need = self.group_cache.is_some() || self.groups.all().len() > 1 || self.last < 0;
                let sample = if may_need && self.salted.len() < MAX_SALTED {
                    sample()
                } else {
                    None
                };
                match sample {
                    Some(sample) => self.salted.push((salt.to_owned(), sample)),
                    None => self.misses_salts |= is_whole && is_plain,
                }
            }
        }
    }
}

/// The hash that CPython (from 3.8 on) computes for a tuple whose items have these hashes (`Objects/tupleobject.c`). The hash of a token id
/// is the token id.
fn tuple_hash(hashes: impl ExactSizeIterator<Item = u64>) -> u64 {
    const PRIMES: [u64; 3] = [
        11_400_714_785_074_694_791,
        14_029_467_366_897_019_727,
        2_870_177_450_012_600_261,
    ];
    let length = hashes.len() as u64;
    let mix = |sum: u64, hash: u64| {
        let sum = sum.wrapping_add(hash.wrapping_mul(PRIMES[1]));
        sum.rotate_left(31).wrapping_mul(PRIMES[0])
    };
    match hashes.fold(PRIMES[2], mix).wrapping_add(length ^ PRIMES[2] ^ 3_527_539) {
        u64::MAX => 1_546_275_796,
        hash => hash,
    }
}

/// Whether the hashes of a store cover values that no event contains: the path of a LoRA, or the positions of multimodal items.
fn has_unknown_inputs(read: &PayloadEvents<'_>, event: &Event) -> bool {
    let mut others = event.lora_name.is_some() || event.lora_id.is_some();
    if let Some(raw) = read.extra_keys(event) {
        extra_keys(raw, |block, extra| {
            others |= block > 0 || event.parent_hash().is_some() || !matches!(extra, Extra::Text(_));
        });
    }
    others
}
