//! What subscribers deliver: batches, gaps and resets, each to its stream.

use std::cell::RefCell;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Index;
use crate::applying::{Read, Work};
use crate::core::Core;
use crate::decode::{Rejected, decode, normalised};
use crate::gate::Writer;
use crate::scan::{Event, Kind, Schema, Scratch, scan};
use crate::stream::Stream;

/// What became of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was applied, and cleared the whole stream or did not.
    Applied(bool),
    /// It was there before.
    Duplicate,
    /// It is of an ended life.
    Void,
    /// The payload is none that this index reads by itself; nothing was changed.
    Unread,
    /// There are more streams than an index can hold.
    Full,
    /// A panic has left the index changed by half.
    Damaged,
}

/// Kept from one batch to the next to spare allocations.
#[derive(Default)]
struct Room {
    scratch: Scratch,
    work: Work,
}

thread_local! {
    static ROOM: RefCell<Room> = RefCell::default();
}

/// Blocks of a batch up to which it is applied by `try_batch`: some tens of microseconds.
const QUICK_BLOCKS: usize = 256;

impl Index {
    /// Applies a batch.
    pub fn batch(&self, source: &str, rank: i64, incarnation: i64, seq: i64, payload: &[u8]) -> Outcome {
        self.batch_by(&self.schema, source, rank, incarnation, seq, payload)
    }

    /// The same for a payload that is read by another schema.
    pub fn batch_by(&self, schema: &Schema, source: &str, rank: i64, incarnation: i64, seq: i64, payload: &[u8]) -> Outcome {
        ROOM.with_borrow_mut(|room| {
            if scan(payload, schema, &mut room.scratch).is_none() {
                room.scratch.shrink();
                return Outcome::Unread;
            }
            let outcome = self.delivery(source, rank, incarnation, |stream, writer| {
                room.apply(payload, stream, writer, seq)
            });
            room.shrink();
            outcome
        })
    }

    /// Applies a batch, if no lock has to be waited for and there is little to do; None, and nothing has changed, where that is not so.
    pub fn try_batch(&self, source: &str, rank: i64, incarnation: i64, seq: i64, payload: &[u8]) -> Option<Outcome> {
        ROOM.with_borrow_mut(|room| {
            if scan(payload, &self.schema, &mut room.scratch).is_none() {
                room.scratch.shrink();
                return Some(Outcome::Unread);
            }
            if !room.is_quick() {
                return None;
            }
            let stream = self.registry.try_read()?.find(source, rank).cloned()?;
            let mut stream = stream.try_lock()?;
            if stream.gone || incarnation != stream.incarnation || !stream.waiting.is_empty() {
                return None;
            }
            let mut writer = self.gate.try_write()?;
            writer.hold_on();
            let outcome = self.applied(&mut stream, &mut writer, |stream, writer| {
                room.apply(payload, stream, writer, seq)
            });
            room.shrink();
            Some(outcome)
        })
    }

    /// Applies a batch in any form: what `batch` leaves unread is read with care. Returns what was set aside too.
    pub fn batch_in_any_form(
        &self,
        source: &str,
        rank: i64,
        incarnation: i64,
        seq: i64,
        payload: &[u8],
    ) -> (Outcome, Vec<Rejected>) {
        let outcome = self.batch(source, rank, incarnation, seq, payload);
        if outcome != Outcome::Unread {
            return (outcome, Vec::new());
        }
        let batch = decode(payload, self.schema.limits());
        let payload = normalised(&batch.events);
        let outcome = self.batch_by(&self.schema.unlimited(), source, rank, incarnation, seq, &payload);
        (outcome, batch.rejected)
    }

    /// Notes that batches up to `last` are lost.
    pub fn gap(&self, source: &str, rank: i64, incarnation: i64, last: i64) -> Outcome {
        self.delivery(source, rank, incarnation, |stream, _| {
            if last <= stream.last {
                return Outcome::Duplicate;
            }
            stream.counters.gaps += 1;
            stream.last = last;
            Outcome::Applied(false)
        })
    }

    /// Forgets what a stream has told; `incarnation` begins.
    pub fn reset(&self, source: &str, rank: i64, incarnation: i64) -> Outcome {
        self.delivery(source, rank, incarnation, |stream, writer| {
            stream.begin(writer, incarnation);
            Outcome::Applied(false)
        })
    }

    fn delivery(
        &self,
        source: &str,
        rank: i64,
        incarnation: i64,
        apply: impl FnOnce(&mut Stream, &mut Writer<'_, Core>) -> Outcome,
    ) -> Outcome {
        loop {
            let found = self.registry.read().find(source, rank).cloned();
            let stream: Arc<Mutex<Stream>> = match found {
                Some(stream) => stream,
                None => match self.enlist(source, rank, incarnation) {
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
            let mut writer = self.gate.write();
            if incarnation > stream.incarnation {
                stream.begin(&mut writer, incarnation);
            }
            return self.applied(&mut stream, &mut writer, apply);
        }
    }

    fn applied(
        &self,
        stream: &mut Stream,
        writer: &mut Writer<'_, Core>,
        apply: impl FnOnce(&mut Stream, &mut Writer<'_, Core>) -> Outcome,
    ) -> Outcome {
        if self.is_damaged() {
            return Outcome::Damaged;
        }
        let outcome = apply(stream, writer);
        if let Some(member) = writer.members[stream.number as usize].as_mut() {
            member.blocks = stream.blocks;
        }
        if self.limits.memory.is_some() {
            stream.recount(writer);
        }
        outcome
    }
}

impl Room {
    fn apply(&mut self, payload: &[u8], stream: &mut Stream, writer: &mut Writer<'_, Core>, seq: i64) -> Outcome {
        if seq <= stream.last {
            stream.counters.duplicates += 1;
            return Outcome::Duplicate;
        }
        let Self { scratch, work } = self;
        let read = Read { payload, scratch };
        let mut cleared = false;
        for event in &scratch.events {
            cleared |= stream.event(writer, &read, event, work);
        }
        stream.last = seq;
        Outcome::Applied(cleared)
    }

    /// Whether the batch is of few blocks that are stored and removed.
    fn is_quick(&self) -> bool {
        let is_clear = |event: &Event| event.kind == Kind::Cleared;
        !self.scratch.events.iter().any(is_clear) && self.scratch.hashes.len() + self.scratch.events.len() <= QUICK_BLOCKS
    }

    fn shrink(&mut self) {
        self.scratch.shrink();
        self.work.shrink();
    }
}
