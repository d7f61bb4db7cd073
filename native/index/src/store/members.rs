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

/// Workers, indexed by the IDs of their streams; None for an unused ID.
pub type Names = Vec<Option<Arc<Worker>>>;

/// The source of a stream.
pub fn source_of(names: &Names, stream: u32) -> &str {
    names[stream as usize].as_ref().map_or("", |worker| &worker.source)
}

/// A stream as lookups see it.
#[derive(Debug)]
pub struct Member {
    /// Engine and rank of the stream.
    pub worker: Arc<Worker>,
    /// The model of the stream's worker; None if the worker has no label.
    pub model: Option<String>,
    /// The data for searches of the stream's groups; None if the bitmaps contain all members.
    pub lookup: Option<Arc<GroupLookup>>,
    /// The schemes by which the stream's present incarnation divides prompts into blocks.
    pub schemes: Vec<Scheme>,
    /// The placements that the stream has named: it holds blocks on no others.
    pub placements: Vec<u16>,
    /// Number of blocks of the stream after its last batch.
    pub blocks: AtomicUsize,
    /// The blocks that might be gone, as pairs of record and placement (`crate::holders::copies`).
    pub uncertain: BTreeSet<(u32, u16)>,
    /// LoRAs that were replaced: the weights of some of their blocks might not be loaded any more.
    pub loras: ReplacedLoras,
}

/// The streams whose workers have one model.
#[derive(Debug, Default)]
pub struct Model {
    /// A bitmap of the streams, by ID.
    pub streams: Vec<u64>,
    /// The schemes by which the streams divide prompts into blocks, each with the number of its streams.
    pub schemes: Vec<(Scheme, u32)>,
}
