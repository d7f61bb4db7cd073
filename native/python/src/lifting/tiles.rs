//! Numbers of a stretch of text, with AVX2.
//!
//! First all the places where numbers begin are found, by comparing bytes; then eight numbers at once are made of the digits that are
//! there. Neither has a branch that depends on how long a number is, and no number waits for the one before.

use std::arch::x86_64::*;

use super::gap;

/// Bytes that are looked at before numbers are made.
const TILE: usize = 1024;

/// Bytes of a machine word of marks.
const BLOCK: usize = 64;

/// Numbers that are made at once.
const GROUP: usize = 8;

/// Most numbers of a block: one with its comma has two bytes.
const MOST: usize = BLOCK / 2;

/// A tile, and what can be read from where its last number begins.
type Window = [u8; TILE + 8];

/// Whether this processor has what this takes.
pub(super) fn able() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("popcnt")
}

/// See `Quick`. The processor must be able.
pub(super) fn read(text: &[u8], end: usize, tokens: &mut Vec<u32>) -> usize {
    assert!(able());
    match gap(text, end).filter(|_| text.len() - end > BLOCK) {
        // SAFETY: it has what this takes.
        Some(gap) => unsafe { read_able(text, end, gap, tokens) },
        None => end,
    }
}

#[target_feature(enable = "avx2,bmi1,popcnt")]
fn read_able(text: &[u8], mut end: usize, gap: usize, tokens: &mut Vec<u32>) -> usize {
    let mut starts = Starts::new();
    let mut found = [0; TILE / 2];
    loop {
        let Some(rest) = text.get(end + gap..) else {
            return end;
        };
        let last;
        let window = match rest.first_chunk() {
            Some(window) => window,
            None => {
                last = padded(rest);
                &last
            }
        };
        let count = starts.find(window, gap) / GROUP * GROUP;
        let read = starts.numbers(window, gap, &mut found[..count]);
        tokens.extend_from_slice(&found[..read]);
        end += usize::from(starts.0[read]);
        if read == 0 || read < count {
            return end;
        }
    }
}

/// The end of a text, with zeros behind it: neither digits nor separators.
fn padded(rest: &[u8]) -> Window {
    let mut window = [0; TILE + 8];
    window[..rest.len()].copy_from_slice(rest);
    window
}

/// Where the numbers of a tile begin, and, behind the last of them, where the next one may.
struct Starts([u16; TILE / 2 + MOST + 1]);

impl Starts {
    fn new() -> Self {
        Self([0; TILE / 2 + MOST + 1])
    }

    /// Finds them up to the first block that has anything else than digits and separators of `gap` bytes; how many end there. That
    /// they are short, or have digits at all, is not said.
    #[inline]
    #[target_feature(enable = "avx2,bmi1,popcnt")]
    fn find(&mut self, window: &Window, gap: usize) -> usize {
        let with_space = if gap == 2 { u64::MAX } else { 0 };
        let (mut count, mut pending) = (0, 0);
        for (number, block) in window.as_chunks::<BLOCK>().0.iter().enumerate() {
            let marks = Marks::of(block);
            let spaces = (marks.commas << 1 | pending) & with_space;
            let many = marks.commas.count_ones() as usize;
            if marks.spaces != spaces || marks.others != marks.commas | marks.spaces || many > MOST {
                break;
            }
            let Some(room) = self.0[count + 1..].first_chunk_mut() else {
                break;
            };
            put(marks.commas, number * BLOCK + gap, room);
            pending = marks.commas >> 63 & with_space;
            count += many;
        }
        // A comma is the last byte, and what is behind it is not known.
        count - pending as usize
    }

