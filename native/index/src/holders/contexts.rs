//! Contexts: the block size and the namespace, which many blocks share.

use crate::keys::{self, Scheme};
use crate::memory::hasher::Secret;
use crate::memory::sharded_table::ShardedTable;

/// Largest number of contexts: a record has 30 bits for the number that identifies its context.
pub const MAX_CONTEXTS: u32 = 1 << 30;

/// Scheme and namespace that blocks share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context {
    /// The rule by which the prompt's tokens were divided into blocks.
    pub scheme: Scheme,
    /// Part of the seed that the LoRA contributes; 0 without a LoRA.
    pub lora: u64,
    /// Part of the seed that the salt contributes; 0 without a salt.
    pub salt: u64,
}

/// Value of `lora` in contexts of blocks that were stored by their keys: the keys include the LoRA and the salt.
const KEYED: u64 = u64::MAX;

impl Context {
    /// The context of blocks that were stored by their keys.
    pub fn keyed(size: u32) -> Self {
        Self {
            scheme: Scheme { size, eagle: false },
            lora: KEYED,
            salt: 0,
        }
    }

    /// Whether the blocks of this context were stored by their keys.
    #[inline]
    pub fn is_keyed(&self) -> bool {
        self.lora == KEYED
    }

    /// Seed of the local hashes in this context.
    pub fn seed(&self) -> u64 {
        keys::seed(self.lora, self.salt)
    }
}

/// The hash by which tables find a context.
#[inline]
fn place_of(secret: Secret, context: &Context) -> u64 {
    let Context { scheme, lora, salt } = *context;
    let cut = u64::from(scheme.size) << 1 | u64::from(scheme.eagle);
    secret.place(secret.place(salt ^ cut) ^ lora)
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    context: Context,
    /// Number of blocks that have the context, plus the number of callers that have retained it temporarily.
    users: u32,
}

/// The contexts in the form that lookups read, as of the last publication.
#[derive(Debug)]
pub struct Known {
    contexts: Vec<Option<Context>>,
    lookup: ShardedTable<u32>,
    secret: Secret,
    /// Number of contexts of blocks that were stored by their keys.
    keyed: u32,
}

impl Known {
    /// Creates an empty table.
    pub fn new(secret: Secret) -> Self {
        Self {
            contexts: Vec::new(),
            lookup: ShardedTable::new(),
            secret,
            keyed: 0,
        }
    }

    /// The context with this number.
    #[inline]
    pub fn get(&self, number: u32) -> Option<&Context> {
        self.contexts.get(number as usize)?.as_ref()
    }

    /// Returns the number of a context; None if no block has the context.
    #[inline]
    pub fn find(&self, context: &Context) -> Option<u32> {
        let same = |&number: &u32| self.contexts[number as usize].as_ref() == Some(context);
        self.lookup.find(place_of(self.secret, context), same).copied()
    }

    /// Returns the number of the context of blocks that were stored by their keys. Blocks that were stored by their keys can belong to any
    /// namespace.
    #[inline]
    pub fn keyed(&self, scheme: Scheme) -> Option<u32> {
        if self.keyed == 0 {
            return None;
        }
        self.find(&Context::keyed(scheme.size))
    }

    fn put(&mut self, number: u32, context: Option<Context>) {
        let (at, secret) = (number as usize, self.secret);
        self.contexts.resize(self.contexts.len().max(at + 1), None);
        if let Some(before) = self.contexts[at].take() {
            self.keyed -= u32::from(before.is_keyed());
            self.lookup.remove(place_of(secret, &before), |&other| other == number);
        }
        if let Some(context) = context {
            self.keyed += u32::from(context.is_keyed());
            self.contexts[at] = Some(context);
            let contexts = &self.contexts;
            let place = |&other: &u32| contexts[other as usize].map_or(0, |other| place_of(secret, &other));
            self.lookup.insert(place_of(secret, &context), number, place);
        }
    }
}

