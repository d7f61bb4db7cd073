//! The class behind `kvevents.index.PrefixIndex`: each method reads its arguments, and lets other threads run where that is worth it.

use std::collections::HashSet;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use super::answers::{Match, counters};
use super::arguments::{Named, Pieces, Tokens, keys_of, scheme_of, scope_of, tokens_of, wire_limits_of};
use kvevents_index::core::Worker;
use kvevents_index::index::{Held, Index, Info, Limits, Outcome};
use kvevents_index::planes::Plane;
use kvevents_index::scan::Schema;
use kvevents_index::snapshot::{self, Failure};

/// Tokens or bytes of a payload from which on other threads may run meanwhile; below, switching costs more than the work.
const WORTH_RELEASING: usize = 2_048;

/// Why a snapshot was not read.
fn unread(failure: Failure) -> PyErr {
    match failure {
        Failure::Io(error) => error.into(),
        Failure::Bad(what) => PyValueError::new_err(what),
    }
}

fn detached<T: Send>(py: Python<'_>, worth: bool, work: impl FnOnce() -> T + Send) -> T {
    if worth { py.detach(work) } else { work() }
}

/// The native part of `kvevents.index.PrefixIndex`.
#[pyclass(subclass, frozen, module = "kvevents._native")]
pub(super) struct NativeIndex {
    index: Arc<Index>,
    /// For events that Python has read within its limits, and spelled anew: they may be larger then.
    ours: Schema,
    applied: Py<PyAny>,
    cleared: Py<PyAny>,
    duplicate: Py<PyAny>,
    void: Py<PyAny>,
}

/// Key, hash, tier, group and copies.
type PlainBlock = (u64, u64, String, i64, u32);

/// The blocks of a stream at one moment, each of which is handed out once.
#[pyclass(frozen, module = "kvevents.index")]
pub(super) struct Listing {
    blocks: Mutex<std::vec::IntoIter<Held>>,
    planes: Vec<Plane>,
}

#[pymethods]
impl Listing {
    /// The next blocks, at most `most`: per block and plane `(key, hash, tier, group, copies)`. Empty behind the last one.
    ///
    /// Lets other threads of Python run each time, so that a long listing does not keep them waiting.
    fn take(&self, py: Python<'_>, most: usize) -> Vec<PlainBlock> {
        let plain = |held: Held| {
            let plane = &self.planes[held.plane as usize];
            (held.key, held.hash, plane.tier.clone(), plane.group, held.copies)
        };
        py.detach(|| self.blocks.lock().by_ref().take(most).map(plain).collect())
    }
}

/// The place of a payload in a run, and what came of it.
type Odd = (usize, Py<PyAny>);

/// By tag the fields of array events and the names of map events.
type Layouts = Vec<(String, Vec<String>, Vec<String>)>;

impl NativeIndex {
    fn told(&self, py: Python<'_>, outcome: Outcome) -> PyResult<Py<PyAny>> {
        match outcome {
            Outcome::Applied(false) => Ok(self.applied.clone_ref(py)),
            Outcome::Applied(true) => Ok(self.cleared.clone_ref(py)),
            Outcome::Duplicate => Ok(self.duplicate.clone_ref(py)),
            Outcome::Void => Ok(self.void.clone_ref(py)),
            Outcome::Unread => Ok(py.None()),
            Outcome::Full => Err(PyValueError::new_err(
                "the index has as many streams as it can hold; remove workers that are gone",
            )),
        }
    }

    /// Whether other threads had better run while a payload is applied.
    fn may_wait(&self, payload: &[u8]) -> bool {
        payload.len() >= WORTH_RELEASING || self.index.is_saving()
    }

    fn now(slf: &Bound<'_, Self>) -> PyResult<f64> {
        slf.call_method0(pyo3::intern!(slf.py(), "_now"))?.extract()
    }
}

#[pymethods]
impl NativeIndex {
    #[new]
    #[pyo3(signature = (layouts, wire_limits, memory_limit, max_orphans, max_fences, max_speculated, outcomes, *, asked))]
    #[expect(clippy::too_many_arguments, reason = "they are what Python's class was made with")]
    fn new(
        layouts: Layouts,
        wire_limits: [usize; 6],
        memory_limit: Option<usize>,
        max_orphans: usize,
        max_fences: usize,
        max_speculated: usize,
        outcomes: [Py<PyAny>; 4],
        asked: bool,
    ) -> PyResult<Self> {
        let (peers, ours) = wire_limits_of(wire_limits);
        let schema = |limits| Schema::new(&layouts, limits).map_err(PyValueError::new_err);
        let limits = Limits {
            memory: memory_limit,
            orphans: max_orphans,
            fences: max_fences,
            speculated: max_speculated,
        };
        let [applied, cleared, duplicate, void] = outcomes;
        let index = Index::new(schema(peers)?.joining(), limits);
        Ok(Self {
            index: Arc::new(if asked { index } else { index.unasked() }),
            ours: schema(ours)?.joining(),
            applied,
            cleared,
            duplicate,
            void,
        })
    }

