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
    /// Levels below the device, as bits, on which a first block had no extra keys, and a hash that no block of the stream had.
    pub unkeyed_levels: u8,
    /// Levels below the device, as bits, on which such a first block also had no LoRA adapter.
    pub bare_levels: u8,
    /// Levels below the device, as bits, on which the engine might hold blocks from before a clear. The stream does not list these blocks.
    pub unknown_levels: u8,
    /// Levels that events of this engine have named, as bits.
    pub named_levels: u8,
    /// Whether a clear that names no tier also empties host memory.
    pub has_host_clears: bool,
    /// Number of further first blocks whose hash will be compared with a hash of only the block's tokens.
    pub pages_left: u8,
}

/// Number of first blocks whose hash is compared with a hash of only the block's tokens.
const COMPARED_ROOTS: u8 = 8;
/// Bit mask with a bit for each level.
const ALL_LEVELS: u8 = (1 << LEVELS) - 1;
/// Number of flags in `Evidence`.
const FLAGS: usize = 7;

impl Evidence {
    fn flags(&mut self) -> [&mut bool; FLAGS] {
        [
            &mut self.is_whole,
            &mut self.has_page_hashes,
            &mut self.has_extra_keys,
            &mut self.has_host_clears,
            &mut self.has_loras,
            &mut self.has_refused,
            &mut self.has_dropped,
        ]
    }

    /// Records a first block without extra keys on a level below the device. `is_bare` is whether it has no LoRA adapter either.
    pub fn note_unkeyed_root(&mut self, level: usize, is_bare: bool) {
        self.unkeyed_levels |= 1 << level;
        self.bare_levels |= u8::from(is_bare) << level;
    }

    /// Records a clear of a tier. `held` are the levels below the device, as bits, on which the stream still has blocks. These can be copies
    /// of blocks that the clear has removed.
    pub fn clear_level(&mut self, level: usize, held: u8) {
        let bit = 1 << level;
        self.unknown_levels &= !bit;
        for levels in [&mut self.unkeyed_levels, &mut self.bare_levels] {
            if *levels & bit != 0 {
                *levels = *levels & !bit | held;
            }
        }
    }

    /// Whether first blocks on tiers below the device lack extra keys or LoRAs that this stream's blocks on the device have.
    pub fn lacks_keys(&self) -> bool {
        (self.has_extra_keys && self.unkeyed_levels != 0) || (self.needs_loras() && self.bare_levels != 0)
    }

    /// Whether events might omit the LoRA adapter of first blocks on tiers below the device. SGLang announces the adapter on all tiers.
    pub fn needs_loras(&self) -> bool {
        self.has_loras && !self.has_host_clears
    }

    /// Whether a tier that the engine has might hold blocks that the stream does not list.
    pub fn has_unknown_tiers(&self) -> bool {
        self.unknown_levels & self.named_levels != 0
    }

    fn levels(&mut self) -> [&mut u8; 4] {
        [
            &mut self.unknown_levels,
            &mut self.named_levels,
            &mut self.unkeyed_levels,
            &mut self.bare_levels,
        ]
    }

    /// The flags and the levels as bits, for a snapshot.
    pub fn to_bits(mut self) -> u64 {
        let levels = self.levels().into_iter().rev();
        let bits = levels.fold(0, |bits, levels| bits << LEVELS | u64::from(*levels));
        (self.flags().into_iter().rev()).fold(bits, |bits, flag| bits << 1 | u64::from(*flag))
    }

    /// Creates a value from the bits that `to_bits` returns.
    pub fn from_parts(bits: u64, set_aside: u64) -> Self {
        let mut found = Self {
            set_aside,
            ..Self::default()
        };
        let flags = found.flags().into_iter().enumerate();
        flags.for_each(|(at, flag)| *flag = bits >> at & 1 != 0);
        let levels = found.levels().into_iter().enumerate();
        levels.for_each(|(at, levels)| *levels = (bits >> (FLAGS + at * LEVELS)) as u8 & ALL_LEVELS);
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
            named_levels: self.named_levels,
            has_extra_keys: keeps_lower && self.has_extra_keys,
            has_loras: keeps_lower && self.has_loras,
            unkeyed_levels: if keeps_lower { self.unkeyed_levels } else { 0 },
            bare_levels: if keeps_lower { self.bare_levels } else { 0 },
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
            unkeyed_levels: 0,
            bare_levels: 0,
            unknown_levels: 0,
            named_levels: 0,
            has_host_clears: false,
            pages_left: COMPARED_ROOTS,
        }
    }
}
