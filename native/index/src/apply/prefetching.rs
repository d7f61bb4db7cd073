//! Prefetches memory for the blocks of an event before they are placed.

use super::stores::Chain;
use crate::memory::table::{CacheLevel, Stage, TableHash};
use crate::store::shared_state::{Block, SharedState};
use crate::stream::Stream;

/// Number of blocks between one prefetch step and the next: placing this many takes longer than a memory access.
const AHEAD: usize = 8;
/// Number of prefetched blocks that are remembered, a power of two.
const RING: usize = 4 * AHEAD;

/// The mixed key and the mixed hash of a block, by which tables find it.
type MixedPair = (TableHash, TableHash);

/// Prefetched blocks, by their number modulo `RING`; kept from one run to the next to avoid allocations.
#[derive(Debug)]
pub(super) struct Ring(Box<[MixedPair; RING]>);

impl Default for Ring {
    fn default() -> Self {
        Self(Box::new([MixedPair::default(); RING]))
    }
}

impl Chain<'_> {
    /// The block `at`.
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

/// Blocks of one chain. In large tables each block needs several dependent cache misses, so it is prefetched in three steps. Small tables
/// need fewer steps.
pub(super) struct Ahead<'a> {
    pub(super) chain: &'a Chain<'a>,
    pub(super) ring: &'a mut Ring,
    /// The part of the tables that is in a near cache.
    pub(super) cache_level: CacheLevel,
}

impl Ahead<'_> {
    /// Steps that are needed.
    fn steps(&self) -> usize {
        match self.cache_level {
            CacheLevel::Near => 0,
            CacheLevel::Middle => 1,
            CacheLevel::Far => 3,
        }
    }

    /// Prefetches memory for the first blocks.
    pub(super) fn start(&mut self, stream: &Stream, shared: &SharedState) {
        let first = (self.steps() * AHEAD).min(self.chain.hashes.len());
        for at in 0..first {
            let pair = self.chain.pair(shared, at);
            let stage = match at / AHEAD {
                0 => Stage::Bucket,
                1 => Stage::Segment,
                _ => Stage::Directory,
            };
            prefetch_pair(stream, shared, pair, stage);
            self.ring.0[at] = pair;
        }
    }

    /// Returns the block `at`, which is placed next, and prefetches memory for later blocks.
    #[inline]
    pub(super) fn next(&mut self, stream: &Stream, shared: &SharedState, at: usize) -> Block {
        let count = self.chain.hashes.len();
        match self.cache_level {
            CacheLevel::Near => return self.chain.block(shared, at),
            CacheLevel::Middle => self.add_block(stream, shared, at + AHEAD, Stage::Bucket),
            CacheLevel::Far => {
                if at + AHEAD < count {
                    prefetch_pair(stream, shared, self.ring.0[(at + AHEAD) % RING], Stage::Bucket);
                }
                if at + 2 * AHEAD < count {
                    prefetch_pair(stream, shared, self.ring.0[(at + 2 * AHEAD) % RING], Stage::Segment);
                }
                self.add_block(stream, shared, at + 3 * AHEAD, Stage::Directory);
            }
        }
        self.chain.block_at(self.ring.0[at % RING], at)
    }

    /// Adds the block `at`, if it exists, and starts its first prefetch.
    #[inline]
    fn add_block(&mut self, stream: &Stream, shared: &SharedState, at: usize, stage: Stage) {
        if at < self.chain.hashes.len() {
            let pair = self.chain.pair(shared, at);
            prefetch_pair(stream, shared, pair, stage);
            self.ring.0[at % RING] = pair;
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
