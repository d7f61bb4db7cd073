//! What the index knows about single blocks, by the number of their slot.
//!
//! Blocks of a chain lie side by side: a *run* is a row of slots of one chunk each of which is *linked* to the one before it. Whoever walks
//! along a prompt compares the hashes of its blocks with those of a run, one after the other, as they lie in memory; only the first
//! block of a run, its *head*, is found by its rolling key, in the table of heads (`crate::core`).
//!
//! Of a linked block the local hash is stored, of a head the rolling key. The key of a linked block is rolled from the head, or from the last
//! of the keys that are stored for every eighth slot.
//!
//! Invariant: if slot n + 1 is linked, it is the only record with its key in its context, slot n holds its parent and is the only record with
//! the parent's key in that context.

use crate::keys;
use crate::pages::Piece;
use crate::prefetch;
use crate::sets::EMPTY;

/// It is found through the slot before it, and not by its key.
const LINKED: u32 = 1 << 31;
/// There are other records with its key and context.
const TWIN: u32 = 1 << 30;
/// Contexts that flags can name.
pub const MAX_CONTEXTS: u32 = TWIN;

/// What the set of a free slot is.
const FREE: u32 = u32::MAX;
const BITS: u32 = 10;
/// Slots of a chunk.
pub const CHUNK: usize = 1 << BITS;
const MASK: u32 = (CHUNK - 1) as u32;
/// Slots of which the first one's key is stored.
const GROUP: usize = 8;

/// The slots of a chunk, by what is stored of them.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Slots {
    /// The local hash of a linked block, the rolling key of a head.
    words: [u64; CHUNK],
    /// The engine's hash; streams with another hash for the same block keep theirs themselves.
    hashes: [u64; CHUNK],
    /// Who holds it: a number in `Sets`.
    sets: [u32; CHUNK],
    /// The number of its context, and flags.
    flags: [u32; CHUNK],
}

const VACANT: Slots = Slots {
    words: [0; CHUNK],
    hashes: [0; CHUNK],
    sets: [FREE; CHUNK],
    flags: [0; CHUNK],
};

/// Memory of a chunk in which some slot is in use.
struct Memory {
    slots: Piece<Slots, 1>,
    /// Rolling keys of linked blocks in slots that are multiples of `GROUP`.
    keys: Box<[u64; CHUNK / GROUP]>,
}

struct Chunk {
    memory: Option<Memory>,
    /// A bit for each free slot.
    free: [u64; CHUNK / 64],
    used: u32,
    /// Words of `free` before this one are zero.
    hint: u32,
    /// Whether it was found to have no long stretches, since slots of it were given back.
    is_scattered: bool,
    /// Whether it is in `Records::partial`.
    listed: bool,
}

impl Chunk {
    const EMPTY: Self = Self {
        memory: None,
        free: [u64::MAX; CHUNK / 64],
        used: 0,
        hint: 0,
        is_scattered: false,
        listed: false,
    };

    fn is_free(&self, at: usize) -> bool {
        self.free[at / 64] >> (at % 64) & 1 == 1
    }

    /// How many slots from one on are free, `most` at most.
    fn stretch(&self, at: usize, most: usize) -> usize {
        let (end, mut length) = (CHUNK.min(at + most), 0);
        while at + length < end {
            let (word, bit) = ((at + length) / 64, (at + length) % 64);
            let ones = (!(self.free[word] >> bit)).trailing_zeros() as usize;
            length += ones.min(64 - bit);
            if ones < 64 - bit {
                break;
            }
        }
        length.min(end - at)
    }

    /// The first stretch of so many free slots, or else the first free slots at all.
    fn find(&mut self, wanted: usize) -> usize {
        while self.free[self.hint as usize] == 0 {
            self.hint += 1;
        }
        let first = self.hint as usize * 64 + self.free[self.hint as usize].trailing_zeros() as usize;
        let mut at = if self.is_scattered { CHUNK } else { first };
        while at < CHUNK {
            let length = self.stretch(at, wanted);
            if length >= wanted {
                return at;
            }
            at += length + 1;
            // The next free slot.
            while at < CHUNK {
                let rest = self.free[at / 64] >> (at % 64);
                if rest != 0 {
                    at += rest.trailing_zeros() as usize;
                    break;
                }
                at = (at / 64 + 1) * 64;
            }
        }
        self.is_scattered = true;
        first
    }

