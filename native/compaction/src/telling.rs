//! The events that rebuild a state after a clear.
//!
//! Blocks are told in runs, each block the parent of the next. A run whose parent has a hash of its own may come at any time after
//! it. Of several blocks with one hash ("twins") the newest is meant as a parent, so all children of one are told before the next
//! one; each is told alone, in the order in which they came. Dead ancestors are told as if they had a copy, which the last events
//! take away again; among twins they come first, since a removal takes the oldest. A history can be made up for which no such order
//! is right, so where there are twins the events are tried on an empty state, and nothing is told if that comes out different.

mod order;

use std::collections::HashMap;

use kvevents_index::planes::Rule;
use kvevents_index::waiting::Waiting;

use super::blocks::{Blocks, NONE, bits};
use super::rules::{Lessons, rule_of};
use super::state::{Orphan, State};
use super::store::{Store, Told, joined};

use order::{Order, Twins};

/// What rebuilds `state` after a clear; None where that cannot be said.
pub fn tell(state: &mut State) -> Option<Vec<Told>> {
    let mut told = Vec::new();
    tell_to(state, |event| told.push(event))?;
    Some(told)
}

/// The same, one event after the other.
pub fn tell_to(state: &mut State, take: impl FnMut(Told)) -> Option<()> {
    state.blocks.look_into_all();
    if state.lost.is_some() || state.blocks.is_full() {
        return None;
    }
    let state = &*state;
    let twins = Twins::of(&state.blocks);
    if twins.is_empty() {
        told(state, &twins, take);
        return Some(());
    }
    let mut all = Vec::new();
    told(state, &twins, |event| all.push(event));
    rebuilds(&all, state).then(|| all.into_iter().for_each(take))
}

fn told(state: &State, twins: &Twins, take: impl FnMut(Told)) {
    let mut teller = Teller {
        state,
        ranked: state.manners.ranked(),
        taught: Lessons::default(),
        leftovers: Vec::new(),
        take,
    };
    for unit in Order::of(state, twins) {
        teller.unit(&unit, twins.has(state.blocks.get(unit[0]).hash));
    }
    teller.remove();
    teller.waiting();
    teller.teach();
}

struct Teller<'a, F> {
    state: &'a State,
    /// Manners in the order in which they are told: a state that was rebuilt is told in equal words.
    ranked: Vec<u8>,
    /// What the stores that were told say of how groups count.
    taught: Lessons,
    /// Hashes of copies that are not there, and their manners.
    leftovers: Vec<(u64, u8)>,
    take: F,
}

