#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

pub mod applying;
pub mod contexts;
pub mod core;
pub mod decode;
pub mod fork;
pub mod gate;
pub mod hasher;
pub mod index;
pub mod keys;
pub mod limits;
pub mod matching;
#[cfg(all(loom, test))]
mod model;
pub mod overlay;
pub mod pages;
mod parted;
pub mod planes;
pub mod prefetch;
pub mod records;
pub mod scan;
pub mod sets;
pub mod snapshot;
mod steps;
pub mod stream;
mod sync;
pub mod table;
pub mod tokens;
pub mod view;
pub mod waiting;
