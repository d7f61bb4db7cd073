//! A bound on the work of partial clears: clears that do not empty all tiers and groups of a stream.

/// Number of blocks that the partial clears of a stream may examine before the stream has stored any block.
const EXTRA_BLOCKS: usize = 1 << 20;
/// Number of further blocks that partial clears may examine for each stored block: engines store far more often than they clear.
const PER_STORED_BLOCK: usize = 16;

/// The number of blocks that partial clears of a stream may examine from now on.
#[derive(Clone, Copy, Debug)]
pub struct ClearBudget(usize);

impl Default for ClearBudget {
    fn default() -> Self {
        Self(EXTRA_BLOCKS)
    }
}

impl ClearBudget {
    /// Adds to the budget for `blocks` stored blocks.
    #[inline]
    pub fn add_stored(&mut self, blocks: usize) {
        self.0 = self.0.saturating_add(PER_STORED_BLOCK * blocks);
    }

    /// If a clear may examine `blocks` blocks, subtracts them from the budget and returns true.
    pub fn try_spend(&mut self, blocks: usize) -> bool {
        let left = self.0.checked_sub(blocks);
        self.0 = left.unwrap_or(self.0);
        left.is_some()
    }
}
