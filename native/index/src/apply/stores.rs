//! Applies stores. A block is placed after its parent, or waits until its parent is known.

use std::collections::VecDeque;

use super::block_keys::{TokenStore, extras_at, hash_all, salt_of};
use super::prefetching::{Prefetcher, Ring};
use super::{EventHashes, PayloadEvents};
use crate::groups::GroupKind;
use crate::holders::contexts::Context;
use crate::keys::{self, Scheme};
use crate::memory::page_pool;
use crate::memory::table::Stage;
use crate::rules::pending::{Content, Waiting};
use crate::store::records::{Records, Row};
use crate::store::shared_state::SharedState;
use crate::stream::Stream;
use crate::sync::yielding_lock::{WORK_PER_HOLD, Writer};
use crate::wire::scan::Event;

/// Reason for rejecting stores of groups that the index cannot look up.
const UNKNOWN_KIND: &str = "unknown-kind";
/// SGLang's name of host memory. A clear of everything in SGLang empties host memory too (`HiRadixCache.reset`).
pub const HOST_OF_SGLANG: &[u8] = b"CPU_PINNED";
/// Number of blocks of an event that are prefetched before the event's hashes are computed.
const PREFETCHED_BLOCKS: usize = 4;
/// For an event with at most this number of blocks, hashes are computed while the lock is held: locking again would take longer.
const MAX_BLOCKS_UNDER_LOCK: usize = 8;
/// For a block with at most this number of tokens, the hash is computed while the lock is held.
const MAX_TOKENS_UNDER_LOCK: usize = 1_024;

/// Blocks of one event, each the parent of the next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chain<'a> {
    pub(super) hashes: &'a [u64],
    pub(super) keys: &'a [u64],
    /// Local hashes of the blocks; None for blocks that were stored by their keys, since their parents do not matter.
    pub(super) locals: Option<&'a [u64]>,
    pub(super) context: u32,
    pub(super) placement: u16,
}

/// Why no further block of a chain was placed.
enum Stop {
    /// All blocks were placed.
    Done,
    /// The block was placed, and pending blocks wait for it.
    Awaited { next: usize, number: u32 },
    /// Too many blocks already have the hash and the placement of the next block.
    TooManyEqual,
}

/// A row of slots to which a chain's blocks are added.
#[derive(Default)]
struct OpenRow {
    stretch: Row,
    used: u32,
    set: u32,
    /// Position of the first block in the chain.
    first: usize,
}

impl Stream {
    pub(super) fn apply_store(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        read: &PayloadEvents<'_>,
        event: &Event,
        work: &mut EventHashes,
    ) {
        writer.spend(1);
        let event = &*event.without_zero_parent(|| self.newest(writer, 0).is_some());
        let placement = if event.may_be_copy() {
            self.placement(writer, read, event)
        } else {
            None
        };
        if let Some(placement) = placement {
            self.note_copies_there(placement);
        }
        if let Err(reason) = self.store(writer, read, event, placement, work) {
            let kind = read.text(event.spec_kind).unwrap_or("none");
            self.counters.reject(kind, reason);
            self.evidence.named_levels |= 1 << read.location(event).placement().level();
            // Stores of groups of unknown kinds are not counted here, since these groups have an estimate of their own.
            self.evidence.set_aside += u64::from(reason != UNKNOWN_KIND && event.hashes.length > 0);
        }
    }

