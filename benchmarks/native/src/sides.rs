//! The indexes that are compared, each behind the same interface. Every index gets payloads as they are sent, and token ids.

mod chain_index;
mod crtc;
mod dynamo;
mod ours;

use std::collections::BTreeMap;

pub use chain_index::ChainIndexSide;
pub use crtc::Crtc;
pub use dynamo::{Positional, Radix};
pub use ours::Ours;

/// Maps each worker to the number of blocks in its prefix of a prompt.
pub type Scores = BTreeMap<u32, u32>;

/// Lookups in an index.
pub trait Find {
    /// Looks up the token ids of a prompt, and reads the answer once, in the index's own form. Returns the sum of the scores.
    fn find(&self, tokens: &[u32]) -> u64;

    /// Returns the answer in a form that can be compared with the answers of other indexes.
    fn scores(&self, tokens: &[u32]) -> Scores;
}

/// The actions of a side, payload by payload.
pub trait Script {
    /// Returns the next payload and its worker, or None at the end. The call follows the application of the previous payload, so scripts
    /// measure times and look up prompts in this function.
    fn next(&mut self, index: &dyn Find) -> Option<(u32, &[u8])>;
}

/// An index that is driven by payloads.
pub trait Side: Find + 'static {
    /// The name of the index in tables.
    const NAME: &'static str;

    /// An empty index for workers below `workers` with blocks of `size` tokens.
    fn new(workers: u32, size: u32) -> Self;

    /// Applies the payloads of a script, and returns the script. May be called once per index.
    fn run<S: Script + Send + 'static>(&mut self, script: S) -> S;

    /// Nanoseconds of overhead per payload, which are not a part of the measured work.
    fn overhead() -> f64 {
        0.0
    }

    /// Returns an index to which all of the payloads were applied.
    fn filled(workers: u32, size: u32, payloads: impl Iterator<Item = (u32, Vec<u8>)> + Send + 'static) -> Self
    where
        Self: Sized,
    {
        let mut side = Self::new(workers, size);
        side.run(Fill(payloads, Vec::new()));
        side
    }
}

/// An action for each side.
pub trait Visit {
    /// Performs the action for one side.
    fn visit<S: Side>(&mut self);
}

/// Names of the sides in the order of visits: ours first, then the three of Dynamo.
pub const SIDES: [&str; 5] = [Ours::NAME, Radix::NAME, Crtc::NAME, Positional::NAME, ChainIndexSide::NAME];

/// Visits the side with a given index in `SIDES`.
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

/// A side that answers lookups in other threads while payloads are applied.
pub trait Shared: Side {
    /// The type of its lookups.
    type Reader: Find + Send + 'static;

    /// Lookups of the same index.
    fn reader(&self) -> Self::Reader;
}

/// A script that only applies payloads.
struct Fill<I>(I, Vec<u8>);

impl<I: Iterator<Item = (u32, Vec<u8>)>> Script for Fill<I> {
    fn next(&mut self, _: &dyn Find) -> Option<(u32, &[u8])> {
        let (worker, payload) = self.0.next()?;
        self.1 = payload;
        Some((worker, &self.1))
    }
}
