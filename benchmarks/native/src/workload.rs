//! The data that all sides index and look up: equal tokens, equal engine hashes, equal payloads.

use std::sync::Arc;

use dynamo_kv_router::protocols::{BlockHashOptions, LocalBlockHash, compute_block_hash_for_seq, compute_next_seq_hash};

/// Default number of tokens of a block.
pub const BLOCK: u32 = 16;
/// Number of blocks of a long chain: a prompt of 32,768 tokens.
pub const CHAIN: usize = 2_048;
const VOCABULARY: u64 = 128_256;

/// A generator of numbers (SplitMix64), the same for the same seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }

    /// Returns a number from 0 to 1.
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Token ids, uniform over a vocabulary.
    pub fn tokens(&mut self, count: usize) -> impl Iterator<Item = u32> + '_ {
        (0..count).map(|_| self.below(VOCABULARY) as u32)
    }
}

/// The blocks of one prompt. Engine hashes are rolling keys, since `PositionalIndexer` compares the engines' hashes with rolling keys that
/// it computes.
#[derive(Clone, Debug, Default)]
pub struct Chain {
    /// Token ids of all blocks.
    pub tokens: Vec<u32>,
    /// The engine's hash of each block.
    pub hashes: Vec<u64>,
    /// Number of tokens of a block.
    pub size: u32,
}

impl Chain {
    /// Returns a chain of `blocks` random blocks.
    pub fn new(random: &mut Random, blocks: usize, size: u32) -> Self {
        let empty = Self { size, ..Self::default() };
        empty.extended(random, blocks)
    }

    /// Returns the chain's blocks, followed by `blocks` random blocks.
    pub fn extended(&self, random: &mut Random, blocks: usize) -> Self {
        let mut longer = self.clone();
        longer.tokens.extend(random.tokens(blocks * self.size as usize));
        let added = &longer.tokens[self.tokens.len()..];
        for LocalBlockHash(local) in compute_block_hash_for_seq(added, self.size, BlockHashOptions::default()) {
            let key = match longer.hashes.last() {
                Some(&before) => compute_next_seq_hash(before, LocalBlockHash(local)),
                None => local,
            };
            longer.hashes.push(key);
        }
        longer
    }

    /// Returns the first blocks of the chain.
    pub fn prefix(&self, blocks: usize) -> Self {
        Self {
            tokens: self.tokens[..blocks * self.size as usize].to_vec(),
            hashes: self.hashes[..blocks].to_vec(),
            size: self.size,
        }
    }

    /// Returns the number of blocks.
    pub fn blocks(&self) -> usize {
        self.hashes.len()
    }

    /// Returns a batch that stores the blocks `from..to`.
    pub fn store(&self, from: usize, to: usize) -> Vec<u8> {
        let mut out = Vec::new();
        batch(&mut out, 1);
        self.put_store(&mut out, from, to);
        end(&mut out);
        out
    }

    /// Appends an event that stores the blocks `from..to` to an incomplete batch.
    pub fn put_store(&self, out: &mut Vec<u8>, from: usize, to: usize) {
        let parent = from.checked_sub(1).map(|before| self.hashes[before]);
        let tokens = &self.tokens[from * self.size as usize..to * self.size as usize];
        stored(out, &self.hashes[from..to], parent, tokens, self.size);
    }

    /// A batch that stores the last `blocks` blocks in another KV cache group: events have tokens for full attention only.
    pub fn store_last(&self, blocks: usize, kind: &str, window: Option<u32>) -> Vec<u8> {
        let from = self.blocks() - blocks;
        let parent = from.checked_sub(1).map(|before| self.hashes[before]);
        let mut out = Vec::new();
        batch(&mut out, 1);
        stored_in_group(&mut out, &self.hashes[from..], parent, self.size, kind, window);
        end(&mut out);
        out
    }

    /// Returns batches that store all blocks of the chain, `per_event` blocks each.
    pub fn stores(&self, per_event: usize) -> impl Iterator<Item = Vec<u8>> + '_ {
        let starts = (0..self.blocks()).step_by(per_event);
        starts.map(move |from| self.store(from, self.blocks().min(from + per_event)))
    }

    /// Returns batches that remove all blocks of the chain, the last block first, with `per_event` blocks each.
    pub fn removals(&self, per_event: usize) -> impl Iterator<Item = Vec<u8>> + '_ {
        let backwards: Vec<u64> = self.hashes.iter().rev().copied().collect();
        (0..self.blocks()).step_by(per_event).map(move |from| {
            let mut out = Vec::new();
            batch(&mut out, 1);
            removed(&mut out, &backwards[from..backwards.len().min(from + per_event)]);
            end(&mut out);
            out
        })
    }
}

/// Default number of blocks of an event.
const EVENT: usize = 512;

/// The workers' prefixes of chains.
#[derive(Clone, Debug)]
pub struct Holdings {
    /// The chains.
    pub chains: Arc<Vec<Chain>>,
    /// Worker, index of the chain, and number of its blocks that the worker holds from the root on.
    pub held: Vec<(u32, usize, usize)>,
}

