//! The native class of `kvevents.index.PrefixIndex`. Each method reads its arguments, and then releases the GIL before it calls the index.
//! So it does not hold the GIL while it waits for a lock of the index.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};

use super::arguments::{PythonReader, StreamName, keys_of, scheme_of, scope_of, tokens_of, wire_limits_of};
use super::matches::{Match, counters};
use super::refusals::{damaged, parent_exception};
use super::turns::{Signals, Turns};
use kvevents_index::holders::placements::Placement;
use kvevents_index::keys;
use kvevents_index::limits::Limits;
use kvevents_index::lookup::Matches;
use kvevents_index::prefix_index::{ApplyResult, HeldBlock, Info, Outcome, PrefixIndex};
use kvevents_index::snapshot::{self, Failure};
use kvevents_index::store::members::Worker;
use kvevents_index::stream::Estimate;
use kvevents_index::sync::fork::ProcessOwned;
use kvevents_index::wire::decode::Heartbeat;
use kvevents_index::wire::scan::Schema;

/// Number of tokens of prompts that are copied and matched between two checks for signals.
const TOKENS_AT_ONCE: usize = 1 << 20;
/// The work of reading the attributes of a batch, in the unit of `Turns`.
const WORK_PER_BATCH: usize = 16;
/// The work of creating the dictionary of a worker, in the unit of `Turns`.
const WORK_PER_WORKER: usize = 128;
/// The work of creating the object of a rejection, in the unit of `Turns`.
const WORK_PER_REJECTED: usize = 32;

/// Returns the exception for a snapshot that could not be read.
fn snapshot_exception(failure: Failure) -> PyErr {
    match failure {
        Failure::Io(error) => error.into(),
        Failure::Bad(what) => PyValueError::new_err(what),
    }
}

/// A file whose writes fail after a signal handler has raised an exception.
struct InterruptibleFile {
    file: File,
    signals: Signals,
}

impl Write for InterruptibleFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.signals.check().map_err(io::Error::other)?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Converts limits from a dictionary from names to values.
fn limits_of(memory: Option<usize>, named: &HashMap<String, usize>) -> PyResult<Limits> {
    let mut limits = Limits {
        memory,
        ..Limits::default()
    };
    for (name, &limit) in named {
        let place = match name.as_str() {
            "max_orphans" => &mut limits.orphans,
            "max_orphan_bytes" => &mut limits.orphan_bytes,
            "max_places" => &mut limits.places,
            "max_groups" => &mut limits.groups,
            "max_block_sizes" => &mut limits.block_sizes,
            "max_records_per_key" => &mut limits.records_per_key,
            "max_blocks_per_hash" => &mut limits.blocks_per_hash,
            "max_ranks" => &mut limits.ranks,
            "max_fences" => &mut limits.fences,
            "max_speculated" => &mut limits.speculated,
            _ => return Err(PyValueError::new_err(format!("unknown limit {name} of an index"))),
        };
        *place = limit;
    }
    Ok(limits)
}

/// The native part of `kvevents.index.PrefixIndex`.
#[pyclass(subclass, frozen, module = "kvevents_native._native")]
pub(super) struct NativeIndex {
    index: ProcessOwned<Arc<PrefixIndex>>,
    applied: Py<PyAny>,
    cleared: Py<PyAny>,
    duplicate: Py<PyAny>,
    void: Py<PyAny>,
}

/// Key, hash, tier, group, and the maximum and the minimum number of copies of a block on a placement.
type BlockTuple = (u64, u64, String, i64, u32, u32);

/// The blocks of a stream at one moment. Each block is returned in only one call of `take`.
#[pyclass(frozen, module = "kvevents.index")]
pub(super) struct Listing {
    blocks: ProcessOwned<Mutex<std::vec::IntoIter<HeldBlock>>>,
    placements: Vec<Placement>,
}

