//! The state that lookups read while a writer runs.
//!
//! Lookups do not take the lock of writers (`yielding_lock`). Lookups hold another lock, which a writer takes only while it changes a table
//! or a list that lookups search. Such changes are rare and short: most stores and removals change only slots, and lookups can read slots
//! while a writer runs (`crate::store::records`). While a writer has unpublished changes to a chunk, lookups see this, and retry.

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
    /// Heads of runs, by their keys.
    pub heads: Table,
    /// Records of blocks that were announced by keys instead of tokens, by key. These blocks are in no run.
    pub keyed: Table,
    /// Number of snapshots that are being absorbed; while it is above 0, heads can have the keys of linked blocks.
    pub strangers: usize,
    /// The placements where copies can be.
    pub placements: Placements,
    /// Streams, indexed by ID.
    pub members: Vec<Option<Member>>,
    /// The workers of the streams.
    pub names: Arc<Names>,
    /// A bitmap of the streams whose blocks count in lookups: all streams except those that are being cleared.
    pub visible: Vec<u64>,
    /// The streams of each model.
    pub models: HashMap<Option<String>, Model, Secret>,
    /// A bitmap of the streams that are matched by rules of groups.
    pub hybrid: Vec<u64>,
    /// A bitmap of the streams that have uncertain copies, which might be gone.
    pub uncertain: Vec<u64>,
    /// Whether any stream has uncertain copies.
    pub has_uncertain_copies: bool,
    /// Chunks of records that are in use, as of the last time that a writer published them.
    pub chunks: Vec<Option<Arc<Memory>>>,
    /// Sets of holders, indexed by the ID of the set, as of the last time that a writer published them.
    pub sets: Vec<Holders>,
    /// Contexts of blocks, as of the last time that a writer published them.
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

    /// Returns a key mixed with the secret of this index. The tables place the key by this value.
    #[inline]
    pub fn mixed(&self, key: u64) -> TableHash {
        TableHash::from(self.secret.place(key))
    }

    /// The chunk of a record.
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

/// Prevents false sharing between data that many threads write and data that others read.
#[repr(align(128))]
struct Apart<T>(T);

struct Inner<T> {
    lock: Apart<RwLock<()>>,
    value: UnsafeCell<T>,
}

// SAFETY: the conditions are those of an `RwLock<T>`: several threads can have `&T`, one thread at a time can have `&mut T`, and any thread
// can drop the value.
unsafe impl<T: Send + Sync> Sync for Inner<T> {}

/// A value with one owner. The owner reads the value without a lock, and changes the value under a lock; readers use the same lock.
pub struct Owner<T>(Arc<Inner<T>>);

/// A handle that reads the value of an owner.
pub struct Reader<T>(Arc<Inner<T>>);

impl<T> Owner<T> {
    /// The owner of a value.
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
        // SAFETY: only `Change` has a `&mut` to the value; a `Change` borrows the owner exclusively while the `Change` exists.
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

/// A guard for reading the value.
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

/// A guard for changing the value.
pub struct Change<'a, T> {
    _locked: RwLockWriteGuard<'a, ()>,
    value: &'a UnsafeCell<T>,
}

impl<T> Deref for Change<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the reasons given in `deref_mut` apply, and `self` is borrowed.
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
