//! A compact multiset of record numbers, found by hashes that are not stored.
//!
//! Buckets are one cache line: 10 tags of 16 bits and 10 numbers. A full bucket overflows into the next ones, and counts what it has sent
//! on, so that a search for what is not there ends early. Buckets stand in segments of `SEGMENT`, found by a directory over the first
//! bits of the hash (extendible hashing); a full segment splits in two. Were all of them equally full, all would split at once and the
//! table would be half empty afterwards. So hashes are first bent, which makes the segments of one end of the directory fill up to
//! twice as fast as those of the other: at any size some have just been split and others are about to be, and the table takes about
//! 10.5 bytes an entry always. A dense table has a size of segments between, and takes about 8.5. Tags are the bits of the hash behind
//! those that a segment was found by, so three splits of four need no hashes from the records, which would be a cache miss each. No
//! single operation moves more than a segment, apart from the doubling of the directory.

use std::ops::{Deref, DerefMut};
use std::ptr;

use crate::pages::{Piece, Pooled, Sizes};

/// Entries of a bucket.
const WAYS: usize = 10;
/// Buckets of a segment that is not small.
const SEGMENT: usize = 32;
/// Buckets of a segment that is about to be split, in a dense table.
const WIDE: usize = 48;
/// Entries for each bucket above which a segment is split or grows.
const FULL_PER_MILLE: usize = 900;
/// The same below which two segments become one, or one becomes smaller.
const SPARSE_PER_MILLE: usize = 600;
/// Splits after which tags are taken anew, since those use up their bits.
const SPLITS_BY_TAG: u32 = 3;
/// Bits of a hash that tell a bucket from the others of its segment.
const HOME_BITS: u32 = 16 - SPLITS_BY_TAG - 1;
/// Bits of the directory: segments above it grow instead of being split.
const MAX_DEPTH: u32 = 30;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Bucket {
    tags: [u16; WAYS],
    used: u16,
    /// Entries that should be here and are in a later bucket; it sticks at the maximum.
    sent_on: u16,
    records: [u32; WAYS],
}

const EMPTY: Bucket = Bucket {
    tags: [0; WAYS],
    used: 0,
    sent_on: 0,
    records: [0; WAYS],
};

impl Bucket {
    /// A bit for each entry with this tag.
    #[inline]
    fn matches(&self, tag: u16) -> u32 {
        #[cfg(target_arch = "x86_64")]
        let mask = {
            use std::arch::x86_64::{
                __m128i, _mm_cmpeq_epi16, _mm_loadu_si128, _mm_movemask_epi8, _mm_packs_epi16, _mm_set1_epi16,
            };
            let line = ptr::from_ref(self).cast::<__m128i>();
            // SAFETY: SSE2 is part of x86_64, and the 32 bytes are the first of this bucket's 64.
            unsafe {
                let wanted = _mm_set1_epi16(tag.cast_signed());
                let low = _mm_cmpeq_epi16(_mm_loadu_si128(line), wanted);
                let high = _mm_cmpeq_epi16(_mm_loadu_si128(line.add(1)), wanted);
                _mm_movemask_epi8(_mm_packs_epi16(low, high)) as u32
            }
        };
        #[cfg(not(target_arch = "x86_64"))]
        let mask = (0..WAYS).fold(0, |mask, at| mask | u32::from(self.tags[at] == tag) << at);
        mask & ((1 << self.used) - 1)
    }
}

impl Pooled<SEGMENT> for Bucket {
    fn pool() -> &'static Sizes {
        static POOL: Sizes = Sizes::new(SEGMENT * size_of::<Bucket>());
        &POOL
    }
}

impl Pooled<WIDE> for Bucket {
    fn pool() -> &'static Sizes {
        static POOL: Sizes = Sizes::new(WIDE * size_of::<Bucket>());
        &POOL
    }
}

/// The buckets of a segment: a piece, or for other sizes memory of their own.
enum Buckets {
    Piece(Piece<Bucket, SEGMENT>),
    Wide(Piece<Bucket, WIDE>),
    Own(Box<[Bucket]>),
}

impl Deref for Buckets {
    type Target = [Bucket];

