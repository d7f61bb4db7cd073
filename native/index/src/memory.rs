//! Tables, and the memory that they and the records of blocks are in. None of it knows what it stores.

pub mod hasher;
pub mod page_pool;
pub mod prefetch;
pub(crate) mod sharded_table;
pub mod table;
