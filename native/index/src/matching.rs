//! How long a prefix each worker holds.
//!
//! Records along a chain are read until one is missing; runs of records with the same holders are one step. Streams with one group are
//! then matched 64 at a time, by bitmaps; those with several one by one, by the rules of their groups.

use std::sync::Arc;

use crate::contexts::Context;
use crate::core::{Core, Worker};
use crate::keys::Scheme;
use crate::planes::{LEVELS, Rule};
use crate::sets::Word;
use crate::table::Stage;

/// Blocks of a prompt that are looked at before the others are hashed: many prompts are unknown from the start.
pub const FIRST_LOOK: usize = 64;
/// How many keys ahead of a search in the table memory is asked for.
const AHEAD: usize = 12;

/// One worker's answer.
#[derive(Clone, Debug)]
pub struct Hit {
    /// Who.
    pub worker: Arc<Worker>,
    /// Tokens held by level, each with the levels before it.
    pub tokens: [u64; LEVELS],
}

/// Blocks that a stream holds of a prompt, by level.
#[derive(Clone, Copy, Debug)]
pub struct Depth {
    stream: u32,
    tokens: [u64; LEVELS],
}

/// Holders of one block after another: either a number in `Sets`, or several of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holders {
    Set(u32),
    Together(usize),
}

/// Room to work in, kept from one match to the next.
#[derive(Debug, Default)]
pub struct Walk {
    runs: Vec<(usize, Holders)>,
    together: Vec<Vec<Word>>,
    alive: Vec<u64>,
    now: Vec<u64>,
    blocks: Vec<[u32; LEVELS]>,
    first: Vec<u64>,
}

impl Walk {
    /// Reads the records of a chain in one context, and those that were told by their keys. Returns how many there are before the first
    /// that is missing.
    pub fn find(&mut self, core: &Core, keys: &[u64], context: &Context) -> usize {
        match (core.contexts.find(context), core.contexts.keyed(context.scheme)) {
            (Some(number), None) | (None, Some(number)) => self.read(core, keys, |other| other == number),
            (Some(number), Some(keyed)) => self.read(core, keys, |other| other == number || other == keyed),
            (None, None) => self.read(core, &[], |_| false),
        }
    }

    /// Reads the records of a chain in the contexts that `meant` says. Returns how many there are before the first that is missing.
    pub fn read(&mut self, core: &Core, keys: &[u64], meant: impl Fn(u32) -> bool) -> usize {
        self.runs.clear();
        self.together.clear();
        let (mut guess, mut asked) = (u32::MAX, 0);
        for (at, &key) in keys.iter().enumerate() {
            let (number, holders) = match core.records.find(guess) {
                Some(record) if record.key == key && !record.has_twins() && meant(record.context()) => {
                    (guess, Holders::Set(record.set))
                }
                _ => {
                    let end = keys.len().min(at + AHEAD);
                    for &next in &keys[asked.max(at + 1).min(end)..end] {
                        core.keys.prefetch(core.spot(next), Stage::Bucket);
                    }
                    asked = end;
                    let Some(found) = self.search(core, key, &meant) else {
                        return at;
                    };
                    found
                }
            };
            guess = number.wrapping_add(1);
            match self.runs.last_mut() {
                Some((end, same)) if *same == holders => *end = at + 1,
                _ => self.runs.push((at + 1, holders)),
            }
        }
        keys.len()
    }

    // Out of the way of the loop that calls it, which is faster so.
    #[cold]
    #[inline(never)]
    fn search(&mut self, core: &Core, key: u64, meant: &impl Fn(u32) -> bool) -> Option<(u32, Holders)> {
        let number = core.keys.find(core.spot(key), |number| {
            let record = core.records.get(number);
            record.key == key && meant(record.context())
        })?;
        let record = core.records.get(number);
        if !record.has_twins() {
            return Some((number, Holders::Set(record.set)));
        }
        let mut words: Vec<Word> = Vec::new();
        for twin in core.twins(key, meant) {
            for word in core.sets.words(core.records.get(twin).set) {
                match words.iter_mut().find(|known| known.at == word.at) {
                    Some(known) => known.bits |= word.bits,
                    None => words.push(*word),
                }
            }
        }
        self.together.push(words);
        Some((number, Holders::Together(self.together.len() - 1)))
    }

    fn words<'a>(&'a self, core: &'a Core, holders: Holders) -> &'a [Word] {
        match holders {
            Holders::Set(set) => core.sets.words(set),
            Holders::Together(at) => &self.together[at],
        }
    }

