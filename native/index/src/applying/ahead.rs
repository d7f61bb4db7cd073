//! The blocks of an event, on their way to be placed.

use super::Chain;
use crate::core::{Block, Core};
use crate::stream::Stream;
use crate::table::{Reach, Stage};

/// Blocks between one step of asking for memory and the next: placing so many takes longer than memory does.
const AHEAD: usize = 8;
/// Places for blocks that were asked for, a power of two.
const RING: usize = 4 * AHEAD;

/// Blocks that were asked for, by their number modulo `RING`; kept from one run to the next to spare allocations.
#[derive(Debug)]
pub(super) struct Ring(Box<[Block; RING]>);

impl Default for Ring {
    fn default() -> Self {
        Self(Box::new([Block::default(); RING]))
    }
}

impl Chain<'_> {
    /// The block `at`.
    #[inline]
    pub(super) fn block(&self, core: &Core, at: usize) -> Block {
        let (hash, key) = (self.hashes[at], self.keys[at]);
        Block {
            hash,
            key,
            local: self.locals.map_or(0, |locals| locals[at]),
            context: self.context,
            keyed: self.locals.is_none(),
            key_spot: core.spot(key),
            hash_spot: core.spot(hash),
        }
    }
}

/// Blocks of one chain. What each of them needs of large tables is a cache miss that leads to the next one, so it is asked for in three steps. Small
/// tables need less.
pub(super) struct Ahead<'a> {
    pub(super) chain: &'a Chain<'a>,
    pub(super) ring: &'a mut Ring,
    /// Of the tables.
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
    pub(super) fn start(&mut self, stream: &Stream, core: &Core) {
        let first = (self.steps() * AHEAD).min(self.chain.hashes.len());
        for at in 0..first {
            let block = self.chain.block(core, at);
            let stage = match at / AHEAD {
                0 => Stage::Bucket,
                1 => Stage::Segment,
                _ => Stage::Directory,
            };
            ask(stream, core, &block, stage);
            self.ring.0[at] = block;
        }
    }

    /// The block `at`, which is to be placed next; asks for what later ones need.
    #[inline]
    pub(super) fn next(&mut self, stream: &Stream, core: &Core, at: usize) -> Block {
        let count = self.chain.hashes.len();
        match self.reach {
            Reach::Near => return self.chain.block(core, at),
            Reach::Middle => self.come(stream, core, at + AHEAD, Stage::Bucket),
            Reach::Far => {
                if at + AHEAD < count {
                    ask(stream, core, &self.ring.0[(at + AHEAD) % RING], Stage::Bucket);
                }
                if at + 2 * AHEAD < count {
                    ask(stream, core, &self.ring.0[(at + 2 * AHEAD) % RING], Stage::Segment);
                }
                self.come(stream, core, at + 3 * AHEAD, Stage::Directory);
            }
        }
        self.ring.0[at % RING]
    }

    /// Takes in the block `at`, if there is one, and asks for the first that it needs.
    #[inline]
    fn come(&mut self, stream: &Stream, core: &Core, at: usize, stage: Stage) {
        if at < self.chain.hashes.len() {
            let block = self.chain.block(core, at);
            ask(stream, core, &block, stage);
            self.ring.0[at % RING] = block;
        }
    }
}

#[inline(always)]
fn ask(stream: &Stream, core: &Core, block: &Block, stage: Stage) {
    if core.heads.reach() > Reach::Near {
        core.heads.prefetch(block.key_spot, stage);
    }
    stream.prefetch(block.hash_spot, stage);
}
