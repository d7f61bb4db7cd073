//! Removals from a stream: of copies by their hashes, of copies in the scope of a clear, and of all copies.

use hashbrown::HashTable;

use super::room::LARGE_TABLE;
use super::tally::{CopyMarks, Tally};
use super::{NamedPlacement, Stream};
use crate::holders::copies::{Copies, CopyTable};
use crate::holders::holder_sets::EMPTY;
use crate::memory::table::{Table, TableHash, TablePosition};
use crate::rules::pending::Queue;
use crate::step_counter;
use crate::store::records::{Records, Row};
use crate::store::shared_state::{ByHash, SharedState};
use crate::sync::yielding_lock::Writer;

impl Stream {
    /// Removes one copy on `placement` for each of a few hashes: a copy of the hash's oldest block, or else of a pending block. Counts the
    /// hashes that have no copy. `has_group` is whether the removal states a group.
    pub fn remove(
        &mut self,
        shared: &mut SharedState,
        hashes: &[u64],
        placement: u16,
        has_group: bool,
        targets: &mut Vec<RemovalTarget>,
    ) {
        targets.clear();
        targets.extend(hashes.iter().map(|&hash| {
            let mixed = shared.mixed(hash);
            RemovalTarget {
                hash,
                mixed,
                position: self.table.prefetch_position(mixed),
                number: None,
            }
        }));
        for target in &mut *targets {
            self.table.for_each_match_at(target.position, |number| {
                target.number = Some(number);
                false
            });
            if let Some(number) = target.number {
                shared.records.prefetch_all(number);
            }
        }
        let (mut pending, mut keys) = (PendingRemovals::new(self.named(placement).marks), KeyCache::default());
        for target in targets {
            if self.remove_single(shared, target, placement, &mut keys, &mut pending) {
                continue;
            }
            self.apply_removals(shared, placement, &mut pending);
            if !self.remove_copy_on(shared, target.hash, placement) {
                self.remove_unstated(shared, target.hash, placement, has_group);
            }
        }
        self.apply_removals(shared, placement, &mut pending);
    }

    /// Removes one copy of a hash on a placement: of its oldest block, or else of a pending block.
    fn remove_copy_on(&mut self, shared: &mut SharedState, hash: u64, placement: u16) -> bool {
        self.remove_oldest(shared, hash, placement) || self.waiting.remove(hash, placement)
    }

    /// Removes a hash that has no copy on the placement of its removal from all placements that the removal can mean. Counts the hash if it
    /// has no copy there either.
    fn remove_unstated(&mut self, shared: &mut SharedState, hash: u64, placement: u16, has_group: bool) {
        let mut is_unknown = true;
        if self.newest(shared, hash).is_some() || self.waiting.names(hash) {
            let (placements, stated) = (&shared.view.placements, shared.view.placements.get(placement));
            let others = self.named.iter().map(|named| named.placement);
            let is_meant = |&other: &u16| other != placement && stated.may_mean(placements.get(other), has_group);
            let others: Vec<u16> = others.filter(is_meant).collect();
            for other in others {
                if self.remove_copy_on(shared, hash, other) {
                    self.note_changed_copy(shared, hash, other);
                    is_unknown = false;
                }
            }
        }
        self.counters.unknown += u64::from(is_unknown);
    }

    /// Removes a copy in the usual case: the hash has one block, and the block has one copy on the placement. Collects in `pending` the
    /// changes that consecutive removals share, and the records without holders. In any other case, returns false and does not change the
    /// block.
    #[inline]
    fn remove_single(
        &mut self,
        shared: &mut SharedState,
        target: &RemovalTarget,
        placement: u16,
        keys: &mut KeyCache,
        pending: &mut PendingRemovals,
    ) -> bool {
        let RemovalTarget {
            hash,
            mixed,
            position,
            number,
        } = *target;
        if !self.collisions.is_empty() || self.has_replaced_loras() {
            return false;
        }
        let position = self.table.current_position(position, mixed);
        // Rarely, the entry belongs to another block with the same tag, or to a block that this event has already removed.
        let is_meant = |number: u32| shared.records.hash(number) == hash && shared.records.is_used(number);
        let Some(number) = number.filter(|&number| is_meant(number)) else {
            return false;
        };
        if (!self.copies.is_empty() && self.copies.contains(number, placement)) || shared.has_unlisted_twins(number) {
            return false;
        }
        let set = shared.records.set(number);
        if set == pending.from {
            pending.moved += 1;
        } else {
            shared
                .sets
                .move_all(pending.from, pending.to, std::mem::take(&mut pending.moved));
            pending.from = NONE;
            if !shared.sets.holds(set, placement, self.number) {
                return false;
            }
            let rest = shared.sets.move_block(set, placement, self.number, &mut self.removed);
            (pending.from, pending.to, pending.leaves) = (set, rest, !shared.sets.knows(rest, self.number));
        }
        pending.tally += pending.marks.copy(hash, keys.key(&shared.records, number));
        pending.held += 1;
        shared.records.put_set(number, pending.to);
        if pending.leaves {
            self.table
                .remove_at(position, mixed, number, &ByHash(&shared.records, shared.secret));
            self.blocks -= 1;
        }
        if pending.to == EMPTY && !pending.row.extend(number) {
            shared.forget_row(std::mem::replace(&mut pending.row, Row::single(number)));
        }
        true
    }

