//! The index: streams in, answers out. Here is what all of it shares; each room below has a part of what it does.
//!
//! Locks are taken in this order: the whole, the registry, one stream, the overlay, the gate, the view. A second stream is only ever tried.

mod asking;
#[cfg(test)]
mod bounded;
mod deliveries;
mod registry;
mod reports;
mod snapshots;
#[cfg(test)]
mod tests;

use parking_lot::{Mutex, RwLock};

use crate::core::Core;
use crate::gate::Gate;
use crate::hasher::Secret;
use crate::limits::Limits;
use crate::overlay::Overlay;
use crate::scan::Schema;
use crate::stream::Counters;
use crate::view::{Reader, View};

pub use asking::{Matches, Scope};
pub use deliveries::{Applied, Findings, Outcome};
pub use reports::{Held, Info, Speculated};
pub use snapshots::{Newcomer, Part};

use registry::Registry;

/// See `kvevents.index.PrefixIndex`.
#[derive(Debug)]
pub struct Index {
    /// The part that all streams share.
    pub gate: Gate<Core>,
    /// What lookups read of it.
    view: Reader<View>,
    /// Written to by who replaces the shared part; read by who writes to a stream there that is not in the registry.
    whole: RwLock<()>,
    registry: RwLock<Registry>,
    schema: Schema,
    /// For events that were read within its limits, and spelled anew.
    normalised: Schema,
    limits: Limits,
    /// Decisions that no event has confirmed yet.
    overlay: Mutex<Overlay>,
    ended: Mutex<Counters>,
}

impl Index {
    /// An empty index that reads payloads by `schema`.
    pub fn new(schema: Schema, limits: Limits) -> Self {
        let core = Core::new(limits);
        Self {
            view: core.view.reader(),
            gate: Gate::new(core),
            whole: RwLock::default(),
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

    /// Whether a panic has left it changed by half. What it answers then may be wrong, until a snapshot is restored.
    pub fn is_damaged(&self) -> bool {
        self.gate.is_poisoned()
    }
}
