//! The prefix index of `kvevents`, for any Rust program.

pub mod applying;
pub mod contexts;
pub mod core;
pub mod decode;
pub mod gate;
pub mod hashed;
pub mod hasher;
pub mod index;
pub mod keys;
pub mod limits;
pub mod matching;
pub mod overlay;
pub mod pages;
pub mod planes;
pub mod prefetch;
pub mod records;
pub mod scan;
pub mod sets;
pub mod snapshot;
pub mod stream;
pub mod table;
pub mod tokens;
pub mod waiting;
