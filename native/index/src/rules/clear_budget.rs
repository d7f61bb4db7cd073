//! A bound on the work that partial clears of a stream cause.

/// Number of blocks that partial clears may examine in addition to `PER_STORED_BLOCK` for each stored block.
const EXTRA_BLOCKS: usize = 1 << 20;
/// Number of blocks that partial clears may examine for each stored block: engines clear far less often than they store.
const PER_STORED_BLOCK: usize = 16;

/// The number of blocks that partial clears of a stream may still examine.
#[derive(Clone, Copy, Debug)]
pub struct ClearBudget(usize);

impl Default for ClearBudget {
    fn default() -> Self {
        Self(EXTRA_BLOCKS)
    }
}

impl ClearBudget {
    /// Adds the examinations that `blocks` stored blocks allow.
    #[inline]
    pub fn add_stored(&mut self, blocks: usize) {
        self.0 = self.0.saturating_add(PER_STORED_BLOCK * blocks);
    }

    /// Returns whether a clear may examine `blocks` blocks; if so, subtracts them from the budget.
    pub fn try_spend(&mut self, blocks: usize) -> bool {
        let left = self.0.checked_sub(blocks);
        self.0 = left.unwrap_or(self.0);
        left.is_some()
    }
}
