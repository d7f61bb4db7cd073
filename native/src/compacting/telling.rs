//! The events that rebuild a state after a clear.
//!
//! Blocks are told in runs, each block the parent of the next. A run whose parent has a hash of its own may come at any time after
//! it. Of several blocks with one hash ("twins") the newest is meant as a parent, so all children of one are told before the next
//! one; each is told alone, in the order in which they came. Dead ancestors are told as if they had a copy, which the last events
//! take away again; among twins they come first, since a removal takes the oldest. A history can be made up for which no such order
//! is right, so where there are twins the events are tried on an empty state, and nothing is told if that comes out different.

mod order;

use std::collections::HashMap;

use crate::planes::Rule;
use crate::waiting::Waiting;

use super::blocks::{Blocks, NONE, bits};
use super::state::{Orphan, State};
use super::store::{Store, Told, joined};

use order::{Order, Twins};

/// What rebuilds `state` after a clear; None where that cannot be said.
pub fn tell(state: &State) -> Option<Vec<Told>> {
    if state.lost.is_some() {
        return None;
    }
    let twins = Twins::of(&state.blocks);
    let mut teller = Teller {
        state,
        told: Vec::new(),
        leftovers: Vec::new(),
    };
    for unit in Order::of(state, &twins).units() {
        teller.unit(&unit, twins.has(state.blocks.get(unit[0]).hash));
    }
    teller.remove();
    teller.waiting();
    teller.teach();
    let told = teller.told;
    (twins.is_empty() || rebuilds(&told, state)).then_some(told)
}

struct Teller<'a> {
    state: &'a State,
    told: Vec<Told>,
    /// Hashes of copies that are not there, and their manners.
    leftovers: Vec<(u64, u8)>,
}

impl Teller<'_> {
    fn blocks(&self) -> &Blocks {
        &self.state.blocks
    }

    // --- blocks

    /// Tells a run with all its copies.
    fn unit(&mut self, unit: &[u32], twin: bool) {
        let node = *self.blocks().get(unit[0]);
        let dense = node.mask & self.state.manners.dense();
        let first = if dense == 0 { node.home } else { dense.trailing_zeros() as u8 };
        let store = self.store(unit, first);
        if dense == 0 {
            let hashes = store.hashes.iter().rev();
            self.leftovers.extend(hashes.map(|&hash| (hash, first)));
        }
        let mut copies = Vec::new();
        for manner in bits(node.mask) {
            let count = self.blocks().count(unit[0], manner) - u32::from(manner == first);
            let whole = dense >> manner & 1 != 0 && !twin;
            if count > 0 {
                let again = if whole {
                    self.again(&store, manner)
                } else {
                    self.bare(unit, manner)
                };
                copies.extend(std::iter::repeat_n(Told::Stored(again), count as usize));
            }
        }
        self.told.push(Told::Stored(store));
        self.told.append(&mut copies);
    }

    fn store(&self, unit: &[u32], manner: u8) -> Store {
        let blocks = self.blocks();
        let head = blocks.get(unit[0]);
        let (scheme, spelled) = (blocks.identity(unit[0]).scheme, blocks.spelled(unit[0]));
        let mut tokens = Vec::with_capacity(unit.len() * scheme.size as usize * (1 + usize::from(scheme.eagle)));
        for &number in unit {
            push_tokens(&mut tokens, blocks.tokens(number), scheme.eagle);
        }
        let store = Store {
            hashes: unit.iter().map(|&number| blocks.get(number).hash).collect(),
            parent: (head.parent != NONE).then(|| blocks.get(head.parent).hash),
            tokens,
            pairs: scheme.eagle,
            block_size: scheme.size.into(),
            lora_id: spelled.lora_id,
            lora_name: spelled.lora_name.map(Box::from),
            cache_salt: spelled.cache_salt.map(Box::from),
            extra_keys: joined(unit.iter().map(|&number| blocks.spelled(number).extra)),
            ..Store::default()
        };
        self.again(&store, manner)
    }

    /// The same in another manner.
    fn again(&self, store: &Store, manner: u8) -> Store {
        let known = self.state.manners.get(manner);
        Store {
            place: self.state.manners.place(manner).clone(),
            kind: known.kind.clone(),
            window: known.window,
            ..store.clone()
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
        self.again(&store, manner)
    }

    /// Takes away what was told only for the sake of other blocks.
    fn remove(&mut self) {
        let leftovers = std::mem::take(&mut self.leftovers);
        for run in leftovers.chunk_by(|one, other| one.1 == other.1) {
            let hashes = run.iter().map(|(hash, _)| *hash).collect();
            self.told
                .push(Told::Removed(hashes, self.state.manners.place(run[0].1).clone()));
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
                self.told.push(Told::Stored(self.again(&store, manner)));
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
            self.told.push(Told::Stored(self.again(&store, manner)));
        }
    }

    // --- rules

    /// Says what is not taught yet of how groups count.
    fn teach(&mut self) {
        let mut taught = State::default().lessons;
        for told in &self.told {
            if let Told::Stored(store) = told
                && let Some(rule) = super::rules::rule_of(&store.view())
            {
                let _ = taught.learn(&store.view(), rule);
            }
        }
        for (group, lesson) in self.state.lessons.iter() {
            if taught.get(*group) == Some(lesson.rule) {
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
                self.told.push(Told::Stored(store));
                continue;
            }
            // Only a block teaches this one; nobody ever asks for it.
            let hash = self.unused();
            store.hashes = vec![hash];
            store.tokens = vec![0; lesson.block_size as usize * (1 + usize::from(lesson.pairs))];
            self.told.push(Told::Stored(store));
            self.told.push(Told::Removed(vec![hash], lesson.place.clone()));
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
    let waiting = |state: &State| -> Vec<(u64, u64)> { state.waiting.iter().map(|item| (item.hash, item.awaited)).collect() };
    known(&tried) == known(state) && ordered(&tried) == ordered(state) && waiting(&tried) == waiting(state)
}

type Known = (u64, u64, super::naming::Identity, u64, i64);

/// Copies by what a consumer tells blocks and planes apart by.
fn known(state: &State) -> HashMap<Known, u32> {
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
fn ordered(state: &State) -> HashMap<u64, Vec<u64>> {
    let keys = |list: &Vec<u32>| list.iter().map(|&number| state.blocks.get(number).key).collect();
    state
        .blocks
        .several()
        .iter()
        .map(|(&hash, list)| (hash, keys(list)))
        .collect()
}
