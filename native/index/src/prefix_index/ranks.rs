//! Delivered streams whose payloads state several ranks, as the stream of a relay does. The index has a separate stream for each rank. The
//! delivered stream is called the carrier of these ranks. Until the carrier's payloads state a second rank, all blocks are listed under the
//! rank of the carrier. After that, each block is listed under its own rank.
//!
//! A batch that states a rank concerns only this rank; a batch without a rank concerns all ranks.

use std::sync::Arc;

use parking_lot::Mutex;

use super::PrefixIndex;
use super::deliveries::{Buffers, Outcome};
use super::registry::{Rank, Registry, register};
use crate::store::members::Worker;
use crate::stream::{Estimate, StatedRanks, Stream};
use crate::wire::scan::{Event, Kind};

/// The rank numbers that a stream can carry: those that a service can register.
const RANK_RANGE: std::ops::Range<i64> = 0..1 << 32;

/// The reasons for which the blocks of a batch are refused.
const TOO_MANY: &str = "too-many-ranks";
const ANOTHER_STREAM: &str = "rank-of-another-stream";
const NO_RANK: &str = "no-rank";

impl Registry {
    /// The ranks whose batches arrive in a stream, including the stream's own rank.
    fn ranks_of(&self, source: &str, stream: i64) -> impl Iterator<Item = &Rank> {
        let ranks = self.streams.get(source).map_or(&[][..], Vec::as_slice);
        ranks.iter().filter(move |rank| rank.arrives_in(stream))
    }
}

impl PrefixIndex {
    /// The other ranks whose batches arrive in the stream of a worker.
    pub(super) fn carried_ranks(&self, worker: &Worker) -> Vec<i64> {
        let registry = self.registry.read();
        let ranks = registry.ranks_of(&worker.source, worker.rank).map(|rank| rank.rank);
        ranks.filter(|&rank| rank != worker.rank).collect()
    }

    /// The rank of the stream in which the batches of a worker arrive; None if the batches arrive in the worker's own stream.
    pub(crate) fn carrier(&self, worker: &Worker) -> Option<i64> {
        self.registry.read().find_rank(&worker.source, worker.rank)?.carrier
    }

    /// A stream, and the streams of the other ranks that it carries.
    pub(super) fn streams_of(&self, source: &str, rank: i64) -> Vec<(i64, Arc<Mutex<Stream>>)> {
        let registry = self.registry.read();
        let ranks = registry.ranks_of(source, rank);
        ranks.map(|rank| (rank.rank, rank.stream.clone())).collect()
    }

    /// The digest of a stream, including all ranks that it carries; None if the index does not know the stream.
    pub fn digest(&self, source: &str, rank: i64) -> Option<u128> {
        let streams = self.streams_of(source, rank);
        let sum = |sum: u128, (_, stream): &(i64, Arc<Mutex<Stream>>)| sum.wrapping_add(stream.lock().tally.digest);
        (!streams.is_empty()).then(|| streams.iter().fold(0, sum))
    }

    /// Compares a stream with the digest and the attestation of a heartbeat. Returns the values of `BatchReport::agrees` and
    /// `BatchReport::attested`. Each is None if the stream is unknown or the heartbeat lacks the value to compare. A digest covers all
    /// ranks. An attestation covers only the rank `stated`, which its batch states.
    pub fn compare(
        &self,
        source: &str,
        rank: i64,
        stated: Option<i64>,
        digest: Option<&str>,
        attestation: Option<u64>,
    ) -> (Option<bool>, Option<bool>) {
        let is_limited = self.limits.memory.is_some();
        let streams = self.streams_of(source, rank);
        let agrees = digest.zip(self.digest(source, rank)).and_then(|(digest, own)| {
            let mut locked = streams.iter().map(|(_, stream)| stream.lock());
            if format!("{own:032x}") == digest {
                locked.for_each(|mut stream| stream.note_complete());
                return Some(true);
            }
            let is_explained = is_limited && locked.any(|stream| stream.lacks_refused_blocks());
            (!is_explained).then_some(false)
        });
        let attested = match &streams[..] {
            [(_, stream)] => Some(stream),
            several => several
                .iter()
                .find(|(rank, _)| Some(*rank) == stated)
                .map(|(_, stream)| stream),
        };
        let attest = |(attestation, stream): (u64, &Arc<Mutex<Stream>>)| {
            stream.lock().attest(&mut self.shared_lock.write(), attestation, is_limited)
        };
        (agrees, attestation.zip(attested).and_then(attest))
    }

