//! The streams of an index in the form that lookups read.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use crate::groups::cache::GroupLookup;
use crate::keys::Scheme;
use crate::rules::replaced_loras::ReplacedLoras;

/// The engine and rank of a stream.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Worker {
    /// Name of the engine.
    pub source: String,
    /// Data-parallel rank.
    pub rank: i64,
}

/// Workers by the number of their streams.
pub type Names = Vec<Option<Arc<Worker>>>;

/// A stream as lookups see it.
#[derive(Debug)]
pub struct Member {
    /// Engine and rank of the stream.
    pub worker: Arc<Worker>,
    /// The model with which the stream was labelled.
    pub model: Option<String>,
    /// The search of the stream's groups, if bitmaps are not enough.
    pub lookup: Option<Arc<GroupLookup>>,
    /// Block sizes and seeds by which its present incarnation divides prompts.
    pub schemes: Vec<Scheme>,
    /// The stream's blocks, as of its last batch.
    pub blocks: AtomicUsize,
    /// Records that the stream holds on a placement, although they might be gone there (`crate::holders::copies`).
    pub uncertain: BTreeSet<(u32, u16)>,
    /// LoRAs with blocks that might have been computed with other weights than the loaded ones.
    pub loras: ReplacedLoras,
}

/// The streams of a model.
#[derive(Debug, Default)]
pub struct Model {
    /// One bit per stream, by its number.
    pub streams: Vec<u64>,
    /// Block sizes and seeds by which they divide prompts, each with the number of streams that use it.
    pub schemes: Vec<(Scheme, u32)>,
}
