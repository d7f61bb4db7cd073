//! Lookups: the number of tokens of a prompt that each worker holds according to its events. The overlay extends this number by speculative
//! entries: routing decisions that no event has confirmed yet.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashMap;
use std::hint::spin_loop;
use std::sync::Arc;

use parking_lot::{MutexGuard, RwLock};

use crate::groups::Method;
use crate::groups::cache::{Found, GroupCache, GroupLookup};
use crate::groups::engine_hash::EngineHash;
use crate::groups::search::{Looks, SharedLooks};
use crate::holders::contexts::Context;
use crate::holders::placements::LEVELS;
use crate::keys::{self, Items, Scheme};
use crate::lookup::matching::{Hit, PromptLength, Walk, for_each, merge};
use crate::prefix_index::PrefixIndex;
use crate::step_counter;
use crate::store::members::{Member, Model, Names, Worker, source_of};
use crate::store::overlay::Overlay;
use crate::store::read_view::View;

/// Maximum number of blocks that the first step of a lookup hashes. Later blocks are hashed only if the index has all blocks of the first
/// step.
const FIRST_BLOCKS: usize = 64;
/// Maximum number of tokens that the first step hashes; if one block has more tokens, the step hashes one block.
const FIRST_TOKENS: usize = 1_024;
/// Factor by which the number of hashed blocks grows whenever all hashed blocks were found.
const GROWTH: usize = 8;
/// Maximum number of blocks by which one speculative entry extends a worker's prefix, in each scheme: a million tokens in blocks of 16.
const MAX_EXPECTED: usize = 1 << 16;
/// Approximate maximum number of blocks of the speculative entries that one call removes; removing so many takes about 30 ms.
const ENDED_PER_CALL: usize = 1 << 16;
/// Number of tries of a lookup during which writers may run; in later tries the lookup excludes writers.
const TRIES: usize = 4;

/// The model and the namespace in which a prompt is looked up, and its multimodal items.
#[derive(Clone, Debug, Default)]
pub struct Scope {
    /// The model whose workers are searched.
    pub model: Option<String>,
    /// Part of the seed that the LoRA contributes; 0 without a LoRA.
    pub lora: u64,
    /// Part of the seed that the salt contributes; 0 without a salt.
    pub salt: u64,
    /// The multimodal items of the prompt.
    pub items: Items,
}

impl Scope {
    /// Context of the prompt in one scheme.
    fn context(&self, scheme: Scheme) -> Context {
        Context {
            scheme,
            lora: self.lora,
            salt: self.salt,
        }
    }

    /// Number of tokens of a prompt before its first item; 0 with a LoRA. Hashes of the blocks of these tokens cover no other input, except a
    /// salt.
    fn plain_tokens(&self, tokens: usize) -> usize {
        let first = self
            .items
            .first()
            .map_or(tokens, |item| usize::try_from(item.start).unwrap_or(0));
        if self.lora == 0 { first.min(tokens) } else { 0 }
    }

    /// The forms in which engines announce the prompt: with its own tokens, and with placeholders for the tokens of its items
    /// (TensorRT-LLM).
    fn variants<'a>(&self, tokens: &'a [u32]) -> Vec<Cow<'a, [u32]>> {
        let replaced = (!self.items.is_empty()).then(|| keys::with_placeholders(tokens, &self.items).into());
        std::iter::once(tokens.into()).chain(replaced).collect()
    }

    /// Appends the local hashes of further blocks of a prompt, until `locals` has `wanted` hashes.
    fn extend(&self, tokens: &[u32], scheme: Scheme, wanted: usize, locals: &mut Vec<u64>) {
        let (known, wanted) = (locals.len(), scheme.blocks(tokens.len()).min(wanted));
        if known < wanted {
            let seed = self.context(scheme).seed();
            keys::locals(tokens, scheme, seed, &self.items, known..wanted, locals);
        }
    }
}

