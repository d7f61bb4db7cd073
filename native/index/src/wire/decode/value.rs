//! MessagePack values of any form: reads headers, divides values into parts, and reads and writes free-form values.

use std::collections::HashMap;
use std::fmt::{self, Write};

use crate::step_counter;
use crate::wire::msgpack::Reader;

use super::Reason;

/// Nil: the value that represents a missing field.
pub(super) const NIL: &[u8] = &[0xC0];

/// A free-form value.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// Nil.
    Nil,
    /// True or false.
    Bool(bool),
    /// An integer from -2^63 to 2^64 - 1.
    Int(i128),
    /// A float with 32 or 64 bits.
    Float(f64),
    /// A string.
    Text(String),
    /// A bin.
    Bytes(Vec<u8>),
    /// An array.
    List(Vec<Value>),
    /// A map whose keys are texts. If a key occurs several times, its last value counts, at the position of the first.
    Map(Vec<(String, Value)>),
    /// A timestamp: seconds since the epoch, and microseconds.
    Time(i64, u32),
    /// An extension other than a timestamp: its code and its bytes.
    Extension(i8, Vec<u8>),
}

impl Value {
    /// Returns the value as text for messages, of at most about `max_bytes` bytes.
    pub(super) fn debug_text(&self, max_bytes: usize) -> String {
        let mut text = LimitedText(String::new(), max_bytes);
        let _ = write!(text, "{self:?}");
        step_counter::count(text.0.len() / 8);
        text.0
    }
}

/// A text, and the length at which writing to it stops.
struct LimitedText(String, usize);

impl Write for LimitedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.push_str(text);
        if self.0.len() < self.1 { Ok(()) } else { Err(fmt::Error) }
    }
}

/// The first byte of a value, which determines its type.
pub(super) fn head_of(raw: &[u8]) -> u8 {
    raw.first().copied().unwrap_or(0xC0)
}

pub(super) fn is_array(head: u8) -> bool {
    matches!(head, 0x90..=0x9F | 0xDC | 0xDD)
}

pub(super) fn is_map(head: u8) -> bool {
    matches!(head, 0x80..=0x8F | 0xDE | 0xDF)
}

/// Returns the number of elements or pairs that the header of an array or a map states, even if the header is truncated. Returns 0 for
/// other values.
pub(super) fn declared_length(raw: &[u8]) -> usize {
    let width = match head_of(raw) {
        head @ 0x80..=0x9F => return usize::from(head & 0x0F),
        0xDC | 0xDE => 2,
        0xDD | 0xDF => 4,
        _ => 0,
    };
    raw.iter()
        .skip(1)
        .take(width)
        .fold(0, |value, &byte| value << 8 | usize::from(byte))
}

/// Returns the end of the value that begins at `at`, whatever its depth of nesting.
fn end_of(data: &[u8], mut at: usize) -> Option<usize> {
    let mut pending = 1_u64;
    while pending > 0 {
        step_counter::count(1);
        pending -= 1;
        let head = *data.get(at)?;
        at += 1;
        let length = |width: usize| -> Option<usize> {
            let bytes = data.get(at..at + width)?;
            Some(bytes.iter().fold(0, |value, &byte| value << 8 | usize::from(byte)))
        };
        let (skipped, inside) = match head {
            0x80..=0x8F => (0, 2 * u64::from(head & 0x0F)),
            0x90..=0x9F => (0, u64::from(head & 0x0F)),
            0xA0..=0xBF => (usize::from(head & 0x1F), 0),
            0xC1 => return None,
            0xC4 | 0xD9 => (1 + length(1)?, 0),
            0xC5 | 0xDA => (2 + length(2)?, 0),
            0xC6 | 0xDB => (4 + length(4)?, 0),
            0xC7 => (2 + length(1)?, 0),
            0xC8 => (3 + length(2)?, 0),
            0xC9 => (5 + length(4)?, 0),
            0xCC | 0xD0 => (1, 0),
            0xCD | 0xD1 => (2, 0),
            0xCA | 0xCE | 0xD2 => (4, 0),
            0xCB | 0xCF | 0xD3 => (8, 0),
            0xD4..=0xD8 => (1 + (1 << (head - 0xD4)), 0),
            0xDC => (2, length(2)? as u64),
            0xDD => (4, length(4)? as u64),
            0xDE => (2, 2 * length(2)? as u64),
            0xDF => (4, 2 * length(4)? as u64),
            _ => (0, 0),
        };
        at += skipped;
        pending += inside;
        if at > data.len() {
            return None;
        }
    }
    Some(at)
}

