//! The state that all streams share: the records of blocks, found by their keys, and the holders of each record.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use crate::groups::cache::GroupLookup;
use crate::holders::contexts::Contexts;
use crate::holders::holder_sets::{EMPTY, MAX_STREAMS, Move, Sets};
use crate::keys::Scheme;
use crate::limits::Limits;
use crate::memory::hasher::Secret;
use crate::memory::table::{Hashes, Table, TableHash};
use crate::rules::replaced_loras::ReplacedLoras;
use crate::step_counter;
use crate::store::members::{Member, Model, Worker};
use crate::store::read_view::{Owner, View};
use crate::store::records::{Records, Row};
use crate::sync::yielding_lock::Publish;

/// Computes the hashes by which the tables of heads and of keys place records.
pub struct ByKey<'a>(pub &'a Records, pub Secret);

impl Hashes for ByKey<'_> {
    #[inline]
    fn hash_of(&self, record: u32) -> u64 {
        self.1.place(self.0.word(record))
    }

    #[inline]
    fn prefetch(&self, record: u32) {
        self.0.prefetch_all(record);
    }
}

/// Computes the hashes by which a stream's table places records.
pub struct ByHash<'a>(pub &'a Records, pub Secret);

impl Hashes for ByHash<'_> {
    #[inline]
    fn hash_of(&self, record: u32) -> u64 {
        self.1.place(self.0.hash(record))
    }

    #[inline]
    fn prefetch(&self, record: u32) {
        self.0.prefetch(record);
    }
}

/// The identity of a block, and the values by which tables find it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Block {
    /// The engine's hash.
    pub hash: u64,
    /// Rolling key of the block.
    pub key: u64,
    /// Local hash of the block; unused if the block is `keyed`.
    pub local: u64,
    /// ID of the block's context.
    pub context: u32,
    /// Whether the block was announced by its key instead of tokens.
    pub keyed: bool,
    /// Key of the block, mixed with the secret of the tables.
    pub mixed_key: TableHash,
    /// Hash of the block, mixed with the secret of the tables.
    pub mixed_hash: TableHash,
}

/// The result of adding a stream to the holders of a block.
#[derive(Clone, Copy, Debug)]
pub struct Holding {
    /// ID of the block's record.
    pub number: u32,
    /// Whether no stream held the block before.
    pub is_new: bool,
    /// Whether the stream holds another block with the same key, under another hash.
    pub has_twin: bool,
}

/// The state that all streams of an index share, for one writer at a time. Lookups read the `view` and the slots of records while the
/// writer runs.
#[derive(Debug)]
pub struct SharedState {
    /// The state that lookups search.
    pub view: Owner<View>,
    /// The records of all blocks.
    pub records: Records,
    /// The sets of holders of blocks.
    pub sets: Sets,
    /// Block sizes and namespaces of blocks.
    pub contexts: Contexts,
    /// Records that lookups do not find, since too many records have their key and context. For each key and context, the set has each
    /// record once for each of its holders, as a pair of holder and record.
    unlisted: HashMap<(u64, u32), BTreeSet<(u32, u32)>>,
    /// Number of entries in `unlisted`.
    unlisted_holders: usize,
    /// For each source, the number of its streams that have named each placement.
    source_placements: HashMap<String, HashMap<u16, u32>>,
    /// Number of heap bytes of all streams; updated only if a memory limit is set.
    pub streams_bytes: usize,
    /// Secret of the tables' hash function.
    pub secret: Secret,
    /// Bounds of the index.
    pub limits: Limits,
}

impl SharedState {
    /// Creates the empty state of a new index.
    pub fn new(limits: Limits) -> Self {
        Self::with_secret(limits, Secret::new())
    }

    /// Creates an empty state whose tables use this secret.
    pub(crate) fn with_secret(limits: Limits, secret: Secret) -> Self {
        Self {
            view: Owner::new(View::new(secret)),
            records: Records::default(),
            sets: Sets::new(secret),
            contexts: Contexts::new(secret),
            unlisted: HashMap::new(),
            unlisted_holders: 0,
            source_placements: HashMap::new(),
            streams_bytes: 0,
            secret,
            limits,
        }
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.records.bytes()
            + self.view.heads.bytes()
            + self.view.keyed.bytes()
            + self.sets.bytes()
            + self.contexts.bytes()
            + self.unlisted_holders * UNLISTED_BYTES
            + self.view.members.len() * MEMBER_BYTES
    }

