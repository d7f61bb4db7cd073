//! Prefetches memory for the blocks of an event before they are placed.

use super::stores::Chain;
use crate::memory::table::{CacheLevel, Stage, TableHash};
use crate::store::shared_state::{Block, SharedState};
use crate::stream::Stream;

/// Number of blocks that are placed between two prefetch steps of one block; placing them takes longer than a memory access.
const BLOCKS_PER_STEP: usize = 8;
/// Number of prefetched blocks that are remembered; a power of two.
const RING_BLOCKS: usize = 4 * BLOCKS_PER_STEP;

/// The values by which tables find a block: its key and its hash, each mixed with the index's secret.
type MixedPair = (TableHash, TableHash);

/// Prefetched blocks; the position of a block in this ring is its index modulo `RING_BLOCKS`. The ring is reused for the next chain, to
/// avoid allocations.
#[derive(Debug)]
pub(super) struct Ring(Box<[MixedPair; RING_BLOCKS]>);

impl Default for Ring {
    fn default() -> Self {
        Self(Box::new([MixedPair::default(); RING_BLOCKS]))
    }
}

impl Chain<'_> {
    /// The block with the index `at`.
    #[inline]
    pub(super) fn block(&self, shared: &SharedState, at: usize) -> Block {
        self.block_at(self.pair(shared, at), at)
    }

    #[inline]
    fn pair(&self, shared: &SharedState, at: usize) -> MixedPair {
        (shared.mixed(self.keys[at]), shared.mixed(self.hashes[at]))
    }

    #[inline]
    fn block_at(&self, (mixed_key, mixed_hash): MixedPair, at: usize) -> Block {
        Block {
            hash: self.hashes[at],
            key: self.keys[at],
            local: self.locals.map_or(0, |locals| locals[at]),
            context: self.context,
            keyed: self.locals.is_none(),
            mixed_key,
            mixed_hash,
        }
    }
}

/// Prefetches the blocks of one chain. In a large table, access to a block means several cache misses, each of which depends on the
/// previous one. So a block is prefetched in up to three steps.
pub(super) struct Prefetcher<'a> {
    pub(super) chain: &'a Chain<'a>,
    pub(super) ring: &'a mut Ring,
    /// The part of the tables that is in a near cache.
    pub(super) cache_level: CacheLevel,
}

impl Prefetcher<'_> {
    /// Number of steps in which a block is prefetched.
    fn steps(&self) -> usize {
        match self.cache_level {
            CacheLevel::Near => 0,
            CacheLevel::Middle => 1,
            CacheLevel::Far => 3,
        }
    }

    /// Prefetches memory for the first blocks.
    pub(super) fn start(&mut self, stream: &Stream, shared: &SharedState) {
        let first = (self.steps() * BLOCKS_PER_STEP).min(self.chain.hashes.len());
        for at in 0..first {
            let pair = self.chain.pair(shared, at);
            let stage = match at / BLOCKS_PER_STEP {
                0 => Stage::Bucket,
                1 => Stage::Segment,
                _ => Stage::Directory,
            };
            prefetch_pair(stream, shared, pair, stage);
            self.ring.0[at] = pair;
        }
    }

    /// Returns the block with the index `at`, which is placed next, and prefetches memory for later blocks.
    #[inline]
    pub(super) fn next(&mut self, stream: &Stream, shared: &SharedState, at: usize) -> Block {
        let count = self.chain.hashes.len();
        match self.cache_level {
            CacheLevel::Near => return self.chain.block(shared, at),
            CacheLevel::Middle => self.add_block(stream, shared, at + BLOCKS_PER_STEP, Stage::Bucket),
            CacheLevel::Far => {
                if at + BLOCKS_PER_STEP < count {
                    prefetch_pair(
                        stream,
                        shared,
                        self.ring.0[(at + BLOCKS_PER_STEP) % RING_BLOCKS],
                        Stage::Bucket,
                    );
                }
                if at + 2 * BLOCKS_PER_STEP < count {
                    prefetch_pair(
                        stream,
                        shared,
                        self.ring.0[(at + 2 * BLOCKS_PER_STEP) % RING_BLOCKS],
                        Stage::Segment,
                    );
                }
                self.add_block(stream, shared, at + 3 * BLOCKS_PER_STEP, Stage::Directory);
            }
        }
        self.chain.block_at(self.ring.0[at % RING_BLOCKS], at)
    }

    /// Adds the block with the index `at` to the ring, if it exists, and takes its first prefetch step.
    #[inline]
    fn add_block(&mut self, stream: &Stream, shared: &SharedState, at: usize, stage: Stage) {
        if at < self.chain.hashes.len() {
            let pair = self.chain.pair(shared, at);
            prefetch_pair(stream, shared, pair, stage);
            self.ring.0[at % RING_BLOCKS] = pair;
        }
    }
}

#[inline(always)]
fn prefetch_pair(stream: &Stream, shared: &SharedState, (mixed_key, mixed_hash): MixedPair, stage: Stage) {
    if shared.view.heads.cache_level() > CacheLevel::Near {
        shared.view.heads.prefetch(mixed_key, stage);
    }
    stream.prefetch(mixed_hash, stage);
}