/// The workers that hold a prefix of a prompt.
#[derive(Clone, Debug, Default)]
pub struct Matches {
    /// The hit of each worker: the tokens that it holds or probably holds.
    pub hits: Vec<Hit>,
    /// For each worker with uncertain tokens, a hit that counts only its certain tokens; ordered by stream. Tokens are uncertain if their
    /// blocks might be gone or come from speculative entries.
    uncertain: Vec<Hit>,
    /// Streams of which not even an upper bound of the tokens is known.
    unknown: Vec<u32>,
    names: Arc<Names>,
}

impl Matches {
    /// The worker of a hit.
    pub fn worker(&self, hit: &Hit) -> &Worker {
        let name = self.names.get(hit.stream as usize).and_then(Option::as_ref);
        name.expect("a match has the names of its streams")
    }

    /// Returns, for each level, the number of tokens that the worker of a hit certainly holds. The certain number is less than the hit's
    /// number if some blocks might be gone.
    pub fn certain(&self, hit: &Hit) -> [u32; LEVELS] {
        let found = self.uncertain.binary_search_by_key(&hit.stream, |certain| certain.stream);
        found.map_or(hit.tokens, |at| self.uncertain[at].tokens)
    }

    /// Whether the worker certainly holds exactly the tokens of its hit, on each level.
    pub fn is_certain(&self, hit: &Hit) -> bool {
        self.certain(hit) == hit.tokens && !self.unknown.contains(&hit.stream)
    }

    /// Stores the certain tokens of those streams for which they are fewer than the tokens of the hit.
    fn compare(&mut self, mut certain: Vec<Hit>) {
        if certain.is_empty() {
            return;
        }
        merge(&mut certain);
        let shorter = |hit: &Hit| {
            let at = certain.binary_search_by_key(&hit.stream, |certain| certain.stream).ok()?;
            (certain[at].tokens != hit.tokens).then_some(certain[at])
        };
        self.uncertain = self.hits.iter().filter_map(shorter).collect();
        self.uncertain.sort_unstable_by_key(|certain| certain.stream);
    }
}

/// Statistics of the speculative entries in the overlay.
#[derive(Clone, Copy, Debug)]
pub struct Speculated {
    /// Number of blocks of all present entries.
    pub blocks: usize,
    /// Number of entries whose prompt the worker held when the entry was removed.
    pub confirmed: u64,
    /// Number of entries that expired without a confirmation.
    pub expired: u64,
    /// Number of unconfirmed entries that were removed before they expired, because the limit was reached.
    pub displaced: u64,
}

/// A prompt divided into blocks by one scheme.
#[derive(Debug)]
struct Cut {
    scheme: Scheme,
    /// Index of the prompt's form in `Scope::variants`.
    variant: usize,
    /// The number of the prompt's context at the last lookup.
    context: Option<u32>,
    /// The number, at the last lookup, of the context of blocks that were stored by their keys.
    keyed: Option<u32>,
    locals: Vec<u64>,
    wanted: usize,
}

impl Cut {
    fn begin(&mut self, scheme: Scheme, variant: usize) {
        (self.scheme, self.variant) = (scheme, variant);
        self.locals.clear();
        self.wanted = (FIRST_TOKENS / scheme.size as usize).clamp(1, FIRST_BLOCKS);
    }
}

/// Buffers that each thread keeps from one lookup to the next, to avoid allocations.
#[derive(Default)]
struct Room {
    walk: Walk,
    /// The prompt's blocks, one entry for each scheme and variant. The next prompt probably uses the same schemes.
    cuts: Vec<Cut>,
    schemes: Vec<(Scheme, usize, Option<u32>, Option<u32>)>,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
}

/// Maximum number of bytes of local hashes that a thread keeps for the next prompt.
const HASHES_KEPT: usize = 1 << 16;

