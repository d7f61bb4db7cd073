//! The segments of a table: rows of buckets whose entries share the first bits of their hashes.

use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};

use crate::memory::page_pool::Piece;

use super::{Hashes, skew};

/// Number of entries of a bucket.
const BUCKET_ENTRIES: usize = 10;
/// Number of buckets of a segment; only the single segment of a small table has fewer.
pub const SEGMENT_BUCKETS: usize = 32;
/// Number of buckets to which a segment of a dense table grows before it is split.
pub const WIDE_BUCKETS: usize = 48;
/// Average number of entries per bucket at which a segment is split or grows.
const MAX_LOAD: usize = 9;
/// Average number of entries per bucket below which two segments are merged, or one segment shrinks.
const MIN_LOAD: usize = 6;
/// Number of splits after which tags must be computed again, since each split uses one bit of the tags.
const SPLITS_BY_TAG: u8 = 4;
/// Number of bits of a hash that select the home bucket in a segment: the bits of a tag that no split has used.
const HOME_BITS: u32 = 16 - SPLITS_BY_TAG as u32 - 1;
/// Mask of the `HOME_BITS` bits in a tag, after the bits that splits have used were shifted out.
const HOME_MASK: u16 = u16::MAX << (16 - HOME_BITS);

/// A bucket of one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct Bucket {
    tags: [u16; BUCKET_ENTRIES],
    used: u16,
    /// Number of entries that are in later buckets because this bucket was full when they were added. At its maximum, the number is not
    /// changed any more.
    sent_on: u16,
    records: [u32; BUCKET_ENTRIES],
}

const EMPTY: Bucket = Bucket {
    tags: [0; BUCKET_ENTRIES],
    used: 0,
    sent_on: 0,
    records: [0; BUCKET_ENTRIES],
};

impl Bucket {
    /// A bit mask of the entries with this tag.
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
        let mask = (0..BUCKET_ENTRIES).fold(0, |mask, at| mask | u32::from(self.tags[at] == tag) << at);
        mask & ((1 << self.used) - 1)
    }

    /// Removes an entry. Returns false if the bucket does not contain the entry.
    #[inline]
    fn take(&mut self, tag: u16, record: u32) -> bool {
        let mut matches = self.matches(tag);
        while matches != 0 {
            let way = matches.trailing_zeros() as usize;
            matches &= matches - 1;
            if self.records[way] == record {
                let last = self.used as usize - 1;
                self.tags[way] = self.tags[last];
                self.records[way] = self.records[last];
                self.used -= 1;
                return true;
            }
        }
        false
    }

    /// Adds an entry. Returns false if the bucket is full.
    #[inline]
    fn put(&mut self, tag: u16, record: u32) -> bool {
        let used = self.used as usize;
        if used >= BUCKET_ENTRIES {
            return false;
        }
        self.tags[used] = tag;
        self.records[used] = record;
        self.used += 1;
        true
    }
}

/// The buckets of a segment: a piece of the page pool, or a separate allocation if no piece has that size. A pointer is used, since an enum
/// would need a branch at each access.
struct Buckets {
    at: NonNull<Bucket>,
    count: u32,
}

// SAFETY: the value owns its buckets, as a box does.
unsafe impl Send for Buckets {}
// SAFETY: as above.
unsafe impl Sync for Buckets {}

impl Buckets {
    fn new(count: usize) -> Self {
        let at = match count {
            SEGMENT_BUCKETS => Piece::<Bucket, SEGMENT_BUCKETS>::from_value(EMPTY).into_raw(),
            WIDE_BUCKETS => Piece::<Bucket, WIDE_BUCKETS>::from_value(EMPTY).into_raw(),
            _ => NonNull::from(Box::leak(vec![EMPTY; count].into_boxed_slice())).cast(),
        };
        Self { at, count: count as u32 }
    }

    /// Puts an entry into a later bucket, since its home bucket is full.
    #[cold]
    fn put_after_home(&mut self, home: usize, tag: u16, record: u32) {
        let mut at = home;
        while !self[at].put(tag, record) {
            self[at].sent_on = self[at].sent_on.saturating_add(1);
            at = if at + 1 == self.len() { 0 } else { at + 1 };
        }
    }
}

