//! The class of `kvevents.service.data_plane.DataPlane`.

use std::net::TcpListener;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::index::NativeIndex;
use super::routing::EngineLoads;
use kvevents_server::Server;

fn copied(descriptor: RawFd) -> PyResult<OwnedFd> {
    // SAFETY: the call uses no memory of ours, and fails for a descriptor that is not open.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(PyOSError::new_err(std::io::Error::last_os_error().to_string()));
    }
    // SAFETY: the descriptor is open, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// The native HTTP server.
#[pyclass(frozen, module = "kvevents_native._native")]
pub(super) struct DataPlane {
    server: Server,
}

#[pymethods]
impl DataPlane {
    /// Serves at a listening socket, and sends descriptors of connections to a datagram socket. It duplicates both descriptors.
    #[new]
    fn new(
        py: Python<'_>,
        settings: &[u8],
        listening: RawFd,
        upstream: RawFd,
        loads: &Bound<'_, EngineLoads>,
    ) -> PyResult<Self> {
        let listener = TcpListener::from(copied(listening)?);
        let upstream = UnixDatagram::from(copied(upstream)?);
        let loads = loads.get().loads.clone();
        let server = py.detach(|| Server::start(settings, listener, upstream, loads));
        let server = server.map_err(|failure| PyValueError::new_err(failure.to_string()))?;
        Ok(Self { server })
    }

    /// Answers queries from an index and a routing table from now on. JSON has the changes of the table.
    fn replace_table(&self, py: Python<'_>, index: &Bound<'_, NativeIndex>, changes: &[u8]) -> PyResult<()> {
        let index = index.get().shared(py)?;
        py.detach(|| self.server.replace_table(changes, index))
            .map_err(PyValueError::new_err)
    }

    /// Answers `/livez` and `/readyz` with these statuses and bodies from now on.
    fn replace_probes(&self, live: (u16, Vec<u8>), ready: (u16, Vec<u8>)) {
        self.server.replace_probes(live, ready);
    }

    /// Reads the TLS files again, for new connections. Raises `ValueError` if they cannot be used.
    fn reload_tls(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.server.reload_tls())
            .map_err(|failure| PyValueError::new_err(failure.to_string()))
    }

    /// Counters as JSON.
    fn metrics<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| self.server.metrics()))
    }

    /// Accepts no more connections, and waits at most `seconds` for the open ones.
    fn drain(&self, py: Python<'_>, seconds: f64) {
        py.detach(|| self.server.drain(seconds));
    }

    /// Ends all connections.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.server.close());
    }
}
