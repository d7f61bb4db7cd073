//! Measures the time to apply the payloads of one worker.

use std::sync::Arc;
use std::time::Duration;

use crate::measure::{cpu, median};
use crate::sides::{self, Find, SIDES, Script, Side, Visit};
use crate::table::{Reach, Row};
use crate::workload::{BLOCK, CHAIN, Chain, Random};

/// Batches that are applied in order.
type Batches = Arc<Vec<Vec<u8>>>;

/// A script that applies several parts, and measures the CPU time of each part.
struct Parts {
    parts: Vec<Batches>,
    part: usize,
    at: usize,
    since: Duration,
    times: Vec<Duration>,
}

impl Script for Parts {
    fn next(&mut self, _: &dyn Find) -> Option<(u32, &[u8])> {
        if self.at == 0 && self.part == 0 {
            self.since = cpu();
        }
        while self.part < self.parts.len() && self.at == self.parts[self.part].len() {
            let now = cpu();
            self.times.push(now - self.since);
            (self.since, self.part, self.at) = (now, self.part + 1, 0);
        }
        let payload = self.parts.get(self.part)?.get(self.at)?;
        self.at += 1;
        Some((0, payload))
    }
}

/// The payloads of one index: payloads that are applied before the measurement, then stores, then removals of the same blocks.
struct Life {
    per_event: usize,
    blocks: usize,
    parts: [Batches; 3],
}

impl Life {
    fn new(chains: &[Chain], measured: usize, per_event: usize) -> Self {
        let (before, measured) = chains.split_at(chains.len() - measured);
        let stores = |chains: &[Chain], per_event| chains.iter().flat_map(|chain| chain.stores(per_event)).collect();
        let removals = measured.iter().flat_map(|chain| chain.removals(per_event)).collect();
        Self {
            per_event,
            blocks: measured.iter().map(Chain::blocks).sum(),
            parts: [stores(before, CHAIN), stores(measured, per_event), removals].map(Arc::new),
        }
    }
}

/// One run, with its nanoseconds per block for stores and for removals.
struct Run<'a>(&'a Life, [f64; 2]);

impl Visit for Run<'_> {
    fn visit<S: Side>(&mut self) {
        let Self(life, found) = self;
        let overhead = S::overhead();
        let script = Parts {
            parts: life.parts.to_vec(),
            part: 0,
            at: 0,
            since: Duration::ZERO,
            times: Vec::new(),
        };
        let times = S::new(1, BLOCK).run(script).times;
        for (at, found) in found.iter_mut().enumerate() {
            let whole = times[at + 1].as_nanos() as f64 - overhead * life.parts[at + 1].len() as f64;
            *found = whole / life.blocks as f64;
        }
    }
}

/// Returns the rows with nanoseconds per block.
pub fn rows(quick: bool) -> Vec<Row> {
    let (all, runs) = if quick { (32_usize, 3) } else { (512, 5) };
    let mut random = Random(6);
    let chains: Vec<_> = (0..all).map(|_| Chain::new(&mut random, CHAIN, BLOCK)).collect();
    let mut rows = [Vec::new(), Vec::new()];
    for (per_event, measured) in [(1, all.div_ceil(10)), (32, all), (512, all)] {
        eprintln!("apply {per_event} per event ...");
        let life = Life::new(&chains, measured, per_event);
        let mut times = vec![[Vec::new(), Vec::new()]; SIDES.len()];
        for run in 0..runs {
            for turn in 0..SIDES.len() {
                let side = (turn + run) % SIDES.len();
                let mut found = Run(&life, [0.0; 2]);
                sides::visit(side, &mut found);
                times[side].iter_mut().zip(found.1).for_each(|(times, time)| times.push(time));
            }
        }
        for (at, what) in ["wire to applied", "removed"].into_iter().enumerate() {
            let figures: Vec<_> = times.iter_mut().map(|times| Some(median(&mut times[at]))).collect();
            let blocks = if life.per_event == 1 { "block" } else { "blocks" };
            let what = format!("{what}, {} {blocks} an event", life.per_event);
            rows[at].push(Row::least(what, &figures, Reach::ChainIndex(1.0)));
        }
    }
    rows.concat()
}