/// All contexts that some block has.
#[derive(Debug)]
pub struct Contexts {
    entries: Vec<Entry>,
    free: Vec<u32>,
    lookup: ShardedTable<u32>,
    secret: Secret,
    /// Numbers of contexts that are not published to lookups yet.
    changed: Vec<u32>,
    /// The most recently retained context: the next batch usually has the same context.
    last: u32,
}

impl Contexts {
    /// Creates an empty table.
    pub fn new(secret: Secret) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            lookup: ShardedTable::new(),
            secret,
            changed: Vec::new(),
            last: 0,
        }
    }

    /// The context `number`.
    #[inline]
    pub fn get(&self, number: u32) -> &Context {
        &self.entries[number as usize].context
    }

    /// Returns the number of a context; None if no block has the context.
    #[inline]
    pub fn find(&self, context: &Context) -> Option<u32> {
        let same = |&number: &u32| self.entries[number as usize].context == *context;
        self.lookup.find(place_of(self.secret, context), same).copied()
    }

    /// Returns the number of a context, and increments its use count; None if there are too many contexts.
    pub fn retain(&mut self, context: Context) -> Option<u32> {
        if let Some(last) = self.entries.get_mut(self.last as usize)
            && last.context == context
            && last.users > 0
        {
            last.users += 1;
            return Some(self.last);
        }
        if let Some(number) = self.find(&context) {
            self.entries[number as usize].users += 1;
            self.last = number;
            return Some(number);
        }
        let number = match self.free.pop() {
            Some(number) => number,
            None if self.entries.len() >= MAX_CONTEXTS as usize => return None,
            None => self.entries.len() as u32,
        };
        let entry = Entry { context, users: 1 };
        match self.entries.get_mut(number as usize) {
            Some(free) => *free = entry,
            None => self.entries.push(entry),
        }
        self.changed.push(number);
        let (entries, secret) = (&self.entries, self.secret);
        let place = |&number: &u32| place_of(secret, &entries[number as usize].context);
        self.lookup.insert(place_of(secret, &context), number, place);
        self.last = number;
        Some(number)
    }

    /// Adds `count` to the use count of a context that is in use.
    #[inline]
    pub fn add(&mut self, number: u32, count: u32) {
        self.entries[number as usize].users += count;
    }

    /// Decrements the use count of a context.
    #[inline]
    pub fn release(&mut self, number: u32) {
        self.release_uses(number, 1);
    }

    /// Subtracts `count` from the use count of a context.
    #[inline]
    pub fn release_uses(&mut self, number: u32, count: u32) {
        let entry = &mut self.entries[number as usize];
        entry.users -= count;
        if entry.users == 0 {
            self.forget(number);
        }
    }

    /// Forgets a context that is not used any more.
    #[cold]
    fn forget(&mut self, number: u32) {
        let context = self.entries[number as usize].context;
        let place = place_of(self.secret, &context);
        self.lookup.remove(place, |&other| other == number);
        self.free.push(number);
        self.changed.push(number);
        if self.lookup.is_empty() {
            let changed = std::mem::take(&mut self.changed);
            *self = Self {
                changed,
                ..Self::new(self.secret)
            };
        }
    }

    /// Number of changed contexts that lookups do not see yet.
    pub fn changes(&self) -> usize {
        self.changed.len()
    }

    /// Makes all contexts visible to lookups. No lookup may run during this call.
    pub fn move_to(&mut self, view: &mut Known) {
        for number in self.changed.drain(..) {
            let entry = self.entries.get(number as usize).filter(|entry| entry.users > 0);
            view.put(number, entry.map(|entry| entry.context));
        }
        if view.contexts.len() > self.entries.len() {
            view.contexts.truncate(self.entries.len());
            view.contexts.shrink_to_fit();
        }
    }

    /// Contexts in use.
    pub fn len(&self) -> usize {
        self.lookup.len()
    }

    /// Whether there are no contexts.
    pub fn is_empty(&self) -> bool {
        self.lookup.is_empty()
    }

    /// Approximate heap bytes.
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * (size_of::<Entry>() + size_of::<Context>()) + self.free.capacity() * 4 + self.lookup.bytes()
    }
}
