//! The blocks of one stream by the engine's own hashes.

mod keeping;

use std::collections::HashMap;

use hashbrown::HashTable;

use crate::core::{ByHash, Core, Secret};
use crate::gate::{BLOCKS_PER_HOLD, Gate, Writer};
use crate::planes::Rules;
use crate::sets::{EMPTY, Move};
use crate::slab::Record;
use crate::table::{Reach, Seat, Spot, Stage, Table};
use crate::waiting::Queue;

pub use keeping::{Chain, Parent};

/// Blocks with one hash that a stream may hold: engines that hash pages without their prefix have thousands.
pub const MAX_SAME_HASH: usize = 1 << 16;

/// Sizes of blocks that are remembered of a stream, which has one, or two while it lies.
const MAX_SIZES: usize = 8;

/// A block under another hash than its record has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, packed(4))]
struct Foreign {
    hash: u64,
    number: u32,
}

/// What a stream was told and could not be used, counted.
#[derive(Clone, Debug, Default)]
pub struct Counters {
    /// Stores that were set aside, by kind of group and reason.
    pub rejected: HashMap<(String, &'static str), u64>,
    /// Removals of hashes that the stream does not hold.
    pub unknown: u64,
    /// Blocks that fell out of the waiting queue.
    pub dropped: u64,
    /// Blocks that the memory limit has cost.
    pub evicted: u64,
    /// Deliveries that came twice.
    pub duplicates: u64,
    /// Deliveries of an ended life.
    pub void: u64,
    /// Gaps.
    pub gaps: u64,
}

/// Kinds of groups that are counted under their own name; they are a peer's words.
const MAX_KINDS: usize = 64;

impl Counters {
    /// Counts a store that was set aside.
    pub fn reject(&mut self, kind: &str, reason: &'static str) {
        let known = self.rejected.len() < MAX_KINDS || self.rejected.contains_key(&(kind.into(), reason));
        let kind = if known { kind } else { "other" };
        *self.rejected.entry((kind.chars().take(64).collect(), reason)).or_default() += 1;
    }

    /// Adds those of a stream that has ended.
    pub fn add(&mut self, other: &Self) {
        for ((kind, reason), count) in &other.rejected {
            *self.rejected.entry((kind.clone(), reason)).or_default() += count;
        }
        self.unknown += other.unknown;
        self.dropped += other.dropped;
        self.evicted += other.evicted;
        self.duplicates += other.duplicates;
        self.void += other.void;
        self.gaps += other.gaps;
    }
}

/// One stream. Its writer has it locked, and the shared part besides while blocks change.
#[derive(Debug)]
pub struct Stream {
    /// Its number in the shared part.
    pub number: u32,
    /// Which life of the publisher.
    pub incarnation: i64,
    /// Number of the last batch; -1 before the first.
    pub last: i64,
    /// Blocks, however many planes each is on.
    pub blocks: usize,
    /// Order-free digest of what is resident.
    pub digest: u128,
    /// How its groups count.
    pub rules: Rules,
    /// What cannot be placed yet.
    pub waiting: Queue,
    /// What went wrong.
    pub counters: Counters,
    /// Removed from the index; whoever still has it must look it up again.
    pub gone: bool,
    /// Planes by what events call them.
    pub places: Vec<(Place, u16)>,
    /// Bytes that the index has counted for it.
    pub counted: usize,
    table: Table,
    foreign: HashTable<Foreign>,
    /// Of hashes with several blocks all of them, the newest last.
    several: HashMap<u64, Vec<u32>>,
    /// Copies beyond the first.
    copies: HashMap<(u32, u16), u32>,
    /// By plane, the part of a digest that it stands for.
    marks: Vec<u64>,
    /// By plane, blocks held there.
    held: Vec<usize>,
    /// Tokens per block that this life has told of.
    sizes: Vec<u32>,
    added: Move,
    removed: Move,
}

/// What an event calls a plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Bytes of the medium.
    pub medium: Option<Box<[u8]>>,
    /// Bytes of the locality.
    pub locality: Option<Box<[u8]>>,
    /// Bytes of the ownership.
    pub ownership: Option<Box<[u8]>>,
    /// Its group.
    pub group: i64,
}

