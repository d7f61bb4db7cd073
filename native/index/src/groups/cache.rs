//! Maps the hashes that an engine computes to the engine's blocks. A lookup uses this map if records of blocks do not suffice
//! (`crate::groups::Method::Hashes`).

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{RwLock, RwLockReadGuard};

use crate::groups::Groups;
use crate::groups::engine_hash::{EngineHash, Sample};
use crate::groups::search::{self, CachedPrefix, Looks};
use crate::holders::placements::LEVELS;
use crate::memory::hasher::Secret;
use crate::step_counter;

/// The levels on which a block is held. The lower half has a bit for each level on which the block is held, the upper half a bit for each
/// level on which the block is certainly held.
type Held = u8;

const _: () = assert!(2 * LEVELS <= Held::BITS as usize);

/// The blocks that the groups of an engine hold.
#[derive(Debug, Default)]
pub struct GroupCache {
    /// The number of each group, and a map from hashes to the group's blocks. A group never changes its position in this list, so a writer
    /// can run during a search.
    groups: Vec<(i64, HashMap<u64, Held, Secret>)>,
    /// Number of changes of this cache. If it changes during a search, no token that the search finds is certain.
    changes: u64,
    /// Number of blocks that might be gone.
    uncertain: usize,
    /// Maps the part of a seed that a salt contributes to the salt.
    salts: HashMap<u64, String, Secret>,
    /// Whether prompts have salts that `salts` does not contain.
    misses_salts: bool,
}

/// The data with which lookups search one stream whose groups cannot be matched by bitmaps.
#[derive(Debug)]
pub struct GroupLookup {
    /// Groups of the engine.
    pub groups: Groups,
    /// Maps the engine's own hashes to the stream's blocks; present only if lookups use `Method::Hashes`.
    pub cache: Option<Arc<RwLock<GroupCache>>>,
}

/// Maximum number of salts that are stored for a stream.
pub const MAX_SALTS: usize = 1 << 16;
/// Number of blocks that a search examines under one read lock before it lets a waiting writer run.
const LOOKS_PER_HOLD: usize = 1 << 12;
/// Approximate bytes of an entry of a map.
const ENTRY_BYTES: usize = 18;

/// For each level, the number of tokens of a prompt that an engine finds cached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The numbers of tokens if all listed blocks count; they are upper bounds.
    pub tokens: [u32; LEVELS],
    /// Numbers of tokens if the blocks that might be gone are not counted.
    pub certain: [u32; LEVELS],
}

fn is_uncertain(held: Held) -> bool {
    held >> LEVELS != held & ((1 << LEVELS) - 1)
}

impl GroupCache {
    /// Records on which level a block of a group is held.
    pub fn put(&mut self, group: i64, hash: u64, level: usize, is_held: bool, is_certain: bool) {
        self.changes += 1;
        let at = self.place(group).unwrap_or_else(|| {
            self.groups.push((group, HashMap::default()));
            self.groups.len() - 1
        });
        let group = &mut self.groups[at].1;
        let before = group.get(&hash).copied().unwrap_or_default();
        let (low, high) = (1 << level, 1 << (level + LEVELS));
        let held = before & !(low | high);
        let held = held | if is_held { low } else { 0 } | if is_held && is_certain { high } else { 0 };
        self.uncertain = self.uncertain + usize::from(is_uncertain(held)) - usize::from(is_uncertain(before));
        if held == 0 {
            group.remove(&hash);
            if group.capacity() > 64 && group.len() < group.capacity() / 8 {
                group.shrink_to(group.len() * 2);
            }
        } else {
            group.insert(hash, held);
        }
    }

    fn place(&self, number: i64) -> Option<usize> {
        self.groups.iter().position(|(group, _)| *group == number)
    }

    /// Forgets all blocks.
    pub fn clear(&mut self) {
        self.groups.iter_mut().for_each(|(_, held)| *held = HashMap::default());
        self.changes += 1;
        self.uncertain = 0;
    }

    /// Stores the salt that contributes `part` to seeds, if `hashing` with this salt yields the hash of the sample block. Returns whether
    /// the salt was stored.
    pub fn learn_salt(&mut self, part: u64, salt: &str, hashing: &EngineHash, sample: &Sample) -> bool {
        if self.salts.contains_key(&part) {
            return true;
        }
        let is_kept = self.salts.len() < MAX_SALTS && sample.has(hashing, salt);
        if is_kept {
            self.salts.insert(part, salt.into());
        }
        is_kept
    }

    /// Records that prompts can have salts that are not stored.
    pub fn miss_salts(&mut self) {
        self.misses_salts = true;
    }

    /// Whether prompts can have salts that are not stored.
    pub fn misses_salts(&self) -> bool {
        self.misses_salts
    }

    /// The salt that contributes this part of a seed, if the engine has announced a block with that salt.
    pub fn salt(&self, part: u64) -> Option<&str> {
        self.salts.get(&part).map(String::as_str)
    }

