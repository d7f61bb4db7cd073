//! Blocks that nobody had to look into yet: as they were stored, without keys.
//!
//! Most blocks come once, and go, without anybody asking who they are. So a store whose hashes are all unknown is kept as it came, in
//! stretches of up to `MOST` blocks: a table entry for each of them, a bit for its copy, and all tokens in one piece. A stretch ends
//! behind its last block with a copy, or with another stretch on it: those before are ancestors, whose tokens count. Whoever has to
//! know a block itself, and not only whether its hash is there, places its stretch in the tree, and all that it hangs on: that is where
//! a hash comes again, a copy is on a second tier, or a snapshot is told. A block is in one of the two, and so is a hash.

mod keeping;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use kvevents_index::core::Secret;
use kvevents_index::hashed;

use super::super::slots::Slots;
use super::NONE;

/// Blocks of a stretch: the bits of a word.
const MOST: usize = 64;
/// Bits of a number that say which block of its stretch.
const BITS: u32 = MOST.ilog2();
/// Stretches that hang on one. Where many chains begin alike, all that they share is placed.
const CHILDREN: u8 = 4;
/// Blocks that a stretch has memory for, to one that it has, from which on it is copied to less.
const SPARSE: usize = 4;
/// Numbers of 32 bits that a hash takes.
const HASH: usize = 2;

/// On what a stretch hangs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Above {
    /// Nothing.
    #[default]
    Root,
    /// A block of the tree, by its number.
    Placed(u32),
    /// One of a stretch.
    Kept(u32),
}

/// Blocks that are to be kept.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Fresh<'a> {
    pub hashes: &'a [u64],
    /// Those of all blocks, one after the other, and how many a block has.
    pub tokens: &'a [u32],
    pub width: usize,
    pub above: Above,
    /// Number of their naming, which is retained meanwhile.
    pub naming: u32,
    pub manner: u8,
}

/// What a removal leaves of a stretch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// All of it: there was no such copy.
    Same,
    /// A block less in its middle has a copy.
    Hole,
    /// The last block is gone.
    Shorter,
    /// The last block has no copy, but something hangs on it, or on one before.
    Dead,
}

#[derive(Debug)]
struct Stretch {
    /// The hashes, in two halves each, and behind them the tokens.
    data: Box<[u32]>,
    /// A bit for each block with a copy.
    live: u64,
    /// `MOST` for each that came before it.
    born: u64,
    above: Above,
    naming: u32,
    /// The first of those that hang on it; the others of those that hang on the same one.
    child: u32,
    next: u32,
    before: u32,
    children: u8,
    /// Blocks, and how many there is memory for.
    length: u8,
    room: u8,
    manner: u8,
}

impl Default for Stretch {
    fn default() -> Self {
        Self {
            data: Box::default(),
            live: 0,
            born: 0,
            above: Above::Root,
            naming: 0,
            child: NONE,
            next: NONE,
            before: NONE,
            children: 0,
            length: 0,
            room: 0,
            manner: 0,
        }
    }
}

impl Stretch {
    #[inline]
    fn hash(&self, at: usize) -> u64 {
        self.data[HASH * at..].first_chunk().map_or(0, |&halves| whole(halves))
    }

    /// Tokens of a block.
    fn width(&self) -> usize {
        self.data.len() / usize::from(self.room).max(1) - HASH
    }

    fn tokens(&self, at: usize) -> &[u32] {
        let width = self.width();
        &self.data[HASH * usize::from(self.room) + at * width..][..width]
    }

    /// Whether its last block has a copy.
    fn ends_live(&self) -> bool {
        self.length > 0 && self.live >> (self.length - 1) & 1 != 0
    }

    /// What a removal in `plane` leaves of it.
    #[inline]
    fn left(&self, at: usize, plane: u64) -> Left {
        if self.live >> at & 1 == 0 || plane >> self.manner & 1 == 0 {
            Left::Same
        } else if at + 1 < usize::from(self.length) {
            Left::Hole
        } else if self.children == 0 {
            Left::Shorter
        } else {
            Left::Dead
        }
    }

    /// Writes blocks behind those that it has.
    #[inline]
    fn write(&mut self, hashes: &[u64], tokens: &[u32], width: usize) {
        let (length, room) = (usize::from(self.length), usize::from(self.room));
        let end = length + hashes.len();
        if length == 0 {
            let mut data = Vec::with_capacity(HASH * end + tokens.len());
            data.extend(hashes.iter().flat_map(|&hash| halves(hash)));
            data.extend_from_slice(tokens);
            (self.data, self.room) = (data.into(), end as u8);
            return;
        }
        if end > room {
            self.resize(MOST.min(end + length - 1), width);
        }
        let (before, behind) = self.data.split_at_mut(HASH * usize::from(self.room));
        for (place, hash) in before[HASH * length..].chunks_exact_mut(HASH).zip(hashes) {
            place.copy_from_slice(&halves(*hash));
        }
        behind[length * width..end * width].copy_from_slice(tokens);
    }