    /// Removes the other ranks that a stream carries, since their incarnation has ended.
    pub(super) fn end_carried(&self, source: &str, rank: i64) {
        self.remove_ranks(source, |other| other.carrier == Some(rank));
    }

    /// Applies a scanned batch of a stream that carries several ranks, or begins to carry them with this batch. Returns the outcome, and
    /// the new estimate if it has changed.
    #[cold]
    pub(super) fn apply_by_rank(
        &self,
        buffers: &mut Buffers,
        (source, rank): (&str, i64),
        (incarnation, seq): (i64, i64),
        bytes: &[u8],
        loses_events: bool,
    ) -> (Outcome, Option<Option<Estimate>>) {
        if let Err(outcome) = self.separate(source, rank) {
            return (outcome, None);
        }
        let Some(own) = self.stream(source, rank) else {
            return (Outcome::Void, None);
        };
        let (stated, has_blocks) = (buffers.scratch.stated_rank(), !buffers.scratch.hashes.is_empty());
        let mut has_new_estimate = false;
        let mut apply_to = |rank: i64, stream: &Arc<Mutex<Stream>>, is_meant: fn(&Event) -> bool| {
            let mut stream = stream.lock();
            if stream.is_removed {
                return Outcome::Void;
            }
            let outcome = self.apply_to(&mut stream, (source, rank), incarnation, |stream, writer| {
                let outcome = buffers.apply(bytes, stream, writer, seq, is_meant);
                stream.evidence.is_whole &= !(loses_events && matches!(outcome, Outcome::Applied(_)));
                outcome
            });
            has_new_estimate |= stream.take_new_estimate().is_some();
            outcome
        };
        let outcome = match stated {
            Some(stated) => match self.stream_of_rank(source, rank, stated, (incarnation, seq)) {
                // A clear of everything clears only this rank, so the outcome is not a clear of the whole stream.
                Ok(stream) => match apply_to(stated, &stream, |_| true) {
                    Outcome::Applied(_) => Outcome::Applied(false),
                    other => other,
                },
                Err(reason) => {
                    own.lock().set_aside(reason);
                    Outcome::Applied(false)
                }
            },
            None => {
                let is_clear = |event: &Event| event.kind == Kind::Cleared;
                let streams = self.streams_of(source, rank);
                let outcomes: Vec<_> = streams
                    .iter()
                    .map(|(rank, stream)| apply_to(*rank, stream, is_clear))
                    .collect();
                if has_blocks {
                    // The blocks can belong to any rank, so answers about a rank are estimates until this rank is cleared.
                    for (_, stream) in &streams {
                        let mut stream = stream.lock();
                        stream.set_aside(NO_RANK);
                        has_new_estimate |= stream.take_new_estimate().is_some();
                    }
                }
                let applied = outcomes.iter().find(|outcome| matches!(outcome, Outcome::Applied(_)));
                applied.or(outcomes.first()).copied().unwrap_or(Outcome::Void)
            }
        };
        let mut locked = own.lock();
        locked.last = locked.last.max(seq);
        has_new_estimate |= locked.take_new_estimate().is_some();
        drop(locked);
        (outcome, has_new_estimate.then(|| self.reported_estimate(source, rank)))
    }

