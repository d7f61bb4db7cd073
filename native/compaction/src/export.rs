//! Exports the events that rebuild a state after a clear.
//!
//! Blocks are exported in runs: chains in which each block after the first is the child of the block before it. If only one block has the
//! hash of a run's parent, the run can be exported at any time after that block. If several blocks share a hash ("twins"), the hash of a
//! parent means the twin that was stored latest. So twins are exported one by one, in the order in which they were stored, and all children
//! of a twin are exported before the next twin. Dead ancestors, which have no copies, are stored with a copy, which the last events remove
//! again. Of twins, the dead ones are exported first, since a removal takes the oldest block. Some artificial histories lead to states that
//! no order of events rebuilds. So the events are applied to an empty state if there are twins, or pending blocks that the events might
//! place. If the result differs from `state`, nothing is exported.
//!
//! The outdated blocks of a replaced LoRA come first. Then a sign follows: events from which consumers conclude that the weights of the
//! LoRA were replaced. After the sign, the blocks that were stored after the replacement are exported. If this order does not rebuild the
//! state, all blocks of the LoRA are exported before the sign, so that consumers count each of them as uncertain.

mod order;

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::{BTreeSet, HashMap, HashSet};

use kvevents_index::apply::{HOST_OF_SGLANG, has_extra_keys};
use kvevents_index::holders::contexts::Context;
use kvevents_index::holders::placements::LEVELS;
use kvevents_index::rules::evidence::Evidence;
use kvevents_index::rules::pending::Waiting;

use super::announcements::bits;
use super::blocks::{Blocks, ROOT};
use super::event::{ExportedEvent, Namespace, Store, encode_extra_keys, join_extra_keys};
use super::group_rules::{GroupRule, GroupRules};
use super::state::{Content, State};

use order::{Phases, Runs, Twins};

/// Calls `emit` with the events that rebuild `state` after a clear. Returns None if no order of events is known that rebuilds the state.
pub fn export(state: &State, mut emit: impl FnMut(ExportedEvent)) -> Option<()> {
    if state.invalid.is_some() {
        return None;
    }
    let twins = Twins::new(&state.blocks);
    // On tiers below the device, a stored block gets the key of a known block with its hash. So if the hash of a pending block on such a
    // tier has become known, the block would not wait again.
    let is_known = |item: &Waiting<Content<'static>>| {
        !state.announcements.is_on_device(item.placement as u8) && state.blocks.find(item.hash).is_some()
    };
    let loras = state.blocks.replaced_loras();
    if twins.is_empty() && loras.is_empty() && !state.waiting.iter().any(is_known) {
        Exporter::new(state, &twins, &mut emit).run(&Phases::default());
        return Some(());
    }
    let events = |phases: &Phases| {
        let mut events = Vec::new();
        Exporter::new(state, &twins, &mut |event| events.push(event)).run(phases);
        let rebuilt = rebuild_state(&events, state)?;
        (phases.later.is_empty() || outdated_blocks(&rebuilt) == outdated_blocks(state)).then_some(events)
    };
    let mut phases = Phases::new(&state.blocks, loras);
    let events = events(&phases).or_else(|| {
        phases.later.clear();
        events(&phases)
    })?;
    events.into_iter().for_each(emit);
    Some(())
}

/// For each level below the device, the medium of a sign.
const LOWER_MEDIA: [&str; LEVELS - 1] = ["CPU", "DISK", "OTHER"];

/// Maximum number of tokens of a sign that consists of a first block. The blocks of engines are smaller.
const MAX_SIGN_TOKENS: u64 = 1 << 16;

