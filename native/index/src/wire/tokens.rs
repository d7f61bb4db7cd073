//! Arrays of token ids.
//!
//! Token ids are integers of 1, 2, 3 or 5 bytes, in random order. In a loop that branches on the first byte of each token, every second
//! branch would be mispredicted. So the payload is read in tiles of 1 KiB. For each byte of a tile, tables contain the total length of the
//! one, two or four tokens that begin at this byte. The computation of the tables takes a few vector instructions and no branch. The loop
//! over tokens then uses lengths only to compute addresses.

use std::mem::MaybeUninit;

use crate::wire::msgpack::Reader;

/// The result of `read` for an array of token ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenArray {
    /// Whether the array had pairs of token ids; the two ids of a pair are adjacent in the output.
    pub pairs: bool,
    /// Number of token ids, or pairs, before the first one that is negative or exceeds 32 bits. The output has the lowest 32 bits of a
    /// larger token id.
    pub keyable: usize,
}

/// Appends `count` token ids, or pairs of token ids, to `out`.
///
/// Returns None if the array has other values or is truncated; `out` can then have some of the token ids.
#[inline]
pub fn read(reader: &mut Reader<'_>, count: usize, out: &mut Vec<u32>, lengths: &mut Lengths) -> Option<TokenArray> {
    if count > 0 && matches!(reader.peek()?, 0x90..=0x9F | 0xDC | 0xDD) {
        let keyable = read_pairs(reader, count, out)?;
        return Some(TokenArray { pairs: true, keyable });
    }
    if count > reader.left() {
        return None;
    }
    out.reserve(count);
    let (mut left, mut keyable) = (count, count);
    loop {
        left -= read_evenly(reader, left, out, lengths.portable);
        if left == 0 {
            return Some(TokenArray { pairs: false, keyable });
        }
        left -= read_quickly(reader, left, out, lengths);
        if left == 0 {
            return Some(TokenArray { pairs: false, keyable });
        }
        let (some, before) = (left.min(SLOW_TOKENS), count - left);
        let good = read_slowly(reader, some, out)?;
        if good < some {
            keyable = keyable.min(before + good);
        }
        left -= some;
    }
}

/// Reads pairs: arrays of two integers, each array of at least 3 bytes. Returns the number of pairs before the first pair for which no key
/// can be computed.
fn read_pairs(reader: &mut Reader<'_>, count: usize, out: &mut Vec<u32>) -> Option<usize> {
    if count > reader.left() / 3 {
        return None;
    }
    out.reserve(2 * count);
    let mut keyable = count;
    for at in 0..count {
        if reader.array()? != 2 {
            return None;
        }
        if read_slowly(reader, 2, out)? < 2 {
            keyable = keyable.min(at);
        }
    }
    Some(keyable)
}

/// Reads `count` integers of any width. Returns the number of integers before the first one that is negative or exceeds 32 bits.
fn read_slowly(reader: &mut Reader<'_>, count: usize, out: &mut Vec<u32>) -> Option<usize> {
    let mut keyable = count;
    for at in 0..count {
        let token = reader.int()?;
        if !token.is_u32() {
            keyable = keyable.min(at);
        }
        out.push(token.bits as u32);
    }
    Some(keyable)
}

/// Reads tokens of three bytes, several at a time, before the first token with another length. Returns their number. With a vocabulary of
/// up to 65,536 tokens, nearly all tokens take three bytes, so the branches are predicted correctly. With a larger vocabulary, this
/// function soon returns, so it takes little time.
#[inline]
fn read_evenly(reader: &mut Reader<'_>, count: usize, out: &mut Vec<u32>, portable: bool) -> usize {
    let Some(room) = out.spare_capacity_mut().get_mut(..count) else {
        return 0;
    };
    let mut done = if portable {
        0
    } else {
        read_even_vectorised(reader.rest(), room)
    };
    let bytes = &reader.rest()[3 * done..];
    for (places, bytes) in room[done..].as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        let Some(tokens) = four_even(bytes) else { break };
        *places = tokens.map(MaybeUninit::new);
        done += tokens.len();
    }
    reader.at += 3 * done;
    let length = out.len() + done;
    // SAFETY: `room` was within the capacity, and its first `done` places are written.
    unsafe { out.set_len(length) };
    done
}

