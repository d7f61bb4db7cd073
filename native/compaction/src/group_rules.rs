//! The matching rules of a stream's groups, each with the store that announced it.

use std::borrow::Cow;

use kvevents_index::groups::GroupKind;
use kvevents_index::rules::location::owned;

use super::event::{Store, Text};

/// Maximum number of groups with a rule. An engine has only a few groups.
pub const MAX_GROUPS: usize = 64;

/// The rule by which lookups search the blocks of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The blocks of a prefix that the group needs.
    pub kind: GroupKind,
    /// Number of tokens per block, if the group needs or needed only some blocks of a prefix; otherwise 0.
    size: u64,
}

/// The rule of one group.
#[derive(Clone, Debug)]
pub struct GroupRule {
    /// Number of the group.
    pub group: i64,
    /// The rule by which lookups search the group's blocks.
    pub rule: Rule,
    /// The store that announced the rule, without blocks.
    pub example: Store<'static>,
}

/// For each group, the rule that its stores have announced, as in `Groups::learn` of the index: the latest kind, and the largest size.
#[derive(Clone, Debug, Default)]
pub struct GroupRules(Vec<GroupRule>);

/// The kind of a store's group.
pub fn kind_of(store: &Store<'_>) -> GroupKind {
    GroupKind::from_spec(store.kind.as_deref(), store.window).unwrap_or(GroupKind::Unknown)
}

/// Returns the rule that a store announces, if any. The rule counts even if the state refuses the blocks of the store.
fn rule_of(store: &Store<'_>) -> Option<Rule> {
    let kind = kind_of(store);
    let (is_announced, size) = match kind {
        GroupKind::Unknown => (true, 0),
        GroupKind::Window(_) | GroupKind::State => (store.block_size > 0, store.block_size),
        // On other tiers, connectors announce chunks whose size they choose.
        GroupKind::Full(_) => (store.has_content() && store.location.is_on_device(), 0),
    };
    is_announced.then_some(Rule { kind, size })
}

impl GroupRules {
    /// The rule of a group.
    #[inline]
    pub fn get(&self, group: i64) -> Option<&GroupRule> {
        self.0.iter().find(|known| known.group == group)
    }

    /// Number of groups that have a rule.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The kind that was announced for a group, if its rule is `Unknown`; otherwise None.
    pub fn unknown_kind(&self, group: i64) -> Option<&Text<'static>> {
        let known = self.get(group).filter(|known| known.rule.kind == GroupKind::Unknown);
        known.map(|known| &known.example.kind)
    }

    /// Records the rule that a store announces, if any. Returns None if there are too many groups.
    #[inline]
    pub fn learn(&mut self, store: &Store<'_>) -> Option<()> {
        let Some(rule) = rule_of(store) else { return Some(()) };
        let group = store.location.group.unwrap_or(0);
        match self.0.iter().position(|known| known.group == group) {
            Some(at) => {
                let known = self.0[at].rule;
                let rule = Rule {
                    kind: if known.kind.includes(rule.kind) {
                        known.kind
                    } else {
                        rule.kind
                    },
                    size: known.size.max(rule.size),
                };
                if rule != known {
                    self.0[at] = GroupRule::new(group, store, rule);
                }
            }
            None if self.0.len() >= MAX_GROUPS => return None,
            None => self.0.push(GroupRule::new(group, store, rule)),
        }
        Some(())
    }

    /// The rules of all groups.
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
            kind: owned(&store.kind),
            window: store.window,
            block_size: store.block_size.max(rule.size),
            pairs: store.pairs,
            keys: store.keys.as_ref().map(|_| Cow::default()),
            ..Store::default()
        };
        Self { group, rule, example }
    }
}