    /// A key or hash, mixed with the secret of this index. Tables place entries by the mixed value. So a peer that chooses keys and hashes
    /// cannot choose where they are placed.
    #[inline]
    pub fn mixed(&self, value: u64) -> TableHash {
        TableHash::from(self.secret.place(value))
    }

    #[inline]
    fn table(&self, keyed: bool) -> &Table {
        if keyed { &self.view.keyed } else { &self.view.heads }
    }

    /// Adds a record to the table of heads, or to the table of blocks that were stored by their keys.
    #[inline]
    fn insert(&mut self, keyed: bool, mixed: TableHash, number: u32) {
        let hashes = ByKey(&self.records, self.secret);
        let view = &mut *self.view.change();
        let table = if keyed { &mut view.keyed } else { &mut view.heads };
        table.insert(mixed, number, &hashes);
    }

    /// Whether lookups can find a record with the key and the context of a block by its key.
    #[inline]
    pub fn is_listed(&self, block: &Block) -> bool {
        let records = &self.records;
        let same = |number: u32| records.word(number) == block.key && records.context(number) == block.context;
        self.table(block.keyed).find(block.mixed_key, same).is_some()
    }

    /// Whether the record with this ID is a head with this key and context.
    pub fn is_head(&self, number: u32, key: u64, context: u32) -> bool {
        let records = &self.records;
        records.is_used(number)
            && !records.is_linked(number)
            && records.word(number) == key
            && records.context(number) == context
    }

    /// Adds a stream to the holders of a block that the stream does not hold yet. `parent` is the record of the block's parent; None if it
    /// is not known. Returns None if all IDs of records are used.
    #[inline]
    pub fn add_holder(
        &mut self,
        block: &Block,
        parent: Option<u32>,
        placement: u16,
        stream: u32,
        last: &mut Move,
    ) -> Option<Holding> {
        let &Block { key, context, keyed, .. } = block;
        let joined = |number, has_twin| Holding {
            number,
            is_new: false,
            has_twin,
        };
        if let Some(parent) = parent.filter(|_| !keyed)
            && let Some(next) = self.records.linked_next(parent)
            && self.records.word(next) == block.local
            && self.records.context(next) == context
        {
            if !self.sets.knows(self.records.set(next), stream) {
                self.toggle(next, placement, stream, last);
                return Some(joined(next, false));
            }
            self.list(next);
        }
        let (records, sets) = (&self.records, &self.sets);
        let (mut same_key, mut is_twin, mut has_twin, mut found) = (0, false, false, None);
        self.table(keyed).for_each_match(block.mixed_key, |number| {
            step_counter::count(1);
            if records.word(number) == key {
                same_key += 1;
                if records.context(number) == context {
                    is_twin = true;
                    if sets.knows(records.set(number), stream) {
                        has_twin = true;
                    } else {
                        found = found.or(Some(number));
                    }
                }
            }
            found.is_none_or(|number| records.has_twins(number))
        });
        if let Some(number) = found {
            self.toggle(number, placement, stream, last);
            return Some(joined(number, has_twin));
        }
        if same_key >= self.limits.records_per_key {
            self.unlist_twin(block);
        }
        let number = self.add(block, parent.filter(|_| !keyed), is_twin, placement, stream, last)?;
        Some(Holding {
            number,
            is_new: true,
            has_twin,
        })
    }

