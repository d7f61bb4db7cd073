//! The blocks of a stream: those with copies, and those that only hold a place in a chain.

use std::collections::HashMap;

use hashbrown::HashTable;

use crate::core::Secret;
use crate::stream::MAX_SAME_HASH;
use crate::table::{Spot, Stage, Table};

use super::naming::{Identity, Namings, Spelled};
use super::shelf::Shelf;

/// No block: the root.
pub const NONE: u32 = u32::MAX;

/// One block.
#[derive(Clone, Copy, Debug, Default)]
pub struct Node {
    /// The engine's hash.
    pub hash: u64,
    /// Its block key.
    pub key: u64,
    /// Manners in which there are copies; none of a dead ancestor.
    pub mask: u64,
    /// Number of the block before it, or `NONE`.
    pub parent: u32,
    /// Blocks that have it as their parent.
    pub children: u32,
    /// Number of its naming.
    pub naming: u32,
    /// Number of its tokens.
    pub slot: u32,
    /// The manner of its first store with tokens.
    pub home: u8,
}

/// A block that is to be placed.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Block<'a> {
    pub hash: u64,
    pub key: u64,
    pub parent: u32,
    pub identity: Identity,
    /// Number of its naming, which is retained meanwhile.
    pub naming: u32,
    /// As many as its scheme's window.
    pub tokens: &'a [u32],
    pub manner: u8,
}

/// Dead ancestors whose room is kept, since chains come and go.
const DEAD_KEPT: usize = 500;
/// Blocks, and tokens, of a chunk: as many as a span of pages has room for.
const CHUNK_NODES: usize = 512;
const CHUNK_TOKENS: usize = 6144;

type Tokens = Shelf<u32, CHUNK_TOKENS>;

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// A block whose hash was unknown.
    Fresh(u32),
    /// Any other.
    Known(u32),
    /// There are too many with its hash.
    Refused,
    /// There are as many blocks as numbers.
    Full,
}

/// See the module.
#[derive(Debug)]
pub struct Blocks {
    nodes: Shelf<Node, CHUNK_NODES>,
    /// By the window of a scheme.
    shelves: Vec<Tokens>,
    /// Blocks with copies, by hash.
    table: Table,
    /// Those without, by hash and key.
    dead: HashTable<u32>,
    /// Of hashes with several blocks all that have copies, the newest last.
    several: HashMap<u64, Vec<u32>>,
    /// Copies beyond the first.
    copies: HashMap<(u32, u8), u32>,
    extra: usize,
    namings: Namings,
    secret: Secret,
}

impl Default for Blocks {
    fn default() -> Self {
        Self {
            nodes: Shelf::new(1),
            shelves: Vec::new(),
            table: Table::dense(),
            dead: HashTable::new(),
            several: HashMap::new(),
            copies: HashMap::new(),
            extra: 0,
            namings: Namings::default(),
            secret: Secret::new(),
        }
    }
}

/// Numbers of the bits that are set.
pub fn bits(mut mask: u64) -> impl Iterator<Item = u8> {
    std::iter::from_fn(move || {
        let bit = mask.trailing_zeros();
        mask &= mask.wrapping_sub(1);
        (bit < 64).then_some(bit as u8)
    })
}

impl Blocks {
    /// Blocks with copies.
    pub fn live(&self) -> usize {
        self.table.len()
    }

    /// Blocks without.
    pub fn dead(&self) -> usize {
        self.dead.len()
    }

    /// Copies beyond the first of each block and manner.
    pub fn extra(&self) -> usize {
        self.extra
    }

    /// Bytes of names and extra keys.
    pub fn named(&self) -> usize {
        self.namings.held()
    }

    /// Sizes of windows that have memory.
    pub fn windows(&self) -> usize {
        self.shelves.len()
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.nodes.bytes()
            + self.shelves.iter().map(Shelf::bytes).sum::<usize>()
            + self.shelves.capacity() * size_of::<Tokens>()
            + self.table.bytes()
            + self.dead.allocation_size()
            + self.several.capacity() * (size_of::<(u64, Vec<u32>)>() + 1)
            + self.several.values().map(|list| list.capacity() * 4).sum::<usize>()
            + self.copies.capacity() * (size_of::<((u32, u8), u32)>() + 1)
            + self.namings.bytes()
    }

