//! The bounds of an index.

/// Blocks of one stream with one hash: engines that hash pages without their prefix have hundreds. Histories of publishers keep as many, so
/// that a consumer that starts late holds the same as one that received everything.
pub const BLOCKS_PER_HASH: usize = 1_024;

/// Ranks of one stream: a relay of one node has some. Histories of publishers keep as many.
pub const RANKS: usize = 64;

/// Bounds of an index; reaching one is counted.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of everything; above it new blocks are refused.
    pub memory: Option<usize>,
    /// Blocks of one stream that wait for their parent or their tokens.
    pub orphans: usize,
    /// Bytes of those: a block may have as many tokens as fit in a payload.
    pub orphan_bytes: usize,
    /// Most placements that one incarnation of a stream may name: an engine has a handful.
    pub places: usize,
    /// Most KV cache groups of one incarnation of a stream: a hybrid model has a handful.
    pub groups: usize,
    /// Most schemes by which one incarnation of a stream may divide prompts, since each of them needs another search: an engine has one.
    pub block_sizes: usize,
    /// Records with one key that lookups find, if streams hold so many under different hashes; a few of each stream are always found.
    pub records_per_key: usize,
    /// Blocks of one stream with one hash: engines that hash pages without their prefix have some.
    pub blocks_per_hash: usize,
    /// Ranks that the payloads of one stream may state.
    pub ranks: usize,
    /// Removed workers whose late deliveries are recognised.
    pub fences: usize,
    /// Blocks of the overlay.
    pub speculated: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory: None,
            orphans: 65_536,
            orphan_bytes: 64 << 20,
            places: 64,
            groups: 64,
            block_sizes: 16,
            records_per_key: 16,
            blocks_per_hash: BLOCKS_PER_HASH,
            ranks: RANKS,
            fences: 65_536,
            speculated: 1_000_000,
        }
    }
}
