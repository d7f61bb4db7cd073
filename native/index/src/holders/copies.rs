//! The number of physical copies of a block on a placement, as far as the stream states it.
//!
//! From 0.26 on, vLLM announces resident blocks again if a client asks for it (`kv_cache_report_mode`). On the wire a repetition looks like
//! the store of a second physical copy. So after a second store, the number of copies is known only as a range. The number is certain again
//! if the bounds of the range are equal, or if an attestation of the engine's cache agrees with the stream.
//!
//! A clear that names no tier might remove blocks on lower tiers or keep them. So the lower bound of blocks on lower tiers is 0 until
//! they are stored again.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use crate::step_counter;

/// Bounds of the number of copies of one block on one placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copies {
    /// Lower bound; 0 for a block that might be gone.
    pub least: u32,
    /// Upper bound; at least 1.
    pub most: u32,
}

impl Copies {
    /// Exactly one copy: the value of a block that `CopyTable` does not list.
    pub const ONE: Self = Self { least: 1, most: 1 };

    /// Bounds after one more store.
    fn stored(self, is_certain: bool) -> Self {
        Self {
            least: if is_certain {
                self.least.saturating_add(1)
            } else {
                self.least.max(1)
            },
            most: self.most.saturating_add(1),
        }
    }

    /// Bounds after one removal; `most` is 0 if no copy remains.
    fn removed(self) -> Self {
        Self {
            least: self.least.saturating_sub(1),
            most: self.most - 1,
        }
    }

    /// Whether both bounds are equal.
    fn is_exact(self) -> bool {
        self.least == self.most
    }

    /// Whether the block might have no copy any more.
    pub fn is_uncertain(self) -> bool {
        self.least == 0
    }
}

/// The effect of a change of copies on lookups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Lookups are not affected.
    Same,
    /// The block might be gone from now on.
    BecameUncertain,
    /// The block is certainly held again.
    BecameCertain,
}

impl Change {
    fn between(before: Copies, after: Copies) -> Self {
        match (before.is_uncertain(), after.is_uncertain()) {
            (false, true) => Self::BecameUncertain,
            (true, false) => Self::BecameCertain,
            _ => Self::Same,
        }
    }
}

/// For one stream, maps the record of a block and a placement to the bounds of the block's number of copies on the placement. Blocks with
/// exactly one copy have no entry.
#[derive(Debug, Default)]
pub struct CopyTable {
    entries: HashMap<(u32, u16), Copies>,
    /// For each placement, the records of blocks whose lower and upper bounds differ.
    inexact: HashMap<u16, HashSet<u32>>,
    uncertain: usize,
}

impl CopyTable {
    /// Whether every block has exactly one copy on each placement that holds it.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether the table has an entry for a block on a placement.
    #[inline]
    pub fn contains(&self, number: u32, placement: u16) -> bool {
        self.entries.contains_key(&(number, placement))
    }

    /// Bounds of the number of copies of a block that is held.
    pub fn get(&self, number: u32, placement: u16) -> Copies {
        self.entries.get(&(number, placement)).copied().unwrap_or(Copies::ONE)
    }

    /// Number of blocks that might be gone; a block that might be gone on two placements counts twice.
    pub fn uncertain(&self) -> usize {
        self.uncertain
    }

    /// Upper bound of the number of further copies: all copies except the first of each block on each placement.
    pub fn beyond_first(&self) -> usize {
        self.entries.values().map(|copies| copies.most as usize - 1).sum()
    }

    /// Sets the copies of a block that is held.
    pub fn set(&mut self, number: u32, placement: u16, copies: Copies) -> Change {
        let before = if copies == Copies::ONE {
            self.entries.remove(&(number, placement))
        } else {
            self.entries.insert((number, placement), copies)
        };
        self.shrink();
        self.changed(number, placement, before.unwrap_or(Copies::ONE), copies)
    }

    /// Removes a block that is no longer held. Returns the block's former copies.
    pub fn remove(&mut self, number: u32, placement: u16) -> (Copies, Change) {
        let before = self.entries.remove(&(number, placement)).unwrap_or(Copies::ONE);
        self.shrink();
        (before, self.changed(number, placement, before, Copies::ONE))
    }

    /// Records one more store of a block that is held.
    pub fn store(&mut self, number: u32, placement: u16, is_certain: bool) -> Change {
        let room = (self.entries.len(), self.entries.capacity());
        let copies = self.entries.entry((number, placement)).or_insert(Copies::ONE);
        let before = *copies;
        *copies = copies.stored(is_certain);
        let after = *copies;
        step_counter::count_growth(room, self.entries.len());
        self.changed(number, placement, before, after)
    }

    /// Records one removal of a held block. Returns None, and changes nothing, if the block has at most one copy.
    pub fn take(&mut self, number: u32, placement: u16) -> Option<Change> {
        let after = self.get(number, placement).removed();
        (after.most > 0).then(|| self.set(number, placement, after))
    }

    /// Whether a placement has blocks whose lower and upper bounds differ.
    pub fn are_inexact(&self, placement: u16) -> bool {
        self.inexact.contains_key(&placement)
    }

