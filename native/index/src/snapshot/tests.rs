//! Tests of adding a snapshot to an index that other threads use.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io::{self, Read};
use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::*;
use crate::holders::contexts::Context;
use crate::holders::copies::Copies;
use crate::holders::placements::Placement;
use crate::keys::Scheme;
use crate::limits::Limits;
use crate::lookup::matching::Hit;
use crate::prefix_index::PrefixIndex;
use crate::rules::pending::{Content, Waiting};
use crate::step_counter;
use crate::store::members::Worker;
use crate::store::shared_state::Block;
use crate::wire::scan::Schema;

const SCHEME: Scheme = Scheme { size: 2, eagle: false };

fn index() -> PrefixIndex {
    PrefixIndex::new(Schema::new(crate::wire::scan::Limits::default()).unwrap(), Limits::default())
}

fn worker(source: &str) -> Worker {
    Worker {
        source: source.into(),
        rank: 0,
    }
}

/// Adds `count` blocks to a worker. Their keys begin with `first`; no other worker has their placement or their context.
fn add_blocks(index: &PrefixIndex, source: &str, first: u64, count: u64) {
    index.reset(source, 0, 1);
    let stream = index.stream(source, 0).unwrap();
    let mut stream = stream.lock();
    let mut writer = index.shared_lock.write();
    let placement = Placement {
        tier: source.into(),
        locality: None,
        ownership: None,
        group: 0,
    };
    let placement = stream.use_placement(&mut writer, placement).unwrap();
    assert!(stream.admit_scheme(&mut writer, SCHEME, placement));
    let context = Context {
        scheme: SCHEME,
        lora: 0,
        salt: first,
    };
    let context = writer.contexts.retain(context).unwrap();
    for key in first..first + count {
        let block = Block {
            hash: key + 1,
            key,
            local: 0,
            context,
            keyed: false,
            mixed_key: writer.mixed(key),
            mixed_hash: writer.mixed(key + 1),
        };
        stream.put(&mut writer, &block, &[(placement, Copies::ONE)], None).unwrap();
    }
    writer.contexts.release(context);
}

fn snapshot_of(index: &PrefixIndex, sources: &[&str]) -> Vec<u8> {
    let workers: HashSet<Worker> = sources.iter().map(|source| worker(source)).collect();
    index.save(Vec::new(), Some(&workers)).unwrap()
}

/// The number of blocks that each worker holds of the chain that begins with `first`.
fn held_blocks(index: &PrefixIndex, first: u64, count: u64) -> Vec<(String, u64)> {
    let keys: Vec<u64> = (first..first + count).collect();
    let hits = index.match_rolling_keys(&keys, Some(2), &None).unwrap();
    let held = |hit: &Hit| (hits.worker(hit).source.clone(), u64::from(hit.tokens[3] / 2));
    hits.hits.iter().map(held).collect()
}

/// The numbers of records, heads, contexts and streams of the shared state.
fn counts(index: &PrefixIndex) -> (usize, usize, usize, usize) {
    let shared = index.shared_lock.read();
    let members = shared.view.members.iter().flatten().count();
    (shared.records.len(), shared.view.heads.len(), shared.contexts.len(), members)
}

/// A reader that returns at most `size` bytes per call; each call first calls `before`.
struct ObservedReader<'a, F> {
    bytes: &'a [u8],
    size: usize,
    before: F,
}

impl<F: FnMut(usize)> Read for ObservedReader<'_, F> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (self.before)(self.bytes.len());
        let size = self.size.min(into.len());
        self.bytes.read(&mut into[..size])
    }
}

#[test]
fn a_stream_is_visible_only_when_complete_and_nothing_is_locked_during_reads() {
    let (from, into) = (index(), index());
    add_blocks(&from, "a", 1, 100_000);
    add_blocks(&from, "b", 1 << 32, 100_000);
    add_blocks(&into, "c", 1, 10);
    let content = snapshot_of(&from, &["a", "b"]);
    let (mut looks, mut most) = (0, 0);
    let before = |left| {
        looks += 1;
        assert_eq!(held_blocks(&into, 1, 100_000), [("c".into(), 10)]);
        assert_eq!(held_blocks(&into, 1 << 32, 100), []);
        assert!(into.stream("a", 0).is_none() && into.stream("b", 0).is_none());
        // Calls functions that together take every lock that a delivery takes.
        add_blocks(&into, "d", 1 << 40, left as u64 % 7);
        into.remove("d", None);
        into.admit("d", 0);
        most = most.max(counts(&into).0);
    };
    let came = into
        .absorb(ObservedReader {
            bytes: &content,
            size: 1 << 16,
            before,
        })
        .unwrap();
    assert_eq!(
        came.iter().map(|worker| worker.source.as_str()).collect::<Vec<_>>(),
        ["a", "b"]
    );
    assert!(looks > 40 && most > 100_000, "{looks} {most}");
    assert_eq!(held_blocks(&into, 1 << 32, 100_000), [("b".into(), 100_000)]);
    assert_eq!(held_blocks(&into, 1, 100_000), [("c".into(), 10), ("a".into(), 100_000)]);
}

