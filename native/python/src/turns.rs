//! Helpers of long calls: they release the GIL at intervals, and check for signals.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// Interval at which a call without the GIL checks for signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Checks at intervals, during a call without the GIL, whether a signal such as an interrupt is pending.
pub(super) struct Signals(Instant);

impl Signals {
    pub(super) fn new() -> Self {
        Self(Instant::now())
    }

    pub(super) fn check(&mut self) -> PyResult<()> {
        if self.0.elapsed() < SIGNAL_INTERVAL {
            return Ok(());
        }
        self.0 = Instant::now();
        Python::attach(|py| py.check_signals())
    }
}

/// Amount of work with Python objects before the GIL is released. The unit is the work of reading or creating one integer. This amount
/// takes about 2 ms.
const WORK_PER_TURN: usize = 1 << 16;

/// Number of times that calls have released the GIL.
#[cfg(feature = "testing")]
pub(super) static TURN_COUNT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// Counts work with the GIL, and releases the GIL at intervals.
pub(super) struct Turns<'py> {
    py: Python<'py>,
    left: usize,
}

impl<'py> Turns<'py> {
    pub(super) fn new(py: Python<'py>) -> Self {
        let left = WORK_PER_TURN;
        Self { py, left }
    }

    /// Counts work. After enough work, releases the GIL, so that other threads can change data that the GIL protects. Raises the exception
    /// of a signal handler, if there is one.
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
        TURN_COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        self.py.detach(|| ());
        self.py.check_signals()
    }
}
