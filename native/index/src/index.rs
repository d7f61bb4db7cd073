//! The index: it applies deliveries of streams and answers lookups. Each module below has a part of its methods.
//!
//! Locks are taken in this order: `replacing`, the registry, one stream, the overlay, the shared lock, the view. A second stream is only
//! locked by `try_lock`.

#[cfg(test)]
mod bounded_time;
mod deliveries;
mod importing;
mod lookups;
mod registry;
mod reports;
pub mod snapshot;
#[cfg(test)]
mod tests;

use parking_lot::{Mutex, RwLock};

use crate::hasher::Secret;
use crate::limits::Limits;
use crate::overlay::Overlay;
use crate::read_view::{Reader, View};
use crate::scan::Schema;
use crate::shared::SharedState;
use crate::stream::Counters;
use crate::yielding_lock::YieldingRwLock;

pub use deliveries::{ApplyResult, BatchReport, Outcome};
pub use importing::{ImportedStream, Part};
pub use lookups::{Matches, Scope};
pub use reports::{Held, Info, Speculated};

use registry::Registry;

/// See `kvevents.index.PrefixIndex`.
#[derive(Debug)]
pub struct Index {
    /// The part that all streams share.
    pub shared_lock: YieldingRwLock<SharedState>,
    /// The part that lookups read.
    view: Reader<View>,
    /// Held for writing while the shared part is replaced, and for reading while a stream outside of the registry is written to.
    replacing: RwLock<()>,
    registry: RwLock<Registry>,
    schema: Schema,
    /// The schema for events that were read within its limits and encoded again.
    normalised: Schema,
    limits: Limits,
    /// Decisions that no event has confirmed yet.
    overlay: Mutex<Overlay>,
    ended: Mutex<Counters>,
}

impl Index {
    /// An empty index that reads payloads by `schema`.
    pub fn new(schema: Schema, limits: Limits) -> Self {
        let shared = SharedState::new(limits);
        Self {
            view: shared.view.reader(),
            shared_lock: YieldingRwLock::new(shared),
            replacing: RwLock::default(),
            registry: RwLock::new(Registry::new(Secret::new())),
            normalised: schema.unlimited(),
            schema,
            limits,
            overlay: Mutex::new(Overlay::new(limits.speculated)),
            ended: Mutex::default(),
        }
    }

    /// The layouts by which payloads are read.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Its bounds.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether a panic has left the index half changed. Its answers can be wrong until a snapshot is restored.
    pub fn is_damaged(&self) -> bool {
        self.shared_lock.is_poisoned()
    }
}
