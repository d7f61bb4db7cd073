//! Pending entries of a stream, the oldest first. Orphans wait for their parent; hashes without tokens wait for a store with tokens.
//!
//! Each entry is in three doubly linked lists: all entries in order of arrival, the entries that wait for one hash, and the copies of one
//! hash on one placement. So adding or removing an entry takes constant time.

use std::collections::HashMap;

use crate::keys::Scheme;
use crate::memory::hasher::Secret;
use crate::step_counter;

/// The data with which an orphan is placed when its parent arrives.
#[derive(Clone, Debug)]
pub struct Content {
    /// Tokens that the block's hash covers.
    pub tokens: Box<[u32]>,
    /// Hashes of the block's extra keys.
    pub extras: Box<[u64]>,
    /// The rule by which the prompt's tokens were divided into blocks.
    pub scheme: Scheme,
    /// Part of the seed that the block's LoRA contributes.
    pub lora: u64,
    /// Part of the seed that the block's own salt contributes; None if the salt is that of the parent.
    pub salt: Option<u64>,
}

/// Data of an entry whose size counts towards the limit.
pub trait Weight {
    /// Heap bytes of the value.
    fn bytes(&self) -> usize;
}

impl Weight for Content {
    fn bytes(&self) -> usize {
        self.tokens.len() * 4 + self.extras.len() * 8
    }
}

/// An entry of the queue: one waiting copy of a block.
#[derive(Clone, Debug)]
pub struct Waiting<C = Content> {
    /// Hash of the block.
    pub hash: u64,
    /// The number that identifies the block's placement.
    pub placement: u16,
    /// The hash for whose store the copy waits.
    pub awaited: u64,
    /// The data with which an orphan is placed; None for a hash without tokens.
    pub content: Option<C>,
}

impl<C: Weight> Waiting<C> {
    /// Approximate bytes of this entry in a queue.
    pub fn bytes(&self) -> usize {
        size_of::<Entry<C>>() + 2 * MAP_BYTES + self.content.as_ref().map_or(0, Weight::bytes)
    }
}

/// Approximate bytes of an entry in one of the maps of a queue.
const MAP_BYTES: usize = 64;

/// Searching this number of placements of one hash takes as long as one step.
const COPIES_PER_STEP: usize = 8;
const NONE: u32 = u32::MAX;

/// The first and the last entry of a list.
#[derive(Clone, Copy, Debug)]
struct Row {
    first: u32,
    last: u32,
}

impl Row {
    const EMPTY: Self = Self { first: NONE, last: NONE };

    fn is_empty(self) -> bool {
        self.first == NONE
    }
}

/// The previous and the next entry in a list.
#[derive(Clone, Copy, Debug)]
struct Links {
    before: u32,
    next: u32,
}

/// The three lists of an entry.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Order,
    Awaited,
    Copies,
}

#[derive(Debug)]
struct Entry<C> {
    waiting: Waiting<C>,
    /// Increases with each added entry, and so identifies the order of the entries.
    number: u64,
    links: [Links; 3],
}

/// The copies of one hash on one placement: orphans and, separately, hashes without tokens.
#[derive(Clone, Copy, Debug)]
struct Copies {
    placement: u16,
    orphans: Row,
    others: Row,
}

impl Copies {
    fn row(&mut self, is_orphan: bool) -> &mut Row {
        if is_orphan { &mut self.orphans } else { &mut self.others }
    }
}

/// Number of entries on one placement.
#[derive(Clone, Copy, Debug, Default)]
struct PlacementCount {
    entries: usize,
    /// Number of orphans.
    orphans: usize,
}

/// A bounded queue of pending entries.
#[derive(Debug)]
pub struct Queue<C = Content> {
    entries: Vec<Option<Entry<C>>>,
    free: Vec<u32>,
    order: Row,
    by_awaited: HashMap<u64, Row, Secret>,
    by_hash: HashMap<u64, Vec<Copies>, Secret>,
    /// The number of entries on each placement.
    placements: HashMap<u16, PlacementCount, Secret>,
    next: u64,
    length: usize,
    bytes: usize,
}

impl<C> Default for Queue<C> {
    fn default() -> Self {
        Self::with_secret(Secret::new())
    }
}

impl<C> Queue<C> {
    fn with_secret(secret: Secret) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            order: Row::EMPTY,
            by_awaited: HashMap::with_hasher(secret),
            by_hash: HashMap::with_hasher(secret),
            placements: HashMap::with_hasher(secret),
            next: 0,
            length: 0,
            bytes: 0,
        }
    }
}

fn entry<C>(entries: &mut [Option<Entry<C>>], at: u32) -> &mut Entry<C> {
    entries[at as usize].as_mut().expect("rows hold entries in use")
}

