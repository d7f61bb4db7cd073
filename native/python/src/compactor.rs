//! The class of `kvevents.publisher.compaction`.

use std::ptr::null_mut;
use std::slice;
use std::sync::{Mutex, TryLockError};

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::arguments::wire_limits_of;
use super::refusals::of_parent;
use super::turns::Turns;
use kvevents_compaction::{Compactor as SharedState, ExportedEvent, Location, RankEvents, Store};
use kvevents_index::keys;
use kvevents_index::sync::fork::ProcessOwned;
use kvevents_index::wire::scan::{SECONDS, Schema};

/// Number of bytes of payloads that are compacted without releasing the GIL: about 50 us of work.
const BRIEF: usize = 32 << 10;
/// Number of bytes that are copied in the time of creating one Python integer.
const COPIES_PER_NUMBER: usize = 128;

/// A rank with its events.
type PlainRankEvents<'py> = (Option<i64>, Vec<Bound<'py, PyTuple>>);

/// Compacts the payloads of one stream into its live blocks.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct Compactor {
    /// The lock is poisoned by a panic, which can leave the state inconsistent.
    shared: ProcessOwned<Mutex<SharedState>>,
    peers: Schema,
    /// The schema for results of `payloads`, which can exceed the limits of peers.
    ours: Schema,
}

impl Compactor {
    /// Calls `quick` with the state if it is not locked. If that returns None, calls `work` with the GIL released.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        quick: impl FnOnce(&mut SharedState) -> Option<R>,
        work: impl FnOnce(&mut SharedState) -> R + Send,
    ) -> PyResult<R> {
        let shared = self.shared.get().ok_or_else(|| of_parent(py))?;
        let mut done = None;
        match shared.try_lock() {
            Ok(mut shared) => done = quick(&mut shared),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Poisoned(_)) => return Err(damaged()),
        }
        match done {
            Some(done) => Ok(done),
            None => py.detach(|| shared.lock().map(|mut shared| work(&mut shared)).map_err(|_| damaged())),
        }
    }

    /// Calls `work` for an operation that takes negligible time.
    fn run_brief<R: Send>(&self, py: Python<'_>, work: impl Fn(&mut SharedState) -> R + Sync) -> PyResult<R> {
        self.with(py, |shared| Some(work(shared)), &work)
    }

    /// Calls `work` for a long operation, with the GIL released.
    fn run_long<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut SharedState) -> R + Send) -> PyResult<R> {
        self.with(py, |_| None, work)
    }
}

fn damaged() -> PyErr {
    PyRuntimeError::new_err("an internal error left this history inconsistent")
}

#[pymethods]
impl Compactor {
    #[new]
    fn new(wire_limits: [usize; 6]) -> PyResult<Self> {
        let schema = Schema::new(wire_limits_of(wire_limits)).map_err(PyValueError::new_err)?;
        let peers = schema.joining();
        Ok(Self {
            shared: ProcessOwned::new(Mutex::default()),
            ours: peers.unlimited(),
            peers,
        })
    }

    /// Applies one payload, or restores the state from one that `payloads` has returned.
    #[pyo3(signature = (payload, own=false))]
    fn apply(&self, py: Python<'_>, payload: &[u8], own: bool) -> PyResult<()> {
        if own {
            return self.run_long(py, |shared| shared.restore(payload, &self.ours));
        }
        let quick =
            |shared: &mut SharedState| (payload.len() < BRIEF && shared.apply_quick(payload, &self.peers)).then_some(());
        self.with(py, quick, |shared| shared.apply(payload, &self.peers))
    }

    /// Applies the payloads of numbered batches, with the GIL released if that takes long.
    fn apply_many(&self, py: Python<'_>, batches: &Bound<'_, PyList>) -> PyResult<()> {
        let payloads = payloads_of(batches)?;
        // Another thread could remove them from the list meanwhile.
        let held: Vec<Bound<'_, PyAny>> = batches.iter().collect();
        let is_brief = payloads.iter().map(|payload| payload.len()).sum::<usize>() < BRIEF;
        let quick = |shared: &mut SharedState| is_brief.then(|| shared.apply_many_quick(&payloads, &self.peers));
        let work = |shared: &mut SharedState| {
            shared.apply_many(&payloads, &self.peers);
            payloads.len()
        };
        let done = self.with(py, quick, work)?;
        if done < payloads.len() {
            self.run_long(py, |shared| shared.apply_many(&payloads[done..], &self.peers))?;
        }
        drop(held);
        Ok(())
    }

