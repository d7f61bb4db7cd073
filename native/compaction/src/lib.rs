//! Compacts the history of one stream: it applies payloads, and returns events that store the live blocks.

mod announcements;
mod arena;
mod attributes;
mod blocks;
#[cfg(test)]
mod bounded_exports;
mod encode;
mod event;
mod examined_blocks;
mod export;
mod group_rules;
mod hash_table;
#[cfg(test)]
mod lora_tests;
mod state;
#[cfg(test)]
mod tests;
mod unkept;

use std::collections::BTreeMap;

use kvevents_index::apply::PayloadEvents;
use kvevents_index::limits::RANKS;
use kvevents_index::memory::prefetch;
use kvevents_index::wire::decode::{ReadPayload, Rejected, read};
use kvevents_index::wire::scan::{Event, Kind, Schema, Scratch};

use encode::PayloadWriter;
use state::{Reason, State};

/// Compacts the history of one stream. If payloads of the stream state several ranks, each rank has its own state, as in the index. A batch
/// with a rank concerns only that rank, and a batch without a rank concerns all ranks.
#[derive(Debug, Default)]
pub struct Compactor {
    /// The state of the first rank.
    state: State,
    /// The first rank that a payload has stated; None if no payload has stated a rank.
    rank: Option<i64>,
    /// The states of all ranks except the first.
    others: BTreeMap<i64, State>,
    scratch: Scratch,
    is_restoring: bool,
}

impl Compactor {
    /// Applies one payload. A payload with an unreadable event makes the state invalid.
    pub fn apply(&mut self, payload: &[u8], schema: &Schema) {
        let batch = read(payload, schema, &mut self.scratch);
        self.apply_read(&batch);
        self.scratch.shrink();
    }

    /// Applies a payload that the method `payloads` has returned. In such a payload, a repeated store is always another copy.
    pub fn restore(&mut self, payload: &[u8], schema: &Schema) {
        self.is_restoring = true;
        self.apply(payload, schema);
        self.is_restoring = false;
    }

    /// Applies the events in the scratch, as the index does.
    fn apply_read(&mut self, batch: &ReadPayload<'_>) {
        if self.scratch.digests {
            // An export contains hashes as numbers, which consumers that store digests would not recognise.
            return self.invalidate("digests");
        }
        let stated = self.scratch.stated_rank();
        if self.others.is_empty() && (stated.is_none() || self.rank.is_none_or(|rank| stated == Some(rank))) {
            self.rank = self.rank.or(stated);
            apply_to(&mut self.state, &batch.bytes, &self.scratch, !self.is_restoring, |_| true);
        } else {
            self.apply_by_rank(&batch.bytes, stated);
        }
        let is_attested = batch.heartbeat.as_ref().is_some_and(|beat| beat.attestation.is_some());
        let is_single = self.others.is_empty();
        // Each rank attests its own blocks, as in the index.
        for (_, state) in self
            .states_mut()
            .filter(|(rank, _)| is_attested && (is_single || *rank == stated))
        {
            state.copied_levels |= 1;
        }
        if batch.rejected.iter().any(Rejected::loses_events) {
            self.invalidate("payloads");
        }
    }

    /// Applies a payload of a stream whose payloads state several ranks.
    #[cold]
    fn apply_by_rank(&mut self, bytes: &[u8], stated: Option<i64>) {
        let has_reports = !self.is_restoring;
        let Some(rank) = stated else {
            let states = std::iter::once(&mut self.state).chain(self.others.values_mut());
            states.for_each(|state| {
                apply_to(state, bytes, &self.scratch, has_reports, |event| event.kind == Kind::Cleared);
            });
            if !self.scratch.hashes.is_empty() {
                self.invalidate("ranks");
            }
            return;
        };
        if self.rank != Some(rank) && !self.others.contains_key(&rank) {
            if self.others.len() + 1 >= RANKS {
                return self.invalidate("ranks");
            }
            let mut state = State::default();
            // Lost batches can have belonged to this rank.
            state.evidence.is_whole = !self.is_partial();
            if let Some(reason) = self.invalid_reason() {
                state.invalidate(reason);
            }
            self.others.insert(rank, state);
        }
        let state = self.others.get_mut(&rank).unwrap_or(&mut self.state);
        apply_to(state, bytes, &self.scratch, has_reports, |_| true);
    }

