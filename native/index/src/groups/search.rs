//! How an engine finds the cached prefix of a prompt when its KV cache groups differ in kind or block size.
//!
//! The rules are those of vLLM 0.33.0: `HybridKVCacheCoordinator.find_longest_cache_hit` (`v1/core/kv_cache_coordinator.py`) and the
//! finders of each kind of group (`v1/core/single_type_kv_cache_manager.py`). Positions are counted in tokens.

use std::cell::Cell;

use crate::groups::{GroupKind, Groups};
use crate::step_counter;

/// A cached prefix of a prompt, as an engine finds it.
#[derive(Clone, Copy, Debug, Default)]
pub struct CachedPrefix {
    /// Length of the prefix in tokens.
    pub tokens: usize,
    /// Whether the search ended. If not, `tokens` is an upper bound.
    pub is_exact: bool,
}

/// The blocks that groups hold of a prompt.
pub trait Blocks {
    /// Whether a group, by its index in `Groups::known`, holds the block that ends at a position.
    fn is_held(&self, group: usize, position: usize) -> bool;

    /// The bounds of a range around this position in which each group holds either all of its blocks or none.
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
pub fn find(groups: &Groups, end: usize, longest: usize, blocks: impl Blocks) -> CachedPrefix {
    let search = Search::new(groups, end, blocks);
    let tokens = if search.specs.is_empty() { 0 } else { search.run(longest) };
    CachedPrefix {
        tokens,
        is_exact: search.looks_left.take() > 0,
    }
}

/// Examined blocks of a search, counted for each group, per position at which a block can end. Engines need a few for each of their groups;
/// a peer could cause thousands.
const LOOKS_PER_POSITION: usize = 16;
/// Maximum number of examined blocks for a long prompt; each position has four in any case.
const MAX_LOOKS: usize = 1 << 17;

/// Groups of one kind and block size, which are searched together.
struct Spec {
    kind: GroupKind,
    size: usize,
    /// Positions of its groups in `Groups::known`.
    groups: Vec<usize>,
    /// Whether the last block of a hit is dropped, since a draft model needs it computed again.
    drops: bool,
}

/// The state of one lookup.
struct Search<F> {
    specs: Vec<Spec>,
    blocks: F,
    /// Number of blocks that the lookup may still examine. After the last one it ends.
    looks_left: Cell<usize>,
    end: usize,
    unit: usize,
    /// Hits are multiples of this many tokens.
    alignment: usize,
    /// Whether a hit can end inside of a block.
    is_fine: bool,
    /// Whether the engine has one group.
    is_single: bool,
}

impl<F: Blocks> Search<F> {
    fn new(groups: &Groups, end: usize, blocks: F) -> Self {
        let unit = groups.unit() as usize;
        let positions = end / unit + 1;
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
        let is_fine = groups.are_fine();
        let multiple = specs.iter().fold(1, |multiple, spec| common_multiple(multiple, spec.size));
        Self {
            is_single: groups.known().count() == 1,
            alignment: if is_fine { unit } else { multiple },
            specs,
            blocks,
            looks_left: Cell::new((LOOKS_PER_POSITION * positions).min(MAX_LOOKS).max(4 * positions)),
            end,
            unit,
            is_fine,
        }
    }