    /// Returns each rank with the events that rebuild its state after a clear, or None.
    fn events<'py>(&self, py: Python<'py>) -> PyResult<Option<Vec<PlainRankEvents<'py>>>> {
        let (ranks, mut turns) = (self.run_long(py, |shared| shared.events())?, Turns::new(py));
        let mut plain = |event: &ExportedEvent| {
            turns.spend(numbers_of(event))?;
            plain(py, event)
        };
        let mut of_rank = |(rank, events): &RankEvents| Ok((*rank, events.iter().map(&mut plain).collect::<PyResult<_>>()?));
        ranks.map(|ranks| ranks.iter().map(&mut of_rank).collect()).transpose()
    }

    /// Returns these events as payloads for `apply`. Other threads run meanwhile.
    fn payloads<'py>(&self, py: Python<'py>, limit: usize, ts: f64) -> PyResult<Option<Vec<Bound<'py, PyBytes>>>> {
        if limit == 0 {
            return Err(PyValueError::new_err("invalid limit: expected a number of bytes above 0"));
        }
        if !SECONDS.contains(&ts) {
            return Err(PyValueError::new_err(format!(
                "invalid ts {ts}: expected seconds since the epoch"
            )));
        }
        let (encoded, mut turns) = (self.run_long(py, |shared| shared.payloads(limit, ts))?, Turns::new(py));
        let bytes = |payload: &Vec<u8>| {
            turns.spend(payload.len() / COPIES_PER_NUMBER)?;
            Ok(PyBytes::new(py, payload))
        };
        encoded.map(|all| all.iter().map(bytes).collect()).transpose()
    }

    /// Records that a part of the stream was not received.
    fn mark_partial(&self, py: Python<'_>) -> PyResult<()> {
        self.run_brief(py, SharedState::mark_partial)
    }

    /// Removes everything.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.run_long(py, SharedState::clear)
    }

    /// Drops the state, and ignores events until the stream is cleared.
    fn invalidate(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let known = ["batches", "payloads", "digests"].into_iter().find(|&known| known == reason);
        let reason = known.ok_or_else(|| PyValueError::new_err("invalid reason: expected batches, payloads or digests"))?;
        self.run_long(py, |shared| shared.invalidate(reason))
    }

    #[getter]
    fn partial(&self, py: Python<'_>) -> PyResult<bool> {
        self.run_brief(py, |shared| shared.is_partial())
    }

    #[getter]
    fn live(&self, py: Python<'_>) -> PyResult<usize> {
        self.run_brief(py, |shared| shared.live())
    }

    #[getter]
    fn nodes(&self, py: Python<'_>) -> PyResult<usize> {
        self.run_brief(py, |shared| shared.nodes())
    }

    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.run_brief(py, |shared| shared.bytes())
    }

    #[getter]
    fn lost(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        self.run_brief(py, |shared| shared.invalid_reason())
    }

    /// Locks the state and calls `call`.
    #[cfg(feature = "testing")]
    fn _locked(&self, py: Python<'_>, call: Py<PyAny>) -> PyResult<()> {
        self.run_long(py, |_| Python::attach(|py| call.call0(py)).map(drop))?
    }

    /// Panics in the middle of a change, for tests.
    #[cfg(feature = "testing")]
    fn _break(&self, py: Python<'_>) -> PyResult<()> {
        self.run_long(py, |_| panic!("as a test"))
    }
}

/// Approximate number of Python integers of an event, which make up its cost; bytes cost little.
fn numbers_of(event: &ExportedEvent) -> usize {
    match event {
        ExportedEvent::Stored(store) => store.hashes.len() + store.tokens.len() / COPIES_PER_NUMBER,
        ExportedEvent::Removed(hashes, _) => hashes.len(),
        ExportedEvent::Cleared => 0,
    }
}

/// Borrows the payloads of numbered batches from the list. Safe functions of PyO3 would take three times as long: a tenth of the time of
/// compacting small batches.
fn payloads_of<'a>(batches: &'a Bound<'_, PyList>) -> PyResult<Vec<&'a [u8]>> {
    let mut payloads = Vec::with_capacity(batches.len());
    for at in 0..batches.len() {
        let (mut start, mut length) = (null_mut(), 0);
        // SAFETY: the GIL is held; each function checks the type of its argument, and none is called with null.
        let found = unsafe {
            let batch = ffi::PyList_GetItem(batches.as_ptr(), at as ffi::Py_ssize_t);
            let payload = if batch.is_null() {
                batch
            } else {
                ffi::PyTuple_GetItem(batch, 1)
            };
            !payload.is_null() && ffi::PyBytes_AsStringAndSize(payload, &mut start, &mut length) == 0
        };
        if !found {
            return Err(PyErr::fetch(batches.py()));
        }
        // SAFETY: these are the bytes of an immutable object, which its tuple owns, and the list owns the tuple.
        payloads.push(unsafe { slice::from_raw_parts(start.cast_const().cast(), length as usize) });
    }
    Ok(payloads)
}

fn plain<'py>(py: Python<'py>, event: &ExportedEvent) -> PyResult<Bound<'py, PyTuple>> {
    match event {
        ExportedEvent::Stored(store) => stored(py, store),
        ExportedEvent::Cleared => ("cleared", [0_u64; 0]).into_pyobject(py),
        ExportedEvent::Removed(hashes, location) => {
            let Location {
                medium,
                locality,
                ownership,
                group,
            } = location;
            (
                "removed",
                hashes,
                text(medium.as_deref()),
                *group,
                text(locality.as_deref()),
                text(ownership.as_deref()),
            )
                .into_pyobject(py)
        }
    }
}

fn stored<'py>(py: Python<'py>, store: &Store<'_>) -> PyResult<Bound<'py, PyTuple>> {
    let head = (
        "stored",
        &store.hashes[..],
        store.parent,
        PyBytes::new(py, keys::bytes_of(&store.tokens)),
        store.pairs,
        store.block_size,
        store.namespace.lora_id,
    );
    let place = (
        text(store.location.medium.as_deref()),
        text(store.namespace.lora_name.as_deref()),
        store.extra_keys.as_deref().map(|raw| PyBytes::new(py, raw)),
        store.location.group,
        text(store.kind.as_deref()),
        store.window,
        text(store.location.locality.as_deref()),
        text(store.location.ownership.as_deref()),
        text(store.namespace.cache_salt.as_deref()),
        store.keys.as_deref(),
    );
    let joined = head
        .into_pyobject(py)?
        .as_sequence()
        .concat(place.into_pyobject(py)?.as_sequence())?;
    Ok(joined.cast_into()?)
}

/// Returns bytes as text. The scanner has verified that they are UTF-8.
fn text(bytes: Option<&[u8]>) -> Option<&str> {
    bytes.map(|bytes| std::str::from_utf8(bytes).unwrap_or(""))
}