#[test]
fn a_truncated_file_adds_nothing() {
    let (from, into) = (index(), index());
    for (at, source) in ["a", "b", "c"].into_iter().enumerate() {
        add_blocks(&from, source, 1 + (at as u64 / 2) * 5000, 3000);
    }
    add_blocks(&into, "mine", 1, 2000);
    let (content, before) = (snapshot_of(&from, &["a", "b", "c"]), counts(&into));
    for end in (0..content.len()).step_by(997).chain([content.len() - 1]) {
        assert!(into.absorb(&content[..end]).is_err());
        assert_eq!(counts(&into), before);
        assert_eq!(held_blocks(&into, 1, 3000), [("mine".into(), 2000)]);
    }
    assert_eq!(into.absorb(&content[..]).unwrap().len(), 3);
    assert_eq!(into.streams().len(), 4);
    assert!(into.absorb(&content[..]).is_err());
    for source in ["a", "b", "c"] {
        assert_eq!(into.remove(source, None), 3000);
    }
    assert_eq!(counts(&into), before);
}

#[test]
fn the_shared_state_is_locked_for_a_few_blocks_at_a_time() {
    let (from, into) = (index(), index());
    add_blocks(&from, "a", 1, 200_000);
    let content = snapshot_of(&from, &["a"]);
    let before = into.shared_lock.holds.load(Ordering::Relaxed);
    into.absorb(&content[..]).unwrap();
    let holds = into.shared_lock.holds.load(Ordering::Relaxed) - before;
    assert!(holds >= 200_000 / restore::BLOCKS_AT_ONCE, "{holds}");
}

#[test]
fn added_streams_keep_their_placements() {
    let (from, into) = (index(), index());
    for source in ["a", "b", "c"] {
        add_blocks(&from, source, 1, 10);
    }
    into.absorb(&snapshot_of(&from, &["c"])[..]).unwrap();
    let tiers: Vec<String> = into
        .shared_lock
        .read()
        .view
        .placements
        .iter()
        .map(|(_, placement)| placement.tier.clone())
        .collect();
    assert_eq!(tiers, ["c"]);
}

// --- counted steps

/// A worker of a generated index. The position in the list of workers is the worker's number.
#[derive(Clone, Debug, Default)]
struct ModelWorker {
    /// The hash and the placements of each block, by its key.
    blocks: BTreeMap<u64, (u64, BTreeSet<u8>)>,
    /// The number of tokens of each block that waits for its parent.
    waiting: Vec<u8>,
}

fn workers() -> impl Strategy<Value = Vec<ModelWorker>> {
    let hash = prop_oneof![3 => Just(None), 1 => (0..3_u64).prop_map(Some)];
    let block = (0..40_u64, hash, prop::collection::btree_set(0..6_u8, 1..5));
    let blocks = prop::collection::vec(block, 1..30);
    let worker = (blocks, 1..4_u64, prop::collection::vec(0..=255_u8, 0..4));
    let worker = worker.prop_map(|(blocks, hashes, waiting)| {
        let usual = |key| 1_000 * hashes + key;
        let blocks = blocks.into_iter();
        let blocks = blocks.map(|(key, hash, placements)| (key, (hash.unwrap_or_else(|| usual(key)), placements)));
        ModelWorker {
            blocks: blocks.collect(),
            waiting,
        }
    });
    prop::collection::vec(worker, 1..5)
}

fn name(number: usize) -> String {
    format!("worker{number}")
}

fn placement(number: u8) -> Placement {
    Placement {
        tier: format!("tier{number}"),
        locality: None,
        ownership: None,
        group: 0,
    }
}