    /// One more than the highest number, or more.
    pub fn bound(&self) -> usize {
        self.nodes.bound()
    }

    /// Every block, dead ones too, by number.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.nodes.numbers()
    }

    /// The block `number`.
    #[inline]
    pub fn get(&self, number: u32) -> &Node {
        &self.nodes.get(number)[0]
    }

    #[inline]
    fn get_mut(&mut self, number: u32) -> &mut Node {
        &mut self.nodes.get_mut(number)[0]
    }

    /// Who a block is.
    pub fn identity(&self, number: u32) -> Identity {
        self.namings.get(self.get(number).naming).identity
    }

    /// What is said of its namespace.
    pub fn spelled(&self, number: u32) -> Spelled<'_> {
        self.namings.get(self.get(number).naming).naming.view()
    }

    /// Its tokens.
    pub fn tokens(&self, number: u32) -> &[u32] {
        let node = self.get(number);
        self.shelves[self.namings.get(node.naming).shelf as usize].get(node.slot)
    }

    /// Copies in one manner.
    pub fn count(&self, number: u32, manner: u8) -> u32 {
        let held = (self.get(number).mask >> manner & 1) as u32;
        held + self.copies.get(&(number, manner)).copied().unwrap_or(0)
    }

    /// Hashes with several blocks that have copies, the newest last.
    pub fn several(&self) -> &HashMap<u64, Vec<u32>> {
        &self.several
    }

    /// Blocks without copies.
    pub fn each_dead(&self) -> impl Iterator<Item = u32> + '_ {
        self.dead.iter().copied()
    }

    #[inline]
    fn spot(&self, hash: u64) -> Spot {
        Spot::from(self.secret.place(hash))
    }

    /// Asks for the memory that is looked at for a hash.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        self.table.prefetch(self.spot(hash), Stage::Bucket);
    }

    /// The block that `hash` means, the most recently stored one of several.
    #[inline]
    pub fn newest(&self, hash: u64) -> Option<u32> {
        if !self.several.is_empty()
            && let Some(list) = self.several.get(&hash)
        {
            return list.last().copied();
        }
        self.table.find(self.spot(hash), |number| self.get(number).hash == hash)
    }

    /// One copy more of a block.
    #[inline]
    pub fn place(&mut self, block: &Block<'_>) -> Placed {
        let spot = self.spot(block.hash);
        let seat = self.table.seat(spot);
        let (mut known, mut own) = (None, None);
        self.table.for_each_match_at(seat, |number| {
            let node = self.get(number);
            if node.hash == block.hash {
                known = Some(number);
                if node.key == block.key && self.identity(number) == block.identity {
                    own = known;
                }
            }
            own.is_none()
        });
        if let Some(number) = own {
            self.copy(number, block.manner);
            self.renew(block.hash, number);
            return Placed::Known(number);
        }
        if known.is_some() && self.several.get(&block.hash).is_some_and(|list| list.len() >= MAX_SAME_HASH) {
            return Placed::Refused;
        }
        let Some(number) = self.revived(block).or_else(|| self.made(block)) else {
            return Placed::Full;
        };
        let (nodes, secret) = (&self.nodes, self.secret);
        self.table
            .insert_at(seat, spot, number, &|other: u32| secret.place(nodes.get(other)[0].hash));
        match known {
            None => Placed::Fresh(number),
            Some(other) => {
                self.several.entry(block.hash).or_insert_with(|| vec![other]).push(number);
                Placed::Known(number)
            }
        }
    }

    /// The number of a naming, to be released.
    #[inline]
    pub fn name(&mut self, identity: Identity, spelled: &Spelled<'_>) -> u32 {
        let shelves = &mut self.shelves;
        self.namings
            .retain(identity, spelled, || shelf_of(shelves, identity.scheme.window()))
    }

    /// Gives back what `name` retained.
    #[inline]
    pub fn unname(&mut self, number: u32) {
        self.namings.release(number);
    }

    fn made(&mut self, block: &Block<'_>) -> Option<u32> {
        let shelf = &mut self.shelves[self.namings.get(block.naming).shelf as usize];
        let slot = shelf.take()?;
        shelf.get_mut(slot).copy_from_slice(block.tokens);
        let number = self.nodes.take()?;
        self.namings.add(block.naming);
        *self.get_mut(number) = Node {
            hash: block.hash,
            key: block.key,
            mask: 1 << block.manner,
            parent: block.parent,
            children: 0,
            naming: block.naming,
            slot,
            home: block.manner,
        };
        if block.parent != NONE {
            self.get_mut(block.parent).children += 1;
        }
        Some(number)
    }

    fn buried(&self, hash: u64, key: u64) -> u64 {
        self.secret.place(hash ^ key.rotate_left(32))
    }

    /// A dead ancestor that is this block.
    #[inline]
    fn revived(&mut self, block: &Block<'_>) -> Option<u32> {
        if self.dead.is_empty() {
            return None;
        }
        let place = self.buried(block.hash, block.key);
        let (nodes, namings) = (&self.nodes, &self.namings);
        let same = |&number: &u32| {
            let node = &nodes.get(number)[0];
            node.hash == block.hash && node.key == block.key && namings.get(node.naming).identity == block.identity
        };
        let number = self.dead.find_entry(place, same).ok()?.remove().0;
        self.shrink_dead();
        let node = self.get_mut(number);
        (node.mask, node.home) = (1 << block.manner, block.manner);
        Some(number)
    }

    /// Makes a block the newest of its hash.
    fn renew(&mut self, hash: u64, number: u32) {
        if self.several.is_empty() {
            return;
        }
        if let Some(list) = self.several.get_mut(&hash)
            && let Some(at) = list.iter().rposition(|&other| other == number)
        {
            list.remove(at);
            list.push(number);
        }
    }

    /// One copy more of a block that there is.
    #[inline]
    pub fn copy(&mut self, number: u32, manner: u8) {
        let node = self.get_mut(number);
        if node.mask >> manner & 1 == 0 {
            node.mask |= 1 << manner;
        } else {
            *self.copies.entry((number, manner)).or_default() += 1;
            self.extra += 1;
        }
    }

    /// Takes one copy from the oldest block of `hash` that has one in any manner of `plane`; one in a manner of `exact`, if it has
    /// such. Says whether there was one.
    #[inline]
    pub fn remove(&mut self, hash: u64, exact: u64, plane: u64) -> bool {
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
    fn settle(&mut self, number: u32) {
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
            let shelf = self.namings.release(naming);
            self.shelves[shelf as usize].give(slot);
            self.nodes.give(number);
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
        if self.nodes.len() == 0 && self.namings.is_empty() {
            self.shelves = Vec::new();
        }
    }

    fn exhume(&mut self, number: u32) {
        let Node { hash, key, .. } = *self.get(number);
        if let Ok(found) = self.dead.find_entry(self.buried(hash, key), |&other| other == number) {
            found.remove();
        }
        self.shrink_dead();
    }

    fn shrink_dead(&mut self) {
        let (length, capacity) = (self.dead.len(), self.dead.capacity());
        if capacity > DEAD_KEPT && length * 4 < capacity {
            let (nodes, secret) = (&self.nodes, self.secret);
            self.dead.shrink_to(length * 2, |&other| {
                let node = &nodes.get(other)[0];
                secret.place(node.hash ^ node.key.rotate_left(32))
            });
        }
    }
}

/// The number of the shelf for tokens of so many a block.
fn shelf_of(shelves: &mut Vec<Tokens>, window: usize) -> u32 {
    let found = shelves.iter().position(|shelf| shelf.width() == window);
    found.unwrap_or_else(|| {
        shelves.push(Shelf::new(window));
        shelves.len() - 1
    }) as u32
}
