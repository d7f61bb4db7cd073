//! What blocks share besides their tokens: how they are cut, and the namespace.

use hashbrown::HashTable;

use crate::hasher::Secret;
use crate::keys::{self, Scheme};
use crate::records::MAX_CONTEXTS;

/// Scheme and namespace of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context {
    /// How its tokens were cut.
    pub scheme: Scheme,
    /// What its LoRA adds to the seed; 0 for none.
    pub lora: u64,
    /// What its salt adds to the seed; 0 for none.
    pub salt: u64,
}

/// What blocks have in the place of a LoRA that were stored by their keys: whatever their namespace is, it is in these.
const KEYED: u64 = u64::MAX;

impl Context {
    /// Of blocks that were stored by their keys.
    pub fn keyed(size: u32) -> Self {
        Self {
            scheme: Scheme { size, eagle: false },
            lora: KEYED,
            salt: 0,
        }
    }

    /// Whether its blocks were stored by their keys.
    #[inline]
    pub fn is_keyed(&self) -> bool {
        self.lora == KEYED
    }

    /// Seed of its local hashes.
    pub fn seed(&self) -> u64 {
        keys::seed(self.lora, self.salt)
    }
}

/// The place of a context in a table.
#[inline]
fn place_of(secret: Secret, context: &Context) -> u64 {
    let Context { scheme, lora, salt } = *context;
    let cut = u64::from(scheme.size) << 1 | u64::from(scheme.eagle);
    secret.place(secret.place(salt ^ cut) ^ lora)
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    context: Context,
    /// Blocks, and others that use it for a while.
    users: u32,
}

/// All contexts that some block has.
#[derive(Debug)]
pub struct Contexts {
    entries: Vec<Entry>,
    free: Vec<u32>,
    lookup: HashTable<u32>,
    secret: Secret,
    /// How many are of blocks that were stored by their keys.
    keyed: u32,
    /// The last one that was retained; most batches go on in the same.
    last: u32,
}

impl Contexts {
    /// None so far.
    pub fn new(secret: Secret) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            lookup: HashTable::new(),
            secret,
            keyed: 0,
            last: 0,
        }
    }

    /// The context `number`.
    #[inline]
    pub fn get(&self, number: u32) -> &Context {
        &self.entries[number as usize].context
    }

    /// The number of a context that some block has.
    #[inline]
    pub fn find(&self, context: &Context) -> Option<u32> {
        let same = |&number: &u32| self.entries[number as usize].context == *context;
        self.lookup.find(place_of(self.secret, context), same).copied()
    }

    /// The number of the context of blocks that were stored by their keys, which are of any namespace.
    #[inline]
    pub fn keyed(&self, scheme: Scheme) -> Option<u32> {
        if self.keyed == 0 || scheme.eagle {
            return None;
        }
        self.find(&Context::keyed(scheme.size))
    }

    /// The number of a context, for one use more; None when there are too many.
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
        self.keyed += u32::from(context.is_keyed());
        let (entries, secret) = (&self.entries, self.secret);
        let place = |&number: &u32| place_of(secret, &entries[number as usize].context);
        self.lookup.insert_unique(place_of(secret, &context), number, place);
        self.last = number;
        Some(number)
    }

    /// `count` uses more of a context in use.
    #[inline]
    pub fn add(&mut self, number: u32, count: u32) {
        self.entries[number as usize].users += count;
    }

    /// Gives back a use of a context.
    #[inline]
    pub fn release(&mut self, number: u32) {
        let entry = &mut self.entries[number as usize];
        entry.users -= 1;
        if entry.users == 0 {
            self.forget(number);
        }
    }

    /// Forgets a context that is not used any more.
    #[cold]
    fn forget(&mut self, number: u32) {
        let context = self.entries[number as usize].context;
        let place = place_of(self.secret, &context);
        if let Ok(entry) = self.lookup.find_entry(place, |&other| other == number) {
            entry.remove();
        }
        self.keyed -= u32::from(context.is_keyed());
        self.free.push(number);
        if self.lookup.is_empty() {
            *self = Self::new(self.secret);
        }
    }

    /// Contexts in use.
    pub fn len(&self) -> usize {
        self.lookup.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lookup.is_empty()
    }

    /// Heap bytes, about.
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>() + self.free.capacity() * 4 + self.lookup.allocation_size()
    }
}
