//! The registry: maps workers to streams and sources to models, and lists fences. A fence is an incarnation of a removed worker; later
//! deliveries for the worker must have a higher incarnation.

use std::collections::BTreeSet;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};

use hashbrown::HashMap;
use parking_lot::Mutex;

use super::{Outcome, PrefixIndex};
use crate::memory::hasher::Secret;
use crate::rules::replaced_loras::ReplacedLoras;
use crate::store::members::{Member, Worker};
use crate::store::shared_state::SharedState;
use crate::stream::Stream;
use crate::sync::yielding_lock::{Writer, YieldingRwLock};

/// A stream, with the data that other threads can read while the stream is locked.
#[derive(Clone, Debug)]
pub(crate) struct Rank {
    pub(crate) rank: i64,
    pub(crate) stream: Arc<Mutex<Stream>>,
    /// The rank of the stream in which the batches of this rank arrive; None if the batches arrive in the rank's own stream. See `ranks`.
    pub(crate) carrier: Option<i64>,
    number: u32,
    /// Incarnation of the rank.
    incarnation: Arc<AtomicI64>,
}

impl Rank {
    pub(super) fn new(rank: i64, stream: Arc<Mutex<Stream>>, carrier: Option<i64>) -> Self {
        let locked = stream.lock();
        let (number, incarnation) = (locked.number, locked.published_incarnation.clone());
        drop(locked);
        Self {
            rank,
            stream,
            carrier,
            number,
            incarnation,
        }
    }

    /// Whether the batches of this rank arrive in the stream of the rank `stream`.
    pub(crate) fn arrives_in(&self, stream: i64) -> bool {
        self.rank == stream || self.carrier == Some(stream)
    }
}

/// A stream of a snapshot, with its number in the shared state. Lookups see its blocks only after all of them were added.
#[derive(Clone, Debug)]
pub struct ImportedStream {
    /// Engine and rank of the stream.
    pub worker: Arc<Worker>,
    /// Number of the stream.
    pub number: u32,
    /// The stream.
    pub stream: Arc<Mutex<Stream>>,
    /// The rank of the stream in which the batches arrive; None if the batches arrive in this stream.
    pub carrier: Option<i64>,
}

impl ImportedStream {
    /// Creates a stream without blocks, and adds it to the shared state; lookups do not see it yet.
    pub fn join(
        shared: &mut SharedState,
        number: u32,
        worker: Worker,
        incarnation: i64,
        model: Option<String>,
        drafts: Option<Arc<[i64]>>,
    ) -> Self {
        let worker = Arc::new(worker);
        let stream = register(shared, number, worker.clone(), incarnation, model, drafts);
        stream.lock().grant(usize::MAX); // no budget is needed: the limits of the index bound the blocks of a snapshot that share a hash
        shared.show(number, false);
        Self {
            worker,
            number,
            stream,
            carrier: None,
        }
    }

    /// Removes the stream with all of its blocks.
    pub fn leave(&self, shared_lock: &YieldingRwLock<SharedState>) {
        let mut stream = self.stream.lock();
        stream.is_removed = true;
        stream.leave_index(&mut shared_lock.write());
    }
}

/// Creates a stream without blocks, and adds it to the shared state under a free number.
pub(super) fn register(
    shared: &mut SharedState,
    number: u32,
    worker: Arc<Worker>,
    incarnation: i64,
    model: Option<String>,
    drafts: Option<Arc<[i64]>>,
) -> Arc<Mutex<Stream>> {
    let mut stream = Stream::new(number, incarnation);
    stream.groups.drafts = drafts;
    let stream = Arc::new(Mutex::new(stream));
    let member = Member {
        worker,
        model,
        lookup: None,
        schemes: Vec::new(),
        placements: Vec::new(),
        blocks: AtomicUsize::new(0),
        uncertain: BTreeSet::new(),
        loras: ReplacedLoras::default(),
    };
    shared.join(number, member);
    stream
}

#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) streams: HashMap<String, Vec<Rank>, Secret>,
    /// The highest incarnation of each removed worker.
    pub(crate) fences: HashMap<Worker, i64, Secret>,
    /// The removed workers, in the order of their removal.
    fenced: VecDeque<Worker>,
    /// The model of each source.
    pub(crate) labels: HashMap<String, String, Secret>,
    /// Groups of the draft model of each source's engine.
    pub(crate) drafts: HashMap<String, Arc<[i64]>, Secret>,
}

