//! What events mean for what is kept: as `applying` has it, with everything that a snapshot has to say again.

mod usual;

use std::collections::VecDeque;
use std::ops::Range;

use kvevents_index::applying::{Read, extras_at, extras_of};
use kvevents_index::keys::{self, Scheme};
use kvevents_index::planes::Rule;
use kvevents_index::scan::{Event, Kind};
use kvevents_index::waiting::{Queue, Waiting, Weight};

use super::blocks::{Block, Blocks, Fresh, NONE, Placed};
use super::manners::{Manners, is_dense, window_of};
use super::naming::{Identity, Naming, Spelled};
use super::rules::{Lessons, rule_of};
use super::store::{PlaceView, StoreView, entries, place_of, store_of};
use usual::{Seen, Usual};

/// Blocks with copies: at 16 tokens a block about 2 GB.
pub const MAX_LIVE: usize = 1 << 24;
/// Blocks and hashes that wait for a parent that was never seen, or for tokens.
pub const MAX_WAITING: usize = 1 << 16;
/// Dead ancestors beyond as many as there are blocks with copies.
pub const MAX_DEAD: usize = 1 << 16;
/// Copies beyond the first, beyond as many as there are blocks with copies.
pub const MAX_EXTRA: usize = 1 << 20;
/// Bytes of LoRA names, salts and extra keys, each counted once.
pub const MAX_NAMED_BYTES: usize = 64 << 20;
/// Block sizes, each of which has memory of its own.
pub const MAX_WINDOWS: usize = 64;

/// Blocks of an event that are looked for before they are hashed.
const FIRST: usize = 64;

/// What an orphan is.
#[derive(Clone, Debug, PartialEq)]
pub struct Orphan {
    /// As many as its scheme's window.
    pub tokens: Box<[u32]>,
    /// Hashes of its extra keys.
    pub extras: Box<[u64]>,
    /// How its tokens were cut.
    pub scheme: Scheme,
    /// What its LoRA adds to the seed.
    pub lora: u64,
    /// What its own salt adds to the seed; None where it is its parent's.
    pub salt: Option<u64>,
    /// What is said of its namespace.
    pub naming: Naming,
}

impl Weight for Orphan {
    fn bytes(&self) -> usize {
        self.tokens.len() * 4 + self.extras.len() * 8 + self.naming.bytes()
    }
}

/// Kept from one event to the next to spare allocations.
#[derive(Debug, Default)]
struct Work {
    extras: Vec<(usize, u64)>,
    sorted: Vec<u64>,
    window: Vec<u32>,
}

/// What one stream has that is still of use.
#[derive(Debug, Default)]
pub struct State {
    /// Its blocks.
    pub blocks: Blocks,
    /// How they were announced.
    pub manners: Manners,
    /// How groups count.
    pub lessons: Lessons,
    /// Whose parents, or tokens, are unknown; planes are manners.
    pub waiting: Queue<Orphan>,
    /// Why it is not known any more what is live.
    pub lost: Option<&'static str>,
    /// Whether some of it was never seen.
    pub partial: bool,
    work: Work,
    usual: Usual,
}

/// A store with tokens that fit.
struct Dense<'a> {
    hashes: &'a [u64],
    tokens: &'a [u32],
    pairs: bool,
    identity: Identity,
    /// The event's own salt.
    salt: Option<u64>,
    spelled: Spelled<'a>,
    entries: Vec<Option<&'a [u8]>>,
    manner: u8,
}

impl<'a> Dense<'a> {
    /// Tokens that the hash of block `at` covers.
    fn window<'b>(&'b self, at: usize, buffer: &'b mut Vec<u32>) -> &'b [u32] {
        self.windows(at..at + 1, buffer)
    }

