//! In which runs blocks are told, and in which order.

use std::collections::HashMap;

use crate::blocks::{Blocks, NONE, bits};
use crate::state::State;

/// Blocks without tokens that one event tells.
const MAX_KEYED: usize = 4096;

/// Blocks that share their hash with others, dead ones too, in the order in which they are to be told.
pub struct Twins(HashMap<u64, Vec<u32>>);

impl Twins {
    /// Of all blocks.
    pub fn of(blocks: &Blocks) -> Self {
        let mut all: HashMap<u64, Vec<u32>> = HashMap::new();
        let mut dead: Vec<u32> = blocks.each_dead().collect();
        dead.sort_unstable_by_key(|&number| blocks.get(number).born);
        for number in dead {
            all.entry(blocks.get(number).hash).or_default().push(number);
        }
        for (hash, list) in &mut all {
            if list.len() > 1 {
                list.sort_by_cached_key(|&number| (depth(blocks, number), blocks.get(number).born));
            }
            if !blocks.several().contains_key(hash) {
                list.extend(blocks.newest(*hash));
            }
        }
        for (&hash, list) in blocks.several() {
            all.entry(hash).or_default().extend(list);
        }
        all.retain(|_, list| list.len() > 1);
        Self(all)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether several blocks have this hash.
    pub fn has(&self, hash: u64) -> bool {
        !self.0.is_empty() && self.0.contains_key(&hash)
    }
}

fn depth(blocks: &Blocks, number: u32) -> usize {
    let up = |&at: &u32| Some(blocks.get(at).parent).filter(|&parent| parent != NONE);
    std::iter::successors(Some(number), up).count()
}

/// All runs, and what has to be told before them.
pub struct Order<'a> {
    state: &'a State,
    twins: &'a Twins,
    /// By block the first of its children, and the next child of its parent.
    first: Vec<u32>,
    next: Vec<u32>,
    roots: u32,
    /// By a twin that a run begins with, what it still waits for besides its parent.
    blockers: HashMap<u32, usize>,
    /// By block, twins that may come when it is told.
    opens: HashMap<u32, Vec<u32>>,
    /// Twins whose parents are told, and that wait for others.
    held: Vec<u32>,
    /// Blocks that runs may begin with, the next one last.
    ready: Vec<u32>,
}

impl<'a> Order<'a> {
    /// Of what there is.
    pub fn of(state: &'a State, twins: &'a Twins) -> Self {
        let blocks = &state.blocks;
        let mut order = Self {
            state,
            twins,
            first: vec![NONE; blocks.bound()],
            next: vec![NONE; blocks.bound()],
            roots: NONE,
            blockers: HashMap::new(),
            opens: HashMap::new(),
            held: Vec::new(),
            ready: Vec::new(),
        };
        let mut numbers: Vec<(u32, u32)> = blocks.numbers().map(|number| (blocks.get(number).born, number)).collect();
        numbers.sort_unstable(); // as they came, so that what is rebuilt is told in equal words
        for &(_, number) in numbers.iter().rev() {
            let parent = blocks.get(number).parent;
            let list = match parent {
                NONE => &mut order.roots,
                _ => &mut order.first[parent as usize],
            };
            order.next[number as usize] = *list;
            *list = number;
        }
        let mut lists: Vec<_> = twins.0.iter().collect();
        lists.sort_unstable();
        for pair in lists.iter().flat_map(|(_, list)| list.windows(2)) {
            order.bind(pair[0], pair[1]);
        }
        let roots: Vec<u32> = order.along(order.roots).collect();
        order.reach(roots);
        order
    }

    /// Has `later` wait for `earlier` and its children.
    fn bind(&mut self, earlier: u32, later: u32) {
        let children: Vec<u32> = self.children(earlier).filter(|&child| child != later).collect();
        for before in std::iter::once(earlier).chain(children) {
            *self.blockers.entry(later).or_default() += 1;
            self.opens.entry(before).or_default().push(later);
        }
    }

    fn children(&self, number: u32) -> impl Iterator<Item = u32> + '_ {
        self.along(self.first[number as usize])
    }

    fn along(&self, start: u32) -> impl Iterator<Item = u32> + '_ {
        std::iter::successors((start != NONE).then_some(start), |&at| {
            Some(self.next[at as usize]).filter(|&next| next != NONE)
        })
    }

    /// Blocks whose parents are told; the first is to be the next.
    fn reach(&mut self, heads: Vec<u32>) {
        for head in heads.into_iter().rev() {
            if self.blockers.get(&head).is_some_and(|&left| left > 0) {
                self.held.push(head);
            } else {
                self.ready.push(head);
            }
        }
    }

    /// Lets come what waited for the first block of a run; others nobody waits for.
    fn open(&mut self, unit: &[u32]) {
        if self.opens.is_empty() {
            return;
        }
        for later in self.opens.remove(&unit[0]).unwrap_or_default() {
            let Some(left) = self.blockers.get_mut(&later) else { continue };
            *left -= 1;
            if *left == 0
                && let Some(at) = self.held.iter().rposition(|&held| held == later)
            {
                self.held.remove(at);
                self.ready.push(later);
            }
        }
    }

    /// A block and those behind it that one event tells with it; of blocks that were told by their keys those that come next.
    fn run(&mut self, head: u32) -> Vec<u32> {
        let blocks = &self.state.blocks;
        let mut unit = vec![head];
        if self.twins.has(blocks.get(head).hash) {
            return unit;
        }
        if blocks.identity(head).is_keyed() {
            while let Some(&next) = self.ready.last()
                && unit.len() < MAX_KEYED
                && self.joins(head, next)
            {
                unit.extend(self.ready.pop());
            }
            return unit;
        }
        let mut last = head;
        while let Some(next) = self.children(last).find(|&child| self.joins(last, child)) {
            unit.push(next);
            last = next;
        }
        unit
    }

    fn joins(&self, parent: u32, child: u32) -> bool {
        let blocks = &self.state.blocks;
        let (one, other) = (blocks.get(parent), blocks.get(child));
        let alike = one.mask == other.mask && (one.mask != 0 || one.home == other.home) && !self.twins.has(other.hash);
        alike
            && (one.naming == other.naming
                || (blocks.identity(parent) == blocks.identity(child)
                    && blocks.spelled(parent).with(None) == blocks.spelled(child).with(None)))
            && (blocks.extra() == 0 || bits(one.mask).all(|manner| blocks.count(parent, manner) == blocks.count(child, manner)))
    }
}

/// The runs in an order in which parents come first.
impl Iterator for Order<'_> {
    type Item = Vec<u32>;

    fn next(&mut self) -> Option<Vec<u32>> {
        // Where only blocks are left that wait for each other no order is right: any is as good, and will be tried.
        let head = self.ready.pop().or_else(|| self.held.pop())?;
        let unit = self.run(head);
        let inside = unit.iter().skip(1).map(Some).chain([None]);
        let rest = (unit.iter().zip(inside))
            .flat_map(|(&number, inside)| self.children(number).filter(move |child| Some(child) != inside));
        let rest: Vec<u32> = rest.collect();
        self.reach(rest);
        self.open(&unit);
        Some(unit)
    }
}
