//! Stores blocks by ID. Each block has a record of fixed size, and its tokens. Blocks with the same number of tokens share chunks of
//! memory.

use super::examined_blocks;

/// Number of low bits of a block's ID that select its slot in a chunk.
const SLOT_BITS: u32 = 8;
/// Maximum number of blocks in a chunk.
const MAX_CHUNK_BLOCKS: usize = 1 << SLOT_BITS;
/// Number of tokens of a chunk; a chunk of a single block can have more.
const CHUNK_TOKENS: usize = 8192;
/// Number of bits of a word of `Chunk::free`.
const WORD_BITS: usize = u64::BITS as usize;

/// The record of one block, without its tokens. The record has no padding: every block has a record, and 28 bytes are less than 32.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, packed(4))]
pub struct Record {
    /// The engine's hash.
    pub hash: u64,
    /// Key of the block.
    pub key: u64,
    /// ID of the parent block, or `ROOT`.
    pub parent: u32,
    /// Number of child blocks.
    pub children: u32,
    /// ID of the block's attributes.
    pub attributes: u32,
}

#[derive(Debug, Default)]
struct Chunk {
    records: Box<[Record]>,
    tokens: Box<[u32]>,
    /// Tokens per block.
    width: usize,
    /// A bit mask of free slots.
    free: [u64; MAX_CHUNK_BLOCKS / WORD_BITS],
    used: usize,
}

/// The chunks that have free slots for blocks of `width` tokens. Blocks are added to the last of these chunks; only this chunk can be
/// empty.
#[derive(Debug)]
struct OpenChunks {
    width: usize,
    chunks: Vec<u32>,
}

/// All blocks, found by their IDs; see the module `arena`.
#[derive(Debug, Default)]
pub struct Arena {
    chunks: Vec<Chunk>,
    open: Vec<OpenChunks>,
    /// IDs of chunks that have no memory.
    vacant: Vec<u32>,
    used: usize,
    chunk_bytes: usize,
}

impl Chunk {
    fn new(width: usize) -> Self {
        let slots = (CHUNK_TOKENS / width.max(1)).clamp(1, MAX_CHUNK_BLOCKS);
        let mut free = [0; MAX_CHUNK_BLOCKS / WORD_BITS];
        (0..slots).for_each(|slot| free[slot / WORD_BITS] |= 1 << (slot % WORD_BITS));
        Self {
            records: vec![Record::default(); slots].into(),
            tokens: vec![0; slots * width].into(),
            width,
            free,
            used: 0,
        }
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.records) + size_of_val(&*self.tokens)
    }

    fn is_full(&self) -> bool {
        self.used == self.records.len()
    }

    fn is_free(&self, slot: usize) -> bool {
        self.free[slot / WORD_BITS] >> (slot % WORD_BITS) & 1 != 0
    }
}

fn split(number: u32) -> (usize, usize) {
    (number as usize >> SLOT_BITS, number as usize % MAX_CHUNK_BLOCKS)
}