impl Room {
    /// Returns true if `cuts` has an entry for each variant of the prompt and each scheme of its scope; otherwise creates the missing
    /// entries, and returns false.
    fn is_cut(&mut self, view: &View, scope: &Scope, model: Option<&Model>) -> bool {
        self.schemes.clear();
        for &(scheme, _) in model.map_or(&[][..], |model| &model.schemes) {
            let (context, keyed) = (view.contexts.find(&scope.context(scheme)), view.contexts.keyed(scheme));
            if context.is_some() || keyed.is_some() {
                self.schemes.push((scheme, 0, context, keyed));
                if !scope.items.is_empty() {
                    self.schemes.push((scheme, 1, context, keyed));
                }
            }
        }
        let schemes = self.schemes.iter().map(|(scheme, variant, ..)| (*scheme, *variant));
        let same = self.cuts.iter().map(|cut| (cut.scheme, cut.variant)).eq(schemes);
        if !same {
            self.cuts.truncate(self.schemes.len());
            self.cuts.resize_with(self.schemes.len(), || Cut {
                scheme: Scheme { size: 1, eagle: false },
                variant: 0,
                context: None,
                keyed: None,
                locals: Vec::new(),
                wanted: 0,
            });
            for (cut, &(scheme, variant, ..)) in self.cuts.iter_mut().zip(&self.schemes) {
                cut.begin(scheme, variant);
            }
        }
        for (cut, &(_, _, context, keyed)) in self.cuts.iter_mut().zip(&self.schemes) {
            (cut.context, cut.keyed) = (context, keyed);
        }
        same
    }
}

impl PrefixIndex {
    /// The workers that hold a prefix of a prompt.
    ///
    /// Hashes are computed without the lock. At first only a few hashes are computed, since the index often has no block of the prompt. The
    /// answer describes one moment: the last try reads all blocks of all schemes, and counts only if no writer has changed these blocks
    /// during the try.
    pub fn match_prompt(&self, tokens: &[u32], scope: &Scope) -> Matches {
        self.match_prefix(tokens, tokens.len(), scope)
    }

    /// Returns the workers that hold a prefix of at most `longest` tokens. `longest` can exclude the prompt's last token, which engines
    /// always compute, although hashes cover it.
    pub fn match_prefix(&self, tokens: &[u32], longest: usize, scope: &Scope) -> Matches {
        let length = PromptLength {
            tokens: tokens.len(),
            longest: longest.min(tokens.len()),
        };
        let variants = scope.variants(tokens);
        ROOM.with_borrow_mut(|room| {
            room.cuts.retain(|cut| cut.variant < variants.len());
            room.cuts.iter_mut().for_each(|cut| cut.begin(cut.scheme, cut.variant));
            let (mut hits, mut certain, mut tries) = (Vec::new(), Vec::new(), 0);
            loop {
                for cut in &mut room.cuts {
                    scope.extend(&variants[cut.variant], cut.scheme, cut.wanted, &mut cut.locals);
                }
                let alone = (tries >= TRIES).then(|| self.shared_lock.read());
                let view = self.view.read();
                step_counter::begin_hold();
                let model = view.models.get(&scope.model);
                if !room.is_cut(&view, scope, model) {
                    continue;
                }
                room.walk.begin(room.cuts.len(), alone.is_some());
                hits.clear();
                certain.clear();
                let mut goes_on = false;
                let streams = model.map_or(&[][..], |model| &model.streams);
                for cut in &mut room.cuts {
                    let found = room.walk.find(&view, &cut.locals, cut.context, cut.keyed);
                    if !room.walk.is_sound(&view) {
                        break;
                    }
                    if found == cut.locals.len() && found < cut.scheme.blocks(tokens.len()) {
                        cut.wanted = cut.wanted.saturating_mul(GROWTH);
                        goes_on = true;
                    }
                    if !goes_on {
                        room.walk.hits(&view, cut.scheme, length, streams, &mut hits);
                    }
                }
                if !goes_on {
                    let cuts = &room.cuts;
                    room.walk
                        .read_again(&view, streams, &mut hits, |walk, schemes, streams, hits| {
                            for cut in cuts.iter().filter(|cut| schemes.contains(&cut.scheme)) {
                                walk.find(&view, &cut.locals, cut.context, cut.keyed);
                                if walk.is_sound(&view) {
                                    walk.hits(&view, cut.scheme, length, streams, hits);
                                }
                            }
                        });
                }
                if !room.walk.is_sound(&view) {
                    tries += 1;
                    drop(view);
                    spin_loop();
                    continue;
                }
                if goes_on {
                    continue;
                }
                let (names, hashed) = (view.names.clone(), streams_by_hashes(&view, streams));
                step_counter::end_hold();
                drop((view, alone));
                room.walk.search(&names, &mut hits, &mut certain);
                if room.cuts.len() > 1 {
                    merge(&mut hits);
                }
                let unknown = if hashed.is_empty() {
                    Vec::new()
                } else {
                    let prompt = HashedPrompts {
                        tokens,
                        longest: length.longest,
                        scope,
                        names: &names,
                        shared_looks: room.walk.shared_looks(),
                        known: Vec::new(),
                    };
                    prompt.find(&hashed, &mut hits, &mut certain)
                };
                for cut in &mut room.cuts {
                    cut.locals.clear();
                    cut.locals.shrink_to(HASHES_KEPT);
                }
                let mut matches = Matches {
                    hits,
                    uncertain: Vec::new(),
                    unknown,
                    names,
                };
                matches.compare(certain);
                return matches;
            }
        })
    }

