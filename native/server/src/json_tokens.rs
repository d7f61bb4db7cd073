//! Extracts token ids from JSON, three times as fast as general parsers do.
//!
//! A query is a small object with one large array of token ids. This module reads the array, and `serde_json` reads all other text. If the
//! text contains anything unexpected, this module returns None. Then the control plane reads the whole text and reports the error.
//!
//! The first numbers are read one by one. From then on, many numbers are read together, as long as they are short and have equal
//! separators. The beginning of a number is known only after the previous number was read, so latency dominates. `side_by_side` hides this
//! latency: it reads from several positions at the same time.

mod side_by_side;
#[cfg(test)]
mod tests;

/// An array of numbers in a text.
#[derive(Debug, PartialEq, Eq)]
struct ExtractedArray {
    /// Numbers of the array.
    tokens: Vec<u32>,
    /// Position of the array's opening bracket.
    start: usize,
    /// Position after the array's closing bracket.
    end: usize,
}

/// Extracts the array of token ids with the key `name` from the object in `text`. Returns the text with an empty array in its place, and
/// the token ids. Returns None if `text` has no such array, has two of them, or contains anything that this function does not read.
#[must_use]
pub fn extract_array(text: &[u8], name: &str) -> Option<(Vec<u8>, Vec<u32>)> {
    let ExtractedArray { tokens, start, end } = extract_with(text, name.as_bytes(), side_by_side::read)?;
    Some(([&text[..start], b"[]", &text[end..]].concat(), tokens))
}

/// A fast loop: it appends the numbers after a given position, at which the previous number has ended. Returns the end of the last number;
/// the given position if it has read no number. It reads only numbers that `number` reads, each followed by a comma, or by a comma and a
/// space.
type FastLoop = fn(&[u8], usize, &mut Vec<u32>) -> usize;

fn extract_with(text: &[u8], name: &[u8], quick: FastLoop) -> Option<ExtractedArray> {
    let mut at = skip_byte(text, skip_space(text, 0), b'{')?;
    let mut found = None;
    loop {
        let key = skip_space(text, at);
        let end = string(text, key)?;
        at = skip_space(text, skip_byte(text, skip_space(text, end), b':')?);
        if &text[key + 1..end - 1] == name {
            if found.is_some() {
                return None;
            }
            let (tokens, end) = array(text, at, quick)?;
            found = Some(ExtractedArray { tokens, start: at, end });
            at = end;
        } else {
            at = value(text, at)?;
        }
        at = skip_space(text, at);
        match text.get(at)? {
            b',' => at += 1,
            b'}' => break,
            _ => return None,
        }
    }
    (skip_space(text, at + 1) == text.len()).then_some(found)?
}

