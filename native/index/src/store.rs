//! The blocks of all streams: records of blocks, the streams that hold them, the view that lookups read, and decisions that expect blocks.

pub mod members;
pub mod overlay;
pub mod read_view;
pub mod records;
pub mod shared_state;
