//! The interface of this crate for Rust programs.

use std::fmt;
use std::io::{self, Read, Write};

use crate::apply::EVERY_TIER;
use crate::holders::placements::LEVELS;
use crate::keys;
use crate::limits::Limits as ContentLimits;
use crate::lookup::{self, Scope};
use crate::prefix_index::{self, BatchReport, Info, Outcome, TypedEvent};
use crate::snapshot::{self, Failure};
use crate::store::members::Worker;
use crate::wire::scan::{Kind, Limits as PayloadLimits, Schema};

/// Bounds of an index.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Bounds of the contents of the index. Input that is dropped at a bound is counted.
    pub contents: ContentLimits,
    /// Bounds of one payload. The part of a payload that exceeds a bound is rejected.
    pub payload: PayloadLimits,
}

impl Limits {
    /// Adds a memory limit in bytes: while the index takes more bytes, it refuses new blocks.
    #[must_use]
    pub fn with_memory(mut self, bytes: usize) -> Self {
        self.contents.memory = Some(bytes);
        self
    }

    fn check(&self) -> Result<(), Error> {
        let (contents, payload) = (&self.contents, &self.payload);
        let all = [
            ("contents.memory", contents.memory.unwrap_or(1)),
            ("contents.orphans", contents.orphans),
            ("contents.orphan_bytes", contents.orphan_bytes),
            ("contents.places", contents.places),
            ("contents.groups", contents.groups),
            ("contents.block_sizes", contents.block_sizes),
            ("contents.records_per_key", contents.records_per_key),
            ("contents.blocks_per_hash", contents.blocks_per_hash),
            ("contents.ranks", contents.ranks),
            ("payload.max_payload_bytes", payload.max_payload_bytes),
            ("payload.max_events", payload.max_events),
            ("payload.max_hashes", payload.max_hashes),
            ("payload.max_fields", payload.max_fields),
            ("payload.max_free_form_bytes", payload.max_free_form_bytes),
        ];
        match all.iter().find(|(_, limit)| *limit == 0) {
            Some((name, _)) => Err(Error::Limit(format!("{name} is 0, expected 1 or more"))),
            None => Ok(()),
        }
    }
}

/// A number for one life of a publisher process. When a publisher restarts, it begins an incarnation with a higher number, and the blocks
/// of earlier incarnations are removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Incarnation(pub i64);

/// The position of a batch in its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The incarnation of the publisher.
    pub incarnation: Incarnation,
    /// The sequence number of the message, from 0.
    pub seq: i64,
}

impl Worker {
    /// A data-parallel rank of an engine.
    pub fn new(source: impl Into<String>, rank: i64) -> Self {
        Self {
            source: source.into(),
            rank,
        }
    }
}

impl fmt::Display for Worker {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} rank {}", self.source, self.rank)
    }
}

/// The kind of memory that holds a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    /// In the memory of the device.
    #[default]
    Gpu,
    /// In the memory of the host.
    Cpu,
    /// On a disk or in a remote store.
    Disk,
}

impl Tier {
    /// The medium that events name for this tier.
    fn medium(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Cpu => "CPU",
            Self::Disk => "DISK",
        }
    }
}

/// The blocks of a prefix that a KV cache group of a hybrid model needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// All blocks.
    #[default]
    Full,
    /// The blocks that cover the last tokens of the prefix; the number is the size of the window in tokens.
    SlidingWindow(u32),
    /// The last block only: it holds the state after the block's last token (Mamba).
    State,
}

impl Attention {
    /// The name of this kind in events.
    fn kind(self) -> &'static str {
        match self {
            Self::Full => "full_attention",
            Self::SlidingWindow(_) => "sliding_window",
            Self::State => "mamba",
        }
    }

    fn window(self) -> Option<i64> {
        match self {
            Self::SlidingWindow(window) => Some(window.into()),
            Self::Full | Self::State => None,
        }
    }
}