struct Exporter<'a> {
    state: &'a State,
    twins: &'a Twins,
    emit: &'a mut dyn FnMut(ExportedEvent),
    /// Announcements in the order in which their copies are exported; a rebuilt state has them in the same order.
    ranked: Vec<u8>,
    /// The matching rules that the exported stores have announced.
    exported_rules: GroupRules,
    /// Hashes and announcements of exported copies that the state does not have; the last events remove these copies.
    surplus: Vec<(u64, u8)>,
    /// Whether a consumer still needs a store with extra keys to set `Evidence::has_extra_keys`.
    needs_extra_keys: bool,
    /// Whether a consumer still needs a store with a LoRA to set `Evidence::has_loras`.
    needs_loras: bool,
    /// What the exported stores show: the unkeyed roots, the named levels, and that a clear also empties host memory.
    exported: Evidence,
    /// The two smallest hashes above 0 that neither a block nor a waiting copy names.
    unused_hashes: OnceCell<[u64; 2]>,
}

impl<'a> Exporter<'a> {
    fn new(state: &'a State, twins: &'a Twins, emit: &'a mut dyn FnMut(ExportedEvent)) -> Self {
        Self {
            state,
            twins,
            emit,
            ranked: state.announcements.ranked_ids(),
            exported_rules: GroupRules::default(),
            surplus: Vec::new(),
            needs_extra_keys: state.evidence.has_extra_keys,
            needs_loras: state.evidence.needs_loras(),
            exported: Evidence::default(),
            unused_hashes: OnceCell::new(),
        }
    }

    fn run(mut self, phases: &Phases) {
        self.export_unknown();
        self.export_doubtful();
        self.export_unkept();
        let mut later = Vec::new();
        for run in Runs::new(&self.state.blocks, self.twins) {
            for part in run.chunk_by(|one, other| phases.later.contains(one) == phases.later.contains(other)) {
                if phases.later.contains(&part[0]) {
                    later.push(part.to_vec());
                } else {
                    self.export_run(part, !self.doubtful_announcements(part[0]));
                }
            }
        }
        for &example in phases.loras.values() {
            self.export_lora_change(example);
        }
        // A store whose parent is outdated is also a sign of the replacement. So it must be exported before other blocks of the present
        // weights.
        later.sort_by_key(|part| !phases.is_after_outdated(&self.state.blocks, part[0]));
        for part in later {
            self.export_run(&part, !self.doubtful_announcements(part[0]));
        }
        self.remove_surplus();
        self.export_waiting();
        // The following stores together make a consumer conclude that it does not know exactly which blocks tiers below the device hold.
        let extra_keys = join_extra_keys([Some(&b"\x91\xA1-"[..])].into_iter()).map(Cow::Owned);
        if self.needs_extra_keys {
            let store = self.first_block("GPU");
            self.export_removed(&Store { extra_keys, ..store }, 1);
        }
        if self.needs_loras {
            let mut store = self.first_block("GPU");
            store.namespace.lora_name = Some(Cow::Borrowed(b"-"));
            self.export_removed(&store, 1);
        }
        let bare = self.state.evidence.bare_levels & !self.exported.bare_levels;
        let unkeyed = self.state.evidence.unkeyed_levels & !self.exported.unkeyed_levels;
        for (at, medium) in LOWER_MEDIA.into_iter().enumerate() {
            let is_bare = bare >> (at + 1) & 1 != 0;
            if is_bare || unkeyed >> (at + 1) & 1 != 0 {
                let mut store = self.first_block(medium);
                store.namespace.lora_name = (!is_bare).then_some(Cow::Borrowed(b"-"));
                self.export_removed(&store, 1);
            }
        }
        if self.state.evidence.set_aside > 0 {
            self.export_unusable();
        }
        self.export_rules();
        self.export_tiers();
    }

