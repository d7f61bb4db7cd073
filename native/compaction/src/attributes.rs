//! Attributes that many blocks have in common; each combination is stored only once.

use std::hash::{BuildHasher, RandomState};

use hashbrown::HashTable;

use kvevents_index::holders::contexts::Context;

use super::event::Namespace;

/// Attributes that blocks can have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Attributes<'a> {
    /// Block size, LoRA and salt; the salt can be that of the parent. A block is identified by its context, hash and key.
    pub context: Context,
    /// The namespace as an engine announced it.
    pub namespace: Namespace<'a>,
    /// The announcements of which the block has copies, as bits; 0 if the block is only an ancestor of other blocks.
    pub copies: u64,
    /// ID of the announcement of the first store of the block.
    pub origin: u8,
}

#[derive(Debug)]
struct Entry {
    attributes: Attributes<'static>,
    users: u32,
}

/// The attributes of all blocks, by ID.
#[derive(Debug, Default)]
pub struct AttributeTable {
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    lookup: HashTable<u32>,
    state: RandomState,
    /// The ID that the previous call has returned, which the next call probably needs too.
    last: u32,
    /// Number of bytes of texts and extra keys.
    text_bytes: usize,
}

fn find(entries: &[Option<Entry>], number: u32) -> Option<&Attributes<'static>> {
    let entry = entries.get(number as usize).and_then(Option::as_ref);
    entry.map(|entry| &entry.attributes)
}

impl AttributeTable {
    /// The attributes with this ID, which must be in use.
    #[inline]
    pub fn get(&self, number: u32) -> &Attributes<'static> {
        find(&self.entries, number).expect("attributes in use are in the table")
    }

    /// Returns the ID of these attributes, and counts one more block with them.
    #[inline]
    pub fn retain(&mut self, wanted: &Attributes<'_>) -> u32 {
        if find(&self.entries, self.last) != Some(wanted) {
            self.last = self.find_or_insert(wanted);
        }
        if let Some(Some(entry)) = self.entries.get_mut(self.last as usize) {
            entry.users += 1;
        }
        self.last
    }

    fn find_or_insert(&mut self, wanted: &Attributes<'_>) -> u32 {
        let (entries, state) = (&self.entries, &self.state);
        let hash = state.hash_one(wanted);
        if let Some(&number) = self.lookup.find(hash, |&number| find(entries, number) == Some(wanted)) {
            return number;
        }
        let number = self.free.pop().unwrap_or(entries.len() as u32);
        self.lookup.insert_unique(hash, number, |&other| {
            find(entries, other).map_or(0, |other| state.hash_one(other))
        });
        let attributes = Attributes {
            namespace: wanted.namespace.to_static(),
            ..*wanted
        };
        self.text_bytes += attributes.namespace.bytes();
        let entry = Some(Entry { attributes, users: 0 });
        match self.entries.get_mut(number as usize) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
        number
    }

    /// Decrements the number of blocks with these attributes.
    #[inline]
    pub fn release(&mut self, number: u32) {
        let Some(Some(entry)) = self.entries.get_mut(number as usize) else {
            return;
        };
        entry.users -= 1;
        if entry.users == 0 {
            self.remove(number);
        }
    }

    #[cold]
    fn remove(&mut self, number: u32) {
        let Some(Entry { attributes, .. }) = self.entries[number as usize].take() else {
            return;
        };
        self.text_bytes -= attributes.namespace.bytes();
        if let Ok(found) = self
            .lookup
            .find_entry(self.state.hash_one(&attributes), |&other| other == number)
        {
            found.remove();
        }
        self.free.push(number);
        if self.lookup.is_empty() {
            *self = Self {
                state: self.state.clone(),
                ..Self::default()
            };
        }
    }

    /// Changes `copies` in the attributes of one block, whose present attributes have the ID `number`. Returns the ID of the new
    /// attributes.
    pub fn replace_copies(&mut self, number: u32, copies: u64) -> u32 {
        let attributes = Attributes {
            copies,
            ..self.get(number).clone()
        };
        let other = self.retain(&attributes);
        self.release(number);
        other
    }

    /// Number of bytes of texts and extra keys.
    pub fn text_bytes(&self) -> usize {
        self.text_bytes
    }

    /// Heap bytes.
    pub fn bytes(&self) -> usize {
        self.text_bytes
            + self.entries.capacity() * size_of::<Option<Entry>>()
            + self.free.capacity() * size_of::<u32>()
            + self.lookup.allocation_size()
    }
}