impl Arena {
    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        let lists: usize = self.open.iter().map(|open| open.chunks.capacity()).sum();
        self.chunk_bytes
            + self.chunks.capacity() * size_of::<Chunk>()
            + self.open.capacity() * size_of::<OpenChunks>()
            + (lists + self.vacant.capacity()) * size_of::<u32>()
    }

    /// An upper bound of the IDs in use: all of them are below it.
    pub fn bound(&self) -> usize {
        self.chunks.len() << SLOT_BITS
    }

    /// Number of different block sizes since the arena was last empty.
    pub fn widths(&self) -> usize {
        self.open.len()
    }

    /// The block IDs in use, in ascending order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.chunks.iter().enumerate().flat_map(|(at, chunk)| {
            let used = (0..chunk.records.len()).filter(|&slot| !chunk.is_free(slot));
            used.map(move |slot| (at << SLOT_BITS | slot) as u32)
        })
    }

    /// The record of a block.
    #[inline]
    pub fn get(&self, number: u32) -> &Record {
        examined_blocks::count(1);
        let (chunk, slot) = split(number);
        &self.chunks[chunk].records[slot]
    }

    /// The mutable record of a block.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> &mut Record {
        let (chunk, slot) = split(number);
        &mut self.chunks[chunk].records[slot]
    }

    /// The tokens of a block.
    #[inline]
    pub fn tokens(&self, number: u32) -> &[u32] {
        let (chunk, slot) = split(number);
        let chunk = &self.chunks[chunk];
        &chunk.tokens[slot * chunk.width..][..chunk.width]
    }

    /// Adds a block. Returns the ID of the block.
    #[inline]
    pub fn insert(&mut self, record: Record, tokens: &[u32]) -> u32 {
        let width = tokens.len();
        let open = match self.open.iter().position(|open| open.width == width) {
            Some(found) => found,
            None => {
                self.open.push(OpenChunks {
                    width,
                    chunks: Vec::new(),
                });
                self.open.len() - 1
            }
        };
        let at = match self.open[open].chunks.last() {
            Some(&at) => at as usize,
            None => self.add_chunk(open),
        };
        let chunk = &mut self.chunks[at];
        let word = chunk.free.iter().position(|&bits| bits != 0);
        let word = word.expect("open chunks have free slots");
        let slot = word * WORD_BITS + chunk.free[word].trailing_zeros() as usize;
        chunk.free[word] &= chunk.free[word] - 1;
        chunk.records[slot] = record;
        chunk.tokens[slot * width..][..width].copy_from_slice(tokens);
        chunk.used += 1;
        self.used += 1;
        if chunk.is_full() {
            self.open[open].chunks.pop();
        }
        (at << SLOT_BITS | slot) as u32
    }

    #[cold]
    fn add_chunk(&mut self, open: usize) -> usize {
        let at = match self.vacant.pop() {
            Some(at) => at as usize,
            // The limits of a state keep the IDs below `ROOT`: chunks of one block for all IDs would take 500 GB.
            None => {
                self.chunks.push(Chunk::default());
                self.chunks.len() - 1
            }
        };
        let OpenChunks { width, chunks } = &mut self.open[open];
        self.chunks[at] = Chunk::new(*width);
        self.chunk_bytes += self.chunks[at].bytes();
        chunks.push(at as u32);
        at
    }

    /// Removes a block, and frees the memory of empty chunks.
    pub fn remove(&mut self, number: u32) {
        self.used -= 1;
        if self.used == 0 {
            *self = Self::default();
            return;
        }
        let (at, slot) = split(number);
        let chunk = &mut self.chunks[at];
        let was_full = chunk.is_full();
        chunk.free[slot / WORD_BITS] |= 1 << (slot % WORD_BITS);
        chunk.used -= 1;
        let (width, is_empty) = (chunk.width, chunk.used == 0);
        let open = self.open.iter_mut().find(|open| open.width == width);
        let Some(OpenChunks { chunks, .. }) = open else { return };
        if was_full {
            chunks.insert(chunks.len().saturating_sub(1), at as u32);
        }
        if is_empty && chunks.last() != Some(&(at as u32)) {
            chunks.retain(|&other| other as usize != at);
            self.chunk_bytes -= self.chunks[at].bytes();
            self.chunks[at] = Chunk::default();
            self.vacant.push(at as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks keep their contents while other blocks are added and removed. The last removal frees all memory.
    #[test]
    fn blocks_keep_their_contents() {
        let (mut arena, mut live, mut random) = (Arena::default(), Vec::new(), 7_usize);
        let widths = [0, 1, 3, 17, 5000, 9000];
        for value in 0..12_000_u32 {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            if random >> 61 < 5 && value < 10_000 {
                let width = widths[(random >> 40) % widths.len()];
                let record = Record {
                    hash: value.into(),
                    ..Record::default()
                };
                let number = arena.insert(record, &vec![value; width]);
                live.push((number, value, width));
            } else if !live.is_empty() {
                let (number, value, width) = live.swap_remove((random >> 20) % live.len());
                check(&arena, number, value, width);
                arena.remove(number);
            }
        }
        let mut numbers: Vec<u32> = live.iter().map(|(number, ..)| *number).collect();
        numbers.sort_unstable();
        assert!(arena.numbers().eq(numbers.iter().copied()) && arena.used == numbers.len());
        assert_eq!(arena.widths(), widths.len());
        let held: usize = arena.chunks.iter().map(Chunk::bytes).sum();
        assert_eq!(arena.chunk_bytes, held);
        for (number, value, width) in live {
            check(&arena, number, value, width);
            arena.remove(number);
        }
        assert_eq!((arena.bytes(), arena.used, arena.bound()), (0, 0, 0));
    }

    fn check(arena: &Arena, number: u32, value: u32, width: usize) {
        assert_eq!({ arena.get(number).hash }, u64::from(value));
        let tokens = arena.tokens(number);
        assert!(tokens.len() == width && tokens.iter().all(|&token| token == value));
    }

    /// Of the chunks that become empty one after another, all except one free their memory.
    #[test]
    fn empty_chunks_have_no_memory() {
        let mut arena = Arena::default();
        let numbers: Vec<u32> = (0..40 * MAX_CHUNK_BLOCKS as u32)
            .map(|value| arena.insert(Record::default(), &[value; 16]))
            .collect();
        let whole = arena.bytes();
        numbers[1..].iter().for_each(|&number| arena.remove(number));
        assert!(arena.bytes() < whole / 10, "{} of {whole} bytes", arena.bytes());
        let again: Vec<u32> = (1..numbers.len() as u32)
            .map(|value| arena.insert(Record::default(), &[value; 16]))
            .collect();
        assert_eq!(again.len(), numbers.len() - 1);
        assert!(arena.bytes() < whole + 1024, "{} of {whole} bytes", arena.bytes());
    }
}