    /// Makes a consumer know which tiers might hold blocks that the stream does not list. A clear that names no tier has left them: the
    /// blocks waited for others, or a store was missed. In the second case all tiers are concerned, also those that no event has named.
    fn export_unknown(&mut self) {
        let Evidence {
            unknown_levels,
            named_levels,
            ..
        } = self.state.evidence;
        if unknown_levels == 0 {
            return;
        }
        if unknown_levels & !named_levels == 0 {
            let hash = self.unused_hashes()[0];
            for medium in media_of(unknown_levels) {
                self.export_on(medium, vec![hash]);
            }
        } else {
            if unknown_levels & 0b10 == 0 {
                self.export_host_clears();
            }
            self.export_unusable();
        }
        (self.emit)(ExportedEvent::Cleared);
    }

    /// Names the tiers that no exported store has named: the next clears concern these tiers too.
    fn export_tiers(&mut self) {
        self.export_host_clears();
        for medium in media_of(self.state.evidence.named_levels & !self.exported.named_levels) {
            self.export_on(medium, Vec::new());
        }
    }

    /// Shows that a clear also empties host memory, if no exported store has shown it.
    fn export_host_clears(&mut self) {
        if self.state.evidence.has_host_clears && !self.exported.has_host_clears {
            self.export_on(HOST_OF_SGLANG, Vec::new());
        }
    }

    /// Announces blocks on a tier by their hashes.
    fn export_on(&mut self, medium: &'static [u8], hashes: Vec<u64>) {
        let mut store = Store {
            hashes: hashes.into(),
            ..Store::default()
        };
        store.location.medium = Some(Cow::Borrowed(medium));
        self.export_store(store);
    }

    /// Announces a block with too many tokens, so that consumers also know of a store that could not be used.
    fn export_unusable(&mut self) {
        let mut store = Store {
            hashes: vec![self.unused_hashes()[0]].into(),
            tokens: vec![0, 0].into(),
            block_size: 1,
            ..Store::default()
        };
        store.location.medium = Some(Cow::Borrowed(b"GPU"));
        (self.emit)(ExportedEvent::Stored(store));
    }

    /// Exports the copies that might be gone because of a clear that named no tier, and then such a clear. The events after the clear
    /// announce these blocks and their ancestors again.
    fn export_doubtful(&mut self) {
        let blocks = &self.state.blocks;
        let mut is_needed = vec![false; blocks.bound()];
        for number in blocks.numbers().filter(|&number| self.doubtful_announcements(number) != 0) {
            let above = |&at: &u32| Some(blocks.get(at).parent).filter(|&parent| parent != ROOT);
            for at in std::iter::successors(Some(number), above) {
                if std::mem::replace(&mut is_needed[at as usize], true) {
                    break;
                }
            }
        }
        if !is_needed.contains(&true) {
            return;
        }
        for run in Runs::new(blocks, self.twins) {
            if run.iter().any(|&number| is_needed[number as usize]) {
                self.export_run(&run, self.doubtful_announcements(run[0]));
            }
        }
        self.remove_surplus();
        (self.emit)(ExportedEvent::Cleared);
    }

    /// The announcements, as bits, in which a block has a copy that might be gone. Announcements on levels where each store adds a copy are
    /// omitted.
    fn doubtful_announcements(&self, number: u32) -> u64 {
        let (blocks, announcements) = (&self.state.blocks, &self.state.announcements);
        if !blocks.has_uncertain_copies() {
            return 0;
        }
        let is_doubtful = |&announcement: &u8| {
            let level = announcements.get(announcement).placement.level();
            self.state.copied_levels >> level & 1 == 0 && blocks.is_uncertain(number, announcement)
        };
        bits(blocks.attributes(number).copies)
            .filter(is_doubtful)
            .fold(0, |all, announcement| all | 1 << announcement)
    }

    /// Announces a block under `count` unused hashes, and then removes it.
    fn export_removed(&mut self, store: &Store<'static>, count: usize) {
        let hashes = &self.unused_hashes()[..count];
        for &hash in hashes {
            let hashes = vec![hash].into();
            self.export_store(Store { hashes, ..store.clone() });
        }
        (self.emit)(ExportedEvent::Removed(hashes.to_vec(), store.location.clone()));
    }

