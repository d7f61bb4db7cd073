//! Divides blocks into runs, and determines the order in which the runs are exported.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::announcements::bits;
use crate::blocks::{Blocks, ROOT};

/// Maximum number of blocks that one event stores, if the blocks have keys instead of tokens.
const MAX_KEYED: usize = 4096;

/// Maps each hash that several blocks share to these blocks ("twins"), in the order of their export. Dead blocks are included.
pub struct Twins(HashMap<u64, Vec<u32>>);

impl Twins {
    /// Determines the order of all twins.
    pub fn new(blocks: &Blocks) -> Self {
        let (mut all, mut depths): (HashMap<u64, Vec<u32>>, _) = (HashMap::new(), Depths::new(blocks));
        for number in blocks.iter_dead() {
            all.entry(blocks.get(number).hash).or_default().push(number);
        }
        for (hash, list) in &mut all {
            if list.len() > 1 {
                list.sort_by_cached_key(|&number| (depths.get(number), blocks.get(number).key));
            }
            if blocks.collisions.get(*hash).is_none() {
                list.extend(blocks.find(*hash));
            }
        }
        for (hash, list) in blocks.collisions.iter() {
            all.entry(hash).or_default().extend(list);
        }
        all.retain(|_, list| list.len() > 1);
        Self(all)
    }

    /// Whether no two blocks share a hash.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether several blocks have this hash.
    pub fn contains_hash(&self, hash: u64) -> bool {
        self.0.contains_key(&hash)
    }
}

/// The order in which the blocks of replaced LoRAs are exported: first outdated blocks, then signs of the replacement, then later blocks.
#[derive(Default)]
pub struct Phases {
    /// Maps each replaced LoRA to a block that was stored with its former weights.
    pub loras: BTreeMap<u64, u32>,
    /// Blocks that are exported after the signs: blocks of the present weights, with their dead ancestors.
    pub later: HashSet<u32>,
}

impl Phases {
    /// Determines the phase of all blocks.
    pub fn new(blocks: &Blocks, loras: BTreeMap<u64, u32>) -> Self {
        let mut later = HashSet::new();
        let is_current = |number: u32| {
            let attributes = blocks.attributes(number);
            attributes.copies != 0 && loras.contains_key(&attributes.context.lora) && !blocks.is_outdated(number)
        };
        for number in blocks.numbers().filter(|&number| is_current(number)) {
            let mut at = number;
            while later.insert(at) {
                at = blocks.get(at).parent;
                if at == ROOT || blocks.attributes(at).copies != 0 {
                    break;
                }
            }
        }
        Self { loras, later }
    }

    /// Whether the parent of a block might be outdated.
    pub fn is_after_outdated(&self, blocks: &Blocks, number: u32) -> bool {
        let parent = blocks.get(number).parent;
        parent != ROOT && !self.later.contains(&parent)
    }
}

/// Computes the depths of blocks in the tree. Each depth is computed only once, since chains of dead blocks can be long.
struct Depths<'a> {
    blocks: &'a Blocks,
    known: HashMap<u32, usize>,
}

impl<'a> Depths<'a> {
    fn new(blocks: &'a Blocks) -> Self {
        let known = HashMap::new();
        Self { blocks, known }
    }

    fn get(&mut self, number: u32) -> usize {
        let (mut path, mut at) = (Vec::new(), number);
        while at != ROOT && !self.known.contains_key(&at) {
            path.push(at);
            at = self.blocks.get(at).parent;
        }
        let mut depth = self.known.get(&at).copied().unwrap_or(0);
        for at in path.into_iter().rev() {
            depth += 1;
            self.known.insert(at, depth);
        }
        depth
    }
}

/// Iterates over runs; each parent comes before its children.
pub struct Runs<'a> {
    blocks: &'a Blocks,
    twins: &'a Twins,
    /// The first child of each block.
    first_child: Vec<u32>,
    /// The next sibling of each block.
    next_sibling: Vec<u32>,
    /// For each twin, the number of blocks (its parent excepted) that must be exported before the twin and are not exported yet.
    blockers: HashMap<u32, usize>,
    /// For each block, the twins that wait for it.
    blocked: HashMap<u32, Vec<u32>>,
    /// Twins that wait although their parents were exported. `held_order` lists these twins in the order in which they began to wait. It
    /// keeps twins that no longer wait.
    held: HashSet<u32>,
    held_order: Vec<u32>,
    /// Blocks with which a run can begin now; the last one is exported next.
    ready: Vec<u32>,
}

