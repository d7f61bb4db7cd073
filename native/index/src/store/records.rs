//! Records of single blocks, each in a slot that has an ID.
//!
//! Blocks of a chain are adjacent: a *run* is a row of slots in one chunk, in which each slot after the first is *linked* to the slot
//! before it. To look up a prompt, the hashes of its blocks are compared with the hashes of a run, in the order of memory. Only the first
//! block of a run, its *head*, is found by its rolling key, in the table of heads (`crate::store::shared_state`).
//!
//! A slot stores the local hash of a linked block, or the rolling key of a head. The keys of the head and of every eighth slot are stored.
//! The key of a linked block is computed from the nearest earlier stored key.
//!
//! Invariant: if slot n + 1 is linked, it is the only record with its key and context. Then slot n holds its parent, and is the only record
//! with the parent's key in this context.
//!
//! Lookups read slots while a writer changes them. So each value in a slot is an atomic number. Each chunk has a version, which is odd from
//! the writer's first change until `Records::publish`. If a reader finds the same even version before and after it has read a chunk, all
//! that it has read belongs to one moment. The writer never waits for readers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::holders::contexts::MAX_CONTEXTS;
use crate::holders::holder_sets::EMPTY;
use crate::keys;
use crate::memory::page_pool::Piece;
use crate::memory::prefetch;
use crate::sync::atomics::{AtomicU32, AtomicU64, fence};

/// Flag: the block is found through the slot before it, not by its key.
const LINKED: u32 = 1 << 31;
/// Flag: other records with the block's key and context exist.
const HAS_TWINS: u32 = 1 << 30;
const _: () = assert!(MAX_CONTEXTS <= HAS_TWINS, "a flag would be part of the number of a context");

/// The value that a free slot has instead of the ID of a set.
const FREE: u32 = u32::MAX;
/// Number of bits that a slot's position in its chunk takes. For the model checker, this number is as small as possible, since the checker
/// keeps a history of each atomic number.
const CHUNK_BITS: u32 = if cfg!(all(loom, test)) { 6 } else { 10 };
/// Number of slots of a chunk.
pub const CHUNK_SLOTS: usize = 1 << CHUNK_BITS;
const SLOT_MASK: u32 = (CHUNK_SLOTS - 1) as u32;
/// Number of slots of a group. The key of a group's first slot is stored.
const GROUP_SLOTS: usize = 8;

/// The slots of a chunk, as one array for each property.
#[repr(C, align(64))]
struct Slots {
    /// The local hash of a linked block, or the rolling key of a head.
    words: [AtomicU64; CHUNK_SLOTS],
    /// The engine's hash. A stream that has a different hash for the block stores that hash itself.
    hashes: [AtomicU64; CHUNK_SLOTS],
    /// The lower half is the ID of the block's set of holders in `Sets`; the upper half is the ID of the block's context, and flags.
    states: [AtomicU64; CHUNK_SLOTS],
}

/// Combines a set and flags into the state of a slot.
#[inline]
const fn state(set: u32, flags: u32) -> u64 {
    (flags as u64) << 32 | set as u64
}

/// The set in a state.
#[inline]
const fn set_in(state: u64) -> u32 {
    state as u32
}

/// The flags in a state.
#[inline]
const fn flags_in(state: u64) -> u32 {
    (state >> 32) as u32
}

impl Slots {
    fn vacant() -> Self {
        Self {
            words: std::array::from_fn(|_| AtomicU64::new(0)),
            hashes: std::array::from_fn(|_| AtomicU64::new(0)),
            states: std::array::from_fn(|_| AtomicU64::new(state(FREE, 0))),
        }
    }
}

/// Memory of a chunk that has a used slot, as lookups read it.
pub struct Memory {
    /// The version, which is odd while a writer changes the chunk.
    version: AtomicU32,
    slots: Piece<Slots, 1>,
    /// For each slot whose number in the chunk is a multiple of `GROUP_SLOTS`: the rolling key of the slot's block, if the block is linked.
    keys: Box<[AtomicU64; CHUNK_SLOTS / GROUP_SLOTS]>,
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Memory(version {})", self.version.load(Ordering::Relaxed))
    }
}

