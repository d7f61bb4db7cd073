//! What a stream cannot place yet, oldest first: orphans wait for their parent, untied hashes for a store with tokens.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::keys::Scheme;

/// What an orphan needs to be placed.
#[derive(Clone, Debug)]
pub struct Content {
    /// Tokens that its hash covers.
    pub tokens: Box<[u32]>,
    /// Hashes of its extra keys.
    pub extras: Box<[u64]>,
    /// How its tokens were cut.
    pub scheme: Scheme,
    /// What its LoRA adds to the seed.
    pub lora: u64,
    /// What its own salt adds to the seed; None where it is its parent's.
    pub salt: Option<u64>,
}

/// What an entry of a queue holds besides its hashes.
pub trait Weight {
    /// Its heap bytes.
    fn bytes(&self) -> usize;
}

impl Weight for Content {
    fn bytes(&self) -> usize {
        self.tokens.len() * 4 + self.extras.len() * 8
    }
}

/// One copy of a block that waits.
#[derive(Clone, Debug)]
pub struct Waiting<C = Content> {
    /// Its hash.
    pub hash: u64,
    /// Where it is.
    pub plane: u16,
    /// The hash that it waits for.
    pub awaited: u64,
    /// None for a hash without tokens.
    pub content: Option<C>,
}

impl<C: Weight> Waiting<C> {
    fn bytes(&self) -> usize {
        ENTRY_BYTES + self.content.as_ref().map_or(0, Weight::bytes)
    }
}

/// About what one entry takes in the maps below, besides its content.
const ENTRY_BYTES: usize = size_of::<(u64, Waiting)>() * 3 / 2 + 2 * 64;

/// A bounded queue.
#[derive(Debug)]
pub struct Queue<C = Content> {
    items: BTreeMap<u64, Waiting<C>>,
    by_awaited: HashMap<u64, VecDeque<u64>>,
    by_hash: HashMap<u64, VecDeque<u64>>,
    next: u64,
    bytes: usize,
}

fn drop_from(lists: &mut HashMap<u64, VecDeque<u64>>, of: u64, number: u64) {
    if let Some(list) = lists.get_mut(&of) {
        if list.front() == Some(&number) {
            list.pop_front();
        } else {
            list.retain(|other| *other != number);
        }
        if list.is_empty() {
            lists.remove(&of);
        }
    }
}

impl<C> Default for Queue<C> {
    fn default() -> Self {
        Self {
            items: BTreeMap::new(),
            by_awaited: HashMap::new(),
            by_hash: HashMap::new(),
            next: 0,
            bytes: 0,
        }
    }
}

impl<C: Weight> Queue<C> {
    /// How many wait.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether nothing waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Heap bytes, about.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// In the order in which they came.
    pub fn iter(&self) -> impl Iterator<Item = &Waiting<C>> {
        self.items.values()
    }

    /// Whether something waits that has this hash, or for it.
    pub fn names(&self, hash: u64) -> bool {
        self.by_hash.contains_key(&hash) || self.by_awaited.contains_key(&hash)
    }

    /// Lets one more wait; the oldest ones fall out above `limit`, and are counted.
    pub fn push(&mut self, waiting: Waiting<C>, limit: usize) -> u64 {
        self.bytes += waiting.bytes();
        self.by_awaited.entry(waiting.awaited).or_default().push_back(self.next);
        self.by_hash.entry(waiting.hash).or_default().push_back(self.next);
        self.items.insert(self.next, waiting);
        self.next += 1;
        let mut dropped = 0;
        while self.items.len() > limit {
            self.pop();
            dropped += 1;
        }
        dropped
    }

    /// Drops the oldest one.
    pub fn pop(&mut self) {
        if let Some(&number) = self.items.keys().next() {
            self.take(number);
        }
    }

    fn take(&mut self, number: u64) -> Option<Waiting<C>> {
        let waiting = self.items.remove(&number)?;
        self.bytes -= waiting.bytes();
        drop_from(&mut self.by_awaited, waiting.awaited, number);
        drop_from(&mut self.by_hash, waiting.hash, number);
        if self.items.is_empty() {
            let next = self.next;
            *self = Self { next, ..Self::default() };
        }
        Some(waiting)
    }

    /// Takes everything that waits for `hash`.
    pub fn take_awaiting(&mut self, hash: u64) -> Vec<Waiting<C>> {
        let Some(numbers) = self.by_awaited.remove(&hash) else {
            return Vec::new();
        };
        numbers.into_iter().filter_map(|number| self.take(number)).collect()
    }

    /// Takes one copy of `hash` on `plane`: of an orphan, else of an untied hash. Says whether there was one.
    pub fn remove(&mut self, hash: u64, plane: u16) -> bool {
        self.remove_where(hash, |other| other == plane)
    }

    /// The same of any plane that `meant` says.
    pub fn remove_where(&mut self, hash: u64, meant: impl Fn(u16) -> bool) -> bool {
        let Some(numbers) = self.by_hash.get(&hash) else {
            return false;
        };
        let here = |number: &&u64| meant(self.items[number].plane);
        let orphan = numbers
            .iter()
            .filter(here)
            .find(|number| self.items[number].content.is_some());
        let found = orphan.or_else(|| numbers.iter().find(here)).copied();
        found.is_some_and(|number| self.take(number).is_some())
    }

    /// Drops everything on planes that `meant` says.
    pub fn clear(&mut self, meant: impl Fn(u16) -> bool) {
        let numbers: Vec<u64> = self
            .items
            .iter()
            .filter(|(_, item)| meant(item.plane))
            .map(|(number, _)| *number)
            .collect();
        for number in numbers {
            self.take(number);
        }
    }
}
