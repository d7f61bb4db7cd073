//! Copies that a batch announces although the engine might not have made them.
//!
//! vLLM reports the hit of a request for each group. For a group with a sliding window, the report contains blocks before the window, which
//! the group does not hold. vLLM sends the same kind of report for a request that it computes again. So a copy in a group with a window
//! might not exist if its batch also stores the same block again with full attention.

/// Number of entries whose memory is kept for the next batch.
const MIN_CAPACITY: usize = 64;

/// The announcements of one batch that might be reports of hits. `B` identifies a block, and `P` a placement.
#[derive(Debug, Default)]
pub struct HitReports<B, P> {
    /// Copies that were announced without tokens, except those of blocks that were certainly resident before the batch.
    pub fresh: Vec<(B, P)>,
    /// Blocks with tokens that the batch has stored again. Only streams of hybrid models list such blocks.
    pub repeated: Vec<B>,
}

impl<B: Copy + Default + Ord, P: Copy + Default> HitReports<B, P> {
    /// Whether nothing is listed.
    pub fn is_empty(&self) -> bool {
        self.fresh.is_empty() && self.repeated.is_empty()
    }

    /// Ends the batch. Returns the announced copies that might not exist.
    pub fn take_uncertain(&mut self) -> Vec<(B, P)> {
        self.repeated.sort_unstable();
        let is_repeated = |(block, _): &&(B, P)| self.repeated.binary_search(block).is_ok();
        let uncertain = self.fresh.iter().filter(is_repeated).copied().collect();
        self.clear();
        uncertain
    }

    /// Drops everything that is listed: a clear has removed the announced copies.
    pub fn clear(&mut self) {
        if self.fresh.capacity().max(self.repeated.capacity()) > MIN_CAPACITY {
            *self = Self::default();
        }
        self.fresh.clear();
        self.repeated.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A copy is uncertain only if one batch both announces it and repeats the store of its block.
    #[test]
    fn copies_are_uncertain_only_within_one_batch() {
        let mut reports = HitReports::default();
        reports.fresh.push((1, 0));
        assert_eq!(reports.take_uncertain(), vec![]);
        reports.repeated.push(1);
        assert_eq!(reports.take_uncertain(), vec![]);
        reports.fresh.extend([(3, 7), (1, 7), (2, 7)]);
        reports.repeated.extend([4, 3]);
        assert_eq!(reports.take_uncertain(), vec![(3, 7)]);
        assert_eq!(reports.take_uncertain(), vec![]);
    }
}
