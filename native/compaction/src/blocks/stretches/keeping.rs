//! How blocks come to be kept, and go, and how they are placed in the tree.

use crate::blocks::{Block, Blocks, NONE, Placed, bits};

use super::{Above, BITS, CHILDREN, Fresh, Left, MOST, Stretch, Stretches};

impl Blocks {
    /// Where blocks behind `parent` would hang; None where no block with a copy has that hash.
    #[inline]
    pub fn above(&mut self, parent: Option<u64>) -> Option<Above> {
        let Some(hash) = parent else { return Some(Above::Root) };
        let Some(number) = self.stretches.find(hash) else {
            return self.newest(hash).map(Above::Placed);
        };
        if !self.stretches.is_live(number) {
            return None;
        }
        if self.stretches.all.get(number >> BITS).children >= CHILDREN {
            self.look_into(hash);
            return self.newest(hash).map(Above::Placed);
        }
        Some(Above::Kept(number))
    }

    /// What the salt of blocks there adds to their seed, if they have none of their own.
    #[inline]
    pub fn salt(&self, above: Above) -> u64 {
        let naming = match above {
            Above::Root => return 0,
            Above::Placed(number) => self.get(number).naming,
            Above::Kept(number) => self.stretches.all.get(number >> BITS).naming,
        };
        self.namings.get(naming).identity.salt
    }

    /// Keeps blocks, each the parent of the next, up to the first one whose hash is known: how many.
    pub fn keep(&mut self, fresh: &Fresh<'_>) -> usize {
        let blank = self.table.is_empty() && self.dead.is_empty();
        let known = |&hash: &u64| !blank && self.has(hash);
        let count = fresh.hashes.iter().position(known).unwrap_or(fresh.hashes.len());
        let (width, mut done, mut above) = (fresh.width, 0, fresh.above);
        while done < count {
            let Some((stretch, first)) = self
                .stretches
                .end(above, fresh)
                .or_else(|| self.stretches.begin(above, fresh))
            else {
                break;
            };
            let end = count.min(done + MOST - first);
            let (hashes, tokens) = (&fresh.hashes[done..end], &fresh.tokens[done * width..end * width]);
            let kept = self.stretches.extend(stretch, hashes, tokens, width);
            if first == 0 {
                self.begun(stretch, kept);
            }
            done += kept;
            if done < end {
                break;
            }
            above = Above::Kept(stretch << BITS | (first + kept - 1) as u32);
        }
        done
    }

    /// Takes note of a stretch that is new; without blocks it is none.
    fn begun(&mut self, stretch: u32, kept: usize) {
        if kept == 0 {
            self.stretches.drop(stretch);
            return;
        }
        let it = self.stretches.all.get_mut(stretch);
        it.born = self.births;
        self.births += MOST as u64;
        let (above, naming) = (it.above, it.naming);
        self.namings.add(naming);
        match above {
            Above::Root => {}
            Above::Placed(block) => self.get_mut(block).children += 1,
            Above::Kept(_) => self.stretches.hang(stretch),
        }
    }

    /// Whether a block of the tree has this hash, with copies or without.
    fn has(&self, hash: u64) -> bool {
        self.newest(hash).is_some() || (!self.dead.is_empty() && self.dead_hashes.contains_key(&hash))
    }

    /// Takes the copy of a block in a manner of `plane`. None where the hash is not of a stretch.
    #[inline]
    pub(in crate::blocks) fn remove_kept(&mut self, hash: u64, plane: u64) -> Option<bool> {
        let (stretch, left) = self.stretches.remove(hash, plane)?;
        match left {
            Left::Same => return Some(false),
            Left::Hole => {}
            Left::Shorter if self.stretches.all.get(stretch).ends_live() => self.stretches.tidy(stretch),
            Left::Shorter | Left::Dead => self.cut(stretch),
        }
        Some(true)
    }