    /// Returns the workers that hold blocks whose keys the caller has computed. Returns None if the model's block sizes differ and `size`
    /// is None.
    pub fn match_rolling_keys(&self, keys: &[u64], size: Option<u32>, model: &Option<String>) -> Option<Matches> {
        ROOM.with_borrow_mut(|room| {
            let (mut hits, mut certain, mut tries) = (Vec::new(), Vec::new(), 0);
            loop {
                let alone = (tries >= TRIES).then(|| self.shared_lock.read());
                let view = self.view.read();
                let model = view.models.get(model);
                let schemes: Vec<Scheme> = model
                    .map_or(&[][..], |model| &model.schemes)
                    .iter()
                    .map(|(scheme, _)| *scheme)
                    .filter(|scheme| size.is_none_or(|size| size == scheme.size))
                    .collect();
                if size.is_none() && schemes.iter().any(|scheme| scheme.size != schemes[0].size) {
                    return None;
                }
                room.walk.begin(schemes.len(), alone.is_some());
                hits.clear();
                certain.clear();
                let streams = model.map_or(&[][..], |model| &model.streams);
                let read = |walk: &mut Walk, meant: &[Scheme], streams: &[u64], hits: &mut Vec<Hit>| {
                    for &scheme in schemes.iter().filter(|scheme| meant.contains(scheme)) {
                        let meant = |number| view.contexts.get(number).is_some_and(|context| context.scheme == scheme);
                        walk.read_keys(&view, keys, meant, view.contexts.keyed(scheme));
                        if walk.is_sound(&view) {
                            let tokens = keys.len() * scheme.size as usize;
                            let length = PromptLength { tokens, longest: tokens };
                            walk.hits(&view, scheme, length, streams, hits);
                        }
                    }
                };
                read(&mut room.walk, &schemes, streams, &mut hits);
                room.walk.read_again(&view, streams, &mut hits, read);
                if !room.walk.is_sound(&view) {
                    tries += 1;
                    drop(view);
                    spin_loop();
                    continue;
                }
                let (names, hashed) = (view.names.clone(), streams_by_hashes(&view, streams));
                drop((view, alone));
                room.walk.search(&names, &mut hits, &mut certain);
                if schemes.len() > 1 {
                    merge(&mut hits);
                }
                // If an engine finds blocks by its own hashes, a match by keys is an estimate.
                let is_estimate = |hit: &Hit| hashed.binary_search_by_key(&hit.stream, |(stream, _)| *stream).is_ok();
                certain.retain(|hit| !is_estimate(hit));
                certain.extend(hits.iter().filter(|hit| is_estimate(hit)).map(Hit::without_certainty));
                let mut matches = Matches {
                    hits,
                    uncertain: Vec::new(),
                    unknown: Vec::new(),
                    names,
                };
                matches.compare(certain);
                return Some(matches);
            }
        })
    }

