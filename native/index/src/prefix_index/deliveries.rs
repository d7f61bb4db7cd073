//! Applies deliveries of subscribers to their streams: batches, gaps and resets.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::Index;
use crate::apply::{Read, Work};
use crate::store::shared_state::SharedState;
use crate::stream::{Estimate, StatedRanks, Stream};
use crate::sync::yielding_lock::Writer;
use crate::wire::decode::{Heartbeat, Rejected, normalise, normalise_whole};
use crate::wire::scan::{Event, Schema, Scratch, scan};

/// The outcome of a batch, and its report if it has one.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct ApplyResult {
    /// Its outcome.
    pub outcome: Outcome,
    /// What the tolerant decoder found; None, as nearly always, if it found nothing.
    pub report: Option<Box<BatchReport>>,
}

/// Information in a batch besides blocks.
#[derive(Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct BatchReport {
    /// The rejected events and fields.
    pub rejected: Vec<Rejected>,
    /// The last heartbeat: its digest is of everything up to the end of the batch.
    pub heartbeat: Option<Heartbeat>,
    /// Whether the stream had that digest when the batch was applied; None without a heartbeat, for a batch that was not applied, and if
    /// blocks that were refused at the memory limit can explain the difference.
    pub agrees: Option<bool>,
    /// Whether the stream held the same blocks as the engine's cache, by the heartbeat's attestation; None as for `agrees`, and without an
    /// attestation.
    pub attested: Option<bool>,
    /// Why answers about the stream are estimates from this batch on, or that they no longer are; None if that has not changed.
    pub estimate: Option<Option<Estimate>>,
}

/// The outcome of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was applied, and cleared the whole stream or did not.
    Applied(bool),
    /// It was applied before.
    Duplicate,
    /// It belongs to an incarnation that has ended.
    Void,
    /// The limit of streams of an index is reached.
    Full,
    /// A panic has left the index half changed.
    Damaged,
}

impl ApplyResult {
    fn new(outcome: Outcome, report: BatchReport) -> Self {
        let report = (report != BatchReport::default()).then(|| Box::new(report));
        Self { outcome, report }
    }
}

/// Buffers that are kept from one batch to the next, to avoid allocations.
#[derive(Default)]
pub(super) struct Room {
    scratch: Scratch,
    work: Work,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
}

/// What was read of a batch besides its events.
#[derive(Default)]
pub(super) struct Beside {
    /// See `Scratch::stated_rank`.
    pub(super) stated: Option<i64>,
    /// Whether it stores or removes blocks.
    pub(super) has_blocks: bool,
    /// Whether it has events that cannot be read.
    pub(super) loses_events: bool,
    heartbeat: Option<Heartbeat>,
}

impl Index {
    /// Applies a batch in any form that a peer may send. No lock is held while it is decoded.
    pub fn batch(&self, source: &str, rank: i64, incarnation: i64, seq: i64, payload: &[u8]) -> ApplyResult {
        let stream = (source, rank);
        let applied = self.apply_scanned(&self.schema, stream, incarnation, seq, payload, &mut Beside::default());
        applied.unwrap_or_else(|| self.apply_decoded(stream, incarnation, seq, payload))
    }

    /// Applies the events of a payload, which can exceed the limits of peers. None if one of them cannot be read. `loses_events` is whether
    /// its batch has others, which could not be read before.
    pub fn events(
        &self,
        stream: (&str, i64),
        incarnation: i64,
        seq: i64,
        payload: &[u8],
        loses_events: bool,
    ) -> Option<ApplyResult> {
        let apply = |payload: &[u8]| {
            let mut beside = Beside {
                loses_events,
                ..Beside::default()
            };
            self.apply_scanned(&self.normalised, stream, incarnation, seq, payload, &mut beside)
        };
        apply(payload).or_else(|| apply(&normalise_whole(payload, &self.normalised)?))
    }

    #[cold]
    fn apply_decoded(&self, stream: (&str, i64), incarnation: i64, seq: i64, payload: &[u8]) -> ApplyResult {
        let read = normalise(payload, self.schema.limits());
        let mut beside = Beside {
            heartbeat: read.heartbeat,
            loses_events: read.rejected.iter().any(Rejected::loses_events),
            ..Beside::default()
        };
        let applied = self.apply_scanned(&self.normalised, stream, incarnation, seq, &read.payload, &mut beside);
        let ApplyResult { outcome, report } = applied.expect("normalised events are what the scanner reads");
        let found = BatchReport {
            heartbeat: beside.heartbeat,
            rejected: read.rejected,
            ..report.map_or_else(BatchReport::default, |report| *report)
        };
        ApplyResult::new(outcome, found)
    }

    /// Applies a payload that the scanner reads by a schema. Returns None and changes nothing for other payloads.
    fn apply_scanned(
        &self,
        schema: &Schema,
        (source, rank): (&str, i64),
        incarnation: i64,
        seq: i64,
        payload: &[u8],
        beside: &mut Beside,
    ) -> Option<ApplyResult> {
        ROOM.with_borrow_mut(|room| {
            if scan(payload, schema, &mut room.scratch).is_none() {
                room.scratch.shrink();
                return None;
            }
            (beside.stated, beside.has_blocks) = (room.scratch.stated_rank(), !room.scratch.hashes.is_empty());
            let (mut found, mut is_of_stream) = (BatchReport::default(), false);
            let mut outcome = self.delivery(source, rank, incarnation, |stream, writer| {
                is_of_stream = stream.stated_ranks.admit(beside.stated);
                if !is_of_stream {
                    return Outcome::Applied(false);
                }
                let outcome = room.apply(payload, stream, writer, seq, |_| true);
                if matches!(outcome, Outcome::Applied(_)) {
                    stream.evidence.is_whole &= !beside.loses_events;
                    found.estimate = stream.take_new_estimate();
                }
                outcome
            });
            if outcome == Outcome::Applied(false) && !is_of_stream {
                let position = (incarnation, seq);
                (outcome, found.estimate) = self.apply_by_rank(room, (source, rank), position, payload, beside);
            }
            room.shrink();
            if let (Outcome::Applied(_), Some(beat)) = (outcome, &beside.heartbeat) {
                let (digest, attestation) = (beat.digest.as_deref(), beat.attestation);
                (found.agrees, found.attested) = self.compare(source, rank, beside.stated, digest, attestation);
            }
            Some(ApplyResult::new(outcome, found))
        })
    }