#[inline]
fn skip_space(text: &[u8], mut at: usize) -> usize {
    while matches!(text.get(at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
        at += 1;
    }
    at
}

/// Returns the length of the separator after a number that ends at `end`; None if the fast loop does not read this separator.
fn separator_length(text: &[u8], end: usize) -> Option<usize> {
    match text.get(end..end + 3)? {
        [b',', b' ', b'0'..=b'9'] => Some(2),
        [b',', b'0'..=b'9', _] => Some(1),
        _ => None,
    }
}

fn skip_byte(text: &[u8], at: usize, wanted: u8) -> Option<usize> {
    (*text.get(at)? == wanted).then_some(at + 1)
}

/// Returns the position after a string that begins at `at`.
fn string(text: &[u8], at: usize) -> Option<usize> {
    let mut at = skip_byte(text, at, b'"')?;
    loop {
        match text.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// Returns the position after a value of any type. The value is not checked: only the ends of its strings are found.
fn value(text: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 0_usize;
    loop {
        match text.get(at)? {
            b'"' => at = string(text, at)?,
            b'{' | b'[' => {
                depth += 1;
                at += 1;
                continue;
            }
            b'}' | b']' if depth == 0 => return None,
            b'}' | b']' => {
                depth -= 1;
                at += 1;
            }
            b',' | b':' | b' ' | b'\n' | b'\r' | b'\t' => {
                at += 1;
                continue;
            }
            _ => {
                while !matches!(
                    text.get(at)?,
                    b',' | b':' | b' ' | b'\n' | b'\r' | b'\t' | b'}' | b']' | b'{' | b'[' | b'"'
                ) {
                    at += 1;
                }
            }
        }
        if depth == 0 {
            return Some(at);
        }
    }
}

/// Reads an array of 32-bit numbers. Returns the value and the position after it.
fn array(text: &[u8], at: usize, quick: FastLoop) -> Option<(Vec<u32>, usize)> {
    let mut at = skip_space(text, skip_byte(text, at, b'[')?);
    // An element and its separator have at least two bytes, so the capacity in bytes is at most twice the size of the text.
    let mut tokens = Vec::with_capacity((text.len() - at) / 6);
    if text.get(at) == Some(&b']') {
        return Some((tokens, at + 1));
    }
    let (mut slowly, mut pause) = (0, MIN_PAUSE);
    loop {
        let (token, mut end) = number(text, at)?;
        tokens.push(token);
        if slowly > 0 {
            slowly -= 1;
        } else {
            let before = tokens.len();
            end = quick(text, end, &mut tokens);
            pause = if tokens.len() - before >= MIN_PAUSE {
                MIN_PAUSE
            } else {
                (2 * pause).min(MAX_PAUSE)
            };
            slowly = pause;
        }
        at = match text.get(end..end + 2) {
            Some([b',', b' ']) => end + 2,
            Some([b',', _]) => end + 1,
            _ => end,
        };
        if at == end || !text.get(at)?.is_ascii_digit() {
            at = skip_space(text, end);
            match text.get(at)? {
                b',' => at = skip_space(text, at + 1),
                b']' => return Some((tokens, at + 1)),
                _ => return None,
            }
        }
    }
}

/// Minimum number of tokens that are read one by one before the next attempt of the fast loop. If an attempt reads fewer tokens than this,
/// the number is doubled for the next one.
const MIN_PAUSE: usize = 16;
/// Maximum number of tokens that are read one by one before the next attempt of the fast loop.
const MAX_PAUSE: usize = 1024;

/// Reads an unsigned integer below 2^32. Returns the value and the position after it.
#[inline]
fn number(text: &[u8], at: usize) -> Option<(u32, usize)> {
    let known = match text.get(at..at + 8) {
        Some(eight) => {
            let (word, count) = digits(eight.try_into().ok()?);
            if count < 8 {
                if count == 0 || (count > 1 && text[at] == b'0') || !can_end_before(text[at + count]) {
                    return None;
                }
                return Some((value_of_digits(word, count), at + count));
            }
            8
        }
        None => 0,
    };
    let mut end = at + known;
    while text.get(end)?.is_ascii_digit() {
        end += 1;
    }
    if end - at > 10 || end == at || (end - at > 1 && text[at] == b'0') || !can_end_before(*text.get(end)?) {
        return None;
    }
    let value = text[at..end]
        .iter()
        .fold(0_u64, |value, digit| value * 10 + u64::from(digit - b'0'));
    Some((u32::try_from(value).ok()?, end))
}

/// Whether a number can end before this byte.
#[inline]
fn can_end_before(byte: u8) -> bool {
    matches!(byte, b',' | b']' | b' ' | b'\n' | b'\r' | b'\t')
}

/// Returns eight bytes minus the ASCII code of 0, the first byte lowest, and the number of leading digits.
#[inline]
fn digits(eight: [u8; 8]) -> (u64, usize) {
    let word = u64::from_le_bytes(eight) ^ 0x3030_3030_3030_3030;
    let others = (word.wrapping_add(0x7676_7676_7676_7676) | word) & 0x8080_8080_8080_8080;
    (word, (others.trailing_zeros() / 8) as usize)
}

/// Returns the value of the first `count` digits; `count` is from 1 to 8.
#[inline]
fn value_of_digits(word: u64, count: usize) -> u32 {
    // Drops the bytes after the digits, and puts zeros before the digits.
    let digits = word << (64 - 8 * count);
    let pairs = (digits.wrapping_mul(10) + (digits >> 8)) & 0x00FF_00FF_00FF_00FF;
    let fours = (pairs.wrapping_mul(100) + (pairs >> 16)) & 0x0000_FFFF_0000_FFFF;
    (fours.wrapping_mul(10_000) + (fours >> 32)) as u32
}
