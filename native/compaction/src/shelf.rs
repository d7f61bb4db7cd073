//! Slots of one width, found by number.

use std::ops::{Deref, DerefMut};

use kvevents_index::pages::Piece;

/// Bits of a word of free slots.
const WORD: usize = 64;
/// Words of free slots of a chunk.
const WORDS: usize = 8;

/// Memory of a chunk: pages that all shelves share, or its own where one slot needs more.
enum Room<T: Copy, const COUNT: usize> {
    Shared(Piece<T, COUNT>),
    Own(Box<[T]>),
}

impl<T: Copy + Default, const COUNT: usize> Room<T, COUNT> {
    fn new(values: usize) -> Self {
        if values > COUNT {
            return Self::Own(vec![T::default(); values].into());
        }
        Self::Shared(Piece::filled(T::default()))
    }
}

impl<T: Copy, const COUNT: usize> Deref for Room<T, COUNT> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        match self {
            Self::Shared(piece) => piece,
            Self::Own(values) => values,
        }
    }
}

impl<T: Copy, const COUNT: usize> DerefMut for Room<T, COUNT> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Shared(piece) => piece,
            Self::Own(values) => values,
        }
    }
}

/// So many slots.
struct Chunk<T: Copy, const COUNT: usize> {
    /// None when no slot is in use.
    room: Option<Room<T, COUNT>>,
    /// A bit for each free slot.
    free: [u64; WORDS],
    used: u32,
    /// Whether it is in `Shelf::partial`.
    listed: bool,
}

/// Slots of `width` values each, in chunks of about `COUNT` values. Those that are taken one after the other lie side by side where that is possible.
pub struct Shelf<T: Copy, const COUNT: usize> {
    width: usize,
    /// Slots of a chunk, and bits of a number that say which of them.
    slots: usize,
    bits: u32,
    chunks: Vec<Chunk<T, COUNT>>,
    partial: Vec<u32>,
    /// Chunks without memory.
    vacant: Vec<u32>,
    current: usize,
    used: usize,
}

impl<T: Copy, const COUNT: usize> std::fmt::Debug for Shelf<T, COUNT> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Shelf({} slots of {} in {} bytes)", self.used, self.width, self.bytes())
    }
}

impl<T: Copy, const COUNT: usize> Shelf<T, COUNT> {
    /// An empty one, which takes no memory.
    pub fn new(width: usize) -> Self {
        let slots = (COUNT / width.max(1)).clamp(1, WORD * WORDS);
        Self {
            width,
            slots,
            bits: slots.next_power_of_two().ilog2(),
            chunks: Vec::new(),
            partial: Vec::new(),
            vacant: Vec::new(),
            current: 0,
            used: 0,
        }
    }

    /// Values of a slot.
    pub fn width(&self) -> usize {
        self.width
    }

    /// One more than the highest number in use, or more.
    pub fn bound(&self) -> usize {
        self.chunks.len() << self.bits
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        let held = self.chunks.len() - self.vacant.len();
        held * COUNT.max(self.width) * size_of::<T>()
            + self.chunks.capacity() * size_of::<Chunk<T, COUNT>>()
            + (self.partial.capacity() + self.vacant.capacity()) * 4
    }

    fn split(&self, number: u32) -> (usize, usize) {
        let number = number as usize;
        (number >> self.bits, number & ((1 << self.bits) - 1))
    }

    /// The values of a slot in use.
    #[inline]
    pub fn get(&self, number: u32) -> &[T] {
        let (chunk, slot) = self.split(number);
        match &self.chunks[chunk].room {
            Some(room) => &room[slot * self.width..][..self.width],
            None => &[],
        }
    }

    /// The same to be changed.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> &mut [T] {
        let (chunk, slot) = self.split(number);
        match &mut self.chunks[chunk].room {
            Some(room) => &mut room[slot * self.width..][..self.width],
            None => &mut [],
        }
    }

    /// Numbers in use, in their order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        let held = self.chunks.iter().enumerate().filter(|(_, chunk)| chunk.used > 0);
        held.flat_map(move |(at, chunk)| {
            (0..self.slots)
                .filter(|slot| chunk.free[slot / WORD] >> (slot % WORD) & 1 == 0)
                .map(move |slot| ((at << self.bits) | slot) as u32)
        })
    }
}

