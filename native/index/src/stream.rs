//! The blocks of one stream by the engine's own hashes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use hashbrown::HashTable;
use parking_lot::RwLock;

use crate::copies::{Change, Copies, CopyTable, Origin};
use crate::engine_hash::Sample;
use crate::group_cache::{GroupCache, GroupLookup};
use crate::groups::{Groups, Method};
use crate::hasher::Secret;
use crate::holder_sets::{EMPTY, Move};
use crate::keys::{self, Scheme};
use crate::pending::{Queue, Waiting};
use crate::placements::{AttestedGroup, Placement};
use crate::records::{Records, Row};
use crate::shared::{Block, ByHash, SharedState};
use crate::step_counter;
use crate::table::{Reach, Seat, Stage, Table, TableHash};
use crate::yielding_lock::{WORK_PER_HOLD, Writer, YieldingRwLock};

/// A block whose hash in this stream differs from that of its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, packed(4))]
struct Foreign {
    hash: u64,
    number: u32,
}

/// Counters of unusable input of a stream.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Rejected stores, by kind of group and reason.
    pub rejected: HashMap<(String, &'static str), u64>,
    /// Removals of hashes that the stream does not hold.
    pub unknown: u64,
    /// Blocks dropped from the waiting queue.
    pub dropped: u64,
    /// Blocks that were refused at the memory limit.
    pub evicted: u64,
    /// Deliveries that came twice.
    pub duplicates: u64,
    /// Deliveries of an incarnation that has ended.
    pub void: u64,
    /// Gaps.
    pub gaps: u64,
    /// Events that change nothing.
    pub neutral: u64,
}

/// Most kinds of groups that are counted under their own name, since a peer chooses names.
const MAX_KINDS: usize = 64;

impl Counters {
    /// Counts a rejected store.
    pub fn reject(&mut self, kind: &str, reason: &'static str) {
        let known = self.rejected.len() < MAX_KINDS || self.rejected.contains_key(&(kind.into(), reason));
        let kind = if known { kind } else { "other" };
        *self.rejected.entry((kind.chars().take(64).collect(), reason)).or_default() += 1;
    }

    /// Adds the counters of a stream that has ended.
    pub fn add(&mut self, other: &Self) {
        for ((kind, reason), count) in &other.rejected {
            *self.rejected.entry((kind.clone(), reason)).or_default() += count;
        }
        self.unknown += other.unknown;
        self.dropped += other.dropped;
        self.evicted += other.evicted;
        self.duplicates += other.duplicates;
        self.void += other.void;
        self.gaps += other.gaps;
        self.neutral += other.neutral;
    }
}

/// A placement that the stream has named.
#[derive(Clone, Copy, Debug)]
struct ProcessOwned {
    placement: u16,
    /// Its contribution to a digest.
    mark: u64,
    /// The contribution of its copies to an attestation.
    attested: AttestedGroup,
    /// Blocks held there.
    held: usize,
}

/// Blocks that a partial clear may examine for each stored block: engines clear far less often than they store.
const EXAMINATIONS_PER_BLOCK: usize = 16;
/// Blocks that partial clears may examine before any block is stored.
const FIRST_EXAMINATIONS: usize = 1 << 20;
/// Examinations of blocks that share a hash, per byte that a stream sends. An engine whose hashes do not cover prefixes sends some fifty
/// bytes for each page that comes or goes, so a page may share its hash with as many others as the limit allows.
const ALIKE_PER_BYTE: usize = 16;
/// Most of these examinations that are saved for later payloads.
const ALIKE_KEPT: usize = 1 << 20;
/// Blocks of one hash that are examined even without any budget left.
const FEW_ALIKE: usize = 8;
/// Stores in which the hash scheme of an engine is searched.
const SAMPLES: u8 = 4;
/// Entries of a table from which on it is not moved while other threads wait.
const LARGE: usize = 1 << 14;
/// Cost, in examinations, of computing the key of a block whose parent is unknown.
const EXAMINATIONS_PER_KEY: usize = 8;

/// One stream. Its writer holds its lock, and also that of the shared part while blocks change.
#[derive(Debug)]
pub struct Stream {
    /// Its number in the shared part.
    pub number: u32,
    /// Incarnation of the publisher.
    pub incarnation: i64,
    /// The incarnation for threads that do not hold its lock.
    pub life: Arc<AtomicI64>,
    /// Number of the last batch; -1 before the first.
    pub last: i64,
    /// Number of blocks, each counted once on all its placements.
    pub blocks: usize,
    /// Order-free digest of what is resident.
    pub digest: u128,
    /// The attestation of the copies that are placed.
    attestation: u64,
    /// The attestation, by group, of the copies of groups whose blocks are not kept.
    unkept: Vec<(i64, u64)>,
    /// Whether it held the same blocks as the engine at the last attestation of this incarnation; None before the first.
    pub attested: Option<bool>,
    /// The groups of its engine.
    pub groups: Groups,
    /// Its blocks by the engine's own hashes, if lookups need that.
    pub group_cache: Option<Arc<RwLock<GroupCache>>>,
    /// Copies that the current batch has changed, by hash, group and level; kept with `group_cache` only.
    pub changed_copies: Vec<(u64, i64, u8)>,
    /// Whether `groups` has changed since it was published to lookups.
    pub has_new_groups: bool,
    /// A store from which the hash scheme of the engine can be found later, if it is needed.
    pub sample: Option<Sample>,
    /// Number of further stores in which the hash scheme of its engine is searched.
    pub samples_left: u8,
    /// First blocks of prompts with salts in the current batch.
    pub salted: Vec<(String, Sample)>,
    /// Whether prompts have salts that are not kept.
    pub misses_salts: bool,
    /// Entries that cannot be placed yet.
    pub waiting: Queue,
    /// Counters of errors.
    pub counters: Counters,
    /// Whether it was removed from the index; a caller that still has it must look it up again.
    pub gone: bool,
    /// Placements by their names in events.
    pub places: Vec<(Place, u16)>,
    /// Bytes of this stream in the total of the shared part.
    pub counted: usize,
    table: Table,
    foreign: HashTable<Foreign>,
    /// All blocks of hashes with several blocks, the newest last.
    several: HashMap<u64, Vec<u32>>,
    /// Number of blocks in `several`.
    several_len: usize,
    copies: CopyTable,
    /// The origin of the current event's blocks.
    pub origin: Origin,
    /// Whether its sender attests its engine's cache: then every store is a new copy.
    has_attested: bool,
    /// Blocks with full attention that the current batch has announced again; kept for hybrid models only.
    repeated: Vec<u32>,
    /// Blocks without tokens that were not resident before the current batch, as far as was known.
    fresh: Vec<(u32, u16)>,
    own: Vec<ProcessOwned>,
    /// Schemes by which this incarnation has divided prompts.
    schemes: Vec<Scheme>,
    looks: usize,
    /// Remaining examinations of blocks that share a hash; unlimited before the first payload.
    alike: usize,
    /// Whether a removal was skipped because none remained.
    is_spent: bool,
    /// Value of `Counters::evicted` when the stream was last known to be complete.
    evicted_when_whole: u64,
    added: Move,
    removed: Move,
}

