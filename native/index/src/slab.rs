//! Records of blocks, found by number.

use crate::pages::Piece;
use crate::prefetch;
use crate::sets::EMPTY;

/// What the index knows about one block.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// Its block key.
    pub key: u64,
    /// The engine's hash for it; streams with another hash for the same block keep theirs themselves.
    pub hash: u64,
    /// Who holds it: a number in `Sets`.
    pub set: u32,
    /// The number of its context, and flags.
    flagged: u32,
}

/// There are other records with this key.
const TWIN: u32 = 1 << 31;
/// It is found through the record before it, and not by its key.
const BEHIND: u32 = 1 << 30;

impl Record {
    /// A block that nobody holds yet.
    #[inline]
    pub fn new(key: u64, hash: u64, context: u32) -> Self {
        Self {
            key,
            hash,
            set: EMPTY,
            flagged: context,
        }
    }

    /// Its number in `Contexts`.
    #[inline]
    pub fn context(&self) -> u32 {
        self.flagged & !(TWIN | BEHIND)
    }

    /// Whether there are other records with its key.
    #[inline]
    pub fn has_twins(&self) -> bool {
        self.flagged & TWIN != 0
    }

    /// Whether it is found through the record before it, and not by its key; `crate::behind` says when.
    #[inline]
    pub fn is_behind(&self) -> bool {
        self.flagged & BEHIND != 0
    }

    /// Notes that there are others with its key.
    pub fn twin(&mut self) {
        self.flagged |= TWIN;
    }

    /// Notes how it is found.
    #[inline]
    pub fn set_behind(&mut self, behind: bool) {
        self.flagged = self.flagged & !BEHIND | if behind { BEHIND } else { 0 };
    }
}

const FREE: u32 = u32::MAX;
const NONE: u32 = u32::MAX;
const BITS: u32 = 10;
const CHUNK: usize = 1 << BITS;
const MASK: u32 = (CHUNK - 1) as u32;

const VACANT: Record = Record {
    key: 0,
    hash: 0,
    set: FREE,
    flagged: 0,
};

struct Chunk {
    /// None when no record of the chunk is in use.
    records: Option<Piece<Record, CHUNK>>,
    /// Records from here on were never used.
    fresh: u32,
    used: u32,
    /// First of the list of free records, which are linked by their keys.
    free: u32,
    /// Whether it is in `Slab::partial`.
    listed: bool,
}

/// Records in chunks. Those of one chain lie side by side where that is possible, since they are read in that order.
#[derive(Default)]
pub struct Slab {
    chunks: Vec<Chunk>,
    partial: Vec<u32>,
    current: usize,
    used: usize,
    /// Chunks with memory.
    held: usize,
}

impl std::fmt::Debug for Slab {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Slab({} records in {} bytes)", self.used, self.bytes())
    }
}

impl Slab {
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
        self.held * CHUNK * size_of::<Record>() + self.chunks.capacity() * size_of::<Chunk>() + self.partial.capacity() * 4
    }

    /// One more than the highest number that was ever given.
    pub fn bound(&self) -> u32 {
        (self.chunks.len() << BITS) as u32
    }

    /// The record `number`, which must be in use.
    #[inline]
    pub fn get(&self, number: u32) -> &Record {
        match &self.chunks[(number >> BITS) as usize].records {
            Some(records) => &records[(number & MASK) as usize],
            None => &VACANT,
        }
    }

    /// The same to be changed.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> &mut Record {
        let records = self.chunks[(number >> BITS) as usize]
            .records
            .as_mut()
            .expect("a record in use has memory");
        &mut records[(number & MASK) as usize]
    }

    /// The record `number` if there is one in use.
    #[inline]
    pub fn find(&self, number: u32) -> Option<&Record> {
        let record = &self.chunks.get((number >> BITS) as usize)?.records.as_ref()?[(number & MASK) as usize];
        (record.set != FREE).then_some(record)
    }

    /// Numbers in use, in their order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.bound()).filter(|&number| self.find(number).is_some())
    }

    /// Brings a record into the cache.
    #[inline]
    pub fn prefetch(&self, number: u32) {
        prefetch::line(self.get(number));
    }

    /// Stores a record, and tells its number; None when there are as many as numbers.
    #[inline]
    pub fn insert(&mut self, record: Record) -> Option<u32> {
        // Nearly always the next one behind that of the call before.
        if let Some(chunk) = self.chunks.get_mut(self.current)
            && let Some(records) = &mut chunk.records
            && let Some(place) = records.get_mut(chunk.fresh as usize)
        {
            *place = record;
            let inner = chunk.fresh;
            chunk.fresh += 1;
            chunk.used += 1;
            self.used += 1;
            return Some(((self.current << BITS) as u32) | inner);
        }
        self.insert_elsewhere(record)
    }

    /// The same in a chunk without memory, or in a place that was given back: the usual one of a cache that is full.
    #[inline(never)]
    fn insert_elsewhere(&mut self, record: Record) -> Option<u32> {
        let at = self.room()?;
        let chunk = &mut self.chunks[at];
        chunk.used += 1;
        self.used += 1;
        if chunk.records.is_none() {
            self.held += 1;
        }
        let records = chunk.records.get_or_insert_with(|| Piece::filled(VACANT));
        let inner = if (chunk.fresh as usize) < CHUNK {
            chunk.fresh += 1;
            chunk.fresh - 1
        } else {
            let inner = chunk.free;
            chunk.free = records[inner as usize].key as u32;
            inner
        } as usize;
        records[inner] = record;
        Some(((at << BITS) | inner) as u32)
    }

    /// A chunk with room for a record.
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
        if let Some(at) = self.partial.pop() {
            self.current = at as usize;
            self.chunks[self.current].listed = false;
            return Some(self.current);
        }
        if self.chunks.len() >= (u32::MAX >> BITS) as usize {
            return None;
        }
        self.chunks.push(Chunk {
            records: None,
            fresh: 0,
            used: 0,
            free: NONE,
            listed: false,
        });
        self.current = self.chunks.len() - 1;
        Some(self.current)
    }

    /// Gives a number back.
    pub fn remove(&mut self, number: u32) {
        let (at, inner) = ((number >> BITS) as usize, number & MASK);
        let chunk = &mut self.chunks[at];
        if let Some(records) = &mut chunk.records {
            records[inner as usize] = Record {
                key: u64::from(chunk.free),
                ..VACANT
            };
        }
        chunk.free = inner;
        chunk.used -= 1;
        self.used -= 1;
        if chunk.used == 0 {
            self.held -= 1;
            (chunk.records, chunk.fresh, chunk.free) = (None, 0, NONE);
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
