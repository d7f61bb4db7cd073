//! How long a prefix of a prompt each worker holds.
//!
//! The records of a chain are read until one is missing; consecutive blocks with the same holders are one step. Then streams with one group
//! are matched by bitmaps, 64 at a time. Other streams need searches; what these searches need is read under the lock of the view. The
//! searches follow the rules of the streams' groups, and run after the lock is released. One search serves all streams that hold the same
//! blocks.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::groups::cache::{GroupLookup, by_level};
use crate::groups::search::{self, Blocks, CachedPrefix, Looks, SharedLooks};
use crate::groups::{Groups, Method};
use crate::holders::holder_sets::{EMPTY, Word};
use crate::holders::placements::LEVELS;
use crate::keys::{self, Scheme};
use crate::step_counter;
use crate::store::members::{Member, Names, source_of};
use crate::store::read_view::View;
use crate::store::records::{Memory, Records, chunk_of};
use crate::store::shared_state::set_bit;

/// The number of tokens of a prompt that one worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The number of the worker's stream.
    pub stream: u32,
    /// Number of tokens that the worker holds by level; each level includes the levels before it.
    pub tokens: [u32; LEVELS],
}

impl Hit {
    /// Returns this hit with 0 tokens on each level, for a worker that certainly holds nothing.
    pub fn without_certainty(&self) -> Self {
        Self {
            tokens: [0; LEVELS],
            ..*self
        }
    }
}

/// The length of a prompt, and the maximum length of an answer.
#[derive(Clone, Copy, Debug)]
pub struct PromptLength {
    /// Number of tokens of the whole prompt.
    pub tokens: usize,
    /// Maximum number of tokens of an answer: engines compute the last token of a prompt in any case.
    pub longest: usize,
}

/// The holders of a block: the number of a set in `Sets`, or the position of a union of several sets in `Walk::together`. After the budget
/// for reads is used up, the holders of further blocks are not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holders {
    Set(u32),
    Together(usize),
    Unread,
}

/// Consecutive blocks with the same holders.
#[derive(Clone, Copy, Debug)]
struct Step {
    /// Position after the last block.
    end: usize,
    holders: Holders,
}

/// Consecutive blocks whose records are adjacent.
#[derive(Clone, Copy, Debug)]
struct BlockRow {
    /// The position of the first block.
    start: usize,
    /// Position after the last block.
    end: usize,
    /// The record of the first block.
    number: u32,
}

impl BlockRow {
    /// The record of the block at a position; None if the block is not in this row.
    fn record(&self, at: usize) -> Option<u32> {
        (self.start..self.end)
            .contains(&at)
            .then(|| self.number + (at - self.start) as u32)
    }
}

/// Maximum number of uncertain blocks that are examined for one stream; all blocks after the last examined one count as uncertain.
const MAX_UNCERTAIN: usize = 64;

/// Buffers that are kept from one lookup to the next.
#[derive(Debug, Default)]
pub struct Walk {
    steps: Vec<Step>,
    together: Vec<Vec<Word>>,
    /// The records that were read, in the order of their blocks in the prompt.
    rows: Vec<BlockRow>,
    keys: Vec<u64>,
    /// All records of the block that is being read.
    found: Vec<u32>,
    /// Positions of blocks for which some stream holds twins: several records, under different hashes, on one placement. `with_twins` has a
    /// bit for each of these streams.
    twins: Vec<usize>,
    with_twins: Vec<u64>,
    /// The data that were read for searches, one entry for each scheme.
    readings: Vec<Reading>,
    /// The number of words of holder sets that may still be read.
    reads: Reads,
    /// For each stream that has one group and whose last blocks were not read, a hit that counts only its certain tokens.
    lower_bounds: Vec<Hit>,
    /// Number of steps of all walks, at most.
    walked: usize,
    /// The largest number of records of one block, if it is above 1.
    most_records: usize,
    /// The streams that are read, if the holders of all streams are too many.
    kept: Option<Kept>,
    /// The looks (see `Looks`) that all streams of the lookup share.
    shared_looks: SharedLooks,
    seen: ReadVersions,
    alive: Vec<u64>,
    now: Vec<u64>,
    blocks: Vec<[u32; LEVELS]>,
    first: Vec<u64>,
}

/// The number of words of holder sets that may be read from now on. A lookup has three phases: it reads blocks with several records,
/// matches streams with one group, and reads for searches. This budget grows by `part` words at the start of each phase.
#[derive(Debug, Default)]
struct Reads {
    left: Cell<usize>,
    part: usize,
    /// Whether more words would have been read.
    is_exceeded: Cell<bool>,
}

/// The streams of some sources.
#[derive(Debug, Default)]
struct Kept {
    /// The streams, as bits.
    streams: Vec<u64>,
    /// The values of `Word::at` of all words of these streams.
    words: BTreeSet<u32>,
    /// The schemes that they use.
    schemes: Vec<Scheme>,
}