    /// Hides from lookups one of the records that have the key and the context of a block. A record that some holder has stored with the
    /// present weights of its LoRA is not hidden. Each holder of the hidden record must also hold at least two visible records with the
    /// same key and context. So lookups find only a few such records of each stream.
    #[cold]
    fn unlist_twin(&mut self, block: &Block) {
        let listed = self.twins_of(block.keyed, block.key, block.context);
        let lora = self.contexts.get(block.context).lora;
        let is_surplus = |number: u32, stream: u32| {
            let is_current = |member: &Member| member.loras.contains(lora) && !member.loras.is_outdated(lora, number);
            !self.view.members[stream as usize].as_ref().is_some_and(is_current)
                && self.count_held(&listed, stream) > MIN_LISTED
        };
        let found = listed.iter().copied().find_map(|number| {
            let holders = self.sets.streams(self.records.set(number));
            holders
                .iter()
                .all(|&stream| is_surplus(number, stream))
                .then_some((number, holders))
        });
        let Some((number, holders)) = found else { return };
        self.unlist(number, block.context);
        self.unlisted_holders += holders.len();
        let unlisted = self.unlisted.entry((block.key, block.context)).or_default();
        unlisted.extend(holders.into_iter().map(|stream| (stream, number)));
    }

    /// The records that have a key and a context and are visible to lookups.
    fn twins_of(&self, keyed: bool, key: u64, context: u32) -> Vec<u32> {
        let mut found = Vec::new();
        self.for_each_twin(keyed, key, |number| found.push(number));
        found.retain(|&number| self.records.context(number) == context);
        found
    }

    /// Number of the given records that a stream holds.
    fn count_held(&self, records: &[u32], stream: u32) -> usize {
        step_counter::count(records.len());
        let is_held = |&&number: &&u32| self.sets.knows(self.records.set(number), stream);
        records.iter().filter(is_held).count()
    }

    /// Records that a stream no longer holds a block. Makes hidden records with the block's key visible to lookups if necessary.
    #[inline]
    pub fn leave_twin(&mut self, stream: u32, number: u32) {
        if self.has_unlisted_twins(number) {
            self.list_twins(stream, number);
        }
    }

    /// Whether records with the key of a block can be hidden from lookups.
    #[inline]
    pub fn has_unlisted_twins(&self, number: u32) -> bool {
        !self.unlisted.is_empty() && self.records.has_twins(number)
    }

    #[cold]
    fn list_twins(&mut self, stream: u32, number: u32) {
        let (key, context) = (self.records.key(number), self.records.context(number));
        let Some(mut unlisted) = self.unlisted.remove(&(key, context)) else {
            return;
        };
        let before = unlisted.len();
        unlisted.remove(&(stream, number));
        let keyed = self.contexts.get(context).is_keyed();
        let mut held = self.count_held(&self.twins_of(keyed, key, context), stream);
        while held < MIN_LISTED
            && let Some(&(_, other)) = unlisted.range((stream, 0)..=(stream, u32::MAX)).next()
        {
            for holder in self.sets.streams(self.records.set(other)) {
                unlisted.remove(&(holder, other));
            }
            self.insert(keyed, self.mixed(key), other);
            held += 1;
        }
        self.unlisted_holders -= before - unlisted.len();
        if !unlisted.is_empty() {
            self.unlisted.insert((key, context), unlisted);
        }
    }

    /// Adds a new record that one stream holds.
    fn add(
        &mut self,
        block: &Block,
        parent: Option<u32>,
        is_twin: bool,
        placement: u16,
        stream: u32,
        last: &mut Move,
    ) -> Option<u32> {
        let &Block {
            hash,
            key,
            local,
            context,
            keyed,
            ..
        } = block;
        let number = self.records.take(parent, 1)?.first;
        let set = self.sets.move_block(EMPTY, placement, stream, last);
        self.contexts.add(context, 1);
        let links =
            parent.is_some_and(|parent| !is_twin && Records::next(parent) == Some(number) && self.may_link(parent, context));
        if links {
            self.records.put_linked(number, local, key, hash, context, set);
        } else {
            self.records.put_head(number, key, hash, context, set);
            self.insert(keyed, block.mixed_key, number);
        }
        if is_twin {
            self.mark_twins(keyed, key, context);
        }
        Some(number)
    }

    /// Whether a block in the slot after its parent may be linked to the parent, if no other record has the block's key.
    #[inline]
    pub fn may_link(&self, parent: u32, context: u32) -> bool {
        self.records.context(parent) == context && !self.records.has_twins(parent)
    }