    /// The salts, as a snapshot stores them.
    pub fn salts(&self) -> impl ExactSizeIterator<Item = (u64, &str)> + '_ {
        self.salts.iter().map(|(&part, salt)| (part, salt.as_str()))
    }

    /// Adds the salts of a snapshot.
    pub fn resume(&mut self, salts: impl IntoIterator<Item = (u64, String)>) {
        self.salts.extend(salts);
    }

    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        let held: usize = self.groups.iter().map(|(_, group)| group.capacity() * ENTRY_BYTES).sum();
        held + self.salts.values().map(|salt| salt.len() + 64).sum::<usize>()
    }

    /// Returns how many tokens of a prompt the engine finds cached, at most `longest`. `hashes` are those of the whole prompt. A long
    /// search lets writers run; if a writer has changed the cache, no token is certain.
    pub fn find(cache: &RwLock<Self>, groups: &Groups, hashes: &[u64], longest: usize, looks: &Looks<'_>) -> Found {
        let unit = groups.unit() as usize;
        step_counter::begin_hold();
        let (cache, looks_left) = (RefCell::new(cache.read()), Cell::new(LOOKS_PER_HOLD));
        let changes = cache.borrow().changes;
        let places: Vec<_> = groups.known().map(|group| cache.borrow().place(group.number)).collect();
        let find = |levels: Held| {
            search::find(
                groups,
                hashes.len() * unit,
                longest,
                looks,
                |group: usize, position: usize| {
                    looks_left.set(looks_left.get() - 1);
                    if looks_left.get() == 0 {
                        looks_left.set(LOOKS_PER_HOLD);
                        step_counter::end_hold();
                        RwLockReadGuard::bump(&mut cache.borrow_mut());
                    }
                    let (cache, hash) = (cache.borrow(), hashes.get((position / unit).wrapping_sub(1)));
                    let found = hash.zip(places[group]).and_then(|(hash, at)| cache.groups[at].1.get(hash));
                    found.is_some_and(|held| held & levels != 0)
                },
            )
        };
        let (tokens, is_exact) = by_level(|level| find((1 << (level + 1)) - 1));
        let certain = match is_exact {
            true if cache.borrow().uncertain == 0 => Some(tokens),
            true => Some(by_level(|level| find(((1 << (level + 1)) - 1) << LEVELS)))
                .filter(|found| found.1)
                .map(|found| found.0),
            false => None,
        };
        step_counter::end_hold();
        let certain = certain.filter(|_| cache.borrow().changes == changes);
        Found {
            tokens,
            certain: certain.unwrap_or_default(),
        }
    }
}

/// Calls `find` for each level. Returns the numbers of tokens by level, and whether all searches ended. The number of a level is at least
/// that of the level before it.
pub fn by_level(find: impl Fn(usize) -> CachedPrefix) -> ([u32; LEVELS], bool) {
    let mut is_exact = true;
    let mut find = |level| {
        let prefix = find(level);
        is_exact &= prefix.is_exact;
        u32::try_from(prefix.tokens).unwrap_or(u32::MAX)
    };
    let (first, last) = (find(0), find(LEVELS - 1));
    let tokens = std::array::from_fn(|level| match level {
        0 => first,
        level if level == LEVELS - 1 || first == last => last,
        level => find(level),
    });
    (tokens, is_exact)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::groups::GroupKind;
    use crate::groups::search::SharedLooks;
    use crate::step_counter::Steps;

    /// Finds a prompt of many blocks of one group, all of which are held.
    fn find(cache: &RwLock<GroupCache>, blocks: u64) -> Found {
        let mut groups = Groups::default();
        groups.learn(0, GroupKind::Full(0), 1);
        let (hashes, shared) = ((0..blocks).collect::<Vec<_>>(), SharedLooks::default());
        let looks = Looks::new(hashes.len(), &shared, "");
        GroupCache::find(cache, &groups, &hashes, hashes.len(), &looks)
    }

    fn cache_of(blocks: u64) -> RwLock<GroupCache> {
        let mut cache = GroupCache::default();
        (0..blocks).for_each(|hash| cache.put(0, hash, 0, true, true));
        RwLock::new(cache)
    }

    #[test]
    fn a_search_yields_after_some_looks() {
        let cache = cache_of(20_000);
        step_counter::taken();
        assert_eq!(find(&cache, 20_000).certain, [20_000; LEVELS]);
        let Steps { taken, longest, .. } = step_counter::taken();
        assert_eq!((taken, longest), (40_000, 1 << 12));
    }

    /// A writer runs during a search, and then no token is certain.
    #[test]
    fn a_writer_runs_during_a_search() {
        let (cache, is_seen) = (cache_of(20_000), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_seen.load(Ordering::Relaxed) {
                    cache.write().put(1, 7, 0, true, true);
                }
            });
            let is_disturbed = (0..2_000).any(|_| {
                find(&cache, 20_000)
                    == Found {
                        tokens: [20_000; LEVELS],
                        certain: [0; LEVELS],
                    }
            });
            is_seen.store(true, Ordering::Relaxed);
            assert!(is_disturbed);
        });
    }
}
