//! Compacts the history of one stream: payloads go in, and events that store the live blocks come out.

mod announcements;
mod arena;
mod attributes;
mod blocks;
mod encode;
mod event;
mod export;
mod group_rules;
mod hash_table;
mod state;
#[cfg(test)]
mod tests;
mod unkept;

use kvevents_index::apply::Read;
use kvevents_index::memory::prefetch;
use kvevents_index::wire::decode::{Rejected, normalise};
use kvevents_index::wire::scan::{Event, Kind, Schema, Scratch, scan};

use encode::PayloadWriter;
use state::{Reason, State};

pub use announcements::MAX_ANNOUNCEMENTS;
pub use event::{ExportedEvent, Location, Namespace, Store};
pub use group_rules::MAX_GROUPS;
pub use state::{MAX_DEAD, MAX_EXTRA, MAX_LIVE, MAX_TEXT_BYTES, MAX_UNKEPT, MAX_WAITING, MAX_WIDTHS};

/// Number of blocks that are cleared or examined in negligible time.
const FEW: usize = 1_024;

/// Payloads that are prefetched ahead of the one that is applied.
fn ahead<'a>(payloads: &'a [&'a [u8]]) -> impl Iterator<Item = &'a [u8]> {
    let mut next = payloads.iter().skip(1);
    payloads.iter().map(move |payload| {
        next.next().into_iter().for_each(|next| prefetch::beginning(next));
        *payload
    })
}

/// See the module.
#[derive(Debug, Default)]
pub struct Compactor {
    state: State,
    scratch: Scratch,
    is_restoring: bool,
}

impl Compactor {
    /// Applies one payload. A payload with unreadable events makes the state invalid.
    pub fn apply(&mut self, payload: &[u8], schema: &Schema) {
        if scan(payload, schema, &mut self.scratch).is_some() {
            self.apply_scanned(payload);
        } else {
            self.apply_decoded(payload, schema);
        }
        self.scratch.shrink();
    }

    /// Applies a payload that `payloads` has returned. Repeated stores in it mean several copies, not repeated announcements.
    pub fn restore(&mut self, payload: &[u8], schema: &Schema) {
        self.is_restoring = true;
        self.apply(payload, schema);
        self.is_restoring = false;
    }

    /// Applies a payload in a form that the scanner does not read, as an index does.
    #[cold]
    fn apply_decoded(&mut self, payload: &[u8], schema: &Schema) {
        let read = normalise(payload, schema.limits());
        if read.has_digests {
            return self.state.invalidate("digests");
        }
        let scanned = scan(&read.payload, &schema.unlimited(), &mut self.scratch);
        scanned.expect("normalised events are what the scanner reads");
        self.apply_scanned(&read.payload);
        self.state.copied_levels |= u8::from(read.heartbeat.is_some_and(|beat| beat.attestation.is_some()));
        if read.rejected.iter().any(Rejected::loses_events) {
            self.state.invalidate("payloads");
        }
    }

    /// Applies one payload in a time that is bounded by its length. Returns false and changes nothing if it clears more than a few blocks,
    /// or if the scanner does not read it.
    pub fn apply_quick(&mut self, payload: &[u8], schema: &Schema) -> bool {
        let is_clear = |event: &Event| event.kind == Kind::Cleared;
        let is_quick = scan(payload, schema, &mut self.scratch).is_some()
            && !(self.nodes() + self.state.unkept.len() > FEW && self.scratch.events.iter().any(is_clear));
        if is_quick {
            self.apply_scanned(payload);
        }
        self.scratch.shrink();
        is_quick
    }

    fn apply_scanned(&mut self, payload: &[u8]) {
        if self.scratch.digests {
            // Exported as numbers, they would be other hashes to consumers that keep digests.
            return self.state.invalidate("digests");
        }
        self.state.blocks.grant(payload.len());
        let read = Read {
            payload,
            scratch: &self.scratch,
        };
        self.scratch.events.iter().for_each(|event| self.state.apply(&read, event));
        self.state.end_payload(!self.is_restoring);
    }

    /// Applies payloads.
    pub fn apply_many(&mut self, payloads: &[&[u8]], schema: &Schema) {
        ahead(payloads).for_each(|payload| self.apply(payload, schema));
    }

    /// Applies payloads up to the first one that `apply_quick` does not apply. Returns the number of applied ones.
    pub fn apply_many_quick(&mut self, payloads: &[&[u8]], schema: &Schema) -> usize {
        let left_alone = ahead(payloads).position(|payload| !self.apply_quick(payload, schema));
        left_alone.unwrap_or(payloads.len())
    }

    /// The events that rebuild the state after a clear of everything. None if it is invalid, or events cannot rebuild it.
    pub fn events(&self) -> Option<Vec<ExportedEvent>> {
        let mut events = Vec::new();
        export::export(&self.state, |event| events.push(event))?;
        Some(events)
    }

    /// Returns these events as payloads of at most `limit` bytes; the first event is a clear of everything.
    pub fn payloads(&self, limit: usize, ts: f64) -> Option<Vec<Vec<u8>>> {
        let mut writer = PayloadWriter::new(limit, ts);
        export::export(&self.state, |event| writer.add(&event))?;
        Some(writer.finish())
    }

    /// Records that a part of the stream was not received. The known state is kept and exported.
    pub fn mark_partial(&mut self) {
        self.state.is_partial = true;
    }

    /// Whether a part of the stream was not received since the last clear of everything.
    pub fn is_partial(&self) -> bool {
        self.state.is_partial
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.state = State::default();
    }

    /// Drops everything, and all events until the stream is cleared.
    pub fn invalidate(&mut self, reason: Reason) {
        self.state.invalidate(reason);
    }

    /// Why the state is invalid until the stream is cleared: the exceeded limit, or the argument of `invalidate`.
    pub fn invalid_reason(&self) -> Option<Reason> {
        self.state.invalid
    }

    /// Blocks with at least one copy.
    pub fn live(&self) -> usize {
        self.state.blocks.live()
    }

    /// Blocks that are kept, dead ancestors and orphans too.
    pub fn nodes(&self) -> usize {
        self.state.blocks.live() + self.state.blocks.dead() + self.state.waiting.len()
    }

    /// Approximate heap bytes, without those of the last payload.
    pub fn bytes(&self) -> usize {
        self.state.bytes()
    }
}