/// Writes tokens of three bytes, eight at a time, to the beginning of `room`. Returns their number; 0 if the processor lacks the
/// instructions.
#[cfg(target_arch = "x86_64")]
#[inline]
fn read_even_vectorised(bytes: &[u8], room: &mut [MaybeUninit<u32>]) -> usize {
    if !is_x86_feature_detected!("avx2") {
        return 0;
    }
    // SAFETY: the processor has AVX2.
    unsafe { even_avx2(bytes, room) }
}

#[cfg(not(target_arch = "x86_64"))]
fn read_even_vectorised(_: &[u8], _: &mut [MaybeUninit<u32>]) -> usize {
    0
}

/// # Safety
/// The processor must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn even_avx2(bytes: &[u8], room: &mut [MaybeUninit<u32>]) -> usize {
    use std::arch::x86_64::*;

    /// Number of bytes that are loaded for eight tokens: 16 for each four tokens, of which 12 are used.
    const LOADED_BYTES: usize = 28;
    /// Mask that selects the first byte of each token.
    const HEAD_MASK: i32 = 0x0249_0249;

    let mut done = 0;
    for places in room.as_chunks_mut::<8>().0 {
        let Some(bytes) = bytes.get(3 * done..).and_then(|rest| rest.first_chunk::<LOADED_BYTES>()) else {
            break;
        };
        // SAFETY: both loads are within the 28 bytes, and the store within the eight places.
        unsafe {
            let halves = _mm256_loadu2_m128i(bytes[12..].as_ptr().cast(), bytes.as_ptr().cast());
            let same = _mm256_cmpeq_epi8(halves, _mm256_set1_epi8(0xCD_u8 as i8));
            if _mm256_movemask_epi8(same) & HEAD_MASK != HEAD_MASK {
                break;
            }
            let order = _mm_setr_epi8(2, 1, -1, -1, 5, 4, -1, -1, 8, 7, -1, -1, 11, 10, -1, -1);
            let tokens = _mm256_shuffle_epi8(halves, _mm256_broadcastsi128_si256(order));
            _mm256_storeu_si256(places.as_mut_ptr().cast(), tokens);
        }
        done += places.len();
    }
    done
}

/// Reads four tokens. Returns None unless each token is the byte 0xCD followed by two bytes.
#[inline]
fn four_even(bytes: &[u8; 12]) -> Option<[u32; 4]> {
    let low = u64::from_be_bytes(*bytes.first_chunk()?);
    let high = u64::from_be_bytes(*bytes.last_chunk()?);
    let even = low & 0xFF00_00FF_0000_FF00 == 0xCD00_00CD_0000_CD00 && high & 0xFF_0000 == 0xCD_0000;
    even.then_some([low >> 40, low >> 16, high >> 24, high].map(|token| u32::from(token as u16)))
}

/// Reads up to `count` tokens, and returns their number. Stops before an unusual token, and near the end of the payload.
#[inline]
fn read_quickly(reader: &mut Reader<'_>, count: usize, out: &mut Vec<u32>, lengths: &mut Lengths) -> usize {
    let Some(room) = out.spare_capacity_mut().get_mut(..count) else {
        return 0;
    };
    let mut done = 0;
    while done < count {
        // A token is read as the four bytes that end with its last byte.
        let Some(window) = reader.data().get(reader.at.wrapping_sub(4)..) else {
            break;
        };
        let tile = lengths.fill(reader.rest(), count - done);
        let (read, end) = lengths.walk(window, tile, &mut room[done..]);
        done += read;
        reader.at += end;
        if end < tile || end == 0 {
            break;
        }
    }
    let length = out.len() + done;
    // SAFETY: `room` was within the capacity, and its first `done` places are written.
    unsafe { out.set_len(length) };
    done
}

