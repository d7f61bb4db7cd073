//! The holders of blocks: sets of holders, the placements and contexts of blocks, and the numbers of their copies.

pub mod contexts;
pub mod copies;
pub mod holder_sets;
pub mod placements;