/// A KV cache group of a hybrid model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// The number that identifies the group in events.
    pub number: u32,
    /// The blocks of a prefix that the group needs.
    pub attention: Attention,
}

/// Consecutive blocks that a worker has stored.
#[derive(Clone, Copy, Debug, Default)]
pub struct Store<'a> {
    /// The engine's hash of each block.
    pub hashes: &'a [u64],
    /// The engine's hash of the block before the first one; None at the beginning of a prompt.
    pub parent: Option<u64>,
    /// The tokens of all blocks.
    pub tokens: &'a [u32],
    /// Number of tokens of each block.
    pub block_size: u32,
    /// The tier of the blocks.
    pub tier: Tier,
    /// The group of a hybrid model; None if the model has one group.
    pub group: Option<Group>,
    /// The LoRA for which the blocks were computed.
    pub lora: Option<&'a str>,
    /// The cache salt for which the blocks were computed.
    pub salt: Option<&'a str>,
}

/// Blocks that a worker has removed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Remove<'a> {
    /// The engine's hash of each block.
    pub hashes: &'a [u64],
    /// The tier of the blocks.
    pub tier: Tier,
    /// The number that identifies the blocks' group; None if the model has one group.
    pub group: Option<u32>,
}

/// A clear of a worker's cache, or of one tier of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clear {
    /// The tier that was cleared; None for all tiers.
    pub tier: Option<Tier>,
}

/// Outcome of a batch or event, unless an error occurred.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub enum Applied {
    /// The batch or event was applied. The report lists the rejected parts of the batch and its heartbeat.
    Now(Option<Box<BatchReport>>),
    /// The batch was already applied before.
    Before,
    /// The batch belongs to an incarnation that has ended, or to a worker that was removed.
    Void,
}

/// A failure to create, read or change an index.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A limit is too low; the text names the limit.
    Limit(String),
    /// The number of tokens is not the number of hashes times the block size; the text states these numbers.
    Shape(String),
    /// The index already has the maximum number of streams.
    Full,
    /// A panic has left the index half changed.
    Damaged,
    /// A snapshot could not be read.
    Snapshot(Failure),
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limit(what) | Self::Shape(what) => out.write_str(what),
            Self::Full => out.write_str("the index has the maximum number of streams; remove workers that are gone"),
            Self::Damaged => out.write_str("a panic has left the index half changed; restore a snapshot"),
            Self::Snapshot(failure) => write!(out, "cannot read the snapshot: {failure}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Snapshot(failure) => Some(failure),
            _ => None,
        }
    }
}

impl Scope {
    /// Selects the workers of a model that `Index::set_model` has named, for a prompt without LoRA and salt.
    pub fn of_model(model: impl Into<String>) -> Self {
        Self {
            model: Some(model.into()),
            ..Self::default()
        }
    }

    /// Adds the prompt's LoRA to the scope.
    #[must_use]
    pub fn with_lora(self, name: &str) -> Self {
        Self {
            lora: keys::lora_name(name.as_bytes()),
            ..self
        }
    }

    /// Adds the prompt's cache salt to the scope.
    #[must_use]
    pub fn with_salt(self, salt: &str) -> Self {
        Self {
            salt: keys::salt(salt.as_bytes()),
            ..self
        }
    }
}

/// Numbers of tokens of the longest prefix that a worker holds. The number for a tier includes the blocks of faster tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Number of tokens on the device only.
    pub gpu: u32,
    /// Number of tokens on the device or the host.
    pub cpu: u32,
    /// Number of tokens on the device, the host, disks or remote stores.
    pub disk: u32,
    /// Number of tokens on any medium, including media with unknown names.
    pub any: u32,
}

impl From<[u32; LEVELS]> for Tokens {
    fn from([gpu, cpu, disk, any]: [u32; LEVELS]) -> Self {
        Self { gpu, cpu, disk, any }
    }
}

/// How much of a prompt a worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Hit<'a> {
    /// The worker.
    pub worker: &'a Worker,
    /// Number of tokens that the worker holds, according to its events.
    pub tokens: Tokens,
    /// Number of tokens that the worker certainly holds; it is lower than `tokens` if some blocks might be gone.
    pub certain: Tokens,
}

