//! The sets of holders of blocks: all blocks with the same holders share one stored set.
//!
//! A holder is a stream on a placement (tier, locality, ownership, group). The blocks of a chain are usually held by the same workers. So
//! there are far fewer sets than blocks, and a reader of a chain compares the numbers of sets instead of the sets.

use crate::memory::hasher::Secret;
use crate::memory::sharded_table::ShardedTable;
use crate::step_counter;

/// Holders with one placement: the members of one group of 64 streams, as bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word {
    /// The placement and the group of streams: `placement << 16 | stream / 64`.
    pub at: u32,
    /// One bit per stream.
    pub bits: u64,
}

impl Word {
    /// One holder.
    fn of(placement: u16, stream: u32) -> Self {
        Self {
            at: u32::from(placement) << 16 | stream >> 6,
            bits: 1 << (stream & 63),
        }
    }

    /// The placement.
    #[inline]
    pub fn placement(self) -> usize {
        (self.at >> 16) as usize
    }

    /// The number of the group of 64 streams.
    #[inline]
    pub fn word(self) -> usize {
        (self.at & 0xFFFF) as usize
    }
}

/// The set without holders.
pub const EMPTY: u32 = 0;
/// Maximum number of streams of an index.
pub const MAX_STREAMS: usize = 64 << 16;

#[derive(Debug)]
struct Entry {
    words: Vec<Word>,
    /// Sum of the hashes of the words.
    hash: u64,
    refs: u32,
    /// Whether the set is listed in `Sets::changed`.
    is_changed: bool,
    /// A value that differs between this set and all earlier sets that had the same number.
    created: u64,
}

/// The latest move of a block from one set to another; if the next block makes the same move, no search is needed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Move {
    from: (u32, u64),
    to: (u32, u64),
    holder: (u16, u32),
    is_known: bool,
}

/// Work of a search for a set of few words.
const WORK_PER_SEARCH: usize = 24;
/// Number of words for each unit of the work of a search.
const WORDS_PER_WORK: usize = 128;
/// Number of words that are copied for each unit of work: large sets are probably in no near cache.
const COPIED_WORDS_PER_WORK: usize = 8;

/// The holders of one set in the form that lookups read; sets of up to `INLINE_WORDS` words are stored without a pointer.
#[derive(Clone, Debug, Default)]
pub struct Holders {
    inline: [Word; INLINE_WORDS],
    count: u32,
    boxed: Box<[Word]>,
}

/// Number of words that most sets do not exceed: 256 streams on one placement.
const INLINE_WORDS: usize = 4;

impl Holders {
    fn new(words: &[Word]) -> Self {
        let mut inline = [Word::default(); INLINE_WORDS];
        let is_inline = words.len() <= INLINE_WORDS;
        if is_inline {
            inline[..words.len()].copy_from_slice(words);
        }
        Self {
            inline,
            count: words.len() as u32,
            boxed: if is_inline { Box::default() } else { words.into() },
        }
    }

    /// The holders, sorted by placement and stream.
    #[inline]
    pub fn words(&self) -> &[Word] {
        self.inline.get(..self.count as usize).unwrap_or(&self.boxed)
    }
}

/// Number of words that a set takes in memory, including the copy of a large set that lookups have.
fn resident_words(words: &Vec<Word>) -> usize {
    words.capacity() + if words.len() > INLINE_WORDS { words.len() } else { 0 }
}

/// All sets in use.
#[derive(Debug)]
pub struct Sets {
    entries: Vec<Entry>,
    free: Vec<u32>,
    lookup: ShardedTable<u32>,
    /// Number of words of all sets in memory, as `resident_words` counts them.
    words: usize,
    births: u64,
    secret: Secret,
    /// Numbers of sets whose holders are not published to lookups yet.
    changed: Vec<u32>,
}

/// The contribution of a word to the hash of a set. The hash depends on a secret, since clients that register streams choose the order of the
/// streams' numbers.
fn hash_of(secret: Secret, word: Word) -> u64 {
    secret.place(secret.place(word.at.into()) ^ word.bits)
}

