//! Counters of the input that a stream rejected or that had no effect.

use std::collections::HashMap;

/// Counters of the input that a stream could not use.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// The number of rejected stores for each kind of group and reason.
    pub rejected: HashMap<(String, &'static str), u64>,
    /// Number of hashes that removals named although the stream did not hold their blocks.
    pub unknown: u64,
    /// Number of blocks that were dropped from the full queue of waiting blocks.
    pub dropped: u64,
    /// Number of blocks that were refused at the memory limit.
    pub evicted: u64,
    /// Number of deliveries that were ignored because they had already been applied.
    pub duplicates: u64,
    /// Number of deliveries that were ignored because their incarnation had ended.
    pub void: u64,
    /// Number of gaps in the stream.
    pub gaps: u64,
}

/// Maximum number of pairs of kind and reason that are counted separately, since peers choose the names of kinds.
const MAX_KINDS: usize = 64;

impl Counters {
    /// Counts a rejected store.
    pub fn reject(&mut self, kind: &str, reason: &'static str) {
        let known = self.rejected.len() < MAX_KINDS || self.rejected.contains_key(&(kind.into(), reason));
        let kind = if known { kind } else { "other" };
        *self.rejected.entry((kind.chars().take(64).collect(), reason)).or_default() += 1;
    }

    /// Adds the counters of a stream that has ended.
    pub fn add(&mut self, other: &Self) {
        for ((kind, reason), count) in &other.rejected {
            *self.rejected.entry((kind.clone(), reason)).or_default() += count;
        }
        self.unknown += other.unknown;
        self.dropped += other.dropped;
        self.evicted += other.evicted;
        self.duplicates += other.duplicates;
        self.void += other.void;
        self.gaps += other.gaps;
    }
}