/// An index of the prompt prefixes that workers hold.
///
/// Any number of threads can search while others apply batches. The caller must apply the batches of one worker in order, one at a time.
#[derive(Debug)]
pub struct Index {
    inner: prefix_index::PrefixIndex,
}

impl Index {
    /// Creates an empty index.
    ///
    /// # Errors
    /// If a limit is too low.
    pub fn new(limits: Limits) -> Result<Self, Error> {
        limits.check()?;
        let schema = Schema::new(limits.payload).map_err(Error::Limit)?.joining();
        Ok(Self {
            inner: prefix_index::PrefixIndex::new(schema, limits.contents),
        })
    }

    // --- batches as engines send them

    /// Applies a batch, given as msgpack in any form that an engine sends. The caller must apply the batches of a stream in order.
    ///
    /// # Errors
    /// [`Error::Full`] or [`Error::Damaged`]. Invalid input from a peer never causes an error: the report lists the rejected parts.
    pub fn batch(&self, worker: &Worker, at: Position, payload: &[u8]) -> Result<Applied, Error> {
        let applied = self
            .inner
            .batch(&worker.source, worker.rank, at.incarnation.0, at.seq, payload);
        outcome(applied.outcome, applied.report)
    }

    /// Records that the batches up to `last` are lost.
    ///
    /// # Errors
    /// The errors of [`Index::batch`].
    pub fn gap(&self, worker: &Worker, last: Position) -> Result<Applied, Error> {
        let found = self.inner.gap(&worker.source, worker.rank, last.incarnation.0, last.seq);
        outcome(found, None)
    }

    /// Begins an incarnation of a worker's publisher, and removes all blocks of the worker.
    ///
    /// # Errors
    /// The errors of [`Index::batch`].
    pub fn reset(&self, worker: &Worker, incarnation: Incarnation) -> Result<Applied, Error> {
        outcome(self.inner.reset(&worker.source, worker.rank, incarnation.0), None)
    }

    // --- events

    /// Applies a store of blocks as the next batch of a worker.
    ///
    /// # Errors
    /// [`Error::Shape`] if `tokens` are not one block for each hash, and the errors of [`Index::batch`].
    pub fn store(&self, worker: &Worker, store: Store<'_>) -> Result<Applied, Error> {
        let (hashes, size) = (store.hashes.len(), store.block_size as usize);
        if size == 0 || hashes.checked_mul(size) != Some(store.tokens.len()) {
            let tokens = store.tokens.len();
            let what = format!("{tokens} tokens are not {hashes} blocks of {size} tokens");
            return Err(Error::Shape(what));
        }
        let mut event = TypedEvent::new(Kind::Stored, store.hashes, store.tokens).ok_or_else(too_long)?;
        event.add_text(Some(store.tier.medium()), |event| &mut event.medium);
        event.add_text(store.lora, |event| &mut event.lora_name);
        event.add_text(store.salt, |event| &mut event.cache_salt);
        event.fields.parent = store.parent;
        event.fields.block_size = u64::from(store.block_size);
        if let Some(group) = store.group {
            event.fields.group = Some(i64::from(group.number));
            event.add_text(Some(group.attention.kind()), |event| &mut event.spec_kind);
            event.fields.window = group.attention.window();
        }
        outcome(self.inner.event(worker, event), None)
    }

    /// Applies a removal of blocks as the next batch of a worker.
    ///
    /// # Errors
    /// The errors of [`Index::batch`].
    pub fn remove(&self, worker: &Worker, remove: Remove<'_>) -> Result<Applied, Error> {
        let mut event = TypedEvent::new(Kind::Removed, remove.hashes, &[]).ok_or_else(too_long)?;
        event.add_text(Some(remove.tier.medium()), |event| &mut event.medium);
        event.fields.group = remove.group.map(i64::from);
        outcome(self.inner.event(worker, event), None)
    }

