//! Routing decisions that no event has confirmed yet: short-lived, and apart from what the streams said.

use std::collections::{HashMap, VecDeque};

use crate::core::Worker;

/// What was decided for one worker, a prompt at a time.
#[derive(Debug)]
struct Decision {
    worker: Worker,
    keys: Vec<u64>,
    until: f64,
}

/// Blocks that a worker probably holds soon.
#[derive(Debug)]
pub struct Overlay {
    decisions: VecDeque<Decision>,
    blocks: HashMap<Worker, HashMap<u64, f64>>,
    size: usize,
    limit: usize,
    /// Decisions that were confirmed before they ended.
    pub confirmed: u64,
    /// Decisions that ended unconfirmed.
    pub expired: u64,
}

impl Overlay {
    /// An empty one for at most `limit` blocks; the oldest decisions make room.
    pub fn new(limit: usize) -> Self {
        Self {
            decisions: VecDeque::new(),
            blocks: HashMap::new(),
            size: 0,
            limit,
            confirmed: 0,
            expired: 0,
        }
    }

    /// Whether nothing is speculated.
    pub fn is_empty(&self) -> bool {
        self.decisions.is_empty()
    }

    /// Blocks of all decisions.
    pub fn len(&self) -> usize {
        self.size
    }

    /// Workers with decisions.
    pub fn workers(&self) -> impl Iterator<Item = &Worker> {
        self.blocks.keys()
    }

    /// A prompt of these keys goes to a worker, which will hold them; believed `until` then.
    pub fn add(&mut self, worker: Worker, keys: Vec<u64>, until: f64) {
        let blocks = self.blocks.entry(worker.clone()).or_default();
        for &key in &keys {
            let known = blocks.entry(key).or_insert(until);
            *known = known.max(until);
        }
        self.size += keys.len();
        self.decisions.push_back(Decision { worker, keys, until });
    }

    /// Ends decisions that are over, and the oldest ones above the limit; `held` says whether a worker holds a block.
    pub fn expire(&mut self, now: f64, held: impl Fn(&Worker, u64) -> bool) {
        let (mut kept, mut ended) = (VecDeque::new(), Vec::new());
        let mut size = self.size;
        for decision in std::mem::take(&mut self.decisions) {
            if decision.until <= now || size > self.limit {
                size -= decision.keys.len();
                ended.push(decision);
            } else {
                kept.push_back(decision);
            }
        }
        (self.decisions, self.size) = (kept, size);
        for decision in &ended {
            let confirmed = decision.keys.last().is_none_or(|&key| held(&decision.worker, key));
            *(if confirmed { &mut self.confirmed } else { &mut self.expired }) += 1;
        }
        if !ended.is_empty() {
            self.rebuild();
        }
    }

    fn rebuild(&mut self) {
        self.blocks.clear();
        for decision in &self.decisions {
            let blocks = self.blocks.entry(decision.worker.clone()).or_default();
            for &key in &decision.keys {
                let known = blocks.entry(key).or_insert(decision.until);
                *known = known.max(decision.until);
            }
        }
    }

    /// Forgets the decisions for a worker.
    pub fn forget(&mut self, worker: &Worker) {
        self.decisions.retain(|decision| decision.worker != *worker);
        self.size = self.decisions.iter().map(|decision| decision.keys.len()).sum();
        self.rebuild();
    }

    /// How many of these keys in a row a worker is believed to hold.
    pub fn depth(&self, worker: &Worker, keys: &[u64], now: f64) -> usize {
        let Some(blocks) = self.blocks.get(worker) else { return 0 };
        keys.iter()
            .take_while(|key| blocks.get(key).is_some_and(|&until| until > now))
            .count()
    }
}
