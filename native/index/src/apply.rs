//! Applies events to the blocks of a stream.

mod prefetching;

use std::collections::VecDeque;
use std::sync::LazyLock;

use crate::contexts::Context;
use crate::copies::Origin;
use crate::engine_hash::Sample;
use crate::groups::GroupKind;
use crate::keys::{self, Scheme};
use crate::page_pool;
use crate::pending::{Content, Waiting};
use crate::placements::{Placement, TIERS, tier};
use crate::records::{Records, Row};
use crate::scan::{Event, Extra, Id, Kind, Limits, Schema, Scratch, Span, extra_keys, first_ints, scan};
use crate::shared::SharedState;
use crate::step_counter;
use crate::stream::{Leaving, Place, Stream};
use crate::table::Stage;
use crate::yielding_lock::{WORK_PER_HOLD, Writer};

use prefetching::{Ahead, Ring};

/// Number of blocks of an event that are prefetched before the event is hashed.
const FIRST: usize = 4;
/// Blocks up to which an event is hashed while the lock is held, since taking it twice would cost more.
const FEW_BLOCKS: usize = 8;
/// Tokens of one block up to which an event is hashed while the lock is held.
const FEW_TOKENS: usize = 1_024;

/// A payload with its scanned events.
pub struct Read<'a> {
    /// Its bytes.
    pub payload: &'a [u8],
    /// Its events.
    pub scratch: &'a Scratch,
}

impl Read<'_> {
    fn text(&self, span: Option<Span>) -> Option<&str> {
        span.map(|span| std::str::from_utf8(span.bytes(self.payload)).unwrap_or(""))
    }

    /// The bytes of a span.
    pub fn bytes(&self, span: Option<Span>) -> Option<&[u8]> {
        span.map(|span| span.bytes(self.payload))
    }
}

/// Hashes of one event; the buffers are reused for the next event.
#[derive(Debug, Default)]
pub struct Work {
    locals: Vec<u64>,
    keys: Vec<u64>,
    extras: Vec<(usize, u64)>,
    window: Vec<u32>,
    ring: Ring,
    leaving: Vec<Leaving>,
}

/// Number of blocks for which memory is kept from one event to the next.
const BLOCKS_KEPT: usize = 1 << 14;

impl Work {
    /// Releases memory that only a very large event needs.
    pub fn shrink(&mut self) {
        if self.keys.capacity().max(self.extras.capacity()) > BLOCKS_KEPT {
            *self = Self::default();
        }
    }
}

/// A store with tokens.
struct Dense<'a> {
    hashes: &'a [u64],
    tokens: &'a [u32],
    pairs: bool,
    scheme: Scheme,
    lora: u64,
    /// The event's own salt.
    salt: Option<u64>,
    placement: u16,
}

impl<'a> Dense<'a> {
    /// Reads the contents of an event, without its salt and placement.
    fn read(read: &Read<'a>, event: &Event) -> Result<Self, &'static str> {
        let hashes = event.hashes.slice(&read.scratch.hashes);
        let tokens = event.tokens.slice(&read.scratch.tokens);
        let (size, count) = (event.block_size, (tokens.len() >> u32::from(event.pairs)) as u64);
        if size == 0 || size > u64::from(u32::MAX) || Some(count) != size.checked_mul(hashes.len() as u64) {
            return Err("length-mismatch");
        }
        if event.unkeyable {
            return Err("bad-token");
        }
        let lora = match (read.bytes(event.lora_name), event.lora_id) {
            (Some(name), _) => keys::lora_name(name),
            (None, Some(id)) => keys::lora_id(id),
            (None, None) => 0,
        };
        let scheme = Scheme {
            size: size as u32,
            eagle: event.pairs,
        };
        Ok(Self {
            hashes,
            tokens,
            pairs: event.pairs,
            scheme,
            lora,
            salt: None,
            placement: 0,
        })
    }

    /// Tokens that the hash of block `at` covers.
    fn window<'b>(&'b self, at: usize, buffer: &'b mut Vec<u32>) -> &'b [u32] {
        let size = self.scheme.size as usize;
        if !self.pairs {
            return &self.tokens[at * size..][..size];
        }
        let pairs = &self.tokens[at * size * 2..][..size * 2];
        buffer.clear();
        buffer.extend(pairs.iter().step_by(2));
        buffer.push(pairs[pairs.len() - 1]);
        buffer
    }
}

/// Blocks of one event, each the parent of the next.
#[derive(Clone, Copy, Debug)]
struct Chain<'a> {
    hashes: &'a [u64],
    keys: &'a [u64],
    /// None for blocks that were stored by their keys: those have no parents.
    locals: Option<&'a [u64]>,
    context: u32,
    placement: u16,
}