    /// Makes `found` of them, up to a group with one that is no number, or longer than eight digits; how many are made.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn numbers(&self, window: &Window, gap: usize, found: &mut [u32]) -> usize {
        let gap = _mm_set1_epi16(gap as i16);
        let least = _mm256_setr_epi32(10_000_000, 0, 10, 100, 1_000, 10_000, 100_000, 1_000_000);
        let mut done = 0;
        for (starts, group) in self.0.as_chunks::<GROUP>().0.iter().zip(found.as_chunks_mut::<GROUP>().0) {
            let Some(next) = self.0[done + 1..].first_chunk::<GROUP>() else {
                break;
            };
            // SAFETY: both have room for eight.
            let (from, to) = unsafe { (_mm_loadu_si128(starts.as_ptr().cast()), _mm_loadu_si128(next.as_ptr().cast())) };
            let lengths = _mm_sub_epi16(_mm_sub_epi16(to, from), gap);
            // Zero for those of no digit, or too many: a shift by 64 bits, or by a negative number of them.
            let shifts = _mm_sub_epi16(_mm_set1_epi16(64), _mm_slli_epi16(lengths, 3));
            let [a, b, c, d, e, f, g, h] = starts.map(|start| digits(window, start));
            let low = four_digits(_mm256_setr_epi64x(a, b, c, d), _mm256_cvtepu16_epi64(shifts));
            let high = four_digits(
                _mm256_setr_epi64x(e, f, g, h),
                _mm256_cvtepu16_epi64(_mm_unpackhi_epi64(shifts, shifts)),
            );
            let fours = _mm256_packus_epi32(low, high);
            let numbers = _mm256_madd_epi16(fours, _mm256_set1_epi32(1 << 16 | 10_000));
            let numbers = _mm256_permute4x64_epi64(numbers, 0b11_01_10_00);
            // A smaller one than its length says has a zero in front, or is none.
            let lengths = _mm256_cvtepi16_epi32(lengths);
            let small = _mm256_cmpgt_epi32(_mm256_permutevar8x32_epi32(least, lengths), numbers);
            let long = _mm256_cmpgt_epi32(lengths, _mm256_set1_epi32(8));
            if _mm256_movemask_epi8(_mm256_or_si256(small, long)) != 0 {
                break;
            }
            // SAFETY: it has room for eight.
            unsafe { _mm256_storeu_si256(group.as_mut_ptr().cast(), numbers) };
            done += GROUP;
        }
        done
    }
}

/// A bit for each byte of a block.
struct Marks {
    commas: u64,
    spaces: u64,
    /// All that are no digits.
    others: u64,
}

impl Marks {
    #[inline]
    #[target_feature(enable = "avx2")]
    fn of(block: &[u8; BLOCK]) -> Self {
        // SAFETY: the two halves of the block.
        let halves = unsafe {
            [
                _mm256_loadu_si256(block.as_ptr().cast()),
                _mm256_loadu_si256(block.as_ptr().add(BLOCK / 2).cast()),
            ]
        };
        let marks = |of: [__m256i; 2]| {
            let [low, high] = of.map(|half| u64::from(_mm256_movemask_epi8(half) as u32));
            low | high << 32
        };
        // Bytes are compared as signed ones: "0" becomes the smallest.
        let first = _mm256_set1_epi8((b'0' ^ 0x80) as i8);
        Self {
            commas: marks(halves.map(|half| _mm256_cmpeq_epi8(half, _mm256_set1_epi8(b',' as i8)))),
            spaces: marks(halves.map(|half| _mm256_cmpeq_epi8(half, _mm256_set1_epi8(b' ' as i8)))),
            others: marks(halves.map(|half| _mm256_cmpgt_epi8(_mm256_sub_epi8(half, first), _mm256_set1_epi8(i8::MIN + 9)))),
        }
    }
}

/// Writes where the bits of `marks` are, behind `base`. Half of the room is mostly enough, and no branch depends on how much of it.
#[inline]
#[target_feature(enable = "avx2,bmi1")]
fn put(mut marks: u64, base: usize, room: &mut [u16; MOST]) {
    for half in room.as_chunks_mut::<{ MOST / 2 }>().0 {
        for place in half {
            *place = (base + marks.trailing_zeros() as usize) as u16;
            marks &= marks.wrapping_sub(1);
        }
        if marks == 0 {
            return;
        }
    }
}

/// The eight bytes that begin at `start`. The mask only tells the compiler that nothing is out of bounds.
#[inline]
fn digits(window: &Window, start: u16) -> i64 {
    let start = usize::from(start) & (TILE - 1);
    window[start..].first_chunk().map_or(0, |eight| i64::from_le_bytes(*eight))
}

/// Of each of four numbers, which the lowest bytes of a word begin with, the value of the upper four digits and of the lower ones.
#[inline]
#[target_feature(enable = "avx2")]
fn four_digits(words: __m256i, shifts: __m256i) -> __m256i {
    let digits = _mm256_sllv_epi64(_mm256_sub_epi8(words, _mm256_set1_epi8(b'0' as i8)), shifts);
    let pairs = _mm256_maddubs_epi16(digits, _mm256_set1_epi16(1 << 8 | 10));
    _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 << 16 | 100))
}
