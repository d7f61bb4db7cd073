//! Blocks of a stream that are kept as they came, and how they get records; `crate::unasked` says why.

use hashbrown::hash_table::Entry as Slot;

use crate::core::{Core, MAX_TWINS};
use crate::gate::BLOCKS_PER_HOLD;
use crate::kept::Entry;

use super::{Block, Stream, mark};

/// Bytes of a table from which on even what leads to its entries is not in a near cache whoever asks.
const FAR: usize = 8 << 20;

/// Blocks of one event, each the parent of the next.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct Chain<'a> {
    pub hashes: &'a [u64],
    pub keys: &'a [u64],
    pub context: u32,
    pub plane: u16,
}

impl Chain<'_> {
    /// Without the first ones.
    #[inline]
    pub fn behind(&self, count: usize) -> Self {
        let (hashes, keys) = (&self.hashes[count..], &self.keys[count..]);
        Self { hashes, keys, ..*self }
    }

    /// The first one alone, if there is any.
    #[inline]
    pub fn first(&self) -> Self {
        let count = self.hashes.len().min(1);
        let (hashes, keys) = (&self.hashes[..count], &self.keys[..count]);
        Self { hashes, keys, ..*self }
    }
}

/// A block that others are behind.
#[derive(Clone, Copy, Debug)]
pub struct Parent {
    /// Its key.
    pub key: u64,
    /// Its context.
    pub context: u32,
    /// Its record, if it has one.
    pub number: Option<u32>,
}

impl Stream {
    /// Whether blocks of a plane may be kept as they come.
    #[inline]
    pub fn may_keep(&self, core: &Core, plane: u16) -> bool {
        !core.is_listed() && self.waiting.is_empty() && Entry::bit(plane).is_some()
    }

    /// Keeps blocks as they came up to the first one that has to be looked into: how many. Only where `may_keep`.
    pub fn keep(&mut self, core: &mut Core, chain: &Chain<'_>) -> usize {
        let mut kept = 0;
        let pieces = chain.hashes.chunks(BLOCKS_PER_HOLD).zip(chain.keys.chunks(BLOCKS_PER_HOLD));
        for (hashes, keys) in pieces {
            let piece = Chain { hashes, keys, ..*chain };
            let count = self.keep_some(core, &piece);
            kept += count;
            if count < hashes.len() {
                break;
            }
        }
        kept
    }

    /// The same of so few that all they need is asked for before.
    fn keep_some(&mut self, core: &mut Core, chain: &Chain<'_>) -> usize {
        let &Chain { context, plane, .. } = chain;
        let hashes = self.unrecorded(core, chain.hashes);
        let Some(bit) = Entry::bit(plane).filter(|_| !hashes.is_empty()) else {
            return 0;
        };
        let marked = self.mark_of(core, plane);
        core.ready_to_keep(self.number, hashes.len());
        let secret = core.secret;
        let (kept, Some(tally)) = (&mut core.kept[self.number as usize], &mut core.tally) else {
            return 0;
        };
        let far = kept.bytes() > FAR;
        let mut places = [(0, 0); BLOCKS_PER_HOLD];
        for (place, (&hash, &key)) in places.iter_mut().zip(hashes.iter().zip(chain.keys)) {
            *place = (secret.place(hash), secret.place(key));
            tally.prefetch(place.1);
            if far {
                kept.prefetch(place.0);
            }
        }
        let (mut fresh, mut done, mut digest) = (0, 0, self.digest);
        for ((&hash, &key), &(place, counted)) in hashes.iter().zip(chain.keys).zip(&places) {
            match kept.entry(place, hash, secret) {
                Slot::Occupied(mut found) => {
                    let entry = found.get_mut();
                    if entry.key != key || entry.context != context || entry.planes & bit != 0 {
                        break;
                    }
                    entry.planes |= bit;
                }
                Slot::Vacant(vacant) => {
                    if tally.often(counted) >= MAX_TWINS {
                        break;
                    }
                    tally.add(counted);
                    let planes = bit;
                    vacant.insert(Entry {
                        hash,
                        key,
                        context,
                        planes,
                    });
                    fresh += 1;
                }
            }
            digest = digest.wrapping_add(mark(hash, key, marked));
            done += 1;
        }
        self.digest = digest;
        self.blocks += fresh;
        self.held[plane as usize] += done;
        core.contexts.add(context, fresh as u32);
        done
    }

