//! Reads and writes msgpack values one at a time. Each method of `Reader` returns None if the next value has another type, or if no
//! complete value remains.

use std::str;

/// An integer of any width: its lowest 64 bits, and whether it is negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int {
    /// The lowest 64 bits, in two's complement.
    pub bits: u64,
    /// Whether the integer is negative.
    pub negative: bool,
}

impl From<u32> for Int {
    #[inline]
    fn from(value: u32) -> Self {
        Self::unsigned(value.into())
    }
}

impl Int {
    /// A number that is not a token id.
    pub const INVALID: Self = Self {
        bits: u64::MAX,
        negative: true,
    };

    #[inline]
    fn unsigned(bits: u64) -> Self {
        Self { bits, negative: false }
    }

    #[inline]
    fn signed(value: i64) -> Self {
        Self {
            bits: value as u64,
            negative: value < 0,
        }
    }

    /// Returns the number; None if it is 2^63 or more.
    #[inline]
    pub fn as_i64(self) -> Option<i64> {
        let value = self.bits as i64;
        (self.negative || value >= 0).then_some(value)
    }

    /// Returns the number.
    #[inline]
    pub fn as_i128(self) -> i128 {
        if self.negative {
            i128::from(self.bits as i64)
        } else {
            i128::from(self.bits)
        }
    }

    /// Whether the number can be a token id, so that the keys of its block are defined.
    #[inline]
    pub fn is_u32(self) -> bool {
        self.bits <= u64::from(u32::MAX)
    }
}

/// A payload, and a position in it.
pub struct Reader<'a> {
    data: &'a [u8],
    /// Position of the next byte.
    pub at: usize,
}

impl<'a> Reader<'a> {
    /// Creates a reader of `data` that begins at the position `at`.
    #[inline]
    pub fn new(data: &'a [u8], at: usize) -> Self {
        Self { data, at }
    }

    /// The payload.
    #[inline]
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// Number of bytes after the position.
    #[inline]
    pub fn left(&self) -> usize {
        self.data.len().saturating_sub(self.at)
    }

    /// The bytes after the position.
    #[inline]
    pub fn rest(&self) -> &'a [u8] {
        self.data.get(self.at..).unwrap_or_default()
    }

    /// The next byte; the position does not change.
    #[inline]
    pub fn peek(&self) -> Option<u8> {
        self.data.get(self.at).copied()
    }

    #[inline]
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = *self.rest().first_chunk::<N>()?;
        self.at += N;
        Some(bytes)
    }

    #[inline]
    fn slice(&mut self, length: usize) -> Option<&'a [u8]> {
        let bytes = self.rest().get(..length)?;
        self.at += length;
        Some(bytes)
    }

    #[inline]
    fn length(&mut self, width: u8) -> Option<usize> {
        Some(match width {
            1 => usize::from(self.take::<1>()?[0]),
            2 => usize::from(u16::from_be_bytes(self.take()?)),
            _ => u32::from_be_bytes(self.take()?) as usize,
        })
    }

    /// Reads the next value if it is nil.
    #[inline]
    pub fn nil(&mut self) -> bool {
        let found = self.peek() == Some(0xC0);
        self.at += usize::from(found);
        found
    }

    /// Reads an integer of any width.
    #[inline]
    pub fn int(&mut self) -> Option<Int> {
        let [head] = self.take()?;
        Some(match head {
            0x00..=0x7F => Int::unsigned(u64::from(head)),
            0xE0..=0xFF => Int::signed(i64::from(head as i8)),
            0xCC => Int::unsigned(u64::from(self.take::<1>()?[0])),
            0xCD => Int::unsigned(u64::from(u16::from_be_bytes(self.take()?))),
            0xCE => Int::unsigned(u64::from(u32::from_be_bytes(self.take()?))),
            0xCF => Int::unsigned(u64::from_be_bytes(self.take()?)),
            0xD0 => Int::signed(i64::from(i8::from_be_bytes(self.take()?))),
            0xD1 => Int::signed(i64::from(i16::from_be_bytes(self.take()?))),
            0xD2 => Int::signed(i64::from(i32::from_be_bytes(self.take()?))),
            0xD3 => Int::signed(i64::from_be_bytes(self.take()?)),
            _ => return None,
        })
    }

    /// Reads a number of seconds, as a float or an integer.
    pub fn number(&mut self) -> Option<f64> {
        match self.peek()? {
            0xCA => {
                self.at += 1;
                Some(f64::from(f32::from_be_bytes(self.take()?)))
            }
            0xCB => {
                self.at += 1;
                Some(f64::from_be_bytes(self.take()?))
            }
            _ => self.int().map(|found| found.as_i128() as f64),
        }
    }

    /// Reads a string of valid UTF-8.
    #[inline]
    pub fn text(&mut self) -> Option<&'a str> {
        str::from_utf8(self.raw_text()?).ok()
    }

    /// Reads a string of valid UTF-8, as bytes.
    #[inline]
    pub fn text_bytes(&mut self) -> Option<&'a [u8]> {
        let bytes = self.raw_text()?;
        (bytes.is_ascii() || str::from_utf8(bytes).is_ok()).then_some(bytes)
    }

    /// Reads the bytes of a string without checking its encoding.
    #[inline]
    pub fn raw_text(&mut self) -> Option<&'a [u8]> {
        let [head] = self.take()?;
        let length = match head {
            0xA0..=0xBF => usize::from(head & 0x1F),
            0xD9 => self.length(1)?,
            0xDA => self.length(2)?,
            0xDB => self.length(4)?,
            _ => return None,
        };
        self.slice(length)
    }

    /// Reads the contents of a bin.
    pub fn bin(&mut self) -> Option<&'a [u8]> {
        let [head] = self.take()?;
        let length = match head {
            0xC4 => self.length(1)?,
            0xC5 => self.length(2)?,
            0xC6 => self.length(4)?,
            _ => return None,
        };
        self.slice(length)
    }

    /// Reads the header of an array, and returns the number of elements; it is at most the number of remaining bytes.
    #[inline]
    pub fn array(&mut self) -> Option<usize> {
        let [head] = self.take()?;
        let count = match head {
            0x90..=0x9F => usize::from(head & 0x0F),
            0xDC => self.length(2)?,
            0xDD => self.length(4)?,
            _ => return None,
        };
        (count <= self.left()).then_some(count)
    }

    /// Reads the header of a map, and returns the number of pairs; the remaining bytes have room for all of them.
    #[inline]
    pub fn map(&mut self) -> Option<usize> {
        let [head] = self.take()?;
        let count = match head {
            0x80..=0x8F => usize::from(head & 0x0F),
            0xDE => self.length(2)?,
            0xDF => self.length(4)?,
            _ => return None,
        };
        (count <= self.left() / 2).then_some(count)
    }

    /// Skips one value that has at most `depth` levels of containers.
    pub fn skip(&mut self, depth: usize) -> Option<()> {
        let head = self.peek()?;
        match head {
            0xC0 | 0xC2 | 0xC3 => self.at += 1,
            0x00..=0x7F | 0xCC..=0xD3 | 0xE0..=0xFF => drop(self.int()?),
            0xCA | 0xCB => drop(self.number()?),
            0xA0..=0xBF | 0xD9..=0xDB => drop(self.raw_text()?),
            0xC4..=0xC6 => drop(self.bin()?),
            0x90..=0x9F | 0xDC | 0xDD => {
                for _ in 0..self.array()? {
                    self.skip(depth.checked_sub(1)?)?;
                }
            }
            0x80..=0x8F | 0xDE | 0xDF => {
                for _ in 0..self.map()? {
                    self.skip(depth.checked_sub(1)?)?;
                    self.skip(depth.checked_sub(1)?)?;
                }
            }
            _ => return None,
        }
        Some(())
    }
}

