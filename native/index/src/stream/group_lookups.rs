//! What lookups need of a stream whose model has several groups of layers.

use std::sync::Arc;

use parking_lot::RwLock;

use super::{NamedPlacement, Stream};
use crate::groups::Method;
use crate::groups::cache::{GroupCache, GroupLookup};
use crate::keys;
use crate::step_counter;
use crate::store::shared_state::SharedState;
use crate::sync::yielding_lock::{WORK_PER_HOLD, Writer};

impl Stream {
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
        let named: Vec<(u16, i64, usize)> = (self.named.iter())
            .map(|named| (named.placement, shared.view.placements.get(named.placement)))
            .map(|(number, placement)| (number, placement.group, placement.level()))
            .collect();
        let blocks = self.own_numbers().map(|number| (number, shared.records.hash(number)));
        let placed = blocks.chain(self.foreign()).flat_map(|(number, hash)| {
            let placements = shared.sets.placements(shared.records.set(number), self.number);
            placements.map(move |placement| (hash, placement))
        });
        let waiting = self.waiting.iter().map(|waiting| (waiting.hash, waiting.placement));
        for (hash, placement) in placed.chain(waiting) {
            if let Some(&(_, group, level)) = named.iter().find(|(known, ..)| *known == placement) {
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
                is_certain |= !self.copies.get(number, placement).is_uncertain();
            }
        };
        match self.collisions.get(hash) {
            Some(list) => list.iter().for_each(|&number| look(number)),
            None => self.newest(shared, hash).into_iter().for_each(look),
        }
        let waits = |named: &NamedPlacement| self.waiting.has(hash, named.placement) && is_meant(named.placement);
        let is_waiting = !self.waiting.is_empty() && self.named.iter().any(waits);
        (is_held || is_waiting, is_certain || is_waiting)
    }
}
