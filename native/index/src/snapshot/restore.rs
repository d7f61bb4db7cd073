//! Reads a snapshot. `restore` reads the snapshot into a new shared state. When this state is complete, it replaces the shared state of the
//! index. `absorb` reads the snapshot into the existing shared state of an index.
//!
//! Other threads can read and write the index at the same time. The shared state is locked for a limited number of blocks at a time, and
//! never while bytes are read. The bytes can come from Python, and another thread can hold the GIL while it waits for the shared state.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;

use super::importing::SnapshotContents;
use crate::groups::cache::MAX_SALTS;
use crate::groups::engine_hash::EngineHash;
use crate::groups::{FULL_KINDS, GroupKind};
use crate::holders::contexts::Context;
use crate::holders::copies::Copies;
use crate::holders::holder_sets::MAX_STREAMS;
use crate::holders::placements::{MAX_PLACEMENTS, Placement};
use crate::keys::{self, Scheme};
use crate::limits::Limits;
use crate::memory::page_pool;
use crate::memory::table::Stage;
use crate::prefix_index::{ImportedStream, PrefixIndex};
use crate::rules::evidence::Evidence;
use crate::rules::pending::{Content, Waiting};
use crate::rules::replaced_loras::MAX_LORAS;
use crate::store::members::Worker;
use crate::store::shared_state::{Block, SharedState};
use crate::stream::{StatedRanks, Stream};
use crate::sync::yielding_lock::{WORK_PER_HOLD, YieldingRwLock};

use super::frames::{Failure, FrameReader, failure};
use super::{
    CHAIN, CONTEXT, CONTINUATION, DONE, FENCE, KEYS, LABEL, MAX_CONTEXTS, NO_RANK, ONE_RANK, ORDER, PLACEMENT, RUN,
    SEVERAL_RANKS, STATE_GROUP, STREAM, UNKNOWN_GROUP, WAITING, WINDOW_GROUP,
};

/// Number of blocks that are placed before the lock of the shared state is released. The lock is held for about a tenth of a millisecond;
/// then other threads can take it.
pub(super) const BLOCKS_AT_ONCE: usize = 1024;

/// Replaces everything in the index except the overlay. A failed call changes nothing.
pub fn restore(index: &PrefixIndex, from: impl Read) -> Result<(), Failure> {
    let (shared_lock, mut part) = (
        YieldingRwLock::new(SharedState::new(*index.limits())),
        SnapshotContents::default(),
    );
    SnapshotReader::new(from, &shared_lock, None, *index.limits(), &mut part)?.read_all()?;
    index.replace(shared_lock, part);
    Ok(())
}

/// Adds the streams of a snapshot to a shared state, where lookups do not see them yet. After a failure, `part` has the streams that were
/// added before; the last of these can be incomplete.
pub fn absorb(index: &PrefixIndex, from: impl Read, part: &mut SnapshotContents) -> Result<(), Failure> {
    SnapshotReader::new(from, &index.shared_lock, Some(index), *index.limits(), part)?.read_all()
}

fn unexpected(item: u8) -> Failure {
    failure(format!("unexpected item kind {item}"))
}

struct SnapshotReader<'a, R> {
    from: FrameReader<R>,
    /// The shared state to which the blocks are added.
    shared_lock: &'a YieldingRwLock<SharedState>,
    /// The index that has this shared state; None if the shared state is new.
    index: Option<&'a PrefixIndex>,
    limits: Limits,
    part: &'a mut SnapshotContents,
    /// Placements, indexed by their ID in the file, each with its ID in the shared state. This ID is None until the present stream has a
    /// block on the placement.
    placements: Vec<(Placement, Option<u16>)>,
    /// Contexts, indexed by their ID in the part of the file that describes the present stream. Each context is retained temporarily, until
    /// `release_contexts`.
    contexts: Vec<u32>,
    state: RunState,
}

