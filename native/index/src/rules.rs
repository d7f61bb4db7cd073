//! Rules by which the meaning of events is determined. The index and compacted streams use these rules, although they store blocks in
//! different ways.

pub mod clear_budget;
pub mod collisions;
pub mod evidence;
pub mod hit_reports;
pub mod location;
pub mod pending;
pub mod replaced_loras;