/// Number of tokens that are read one by one after the fast ways have stopped.
const SLOW_TOKENS: usize = 16;

/// Number of bytes for which the tables are computed together.
const TILE_BYTES: usize = 1024;

/// Number of bytes that are classified by one sequence of vector instructions.
const STEP_BYTES: usize = 32;

/// Minimum number of classified bytes after a tile, since the last tokens of a tile can end after it.
const MARGIN_BYTES: usize = 16;

/// Number of bytes of the longest token in the tables.
const MAX_TOKEN_BYTES: usize = 5;

/// The length in the tables for a byte at which no supported token begins. The value is so large that any total length that includes it is
/// recognised as invalid.
const UNKNOWN_LENGTH: u8 = 0x40;

/// Maximum number of remaining bytes that are copied before they are classified.
const MAX_COPIED_BYTES: usize = 128;

/// Mask of the bytes of a token of each length.
const TOKEN_MASKS: [u32; 8] = [0, 0xFF, 0xFF, 0xFFFF, 0, 0xFFFF_FFFF, 0, 0];

/// For each byte of a tile, the total length of the one, two or four tokens that begin at this byte. The tables are longer than a tile,
/// since reads can exceed the end of the tile.
#[derive(Debug)]
pub struct Lengths {
    one: [u8; TILE_BYTES + 2 * STEP_BYTES],
    two: [u8; TILE_BYTES + 2 * STEP_BYTES],
    four: [u8; TILE_BYTES + 2 * STEP_BYTES],
    /// Whether the vector instructions of the processor are not used; for tests.
    portable: bool,
}

impl Default for Lengths {
    fn default() -> Self {
        let none = [0; TILE_BYTES + 2 * STEP_BYTES];
        Self {
            one: none,
            two: none,
            four: none,
            portable: false,
        }
    }
}

impl Lengths {
    /// Fills the tables for the first bytes of `data`, at most as many as `count` tokens can take. Returns the number of these bytes.
    #[inline]
    fn fill(&mut self, data: &[u8], count: usize) -> usize {
        let tile = TILE_BYTES.min(count.saturating_mul(MAX_TOKEN_BYTES));
        let steps = (tile + MARGIN_BYTES).div_ceil(STEP_BYTES).min(data.len() / STEP_BYTES);
        if steps * STEP_BYTES >= tile + MARGIN_BYTES || data.len() > MAX_COPIED_BYTES {
            self.classify(&data[..steps * STEP_BYTES]);
            return tile.min(steps * STEP_BYTES - MARGIN_BYTES);
        }
        // Zeros replace missing bytes: their use as tokens fails later.
        let mut padded = [0; MAX_COPIED_BYTES + STEP_BYTES];
        padded[..data.len()].copy_from_slice(data);
        self.classify(&padded[..(data.len() + MARGIN_BYTES).div_ceil(STEP_BYTES) * STEP_BYTES]);
        tile.min(data.len())
    }

    #[inline]
    fn classify(&mut self, bytes: &[u8]) {
        if self.portable || !self.classify_vectorised(bytes) {
            self.classify_portably(bytes);
        }
    }

    /// Classifies bytes with vector instructions. Returns false if this processor lacks them.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    fn classify_vectorised(&mut self, bytes: &[u8]) -> bool {
        let able = is_x86_feature_detected!("avx2");
        if able {
            // SAFETY: the processor has AVX2.
            unsafe { self.classify_avx2(bytes) };
        }
        able
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn classify_vectorised(&mut self, _: &[u8]) -> bool {
        false
    }