    /// Announces a prompt's first block under two hashes, and then removes it. The LoRA is that of the block `example`.
    fn export_lora_change(&mut self, example: u32) {
        let Namespace { lora_id, lora_name, .. } = self.state.blocks.attributes(example).namespace.to_static();
        let mut store = self.first_block("GPU");
        (store.namespace.lora_id, store.namespace.lora_name) = (lora_id, lora_name);
        self.export_removed(&store, 2);
    }

    /// Returns the first block of a prompt, without a hash, in a group with full attention.
    fn first_block(&self, medium: &'static str) -> Store<'static> {
        let is_dense = |known: &&GroupRule| known.rule.kind.is_full();
        let dense = self.state.group_rules.iter().filter(is_dense).min_by_key(|known| known.group);
        let example = dense.map_or_else(Store::default, |known| known.example.clone());
        // A store with keys can name any size.
        let block_size = example.block_size.clamp(1, MAX_SIGN_TOKENS);
        let mut store = Store {
            tokens: vec![0; block_size as usize * (1 + usize::from(example.pairs))].into(),
            block_size,
            pairs: example.pairs,
            kind: example.kind,
            ..Store::default()
        };
        store.location.medium = Some(Cow::Borrowed(medium.as_bytes()));
        // On a level where the engine names groups, all of its stores name groups.
        let names_groups = self.state.copied_levels >> store.location.placement().level() & 1 != 0;
        store.location.group = dense.filter(|_| names_groups).map(|known| known.group);
        store
    }

    fn export_store(&mut self, mut store: Store<'static>) {
        store.keyable = Some(store.hashes.len());
        self.exported.has_host_clears |= store.location.medium.as_deref() == Some(HOST_OF_SGLANG);
        self.exported.named_levels |= 1 << self.state.announcements.level_of(&store);
        let _ = self.exported_rules.learn(&store);
        (self.emit)(ExportedEvent::Stored(store));
    }

    /// Exports the copies of a run in these announcements. If the run has no such copy, its blocks are stored as parents, unless doubtful
    /// copies of them were already exported.
    fn export_run(&mut self, run: &[u32], announcements: u64) {
        let blocks = &self.state.blocks;
        let is_twin = self.twins.contains_hash(blocks.get(run[0]).hash);
        let attributes = blocks.attributes(run[0]);
        let exported = attributes.copies & announcements;
        let doubtful = self.doubtful_announcements(run[0]);
        let is_known = doubtful != 0 && doubtful & announcements == 0;
        let with_tokens = exported & self.state.announcements.dense_announcements();
        let first = (self.ranked.iter().copied())
            .find(|announcement| with_tokens >> announcement & 1 != 0)
            .unwrap_or(attributes.origin);
        let store = self.store_of(run, first);
        if with_tokens == 0 && !is_known {
            let hashes = store.hashes.iter().rev();
            self.surplus.extend(hashes.map(|&hash| (hash, first)));
        }
        let mut copies = Vec::new();
        for &announcement in self.ranked.iter().filter(|&number| exported >> number & 1 != 0) {
            // The last events remove this additional copy again. Then the consumer is uncertain of the remaining copies, as other consumers
            // are after the original removal. Of blocks that share a hash, only the oldest can be uncertain, and the removal takes the copy
            // of this block.
            let is_uncertain = blocks.is_uncertain(run[0], announcement) && doubtful >> announcement & 1 == 0;
            if is_uncertain {
                let hashes = run.iter().rev().map(|&number| blocks.get(number).hash);
                self.surplus.extend(hashes.map(|hash| (hash, announcement)));
            }
            let count = blocks.count(run[0], announcement) + u32::from(is_uncertain);
            let count = count - u32::from(announcement == first && !is_known);
            if count > 0 {
                let copy = if with_tokens >> announcement & 1 != 0 && !is_twin {
                    self.with_announcement(announcement, store.clone())
                } else {
                    let hashes = run.iter().map(|&number| blocks.get(number).hash).collect();
                    self.store_without_tokens(hashes, announcement)
                };
                copies.extend(std::iter::repeat_n(copy, count as usize));
            }
        }
        if !is_known {
            self.note_extra_keys(&store);
            if !is_twin && is_unkeyed_root(&store) {
                let level = self.state.announcements.get(first).placement.level();
                self.exported.note_unkeyed_root(level, !has_lora(&store));
            }
            self.export_store(store);
        }
        copies.into_iter().for_each(|copy| self.export_store(copy));
    }

    fn store_of(&self, run: &[u32], announcement: u8) -> Store<'static> {
        let blocks = &self.state.blocks;
        let head = *blocks.get(run[0]);
        let attributes = blocks.attributes(run[0]);
        let scheme = attributes.context.scheme;
        let mut tokens = Vec::with_capacity(run.len() * blocks.tokens(run[0]).len() * (1 + usize::from(scheme.eagle)));
        for &number in run {
            push_tokens(&mut tokens, blocks.tokens(number), scheme.eagle);
        }
        let keys = || run.iter().map(|&number| blocks.get(number).key).collect();
        let extra_keys = |&number: &u32| blocks.attributes(number).namespace.extra_keys.as_deref();
        let store = Store {
            hashes: run.iter().map(|&number| blocks.get(number).hash).collect(),
            parent: (head.parent != ROOT).then(|| blocks.get(head.parent).hash),
            tokens: tokens.into(),
            pairs: scheme.eagle,
            keys: attributes.context.is_keyed().then(keys),
            block_size: scheme.size.into(),
            namespace: attributes.namespace.without_extra_keys().to_static(),
            extra_keys: join_extra_keys(run.iter().map(extra_keys)).map(Cow::Owned),
            lookahead: self.state.lookahead,
            ..Store::default()
        };
        self.with_announcement(announcement, store)
    }