/// Why some blocks were placed, and not all of them.
enum Pause {
    /// All blocks were placed.
    Done,
    /// This block was placed, and pending blocks wait for it.
    Awaited { next: usize, number: u32 },
    /// Too many blocks are equal to the next one in hash and placement.
    Alike,
}

/// A row of slots that is being filled.
#[derive(Default)]
struct Open {
    stretch: Row,
    used: u32,
    set: u32,
    /// Position of the first block in its chain.
    first: usize,
}

impl Stream {
    /// Applies one event. Returns whether it cleared the whole stream.
    pub fn event(&mut self, writer: &mut Writer<'_, SharedState>, read: &Read<'_>, event: &Event, work: &mut Work) -> bool {
        match event.kind {
            Kind::Stored => self.stored(writer, read, event, work),
            Kind::Removed => self.was_removed(writer, read, event, work),
            Kind::Cleared => return self.was_cleared(writer, read, event),
            Kind::Inactive => self.counters.neutral += 1,
        }
        if self.group_cache.is_some() {
            self.note_changed_copies(read, event);
        }
        false
    }

    // --- stores

    fn stored(&mut self, writer: &mut Writer<'_, SharedState>, read: &Read<'_>, event: &Event, work: &mut Work) {
        writer.spend(1);
        let kind = read.text(event.spec_kind).unwrap_or("none");
        if let Err(reason) = self.store(writer, read, event, work) {
            self.counters.reject(kind, reason);
        }
    }

