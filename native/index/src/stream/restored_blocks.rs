//! Adds the blocks of a snapshot to a stream, and replaces a record by another record of the same block.

use std::collections::HashMap;

use super::placing::PlacedBlock;
use super::{ForeignHash, Stream};
use crate::holders::copies::Copies;
use crate::store::shared_state::{Block, ByHash, SharedState};
use crate::sync::yielding_lock::{WORK_PER_HOLD, YieldingRwLock};

impl Stream {
    /// Adds a block that the stream does not have, with the given numbers of copies on placements. Returns the record of the block; None if
    /// the stream already has the block, or if a limit prevents the addition.
    #[inline]
    pub fn put(
        &mut self,
        shared: &mut SharedState,
        block: &Block,
        placements: &[(u16, Copies)],
        parent: Option<u32>,
    ) -> Option<u32> {
        let known = self.blocks;
        let context = *shared.contexts.get(block.context);
        let first = placements.first()?.0;
        if !self.admit_context(shared, &context, first) {
            return None;
        }
        let PlacedBlock { number, .. } = self.place(shared, block, first, parent)?;
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
                self.tally += self.named(placement).marks.copy(block.hash, block.key).times(more);
            }
        }
        Some(number)
    }

    /// The contribution of a block on these placements to a digest.
    pub fn digest_of(&self, hash: u64, key: u64, placements: &[(u16, Copies)]) -> u128 {
        placements.iter().fold(0, |sum: u128, &(placement, copies)| {
            let copy = self.named(placement).marks.copy(hash, key);
            sum.wrapping_add(copy.times(copies.most).digest)
        })
    }

    /// Puts the blocks of one hash into the given order; each block is given by its key and context. If `has_refused`, blocks that the
    /// stream does not have are skipped. Returns whether the given blocks are all blocks of the hash.
    pub fn reorder(
        &mut self,
        shared_lock: &YieldingRwLock<SharedState>,
        hash: u64,
        blocks: &[(u64, u32)],
        has_refused: bool,
    ) -> bool {
        let Some(list) = self.collisions.get(hash) else {
            return has_refused;
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
                None if has_refused => {}
                None => return false,
            }
        }
        if !known.is_empty() {
            return false;
        }
        self.collisions.put(hash, ordered);
        true
    }

    /// Replaces the record `from` by the record `to` of the same block. Returns false, and changes nothing, if the stream holds both
    /// records, or if the block's hash in this stream differs from that of `from`.
    pub fn exchange(&mut self, shared: &mut SharedState, from: u32, to: u32) -> bool {
        let hash = shared.records.hash(from);
        let mixed = shared.mixed(hash);
        let holds_both = shared.sets.knows(shared.records.set(to), self.number);
        if holds_both || self.table.find(mixed, |number| number == from).is_none() {
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
        self.exchange_lora(shared, from, to);
        self.table.remove(mixed, from, &ByHash(&shared.records, shared.secret));
        if shared.records.hash(to) == hash {
            self.table.insert(mixed, to, &ByHash(&shared.records, shared.secret));
        } else {
            let place = shared.secret.place(hash);
            self.foreign.insert_unique(place, ForeignHash { hash, number: to }, |entry| {
                shared.secret.place(entry.hash)
            });
        }
        self.collisions.exchange(hash, from, to);
        true
    }
}
