//! Counts the steps of loops whose length a peer can choose. Tests bound the number of steps and not the time, which depends on the
//! machine.

#[cfg(test)]
thread_local! {
    static COUNTED: std::cell::Cell<Steps> = const { std::cell::Cell::new(Steps { taken: 0, held: 0, longest: 0 }) };
}

#[cfg(test)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Steps {
    /// All steps.
    pub taken: usize,
    /// Number of steps that this thread has taken after it last yielded, or could have yielded, the shared lock.
    held: usize,
    /// Largest value that `held` has had.
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

/// If a new entry has made a table grow, counts the moved entries as steps. The arguments are the table's length and capacity before the
/// entry was added, and its length afterwards.
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

/// Records that this thread yields the lock to waiting threads.
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

/// Returns the number of steps that this thread has taken since the last call.
#[cfg(test)]
pub(crate) fn taken() -> Steps {
    COUNTED.take()
}