impl<'a, R: Read> SnapshotReader<'a, R> {
    fn new(
        from: R,
        shared_lock: &'a YieldingRwLock<SharedState>,
        index: Option<&'a PrefixIndex>,
        limits: Limits,
        part: &'a mut SnapshotContents,
    ) -> Result<Self, Failure> {
        Ok(Self {
            from: FrameReader::new(from)?,
            shared_lock,
            index,
            limits,
            part,
            placements: Vec::new(),
            contexts: Vec::new(),
            state: RunState::default(),
        })
    }

    fn read_all(mut self) -> Result<(), Failure> {
        while let Some(item) = self.from.next()? {
            match item {
                PLACEMENT => self.placement()?,
                STREAM => self.stream()?,
                FENCE => self.fence()?,
                LABEL => {
                    let label = (self.from.text()?, self.from.text()?);
                    self.part.labels.push(label);
                }
                other => return Err(unexpected(other)),
            }
        }
        self.discard_orphaned_ranks();
        publish_imported(self.shared_lock, self.part);
        Ok(())
    }

    /// Discards each rank whose carrier is missing: the carrier was removed while the snapshot was written.
    fn discard_orphaned_ranks(&mut self) {
        let workers: HashSet<Worker> = self.part.streams.iter().map(|imported| (*imported.worker).clone()).collect();
        let (complete, orphaned): (Vec<_>, Vec<_>) = self.part.streams.drain(..).partition(|imported| {
            let carrier = |rank| Worker {
                rank,
                ..(*imported.worker).clone()
            };
            imported.carrier.is_none_or(|rank| workers.contains(&carrier(rank)))
        });
        self.part.streams = complete;
        orphaned.iter().for_each(|imported| imported.leave(self.shared_lock));
    }

    fn placement(&mut self) -> Result<(), Failure> {
        let from = &mut self.from;
        let tier = from.text()?;
        let (locality, ownership) = (from.option(FrameReader::text)?, from.option(FrameReader::text)?);
        let placement = Placement {
            tier,
            locality,
            ownership,
            group: from.signed()?,
        };
        if self.placements.iter().any(|(known, _)| *known == placement) {
            return Err(failure("a placement is repeated"));
        }
        if self.placements.len() == MAX_PLACEMENTS {
            return Err(failure(format!("the snapshot has more than {MAX_PLACEMENTS} placements")));
        }
        self.placements.push((placement, None));
        Ok(())
    }

    /// Reads the ID of a placement in the file. Returns the ID of the placement in the shared state.
    fn placement_named(&mut self, stream: &mut Stream) -> Result<u16, Failure> {
        let at = self.from.below(self.placements.len() as u64, "placement number")?;
        let (placement, number) = &mut self.placements[at as usize];
        if let Some(number) = *number {
            return Ok(number);
        }
        let most = self.limits.places;
        if stream.held().count() >= most {
            return Err(failure(format!("a stream has blocks in more than {most} placements")));
        }
        *number = stream.use_placement(&mut self.shared_lock.write(), placement.clone());
        number.ok_or_else(|| {
            failure(format!(
                "a source would have more than {most} placements, or the index more than {MAX_PLACEMENTS}"
            ))
        })
    }

    fn worker(&mut self) -> Result<Worker, Failure> {
        Ok(Worker {
            source: self.from.text()?,
            rank: self.from.signed()?,
        })
    }

