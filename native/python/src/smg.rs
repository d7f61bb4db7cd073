//! The class of `kvevents.subscriber.smg_connection`.

use std::os::unix::net::UnixStream;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use kvevents_smg::{Arrival, Subscription};

use super::data_plane::copied;

/// The number of an arrival that is not a batch: a call has begun, or one has ended.
const CONNECTED: i64 = -1;
const DISCONNECTED: i64 = -2;

/// A subscription to the KV cache events of a worker of SMG.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct SmgSubscription {
    subscription: Subscription,
}

#[pymethods]
impl SmgSubscription {
    /// Begins to call the worker at `address`, `HOST:PORT`. A copy of the socket `waker` is written to when something arrives. Raises
    /// ValueError for an invalid address, and OSError.
    #[new]
    fn new(address: &str, waker: i32) -> PyResult<Self> {
        let waker = UnixStream::from(copied(waker)?);
        let subscription = Subscription::open(address, waker).map_err(PyValueError::new_err)?;
        Ok(Self { subscription })
    }

    /// Returns up to `limit` arrivals as numbers and bytes: the number and the payload of a batch, -1 for a call that has begun, -2
    /// and the reason for one that has ended.
    fn take<'py>(&self, py: Python<'py>, limit: usize) -> Vec<(i64, Bound<'py, PyBytes>)> {
        let arrivals = py.detach(|| self.subscription.take(limit));
        let pairs = arrivals.into_iter().map(|arrival| match arrival {
            Arrival::Connected => (CONNECTED, PyBytes::new(py, b"")),
            Arrival::Batch(number, payload) => (number.cast_signed(), PyBytes::new(py, &payload)),
            Arrival::Disconnected(reason) => (DISCONNECTED, PyBytes::new(py, reason.as_bytes())),
        });
        pairs.collect()
    }

    /// Ends the call and begins another one, which brings everything again.
    fn restart(&self, py: Python<'_>) {
        py.detach(|| self.subscription.restart());
    }
}
