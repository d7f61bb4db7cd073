//! A hash table in parts that grow separately, so that no caller waits until the whole table is rehashed.

use hashbrown::HashTable;

use crate::step_counter;

const PART_COUNT: usize = 64;
/// Position of the bits of a hash that select the part: `hashbrown` uses the bits at both ends.
const PART_SHIFT: u32 = 40;

/// A hash table in parts.
#[derive(Debug)]
pub struct ShardedTable<T> {
    parts: Box<[HashTable<T>]>,
    length: usize,
}

impl<T> ShardedTable<T> {
    /// An empty table.
    pub fn new() -> Self {
        Self {
            parts: (0..PART_COUNT).map(|_| HashTable::new()).collect(),
            length: 0,
        }
    }

    #[inline]
    fn part(hash: u64) -> usize {
        (hash >> PART_SHIFT) as usize % PART_COUNT
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Heap bytes of the entries.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(HashTable::allocation_size).sum()
    }

    /// Returns the entry that has this hash and that `is_match` accepts.
    #[inline]
    pub fn find(&self, hash: u64, is_match: impl FnMut(&T) -> bool) -> Option<&T> {
        self.parts[Self::part(hash)].find(hash, is_match)
    }

    /// Inserts an entry that is not in the table.
    #[inline]
    pub fn insert(&mut self, hash: u64, entry: T, hash_of: impl Fn(&T) -> u64) {
        let part = &mut self.parts[Self::part(hash)];
        let room = (part.len(), part.capacity());
        part.insert_unique(hash, entry, hash_of);
        step_counter::count_growth(room, part.len());
        self.length += 1;
    }

    /// Removes the entry that has this hash and that `is_match` accepts.
    #[inline]
    pub fn remove(&mut self, hash: u64, is_match: impl FnMut(&T) -> bool) {
        if let Ok(entry) = self.parts[Self::part(hash)].find_entry(hash, is_match) {
            entry.remove();
            self.length -= 1;
        }
    }
}
