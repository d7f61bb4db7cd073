//! Synchronisation of threads and processes: locks, atomic numbers, and values that belong to one process.

pub(crate) mod atomics;
pub mod fork;
pub mod yielding_lock;