    /// Applies the changes in `pending`.
    fn apply_removals(&mut self, shared: &mut SharedState, placement: u16, pending: &mut PendingRemovals) {
        let PendingRemovals {
            from,
            to,
            moved,
            tally,
            held,
            row,
            ..
        } = std::mem::replace(pending, PendingRemovals::new(self.named(placement).marks));
        shared.sets.move_all(from, to, moved);
        self.tally -= tally;
        self.named_mut(placement).held -= held;
        shared.forget_row(row);
    }

    /// Removes one copy of a hash in the other cases: the hash has several blocks or copies, or differs from the record's hash.
    #[inline(never)]
    fn remove_oldest(&mut self, shared: &mut SharedState, hash: u64, placement: u16) -> bool {
        if !self.collisions.may_examine(hash) {
            self.collisions.skip_removal();
            return false;
        }
        let mut looks = 0;
        let held = |number: &u32| {
            looks += 1;
            shared.sets.holds(shared.records.set(*number), placement, self.number)
        };
        let found = match self.collisions.get(hash) {
            Some(list) => list.iter().copied().find(held),
            None => self.newest(shared, hash).filter(held),
        };
        step_counter::count(looks);
        self.collisions.spend(looks);
        let Some(number) = found else { return false };
        let key = shared.records.key(number);
        self.tally -= self.named(placement).marks.copy(hash, key);
        if self.remove_copy(shared, number, placement) {
            return true;
        }
        shared.toggle(number, placement, self.number, &mut self.removed);
        self.forget_copies(shared, number, placement);
        self.named_mut(placement).held -= 1;
        if !shared.sets.knows(shared.records.set(number), self.number) {
            self.remove_record(shared, hash, number);
        }
        true
    }

    /// Removes one of several copies of a block. If the block has only one copy, returns false and changes nothing.
    #[inline]
    fn remove_copy(&mut self, shared: &mut SharedState, number: u32, placement: u16) -> bool {
        let Some(change) = self.copies.take(number, placement) else {
            return false;
        };
        self.note(shared, number, placement, change);
        true
    }

    /// Removes a block that the stream holds on no placement any more.
    fn remove_record(&mut self, shared: &mut SharedState, hash: u64, number: u32) {
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
        self.collisions.remove(hash, number);
        self.blocks -= 1;
        self.forget_lora(shared, number);
        shared.leave_twin(self.number, number);
        shared.sweep(number);
    }

    fn shrink_foreign(&mut self, shared: &SharedState) {
        let (length, capacity) = (self.foreign.len(), self.foreign.capacity());
        if length == 0 {
            self.foreign = HashTable::new();
        } else if (64..=LARGE_TABLE).contains(&capacity) && self.must_shrink() {
            self.foreign.shrink_to(length * 2, |entry| shared.secret.place(entry.hash));
        }
    }

    /// Drops every copy of one block on some placements.
    fn drop_block(&mut self, shared: &mut SharedState, hash: u64, number: u32, placements: &[u16]) {
        let key = shared.records.key(number);
        let mut has_dropped = false;
        for &placement in placements {
            if !shared.sets.holds(shared.records.set(number), placement, self.number) {
                continue;
            }
            has_dropped = true;
            shared.toggle(number, placement, self.number, &mut self.removed);
            let copies = self.forget_copies(shared, number, placement);
            self.note_changed_copy(shared, hash, placement);
            let named = self.named_mut(placement);
            named.held -= 1;
            let copy = named.marks.copy(hash, key);
            self.tally -= copy.times(copies.most);
        }
        if has_dropped && !shared.sets.knows(shared.records.set(number), self.number) {
            self.remove_record(shared, hash, number);
        }
    }