impl Holdings {
    /// Returns holdings in which every worker below `workers` holds all blocks of every chain.
    pub fn whole(chains: Vec<Chain>, workers: u32) -> Self {
        let all = |worker| chains.iter().enumerate().map(move |(at, chain)| (worker, at, chain.blocks()));
        let held = (0..workers).flat_map(all).collect();
        Self {
            chains: Arc::new(chains),
            held,
        }
    }

    /// Returns batches that store all held blocks, each with its worker.
    pub fn payloads(&self) -> impl Iterator<Item = (u32, Vec<u8>)> + Send + use<> {
        let chains = self.chains.clone();
        self.held.clone().into_iter().flat_map(move |(worker, chain, blocks)| {
            let chains = chains.clone();
            let starts = (0..blocks).step_by(EVENT);
            starts.map(move |from| (worker, chains[chain].store(from, blocks.min(from + EVENT))))
        })
    }
}

// --- Payloads as vLLM 0.24 to 0.33 sends them: maps, a batch around them. ---

fn array(out: &mut Vec<u8>, length: usize) {
    match length {
        0..=15 => out.push(0x90 | length as u8),
        16..=0xFFFF => {
            out.push(0xDC);
            out.extend((length as u16).to_be_bytes());
        }
        _ => {
            out.push(0xDD);
            out.extend((length as u32).to_be_bytes());
        }
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(0xA0 | text.len() as u8);
    out.extend(text.as_bytes());
}

fn number(out: &mut Vec<u8>, value: u32) {
    match value {
        0..=0x7F => out.push(value as u8),
        0x80..=0xFF => out.extend([0xCC, value as u8]),
        0x100..=0xFFFF => {
            out.push(0xCD);
            out.extend((value as u16).to_be_bytes());
        }
        _ => {
            out.push(0xCE);
            out.extend(value.to_be_bytes());
        }
    }
}

fn hash(out: &mut Vec<u8>, hash: u64) {
    out.push(0xCF);
    out.extend(hash.to_be_bytes());
}

const NIL: u8 = 0xC0;

/// Begins a batch of `events` events.
pub fn batch(out: &mut Vec<u8>, events: usize) {
    out.extend([0x93, 0xCB]);
    out.extend(1_700_000_000.25_f64.to_be_bytes());
    array(out, events);
}

/// Ends a batch with its rank.
pub fn end(out: &mut Vec<u8>) {
    out.push(0);
}

fn stored(out: &mut Vec<u8>, hashes: &[u64], parent: Option<u64>, tokens: &[u32], size: u32) {
    out.push(0x80 | 11);
    text(out, "type");
    text(out, "BlockStored");
    text(out, "block_hashes");
    array(out, hashes.len());
    hashes.iter().for_each(|&value| hash(out, value));
    text(out, "parent_block_hash");
    match parent {
        Some(parent) => hash(out, parent),
        None => out.push(NIL),
    }
    text(out, "token_ids");
    array(out, tokens.len());
    tokens.iter().for_each(|&token| number(out, token));
    text(out, "block_size");
    number(out, size);
    text(out, "lora_id");
    out.push(NIL);
    text(out, "medium");
    text(out, "GPU");
    text(out, "lora_name");
    out.push(NIL);
    text(out, "extra_keys");
    array(out, hashes.len());
    out.extend(std::iter::repeat_n(NIL, hashes.len()));
    text(out, "group_idx");
    out.push(0);
    text(out, "kv_cache_spec_kind");
    text(out, "full_attention");
}

fn stored_in_group(out: &mut Vec<u8>, hashes: &[u64], parent: Option<u64>, size: u32, kind: &str, window: Option<u32>) {
    out.push(0x80 | if window.is_some() { 9 } else { 8 });
    text(out, "type");
    text(out, "BlockStored");
    text(out, "block_hashes");
    array(out, hashes.len());
    hashes.iter().for_each(|&value| hash(out, value));
    text(out, "parent_block_hash");
    match parent {
        Some(parent) => hash(out, parent),
        None => out.push(NIL),
    }
    text(out, "token_ids");
    array(out, 0);
    text(out, "block_size");
    number(out, size);
    text(out, "medium");
    text(out, "GPU");
    text(out, "group_idx");
    out.push(1);
    text(out, "kv_cache_spec_kind");
    text(out, kind);
    if let Some(window) = window {
        text(out, "kv_cache_spec_sliding_window");
        number(out, window);
    }
}

/// An event that removes blocks.
pub fn removed(out: &mut Vec<u8>, hashes: &[u64]) {
    out.push(0x80 | 4);
    text(out, "type");
    text(out, "BlockRemoved");
    text(out, "block_hashes");
    array(out, hashes.len());
    hashes.iter().for_each(|&value| hash(out, value));
    text(out, "medium");
    text(out, "GPU");
    text(out, "group_idx");
    out.push(0);
}
