//! What threads and processes share: locks, atomic numbers, and values that do not survive a fork.

pub(crate) mod atomics;
pub mod fork;
pub mod yielding_lock;