impl Sets {
    /// Creates a collection that contains only the empty set.
    pub fn new(secret: Secret) -> Self {
        let empty = Entry {
            words: Vec::new(),
            hash: 0,
            refs: 1,
            is_changed: false,
            created: 0,
        };
        Self {
            entries: vec![empty],
            free: Vec::new(),
            lookup: ShardedTable::new(),
            words: 0,
            births: 0,
            secret,
            changed: Vec::new(),
        }
    }

    /// The holders in a set, sorted by placement and stream.
    #[inline]
    pub fn words(&self, set: u32) -> &[Word] {
        &self.entries[set as usize].words
    }

    /// Whether `stream` holds the blocks of the set on `placement`.
    #[inline]
    pub fn holds(&self, set: u32, placement: u16, stream: u32) -> bool {
        let Word { at, .. } = Word::of(placement, stream);
        let words = self.words(set);
        let place = if words.len() <= INLINE_WORDS {
            words.iter().position(|word| word.at == at)
        } else {
            words.binary_search_by_key(&at, |word| word.at).ok()
        };
        place.is_some_and(|place| words[place].bits >> (stream & 63) & 1 == 1)
    }

    /// Placements on which `stream` holds the blocks of the set.
    pub fn placements(&self, set: u32, stream: u32) -> impl Iterator<Item = u16> + '_ {
        let is_holder = move |word: &&Word| word.at & 0xFFFF == stream >> 6 && word.bits >> (stream & 63) & 1 == 1;
        self.words(set).iter().filter(is_holder).map(|word| word.placement() as u16)
    }

    /// All streams that hold the blocks of the set on some placement, without duplicates.
    pub fn streams(&self, set: u32) -> Vec<u32> {
        let mut found = Vec::new();
        for word in self.words(set) {
            let mut bits = word.bits;
            while bits != 0 {
                found.push((word.word() << 6) as u32 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Whether `stream` holds the blocks of the set on some placement.
    #[inline]
    pub fn knows(&self, set: u32, stream: u32) -> bool {
        self.placements(set, stream).next().is_some()
    }

    /// Moves one block from `set` to the set that differs from it by the addition or removal of one holder. `last` is the latest move, from
    /// which a repetition is recognised; the call replaces it.
    #[inline]
    pub fn move_block(&mut self, set: u32, placement: u16, stream: u32, last: &mut Move) -> u32 {
        if self.matches_move(set, placement, stream, last) {
            self.change(set, last.to.0);
            return last.to.0;
        }
        self.search_move(set, placement, stream, last)
    }

    /// Whether a requested move equals the stored move.
    #[inline]
    fn matches_move(&self, set: u32, placement: u16, stream: u32, last: &Move) -> bool {
        last.is_known
            && last.from.0 == set
            && last.holder == (placement, stream)
            && self.is_current(last.from)
            && self.is_current(last.to)
    }

    /// Searches for the set that a move leads to, stores the move, and returns the set.
    #[cold]
    fn search_move(&mut self, set: u32, placement: u16, stream: u32, last: &mut Move) -> u32 {
        let created = |sets: &Self, number: u32| (number, sets.entries[number as usize].created);
        let Entry { words, refs, .. } = &self.entries[set as usize];
        let (from, words, is_shared, changes) = (created(self, set), words.len(), *refs > 1, self.changed.len());
        let target = self.toggle(set, Word::of(placement, stream));
        // A set is copied if other blocks have it, and whenever it is published.
        let copies = usize::from(is_shared) + usize::from(self.changed.len() > changes);
        let work = WORK_PER_SEARCH + words / WORDS_PER_WORK + copies * words / COPIED_WORDS_PER_WORK;
        step_counter::count(work);
        *last = Move {
            from,
            to: created(self, target),
            holder: (placement, stream),
            is_known: true,
        };
        target
    }

    /// Whether the set that had this number when the move was stored still exists.
    #[inline]
    fn is_current(&self, (number, created): (u32, u64)) -> bool {
        self.entries
            .get(number as usize)
            .is_some_and(|entry| entry.created == created)
    }

    /// Decrements the number of blocks of the set `from`, and increments that of the set `to`.
    #[inline]
    fn change(&mut self, from: u32, to: u32) {
        if to != EMPTY {
            self.entries[to as usize].refs += 1;
        }
        if from != EMPTY {
            self.release(from);
        }
    }

    /// Repeats a move for `count` more blocks.
    #[inline]
    pub fn move_all(&mut self, from: u32, to: u32, count: u32) {
        if count == 0 {
            return;
        }
        if to != EMPTY {
            self.entries[to as usize].refs += count;
        }
        self.uncount(from, count);
    }

    /// Returns the set of one holder, and counts `count` more blocks that have it; `last` is used as in `move_block`.
    pub fn single(&mut self, placement: u16, stream: u32, count: u32, last: &mut Move) -> u32 {
        let set = self.move_block(EMPTY, placement, stream, last);
        self.entries[set as usize].refs += count - 1;
        set
    }

    /// Subtracts `count` from the number of blocks of a set: blocks that were counted in advance and not added.
    pub fn uncount(&mut self, set: u32, count: u32) {
        if count > 0 {
            self.entries[set as usize].refs -= count - 1;
            self.release(set);
        }
    }

    /// Moves one block from `set` to the set without `stream`.
    pub fn remove_stream(&mut self, set: u32, stream: u32) -> u32 {
        let mut words = self.words(set).to_vec();
        for word in words.iter_mut().filter(|word| word.at & 0xFFFF == stream >> 6) {
            word.bits &= !(1 << (stream & 63));
        }
        words.retain(|word| word.bits != 0);
        let hash = words
            .iter()
            .map(|&word| hash_of(self.secret, word))
            .fold(0, u64::wrapping_add);
        let target = self.intern(words, hash);
        self.change(set, target);
        target
    }

    /// Moves one block from `set` to the set that results if this holder is removed, or added if `set` does not contain it.
    fn toggle(&mut self, set: u32, holder: Word) -> u32 {
        let secret = self.secret;
        let place = self.words(set).binary_search_by_key(&holder.at, |word| word.at);
        let entry = &mut self.entries[set as usize];
        let (is_last, mut hash) = (set != EMPTY && entry.refs == 1, entry.hash);
        // A set that only this block has is changed in place, under another number.
        let mut words = if is_last {
            self.words -= resident_words(&entry.words);
            self.lookup.remove(hash, |&number| number == set);
            std::mem::take(&mut entry.words)
        } else {
            let mut words = Vec::with_capacity(entry.words.len() + usize::from(place.is_err()));
            words.extend_from_slice(&entry.words);
            words
        };
        match place {
            Ok(at) => {
                hash = hash.wrapping_sub(hash_of(secret, words[at]));
                words[at].bits ^= holder.bits;
                if words[at].bits == 0 {
                    words.remove(at);
                } else {
                    hash = hash.wrapping_add(hash_of(secret, words[at]));
                }
            }
            Err(at) => {
                hash = hash.wrapping_add(hash_of(secret, holder));
                words.reserve_exact(1);
                words.insert(at, holder);
            }
        }
        let target = self.intern(words, hash);
        if target != EMPTY {
            self.entries[target as usize].refs += 1;
        }
        if is_last {
            self.forget(set);
        } else if set != EMPTY {
            self.entries[set as usize].refs -= 1;
        }
        target
    }

    fn intern(&mut self, words: Vec<Word>, hash: u64) -> u32 {
        if words.is_empty() {
            return EMPTY;
        }
        let entries = &self.entries;
        if let Some(&found) = self.lookup.find(hash, |&number| entries[number as usize].words == words) {
            return found;
        }
        self.births += 1;
        self.words += resident_words(&words);
        let entry = Entry {
            words,
            hash,
            refs: 0,
            is_changed: false,
            created: self.births,
        };
        let number = if let Some(number) = self.free.pop() {
            let is_changed = self.entries[number as usize].is_changed;
            self.entries[number as usize] = Entry { is_changed, ..entry };
            number
        } else {
            self.entries.push(entry);
            (self.entries.len() - 1) as u32
        };
        self.lookup.insert(hash, number, |&other| self.entries[other as usize].hash);
        self.note_change(number);
        number
    }

    fn note_change(&mut self, number: u32) {
        if !std::mem::replace(&mut self.entries[number as usize].is_changed, true) {
            self.changed.push(number);
        }
    }

    #[inline]
    fn release(&mut self, set: u32) {
        let entry = &mut self.entries[set as usize];
        entry.refs -= 1;
        if entry.refs == 0 {
            self.words -= resident_words(&entry.words);
            self.lookup.remove(entry.hash, |&number| number == set);
            self.forget(set);
        }
    }

    /// Releases the number of a set that is not in the table any more.
    #[cold]
    fn forget(&mut self, set: u32) {
        self.births += 1;
        let entry = &mut self.entries[set as usize];
        (entry.words, entry.refs, entry.created) = (Vec::new(), 0, self.births);
        self.free.push(set);
        self.note_change(set);
        if self.lookup.is_empty() {
            let (births, mut changed) = (self.births, std::mem::take(&mut self.changed));
            changed.push(EMPTY);
            *self = Self {
                births,
                changed,
                ..Self::new(self.secret)
            };
        }
    }

    /// Number of changed sets that lookups do not see yet.
    pub fn changes(&self) -> usize {
        self.changed.len()
    }

    /// Makes all sets visible to lookups. No lookup may run during this call.
    pub fn move_to(&mut self, view: &mut Vec<Holders>) {
        for number in self.changed.drain(..) {
            if let Some(entry) = self.entries.get_mut(number as usize) {
                step_counter::count(entry.words.len() / COPIED_WORDS_PER_WORK);
                entry.is_changed = false;
                view.resize_with(view.len().max(number as usize + 1), Holders::default);
                view[number as usize] = Holders::new(&entry.words);
            }
        }
        if view.len() > self.entries.len() {
            view.truncate(self.entries.len());
            view.shrink_to_fit();
        }
    }

    /// Number of sets in use, without the empty set.
    pub fn len(&self) -> usize {
        self.lookup.len()
    }

    /// Whether no stream holds a block.
    pub fn is_empty(&self) -> bool {
        self.lookup.is_empty()
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.words * size_of::<Word>()
            + self.entries.capacity() * size_of::<Entry>()
            + self.entries.len() * size_of::<Holders>()
            + self.free.capacity() * 4
            + self.lookup.bytes()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Lookups have their own copy of the words of a large set.
    #[test]
    fn bytes_are_those_of_both_copies() {
        let (mut sets, mut view) = (Sets::new(Secret::new()), Vec::new());
        let before = sets.bytes();
        let set = (0..100).fold(EMPTY, |set, placement| {
            sets.move_block(set, placement, 0, &mut Move::default())
        });
        sets.move_to(&mut view);
        let resident = sets.words(set).len() + view[set as usize].boxed.len();
        assert_eq!(resident, 200);
        assert!(sets.bytes() - before >= resident * size_of::<Word>());
        (0..100).fold(set, |set, placement| sets.move_block(set, placement, 0, &mut Move::default()));
        assert_eq!(sets.words, 0);
    }

    /// A client can choose which streams hold a block. Without the secret, it could put many sets into one bucket of the table, and a
    /// search would compare all of them.
    #[test]
    fn where_a_set_is_found_depends_on_the_secret() {
        const PLACES: u64 = 1 << 16;
        let sets: Vec<[Word; 2]> = (0..2_000_u64)
            .map(|bits| [Word { at: 0, bits: bits + 1 }, Word { at: 1, bits: bits ^ 1 }])
            .collect();
        let hash = |secret, [one, other]: &[Word; 2]| hash_of(secret, *one).wrapping_add(hash_of(secret, *other));
        let places = |secret| sets.iter().map(|words| hash(secret, words) % PLACES).collect::<Vec<_>>();
        let (one, other) = (places(Secret::new()), places(Secret::new()));
        let distinct: HashSet<_> = one.iter().collect();
        assert!(distinct.len() > 1_800, "{} places for 2,000 sets", distinct.len());
        let same = one.iter().zip(&other).filter(|(one, other)| one == other).count();
        assert!(
            same < 20,
            "{same} of 2,000 sets are found where they would be with another secret"
        );
    }
}