    /// Has memory for `room` blocks, which it has no more of.
    fn resize(&mut self, room: usize, width: usize) {
        let (length, old) = (usize::from(self.length), usize::from(self.room));
        let mut data = Vec::with_capacity(room * (HASH + width));
        data.extend_from_slice(&self.data[..HASH * length]);
        data.resize(HASH * room, 0);
        data.extend_from_slice(&self.data[HASH * old..][..length * width]);
        data.resize(room * (HASH + width), 0);
        (self.data, self.room) = (data.into(), room as u8);
    }
}

/// See the module.
#[derive(Debug)]
pub struct Stretches {
    all: Slots<Stretch>,
    /// Their blocks by hash, those without copies too.
    table: HashTable<Named>,
    live: usize,
    /// Numbers in `Stretch::data`.
    held: usize,
    /// The block that came last and its hash, as the table has it: most often the next one hangs on it. `NONE` for none.
    latest: (u64, u32),
    secret: Secret,
}

/// What the allocator takes for each piece of memory, about.
const PIECE_BYTES: usize = 16;

/// A hash in two halves, and the number of its block: to find or move it no other memory is looked at.
#[derive(Clone, Copy, Debug)]
struct Named([u32; HASH], u32);

#[inline]
fn halves(hash: u64) -> [u32; HASH] {
    [hash as u32, (hash >> 32) as u32]
}

#[inline]
fn whole([low, high]: [u32; HASH]) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

impl Stretches {
    pub fn new(secret: Secret) -> Self {
        Self {
            all: Slots::new(1 << (u32::BITS - BITS)),
            table: HashTable::new(),
            live: 0,
            held: 0,
            latest: (0, NONE),
            secret,
        }
    }

    /// Blocks with a copy.
    #[inline]
    pub fn live(&self) -> usize {
        self.live
    }

    /// Blocks without, on which others hang.
    #[inline]
    pub fn dead(&self) -> usize {
        self.table.len() - self.live
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.all.bytes() + self.table.allocation_size() + self.held * size_of::<u32>() + self.all.len() * PIECE_BYTES
    }

    /// The block of a hash, which may have no copy.
    #[inline]
    fn find(&self, hash: u64) -> Option<u32> {
        if self.latest.0 == hash && self.latest.1 != NONE {
            return Some(self.latest.1);
        }
        let found = self.table.find(self.secret.place(hash), |named| whole(named.0) == hash);
        found.map(|named| named.1)
    }

    /// Asks for what the removal of a hash needs.
    #[inline]
    pub fn prefetch(&self, hash: u64) {
        hashed::prefetch(&self.table, self.secret.place(hash));
    }

    /// Takes the copy of a block in a manner of `plane`, and the block if it was the last of a stretch and nothing hangs there: the
    /// stretch, and what came of it. None where the hash is not here.
    #[inline]
    fn remove(&mut self, hash: u64, plane: u64) -> Option<(u32, Left)> {
        let found = self.table.find_entry(self.secret.place(hash), |named| whole(named.0) == hash);
        let entry = found.ok()?;
        let number = entry.get().1;
        let (stretch, at) = (number >> BITS, number as usize % MOST);
        let it = self.all.get_mut(stretch);
        let left = it.left(at, plane);
        if left != Left::Same {
            it.live &= !(1 << at);
            self.live -= 1;
        }
        if left == Left::Shorter {
            it.length -= 1;
            entry.remove();
            if number == self.latest.1 {
                self.latest.1 = NONE;
            }
            self.shrink();
        }
        Some((stretch, left))
    }

    /// Gives memory back that a stretch needs no more, if that is most of what it has.
    #[inline]
    fn tidy(&mut self, stretch: u32) {
        let it = self.all.get_mut(stretch);
        if SPARSE * usize::from(it.length) <= usize::from(it.room) {
            let before = it.data.len();
            it.resize(it.length.into(), it.width());
            self.held -= before - it.data.len();
        }
    }

    fn is_live(&self, number: u32) -> bool {
        self.all.get(number >> BITS).live >> (number as usize % MOST) & 1 != 0
    }