impl Memory {
    /// Creates the memory of a chunk, which counts as being changed.
    fn new() -> Self {
        Self {
            version: AtomicU32::new(1),
            slots: Piece::from_fn(Slots::vacant),
            keys: Box::new(std::array::from_fn(|_| AtomicU64::new(0))),
        }
    }

    /// Version of the chunk, for a reader before its first read; None while the chunk is being changed.
    #[inline]
    pub fn version(&self) -> Option<u32> {
        Some(self.version.load(Ordering::Acquire)).filter(|version| version & 1 == 0)
    }

    /// Whether the chunk still has this version. If it has, all reads after the call of `version` belong to one moment.
    #[inline]
    pub fn is_still(&self, version: u32) -> bool {
        fence(Ordering::Acquire);
        self.version.load(Ordering::Relaxed) == version
    }

    fn begin_change(&self) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version | 1, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    fn end_change(&self) {
        let version = self.version.load(Ordering::Relaxed);
        self.version.store(version.wrapping_add(1) & !1, Ordering::Release);
    }

    #[inline]
    fn flags(&self, number: u32) -> u32 {
        flags_in(self.slots[0].states[(number & SLOT_MASK) as usize].load(Ordering::Relaxed))
    }

    /// The rolling key of a head, or the local hash of a linked block.
    #[inline]
    pub fn word(&self, number: u32) -> u64 {
        self.slots[0].words[(number & SLOT_MASK) as usize].load(Ordering::Relaxed)
    }

    /// The set of the block's holders.
    #[inline]
    pub fn set(&self, number: u32) -> u32 {
        set_in(self.slots[0].states[(number & SLOT_MASK) as usize].load(Ordering::Relaxed))
    }

    /// The ID of the block's context.
    #[inline]
    pub fn context(&self, number: u32) -> u32 {
        self.flags(number) & !(HAS_TWINS | LINKED)
    }

    /// Whether the block is found through the slot before it, not by its key.
    #[inline]
    pub fn is_linked(&self, number: u32) -> bool {
        self.flags(number) & LINKED != 0
    }

    /// The slots after a slot, up to the end of the chunk.
    #[inline]
    pub fn run_after(&self, number: u32) -> Run<'_> {
        let (slots, at) = (&self.slots[0], (number & SLOT_MASK) as usize + 1);
        Run {
            words: &slots.words[at..],
            states: &slots.states[at..],
        }
    }

    /// The rolling key.
    #[inline]
    pub fn key(&self, number: u32) -> u64 {
        let mut last = 0;
        self.keys_up_to(number, |_, key| last = key);
        last
    }

    /// Visits the keys of a block and of the blocks before it that are in the same run and the same group of slots, the earliest first.
    #[inline]
    fn keys_up_to(&self, number: u32, mut visit: impl FnMut(usize, u64)) {
        let (slots, end) = (&self.slots[0], (number & SLOT_MASK) as usize);
        let is_linked = |at: usize| flags_in(slots.states[at].load(Ordering::Relaxed)) & LINKED != 0;
        let mut at = end;
        while at % GROUP_SLOTS != 0 && is_linked(at) {
            at -= 1;
        }
        let first = if is_linked(at) {
            &self.keys[at / GROUP_SLOTS]
        } else {
            &slots.words[at]
        };
        let mut key = first.load(Ordering::Relaxed);
        visit(at % GROUP_SLOTS, key);
        for at in at + 1..=end {
            key = keys::chained(key, slots.words[at].load(Ordering::Relaxed));
            visit(at % GROUP_SLOTS, key);
        }
    }
}

