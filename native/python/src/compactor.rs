//! The native class of `kvevents.publisher.compaction`.

use std::sync::Mutex;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::arguments::wire_limits_of;
use super::refusals::parent_exception;
use super::turns::Turns;
use kvevents_compaction::Compactor as SharedState;
use kvevents_index::sync::fork::ProcessOwned;
use kvevents_index::wire::scan::{Schema, TIMESTAMP_SECONDS};

/// Number of bytes that can be copied in the time of creating one Python integer.
const COPIES_PER_NUMBER: usize = 128;
/// The work of reading the payload of a batch object, in the unit of `Turns`.
const WORK_PER_BATCH: usize = 2;

/// Compacts the payloads of one stream into its live blocks.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct Compactor {
    /// The compacted state. If a panic leaves the state inconsistent, the lock is poisoned.
    shared: ProcessOwned<Mutex<SharedState>>,
    peers: Schema,
    /// The schema for payloads that `payloads` has returned, which can exceed the limits for peers.
    ours: Schema,
}

impl Compactor {
    /// Calls `work` with the state and without the GIL, so that no thread holds the GIL while it waits for the lock of the state.
    fn run<R: Send>(&self, py: Python<'_>, work: impl FnOnce(&mut SharedState) -> R + Send) -> PyResult<R> {
        let shared = self.shared.get().ok_or_else(|| parent_exception(py))?;
        py.detach(|| shared.lock().map(|mut shared| work(&mut shared)).map_err(|_| damaged()))
    }
}

fn damaged() -> PyErr {
    PyRuntimeError::new_err("an internal error has left this history inconsistent; create a new one")
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

    /// Applies one payload. If `own`, the payload is one that `payloads` has returned, and the state is restored from it.
    #[pyo3(signature = (payload, own=false))]
    fn apply(&self, py: Python<'_>, payload: &[u8], own: bool) -> PyResult<()> {
        if own {
            return self.run(py, |shared| shared.restore(payload, &self.ours));
        }
        self.run(py, |shared| shared.apply(payload, &self.peers))
    }

    /// Applies the payloads of numbered batches.
    fn apply_many<'py>(&self, py: Python<'py>, batches: &Bound<'py, PyList>) -> PyResult<()> {
        let (mut held, mut turns) = (Vec::with_capacity(batches.len()), Turns::new(py));
        for batch in batches {
            turns.spend(WORK_PER_BATCH)?;
            held.push(batch.cast::<PyTuple>()?.get_item(1)?.cast_into::<PyBytes>()?);
        }
        let payloads: Vec<&[u8]> = held.iter().map(|payload| payload.as_bytes()).collect();
        self.run(py, |shared| shared.apply_many(&payloads, &self.peers))
    }

    /// Returns payloads from which `apply` rebuilds the state; None if no such payloads are known. Other threads can run during the call.
    fn payloads<'py>(&self, py: Python<'py>, limit: usize, ts: f64) -> PyResult<Option<Vec<Bound<'py, PyBytes>>>> {
        if limit == 0 {
            return Err(PyValueError::new_err("invalid limit: expected a number of bytes above 0"));
        }
        if !TIMESTAMP_SECONDS.contains(&ts) {
            return Err(PyValueError::new_err(format!(
                "invalid ts {ts}: expected seconds since the epoch"
            )));
        }
        let (encoded, mut turns) = (self.run(py, |shared| shared.payloads(limit, ts))?, Turns::new(py));
        let bytes = |payload: &Vec<u8>| {
            turns.spend(payload.len() / COPIES_PER_NUMBER)?;
            Ok(PyBytes::new(py, payload))
        };
        encoded.map(|all| all.iter().map(bytes).collect()).transpose()
    }

    /// Records that a part of the stream was not received.
    fn mark_partial(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, SharedState::mark_partial)
    }

    #[getter]
    fn partial(&self, py: Python<'_>) -> PyResult<bool> {
        self.run(py, |shared| shared.is_partial())
    }

    #[getter]
    fn live(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |shared| shared.live())
    }

    #[getter]
    fn nodes(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |shared| shared.nodes())
    }

    #[getter]
    fn bytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |shared| shared.bytes())
    }

    #[getter]
    fn lost(&self, py: Python<'_>) -> PyResult<Option<&'static str>> {
        self.run(py, |shared| shared.invalid_reason())
    }

    /// Locks the state and calls `call`.
    #[cfg(feature = "testing")]
    fn _locked(&self, py: Python<'_>, call: Py<PyAny>) -> PyResult<()> {
        self.run(py, |_| Python::attach(|py| call.call0(py)).map(drop))?
    }

    /// Panics during a change, for tests.
    #[cfg(feature = "testing")]
    fn _break(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, |_| panic!("as a test"))
    }
}
