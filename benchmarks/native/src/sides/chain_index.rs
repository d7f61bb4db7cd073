//! `ChainIndex` of kv-index 2.0.0, the index of SMG (the SGLang gateway) for engines that send events. The index cannot read payloads, so
//! our scanner reads them. Hashes are computed by the index's own functions.

use std::cell::RefCell;
use std::sync::Arc;

use kv_index::{ChainBlockMap, ChainIndex, SequenceHash, StoredBlock, compute_content_hash, compute_request_content_hashes};

use super::ours::{Event, Scanner};
use super::{Find, Scores, Script, Shared, Side};

thread_local! {
    static ANSWER: RefCell<Vec<(u32, u32)>> = RefCell::default();
}

/// SMG's index.
pub struct ChainIndexSide {
    reader: Reader,
    /// The blocks of each worker.
    maps: Vec<ChainBlockMap>,
    scanner: Scanner,
    blocks: Vec<StoredBlock>,
    removed: Vec<SequenceHash>,
}

/// The lookups of SMG's index.
#[derive(Clone)]
pub struct Reader {
    index: Arc<ChainIndex>,
    /// The number that the index has given to each worker.
    numbers: Arc<[u32]>,
    size: usize,
}

impl ChainIndexSide {
    fn apply(&mut self, worker: u32, payload: &[u8]) {
        let Reader { index, numbers, size } = &self.reader;
        let (number, map) = (numbers[worker as usize], &mut self.maps[worker as usize]);
        for event in self.scanner.read(payload) {
            match event {
                Event::Stored { parent, hashes, tokens } => {
                    self.blocks.clear();
                    let blocks = hashes.iter().zip(tokens.chunks_exact(*size));
                    self.blocks.extend(blocks.map(|(&hash, tokens)| StoredBlock {
                        seq_hash: SequenceHash(hash),
                        content_hash: compute_content_hash(tokens),
                    }));
                    let applied = index.apply_stored(number, &self.blocks, parent.map(SequenceHash), map);
                    applied.expect("every parent is there");
                }
                Event::Removed(hashes) => {
                    self.removed.clear();
                    self.removed.extend(hashes.iter().map(|&hash| SequenceHash(hash)));
                    index.apply_removed(number, &self.removed, map);
                }
            }
        }
    }
}

impl Reader {
    /// The answer as the documentation of the index suggests to callers with their own type of result; the index allocates no memory for
    /// it.
    fn answer<R>(&self, tokens: &[u32], read: impl FnOnce(&[(u32, u32)]) -> R) -> R {
        let hashes = compute_request_content_hashes(tokens, self.size);
        ANSWER.with_borrow_mut(|answer| {
            answer.clear();
            let report = |worker, score| answer.push((worker, score));
            self.index.score_into(&hashes, |hash| hash.0, false, report);
            read(answer)
        })
    }
}

impl Find for Reader {
    fn find(&self, tokens: &[u32]) -> u64 {
        self.answer(tokens, |answer| answer.iter().map(|&(_, score)| u64::from(score)).sum())
    }

    fn scores(&self, tokens: &[u32]) -> Scores {
        let worker = |number| self.numbers.iter().position(|&other| other == number);
        let score = |&(number, score): &(u32, u32)| (worker(number).expect("it was interned") as u32, score);
        self.answer(tokens, |answer| answer.iter().map(score).collect())
    }
}

impl Find for ChainIndexSide {
    fn find(&self, tokens: &[u32]) -> u64 {
        self.reader.find(tokens)
    }

    fn scores(&self, tokens: &[u32]) -> Scores {
        self.reader.scores(tokens)
    }
}

impl Side for ChainIndexSide {
    const NAME: &'static str = "ChainIndex";

    fn new(workers: u32, size: u32) -> Self {
        let index = ChainIndex::new();
        let number = |worker| {
            index
                .intern_worker(&format!("worker-{worker}"))
                .expect("there is room for it")
        };
        let numbers = (0..workers).map(number).collect();
        Self {
            reader: Reader {
                index: Arc::new(index),
                numbers,
                size: size as usize,
            },
            maps: (0..workers).map(|_| ChainBlockMap::new()).collect(),
            scanner: Scanner::new(),
            blocks: Vec::new(),
            removed: Vec::new(),
        }
    }

    fn run<S: Script + Send + 'static>(&mut self, mut script: S) -> S {
        while let Some((worker, payload)) = script.next(&self.reader) {
            self.apply(worker, payload);
        }
        script
    }
}

impl Shared for ChainIndexSide {
    type Reader = Reader;

    fn reader(&self) -> Reader {
        self.reader.clone()
    }
}
