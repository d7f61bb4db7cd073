//! How the groups of a stream count, and the words that taught it.

use kvevents_index::planes::Rule;

use super::manners::{is_dense, window_of};
use super::store::{Place, StoreView};

/// Groups whose rules are known. Engines have one, or a few.
pub const MAX_GROUPS: usize = 64;

/// A rule, and what to say for it.
#[derive(Clone, Debug)]
pub struct Lesson {
    /// The rule.
    pub rule: Rule,
    /// A place of the group.
    pub place: Place,
    /// Kind of attention.
    pub kind: Option<Box<[u8]>>,
    /// As the event had it.
    pub window: Option<i64>,
    /// Tokens per block.
    pub block_size: u64,
    /// Whether token ids were pairs.
    pub pairs: bool,
    /// Whether keys were said in the place of tokens.
    pub keyed: bool,
}

/// By group what was learned last.
#[derive(Clone, Debug, Default)]
pub struct Lessons(Vec<(i64, Lesson)>);

/// What a store teaches of its group, if anything: not all that follows is said where its blocks are refused later.
pub fn rule_of(store: &StoreView<'_>) -> Option<Rule> {
    match window_of(store.kind, store.window) {
        Some(window) if store.block_size > 0 => {
            let blocks = (window as u64 - 1).div_ceil(store.block_size);
            Some(Rule::Window(u32::try_from(blocks).unwrap_or(u32::MAX)))
        }
        Some(_) => None,
        None if !is_dense(store.kind) => Some(Rule::Unknown),
        None if store.tokens.is_empty() && store.keys.is_none() => None,
        None => Some(Rule::Dense),
    }
}

impl Lessons {
    /// The rule of a group.
    #[inline]
    pub fn get(&self, group: i64) -> Option<Rule> {
        self.0
            .iter()
            .find(|(known, _)| *known == group)
            .map(|(_, lesson)| lesson.rule)
    }

    /// Learns what a store teaches. None when there are too many groups.
    #[inline]
    pub fn learn(&mut self, store: &StoreView<'_>, rule: Rule) -> Option<()> {
        let group = store.place.group.unwrap_or(0);
        match self.0.iter().position(|(known, _)| *known == group) {
            Some(at) if self.0[at].1.rule == rule => {}
            Some(at) => self.0[at].1 = lesson(store, rule),
            None if self.0.len() >= MAX_GROUPS => return None,
            None => self.0.push((group, lesson(store, rule))),
        }
        Some(())
    }

    /// By group.
    pub fn iter(&self) -> impl Iterator<Item = &(i64, Lesson)> {
        self.0.iter()
    }

    /// Heap bytes, about.
    pub fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<(i64, Lesson)>()
    }
}

fn lesson(store: &StoreView<'_>, rule: Rule) -> Lesson {
    Lesson {
        rule,
        place: Place::of(&store.place),
        kind: store.kind.map(Box::from),
        window: store.window,
        block_size: store.block_size,
        pairs: store.pairs,
        keyed: store.keys.is_some(),
    }
}