    fn store(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        read: &PayloadEvents<'_>,
        event: &Event,
        placement: Option<u16>,
        work: &mut EventHashes,
    ) -> Result<(), &'static str> {
        let (kind, group) = (read.bytes(event.spec_kind), event.group.unwrap_or(0));
        let known = GroupKind::from_spec(kind, event.window).unwrap_or(GroupKind::Unknown);
        self.evidence.has_host_clears |= read.bytes(event.medium) == Some(HOST_OF_SGLANG);
        if known == GroupKind::Unknown {
            self.learn(writer, group, known, 0)?;
            self.count_unkept(
                group,
                read.location(event).is_on_device(),
                event.hashes.slice(&read.scratch.hashes),
                true,
            );
            return Err(UNKNOWN_KIND);
        }
        let hashes = event.hashes.slice(&read.scratch.hashes);
        let size = u32::try_from(event.block_size).unwrap_or(0);
        if !known.is_full() || (event.tokens.length == 0 && !event.keyed) {
            if !known.is_full() && size > 0 {
                self.learn(writer, group, known, size)?;
                self.learn_hashing(read, event);
            }
            let placement = placement
                .or_else(|| self.placement(writer, read, event))
                .ok_or("too-many-placements")?;
            for &hash in hashes {
                self.store_without_tokens(writer, hash, placement);
                self.spend(writer, 1);
            }
            return Ok(());
        }
        if event.keyed {
            self.learn_inputs(read, event);
            return self.store_by_keys(writer, read, event, work);
        }
        let store = TokenStore::read(read, event)?;
        // On other tiers, connectors announce chunks, whose sizes and hashes differ from those of the engine's blocks.
        if read.location(event).is_on_device() {
            self.learn(writer, group, known, size)?;
            if kind.is_some() {
                self.learn_hashing(read, event);
            }
            self.learn_page_hashes(&store, event.parent_hash());
            self.evidence.has_extra_keys |= event.has_extra_keys;
            self.evidence.has_loras |= store.lora != 0;
        } else {
            self.learn_inputs(read, event);
        }
        let placement = placement
            .or_else(|| self.placement(writer, read, event))
            .ok_or("too-many-placements")?;
        let salt = salt_of(read, event, &mut work.extras);
        let store = TokenStore {
            salt,
            placement,
            ..store
        };
        self.store_tokens(writer, &store, event.parent_hash(), work)?;
        store.check_whole(event)
    }

    /// Applies a store with keys, which identify its namespace and all blocks before it.
    fn store_by_keys(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        read: &PayloadEvents<'_>,
        event: &Event,
        work: &mut EventHashes,
    ) -> Result<(), &'static str> {
        let size = event.size_of_keyed().ok_or("length-mismatch")?;
        let kind = GroupKind::from_spec(read.bytes(event.spec_kind), None).unwrap_or(GroupKind::Full(0));
        if read.location(event).is_on_device() {
            self.learn(writer, event.group.unwrap_or(0), kind, size)?;
        }
        let placement = self.placement(writer, read, event).ok_or("too-many-placements")?;
        if event.hashes.length == 0 {
            return Ok(());
        }
        if !self.admit_context(writer, &Context::keyed(size), placement) {
            return Err("too-many-block-sizes");
        }
        self.prepare_placement(writer, event.hashes.length as usize, || {});
        let context = writer.contexts.retain(Context::keyed(size)).ok_or("too-many-contexts")?;
        let chain = Chain {
            hashes: event.hashes.slice(&read.scratch.hashes),
            keys: event.keys.slice(&read.scratch.hashes),
            locals: None,
            context,
            placement,
        };
        let placed = self.place_all(writer, &chain, &mut work.ring, None);
        writer.contexts.release(context);
        placed.map(|_| ())
    }

    fn store_tokens(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        store: &TokenStore<'_>,
        parent: Option<u64>,
        work: &mut EventHashes,
    ) -> Result<(), &'static str> {
        if !self.is_on_device(store.placement) {
            return self.store_below_device(writer, store, parent, work);
        }
        // The table positions of the hashes are found before the keys are computed.
        for &hash in store.hashes.iter().take(PREFETCHED_BLOCKS) {
            self.prefetch(writer.mixed(hash), Stage::Bucket);
        }
        for at in 0..store.hashes.len() {
            let awaited = if at == 0 { parent } else { Some(store.hashes[at - 1]) };
            let Some(awaited) = awaited else {
                return self.place_after(writer, store, at, None, work).map(|_| ());
            };
            if let Some(found) = self.newest(writer, awaited) {
                return self.place_after(writer, store, at, Some(found), work).map(|_| ());
            }
            self.add_waiting(writer, store, at, awaited, work);
        }
        Ok(())
    }

    /// Applies a store on a tier below the device. If the stream holds a block with the hash, the stored block gets the key of that block:
    /// vLLM announces offloaded blocks without their extra keys (0.32, `kv_connector/v1/offloading/events.py`).
    fn store_below_device(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        store: &TokenStore<'_>,
        parent: Option<u64>,
        work: &mut EventHashes,
    ) -> Result<(), &'static str> {
        let (mut awaited, mut above) = (parent, None);
        for (at, &hash) in store.hashes.iter().enumerate() {
            above = above.or_else(|| awaited.and_then(|hash| self.newest(writer, hash)));
            if let Some(number) = self.known_block(writer, hash, store.scheme) {
                self.copy(writer, hash, number, store.placement);
                self.spend(writer, 1);
                above = Some(number);
            } else if above.is_some() || awaited.is_none() {
                if above.is_none() && store.is_unkeyed {
                    self.evidence.note_unkeyed_root(self.level(store.placement), store.lora == 0);
                }
                let block = TokenStore {
                    salt: if at == 0 { store.salt } else { store.own_salt },
                    ..store.up_to(at + 1)
                };
                let context_of = |above| writer.contexts.get(writer.records.context(above));
                if above.is_some_and(|above| context_of(above).scheme.size != store.scheme.size) {
                    // No prompt is divided into blocks of two sizes: LMCache stores the end of a prompt as a smaller chunk.
                    self.counters.reject("none", "other-block-size");
                }
                above = self.place_after(writer, &block, at, above, work)?;
                if above.is_none() {
                    return Ok(()); // it was refused at the memory limit
                }
            } else {
                self.add_waiting(writer, store, at, awaited.unwrap_or(0), work);
            }
            awaited = Some(hash);
        }
        Ok(())
    }

    /// The newest block with this hash; None if a scheme other than `scheme` has divided its prompt into blocks.
    fn known_block(&self, shared: &SharedState, hash: u64, scheme: Scheme) -> Option<u32> {
        let number = self.newest(shared, hash)?;
        let context = shared.contexts.get(shared.records.context(number));
        (!context.is_keyed() && context.scheme == scheme).then_some(number)
    }

    /// Adds a block to the pending blocks that wait for `awaited`.
    fn add_waiting(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        store: &TokenStore<'_>,
        at: usize,
        awaited: u64,
        work: &mut EventHashes,
    ) {
        let content = Content {
            tokens: store.window(at, &mut work.window).into(),
            extras: extras_at(&work.extras, at).collect(),
            scheme: store.scheme,
            lora: store.lora,
            salt: store.salt,
        };
        let orphan = Waiting {
            hash: store.hashes[at],
            placement: store.placement,
            awaited,
            content: Some(content),
        };
        self.add_orphan(writer, orphan);
        writer.spend(2);
    }

    fn store_without_tokens(&mut self, shared: &mut SharedState, hash: u64, placement: u16) {
        match self.newest(shared, hash) {
            Some(number) => self.copy_without_tokens(shared, hash, number, placement),
            None => {
                let untied = Waiting {
                    hash,
                    placement,
                    awaited: hash,
                    content: None,
                };
                self.add_orphan(shared, untied);
            }
        }
    }

    /// Adds a block to the pending blocks that wait for its parent.
    fn add_orphan(&mut self, shared: &mut SharedState, waiting: Waiting) {
        if !self.may_grow(shared) {
            self.counters.dropped += 1;
            self.evidence.note_dropped();
            return;
        }
        let is_same = |placement| placement == waiting.placement;
        if !self.counts_copies(waiting.placement) && self.waiting.is_last(&waiting, is_same) {
            return;
        }
        let limits = shared.limits;
        let bytes = limits.memory.map_or(usize::MAX, |memory| memory / 8);
        let dropped = self
            .waiting
            .push_within(waiting, limits.orphans, limits.orphan_bytes.min(bytes));
        self.counters.dropped += dropped;
        if dropped > 0 {
            self.evidence.note_dropped();
        }
    }

    /// Places the blocks of an event from the index `first` on after `parent`. Each block is the parent of the next. Returns the record of
    /// the last block; None if the memory limit refuses that block.
    fn place_after(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        store: &TokenStore<'_>,
        first: usize,
        parent: Option<u32>,
        work: &mut EventHashes,
    ) -> Result<Option<u32>, &'static str> {
        let salt_of = |parent| writer.contexts.get(writer.records.context(parent)).salt;
        let salt = store.salt.unwrap_or_else(|| parent.map_or(0, salt_of));
        let before = parent.map(|parent| writer.records.key(parent));
        let context = Context {
            scheme: store.scheme,
            lora: store.lora,
            salt,
        };
        if !self.admit_scheme(writer, store.scheme, store.placement) {
            return Err("too-many-block-sizes");
        }
        let number = writer.contexts.retain(context).ok_or("too-many-contexts")?;
        let count = store.hashes.len() - first;
        self.prepare_placement(writer, count, || hash_all(store, first, before, context.seed(), work));
        let chain = Chain {
            hashes: &store.hashes[first..],
            keys: &work.keys,
            locals: Some(&work.locals),
            context: number,
            placement: store.placement,
        };
        let placed = self.place_all(writer, &chain, &mut work.ring, parent);
        writer.contexts.release(number);
        placed
    }

    /// Prepares the placement of blocks. If there are many blocks, the lock is released during the preparation. Other threads can then read
    /// and write, but they change no block of this stream.
    fn prepare_placement(&mut self, writer: &mut Writer<'_, SharedState>, count: usize, work: impl FnOnce()) {
        if count > MAX_BLOCKS_UNDER_LOCK || page_pool::must_prepare() {
            writer.unlocked(|| {
                page_pool::prepare();
                work();
            });
        } else {
            work();
        }
    }

    /// Places consecutive blocks after a record. Returns the record of the last block; None if the memory limit refuses that block.
    fn place_all(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        chain: &Chain<'_>,
        ring: &mut Ring,
        mut parent: Option<u32>,
    ) -> Result<Option<u32>, &'static str> {
        let count = chain.hashes.len();
        let keys = if chain.locals.is_some() {
            writer.view.heads.cache_level()
        } else {
            writer.view.keyed.cache_level()
        };
        let mut blocks = Prefetcher {
            chain,
            ring,
            cache_level: self.cache_level().max(keys),
        };
        blocks.start(self, writer);
        let mut at = 0;
        while at < count {
            let end = count.min(at + WORK_PER_HOLD);
            if !self.may_grow(writer) {
                self.refuse_new(writer, chain, at, parent);
                return Ok(None);
            }
            match self.place_some(writer, &mut blocks, at, end, &mut parent) {
                Stop::Done => {
                    self.spend(writer, end - at);
                    at = end;
                }
                Stop::Awaited { next, number } => {
                    self.spend(writer, next - at);
                    self.place_orphans(writer, chain.hashes[next - 1], number);
                    at = next;
                }
                Stop::TooManyEqual => return Err("too-many-alike"),
            }
        }
        Ok(parent)
    }

    fn place_some(
        &mut self,
        shared: &mut SharedState,
        blocks: &mut Prefetcher<'_>,
        start: usize,
        end: usize,
        parent: &mut Option<u32>,
    ) -> Stop {
        let (chain, mut open) = (blocks.chain, OpenRow::default());
        // Whether the preceding block is new. No block is linked to a new block, so `place` can find the next block only as a head.
        let mut is_new = false;
        for at in start..end {
            let block = blocks.next(self, shared, at);
            let is_awaited = !self.waiting.is_empty() && self.waiting.awaits(block.hash);
            let may_be_new = |&before: &u32| is_new || shared.records.linked_next(before).is_none();
            if let Some(before) = parent
                .filter(|_| !is_awaited && !self.has_replaced_loras())
                .filter(may_be_new)
            {
                let position = self.position_of(block.mixed_hash);
                if !self.knows(shared, block.hash, position) && !shared.is_listed(&block) {
                    if open.used == open.stretch.length {
                        self.close_row(shared, chain, &mut open);
                        if !self.open_row(shared, chain, &mut open, before, at, end - at) {
                            return Stop::TooManyEqual;
                        }
                    }
                    let number = open.stretch.first + open.used;
                    if Records::next(before) == Some(number) && (open.used > 0 || shared.may_link(before, block.context)) {
                        shared
                            .records
                            .put_linked(number, block.local, block.key, block.hash, block.context, open.set);
                    } else {
                        shared.put_head(number, &block, open.set);
                    }
                    self.enter_own(shared, block.mixed_hash, position, number);
                    open.used += 1;
                    (*parent, is_new) = (Some(number), true);
                    continue;
                }
            }
            self.close_row(shared, chain, &mut open);
            let Some(placed) = self.place(shared, &block, chain.placement, *parent) else {
                return Stop::TooManyEqual;
            };
            if (placed.has_twin || self.has_replaced_loras()) && !self.note_lora(shared, &placed, chain.placement, *parent) {
                return Stop::TooManyEqual;
            }
            if chain.locals.is_some() {
                (*parent, is_new) = (Some(placed.number), placed.is_new);
            }
            if is_awaited && placed.is_unknown {
                let number = placed.number;
                return Stop::Awaited { next: at + 1, number };
            }
        }
        self.close_row(shared, chain, &mut open);
        Stop::Done
    }

    /// Allocates slots for new blocks. Returns false if all IDs of slots are used.
    fn open_row(
        &mut self,
        shared: &mut SharedState,
        chain: &Chain<'_>,
        open: &mut OpenRow,
        parent: u32,
        first: usize,
        count: usize,
    ) -> bool {
        let Some(stretch) = shared.records.take(Some(parent), count) else {
            return false;
        };
        let set = shared
            .sets
            .single(chain.placement, self.number, stretch.length, &mut self.added);
        *open = OpenRow {
            stretch,
            used: 0,
            set,
            first,
        };
        true
    }

    /// Counts the blocks that were written into slots, and releases the unused slots.
    fn close_row(&mut self, shared: &mut SharedState, chain: &Chain<'_>, open: &mut OpenRow) {
        let OpenRow {
            stretch,
            used,
            set,
            first,
        } = std::mem::take(open);
        if stretch.length == 0 {
            return;
        }
        let left = stretch.length - used;
        if left > 0 {
            shared.records.give(stretch.first + used, left);
            shared.sets.uncount(set, left);
        }
        if used > 0 {
            shared.contexts.add(chain.context, used);
            let new = first..first + used as usize;
            self.count_new(&chain.hashes[new.clone()], &chain.keys[new], chain.placement);
        }
    }

    /// Adds copies of the leading blocks that the stream already holds. Refuses all blocks from the first one that the stream does not
    /// hold, since the memory limit is reached.
    fn refuse_new(&mut self, writer: &mut Writer<'_, SharedState>, chain: &Chain<'_>, first: usize, mut parent: Option<u32>) {
        for at in first..chain.hashes.len() {
            let block = chain.block(writer, at);
            let Some(number) = self.find(writer, &block, parent) else {
                self.counters.evicted += (chain.hashes.len() - at) as u64;
                self.evidence.note_refused();
                return;
            };
            self.copy(writer, block.hash, number, chain.placement);
            parent = chain.locals.map(|_| number);
            self.spend(writer, 1);
        }
    }

    /// Places the pending blocks that wait for this block. Then places the pending blocks that wait for the placed blocks, and so on.
    fn place_orphans(&mut self, writer: &mut Writer<'_, SharedState>, hash: u64, number: u32) {
        let mut queue = VecDeque::from([(hash, number)]);
        while let Some((hash, above)) = queue.pop_front() {
            while let Some(item) = self.take_awaiting(hash) {
                let (hash, placement) = (item.hash, item.placement);
                let Some(content) = item.content else {
                    self.copy(writer, hash, above, placement);
                    self.spend(writer, 1);
                    continue;
                };
                match self.place_orphan(writer, hash, placement, content, above) {
                    Ok(Some(number)) => queue.push_back((hash, number)),
                    Ok(None) => {}
                    Err(reason) => self.set_aside(reason),
                }
                self.spend(writer, 2);
            }
        }
    }

    /// Places an orphan after its parent. Returns the record of the orphan if the stream held no block with its hash.
    fn place_orphan(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        hash: u64,
        placement: u16,
        mut content: Content,
        parent: u32,
    ) -> Result<Option<u32>, &'static str> {
        if !self.may_grow(writer) {
            self.counters.evicted += 1;
            self.evidence.note_refused();
            return Ok(None);
        }
        let salt_of = |parent| writer.contexts.get(writer.records.context(parent)).salt;
        let context = Context {
            scheme: content.scheme,
            lora: content.lora,
            salt: content.salt.unwrap_or_else(|| salt_of(parent)),
        };
        if !self.admit_scheme(writer, content.scheme, placement) {
            return Err("too-many-block-sizes");
        }
        let mut hashed = || keys::local_with(&content.tokens, &mut content.extras, context.seed());
        let local = if content.tokens.len() > MAX_TOKENS_UNDER_LOCK {
            writer.unlocked(hashed)
        } else {
            hashed()
        };
        let number = writer.contexts.retain(context).ok_or("too-many-contexts")?;
        let chain = Chain {
            hashes: &[hash],
            keys: &[keys::chained(writer.records.key(parent), local)],
            locals: Some(&[local]),
            context: number,
            placement,
        };
        let block = chain.block(writer, 0);
        let placed = self.place(writer, &block, placement, Some(parent));
        writer.contexts.release(number);
        let placed = placed.ok_or("too-many-alike")?;
        if (placed.has_twin || self.has_replaced_loras()) && !self.note_lora(writer, &placed, placement, Some(parent)) {
            return Err("too-many-alike");
        }
        Ok(placed.is_unknown.then_some(placed.number))
    }
}