impl<F: FnMut(Told)> Teller<'_, F> {
    fn say(&mut self, store: Store) {
        if let Some(rule) = rule_of(&store.view()) {
            let _ = self.taught.learn(&store.view(), rule);
        }
        (self.take)(Told::Stored(store));
    }

    fn blocks(&self) -> &Blocks {
        &self.state.blocks
    }

    // --- blocks

    /// Tells a run with all its copies.
    fn unit(&mut self, unit: &[u32], twin: bool) {
        let node = *self.blocks().get(unit[0]);
        let dense = node.mask & self.state.manners.dense();
        let first = (self.ranked.iter().copied())
            .find(|manner| dense >> manner & 1 != 0)
            .unwrap_or(node.home);
        let store = self.store(unit, first);
        if dense == 0 {
            let hashes = store.hashes.iter().rev();
            self.leftovers.extend(hashes.map(|&hash| (hash, first)));
        }
        let mut copies = Vec::new();
        for &manner in self.ranked.iter().filter(|&manner| node.mask >> manner & 1 != 0) {
            let count = self.blocks().count(unit[0], manner) - u32::from(manner == first);
            let whole = dense >> manner & 1 != 0 && !twin;
            if count > 0 {
                let again = if whole {
                    self.said_in(manner, store.clone())
                } else {
                    self.bare(unit, manner)
                };
                copies.extend(std::iter::repeat_n(again, count as usize));
            }
        }
        self.say(store);
        copies.into_iter().for_each(|copy| self.say(copy));
    }

    fn store(&self, unit: &[u32], manner: u8) -> Store {
        let blocks = self.blocks();
        let head = blocks.get(unit[0]);
        let (identity, spelled) = (blocks.identity(unit[0]), blocks.spelled(unit[0]));
        let scheme = identity.scheme;
        let keys = || unit.iter().map(|&number| blocks.get(number).key).collect();
        let mut tokens = Vec::with_capacity(unit.len() * blocks.tokens(unit[0]).len() * (1 + usize::from(scheme.eagle)));
        for &number in unit {
            push_tokens(&mut tokens, blocks.tokens(number), scheme.eagle);
        }
        let store = Store {
            hashes: unit.iter().map(|&number| blocks.get(number).hash).collect(),
            parent: (head.parent != NONE).then(|| blocks.get(head.parent).hash),
            tokens,
            pairs: scheme.eagle,
            keys: identity.is_keyed().then(keys),
            block_size: scheme.size.into(),
            lora_id: spelled.lora_id,
            lora_name: spelled.lora_name.map(Box::from),
            cache_salt: spelled.cache_salt.map(Box::from),
            extra_keys: joined(unit.iter().map(|&number| blocks.spelled(number).extra)),
            ..Store::default()
        };
        self.said_in(manner, store)
    }

    /// A store in one manner.
    fn said_in(&self, manner: u8, store: Store) -> Store {
        let known = self.state.manners.get(manner);
        Store {
            place: self.state.manners.place(manner).clone(),
            kind: known.kind.clone(),
            window: known.window,
            ..store
        }
    }

    /// Copies without tokens.
    fn bare(&self, unit: &[u32], manner: u8) -> Store {
        let hashes = unit.iter().map(|&number| self.blocks().get(number).hash).collect();
        let store = Store {
            hashes,
            block_size: self.state.manners.get(manner).bare.unwrap_or(0),
            ..Store::default()
        };
        self.said_in(manner, store)
    }

    /// Takes away what was told only for the sake of other blocks.
    fn remove(&mut self) {
        let leftovers = std::mem::take(&mut self.leftovers);
        for run in leftovers.chunk_by(|one, other| one.1 == other.1) {
            let hashes = run.iter().map(|(hash, _)| *hash).collect();
            (self.take)(Told::Removed(hashes, self.state.manners.place(run[0].1).clone()));
        }
    }

    // --- what waits

    fn waiting(&mut self) {
        let items: Vec<&Waiting<Orphan>> = self.state.waiting.iter().collect();
        for run in items.chunk_by(|one, other| follows(one, other)) {
            let manner = run[0].plane as u8;
            let hashes: Vec<u64> = run.iter().map(|item| item.hash).collect();
            let Some(head) = &run[0].content else {
                let block_size = self.state.manners.get(manner).bare.unwrap_or(0);
                let store = Store {
                    hashes,
                    block_size,
                    ..Store::default()
                };
                self.say(self.said_in(manner, store));
                continue;
            };
            let orphans = || run.iter().filter_map(|item| item.content.as_ref());
            let mut tokens = Vec::new();
            for orphan in orphans() {
                push_tokens(&mut tokens, &orphan.tokens, head.scheme.eagle);
            }
            let extras: Vec<Option<&[u8]>> = orphans().map(|orphan| orphan.naming.extra.as_deref()).collect();
            let store = Store {
                hashes,
                parent: Some(run[0].awaited),
                tokens,
                pairs: head.scheme.eagle,
                block_size: head.scheme.size.into(),
                lora_id: head.naming.lora_id,
                lora_name: head.naming.lora_name.clone(),
                cache_salt: head.naming.cache_salt.clone(),
                extra_keys: joined(extras.into_iter()),
                ..Store::default()
            };
            self.say(self.said_in(manner, store));
        }
    }

    // --- rules

    /// Says what is not taught yet of how groups count.
    fn teach(&mut self) {
        for (group, lesson) in self.state.lessons.iter() {
            if self.taught.get(*group) == Some(lesson.rule) {
                continue;
            }
            let mut store = Store {
                block_size: lesson.block_size,
                place: lesson.place.clone(),
                kind: lesson.kind.clone(),
                window: lesson.window,
                pairs: lesson.pairs,
                ..Store::default()
            };
            if lesson.rule != Rule::Dense {
                self.say(store);
                continue;
            }
            // Only a block teaches this one; nobody ever asks for it.
            let hash = self.unused();
            store.hashes = vec![hash];
            if lesson.keyed {
                store.keys = Some(vec![0]);
            } else {
                store.tokens = vec![0; lesson.block_size as usize * (1 + usize::from(lesson.pairs))];
            }
            self.say(store);
            (self.take)(Told::Removed(vec![hash], lesson.place.clone()));
        }
    }

    fn unused(&self) -> u64 {
        let free = |hash: &u64| self.blocks().newest(*hash).is_none() && !self.state.waiting.names(*hash);
        (1..).find(free).unwrap_or(0)
    }
}

