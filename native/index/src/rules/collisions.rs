//! The hashes under which a stream has several blocks, and a bound on the work that they cause.

use std::collections::HashMap;

use crate::step_counter;

/// Number of checks that each byte of the stream allows. A check examines one block that shares its hash with other blocks. An engine whose
/// hashes do not cover prefixes sends about fifty bytes for each page that it stores or removes. Fifty bytes allow checks of all blocks of
/// one hash, up to the limit of blocks per hash.
const EXAMINATIONS_PER_BYTE: usize = 16;
/// Maximum number of unused checks that stay in a budget for later payloads.
const MAX_SAVED_EXAMINATIONS: usize = 1 << 20;
/// A hash with at most this number of blocks can always be examined.
const MIN_EXAMINED: usize = 8;

/// The blocks of each hash that has several blocks.
///
/// Peers choose the hashes. So the number of checks that a payload can cause is limited by the payload's length.
#[derive(Debug)]
pub struct Collisions {
    /// The records of each hash, the newest record last. Each hash has at least two records.
    lists: HashMap<u64, Vec<u32>>,
    /// Number of records in all lists.
    blocks: usize,
    /// Number of checks that remain for removals and stores.
    examinations: usize,
    /// Number of checks that remain for the publication of changed copies.
    published: usize,
    /// Whether a removal was skipped because no checks remained.
    has_skipped: bool,
}

impl Default for Collisions {
    fn default() -> Self {
        Self {
            lists: HashMap::new(),
            blocks: 0,
            examinations: MAX_SAVED_EXAMINATIONS,
            published: MAX_SAVED_EXAMINATIONS,
            has_skipped: false,
        }
    }
}

impl Collisions {
    /// Whether no hash has several blocks.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.lists.is_empty()
    }

    /// The blocks of a hash, the newest last; None if the hash has at most one block.
    #[inline]
    pub fn get(&self, hash: u64) -> Option<&[u32]> {
        if self.lists.is_empty() {
            return None;
        }
        self.lists.get(&hash).map(Vec::as_slice)
    }

    /// All hashes with their blocks, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &[u32])> {
        self.lists.iter().map(|(hash, list)| (*hash, list.as_slice()))
    }

    /// Adds the block `number` to a hash. `known` is a block that already has this hash.
    pub fn add(&mut self, hash: u64, known: u32, number: u32) {
        let room = (self.lists.len(), self.lists.capacity());
        let list = self.lists.entry(hash).or_insert_with(|| vec![known]);
        self.blocks += if list.len() == 1 { 2 } else { 1 };
        list.push(number);
        step_counter::count_growth(room, self.lists.len());
    }

    /// Makes a block the newest of its hash.
    pub fn make_newest(&mut self, hash: u64, number: u32) {
        if self.lists.is_empty() {
            return;
        }
        if let Some(list) = self.lists.get_mut(&hash)
            && let Some(at) = list.iter().position(|&other| other == number)
        {
            list.remove(at);
            list.push(number);
        }
    }

    /// Removes a block from a hash. If only one block remains, the hash is not listed any more.
    pub fn remove(&mut self, hash: u64, number: u32) {
        let Some(list) = self.lists.get_mut(&hash) else { return };
        step_counter::count(list.len());
        self.examinations = self.examinations.saturating_sub(list.len());
        list.retain(|&other| other != number);
        self.blocks -= 1;
        if list.len() < 2 {
            self.blocks -= list.len();
            self.lists.remove(&hash);
            if self.lists.is_empty() {
                self.lists = HashMap::new();
            }
        }
    }

    /// Replaces the record of a block.
    pub fn exchange(&mut self, hash: u64, from: u32, to: u32) {
        let list = self.lists.get_mut(&hash).into_iter().flatten();
        list.filter(|number| **number == from).for_each(|number| *number = to);
    }

    /// Sets the order of the blocks of a listed hash.
    pub fn put(&mut self, hash: u64, ordered: Vec<u32>) {
        self.lists.insert(hash, ordered);
    }

    /// Removes all blocks; the numbers of remaining checks do not change.
    pub fn clear(&mut self) {
        (self.lists, self.blocks) = (HashMap::new(), 0);
    }

    /// Adds the number of checks that a payload of this length allows to each budget.
    pub fn grant(&mut self, payload: usize) {
        for left in [&mut self.examinations, &mut self.published] {
            let granted = EXAMINATIONS_PER_BYTE.saturating_mul(payload);
            *left = (*left).min(MAX_SAVED_EXAMINATIONS).saturating_add(granted);
        }
    }

    /// Subtracts checks for the publication of the copies that a batch has changed. Returns false if too few checks remained.
    pub fn may_publish(&mut self, examinations: usize) -> bool {
        let left = self.published.checked_sub(examinations);
        self.published = left.unwrap_or_default();
        left.is_some()
    }

    /// Subtracts checks from those that remain for removals and stores.
    #[inline]
    pub fn spend(&mut self, examinations: usize) {
        self.examinations = self.examinations.saturating_sub(examinations);
    }

    /// Whether all blocks of a hash may be examined. False if no checks remain and the hash has more than `MIN_EXAMINED` blocks.
    #[inline]
    pub fn may_examine(&self, hash: u64) -> bool {
        self.examinations > 0 || self.lists.get(&hash).is_none_or(|list| list.len() <= MIN_EXAMINED)
    }

    /// Whether no checks remain for removals and stores.
    pub fn is_spent(&self) -> bool {
        self.examinations == 0
    }

    /// Records that a removal was skipped because no checks remained.
    pub fn skip_removal(&mut self) {
        self.has_skipped = true;
    }

    /// Whether a removal was skipped since the last call of this function.
    pub fn take_skipped(&mut self) -> bool {
        std::mem::take(&mut self.has_skipped)
    }

    /// Number of hashes, and the number for which memory is allocated.
    #[inline]
    pub fn room(&self) -> (usize, usize) {
        (self.lists.len(), self.lists.capacity())
    }

    /// Allocates memory for further hashes.
    pub fn reserve(&mut self, hashes: usize) {
        self.lists.reserve(hashes);
    }

    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        self.lists.capacity() * (size_of::<(u64, Vec<u32>)>() + 1) + self.blocks * 8
    }

    /// Whether the cached number of records is correct; for tests.
    pub fn is_counted(&self) -> bool {
        self.lists.values().map(Vec::len).sum::<usize>() == self.blocks
    }
}
