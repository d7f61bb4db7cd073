//! What events mean for the blocks of a stream.

mod ahead;

use std::collections::VecDeque;

use crate::contexts::Context;
use crate::core::Core;
use crate::gate::{BLOCKS_PER_HOLD, Writer};
use crate::keys::{self, Scheme};
use crate::pages;
use crate::planes::{Plane, Rule, tier};
use crate::scan::{Event, Extra, Id, Kind, Scratch, Span, extra_keys};
use crate::stream::{Block, Chain, Leaving, Parent, Place, Stream};
use crate::table::{Reach, Stage};
use crate::waiting::{Content, Waiting};

use ahead::{Ahead, Ring};

/// Names of planes that one life of a stream may use: an engine has a handful, and all streams share `MAX_PLANES`.
const MAX_PLACES: usize = 64;
/// Blocks of an event that are asked for before it is hashed.
const FIRST: usize = 4;
/// Blocks up to which an event is hashed while the lock is held, since taking it twice would cost more.
const FEW_BLOCKS: usize = 8;

/// A payload, read.
pub struct Read<'a> {
    /// Its bytes.
    pub payload: &'a [u8],
    /// Its events.
    pub scratch: &'a Scratch,
}

impl Read<'_> {
    fn text(&self, span: Option<Span>) -> Option<&str> {
        span.map(|span| std::str::from_utf8(span.bytes(self.payload)).unwrap_or(""))
    }

    /// The bytes of a span.
    pub fn bytes(&self, span: Option<Span>) -> Option<&[u8]> {
        span.map(|span| span.bytes(self.payload))
    }
}

/// Keys of one event, kept from one event to the next to spare allocations.
#[derive(Debug, Default)]
pub struct Work {
    keys: Vec<u64>,
    extras: Vec<(usize, u64)>,
    window: Vec<u32>,
    ring: Ring,
}

/// Blocks of one event whose room is kept for the next.
const BLOCKS_KEPT: usize = 1 << 14;

impl Work {
    /// Gives room back that only a very large event needs.
    pub fn shrink(&mut self) {
        if self.keys.capacity().max(self.extras.capacity()) > BLOCKS_KEPT {
            *self = Self::default();
        }
    }
}

/// A store with tokens.
struct Dense<'a> {
    hashes: &'a [u64],
    tokens: &'a [u32],
    pairs: bool,
    scheme: Scheme,
    lora: u64,
    /// The event's own salt.
    salt: Option<u64>,
    plane: u16,
}

impl Dense<'_> {
    /// Tokens that the hash of block `at` covers.
    fn window<'b>(&'b self, at: usize, buffer: &'b mut Vec<u32>) -> &'b [u32] {
        let size = self.scheme.size as usize;
        if !self.pairs {
            return &self.tokens[at * size..][..size];
        }
        let pairs = &self.tokens[at * size * 2..][..size * 2];
        buffer.clear();
        buffer.extend(pairs.iter().step_by(2));
        buffer.push(pairs[pairs.len() - 1]);
        buffer
    }
}

impl Stream {
    /// Applies one event; says whether it cleared the whole stream. `max_waiting` bounds the queue of what cannot be placed.
    pub fn event(
        &mut self,
        writer: &mut Writer<'_>,
        read: &Read<'_>,
        event: &Event,
        work: &mut Work,
        max_waiting: usize,
    ) -> bool {
        if writer.keeps() && writer.is_listed() {
            self.look_into_all(writer);
        }
        match event.kind {
            Kind::Stored => self.stored(writer, read, event, work, max_waiting),
            Kind::Removed => self.was_removed(writer, read, event),
            Kind::Cleared => return self.was_cleared(writer, read, event),
        }
        false
    }

    // --- stores

