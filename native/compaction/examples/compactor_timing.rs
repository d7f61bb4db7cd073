//! Measures the compactor: the median time for a payload that stores blocks of 16 tokens, and for a payload that removes these blocks,
//! while the number of live blocks stays the same; and the time of scanning without compaction. Then measures the time to encode all live
//! blocks as payloads, and to apply these payloads to an empty compactor.
//!
//! `cargo run --release -p kvevents-compaction --example compactor_timing`

use std::time::Instant;

use kvevents_compaction::Compactor;
use kvevents_index::wire::scan::{Limits, Schema, Scratch, scan};

/// Number of tokens per block.
const SIZE: usize = 16;
/// Number of blocks that stay live during the measurement.
const LIVE: usize = 200_000;

/// A small generator of pseudo-random numbers, sufficient for test data.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed ^ (mixed >> 29)
    }
}

fn array(out: &mut Vec<u8>, length: usize) {
    out.push(0xDC);
    out.extend((length as u16).to_be_bytes());
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(0xA0 | text.len() as u8);
    out.extend(text.as_bytes());
}

fn hashes(out: &mut Vec<u8>, hashes: &[u64]) {
    text(out, "block_hashes");
    array(out, hashes.len());
    for hash in hashes {
        out.push(0xCF);
        out.extend(hash.to_be_bytes());
    }
}

/// A batch of one map event.
fn batch(pairs: u8, tag: &str, fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = vec![0x93, 0xCB];
    out.extend(1.7e9_f64.to_be_bytes());
    out.extend([0x91, 0x80 | pairs]);
    text(&mut out, "type");
    text(&mut out, tag);
    fill(&mut out);
    out.push(0);
    out
}

fn stored(blocks: &[u64], parent: Option<u64>, random: &mut Random) -> Vec<u8> {
    batch(6, "BlockStored", |out| {
        hashes(out, blocks);
        text(out, "parent_block_hash");
        match parent {
            None => out.push(0xC0),
            Some(hash) => {
                out.push(0xCF);
                out.extend(hash.to_be_bytes());
            }
        }
        text(out, "token_ids");
        array(out, blocks.len() * SIZE);
        for _ in 0..blocks.len() * SIZE {
            out.push(0xCD);
            out.extend((256 + random.next() as u16 % 50_000).to_be_bytes());
        }
        text(out, "block_size");
        out.push(SIZE as u8);
        text(out, "medium");
        text(out, "GPU");
    })
}

fn removed(blocks: &[u64]) -> Vec<u8> {
    batch(3, "BlockRemoved", |out| {
        hashes(out, blocks);
        text(out, "medium");
        text(out, "GPU");
    })
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn timed(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64() * 1e6
}

fn main() {
    let schema = Schema::new(Limits::default()).expect("the limits are high enough");
    for blocks in [1, 32, 512] {
        let mut random = Random(7);
        let live_runs = LIVE / blocks;
        let runs: Vec<Vec<u64>> = (0..2 * live_runs)
            .map(|_| (0..blocks).map(|_| random.next()).collect())
            .collect();
        let parent = |at: usize| (!at.is_multiple_of(20)).then(|| runs[at - 1][blocks - 1]);
        let stores: Vec<Vec<u8>> = (0..runs.len()).map(|at| stored(&runs[at], parent(at), &mut random)).collect();
        let removals: Vec<Vec<u8>> = runs
            .iter()
            .map(|run| removed(&run.iter().rev().copied().collect::<Vec<_>>()))
            .collect();
        let mut compactor = Compactor::default();
        let mut scratch = Scratch::default();
        let (mut store, mut remove, mut alone) = (Vec::new(), Vec::new(), Vec::new());
        for (at, payload) in stores.iter().enumerate() {
            let took = timed(|| compactor.apply(payload, &schema));
            if at >= live_runs {
                store.push(took);
                remove.push(timed(|| compactor.apply(&removals[at - live_runs], &schema)));
                alone.push(timed(|| assert!(scan(payload, &schema, &mut scratch).is_some())));
            }
        }
        println!(
            "{blocks} blocks in {} bytes: store {:.3} us (of which scanning {:.3}), removal {:.3} us; {} live, {:.0} bytes a block",
            stores[0].len(),
            median(store),
            median(alone),
            median(remove),
            compactor.live(),
            compactor.bytes() as f64 / compactor.live() as f64,
        );
        let start = Instant::now();
        let payloads = compactor.payloads(8 << 20, 1.7e9).unwrap_or_default();
        let encoded = start.elapsed().as_secs_f64() * 1e3;
        let (mut again, start) = (Compactor::default(), Instant::now());
        payloads.iter().for_each(|payload| again.apply(payload, &schema));
        assert_eq!(again.live(), compactor.live());
        println!(
            "  encoded in {} bytes, {encoded:.1} ms; applied again, {:.1} ms",
            payloads.iter().map(Vec::len).sum::<usize>(),
            start.elapsed().as_secs_f64() * 1e3,
        );
    }
}
