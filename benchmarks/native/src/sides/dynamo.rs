//! Two indexes of dynamo-kv-router 1.6.1 to which events are applied directly, and the common parts of its three indexes: the decoder and
//! the hash functions.

use std::sync::Arc;

use dynamo_kv_router::indexer::SyncIndexer;
use dynamo_kv_router::nested_map::{LevelIndex, SearchMode};
use dynamo_kv_router::protocols::{BlockHashOptions, LocalBlockHash, OverlapScores, RouterEvent, WorkerWithDpRank};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use dynamo_kv_router::{PositionalIndexer, RadixTree, compute_block_hash_for_seq};
use rustc_hash::FxHashMap;

use super::{Find, Scores, Script, Shared, Side};

/// Positions that `PositionalIndexer` jumps at a time: the value that its documentation gives.
const JUMP: usize = 32;

/// Converts payloads to events as a listener of Dynamo does: with one normalizer per worker.
pub struct Decoder {
    normalizers: Vec<ZmqEventNormalizer>,
    number: u64,
}

impl Decoder {
    pub fn new(workers: u32, size: u32) -> Self {
        Self {
            normalizers: (0..workers).map(|_| ZmqEventNormalizer::new(size)).collect(),
            number: 0,
        }
    }

    pub fn read(&mut self, worker: u32, payload: &[u8], mut apply: impl FnMut(RouterEvent)) {
        let batch = decode_event_batch(payload).expect("the payload is one of the harness");
        let normalizer = &mut self.normalizers[worker as usize];
        let worker = WorkerWithDpRank::new(u64::from(worker), 0);
        for raw in batch.events {
            self.number += 1;
            let event = normalizer.normalize(raw, self.number, worker).expect("nothing is filtered");
            apply(event.into_router_event().expect("the worker is local"));
        }
    }
}

pub fn hashes(tokens: &[u32], size: u32) -> Vec<LocalBlockHash> {
    compute_block_hash_for_seq(tokens, size, BlockHashOptions::default())
}

pub fn sum(scores: &OverlapScores) -> u64 {
    scores.scores.values().map(|&score| u64::from(score)).sum()
}

pub fn listed(scores: &OverlapScores) -> Scores {
    let score = |(worker, &score): (&WorkerWithDpRank, &u32)| (worker.worker_id as u32, score);
    scores.scores.iter().map(score).collect()
}

/// `RadixTree`, which Dynamo's Python class wraps; it is used by one thread.
pub struct Radix {
    tree: RadixTree,
    decoder: Decoder,
    size: u32,
}

impl Radix {
    fn answer(&self, tokens: &[u32]) -> OverlapScores {
        self.tree.find_matches(hashes(tokens, self.size), false)
    }
}

impl Find for Radix {
    fn find(&self, tokens: &[u32]) -> u64 {
        sum(&self.answer(tokens))
    }

    fn scores(&self, tokens: &[u32]) -> Scores {
        listed(&self.answer(tokens))
    }
}

impl Side for Radix {
    const NAME: &'static str = "RadixTree";

    fn new(workers: u32, size: u32) -> Self {
        Self {
            tree: RadixTree::new(),
            decoder: Decoder::new(workers, size),
            size,
        }
    }

    fn run<S: Script + Send + 'static>(&mut self, mut script: S) -> S {
        while let Some((worker, payload)) = script.next(self) {
            let tree = &mut self.tree;
            self.decoder.read(worker, payload, |event| {
                tree.apply_event(event).expect("every parent is there")
            });
        }
        script
    }
}

/// Lookups in an index that several threads share.
pub struct Reader<T> {
    pub index: Arc<T>,
    pub size: u32,
}

impl<T> Clone for Reader<T> {
    fn clone(&self) -> Self {
        Self {
            index: self.index.clone(),
            size: self.size,
        }
    }
}

impl<T: SyncIndexer> Find for Reader<T> {
    fn find(&self, tokens: &[u32]) -> u64 {
        sum(&self.index.find_matches(&hashes(tokens, self.size), false))
    }

    fn scores(&self, tokens: &[u32]) -> Scores {
        listed(&self.index.find_matches(&hashes(tokens, self.size), false))
    }
}

/// `PositionalIndexer` with default settings.
pub struct Positional {
    reader: Reader<PositionalIndexer>,
    blocks: FxHashMap<WorkerWithDpRank, LevelIndex>,
    decoder: Decoder,
}

impl Find for Positional {
    fn find(&self, tokens: &[u32]) -> u64 {
        self.reader.find(tokens)
    }

    fn scores(&self, tokens: &[u32]) -> Scores {
        self.reader.scores(tokens)
    }
}

impl Side for Positional {
    const NAME: &'static str = "Positional";

    fn new(workers: u32, size: u32) -> Self {
        Self {
            reader: Reader {
                index: Arc::new(PositionalIndexer::new_with_mode(JUMP, SearchMode::Strided)),
                size,
            },
            blocks: FxHashMap::default(),
            decoder: Decoder::new(workers, size),
        }
    }

    fn run<S: Script + Send + 'static>(&mut self, mut script: S) -> S {
        while let Some((worker, payload)) = script.next(&self.reader) {
            let (index, blocks) = (&self.reader.index, &mut self.blocks);
            self.decoder.read(worker, payload, |event| {
                index.apply_event(blocks, event, None).expect("every parent is there");
            });
        }
        script
    }
}

impl Shared for Positional {
    type Reader = Reader<PositionalIndexer>;

    fn reader(&self) -> Self::Reader {
        self.reader.clone()
    }
}