    /// Those of several blocks, one after the other.
    #[inline]
    fn windows<'b>(&'b self, blocks: Range<usize>, buffer: &'b mut Vec<u32>) -> &'b [u32] {
        let size = self.identity.scheme.size as usize;
        if !self.pairs {
            return &self.tokens[blocks.start * size..blocks.end * size];
        }
        buffer.clear();
        for at in blocks {
            let pairs = &self.tokens[at * size * 2..][..size * 2];
            buffer.extend(pairs.iter().step_by(2));
            buffer.push(pairs[pairs.len() - 1]);
        }
        buffer
    }

    fn extra(&self, at: usize) -> Option<&'a [u8]> {
        self.entries.get(at).copied().flatten()
    }

    fn spelled(&self, at: usize) -> Spelled<'a> {
        self.spelled.with(self.extra(at))
    }

    /// Whether all blocks have the same extra keys.
    fn is_alike(&self) -> bool {
        self.entries.is_empty() || (1..self.hashes.len()).all(|at| self.extra(at) == self.extra(0))
    }
}

impl State {
    /// Heap bytes, about.
    pub fn bytes(&self) -> usize {
        self.blocks.bytes() + self.manners.bytes() + self.lessons.bytes() + self.waiting.bytes()
    }

    /// Applies one event of a payload. Those of one model are `like` each other; 0 is like none.
    #[inline]
    pub fn event(&mut self, read: &Read<'_>, event: &Event, like: u64) {
        let outcome = match event.kind {
            Kind::Stored => self.stored_again(read, event, like).unwrap_or_else(|| {
                let outcome = self.stored(&store_of(read, event));
                self.was_like(like);
                outcome
            }),
            Kind::Removed if self.counts(event.group) => match self.place_again(read, event, like) {
                Some(place) => self.removed_at(event.hashes.slice(&read.scratch.hashes), place),
                None => Err("manners"),
            },
            Kind::Removed => Ok(()),
            Kind::Cleared => {
                self.cleared(read.bytes(event.medium), event.group);
                Ok(())
            }
        };
        if let Err(reason) = outcome {
            self.lose(reason);
        }
    }

    /// Gives up until everything is cleared; what groups count for is known all the same.
    pub fn lose(&mut self, reason: &'static str) {
        let lessons = std::mem::take(&mut self.lessons);
        *self = Self {
            lessons,
            lost: Some(reason),
            partial: self.partial,
            ..Self::default()
        };
    }

