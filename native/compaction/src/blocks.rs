//! The blocks of a stream: those with copies, and those that only hold a place in a chain. How they come is here, how they go in a room
//! below, and in another one those that nobody had to look into.

mod leaving;
mod stretches;

use std::collections::HashMap;

use hashbrown::HashTable;

use kvevents_index::core::Secret;
use kvevents_index::stream::MAX_SAME_HASH;
use kvevents_index::table::{Spot, Stage, Table};

use super::naming::{Identity, NO_SHELF, Namings, Spelled, Stamp};
use super::shelf::Shelf;
use stretches::Stretches;

pub use stretches::Fresh;

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
    /// Number of its tokens, if it has any.
    pub slot: u32,
    /// Blocks that came before it, modulo 2^32: in this order they are told.
    pub born: u32,
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
    /// As many as its scheme's window, or none with a key that was told.
    pub tokens: &'a [u32],
    pub manner: u8,
}

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
    /// Those without, by hash and key, and how many have a hash.
    dead: HashTable<u32>,
    dead_hashes: HashMap<u64, u32>,
    /// Of hashes with several blocks all that have copies, the newest last.
    several: HashMap<u64, Vec<u32>>,
    /// Copies beyond the first.
    copies: HashMap<(u32, u8), u32>,
    extra: usize,
    namings: Namings,
    secret: Secret,
    births: u64,
    stretches: Stretches,
    full: bool,
}

impl Default for Blocks {
    fn default() -> Self {
        let secret = Secret::new();
        Self {
            nodes: Shelf::new(1),
            shelves: Vec::new(),
            table: Table::dense(),
            dead: HashTable::new(),
            dead_hashes: HashMap::new(),
            several: HashMap::new(),
            copies: HashMap::new(),
            extra: 0,
            namings: Namings::default(),
            secret,
            births: 0,
            stretches: Stretches::new(secret),
            full: false,
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
        self.table.len() + self.stretches.live()
    }

    /// Blocks without.
    pub fn dead(&self) -> usize {
        self.dead.len() + self.stretches.dead()
    }

    /// Whether there were more than numbers for them.
    pub fn is_full(&self) -> bool {
        self.full
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
            + self.dead_hashes.capacity() * (size_of::<(u64, u32)>() + 1)
            + self.several.capacity() * (size_of::<(u64, Vec<u32>)>() + 1)
            + self.several.values().map(|list| list.capacity() * 4).sum::<usize>()
            + self.copies.capacity() * (size_of::<((u32, u8), u32)>() + 1)
            + self.namings.bytes()
            + self.stretches.bytes()
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

    /// Its tokens; none of one that was told by its key.
    pub fn tokens(&self, number: u32) -> &[u32] {
        let node = self.get(number);
        let shelf = self.shelves.get(self.namings.get(node.naming).shelf as usize);
        shelf.map_or(&[], |shelf| shelf.get(node.slot))
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

    /// Asks for the memory that the tree is looked up in for these hashes.
    #[inline]
    pub fn prefetch<'a>(&self, hashes: impl Iterator<Item = &'a u64>) {
        if !self.table.is_empty() {
            hashes.for_each(|&hash| self.table.prefetch(self.spot(hash), Stage::Bucket));
        }
    }

    /// Asks for the memory that the removal of these hashes needs.
    #[inline]
    pub fn prefetch_leaving(&self, hashes: &[u64]) {
        if !self.stretches.is_empty() {
            hashes.iter().for_each(|&hash| self.stretches.prefetch(hash));
        }
        self.prefetch(hashes.iter());
    }

    /// The block that `hash` means, in the tree.
    #[inline]
    pub fn seek(&mut self, hash: u64) -> Option<u32> {
        self.look_into(hash);
        self.newest(hash)
    }

    /// The block of the tree that `hash` means, the most recently stored one of several.
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
        self.look_into(block.hash);
        self.place_in_tree(block)
    }

    #[inline]
    fn place_in_tree(&mut self, block: &Block<'_>) -> Placed {
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
        self.namings.retain(identity, spelled, || shelf_of(shelves, &identity))
    }

    /// The same without looking, where it is still there with this salt: whether it is.
    #[inline]
    pub fn name_again(&mut self, known: Stamp, salt: u64) -> bool {
        self.namings.retain_again(known, salt)
    }

    /// By what a naming is known again.
    #[inline]
    pub fn stamp(&self, number: u32) -> Stamp {
        self.namings.stamp(number)
    }

    /// Gives back what `name` retained.
    #[inline]
    pub fn unname(&mut self, number: u32) {
        self.namings.release(number);
    }

    fn made(&mut self, block: &Block<'_>) -> Option<u32> {
        let mut slot = NONE;
        if let Some(shelf) = self.shelves.get_mut(self.namings.get(block.naming).shelf as usize) {
            slot = shelf.take()?;
            shelf.get_mut(slot).copy_from_slice(block.tokens);
        }
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
            born: self.births as u32,
            home: block.manner,
        };
        self.births += 1;
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
        self.count_out(block.hash);
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
}

/// The number of the shelf for tokens of such blocks.
fn shelf_of(shelves: &mut Vec<Tokens>, identity: &Identity) -> u32 {
    if identity.is_keyed() {
        return NO_SHELF;
    }
    let window = identity.scheme.window();
    let found = shelves.iter().position(|shelf| shelf.width() == window);
    found.unwrap_or_else(|| {
        shelves.push(Shelf::new(window));
        shelves.len() - 1
    }) as u32
}