    /// The first group that is free as a whole, or else the first free slot.
    fn find_group(&mut self) -> usize {
        while self.free[self.hint as usize] == 0 {
            self.hint += 1;
        }
        for word in self.hint as usize..self.free.len() {
            let mut whole = self.free[word];
            // A byte is all ones if, and only if, the lowest bit of its conjunction with its shifts is.
            whole &= whole >> 4;
            whole &= whole >> 2;
            whole &= whole >> 1;
            whole &= 0x0101_0101_0101_0101;
            if whole != 0 {
                return word * 64 + whole.trailing_zeros() as usize;
            }
        }
        self.find(1)
    }

    fn take(&mut self, at: usize, length: usize) {
        for slot in at..at + length {
            self.free[slot / 64] &= !(1 << (slot % 64));
        }
        self.used += length as u32;
    }
}

/// A row of slots that were taken and are not written yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stretch {
    /// The number of the first.
    pub first: u32,
    /// How many.
    pub length: u32,
}

/// All blocks.
#[derive(Default)]
pub struct Records {
    chunks: Vec<Chunk>,
    partial: Vec<u32>,
    current: usize,
    used: usize,
    /// Chunks with memory.
    held: usize,
}

impl std::fmt::Debug for Records {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Records({} in {} bytes)", self.used, self.bytes())
    }
}

/// Linked blocks of a run from some slot on, by what is compared with a prompt.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Run<'a> {
    pub words: &'a [u64],
    pub sets: &'a [u32],
    flags: &'a [u32],
}

impl Run<'_> {
    /// How many of the first ones are linked blocks of a context with these local hashes.
    #[inline]
    pub fn common(&self, locals: &[u64], context: u32) -> usize {
        let flag = context | LINKED;
        let length = locals.len().min(self.words.len()).min(self.flags.len());
        let (words, flags, locals) = (&self.words[..length], &self.flags[..length], &locals[..length]);
        let mut at = 0;
        // Eight at a time, which compilers compare by vectors.
        while at + 8 <= length {
            let mut differs = 0;
            for next in at..at + 8 {
                differs |= (words[next] ^ locals[next]) | u64::from(flags[next] ^ flag);
            }
            if differs != 0 {
                break;
            }
            at += 8;
        }
        while at < length && words[at] == locals[at] && flags[at] == flag {
            at += 1;
        }
        at
    }
}

/// How many of the first numbers equal the first one.
#[inline]
pub fn equal(sets: &[u32]) -> usize {
    let Some(&first) = sets.first() else { return 0 };
    let mut at = 1;
    while at + 8 <= sets.len() {
        if sets[at..at + 8].iter().fold(0, |differs, set| differs | (set ^ first)) != 0 {
            break;
        }
        at += 8;
    }
    while at < sets.len() && sets[at] == first {
        at += 1;
    }
    at
}

