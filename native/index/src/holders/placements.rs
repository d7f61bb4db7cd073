//! The placements of blocks: tiers, found by the media that engines name, and groups of hybrid models.

use xxhash_rust::xxh3::xxh3_64;

/// Tiers that are known, the fastest first; `kvevents.events.TIERS` lists the same tiers.
pub const TIERS: [&str; 3] = ["gpu", "cpu", "disk"];

/// For each tier, words that occur in the names that engines give to its media. `cuda` is not one of them: LMCache (0.5.6) sends
/// `cuda:0` for chunks in host memory if the tokens of the prompt are a tensor on that device (`cache_engine.py`).
const MEDIA: [&[&str]; TIERS.len()] = [
    &["GPU", "HBM", "DEVICE", "NPU", "XPU"],
    &["CPU", "HOST", "PINNED", "DRAM", "TIER1"],
    &[
        "TIER2",
        "DISK",
        "SSD",
        "NVME",
        "FS",
        "FILE",
        "FILESYSTEM",
        "OBJ",
        "OBJECT",
        "S3",
        "STORAGE",
        "STORE",
        "EXTERNAL",
        "REMOTE",
    ],
];

/// Number of levels: one for each tier in `TIERS`, and a last one for unknown media. A prefix on one level can consist of blocks on this
/// level and on all earlier levels.
pub const LEVELS: usize = TIERS.len() + 1;

/// The tier, locality, ownership and group for which copies of blocks are counted separately.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The tier: `gpu`, `cpu`, `disk`, or an unknown medium in upper case.
    pub tier: String,
    /// The locality, as the engine announces it.
    pub locality: Option<String>,
    /// The ownership, as the engine announces it.
    pub ownership: Option<String>,
    /// KV cache group.
    pub group: i64,
}

impl Placement {
    /// The level: 0 for the device, 1 for the host, 2 for disks and remote stores, 3 for unknown media.
    pub fn level(&self) -> usize {
        let level = level_of(&self.tier);
        if self.locality.as_deref() == Some("REMOTE") {
            level.max(2)
        } else {
            level
        }
    }

    /// Whether a clear removes the copies on this placement. A clear can name a tier, a group or both; a clear of everything names neither.
    pub fn is_cleared_by(&self, tier: Option<&str>, group: Option<i64>) -> bool {
        tier.is_none_or(|tier| tier == self.tier) && group.is_none_or(|group| group == self.group)
    }

    /// Whether a removal at this placement can mean copies on `other`: the tier is the same, and no property that both state differs.
    /// `has_group` is whether the removal states a group.
    pub fn may_mean(&self, other: &Self, has_group: bool) -> bool {
        let agree = |one: &Option<String>, other: &Option<String>| one.is_none() || other.is_none() || one == other;
        self.tier == other.tier
            && agree(&self.locality, &other.locality)
            && agree(&self.ownership, &other.ownership)
            && (!has_group || self.group == other.group)
    }

    /// The contribution of this placement's copies to an attestation.
    pub fn attestation(&self) -> AttestedGroup {
        AttestedGroup::new(self.group, self.level() == 0)
    }

    /// A digest of the placement that is the same in every process.
    pub fn digest(&self) -> u64 {
        let text = format!("{}\0{:?}\0{:?}\0{}", self.tier, self.locality, self.ownership, self.group);
        xxh3_64(text.as_bytes())
    }
}

/// How copies of blocks of one group count in an attestation (`kvevents.events.Heartbeat` has the formula): copies on the device count, and
/// all others contribute 0.
#[derive(Clone, Copy, Debug)]
pub struct AttestedGroup {
    salt: u64,
    mask: u64,
}

