//! The blocks of all streams: the records of blocks, the holders of records, the view that lookups read, and the speculative entries.

pub mod members;
pub mod overlay;
pub mod read_view;
pub mod records;
pub mod shared_state;
