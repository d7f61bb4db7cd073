//! Copies of blocks in groups of unknown kinds. No prompt matches these blocks, but an engine's attestation counts them, so consumers must
//! know their hashes.

use std::collections::HashMap;

use kvevents_index::holders::placements::Placement;
use kvevents_index::rules::location::owned;

use super::event::{Location, Store, Text};

/// Maximum number of placements of such blocks.
const MAX_PLACEMENTS: usize = 64;
/// Maximum number of hashes in one exported event.
const MAX_HASHES: usize = 4096;

/// The copies on one placement.
#[derive(Debug)]
pub struct Group {
    placement: Placement,
    /// A store without blocks, which names the placement and the kind of its group.
    pub example: Store<'static>,
    /// Maps a hash to the number of its stored copies minus the number of its removed copies; never 0. As in the index, removals of hashes
    /// that were not stored also count.
    copies: HashMap<u64, i32>,
    /// Sum of the absolute values of `copies`.
    total: usize,
}

/// All copies of one stream in groups of unknown kinds.
#[derive(Debug, Default)]
pub struct UnkeptCopies {
    groups: Vec<Group>,
}

impl UnkeptCopies {
    /// Adds the copies of a store. Returns None if there are too many placements.
    pub fn store(&mut self, store: &Store<'_>) -> Option<()> {
        self.change(&store.hashes, &store.location, &store.kind, store.block_size, 1)
    }

    /// Removes one copy of each hash in a group of this kind. Returns None if there are too many placements.
    pub fn remove(&mut self, hashes: &[u64], location: &Location<'_>, kind: &Text<'_>) -> Option<()> {
        self.change(hashes, location, kind, 0, -1)
    }

    fn change(&mut self, hashes: &[u64], location: &Location<'_>, kind: &Text<'_>, block_size: u64, by: i32) -> Option<()> {
        if hashes.is_empty() {
            return Some(());
        }
        let placement = location.placement();
        let found = self.groups.iter().position(|group| group.placement == placement);
        let at = match found {
            Some(at) => at,
            None if self.groups.len() >= MAX_PLACEMENTS => return None,
            None => {
                let example = Store {
                    location: location.to_static(),
                    kind: owned(kind),
                    block_size,
                    ..Store::default()
                };
                self.groups.push(Group {
                    placement,
                    example,
                    copies: HashMap::new(),
                    total: 0,
                });
                self.groups.len() - 1
            }
        };
        let Group { copies, total, .. } = &mut self.groups[at];
        for &hash in hashes {
            let count = copies.entry(hash).or_default();
            *total -= count.unsigned_abs() as usize;
            *count = count.saturating_add(by);
            *total += count.unsigned_abs() as usize;
            if *count == 0 {
                copies.remove(&hash);
            }
        }
        if copies.is_empty() {
            self.groups.swap_remove(at);
        } else if copies.capacity() > 64 && copies.len() * 4 < copies.capacity() {
            copies.shrink_to(copies.len() * 2);
        }
        Some(())
    }

    /// Forgets the copies on a tier, or in a group.
    pub fn clear(&mut self, tier: Option<&str>, group: Option<i64>) {
        self.groups.retain(|known| !known.placement.is_cleared_by(tier, group));
    }

    /// Number of hashes that an export of these copies contains.
    pub fn len(&self) -> usize {
        self.groups.iter().map(|group| group.total).sum()
    }

    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        let table =
            |group: &Group| group.copies.capacity() * (size_of::<(u64, i32)>() + 1) + 2 * group.example.location.bytes();
        self.groups.iter().map(table).sum::<usize>() + self.groups.capacity() * size_of::<Group>()
    }

    /// The copies on each placement. The order depends only on the state, not on its history.
    pub fn sorted(&self) -> Vec<&Group> {
        let mut groups: Vec<&Group> = self.groups.iter().collect();
        groups.sort_by(|one, other| {
            let rank = |group: &Group| (group.placement.level(), group.placement.group);
            (rank(one), &one.example.location).cmp(&(rank(other), &other.example.location))
        });
        groups
    }
}

impl Group {
    /// Returns the hashes of copies, each hash as often as it has copies, in parts of at most `MAX_HASHES`. If `sign` is 1, these are the
    /// stored copies. If `sign` is -1, these are the copies that were removed but never stored.
    pub fn hashes(&self, sign: i32) -> Vec<Vec<u64>> {
        let mut copies: Vec<(u64, i32)> = self.copies.iter().map(|(&hash, &count)| (hash, count)).collect();
        copies.sort_unstable();
        let repeated = |(hash, count): (u64, i32)| std::iter::repeat_n(hash, count.saturating_mul(sign).max(0) as usize);
        let hashes: Vec<u64> = copies.into_iter().flat_map(repeated).collect();
        hashes.chunks(MAX_HASHES).map(<[u64]>::to_vec).collect()
    }
}
