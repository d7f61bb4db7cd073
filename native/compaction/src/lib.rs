//! Collapses the history of one stream: payloads go in, and what is still live comes out as events.

mod announcements;
mod apply;
mod arena;
mod attributes;
mod blocks;
mod encode;
mod event;
mod export;
mod group_rules;
#[cfg(test)]
mod tests;

use kvevents_index::applying::Read;
use kvevents_index::prefetch;
use kvevents_index::scan::{Schema, Scratch, scan};

use apply::{Reason, State};
use encode::PayloadWriter;

pub use announcements::MAX_ANNOUNCEMENTS;
pub use apply::{MAX_DEAD, MAX_EXTRA, MAX_LIVE, MAX_TEXT_BYTES, MAX_WAITING, MAX_WIDTHS};
pub use event::{ExportedEvent, Location, Namespace, Store};
pub use group_rules::MAX_GROUPS;

/// See the module.
#[derive(Debug, Default)]
pub struct Compactor {
    state: State,
    scratch: Scratch,
}

impl Compactor {
    /// Applies one payload. False, and nothing has changed, if the scanner does not read it.
    pub fn apply(&mut self, payload: &[u8], schema: &Schema) -> bool {
        let is_read = scan(payload, schema, &mut self.scratch).is_some();
        if is_read && self.scratch.digests {
            // Exported as numbers, they would be other hashes to consumers that keep digests.
            self.state.invalidate("digests");
        } else if is_read {
            let read = Read {
                payload,
                scratch: &self.scratch,
            };
            self.scratch.events.iter().for_each(|event| self.state.apply(&read, event));
        }
        self.scratch.shrink();
        is_read
    }

    /// Applies payloads up to the first one that is not read. Returns how many were applied.
    pub fn apply_many(&mut self, payloads: &[&[u8]], schema: &Schema) -> usize {
        let mut next = payloads.iter().skip(1);
        let unread = payloads.iter().position(|payload| {
            next.next().into_iter().for_each(|next| prefetch::beginning(next));
            !self.apply(payload, schema)
        });
        unread.unwrap_or(payloads.len())
    }

    /// The events that rebuild the state after a clear of everything. None if it is invalid, or events cannot rebuild it.
    pub fn events(&self) -> Option<Vec<ExportedEvent>> {
        let mut events = Vec::new();
        export::export(&self.state, |event| events.push(event))?;
        Some(events)
    }

    /// The same as payloads of at most `limit` bytes; the first event is a clear of everything.
    pub fn payloads(&self, limit: usize, ts: f64) -> Option<Vec<Vec<u8>>> {
        let mut writer = PayloadWriter::new(limit, ts);
        export::export(&self.state, |event| writer.add(&event))?;
        Some(writer.finish())
    }

    /// Takes note that some of the stream was never seen. What is known is kept, and exported.
    pub fn mark_partial(&mut self) {
        self.state.is_partial = true;
    }

    /// Whether some of the stream was never seen since the last clear of everything.
    pub fn is_partial(&self) -> bool {
        self.state.is_partial
    }

    /// Drops everything.
    pub fn clear(&mut self) {
        self.state = State::default();
    }

    /// Drops everything, and whatever comes until the stream is cleared.
    pub fn invalidate(&mut self, reason: Reason) {
        self.state.invalidate(reason);
    }

    /// Why nothing is kept until the stream is cleared: what there was too much of, or what `invalidate` was called with.
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

    /// Heap bytes, about; those of the last payload apart.
    pub fn bytes(&self) -> usize {
        self.state.bytes()
    }
}