    // --- the overlay

    /// Adds a speculative entry: until the time `until`, a worker is expected to hold the first blocks of a prompt, at most `MAX_EXPECTED`.
    pub fn speculate(&self, worker: &Worker, tokens: &[u32], scope: &Scope, now: f64, until: f64) {
        let prompts = self.keys_by_scheme(tokens, scope);
        let prompts: Vec<Vec<u64>> = prompts.into_iter().map(|(_, keys)| keys).collect();
        let blocks: usize = prompts.iter().map(Vec::len).sum();
        self.overlay.lock().add(worker.clone(), prompts, until);
        drop(self.overlay_at(now, blocks));
    }

    /// Removes the speculative entries that have expired at `now`, and returns the overlay. One call removes entries of about
    /// `ENDED_PER_CALL + added` blocks at most; later calls remove the others.
    fn overlay_at(&self, now: f64, added: usize) -> MutexGuard<'_, Overlay> {
        let (mut overlay, mut ended) = (self.overlay.lock(), 0);
        while ended < ENDED_PER_CALL + added && overlay.is_due(now) {
            step_counter::begin_hold();
            ended += self.expire(&mut overlay, now);
            step_counter::end_hold();
            MutexGuard::bump(&mut overlay);
        }
        overlay
    }

    /// Removes the speculative entries of a worker, or of all ranks of a source. The overlay's lock is released after every few entries.
    pub(crate) fn forget_decisions(&self, source: &str, rank: Option<i64>) {
        let mut overlay = self.overlay.lock();
        let mut numbers = overlay.numbers();
        while !numbers.is_empty() {
            step_counter::begin_hold();
            overlay.forget(source, rank, &mut numbers);
            step_counter::end_hold();
            MutexGuard::bump(&mut overlay);
        }
    }

    /// Removes those speculative entries of a worker that end with one of these stored blocks. The overlay's lock is released after every
    /// few entries.
    pub(crate) fn confirm_decisions(&self, source: &str, rank: i64, stored: &[u64]) {
        let (mut overlay, mut done) = (self.overlay.lock(), 0);
        while done < stored.len() {
            step_counter::begin_hold();
            done += overlay.confirm(source, rank, &stored[done..]);
            step_counter::end_hold();
            MutexGuard::bump(&mut overlay);
        }
    }

    fn expire(&self, overlay: &mut Overlay, now: f64) -> usize {
        let shared = self.shared_lock.read();
        overlay.expire(now, |worker, keys| {
            let ends = shared.ends_of(keys);
            let holds = |stream: u32| ends.iter().any(|&end| shared.sets.knows(shared.records.set(end), stream));
            let same = |member: &Option<Member>| member.as_ref().is_some_and(|member| *member.worker == *worker);
            // If no stream holds the last block of an entry's prompt, the worker's blocks need not be searched. This is so for nearly all
            // entries that expire.
            !ends.is_empty()
                && shared
                    .view
                    .members
                    .iter()
                    .position(same)
                    .is_some_and(|stream| holds(stream as u32))
        })
    }

    /// Extends an answer by the blocks of speculative entries; none of these blocks is certain.
    pub fn extend_by_overlay(&self, tokens: &[u32], scope: &Scope, now: f64, found: &mut Matches) {
        if self.overlay_at(now, 0).is_empty() {
            return;
        }
        let prompts = self.keys_by_scheme(tokens, scope);
        let registry = self.registry.read();
        let overlay = self.overlay.lock();
        let meant = |worker: &&Worker| registry.labels.get(&worker.source) == scope.model.as_ref();
        for worker in overlay.workers().filter(meant) {
            let depths = prompts
                .iter()
                .map(|(scheme, keys)| overlay.depth(worker, keys) as u64 * u64::from(scheme.size));
            let depth = u32::try_from(depths.max().unwrap_or(0)).unwrap_or(u32::MAX);
            let known = found.hits.iter().position(|hit| found.worker(hit) == worker);
            match known {
                Some(at) => {
                    let hit = found.hits[at];
                    let tokens = hit.tokens.map(|tokens| depth.max(tokens));
                    let place = found.uncertain.binary_search_by_key(&hit.stream, |certain| certain.stream);
                    if let Err(place) = place
                        && tokens != hit.tokens
                    {
                        found.uncertain.insert(place, hit);
                    }
                    found.hits[at].tokens = tokens;
                }
                None if depth > 0 => {
                    let names = Arc::make_mut(&mut found.names);
                    names.push(Some(Arc::new(worker.clone())));
                    let hit = Hit {
                        stream: (names.len() - 1) as u32,
                        tokens: [depth; LEVELS],
                    };
                    found.hits.push(hit);
                    found.uncertain.push(hit.without_certainty());
                }
                None => {}
            }
        }
    }

    /// Statistics of the overlay.
    pub fn speculated(&self, now: f64) -> Speculated {
        let overlay = self.overlay_at(now, 0);
        Speculated {
            blocks: overlay.len(),
            confirmed: overlay.confirmed,
            expired: overlay.expired,
            displaced: overlay.displaced,
        }
    }

    /// Keys of the first blocks of a prompt in every scheme that some worker of the scope's model uses.
    fn keys_by_scheme(&self, tokens: &[u32], scope: &Scope) -> Vec<(Scheme, Vec<u64>)> {
        let view = self.view.read();
        let model = view.models.get(&scope.model);
        let schemes: Vec<Scheme> = model
            .map_or(&[][..], |model| &model.schemes)
            .iter()
            .map(|(scheme, _)| *scheme)
            .collect();
        drop(view);
        let variants = scope.variants(tokens);
        let keys = |(scheme, tokens): (Scheme, &[u32])| {
            let mut found = Vec::new();
            scope.extend(tokens, scheme, MAX_EXPECTED, &mut found);
            keys::chain(None, &mut found);
            (scheme, found)
        };
        let each = variants
            .iter()
            .flat_map(|tokens| schemes.iter().map(move |scheme| (*scheme, &tokens[..])));
        each.map(keys).collect()
    }
}

