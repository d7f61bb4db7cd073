//! The class behind `kvevents.publisher.history`.

use std::ptr::null_mut;
use std::slice;

use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::arguments::wire_limits_of;
use kvevents_compaction::{Compactor as Core, ExportedEvent, Location, Store};
use kvevents_index::keys;
use kvevents_index::scan::{SECONDS, Schema};

/// Bytes of payloads that are folded sooner than another thread would run: some 50 us.
const BRIEF: usize = 32 << 10;

/// Folds the payloads of one stream into what is still live.
#[pyclass(frozen, module = "kvevents._native")]
pub(super) struct Compactor {
    core: Mutex<Core>,
    peers: Schema,
    /// For events that Python has read within its limits, and spelled anew: they may be larger then.
    ours: Schema,
}

#[pymethods]
impl Compactor {
    #[new]
    fn new(wire_limits: [usize; 6]) -> PyResult<Self> {
        let (peers, ours) = wire_limits_of(wire_limits);
        let schema = |limits| Schema::new(limits).map(Schema::joining).map_err(PyValueError::new_err);
        Ok(Self {
            core: Mutex::default(),
            peers: schema(peers)?,
            ours: schema(ours)?,
        })
    }

    /// Takes one payload in.
    #[pyo3(signature = (payload, respelled=false))]
    fn fold(&self, payload: &[u8], respelled: bool) -> bool {
        let schema = if respelled { &self.ours } else { &self.peers };
        self.core.lock().apply(payload, schema)
    }

    /// Takes payloads of numbered batches in up to the first one that is not read, other threads running meanwhile where that takes
    /// long.
    fn fold_many(&self, py: Python<'_>, batches: &Bound<'_, PyList>) -> PyResult<usize> {
        let payloads = payloads_of(batches)?;
        let fold = || self.core.lock().apply_many(&payloads, &self.peers);
        if payloads.iter().map(|payload| payload.len()).sum::<usize>() < BRIEF {
            return Ok(fold());
        }
        // Another thread could take them out of the list meanwhile.
        let held: Vec<Bound<'_, PyAny>> = batches.iter().collect();
        let done = py.detach(fold);
        drop(held);
        Ok(done)
    }

    /// What rebuilds the state after a clear, or None.
    fn events<'py>(&self, py: Python<'py>) -> PyResult<Option<Vec<Bound<'py, PyTuple>>>> {
        let events = py.detach(|| self.core.lock().events());
        events
            .map(|events| events.iter().map(|event| plain(py, event)).collect())
            .transpose()
    }

    /// The same, spelled as payloads for `fold`, other threads running meanwhile.
    fn payloads<'py>(&self, py: Python<'py>, limit: usize, ts: f64) -> PyResult<Option<Vec<Bound<'py, PyBytes>>>> {
        if limit == 0 {
            return Err(PyValueError::new_err("limit is a number of bytes above 0"));
        }
        if !SECONDS.contains(&ts) {
            return Err(PyValueError::new_err(format!("ts is {ts}; it is seconds since the epoch")));
        }
        let spelled = py.detach(|| self.core.lock().payloads(limit, ts));
        Ok(spelled.map(|all| all.iter().map(|payload| PyBytes::new(py, payload)).collect()))
    }

    /// Notes that some of the stream was never seen.
    fn miss(&self) {
        self.core.lock().mark_partial();
    }

    /// Forgets everything.
    fn clear(&self) {
        self.core.lock().clear();
    }

    /// Gives up until the stream is cleared.
    fn lose(&self, reason: &str) -> PyResult<()> {
        let known = ["batches", "payloads", "digests"].into_iter().find(|&known| known == reason);
        let reason = known.ok_or_else(|| PyValueError::new_err("reason is batches, payloads or digests"))?;
        self.core.lock().invalidate(reason);
        Ok(())
    }

    #[getter]
    fn partial(&self) -> bool {
        self.core.lock().is_partial()
    }

    #[getter]
    fn live(&self) -> usize {
        self.core.lock().live()
    }

    #[getter]
    fn nodes(&self) -> usize {
        self.core.lock().nodes()
    }

    #[getter]
    fn bytes(&self) -> usize {
        self.core.lock().bytes()
    }

    #[getter]
    fn lost(&self) -> Option<&'static str> {
        self.core.lock().invalid_reason()
    }
}

/// The payloads of numbered batches, for as long as they stay in the list. Through safe functions it takes three times as long, a tenth of
/// what folding small ones does.
fn payloads_of<'a>(batches: &'a Bound<'_, PyList>) -> PyResult<Vec<&'a [u8]>> {
    let mut payloads = Vec::with_capacity(batches.len());
    for at in 0..batches.len() {
        let (mut start, mut length) = (null_mut(), 0);
        // SAFETY: Python's lock is held; each function checks the type of what it is given, and null is given to none.
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
        // SAFETY: these are the bytes of an object that does not change, and that its tuple holds, as the list does the tuple.
        payloads.push(unsafe { slice::from_raw_parts(start.cast_const().cast(), length as usize) });
    }
    Ok(payloads)
}

fn plain<'py>(py: Python<'py>, event: &ExportedEvent) -> PyResult<Bound<'py, PyTuple>> {
    match event {
        ExportedEvent::Stored(store) => stored(py, store),
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

/// The scanner has made sure that it is UTF-8.
fn text(bytes: Option<&[u8]>) -> Option<&str> {
    bytes.map(|bytes| std::str::from_utf8(bytes).unwrap_or(""))
}
