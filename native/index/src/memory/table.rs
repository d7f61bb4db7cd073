//! A compact multiset of record numbers. Entries are found by hashes, which the table does not store.
//!
//! Buckets are one cache line: 10 tags of 16 bits and 10 numbers. A full bucket overflows into the next ones, and counts the entries that
//! have passed it, so that a search for a missing entry ends early. A directory over the first bits of the hash leads to a segment of
//! `SEGMENT_BUCKETS` buckets (extendible hashing); a full segment is split in two. If hashes were uniform, all segments would be split at
//! about the same time, and would then be half empty. So hashes are skewed: segments at one end of the directory fill up twice as fast as
//! segments at the other end. At any size of the table, some segments were just split and others are nearly full, so the table always takes
//! about 10.5 bytes an entry. A dense table has an additional, intermediate size of segments, and takes about 8.5 bytes an entry. Tags are
//! the bits of the hash after the bits that select the segment. So four of five splits need no hashes from the records; reading such a hash
//! costs a cache miss. No operation moves more entries than those of one segment; sometimes an operation doubles the directory.

mod segment;

use crate::memory::prefetch;

use segment::{Bucket, SEGMENT_BUCKETS, Segment, WIDE_BUCKETS};

/// Maximum number of bits of the directory; at this size, full segments grow instead of being split.
const MAX_DEPTH: u32 = 30;

/// Computes the hashes of entries, which the table does not store.
pub trait Hashes {
    /// Returns the hash of a record.
    fn hash_of(&self, record: u32) -> u64;

    /// Prefetches the memory of a record whose hash is needed soon.
    fn prefetch(&self, record: u32) {
        let _ = record;
    }
}

impl<F: Fn(u32) -> u64> Hashes for F {
    fn hash_of(&self, record: u32) -> u64 {
        self(record)
    }
}

/// Makes low hashes twice as frequent as high ones, and keeps their order.
#[inline]
fn skew(hash: u64) -> u64 {
    let high = |a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64;
    const THIRD: u64 = u64::MAX / 3;
    high(hash, 2 * THIRD + high(hash, THIRD))
}

/// A hash in the form in which a table looks it up.
#[derive(Clone, Copy, Debug, Default)]
pub struct TableHash {
    skewed: u64,
}

impl From<u64> for TableHash {
    #[inline]
    fn from(hash: u64) -> Self {
        Self { skewed: skew(hash) }
    }
}

/// The position of a hash in a table at one moment, or `NONE` if the hash was not looked up. The type has two words, so that it is passed
/// in registers: an option of four numbers would be passed through memory, and stall the processor.
#[derive(Clone, Copy, Debug)]
pub struct TablePosition {
    /// Index of the segment (upper half), and of the bucket in the segment.
    place: u64,
    /// `Table::moves` at that moment, and the tag.
    seen: u64,
}

impl TablePosition {
    const NONE: Self = Self {
        place: u64::MAX,
        seen: u64::MAX,
    };

    #[inline]
    fn new(segment: u32, home: u32, moves: u32, tag: u16) -> Self {
        Self {
            place: u64::from(segment) << 32 | u64::from(home),
            seen: u64::from(moves) << 16 | u64::from(tag),
        }
    }

    #[inline]
    fn is_none(self) -> bool {
        self.place == u64::MAX
    }

    #[inline]
    fn segment(self) -> usize {
        (self.place >> 32) as usize
    }

    #[inline]
    fn home(self) -> usize {
        self.place as u32 as usize
    }

    #[inline]
    fn tag(self) -> u16 {
        self.seen as u16
    }

    /// Whether no entry has moved since the position was found; `moves` is the table's current count of moves.
    #[inline]
    fn is_valid(self, moves: u32) -> bool {
        self.seen >> 16 == u64::from(moves)
    }
}

impl Default for TablePosition {
    fn default() -> Self {
        Self::NONE
    }
}

/// The part of a table that `Table::prefetch` loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Stage {
    Directory,
    Segment,
    Bucket,
}

/// The part of a table that is always in a near cache of the processor (L1 or L2). To prefetch this part costs more than it saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheLevel {
    /// All of the table is in a near cache.
    Near,
    /// The directory and the segments' headers are in a near cache.
    Middle,
    /// No data is in a near cache.
    Far,
}

/// Maximum number of buckets of a table in a near cache: 64 KiB, about 8,000 entries.
const NEAR_BUCKETS: usize = 1 << 10;
/// Maximum number of segments of a table with directory and segment headers in a near cache: 32 KiB, about 300,000 entries.
const MIDDLE_SEGMENTS: usize = 1 << 10;

