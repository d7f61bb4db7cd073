//! Measures the scanner: nanoseconds per block of 16 tokens and per event, the best of many runs; and, to compare, the time to read the
//! token ids one by one.
//!
//! `cargo run --release --no-default-features --example scan_timing`

use std::hint::black_box;
use std::time::Instant;

use kvevents_index::wire::msgpack::Reader;
use kvevents_index::wire::scan::{Limits, Schema, Scratch, scan};

/// A small generator of pseudo-random numbers, sufficient for test data.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn uniform(&mut self) -> u32 {
        (self.next() % 128_256) as u32
    }

    /// One token in ten is below 256; the logarithm of the other tokens is uniform.
    fn skewed(&mut self) -> u32 {
        if self.next().is_multiple_of(10) {
            return (self.next() % 256) as u32;
        }
        let unit = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        (256.0 * (128_256.0_f64 / 256.0).powf(unit)) as u32
    }
}

fn array(out: &mut Vec<u8>, length: usize) {
    match length {
        0..=15 => out.push(0x90 | length as u8),
        _ => {
            out.push(0xDC);
            out.extend((length as u16).to_be_bytes());
        }
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.push(0xA0 | text.len() as u8);
    out.extend(text.as_bytes());
}

fn token(out: &mut Vec<u8>, value: u32) {
    match value {
        0..=0x7F => out.push(value as u8),
        0x80..=0xFF => out.extend([0xCC, value as u8]),
        0x100..=0xFFFF => {
            out.push(0xCD);
            out.extend((value as u16).to_be_bytes());
        }
        _ => {
            out.push(0xCE);
            out.extend(value.to_be_bytes());
        }
    }
}

fn hash(out: &mut Vec<u8>, random: &mut Random) {
    out.push(0xCF);
    out.extend((random.next() | 1 << 63).to_be_bytes());
}

fn event(out: &mut Vec<u8>, blocks: usize, map: bool, random: &mut Random, draw: fn(&mut Random) -> u32) {
    let key = |out: &mut Vec<u8>, name: &str| {
        if map {
            text(out, name);
        }
    };
    out.push(if map { 0x8B } else { 0x9A + 1 });
    key(out, "type");
    text(out, "BlockStored");
    key(out, "block_hashes");
    array(out, blocks);
    (0..blocks).for_each(|_| hash(out, random));
    key(out, "parent_block_hash");
    hash(out, random);
    key(out, "token_ids");
    array(out, blocks * 16);
    (0..blocks * 16).for_each(|_| token(out, draw(random)));
    key(out, "block_size");
    out.push(16);
    key(out, "lora_id");
    out.push(0xC0);
    key(out, "medium");
    text(out, "GPU");
    key(out, "lora_name");
    out.push(0xC0);
    key(out, "extra_keys");
    array(out, blocks);
    (0..blocks).for_each(|_| out.push(0xC0));
    key(out, "group_idx");
    out.push(0);
    key(out, "kv_cache_spec_kind");
    text(out, "full_attention");
}

fn batch(events: usize, blocks: usize, map: bool, random: &mut Random, draw: fn(&mut Random) -> u32) -> Vec<u8> {
    let mut out = vec![0x93, 0xCB];
    out.extend(1_700_000_000.25_f64.to_be_bytes());
    array(&mut out, events);
    (0..events).for_each(|_| event(&mut out, blocks, map, random, draw));
    out.push(0);
    out
}

/// Returns the shortest time of many rounds over all payloads, in nanoseconds per payload.
fn timed(payloads: &[Vec<u8>], mut read: impl FnMut(&[u8])) -> f64 {
    let rounds = (0..30).map(|_| {
        let start = Instant::now();
        payloads.iter().for_each(|payload| read(black_box(payload)));
        start.elapsed().as_secs_f64() * 1e9 / payloads.len() as f64
    });
    rounds.fold(f64::INFINITY, f64::min)
}

/// Returns the nanoseconds per block for reading the token ids of 512 blocks.
fn one_by_one(random: &mut Random, draw: fn(&mut Random) -> u32) -> f64 {
    let tokens = |_| {
        let mut out = Vec::new();
        (0..512 * 16).for_each(|_| token(&mut out, draw(random)));
        out
    };
    let payloads: Vec<Vec<u8>> = (0..40).map(tokens).collect();
    let mut found = Vec::with_capacity(512 * 16);
    let each = |payload: &[u8]| {
        let mut reader = Reader::new(payload, 0);
        found.clear();
        while let Some(token) = reader.int() {
            found.push(token.as_i128() as u32);
        }
        assert_eq!(found.len(), 512 * 16);
    };
    timed(&payloads, each) / 512.0
}

fn main() {
    let schema = Schema::new(Limits::default()).expect("the limits are high enough");
    let mut scratch = Scratch::default();
    for (name, draw) in [
        ("uniform", Random::uniform as fn(&mut Random) -> u32),
        ("skewed", Random::skewed),
    ] {
        for (events, blocks, map) in [
            (1, 512, true),
            (1, 512, false),
            (1, 32, true),
            (1, 1, true),
            (1, 1, false),
            (64, 1, true),
        ] {
            // Many payloads in turn, so that the branch predictor does not learn a single payload.
            let random = &mut Random(7);
            let payloads: Vec<_> = (0..2_000_usize.min(20_000 / (events * blocks)))
                .map(|_| batch(events, blocks, map, random, draw))
                .collect();
            let bytes = payloads.iter().map(Vec::len).sum::<usize>() / payloads.len();
            let whole = |payload: &[u8]| {
                black_box(scan(payload, &schema, &mut scratch)).expect("the batch is of a known shape");
            };
            let best = timed(&payloads, whole) / events as f64;
            let form = if map { "map" } else { "array" };
            println!(
                "{name:8} {events:3} x {blocks:3} blocks, {form:5}, {bytes:6} bytes: {best:8.1} ns an event, {:6.1} a block",
                best / blocks as f64
            );
        }
        let alone = one_by_one(&mut Random(7), draw);
        println!("{name:8} token ids of 512 blocks one by one: {alone:.1} ns a block");
    }
}
