//! What a stream of events means, for an index and for a compacted stream, which store its blocks in different ways.

pub mod clear_budget;
pub mod collisions;
pub mod evidence;
pub mod hit_reports;
pub mod location;
pub mod pending;
pub mod replaced_loras;
