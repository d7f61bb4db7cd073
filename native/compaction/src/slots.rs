//! Values found by number, in chunks that are given back when nothing in them is in use.

/// Values of a chunk: the bits of a word.
const CHUNK: usize = 64;

struct Chunk<T> {
    /// None when none is in use.
    values: Option<Box<[T; CHUNK]>>,
    /// A bit for each free value.
    free: u64,
    /// Whether it is in `Slots::partial`.
    listed: bool,
}

/// See the module. Numbers are below the limit that it was made with.
pub struct Slots<T> {
    chunks: Vec<Chunk<T>>,
    partial: Vec<u32>,
    /// Chunks without memory.
    vacant: Vec<u32>,
    current: usize,
    used: usize,
    limit: usize,
}

impl<T> std::fmt::Debug for Slots<T> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Slots({} in {} bytes)", self.used, self.bytes())
    }
}

impl<T> Slots<T> {
    /// An empty one, which takes no memory.
    pub fn new(limit: usize) -> Self {
        Self {
            chunks: Vec::new(),
            partial: Vec::new(),
            vacant: Vec::new(),
            current: 0,
            used: 0,
            limit,
        }
    }

    /// Values in use.
    pub fn len(&self) -> usize {
        self.used
    }

    /// Heap bytes, those of the values' own apart.
    pub fn bytes(&self) -> usize {
        (self.chunks.len() - self.vacant.len()) * CHUNK * size_of::<T>()
            + self.chunks.capacity() * size_of::<Chunk<T>>()
            + (self.partial.capacity() + self.vacant.capacity()) * 4
    }

    /// One in use.
    #[inline]
    pub fn get(&self, number: u32) -> &T {
        let values = self.chunks[number as usize / CHUNK].values.as_deref();
        &values.expect("a value in use has memory")[number as usize % CHUNK]
    }

    /// The same to be changed.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> &mut T {
        let values = self.chunks[number as usize / CHUNK].values.as_deref_mut();
        &mut values.expect("a value in use has memory")[number as usize % CHUNK]
    }

    /// Numbers in use, in their order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        let held = self.chunks.iter().enumerate().filter(|(_, chunk)| chunk.values.is_some());
        held.flat_map(|(at, chunk)| {
            (0..CHUNK)
                .filter(|bit| chunk.free >> bit & 1 == 0)
                .map(move |bit| (at * CHUNK + bit) as u32)
        })
    }
}

impl<T: Default> Slots<T> {
    /// Keeps a value: its number. None when there are as many as numbers.
    #[inline]
    pub fn put(&mut self, value: T) -> Option<u32> {
        if self.chunks.get(self.current).is_none_or(|chunk| chunk.free == 0) {
            self.turn()?;
        }
        let chunk = &mut self.chunks[self.current];
        let bit = chunk.free.trailing_zeros() as usize;
        chunk.free &= chunk.free - 1;
        chunk.values.as_mut()?[bit] = value;
        self.used += 1;
        Some((self.current * CHUNK + bit) as u32)
    }

    /// Makes another chunk the current one.
    #[cold]
    fn turn(&mut self) -> Option<()> {
        if let Some(at) = self.partial.pop() {
            self.current = at as usize;
            self.chunks[self.current].listed = false;
            return Some(());
        }
        let chunk = Chunk {
            values: Some(Box::new(std::array::from_fn(|_| T::default()))),
            free: u64::MAX,
            listed: false,
        };
        if let Some(at) = self.vacant.pop() {
            self.current = at as usize;
            self.chunks[self.current] = chunk;
        } else {
            if (self.chunks.len() + 1) * CHUNK > self.limit {
                return None;
            }
            self.current = self.chunks.len();
            self.chunks.push(chunk);
        }
        Some(())
    }

    /// Gives a number back, and tells what it had.
    pub fn take(&mut self, number: u32) -> T {
        let at = number as usize / CHUNK;
        let value = std::mem::take(self.get_mut(number));
        let chunk = &mut self.chunks[at];
        chunk.free |= 1 << (number as usize % CHUNK);
        self.used -= 1;
        if self.used == 0 {
            *self = Self::new(self.limit);
        } else if at == self.current {
            // Its memory is for what comes next.
        } else if chunk.free == u64::MAX {
            chunk.values = None;
            if std::mem::take(&mut chunk.listed) {
                self.partial.retain(|&other| other as usize != at);
            }
            self.vacant.push(at as u32);
        } else if !chunk.listed {
            chunk.listed = true;
            self.partial.push(at as u32);
        }
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values keep their numbers while others come and go, memory goes with the last, and there are no more than numbers.
    #[test]
    fn values_are_apart() {
        let mut slots: Slots<u64> = Slots::new(1024);
        let (baseline, mut kept, mut random) = (slots.bytes(), Vec::new(), 7_usize);
        for value in 0..6000_u64 {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            if random >> 61 < 5 {
                match slots.put(value) {
                    Some(number) => kept.push((number, value)),
                    None => assert_eq!(slots.len(), 1024),
                }
            } else if !kept.is_empty() {
                let (number, value) = kept.swap_remove((random >> 20) % kept.len());
                assert_eq!(slots.take(number), value);
            }
        }
        let mut numbers: Vec<u32> = kept.iter().map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        assert!(slots.numbers().eq(numbers.iter().copied()) && slots.len() == numbers.len());
        let whole = slots.bytes();
        while kept.len() > 10 {
            let (number, value) = kept.pop().expect("there are some");
            assert_eq!((*slots.get(number), slots.take(number)), (value, value));
        }
        assert!(slots.bytes() < whole * 11 / 16 + 1024, "{whole} {slots:?}");
        kept.drain(..)
            .for_each(|(number, value)| assert_eq!(slots.take(number), value));
        assert_eq!((slots.bytes(), slots.len()), (baseline, 0));
    }
}
