//! Measures the resident memory per block. Each side runs in a process of its own, with the system's allocator.

use std::process::Command;

use crate::allocator;
use crate::sides::{self, ChainIndexSide, Find, SIDES, Script, Side, Visit};
use crate::table::{Row, short};
use crate::workload::{BLOCK, CHAIN, Chain, Random};

/// Factors of sizes at which memory is read, from a size to almost its double: a table that doubles is full at some sizes and half empty at
/// others.
const SIZES: [f64; 5] = [1.0, 1.15, 1.32, 1.52, 1.74];
/// Number of blocks at the smallest size.
const BLOCKS: usize = 1 << 20;
/// kv-index 2.0.0 panics at the 262,145th child of a node.
const CHAIN_INDEX_ROOTS: usize = 150_000;

/// The form of the stored data: number of blocks per chain, number of blocks per event, and number of workers that hold each chain.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    words: &'static str,
    chain: usize,
    per_event: usize,
    workers: u32,
    reach: f64,
}

const SHAPES: [Shape; 4] = [
    Shape {
        name: "long",
        words: "chains of 2,048",
        chain: CHAIN,
        per_event: 512,
        workers: 1,
        reach: 36.0,
    },
    Shape {
        name: "short",
        words: "chains of 8",
        chain: 8,
        per_event: 1,
        workers: 1,
        reach: 40.0,
    },
    Shape {
        name: "roots",
        words: "lone roots",
        chain: 1,
        per_event: 1,
        workers: 1,
        reach: 48.0,
    },
    Shape {
        name: "shared",
        words: "a block and worker, 16 share",
        chain: CHAIN,
        per_event: 512,
        workers: 16,
        reach: 12.0,
    },
];

/// Returns the resident bytes of this process.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("this is Linux");
    let pages: usize = text
        .split(' ')
        .nth(1)
        .and_then(|pages| pages.parse().ok())
        .expect("it has a second number");
    // SAFETY: a question without arguments that have to be valid.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    pages * page as usize
}

/// A script that adds blocks to an index, and records the index's memory at each size.
struct Grow {
    shape: Shape,
    random: Random,
    sizes: Vec<usize>,
    before: usize,
    /// Total number of blocks of all workers.
    held: usize,
    chain: Chain,
    worker: u32,
    from: usize,
    payload: Vec<u8>,
    bytes: Vec<f64>,
}

impl Script for Grow {
    fn next(&mut self, _: &dyn Find) -> Option<(u32, &[u8])> {
        if self.from == self.chain.blocks() {
            (self.from, self.worker) = (0, self.worker + 1);
            if self.worker >= self.shape.workers {
                if self.held >= self.sizes[self.bytes.len()] {
                    self.bytes.push((resident() - self.before) as f64 / self.held as f64);
                    if self.bytes.len() == self.sizes.len() {
                        return None;
                    }
                }
                (self.worker, self.chain) = (0, Chain::new(&mut self.random, self.shape.chain, BLOCK));
            }
        }
        let to = self.chain.blocks().min(self.from + self.shape.per_event);
        self.payload = self.chain.store(self.from, to);
        self.held += to - self.from;
        self.from = to;
        Some((self.worker, &self.payload))
    }
}

struct Grown {
    shape: Shape,
    blocks: usize,
    bytes: Vec<f64>,
}

impl Visit for Grown {
    fn visit<S: Side>(&mut self) {
        let script = Grow {
            shape: self.shape,
            random: Random(9),
            sizes: SIZES.iter().map(|size| (size * self.blocks as f64) as usize).collect(),
            before: resident(),
            held: 0,
            chain: Chain::default(),
            worker: self.shape.workers,
            from: 0,
            payload: Vec::new(),
            bytes: Vec::new(),
        };
        self.bytes = S::new(self.shape.workers, BLOCK).run(script).bytes;
    }
}

/// The first argument with which this program runs as the process of one side.
pub const GROW: &str = "grow";

/// Prints the bytes per block at each size; called in the process of one side.
pub fn grow(arguments: &mut impl Iterator<Item = String>) {
    let [side, shape, blocks] = [(); 3].map(|()| arguments.next().expect("grow SIDE SHAPE BLOCKS"));
    let number = SIDES.iter().position(|name| *name == side).expect("it is the name of a side");
    let shape = *SHAPES
        .iter()
        .find(|known| known.name == shape)
        .expect("it is the name of a shape");
    let blocks = blocks.parse().expect("it is a number of blocks");
    let mut grown = Grown {
        shape,
        blocks,
        bytes: Vec::new(),
    };
    sides::visit(number, &mut grown);
    let words: Vec<_> = grown.bytes.iter().map(f64::to_string).collect();
    println!("{}", words.join(" "));
}

/// Returns the rows with bytes per block. The maximum over all sizes is judged.
pub fn rows(quick: bool) -> Vec<Row> {
    let program = std::env::current_exe().expect("this program has a path");
    let measure = |side: &str, shape: &Shape| -> Vec<f64> {
        let mut blocks = if quick { BLOCKS / 16 } else { BLOCKS };
        if shape.chain == 1 && side == ChainIndexSide::NAME {
            blocks = blocks.min(CHAIN_INDEX_ROOTS);
        }
        eprintln!("memory of {side}, {} ...", shape.words);
        let mut command = Command::new(&program);
        command.args([GROW, side, shape.name, &blocks.to_string()]);
        let output = allocator::use_system(&mut command)
            .output()
            .expect("this program can be started");
        assert!(output.status.success(), "{side}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.split_whitespace()
            .map(|word| word.parse().expect("it prints numbers"))
            .collect()
    };
    let row = |shape: &Shape| {
        let range = |values: Vec<f64>| {
            let least = values.iter().copied().fold(f64::INFINITY, f64::min);
            (least, values.iter().copied().fold(0.0, f64::max))
        };
        let ranges: Vec<_> = SIDES.iter().map(|side| range(measure(side, shape))).collect();
        let cells = ranges
            .iter()
            .map(|(least, most)| format!("{} - {}", short(*least), short(*most)));
        let row = Row::new(shape.words.to_owned(), cells.collect());
        row.judged(ranges[0].1, shape.reach, false, "bytes")
    };
    SHAPES.iter().map(row).collect()
}
