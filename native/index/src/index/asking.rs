//! Who holds how much of a prompt: what the streams said, and on top of it what the overlay expects.

use std::cell::RefCell;
use std::sync::Arc;

use parking_lot::MutexGuard;

use super::Index;
use crate::contexts::Context;
use crate::core::{Member, Worker};
use crate::keys::{self, Item, Scheme};
use crate::matching::{Depth, FIRST_LOOK, Hit, Walk, hits};
use crate::overlay::Overlay;
use crate::planes::LEVELS;

/// Where a prompt is looked for.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// The wall.
    pub model: Option<String>,
    /// What the LoRA adds to the seed.
    pub lora: u64,
    /// What the salt adds to the seed.
    pub salt: u64,
    /// Multimodal items.
    pub items: Vec<Item>,
}

impl Scope {
    /// Its context in one scheme.
    fn context(&self, scheme: Scheme) -> Context {
        Context {
            scheme,
            lora: self.lora,
            salt: self.salt,
        }
    }

    /// Goes on with the keys of a prompt's blocks up to `wanted` of them.
    fn extend(&self, tokens: &[u32], scheme: Scheme, wanted: usize, keys: &mut Vec<u64>) {
        let known = keys.len();
        let parent = keys.last().copied();
        keys::locals(
            tokens,
            scheme,
            self.context(scheme).seed(),
            &self.items,
            known..wanted.max(known),
            keys,
        );
        keys::chain(parent, &mut keys[known..]);
    }
}

/// Kept from one match to the next to spare allocations.
#[derive(Default)]
struct Room {
    walk: Walk,
    /// Keys of a prompt by scheme.
    keys: Vec<Vec<u64>>,
    depths: Vec<Depth>,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
}

impl Index {
    /// Workers that hold a beginning of a prompt.
    ///
    /// Keys are made without the lock, first a few of them, since many prompts are unknown from the start. What the answer says was all
    /// true at one moment: the last look is at every key, of every scheme, under one lock.
    pub fn matched(&self, tokens: &[u32], scope: &Scope) -> Vec<Hit> {
        ROOM.with_borrow_mut(|room| {
            let Room { walk, keys, depths, .. } = room;
            let schemes = self.schemes(scope);
            keys.resize_with(schemes.len().max(keys.len()), Vec::new);
            keys.iter_mut().for_each(Vec::clear);
            let mut wanted = FIRST_LOOK;
            loop {
                for (&scheme, keys) in schemes.iter().zip(&mut *keys) {
                    scope.extend(tokens, scheme, scheme.blocks(tokens.len()).min(wanted), keys);
                }
                let core = self.asked();
                depths.clear();
                let mut goes_on = false;
                for (&scheme, keys) in schemes.iter().zip(&*keys) {
                    let found = walk.find(&core, keys, &scope.context(scheme));
                    goes_on |= found == keys.len() && found < scheme.blocks(tokens.len());
                    walk.depths(&core, scheme, &scope.model, depths);
                }
                if !goes_on {
                    return hits(&core, depths, schemes.len() > 1);
                }
                wanted = usize::MAX;
            }
        })
    }

    /// The same for keys that the caller has computed. None when block sizes differ and none is given.
    pub fn matched_keys(&self, keys: &[u64], size: Option<u32>, model: &Option<String>) -> Option<Vec<Hit>> {
        ROOM.with_borrow_mut(|room| {
            let core = self.asked();
            let schemes: Vec<Scheme> = core
                .contexts
                .schemes()
                .filter(|scheme| size.is_none_or(|size| size == scheme.size))
                .collect();
            if size.is_none() && schemes.iter().any(|scheme| scheme.size != schemes[0].size) {
                return None;
            }
            room.depths.clear();
            for &scheme in &schemes {
                room.walk
                    .read(&core, keys, |number| core.contexts.get(number).scheme == scheme);
                room.walk.depths(&core, scheme, model, &mut room.depths);
            }
            Some(hits(&core, &mut room.depths, schemes.len() > 1))
        })
    }

    /// Schemes in which this namespace has blocks at all.
    fn schemes(&self, scope: &Scope) -> Vec<Scheme> {
        let core = self.gate.read();
        let known =
            |scheme: &Scheme| core.contexts.find(&scope.context(*scheme)).is_some() || core.contexts.keyed(*scheme).is_some();
        core.contexts.schemes().filter(known).collect()
    }

    // --- the overlay

    /// Believes until `until` that a worker will hold a prompt.
    pub fn speculate(&self, worker: &Worker, tokens: &[u32], scope: &Scope, now: f64, until: f64) {
        let prompts = self.keys_of_all(tokens, scope);
        let mut overlay = self.overlay.lock();
        for (_, keys) in prompts {
            overlay.add(worker.clone(), keys, until);
        }
        drop(overlay);
        drop(self.overlay_at(now));
    }

    /// The overlay, in which what is over by `now` has ended.
    pub(super) fn overlay_at(&self, now: f64) -> MutexGuard<'_, Overlay> {
        let overlay = self.overlay.lock();
        if !overlay.is_due(now) {
            return overlay;
        }
        drop(overlay);
        drop(self.asked());
        let mut overlay = self.overlay.lock();
        self.expire(&mut overlay, now);
        overlay
    }

    fn expire(&self, overlay: &mut Overlay, now: f64) {
        let core = self.asked();
        overlay.expire(now, |worker, keys| {
            let ends = core.ends_of(keys);
            let holds = |stream: u32| ends.iter().any(|&end| core.sets.knows(core.records.get(end).set, stream));
            let same = |member: &Option<Member>| member.as_ref().is_some_and(|member| *member.worker == *worker);
            // Most decisions that end unconfirmed have brought no such block anywhere: then nobody is looked for.
            !ends.is_empty() && core.members.iter().position(same).is_some_and(|stream| holds(stream as u32))
        });
    }

    /// Lengthens an answer to what is believed.
    pub fn believed(&self, tokens: &[u32], scope: &Scope, now: f64, found: &mut Vec<Hit>) {
        if self.overlay_at(now).is_empty() {
            return;
        }
        let prompts = self.keys_of_all(tokens, scope);
        let registry = self.registry.read();
        let overlay = self.overlay.lock();
        let meant = |worker: &&Worker| registry.labels.get(&worker.source) == scope.model.as_ref();
        for worker in overlay.workers().filter(meant) {
            let depths = prompts
                .iter()
                .map(|(scheme, keys)| overlay.depth(worker, keys) as u64 * u64::from(scheme.size));
            let depth = depths.max().unwrap_or(0);
            match found.iter_mut().find(|hit| *hit.worker == *worker) {
                Some(hit) => hit.tokens.iter_mut().for_each(|tokens| *tokens = depth.max(*tokens)),
                None if depth > 0 => found.push(Hit {
                    worker: Arc::new(worker.clone()),
                    tokens: [depth; LEVELS],
                }),
                None => {}
            }
        }
    }

    /// Keys of a prompt in every scheme that some worker uses.
    fn keys_of_all(&self, tokens: &[u32], scope: &Scope) -> Vec<(Scheme, Vec<u64>)> {
        let schemes: Vec<Scheme> = self.gate.read().contexts.schemes().collect();
        let keys = |scheme: Scheme| {
            let mut found = Vec::new();
            scope.extend(tokens, scheme, scheme.blocks(tokens.len()), &mut found);
            (scheme, found)
        };
        schemes.into_iter().map(keys).collect()
    }
}
