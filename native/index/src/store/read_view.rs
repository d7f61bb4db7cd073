//! The state that lookups read while a writer runs.
//!
//! Lookups do not take the lock of writers (`yielding_lock`). Instead they take another lock, which a writer takes only while it changes a
//! table or a list that lookups search. Such changes are rare and short: usually stores and removals change only slots, which lookups can
//! read while a writer runs (`crate::store::records`). If a lookup reads a chunk with changes that a writer has not published yet, it
//! detects this and retries.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use hashbrown::HashMap;

use crate::holders::contexts::Known;
use crate::holders::holder_sets::{Holders, Word};
use crate::holders::placements::Placements;
use crate::memory::hasher::Secret;
use crate::memory::table::{Table, TableHash};
use crate::store::members::{Member, Model, Names};
use crate::store::records::{Memory, chunk_of};
use crate::sync::atomics::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The state that lookups read.
#[derive(Debug)]
pub struct View {
    /// The table that finds heads of runs by their keys.
    pub heads: Table,
    /// The table that finds records by keys, for blocks that were announced by keys instead of tokens. These blocks are in no run.
    pub keyed: Table,
    /// Number of snapshots that are being added. While it is above 0, heads can have the same keys as linked blocks.
    pub strangers: usize,
    /// The placements on which copies can be.
    pub placements: Placements,
    /// Streams, indexed by ID.
    pub members: Vec<Option<Member>>,
    /// The worker of each stream.
    pub names: Arc<Names>,
    /// A bitmap of the streams whose blocks count in lookups: all streams except those that are being cleared.
    pub visible: Vec<u64>,
    /// The streams of each model.
    pub models: HashMap<Option<String>, Model, Secret>,
    /// A bitmap of the streams that must be searched, since the rules of their groups cannot be matched by bitmaps.
    pub hybrid: Vec<u64>,
    /// A bitmap of the streams with blocks that might be gone.
    pub uncertain: Vec<u64>,
    /// Whether some stream has blocks which might be gone.
    pub has_uncertain_copies: bool,
    /// The memory of chunks in use, as of the last publication by a writer.
    pub chunks: Vec<Option<Arc<Memory>>>,
    /// Sets of holders, indexed by the ID of the set, as of the last publication by a writer.
    pub sets: Vec<Holders>,
    /// Contexts of blocks, as of the last publication by a writer.
    pub contexts: Known,
    /// Secret of the tables' hash function.
    pub secret: Secret,
}

impl View {
    /// Creates an empty view.
    pub fn new(secret: Secret) -> Self {
        Self {
            heads: Table::new(),
            keyed: Table::new(),
            strangers: 0,
            placements: Placements::default(),
            members: Vec::new(),
            names: Arc::default(),
            visible: Vec::new(),
            models: HashMap::with_hasher(secret),
            hybrid: Vec::new(),
            uncertain: Vec::new(),
            has_uncertain_copies: false,
            chunks: Vec::new(),
            sets: Vec::new(),
            contexts: Known::new(secret),
            secret,
        }
    }

    /// Returns a key mixed with the secret of this index. Tables find the key by the mixed value.
    #[inline]
    pub fn mixed(&self, key: u64) -> TableHash {
        TableHash::from(self.secret.place(key))
    }

    /// The memory of the chunk that contains a record; None if the chunk is not in use.
    #[inline]
    pub fn chunk(&self, number: u32) -> Option<&Memory> {
        self.chunks.get(chunk_of(number))?.as_deref()
    }

    /// The holders of a set.
    #[inline]
    pub fn words(&self, set: u32) -> &[Word] {
        self.sets.get(set as usize).map_or(&[], Holders::words)
    }
}

/// Separates its contents from other data by a cache line, so that writes of one thread do not slow down reads of other data (false
/// sharing).
#[repr(align(128))]
struct Apart<T>(T);

struct Inner<T> {
    lock: Apart<RwLock<()>>,
    value: UnsafeCell<T>,
}

// SAFETY: the conditions are those of an `RwLock<T>`: several threads can have `&T`, one thread at a time can have `&mut T`, and any thread
// can drop the value.
unsafe impl<T: Send + Sync> Sync for Inner<T> {}

/// A value that one owner changes and many readers read. The owner reads the value without a lock, and locks it to change it; readers lock
/// it to read it.
pub struct Owner<T>(Arc<Inner<T>>);

/// A handle by which other threads read the value of an owner.
pub struct Reader<T>(Arc<Inner<T>>);

impl<T> Owner<T> {
    /// Creates the owner of a value.
    pub fn new(value: T) -> Self {
        Self(Arc::new(Inner {
            lock: Apart(RwLock::new(())),
            value: UnsafeCell::new(value),
        }))
    }

    /// Returns a reader of the value.
    pub fn reader(&self) -> Reader<T> {
        Reader(self.0.clone())
    }

    /// Changes the value while no reader reads it.
    #[inline]
    pub fn change(&mut self) -> Change<'_, T> {
        Change {
            _locked: self.0.lock.0.write(),
            value: &self.0.value,
        }
    }
}

impl<T> Deref for Owner<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: only a `Change` has a `&mut` to the value, and it borrows the owner exclusively.
        unsafe { &*self.0.value.get() }
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for Owner<T> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (**self).fmt(out)
    }
}

impl<T> Reader<T> {
    /// Reads the value while no writer changes it.
    #[inline]
    pub fn read(&self) -> Reading<'_, T> {
        Reading {
            _locked: self.0.lock.0.read(),
            value: &self.0.value,
        }
    }
}

impl<T> std::fmt::Debug for Reader<T> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Reader")
    }
}

/// A guard that keeps the value unchanged while it is read.
pub struct Reading<'a, T> {
    _locked: RwLockReadGuard<'a, ()>,
    value: &'a UnsafeCell<T>,
}

impl<T> Deref for Reading<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the lock is held for reading, and only a thread that holds it for writing has a `&mut` to the value.
        unsafe { &*self.value.get() }
    }
}

/// A guard that keeps readers away while the value is changed.
pub struct Change<'a, T> {
    _locked: RwLockWriteGuard<'a, ()>,
    value: &'a UnsafeCell<T>,
}

impl<T> Deref for Change<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: as in `deref_mut`, and `self` is borrowed.
        unsafe { &*self.value.get() }
    }
}

impl<T> DerefMut for Change<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held for writing, so no other thread reads the value; the owner, which reads without the lock, is borrowed
        // exclusively.
        unsafe { &mut *self.value.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readers_see_all_of_a_change_or_nothing() {
        let mut owner = Owner::new((0_u64, 0_u64));
        let reader = owner.reader();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut last = 0;
                while last < 1_000 {
                    let now = reader.read();
                    assert!(now.0 == now.1 && now.0 >= last);
                    last = now.0;
                }
            });
            for _ in 0..1_000 {
                let next = (*owner).0 + 1;
                let mut change = owner.change();
                change.0 = next;
                change.1 = next;
            }
        });
    }
}
