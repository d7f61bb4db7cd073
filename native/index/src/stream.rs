//! One stream: its incarnation, its blocks by the engine's hashes, and what its events show about them.

mod counters;
mod estimate;
mod group_lookups;
mod lora_changes;
mod placing;
mod removal;
mod restored_blocks;
mod room;
mod stated_ranks;
mod tally;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use hashbrown::HashTable;
use parking_lot::RwLock;

pub use self::counters::Counters;
pub use self::estimate::Estimate;
pub use self::removal::RemovalTarget;
pub use self::stated_ranks::StatedRanks;
use self::tally::{CopyMarks, Tally};
use crate::groups::Groups;
use crate::groups::cache::GroupCache;
use crate::groups::engine_hash::Sample;
use crate::holders::contexts::Context;
use crate::holders::copies::{Change, Copies, CopyTable};
use crate::holders::holder_sets::Move;
use crate::holders::placements::{AttestedGroup, Placement};
use crate::keys::Scheme;
use crate::memory::table::{CacheLevel, Stage, Table, TableHash, TablePosition};
use crate::rules::clear_budget::ClearBudget;
use crate::rules::collisions::Collisions;
use crate::rules::evidence::Evidence;
use crate::rules::hit_reports::HitReports;
use crate::rules::location::Location;
use crate::rules::pending::{Queue, Waiting};
use crate::step_counter;
use crate::store::records::Records;
use crate::store::shared_state::{Block, SharedState};
use crate::sync::yielding_lock::Writer;

/// A block whose hash in this stream differs from that of its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, packed(4))]
struct ForeignHash {
    hash: u64,
    number: u32,
}

/// Maximum number of times that `Stream::group_cache` is dropped in one incarnation of a stream.
const MAX_CACHE_DROPS: u8 = 4;
/// Maximum number of blocks from which the index tries to determine the scheme by which the engine hashes blocks.
const MAX_SAMPLES: u8 = 4;

/// A placement that the events of the stream have named.
#[derive(Clone, Copy, Debug)]
struct NamedPlacement {
    placement: u16,
    marks: CopyMarks,
    /// Level of the placement.
    level: u8,
    /// Number of blocks on the placement.
    held: usize,
}

impl NamedPlacement {
    fn is_on_device(&self) -> bool {
        self.marks.attested.is_on_device()
    }
}

/// A scheme by which an incarnation divides prompts into blocks.
#[derive(Clone, Copy, Debug)]
struct UsedScheme {
    scheme: Scheme,
    /// Whether the stream has announced blocks of this scheme on the device.
    is_on_device: bool,
}