/// Creates an index with the blocks of a worker. The first block has two copies on its first placement, so that the placements of each block
/// are examined.
fn add_worker(index: &PrefixIndex, number: usize, model: &ModelWorker) {
    index.reset(&name(number), 0, 1);
    let stream = index.stream(&name(number), 0).unwrap();
    let (mut stream, mut writer) = (stream.lock(), index.shared_lock.write());
    let context = Context {
        scheme: SCHEME,
        lora: 0,
        salt: 0,
    };
    let context = writer.contexts.retain(context).unwrap();
    for (at, (&key, (hash, placements))) in model.blocks.iter().enumerate() {
        let placements: Vec<(u16, Copies)> = (placements.iter().enumerate())
            .map(|(place, &number)| {
                let copies = if at + place == 0 {
                    Copies { least: 2, most: 2 }
                } else {
                    Copies::ONE
                };
                (stream.use_placement(&mut writer, placement(number)).unwrap(), copies)
            })
            .collect();
        let block = Block {
            hash: *hash,
            key,
            local: 0,
            context,
            keyed: false,
            mixed_key: writer.mixed(key),
            mixed_hash: writer.mixed(*hash),
        };
        stream.put(&mut writer, &block, &placements, None).unwrap();
    }
    let (place, _) = stream.held().next().unwrap();
    for (at, &tokens) in model.waiting.iter().enumerate() {
        let content = Content {
            tokens: vec![7; tokens.into()].into(),
            extras: [].into(),
            scheme: SCHEME,
            lora: 0,
            salt: None,
        };
        let waiting = Waiting {
            hash: 90_000 + at as u64,
            placement: place,
            awaited: 80_000,
            content: Some(content),
        };
        stream.waiting.push_within(waiting, 1_000, 1 << 20);
    }
    writer.contexts.release(context);
}

/// The placements of any worker that a model's block has: the number of words of its set of holders, as long as there are few workers.
fn words_of(workers: &[ModelWorker], key: u64) -> usize {
    let holders = workers.iter().filter_map(|worker| worker.blocks.get(&key));
    holders.flat_map(|(_, placements)| placements).collect::<BTreeSet<_>>().len()
}

/// Number of a worker's blocks whose hash differs from the hash under which the first worker stored them.
fn foreign_of(workers: &[ModelWorker], worker: &ModelWorker) -> usize {
    let first = |key| {
        workers
            .iter()
            .find_map(|worker| worker.blocks.get(key))
            .map(|(hash, _)| *hash)
    };
    worker
        .blocks
        .iter()
        .filter(|(key, (hash, _))| first(key) != Some(*hash))
        .count()
}

/// Number of a worker's blocks that have the hash of another block.
fn several_of(worker: &ModelWorker) -> usize {
    let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
    worker
        .blocks
        .values()
        .for_each(|(hash, _)| *counts.entry(*hash).or_default() += 1);
    counts.into_values().filter(|&count| count > 1).sum()
}

/// Asserts that an export counts at least the items that it examines and writes. `windows` is the number of parts of the index in which
/// blocks with other hashes are searched.
fn check_counted_steps(workers: &[ModelWorker], windows: impl Fn(usize) -> usize) {
    let index = index();
    for (number, worker) in workers.iter().enumerate() {
        add_worker(&index, number, worker);
    }
    let bound = index.shared_lock.read().records.bound() as usize;
    let (mut written, mut saved) = (BTreeSet::new(), 0);
    for (number, worker) in workers.iter().enumerate() {
        let words: usize = worker.blocks.keys().map(|&key| words_of(workers, key)).sum();
        step_counter::taken();
        index.blocks(&name(number), 0);
        let (listed, least) = (step_counter::taken().taken, worker.blocks.len() + words);
        assert!(listed >= least, "{listed} steps of at least {least}");

        let placements = worker.blocks.values().flat_map(|(_, placements)| placements);
        let mut named: BTreeSet<u8> = BTreeSet::new();
        for &placement in placements.filter(|&&placement| named.insert(placement)) {
            saved += 1 + written.len();
            written.insert(placement);
        }
        let foreign = foreign_of(workers, worker);
        let waiting: usize = worker.waiting.iter().map(|&tokens| 1 + usize::from(tokens) / 64).sum();
        saved += bound.div_ceil(64) + windows(foreign) * foreign + worker.blocks.len() + words + several_of(worker) + waiting;
    }
    step_counter::taken();
    index.save(io::sink(), None).unwrap();
    let taken = step_counter::taken().taken;
    assert!(taken >= saved, "{taken} steps of at least {saved}");
}

proptest! {
    #[test]
    fn an_export_counts_what_it_examines(workers in workers()) {
        check_counted_steps(&workers, |_| 1);
    }
}

/// Many blocks with other hashes: the blocks are searched in two parts of the index.
#[test]
fn an_export_counts_each_part_of_the_index() {
    const BLOCKS: u64 = 70_000;
    let worker = |hash: u64| ModelWorker {
        blocks: (0..BLOCKS).map(|key| (key, (hash + key, BTreeSet::from([0])))).collect(),
        waiting: Vec::new(),
    };
    check_counted_steps(&[worker(0), worker(BLOCKS)], |foreign| if foreign > 0 { 2 } else { 1 });
}