/// A placement as an event names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Bytes of the medium.
    pub medium: Option<Box<[u8]>>,
    /// Bytes of the locality.
    pub locality: Option<Box<[u8]>>,
    /// Bytes of the ownership.
    pub ownership: Option<Box<[u8]>>,
    /// Its group.
    pub group: i64,
}

/// The outcome of placing a block.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    /// Its record.
    pub number: u32,
    /// Whether the stream had no block of this hash.
    pub is_unknown: bool,
    /// Whether no stream held it before.
    pub is_new: bool,
}

/// The contribution of one copy to a digest.
#[inline]
fn mark(hash: u64, key: u64, placement: u64) -> u128 {
    let fold = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        (product as u64) ^ ((product >> 64) as u64)
    };
    let low = fold(hash ^ 0xA076_1D64_78BD_642F, key ^ placement ^ 0xE703_7ED1_A0B4_28DB);
    let high = fold(hash ^ placement ^ 0x8EBC_6AF0_9C88_C6E3, key ^ 0x5899_65CC_7537_4CC3);
    u128::from(fold(high ^ 0x1D8E_4E27_C47D_124F, low | 1)) << 64 | u128::from(low)
}

impl Stream {
    /// A stream without blocks.
    pub fn new(number: u32, incarnation: i64) -> Self {
        Self {
            number,
            incarnation,
            life: Arc::new(AtomicI64::new(incarnation)),
            last: -1,
            blocks: 0,
            digest: 0,
            attestation: 0,
            unkept: Vec::new(),
            attested: None,
            groups: Groups::default(),
            group_cache: None,
            changed_copies: Vec::new(),
            has_new_groups: false,
            sample: None,
            samples_left: SAMPLES,
            salted: Vec::new(),
            misses_salts: false,
            waiting: Queue::default(),
            counters: Counters::default(),
            gone: false,
            places: Vec::new(),
            counted: 0,
            table: Table::dense(),
            foreign: HashTable::new(),
            several: HashMap::new(),
            several_len: 0,
            copies: CopyTable::default(),
            origin: Origin::default(),
            has_attested: false,
            repeated: Vec::new(),
            fresh: Vec::new(),
            own: Vec::new(),
            schemes: Vec::new(),
            looks: FIRST_EXAMINATIONS,
            alike: usize::MAX,
            is_spent: false,
            evicted_when_whole: 0,
            added: Move::default(),
            removed: Move::default(),
        }
    }

    /// Whether it has its sender's digest; None if blocks that were refused at the memory limit can explain the difference.
    pub fn agrees(&mut self, digest: &str, is_limited: bool) -> Option<bool> {
        let evicted = self.counters.evicted;
        if format!("{:032x}", self.digest) == digest {
            self.evicted_when_whole = evicted;
            return Some(true);
        }
        (!is_limited || evicted == self.evicted_when_whole).then_some(false)
    }

    /// Compares what it holds on the device with an attestation of its engine; None as for `agrees`.
    ///
    /// A sender that attests announces each copy once: that applies to its stores from now on, and after an equal attestation also to all
    /// earlier ones.
    pub fn attest(&mut self, shared: &mut SharedState, attestation: u64, is_limited: bool) -> Option<bool> {
        let is_equal = self.attestation() == attestation;
        self.has_attested = true;
        if is_equal && !self.copies.is_empty() {
            self.copies.certify();
            shared.end_doubts(self.number);
            self.rebuild_group_cache(shared);
        }
        let is_whole = self.counters.evicted == self.evicted_when_whole;
        self.attested = (is_equal || !is_limited || is_whole).then_some(is_equal);
        self.attested
    }

    /// The attestation that the engine has if it holds the stream's blocks, including waiting ones.
    pub fn attestation(&self) -> u64 {
        let place = |waiting: &Waiting| self.own.iter().find(|own| own.placement == waiting.placement);
        let waiting = self
            .waiting
            .iter()
            .filter_map(|waiting| Some(place(waiting)?.attested.copy(waiting.hash)));
        let unkept = self.unkept.iter().map(|(_, sum)| *sum);
        waiting.chain(unkept).fold(self.attestation, u64::wrapping_add)
    }

    /// Counts stored or removed copies of a group whose blocks are not kept.
    pub fn count_unkept(&mut self, group: i64, is_on_device: bool, hashes: &[u64], is_stored: bool) {
        let sum = AttestedGroup::new(group, is_on_device).copies(hashes);
        let sum = if is_stored { sum } else { sum.wrapping_neg() };
        match self.unkept.iter_mut().find(|(known, _)| *known == group) {
            Some((_, known)) => *known = known.wrapping_add(sum),
            None => self.unkept.push((group, sum)),
        }
    }

    /// The attestation of those copies, by group.
    pub fn unkept(&self) -> &[(i64, u64)] {
        &self.unkept
    }

    /// Whether its sender attests its engine's cache.
    pub fn has_attested(&self) -> bool {
        self.has_attested
    }

    /// Restores the attestations of a snapshot.
    pub fn put_attested(&mut self, has_attested: bool, unkept: Vec<(i64, u64)>) {
        (self.has_attested, self.unkept) = (has_attested, unkept);
    }