/// The blocks that one stream holds, and what its events show about the engine. A thread that changes a stream holds the stream's lock. To
/// change blocks, the thread also holds the shared lock.
#[derive(Debug)]
pub struct Stream {
    /// ID of the stream in the shared state.
    pub number: u32,
    /// Incarnation of the publisher.
    pub incarnation: i64,
    /// The incarnation, readable without the stream's lock.
    pub published_incarnation: Arc<AtomicI64>,
    /// Sequence number of the last batch; -1 before the first batch.
    pub last: i64,
    /// The ranks that the stream's payloads state.
    pub stated_ranks: StatedRanks,
    /// Number of blocks; a block on several placements counts one time.
    pub blocks: usize,
    /// The sums over all copies except those of pending blocks.
    pub tally: Tally,
    /// For each group whose blocks the index does not keep, the sum of the contributions of its copies to the attestation.
    unkept: Vec<(i64, u64)>,
    /// Whether the stream held the same blocks as the engine at the last attestation of this incarnation; None before the first
    /// attestation.
    pub attested: Option<bool>,
    /// The groups of the engine.
    pub groups: Groups,
    /// Maps the engine's own hashes to the stream's blocks; None if lookups do not need this map.
    pub group_cache: Option<Arc<RwLock<GroupCache>>>,
    /// The hash, group and level of each copy that the current batch has changed; empty without `group_cache`.
    pub changed_copies: Vec<(u64, i64, u8)>,
    /// Number of times that `group_cache` may be dropped from now on. The number is limited, because the cache must be filled from all
    /// blocks whenever lookups need it again.
    cache_drops_left: u8,
    /// Whether `groups` has changed after its last publication to lookups.
    pub has_new_groups: bool,
    /// A block from which the index can determine, when necessary, the scheme by which the engine hashes blocks.
    pub sample: Option<Sample>,
    /// Number of further blocks from which the index tries to determine this scheme.
    pub samples_left: u8,
    /// Salts in the current batch, each with the first block of a prompt that has the salt.
    pub salted: Vec<(String, Sample)>,
    /// Whether prompts can have salts that are not stored.
    pub misses_salts: bool,
    /// Pending entries: blocks and hashes that cannot be placed yet.
    pub waiting: Queue,
    /// Keys of the blocks that the current batch has stored; None if the stream's worker has no speculative entries.
    pub stored: Option<Vec<u64>>,
    /// Counters of the input that the stream could not use.
    pub counters: Counters,
    /// What the events of the stream show about the completeness of its blocks.
    pub evidence: Evidence,
    /// The estimate that was last reported; the outer value is None if nothing was reported after the stream was restored.
    reported: Option<Option<Estimate>>,
    /// Whether the stream was removed from the index. Then a caller that has this stream must look up the worker again.
    pub is_removed: bool,
    /// Maps each location in the stream's events to its placement.
    pub places: Vec<(Location<'static>, u16)>,
    /// The bytes of this stream as last added to the total of all streams.
    pub counted: usize,
    table: Table,
    foreign: HashTable<ForeignHash>,
    collisions: Collisions,
    copies: CopyTable,
    /// Number of bytes that the stream's replaced LoRAs take in the view; 0 if no LoRA was replaced.
    lora_bytes: usize,
    /// Whether the publisher attests the engine's cache; then each store is a new copy.
    has_attested: bool,
    /// Copies of the current batch that might be reports of hits.
    pub hit_reports: HitReports<u32, u16>,
    named: Vec<NamedPlacement>,
    /// Schemes by which this incarnation has divided prompts.
    schemes: Vec<UsedScheme>,
    clear_budget: ClearBudget,
    /// Value of `Counters::evicted` when the stream was last known to be complete.
    evicted_when_whole: u64,
    /// The latest move of a block to another set by a store.
    pub added: Move,
    removed: Move,
}

impl Stream {
    /// A stream without blocks.
    pub fn new(number: u32, incarnation: i64) -> Self {
        Self {
            number,
            incarnation,
            published_incarnation: Arc::new(AtomicI64::new(incarnation)),
            last: -1,
            stated_ranks: StatedRanks::default(),
            blocks: 0,
            tally: Tally::default(),
            unkept: Vec::new(),
            attested: None,
            groups: Groups::default(),
            group_cache: None,
            changed_copies: Vec::new(),
            cache_drops_left: MAX_CACHE_DROPS,
            has_new_groups: false,
            sample: None,
            samples_left: MAX_SAMPLES,
            salted: Vec::new(),
            misses_salts: false,
            waiting: Queue::default(),
            stored: None,
            counters: Counters::default(),
            evidence: Evidence::default(),
            reported: Some(None),
            is_removed: false,
            places: Vec::new(),
            counted: 0,
            table: Table::dense(),
            foreign: HashTable::new(),
            collisions: Collisions::default(),
            copies: CopyTable::default(),
            lora_bytes: 0,
            has_attested: false,
            hit_reports: HitReports::default(),
            named: Vec::new(),
            schemes: Vec::new(),
            clear_budget: ClearBudget::default(),
            evicted_when_whole: 0,
            added: Move::default(),
            removed: Move::default(),
        }
    }

    /// Records that the stream now has all blocks that its publisher has announced.
    pub fn note_complete(&mut self) {
        self.evicted_when_whole = self.counters.evicted;
        (self.evidence.has_refused, self.evidence.has_dropped) = (false, false);
    }

