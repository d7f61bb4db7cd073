#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

pub mod apply;
pub mod contexts;
pub mod copies;
pub mod decode;
pub mod engine_hash;
pub mod fork;
pub mod group_cache;
pub mod group_search;
pub mod groups;
pub mod hasher;
pub mod holder_sets;
pub mod index;
pub mod keys;
pub mod limits;
pub mod matching;
pub mod members;
#[cfg(all(loom, test))]
mod model;
pub mod msgpack;
pub mod overlay;
pub mod page_pool;
pub mod pending;
pub mod placements;
pub mod prefetch;
pub mod read_view;
pub mod records;
pub mod scan;
mod sharded_table;
pub mod shared;
mod step_counter;
pub mod stream;
mod sync;
pub mod table;
pub mod tokens;
pub mod yielding_lock;

pub use index::snapshot;