/// Appends an entry to a list.
fn append<C>(entries: &mut [Option<Entry<C>>], row: &mut Row, at: u32, kind: Kind) {
    let last = std::mem::replace(&mut row.last, at);
    entry(entries, at).links[kind as usize] = Links {
        before: last,
        next: NONE,
    };
    if last == NONE {
        row.first = at;
    } else {
        entry(entries, last).links[kind as usize].next = at;
    }
}

/// Removes an entry from a list.
fn unlink<C>(entries: &mut [Option<Entry<C>>], row: &mut Row, at: u32, kind: Kind) {
    let Links { before, next } = entry(entries, at).links[kind as usize];
    match before {
        NONE => row.first = next,
        before => entry(entries, before).links[kind as usize].next = next,
    }
    match next {
        NONE => row.last = before,
        next => entry(entries, next).links[kind as usize].before = before,
    }
}

impl<C: Weight> Queue<C> {
    /// Number of entries.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there are no entries.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All entries, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = &Waiting<C>> {
        let mut at = self.order.first;
        std::iter::from_fn(move || {
            let entry = self.entries.get(at as usize)?.as_ref()?;
            at = entry.links[Kind::Order as usize].next;
            Some(&entry.waiting)
        })
    }

    /// Whether an entry has this hash, or waits for it.
    pub fn names(&self, hash: u64) -> bool {
        self.by_hash.contains_key(&hash) || self.awaits(hash)
    }

    /// Whether an entry waits for this hash.
    #[inline]
    pub fn awaits(&self, hash: u64) -> bool {
        self.by_awaited.contains_key(&hash)
    }

    /// Whether a copy of this hash waits on a placement.
    pub fn has(&self, hash: u64, placement: u16) -> bool {
        let found = self.by_hash.get(&hash);
        found.is_some_and(|copies| copies.iter().any(|copies| copies.placement == placement))
    }

    /// Whether the latest entry with the hash of `other`, on a placement that `is_meant` accepts, waits for the same hash as `other`.
    pub fn is_last(&self, other: &Waiting<C>, is_meant: impl Fn(u16) -> bool) -> bool {
        let copies = self.by_hash.get(&other.hash).into_iter().flatten();
        let last = copies
            .filter(|copies| is_meant(copies.placement))
            .map(|copies| {
                if other.content.is_some() {
                    copies.orphans.last
                } else {
                    copies.others.last
                }
            })
            .filter_map(|at| self.entries.get(at as usize)?.as_ref())
            .max_by_key(|entry| entry.number);
        last.is_some_and(|entry| entry.waiting.awaited == other.awaited)
    }

    /// Whether an entry is on a placement.
    pub fn is_on(&self, placement: u16) -> bool {
        self.placements.contains_key(&placement)
    }

    /// Number of entries with tokens on a placement.
    pub fn orphans_on(&self, placement: u16) -> usize {
        self.placements.get(&placement).map_or(0, |count| count.orphans)
    }

    /// Number of entries without tokens on a placement.
    pub fn untied_on(&self, placement: u16) -> usize {
        self.placements
            .get(&placement)
            .map_or(0, |count| count.entries - count.orphans)
    }

    /// Adds an entry. If the queue then has more than `limit` entries, drops the oldest. Returns the number of dropped entries.
    pub fn push(&mut self, waiting: Waiting<C>, limit: usize) -> u64 {
        self.push_within(waiting, limit, usize::MAX)
    }

    /// Adds an entry as `push` does. `bytes` also limits the total size of all entries.
    pub fn push_within(&mut self, waiting: Waiting<C>, limit: usize, bytes: usize) -> u64 {
        let (size, mut dropped) = (waiting.bytes(), 0);
        if limit == 0 || size > bytes {
            return 1;
        }
        while self.length >= limit || self.bytes + size > bytes {
            self.pop();
            dropped += 1;
        }
        self.insert(waiting);
        dropped
    }

    fn insert(&mut self, waiting: Waiting<C>) {
        let at = self.free.pop().unwrap_or(self.entries.len() as u32);
        let (hash, placement, awaited) = (waiting.hash, waiting.placement, waiting.awaited);
        let is_orphan = waiting.content.is_some();
        self.bytes += waiting.bytes();
        let none = Links {
            before: NONE,
            next: NONE,
        };
        let new = Some(Entry {
            waiting,
            number: self.next,
            links: [none; 3],
        });
        match self.entries.get_mut(at as usize) {
            Some(free) => *free = new,
            None => self.entries.push(new),
        }
        self.next += 1;
        self.length += 1;
        let count = self.placements.entry(placement).or_default();
        count.entries += 1;
        count.orphans += usize::from(is_orphan);
        append(&mut self.entries, &mut self.order, at, Kind::Order);
        let by_awaited = (self.by_awaited.len(), self.by_awaited.capacity());
        let by_hash = (self.by_hash.len(), self.by_hash.capacity());
        let row = self.by_awaited.entry(awaited).or_insert(Row::EMPTY);
        append(&mut self.entries, row, at, Kind::Awaited);
        let copies = self.by_hash.entry(hash).or_default();
        step_counter::count(copies.len().div_ceil(COPIES_PER_STEP));
        let found = copies
            .iter()
            .position(|copies| copies.placement == placement)
            .unwrap_or_else(|| {
                copies.push(Copies {
                    placement,
                    orphans: Row::EMPTY,
                    others: Row::EMPTY,
                });
                copies.len() - 1
            });
        append(&mut self.entries, copies[found].row(is_orphan), at, Kind::Copies);
        step_counter::count_growth(by_awaited, self.by_awaited.len());
        step_counter::count_growth(by_hash, self.by_hash.len());
    }

    /// Drops the oldest entry.
    pub fn pop(&mut self) {
        if !self.order.is_empty() {
            self.take(self.order.first);
        }
    }

    fn take(&mut self, at: u32) -> Waiting<C> {
        let found = &entry(&mut self.entries, at).waiting;
        let (hash, placement, awaited, is_orphan) = (found.hash, found.placement, found.awaited, found.content.is_some());
        unlink(&mut self.entries, &mut self.order, at, Kind::Order);
        if let Some(row) = self.by_awaited.get_mut(&awaited) {
            unlink(&mut self.entries, row, at, Kind::Awaited);
            if row.is_empty() {
                self.by_awaited.remove(&awaited);
            }
        }
        if let Some(copies) = self.by_hash.get_mut(&hash) {
            step_counter::count(copies.len().div_ceil(COPIES_PER_STEP));
            if let Some(found) = copies.iter_mut().find(|copies| copies.placement == placement) {
                unlink(&mut self.entries, found.row(is_orphan), at, Kind::Copies);
            }
            copies.retain(|copies| !copies.orphans.is_empty() || !copies.others.is_empty());
            if copies.is_empty() {
                self.by_hash.remove(&hash);
            }
        }
        if let Some(count) = self.placements.get_mut(&placement) {
            count.entries -= 1;
            count.orphans -= usize::from(is_orphan);
            if count.entries == 0 {
                self.placements.remove(&placement);
            }
        }
        let taken = self.entries[at as usize].take().expect("rows hold entries in use");
        self.free.push(at);
        self.length -= 1;
        self.bytes -= taken.waiting.bytes();
        if self.length == 0 {
            let (next, secret) = (self.next, *self.by_hash.hasher());
            *self = Self {
                next,
                ..Self::with_secret(secret)
            };
        }
        taken.waiting
    }

    /// Removes and returns the oldest entry that waits for `hash`.
    pub fn take_one_awaiting(&mut self, hash: u64) -> Option<Waiting<C>> {
        let first = self.by_awaited.get(&hash)?.first;
        Some(self.take(first))
    }

    /// Removes and returns all entries that wait for `hash`.
    pub fn take_awaiting(&mut self, hash: u64) -> Vec<Waiting<C>> {
        std::iter::from_fn(|| self.take_one_awaiting(hash)).collect()
    }

    /// Removes one copy of `hash` on `placement`, preferably an orphan. Returns whether a copy was removed.
    pub fn remove(&mut self, hash: u64, placement: u16) -> bool {
        self.remove_where(hash, |other| other == placement)
    }

    /// Removes one copy of `hash` from any placement that `is_meant` accepts.
    pub fn remove_where(&mut self, hash: u64, is_meant: impl Fn(u16) -> bool) -> bool {
        let Some(copies) = self.by_hash.get(&hash) else {
            return false;
        };
        step_counter::count(copies.len().div_ceil(COPIES_PER_STEP));
        let here = || copies.iter().filter(|copies| is_meant(copies.placement));
        let number = |at: &u32| self.entries[*at as usize].as_ref().map(|entry| entry.number);
        let oldest = |rows: Vec<Row>| {
            rows.into_iter()
                .map(|row| row.first)
                .filter(|&at| at != NONE)
                .min_by_key(number)
        };
        let found = oldest(here().map(|copies| copies.orphans).collect());
        match found.or_else(|| oldest(here().map(|copies| copies.others).collect())) {
            Some(at) => {
                self.take(at);
                true
            }
            None => false,
        }
    }

    /// Drops all entries on placements that `is_meant` accepts.
    pub fn clear(&mut self, is_meant: impl Fn(u16) -> bool) {
        if !self.placements.keys().any(|&placement| is_meant(placement)) {
            return;
        }
        let mut at = self.order.first;
        while let Some(Some(entry)) = self.entries.get(at as usize) {
            let (next, placement) = (entry.links[Kind::Order as usize].next, entry.waiting.placement);
            if is_meant(placement) {
                self.take(at);
            }
            at = next;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Weight for u64 {
        fn bytes(&self) -> usize {
            *self as usize
        }
    }

    #[derive(Clone, Debug)]
    enum Step {
        Push(u64, u16, u64, Option<u64>),
        Take(u64),
        Remove(u64, u16),
        RemoveAny(u64),
        Pop,
        Clear(u16),
    }

    fn step() -> impl Strategy<Value = Step> {
        let content = prop::option::of(0_u64..100);
        prop_oneof![
            8 => (0_u64..5, 0_u16..3, 0_u64..5, content).prop_map(|(hash, placement, awaited, content)| {
                Step::Push(hash, placement, if content.is_some() { awaited } else { hash }, content)
            }),
            1 => (0_u64..5).prop_map(Step::Take),
            3 => (0_u64..5, 0_u16..3).prop_map(|(hash, placement)| Step::Remove(hash, placement)),
            1 => (0_u64..5).prop_map(Step::RemoveAny),
            1 => Just(Step::Pop),
            1 => (0_u16..3).prop_map(Step::Clear),
        ]
    }

    type Plain = (u64, u16, u64, Option<u64>);

    fn plain(waiting: &Waiting<u64>) -> Plain {
        (waiting.hash, waiting.placement, waiting.awaited, waiting.content)
    }

    proptest! {
        #[test]
        fn is_a_list(steps in prop::collection::vec(step(), 0..80), limit in 1_usize..30, bytes in 300_usize..6_000) {
            let (mut queue, mut model) = (Queue::default(), Vec::<Plain>::new());
            let weight = |&(hash, placement, awaited, content): &Plain| Waiting { hash, placement, awaited, content }.bytes();
            for step in steps {
                match step {
                    Step::Push(hash, placement, awaited, content) => {
                        let before = model.len();
                        let new = (hash, placement, awaited, content);
                        model.push(new);
                        if weight(&new) > bytes {
                            model.pop();
                        }
                        while model.len() > limit || model.iter().map(weight).sum::<usize>() > bytes {
                            model.remove(0);
                        }
                        let dropped = queue.push_within(Waiting { hash, placement, awaited, content }, limit, bytes);
                        prop_assert_eq!(dropped as usize, before + 1 - model.len());
                    }
                    Step::Take(awaited) => {
                        let (taken, left) = model.iter().copied().partition(|entry| entry.2 == awaited);
                        let taken: Vec<Plain> = taken;
                        prop_assert_eq!(queue.take_awaiting(awaited).iter().map(plain).collect::<Vec<_>>(), taken);
                        model = left;
                    }
                    Step::Remove(hash, placement) => {
                        let here = |entry: &Plain| entry.0 == hash && entry.1 == placement;
                        let at = model.iter().position(|entry| here(entry) && entry.3.is_some()).or_else(|| model.iter().position(here));
                        at.map(|at| model.remove(at));
                        prop_assert_eq!(queue.remove(hash, placement), at.is_some());
                    }
                    Step::RemoveAny(hash) => {
                        let here = |entry: &Plain| entry.0 == hash;
                        let at = model.iter().position(|entry| here(entry) && entry.3.is_some()).or_else(|| model.iter().position(here));
                        at.map(|at| model.remove(at));
                        prop_assert_eq!(queue.remove_where(hash, |_| true), at.is_some());
                    }
                    Step::Pop => {
                        queue.pop();
                        if !model.is_empty() {
                            model.remove(0);
                        }
                    }
                    Step::Clear(placement) => {
                        queue.clear(|other| other == placement);
                        model.retain(|entry| entry.1 != placement);
                    }
                }
                prop_assert_eq!(queue.iter().map(plain).collect::<Vec<_>>(), model.clone());
                prop_assert_eq!((queue.len(), queue.bytes()), (model.len(), model.iter().map(weight).sum::<usize>()));
                for value in 0..5 {
                    prop_assert_eq!(queue.awaits(value), model.iter().any(|entry| entry.2 == value));
                    prop_assert_eq!(queue.names(value), model.iter().any(|entry| entry.0 == value || entry.2 == value));
                    prop_assert_eq!(queue.is_on(value as u16), model.iter().any(|entry| u64::from(entry.1) == value));
                    let orphans = model.iter().filter(|entry| u64::from(entry.1) == value && entry.3.is_some());
                    prop_assert_eq!(queue.orphans_on(value as u16), orphans.count());
                    let untied = model.iter().filter(|entry| u64::from(entry.1) == value && entry.3.is_none());
                    prop_assert_eq!(queue.untied_on(value as u16), untied.count());
                }
            }
        }
    }
}