    /// Whether blocks were refused at the memory limit after the stream was last known to be complete.
    pub fn lacks_refused_blocks(&self) -> bool {
        self.counters.evicted != self.evicted_when_whole
    }

    /// Compares the blocks on the device with an attestation of the engine. Returns None if the two differ and blocks that were refused at
    /// the memory limit can explain the difference.
    ///
    /// A publisher with attestations announces each copy exactly one time. So the number of copies is certain for all later stores and,
    /// after an equal attestation, also for all earlier stores.
    pub fn attest(&mut self, writer: &mut Writer<'_, SharedState>, attestation: u64, is_limited: bool) -> Option<bool> {
        let is_equal = self.attestation() == attestation;
        self.has_attested = true;
        self.groups.copied_levels |= 1;
        if is_equal {
            self.certify_copies(writer);
        }
        self.attested = (is_equal || !is_limited || !self.lacks_refused_blocks()).then_some(is_equal);
        self.attested
    }

    /// Makes the numbers of copies on the device certain, after an equal attestation.
    fn certify_copies(&mut self, writer: &mut Writer<'_, SharedState>) {
        let is_meant = |named: &&NamedPlacement| named.is_on_device() && self.copies.are_inexact(named.placement);
        let inexact: Vec<u16> = self.named.iter().filter(is_meant).map(|named| named.placement).collect();
        for placement in inexact {
            let (certain, foreign) = writer.unlocked(|| {
                let foreign: HashMap<u32, u64> = match &self.group_cache {
                    Some(_) => self.foreign().collect(),
                    None => HashMap::new(),
                };
                (self.copies.certify(placement), foreign)
            });
            step_counter::count(foreign.len());
            for number in certain {
                self.note(writer, number, placement, Change::BecameCertain);
                let hash = foreign.get(&number).copied().unwrap_or_else(|| writer.records.hash(number));
                self.note_changed_copy(writer, hash, placement);
                self.spend(writer, 1);
            }
        }
        self.publish_changed_copies(writer);
    }

    /// The attestation of an engine that holds exactly the stream's blocks, pending ones included.
    pub fn attestation(&self) -> u64 {
        let place = |waiting: &Waiting| self.named.iter().find(|named| named.placement == waiting.placement);
        let waiting = self
            .waiting
            .iter()
            .filter_map(|waiting| Some(place(waiting)?.marks.attested.copy(waiting.hash)));
        let unkept = self.unkept.iter().map(|(_, sum)| *sum);
        waiting.chain(unkept).fold(self.tally.attestation, u64::wrapping_add)
    }

    /// Counts stored or removed copies of a group whose blocks the index does not keep.
    pub fn count_unkept(&mut self, group: i64, is_on_device: bool, hashes: &[u64], is_stored: bool) {
        let sum = AttestedGroup::new(group, is_on_device).copies(hashes);
        let sum = if is_stored { sum } else { sum.wrapping_neg() };
        match self.unkept.iter_mut().find(|(known, _)| *known == group) {
            Some((_, known)) => *known = known.wrapping_add(sum),
            None => self.unkept.push((group, sum)),
        }
    }

    /// For each group whose blocks the index does not keep, its contribution to the attestation.
    pub fn unkept(&self) -> &[(i64, u64)] {
        &self.unkept
    }

    /// Whether the publisher attests the engine's cache.
    pub fn has_attested(&self) -> bool {
        self.has_attested
    }

    /// Sets what a snapshot states about attestations.
    pub fn put_attested(&mut self, has_attested: bool, unkept: Vec<(i64, u64)>) {
        (self.has_attested, self.unkept) = (has_attested, unkept);
    }

    /// Removes the sums of groups whose blocks the index does not keep: of one group, or of all groups if `group` is None.
    pub fn clear_unkept(&mut self, group: Option<i64>) {
        self.unkept.retain(|(known, _)| group.is_some_and(|group| group != *known));
    }

    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        self.table.bytes()
            + self.foreign.allocation_size()
            + self.collisions.bytes()
            + self.copies.bytes()
            + self.lora_bytes
            + self.waiting.bytes()
            + self.group_cache.as_ref().map_or(0, |cache| cache.read().bytes())
            + self.sample.as_ref().map_or(0, Sample::bytes)
    }

