//! How blocks go: by removals and clears, and with the last block that needed them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::{Blocks, NONE, Node, bits};

/// Dead ancestors whose room is kept, since chains come and go.
const DEAD_KEPT: usize = 500;

impl Blocks {
    /// Takes one copy from the oldest block of `hash` that has one in any manner of `plane`; one in a manner of `exact`, if it has
    /// such. Says whether there was one.
    #[inline]
    pub fn remove(&mut self, hash: u64, exact: u64, plane: u64) -> bool {
        if !self.stretches.is_empty()
            && let Some(found) = self.remove_kept(hash, plane)
        {
            return found;
        }
        let held = |&number: &u32| self.get(number).mask & plane != 0;
        let list = if self.several.is_empty() {
            None
        } else {
            self.several.get(&hash)
        };
        let found = match list {
            Some(list) => list.iter().copied().find(held),
            None => self.newest(hash).filter(held),
        };
        let Some(number) = found else { return false };
        let mask = self.get(number).mask;
        let best = if mask & exact != 0 { mask & exact } else { mask & plane };
        let manner = best.trailing_zeros() as u8;
        if !self.copies.is_empty() && self.less(number, manner) {
            return true;
        }
        self.get_mut(number).mask &= !(1 << manner);
        self.settle(number);
        true
    }

    /// Takes one of the copies beyond the first, if there is one.
    fn less(&mut self, number: u32, manner: u8) -> bool {
        let Some(more) = self.copies.get_mut(&(number, manner)) else {
            return false;
        };
        *more -= 1;
        if *more == 0 {
            self.copies.remove(&(number, manner));
            self.tidy();
        }
        self.extra -= 1;
        true
    }

    /// Gives back what maps do not need any more.
    fn tidy(&mut self) {
        if self.copies.capacity() > 64 && self.copies.len() * 4 < self.copies.capacity() {
            self.copies.shrink_to(self.copies.len() * 2);
        } else if self.copies.is_empty() {
            self.copies = HashMap::new();
        }
    }

    /// Drops all copies in these manners.
    pub fn clear(&mut self, manners: u64) {
        if manners != 0 {
            self.look_into_all();
        }
        let mut meant: Vec<u32> = self
            .table
            .iter()
            .filter(|&number| self.get(number).mask & manners != 0)
            .collect();
        meant.sort_unstable(); // equal histories take equal memory, and are told in equal words
        for number in meant {
            for manner in bits(self.get(number).mask & manners) {
                self.extra -= self.copies.remove(&(number, manner)).unwrap_or(0) as usize;
            }
            self.get_mut(number).mask &= !manners;
            self.settle(number);
        }
        self.tidy();
    }

    /// Buries a block that has no copies any more, and forgets it when nothing hangs on it.
    #[inline]
    pub(super) fn settle(&mut self, number: u32) {
        let Node {
            hash,
            key,
            mask,
            children,
            ..
        } = *self.get(number);
        if mask != 0 {
            return;
        }
        let (nodes, secret) = (&self.nodes, self.secret);
        self.table
            .remove(self.spot(hash), number, &|other: u32| secret.place(nodes.get(other)[0].hash));
        if let Some(list) = self.several.get_mut(&hash) {
            list.retain(|&other| other != number);
            if list.len() < 2 {
                self.several.remove(&hash);
                if self.several.is_empty() {
                    self.several = HashMap::new();
                }
            }
        }
        if children == 0 {
            return self.forget(number);
        }
        *self.dead_hashes.entry(hash).or_default() += 1;
        let place = self.buried(hash, key);
        self.dead.insert_unique(place, number, |&other| {
            let node = &nodes.get(other)[0];
            secret.place(node.hash ^ node.key.rotate_left(32))
        });
    }

    /// Gives a block back, and the dead ancestors that only it needed.
    fn forget(&mut self, mut number: u32) {
        loop {
            let Node {
                parent, naming, slot, ..
            } = *self.get(number);
            let shelf = self.namings.get(naming).shelf;
            if let Some(shelf) = self.shelves.get_mut(shelf as usize) {
                shelf.give(slot);
            }
            self.nodes.give(number);
            self.release(naming);
            if parent == NONE {
                break;
            }
            let above = self.get_mut(parent);
            above.children -= 1;
            if above.children > 0 || above.mask != 0 {
                break;
            }
            self.exhume(parent);
            number = parent;
        }
    }

    /// One block, or stretch, less has a naming.
    pub(super) fn release(&mut self, naming: u32) {
        self.namings.release(naming);
        if self.namings.is_empty() {
            self.shelves = Vec::new();
            self.dead_hashes = HashMap::new();
        }
    }

    /// Nothing hangs on a block any more that did: if it is dead it goes with the last.
    pub(super) fn unhung(&mut self, number: u32) {
        let node = self.get_mut(number);
        node.children -= 1;
        if node.children == 0 && node.mask == 0 {
            self.exhume(number);
            self.forget(number);
        }
    }

    fn exhume(&mut self, number: u32) {
        let Node { hash, key, .. } = *self.get(number);
        if let Ok(found) = self.dead.find_entry(self.buried(hash, key), |&other| other == number) {
            found.remove();
            self.count_out(hash);
        }
        self.shrink_dead();
    }

    /// One dead block less has a hash.
    pub(super) fn count_out(&mut self, hash: u64) {
        if let Entry::Occupied(mut entry) = self.dead_hashes.entry(hash) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
        }
    }

    pub(super) fn shrink_dead(&mut self) {
        let (length, capacity) = (self.dead.len(), self.dead.capacity());
        if capacity > DEAD_KEPT && length * 4 < capacity {
            self.dead_hashes.shrink_to(length * 2);
            let (nodes, secret) = (&self.nodes, self.secret);
            self.dead.shrink_to(length * 2, |&other| {
                let node = &nodes.get(other)[0];
                secret.place(node.hash ^ node.key.rotate_left(32))
            });
        }
    }
}