    /// Applies the payload of one batch as the engine sent it.
    ///
    /// `stream` is `(source, rank)`, or the source alone for rank 0.
    fn apply_payload(
        slf: &Bound<'_, Self>,
        stream: Bound<'_, PyAny>,
        incarnation: i64,
        seq: i64,
        payload: Bound<'_, PyBytes>,
    ) -> PyResult<Py<PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let named = Named::of(&stream)?;
        let (source, rank) = named.parts()?;
        let bytes = payload.as_bytes();
        let outcome = detached(py, this.may_wait(bytes), || {
            this.index.batch(source, rank, incarnation, seq, bytes)
        });
        if outcome == Outcome::Unread {
            let careful = pyo3::intern!(py, "_apply_careful");
            return Ok(slf.call_method1(careful, (source, rank, incarnation, seq, payload))?.unbind());
        }
        this.told(py, outcome)
    }

    /// As `apply_payload`, and None for what this decoder does not read.
    fn _apply(
        &self,
        py: Python<'_>,
        source: &str,
        rank: i64,
        incarnation: i64,
        seq: i64,
        payload: &[u8],
    ) -> PyResult<Py<PyAny>> {
        let outcome = detached(py, self.may_wait(payload), || {
            self.index.batch_by(&self.ours, source, rank, incarnation, seq, payload)
        });
        self.told(py, outcome)
    }

    /// Applies many raw batches, other threads running meanwhile. Ends before the first one that this decoder does not read.
    fn _apply_many(&self, py: Python<'_>, batches: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<Py<PyAny>>> {
        let mut found = Vec::with_capacity(batches.len());
        for batch in &batches {
            let source = batch.getattr(pyo3::intern!(py, "source"))?.cast_into::<PyString>()?;
            let rank: i64 = batch.getattr(pyo3::intern!(py, "rank"))?.extract()?;
            let incarnation: i64 = batch.getattr(pyo3::intern!(py, "incarnation"))?.extract()?;
            let seq: i64 = batch.getattr(pyo3::intern!(py, "seq"))?.extract()?;
            let payload = batch.getattr(pyo3::intern!(py, "payload"))?.cast_into::<PyBytes>()?;
            found.push((source, rank, incarnation, seq, payload));
        }
        let mut borrowed = Vec::with_capacity(found.len());
        for (source, rank, incarnation, seq, payload) in &found {
            borrowed.push((source.to_str()?, *rank, *incarnation, *seq, payload.as_bytes()));
        }
        let bytes: usize = borrowed.iter().map(|(.., payload)| payload.len()).sum();
        let outcomes: Vec<Outcome> = detached(py, bytes >= WORTH_RELEASING || self.index.is_saving(), || {
            let batch = |&(source, rank, incarnation, seq, payload): &(&str, i64, i64, i64, &[u8])| {
                self.index.batch(source, rank, incarnation, seq, payload)
            };
            borrowed
                .iter()
                .map(batch)
                .take_while(|outcome| *outcome != Outcome::Unread)
                .collect()
        });
        outcomes.into_iter().map(|outcome| self.told(py, outcome)).collect()
    }

    /// Applies payloads of one stream, numbered from `first` on, other threads running meanwhile. Ends before the first one that this
    /// decoder does not read: how many were read, and what came of those that were not simply applied.
    fn _apply_run(
        &self,
        py: Python<'_>,
        source: &str,
        rank: i64,
        incarnation: i64,
        first: i64,
        payloads: Vec<Bound<'_, PyBytes>>,
    ) -> PyResult<(usize, Vec<Odd>)> {
        let borrowed: Vec<&[u8]> = payloads.iter().map(|payload| payload.as_bytes()).collect();
        let (read, odd) = py.detach(|| {
            let mut odd = Vec::new();
            for (at, (seq, payload)) in (first..).zip(&borrowed).enumerate() {
                match self.index.batch(source, rank, incarnation, seq, payload) {
                    Outcome::Unread => return (at, odd),
                    Outcome::Applied(false) => {}
                    outcome => odd.push((at, outcome)),
                }
            }
            (borrowed.len(), odd)
        });
        let told = |(at, outcome)| Ok((at, self.told(py, outcome)?));
        Ok((read, odd.into_iter().map(told).collect::<PyResult<_>>()?))
    }

    fn _gap(&self, py: Python<'_>, source: &str, rank: i64, incarnation: i64, last: i64) -> PyResult<Py<PyAny>> {
        let outcome = py.detach(|| self.index.gap(source, rank, incarnation, last));
        self.told(py, outcome)
    }

    fn _reset(&self, py: Python<'_>, source: &str, rank: i64, incarnation: i64) -> PyResult<Py<PyAny>> {
        let outcome = py.detach(|| self.index.reset(source, rank, incarnation));
        self.told(py, outcome)
    }

    /// How long a prefix of `tokens` each worker holds.
    ///
    /// `tokens` are a list or tuple of integers, or a one-dimensional buffer of them (`array`, NumPy, memoryview), of which one of 32-bit
    /// unsigned integers is read where it lies. `namespace` says within what: without one, workers without a model, no LoRA, no salt.
    /// With `overlay` decisions told to `speculate` count as held on the GPU. Raises `TypeError` or `OverflowError` for what are no
    /// token ids.
    ///
    /// vLLM always computes the last token of a prompt anew: `match(tokens[:-1])` is what it will find cached.
    #[pyo3(name = "match", signature = (tokens, namespace=None, *, overlay=false))]
    fn match_(
        slf: &Bound<'_, Self>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        overlay: bool,
    ) -> PyResult<Match> {
        let (py, this) = (slf.py(), slf.get());
        let given = tokens_of(tokens)?;
        let scope = scope_of(namespace)?;
        let slice = given.slice();
        let mut hits = detached(py, slice.len() >= WORTH_RELEASING, || this.index.matched(slice, &scope));
        if overlay {
            let now = Self::now(slf)?;
            py.detach(|| this.index.believed(slice, &scope, now, &mut hits));
        }
        Ok(Match { hits })
    }

    /// `match` for each of several prompts of one namespace.
    #[pyo3(signature = (prompts, namespace=None))]
    fn match_many(
        &self,
        py: Python<'_>,
        prompts: Vec<Bound<'_, PyAny>>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Match>> {
        let given = prompts.iter().map(tokens_of).collect::<PyResult<Vec<_>>>()?;
        let scope = scope_of(namespace)?;
        let slices: Vec<&[u32]> = given.iter().map(Tokens::slice).collect();
        let found: Vec<_> = py.detach(|| slices.iter().map(|tokens| self.index.matched(tokens, &scope)).collect());
        Ok(found.into_iter().map(|hits| Match { hits }).collect())
    }

    /// The same for rolling keys that the caller has, as `block_keys` makes them: all of them, from that of the prompt's first block on.
    ///
    /// Blocks are found one behind the other, so of keys that begin in the middle of a prompt nobody may be told who holds them. Of
    /// `namespace` only the model counts, since keys hold the rest. Raises `ValueError` when workers have different block sizes and `block_size` does
    /// not say which one the keys are of, and `TypeError` for what is no list or buffer of unsigned 64-bit numbers.
    #[pyo3(signature = (keys, block_size=None, namespace=None))]
    fn match_keys(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        block_size: Option<i64>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Match> {
        let keys = keys_of(keys)?;
        let size = block_size
            .map(|size| scheme_of(size, false))
            .transpose()?
            .map(|scheme| scheme.size);
        let model = scope_of(namespace)?.model;
        let hits = py.detach(|| self.index.matched_keys(&keys, size, &model));
        let hits = hits.ok_or_else(|| {
            PyValueError::new_err("workers have blocks of different sizes; say block_size, the one that the keys are of")
        })?;
        Ok(Match { hits })
    }

    fn _label(&self, py: Python<'_>, source: &str, model: Option<&str>) {
        py.detach(|| self.index.label(source, model));
    }

    fn _remove(&self, py: Python<'_>, source: &str, rank: Option<i64>) -> usize {
        py.detach(|| self.index.remove(source, rank))
    }

    fn _admit(&self, py: Python<'_>, source: &str, rank: i64) {
        py.detach(|| self.index.admit(source, rank));
    }

    /// Per worker a dictionary of everything.
    fn _workers<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let infos = py.detach(|| self.index.infos());
        infos.into_iter().map(|info| plain(py, info)).collect()
    }

    /// The same of one worker, or None when there is no such one.
    fn _worker<'py>(&self, py: Python<'py>, source: &str, rank: i64) -> PyResult<Option<Bound<'py, PyDict>>> {
        py.detach(|| self.index.info(source, rank))
            .map(|info| plain(py, info))
            .transpose()
    }

    /// What belongs to no worker.
    fn _totals<'py>(slf: &Bound<'py, Self>, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (index, now) = (&slf.get().index, Self::now(slf)?);
        let (overlay, (bytes, records), ended) = py.detach(|| (index.speculated(now), index.bytes(), index.ended()));
        let totals = counters(py, &ended)?;
        totals.set_item("bytes", bytes)?;
        totals.set_item("unique_blocks", records)?;
        totals.set_item("speculated", overlay.blocks)?;
        totals.set_item("confirmed", overlay.confirmed)?;
        totals.set_item("expired", overlay.expired)?;
        Ok(totals)
    }

    /// The blocks of a stream at this moment, or None when there is no such stream.
    fn _blocks(&self, py: Python<'_>, source: &str, rank: i64) -> Option<Listing> {
        let (blocks, planes) = py.detach(|| self.index.stream(source, rank).map(|_| self.index.blocks(source, rank)))?;
        Some(Listing {
            blocks: Mutex::new(blocks.into_iter()),
            planes,
        })
    }

    /// The key of the block that a stream means by a hash, or None when it holds no such block.
    fn _key_of(&self, py: Python<'_>, source: &str, rank: i64, hash: u64) -> Option<u64> {
        py.detach(|| self.index.key_of(source, rank, hash))
    }

    fn _digest(&self, py: Python<'_>, source: &str, rank: i64) -> Option<u128> {
        py.detach(|| self.index.stream(source, rank).map(|stream| stream.lock().digest))
    }

    fn _speculate(
        &self,
        source: &str,
        rank: i64,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        now: f64,
        ttl: f64,
    ) -> PyResult<()> {
        let given = tokens_of(tokens)?;
        let scope = scope_of(namespace)?;
        let (source, slice) = (source.to_owned(), given.slice());
        let worker = Worker { source, rank };
        tokens
            .py()
            .detach(|| self.index.speculate(&worker, slice, &scope, now, now + ttl));
        Ok(())
    }

    /// Writes a snapshot to a new file, natively: what waits for a stream may hold Python's lock, so the stream must not wait for that.
    fn _snapshot(&self, py: Python<'_>, path: PathBuf, workers: Option<Vec<(String, i64)>>) -> PyResult<()> {
        let write = || {
            let worker = |(source, rank)| Worker { source, rank };
            let workers: Option<HashSet<Worker>> = workers.map(|workers| workers.into_iter().map(worker).collect());
            let file = File::options().write(true).create_new(true).open(path)?;
            self.index.save(file, workers.as_ref())?.sync_all()
        };
        Ok(py.detach(write)?)
    }

    /// Restores a snapshot of which `read` returns as many bytes as it is asked for, or fewer, and none at its end.
    fn _restore(&self, py: Python<'_>, read: Py<PyAny>) -> PyResult<()> {
        py.detach(|| snapshot::restore(&self.index, Pieces::new(read)))
            .map_err(unread)
    }

    /// Adds what a snapshot holds, which comes as `_restore` has it. Returns the workers that came.
    fn _absorb(&self, py: Python<'_>, read: Py<PyAny>) -> PyResult<Vec<(String, i64)>> {
        let workers = py.detach(|| self.index.absorb(Pieces::new(read))).map_err(unread)?;
        Ok(workers.iter().map(|worker| (worker.source.clone(), worker.rank)).collect())
    }
}

fn plain(py: Python<'_>, info: Info) -> PyResult<Bound<'_, PyDict>> {
    let plain = counters(py, &info.counters)?;
    plain.set_item("source", &info.worker.source)?;
    plain.set_item("rank", info.worker.rank)?;
    plain.set_item("model", info.model)?;
    plain.set_item("blocks", info.blocks)?;
    plain.set_item("incarnation", info.incarnation)?;
    plain.set_item("last_seq", info.last)?;
    plain.set_item("orphans", info.orphans)?;
    plain.set_item("copies", info.copies)?;
    plain.set_item("block_sizes", info.sizes)?;
    plain.set_item("tiers", info.tiers)?;
    Ok(plain)
}