impl Registry {
    pub(crate) fn new(secret: Secret) -> Self {
        Self {
            streams: HashMap::with_hasher(secret),
            fences: HashMap::with_hasher(secret),
            fenced: VecDeque::new(),
            labels: HashMap::with_hasher(secret),
            drafts: HashMap::with_hasher(secret),
        }
    }

    #[inline]
    pub(crate) fn find_rank(&self, source: &str, rank: i64) -> Option<&Rank> {
        self.streams.get(source)?.iter().find(|other| other.rank == rank)
    }

    pub(crate) fn find(&self, source: &str, rank: i64) -> Option<&Arc<Mutex<Stream>>> {
        self.find_rank(source, rank).map(|found| &found.stream)
    }

    /// Adds a stream of a snapshot. The stream's worker must not be registered yet.
    pub(crate) fn enter(&mut self, imported: &ImportedStream) {
        let Worker { source, rank } = &*imported.worker;
        let rank = Rank::new(*rank, imported.stream.clone(), imported.carrier);
        self.streams.entry(source.clone()).or_default().push(rank);
    }

    pub(crate) fn admit(&mut self, worker: &Worker) {
        if self.fences.remove(worker).is_some() {
            self.fenced.retain(|other| other != worker);
        }
    }
}

impl PrefixIndex {
    /// Returns the stream of a worker, or creates it. Fails if a fence excludes the incarnation, or if the index has the maximum number of
    /// streams.
    pub(crate) fn get_or_create(&self, source: &str, rank: i64, incarnation: i64) -> Result<Arc<Mutex<Stream>>, Outcome> {
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
        let mut writer = self.shared_lock.write();
        let number = writer.vacancy().ok_or(Outcome::Full)?;
        let model = registry.labels.get(source).cloned();
        let drafts = registry.drafts.get(source).cloned();
        let stream = register(&mut writer, number, worker, incarnation, model, drafts);
        drop(writer);
        registry
            .streams
            .entry(source.into())
            .or_default()
            .push(Rank::new(rank, stream.clone(), None));
        Ok(stream)
    }

    /// Sets the model of all ranks of a source, including ranks that are added later.
    pub fn label(&self, source: &str, model: Option<&str>) {
        let mut registry = self.registry.write();
        match model {
            Some(model) => registry.labels.insert(source.into(), model.into()),
            None => registry.labels.remove(source),
        };
        // No stream is locked here: the lock can be held for long, and other threads wait for the registry.
        let model_of = |other: &str| (other == source).then(|| model.map(str::to_owned));
        self.shared_lock.write().relabel(model_of);
    }

    /// Sets which groups of a source's engine belong to a draft model (EAGLE, MTP). In these groups the engine computes the last block of a
    /// hit again. An empty list means all groups; None means an engine without a draft model. The groups apply to all ranks, including
    /// ranks that are added later.
    pub fn set_drafts(&self, source: &str, groups: Option<Vec<i64>>) {
        let groups: Option<Arc<[i64]>> = groups.map(Into::into);
        let mut registry = self.registry.write();
        match &groups {
            Some(groups) => registry.drafts.insert(source.into(), groups.clone()),
            None => registry.drafts.remove(source),
        };
        drop(registry);
        self.change_ranks(source, |stream, writer| {
            stream.groups.drafts = groups.clone();
            stream.use_groups(writer);
        });
    }

    /// Records for all ranks of a source that the engine lists another path for a LoRA: see `Stream::replace_listed_lora`.
    pub fn replace_lora(&self, source: &str, lora: u64) {
        self.change_ranks(source, |stream, shared| stream.replace_listed_lora(shared, lora));
    }

