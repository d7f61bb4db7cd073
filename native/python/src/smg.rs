//! The class of `kvevents.subscriber.smg_connection`.

use std::os::unix::net::UnixStream;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use kvevents_smg::{Arrival, Subscription};

use super::data_plane::copied;

/// The number of the arrival of the beginning of a call.
const CONNECTED: i64 = -1;
/// The number of the arrival of the end of a call.
const DISCONNECTED: i64 = -2;

/// A subscription to the KV cache events of a worker of SMG.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct SmgSubscription {
    subscription: Subscription,
}

#[pymethods]
impl SmgSubscription {
    /// Begins to call the worker at `address`, `HOST:PORT`. When an item arrives, a byte is written to the socket `waker`, whose descriptor
    /// is duplicated. Raises ValueError for an invalid address, and OSError.
    #[new]
    fn new(address: &str, waker: i32) -> PyResult<Self> {
        let waker = UnixStream::from(copied(waker)?);
        let subscription = Subscription::open(address, waker).map_err(PyValueError::new_err)?;
        Ok(Self { subscription })
    }

    /// Returns up to `limit` arrivals, each a number with bytes: number and payload of a batch, -1 if a call has begun, -2 and the reason
    /// if a call has ended.
    fn take<'py>(&self, py: Python<'py>, limit: usize) -> Vec<(i64, Bound<'py, PyBytes>)> {
        let arrivals = py.detach(|| self.subscription.take(limit));
        let pairs = arrivals.into_iter().map(|arrival| match arrival {
            Arrival::Connected => (CONNECTED, PyBytes::new(py, b"")),
            Arrival::Batch(number, payload) => (number.cast_signed(), PyBytes::new(py, &payload)),
            Arrival::Disconnected(reason) => (DISCONNECTED, PyBytes::new(py, reason.as_bytes())),
        });
        pairs.collect()
    }

    /// Ends the call and begins another one, in which the worker sends everything again.
    fn restart(&self, py: Python<'_>) {
        py.detach(|| self.subscription.restart());
    }
}
