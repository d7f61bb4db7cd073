//! The scanner's schema: the names and layouts of events, and the limits of a payload.

use super::layouts::{LAYOUTS, field};
use super::{Field, Kind};

/// Limits of a payload; `kvevents.wire.checked_msgpack` has the same limits.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of bytes of a payload.
    pub max_payload_bytes: usize,
    /// Maximum number of events in a batch.
    pub max_events: usize,
    /// Maximum number of hashes of an event, and of entries of its `extra_keys`.
    pub max_hashes: usize,
    /// Maximum number of elements of a batch, and of an event with its tag.
    pub max_fields: usize,
    /// Maximum number of bytes of all `extra_keys` of a batch.
    pub max_free_form_bytes: usize,
    /// Maximum number of nested containers in an event.
    pub max_nesting: usize,
    /// Maximum number of rejected parts of a batch that are listed; one more entry represents all further parts.
    pub max_rejected: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_payload_bytes: 32 << 20,
            max_events: 1_000_000,
            max_hashes: 1_000_000,
            max_fields: 256,
            max_free_form_bytes: 4 << 20,
            max_nesting: 8,
            max_rejected: 1_000,
        }
    }
}

/// Number of nested containers in an event with multimodal pairs: the event, `extra_keys`, a block, a pair.
const NESTING_NEEDED: usize = 4;

/// Maximum number of names in one layout: the number of bits of `Layout::needed`.
const MAX_NAMES: usize = 64;

/// Maximum length of a msgpack string whose header is one byte.
const MAX_NAME_BYTES: usize = 31;

/// One key of a map event.
#[derive(Clone, Debug)]
pub(super) struct Name {
    /// The encoded key, with its header, followed by zeros.
    encoded: [u8; MAX_NAME_BYTES + 1],
    /// Bit mask of the bytes of `encoded` that are not padding.
    bits: [u8; MAX_NAME_BYTES + 1],
    pub length: usize,
    pub field: Field,
}

impl Name {
    /// Whether `rest` starts with this name.
    #[inline]
    pub fn starts(&self, rest: &[u8]) -> bool {
        match rest.first_chunk() {
            Some(start) => equals_masked(start, &self.encoded, &self.bits),
            None => rest.starts_with(&self.encoded[..self.length]),
        }
    }
}

/// Whether two byte arrays agree in the bits that `mask` selects. This compares machine words, which takes a fraction of the time of
/// comparing slices.
#[inline]
fn equals_masked(left: &[u8; 32], right: &[u8; 32], mask: &[u8; 32]) -> bool {
    let halves = |bytes: &[u8; 32]| {
        let (low, high) = bytes.split_at(16);
        [low, high].map(|half| half.try_into().map_or(0, u128::from_ne_bytes))
    };
    let ([a, b], [c, d], [low, high]) = (halves(left), halves(right), halves(mask));
    (a ^ c) & low | (b ^ d) & high == 0
}

/// The tag and the fields of one kind of event.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub tag: Box<str>,
    pub kind: Kind,
    /// Fields of the event as an array, after the tag.
    pub array: Box<[Field]>,
    /// Minimum number of these fields.
    pub array_needed: usize,
    /// Keys of the event as a map, except the key of the tag.
    pub names: Box<[Name]>,
    /// Bit i is set if the key i must be present.
    pub needed: u64,
}

/// The layouts of events that a scan accepts, and its limits.
#[derive(Clone, Debug)]
pub struct Schema {
    pub(super) layouts: Box<[Layout]>,
    pub(super) limits: Limits,
    pub(super) joins: bool,
}

impl Schema {
    /// Creates the schema of the events of all dialects. A limit that is too low is an error, which names the limit.
    pub fn new(limits: Limits) -> Result<Self, String> {
        Self::of_layouts(&LAYOUTS, limits)
    }

    /// Creates a schema of the given events, each with its tag, array fields and map keys. The scanner is fastest if map keys arrive in the
    /// given order. An unknown or missing name is an error, which contains the name.
    pub(super) fn of_layouts(events: &[(&str, &[&str], &[&str])], limits: Limits) -> Result<Self, String> {
        if limits.max_nesting < NESTING_NEEDED {
            return Err(format!(
                "max_nesting is {}; the native scanner needs {NESTING_NEEDED}",
                limits.max_nesting
            ));
        }
        let layouts = events
            .iter()
            .map(|(tag, array, map)| layout(tag, array, map))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            layouts,
            limits,
            joins: false,
        })
    }

    /// Returns the schema without limits, for events that were read within the limits and encoded again, since the new encoding can be
    /// larger.
    pub fn unlimited(&self) -> Self {
        let limits = Limits {
            max_payload_bytes: usize::MAX,
            max_events: usize::MAX,
            max_hashes: usize::MAX,
            max_fields: usize::MAX,
            max_free_form_bytes: usize::MAX,
            ..self.limits
        };
        Self { limits, ..self.clone() }
    }

    /// Limits of a payload.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Returns the schema for a scan that joins consecutive removals: if they have one hash each, and differ only in the hash, they become
    /// one event. Engines send one removal per block, and one event takes less time than many.
    pub fn joining(self) -> Self {
        Self { joins: true, ..self }
    }
}

fn layout(tag: &str, array: &[&str], map: &[&str]) -> Result<Layout, String> {
    let kind = kind(tag)?;
    let array = array.iter().map(|name| field(name)).collect::<Result<Box<[_]>, _>>()?;
    let names = map.iter().map(|name| key(name)).collect::<Result<Box<[_]>, _>>()?;
    if names.len() > MAX_NAMES {
        return Err(format!(
            "{tag} has {} names; the native scanner takes {MAX_NAMES}",
            names.len()
        ));
    }
    let (mut array_needed, mut needed) = (0, 0);
    for &field in needed_fields(kind) {
        let missing = || format!("{tag} has no {field:?}, which it needs");
        let in_array = array.iter().position(|&other| other == field).ok_or_else(missing)?;
        let in_map = names.iter().position(|other| other.field == field).ok_or_else(missing)?;
        array_needed = array_needed.max(in_array + 1);
        needed |= 1 << in_map;
    }
    Ok(Layout {
        tag: tag.into(),
        kind,
        array,
        array_needed,
        names,
        needed,
    })
}

fn needed_fields(kind: Kind) -> &'static [Field] {
    match kind {
        Kind::Stored => &[Field::BlockHashes, Field::Parent, Field::TokenIds, Field::BlockSize],
        Kind::Removed => &[Field::BlockHashes],
        Kind::Cleared => &[],
    }
}

fn key(name: &str) -> Result<Name, String> {
    let field = field(name)?;
    if name.len() > MAX_NAME_BYTES {
        return Err(format!("the name {name} is longer than {MAX_NAME_BYTES} bytes"));
    }
    let (mut encoded, mut bits, length) = ([0; MAX_NAME_BYTES + 1], [0; MAX_NAME_BYTES + 1], name.len() + 1);
    encoded[0] = 0xA0 | name.len() as u8;
    encoded[1..length].copy_from_slice(name.as_bytes());
    bits[..length].fill(0xFF);
    Ok(Name {
        encoded,
        bits,
        length,
        field,
    })
}

fn kind(tag: &str) -> Result<Kind, String> {
    match tag {
        "BlockStored" => Ok(Kind::Stored),
        "BlockRemoved" => Ok(Kind::Removed),
        "AllBlocksCleared" => Ok(Kind::Cleared),
        _ => Err(format!("unknown event {tag}")),
    }
}
