//! What the shared part has where nobody has asked for a block by its key so far.
//!
//! Most blocks come once, and go, without anybody asking who they are. So they are kept by stream as they came (`crate::kept`), with
//! what their part of a digest is made of, and no record. Of keys no more is known than how many there may be of one, since only so many
//! records have the same. Whoever has to know a block itself, and not only its hash, looks into it: that is where its hash comes again,
//! or means another block too. Then it gets a record. Whoever asks for keys has all blocks looked into, and keys listed from then on.

use crate::core::{ByKey, Core, MAX_TWINS};
use crate::kept::{Entry, Kept};
use crate::tally::Tally;

impl Core {
    /// Counts keys from now on, until somebody asks for one; while there are none.
    pub fn count_keys(&mut self) {
        debug_assert!(self.records.is_empty());
        self.tally = Some(Tally::default());
    }

    /// Whether keys can be asked for, as far as blocks have records.
    #[inline]
    pub fn is_listed(&self) -> bool {
        self.tally.is_none()
    }

    /// Whether blocks may be kept without records, or have been.
    #[inline]
    pub fn keeps(&self) -> bool {
        !self.kept.is_empty()
    }

    /// The blocks of a stream that nobody has looked into.
    #[inline]
    pub fn kept_of(&self, stream: u32) -> Option<&Kept> {
        self.kept.get(stream as usize).filter(|kept| !kept.is_empty())
    }

    /// Blocks without records.
    pub fn unlooked(&self) -> usize {
        self.kept.iter().map(Kept::len).sum()
    }

    /// Takes note that no stream has such blocks any more, where keys are listed: there will be none.
    pub fn looked_into(&mut self) {
        if self.is_listed() && self.unlooked() == 0 {
            self.kept = Vec::new();
        }
    }

    /// Has room for so many more of them, and to count their keys.
    #[inline]
    pub fn ready_to_keep(&mut self, stream: u32, count: usize) {
        let at = stream as usize;
        if at >= self.kept.len() {
            self.kept.resize_with(at + 1, Kept::default);
        }
        self.kept[at].reserve(count, self.secret);
        self.ready_to_count(count);
    }

    /// Has room to count so many keys more.
    #[inline]
    fn ready_to_count(&mut self, keys: usize) {
        if self.tally.as_ref().is_some_and(|tally| !tally.has_room(keys)) {
            self.recount(self.records.len() + self.unlooked() + keys);
        }
    }

    /// Whether there may be as many blocks of a key as can have records: then keys have to be listed before there is one more.
    #[inline]
    pub fn is_crowded(&self, key: u64) -> bool {
        let crowded = |tally: &Tally| tally.often(self.secret.place(key)) >= MAX_TWINS;
        self.tally.as_ref().is_some_and(crowded)
    }

    /// Counts a key in; false where keys are listed instead.
    #[inline]
    pub fn count_in(&mut self, key: u64) -> bool {
        self.ready_to_count(1);
        let Some(tally) = &mut self.tally else { return false };
        tally.add(self.secret.place(key));
        true
    }

    /// Counts a key out, where keys are counted.
    #[inline]
    pub fn count_out(&mut self, key: u64) {
        if let Some(tally) = &mut self.tally {
            tally.remove(self.secret.place(key));
            if tally.is_loose() {
                self.recount(self.records.len() + self.unlooked());
            }
        }
    }

    /// Counts all keys anew, with cells for so many.
    #[cold]
    fn recount(&mut self, keys: usize) {
        let mut tally = Tally::of(keys);
        let told = self.records.numbers().map(|number| self.records.get(number).key);
        let kept = self.kept.iter().flat_map(Kept::iter).map(|entry| entry.key);
        told.chain(kept).for_each(|key| tally.add(self.secret.place(key)));
        self.tally = Some(tally);
    }

    /// Lists the keys of all records where they were only counted. From now on, whoever has blocks without records looks into them
    /// before anything else.
    #[cold]
    pub fn list_keys(&mut self) {
        if self.tally.take().is_none() {
            return;
        }
        let numbers: Vec<u32> = self.records.numbers().collect();
        for number in numbers {
            let key = self.records.get(number).key;
            self.keys.insert(self.spot(key), number, &ByKey(&self.records, self.secret));
            if self.twins(key, |_| true).len() > 1 {
                self.mark_twins(key);
            }
        }
    }

    /// Takes a block of a stream out of those that nobody has looked into; its key is not counted any more, its context still is.
    pub fn take_kept(&mut self, stream: u32, hash: u64) -> Option<Entry> {
        let secret = self.secret;
        let kept = self.kept.get_mut(stream as usize)?;
        let (entry, _) = kept.occupied(secret.place(hash), hash)?.remove();
        kept.shrink(secret);
        self.count_out(entry.key);
        Some(entry)
    }

    /// Takes all of them out, and of the keys too.
    pub fn take_all_kept(&mut self, stream: u32) -> Vec<Entry> {
        let Some(kept) = self.kept.get_mut(stream as usize) else {
            return Vec::new();
        };
        let all: Vec<Entry> = std::mem::take(kept).into_iter().collect();
        if let Some(tally) = &mut self.tally {
            let secret = self.secret;
            all.iter().for_each(|entry| tally.remove(secret.place(entry.key)));
            if tally.is_loose() {
                self.recount(self.records.len() + self.unlooked());
            }
        }
        all
    }
}