/// One copy's part of a digest.
#[inline]
fn mark(hash: u64, key: u64, plane: u64) -> u128 {
    let fold = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        (product as u64) ^ ((product >> 64) as u64)
    };
    let low = fold(hash ^ 0xA076_1D64_78BD_642F, key ^ plane ^ 0xE703_7ED1_A0B4_28DB);
    let high = fold(hash ^ plane ^ 0x8EBC_6AF0_9C88_C6E3, key ^ 0x5899_65CC_7537_4CC3);
    u128::from(fold(high ^ 0x1D8E_4E27_C47D_124F, low | 1)) << 64 | u128::from(low)
}

impl Stream {
    /// A stream without blocks.
    pub fn new(number: u32, incarnation: i64) -> Self {
        Self {
            number,
            incarnation,
            last: -1,
            blocks: 0,
            digest: 0,
            rules: Rules::default(),
            waiting: Queue::default(),
            counters: Counters::default(),
            gone: false,
            places: Vec::new(),
            counted: 0,
            table: Table::dense(),
            foreign: HashTable::new(),
            several: HashMap::new(),
            copies: HashMap::new(),
            marks: Vec::new(),
            held: Vec::new(),
            sizes: Vec::new(),
            added: Move::default(),
            removed: Move::default(),
        }
    }

    /// Heap bytes, about.
    pub fn bytes(&self) -> usize {
        self.table.bytes()
            + self.foreign.allocation_size()
            + self.several.capacity() * (size_of::<(u64, Vec<u32>)>() + 1)
            + self.several.values().map(|list| list.capacity() * 4).sum::<usize>()
            + self.copies.capacity() * (size_of::<((u32, u16), u32)>() + 1)
            + self.waiting.bytes()
    }

    /// Copies beyond the first of each block and plane.
    pub fn copies(&self) -> usize {
        self.copies.values().map(|&extra| extra as usize).sum()
    }

    /// Blocks held on each plane.
    pub fn held(&self) -> &[usize] {
        &self.held
    }

    /// Tokens per block that this life has told of, as far as they are remembered.
    pub fn sizes(&self) -> &[u32] {
        &self.sizes
    }

    /// Notes how a life cuts its blocks.
    #[inline]
    pub fn cut_by(&mut self, size: u32) {
        if !self.sizes.contains(&size) && self.sizes.len() < MAX_SIZES {
            self.sizes.push(size);
        }
    }

    /// Begins a life of another publisher: nothing of the one before holds.
    pub fn begin(&mut self, writer: &mut Writer<'_>, incarnation: i64) {
        self.forget(writer);
        self.rules = Rules::default();
        self.places.clear();
        self.sizes.clear();
        writer.rule(self.number, None);
        (self.incarnation, self.last) = (incarnation, -1);
    }

    /// Whether so many blocks more may need a larger table for those under other hashes than their records'.
    #[inline]
    pub fn is_tight(&self, blocks: usize) -> bool {
        !self.foreign.is_empty() && self.foreign.capacity() - self.foreign.len() < blocks
    }

    /// Makes that table larger, while nobody waits for the shared part: it moves as a whole.
    pub fn make_room(&mut self, blocks: usize, secret: Secret) {
        if self.is_tight(blocks) {
            self.foreign.reserve(blocks, |entry| secret.place(entry.hash));
        }
    }

    /// Asks for the memory that is looked at for a hash, in the stages of a table.
    #[inline]
    pub fn prefetch(&self, spot: Spot, stage: Stage) {
        self.table.prefetch(spot, stage);
    }

    /// How far its blocks are likely to be away.
    #[inline]
    pub fn reach(&self) -> Reach {
        self.table.reach()
    }

    /// Asks for what a block will need that is to be placed soon, in the stages of its tables; last for their buckets, by which time it is
    /// known where it belongs.
    #[inline]
    pub fn ask(&self, core: &Core, block: &mut Block, stage: Stage) {
        let listed = core.keys.reach() > Reach::Near;
        if stage == Stage::Bucket {
            if listed {
                block.key_seat = core.keys.seat_ahead(block.key_spot);
            }
            block.hash_seat = self.table.seat_ahead(block.hash_spot);
            return;
        }
        if listed {
            core.keys.prefetch(block.key_spot, stage);
        }
        self.table.prefetch(block.hash_spot, stage);
    }

