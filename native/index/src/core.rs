//! What all streams share: records of blocks, found by key, and who holds them.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::behind::Behind;
use crate::contexts::Contexts;
use crate::kept::Kept;
use crate::planes::{Plane, Rule};
use crate::sets::{EMPTY, MAX_STREAMS, Move, Sets};
use crate::slab::{Record, Slab};
use crate::stream::{Block, Stream};
use crate::table::{Hashes, Spot, Table};
use crate::tally::Tally;

/// Records with one key: streams that hold a block under two hashes at once need one for each.
pub const MAX_TWINS: usize = 16;
/// Planes of one index. Engines have a handful; their names and groups are a peer's words.
pub const MAX_PLANES: usize = 4096;

/// Who a stream is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Worker {
    /// Name of the engine.
    pub source: String,
    /// Data-parallel rank.
    pub rank: i64,
}

/// A stream as readers see it.
#[derive(Debug)]
pub struct Member {
    /// Who it is.
    pub worker: Arc<Worker>,
    /// The model that it was labelled with.
    pub model: Option<String>,
    /// Rules by group when there are several.
    pub hybrid: Option<Vec<(i64, Rule)>>,
    /// Its writer's side.
    pub stream: Weak<Mutex<Stream>>,
    /// Its blocks, as of its last batch.
    pub blocks: usize,
}

/// One number in two hashes: uniform and secret, so that no peer can fill one bucket.
#[derive(Clone, Copy, Debug)]
pub struct Secret(u64, u64);

impl Secret {
    /// New for each index.
    pub fn new() -> Self {
        use std::hash::{BuildHasher, RandomState};
        Self(RandomState::new().hash_one(1), RandomState::new().hash_one(2) | 1)
    }

    /// The place of `value` in a table.
    #[inline]
    pub fn place(self, value: u64) -> u64 {
        let product = u128::from(value ^ self.0) * u128::from(self.1);
        let folded = (product as u64) ^ ((product >> 64) as u64);
        folded.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (folded >> 32)
    }
}

impl Default for Secret {
    fn default() -> Self {
        Self::new()
    }
}

/// Places of records in the table of keys.
pub struct ByKey<'a>(pub &'a Slab, pub Secret);

impl Hashes for ByKey<'_> {
    #[inline]
    fn hash_of(&self, record: u32) -> u64 {
        self.1.place(self.0.get(record).key)
    }

    #[inline]
    fn prefetch(&self, record: u32) {
        self.0.prefetch(record);
    }
}

/// Places of records in the table of a stream.
pub struct ByHash<'a>(pub &'a Slab, pub Secret);

impl Hashes for ByHash<'_> {
    #[inline]
    fn hash_of(&self, record: u32) -> u64 {
        self.1.place(self.0.get(record).hash)
    }

    #[inline]
    fn prefetch(&self, record: u32) {
        self.0.prefetch(record);
    }
}

/// The shared part of an index; one writer at a time, or many readers.
#[derive(Debug, Default)]
pub struct Core {
    /// All blocks.
    pub records: Slab,
    /// The same by key, where these are listed, but for those that are found through the one before them.
    pub keys: Table,
    /// Those.
    pub behind: Behind,
    /// Keys where they are not, since nobody has asked for any so far.
    pub tally: Option<Tally>,
    /// By the number of their stream, blocks that nobody has looked into. None where keys are listed, once each stream has seen that they are.
    pub kept: Vec<Kept>,
    /// Who holds them.
    pub sets: Sets,
    /// How they were cut, in which namespaces.
    pub contexts: Contexts,
    /// Where copies can be.
    pub planes: Vec<Plane>,
    /// Levels of `planes`.
    pub levels: Vec<u8>,
    /// Streams by number.
    pub members: Vec<Option<Member>>,
    /// Streams whose blocks count: not those that are being cleared.
    pub visible: Vec<u64>,
    /// Streams by their model.
    pub walls: HashMap<Option<String>, Vec<u64>>,
    /// Streams matched by rules of groups.
    pub hybrid: Vec<u64>,
    /// For the tables.
    pub secret: Secret,
}

