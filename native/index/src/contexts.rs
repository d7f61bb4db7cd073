//! What blocks share besides their tokens: how they are cut, and the namespace.

use std::collections::HashMap;

use crate::keys::{self, Scheme};

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

/// What blocks have in the place of a LoRA that were told by their keys: whatever their namespace is, it is in these.
const KEYED: u64 = u64::MAX;

impl Context {
    /// Of blocks that were told by their keys.
    pub fn keyed(size: u32) -> Self {
        Self {
            scheme: Scheme { size, eagle: false },
            lora: KEYED,
            salt: 0,
        }
    }

    /// Whether its blocks were told by their keys.
    #[inline]
    pub fn is_keyed(&self) -> bool {
        self.lora == KEYED
    }

    /// Seed of its local hashes.
    pub fn seed(&self) -> u64 {
        keys::seed(self.lora, self.salt)
    }
}

/// All contexts that some block has.
#[derive(Debug, Default)]
pub struct Contexts {
    entries: Vec<(Context, u32)>,
    free: Vec<u32>,
    lookup: HashMap<Context, u32>,
    schemes: Vec<(Scheme, u32)>,
    /// How many are of blocks that were told by their keys.
    keyed: u32,
    /// The last one that was asked for; most batches go on in the same.
    last: u32,
}

impl Contexts {
    /// The context `number`.
    #[inline]
    pub fn get(&self, number: u32) -> &Context {
        &self.entries[number as usize].0
    }

    /// The number of a context that some block has.
    pub fn find(&self, context: &Context) -> Option<u32> {
        self.lookup.get(context).copied()
    }

    /// Whether some blocks were told by their keys.
    #[inline]
    pub fn has_keyed(&self) -> bool {
        self.keyed > 0
    }

    /// The number of the context of blocks that were told by their keys, which are of any namespace.
    pub fn keyed(&self, scheme: Scheme) -> Option<u32> {
        if self.keyed == 0 || scheme.eagle {
            return None;
        }
        self.find(&Context::keyed(scheme.size))
    }

    /// The number of a context, for `count` blocks more.
    pub fn retain(&mut self, context: Context, count: u32) -> u32 {
        if let Some((last, users)) = self.entries.get_mut(self.last as usize)
            && *last == context
            && *users > 0
        {
            *users += count;
            return self.last;
        }
        if let Some(&number) = self.lookup.get(&context) {
            self.entries[number as usize].1 += count;
            self.last = number;
            return number;
        }
        self.keyed += u32::from(context.is_keyed());
        match self.schemes.iter_mut().find(|(scheme, _)| *scheme == context.scheme) {
            Some((_, users)) => *users += 1,
            None => self.schemes.push((context.scheme, 1)),
        }
        let number = self.free.pop().unwrap_or_else(|| {
            self.entries.push((context, 0));
            (self.entries.len() - 1) as u32
        });
        self.entries[number as usize] = (context, count);
        self.lookup.insert(context, number);
        number
    }

    /// `count` uses more of a context in use.
    #[inline]
    pub fn add(&mut self, number: u32, count: u32) {
        self.entries[number as usize].1 += count;
    }

    /// Gives back `count` uses of a context.
    #[inline]
    pub fn release(&mut self, number: u32, count: u32) {
        let (_, users) = &mut self.entries[number as usize];
        *users -= count;
        if *users == 0 {
            self.forget(number);
        }
    }

    /// Forgets a context that nobody uses any more.
    #[cold]
    fn forget(&mut self, number: u32) {
        let context = self.entries[number as usize].0;
        self.lookup.remove(&context);
        self.keyed -= u32::from(context.is_keyed());
        self.free.push(number);
        if let Some(at) = self.schemes.iter().position(|(scheme, _)| *scheme == context.scheme) {
            self.schemes[at].1 -= 1;
            if self.schemes[at].1 == 0 {
                self.schemes.swap_remove(at);
            }
        }
        if self.lookup.is_empty() {
            *self = Self::default();
        }
    }

    /// Schemes in use.
    pub fn schemes(&self) -> impl Iterator<Item = Scheme> + '_ {
        self.schemes.iter().map(|(scheme, _)| *scheme)
    }

    /// Heap bytes, about.
    pub fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<(Context, u32)>()
            + self.free.capacity() * 4
            + self.lookup.capacity() * (size_of::<(Context, u32)>() + 1)
            + self.schemes.capacity() * size_of::<(Scheme, u32)>()
    }
}