    /// Returns a store with the properties of `announcement`.
    fn with_announcement(&self, announcement: u8, store: Store<'static>) -> Store<'static> {
        let known = self.state.announcements.get(announcement);
        let mut store = Store {
            location: known.location.clone(),
            kind: known.kind.clone(),
            window: known.window,
            ..store
        };
        let Evidence {
            unkeyed_levels,
            bare_levels,
            ..
        } = self.state.evidence;
        let unkeyed = if has_lora(&store) { unkeyed_levels } else { bare_levels };
        if unkeyed >> known.placement.level() & 1 == 0 && is_unkeyed_root(&store) {
            // The block was first announced on the device, so its extra keys are known. The consumer does not see this announcement, so the
            // store states that the block has no extra keys.
            store.extra_keys = Some(Cow::Owned(encode_extra_keys(store.hashes.iter().map(|_| None))));
        }
        store
    }

    fn store_without_tokens(&self, hashes: Vec<u64>, announcement: u8) -> Store<'static> {
        let store = Store {
            hashes: hashes.into(),
            block_size: self.state.announcements.get(announcement).tokenless_size.unwrap_or(0),
            ..Store::default()
        };
        self.with_announcement(announcement, store)
    }

    /// Removes the surplus copies: those of dead ancestors, and additional copies of uncertain blocks.
    fn remove_surplus(&mut self) {
        let surplus = std::mem::take(&mut self.surplus);
        for copies in surplus.chunk_by(|one, other| one.1 == other.1) {
            let hashes = copies.iter().map(|(hash, _)| *hash).collect();
            let location = self.state.announcements.get(copies[0].1).location.clone();
            (self.emit)(ExportedEvent::Removed(hashes, location));
        }
    }