impl Core {
    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.records.bytes()
            + self.keys.bytes()
            + self.tally.as_ref().map_or(0, Tally::bytes)
            + self.kept.iter().map(Kept::bytes).sum::<usize>()
            + self.sets.bytes()
            + self.contexts.bytes()
            + self.members.len() * MEMBER_BYTES
    }

    /// Where a key or a hash is looked for.
    #[inline]
    pub fn spot(&self, value: u64) -> Spot {
        Spot::from(self.secret.place(value))
    }

    /// Has the record of a block held by one more, which does not hold it yet: its number, and whether it was made for that. `next` is the
    /// number behind the record of its parent; whoever does not know that is one of the `strangers` of `Behind`, and guesses. None when
    /// there are too many of its key.
    #[inline]
    pub fn hold(&mut self, block: &Block, plane: u16, stream: u32, next: u32, last: &mut Move) -> Option<(u32, bool)> {
        let Block {
            key,
            context,
            key_spot,
            key_seat,
            ..
        } = *block;
        if let Some(record) = self.records.find(next).filter(|record| record.key == key) {
            if !record.has_twins() && record.context() == context && !self.sets.knows(record.set, stream) {
                self.toggle(next, plane, stream, last);
                return Some((next, false));
            }
            if record.is_behind() {
                self.list(next);
            }
        }
        if self.count_in(key) {
            return self.add(block, plane, stream, last);
        }
        let records = &self.records;
        let (mut twins, mut alike) = (0, false);
        let mut found = None;
        let seat = self.keys.seat_again(key_seat, key_spot);
        self.keys.for_each_match_at(seat, |number| {
            let record = records.get(number);
            if record.key == key {
                alike = true;
                if record.context() == context {
                    twins += 1;
                    if !self.sets.knows(record.set, stream) {
                        found = Some(number);
                    }
                }
            }
            found.is_none()
        });
        if let Some(number) = found {
            self.toggle(number, plane, stream, last);
            return Some((number, false));
        }
        if twins >= MAX_TWINS {
            return None;
        }
        let made = self.add(block, plane, stream, last)?;
        let number = made.0;
        if alike {
            self.records.get_mut(number).twin();
            self.mark_twins(key);
        } else if number == next && self.may_be_behind(number, context) {
            self.records.get_mut(number).set_behind(true);
            self.behind.records += 1;
            return Some(made);
        }
        let seat = self.keys.seat_again(seat, key_spot);
        self.keys
            .insert_at(seat, key_spot, number, &ByKey(&self.records, self.secret));
        Some(made)
    }

    /// A record that is new, and that one stream holds.
    #[inline]
    fn add(&mut self, block: &Block, plane: u16, stream: u32, last: &mut Move) -> Option<(u32, bool)> {
        let number = self.records.insert(Record::new(block.key, block.hash, block.context))?;
        self.toggle(number, plane, stream, last);
        self.contexts.add(block.context, 1);
        Some((number, true))
    }

    /// Marks all listed records of a key as not the only one.
    #[cold]
    pub fn mark_twins(&mut self, key: u64) {
        for number in self.twins(key, |_| true) {
            self.records.get_mut(number).twin();
            self.list_next(number);
        }
    }

    /// All listed records of a key in the contexts that `meant` says.
    pub fn twins(&self, key: u64, meant: impl Fn(u32) -> bool) -> Vec<u32> {
        let mut found = Vec::new();
        self.keys.for_each_match(self.spot(key), |number| {
            let record = self.records.get(number);
            if record.key == key && meant(record.context()) {
                found.push(number);
            }
            true
        });
        found
    }

    /// Adds or removes a holder of a block.
    #[inline]
    pub fn toggle(&mut self, number: u32, plane: u16, stream: u32, last: &mut Move) {
        let record = self.records.get_mut(number);
        record.set = self.sets.moved(record.set, plane, stream, last);
    }

    /// Forgets a block if nobody holds it any more.
    pub fn sweep(&mut self, number: u32) {
        let record = *self.records.get(number);
        if record.set == EMPTY {
            self.forget(number, &record);
        }
    }

    /// Forgets a block that nobody holds any more.
    #[inline]
    pub fn forget(&mut self, number: u32, record: &Record) {
        if record.is_behind() {
            self.behind.records -= 1;
        } else if self.is_listed() {
            self.keys
                .remove(self.spot(record.key), number, &ByKey(&self.records, self.secret));
        }
        self.records.remove(number);
        self.list_next(number);
        self.contexts.release(record.context(), 1);
        self.count_out(record.key);
    }

    /// The number of a plane; None when there are too many.
    pub fn plane(&mut self, plane: Plane) -> Option<u16> {
        if let Some(found) = self.planes.iter().position(|known| *known == plane) {
            return Some(found as u16);
        }
        if self.planes.len() >= MAX_PLANES {
            return None;
        }
        self.levels.push(plane.level() as u8);
        self.planes.push(plane);
        Some((self.planes.len() - 1) as u16)
    }

    /// The number that the next stream gets; None when there are too many.
    pub fn vacancy(&self) -> Option<u32> {
        let free = self.members.iter().position(Option::is_none).unwrap_or(self.members.len());
        (free < MAX_STREAMS).then_some(free as u32)
    }

    /// Takes a stream in under the number that `vacancy` told.
    pub fn join(&mut self, number: u32, member: Member) {
        let at = number as usize;
        if at == self.members.len() {
            self.members.push(None);
        }
        let words = self.members.len().div_ceil(64);
        self.visible.resize(words, 0);
        self.hybrid.resize(words, 0);
        let model = member.model.clone();
        self.members[at] = Some(member);
        self.label(number, model);
        self.show(number, true);
    }

    /// Moves a stream behind the wall of a model.
    pub fn label(&mut self, number: u32, model: Option<String>) {
        for wall in self.walls.values_mut().filter(|wall| wall.len() > number as usize >> 6) {
            set_bit(wall, number, false);
        }
        self.walls.retain(|_, wall| wall.iter().any(|&bits| bits != 0));
        let Some(member) = self.members[number as usize].as_mut() else {
            return;
        };
        member.model.clone_from(&model);
        let wall = self.walls.entry(model).or_default();
        wall.resize(wall.len().max((number as usize >> 6) + 1), 0);
        set_bit(wall, number, true);
    }

    /// Moves streams behind the walls that `model_of` has for their sources; those of which it says nothing stay.
    pub fn relabel(&mut self, model_of: impl Fn(&str) -> Option<Option<String>>) {
        for number in 0..self.members.len() {
            if let Some(member) = &self.members[number]
                && let Some(model) = model_of(&member.worker.source)
            {
                self.label(number as u32, model);
            }
        }
    }

    /// Whether the blocks of a stream count.
    pub fn show(&mut self, stream: u32, visible: bool) {
        set_bit(&mut self.visible, stream, visible);
    }

    /// Matches a stream by these rules from now on.
    pub fn rule(&mut self, stream: u32, rules: Option<Vec<(i64, Rule)>>) {
        set_bit(&mut self.hybrid, stream, rules.is_some());
        if let Some(member) = self.members[stream as usize].as_mut() {
            member.hybrid = rules;
        }
    }

    /// Gives the number of a stream back, which holds nothing any more.
    pub fn leave(&mut self, stream: u32) {
        self.rule(stream, None);
        self.show(stream, false);
        self.members[stream as usize] = None;
        self.label(stream, None);
        while self.members.last().is_some_and(Option::is_none) {
            self.members.pop();
        }
    }
}

/// About what a member takes.
const MEMBER_BYTES: usize = size_of::<Member>() + 64;

/// Sets one bit of a bitmap.
pub fn set_bit(bits: &mut [u64], at: u32, on: bool) {
    let (word, bit) = (at as usize >> 6, 1 << (at & 63));
    if on {
        bits[word] |= bit;
    } else {
        bits[word] &= !bit;
    }
}
