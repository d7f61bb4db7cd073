#![doc = include_str!("../README.md")]
#![deny(missing_docs)]

mod facade;
mod step_counter;

// These modules are for the other crates of kvevents, and can change in any release.
#[doc(hidden)]
pub mod apply;
#[doc(hidden)]
pub mod groups;
#[doc(hidden)]
pub mod holders;
#[doc(hidden)]
pub mod keys;
#[doc(hidden)]
pub mod limits;
#[doc(hidden)]
pub mod lookup;
#[doc(hidden)]
pub mod memory;
#[doc(hidden)]
pub mod prefix_index;
#[doc(hidden)]
pub mod rules;
#[doc(hidden)]
pub mod snapshot;
#[doc(hidden)]
pub mod store;
#[doc(hidden)]
pub mod stream;
#[doc(hidden)]
pub mod sync;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod testing;
#[doc(hidden)]
pub mod wire;

pub use facade::{
    Applied, Attention, Clear, Error, Group, Hit, Incarnation, Index, Limits, Matches, Position, Remove, Store, Tier, Tokens,
};
pub use keys::{Item, Items};
pub use limits::Limits as ContentLimits;
pub use lookup::Scope;
pub use prefix_index::{BatchReport, Info};
pub use snapshot::Failure as SnapshotFailure;
pub use store::members::Worker;
pub use sync::fork::ProcessOwned;
pub use wire::decode::{Heartbeat, Reason, Rejected};
pub use wire::scan::Limits as PayloadLimits;
