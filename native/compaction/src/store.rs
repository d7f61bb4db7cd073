//! Events with everything that a snapshot has to say again: as a payload has them, and as they are told.

use kvevents_index::applying::Read;
use kvevents_index::scan::{Event, Reader};

/// Levels of containers in the extra keys of one block.
const EXTRA_NESTING: usize = 4;

/// Where copies of blocks are, as an event says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct PlaceView<'a> {
    pub medium: Option<&'a [u8]>,
    pub locality: Option<&'a [u8]>,
    pub ownership: Option<&'a [u8]>,
    pub group: Option<i64>,
}

/// A store; fields as in `scan::Event`.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct StoreView<'a> {
    pub hashes: &'a [u64],
    pub parent: Option<u64>,
    /// Under EAGLE pairs, one after the other.
    pub tokens: &'a [u32],
    pub pairs: bool,
    pub unkeyable: bool,
    /// In the place of tokens.
    pub keys: Option<&'a [u64]>,
    pub block_size: u64,
    pub place: PlaceView<'a>,
    pub kind: Option<&'a [u8]>,
    pub window: Option<i64>,
    pub lora_id: Option<i64>,
    pub lora_name: Option<&'a [u8]>,
    pub cache_salt: Option<&'a [u8]>,
    /// Msgpack: per block a list or nil.
    pub extra_keys: Option<&'a [u8]>,
}

/// The place that an event of a payload is about.
pub fn place_of<'a>(read: &'a Read<'_>, event: &Event) -> PlaceView<'a> {
    PlaceView {
        medium: read.bytes(event.medium),
        locality: read.bytes(event.locality),
        ownership: read.bytes(event.ownership),
        group: event.group,
    }
}

/// A store of a payload.
pub fn store_of<'a>(read: &'a Read<'_>, event: &Event) -> StoreView<'a> {
    StoreView {
        hashes: event.hashes.slice(&read.scratch.hashes),
        parent: event.parent,
        tokens: event.tokens.slice(&read.scratch.tokens),
        pairs: event.pairs,
        unkeyable: event.unkeyable,
        keys: event.keyed.then(|| event.keys.slice(&read.scratch.hashes)),
        block_size: event.block_size,
        place: place_of(read, event),
        kind: read.bytes(event.spec_kind),
        window: event.window,
        lora_id: event.lora_id,
        lora_name: read.bytes(event.lora_name),
        cache_salt: read.bytes(event.cache_salt),
        extra_keys: read.bytes(event.extra_keys),
    }
}

/// The entries of `extra_keys`, each as it came; none for nil.
pub fn entries<'a>(raw: Option<&'a [u8]>, found: &mut Vec<Option<&'a [u8]>>) -> Option<()> {
    found.clear();
    let Some(raw) = raw else { return Some(()) };
    let mut reader = Reader::new(raw, 0);
    for _ in 0..reader.array()? {
        let start = reader.at;
        if reader.nil() {
            found.push(None);
        } else {
            reader.skip(EXTRA_NESTING)?;
            found.push(Some(&raw[start..reader.at]));
        }
    }
    Some(())
}

/// Entries as the `extra_keys` of one event; None where all of them are.
pub fn joined<'a>(entries: impl ExactSizeIterator<Item = Option<&'a [u8]>> + Clone) -> Option<Vec<u8>> {
    if entries.clone().all(|entry| entry.is_none()) {
        return None;
    }
    let count = entries.len() as u32;
    let mut raw = match count {
        0..=15 => vec![0x90 | count as u8],
        _ => [&[0xDD][..], &count.to_be_bytes()].concat(),
    };
    for entry in entries {
        raw.extend_from_slice(entry.unwrap_or(&[0xC0]));
    }
    Some(raw)
}

type Bytes = Option<Box<[u8]>>;

/// `PlaceView` with values of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Place {
    pub medium: Bytes,
    pub locality: Bytes,
    pub ownership: Bytes,
    pub group: Option<i64>,
}

impl Place {
    /// Of a view.
    pub fn of(view: &PlaceView<'_>) -> Self {
        Self {
            medium: view.medium.map(Box::from),
            locality: view.locality.map(Box::from),
            ownership: view.ownership.map(Box::from),
            group: view.group,
        }
    }

    /// As events have it.
    pub fn view(&self) -> PlaceView<'_> {
        PlaceView {
            medium: self.medium.as_deref(),
            locality: self.locality.as_deref(),
            ownership: self.ownership.as_deref(),
            group: self.group,
        }
    }
}

/// `StoreView` with values of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Store {
    pub hashes: Vec<u64>,
    pub parent: Option<u64>,
    pub tokens: Vec<u32>,
    pub pairs: bool,
    pub keys: Option<Vec<u64>>,
    pub block_size: u64,
    pub place: Place,
    pub kind: Bytes,
    pub window: Option<i64>,
    pub lora_id: Option<i64>,
    pub lora_name: Bytes,
    pub cache_salt: Bytes,
    pub extra_keys: Option<Vec<u8>>,
}

impl Store {
    /// As events have it.
    pub fn view(&self) -> StoreView<'_> {
        StoreView {
            hashes: &self.hashes,
            parent: self.parent,
            tokens: &self.tokens,
            pairs: self.pairs,
            unkeyable: false,
            keys: self.keys.as_deref(),
            block_size: self.block_size,
            place: self.place.view(),
            kind: self.kind.as_deref(),
            window: self.window,
            lora_id: self.lora_id,
            lora_name: self.lora_name.as_deref(),
            cache_salt: self.cache_salt.as_deref(),
            extra_keys: self.extra_keys.as_deref(),
        }
    }
}

/// One event of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// Blocks, each the parent of the next.
    Stored(Store),
    /// Hashes that are to go again.
    Removed(Vec<u64>, Place),
}
