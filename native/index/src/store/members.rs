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

/// Workers, indexed by the ID of their streams.
pub type Names = Vec<Option<Arc<Worker>>>;

/// A stream as lookups see it.
#[derive(Debug)]
pub struct Member {
    /// Engine and rank of the stream.
    pub worker: Arc<Worker>,
    /// The model with which the stream was labelled.
    pub model: Option<String>,
    /// How prompts are looked up in the stream's groups; None if bitmaps suffice.
    pub lookup: Option<Arc<GroupLookup>>,
    /// The schemes by which the stream's present incarnation divides prompts into blocks.
    pub schemes: Vec<Scheme>,
    /// How many blocks the stream had after its last batch.
    pub blocks: AtomicUsize,
    /// Pairs of record and placement: blocks that the stream holds on the placement and that might be gone (`crate::holders::copies`).
    pub uncertain: BTreeSet<(u32, u16)>,
    /// Replaced LoRAs: some blocks of each might have been computed with weights that are not loaded any more.
    pub loras: ReplacedLoras,
}

/// The streams of a model.
#[derive(Debug, Default)]
pub struct Model {
    /// A bitmap with one bit for each stream, at the position of the stream's ID.
    pub streams: Vec<u64>,
    /// The schemes by which these streams divide prompts into blocks, each with the number of streams that use it.
    pub schemes: Vec<(Scheme, u32)>,
}
