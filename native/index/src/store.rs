//! The blocks of all streams: their records, their workers, the view of them that lookups read, and decisions that expect blocks.

pub mod members;
pub mod overlay;
pub mod read_view;
pub mod records;
pub mod shared_state;
