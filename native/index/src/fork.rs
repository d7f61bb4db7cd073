//! Forked children: they have the memory of their parent, but none of its other threads, which may have been changing it.
//!
//! What a thread was changing stays changed by half in the child, and what it had locked stays locked. So the memory pool, which a child
//! goes on with, is locked by the thread that forks, and everything else is the parent's only: see `ProcessOwned`.

use std::mem::ManuallyDrop;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How often this process and those that it descends from were forked.
static GENERATION: AtomicUsize = AtomicUsize::new(0);

/// A number that is another one in a forked child.
#[inline]
pub fn generation() -> usize {
    watch();
    GENERATION.load(Ordering::Relaxed)
}

/// Sees to it that forks are noticed from now on.
#[inline]
pub(crate) fn watch() {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        // SAFETY: the function takes and returns nothing, and lives as long as the process.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// A value that belongs to the process that made it. In a forked child `get` returns None, and the value is never dropped.
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
            // SAFETY: it is dropped nowhere else, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