    /// Writes a new head into an allocated slot.
    #[inline]
    pub fn put_head(&mut self, number: u32, block: &Block, set: u32) {
        self.records.put_head(number, block.key, block.hash, block.context, set);
        self.insert(block.keyed, block.mixed_key, number);
    }

    /// Makes a linked block a head.
    pub fn list(&mut self, number: u32) {
        debug_assert!(self.records.is_linked(number));
        let key = self.records.unlink(number);
        self.insert(false, self.mixed(key), number);
    }

    /// If another block is linked to this block, makes that block a head.
    #[inline]
    pub fn list_next(&mut self, number: u32) {
        if let Some(next) = self.records.linked_next(number) {
            self.list(next);
        }
    }

    /// Marks all records with a key and a context as twins: records that share both.
    #[cold]
    pub fn mark_twins(&mut self, keyed: bool, key: u64, context: u32) {
        let mut found = Vec::new();
        self.for_each_twin(keyed, key, |number| found.push(number));
        for number in found {
            if self.records.context(number) == context {
                self.records.mark_twin(number);
                self.list_next(number);
            }
        }
    }

    /// Visits all records that a table lists under a key.
    pub fn for_each_twin(&self, keyed: bool, key: u64, mut visit: impl FnMut(u32)) {
        self.table(keyed).for_each_match(self.mixed(key), |number| {
            if self.records.word(number) == key {
                visit(number);
            }
            true
        });
    }

    /// Adds a holder to a block; if the block already has the holder, removes it.
    #[inline]
    pub fn toggle(&mut self, number: u32, placement: u16, stream: u32, last: &mut Move) {
        let set = self.sets.move_block(self.records.set(number), placement, stream, last);
        self.records.put_set(number, set);
    }

    /// Removes a block if no stream holds it any more.
    pub fn sweep(&mut self, number: u32) {
        if self.records.set(number) == EMPTY {
            self.forget(number);
        }
    }

    /// Removes a block that no stream holds any more.
    #[inline]
    pub fn forget(&mut self, number: u32) {
        self.forget_row(Row::single(number));
    }

    /// Removes consecutive blocks that no stream holds any more.
    pub fn forget_row(&mut self, row: Row) {
        let Row { first, length } = row;
        if length == 0 {
            return;
        }
        self.list_next(first + length - 1);
        let mut same = (self.records.context(first), 0);
        for number in first..first + length {
            if !self.records.is_linked(number) {
                let context = self.records.context(number);
                if context != same.0 {
                    self.contexts.release_uses(same.0, same.1);
                    same = (context, 0);
                }
                self.unlist(number, context);
            }
            same.1 += 1;
        }
        self.records.remove(row);
        self.contexts.release_uses(same.0, same.1);
    }

    /// Removes a head from the table of heads, or a block that was stored by its key from the table of these blocks.
    fn unlist(&mut self, number: u32, context: u32) {
        let mixed = self.mixed(self.records.word(number));
        let hashes = ByKey(&self.records, self.secret);
        let view = &mut *self.view.change();
        let table = if self.contexts.get(context).is_keyed() {
            &mut view.keyed
        } else {
            &mut view.heads
        };
        table.remove(mixed, number, &hashes);
    }

    /// Returns all records of the block that has the last of these keys. The keys are those of a chain from the first block of a prompt on.
    pub fn ends_of(&self, keys: &[u64]) -> Vec<u32> {
        let mut found = Vec::new();
        let Some(&end) = keys.last() else { return found };
        self.for_each_twin(true, end, |number| found.push(number));
        // The last key that some head has, and the heads with this key. The blocks with the later keys are linked, and follow one of these
        // heads.
        let mut heads = Vec::new();
        for (at, &key) in keys.iter().enumerate().rev() {
            self.for_each_twin(false, key, |number| heads.push((at, number)));
            if !heads.is_empty() {
                break;
            }
        }
        for (at, head) in heads {
            let follow = |number: u32, at: usize| {
                let next = self.records.linked_next(number)?;
                (crate::keys::chained(keys[at - 1], self.records.word(next)) == keys[at]).then_some(next)
            };
            found.extend((at + 1..keys.len()).try_fold(head, follow));
        }
        found
    }

