//! Measures traffic as routers have it: prompts that share documents, caches that evict blocks, and answers that are decoded block by
//! block.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use crate::measure::{clock_cost, cpu, median};
use crate::sides::{self, Find, SIDES, Script, Side, Visit};
use crate::table::{Reach, Row};
use crate::workload::{self, BLOCK, Chain, Random};

const DOCUMENTS: usize = 256;
/// Range of the number of blocks of a document.
const LENGTHS: std::ops::RangeInclusive<u64> = 64..=1_024;
/// Maximum number of blocks of a prompt after the blocks of its document.
const OWN: u64 = 96;
/// Number of blocks that are decoded for each request.
const DECODED: usize = 16;
/// Number of requests, out of ten, that go to a worker with the longest prefix. The other requests go to random workers.
const ROUTED: u64 = 7;

enum Step {
    Find(Vec<u32>),
    Apply(u32, Vec<u8>),
}

/// Lookups and batches in their order, which are equal for every side, because this module simulates the caches.
pub struct Trace {
    steps: Vec<Step>,
    finds: usize,
    /// Number of batches.
    batches: usize,
    /// Number of stored and removed blocks.
    blocks: usize,
}

/// The cache of one worker. It evicts the least recently used request first, and of one request the last block first.
#[derive(Default)]
struct Cache {
    stamps: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
}

impl Cache {
    /// Returns whether the cache held the block.
    fn touch(&mut self, hash: u64, stamp: u64) -> bool {
        self.order.insert(stamp, hash);
        let known = self.stamps.insert(hash, stamp);
        known.is_some_and(|before| self.order.remove(&before).is_some())
    }

    fn evict(&mut self) -> u64 {
        let (_, hash) = self.order.pop_first().expect("it is full");
        self.stamps.remove(&hash);
        hash
    }
}

struct Builder {
    random: Random,
    caches: Vec<Cache>,
    capacity: usize,
    /// The workers that hold each block.
    holders: HashMap<u64, u128>,
    trace: Trace,
}

impl Builder {
    /// Returns a worker with the longest prefix of a chain, or a random worker if no worker holds a block of the chain.
    fn best(&mut self, chain: &Chain) -> u32 {
        let mut alive = u128::MAX;
        for hash in &chain.hashes {
            match alive & self.holders.get(hash).copied().unwrap_or(0) {
                0 => break,
                left => alive = left,
            }
        }
        if alive == u128::MAX {
            return self.random.below(self.caches.len() as u64) as u32;
        }
        let chosen = self.random.below(u64::from(alive.count_ones()));
        (0..chosen).for_each(|_| alive &= alive - 1);
        alive.trailing_zeros()
    }

    /// Adds the blocks `from..to` of a request to a cache, in one batch with the removals of evicted blocks.
    fn hold(&mut self, worker: u32, chain: &Chain, from: usize, to: usize, request: u64) {
        let cache = &mut self.caches[worker as usize];
        let stamp = |at: usize| (request + 1) * 0x1_0000 - 1 - at as u64;
        let known = (from..to).take_while(|&at| cache.touch(chain.hashes[at], stamp(at))).count();
        let first = from + known;
        if first == to {
            return;
        }
        // The first unknown block was touched too, which added it to the cache.
        for at in first + 1..to {
            assert!(
                !cache.touch(chain.hashes[at], stamp(at)),
                "a block is held without its parent"
            );
        }
        let mut evicted = Vec::new();
        while cache.stamps.len() > self.capacity {
            evicted.push(cache.evict());
        }
        for hash in &evicted {
            *self.holders.get_mut(hash).expect("it was held") &= !(1 << worker);
        }
        for &hash in &chain.hashes[first..to] {
            *self.holders.entry(hash).or_default() |= 1 << worker;
        }
        let mut out = Vec::new();
        workload::batch(&mut out, evicted.len() + 1);
        evicted.iter().for_each(|&hash| workload::removed(&mut out, &[hash]));
        chain.put_store(&mut out, first, to);
        workload::end(&mut out);
        self.trace.blocks += evicted.len() + to - first;
        self.trace.batches += 1;
        self.trace.steps.push(Step::Apply(worker, out));
    }
}

