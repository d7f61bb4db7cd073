//! The index: streams in, answers out.
//!
//! Locks are taken in this order: the registry, one stream, the gate. A second stream is only ever tried.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::applying::{Read, Work};
use crate::contexts::Context;
use crate::core::{Member, Worker, set_bit};
use crate::gate::{Gate, Writer};
use crate::keys::{self, Item, Scheme};
use crate::matching::{Depth, FIRST_LOOK, Hit, Walk, hits};
use crate::overlay::Overlay;
use crate::planes::{LEVELS, Plane, Rules};
use crate::scan::{Schema, Scratch, scan};
use crate::snapshot;
use crate::stream::{Counters, Stream};

/// Bounds of an index, all of them counted when reached.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of everything; blocks are evicted above it.
    pub memory: Option<usize>,
    /// Blocks of one stream that wait for their parent or their tokens.
    pub orphans: usize,
    /// Removed workers whose late deliveries are recognised.
    pub fences: usize,
    /// Blocks of the overlay.
    pub speculated: usize,
}

/// What became of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was applied, and cleared the whole stream or did not.
    Applied(bool),
    /// It was there before.
    Duplicate,
    /// It is of an ended life.
    Void,
    /// The payload is none that this index reads by itself; nothing was changed.
    Unread,
    /// There are more streams than an index can hold.
    Full,
}

/// Streams of one source by rank.
type Ranks = Vec<(i64, Arc<Mutex<Stream>>)>;

#[derive(Debug, Default)]
struct Registry {
    streams: HashMap<String, Ranks>,
    fences: HashMap<Worker, i64>,
    fenced: VecDeque<Worker>,
    labels: HashMap<String, String>,
}

impl Registry {
    fn find(&self, source: &str, rank: i64) -> Option<&Arc<Mutex<Stream>>> {
        self.streams
            .get(source)?
            .iter()
            .find(|(other, _)| *other == rank)
            .map(|(_, stream)| stream)
    }
}

/// Where a prompt is looked for.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// The wall.
    pub model: Option<String>,
    /// What the LoRA adds to the seed.
    pub lora: u64,
    /// What the salt adds to the seed.
    pub salt: u64,
    /// Multimodal items.
    pub items: Vec<Item>,
}

impl Scope {
    /// Its context in one scheme.
    pub fn context(&self, scheme: Scheme) -> Context {
        Context {
            scheme,
            lora: self.lora,
            salt: self.salt,
        }
    }

    /// Goes on with the keys of a prompt's blocks up to `wanted` of them.
    pub fn extend(&self, tokens: &[u32], scheme: Scheme, wanted: usize, keys: &mut Vec<u64>) {
        let known = keys.len();
        let parent = keys.last().copied();
        keys::locals(
            tokens,
            scheme,
            self.context(scheme).seed(),
            &self.items,
            known..wanted.max(known),
            keys,
        );
        keys::chain(parent, &mut keys[known..]);
    }
}

/// One stream as an operator sees it.
#[derive(Clone, Debug)]
pub struct Info {
    /// Who.
    pub worker: Arc<Worker>,
    /// Its model.
    pub model: Option<String>,
    /// Its blocks.
    pub blocks: usize,
    /// Which life.
    pub incarnation: i64,
    /// Number of its last batch.
    pub last: i64,
    /// Blocks that wait.
    pub orphans: usize,
    /// Copies beyond the first.
    pub copies: usize,
    /// What went wrong.
    pub counters: Counters,
}

/// A block on one plane.
#[derive(Clone, Debug)]
pub struct Held {
    /// Its key.
    pub key: u64,
    /// The engine's hash.
    pub hash: u64,
    /// Where.
    pub plane: u16,
    /// How often.
    pub copies: u32,
}

/// What a snapshot holds.
#[derive(Debug)]
pub struct Restored {
    /// The shared part.
    pub gate: Gate,
    /// Every stream, in the order of their workers.
    pub streams: Vec<(Worker, Arc<Mutex<Stream>>)>,
    /// Models by source.
    pub labels: Vec<(String, String)>,
    /// Removed workers, the oldest first.
    pub fences: Vec<(Worker, i64)>,
}