    /// Applies a clear of the cache as the next batch of a worker.
    ///
    /// # Errors
    /// The errors of [`Index::batch`].
    pub fn clear(&self, worker: &Worker, clear: Clear) -> Result<Applied, Error> {
        let mut event = TypedEvent::new(Kind::Cleared, &[], &[]).ok_or_else(too_long)?;
        // A clear without a medium does not remove blocks on disks.
        event.add_text(
            Some(clear.tier.map_or(EVERY_TIER, |tier| tier.medium().as_bytes())),
            |event| &mut event.medium,
        );
        outcome(self.inner.event(worker, event), None)
    }

    // --- lookups

    /// Returns the workers that hold a prefix of a prompt. Engines always compute the last token of a prompt. If `tokens` omits that token,
    /// the answer counts exactly the tokens that engines need not compute.
    pub fn match_prompt(&self, tokens: &[u32], scope: &Scope) -> Matches {
        Matches(self.inner.match_prompt(tokens, scope))
    }

    // --- workers

    /// Sets the model of an engine, for all of its ranks, including ranks that are added later. Lookups search the workers of one model.
    pub fn set_model(&self, source: &str, model: Option<&str>) {
        self.inner.label(source, model);
    }

    /// Removes a worker. Batches of the worker's incarnation that arrive later are ignored. Returns the number of blocks that the worker
    /// held.
    pub fn remove_worker(&self, worker: &Worker) -> usize {
        self.inner.remove(&worker.source, Some(worker.rank))
    }

    /// Lets the index accept events of any incarnation of a removed worker again.
    pub fn admit(&self, worker: &Worker) {
        self.inner.admit(&worker.source, worker.rank);
    }

    /// Describes each worker, with its counters.
    pub fn infos(&self) -> Vec<Info> {
        self.inner.infos()
    }

    /// Heap bytes of the index.
    pub fn bytes(&self) -> usize {
        self.inner.bytes().0
    }

    // --- snapshots

    /// Writes a snapshot of all workers.
    ///
    /// # Errors
    /// The errors of writes to `out`.
    pub fn save<W: Write>(&self, out: W) -> io::Result<W> {
        self.inner.save(out, None)
    }

    /// Replaces all workers by the workers of a snapshot. A failed call changes nothing.
    ///
    /// # Errors
    /// [`Error::Snapshot`].
    pub fn restore(&self, from: impl Read) -> Result<(), Error> {
        snapshot::restore(&self.inner, from).map_err(Error::Snapshot)
    }

    /// Whether a panic has left the index half changed. Until a snapshot is restored, the index's answers can be wrong.
    pub fn is_damaged(&self) -> bool {
        self.inner.is_damaged()
    }
}

fn outcome(outcome: Outcome, report: Option<Box<BatchReport>>) -> Result<Applied, Error> {
    match outcome {
        Outcome::Applied(_) => Ok(Applied::Now(report)),
        Outcome::Duplicate => Ok(Applied::Before),
        Outcome::Void => Ok(Applied::Void),
        Outcome::Full => Err(Error::Full),
        Outcome::Damaged => Err(Error::Damaged),
    }
}

fn too_long() -> Error {
    Error::Shape("an event has 2^32 hashes or tokens, or more".into())
}

/// The workers that hold a prefix of a prompt.
#[derive(Clone, Debug, Default)]
pub struct Matches(lookup::Matches);