    fn stream(&mut self) -> Result<(), Failure> {
        let worker = self.worker()?;
        if self.part.streams.last().is_some_and(|last| *last.worker >= worker) {
            return Err(failure("the workers of the snapshot are not sorted"));
        }
        let incarnation = self.from.signed()?;
        let carrier = self.from.option(FrameReader::signed)?;
        let mut imported = match self.index {
            Some(index) => index.import(worker, incarnation)?,
            None => self.join(worker, incarnation)?,
        };
        imported.carrier = carrier;
        // After this line, the owner of `part` removes the stream if the call fails.
        self.part.streams.push(imported.clone());
        let mut stream = imported.stream.lock();
        stream.stated_ranks = match self.from.byte()? {
            NO_RANK => StatedRanks::None,
            ONE_RANK => StatedRanks::One(self.from.signed()?),
            SEVERAL_RANKS => StatedRanks::Several,
            other => return Err(failure(format!("unknown variant {other} of stated ranks"))),
        };
        stream.last = self.from.signed()?;
        let has_attested = self.from.byte()? != 0;
        let mut unkept = Vec::new();
        for _ in 0..self
            .from
            .below(self.limits.groups as u64 + 1, "number of groups of unknown kinds")?
        {
            unkept.push((self.from.signed()?, self.from.fixed()?));
        }
        stream.put_attested(has_attested, unkept);
        stream.restore_evidence(Evidence::from_parts(self.from.count()?, self.from.count()?));
        for _ in 0..self.from.below(MAX_LORAS as u64 + 1, "number of replaced LoRAs")? {
            let lora = self.from.fixed()?;
            stream.put_replaced_lora(&mut self.shared_lock.write(), lora);
        }
        self.placements.iter_mut().for_each(|(_, number)| *number = None);
        self.state = RunState::default();
        let salts = self.groups(&mut stream)?;
        let blocks = self.blocks(&mut stream);
        self.release_contexts();
        blocks?;
        let mut shared = self.shared_lock.write();
        stream.use_groups(&mut shared);
        if let Some(cache) = &stream.group_cache {
            cache.write().resume(salts);
        }
        if let Some(member) = &shared.view.members[imported.number as usize] {
            member.blocks.store(stream.blocks, Ordering::Relaxed);
        }
        if self.limits.memory.is_some() {
            stream.recount(&mut shared);
        }
        Ok(())
    }

    fn join(&self, worker: Worker, incarnation: i64) -> Result<ImportedStream, Failure> {
        let mut shared = self.shared_lock.write();
        let number = shared.view.members.len();
        if number >= MAX_STREAMS {
            return Err(failure(format!("the snapshot has more than {MAX_STREAMS} streams")));
        }
        Ok(ImportedStream::join(
            &mut shared,
            number as u32,
            worker,
            incarnation,
            None,
            None,
        ))
    }

    /// Reads the groups of a stream's engine, and the scheme by which the engine hashes prompts. Returns the salts of the stream.
    fn groups(&mut self, stream: &mut Stream) -> Result<Vec<(u64, String)>, Failure> {
        stream.misses_salts = self.from.byte()? != 0;
        for _ in 0..self.from.below(self.limits.groups as u64 + 1, "number of groups")? {
            let group = self.from.signed()?;
            let kind = match self.from.byte()? {
                UNKNOWN_GROUP => GroupKind::Unknown,
                STATE_GROUP => GroupKind::State,
                WINDOW_GROUP => GroupKind::Window(self.from.below(1 << 32, "window size")? as u32),
                full if full < FULL_KINDS => GroupKind::Full(full),
                other => return Err(failure(format!("unknown kind {other} of a group"))),
            };
            let size = self.from.below(1 << 32, "block size")? as u32;
            if (size == 0 && kind != GroupKind::Unknown) || kind == GroupKind::Window(0) {
                return Err(failure("a group has blocks or a window of 0 tokens"));
            }
            stream.groups.learn(group, kind, size);
        }
        let parts = self
            .from
            .option(|from| Ok([from.count()?, from.count()?, from.count()?, from.count()?]))?;
        stream.groups.hashing = match parts {
            Some(parts) => Some(EngineHash::of_parts(parts).ok_or_else(|| failure("the hash scheme of an engine is unknown"))?),
            None => None,
        };
        let flags = self.from.byte()?;
        (stream.groups.has_lookahead, stream.groups.has_unknown_inputs) = (flags & 1 != 0, flags & 2 != 0);
        stream.groups.copied_levels = flags >> 2;
        let mut salts = Vec::new();
        for _ in 0..self.from.below(MAX_SALTS as u64 + 1, "number of salts")? {
            salts.push((self.from.fixed()?, self.from.text()?));
        }
        Ok(salts)
    }