    /// Removes those copies after a clear: of one group, or of all.
    pub fn clear_unkept(&mut self, group: Option<i64>) {
        self.unkept.retain(|(known, _)| group.is_some_and(|group| group != *known));
    }

    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        self.table.bytes()
            + self.foreign.allocation_size()
            + self.several.capacity() * (size_of::<(u64, Vec<u32>)>() + 1)
            + self.several_len * 8
            + self.copies.bytes()
            + self.waiting.bytes()
            + self.group_cache.as_ref().map_or(0, |cache| cache.read().bytes())
            + self.sample.as_ref().map_or(0, Sample::bytes)
    }

    /// Copies beyond the first of each block and placement, at most.
    pub fn copies(&self) -> usize {
        self.copies.beyond_first()
    }

    /// Blocks that might be gone, once for each placement: they were announced several times and removed less often.
    pub fn uncertain(&self) -> usize {
        self.copies.doubtful()
    }

    /// Placements that the stream has named, and the blocks held on each.
    pub fn held(&self) -> impl Iterator<Item = (u16, usize)> + '_ {
        self.own.iter().map(|own| (own.placement, own.held))
    }

    /// Tokens per block, as this incarnation has announced them.
    pub fn sizes(&self) -> Vec<u32> {
        let mut sizes: Vec<u32> = Vec::new();
        for scheme in &self.schemes {
            if !sizes.contains(&scheme.size) {
                sizes.push(scheme.size);
            }
        }
        sizes
    }

    /// Records a block size of this incarnation; false if it has used too many.
    #[inline]
    pub fn cut_by(&mut self, shared: &mut SharedState, scheme: Scheme) -> bool {
        self.schemes.contains(&scheme) || self.add_scheme(shared, scheme)
    }

    #[cold]
    fn add_scheme(&mut self, shared: &mut SharedState, scheme: Scheme) -> bool {
        if self.schemes.len() >= shared.limits.block_sizes {
            return false;
        }
        self.schemes.push(scheme);
        shared.use_scheme(self.number, scheme);
        true
    }

    /// Returns the number of a placement that the stream names from now on; None if there are too many.
    pub fn use_placement(&mut self, shared: &mut SharedState, placement: Placement) -> Option<u16> {
        let (mark, attested) = (placement.digest(), placement.attestation());
        let number = shared.view.change().placements.retain(placement)?;
        if self.own.iter().any(|own| own.placement == number) {
            shared.view.change().placements.release(number);
            return Some(number);
        }
        if self.own.len() >= shared.limits.places {
            shared.view.change().placements.release(number);
            return None;
        }
        self.own.push(ProcessOwned {
            placement: number,
            mark,
            attested,
            held: 0,
        });
        Some(number)
    }

    /// Begins another incarnation of the publisher: nothing of the previous one remains.
    pub fn begin(&mut self, writer: &mut Writer<'_, SharedState>, incarnation: i64) {
        self.forget(writer);
        self.leave_placements(writer);
        self.groups.forget();
        (self.group_cache, self.sample, self.samples_left) = (None, None, SAMPLES);
        (self.misses_salts, self.has_new_groups) = (false, false);
        (self.attested, self.has_attested) = (None, false);
        self.schemes.clear();
        self.looks = FIRST_EXAMINATIONS;
        self.evicted_when_whole = self.counters.evicted;
        writer.drop_schemes(self.number);
        writer.use_lookup(self.number, None);
        (self.incarnation, self.last) = (incarnation, -1);
        self.life.store(incarnation, Ordering::Relaxed);
    }

    /// Leaves the shared part and removes all its blocks.
    pub fn quit(&mut self, writer: &mut Writer<'_, SharedState>) {
        self.forget(writer);
        self.leave_placements(writer);
        writer.leave(self.number);
        writer.streams_bytes = writer.streams_bytes.wrapping_sub(self.counted);
        self.counted = 0;
    }

    /// Releases the placements that it named, on which it holds nothing any more.
    pub fn leave_placements(&mut self, shared: &mut SharedState) {
        self.places.clear();
        for own in self.own.drain(..) {
            shared.view.change().placements.release(own.placement);
        }
    }

    /// Whether a large table can grow with this many additional blocks, or must shrink: both take long, since all of it is moved.
    #[inline]
    pub fn must_resize(&self, blocks: usize) -> bool {
        let is_tight = |length: usize, capacity: usize| length >= LARGE && capacity - length < blocks;
        is_tight(self.foreign.len(), self.foreign.capacity())
            || is_tight(self.several.len(), self.several.capacity())
            || is_tight(self.copies.room().0, self.copies.room().1)
            || self.foreign.capacity() > LARGE && self.must_shrink()
    }

    /// Moves those tables, while no thread waits for the shared part.
    pub fn make_room(&mut self, blocks: usize, secret: Secret) {
        if self.foreign.capacity() > LARGE && self.must_shrink() {
            self.foreign
                .shrink_to(self.foreign.len() * 2, |entry| secret.place(entry.hash));
        }
        if self.must_resize(blocks) {
            self.foreign.reserve(blocks, |entry| secret.place(entry.hash));
            self.several.reserve(blocks);
            self.copies.reserve(blocks);
        }
    }

    /// Counts work, as `Writer::spend`, and makes room for what comes next.
    #[inline]
    pub fn spend(&mut self, writer: &mut Writer<'_, SharedState>, work: usize) {
        if writer.spend(work) && self.must_resize(2 * WORK_PER_HOLD) {
            let secret = writer.secret;
            writer.unlocked(|| self.make_room(2 * WORK_PER_HOLD, secret));
        }
    }

    fn must_shrink(&self) -> bool {
        self.foreign.len() * 4 < self.foreign.capacity()
    }

    /// Prefetches the memory for a lookup of a hash, in the stages of a table.
    #[inline]
    pub fn prefetch(&self, spot: TableHash, stage: Stage) {
        self.table.prefetch(spot, stage);
    }

    /// The caches in which its table probably is.
    #[inline]
    pub fn reach(&self) -> Reach {
        self.table.reach()
    }

    fn foreign_of(&self, shared: &SharedState, hash: u64, fits: impl Fn(u32) -> bool) -> Option<u32> {
        if self.foreign.is_empty() {
            return None;
        }
        self.foreign
            .find(shared.secret.place(hash), |entry| entry.hash == hash && fits(entry.number))
            .map(|entry| entry.number)
    }

    /// The record of the block with this hash; of several, the one stored last.
    #[inline]
    pub fn newest(&self, shared: &SharedState, hash: u64) -> Option<u32> {
        if !self.several.is_empty()
            && let Some(list) = self.several.get(&hash)
        {
            return list.last().copied();
        }
        let found = self
            .table
            .find(shared.spot(hash), |number| shared.records.hash(number) == hash);
        found.or_else(|| self.foreign_of(shared, hash, |_| true))
    }

    /// The record of a block, if the stream holds that one.
    pub fn find(&self, shared: &SharedState, block: &Block, parent: Option<u32>) -> Option<u32> {
        let same = |number| is_block(shared, number, block, parent);
        let found = self.table.find(block.hash_spot, |number| {
            shared.records.hash(number) == block.hash && same(number)
        });
        found.or_else(|| self.foreign_of(shared, block.hash, same))
    }

    /// Adds one copy of a block. `parent` is the record of its parent, if that is known. None if too many blocks equal it.
    #[inline]
    pub fn place(&mut self, shared: &mut SharedState, block: &Block, placement: u16, parent: Option<u32>) -> Option<Placed> {
        let hash = block.hash;
        if !self.may_examine(hash) {
            return None;
        }
        let seat = self.table.seat(block.hash_spot);
        let (mut known, mut own, mut looks) = (None, None, 0);
        self.table.for_each_match_at(seat, |number| {
            looks += if parent.is_none() && shared.records.is_linked(number) {
                EXAMINATIONS_PER_KEY
            } else {
                1
            };
            if shared.records.hash(number) == hash {
                known = Some(number);
                if is_block(shared, number, block, parent) {
                    own = known;
                }
            }
            own.is_none()
        });
        if own.is_none() && !self.foreign.is_empty() {
            own = self.foreign_of(shared, hash, |number| is_block(shared, number, block, parent));
            known = known.or_else(|| self.foreign_of(shared, hash, |_| true));
        }
        step_counter::count(looks);
        if !self.several.is_empty() {
            self.alike = self.alike.saturating_sub(looks);
        }
        self.looks = self.looks.saturating_add(EXAMINATIONS_PER_BLOCK);
        if let Some(number) = own {
            self.copy(shared, hash, number, placement);
            self.make_newest(hash, number);
            return Some(Placed {
                number,
                is_unknown: false,
                is_new: false,
            });
        }
        let limit = shared.limits.blocks_per_hash;
        if known.is_some() && self.several.get(&hash).is_some_and(|list| list.len() >= limit) {
            return None;
        }
        let (number, is_new) = shared.add_holder(block, parent, placement, self.number, &mut self.added)?;
        self.enter(shared, block, seat, number, is_new);
        self.blocks += 1;
        self.count_in(hash, block.key, placement);
        if let Some(other) = known {
            step_counter::count_growth(self.several.len(), self.several.capacity());
            let list = self.several.entry(hash).or_insert_with(|| vec![other]);
            self.several_len += if list.len() == 1 { 2 } else { 1 };
            list.push(number);
        }
        Some(Placed {
            number,
            is_unknown: known.is_none(),
            is_new,
        })
    }

    /// Whether the stream holds some block of this hash.
    #[inline]
    pub fn knows(&self, shared: &SharedState, hash: u64, seat: Seat) -> bool {
        let mut found = false;
        self.table.for_each_match_at(seat, |number| {
            found = shared.records.hash(number) == hash;
            !found
        });
        found || self.foreign_of(shared, hash, |_| true).is_some()
    }

    /// The position of a hash in the stream's table.
    #[inline]
    pub fn seat(&self, spot: TableHash) -> Seat {
        self.table.seat(spot)
    }

    /// Enters a record under the hash of its block.
    #[inline]
    fn enter(&mut self, shared: &SharedState, block: &Block, seat: Seat, number: u32, is_new: bool) {
        let hash = block.hash;
        if is_new || shared.records.hash(number) == hash {
            self.enter_own(shared, block.hash_spot, seat, number);
        } else {
            let place = shared.secret.place(hash);
            step_counter::count_growth(self.foreign.len(), self.foreign.capacity());
            self.foreign
                .insert_unique(place, Foreign { hash, number }, |entry| shared.secret.place(entry.hash));
        }
    }

    /// Enters a record under its own hash.
    #[inline]
    pub fn enter_own(&mut self, shared: &SharedState, spot: TableHash, seat: Seat, number: u32) {
        let hashes = ByHash(&shared.records, shared.secret);
        self.table.insert_at(seat, spot, number, &hashes);
    }

    /// Makes a block the newest of its hash.
    fn make_newest(&mut self, hash: u64, number: u32) {
        if self.several.is_empty() {
            return;
        }
        if let Some(list) = self.several.get_mut(&hash)
            && let Some(at) = list.iter().position(|&other| other == number)
        {
            list.remove(at);
            list.push(number);
        }
    }

    /// Applies a store to a block that the stream has: one more copy, or nothing if the store states that the block was resident before.
    #[inline]
    pub fn copy(&mut self, shared: &mut SharedState, hash: u64, number: u32, placement: u16) {
        if shared.sets.holds(shared.records.set(number), placement, self.number) {
            if self.origin == Origin::Reused {
                let change = self.copies.assure(number, placement);
                return self.note(shared, number, placement, change);
            }
            let (length, capacity) = self.copies.room();
            step_counter::count_growth(length, capacity);
            let is_certain = self.has_attested || self.origin == Origin::New;
            let change = self.copies.store(number, placement, is_certain);
            self.note(shared, number, placement, change);
            if !is_certain && self.groups.all().len() > 1 {
                self.repeated.push(number);
            }
            let key = shared.records.key(number);
            let own = self.own(placement);
            let (mark, attested) = (mark(hash, key, own.mark), own.attested.copy(hash));
            self.digest = self.digest.wrapping_add(mark);
            self.attestation = self.attestation.wrapping_add(attested);
        } else {
            let key = shared.records.key(number);
            shared.toggle(number, placement, self.number, &mut self.added);
            self.count_in(hash, key, placement);
        }
    }

    /// Does the same for a store without tokens, as of groups with sliding windows. See `doubt_fresh`.
    pub fn copy_without_tokens(&mut self, shared: &mut SharedState, hash: u64, number: u32, placement: u16) {
        let is_held = shared.sets.holds(shared.records.set(number), placement, self.number);
        if !is_held || self.copies.get(number, placement).is_doubtful() {
            match self.origin {
                // A block that no group of this kind holds is announced as reused where the window of a hit does not reach.
                Origin::Reused if !is_held => return,
                Origin::Unstated if !self.has_attested => self.fresh.push((number, placement)),
                _ => {}
            }
        }
        self.copy(shared, hash, number, placement);
    }

    /// Ends a batch: a block of a window that it has made resident, and whose block with full attention it has announced again, might not
    /// be there; nor one that might have been gone before.
    ///
    /// vLLM reports the hit of a request group by group, and of a group with a sliding window also the blocks before the window, which the
    /// group does not hold. A request that is computed again is announced alike.
    pub fn doubt_fresh(&mut self, shared: &mut SharedState) {
        let (mut fresh, mut repeated) = (std::mem::take(&mut self.fresh), std::mem::take(&mut self.repeated));
        if !fresh.is_empty() && !repeated.is_empty() {
            repeated.sort_unstable();
            for &(number, placement) in &fresh {
                // Its slot might be free again, or another block's.
                let is_held =
                    || shared.records.is_used(number) && shared.sets.holds(shared.records.set(number), placement, self.number);
                if repeated.binary_search(&number).is_ok() && is_held() {
                    let Copies { most, .. } = self.copies.get(number, placement);
                    let change = self.copies.set(number, placement, Copies { least: 0, most });
                    self.note(shared, number, placement, change);
                }
            }
        }
        if fresh.capacity().max(repeated.capacity()) <= WORK_PER_HOLD {
            fresh.clear();
            repeated.clear();
            (self.fresh, self.repeated) = (fresh, repeated);
        }
    }

    /// Publishes to lookups that a block might be gone, or certainly exists again.
    fn note(&self, shared: &mut SharedState, number: u32, placement: u16, change: Change) {
        if change != Change::Same {
            shared.doubt(self.number, number, placement, change == Change::Doubted);
        }
    }

    /// Counts the first copy of a block on a placement.
    #[inline]
    fn count_in(&mut self, hash: u64, key: u64, placement: u16) {
        let own = self.own(placement);
        own.held += 1;
        let (mark, attested) = (mark(hash, key, own.mark), own.attested.copy(hash));
        self.digest = self.digest.wrapping_add(mark);
        self.attestation = self.attestation.wrapping_add(attested);
    }

    /// Counts blocks that are new on a placement, and were entered.
    #[inline]
    pub fn count_new(&mut self, hashes: &[u64], keys: &[u64], placement: u16) {
        let count = hashes.len();
        let own = self.own(placement);
        own.held += count;
        let (part, attested) = (own.mark, own.attested.copies(hashes));
        let sum = |sum: u128, (&hash, &key): (&u64, &u64)| sum.wrapping_add(mark(hash, key, part));
        self.digest = hashes.iter().zip(keys).fold(self.digest, sum);
        self.attestation = self.attestation.wrapping_add(attested);
        self.blocks += count;
        self.looks = self.looks.saturating_add(EXAMINATIONS_PER_BLOCK * count);
    }

    /// A placement that the stream has named.
    #[inline]
    fn own(&mut self, placement: u16) -> &mut ProcessOwned {
        let found = self.own.iter_mut().find(|own| own.placement == placement);
        found.expect("a stream names a placement before it has blocks there")
    }

    /// Takes one copy from the oldest block of each of a few hashes on `placement`, or from a pending block; counts the hashes that have no
    /// copy.
    pub fn remove(&mut self, shared: &mut SharedState, hashes: &[u64], placement: u16, leaving: &mut Vec<Leaving>) {
        leaving.clear();
        leaving.extend(hashes.iter().map(|&hash| {
            let spot = shared.spot(hash);
            Leaving {
                hash,
                spot,
                seat: self.table.seat_ahead(spot),
                number: None,
            }
        }));
        for each in &mut *leaving {
            self.table.for_each_match_at(each.seat, |number| {
                each.number = Some(number);
                false
            });
            if let Some(number) = each.number {
                shared.records.prefetch_all(number);
            }
        }
        let (mut gone, mut keys) = (Gone::new(self.own(placement)), KeyCache::default());
        for each in leaving {
            if self.remove_single(shared, each, placement, &mut keys, &mut gone) {
                continue;
            }
            self.apply_removals(shared, placement, &mut gone);
            if !self.remove_oldest(shared, each.hash, placement) && !self.waiting.remove(each.hash, placement) {
                self.counters.unknown += 1;
            }
        }
        self.apply_removals(shared, placement, &mut gone);
    }

    /// The usual case: a hash means one block, of which there is one copy. The common changes of these blocks are only collected, as are
    /// the records to remove. In all other cases it returns false and changes nothing.
    #[inline]
    fn remove_single(
        &mut self,
        shared: &mut SharedState,
        leaving: &Leaving,
        placement: u16,
        keys: &mut KeyCache,
        gone: &mut Gone,
    ) -> bool {
        let Leaving {
            hash,
            spot,
            seat,
            number,
        } = *leaving;
        if !self.several.is_empty() {
            return false;
        }
        let seat = self.table.seat_again(seat, spot);
        // Another block with the same tag is rare, and so is one that this event has removed already, whose set is empty.
        let is_meant = |number: u32| shared.records.hash(number) == hash && shared.records.is_used(number);
        let Some(number) = number.filter(|&number| is_meant(number)) else {
            return false;
        };
        if !self.copies.is_empty() && self.copies.contains(number, placement) {
            return false;
        }
        let set = shared.records.set(number);
        if set == gone.from {
            gone.moved += 1;
        } else {
            shared.sets.move_all(gone.from, gone.to, std::mem::take(&mut gone.moved));
            gone.from = NONE;
            if !shared.sets.holds(set, placement, self.number) {
                return false;
            }
            let rest = shared.sets.moved(set, placement, self.number, &mut self.removed);
            (gone.from, gone.to, gone.leaves) = (set, rest, !shared.sets.knows(rest, self.number));
        }
        let mark = mark(hash, keys.key(&shared.records, number), gone.part);
        gone.digest = gone.digest.wrapping_add(mark);
        gone.attestation = gone.attestation.wrapping_add(gone.attested.copy(hash));
        gone.held += 1;
        shared.records.put_set(number, gone.to);
        if gone.leaves {
            self.table
                .remove_at(seat, spot, number, &ByHash(&shared.records, shared.secret));
            self.blocks -= 1;
        }
        if gone.to == EMPTY && !gone.row.extend(number) {
            shared.forget_row(std::mem::replace(&mut gone.row, Row::single(number)));
        }
        true
    }

    /// Applies the collected changes.
    fn apply_removals(&mut self, shared: &mut SharedState, placement: u16, gone: &mut Gone) {
        let Gone {
            from,
            to,
            moved,
            digest,
            attestation,
            held,
            row,
            ..
        } = std::mem::replace(gone, Gone::new(self.own(placement)));
        shared.sets.move_all(from, to, moved);
        self.digest = self.digest.wrapping_sub(digest);
        self.attestation = self.attestation.wrapping_sub(attestation);
        self.own(placement).held -= held;
        shared.forget_row(row);
    }

    /// Removes one copy of a hash in the unusual cases: several blocks or copies, or a record with another hash.
    #[inline(never)]
    fn remove_oldest(&mut self, shared: &mut SharedState, hash: u64, placement: u16) -> bool {
        if !self.may_examine(hash) {
            self.is_spent = true;
            return false;
        }
        let mut looks = 0;
        let held = |number: &u32| {
            looks += 1;
            shared.sets.holds(shared.records.set(*number), placement, self.number)
        };
        let found = match self.several.get(&hash) {
            Some(list) => list.iter().copied().find(held),
            None => self.newest(shared, hash).filter(held),
        };
        step_counter::count(looks);
        self.alike = self.alike.saturating_sub(looks);
        let Some(number) = found else { return false };
        let key = shared.records.key(number);
        let own = self.own(placement);
        let (mark, attested) = (mark(hash, key, own.mark), own.attested.copy(hash));
        self.digest = self.digest.wrapping_sub(mark);
        self.attestation = self.attestation.wrapping_sub(attested);
        if self.remove_copy(shared, number, placement) {
            return true;
        }
        shared.toggle(number, placement, self.number, &mut self.removed);
        self.forget_copies(shared, number, placement);
        self.own(placement).held -= 1;
        if !shared.sets.knows(shared.records.set(number), self.number) {
            self.leave(shared, hash, number);
        }
        true
    }

    /// Removes one of several copies; returns false and changes nothing if there is only one.
    #[inline]
    fn remove_copy(&mut self, shared: &mut SharedState, number: u32, placement: u16) -> bool {
        let Some(change) = self.copies.take(number, placement) else {
            return false;
        };
        self.note(shared, number, placement, change);
        true
    }

    /// Forgets the copies of a block on a placement, which does not hold it any more. Its slot must be changed before, so that no lookup
    /// finds the block without the doubt.
    fn forget_copies(&mut self, shared: &mut SharedState, number: u32, placement: u16) -> Copies {
        let (copies, change) = self.copies.remove(number, placement);
        self.note(shared, number, placement, change);
        copies
    }

    /// Removes one copy of a hash; the event states how many copies are left.
    pub fn remove_to(&mut self, shared: &mut SharedState, hash: u64, placement: u16, left: u32) {
        let held = |&number: &u32| shared.sets.holds(shared.records.set(number), placement, self.number);
        let Some(number) = self.newest(shared, hash).filter(held) else {
            while self.waiting.remove(hash, placement) && left == 0 {}
            return;
        };
        if left == 0 {
            return self.drop_block(shared, hash, number, |other| other == placement);
        }
        let known = self.copies.get(number, placement).most;
        let key = shared.records.key(number);
        let own = self.own(placement);
        let (each, attested) = (mark(hash, key, own.mark), own.attested.copy(hash));
        let (known_sum, left_sum) = (each.wrapping_mul(known.into()), each.wrapping_mul(left.into()));
        self.digest = self.digest.wrapping_sub(known_sum).wrapping_add(left_sum);
        let gone = u64::from(known).wrapping_sub(left.into());
        self.attestation = self.attestation.wrapping_sub(attested.wrapping_mul(gone));
        let change = self.copies.set(number, placement, Copies { least: left, most: left });
        self.note(shared, number, placement, change);
    }

    /// Removes a block that the stream holds on no placement any more.
    fn leave(&mut self, shared: &mut SharedState, hash: u64, number: u32) {
        let place = shared.secret.place(hash);
        if shared.records.hash(number) == hash {
            self.table.remove(place, number, &ByHash(&shared.records, shared.secret));
        } else if let Ok(entry) = self
            .foreign
            .find_entry(place, |entry| entry.hash == hash && entry.number == number)
        {
            entry.remove();
            self.shrink_foreign(shared);
        }
        if let Some(list) = self.several.get_mut(&hash) {
            step_counter::count(list.len());
            self.alike = self.alike.saturating_sub(list.len());
            list.retain(|&other| other != number);
            self.several_len -= 1;
            if list.len() < 2 {
                self.several_len -= list.len();
                self.several.remove(&hash);
                if self.several.is_empty() {
                    self.several = HashMap::new();
                }
            }
        }
        self.blocks -= 1;
        shared.sweep(number);
    }

    fn shrink_foreign(&mut self, shared: &SharedState) {
        let (length, capacity) = (self.foreign.len(), self.foreign.capacity());
        if length == 0 {
            self.foreign = HashTable::new();
        } else if (64..=LARGE).contains(&capacity) && self.must_shrink() {
            self.foreign.shrink_to(length * 2, |entry| shared.secret.place(entry.hash));
        }
    }

    /// Copies of a block on a placement that holds it.
    pub fn count(&self, number: u32, placement: u16) -> Copies {
        self.copies.get(number, placement)
    }

    /// The blocks that share a hash, the oldest first, whose order `numbers` does not contain.
    pub fn ordered(&self) -> impl Iterator<Item = (&u64, &Vec<u32>)> {
        self.several.iter()
    }

    /// The records of all blocks, in no order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.table.iter().chain(self.foreign.iter().map(|entry| entry.number))
    }

    /// Records that the stream has under their own hash, in no order.
    pub fn own_numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.table.iter()
    }

    /// Records of which this stream has another hash than theirs, and that hash, in no order.
    pub fn foreign(&self) -> impl ExactSizeIterator<Item = (u32, u64)> + '_ {
        self.foreign.iter().map(|entry| (entry.number, entry.hash))
    }

    /// Whether each block has at most one copy on each placement.
    pub fn is_single(&self) -> bool {
        self.copies.is_empty()
    }

    // --- groups

    /// Searches prompts by the groups that are known now.
    pub fn use_groups(&mut self, shared: &mut SharedState) {
        self.has_new_groups = false;
        if self.groups.needs_hashing()
            && self.samples_left > 0
            && let Some(sample) = self.sample.take()
        {
            self.groups.hashing = sample.scheme();
            self.samples_left -= 1;
        }
        let method = self.groups.method();
        match (method, &self.group_cache) {
            (Method::Hashes, None) => self.rebuild_group_cache(shared),
            (Method::Hashes, Some(_)) => {}
            _ => self.group_cache = None,
        }
        let lookup = || GroupLookup {
            groups: self.groups.clone(),
            cache: self.group_cache.clone(),
        };
        let lookup = (method != Method::Bitmaps).then(|| Arc::new(lookup()));
        shared.use_lookup(self.number, lookup);
    }

    /// Collects all blocks by their hashes, where lookups need that.
    pub fn rebuild_group_cache(&mut self, shared: &SharedState) {
        if self.groups.method() != Method::Hashes {
            return;
        }
        let mut cache = GroupCache::default();
        if self.misses_salts {
            cache.miss_salts();
        }
        let own: Vec<(u16, i64, usize)> = (self.own.iter())
            .map(|own| (own.placement, shared.view.placements.get(own.placement)))
            .map(|(number, placement)| (number, placement.group, placement.level()))
            .collect();
        let blocks = self.own_numbers().map(|number| (number, shared.records.hash(number)));
        let placed = blocks.chain(self.foreign()).flat_map(|(number, hash)| {
            let placements = shared.sets.placements(shared.records.set(number), self.number);
            placements.map(move |placement| (hash, placement))
        });
        let waiting = self.waiting.iter().map(|waiting| (waiting.hash, waiting.placement));
        for (hash, placement) in placed.chain(waiting) {
            if let Some(&(_, group, level)) = own.iter().find(|(known, ..)| *known == placement) {
                let (is_held, is_certain) = self.holds(shared, hash, group, level);
                cache.put(group, hash, level, is_held, is_certain);
            }
        }
        step_counter::count(self.blocks + self.waiting.len());
        match &self.group_cache {
            Some(known) => {
                let mut known = known.write();
                let salts = known.salts().map(|(part, salt)| (part, salt.to_owned())).collect::<Vec<_>>();
                cache.resume(salts);
                *known = cache;
            }
            None => self.group_cache = Some(Arc::new(RwLock::new(cache))),
        }
    }

    /// Ends a batch: lookups search what it has changed.
    pub fn publish_groups(&mut self, writer: &mut Writer<'_, SharedState>) {
        let changed = std::mem::take(&mut self.changed_copies);
        for some in changed.chunks(WORK_PER_HOLD) {
            if let Some(cache) = &self.group_cache {
                let mut cache = cache.write();
                for &(hash, group, level) in some {
                    let (is_held, is_certain) = self.holds(writer, hash, group, level.into());
                    cache.put(group, hash, level.into(), is_held, is_certain);
                }
            }
            self.spend(writer, some.len());
        }
        if self.has_new_groups {
            self.use_groups(writer);
        }
        self.learn_salts();
    }

    /// Keeps the salts of the batch, if lookups need those.
    fn learn_salts(&mut self) {
        let salted = std::mem::take(&mut self.salted);
        match (&self.group_cache, &self.groups.hashing) {
            _ if salted.is_empty() => {}
            (Some(cache), Some(hashing)) => {
                let mut cache = cache.write();
                for (salt, sample) in salted {
                    self.misses_salts |= !cache.learn_salt(keys::salt(salt.as_bytes()), &salt, hashing, &sample);
                }
            }
            _ => self.misses_salts = true,
        }
        if self.misses_salts
            && let Some(cache) = self.group_cache.as_ref().filter(|cache| !cache.read().misses_salts())
        {
            cache.write().miss_salts();
        }
    }

    /// Whether a group holds a copy of a hash on a level, also one that waits; and whether it certainly does.
    fn holds(&self, shared: &SharedState, hash: u64, group: i64, level: usize) -> (bool, bool) {
        let is_meant = |number: u16| {
            let placement = shared.view.placements.get(number);
            placement.group == group && placement.level() == level
        };
        let (mut is_held, mut is_certain) = (false, false);
        let mut look = |number: u32| {
            let placements = shared.sets.placements(shared.records.set(number), self.number);
            for placement in placements.filter(|&placement| is_meant(placement)) {
                is_held = true;
                is_certain |= !self.copies.get(number, placement).is_doubtful();
            }
        };
        match self.several.get(&hash) {
            Some(list) => list.iter().for_each(|&number| look(number)),
            None => self.newest(shared, hash).into_iter().for_each(look),
        }
        let waits = |own: &ProcessOwned| self.waiting.has(hash, own.placement) && is_meant(own.placement);
        let is_waiting = !self.waiting.is_empty() && self.own.iter().any(waits);
        (is_held || is_waiting, is_certain || is_waiting)
    }

    // --- blocks that share a hash

    /// Adds the examinations that one payload allows.
    pub fn grant(&mut self, payload: usize) {
        self.alike = self
            .alike
            .min(ALIKE_KEPT)
            .saturating_add(ALIKE_PER_BYTE.saturating_mul(payload));
    }

    /// Whether the count of blocks that share a hash is correct.
    #[cfg(test)]
    pub fn is_counted(&self) -> bool {
        self.several.values().map(Vec::len).sum::<usize>() == self.several_len
    }

    /// Whether any blocks share a hash.
    pub fn has_alike(&self) -> bool {
        !self.several.is_empty()
    }

    /// Whether all blocks of a hash may be examined. False if no examinations remain, and the hash has more than a few blocks.
    #[inline]
    fn may_examine(&self, hash: u64) -> bool {
        self.alike > 0 || self.several.get(&hash).is_none_or(|list| list.len() <= FEW_ALIKE)
    }

    /// Removes every block if a removal was skipped, since a block that is gone must not match. Returns whether it did so.
    pub fn remove_some_blocks(&mut self, writer: &mut Writer<'_, SharedState>) -> bool {
        let is_spent = std::mem::take(&mut self.is_spent);
        if is_spent {
            self.forget(writer);
        }
        is_spent
    }

    // --- the memory limit

    /// Updates its bytes in the total of the shared part.
    pub fn recount(&mut self, shared: &mut SharedState) {
        let bytes = self.bytes();
        shared.streams_bytes = shared.streams_bytes.wrapping_add(bytes.wrapping_sub(self.counted));
        self.counted = bytes;
    }

    /// Whether the memory limit allows this stream to hold more blocks. The last part of the memory is reserved for streams that hold fewer
    /// blocks than the others.
    #[inline]
    pub fn may_grow(&mut self, shared: &mut SharedState) -> bool {
        match shared.limits.memory {
            None => true,
            Some(limit) => self.may_grow_within(shared, limit),
        }
    }

    #[cold]
    fn may_grow_within(&mut self, shared: &mut SharedState, limit: usize) -> bool {
        self.recount(shared);
        let next = shared.bytes() + shared.streams_bytes + shared.records.growth(WORK_PER_HOLD) + TABLE_GROWTH.min(limit / 8);
        if next > limit {
            return false;
        }
        if next <= limit - limit / RESERVE {
            return true;
        }
        let blocks = |number: usize, known: usize| if number == self.number as usize { self.blocks } else { known };
        let counts = (shared.view.members.iter().enumerate())
            .filter_map(|(number, member)| Some(blocks(number, member.as_ref()?.blocks.load(Ordering::Relaxed))))
            .filter(|&count| count > 0);
        let (sum, streams) = counts.fold((0, 0), |(sum, streams), count| (sum + count, streams + 1));
        self.blocks * streams < sum
    }

    // --- snapshots

    /// Adds a block that the stream does not have, on placements with the given copies. Returns its record, or None if a limit prevents
    /// that.
    #[inline]
    pub fn put(
        &mut self,
        shared: &mut SharedState,
        block: &Block,
        placements: &[(u16, Copies)],
        parent: Option<u32>,
    ) -> Option<u32> {
        let known = self.blocks;
        let scheme = shared.contexts.get(block.context).scheme;
        if !self.cut_by(shared, scheme) {
            return None;
        }
        let Placed { number, .. } = self.place(shared, block, placements.first()?.0, parent)?;
        if self.blocks == known {
            return None;
        }
        for (at, &(placement, copies)) in placements.iter().enumerate() {
            if at > 0 {
                if shared.sets.holds(shared.records.set(number), placement, self.number) {
                    return None;
                }
                self.copy(shared, block.hash, number, placement);
            }
            let more = copies.most.checked_sub(1)?;
            let change = self.copies.set(number, placement, copies);
            self.note(shared, number, placement, change);
            if more > 0 {
                let own = self.own(placement);
                let (each, attested) = (mark(block.hash, block.key, own.mark), own.attested.copy(block.hash));
                self.digest = self.digest.wrapping_add(each.wrapping_mul(more.into()));
                self.attestation = self.attestation.wrapping_add(attested.wrapping_mul(more.into()));
            }
        }
        Some(number)
    }

    /// The contribution of a block on some placements to a digest.
    pub fn digest_of(&mut self, hash: u64, key: u64, placements: &[(u16, Copies)]) -> u128 {
        placements.iter().fold(0, |sum: u128, &(placement, copies)| {
            let each = mark(hash, key, self.own(placement).mark);
            sum.wrapping_add(each.wrapping_mul(copies.most.into()))
        })
    }

    /// Puts the blocks of one hash, given by key and context, in this order; refused ones are skipped. Says whether these are
    /// its blocks.
    pub fn reorder(
        &mut self,
        shared_lock: &YieldingRwLock<SharedState>,
        hash: u64,
        blocks: &[(u64, u32)],
        refused: bool,
    ) -> bool {
        let Some(list) = self.several.get_mut(&hash) else {
            return refused;
        };
        let mut known: HashMap<(u64, u32), u32> = HashMap::with_capacity(list.len());
        for some in list.chunks(WORK_PER_HOLD) {
            let shared = shared_lock.read();
            known.extend(
                some.iter()
                    .map(|&number| ((shared.records.key(number), shared.records.context(number)), number)),
            );
        }
        let mut ordered = Vec::with_capacity(list.len());
        for block in blocks {
            match known.remove(block) {
                Some(number) => ordered.push(number),
                None if refused => {}
                None => return false,
            }
        }
        if !known.is_empty() {
            return false;
        }
        *list = ordered;
        true
    }

    /// Replaces a record by another one of the same block. Returns false and changes nothing if the stream holds both, or holds the old one
    /// under another hash than the record's.
    pub fn exchange(&mut self, shared: &mut SharedState, from: u32, to: u32) -> bool {
        let hash = shared.records.hash(from);
        let spot = shared.spot(hash);
        let holds_both = shared.sets.knows(shared.records.set(to), self.number);
        if holds_both || self.table.find(spot, |number| number == from).is_none() {
            return false;
        }
        let placements: Vec<u16> = shared.sets.placements(shared.records.set(from), self.number).collect();
        for placement in placements {
            shared.toggle(from, placement, self.number, &mut self.removed);
            shared.toggle(to, placement, self.number, &mut self.added);
            let copies = self.forget_copies(shared, from, placement);
            let change = self.copies.set(to, placement, copies);
            self.note(shared, to, placement, change);
        }
        self.table.remove(spot, from, &ByHash(&shared.records, shared.secret));
        if shared.records.hash(to) == hash {
            self.table.insert(spot, to, &ByHash(&shared.records, shared.secret));
        } else {
            let place = shared.secret.place(hash);
            self.foreign
                .insert_unique(place, Foreign { hash, number: to }, |entry| shared.secret.place(entry.hash));
        }
        if let Some(list) = self.several.get_mut(&hash) {
            list.iter_mut()
                .filter(|number| **number == from)
                .for_each(|number| *number = to);
        }
        true
    }

    // --- forgetting

    /// Drops every copy of one block on the placements that `meant` accepts.
    pub fn drop_block(&mut self, shared: &mut SharedState, hash: u64, number: u32, meant: impl Fn(u16) -> bool) {
        let placements: Vec<u16> = shared
            .sets
            .placements(shared.records.set(number), self.number)
            .filter(|&placement| meant(placement))
            .collect();
        if placements.is_empty() {
            return;
        }
        let key = shared.records.key(number);
        for placement in placements {
            shared.toggle(number, placement, self.number, &mut self.removed);
            let copies = self.forget_copies(shared, number, placement);
            let own = self.own(placement);
            own.held -= 1;
            let (each, attested) = (mark(hash, key, own.mark), own.attested.copy(hash));
            self.digest = self.digest.wrapping_sub(each.wrapping_mul(copies.most.into()));
            self.attestation = self.attestation.wrapping_sub(attested.wrapping_mul(copies.most.into()));
        }
        if !shared.sets.knows(shared.records.set(number), self.number) {
            self.leave(shared, hash, number);
        }
    }

    /// Drops every copy on the placements that `meant` accepts. Returns false if clears were so frequent that all blocks had to be removed.
    pub fn clear(&mut self, writer: &mut Writer<'_, SharedState>, meant: impl Fn(u16) -> bool) -> bool {
        let looks = self.blocks + self.waiting.len();
        if !self
            .own
            .iter()
            .any(|own| meant(own.placement) && (own.held > 0 || self.waiting.is_on(own.placement)))
        {
            return true;
        }
        if self.looks < looks {
            self.forget(writer);
            return false;
        }
        self.looks -= looks;
        let bound = writer.records.bound();
        let (numbers, foreign) = writer.unlocked(|| {
            self.waiting.clear(&meant);
            let foreign: Vec<(u32, u64)> = self.foreign().collect();
            (in_removal_order(self.own_numbers(), self.blocks, bound), foreign)
        });
        step_counter::count(looks);
        for number in numbers {
            let hash = writer.records.hash(number);
            self.drop_block(writer, hash, number, &meant);
            self.spend(writer, 1);
        }
        for (number, hash) in foreign {
            self.drop_block(writer, hash, number, &meant);
            self.spend(writer, 1);
        }
        true
    }

    /// Removes every block, which lookups see at once. The rules of groups stay.
    pub fn forget(&mut self, writer: &mut Writer<'_, SharedState>) {
        let number = self.number;
        self.unkept.clear();
        self.changed_copies.clear();
        if let Some(cache) = &self.group_cache {
            cache.write().clear();
        }
        if self.blocks == 0 && self.waiting.is_empty() {
            return;
        }
        writer.show(number, false);
        step_counter::count(self.blocks + self.waiting.len());
        writer.end_doubts(number);
        let bound = writer.records.bound();
        let numbers = writer.unlocked(|| {
            let numbers = in_removal_order(self.numbers(), self.blocks, bound);
            (self.table, self.foreign) = (Table::dense(), HashTable::new());
            (self.several, self.copies, self.waiting) = (HashMap::new(), CopyTable::default(), Queue::default());
            numbers
        });
        for record in numbers {
            let set = writer.records.set(record);
            let without = writer.sets.without(set, number);
            writer.records.put_set(record, without);
            writer.sweep(record);
            writer.spend(1);
        }
        (self.blocks, self.digest, self.attestation, self.several_len) = (0, 0, 0, 0);
        self.own.iter_mut().for_each(|own| own.held = 0);
        writer.show(number, true);
    }

    /// Returns the pending blocks that can be placed after a block that arrived.
    pub fn take_awaiting(&mut self, hash: u64) -> Option<Waiting> {
        self.waiting.take_one_awaiting(hash)
    }
}

