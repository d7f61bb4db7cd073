//! Writes a snapshot while other threads read and write the index.
//!
//! A stream is locked while it is written, so that the blocks in the file match the sequence number of the stream's last batch. Other
//! streams continue to receive batches. The shared state is locked for a few thousand blocks at a time, and is never locked while bytes are
//! written to the output.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::iter::Peekable;
use std::sync::Arc;

use crate::groups::GroupKind;
use crate::groups::engine_hash::EngineHash;
use crate::holders::copies::Copies;
use crate::holders::placements::Placement;
use crate::prefix_index::PrefixIndex;
use crate::rules::pending::Waiting;
use crate::step_counter;
use crate::store::members::Worker;
use crate::store::shared_state::SharedState;
use crate::stream::{StatedRanks, Stream};

use super::frames::FrameWriter;
use super::{
    CHAIN, CONTEXT, CONTINUATION, DONE, FENCE, KEYS, LABEL, MAX_CONTEXTS, NO_RANK, ONE_RANK, ORDER, PLACEMENT, RUN,
    SEVERAL_RANKS, STATE_GROUP, STREAM, UNKNOWN_GROUP, WAITING, WINDOW_GROUP,
};

/// Number of bytes (about 4,000 blocks) that are added to the buffer before the lock of the shared state is released.
const HOLD_BYTES: usize = 1 << 16;
/// Minimum number of records in a window. A stream is written in windows if it has more foreign hashes than this number; a foreign hash
/// differs from the hash in the block's record. Only the foreign hashes of one window are sorted at a time, so that the sorted list stays
/// short.
const MIN_WINDOW: usize = 1 << 16;
/// Number of elements of a list that are written before complete frames are sent to the output.
const ELEMENTS_PER_CHECK: usize = 1 << 14;

/// Writes the whole index except the overlay and the counters. If `workers` is not None, writes only the streams of these workers, with the
/// other ranks that these streams carry.
pub fn save<W: Write>(index: &PrefixIndex, out: W, workers: Option<&HashSet<Worker>>) -> io::Result<W> {
    let is_carried_by_one = |worker: &Worker, workers: &HashSet<Worker>| {
        let carrier = |rank| Worker { rank, ..worker.clone() };
        index.carrier(worker).is_some_and(|rank| workers.contains(&carrier(rank)))
    };
    let is_meant =
        |worker: &Worker| workers.is_none_or(|workers| workers.contains(worker) || is_carried_by_one(worker, workers));
    let sources: Option<HashSet<&str>> = workers.map(|workers| workers.iter().map(|worker| worker.source.as_str()).collect());
    let out = FrameWriter::new(out)?;
    let mut saving = SnapshotWriter {
        index,
        out,
        written: Vec::new(),
        placements: HashMap::new(),
        contexts: HashMap::new(),
        run: Run::default(),
        last: None,
        records: Vec::new(),
    };
    for (worker, stream) in index.streams().into_iter().filter(|(worker, _)| is_meant(worker)) {
        let carrier = index.carrier(&worker);
        let locked = stream.lock();
        if locked.is_removed {
            continue;
        }
        if index
            .stream(&worker.source, worker.rank)
            .is_none_or(|now| !Arc::ptr_eq(&now, &stream))
        {
            return Err(io::Error::other(
                "a stream began to state several ranks while the snapshot was written; write it again",
            ));
        }
        saving.stream(&worker, carrier, &locked)?;
    }
    // The fences are written after the streams. So if a worker is removed after its stream was written, the file has its fence.
    for (worker, incarnation) in index.fences().into_iter().filter(|(worker, _)| is_meant(worker)) {
        saving.out.byte(FENCE);
        saving.worker(&worker);
        saving.out.signed(incarnation);
        saving.out.drain()?;
    }
    for (source, model) in index.labels() {
        if sources.as_ref().is_some_and(|sources| !sources.contains(source.as_str())) {
            continue;
        }
        saving.out.byte(LABEL);
        saving.out.text(&source);
        saving.out.text(&model);
        saving.out.drain()?;
    }
    saving.out.finish()
}