#[pymethods]
impl Listing {
    /// Returns at most `most` further blocks; an empty list after the last block. A block is listed for each of its placements, as `(key,
    /// hash, tier, group, maximum copies, minimum copies)`.
    ///
    /// Each call releases the GIL, so that a long listing does not delay other threads.
    fn take(&self, py: Python<'_>, most: usize) -> PyResult<Vec<BlockTuple>> {
        let blocks = self.blocks.get().ok_or_else(|| parent_exception(py))?;
        let plain = |held: HeldBlock| {
            let placement = &self.placements[held.placement as usize];
            (
                held.key,
                held.hash,
                placement.tier.clone(),
                placement.group,
                held.copies.most,
                held.copies.least,
            )
        };
        Ok(py.detach(|| blocks.lock().by_ref().take(most).map(plain).collect()))
    }
}

impl NativeIndex {
    /// Returns the index. Raises an exception in a forked child process.
    fn index(&self, py: Python<'_>) -> PyResult<&PrefixIndex> {
        self.index.get().map(Arc::as_ref).ok_or_else(|| parent_exception(py))
    }

    /// Returns the index for native threads.
    pub(super) fn shared(&self, py: Python<'_>) -> PyResult<Arc<PrefixIndex>> {
        self.index.get().cloned().ok_or_else(|| parent_exception(py))
    }

    /// Returns the index. Raises an exception if a panic has damaged it.
    fn undamaged(&self, py: Python<'_>) -> PyResult<&PrefixIndex> {
        let index = self.index(py)?;
        if index.is_damaged() { Err(damaged(py)) } else { Ok(index) }
    }

    fn outcome_object(&self, py: Python<'_>, outcome: Outcome) -> PyResult<Py<PyAny>> {
        match outcome {
            Outcome::Applied(false) => Ok(self.applied.clone_ref(py)),
            Outcome::Applied(true) => Ok(self.cleared.clone_ref(py)),
            Outcome::Duplicate => Ok(self.duplicate.clone_ref(py)),
            Outcome::Void => Ok(self.void.clone_ref(py)),
            Outcome::Full => Err(PyValueError::new_err(
                "the index has as many streams as it can hold; remove workers that are gone",
            )),
            Outcome::Damaged => Err(damaged(py)),
        }
    }

    /// Returns the result of a delivery. If there is a report, the Python method `_found` creates the objects for it.
    fn result_object(slf: &Bound<'_, Self>, applied: ApplyResult) -> PyResult<Py<PyAny>> {
        let py = slf.py();
        let outcome = slf.get().outcome_object(py, applied.outcome)?;
        let Some(report) = applied.report else { return Ok(outcome) };
        let rejected = report.rejected.iter();
        let rejected = rejected.map(|one| {
            let raw = PyBytes::new(py, &one.raw);
            (one.reason.as_str(), &one.detail, one.index, raw, one.count)
        });
        let rejected: Vec<_> = rejected.collect();
        let heartbeat = report.heartbeat.as_ref();
        let found = (
            outcome,
            rejected,
            heartbeat.map(plain_heartbeat),
            report.agrees,
            report.attested,
            report
                .estimate
                .map(|estimate| estimate.map_or(("", 0), |estimate| (estimate.code(), estimate.count()))),
        );
        Ok(slf.call_method1(pyo3::intern!(py, "_found"), found)?.unbind())
    }

    fn now(slf: &Bound<'_, Self>) -> PyResult<f64> {
        slf.call_method0(pyo3::intern!(slf.py(), "_now"))?.extract()
    }
}

/// The fields of `kvevents.events.Heartbeat`.
pub(super) fn plain_heartbeat(beat: &Heartbeat) -> (Option<&str>, f64, &str, &str, u64, Option<u64>) {
    let Heartbeat {
        digest, trust, reason, ..
    } = beat;
    let digest = digest.as_deref();
    (digest, beat.every, trust, reason, beat.incarnation, beat.attestation)
}

/// The work of creating the Python objects of a batch's result, in the unit of `Turns`.
fn work_of(applied: &ApplyResult) -> usize {
    let rejected = applied.report.as_ref().map_or(0, |report| report.rejected.len());
    1 + WORK_PER_REJECTED * rejected
}