impl AttestedGroup {
    pub fn new(group: i64, is_on_device: bool) -> Self {
        Self {
            salt: (group as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            mask: if is_on_device { u64::MAX } else { 0 },
        }
    }

    /// Whether the value is that of copies on the device.
    #[inline]
    pub fn is_on_device(self) -> bool {
        self.mask != 0
    }

    /// The contribution of one copy of a block to an attestation.
    #[inline]
    pub fn copy(self, hash: u64) -> u64 {
        (hash ^ self.salt) & self.mask
    }

    /// The contribution of one copy of each of several blocks to an attestation.
    pub fn copies(self, hashes: &[u64]) -> u64 {
        hashes.iter().fold(0, |sum: u64, &hash| sum.wrapping_add(self.copy(hash)))
    }
}

/// The level of a tier.
pub fn level_of(tier: &str) -> usize {
    TIERS.iter().position(|known| *known == tier).unwrap_or(TIERS.len())
}

/// The tier of a medium. Words of the medium's name determine the tier, as in `CPU_PINNED` or `shared-storage`. If the name contains words
/// of several tiers, the slowest of these tiers counts. An empty name means the device. Ignores case.
pub fn tier(medium: &str) -> String {
    let upper = medium.to_uppercase();
    let is_word = |media: &[&str]| {
        upper
            .split(|letter: char| !letter.is_alphanumeric())
            .any(|word| media.contains(&word))
    };
    let known = if upper.is_empty() {
        Some(0)
    } else {
        MEDIA.iter().rposition(|media| is_word(media))
    };
    known.map_or(upper, |level| TIERS[level].into())
}

/// Maximum number of placements of one index. An engine uses a few placements, but a peer could send any names and groups.
pub const MAX_PLACEMENTS: usize = 4096;

#[derive(Debug)]
struct Entry {
    placement: Placement,
    /// Number of streams that have the placement.
    users: u32,
}

/// All placements in use, indexed by their numbers.
#[derive(Debug, Default)]
pub struct Placements {
    entries: Vec<Entry>,
    levels: Vec<u8>,
    /// One more than the highest level in use.
    depth: usize,
}

impl Placements {
    /// The placement with this number.
    pub fn get(&self, number: u16) -> &Placement {
        &self.entries[number as usize].placement
    }

    /// The levels of all placements, indexed by the placements' numbers.
    #[inline]
    pub fn levels(&self) -> &[u8] {
        &self.levels
    }

    /// Number of levels that prefixes can have: one more than the highest level of any placement.
    #[inline]
    pub fn depth(&self) -> usize {
        self.depth.max(1)
    }

    /// All placements by number, including unused ones.
    pub fn all(&self) -> Vec<Placement> {
        self.entries.iter().map(|entry| entry.placement.clone()).collect()
    }

    /// Placements in use, with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u16, &Placement)> {
        let used = self.entries.iter().enumerate().filter(|(_, entry)| entry.users > 0);
        used.map(|(number, entry)| (number as u16, &entry.placement))
    }

    /// Returns the number of a placement and counts one more stream that has it; None if there are too many placements.
    pub fn retain(&mut self, placement: Placement) -> Option<u16> {
        let known = |entry: &Entry| entry.users > 0 && entry.placement == placement;
        if let Some(at) = self.entries.iter().position(known) {
            self.entries[at].users += 1;
            return Some(at as u16);
        }
        let level = placement.level();
        self.depth = self.depth.max(level + 1);
        let entry = Entry { placement, users: 1 };
        if let Some(at) = self.entries.iter().position(|entry| entry.users == 0) {
            (self.entries[at], self.levels[at]) = (entry, level as u8);
            return Some(at as u16);
        }
        if self.entries.len() >= MAX_PLACEMENTS {
            return None;
        }
        self.entries.push(entry);
        self.levels.push(level as u8);
        Some((self.entries.len() - 1) as u16)
    }

    /// Decrements the number of streams that have a placement, after one of these streams has removed its last block there.
    pub fn release(&mut self, number: u16) {
        self.entries[number as usize].users -= 1;
        while self.entries.last().is_some_and(|entry| entry.users == 0) {
            self.entries.pop();
            self.levels.pop();
        }
        let levels = self.iter().map(|(_, placement)| placement.level() + 1);
        self.depth = levels.max().unwrap_or(0);
    }
}