    fn stored(&mut self, writer: &mut Writer<'_>, read: &Read<'_>, event: &Event, work: &mut Work, max_waiting: usize) {
        let (kind, group) = (read.text(event.spec_kind), event.group.unwrap_or(0));
        let window = event.window.filter(|&window| window > 0 && kind == Some("sliding_window"));
        let dense = matches!(kind, None | Some("full_attention" | "mla_attention" | "sink_full_attention"));
        if !dense && window.is_none() {
            self.learn(writer, group, Rule::Unknown);
            return self.counters.reject(kind.unwrap_or("none"), "unknown-kind");
        }
        let hashes = event.hashes.slice(&read.scratch.hashes);
        let size = event.block_size;
        if window.is_some() || (event.tokens.length == 0 && !event.keyed) {
            if let Some(window) = window
                && size > 0
            {
                let blocks = (window as u64 - 1).div_ceil(size);
                self.learn(writer, group, Rule::Window(u32::try_from(blocks).unwrap_or(u32::MAX)));
            }
            let Some(plane) = self.plane(writer, read, event) else {
                return self.counters.reject(kind.unwrap_or("none"), "too-many-planes");
            };
            for &hash in hashes {
                self.without_tokens(writer, hash, plane, max_waiting);
                writer.pause(1);
            }
            return;
        }
        if event.keyed {
            return self.keyed(writer, read, event, work);
        }
        let tokens = event.tokens.slice(&read.scratch.tokens);
        let count = (tokens.len() >> u32::from(event.pairs)) as u64;
        if size == 0 || size > u64::from(u32::MAX) || Some(count) != size.checked_mul(hashes.len() as u64) {
            return self.counters.reject(kind.unwrap_or("none"), "length-mismatch");
        }
        if event.unkeyable {
            return self.counters.reject(kind.unwrap_or("none"), "bad-token");
        }
        self.learn(writer, group, Rule::Dense);
        let Some(plane) = self.plane(writer, read, event) else {
            return self.counters.reject(kind.unwrap_or("none"), "too-many-planes");
        };
        let lora = match (read.bytes(event.lora_name), event.lora_id) {
            (Some(name), _) => keys::lora_name(name),
            (None, Some(id)) => keys::lora_id(id),
            (None, None) => 0,
        };
        let bare = extras_of(
            read.bytes(event.extra_keys),
            read.bytes(event.lora_name),
            event.parent.is_none(),
            &mut work.extras,
        );
        let own = read.bytes(event.cache_salt).map(keys::salt);
        let salt = if event.parent.is_none() {
            Some(own.or(bare).unwrap_or(0))
        } else {
            own
        };
        let scheme = Scheme {
            size: size as u32,
            eagle: event.pairs,
        };
        let store = Dense {
            hashes,
            tokens,
            pairs: event.pairs,
            scheme,
            lora,
            salt,
            plane,
        };
        self.dense(writer, &store, event.parent, work, max_waiting);
    }

    /// A store that says keys: they hold its namespace and all that is before it.
    fn keyed(&mut self, writer: &mut Writer<'_>, read: &Read<'_>, event: &Event, work: &mut Work) {
        let kind = read.text(event.spec_kind).unwrap_or("none");
        let Some(size) = event.size_of_keyed() else {
            return self.counters.reject(kind, "length-mismatch");
        };
        self.learn(writer, event.group.unwrap_or(0), Rule::Dense);
        let Some(plane) = self.plane(writer, read, event) else {
            return self.counters.reject(kind, "too-many-planes");
        };
        if event.hashes.length == 0 {
            return;
        }
        self.cut_by(size);
        let (count, secret) = (event.hashes.length as usize, writer.secret);
        if pages::are_short() || self.is_tight(count) {
            writer.unlocked(|| {
                pages::prepare();
                self.make_room(count, secret);
            });
        }
        let number = writer.contexts.retain(Context::keyed(size), 1);
        writer.list_all();
        let chain = Chain {
            hashes: event.hashes.slice(&read.scratch.hashes),
            keys: event.keys.slice(&read.scratch.hashes),
            context: number,
            plane,
        };
        self.take_in(writer, &chain, &mut work.ring, None);
        writer.contexts.release(number, 1);
    }

    fn dense(&mut self, writer: &mut Writer<'_>, store: &Dense<'_>, parent: Option<u64>, work: &mut Work, max_waiting: usize) {
        // Where their hashes belong is known before their keys are.
        for &hash in store.hashes.iter().take(FIRST) {
            self.prefetch(writer.spot(hash), Stage::Bucket);
        }
        for at in 0..store.hashes.len() {
            let awaited = if at == 0 { parent } else { Some(store.hashes[at - 1]) };
            let Some(awaited) = awaited else {
                return self.run(writer, store, at, None, work);
            };
            if let Some(found) = self.parent(writer, awaited) {
                return self.run(writer, store, at, Some(found), work);
            }
            let content = Content {
                tokens: store.window(at, &mut work.window).into(),
                extras: extras_at(&work.extras, at).collect(),
                scheme: store.scheme,
                lora: store.lora,
                salt: store.salt,
            };
            let orphan = Waiting {
                hash: store.hashes[at],
                plane: store.plane,
                awaited,
                content: Some(content),
            };
            self.counters.dropped += self.waiting.push(orphan, max_waiting);
        }
    }

