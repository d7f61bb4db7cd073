//! Keys that are counted where nobody asks for blocks by their keys: a byte for some, rather than a place in a table for each. Callers give
//! the place of a key, 64 bits that are about uniform.

use crate::prefetch;

/// Cells of the smallest one.
const LEAST: usize = 1 << 10;
/// Cells for each key, at least: then so many keys in one cell that a key may have records are not there by chance (2e-20).
const CELLS: usize = 2;
/// Cells for each key from which on there are to be fewer.
const LOOSE: usize = 32;

/// A cell for some of all places, which counts the keys there: an upper bound of how many records each of them has.
#[derive(Debug, Default)]
pub struct Tally {
    /// None without keys; otherwise a power of two.
    cells: Vec<u8>,
    keys: usize,
    /// The fewest and the most keys that it was made for.
    fits: (usize, usize),
}

impl Tally {
    /// An empty one for so many keys.
    #[must_use]
    pub fn of(keys: usize) -> Self {
        if keys == 0 {
            return Self::default();
        }
        let cells = LEAST.max((2 * CELLS * keys).next_power_of_two());
        let fewest = if cells == LEAST { 1 } else { cells / LOOSE };
        Self {
            cells: vec![0; cells],
            keys: 0,
            fits: (fewest, cells / CELLS),
        }
    }

    /// Whether it was made for so many keys more; for those that it was not, another one is needed.
    #[inline]
    pub fn has_room(&self, keys: usize) -> bool {
        self.keys + keys <= self.fits.1
    }

    /// Whether there are fewer keys than it was made for: a smaller one does.
    #[inline]
    pub fn is_loose(&self) -> bool {
        self.keys < self.fits.0
    }

    /// How often a key was counted in, at most.
    #[inline]
    pub fn often(&self, place: u64) -> usize {
        let at = place as usize & self.cells.len().wrapping_sub(1);
        self.cells.get(at).map_or(0, |&count| count.into())
    }

    /// Counts a key in, for which there is room.
    #[inline]
    pub fn add(&mut self, place: u64) {
        self.keys += 1;
        let cell = self.cell(place);
        *cell = cell.wrapping_add(1);
    }

    /// Counts a key out that was counted in.
    #[inline]
    pub fn remove(&mut self, place: u64) {
        self.keys -= 1;
        let cell = self.cell(place);
        *cell = cell.wrapping_sub(1);
    }

    #[inline]
    fn cell(&mut self, place: u64) -> &mut u8 {
        let mask = self.cells.len() - 1;
        &mut self.cells[place as usize & mask]
    }

    /// Asks for the memory of a key.
    #[inline]
    pub fn prefetch(&self, place: u64) {
        if let Some(cell) = self.cells.get(place as usize & self.cells.len().wrapping_sub(1)) {
            prefetch::line(cell);
        }
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.cells.capacity()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn place(key: u64) -> u64 {
        key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 13
    }

    proptest! {
        /// No key was counted in more often than is told, and most are told as they are.
        #[test]
        fn a_count_is_an_upper_bound(keys in prop::collection::vec(0..2_000_u64, 1..500), gone in any::<u64>()) {
            let mut tally = Tally::of(keys.len());
            keys.iter().for_each(|&key| tally.add(place(key)));
            let is_gone = |at: usize| gone >> (at % 64) & 1 != 0;
            let mut kept = Vec::new();
            for (at, &key) in keys.iter().enumerate() {
                if is_gone(at) { tally.remove(place(key)) } else { kept.push(key) }
            }
            let often = |key: u64| kept.iter().filter(|&&other| other == key).count();
            let told: Vec<(usize, usize)> = kept.iter().map(|&key| (tally.often(place(key)), often(key))).collect();
            prop_assert!(told.iter().all(|(told, often)| told >= often));
            prop_assert!(2 * told.iter().filter(|(told, often)| told == often).count() >= kept.len());
        }
    }

    /// One that was just made need not be made again, for somewhat fewer keys or more either.
    #[test]
    fn what_was_made_fits_for_a_while() {
        let filled = |made: usize, keys: usize| {
            let mut tally = Tally::of(made);
            for key in 0..keys as u64 {
                if tally.has_room(1) {
                    tally.add(place(key));
                }
            }
            (!tally.has_room(1), tally.is_loose())
        };
        for keys in [1, 100, 1_000, 100_000] {
            assert_eq!(filled(keys, keys), (false, false), "{keys}");
            assert_eq!(filled(keys, keys + keys / 2), (false, false), "{keys}");
            assert_eq!(filled(keys, keys - keys / 2), (false, false), "{keys}");
            assert_eq!(filled(keys, 8 * keys + 1_024), (true, false), "{keys}");
            assert_eq!(filled(keys, 0), (false, true), "{keys}");
        }
        assert_eq!(filled(0, 0), (true, false));
        assert_eq!(Tally::default().bytes(), 0);
    }
}