    fn store(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        read: &Read<'_>,
        event: &Event,
        work: &mut Work,
    ) -> Result<(), &'static str> {
        let (kind, group) = (read.text(event.spec_kind), event.group.unwrap_or(0));
        let known = GroupKind::from_spec(kind, event.window).unwrap_or(GroupKind::Unknown);
        if known == GroupKind::Unknown {
            self.learn(writer, group, known, 0)?;
            self.count_unkept(
                group,
                is_on_device(read, event),
                event.hashes.slice(&read.scratch.hashes),
                true,
            );
            return Err("unknown-kind");
        }
        self.origin = event.origin;
        let hashes = event.hashes.slice(&read.scratch.hashes);
        let size = u32::try_from(event.block_size).unwrap_or(0);
        if !known.is_full() || (event.tokens.length == 0 && !event.keyed) {
            if !known.is_full() && size > 0 {
                self.learn(writer, group, known, size)?;
                self.learn_hashing(read, event);
            }
            let placement = self.placement(writer, read, event).ok_or("too-many-placements")?;
            for &hash in hashes {
                self.without_tokens(writer, hash, placement);
                self.spend(writer, 1);
            }
            return Ok(());
        }
        if event.keyed {
            return self.keyed(writer, read, event, work);
        }
        let store = Dense::read(read, event)?;
        self.learn(writer, group, known, size)?;
        if kind.is_some() {
            self.learn_hashing(read, event);
        }
        let placement = self.placement(writer, read, event).ok_or("too-many-placements")?;
        let salt = salt_of(read, event, &mut work.extras);
        self.dense(
            writer,
            &Dense {
                salt,
                placement,
                ..store
            },
            event.parent,
            work,
        )
    }

    /// Applies a store with keys, which identify its namespace and all blocks before it.
    fn keyed(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        read: &Read<'_>,
        event: &Event,
        work: &mut Work,
    ) -> Result<(), &'static str> {
        let size = event.size_of_keyed().ok_or("length-mismatch")?;
        let kind = GroupKind::from_spec(read.text(event.spec_kind), None).unwrap_or(GroupKind::Full(0));
        self.learn(writer, event.group.unwrap_or(0), kind, size)?;
        let placement = self.placement(writer, read, event).ok_or("too-many-placements")?;
        if event.hashes.length == 0 {
            return Ok(());
        }
        if !self.cut_by(writer, Scheme { size, eagle: false }) {
            return Err("too-many-block-sizes");
        }
        self.prepare(writer, event.hashes.length as usize, || {});
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
        placed
    }

    fn dense(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        store: &Dense<'_>,
        parent: Option<u64>,
        work: &mut Work,
    ) -> Result<(), &'static str> {
        // Where their hashes belong is known before their keys are.
        for &hash in store.hashes.iter().take(FIRST) {
            self.prefetch(writer.spot(hash), Stage::Bucket);
        }
        for at in 0..store.hashes.len() {
            let awaited = if at == 0 { parent } else { Some(store.hashes[at - 1]) };
            let Some(awaited) = awaited else {
                return self.run(writer, store, at, None, work);
            };
            if let Some(found) = self.newest(writer, awaited) {
                return self.run(writer, store, at, Some(found), work);
            }
            let content = Content {
                tokens: store.window(at, &mut work.window).into(),
                extras: extras_at(&work.extras, at).collect(),
                scheme: store.scheme,
                lora: store.lora,
                salt: store.salt,
            };
            if self.origin == Origin::Reused && self.waiting.has(store.hashes[at], store.placement) {
                continue;
            }
            let orphan = Waiting {
                hash: store.hashes[at],
                placement: store.placement,
                awaited,
                content: Some(content),
            };
            self.wait(writer, orphan);
            writer.spend(2);
        }
        Ok(())
    }

    /// Adds a block to the pending blocks of its parent.
    fn wait(&mut self, shared: &mut SharedState, waiting: Waiting) {
        if !self.may_grow(shared) {
            self.counters.dropped += 1;
            return;
        }
        let limits = shared.limits;
        let bytes = limits.memory.map_or(usize::MAX, |memory| memory / 8);
        self.counters.dropped += self
            .waiting
            .push_within(waiting, limits.orphans, limits.orphan_bytes.min(bytes));
    }

    /// Applies the blocks of an event from `first` on after `parent`. Each is the parent of the next.
    fn run(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        store: &Dense<'_>,
        first: usize,
        parent: Option<u32>,
        work: &mut Work,
    ) -> Result<(), &'static str> {
        let salt_of = |parent| writer.contexts.get(writer.records.context(parent)).salt;
        let salt = store.salt.unwrap_or_else(|| parent.map_or(0, salt_of));
        let before = parent.map(|parent| writer.records.key(parent));
        let context = Context {
            scheme: store.scheme,
            lora: store.lora,
            salt,
        };
        if !self.cut_by(writer, store.scheme) {
            return Err("too-many-block-sizes");
        }
        let number = writer.contexts.retain(context).ok_or("too-many-contexts")?;
        let count = store.hashes.len() - first;
        self.prepare(writer, count, || hash_all(store, first, before, context.seed(), work));
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

    /// Prepares blocks for their placement, in part while other threads may read and write. No other thread changes the blocks of this
    /// stream meanwhile.
    fn prepare(&mut self, writer: &mut Writer<'_, SharedState>, count: usize, work: impl FnOnce()) {
        if count > FEW_BLOCKS || page_pool::are_short() {
            writer.unlocked(|| {
                page_pool::prepare();
                work();
            });
        } else {
            work();
        }
    }

    /// Places blocks after a record.
    fn place_all(
        &mut self,
        writer: &mut Writer<'_, SharedState>,
        chain: &Chain<'_>,
        ring: &mut Ring,
        mut parent: Option<u32>,
    ) -> Result<(), &'static str> {
        let count = chain.hashes.len();
        let keys = if chain.locals.is_some() {
            writer.view.heads.reach()
        } else {
            writer.view.keyed.reach()
        };
        let mut blocks = Ahead {
            chain,
            ring,
            reach: self.reach().max(keys),
        };
        blocks.start(self, writer);
        let mut at = 0;
        while at < count {
            let end = count.min(at + WORK_PER_HOLD);
            if !self.may_grow(writer) {
                self.refuse(writer, chain, at, parent);
                return Ok(());
            }
            match self.place_some(writer, &mut blocks, at, end, &mut parent) {
                Pause::Done => {
                    self.spend(writer, end - at);
                    at = end;
                }
                Pause::Awaited { next, number } => {
                    self.spend(writer, next - at);
                    self.link(writer, chain.hashes[next - 1], number);
                    at = next;
                }
                Pause::Alike => return Err("too-many-alike"),
            }
        }
        Ok(())
    }

    fn place_some(
        &mut self,
        shared: &mut SharedState,
        blocks: &mut Ahead<'_>,
        start: usize,
        end: usize,
        parent: &mut Option<u32>,
    ) -> Pause {
        let (chain, mut open) = (blocks.chain, Open::default());
        // Whether the block before is new, so that no stream holds one after it, except across a hole.
        let mut is_new = false;
        for at in start..end {
            let block = blocks.next(self, shared, at);
            let is_awaited = !self.waiting.is_empty() && self.waiting.awaits(block.hash);
            if let Some(before) = parent.filter(|_| is_new && !is_awaited) {
                let seat = self.seat(block.hash_spot);
                if !self.knows(shared, block.hash, seat) && !shared.is_listed(&block) {
                    if open.used == open.stretch.length {
                        self.close(shared, chain, &mut open);
                        if !self.open(shared, chain, &mut open, before, at, end - at) {
                            return Pause::Alike;
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
                    self.enter_own(shared, block.hash_spot, seat, number);
                    open.used += 1;
                    *parent = Some(number);
                    continue;
                }
            }
            self.close(shared, chain, &mut open);
            let Some(placed) = self.place(shared, &block, chain.placement, *parent) else {
                return Pause::Alike;
            };
            if chain.locals.is_some() {
                (*parent, is_new) = (Some(placed.number), placed.is_new);
            }
            if is_awaited && placed.is_unknown {
                let number = placed.number;
                return Pause::Awaited { next: at + 1, number };
            }
        }
        self.close(shared, chain, &mut open);
        Pause::Done
    }

    /// Takes slots for new blocks. Returns false if all slot numbers are used.
    fn open(
        &mut self,
        shared: &mut SharedState,
        chain: &Chain<'_>,
        open: &mut Open,
        parent: u32,
        first: usize,
        count: usize,
    ) -> bool {
        let Some(stretch) = shared.records.take(Some(parent), count) else {
            return false;
        };
        let set = shared.sets.single(chain.placement, self.number, stretch.length);
        *open = Open {
            stretch,
            used: 0,
            set,
            first,
        };
        true
    }

    /// Counts the blocks that were put into slots, and releases the other slots.
    fn close(&mut self, shared: &mut SharedState, chain: &Chain<'_>, open: &mut Open) {
        let Open {
            stretch,
            used,
            set,
            first,
        } = std::mem::take(open);
        let left = stretch.length - used;
        if left > 0 {
            shared.records.give(stretch.first + used, left);
            shared.sets.give(set, left);
        }
        if used > 0 {
            shared.contexts.add(chain.context, used);
            let new = first..first + used as usize;
            self.count_new(&chain.hashes[new.clone()], &chain.keys[new], chain.placement);
        }
    }

    /// Adds copies of blocks that the stream holds. The others, and all blocks after them, are refused at the memory limit.
    fn refuse(&mut self, writer: &mut Writer<'_, SharedState>, chain: &Chain<'_>, first: usize, mut parent: Option<u32>) {
        for at in first..chain.hashes.len() {
            let block = chain.block(writer, at);
            let Some(number) = self.find(writer, &block, parent) else {
                self.counters.evicted += (chain.hashes.len() - at) as u64;
                return;
            };
            self.copy(writer, block.hash, number, chain.placement);
            parent = chain.locals.map(|_| number);
            self.spend(writer, 1);
        }
    }

    /// Places the pending blocks whose parent is this block, then those whose parents they are, and so on.
    fn link(&mut self, writer: &mut Writer<'_, SharedState>, hash: u64, number: u32) {
        // What waited came in other events, of which that is not known any more.
        let origin = std::mem::take(&mut self.origin);
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
                    Err(reason) => self.counters.reject("none", reason),
                }
                self.spend(writer, 2);
            }
        }
        self.origin = origin;
    }

    /// Places an orphan after its parent. Returns its record if its hash was unknown.
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
            return Ok(None);
        }
        let salt_of = |parent| writer.contexts.get(writer.records.context(parent)).salt;
        let context = Context {
            scheme: content.scheme,
            lora: content.lora,
            salt: content.salt.unwrap_or_else(|| salt_of(parent)),
        };
        if !self.cut_by(writer, content.scheme) {
            return Err("too-many-block-sizes");
        }
        let mut hashed = || keys::local_with(&content.tokens, &mut content.extras, context.seed());
        let local = if content.tokens.len() > FEW_TOKENS {
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
        Ok(placed.is_unknown.then_some(placed.number))
    }

    fn without_tokens(&mut self, shared: &mut SharedState, hash: u64, placement: u16) {
        match self.newest(shared, hash) {
            Some(number) => self.copy_without_tokens(shared, hash, number, placement),
            None if self.origin == Origin::Reused => {}
            None => {
                let untied = Waiting {
                    hash,
                    placement,
                    awaited: hash,
                    content: None,
                };
                self.wait(shared, untied);
            }
        }
    }

    // --- groups

    /// Learns a group of the engine.
    #[inline]
    fn learn(&mut self, shared: &SharedState, group: i64, kind: GroupKind, size: u32) -> Result<(), &'static str> {
        if self.groups.kind(group).is_none() && self.groups.all().len() >= shared.limits.groups {
            return Err("too-many-groups");
        }
        self.has_new_groups |= self.groups.learn(group, kind, size);
        Ok(())
    }

    /// Learns from the first blocks of a prompt how the engine hashes prompts, and which salts they have.
    #[inline]
    fn learn_hashing(&mut self, read: &Read<'_>, event: &Event) {
        if event.lookahead.is_some() && !self.groups.has_lookahead {
            (self.groups.has_lookahead, self.has_new_groups) = (true, true);
        }
        if !self.groups.has_unknown_inputs && has_unknown_inputs(read, event) {
            (self.groups.has_unknown_inputs, self.has_new_groups) = (true, true);
        }
        let is_plain = event.lora_name.is_none() && event.lora_id.is_none() && !event.pairs && !event.unkeyable;
        let is_wanted =
            event.extra_keys.is_some() || (self.groups.hashing.is_none() && self.sample.is_none() && self.samples_left > 0);
        if is_wanted && is_plain && event.parent.is_none() {
            self.learn_from_root(read, event);
        }
    }

    #[cold]
    fn learn_from_root(&mut self, read: &Read<'_>, event: &Event) {
        let (mut salt, mut is_plain) = (None, true);
        if let Some(raw) = read.bytes(event.extra_keys) {
            extra_keys(raw, |block, extra| match extra {
                Extra::Text(text) if block == 0 && salt.is_none() => salt = Some(text),
                _ => is_plain &= block > 0,
            });
        }
        let (hashes, tokens) = (
            event.hashes.slice(&read.scratch.hashes),
            event.tokens.slice(&read.scratch.tokens),
        );
        let size = usize::try_from(event.block_size).unwrap_or(usize::MAX);
        let is_whole = size.checked_mul(hashes.len()) == Some(tokens.len());
        let mut lookahead = Vec::new();
        if let Some(raw) = read.bytes(event.lookahead) {
            first_ints(raw, &mut lookahead);
        }
        let is_known = is_plain && is_whole && event.lookahead.is_some() != lookahead.is_empty();
        let sample = || Sample::from_block(tokens.get(..size).filter(|_| is_known)?, &lookahead, *hashes.first()?);
        match salt {
            None if self.groups.hashing.is_none() && self.sample.is_none() => {
                self.sample = sample();
                self.has_new_groups |= self.groups.needs_hashing();
            }
            None => {}
            Some(salt) => {
                let may_need = self.group_cache.is_some() || self.groups.all().len() > 1 || self.last < 0;
                let sample = if may_need && self.salted.len() < MAX_SALTED {
                    sample()
                } else {
                    None
                };
                match sample {
                    Some(sample) => self.salted.push((salt.to_owned(), sample)),
                    None => self.misses_salts |= is_whole && is_plain,
                }
            }
        }
    }

    /// Notes which copies a store or a removal has changed.
    fn note_changed_copies(&mut self, read: &Read<'_>, event: &Event) {
        let group = event.group.unwrap_or(0);
        let placement = Placement {
            tier: tier(read.text(event.medium).unwrap_or("")),
            locality: read.text(event.locality).map(str::to_owned),
            ownership: None,
            group,
        };
        let level = placement.level() as u8;
        let hashes = event.hashes.slice(&read.scratch.hashes);
        self.changed_copies.extend(hashes.iter().map(|&hash| (hash, group, level)));
    }

    // --- removals

    fn was_removed(&mut self, writer: &mut Writer<'_, SharedState>, read: &Read<'_>, event: &Event, work: &mut Work) {
        writer.spend(1);
        let hashes = event.hashes.slice(&read.scratch.hashes);
        let group = event.group.unwrap_or(0);
        if self.groups.kind(group) == Some(GroupKind::Unknown) {
            return self.count_unkept(group, is_on_device(read, event), hashes, false);
        }
        let Some(placement) = self.placement(writer, read, event) else {
            self.counters.unknown += hashes.len() as u64;
            return;
        };
        if event.keyed && event.keys.length == event.hashes.length {
            let left = event.keys.slice(&read.scratch.hashes);
            for (&hash, &left) in hashes.iter().zip(left) {
                self.remove_to(writer, hash, placement, u32::try_from(left).unwrap_or(u32::MAX));
                self.spend(writer, 1);
            }
            return;
        }
        for some in hashes.chunks(WORK_PER_HOLD) {
            self.remove(writer, some, placement, &mut work.leaving);
            if self.remove_some_blocks(writer) {
                return self.counters.reject("none", "too-many-alike");
            }
            self.spend(writer, some.len());
        }
    }

    fn was_cleared(&mut self, writer: &mut Writer<'_, SharedState>, read: &Read<'_>, event: &Event) -> bool {
        writer.spend(1);
        step_counter::count(1 + self.held().count());
        let medium = read.text(event.medium).map(tier);
        if medium.is_none() && event.group.is_none() {
            self.forget(writer);
            return true;
        }
        if medium.as_ref().is_none_or(|tier| tier == TIERS[0]) {
            self.clear_unkept(event.group);
        }
        let meant = |placement: &Placement| {
            medium.as_ref().is_none_or(|tier| *tier == placement.tier)
                && event.group.is_none_or(|group| group == placement.group)
        };
        let placements: Vec<u16> = (self.held().map(|(placement, _)| placement))
            .filter(|&placement| meant(writer.view.placements.get(placement)))
            .collect();
        if !self.clear(writer, |placement| placements.contains(&placement)) {
            self.counters.reject("none", "too-many-clears");
        }
        self.changed_copies.clear();
        self.rebuild_group_cache(writer);
        false
    }

    /// Returns the placement that an event names.
    fn placement(&mut self, shared: &mut SharedState, read: &Read<'_>, event: &Event) -> Option<u16> {
        let (medium, locality, ownership) = (
            read.bytes(event.medium),
            read.bytes(event.locality),
            read.bytes(event.ownership),
        );
        let group = event.group.unwrap_or(0);
        let same = |place: &Place| {
            place.group == group
                && place.medium.as_deref() == medium
                && place.locality.as_deref() == locality
                && place.ownership.as_deref() == ownership
        };
        if let Some((_, placement)) = self.places.iter().find(|(place, _)| same(place)) {
            return Some(*placement);
        }
        if self.places.len() >= shared.limits.places {
            return None;
        }
        let text = |span| read.text(span).map(str::to_owned);
        let placement = Placement {
            tier: tier(read.text(event.medium).unwrap_or("")),
            locality: text(event.locality),
            ownership: text(event.ownership),
            group,
        };
        let number = self.use_placement(shared, placement)?;
        let owned = |bytes: Option<&[u8]>| bytes.map(Box::from);
        let place = Place {
            medium: owned(medium),
            locality: owned(locality),
            ownership: owned(ownership),
            group,
        };
        self.places.push((place, number));
        Some(number)
    }
}