    /// Reads the items of a stream.
    fn blocks(&mut self, stream: &mut Stream) -> Result<(), Failure> {
        let mut several = BlockOrder::default();
        loop {
            match self.from.byte()? {
                CONTEXT => {
                    if self.contexts.len() == MAX_CONTEXTS {
                        self.release_contexts();
                    }
                    let context = self.context()?;
                    let number = self.shared_lock.write().contexts.retain(context);
                    self.contexts
                        .push(number.ok_or_else(|| failure("the index would have too many contexts"))?);
                }
                RUN => self.run(stream)?,
                ORDER => {
                    let (hash, key) = (self.from.fixed()?, self.from.fixed()?);
                    let context = self.context_named()?;
                    several.add(self.shared_lock, stream, hash, (key, context), self.state.is_refused)?;
                }
                WAITING => {
                    let waiting = self.waiting(stream)?;
                    let Limits {
                        orphans, orphan_bytes, ..
                    } = self.limits;
                    let dropped = stream.waiting.push_within(waiting, orphans, orphan_bytes);
                    stream.counters.dropped += dropped;
                    if dropped > 0 {
                        stream.evidence.note_dropped();
                    }
                }
                DONE => break,
                other => return Err(unexpected(other)),
            }
        }
        several.end(self.shared_lock, stream, self.state.is_refused)?;
        let blocks = self.from.count()?;
        let digest = u128::from(self.from.fixed()?) | u128::from(self.from.fixed()?) << 64;
        let refused = &self.state;
        let read = (
            stream.blocks as u64 + refused.count,
            stream.tally.digest.wrapping_add(refused.digest),
        );
        stream.counters.evicted += refused.count;
        if refused.count > 0 {
            stream.evidence.note_refused();
        }
        if read != (blocks, digest) {
            return Err(failure("the blocks of a stream do not match its digest"));
        }
        Ok(())
    }

    fn release_contexts(&mut self) {
        let mut shared = self.shared_lock.write();
        for number in self.contexts.drain(..) {
            shared.contexts.release(number);
            shared.spend(1);
        }
    }

    /// Reads the ID of a context in the file. Returns the ID of the context in the shared state.
    fn context_named(&mut self) -> Result<u32, Failure> {
        let at = self.from.below(self.contexts.len() as u64, "context number")?;
        Ok(self.contexts[at as usize])
    }

    fn context(&mut self) -> Result<Context, Failure> {
        let scheme = self.scheme()?;
        Ok(Context {
            scheme,
            lora: self.from.fixed()?,
            salt: self.from.fixed()?,
        })
    }

    fn scheme(&mut self) -> Result<Scheme, Failure> {
        let size = self.from.below(1 << 32, "block size")? as u32;
        let eagle = self.from.option(|_| Ok(()))?.is_some();
        if size == 0 {
            Err(failure("a block has no tokens"))
        } else {
            Ok(Scheme { size, eagle })
        }
    }

    fn run(&mut self, stream: &mut Stream) -> Result<(), Failure> {
        let mut left = usize::from(u16::from_le_bytes([self.from.byte()?, self.from.byte()?]));
        let kind = self.from.byte()?;
        let context = self.context_named()?;
        self.state.is_outdated = self.from.byte()? != 0;
        self.state.placements.clear();
        for _ in 0..self
            .from
            .below(self.placements.len() as u64 + 1, "number of placements of a block")?
        {
            let placement = self.placement_named(stream)?;
            let least = self.from.below(1 << 32, "number of copies")? as u32;
            let most = self.from.below(1 << 32, "number of copies")? as u32;
            if most == 0 || least > most {
                return Err(failure(format!("invalid bounds of a number of copies: {least} to {most}")));
            }
            self.state.placements.push((placement, Copies { least, most }));
        }
        let mut is_linked = match kind {
            KEYS | CHAIN => false,
            CONTINUATION if self.state.before.is_some() => true,
            CONTINUATION => return Err(failure("a run continues without a block before it")),
            other => return Err(failure(format!("unknown kind {other} of a run"))),
        };
        while left > 0 {
            let count = left.min(BLOCKS_AT_ONCE);
            self.state.read.clear();
            for _ in 0..count {
                self.state.read.push((self.from.fixed()?, self.from.fixed()?, is_linked));
                is_linked = kind != KEYS;
            }
            self.place(stream, context)?;
            left -= count;
        }
        Ok(())
    }