    /// Classifies bytes without special instructions. The code has no branches, so compilers vectorise it. Does not compute `four`, which
    /// would take more time than it saves without vector instructions.
    fn classify_portably(&mut self, bytes: &[u8]) {
        for (bytes, one) in bytes.chunks_exact(STEP_BYTES).zip(self.one.chunks_exact_mut(STEP_BYTES)) {
            for (&byte, one) in bytes.iter().zip(one) {
                let more_if = |head: u8, more: u8| mask(byte == head) & more;
                let more = more_if(0xCC, 1) | more_if(0xCD, 2) | more_if(0xCE, 4);
                let unknown = mask(byte >= 0x80) & mask(more == 0) & UNKNOWN_LENGTH;
                *one = 1 + (more | unknown);
            }
        }
        for start in (0..bytes.len()).step_by(STEP_BYTES) {
            let (Some(one), two) = (
                self.one[start..].first_chunk::<{ STEP_BYTES + MAX_TOKEN_BYTES }>(),
                &mut self.two[start..][..STEP_BYTES],
            ) else {
                return;
            };
            for (at, two) in two.iter_mut().enumerate() {
                let next_if = |length: usize| mask(one[at] == length as u8) & one[at + length];
                *two = one[at] + (next_if(1) | next_if(2) | next_if(3) | next_if(5));
            }
        }
        self.four[..bytes.len()].fill(UNKNOWN_LENGTH);
    }

    /// Classifies bytes with AVX2. For the length of two tokens, the length of the second token is looked up in a table of 32 bytes by two
    /// shuffles. The length of four tokens is computed in the same way.
    ///
    /// # Safety
    /// The processor must have AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn classify_avx2(&mut self, bytes: &[u8]) {
        use std::arch::x86_64::*;

        /// For each byte, adds the length of the token that begins at this byte and the length of the next token.
        #[inline]
        #[target_feature(enable = "avx2")]
        unsafe fn add_next(lengths: &[u8; STEP_BYTES + 16], sums: &mut [u8; STEP_BYTES]) {
            // SAFETY: both loads and the store are within the arrays.
            unsafe {
                let places = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
                let here = _mm256_loadu_si256(lengths.as_ptr().cast());
                let behind = _mm256_loadu_si256(lengths.as_ptr().add(16).cast());
                // A shuffle uses the low four bits of an index, and returns 0 if the highest bit is set. So the first shuffle returns 0 for
                // positions from 16 on, and the second for positions below 16.
                let next = _mm256_add_epi8(places, here);
                let in_here = _mm256_shuffle_epi8(here, _mm256_add_epi8(next, _mm256_set1_epi8(112)));
                let in_behind = _mm256_shuffle_epi8(behind, _mm256_sub_epi8(next, _mm256_set1_epi8(16)));
                let sum = _mm256_adds_epu8(here, _mm256_or_si256(in_here, in_behind));
                _mm256_storeu_si256(sums.as_mut_ptr().cast(), sum);
            }
        }

