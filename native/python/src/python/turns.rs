//! Long calls: they let other threads of Python run now and then, and signals be handled.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// How often a call without Python's lock looks whether a signal is to be handled.
const SIGNALS: Duration = Duration::from_millis(50);

/// Looks now and then, in a call without the GIL, whether a signal such as an interrupt is to be handled.
pub(super) struct Signals(Instant);

impl Signals {
    pub(super) fn new() -> Self {
        Self(Instant::now())
    }

    pub(super) fn check(&mut self) -> PyResult<()> {
        if self.0.elapsed() < SIGNALS {
            return Ok(());
        }
        self.0 = Instant::now();
        Python::attach(|py| py.check_signals())
    }
}

/// Work with Python's objects that is done before other threads may run, in numbers that are read or made: about two milliseconds.
const WORK_PER_TURN: usize = 1 << 16;

/// How often a call has let other threads run.
#[cfg(feature = "testing")]
pub(super) static TURNS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// Counts work that is done with Python's lock, and lets go of it now and then.
pub(super) struct Turns<'py> {
    py: Python<'py>,
    left: usize,
}

impl<'py> Turns<'py> {
    pub(super) fn new(py: Python<'py>) -> Self {
        let left = WORK_PER_TURN;
        Self { py, left }
    }

    /// Counts work. What Python's lock protects may be another afterwards. Raises what a handler of a signal does.
    #[inline]
    pub(super) fn spend(&mut self, work: usize) -> PyResult<()> {
        if self.left > work {
            self.left -= work;
            return Ok(());
        }
        self.yield_gil()
    }

    #[cold]
    fn yield_gil(&mut self) -> PyResult<()> {
        self.left = WORK_PER_TURN;
        #[cfg(feature = "testing")]
        TURNS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.py.detach(|| ());
        self.py.check_signals()
    }
}