    /// Adds the blocks that were read to the stream. Blocks beyond the memory limit are refused and counted.
    fn place(&mut self, stream: &mut Stream, context: u32) -> Result<(), Failure> {
        let state = &mut self.state;
        let mut writer = self.shared_lock.write();
        let keyed = writer.contexts.get(context).is_keyed();
        if page_pool::must_prepare() || stream.must_resize(state.read.len()) {
            let secret = writer.secret;
            writer.unlocked(|| {
                page_pool::prepare();
                stream.make_room(state.read.len(), secret);
            });
        }
        for chunk in state.read.chunks(WORK_PER_HOLD) {
            let shared: &mut SharedState = &mut writer;
            state.is_refused |= !stream.may_grow(shared);
            state.blocks.clear();
            for &(hash, word, is_linked) in chunk {
                let before = state.before.filter(|_| is_linked);
                let key = before.map_or(word, |before| keys::chained(before, word));
                let block = Block {
                    hash,
                    key,
                    local: word,
                    context,
                    keyed,
                    mixed_key: shared.mixed(key),
                    mixed_hash: shared.mixed(hash),
                };
                stream.prefetch(block.mixed_hash, Stage::Bucket);
                state.before = Some(key);
                state.blocks.push((block, is_linked));
            }
            for (block, is_linked) in &state.blocks {
                if state.is_refused {
                    state.count += 1;
                    let part = stream.digest_of(block.hash, block.key, &state.placements);
                    state.digest = state.digest.wrapping_add(part);
                    continue;
                }
                let parent = state.parent.filter(|_| *is_linked && !keyed);
                let number = stream.put(shared, block, &state.placements, parent);
                let number = number.ok_or_else(|| failure("a block is repeated or missing"))?;
                if stream.has_replaced_loras() && !state.is_outdated {
                    stream.put_current(shared, number);
                }
                state.parent = Some(number);
            }
            writer.spend(chunk.len());
        }
        Ok(())
    }

    fn waiting(&mut self, stream: &mut Stream) -> Result<Waiting, Failure> {
        let hash = self.from.fixed()?;
        let placement = self.placement_named(stream)?;
        let awaited = self.from.fixed()?;
        let content = match self.from.option(|_| Ok(()))? {
            Some(()) => Some(self.content()?),
            None if awaited != hash => return Err(failure("a hash without tokens waits for another hash")),
            None => None,
        };
        Ok(Waiting {
            hash,
            placement,
            awaited,
            content,
        })
    }

    fn content(&mut self) -> Result<Content, Failure> {
        let scheme = self.scheme()?;
        let (lora, salt) = (self.from.fixed()?, self.from.option(FrameReader::fixed)?);
        let bytes = self.from.bytes(scheme.window() as u64 * 4)?;
        let tokens = bytes
            .chunks_exact(4)
            .map(|token| u32::from_le_bytes([token[0], token[1], token[2], token[3]]))
            .collect();
        let mut extras = Vec::new();
        for _ in 0..self.from.count()? {
            extras.push(self.from.fixed()?);
        }
        Ok(Content {
            tokens,
            extras: extras.into(),
            scheme,
            lora,
            salt,
        })
    }

