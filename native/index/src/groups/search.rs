//! How an engine finds the cached prefix of a prompt when its KV cache groups differ in kind or block size.
//!
//! The rules are those of vLLM 0.33.0: `HybridKVCacheCoordinator.find_longest_cache_hit` (`v1/core/kv_cache_coordinator.py`) and the
//! finders of each kind of group (`v1/core/single_type_kv_cache_manager.py`). Positions are counted in tokens.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use crate::groups::{GroupKind, Groups};
use crate::step_counter;

/// A cached prefix of a prompt, as an engine finds it.
#[derive(Clone, Copy, Debug, Default)]
pub struct CachedPrefix {
    /// Length of the prefix in tokens.
    pub tokens: usize,
    /// Whether the search was completed. If it was not, `tokens` is an upper bound.
    pub is_exact: bool,
}

/// Which blocks of a prompt each group holds.
pub trait Blocks {
    /// Whether a group, by its index in `Groups::known`, holds the block that ends at a position.
    fn is_held(&self, group: usize, position: usize) -> bool;

    /// The first and last position of a range around `position` in which each group holds either all of its blocks or none.
    fn alike(&self, position: usize) -> (usize, usize) {
        (position, position)
    }
}

impl<F: Fn(usize, usize) -> bool> Blocks for F {
    fn is_held(&self, group: usize, position: usize) -> bool {
        self(group, position)
    }
}

/// Returns the prefix that an engine finds cached, of at most `longest` tokens. `end` is the last position at which a block of the prompt
/// can end.
pub fn find(groups: &Groups, end: usize, longest: usize, looks: &Looks<'_>, blocks: impl Blocks) -> CachedPrefix {
    let search = Search::new(groups, end, looks, blocks);
    let tokens = if search.specs.is_empty() { 0 } else { search.run(longest) };
    CachedPrefix {
        tokens,
        is_exact: looks.are_left(),
    }
}

/// Number of blocks that the searches for one stream may examine for each position at which a block can end. A block is counted once for
/// each group in which it is examined. Prompts of usual engines need only a few per group, but a peer could cause thousands.
const LOOKS_PER_POSITION: usize = 4;
/// Maximum number of blocks that the searches for one stream may examine before they use the shared budget. One engine can have 64 streams.
const MAX_OWN_LOOKS: usize = 1 << 15;
/// After their own budgets are used up, the searches for all streams of one lookup may together examine this many blocks: a peer can have
/// many streams.
pub const SHARED_LOOKS: usize = 1 << 19;
/// Number of these blocks that the streams of one source may examine together, so that no source uses up what others need.
pub const SOURCE_LOOKS: usize = 1 << 17;

/// The looks that the searches of one lookup share.
#[derive(Debug, Default)]
pub struct SharedLooks {
    used: Cell<usize>,
    used_by_source: RefCell<HashMap<String, usize>>,
}

impl SharedLooks {
    /// Begins another lookup.
    pub fn begin(&mut self) {
        self.used.set(0);
        self.used_by_source.get_mut().clear();
    }
}

/// The number of looks that the searches for one stream may use. In one look, a search checks one block for one group. A search ends when
/// no look remains.
#[derive(Debug)]
pub struct Looks<'a> {
    own: Cell<usize>,
    shared: &'a SharedLooks,
    source: &'a str,
}

impl<'a> Looks<'a> {
    /// Creates the budget of a stream whose blocks have `positions` distinct end positions. `shared` is the budget that all streams of a
    /// lookup share.
    pub fn new(positions: usize, shared: &'a SharedLooks, source: &'a str) -> Self {
        Self {
            own: Cell::new(MAX_OWN_LOOKS.min(LOOKS_PER_POSITION * (positions + 1))),
            shared,
            source,
        }
    }

    #[inline]
    fn are_left(&self) -> bool {
        self.own.get() > 0 || self.take_shared(0)
    }

    /// Subtracts `count` shared looks. Returns whether any of them remains for the source.
    #[cold]
    fn take_shared(&self, count: usize) -> bool {
        let (shared, mut by_source) = (&self.shared.used, self.shared.used_by_source.borrow_mut());
        let used = by_source.entry(self.source.into()).or_default();
        *used += count;
        shared.set(shared.get() + count);
        shared.get() < SHARED_LOOKS && *used < SOURCE_LOOKS
    }

    /// Subtracts `count` looks. Returns whether any look remains.
    pub fn take(&self, count: usize) -> bool {
        step_counter::count(count);
        let own = self.own.get();
        self.own.set(own.saturating_sub(count));
        own > count || self.take_shared(count - own)
    }
}

/// All groups that have the same kind and block size; they are searched together.
struct Spec {
    kind: GroupKind,
    size: usize,
    /// Positions of the spec's groups in `Groups::known`.
    groups: Vec<usize>,
    /// Whether the search drops the last block of a hit, since the draft model needs this block to be computed again.
    drops: bool,
}