/// Keys of the blocks of one stored event.
#[derive(Debug, Default)]
pub struct StoredKeys {
    /// Keys of all blocks; empty if they have no keys.
    pub keys: Vec<u64>,
    /// The event's own salt's part of the seed; 0 for a root without one, None if the parent's salt applies.
    pub salt: Option<u64>,
    /// Why there are no keys.
    pub unkeyed: Option<&'static str>,
}

/// Keys of the blocks of the only event of a payload, which `normalised` has written, after a block of which the key and the salt's part
/// of the seed are known. None if that is not one stored event.
pub fn stored_keys(payload: &[u8], parent: Option<(u64, u64)>) -> Option<StoredKeys> {
    static SCHEMA: LazyLock<Option<Schema>> = LazyLock::new(|| Some(Schema::new(Limits::default()).ok()?.unlimited()));
    let (mut scratch, mut work) = (Scratch::default(), Work::default());
    scan(payload, SCHEMA.as_ref()?, &mut scratch)?;
    let read = Read {
        payload,
        scratch: &scratch,
    };
    let [event] = &scratch.events[..] else { return None };
    if event.kind != Kind::Stored {
        return None;
    }
    let salt = salt_of(&read, event, &mut work.extras);
    let keys = keys_behind(&read, event, salt, parent, &mut work);
    Some(StoredKeys {
        salt,
        unkeyed: keys.as_ref().err().copied(),
        keys: keys.unwrap_or_default(),
    })
}

