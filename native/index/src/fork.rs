//! Forked children: they have the memory of their parent, but none of its other threads, which may have been changing it.
//!
//! What a thread was changing stays changed by half in the child, and what it had locked stays locked. So the memory pool, which a child
//! goes on with, is locked by the thread that forks, and everything else is the parent's only: see `Own`.

use std::mem::ManuallyDrop;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::pages;

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
        // SAFETY: the functions take and return nothing, and live as long as the process.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
}

extern "C" fn before() {
    pages::hold();
}

extern "C" fn in_parent() {
    pages::let_go();
}

extern "C" fn in_child() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    pages::let_go();
}

/// A value of the process that made it. A forked child is not given it, and never drops it.
#[derive(Debug)]
pub struct Own<T> {
    value: ManuallyDrop<T>,
    generation: usize,
}

impl<T> Own<T> {
    /// One of this process.
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

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if generation() == self.generation {
            // SAFETY: it is dropped nowhere else, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
