//! How long a prefix each worker holds.
//!
//! Records along a chain are read until one is missing; consecutive blocks with the same holders are one step. Streams with one group are
//! then matched 64 at a time, by bitmaps; others by the rules of their groups, in one search for all that hold the same.

use std::cell::Cell;
use std::collections::BTreeSet;

use crate::groups::cache::by_level;
use crate::groups::search::{self, Blocks, CachedPrefix, Looks, SHARED_LOOKS};
use crate::groups::{Groups, Method};
use crate::holders::holder_sets::{EMPTY, Word};
use crate::holders::placements::LEVELS;
use crate::keys::{self, Scheme};
use crate::step_counter;
use crate::store::members::Member;
use crate::store::read_view::View;
use crate::store::records::{Memory, Records, chunk_of};
use crate::store::shared_state::set_bit;

/// One worker's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The number of the hit's stream.
    pub stream: u32,
    /// Tokens held by level, each with the levels before it.
    pub tokens: [u32; LEVELS],
}

impl Hit {
    /// Returns the hit with no token, as the certain part of one.
    pub fn without_certainty(&self) -> Self {
        Self {
            tokens: [0; LEVELS],
            ..*self
        }
    }
}

/// Tokens of a prompt.
#[derive(Clone, Copy, Debug)]
pub struct PromptLength {
    /// All.
    pub tokens: usize,
    /// Tokens of the longest possible answer: engines compute the last token of a prompt in any case.
    pub longest: usize,
}

/// Holders of one block after another: either a number in `Sets`, or several of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holders {
    Set(u32),
    Together(usize),
}

/// Consecutive blocks with the same holders.
#[derive(Clone, Copy, Debug)]
struct Step {
    /// Position after the last block.
    end: usize,
    holders: Holders,
}

/// Adjacent records that were read for consecutive blocks.
#[derive(Clone, Copy, Debug)]
struct BlockRow {
    /// The place of the first block.
    start: usize,
    /// Position after the last block.
    end: usize,
    /// The record of the first block.
    number: u32,
}

impl BlockRow {
    /// The record of the block at a place, if it is one of these.
    fn record(&self, at: usize) -> Option<u32> {
        (self.start..self.end)
            .contains(&at)
            .then(|| self.number + (at - self.start) as u32)
    }
}

/// Maximum number of possibly removed blocks that are examined for one stream; all blocks behind them count as not certain.
const MAX_UNCERTAIN: usize = 64;

/// Buffers that are kept from one match to the next.
#[derive(Debug, Default)]
pub struct Walk {
    steps: Vec<Step>,
    together: Vec<Vec<Word>>,
    /// The records that were read, by the positions of their blocks.
    rows: Vec<BlockRow>,
    keys: Vec<u64>,
    /// Records of one block.
    found: Vec<u32>,
    /// Positions at which a stream holds several blocks on one placement, under different hashes, and these streams as bits.
    twins: Vec<usize>,
    with_twins: Vec<u64>,
    /// Streams whose searches did not end: their hits are upper bounds.
    unfinished: Vec<u32>,
    /// The looks that all streams of the lookup share.
    shared_looks: Cell<usize>,
    seen: ReadVersions,
    alive: Vec<u64>,
    now: Vec<u64>,
    blocks: Vec<[u32; LEVELS]>,
    first: Vec<u64>,
}

/// Chunks that were read, to verify that all reads belong to one moment.
#[derive(Debug, Default)]
struct ReadVersions {
    /// Numbers and versions.
    chunks: Vec<(usize, u32)>,
    /// Whether a chunk was being changed.
    is_spoilt: bool,
    /// Whether no writer can run meanwhile.
    is_alone: bool,
}

impl ReadVersions {
    /// Returns the chunk of a record for reading.
    #[inline]
    fn chunk<'a>(&mut self, view: &'a View, number: u32) -> Option<&'a Memory> {
        let memory = view.chunk(number);
        if !self.is_alone && self.chunks.last().is_none_or(|(at, _)| *at != chunk_of(number)) {
            match memory.and_then(Memory::version) {
                Some(version) => self.chunks.push((chunk_of(number), version)),
                None => self.is_spoilt = true,
            }
        }
        memory
    }
}

impl Walk {
    /// The looks that all streams of the lookup share.
    pub fn shared_looks(&self) -> &Cell<usize> {
        &self.shared_looks
    }

