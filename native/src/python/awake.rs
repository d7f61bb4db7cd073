//! Looking for something to read without sleeping: to wake a thread takes longer than most of what a service does.

use std::os::raw::c_int;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Longest time of one call.
const MOST: Duration = Duration::from_millis(10);

/// Looks at a descriptor for at most so many seconds, other threads running: whether there is something to read, or an error.
#[pyfunction]
pub(super) fn look_for(py: Python<'_>, descriptor: c_int, seconds: f64) -> PyResult<bool> {
    let time = Duration::try_from_secs_f64(seconds).ok().filter(|&time| time <= MOST);
    let time = time.ok_or_else(|| PyValueError::new_err(format!("seconds is {seconds}; it is 0 to {}", MOST.as_secs_f64())))?;
    Ok(py.detach(|| {
        let end = Instant::now() + time;
        loop {
            if is_readable(descriptor) {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
            std::hint::spin_loop();
        }
    }))
}

/// Whether something is there now. A signal, or a descriptor that cannot be asked, is for the caller to find.
fn is_readable(descriptor: c_int) -> bool {
    let mut asked = libc::pollfd {
        fd: descriptor,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor is asked, which lives until the call ends.
    unsafe { libc::poll(&raw mut asked, 1, 0) != 0 }
}