    /// Hashes up to the first one that means a block with a record.
    #[inline]
    fn unrecorded<'a>(&self, core: &Core, hashes: &'a [u64]) -> &'a [u64] {
        if self.has_no_records() {
            return hashes;
        }
        let count = hashes.iter().position(|&hash| self.newest(core, hash).is_some());
        &hashes[..count.unwrap_or(hashes.len())]
    }

    /// Whether no block has one.
    #[inline]
    pub fn has_no_records(&self) -> bool {
        self.table.is_empty() && self.foreign.is_empty()
    }

    /// Takes the copy of a block without a record on `plane`, and says whether there was one; None where the hash is of no such block.
    #[inline]
    pub fn remove_kept(&mut self, core: &mut Core, hash: u64, plane: u16) -> Option<bool> {
        let secret = core.secret;
        let kept = core.kept.get_mut(self.number as usize)?;
        let mut found = kept.occupied(secret.place(hash), hash)?;
        let Entry {
            key, context, planes, ..
        } = *found.get();
        let Some(bit) = Entry::bit(plane).filter(|bit| planes & bit != 0) else {
            return Some(false);
        };
        if planes == bit {
            found.remove();
            kept.shrink(secret);
            self.blocks -= 1;
            core.contexts.release(context, 1);
            core.count_out(key);
        } else {
            found.get_mut().planes &= !bit;
        }
        self.digest = self.digest.wrapping_sub(mark(hash, key, self.mark_of(core, plane)));
        self.held[plane as usize] -= 1;
        Some(true)
    }

    /// The block that `hash` means to those that come behind it.
    #[inline]
    pub fn parent(&self, core: &Core, hash: u64) -> Option<Parent> {
        if let Some(kept) = core.kept_of(self.number)
            && let Some(&Entry { key, context, .. }) = kept.find(core.secret.place(hash), hash)
        {
            return Some(Parent {
                key,
                context,
                number: None,
            });
        }
        self.newest(core, hash).map(|number| Parent::of(core, number))
    }

    // --- looking into them

    /// Has the block of a hash in a record, if there is one that is kept.
    #[inline]
    pub fn look_into(&mut self, core: &mut Core, hash: u64) {
        if core.keeps()
            && let Some(entry) = core.take_kept(self.number, hash)
        {
            self.record(core, &entry);
        }
    }

    /// The same of all blocks of the stream.
    pub fn look_into_all(&mut self, core: &mut Core) {
        for entry in core.take_all_kept(self.number) {
            self.record(core, &entry);
        }
    }

    /// Makes a record of a block that was kept.
    #[cold]
    fn record(&mut self, core: &mut Core, entry: &Entry) {
        let &Entry {
            hash,
            key,
            context,
            planes,
        } = entry;
        let block = Block::new(core, hash, key, context);
        let planes = (0..u32::BITS as u16).filter(|plane| planes >> plane & 1 != 0);
        let mut number = None;
        for plane in planes {
            if let Some(number) = number {
                core.toggle(number, plane, self.number, &mut self.added);
            } else if let Some((held, fresh)) = core.hold(&block, plane, self.number, u32::MAX, &mut self.added) {
                self.enter(core, &block, held, fresh);
                number = Some(held);
            } else {
                // There are as many records as numbers.
                self.digest = self.digest.wrapping_sub(mark(hash, key, self.mark_of(core, plane)));
                self.held[plane as usize] -= 1;
            }
        }
        if number.is_none() {
            self.blocks -= 1;
            self.counters.reject("none", "too-many-alike");
        }
        core.contexts.release(context, 1);
    }
}

impl Parent {
    /// One that has a record.
    pub fn of(core: &Core, number: u32) -> Self {
        let record = core.records.get(number);
        Self {
            key: record.key,
            context: record.context(),
            number: Some(number),
        }
    }
}