    /// Records that batches up to `last` are lost.
    pub fn gap(&self, source: &str, rank: i64, incarnation: i64, last: i64) -> Outcome {
        let outcome = self.delivery(source, rank, incarnation, |stream, _| {
            if last <= stream.last {
                return Outcome::Duplicate;
            }
            stream.counters.gaps += 1;
            stream.evidence.is_whole = false;
            stream.last = last;
            Outcome::Applied(false)
        });
        if outcome == Outcome::Applied(false) {
            let streams = self.streams_of(source, rank);
            streams.iter().for_each(|(_, stream)| stream.lock().evidence.is_whole = false);
        }
        outcome
    }

    /// Removes all blocks of a stream; `incarnation` begins.
    pub fn reset(&self, source: &str, rank: i64, incarnation: i64) -> Outcome {
        let outcome = self.delivery(source, rank, incarnation, |stream, writer| {
            stream.begin_incarnation(writer, incarnation);
            Outcome::Applied(false)
        });
        if outcome != Outcome::Void {
            self.end_carried(source, rank);
            self.overlay.lock().forget(source, Some(rank));
        }
        outcome
    }

    fn delivery(
        &self,
        source: &str,
        rank: i64,
        incarnation: i64,
        apply: impl FnOnce(&mut Stream, &mut Writer<'_, SharedState>) -> Outcome,
    ) -> Outcome {
        loop {
            let found = {
                let registry = self.registry.read();
                let found = registry.find_rank(source, rank);
                found.map(|found| (found.stream.clone(), found.carrier.is_some()))
            };
            let stream: Arc<Mutex<Stream>> = match found {
                Some((stream, false)) => stream,
                // Another stream carries the rank, which has a stream of its own now.
                Some(_) => {
                    self.remove_ranks(source, |other| other.rank == rank && other.carrier.is_some());
                    continue;
                }
                None => match self.get_or_create(source, rank, incarnation) {
                    Ok(stream) => stream,
                    Err(outcome) => return outcome,
                },
            };
            let mut stream = stream.lock();
            if stream.gone {
                continue;
            }
            if self.is_damaged() {
                return Outcome::Damaged;
            }
            if incarnation < stream.incarnation {
                stream.counters.void += 1;
                return Outcome::Void;
            }
            let ends_ranks = incarnation > stream.incarnation && stream.stated_ranks == StatedRanks::Several;
            let outcome = self.apply_to(&mut stream, (source, rank), incarnation, apply);
            drop(stream);
            if ends_ranks {
                self.end_carried(source, rank);
            }
            return outcome;
        }
    }

    /// Applies something to a stream, and confirms the decisions for its worker.
    pub(super) fn apply_to(
        &self,
        stream: &mut Stream,
        (source, rank): (&str, i64),
        incarnation: i64,
        apply: impl FnOnce(&mut Stream, &mut Writer<'_, SharedState>) -> Outcome,
    ) -> Outcome {
        stream.stored = self.overlay.lock().expects(source, rank).then(Vec::new);
        let mut writer = self.shared_lock.write();
        let is_new = incarnation > stream.incarnation;
        if is_new {
            stream.begin_incarnation(&mut writer, incarnation);
        }
        if self.is_damaged() {
            return Outcome::Damaged;
        }
        let outcome = apply(stream, &mut writer);
        if let Some(member) = &writer.view.members[stream.number as usize] {
            member.blocks.store(stream.blocks, Ordering::Relaxed);
        }
        if self.limits.memory.is_some() {
            stream.recount(&mut writer);
        }
        drop(writer);
        if let Some(stored) = stream.stored.take() {
            let mut overlay = self.overlay.lock();
            if is_new || outcome == Outcome::Applied(true) {
                overlay.forget(source, Some(rank));
            }
            overlay.confirm(source, rank, &stored);
        }
        outcome
    }
}

impl Room {
    /// Applies the events that are meant.
    pub(super) fn apply(
        &mut self,
        payload: &[u8],
        stream: &mut Stream,
        writer: &mut Writer<'_, SharedState>,
        seq: i64,
        is_meant: impl Fn(&Event) -> bool,
    ) -> Outcome {
        if seq <= stream.last {
            stream.counters.duplicates += 1;
            return Outcome::Duplicate;
        }
        if stream.last < 0 && seq > 0 {
            stream.evidence.is_whole = false;
        }
        let Self { scratch, work } = self;
        let read = Read { payload, scratch };
        stream.grant(payload.len());
        let mut cleared = false;
        for event in scratch.events.iter().filter(|event| is_meant(event)) {
            cleared |= stream.apply_event(writer, &read, event, work);
        }
        stream.mark_fresh_uncertain(writer);
        stream.publish_groups(writer);
        stream.last = seq;
        Outcome::Applied(cleared)
    }

    fn shrink(&mut self) {
        self.scratch.shrink();
        self.work.shrink();
    }
}