struct Chunk {
    memory: Option<Arc<Memory>>,
    /// A bit mask of free slots.
    free: [u64; CHUNK_SLOTS / 64],
    used: u32,
    /// Index of a word of `free`; all earlier words are zero.
    hint: u32,
    /// Whether a search for a long stretch of free slots has failed since slots were last released.
    is_scattered: bool,
    /// Whether the chunk is in `Records::partial`.
    is_listed: bool,
    /// Whether the chunk is in `Records::changed`.
    is_changed: bool,
}

impl Chunk {
    const EMPTY: Self = Self {
        memory: None,
        free: [u64::MAX; CHUNK_SLOTS / 64],
        used: 0,
        hint: 0,
        is_scattered: false,
        is_listed: false,
        is_changed: false,
    };

    fn is_free(&self, at: usize) -> bool {
        self.free[at / 64] >> (at % 64) & 1 == 1
    }

    /// Number of consecutive free slots from a slot on, at most `max_length`.
    fn stretch(&self, at: usize, max_length: usize) -> usize {
        let (end, mut length) = (CHUNK_SLOTS.min(at + max_length), 0);
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

    /// The position of the first `count` consecutive free slots; if they do not exist, the position of the first free slot.
    fn find(&mut self, count: usize) -> usize {
        while self.free[self.hint as usize] == 0 {
            self.hint += 1;
        }
        let first = self.hint as usize * 64 + self.free[self.hint as usize].trailing_zeros() as usize;
        let mut at = if self.is_scattered { CHUNK_SLOTS } else { first };
        while at < CHUNK_SLOTS {
            let length = self.stretch(at, count);
            if length >= count {
                return at;
            }
            at += length + 1;
            // The next free slot.
            while at < CHUNK_SLOTS {
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

    /// The position of the first group whose slots are all free; if no such group exists, the position of the first free slot.
    fn find_group(&mut self) -> usize {
        while self.free[self.hint as usize] == 0 {
            self.hint += 1;
        }
        for word in self.hint as usize..self.free.len() {
            let mut whole = self.free[word];
            // These conjunctions set the lowest bit of a byte if and only if all bits of the byte were set.
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

    /// Marks slots as free or used.
    #[inline]
    fn mark(&mut self, mut at: usize, mut length: usize, free: bool) {
        while length > 0 {
            let bit = at % 64;
            let count = length.min(64 - bit);
            let bits = (u64::MAX >> (64 - count)) << bit;
            if free {
                self.free[at / 64] |= bits;
            } else {
                self.free[at / 64] &= !bits;
            }
            (at, length) = (at + count, length - count);
        }
    }
}

/// Adjacent slots of one chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// The ID of the first slot.
    pub first: u32,
    /// Number of slots.
    pub length: u32,
}

impl Row {
    /// A row that has one slot.
    pub fn single(number: u32) -> Self {
        Self {
            first: number,
            length: 1,
        }
    }

    /// Adds a slot if it is adjacent to the row. Returns whether the slot was added.
    #[inline]
    pub fn extend(&mut self, number: u32) -> bool {
        if number + 1 == self.first && self.first & SLOT_MASK != 0 {
            self.first = number;
        } else if number != self.first + self.length || number & SLOT_MASK == 0 {
            return false;
        }
        self.length += 1;
        true
    }
}

/// The records of all blocks.
#[derive(Default)]
pub struct Records {
    chunks: Vec<Chunk>,
    partial: Vec<u32>,
    current: usize,
    used: usize,
    /// Chunks with memory.
    held: usize,
    /// Chunks that were changed after the last call of `publish`.
    changed: Vec<u32>,
    /// Chunks whose memory was allocated or released since `move_to` was last called.
    moved: Vec<u32>,
}

impl std::fmt::Debug for Records {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Records({} in {} bytes)", self.used, self.bytes())
    }
}

/// The slots of a run from one position on, with the properties that are compared with a prompt.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    words: &'a [AtomicU64],
    states: &'a [AtomicU64],
}

impl Run<'_> {
    /// Counts the leading slots that are linked blocks of this context, have these local hashes, and share one set. Removes these slots
    /// from the run, and returns their number and set.
    #[inline]
    pub fn take(&mut self, locals: &[u64], context: u32) -> (usize, u32) {
        let length = locals.len().min(self.words.len()).min(self.states.len());
        let (words, states, locals) = (&self.words[..length], &self.states[..length], &locals[..length]);
        let Some(first) = states.first().map(|first| first.load(Ordering::Relaxed)) else {
            return (0, EMPTY);
        };
        if flags_in(first) != context | LINKED {
            return (0, EMPTY);
        }
        // Compilers do not vectorise loads of atomic numbers. So a loop with two rarely taken branches per block is faster than a loop that
        // adds up eight comparisons.
        let same =
            |at: &usize| words[*at].load(Ordering::Relaxed) == locals[*at] && states[*at].load(Ordering::Relaxed) == first;
        let count = (0..length).take_while(same).count();
        (self.words, self.states) = (&self.words[count..], &self.states[count..]);
        (count, set_in(first))
    }
}

impl Records {
    /// Number of records in use.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Whether no record is in use.
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.held * (size_of::<Slots>() + CHUNK_SLOTS / GROUP_SLOTS * 8)
            + self.chunks.capacity() * size_of::<Chunk>()
            + self.partial.capacity() * 4
    }

    /// Maximum number of bytes that `records` additional records take.
    pub fn growth(&self, records: usize) -> usize {
        let free = self.held * CHUNK_SLOTS - self.used;
        let chunks = records.saturating_sub(free).div_ceil(CHUNK_SLOTS);
        chunks * (size_of::<Slots>() + CHUNK_SLOTS / GROUP_SLOTS * 8 + 2 * size_of::<Chunk>())
    }

    /// An upper bound of the IDs: all IDs that were ever assigned to records are below it.
    pub fn bound(&self) -> u32 {
        (self.chunks.len() << CHUNK_BITS) as u32
    }

    #[inline]
    fn memory(&self, number: u32) -> Option<&Memory> {
        self.chunks.get((number >> CHUNK_BITS) as usize)?.memory.as_deref()
    }

    #[inline]
    fn slots(&self, number: u32) -> Option<&Slots> {
        self.memory(number).map(|memory| &memory.slots[0])
    }

    /// Returns the memory of the chunk that contains a slot in use, so that the caller can change the slot.
    #[inline]
    fn memory_to_change(&mut self, number: u32) -> &Memory {
        let at = number >> CHUNK_BITS;
        let chunk = &mut self.chunks[at as usize];
        let memory = chunk.memory.as_deref().expect("a slot in use has memory");
        if !chunk.is_changed {
            chunk.is_changed = true;
            self.changed.push(at);
            memory.begin_change();
        }
        memory
    }

    /// Whether the record with this ID is in use.
    #[inline]
    pub fn is_used(&self, number: u32) -> bool {
        self.set(number) != FREE
    }

    /// The engine's hash.
    #[inline]
    pub fn hash(&self, number: u32) -> u64 {
        let load = |slots: &Slots| slots.hashes[(number & SLOT_MASK) as usize].load(Ordering::Relaxed);
        self.slots(number).map_or(0, load)
    }

    /// The rolling key of a head, or the local hash of a linked block.
    #[inline]
    pub fn word(&self, number: u32) -> u64 {
        let load = |slots: &Slots| slots.words[(number & SLOT_MASK) as usize].load(Ordering::Relaxed);
        self.slots(number).map_or(0, load)
    }

    /// The set of the block's holders.
    #[inline]
    pub fn set(&self, number: u32) -> u32 {
        set_in(self.state(number))
    }

    /// Changes the set of the block's holders.
    #[inline]
    pub fn put_set(&mut self, number: u32, set: u32) {
        let flags = self.flags(number);
        self.put_state(number, state(set, flags));
    }

    #[inline]
    fn state(&self, number: u32) -> u64 {
        let load = |slots: &Slots| slots.states[(number & SLOT_MASK) as usize].load(Ordering::Relaxed);
        self.slots(number).map_or(state(FREE, 0), load)
    }

    #[inline]
    fn put_state(&mut self, number: u32, state: u64) {
        self.memory_to_change(number).slots[0].states[(number & SLOT_MASK) as usize].store(state, Ordering::Relaxed);
    }

    #[inline]
    fn flags(&self, number: u32) -> u32 {
        flags_in(self.state(number))
    }

    /// The ID of the block's context.
    #[inline]
    pub fn context(&self, number: u32) -> u32 {
        self.flags(number) & !(HAS_TWINS | LINKED)
    }

    /// Whether other records have the block's key and context.
    #[inline]
    pub fn has_twins(&self, number: u32) -> bool {
        self.flags(number) & HAS_TWINS != 0
    }

    /// Sets the flag that says that other records have the block's key and context.
    pub fn mark_twin(&mut self, number: u32) {
        self.put_state(number, self.state(number) | state(0, HAS_TWINS));
    }

    /// Whether the block is found through the slot before it, not by its key.
    #[inline]
    pub fn is_linked(&self, number: u32) -> bool {
        self.flags(number) & LINKED != 0
    }

    /// The slot after a slot; None at the end of the chunk.
    #[inline]
    pub fn next(number: u32) -> Option<u32> {
        (number & SLOT_MASK != SLOT_MASK).then(|| number + 1)
    }

    /// The block that is linked to this block.
    #[inline]
    pub fn linked_next(&self, number: u32) -> Option<u32> {
        Self::next(number).filter(|&next| self.is_linked(next))
    }

    /// The rolling key.
    #[inline]
    pub fn key(&self, number: u32) -> u64 {
        self.memory(number).map_or(0, |memory| memory.key(number))
    }

    /// Visits the keys of a block and of the blocks before it that are in the same run and the same group of slots, the earliest first.
    #[inline]
    pub fn keys_up_to(&self, number: u32, visit: impl FnMut(usize, u64)) {
        if let Some(memory) = self.memory(number) {
            memory.keys_up_to(number, visit);
        }
    }

    /// Makes a linked block a head.
    pub fn unlink(&mut self, number: u32) -> u64 {
        let key = self.key(number);
        self.put_state(number, self.state(number) & !state(0, LINKED));
        self.memory_to_change(number).slots[0].words[(number & SLOT_MASK) as usize].store(key, Ordering::Relaxed);
        key
    }

    /// The IDs of all records in use, in ascending order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.bound()).filter(|&number| self.is_used(number))
    }