    /// Sets the lower bound of the copies of each block on a placement to the upper bound, so that the number is certain. Returns the
    /// records of blocks that might have been gone.
    pub fn certify(&mut self, placement: u16) -> Vec<u32> {
        let inexact = self
            .inexact
            .get(&placement)
            .map_or_else(Vec::new, |numbers| numbers.iter().copied().collect());
        let certified = inexact.into_iter().filter(|&number| {
            let Copies { most, .. } = self.get(number, placement);
            self.set(number, placement, Copies { least: most, most }) == Change::BecameCertain
        });
        certified.collect()
    }

    /// Length and capacity of each hash table.
    #[inline]
    pub fn rooms(&self) -> impl Iterator<Item = (usize, usize)> {
        let inexact = self.inexact.values().map(|numbers| (numbers.len(), numbers.capacity()));
        inexact.chain([(self.entries.len(), self.entries.capacity())])
    }

    /// Reserves room for more entries.
    pub fn reserve(&mut self, entries: usize) {
        self.entries.reserve(entries);
        self.inexact.values_mut().for_each(|numbers| numbers.reserve(entries));
    }

    /// Approximate heap bytes, including the list of uncertain blocks that lookups read.
    pub fn bytes(&self) -> usize {
        let inexact: usize = self.inexact.values().map(HashSet::capacity).sum();
        self.entries.capacity() * (size_of::<((u32, u16), Copies)>() + 1)
            + inexact * (size_of::<u32>() + 1)
            + self.uncertain * UNCERTAIN_BYTES
    }

    fn changed(&mut self, number: u32, placement: u16, before: Copies, after: Copies) -> Change {
        match (before.is_exact(), after.is_exact()) {
            (true, false) => {
                let numbers = self.inexact.entry(placement).or_default();
                let room = (numbers.len(), numbers.capacity());
                numbers.insert(number);
                step_counter::count_growth(room, numbers.len());
            }
            (false, true) => {
                if let Entry::Occupied(mut numbers) = self.inexact.entry(placement) {
                    numbers.get_mut().remove(&number);
                    if numbers.get().is_empty() {
                        numbers.remove();
                    }
                }
            }
            _ => {}
        }
        let change = Change::between(before, after);
        match change {
            Change::Same => {}
            Change::BecameUncertain => self.uncertain += 1,
            Change::BecameCertain => self.uncertain -= 1,
        }
        change
    }

    fn shrink(&mut self) {
        if self.entries.is_empty() && self.entries.capacity() > 0 {
            self.entries = HashMap::new();
        }
    }
}

/// Approximate bytes of a block in `Member::uncertain`.
const UNCERTAIN_BYTES: usize = 16;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// A store of another physical copy.
        Copy,
        /// A store of another physical copy, in a stream in which each store is known to be a copy.
        StatedCopy,
        /// A repeated store of a resident block, without another copy.
        Report,
        /// An eviction of one physical copy.
        Evict,
    }

    proptest! {
        /// Whatever an engine does, the true number of copies is within the bounds, and a block that counts as gone has no copy.
        #[test]
        fn the_true_number_is_between_the_bounds(
            steps in proptest::collection::vec(
                prop_oneof![Just(Step::Copy), Just(Step::StatedCopy), Just(Step::Report), Just(Step::Evict)],
                0..40,
            )
        ) {
            let (mut table, mut held, mut truth) = (CopyTable::default(), false, 0);
            let (mut is_uncertain, mut stores, mut reports) = (false, 0, 0);
            for step in steps {
                let is_store = match step {
                    Step::Evict => false,
                    Step::Report => truth > 0,
                    _ => true,
                };
                if is_store {
                    let is_report = matches!(step, Step::Report);
                    reports += u32::from(is_report);
                    stores += 1;
                    truth += u32::from(!is_report);
                    let change = if held {
                        table.store(0, 0, matches!(step, Step::StatedCopy))
                    } else {
                        Change::Same
                    };
                    held = true;
                    prop_assert_eq!(change == Change::BecameCertain, is_uncertain);
                    is_uncertain = false;
                } else if matches!(step, Step::Evict) && truth > 0 {
                    truth -= 1;
                    prop_assert!(held);
                    match table.take(0, 0) {
                        Some(Change::BecameUncertain) => is_uncertain = true,
                        Some(change) => prop_assert_eq!(change, Change::Same),
                        None => (held, is_uncertain) = (false, table.remove(0, 0).1 == Change::BecameUncertain),
                    }
                }
                if held {
                    let copies = table.get(0, 0);
                    prop_assert!(copies.least <= truth && truth <= copies.most);
                    prop_assert_eq!(copies.is_uncertain(), is_uncertain);
                } else {
                    prop_assert_eq!(truth, 0);
                    prop_assert!(table.is_empty());
                }
                prop_assert_eq!(table.uncertain(), usize::from(is_uncertain));
                if reports == 0 && stores == 1 {
                    prop_assert!(table.is_empty());
                }
            }
        }
    }
}
