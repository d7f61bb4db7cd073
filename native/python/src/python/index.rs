//! The class behind `kvevents.index.PrefixIndex`: each method reads its arguments, and lets other threads run where that is worth it.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use super::answers::{Match, counters};
use super::arguments::{Named, Pieces, Tokens, keys_of, scheme_of, scope_of, tokens_of, wire_limits_of};
use kvevents_index::core::Worker;
use kvevents_index::index::{Held, Index, Info, Matches, Outcome, Scope};
use kvevents_index::limits::Limits;
use kvevents_index::planes::Plane;
use kvevents_index::scan::Schema;
use kvevents_index::snapshot::{self, Failure};

/// Bytes of a payload from which on other threads of Python run meanwhile; below, switching costs more than the work. Whatever the size, no lock is
/// waited for while Python's is held.
const MANY_BYTES: usize = 2_048;
/// The same for the tokens of a prompt: about ten microseconds.
const MANY_TOKENS: usize = 1 << 16;
/// Tokens of prompts that are matched before a call looks whether a signal is to be handled.
const TOKENS_AT_ONCE: usize = 1 << 20;
/// How often another long call looks whether a signal is to be handled.
const SIGNALS: Duration = Duration::from_millis(50);

/// Why a snapshot was not read.
fn unread(failure: Failure) -> PyErr {
    match failure {
        Failure::Io(error) => error.into(),
        Failure::Bad(what) => PyValueError::new_err(what),
    }
}

/// Looks now and then, in a call that may take long, whether Python has a signal to handle, such as an interrupt.
struct Signals(Instant);

impl Signals {
    fn new() -> Self {
        Self(Instant::now())
    }

    fn check(&mut self) -> PyResult<()> {
        if self.0.elapsed() < SIGNALS {
            return Ok(());
        }
        self.0 = Instant::now();
        Python::attach(|py| py.check_signals())
    }
}

/// A file that is written to until there is a signal.
struct Interruptible {
    file: File,
    signals: Signals,
}

impl Write for Interruptible {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.signals.check().map_err(io::Error::other)?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Limits by their names.
fn limits_of(memory: Option<usize>, named: &HashMap<String, usize>) -> PyResult<Limits> {
    let mut limits = Limits::default();
    limits.memory = memory;
    for (name, &limit) in named {
        let place = match name.as_str() {
            "max_orphans" => &mut limits.orphans,
            "max_orphan_bytes" => &mut limits.orphan_bytes,
            "max_places" => &mut limits.places,
            "max_groups" => &mut limits.groups,
            "max_block_sizes" => &mut limits.block_sizes,
            "max_records_per_key" => &mut limits.records_per_key,
            "max_blocks_per_hash" => &mut limits.blocks_per_hash,
            "max_fences" => &mut limits.fences,
            "max_speculated" => &mut limits.speculated,
            _ => return Err(PyValueError::new_err(format!("an index has no limit {name}"))),
        };
        *place = limit;
    }
    Ok(limits)
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

impl NativeIndex {
    /// The index, unless a panic has damaged it.
    fn whole(&self, py: Python<'_>) -> PyResult<&Index> {
        if self.index.is_damaged() {
            Err(damaged(py))
        } else {
            Ok(&self.index)
        }
    }

    /// `match` of one prompt. Waits for no lock while Python's is held, and copies what others might change while it is not.
    fn matched(&self, py: Python<'_>, tokens: &Tokens, scope: &Scope) -> PyResult<Matches> {
        let (index, slice) = (self.whole(py)?, tokens.slice());
        if slice.len() < MANY_TOKENS
            && let Some(found) = index.try_matched(slice, scope)
        {
            return Ok(found);
        }
        let copy = slice.to_vec();
        Ok(py.detach(|| index.matched(&copy, scope)))
    }

    /// Applies a payload. Waits for no lock while Python's is held.
    fn batch(&self, py: Python<'_>, stream: (&str, i64), incarnation: i64, seq: i64, payload: &[u8]) -> Outcome {
        let ((source, rank), index) = (stream, &self.index);
        if payload.len() < MANY_BYTES
            && let Some(outcome) = index.try_batch(source, rank, incarnation, seq, payload)
        {
            return outcome;
        }
        py.detach(|| index.batch(source, rank, incarnation, seq, payload))
    }

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
            Outcome::Damaged => Err(damaged(py)),
        }
    }

    fn now(slf: &Bound<'_, Self>) -> PyResult<f64> {
        slf.call_method0(pyo3::intern!(slf.py(), "_now"))?.extract()
    }
}

/// What every call of an index raises that a panic has damaged.
fn damaged(py: Python<'_>) -> PyErr {
    let text = "the index is damaged: an error of kvevents left it changed by half, and what it would answer may be wrong; \
                restore a snapshot, or begin with an empty index";
    let raised = || py.import("kvevents.errors")?.getattr("DamagedIndexError")?.call1((text,));
    raised().map_or_else(|error| error, PyErr::from_value)
}

