//! Adds the streams of a snapshot to an index, or replaces the index's streams by those of a snapshot. The module `snapshot` describes the
//! format.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::sync::Arc;

use super::Failure;
use crate::holders::holder_sets::MAX_STREAMS;
use crate::memory::hasher::Secret;
use crate::prefix_index::{ImportedStream, PrefixIndex, Registry};
use crate::store::members::Worker;
use crate::store::shared_state::SharedState;
use crate::stream::Stream;
use crate::sync::yielding_lock::YieldingRwLock;

/// The contents of a snapshot.
#[derive(Debug, Default)]
pub struct SnapshotContents {
    /// All streams, in the order of their workers.
    pub streams: Vec<ImportedStream>,
    /// The model of each source.
    pub labels: Vec<(String, String)>,
    /// Incarnations of removed workers, the oldest removal first.
    pub fences: Vec<(Worker, i64)>,
}

impl SnapshotContents {
    /// Applies these labels to the streams, and makes the streams of this snapshot visible to lookups.
    fn show(&self, shared: &mut SharedState, labels: &HashMap<&str, &str>) {
        if !labels.is_empty() {
            shared.relabel(|source| labels.get(source).map(|&model| Some(model.to_owned())));
        }
        self.streams.iter().for_each(|imported| shared.show(imported.number, true));
    }
}

fn worker_exists(worker: &Worker) -> Failure {
    let Worker { source, rank } = worker;
    Failure::Bad(format!(
        "the index holds the worker {source:?} with rank {rank} already; call remove_worker for it first"
    ))
}

impl PrefixIndex {
    /// Writes a snapshot of these workers, or of all workers if `workers` is None.
    pub fn save<W: Write>(&self, out: W, workers: Option<&HashSet<Worker>>) -> io::Result<W> {
        super::save(self, out, workers)
    }

    /// Replaces everything in the index, except the overlay, by restored streams and their shared state.
    pub fn replace(&self, shared_lock: YieldingRwLock<SharedState>, part: SnapshotContents) {
        let mut fresh = Registry::new(Secret::new());
        part.streams.iter().for_each(|imported| fresh.enter(imported));
        part.show(&mut shared_lock.write(), &by_source(&part.labels));
        let SnapshotContents {
            labels,
            fences,
            streams: part_streams,
        } = part;
        fresh.labels.extend(labels);
        for (worker, incarnation) in fences {
            self.fence(&mut fresh, worker, incarnation);
        }
        // The old streams, which are dropped after the locks are released.
        let mut ended = Vec::new();
        let whole = self.replacing.write();
        let mut registry = self.registry.write();
        for rank in registry.streams.values().flatten() {
            let mut stream = rank.stream.lock();
            let mut empty = Stream::new(stream.number, stream.incarnation);
            empty.is_removed = true;
            ended.push(std::mem::replace(&mut *stream, empty));
        }
        let mut old = shared_lock.write();
        for imported in &part_streams {
            if let Some(drafts) = registry.drafts.get(&imported.worker.source) {
                let mut stream = imported.stream.lock();
                stream.groups.drafts = Some(drafts.clone());
                stream.use_groups(&mut old);
            }
        }
        fresh.drafts = std::mem::replace(&mut registry.drafts, hashbrown::HashMap::with_hasher(Secret::new()));
        let mut shared = self.shared_lock.write();
        std::mem::swap(&mut *shared, &mut *old);
        // Lookups hold a handle to the view of `shared`. So the contents of the two views are swapped, but not their owners.
        std::mem::swap(&mut shared.view, &mut old.view);
        std::mem::swap(&mut *shared.view.change(), &mut *old.view.change());
        self.shared_lock.heal();
        drop(shared);
        drop(old);
        *registry = fresh;
        drop(registry);
        drop(whole);
        ended.iter().for_each(|stream| self.ended.lock().add(&stream.counters));
    }

    // --- adding a snapshot to an index with contents

    /// Adds the contents of a snapshot to the index. A failed call changes nothing. Returns the added workers, without ranks that another
    /// stream carries.
    pub fn absorb(&self, from: impl Read) -> Result<Vec<Arc<Worker>>, Failure> {
        // The shared state must not be replaced during this call, since the added streams would be dropped with the old one.
        let _whole = self.replacing.read_recursive();
        let mut part = SnapshotContents::default();
        // While `strangers` is above 0, lookups expect that heads can have the same keys as linked blocks.
        self.shared_lock.write().view.change().strangers += 1;
        let outcome = super::absorb(self, from, &mut part).and_then(|()| self.register_imported(&part));
        self.shared_lock.write().view.change().strangers -= 1;
        if let Err(failure) = outcome {
            part.streams.iter().for_each(|imported| self.discard(imported));
            return Err(failure);
        }
        let own = part.streams.into_iter().filter(|imported| imported.carrier.is_none());
        Ok(own.map(|imported| imported.worker).collect())
    }

    /// Adds a stream of a snapshot to the shared state. Deliveries and lookups find the stream only after `register_imported`.
    pub fn import(&self, worker: Worker, incarnation: i64) -> Result<ImportedStream, Failure> {
        let registry = self.registry.read();
        if registry.find(&worker.source, worker.rank).is_some() {
            return Err(worker_exists(&worker));
        }
        let model = registry.labels.get(&worker.source).cloned();
        let mut shared = self.shared_lock.write();
        let number = shared.vacancy().ok_or_else(|| {
            Failure::Bad(format!(
                "the index would have more than {MAX_STREAMS} streams; remove workers that are gone"
            ))
        })?;
        let drafts = registry.drafts.get(&worker.source).cloned();
        Ok(ImportedStream::join(&mut shared, number, worker, incarnation, model, drafts))
    }

    /// Removes a stream that `import` has added and that was not registered.
    pub fn discard(&self, imported: &ImportedStream) {
        imported.leave(&self.shared_lock);
    }

    /// Registers the streams of a snapshot after all of them were read.
    fn register_imported(&self, part: &SnapshotContents) -> Result<(), Failure> {
        let mut registry = self.registry.write();
        // A delivery might have registered one of these workers while the snapshot was read.
        let known = |imported: &&ImportedStream| registry.find(&imported.worker.source, imported.worker.rank).is_some();
        if let Some(imported) = part.streams.iter().find(known) {
            return Err(worker_exists(&imported.worker));
        }
        for imported in &part.streams {
            registry.admit(&imported.worker);
            registry.enter(imported);
        }
        for (worker, incarnation) in &part.fences {
            let newer = registry.fences.get(worker).is_none_or(|known| known < incarnation);
            if newer && registry.find(&worker.source, worker.rank).is_none() {
                self.fence(&mut registry, worker.clone(), *incarnation);
            }
        }
        let mut labels = by_source(&part.labels);
        labels.retain(|&source, _| !registry.labels.contains_key(source));
        for (&source, &model) in &labels {
            registry.labels.insert(source.into(), model.into());
        }
        part.show(&mut self.shared_lock.write(), &labels);
        Ok(())
    }
}

fn by_source(labels: &[(String, String)]) -> HashMap<&str, &str> {
    labels
        .iter()
        .map(|(source, model)| (source.as_str(), model.as_str()))
        .collect()
}