impl Reads {
    fn add_part(&self) {
        self.left.set(self.left.get() + self.part);
    }

    /// Subtracts `words` from the budget. Returns whether the budget sufficed.
    #[inline]
    fn take(&self, words: usize) -> bool {
        step_counter::count(words.div_ceil(WORDS_PER_STEP));
        let left = self.left.get();
        if left < words {
            self.is_exceeded.set(true);
        }
        self.left.set(left.saturating_sub(words));
        left >= words
    }
}

/// The chunks that were read, each with its version, to verify that all reads belong to one moment.
#[derive(Debug, Default)]
struct ReadVersions {
    /// The number and the version of each chunk.
    chunks: Vec<(usize, u32)>,
    /// Whether a chunk was read while a writer changed it.
    is_spoilt: bool,
    /// Whether no writer can run during the reads.
    is_alone: bool,
}

impl ReadVersions {
    /// Returns the chunk of a record, and notes that the chunk is read.
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

/// The words of a source, and its streams.
type SourceStreams<'a> = (BTreeSet<u32>, Vec<(usize, &'a Member)>);

impl Kept {
    /// The streams of sources whose words can be read in `steps` steps, for blocks with up to `records` records. The sources with the fewest
    /// words come first.
    fn smallest(view: &View, streams: &[u64], steps: usize, records: usize) -> Self {
        let mut sources: BTreeMap<&str, SourceStreams<'_>> = BTreeMap::new();
        for_each(streams, |stream| {
            let Some(member) = &view.members[stream] else { return };
            let (words, members) = sources.entry(&member.worker.source).or_default();
            let at = |&placement: &u16| u32::from(placement) << 16 | stream as u32 >> 6;
            words.extend(member.placements.iter().map(at));
            members.push((stream, member));
        });
        let mut sources: Vec<_> = sources.into_values().collect();
        sources.sort_by_key(|(words, _)| words.len());
        let mut kept = Self {
            streams: vec![0; streams.len()],
            ..Self::default()
        };
        let rows = streams.len() * view.placements.depth();
        let reads = |words: usize| {
            // Each word is merged, sought, read for streams with one group, and compared twice for other streams.
            let merged = records * (WORDS_PER_STEP + WORDS_PER_MERGE * words);
            steps * (merged + (WORDS_PER_SEEK + 3) * words + rows + 1)
        };
        let most = sources.first().map_or(0, |(words, _)| reads(words.len())).max(READS_AGAIN);
        for (words, members) in sources {
            let words = &kept.words | &words;
            if reads(words.len()) > most {
                break;
            }
            kept.words = words;
            for (stream, member) in members {
                set_bit(&mut kept.streams, stream as u32, true);
                kept.schemes.extend(&member.schemes);
            }
        }
        kept
    }

    /// The part of a set of holders that these streams are.
    fn of(&self, words: &[Word]) -> Vec<Word> {
        let place = |at: &u32| words.binary_search_by_key(at, |word| word.at).ok();
        let found = self.words.iter().filter_map(place).map(|place| words[place]);
        let of_streams = |word: Word| Word {
            bits: word.bits & self.streams[word.word()],
            ..word
        };
        found.map(of_streams).filter(|word| word.bits != 0).collect()
    }
}

impl Walk {
    /// The looks that all streams of the lookup share.
    pub fn shared_looks(&self) -> &SharedLooks {
        &self.shared_looks
    }

    /// Forgets the previous lookup, before a lookup in `schemes` schemes. If `is_alone`, the caller guarantees that no writer runs until
    /// the end of the lookup, so that all reads see one state.
    pub fn begin(&mut self, schemes: usize, is_alone: bool) {
        self.seen.chunks.clear();
        self.readings.clear();
        self.lower_bounds.clear();
        self.reads = Reads {
            part: (MAX_READS / 8) >> schemes.next_power_of_two().ilog2(),
            ..Reads::default()
        };
        (self.walked, self.most_records) = (0, 0);
        self.shared_looks.begin();
        (self.seen.is_spoilt, self.seen.is_alone) = (false, is_alone);
    }

    /// Whether all reads since `begin` belong to one moment. If they do not, their results are invalid.
    pub fn is_sound(&self, view: &View) -> bool {
        let is_still = |&(at, version): &(usize, u32)| view.chunks[at].as_ref().is_some_and(|chunk| chunk.is_still(version));
        !self.seen.is_spoilt && self.seen.chunks.iter().all(is_still)
    }

    /// Reads the records of a chain, given the local hashes of its blocks, in the context `context`. Also reads records in the context
    /// `keyed`, whose blocks were stored by their keys. Returns the number of records before the first missing one.
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