    /// The stretch that ends with the block on which others hang, and its blocks, where it can go on with those.
    #[inline]
    fn end(&self, above: Above, fresh: &Fresh<'_>) -> Option<(u32, usize)> {
        let Above::Kept(block) = above else { return None };
        let (it, length) = (self.all.get(block >> BITS), block as usize % MOST + 1);
        let goes_on = length == usize::from(it.length) && length < MOST && it.children == 0;
        (goes_on && it.naming == fresh.naming && it.manner == fresh.manner).then_some((block >> BITS, length))
    }

    /// A new one, without blocks. None when there are as many as numbers.
    fn begin(&mut self, above: Above, fresh: &Fresh<'_>) -> Option<(u32, usize)> {
        let stretch = Stretch {
            above,
            naming: fresh.naming,
            manner: fresh.manner,
            ..Stretch::default()
        };
        Some((self.all.put(stretch)?, 0))
    }

    /// Adds blocks to a stretch up to the first one whose hash is here: how many.
    #[inline]
    fn extend(&mut self, stretch: u32, hashes: &[u64], tokens: &[u32], width: usize) -> usize {
        let it = self.all.get_mut(stretch);
        let before = it.data.len();
        it.write(hashes, tokens, width);
        self.held += it.data.len() - before;
        let first = usize::from(it.length);
        let kept = self.enter(stretch << BITS | first as u32, hashes);
        let it = self.all.get_mut(stretch);
        it.length += kept as u8;
        if kept > 0 {
            it.live |= u64::MAX >> (MOST - kept) << first;
            self.latest = (hashes[kept - 1], stretch << BITS | (first + kept - 1) as u32);
        }
        self.live += kept;
        if kept < hashes.len() && first + kept > 0 {
            self.tidy(stretch);
        }
        kept
    }

    /// Enters hashes for the blocks `number` and those behind it up to the first one that is known: how many.
    #[inline]
    fn enter(&mut self, number: u32, hashes: &[u64]) -> usize {
        let secret = self.secret;
        hashed::reserve(&mut self.table, hashes.len(), |named| secret.place(whole(named.0)));
        for (at, &hash) in hashes.iter().enumerate() {
            let same = |named: &Named| whole(named.0) == hash;
            match self
                .table
                .entry(secret.place(hash), same, |named| secret.place(whole(named.0)))
            {
                Entry::Vacant(vacant) => vacant.insert(Named(halves(hash), number + at as u32)),
                Entry::Occupied(_) => return at,
            };
        }
        hashes.len()
    }

    /// Forgets the hashes of a stretch from `first` on.
    #[inline]
    fn leave(&mut self, stretch: u32, first: usize) {
        if self.latest.1 >> BITS == stretch {
            self.latest.1 = NONE;
        }
        let it = self.all.get(stretch);
        for at in first..it.length.into() {
            let hash = it.hash(at);
            if let Ok(entry) = self.table.find_entry(self.secret.place(hash), |named| whole(named.0) == hash) {
                entry.remove();
            }
        }
        self.shrink();
    }

    #[inline]
    fn shrink(&mut self) {
        let secret = self.secret;
        hashed::shrink(&mut self.table, |named| secret.place(whole(named.0)));
    }

    fn hang(&mut self, stretch: u32) {
        let it = self.all.get_mut(stretch);
        if let Above::Kept(block) = it.above {
            let above = self.all.get_mut(block >> BITS);
            above.children += 1;
            let next = std::mem::replace(&mut above.child, stretch);
            self.all.get_mut(stretch).next = next;
            if next != NONE {
                self.all.get_mut(next).before = stretch;
            }
        }
    }

    fn unhang(&mut self, above: u32, next: u32, before: u32) {
        let above = self.all.get_mut(above);
        above.children -= 1;
        if before == NONE {
            above.child = next;
        } else {
            self.all.get_mut(before).next = next;
        }
        if next != NONE {
            self.all.get_mut(next).before = before;
        }
    }

    /// The stretches that hang on one.
    fn children(&self, stretch: u32) -> impl Iterator<Item = u32> + '_ {
        let some = |number: u32| (number != NONE).then_some(number);
        std::iter::successors(some(self.all.get(stretch).child), move |&at| some(self.all.get(at).next))
    }

    /// Blocks up to the last one that has a copy, or something on it.
    fn needed(&self, stretch: u32) -> usize {
        let it = self.all.get(stretch);
        let on = |child| match self.all.get(child).above {
            Above::Kept(block) => block as usize % MOST + 1,
            _ => 0,
        };
        let hung = if it.children == 0 {
            0
        } else {
            self.children(stretch).map(on).max().unwrap_or(0)
        };
        hung.max(MOST - it.live.leading_zeros() as usize)
    }

    fn drop(&mut self, stretch: u32) -> Stretch {
        let gone = self.all.take(stretch);
        self.held -= gone.data.len();
        gone
    }
}
