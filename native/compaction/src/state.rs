//! Applies events to the state of a stream, as the index does, but keeps all data that a snapshot must contain.

use std::borrow::Cow;
use std::collections::VecDeque;

use kvevents_index::apply::{EVERY_TIER, HOST_OF_SGLANG, PayloadEvents, extras_at, extras_of, has_extra_keys};
use kvevents_index::groups::GroupKind;
use kvevents_index::holders::contexts::Context;
use kvevents_index::holders::placements::{TIERS, level_of, tier};
use kvevents_index::keys::{self, Scheme};
use kvevents_index::rules::clear_budget::ClearBudget;
use kvevents_index::rules::evidence::Evidence;
use kvevents_index::rules::hit_reports::HitReports;
use kvevents_index::rules::pending::{Queue, Waiting, Weight};
use kvevents_index::wire::scan::{Event, Kind};

use super::announcements::{Announcements, RemovalScope};
use super::blocks::{Blocks, NewBlock, ROOT, StoreOutcome};
use super::event::{Location, Namespace, Store, split_extra_keys, store_of};
use super::group_rules::{GroupRules, kind_of};
use super::unkept::UnkeptCopies;

/// Maximum number of blocks with copies: about 2 GB at 16 tokens per block.
pub const MAX_LIVE: usize = 1 << 24;
/// Maximum number of blocks and hashes that wait for a parent or for tokens.
pub const MAX_WAITING: usize = 1 << 16;
/// Maximum number by which dead blocks can outnumber the blocks with copies.
pub const MAX_DEAD: usize = 1 << 16;
/// Maximum number by which further copies (see `Blocks::extra_copies`) can outnumber the blocks with copies.
pub const MAX_EXTRA: usize = 1 << 20;
/// Maximum number of bytes of LoRA names, salts and extra keys, each of which counts only once.
pub const MAX_TEXT_BYTES: usize = 64 << 20;
/// Maximum number of different block sizes in tokens; the blocks of each size have their own memory.
pub const MAX_WIDTHS: usize = 64;

/// Maximum number of copies in groups of unknown kinds.
pub const MAX_UNKEPT: usize = 1 << 22;

/// Why a state is invalid: the exceeded limit, or the unreadable events.
pub type Reason = &'static str;

/// A pending block with its tokens and its namespace, but without its hash.
#[derive(Clone, Debug)]
pub struct Content<'a> {
    /// Tokens that the block's hash covers.
    pub tokens: Cow<'a, [u32]>,
    /// Hashes of the block's extra keys.
    pub extras: Vec<u64>,
    /// The rule by which the prompt's tokens were divided into blocks.
    pub scheme: Scheme,
    /// Part of the seed that the block's LoRA contributes.
    pub lora: u64,
    /// Part of the seed that the block's own salt contributes; None if the salt is that of the parent.
    pub salt: Option<u64>,
    /// Namespace of the block as announced.
    pub namespace: Namespace<'a>,
}

impl Weight for Content<'static> {
    fn bytes(&self) -> usize {
        self.tokens.len() * 4 + self.extras.len() * 8 + self.namespace.bytes()
    }
}

/// The state of one stream.
#[derive(Debug, Default)]
pub struct State {
    /// The blocks of the stream.
    pub blocks: Blocks,
    /// The announcements of the stream.
    pub announcements: Announcements,
    /// The matching rules of the stream's groups.
    pub group_rules: GroupRules,
    /// Pending copies, of blocks whose parents or tokens are unknown. In this queue, the placement of a copy is the ID of its announcement.
    pub waiting: Queue<Content<'static>>,
    /// Copies of blocks in groups of unknown kinds.
    pub unkept: UnkeptCopies,
    /// Stores of the current payload that might be reports of hits, each as a hash and an announcement.
    hit_reports: HitReports<u64, u8>,
    /// Number of tokens after each block that the block's hash also covers.
    pub lookahead: usize,
    /// The levels, as bits, on which a second store of a block is another copy, as `Groups::copied_levels` in the index.
    pub copied_levels: u8,
    /// What events show about the completeness of the stream's blocks. If the state is invalid, one store counts as unusable.
    pub evidence: Evidence,
    /// Why the state is invalid until the next clear of everything; None if it is valid.
    pub invalid: Option<Reason>,
    /// Whether a clear has marked all blocks as uncertain, and no event other than a clear has followed.
    is_all_uncertain: bool,
    clear_budget: ClearBudget,
    /// Buffer for the extra keys of one store, to avoid allocations.
    extras: Vec<(usize, u64)>,
}

