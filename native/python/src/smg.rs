//! The native class of `kvevents.subscriber.smg_connection`.

use std::os::unix::net::UnixStream;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use kvevents_smg::{Arrival, Subscription};

use super::data_plane::duplicate_descriptor;

/// The number that represents the beginning of a call in the result of `take`.
const CONNECTED: i64 = -1;
/// The number that represents the end of a call in the result of `take`.
const DISCONNECTED: i64 = -2;

/// The number that represents the beginning of a snapshot with several parts in the result of `take`.
const INCOMPLETE: i64 = -3;
/// The number that represents the end of a snapshot with several parts in the result of `take`.
const COMPLETE: i64 = -4;

/// A subscription to the KV cache events of a worker of SMG.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct SmgSubscription {
    subscription: Subscription,
}

#[pymethods]
impl SmgSubscription {
    /// Starts to call the worker at `address`, `HOST:PORT`. When an item arrives, a byte is written to the socket `waker`, whose descriptor
    /// is duplicated. Raises ValueError if the address is invalid, and OSError if the descriptor cannot be duplicated.
    #[new]
    fn new(address: &str, waker: i32) -> PyResult<Self> {
        let waker = UnixStream::from(duplicate_descriptor(waker)?);
        let subscription = Subscription::open(address, waker).map_err(PyValueError::new_err)?;
        Ok(Self { subscription })
    }

    /// Returns up to `limit` arrivals, each as a pair of a number and bytes. The pair of a batch is its sequence number and its payload.
    /// The number is -1 if a call has begun. If a call has ended, the number is -2 and the bytes are the reason. The number is -3 if further
    /// parts of a snapshot follow, and -4 after the last part.
    fn take<'py>(&self, py: Python<'py>, limit: usize) -> Vec<(i64, Bound<'py, PyBytes>)> {
        let arrivals = py.detach(|| self.subscription.take(limit));
        let pairs = arrivals.into_iter().map(|arrival| match arrival {
            Arrival::Connected => (CONNECTED, PyBytes::new(py, b"")),
            Arrival::Batch(number, payload) => (number.cast_signed(), PyBytes::new(py, &payload)),
            Arrival::Incomplete => (INCOMPLETE, PyBytes::new(py, b"")),
            Arrival::Complete => (COMPLETE, PyBytes::new(py, b"")),
            Arrival::Disconnected(reason) => (DISCONNECTED, PyBytes::new(py, reason.as_bytes())),
        });
        pairs.collect()
    }

    /// Ends the call and begins another one, in which the worker sends all batches again.
    fn restart(&self, py: Python<'_>) {
        py.detach(|| self.subscription.restart());
    }
}
