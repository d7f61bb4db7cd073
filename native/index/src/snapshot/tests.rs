//! Tests of adding a snapshot to an index that other threads use.

use std::collections::HashSet;
use std::io::{self, Read};
use std::sync::atomic::Ordering;

use super::*;
use crate::holders::contexts::Context;
use crate::holders::copies::Copies;
use crate::holders::placements::Placement;
use crate::keys::Scheme;
use crate::limits::Limits;
use crate::lookup::matching::Hit;
use crate::prefix_index::PrefixIndex;
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
