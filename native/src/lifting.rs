//! Token ids out of JSON, without a number of a language in between.
//!
//! A request of the service is a small object with one large array of token ids. The array is read here, and what is left is so small
//! that whoever checks types may take its time. Whatever is unexpected is left alone: the caller then reads the whole text with care,
//! and finds the words for what is wrong.

/// An array that was found.
#[derive(Debug, PartialEq, Eq)]
pub struct Lifted {
    /// What it holds.
    pub tokens: Vec<u32>,
    /// Where its opening bracket is.
    pub start: usize,
    /// Where the text goes on behind its closing bracket.
    pub end: usize,
}

/// Reads the array of token ids that the object in `text` has under `name`. None where there is none, or two, or `text` is anything
/// that this does not read.
pub fn lift(text: &[u8], name: &[u8]) -> Option<Lifted> {
    let mut at = expect(text, space(text, 0), b'{')?;
    let mut found = None;
    loop {
        let key = space(text, at);
        let end = string(text, key)?;
        at = space(text, expect(text, space(text, end), b':')?);
        if &text[key + 1..end - 1] == name {
            if found.is_some() {
                return None;
            }
            let (tokens, end) = array(text, at)?;
            found = Some(Lifted { tokens, start: at, end });
            at = end;
        } else {
            at = value(text, at)?;
        }
        at = space(text, at);
        match text.get(at)? {
            b',' => at += 1,
            b'}' => break,
            _ => return None,
        }
    }
    (space(text, at + 1) == text.len()).then_some(found)?
}

#[inline]
fn space(text: &[u8], mut at: usize) -> usize {
    while matches!(text.get(at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
        at += 1;
    }
    at
}

fn expect(text: &[u8], at: usize, wanted: u8) -> Option<usize> {
    (*text.get(at)? == wanted).then_some(at + 1)
}

/// Behind a string that begins at `at`.
fn string(text: &[u8], at: usize) -> Option<usize> {
    let mut at = expect(text, at, b'"')?;
    loop {
        match text.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// Behind any value, whose inside nobody has looked at but for where its strings end.
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

/// An array of numbers that fit, and where the text goes on behind it.
fn array(text: &[u8], at: usize) -> Option<(Vec<u32>, usize)> {
    let mut at = space(text, expect(text, at, b'[')?);
    // The shortest element has two bytes, so no text makes this larger than twice its own size.
    let mut tokens = Vec::with_capacity((text.len() - at) / 6);
    if text.get(at) == Some(&b']') {
        return Some((tokens, at + 1));
    }
    loop {
        let (token, end) = number(text, at)?;
        tokens.push(token);
        at = match text.get(end..end + 2) {
            Some([b',', b' ']) => end + 2,
            Some([b',', _]) => end + 1,
            _ => end,
        };
        if at == end || !text.get(at)?.is_ascii_digit() {
            at = space(text, end);
            match text.get(at)? {
                b',' => at = space(text, at + 1),
                b']' => return Some((tokens, at + 1)),
                _ => return None,
            }
        }
    }
}

/// A whole number below 2^32 without a sign, and where the text goes on behind it.
#[inline]
fn number(text: &[u8], at: usize) -> Option<(u32, usize)> {
    let digits = match text.get(at..at + 8) {
        Some(eight) => {
            let word = u64::from_le_bytes(eight.try_into().ok()?) ^ 0x3030_3030_3030_3030;
            let others = (word.wrapping_add(0x7676_7676_7676_7676) | word) & 0x8080_8080_8080_8080;
            let count = (others.trailing_zeros() / 8) as usize;
            if count < 8 {
                if count == 0 || (count > 1 && text[at] == b'0') || !ends(text[at + count]) {
                    return None;
                }
                return Some((eight_digits(word << (64 - 8 * count)), at + count));
            }
            8
        }
        None => 0,
    };
    let mut end = at + digits;
    while text.get(end)?.is_ascii_digit() {
        end += 1;
    }
    if end - at > 10 || end == at || (end - at > 1 && text[at] == b'0') || !ends(*text.get(end)?) {
        return None;
    }
    let value = text[at..end]
        .iter()
        .fold(0_u64, |value, digit| value * 10 + u64::from(digit - b'0'));
    Some((u32::try_from(value).ok()?, end))
}

/// Whether a number ends before this.
#[inline]
fn ends(byte: u8) -> bool {
    matches!(byte, b',' | b']' | b' ' | b'\n' | b'\r' | b'\t')
}

/// The value of eight digits without their ASCII part, the first one in the lowest byte.
#[inline]
fn eight_digits(digits: u64) -> u32 {
    let pairs = (digits.wrapping_mul(10) + (digits >> 8)) & 0x00FF_00FF_00FF_00FF;
    let fours = (pairs.wrapping_mul(100) + (pairs >> 16)) & 0x0000_FFFF_0000_FFFF;
    (fours.wrapping_mul(10_000) + (fours >> 32)) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The rule of JSON, as slow as it likes.
    fn read(text: &[u8]) -> Option<Vec<u32>> {
        lift(text, b"t").map(|found| found.tokens)
    }

    #[test]
    fn arrays_are_read_where_they_are_and_left_where_they_are_not() {
        for (text, tokens) in [
            (r#"{"t":[]}"#, Some(vec![])),
            (r#" { "m" : "a\"]}" , "t" : [ 1 , 23,456 ] } "#, Some(vec![1, 23, 456])),
            (
                r#"{"x":{"t":[9]},"t":[0,4294967295],"y":[[{}],null,-1.5e3]}"#,
                Some(vec![0, u32::MAX]),
            ),
            (r#"{"t":[4294967296]}"#, None),
            (r#"{"t":[01]}"#, None),
            (r#"{"t":[1.0]}"#, None),
            (r#"{"t":[1e3]}"#, None),
            (r#"{"t":[-1]}"#, None),
            (r#"{"t":[1,]}"#, None),
            (r#"{"t":[,1]}"#, None),
            (r#"{"t":[1 2]}"#, None),
            (r#"{"t":[1,"2"]}"#, None),
            (r#"{"t":[1],"t":[2]}"#, None),
            (r#"{"t":[1]}x"#, None),
            (r#"{"t":[1"#, None),
            (r#"{"t":null}"#, None),
            (r#"{"u":[1]}"#, None),
            ("", None),
            ("[1]", None),
        ] {
            assert_eq!(read(text.as_bytes()), tokens, "{text}");
        }
    }

    proptest! {
        /// Every list of numbers comes back, however it is spaced and whatever stands beside it.
        #[test]
        fn lists_come_back(tokens in prop::collection::vec(any::<u32>(), 0..50), gap in "[ \n\t]{0,2}", small in any::<bool>()) {
            let tokens: Vec<u32> = tokens.into_iter().map(|token| if small { token >> 16 } else { token }).collect();
            let list: Vec<String> = tokens.iter().map(|token| format!("{gap}{token}{gap}")).collect();
            let text = format!(r#"{{"a":"[1,2]","t":[{}],"b":{{"t":[3]}}}}"#, list.join(","));
            let found = lift(text.as_bytes(), b"t").unwrap();
            prop_assert_eq!(&found.tokens, &tokens);
            prop_assert!(text[found.start..].starts_with('['));
            prop_assert!(text[..found.end].ends_with(']'));
        }

        /// Nothing makes it panic.
        #[test]
        fn anything_is_read_or_left(text in "[{}\\[\\]\",:0-9t \\\\-]{0,40}") {
            let _ = read(text.as_bytes());
        }
    }
}