        const S: i8 = UNKNOWN_LENGTH as i8;
        for (bytes, one) in bytes.chunks_exact(STEP_BYTES).zip(self.one.chunks_exact_mut(STEP_BYTES)) {
            // SAFETY: both have `STEP_BYTES` bytes.
            unsafe {
                // Number of bytes of a token after its first byte; the index is the first byte XOR 0xC0. For a first byte below 0x80, the
                // index is negative, and the shuffle returns 0.
                let more = _mm256_broadcastsi128_si256(_mm_setr_epi8(S, S, S, S, S, S, S, S, S, S, S, S, 1, 2, 4, S));
                let bytes = _mm256_loadu_si256(bytes.as_ptr().cast());
                let heads = _mm256_xor_si256(bytes, _mm256_set1_epi8(0xC0_u8 as i8));
                let more = _mm256_shuffle_epi8(more, _mm256_min_epi8(heads, _mm256_set1_epi8(15)));
                _mm256_storeu_si256(one.as_mut_ptr().cast(), _mm256_add_epi8(more, _mm256_set1_epi8(1)));
            }
        }
        for start in (0..bytes.len()).step_by(STEP_BYTES) {
            let (Some(from), Some(to)) = (self.one[start..].first_chunk(), self.two[start..].first_chunk_mut()) else {
                return;
            };
            // SAFETY: the processor has AVX2.
            unsafe { add_next(from, to) };
        }
        for start in (0..bytes.len()).step_by(STEP_BYTES) {
            let (Some(from), Some(to)) = (self.two[start..].first_chunk(), self.four[start..].first_chunk_mut()) else {
                return;
            };
            // SAFETY: the processor has AVX2.
            unsafe { add_next(from, to) };
        }
    }

    /// Writes the tokens up to the end of the tile to `room`. The tile begins 4 bytes after the start of `window`. Returns the number of
    /// tokens, and the number of their bytes.
    #[inline]
    fn walk(&self, window: &[u8], tile: usize, room: &mut [MaybeUninit<u32>]) -> (usize, usize) {
        let (mut done, mut at) = (0, 0);
        for places in room.chunks_exact_mut(4) {
            if at >= tile {
                break;
            }
            let Some((tokens, end)) = self.four_at(window, at) else {
                break;
            };
            write(places, tokens);
            (done, at) = (done + 4, end);
        }
        for places in room[done..].chunks_exact_mut(2) {
            if at >= tile {
                break;
            }
            let Some((tokens, end)) = self.two_at(window, at) else { break };
            write(places, tokens);
            (done, at) = (done + 2, end);
        }
        (done, at)
    }

    #[inline]
    fn four_at(&self, window: &[u8], at: usize) -> Option<([u32; 4], usize)> {
        let near: &[u8; 4 * MAX_TOKEN_BYTES + 4] = window.get(at..)?.first_chunk()?;
        let four = usize::from(*self.four.get(at)?);
        if four > 4 * MAX_TOKEN_BYTES {
            return None;
        }
        let (one, two) = (usize::from(self.one[at]), usize::from(self.two[at]));
        let third = usize::from(*self.one.get(at + two)?);
        let tokens = [
            token(near, one, one),
            token(near, two, two - one),
            token(near, two + third, third),
            token(near, four, four - two - third),
        ];
        Some((tokens, at + four))
    }

    #[inline]
    fn two_at(&self, window: &[u8], at: usize) -> Option<([u32; 2], usize)> {
        let near: &[u8; 2 * MAX_TOKEN_BYTES + 4] = window.get(at..)?.first_chunk()?;
        let two = usize::from(*self.two.get(at)?);
        if two > 2 * MAX_TOKEN_BYTES {
            return None;
        }
        let one = usize::from(self.one[at]);
        Some(([token(near, one, one), token(near, two, two - one)], at + two))
    }
}

#[inline]
fn mask(holds: bool) -> u8 {
    0_u8.wrapping_sub(u8::from(holds))
}

#[inline]
fn write<const N: usize>(places: &mut [MaybeUninit<u32>], tokens: [u32; N]) {
    for (place, token) in places.iter_mut().zip(tokens) {
        place.write(token);
    }
}

