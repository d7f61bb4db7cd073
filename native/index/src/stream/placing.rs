//! Applies stores to a stream: adds new blocks, and copies of blocks that the stream holds.

use super::{ForeignHash, Stream, is_block};
use crate::holders::copies::Copies;
use crate::memory::table::{TableHash, TablePosition};
use crate::step_counter;
use crate::store::shared_state::{Block, ByHash, Holding, SharedState};
use crate::sync::yielding_lock::{WORK_PER_HOLD, Writer};

/// Examining this number of blocks takes as long as computing a linked block's key, which is necessary if the parent is unknown.
const EXAMINATIONS_PER_KEY: usize = 8;

/// The outcome of placing a block.
#[derive(Clone, Copy, Debug)]
pub struct PlacedBlock {
    /// Record of the block.
    pub number: u32,
    /// Whether the stream had no block of this hash.
    pub is_unknown: bool,
    /// Whether no stream held the block before.
    pub is_new: bool,
    /// Whether the stream held the block before.
    pub is_known: bool,
    /// Whether the block has its first copy on the placement, and another block with the same key might be there, under another hash.
    pub has_twin: bool,
}

impl Stream {
    /// Adds one copy of a block. `parent` is the record of the block's parent; None if it is not known. Returns None if too many blocks
    /// have the same hash, or if all IDs of records are used.
    #[inline]
    pub fn place(
        &mut self,
        shared: &mut SharedState,
        block: &Block,
        placement: u16,
        parent: Option<u32>,
    ) -> Option<PlacedBlock> {
        let hash = block.hash;
        if !self.collisions.may_examine(hash) {
            return None;
        }
        let position = self.table.position_of(block.mixed_hash);
        let (mut known, mut own, mut looks) = (None, None, 0);
        self.table.for_each_match_at(position, |number| {
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
        if !self.collisions.is_empty() {
            self.collisions.spend(looks);
        }
        self.clear_budget.add_stored(1);
        if let Some(number) = own {
            let has_twin =
                shared.records.has_twins(number) && !shared.sets.holds(shared.records.set(number), placement, self.number);
            self.copy(shared, hash, number, placement);
            self.collisions.make_newest(hash, number);
            return Some(PlacedBlock {
                number,
                is_unknown: false,
                is_new: false,
                is_known: true,
                has_twin,
            });
        }
        let limit = shared.limits.blocks_per_hash;
        if known.is_some() && self.collisions.get(hash).is_some_and(|list| list.len() >= limit) {
            return None;
        }
        let Holding {
            number,
            is_new,
            has_twin,
        } = shared.add_holder(block, parent, placement, self.number, &mut self.added)?;
        self.enter(shared, block, position, number, is_new);
        self.blocks += 1;
        self.count_in(hash, block.key, placement);
        if let Some(other) = known {
            self.collisions.add(hash, other, number);
        }
        Some(PlacedBlock {
            number,
            is_unknown: known.is_none(),
            is_new,
            is_known: false,
            has_twin,
        })
    }

    /// Whether a second store of a block on a placement adds a copy.
    #[inline]
    pub fn counts_copies(&self, placement: u16) -> bool {
        self.groups.copied_levels >> self.named(placement).level & 1 != 0
    }

    /// Applies a store of a block that the stream holds. If the placement already has the block and its copies are counted, the store might
    /// mean another copy.
    #[inline]
    pub fn copy(&mut self, shared: &mut SharedState, hash: u64, number: u32, placement: u16) {
        if shared.sets.holds(shared.records.set(number), placement, self.number) {
            if !self.counts_copies(placement) {
                if !self.copies.is_empty() {
                    let change = self.copies.set(number, placement, Copies::ONE);
                    self.note(shared, number, placement, change);
                }
                return;
            }
            let change = self.copies.store(number, placement, self.has_attested);
            self.note(shared, number, placement, change);
            if !self.has_attested && self.groups.all().len() > 1 {
                self.hit_reports.repeated.push(number);
            }
            let key = shared.records.key(number);
            self.tally += self.named(placement).marks.copy(hash, key);
        } else {
            let key = shared.records.key(number);
            shared.toggle(number, placement, self.number, &mut self.added);
            self.count_in(hash, key, placement);
        }
    }

    /// Adds a copy for a store without tokens, as groups with sliding windows send it. `mark_fresh_uncertain` decides whether the copy is
    /// certain.
    pub fn copy_without_tokens(&mut self, shared: &mut SharedState, hash: u64, number: u32, placement: u16) {
        let is_held = shared.sets.holds(shared.records.set(number), placement, self.number);
        if !self.has_attested && (!is_held || self.copies.get(number, placement).is_uncertain()) {
            self.hit_reports.fresh.push((number, placement));
        }
        self.copy(shared, hash, number, placement);
    }

    /// Marks the copies of a batch that might not exist as uncertain, after the last event. See `HitReports`.
    pub fn mark_fresh_uncertain(&mut self, writer: &mut Writer<'_, SharedState>) {
        if self.hit_reports.is_empty() {
            return;
        }
        let uncertain = if self.hit_reports.fresh.len() > WORK_PER_HOLD {
            writer.unlocked(|| self.hit_reports.take_uncertain())
        } else {
            self.hit_reports.take_uncertain()
        };
        for (number, placement) in uncertain {
            // The slot of the block might be free by now, or hold another block.
            if writer.records.is_used(number) && writer.sets.holds(writer.records.set(number), placement, self.number) {
                let Copies { most, .. } = self.copies.get(number, placement);
                let change = self.copies.set(number, placement, Copies { least: 0, most });
                self.note(writer, number, placement, change);
            }
            self.spend(writer, 1);
        }
    }

    /// Counts the first copy of a block on a placement.
    #[inline]
    fn count_in(&mut self, hash: u64, key: u64, placement: u16) {
        if let Some(stored) = &mut self.stored {
            stored.push(key);
        }
        let named = self.named_mut(placement);
        named.held += 1;
        let copy = named.marks.copy(hash, key);
        self.tally += copy;
    }

    /// Counts blocks that were added to the table and are new on a placement.
    #[inline]
    pub fn count_new(&mut self, hashes: &[u64], keys: &[u64], placement: u16) {
        if let Some(stored) = &mut self.stored {
            stored.extend(keys);
        }
        let count = hashes.len();
        let named = self.named_mut(placement);
        named.held += count;
        let copies = named.marks.copies(hashes, keys);
        self.tally += copies;
        self.blocks += count;
        self.clear_budget.add_stored(count);
    }

    /// Adds a record to the table that finds it by the hash that the block has in this stream.
    #[inline]
    fn enter(&mut self, shared: &SharedState, block: &Block, position: TablePosition, number: u32, is_new: bool) {
        let hash = block.hash;
        if is_new || shared.records.hash(number) == hash {
            self.enter_own(shared, block.mixed_hash, position, number);
        } else {
            let place = shared.secret.place(hash);
            let room = (self.foreign.len(), self.foreign.capacity());
            self.foreign
                .insert_unique(place, ForeignHash { hash, number }, |entry| shared.secret.place(entry.hash));
            step_counter::count_growth(room, self.foreign.len());
        }
    }

    /// Adds a record whose hash is that of the block in this stream.
    #[inline]
    pub fn enter_own(&mut self, shared: &SharedState, mixed: TableHash, position: TablePosition, number: u32) {
        let hashes = ByHash(&shared.records, shared.secret);
        self.table.insert_at(position, mixed, number, &hashes);
    }
}
