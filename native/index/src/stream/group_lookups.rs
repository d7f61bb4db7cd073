//! The data by which lookups search a stream whose model has several KV cache groups.

use std::sync::Arc;

use parking_lot::RwLock;

use super::Stream;
use crate::groups::Method;
use crate::groups::cache::{GroupCache, GroupLookup};
use crate::keys;
use crate::step_counter;
use crate::store::shared_state::SharedState;
use crate::sync::yielding_lock::{WORK_PER_HOLD, Writer};

impl Stream {
    /// Publishes the present state of `groups` to lookups.
    pub fn use_groups(&mut self, writer: &mut Writer<'_, SharedState>) {
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
            (Method::Hashes, None) => self.fill_group_cache(writer),
            (Method::Bitmaps | Method::Records, Some(_)) if self.cache_drops_left > 0 => {
                self.cache_drops_left -= 1;
                self.group_cache = None;
            }
            _ => {}
        }
        let lookup = || GroupLookup {
            groups: self.groups.clone(),
            cache: self.group_cache.clone(),
        };
        let lookup = (method != Method::Bitmaps).then(|| Arc::new(lookup()));
        writer.use_lookup(self.number, lookup);
    }

    /// Creates the cache of blocks by hash when lookups begin to need it.
    fn fill_group_cache(&mut self, writer: &mut Writer<'_, SharedState>) {
        let mut cache = GroupCache::default();
        if self.misses_salts {
            cache.miss_salts();
        }
        self.group_cache = Some(Arc::new(RwLock::new(cache)));
        for (number, hash) in self.all_blocks(writer) {
            self.note_copies_of(writer, hash.unwrap_or(writer.records.hash(number)), number);
            if self.changed_copies.len() >= WORK_PER_HOLD {
                self.publish_changed_copies(writer);
            }
        }
        self.note_waiting(writer, |_| true);
        self.publish_changed_copies(writer);
    }

    /// The records of all blocks, each with the block's hash in this stream if that hash differs from the record's hash.
    pub(super) fn all_blocks(&self, writer: &mut Writer<'_, SharedState>) -> Vec<(u32, Option<u64>)> {
        writer.unlocked(|| {
            let own = self.own_numbers().map(|number| (number, None));
            let foreign = self.foreign().map(|(number, hash)| (number, Some(hash)));
            own.chain(foreign).collect()
        })
    }

    /// Records that a copy has changed, if lookups by hashes are used.
    pub(super) fn note_changed_copy(&mut self, shared: &SharedState, hash: u64, placement: u16) {
        if self.group_cache.is_some() {
            let placement = shared.view.placements.get(placement);
            self.changed_copies.push((hash, placement.group, placement.level() as u8));
        }
    }

    /// Records that all copies of a block have changed.
    pub(super) fn note_copies_of(&mut self, shared: &SharedState, hash: u64, number: u32) {
        if self.group_cache.is_some() {
            step_counter::count(1);
            for placement in shared.sets.placements(shared.records.set(number), self.number) {
                self.note_changed_copy(shared, hash, placement);
            }
        }
    }

    /// Records that copies of pending blocks have changed, on the placements that `is_meant` accepts.
    pub(super) fn note_waiting(&mut self, shared: &SharedState, is_meant: impl Fn(u16) -> bool) {
        if self.group_cache.is_some() {
            step_counter::count(self.waiting.len());
            let waiting = self.waiting.iter().filter(|waiting| is_meant(waiting.placement));
            for (hash, placement) in waiting.map(|waiting| (waiting.hash, waiting.placement)).collect::<Vec<_>>() {
                self.note_changed_copy(shared, hash, placement);
            }
        }
    }

    /// Publishes the changed copies to lookups by hashes.
    pub(super) fn publish_changed_copies(&mut self, writer: &mut Writer<'_, SharedState>) {
        self.sort_changed_copies(writer);
        let (changed, mut held) = (std::mem::take(&mut self.changed_copies), Vec::new());
        let mut left = &changed[..];
        while !left.is_empty() {
            let (mut looks, mut done) = (0, 0);
            if let Some(cache) = &self.group_cache {
                let mut cache = cache.write();
                for alike in left.chunk_by(|one, other| one.0 == other.0) {
                    if done > 0 && looks + alike.len() > WORK_PER_HOLD {
                        break;
                    }
                    looks += alike.len() + self.collisions.get(alike[0].0).map_or(0, <[u32]>::len);
                    done += alike.len();
                    self.find_held(writer, alike, &mut held);
                    for (&(hash, group, level), &(is_held, is_certain)) in alike.iter().zip(&held) {
                        cache.put(group, hash, level.into(), is_held, is_certain);
                    }
                }
            } else {
                done = left.len();
            }
            left = &left[done..];
            self.spend(writer, looks);
        }
    }

    /// Sorts the changed copies and removes duplicates. So each block of a hash is examined only once for all changed copies of the hash.
    fn sort_changed_copies(&mut self, writer: &mut Writer<'_, SharedState>) {
        let (many, changed) = (self.changed_copies.len() > WORK_PER_HOLD, &mut self.changed_copies);
        let mut sort = || {
            changed.sort_unstable();
            changed.dedup();
        };
        if many { writer.unlocked(sort) } else { sort() }
    }

    /// Counts the blocks that share a hash with a copy that the batch has changed. If a batch of this length must not examine so many
    /// blocks, removes every block of the stream.
    fn limit_changed_copies(&mut self, writer: &mut Writer<'_, SharedState>) {
        if self.collisions.is_empty() || self.group_cache.is_none() {
            return;
        }
        self.sort_changed_copies(writer);
        let changed = self.changed_copies.chunk_by(|one, other| one.0 == other.0);
        let alike = changed
            .map(|alike| self.collisions.get(alike[0].0).map_or(0, <[u32]>::len))
            .sum();
        if !self.collisions.may_publish(alike) {
            self.remove_all(writer);
            self.set_aside("too-many-alike");
        }
    }

    /// Publishes the changes of a batch to lookups, after its last event.
    pub fn publish_groups(&mut self, writer: &mut Writer<'_, SharedState>) {
        self.limit_changed_copies(writer);
        self.publish_changed_copies(writer);
        if self.has_new_groups {
            self.use_groups(writer);
        }
        self.learn_salts();
    }

    /// Stores the salts that the batch has announced, if lookups need them.
    fn learn_salts(&mut self) {
        if self.salted.is_empty() && !self.misses_salts {
            return;
        }
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

    /// Fills `held` with two flags for each entry of `changed`. All entries have the same hash. The first flag is whether the group holds a
    /// copy on the level; pending copies count. The second flag is whether such a copy certainly exists.
    fn find_held(&self, shared: &SharedState, changed: &[(u64, i64, u8)], held: &mut Vec<(bool, bool)>) {
        let (hash, placements) = (changed[0].0, &shared.view.placements);
        held.clear();
        held.resize(changed.len(), (false, false));
        let mut hold = |number: u16, is_certain: bool| {
            let (group, level) = (placements.get(number).group, placements.levels()[usize::from(number)]);
            if let Ok(at) = changed.binary_search(&(hash, group, level)) {
                held[at] = (true, held[at].1 || is_certain);
            }
        };
        let mut look = |number: u32| {
            for placement in shared.sets.placements(shared.records.set(number), self.number) {
                hold(placement, !self.copies.get(number, placement).is_uncertain());
            }
        };
        match self.collisions.get(hash) {
            Some(list) => list.iter().for_each(|&number| look(number)),
            None => self.newest(shared, hash).into_iter().for_each(look),
        }
        if !self.waiting.is_empty() {
            let waiting = self.named.iter().filter(|named| self.waiting.has(hash, named.placement));
            waiting.for_each(|named| hold(named.placement, true));
        }
    }
}
