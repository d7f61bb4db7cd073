//! The index of kvevents. Only this file of the harness uses the API of the index.

use std::sync::Arc;

use kvevents_index::wire::scan::{self, Kind, Schema, Scratch};
use kvevents_index::{Applied, Hit, Incarnation, Index, Limits, PayloadLimits, Position, Scope, Worker};

use super::{Find, Scores, Script, Shared, Side};

/// kvevents' index.
pub struct Ours {
    reader: Reader,
    seq: i64,
}

/// Lookups in the index of kvevents.
#[derive(Clone)]
pub struct Reader {
    index: Arc<Index>,
    workers: Arc<[Worker]>,
    size: u64,
}

impl Ours {
    fn apply(&mut self, worker: u32, payload: &[u8]) {
        let Reader { index, workers, .. } = &self.reader;
        self.seq += 1;
        let position = Position {
            incarnation: Incarnation(0),
            seq: self.seq,
        };
        let applied = index.batch(&workers[worker as usize], position, payload);
        assert!(matches!(applied, Ok(Applied::Now(_))));
    }

    /// Gives a worker the label of a model.
    pub fn label(&self, worker: u32, model: &str) {
        let Reader { index, workers, .. } = &self.reader;
        index.set_model(&workers[worker as usize].source, Some(model));
    }
}

impl Find for Reader {
    fn find(&self, tokens: &[u32]) -> u64 {
        let found = self.index.match_prompt(tokens, &Scope::default());
        found.iter().map(|hit| u64::from(hit.tokens.gpu)).sum::<u64>() / self.size
    }

    fn scores(&self, tokens: &[u32]) -> Scores {
        let found = self.index.match_prompt(tokens, &Scope::default());
        let score = |hit: Hit<'_>| {
            let worker = self.workers.iter().position(|worker| worker == hit.worker);
            (worker.expect("it was named here") as u32, hit.tokens.gpu / self.size as u32)
        };
        found.iter().map(score).collect()
    }
}

impl Find for Ours {
    fn find(&self, tokens: &[u32]) -> u64 {
        self.reader.find(tokens)
    }

    fn scores(&self, tokens: &[u32]) -> Scores {
        self.reader.scores(tokens)
    }
}

impl Side for Ours {
    const NAME: &'static str = "kvevents";

    fn new(workers: u32, size: u32) -> Self {
        let index = Index::new(Limits::default()).expect("the limits are high enough");
        let reader = Reader {
            index: Arc::new(index),
            workers: (0..workers)
                .map(|worker| Worker::new(format!("worker-{worker}"), 0))
                .collect(),
            size: u64::from(size),
        };
        Self { reader, seq: 0 }
    }

    fn run<S: Script + Send + 'static>(&mut self, mut script: S) -> S {
        while let Some((worker, payload)) = script.next(&self.reader) {
            self.apply(worker, payload);
        }
        script
    }
}

impl Shared for Ours {
    type Reader = Reader;

    fn reader(&self) -> Reader {
        self.reader.clone()
    }
}

/// One event, read by our scanner for an index that reads no payloads itself.
pub enum Event<'a> {
    /// Blocks are stored.
    Stored {
        /// The hash of the parent of the first block.
        parent: Option<u64>,
        /// The blocks.
        hashes: &'a [u64],
        /// Their tokens.
        tokens: &'a [u32],
    },
    /// Blocks are removed.
    Removed(&'a [u64]),
}

/// Our scanner without an index.
pub struct Scanner {
    schema: Schema,
    scratch: Scratch,
}

impl Scanner {
    /// Creates a reader with the settings of `Ours`.
    pub fn new() -> Self {
        Self {
            schema: Schema::new(PayloadLimits::default())
                .expect("the limits are high enough")
                .joining(),
            scratch: Scratch::default(),
        }
    }

    /// Reads a payload.
    pub fn read(&mut self, payload: &[u8]) -> impl Iterator<Item = Event<'_>> {
        scan::scan(payload, &self.schema, &mut self.scratch).expect("the payload is one of the harness");
        let scratch = &self.scratch;
        scratch.events.iter().map(|event| match event.kind {
            Kind::Stored => Event::Stored {
                parent: event.parent,
                hashes: event.hashes.slice(&scratch.hashes),
                tokens: event.tokens.slice(&scratch.tokens),
            },
            Kind::Removed => Event::Removed(event.hashes.slice(&scratch.hashes)),
            Kind::Cleared => unreachable!("the harness has no clears"),
        })
    }
}
