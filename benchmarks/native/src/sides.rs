//! The indexes that are compared, each behind the same interface. Every one gets payloads as they come from the wire, and token ids.

mod chain_index;
mod crtc;
mod dynamo;
mod ours;

use std::collections::BTreeMap;

pub use chain_index::ChainIndexSide;
pub use crtc::Crtc;
pub use dynamo::{Positional, Radix};
pub use ours::Ours;

/// Blocks of a prompt's prefix by worker.
pub type Scores = BTreeMap<u32, u32>;

/// Lookups.
pub trait Find {
    /// Looks a prompt up, from token ids to an answer in the index's own form, which is read once. Returns the sum of the scores.
    fn find(&self, tokens: &[u32]) -> u64;

    /// The same answer, to be compared with that of others.
    fn scores(&self, tokens: &[u32]) -> Scores;
}

/// What a side is to do, one payload after the other.
pub trait Script {
    /// The next payload and the worker that sends it, or None at the end. Called when the payload before is applied: what has to be timed
    /// or looked up in between is done here.
    fn next(&mut self, index: &dyn Find) -> Option<(u32, &[u8])>;
}

/// An index that is driven by payloads.
pub trait Side: Find + 'static {
    /// As in tables.
    const NAME: &'static str;

    /// An empty index for workers below `workers` with blocks of `size` tokens.
    fn new(workers: u32, size: u32) -> Self;

    /// Applies what a script hands out, and returns it. Once in the life of an index.
    fn run<S: Script + Send + 'static>(&mut self, script: S) -> S;

    /// Nanoseconds that driving the index takes for each payload, apart from what is measured.
    fn overhead() -> f64 {
        0.0
    }

    /// An index with all of these applied.
    fn filled(workers: u32, size: u32, payloads: impl Iterator<Item = (u32, Vec<u8>)> + Send + 'static) -> Self
    where
        Self: Sized,
    {
        let mut side = Self::new(workers, size);
        side.run(Fill(payloads, Vec::new()));
        side
    }
}

/// Something that is done with each side.
pub trait Visit {
    /// Does it.
    fn visit<S: Side>(&mut self);
}

/// Names in the order in which sides are visited: ours first, then Dynamo's three.
pub const SIDES: [&str; 5] = [Ours::NAME, Radix::NAME, Crtc::NAME, Positional::NAME, ChainIndexSide::NAME];

/// Visits the side of a number in `SIDES`.
pub fn visit(side: usize, visitor: &mut impl Visit) {
    match side {
        0 => visitor.visit::<Ours>(),
        1 => visitor.visit::<Radix>(),
        2 => visitor.visit::<Crtc>(),
        3 => visitor.visit::<Positional>(),
        4 => visitor.visit::<ChainIndexSide>(),
        _ => panic!("there is no side {side}"),
    }
}

/// A side that answers in other threads while it is driven.
pub trait Shared: Side {
    /// Its lookups.
    type Reader: Find + Send + 'static;

    /// Lookups of the same index.
    fn reader(&self) -> Self::Reader;
}

/// A script that applies payloads and does nothing else.
struct Fill<I>(I, Vec<u8>);

impl<I: Iterator<Item = (u32, Vec<u8>)>> Script for Fill<I> {
    fn next(&mut self, _: &dyn Find) -> Option<(u32, &[u8])> {
        let (worker, payload) = self.0.next()?;
        self.1 = payload;
        Some((worker, &self.1))
    }
}
