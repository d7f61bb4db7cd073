//! Snapshots of an index that goes on meanwhile, and what they leave in its place; the format is in `crate::snapshot`.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::Index;
use super::registry::Registry;
use crate::core::Worker;
use crate::gate::Gate;
use crate::snapshot;
use crate::stream::Stream;

/// What a snapshot holds.
#[derive(Debug)]
pub struct Restored {
    /// The shared part.
    pub gate: Gate,
    /// Every stream, in the order of their workers.
    pub streams: Vec<(Worker, Arc<Mutex<Stream>>)>,
    /// Models by source.
    pub labels: Vec<(String, String)>,
    /// Removed workers, the oldest first.
    pub fences: Vec<(Worker, i64)>,
}

impl Index {
    /// Whether a snapshot is being written, in which case a delivery may have to wait.
    pub fn is_saving(&self) -> bool {
        self.saving.load(Ordering::Relaxed) > 0
    }

    /// Writes a snapshot.
    pub fn save<W: Write>(&self, out: W) -> io::Result<W> {
        self.saving.fetch_add(1, Ordering::Relaxed);
        let saved = snapshot::save(self, out);
        self.saving.fetch_sub(1, Ordering::Relaxed);
        saved
    }

    /// Blocks of one stream that may wait.
    pub fn max_waiting(&self) -> usize {
        self.limits.orphans
    }

    /// Puts what was restored in the place of everything but the overlay.
    pub fn replace(&self, restored: Restored) {
        let Restored {
            gate,
            streams,
            labels,
            fences,
        } = restored;
        let mut fresh = Registry::default();
        fresh.labels.extend(labels);
        for (worker, incarnation) in fences {
            self.fence(&mut fresh, worker, incarnation);
        }
        let mut bytes = 0;
        for (worker, stream) in &streams {
            if self.limits.memory.is_some() {
                let mut stream = stream.lock();
                stream.counted = stream.bytes();
                bytes += stream.counted;
            }
            fresh
                .streams
                .entry(worker.source.clone())
                .or_default()
                .push((worker.rank, stream.clone()));
        }
        // Dropped when no lock is held any more.
        let mut ended = Vec::new();
        let mut registry = self.registry.write();
        for (_, stream) in registry.streams.values().flatten() {
            let mut stream = stream.lock();
            let mut empty = Stream::new(stream.number, stream.incarnation);
            empty.gone = true;
            ended.push(std::mem::replace(&mut *stream, empty));
        }
        let mut old = gate.write();
        let mut core = self.gate.write();
        std::mem::swap(&mut *core, &mut *old);
        self.hand.store(0, Ordering::Relaxed);
        self.streams_bytes.store(bytes, Ordering::Relaxed);
        drop(core);
        drop(old);
        *registry = fresh;
        drop(registry);
        ended.iter().for_each(|stream| self.ended.lock().add(&stream.counters));
        for (_, stream) in streams {
            let mut stream = stream.lock();
            if !stream.gone {
                self.settle(&mut stream);
            }
        }
    }
}