    /// Drops all earlier readings. With `is_alone` no writer runs before the reads, which then see one state.
    pub fn begin(&mut self, is_alone: bool) {
        self.seen.chunks.clear();
        self.shared_looks.set(SHARED_LOOKS);
        (self.seen.is_spoilt, self.seen.is_alone) = (false, is_alone);
    }

    /// Whether all reads since `begin` belong to one moment. If not, their results are invalid.
    pub fn is_sound(&self, view: &View) -> bool {
        let is_still = |&(at, version): &(usize, u32)| view.chunks[at].as_ref().is_some_and(|chunk| chunk.is_still(version));
        !self.seen.is_spoilt && self.seen.chunks.iter().all(is_still)
    }

    /// Reads the records of a chain in a context, and the records that were stored by their keys in the context `keyed`, by the local
    /// hashes of its blocks. Returns the number of records before the first missing one.
    pub fn find(&mut self, view: &View, locals: &[u64], context: Option<u32>, keyed: Option<u32>) -> usize {
        match context {
            Some(context) if keyed.is_none() && view.strangers == 0 => self.read(view, locals, context),
            _ => {
                let mut keys = std::mem::take(&mut self.keys);
                keys.clear();
                keys.extend_from_slice(locals);
                keys::chain(None, &mut keys);
                let found = self.read_keys(view, &keys, |other| Some(other) == context, keyed);
                self.keys = keys;
                found
            }
        }
    }

    /// The usual case: a position in a run determines all blocks before it, so keys are only computed at the end of a run.
    fn read(&mut self, view: &View, locals: &[u64], context: u32) -> usize {
        self.clear();
        let Some(&(mut key)) = locals.first() else { return 0 };
        let mut at = 0;
        loop {
            self.list(view, false, key, |other| other == context);
            let Some(&number) = self.found.last() else { return at };
            at += 1;
            self.rows_to(at);
            self.step_to(view, at);
            let Some(chunk) = self.seen.chunk(view, number).filter(|_| !self.seen.is_spoilt) else {
                return at;
            };
            let (start, mut run) = (at, chunk.run_after(number));
            loop {
                let (count, set) = run.take(&locals[at..], context);
                if count == 0 {
                    break;
                }
                at += count;
                self.step(at, Holders::Set(set));
            }
            if let Some(row) = self.rows.last_mut() {
                row.end = at;
            }
            match locals.get(at) {
                Some(&local) => key = keys::chained(chunk.key(number + (at - start) as u32), local),
                None => return at,
            }
        }
    }

    /// Fills `found` with the records that are listed by a key and have a context that `meant` accepts.
    #[inline]
    fn list(&mut self, view: &View, keyed: bool, key: u64, meant: impl Fn(u32) -> bool) {
        self.found.clear();
        self.list_more(view, keyed, key, meant);
    }

    #[inline]
    fn list_more(&mut self, view: &View, keyed: bool, key: u64, meant: impl Fn(u32) -> bool) {
        let table = if keyed { &view.keyed } else { &view.heads };
        table.for_each_match(view.mixed(key), |number| {
            if let Some(chunk) = self.seen.chunk(view, number)
                && chunk.word(number) == key
                && meant(chunk.context(number))
            {
                self.found.push(number);
            }
            true
        });
    }

    /// Reads the records of a chain by its keys, in the contexts that `meant` accepts, and the records that were stored by their keys in
    /// the context `keyed`. Returns the number of records before the first missing one.
    pub fn read_keys(&mut self, view: &View, keys: &[u64], meant: impl Fn(u32) -> bool, keyed: Option<u32>) -> usize {
        self.clear();
        let mut before: Option<u32> = None;
        for (at, &key) in keys.iter().enumerate() {
            let next = before.and_then(Records::next).filter(|&next| {
                self.seen.chunk(view, next).is_some_and(|chunk| {
                    chunk.is_linked(next) && meant(chunk.context(next)) && keys::chained(keys[at - 1], chunk.word(next)) == key
                })
            });
            self.found.clear();
            self.found.extend(next);
            if next.is_none() || view.strangers > 0 {
                self.list_more(view, false, key, &meant);
            }
            before = self.found.first().copied();
            if keyed.is_some() {
                self.list_more(view, true, key, |context| Some(context) == keyed);
            }
            if self.found.is_empty() || self.seen.is_spoilt {
                return at;
            }
            self.rows_to(at + 1);
            self.step_to(view, at + 1);
        }
        keys.len()
    }