    // --- streams

    /// The ID for the next stream; None if there are too many streams.
    pub fn vacancy(&self) -> Option<u32> {
        let free = self
            .view
            .members
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.view.members.len());
        (free < MAX_STREAMS).then_some(free as u32)
    }

    /// Adds a stream with the ID that `vacancy` returned.
    pub fn join(&mut self, number: u32, member: Member) {
        self.view.change().join(number, member);
    }

    /// Changes the worker of a stream.
    pub fn rename(&mut self, number: u32, worker: Arc<Worker>) {
        self.view.change().rename(number, worker);
    }

    /// Changes the models of streams to those that `model_of` returns for their sources. If `model_of` returns None, the source's streams
    /// keep their models.
    pub fn relabel(&mut self, model_of: impl Fn(&str) -> Option<Option<String>>) {
        self.view.change().relabel(model_of);
    }

    /// Records that a stream uses this scheme.
    pub fn use_scheme(&mut self, number: u32, scheme: Scheme) {
        self.view.change().use_scheme(number, scheme);
    }

    /// Records that a stream has named another placement. Returns false if the ranks of the stream's source would have too many placements
    /// in all: the cost of a change of holders grows with the number of placements, and the ranks of an engine have the same placements.
    pub fn name_placement(&mut self, stream: u32, placement: u16) -> bool {
        let view = &mut *self.view.change();
        let Some(member) = view.members.get_mut(stream as usize).and_then(Option::as_mut) else {
            return true;
        };
        let named = self.source_placements.entry(member.worker.source.clone()).or_default();
        if !named.contains_key(&placement) && named.len() >= self.limits.places {
            return false;
        }
        *named.entry(placement).or_default() += 1;
        member.placements.push(placement);
        true
    }

    /// Removes the placements that a stream has named.
    pub fn leave_placements(&mut self, stream: u32) {
        let view = &mut *self.view.change();
        let Some(member) = view.members.get_mut(stream as usize).and_then(Option::as_mut) else {
            return;
        };
        let Some(named) = self.source_placements.get_mut(&member.worker.source) else {
            return;
        };
        for placement in member.placements.drain(..) {
            if let Some(streams) = named.get_mut(&placement) {
                *streams -= 1;
            }
        }
        named.retain(|_, streams| *streams > 0);
        if named.is_empty() {
            self.source_placements.remove(&member.worker.source);
        }
    }

    /// Removes the schemes of a stream.
    pub fn drop_schemes(&mut self, number: u32) {
        self.view.change().drop_schemes(number);
    }

    /// Sets whether lookups count the blocks of a stream.
    pub fn show(&mut self, stream: u32, is_visible: bool) {
        set_bit(&mut self.view.change().visible, stream, is_visible);
    }

    /// Sets the data for searches of a stream's groups.
    pub fn use_lookup(&mut self, stream: u32, lookup: Option<Arc<GroupLookup>>) {
        let former = self.view.change().use_lookup(stream, lookup);
        drop(former); // readers do not wait here: they only wait for the change above
    }

    /// Marks a block of a stream on a placement as uncertain (it might be gone) or certain.
    #[cold]
    pub fn set_uncertain(&mut self, stream: u32, number: u32, placement: u16, is_uncertain: bool) {
        self.view.change().set_uncertain(stream, (number, placement), is_uncertain);
    }

    /// Marks all blocks of a stream as certain, and no LoRA of the stream as replaced.
    pub fn mark_all_certain(&mut self, stream: u32) {
        let is_certain = |member: &Member| member.uncertain.is_empty() && member.loras.is_empty();
        if !self.view.members[stream as usize].as_ref().is_none_or(is_certain) {
            let uncertain = self.view.change().mark_all_certain(stream);
            drop(uncertain); // readers do not wait here: they only wait for the change above
        }
    }

    /// The replaced LoRAs of a stream.
    pub fn loras(&self, stream: u32) -> Option<&ReplacedLoras> {
        self.view.members[stream as usize].as_ref().map(|member| &member.loras)
    }

    /// Changes the replaced LoRAs of a stream. Returns the number of bytes that the replaced LoRAs take.
    #[cold]
    pub fn change_loras(&mut self, stream: u32, change: impl FnOnce(&mut ReplacedLoras)) -> usize {
        let view = &mut *self.view.change();
        let Some(member) = view.members[stream as usize].as_mut() else {
            return 0;
        };
        change(&mut member.loras);
        let bytes = member.loras.bytes();
        view.update_uncertain(stream);
        bytes
    }

    /// Releases the ID of a stream. The stream must not hold blocks any more.
    pub fn leave(&mut self, stream: u32) {
        self.view.change().leave(stream);
    }
}