    /// The longest prefix that all groups can serve: each of them shortens the candidate until none does.
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
                // Blocks of full attention are looked up once: any shorter prefix is held too.
                if let (GroupKind::Full(_), Some(found)) = (spec.kind, found[at]) {
                    hit = hit.min(found);
                    continue;
                }
                let drops = spec.drops && !is_verified[at];
                let margin = if drops { self.margin(spec) } else { 0 };
                let most = if margin > 0 { (hit + margin).min(self.end) } else { hit };
                let next = self.find(spec, most, drops);
                if self.looks_left.get() == 0 {
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

    /// Number of tokens after a candidate that a draft group matches and then drops. States of a draft model do not exist.
    fn margin(&self, spec: &Spec) -> usize {
        match spec.kind {
            GroupKind::State | GroupKind::Unknown => 0,
            GroupKind::Full(_) if self.is_fine && spec.size > self.unit => self.unit,
            _ => spec.size,
        }
    }

    /// Whether all groups of a spec hold the block that ends at a position.
    fn is_held(&self, spec: &Spec, position: usize) -> bool {
        spec.groups
            .iter()
            .all(|&group| self.looks(1) && self.blocks.is_held(group, position))
    }

    /// Counts examined blocks. Returns whether any are left.
    fn looks(&self, count: usize) -> bool {
        let left = self.looks_left.get().saturating_sub(count);
        self.looks_left.set(left);
        step_counter::count(count);
        left > 0
    }

    fn find(&self, spec: &Spec, most: usize, drops: bool) -> usize {
        match spec.kind {
            GroupKind::Full(_) => self.find_full(spec, most, drops),
            GroupKind::Window(window) => self.find_window(spec, most, window as usize, drops),
            GroupKind::State | GroupKind::Unknown => self.find_state(spec, most),
        }
    }

    fn find_full(&self, spec: &Spec, most: usize, drops: bool) -> usize {
        let alignment = if self.is_single { spec.size } else { self.alignment };
        let (mut blocks, last) = (0, most / spec.size);
        while blocks < last && self.is_held(spec, (blocks + 1) * spec.size) {
            let (_, until) = self.blocks.alike((blocks + 1) * spec.size);
            blocks = (until / spec.size).clamp(blocks + 1, last);
        }
        let mut hit = blocks * spec.size;
        if alignment < spec.size {
            let end = (hit + spec.size - alignment).min(most / alignment * alignment);
            let mut ends = (hit / alignment + 1..=end / alignment).rev().map(|count| count * alignment);
            hit = ends.find(|&end| self.is_held(spec, end)).unwrap_or(hit);
        }
        if drops && hit > 0 {
            hit -= alignment.min(spec.size);
        }
        hit - hit % alignment
    }

    /// Searches for a window from the end of the prompt. A prefix shorter than the window needs all of its blocks.
    fn find_window(&self, spec: &Spec, most: usize, window: usize, drops: bool) -> usize {
        let size = spec.size;
        let alignment = if self.is_single { size } else { self.alignment };
        let dropped = usize::from(drops);
        let need = (window - 1).div_ceil(size) + dropped;
        let is_aligned = |blocks: usize| size == alignment || (blocks * size).is_multiple_of(alignment);
        let (mut run, mut end, mut at) = (0, 0, most / size);
        while at > 0 {
            let first = self.blocks.alike(at * size).0.div_ceil(size).clamp(1, at);
            if !self.is_held(spec, at * size) {
                (run, at) = (0, first - 1);
                continue;
            }
            if run == 0 {
                // A hit ends at the last of these blocks that can end one.
                let last = (first..=at).rev().find(|last| last >= &dropped && is_aligned(last - dropped));
                let Some(last) = last.filter(|last| self.looks(at - last + 1)) else {
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

    fn find_state(&self, spec: &Spec, most: usize) -> usize {
        let alignment = if self.is_single { spec.size } else { self.alignment };
        let step = if alignment < spec.size { alignment } else { spec.size };
        let mut end = most / step * step;
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

/// Returns the least common multiple of two sizes, bounded, since a peer chooses both 32-bit sizes.
fn common_multiple(one: usize, other: usize) -> usize {
    let (mut a, mut b) = (one, other);
    while b > 0 {
        (a, b) = (b, a % b);
    }
    (one / a).saturating_mul(other)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// Rows of consecutive blocks, each with the position after its last block and the groups that hold it.
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

        /// A search over rows of blocks has the result of a search block by block.
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
            let each = find(&groups, end, longest, |group: usize, position: usize| rows.is_held(group, position));
            let together = find(&groups, end, longest, rows);
            prop_assert!(together.is_exact || !each.is_exact);
            prop_assert!(!each.is_exact || together.tokens == each.tokens, "{} and {}", together.tokens, each.tokens);
        }
    }
}