    fn clear(&mut self) {
        self.steps.clear();
        self.together.clear();
        self.rows.clear();
        self.twins.clear();
        self.with_twins.clear();
        self.unfinished.clear();
    }

    /// Notes the records of the block before `end`, of which `found` has them.
    #[inline]
    fn rows_to(&mut self, end: usize) {
        let start = end - 1;
        let last = self.rows.last_mut().filter(|last| last.end == start);
        match (&self.found[..], last) {
            (&[number], Some(last)) if last.number + (start - last.start) as u32 == number => last.end = end,
            (found, _) => self.rows.extend(found.iter().map(|&number| BlockRow { start, end, number })),
        }
    }

    /// Advances by one block, whose records are in `found`.
    fn step_to(&mut self, view: &View, end: usize) {
        let set = |seen: &mut ReadVersions, number| seen.chunk(view, number).map_or(EMPTY, |chunk| chunk.set(number));
        let holders = match self.found[..] {
            [number] => Holders::Set(set(&mut self.seen, number)),
            _ => {
                let (mut words, mut twins): (Vec<Word>, Vec<Word>) = Default::default();
                for &number in &self.found {
                    for word in view.words(set(&mut self.seen, number)) {
                        match words.iter_mut().find(|known| known.at == word.at) {
                            Some(known) => {
                                let bits = known.bits & word.bits;
                                known.bits |= word.bits;
                                twins.extend((bits != 0).then_some(Word { at: word.at, bits }));
                            }
                            None => words.push(*word),
                        }
                    }
                }
                if !twins.is_empty() {
                    self.twins.push(end - 1);
                    self.with_twins.resize(view.visible.len(), 0);
                    for word in twins {
                        if let Some(streams) = self.with_twins.get_mut(word.word()) {
                            *streams |= word.bits;
                        }
                    }
                }
                self.together.push(words);
                Holders::Together(self.together.len() - 1)
            }
        };
        self.step(end, holders);
    }

    #[inline]
    fn step(&mut self, end: usize, holders: Holders) {
        match self.steps.last_mut() {
            Some(last) if last.holders == holders => last.end = end,
            _ => self.steps.push(Step { end, holders }),
        }
    }

    #[inline]
    fn words<'a>(view: &'a View, together: &'a [Vec<Word>], holders: Holders) -> &'a [Word] {
        match holders {
            Holders::Set(set) => view.words(set),
            Holders::Together(at) => &together[at],
        }
    }

    /// Appends the matches of the last lookup, for the streams of a model.
    pub fn hits(&mut self, view: &View, scheme: Scheme, prompt: PromptLength, streams: &[u64], out: &mut Vec<Hit>) {
        if self.steps.is_empty() {
            return;
        }
        let (words, before) = (streams.len().min(view.visible.len()), out.len());
        self.match_single_groups(view, &streams[..words], scheme.size, out);
        if prompt.longest < prompt.tokens {
            shorten(out, before, tokens_of(scheme.blocks(prompt.longest) as u64, scheme.size));
        }
        // Replicas often hold the same blocks, and one search answers for all of them.
        let mut searched: Vec<(&Groups, GroupSteps, SearchedLevels)> = Vec::new();
        let mut steps = GroupSteps::default();
        for (at, &streams) in streams[..words].iter().enumerate() {
            let mut bits = view.hybrid[at] & streams & view.visible[at];
            let are_alike = bits != 0 && self.are_alike(view, at, bits);
            let mut first: Option<(&Groups, SearchedLevels)> = None;
            while bits != 0 {
                let stream = (at << 6) as u32 + bits.trailing_zeros();
                bits &= bits - 1;
                let member = view.members[stream as usize].as_ref();
                let Some(lookup) = member.and_then(|member| member.lookup.as_deref()) else {
                    continue;
                };
                let groups = &lookup.groups;
                let (tokens, is_exact) = match first.filter(|(others, _)| are_alike && groups == *others) {
                    Some((_, found)) => found,
                    None => {
                        self.read_groups(view, stream, groups, &mut steps);
                        let known = searched
                            .iter()
                            .find(|(others, known, _)| steps == *known && groups == *others);
                        let found = match known {
                            Some((_, _, found)) => *found,
                            None => self.search_groups(groups, &steps, scheme, prompt),
                        };
                        if known.is_none() && searched.len() < MAX_SEARCHED {
                            searched.push((groups, std::mem::take(&mut steps), found));
                        }
                        first = first.or(Some((groups, found)));
                        found
                    }
                };
                if !is_exact {
                    self.unfinished.push(stream);
                }
                if tokens[LEVELS - 1] > 0 {
                    out.push(Hit { stream, tokens });
                }
            }
        }
    }