/// Iterates over the elements of a complete array.
pub(super) fn items(raw: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut parts = Parts::new(raw).ok();
    (0..declared_length(raw)).map_while(move |_| parts.as_mut()?.next().ok())
}

/// Divides the bytes after the header of an array or a map into single values.
struct Parts<'a> {
    raw: &'a [u8],
    at: usize,
}

impl<'a> Parts<'a> {
    fn new(raw: &'a [u8]) -> Result<Self, Reason> {
        let width = match head_of(raw) {
            0xDC | 0xDE => 2,
            0xDD | 0xDF => 4,
            _ => 0,
        };
        if raw.len() < 1 + width {
            return Err(Reason::Malformed);
        }
        Ok(Self { raw, at: 1 + width })
    }

    fn next(&mut self) -> Result<&'a [u8], Reason> {
        let end = end_of(self.raw, self.at).ok_or(Reason::Malformed)?;
        let part = &self.raw[self.at..end];
        self.at = end;
        Ok(part)
    }

    fn end(&self) -> Result<(), Reason> {
        (self.at == self.raw.len()).then_some(()).ok_or(Reason::Malformed)
    }
}

/// The elements of an array.
pub(super) fn elements(raw: &[u8]) -> Result<Vec<&[u8]>, Reason> {
    let mut parts = Parts::new(raw)?;
    let found = (0..declared_length(raw)).map(|_| parts.next()).collect::<Result<_, _>>()?;
    parts.end()?;
    Ok(found)
}

/// If a map has at most this number of known names, a new name is compared with each of them; otherwise it is looked up in a hash table.
const MAX_COMPARED_NAMES: usize = 16;

/// Returns the names and values of a map. If a name occurs several times, its last value counts, at the position of the first.
pub(super) fn pairs(raw: &[u8]) -> Result<Vec<(&str, &[u8])>, Reason> {
    let mut parts = Parts::new(raw)?;
    let mut found: Vec<(&str, &[u8])> = Vec::new();
    let mut places = HashMap::new();
    for _ in 0..declared_length(raw) {
        let name = text(parts.next_header()?)?.ok_or(Reason::BadField)?;
        let value = parts.next()?;
        let known = if found.len() <= MAX_COMPARED_NAMES {
            step_counter::count(found.len());
            found.iter().position(|(known, _)| *known == name)
        } else {
            if places.is_empty() {
                places.extend(found.iter().enumerate().map(|(at, (name, _))| (*name, at)));
            }
            let next = found.len();
            Some(*places.entry(name).or_insert(next)).filter(|&at| at < next)
        };
        match known {
            Some(at) => found[at] = (name, value),
            None => found.push((name, value)),
        }
    }
    parts.end()?;
    Ok(found)
}

impl<'a> Parts<'a> {
    /// Reads the bytes of a key. Of an array or a map, only the header is read, since it cannot be a key.
    fn next_header(&mut self) -> Result<&'a [u8], Reason> {
        let rest = self.raw.get(self.at..).unwrap_or_default();
        let head = *rest.first().ok_or(Reason::Malformed)?;
        if is_array(head) || is_map(head) {
            return Parts::new(rest).and(Err(Reason::BadField));
        }
        self.next()
    }
}