    /// Looks at these buckets, which are here, and asks for what is behind full ones.
    #[inline]
    pub fn look_behind(&self, core: &Core, block: &Block) {
        core.keys.look_behind(block.key_seat);
        self.table.look_behind(block.hash_seat);
    }

    fn foreign_of(&self, core: &Core, hash: u64, fits: impl Fn(u32) -> bool) -> Option<u32> {
        if self.foreign.is_empty() {
            return None;
        }
        self.foreign
            .find(core.secret.place(hash), |entry| entry.hash == hash && fits(entry.number))
            .map(|entry| entry.number)
    }

    /// The record of the block that `hash` means, the most recently stored one of several.
    #[inline]
    pub fn newest(&self, core: &Core, hash: u64) -> Option<u32> {
        if !self.several.is_empty()
            && let Some(list) = self.several.get(&hash)
        {
            return list.last().copied();
        }
        let found = self
            .table
            .find(core.spot(hash), |number| core.records.get(number).hash == hash);
        found.or_else(|| self.foreign_of(core, hash, |_| true))
    }

    /// One copy more of a block; the record's number, and whether `hash` was unknown before. `next` is that of `Core::hold`. None when there
    /// are too many like it.
    #[inline]
    pub fn place(&mut self, core: &mut Core, block: &Block, plane: u16, next: u32) -> Option<(u32, bool)> {
        let Block {
            hash,
            key,
            context,
            hash_spot,
            hash_seat,
            ..
        } = *block;
        self.look_into(core, hash);
        if core.is_crowded(key) {
            core.list_keys();
            self.look_into_all(core);
        }
        let seat = self.table.seat_again(hash_seat, hash_spot);
        let (mut known, mut own) = (None, None);
        self.table.for_each_match_at(seat, |number| {
            let record = core.records.get(number);
            if record.hash == hash {
                known = Some(number);
                if record.key == key && record.context() == context {
                    own = known;
                }
            }
            own.is_none()
        });
        if own.is_none() && !self.foreign.is_empty() {
            let same = |number: u32| core.records.get(number).key == key && core.records.get(number).context() == context;
            own = self.foreign_of(core, hash, same);
            known = known.or_else(|| self.foreign_of(core, hash, |_| true));
        }
        if let Some(number) = own {
            self.copy(core, hash, number, plane);
            self.renew(hash, number);
            return Some((number, false));
        }
        if known.is_some() && self.several.get(&hash).is_some_and(|list| list.len() >= MAX_SAME_HASH) {
            return None;
        }
        let (number, fresh) = core.hold(block, plane, self.number, next, &mut self.added)?;
        self.enter(core, block, number, fresh);
        self.blocks += 1;
        self.count_in(core, hash, key, plane);
        if let Some(other) = known {
            self.several.entry(hash).or_insert_with(|| vec![other]).push(number);
        }
        Some((number, known.is_none()))
    }

    /// Enters a record under the hash of its block.
    #[inline]
    fn enter(&mut self, core: &Core, block: &Block, number: u32, fresh: bool) {
        let hash = block.hash;
        if fresh || core.records.get(number).hash == hash {
            let seat = self.table.seat_again(block.hash_seat, block.hash_spot);
            let hashes = ByHash(&core.records, core.secret);
            self.table.insert_at(seat, block.hash_spot, number, &hashes);
        } else {
            let place = core.secret.place(hash);
            self.foreign
                .insert_unique(place, Foreign { hash, number }, |entry| core.secret.place(entry.hash));
        }
    }

    /// Makes a block the newest of its hash.
    fn renew(&mut self, hash: u64, number: u32) {
        if self.several.is_empty() {
            return;
        }
        if let Some(list) = self.several.get_mut(&hash)
            && let Some(at) = list.iter().position(|&other| other == number)
        {
            list.remove(at);
            list.push(number);
        }
    }

    /// One copy more of a block that the stream knows.
    #[inline]
    pub fn copy(&mut self, core: &mut Core, hash: u64, number: u32, plane: u16) {
        let Record { key, set, .. } = *core.records.get(number);
        if core.sets.holds(set, plane, self.number) {
            *self.copies.entry((number, plane)).or_default() += 1;
            self.digest = self.digest.wrapping_add(mark(hash, key, self.mark_of(core, plane)));
        } else {
            core.toggle(number, plane, self.number, &mut self.added);
            self.count_in(core, hash, key, plane);
        }
    }

