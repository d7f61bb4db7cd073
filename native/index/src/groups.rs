//! KV cache groups of an engine: which blocks each group contributes to a prefix, and how the index looks up prompts for the engine.

pub mod cache;
pub mod engine_hash;
pub mod search;

use std::sync::Arc;

use crate::groups::engine_hash::EngineHash;

/// The blocks of a prefix that a group needs, as in vLLM 0.33.0 (the finders of `v1/core/single_type_kv_cache_manager.py`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// All blocks; the number distinguishes full attention, MLA, full attention with a sink, and stores that name no kind.
    Full(u8),
    /// The blocks that cover the last tokens of the prefix: all tokens of the window except the one that the engine computes next. The
    /// value is the size of the window.
    Window(u32),
    /// The last block only: it holds the state after its last token (Mamba).
    State,
    /// Any other kind; its blocks do not count. An example is vLLM's chunked local attention, whose events lack the chunk length.
    Unknown,
}

/// Number of variants of full attention.
pub const FULL_KINDS: u8 = 4;

impl GroupKind {
    /// The kind of a group whose stores name no kind: full attention if it is the engine's only group.
    pub const UNNAMED: Self = Self::Full(3);

    /// The kind that a store names (`kv_cache_spec_kind`), with the window that it names. None if the kind needs a window, but the store
    /// has no valid window.
    pub fn from_spec(kind: Option<&[u8]>, window: Option<i64>) -> Option<Self> {
        Some(match kind {
            None => Self::UNNAMED,
            Some(b"full_attention") => Self::Full(0),
            Some(b"mla_attention") => Self::Full(1),
            Some(b"sink_full_attention") => Self::Full(2),
            Some(b"sliding_window" | b"sliding_window_mla") => {
                let window = window.and_then(|window| u32::try_from(window).ok());
                Self::Window(window.filter(|&window| window > 0)?)
            }
            Some(b"mamba") => Self::State,
            Some(_) => Self::Unknown,
        })
    }

    /// Whether a store of the kind `other` adds no knowledge about a group of this kind.
    pub fn includes(self, other: Self) -> bool {
        self == other || (self.is_full() && other == Self::UNNAMED)
    }

    /// Whether every block of a prefix is needed.
    pub fn is_full(self) -> bool {
        matches!(self, Self::Full(_))
    }
}

/// One KV cache group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The number that identifies the group in events.
    pub number: i64,
    /// The blocks of a prefix that the group needs.
    pub kind: GroupKind,
    /// Number of tokens of a block; 0 if the kind of the group is unknown.
    pub size: u32,
}

/// How prompts are looked up for an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Prompts are looked up in bitmaps of many engines at once: the engine has one group, which needs every block of a prefix.
    Bitmaps,
    /// Prompts are looked up in the records of blocks of full attention; these suffice, since blocks of other groups end at the same
    /// positions.
    Records,
    /// Prompts are looked up by the hashes that the engine itself computes for prompts (`crate::groups::cache`).
    Hashes,
}

/// The groups of one engine, in the order of their numbers, and all properties of the engine that determine how prompts are looked up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    groups: Vec<Group>,
    /// The scheme by which the engine hashes prompts; None until the scheme is known.
    pub hashing: Option<EngineHash>,
    /// Whether the engine's hashes also cover tokens after their blocks.
    pub has_lookahead: bool,
    /// The levels, as bits, on which a second store of a block is a second copy. These are the levels whose events name groups (as events
    /// of vLLM's block pool do), and the device if the engine's cache is attested. A cache on another level has one logical copy of a
    /// block, which some engines announce several times.
    pub copied_levels: u8,
    /// Whether the hashes of some stored blocks might cover values that no event contains: the path of a LoRA, or the positions of
    /// multimodal items.
    pub has_unknown_inputs: bool,
    /// Groups of the draft model (EAGLE, MTP), in which the engine computes the last block of a hit again; an empty list means all groups.
    /// None if the engine has no draft model.
    pub drafts: Option<Arc<[i64]>>,
}

impl Groups {
    /// All groups, in the order of their numbers.
    pub fn all(&self) -> &[Group] {
        &self.groups
    }

    /// The kind of a group.
    pub fn kind(&self, number: i64) -> Option<GroupKind> {
        let found = self.groups.iter().find(|group| group.number == number);
        found.map(|group| group.kind)
    }

    /// Learns a group from a store. Returns whether the groups have changed.
    #[inline]
    pub fn learn(&mut self, number: i64, kind: GroupKind, size: u32) -> bool {
        match self.groups.iter_mut().find(|group| group.number == number) {
            // A store of a part of a block (`cache_partial_block`) states the size of the part's last hash unit, so the largest size
            // counts.
            Some(group) if group.kind.includes(kind) && group.size >= size => return false,
            Some(group) => {
                let is_known = group.kind.includes(kind);
                (group.kind, group.size) = (if is_known { group.kind } else { kind }, size.max(group.size));
            }
            None => {
                self.groups.push(Group { number, kind, size });
                self.groups.sort_by_key(|group| group.number);
            }
        }
        true
    }

    /// Forgets everything that was learned from stores.
    pub fn forget(&mut self) {
        *self = Self {
            drafts: self.drafts.take(),
            ..Self::default()
        };
    }