    /// Prefetches what a removal of the record reads first.
    #[inline]
    pub fn prefetch(&self, number: u32) {
        if let Some(slots) = self.slots(number) {
            let at = (number & SLOT_MASK) as usize;
            prefetch::line(&slots.hashes[at]);
            prefetch::line(&slots.states[at]);
        }
    }

    /// Prefetches what a removal of the record reads first, and the word from which the removal computes the key.
    #[inline]
    pub fn prefetch_all(&self, number: u32) {
        if let Some(slots) = self.slots(number) {
            prefetch::line(&slots.words[(number & SLOT_MASK) as usize]);
        }
        self.prefetch(number);
    }

    // --- allocation and release

    /// Allocates at most `count` adjacent slots, directly after the slot `after` if possible. Returns None if all IDs are used.
    pub fn take(&mut self, after: Option<u32>, count: usize) -> Option<Row> {
        let behind = after.and_then(Self::next).filter(|&next| {
            let chunk = &self.chunks[(next >> CHUNK_BITS) as usize];
            chunk.memory.is_some() && chunk.is_free((next & SLOT_MASK) as usize)
        });
        let (chunk, at) = match behind {
            Some(next) => ((next >> CHUNK_BITS) as usize, (next & SLOT_MASK) as usize),
            None => {
                let chunk = self.room()?;
                let found = &mut self.chunks[chunk];
                let at = match (count, after) {
                    // Several runs might grow in turn by a few blocks, so this run gets a free group if one exists.
                    (..GROUP_SLOTS, Some(_)) => found.find_group(),
                    (count, _) => found.find(count.min(GROUP_SLOTS)),
                };
                (chunk, at)
            }
        };
        let found = &mut self.chunks[chunk];
        let length = found.stretch(at, count);
        found.mark(at, length, false);
        found.used += length as u32;
        self.used += length;
        if found.memory.is_none() {
            self.held += 1;
            found.memory = Some(Arc::new(Memory::new()));
            self.moved.push(chunk as u32);
            if !found.is_changed {
                found.is_changed = true;
                self.changed.push(chunk as u32);
            }
        }
        Some(Row {
            first: (chunk << CHUNK_BITS | at) as u32,
            length: length as u32,
        })
    }