    #[inline]
    fn deref(&self) -> &[Bucket] {
        match self {
            Self::Piece(buckets) => buckets,
            Self::Wide(buckets) => buckets,
            Self::Own(buckets) => buckets,
        }
    }
}

impl DerefMut for Buckets {
    #[inline]
    fn deref_mut(&mut self) -> &mut [Bucket] {
        match self {
            Self::Piece(buckets) => buckets,
            Self::Wide(buckets) => buckets,
            Self::Own(buckets) => buckets,
        }
    }
}

struct Segment {
    buckets: Buckets,
    used: usize,
    /// Leading bits of bent hashes that all of its entries share.
    depth: u32,
    /// The bits behind this many are the tags.
    base: u32,
}

impl Segment {
    fn new(buckets: usize, depth: u32, base: u32) -> Self {
        let buckets = match buckets {
            SEGMENT => Buckets::Piece(Piece::filled(EMPTY)),
            WIDE => Buckets::Wide(Piece::filled(EMPTY)),
            other => Buckets::Own(vec![EMPTY; other].into_boxed_slice()),
        };
        Self {
            buckets,
            used: 0,
            depth,
            base,
        }
    }

    fn room(&self) -> usize {
        self.buckets.len() * WAYS
    }

    #[inline]
    fn tag(&self, bent: u64) -> u16 {
        (bent << self.base >> 48) as u16
    }

    /// By bits that are part of the tag whether it was just taken or is about to be, so that it never depends on which.
    #[inline]
    fn home(&self, bent: u64) -> usize {
        (((bent << self.depth) >> (64 - HOME_BITS)) as usize * self.buckets.len()) >> HOME_BITS
    }

    #[inline]
    fn put(&mut self, bent: u64, record: u32) {
        let tag = self.tag(bent);
        let mut at = self.home(bent);
        loop {
            let bucket = &mut self.buckets[at];
            let used = bucket.used as usize;
            if used < WAYS {
                bucket.tags[used] = tag;
                bucket.records[used] = record;
                bucket.used += 1;
                self.used += 1;
                return;
            }
            bucket.sent_on = bucket.sent_on.saturating_add(1);
            at = if at + 1 == self.buckets.len() { 0 } else { at + 1 };
        }
    }

    fn take(&mut self, bent: u64, record: u32) -> bool {
        let (tag, home, size) = (self.tag(bent), self.home(bent), self.buckets.len());
        let behind = |step: usize| if home + step < size { home + step } else { home + step - size };
        for step in 0..size {
            let bucket = &mut self.buckets[behind(step)];
            let mut matches = bucket.matches(tag);
            while matches != 0 {
                let way = matches.trailing_zeros() as usize;
                matches &= matches - 1;
                if bucket.records[way] == record {
                    let last = bucket.used as usize - 1;
                    bucket.tags[way] = bucket.tags[last];
                    bucket.records[way] = bucket.records[last];
                    bucket.used -= 1;
                    self.used -= 1;
                    for passed in 0..step {
                        let before = &mut self.buckets[behind(passed)];
                        before.sent_on -= u16::from(before.sent_on != u16::MAX);
                    }
                    return true;
                }
            }
            if bucket.sent_on == 0 {
                return false;
            }
        }
        false
    }

    fn records(&self) -> impl Iterator<Item = u32> + '_ {
        self.buckets
            .iter()
            .flat_map(|bucket| bucket.records[..bucket.used as usize].iter().copied())
    }
}

/// The full hashes of entries, which their records know.
pub trait Hashes {
    /// Of one record.
    fn hash_of(&self, record: u32) -> u64;

    /// Asks for the memory of a record whose hash is wanted soon.
    fn prefetch(&self, record: u32) {
        let _ = record;
    }
}

impl<F: Fn(u32) -> u64> Hashes for F {
    fn hash_of(&self, record: u32) -> u64 {
        self(record)
    }
}

/// Bends a hash, keeping its order: beginnings that are small come twice as often as those that are great.
#[inline]
fn bent(hash: u64) -> u64 {
    let high = |a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64;
    const THIRD: u64 = u64::MAX / 3;
    high(hash, 2 * THIRD) + high(high(hash, hash), THIRD)
}

/// A hash, ready to be looked for.
#[derive(Clone, Copy, Debug)]
pub struct Spot {
    bent: u64,
}

