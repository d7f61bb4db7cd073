//! Answers to queries: how long a prefix of a prompt each worker holds.

mod lookups;
pub mod matching;

pub use lookups::{Matches, Scope, Speculated};