    /// Reads a chain in one context. A position in a run determines all blocks before it, so only the key after the end of a run is
    /// computed.
    fn read(&mut self, view: &View, locals: &[u64], context: u32) -> usize {
        self.clear();
        let Some(&(mut key)) = locals.first() else { return 0 };
        let mut at = 0;
        loop {
            self.list(view, false, key, |other| other == context);
            let Some(&number) = self.found.last() else { return at };
            at += 1;
            self.rows_to(at);
            if !self.step_to(view, at) {
                return self.leave_unread(locals.len());
            }
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

    /// Fills `found` with the records that have this key and a context that `meant` accepts.
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
            if !self.step_to(view, at + 1) {
                return self.leave_unread(keys.len());
            }
        }
        keys.len()
    }

    fn clear(&mut self) {
        self.steps.clear();
        self.together.clear();
        self.rows.clear();
        self.twins.clear();
        self.with_twins.clear();
        self.reads.add_part();
    }

    /// Adds a row for each record in `found`; these are the records of the block that ends before the position `end`.
    #[inline]
    fn rows_to(&mut self, end: usize) {
        let start = end - 1;
        let last = self.rows.last_mut().filter(|last| last.end == start);
        match (&self.found[..], last) {
            (&[number], Some(last)) if last.number + (start - last.start) as u32 == number => last.end = end,
            (found, _) => self.rows.extend(found.iter().map(|&number| BlockRow { start, end, number })),
        }
    }

    /// Advances by one block, whose records are in `found`. Returns whether the holders of the block were read.
    fn step_to(&mut self, view: &View, end: usize) -> bool {
        let set = |seen: &mut ReadVersions, number| seen.chunk(view, number).map_or(EMPTY, |chunk| chunk.set(number));
        let holders = match self.found[..] {
            [number] => Holders::Set(set(&mut self.seen, number)),
            _ => {
                let mut words: Vec<Word> = Vec::new();
                self.most_records = self.most_records.max(self.found.len());
                for &number in &self.found {
                    let more = view.words(set(&mut self.seen, number));
                    let kept = self.kept.as_ref().map(|kept| kept.of(more));
                    let more = kept.as_deref().unwrap_or(more);
                    if !self.reads.take(WORDS_PER_STEP + WORDS_PER_MERGE * more.len()) {
                        return false;
                    }
                    words.extend_from_slice(more);
                }
                // Each record's words are sorted already, so this sort is fast.
                words.sort_by_key(|word| word.at);
                self.with_twins.resize(view.visible.len(), 0);
                let mut has_twins = false;
                words.dedup_by(|next, word| {
                    let is_same = next.at == word.at;
                    if is_same {
                        let twins = word.bits & next.bits;
                        word.bits |= next.bits;
                        has_twins |= twins != 0;
                        if let Some(streams) = self.with_twins.get_mut(word.word()) {
                            *streams |= twins;
                        }
                    }
                    is_same
                });
                self.twins.extend(has_twins.then_some(end - 1));
                self.together.push(words);
                Holders::Together(self.together.len() - 1)
            }
        };
        self.step(end, holders);
        true
    }