/// Whether a record is that of a block, whose parent is the record `parent`, if that is known.
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
        // A linked block is after the only record of its parent's key in that context.
        Some(parent) if records.context(parent) == block.context => {
            Records::next(parent) == Some(number) && records.word(number) == block.local
        }
        _ => records.key(number) == block.key,
    }
}

/// Growth of the index's tables while some blocks are placed.
const TABLE_GROWTH: usize = 16 << 10;
/// Denominator of the part of the memory limit that is reserved for streams that hold less than the others.
const RESERVE: usize = 16;

/// Records in the order in which they are removed: from the ends of runs, so that no block is linked to a removed one.
fn in_removal_order(numbers: impl Iterator<Item = u32>, count: usize, bound: u32) -> Vec<u32> {
    if count < bound as usize / SPARSE {
        let mut found: Vec<u32> = numbers.collect();
        found.sort_unstable_by(|one, other| other.cmp(one));
        return found;
    }
    let mut marked = vec![0_u64; (bound as usize).div_ceil(64)];
    for number in numbers {
        marked[number as usize >> 6] |= 1 << (number & 63);
    }
    let mut found = Vec::with_capacity(count);
    for (at, &word) in marked.iter().enumerate().rev() {
        let mut bits = word;
        while bits != 0 {
            let bit = 63 - bits.leading_zeros();
            bits &= !(1 << bit);
            found.push((at << 6) as u32 + bit);
        }
    }
    found
}

