//! The bounds of an index.

/// Maximum number of blocks of one stream with one hash: engines that hash pages without their prefix have hundreds of them. Histories of
/// publishers have the same limit, so that a consumer that starts late holds the same blocks as a consumer that received everything.
pub const BLOCKS_PER_HASH: usize = 1_024;

/// Maximum number of ranks of one stream: the stream of a relay has the ranks of one node. Histories of publishers have the same limit.
pub const RANKS: usize = 64;

/// Bounds of an index; input that is dropped at a bound is counted.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of bytes of the index; new blocks are refused while the index takes more.
    pub memory: Option<usize>,
    /// Maximum number of blocks of one stream that wait for their parent or their tokens.
    pub orphans: usize,
    /// Maximum number of bytes of waiting blocks: a block may have as many tokens as fit in a payload.
    pub orphan_bytes: usize,
    /// Maximum number of placements that one incarnation of a stream may name: an engine has a handful.
    pub places: usize,
    /// Maximum number of KV cache groups of one incarnation of a stream: a hybrid model has a handful.
    pub groups: usize,
    /// Maximum number of schemes by which one incarnation of a stream may divide prompts. Each scheme costs a search; an engine has one.
    pub block_sizes: usize,
    /// Maximum number of records that lookups find for one key, if streams hold blocks with this key under many different hashes. A few
    /// records of each stream are always found.
    pub records_per_key: usize,
    /// Maximum number of blocks of one stream with one hash: engines that hash pages without their prefix can have hundreds of such blocks.
    pub blocks_per_hash: usize,
    /// Maximum number of ranks that the payloads of one stream may state.
    pub ranks: usize,
    /// Maximum number of removed workers whose late deliveries are recognised.
    pub fences: usize,
    /// Maximum number of blocks of the overlay.
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