    /// Counts the first copy of a block on a plane.
    #[inline]
    fn count_in(&mut self, core: &Core, hash: u64, key: u64, plane: u16) {
        self.digest = self.digest.wrapping_add(mark(hash, key, self.mark_of(core, plane)));
        self.held[plane as usize] += 1;
    }

    #[inline]
    fn mark_of(&mut self, core: &Core, plane: u16) -> u64 {
        while self.marks.len() <= plane as usize {
            self.marks.push(core.planes[self.marks.len()].digest());
            self.held.push(0);
        }
        self.marks[plane as usize]
    }

    /// What is asked for ahead of the removal of a hash.
    #[inline]
    pub fn leaving(&self, core: &Core, hash: u64) -> Leaving {
        let spot = core.spot(hash);
        self.prefetch(spot, Stage::Bucket);
        Leaving {
            hash,
            spot,
            ..Leaving::default()
        }
    }

    /// Asks for the record that a hash may mean, when its bucket is here.
    #[inline]
    pub fn prefetch_record(&self, core: &Core, leaving: &mut Leaving) {
        leaving.seat = self.table.seat(leaving.spot);
        self.table.for_each_match_at(leaving.seat, |number| {
            core.records.prefetch(number);
            false
        });
    }

    /// Asks for where the key of that record is found, when the record is here.
    #[inline]
    pub fn prefetch_key(&self, core: &Core, leaving: &Leaving) {
        let seat = self.table.seat_again(leaving.seat, leaving.spot);
        self.table.for_each_match_at(seat, |number| {
            let record = core.records.get(number);
            if !record.is_behind() {
                core.keys.prefetch(core.spot(record.key), Stage::Bucket);
            }
            false
        });
    }

    /// Takes one copy from the oldest block of a hash on `plane`. Says whether there was one.
    #[inline]
    pub fn remove(&mut self, core: &mut Core, leaving: &Leaving, plane: u16) -> bool {
        let Leaving { hash, spot, seat } = *leaving;
        if !self.several.is_empty() {
            return self.remove_oldest(core, hash, plane);
        }
        let seat = self.table.seat_again(seat, spot);
        let mut found = None;
        self.table.for_each_match_at(seat, |number| {
            let record = core.records.get(number);
            if record.hash == hash {
                found = Some((number, *record));
            }
            found.is_none()
        });
        let Some((number, record)) = found else {
            return !self.foreign.is_empty() && self.remove_oldest(core, hash, plane);
        };
        if self.remove_copy(number, plane) {
            self.digest = self.digest.wrapping_sub(mark(hash, record.key, self.mark_of(core, plane)));
            return true;
        }
        let Some(rest) = core.sets.taken(record.set, plane, self.number, &mut self.removed) else {
            return false;
        };
        self.digest = self.digest.wrapping_sub(mark(hash, record.key, self.mark_of(core, plane)));
        self.held[plane as usize] -= 1;
        if rest != EMPTY {
            core.records.get_mut(number).set = rest;
            if core.sets.knows(rest, self.number) {
                return true;
            }
        }
        self.table.remove_at(seat, spot, number, &ByHash(&core.records, core.secret));
        self.blocks -= 1;
        if rest == EMPTY {
            core.forget(number, &record);
        }
        true
    }

    /// The same of a hash that several blocks may have, or a block whose record has another one.
    #[inline(never)]
    fn remove_oldest(&mut self, core: &mut Core, hash: u64, plane: u16) -> bool {
        let held = |number: &u32| core.sets.holds(core.records.get(*number).set, plane, self.number);
        let found = match self.several.get(&hash) {
            Some(list) => list.iter().copied().find(held),
            None => self.newest(core, hash).filter(held),
        };
        let Some(number) = found else { return false };
        let key = core.records.get(number).key;
        self.digest = self.digest.wrapping_sub(mark(hash, key, self.mark_of(core, plane)));
        if self.remove_copy(number, plane) {
            return true;
        }
        core.toggle(number, plane, self.number, &mut self.removed);
        self.held[plane as usize] -= 1;
        if !core.sets.knows(core.records.get(number).set, self.number) {
            self.leave(core, hash, number);
        }
        true
    }