impl<'a> Runs<'a> {
    /// Prepares the iteration over all blocks.
    pub fn new(blocks: &'a Blocks, twins: &'a Twins) -> Self {
        let mut runs = Self {
            blocks,
            twins,
            first_child: vec![ROOT; blocks.bound()],
            next_sibling: vec![ROOT; blocks.bound()],
            blockers: HashMap::new(),
            blocked: HashMap::new(),
            held: HashSet::new(),
            held_order: Vec::new(),
            ready: Vec::new(),
        };
        // The blocks are sorted by hash, so the order does not depend on the history of the stream.
        let mut numbers: Vec<(u64, u64, u32)> = (blocks.numbers())
            .map(|number| (blocks.get(number).hash, blocks.get(number).key, number))
            .collect();
        numbers.sort_unstable();
        let mut first_root = ROOT;
        for &(.., number) in numbers.iter().rev() {
            let first = match blocks.get(number).parent {
                ROOT => &mut first_root,
                parent => &mut runs.first_child[parent as usize],
            };
            runs.next_sibling[number as usize] = std::mem::replace(first, number);
        }
        let mut lists: Vec<_> = twins.0.iter().collect();
        lists.sort_unstable();
        for pair in lists.iter().flat_map(|(_, list)| list.windows(2)) {
            runs.add_wait(pair[0], pair[1]);
        }
        let roots: Vec<u32> = runs.siblings(first_root).collect();
        runs.add_heads(roots);
        runs
    }

    /// Records that `later` must be exported after `earlier` and after the children of `earlier`.
    fn add_wait(&mut self, earlier: u32, later: u32) {
        let children: Vec<u32> = self.children(earlier).filter(|&child| child != later).collect();
        for before in std::iter::once(earlier).chain(children) {
            *self.blockers.entry(later).or_default() += 1;
            self.blocked.entry(before).or_default().push(later);
        }
    }

    fn children(&self, number: u32) -> impl Iterator<Item = u32> + '_ {
        self.siblings(self.first_child[number as usize])
    }

    fn siblings(&self, first: u32) -> impl Iterator<Item = u32> + '_ {
        let some = |number: u32| (number != ROOT).then_some(number);
        std::iter::successors(some(first), move |&at| some(self.next_sibling[at as usize]))
    }

    /// Adds blocks whose parents were exported. The first of them is exported next.
    fn add_heads(&mut self, heads: Vec<u32>) {
        for head in heads.into_iter().rev() {
            if self.blockers.get(&head).is_some_and(|&left| left > 0) {
                self.held.insert(head);
                self.held_order.push(head);
            } else {
                self.ready.push(head);
            }
        }
    }

    /// Records that a block was exported. Only the first block of a run can be one for which twins wait.
    fn end_waits(&mut self, head: u32) {
        for later in self.blocked.remove(&head).unwrap_or_default() {
            let Some(left) = self.blockers.get_mut(&later) else { continue };
            *left -= 1;
            if *left == 0 && self.held.remove(&later) {
                self.ready.push(later);
            }
        }
    }

    /// Returns a block and the blocks after it that one event can store.
    fn run_from(&mut self, head: u32) -> Vec<u32> {
        let mut run = vec![head];
        if self.twins.contains_hash(self.blocks.get(head).hash) {
            return run;
        }
        if self.blocks.attributes(head).context.is_keyed() {
            while let Some(&next) = self.ready.last()
                && run.len() < MAX_KEYED
                && self.can_store_together(head, next)
            {
                run.extend(self.ready.pop());
            }
            return run;
        }
        let mut last = head;
        while let Some(next) = self.children(last).find(|&child| self.can_store_together(last, child)) {
            run.push(next);
            last = next;
        }
        run
    }

    /// Whether one event can store the two blocks.
    fn can_store_together(&self, one: u32, other: u32) -> bool {
        let blocks = self.blocks;
        let (before, after) = (blocks.attributes(one), blocks.attributes(other));
        let has_same_attributes = std::ptr::eq(before, after)
            || (before.copies == after.copies
                && (before.copies != 0 || before.origin == after.origin)
                && before.context == after.context
                && before.namespace.without_extra_keys() == after.namespace.without_extra_keys());
        let has_same_counts = || bits(before.copies).all(|number| blocks.count(one, number) == blocks.count(other, number));
        let has_same_certainty = |number: u8| blocks.is_uncertain(one, number) == blocks.is_uncertain(other, number);
        let are_equally_certain = || bits(before.copies).all(has_same_certainty);
        has_same_attributes
            && !self.twins.contains_hash(blocks.get(other).hash)
            && (blocks.extra_copies() == 0 || has_same_counts())
            && (!blocks.has_uncertain_copies() || are_equally_certain())
    }
}

impl Iterator for Runs<'_> {
    type Item = Vec<u32>;

    fn next(&mut self) -> Option<Vec<u32>> {
        // If all remaining blocks wait for each other, no order is known to be correct. Then one of them is exported, and `rebuilt`
        // verifies the result.
        let mut held = std::iter::from_fn(|| self.held_order.pop());
        let head = self.ready.pop().or_else(|| held.find(|head| self.held.remove(head)))?;
        let run = self.run_from(head);
        let next_in_run = run.iter().skip(1).map(Some).chain([None]);
        let heads: Vec<u32> = (run.iter().zip(next_in_run))
            .flat_map(|(&number, next)| self.children(number).filter(move |child| Some(child) != next))
            .collect();
        self.add_heads(heads);
        self.end_waits(head);
        Some(run)
    }
}