fn keys_behind(
    read: &Read<'_>,
    event: &Event,
    salt: Option<u64>,
    parent: Option<(u64, u64)>,
    work: &mut Work,
) -> Result<Vec<u64>, &'static str> {
    if !GroupKind::from_spec(read.text(event.spec_kind), None).is_some_and(GroupKind::is_full) {
        return Err("other-group");
    }
    if event.keyed {
        event.size_of_keyed().ok_or("length-mismatch")?;
        return Ok(event.keys.slice(&read.scratch.hashes).to_vec());
    }
    if event.tokens.length == 0 {
        return Err("no-tokens");
    }
    let store = Dense::read(read, event)?;
    let parent = event.parent.map(|_| parent.ok_or("parent-unknown")).transpose()?;
    let seed = keys::seed(store.lora, salt.or(parent.map(|(_, salt)| salt)).unwrap_or(0));
    hash_all(&store, 0, parent.map(|(key, _)| key), seed, work);
    Ok(std::mem::take(&mut work.keys))
}

/// Whether an event is about copies on the device (GPU).
fn is_on_device(read: &Read<'_>, event: &Event) -> bool {
    tier(read.text(event.medium).unwrap_or("")) == TIERS[0] && read.text(event.locality) != Some("REMOTE")
}

/// Prompts with salts of one batch whose salts are learned.
const MAX_SALTED: usize = 1_024;