    /// Takes one of the copies beyond the first; false if there is none.
    #[inline]
    fn remove_copy(&mut self, number: u32, plane: u16) -> bool {
        if self.copies.is_empty() {
            return false;
        }
        let Some(extra) = self.copies.get_mut(&(number, plane)) else {
            return false;
        };
        *extra -= 1;
        if *extra == 0 {
            self.copies.remove(&(number, plane));
            if self.copies.is_empty() {
                self.copies = HashMap::new();
            }
        }
        true
    }

    /// Forgets a block that the stream holds nowhere any more.
    fn leave(&mut self, core: &mut Core, hash: u64, number: u32) {
        let place = core.secret.place(hash);
        if core.records.get(number).hash == hash {
            self.table.remove(place, number, &ByHash(&core.records, core.secret));
        } else if let Ok(entry) = self
            .foreign
            .find_entry(place, |entry| entry.hash == hash && entry.number == number)
        {
            entry.remove();
            self.shrink_foreign(core);
        }
        if let Some(list) = self.several.get_mut(&hash) {
            list.retain(|&other| other != number);
            if list.len() < 2 {
                self.several.remove(&hash);
                if self.several.is_empty() {
                    self.several = HashMap::new();
                }
            }
        }
        self.blocks -= 1;
        core.sweep(number);
    }

    fn shrink_foreign(&mut self, core: &Core) {
        let (length, capacity) = (self.foreign.len(), self.foreign.capacity());
        if capacity > 64 && length * 4 < capacity {
            self.foreign.shrink_to(length * 2, |entry| core.secret.place(entry.hash));
        } else if length == 0 {
            self.foreign = HashTable::new();
        }
    }

    /// Every block with a record as (hash, record).
    pub fn each(&self, core: &Core) -> Vec<(u64, u32)> {
        let own = self.table.iter().map(|number| (core.records.get(number).hash, number));
        own.chain(self.foreign.iter().map(|entry| (entry.hash, entry.number)))
            .collect()
    }

    /// Copies of a block on a plane.
    pub fn count(&self, core: &Core, number: u32, plane: u16) -> u32 {
        let held = core.sets.holds(core.records.get(number).set, plane, self.number);
        u32::from(held) + self.copies.get(&(number, plane)).copied().unwrap_or(0)
    }

    /// The blocks that share a hash, the oldest first; what `each` does not tell the order of.
    pub fn ordered(&self) -> impl Iterator<Item = (&u64, &Vec<u32>)> {
        self.several.iter()
    }

    // --- snapshots