/// A writer that has changed this number of sets and contexts publishes the changes before it continues. A publication makes lookups wait
/// for some tens of microseconds.
const CHANGES_AT_ONCE: usize = 1_024;

impl Publish for SharedState {
    #[inline]
    fn publish(&mut self) {
        let changes = self.sets.changes() + self.contexts.changes();
        if self.records.has_moved_chunks() || changes > 0 {
            step_counter::count(changes);
            let view = &mut *self.view.change();
            self.records.move_to(&mut view.chunks);
            self.sets.move_to(&mut view.sets);
            self.contexts.move_to(&mut view.contexts);
        }
        self.records.publish();
    }

    #[inline]
    fn is_due(&self) -> bool {
        self.sets.changes() + self.contexts.changes() > CHANGES_AT_ONCE
    }
}

impl View {
    fn join(&mut self, number: u32, member: Member) {
        let at = number as usize;
        if at == self.members.len() {
            self.members.push(None);
        }
        let names = Arc::make_mut(&mut self.names);
        names.resize(self.members.len(), None);
        names[at] = Some(member.worker.clone());
        let words = self.members.len().div_ceil(64);
        self.visible.resize(words, 0);
        self.hybrid.resize(words, 0);
        self.uncertain.resize(words, 0);
        let model = member.model.clone();
        self.members[at] = Some(member);
        self.label(number, model);
        set_bit(&mut self.visible, number, true);
    }

    fn rename(&mut self, number: u32, worker: Arc<Worker>) {
        let at = number as usize;
        Arc::make_mut(&mut self.names)[at] = Some(worker.clone());
        if let Some(member) = &mut self.members[at] {
            member.worker = worker;
        }
    }

    /// Assigns a stream to a model.
    fn label(&mut self, number: u32, model: Option<String>) {
        let Some(mut member) = self.members[number as usize].take() else {
            return;
        };
        self.unlabel(number, &member);
        let (word, schemes) = (number as usize >> 6, &member.schemes);
        let entry = self.models.entry(model.clone()).or_default();
        entry.streams.resize(entry.streams.len().max(word + 1), 0);
        set_bit(&mut entry.streams, number, true);
        schemes.iter().for_each(|&scheme| entry.count_in(scheme));
        member.model = model;
        self.members[number as usize] = Some(member);
    }

    fn unlabel(&mut self, number: u32, member: &Member) {
        let Some(entry) = self.models.get_mut(&member.model) else {
            return;
        };
        let word = number as usize >> 6;
        if entry.streams.get(word).is_none_or(|bits| bits >> (number & 63) & 1 == 0) {
            return;
        }
        set_bit(&mut entry.streams, number, false);
        member.schemes.iter().for_each(|&scheme| entry.count_out(scheme));
        if entry.streams.iter().all(|&bits| bits == 0) {
            self.models.remove(&member.model);
        }
    }

    fn relabel(&mut self, model_of: impl Fn(&str) -> Option<Option<String>>) {
        for number in 0..self.members.len() {
            if let Some(member) = &self.members[number]
                && let Some(model) = model_of(&member.worker.source)
            {
                self.label(number as u32, model);
            }
        }
    }

