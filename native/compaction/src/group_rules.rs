//! Matching rules of the groups of a stream, and the stores that announced them.

use std::borrow::Cow;

use super::announcements::{is_dense, window_of};
use super::event::{Store, Text};

/// Maximum number of groups with a known rule. Engines have one or a few.
pub const MAX_GROUPS: usize = 64;

/// The blocks of a group that a compacted stream keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// All blocks, with their tokens.
    Dense,
    /// All blocks, without tokens; lookups need this many blocks before the end of a prefix.
    Window(u32),
    /// The rule is unknown.
    Unknown,
}

/// The rule of one group.
#[derive(Clone, Debug)]
pub struct GroupRule {
    /// The group.
    pub group: i64,
    /// Rule by which the group's blocks are looked up.
    pub rule: Rule,
    /// The store that announced the rule, without its blocks.
    pub example: Store<'static>,
}

/// The rules of all groups, as announced last.
#[derive(Clone, Debug, Default)]
pub struct GroupRules(Vec<GroupRule>);

/// Returns the rule that a store announces, if it announces one. Its blocks can be refused nevertheless.
pub fn rule_of(store: &Store<'_>) -> Option<Rule> {
    match window_of(store.kind.as_deref(), store.window) {
        Some(window) if store.block_size > 0 => {
            let blocks = (window as u64 - 1).div_ceil(store.block_size);
            Some(Rule::Window(u32::try_from(blocks).unwrap_or(u32::MAX)))
        }
        Some(_) => None,
        None if !is_dense(store.kind.as_deref()) => Some(Rule::Unknown),
        None if store.tokens.is_empty() && store.keys.is_none() => None,
        // Connectors announce chunks of their own on other tiers.
        None => store.location.is_on_device().then_some(Rule::Dense),
    }
}

impl GroupRules {
    /// The rule of a group.
    #[inline]
    pub fn get(&self, group: i64) -> Option<Rule> {
        let known = self.0.iter().find(|known| known.group == group);
        known.map(|known| known.rule)
    }

    /// Number of groups that have a rule.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The kind of a group whose rule is not known; None for any other group.
    pub fn unknown_kind(&self, group: i64) -> Option<&Text<'static>> {
        let known = self
            .0
            .iter()
            .find(|known| known.group == group && known.rule == Rule::Unknown);
        known.map(|known| &known.example.kind)
    }

    /// Records the rule that a store announces. None if there are too many groups.
    #[inline]
    pub fn learn(&mut self, store: &Store<'_>, rule: Rule) -> Option<()> {
        let group = store.location.group.unwrap_or(0);
        match self.0.iter().position(|known| known.group == group) {
            Some(at) if self.0[at].rule == rule => {}
            Some(at) => self.0[at] = GroupRule::new(group, store, rule),
            None if self.0.len() >= MAX_GROUPS => return None,
            None => self.0.push(GroupRule::new(group, store, rule)),
        }
        Some(())
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &GroupRule> {
        self.0.iter()
    }

    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<GroupRule>()
    }
}

impl GroupRule {
    fn new(group: i64, store: &Store<'_>, rule: Rule) -> Self {
        let example = Store {
            location: store.location.to_static(),
            kind: store.kind.as_ref().map(|kind| Cow::Owned(kind.to_vec())),
            window: store.window,
            block_size: store.block_size,
            pairs: store.pairs,
            keys: store.keys.as_ref().map(|_| Cow::default()),
            ..Store::default()
        };
        Self { group, rule, example }
    }
}