/// The streams of a model that are looked up by their engine's own hashes, in the order of their numbers.
fn streams_by_hashes(view: &View, streams: &[u64]) -> Vec<(u32, Arc<GroupLookup>)> {
    let mut found = Vec::new();
    for (at, ((&streams, &hybrid), &visible)) in streams.iter().zip(&view.hybrid).zip(&view.visible).enumerate() {
        for_each(&[streams & hybrid & visible], |bit| {
            let member = view.members[at << 6 | bit].as_ref();
            let lookup = member.and_then(|member| member.lookup.as_ref());
            if let Some(lookup) = lookup.filter(|lookup| lookup.groups.method() == Method::Hashes) {
                found.push(((at << 6 | bit) as u32, lookup.clone()));
            }
        });
    }
    found
}

/// The hashes of a prompt, as engines compute them: replicas of one engine compute the same hashes.
struct HashedPrompts<'a> {
    tokens: &'a [u32],
    longest: usize,
    scope: &'a Scope,
    names: &'a Names,
    shared_looks: &'a SharedLooks,
    /// The hashes of the prompt for each scheme and salt, each with the source for which they were computed.
    known: Vec<(EngineHash, Option<String>, Vec<u64>, &'a str)>,
}

/// Maximum number of bytes that one lookup hashes to compute the hashes of engines: about 30 ms.
const MAX_HASHED: usize = 1 << 25;

