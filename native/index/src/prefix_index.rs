//! The index: it applies deliveries of streams and answers lookups. Each submodule implements some methods of `PrefixIndex`.
//!
//! A thread takes its locks in this order: `replacing`, the registry, one stream, the overlay, the shared lock, the view. A thread that has
//! locked one stream locks another stream only by `try_lock`.

mod deliveries;
mod ranks;
mod registry;
mod reports;
#[cfg(test)]
mod tests;
mod typed_events;

use parking_lot::{Mutex, RwLock};

use crate::limits::Limits;
use crate::memory::hasher::Secret;
use crate::store::overlay::Overlay;
use crate::store::read_view::{Reader, View};
use crate::store::shared_state::SharedState;
use crate::stream::Counters;
use crate::sync::yielding_lock::YieldingRwLock;
use crate::wire::scan::Schema;

pub use deliveries::{ApplyResult, BatchReport, Outcome};
pub use registry::ImportedStream;
pub(crate) use registry::Registry;
pub use reports::{HeldBlock, Info};
pub(crate) use typed_events::TypedEvent;

/// The index as the other crates of kvevents use it; `crate::Index` is the interface for Rust programs. See `kvevents.index.PrefixIndex`.
#[derive(Debug)]
pub struct PrefixIndex {
    /// The state that all streams share.
    pub shared_lock: YieldingRwLock<SharedState>,
    /// The state that lookups read.
    pub(crate) view: Reader<View>,
    /// This lock is held for writing while the shared state is replaced, and for reading while a stream that is not in the registry is
    /// changed.
    pub(crate) replacing: RwLock<()>,
    pub(crate) registry: RwLock<Registry>,
    schema: Schema,
    /// The schema without limits, for events that were decoded within the limits and encoded again.
    unlimited_schema: Schema,
    limits: Limits,
    /// Speculative entries: routing decisions that no event has confirmed yet.
    pub(crate) overlay: Mutex<Overlay>,
    pub(crate) ended: Mutex<Counters>,
}

impl PrefixIndex {
    /// Creates an empty index that reads payloads by `schema`.
    pub fn new(schema: Schema, limits: Limits) -> Self {
        let shared = SharedState::new(limits);
        Self {
            view: shared.view.reader(),
            shared_lock: YieldingRwLock::new(shared),
            replacing: RwLock::default(),
            registry: RwLock::new(Registry::new(Secret::new())),
            unlimited_schema: schema.unlimited(),
            schema,
            limits,
            overlay: Mutex::new(Overlay::new(limits.speculated)),
            ended: Mutex::default(),
        }
    }

    /// The rules by which payloads are read.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }

    /// Bounds of the index.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Whether a panic has left the index half changed. Until a snapshot is restored, the index's answers can be wrong.
    pub fn is_damaged(&self) -> bool {
        self.shared_lock.is_poisoned()
    }
}