    /// Upper bound of the number of further copies: all copies except the first of each block on each placement.
    pub fn copies(&self) -> usize {
        self.copies.beyond_first()
    }

    /// Number of blocks that might be gone; a block that might be gone on two placements counts twice.
    pub fn uncertain(&self) -> usize {
        self.copies.uncertain()
    }

    /// Placements that the stream has named, with the number of blocks on each.
    pub fn held(&self) -> impl Iterator<Item = (u16, usize)> + '_ {
        self.named.iter().map(|named| (named.placement, named.held))
    }

    /// The block sizes, in tokens, that this incarnation has announced.
    pub fn sizes(&self) -> Vec<u32> {
        let mut sizes: Vec<u32> = Vec::new();
        for UsedScheme { scheme, .. } in &self.schemes {
            if !sizes.contains(&scheme.size) {
                sizes.push(scheme.size);
            }
        }
        sizes
    }

    /// Number of different block sizes on the device. A connector can announce chunks of another size on other tiers.
    fn device_sizes(&self) -> usize {
        let on_device = self.schemes.iter().filter(|used| used.is_on_device);
        let (mut first, mut count) = (None, 0);
        for UsedScheme { scheme, .. } in on_device {
            let is_new = first.is_none_or(|size| size != scheme.size);
            (first, count) = (first.or(Some(scheme.size)), count + usize::from(is_new));
        }
        count
    }

    /// Admits the scheme of a context. Keys do not show whether blocks are of bigrams (EAGLE), so prompts are looked up by both schemes.
    pub fn admit_context(&mut self, shared: &mut SharedState, context: &Context, placement: u16) -> bool {
        let bigrams = Scheme {
            eagle: true,
            ..context.scheme
        };
        self.admit_scheme(shared, context.scheme, placement)
            && (!context.is_keyed() || self.admit_scheme(shared, bigrams, placement))
    }

    /// Records that this incarnation has blocks of a scheme on a placement. Returns false if the incarnation would have too many schemes.
    #[inline]
    pub fn admit_scheme(&mut self, shared: &mut SharedState, scheme: Scheme, placement: u16) -> bool {
        let is_on_device = self.named(placement).is_on_device();
        match self.schemes.iter_mut().find(|used| used.scheme == scheme) {
            Some(used) => {
                used.is_on_device |= is_on_device;
                true
            }
            None => self.add_scheme(shared, UsedScheme { scheme, is_on_device }),
        }
    }

    #[cold]
    fn add_scheme(&mut self, shared: &mut SharedState, used: UsedScheme) -> bool {
        if self.schemes.len() >= shared.limits.block_sizes {
            return false;
        }
        self.schemes.push(used);
        shared.use_scheme(self.number, used.scheme);
        true
    }

    /// Returns the ID of a placement, and records that the stream has named it. Returns None if there are too many placements.
    pub fn use_placement(&mut self, shared: &mut SharedState, placement: Placement) -> Option<u16> {
        let (marks, level) = (CopyMarks::new(&placement), placement.level() as u8);
        let number = shared.view.change().placements.retain(placement)?;
        if self.named.iter().any(|named| named.placement == number) {
            shared.view.change().placements.release(number);
            return Some(number);
        }
        if self.named.len() >= shared.limits.places || !shared.name_placement(self.number, number) {
            shared.view.change().placements.release(number);
            return None;
        }
        self.evidence.named_levels |= 1 << level;
        self.named.push(NamedPlacement {
            placement: number,
            marks,
            level,
            held: 0,
        });
        Some(number)
    }

    /// Begins another incarnation of the publisher, and removes everything that belongs to the previous incarnation.
    pub fn begin_incarnation(&mut self, writer: &mut Writer<'_, SharedState>, incarnation: i64) {
        self.begin_engine(writer);
        self.evidence = Evidence::default();
        self.reported = Some(None);
        self.clear_budget = ClearBudget::default();
        self.evicted_when_whole = self.counters.evicted;
        self.incarnation = incarnation;
        self.stated_ranks = StatedRanks::default();
        self.published_incarnation.store(incarnation, Ordering::Relaxed);
    }

    /// Removes all blocks, and forgets everything that was learned about the engine: the next events can be those of another engine.
    pub fn begin_engine(&mut self, writer: &mut Writer<'_, SharedState>) {
        self.remove_all(writer);
        self.leave_placements(writer);
        self.groups.forget();
        (self.group_cache, self.sample, self.samples_left) = (None, None, MAX_SAMPLES);
        (self.misses_salts, self.has_new_groups, self.cache_drops_left) = (false, false, MAX_CACHE_DROPS);
        (self.attested, self.has_attested) = (None, false);
        self.schemes.clear();
        self.salted.clear();
        writer.drop_schemes(self.number);
        writer.use_lookup(self.number, None);
        self.last = -1;
    }

    /// Removes all blocks of the stream, and removes the stream from the shared state.
    pub fn leave_index(&mut self, writer: &mut Writer<'_, SharedState>) {
        self.remove_all(writer);
        self.leave_placements(writer);
        writer.leave(self.number);
        writer.streams_bytes = writer.streams_bytes.wrapping_sub(self.counted);
        self.counted = 0;
    }

    /// Releases the placements that the stream has named. The stream must not hold blocks on these placements any more.
    pub fn leave_placements(&mut self, shared: &mut SharedState) {
        self.places.clear();
        shared.leave_placements(self.number);
        for named in self.named.drain(..) {
            shared.view.change().placements.release(named.placement);
        }
    }

    /// Prefetches what one stage of a search for a hash in the stream's table reads.
    #[inline]
    pub fn prefetch(&self, mixed: TableHash, stage: Stage) {
        self.table.prefetch(mixed, stage);
    }

    /// The part of the stream's table that is probably in a near cache.
    #[inline]
    pub fn cache_level(&self) -> CacheLevel {
        self.table.cache_level()
    }

    fn foreign_of(&self, shared: &SharedState, hash: u64, fits: impl Fn(u32) -> bool) -> Option<u32> {
        if self.foreign.is_empty() {
            return None;
        }
        self.foreign
            .find(shared.secret.place(hash), |entry| entry.hash == hash && fits(entry.number))
            .map(|entry| entry.number)
    }

    /// Returns the record of the block with this hash. If several blocks have the hash, returns the record of the latest.
    #[inline]
    pub fn newest(&self, shared: &SharedState, hash: u64) -> Option<u32> {
        if let Some(list) = self.collisions.get(hash) {
            return list.last().copied();
        }
        let found = self
            .table
            .find(shared.mixed(hash), |number| shared.records.hash(number) == hash);
        found.or_else(|| self.foreign_of(shared, hash, |_| true))
    }

    /// Returns the record of a block; None if the stream does not hold the block.
    pub fn find(&self, shared: &SharedState, block: &Block, parent: Option<u32>) -> Option<u32> {
        let same = |number| is_block(shared, number, block, parent);
        let found = self.table.find(block.mixed_hash, |number| {
            shared.records.hash(number) == block.hash && same(number)
        });
        found.or_else(|| self.foreign_of(shared, block.hash, same))
    }

    /// Whether the stream holds a block with this hash.
    #[inline]
    pub fn knows(&self, shared: &SharedState, hash: u64, position: TablePosition) -> bool {
        let mut found = false;
        self.table.for_each_match_at(position, |number| {
            found = shared.records.hash(number) == hash;
            !found
        });
        found || self.foreign_of(shared, hash, |_| true).is_some()
    }

    /// The position of a hash in the stream's table.
    #[inline]
    pub fn position_of(&self, mixed: TableHash) -> TablePosition {
        self.table.position_of(mixed)
    }

    /// Publishes to lookups whether a block might be gone, if `change` has changed this.
    fn note(&self, shared: &mut SharedState, number: u32, placement: u16, change: Change) {
        if change != Change::Same {
            shared.set_uncertain(self.number, number, placement, change == Change::BecameUncertain);
        }
    }

    /// Records that events name groups for placements on the level of `placement`, so that each store on that level is another copy.
    #[inline]
    pub fn note_copies_there(&mut self, placement: u16) {
        self.groups.copied_levels |= 1 << self.named(placement).level;
    }

    /// The level of a placement that the stream has named.
    pub fn level(&self, placement: u16) -> usize {
        self.named(placement).level.into()
    }

    /// Whether a placement that the stream has named is on the device.
    #[inline]
    pub fn is_on_device(&self, placement: u16) -> bool {
        self.named(placement).is_on_device()
    }

    /// A placement that the stream has named.
    #[inline]
    fn named(&self, placement: u16) -> &NamedPlacement {
        let found = self.named.iter().find(|named| named.placement == placement);
        found.expect("a stream names a placement before it has blocks there")
    }

    #[inline]
    fn named_mut(&mut self, placement: u16) -> &mut NamedPlacement {
        let found = self.named.iter_mut().find(|named| named.placement == placement);
        found.expect("a stream names a placement before it has blocks there")
    }

    /// Removes the numbers of copies of a block on a placement that does not hold the block any more. The caller must change the block's
    /// slot first: else a lookup could count the block as certainly held.
    fn forget_copies(&mut self, shared: &mut SharedState, number: u32, placement: u16) -> Copies {
        let (copies, change) = self.copies.remove(number, placement);
        self.note(shared, number, placement, change);
        copies
    }

    /// Bounds of the number of copies of a block on a placement that holds it.
    pub fn count(&self, number: u32, placement: u16) -> Copies {
        self.copies.get(number, placement)
    }

    /// The hashes under which the stream has several blocks, each with its blocks, the oldest first. The records that `numbers` returns are
    /// not in this order.
    pub fn ordered(&self) -> impl Iterator<Item = (u64, &[u32])> {
        self.collisions.iter()
    }

    /// The records of all blocks, in any order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.table.iter().chain(self.foreign.iter().map(|entry| entry.number))
    }

    /// The records whose hash is also the hash of the block in this stream, in any order.
    pub fn own_numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.table.iter()
    }

    /// The records whose hash is not that of the block in this stream, each with the block's hash in this stream, in any order.
    pub fn foreign(&self) -> impl ExactSizeIterator<Item = (u32, u64)> + '_ {
        self.foreign.iter().map(|entry| (entry.number, entry.hash))
    }

    /// Whether no block has more than one copy on a placement.
    pub fn is_single(&self) -> bool {
        self.copies.is_empty()
    }

    /// Adds the checks that a payload of this many bytes allows (see `Collisions::grant`).
    pub fn grant(&mut self, payload: usize) {
        self.collisions.grant(payload);
    }

    /// Whether the cached number of blocks that share a hash is correct.
    #[cfg(test)]
    pub fn is_counted(&self) -> bool {
        self.collisions.is_counted()
    }

    /// Removes and returns one pending block that waits for this hash.
    pub fn take_awaiting(&mut self, hash: u64) -> Option<Waiting> {
        self.waiting.take_one_awaiting(hash)
    }
}

/// Whether a record belongs to a block. `parent` is the record of the block's parent; None if it is not known.
#[inline]
fn is_block(shared: &SharedState, number: u32, block: &Block, parent: Option<u32>) -> bool {
    let records = &shared.records;
    if records.context(number) != block.context {
        return false;
    }
    if !records.is_linked(number) {
        return records.word(number) == block.key;
    }
    match parent {
        // A linked block is in the slot after its parent, which is the only record with the parent's key in this context.
        Some(parent) if records.context(parent) == block.context => {
            Records::next(parent) == Some(number) && records.word(number) == block.local
        }
        _ => records.key(number) == block.key,
    }
}
