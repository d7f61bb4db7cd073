#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

pub mod apply;
pub mod groups;
pub mod holders;
pub mod keys;
pub mod limits;
pub mod lookup;
pub mod memory;
pub mod prefix_index;
pub mod snapshot;
mod step_counter;
pub mod store;
pub mod stream;
pub mod sync;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod wire;

pub use lookup::{Matches, Scope};
pub use prefix_index::{ApplyResult, BatchReport, Held, Index, Info, Outcome};