/// Calls `work`, which changes the index. If a panic leaves the index half changed, raises the exception that all later calls raise.
fn run_change<R>(index: &PrefixIndex, work: impl FnOnce() -> R) -> PyResult<R> {
    catch_unwind(AssertUnwindSafe(work)).or_else(|panic| {
        if index.is_damaged() {
            Python::attach(|py| Err(damaged(py)))
        } else {
            resume_unwind(panic)
        }
    })
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
        let schema = Schema::new(wire_limits_of(wire_limits)).map_err(PyValueError::new_err)?;
        let limits = limits_of(memory_limit, &limits)?;
        let [applied, cleared, duplicate, void] = outcomes;
        Ok(Self {
            index: ProcessOwned::new(Arc::new(PrefixIndex::new(schema.joining(), limits))),
            applied,
            cleared,
            duplicate,
            void,
        })
    }

    /// Applies the payload of one batch as the engine sent it.
    ///
    /// `stream` is `(source, rank)`, or only `source` for rank 0.
    fn apply_payload(
        slf: &Bound<'_, Self>,
        stream: Bound<'_, PyAny>,
        incarnation: i64,
        seq: i64,
        payload: Bound<'_, PyBytes>,
    ) -> PyResult<Py<PyAny>> {
        let (py, named) = (slf.py(), StreamName::from_object(&stream)?);
        let ((source, rank), index, payload) = (named.parts()?, slf.get().index(py)?, payload.as_bytes());
        let applied = run_change(index, || py.detach(|| index.batch(source, rank, incarnation, seq, payload)))?;
        Self::result_object(slf, applied)
    }

    /// Applies events that Python has encoded. Returns None if one of the events cannot be read.
    fn _apply(
        slf: &Bound<'_, Self>,
        py: Python<'_>,
        stream: Bound<'_, PyAny>,
        incarnation: i64,
        seq: i64,
        payload: &[u8],
        loses_events: bool,
    ) -> PyResult<Option<Py<PyAny>>> {
        let (index, named) = (slf.get().index(py)?, StreamName::from_object(&stream)?);
        let parts = named.parts()?;
        let apply = || py.detach(|| index.events(parts, incarnation, seq, payload, loses_events));
        let applied = run_change(index, apply)?;
        applied.map(|applied| Self::result_object(slf, applied)).transpose()
    }

    /// Applies encoded batches, with the GIL released.
    fn _apply_many(slf: &Bound<'_, Self>, py: Python<'_>, batches: Vec<Bound<'_, PyAny>>) -> PyResult<Vec<Py<PyAny>>> {
        let (index, mut turns) = (slf.get().index(py)?, Turns::new(py));
        let mut found = Vec::with_capacity(batches.len());
        for batch in &batches {
            turns.spend(WORK_PER_BATCH)?;
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
        let apply = || -> PyResult<Vec<ApplyResult>> {
            let (mut applied, mut signals) = (Vec::with_capacity(borrowed.len()), Signals::new());
            for &(source, rank, incarnation, seq, payload) in &borrowed {
                applied.push(index.batch(source, rank, incarnation, seq, payload));
                signals.check()?;
            }
            Ok(applied)
        };
        let applied = run_change(index, || py.detach(apply))??;
        let object = |applied| {
            turns.spend(work_of(&applied))?;
            Self::result_object(slf, applied)
        };
        applied.into_iter().map(object).collect()
    }

    /// Applies payloads of one stream whose sequence numbers begin with `first`, with the GIL released. Returns the index and the result of
    /// each payload that was not applied, or about which there is a report.
    fn _apply_run(
        slf: &Bound<'_, Self>,
        source: &str,
        rank: i64,
        incarnation: i64,
        first: i64,
        payloads: Vec<Bound<'_, PyBytes>>,
    ) -> PyResult<BTreeMap<usize, Py<PyAny>>> {
        let py = slf.py();
        let borrowed: Vec<&[u8]> = payloads.iter().map(|payload| payload.as_bytes()).collect();
        let index = slf.get().index(py)?;
        let apply = || -> PyResult<_> {
            let (mut odd, mut signals) = (Vec::new(), Signals::new());
            for (at, (seq, payload)) in (first..).zip(&borrowed).enumerate() {
                let applied = index.batch(source, rank, incarnation, seq, payload);
                if applied.outcome != Outcome::Applied(false) || applied.report.is_some() {
                    odd.push((at, applied));
                }
                signals.check()?;
            }
            Ok(odd)
        };
        let (odd, mut turns) = (run_change(index, || py.detach(apply))??, Turns::new(py));
        let object = |(at, applied)| {
            turns.spend(work_of(&applied))?;
            Ok((at, Self::result_object(slf, applied)?))
        };
        odd.into_iter().map(object).collect()
    }

    /// Compares a stream with the digest and the attestation of a heartbeat. `stated` is the rank that the batch with the heartbeat states.
    /// Returns whether the digest agrees, and whether the attestation agrees. Each is None if the value was not given or the stream is
    /// unknown.
    fn _compare(
        &self,
        py: Python<'_>,
        source: &str,
        rank: i64,
        stated: Option<i64>,
        digest: Option<&str>,
        attestation: Option<u64>,
    ) -> PyResult<(Option<bool>, Option<bool>)> {
        let index = self.index(py)?;
        Ok(py.detach(|| index.compare(source, rank, stated, digest, attestation)))
    }

    fn _gap(&self, py: Python<'_>, source: &str, rank: i64, incarnation: i64, last: i64) -> PyResult<Py<PyAny>> {
        let index = self.index(py)?;
        let outcome = py.detach(|| index.gap(source, rank, incarnation, last));
        self.outcome_object(py, outcome)
    }

    fn _reset(&self, py: Python<'_>, source: &str, rank: i64, incarnation: i64) -> PyResult<Py<PyAny>> {
        let index = self.index(py)?;
        let outcome = run_change(index, || py.detach(|| index.reset(source, rank, incarnation)))?;
        self.outcome_object(py, outcome)
    }

    /// Returns the length of the prefix of `tokens` that each worker holds.
    ///
    /// `tokens` are a list or tuple of integers, or a one-dimensional buffer of them (`array`, NumPy, memoryview); buffers of 32-bit
    /// unsigned integers are the fastest. `namespace` selects the model and the namespace of the lookup. Without `namespace`, the lookup
    /// covers workers without a model, and blocks without LoRA and salt. If `overlay`, prompts that were passed to `speculate` count as
    /// held on the GPU. Raises `TypeError` or `OverflowError` for invalid token ids.
    ///
    /// vLLM always recomputes the last token of a prompt: `match(tokens, max_tokens=len(tokens) - 1)` returns the prefix that vLLM will
    /// find cached. No match is longer than `max_tokens`. Later tokens can still affect a match, if the engine's hashes cover tokens after
    /// their blocks (EAGLE, MTP).
    #[pyo3(name = "match", signature = (tokens, namespace=None, *, overlay=false, max_tokens=None))]
    fn match_(
        slf: &Bound<'_, Self>,
        tokens: &Bound<'_, PyAny>,
        namespace: Option<&Bound<'_, PyAny>>,
        overlay: bool,
        max_tokens: Option<usize>,
    ) -> PyResult<Match> {
        let (py, this) = (slf.py(), slf.get());
        let tokens = tokens_of(tokens, &mut Turns::new(py))?;
        let (scope, index) = (scope_of(namespace)?, this.undamaged(py)?);
        let longest = max_tokens.unwrap_or(usize::MAX).min(tokens.len());
        let now = overlay.then(|| Self::now(slf)).transpose()?;
        let found = py.detach(|| {
            let mut found = index.match_prefix(&tokens, longest, &scope);
            if let Some(now) = now {
                index.extend_by_overlay(&tokens[..longest], &scope, now, &mut found);
            }
            found
        });
        Ok(Match { found })
    }

    /// Matches several prompts of one namespace.
    #[pyo3(signature = (prompts, namespace=None))]
    fn match_many(
        &self,
        py: Python<'_>,
        prompts: Vec<Bound<'_, PyAny>>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Match>> {
        let scope = scope_of(namespace)?;
        let (index, mut turns, mut found) = (self.undamaged(py)?, Turns::new(py), Vec::with_capacity(prompts.len()));
        let mut prompts = prompts.iter().peekable();
        while prompts.peek().is_some() {
            let (mut copies, mut tokens) = (Vec::<Vec<u32>>::new(), 0);
            while let Some(prompt) = prompts.next_if(|_| tokens < TOKENS_AT_ONCE) {
                copies.push(tokens_of(prompt, &mut turns)?);
                tokens += copies.last().map_or(0, Vec::len) + 1;
            }
            let matched: Vec<Matches> = py.detach(|| copies.iter().map(|tokens| index.match_prompt(tokens, &scope)).collect());
            found.extend(matched.into_iter().map(|found| Match { found }));
            py.check_signals()?;
        }
        Ok(found)
    }

    /// Matches rolling keys as `block_keys` returns them: all keys of a prompt, from its first block on.
    ///
    /// Blocks are looked up one after another, so keys from the middle of a prompt match nothing. Only the model of `namespace` matters,
    /// since keys include the LoRA and the salt. Raises `ValueError` if workers have different block sizes and `block_size` is not given.
    /// Raises `TypeError` if `keys` is not a list or buffer of unsigned 64-bit numbers.
    #[pyo3(signature = (keys, block_size=None, namespace=None))]
    fn match_keys(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        block_size: Option<i64>,
        namespace: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Match> {
        let keys = keys_of(keys, &mut Turns::new(py))?;
        let size = block_size
            .map(|size| scheme_of(size, false))
            .transpose()?
            .map(|scheme| scheme.size);
        let model = scope_of(namespace)?.model;
        let index = self.undamaged(py)?;
        let found = py.detach(|| index.match_rolling_keys(&keys, size, &model));
        let found = found
            .ok_or_else(|| PyValueError::new_err("workers have blocks of different sizes: give the block_size of the keys"))?;
        Ok(Match { found })
    }

    fn _label(&self, py: Python<'_>, source: &str, model: Option<&str>) -> PyResult<()> {
        let index = self.index(py)?;
        py.detach(|| index.label(source, model));
        Ok(())
    }

    fn _set_drafts(&self, py: Python<'_>, source: &str, groups: Option<Vec<i64>>) -> PyResult<()> {
        let index = self.index(py)?;
        run_change(index, || py.detach(|| index.set_drafts(source, groups)))
    }

    fn _replace_lora(&self, py: Python<'_>, source: &str, lora: &str) -> PyResult<()> {
        let index = self.index(py)?;
        run_change(index, || {
            py.detach(|| index.replace_lora(source, keys::lora_name(lora.as_bytes())))
        })
    }

    fn _remove(&self, py: Python<'_>, source: &str, rank: Option<i64>) -> PyResult<usize> {
        let index = self.index(py)?;
        run_change(index, || py.detach(|| index.remove(source, rank)))
    }

    fn _admit(&self, py: Python<'_>, source: &str, rank: i64) -> PyResult<()> {
        let index = self.index(py)?;
        py.detach(|| index.admit(source, rank));
        Ok(())
    }

    /// Returns a dictionary for each worker, with the fields of `WorkerInfo`.
    fn _workers<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let (index, mut turns) = (self.index(py)?, Turns::new(py));
        let infos = py.detach(|| index.infos());
        let plain = |info| {
            turns.spend(WORK_PER_WORKER)?;
            info_dict(py, info)
        };
        infos.into_iter().map(plain).collect()
    }

    /// Returns the dictionary of one worker; None if the worker is unknown.
    fn _worker<'py>(&self, py: Python<'py>, source: &str, rank: i64) -> PyResult<Option<Bound<'py, PyDict>>> {
        let index = self.index(py)?;
        py.detach(|| index.info(source, rank))
            .map(|info| info_dict(py, info))
            .transpose()
    }

    /// Returns a dictionary of the statistics about the whole index.
    fn _totals<'py>(slf: &Bound<'py, Self>, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (index, now) = (slf.get().index(py)?, Self::now(slf)?);
        let (overlay, (bytes, records), ended) = py.detach(|| (index.speculated(now), index.bytes(), index.ended()));
        let totals = counters(py, &ended)?;
        totals.set_item("bytes", bytes)?;
        totals.set_item("unique_blocks", records)?;
        totals.set_item("speculated", overlay.blocks)?;
        totals.set_item("confirmed", overlay.confirmed)?;
        totals.set_item("expired", overlay.expired)?;
        totals.set_item("displaced", overlay.displaced)?;
        Ok(totals)
    }

    /// Returns the present blocks of a stream; None if the stream is unknown.
    fn _blocks(&self, py: Python<'_>, source: &str, rank: i64) -> PyResult<Option<Listing>> {
        let index = self.undamaged(py)?;
        let found = py.detach(|| index.stream(source, rank).map(|_| index.blocks(source, rank)));
        Ok(found.map(|(blocks, placements)| Listing {
            blocks: ProcessOwned::new(Mutex::new(blocks.into_iter())),
            placements,
        }))
    }

    /// Returns the key of the block that has a hash in a stream. `stated` is the rank that the batch with the block states. Returns None if
    /// the stream does not hold the block.
    fn _key_of(&self, py: Python<'_>, source: &str, rank: i64, stated: Option<i64>, hash: u64) -> PyResult<Option<u64>> {
        let index = self.index(py)?;
        Ok(py.detach(|| index.key_of(source, rank, stated, hash)))
    }

    fn _digest(&self, py: Python<'_>, source: &str, rank: i64) -> PyResult<Option<u128>> {
        let index = self.undamaged(py)?;
        Ok(py.detach(|| index.digest(source, rank)))
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
        let (index, mut turns) = (self.index(tokens.py())?, Turns::new(tokens.py()));
        let prompt = tokens_of(tokens, &mut turns)?;
        let scope = scope_of(namespace)?;
        let source = source.to_owned();
        let worker = Worker { source, rank };
        tokens
            .py()
            .detach(|| index.speculate(&worker, &prompt, &scope, now, now + ttl));
        Ok(())
    }

    /// Writes a snapshot to a new file, without the GIL. Another thread can hold the GIL while it waits for the lock of a stream. So a
    /// thread that has locked a stream must not wait for the GIL.
    fn _snapshot(&self, py: Python<'_>, path: PathBuf, workers: Option<Vec<(String, i64)>>) -> PyResult<()> {
        let index = self.undamaged(py)?;
        let write = || {
            let worker = |(source, rank)| Worker { source, rank };
            let workers: Option<HashSet<Worker>> = workers.map(|workers| workers.into_iter().map(worker).collect());
            let file = InterruptibleFile {
                file: File::options().write(true).create_new(true).open(path)?,
                signals: Signals::new(),
            };
            index.save(file, workers.as_ref())?.file.sync_all()
        };
        Ok(py.detach(write)?)
    }

    /// Restores a snapshot. The function `read` returns at most the requested number of bytes, and no bytes at the end.
    fn _restore(&self, py: Python<'_>, read: Py<PyAny>) -> PyResult<()> {
        let index = self.index(py)?;
        py.detach(|| snapshot::restore(index, PythonReader::new(read)))
            .map_err(snapshot_exception)
    }

    /// Adds the contents of a snapshot; `read` is as for `_restore`. Returns the workers that were added.
    fn _absorb(&self, py: Python<'_>, read: Py<PyAny>) -> PyResult<Vec<(String, i64)>> {
        let index = self.undamaged(py)?;
        let workers = py
            .detach(|| index.absorb(PythonReader::new(read)))
            .map_err(snapshot_exception)?;
        Ok(workers.iter().map(|worker| (worker.source.clone(), worker.rank)).collect())
    }

    /// Panics during a change, for tests.
    #[cfg(feature = "testing")]
    fn _break(&self, py: Python<'_>) -> PyResult<()> {
        let index = self.index(py)?;
        run_change(index, || {
            py.detach(|| {
                let _writer = index.shared_lock.write();
                panic!("as a test");
            })
        })
    }
}

fn info_dict(py: Python<'_>, info: Info) -> PyResult<Bound<'_, PyDict>> {
    let plain = counters(py, &info.counters)?;
    plain.set_item("source", &info.worker.source)?;
    plain.set_item("rank", info.worker.rank)?;
    plain.set_item("model", info.model)?;
    plain.set_item("blocks", info.blocks)?;
    plain.set_item("incarnation", info.incarnation)?;
    plain.set_item("last_seq", info.last)?;
    plain.set_item("orphans", info.orphans)?;
    plain.set_item("copies", info.copies)?;
    plain.set_item("uncertain", info.uncertain)?;
    plain.set_item("attested", info.attested)?;
    plain.set_item("block_sizes", info.sizes)?;
    plain.set_item("estimate", info.estimate.map(Estimate::code))?;
    plain.set_item("lacks_refused", info.lacks_refused)?;
    plain.set_item("lacks_dropped", info.lacks_dropped)?;
    plain.set_item("carried_ranks", info.carried_ranks)?;
    plain.set_item("tiers", info.tiers)?;
    Ok(plain)
}