    /// Takes in the blocks of an event from `first` on behind `parent`, each the parent of the next.
    fn run(&mut self, writer: &mut Writer<'_>, store: &Dense<'_>, first: usize, parent: Option<Parent>, work: &mut Work) {
        let salt_of = |parent: Parent| writer.contexts.get(parent.context).salt;
        let salt = store.salt.unwrap_or_else(|| parent.map_or(0, salt_of));
        let before = parent.map(|parent| parent.key);
        let context = Context {
            scheme: store.scheme,
            lora: store.lora,
            salt,
        };
        let number = writer.contexts.retain(context, 1);
        let count = store.hashes.len() - first;
        // A long event is hashed while others may read and write; what this stream holds nobody else changes meanwhile.
        self.cut_by(store.scheme.size);
        if writer.is_listed() && count > FEW_BLOCKS || pages::are_short() || self.is_tight(count) {
            let secret = writer.secret;
            writer.unlocked(|| {
                pages::prepare();
                self.make_room(count, secret);
                hash_all(store, first, before, context.seed(), work);
            });
        } else {
            hash_all(store, first, before, context.seed(), work);
        }
        let chain = Chain {
            hashes: &store.hashes[first..],
            keys: &work.keys,
            context: number,
            plane: store.plane,
        };
        self.take_in(writer, &chain, &mut work.ring, parent.and_then(|parent| parent.number));
        writer.contexts.release(number, 1);
    }

    /// Takes in blocks behind one that may have a record: keeps them as they came where that may be, and places those that have to be
    /// looked into.
    fn take_in(&mut self, writer: &mut Writer<'_>, chain: &Chain<'_>, ring: &mut Ring, parent: Option<u32>) {
        let mut rest = *chain;
        while self.may_keep(writer, chain.plane) && !rest.hashes.is_empty() {
            let kept = self.keep(writer, &rest);
            writer.pause(kept);
            rest = rest.behind(kept);
            let next = rest.first();
            if !self.place_all(writer, &next, ring, None) {
                return;
            }
            rest = rest.behind(next.hashes.len());
        }
        self.place_all(writer, &rest, ring, parent);
    }

    /// Places blocks behind a record. False when there are too many alike, and not all of them were.
    fn place_all(&mut self, writer: &mut Writer<'_>, chain: &Chain<'_>, ring: &mut Ring, parent: Option<u32>) -> bool {
        let (count, plane) = (chain.hashes.len(), chain.plane);
        if count == 0 {
            return true;
        }
        let mut blocks = Ahead {
            hashes: chain.hashes,
            keys: chain.keys,
            context: chain.context,
            ring,
            reach: self.reach().max(writer.keys.reach()),
        };
        let mut guess = parent.map_or(u32::MAX, |parent| parent.wrapping_add(1));
        blocks.start(self, writer);
        for start in (0..count).step_by(BLOCKS_PER_HOLD) {
            let core: &mut Core = writer;
            let end = count.min(start + BLOCKS_PER_HOLD);
            for at in start..end {
                let block = blocks.next(self, core, at);
                let Some((placed, fresh)) = self.place(core, &block, plane, guess) else {
                    self.counters.reject("none", "too-many-alike");
                    return false;
                };
                guess = placed.wrapping_add(1);
                if fresh && !self.waiting.is_empty() {
                    self.link(core, block.hash, placed);
                }
            }
            writer.pause(end - start);
        }
        true
    }

    /// A block with everything that placing it needs asked for.
    pub fn asked(&self, core: &Core, hash: u64, key: u64, context: u32) -> Block {
        let mut block = Block::new(core, hash, key, context);
        self.ask(core, &mut block, Stage::Bucket);
        block
    }