// --- writing values

/// Appends the header of an array.
pub fn write_array(length: usize, out: &mut Vec<u8>) {
    match length {
        0..16 => out.push(0x90 | length as u8),
        _ => write_header(length, 0xDC, out),
    }
}

/// Appends a header whose length takes two or four bytes.
fn write_header(length: usize, head: u8, out: &mut Vec<u8>) {
    match u16::try_from(length) {
        Ok(length) => {
            out.push(head);
            out.extend(length.to_be_bytes());
        }
        Err(_) => {
            out.push(head + 1);
            out.extend((length as u32).to_be_bytes());
        }
    }
}

/// Appends a text.
pub fn write_text(text: &[u8], out: &mut Vec<u8>) {
    match text.len() {
        length @ 0..32 => out.push(0xA0 | length as u8),
        length @ 32..=0xFF => out.extend([0xD9, length as u8]),
        length => write_header(length, 0xDA, out),
    }
    out.extend_from_slice(text);
}

/// Appends a bin.
pub fn write_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    match bytes.len() {
        length @ 0..=0xFF => out.extend([0xC4, length as u8]),
        length => write_header(length, 0xC5, out),
    }
    out.extend_from_slice(bytes);
}

/// Appends an integer in its shortest form.
pub fn write_integer(value: i128, out: &mut Vec<u8>) {
    let bytes = (value as u64).to_be_bytes();
    let (head, width) = match value {
        0.. => return write_unsigned(value as u64, out),
        -0x20.. => return out.push(value as u8),
        -0x80.. => (0xD0, 1),
        -0x8000.. => (0xD1, 2),
        -0x8000_0000.. => (0xD2, 4),
        _ => (0xD3, 8),
    };
    out.push(head);
    out.extend_from_slice(&bytes[8 - width..]);
}

/// Appends an integer in its shortest form.
#[inline]
pub fn write_unsigned(value: u64, out: &mut Vec<u8>) {
    // The arrays have fixed lengths, since copying a variable number of bytes takes several times as long.
    match value {
        0..=0x7F => out.push(value as u8),
        0x80..=0xFF => out.extend_from_slice(&[0xCC, value as u8]),
        0x100..=0xFFFF => {
            let [high, low] = (value as u16).to_be_bytes();
            out.extend_from_slice(&[0xCD, high, low]);
        }
        0x1_0000..=0xFFFF_FFFF => {
            let [a, b, c, d] = (value as u32).to_be_bytes();
            out.extend_from_slice(&[0xCE, a, b, c, d]);
        }
        _ => {
            out.push(0xCF);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}
