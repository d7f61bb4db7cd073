//! The lock of the shared part: many readers, or one writer that lets them in every few blocks.

use std::hint::spin_loop;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::core::Core;

/// Blocks that a writer changes before it looks whether a reader waits: about two microseconds.
pub const BLOCKS_PER_HOLD: usize = 32;
/// Turns of waiting before a thread goes to sleep, which costs much more than a writer's turn.
const SPINS: usize = 2_000;

/// A `RwLock` whose readers wait awake, for as long as a writer's turn takes.
#[derive(Debug, Default)]
pub struct Gate {
    lock: RwLock<Core>,
    waiting: AtomicUsize,
    /// How often it was locked for writing.
    #[cfg(test)]
    pub holds: AtomicUsize,
}

impl Gate {
    /// For reading.
    pub fn read(&self) -> RwLockReadGuard<'_, Core> {
        if let Some(guard) = self.lock.try_read() {
            return guard;
        }
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let awake = (0..SPINS).find_map(|_| {
            spin_loop();
            self.lock.try_read()
        });
        let guard = awake.unwrap_or_else(|| self.lock.read());
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// For writing.
    pub fn write(&self) -> Writer<'_> {
        #[cfg(test)]
        self.holds.fetch_add(1, Ordering::Relaxed);
        Writer {
            gate: self,
            guard: Some(self.lock.write()),
            left: BLOCKS_PER_HOLD,
        }
    }
}

/// The right to write, with pauses.
#[derive(Debug)]
pub struct Writer<'a> {
    gate: &'a Gate,
    guard: Option<RwLockWriteGuard<'a, Core>>,
    left: usize,
}

impl Writer<'_> {
    /// Counts `blocks` of work, and lets waiting readers in when it was enough. Nothing that was read before holds after it, but for
    /// what belongs to the caller's own stream.
    #[inline]
    pub fn pause(&mut self, blocks: usize) {
        if self.left > blocks {
            self.left -= blocks;
            return;
        }
        self.left = BLOCKS_PER_HOLD;
        if self.gate.waiting.load(Ordering::Relaxed) > 0 {
            self.let_in();
        }
    }

    /// Does `work` while others may read and write.
    pub fn unlocked(&mut self, work: impl FnOnce()) {
        self.guard = None;
        work();
        self.guard = Some(self.gate.lock.write());
        self.left = BLOCKS_PER_HOLD;
    }

    #[cold]
    fn let_in(&mut self) {
        self.guard = None;
        for _ in 0..SPINS {
            if self.gate.waiting.load(Ordering::Relaxed) == 0 {
                break;
            }
            spin_loop();
        }
        self.guard = Some(self.gate.lock.write());
    }
}

impl Deref for Writer<'_> {
    type Target = Core;

    #[inline]
    fn deref(&self) -> &Core {
        self.guard.as_ref().expect("a writer holds the lock between its pauses")
    }
}

impl DerefMut for Writer<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Core {
        self.guard.as_mut().expect("a writer holds the lock between its pauses")
    }
}