impl State {
    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        self.blocks.bytes() + self.announcements.bytes() + self.group_rules.bytes() + self.waiting.bytes() + self.unkept.bytes()
    }

    /// Applies one event of a payload.
    pub fn apply(&mut self, read: &PayloadEvents<'_>, event: &Event) {
        let outcome = match event.kind {
            Kind::Stored => {
                let event = event.without_zero_parent(|| self.blocks.find(0).is_some());
                self.store(&store_of(read, &event))
            }
            Kind::Removed => self.remove(event.hashes.slice(&read.scratch.hashes), &read.location(event)),
            Kind::Cleared => self.clear(read.bytes(event.medium), event.group),
        };
        if let Err(reason) = outcome {
            self.invalidate(reason);
        }
    }

    /// Finishes a payload, after its last event. `has_reports` is whether repeated stores in the payload might be reports of hits instead
    /// of further copies.
    pub fn end_payload(&mut self, has_reports: bool) {
        for (hash, announcement) in self.hit_reports.take_uncertain() {
            if has_reports {
                self.blocks
                    .mark_uncertain(hash, self.announcements.on_placement_of(announcement));
            }
        }
    }

    /// Drops everything except the matching rules of groups, and ignores all events before the next clear of everything.
    pub fn invalidate(&mut self, reason: Reason) {
        *self = Self {
            group_rules: std::mem::take(&mut self.group_rules),
            lookahead: self.lookahead,
            copied_levels: self.copied_levels,
            evidence: Evidence {
                has_extra_keys: false,
                has_loras: false,
                unkeyed_levels: 0,
                bare_levels: 0,
                set_aside: 1,
                ..self.evidence
            },
            invalid: Some(reason),
            ..Self::default()
        };
    }

    fn check_limits(&self) -> Result<(), Reason> {
        let live = self.blocks.live();
        let limits = [
            (live, MAX_LIVE, "blocks"),
            (self.waiting.len(), MAX_WAITING, "orphans"),
            (self.blocks.dead(), live + MAX_DEAD, "dead ancestors"),
            (self.blocks.extra_copies(), live + MAX_EXTRA, "copies"),
            (self.blocks.text_bytes(), MAX_TEXT_BYTES, "bytes of names and extra keys"),
            (self.blocks.widths(), MAX_WIDTHS, "block sizes"),
            (self.unkept.len(), MAX_UNKEPT, "copies of unknown kinds"),
        ];
        let above = limits.iter().find(|(found, limit, _)| found > limit);
        above.map_or(Ok(()), |(_, _, what)| Err(*what))
    }

    fn check_examinations(&self) -> Result<(), Reason> {
        if self.blocks.collisions.is_spent() {
            return Err("blocks that share a hash");
        }
        Ok(())
    }

    // --- stores

    /// Applies a store.
    pub fn store(&mut self, store: &Store<'_>) -> Result<(), Reason> {
        self.is_all_uncertain = false;
        self.clear_budget.add_stored(store.hashes.len());
        self.lookahead = self.lookahead.max(store.lookahead);
        let level = self.announcements.level_of(store);
        self.evidence.named_levels |= 1 << level;
        if store.location.group.is_some() {
            self.copied_levels |= 1 << level;
        }
        self.evidence.has_host_clears |= store.location.medium.as_deref() == Some(HOST_OF_SGLANG);
        let kind = kind_of(store);
        if kind == GroupKind::Unknown {
            self.learn(store)?;
            if self.invalid.is_some() {
                return Ok(());
            }
            self.unkept.store(store).ok_or("placements of unknown kinds")?;
            return self.check_limits();
        }
        if !kind.is_full() || !store.has_content() {
            self.learn(store)?;
            return self.store_without_tokens(store);
        }
        let keyable = store.keyable.filter(|&count| count > 0 || store.hashes.is_empty());
        self.evidence.set_aside += u64::from(!store.hashes.is_empty() && keyable != Some(store.hashes.len()));
        let Some(count) = keyable else { return Ok(()) };
        let size = store.block_size as u32;
        self.learn(store)?;
        if self.invalid.is_some() || store.hashes.is_empty() {
            return Ok(());
        }
        let announcement = self.announcements.number_of(store, None).ok_or("announcements")?;
        match &store.keys {
            Some(keys) => self.store_with_keys(&store.hashes, keys, size, announcement)?,
            None => self.store_with_tokens(store, count, size, announcement)?,
        }
        self.check_limits()
    }

    fn learn(&mut self, store: &Store<'_>) -> Result<(), Reason> {
        self.group_rules.learn(store).ok_or("groups")
    }

    /// Applies a store without tokens or keys, which only announces copies.
    fn store_without_tokens(&mut self, store: &Store<'_>) -> Result<(), Reason> {
        if self.invalid.is_some() || store.hashes.is_empty() {
            return Ok(());
        }
        let announcement = self.announcements.number_of(store, Some(store.block_size));
        let announcement = announcement.ok_or("announcements")?;
        let same_placement = self.announcements.on_placement_of(announcement);
        for &hash in store.hashes.iter() {
            match self.blocks.find(hash) {
                Some(number) => {
                    if !self.blocks.is_certain(number, same_placement) {
                        self.hit_reports.fresh.push((hash, announcement));
                    }
                    self.blocks.add_copy(number, announcement, self.single(announcement));
                    self.note_repeated(hash, number, announcement);
                }
                None => self.wait(hash, announcement, hash, None),
            }
        }
        self.check_limits()
    }

    /// The announcements, as bits, in which a block has at most one copy in total; 0 if each store adds a copy.
    fn single(&self, announcement: u8) -> u64 {
        let level = self.announcements.get(announcement).placement.level();
        if self.copied_levels >> level & 1 != 0 {
            0
        } else {
            self.announcements.on_placement_of(announcement)
        }
    }

    /// Records a store that might repeat a copy: the block already had a copy on the same placement.
    fn note_repeated(&mut self, hash: u64, number: u32, announcement: u8) {
        if self.group_rules.len() > 1 {
            let same_placement = self.announcements.on_placement_of(announcement);
            if self.blocks.count_on(number, same_placement) > 1 {
                self.hit_reports.repeated.push(hash);
            }
        }
    }

    /// Applies a store of keys. A key identifies a block together with its namespace and all earlier blocks.
    fn store_with_keys(&mut self, hashes: &[u64], keys: &[u64], size: u32, announcement: u8) -> Result<(), Reason> {
        let single = self.single(announcement);
        for (&hash, &key) in hashes.iter().zip(keys) {
            let stored = self.blocks.store(&NewBlock {
                hash,
                key,
                parent: ROOT,
                context: Context::keyed(size),
                namespace: &Namespace::default(),
                tokens: &[],
                announcement,
                single,
            });
            if self.number_of(stored, hash, announcement)?.is_none() {
                break;
            }
        }
        Ok(())
    }

    /// Completes the store of a block. Returns the ID of the block; None if the block was refused.
    fn number_of(&mut self, stored: StoreOutcome, hash: u64, announcement: u8) -> Result<Option<u32>, Reason> {
        self.check_examinations()?;
        let (StoreOutcome::New(number) | StoreOutcome::Known(number)) = stored else {
            return Ok(None);
        };
        if matches!(stored, StoreOutcome::New(_)) {
            self.link(hash, number)?;
        } else {
            self.note_repeated(hash, number, announcement);
        }
        Ok(Some(number))
    }

    /// Applies the first `count` blocks of a store with tokens.
    fn store_with_tokens(&mut self, store: &Store<'_>, count: usize, size: u32, announcement: u8) -> Result<(), Reason> {
        let lora = keys::lora(store.namespace.lora_name.as_deref(), store.namespace.lora_id);
        let is_root = store.parent.is_none();
        let mut extras = std::mem::take(&mut self.extras);
        let lora_name = store.namespace.lora_name.as_deref();
        let bare_salt = extras_of(store.extra_keys.as_deref(), lora_name, is_root, &mut extras);
        let extra_keys = split_extra_keys(store.extra_keys.as_deref()).ok_or("nested extra keys")?;
        let own_salt = store.namespace.cache_salt.as_deref().and_then(keys::stated_salt);
        let mut content = Content {
            tokens: Cow::default(),
            extras: Vec::new(),
            scheme: Scheme {
                size,
                eagle: store.pairs,
            },
            lora,
            salt: own_salt.or(is_root.then_some(bare_salt.unwrap_or(0))),
            namespace: store.namespace.clone(),
        };
        let is_below_device = !self.announcements.is_on_device(announcement);
        self.evidence.has_extra_keys |= !is_below_device && has_extra_keys(store.extra_keys.as_deref());
        self.evidence.has_loras |= !is_below_device && lora != 0;
        let is_unkeyed = is_below_device && store.extra_keys.is_none() && store.namespace.cache_salt.is_none();
        let mut awaited = store.parent;
        let mut parent = if is_root { Some(ROOT) } else { None };
        for (at, &hash) in store.hashes[..count].iter().enumerate() {
            // As in the index, a stored block on a tier below the device gets the key of a known block with its hash.
            if let Some(number) = self.known_block(hash, content.scheme).filter(|_| is_below_device) {
                self.blocks.add_copy(number, announcement, self.single(announcement));
                self.note_repeated(hash, number, announcement);
                (awaited, parent, content.salt) = (Some(hash), Some(number), own_salt);
                continue;
            }
            if is_unkeyed && at == 0 && is_root {
                let level = self.announcements.get(announcement).placement.level();
                self.evidence.note_unkeyed_root(level, lora == 0);
            }
            content.tokens = tokens_of(store, at, size as usize);
            content.extras.clear();
            content.extras.extend(extras_at(&extras, at));
            content.namespace.extra_keys = extra_keys.get(at).copied().flatten().map(Cow::Borrowed);
            // As long as no parent is known, the parent of a block is looked up by the parent's hash. From then on, each block is the
            // parent of the next.
            let known = parent.or_else(|| awaited.and_then(|hash| self.blocks.find(hash)));
            let Some(above) = known else {
                self.wait(hash, announcement, awaited.unwrap_or(0), Some(content.to_static()));
                awaited = Some(hash);
                continue;
            };
            let stored = self.store_behind(above, hash, announcement, &mut content);
            parent = self.number_of(stored, hash, announcement)?;
            if parent.is_none() {
                break;
            }
        }
        self.extras = extras;
        Ok(())
    }

    /// Adds one copy of a block whose parent is known.
    fn store_behind(&mut self, parent: u32, hash: u64, announcement: u8, content: &mut Content<'_>) -> StoreOutcome {
        let above = (parent != ROOT).then(|| (self.blocks.get(parent).key, self.blocks.attributes(parent).context.salt));
        let context = Context {
            scheme: content.scheme,
            lora: content.lora,
            salt: content.salt.or(above.map(|(_, salt)| salt)).unwrap_or(0),
        };
        let local = keys::local_with(&content.tokens, &mut content.extras, context.seed());
        let block = NewBlock {
            hash,
            key: above.map_or(local, |(key, _)| keys::chained(key, local)),
            parent,
            context,
            namespace: &content.namespace,
            tokens: &content.tokens,
            announcement,
            single: self.single(announcement),
        };
        let live = self.blocks.live();
        let together = self.announcements.on_placement_of(announcement);
        let is_held = context.lora != 0 && self.blocks.holds(&block, together);
        let stored = self.blocks.store(&block);
        if let (StoreOutcome::New(number) | StoreOutcome::Known(number), true) = (stored, context.lora != 0) {
            let on_device = self.announcements.is_on_device(announcement).then_some(together);
            let is_known = self.blocks.live() == live;
            if !self.blocks.note_lora(number, parent, is_known, on_device, is_held) {
                return StoreOutcome::Refused;
            }
        }
        stored
    }

    fn wait(&mut self, hash: u64, announcement: u8, awaited: u64, content: Option<Content<'static>>) {
        let waiting = Waiting {
            hash,
            placement: announcement.into(),
            awaited,
            content,
        };
        let single = self.single(announcement);
        if single != 0 && self.waiting.is_last(&waiting, |announcement| single >> announcement & 1 != 0) {
            return;
        }
        self.waiting.push(waiting, usize::MAX);
    }

    /// Stores the blocks that waited for a block, then the blocks that waited for the stored ones, and so on.
    fn link(&mut self, hash: u64, number: u32) -> Result<(), Reason> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let mut linked = VecDeque::from([(hash, number)]);
        while let Some((hash, number)) = linked.pop_front() {
            for item in self.waiting.take_awaiting(hash) {
                let announcement = item.placement as u8;
                let Some(mut content) = item.content else {
                    self.blocks.add_copy(number, announcement, self.single(announcement));
                    self.note_repeated(hash, number, announcement);
                    continue;
                };
                let stored = self.store_behind(number, item.hash, announcement, &mut content);
                self.check_examinations()?;
                match stored {
                    StoreOutcome::New(number) => linked.push_back((item.hash, number)),
                    StoreOutcome::Known(number) => self.note_repeated(item.hash, number, announcement),
                    StoreOutcome::Refused => {}
                }
            }
        }
        Ok(())
    }

    /// The latest block with this hash; None if a scheme other than `scheme` has divided its prompt into blocks.
    fn known_block(&self, hash: u64, scheme: Scheme) -> Option<u32> {
        let number = self.blocks.find(hash)?;
        let context = self.blocks.attributes(number).context;
        (!context.is_keyed() && context.scheme == scheme).then_some(number)
    }

    // --- removals

    /// Applies a removal. Prompts match no blocks of groups of unknown kinds, so a removal in such a group only changes the numbers of
    /// copies.
    pub fn remove(&mut self, hashes: &[u64], location: &Location<'_>) -> Result<(), Reason> {
        self.is_all_uncertain = false;
        if self.invalid.is_some() {
            return Ok(());
        }
        if let Some(kind) = self.group_rules.unknown_kind(location.group.unwrap_or(0)) {
            let removed = self.unkept.remove(hashes, location, kind);
            removed.ok_or("placements of unknown kinds")?;
            return self.check_limits();
        }
        let removable = self.announcements.removal_scope(location);
        self.evidence.named_levels |= 1 << removable.level;
        let mut unstated = None;
        for &hash in hashes {
            if !self.remove_copy(hash, removable) {
                let others = unstated.get_or_insert_with(|| self.announcements.unstated_scopes(location));
                for &other in &*others {
                    self.remove_copy(hash, other);
                }
            }
            self.check_examinations()?;
        }
        self.check_limits()
    }

    fn remove_copy(&mut self, hash: u64, removable: RemovalScope) -> bool {
        let is_meant = |announcement| removable.placement >> announcement & 1 != 0;
        self.blocks.remove(hash, removable) || self.waiting.remove_where(hash, is_meant)
    }

    /// Applies a clear of everything, of a tier, or of a group.
    pub fn clear(&mut self, medium: Option<&[u8]>, group: Option<i64>) -> Result<(), Reason> {
        if medium.is_none() && group.is_none() {
            self.clear_all();
            return Ok(());
        }
        if medium == Some(EVERY_TIER) && group.is_none() {
            let invalid = self.invalid.filter(|&reason| reason != "groups");
            self.evidence.begin_engine();
            let ended = u64::from(self.invalid != invalid);
            self.evidence.set_aside = self.evidence.set_aside.saturating_sub(ended);
            *self = Self {
                evidence: self.evidence,
                invalid,
                clear_budget: self.clear_budget,
                ..Self::default()
            };
            return Ok(());
        }
        let tier = medium.map(|medium| tier(&String::from_utf8_lossy(medium)));
        let tier = tier.as_deref();
        let announcements = self.announcements.cleared_announcements(tier, group);
        if announcements != 0 && !self.may_examine() {
            return Err("clears");
        }
        let is_unknown = tier.is_some_and(|tier| level_of(tier) == TIERS.len());
        if is_unknown && (announcements == 0 || announcements & self.used_announcements() == 0) {
            self.clear_all();
            self.evidence.set_aside += 1;
            return Ok(());
        }
        self.unkept.clear(tier, group);
        if announcements != 0 {
            self.waiting.clear(|announcement| announcements >> announcement & 1 != 0);
            self.blocks.clear(announcements);
        }
        if let Some(level) = tier.filter(|_| group.is_none()).map(level_of) {
            if level == 0 {
                self.hit_reports.clear();
            }
            // Blocks must be examined only if the clear had blocks to remove.
            let held = if announcements == 0 { 0 } else { self.lower_levels() };
            self.evidence.clear_level(level, held);
        }
        Ok(())
    }

    /// The announcements that have blocks or pending blocks, as bits.
    fn used_announcements(&self) -> u64 {
        let waiting = self.waiting.iter().fold(0, |bits, item| bits | 1 << item.placement);
        waiting | self.blocks.all_copies()
    }

    /// The levels below the device, as bits, on which the stream has blocks or pending blocks.
    fn lower_levels(&self) -> u8 {
        self.announcements.levels_of(self.used_announcements()) & !1
    }

    /// Whether clears are rare enough that all blocks may be examined again.
    fn may_examine(&mut self) -> bool {
        self.clear_budget.try_spend(self.blocks.live() + self.waiting.len())
    }

    /// Applies a clear that names no tier. As in the index, blocks on lower tiers remain, but might be gone.
    fn clear_all(&mut self) {
        if self.is_all_uncertain && self.blocks.live() > 0 {
            return self.evidence.begin(0, true);
        }
        let lower = self.announcements.on_levels(!self.evidence.emptied_levels());
        let waiting = self.waiting.iter().fold(0, |bits, item| bits | 1 << item.placement);
        let has_lower = lower != 0 && self.blocks.live() > 0;
        let may_keep = has_lower && self.may_examine();
        let held = match (has_lower, may_keep) {
            (false, _) => 0,
            (true, false) => lower,
            (true, true) => self.blocks.all_copies() & lower,
        };
        let keeps = may_keep && held != 0;
        let dropped = waiting & lower | if keeps { 0 } else { held };
        self.evidence.begin(self.announcements.levels_of(dropped), keeps);
        // If the state is invalid because of too many groups, it stays invalid, although the blocks of these groups are removed.
        let invalid = self.invalid.filter(|&reason| reason == "groups");
        self.evidence.set_aside = u64::from(invalid.is_some());
        let mut cleared = Self {
            group_rules: std::mem::take(&mut self.group_rules),
            lookahead: self.lookahead,
            copied_levels: self.copied_levels,
            evidence: self.evidence,
            invalid,
            ..Self::default()
        };
        if keeps {
            self.blocks.clear(!lower);
            self.blocks.mark_all_uncertain(&self.announcements);
            cleared.blocks = std::mem::take(&mut self.blocks);
            cleared.announcements = std::mem::take(&mut self.announcements);
            cleared.clear_budget = self.clear_budget;
            cleared.is_all_uncertain = true;
        }
        *self = cleared;
    }
}

impl Content<'_> {
    fn to_static(&self) -> Content<'static> {
        Content {
            tokens: Cow::Owned(self.tokens.to_vec()),
            extras: self.extras.clone(),
            scheme: self.scheme,
            lora: self.lora,
            salt: self.salt,
            namespace: self.namespace.to_static(),
        }
    }
}

/// The tokens that the hash of the block `at` covers.
fn tokens_of<'a>(store: &'a Store<'_>, at: usize, size: usize) -> Cow<'a, [u32]> {
    if !store.pairs {
        return store.tokens[at * size..][..size].into();
    }
    let pairs = &store.tokens[at * size * 2..][..size * 2];
    let first = pairs.iter().step_by(2);
    first.chain(pairs.last()).copied().collect()
}