impl Records {
    /// Records in use.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.held * (size_of::<Slots>() + CHUNK / GROUP * 8)
            + self.chunks.capacity() * size_of::<Chunk>()
            + self.partial.capacity() * 4
    }

    /// Bytes that so many records more may take.
    pub fn growth(&self, records: usize) -> usize {
        let free = self.held * CHUNK - self.used;
        let chunks = records.saturating_sub(free).div_ceil(CHUNK);
        chunks * (size_of::<Slots>() + CHUNK / GROUP * 8 + 2 * size_of::<Chunk>())
    }

    /// One more than the highest number that was ever given.
    pub fn bound(&self) -> u32 {
        (self.chunks.len() << BITS) as u32
    }

    #[inline]
    fn memory(&self, number: u32) -> Option<&Memory> {
        self.chunks.get((number >> BITS) as usize)?.memory.as_ref()
    }

    #[inline]
    fn slots(&self, number: u32) -> &Slots {
        match self.memory(number) {
            Some(memory) => &memory.slots[0],
            None => &VACANT,
        }
    }

    #[inline]
    fn slots_mut(&mut self, number: u32) -> &mut Slots {
        let memory = self.chunks[(number >> BITS) as usize].memory.as_mut();
        &mut memory.expect("a slot in use has memory").slots[0]
    }

    /// Whether a number is of a record in use.
    #[inline]
    pub fn is_used(&self, number: u32) -> bool {
        self.memory(number)
            .is_some_and(|memory| memory.slots[0].sets[(number & MASK) as usize] != FREE)
    }

    /// The engine's hash.
    #[inline]
    pub fn hash(&self, number: u32) -> u64 {
        self.slots(number).hashes[(number & MASK) as usize]
    }

    /// The rolling key of a head, the local hash of a linked block.
    #[inline]
    pub fn word(&self, number: u32) -> u64 {
        self.slots(number).words[(number & MASK) as usize]
    }

    /// Who holds it.
    #[inline]
    pub fn set(&self, number: u32) -> u32 {
        self.slots(number).sets[(number & MASK) as usize]
    }

    /// Changes who holds it.
    #[inline]
    pub fn put_set(&mut self, number: u32, set: u32) {
        self.slots_mut(number).sets[(number & MASK) as usize] = set;
    }

    #[inline]
    fn flags(&self, number: u32) -> u32 {
        self.slots(number).flags[(number & MASK) as usize]
    }

    /// The number of its context.
    #[inline]
    pub fn context(&self, number: u32) -> u32 {
        self.flags(number) & !(TWIN | LINKED)
    }

    /// Whether there are other records with its key and context.
    #[inline]
    pub fn has_twins(&self, number: u32) -> bool {
        self.flags(number) & TWIN != 0
    }

    /// Notes that there are others.
    pub fn twin(&mut self, number: u32) {
        self.slots_mut(number).flags[(number & MASK) as usize] |= TWIN;
    }

    /// Whether it is found through the slot before it, and not by its key.
    #[inline]
    pub fn is_linked(&self, number: u32) -> bool {
        self.flags(number) & LINKED != 0
    }

    /// The slot behind one, in the same chunk.
    #[inline]
    pub fn next(number: u32) -> Option<u32> {
        (number & MASK != MASK).then(|| number + 1)
    }

    /// The linked block behind a slot.
    #[inline]
    pub fn linked_next(&self, number: u32) -> Option<u32> {
        Self::next(number).filter(|&next| self.is_linked(next))
    }

    /// Slots of a chunk behind one.
    #[inline]
    pub fn behind(&self, number: u32) -> Run<'_> {
        let (slots, at) = (self.slots(number), (number & MASK) as usize + 1);
        Run {
            words: &slots.words[at..],
            sets: &slots.sets[at..],
            flags: &slots.flags[at..],
        }
    }

    /// The rolling key.
    #[inline]
    pub fn key(&self, number: u32) -> u64 {
        let Some(memory) = self.memory(number) else { return 0 };
        let (slots, end) = (&memory.slots[0], (number & MASK) as usize);
        let mut at = end;
        while slots.flags[at] & LINKED != 0 && at % GROUP != 0 {
            at -= 1;
        }
        let mut key = if slots.flags[at] & LINKED != 0 {
            memory.keys[at / GROUP]
        } else {
            slots.words[at]
        };
        for &word in &slots.words[at + 1..=end] {
            key = keys::chained(key, word);
        }
        key
    }

    /// Visits the keys of a block and of those before it in its group of eight slots, as far as they are of one run.
    #[inline]
    pub fn keys_up_to(&self, number: u32, mut visit: impl FnMut(usize, u64)) {
        let Some(memory) = self.memory(number) else { return };
        let (slots, end) = (&memory.slots[0], (number & MASK) as usize);
        let mut at = end;
        while slots.flags[at] & LINKED != 0 && at % GROUP != 0 {
            at -= 1;
        }
        let mut key = if slots.flags[at] & LINKED != 0 {
            memory.keys[at / GROUP]
        } else {
            slots.words[at]
        };
        visit(at % GROUP, key);
        for at in at + 1..=end {
            key = keys::chained(key, slots.words[at]);
            visit(at % GROUP, key);
        }
    }

    /// Makes a linked block a head.
    pub fn unlink(&mut self, number: u32) -> u64 {
        let key = self.key(number);
        let at = (number & MASK) as usize;
        let slots = self.slots_mut(number);
        slots.words[at] = key;
        slots.flags[at] &= !LINKED;
        key
    }

    /// Numbers in use, in their order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.bound()).filter(|&number| self.is_used(number))
    }

    /// Asks for what a removal looks at first.
    #[inline]
    pub fn prefetch(&self, number: u32) {
        let (slots, at) = (self.slots(number), (number & MASK) as usize);
        prefetch::line(&slots.hashes[at]);
        prefetch::line(&slots.sets[at]);
    }

    /// The same, and for what its key is made of.
    #[inline]
    pub fn prefetch_all(&self, number: u32) {
        let (slots, at) = (self.slots(number), (number & MASK) as usize);
        prefetch::line(&slots.words[at]);
        prefetch::line(&slots.flags[at]);
        self.prefetch(number);
    }

    // --- taking and giving back

    /// Takes a row of at most `count` slots, right behind `after` where that is possible; None when there are as many as numbers.
    pub fn take(&mut self, after: Option<u32>, count: usize) -> Option<Stretch> {
        let behind = after.and_then(Self::next).filter(|&next| {
            let chunk = &self.chunks[(next >> BITS) as usize];
            chunk.memory.is_some() && chunk.is_free((next & MASK) as usize)
        });
        let (chunk, at) = match behind {
            Some(next) => ((next >> BITS) as usize, (next & MASK) as usize),
            None => {
                let chunk = self.room()?;
                let found = &mut self.chunks[chunk];
                let at = match (count, after) {
                    // It may grow by a block at a time, in turn with others.
                    (1, Some(_)) => found.find_group(),
                    (count, _) => found.find(count.min(GROUP)),
                };
                (chunk, at)
            }
        };
        let found = &mut self.chunks[chunk];
        let length = found.stretch(at, count);
        found.take(at, length);
        self.used += length;
        if found.memory.is_none() {
            self.held += 1;
            found.memory = Some(Memory {
                slots: Piece::filled(VACANT),
                keys: Box::new([0; CHUNK / GROUP]),
            });
        }
        Some(Stretch {
            first: (chunk << BITS | at) as u32,
            length: length as u32,
        })
    }

    /// Writes a head into a slot that was taken.
    #[inline]
    pub fn put_head(&mut self, number: u32, key: u64, hash: u64, context: u32, set: u32) {
        let (slots, at) = (self.slots_mut(number), (number & MASK) as usize);
        slots.words[at] = key;
        slots.hashes[at] = hash;
        slots.sets[at] = set;
        slots.flags[at] = context;
    }

    /// Writes a linked block into a slot that was taken.
    #[inline]
    pub fn put_linked(&mut self, number: u32, local: u64, key: u64, hash: u64, context: u32, set: u32) {
        let at = (number & MASK) as usize;
        let memory = self.chunks[(number >> BITS) as usize].memory.as_mut();
        let memory = memory.expect("a slot that was taken has memory");
        let slots = &mut memory.slots[0];
        slots.words[at] = local;
        slots.hashes[at] = hash;
        slots.sets[at] = set;
        slots.flags[at] = context | LINKED;
        if at.is_multiple_of(GROUP) {
            memory.keys[at / GROUP] = key;
        }
    }

    /// A chunk with a free slot.
    #[inline]
    fn room(&mut self) -> Option<usize> {
        let has_room = |chunk: &Chunk| (chunk.used as usize) < CHUNK;
        if self.chunks.get(self.current).is_some_and(has_room) {
            return Some(self.current);
        }
        self.turn()
    }

    /// Makes another chunk the current one, which has room.
    #[cold]
    fn turn(&mut self) -> Option<usize> {
        while let Some(at) = self.partial.pop() {
            let chunk = &mut self.chunks[at as usize];
            chunk.listed = false;
            if (chunk.used as usize) < CHUNK {
                self.current = at as usize;
                return Some(self.current);
            }
        }
        if self.chunks.len() >= (u32::MAX >> BITS) as usize {
            return None;
        }
        self.chunks.push(Chunk::EMPTY);
        self.current = self.chunks.len() - 1;
        Some(self.current)
    }

    /// Gives a slot back. What is linked to it must have been unlinked.
    pub fn remove(&mut self, number: u32) {
        let (at, inner) = ((number >> BITS) as usize, (number & MASK) as usize);
        let chunk = &mut self.chunks[at];
        if let Some(memory) = &mut chunk.memory {
            let slots = &mut memory.slots[0];
            (slots.sets[inner], slots.flags[inner]) = (FREE, 0);
        }
        self.give(number, 1);
    }

    /// Gives back slots that were taken, and not written.
    pub fn give(&mut self, first: u32, length: u32) {
        if length == 0 {
            return;
        }
        let (at, inner) = ((first >> BITS) as usize, (first & MASK) as usize);
        let chunk = &mut self.chunks[at];
        for slot in inner..inner + length as usize {
            chunk.free[slot / 64] |= 1 << (slot % 64);
        }
        (chunk.hint, chunk.is_scattered) = (chunk.hint.min((inner / 64) as u32), false);
        chunk.used -= length;
        self.used -= length as usize;
        if chunk.used == 0 {
            self.held -= 1;
            (chunk.memory, chunk.hint) = (None, 0);
        }
        if at != self.current && !chunk.listed {
            chunk.listed = true;
            self.partial.push(at as u32);
        }
        if self.used == 0 {
            *self = Self::default();
        }
    }
}