    /// The record of every block that has one, in no order.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        self.table.iter().chain(self.foreign.iter().map(|entry| entry.number))
    }

    /// Records of which this stream has another hash than theirs, and that hash, in no order.
    pub fn foreign(&self) -> impl ExactSizeIterator<Item = (u32, u64)> + '_ {
        self.foreign.iter().map(|entry| (entry.number, entry.hash))
    }

    /// Whether there is one copy at most of each block on each plane.
    pub fn is_single(&self) -> bool {
        self.copies.is_empty()
    }

    /// Takes in a block that the stream does not know, on planes with so many copies. Returns its record, or None where that cannot be.
    #[inline]
    pub fn put(&mut self, core: &mut Core, block: &Block, planes: &[(u16, u32)], guess: u32) -> Option<u32> {
        let known = self.blocks;
        self.cut_by(core.contexts.get(block.context).scheme.size);
        let (number, _) = self.place(core, block, planes.first()?.0, guess)?;
        if self.blocks == known {
            return None;
        }
        for (at, &(plane, copies)) in planes.iter().enumerate() {
            if at > 0 {
                if core.sets.holds(core.records.get(number).set, plane, self.number) {
                    return None;
                }
                self.copy(core, block.hash, number, plane);
            }
            let more = copies.checked_sub(1)?;
            if more > 0 {
                self.copies.insert((number, plane), more);
                let each = mark(block.hash, block.key, self.mark_of(core, plane));
                self.digest = self.digest.wrapping_add(each.wrapping_mul(more.into()));
            }
        }
        Some(number)
    }

    /// Puts the blocks of one hash, given by key and context, in this order. Says whether these are its blocks.
    pub fn reorder(&mut self, gate: &Gate, hash: u64, blocks: &[(u64, u32)]) -> bool {
        let Some(list) = self.several.get_mut(&hash) else {
            return false;
        };
        let mut known: HashMap<(u64, u32), u32> = HashMap::with_capacity(list.len());
        for some in list.chunks(BLOCKS_PER_HOLD) {
            let core = gate.read();
            known.extend(some.iter().map(|&number| {
                let record = core.records.get(number);
                ((record.key, record.context()), number)
            }));
        }
        let ordered: Option<Vec<u32>> = blocks.iter().map(|block| known.remove(block)).collect();
        match ordered {
            Some(ordered) if known.is_empty() => *list = ordered,
            _ => return false,
        }
        true
    }

    // --- forgetting

    /// Drops every copy of one block on the planes that `meant` says.
    pub fn drop_block(&mut self, core: &mut Core, hash: u64, number: u32, meant: impl Fn(u16) -> bool) {
        let key = core.records.get(number).key;
        let planes: Vec<u16> = core
            .sets
            .planes(core.records.get(number).set, self.number)
            .filter(|&plane| meant(plane))
            .collect();
        for plane in planes {
            let copies = 1 + self.copies.remove(&(number, plane)).unwrap_or(0);
            let each = mark(hash, key, self.mark_of(core, plane));
            self.digest = self.digest.wrapping_sub(each.wrapping_mul(u128::from(copies)));
            core.toggle(number, plane, self.number, &mut self.removed);
            self.held[plane as usize] -= 1;
        }
        if self.copies.is_empty() {
            self.copies = HashMap::new();
        }
        if !core.sets.knows(core.records.get(number).set, self.number) {
            self.leave(core, hash, number);
        }
    }

    /// Forgets every block, which readers see at once. The rules of groups stay.
    pub fn forget(&mut self, writer: &mut Writer<'_>) {
        let number = self.number;
        writer.show(number, false);
        let (table, foreign) = (
            std::mem::replace(&mut self.table, Table::dense()),
            std::mem::take(&mut self.foreign),
        );
        for entry in writer.take_all_kept(number) {
            writer.contexts.release(entry.context, 1);
        }
        for record in table.iter().chain(foreign.iter().map(|entry| entry.number)) {
            let set = writer.records.get(record).set;
            let without = writer.sets.without(set, number);
            writer.records.get_mut(record).set = without;
            writer.sweep(record);
            writer.pause(1);
        }
        (self.several, self.copies, self.waiting) = (HashMap::new(), HashMap::new(), Queue::default());
        (self.blocks, self.digest) = (0, 0);
        self.held.fill(0);
        writer.show(number, true);
    }

    /// The hashes that this stream has for some records.
    pub fn hashes_of(&self, core: &Core, numbers: &[u32]) -> Vec<(u64, u32)> {
        let mut found = Vec::with_capacity(numbers.len());
        let mut strange = std::collections::HashSet::new();
        for &number in numbers {
            let Some(record) = core.records.find(number) else { continue };
            if !core.sets.knows(record.set, self.number) {
                continue;
            }
            let own = self.table.find(core.spot(record.hash), |other| other == number);
            match own {
                Some(_) => found.push((record.hash, number)),
                None => _ = strange.insert(number),
            }
        }
        if !strange.is_empty() {
            found.extend(
                self.foreign
                    .iter()
                    .filter(|entry| strange.contains(&{ entry.number }))
                    .map(|entry| (entry.hash, entry.number)),
            );
        }
        found
    }
}

/// A hash that is to be removed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Leaving {
    hash: u64,
    /// Where it is looked for.
    spot: Spot,
    /// Where it belongs, if somebody has looked.
    seat: Seat,
}

/// What identifies a block.
#[derive(Clone, Copy, Debug, Default)]
pub struct Block {
    /// The engine's hash.
    pub hash: u64,
    /// Its key.
    pub key: u64,
    /// Number of its context.
    pub context: u32,
    /// Where its key is looked for.
    pub key_spot: Spot,
    /// Where its hash is looked for.
    pub hash_spot: Spot,
    /// Where its key belongs, if somebody has looked.
    pub key_seat: Seat,
    /// Where its hash belongs, if somebody has looked.
    pub hash_seat: Seat,
}

impl Block {
    /// A block with its spots.
    #[inline]
    pub fn new(core: &Core, hash: u64, key: u64, context: u32) -> Self {
        Self {
            hash,
            key,
            context,
            key_spot: core.spot(key),
            hash_spot: core.spot(hash),
            key_seat: Seat::default(),
            hash_seat: Seat::default(),
        }
    }
}