/// Returns a text; None if the value has a different type.
pub(super) fn text(raw: &[u8]) -> Result<Option<&str>, Reason> {
    let Some(bytes) = Reader::new(raw, 0).raw_text() else {
        return Ok(None);
    };
    std::str::from_utf8(bytes).map(Some).map_err(|_| Reason::Malformed)
}

/// Returns an integer; None if the value has a different type.
pub(super) fn integer(raw: &[u8]) -> Option<i128> {
    Reader::new(raw, 0).int().map(|value| value.as_i128())
}

/// Returns the contents of a bin; None if the value has a different type.
pub(super) fn bin(raw: &[u8]) -> Option<&[u8]> {
    Reader::new(raw, 0).bin()
}

/// Reads a free-form value with at most `depth` levels of containers and at most `containers_left` containers.
pub(super) fn value(raw: &[u8], depth: usize, containers_left: &mut usize) -> Result<Value, Reason> {
    step_counter::count(1);
    let head = head_of(raw);
    if !is_array(head) && !is_map(head) {
        return scalar(raw);
    }
    let inner = depth.checked_sub(1).ok_or(Reason::TooDeep)?;
    *containers_left = containers_left.checked_sub(1).ok_or(Reason::Oversized)?;
    if is_map(head) {
        let fields = pairs(raw)?.into_iter();
        let read = fields.map(|(name, raw)| Ok((name.to_owned(), value(raw, inner, containers_left)?)));
        return Ok(Value::Map(read.collect::<Result<_, _>>()?));
    }
    Ok(Value::List(
        items(raw)
            .map(|raw| value(raw, inner, containers_left))
            .collect::<Result<_, _>>()?,
    ))
}

fn scalar(raw: &[u8]) -> Result<Value, Reason> {
    let mut reader = Reader::new(raw, 0);
    let found = match head_of(raw) {
        0xC0 => Some(Value::Nil),
        head @ (0xC2 | 0xC3) => Some(Value::Bool(head == 0xC3)),
        0xCA | 0xCB => reader.number().map(Value::Float),
        0xA0..=0xBF | 0xD9..=0xDB => text(raw)?.map(|text| Value::Text(text.to_owned())),
        0xC4..=0xC6 => reader.bin().map(|bytes| Value::Bytes(bytes.to_vec())),
        0xC7..=0xC9 | 0xD4..=0xD8 => extension(raw)?,
        _ => integer(raw).map(Value::Int),
    };
    found.ok_or(Reason::Malformed)
}

fn extension(raw: &[u8]) -> Result<Option<Value>, Reason> {
    let header = match head_of(raw) {
        0xC7 => 2,
        0xC8 => 3,
        0xC9 => 5,
        _ => 1,
    };
    let Some((&code, data)) = raw.get(header..).and_then(<[u8]>::split_first) else {
        return Ok(None);
    };
    match code as i8 {
        -1 => time(data).map(Some),
        code => Ok(Some(Value::Extension(code, data.to_vec()))),
    }
}

/// The first second of the year 1 and the last second of the year 9999, since the epoch.
const TIMESTAMP_SECONDS: std::ops::RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;

fn time(data: &[u8]) -> Result<Value, Reason> {
    let number = |bytes: &[u8]| bytes.iter().fold(0_u64, |value, &byte| value << 8 | u64::from(byte));
    let (seconds, nanos) = match data.len() {
        4 => (number(data) as i64, 0),
        8 => ((number(data) & 0x3_FFFF_FFFF) as i64, number(data) >> 34),
        12 => (number(&data[4..]) as i64, number(&data[..4])),
        _ => return Err(Reason::BadField),
    };
    if nanos >= 1_000_000_000 || !TIMESTAMP_SECONDS.contains(&seconds) {
        return Err(Reason::BadField);
    }
    let micros = (nanos + 500) / 1000;
    let (seconds, micros) = if micros == 1_000_000 {
        (seconds + 1, 0)
    } else {
        (seconds, micros)
    };
    if !TIMESTAMP_SECONDS.contains(&seconds) {
        return Err(Reason::BadField);
    }
    Ok(Value::Time(seconds, micros as u32))
}
