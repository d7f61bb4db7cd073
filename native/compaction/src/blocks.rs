//! The blocks of a stream, as a tree. It contains the blocks that have copies ("live"), and their ancestors that have no copies ("dead"): a
//! snapshot must announce the tokens of all ancestors.

use std::collections::{BTreeMap, HashMap, HashSet};

use hashbrown::HashTable;

use super::hash_table;
use kvevents_index::holders::contexts::Context;
use kvevents_index::limits::BLOCKS_PER_HASH;
use kvevents_index::memory::hasher::Secret;
use kvevents_index::rules::collisions::Collisions;
use kvevents_index::rules::replaced_loras::{ReplacedLoras, StoredBlock};

use super::announcements::{Announcements, RemovalScope, bits};
use super::arena::{Arena, Record};
use super::attributes::{AttributeTable, Attributes};
use super::event::Namespace;

/// The value in place of the parent's ID, if a block has no parent.
pub const ROOT: u32 = u32::MAX;

/// One block of a store.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct NewBlock<'a> {
    pub hash: u64,
    pub key: u64,
    /// ID of the parent, or `ROOT`.
    pub parent: u32,
    pub context: Context,
    pub namespace: &'a Namespace<'a>,
    /// Tokens that the block's hash covers; empty if the block was announced by its key.
    pub tokens: &'a [u32],
    /// ID of the store's announcement.
    pub announcement: u8,
    /// Announcements, as bits, in which the block has at most one copy in total; 0 if each store adds a copy.
    pub single: u64,
}

/// The outcome of storing a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOutcome {
    /// The block has its first copy, and no other block with copies has its hash.
    New(u32),
    /// The store has added a copy of a block with copies, or another block with the same hash.
    Known(u32),
    /// Too many blocks have the same hash.
    Refused,
}

/// The blocks of a stream, live and dead.
#[derive(Debug, Default)]
pub struct Blocks {
    arena: Arena,
    attributes: AttributeTable,
    /// The table by which blocks with copies are found by their hash.
    live: HashTable<u32>,
    /// The table by which blocks without copies are found by their hash and key.
    dead: HashTable<u32>,
    /// The hashes that several live blocks share, and the remaining number of checks of such blocks.
    pub collisions: Collisions,
    /// Maps a block and an announcement to the number of further copies, which is the number of copies minus one; never 0.
    extra_copies: HashMap<(u32, u8), u32>,
    extra_count: usize,
    /// Pairs of block and announcement in which a copy might not exist, according to the rules of the index. Either one of several copies
    /// was removed, or `State::end_payload` has found that a store might have repeated a copy.
    uncertain: HashSet<(u32, u8)>,
    /// The table by which live blocks with a LoRA are found by their key. It lacks some outdated blocks.
    of_loras: HashTable<u32>,
    /// The replaced LoRAs, and the blocks that might have been computed with replaced weights, according to the rules of the index.
    loras: ReplacedLoras,
    secret: Secret,
}

fn live_place(arena: &Arena, secret: Secret) -> impl Fn(&u32) -> u64 {
    move |&number| secret.place(arena.get(number).hash)
}

fn dead_place(arena: &Arena, secret: Secret) -> impl Fn(&u32) -> u64 {
    move |&number| {
        let Record { hash, key, .. } = *arena.get(number);
        secret.place(hash ^ key.rotate_left(32))
    }
}

/// Returns the hash by which `Blocks::of_loras` places a block.
fn lora_place(arena: &Arena, secret: Secret) -> impl Fn(&u32) -> u64 {
    move |&number| secret.place(arena.get(number).key)
}

/// The part of the seed that the LoRA contributes; None without a LoRA.
fn lora_of(context: Context) -> Option<u64> {
    (context.lora != 0 && !context.is_keyed()).then_some(context.lora)
}

impl Blocks {
    /// Number of blocks that have copies.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// Number of blocks that have no copies.
    pub fn dead(&self) -> usize {
        self.dead.len()
    }

