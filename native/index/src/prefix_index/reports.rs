//! Reports for operators about workers, counters, bytes and single blocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::PrefixIndex;
use crate::holders::copies::Copies;
use crate::holders::placements::Placement;
use crate::step_counter;
use crate::store::members::Worker;
use crate::store::shared_state::SharedState;
use crate::stream::{Counters, Estimate, Stream};

/// Number of blocks that are listed before the lock of the shared state is released, since writers wait for this lock.
const BLOCKS_AT_ONCE: usize = 512;

/// Data about one stream for operators.
#[derive(Clone, Debug)]
pub struct Info {
    /// Engine and rank of the worker.
    pub worker: Arc<Worker>,
    /// Model of the worker.
    pub model: Option<String>,
    /// Number of blocks of the worker.
    pub blocks: usize,
    /// Incarnation of the worker.
    pub incarnation: i64,
    /// Sequence number of the worker's last batch; -1 before the first batch.
    pub last: i64,
    /// Number of blocks that wait for their parent or their tokens.
    pub orphans: usize,
    /// Upper bound of the number of further copies: all copies except the first of each block on each placement.
    pub copies: usize,
    /// Number of blocks that might be gone; a block that might be gone on two placements counts twice.
    pub uncertain: usize,
    /// Whether the worker held the same blocks as the engine at the last attestation of this incarnation; None before the first
    /// attestation.
    pub attested: Option<bool>,
    /// The block sizes, in tokens, that the present incarnation of the worker has announced.
    pub sizes: Vec<u32>,
    /// Why answers about the worker are estimates; None if the answers are exact.
    pub estimate: Option<Estimate>,
    /// Whether blocks are missing that the index refused at the memory limit.
    pub lacks_refused: bool,
    /// Whether blocks are missing that the index dropped while they waited for their parents.
    pub lacks_dropped: bool,
    /// The other ranks whose batches arrive in the worker's stream.
    pub carried_ranks: Vec<i64>,
    /// The number of blocks on each tier. A block on several tiers counts on each of them.
    pub tiers: BTreeMap<String, usize>,
    /// Counters of the input that the stream could not use.
    pub counters: Counters,
}

/// A block on one placement.
#[derive(Clone, Debug)]
pub struct HeldBlock {
    /// Key of the block.
    pub key: u64,
    /// The engine's hash.
    pub hash: u64,
    /// The number that identifies the block's placement.
    pub placement: u16,
    /// Bounds of the number of copies of the block on the placement.
    pub copies: Copies,
}

impl PrefixIndex {
    /// Data about all streams.
    pub fn infos(&self) -> Vec<Info> {
        let labels = self.registry.read().labels.clone();
        let info = |(worker, stream): (Worker, Arc<Mutex<Stream>>)| {
            let model = labels.get(&worker.source).cloned();
            self.info_of(worker, &stream, model)
        };
        self.streams().into_iter().filter_map(info).collect()
    }

    /// Returns the data about one worker; None if the worker is unknown.
    pub fn info(&self, source: &str, rank: i64) -> Option<Info> {
        let stream = self.stream(source, rank)?;
        let model = self.registry.read().labels.get(source).cloned();
        let source = source.to_owned();
        self.info_of(Worker { source, rank }, &stream, model)
    }

    fn info_of(&self, worker: Worker, stream: &Mutex<Stream>, model: Option<String>) -> Option<Info> {
        let carried_ranks = self.carried_ranks(&worker);
        let stream = stream.lock();
        (!stream.is_removed).then(|| Info {
            model,
            carried_ranks,
            worker: Arc::new(worker),
            blocks: stream.blocks,
            incarnation: stream.incarnation,
            last: stream.last,
            orphans: stream.waiting.len(),
            copies: stream.copies(),
            uncertain: stream.uncertain(),
            attested: stream.attested,
            sizes: stream.sizes(),
            estimate: stream.estimate(),
            lacks_refused: stream.evidence.has_refused,
            lacks_dropped: stream.evidence.has_dropped,
            tiers: self.tiers(&stream),
            counters: stream.counters.clone(),
        })
    }

    fn tiers(&self, stream: &Stream) -> BTreeMap<String, usize> {
        let shared = self.shared_lock.read();
        let mut found = BTreeMap::new();
        for (placement, blocks) in stream.held().filter(|(_, blocks)| *blocks > 0) {
            *found.entry(shared.view.placements.get(placement).tier.clone()).or_default() += blocks;
        }
        found
    }

    /// Counters of removed workers.
    pub fn ended(&self) -> Counters {
        self.ended.lock().clone()
    }

    /// Returns the heap bytes of the index, and the number of distinct blocks.
    pub fn bytes(&self) -> (usize, usize) {
        let streams: usize = self.streams().iter().map(|(_, stream)| stream.lock().bytes()).sum();
        let shared = self.shared_lock.read();
        (shared.bytes() + streams, shared.records.len())
    }

    /// Returns the blocks of a stream, with one entry for each placement of a block; and the placements, indexed by number.
    pub fn blocks(&self, source: &str, rank: i64) -> (Vec<HeldBlock>, Vec<Placement>) {
        let Some(stream) = self.stream(source, rank) else {
            return (Vec::new(), Vec::new());
        };
        let stream = stream.lock();
        let own: Vec<u32> = stream.own_numbers().collect();
        let foreign: Vec<(u32, u64)> = stream.foreign().collect();
        let mut found = Vec::with_capacity(stream.blocks);
        let mut list = |shared: &SharedState, number: u32, hash: u64| {
            let set = shared.records.set(number);
            step_counter::count(1 + shared.sets.words(set).len());
            for placement in shared.sets.placements(set, stream.number) {
                found.push(HeldBlock {
                    key: shared.records.key(number),
                    hash,
                    placement,
                    copies: stream.count(number, placement),
                });
            }
        };
        // The stream is locked, so its blocks do not change while other threads write to the shared state.
        for numbers in own.chunks(BLOCKS_AT_ONCE) {
            let shared = self.shared_lock.read();
            step_counter::begin_hold();
            numbers
                .iter()
                .for_each(|&number| list(&shared, number, shared.records.hash(number)));
            step_counter::end_hold();
        }
        for some in foreign.chunks(BLOCKS_AT_ONCE) {
            let shared = self.shared_lock.read();
            step_counter::begin_hold();
            some.iter().for_each(|&(number, hash)| list(&shared, number, hash));
            step_counter::end_hold();
        }
        let placements = self.shared_lock.read().view.placements.all();
        (found, placements)
    }

    /// Returns the key of the block with this hash. `source` and `rank` name the delivered stream, and `stated` is the rank that the
    /// block's batch states.
    pub fn key_of(&self, source: &str, rank: i64, stated: Option<i64>, hash: u64) -> Option<u64> {
        let stream = {
            let registry = self.registry.read();
            let carried = stated.and_then(|stated| registry.find_rank(source, stated));
            let carried = carried.filter(|carried| carried.carrier == Some(rank));
            carried
                .map(|carried| carried.stream.clone())
                .or_else(|| registry.find(source, rank).cloned())?
        };
        let stream = stream.lock();
        let shared = self.shared_lock.read();
        stream.newest(&shared, hash).map(|number| shared.records.key(number))
    }
}