    /// Forgets what nothing needs of a stretch, and of those that it hangs on.
    fn cut(&mut self, mut stretch: u32) {
        loop {
            let needed = self.stretches.needed(stretch);
            self.stretches.leave(stretch, needed);
            let it = self.stretches.all.get_mut(stretch);
            it.length = needed as u8;
            if needed > 0 {
                return self.stretches.tidy(stretch);
            }
            let gone = self.stretches.drop(stretch);
            self.release(gone.naming);
            match gone.above {
                Above::Root => return,
                Above::Placed(block) => return self.unhung(block),
                Above::Kept(block) => {
                    stretch = block >> BITS;
                    self.stretches.unhang(stretch, gone.next, gone.before);
                    if self.stretches.all.get(stretch).ends_live() {
                        return;
                    }
                }
            }
        }
    }

    // --- into the tree

    /// Has the tree tell all about a hash.
    #[inline]
    pub fn look_into(&mut self, hash: u64) {
        if !self.stretches.is_empty()
            && let Some(number) = self.stretches.find(hash)
        {
            self.settle_up_to(number >> BITS);
        }
    }

    /// Has the tree tell all about everything.
    pub fn look_into_all(&mut self) {
        let all = &self.stretches.all;
        let mut order: Vec<(u64, u32)> = all.numbers().map(|number| (all.get(number).born, number)).collect();
        order.sort_unstable(); // parents first, and equal histories in equal order
        for (_, number) in order {
            self.settle_one(number);
        }
    }

    /// Places a stretch, and before it those that it hangs on.
    #[cold]
    fn settle_up_to(&mut self, stretch: u32) {
        let up = |&at: &u32| match self.stretches.all.get(at).above {
            Above::Kept(block) => Some(block >> BITS),
            _ => None,
        };
        let path: Vec<u32> = std::iter::successors(Some(stretch), up).collect();
        for &number in path.iter().rev() {
            self.settle_one(number);
        }
    }

    /// Places a stretch that hangs on none.
    fn settle_one(&mut self, stretch: u32) {
        if self.full {
            return;
        }
        let children: Vec<u32> = self.stretches.children(stretch).collect();
        self.stretches.leave(stretch, 0);
        let gone = self.stretches.drop(stretch);
        self.stretches.live -= gone.live.count_ones() as usize;
        let above = match gone.above {
            Above::Placed(block) => block,
            _ => NONE,
        };
        let mut placed = [NONE; MOST];
        if !self.place_all(&gone, above, &mut placed) {
            self.full = true;
            self.stretches = Stretches::new(self.secret);
            return;
        }
        if above != NONE {
            self.get_mut(above).children -= 1;
        }
        for child in children {
            let it = self.stretches.all.get_mut(child);
            if let Above::Kept(block) = it.above {
                let block = placed[block as usize % MOST];
                (it.above, it.next, it.before) = (Above::Placed(block), NONE, NONE);
                self.get_mut(block).children += 1;
            }
        }
        let length = u32::from(gone.length);
        for at in bits(!gone.live & (u64::MAX >> (u64::BITS - length))) {
            let number = placed[usize::from(at)];
            self.get_mut(number).mask = 0;
            self.settle(number);
        }
        self.release(gone.naming);
    }

    /// Places the blocks of a stretch, each the parent of the next. False when there are too many blocks.
    fn place_all(&mut self, gone: &Stretch, above: u32, placed: &mut [u32; MOST]) -> bool {
        let identity = self.namings.get(gone.naming).identity;
        let seed = kvevents_index::keys::seed(identity.lora, identity.salt);
        let (mut parent, mut last) = (above, (above != NONE).then(|| self.get(above).key));
        for (at, placed) in placed.iter_mut().enumerate().take(gone.length.into()) {
            let tokens = gone.tokens(at);
            let local = kvevents_index::keys::local(tokens, seed);
            let key = last.map_or(local, |last| kvevents_index::keys::chained(last, local));
            let block = Block {
                hash: gone.hash(at),
                key,
                parent,
                identity,
                naming: gone.naming,
                tokens,
                manner: gone.manner,
            };
            let (Placed::Fresh(number) | Placed::Known(number)) = self.place_in_tree(&block) else {
                return false;
            };
            self.get_mut(number).born = (gone.born + at as u64) as u32;
            (*placed, parent, last) = (number, number, Some(key));
        }
        true
    }
}