/// Reads the token that ends 4 bytes after `end`. `min` only shows the compiler that no access is out of bounds.
#[inline]
fn token<const N: usize>(near: &[u8; N], end: usize, length: usize) -> u32 {
    let end = end.min(N - 4);
    u32::from_be_bytes([near[end], near[end + 1], near[end + 2], near[end + 3]]) & TOKEN_MASKS[length & 7]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reads one integer byte by byte, for comparison with the fast decoder.
    fn slow_int(bytes: &[u8]) -> Option<(i128, usize)> {
        let (&head, rest) = bytes.split_first()?;
        let (width, signed) = match head {
            0x00..=0x7F => return Some((i128::from(head), 1)),
            0xE0..=0xFF => return Some((i128::from(head) - 256, 1)),
            0xCC..=0xCF => (1 << (head - 0xCC), false),
            0xD0..=0xD3 => (1 << (head - 0xD0), true),
            _ => return None,
        };
        let value = rest
            .get(..width)?
            .iter()
            .fold(0_i128, |value, &byte| value << 8 | i128::from(byte));
        let wraps = signed && value >> (8 * width - 1) != 0;
        Some((if wraps { value - (1 << (8 * width)) } else { value }, width + 1))
    }

    fn slow(mut bytes: &[u8], count: usize) -> Option<(Vec<u32>, usize, usize)> {
        let (mut tokens, mut keyable, before) = (Vec::new(), count, bytes.len());
        for at in 0..count {
            let (value, length) = slow_int(bytes)?;
            if u32::try_from(value).is_err() {
                keyable = keyable.min(at);
            }
            tokens.push(value as u32);
            bytes = &bytes[length..];
        }
        Some((tokens, keyable, before - bytes.len()))
    }

    /// Reads tokens with the fast decoder, from `start` in `data` on.
    fn quick(data: &[u8], start: usize, count: usize, portable: bool) -> Option<(Vec<u32>, usize, usize)> {
        let mut lengths = Lengths {
            portable,
            ..Lengths::default()
        };
        // The tables contain values that an earlier payload can leave; these values must not change the result.
        (lengths.one, lengths.two, lengths.four) = (
            [1; TILE_BYTES + 2 * STEP_BYTES],
            [2; TILE_BYTES + 2 * STEP_BYTES],
            [4; TILE_BYTES + 2 * STEP_BYTES],
        );
        let mut reader = Reader::new(data, start);
        let mut out = Vec::new();
        let found = read(&mut reader, count, &mut out, &mut lengths)?;
        assert!(!found.pairs);
        Some((out, found.keyable, reader.at - start))
    }

    fn check(data: &[u8], start: usize, count: usize) {
        let expected = slow(&data[start..], count);
        assert_eq!(quick(data, start, count, false), expected);
        assert_eq!(quick(data, start, count, true), expected);
    }

    /// An integer in the shortest form of msgpack, or in a longer form.
    fn encode(value: u64, longer: u8, out: &mut Vec<u8>) {
        let shortest = match value {
            0..=0x7F => 0,
            0x80..=0xFF => 1,
            0x100..=0xFFFF => 2,
            0x1_0000..=0xFFFF_FFFF => 3,
            _ => 4,
        };
        match (shortest + longer).min(4) {
            0 => out.push(value as u8),
            1 => out.extend([0xCC, value as u8]),
            2 => out.extend([&[0xCD][..], &(value as u16).to_be_bytes()].concat()),
            3 => out.extend([&[0xCE][..], &(value as u32).to_be_bytes()].concat()),
            _ => out.extend([&[0xCF][..], &value.to_be_bytes()].concat()),
        }
    }

    fn usual_token() -> impl Strategy<Value = Vec<u8>> {
        let value = prop_oneof![0..256_u64, 0..128_256_u64, 0..=u64::from(u32::MAX)];
        (value, prop_oneof![9 => Just(0_u8), 1 => 1..3_u8]).prop_map(|(value, longer)| {
            let mut out = Vec::new();
            encode(value, longer, &mut out);
            out
        })
    }

    fn even_token() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![any::<u16>(), Just(0xCDCD_u16)].prop_map(|value| [&[0xCD][..], &value.to_be_bytes()].concat())
    }

    fn rare_token() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            any::<u64>().prop_map(|value| [&[0xCF][..], &value.to_be_bytes()].concat()),
            any::<i64>().prop_map(|value| [&[0xD3][..], &value.to_be_bytes()].concat()),
            any::<i32>().prop_map(|value| [&[0xD2][..], &value.to_be_bytes()].concat()),
            any::<i16>().prop_map(|value| [&[0xD1][..], &value.to_be_bytes()].concat()),
            any::<i8>().prop_map(|value| vec![0xD0, value as u8]),
            (0xE0..=0xFF_u8).prop_map(|byte| vec![byte]),
        ]
    }

    /// Any byte; bytes with which tokens begin are frequent.
    fn any_byte() -> impl Strategy<Value = u8> {
        prop_oneof![any::<u8>(), 0xCA..=0xD4_u8]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// The fast decoder reads tokens of any form as the slow decoder does, whatever bytes are before and after them.
        #[test]
        fn tokens_of_every_form(
            tokens in prop::collection::vec(prop_oneof![40 => usual_token(), 1 => rare_token()], 0..700),
            before in prop::collection::vec(any_byte(), 0..8),
            behind in prop::collection::vec(any_byte(), 0..80),
        ) {
            let data = [before.clone(), tokens.concat(), behind].concat();
            check(&data, before.len(), tokens.len());
        }

        /// Groups of consecutive tokens of three bytes, and other tokens between the groups.
        #[test]
        fn rows_of_even_tokens(
            tokens in prop::collection::vec(prop_oneof![60 => even_token(), 1 => usual_token(), 1 => rare_token()], 0..300),
            behind in prop::collection::vec(any_byte(), 0..40),
        ) {
            check(&[tokens.concat(), behind].concat(), 0, tokens.len());
        }

        /// The fast path reads all usual tokens, except the last one if their number is odd.
        #[test]
        fn usual_tokens_are_read_quickly(mut tokens in prop::collection::vec(usual_token(), 1..700)) {
            tokens.retain(|token| token.len() <= MAX_TOKEN_BYTES);
            let data = [vec![0; 4], tokens.concat(), vec![0xC1; MAX_COPIED_BYTES]].concat();
            let mut reader = Reader::new(&data, 4);
            let mut out = Vec::with_capacity(tokens.len());
            let done = read_quickly(&mut reader, tokens.len(), &mut out, &mut Lengths::default());
            prop_assert_eq!(done, tokens.len() / 2 * 2);
        }

        /// The decoder refuses meaningless bytes, or reads them as the slow decoder does.
        #[test]
        fn any_bytes(
            data in prop_oneof![
                prop::collection::vec(any_byte(), 0..1500),
                prop::collection::vec(0xC9..=0xD1_u8, 0..1500),
                prop::collection::vec(prop_oneof![Just(0xCC_u8), Just(0xCD), Just(0xCE), 0..=0x7F_u8], 0..1500),
            ],
            start in 0..8_usize,
            count in 0..1500_usize,
        ) {
            let start = start.min(data.len());
            // These bytes begin an array of pairs, which the slow decoder cannot read.
            prop_assume!(!matches!(data.get(start), Some(0x90..=0x9F | 0xDC | 0xDD)));
            check(&data, start, count);
        }
    }

    #[test]
    fn every_way_to_end_a_payload() {
        for count in 1..140 {
            for value in [0_u64, 200, 300, 70_000] {
                let mut data = vec![0x90; 5];
                (0..count).for_each(|_| encode(value, 0, &mut data));
                for missing in 0..4 {
                    check(&data[..(data.len() - missing).max(5)], 5, count);
                }
            }
        }
    }

    #[test]
    fn pairs_are_stored_one_after_the_other() {
        let data = [0x92, 1, 2, 0x92, 0xCD, 1, 0, 3, 0x92, 0xFF, 4];
        let mut out = Vec::new();
        let found = read(&mut Reader::new(&data, 0), 3, &mut out, &mut Lengths::default());
        assert_eq!(found, Some(TokenArray { pairs: true, keyable: 2 }));
        assert_eq!(out, [1, 2, 256, 3, u32::MAX, 4]);
        for bad in [
            &[0x92, 1][..],
            &[0x91, 1, 0],
            &[0x92, 1, 2, 3, 0, 0],
            &[0x92, 1, 0xC0],
            &[0x93, 1, 2, 3],
        ] {
            assert_eq!(
                read(&mut Reader::new(bad, 0), 2, &mut Vec::new(), &mut Lengths::default()),
                None
            );
        }
    }

    /// A count that is too large for the bytes allocates no memory.
    #[test]
    fn counts_allocate_nothing() {
        for data in [&[1, 2, 3][..], &[0x92, 1, 2]] {
            let mut out = Vec::new();
            assert_eq!(
                read(
                    &mut Reader::new(data, 0),
                    u32::MAX as usize,
                    &mut out,
                    &mut Lengths::default()
                ),
                None
            );
            assert_eq!(out.capacity(), 0);
        }
    }
}