/// The state of the search of one stream for one prompt.
struct Search<'a, F> {
    specs: Vec<Spec>,
    blocks: F,
    looks: &'a Looks<'a>,
    end: usize,
    unit: usize,
    /// The number of tokens of a hit is a multiple of this number.
    alignment: usize,
    /// Whether a hit can end inside of a block.
    can_end_inside_blocks: bool,
    /// Whether the engine has a single group.
    is_single: bool,
}

impl<'a, F: Blocks> Search<'a, F> {
    fn new(groups: &Groups, end: usize, looks: &'a Looks<'a>, blocks: F) -> Self {
        let unit = groups.unit() as usize;
        let mut specs: Vec<Spec> = Vec::new();
        for (at, group) in groups.known().enumerate() {
            let (size, drops) = (group.size as usize, groups.is_draft(group.number));
            match specs.iter_mut().find(|spec| spec.kind == group.kind && spec.size == size) {
                Some(spec) => {
                    spec.groups.push(at);
                    spec.drops |= drops;
                }
                None => specs.push(Spec {
                    kind: group.kind,
                    size,
                    groups: vec![at],
                    drops,
                }),
            }
        }
        specs.sort_by_key(|spec| !spec.kind.is_full());
        let can_end_inside_blocks = groups.can_end_inside_blocks();
        let multiple = specs.iter().fold(1, |multiple, spec| common_multiple(multiple, spec.size));
        Self {
            is_single: groups.known().count() == 1,
            alignment: if can_end_inside_blocks { unit } else { multiple },
            specs,
            blocks,
            looks,
            end,
            unit,
            can_end_inside_blocks,
        }
    }

    /// Returns the longest prefix that all groups can serve: each group shortens a candidate, until no group shortens it further.
    fn run(&self, longest: usize) -> usize {
        if self.is_single {
            return self.find(&self.specs[0], longest, self.specs[0].drops);
        }
        let is_simple = self.specs.len() == 2 && matches!(self.specs[0].kind, GroupKind::Full(_));
        let mut found: Vec<Option<usize>> = vec![None; self.specs.len()];
        let mut is_verified = vec![false; self.specs.len()];
        let mut candidate = longest;
        loop {
            let mut hit = candidate;
            for (at, spec) in self.specs.iter().enumerate() {
                // Blocks of full attention are searched only in the first pass: if a prefix is held, its beginning is held too.
                if let (GroupKind::Full(_), Some(found)) = (spec.kind, found[at]) {
                    hit = hit.min(found);
                    continue;
                }
                let drops = spec.drops && !is_verified[at];
                let margin = if drops { self.margin(spec) } else { 0 };
                let max_tokens = if margin > 0 { (hit + margin).min(self.end) } else { hit };
                let next = self.find(spec, max_tokens, drops);
                if !self.looks.are_left() {
                    return hit;
                }
                if drops {
                    is_verified[at] = true;
                } else if next < hit {
                    is_verified.fill(false);
                }
                (hit, found[at]) = (next, Some(next));
            }
            if hit >= candidate || is_simple {
                return hit.min(candidate);
            }
            candidate = hit;
        }
    }

    /// Number of tokens by which the search of a draft model's group extends a candidate, since the search drops the last block of a hit.
    /// It is 0 for kinds of groups that draft models do not have.
    fn margin(&self, spec: &Spec) -> usize {
        match spec.kind {
            GroupKind::State | GroupKind::Unknown => 0,
            GroupKind::Full(_) if self.can_end_inside_blocks && spec.size > self.unit => self.unit,
            _ => spec.size,
        }
    }

    /// Whether all groups of a spec hold the block that ends at a position.
    fn is_held(&self, spec: &Spec, position: usize) -> bool {
        spec.groups
            .iter()
            .all(|&group| self.looks.take(1) && self.blocks.is_held(group, position))
    }

    fn find(&self, spec: &Spec, max_tokens: usize, drops: bool) -> usize {
        match spec.kind {
            GroupKind::Full(_) => self.find_full(spec, max_tokens, drops),
            GroupKind::Window(window) => self.find_window(spec, max_tokens, window as usize, drops),
            GroupKind::State | GroupKind::Unknown => self.find_state(spec, max_tokens),
        }
    }

    fn find_full(&self, spec: &Spec, max_tokens: usize, drops: bool) -> usize {
        let alignment = if self.is_single { spec.size } else { self.alignment };
        let (mut blocks, last) = (0, max_tokens / spec.size);
        while blocks < last && self.is_held(spec, (blocks + 1) * spec.size) {
            let (_, until) = self.blocks.alike((blocks + 1) * spec.size);
            blocks = (until / spec.size).clamp(blocks + 1, last);
        }
        let mut hit = blocks * spec.size;
        if alignment < spec.size {
            let end = (hit + spec.size - alignment).min(max_tokens / alignment * alignment);
            let mut ends = (hit / alignment + 1..=end / alignment).rev().map(|count| count * alignment);
            hit = ends.find(|&end| self.is_held(spec, end)).unwrap_or(hit);
        }
        if drops && hit > 0 {
            hit -= alignment.min(spec.size);
        }
        hit - hit % alignment
    }

