//! Tables, and the memory that they and the records of blocks are in. They are independent of what they store.

pub mod hasher;
pub mod page_pool;
pub mod prefetch;
pub(crate) mod sharded_table;
pub mod table;