    /// Whether nothing has become too much.
    #[inline]
    fn check(&self) -> Result<(), &'static str> {
        let few = self.blocks.live() <= MAX_LIVE
            && self.blocks.dead() <= MAX_DEAD
            && self.blocks.extra() <= MAX_EXTRA
            && self.blocks.named() <= MAX_NAMED_BYTES
            && self.blocks.windows() <= MAX_WINDOWS;
        if few && self.waiting.is_empty() && !self.blocks.is_full() {
            return Ok(());
        }
        self.check_all()
    }

    #[cold]
    fn check_all(&self) -> Result<(), &'static str> {
        let live = self.blocks.live();
        let limits = [
            (live, MAX_LIVE, "blocks"),
            (self.waiting.len(), MAX_WAITING, "orphans"),
            (self.blocks.dead(), live + MAX_DEAD, "dead ancestors"),
            (self.blocks.extra(), live + MAX_EXTRA, "copies"),
            (self.blocks.named(), MAX_NAMED_BYTES, "bytes of names and extra keys"),
            (self.blocks.windows(), MAX_WINDOWS, "block sizes"),
            (self.blocks.is_full().into(), 0, "blocks"),
        ];
        let above = limits.iter().find(|(found, limit, _)| found > limit);
        above.map_or(Ok(()), |(_, _, what)| Err(*what))
    }

    // --- stores

    /// Applies a store.
    pub fn stored(&mut self, store: &StoreView<'_>) -> Result<(), &'static str> {
        self.usual.seen = None;
        let window = window_of(store.kind, store.window);
        let rule = rule_of(store);
        if window.is_none() && !is_dense(store.kind) {
            return self.learn(store, Rule::Unknown);
        }
        if window.is_some() || (store.tokens.is_empty() && store.keys.is_none()) {
            if let Some(rule) = rule {
                self.learn(store, rule)?;
            }
            return self.bare(store);
        }
        if let Some(keys) = store.keys {
            return self.keyed(store, keys);
        }
        let size = store.block_size;
        let count = (store.tokens.len() >> u32::from(store.pairs)) as u64;
        let fits = size > 0 && size <= u64::from(u32::MAX) && Some(count) == size.checked_mul(store.hashes.len() as u64);
        if !fits || store.unkeyable {
            return Ok(());
        }
        self.learn(store, Rule::Dense)?;
        if self.lost.is_some() {
            return Ok(());
        }
        self.with_tokens(store)
    }

    fn learn(&mut self, store: &StoreView<'_>, rule: Rule) -> Result<(), &'static str> {
        self.lessons.learn(store, rule).ok_or("groups")
    }

    fn bare(&mut self, store: &StoreView<'_>) -> Result<(), &'static str> {
        if self.lost.is_some() || store.hashes.is_empty() {
            return Ok(());
        }
        let manner = self.manners.of(store, Some(store.block_size)).ok_or("manners")?;
        for &hash in store.hashes {
            match self.blocks.seek(hash) {
                Some(number) => self.blocks.copy(number, manner),
                None => self.wait(hash, manner, hash, None),
            }
        }
        self.check()
    }

    fn wait(&mut self, hash: u64, manner: u8, awaited: u64, content: Option<Orphan>) {
        let waiting = Waiting {
            hash,
            plane: u16::from(manner),
            awaited,
            content,
        };
        self.waiting.push(waiting, usize::MAX);
    }

    /// A store that says keys: they hold its namespace and all that is before it.
    fn keyed(&mut self, store: &StoreView<'_>, keys: &[u64]) -> Result<(), &'static str> {
        let size = u32::try_from(store.block_size).ok().filter(|&size| size > 0);
        let fits = store.tokens.is_empty() && keys.len() == store.hashes.len();
        let Some(size) = size.filter(|_| fits) else {
            return Ok(());
        };
        self.learn(store, Rule::Dense)?;
        if self.lost.is_some() || keys.is_empty() {
            return Ok(());
        }
        let manner = self.manners.of(store, None).ok_or("manners")?;
        let identity = Identity::keyed(size);
        let naming = self.blocks.name(identity, &Spelled::default());
        let mut outcome = Ok(());
        for (&hash, &key) in store.hashes.iter().zip(keys) {
            let block = Block {
                hash,
                key,
                parent: NONE,
                identity,
                naming,
                tokens: &[],
                manner,
            };
            outcome = match self.blocks.place(&block) {
                Placed::Fresh(number) if !self.waiting.is_empty() => self.link(hash, number),
                Placed::Fresh(_) | Placed::Known(_) => continue,
                Placed::Refused => break,
                Placed::Full => Err("blocks"),
            };
            if outcome.is_err() {
                break;
            }
        }
        self.blocks.unname(naming);
        outcome?;
        self.check()
    }

    fn with_tokens(&mut self, store: &StoreView<'_>) -> Result<(), &'static str> {
        let manner = self.manners.of(store, None).ok_or("manners")?;
        let lora = match (store.lora_name, store.lora_id) {
            (Some(name), _) => keys::lora_name(name),
            (None, Some(id)) => keys::lora_id(id),
            (None, None) => 0,
        };
        let root = store.parent.is_none();
        let bare = extras_of(store.extra_keys, store.lora_name, root, &mut self.work.extras);
        let own = store.cache_salt.map(keys::salt);
        let mut found = Vec::new();
        entries(store.extra_keys, &mut found).ok_or("nested extra keys")?;
        let dense = Dense {
            hashes: store.hashes,
            tokens: store.tokens,
            pairs: store.pairs,
            identity: Identity {
                scheme: Scheme {
                    size: store.block_size as u32,
                    eagle: store.pairs,
                },
                lora,
                salt: 0,
            },
            salt: if root { Some(own.or(bare).unwrap_or(0)) } else { own },
            spelled: Spelled::of(store),
            entries: found,
            manner,
        };
        if store.extra_keys.is_none() {
            self.usual.seen = Some(Seen {
                identity: dense.identity,
                salt: own,
                manner,
                naming: None,
            });
        }
        self.take_in(&dense, store.parent)
    }

    #[inline]
    fn take_in(&mut self, store: &Dense<'_>, parent: Option<u64>) -> Result<(), &'static str> {
        // Where their hashes belong is known before anything else is.
        self.blocks.prefetch(parent.iter().chain(store.hashes.iter().take(FIRST)));
        let kept = self.keep(store, parent);
        if kept < store.hashes.len() {
            self.dense(store, kept, parent)?;
        }
        self.check()
    }

    /// Keeps blocks as they came, up to the first one that has to be looked into: how many.
    #[inline]
    fn keep(&mut self, store: &Dense<'_>, parent: Option<u64>) -> usize {
        if !self.work.extras.is_empty() || !store.is_alike() {
            return 0;
        }
        let waits = |&hash: &u64| !self.waiting.is_empty() && self.waiting.names(hash);
        let count = store.hashes.iter().position(waits).unwrap_or(store.hashes.len());
        let Some(above) = self.blocks.above(parent) else { return 0 };
        let salt = store.salt.unwrap_or_else(|| self.blocks.salt(above));
        let naming = self.name(Identity { salt, ..store.identity }, &store.spelled(0));
        let fresh = Fresh {
            hashes: &store.hashes[..count],
            tokens: store.windows(0..count, &mut self.work.window),
            width: store.identity.scheme.window(),
            above,
            naming,
            manner: store.manner,
        };
        let kept = self.blocks.keep(&fresh);
        self.blocks.unname(naming);
        kept
    }

    fn dense(&mut self, store: &Dense<'_>, first: usize, parent: Option<u64>) -> Result<(), &'static str> {
        for at in first..store.hashes.len() {
            let awaited = if at == 0 { parent } else { Some(store.hashes[at - 1]) };
            let Some(awaited) = awaited else {
                return self.run(store, at, NONE);
            };
            if let Some(found) = self.blocks.seek(awaited) {
                return self.run(store, at, found);
            }
            let orphan = Orphan {
                tokens: store.window(at, &mut self.work.window).into(),
                extras: extras_at(&self.work.extras, at).collect(),
                scheme: store.identity.scheme,
                lora: store.identity.lora,
                salt: store.salt,
                naming: Naming::of(&store.spelled(at)),
            };
            self.wait(store.hashes[at], store.manner, awaited, Some(orphan));
        }
        Ok(())
    }

    /// Places the blocks of an event from `first` on behind `parent`, each the parent of the next.
    fn run(&mut self, store: &Dense<'_>, first: usize, mut parent: u32) -> Result<(), &'static str> {
        let before = (parent != NONE).then(|| (self.blocks.get(parent).key, self.blocks.identity(parent).salt));
        let salt = store.salt.unwrap_or_else(|| before.map_or(0, |(_, salt)| salt));
        let identity = Identity { salt, ..store.identity };
        let seed = keys::seed(identity.lora, salt);
        let mut last = before.map(|(key, _)| key);
        let Work {
            mut window,
            extras,
            mut sorted,
        } = std::mem::take(&mut self.work);
        let mut outcome = Ok(());
        let mut naming = self.blocks.name(identity, &store.spelled(first));
        for at in first..store.hashes.len() {
            let tokens = store.window(at, &mut window);
            let local = if extras.is_empty() {
                keys::local(tokens, seed)
            } else {
                sorted.clear();
                sorted.extend(extras_at(&extras, at));
                keys::local_with(tokens, &mut sorted, seed)
            };
            let key = last.map_or(local, |last| keys::chained(last, local));
            if at > first && !store.entries.is_empty() {
                let next = self.blocks.name(identity, &store.spelled(at));
                self.blocks.unname(std::mem::replace(&mut naming, next));
            }
            let block = Block {
                hash: store.hashes[at],
                key,
                parent,
                identity,
                naming,
                tokens,
                manner: store.manner,
            };
            parent = match self.blocks.place(&block) {
                Placed::Known(number) => number,
                Placed::Fresh(number) => {
                    if !self.waiting.is_empty() {
                        outcome = outcome.and(self.link(block.hash, number));
                    }
                    number
                }
                Placed::Refused => break,
                Placed::Full => {
                    outcome = Err("blocks");
                    break;
                }
            };
            last = Some(key);
        }
        self.blocks.unname(naming);
        self.work = Work { extras, sorted, window };
        outcome
    }

    /// Places what waited for a block, and what waited for that, the nearest first.
    fn link(&mut self, hash: u64, number: u32) -> Result<(), &'static str> {
        let behind = |above| move |item| (item, above);
        let mut queue: VecDeque<(Waiting<Orphan>, u32)> =
            self.waiting.take_awaiting(hash).into_iter().map(behind(number)).collect();
        while let Some((item, above)) = queue.pop_front() {
            let manner = item.plane as u8;
            let Some(mut orphan) = item.content else {
                self.blocks.copy(above, manner);
                continue;
            };
            let identity = Identity {
                scheme: orphan.scheme,
                lora: orphan.lora,
                salt: orphan.salt.unwrap_or_else(|| self.blocks.identity(above).salt),
            };
            let local = keys::local_with(&orphan.tokens, &mut orphan.extras, keys::seed(identity.lora, identity.salt));
            let naming = self.blocks.name(identity, &orphan.naming.view());
            let block = Block {
                hash: item.hash,
                key: keys::chained(self.blocks.get(above).key, local),
                parent: above,
                identity,
                naming,
                tokens: &orphan.tokens,
                manner,
            };
            let placed = self.blocks.place(&block);
            self.blocks.unname(naming);
            match placed {
                Placed::Fresh(placed) => {
                    let next = self.waiting.take_awaiting(item.hash);
                    queue.extend(next.into_iter().map(behind(placed)));
                }
                Placed::Known(_) | Placed::Refused => {}
                Placed::Full => return Err("blocks"),
            }
        }
        Ok(())
    }

    // --- removals

    /// Applies a removal.
    pub fn removed(&mut self, hashes: &[u64], place: &PlaceView<'_>) -> Result<(), &'static str> {
        if !self.counts(place.group) {
            return Ok(());
        }
        let place = self.manners.placed(place).ok_or("manners")?;
        self.removed_at(hashes, place)
    }

    /// Whether anything is known of the blocks of a group.
    #[inline]
    fn counts(&self, group: Option<i64>) -> bool {
        self.lost.is_none() && self.lessons.get(group.unwrap_or(0)) != Some(Rule::Unknown)
    }

    #[inline]
    fn removed_at(&mut self, hashes: &[u64], place: usize) -> Result<(), &'static str> {
        let (exact, plane) = self.manners.meant(place);
        for some in hashes.chunks(FIRST) {
            self.blocks.prefetch_leaving(some);
            for &hash in some {
                if !self.blocks.remove(hash, exact, plane) && !self.waiting.is_empty() {
                    self.waiting.remove_where(hash, |manner| plane >> manner & 1 != 0);
                }
            }
        }
        self.check()
    }

    /// Applies a clear of everything, or of a tier or a group.
    pub fn cleared(&mut self, medium: Option<&[u8]>, group: Option<i64>) {
        if medium.is_none() && group.is_none() {
            let lessons = std::mem::take(&mut self.lessons);
            // Too many groups are not forgotten with their blocks.
            let lost = self.lost.filter(|&reason| reason == "groups");
            *self = Self {
                lessons,
                lost,
                ..Self::default()
            };
            return;
        }
        let manners = self.manners.cleared(medium, group);
        self.waiting.clear(|manner| manners >> manner & 1 != 0);
        self.blocks.clear(manners);
    }
}