impl<T: Copy + Default, const COUNT: usize> Shelf<T, COUNT> {
    /// Takes a slot, whatever it holds. None when there are as many as numbers.
    #[inline]
    pub fn take(&mut self) -> Option<u32> {
        let full = self.slots as u32;
        if self.chunks.get(self.current).is_none_or(|chunk| chunk.used == full) {
            self.turn()?;
        }
        let chunk = &mut self.chunks[self.current];
        let word = chunk.free.iter().position(|&bits| bits != 0)?;
        let slot = word * WORD + chunk.free[word].trailing_zeros() as usize;
        chunk.free[word] &= chunk.free[word] - 1;
        chunk.used += 1;
        self.used += 1;
        Some(((self.current << self.bits) | slot) as u32)
    }

    /// Makes another chunk the current one.
    #[cold]
    fn turn(&mut self) -> Option<()> {
        if let Some(at) = self.partial.pop() {
            self.current = at as usize;
            self.chunks[self.current].listed = false;
            return Some(());
        }
        let mut free = [0; WORDS];
        for slot in 0..self.slots {
            free[slot / WORD] |= 1 << (slot % WORD);
        }
        let chunk = Chunk {
            room: Some(Room::new(self.slots * self.width)),
            free,
            used: 0,
            listed: false,
        };
        if let Some(at) = self.vacant.pop() {
            self.current = at as usize;
            self.chunks[self.current] = chunk;
        } else {
            // The highest number is nobody's.
            if (self.chunks.len() + 1) << self.bits >= u32::MAX as usize {
                return None;
            }
            self.current = self.chunks.len();
            self.chunks.push(chunk);
        }
        Some(())
    }

    /// Gives a slot back.
    pub fn give(&mut self, number: u32) {
        let (at, slot) = self.split(number);
        let chunk = &mut self.chunks[at];
        chunk.free[slot / WORD] |= 1 << (slot % WORD);
        chunk.used -= 1;
        self.used -= 1;
        if self.used == 0 {
            *self = Self::new(self.width);
            return;
        }
        if at == self.current {
            return;
        }
        if chunk.used == 0 {
            chunk.room = None;
            if std::mem::take(&mut chunk.listed) {
                self.partial.retain(|&other| other as usize != at);
            }
            self.vacant.push(at as u32);
        } else if !chunk.listed {
            chunk.listed = true;
            self.partial.push(at as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slots keep what is written to them while others come and go, and memory goes with the last.
    #[test]
    fn slots_are_apart() {
        for width in [1, 3, 17, 5000, 7000] {
            let mut shelf: Shelf<u32, 6144> = Shelf::new(width);
            let baseline = shelf.bytes();
            let (mut kept, mut random) = (Vec::new(), 7_usize);
            for value in 0..6000_u32 {
                random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
                if random >> 61 < 5 && value < 4000 {
                    let number = shelf.take().expect("there are numbers");
                    shelf.get_mut(number).fill(value);
                    kept.push((number, value));
                } else if !kept.is_empty() {
                    let (number, value) = kept.swap_remove((random >> 20) % kept.len());
                    assert!(shelf.get(number).iter().all(|&found| found == value));
                    shelf.give(number);
                }
            }
            let mut numbers: Vec<u32> = kept.iter().map(|(number, _)| *number).collect();
            numbers.sort_unstable();
            assert!(shelf.numbers().eq(numbers.iter().copied()) && shelf.used == numbers.len());
            for (number, value) in kept {
                assert!(shelf.get(number).iter().all(|&found| found == value));
                shelf.give(number);
            }
            assert_eq!((shelf.bytes(), shelf.used), (baseline, 0));
        }
    }
}