    /// Returns the certain part of each of these hits whose stream has blocks that might be gone, or might not belong to the prompt.
    pub fn certain_hits(&mut self, view: &View, scheme: Scheme, prompt: PromptLength, hits: &[Hit], out: &mut Vec<Hit>) {
        if !view.has_uncertain_copies && self.twins.is_empty() && self.unfinished.is_empty() {
            return;
        }
        for hit in hits {
            if self.unfinished.contains(&hit.stream) {
                out.push(hit.without_certainty());
                continue;
            }
            let has = |streams: &[u64]| {
                let (word, bit) = (hit.stream as usize >> 6, hit.stream & 63);
                streams.get(word).is_some_and(|bits| bits >> bit & 1 == 1)
            };
            if has(&view.uncertain) || has(&self.with_twins) {
                let tokens = self.certain_tokens(view, scheme, prompt, hit);
                out.push(Hit { tokens, ..*hit });
            }
        }
    }

    /// Returns the certain part of one hit: the same lookup without the copies that might be gone, or of another block.
    #[cold]
    fn certain_tokens(&mut self, view: &View, scheme: Scheme, prompt: PromptLength, hit: &Hit) -> [u32; LEVELS] {
        let Some(member) = view.members[hit.stream as usize].as_ref() else {
            return hit.tokens;
        };
        let blocks = match member.lookup {
            None => (hit.tokens[LEVELS - 1] / scheme.size) as usize,
            Some(_) => self.steps.last().map_or(0, |step| step.end),
        };
        let places = self.doubtful_places(view, member, blocks);
        if places.is_empty() {
            return hit.tokens;
        }
        let known = (std::mem::take(&mut self.steps), self.together.len());
        self.steps = self.certain_steps(view, hit.stream, &known.0, &places);
        let mut only = vec![0; view.visible.len()];
        set_bit(&mut only, hit.stream, true);
        let (mut found, unfinished) = (Vec::new(), self.unfinished.len());
        self.hits(view, scheme, prompt, &only, &mut found);
        self.steps = known.0;
        self.together.truncate(known.1);
        if self.unfinished.len() > unfinished {
            found.clear();
        }
        found.first().map_or([0; LEVELS], |found| found.tokens)
    }

    /// Positions, among the first blocks, of blocks that a stream might not hold.
    fn doubtful_places(&self, view: &View, member: &Member, blocks: usize) -> BTreeSet<usize> {
        let mut places: BTreeSet<usize> = self.twins.iter().copied().filter(|&place| place < blocks).collect();
        for row in self.rows.iter().filter(|row| row.start < blocks) {
            let behind = row.number + (row.end.min(blocks) - row.start) as u32;
            let place = |number: u32| row.start + (number - row.number) as usize;
            let uncertain = member.uncertain.range((row.number, 0)..(behind, 0));
            let found = uncertain.map(|(number, _)| place(*number));
            places.extend(found.take(MAX_UNCERTAIN * LEVELS));
            if let Some(lora) = replaced_lora(view, member, row.number) {
                let outdated = (row.number..behind).filter(|&number| member.loras.is_outdated(lora, number));
                places.extend(outdated.map(place));
            }
        }
        places
    }

