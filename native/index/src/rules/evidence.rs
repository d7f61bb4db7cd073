//! What the events of a stream show about the completeness of its blocks.

use crate::holders::placements::LEVELS;

/// What the events of a stream show about the completeness of its blocks, from its start or its last clear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// Whether no block is known to be missing: no batch was lost or unreadable, and the index refused or dropped no block.
    pub is_whole: bool,
    /// Whether the index refused a block at the memory limit.
    pub has_refused: bool,
    /// Whether the index dropped a block that waited for its parent.
    pub has_dropped: bool,
    /// Number of stores that could not be used.
    pub set_aside: u64,
    /// Whether the hash of some store's first block covered only the tokens of that block.
    pub has_page_hashes: bool,
    /// Whether some block on the device had extra keys.
    pub has_extra_keys: bool,
    /// Whether some block on the device had a LoRA adapter.
    pub has_loras: bool,
    /// Whether some first block on a tier below the device had no extra keys, and a hash that no block of the stream had.
    pub has_unkeyed_root: bool,
    /// Whether some first block on a tier below the device had no extra keys, no LoRA adapter, and a hash that no block of the stream had.
    pub has_bare_root: bool,
    /// Levels below the device, as bits, on which the engine might hold blocks from before a clear. The stream does not list these blocks.
    pub unknown_levels: u8,
    /// Whether a clear that names no tier also empties host memory.
    pub has_host_clears: bool,
    /// Number of further first blocks whose hash will be compared with a hash of only the block's tokens.
    pub pages_left: u8,
}

/// Number of first blocks whose hash is compared with a hash of only the block's tokens.
const COMPARED_ROOTS: u8 = 8;
/// Bit mask with a bit for each level.
const ALL_LEVELS: u8 = (1 << LEVELS) - 1;

impl Evidence {
    fn flags(&mut self) -> [&mut bool; 9] {
        [
            &mut self.is_whole,
            &mut self.has_page_hashes,
            &mut self.has_extra_keys,
            &mut self.has_unkeyed_root,
            &mut self.has_host_clears,
            &mut self.has_loras,
            &mut self.has_bare_root,
            &mut self.has_refused,
            &mut self.has_dropped,
        ]
    }

    /// Records a first block without extra keys on a tier below the device. `is_bare` is whether it has no LoRA adapter either.
    pub fn note_unkeyed_root(&mut self, is_bare: bool) {
        self.has_unkeyed_root = true;
        self.has_bare_root |= is_bare;
    }

    /// Whether first blocks on tiers below the device lack extra keys or LoRAs that this stream's blocks on the device have.
    pub fn lacks_keys(&self) -> bool {
        (self.has_extra_keys && self.has_unkeyed_root) || (self.needs_loras() && self.has_bare_root)
    }

    /// Whether events might omit the LoRA adapter of first blocks on tiers below the device. SGLang announces the adapter on all tiers.
    pub fn needs_loras(&self) -> bool {
        self.has_loras && !self.has_host_clears
    }

    /// The flags as bits, for a snapshot.
    pub fn to_bits(mut self) -> u64 {
        self.flags()
            .into_iter()
            .rev()
            .fold(0, |bits, flag| bits << 1 | u64::from(*flag))
    }

    /// Creates a value from the bits that `to_bits` returns.
    pub fn from_parts(bits: u64, unknown_levels: u8, set_aside: u64) -> Self {
        let mut found = Self {
            unknown_levels,
            set_aside,
            ..Self::default()
        };
        let flags = found.flags().into_iter().enumerate();
        flags.for_each(|(at, flag)| *flag = bits >> at & 1 != 0);
        found
    }

    /// The levels that a clear without a tier empties, as bits.
    pub fn emptied_levels(&self) -> u8 {
        if self.has_host_clears { 0b11 } else { 0b1 }
    }

    /// Records that the index refused blocks at the memory limit.
    pub fn note_refused(&mut self) {
        (self.is_whole, self.has_refused) = (false, true);
    }

    /// Records that the index dropped blocks that waited for their parents.
    pub fn note_dropped(&mut self) {
        (self.is_whole, self.has_dropped) = (false, true);
    }

    /// Drops the evidence about blocks and about the engine after a clear of all tiers.
    pub fn begin_engine(&mut self) {
        *self = Self {
            is_whole: self.is_whole,
            set_aside: self.set_aside,
            ..Self::default()
        };
    }

    /// Begins new evidence after a clear that names no tier. `dropped` are the levels, as bits, on which the stream no longer lists all
    /// blocks. `keeps_lower` is whether blocks on lower tiers remain.
    pub fn begin(&mut self, dropped: u8, keeps_lower: bool) {
        let is_complete = self.is_whole && self.set_aside == 0;
        let missing = if is_complete {
            dropped
        } else {
            !self.emptied_levels() & ALL_LEVELS
        };
        *self = Self {
            unknown_levels: self.unknown_levels | missing,
            has_extra_keys: keeps_lower && self.has_extra_keys,
            has_loras: keeps_lower && self.has_loras,
            has_unkeyed_root: keeps_lower && self.has_unkeyed_root,
            has_bare_root: keeps_lower && self.has_bare_root,
            has_page_hashes: self.has_page_hashes,
            has_host_clears: self.has_host_clears,
            pages_left: self.pages_left,
            ..Self::default()
        };
    }
}

impl Default for Evidence {
    fn default() -> Self {
        Self {
            is_whole: true,
            has_refused: false,
            has_dropped: false,
            set_aside: 0,
            has_page_hashes: false,
            has_extra_keys: false,
            has_loras: false,
            has_unkeyed_root: false,
            has_bare_root: false,
            unknown_levels: 0,
            has_host_clears: false,
            pages_left: COMPARED_ROOTS,
        }
    }
}