    /// Writes a head into a slot that was allocated.
    #[inline]
    pub fn put_head(&mut self, number: u32, key: u64, hash: u64, context: u32, set: u32) {
        let (slots, at) = (&self.memory_to_change(number).slots[0], (number & SLOT_MASK) as usize);
        slots.words[at].store(key, Ordering::Relaxed);
        slots.hashes[at].store(hash, Ordering::Relaxed);
        slots.states[at].store(state(set, context), Ordering::Relaxed);
    }

    /// Writes a linked block into a slot that was allocated.
    #[inline]
    pub fn put_linked(&mut self, number: u32, local: u64, key: u64, hash: u64, context: u32, set: u32) {
        let at = (number & SLOT_MASK) as usize;
        let memory = self.memory_to_change(number);
        let slots = &memory.slots[0];
        slots.words[at].store(local, Ordering::Relaxed);
        slots.hashes[at].store(hash, Ordering::Relaxed);
        slots.states[at].store(state(set, context | LINKED), Ordering::Relaxed);
        if at.is_multiple_of(GROUP_SLOTS) {
            memory.keys[at / GROUP_SLOTS].store(key, Ordering::Relaxed);
        }
    }

    /// Returns a chunk that has a free slot.
    #[inline]
    fn room(&mut self) -> Option<usize> {
        let has_room = |chunk: &Chunk| (chunk.used as usize) < CHUNK_SLOTS;
        if self.chunks.get(self.current).is_some_and(has_room) {
            return Some(self.current);
        }
        self.switch_chunk()
    }