const _: () = assert!(EMPTY != FREE);

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain of blocks in a row.
    fn chain(records: &mut Records, after: Option<u32>, first: u64, count: usize) -> Vec<(u32, u64)> {
        let mut made: Vec<(u32, u64)> = Vec::new();
        while made.len() < count {
            let before = made.last().copied();
            let stretch = records
                .take(before.map_or(after, |(number, _)| Some(number)), count - made.len())
                .unwrap();
            for number in stretch.first..stretch.first + stretch.length {
                let local = first + made.len() as u64;
                match made.last().copied() {
                    Some((last, key)) if Records::next(last) == Some(number) => {
                        let key = keys::chained(key, local);
                        records.put_linked(number, local, key, local, 3, 1);
                        made.push((number, key));
                    }
                    before => {
                        let key = before.map_or(local, |(_, key)| keys::chained(key, local));
                        records.put_head(number, key, local, 3, 1);
                        made.push((number, key));
                    }
                }
            }
        }
        made
    }

    #[test]
    fn the_key_of_any_block_is_rolled_from_what_is_stored() {
        let mut records = Records::default();
        let made = chain(&mut records, None, 1, 3_000);
        let heads = made.iter().filter(|(number, _)| !records.is_linked(*number)).count();
        assert_eq!(heads, 3, "one a chunk");
        assert!(made.iter().all(|&(number, key)| records.key(number) == key));
        assert_eq!(records.unlink(made[1_500].0), made[1_500].1);
        records.remove(made[1_499].0);
        assert!(made[1_500..].iter().all(|&(number, key)| records.key(number) == key));
        assert!(!records.is_linked(made[1_500].0) && records.is_linked(made[1_501].0));
    }

    #[test]
    fn a_prompt_is_compared_up_to_the_first_difference() {
        let mut records = Records::default();
        let made = chain(&mut records, None, 100, 100);
        for length in 0..99 {
            let mut locals: Vec<u64> = (101..200).collect();
            locals[length] = 7;
            assert_eq!(records.behind(made[0].0).common(&locals, 3), length);
            assert_eq!(records.behind(made[0].0).common(&locals, 4), 0);
        }
        records.put_set(made[40].0, 2);
        let sets = records.behind(made[0].0).sets;
        assert_eq!(
            (equal(&sets[..99]), equal(&sets[39..99]), equal(&sets[40..99]), equal(&[])),
            (39, 1, 59, 0)
        );
    }

    #[test]
    fn slots_of_a_chain_that_went_are_a_row_again() {
        let mut records = Records::default();
        let made = chain(&mut records, None, 1, 600);
        for &(number, _) in made[200..300].iter().rev() {
            records.remove(number);
        }
        records.unlink(made[300].0);
        let stretch = records.take(None, 100).unwrap();
        assert_eq!((stretch.first, stretch.length), (made[200].0, 100));
        records.give(stretch.first, stretch.length);
        // Too few for this one.
        assert_eq!(records.take(None, 500).unwrap().first, made[200].0);
        assert_eq!(records.len(), 600);
    }

    #[test]
    fn chains_that_grow_in_turn_are_rows() {
        let mut records = Records::default();
        let mut ends: Vec<u32> = (0..20).map(|at| chain(&mut records, None, at * 100, 1)[0].0).collect();
        let mut heads = 0;
        for block in 0..16 {
            for end in &mut ends {
                let stretch = records.take(Some(*end), 1).unwrap();
                match Records::next(*end) {
                    Some(next) if next == stretch.first => records.put_linked(next, block, 0, 0, 3, 1),
                    _ => {
                        heads += 1;
                        records.put_head(stretch.first, block, 0, 3, 1);
                    }
                }
                *end = stretch.first;
            }
        }
        assert!(heads <= 20 * 3, "{heads}");
    }

    #[test]
    fn everything_is_given_back() {
        let mut records = Records::default();
        let mut made = chain(&mut records, None, 1, 5_000);
        made.sort_by_key(|&(number, _)| number.wrapping_mul(0x9E37_79B9));
        for (number, _) in made {
            if let Some(next) = records.linked_next(number) {
                records.unlink(next);
            }
            records.remove(number);
        }
        assert!(records.is_empty());
        assert_eq!(records.bytes(), 0);
    }
}