    /// Steps in which a stream holds only the certain copies of the blocks at these positions.
    fn certain_steps(&mut self, view: &View, stream: u32, steps: &[Step], places: &BTreeSet<usize>) -> Vec<Step> {
        let (mut certain, mut start) = (Vec::with_capacity(steps.len() + 2 * places.len().min(MAX_UNCERTAIN)), 0);
        let mut doubtful = 0;
        for &Step { end, holders } in steps {
            for &place in places.range(start..end) {
                let Some(words) = self.certain_holders(view, stream, place) else {
                    continue;
                };
                if doubtful == MAX_UNCERTAIN {
                    return certain;
                }
                doubtful += 1;
                if start < place {
                    certain.push(Step { end: place, holders });
                }
                self.together.push(words);
                let holders = Holders::Together(self.together.len() - 1);
                certain.push(Step { end: place + 1, holders });
                start = place + 1;
            }
            if start < end {
                certain.push(Step { end, holders });
                start = end;
            }
        }
        certain
    }

    /// The placements on which a stream certainly holds the block at a position; None if these are all on which it might hold it.
    fn certain_holders(&self, view: &View, stream: u32, place: usize) -> Option<Vec<Word>> {
        let member = view.members[stream as usize].as_ref()?;
        let (at, bit) = (stream as usize >> 6, 1 << (stream & 63));
        // Each of several records has a row of one block; only the last row can continue.
        let end = self.rows.partition_point(|row| row.start <= place);
        let first = self.rows[..end].last().map_or(place, |row| row.start);
        let rows = self.rows[..end].iter().rev().take_while(|row| row.start == first);
        let (mut certain, mut possible): (Vec<Word>, Vec<(Word, u32)>) = Default::default();
        for number in rows.filter_map(|row| row.record(place)) {
            let Some(chunk) = view.chunk(number) else { continue };
            let lora = replaced_lora(view, member, number);
            let is_outdated = lora.is_some_and(|lora| member.loras.is_outdated(lora, number));
            for word in view.words(chunk.set(number)) {
                if word.word() != at || word.bits & bit == 0 {
                    continue;
                }
                let is_uncertain = is_outdated || member.uncertain.contains(&(number, word.placement() as u16));
                if !is_uncertain {
                    certain.push(Word { at: word.at, bits: bit });
                }
                // If several blocks without a LoRA share a key, none of them is known to be the block of the prompt.
                let context = if lora.is_some() { u32::MAX } else { chunk.context(number) };
                possible.push((*word, context));
            }
        }
        let is_twin = |at: u32| {
            let mut contexts = possible
                .iter()
                .filter(|(word, context)| word.at == at && *context != u32::MAX);
            contexts
                .next()
                .is_some_and(|(_, first)| contexts.any(|(_, other)| other == first))
        };
        certain.retain(|word| !is_twin(word.at));
        let is_certain = |(word, _): &(Word, u32)| certain.iter().any(|certain| certain.at == word.at);
        (!possible.iter().all(is_certain)).then_some(certain)
    }