    fn use_scheme(&mut self, number: u32, scheme: Scheme) {
        if let Some(member) = self.members[number as usize].as_mut() {
            member.schemes.push(scheme);
            if let Some(model) = self.models.get_mut(&member.model) {
                model.count_in(scheme);
            }
        }
    }

    fn drop_schemes(&mut self, number: u32) {
        if let Some(member) = self.members[number as usize].as_mut() {
            let schemes = std::mem::take(&mut member.schemes);
            if let Some(model) = self.models.get_mut(&member.model) {
                schemes.iter().for_each(|&scheme| model.count_out(scheme));
            }
        }
    }

    fn use_lookup(&mut self, stream: u32, lookup: Option<Arc<GroupLookup>>) -> Option<Arc<GroupLookup>> {
        set_bit(&mut self.hybrid, stream, lookup.is_some());
        let member = self.members[stream as usize].as_mut()?;
        std::mem::replace(&mut member.lookup, lookup)
    }

    fn set_uncertain(&mut self, stream: u32, block: (u32, u16), is_uncertain: bool) {
        let Some(member) = self.members[stream as usize].as_mut() else {
            return;
        };
        if is_uncertain {
            member.uncertain.insert(block);
        } else {
            member.uncertain.remove(&block);
        }
        self.update_uncertain(stream);
    }

    fn update_uncertain(&mut self, stream: u32) {
        let is_uncertain = |member: &Member| !member.uncertain.is_empty() || !member.loras.is_empty();
        let is_uncertain = self.members[stream as usize].as_ref().is_some_and(is_uncertain);
        if is_uncertain != (self.uncertain[stream as usize >> 6] >> (stream & 63) & 1 == 1) {
            self.set_stream_uncertain(stream, is_uncertain);
        }
    }

    fn set_stream_uncertain(&mut self, stream: u32, is_uncertain: bool) {
        set_bit(&mut self.uncertain, stream, is_uncertain);
        self.has_uncertain_copies = is_uncertain || self.uncertain.iter().any(|&bits| bits != 0);
    }

    fn mark_all_certain(&mut self, stream: u32) -> Option<(BTreeSet<(u32, u16)>, ReplacedLoras)> {
        self.set_stream_uncertain(stream, false);
        let take = |member: &mut Member| (std::mem::take(&mut member.uncertain), std::mem::take(&mut member.loras));
        self.members[stream as usize].as_mut().map(take)
    }

    fn leave(&mut self, stream: u32) {
        self.use_lookup(stream, None);
        self.set_stream_uncertain(stream, false);
        set_bit(&mut self.visible, stream, false);
        if let Some(member) = self.members[stream as usize].take() {
            self.unlabel(stream, &member);
        }
        while self.members.last().is_some_and(Option::is_none) {
            self.members.pop();
        }
        let names = Arc::make_mut(&mut self.names);
        names[stream as usize] = None;
        names.truncate(self.members.len());
    }
}

impl Model {
    fn count_in(&mut self, scheme: Scheme) {
        match self.schemes.iter_mut().find(|(known, _)| *known == scheme) {
            Some((_, users)) => *users += 1,
            None => self.schemes.push((scheme, 1)),
        }
    }

    fn count_out(&mut self, scheme: Scheme) {
        if let Some(at) = self.schemes.iter().position(|(known, _)| *known == scheme) {
            self.schemes[at].1 -= 1;
            if self.schemes[at].1 == 0 {
                self.schemes.remove(at);
            }
        }
    }
}

/// Minimum number of records with one key and context that lookups find for each holder. Two records show that the holder has several
/// blocks for the same tokens.
const MIN_LISTED: usize = 2;
/// Approximate number of bytes of an entry in `unlisted`, with its key.
const UNLISTED_BYTES: usize = 96;

/// Approximate number of bytes of a `Member`.
const MEMBER_BYTES: usize = size_of::<Member>() + 64;

/// Sets one bit of a bitmap.
pub fn set_bit(bits: &mut [u64], at: u32, is_set: bool) {
    let (word, bit) = (at as usize >> 6, 1 << (at & 63));
    if is_set {
        bits[word] |= bit;
    } else {
        bits[word] &= !bit;
    }
}