    /// Whether the engine computes the last block of a hit again in this group. False if hashes cover tokens after their blocks.
    pub fn is_draft(&self, number: i64) -> bool {
        let drafts = self.drafts.as_deref().filter(|_| !self.has_lookahead);
        drafts.is_some_and(|drafts| drafts.is_empty() || drafts.contains(&number))
    }

    /// The groups that lookups search: those of a known kind.
    pub fn known(&self) -> impl Iterator<Item = &Group> {
        self.groups.iter().filter(|group| group.kind != GroupKind::Unknown)
    }

    /// Number of tokens of a block of full attention; None if no group has full attention, or if block sizes of such groups differ.
    pub fn full_size(&self) -> Option<u32> {
        match self.full_sizes()[..] {
            [size] => Some(size),
            _ => None,
        }
    }

    /// The sizes of blocks of full attention.
    pub fn full_sizes(&self) -> Vec<u32> {
        let mut sizes: Vec<u32> = self
            .known()
            .filter(|group| group.kind.is_full())
            .map(|group| group.size)
            .collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// Number of tokens from one hash to the next; the size of a block of full attention if the scheme is not known.
    pub fn unit(&self) -> u32 {
        let sizes = || self.known().map(|group| group.size).min();
        let known = self.hashing.as_ref().map(|hashing| hashing.unit);
        known.or_else(|| self.full_size()).or_else(sizes).unwrap_or(1)
    }

    /// Whether some group needs every block of a prefix. Only stores of such groups announce all blocks, with their tokens.
    pub fn has_full(&self) -> bool {
        self.known().any(|group| group.kind.is_full())
    }

    /// Whether a hit can end inside of a block, at a multiple of `unit` tokens.
    pub fn can_end_inside_blocks(&self) -> bool {
        let unit = self.unit();
        let has_unit_blocks = |group: &Group| !matches!(group.kind, GroupKind::Window(_)) || group.size == unit;
        self.known().any(|group| group.kind == GroupKind::State && group.size > unit) && self.known().all(has_unit_blocks)
    }

    /// Maximum number of tokens by which a hit can exceed the held blocks of full attention.
    pub fn partial_tokens(&self) -> u32 {
        let sizes = self.known().filter(|group| group.kind.is_full()).map(|group| group.size);
        let largest = sizes.max().filter(|_| self.can_end_inside_blocks());
        largest.map_or(0, |size| size.saturating_sub(self.unit()))
    }

    /// Whether the search for a hit needs windows that end after the last held block of full attention. This is true of a draft model's
    /// windows, which are searched up to one block after the hit.
    fn looks_ahead(&self) -> bool {
        let has_draft =
            |is_full: bool| (self.known()).any(|group| group.kind.is_full() == is_full && self.is_draft(group.number));
        has_draft(false) && !has_draft(true)
    }

    fn has_states(&self) -> bool {
        self.known().any(|group| group.kind == GroupKind::State)
    }

    /// Whether the only group has full attention, the engine has no draft model, and hashes cover no tokens after their blocks.
    #[inline]
    fn has_plain_full(&self) -> bool {
        let is_full = |group: &Group| group.kind.is_full();
        self.groups.len() == 1 && self.groups.iter().all(is_full) && !self.has_lookahead && self.drafts.is_none()
    }

    /// Returns the method by which the engine's prompts are looked up.
    pub fn method(&self) -> Method {
        let mut known = self.known();
        let (first, second) = (known.next(), known.next());
        match (first, second) {
            (None, _) => return Method::Bitmaps,
            _ if self.has_lookahead => return Method::Hashes,
            (Some(group), None) if group.kind.is_full() && self.drafts.is_none() => return Method::Bitmaps,
            _ => {}
        }
        // A hit can end inside of a block only if the engine has groups with states.
        let is_multiple = |size: u32| self.known().all(|group| group.size.is_multiple_of(size));
        match self.full_size() {
            Some(size) if is_multiple(size) && !(self.has_states() && self.unit() < size) && !self.looks_ahead() => {
                Method::Records
            }
            _ => Method::Hashes,
        }
    }

    /// Whether the scheme by which the engine hashes prompts must be found.
    pub fn needs_hashing(&self) -> bool {
        self.hashing.is_none() && (self.has_states() || self.method() == Method::Hashes)
    }

    /// Whether lookups cannot search a group of a kind as the engine does. vLLM 0.20 and 0.21 name no kinds, also for groups with windows.
    fn is_unknown(&self, kind: GroupKind) -> bool {
        kind == GroupKind::Unknown || (kind == GroupKind::UNNAMED && self.groups.len() > 1)
    }

    /// Why answers for the engine's prompts are estimates; None if the answers are exact. `sizes` is the number of different block sizes
    /// that the engine has announced on the device.
    pub fn estimate(&self, sizes: usize) -> Option<&'static str> {
        if self.has_plain_full() {
            (sizes > 1).then_some("several-block-sizes")
        } else if self.groups.iter().any(|group| self.is_unknown(group.kind)) {
            Some("unknown-kind")
        } else if self.needs_hashing() {
            Some("unknown-hashing")
        } else if sizes > 1 && self.method() != Method::Hashes {
            Some("several-block-sizes")
        } else {
            None
        }
    }
}