    /// Marks the holders of all further blocks as unread. Returns `blocks`.
    fn leave_unread(&mut self, blocks: usize) -> usize {
        self.walked += blocks;
        self.step(blocks, Holders::Unread);
        blocks
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
            Holders::Unread => &[],
        }
    }

    /// Appends the hits of those `streams` that have one group, and reads what `search` needs for all others.
    pub fn hits(&mut self, view: &View, scheme: Scheme, prompt: PromptLength, streams: &[u64], out: &mut Vec<Hit>) {
        let Some(&Step { end, .. }) = self.steps.last() else { return };
        self.walked += self.steps.len();
        if self.kept.is_some() {
            self.drop_others(view);
        }
        let (words, before) = (streams.len().min(view.visible.len()), out.len());
        let read = self.match_single_groups(view, &streams[..words], scheme.size, out);
        if prompt.longest < prompt.tokens {
            shorten(out, before, tokens_of(scheme.blocks(prompt.longest) as u64, scheme.size));
        }
        let has_doubts = view.has_uncertain_copies || !self.twins.is_empty();
        let bits = |streams: &[u64], at: usize| streams.get(at).copied().unwrap_or_default();
        let doubtful = |at: usize| {
            if has_doubts {
                bits(&view.uncertain, at) | bits(&self.with_twins, at)
            } else {
                0
            }
        };
        if read < end {
            let most = tokens_of(read as u64, scheme.size);
            let is_unread =
                |hit: &&Hit| hit.tokens[LEVELS - 1] > most && doubtful(hit.stream as usize >> 6) >> (hit.stream & 63) & 1 == 0;
            let least = |hit: &Hit| Hit {
                tokens: hit.tokens.map(|tokens| tokens.min(most)),
                ..*hit
            };
            self.lower_bounds.extend(out[before..].iter().filter(is_unread).map(least));
        }
        let searched = |(at, streams): (usize, &u64)| streams & view.visible[at] & (view.hybrid[at] | doubtful(at));
        let streams: Vec<u64> = streams[..words].iter().enumerate().map(searched).collect();
        if streams.iter().all(|&streams| streams == 0) {
            return;
        }
        self.reads.add_part();
        let (changes, read) = self.read_changes(view, &streams);
        let mut searches = Vec::new();
        for (at, &streams) in streams.iter().enumerate() {
            list_searches(view, at, streams & view.hybrid[at], &changes, &mut searches);
            for_each(&[streams & doubtful(at)], |bit| {
                let stream = at << 6 | bit;
                let Some(member) = view.members[stream].as_ref() else { return };
                let hit = out[before..].binary_search_by_key(&stream, |hit| hit.stream as usize);
                let blocks = match (&member.lookup, hit) {
                    (Some(_), _) => end,
                    (None, Ok(at)) => (out[before + at].tokens[LEVELS - 1] / scheme.size) as usize,
                    (None, Err(_)) => return,
                };
                searches.push(Search {
                    at,
                    streams: 1 << bit,
                    lookup: member.lookup.clone(),
                    doubts: Some(self.doubts(view, stream as u32, member, blocks)),
                });
            });
        }
        if changes.len() * searches.len() > MAX_SCANNED {
            self.reads.is_exceeded.set(true);
        }
        self.readings.push(Reading {
            scheme,
            prompt,
            end,
            read,
            changes,
            searches,
        });
    }

    /// Reads, for these streams, how the holders of each step differ from those of the previous step. Returns the changes, and the position
    /// after the last block whose holders were read.
    fn read_changes(&self, view: &View, streams: &[u64]) -> (Vec<Change>, usize) {
        let (mut changes, mut before, mut place): (Vec<Change>, &[Word], usize) = Default::default();
        for step in &self.steps {
            let (words, known) = (Self::words(view, &self.together, step.holders), changes.len());
            let (mut old, mut new) = (before.iter().peekable(), words.iter().peekable());
            if step.holders == Holders::Unread || !self.reads.take(1 + before.len() + words.len()) {
                return (changes, place);
            }
            while let Some(at) = old.peek().into_iter().chain(new.peek()).map(|word| word.at).min() {
                let [was, is] =
                    [&mut old, &mut new].map(|words| words.next_if(|word| word.at == at).map_or(0, |word| word.bits));
                let word = Word { at, bits: 0 };
                let meant = streams.get(word.word()).copied().unwrap_or_default();
                for (bits, is_held) in [(is & !was & meant, true), (was & !is & meant, false)] {
                    if bits != 0 {
                        changes.push(Change {
                            place,
                            word: Word { at, bits },
                            of: GroupLevel::of(view, word),
                            is_held,
                        });
                    }
                }
            }
            (before, place) = (words, step.end);
            if !self.reads.take(WORDS_PER_CHANGE * (changes.len() - known)) {
                break;
            }
        }
        (changes, place)
    }

    /// The blocks, among the first `blocks`, that a stream might not hold.
    fn doubts(&self, view: &View, stream: u32, member: &Member, blocks: usize) -> Doubts {
        let mut doubts = Doubts {
            blocks: Vec::new(),
            end: usize::MAX,
        };
        let outdated = if member.loras.is_empty() { 0 } else { blocks };
        if !self.reads.take(self.rows.len() + self.twins.len() + outdated) {
            doubts.end = 0;
            return doubts;
        }
        for place in self.doubtful_places(view, member, blocks) {
            let Some(words) = self.certain_holders(view, stream, place) else {
                continue;
            };
            if doubts.blocks.len() == MAX_UNCERTAIN || self.reads.left.get() == 0 {
                doubts.end = place;
                break;
            }
            let held = words.into_iter().map(|word| GroupLevel::of(view, word)).collect();
            doubts.blocks.push((place, held));
        }
        doubts
    }

    /// Runs the searches on what was read, without the view. Appends the hits of streams with several groups to `hits`. If a stream has
    /// blocks that might be gone or might belong to another prompt, appends a hit with its certain tokens to `certain`.
    pub fn search(&mut self, names: &Names, hits: &mut Vec<Hit>, certain: &mut Vec<Hit>) {
        for reading in &self.readings {
            reading.search(names, &self.shared_looks, hits, certain);
        }
        certain.append(&mut self.lower_bounds);
    }

    /// Removes all other streams from the holders of the last walk.
    #[cold]
    fn drop_others(&mut self, view: &View) {
        let Some(kept) = &self.kept else { return };
        for step in &mut self.steps {
            if let Holders::Set(set) = step.holders {
                self.reads.take(view.words(set).len().min(WORDS_PER_SEEK * kept.words.len()));
                self.together.push(kept.of(view.words(set)));
                step.holders = Holders::Together(self.together.len() - 1);
            }
        }
    }

    /// Makes `read_again` read again.
    #[cfg(test)]
    pub(crate) fn exceed(&self) {
        self.reads.is_exceeded.set(true);
    }

    /// If the holders of all streams were too many, reads again for the sources that can have the fewest words in sets of holders, and
    /// replaces what is known about their streams. `read` walks in the schemes of these sources.
    #[inline(never)]
    pub fn read_again(
        &mut self,
        view: &View,
        streams: &[u64],
        hits: &mut Vec<Hit>,
        read: impl FnOnce(&mut Self, &[Scheme], &[u64], &mut Vec<Hit>),
    ) {
        if !self.reads.is_exceeded.get() || !self.is_sound(view) {
            return;
        }
        let kept = Kept::smallest(view, streams, self.walked, self.most_records);
        let is_other = |hit: &Hit| kept.streams[hit.stream as usize >> 6] >> (hit.stream & 63) & 1 == 0;
        hits.retain(is_other);
        self.lower_bounds.retain(is_other);
        for Reading { searches, .. } in &mut self.readings {
            searches
                .iter_mut()
                .for_each(|search| search.streams &= !kept.streams[search.at]);
            searches.retain(|search| search.streams != 0);
        }
        (self.reads.part, self.reads.left) = (0, Cell::new(READS_AGAIN));
        let (schemes, streams) = (kept.schemes.clone(), kept.streams.clone());
        self.kept = Some(kept);
        read(self, &schemes, &streams, hits);
        self.kept = None;
        merge(hits);
    }

    /// Positions before `blocks` at which a stream has a block that it might not hold.
    fn doubtful_places(&self, view: &View, member: &Member, blocks: usize) -> BTreeSet<usize> {
        let mut places: BTreeSet<usize> = self.twins.iter().copied().filter(|&place| place < blocks).collect();
        for row in self.rows.iter().filter(|row| row.start < blocks) {
            let behind = row.number + (row.end.min(blocks) - row.start) as u32;
            let place = |number: u32| row.start + (number - row.number) as usize;
            // A block can be uncertain on many placements.
            let next = |from: u32| Some(member.uncertain.range((from, 0)..(behind, 0)).next()?.0);
            let uncertain = std::iter::successors(next(row.number), |number| next(number + 1));
            places.extend(uncertain.map(place).take(MAX_UNCERTAIN + 1));
            if let Some(lora) = replaced_lora(view, member, row.number) {
                let outdated = (row.number..behind).filter(|&number| member.loras.is_outdated(lora, number));
                places.extend(outdated.map(place));
            }
        }
        places
    }

    /// Returns the placements on which a stream certainly holds the block at a position. Returns None if the stream certainly holds the
    /// block on each placement on which it has the block.
    fn certain_holders(&self, view: &View, stream: u32, place: usize) -> Option<Vec<Word>> {
        let member = view.members[stream as usize].as_ref()?;
        let (at, bit) = (stream as usize >> 6, 1 << (stream & 63));
        // A block with several records has one row for each of them, and only the last of these rows can contain further blocks.
        let end = self.rows.partition_point(|row| row.start <= place);
        let first = self.rows[..end].last().map_or(place, |row| row.start);
        let rows = self.rows[..end].iter().rev().take_while(|row| row.start == first);
        let (mut certain, mut possible): (Vec<Word>, Vec<(Word, u32)>) = Default::default();
        for number in rows.filter_map(|row| row.record(place)) {
            let Some(chunk) = view.chunk(number) else { continue };
            let lora = replaced_lora(view, member, number);
            let is_outdated = lora.is_some_and(|lora| member.loras.is_outdated(lora, number));
            let words = view.words(chunk.set(number));
            self.reads.take(words.len());
            for word in words {
                if word.word() != at || word.bits & bit == 0 {
                    continue;
                }
                let is_uncertain = is_outdated || member.uncertain.contains(&(number, word.placement() as u16));
                if !is_uncertain {
                    certain.push(Word { at: word.at, bits: bit });
                }
                // If a stream has several blocks without a LoRA under one key, it is not known which of them is the block of the prompt.
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

    /// Appends the hits of streams that have one group, which needs all blocks. Returns the position after the last block whose holders
    /// were read. If a stream holds all blocks before this position, it might hold all later ones.
    fn match_single_groups(&mut self, view: &View, streams: &[u64], size: u32, out: &mut Vec<Hit>) -> usize {
        let (words, levels) = (streams.len(), view.placements.depth());
        let Self {
            steps,
            together,
            reads,
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
        let may_read = |step: &Step| {
            let read = Self::words(view, together, step.holders).len();
            step.holders != Holders::Unread && reads.take(words * levels + read)
        };
        reads.add_part();
        let end = steps[steps.len() - 1].end;
        let mut read = if may_read(&steps[0]) { end } else { 0 };
        if read > 0 {
            fill(alive, steps[0].holders);
        } else {
            alive.fill(u64::MAX);
        }
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
            for_each(alive, |stream| {
                out.push(Hit {
                    stream: stream as u32,
                    tokens,
                });
            });
            return read;
        }
        first.clear();
        first.extend_from_slice(&alive[top..]);
        blocks.resize(blocks.len().max(words << 6), [0; LEVELS]);
        for_each(first, |stream| blocks[stream] = [0; LEVELS]);
        let mut start = steps[0].end;
        for step in &steps[1..] {
            if read == 0 || !may_read(step) {
                (read, start) = (read.min(start), end);
                break;
            }
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
                // The words of one placement are sorted by the numbers of their streams.
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
        read
    }
}

/// Maximum number of words of holder sets that one lookup reads while writers wait; reading them takes about three milliseconds.
const MAX_READS: usize = 3 << 19;
/// Number of these words for the sources that are read again, if the words of all sources are too many.
const READS_AGAIN: usize = MAX_READS / 8 * 5;
/// Number of words that take as long to read as it takes to find one word in a set.
const WORDS_PER_SEEK: usize = 2;
/// Maximum number of changes that all searches for hybrid streams examine together before sources are read again.
const MAX_SCANNED: usize = 1 << 22;
/// Number of words whose reading takes as long as one step.
const WORDS_PER_STEP: usize = 8;
/// Number of words that take as much memory as one `Change`.
const WORDS_PER_CHANGE: usize = 4;
/// Number of words whose reading takes as long as merging one word of several records.
const WORDS_PER_MERGE: usize = 4;

/// The group and the level of a placement.
#[derive(Clone, Copy, Debug)]
struct GroupLevel {
    group: i64,
    level: u8,
}

impl GroupLevel {
    fn of(view: &View, word: Word) -> Self {
        Self {
            group: view.placements.get(word.placement() as u16).group,
            level: view.placements.levels()[word.placement()],
        }
    }
}

/// The streams that begin, or cease, to hold blocks on one placement at a position.
#[derive(Clone, Copy, Debug)]
struct Change {
    place: usize,
    word: Word,
    of: GroupLevel,
    is_held: bool,
}

/// The positions of blocks that a stream might not hold. Each entry also lists the groups and levels on which the stream certainly holds
/// the block. No block at the position `end` or later is certain.
#[derive(Debug)]
struct Doubts {
    blocks: Vec<(usize, Vec<GroupLevel>)>,
    end: usize,
}

/// One search, whose result is used for all streams of a bitmap word that hold the same blocks.
#[derive(Debug)]
struct Search {
    at: usize,
    streams: u64,
    lookup: Option<Arc<GroupLookup>>,
    /// In a search for certain tokens: the blocks that the search must not count on some or all levels. None in other searches.
    doubts: Option<Doubts>,
}

/// The holders of a prompt's blocks in one scheme, as read from the view.
#[derive(Debug)]
struct Reading {
    scheme: Scheme,
    prompt: PromptLength,
    /// Position after the last block.
    end: usize,
    /// Position after the last block whose holders were read.
    read: usize,
    changes: Vec<Change>,
    searches: Vec<Search>,
}

/// Lists the searches for the hybrid streams among 64 `streams`.
fn list_searches(view: &View, at: usize, streams: u64, changes: &[Change], out: &mut Vec<Search>) {
    step_counter::count(changes.len() / WORDS_PER_STEP);
    let is_shared = |bits: u64| bits == 0 || bits == streams;
    let mut changes = changes.iter().map(|change| change.word);
    let are_alike = streams != 0 && changes.all(|word| word.word() != at || is_shared(word.bits & streams));
    let first = out.len();
    for_each(&[streams], |bit| {
        let member = view.members[at << 6 | bit].as_ref();
        let Some(lookup) = member.and_then(|member| member.lookup.as_ref()) else {
            return;
        };
        let known = out.get_mut(first).filter(|_| are_alike);
        match known.filter(|known| known.lookup.as_ref().is_some_and(|known| known.groups == lookup.groups)) {
            Some(known) => known.streams |= 1 << bit,
            None => out.push(Search {
                at,
                streams: 1 << bit,
                lookup: Some(lookup.clone()),
                doubts: None,
            }),
        }
    });
}

impl Reading {
    fn search(&self, names: &Names, shared_looks: &SharedLooks, hits: &mut Vec<Hit>, certain: &mut Vec<Hit>) {
        // Replicas often hold the same blocks, so the result of one search is used for all of them.
        let mut searched: Vec<(Option<&Groups>, GroupSteps, SearchedLevels)> = Vec::new();
        let (mut steps, mut unfinished) = (
            GroupSteps::default(),
            vec![0; self.searches.last().map_or(0, |last| last.at + 1)],
        );
        for search in &self.searches {
            if search.doubts.is_some() && unfinished[search.at] & search.streams != 0 {
                continue;
            }
            let groups = search.lookup.as_ref().map(|lookup| &lookup.groups);
            let first = (search.at << 6) as u32 | search.streams.trailing_zeros();
            let looks = Looks::new(self.end, shared_looks, source_of(names, first));
            step_counter::count(self.changes.len() / WORDS_PER_STEP);
            self.read_groups(search, groups, &mut steps);
            let known = searched
                .iter()
                .find(|(others, known, _)| steps == *known && groups == *others);
            let (tokens, mut is_exact) = match known {
                Some((_, _, found)) => *found,
                None => self.search_groups(groups, &steps, &looks),
            };
            if known.is_none() && searched.len() < MAX_SEARCHED {
                searched.push((groups, std::mem::take(&mut steps), (tokens, is_exact)));
            }
            is_exact &= self.read == self.end;
            for_each(&[search.streams], |bit| {
                let hit = Hit {
                    stream: (search.at << 6 | bit) as u32,
                    tokens,
                };
                match &search.doubts {
                    None if tokens[LEVELS - 1] > 0 => hits.push(hit),
                    None => {}
                    Some(_) if is_exact => certain.push(hit),
                    Some(_) => certain.push(hit.without_certainty()),
                }
                if search.doubts.is_none() && !is_exact {
                    unfinished[search.at] |= 1 << bit;
                    certain.push(hit.without_certainty());
                }
            });
        }
    }

    /// Returns the number of tokens that a stream holds. If the stream is looked up by its engine's hashes, the number is an estimate from
    /// the blocks of groups with full attention.
    fn search_groups(&self, groups: Option<&Groups>, steps: &GroupSteps, looks: &Looks<'_>) -> SearchedLevels {
        let (size, longest) = (self.scheme.size as usize, self.prompt.longest);
        // No group holds a block after the last step.
        let end = self.scheme.blocks(self.prompt.tokens).min(steps.end()) * size;
        if groups.is_some_and(|groups| groups.full_size() != Some(self.scheme.size)) {
            return ([0; LEVELS], true);
        }
        if let Some(groups) = groups.filter(|groups| groups.method() == Method::Records) {
            return by_level(|level| {
                search::find(
                    groups,
                    end,
                    longest,
                    looks,
                    OnLevel {
                        steps,
                        size,
                        level,
                        last: Cell::new(0),
                    },
                )
            });
        }
        let needed: Vec<usize> = match groups {
            Some(groups) => (0..)
                .zip(groups.known())
                .filter(|(_, group)| group.kind.is_full())
                .map(|(at, _)| at)
                .collect(),
            None => vec![0],
        };
        by_level(|level| CachedPrefix {
            tokens: steps.prefix(&needed, level).min(self.scheme.blocks(longest)) * size,
            is_exact: true,
        })
    }

    /// Replaces `found` by the steps of a search's streams: for each step, the lowest level on which each group holds the step's blocks. If
    /// `groups` is None, all placements belong to one group. Blocks whose holders were not read count as held.
    fn read_groups(&self, search: &Search, groups: Option<&Groups>, found: &mut GroupSteps) {
        let numbers: Vec<i64> = groups.map_or(vec![0], |groups| groups.known().map(|group| group.number).collect());
        let group_of = |of: GroupLevel| match groups {
            Some(_) => numbers.binary_search(&of.group).ok(),
            None => Some(0),
        };
        let (doubts, end) = search
            .doubts
            .as_ref()
            .map_or((&[][..], usize::MAX), |doubts| (&doubts.blocks[..], doubts.end));
        let (mut doubts, end) = (doubts.iter().peekable(), end.min(self.end));
        found.begin(numbers.len());
        let mut held = vec![[0_u32; LEVELS]; numbers.len()];
        let stream = search.streams & search.streams.wrapping_neg();
        let mut advance = |place: usize, held: &[[u32; LEVELS]]| {
            while let Some((doubtful, certain)) = doubts.next_if(|(doubtful, _)| *doubtful < place) {
                found.add((*doubtful).min(end), held);
                let mut alone = vec![[0; LEVELS]; numbers.len()];
                let known = certain.iter().filter_map(|&of| Some((group_of(of)?, of.level)));
                known.for_each(|(group, level)| alone[group][usize::from(level)] = 1);
                found.add((doubtful + 1).min(end), &alone);
            }
            found.add(place.min(end), held);
        };
        let meant = |change: &&Change| change.word.word() == search.at && change.word.bits & stream != 0;
        for change in self.changes.iter().take_while(|change| change.place < end).filter(meant) {
            let Some(group) = group_of(change.of) else { continue };
            advance(change.place, &held);
            let count = &mut held[group][usize::from(change.of.level)];
            *count = count.wrapping_add(if change.is_held { 1 } else { u32::MAX });
        }
        advance(self.read, &held);
        advance(self.end, &vec![[1; LEVELS]; numbers.len()]);
    }
}

/// Maximum number of searches of one lookup whose results are kept, so that other streams with the same blocks need no search.
const MAX_SEARCHED: usize = 8;

/// The number of tokens on each level, and whether the searches were completed.
type SearchedLevels = ([u32; LEVELS], bool);

/// Consecutive blocks, and the levels on which each group of one stream holds them.
#[derive(Debug, Default, PartialEq)]
struct GroupSteps {
    groups: usize,
    /// Position after the last block of each step.
    ends: Vec<usize>,
    /// For each step and group, the lowest level on which the group holds the step's blocks; `u8::MAX` if the group does not hold them.
    lowest: Vec<u8>,
}

impl GroupSteps {
    fn begin(&mut self, groups: usize) {
        self.groups = groups;
        self.ends.clear();
        self.lowest.clear();
    }

    /// Adds the blocks before the position `end` as a step. `held` has, for each group and level, the number of placements on which the
    /// group holds these blocks. If the lowest levels equal those of the previous step, both steps are merged.
    fn add(&mut self, end: usize, held: &[[u32; LEVELS]]) {
        if end <= self.end() {
            return;
        }
        let start = self.lowest.len();
        let lowest = |levels: &[u32; LEVELS]| {
            levels
                .iter()
                .position(|&count| count > 0)
                .map_or(u8::MAX, |level| level as u8)
        };
        self.lowest.extend(held.iter().map(lowest));
        match self.ends.last_mut() {
            Some(before) if self.lowest[start - self.groups..start] == self.lowest[start..] => {
                *before = end;
                self.lowest.truncate(start);
            }
            _ => self.ends.push(end),
        }
    }

    /// Position after the last block.
    fn end(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Number of leading blocks that each of these groups holds on the level `level` or an earlier level.
    fn prefix(&self, groups: &[usize], level: usize) -> usize {
        let is_held = |lowest: &[u8]| groups.iter().all(|&group| usize::from(lowest[group]) <= level);
        let steps = self.ends.iter().zip(self.lowest.chunks(self.groups.max(1)));
        steps
            .take_while(|(_, lowest)| is_held(lowest))
            .last()
            .map_or(0, |(&end, _)| end)
    }
}

/// The blocks that one stream holds on one level and all earlier levels.
struct OnLevel<'a> {
    steps: &'a GroupSteps,
    /// Number of tokens of a block.
    size: usize,
    level: usize,
    /// The latest step that was found: searches usually continue with the same or the next step.
    last: Cell<usize>,
}

impl OnLevel<'_> {
    /// Returns the step that contains the block at a position.
    fn step(&self, place: usize) -> usize {
        let (ends, last) = (&self.steps.ends, self.last.get());
        let is_in = |at: &usize| ends.get(*at).is_some_and(|&end| place < end) && (*at == 0 || ends[at - 1] <= place);
        let near = [last, last + 1, last.wrapping_sub(1)].into_iter().find(is_in);
        let found = near.unwrap_or_else(|| ends.partition_point(|&end| end <= place));
        self.last.set(found);
        found
    }
}

impl Blocks for OnLevel<'_> {
    fn is_held(&self, group: usize, position: usize) -> bool {
        let place = (position / self.size).wrapping_sub(1);
        let lowest = self.steps.lowest.get(self.step(place) * self.steps.groups + group);
        position.is_multiple_of(self.size) && lowest.is_some_and(|&lowest| usize::from(lowest) <= self.level)
    }

    fn alike(&self, position: usize) -> (usize, usize) {
        let place = (position / self.size).wrapping_sub(1);
        let step = self.step(place);
        match self.steps.ends.get(step) {
            Some(end) if position.is_multiple_of(self.size) => {
                let start = step.checked_sub(1).map_or(0, |before| self.steps.ends[before]);
                ((start + 1) * self.size, end * self.size)
            }
            _ => (position, position),
        }
    }
}

/// Returns the LoRA of a block; None if the LoRA was not replaced in the stream.
fn replaced_lora(view: &View, member: &Member, number: u32) -> Option<u64> {
    if member.loras.is_empty() {
        return None;
    }
    let context = view.contexts.get(view.chunk(number)?.context(number))?;
    (!context.is_keyed() && member.loras.contains(context.lora)).then_some(context.lora)
}

/// Limits the tokens of each hit from the index `first` on to `most`.
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

/// Visits the positions of all set bits.
pub fn for_each(words: &[u64], mut visit: impl FnMut(usize)) {
    for (at, &word) in words.iter().enumerate() {
        let mut bits = word;
        while bits != 0 {
            visit((at << 6) + bits.trailing_zeros() as usize);
            bits &= bits - 1;
        }
    }
}

/// Merges the hits that one stream has in several schemes.
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
