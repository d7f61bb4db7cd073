//! Where a block can be: tiers by the media that engines name, and the groups of hybrid models.

use xxhash_rust::xxh3::xxh3_64;

/// Levels of tiers, from the fastest; a prefix at one level may use every level before it.
pub const LEVELS: usize = 4;

/// A place that copies of blocks are counted in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plane {
    /// `gpu`, `cpu`, `disk`, or an unknown medium in upper case.
    pub tier: String,
    /// As the engine says it.
    pub locality: Option<String>,
    /// As the engine says it.
    pub ownership: Option<String>,
    /// KV cache group.
    pub group: i64,
}

impl Plane {
    /// 0 for the device, 1 for the host, 2 for disks and whatever is remote, 3 for media that nobody knows.
    pub fn level(&self) -> usize {
        let level = match self.tier.as_str() {
            "gpu" => 0,
            "cpu" => 1,
            "disk" => 2,
            _ => 3,
        };
        if self.locality.as_deref() == Some("REMOTE") {
            level.max(2)
        } else {
            level
        }
    }

    /// The same number in every process.
    pub fn digest(&self) -> u64 {
        let text = format!("{}\0{:?}\0{:?}\0{}", self.tier, self.locality, self.ownership, self.group);
        xxh3_64(text.as_bytes())
    }
}

/// The tier of a medium, whatever its case.
pub fn tier(medium: &str) -> String {
    let upper = medium.to_uppercase();
    match upper.as_str() {
        "" | "GPU" | "HBM" | "DEVICE" => "gpu".into(),
        "CPU" | "CPU_PINNED" | "CPU_TIER1" | "HOST" => "cpu".into(),
        "CPU_TIER2" | "DISK" | "SSD" | "NVME" | "FS" | "STORAGE" | "EXTERNAL" | "REMOTE" => "disk".into(),
        _ => upper,
    }
}

/// How blocks of a KV cache group count towards a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// All of them are needed.
    Dense,
    /// That many before the end of the prefix are needed.
    Window(u32),
    /// Nobody knows; its blocks give no credit.
    Unknown,
}

/// Rules of the groups of one stream.
#[derive(Clone, Debug, Default)]
pub struct Rules(pub Vec<(i64, Rule)>);

impl Rules {
    /// The rule of a group.
    pub fn get(&self, group: i64) -> Option<Rule> {
        self.0.iter().find(|(known, _)| *known == group).map(|(_, rule)| *rule)
    }

    /// Learns a rule; says whether anything is new.
    pub fn learn(&mut self, group: i64, rule: Rule) -> bool {
        match self.0.iter_mut().find(|(known, _)| *known == group) {
            Some((_, known)) if *known == rule => return false,
            Some((_, known)) => *known = rule,
            None => self.0.push((group, rule)),
        }
        true
    }

    /// Groups whose rules are known, when there are several.
    pub fn hybrid(&self) -> Option<Vec<(i64, Rule)>> {
        let known: Vec<_> = self.0.iter().copied().filter(|(_, rule)| *rule != Rule::Unknown).collect();
        (known.len() > 1).then_some(known)
    }
}