    /// Exports the blocks of groups of unknown kinds. This must be exported first, since the last store of a group determines the rule of
    /// the group.
    fn export_unkept(&mut self) {
        for placement in self.state.unkept.sorted() {
            let mut stored = placement.hashes(1);
            if stored.is_empty() {
                stored.push(Vec::new()); // a store without blocks names the kind of the group
            }
            for hashes in stored {
                self.export_store(Store {
                    hashes: hashes.into(),
                    ..placement.example.clone()
                });
            }
            for hashes in placement.hashes(-1) {
                (self.emit)(ExportedEvent::Removed(hashes, placement.example.location.clone()));
            }
        }
    }

    fn export_waiting(&mut self) {
        let items: Vec<&Waiting<Content<'static>>> = self.state.waiting.iter().collect();
        for run in items.chunk_by(|one, other| can_store_together(one, other)) {
            let announcement = run[0].placement as u8;
            let hashes: Vec<u64> = run.iter().map(|item| item.hash).collect();
            let Some(head) = &run[0].content else {
                self.export_store(self.store_without_tokens(hashes, announcement));
                continue;
            };
            let contents = run.iter().filter_map(|item| item.content.as_ref());
            let mut tokens = Vec::new();
            for content in contents.clone() {
                push_tokens(&mut tokens, &content.tokens, head.scheme.eagle);
            }
            let extra_keys: Vec<Option<&[u8]>> = contents.map(|content| content.namespace.extra_keys.as_deref()).collect();
            let store = Store {
                hashes: hashes.into(),
                parent: Some(run[0].awaited),
                tokens: tokens.into(),
                pairs: head.scheme.eagle,
                block_size: head.scheme.size.into(),
                namespace: head.namespace.without_extra_keys().to_static(),
                extra_keys: join_extra_keys(extra_keys.into_iter()).map(Cow::Owned),
                lookahead: self.state.lookahead,
                ..Store::default()
            };
            let store = self.with_announcement(announcement, store);
            self.note_extra_keys(&store);
            self.export_store(store);
        }
    }

    fn note_extra_keys(&mut self, store: &Store<'_>) {
        if store.location.is_on_device() {
            self.needs_extra_keys &= !has_extra_keys(store.extra_keys.as_deref());
            self.needs_loras &= !has_lora(store);
        }
    }

    /// Announces the matching rules of groups that no exported store has announced.
    fn export_rules(&mut self) {
        for known in self.state.group_rules.iter() {
            if self
                .exported_rules
                .get(known.group)
                .is_some_and(|exported| exported.rule == known.rule)
            {
                continue;
            }
            let mut store = known.example.clone();
            if !known.rule.kind.is_full() {
                self.export_store(store);
                continue;
            }
            // Only a store with blocks can announce such a rule, so a block is stored and then removed.
            if let Some(keys) = &mut store.keys {
                *keys = vec![0].into();
            } else {
                store.tokens = vec![0; store.block_size as usize * (1 + usize::from(store.pairs))].into();
            }
            self.export_removed(&store, 1);
        }
    }

    fn unused_hashes(&self) -> [u64; 2] {
        *self.unused_hashes.get_or_init(|| {
            let blocks = &self.state.blocks;
            let dead: HashSet<u64> = blocks.iter_dead().map(|number| blocks.get(number).hash).collect();
            let is_unused =
                |&hash: &u64| blocks.find(hash).is_none() && !self.state.waiting.names(hash) && !dead.contains(&hash);
            let mut unused = (1..).filter(is_unused);
            std::array::from_fn(|_| unused.next().unwrap_or(0))
        })
    }
}

/// The media of some levels below the device, which are given as bits.
fn media_of(levels: u8) -> impl Iterator<Item = &'static [u8]> {
    let lower = LOWER_MEDIA.into_iter().enumerate();
    lower
        .filter(move |(at, _)| levels >> (at + 1) & 1 != 0)
        .map(|(_, medium)| medium.as_bytes())
}

fn has_lora(store: &Store<'_>) -> bool {
    store.namespace.lora_id.is_some() || store.namespace.lora_name.is_some()
}

