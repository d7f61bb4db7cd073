//! Reads numbers from several positions of an array at the same time, on any processor.
//!
//! In an array of numbers, each comma separates two numbers, so reading can begin after any comma. Numbers that were read from a later
//! position count only if reading from the beginning arrives at that position. So any text that is not an array of numbers is detected.

use super::{digits, separator_length, value_of_digits};

/// Number of positions from which numbers are read at the same time.
const STREAMS: usize = 3;

/// Maximum number of bytes between two of these positions.
const MAX_PART_BYTES: usize = 1024;

/// Maximum number of bytes between the intended end of a part and the comma at which the part ends.
const MAX_COMMA_DISTANCE: usize = 16;

/// Minimum number of bytes of a part with which reading from several positions is faster.
const MIN_PART: usize = 128;

/// See `FastLoop`.
pub(super) fn read(text: &[u8], end: usize, tokens: &mut Vec<u32>) -> usize {
    match separator_length(text, end).filter(|_| text.len() - end > STREAMS * MIN_PART) {
        Some(1) => read_with::<1>(text, end, tokens),
        Some(_) => read_with::<2>(text, end, tokens),
        None => end,
    }
}

fn read_with<const GAP: usize>(text: &[u8], end: usize, tokens: &mut Vec<u32>) -> usize {
    // A number and its comma have at least two bytes.
    let mut found = [[0; MAX_PART_BYTES / 2]; STREAMS];
    let mut at = end + GAP;
    while let Some(starts) = starts::<GAP>(text, at) {
        let mut places = starts;
        let mut done = 0;
        while done < MAX_PART_BYTES / 2 && (0..STREAMS).all(|stream| places[stream] < starts[stream + 1]) {
            let [Some(first), Some(second), Some(third)] = [
                number::<GAP>(text, places[0]),
                number::<GAP>(text, places[1]),
                number::<GAP>(text, places[2]),
            ] else {
                break;
            };
            for (stream, (token, next)) in [first, second, third].into_iter().enumerate() {
                found[stream][done] = token;
                places[stream] = next;
            }
            done += 1;
        }
        for stream in 0..STREAMS {
            tokens.extend_from_slice(&found[stream][..done]);
            at = places[stream];
            while at < starts[stream + 1] {
                let Some((token, next)) = number::<GAP>(text, at) else {
                    return at - GAP;
                };
                tokens.push(token);
                at = next;
            }
        }
    }
    at - GAP
}

/// Returns positions, from `at` on, at which numbers can begin: the beginning of each part, and the end of the last part. Parts are as
/// large as possible, but a comma must be near the end of each part. So parts are smaller near the end of the array.
fn starts<const GAP: usize>(text: &[u8], at: usize) -> Option<[usize; STREAMS + 1]> {
    let mut part = MAX_PART_BYTES.min(text.len().checked_sub(at + MAX_COMMA_DISTANCE)? / STREAMS);
    while part >= MIN_PART {
        if let Some(found) = split::<GAP>(text, at, part) {
            return Some(found);
        }
        part /= 2;
    }
    None
}

fn split<const GAP: usize>(text: &[u8], at: usize, part: usize) -> Option<[usize; STREAMS + 1]> {
    let mut found = [at; STREAMS + 1];
    for (stream, start) in found.iter_mut().enumerate().skip(1) {
        let from = at + stream * part;
        *start = from + text[from..from + MAX_COMMA_DISTANCE].iter().position(|&byte| byte == b',')? + GAP;
    }
    Some(found)
}

/// Reads a number of up to eight digits. Returns the number, and the position at which the next number begins.
#[inline]
fn number<const GAP: usize>(text: &[u8], at: usize) -> Option<(u32, usize)> {
    let near: &[u8; 10] = text.get(at..)?.first_chunk()?;
    let (word, count) = digits(*near.first_chunk()?);
    let leads = word & 0xFF != 0 || count == 1;
    if count == 0 || !leads || near[count] != b',' || (GAP == 2 && near[count + 1] != b' ') {
        return None;
    }
    Some((value_of_digits(word, count), at + count + GAP))
}
