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
    /// Its tokens.
    pub tokens: usize,
    /// Whether the search ended. If not, `tokens` is an upper bound.
    pub is_exact: bool,
}

/// Returns the prefix that an engine finds cached, of at most `longest` tokens. `end` is the last position at which a block of the prompt
/// can end. `is_held` returns whether a group, by its index in `Groups::known`, holds the block that ends at a position.
pub fn find(groups: &Groups, end: usize, longest: usize, is_held: impl Fn(usize, usize) -> bool) -> CachedPrefix {
    let search = Search::new(groups, end, is_held);
    let tokens = if search.specs.is_empty() { 0 } else { search.run(longest) };
    CachedPrefix {
        tokens,
        is_exact: search.looks_left.take() > 0,
    }
}

/// Looks of a search, each at one block of one group, for each position at which a block can end. Engines need a few for each of their
/// groups; a peer could cause thousands.
const LOOKS_PER_POSITION: usize = 16;
/// Maximum number of looks for a long prompt, of which each position has four in any case.
const MAX_LOOKS: usize = 1 << 17;

/// Groups of one kind and block size, which are searched together.
struct Spec {
    kind: GroupKind,
    size: usize,
    /// Their places in `Groups::known`.
    groups: Vec<usize>,
    /// Whether the last block of a hit is dropped, since a draft model needs it computed again.
    drops: bool,
}

/// One lookup.
struct Search<F> {
    specs: Vec<Spec>,
    is_block_held: F,
    /// Blocks that it may still look at. After the last one it ends.
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

impl<F: Fn(usize, usize) -> bool> Search<F> {
    fn new(groups: &Groups, end: usize, is_block_held: F) -> Self {
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
            is_block_held,
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

    /// Tokens after a candidate that a draft group matches before it drops them. States of a draft model do not exist.
    fn margin(&self, spec: &Spec) -> usize {
        match spec.kind {
            GroupKind::State | GroupKind::Unknown => 0,
            GroupKind::Full(_) if self.is_fine && spec.size > self.unit => self.unit,
            _ => spec.size,
        }
    }

    /// Whether all groups of a spec hold the block that ends at a position.
    fn is_held(&self, spec: &Spec, position: usize) -> bool {
        spec.groups.iter().all(|&group| {
            let left = self.looks_left.get().saturating_sub(1);
            self.looks_left.set(left);
            step_counter::count(1);
            left > 0 && (self.is_block_held)(group, position)
        })
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
        let blocks = (1..=most / spec.size)
            .take_while(|block| self.is_held(spec, block * spec.size))
            .count();
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
        let (mut run, mut end) = (0, 0);
        for at in (0..most / size).rev() {
            if !self.is_held(spec, (at + 1) * size) {
                run = 0;
                continue;
            }
            if run == 0 {
                if size != alignment && !((at + 1 - dropped) * size).is_multiple_of(alignment) {
                    continue;
                }
                end = at + 1;
            }
            run += 1;
            if run >= need {
                break;
            }
        }
        let mut blocks = if run >= need && run > 0 { end } else { run };
        let is_aligned = |blocks: usize| size == alignment || (blocks * size).is_multiple_of(alignment);
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
        let ends = (1..=most / step).rev().map(|count| count * step);
        let mut aligned = ends.filter(|end| end.is_multiple_of(alignment));
        aligned.find(|&end| self.is_held(spec, end)).unwrap_or(0)
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
