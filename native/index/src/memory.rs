//! Tables, and the memory of tables and of block records. These types do not depend on the type of what they store.

pub mod hasher;
pub mod page_pool;
pub mod prefetch;
pub(crate) mod sharded_table;
pub mod table;
