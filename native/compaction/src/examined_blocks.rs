//! Counts examined blocks. Tests limit the number of examined blocks, not the time, which depends on the machine.

#[cfg(test)]
thread_local! {
    static TAKEN: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Counts examined blocks.
#[inline(always)]
pub fn count(_steps: usize) {
    #[cfg(test)]
    TAKEN.set(TAKEN.get() + _steps);
}

/// Returns the number of blocks that this thread has examined since the last call of this function.
#[cfg(test)]
pub fn taken() -> usize {
    TAKEN.take()
}