    /// Number of further copies: all copies except the first of each block in each announcement.
    pub fn extra_copies(&self) -> usize {
        self.extra_count
    }

    /// Number of bytes of LoRA names, salts and extra keys.
    pub fn text_bytes(&self) -> usize {
        self.attributes.text_bytes()
    }

    /// Number of different block sizes in tokens.
    pub fn widths(&self) -> usize {
        self.arena.widths()
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.arena.bytes()
            + self.attributes.bytes()
            + self.live.allocation_size()
            + self.dead.allocation_size()
            + self.collisions.bytes()
            + self.extra_copies.capacity() * (size_of::<((u32, u8), u32)>() + 1)
            + self.uncertain.capacity() * (size_of::<(u32, u8)>() + 1)
            + self.of_loras.allocation_size()
            + self.loras.bytes()
    }

    /// An upper bound of the IDs in use: all of them are below it.
    pub fn bound(&self) -> usize {
        self.arena.bound()
    }

    /// The IDs of all blocks, in ascending order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.arena.numbers()
    }

    /// The block with this ID.
    #[inline]
    pub fn get(&self, number: u32) -> &Record {
        self.arena.get(number)
    }

    /// Attributes of a block.
    #[inline]
    pub fn attributes(&self, number: u32) -> &Attributes<'static> {
        self.attributes.get(self.get(number).attributes)
    }

    /// Tokens of a block; empty if the block was announced by its key.
    pub fn tokens(&self, number: u32) -> &[u32] {
        self.arena.tokens(number)
    }

    /// Number of copies of a block in one announcement.
    pub fn count(&self, number: u32, announcement: u8) -> u32 {
        let first = (self.attributes(number).copies >> announcement & 1) as u32;
        first + self.extra_copies.get(&(number, announcement)).copied().unwrap_or(0)
    }

    /// Whether some of a block's copies in one announcement might not exist.
    pub fn is_uncertain(&self, number: u32, announcement: u8) -> bool {
        !self.uncertain.is_empty() && self.uncertain.contains(&(number, announcement))
    }

    /// Whether any copy is uncertain.
    pub fn has_uncertain_copies(&self) -> bool {
        !self.uncertain.is_empty()
    }

    /// Total number of copies of a block in the given announcements.
    pub fn count_on(&self, number: u32, announcements: u64) -> u32 {
        let copies = self.attributes(number).copies & announcements;
        bits(copies).map(|announcement| self.count(number, announcement)).sum()
    }

    /// Whether a block certainly has a copy in one of these announcements.
    pub fn is_certain(&self, number: u32, announcements: u64) -> bool {
        let copies = self.attributes(number).copies & announcements;
        copies != 0 && !bits(copies).any(|announcement| self.is_uncertain(number, announcement))
    }

    /// Marks the copies of the block with this hash, in these announcements, as uncertain.
    pub fn mark_uncertain(&mut self, hash: u64, announcements: u64) {
        if let Some(number) = self.find(hash)
            && let Some(announcement) = bits(self.attributes(number).copies & announcements).next()
        {
            self.uncertain.insert((number, announcement));
        }
    }

    fn make_certain(&mut self, number: u32, announcements: u64) {
        for announcement in bits(announcements) {
            self.uncertain.remove(&(number, announcement));
        }
        if self.uncertain.is_empty() {
            self.uncertain = HashSet::new();
        }
    }

    /// Marks the copies of each block as uncertain, in one announcement for each placement.
    pub fn mark_all_uncertain(&mut self, known: &Announcements) {
        for &number in &self.live {
            let mut copies = self.attributes(number).copies;
            while copies != 0 {
                let announcement = copies.trailing_zeros() as u8;
                self.uncertain.insert((number, announcement));
                copies &= !known.on_placement_of(announcement);
            }
        }
    }

    /// The announcements that have copies, as bits.
    pub fn all_copies(&self) -> u64 {
        let copies = self.live.iter().map(|&number| self.attributes(number).copies);
        copies.fold(0, |all, copies| all | copies)
    }

    /// The dead blocks.
    pub fn iter_dead(&self) -> impl Iterator<Item = u32> + '_ {
        self.dead.iter().copied()
    }

    /// Returns the live block with this hash. If several live blocks have the hash, returns the latest.
    #[inline]
    pub fn find(&self, hash: u64) -> Option<u32> {
        if let Some(list) = self.collisions.get(hash) {
            return list.last().copied();
        }
        let found = self
            .live
            .find(self.secret.place(hash), |&number| self.get(number).hash == hash);
        found.copied()
    }

    // --- stores

    /// Adds one copy of a block.
    pub fn store(&mut self, block: &NewBlock<'_>) -> StoreOutcome {
        let place = self.secret.place(block.hash);
        let (mut has_hash, mut found, mut looks) = (None, None, 0);
        for &number in self.live.iter_hash(place) {
            let Record { hash, key, .. } = *self.get(number);
            if hash == block.hash {
                looks += usize::from(has_hash.is_some());
                has_hash = Some(number);
                if key == block.key && self.attributes(number).context == block.context {
                    found = has_hash;
                    break;
                }
            }
        }
        self.collisions.spend(looks);
        if let Some(number) = found {
            self.add_copy(number, block.announcement, block.single);
            self.collisions.make_newest(block.hash, number);
            return StoreOutcome::Known(number);
        }
        let alike = self.collisions.get(block.hash);
        if has_hash.is_some() && alike.is_some_and(|list| list.len() >= BLOCKS_PER_HASH) {
            return StoreOutcome::Refused;
        }
        let number = match self.revive(block) {
            Some(number) => number,
            None => self.insert(block),
        };
        hash_table::insert(&mut self.live, number, live_place(&self.arena, self.secret));
        let Some(other) = has_hash else {
            return StoreOutcome::New(number);
        };
        self.collisions.add(block.hash, other, number);
        StoreOutcome::Known(number)
    }

    /// Whether a block has a copy in these announcements.
    pub fn holds(&self, block: &NewBlock<'_>, announcements: u64) -> bool {
        self.live.iter_hash(self.secret.place(block.hash)).any(|&number| {
            let (record, attributes) = (self.get(number), self.attributes(number));
            (record.hash, record.key, attributes.context) == (block.hash, block.key, block.context)
                && attributes.copies & announcements != 0
        })
    }

    fn retain(&mut self, block: &NewBlock<'_>) -> u32 {
        self.attributes.retain(&Attributes {
            context: block.context,
            namespace: block.namespace.clone(),
            copies: 1 << block.announcement,
            origin: block.announcement,
        })
    }

    fn insert(&mut self, block: &NewBlock<'_>) -> u32 {
        let record = Record {
            hash: block.hash,
            key: block.key,
            parent: block.parent,
            children: 0,
            attributes: self.retain(block),
        };
        if block.parent != ROOT {
            self.arena.get_mut(block.parent).children += 1;
        }
        self.arena.insert(record, block.tokens)
    }

    /// If a dead ancestor equals this block, adds a copy to the ancestor. Returns the ID of the ancestor.
    fn revive(&mut self, block: &NewBlock<'_>) -> Option<u32> {
        if self.dead.is_empty() {
            return None;
        }
        let is_block = |&number: &u32| {
            let Record { hash, key, .. } = *self.get(number);
            hash == block.hash && key == block.key && self.attributes(number).context == block.context
        };
        let place = self.secret.place(block.hash ^ block.key.rotate_left(32));
        let number = *self.dead.find(place, is_block)?;
        self.remove_dead(number);
        let attributes = self.retain(block);
        let before = std::mem::replace(&mut self.arena.get_mut(number).attributes, attributes);
        self.attributes.release(before);
        Some(number)
    }

    /// Adds a copy of a block, unless the block has a copy in the announcements `single`. If the first announcement of the block is in
    /// `single`, the copy is added to that announcement: an export begins with it, and it then announces the only copy.
    pub fn add_copy(&mut self, number: u32, announcement: u8, single: u64) {
        let Attributes { copies, origin, .. } = *self.attributes(number);
        if copies & single != 0 {
            if self.has_uncertain_copies() {
                self.make_certain(number, copies & single);
            }
            return;
        }
        let announcement = if single >> origin & 1 != 0 { origin } else { announcement };
        if copies >> announcement & 1 == 0 {
            self.set_copies(number, copies | 1 << announcement);
        } else {
            *self.extra_copies.entry((number, announcement)).or_default() += 1;
            self.extra_count += 1;
            self.uncertain.remove(&(number, announcement));
        }
    }

    fn set_copies(&mut self, number: u32, copies: u64) {
        let record = self.arena.get_mut(number);
        record.attributes = self.attributes.replace_copies(record.attributes, copies);
    }

    // --- LoRAs

    /// Records whether a stored block of a LoRA belongs to the weights that are loaded now, as `ReplacedLoras::note` decides. `parent` is a
    /// block or `ROOT`. `on_device` are the announcements on the placement of the store, if this placement is on the device. `is_held` is
    /// whether that placement held the block before.
    pub fn note_lora(&mut self, number: u32, parent: u32, is_known: bool, on_device: Option<u64>, is_held: bool) -> bool {
        let Some(lora) = lora_of(self.attributes(number).context) else {
            return true;
        };
        // A block below the device is listed too, since a store without tokens can add a copy of it on the device.
        let has_twin = self.list_of_lora(number, lora, on_device.unwrap_or(0));
        self.loras.note(&StoredBlock {
            lora,
            record: number,
            parent: (parent != ROOT).then_some(parent),
            is_known,
            is_on_device: on_device.is_some(),
            has_current_twin: has_twin && !is_held,
        })
    }

    /// Lists a block of a LoRA by its key, and removes outdated blocks with that key from the list. Returns whether another block with that
    /// key has a copy in these announcements and is not outdated.
    fn list_of_lora(&mut self, number: u32, lora: u64, announcements: u64) -> bool {
        let (key, context) = (self.get(number).key, self.attributes(number).context);
        let (mut is_listed, mut has_twin, mut outdated, mut looks) = (false, false, Vec::new(), 0);
        for &other in self.of_loras.iter_hash(self.secret.place(key)) {
            if other == number {
                is_listed = true;
                continue;
            }
            looks += 1;
            let attributes = self.attributes(other);
            if self.get(other).key == key && attributes.context == context {
                if self.loras.is_outdated(lora, other) {
                    outdated.push(other);
                }
                has_twin |= attributes.copies & announcements != 0 && !self.loras.is_outdated(lora, other);
            }
        }
        self.collisions.spend(looks);
        outdated.into_iter().for_each(|other| self.unlist_of_lora(other));
        if !is_listed {
            hash_table::insert(&mut self.of_loras, number, lora_place(&self.arena, self.secret));
        }
        has_twin
    }

    fn unlist_of_lora(&mut self, number: u32) {
        hash_table::remove(&mut self.of_loras, number, lora_place(&self.arena, self.secret));
    }

    /// Whether a block might have been computed with former weights of a LoRA.
    pub fn is_outdated(&self, number: u32) -> bool {
        lora_of(self.attributes(number).context).is_some_and(|lora| self.loras.is_outdated(lora, number))
    }

    /// The replaced LoRAs that have outdated blocks, each with the ID of one of these blocks. The choice of the block does not depend on
    /// the history of the stream.
    pub fn replaced_loras(&self) -> BTreeMap<u64, u32> {
        let mut found = BTreeMap::new();
        if !self.loras.is_empty() {
            let order = |number: u32| (self.get(number).hash, self.get(number).key);
            for &number in self.live.iter().filter(|&&number| self.is_outdated(number)) {
                let first = found.entry(self.attributes(number).context.lora).or_insert(number);
                if order(number) < order(*first) {
                    *first = number;
                }
            }
        }
        found
    }

    // --- removals

    /// Removes one copy of the oldest block that has this hash and a copy on the placement. A copy at the exact location is removed first.
    /// Returns whether such a copy existed.
    pub fn remove(&mut self, hash: u64, removable: RemovalScope) -> bool {
        let has_copy = |number: &u32| self.attributes(*number).copies & removable.placement != 0;
        let (found, looks) = match self.collisions.get(hash) {
            Some(list) => match list.iter().position(has_copy) {
                Some(at) => (Some(list[at]), at),
                None => (None, list.len()),
            },
            None => (self.find(hash).filter(has_copy), 0),
        };
        self.collisions.spend(looks);
        let Some(number) = found else { return false };
        let copies = self.attributes(number).copies;
        let exact = copies & removable.exact;
        let candidates = if exact != 0 { exact } else { copies & removable.placement };
        let announcement = candidates.trailing_zeros() as u8;
        if let Some(extra) = self.extra_copies.get_mut(&(number, announcement)) {
            *extra -= 1;
            self.extra_count -= 1;
            if *extra == 0 {
                self.extra_copies.remove(&(number, announcement));
                self.shrink_extra_copies();
            }
            self.uncertain.insert((number, announcement));
        } else {
            self.keep_copies(number, copies & !(1 << announcement));
            let left = copies & removable.placement & !(1 << announcement);
            if left != 0 {
                self.uncertain.insert((number, left.trailing_zeros() as u8));
            }
        }
        true
    }

    /// Removes all copies in these announcements.
    pub fn clear(&mut self, announcements: u64) {
        let mut found: Vec<u32> = (self.live.iter().copied())
            .filter(|&number| self.attributes(number).copies & announcements != 0)
            .collect();
        found.sort_unstable(); // so that equal states take equal memory
        for number in found {
            let copies = self.attributes(number).copies;
            for announcement in bits(copies & announcements) {
                self.extra_count -= self.extra_copies.remove(&(number, announcement)).unwrap_or(0) as usize;
            }
            self.keep_copies(number, copies & !announcements);
        }
        self.shrink_extra_copies();
    }

    fn shrink_extra_copies(&mut self) {
        let (length, capacity) = (self.extra_copies.len(), self.extra_copies.capacity());
        if length == 0 {
            self.extra_copies = HashMap::new();
        } else if capacity > 64 && length * 4 < capacity {
            self.extra_copies.shrink_to(length * 2);
        }
    }

    /// Removes all copies of a block except `copies`. If the block has no copy then, it is removed, or becomes dead if it has children.
    fn keep_copies(&mut self, number: u32, copies: u64) {
        if self.has_uncertain_copies() {
            self.make_certain(number, self.attributes(number).copies & !copies);
        }
        if copies != 0 {
            return self.set_copies(number, copies);
        }
        let Record { hash, children, .. } = *self.get(number);
        hash_table::remove(&mut self.live, number, live_place(&self.arena, self.secret));
        if let Some(lora) = lora_of(self.attributes(number).context) {
            self.unlist_of_lora(number);
            self.loras.remove(lora, number);
        }
        if self.live.is_empty() {
            self.loras = ReplacedLoras::default();
        }
        self.collisions.remove(hash, number);
        if children == 0 {
            return self.free(number);
        }
        self.set_copies(number, 0);
        hash_table::insert(&mut self.dead, number, dead_place(&self.arena, self.secret));
    }

    /// Removes a block, and all dead ancestors that only this block needed.
    fn free(&mut self, mut number: u32) {
        loop {
            let Record { parent, attributes, .. } = *self.get(number);
            self.arena.remove(number);
            self.attributes.release(attributes);
            if parent == ROOT {
                return;
            }
            let record = self.arena.get_mut(parent);
            record.children -= 1;
            if record.children > 0 || self.attributes(parent).copies != 0 {
                return;
            }
            self.remove_dead(parent);
            number = parent;
        }
    }

    fn remove_dead(&mut self, number: u32) {
        hash_table::remove(&mut self.dead, number, dead_place(&self.arena, self.secret));
    }
}