    /// Whether a block is held, or pending, on a placement that `is_meant` accepts.
    pub fn has_any(&self, is_meant: impl Fn(u16) -> bool) -> bool {
        let mut meant = self.named.iter().filter(|named| is_meant(named.placement));
        meant.any(|named| named.held > 0 || self.waiting.is_on(named.placement))
    }

    /// Drops every copy on the placements that `is_meant` accepts. Returns false, and removes all blocks, if clears are so frequent that
    /// the blocks must not be examined again.
    pub fn clear(&mut self, writer: &mut Writer<'_, SharedState>, is_meant: impl Fn(u16) -> bool) -> bool {
        let looks = self.blocks + self.waiting.len();
        if !self.has_any(&is_meant) {
            return true;
        }
        if !self.clear_budget.try_spend(looks) {
            self.remove_all(writer);
            return false;
        }
        let bound = writer.records.bound();
        let is_cleared = |named: &&NamedPlacement| named.held > 0 && is_meant(named.placement);
        let placements: Vec<u16> = self.named.iter().filter(is_cleared).map(|named| named.placement).collect();
        self.note_waiting(writer, &is_meant);
        let (numbers, foreign) = writer.unlocked(|| {
            self.waiting.clear(&is_meant);
            let foreign: Vec<(u32, u64)> = self.foreign().collect();
            (in_removal_order(self.own_numbers(), self.blocks, bound), foreign)
        });
        step_counter::count(looks);
        for number in numbers {
            let hash = writer.records.hash(number);
            self.drop_block(writer, hash, number, &placements);
            self.spend(writer, 1);
        }
        for (number, hash) in foreign {
            self.drop_block(writer, hash, number, &placements);
            self.spend(writer, 1);
        }
        true
    }

    /// Applies a clear that names no tier. The device is empty then. Blocks on lower tiers might be gone: engines do not say whether they
    /// emptied these tiers too.
    pub fn clear_all(&mut self, writer: &mut Writer<'_, SharedState>) {
        let emptied = self.evidence.emptied_levels();
        let is_lower = |named: &&NamedPlacement| emptied >> named.level & 1 == 0;
        let lower: Vec<NamedPlacement> = self.named.iter().filter(is_lower).copied().collect();
        let levels = |is_meant: &dyn Fn(&NamedPlacement) -> bool| {
            let named = lower.iter().filter(|named| is_meant(named));
            named.fold(0, |bits, named| bits | 1 << named.level)
        };
        let (held, pending) = (
            levels(&|named| named.held > 0),
            levels(&|named| self.waiting.is_on(named.placement)),
        );
        let is_emptied = |placement| lower.iter().all(|named| named.placement != placement);
        let keeps = held != 0 && self.clear(writer, is_emptied) && self.mark_all_uncertain(writer);
        self.evidence.begin(pending | if keeps { 0 } else { held }, keeps);
        if keeps {
            self.note_waiting(writer, |_| true);
            writer.unlocked(|| self.waiting.clear(|_| true));
            self.clear_unkept(None);
        } else {
            self.remove_all(writer);
            self.leave_placements(writer);
        }
    }

    /// The levels below the device, as bits, on which the stream has blocks or pending blocks.
    pub fn lower_levels(&self) -> u8 {
        let has_any =
            |named: &&NamedPlacement| !named.is_on_device() && (named.held > 0 || self.waiting.is_on(named.placement));
        self.named
            .iter()
            .filter(has_any)
            .fold(0, |bits, named| bits | 1 << named.level)
    }

    /// Marks every block as uncertain: it might be gone. Returns false, and does nothing, if clears are so frequent that the blocks must
    /// not be examined again.
    fn mark_all_uncertain(&mut self, writer: &mut Writer<'_, SharedState>) -> bool {
        let held: usize = self.held().map(|(_, held)| held).sum();
        if self.uncertain() == held {
            return true; // an earlier clear has marked all blocks, and none was stored since then
        }
        if !self.clear_budget.try_spend(self.blocks) {
            return false;
        }
        step_counter::count(self.blocks);
        for (number, hash) in self.all_blocks(writer) {
            let placements: Vec<u16> = writer.sets.placements(writer.records.set(number), self.number).collect();
            for placement in placements {
                let Copies { most, .. } = self.copies.get(number, placement);
                let change = self.copies.set(number, placement, Copies { least: 0, most });
                self.note(writer, number, placement, change);
            }
            self.note_copies_of(writer, hash.unwrap_or(writer.records.hash(number)), number);
            self.spend(writer, 1);
        }
        self.publish_changed_copies(writer);
        true
    }

