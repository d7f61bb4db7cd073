//! Applies deliveries to their streams: batches, gaps and resets.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::PrefixIndex;
use crate::apply::{EventHashes, PayloadEvents};
use crate::store::shared_state::SharedState;
use crate::stream::{Estimate, StatedRanks, Stream};
use crate::sync::yielding_lock::Writer;
use crate::wire::decode::{Heartbeat, ReadPayload, Rejected, read};
use crate::wire::scan::{Event, Scratch};

/// The outcome of a batch, and a report if the batch needs one.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct ApplyResult {
    /// Outcome of the delivery.
    pub outcome: Outcome,
    /// The report about the batch; None for nearly all batches, about which nothing must be reported.
    pub report: Option<Box<BatchReport>>,
}

/// The contents of a batch other than its blocks, and the effects of the batch other than changes of blocks.
#[derive(Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct BatchReport {
    /// The rejected events and fields.
    pub rejected: Vec<Rejected>,
    /// The last heartbeat of the batch; its digest covers all events of the batch.
    pub heartbeat: Option<Heartbeat>,
    /// Whether the stream had the heartbeat's digest when the batch was applied. None if the batch has no heartbeat or was not applied, or
    /// if blocks that were refused at the memory limit can explain a difference.
    pub agrees: Option<bool>,
    /// Whether the stream held the same blocks as the engine's cache, according to the heartbeat's attestation. None if the heartbeat has
    /// no attestation, or if `agrees` would be None.
    pub attested: Option<bool>,
    /// The reason why answers about the stream are estimates, if this batch has changed the reason. `Some(None)` if the answers have become
    /// exact; None if the batch has not changed it.
    pub estimate: Option<Option<Estimate>>,
}

/// The outcome of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The batch was applied; the value is whether it cleared the whole stream.
    Applied(bool),
    /// The batch was already applied before.
    Duplicate,
    /// The batch belongs to an incarnation that has ended.
    Void,
    /// The index already has the maximum number of streams.
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

/// Buffers that each thread keeps from one batch to the next, to avoid allocations.
#[derive(Default)]
pub(super) struct Buffers {
    pub(super) scratch: Scratch,
    work: EventHashes,
}

thread_local! {
    pub(super) static BUFFERS: RefCell<Buffers> = RefCell::default();
}

impl PrefixIndex {
    /// Applies a batch in any form that engines send. No lock is held while the payload is decoded.
    pub fn batch(&self, source: &str, rank: i64, incarnation: i64, seq: i64, payload: &[u8]) -> ApplyResult {
        BUFFERS.with_borrow_mut(|buffers| {
            let batch = read(payload, &self.schema, &mut buffers.scratch);
            let loses_events = batch.rejected.iter().any(Rejected::loses_events);
            self.apply_read(buffers, (source, rank), (incarnation, seq), batch, loses_events)
        })
    }

    /// Applies events that were decoded within the limits and encoded again, so that their encoding can exceed the limits. Returns None if
    /// an event cannot be read. `loses_events` is whether the original batch had further events that were rejected.
    pub fn events(
        &self,
        stream: (&str, i64),
        incarnation: i64,
        seq: i64,
        payload: &[u8],
        loses_events: bool,
    ) -> Option<ApplyResult> {
        BUFFERS.with_borrow_mut(|buffers| {
            let mut batch = read(payload, &self.unlimited_schema, &mut buffers.scratch);
            if !batch.rejected.is_empty() {
                buffers.shrink();
                return None;
            }
            batch.heartbeat = None;
            Some(self.apply_read(buffers, stream, (incarnation, seq), batch, loses_events))
        })
    }

    /// Applies the events in the scratch of `buffers`. `loses_events` is whether the batch had further events that were rejected.
    fn apply_read(
        &self,
        buffers: &mut Buffers,
        (source, rank): (&str, i64),
        (incarnation, seq): (i64, i64),
        batch: ReadPayload<'_>,
        loses_events: bool,
    ) -> ApplyResult {
        let stated = buffers.scratch.stated_rank();
        let (mut estimate, mut is_of_stream) = (None, false);
        let mut outcome = self.delivery(source, rank, incarnation, |stream, writer| {
            is_of_stream = stream.stated_ranks.admit(stated);
            if !is_of_stream {
                return Outcome::Applied(false);
            }
            let outcome = buffers.apply(&batch.bytes, stream, writer, seq, |_| true);
            if matches!(outcome, Outcome::Applied(_)) {
                stream.evidence.is_whole &= !loses_events;
                estimate = stream.take_new_estimate();
            }
            outcome
        });
        if outcome == Outcome::Applied(false) && !is_of_stream {
            let position = (incarnation, seq);
            (outcome, estimate) = self.apply_by_rank(buffers, (source, rank), position, &batch.bytes, loses_events);
        }
        buffers.shrink();
        let mut found = BatchReport {
            rejected: batch.rejected,
            estimate,
            ..BatchReport::default()
        };
        if let Some(beat) = batch.heartbeat {
            if matches!(outcome, Outcome::Applied(_)) {
                let (digest, attestation) = (beat.digest.as_deref(), beat.attestation);
                (found.agrees, found.attested) = self.compare(source, rank, stated, digest, attestation);
            }
            found.heartbeat = Some(*beat);
        }
        ApplyResult::new(outcome, found)
    }

    /// Records that the batches up to the number `last` are lost.
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

    /// Begins an incarnation, which removes all blocks of the stream.
    pub fn reset(&self, source: &str, rank: i64, incarnation: i64) -> Outcome {
        let outcome = self.delivery(source, rank, incarnation, |stream, writer| {
            stream.begin_incarnation(writer, incarnation);
            Outcome::Applied(false)
        });
        if outcome != Outcome::Void {
            self.end_carried(source, rank);
            self.forget_decisions(source, Some(rank));
        }
        outcome
    }

    pub(super) fn delivery(
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
                // Until this delivery, the batches of this rank arrived in the stream of a different rank. This delivery shows that the
                // rank now has a delivered stream of its own.
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
            if stream.is_removed {
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

    /// Calls `apply` with a stream and the shared state. Then removes those speculative entries of the stream's worker that end with a
    /// stored block.
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
            if is_new || outcome == Outcome::Applied(true) {
                self.forget_decisions(source, Some(rank));
            }
            self.confirm_decisions(source, rank, &stored);
        }
        outcome
    }
}

impl Buffers {
    /// Applies the events that `is_meant` accepts. `bytes` are those of the `ReadPayload`.
    pub(super) fn apply(
        &mut self,
        bytes: &[u8],
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
        let read = PayloadEvents { bytes, scratch };
        stream.grant(scratch.payload_bytes);
        let mut cleared = false;
        for event in scratch.events.iter().filter(|event| is_meant(event)) {
            cleared |= stream.apply_event(writer, &read, event, work);
        }
        stream.mark_fresh_uncertain(writer);
        stream.publish_groups(writer);
        stream.last = seq;
        Outcome::Applied(cleared)
    }

    pub(super) fn shrink(&mut self) {
        self.scratch.shrink();
        self.work.shrink();
    }
}