/// A compact multiset of record numbers.
pub struct Table {
    /// Indices in `segments`, by the first `depth` bits of a hash.
    directory: Vec<u32>,
    segments: Vec<Segment>,
    depth: u32,
    len: usize,
    buckets: usize,
    /// Number of times that entries or segments have moved; a position is valid until the next move.
    moves: u32,
    dense: bool,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Table({} entries in {} bytes)", self.len, self.bytes())
    }
}

impl Default for Table {
    fn default() -> Self {
        Self::new()
    }
}

impl Table {
    /// Creates an empty table, without memory.
    pub const fn new() -> Self {
        Self {
            directory: Vec::new(),
            segments: Vec::new(),
            depth: 0,
            len: 0,
            buckets: 0,
            moves: 0,
            dense: false,
        }
    }

    /// Creates an empty dense table. It takes about 8.5 bytes an entry instead of 10.5, but moves each entry one more time.
    pub fn dense() -> Self {
        Self {
            dense: true,
            ..Self::new()
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The part of the table that is probably in a near cache.
    #[inline]
    pub fn cache_level(&self) -> CacheLevel {
        if self.buckets <= NEAR_BUCKETS {
            CacheLevel::Near
        } else if self.segments.len() <= MIDDLE_SEGMENTS {
            CacheLevel::Middle
        } else {
            CacheLevel::Far
        }
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.buckets * size_of::<Bucket>() + self.segments.capacity() * size_of::<Segment>() + self.directory.capacity() * 4
    }

    #[inline]
    fn at(&self, skewed: u64) -> usize {
        self.directory[self.entry(skewed)] as usize
    }

    /// The index of the directory entry for a hash.
    #[inline]
    fn entry(&self, skewed: u64) -> usize {
        // Two shifts are needed, since a shift by 64 bits is not valid.
        (skewed >> 1 >> (63 - self.depth)) as usize
    }

    /// The position of a hash; `TablePosition::NONE` while the table is empty.
    #[inline]
    pub fn position_of(&self, mixed: impl Into<TableHash>) -> TablePosition {
        let TableHash { skewed } = mixed.into();
        let Some(&number) = self.directory.get(self.entry(skewed)) else {
            return TablePosition::NONE;
        };
        let segment = &self.segments[number as usize];
        TablePosition::new(number, segment.home(skewed) as u32, self.moves, segment.tag(skewed))
    }

    /// Returns the position of a hash, and prefetches the bucket at this position.
    #[inline]
    pub fn prefetch_position(&self, mixed: TableHash) -> TablePosition {
        let position = self.position_of(mixed);
        if !position.is_none() {
            prefetch::line(self.segments[position.segment()].bucket(position.home()));
        }
        position
    }

    /// Returns the position of a hash: `before` if no entry has moved since `before` was found, otherwise a new position.
    #[inline]
    pub fn current_position(&self, before: TablePosition, mixed: TableHash) -> TablePosition {
        if before.is_valid(self.moves) {
            before
        } else {
            self.position_of(mixed)
        }
    }

    /// Prefetches what a search for a hash reads at one stage: the entry of the directory, the segment, or the bucket. In a large table
    /// each of these three reads is a cache miss, and needs the result of the previous read.
    #[inline]
    pub fn prefetch(&self, mixed: TableHash, stage: Stage) {
        if let Some(entry) = self.directory.get(self.entry(mixed.skewed)) {
            match stage {
                Stage::Directory => prefetch::line(entry),
                Stage::Segment => prefetch::line(&self.segments[*entry as usize]),
                Stage::Bucket => {
                    let segment = &self.segments[*entry as usize];
                    prefetch::line(segment.bucket(segment.home(mixed.skewed)));
                }
            }
        }
    }

    /// Visits the records that might have this hash, until `visit` returns false.
    #[inline]
    pub fn for_each_match(&self, mixed: impl Into<TableHash>, visit: impl FnMut(u32) -> bool) {
        self.for_each_match_at(self.position_of(mixed), visit);
    }

    /// Visits the records that might have the hash of a position, until `visit` returns false.
    #[inline]
    pub fn for_each_match_at(&self, position: TablePosition, visit: impl FnMut(u32) -> bool) {
        if !position.is_none() {
            self.segments[position.segment()].for_each_match(position.home(), position.tag(), visit);
        }
    }

    /// Returns the first record that might have this hash and for which `fits` returns true.
    #[inline]
    pub fn find(&self, mixed: impl Into<TableHash>, mut fits: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut found = None;
        self.for_each_match(mixed, |record| {
            if fits(record) {
                found = Some(record);
            }
            found.is_none()
        });
        found
    }

    /// Adds an entry. `hashes` computes the hashes of entries that must move.
    #[inline]
    pub fn insert(&mut self, mixed: impl Into<TableHash>, record: u32, hashes: &impl Hashes) {
        let mixed = mixed.into();
        self.insert_at(self.position_of(mixed), mixed, record, hashes);
    }

    /// Adds an entry at the position of its hash.
    #[inline]
    pub fn insert_at(&mut self, position: TablePosition, mixed: TableHash, record: u32, hashes: &impl Hashes) {
        self.len += 1;
        if !position.is_none() {
            let segment = &mut self.segments[position.segment()];
            if segment.has_room() {
                return segment.put(position.home(), position.tag(), record);
            }
        }
        self.insert_with_room(mixed, record, hashes);
    }

    #[cold]
    #[inline(never)]
    fn insert_with_room(&mut self, TableHash { skewed }: TableHash, record: u32, hashes: &impl Hashes) {
        loop {
            self.moves = self.moves.wrapping_add(1);
            self.make_room(skewed, hashes);
            let at = self.at(skewed);
            let segment = &mut self.segments[at];
            if segment.has_room() {
                return segment.put(segment.home(skewed), segment.tag(skewed), record);
            }
        }
    }

    /// Removes an entry. Returns false if the table does not contain the entry.
    #[inline]
    pub fn remove(&mut self, mixed: impl Into<TableHash>, record: u32, hashes: &impl Hashes) -> bool {
        let mixed = mixed.into();
        self.remove_at(self.position_of(mixed), mixed, record, hashes)
    }

    /// Removes an entry at the position of its hash. Returns false if the table does not contain the entry.
    #[inline]
    pub fn remove_at(&mut self, position: TablePosition, mixed: TableHash, record: u32, hashes: &impl Hashes) -> bool {
        if position.is_none() {
            return false;
        }
        let at = position.segment();
        let segment = &mut self.segments[at];
        if !segment.take(position.home(), position.tag(), record) {
            return false;
        }
        self.len -= 1;
        if self.len == 0 {
            self.clear();
        } else if Segment::may_shrink(2 * segment.used(), segment.size()) {
            self.moves = self.moves.wrapping_add(1);
            self.shrink(mixed.skewed, at, hashes);
        }
        true
    }

    /// Iterates over all entries, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.segments.iter().flat_map(Segment::records)
    }

    /// Removes all entries, and releases the memory.
    pub fn clear(&mut self) {
        *self = Self {
            moves: self.moves.wrapping_add(1),
            dense: self.dense,
            ..Self::new()
        };
    }

    // --- growing and shrinking

    fn make_room(&mut self, skewed: u64, hashes: &impl Hashes) {
        if self.directory.is_empty() {
            self.directory = vec![0];
            self.segments.push(Segment::new(1, 0, 0));
            self.buckets = 1;
            return;
        }
        let at = self.at(skewed);
        let (size, depth) = (self.segments[at].size(), self.segments[at].depth());
        if self.dense && size == SEGMENT_BUCKETS {
            self.refit(at, WIDE_BUCKETS);
        } else if size < SEGMENT_BUCKETS || depth >= MAX_DEPTH || !self.split(skewed, at, hashes) {
            // A wide segment that cannot be split grows to a power of two.
            self.refit(at, if size == WIDE_BUCKETS { 2 * SEGMENT_BUCKETS } else { size * 2 });
        }
    }

    fn refit(&mut self, at: usize, buckets: usize) {
        let old = &self.segments[at];
        let mut new = [Segment::new(buckets, old.depth(), old.base())];
        old.copy_into(&mut new, [old.used()]);
        self.buckets = self.buckets + buckets - old.size();
        [self.segments[at]] = new;
    }

    /// Splits a segment by the next bit. Returns false if nearly all entries would be in one half, since many have the same hash.
    fn split(&mut self, skewed: u64, at: usize, hashes: &impl Hashes) -> bool {
        let old = &self.segments[at];
        let (size, depth, base) = (old.size(), old.depth() + 1, old.base());
        let more = old.second_half_len();
        let used = [old.used() - more, more];
        if used.iter().any(|half| half * 8 < old.used()) {
            return false;
        }
        // A half of a wide segment does not always fit in `SEGMENT_BUCKETS` buckets.
        let half = |used: usize| {
            if size == WIDE_BUCKETS && Segment::fits(used, SEGMENT_BUCKETS) {
                SEGMENT_BUCKETS
            } else {
                size
            }
        };
        let sizes = used.map(half);
        let mut halves = sizes.map(|size| Segment::new(size, depth, base));
        old.copy_into(&mut halves, used);
        if halves[0].are_tags_used_up() {
            halves.iter_mut().for_each(|half| half.compute_tags(depth, hashes));
        }
        if depth > self.depth {
            self.directory = self.directory.iter().flat_map(|&segment| [segment, segment]).collect();
            self.depth = depth;
        }
        let [low, high] = halves;
        self.segments[at] = low;
        if self.segments.len() == self.segments.capacity() {
            self.segments.reserve_exact(self.segments.len().div_ceil(8));
        }
        self.segments.push(high);
        self.buckets = self.buckets + sizes[0] + sizes[1] - size;
        let number = (self.segments.len() - 1) as u32;
        let (first, span) = self.directory_range(skewed, depth - 1);
        self.directory[first + span / 2..first + span].fill(number);
        true
    }

    /// The range of directory entries whose indices share the first `depth` bits of a hash: the first index, and the number of entries.
    fn directory_range(&self, skewed: u64, depth: u32) -> (usize, usize) {
        let span = 1 << (self.depth - depth);
        (self.entry(skewed) & !(span - 1), span)
    }

    #[cold]
    fn shrink(&mut self, skewed: u64, at: usize, hashes: &impl Hashes) {
        let segment = &self.segments[at];
        let (used, depth, size) = (segment.used(), segment.depth(), segment.size());
        if size > SEGMENT_BUCKETS || (depth == 0 && size > 1) {
            if size == WIDE_BUCKETS || Segment::may_shrink(used, size / 2) {
                self.refit(at, if size == WIDE_BUCKETS { SEGMENT_BUCKETS } else { size / 2 });
            }
            return;
        }
        if depth == 0 {
            return;
        }
        let (first, span) = self.directory_range(skewed, depth - 1);
        let pair = [self.directory[first] as usize, self.directory[first + span / 2] as usize];
        let same = pair
            .iter()
            .all(|&half| self.segments[half].depth() == depth && self.segments[half].size() == SEGMENT_BUCKETS);
        if !same || !Segment::may_shrink(self.segments[pair[0]].used() + self.segments[pair[1]].used(), SEGMENT_BUCKETS) {
            return;
        }
        // Both halves need tags of the same bits, including the bit that the halves no longer share.
        let [base, other] = pair.map(|half| self.segments[half].base());
        let base = if base == other { base.min(depth - 1) } else { depth - 1 };
        let mut merged = [Segment::new(SEGMENT_BUCKETS, depth - 1, base)];
        for half in pair {
            let half = &mut self.segments[half];
            if half.base() != base {
                half.compute_tags(base, hashes);
            }
            half.copy_into(&mut merged, [half.used()]);
        }
        [self.segments[pair[0]]] = merged;
        self.directory[first..first + span].fill(pair[0] as u32);
        self.buckets -= SEGMENT_BUCKETS;
        self.drop_segment(pair[1], hashes);
        self.halve_directory();
    }

    /// Removes a segment; the last segment takes its number.
    fn drop_segment(&mut self, number: usize, hashes: &impl Hashes) {
        let last = self.segments.len() - 1;
        self.segments.swap_remove(number);
        if number != last {
            // Every segment has an entry if the table ever had one; for a segment without an entry, the directory is searched.
            let moved = &self.segments[number];
            let depth = moved.depth();
            match moved.records().next() {
                Some(record) => {
                    let (first, span) = self.directory_range(skew(hashes.hash_of(record)), depth);
                    self.directory[first..first + span].fill(number as u32);
                }
                None => self
                    .directory
                    .iter_mut()
                    .filter(|entry| **entry == last as u32)
                    .for_each(|entry| *entry = number as u32),
            }
        }
        if self.segments.capacity() > 4 * self.segments.len() {
            self.segments.shrink_to(2 * self.segments.len());
        }
    }

    /// Halves the directory if it has four times as many entries as there are segments.
    fn halve_directory(&mut self) {
        while self.directory.len() > 4 * self.segments.len() && self.directory.chunks_exact(2).all(|pair| pair[0] == pair[1]) {
            self.directory = self.directory.chunks_exact(2).map(|pair| pair[0]).collect();
            self.depth -= 1;
        }
    }
}