struct SnapshotWriter<'a, W> {
    index: &'a PrefixIndex,
    out: FrameWriter<W>,
    /// The placements that were written, in the order of their IDs in the file.
    written: Vec<Placement>,
    /// Maps the ID in the index of each placement of the present stream to its ID in the file.
    placements: HashMap<u16, u64>,
    /// Maps the ID in the index of each context of the present stream to its ID in the file.
    contexts: HashMap<u32, u64>,
    run: Run,
    /// The last block that was written of the stream.
    last: Option<u32>,
    /// A bitmap of the records of the stream.
    records: Vec<u64>,
}

/// Consecutive blocks that differ only in their hash and word.
#[derive(Default)]
struct Run {
    /// Position in the buffer of the number of blocks and the kind, which are filled in at the end of the run.
    at: usize,
    blocks: u16,
    /// None until the blocks determine the kind.
    kind: Option<u8>,
    context: u32,
    set: u32,
    /// Whether the blocks might have been computed with former weights of a LoRA.
    is_outdated: bool,
    /// The placements of each block, with the number of copies on each.
    placements: Vec<(u16, Copies)>,
    other: Vec<(u16, Copies)>,
}

impl<W: Write> SnapshotWriter<'_, W> {
    fn worker(&mut self, worker: &Worker) {
        self.out.text(&worker.source);
        self.out.signed(worker.rank);
    }

    fn stream(&mut self, worker: &Worker, carrier: Option<i64>, stream: &Stream) -> io::Result<()> {
        self.new_placements(stream);
        self.contexts.clear();
        self.last = None;
        self.out.byte(STREAM);
        self.worker(worker);
        self.out.signed(stream.incarnation);
        self.out.option(carrier, FrameWriter::signed);
        match stream.stated_ranks {
            StatedRanks::None => self.out.byte(NO_RANK),
            StatedRanks::One(rank) => {
                self.out.byte(ONE_RANK);
                self.out.signed(rank);
            }
            StatedRanks::Several => self.out.byte(SEVERAL_RANKS),
        }
        self.out.signed(stream.last);
        self.out.byte(stream.has_attested().into());
        self.out.count(stream.unkept().len() as u64);
        for &(group, sum) in stream.unkept() {
            self.out.signed(group);
            self.out.fixed(sum);
        }
        self.out.count(stream.evidence.to_bits());
        self.out.count(stream.evidence.set_aside);
        let mut loras = stream.replaced_loras(&self.index.shared_lock.read());
        loras.sort_unstable();
        self.out.count(loras.len() as u64);
        loras.into_iter().for_each(|lora| self.out.fixed(lora));
        self.groups(stream);
        self.blocks(stream)?;
        self.several(stream)?;
        for waiting in stream.waiting.iter() {
            self.waiting(waiting)?;
        }
        self.out.byte(DONE);
        self.out.count(stream.blocks as u64);
        self.out.fixed(stream.tally.digest as u64);
        self.out.fixed((stream.tally.digest >> 64) as u64);
        self.out.drain()
    }

    /// Writes the groups of a stream's engine, and the scheme by which the engine hashes prompts.
    fn groups(&mut self, stream: &Stream) {
        let (groups, cache) = (&stream.groups, stream.group_cache.as_ref().map(|cache| cache.read()));
        self.out.byte(stream.misses_salts.into());
        self.out.count(groups.all().len() as u64);
        for group in groups.all() {
            self.out.signed(group.number);
            match group.kind {
                GroupKind::Full(number) => self.out.byte(number),
                GroupKind::Unknown => self.out.byte(UNKNOWN_GROUP),
                GroupKind::State => self.out.byte(STATE_GROUP),
                GroupKind::Window(tokens) => {
                    self.out.byte(WINDOW_GROUP);
                    self.out.count(tokens.into());
                }
            }
            self.out.count(group.size.into());
        }
        self.out.option(groups.hashing.as_ref().map(EngineHash::parts), |out, parts| {
            parts.into_iter().for_each(|part| out.count(part));
        });
        let flags = u8::from(groups.has_lookahead) | u8::from(groups.has_unknown_inputs) << 1;
        self.out.byte(flags | groups.copied_levels << 2);
        let salts: Vec<_> = cache.iter().flat_map(|cache| cache.salts()).collect();
        self.out.count(salts.len() as u64);
        for (part, salt) in salts {
            self.out.fixed(part);
            self.out.text(salt);
        }
    }

    /// Writes the placements of a stream that are not in the file yet.
    fn new_placements(&mut self, stream: &Stream) {
        self.placements.clear();
        let shared = self.index.shared_lock.read();
        for (number, _) in stream.held() {
            let placement = shared.view.placements.get(number);
            step_counter::count(1 + self.written.len());
            let known = self.written.iter().position(|known| known == placement);
            let at = known.unwrap_or_else(|| {
                let Placement {
                    tier,
                    locality,
                    ownership,
                    group,
                } = placement;
                self.out.byte(PLACEMENT);
                self.out.text(tier);
                self.out.option(locality.as_deref(), FrameWriter::text);
                self.out.option(ownership.as_deref(), FrameWriter::text);
                self.out.signed(*group);
                self.written.push(placement.clone());
                self.written.len() - 1
            });
            self.placements.insert(number, at as u64);
        }
    }

    // --- writing blocks

    fn blocks(&mut self, stream: &Stream) -> io::Result<()> {
        let bound = self.index.shared_lock.read().records.bound() as usize;
        let mut records = std::mem::take(&mut self.records);
        records.clear();
        records.resize(bound.div_ceil(64), 0);
        step_counter::count(records.len());
        for number in stream.numbers() {
            records[number as usize >> 6] |= 1 << (number & 63);
        }
        let window = if stream.foreign().len() <= MIN_WINDOW {
            bound
        } else {
            MIN_WINDOW.max(bound / 32).next_multiple_of(64)
        };
        let mut foreign = Vec::new();
        for start in (0..bound).step_by(window.max(1)) {
            let end = bound.min(start + window);
            foreign.clear();
            step_counter::count(stream.foreign().len());
            foreign.extend(
                stream
                    .foreign()
                    .filter(|(number, _)| (start..end).contains(&(*number as usize))),
            );
            foreign.sort_unstable();
            let numbers = ones(&records[start >> 6..end >> 6], start);
            self.window(stream, numbers, foreign.iter().copied().peekable())?;
        }
        self.records = records;
        Ok(())
    }

    fn window(
        &mut self,
        stream: &Stream,
        mut numbers: impl Iterator<Item = u32>,
        mut foreign: Peekable<impl Iterator<Item = (u32, u64)>>,
    ) -> io::Result<()> {
        loop {
            let shared = self.index.shared_lock.read();
            step_counter::begin_hold();
            let enough = self.out.buffer.len() + HOLD_BYTES;
            let mut ended = false;
            while self.out.buffer.len() < enough {
                let Some(number) = numbers.next() else {
                    ended = true;
                    break;
                };
                let own = foreign.next_if(|(other, _)| *other == number).map(|(_, hash)| hash);
                self.block(&shared, stream, number, own);
            }
            // The IDs of sets can change while the lock is released, so the run ends here.
            self.end_run();
            step_counter::end_hold();
            drop(shared);
            self.out.drain()?;
            if ended {
                return Ok(());
            }
        }
    }

    #[inline]
    fn block(&mut self, shared: &SharedState, stream: &Stream, number: u32, own: Option<u64>) {
        let records = &shared.records;
        let (context, set) = (records.context(number), records.set(number));
        let is_linked = records.is_linked(number) && self.last.is_some_and(|last| last + 1 == number);
        let fits = match self.run.kind {
            Some(KEYS) => !is_linked,
            Some(_) => is_linked,
            None => true,
        };
        let is_outdated = stream.is_outdated(shared, number);
        let is_alike = self.run.context == context && self.run.is_outdated == is_outdated;
        let continues = fits && self.run.blocks > 0 && self.run.blocks < u16::MAX && is_alike;
        step_counter::count(1);
        if !(continues && self.run.set == set && stream.is_single()) {
            step_counter::count(shared.sets.words(set).len());
            let held = shared
                .sets
                .placements(set, stream.number)
                .map(|placement| (placement, stream.count(number, placement)));
            self.run.other.clear();
            self.run.other.extend(held);
            if !(continues && self.run.other == self.run.placements) {
                self.begin_run(shared, context, is_outdated);
            }
            self.run.set = set;
        }
        match (self.run.blocks, is_linked) {
            (0, true) => self.run.kind = Some(CONTINUATION),
            (0, false) => {}
            (_, true) => _ = self.run.kind.get_or_insert(CHAIN),
            (_, false) => _ = self.run.kind.get_or_insert(KEYS),
        }
        self.run.blocks += 1;
        self.last = Some(number);
        self.out.fixed(own.unwrap_or(records.hash(number)));
        self.out.fixed(if is_linked {
            records.word(number)
        } else {
            records.key(number)
        });
    }

    fn begin_run(&mut self, shared: &SharedState, context: u32, is_outdated: bool) {
        self.end_run();
        let number = self.context(shared, context);
        let run = &mut self.run;
        std::mem::swap(&mut run.placements, &mut run.other);
        self.out.byte(RUN);
        (run.context, run.is_outdated, run.at) = (context, is_outdated, self.out.buffer.len());
        self.out.buffer.extend_from_slice(&[0, 0, KEYS]);
        self.out.count(number);
        self.out.byte(is_outdated.into());
        self.out.count(run.placements.len() as u64);
        for &(placement, copies) in &run.placements {
            self.out.count(self.placements[&placement]);
            self.out.count(copies.least.into());
            self.out.count(copies.most.into());
        }
    }

    fn end_run(&mut self) {
        if self.run.blocks > 0 {
            let [low, high] = self.run.blocks.to_le_bytes();
            let kind = self.run.kind.unwrap_or(KEYS);
            self.out.buffer[self.run.at..][..3].copy_from_slice(&[low, high, kind]);
        }
        (self.run.blocks, self.run.kind) = (0, None);
    }

    /// Returns the ID of a context in the file. If the context is not in the file yet, writes the context first.
    fn context(&mut self, shared: &SharedState, context: u32) -> u64 {
        if let Some(&number) = self.contexts.get(&context) {
            return number;
        }
        if self.contexts.len() == MAX_CONTEXTS {
            self.contexts.clear();
        }
        let number = self.contexts.len() as u64;
        self.contexts.insert(context, number);
        let found = shared.contexts.get(context);
        self.out.byte(CONTEXT);
        self.out.count(found.scheme.size.into());
        self.out.byte(found.scheme.eagle.into());
        self.out.fixed(found.lora);
        self.out.fixed(found.salt);
        number
    }

    // --- writing data of a stream besides its blocks

    fn several(&mut self, stream: &Stream) -> io::Result<()> {
        for (hash, numbers) in stream.ordered() {
            for piece in numbers.chunks(HOLD_BYTES / 16) {
                let shared = self.index.shared_lock.read();
                step_counter::begin_hold();
                step_counter::count(piece.len());
                for &number in piece {
                    let context = self.context(&shared, shared.records.context(number));
                    self.out.byte(ORDER);
                    self.out.fixed(hash);
                    self.out.fixed(shared.records.key(number));
                    self.out.count(context);
                }
                step_counter::end_hold();
                drop(shared);
                self.out.drain()?;
            }
        }
        Ok(())
    }

    fn waiting(&mut self, waiting: &Waiting) -> io::Result<()> {
        step_counter::count(1 + waiting.content.as_ref().map_or(0, |content| content.tokens.len() / 64));
        self.out.byte(WAITING);
        self.out.fixed(waiting.hash);
        self.out.count(self.placements[&waiting.placement]);
        self.out.fixed(waiting.awaited);
        self.out.byte(waiting.content.is_some().into());
        let Some(content) = &waiting.content else {
            return self.out.drain();
        };
        self.out.count(content.scheme.size.into());
        self.out.byte(content.scheme.eagle.into());
        self.out.fixed(content.lora);
        self.out.option(content.salt, FrameWriter::fixed);
        for piece in content.tokens.chunks(ELEMENTS_PER_CHECK) {
            piece
                .iter()
                .for_each(|token| self.out.buffer.extend_from_slice(&token.to_le_bytes()));
            self.out.drain()?;
        }
        self.out.count(content.extras.len() as u64);
        for piece in content.extras.chunks(ELEMENTS_PER_CHECK) {
            piece.iter().for_each(|&extra| self.out.fixed(extra));
            self.out.drain()?;
        }
        self.out.drain()
    }
}

/// The positions of all set bits, counted from `start`.
fn ones(words: &[u64], start: usize) -> impl Iterator<Item = u32> + '_ {
    words.iter().enumerate().flat_map(move |(at, &word)| {
        let mut bits = word;
        std::iter::from_fn(move || {
            let bit = (bits != 0).then(|| bits.trailing_zeros())?;
            bits &= bits - 1;
            Some((start + (at << 6)) as u32 + bit)
        })
    })
}