    /// Places what waited for a block, and what waited for that, the nearest first.
    fn link(&mut self, core: &mut Core, hash: u64, number: u32) {
        let mut queue: VecDeque<(Waiting, u32)> = self
            .waiting
            .take_awaiting(hash)
            .into_iter()
            .map(|item| (item, number))
            .collect();
        while let Some((item, above)) = queue.pop_front() {
            let Some(mut content) = item.content else {
                self.copy(core, item.hash, above, item.plane);
                continue;
            };
            let parent = *core.records.get(above);
            let salt = content.salt.unwrap_or_else(|| core.contexts.get(parent.context()).salt);
            let context = Context {
                scheme: content.scheme,
                lora: content.lora,
                salt,
            };
            let local = keys::local_with(&content.tokens, &mut content.extras, context.seed());
            let held = core.contexts.retain(context, 1);
            let block = Block::new(core, item.hash, keys::chained(parent.key, local), held);
            match self.place(core, &block, item.plane, above.wrapping_add(1)) {
                Some((placed, true)) => {
                    queue.extend(self.waiting.take_awaiting(item.hash).into_iter().map(|next| (next, placed)));
                }
                Some(_) => {}
                None => self.counters.reject("none", "too-many-alike"),
            }
            core.contexts.release(held, 1);
        }
    }

    fn without_tokens(&mut self, writer: &mut Writer<'_>, hash: u64, plane: u16, max_waiting: usize) {
        self.look_into(writer, hash);
        match self.newest(writer, hash) {
            Some(number) => self.copy(writer, hash, number, plane),
            None => {
                let untied = Waiting {
                    hash,
                    plane,
                    awaited: hash,
                    content: None,
                };
                self.counters.dropped += self.waiting.push(untied, max_waiting);
            }
        }
    }

    fn learn(&mut self, writer: &mut Writer<'_>, group: i64, rule: Rule) {
        if self.rules.get(group) != Some(rule) && self.rules.learn(group, rule) {
            writer.rule(self.number, self.rules.hybrid());
        }
    }

    // --- removals

    fn was_removed(&mut self, writer: &mut Writer<'_>, read: &Read<'_>, event: &Event) {
        if self.rules.get(event.group.unwrap_or(0)) == Some(Rule::Unknown) {
            return;
        }
        let hashes = event.hashes.slice(&read.scratch.hashes);
        let Some(plane) = self.plane(writer, read, event) else {
            self.counters.unknown += hashes.len() as u64;
            return;
        };
        let mut leaving = [Leaving::default(); BLOCKS_PER_HOLD];
        for chunk in hashes.chunks(BLOCKS_PER_HOLD) {
            let core: &mut Core = writer;
            if self.has_no_records() {
                self.remove_all_kept(core, chunk, plane);
                writer.pause(chunk.len());
                continue;
            }
            let leaving = &mut leaving[..chunk.len()];
            for (place, &hash) in leaving.iter_mut().zip(chunk) {
                *place = self.leaving(core, hash);
            }
            if core.keys.reach().max(self.reach()) > Reach::Near {
                leaving.iter_mut().for_each(|each| self.prefetch_record(core, each));
                leaving.iter().for_each(|each| self.prefetch_key(core, each));
            }
            for (each, &hash) in leaving.iter().zip(chunk) {
                let removed = self.remove_kept(core, hash, plane);
                if !removed.unwrap_or_else(|| self.remove(core, each, plane)) {
                    self.was_not_held(hash, plane);
                }
            }
            writer.pause(chunk.len());
        }
    }

    /// The same of hashes none of which means a block with a record.
    fn remove_all_kept(&mut self, core: &mut Core, hashes: &[u64], plane: u16) {
        if let Some(kept) = core.kept_of(self.number) {
            hashes.iter().for_each(|&hash| kept.prefetch(core.secret.place(hash)));
        }
        for &hash in hashes {
            if self.remove_kept(core, hash, plane) != Some(true) {
                self.was_not_held(hash, plane);
            }
        }
    }

    /// Takes a copy from what waits instead.
    #[inline]
    fn was_not_held(&mut self, hash: u64, plane: u16) {
        if !self.waiting.remove(hash, plane) {
            self.counters.unknown += 1;
        }
    }