#[derive(Default)]
struct Room {
    scratch: Scratch,
    work: Work,
    walk: Walk,
    /// Keys of a prompt by scheme.
    keys: Vec<Vec<u64>>,
    depths: Vec<Depth>,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
}

/// See `kvevents.index.PrefixIndex`.
#[derive(Debug)]
pub struct Index {
    /// The part that all streams share.
    pub gate: Gate,
    registry: RwLock<Registry>,
    schema: Schema,
    limits: Limits,
    /// Decisions that no event has confirmed yet.
    pub overlay: Mutex<Overlay>,
    /// Heap bytes of all streams, kept only where a memory limit is set.
    streams_bytes: AtomicUsize,
    hand: AtomicUsize,
    ended: Mutex<Counters>,
    /// Snapshots that are being written: streams may be locked for longer than a batch takes.
    saving: AtomicUsize,
}

/// Records that an eviction looks at before it looks at the sum again.
const EVICTION_STEP: usize = 512;

impl Index {
    /// An empty index that reads payloads by `schema`.
    pub fn new(schema: Schema, limits: Limits) -> Self {
        Self {
            gate: Gate::default(),
            registry: RwLock::default(),
            schema,
            limits,
            overlay: Mutex::new(Overlay::new(limits.speculated)),
            streams_bytes: AtomicUsize::new(0),
            hand: AtomicUsize::new(0),
            ended: Mutex::default(),
            saving: AtomicUsize::new(0),
        }
    }

    /// The layouts by which payloads are read.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    // --- deliveries

    /// Applies a batch.
    pub fn batch(&self, source: &str, rank: i64, incarnation: i64, seq: i64, payload: &[u8]) -> Outcome {
        self.batch_by(&self.schema, source, rank, incarnation, seq, payload)
    }

    /// The same for a payload that is read by another schema.
    pub fn batch_by(&self, schema: &Schema, source: &str, rank: i64, incarnation: i64, seq: i64, payload: &[u8]) -> Outcome {
        ROOM.with_borrow_mut(|room| {
            if scan(payload, schema, &mut room.scratch).is_none() {
                room.scratch.shrink();
                return Outcome::Unread;
            }
            let (scratch, work) = (&room.scratch, &mut room.work);
            let outcome = self.delivery(source, rank, incarnation, |stream, writer| {
                if seq <= stream.last {
                    stream.counters.duplicates += 1;
                    return Outcome::Duplicate;
                }
                let read = Read { payload, scratch };
                let mut cleared = false;
                for event in &scratch.events {
                    cleared |= stream.event(writer, &read, event, work, self.limits.orphans);
                }
                stream.last = seq;
                Outcome::Applied(cleared)
            });
            room.scratch.shrink();
            work.shrink();
            outcome
        })
    }

    /// Notes that batches up to `last` are lost.
    pub fn gap(&self, source: &str, rank: i64, incarnation: i64, last: i64) -> Outcome {
        self.delivery(source, rank, incarnation, |stream, _| {
            if last <= stream.last {
                return Outcome::Duplicate;
            }
            stream.counters.gaps += 1;
            stream.last = last;
            Outcome::Applied(false)
        })
    }

    /// Forgets what a stream has told; `incarnation` begins.
    pub fn reset(&self, source: &str, rank: i64, incarnation: i64) -> Outcome {
        self.delivery(source, rank, incarnation, |stream, writer| {
            begin(stream, writer, incarnation);
            Outcome::Applied(false)
        })
    }

