//! Why answers about a stream can differ from what its engine finds, although no batch is known to be missing.

use super::Stream;
use crate::holders::placements::LEVELS;

/// A reason why answers are estimates. `kvevents.index` has a sentence for each code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Estimate {
    /// Some stores could not be used; the value is their number.
    SetAside(u64),
    /// Some blocks on the device have parents or tokens that were never announced; the value is their number.
    UnknownParents(u64),
    /// Hashes cover pages alone. Releases of SGLang that hash in this way announce blocks inside a prompt as first blocks.
    PageHashes,
    /// Blocks on tiers below the device were announced without the extra keys (salts, LoRAs, media) that blocks on the device have, or not
    /// all blocks of these tiers were known when the cache was cleared, which might not have emptied them.
    InexactTiers,
    /// The groups of the engine cannot be searched as the engine does.
    Groups(&'static str),
}

impl Estimate {
    /// A name for programs.
    pub fn code(self) -> &'static str {
        match self {
            Self::SetAside(_) => "set-aside",
            Self::UnknownParents(_) => "unknown-parents",
            Self::PageHashes => "page-hashes",
            Self::InexactTiers => "inexact-tiers",
            Self::Groups(code) => code,
        }
    }

    /// Number of affected stores or blocks; 0 if they are not counted.
    pub fn count(self) -> u64 {
        match self {
            Self::SetAside(count) | Self::UnknownParents(count) => count,
            Self::PageHashes | Self::InexactTiers | Self::Groups(_) => 0,
        }
    }

    /// Rounds the count down to a power of two, so that the reason does not change with each batch.
    fn rounded(self) -> Self {
        let round = |count: u64| 1 << count.ilog2();
        match self {
            Self::SetAside(count) => Self::SetAside(round(count)),
            Self::UnknownParents(count) => Self::UnknownParents(round(count)),
            other => other,
        }
    }
}

/// What a stream has shown about the completeness of its blocks since its start, or since it was last cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// Whether nothing is known to be missing: no batch was lost or unreadable, and no block was refused or dropped here.
    pub is_whole: bool,
    /// Stores that could not be used.
    pub set_aside: u64,
    /// Whether a first block had the hash of its tokens alone.
    pub has_page_hashes: bool,
    /// Whether blocks on the device had extra keys.
    pub has_extra_keys: bool,
    /// Whether a first block of unknown hash on another tier had no extra keys.
    pub has_unkeyed_root: bool,
    /// Levels below the device on which the engine might hold blocks from before a clear that are unknown here, as bits.
    pub unknown_levels: u8,
    /// Whether a clear without a tier empties host memory too.
    pub has_host_clears: bool,
    /// Number of further first blocks whose hash is compared with the hash of their tokens.
    pub pages_left: u8,
}

/// Number of first blocks whose hash is compared with the hash of their tokens alone.
const PAGES: u8 = 8;
/// Bit mask with a bit for each level.
const ALL_LEVELS: u8 = (1 << LEVELS) - 1;

impl Evidence {
    fn flags(&mut self) -> [&mut bool; 5] {
        [
            &mut self.is_whole,
            &mut self.has_page_hashes,
            &mut self.has_extra_keys,
            &mut self.has_unkeyed_root,
            &mut self.has_host_clears,
        ]
    }

    /// The flags as bits, for a snapshot.
    pub fn to_bits(mut self) -> u8 {
        self.flags()
            .into_iter()
            .rev()
            .fold(0, |bits, flag| bits << 1 | u8::from(*flag))
    }

    /// The value with such flags.
    pub fn from_parts(bits: u8, unknown_levels: u8, set_aside: u64) -> Self {
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

    /// Drops the evidence about all tiers, which are empty now.
    pub fn empty_all(&mut self) {
        (self.unknown_levels, self.has_extra_keys, self.has_unkeyed_root) = (0, false, false);
    }

    /// Begins again after a clear that names no tier. `dropped` are levels whose blocks are no longer known, or not all of them; with
    /// `keeps_lower`, blocks are left on lower ones.
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
            has_unkeyed_root: keeps_lower && self.has_unkeyed_root,
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
            set_aside: 0,
            has_page_hashes: false,
            has_extra_keys: false,
            has_unkeyed_root: false,
            unknown_levels: 0,
            has_host_clears: false,
            pages_left: PAGES,
        }
    }
}

impl Stream {
    /// Counts a store, or a part of one, that cannot be used.
    pub fn set_aside(&mut self, reason: &'static str) {
        self.counters.reject("none", reason);
        self.evidence.set_aside += 1;
    }

    /// Why answers about this stream are estimates; None if they are not.
    pub fn estimate(&self) -> Option<Estimate> {
        let Evidence {
            set_aside,
            has_page_hashes,
            has_extra_keys,
            has_unkeyed_root,
            unknown_levels,
            ..
        } = self.evidence;
        let parents = self.unknown_parents();
        if set_aside > 0 {
            Some(Estimate::SetAside(set_aside))
        } else if parents > 0 {
            Some(Estimate::UnknownParents(parents as u64))
        } else if has_page_hashes {
            Some(Estimate::PageHashes)
        } else if unknown_levels & self.named_levels() != 0 || (has_extra_keys && has_unkeyed_root) || self.untied(false) > 0 {
            Some(Estimate::InexactTiers)
        } else {
            self.groups.estimate(self.device_sizes()).map(Estimate::Groups)
        }
    }

    /// Levels that the stream has named, as bits.
    fn named_levels(&self) -> u8 {
        self.named.iter().fold(0, |bits, named| bits | 1 << named.level)
    }

    /// Blocks with full attention on the device whose parents or tokens were never announced.
    fn unknown_parents(&self) -> usize {
        if !self.are_pending_certain() {
            return 0;
        }
        let on_device = self.named.iter().filter(|named| named.is_on_device());
        let orphans: usize = on_device.map(|named| self.waiting.orphans_on(named.placement)).sum();
        orphans + self.untied(true)
    }

    /// Blocks announced by their hash alone, on the device or below it, whose tokens were never announced: prompts do not find them.
    fn untied(&self, is_on_device: bool) -> usize {
        if !self.are_pending_certain() {
            return 0;
        }
        let there = self.named.iter().filter(|named| named.is_on_device() == is_on_device);
        there.map(|named| self.waiting.untied_on(named.placement)).sum()
    }

    /// Whether pending blocks show that something was never announced. False if something is known to be missing, and if there are several
    /// groups: vLLM hashes inside of blocks where their sizes differ, and then names parents that it never announces.
    fn are_pending_certain(&self) -> bool {
        !self.waiting.is_empty() && self.evidence.is_whole && self.groups.all().len() <= 1
    }

    /// The estimate that `take_new_estimate` has returned last.
    pub fn reported_estimate(&self) -> Option<Estimate> {
        self.reported
    }

    /// Returns the estimate if it has changed since the last call.
    pub fn take_new_estimate(&mut self) -> Option<Option<Estimate>> {
        let now = self.estimate().map(Estimate::rounded);
        (now != self.reported).then(|| {
            self.reported = now;
            now
        })
    }
}