/// Whether the hashes of a store cover a LoRA or multimodal items.
fn has_unknown_inputs(read: &Read<'_>, event: &Event) -> bool {
    let mut others = event.lora_name.is_some() || event.lora_id.is_some();
    if let Some(raw) = read.bytes(event.extra_keys) {
        extra_keys(raw, |block, extra| {
            others |= block > 0 || event.parent.is_some() || !matches!(extra, Extra::Text(_));
        });
    }
    others
}

/// Returns the part of the seed for the salt of an event; 0 for a root without a salt. Leaves the event's other extra keys in `extras`.
fn salt_of(read: &Read<'_>, event: &Event, extras: &mut Vec<(usize, u64)>) -> Option<u64> {
    let is_root = event.parent.is_none();
    let bare = extras_of(read.bytes(event.extra_keys), read.bytes(event.lora_name), is_root, extras);
    let own = read.bytes(event.cache_salt).map(keys::salt);
    if is_root { Some(own.or(bare).unwrap_or(0)) } else { own }
}

/// Local hashes and keys of the blocks from `first` on, into `work`.
fn hash_all(store: &Dense<'_>, first: usize, parent: Option<u64>, seed: u64, work: &mut Work) {
    let count = store.hashes.len() - first;
    let mut roller = keys::Roller::new(parent, count, &mut work.locals, &mut work.keys);
    let size = store.scheme.size as usize;
    if work.extras.is_empty() && !store.pairs {
        for block in store.tokens[first * size..].chunks_exact(size) {
            roller.push(keys::local(block, seed));
        }
    } else {
        for at in first..store.hashes.len() {
            let mut extras: Vec<u64> = extras_at(&work.extras, at).collect();
            roller.push(keys::local_with(store.window(at, &mut work.window), &mut extras, seed));
        }
    }
}