    /// Calls `change` with each stream of a source.
    fn change_ranks(&self, source: &str, change: impl Fn(&mut Stream, &mut Writer<'_, SharedState>)) {
        let ranks = |registry: &Registry| -> Vec<_> {
            let ranks = registry.streams.get(source).into_iter().flatten();
            ranks.map(|rank| rank.stream.clone()).collect()
        };
        let streams = ranks(&self.registry.read());
        for stream in streams {
            let mut stream = stream.lock();
            if !stream.is_removed {
                change(&mut stream, &mut self.shared_lock.write());
            }
        }
    }

    /// The model of each source, in no particular order.
    pub fn labels(&self) -> Vec<(String, String)> {
        self.registry
            .read()
            .labels
            .iter()
            .map(|(source, model)| (source.clone(), model.clone()))
            .collect()
    }

    /// The fence of each removed worker, the oldest first.
    pub fn fences(&self) -> Vec<(Worker, i64)> {
        let registry = self.registry.read();
        let fence = |worker: &Worker| Some((worker.clone(), *registry.fences.get(worker)?));
        registry.fenced.iter().filter_map(fence).collect()
    }

    /// Removes a worker, with the other ranks that its stream carries; or all ranks of a source if `rank` is None. Also removes the
    /// speculative entries of the removed workers. Later deliveries of the removed incarnations are ignored. Returns the number of removed
    /// blocks.
    pub fn remove(&self, source: &str, rank: Option<i64>) -> usize {
        let blocks = self.remove_ranks(source, |other| rank.is_none_or(|rank| other.arrives_in(rank)));
        self.forget_decisions(source, rank);
        blocks
    }

    /// Removes the ranks of a source that `is_meant` accepts, and the speculative entries of these ranks. If such a rank has its own
    /// delivered stream, later deliveries of its incarnation are ignored.
    pub(super) fn remove_ranks(&self, source: &str, is_meant: impl Fn(&Rank) -> bool) -> usize {
        let _whole = self.replacing.read_recursive();
        let mut registry = self.registry.write();
        let ranks = registry.streams.remove(source).unwrap_or_default();
        let (removed, remaining): (Vec<_>, Vec<_>) = ranks.into_iter().partition(is_meant);
        if !remaining.is_empty() {
            registry.streams.insert(source.into(), remaining);
        }
        let worker_of = |rank: &Rank| Worker {
            source: source.into(),
            rank: rank.rank,
        };
        for rank in removed.iter().filter(|rank| rank.carrier.is_none()) {
            let incarnation = rank.incarnation.load(Ordering::Relaxed);
            self.fence(&mut registry, worker_of(rank), incarnation);
        }
        drop(registry);
        // The lock of a stream can be held for long, for example while a snapshot is written. So while this thread waits for the stream, it
        // must hold no lock that other threads need.
        let mut writer = self.shared_lock.write();
        removed.iter().for_each(|rank| writer.show(rank.number, false));
        drop(writer);
        let mut blocks = 0;
        for rank in &removed {
            // The stream is locked before the registry, unlike the order in `PrefixIndex`: `replacing` excludes the only other thread that
            // locks both, which replaces the whole index.
            let mut stream = rank.stream.lock();
            if stream.is_removed {
                continue;
            }
            stream.is_removed = true;
            // The rank might have begun another incarnation after its fence was set.
            if rank.carrier.is_none()
                && let Some(fence) = self.registry.write().fences.get_mut(&worker_of(rank))
            {
                *fence = stream.incarnation.max(*fence);
            }
            blocks += stream.blocks;
            let mut writer = self.shared_lock.write();
            stream.leave_index(&mut writer);
            drop(writer);
            self.ended.lock().add(&stream.counters);
            self.forget_decisions(source, Some(rank.rank));
        }
        blocks
    }

    pub(crate) fn fence(&self, registry: &mut Registry, worker: Worker, incarnation: i64) {
        if registry.fences.insert(worker.clone(), incarnation).is_none() {
            registry.fenced.push_back(worker);
        }
        while registry.fenced.len() > self.limits.fences {
            if let Some(oldest) = registry.fenced.pop_front() {
                registry.fences.remove(&oldest);
            }
        }
    }

    /// Lets the index accept deliveries of any incarnation of a removed worker again, by removing its fence.
    pub fn admit(&self, source: &str, rank: i64) {
        let source = source.into();
        self.registry.write().admit(&Worker { source, rank });
    }

    /// All streams, ordered by worker.
    pub fn streams(&self) -> Vec<(Worker, Arc<Mutex<Stream>>)> {
        let registry = self.registry.read();
        let all = registry.streams.iter().flat_map(|(source, ranks)| {
            ranks.iter().map(|rank| {
                (
                    Worker {
                        source: source.clone(),
                        rank: rank.rank,
                    },
                    rank.stream.clone(),
                )
            })
        });
        let mut all: Vec<_> = all.collect();
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    }

    /// The stream of a worker; None if the worker is unknown.
    pub fn stream(&self, source: &str, rank: i64) -> Option<Arc<Mutex<Stream>>> {
        self.registry.read().find(source, rank).cloned()
    }
}
