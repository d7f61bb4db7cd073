//! Counts the steps of loops whose length a peer can choose. Tests bound the number of steps and not the time, which depends on the
//! machine.

#[cfg(test)]
thread_local! {
    static COUNTED: std::cell::Cell<Steps> = const { std::cell::Cell::new(Steps { taken: 0, held: 0, longest: 0 }) };
}

#[cfg(test)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Steps {
    /// Number of steps since the last call of `taken`.
    pub taken: usize,
    /// Number of steps after this thread last yielded the shared lock, or could have yielded it.
    held: usize,
    /// Largest value that `held` has had since the last call of `taken`.
    pub longest: usize,
}

/// Counts steps.
#[inline(always)]
pub(crate) fn count(_steps: usize) {
    #[cfg(test)]
    change(|counted| {
        counted.taken += _steps;
        counted.held += _steps;
    });
}

/// If the addition of an entry has made a table grow, counts the moved entries as steps. The arguments are the length and capacity of the
/// table before the addition, and the length afterwards.
#[inline(always)]
pub(crate) fn count_growth((_before, _capacity): (usize, usize), _now: usize) {
    #[cfg(test)]
    if _before >= _capacity && _before < _now {
        count(_before);
    }
}

/// Records that this thread acquires the shared lock.
#[inline(always)]
pub(crate) fn begin_hold() {
    #[cfg(test)]
    change(|counted| counted.held = 0);
}

/// Records that this thread lets waiting threads take the shared lock.
#[inline(always)]
pub(crate) fn end_hold() {
    #[cfg(test)]
    change(|counted| {
        counted.longest = counted.longest.max(counted.held);
        counted.held = 0;
    });
}

#[cfg(test)]
fn change(change: impl FnOnce(&mut Steps)) {
    let mut counted = COUNTED.get();
    change(&mut counted);
    COUNTED.set(counted);
}

/// Returns the counted steps of this thread, and resets the counter.
#[cfg(test)]
pub(crate) fn taken() -> Steps {
    COUNTED.take()
}