/// Whether a store is an unkeyed root: the first block of a prompt, on a tier below the device, without the field for extra keys.
fn is_unkeyed_root(store: &Store<'_>) -> bool {
    let is_root = store.parent.is_none() && !store.tokens.is_empty() && !store.location.is_on_device();
    is_root && store.extra_keys.is_none() && store.namespace.cache_salt.is_none()
}

/// Whether one event can store both of two consecutive pending blocks.
fn can_store_together(one: &Waiting<Content<'_>>, other: &Waiting<Content<'_>>) -> bool {
    one.placement == other.placement
        && match (&one.content, &other.content) {
            (None, None) => true,
            (Some(before), Some(after)) => {
                other.awaited == one.hash
                    && before.scheme == after.scheme
                    && before.namespace.without_extra_keys() == after.namespace.without_extra_keys()
            }
            _ => false,
        }
}

/// Appends tokens; under EAGLE, appends pairs of each token and the next one.
fn push_tokens(out: &mut Vec<u32>, tokens: &[u32], is_eagle: bool) {
    if is_eagle {
        out.extend(tokens.windows(2).flatten());
    } else {
        out.extend_from_slice(tokens);
    }
}

// --- several blocks with one hash

/// Returns the state that these events create after a clear; None if a consumer could distinguish it from `state`.
fn rebuild_state(events: &[ExportedEvent], state: &State) -> Option<State> {
    let mut rebuilt = State::default();
    rebuilt.copied_levels = state.copied_levels;
    let applied = events.iter().try_for_each(|event| match event {
        ExportedEvent::Stored(store) => rebuilt.store(store),
        ExportedEvent::Removed(hashes, location) => rebuilt.remove(hashes, location),
        ExportedEvent::Cleared => rebuilt.clear(None, None),
    });
    let waiting = |state: &State| -> Vec<(u64, u64)> { state.waiting.iter().map(|item| (item.hash, item.awaited)).collect() };
    let is_same = applied.is_ok()
        && copies_of(&rebuilt) == copies_of(state)
        && twin_keys(&rebuilt.blocks) == twin_keys(&state.blocks)
        && waiting(&rebuilt) == waiting(state);
    is_same.then_some(rebuilt)
}

/// Hashes and keys of the blocks that might have been computed with former weights of a LoRA.
pub(super) fn outdated_blocks(state: &State) -> BTreeSet<(u64, u64)> {
    let blocks = &state.blocks;
    let numbers = (blocks.numbers()).filter(|&number| blocks.attributes(number).copies != 0 && blocks.is_outdated(number));
    numbers
        .map(|number| (blocks.get(number).hash, blocks.get(number).key))
        .collect()
}

/// A copy: the hash, the key and the context of its block, and the digest and the group of its placement.
pub(super) type Copy = (u64, u64, Context, u64, i64);

/// Number of copies with each combination of properties that a consumer can distinguish.
pub(super) fn copies_of(state: &State) -> HashMap<Copy, u32> {
    let mut found = HashMap::new();
    let placements = state.announcements.iter().map(|known| &known.placement);
    let placements: Vec<(u64, i64)> = placements.map(|placement| (placement.digest(), placement.group)).collect();
    for number in state.blocks.numbers() {
        let (record, attributes) = (*state.blocks.get(number), state.blocks.attributes(number));
        for announcement in bits(attributes.copies) {
            let (placement, group) = placements[usize::from(announcement)];
            let copy = (record.hash, record.key, attributes.context, placement, group);
            *found.entry(copy).or_default() += state.blocks.count(number, announcement);
        }
    }
    found
}

/// The keys of all live twins with each shared hash, in the order of the twins.
pub(super) fn twin_keys(blocks: &Blocks) -> HashMap<u64, Vec<u64>> {
    let keys = |list: &[u32]| list.iter().map(|&number| blocks.get(number).key).collect();
    blocks.collisions.iter().map(|(hash, list)| (hash, keys(list))).collect()
}
