//! The bounds of an index.

/// Maximum number of blocks that one stream may have under one hash. Engines that hash pages without their prefix have hundreds of blocks
/// under some hashes. Publishers compact their history under the same limit. So a consumer that starts late holds the same blocks as a
/// consumer that received everything.
pub const BLOCKS_PER_HASH: usize = 1_024;

/// Maximum number of ranks that one stream may state: the stream of a relay has the ranks of one node. Publishers compact their history
/// under the same limit.
pub const RANKS: usize = 64;

/// Bounds of an index; input that is dropped at a bound is counted.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of bytes of the index. While the index takes more bytes, it refuses new blocks.
    pub memory: Option<usize>,
    /// Maximum number of blocks of one stream that wait for their parent or their tokens.
    pub orphans: usize,
    /// Maximum number of bytes of waiting blocks, since one block can have as many tokens as fit in a payload.
    pub orphan_bytes: usize,
    /// Maximum number of placements that one source may name. The current incarnations of all of its streams count together, since the
    /// ranks of an engine use the same few placements.
    pub places: usize,
    /// Maximum number of KV cache groups of one incarnation of a stream: a hybrid model has a few.
    pub groups: usize,
    /// Maximum number of schemes by which one incarnation of a stream may divide prompts. Each scheme costs a search; an engine has one
    /// scheme.
    pub block_sizes: usize,
    /// If more records than this have one key, some of them are hidden from lookups: a stream can hold many blocks with one key and
    /// different hashes. Lookups always find some records of each stream.
    pub records_per_key: usize,
    /// Maximum number of blocks that one stream may have under one hash; see `BLOCKS_PER_HASH`.
    pub blocks_per_hash: usize,
    /// Maximum number of ranks that the payloads of one stream may state.
    pub ranks: usize,
    /// Maximum number of removed workers whose later deliveries are ignored.
    pub fences: usize,
    /// Maximum number of blocks of all speculative entries in the overlay.
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