impl From<u64> for Spot {
    #[inline]
    fn from(hash: u64) -> Self {
        Self { bent: bent(hash) }
    }
}

/// What `Table::prefetch` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Stage {
    Directory,
    Segment,
    Bucket,
}

/// See the module.
pub struct Table {
    /// Numbers in `segments`, by the first `depth` bits.
    directory: Vec<u32>,
    segments: Vec<Segment>,
    depth: u32,
    len: usize,
    buckets: usize,
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
    /// An empty one, which takes no memory.
    pub const fn new() -> Self {
        Self {
            directory: Vec::new(),
            segments: Vec::new(),
            depth: 0,
            len: 0,
            buckets: 0,
            dense: false,
        }
    }

    /// An empty one that takes about 8.5 bytes an entry instead of 10.5, for one move more of each.
    pub fn dense() -> Self {
        Self {
            dense: true,
            ..Self::new()
        }
    }

    /// Entries.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.buckets * size_of::<Bucket>() + self.segments.capacity() * size_of::<Segment>() + self.directory.capacity() * 4
    }

    #[inline]
    fn at(&self, bent: u64) -> usize {
        // Two shifts, since one by 64 is none.
        self.directory[(bent >> 1 >> (63 - self.depth)) as usize] as usize
    }

    /// Asks for the memory that leads to a hash: first its place in the directory, when that is here its segment, and then its bucket.
    /// In a large table each of them is a cache miss that the next one needs.
    #[inline]
    pub fn prefetch(&self, spot: Spot, stage: Stage) {
        #[cfg(target_arch = "x86_64")]
        if !self.directory.is_empty() {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let at = (spot.bent >> 1 >> (63 - self.depth)) as usize;
            let wanted: *const i8 = match stage {
                Stage::Directory => ptr::from_ref(&self.directory[at]).cast(),
                Stage::Segment => ptr::from_ref(&self.segments[self.directory[at] as usize]).cast(),
                Stage::Bucket => {
                    let segment = &self.segments[self.directory[at] as usize];
                    ptr::from_ref(&segment.buckets[segment.home(spot.bent)]).cast()
                }
            };
            // SAFETY: a prefetch is a hint, and all of these are there.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(wanted) };
        }
    }

    /// Visits records whose hash may be this one, until `visit` says false.
    #[inline]
    pub fn for_each_match(&self, spot: impl Into<Spot>, mut visit: impl FnMut(u32) -> bool) {
        if self.directory.is_empty() {
            return;
        }
        let Spot { bent } = spot.into();
        let segment = &self.segments[self.at(bent)];
        let (mut at, tag) = (segment.home(bent), segment.tag(bent));
        for _ in 0..segment.buckets.len() {
            let bucket = &segment.buckets[at];
            let mut matches = bucket.matches(tag);
            while matches != 0 {
                if !visit(bucket.records[matches.trailing_zeros() as usize]) {
                    return;
                }
                matches &= matches - 1;
            }
            if bucket.sent_on == 0 {
                return;
            }
            at = if at + 1 == segment.buckets.len() { 0 } else { at + 1 };
        }
    }

    /// The first record whose hash may be this one and that `fits`.
    #[inline]
    pub fn find(&self, spot: impl Into<Spot>, mut fits: impl FnMut(u32) -> bool) -> Option<u32> {
        let mut found = None;
        self.for_each_match(spot, |record| {
            if fits(record) {
                found = Some(record);
            }
            found.is_none()
        });
        found
    }

    /// Adds an entry. `hashes` are those of entries that have to move.
    #[inline]
    pub fn insert(&mut self, spot: impl Into<Spot>, record: u32, hashes: &impl Hashes) {
        let Spot { bent } = spot.into();
        loop {
            if !self.directory.is_empty() {
                let at = self.at(bent);
                let segment = &mut self.segments[at];
                if segment.used * 1000 < segment.room() * FULL_PER_MILLE {
                    segment.put(bent, record);
                    self.len += 1;
                    return;
                }
            }
            self.make_room(bent, hashes);
        }
    }

    /// Removes an entry; false if there is none.
    #[inline]
    pub fn remove(&mut self, spot: impl Into<Spot>, record: u32, hashes: &impl Hashes) -> bool {
        if self.directory.is_empty() {
            return false;
        }
        let Spot { bent } = spot.into();
        let at = self.at(bent);
        let segment = &mut self.segments[at];
        if !segment.take(bent, record) {
            return false;
        }
        self.len -= 1;
        if self.len == 0 {
            self.clear();
        } else if segment.used * 1000 < segment.room() * (SPARSE_PER_MILLE / 2) {
            self.shrink(bent, at, hashes);
        }
        true
    }

    /// Everything, in no order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.segments.iter().flat_map(Segment::records)
    }

    /// Forgets everything, and gives the memory back.
    pub fn clear(&mut self) {
        *self = Self {
            dense: self.dense,
            ..Self::new()
        };
    }

    // --- growing and shrinking

    #[cold]
    fn make_room(&mut self, bent: u64, hashes: &impl Hashes) {
        if self.directory.is_empty() {
            self.directory = vec![0];
            self.segments.push(Segment::new(1, 0, 0));
            self.buckets = 1;
            return;
        }
        let at = self.at(bent);
        let (size, depth) = (self.segments[at].buckets.len(), self.segments[at].depth);
        if self.dense && size == SEGMENT {
            self.refit(bent, at, WIDE, hashes);
        } else if size < SEGMENT || depth >= MAX_DEPTH || !self.split(bent, at, hashes) {
            // A wide segment that cannot be split goes on from a power of two.
            self.refit(bent, at, if size == WIDE { 2 * SEGMENT } else { size * 2 }, hashes);
        }
    }

    /// Entries of a segment with their bent hashes, as far as a segment of `depth` and that size needs them, and the base of their
    /// tags. `bent` is one of them. Where tags do not tell enough, the records do; they lie anywhere, so all are asked for before any
    /// is read.
    fn entries(&self, bent_hash: u64, at: usize, depth: u32, size: usize, hashes: &impl Hashes) -> (Vec<(u64, u32)>, u32) {
        let segment = &self.segments[at];
        let mut entries = Vec::with_capacity(segment.used);
        if size <= WIDE && depth >= segment.base && depth - segment.base <= SPLITS_BY_TAG {
            let shared = if segment.base == 0 {
                0
            } else {
                bent_hash & !(u64::MAX >> segment.base)
            };
            for bucket in segment.buckets.iter() {
                for (&tag, &record) in bucket.tags.iter().zip(&bucket.records).take(bucket.used as usize) {
                    entries.push((shared | u64::from(tag) << 48 >> segment.base, record));
                }
            }
            return (entries, segment.base);
        }
        for record in segment.records() {
            hashes.prefetch(record);
            entries.push((0, record));
        }
        for (bent_hash, record) in &mut entries {
            *bent_hash = bent(hashes.hash_of(*record));
        }
        (entries, depth)
    }

    fn refit(&mut self, bent: u64, at: usize, buckets: usize, hashes: &impl Hashes) {
        let (depth, before) = (self.segments[at].depth, self.segments[at].buckets.len());
        let (entries, base) = self.entries(bent, at, depth, buckets, hashes);
        let mut new = Segment::new(buckets, depth, base);
        for (bent, record) in entries {
            new.put(bent, record);
        }
        self.buckets = self.buckets + buckets - before;
        self.segments[at] = new;
    }

    /// Splits a segment by the next bit. False when that would not help: many entries have the same hash.
    fn split(&mut self, bent: u64, at: usize, hashes: &impl Hashes) -> bool {
        let (size, depth) = (self.segments[at].buckets.len(), self.segments[at].depth + 1);
        let (entries, base) = self.entries(bent, at, depth, size, hashes);
        let second = |bent: u64| bent >> (64 - depth) & 1 == 1;
        let more = entries.iter().filter(|entry| second(entry.0)).count();
        if more.min(entries.len() - more) * 8 < entries.len() {
            return false;
        }
        if depth > self.depth {
            self.directory = self.directory.iter().flat_map(|&segment| [segment, segment]).collect();
            self.depth = depth;
        }
        // Halves of a wide segment are not always small enough for narrow ones.
        let half = |used: usize| {
            if size == WIDE && used * 1000 < SEGMENT * WAYS * FULL_PER_MILLE {
                SEGMENT
            } else {
                size
            }
        };
        let sizes = [half(entries.len() - more), half(more)];
        let mut halves = sizes.map(|size| Segment::new(size, depth, base));
        for (bent, record) in entries {
            halves[usize::from(second(bent))].put(bent, record);
        }
        let [low, high] = halves;
        self.segments[at] = low;
        if self.segments.len() == self.segments.capacity() {
            self.segments.reserve_exact(self.segments.len().div_ceil(8));
        }
        self.segments.push(high);
        self.buckets = self.buckets + sizes[0] + sizes[1] - size;
        let number = (self.segments.len() - 1) as u32;
        let (first, span) = self.span(bent, depth - 1);
        self.directory[first + span / 2..first + span].fill(number);
        true
    }

    /// The part of the directory that shares the first `depth` bits of a hash.
    fn span(&self, bent: u64, depth: u32) -> (usize, usize) {
        let span = 1 << (self.depth - depth);
        ((bent >> 1 >> (63 - self.depth)) as usize & !(span - 1), span)
    }

    #[cold]
    fn shrink(&mut self, bent: u64, at: usize, hashes: &impl Hashes) {
        let Segment { used, depth, .. } = self.segments[at];
        let size = self.segments[at].buckets.len();
        let fits = |used: usize, size: usize| used * 1000 < size * WAYS * SPARSE_PER_MILLE;
        if size > SEGMENT || (depth == 0 && size > 1) {
            if size == WIDE || fits(used, size / 2) {
                self.refit(bent, at, if size == WIDE { SEGMENT } else { size / 2 }, hashes);
            }
            return;
        }
        if depth == 0 {
            return;
        }
        let (first, span) = self.span(bent, depth - 1);
        let pair = [self.directory[first] as usize, self.directory[first + span / 2] as usize];
        let same = pair
            .iter()
            .all(|&half| self.segments[half].depth == depth && self.segments[half].buckets.len() == SEGMENT);
        if !same || !fits(self.segments[pair[0]].used + self.segments[pair[1]].used, SEGMENT) {
            return;
        }
        // The pair differs in the bit before the last that both share; of the other half only that one is known.
        let bit = 1 << (64 - depth);
        let (mut entries, base) = self.entries(bent & !bit, pair[0], depth - 1, SEGMENT, hashes);
        let (more, other) = self.entries(bent | bit, pair[1], depth - 1, SEGMENT, hashes);
        entries.extend(more);
        let mut merged = Segment::new(SEGMENT, depth - 1, base);
        if base != other {
            entries
                .iter_mut()
                .for_each(|(known, record)| *known = self::bent(hashes.hash_of(*record)));
            merged.base = depth - 1;
        }
        for (bent, record) in entries {
            merged.put(bent, record);
        }
        self.segments[pair[0]] = merged;
        self.directory[first..first + span].fill(pair[0] as u32);
        self.buckets -= SEGMENT;
        self.drop_segment(pair[1], hashes);
        self.narrow();
    }

    /// The last segment takes the place of one that is gone.
    fn drop_segment(&mut self, gone: usize, hashes: &impl Hashes) {
        let last = self.segments.len() - 1;
        self.segments.swap_remove(gone);
        if gone != last {
            // Segments hold at least one entry, unless nothing was ever put there; then the directory is searched.
            let moved = &self.segments[gone];
            let depth = moved.depth;
            match moved.records().next() {
                Some(record) => {
                    let (first, span) = self.span(bent(hashes.hash_of(record)), depth);
                    self.directory[first..first + span].fill(gone as u32);
                }
                None => self
                    .directory
                    .iter_mut()
                    .filter(|number| **number == last as u32)
                    .for_each(|number| *number = gone as u32),
            }
        }
        if self.segments.capacity() > 4 * self.segments.len() {
            self.segments.shrink_to(2 * self.segments.len());
        }
    }

    /// Halves the directory where it is four times as large as there are segments.
    fn narrow(&mut self) {
        while self.directory.len() > 4 * self.segments.len() && self.directory.chunks_exact(2).all(|pair| pair[0] == pair[1]) {
            self.directory = self.directory.chunks_exact(2).map(|pair| pair[0]).collect();
            self.depth -= 1;
        }
    }
}