/// Whether what waits may be said in one event.
fn follows(one: &Waiting<Orphan>, other: &Waiting<Orphan>) -> bool {
    if one.plane != other.plane {
        return false;
    }
    match (&one.content, &other.content) {
        (None, None) => true,
        (Some(before), Some(after)) => {
            let plain = |orphan: &Orphan| (orphan.scheme, orphan.naming.lora_id);
            other.awaited == one.hash
                && plain(before) == plain(after)
                && before.naming.lora_name == after.naming.lora_name
                && before.naming.cache_salt == after.naming.cache_salt
        }
        _ => false,
    }
}

/// Of EAGLE as pairs, each token with the next.
fn push_tokens(out: &mut Vec<u32>, window: &[u32], pairs: bool) {
    if pairs {
        out.extend(window.windows(2).flatten());
    } else {
        out.extend_from_slice(window);
    }
}

// --- trying

/// Whether these events, after a clear, lead to what a consumer would know by `state`.
fn rebuilds(told: &[Told], state: &State) -> bool {
    let mut tried = State::default();
    for event in told {
        let outcome = match event {
            Told::Stored(store) => tried.stored(&store.view()),
            Told::Removed(hashes, place) => tried.removed(hashes, &place.view()),
        };
        if outcome.is_err() {
            return false;
        }
    }
    tried.blocks.look_into_all();
    let waiting = |state: &State| -> Vec<(u64, u64)> { state.waiting.iter().map(|item| (item.hash, item.awaited)).collect() };
    known(&tried) == known(state) && ordered(&tried) == ordered(state) && waiting(&tried) == waiting(state)
}

pub(super) type Known = (u64, u64, super::naming::Identity, u64, i64);

/// Copies by what a consumer tells blocks and planes apart by.
pub(super) fn known(state: &State) -> HashMap<Known, u32> {
    let mut found = HashMap::new();
    for number in state.blocks.numbers() {
        let node = state.blocks.get(number);
        for manner in bits(node.mask) {
            let plane = state.manners.plane(manner);
            let name = (
                node.hash,
                node.key,
                state.blocks.identity(number),
                plane.digest(),
                plane.group,
            );
            *found.entry(name).or_default() += state.blocks.count(number, manner);
        }
    }
    found
}

/// Keys of twins in their order.
pub(super) fn ordered(state: &State) -> HashMap<u64, Vec<u64>> {
    let keys = |list: &Vec<u32>| list.iter().map(|&number| state.blocks.get(number).key).collect();
    state
        .blocks
        .several()
        .iter()
        .map(|(&hash, list)| (hash, keys(list)))
        .collect()
}
