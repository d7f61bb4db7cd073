//! Snapshots of an index that goes on meanwhile, and what they leave in its place, or bring into it; the format is in `crate::snapshot`.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::sync::Arc;

use parking_lot::Mutex;

use super::Index;
use super::registry::{Registry, seated};
use crate::core::{Core, Worker};
use crate::gate::Gate;
use crate::hasher::Secret;
use crate::sets::MAX_STREAMS;
use crate::snapshot::{self, Failure};
use crate::stream::Stream;

/// A stream out of a snapshot. It has its number in a shared part, where nobody sees its blocks before all of them are there.
#[derive(Clone, Debug)]
pub struct Newcomer {
    /// Who it is.
    pub worker: Arc<Worker>,
    /// Its number.
    pub number: u32,
    /// Itself.
    pub stream: Arc<Mutex<Stream>>,
}

impl Newcomer {
    /// One that has joined, without blocks.
    pub fn join(core: &mut Core, number: u32, worker: Worker, incarnation: i64, model: Option<String>) -> Self {
        let worker = Arc::new(worker);
        let stream = seated(core, number, worker.clone(), incarnation, model);
        core.show(number, false);
        Self { worker, number, stream }
    }

    /// Takes it out again, with all that it holds.
    pub fn leave(&self, gate: &Gate<Core>) {
        let mut stream = self.stream.lock();
        stream.gone = true;
        stream.quit(&mut gate.write());
    }
}

/// What a snapshot holds.
#[derive(Debug, Default)]
pub struct Part {
    /// Every stream, in the order of their workers.
    pub streams: Vec<Newcomer>,
    /// Models by source.
    pub labels: Vec<(String, String)>,
    /// Removed workers, the oldest first.
    pub fences: Vec<(Worker, i64)>,
}

impl Part {
    /// Lets everybody see the streams, behind the walls of these models.
    fn show(&self, core: &mut Core, labels: &HashMap<&str, &str>) {
        if !labels.is_empty() {
            core.relabel(|source| labels.get(source).map(|&model| Some(model.to_owned())));
        }
        self.streams.iter().for_each(|newcomer| core.show(newcomer.number, true));
    }
}

fn held(worker: &Worker) -> Failure {
    let Worker { source, rank } = worker;
    Failure::Bad(format!(
        "the index holds the worker {source:?} with rank {rank} already; call remove_worker for it first"
    ))
}

impl Index {
    /// Writes a snapshot, of these workers alone where some are given.
    pub fn save<W: Write>(&self, out: W, workers: Option<&HashSet<Worker>>) -> io::Result<W> {
        snapshot::save(self, out, workers)
    }

    /// Puts what was restored, with the shared part in which it is, in the place of everything but the overlay.
    pub fn replace(&self, gate: Gate<Core>, part: Part) {
        let mut fresh = Registry::new(Secret::new());
        part.streams.iter().for_each(|newcomer| fresh.enter(newcomer));
        part.show(&mut gate.write(), &by_source(&part.labels));
        let Part { labels, fences, .. } = part;
        fresh.labels.extend(labels);
        for (worker, incarnation) in fences {
            self.fence(&mut fresh, worker, incarnation);
        }
        // Dropped when no lock is held any more.
        let mut ended = Vec::new();
        let whole = self.whole.write();
        let mut registry = self.registry.write();
        for rank in registry.streams.values().flatten() {
            let mut stream = rank.stream.lock();
            let mut empty = Stream::new(stream.number, stream.incarnation);
            empty.gone = true;
            ended.push(std::mem::replace(&mut *stream, empty));
        }
        let mut old = gate.write();
        let mut core = self.gate.write();
        std::mem::swap(&mut *core, &mut *old);
        // Lookups keep the owner that they know: what it owns changes.
        std::mem::swap(&mut core.view, &mut old.view);
        std::mem::swap(&mut *core.view.change(), &mut *old.view.change());
        self.gate.heal();
        drop(core);
        drop(old);
        *registry = fresh;
        drop(registry);
        drop(whole);
        ended.iter().for_each(|stream| self.ended.lock().add(&stream.counters));
    }

    // --- absorbing

    /// Adds what a snapshot holds, or nothing at all when it fails. Returns the workers that came.
    pub fn absorb(&self, from: impl Read) -> Result<Vec<Arc<Worker>>, Failure> {
        // What replaces the shared part would leave these streams in one that nobody has.
        let _whole = self.whole.read_recursive();
        let mut part = Part::default();
        // Until the end, heads may have the keys of linked blocks.
        self.gate.write().view.change().strangers += 1;
        let outcome = snapshot::absorb(self, from, &mut part).and_then(|()| self.take_in(&part));
        self.gate.write().view.change().strangers -= 1;
        if let Err(failure) = outcome {
            part.streams.iter().for_each(|newcomer| self.expel(newcomer));
            return Err(failure);
        }
        Ok(part.streams.into_iter().map(|newcomer| newcomer.worker).collect())
    }

    /// Lets a stream out of a snapshot join. Only `take_in` puts it where deliveries and askers find it.
    pub fn welcome(&self, worker: Worker, incarnation: i64) -> Result<Newcomer, Failure> {
        let registry = self.registry.read();
        if registry.find(&worker.source, worker.rank).is_some() {
            return Err(held(&worker));
        }
        let model = registry.labels.get(&worker.source).cloned();
        let mut core = self.gate.write();
        let number = core.vacancy().ok_or_else(|| {
            Failure::Bad(format!(
                "the index would have more than {MAX_STREAMS} streams; remove workers that are gone"
            ))
        })?;
        Ok(Newcomer::join(&mut core, number, worker, incarnation, model))
    }

    /// Takes a stream out that was let join and not taken in.
    pub fn expel(&self, newcomer: &Newcomer) {
        newcomer.leave(&self.gate);
    }

    /// Makes streams that have joined, and are whole, a part of the index.
    fn take_in(&self, part: &Part) -> Result<(), Failure> {
        let mut registry = self.registry.write();
        // What was delivered while the snapshot was read may have brought one of them in.
        let known = |newcomer: &&Newcomer| registry.find(&newcomer.worker.source, newcomer.worker.rank).is_some();
        if let Some(newcomer) = part.streams.iter().find(known) {
            return Err(held(&newcomer.worker));
        }
        for newcomer in &part.streams {
            registry.admit(&newcomer.worker);
            registry.enter(newcomer);
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
        part.show(&mut self.gate.write(), &labels);
        Ok(())
    }
}

fn by_source(labels: &[(String, String)]) -> HashMap<&str, &str> {
    labels
        .iter()
        .map(|(source, model)| (source.as_str(), model.as_str()))
        .collect()
}
