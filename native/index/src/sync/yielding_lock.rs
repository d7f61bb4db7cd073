//! A read-write lock whose writer yields: after a small amount of work, the writer lets waiting readers and writers take the lock.

use std::hint::spin_loop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::step_counter;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Number of blocks that a writer places or removes before it checks whether other threads wait; this takes about two microseconds.
pub const WORK_PER_HOLD: usize = 32;
/// Number of times that a waiting thread spins before it sleeps. To sleep and wake takes much longer than a writer's turn.
const MAX_SPINS: usize = 2_000;

/// A value with a state that its writer publishes to other threads.
pub trait Publish {
    /// Publishes the current state. A writer calls this function before it yields.
    fn publish(&mut self);

    /// Whether so many changes are unpublished that the writer should publish them and yield.
    fn is_due(&self) -> bool;
}

/// A `RwLock` whose waiting threads spin for about one turn of a writer before they sleep. A writer that panics leaves the lock poisoned,
/// since the protected value might be half changed.
#[derive(Debug, Default)]
pub struct YieldingRwLock<T> {
    lock: RwLock<T>,
    /// Number of waiting readers and writers.
    waiting: AtomicUsize,
    poisoned: AtomicBool,
    /// Number of times that the lock was taken for writing.
    #[cfg(test)]
    pub holds: AtomicUsize,
}

impl<T: Publish> YieldingRwLock<T> {
    /// Creates a lock that protects `value`.
    pub fn new(value: T) -> Self {
        Self {
            lock: RwLock::new(value),
            waiting: AtomicUsize::new(0),
            poisoned: AtomicBool::new(false),
            #[cfg(test)]
            holds: AtomicUsize::new(0),
        }
    }

    /// Whether a writer has panicked.
    #[inline]
    pub fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Relaxed)
    }

    /// Records that the protected value is consistent again, so that the lock is not poisoned.
    pub fn heal(&self) {
        self.poisoned.store(false, Ordering::Relaxed);
    }

    /// Locks the value for reading.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        match self.lock.try_read() {
            Some(guard) => guard,
            None => self.wait(|| self.lock.try_read(), || self.lock.read()),
        }
    }

    /// Locks the value for writing.
    pub fn write(&self) -> Writer<'_, T> {
        #[cfg(test)]
        self.holds.fetch_add(1, Ordering::Relaxed);
        Writer {
            shared_lock: self,
            guard: Some(self.lock_for_writing()),
            left: WORK_PER_HOLD,
        }
    }

    /// Number of waiting threads.
    #[cfg(test)]
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    fn lock_for_writing(&self) -> RwLockWriteGuard<'_, T> {
        let guard = match self.lock.try_write() {
            Some(guard) => guard,
            None => self.wait(|| self.lock.try_write(), || self.lock.write()),
        };
        step_counter::begin_hold();
        guard
    }

    #[cold]
    #[inline(never)]
    fn wait<G>(&self, mut awake: impl FnMut() -> Option<G>, asleep: impl FnOnce() -> G) -> G {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let guard = (0..MAX_SPINS).find_map(|_| {
            spin_loop();
            awake()
        });
        let guard = guard.unwrap_or_else(asleep);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }
}

/// A guard for writing that yields the lock to waiting threads.
#[derive(Debug)]
pub struct Writer<'a, T: Publish> {
    shared_lock: &'a YieldingRwLock<T>,
    guard: Option<RwLockWriteGuard<'a, T>>,
    left: usize,
}

impl<T: Publish> Writer<'_, T> {
    /// Counts work, in blocks. After enough work, yields the lock to waiting threads. Returns true if it might have yielded the lock; then
    /// only the caller's stream is certainly unchanged.
    #[inline]
    pub fn spend(&mut self, work: usize) -> bool {
        step_counter::count(work);
        if self.left > work {
            self.left -= work;
            return false;
        }
        self.left = WORK_PER_HOLD;
        step_counter::end_hold();
        if self.shared_lock.waiting.load(Ordering::Relaxed) > 0 {
            self.yield_to_waiting();
        } else if self.is_due() {
            self.publish();
        }
        true
    }

    /// Releases the lock, calls `work`, and takes the lock again.
    pub fn unlocked<R>(&mut self, work: impl FnOnce() -> R) -> R {
        self.release();
        let done = work();
        self.lock_again();
        done
    }

    #[cold]
    fn yield_to_waiting(&mut self) {
        self.release();
        let waiting = self.shared_lock.waiting.load(Ordering::Relaxed);
        for _ in 0..MAX_SPINS {
            // The test can end when one thread has taken the lock: that thread then yields the lock to the other threads in the same way.
            if self.shared_lock.waiting.load(Ordering::Relaxed) < waiting {
                break;
            }
            spin_loop();
        }
        self.lock_again();
    }

    fn release(&mut self) {
        if let Some(mut guard) = self.guard.take() {
            guard.publish();
            step_counter::end_hold();
        }
    }

    fn lock_again(&mut self) {
        self.guard = Some(self.shared_lock.lock_for_writing());
        self.left = WORK_PER_HOLD;
    }
}

impl<T: Publish> Drop for Writer<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.shared_lock.poisoned.store(true, Ordering::Relaxed);
        } else {
            self.release();
        }
    }
}

impl<T: Publish> Deref for Writer<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        self.guard.as_ref().expect("a writer holds the lock between its pauses")
    }
}

impl<T: Publish> DerefMut for Writer<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        self.guard.as_mut().expect("a writer holds the lock between its pauses")
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering;

    use super::*;

    impl Publish for u64 {
        fn publish(&mut self) {}

        fn is_due(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_writer_yields_to_readers_and_writers() {
        let shared_lock = YieldingRwLock::new(0_u64);
        let (started, ended) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut writer = shared_lock.write();
                started.store(true, Ordering::SeqCst);
                while ended.load(Ordering::SeqCst) < 2 {
                    *writer += 1;
                    writer.spend(WORK_PER_HOLD);
                }
            });
            while !started.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            scope.spawn(|| {
                drop(shared_lock.read());
                ended.fetch_add(1, Ordering::SeqCst);
            });
            scope.spawn(|| {
                *shared_lock.write() += 1;
                ended.fetch_add(1, Ordering::SeqCst);
            });
        });
    }

    #[test]
    fn a_panic_of_a_writer_poisons_the_lock() {
        let shared_lock = YieldingRwLock::new(0_u64);
        let died = catch_unwind(AssertUnwindSafe(|| {
            *shared_lock.write() = 1;
            let _writer = shared_lock.write();
            panic!("as a test");
        }));
        assert!(died.is_err() && shared_lock.is_poisoned());
        assert_eq!(*shared_lock.read(), 1);
        shared_lock.heal();
        assert!(!shared_lock.is_poisoned());
    }
}