    /// Separates the ranks of a stream. All present blocks belong to the one rank that the stream has stated; the carrier gets a new stream
    /// without blocks.
    fn separate(&self, source: &str, rank: i64) -> Result<(), Outcome> {
        let _whole = self.replacing.read_recursive();
        let found = self.stream(source, rank).ok_or(Outcome::Void)?;
        let mut stream = found.lock();
        if stream.is_removed {
            return Err(Outcome::Void);
        }
        let StatedRanks::One(stated) = stream.stated_ranks else {
            return Ok(());
        };
        if stated == rank {
            stream.stated_ranks = StatedRanks::Several;
            return Ok(());
        }
        // Unlike elsewhere, the registry is locked after a stream, as in `remove_ranks`: `replacing` excludes the thread that locks a
        // stream after the registry.
        let mut registry = self.registry.write();
        if registry.find(source, stated).is_some() || !RANK_RANGE.contains(&stated) {
            drop(registry);
            stream.clear_all(&mut self.shared_lock.write());
            stream.set_aside(ANOTHER_STREAM);
            stream.stated_ranks = StatedRanks::Several;
            return Ok(());
        }
        let (model, drafts) = (registry.labels.get(source).cloned(), registry.drafts.get(source).cloned());
        let worker = |rank| {
            let source = source.to_owned();
            Arc::new(Worker { source, rank })
        };
        let mut writer = self.shared_lock.write();
        let number = writer.vacancy().ok_or(Outcome::Full)?;
        writer.rename(stream.number, worker(stated));
        let own = register(&mut writer, number, worker(rank), stream.incarnation, model, drafts);
        drop(writer);
        let mut fresh = own.lock();
        (fresh.last, fresh.stated_ranks) = (stream.last, StatedRanks::Several);
        fresh.evidence.is_whole = stream.evidence.is_whole;
        drop(fresh);
        let ranks = registry.streams.entry(source.into()).or_default();
        if let Some(known) = ranks.iter_mut().find(|known| known.rank == rank) {
            (known.rank, known.carrier) = (stated, Some(rank));
        }
        ranks.push(Rank::new(rank, own, None));
        drop(registry);
        self.forget_decisions(source, Some(rank));
        Ok(())
    }

    /// Returns the stream of a rank that the carrier's payloads state, and creates it if necessary.
    fn stream_of_rank(
        &self,
        source: &str,
        carrier: i64,
        rank: i64,
        (incarnation, seq): (i64, i64),
    ) -> Result<Arc<Mutex<Stream>>, &'static str> {
        let known = |registry: &Registry| {
            let known = registry.find_rank(source, rank)?;
            let is_carried = rank == carrier || known.carrier == Some(carrier);
            Some(is_carried.then(|| known.stream.clone()).ok_or(ANOTHER_STREAM))
        };
        if let Some(known) = known(&self.registry.read()) {
            return known;
        }
        let is_whole = self.stream(source, carrier).is_some_and(|own| own.lock().evidence.is_whole);
        let mut registry = self.registry.write();
        if let Some(known) = known(&registry) {
            return known;
        }
        let mut writer = self.shared_lock.write();
        let is_full = registry.ranks_of(source, carrier).count() > self.limits.ranks || !RANK_RANGE.contains(&rank);
        let number = writer.vacancy().filter(|_| !is_full).ok_or(TOO_MANY)?;
        let (model, drafts) = (registry.labels.get(source).cloned(), registry.drafts.get(source).cloned());
        let worker = Worker {
            source: source.into(),
            rank,
        };
        let stream = register(&mut writer, number, Arc::new(worker), incarnation, model, drafts);
        drop(writer);
        let mut fresh = stream.lock();
        (fresh.last, fresh.evidence.is_whole) = (seq - 1, is_whole);
        drop(fresh);
        let ranks = registry.streams.entry(source.into()).or_default();
        ranks.push(Rank::new(rank, stream.clone(), Some(carrier)));
        Ok(stream)
    }

    /// Returns the estimate of a stream that carries several ranks: the estimate of the first rank that has one.
    fn reported_estimate(&self, source: &str, rank: i64) -> Option<Estimate> {
        let streams = self.streams_of(source, rank);
        streams.iter().find_map(|(_, stream)| stream.lock().reported_estimate())
    }
}