    /// Streams whose blocks are all of one kind.
    fn match_single_groups(&mut self, view: &View, streams: &[u64], size: u32, out: &mut Vec<Hit>) {
        let (words, levels) = (streams.len(), view.placements.depth());
        let Self {
            steps,
            together,
            alive,
            now,
            blocks,
            first,
            ..
        } = self;
        let placement_levels = view.placements.levels();
        let fill = |rows: &mut [u64], holders: Holders| {
            rows.fill(0);
            for word in Self::words(view, together, holders) {
                if levels == 1 {
                    if let Some(bits) = rows.get_mut(word.word()) {
                        *bits |= word.bits;
                    }
                } else if word.word() < words {
                    for level in usize::from(placement_levels[word.placement()])..levels {
                        rows[level * words + word.word()] |= word.bits;
                    }
                }
            }
        };
        for rows in [&mut *alive, &mut *now] {
            rows.clear();
            rows.resize(words * levels, 0);
        }
        fill(alive, steps[0].holders);
        for level in 0..levels {
            let row = &mut alive[level * words..][..words];
            for (at, bits) in row.iter_mut().enumerate() {
                *bits &= streams[at] & view.visible[at] & !view.hybrid[at];
            }
        }
        let top = (levels - 1) * words;
        let count: u32 = alive[top..].iter().map(|bits| bits.count_ones()).sum();
        out.reserve(count as usize);
        if steps.len() == 1 && levels == 1 {
            let tokens = [tokens_of(steps[0].end as u64, size); LEVELS];
            return for_each(alive, |stream| {
                out.push(Hit {
                    stream: stream as u32,
                    tokens,
                });
            });
        }
        first.clear();
        first.extend_from_slice(&alive[top..]);
        blocks.resize(blocks.len().max(words << 6), [0; LEVELS]);
        for_each(first, |stream| blocks[stream] = [0; LEVELS]);
        let mut start = steps[0].end;
        for step in &steps[1..] {
            let mut any = 0;
            let mut meet = |level: usize, word: usize, alive: &mut u64, now: u64| {
                let mut dropped = *alive & !now;
                *alive &= now;
                any |= *alive;
                while dropped != 0 {
                    let stream = (word << 6) + dropped.trailing_zeros() as usize;
                    dropped &= dropped - 1;
                    blocks[stream][level] = start as u32;
                }
            };
            let set = Self::words(view, together, step.holders);
            let is_row = levels == 1
                && matches!(step.holders, Holders::Set(_))
                && set.first().map(|word| word.placement()) == set.last().map(|word| word.placement());
            if is_row {
                // Words of one placement are in their order.
                let mut set = set.iter().peekable();
                for (word, alive) in alive.iter_mut().enumerate() {
                    let now = set.next_if(|next| next.word() == word).map_or(0, |next| next.bits);
                    meet(0, word, alive, now);
                }
            } else {
                fill(now, step.holders);
                for (at, (alive, now)) in alive.iter_mut().zip(&*now).enumerate() {
                    meet(at / words, at % words, alive, *now);
                }
            }
            if any == 0 {
                break;
            }
            start = step.end;
        }
        for level in 0..levels {
            for_each(&alive[level * words..][..words], |stream| {
                blocks[stream][level] = start as u32
            });
        }
        for_each(first, |stream| {
            let held = blocks[stream];
            let tokens = match levels {
                1 => [tokens_of(held[0].into(), size); LEVELS],
                _ => std::array::from_fn(|level| tokens_of(held[level.min(levels - 1)].into(), size)),
            };
            let stream = stream as u32;
            out.push(Hit { stream, tokens });
        });
    }

    /// Whether these streams, of one word of bits, hold the same blocks on the same placements.
    fn are_alike(&self, view: &View, at: usize, streams: u64) -> bool {
        step_counter::count(self.steps.len());
        let is_shared = |word: &Word| word.word() != at || word.bits & streams == 0 || word.bits & streams == streams;
        self.steps
            .iter()
            .all(|step| Self::words(view, &self.together, step.holders).iter().all(is_shared))
    }

    /// Tokens of a stream whose groups are searched. For a stream that is looked up by hashes they are an estimate: the blocks of its
    /// groups with full attention.
    fn search_groups(&self, groups: &Groups, steps: &GroupSteps, scheme: Scheme, prompt: PromptLength) -> SearchedLevels {
        let size = scheme.size as usize;
        // No group holds a block after the last step.
        let end = scheme.blocks(prompt.tokens).min(self.steps.last().map_or(0, |step| step.end)) * size;
        if groups.full_size() != Some(scheme.size) {
            return ([0; LEVELS], true);
        }
        if groups.method() == Method::Records {
            let looks = Looks::new(end / size, &self.shared_looks);
            return by_level(|level| search::find(groups, end, prompt.longest, &looks, OnLevel { steps, size, level }));
        }
        let needed: Vec<usize> = (groups.known().enumerate())
            .filter(|(_, group)| group.kind.is_full())
            .map(|(at, _)| at)
            .collect();
        by_level(|level| {
            let blocks = OnLevel { steps, size, level };
            let is_whole = |block: &usize| needed.iter().all(|&group| blocks.is_held(group, block * size));
            CachedPrefix {
                tokens: (1..=scheme.blocks(prompt.longest)).take_while(is_whole).count() * size,
                is_exact: true,
            }
        })
    }

    /// Replaces `found` by the steps of a stream, with the lowest level on which each of its groups holds the blocks of a step.
    fn read_groups(&self, view: &View, stream: u32, groups: &Groups, found: &mut GroupSteps) {
        let (at, bit, levels) = (stream as usize >> 6, stream & 63, view.placements.levels());
        let mut group_of: Vec<Option<Option<usize>>> = vec![None; levels.len()];
        let find_group = |placement: usize| {
            let number = view.placements.get(placement as u16).group;
            groups.known().position(|known| known.number == number)
        };
        found.groups = groups.known().count();
        found.ends.clear();
        found.lowest.clear();
        for step in &self.steps {
            let start = found.lowest.len();
            found.lowest.resize(start + found.groups, u8::MAX);
            for word in Self::words(view, &self.together, step.holders) {
                if word.word() == at
                    && word.bits >> bit & 1 == 1
                    && let Some(group) = *group_of[word.placement()].get_or_insert_with(|| find_group(word.placement()))
                {
                    let lowest = &mut found.lowest[start + group];
                    *lowest = (*lowest).min(levels[word.placement()]);
                }
            }
            found.add(step.end);
            step_counter::count(1);
        }
    }
}