impl Drop for Buckets {
    fn drop(&mut self) {
        // SAFETY: `new` has allocated the buckets, in the one of these three ways that belongs to their count.
        unsafe {
            match self.count as usize {
                SEGMENT_BUCKETS => drop(Piece::<Bucket, SEGMENT_BUCKETS>::from_raw(self.at)),
                WIDE_BUCKETS => drop(Piece::<Bucket, WIDE_BUCKETS>::from_raw(self.at)),
                count => drop(Box::from_raw(ptr::slice_from_raw_parts_mut(self.at.as_ptr(), count))),
            }
        }
    }
}

impl Deref for Buckets {
    type Target = [Bucket];

    #[inline]
    fn deref(&self) -> &[Bucket] {
        // SAFETY: the value owns `count` buckets, which were written when they were created.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.count as usize) }
    }
}

impl DerefMut for Buckets {
    #[inline]
    fn deref_mut(&mut self) -> &mut [Bucket] {
        // SAFETY: as in `deref`, and no other reference to the buckets exists.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.count as usize) }
    }
}

/// A segment of a table.
pub struct Segment {
    buckets: Buckets,
    used: u32,
    /// Number of leading bits that the skewed hashes of all entries of the segment share.
    depth: u8,
    /// Number of leading bits of a skewed hash before its tag.
    base: u8,
}

impl Segment {
    pub fn new(buckets: usize, depth: u32, base: u32) -> Self {
        Self {
            buckets: Buckets::new(buckets),
            used: 0,
            depth: depth as u8,
            base: base as u8,
        }
    }

    /// Number of buckets.
    pub fn size(&self) -> usize {
        self.buckets.len()
    }

    pub fn used(&self) -> usize {
        self.used as usize
    }

    pub fn depth(&self) -> u32 {
        u32::from(self.depth)
    }

    pub fn base(&self) -> u32 {
        u32::from(self.base)
    }

    /// Whether `buckets` buckets with `used` entries have room for another entry.
    #[inline]
    pub fn fits(used: usize, buckets: usize) -> bool {
        used < buckets * MAX_LOAD
    }

    /// Whether there is room for one more entry.
    #[inline]
    pub fn has_room(&self) -> bool {
        Self::fits(self.used(), self.size())
    }

    /// Whether a segment with `used` entries may shrink to `buckets` buckets.
    pub fn may_shrink(used: usize, buckets: usize) -> bool {
        used < buckets * MIN_LOAD
    }

    #[inline]
    pub fn tag(&self, skewed: u64) -> u16 {
        (skewed << self.base >> 48) as u16
    }

    /// The home bucket of a hash. The home bucket depends only on bits that are in the tag both before and after a computation of new tags.
    #[inline]
    pub fn home(&self, skewed: u64) -> usize {
        (((skewed << self.depth) >> (64 - HOME_BITS)) as usize * self.buckets.len()) >> HOME_BITS
    }

    /// The bucket with the index `home`.
    #[inline]
    pub fn bucket(&self, home: usize) -> *const Bucket {
        ptr::from_ref(&self.buckets[home])
    }

    /// Visits the records with a tag, from the home bucket on, until `visit` returns false.
    #[inline]
    pub fn for_each_match(&self, home: usize, tag: u16, mut visit: impl FnMut(u32) -> bool) {
        let mut at = home;
        loop {
            let bucket = &self.buckets[at];
            let mut matches = bucket.matches(tag);
            while matches != 0 {
                if !visit(bucket.records[matches.trailing_zeros() as usize]) {
                    return;
                }
                matches &= matches - 1;
            }
            at = if at + 1 == self.buckets.len() { 0 } else { at + 1 };
            if bucket.sent_on == 0 || at == home {
                return;
            }
        }
    }

    /// Adds an entry; the segment must have room.
    #[inline]
    pub fn put(&mut self, home: usize, tag: u16, record: u32) {
        self.used += 1;
        if !self.buckets[home].put(tag, record) {
            self.buckets.put_after_home(home, tag, record);
        }
    }

