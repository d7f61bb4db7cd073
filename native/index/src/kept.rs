//! Blocks of one stream that nobody has looked into, by the engine's hash. All that is known of each lies in one place, and to find it or
//! move it no other memory is looked at.

use hashbrown::HashTable;
use hashbrown::hash_table::{self, OccupiedEntry};

use crate::core::Secret;
use crate::hashed;

/// A block, as it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The engine's hash.
    pub hash: u64,
    /// Its block key.
    pub key: u64,
    /// Number of its context.
    pub context: u32,
    /// A bit for each plane with a copy, one at most.
    pub planes: u32,
}

impl Entry {
    /// The bit of a plane; None of one that entries have no bit for.
    #[inline]
    pub fn bit(plane: u16) -> Option<u32> {
        1_u32.checked_shl(plane.into())
    }
}

/// See the module. Callers give the place of a hash beside it, which their secret has for it.
#[derive(Debug, Default)]
pub struct Kept(HashTable<Entry>);

impl Kept {
    /// Entries.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.0.allocation_size()
    }

    /// Everything, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.0.iter()
    }

    /// The block of a hash.
    #[inline]
    pub fn find(&self, place: u64, hash: u64) -> Option<&Entry> {
        self.0.find(place, |entry| entry.hash == hash)
    }

    /// Asks for the memory of a block.
    #[inline]
    pub fn prefetch(&self, place: u64) {
        hashed::prefetch(&self.0, place);
    }

    /// The same, to be changed or taken out; `shrink` is called behind that.
    #[inline]
    pub fn occupied(&mut self, place: u64, hash: u64) -> Option<OccupiedEntry<'_, Entry>> {
        self.0.find_entry(place, |entry| entry.hash == hash).ok()
    }

    /// The place of a hash, whether there is something or not; `reserve` is called before it.
    #[inline]
    pub fn entry(&mut self, place: u64, hash: u64, secret: Secret) -> hash_table::Entry<'_, Entry> {
        let place_of = |entry: &Entry| secret.place(entry.hash);
        self.0.entry(place, |entry| entry.hash == hash, place_of)
    }

    /// Has room for `count` more.
    #[inline]
    pub fn reserve(&mut self, count: usize, secret: Secret) {
        hashed::reserve(&mut self.0, count, |entry| secret.place(entry.hash));
    }

    /// Gives memory back that is not needed any more.
    #[inline]
    pub fn shrink(&mut self, secret: Secret) {
        hashed::shrink(&mut self.0, |entry| secret.place(entry.hash));
    }
}

impl IntoIterator for Kept {
    type Item = Entry;
    type IntoIter = hash_table::IntoIter<Entry>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}
