//! The classes of `kvevents.service.data_plane`.

use std::borrow::Cow;
use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::arguments::tokens_of;
use super::index::NativeIndex;
use super::routing::Loads;
use super::turns::Turns;
use kvevents_server::{Event, Headers, Request, Server, Stream};

pub(super) fn duplicate_descriptor(descriptor: RawFd) -> PyResult<OwnedFd> {
    // SAFETY: the call uses no memory of this process, and fails for a descriptor that is not open.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(PyOSError::new_err(std::io::Error::last_os_error().to_string()));
    }
    // SAFETY: the descriptor is open, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// A request that the control plane answers.
#[pyclass(frozen, module = "kvevents_native._native", name = "Request")]
pub(super) struct ControlRequest {
    request: Box<Request>,
}

#[pymethods]
impl ControlRequest {
    /// The method.
    #[getter]
    fn method(&self) -> &str {
        self.request.method()
    }

    /// The path, without percent-encoding.
    #[getter]
    fn path(&self) -> Cow<'_, str> {
        self.request.path()
    }

    /// Path and method of the endpoint, as in the table of endpoints. The path is empty if no endpoint has the request's path. The method
    /// is empty if the endpoint does not have the request's method.
    #[getter]
    fn endpoint(&self) -> (&str, &str) {
        self.request.endpoint()
    }

    /// Name of the caller; empty if the endpoint is unknown.
    #[getter]
    fn caller(&self) -> &str {
        self.request.caller()
    }

    /// The reason why the request is refused; None if the request is not refused.
    #[getter]
    fn refusal(&self) -> Option<&str> {
        self.request.refusal()
    }

    /// The query string of the request's target.
    #[getter]
    fn query(&self) -> &[u8] {
        self.request.query().as_bytes()
    }

    /// The headers, in the order of the request: names in lower case, and values.
    #[getter]
    fn headers<'py>(&self, py: Python<'py>) -> Vec<(String, Bound<'py, PyBytes>)> {
        let headers = self.request.headers();
        headers
            .map(|(name, value)| (name.to_owned(), PyBytes::new(py, value)))
            .collect()
    }

    /// Address and port of the client.
    #[getter]
    fn peer(&self) -> &str {
        self.request.peer()
    }

    /// The body; empty if the request is refused.
    #[getter]
    fn body(&self) -> &[u8] {
        self.request.body()
    }

    /// Answers the request.
    fn respond(&self, status: u16, headers: Headers, body: Vec<u8>) -> PyResult<()> {
        let answered = self.request.respond(status, &headers, body);
        answered.map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Begins an answer that is sent in pieces.
    fn stream(&self, status: u16, headers: Headers) -> PyResult<ResponseStream> {
        let stream = self.request.stream(status, &headers);
        let stream = stream.map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(ResponseStream { stream })
    }
}

/// An answer that is sent in pieces.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct ResponseStream {
    stream: Stream,
}

#[pymethods]
impl ResponseStream {
    /// The ID of the answer in the result of `DataPlane.take`.
    #[getter]
    fn number(&self) -> u64 {
        self.stream.number
    }

    /// Whether the client has closed the connection.
    #[getter]
    fn is_gone(&self) -> bool {
        self.stream.is_gone()
    }

    /// Sends a piece. Returns false, and sends nothing, if too many pieces wait to be sent, or if the client has left.
    fn send(&self, piece: Vec<u8>) -> bool {
        self.stream.send(piece.into())
    }

    /// Records that the answer is complete.
    fn finish(&self) {
        self.stream.finish();
    }

    /// Ends the answer. If the answer is not complete, the connection is closed.
    fn close(&self) {
        self.stream.close();
    }
}

/// The native HTTP server.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct DataPlane {
    server: Server,
}

#[pymethods]
impl DataPlane {
    /// Serves at the listening socket `listening`, and writes a byte to the socket `waker` when `take` has an item. Both descriptors are
    /// duplicated.
    #[new]
    fn new(py: Python<'_>, settings: &[u8], listening: RawFd, waker: RawFd, loads: &Bound<'_, Loads>) -> PyResult<Self> {
        let listener = TcpListener::from(duplicate_descriptor(listening)?);
        let waker = UnixStream::from(duplicate_descriptor(waker)?);
        let loads = loads.get().loads.clone();
        let server = py.detach(|| Server::start(settings, listener, waker, loads));
        let server = server.map_err(|failure| PyValueError::new_err(failure.to_string()))?;
        Ok(Self { server })
    }

    /// Takes the requests that must be answered, and IDs of answers that are sent in pieces. An ID means that the answer has room for
    /// another piece, or that its client has left.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let items = PyList::empty(py);
        for event in py.detach(|| self.server.take_events()) {
            match event {
                Event::Request(request) => items.append(Bound::new(py, ControlRequest { request })?)?,
                Event::Changed(number) => items.append(number)?,
            }
        }
        Ok(items)
    }

    /// Answers a query whose method, path and body the control plane has read. `fields` are the fields of the body in msgpack. The token
    /// ids of a single prompt are in `tokens` instead of `fields`.
    ///
    /// Returns the answer and the number of tokens that the best worker holds. If the fleet causes an error, returns the status, reason,
    /// sentence and hint of the error. Returns None if no worker serves the model, or if the index has failed.
    fn answer<'py>(
        &self,
        py: Python<'py>,
        method: &str,
        path: &str,
        fields: &[u8],
        tokens: &Bound<'py, PyAny>,
        wants_msgpack: bool,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let tokens = tokens_of(tokens, &mut Turns::new(py))?;
        let answered = py.detach(|| self.server.answer(method, path, fields, tokens, wants_msgpack));
        match answered {
            Ok((body, longest)) => (PyBytes::new(py, &body), longest).into_pyobject(py).map(Some),
            Err(None) => Ok(None),
            Err(Some(problem)) => (problem.status.as_u16(), problem.reason, problem.detail, problem.hint)
                .into_pyobject(py)
                .map(Some),
        }
    }

    /// Sets the index from which queries are answered, and changes the routing table. `change` is the change as JSON.
    fn change_table(&self, py: Python<'_>, index: &Bound<'_, NativeIndex>, change: &[u8]) -> PyResult<()> {
        let index = index.get().shared(py)?;
        py.detach(|| self.server.change_table(change, index))
            .map_err(PyValueError::new_err)
    }

    /// Sets the status and the body of the answers to `/livez` and `/readyz`.
    fn replace_probes(&self, py: Python<'_>, live: (u16, Vec<u8>), ready: (u16, Vec<u8>)) {
        py.detach(|| self.server.replace_probes(live, ready));
    }

    /// Reads the TLS files again; new connections use them. Raises `ValueError` if the files cannot be used.
    fn reload_tls(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.server.reload_tls())
            .map_err(|failure| PyValueError::new_err(failure.to_string()))
    }

    /// Returns the counters as JSON.
    fn metrics<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.server.metrics()))
    }

    /// Returns a sample of the newest choices as JSON.
    fn decisions<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.server.decisions()))
    }

    /// Returns the `limit` open reservations that expire first, as JSON.
    fn reservations<'py>(&self, py: Python<'py>, limit: usize) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.server.reservations(limit)))
    }

    /// Accepts no further connections, and waits for at most `seconds` until the open connections have ended.
    fn drain(&self, py: Python<'_>, seconds: f64) {
        py.detach(|| self.server.drain(seconds));
    }

    /// Ends all connections.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.server.close());
    }
}
