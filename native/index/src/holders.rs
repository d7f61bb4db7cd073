//! The holders of blocks: sets of them, the placements and contexts by which they differ, and the numbers of their copies.

pub mod contexts;
pub mod copies;
pub mod holder_sets;
pub mod placements;