    /// Removes every block. From the beginning of the removal on, lookups find none of the blocks. The known groups stay.
    pub fn remove_all(&mut self, writer: &mut Writer<'_, SharedState>) {
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
        writer.mark_all_certain(number);
        self.lora_bytes = 0;
        let bound = writer.records.bound();
        let numbers = writer.unlocked(|| {
            step_counter::count(self.blocks + self.waiting.len());
            let numbers = in_removal_order(self.numbers(), self.blocks, bound);
            (self.table, self.foreign) = (Table::dense(), HashTable::new());
            (self.copies, self.waiting) = (CopyTable::default(), Queue::default());
            self.collisions.clear();
            numbers
        });
        for record in numbers {
            let set = writer.records.set(record);
            let without = writer.sets.remove_stream(set, number);
            writer.records.put_set(record, without);
            writer.leave_twin(number, record);
            writer.sweep(record);
            writer.spend(1);
        }
        (self.blocks, self.tally) = (0, Tally::default());
        self.named.iter_mut().for_each(|named| named.held = 0);
        writer.show(number, true);
    }

    /// Removes every block if a removal was skipped, since lookups must not find the block whose removal was skipped. Returns whether
    /// blocks were removed.
    pub fn remove_all_after_skipped_removal(&mut self, writer: &mut Writer<'_, SharedState>) -> bool {
        let is_spent = self.collisions.take_skipped();
        if is_spent {
            self.remove_all(writer);
        }
        is_spent
    }
}

/// Sorts records in the order in which they are removed: from the ends of runs, so that no block stays linked to a removed one.
fn in_removal_order(numbers: impl Iterator<Item = u32>, count: usize, bound: u32) -> Vec<u32> {
    if count < bound as usize / SORT_RATIO {
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

/// If the index has more than this number of records for each record of a stream, the stream's records are sorted in a list; otherwise they
/// are marked in a bitmap.
const SORT_RATIO: usize = 64;

/// A hash to remove.
#[derive(Clone, Copy, Debug)]
pub struct RemovalTarget {
    hash: u64,
    /// The hash, mixed with the secret of the tables.
    mixed: TableHash,
    position: TablePosition,
    /// The record in the table's entry; None if the hash has no entry.
    number: Option<u32>,
}

/// Consecutive removals of one event whose changes were not applied yet. Each of them moves a block from the set `from` to the set `to`.
struct PendingRemovals {
    /// The set of each removed block before and after the removal.
    from: u32,
    to: u32,
    /// Whether the stream holds the blocks of the set `to` on no placement.
    leaves: bool,
    /// Number of further blocks that have moved from the set `from` to the set `to`.
    moved: u32,
    /// The contribution of a copy on this placement to the stream's sums.
    marks: CopyMarks,
    /// Sum of the contributions of the removed copies.
    tally: Tally,
    held: usize,
    /// Records without holders.
    row: Row,
}

/// The value that represents no set.
const NONE: u32 = u32::MAX;

impl PendingRemovals {
    fn new(marks: CopyMarks) -> Self {
        Self {
            from: NONE,
            to: NONE,
            leaves: false,
            moved: 0,
            marks,
            tally: Tally::default(),
            held: 0,
            row: Row::default(),
        }
    }
}

/// Number of adjacent slots for which a `KeyCache` has keys.
const CACHED_SLOTS: usize = 8;

/// Computed keys of one block and of the blocks before it in its group of slots; they are valid until a slot changes.
#[derive(Clone, Copy, Debug, Default)]
struct KeyCache {
    /// Index of the group of slots plus one; 0 while the cache is empty.
    group: u32,
    known: u8,
    keys: [u64; CACHED_SLOTS],
}

impl KeyCache {
    #[inline]
    fn key(&mut self, records: &Records, number: u32) -> u64 {
        let (group, at) = (number / CACHED_SLOTS as u32 + 1, number as usize % CACHED_SLOTS);
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