/// Ratio of an index's records to a stream's above which the stream's records are sorted instead of marked in a bitmap.
const SPARSE: usize = 64;

/// A hash to remove.
#[derive(Clone, Copy, Debug)]
pub struct Leaving {
    hash: u64,
    /// Its position in the table.
    spot: TableHash,
    seat: Seat,
    /// The number in the table's entry; None if the hash has no entry.
    number: Option<u32>,
}

/// The removals of one event with equal sets, which are not counted yet.
struct Gone {
    /// The sets of the last block, before and after its removal.
    from: u32,
    to: u32,
    /// Whether the stream is no longer in that set.
    leaves: bool,
    /// Number of blocks that have moved from the first set to the second.
    moved: u32,
    /// Contributions to the digest and to the attestation, on this placement.
    digest: u128,
    part: u64,
    attestation: u64,
    attested: AttestedGroup,
    held: usize,
    /// Records without holders.
    row: Row,
}

/// No set.
const NONE: u32 = u32::MAX;

impl Gone {
    fn new(own: &ProcessOwned) -> Self {
        Self {
            from: NONE,
            to: NONE,
            leaves: false,
            moved: 0,
            digest: 0,
            part: own.mark,
            attestation: 0,
            attested: own.attested,
            held: 0,
            row: Row::default(),
        }
    }
}

/// Number of slots whose keys are cached together.
const REMEMBERED: usize = 8;

/// Keys that were computed for a block and can be used for the blocks before it, as long as no slot gets another block.
#[derive(Clone, Copy, Debug, Default)]
struct KeyCache {
    /// One more than the number of the group.
    group: u32,
    known: u8,
    keys: [u64; REMEMBERED],
}

impl KeyCache {
    #[inline]
    fn key(&mut self, records: &Records, number: u32) -> u64 {
        let (group, at) = (number / REMEMBERED as u32 + 1, number as usize % REMEMBERED);
        if self.group != group {
            (self.group, self.known) = (group, 0);
        }
        if self.known >> at & 1 == 0 {
            records.keys_up_to(number, |at, key| {
                self.known |= 1 << at;
                self.keys[at] = key;
            });
        }
        self.keys[at]
    }
}