impl<'a> HashedPrompts<'a> {
    /// The hashes of the prompt for a stream of a source. None if the lookup would hash too many bytes, or if hashes of another scheme were
    /// computed for the source: all streams of an engine have the same scheme.
    fn hashes(&mut self, source: &'a str, hashing: &EngineHash, salt: Option<String>) -> Option<&[u64]> {
        let same = |(known, other, ..): &(EngineHash, Option<String>, _, _)| known == hashing && *other == salt;
        let at = self.known.iter().position(same).unwrap_or(self.known.len());
        if at == self.known.len() {
            let hashed: usize = self.known.iter().map(|(known, ..)| known.cost(self.tokens.len())).sum();
            let is_other = self.known.iter().any(|(.., of)| *of == source);
            if is_other || hashed + hashing.cost(self.tokens.len()) > MAX_HASHED {
                return None;
            }
            let mut hashes = Vec::new();
            hashing.hash(self.tokens, salt.as_deref(), &mut hashes);
            step_counter::count(hashing.cost(self.tokens.len()) / 64);
            self.known.push((hashing.clone(), salt, hashes, source));
        }
        Some(&self.known[at].2)
    }

    /// Replaces the hits of those streams that are looked up by their engine's own hashes. If these hashes cannot be computed for the
    /// prompt, the hit is an upper bound, and no token of it is certain. Returns the streams for which no upper bound is known.
    fn find(mut self, streams: &[(u32, Arc<GroupLookup>)], hits: &mut Vec<Hit>, certain: &mut Vec<Hit>) -> Vec<u32> {
        let is_hashed = |hit: &Hit| {
            let found = streams.binary_search_by_key(&hit.stream, |(stream, _)| *stream);
            found.is_ok_and(|at| streams[at].1.cache.is_some())
        };
        certain.retain(|hit| !is_hashed(hit));
        let estimates = hits.extract_if(.., |hit| is_hashed(hit));
        let estimates: HashMap<u32, [u32; LEVELS]> = estimates.map(|hit| (hit.stream, hit.tokens)).collect();
        let mut unknown = Vec::new();
        // Schemes with few hashes come first.
        let mut streams: Vec<_> = streams.iter().collect();
        streams.sort_by_key(|(_, lookup)| lookup.groups.hashing.as_ref().map(|hashing| hashing.cost(self.tokens.len())));
        for (stream, lookup) in streams {
            let Some(cache) = &lookup.cache else { continue };
            let (known, found) = (estimates.get(stream).copied(), self.find_one(*stream, lookup, cache));
            let is_known = found.is_some();
            let found = found.unwrap_or_else(|| {
                let partial = lookup
                    .groups
                    .full_size()
                    .map_or(0, |_| lookup.groups.partial_tokens() as usize);
                let most = |tokens: u32| (tokens as usize + partial).min(self.longest) as u32;
                Found {
                    tokens: known.unwrap_or_default().map(most),
                    certain: [0; LEVELS],
                }
            });
            if !is_known && lookup.groups.full_size().is_none() && lookup.groups.hashing.is_some() {
                unknown.push(*stream);
            }
            if found.tokens[LEVELS - 1] > 0 || unknown.last() == Some(stream) {
                let (stream, Found { tokens, certain: sure }) = (*stream, found);
                hits.push(Hit { stream, tokens });
                certain.push(Hit { stream, tokens: sure });
            }
        }
        unknown
    }

