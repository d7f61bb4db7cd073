//! The blocks of a run, on their way to be placed.

use crate::core::Core;
use crate::stream::{Block, Stream};
use crate::table::{Reach, Stage};

/// Blocks between one step of asking for memory and the next: placing so many takes longer than memory does.
const AHEAD: usize = 8;
/// Blocks before a block is placed that its buckets are looked at: they are here by then, and what is behind a full one is not.
const SOON: usize = 3;
/// Places for blocks that were asked for, a power of two.
const RING: usize = 4 * AHEAD;

/// Blocks that were asked for, by their number modulo `RING`; kept from one run to the next to spare allocations.
#[derive(Debug)]
pub struct Ring(Box<[Block; RING]>);

impl Default for Ring {
    fn default() -> Self {
        Self(Box::new([Block::default(); RING]))
    }
}

/// Blocks of one context, and the keys that they are placed by. What each of them needs of large tables is a cache miss that leads to
/// the next one, so it is asked for in three steps; in a fourth one it is seen whether there is more to ask for. Small tables need less.
pub struct Ahead<'a> {
    pub hashes: &'a [u64],
    pub keys: &'a [u64],
    pub context: u32,
    pub ring: &'a mut Ring,
    /// Of the tables.
    pub reach: Reach,
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
    pub fn start(&mut self, stream: &Stream, core: &Core) {
        let first = self.steps() * AHEAD;
        let known = self.hashes.iter().zip(self.keys).zip(&mut *self.ring.0);
        for (at, ((&hash, &key), place)) in known.take(first).enumerate() {
            *place = Block::new(core, hash, key, self.context);
            let stage = match at / AHEAD {
                0 => Stage::Bucket,
                1 => Stage::Segment,
                _ => Stage::Directory,
            };
            stream.ask(core, place, stage);
        }
    }

    /// The block `at`, which is to be placed next; asks for what later ones need.
    #[inline]
    pub fn next(&mut self, stream: &Stream, core: &Core, at: usize) -> Block {
        match self.reach {
            Reach::Near => return Block::new(core, self.hashes[at], self.keys[at], self.context),
            Reach::Middle => self.come(stream, core, at + AHEAD, Stage::Bucket),
            Reach::Far => {
                let count = self.hashes.len();
                if at + AHEAD < count {
                    stream.ask(core, &mut self.ring.0[(at + AHEAD) % RING], Stage::Bucket);
                }
                if at + 2 * AHEAD < count {
                    stream.ask(core, &mut self.ring.0[(at + 2 * AHEAD) % RING], Stage::Segment);
                }
                self.come(stream, core, at + 3 * AHEAD, Stage::Directory);
            }
        }
        if at + SOON < self.hashes.len() {
            stream.look_behind(core, &self.ring.0[(at + SOON) % RING]);
        }
        self.ring.0[at % RING]
    }

    /// Takes in the block `at`, if there is one, and asks for the first that it needs.
    #[inline]
    fn come(&mut self, stream: &Stream, core: &Core, at: usize, stage: Stage) {
        if let (Some(&hash), Some(&key)) = (self.hashes.get(at), self.keys.get(at)) {
            let block = &mut self.ring.0[at % RING];
            *block = Block::new(core, hash, key, self.context);
            stream.ask(core, block, stage);
        }
    }
}
