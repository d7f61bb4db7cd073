//! Protects forked children. A child has the memory of its parent, but not the parent's other threads, and another thread might have been
//! changing data at the time of the fork.
//!
//! In the child, this data stays half changed, and the locks of that thread stay locked. So a thread locks the memory pool before it forks,
//! since the child continues to use the pool. All other data belong only to the parent: see `ProcessOwned`.

use std::mem::ManuallyDrop;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of forks that led to this process, counted from the process that called `watch_forks`.
static GENERATION: AtomicUsize = AtomicUsize::new(0);

/// A number that differs between a process and its forked children.
#[inline]
pub fn generation() -> usize {
    watch_forks();
    GENERATION.load(Ordering::Relaxed)
}

/// Starts to detect forks.
#[inline]
pub(crate) fn watch_forks() {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        // SAFETY: the function takes and returns nothing, and lives as long as the process.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// A value that belongs to the process that created it. In a forked child `get` returns None, and the value is never dropped.
#[derive(Debug)]
pub struct ProcessOwned<T> {
    value: ManuallyDrop<T>,
    generation: usize,
}

impl<T> ProcessOwned<T> {
    /// Creates a value that belongs to this process.
    pub fn new(value: T) -> Self {
        Self {
            value: ManuallyDrop::new(value),
            generation: generation(),
        }
    }

    /// The value; None in a forked child.
    #[inline]
    pub fn get(&self) -> Option<&T> {
        (generation() == self.generation).then_some(&self.value)
    }
}

impl<T> Drop for ProcessOwned<T> {
    fn drop(&mut self) {
        if generation() == self.generation {
            // SAFETY: the value is dropped only here, and is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
