//! LoRAs whose weights were replaced under the same name.
//!
//! vLLM's hashes cover the name and the path of a LoRA, but events contain only the name. When a LoRA with the same name is loaded from
//! another path, blocks of the former weights stay in the cache. The index gives these blocks the same keys as blocks of the new weights,
//! but in the engine no request matches them. If the name returns to a former path, the engine announces nothing. So only blocks that were
//! stored after the last change of the path certainly match.

use std::collections::{HashMap, HashSet};

/// Maximum number of replaced LoRAs of one stream: an engine loads some dozens of adapters.
pub const MAX_LORAS: usize = 4_096;
/// Approximate bytes of the entry of a LoRA.
const LORA_BYTES: usize = 96;
/// Approximate bytes of the entry of a record.
const RECORD_BYTES: usize = 8;

/// The replaced LoRAs of one stream; each is identified by the part of the seed that it contributes.
#[derive(Clone, Debug, Default)]
pub struct ReplacedLoras {
    current: HashMap<u64, CurrentBlocks>,
    records: usize,
}

/// The blocks of a replaced LoRA that certainly match.
#[derive(Clone, Debug, Default)]
struct CurrentBlocks {
    /// Records of the blocks that were stored after the last change of the weights.
    records: HashSet<u32>,
    /// True from the time at which stored blocks prove that the weights have changed, until the engine's list of LoRAs changes too.
    is_ahead: bool,
}

/// A stored block of a LoRA.
#[derive(Clone, Copy, Debug)]
pub struct StoredBlock {
    /// Part of the seed that the LoRA contributes.
    pub lora: u64,
    /// Record of the block.
    pub record: u32,
    /// Record of the block's parent.
    pub parent: Option<u32>,
    /// Whether the stream held the block before.
    pub is_known: bool,
    /// Whether the block was stored on the device.
    pub is_on_device: bool,
    /// Whether the stream holds the same block of the present weights, on the same placement, under another hash.
    pub has_current_twin: bool,
}

impl ReplacedLoras {
    /// Records whether a stored block belongs to the weights that are loaded now. A block on the device shows that these weights have
    /// replaced other weights if
    ///
    /// - - the stream holds, on the same placement and under another hash, the same block of the previously loaded weights, or
    /// - the block follows an outdated block, or is an outdated first block that is announced again. Either the name has returned to a
    ///   former path, or a request that began with the former weights continues. Events do not distinguish the two cases.
    ///
    /// Copies on other tiers prove nothing, since the engine can make them long after it computed the block. Returns false and records
    /// nothing if too many LoRAs were replaced.
    pub fn note(&mut self, stored: &StoredBlock) -> bool {
        let StoredBlock { lora, record, .. } = *stored;
        let is_late = match stored.parent {
            Some(parent) => self.is_outdated(lora, parent),
            None => stored.is_known && self.is_outdated(lora, record),
        };
        let is_current = stored.is_on_device || stored.parent.is_some_and(|parent| !self.is_outdated(lora, parent));
        if stored.is_on_device && (is_late || stored.has_current_twin) {
            if !self.has_room(lora) {
                return false;
            }
            self.replace(lora);
        }
        if is_current {
            self.store(lora, record);
        }
        true
    }

    /// Whether this LoRA is recorded as replaced, or can be recorded without exceeding `MAX_LORAS`.
    pub fn has_room(&self, lora: u64) -> bool {
        self.contains(lora) || self.len() < MAX_LORAS
    }

    /// Whether no LoRA was replaced.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.current.is_empty()
    }

    /// Number of replaced LoRAs.
    pub fn len(&self) -> usize {
        self.current.len()
    }

    /// The parts of the seed that the replaced LoRAs contribute, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.current.keys().copied()
    }

    /// Whether a LoRA was replaced.
    pub fn contains(&self, lora: u64) -> bool {
        self.current.contains_key(&lora)
    }

    /// Whether a block of a LoRA might have been computed with replaced weights.
    #[inline]
    pub fn is_outdated(&self, lora: u64, record: u32) -> bool {
        self.current
            .get(&lora)
            .is_some_and(|current| !current.records.contains(&record))
    }

    /// Records a replacement that blocks have shown: all present blocks of the LoRA are outdated.
    pub fn replace(&mut self, lora: u64) {
        self.begin(lora, true);
    }

    /// Records a replacement that the engine's list of LoRAs shows, unless blocks have already shown it.
    pub fn replace_listed(&mut self, lora: u64) {
        match self.current.get_mut(&lora) {
            Some(current) if current.is_ahead => current.is_ahead = false,
            _ => self.begin(lora, false),
        }
    }

    fn begin(&mut self, lora: u64, is_ahead: bool) {
        let records = HashSet::new();
        let former = self.current.insert(lora, CurrentBlocks { records, is_ahead });
        self.records -= former.map_or(0, |former| former.records.len());
    }

    /// Records that a block of a replaced LoRA was stored after the last change of the weights. Does nothing for other LoRAs.
    pub fn store(&mut self, lora: u64, record: u32) {
        if let Some(current) = self.current.get_mut(&lora) {
            self.records += usize::from(current.records.insert(record));
        }
    }

    /// Removes the record of a block. Returns whether the record was one of a block of the present weights.
    pub fn remove(&mut self, lora: u64, record: u32) -> bool {
        let is_removed = (self.current.get_mut(&lora)).is_some_and(|current| current.records.remove(&record));
        self.records -= usize::from(is_removed);
        is_removed
    }

    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        self.current.len() * LORA_BYTES + self.records * RECORD_BYTES
    }
}