/// Extra keys of one block; `extras` are in the order of their blocks.
pub fn extras_at(extras: &[(usize, u64)], at: usize) -> impl Iterator<Item = u64> + '_ {
    let start = extras.partition_point(|(block, _)| *block < at);
    extras[start..]
        .iter()
        .take_while(move |(block, _)| *block == at)
        .map(|(_, extra)| *extra)
}

/// Reads extra keys into `(block, hash)`, and returns the salt, which is a plain text key of a root.
pub fn extras_of(raw: Option<&[u8]>, lora: Option<&[u8]>, root: bool, found: &mut Vec<(usize, u64)>) -> Option<u64> {
    found.clear();
    let raw = raw?;
    let (mut salt, mut last) = (None, usize::MAX);
    extra_keys(raw, |block, extra| {
        let first = block != last;
        last = block;
        let hash = match extra {
            Extra::Text(text) if first && lora == Some(text.as_bytes()) => return,
            Extra::Text(text) if block == 0 && root && salt.is_none() => {
                salt = Some(keys::salt(text.as_bytes()));
                return;
            }
            Extra::Text(text) => keys::untagged(text.as_bytes()),
            Extra::Bytes(bytes) => keys::untagged(bytes),
            Extra::Int(number) => number as u64,
            Extra::Pair(Id::Int(number), _) => number as u64,
            Extra::Pair(Id::Text(id), offset) => keys::item_at(keys::item_text(id), offset),
            Extra::Pair(Id::Bytes(id), offset) => keys::item_at(keys::item_bytes(id), offset),
        };
        found.push((block, hash));
    });
    salt
}