    /// Returns how many tokens one stream holds; None if the number is not known.
    fn find_one(&mut self, stream: u32, lookup: &GroupLookup, cache: &RwLock<GroupCache>) -> Option<Found> {
        let (groups, plain) = (&lookup.groups, self.scope.plain_tokens(self.tokens.len()));
        let (has_full, is_plain) = (groups.has_full(), self.scope.lora == 0 && self.scope.items.is_empty());
        // An engine that has announced no LoRA and no item holds no block with a LoRA, and none from the first item on. This (and below, the
        // same for salts) does not follow for an engine without full attention, which might not announce the first blocks of a prompt.
        if !is_plain && (!has_full || groups.has_unknown_inputs) {
            return None;
        }
        if plain == 0 {
            return Some(Found::default());
        }
        let salt = match self.scope.salt {
            0 => Some(None),
            part => cache.read().salt(part).map(|salt| Some(salt.to_owned())),
        };
        match (&groups.hashing, salt) {
            (Some(hashing), Some(salt)) => {
                let (longest, shared_looks, source) = (self.longest, self.shared_looks, source_of(self.names, stream));
                let hashes = self.hashes(source, hashing, salt)?;
                let hashes = &hashes[..hashes.len().min(plain / hashing.unit as usize)];
                let looks = Looks::new(hashes.len(), shared_looks, source);
                Some(GroupCache::find(cache, groups, hashes, longest.min(plain), &looks))
            }
            // The engine has announced no prompt with this salt, so it holds no token of this prompt.
            (Some(_), None) if has_full && !cache.read().misses_salts() => Some(Found::default()),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::{GroupKind, Groups};

    /// A stream that holds a whole prompt by the hashes of a scheme.
    fn lookup(hashing: EngineHash, tokens: &[u32]) -> Arc<GroupLookup> {
        let (mut hashes, mut cache) = (Vec::new(), GroupCache::default());
        hashing.hash(tokens, None, &mut hashes);
        hashes.iter().for_each(|&hash| cache.put(0, hash, 0, true, true));
        let mut groups = Groups::default();
        groups.learn(0, GroupKind::Full(0), hashing.unit);
        groups.hashing = Some(hashing);
        let cache = Some(Arc::new(RwLock::new(cache)));
        Arc::new(GroupLookup { groups, cache })
    }

    /// Finds the streams of these sources, which hold the whole prompt. Returns the streams that certainly hold it, in order.
    fn certain_streams(sources: &[&str], units: &[u32], tokens: usize) -> Vec<u32> {
        let prompt = vec![7; tokens];
        let scheme = |unit: &u32| EngineHash::of_parts([2, 0, u64::from(*unit), 0]).unwrap();
        let streams: Vec<_> = (0..).zip(units.iter().map(|unit| lookup(scheme(unit), &prompt))).collect();
        let worker = |(source, rank): (&&str, i64)| {
            let source = (*source).to_owned();
            Some(Arc::new(Worker { source, rank }))
        };
        let names: Names = sources.iter().zip(0..).map(worker).collect();
        let hashed = HashedPrompts {
            tokens: &prompt,
            longest: tokens,
            scope: &Scope::default(),
            names: &names,
            shared_looks: &SharedLooks::default(),
            known: Vec::new(),
        };
        let (mut hits, mut certain) = (Vec::new(), Vec::new());
        hashed.find(&streams, &mut hits, &mut certain);
        let is_whole = |hit: &&Hit| hit.tokens[0] as usize == tokens;
        let mut found: Vec<u32> = certain.iter().filter(is_whole).map(|hit| hit.stream).collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn a_source_has_one_scheme_of_hashes() {
        assert_eq!(certain_streams(&["a", "a", "b", "b", "b"], &[4, 4, 2, 8, 16], 64), [0, 1, 4]);
        // What was computed for another source is used.
        assert_eq!(certain_streams(&["a", "b", "b"], &[8, 16, 8], 64), [0, 1, 2]);
    }

    #[test]
    fn schemes_with_few_hashes_come_first() {
        let most = MAX_HASHED / EngineHash::of_parts([2, 0, 128, 0]).unwrap().cost(128) * 128;
        assert_eq!(certain_streams(&["a"], &[128], most), [0]);
        assert_eq!(certain_streams(&["a"], &[128], most + 128), [0_u32; 0]);
        assert_eq!(
            certain_streams(&["a", "b", "c"], &[128, 2_048, 256], most / 4_096 * 2_048),
            [1, 2]
        );
    }
}
