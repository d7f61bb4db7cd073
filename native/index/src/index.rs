//! The index: streams in, answers out. Here is what all of it shares; each room below has a part of what it does.
//!
//! Locks are taken in this order: the whole, the registry, one stream, the overlay, the gate. A second stream is only ever tried.

mod asking;
mod deliveries;
mod eviction;
mod registry;
mod reports;
mod snapshots;

use std::sync::atomic::AtomicUsize;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use crate::core::Core;
use crate::gate::Gate;
use crate::overlay::Overlay;
use crate::scan::Schema;
use crate::stream::Counters;

pub use asking::Scope;
pub use deliveries::Outcome;
pub use reports::{Held, Info, Speculated};
pub use snapshots::{Newcomer, Part};

use registry::Registry;

/// Bounds of an index, all of them counted when reached.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of everything; blocks are evicted above it.
    pub memory: Option<usize>,
    /// Blocks of one stream that wait for their parent or their tokens.
    pub orphans: usize,
    /// Removed workers whose late deliveries are recognised.
    pub fences: usize,
    /// Blocks of the overlay.
    pub speculated: usize,
}

/// See `kvevents.index.PrefixIndex`.
#[derive(Debug)]
pub struct Index {
    /// The part that all streams share.
    pub gate: Gate,
    /// Written to by who replaces the shared part; read by who writes to a stream there that is not in the registry.
    whole: RwLock<()>,
    registry: RwLock<Registry>,
    schema: Schema,
    limits: Limits,
    /// Decisions that no event has confirmed yet.
    overlay: Mutex<Overlay>,
    /// Heap bytes of all streams, kept only where a memory limit is set.
    streams_bytes: AtomicUsize,
    hand: AtomicUsize,
    ended: Mutex<Counters>,
    /// Snapshots that are being written: streams may be locked for longer than a batch takes.
    saving: AtomicUsize,
}

impl Index {
    /// An empty index that reads payloads by `schema`.
    pub fn new(schema: Schema, limits: Limits) -> Self {
        Self {
            gate: Gate::default(),
            whole: RwLock::default(),
            registry: RwLock::default(),
            schema,
            limits,
            overlay: Mutex::new(Overlay::new(limits.speculated)),
            streams_bytes: AtomicUsize::new(0),
            hand: AtomicUsize::new(0),
            ended: Mutex::default(),
            saving: AtomicUsize::new(0),
        }
    }

    /// The same where nobody may ever ask for blocks by their keys: they are listed only when somebody does.
    pub fn unasked(self) -> Self {
        // What is evicted is found by its record.
        if self.limits.memory.is_none() {
            self.gate.write().count_keys();
        }
        self
    }

    /// The shared part, for whoever asks for blocks by their keys, or for all of a stream. The first one must not hold a stream, nor what is
    /// locked behind one: all blocks are looked into then.
    fn asked(&self) -> RwLockReadGuard<'_, Core> {
        loop {
            let core = self.gate.read();
            if core.is_listed() && !core.keeps() {
                return core;
            }
            drop(core);
            self.look_into_all();
        }
    }

    #[cold]
    fn look_into_all(&self) {
        self.gate.write().list_keys();
        for (_, stream) in self.streams() {
            stream.lock().look_into_all(&mut self.gate.write());
        }
        self.gate.write().looked_into();
    }

    /// The layouts by which payloads are read.
    pub fn schema(&self) -> &Schema {
        &self.schema
    }
}