    /// Depths of all streams behind one wall, from what `read` found.
    pub fn depths(&mut self, core: &Core, scheme: Scheme, model: &Option<String>, out: &mut Vec<Depth>) {
        let (Some(wall), false) = (core.walls.get(model), self.runs.is_empty()) else {
            return;
        };
        let levels = core.levels.iter().max().map_or(1, |&level| usize::from(level) + 1);
        self.simple(core, wall, levels, u64::from(scheme.size), out);
        let size = u64::from(scheme.size);
        for (at, (hybrid, wall)) in core.hybrid.iter().zip(wall).enumerate() {
            let mut bits = hybrid & wall & core.visible[at];
            while bits != 0 {
                let stream = (at << 6) as u32 + bits.trailing_zeros();
                bits &= bits - 1;
                let blocks: [u64; LEVELS] = std::array::from_fn(|level| self.hybrid(core, stream, level));
                if blocks[LEVELS - 1] > 0 {
                    out.push(Depth {
                        stream,
                        tokens: blocks.map(|count| count * size),
                    });
                }
            }
        }
    }

    /// Streams whose blocks are all of one kind.
    fn simple(&mut self, core: &Core, wall: &[u64], levels: usize, size: u64, out: &mut Vec<Depth>) {
        let words = wall.len().min(core.visible.len());
        let mut walk = std::mem::take(self);
        walk.blocks.resize(walk.blocks.len().max(words << 6), [0; LEVELS]);
        walk.alive.clear();
        walk.alive.resize(words * levels, u64::MAX);
        let mut start = 0;
        for run in 0..walk.runs.len() {
            let (end, holders) = walk.runs[run];
            let mut now = std::mem::take(&mut walk.now);
            now.clear();
            now.resize(words * levels, 0);
            for word in walk.words(core, holders) {
                if word.word() < words {
                    for level in usize::from(core.levels[word.plane()])..levels {
                        now[level * words + word.word()] |= word.bits;
                    }
                }
            }
            if start == 0 {
                for (at, bits) in now.iter_mut().enumerate() {
                    let word = at % words;
                    *bits &= wall[word] & core.visible[word] & !core.hybrid[word];
                }
                walk.first.clear();
                walk.first.extend_from_slice(&now[(levels - 1) * words..]);
                for_each(&walk.first, |stream| walk.blocks[stream] = [0; LEVELS]);
                walk.alive.copy_from_slice(&now);
            } else {
                let mut any = 0;
                for (at, bits) in now.iter().enumerate() {
                    let mut dropped = walk.alive[at] & !bits;
                    walk.alive[at] &= bits;
                    any |= walk.alive[at];
                    while dropped != 0 {
                        let stream = ((at % words) << 6) + dropped.trailing_zeros() as usize;
                        dropped &= dropped - 1;
                        walk.blocks[stream][at / words] = start as u32;
                    }
                }
                if any == 0 {
                    walk.now = now;
                    break;
                }
            }
            walk.now = now;
            start = end;
        }
        for (at, &bits) in walk.alive.iter().enumerate() {
            let (level, word) = (at / words, at % words);
            for_each(&[bits], |bit| walk.blocks[(word << 6) + bit][level] = start as u32);
        }
        for_each(&walk.first, |stream| {
            let held = walk.blocks[stream];
            let tokens = std::array::from_fn(|level| u64::from(held[level.min(levels - 1)]) * size);
            out.push(Depth {
                stream: stream as u32,
                tokens,
            });
        });
        *self = walk;
    }

    /// Blocks of a stream with several groups.
    fn hybrid(&self, core: &Core, stream: u32, level: usize) -> u64 {
        let Some(rules) = core.members[stream as usize]
            .as_ref()
            .and_then(|member| member.hybrid.as_ref())
        else {
            return 0;
        };
        let mut held = vec![0; rules.len()];
        let (mut start, mut best) = (0, 0);
        for &(end, holders) in &self.runs {
            for ((group, rule), run) in rules.iter().zip(&mut held) {
                let here = self.words(core, holders).iter().any(|word| {
                    word.word() == stream as usize >> 6
                        && word.bits >> (stream & 63) & 1 == 1
                        && usize::from(core.levels[word.plane()]) <= level
                        && core.planes[word.plane()].group == *group
                });
                *run = if here { *run + end - start } else { 0 };
                if *rule == Rule::Dense && !here {
                    return best as u64;
                }
            }
            // Where a window is too short at the end of a run, it is so everywhere in the run.
            let enough = |((_, rule), run): (&(i64, Rule), &usize)| match rule {
                Rule::Window(need) => *run >= end.min(*need as usize),
                _ => true,
            };
            if rules.iter().zip(&held).all(enough) {
                best = end;
            }
            start = end;
        }
        best as u64
    }
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

/// Turns depths, perhaps of several schemes, into the answer, in the order of the streams' numbers.
pub fn hits(core: &Core, depths: &mut Vec<Depth>, several: bool) -> Vec<Hit> {
    if several {
        depths.sort_by_key(|depth| depth.stream);
        depths.dedup_by(|next, kept| {
            let same = next.stream == kept.stream;
            if same {
                for (kept, next) in kept.tokens.iter_mut().zip(next.tokens) {
                    *kept = next.max(*kept);
                }
            }
            same
        });
    }
    let hit = |depth: &Depth| {
        let worker = core.members[depth.stream as usize].as_ref()?.worker.clone();
        Some(Hit {
            worker,
            tokens: depth.tokens,
        })
    };
    depths.iter().filter_map(hit).collect()
}