    /// Removes an entry with this tag, searching from the home bucket on. Returns false if the segment has no such entry.
    #[inline]
    pub fn take(&mut self, home: usize, tag: u16, record: u32) -> bool {
        let bucket = &mut self.buckets[home];
        let found = bucket.take(tag, record) || (bucket.sent_on > 0 && self.take_after_home(home, tag, record));
        self.used -= u32::from(found);
        found
    }

    /// Removes an entry that is in a later bucket than its home.
    #[cold]
    fn take_after_home(&mut self, home: usize, tag: u16, record: u32) -> bool {
        let size = self.buckets.len();
        let behind = |step: usize| if home + step < size { home + step } else { home + step - size };
        for step in 1..size {
            let bucket = &mut self.buckets[behind(step)];
            if bucket.take(tag, record) {
                for passed in 0..step {
                    let before = &mut self.buckets[behind(passed)];
                    before.sent_on -= u16::from(before.sent_on != u16::MAX);
                }
                return true;
            }
            if bucket.sent_on == 0 {
                return false;
            }
        }
        false
    }

    pub fn records(&self) -> impl Iterator<Item = u32> + '_ {
        self.buckets
            .iter()
            .flat_map(|bucket| bucket.records[..bucket.used as usize].iter().copied())
    }

    // --- moving entries to the buckets that their tags determine

    /// Number of entries whose first bit after the shared bits is 1.
    pub fn second_half_len(&self) -> usize {
        let bit = 15 - (self.depth - self.base);
        let ones = |bucket: &Bucket| {
            let counted = bucket.tags.iter().enumerate();
            let ones = counted.map(|(way, tag)| tag >> bit & u16::from(way < bucket.used as usize));
            usize::from(ones.sum::<u16>())
        };
        self.buckets.iter().map(ones).sum()
    }

    /// Copies all entries into one new segment, or into two: then the first bit after the shared bits selects the segment. `used` is the
    /// number of entries that each new segment gets. Tags do not change.
    pub fn copy_into<const N: usize>(&self, into: &mut [Self; N], used: [usize; N]) {
        let bit = 15 - (self.depth - self.base);
        let passed = into[0].depth - self.base;
        let mut halves = into.each_mut().map(|half| &mut half.buckets);
        let sizes = halves.each_ref().map(|buckets| buckets.count);
        let half_of = |tag: u16| if N == 1 { 0 } else { usize::from(tag >> bit & 1) };
        for bucket in self.buckets.iter() {
            // The calculation of `home`, in a form that compilers vectorise.
            let homes = bucket.tags.map(|tag| {
                let size = if half_of(tag) == 0 { sizes[0] } else { sizes[N - 1] };
                ((u32::from(tag << passed & HOME_MASK) * size) >> 16) as usize
            });
            for ((&tag, &record), home) in bucket.tags.iter().zip(&bucket.records).zip(homes).take(bucket.used as usize) {
                let buckets = &mut halves[half_of(tag)];
                if !buckets[home].put(tag, record) {
                    buckets.put_after_home(home, tag, record);
                }
            }
        }
        for (half, used) in into.iter_mut().zip(used) {
            half.used += used as u32;
        }
    }

    /// Whether the tags have no bit for another split.
    pub fn are_tags_used_up(&self) -> bool {
        self.depth - self.base > SPLITS_BY_TAG
    }

    /// Computes all tags again, from the bits after the first `base` bits. The hashes are read from the records, which are scattered in
    /// memory, so all records are prefetched first.
    pub fn compute_tags(&mut self, base: u32, hashes: &impl Hashes) {
        self.records().for_each(|record| hashes.prefetch(record));
        self.base = base as u8;
        for bucket in self.buckets.iter_mut() {
            for (tag, &record) in bucket.tags.iter_mut().zip(&bucket.records).take(bucket.used as usize) {
                *tag = (skew(hashes.hash_of(record)) << base >> 48) as u16;
            }
        }
    }
}