impl Matches {
    /// The workers, in no particular order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Hit<'_>> {
        let Self(matches) = self;
        matches.hits.iter().map(|hit| Hit {
            worker: matches.worker(hit),
            tokens: hit.tokens.into(),
            certain: matches.certain(hit).into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> (Index, Worker) {
        (Index::new(Limits::default()).unwrap(), Worker::new("a", 3))
    }

    fn held_tokens(index: &Index, tokens: &[u32], scope: &Scope) -> Option<Tokens> {
        index.match_prompt(tokens, scope).iter().next().map(|hit| hit.tokens)
    }

    const STORE: Store<'_> = Store {
        hashes: &[1, 2],
        parent: None,
        tokens: &[10, 11, 12, 13],
        block_size: 2,
        tier: Tier::Gpu,
        group: None,
        lora: None,
        salt: None,
    };

    #[test]
    fn events_are_applied_on_their_tiers() {
        let (index, worker) = index();
        for tier in [Tier::Gpu, Tier::Cpu, Tier::Disk] {
            assert_eq!(index.store(&worker, Store { tier, ..STORE }).unwrap(), Applied::Now(None));
        }
        let tokens = |gpu, cpu, disk| {
            Some(Tokens {
                gpu,
                cpu,
                disk,
                any: disk,
            })
        };
        let found = |index: &Index| held_tokens(index, STORE.tokens, &Scope::default());
        assert_eq!(found(&index), tokens(4, 4, 4));
        let removed = Remove {
            hashes: &[2],
            ..Remove::default()
        };
        index.remove(&worker, removed).unwrap();
        assert_eq!(found(&index), tokens(2, 4, 4));
        index.clear(&worker, Clear { tier: Some(Tier::Cpu) }).unwrap();
        assert_eq!(found(&index), tokens(2, 2, 4));
        index.clear(&worker, Clear::default()).unwrap();
        assert_eq!(found(&index), None);
        assert_eq!(index.infos()[0].last, 5);
    }

    #[test]
    fn names_and_groups_of_events_count() {
        let (index, worker) = index();
        let store = Store {
            lora: Some("sql"),
            salt: Some("s"),
            ..STORE
        };
        index.store(&worker, store).unwrap();
        assert_eq!(held_tokens(&index, STORE.tokens, &Scope::default()), None);
        let scope = Scope::default().with_lora("sql").with_salt("s");
        assert_eq!(held_tokens(&index, STORE.tokens, &scope).unwrap().gpu, 4);
        index.clear(&worker, Clear::default()).unwrap();
        for (number, attention) in [(0, Attention::Full), (1, Attention::SlidingWindow(3)), (2, Attention::State)] {
            let group = Some(Group { number, attention });
            index.store(&worker, Store { group, ..STORE }).unwrap();
        }
        assert_eq!(held_tokens(&index, STORE.tokens, &Scope::default()).unwrap().gpu, 4);
        index
            .remove(
                &worker,
                Remove {
                    hashes: &[2],
                    group: Some(2),
                    ..Remove::default()
                },
            )
            .unwrap();
        assert_eq!(held_tokens(&index, STORE.tokens, &Scope::default()).unwrap().gpu, 2);
    }

    #[test]
    fn events_of_a_removed_worker_are_void() {
        let (index, worker) = index();
        index.store(&worker, STORE).unwrap();
        assert_eq!(index.remove_worker(&worker), 2);
        assert_eq!(index.store(&worker, STORE).unwrap(), Applied::Void);
        index.admit(&worker);
        assert_eq!(index.store(&worker, STORE).unwrap(), Applied::Now(None));
    }

    #[test]
    fn wrong_values_are_errors() {
        let (index, worker) = index();
        let wrong = [
            Store { block_size: 0, ..STORE },
            Store { block_size: 3, ..STORE },
            Store { hashes: &[1], ..STORE },
            Store { tokens: &[], ..STORE },
        ];
        for store in wrong {
            let error = index.store(&worker, store).unwrap_err();
            assert!(error.to_string().contains("blocks of"), "{error}");
        }
        let mut limits = Limits::default();
        limits.payload.max_nesting = 1;
        assert!(Index::new(limits).unwrap_err().to_string().contains("max_nesting"));
        let error = Index::new(Limits::default().with_memory(0)).unwrap_err();
        assert_eq!(error.to_string(), "contents.memory is 0, expected 1 or more");
        let error: Box<dyn std::error::Error> = index.restore(&b"x"[..]).unwrap_err().into();
        assert!(error.source().is_some());
    }
}