    /// Searches backwards from the end of the prompt for enough consecutive blocks to cover the window. A prefix that is shorter than the
    /// window needs all blocks from the beginning.
    fn find_window(&self, spec: &Spec, max_tokens: usize, window: usize, drops: bool) -> usize {
        let size = spec.size;
        let alignment = if self.is_single { size } else { self.alignment };
        let dropped = usize::from(drops);
        let need = (window - 1).div_ceil(size) + dropped;
        let is_aligned = |blocks: usize| size == alignment || (blocks * size).is_multiple_of(alignment);
        let (mut run, mut end, mut at) = (0, 0, max_tokens / size);
        while at > 0 {
            let first = self.blocks.alike(at * size).0.div_ceil(size).clamp(1, at);
            if !self.is_held(spec, at * size) {
                (run, at) = (0, first - 1);
                continue;
            }
            if run == 0 {
                // The hit ends at the last block of this range at which hits can end.
                let last = (first..=at).rev().find(|last| last >= &dropped && is_aligned(last - dropped));
                let Some(last) = last.filter(|last| self.looks.take(at - last + 1)) else {
                    at = first - 1;
                    continue;
                };
                (end, at) = (last, last);
            }
            run += need.saturating_sub(run).clamp(1, at - first + 1);
            if run >= need {
                break;
            }
            at = first - 1;
        }
        let mut blocks = if run >= need && run > 0 { end } else { run };
        if run < need {
            while !is_aligned(blocks) {
                blocks -= 1;
            }
        }
        if drops && blocks > 0 {
            blocks -= 1;
            while !is_aligned(blocks) {
                blocks -= 1;
            }
        }
        blocks * size
    }

    fn find_state(&self, spec: &Spec, max_tokens: usize) -> usize {
        let alignment = if self.is_single { spec.size } else { self.alignment };
        let step = if alignment < spec.size { alignment } else { spec.size };
        let mut end = max_tokens / step * step;
        while end > 0 {
            let mut before = end;
            if end.is_multiple_of(alignment) {
                if self.is_held(spec, end) {
                    return end;
                }
                before = self.blocks.alike(end).0.clamp(1, end);
            }
            end = (before - 1) / step * step;
        }
        0
    }
}

/// Returns the least common multiple of two sizes, or the largest `usize` if the multiple is larger: peers choose the sizes.
fn common_multiple(size: usize, other_size: usize) -> usize {
    let (mut a, mut b) = (size, other_size);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    (size / a).saturating_mul(other_size)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Rows of consecutive blocks: for each row, the position after its last block, and for each group whether the group holds the row.
    struct Rows<'a> {
        rows: &'a [(usize, Vec<bool>)],
        size: usize,
    }

    impl Rows<'_> {
        fn row(&self, position: usize) -> usize {
            self.rows.partition_point(|(end, _)| end * self.size < position)
        }
    }

    impl Blocks for Rows<'_> {
        fn is_held(&self, group: usize, position: usize) -> bool {
            let row = self.rows.get(self.row(position));
            position.is_multiple_of(self.size) && row.is_some_and(|(_, held)| held[group])
        }

        fn alike(&self, position: usize) -> (usize, usize) {
            let at = self.row(position);
            match self.rows.get(at) {
                Some((end, _)) if position.is_multiple_of(self.size) => {
                    let start = at.checked_sub(1).map_or(0, |before| self.rows[before].0);
                    ((start + 1) * self.size, end * self.size)
                }
                _ => (position, position),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// A search over rows of blocks has the same result as a search over single blocks.
        #[test]
        fn rows_are_searched_as_their_blocks(
            kinds in vec((0_u32..4, 1_u32..3, 1_u32..40), 1..4),
            lengths in vec((1_usize..9, vec(any::<bool>(), 4)), 0..9),
            drafts in proptest::option::of(vec(0_i64..4, 0..3)),
            longest in 0_usize..200,
        ) {
            let size = 4_u32;
            let mut groups = Groups { drafts: drafts.map(Arc::from), ..Groups::default() };
            for (number, &(kind, multiple, window)) in kinds.iter().enumerate() {
                let kind = match kind {
                    0 | 1 => GroupKind::Full(0),
                    2 => GroupKind::Window(window),
                    _ => GroupKind::State,
                };
                groups.learn(number as i64, kind, size * multiple);
            }
            let mut end = 0;
            let rows: Vec<(usize, Vec<bool>)> = lengths
                .into_iter()
                .map(|(length, held)| {
                    end += length;
                    (end, held)
                })
                .collect();
            let (end, size) = (end * size as usize, size as usize);
            let rows = Rows { rows: &rows, size };
            let shared = SharedLooks::default();
            let each = find(&groups, end, longest, &Looks::new(end, &shared, ""), |group: usize, position: usize| {
                rows.is_held(group, position)
            });
            let together = find(&groups, end, longest, &Looks::new(end, &shared, ""), rows);
            prop_assert!(together.is_exact || !each.is_exact);
            prop_assert!(!each.is_exact || together.tokens == each.tokens, "{} and {}", together.tokens, each.tokens);
        }
    }
}