    fn delivery(
        &self,
        source: &str,
        rank: i64,
        incarnation: i64,
        apply: impl FnOnce(&mut Stream, &mut Writer<'_>) -> Outcome,
    ) -> Outcome {
        loop {
            let found = self.registry.read().find(source, rank).cloned();
            let stream = match found {
                Some(stream) => stream,
                None => match self.enlist(source, rank, incarnation) {
                    Ok(stream) => stream,
                    Err(outcome) => return outcome,
                },
            };
            let mut stream = stream.lock();
            if stream.gone {
                continue;
            }
            if incarnation < stream.incarnation {
                stream.counters.void += 1;
                return Outcome::Void;
            }
            let mut writer = self.gate.write();
            if incarnation > stream.incarnation {
                begin(&mut stream, &mut writer, incarnation);
            }
            let outcome = apply(&mut stream, &mut writer);
            if let Some(member) = writer.members[stream.number as usize].as_mut() {
                member.blocks = stream.blocks;
            }
            drop(writer);
            self.settle(&mut stream);
            return outcome;
        }
    }

    fn enlist(&self, source: &str, rank: i64, incarnation: i64) -> Result<Arc<Mutex<Stream>>, Outcome> {
        let mut registry = self.registry.write();
        if let Some(stream) = registry.find(source, rank) {
            return Ok(stream.clone());
        }
        let worker = Arc::new(Worker {
            source: source.into(),
            rank,
        });
        if registry.fences.get(&*worker).is_some_and(|&fence| incarnation <= fence) {
            self.ended.lock().void += 1;
            return Err(Outcome::Void);
        }
        let mut writer = self.gate.write();
        let number = writer.vacancy().ok_or(Outcome::Full)?;
        let stream = Arc::new(Mutex::new(Stream::new(number, incarnation)));
        let model = registry.labels.get(source).cloned();
        let member = Member {
            worker,
            model,
            hybrid: None,
            stream: Arc::downgrade(&stream),
            blocks: 0,
        };
        writer.join(number, member);
        drop(writer);
        registry
            .streams
            .entry(source.into())
            .or_default()
            .push((rank, stream.clone()));
        Ok(stream)
    }

    // --- workers

    /// Labels all ranks of a source, also those that come later.
    pub fn label(&self, source: &str, model: Option<&str>) {
        let mut registry = self.registry.write();
        match model {
            Some(model) => registry.labels.insert(source.into(), model.into()),
            None => registry.labels.remove(source),
        };
        // Not asking the streams, which may be busy: nothing else goes on while the registry is locked.
        let mut core = self.gate.write();
        let own = |member: &Option<Member>| member.as_ref().is_some_and(|member| member.worker.source == source);
        for number in (0..core.members.len())
            .filter(|&number| own(&core.members[number]))
            .collect::<Vec<_>>()
        {
            core.label(number as u32, model.map(str::to_owned));
        }
    }

    /// All labels.
    pub fn labels(&self) -> Vec<(String, String)> {
        self.registry
            .read()
            .labels
            .iter()
            .map(|(source, model)| (source.clone(), model.clone()))
            .collect()
    }

    /// All fences, the oldest first.
    pub fn fences(&self) -> Vec<(Worker, i64)> {
        let registry = self.registry.read();
        let fence = |worker: &Worker| Some((worker.clone(), *registry.fences.get(worker)?));
        registry.fenced.iter().filter_map(fence).collect()
    }

    /// Forgets a worker, or all ranks of a source. Deliveries of its life are void from now on. Returns its blocks.
    pub fn remove(&self, source: &str, rank: Option<i64>) -> usize {
        let mut registry = self.registry.write();
        let ranks = registry.streams.remove(source).unwrap_or_default();
        let (removed, kept): (Vec<_>, Vec<_>) = ranks
            .into_iter()
            .partition(|(other, _)| rank.is_none_or(|rank| rank == *other));
        if !kept.is_empty() {
            registry.streams.insert(source.into(), kept);
        }
        let mut locked: Vec<(Worker, MutexGuard<'_, Stream>)> = Vec::new();
        for (rank, stream) in &removed {
            let stream = stream.lock();
            locked.push((
                Worker {
                    source: source.into(),
                    rank: *rank,
                },
                stream,
            ));
        }
        for (worker, stream) in &mut locked {
            stream.gone = true;
            self.fence(&mut registry, worker.clone(), stream.incarnation);
        }
        drop(registry);
        let mut blocks = 0;
        for (_, mut stream) in locked {
            blocks += stream.blocks;
            let mut writer = self.gate.write();
            stream.forget(&mut writer);
            writer.leave(stream.number);
            drop(writer);
            self.streams_bytes.fetch_sub(stream.counted, Ordering::Relaxed);
            self.ended.lock().add(&stream.counters);
        }
        blocks
    }

    fn fence(&self, registry: &mut Registry, worker: Worker, incarnation: i64) {
        if registry.fences.insert(worker.clone(), incarnation).is_none() {
            registry.fenced.push_back(worker);
        }
        while registry.fenced.len() > self.limits.fences {
            if let Some(oldest) = registry.fenced.pop_front() {
                registry.fences.remove(&oldest);
            }
        }
    }

    /// Sets a fence, as `remove` does.
    pub fn set_fence(&self, worker: Worker, incarnation: i64) {
        self.fence(&mut self.registry.write(), worker, incarnation);
    }

    /// Lets a removed worker in again, whatever its incarnation.
    pub fn admit(&self, source: &str, rank: i64) {
        let mut registry = self.registry.write();
        let worker = Worker {
            source: source.into(),
            rank,
        };
        registry.fences.remove(&worker);
        registry.fenced.retain(|other| *other != worker);
    }

    /// Every stream, ordered by worker.
    pub fn streams(&self) -> Vec<(Worker, Arc<Mutex<Stream>>)> {
        let registry = self.registry.read();
        let all = registry.streams.iter().flat_map(|(source, ranks)| {
            ranks.iter().map(|(rank, stream)| {
                (
                    Worker {
                        source: source.clone(),
                        rank: *rank,
                    },
                    stream.clone(),
                )
            })
        });
        let mut all: Vec<_> = all.collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// One stream.
    pub fn stream(&self, source: &str, rank: i64) -> Option<Arc<Mutex<Stream>>> {
        self.registry.read().find(source, rank).cloned()
    }

    /// Every stream as an operator sees it.
    pub fn infos(&self) -> Vec<Info> {
        let labels = self.registry.read().labels.clone();
        let info = |(worker, stream): (Worker, Arc<Mutex<Stream>>)| {
            let stream = stream.lock();
            (!stream.gone).then(|| Info {
                model: labels.get(&worker.source).cloned(),
                worker: Arc::new(worker),
                blocks: stream.blocks,
                incarnation: stream.incarnation,
                last: stream.last,
                orphans: stream.waiting.len(),
                copies: stream.copies(),
                counters: stream.counters.clone(),
            })
        };
        self.streams().into_iter().filter_map(info).collect()
    }

    /// What was counted for workers that are gone.
    pub fn ended(&self) -> Counters {
        self.ended.lock().clone()
    }

    /// Heap bytes of everything, and different blocks.
    pub fn bytes(&self) -> (usize, usize) {
        let streams: usize = self.streams().iter().map(|(_, stream)| stream.lock().bytes()).sum();
        let core = self.gate.read();
        (core.bytes() + streams, core.records.len())
    }

    /// Blocks of a stream on each of their planes, and all planes.
    pub fn blocks(&self, source: &str, rank: i64) -> (Vec<Held>, Vec<Plane>) {
        let Some(stream) = self.stream(source, rank) else {
            return (Vec::new(), Vec::new());
        };
        let stream = stream.lock();
        let core = self.gate.read();
        let mut found = Vec::new();
        for (hash, number) in stream.each(&core) {
            let record = core.records.get(number);
            for plane in core.sets.planes(record.set, stream.number) {
                let copies = stream.count(&core, number, plane);
                found.push(Held {
                    key: record.key,
                    hash,
                    plane,
                    copies,
                });
            }
        }
        (found, core.planes.clone())
    }

    // --- memory

    /// Counts the bytes of a stream that has changed, and makes room if there are too many.
    fn settle(&self, stream: &mut Stream) {
        let Some(limit) = self.limits.memory else { return };
        self.recount(stream);
        let mut idle = 0;
        while self.held() > limit {
            if self.evict(stream) {
                idle = 0;
                continue;
            }
            idle += EVICTION_STEP;
            if idle > self.gate.read().records.bound() as usize {
                // A whole round without any: what is left belongs to streams that are being written to, and make room themselves.
                if !self.forget_waiting(stream) {
                    break;
                }
                idle = 0;
            }
        }
    }

    fn forget_waiting(&self, stream: &mut Stream) -> bool {
        let any = !stream.waiting.is_empty();
        for _ in 0..EVICTION_STEP {
            stream.waiting.pop();
        }
        self.recount(stream);
        any
    }

    fn recount(&self, stream: &mut Stream) {
        let bytes = stream.bytes();
        self.streams_bytes
            .fetch_add(bytes.wrapping_sub(stream.counted), Ordering::Relaxed);
        stream.counted = bytes;
    }

    fn held(&self) -> usize {
        self.gate.read().bytes() + self.streams_bytes.load(Ordering::Relaxed)
    }

    /// Takes blocks from workers that hold at least the average, in about the order in which they came. Says whether any went.
    fn evict(&self, own: &mut Stream) -> bool {
        let core = self.gate.read();
        let counts = core.members.iter().flatten().map(|member| member.blocks);
        let average = counts.clone().sum::<usize>() / counts.filter(|&blocks| blocks > 0).count().max(1);
        let mut rich = vec![0_u64; core.members.len().div_ceil(64)];
        for (at, member) in core.members.iter().enumerate() {
            set_bit(
                &mut rich,
                at as u32,
                member.as_ref().is_some_and(|member| member.blocks >= average),
            );
        }
        let (start, bound) = (self.hand.load(Ordering::Relaxed) as u32, core.records.bound());
        let end = bound.min(start.saturating_add(EVICTION_STEP as u32));
        self.hand
            .store(if end >= bound { 0 } else { end as usize }, Ordering::Relaxed);
        let mut victims: HashMap<u32, Vec<u32>> = HashMap::new();
        for number in start..end {
            let Some(record) = core.records.find(number) else { continue };
            for word in core.sets.words(record.set) {
                let mut bits = word.bits & rich[word.word()];
                while bits != 0 {
                    let stream = ((word.word() << 6) as u32) + bits.trailing_zeros();
                    bits &= bits - 1;
                    let list = victims.entry(stream).or_default();
                    if list.last() != Some(&number) {
                        list.push(number);
                    }
                }
            }
        }
        let others: Vec<_> = (victims.into_iter())
            .filter_map(|(stream, numbers)| Some((stream, core.members[stream as usize].as_ref()?.stream.clone(), numbers)))
            .collect();
        drop(core);
        let mut any = false;
        for (number, stream, records) in others {
            if number == own.number {
                any |= self.evict_from(own, &records);
            } else if let Some(stream) = stream.upgrade()
                && let Some(mut stream) = stream.try_lock()
                && !stream.gone
                && stream.number == number
            {
                any |= self.evict_from(&mut stream, &records);
            }
        }
        any
    }

    fn evict_from(&self, stream: &mut Stream, records: &[u32]) -> bool {
        let mut writer = self.gate.write();
        let victims = stream.hashes_of(&writer, records);
        for &(hash, number) in &victims {
            stream.drop_block(&mut writer, hash, number, |_| true);
            stream.counters.evicted += 1;
            writer.pause(1);
        }
        if let Some(member) = writer.members[stream.number as usize].as_mut() {
            member.blocks = stream.blocks;
        }
        drop(writer);
        self.recount(stream);
        !victims.is_empty()
    }

    // --- snapshots

    /// Whether a snapshot is being written, in which case a delivery may have to wait.
    pub fn is_saving(&self) -> bool {
        self.saving.load(Ordering::Relaxed) > 0
    }

    /// Writes a snapshot.
    pub fn save<W: Write>(&self, out: W) -> io::Result<W> {
        self.saving.fetch_add(1, Ordering::Relaxed);
        let saved = snapshot::save(self, out);
        self.saving.fetch_sub(1, Ordering::Relaxed);
        saved
    }

    /// Blocks of one stream that may wait.
    pub fn max_waiting(&self) -> usize {
        self.limits.orphans
    }

    /// Puts what was restored in the place of everything but the overlay.
    pub fn replace(&self, restored: Restored) {
        let Restored {
            gate,
            streams,
            labels,
            fences,
        } = restored;
        let mut fresh = Registry {
            labels: labels.into_iter().collect(),
            ..Registry::default()
        };
        for (worker, incarnation) in fences {
            self.fence(&mut fresh, worker, incarnation);
        }
        let mut bytes = 0;
        for (worker, stream) in &streams {
            if self.limits.memory.is_some() {
                let mut stream = stream.lock();
                stream.counted = stream.bytes();
                bytes += stream.counted;
            }
            fresh
                .streams
                .entry(worker.source.clone())
                .or_default()
                .push((worker.rank, stream.clone()));
        }
        // Dropped when no lock is held any more.
        let mut ended = Vec::new();
        let mut registry = self.registry.write();
        for (_, stream) in registry.streams.values().flatten() {
            let mut stream = stream.lock();
            let mut empty = Stream::new(stream.number, stream.incarnation);
            empty.gone = true;
            ended.push(std::mem::replace(&mut *stream, empty));
        }
        let mut old = gate.write();
        let mut core = self.gate.write();
        std::mem::swap(&mut *core, &mut *old);
        self.hand.store(0, Ordering::Relaxed);
        self.streams_bytes.store(bytes, Ordering::Relaxed);
        drop(core);
        drop(old);
        *registry = fresh;
        drop(registry);
        ended.iter().for_each(|stream| self.ended.lock().add(&stream.counters));
        for (_, stream) in streams {
            let mut stream = stream.lock();
            if !stream.gone {
                self.settle(&mut stream);
            }
        }
    }

    // --- matching

    /// Workers that hold a beginning of a prompt.
    ///
    /// Keys are made without the lock, first a few of them, since many prompts are unknown from the start. What the answer says was all
    /// true at one moment: the last look is at every key, of every scheme, under one lock.
    pub fn matched(&self, tokens: &[u32], scope: &Scope) -> Vec<Hit> {
        ROOM.with_borrow_mut(|room| {
            let Room { walk, keys, depths, .. } = room;
            let schemes = self.schemes(scope);
            keys.resize_with(schemes.len().max(keys.len()), Vec::new);
            keys.iter_mut().for_each(Vec::clear);
            let mut wanted = FIRST_LOOK;
            loop {
                for (&scheme, keys) in schemes.iter().zip(&mut *keys) {
                    scope.extend(tokens, scheme, scheme.blocks(tokens.len()).min(wanted), keys);
                }
                let core = self.gate.read();
                depths.clear();
                let mut goes_on = false;
                for (&scheme, keys) in schemes.iter().zip(&*keys) {
                    let found = walk.find(&core, keys, &scope.context(scheme));
                    goes_on |= found == keys.len() && found < scheme.blocks(tokens.len());
                    walk.depths(&core, scheme, &scope.model, depths);
                }
                if !goes_on {
                    return hits(&core, depths, schemes.len() > 1);
                }
                wanted = usize::MAX;
            }
        })
    }

    /// The same for keys that the caller has computed. None when block sizes differ and none is given.
    pub fn matched_keys(&self, keys: &[u64], size: Option<u32>, model: &Option<String>) -> Option<Vec<Hit>> {
        ROOM.with_borrow_mut(|room| {
            let core = self.gate.read();
            let schemes: Vec<Scheme> = core
                .contexts
                .schemes()
                .filter(|scheme| size.is_none_or(|size| size == scheme.size))
                .collect();
            if size.is_none() && schemes.iter().any(|scheme| scheme.size != schemes[0].size) {
                return None;
            }
            room.depths.clear();
            for &scheme in &schemes {
                room.walk
                    .read(&core, keys, |number| core.contexts.get(number).scheme == scheme);
                room.walk.depths(&core, scheme, model, &mut room.depths);
            }
            Some(hits(&core, &mut room.depths, schemes.len() > 1))
        })
    }

    // --- the overlay

    /// Believes until `until` that a worker will hold a prompt.
    pub fn speculate(&self, worker: Worker, tokens: &[u32], scope: &Scope, now: f64, until: f64) {
        let prompts = self.keys_of_all(tokens, scope);
        let mut overlay = self.overlay.lock();
        for (_, keys) in prompts {
            overlay.add(worker.clone(), keys, until);
        }
        self.expire(&mut overlay, now);
    }

    /// Ends what is over.
    pub fn expire(&self, overlay: &mut Overlay, now: f64) {
        let core = self.gate.read();
        let number = |worker: &Worker| {
            let same = |member: &Option<Member>| member.as_ref().is_some_and(|member| *member.worker == *worker);
            core.members.iter().position(same)
        };
        overlay.expire(now, |worker, key| {
            let held = |stream: usize| {
                let twins = core.twins(key, |_| true);
                twins
                    .into_iter()
                    .any(|twin| core.sets.knows(core.records.get(twin).set, stream as u32))
            };
            number(worker).is_some_and(held)
        });
    }

    /// Lengthens an answer to what is believed.
    pub fn believed(&self, tokens: &[u32], scope: &Scope, now: f64, found: &mut Vec<Hit>) {
        let mut overlay = self.overlay.lock();
        self.expire(&mut overlay, now);
        if overlay.is_empty() {
            return;
        }
        let labels = self.registry.read().labels.clone();
        for (scheme, keys) in self.keys_of_all(tokens, scope) {
            for worker in overlay
                .workers()
                .filter(|worker| labels.get(&worker.source) == scope.model.as_ref())
            {
                let depth = overlay.depth(worker, &keys, now) as u64 * u64::from(scheme.size);
                match found.iter_mut().find(|hit| *hit.worker == *worker) {
                    Some(hit) => hit.tokens.iter_mut().for_each(|tokens| *tokens = depth.max(*tokens)),
                    None if depth > 0 => found.push(Hit {
                        worker: Arc::new(worker.clone()),
                        tokens: [depth; LEVELS],
                    }),
                    None => {}
                }
            }
        }
    }

    /// Keys of a prompt in every scheme that some worker uses.
    fn keys_of_all(&self, tokens: &[u32], scope: &Scope) -> Vec<(Scheme, Vec<u64>)> {
        let schemes: Vec<Scheme> = self.gate.read().contexts.schemes().collect();
        let keys = |scheme: Scheme| {
            let mut found = Vec::new();
            scope.extend(tokens, scheme, scheme.blocks(tokens.len()), &mut found);
            (scheme, found)
        };
        schemes.into_iter().map(keys).collect()
    }

    /// Schemes in which this namespace has blocks at all.
    pub fn schemes(&self, scope: &Scope) -> Vec<Scheme> {
        let core = self.gate.read();
        let known = |scheme: &Scheme| core.contexts.find(&scope.context(*scheme)).is_some();
        core.contexts.schemes().filter(known).collect()
    }
}

/// A new life: nothing of the old one holds.
fn begin(stream: &mut Stream, writer: &mut Writer<'_>, incarnation: i64) {
    stream.forget(writer);
    stream.rules = Rules::default();
    stream.places.clear();
    writer.rule(stream.number, None);
    (stream.incarnation, stream.last) = (incarnation, -1);
}