    /// Selects another chunk with free slots as the current chunk.
    #[cold]
    fn switch_chunk(&mut self) -> Option<usize> {
        while let Some(at) = self.partial.pop() {
            let chunk = &mut self.chunks[at as usize];
            chunk.is_listed = false;
            if (chunk.used as usize) < CHUNK_SLOTS {
                self.current = at as usize;
                return Some(self.current);
            }
        }
        if self.chunks.len() >= (u32::MAX >> CHUNK_BITS) as usize {
            return None;
        }
        self.chunks.push(Chunk::EMPTY);
        self.current = self.chunks.len() - 1;
        Some(self.current)
    }

    /// Releases slots. The caller must already have unlinked a block that was linked to the last of these slots.
    pub fn remove(&mut self, Row { first, length }: Row) {
        let at = (first & SLOT_MASK) as usize;
        for slot in &self.memory_to_change(first).slots[0].states[at..at + length as usize] {
            slot.store(state(FREE, 0), Ordering::Relaxed);
        }
        self.give(first, length);
    }

    /// Releases slots that were allocated but not written.
    pub fn give(&mut self, first: u32, length: u32) {
        if length == 0 {
            return;
        }
        let (at, inner) = ((first >> CHUNK_BITS) as usize, (first & SLOT_MASK) as usize);
        let chunk = &mut self.chunks[at];
        chunk.mark(inner, length as usize, true);
        (chunk.hint, chunk.is_scattered) = (chunk.hint.min((inner / 64) as u32), false);
        chunk.used -= length;
        self.used -= length as usize;
        if chunk.used == 0 {
            self.held -= 1;
            (chunk.memory, chunk.hint) = (None, 0);
            self.moved.push(at as u32);
        }
        if at != self.current && !chunk.is_listed {
            chunk.is_listed = true;
            self.partial.push(at as u32);
        }
        if self.used == 0 {
            let moved = std::mem::take(&mut self.moved);
            *self = Self {
                moved,
                ..Self::default()
            };
        }
    }

