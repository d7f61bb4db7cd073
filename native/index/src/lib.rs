//! The prefix index of `kvevents`, for any Rust program.

pub mod applying;
pub mod behind;
pub mod contexts;
pub mod core;
pub mod gate;
pub mod hashed;
pub mod index;
pub mod kept;
pub mod keys;
pub mod matching;
pub mod overlay;
pub mod pages;
pub mod planes;
pub mod prefetch;
pub mod scan;
pub mod sets;
pub mod slab;
pub mod snapshot;
pub mod stream;
pub mod table;
pub mod tally;
pub mod tokens;
pub mod unasked;
pub mod waiting;
