//! Looking for something to read without sleeping, for oneself or for another thread: to wake one takes longer than most of what
//! a service does.

use std::os::raw::{c_int, c_short};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Longest time of one call.
const MOST: Duration = Duration::from_millis(10);

/// How long a thread may take from reading to having the interpreter again, which event loops let go of while they read.
const AT_WORK: Duration = Duration::from_micros(20);

/// Whether a thread gives way: another one that did so as well would wait for what this one waits for.
static GIVING: AtomicBool = AtomicBool::new(false);

/// Looks at a descriptor for at most so many seconds, other threads running: whether there is something to read, or an error.
#[pyfunction]
pub(super) fn look_for(py: Python<'_>, descriptor: c_int, seconds: f64) -> PyResult<bool> {
    let time = bounded(seconds)?;
    Ok(py.detach(|| {
        let end = Instant::now() + time;
        loop {
            if state(descriptor) != 0 {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
            std::hint::spin_loop();
        }
    }))
}

/// Lets another thread run that has something to read, until it has read it, for at most so many seconds. False where
/// there is nothing, or a thread gives way already.
#[pyfunction]
pub(super) fn give_way(py: Python<'_>, descriptor: c_int, seconds: f64) -> PyResult<bool> {
    let time = bounded(seconds)?;
    if !is_readable(descriptor) || GIVING.swap(true, Ordering::Relaxed) {
        return Ok(false);
    }
    py.detach(|| {
        let end = Instant::now() + time;
        while is_readable(descriptor) && Instant::now() < end {
            std::thread::yield_now();
        }
        let end = end.min(Instant::now() + AT_WORK);
        while Instant::now() < end {
            std::thread::yield_now();
        }
        GIVING.store(false, Ordering::Relaxed);
    });
    Ok(true)
}

/// Whether there is something to read now.
fn is_readable(descriptor: c_int) -> bool {
    state(descriptor) & libc::POLLIN != 0
}

/// What there is: something to read, or an error, a descriptor that cannot be asked among these.
fn state(descriptor: c_int) -> c_short {
    let mut asked = libc::pollfd {
        fd: descriptor,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor is asked, which lives until the call ends.
    let found = unsafe { libc::poll(&raw mut asked, 1, 0) };
    if found < 0 { libc::POLLERR } else { asked.revents } // a signal is for the caller to find
}

fn bounded(seconds: f64) -> PyResult<Duration> {
    let time = Duration::try_from_secs_f64(seconds).ok().filter(|&time| time <= MOST);
    time.ok_or_else(|| PyValueError::new_err(format!("seconds is {seconds}; it is 0 to {}", MOST.as_secs_f64())))
}
