//! Measures a thread that looks up a prompt while a second thread applies payloads at full speed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::measure::{cpu_of_others, median, percentile};
use crate::sides::{ChainIndexSide, Crtc, Find, Ours, Positional, SIDES, Script, Shared};
use crate::table::{Row, short};
use crate::workload::{BLOCK, CHAIN, Chain, Holdings, Random};

/// Number of workers that hold the prompt.
const HOLDERS: u32 = 16;
/// Number of blocks in each event of the writer.
const EVENT: usize = 32;
/// Number of chains; the writer stores all chains, and then removes all of them.
const WRITTEN: usize = 64;
/// Time between two checks of whether the writer must stop.
const LOOK: Duration = Duration::from_micros(200);

/// Maximum number of CPUs that other programs may use during a measurement; above it, the row is not judged.
const OTHERS: f64 = 0.15;

const WAITS: u8 = 0;
const WRITES: u8 = 1;
const ENDS: u8 = 2;

/// The state that the two threads share.
#[derive(Default)]
struct Control {
    state: AtomicU8,
    blocks: AtomicU64,
}

/// A script that fills the index, reports the end of this phase, and writes until it is stopped.
struct Writer<I> {
    fill: I,
    payload: Vec<u8>,
    filled: Option<Sender<()>>,
    cycle: Vec<Vec<u8>>,
    at: usize,
    control: Arc<Control>,
}

impl<I: Iterator<Item = (u32, Vec<u8>)>> Script for Writer<I> {
    fn next(&mut self, _: &dyn Find) -> Option<(u32, &[u8])> {
        if self.filled.is_some() {
            if let Some((worker, payload)) = self.fill.next() {
                self.payload = payload;
                return Some((worker, &self.payload));
            }
            let _ = self.filled.take()?.send(());
        }
        loop {
            match self.control.state.load(Ordering::Relaxed) {
                WRITES => break,
                ENDS => return None,
                _ => thread::sleep(LOOK),
            }
        }
        self.control.blocks.fetch_add(EVENT as u64, Ordering::Relaxed);
        self.at = (self.at + 1) % self.cycle.len();
        Some((HOLDERS, &self.cycle[self.at]))
    }
}

/// Medians over the rounds: microseconds per lookup, and millions of blocks per second.
struct Found {
    alone: [f64; 2],
    beside: [f64; 2],
    writes_alone: f64,
    writes_beside: f64,
    /// Number of CPUs that other programs used while the two threads ran.
    others: f64,
}

/// Repeats lookups for some time, and returns the median and the 99th percentile in microseconds.
fn reads(reader: &impl Find, prompt: &[u32], expected: u64, span: Duration) -> [f64; 2] {
    let (start, mut times) = (Instant::now(), Vec::new());
    while start.elapsed() < span {
        let before = Instant::now();
        let found = reader.find(prompt);
        times.push(before.elapsed().as_nanos() as f64 / 1e3);
        assert_eq!(found, expected, "the writer has nothing to do with this prompt");
    }
    [percentile(&mut times, 0.5), percentile(&mut times, 0.99)]
}

