//! The blocks of an event, on their way to be placed.

use super::Chain;
use crate::shared::{Block, SharedState};
use crate::stream::Stream;
use crate::table::{Reach, Stage, TableHash};

/// Blocks between one step of asking for memory and the next: placing so many takes longer than memory does.
const AHEAD: usize = 8;
/// Places for blocks that were asked for, a power of two.
const RING: usize = 4 * AHEAD;

/// Where a block is looked for: its key, and its hash.
type Spots = (TableHash, TableHash);

/// Blocks that were asked for, by their number modulo `RING`; kept from one run to the next to spare allocations.
#[derive(Debug)]
pub(super) struct Ring(Box<[Spots; RING]>);

impl Default for Ring {
    fn default() -> Self {
        Self(Box::new([Spots::default(); RING]))
    }
}

impl Chain<'_> {
    /// The block `at`.
    #[inline]
    pub(super) fn block(&self, shared: &SharedState, at: usize) -> Block {
        self.block_at(self.spots(shared, at), at)
    }

    #[inline]
    fn spots(&self, shared: &SharedState, at: usize) -> Spots {
        (shared.spot(self.keys[at]), shared.spot(self.hashes[at]))
    }

    #[inline]
    fn block_at(&self, (key_spot, hash_spot): Spots, at: usize) -> Block {
        Block {
            hash: self.hashes[at],
            key: self.keys[at],
            local: self.locals.map_or(0, |locals| locals[at]),
            context: self.context,
            keyed: self.locals.is_none(),
            key_spot,
            hash_spot,
        }
    }
}

/// Blocks of one chain. What each of them needs of large tables is a cache miss that leads to the next one, so it is asked for in three steps. Small
/// tables need less.
pub(super) struct Ahead<'a> {
    pub(super) chain: &'a Chain<'a>,
    pub(super) ring: &'a mut Ring,
    /// How much of the tables is in a near cache.
    pub(super) reach: Reach,
}

impl Ahead<'_> {
    /// Steps that are needed.
    fn steps(&self) -> usize {
        match self.reach {
            Reach::Near => 0,
            Reach::Middle => 1,
            Reach::Far => 3,
        }
    }

    /// Asks for what the first blocks need.
    pub(super) fn start(&mut self, stream: &Stream, shared: &SharedState) {
        let first = (self.steps() * AHEAD).min(self.chain.hashes.len());
        for at in 0..first {
            let spots = self.chain.spots(shared, at);
            let stage = match at / AHEAD {
                0 => Stage::Bucket,
                1 => Stage::Segment,
                _ => Stage::Directory,
            };
            ask(stream, shared, spots, stage);
            self.ring.0[at] = spots;
        }
    }

    /// The block `at`, which is to be placed next; asks for what later ones need.
    #[inline]
    pub(super) fn next(&mut self, stream: &Stream, shared: &SharedState, at: usize) -> Block {
        let count = self.chain.hashes.len();
        match self.reach {
            Reach::Near => return self.chain.block(shared, at),
            Reach::Middle => self.come(stream, shared, at + AHEAD, Stage::Bucket),
            Reach::Far => {
                if at + AHEAD < count {
                    ask(stream, shared, self.ring.0[(at + AHEAD) % RING], Stage::Bucket);
                }
                if at + 2 * AHEAD < count {
                    ask(stream, shared, self.ring.0[(at + 2 * AHEAD) % RING], Stage::Segment);
                }
                self.come(stream, shared, at + 3 * AHEAD, Stage::Directory);
            }
        }
        self.chain.block_at(self.ring.0[at % RING], at)
    }

    /// Takes in the block `at`, if there is one, and asks for the first that it needs.
    #[inline]
    fn come(&mut self, stream: &Stream, shared: &SharedState, at: usize, stage: Stage) {
        if at < self.chain.hashes.len() {
            let spots = self.chain.spots(shared, at);
            ask(stream, shared, spots, stage);
            self.ring.0[at % RING] = spots;
        }
    }
}

#[inline(always)]
fn ask(stream: &Stream, shared: &SharedState, (key_spot, hash_spot): Spots, stage: Stage) {
    if shared.view.heads.reach() > Reach::Near {
        shared.view.heads.prefetch(key_spot, stage);
    }
    stream.prefetch(hash_spot, stage);
}
