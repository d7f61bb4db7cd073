//! The memory of a stream: when its tables are resized, and whether the memory limit lets it hold more blocks.

use std::sync::atomic::Ordering;

use super::Stream;
use crate::memory::hasher::Secret;
use crate::store::shared_state::SharedState;
use crate::sync::yielding_lock::{WORK_PER_HOLD, Writer};

/// Number of entries from which a table is resized only while no lock is held, since other threads would wait.
pub(super) const LARGE_TABLE: usize = 1 << 14;
/// Maximum number of bytes by which the index's tables can grow before the memory limit is checked again.
const MAX_TABLE_GROWTH: usize = 16 << 10;
/// The memory limit divided by this number is reserved for streams that hold fewer blocks than the average.
const RESERVE_RATIO: usize = 16;

impl Stream {
    /// Whether a large table must shrink, or might have to grow for `blocks` additional blocks. Resizing takes long, since all entries
    /// move.
    #[inline]
    pub fn must_resize(&self, blocks: usize) -> bool {
        let is_tight = |length: usize, capacity: usize| length >= LARGE_TABLE && capacity - length < blocks;
        is_tight(self.foreign.len(), self.foreign.capacity())
            || is_tight(self.collisions.room().0, self.collisions.room().1)
            || self.copies.rooms().any(|(length, capacity)| is_tight(length, capacity))
            || self.foreign.capacity() > LARGE_TABLE && self.must_shrink()
    }

    /// Resizes the tables for `blocks` additional blocks. The caller must not hold the shared lock.
    pub fn make_room(&mut self, blocks: usize, secret: Secret) {
        if self.foreign.capacity() > LARGE_TABLE && self.must_shrink() {
            self.foreign
                .shrink_to(self.foreign.len() * 2, |entry| secret.place(entry.hash));
        }
        if self.must_resize(blocks) {
            self.foreign.reserve(blocks, |entry| secret.place(entry.hash));
            self.collisions.reserve(blocks);
            self.copies.reserve(blocks);
        }
    }

    /// Counts work as `Writer::spend` does. Resizes tables for further work if the lock is released.
    #[inline]
    pub fn spend(&mut self, writer: &mut Writer<'_, SharedState>, work: usize) {
        if writer.spend(work) && self.must_resize(2 * WORK_PER_HOLD) {
            let secret = writer.secret;
            writer.unlocked(|| self.make_room(2 * WORK_PER_HOLD, secret));
        }
    }

    pub(super) fn must_shrink(&self) -> bool {
        self.foreign.len() * 4 < self.foreign.capacity()
    }

    /// Updates the contribution of this stream to the bytes of all streams.
    pub fn recount(&mut self, shared: &mut SharedState) {
        let bytes = self.bytes();
        shared.streams_bytes = shared.streams_bytes.wrapping_add(bytes.wrapping_sub(self.counted));
        self.counted = bytes;
    }

    /// Whether the memory limit allows this stream to hold more blocks. Memory close to the limit is reserved for streams that hold fewer
    /// blocks than the average.
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
        let next =
            shared.bytes() + shared.streams_bytes + shared.records.growth(WORK_PER_HOLD) + MAX_TABLE_GROWTH.min(limit / 8);
        if next > limit {
            return false;
        }
        if next <= limit - limit / RESERVE_RATIO {
            return true;
        }
        let blocks = |number: usize, known: usize| if number == self.number as usize { self.blocks } else { known };
        let counts = (shared.view.members.iter().enumerate())
            .filter_map(|(number, member)| Some(blocks(number, member.as_ref()?.blocks.load(Ordering::Relaxed))))
            .filter(|&count| count > 0);
        let (sum, streams) = counts.fold((0, 0), |(sum, streams), count| (sum + count, streams + 1));
        self.blocks * streams < sum
    }
}