fn measure<S: Shared>(tokens: usize, rounds: usize, span: Duration) -> Found {
    eprintln!("{} beside a writer, {tokens} tokens ...", S::NAME);
    let mut random = Random(8);
    let chain = Chain::new(&mut random, tokens / BLOCK as usize, BLOCK);
    let (prompt, expected) = (chain.tokens.clone(), u64::from(HOLDERS) * chain.blocks() as u64);
    let written: Vec<_> = (0..WRITTEN).map(|_| Chain::new(&mut random, CHAIN, BLOCK)).collect();
    let stores = written.iter().flat_map(|chain| chain.stores(EVENT));
    let cycle: Vec<_> = stores.chain(written.iter().flat_map(|chain| chain.removals(EVENT))).collect();
    let control = Arc::new(Control::default());
    let (filled, ready) = channel();
    let (readers, made) = channel();
    let script = Writer {
        fill: Holdings::whole(vec![chain], HOLDERS).payloads(),
        payload: Vec::new(),
        filled: Some(filled),
        at: cycle.len() - 1,
        cycle,
        control: control.clone(),
    };
    let writer = thread::spawn(move || {
        let mut side = S::new(HOLDERS + 1, BLOCK);
        let _ = readers.send(side.reader());
        side.run(script);
    });
    let reader = made.recv().expect("the writer has an index");
    ready.recv().expect("the index was filled");
    let writing = |work: &mut dyn FnMut()| {
        control.state.store(WRITES, Ordering::Relaxed);
        thread::sleep(LOOK * 10);
        let (before, working, start) = (control.blocks.load(Ordering::Relaxed), cpu_of_others(), Instant::now());
        work();
        let seconds = start.elapsed().as_secs_f64();
        let rate = (control.blocks.load(Ordering::Relaxed) - before) as f64 / seconds / 1e6;
        let others = (cpu_of_others() - working) / seconds;
        control.state.store(WAITS, Ordering::Relaxed);
        thread::sleep(LOOK * 10);
        (rate, others)
    };
    let mut all: [Vec<f64>; 7] = Default::default();
    for _ in 0..rounds {
        let alone = reads(&reader, &prompt, expected, span);
        let mut beside = [0.0; 2];
        let (together, others) = writing(&mut || beside = reads(&reader, &prompt, expected, span));
        let (by_itself, _) = writing(&mut || thread::sleep(span));
        let values = [alone[0], alone[1], beside[0], beside[1], by_itself, together, others];
        all.iter_mut().zip(values).for_each(|(all, value)| all.push(value));
    }
    control.state.store(ENDS, Ordering::Relaxed);
    writer.join().expect("the writer has ended");
    let [p50, p99, p50_beside, p99_beside, writes_alone, writes_beside, others] = all.map(|mut values| median(&mut values));
    Found {
        alone: [p50, p99],
        beside: [p50_beside, p99_beside],
        writes_alone,
        writes_beside,
        others,
    }
}

/// Returns the rows with microseconds per lookup and millions of blocks per second, for each thread alone and for both together.
pub fn rows(quick: bool) -> Vec<Row> {
    let (rounds, span) = if quick { (1, 100) } else { (7, 300) };
    let span = Duration::from_millis(span);
    let mut rows = Vec::new();
    for (tokens, name) in [(1_024, "1,024"), (32_768, "32,768")] {
        let ours = measure::<Ours>(tokens, rounds, span);
        let others = [
            None,
            Some(measure::<Crtc>(tokens, rounds, span)),
            Some(measure::<Positional>(tokens, rounds, span)),
            Some(measure::<ChainIndexSide>(tokens, rounds, span)),
        ];
        assert_eq!(others.len() + 1, SIDES.len());
        let cells = |pair: fn(&Found) -> (f64, f64)| -> Vec<String> {
            let cell = |(alone, beside)| format!("{} -> {}", short(alone), short(beside));
            let others = others
                .iter()
                .map(|found| found.as_ref().map_or(String::new(), |found| cell(pair(found))));
            std::iter::once(cell(pair(&ours))).chain(others).collect()
        };
        let row = |what: &str, pair: fn(&Found) -> (f64, f64), limit: f64, at_least: bool| {
            let (alone, beside) = pair(&ours);
            let row = Row::new(format!("{name} tokens: {what}, alone -> together"), cells(pair));
            if ours.others > OTHERS {
                return row.unjudged(format!("not judged: other programs took {} CPUs", short(ours.others)));
            }
            row.judged(beside / alone, limit, at_least, "of alone")
        };
        rows.push(row("match p50 (us)", |found| (found.alone[0], found.beside[0]), 1.1, false));
        rows.push(row("match p99 (us)", |found| (found.alone[1], found.beside[1]), 1.1, false));
        rows.push(row(
            "M blocks/s",
            |found| (found.writes_alone, found.writes_beside),
            0.9,
            true,
        ));
    }
    rows
}