#[pymethods]
impl NativeIndex {
    #[new]
    fn new(
        wire_limits: [usize; 6],
        memory_limit: Option<usize>,
        limits: HashMap<String, usize>,
        outcomes: [Py<PyAny>; 4],
    ) -> PyResult<Self> {
        let (peers, ours) = wire_limits_of(wire_limits);
        let schema = |limits| Schema::new(limits).map_err(PyValueError::new_err);
        let limits = limits_of(memory_limit, &limits)?;
        let [applied, cleared, duplicate, void] = outcomes;
        Ok(Self {
            index: Arc::new(Index::new(schema(peers)?.joining(), limits)),
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
        let outcome = this.batch(py, (source, rank), incarnation, seq, payload.as_bytes());
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
        let outcome = py.detach(|| self.index.batch_by(&self.ours, source, rank, incarnation, seq, payload));
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
        let outcomes = py.detach(|| -> PyResult<Vec<Outcome>> {
            let (mut outcomes, mut signals) = (Vec::with_capacity(borrowed.len()), Signals::new());
            for &(source, rank, incarnation, seq, payload) in &borrowed {
                match self.index.batch(source, rank, incarnation, seq, payload) {
                    Outcome::Unread => break,
                    outcome => outcomes.push(outcome),
                }
                signals.check()?;
            }
            Ok(outcomes)
        })?;
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
        let (read, odd) = py.detach(|| -> PyResult<_> {
            let (mut odd, mut signals) = (Vec::new(), Signals::new());
            for (at, (seq, payload)) in (first..).zip(&borrowed).enumerate() {
                match self.index.batch(source, rank, incarnation, seq, payload) {
                    Outcome::Unread => return Ok((at, odd)),
                    Outcome::Applied(false) => {}
                    outcome => odd.push((at, outcome)),
                }
                signals.check()?;
            }
            Ok((borrowed.len(), odd))
        })?;
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
        let mut found = this.matched(py, &given, &scope)?;
        if overlay {
            let (now, tokens) = (Self::now(slf)?, given.slice().to_vec());
            py.detach(|| this.index.believed(&tokens, &scope, now, &mut found));
        }
        Ok(Match { found })
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
        let (index, mut found) = (self.whole(py)?, Vec::with_capacity(given.len()));
        let mut rest = &given[..];
        while !rest.is_empty() {
            // Copies of some, which nobody changes while Python's lock is not held.
            let mut tokens = 0;
            let fits = |given: &&Tokens| {
                let first = tokens == 0;
                tokens += given.slice().len().max(1);
                first || tokens <= TOKENS_AT_ONCE
            };
            let (some, others) = rest.split_at(rest.iter().take_while(fits).count());
            let copies: Vec<Vec<u32>> = some.iter().map(|given| given.slice().to_vec()).collect();
            let matched: Vec<Matches> = py.detach(|| copies.iter().map(|tokens| index.matched(tokens, &scope)).collect());
            found.extend(matched.into_iter().map(|found| Match { found }));
            py.check_signals()?;
            rest = others;
        }
        Ok(found)
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
        let index = self.whole(py)?;
        let found = py.detach(|| index.matched_keys(&keys, size, &model));
        let found = found.ok_or_else(|| {
            PyValueError::new_err("workers have blocks of different sizes; say block_size, the one that the keys are of")
        })?;
        Ok(Match { found })
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
    fn _blocks(&self, py: Python<'_>, source: &str, rank: i64) -> PyResult<Option<Listing>> {
        let index = self.whole(py)?;
        let found = py.detach(|| index.stream(source, rank).map(|_| index.blocks(source, rank)));
        Ok(found.map(|(blocks, planes)| Listing {
            blocks: Mutex::new(blocks.into_iter()),
            planes,
        }))
    }

    /// The key of the block that a stream means by a hash, or None when it holds no such block.
    fn _key_of(&self, py: Python<'_>, source: &str, rank: i64, hash: u64) -> Option<u64> {
        py.detach(|| self.index.key_of(source, rank, hash))
    }

    fn _digest(&self, py: Python<'_>, source: &str, rank: i64) -> PyResult<Option<u128>> {
        let index = self.whole(py)?;
        Ok(py.detach(|| index.stream(source, rank).map(|stream| stream.lock().digest)))
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
        let (source, tokens_of) = (source.to_owned(), given.slice().to_vec());
        let worker = Worker { source, rank };
        tokens
            .py()
            .detach(|| self.index.speculate(&worker, &tokens_of, &scope, now, now + ttl));
        Ok(())
    }

    /// Writes a snapshot to a new file, natively: what waits for a stream may hold Python's lock, so the stream must not wait for that.
    fn _snapshot(&self, py: Python<'_>, path: PathBuf, workers: Option<Vec<(String, i64)>>) -> PyResult<()> {
        let index = self.whole(py)?;
        let write = || {
            let worker = |(source, rank)| Worker { source, rank };
            let workers: Option<HashSet<Worker>> = workers.map(|workers| workers.into_iter().map(worker).collect());
            let file = Interruptible {
                file: File::options().write(true).create_new(true).open(path)?,
                signals: Signals::new(),
            };
            index.save(file, workers.as_ref())?.file.sync_all()
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
        let index = self.whole(py)?;
        let workers = py.detach(|| index.absorb(Pieces::new(read))).map_err(unread)?;
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
