//! What blocks share besides their tokens, as the engine said it.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

use kvevents_index::contexts::Context;
use kvevents_index::keys::Scheme;

use super::store::StoreView;

/// What says who a block is, besides its hash and its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// How its tokens were cut.
    pub scheme: Scheme,
    /// What its LoRA adds to the seed.
    pub lora: u64,
    /// What its salt adds to the seed, its own or its parent's.
    pub salt: u64,
}

impl Identity {
    /// Of blocks that were told by their keys.
    pub fn keyed(size: u32) -> Self {
        let Context { scheme, lora, salt } = Context::keyed(size);
        Self { scheme, lora, salt }
    }

    /// Whether its blocks were told by their keys.
    pub fn is_keyed(&self) -> bool {
        *self == Self::keyed(self.scheme.size)
    }
}

/// What an event says of a block's namespace, as bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub struct Spelled<'a> {
    pub lora_id: Option<i64>,
    pub lora_name: Option<&'a [u8]>,
    pub cache_salt: Option<&'a [u8]>,
    /// This block's extra keys.
    pub extra: Option<&'a [u8]>,
}

impl<'a> Spelled<'a> {
    /// Of the blocks of an event, extra keys apart.
    pub fn of(store: &StoreView<'a>) -> Self {
        Self {
            lora_id: store.lora_id,
            lora_name: store.lora_name,
            cache_salt: store.cache_salt,
            extra: None,
        }
    }

    /// The same with the extra keys of a block.
    pub fn with(self, extra: Option<&'a [u8]>) -> Self {
        Self { extra, ..self }
    }
}

/// `Spelled` with values of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Naming {
    pub lora_id: Option<i64>,
    pub lora_name: Option<Box<[u8]>>,
    pub cache_salt: Option<Box<[u8]>>,
    pub extra: Option<Box<[u8]>>,
}

impl Naming {
    /// Of borrowed values.
    pub fn of(spelled: &Spelled<'_>) -> Self {
        Self {
            lora_id: spelled.lora_id,
            lora_name: spelled.lora_name.map(Box::from),
            cache_salt: spelled.cache_salt.map(Box::from),
            extra: spelled.extra.map(Box::from),
        }
    }

    /// As events have it.
    #[inline]
    pub fn view(&self) -> Spelled<'_> {
        Spelled {
            lora_id: self.lora_id,
            lora_name: self.lora_name.as_deref(),
            cache_salt: self.cache_salt.as_deref(),
            extra: self.extra.as_deref(),
        }
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        [&self.lora_name, &self.cache_salt, &self.extra]
            .into_iter()
            .flatten()
            .map(|bytes| bytes.len() + 16)
            .sum()
    }
}

/// Where no tokens are.
pub const NO_SHELF: u32 = u32::MAX;

/// Identity and naming of blocks, kept once.
#[derive(Debug)]
pub struct Entry {
    /// Who they are.
    pub identity: Identity,
    /// What is said of them.
    pub naming: Naming,
    /// Number of the shelf of their tokens; `NO_SHELF` without any.
    pub shelf: u32,
    users: u32,
    /// Of no other that has or had its number.
    stamp: u64,
}

/// A naming that may be gone by now.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    /// Its number.
    pub number: u32,
    stamp: u64,
}

/// All that some block has.
#[derive(Debug, Default)]
pub struct Namings {
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    lookup: HashTable<u32>,
    state: RandomState,
    last: u32,
    bytes: usize,
    /// Namings that there ever were.
    stamps: u64,
}

impl Namings {
    /// One that is in use.
    #[inline]
    pub fn get(&self, number: u32) -> &Entry {
        self.entries[number as usize].as_ref().expect("a naming in use is there")
    }

    /// The number of one, for one block more. `shelf` is asked only for a new one.
    #[inline]
    pub fn retain(&mut self, identity: Identity, spelled: &Spelled<'_>, shelf: impl FnOnce() -> u32) -> u32 {
        if let Some(Some(entry)) = self.entries.get_mut(self.last as usize)
            && entry.identity == identity
            && entry.naming.view() == *spelled
        {
            entry.users += 1;
            return self.last;
        }
        self.last = self.other(identity, spelled, shelf);
        self.last
    }

    /// The same for one that was known, if it is there and has this salt: whether it is.
    #[inline]
    pub fn retain_again(&mut self, known: Stamp, salt: u64) -> bool {
        let entry = self.entries.get_mut(known.number as usize).and_then(Option::as_mut);
        let Some(entry) = entry.filter(|entry| entry.stamp == known.stamp && entry.identity.salt == salt) else {
            return false;
        };
        entry.users += 1;
        true
    }

    /// By what one in use is known again.
    #[inline]
    pub fn stamp(&self, number: u32) -> Stamp {
        let stamp = self.get(number).stamp;
        Stamp { number, stamp }
    }

    fn other(&mut self, identity: Identity, spelled: &Spelled<'_>, shelf: impl FnOnce() -> u32) -> u32 {
        let place = self.state.hash_one((identity, spelled));
        let entries = &self.entries;
        let same = |&number: &u32| {
            (entries[number as usize].as_ref())
                .is_some_and(|entry| entry.identity == identity && entry.naming.view() == *spelled)
        };
        if let Some(&number) = self.lookup.find(place, same) {
            self.add(number);
            return number;
        }
        let entry = Entry {
            identity,
            naming: Naming::of(spelled),
            shelf: shelf(),
            users: 1,
            stamp: self.stamps,
        };
        self.stamps += 1;
        self.bytes += entry.naming.bytes();
        let number = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            (self.entries.len() - 1) as u32
        });
        self.entries[number as usize] = Some(entry);
        let (entries, state) = (&self.entries, &self.state);
        self.lookup
            .insert_unique(place, number, |&other| place_of(entries, state, other));
        number
    }

    /// One block more.
    #[inline]
    pub fn add(&mut self, number: u32) {
        if let Some(entry) = &mut self.entries[number as usize] {
            entry.users += 1;
        }
    }

    /// One block less; the number of its shelf.
    #[inline]
    pub fn release(&mut self, number: u32) -> u32 {
        let entry = self.entries[number as usize].as_mut().expect("a naming in use is there");
        let shelf = entry.shelf;
        entry.users -= 1;
        if entry.users == 0 {
            self.forget(number);
        }
        shelf
    }

    #[cold]
    fn forget(&mut self, number: u32) {
        let entry = self.entries[number as usize].as_mut().expect("a naming in use is there");
        self.bytes -= entry.naming.bytes();
        let place = place_of(&self.entries, &self.state, number);
        if let Ok(found) = self.lookup.find_entry(place, |&other| other == number) {
            found.remove();
        }
        self.entries[number as usize] = None;
        self.free.push(number);
        if self.lookup.is_empty() {
            let state = self.state.clone();
            *self = Self {
                state,
                stamps: self.stamps,
                ..Self::default()
            };
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lookup.is_empty()
    }

    /// Bytes of texts and extra keys.
    pub fn held(&self) -> usize {
        self.bytes
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
            + self.entries.capacity() * size_of::<Option<Entry>>()
            + self.free.capacity() * 4
            + self.lookup.allocation_size()
    }
}

fn place_of(entries: &[Option<Entry>], state: &RandomState, number: u32) -> u64 {
    let entry = entries[number as usize].as_ref();
    entry.map_or(0, |entry| state.hash_one((entry.identity, entry.naming.view())))
}