impl Trace {
    /// Returns the trace of a number of requests to a number of workers.
    pub fn new(workers: u32, capacity: usize, requests: u64) -> Self {
        let mut random = Random(7);
        let document = |random: &mut Random| {
            let blocks = LENGTHS.start() + random.below(LENGTHS.end() - LENGTHS.start() + 1);
            Chain::new(random, blocks as usize, BLOCK)
        };
        let documents: Vec<_> = (0..DOCUMENTS).map(|_| document(&mut random)).collect();
        let mut builder = Builder {
            random,
            caches: (0..workers).map(|_| Cache::default()).collect(),
            capacity,
            holders: HashMap::new(),
            trace: Self {
                steps: Vec::new(),
                finds: 0,
                batches: 0,
                blocks: 0,
            },
        };
        for request in 0..requests {
            let random = &mut builder.random;
            // Zipf: the logarithm of the rank is uniform.
            let rank = (DOCUMENTS as f64).powf(random.unit()) as usize - 1;
            let document = &documents[rank.min(DOCUMENTS - 1)];
            let shared = 1 + random.below(document.blocks() as u64) as usize;
            let own = 1 + random.below(OWN) as usize;
            let prompt = document.prefix(shared).extended(random, own);
            let whole = prompt.extended(random, DECODED);
            let worker = if random.below(10) < ROUTED {
                builder.best(&prompt)
            } else {
                builder.random.below(u64::from(workers)) as u32
            };
            builder.trace.finds += 1;
            let blocks = prompt.blocks();
            builder.trace.steps.push(Step::Find(prompt.tokens));
            builder.hold(worker, &whole, 0, blocks, request);
            for at in blocks..blocks + DECODED {
                builder.hold(worker, &whole, at, at + 1, request);
            }
        }
        builder.trace
    }
}

/// A script that replays a trace and measures the time of each step.
struct Replay {
    trace: Arc<Trace>,
    at: usize,
    /// Time at which the batch that is being applied was returned.
    since: Option<Duration>,
    find: f64,
    apply: f64,
    sum: u64,
}

impl Script for Replay {
    fn next(&mut self, index: &dyn Find) -> Option<(u32, &[u8])> {
        if let Some(since) = self.since.take() {
            self.apply += (cpu() - since).as_nanos() as f64;
        }
        loop {
            let step = self.trace.steps.get(self.at)?;
            self.at += 1;
            match step {
                Step::Find(tokens) => {
                    let start = cpu();
                    self.sum += index.find(tokens);
                    self.find += (cpu() - start).as_nanos() as f64;
                }
                Step::Apply(worker, payload) => {
                    self.since = Some(cpu());
                    return Some((*worker, payload));
                }
            }
        }
    }
}

/// One run of each side, with the results: microseconds per lookup, nanoseconds per block, and the sum of all scores.
struct Run {
    trace: Arc<Trace>,
    workers: u32,
    clock: f64,
    found: (f64, f64, u64),
}

impl Visit for Run {
    fn visit<S: Side>(&mut self) {
        let overhead = S::overhead();
        let script = Replay {
            trace: self.trace.clone(),
            at: 0,
            since: None,
            find: 0.0,
            apply: 0.0,
            sum: 0,
        };
        let mut side = S::new(self.workers, BLOCK);
        let script = side.run(script);
        let Trace {
            finds, batches, blocks, ..
        } = *self.trace;
        self.found = (
            (script.find / finds as f64 - self.clock) / 1e3,
            (script.apply - (self.clock + overhead) * batches as f64) / blocks as f64,
            script.sum,
        );
    }
}

/// Returns the rows with microseconds per lookup and nanoseconds per block.
pub fn rows(quick: bool) -> Vec<Row> {
    let (requests, runs) = if quick { (600, 1) } else { (6_000, 5) };
    let clock = clock_cost();
    let (mut finds, mut applies) = (Vec::new(), Vec::new());
    for (workers, capacity) in [(16, 16_384), (96, 4_096)] {
        eprintln!("mixed traffic, {workers} workers ...");
        let trace = Arc::new(Trace::new(workers, capacity, requests));
        let mut times = vec![[Vec::new(), Vec::new()]; SIDES.len()];
        let mut sums = Vec::new();
        for run in 0..runs {
            for turn in 0..SIDES.len() {
                let side = (turn + run) % SIDES.len();
                let mut visitor = Run {
                    trace: trace.clone(),
                    workers,
                    clock,
                    found: (0.0, 0.0, 0),
                };
                sides::visit(side, &mut visitor);
                times[side][0].push(visitor.found.0);
                times[side][1].push(visitor.found.1);
                sums.push((side, visitor.found.2));
            }
        }
        let (_, expected) = *sums.iter().find(|(side, _)| *side == 0).expect("ours has run");
        for (side, sum) in sums {
            assert_eq!(
                sum, expected,
                "scores of {} and {} differ in mixed traffic",
                SIDES[side], SIDES[0]
            );
        }
        let mut figures = |at: usize| -> Vec<_> { times.iter_mut().map(|times| Some(median(&mut times[at]))).collect() };
        let name = format!("{workers} workers of {capacity} blocks");
        finds.push(Row::least(format!("match (us), {name}"), &figures(0), Reach::Best(0.9)));
        applies.push(Row::least(
            format!("apply (ns a block), {name}"),
            &figures(1),
            Reach::Best(1.0),
        ));
    }
    finds.extend(applies);
    finds
}