    fn was_cleared(&mut self, writer: &mut Writer<'_>, read: &Read<'_>, event: &Event) -> bool {
        let medium = read.text(event.medium).map(tier);
        if medium.is_none() && event.group.is_none() {
            self.forget(writer);
            return true;
        }
        let meant: Vec<bool> = (writer.planes.iter())
            .map(|plane| {
                medium.as_ref().is_none_or(|tier| *tier == plane.tier) && event.group.is_none_or(|group| group == plane.group)
            })
            .collect();
        self.waiting.clear(|plane| meant[plane as usize]);
        self.look_into_all(writer);
        for (hash, number) in self.each(writer) {
            self.drop_block(writer, hash, number, |plane| meant[plane as usize]);
            writer.pause(1);
        }
        false
    }

    /// The plane that an event is about.
    fn plane(&mut self, writer: &mut Writer<'_>, read: &Read<'_>, event: &Event) -> Option<u16> {
        let (medium, locality, ownership) = (
            read.bytes(event.medium),
            read.bytes(event.locality),
            read.bytes(event.ownership),
        );
        let group = event.group.unwrap_or(0);
        let same = |place: &Place| {
            place.group == group
                && place.medium.as_deref() == medium
                && place.locality.as_deref() == locality
                && place.ownership.as_deref() == ownership
        };
        if let Some((_, plane)) = self.places.iter().find(|(place, _)| same(place)) {
            return Some(*plane);
        }
        if self.places.len() >= MAX_PLACES {
            return None;
        }
        let text = |span| read.text(span).map(str::to_owned);
        let plane = writer.plane(Plane {
            tier: tier(read.text(event.medium).unwrap_or("")),
            locality: text(event.locality),
            ownership: text(event.ownership),
            group,
        })?;
        let owned = |bytes: Option<&[u8]>| bytes.map(Box::from);
        let place = Place {
            medium: owned(medium),
            locality: owned(locality),
            ownership: owned(ownership),
            group,
        };
        self.places.push((place, plane));
        Some(plane)
    }
}

/// Keys of the blocks from `first` on, into `work.keys`.
fn hash_all(store: &Dense<'_>, first: usize, parent: Option<u64>, seed: u64, work: &mut Work) {
    work.keys.clear();
    let size = store.scheme.size as usize;
    if work.extras.is_empty() && !store.pairs {
        work.keys.extend(
            store.tokens[first * size..]
                .chunks_exact(size)
                .map(|block| keys::local(block, seed)),
        );
    } else {
        for at in first..store.hashes.len() {
            let mut extras: Vec<u64> = extras_at(&work.extras, at).collect();
            let local = keys::local_with(store.window(at, &mut work.window), &mut extras, seed);
            work.keys.push(local);
        }
    }
    keys::chain(parent, &mut work.keys);
}

/// Extra keys of one block; `extras` are in the order of their blocks.
pub fn extras_at(extras: &[(usize, u64)], at: usize) -> impl Iterator<Item = u64> + '_ {
    let start = extras.partition_point(|(block, _)| *block < at);
    extras[start..]
        .iter()
        .take_while(move |(block, _)| *block == at)
        .map(|(_, extra)| *extra)
}

/// Reads extra keys into `(block, hash)`, and returns the salt that stands bare at a root.
pub fn extras_of(raw: Option<&[u8]>, lora: Option<&[u8]>, root: bool, found: &mut Vec<(usize, u64)>) -> Option<u64> {
    found.clear();
    let raw = raw?;
    let (mut salt, mut last) = (None, usize::MAX);
    extra_keys(raw, |block, extra| {
        let first = block != last;
        last = block;
        let hash = match extra {
            Extra::Text(text) if first && lora == Some(text.as_bytes()) => return,
            Extra::Text(text) if block == 0 && root && salt.is_none() => {
                salt = Some(keys::salt(text.as_bytes()));
                return;
            }
            Extra::Text(text) => keys::untagged(text.as_bytes()),
            Extra::Bytes(bytes) => keys::untagged(bytes),
            Extra::Int(number) => number as u64,
            Extra::Pair(Id::Int(number), _) => number as u64,
            Extra::Pair(Id::Text(id), offset) => keys::item_at(keys::item_text(id), offset),
            Extra::Pair(Id::Bytes(id), offset) => keys::item_at(keys::item_bytes(id), offset),
        };
        found.push((block, hash));
    });
    salt
}