/// Maximum number of searches of one lookup that are kept for other streams which hold the same.
const MAX_SEARCHED: usize = 8;

/// Tokens by level, and whether the searches ended.
type SearchedLevels = ([u32; LEVELS], bool);

/// Consecutive blocks, and the levels on which the groups of one stream hold them.
#[derive(Debug, Default, PartialEq)]
struct GroupSteps {
    groups: usize,
    /// Position after the last block of each step.
    ends: Vec<usize>,
    /// By step and group, the lowest level; above all levels if the group does not hold the blocks.
    lowest: Vec<u8>,
}

impl GroupSteps {
    /// Ends a step whose levels have been added. If the streams are equal to those of the step before, both steps become one.
    fn add(&mut self, end: usize) {
        let last = self.lowest.len() - self.groups;
        match self.ends.last_mut() {
            Some(before) if self.lowest[last - self.groups..last] == self.lowest[last..] => {
                *before = end;
                self.lowest.truncate(last);
            }
            _ => self.ends.push(end),
        }
    }

    /// The step of the block at a place.
    fn step(&self, place: usize) -> usize {
        self.ends.partition_point(|&end| end <= place)
    }
}

/// The prefix that one stream holds, on each level and the levels before it.
struct OnLevel<'a> {
    steps: &'a GroupSteps,
    /// Tokens of a block.
    size: usize,
    level: usize,
}

impl Blocks for OnLevel<'_> {
    fn is_held(&self, group: usize, position: usize) -> bool {
        let place = (position / self.size).wrapping_sub(1);
        let lowest = self.steps.lowest.get(self.steps.step(place) * self.steps.groups + group);
        position.is_multiple_of(self.size) && lowest.is_some_and(|&lowest| usize::from(lowest) <= self.level)
    }

    fn alike(&self, position: usize) -> (usize, usize) {
        let place = (position / self.size).wrapping_sub(1);
        let step = self.steps.step(place);
        match self.steps.ends.get(step) {
            Some(end) if position.is_multiple_of(self.size) => {
                let start = step.checked_sub(1).map_or(0, |before| self.steps.ends[before]);
                ((start + 1) * self.size, end * self.size)
            }
            _ => (position, position),
        }
    }
}

/// The LoRA of a block, if the stream has replaced it.
fn replaced_lora(view: &View, member: &Member, number: u32) -> Option<u64> {
    if member.loras.is_empty() {
        return None;
    }
    let context = view.contexts.get(view.chunk(number)?.context(number))?;
    (!context.is_keyed() && member.loras.contains(context.lora)).then_some(context.lora)
}

/// Shortens the hits from `first` on to this number of tokens.
fn shorten(hits: &mut Vec<Hit>, first: usize, most: u32) {
    for hit in &mut hits[first..] {
        hit.tokens = hit.tokens.map(|tokens| tokens.min(most));
    }
    if most == 0 {
        hits.truncate(first);
    }
}

fn tokens_of(blocks: u64, size: u32) -> u32 {
    u32::try_from(blocks.saturating_mul(size.into())).unwrap_or(u32::MAX)
}

fn for_each(words: &[u64], mut visit: impl FnMut(usize)) {
    for (at, &word) in words.iter().enumerate() {
        let mut bits = word;
        while bits != 0 {
            visit((at << 6) + bits.trailing_zeros() as usize);
            bits &= bits - 1;
        }
    }
}

/// Merges the answers of several schemes.
pub fn merge(hits: &mut Vec<Hit>) {
    hits.sort_by_key(|hit| hit.stream);
    hits.dedup_by(|next, first| {
        let same = next.stream == first.stream;
        if same {
            for (most, next) in first.tokens.iter_mut().zip(next.tokens) {
                *most = next.max(*most);
            }
        }
        same
    });
}