    /// Reads a fence. Discards a stream that the fence excludes: it was removed after it had been written.
    fn fence(&mut self) -> Result<(), Failure> {
        let (worker, incarnation) = (self.worker()?, self.from.signed()?);
        let streams = &mut self.part.streams;
        if let Ok(at) = streams.binary_search_by(|other| (*other.worker).cmp(&worker))
            && streams[at].stream.lock().incarnation <= incarnation
        {
            streams.remove(at).leave(self.shared_lock);
        }
        self.part.fences.push((worker, incarnation));
        Ok(())
    }
}

/// Merges each head with the linked block that has the same key, if both exist. Such pairs exist if a stream of the snapshot lacks blocks
/// of a chain. If a stream of the snapshot holds the head, it then holds the linked block instead. If other streams hold the head too, the
/// head stays, and the linked block also becomes a head. Concurrent deliveries create no such pairs, because they search for heads first.
fn publish_imported(shared_lock: &YieldingRwLock<SharedState>, part: &SnapshotContents) {
    // No other thread knows these streams yet.
    let mut streams: HashMap<u32, MutexGuard<'_, Stream>> = part
        .streams
        .iter()
        .map(|imported| (imported.number, imported.stream.lock()))
        .collect();
    let (mut number, mut writer, mut heads) = (0, shared_lock.write(), Vec::new());
    while number < writer.records.bound() {
        writer.spend(1);
        let shared: &mut SharedState = &mut writer;
        if shared.records.is_linked(number) {
            let (key, context) = (shared.records.key(number), shared.records.context(number));
            heads.clear();
            shared.for_each_twin(false, key, |head| {
                if shared.records.context(head) == context {
                    heads.push(head);
                }
            });
            for &head in &heads {
                for stream in shared.sets.streams(shared.records.set(head)) {
                    if let Some(stream) = streams.get_mut(&stream) {
                        stream.exchange(shared, head, number);
                    }
                }
                shared.sweep(head);
            }
            if heads.iter().any(|&head| shared.is_head(head, key, context)) {
                shared.list(number);
                shared.mark_twins(false, key, context);
            }
        }
        number += 1;
    }
}

#[derive(Default)]
struct RunState {
    placements: Vec<(u16, Copies)>,
    /// The hash and the word of each block, and whether the block is linked to its predecessor.
    read: Vec<(u64, u64, bool)>,
    blocks: Vec<(Block, bool)>,
    /// Key of the preceding block; None if no block precedes.
    before: Option<u64>,
    /// ID of the record of the preceding block.
    parent: Option<u32>,
    /// Whether the blocks might have been computed with former weights of a LoRA.
    is_outdated: bool,
    /// Whether the memory limit refuses further blocks of the stream.
    is_refused: bool,
    /// Number of refused blocks of the stream.
    count: u64,
    /// Sum of the contributions of the refused blocks to the stream's digest.
    digest: u128,
}

/// The blocks of one hash, the oldest first.
#[derive(Default)]
struct BlockOrder {
    hash: u64,
    blocks: Vec<(u64, u32)>,
}

impl BlockOrder {
    fn add(
        &mut self,
        shared_lock: &YieldingRwLock<SharedState>,
        stream: &mut Stream,
        hash: u64,
        block: (u64, u32),
        has_refused: bool,
    ) -> Result<(), Failure> {
        if hash != self.hash {
            self.end(shared_lock, stream, has_refused)?;
            self.hash = hash;
        }
        self.blocks.push(block);
        Ok(())
    }

    fn end(
        &mut self,
        shared_lock: &YieldingRwLock<SharedState>,
        stream: &mut Stream,
        has_refused: bool,
    ) -> Result<(), Failure> {
        let known = self.blocks.is_empty() || stream.reorder(shared_lock, self.hash, &self.blocks, has_refused);
        self.blocks.clear();
        if known {
            Ok(())
        } else {
            Err(failure("blocks of one hash are ordered, but some are missing"))
        }
    }
}
