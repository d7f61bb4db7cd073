//! Synchronisation of threads and processes: locks, atomic numbers, and values that do not survive a fork.

pub(crate) mod atomics;
pub mod fork;
pub mod yielding_lock;