    /// The states of all ranks.
    fn states(&self) -> impl Iterator<Item = (Option<i64>, &State)> {
        let others = self.others.iter().map(|(&rank, state)| (Some(rank), state));
        std::iter::once((self.rank, &self.state)).chain(others)
    }

    fn states_mut(&mut self) -> impl Iterator<Item = (Option<i64>, &mut State)> {
        let others = self.others.iter_mut().map(|(&rank, state)| (Some(rank), state));
        std::iter::once((self.rank, &mut self.state)).chain(others)
    }

    /// Applies payloads, and prefetches the beginning of the next one.
    pub fn apply_many(&mut self, payloads: &[&[u8]], schema: &Schema) {
        let mut next = payloads.iter().skip(1);
        for payload in payloads {
            next.next().into_iter().for_each(|next| prefetch::beginning(next));
            self.apply(payload, schema);
        }
    }

    /// Returns payloads with the events that rebuild the state. A payload has at most `limit` bytes, unless one block alone takes more.
    /// Each rank has its own payloads; the first of them only clears everything. Returns None if the state is invalid, or if no order of
    /// events is known that rebuilds it.
    pub fn payloads(&self, limit: usize, ts: f64) -> Option<Vec<Vec<u8>>> {
        let mut payloads = Vec::new();
        for (rank, state) in self.states() {
            let mut writer = PayloadWriter::new(limit, ts, rank);
            export::export(state, |event| writer.add(&event))?;
            payloads.extend(writer.finish());
        }
        Some(payloads)
    }

    /// Records that a part of the stream was not received. The state stays valid, and can be exported.
    pub fn mark_partial(&mut self) {
        self.states_mut().for_each(|(_, state)| state.evidence.is_whole = false);
    }

    /// Whether a part of the stream was not received after the last clear of everything.
    pub fn is_partial(&self) -> bool {
        self.states().any(|(_, state)| !state.evidence.is_whole)
    }

    /// Drops the state, and ignores all events until the next clear of everything.
    fn invalidate(&mut self, reason: Reason) {
        self.states_mut().for_each(|(_, state)| state.invalidate(reason));
    }

    /// The reason why the state is invalid until the next clear of everything: the exceeded limit, or the unreadable input.
    pub fn invalid_reason(&self) -> Option<Reason> {
        self.states().find_map(|(_, state)| state.invalid)
    }

    /// Number of blocks with at least one copy.
    pub fn live(&self) -> usize {
        self.states().map(|(_, state)| state.blocks.live()).sum()
    }

    /// Number of stored blocks, including dead ancestors and orphans.
    pub fn nodes(&self) -> usize {
        let nodes = |state: &State| state.blocks.live() + state.blocks.dead() + state.waiting.len();
        self.states().map(|(_, state)| nodes(state)).sum()
    }

    /// Approximate number of heap bytes, without the scratch for the last payload.
    pub fn bytes(&self) -> usize {
        self.states().map(|(_, state)| state.bytes()).sum()
    }
}

/// Applies the events that `is_meant` accepts. `has_reports` is as in `State::end_payload`.
#[inline]
fn apply_to(state: &mut State, bytes: &[u8], scratch: &Scratch, has_reports: bool, is_meant: impl Fn(&Event) -> bool) {
    state.blocks.collisions.grant(scratch.payload_bytes);
    let read = PayloadEvents { bytes, scratch };
    let meant = scratch.events.iter().filter(|event| is_meant(event));
    meant.for_each(|event| state.apply(&read, event));
    state.end_payload(has_reports);
}