    // --- functions for lookups

    /// Whether the memory of chunks was allocated or released after the last call of `move_to`.
    #[inline]
    pub fn has_moved_chunks(&self) -> bool {
        !self.moved.is_empty()
    }

    /// Publishes the memory of all chunks to lookups. No lookup may run during this call.
    pub fn move_to(&mut self, view: &mut Vec<Option<Arc<Memory>>>) {
        if view.len() < self.chunks.len() {
            view.resize_with(self.chunks.len(), || None);
        }
        for at in self.moved.drain(..) {
            let memory = self.chunks.get(at as usize).and_then(|chunk| chunk.memory.clone());
            if let Some(known) = view.get_mut(at as usize) {
                *known = memory;
            }
        }
        if view.len() > self.chunks.len() {
            view.truncate(self.chunks.len());
            view.shrink_to_fit();
        }
    }

    /// Ends all changes: lookups can read each chunk.
    #[inline]
    pub fn publish(&mut self) {
        while let Some(at) = self.changed.pop() {
            let chunk = &mut self.chunks[at as usize];
            chunk.is_changed = false;
            if let Some(memory) = &chunk.memory {
                memory.end_change();
            }
        }
    }
}

/// The ID of the chunk that contains a record.
#[inline]
pub fn chunk_of(number: u32) -> usize {
    (number >> CHUNK_BITS) as usize
}

const _: () = assert!(EMPTY != FREE);

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain of consecutive blocks.
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
    fn each_key_is_computed_from_a_stored_key() {
        let mut records = Records::default();
        let made = chain(&mut records, None, 1, 3_000);
        let heads = made.iter().filter(|(number, _)| !records.is_linked(*number)).count();
        assert_eq!(heads, 3, "one a chunk");
        assert!(made.iter().all(|&(number, key)| records.key(number) == key));
        assert_eq!(records.unlink(made[1_500].0), made[1_500].1);
        records.remove(Row::single(made[1_499].0));
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
            let run = records.memory(made[0].0).unwrap().run_after(made[0].0);
            assert_eq!({ run }.take(&locals, 3), (length, 1));
            assert_eq!({ run }.take(&locals, 4).0, 0);
        }
        records.put_set(made[40].0, 2);
        let locals: Vec<u64> = (101..200).collect();
        let mut run = records.memory(made[0].0).unwrap().run_after(made[0].0);
        assert_eq!(run.take(&locals, 3), (39, 1));
        assert_eq!(run.take(&locals[39..], 3), (1, 2));
        assert_eq!(run.take(&locals[40..], 3), (59, 1));
        assert_eq!(run.take(&locals[99..], 3), (0, EMPTY));
    }

    #[test]
    fn slots_of_a_removed_chain_are_adjacent_again() {
        let mut records = Records::default();
        let made = chain(&mut records, None, 1, 600);
        for &(number, _) in made[200..300].iter().rev() {
            records.remove(Row::single(number));
        }
        records.unlink(made[300].0);
        let stretch = records.take(None, 100).unwrap();
        assert_eq!((stretch.first, stretch.length), (made[200].0, 100));
        records.give(stretch.first, stretch.length);
        // No gap of the chunk has 500 slots, so the slots of the first gap are taken.
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
    fn all_memory_is_released() {
        let mut records = Records::default();
        let mut made = chain(&mut records, None, 1, 5_000);
        made.sort_by_key(|&(number, _)| number.wrapping_mul(0x9E37_79B9));
        for (number, _) in made {
            if let Some(next) = records.linked_next(number) {
                records.unlink(next);
            }
            records.remove(Row::single(number));
        }
        assert!(records.is_empty());
        assert_eq!(records.bytes(), 0);
    }
}
